"""Checks a configuration for `--dry-run` as its run would check it, before weights are read."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
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
from shoal.tasks.task import Task

if TYPE_CHECKING:
    from shoal.job.job import Job
    from shoal.mesh import Roles

LARGE_STEP = 1 << 24
"""If a planned step has more tokens, JAX is started to compare its memory with that of the
devices."""


def check_dry_run(
    config: Any, functions: Sequence[Callable] = (), task: Task | None = None
) -> list[Finding]:
    """Checks a command's configuration as its job would before it reads weights (`Job.check`),
    without the stages that need a download. Of commands like compat and view, and of eval with
    `responses`, only settings, names and files are checked. Returns the findings that are wrong or
    warnings, and those that say what is not checked because it is not on this machine. ShoalError
    if the command would refuse the configuration. `functions`, `task`: reward functions and data
    that were given from Python."""
    findings = Findings()
    command = command_of(type(config))
    check_before_weights(config)
    check_files(config, findings)
    if command == "plan":  # it reads neither data nor a tokenizer
        check_settings(config, findings)
        check_run_folder(config)
        if config.mesh != MeshSection() or config.topology or _depends_on_devices(config):
            check_placement(config, findings)
    elif command == "eval":
        if not config.responses:
            _check_job(config, findings, command, functions=functions, task=task)
    elif command in ("train", "sft", "doctor", "generate", "serve"):
        _check_job(config, findings, command, functions=functions, task=task)
    elif command in ("export", "convert"):
        from shoal.mesh import available_devices

        available_devices()
        _check_source(config.source)
    shown = findings.at("wrong", "warning")
    for finding in findings.at("ok"):
        if finding.check == NOT_HERE and finding not in shown:
            shown.append(finding)
    return shown


def _check_job(config: Any, findings: Findings, command: str, **given: Any) -> None:
    """Opens the stages of a command's job that can refuse it, as far as nothing must be downloaded.
    `given`: what the job got from Python, as arguments of `Job`.
    A run in several processes is checked without its devices and its model. Returns at once for a
    resumed run that has made all its steps, because `shoal train` leaves such a run as it is.
    ShoalError if a stage refuses the job, or, in training with `train.on_warning=stop`, if there
    are warnings."""
    resumed = None
    has_other_processes = False
    if command in ("train", "sft"):
        from shoal.job.resume import resolve_run

        resume = config.resume
        plan = resolve_run(config, findings.of("configuration"))
        config = plan.config
        resumed = plan.run
        if resumed:
            summary = read_summary(resumed)
            if summary and summary.is_end_for(config.steps, resume):
                return
        has_other_processes = _has_processes(config, findings)
    # `shoal doctor` is judged like the run that it examines.
    as_command = "train" if isinstance(config, Config) else None
    given |= {"resumed": resumed, "command": as_command}
    with offline(), _quiet_job(config, findings, **given) as job:
        if has_other_processes:
            job.leave_out("world")
        job.check()
        model_is_missing = "roles" not in job.opened
        if isinstance(config, Config) and model_is_missing and not has_other_processes:
            _check_roles(job, job.requested_roles)
    if command in ("train", "sft"):
        stop_on_warnings(config, findings)


def _check_source(source: str) -> None:
    """Checks `from`, the model to export or convert, if it is a folder with a config.json; does
    nothing for other inputs, like a run or a name on the hub. ShoalError if the weights in it are
    missing or do not fit that file."""
    from shoal.model.families import architecture_of
    from shoal.weights import huggingface

    folder = find_input(source, "from")
    # Without `from`, `folder` would be the working folder, which is not meant.
    has_model = source != "" and (folder / "config.json").is_file()
    if has_model:
        # Called for its errors alone: it compares the files' headers and reads no weights.
        huggingface.open_tensors(folder, architecture_of(folder))


def _check_roles(job: Job, roles: Roles) -> None:
    """Checks `roles` against the settings, if the job's own stages cannot, because its model is not
    here. ShoalError if the platform lacks the requested kernel of attention, or if the prompts of a
    step do not fit the number of devices; adds a finding about idle devices to the job's."""
    from shoal.checks.inputs import check_idle
    from shoal.model.attention.selector import platform_fault

    attention = job.requested.model.attention
    fault = platform_fault(attention, roles.trainer.platform)
    if fault:
        raise ShoalError(f"model.attention={attention}: {fault}; leave it out", "model.attention")
    check_idle(job.requested.mesh, roles, len(job.devices), job.findings)
    # called for its error alone
    for_devices(job.requested, roles.trainer.mesh.size, roles.trainer.platform)


def _depends_on_devices(config: Config) -> bool:
    """True if it depends on the devices whether a step is possible: if it may have more than
    LARGE_STEP tokens, or if `batch.prompts_per_device` is set and below
    `algorithm.num_minibatches`."""
    if _tokens(config) > LARGE_STEP:
        return True
    return 0 < config.batch.prompts_per_device < config.algorithm.num_minibatches


def _has_processes(config: Config, findings: Findings) -> bool:
    """True if the run has several processes, with a warning among `findings`: a dry run starts
    none, so it does not know all devices. ShoalError if the keys of `mesh` about processes are
    wrong."""
    mesh = config.mesh
    if not (mesh.coordinator or mesh.processes or mesh.process >= 0):
        return False
    from shoal.mesh.processes import find_processes

    processes = find_processes(mesh).processes
    if processes > 1:
        findings.of("mesh").warning(
            f"mesh.processes={processes}: the devices of the others are not known here; mesh "
            "and memory are checked when all are connected, before weights are read"
        )
    return processes > 1


def check_placement(config: PlanConfig, findings: Findings) -> None:
    """Checks a plan's meshes on the devices of its topology; if it plans for this machine's devices
    and the model is here too, also whether its memory fits. ShoalError if a mesh is impossible,
    memory does not fit, or, if the model's sizes are known here, a prompt with its completion may
    be longer than the model's positions. Side effect: for a topology JAX's platform becomes `cpu`
    in this process."""
    import jax

    from shoal.mesh.topology import parse_topology, placeholder_devices
    from shoal.weights.source import ModelSource, known_architecture

    devices: Sequence[Any] = ()
    if config.topology:
        # On other platforms JAX's compilers would search for their devices in vain, and print pages
        # about it.
        jax.config.update("jax_platforms", "cpu")
        devices = placeholder_devices(parse_topology(config.topology))
    known = known_architecture(config.model)
    model_source = None
    if known:
        model_source = ModelSource(Path(), known)  # no folder: nothing of the model is read
    with _quiet_job(config, findings, devices=devices, model_source=model_source) as job:
        if known:
            job.open("check_longest_sequence")
        _check_roles(job, job.roles if known else job.requested_roles)
        if _is_here(config.model) and not config.topology:
            job.open("memory_finding")  # raises if the memory does not fit


def _quiet_job(config: Any, findings: Findings, **parts: Any) -> Job:
    """Makes a job that prints nothing; what it finds goes into `findings`. No stage is open yet;
    the caller closes the job (`with`). `parts`: further arguments of `Job`."""
    from shoal.job.job import Job
    from shoal.report.console import Console

    return Job(config, Console(io.StringIO()), findings=findings, **parts)


def adapter_lines(config: Any) -> list[str]:
    """Returns a list with one line, which says how many parameters an adapter trains; [] if the
    configuration has no adapter, or if the model's sizes are not on this machine. ShoalError if the
    model cannot have such an adapter."""
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
        f"LoRA of rank {a.adapter.rank} trains {parameter_count(a) - frozen:,} parameters; "
        f"{frozen:,} are frozen"
    ]


def check_files(config: Any, findings: Findings) -> None:
    """Raises ShoalError if a file or folder to read is missing, or one to write exists already.
    Warns if a path looks like a folder, but would be taken for a name on the hub because it does
    not exist. `model.path`, `teacher.path` and `task.path` are the keys that are warned of; nothing
    is warned of names without a slash."""
    known = keys_of(type(config))
    command = command_of(type(config))
    if command != "compat":  # `compat` writes into folders that exist already
        for key in (*INPUTS, "to", "output"):
            value = getattr(config, key, "")
            if not value:
                continue
            if key in INPUTS:
                check_input(value, key)
            elif key == "to" and command != "view":  # `view` writes a file, not a folder
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
    """True if a model needs no download: it is a folder, or the packaged model and `model.name`
    names no other."""
    if section.path == ModelSection.path:
        return not section.name
    return section.path != "" and Path(section.path).expanduser().is_dir()


def _tokens(config: Config) -> int:
    """Returns the tokens of a step if every prompt and completion has its greatest length."""
    return step_sizes(config)[0] * longest_sequence(config)
