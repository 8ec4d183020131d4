"""Stored groups under other rewards, and in other systems' formats: without a model, without
devices."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stored_runs import MESSAGES, in_turns

from shoal.algorithm.advantage import grpo
from shoal.commands.rescore import rescore
from shoal.config.commands import RescoreConfig
from shoal.config.sections.reward import RewardSection
from shoal.job.rescore import rank_correlation
from shoal.records import Completion, Example, Group, Purpose, ShoalError, StopReason, ground_truth
from shoal.runs.groups import read_file, write_file
from shoal.runs.writer import RunWriter

REWARDS = """\
def same(completions, stored, **kwargs):
    return [dict(zip("abcd", row))[text[0]] for text, row in zip(completions, stored)]

def opposite(completions, stored, **kwargs):
    return [-value for value in same(completions, stored)]

def length(completions, **kwargs):
    return [len(text) for text in completions]

def one(completions, **kwargs):
    return [1.0] * len(completions)

def shy(completions, **kwargs):
    return [None if text.startswith("a") else 1.0 for text in completions]

def broken(completions, **kwargs):
    for text in completions:
        if text.startswith("b"):
            raise ValueError("no b")
    return [float(text.startswith("c")) for text in completions]

def when(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)
"""
TEXTS = ("a", "bb", "ccc", "dddd")
STORED = {
    1: [[0.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5]],
    2: [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, float("nan")]],
}


def stored_group(step: int, row: int, rewards: list[float]) -> Group:
    values = np.array(rewards)
    sizes = [len(text) for text in TEXTS]
    completions = tuple(
        Completion(
            0,
            i,
            np.full(size, 70 + i, np.int32),
            np.full(size, -0.5, np.float32),
            np.ones(size, bool),
            np.full(size, step - 1, np.int32),
            StopReason.EOS,
        )
        for i, size in enumerate(sizes)
    )
    return Group(
        Purpose.TRAIN,
        step - 1,
        step - 1,
        Example(
            row,
            f"prompt {row}",
            {"answer": str(row), "stored": [0 if x != x else x for x in rewards]},
        ),
        np.array([71, 72], np.int32),
        completions,
        TEXTS,
        values,
        {"stored": values},
        ~np.isnan(values),
        extra={"parsed": list(TEXTS), "step": [1, "two", None, [4]], "depth": [1, 0.5, None, 2]},
    )


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder with two steps of two groups of four, made without training."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "run").mkdir()
    with RunWriter(tmp_path / "run") as folder:
        folder.write_config(
            "steps: 4\nbatch: {prompts_per_step: 2, group_size: 4}\nalgorithm: {std_ddof: 0}", ""
        )
        for step, rows in STORED.items():
            groups = []
            for n, rewards in enumerate(rows):
                groups.append(stored_group(step, 10 * step + n, rewards))
            advantages = []
            for group in groups:
                advantages.append(
                    grpo(group.rewards[None], group.valid[None], std_ddof=0, std_eps=1e-4)[0]
                )
            folder.write_groups(step, groups, advantages)
    return tmp_path / "run"


def under(run: Path, *names: str, step: int = 0, **changes) -> dict:
    functions = tuple(f"{run.parent / 'rewards.py'}:{name}" for name in names)
    return rescore(
        RescoreConfig(
            run=str(run), step=step, reward=RewardSection(functions, workers=0, **changes)
        )
    )


def test_the_same_reward_changes_nothing(run):
    result = under(run, "same")
    c = result["comparison"]
    assert c["advantages_flipped"] == 0 and c["completions_compared"] == 15
    # 8 over the 15 that could be scored
    assert c["reward_mean"] == pytest.approx([7 / 15 + 1 / 15] * 2)
    assert c["nonzero_std_groups"] == [3, 3]
    assert (
        result["steps"] == [1, 2]
        and result["num_completions"] == 16
        and result["finished"] is False
    )
    assert result["groups"] is None and result["advantages_not_stored"] == 0
    for group in under(run, "same", step=1)["groups"]:
        assert group["old_advantages"] == group["advantages"]


def test_without_a_function_those_of_the_run_score_as_their_file_is_now(run):
    spec = f"{run.parent / 'rewards.py'}:same"
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(f"{text}\nreward: {{functions: ['{spec}'], weights: [2.0]}}\n")
    result = under(run)
    assert result["functions"] == {"same": 2.0}
    old, new = result["comparison"]["reward_mean"]
    assert new == pytest.approx(2 * old)
    assert under(run, weights=(3.0,))["functions"] == {"same": 3.0}
    assert under(run, "length")["functions"] == {"length": 1.0}


def test_rows_from_python_have_no_reward_of_their_own(run):
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "\ntask: {name: rows}\n")
    assert under(run, "same")["steps"] == [1, 2]
    with pytest.raises(ShoalError, match=r"from Python, .*: name one, reward=") as error:
        under(run)
    assert "resume" not in str(error.value)


def test_how_many_advantages_flip(run, capsys):
    result = under(run, "opposite")
    assert result["comparison"]["advantages_flipped"] == 10
    groups = under(run, "opposite", step=2)["groups"]
    wanted = grpo(-np.array([[1.0, 0, 0, 0]]), np.ones((1, 4), bool), std_ddof=0, std_eps=1e-4)
    assert groups[0]["advantages"] == wanted[0].tolist()  # by the run's own settings
    out = capsys.readouterr().out
    assert "10 of 15 advantages change their sign" in out and "the run has not finished" in out
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_a_reward_of_length_is_detected(run, capsys):
    result = under(run, "length")
    assert result["lint"]["correlation_with_length"] == pytest.approx(1)
    assert result["comparison"]["nonzero_std_groups"] == [3, 4]
    assert (
        "it correlates with length (rank correlation +1.00): training may make completions longer"
        in capsys.readouterr().out
    )
    assert [(hack["step"], hack["group"], hack["completion"]) for hack in result["hacks"]] == [
        (2, 0, 3),
        (2, 0, 2),
    ]
    assert result["hacks"][0]["text"] == "dddd" and result["hacks"][0]["old_reward"] == 0


def test_a_constant_reward_is_detected(run):
    result = under(run, "one", weights=(2.0,))
    found = result["lint"]
    assert (
        found["min"],
        found["max"],
        found["num_distinct"],
        found["share_of_constant_groups"],
    ) == (2, 2, 1, 1)
    assert found["correlation_with_length"] is None and "no training signal" in found["warnings"][0]
    assert result["comparison"]["nonzero_std_groups"] == [3, 0] and result["hacks"] == []
    assert found["seconds_per_completion"] >= 0


@pytest.mark.parametrize(("policy", "nothing", "unscorable"), [("zero", 0, 0), ("skip", 0, 4)])
def test_failures_are_counted_apart_from_none(run, policy, nothing, unscorable):
    result = under(run, "broken", on_error=policy)
    found = result["lint"]
    assert found["failed"] == {"broken: raised": 4} and found["none"] == {"broken": nothing}
    assert found["unscorable"] == unscorable and "no b" in found["first_failure"]
    assert (
        under(run, "shy")["lint"]["none"] == {"shy": 4}
        and under(run, "shy")["lint"]["unscorable"] == 4
    )
    with pytest.raises(ShoalError, match="in step 1 raised ValueError: no b"):
        under(run, "broken")


def test_functions_see_the_step_that_was(run):
    for step, seen in ((1, 0), (2, 0.25)):
        groups = under(run, "when", "one", step=step)["groups"]
        assert [group["components"]["when"][0] for group in groups] == [seen, seen]
    assert under(run, "when", step=2)["steps"] == [2]


def test_old_advantages_are_the_stored_ones(run, capsys):
    """The settings on file give others: they changed, and only the newest were kept."""
    config = run / "config.yaml"
    before = config.read_text()
    config.write_text(before.replace("std_ddof: 0", "std_ddof: 1"))
    result = under(run, "same", step=1)
    stored = grpo(np.array([STORED[1][0]]), np.ones((1, 4), bool), std_ddof=0, std_eps=1e-4)[0]
    by_settings = grpo(np.array([STORED[1][0]]), np.ones((1, 4), bool), std_ddof=1, std_eps=1e-4)[0]
    assert result["groups"][0]["old_advantages"] == stored.tolist() != by_settings.tolist()
    assert result["groups"][0]["advantages"] == by_settings.tolist()
    (run / "config_0.yaml").write_text(before)
    (run / "config_1.yaml").write_text(config.read_text())
    # step 1 was the first segment's
    assert under(run, "same", step=1)["groups"][0]["advantages"] == stored.tolist()
    file = run / "groups" / "step_000002.parquet"
    write_file(file, [entry.group for entry in read_file(file)])
    assert under(run, "same", step=2)["advantages_not_stored"] == 2
    assert "2 groups were stored without advantages" in capsys.readouterr().out


def test_the_penalty_on_long_completions_is_that_of_each_step(run, capsys):
    """A resume changed the penalty and the longest completion after step 1."""
    settings = "steps: 4\nbatch: {prompts_per_step: 2, group_size: 4}\n"
    first = settings + (
        "reward: {overlong_buffer_tokens: 4, overlong_penalty: 2.0}\n"
        "sampling: {max_completion_tokens: 5}\n"
    )
    second = settings + (
        "reward: {overlong_buffer_tokens: 2, overlong_penalty: 0.5}\n"
        "sampling: {max_completion_tokens: 6}\n"
    )
    (run / "config.yaml").write_text(second)
    (run / "config_0.yaml").write_text(first)
    (run / "config_1.yaml").write_text(second)
    sizes = [
        len(completion)
        for completion in read_file(run / "groups/step_000001.parquet")[0].group.completions
    ]
    result = under(run, "one", step=1)
    penalties = [-2.0 * min(1, max(0, size - 1) / 4) for size in sizes]
    assert result["groups"][0]["rewards"] == pytest.approx([1 + value for value in penalties])
    assert result["functions"] == {"one": 1.0, "overlong": 2.0}
    assert "the run's penalty on long completions (overlong) is part" in capsys.readouterr().out
    result = under(run, "one", step=2)
    penalties = [-0.5 * min(1, max(0, size - 4) / 2) for size in sizes]
    assert result["groups"][0]["rewards"] == pytest.approx([1 + value for value in penalties])
    both = under(run, "one")
    assert both["num_groups"] == 4 and both["steps"] == [1, 2]
    capsys.readouterr()
    given = under(run, "one", step=1, overlong_buffer_tokens=5)
    penalties = [-min(1, size / 5) for size in sizes]
    assert given["groups"][0]["rewards"] == pytest.approx([1 + value for value in penalties])
    assert "the run's penalty" not in capsys.readouterr().out


def test_a_step_is_released_before_the_next_is_read(run, monkeypatch):
    """When a step's file is read, the groups of the one before it are gone."""
    alive: list[weakref.ref] = []

    def read(path: Path):
        gc.collect()
        assert sum(ref() is not None for ref in alive) <= 4  # the step in hand
        stored = read_file(path)
        alive.extend(weakref.ref(entry.group) for entry in stored)
        return stored

    monkeypatch.setattr("shoal.job.rescore.read_file", read)
    for step in range(3, 7):
        (run / "groups" / f"step_{step:06d}.parquet").write_bytes(
            (run / "groups" / "step_000001.parquet").read_bytes()
        )
    result = under(run, "one")
    assert len(alive) == 12 and result["num_groups"] == 12 and result["groups"] is None


def test_missing_things_are_named(run):
    with pytest.raises(ShoalError, match=r"step=5: .*steps 1-2"):
        under(run, "same", step=5)
    with pytest.raises(ShoalError, match="defines no 'nothing'"):
        under(run, "nothing")
    with pytest.raises(ShoalError, match="is not a run folder"):
        under(run / "groups", "same")


def test_rollouts_with_turns_are_scored_by_their_messages_and_exported(run, capsys):
    (run.parent / "rewards.py").write_text("""
def turns(completions, **kwargs):
    return [len(one) if isinstance(one, list) else -1 for one in completions]
""")
    with RunWriter(run) as folder:
        groups = [
            replace(
                group := in_turns(stored_group(3, 30, [0.0, 1.0, 0.0, 0.0])),
                example=replace(group.example, prompt=[{"role": "user", "content": "2 + 3?"}]),
            )
        ]
        folder.write_config(
            "steps: 4\nbatch: {prompts_per_step: 2, group_size: 4}\nenvironment: {tools: [t.py:f]}",
            "",
        )
        folder.write_groups(3, groups)
    result = under(run, "turns", step=3)
    assert result["groups"][0]["rewards"] == [len(MESSAGES), 1, 1, 1]
    assert "environments are not stored" in capsys.readouterr().out


def test_rank_correlation_by_hand():
    assert rank_correlation(np.array([1, 2, 3]), np.array([10, 30, 20])) == pytest.approx(0.5)
    assert rank_correlation(np.array([1, 1, 2, 2]), np.array([1, 1, 5, 9])) == pytest.approx(
        0.9428, abs=1e-4
    )
    assert rank_correlation(np.array([1, 1]), np.array([1, 2])) is None


def test_the_column_of_the_ground_truth():
    assert ground_truth({"reward_model": {"ground_truth": "5"}, "answer": "6"}) == "5"
    assert (
        ground_truth({"question": "?", "answer": "6"}) == "6"
        and ground_truth({"question": "?"}) is None
    )
