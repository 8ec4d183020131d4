"""Opens a training run: from a job to its folder, weights, source, updater and recorder."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shoal.config.text import decided_between, texts_of
from shoal.model.flops import Utilisation
from shoal.model.parameters import frozen_specs, select
from shoal.report.timeline import TIMELINE, Timeline
from shoal.rollout.fleet import Fleet
from shoal.run import records
from shoal.run.derived import schedule_of
from shoal.run.fingerprint import fingerprint
from shoal.run.interrupt import stop_on_signals
from shoal.run.loading import load_scorer
from shoal.run.processes import check_same, check_same_model
from shoal.run.resume import restore_latest
from shoal.stop import StopSignal
from shoal.trainer.checkpoint import Checkpoints, largest_array
from shoal.trainer.evaluation import Evaluator
from shoal.trainer.loop import Run
from shoal.trainer.update import num_scorings

if TYPE_CHECKING:
    from shoal.run.job import Job


def open_run(job: Job) -> Run:
    """The training run: its folder, locked, with everything that a run is made of. ShoalError for
    whatever is wrong with the configuration, before the folder exists."""
    config, world, spec, roles = job.config, job.world, job.spec, job.roles
    # Before the folder exists: bad weights leave none behind. A resumed run reads them for KL and
    # what is frozen.
    reads_model = (
        not job.resumed or bool(spec.architecture.adapter) or config.algorithm.scores_reference
    )
    if reads_model:
        check_same_model(world, "the model", "model.path", spec)
    weights = None if job.resumed else job.load_weights()
    frozen = (
        select(frozen_specs(spec.architecture), weights)
        if weights
        else spec.load_frozen(roles.trainer, job.model.dtype)
    )
    reference = job.open_reference(weights or frozen)
    if job.teacher:
        check_same_model(world, "the teacher", "teacher.path", job.teacher)
    teacher = load_scorer(config.model, job.teacher, roles.reference) if job.teacher else None
    # Each process has tried the kernels on its own GPU, and all of them compile one program.
    check_same(
        world,
        "the kernels of attention, which model.attention=blocked does without",
        {
            "model.attention": job.model.attention,
            "the teacher's": teacher and teacher.model.attention,
        },
    )
    folder = records.open_folder(config, job.resumed, job.console, job.stack, world)
    if job.cluster:
        job.cluster.measure.keep(folder.path)
    source, updater = job.source, job.make_updater(reference, teacher)
    facts = fingerprint(job.task, config.seed, reference, teacher, frozen)
    check_same(world, "data and rewards", {"data": facts["data"], **facts["rewards"]})
    restored = (
        restore_latest(
            folder, updater.learner, source.published_shapes(), facts, job.console, world, frozen
        )
        if job.resumed
        else None
    )
    first = restored.version if restored else 0
    decided = decided_between(job.given, config)
    if world.is_main:
        records.write_head(folder, spec, config, decided, resumed=job.resumed is not None)
        job.console.keep_log(folder.log_path)
    utilisation = Utilisation.on(
        roles.trainer.mesh.devices.flat,
        job.model.architecture,
        job.model.dtype,
        config.algorithm.num_epochs,
        num_scorings(config.algorithm, teacher is not None),
    )
    recorder = records.open_recorder(
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
    checkpoints = job.stack.enter_context(
        closing(
            Checkpoints(
                folder.checkpoints_path,
                config.checkpoint.keep_last,
                config.checkpoint.keep_best,
                largest_array=largest_array(updater.learner),
            )
        )
    )
    if weights is None and restored is None:
        if not reads_model:
            check_same_model(world, "the model", "model.path", spec)
        weights = job.load_weights()
    recorder.spent("start", time.perf_counter() - job.started)
    command = records.resume_command(folder.path, config, world.count)
    # Last: before this a signal ends the process at once.
    job.stack.enter_context(
        stop_on_signals(job.stop, lambda: records.kept_text(folder.path, command))
    )
    # Of several processes the source agrees on a stop when it takes groups; elsewhere they would
    # part.
    stop = job.stop if world.count == 1 else StopSignal()
    profiler = records.Profiler(
        config.report.profile if world.is_main else (), folder.path / "profile", job.console.warning
    )
    run = Run(
        config,
        None if restored else weights,
        replace(updater, stop=stop),
        source,
        job.prompts,
        Evaluator(
            job.sets, config.sampling.params, config.pass_k, job.task, config.quick_questions
        ),
        checkpoints,
        recorder,
        schedule_of(config.train),
        restored,
        facts,
        stop,
        command,
        profiler.step,
        keep_settings=partial(folder.write_config, *texts_of(config, decided), first)
        if job.resumed
        else None,
        after_save=folder.saved,
    )
    if config.report.timeline and world.is_main:
        run.timeline = job.stack.enter_context(
            closing(Timeline(folder.path / TIMELINE, job.console.warning))
        )
        if isinstance(source, Fleet):
            source.follow(run.timeline)
    return run
