"""Opens a training run: makes the run's folder, weights, source, updater and recorder of a job."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from shoal.buckets import RUNS, address, area_of, cache_path
from shoal.chat.tokenizer_files import read_date, write_date
from shoal.config.key import shown
from shoal.config.keywords import FROM_PYTHON
from shoal.config.stored import difference_from_defaults, texts_of, to_dict, to_yaml
from shoal.config.train import Config
from shoal.files import writing
from shoal.job.fingerprint import fingerprint
from shoal.job.interrupt import stop_on_signals
from shoal.job.process import check_same, check_same_model
from shoal.job.resume import restore_latest
from shoal.mesh import World, memory_stats, return_freed_memory
from shoal.model.flops import Utilisation
from shoal.model.parameters import frozen_specs, select
from shoal.protocols import RolloutSource
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.report.recorder import Recorder
from shoal.report.sinks import make_sinks
from shoal.report.timeline import TIMELINE, Timeline
from shoal.rollout.fleet import Fleet
from shoal.runs.layout import MODEL_FOLDER, is_run, make_run_folder, refuse_foreign
from shoal.runs.mirror import Mirror
from shoal.runs.writer import NullRunWriter, RunWriter
from shoal.stop import StopSignal
from shoal.tasks.task import ROWS
from shoal.trainer.evaluation import Evaluator
from shoal.trainer.loop import NOTHING_KEPT, Run
from shoal.trainer.schedule import schedule_of
from shoal.trainer.scorers import load_scorer
from shoal.trainer.update import num_scorings
from shoal.weights.checkpoints import Checkpoints, largest_array, versions
from shoal.weights.source import ModelSource, copy_model_files

if TYPE_CHECKING:
    from shoal.job.job import Job


def open_run(job: Job) -> Run:
    """Makes and returns the training run of a job: locks the run's folder, reads the weights or the
    newest checkpoint, and makes everything that the loop uses. Wrong weights or settings raise
    ShoalError before the folder exists, so a refused new run leaves none behind. Side effect: from
    here on SIGINT and SIGTERM request a stop of the run."""
    config = job.config
    world = job.world
    spec = job.spec
    roles = job.roles
    # Read before the folder exists, so that bad weights leave no folder behind. A resumed run needs
    # the model's own weights only for the reference and for what an adapter freezes.
    reads_model = (
        not job.resumed or bool(spec.architecture.adapter) or config.algorithm.scores_reference
    )
    if reads_model:
        check_same_model(world, "the model", "model.path", spec)
    weights = None if job.resumed else job.load_weights()
    if weights:
        frozen = select(frozen_specs(spec.architecture), weights)
    else:
        frozen = spec.load_frozen(roles.trainer, job.model.dtype)
    reference = job.open_reference(weights or frozen)
    teacher = None
    if job.teacher:
        check_same_model(world, "the teacher", "teacher.path", job.teacher)
        teacher = load_scorer(config.model, job.teacher, roles.reference)
    # Each process has tried the kernels on its own GPU, but all must compile the same program.
    check_same(
        world,
        "the kernels of attention, which model.attention=blocked does without",
        {
            "model.attention": job.model.attention,
            "the teacher's": teacher and teacher.model.attention,
        },
    )
    folder = open_folder(config, job.resumed, job.console, job.stack, world)
    if job.cluster:
        job.cluster.measure.keep(folder.path)
    source = job.source
    updater = job.make_updater(reference, teacher)
    facts = fingerprint(job.task, config.seed, reference, teacher, frozen)
    check_same(world, "data and rewards", {"data": facts["data"], **facts["rewards"]})
    restored = None
    if job.resumed:
        restored = restore_latest(
            folder, updater.learner, source.published_shapes(), facts, job.console, world, frozen
        )
    first = restored.version if restored else 0
    requested_text, decided_text = texts_of(job.requested, job.decisions)
    if world.is_main:
        # In a resumed run the loop writes them after its first step (`Run.store_resume_settings`).
        if not job.resumed:
            folder.write_config(requested_text, decided_text)
            if config.report.hydra:
                changed = difference_from_defaults(job.requested)
                overrides = [f"{key}={shown(value)}" for key, value in changed.items()]
                folder.write_hydra(to_yaml(config), overrides)
        write_head(folder, spec, config, resumed=job.resumed is not None)
        job.console.keep_log(folder.log_path)
        folder.begin("start", first)
        job.console.keep_events(folder.write_event)
        job.stack.callback(job.console.keep_events, None)
    utilisation = Utilisation.on(
        roles.trainer.mesh.devices.flat,
        job.model.architecture,
        job.model.dtype,
        config.algorithm.num_epochs,
        num_scorings(config.algorithm, teacher is not None),
    )
    recorder = open_recorder(
        config,
        folder,
        first if job.resumed else None,
        source,
        job.console,
        job.stack,
        started=job.started,
        compilations=job.compilations.read,
        utilisation=utilisation,
        is_main=world.is_main,
    )
    checkpoints = Checkpoints(
        folder.checkpoints_path,
        config.checkpoint.keep_last,
        config.checkpoint.keep_best,
        largest_array=largest_array(updater.learner.shapes()),
    )
    job.stack.enter_context(closing(checkpoints))
    if weights is None and restored is None:
        if not reads_model:
            check_same_model(world, "the model", "model.path", spec)
        weights = job.load_weights()
    recorder.spent("start", time.perf_counter() - job.started)
    command = resume_command(folder.path, config, world.count)
    # This comes last, because until then a signal may end the process at once.
    text_at_stop = partial(kept_text, folder.path, command)
    job.stack.enter_context(stop_on_signals(job.stop, text_at_stop))
    # With several processes only the source reacts to a stop, when it takes groups, because there
    # all processes agree on it; elsewhere some would stop and others continue.
    stop = job.stop if world.count == 1 else StopSignal()
    profiled_steps = config.report.profile if world.is_main else ()
    profiler = Profiler(profiled_steps, folder.path / "profile", job.console.warning)
    prompts = job.prompts
    evaluator = Evaluator(
        job.sets, config.sampling.params, config.pass_k, job.task, config.quick_questions
    )
    keep_settings = None
    if job.resumed:
        keep_settings = partial(folder.write_config, requested_text, decided_text, first)
    run = Run(
        config,
        None if restored else weights,
        replace(updater, stop=stop),
        source,
        prompts,
        evaluator,
        checkpoints,
        recorder,
        schedule_of(config.train),
        restored,
        facts,
        stop,
        command,
        profiler.step,
        keep_settings=keep_settings,
        after_save=folder.saved,
    )
    if config.report.timeline and world.is_main:
        run.timeline = Timeline(folder.path / TIMELINE, job.console.warning)
        job.stack.enter_context(closing(run.timeline))
        if isinstance(source, Fleet):
            source.follow(run.timeline)
    return run


def open_folder(
    config: Config, run: Path | None, console: Console, stack: ExitStack, world: World
) -> RunWriter:
    """Returns the run's folder, locked until `stack` closes: a new one, or the one at `run` if a
    run is resumed. ShoalError if another process has just started the same run. With several
    processes the first one locks and writes the folder; the others get a writer that knows its path
    and writes nothing."""
    if not world.is_main:
        folder_names = world.exchange_json("the run folder's name", "")
        return stack.enter_context(NullRunWriter(folder_names[0]))
    path = run or make_run_folder(config.base_output_directory, config.run_name)
    mirror = None
    if area_of(path):
        path = cache_path(address(path), RUNS)
        console.note(f"{address(path)} is mirrored from {path}")
        mirror = stack.enter_context(closing(Mirror(path, config.checkpoint.most_unsaved, console)))
        if not run:
            refuse_foreign(path)
    folder = stack.enter_context(RunWriter(path, mirror))
    # If a command is given twice at the same time, neither process finds a run at first; the lock
    # decides which of them makes it.
    if not run and is_run(folder.path):
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
    world.exchange_json("the run folder's name", str(folder.path))
    return folder


def write_head(folder: RunWriter, spec: ModelSource, config: Config, resumed: bool) -> None:
    """Writes the model's configuration and tokenizer files into a run's folder, and makes the name
    `last` refer to this run."""
    folder.remember(config.base_output_directory)
    model_folder = folder.path / MODEL_FOLDER
    is_own_model = spec.folder == model_folder
    if resumed and is_own_model and spec.tokenizer.writes_date and read_date(model_folder) is None:
        assert spec.tokenizer.date is not None
        write_date(spec.tokenizer.date, model_folder)
    if not is_own_model and not (resumed and area_of(folder.path)):
        with writing(folder.path, "base_output_directory"):
            copy_model_files(spec, model_folder)


def open_recorder(
    config: Config,
    folder: RunWriter,
    resumed_at: int | None,
    source: RolloutSource,
    console: Console,
    stack: ExitStack,
    *,
    started: float,
    compilations: Callable[[], int],
    utilisation: Utilisation | None,
    is_main: bool,
) -> Recorder:
    """Makes the recorder of a run's metrics and groups, with its sinks; `stack` closes both.
    `resumed_at`: the version that a resumed run starts from, else None. `started`: the time at
    which the job was opened, by `time.perf_counter`. `compilations`: returns how many programs were
    compiled."""
    sinks = []
    if is_main:
        sinks = make_sinks(
            folder.path,
            config.report,
            to_dict(config),
            config.run_name or folder.path.name,
            resumed_at,
            console.note,
            console.warning,
        )
    for sink in sinks:
        stack.callback(sink.close)
    recorder = Recorder(
        folder,
        console,
        config.steps,
        config.report.groups and is_main,
        source.read_stats,
        compilations,
        peak_bytes,
        sinks,
        utilisation and utilisation.share,
        started,
        warnings_stop=config.train.on_warning == "stop",
        completions_every=config.report.completions_every,
    )
    return stack.enter_context(closing(recorder))


def resume_command(folder: Path, config: Config, processes: int) -> str:
    """Returns the command that resumes a run, as text: a line for the shell, or a call of
    `shoal.train` if the run's task or functions were passed from Python."""
    # The folder contains no code, so a shell could not load functions passed to shoal.train.
    where = address(folder)
    environment = config.environment
    object_names = [*config.reward.functions, *environment.tools]
    object_names += [environment.factory, environment.rollout, environment.agent]
    has_python_objects = any(name.startswith(FROM_PYTHON) for name in object_names)
    if config.task.name == ROWS or has_python_objects:
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
            f"the checkpoint of step {saved_steps[-1]} stands, what came after it is lost; resume: "
            f"{command}"
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


_EVENT = "/jax/core/compile/backend_compile_duration"


_count = 0


TRIMMED_SECONDS = 0.5
"""If a compilation takes longer than this, freed memory is given back to the system afterwards; a
shorter one leaves little."""


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    """Counts an event of JAX if it is a compilation, and gives freed memory back to the system
    after a long one."""
    global _count
    if event != _EVENT:
        return
    _count += 1
    if duration_secs > TRIMMED_SECONDS:
        return_freed_memory()


jax.monitoring.register_event_duration_secs_listener(_listen)


class CompilationCounter:
    """Counts the programs that this process has compiled, or read from the persistent cache, since
    the counter was made."""

    def __init__(self) -> None:
        self._start = _count

    def read(self) -> int:
        """Returns the number of programs so far."""
        return _count - self._start


class Profiler:
    """Writes a trace of each chosen step, counted from 1, to `<folder>/step_000012/`, for XProf,
    TensorBoard and Perfetto.

    A step that has a trace already is not traced again. If a trace cannot be written, `warn` is
    called and training continues.

    >>> with profiler.step(12):
    ...     train_one_step()
    """

    def __init__(self, steps: Collection[int], folder: Path, warn: Callable[[str], None]) -> None:
        self.steps = frozenset(steps)
        self.folder = folder
        self.warn = warn

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Traces the block if this step was chosen, and closes the trace however the block ends."""
        target = self.folder / f"step_{step:06d}"
        is_traced = step in self.steps and not any(target.rglob("*"))
        if is_traced:
            is_traced = self._attempt(step, self._start, target)
        if not is_traced:
            yield
            return
        try:
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                yield
        finally:
            self._attempt(step, jax.profiler.stop_trace)

    def _start(self, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(target)

    def _attempt(self, step: int, action: Callable[..., None], *arguments: Path) -> bool:
        """Calls `action` and returns True; if it fails, warns and returns False."""
        try:
            action(*arguments)
        except (RuntimeError, OSError) as error:
            self.warn(f"no profiler trace of step {step}: {error}")
            return False
        return True
