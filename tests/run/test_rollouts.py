"""Runs whose rollouts have turns: the same bits however they are sampled, and an end whatever environments do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import groups, metrics, parameters_of, read_lines, same_bits
from turn_runs import TurnWorkshop, calling

from shoal import cli
from shoal.commands.replay import replay
from shoal.config.schema import ReplayConfig
from shoal.report.groups import read_file
from shoal.workers.sessions import Reply, Sessions

pytestmark = pytest.mark.compile_quickly


@pytest.fixture(scope="module", autouse=True)
def calls() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        calling(patch)
        yield


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> TurnWorkshop:
    return TurnWorkshop(tmp_path_factory.mktemp("turns"))


@pytest.fixture(scope="module")
def here(turns: TurnWorkshop) -> Path:
    return turns.train("here")


def assert_same_run(a: Path, b: Path, steps: int = 3) -> None:
    for step in range(1, steps + 1):
        assert groups(a, step) == groups(b, step)
    assert same_bits(parameters_of(a, steps), parameters_of(b, steps))


def test_the_run_has_every_kind_of_turn(here: Path) -> None:
    rows = metrics(here)
    for name in ("tools/failure_frequency", "completions/ended_by_max_turns", "completions/ended_by_environment",
                 "completions/ended_by_length"):
        assert sum(row[name] for row in rows) > 0, name
    assert any("own_prompt_ids" in one for step in (1, 2, 3) for group in groups(here, step)
               for one in group["completions"])
    assert max(row["turns/max"] for row in rows) == 6


@pytest.mark.parametrize("words", [
    ("mesh.trainer=1", "mesh.sampler=1"),
    ("sampling.slots_per_device=4", "environment.rollouts=16"),
    ("mesh.trainer=1", "mesh.sampler=1", "sampling.slots_per_device=4", "environment.rollouts=16"),
], ids=["a thread", "few places", "few places in a thread"])
def test_however_it_is_sampled_it_is_the_same_run(turns: TurnWorkshop, here: Path, words: tuple[str, ...]) -> None:
    assert_same_run(here, turns.train("-".join(words).replace("=", ""), *words))


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def test_killed_while_tools_answer_and_resumed_it_is_the_same_run(turns: TurnWorkshop, here: Path, monkeypatch) -> None:
    collect, calls = Sessions.collect, 0

    def dies(self: Sessions, seconds: float = 0.0) -> list[Reply]:
        nonlocal calls
        replies = collect(self, seconds)
        calls += bool(replies)
        if calls == 30:  # in the second step
            raise Killed
        return replies

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Sessions, "collect", dies)
        cli.main(turns.words("killed", "checkpoint.every=1"))
    assert len(metrics(turns.runs / "killed")) < 3
    assert_same_run(here, turns.train("killed", "checkpoint.every=1"))


def test_newest_weights_and_an_evaluation_between_steps(turns: TurnWorkshop) -> None:
    """Tokens of a rollout may be of several versions; what was asked of a version is sampled from no older one."""
    run = turns.train("newest", "mesh.trainer=1", "mesh.sampler=1", "train.versions=newest", "steps=4",
                      "sampling.slots_per_device=4", "environment.rollouts=16", "train.evaluate_every=1",
                      "train.max_staleness=2")
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
    assert len(read_lines(run / "evaluations.jsonl")) == 5
    for step in range(1, 5):
        for stored in read_file(run / "groups" / f"step_{step:06d}.parquet"):
            sampled = np.concatenate([one.sampled_versions for one in stored.group.completions])
            assert stored.group.version == sampled.min() >= step - 3 and sampled.max() < step


def test_replay_samples_every_group_again(here: Path) -> None:
    for step, number in ((1, 0), (2, 1), (3, 0)):
        result = replay(ReplayConfig(run=str(here), step=step, group=number))
        assert result["identical"], (step, number, result["difference"])
