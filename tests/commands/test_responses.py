"""`shoal eval responses=FILE`: answers made elsewhere, with a task in place of the published
ones."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import cli
from shoal.config.sections.task import TaskSection
from shoal.job.rescore import normalized, question_text
from shoal.records import Example, ShoalError
from shoal.tasks import task
from shoal.tasks.data_folder import Published
from shoal.tasks.task import Task

QUESTIONS = ["2 + 3 = ?", "4 + 4 = ?", "1 + 1 = ?\n", "9 + 9 = ?"]
GOLD = ["5", "8", "2", "18"]


with_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="an extra"
)


def of_row(number: int, row: Any) -> Example:
    if not str(row["answer"]).isdigit():
        raise ShoalError(f"`answer` is {row['answer']!r}, which is no number")
    return Example(
        number,
        [{"role": "system", "content": "Add."}, {"role": "user", "content": row["question"]}],
        {"answer": row["answer"]},
    )


def verdict(text: str, example: Example) -> dict[str, Any]:
    strict = text == example.columns["answer"]
    return {
        "correct": strict,
        "answer": text.split()[-1],
        "loose": text.endswith(example.columns["answer"]),
    }


def blank(section: TaskSection) -> Task:
    def figures(verdicts):
        return {"prompt_loose": sum(one["loose"] for one in verdicts) / len(verdicts)}

    return Task(
        "sums",
        (),
        {},
        (),
        verdict=verdict,
        of_row=of_row,
        figures=figures,
    )


@pytest.fixture
def loads(monkeypatch) -> list[TaskSection]:
    """The task `sums`, three questions held out and one to train on; the sections that its data was
    loaded with."""
    asked: list[TaskSection] = []

    def load(section: TaskSection, *_: Any) -> Task:
        asked.append(section)
        rows = []
        for i, (question, answer) in enumerate(zip(QUESTIONS, GOLD, strict=True)):
            rows.append(of_row(i, {"question": question, "answer": answer}))
        whole = blank(section)
        return Task(
            "sums",
            rows[3:],
            {"held_out": rows[:3]},
            (),
            verdict=whole.verdict,
            of_row=of_row,
            figures=whole.figures,
            notes=("sums: 0 rows were dropped",),
        )

    module = types.ModuleType("sums")
    module.load, module.blank = load, blank  # pyright: ignore[reportAttributeAccessIssue]
    module.PUBLISHED = Published("sums", "", ("question", "answer"))  # pyright: ignore
    monkeypatch.setitem(sys.modules, "sums", module)
    monkeypatch.setitem(task.TASKS, "sums", "sums")
    return asked


def write(folder: Path, rows: list[Any], name: str = "responses.jsonl") -> Path:
    file = folder / name
    file.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows),
        encoding="utf-8",
    )
    return file


def score(folder: Path, rows: list[Any], *words: str) -> dict[str, Any]:
    output = folder / "deep" / "out.json"
    file = write(folder, rows)
    assert cli.main(["eval", "task=sums", f"responses={file}", f"output={output}", *words]) == 0
    return json.loads(output.read_text(encoding="utf-8"))


def test_rows_with_their_gold_need_no_data(loads, tmp_path, capsys):
    rows = [
        {"question": "7 + 7 = ?", "answer": "14", "response": "14", "id": "a"},
        "",
        {"question": "é\u2028 ?", "answer": "3", "response": "it is 3"},
        {"question": "é\u2028 ?", "answer": "3", "response": "4"},
    ]
    result = score(tmp_path, rows)
    assert not loads
    assert result["task"] == "sums"
    assert (result["num_responses"], result["num_questions"], result["num_unjudged"]) == (3, 2, 0)
    assert result["accuracy"] == pytest.approx(1 / 3) and result["prompt_loose"] == pytest.approx(
        2 / 3
    )
    assert result["accuracy_interval"] == pytest.approx([0.0615, 0.7923], abs=1e-4)
    assert result["rows"] == [
        {
            "question": "7 + 7 = ?",
            "given_answer": "14",
            "response": "14",
            "id": "a",
            "correct": True,
            "answer": "14",
            "loose": True,
        },
        {
            "question": "é\u2028 ?",
            "given_answer": "3",
            "response": "it is 3",
            "correct": False,
            "answer": "3",
            "loose": True,
        },
        {
            "question": "é\u2028 ?",
            "given_answer": "3",
            "response": "4",
            "correct": False,
            "answer": "4",
            "loose": False,
        },
    ]
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == (
        f"sums: accuracy 33.3% (answers of {tmp_path / 'responses.jsonl'}, 3 responses, 2 "
        "questions; 95% interval 6.1-79.2)  prompt loose 66.7%"
    )


def test_gold_is_found_by_the_question(loads, tmp_path, capsys):
    result = score(
        tmp_path,
        [
            {"question": "4 + 4 = ?", "response": "8"},
            {"question": "9 + 9 = ?", "response": "17"},
            {"question": "no such", "response": "8"},
            {"question": "1 + 1 = ?", "response": "2"},
            {"question": "5 + 5 = ?", "answer": "10", "response": "10"},
            {"question": "2 + 3 = ?", "answer": "five", "response": "5"},
            {"question": "3 + 3 = ?", "answer": "six", "response": "6"},
        ],
    )
    assert [section.num_eval_questions for section in loads] == [0]
    assert (result["num_responses"], result["num_unjudged"], result["accuracy"]) == (5, 2, 4 / 5)
    assert [row["correct"] for row in result["rows"]] == [True, False, None, True, True, True, None]
    assert result["protocol"] == f"answers of {tmp_path / 'responses.jsonl'}, 2 of 7 not judged"
    assert result["rows"][2] == {
        "question": "no such",
        "response": "8",
        "correct": None,
        "unjudged": "its question is not in the task's data",
    }
    assert result["rows"][5]["given_answer"] == "five"
    assert result["rows"][6] == {
        "question": "3 + 3 = ?",
        "given_answer": "six",
        "response": "6",
        "correct": None,
        "unjudged": "`answer` is 'six', which is no number",
    }
    out = capsys.readouterr().out
    assert "1 of 7 responses are scored by the ground truth in their own rows" in out
    assert (
        "3 of 3 held_out questions are answered" in out
        and "1 of 1 training questions are answered" in out
    )
    assert (
        "2 of 7 responses cannot be scored and are not counted; the first, "
        f"{tmp_path / 'responses.jsonl'}, line 3: its question is not in"
    ) in out and "sums: 0 rows were dropped" in out


def test_an_own_answer_that_cannot_be_read_needs_no_data(loads, tmp_path, monkeypatch, capsys):
    """Where the data cannot be had, the rows that can be judged are."""

    def fails(section: TaskSection) -> Task:
        raise ShoalError("task sums: no data")

    monkeypatch.setattr(sys.modules["sums"], "load", fails)
    result = score(
        tmp_path,
        [
            {"question": "a", "answer": "x", "response": "1"},
            {"question": "b", "answer": "1", "response": "1"},
        ],
    )
    assert (result["num_responses"], result["num_unjudged"]) == (1, 1)
    assert "the other questions cannot be looked up: task sums: no data" in capsys.readouterr().out


def test_questions_are_found_in_other_spellings(loads, tmp_path):
    rows = [
        {"question": "4 +\u00a04  =\n?", "response": "8"},
        {"prompt": "2 + 3 = ?", "response": "5"},
        {"problem": "1 + 1 = ?", "response": "2"},
        {
            "question": None,
            "prompt": [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": "9 + 9 = ?"},
            ],
            "response": "18",
        },
    ]
    assert score(tmp_path, rows)["accuracy"] == 1
    assert normalized("Janet’s “２”\u2028 cafe\u0301 ") == 'Janet\'s "2" café'


def test_responses_that_are_no_text(loads, tmp_path, capsys, monkeypatch):
    rows = [
        {"question": "4 + 4 = ?", "response": 8},
        {"question": "2 + 3 = ?", "response": None, "answer": "5"},
        {"question": "1 + 1 = ?", "response": "\ud83d 2", "\udc00": ["\ud83d", {"\ud83d": 1}]},
    ]
    ends = {
        "verdict": lambda text, example: {"correct": text.endswith(example.columns["answer"])},
        "figures": None,
    }
    monkeypatch.setattr(
        sys.modules["sums"], "blank", lambda section: replace(blank(section), **ends)
    )
    result = score(tmp_path, rows)
    assert [row["correct"] for row in result["rows"]] == [True, False, True]
    assert result["rows"][2] == {
        "question": "1 + 1 = ?",
        "response": "? 2",
        "?": ["?", {"?": 1}],
        "correct": True,
    }
    assert (
        "2 of 3 responses are not text: numbers are scored as text, null as empty"
        in capsys.readouterr().out
    )


def test_a_column_means_the_same_in_every_row(loads, tmp_path):
    rows = [
        {
            "question": "4 + 4 = ?",
            "answer": "8",
            "given_answer": "own",
            "response": "8",
            "correct": 3,
            "loose": 4,
        },
        {"question": "none", "answer": "x", "response": "8", "unjudged": 5},
    ]
    first, second = score(tmp_path, rows)["rows"]
    assert first == {
        "question": "4 + 4 = ?",
        "given_given_answer": "8",
        "given_answer": "own",
        "response": "8",
        "given_correct": 3,
        "given_loose": 4,
        "correct": True,
        "answer": "8",
        "loose": True,
    }
    assert (
        second["given_given_answer"] == "x"
        and second["given_unjudged"] == 5
        and "answer" not in second
    )
    assert second["unjudged"] == "`answer` is 'x', which is no number"


def test_an_overlong_penalty_without_effect_is_warned_of(loads, tmp_path, capsys):
    score(tmp_path, [{"question": "4 + 4 = ?", "response": "8"}], "reward.overlong_buffer_tokens=8")
    assert (
        "reward.overlong_buffer_tokens=8 has no effect: the lengths in tokens of"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "answer", ["18", 18, "", None, "9 * 2\nA: 18", "two\n#### 18", "18 dollars", "a dozen"]
)
def test_gold_of_gsm8k_in_every_form(tmp_path, answer):
    data = write(
        tmp_path, [{"question": "What is 9 * 2?", "answer": "It is so.\n#### 18"}], "data.jsonl"
    )
    rows = []
    for text in ("It is 18.", "It is 3."):
        rows.append({"question": "What is 9 * 2?", "answer": answer, "response": text})
    figures = shoal.evaluate(
        task={"name": "gsm8k", "path": str(data)}, responses=str(write(tmp_path, rows))
    )
    assert (figures["num_unjudged"], figures["accuracy"]) == (0, 0.5)


def test_ifeval_scores_the_whole_text_of_a_question(tmp_path):
    row = {"question": "Hi?", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    rows = []
    for text in ("Well, <answer>hi</answer>", "<answer>hi</answer>"):
        rows.append({**row, "response": text})
    result = shoal.evaluate(task="ifeval", responses=str(write(tmp_path, rows)))
    assert result["prompt_strict"] == 0.5


@pytest.mark.slow
@with_math_verify
def test_math_is_looked_up_where_its_own_answer_cannot_be_read(tmp_path):
    data = write(tmp_path, [{"problem": "p?", "answer": "5"}], "data.jsonl")
    rows = [
        {"problem": "p?", "label": 1, "response": "so x = 5"},
        {"problem": "p?", "target": "t", "response": "**6**"},
    ]
    figures = shoal.evaluate(
        task={"name": "math", "path": str(data)}, responses=str(write(tmp_path, rows))
    )
    assert (figures["num_unjudged"], figures["accuracy"]) == (0, 0.5)


def test_a_home_folder_is_found(loads, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, [{"question": "7 + 7 = ?", "answer": "14", "response": "14"}])
    figures = shoal.evaluate(task="sums", responses="~/responses.jsonl", output="~/out.json")
    assert figures["accuracy"] == json.loads((tmp_path / "out.json").read_text())["accuracy"] == 1


def test_a_task_without_blank_is_loaded(loads, tmp_path, monkeypatch):
    monkeypatch.delattr(sys.modules["sums"], "blank")
    assert score(tmp_path, [{"question": "4 + 4 = ?", "response": "8"}])["accuracy"] == 1
    assert len(loads) == 1


def test_words_are_scored_too(tmp_path, capsys):
    from shoal.job.task import load_task

    example = load_task(TaskSection(num_eval_questions=3)).evaluations["held_out"][1]
    answer = f"<reasoning>so</reasoning><answer>{example.columns['answer']}</answer>"
    rows = []
    for text in (answer, "nothing"):
        rows.append({"question": question_text(example, "question"), "response": text})
    file = write(tmp_path, rows)
    figures = shoal.evaluate(task="words", responses=str(file), model="elsewhere")
    assert (figures["accuracy"], figures["num_responses"], figures["num_questions"]) == (0.5, 2, 1)
    assert "model=elsewhere has no effect" in capsys.readouterr().out


def rewards(completions: Any, answer: Any, **_: Any) -> list[float | None]:
    return plain([completion[0]["content"] for completion in completions], answer)


def plain(completions: Any, answer: Any, **_: Any) -> list[float | None]:
    """The length of the text in tens, plus the gold answer; it cannot score an empty one."""
    result = []
    for text, gold in zip(completions, answer, strict=True):
        result.append(len(text) / 10 + int(gold) if text else None)
    return result


def test_reward_functions_are_called_where_given(loads, tmp_path):
    rows = [
        {"question": "4 + 4 = ?", "response": "8"},
        {"question": "2 + 3 = ?", "response": "it is 5"},
        {"question": "none", "response": "5"},
    ]
    output = tmp_path / "out.json"
    figures = shoal.evaluate(
        task="sums",
        responses=str(write(tmp_path, rows)),
        reward=rewards,
        output=str(output),
        reward__workers=0,
    )
    assert figures["mean_reward"] == figures["rewards/rewards"] == pytest.approx((8.1 + 5.7) / 2)
    assert figures["accuracy"] == 0.5
    result = json.loads(output.read_text())["rows"]
    assert (
        result[0]["reward"] == result[0]["rewards"]["rewards"] == 8.1
        and result[0]["correct"] is True
    )
    assert "reward" not in result[2]


async def patient(completions: Any, **_: Any) -> list[float]:
    await asyncio.sleep(0.2)
    return [1.0] * len(completions)


def test_a_slow_reward_gets_many_requests_at_once(loads, tmp_path):
    rows = []
    for i in range(30):
        rows.append({"question": f"{i}?", "answer": str(i), "response": str(i)})
    started = time.monotonic()
    assert (
        shoal.evaluate(task="sums", responses=str(write(tmp_path, rows)), reward=patient)[
            "mean_reward"
        ]
        == 1
    )
    assert time.monotonic() - started < 4  # one at a time: 6 s


def fails(completions: Any, answer: Any, **_: Any) -> list[float]:
    return [1 / (int(gold) % 3) for gold in answer]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "mean"), [("zero", 0.5), ("skip", 0.75)])
def test_failures_are_counted_and_the_first_is_shown(loads, tmp_path, capsys, policy, mean):
    rows = []
    for i in range(1, 10):
        rows.append({"question": f"{i}?", "answer": str(i), "response": "?"})
    figures = shoal.evaluate(
        task="sums",
        responses=str(write(tmp_path, rows)),
        reward=fails,
        reward__on_error=policy,
        output=str(tmp_path / "out.json"),
    )
    assert figures["failed"] == figures["failed/fails"] == 3 and figures[
        "mean_reward"
    ] == pytest.approx(mean)
    assert json.loads((tmp_path / "out.json").read_text())["failed"] == 3
    warnings = []
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("warning: reward"):
            warnings.append(line)
    assert (
        len(warnings) == 2
        and "raised ZeroDivisionError" in warnings[0]
        and "data row 2," in warnings[0]
    )
    assert warnings[1] == "warning: reward function fails: raised for 3 completions"
    with pytest.raises(
        ShoalError, match="reward function 'fails' at the start raised ZeroDivisionError"
    ):
        shoal.evaluate(task="sums", responses=str(write(tmp_path, rows)), reward=fails)


def turns(*contents: str, system: str = "") -> list[dict[str, str]]:
    messages = []
    for i, content in enumerate(contents):
        messages.append({"role": ("user", "assistant")[i % 2], "content": content})
    return [*([{"role": "system", "content": system}] if system else []), *messages]


def test_conversations_are_distinguished_by_all_their_messages(tmp_path, capsys):
    data = [
        {"prompt": turns("I have 2.", "Well.", "And 1 more?"), "answer": "3"},
        {"prompt": turns("I have 6.", "Well.", "And 1 more?"), "answer": "7"},
        {"prompt": turns("Yes?", system="Say yes."), "answer": "yes"},
        {"prompt": turns("Yes?", system="Say no."), "answer": "no"},
        *({"prompt": turns(f"{i}?"), "answer": str(i)} for i in range(20)),
    ]
    settings = {
        "task": {"name": "custom", "path": str(write(tmp_path, data, "data.jsonl"))},
        "reward__workers": 0,
        "reward": lambda completions, answer, **_: [
            float(one[0]["content"] == gold) for one, gold in zip(completions, answer, strict=True)
        ],
    }
    rows = [
        {"prompt": turns("I have  6.", "Well.", "And 1 more?"), "response": "7"},
        {"prompt": turns("I have 2.", "Well.", "And 1 more?"), "response": "3"},
        {"prompt": turns("Yes?", system="Say no."), "response": "no"},
        # examples before the question
        {"prompt": turns("5?", "6?", "7?", system="Elsewhere."), "response": "7"},
        {"prompt": turns("8?", system="Elsewhere."), "response": "8"},
        {"prompt": "9?", "response": "9"},
    ]
    result = shoal.evaluate(**settings, responses=str(write(tmp_path, rows)))
    assert (result["mean_reward"], result["num_questions"], result["num_unjudged"]) == (1, 6, 0)
    assert "warning" not in capsys.readouterr().out
    rows = [
        {"prompt": turns("I have 4.", "Well.", "And 1 more?"), "response": "5"},
        {"prompt": "5?", "response": "5"},
    ]
    assert shoal.evaluate(**settings, responses=str(write(tmp_path, rows)))["num_unjudged"] == 1
    capsys.readouterr()
    rows = [
        {"prompt": "5?", "response": "5"},
        {"prompt": "And 1 more?", "response": "3"},
        {"prompt": turns("Yes?", system="Elsewhere."), "response": "yes"},
    ]
    assert shoal.evaluate(**settings, responses=str(write(tmp_path, rows)))["mean_reward"] == 1
    assert (
        "warning: 2 of 3 responses match several rows of the data with different ground truth, and "
        f"the first row is used; the first such response, {tmp_path / 'responses.jsonl'}, line 2"
    ) in capsys.readouterr().out


def test_own_rewards_are_reported_with_a_preset_or_weights(tmp_path, capsys):
    rows = [
        {"question": "a?", "answer": "18", "response": text} for text in ("#### 18", "#### 18.0")
    ]
    file = str(write(tmp_path, rows))
    assert "mean_reward" not in shoal.evaluate(task="gsm8k", responses=file)
    figures = shoal.evaluate(
        task="gsm8k", responses=file, reward__preset="verl", reward__weights=[2.0]
    )
    assert (figures["accuracy"], figures["rewards/correct"], figures["mean_reward"]) == (1, 0.5, 1)
    assert "rewards/format" in shoal.evaluate(
        task="gsm8k", responses=file, reward__weights=[1.0, 0.5]
    )
    assert "has no effect" not in capsys.readouterr().out
    cases: list[dict[str, Any]] = [{"task": "gsm8k", "reward": fails}, {"task": "ifeval"}]
    for settings in cases:
        row = {
            "prompt": "a?",
            "answer": "1",
            "response": "no",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{}],
        }
        shoal.evaluate(**settings, responses=str(write(tmp_path, [row])), reward__preset="verl")
        assert (
            "reward.preset=verl has no effect: it is only for the rewards of task=gsm8k itself"
            in capsys.readouterr().out
        )


def test_rows_from_python_are_answered(tmp_path):
    data = [{"prompt": f"{i} + 1 = ?", "answer": str(i + 1)} for i in range(20)]
    file = str(
        write(
            tmp_path,
            [
                {"prompt": "3 + 1 = ?", "response": "4!"},
                {"question": "19 + 1 = ?", "response": "20"},
            ],
        )
    )

    def correct(text, example):
        return text == example.columns["answer"]

    figures = shoal.evaluate(
        task=data, responses=file, reward=plain, reward__workers=0, correct=correct
    )
    assert (figures["task"], figures["accuracy"], figures["num_unjudged"]) == ("rows", 0.5, 0)
    assert figures["mean_reward"] == pytest.approx((4.2 + 20.2) / 2)
    own = Task(
        "own", [], {"first": [Example(0, "3 + 1 = ?", {"answer": "4"})]}, (), correct=correct
    )
    assert shoal.evaluate(task=own, responses=file)["num_unjudged"] == 1


def test_own_data_is_scored_by_rewards_alone(tmp_path):
    data = [{"prompt": f"{i} + 1 = ?", "answer": str(i + 1)} for i in range(20)]
    source = write(tmp_path, data, "data.jsonl")
    file = write(
        tmp_path,
        [{"prompt": "3 + 1 = ?", "response": "4!"}, {"prompt": "19 + 1 = ?", "response": ""}],
    )
    settings = {"task": {"name": "custom", "path": str(source)}, "responses": str(file)}
    figures = shoal.evaluate(**settings, reward=plain, reward__workers=0)
    assert (
        figures["mean_reward"] == pytest.approx(4.2)
        and "accuracy" not in figures
        and figures["num_responses"] == 2
    )
    with pytest.raises(ShoalError, match="task custom does not define what is correct"):
        shoal.evaluate(**settings)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["{"], ("line 1 is not a JSON object",)),
        (["[" * 100_000], ("line 1 is not a JSON object",)),
        (
            [{"question": "?", "response": "!"}, "", [1]],
            ("line 3 is a list", "`question` and `response`"),
        ),
        ([{"response": "8"}], ("line 1: `question` is missing; expected text",)),
        ([{"question": "?"}], ("line 1: `response` is missing; expected text",)),
        ([{"question": "?", "response": True}], ("line 1: `response` is true; expected text",)),
        ([{"question": None, "response": "8"}], ("line 1: `question` is null; expected text",)),
        (['{"question": "?", "response": ' + "9" * 5000 + "}"], ("line 1 is not a JSON object",)),
        ([{"question": "?", "response": ["a"]}], ('line 1: `response` is ["a"]; expected text',)),
        (
            [{"question": "?", "answer": "x", "response": "8"}],
            (
                "none of the 1 responses can be scored by task sums",
                "line 1: `answer` is 'x', which is no number",
            ),
        ),
        (["  "], ("holds no row",)),
        (
            [{"question": "what?", "response": "8"}],
            (
                "line 1: its question is not in the task's data",
                "Its data must contain each `question` literally",
            ),
        ),
    ],
)
def test_bad_rows_are_named(loads, tmp_path, capsys, rows, words):
    output = tmp_path / "out.json"
    assert (
        cli.main(["eval", "task=sums", f"responses={write(tmp_path, rows)}", f"output={output}"])
        == 2
    )
    [line] = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words), line
    assert not output.exists()


def test_bad_settings_are_named(loads, tmp_path, monkeypatch):
    file = str(write(tmp_path, [{"question": "4 + 4 = ?", "response": "8"}]))
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"responses": str(tmp_path / "none")},
            "there is no such file; give a jsonl file with `question`",
        ),
        ({"responses": file, "output": str(tmp_path)}, "is a folder"),
        (
            {"responses": file, "output": file},
            "is the file of responses itself, which would be overwritten",
        ),
        (
            {"responses": file, "output": str(tmp_path / "deep" / ".." / "responses.jsonl")},
            "would be overwritten",
        ),
        ({"responses": file, "task": "summs"}, "there is no such task"),
    ]
    for settings, message in cases:
        with pytest.raises(ShoalError, match=message):
            shoal.evaluate(**{"task": "sums", **settings})
    (tmp_path / "latin").write_bytes(b'{"question": "\xe9"}')
    with pytest.raises(ShoalError, match="is not UTF-8 text"):
        shoal.evaluate(task="sums", responses=str(tmp_path / "latin"))

    def blank(section):
        return Task("sums", (), {}, (), of_row=of_row)

    monkeypatch.setattr(sys.modules["sums"], "blank", blank)
    with pytest.raises(ShoalError, match="does not define what is correct"):
        shoal.evaluate(
            task="sums",
            responses=str(write(tmp_path, [{"question": "a", "answer": "1", "response": "1"}])),
        )


@pytest.mark.slow
def test_no_jax_is_imported(tmp_path):
    file = write(tmp_path, [{"question": "?", "response": "8"}])
    code = (
        "import sys; from shoal import cli; code = cli.main(sys.argv[1:]); sys.exit(9 if 'jax' in "
        "sys.modules else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "eval", "task=words", f"responses={file}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.returncode == 2
        and "none of the 1 responses can be scored by task words" in done.stderr
    )


@pytest.mark.parametrize(
    ("task", "row", "right", "wrong", "extra"),
    [
        (
            "gsm8k",
            {"question": "2 + 3?", "answer": "Add.\n#### 5"},
            "The answer is 5.",
            "It is 6.",
            {},
        ),
        (
            "ifeval",
            {
                "prompt": "Say hi, no commas.",
                "instruction_id_list": ["punctuation:no_comma"],
                "kwargs": [{}],
            },
            "Hi.",
            "Hi, you.",
            {
                "prompt_strict": 0.5,
                "instruction_strict": 0.5,
                "prompt_loose": 0.5,
                "instruction_loose": 0.5,
            },
        ),
    ],
)
def test_published_rows_are_scored_without_their_data(
    tmp_path, monkeypatch, task, row, right, wrong, extra
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nothing"))
    file = write(tmp_path, [{**row, "response": text} for text in (right, wrong)])
    figures = shoal.evaluate(task=task, responses=str(file), output=str(tmp_path / "out.json"))
    assert figures["accuracy"] == 0.5 and extra.items() <= figures.items()
    assert [one["correct"] for one in json.loads((tmp_path / "out.json").read_text())["rows"]] == [
        True,
        False,
    ]


@with_math_verify
def test_math_is_scored_without_its_data(tmp_path):
    rows = [
        {"problem": "?", "solution": "\\boxed{\\frac{3}{4}}", "response": "so \\boxed{0.75}"},
        {"problem": "?", "answer": "5", "response": "$6$"},
    ]
    assert shoal.evaluate(task="math", responses=str(write(tmp_path, rows)))["accuracy"] == 0.5
