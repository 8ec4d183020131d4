"""Resumes a run: finds its folder, lays the given keys over its stored configuration, and restores
its newest checkpoint."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.buckets import RUNS, address
from shoal.checks.settings import check_model, check_task
from shoal.config.arguments import COMMAND_LINE, PYTHON, Arguments, Setting, read_arguments
from shoal.config.foreign import data_read_once
from shoal.config.key import keys_of, open_keys, shown, values_of
from shoal.config.keywords import ROWS, python_leaves
from shoal.config.merge import Resolved, from_overrides, given_values, load
from shoal.config.names import key_of
from shoal.config.stored import resolved
from shoal.config.train import Config
from shoal.files import check_local
from shoal.findings import Findings
from shoal.job.fingerprint import compare_facts
from shoal.job.task import find_functions, named_functions
from shoal.records import Params, ShoalError
from shoal.report.console import Console
from shoal.runs.compare import SettingDifference, setting_differences
from shoal.runs.layout import CONFIG, LAST, find_named, find_run, is_run
from shoal.runs.lines import Summary
from shoal.runs.reader import StoredRun, read_decisions, read_requested, read_summary
from shoal.runs.writer import RunWriter
from shoal.tasks.task import load_by_name
from shoal.text import count

if TYPE_CHECKING:
    from shoal.mesh import World
    from shoal.model.architecture import Architecture
    from shoal.trainer.step import TrainState
    from shoal.weights.checkpoints import Restored

RUN_NAMES = ("resume", "base_output_directory")
"""Keys that name the run to resume."""


@dataclass(frozen=True)
class ResumePlan:
    """What `resolve_run` decided: the configuration of the run, and the folder of the run that is
    resumed; `run` is None for a new run."""

    config: Config
    run: Path | None = None


# ---- configuration


@data_read_once()
def config_for_resume(config_type: type, argv: Sequence[str]) -> tuple[Any, Resolved]:
    """Returns the configuration that a command's arguments give, and where each value comes from.
    Keys that the arguments leave out have the values that were requested for the run which `resume`
    names, or, without `resume`, the defaults. ShoalError if there is no such run, or if an argument
    is wrong. `argv`: the arguments, without the program's and the command's name.

    >>> config, resolved = config_for_resume(Config, ["resume=last", "steps=200"])
    """
    arguments = read_arguments(config_type, argv)
    run = named_run(config_type, arguments)
    if run is None:
        return load(config_type, arguments)
    # `resume=last` is replaced by the path that it was resolved to.
    settings = [setting for setting in arguments.settings if setting.name != "resume"]
    settings.append(Setting("resume", address(run), COMMAND_LINE))
    arguments = replace(arguments, settings=tuple(settings))
    return load(config_type, arguments, run / CONFIG)


def overrides_for_resume(overrides: Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """Returns (overrides, run) for keyword arguments from Python. If they name a run to resume (by
    `resume`, `base_output_directory`, another system's flag or their `config_name`), `run` is its
    folder, and `overrides` have that path as `resume`, in place of a word such as `last`. Else they
    are unchanged, and `run` is None. ShoalError if there is no such run."""
    names = {name: value for name, value in overrides.items() if name != "config_name"}
    settings = []
    for name, value in python_leaves(Config, names):
        key = key_of(Config, name)
        # A name that is no key of ours is another system's flag, and that may name the run.
        if key is None or key.name in RUN_NAMES:
            if value is not None:
                value = str(value)
            settings.append(Setting(name, value, PYTHON))
    config_name = str(overrides.get("config_name") or "")
    run = named_run(Config, Arguments(config_name, tuple(settings)))
    overrides = dict(overrides)
    if run:
        overrides["resume"] = address(run)
    return overrides, run


@data_read_once()
def from_overrides_on_run(
    overrides: Mapping[str, Any],
) -> tuple[Config, Resolved, tuple[Callable[..., Any], ...]]:
    """Returns the training configuration of keyword arguments from Python, where each value comes
    from, and the reward functions that were passed among them, as a triple. Keys that are left out
    have the values that were requested for the run which `resume` names, or, without `resume`, the
    defaults. ShoalError if there is no such run.

    >>> config, resolved, functions = from_overrides_on_run({"resume": "last", "steps": 200})
    """
    overrides, run = overrides_for_resume(overrides)
    if run is None:
        return from_overrides(Config, **overrides)
    return from_overrides(Config, run / CONFIG, **overrides)


def named_run(config_type: type, arguments: Arguments) -> Path | None:
    """Returns the folder of the run that `resume` names in the user's file or keys; None without
    `resume`, also if `base_output_directory` is given. ShoalError if there is no such run."""
    keys = keys_of(config_type)
    given = given_values(config_type, arguments, *RUN_NAMES)
    resume = given.get("resume", keys["resume"].default)
    base = given.get("base_output_directory", keys["base_output_directory"].default)
    if not resume:
        return None
    check_local(base, "base_output_directory", RUNS)
    return find_run(run_to_resume("resume", resume), base, groups=False)


def run_to_resume(name: str, text: str) -> str:
    """Returns the path of the run whose newest checkpoint, or whose folder of checkpoints, is at
    `text`, the value of the key or flag `name`; `text` itself if that is no checkpoint of a run.
    ShoalError if the checkpoint is not the run's newest."""
    path = Path(text).expanduser()
    if text == LAST or is_run(path):
        return text
    from shoal.weights.checkpoints import FOLDER, versions  # imports JAX

    run = path.parent
    if path.name == FOLDER and is_run(run):
        return str(run)
    if run.name == FOLDER:
        run = run.parent
    step = re.fullmatch(r"(?:\w*[-_])?(\d+)", path.name)  # 40, checkpoint-40, global_step_40
    if not step or not is_run(run):
        return text
    saved = versions(run)  # steps, the newest last
    if int(step[1]) in saved[-1:]:  # [] if none is saved
        return str(run)
    checkpoint = step[1] if int(step[1]) in saved else "STEP"
    source = shlex.quote(str(run / CONFIG))
    weights = shlex.quote(f"model={run / FOLDER / checkpoint}")
    raise ShoalError(
        f"{name}={text}: {run} has checkpoints of steps {', '.join(map(str, saved)) or '(none)'}, "
        f"and a run is resumed only from its newest one, resume={run}. `shoal train {source} "
        f"{weights} run_name=NEW` begins a new run with the weights of another. To go on exactly "
        f"from it, copy the run, remove summary.json and the later checkpoints from the copy, and "
        "resume the copy"
    )


def resolve_run(config: Config, report: Console | Findings) -> ResumePlan:
    """Decides whether a run is new or resumed, and with which configuration; reports what changes
    as warnings to `report`. Returns the configuration to use and the run's folder, None for a new
    run.

    With `resume`, `config` has been composed over the stored request. The `on_resume` of each key
    says what its change does: "free": nothing; "bits" (the key describes devices) and "warn": a
    warning; "fixed": ShoalError, as for `model.dtype` with an adapter. If instead `run_name` names
    an existing run of `base_output_directory`, that run is resumed, and its request must be
    repeated: ShoalError for a change, except of keys that may change freely and of keys that
    describe devices, which are a warning. Keys that are left open stay open: `Job` decides them,
    with the earlier value as long as nothing that it was decided from has changed.
    """
    check_local(config.base_output_directory, "base_output_directory", RUNS)
    if config.resume:
        run = find_run(config.resume, config.base_output_directory, groups=False)
    elif config.run_name:
        run = find_named(config.base_output_directory, config.run_name)
        if not is_run(run):
            return ResumePlan(config)
    else:
        return ResumePlan(config)
    from shoal.weights.source import with_run  # imports JAX

    requested = read_requested(run)
    stored = resolved(requested, read_decisions(run))
    config = replace(config, model=with_run(config.model))
    changed = changed_settings(stored, config)
    fixed = [setting for setting in changed if _cannot_change(stored, setting.key)]
    if config.resume and fixed:
        key = fixed[0].key
        before, now = fixed[0].values
        why = ""
        if key == "model.dtype":
            why = ", because the adapter belongs to the base as it was cast to this type"
        raise ShoalError(
            f"resume={address(run)}: {key} was {before!r} and cannot become {now!r}{why}: "
            f"start a new run, from these weights with model={address(run)}"
        )
    if not config.resume:
        refused = [
            setting for setting in changed if not _only_moves_devices(stored, config, setting.key)
        ]
        if refused:
            _check_inputs(config, [setting.key for setting in refused])
            before = ", ".join(f"{setting.key}={shown(setting.values[0])}" for setting in refused)
            now = ", ".join(f"{setting.key}={shown(setting.values[1])}" for setting in refused)
            if len(fixed) == len(refused):
                cure = "or give the values that it was started with"
            else:
                which = "them"
                if fixed:
                    which = f"all but {', '.join(setting.key for setting in fixed)}"
                cure = (
                    "give the values that it was started with, or change "
                    f"{which} with resume={address(run)}"
                )
            raise ShoalError(
                f"the run {address(run)} was started with {before}; given now: {now}. Choose "
                f"another run_name, {cure}"
            )
    summary = read_summary(run)
    is_at_end = summary is not None and summary.is_end_for(config.steps, config.resume)
    for setting in changed:
        before, now = setting.values
        before = shown(before) or "''"
        now = shown(now) or "''"
        if is_at_end:
            report.warning(
                f"{setting.key} stays {before}: the run has made all its steps, so {now} has no "
                "effect"
            )
            continue
        if _only_moves_devices(stored, config, setting.key):
            effect = "numbers may differ in their last bits"
        else:
            effect = "the run differs from the one that was started"
        report.warning(
            f"{setting.key} changes from {before} to {now}, for later resumes too: from now on "
            f"{effect}"
        )
    _check_steps(run, summary, stored, config, report)
    if config.resume:
        if config.run_name != stored.run_name:
            report.warning(
                f"run_name={config.run_name} has no effect: the run goes on in its own folder, "
                f"{address(run)}"
            )
        config = replace(
            config,
            run_name=stored.run_name,
            base_output_directory=stored.base_output_directory,
            resume="",
        )
    return ResumePlan(config, run)


def _check_inputs(config: Config, changed: Sequence[str]) -> None:
    """Raises ShoalError if the model, the task or a reward function that a command names besides
    the name of an existing run is not there or cannot be read: this is what the user mends first,
    under any name. `changed`: the keys whose values are not the run's."""
    if "model.path" in changed:
        check_model(config.model)
    if any(key.startswith("task.") for key in changed) and config.task.name != ROWS:
        check_task(config.task)
        load_by_name(config.task, config.reward)
    if "reward.functions" in changed:
        find_functions(config.reward, named_functions(config.reward))


def _check_steps(
    run: Path,
    summary: Summary | None,
    stored: Config,
    config: Config,
    report: Console | Findings,
) -> None:
    """Raises ShoalError if `config.steps` is fewer than the steps that the run has made already, or
    if its checkpoints are gone although it has made steps, because it would start again and
    overwrite its records. Warns if `steps` differs from the stored number and the learning rate's
    schedule depends on it. `summary`: the run's, None if it has not ended."""
    from shoal.weights.checkpoints import FOLDER, versions

    saved = versions(run)
    ended = 0  # only a run that has ended has a summary
    if summary and summary.stopped_by and not summary.is_end_for(config.steps, config.resume):
        ended = summary.steps_made  # the run goes on from there
    elif summary:
        ended = summary.steps
    made = max(saved, default=0)
    made = max(made, ended)
    if made > config.steps:
        raise ShoalError(
            f"steps={config.steps}: the run {run} has made {made} already; give as many or more"
        )
    if not saved and ended < config.steps:
        recorded = max(StoredRun(run).metrics(), default=0)
        # A run that has ended wrote a checkpoint. A run that has recorded two intervals of
        # checkpoints has written the first.
        if ended or 0 < 2 * stored.checkpoint.every < recorded:
            raise ShoalError(
                f"the run {run} has made {count(max(made, recorded), 'step')}, but {run / FOLDER} "
                "holds no checkpoint to resume from: put one back, or start a new run with another "
                "run_name; nothing was changed"
            )
    if stored.steps != config.steps and config.optimizer.schedule != "constant":
        report.warning(
            f"steps changes from {stored.steps} to {config.steps}: the learning rate "
            f"(optimizer.schedule={config.optimizer.schedule}) falls to the new last step from "
            "now on"
        )


def _cannot_change(stored: Config, key: str) -> bool:
    """True if no resume may change the key. With an adapter `model.dtype` is such a key, because
    the base under the adapter is cast to it. `stored`: the run's configuration before."""
    if key == "model.dtype":
        return bool(stored.model.lora.rank or stored.model.lora.path)
    return keys_of(Config)[key].on_resume == "fixed"


def _only_moves_devices(stored: Config, config: Config, key: str) -> bool:
    """True if the changed key only moves a run to other devices, so that numbers differ in their
    last bits at most. A change of `sampler.kind` between this process and Ray's workers counts as
    one, because both run the same programs; vLLM runs others. `stored`, `config`: the run's
    configuration before and now."""
    if key == "sampler.kind":
        # `engine` is empty for Shoal's own sampler.
        return not stored.sampler.engine and not config.sampler.engine
    return keys_of(Config)[key].on_resume == "bits"


def changed_settings(stored: Config, requested: Config) -> list[SettingDifference]:
    """Returns the settings whose requested value differs from the one that the run has worked with,
    with both values: (stored, requested). Leaves out keys that may change freely, and keys that are
    left open now: the run decides these, and warns itself if its decision changes.

    `stored`: the run's configuration with its decisions; `requested`: the new request.
    """
    keys = keys_of(Config)
    left_open = open_keys(requested)
    changed = []
    for setting in setting_differences([values_of(stored), values_of(requested)]):
        if keys[setting.key].on_resume != "free" and setting.key not in left_open:
            changed.append(setting)
    return changed


# ---- checkpoint


def restore_latest(
    folder: RunWriter,
    a: Architecture,
    state: TrainState,
    shapes: Params,
    facts: Mapping[str, Any],
    console: Console,
    world: World,
    evaluates: bool,
    frozen: Params | None = None,
    frozen_of_critic: Params | None = None,
) -> Restored | None:
    """Restores the newest intact checkpoint of a run, with the weights that training does not
    change (`frozen`, `frozen_of_critic`). Returns None if there is no checkpoint at all; the run's
    records are then cleared, because it starts from its beginning. ShoalError if all checkpoints
    are damaged. ShoalError if the data or the models that training does not change are not those of
    the checkpoint; a warning if the machine or the files of rewards, tools or environments are not.

    `a`: the model's architecture; `state`: the shapes of the arrays that the checkpoint must have;
    `shapes`: those of the sampler's published weights; `facts`: the `fingerprint` of this process;
    `evaluates`: True if the run evaluates from now on.
    """
    from shoal.weights.checkpoints import restore_newest

    restored = restore_newest(folder.path, a, state, shapes, console.warning, world)
    if restored is None:
        console.note(
            "the run has no checkpoint: it starts from its beginning, and its files are written "
            "again"
        )
        folder.rewind(-1)  # removes the records of all steps
        return None
    has_evaluated = bool(restored.extra.get("evaluating"))
    for version in folder.read_evaluations():
        has_evaluated = has_evaluated or version <= restored.version
    compare_facts(restored.extra["facts"], facts, console, evaluates, has_evaluated)
    console.note(f"resumed from the checkpoint of step {restored.version}")
    whole = restored.state.with_frozen(frozen, frozen_of_critic)
    return replace(restored, state=whole)
