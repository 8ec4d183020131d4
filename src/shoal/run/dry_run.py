"""`--dry-run`: judges a configuration as its run would, before weights are read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config.keys import command_of, keys_of
from shoal.config.schema import Config, MeshSection, ModelSection, TaskSection
from shoal.config.values import get_value
from shoal.files import INPUTS, check_input, check_new_file, check_new_folder
from shoal.report.findings import Finding, Findings
from shoal.run.derived import for_devices
from shoal.run.preflight.settings import check_before_weights, check_model, check_run_folder, check_settings
from shoal.run.task import given_rewards
from shoal.tasks.data import evaluating
from shoal.tasks.data_files import is_hub_id
from shoal.tasks.task import load_by_name

if TYPE_CHECKING:
    from shoal.run.job import Job

LARGE_STEP = 1 << 24
"""Tokens of a step above which JAX is started, to hold its memory against the devices'."""

GENERATED = ("words", "countdown")
"""Tasks whose questions are made here, unless they have a path."""


def check_dry_run(config: Any) -> list[Finding]:
    """What a run would warn of; ShoalError for what it would refuse. The user's own model and data are checked unless
    they may be the hub's. JAX is imported for these, a topology and a run that is there; it is started for a mesh, a
    step of LARGE_STEP tokens, or prompts a device that may be too few."""
    findings, known, command = Findings(), keys_of(type(config)), command_of(type(config))
    check_before_weights(config)
    check_files(config, findings)
    if "reward.functions" in known:
        given_rewards(config.reward)
    if isinstance(config, Config):
        check_settings(config, findings)
        check_run_folder(config)
        check_job(config, findings)
        return findings.at("wrong", "warning")
    evaluates = command == "eval" and not config.responses
    if "task.path" in known and is_local(config.task) and (evaluates or config.task.name == "custom"):
        with evaluating():
            load_by_name(config.task, config.reward)
    if "mesh.fsdp" in known and config.mesh != MeshSection():
        with _quiet_job(config, findings) as job:
            job.given_roles  # noqa: B018
    return findings.at("wrong", "warning")


def check_job(config: Config, findings: Findings) -> None:
    """Opens a training job's stages on data and tokenizer as far as they are on this machine, and those on devices
    where the configuration says something of them."""
    if command_of(type(config)) == "train":
        from shoal.run.resume import resolve_run

        config = resolve_run(config, findings.of("configuration")).config
    is_here, has_data, section = _is_here(config.model), is_local(config.task), config.task
    if has_data and not is_here:
        load_by_name(section, config.reward)
    if is_here and (has_data or config.model.path != ModelSection.path):
        made_here = section.name in GENERATED and not section.path
        with _quiet_job(config, findings) as job:
            for name in ("tokenizer", *(("sets", "prompts", "lengths") if has_data or made_here else ())):
                getattr(job, name)
    if command_of(type(config)) == "train" and (config.mesh.coordinator or config.mesh.processes
                                                or config.mesh.process >= 0):
        from shoal.mesh.processes import find_processes

        if (processes := find_processes(config.mesh).processes) > 1:
            findings.of("mesh").warning(f"mesh.processes={processes}: the devices of the others are not known here; "
                                        "mesh and memory are judged when all have met, before weights are read")
            return
    # Of several processes none is started, so the devices of all are not known.
    own_mesh = config.mesh != MeshSection() and config.mesh.processes <= 1
    few_prompts = 0 < config.batch.prompts_per_device < config.algorithm.num_minibatches
    if own_mesh or few_prompts or getattr(config, "topology", "") or _tokens(config) > LARGE_STEP:
        check_placement(config, is_here, findings)


def check_placement(config: Config, model_is_here: bool, findings: Findings) -> None:
    """The devices of a job, and where these and the model are here, their memory."""
    from shoal.mesh.topology import parse_topology, placeholder_devices
    from shoal.run.loading import ModelSpec, known_architecture
    from shoal.run.preflight.inputs import check_idle

    topology: str = getattr(config, "topology", "")
    devices = placeholder_devices(parse_topology(topology)) if topology else ()
    known = known_architecture(config.model) if topology else None
    with _quiet_job(config, findings, devices=devices, spec=ModelSpec(Path(), known) if known else None) as job:
        roles = job.roles if known or (model_is_here and not topology) else job.given_roles
        check_idle(config.mesh, roles, len(job.devices), findings)
        for_devices(config, roles.trainer.mesh.size, roles.trainer.platform)
        if model_is_here and not topology:
            job.sizes  # noqa: B018


def _quiet_job(config: Any, findings: Findings, **parts: Any) -> Job:
    from shoal.report.console import Console
    from shoal.run.job import Job

    return Job(config, Console(io.StringIO()), findings=findings, **parts)


def check_files(config: Any, findings: Findings) -> None:
    """ShoalError for a file to read that is missing, and for one to write that is there. A warning for what looks like
    a folder and would be looked for on the hub."""
    known, command = keys_of(type(config)), command_of(type(config))
    for key in (*INPUTS, "to", "output"):
        if value := getattr(config, key, ""):
            is_folder = key == "to" or command == "pretrain"
            (check_input if key in INPUTS else check_new_folder if is_folder else check_new_file)(value, key)
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
    s, b = config.sampling, config.batch
    prompts = b.prompts_per_device or b.prompts_per_step
    return prompts * b.group_size * (s.max_prompt_tokens + s.max_completion_tokens)
