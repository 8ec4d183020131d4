"""`--dry-run`: judges a configuration as its run would, before weights are read."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checks.settings import (
    check_before_weights,
    check_model,
    check_run_folder,
    check_settings,
    stop_on_warnings,
)
from shoal.config.commands import PlanConfig, command_of
from shoal.config.derived import for_devices, longest_sequence, step_sizes
from shoal.config.key import get_value, keys_of
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import LoraSection, ModelSection
from shoal.config.train import Config
from shoal.files import INPUTS, check_input, check_new_file, check_new_folder, find_input, offline
from shoal.findings import NOT_HERE, Finding, Findings
from shoal.records import ShoalError
from shoal.runs.reader import read_summary

if TYPE_CHECKING:
    from shoal.job.job import Job
    from shoal.mesh import Roles

LARGE_STEP = 1 << 24
"""Tokens of a planned step above which JAX is started, to hold its memory against the devices'."""


def check_dry_run(config: Any) -> list[Finding]:
    """What a job would warn of, and what is not checked; ShoalError for what it would refuse. The
    job opens the stages that it would open before it reads weights (`Job.check`), without those
    that need a download."""
    findings = Findings()
    command = command_of(type(config))
    check_before_weights(config)
    check_files(config, findings)
    if command == "plan":  # it reads neither data nor a tokenizer
        check_settings(config, findings)
        check_run_folder(config)
        if config.mesh != MeshSection() or config.topology or _needs_memory(config):
            check_placement(config, findings)
    elif command == "eval":
        if not config.responses:
            _check_job(config, findings, command)
    elif command in ("train", "sft", "doctor", "generate", "serve"):
        _check_job(config, findings, command)
    elif command in ("export", "convert"):
        from shoal.mesh import available_devices

        available_devices()
        _check_source(config.source)
    shown = findings.at("wrong", "warning")
    for finding in findings.at("ok"):
        if finding.check == NOT_HERE and finding not in shown:
            shown.append(finding)
    return shown


def _check_job(config: Any, findings: Findings, command: str) -> None:
    """Checks the stages of a job. `shoal train` leaves a run that has all its steps as it is."""
    resumed = None
    meets_others = False
    if command in ("train", "sft"):
        from shoal.job.resume import resolve_run

        plan = resolve_run(config, findings.of("configuration"))
        config = plan.config
        resumed = plan.run
        if resumed:
            summary = read_summary(resumed) or {}
            if summary.get("steps") == config.steps:
                return
        meets_others = _has_processes(config, findings)
    # A doctor's job is judged as that of its run.
    as_command = "train" if isinstance(config, Config) else None
    with offline(), _quiet_job(config, findings, resumed=resumed, command=as_command) as job:
        if meets_others:
            job.leave_out("world")
        job.check()
        model_is_missing = "roles" not in job.opened
        if isinstance(config, Config) and model_is_missing and not meets_others:
            _check_roles(job, job.requested_roles)
    if command in ("train", "sft"):
        stop_on_warnings(config, findings)


def _check_source(source: str) -> None:
    """ShoalError for a model's folder to export or convert whose weights are not there, or not
    those of its config.json."""
    from shoal.model.families import architecture_of
    from shoal.weights import huggingface

    folder = find_input(source, "from")
    if source and (folder / "config.json").is_file():
        huggingface.open_tensors(folder, architecture_of(folder))


def _check_roles(job: Job, roles: Roles) -> None:
    """What a job's devices allow, where no weights are placed on them."""
    from shoal.checks.inputs import check_idle
    from shoal.model.attention.selector import platform_fault

    attention = job.requested.model.attention
    fault = platform_fault(attention, roles.trainer.platform)
    if fault:
        raise ShoalError(f"model.attention={attention}: {fault}; leave it out", "model.attention")
    check_idle(job.requested.mesh, roles, len(job.devices), job.findings)
    for_devices(job.requested, roles.trainer.mesh.size, roles.trainer.platform)


def _needs_memory(config: Config) -> bool:
    """True where a step is so large, or has so few prompts a device, that its devices decide
    whether it can be."""
    if _tokens(config) > LARGE_STEP:
        return True
    return 0 < config.batch.prompts_per_device < config.algorithm.num_minibatches


def _has_processes(config: Config, findings: Findings) -> bool:
    """True, with a warning, for a run in several processes: none is started, so the devices of all
    are not known."""
    mesh = config.mesh
    if not (mesh.coordinator or mesh.processes or mesh.process >= 0):
        return False
    from shoal.mesh.processes import find_processes

    processes = find_processes(mesh).processes
    if processes > 1:
        findings.of("mesh").warning(
            f"mesh.processes={processes}: the devices of the others are not known here; mesh "
            "and memory are judged when all have met, before weights are read"
        )
    return processes > 1


def check_placement(config: PlanConfig, findings: Findings) -> None:
    """The devices of a plan, and their memory where they and the model are here."""
    import jax

    from shoal.mesh.topology import parse_topology, placeholder_devices
    from shoal.weights.source import ModelSource, known_architecture

    devices: Sequence[Any] = ()
    if config.topology:
        # The compilers for other devices would look for theirs, in vain, and print pages about it.
        jax.config.update("jax_platforms", "cpu")
        devices = placeholder_devices(parse_topology(config.topology))
    known = known_architecture(config.model)
    spec = None
    if known:
        spec = ModelSource(Path(), known)
    with _quiet_job(config, findings, devices=devices, spec=spec) as job:
        if known:
            job.open("positions")
        _check_roles(job, job.roles if known else job.requested_roles)
        if _is_here(config.model) and not config.topology:
            job.sizes  # noqa: B018


def _quiet_job(config: Any, findings: Findings, **parts: Any) -> Job:
    from shoal.job.job import Job
    from shoal.report.console import Console

    return Job(config, Console(io.StringIO()), findings=findings, **parts)


def adapter_lines(config: Any) -> list[str]:
    """What an adapter trains, where the model's sizes are on this machine. ShoalError for one that
    cannot be."""
    if not isinstance(config, Config) or (
        config.model.lora == LoraSection() and config.model.quantise == "none"
    ):
        return []
    from shoal.budget.memory import parameter_count
    from shoal.weights.source import check_quantised, known_architecture, planned_architecture

    if not (known_architecture(config.model) or _is_here(config.model)):
        return []
    a = planned_architecture(config.model)
    check_quantised(config.model, a)
    if a.adapter is None:
        return []
    frozen = parameter_count(a.base)
    return [
        f"LoRA of rank {a.adapter.rank} trains {parameter_count(a) - frozen:,} parameters beside "
        f"{frozen:,} frozen ones"
    ]


def check_files(config: Any, findings: Findings) -> None:
    """ShoalError for a file to read that is missing, and for one to write that is there. A warning
    for what looks like a folder and would be looked for on the hub."""
    known = keys_of(type(config))
    command = command_of(type(config))
    if command != "compat":  # it writes into folders that are there
        for key in (*INPUTS, "to", "output"):
            value = getattr(config, key, "")
            if not value:
                continue
            if key in INPUTS:
                check_input(value, key)
            elif key == "to" and command != "view":  # which writes its page to a file
                check_new_folder(value, key)
            else:
                check_new_file(value, key)
    if command == "export" and config.source:
        check_model(ModelSection(path=config.source), key="from")
    for key in ("model.path", "teacher.path", "task.path"):
        if key not in known:
            continue
        path = Path(get_value(config, key)).expanduser()
        if len(path.parts) == 2 and path.parent.is_dir() and not path.exists():
            findings.of("configuration").warning(
                f"{key}={path}: {path.parent}/ holds nothing of that name; the run would look for "
                "it on the hub",
                key,
            )


def _is_here(section: ModelSection) -> bool:
    """True for a model that needs no download: a folder, or the packaged one where `model.name`
    names no other."""
    if section.path == ModelSection.path:
        return not section.name
    return section.path != "" and Path(section.path).expanduser().is_dir()


def _tokens(config: Config) -> int:
    """Tokens of a step, if every prompt and completion is as long as it may be."""
    return step_sizes(config)[0] * longest_sequence(config)
