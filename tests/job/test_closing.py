"""A job closes what its stages opened: the fleet, the reward pool and the sessions of environments
are each closed once, however the job ends."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Workshop

from shoal.config.merge import compose
from shoal.job import job as job_module
from shoal.job.job import Job
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.rewards.pool import RewardPool
from shoal.rollout.fleet import Fleet
from shoal.workers.sessions import Sessions

ENVIRONMENT = """\
class Guess:
    def reset(self, **columns):
        return None

    def respond(self, message: str):
        return None

    def get_reward(self):
        return 1.0
"""


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the classes whose `close` is called, in the order of the calls."""
    names: list[str] = []
    for owned in (Fleet, RewardPool, Sessions):
        close = owned.close

        def note(self: Any, name: str = owned.__name__, close: Any = close) -> None:
            names.append(name)
            close(self)

        monkeypatch.setattr(owned, "close", note)
    return names


def job_with_an_environment(workshop: Workshop, folder: Path, command: str) -> Job:
    file = folder / "guess.py"
    file.write_text(ENVIRONMENT)
    words = [
        f"model={workshop.model}",
        "task=gsm8k",
        f"task.path={workshop.data}",
        f"reward={workshop.rewards}:letters",
        "sampling.max_prompt_tokens=512",
        "sampling.max_completion_tokens=64",
        f"environment={file}:Guess",
        "reward.workers=1",
    ]
    if command == "train":
        words.append(f"base_output_directory={workshop.runs}")
    config, _ = compose(command, words)
    return Job(config, Console(io.StringIO()))


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize("fails", [False, True])
def test_each_is_closed_once_and_the_fleet_first(
    workshop: Workshop, tmp_path: Path, closed: list[str], command: str, fails: bool
) -> None:
    try:
        with job_with_an_environment(workshop, tmp_path, command) as job:
            assert isinstance(job.rollout_source, Fleet)
            assert job.rollout_source.turn_driver is not None
            assert not closed
            if fails:
                raise KeyError("after opening")
    except KeyError:
        assert fails
    assert closed[0] == "Fleet"
    assert sorted(closed) == ["Fleet", "RewardPool", "Sessions"]


@pytest.mark.parametrize("command", ["train", "eval"])
def test_what_was_opened_before_the_fleet_is_closed_once_if_the_fleet_cannot_be_made(
    workshop: Workshop,
    tmp_path: Path,
    closed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    def fail(*args: Any, **options: Any) -> Fleet:
        raise ShoalError("no sampler")

    monkeypatch.setattr(job_module, "training_fleet", fail)
    monkeypatch.setattr(job_module, "caller_fleet", fail)
    with (
        pytest.raises(ShoalError, match="no sampler"),
        job_with_an_environment(workshop, tmp_path, command) as job,
    ):
        _ = job.rollout_source
    assert sorted(closed) == ["RewardPool", "Sessions"]
