"""Opens a training run: makes the run's folder, weights, source, updater and recorder of a job."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from shoal.buckets import RUNS, address, area_of, cache_path
from shoal.chat.tokenizer_files import read_date, write_date
from shoal.config.derived import needs_first_weights, price_per_hour
from shoal.config.key import shown
from shoal.config.keywords import came_from_python
from shoal.config.stored import difference_from_defaults, texts_of, to_dict, to_yaml
from shoal.config.train import Config
from shoal.files import explain_write_errors
from shoal.job.fingerprint import fingerprint
from shoal.job.interrupt import stop_on_signals
from shoal.job.job import Job
from shoal.job.process import check_same, check_same_model
from shoal.job.profiler import Profiler
from shoal.job.recipe import follow, with_first_weights
from shoal.job.resume import restore_latest
from shoal.mesh import memory_stats
from shoal.model.flops import Utilisation
from shoal.model.parameters import frozen_specs, select
from shoal.protocols import RolloutSource
from shoal.records import Params, ShoalError
from shoal.report.recorder import Recorder
from shoal.report.sinks import make_sinks
from shoal.report.timeline import TIMELINE, Timeline
from shoal.rollout.fleet import Fleet
from shoal.runs.layout import MODEL_FOLDER, is_run, make_run_folder, refuse_foreign
from shoal.runs.mirror import Mirror
from shoal.runs.notes import RunNotes, write_notes
from shoal.runs.reader import StoredRun, read_requested
from shoal.runs.recipe import Followed
from shoal.runs.writer import NullRunWriter, RunWriter
from shoal.stop import StopSignal
from shoal.trainer.callbacks import Callbacks, KnownArguments, TrainingState
from shoal.trainer.evaluation import make_evaluator
from shoal.trainer.loop import NOTHING_KEPT, Run
from shoal.trainer.schedule import schedule_of
from shoal.trainer.scorers import ModelScorer
from shoal.trainer.update import critic_epochs, num_scorings
from shoal.weights.checkpoints import Checkpoints, largest_array, versions
from shoal.weights.source import ModelSource, copy_model_files


@dataclass(frozen=True)
class LoadedModels:
    """The models of a run on their devices, as they are before the first step."""

    weights: Params | None
    """All weights of the model that is trained; None if the run is resumed."""
    frozen: Params | None
    """The weights of that model that training does not change, because an adapter is trained."""
    initial: ModelScorer | None
    """The model with the weights that the run begins with: its reference, or its own teacher."""
    teachers: Mapping[str, ModelScorer]
    """Those that have weights of their own, by name."""
    frozen_of_critic: Params | None = None
    """The weights of the critic that training does not change, because an adapter is trained."""


def open_run(job: Job) -> Run:
    """Makes and returns the training run of a job: locks and fills the run's folder, reads the
    weights, or restores the newest checkpoint of a resumed run, and makes everything that the loop
    uses. Wrong weights or settings raise ShoalError before the folder exists, so a refused new run
    leaves none behind. Side effect: from here on SIGINT and SIGTERM request a stop of the run,
    until the job is closed."""
    config = job.config
    # Models come before the folder, so that bad weights leave no folder behind.
    models = load_models(job)
    folder = open_folder(job)
    if job.cluster:
        job.cluster.parity.keep(folder.path)
    source = job.rollout_source
    updater = job.make_updater(models.initial, models.teachers, job.teacher_servers)
    facts = checked_facts(job, models)
    restored = None
    if job.resumed:
        restored = restore_latest(
            folder=folder,
            a=job.model.architecture,
            state=job.state_shapes,
            shapes=source.published_shapes(),
            facts=facts,
            console=job.console,
            world=job.world,
            evaluates=bool(job.task.evaluations),
            frozen=models.frozen,
            frozen_of_critic=models.frozen_of_critic,
        )
    if restored and not job.task.evaluations:
        # The sets that earlier evaluations asked, if there were any: with these a later resume that
        # evaluates again is compared.
        facts["data"] = restored.extra["facts"]["data"]
    first_version = restored.version if restored else 0
    # A resumed run may have other settings, which are stored by the loop, after its first step.
    requested, decided = texts_of(job.requested, job.decisions)
    store_settings = partial(folder.write_config, requested, decided, first_version)
    if job.world.is_main:
        if not job.resumed:
            store_settings()
        begin_folder(job, folder, first_version)
    recorder = open_recorder(job, folder, source, first_version)
    recorder.followed = followed_recipe(job, models, folder)
    checkpoints = open_checkpoints(job, folder)
    weights = None
    critic_weights = None
    if restored is None:
        weights = weights_to_train(job, models)
        critic_weights = job.load_critic(weights)
    recorder.spent("start", time.perf_counter() - job.started)
    # Signals come last, because until then one may end the process at once.
    command = resume_command(folder.path, config, job.world.count)
    text_at_stop = partial(kept_text, folder.path, command)
    job.stack.enter_context(stop_on_signals(job.stop, text_at_stop))
    # With several processes only the source reacts to a stop, when it takes groups, because there
    # all processes agree on it; elsewhere some would stop and others continue.
    stop = job.stop if job.world.count == 1 else StopSignal()
    profiled_steps = config.report.profile if job.world.is_main else ()
    profiler = Profiler(profiled_steps, folder.path / "profile", job.console.warning)
    evaluator = make_evaluator(config, job.evaluation_sets, job.task)
    run = Run(
        config=config,
        parameters=weights,
        critic_parameters=critic_weights,
        updater=replace(updater, stop=stop),
        source=source,
        prompts=job.prompts,
        evaluator=evaluator,
        checkpoints=checkpoints,
        recorder=recorder,
        schedule=schedule_of(config.train),
        restored=restored,
        fingerprint=facts,
        stop=stop,
        resume_command=command,
        around_step=profiler.step,
        store_settings=store_settings if job.resumed else None,
        after_save=folder.saved,
        callbacks=open_callbacks(job, folder),
    )
    if config.report.timeline and job.world.is_main:
        run.timeline = open_timeline(job, folder, source)
    return run


def followed_recipe(job: Job, models: LoadedModels, folder: RunWriter) -> Followed | None:
    """Returns the recipe that the run follows, with the weights that the run began with, and
    writes it into the run's folder; None if it follows none. Prints if these weights are not those
    of the recipe."""
    followed = follow(job)
    if followed is None:
        return None
    followed = with_first_weights(followed, models.weights, models.frozen)
    if followed.weights_text():
        job.console.note(followed.weights_text())
    folder.write_recipe(followed.stored_text())
    return followed


def reads_own_model(job: Job) -> bool:
    """True if the run begins by reading the weights of `model.path`: each new run does, a resumed
    one only for its reference and for what an adapter freezes, because the trained weights are in
    its checkpoint."""
    if not job.resumed:
        return True
    return bool(job.model_source.architecture.adapter) or needs_first_weights(job.config)


def load_models(job: Job) -> LoadedModels:
    """Reads the weights of a run's models onto their devices and returns them, None for a model
    that the run does not use. A resumed run reads only what its checkpoint lacks: the weights that
    an adapter freezes, the reference and the teachers. ShoalError if a file is wrong, or if the
    processes of the run have different weights, tokenizers or kernels of attention."""
    source = job.model_source
    if reads_own_model(job):
        check_same_model(job.world, "the model", "model.path", source)
    weights = None if job.resumed else job.load_weights()
    if weights is not None:
        frozen = select(frozen_specs(source.architecture), weights)  # the same arrays, no copies
        already_read = weights
    else:
        frozen = source.load_frozen(job.roles.trainer, job.model.dtype)
        already_read = frozen
    initial = job.open_reference(already_read)
    for teacher_source in job.teacher_sources.values():
        check_same_model(job.world, "the teacher", "teacher.path", teacher_source)
    teachers = job.load_teachers()
    # Each process has tried the kernels on its own GPU, but all must compile the same program.
    check_same(
        job.world,
        "the attention kernels, which model.attention=blocked does not use",
        {
            "model.attention": job.model.attention,
            "the teacher's": [teacher.model.attention for teacher in teachers.values()],
        },
    )
    if job.critic_source:
        check_same_model(job.world, "the critic", "critic.path", job.critic_source)
    frozen_of_critic = job.load_frozen_of_critic(frozen)
    return LoadedModels(weights, frozen, initial, teachers, frozen_of_critic)


def weights_to_train(job: Job, models: LoadedModels) -> Params:
    """Returns the weights that a run without a checkpoint starts from: `models.weights`, or, if
    that is None because the run is resumed (before its first checkpoint), the same weights, read
    now. ShoalError if the processes of the run have different files of the model."""
    if models.weights is not None:
        return models.weights
    # If `load_models` has read this model, it has compared the processes' files too.
    if not reads_own_model(job):
        check_same_model(job.world, "the model", "model.path", job.model_source)
    return job.load_weights()


def checked_facts(job: Job, models: LoadedModels) -> dict[str, Any]:
    """Returns what the run's numbers depend on besides its configuration: machine, data, functions
    and frozen weights (`fingerprint`). ShoalError if the processes of the run have different data,
    reward functions, tools, environments, advantage functions or callbacks."""
    facts = fingerprint(
        task=job.task,
        seed=job.config.seed,
        reference=models.initial,
        teachers=models.teachers,
        base=models.frozen,
        own_advantage=job.own_advantage,
        critic=models.frozen_of_critic if job.critic_source else None,
    )
    check_same(job.world, "data and rewards", {"data": facts["data"], **facts["rewards"]})
    check_same(job.world, "the callbacks", {"callbacks": job.callbacks.names})
    return facts


def open_folder(job: Job) -> RunWriter:
    """Returns the writer of the run's folder, which stays locked until the job is closed: a new
    folder, or that of the run that is resumed. ShoalError if another process has just started the
    same run. With several processes the first one locks and writes the folder; the others wait for
    its name, and get a writer that knows the path and writes nothing. Prints where the folder is,
    and a warning if its file system grants no locks."""
    config, console, stack = job.config, job.console, job.stack
    if not job.world.is_main:
        # This process has no name to give; process 0 gives it.
        folder_names = job.world.exchange_json("the run folder's name", "")
        return stack.enter_context(NullRunWriter(folder_names[0]))
    path = job.resumed or make_run_folder(config.base_output_directory, config.run_name)
    mirror = None
    if area_of(path):  # "" for a path on this machine; else the run belongs into a bucket
        path = cache_path(address(path), RUNS)
        console.note(f"{address(path)} is mirrored from {path}")
        mirror = stack.enter_context(closing(Mirror(path, config.checkpoint.most_unsaved, console)))
        if not job.resumed:
            refuse_foreign(path)
    folder = stack.enter_context(RunWriter(path, mirror))
    # If a command is given twice at the same time, neither process finds a run at first; the lock
    # decides which of them makes it.
    if not job.resumed and is_run(folder.path):
        raise ShoalError(
            f"another process has just started the run {address(folder.path)}: give the same "
            "command again to resume it"
        )
    if folder.no_locks:
        console.warning(
            f"the file system of {folder.path} grants no locks ({folder.no_locks}): nothing keeps "
            "a second process out of this run"
        )
    console.note(f"run folder {address(folder.path)}")
    job.world.exchange_json("the run folder's name", str(folder.path))
    return folder


def begin_folder(job: Job, folder: RunWriter, first_version: int) -> None:
    """Writes what a run's folder holds from its start besides the settings: tags and notes, Hydra's
    files if `report.hydra` and the run is new, the model's configuration and tokenizer, the phase
    `start`. From here on the console writes its log and its events there, until the job is closed.
    Called by process 0 alone. `first_version`: the version of the weights that the run starts or
    resumes from."""
    write_labels(job, folder)
    if job.config.report.hydra and not job.resumed:
        changed = difference_from_defaults(job.requested)
        overrides = [f"{key}={shown(value)}" for key, value in changed.items()]
        folder.write_hydra(to_yaml(job.config), overrides)
    write_head(folder, job.model_source, job.config, resumed=job.resumed is not None)
    job.console.keep_log(folder.log_path)
    folder.begin("start", first_version)
    job.console.keep_events(folder.write_event)
    # None: the console writes no events any more
    job.stack.callback(job.console.keep_events, None)


def write_head(folder: RunWriter, source: ModelSource, config: Config, resumed: bool) -> None:
    """Writes the model's configuration and tokenizer files into a run's folder, unless the model
    was read from there or the run is resumed from a bucket, and makes the name `last` refer to this
    run. `source`: the model whose files are written. A resumed run whose template writes a date
    that was not stored stores it now."""
    folder.remember(config.base_output_directory)
    model_folder = folder.path / MODEL_FOLDER
    is_own_model = source.folder == model_folder
    if (
        resumed
        and is_own_model
        and source.tokenizer.writes_date
        and read_date(model_folder) is None
    ):
        assert source.tokenizer.date is not None
        write_date(source.tokenizer.date, model_folder)
    if not is_own_model and not (resumed and area_of(folder.path)):
        with explain_write_errors(folder.path, "base_output_directory"):
            copy_model_files(source, model_folder)


def write_labels(job: Job, folder: RunWriter) -> None:
    """Writes the keys `notes` and `tags` to the run's `notes.json`. Of a resumed run only a key
    whose value is not what the run was started with: people may have changed the file since. A
    damaged file counts as empty."""
    requested = job.requested
    earlier = read_requested(job.resumed) if job.resumed else Config()
    written = StoredRun(folder.path, lenient=True).notes()
    notes, tags = written.notes, written.tags
    if requested.notes != earlier.notes:
        notes = requested.notes
    if requested.tags != earlier.tags:
        tags = requested.tags
    labels = RunNotes.of_keys(notes, tags)
    if labels != written:
        write_notes(folder.path, labels)


def reported_name(config: Config, folder: Path) -> str:
    """Returns the name of a run at Weights & Biases and other services: its run_name, without the
    project where that is PROJECT/NAME; without a run_name the name of its folder."""
    name = config.run_name.removeprefix(f"{config.report.wandb.project}/")
    return name or folder.name


def open_recorder(
    job: Job, folder: RunWriter, source: RolloutSource, first_version: int
) -> Recorder:
    """Returns the recorder of a run's metrics and groups, with its sinks; all are closed with the
    job. `first_version`: the version of the weights that the run starts or resumes from. Only
    process 0 has sinks, and writes groups if `report.groups` is set."""
    config = job.config
    sinks = []
    if job.world.is_main:
        sinks = make_sinks(
            folder=folder.path,
            section=config.report,
            config=to_dict(config),
            run_name=reported_name(config, folder.path),
            # None: a new run
            resumed_at=first_version if job.resumed else None,
            note=job.console.note,
            warn=job.console.warning,
            labels=RunNotes.of_keys(config.notes, config.tags),
        )
    for sink in sinks:
        job.stack.callback(sink.close)
    utilisation = Utilisation.on(
        job.roles.trainer.mesh.devices.flat,
        job.model.architecture,
        job.model.dtype,
        config.algorithm.num_epochs,
        num_scorings(config.algorithm, config.teacher),
        critic_epochs(config.algorithm, config.critic),
    )
    recorder = Recorder(
        folder=folder,
        console=job.console,
        steps=config.steps,
        keep_groups=config.report.groups and job.world.is_main,
        read_stats=source.read_stats,
        compilations=job.compilations.read,
        peak_bytes=peak_bytes,
        sinks=sinks,
        # None if the peak of these devices is not known
        mfu=utilisation.mfu if utilisation else None,
        started=job.started,
        warnings_stop=config.train.on_warning == "stop",
        completions_every=config.report.completions_every,
        price_per_hour=price_per_hour(config, job.roles.num_devices),
    )
    return job.stack.enter_context(closing(recorder))


def open_callbacks(job: Job, folder: RunWriter) -> Callbacks:
    """Returns what calls the callbacks that were given from Python, in process 0 alone; what calls
    nobody if there are none. Their `args` is the object that was given as `args`, else what the
    settings say under TRL's names."""
    config = job.config
    evaluates = config.train.evaluate_every > 0
    args = job.callbacks.args
    if args is None:
        known = {
            "metric_for_best_model": None,
            "greater_is_better": None,
            "load_best_model_at_end": False,
            **job.callbacks.settings,
            "output_dir": str(folder.path),
            "run_name": config.run_name,
            "seed": config.seed,
            "max_steps": config.steps,
            "learning_rate": config.optimizer.lr,
            "num_generations": config.batch.group_size,
            "logging_strategy": "steps",
            "logging_steps": 1,
            "logging_first_step": True,
            "eval_strategy": "steps" if evaluates else "no",
            "eval_steps": config.train.evaluate_every,
            "eval_delay": 0,
            "save_strategy": "steps",
            "save_steps": config.checkpoint.every,
        }
        args = KnownArguments(**known)
    state = TrainingState(
        max_steps=config.steps,
        run_folder=str(folder.path),
        epochs_per_step=config.batch.prompts_per_step / max(len(job.prompts.examples), 1),
        eval_steps=config.train.evaluate_every,
        save_steps=config.checkpoint.every,
    )
    return Callbacks(
        job.callbacks,
        args,
        state,
        warn=job.console.warning,
        is_main=job.world.is_main,
        exchange=job.world.exchange_json,
        has_questions=bool(job.evaluation_sets),
    )


def open_checkpoints(job: Job, folder: RunWriter) -> Checkpoints:
    """Returns the object that saves checkpoints into the run's folder and keeps as many as
    `checkpoint.keep_last` and `checkpoint.keep_best` say. Closing the job waits until they are
    written."""
    checkpoints = Checkpoints(
        folder.checkpoints_path,
        job.config.checkpoint.keep_last,
        job.config.checkpoint.keep_best,
        largest_array=largest_array(job.state_shapes),
    )
    return job.stack.enter_context(closing(checkpoints))


def open_timeline(job: Job, folder: RunWriter, source: RolloutSource) -> Timeline:
    """Returns the timeline that `report.timeline` asks for, a file in the run's folder, which is
    closed with the job; a fleet writes its hosts' work there too."""
    timeline = Timeline(folder.path / TIMELINE, job.console.warning)
    job.stack.enter_context(closing(timeline))
    if isinstance(source, Fleet):
        source.follow(timeline)
    return timeline


def resume_command(folder: Path, config: Config, processes: int) -> str:
    """Returns the command that resumes the run in `folder`, as text: a line for the shell, or a
    call of `shoal.train` if the run's task or functions were passed from Python. `processes`: how
    many processes the run has; with several the text says that each has to give the command."""
    # The folder contains no code, so a shell could not load functions passed to shoal.train.
    where = address(folder)
    if came_from_python(config):
        command = f'shoal.train(resume="{where}", ...), with its task and reward'
    else:
        command = f"shoal train {shlex.quote(f'resume={where}')}"
    if processes > 1:
        return f"in each of the {processes} processes, {command}"
    return command


def kept_text(folder: Path, command: str) -> str:
    """Returns a sentence that says which checkpoint a run leaves if it is stopped at once, and the
    command that resumes it. Reads the folder on disk, because it is called in a signal handler,
    which may interrupt code that holds any lock."""
    saved_steps = versions(folder)
    if saved_steps:
        return (
            f"the checkpoint of step {saved_steps[-1]} is kept, what came after it is lost; "
            f"resume: {command}"
        )
    return f"{NOTHING_KEPT}; start again: {command}"


def peak_bytes() -> int:
    """Returns the most bytes that were in use so far: of the first local device as JAX reports it,
    or on CPU the largest resident memory of this process."""
    stats = memory_stats(jax.local_devices()[0])
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    import resource

    # On Linux `ru_maxrss` is in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
