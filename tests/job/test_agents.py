"""Runs whose rollouts are agents: programs that only speak to an address."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from processes import descendants
from tiny_runs import metrics
from turn_runs import TurnWorkshop

from shoal.commands.replay import replay
from shoal.config.commands import ReplayConfig
from shoal.config.sections.sampling import SamplingSection
from shoal.records import StopReason
from shoal.runs.groups import read_file
from shoal.serve.agent import AgentProgram, AgentSampler, _run_command
from shoal.serve.api import read_call
from shoal.workers.rollout_function import RolloutDropped, RolloutSampler

AGENTS = '''
import json, sys, urllib.error, urllib.request


class Client:
    def __init__(self, url, key):
        self.url, self.key = url, key

    def post(self, path, **body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(),
                                         {"Authorization": f"Bearer {self.key}"})
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)["error"]

    def chat(self, messages, **settings):
        return self.post("/chat/completions", model="any", messages=messages,
                         return_token_ids=True, **settings)


def talk(row, url, key):
    """Goes on twice, asks about something else, then posts a reward."""
    client, messages = Client(url, key), list(row["prompt"])
    said = []
    for words in ("And then?", "And then?", None):
        answer = client.chat(messages)
        if "choices" not in answer:
            break
        said.append(answer)
        for long in ("word " * 400, "a" * 10**6):  # of a sub-agent: refused by itself
            refused = client.chat([{"role": "user", "content": long}])
            assert "expected" in refused["message"] or len(said) > 1, refused
        messages = [*messages, answer["choices"][0]["message"], {"role": "user", "content": words}]
    for one, two in zip(said, said[1:]):
        ids = one["prompt_token_ids"] + one["choices"][0]["token_ids"]
        assert two["prompt_token_ids"][:len(ids)] == ids, "tokens were rendered again"
    client.chat([{"role": "user", "content": "Other"}])
    for name, value in (
            ("temperature", 0.5), ("n", 2), ("seed", 1), ("max_tokens", 0), ("stop", ["a"])):
        refused = client.chat(messages, **{name: value})
        assert name in refused["message"] and refused["type"] == "invalid_request_error", refused
    client.post("/reward", reward=len(said[0]["choices"][0]["token_ids"]))
    return -1.0


def limited(row, url, key):
    """Each turn has a limit of its own, by either name; history is told anew once. Posts how many
    were cut."""
    client, messages, cut = Client(url, key), list(row["prompt"]), 0
    before = []
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 7},
                  {"max_tokens": 10**6, "max_completion_tokens": 3},
                  {"max_tokens": 4, "max_completion_tokens": None}, {"max_tokens": 6}):
        answer = client.chat(messages, **limit)
        if "choices" not in answer:
            assert "the rollout is over" in answer["message"], answer
            break
        choice, = answer["choices"]
        ids, most = choice["token_ids"], min(value for value in limit.values() if value)
        at_limit = choice["finish_reason"] == "length"
        assert len(ids) <= most and at_limit <= (len(ids) == most), choice
        assert answer["prompt_token_ids"][:len(before)] == before, "tokens were rendered again"
        cut += choice["finish_reason"] == "length"
        before = answer["prompt_token_ids"] + ids
        messages = [*messages, choice["message"], {"role": "user", "content": "And then?"}]
        if len(messages) == 7:
            messages, before = [{"role": "user", "content": "Other"}], []
    for name, value in (("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "3"),
                        ("max_completion_tokens", 2.0)):
        refused = client.chat(messages, **{name: value})
        assert name in refused["message"] and refused["type"] == "invalid_request_error", refused
    client.post("/reward", reward=cut)
    return -1.0


def silent(row, url, key):
    if row["answer"] in ("10", "46"):  # the first of each set, that agents are tried on
        talk(row, url, key)
'''
PROGRAM = """
import json, os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from agents import Client

row = json.load(sys.stdin)
client = Client(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
answer = client.chat(row["prompt"])
if sys.argv[1] == "dies":
    os.kill(os.getpid(), 9)
print("done")
print(len(answer["choices"][0]["token_ids"]))
"""


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> TurnWorkshop:
    workshop = TurnWorkshop(tmp_path_factory.mktemp("agents"))
    (workshop.folder / "agents.py").write_text(AGENTS)
    (workshop.folder / "program.py").write_text(PROGRAM)
    return workshop


def words(agents: TurnWorkshop, agent: str, *changes: str) -> list[str]:
    return [
        f"agent={agent}",
        "environment=",
        "reward=",
        "train.max_staleness=0",
        "steps=1",
        "train.evaluate_every=0",
        *changes,
    ]


def completions(run: Path) -> list[Any]:
    result = []
    for stored in read_file(run / "groups" / "step_000001.parquet"):
        for one, arrays in zip(stored.group.completions, stored.token_arrays, strict=True):
            result.append((stored.group, one, arrays))
    return result


@pytest.mark.slow
def test_an_agent_goes_on_forks_and_posts_its_reward(agents: TurnWorkshop) -> None:
    before = descendants()
    run = agents.train("talk", *words(agents, f"{agents.folder / 'agents.py'}:talk"))
    branched = compared = 0
    for group, one, arrays in completions(run):
        first = np.flatnonzero(~one.loss_mask)[:1]  # where the first answer ended
        assert group.reward_components["Agent"][one.index] == (
            first[0] if len(first) else one.num_sampled
        )
        assert [message["role"] for message in one.messages[:3]] == [
            "assistant",
            "user",
            "assistant",
        ][: len(one.messages)]
        assert one.messages[-1]["role"] == "assistant"
        branched += len(one.branches)
        if arrays:
            assert np.abs(arrays["trainer_logprobs"] - one.logprobs)[one.loss_mask].max() < 2e-5
            compared += 1
    assert replay(ReplayConfig(run=str(run), step=1))["identical"]
    assert branched and compared
    assert not descendants() - before


@pytest.mark.slow
def test_an_agents_limit_of_a_turn_ends_that_turn_and_is_replayed(
    agents: TurnWorkshop, capsys: Any
) -> None:
    before = descendants()
    run = agents.train("limited", *words(agents, f"{agents.folder / 'agents.py'}:limited"))
    assert "Traceback" not in "".join(capsys.readouterr())
    went_on = compared = 0
    for _, one, arrays in completions(run):
        first = int(one.loss_mask.cumprod().sum())
        assert first <= 5
        went_on += len(one) > first and one.token_ids[first - 1] not in agents.ends
        if arrays:  # cut turns are learned from as they are
            assert np.abs(arrays["trainer_logprobs"] - one.logprobs)[one.loss_mask].max() < 2e-5
            compared += 1
    cut = []
    for group, one, _ in completions(run):
        cut.append(group.reward_components["Agent"][one.index])
    assert went_on and compared and max(cut) > 1
    is_truncated = []
    for _, one, _ in completions(run):
        is_truncated.append(one.stop_reason is StopReason.LENGTH)
    assert metrics(run)[0]["completions/truncated"] == np.mean(is_truncated)
    assert 0 < np.mean(is_truncated) < 1
    for number in range(2):
        result = replay(ReplayConfig(run=str(run), step=1, group=number))
        assert result["identical"], result["difference"]
    assert not descendants() - before


class Asked(SimpleNamespace):
    """In place of a rollout: notes what it is asked."""

    def ask(self, what: str, value: dict[str, Any]) -> dict[str, Any]:
        self.value = value
        return {"prompt_ids": [1], "choices": [{"ids": [2]}]}


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({}, 512),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 10**9}, 10**9),
        ({"max_tokens": 9, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": None}, 7),
    ],
)
def test_a_calls_limit_reaches_the_rollout(given: dict[str, Any], limit: int) -> None:
    asked = Asked(sampled=[])
    played = AgentSampler(asked, SamplingSection(max_completion_tokens=512), "model")
    call = read_call("chat", {"messages": [{"role": "user", "content": "a"}], **given}, played)
    asyncio.run(played.sample(call))
    assert asked.value["max_tokens"] == limit


@pytest.mark.slow
def test_a_program_gets_its_row_and_prints_its_reward(agents: TurnWorkshop) -> None:
    run = agents.train(
        "program", *words(agents, f"{sys.executable} {agents.folder / 'program.py'} prints")
    )
    for group, one, _ in completions(run):
        assert group.reward_components["Agent"][one.index] == len(one)


def test_a_program_need_not_read_its_row_nor_print_text() -> None:
    says = r"import sys; sys.stdout.buffer.write(bytes([255, 10])); print(0.5)"
    played = SimpleNamespace(is_over=False)
    command = shlex.join([sys.executable, "-c", says])
    assert (
        _run_command(command, {"document": "a" * 10**6}, "http://127.0.0.1:1/v1", "key", played)
        == 0.5
    )


def test_what_a_program_started_ends_with_it_once_no_tokens_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = descendants()

    class Played(SimpleNamespace):
        def __setattr__(self, name: str, value: Any) -> None:
            # over as soon as it is known what to do then
            super().__setattr__(name, value)
            if name == "when_over":
                value()

    monkeypatch.setattr("shoal.serve.agent.GRACE", 0.5)
    command = shlex.join(["sh", "-c", "echo 0.5; sleep 60; echo 1.5"])
    assert _run_command(command, {}, "http://127.0.0.1:1/v1", "key", Played(is_over=True)) == 0.5
    assert not descendants() - before


def test_a_program_whose_rollout_was_dropped_ends_without_a_word(tmp_path: Path) -> None:
    """Each set's first row is tried before the run: an agent that learns of that prints a
    traceback."""
    before = descendants()

    def ask(what: str, value: Any) -> Any:
        raise RolloutDropped("it was dropped")

    program = (
        "import os, urllib.request as u\ntry:\n    "
        "u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + "
        "'/completions', b'{\"prompt\": \"a\"}', {'Authorization': 'Bearer ' + "
        "os.environ['OPENAI_API_KEY']}))\n"
        f"finally:\n    open({str(tmp_path / 'complaint')!r}, 'w').close()\n"
    )
    agent = AgentProgram(shlex.join([sys.executable, "-c", program]), SamplingSection(), "model")
    with pytest.raises(
        RuntimeError, match="without a request to OPENAI_BASE_URL that was answered"
    ):
        agent([{}], RolloutSampler(ask))
    assert not (tmp_path / "complaint").exists()
    assert not descendants() - before


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["dies", "silent"])
def test_an_agent_that_fails_leaves_its_group(
    agents: TurnWorkshop, agent: str, capsys: Any
) -> None:
    before = descendants()
    if agent == "dies":
        command = f"{sys.executable} {agents.folder / 'program.py'} dies"
    else:
        command = f"{agents.folder / 'agents.py'}:silent"
    given = words(agents, command, "environment.on_error=skip")
    run = agents.train(f"fails_{agent}", *given)
    assert "without a request" in capsys.readouterr().out or agent == "dies"
    assert sum(row["rewards/failed/environment"] for row in metrics(run)) > 0
    assert not descendants() - before
