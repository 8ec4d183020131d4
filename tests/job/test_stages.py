"""The stages of a job: each opens what it needs, once, in whatever order they are read, and none
forks after JAX has threads."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from tiny_runs import Workshop

from shoal.config.commands import EvalConfig
from shoal.config.merge import compose
from shoal.config.sections.devices import MeshSection
from shoal.findings import Findings
from shoal.job.job import Job
from shoal.job.stages import StagedJob, stage
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.stop import NotHere


class Small(StagedJob):
    """Notes in which order its stages open."""

    def __init__(self, command: Any = "train") -> None:
        super().__init__(command, Findings())
        self.order: list[str] = []
        self.fault: BaseException | None = None

    @stage("data", "task.path", commands=("train", "eval"))
    def rows(self) -> int:
        self.order.append("rows")
        if self.fault:
            raise self.fault
        return 3

    @stage("reward", "reward.functions", after=("rows",), commands=("train",), forks=True)
    def workers(self) -> str:
        self.order.append("workers")
        return f"{self.rows} rows" if "rows" in self.opened else "no rows"

    @stage(after=("workers",), starts_threads=True)
    def devices(self) -> int:
        self.order.append("devices")
        return 2

    @stage("model", "model.path", needs=("devices", "rows"), commands=("train", "eval"))
    def model(self) -> int:
        self.order.append("model")
        return self.rows * self.devices

    @stage(needs=("devices",), commands=("train",))
    def careless(self) -> int:
        return self.rows

    @stage(commands=("doctor",), forks=True)
    def late(self) -> None:
        self.order.append("late")


def job_of(workshop: Workshop, command: str = "train", *words: str) -> Job:
    config, _ = compose(command, [*workshop.words("stages")[1:], *words])
    return Job(config, Console(io.StringIO()))


# ---- of any job


def test_a_stage_opens_what_it_needs_first_and_once():
    job = Small()
    assert job.model == 6 and job.model == 6
    assert job.order == ["rows", "workers", "devices", "model"]


def test_a_stage_fails_with_the_error_of_what_it_needs_which_is_noted_once():
    job = Small()
    job.fault = ShoalError("no rows here")
    job.collect(through="model")
    assert job.order == ["rows", "workers", "devices"]  # `workers` does without rows
    assert job.workers == "no rows" and not job.is_open("model")
    with pytest.raises(ShoalError, match="no rows here"):
        _ = job.model
    [finding] = job.findings.found
    assert (finding.check, finding.level, finding.key) == ("data", "wrong", "task.path")


def test_a_stage_that_another_command_has_is_nobodys_need():
    job = Small("eval")
    assert job.model == 6 and job.order == ["devices", "rows", "model"]


def test_a_stage_that_is_left_out_takes_along_those_that_need_it():
    job = Small()
    job.leave_out("devices")
    job.leave_out("devices")
    job.check()
    assert job.order == ["rows", "workers"]


def test_a_dry_run_goes_on_without_what_is_not_here():
    job = Small()
    job.fault = NotHere("openai/gsm8k")
    job.leave_out("careless")
    job.check()
    assert job.is_open("devices") and not job.is_open("model")
    assert {finding.text for finding in job.findings.found} == {
        "openai/gsm8k is not on this machine, and so not checked"
    }


def test_a_stage_reads_no_other_than_it_names():
    with pytest.raises(RuntimeError, match="stage careless reads rows, which it does not need"):
        _ = Small().careless


@pytest.mark.parametrize("name", ["workers", "late"])
def test_a_stage_that_the_job_lacks_is_not_read(name: str):
    job = Small()
    job.leave_out("workers")
    with pytest.raises(LookupError, match=f"a job of shoal train has no stage {name}"):
        job.open(name)
    assert job.order == []


def test_a_job_that_only_estimates_opens_whatever_is_read():
    job = Small("estimate")
    assert job.workers == "no rows" and job.order == ["workers"]


def test_forking_after_threads_is_refused():
    job = Small("doctor")
    assert job.devices == 2
    with pytest.raises(RuntimeError, match=r"stage late forks processes.*open late first"):
        _ = job.late
    assert "late" not in job.order


# ---- of ours


def test_stages_stand_behind_what_they_need():
    """So that a check of all meets each fault first where it arises."""
    behind: set[str] = set()
    for name, declared in Job.stages.items():
        assert behind >= {*declared.needs, *declared.after}, name
        behind.add(name)


def test_processes_are_forked_before_devices_whatever_is_read_first(workshop: Workshop):
    with job_of(workshop) as job:
        assert job.learner
        opened = list(job.opened)
        assert opened.index("reward_pool") < opened.index("world") < opened.index("devices")
        assert opened.index("sessions") < opened.index("devices")
        # What it would have decided by the data had its need not been opened.
        assert "sampling.evaluation_slots" in job.decisions


def test_an_evaluation_has_no_stages_of_training():
    with Job(EvalConfig(), Console(io.StringIO())) as job:
        for name in ("config", "prompts", "world", "memory_finding"):
            with pytest.raises(LookupError, match=f"a job of shoal eval has no stage {name}"):
                job.open(name)
        assert job.opened == {}


def test_a_job_of_a_given_model_reads_no_data(workshop: Workshop):
    with job_of(workshop) as job:
        spec = job.model_source
    config, _ = compose("train", workshop.words("stages")[1:])
    with Job(config, Console(io.StringIO()), model_source=spec) as job:
        assert job.command == "estimate" and job.learner
        assert not {"loaded_task", "reward_pool", "world", "sampling_settings"} & job.opened.keys()


def test_a_configuration_is_the_same_whenever_it_is_read(workshop: Workshop):
    """What follows from the data replaced the configuration that had been read before."""
    with job_of(workshop) as job:
        early = job.config_for_devices
        config = job.config
        assert job.sampling_settings and job.learner
        assert job.config is config and job.config_for_devices is early
        assert config == replace(early, sampling=job.sampling_settings)
        assert early.sampling.evaluation_slots != config.sampling.evaluation_slots


def test_what_is_requested_names_no_process(workshop: Workshop):
    mesh = MeshSection(coordinator="127.0.0.1:7777", processes=2, process=1)
    config, _ = compose("train", workshop.words("stages")[1:])
    with Job(replace(config, mesh=mesh), Console(io.StringIO())) as job:
        assert job.requested.mesh == MeshSection() and job.process_mesh == mesh
