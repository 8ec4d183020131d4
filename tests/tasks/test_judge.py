"""A judge behind an OpenAI-style address: scores, cache, costs, and a server that misbehaves in
every way."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Workshop, groups, metrics, read_lines

from shoal import cli
from shoal.config.sections.reward import JudgeSection, RewardSection
from shoal.job.task import given_rewards
from shoal.records import Example, ShoalError
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Scores
from shoal.tasks.graders import judge_model
from shoal.tasks.graders.judge_model import JudgeFunction, _completions_url, read_score

KEY = "sk-secret-4711"
GRADER = ["reward.judge.model=grader"]


class Server:
    """Answers with `reply(text asked, number of the request)`: a text, an object, a status, or None
    to hang."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.reply: Callable[[str, int], Any] = lambda text, number: "Score: 5"
        self.refuse: Callable[[dict[str, Any]], str] = lambda body: ""
        self.open, self.most, self.lock, self.gone = 0, 0, threading.Lock(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *_: Any) -> None: ...

            def do_POST(self) -> None:
                outer.answer(self)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def answer(self, request: Any) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        with self.lock:
            self.asked.append(body | {"path": request.path})
            self.headers.append(request.headers["Authorization"])
            self.open += 1
            self.most, number = max(self.most, self.open), len(self.asked)
        reply = self.reply(body["messages"][0]["content"], number)
        if reply is None:
            self.gone.wait(30)
        with self.lock:
            self.open -= 1
        status, data = (reply, b"broken") if isinstance(reply, int) else (200, reply)
        refusal = self.refuse(body)
        if refusal:
            status, data = 400, refusal.encode()
        if isinstance(data, str):
            data = {"choices": [{"message": {"content": data}}], "usage": {"total_tokens": 7}}
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(judge_model, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    made = Server()
    yield made
    made.gone.set()
    made.http.shutdown()
    made.http.server_close()


def section(tmp_path: Path, seconds: float = 20.0, **changes: Any) -> RewardSection:
    own: dict[str, Any] = {"model": "grader", "cache": str(tmp_path / "cache")} | changes
    own.setdefault("template", "{completion}|{prompt}|{answer}")
    return RewardSection(
        timeout_seconds=seconds, on_error="skip", max_failed_share=1.0, judge=JudgeSection(**own)
    )


def ask(url: str, reward: RewardSection, *texts: str) -> tuple[list[Any], dict[str, list[float]]]:
    logged: dict[str, list[float]] = {}

    def log_metric(name, value):
        return logged.setdefault(name, []).append(float(value))

    scores = asyncio.run(
        JudgeFunction(url, reward)(
            ["2 + 3"] * len(texts),
            list(texts),
            answer=["5"] * len(texts),
            log_metric=log_metric,
        )
    )
    return scores, logged


def pooled(url: str, reward: RewardSection, *texts: str) -> Scores:
    functions = given_rewards(RewardSection(**{**vars(reward), "functions": (f"judge:{url}",)}))
    with RewardPool(functions, reward) as pool:
        pool.submit(0, [Example(0, "2 + 3", {"answer": "5"})], [texts], [[[1]] * len(texts)], 1)
        return pool.collect(wait=True)[0][1]


def test_a_score_is_read_and_the_request_is_as_the_field_has_it(
    server: Server, tmp_path: Path
) -> None:
    server.reply = lambda text, number: {
        "a": "Score: 7",
        "b": "3 of 4 parts. **Score: 2.5/10**",
        "c": "0",
    }[text[0]]
    scores, logged = ask(server.url, section(tmp_path), "a", "b", "c")
    assert scores == [0.7, 0.25, 0.0]
    assert {
        (one["model"], one["temperature"], one["max_tokens"], one["path"]) for one in server.asked
    } == {("grader", 0, 512, "/v1/chat/completions")}
    assert sorted(one["messages"][0]["content"] for one in server.asked) == [
        "a|2 + 3|5",
        "b|2 + 3|5",
        "c|2 + 3|5",
    ]
    assert set(server.headers) == {f"Bearer {KEY}"}
    assert (
        logged["judge_requests"],
        logged["judge_tokens"],
        logged["judge_cached"],
        logged["judge_failed"],
    ) == ([1.0] * 3, [7.0] * 3, [0.0] * 3, [0.0] * 3)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 4 out of 10", 4),
        ("Score: 3 (0 = useless, 10 = perfect)", 3),
        ("Score: 7\n\n1. short\n2. clear", 7),
        ("Score: 7\n- 3 errors", 7),
        ("Of 10 points: **Score:** **8/10**.", 8),
        ("SCORE (0-10): 7", 7),
        ("Score:\n8.", 8),
        ("Score: 3? No.\nFinal score: 6.5 of 10", 6.5),
        ("Score: \\boxed{8}", 8),
        ("Score: 3 of the 10 criteria", 3),
        ("<think>Score: 3, or 2</think>\n9", 9),
        ("Score：9", 9),
        ("Score: -3", -3),
        ("Score: 10", 10),
        ("8", 8),
        ("8/10", 8),
        ("**8**", 8),
        (" 7 out of 10. ", 7),
        ("[[8]]", 8),
        ("$8$", 8),
        ('{"score": 8, "reason": "Score: 3"}', 8),
        ('```json\n{"reason": "a", "score": "8/10"}\n```', 8),
        ("I'd give 8 of 10", None),
        ("7 or 8", None),
        ("Score: 7-8", None),
        ("Score: 0 to 10", None),
        ("Score: 8,5", None),
        ("Score: 8. Wait, Score: N", None),
        ("Score: 4/5", None),
        ("80%", None),
        ("Score: 8th", None),
        ("Score: 1e1", None),
        ("<think>Score: 3", None),
        ('{"score": true}', None),
        ('{"score": [8]}', None),
        ("Score: ٧", None),
        ("", None),
        ('{"score": 1' + "0" * 400 + "}", None),
        ("8" + " " * 100_000 + "x", None),
        ("Score: 8.5.1", None),
        ("Score:\n\n1. The answer is wrong\n2. It is long", None),
        ("Score:\n**8/10**. Good", 8),
        ("Score: 8 (out of 10)", 8),
        ("Score: 4 (out of 5)", None),
        ("Score: **4** out of 5", None),
        ("Score: **8** / 10", 8),
        ("Score: 4, on a scale of 5", None),
        ("Score: 4 / 5 and 9", None),
        ("Score: 4 out of 5-6", None),
        ("Score: 7~8", None),
        ("Score: 6 -> 8", None),
        ("Score: 7..8", None),
        ("Score: 4 1/2", None),
        ("Score: 4½", None),
        ("Score: 2+3=5", None),
        ("Score: 3 and 9 for style", None),
        ("Score: 8 - good", 8),
        ("Score: 7...", 7),
        ("8 (Score: 10 = perfect)", None),
        ("Score: 8 (Score: 10 = perfect)", 8),
        ("Score: 8/10 = good", 8),
        ("Score: 10 means perfect. I give 4", None),
        ("Score: 10 being the best, 6", None),
        ("Score: 10=best", None),
        ("Score: 10 (= perfect), so 8", None),
        ("Score: **10** = perfect\n8", None),
        ("(Score: 8)", 8),
        ("Score: 10 is the best; this is a 4", None),
        ("Score: 8 is fair", 8),
        ("Score: 10 would be perfect", None),
        ("Score: 10 – perfect, 0 – useless. Mine: 5", None),
        ("Score: 0=useless, 10=perfect\nScore: 3", 3),
        ("Score: 10 if correct, 0 if wrong. This: 3", None),
        ("Score: 10 for a right answer, and 0 for a wrong one", None),
        ("Score: 10 represents a perfect answer", None),
        ("Score: 10 (best) to 0 (worst): 4", None),
        ("Score: 8 for effort, mostly right", 8),
        ("Score: 8 (good) for its form", 8),
        ("Score: 4 points out of 5", None),
        ("Score: 8 points out of 10", 8),
        ("Score: 8 stars (of 10)", 8),
        ("Score (10 = perfect): 8", 8),
        ("Score: 8 (10 = perfect)", 8),
        ("1 000", None),
        ("Score: 1 000", None),
        ("Score: 1\u202f000", None),
        ("Score: 1'000", None),
        ("Score: 1_000", None),
        ("Score: 1\u00a0000/1000", None),
        ("Score: 8 10", None),
        ("**1 000**", None),
        ('{"score": "1 000"}', None),
        ("Score: 4 out of a possible 5", None),
        ("Score: 4 (out of a maximum of 5)", None),
        ("Score: 4 [out of 5]", None),
        ("Score: 4 (max 5)", None),
        ("Score: 4 on a scale from 1 to 5", None),
        ("Score: 8 out of a possible 10", 8),
        ("Score: 8 (max. 10)", 8),
        ("Score: 8 on a scale of 0 to 10", 8),
        ("Score: 8 (on a scale of 1-10)", 8),
        ("Score: 10 minus 3 = 7", None),
        ("Score: 6 plus 1 for style", None),
        ("Score: 3 x 2 = 6", None),
        ("Score: 8 of" + " " * 100_000 + "x", 8),
        ("Score: 8" + " =" * 50_000, None),
        ("Score: 8" + " " * 100_000 + "x", 8),
        ("Score: 10 = " * 5_000, None),
    ],
)
def test_where_the_score_stands(reply: str, score: float | None) -> None:
    started = time.process_time()
    assert read_score(reply, 10.0) == score
    assert time.process_time() - started < 1.0


def test_a_scale_is_the_one_that_was_asked_for(server: Server, tmp_path: Path) -> None:
    server.reply = lambda text, number: "Score: 4/5" if text[0] == "a" else "80%"
    scores, _ = ask(server.url, section(tmp_path, score_range=(1.0, 5.0)), "a", "b")
    assert scores[0] == 0.75 and "with a number from 1 to 5" in scores[1]
    scores, _ = ask(server.url, section(tmp_path, score_range=(0.0, 100.0)), "a", "b")
    assert "with a number from 0 to 100" in scores[0] and scores[1] == 0.8


def test_a_number_that_may_be_cut_is_no_score(server: Server, tmp_path: Path) -> None:
    texts = {
        "a": "Score: 1",
        "b": "Score: 7",
        "c": "Score: 7\n1. First, 1",
        "d": "Score: 7.",
        "e": "0",
    }
    server.reply = lambda text, number: {
        "choices": [{"message": {"content": texts[text[0]]}, "finish_reason": "length"}]
    }
    for _ in range(2):  # the second time from the cache
        scores, _ = ask(server.url, section(tmp_path), *texts)
        assert (
            "raise reward.judge.max_tokens" in scores[0]
            and "raise reward.judge.max_tokens" in scores[3]
        )
        assert [scores[1], scores[2], scores[4]] == [0.7, 0.7, 0.0]


@pytest.mark.parametrize(
    ("form", "sent"), [("json_object", {"type": "json_object"}), ("json_schema", None)]
)
def test_a_reply_is_requested_as_json(
    server: Server, tmp_path: Path, form: str, sent: dict[str, Any] | None
) -> None:
    server.reply = lambda text, number: '{"reason": "Score: 3 at first", "score": 9}'
    scores, _ = ask(server.url, section(tmp_path, template="", response_format=form), "a")
    request = server.asked[0]
    assert scores == [0.9] and request["response_format"]["type"] == form
    assert sent is None or request["response_format"] == sent
    assert "`score`, a number from 0 (useless) to 10 (perfect)" in request["messages"][0]["content"]
    server.reply = lambda text, number: 400
    (refused,), _ = ask(server.url, section(tmp_path, response_format=form), "b")
    assert "response_format" not in refused  # broken for another reason
    server.refuse = lambda body: "response_format: Extra inputs are not permitted"
    (refused,), _ = ask(server.url, section(tmp_path, response_format=form), "b")
    assert refused.endswith("set reward.judge.response_format=text (requests: 1)")


OPENAI_REFUSALS = {
    "max_tokens": "Unsupported parameter: 'max_tokens' is not supported with this model. "
    "Use 'max_completion_tokens' instead.",
    "temperature": "Unsupported value: 'temperature' does not support 0 with this model. "
    "Only the default (1) value is supported.",
}


@pytest.mark.slow
def test_a_request_is_adapted_to_what_the_address_refuses(server: Server, tmp_path: Path) -> None:
    def refuse(body: dict[str, Any]) -> str:
        found = [name for name in OPENAI_REFUSALS if name in body]
        if found:
            return json.dumps({"error": {"message": OPENAI_REFUSALS[found[0]], "param": found[0]}})
        return ""

    server.refuse = refuse
    judge = JudgeFunction(server.url, section(tmp_path, retries=0))
    # three at once
    assert asyncio.run(judge(["2 + 3"] * 3, ["a", "b", "c"], answer=["5"] * 3)) == [0.5] * 3
    asked = len(server.asked)
    assert (
        asyncio.run(judge(["2 + 3"], ["d"], answer=["5"])) == [0.5]
        and len(server.asked) == asked + 1
    )
    assert server.asked[-1]["max_completion_tokens"] == 512
    assert asyncio.run(
        JudgeFunction(server.url, section(tmp_path))(["2 + 3"], ["d"], answer=["5"])
    ) == [0.5]
    assert len(server.asked) == asked + 1  # the cache knows it by the request's first form


def test_a_reply_is_asked_for_once(server: Server, tmp_path: Path) -> None:
    server.reply = lambda text, number: f"{number}"  # another one each time
    first, _ = ask(server.url, section(tmp_path), "a", "a", "b")
    again, logged = ask(server.url, section(tmp_path), "b", "a")
    assert (
        first[0] == first[1] != first[2]
        and again == [first[2], first[0]]
        and len(server.asked) == 2
    )
    assert [logged[f"judge_{name}"] for name in ("cached", "requests", "tokens")] == [
        [1.0] * 2,
        [0.0] * 2,
        [0.0] * 2,
    ]
    different: list[dict[str, Any]] = [
        {"template": "{completion}!"},
        {"model": "other"},
        {"cache": ""},
    ]
    for changes in different:
        ask(server.url, section(tmp_path, **changes), "a")
    assert len(server.asked) == 5
    assert KEY not in "".join(file.read_text() for file in (tmp_path / "cache").rglob("*.json"))


def test_another_process_that_was_sooner_decides(server: Server, tmp_path: Path) -> None:
    one = JudgeFunction(server.url, section(tmp_path))
    assert one._store("ab12", "3") == "3"
    assert one._store("ab12", "4") == "3"
    assert one._read_cache("ab12") == "3"
    assert [file.name for file in (tmp_path / "cache" / "ab").iterdir()] == ["ab12.json"]


DEEP = b'{"choices": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"


@pytest.mark.parametrize(
    ("replies", "requests", "score"),
    [
        ([500, 503, "Score: 4"], 3, 0.4),
        ([b"<html>", "Score: 4"], 2, 0.4),
        ([429, "9"], 2, 0.9),
        ([{"choices": []}, "9"], 2, 0.9),
        ([{"choices": [{"message": {"content": "1"}}] * 2}, "9"], 2, 0.9),
        ([{"error": "busy"}, b"[1]", "9"], 3, 0.9),
        ([500] * 9, 4, "HTTP 500, broken (requests: 4)"),
        ([b"no"] * 9, 4, "Expecting value"),
        ([400], 1, "HTTP 400, broken (requests: 1)"),
        (["no idea"], 1, "no `Score: N` with a number from 0 to 10 in the reply 'no idea'"),
        (["11"], 1, "a number from 0 to 10"),
        ([b"[" * 200_000, "9"], 2, 0.9),
        ([DEEP] * 9, 4, "nested too deeply"),
        (['{"a":' * 50_000], 1, "no `Score: N`"),
        ([{"choices": [[]]}, "9"], 2, 0.9),
        ([{"choices": [{"message": {"content": None}}]}] * 9, 4, "expected one choice"),
    ],
)
def test_a_fault_is_asked_again_and_then_a_failure(
    server: Server, tmp_path: Path, replies: list[Any], requests: int, score: Any
) -> None:
    server.reply = lambda text, number: replies[number - 1]
    (found,), logged = ask(server.url, section(tmp_path), "a")
    assert score in found if isinstance(score, str) else found == score
    assert len(server.asked) == logged["judge_requests"][0] == requests
    # in a worker; what failed is not cached
    scores = pooled(server.url, section(tmp_path, retries=0), "a")
    assert bool(scores.failures) == isinstance(score, str) and scores.valid[0, 0] == (
        not scores.failures
    )


@pytest.mark.slow
def test_a_judge_that_hangs_or_has_gone_is_a_failure(server: Server, tmp_path: Path) -> None:
    server.reply = lambda text, number: None if text.startswith("hang") else "8"
    scores = pooled(server.url, section(tmp_path, seconds=2.0, retries=1), "fine", "hang")
    assert scores.valid.tolist() == [[True, False]] and scores.rewards[0, 0] == 0.8
    assert {one.kind for one in scores.failures} <= {"timed out", "not a number"} and len(
        scores.failures
    ) == 1
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1/chat/completions"
    with pytest.raises(
        ShoalError,
        match=rf"reward=judge:{url}: ConnectError .*\(requests: 2\); is the address right",
    ):
        ask(url, section(tmp_path, retries=1), "a")  # nothing ever was there
    judge = JudgeFunction(server.url, section(tmp_path, retries=1))
    assert asyncio.run(judge(["2 + 3"], ["fine too"], answer=["5"])) == [0.8]
    judge.url = url
    (found,) = asyncio.run(judge(["2 + 3"], ["a"], answer=["5"]))
    assert found.startswith(f"{url}: ConnectError") and found.endswith("(requests: 2)")


@pytest.mark.slow
def test_a_short_run_whose_judge_gives_no_score_ends_with_an_error(
    server: Server, workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.reply = lambda text, number: "I would rather not say."
    words = [
        f"reward=judge:{server.url}",
        *GRADER,
        f"reward.judge.cache={tmp_path / 'cache'}",
        "reward.on_error=skip",
        "steps=1",
        "train.evaluate_every=-1",
    ]
    assert cli.main(workshop.words("garbage", *words)) == 2
    found = capsys.readouterr().err
    assert (
        "reward function 'judge' failed for" in found
        and "at the end of the run; the first: " in found
    )
    assert cli.main(workshop.words("unlimited", *words, "reward.max_failed_share=1")) == 0


@pytest.mark.slow
def test_at_most_so_many_requests_are_under_way(server: Server, tmp_path: Path) -> None:
    server.reply = lambda text, number: str(int(server.most > 2))
    scores, _ = ask(server.url, section(tmp_path, concurrency=2), *map(str, range(12)))
    assert scores == [0.0] * 12 and 1 <= server.most <= 2


# ---- in a run


@pytest.mark.slow
def test_a_run_and_its_resumption_have_the_same_rewards_and_count_the_cost(
    server: Server, workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # no two runs would agree without the cache
    server.reply = lambda text, number: str(number % 11)
    words = [
        f"reward=judge:{server.url},{workshop.rewards}:letters",
        "reward.weights=1,0",
        "reward.judge.model=grader",
        f"reward.judge.cache={tmp_path / 'cache'}",
        "reward.workers=1",
        "checkpoint.every=1",
    ]
    whole = workshop.train("graded", *words)
    asked = len(server.asked)
    parts = workshop.train("graded_in_parts", *words, "steps=1")
    assert cli.main(["train", f"resume={parts}", "steps=2"]) == 0
    assert asked > 16
    assert [[one["reward"] for one in group["completions"]] for group in groups(parts, 2)] == [
        [one["reward"] for one in group["completions"]] for group in groups(whole, 2)
    ]
    logged = metrics(whole)[0]
    assert logged["rewards/logged/judge_requests"] > 0 and logged["rewards/logged/judge_tokens"] > 0
    assert metrics(parts)[0]["rewards/logged/judge_requests"] == 0
    asked = len(server.asked)  # with an evaluation of its own after the first step
    assert (
        cli.main(
            [
                "rescore",
                str(whole),
                f"reward=judge:{server.url}",
                "reward.judge.model=grader",
                f"reward.judge.cache={tmp_path / 'cache'}",
            ]
        )
        == 0
        and len(server.asked) == asked
    )
    written = b"".join(
        file.read_bytes()
        for file in (*whole.rglob("*"), *(tmp_path / "cache").rglob("*"))
        if file.is_file()
    )
    assert KEY.encode() not in written and KEY not in "".join(capsys.readouterr())
    assert read_lines(whole / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ["reward=judge:localhost:8000"],
            "reward=judge:localhost:8000: expected http://HOST:PORT/v1 or https://HOST/v1",
        ),
        (["reward=judge:http://me:pw@host/v1"], "a key is read from OPENAI_API_KEY"),
        (["reward=judge:http://localhost:8000"], "reward.judge.model is missing"),
        (
            ["reward=judge:http://h:1", *GRADER, "reward.judge.score_range=[1,1]"],
            "the lowest and the highest score",
        ),
        (
            ["reward=judge:http://h:1", *GRADER, "reward.judge.template=no column"],
            "is it a file; expected",
        ),
        (
            ["reward=judge:{url}", *GRADER, "reward.judge.template={{golden}}"],
            "names 'golden', which is not a column",
        ),
        (
            ["reward=judge:{url}", "reward.judge.model=refused", "reward.on_error=skip"],
            "HTTP 401, broken; check the",
        ),
        (["reward=judge:{url}", *GRADER], "HTTP 500, broken (requests: 1)"),
    ],
)
def test_what_cannot_grade_is_one_error_before_weights(
    server: Server,
    workshop: Workshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    part: str,
) -> None:
    server.reply = lambda text, number: 401 if server.asked[-1]["model"] == "refused" else 500
    words = [word.format(url=server.url) if "{" in word else word for word in words]
    words += [f"reward.judge.cache={tmp_path / 'cache'}", "reward.judge.retries=0"]
    for ending in ([], ["--dry-run"]):
        assert cli.main([*workshop.words("never", *words), *ending]) == 2
        error = capsys.readouterr().err
        assert part in error and "pw" not in error and KEY not in error
    assert not (workshop.runs / "never").exists()


def test_addresses() -> None:
    for given in (
        "http://a:1",
        "http://a:1/",
        "http://a:1/v1",
        "http://a:1/v1/",
        "http://a:1/v1/chat/completions",
    ):
        assert _completions_url(given) == "http://a:1/v1/chat/completions"
    assert _completions_url("https://a/x/v2") == "https://a/x/v2/chat/completions"
    with pytest.raises(ShoalError, match="expected http"):
        _completions_url("ftp://a")
