"""Going on with a run: which folder, under which configuration, on what machine and data."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from shoal.config.arguments import Arguments, key_of, read_arguments
from shoal.config.keys import keys_of
from shoal.config.loading import Resolved, given_values, load, nested_names, recompose
from shoal.config.schema import Config
from shoal.config.translator import Entry
from shoal.config.values import get_value, leaves_of
from shoal.report.console import Console
from shoal.report.difference import is_under
from shoal.report.folder import CONFIG, find_run, is_run, named_folder
from shoal.report.lines import json_line
from shoal.report.reading import read_config
from shoal.run.output import check_local
from shoal.tasks.task import Task
from shoal.types import Address, Params, RewardFunction, ShoalError

FREE = ("steps", "run_name", "base_output_directory", "resume", "checkpoint.", "report.", "train.evaluate_every",
        "reward.timeout_seconds", "reward.memory_gib", "reward.workers")
"""Keys (and sections) that may change from one part of a run to the next: none of them touches a number of a step,
but `steps` where the learning rate falls to its last."""

FIXED = ("model.path", "model.template", "teacher.path", "seed", "task.name")
"""Keys that no part of a run can change."""

PLACE = ("resume", "base_output_directory")
"""Keys that tell which run to go on with."""

MOST_ROWS = 50_000
NUM_ROWS_LOOKED_AT = 1000


@dataclass(frozen=True)
class ResumePlan:
    """A job's configuration and, where it goes on with a run, that run's folder."""

    config: Config
    run: Path | None = None


def compose_job(config_type: type, argv: Sequence[str]) -> tuple[Any, Resolved]:
    """`compose` for a command that takes `resume`: where that names a run, the run's own configuration with the user's
    keys over it. What they become, and whether they can be, is judged by the run's settings.

    >>> config, resolved = compose_job(Config, ["resume=last", "steps=200"])
    """
    arguments = read_arguments(config_type, argv)
    run = named_run(config_type, arguments)
    if run is None:
        return load(config_type, arguments)
    file = run / CONFIG
    entries = (*arguments.entries, Entry("resume", str(run), "command line"))
    return recompose(config_type, file, replace(arguments, config_name=str(file), entries=entries))


def on_run(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The same from Python: what `from_overrides` is to compose.

    >>> from_overrides(Config, **on_run({"resume": "last", "steps": 200}))
    """
    names = {name: value for name, value in overrides.items() if name != "config_name"}
    entries = [Entry(name, str(value), "Python") for name, value in leaves_of(Config, nested_names(names))
               if (key := key_of(Config, name)) and key.name in PLACE]
    run = named_run(Config, Arguments(str(overrides.get("config_name", "")), tuple(entries)))
    return {**overrides, "config_name": str(run / CONFIG), "resume": str(run)} if run else dict(overrides)


def named_run(config_type: type, arguments: Arguments) -> Path | None:
    """The run that `resume` names, among the user's own keys or in the file that they name; None where none does."""
    given = given_values(config_type, arguments, *PLACE)
    resume, base = (given.get(name, keys_of(config_type)[name].default) for name in PLACE)
    if not resume:
        return None
    check_local(base, "base_output_directory")
    return find_run(resume, base)


def resolve_run(config: Config, resolved: Resolved | None, console: Console) -> ResumePlan:
    """`resume=` names a run, whose configuration is taken, the user's own keys over it; the name of a run that is
    there already must come with its own configuration."""
    check_local(config.base_output_directory, "base_output_directory")
    if config.resume:
        run = find_run(config.resume, config.base_output_directory)
        stored = read_config(run)
        if resolved is None:
            config = stored
        elif resolved.arguments.config_name != str(run / CONFIG):  # else it was composed on the run
            config, _ = recompose(Config, run / CONFIG, resolved.arguments)
        for key in changed(stored, config):
            if key in FIXED:
                raise ShoalError(f"resume={run}: {key} was {get_value(stored, key)!r} and cannot become "
                                 f"{get_value(config, key)!r}: start a new run, from these weights with model={run}")
            console.warning(f"{key} changes from {get_value(stored, key)} to {get_value(config, key)}: from here on "
                            "this is not the run that was started")
        _say_steps(stored, config, console)
        return ResumePlan(_as_stored(config, stored), run)
    if config.run_name and is_run(run := named_folder(config.base_output_directory, config.run_name)):
        stored = read_config(run)
        if keys := changed(stored, config):
            shown = ", ".join(f"{key}={get_value(stored, key)}" for key in keys)
            here = ", ".join(str(get_value(config, key)) for key in keys)
            raise ShoalError(f"the run {run} was started with {shown}; now came {here}: choose another run_name, give "
                             f"what it was, or change it on purpose with resume={run}")
        _say_steps(stored, config, console)
        return ResumePlan(replace(config, batch=stored.batch), run)
    return ResumePlan(config)


def _say_steps(stored: Config, config: Config, console: Console) -> None:
    if stored.steps != config.steps and config.optimizer.schedule != "constant":
        console.warning(f"steps changes from {stored.steps} to {config.steps}: the learning rate "
                        f"(optimizer.schedule={config.optimizer.schedule}) falls to the new last step from here on")


def _as_stored(config: Config, stored: Config) -> Config:
    return replace(config, run_name=stored.run_name, base_output_directory=stored.base_output_directory, resume="")


def changed(stored: Config, config: Config) -> list[str]:
    """Keys that differ, those of FREE apart. Where P is given by the device, the stored P is what came of it."""
    by_device = config.batch.prompts_per_device
    free = (*FREE, "batch.prompts_per_step") if by_device and by_device == stored.batch.prompts_per_device else FREE
    return [key for key in keys_of(Config)
            if get_value(stored, key) != get_value(config, key) and not is_under(key, free)]


# ---- what a checkpoint tells of machine and data


def fingerprint(task: Task, seed: int, reference: Params | None = None,
                teacher: Params | None = None) -> dict[str, Any]:
    """What decides a run's numbers beside its configuration, as JSON holds it. `reference`: the weights that a KL term
    refers to; `teacher`: those of a teacher."""
    from shoal.model.transformer import checksum

    found = {"machine": machine(), "data": data_digest(task, seed), "rewards": reward_digests(task.rewards)}
    given = {"reference": reference, "teacher": teacher}
    return found | {name: f"{int(checksum(params)):#010x}" for name, params in given.items() if params is not None}


def machine() -> dict[str, str]:
    """Kind and number of devices, threads, versions: with these equal, numbers on CPU are equal bit for bit."""
    import jax

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = ("shoal", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "tokenizers")
    return {"platform": platform.machine(), "processor": _processor(), "python": platform.python_version(),
            "device": jax.devices()[0].device_kind, "devices": str(jax.device_count()), "threads": str(threads),
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            **{name: _version(name) for name in packages}}


def _processor() -> str:
    """The processor's model, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def data_digest(task: Task, seed: int) -> str:
    """The number of rows and a hash over them and the questions of evaluations; of more than MOST_ROWS, over some that
    are chosen by address."""
    count, rows = len(task.train), range(len(task.train))
    if count > MOST_ROWS:
        rows = sorted({int.from_bytes(Address(seed, "data", number, 0).key(0).tobytes()) % count
                       for number in range(NUM_ROWS_LOOKED_AT)})
    hashed = hashlib.blake2b(digest_size=8)
    for example in itertools.chain((task.train[row] for row in rows), *task.evaluations.values()):
        hashed.update(json_line([example.row, example.prompt, example.columns]).encode("utf-8", "backslashreplace"))
    return f"{count} rows, {hashed.hexdigest()}"


def reward_digests(functions: Sequence[RewardFunction]) -> dict[str, str]:
    """By name, a hash of each function's source; empty where it has none."""
    return {one.name: _source_digest(one.function) for one in functions}


def _source_digest(function: Any) -> str:
    try:
        text = inspect.getsource(inspect.getmodule(function) or function)
    except (OSError, TypeError):
        return ""
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def compare(saved: Mapping[str, Any], now: Mapping[str, Any], console: Console) -> None:
    """Says what is not as it was when the checkpoint was saved; ShoalError where the data is not."""
    if saved["data"] != now["data"]:
        raise ShoalError(f"the training data is not what this run was started with (it had {saved['data']}, now "
                         f"{now['data']}): bring the old data back, or start a new run from its weights")
    if now.get("reference") != saved.get("reference", now.get("reference")):
        raise ShoalError(f"the reference weights (model.path) are not those that this run was started with (checksum "
                         f"{saved['reference']}, now {now['reference']}): bring them back, name the very checkpoint "
                         "(model=RUN/checkpoints/N), or set algorithm.kl_coef=0")
    if now.get("teacher") != saved.get("teacher", now.get("teacher")):
        raise ShoalError(f"the teacher's weights (teacher.path) are not those that this run was started with (checksum "
                         f"{saved['teacher']}, now {now['teacher']}): bring them back, or start a new run")
    for name, value in now["machine"].items():
        if (before := saved["machine"].get(name, "unknown")) != value:
            console.warning(f"{name} is {value or 'not set'}, it was {before or 'not set'} when the checkpoint was "
                            "saved: numbers may differ in their last bits")
    for name, digest in now["rewards"].items():
        if digest != saved["rewards"].get(name):
            console.warning(f"the source of reward function {name} is not what it was when the checkpoint was saved")


