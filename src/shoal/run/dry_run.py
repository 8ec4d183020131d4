"""`--dry-run`: judges a configuration as its run would, before weights are read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config.keys import command_of, keys_of
from shoal.config.schema import Config, MeshSection, ModelSection, TaskSection
from shoal.config.sections import LoraSection
from shoal.config.values import get_value
from shoal.files import INPUTS, check_input, check_new_file, check_new_folder
from shoal.report.findings import Finding, Findings
from shoal.run.derived import for_devices, longest_sequence, step_sizes
from shoal.run.preflight.settings import check_before_weights, check_model, check_run_folder, check_settings
from shoal.run.task import given_rewards
from shoal.tasks.data_files import is_hub_id

if TYPE_CHECKING:
    from shoal.run.job import Job

LARGE_STEP = 1 << 24
"""Tokens of a step above which JAX is started, to hold its memory against the devices'."""

GENERATED = ("words", "countdown")
"""Tasks whose questions are made here, unless they have a path."""


def check_dry_run(config: Any) -> list[Finding]:
    """What a run would warn of; ShoalError for what it would refuse. The stages of its job are opened for which all is
    on this machine: data in files, a model in a folder, devices where a mesh or topology is given, for a step of
    LARGE_STEP tokens, or for prompts a device that may be too few. For others JAX is not even imported."""
    findings, known, command = Findings(), keys_of(type(config)), command_of(type(config))
    check_before_weights(config)
    check_files(config, findings)
    if "reward.functions" in known:
        given_rewards(config.reward)
    if isinstance(config, Config):
        check_settings(config, findings)
        check_run_folder(config)
        if command == "train":
            from shoal.run.resume import resolve_run

            config = resolve_run(config, findings.of("configuration")).config
        if command != "plan":  # it reads neither data nor a tokenizer
            check_inputs(config, findings)
        if command == "train" and _has_processes(config, findings):
            return findings.at("wrong", "warning")
    elif command == "eval" and not config.responses and is_local(config.task):
        with _quiet_job(config, findings) as job:
            job.questions  # noqa: B018
    is_placed = "mesh.fsdp" in known and (config.mesh != MeshSection() or getattr(config, "topology", ""))
    if is_placed or (isinstance(config, Config) and (
            _tokens(config) > LARGE_STEP or 0 < config.batch.prompts_per_device < config.algorithm.num_minibatches)):
        check_placement(config, findings)
    return findings.at("wrong", "warning")


def check_inputs(config: Config, findings: Findings) -> None:
    """Data and tokenizer of a training job, as far as they are on this machine."""
    has_data, is_packaged = is_local(config.task), config.model.path == ModelSection.path
    has_questions = has_data or (config.task.name in GENERATED and not config.task.path)
    if not _is_here(config.model):
        stages = ("questions",) if has_data else ()
    elif has_questions and not (is_packaged and not has_data):
        stages = ("tokenizer", "sets", "prompts", "lengths")
    else:
        stages = () if is_packaged else ("tokenizer",)
    if stages:
        with _quiet_job(config, findings) as job:
            for name in stages:
                getattr(job, name)


def _has_processes(config: Config, findings: Findings) -> bool:
    """True, with a warning, for a run in several processes: none is started, so the devices of all are not known."""
    mesh = config.mesh
    if not (mesh.coordinator or mesh.processes or mesh.process >= 0):
        return False
    from shoal.mesh.processes import find_processes

    if (processes := find_processes(mesh).processes) > 1:
        findings.of("mesh").warning(f"mesh.processes={processes}: the devices of the others are not known here; mesh "
                                    "and memory are judged when all have met, before weights are read")
    return processes > 1


def check_placement(config: Any, findings: Findings) -> None:
    """The devices of a job, and where these and the model of a training job are here, their memory."""
    import jax

    from shoal.mesh.topology import parse_topology, placeholder_devices
    from shoal.run.loading import ModelSpec, known_architecture
    from shoal.run.preflight.inputs import check_idle

    topology: str = getattr(config, "topology", "")
    if topology:  # the compilers for other devices would look for theirs, in vain, and print pages about it
        jax.config.update("jax_platforms", "cpu")
    devices = placeholder_devices(parse_topology(topology)) if topology else ()
    known = known_architecture(config.model) if command_of(type(config)) == "plan" else None
    with _quiet_job(config, findings, devices=devices, spec=ModelSpec(Path(), known) if known else None) as job:
        if not job.trains:
            job.given_roles  # noqa: B018
            return
        is_here = _is_here(config.model) and not topology
        roles = job.roles if known or is_here else job.given_roles
        check_idle(config.mesh, roles, len(job.devices), findings)
        for_devices(config, roles.trainer.mesh.size, roles.trainer.platform)
        if is_here:
            job.sizes  # noqa: B018


def _quiet_job(config: Any, findings: Findings, **parts: Any) -> Job:
    from shoal.report.console import Console
    from shoal.run.job import Job

    return Job(config, Console(io.StringIO()), findings=findings, **parts)


def adapter_lines(config: Any) -> list[str]:
    """What an adapter trains, where the model's sizes are on this machine. ShoalError for one that cannot be."""
    if not isinstance(config, Config) or (config.model.lora == LoraSection() and config.model.quantise == "none"):
        return []
    from shoal.run.loading import check_quantised, known_architecture, planned_architecture
    from shoal.run.size import parameter_count

    if not (known_architecture(config.model) or _is_here(config.model)):
        return []
    a = planned_architecture(config.model)
    check_quantised(config.model, a)
    if a.adapter is None:
        return []
    frozen = parameter_count(a.base)
    return [f"LoRA of rank {a.adapter.rank} trains {parameter_count(a) - frozen:,} parameters beside "
            f"{frozen:,} frozen ones"]


def check_files(config: Any, findings: Findings) -> None:
    """ShoalError for a file to read that is missing, and for one to write that is there. A warning for what looks like
    a folder and would be looked for on the hub."""
    known, command = keys_of(type(config)), command_of(type(config))
    for key in (*INPUTS, "to", "output"):
        if (value := getattr(config, key, "")) and command != "compat":  # it writes into folders that are there
            (check_input if key in INPUTS else check_new_folder if key == "to" else check_new_file)(value, key)
    if command == "export" and config.source:
        check_model(ModelSection(path=config.source), key="from")
    for key in ("model.path", "teacher.path", "task.path"):
        path = Path(get_value(config, key)).expanduser() if key in known else Path()
        if len(path.parts) == 2 and path.parent.is_dir() and not path.exists():
            findings.of("configuration").warning(
                f"{key}={path}: {path.parent}/ holds nothing of that name; the run would look for it on the hub", key)


def is_local(task: TaskSection) -> bool:
    """True for a task whose data are files of this machine, or would be if they were there."""
    if not task.path:
        return task.name == "custom" and bool(task.files)
    return Path(task.path).expanduser().exists() or not is_hub_id(task.path)


def _is_here(section: ModelSection) -> bool:
    """True for a model that needs no download: a folder, or the packaged one where `model.name` names no other."""
    if section.path == ModelSection.path:
        return not section.name
    return section.path != "" and Path(section.path).expanduser().is_dir()


def _tokens(config: Config) -> int:
    """Tokens of a step, if every prompt and completion is as long as it may be."""
    return step_sizes(config)[0] * longest_sequence(config)
