"""`shoal train`: starts a run, or resumes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.buckets import address, is_bucket
from shoal.config.recipe_files import Recipe
from shoal.config.train import Config
from shoal.job.head import print_head
from shoal.job.job import Job
from shoal.job.resume import changed_settings, resolve_run
from shoal.job.training import open_run
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.runs.layout import LAST, find_run
from shoal.runs.lines import Summary
from shoal.runs.reader import StoredRun, read_summary
from shoal.tasks.task import Task
from shoal.text import count, one_line
from shoal.trainer.callbacks import GivenCallbacks


def train(
    config: Config,
    reward_functions: Sequence[Callable] = (),
    console: Console | None = None,
    task: Task | None = None,
    recipe: Recipe | None = None,
    callbacks: GivenCallbacks | None = None,
) -> Summary:
    """Trains, and returns the run's summary, which is also stored in the run's folder. If the
    folder that the configuration names holds an unfinished run, that run is resumed; one that came
    to its end is left unchanged, and its summary returned. An unfinished run with the same
    settings in another folder is only pointed to by a note. `reward_functions`, `task`: given from
    Python in place of those that the configuration names; an empty sequence or None for the
    configuration's. `recipe`: of the settings file that was loaded; a resumed run follows the one
    in its folder, if there is one. `callbacks`: given from Python. An error is also written to the
    run's log, and raised. Ctrl-C saves the last complete step and raises KeyboardInterrupt. A
    `console` that is given can be used afterwards; None: one for this command."""
    with console or Console() as console:
        plan = resolve_run(config, console)
        summary = read_summary(plan.run) if plan.run else None
        unfinished_run = None if plan.run else unfinished(config)
        if unfinished_run:
            console.note(
                f"an unfinished run with these settings is in {unfinished_run}: "
                f"resume={unfinished_run} continues it"
            )
        if plan.run and summary and summary.is_end_for(plan.config.steps, config.resume):
            where = address(plan.run)
            text = (
                f"{where} has made its {count(plan.config.steps, 'step')} already: give more steps "
                "to continue, or another run_name"
            )
            if summary.stopped_by:
                text = (
                    f"{where} was stopped by {summary.stopped_by} after step {summary.steps_made} "
                    f"of {summary.steps}: resume={where} continues it"
                )
            console.note(text)
            return summary
        if plan.run:
            recipe = StoredRun(plan.run).recipe() or recipe
        with Job(
            plan.config,
            console,
            resumed=plan.run,
            functions=reward_functions,
            task=task,
            recipe=recipe,
            callbacks=callbacks,
        ) as job:
            try:
                try:
                    job.check()
                    print_head(job)
                    run = open_run(job)
                except KeyboardInterrupt:
                    raise KeyboardInterrupt(
                        "stopped before the first step: give the same command again"
                    ) from None
                summary = run.train()
                job.reward_pool.watch.check_end()  # called for its error alone
                return summary
            except KeyboardInterrupt as stop:
                console.keep(one_line(stop))  # the command prints it
                raise
            except Exception as error:
                text = one_line(error)
                if not isinstance(error, ShoalError):
                    text = f"{type(error).__name__}: {text}"
                console.failed(text)
                raise


def unfinished(config: Config) -> Path | None:
    """Returns the folder of the newest run in the output folder if the configuration could resume
    it: it has the same settings and a checkpoint, and its process ended before its last step. The
    newest run is the one that was started last; older ones are not tried. None if it could not
    resume that run or cannot read it, and always if the output folder is a bucket."""
    if is_bucket(config.base_output_directory):
        return None
    try:
        run = StoredRun(find_run(LAST, config.base_output_directory))
        is_left = not run.is_finished and run.process_has_ended and run.checkpoints()
        if is_left and not changed_settings(run.config, config):
            return run.path
    except (ShoalError, OSError):
        return None
    return None
