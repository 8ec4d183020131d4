"""Assembles a training run: from a configuration to its parts, each opened before what needs it.

    open_task       questions, and the reward pool: forked before JAX has threads
    open_cluster    the Ray cluster of its samplers, if they are there
    open_world      the processes, if there are several
    open_devices    the mesh, and the configuration with the prompts of its devices
    open_data       the tokenised prompts and evaluation sets
    print_head      what the run will do with what, and warnings
    open_folder     the run folder, locked: whatever is wrong with a configuration was raised before
    open_recorder   metrics, sinks, groups
    assemble_run    all of them, the model, the learner and the sampler, as a Run
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from shoal.config.schema import Config
from shoal.config.text import texts_of, to_dict
from shoal.files import writing
from shoal.mesh import Roles, World, available_devices, memory_stats
from shoal.model.architecture import Architecture
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformer import Model
from shoal.report.console import Console
from shoal.report.findings import Findings
from shoal.report.folder import ReadFolder, RunFolder, is_run
from shoal.report.recorder import Recorder
from shoal.report.sink import check_sinks, make_sinks
from shoal.report.timeline import TIMELINE, Timeline
from shoal.rewards.pool import RewardPool
from shoal.rollout.dealt import DealtSource
from shoal.rollout.fleet import Fleet
from shoal.rollout.group_rewards import GroupRewards
from shoal.run.compilation import CompilationCounter
from shoal.run.derived import for_devices
from shoal.run.fingerprint import fingerprint
from shoal.run.hosts import training_fleet
from shoal.run.interrupt import stop_on_signals
from shoal.run.loading import ModelSpec, copy_model_files, open_run_model, open_teacher
from shoal.run.parts import make_learner, make_updater, open_data, open_reference, schedule_of
from shoal.run.preflight.head import print_head
from shoal.run.preflight.settings import check_before_weights
from shoal.run.processes import check_same, open_world
from shoal.run.profile import Profiler
from shoal.run.remat import trained_model
from shoal.run.resume import ResumePlan, restore_latest
from shoal.run.sampler_size import run_roles
from shoal.run.task import load_task, with_overlong
from shoal.run.workers import open_cluster
from shoal.tasks.data import showing_progress
from shoal.tasks.task import FROM_PYTHON, ROWS, Task
from shoal.trainer.checkpoint import MODEL_FOLDER, Checkpoints, versions
from shoal.trainer.evaluation import Evaluator
from shoal.trainer.loop import NOTHING_KEPT, Run
from shoal.trainer.update import num_scorings
from shoal.trainer.utilisation import Utilisation
from shoal.types import RolloutSource, ShoalError, StopSignal

if TYPE_CHECKING:
    from shoal.rollout.cluster import Cluster


def assemble_run(plan: ResumePlan, reward_functions: Sequence[Callable], console: Console, stack: ExitStack,
                 task: Task | None = None) -> Run:
    """The run of a plan. Raises ShoalError for whatever is wrong with the configuration, before the run folder exists;
    what must be closed at the end is pushed on `stack`."""
    started, compilations = time.perf_counter(), CompilationCounter()
    check_before_weights(plan.config, bool(reward_functions) or task is not None, resumed=plan.run is not None)
    check_sinks(plan.config.report)
    # Before the processes and devices: the pool's server is forked while this process has no threads of JAX (decision
    # 0006).
    with showing_progress(console.note):
        task, pool = open_task(plan.config, reward_functions, stack, task)
    for note in task.notes:
        console.note(note)
    cluster = open_cluster(plan.config, console, stack)
    world, plan = open_world(plan)
    stack.enter_context(world)
    spec, findings = open_run_model(plan.config.model, plan.run, None), Findings()
    config, roles = open_devices(plan, spec.architecture, console)
    model = trained_model(config, spec, roles)
    data = open_data(config, task, spec.tokenizer, findings.of("data").warning)
    print_head(config, roles, task, None if plan.run else pool, spec, model, data, console, findings)
    # Loaded before the folder exists, so that bad weights leave none behind; a resumed run reads them only for KL.
    weights = None if plan.run else spec.load(roles.trainer, np.float32)
    reference = open_reference(config, spec, model, roles.reference, weights)
    teacher = open_teacher(config, spec, roles.reference, console)

    folder, stop = open_folder(plan, console, stack, world), StopSignal()
    rewards = GroupRewards(task, pool, spec.tokenizer.decode)
    source = stack.enter_context(closing(make_source(
        config, model, roles, spec.tokenizer, rewards, stop, console, world, cluster)))
    updater = make_updater(config, make_learner(config, model), reference, teacher)
    facts = fingerprint(task, config.seed, *(scorer.parameters if scorer else None for scorer in (reference, teacher)))
    check_same(world, "data and rewards", {"data": facts["data"], **facts["rewards"]})
    shapes = source.published_shapes()
    restored = restore_latest(folder, updater.learner, shapes, facts, console, world) if plan.run else None
    first = restored.version if restored else 0
    if world.is_main:
        write_head(folder, spec, config, resumed=plan.run is not None)
        console.keep_log(folder.log_path)
    utilisation = Utilisation.on(roles.trainer.mesh.devices.flat, model.architecture, model.dtype,
                                 config.algorithm.num_epochs, num_scorings(config.algorithm, teacher is not None))
    recorder = open_recorder(config, folder, first if plan.run else None, source, console, stack, started=started,
                             compilations=compilations.read, utilisation=utilisation, is_main=world.is_main)
    checkpoints = stack.enter_context(closing(
        Checkpoints(folder.checkpoints_path, config.checkpoint.keep_last, config.checkpoint.keep_best)))
    if weights is None and restored is None:
        weights = spec.load(roles.trainer, np.float32)
    recorder.spent("start", time.perf_counter() - started)
    command = resume_command(folder.path, config)
    if world.count > 1:
        command = f"in each of the {world.count} processes, {command}"
    # Last: before this a signal ends the process at once.
    stack.enter_context(stop_on_signals(stop, lambda: kept_text(folder.path, command)))
    # Of several processes the source agrees on a stop when it takes groups; elsewhere they would part.
    stop = stop if world.count == 1 else StopSignal()
    run = Run(
        config=config,
        parameters=None if restored else weights,
        updater=replace(updater, stop=stop),
        source=source,
        prompts=data.prompts,
        evaluator=Evaluator(data.sets, config.sampling.params, config.pass_k, task),
        checkpoints=checkpoints,
        recorder=recorder,
        schedule=schedule_of(config.train),
        restored=restored,
        fingerprint=facts,
        stop=stop,
        resume_command=command,
        around_step=Profiler(config.report.profile if world.is_main else (), folder.path / "profile",
                             console.warning).step,
        keep_settings=partial(folder.write_config, *texts_of(config), first) if plan.run else None,
    )
    if config.report.timeline and world.is_main:
        run.timeline = stack.enter_context(closing(Timeline(folder.path / TIMELINE, console.warning)))
        if isinstance(source, Fleet):
            source.follow(run.timeline)
    return run


def open_task(config: Config, reward_functions: Sequence[Callable], stack: ExitStack,
              task: Task | None = None) -> tuple[Task, RewardPool]:
    """The task, and the worker processes that score its completions."""
    task = task or load_task(config.task, config.reward, reward_functions, config.algorithm.uses_rewards)
    if config.train.evaluate_every < 0:
        task = replace(task, evaluations={})
    task = with_overlong(task, config.reward, config.sampling.max_completion_tokens)
    return task, stack.enter_context(closing(RewardPool(task.rewards, config.reward, config.steps)))


def open_devices(plan: ResumePlan, a: Architecture, console: Console) -> tuple[Config, Roles]:
    """The meshes, and the configuration with prompts counted for all of the trainer's devices."""
    roles, given = run_roles(plan.config, a, available_devices(plan.config.mesh)), plan.config.mesh
    if roles.sampler.tensor != (given.sampler_tensor or given.tensor):
        console.note(f"mesh.sampler_tensor={roles.sampler.tensor}: a replica of the sampler does not fit fewer devices")
    config = for_devices(plan.config, roles.trainer.mesh.size, roles.trainer.platform)
    before, prompts = plan.config.batch.prompts_per_step, config.batch.prompts_per_step
    if plan.run and before != prompts:
        console.warning(f"batch.prompts_per_step changes from {before} to {prompts}: the number of the trainer's "
                        "devices has changed")
    return config, roles


def make_source(config: Config, model: Model, roles: Roles, tokenizer: Tokenizer, rewards: GroupRewards,
                stop: StopSignal, console: Console, world: World, cluster: Cluster | None) -> RolloutSource:
    """The source of groups in this process."""
    fleet = training_fleet(config, model, roles, tokenizer, rewards, stop, console, cluster)
    return DealtSource(fleet, world, stop) if world.count > 1 else fleet


def open_folder(plan: ResumePlan, console: Console, stack: ExitStack, world: World) -> RunFolder:
    """The run's folder, locked: a new one, or the resumed run's. Of several processes the first has it, for all."""
    config = plan.config
    if not world.is_main:
        return stack.enter_context(ReadFolder(world.exchange_json("the run folder's name", "")[0]))
    folder = stack.enter_context(
        RunFolder(plan.run) if plan.run else RunFolder.create(config.base_output_directory, config.run_name))
    # Given twice at once, a command finds no run in either process; the lock decides which of them makes it.
    if not plan.run and is_run(folder.path):
        raise ShoalError(f"another process has just started the run {folder.path}: give the same command again to "
                         "resume it")
    if folder.no_locks:
        console.warning(f"the file system of {folder.path} grants no locks ({folder.no_locks}): nothing keeps a second "
                        "process out of this run")
    console.note(f"run folder {folder.path}")
    world.exchange_json("the run folder's name", str(folder.path))
    return folder


def write_head(folder: RunFolder, spec: ModelSpec, config: Config, resumed: bool) -> None:
    """Writes what a run folder holds from the start: the configuration (of a resumed run, the loop does it) and the
    model's files, and makes `last` name this run."""
    if not resumed:
        folder.write_config(*texts_of(config))
    folder.remember(config.base_output_directory)
    if spec.folder != folder.path / MODEL_FOLDER:
        with writing(folder.path, "base_output_directory"):
            copy_model_files(spec, folder.path / MODEL_FOLDER)


def open_recorder(config: Config, folder: RunFolder, resumed_at: int | None, source: RolloutSource,
                  console: Console, stack: ExitStack, *, started: float,
                  compilations: Callable[[], int], utilisation: Utilisation | None, is_main: bool) -> Recorder:
    """The recorder with its sinks. `resumed_at`: the version that a resumed run starts from, else None."""
    sinks = make_sinks(folder.path, config.report, to_dict(config), config.run_name or folder.path.name, resumed_at,
                       console.note, console.warning) if is_main else []
    for sink in sinks:
        stack.callback(sink.close)
    return stack.enter_context(closing(Recorder(
        folder, console, config.steps, config.report.groups and is_main, source.read_stats, compilations, peak_bytes,
        sinks, utilisation and utilisation.share, started, warnings_stop=config.train.on_warning == "stop")))


def resume_command(folder: Path, config: Config) -> str:
    """What resumes a run: a line for the shell, or for Python where its task or a reward came from there."""
    # The folder holds no code: a shell could not load what was passed to shoal.train.
    from_python = config.task.name == ROWS or any(name.startswith(FROM_PYTHON) for name in config.reward.functions)
    if from_python:
        return f'shoal.train(resume="{folder}", ...), with its task and reward'
    return f"shoal train {shlex.quote(f'resume={folder}')}"


def kept_text(folder: Path, command: str) -> str:
    """What a run that is stopped at once leaves: read from the disk, as a signal may come while anything is locked."""
    if found := versions(folder):
        return f"the checkpoint of step {found[-1]} stands, what came after it is lost; resume: {command}"
    return f"{NOTHING_KEPT}; start again: {command}"


def peak_bytes() -> int:
    """Most memory used on a device: the accelerator's own figure, on CPU the process's resident peak."""
    if "peak_bytes_in_use" in (stats := memory_stats(jax.local_devices()[0])):
        return int(stats["peak_bytes_in_use"])
    import resource

    # Linux gives KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
