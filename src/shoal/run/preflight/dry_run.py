"""`--dry-run`: judges a configuration as its run would, before weights are read."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.config.keys import command_of, keys_of
from shoal.config.schema import Config, MeshSection, ModelSection, TaskSection
from shoal.config.values import get_value
from shoal.files import INPUTS, check_input, check_new_file, check_new_folder
from shoal.report.findings import Finding, Findings
from shoal.run.derived import for_devices
from shoal.run.preflight.settings import check_before_weights, check_model, check_run_folder, check_settings
from shoal.run.task import given_rewards
from shoal.tasks.data import evaluating
from shoal.tasks.data_folder import is_hub_id
from shoal.tasks.task import Task, load_by_name

LARGE_STEP = 1 << 24
"""Tokens of a step above which JAX is started, to hold its memory against the devices'."""

GENERATED = ("words", "countdown")
"""Tasks whose questions are made here, unless they have a path."""


def check_dry_run(config: Any) -> list[Finding]:
    """What a run would warn of; ShoalError for what it would refuse. The user's own model and data are checked unless
    they may be the hub's. JAX is imported for these, a topology and a run that is there; it is started for a mesh, a
    step of LARGE_STEP tokens, or prompts a device that may be too few."""
    check_before_weights(config)
    known, command, findings = keys_of(type(config)), command_of(type(config)), Findings()
    is_training = isinstance(config, Config)
    check_files(config, findings)
    if is_training:
        check_settings(config, findings)
        check_run_folder(config)
    if command == "train":
        from shoal.run.resume import resolve_run

        config = resolve_run(config, findings.of("configuration")).config
    # Of several processes none is started, so the devices of all are not known.
    own_mesh = "mesh.fsdp" in known and config.mesh != MeshSection() and config.mesh.processes <= 1
    model_is_here = "model.path" in known and _is_here(config.model)
    own_model = model_is_here and config.model.path != ModelSection.path
    task = None
    if "task.path" in known and is_local(config.task) and not (command == "eval" and config.responses) and (
            is_training or command == "eval" or config.task.name == "custom"):
        with nullcontext() if is_training else evaluating():
            task = load_by_name(config.task, config.reward)
    if "reward.functions" in known:
        given_rewards(config.reward)
    if is_training and (task or own_model):
        _check_inputs(config, task, model_is_here, findings)
    if command == "train" and (config.mesh.coordinator or config.mesh.processes or config.mesh.process >= 0):
        from shoal.mesh.processes import find_processes

        if (processes := find_processes(config.mesh).processes) > 1:
            findings.of("mesh").warning(f"mesh.processes={processes}: the devices of the others are not known here; "
                                        "mesh and memory are judged when all have met, before weights are read")
            return findings.at("wrong", "warning")
    needs_devices = is_training and 0 < config.batch.prompts_per_device < config.algorithm.num_minibatches
    topology = getattr(config, "topology", "")
    if own_mesh or needs_devices or topology or (is_training and _tokens(config) > LARGE_STEP):
        from shoal.mesh import available_devices, make_roles
        from shoal.mesh.topology import parse_topology, placeholder_devices
        from shoal.run.fitting import run_roles
        from shoal.run.loading import known_architecture

        devices = placeholder_devices(parse_topology(topology)) if topology else available_devices(config.mesh)
        known_model = known_architecture(config.model) if topology else None
        roles = run_roles(config, known_model, devices) if known_model else make_roles(config.mesh, devices)
        config = for_devices(config, roles.trainer.mesh.size, roles.trainer.platform) if is_training else config
        if is_training:
            from shoal.run.preflight.inputs import check_idle

            check_idle(config.mesh, roles, len(devices), findings)
        if is_training and model_is_here and not topology:
            from shoal.run.fitting import trained_model
            from shoal.run.loading import open_model
            from shoal.run.memory import check_memory

            loaded = open_model(config.model, None)
            roles = run_roles(config, loaded.architecture, available_devices(config.mesh))
            model = trained_model(config, loaded, roles)
            findings.extend([check_memory(config, model, roles)])
    return findings.at("wrong", "warning")


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


def _check_inputs(config: Config, task: Task | None, model_is_here: bool, findings: Findings) -> None:
    """Checks tokenizer, template and data, as far as they are on this machine."""
    from shoal.run.loading import open_model
    from shoal.run.parts import open_prompts, prepare_sets
    from shoal.run.preflight.inputs import check_prompts, check_tokenizer
    from shoal.run.task import with_fewer_questions

    if not model_is_here:
        return
    spec = open_model(config.model, None)
    tokenizer = spec.tokenizer
    check_tokenizer(tokenizer, (*spec.notes, *tokenizer.notes), findings)
    if task is None and config.task.name in GENERATED and not config.task.path:
        task = load_by_name(config.task, config.reward)
    if task is None:
        return
    task = with_fewer_questions(task, config.task)
    if each := config.batch.prompts_per_device:  # on one device at least
        config = replace(config, batch=replace(config.batch, prompts_per_step=each))
    prepare_sets(task, tokenizer, config.sampling, findings.of("data", "task.path").warning)
    open_prompts(config, task, tokenizer)
    check_prompts(config, task, tokenizer, findings)
