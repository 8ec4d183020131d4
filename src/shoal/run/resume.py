"""Resumes a run: finds it, composes its configuration, restores its newest checkpoint, and checks that machine and data
are the same."""

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
from typing import TYPE_CHECKING, Any

from shoal.config.arguments import Arguments, key_of, read_arguments
from shoal.config.keys import is_under, keys_of
from shoal.config.loading import Resolved, given_values, load, nested_names, recompose
from shoal.config.schema import Config
from shoal.config.translator import Entry
from shoal.config.values import get_value, leaves_of
from shoal.files import check_local
from shoal.report.console import Console
from shoal.report.folder import CONFIG, RunFolder, find_run, is_run, named_folder
from shoal.report.lines import json_line
from shoal.report.reading import read_config
from shoal.types import Address, Params, RewardFunction, ShoalError

if TYPE_CHECKING:
    from shoal.tasks.task import Task
    from shoal.trainer.checkpoint import Restored
    from shoal.trainer.step import Learner

FREE = ("steps", "run_name", "base_output_directory", "resume", "checkpoint.", "report.", "train.evaluate_every",
        "reward.timeout_seconds", "reward.memory_gib", "reward.workers")
"""Keys and sections that may change when a run is resumed: none changes a number of a step, except that `steps` moves
the end of a learning rate schedule."""

FIXED = ("model.path", "model.template", "teacher.path", "seed", "task.name")
"""Keys that cannot change when a run is resumed."""

PLACE = ("resume", "base_output_directory")
"""Keys that name the run to resume."""

MOST_ROWS = 50_000
"""Rows of data above which the digest covers a sample of SAMPLE_ROWS."""
SAMPLE_ROWS = 1000


@dataclass(frozen=True)
class ResumePlan:
    """A run's configuration and, where the run is resumed, its folder."""

    config: Config
    run: Path | None = None


# ---- configuration


def compose_job(config_type: type, argv: Sequence[str]) -> tuple[Any, Resolved]:
    """`compose` for a command with `resume`: where it names a run, the keys given are laid over the configuration of
    that run, and are checked and derived with it.

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
    """The same for overrides from Python, which `from_overrides` then composes.

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


def resolve_run(config: Config, console: Console) -> ResumePlan:
    """Decides whether a run is new or resumed, and with which configuration.

    With `resume`, `config` was composed on the stored configuration: what differs from it is warned of, or refused for
    a key of FIXED. Where `run_name` names a run, its configuration must be the same, keys of FREE apart."""
    check_local(config.base_output_directory, "base_output_directory")
    if config.resume:
        run = find_run(config.resume, config.base_output_directory)
        stored = read_config(run)
        for key in changed_keys(stored, config):
            before, now = get_value(stored, key), get_value(config, key)
            if key in FIXED:
                raise ShoalError(f"resume={run}: {key} was {before!r} and cannot become {now!r}: start a new run, from "
                                 f"these weights with model={run}")
            console.warning(f"{key} changes from {before} to {now}: from here on the run differs from the one that "
                            "was started")
        _warn_of_schedule(stored, config, console)
        return ResumePlan(replace(config, run_name=stored.run_name, base_output_directory=stored.base_output_directory,
                                  resume=""), run)
    if config.run_name and is_run(run := named_folder(config.base_output_directory, config.run_name)):
        stored = read_config(run)
        if keys := changed_keys(stored, config):
            before = ", ".join(f"{key}={get_value(stored, key)}" for key in keys)
            now = ", ".join(str(get_value(config, key)) for key in keys)
            raise ShoalError(f"the run {run} was started with {before}; given now: {now}. Choose another run_name, "
                             f"give the values that it was started with, or change them with resume={run}")
        _warn_of_schedule(stored, config, console)
        return ResumePlan(replace(config, batch=stored.batch), run)
    return ResumePlan(config)


def _warn_of_schedule(stored: Config, config: Config, console: Console) -> None:
    if stored.steps != config.steps and config.optimizer.schedule != "constant":
        console.warning(f"steps changes from {stored.steps} to {config.steps}: the learning rate "
                        f"(optimizer.schedule={config.optimizer.schedule}) falls to the new last step from here on")


def changed_keys(stored: Config, config: Config) -> list[str]:
    """Keys that differ, without those of FREE. Where `batch.prompts_per_device` is set, `batch.prompts_per_step`
    follows from it and may change."""
    by_device = config.batch.prompts_per_device
    free = (*FREE, "batch.prompts_per_step") if by_device and by_device == stored.batch.prompts_per_device else FREE
    return [key for key in keys_of(Config)
            if get_value(stored, key) != get_value(config, key) and not is_under(key, free)]


# ---- checkpoint


def restore_latest(folder: RunFolder, learner: Learner, shapes: Params, facts: Mapping[str, Any], config: Config,
                   console: Console) -> Restored | None:
    """The newest intact checkpoint of a run; None where there is none and the run starts from its beginning.
    `shapes`: those of the sampler's weights; `facts`: the `fingerprint` of this process."""
    from shoal.trainer.checkpoint import restore_newest

    restored = restore_newest(folder.path, learner, shapes, console.warning)
    if restored is None:
        console.note("the run has no checkpoint: it starts from its beginning, and its files are written again")
        folder.rewind(-1)
        return None
    compare_facts(restored.extra["facts"], facts, console)
    if restored.version > config.steps:
        raise ShoalError(f"steps={config.steps}: the run {folder.path} has made {restored.version} already; give as "
                         "many or more")
    console.note(f"resumed from the checkpoint of step {restored.version}")
    return restored


def fingerprint(task: Task, seed: int, reference: Params | None = None,
                teacher: Params | None = None) -> dict[str, Any]:
    """What a run's numbers depend on besides its configuration, in JSON's types: machine, data, reward functions, and
    the weights of reference and teacher."""
    from shoal.model.transformer import checksum

    found = {"machine": machine(), "data": data_digest(task, seed), "rewards": reward_digests(task.rewards)}
    weights = {"reference": reference, "teacher": teacher}
    return found | {name: f"{int(checksum(params)):#010x}" for name, params in weights.items() if params is not None}


def machine() -> dict[str, str]:
    """Kind and number of devices, threads, versions: where they are equal, so are numbers on CPU, bit for bit."""
    import jax

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = ("shoal", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "tokenizers")
    return {"platform": platform.machine(), "processor": _processor(), "python": platform.python_version(),
            "device": jax.devices()[0].device_kind, "devices": str(jax.device_count()), "threads": str(threads),
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            **{name: _version(name) for name in packages}}


def _processor() -> str:
    """The processor's model name, from /proc/cpuinfo where there is one."""
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
    """The number of training rows and a hash of them and of the evaluation sets; of more than MOST_ROWS, a sample
    drawn by address is hashed."""
    count, rows = len(task.train), range(len(task.train))
    if count > MOST_ROWS:
        rows = sorted({int.from_bytes(Address(seed, "data", number, 0).key(0).tobytes()) % count
                       for number in range(SAMPLE_ROWS)})
    hashed = hashlib.blake2b(digest_size=8)
    for example in itertools.chain((task.train[row] for row in rows), *task.evaluations.values()):
        hashed.update(json_line([example.row, example.prompt, example.columns]).encode("utf-8", "backslashreplace"))
    return f"{count} rows, {hashed.hexdigest()}"


def reward_digests(functions: Sequence[RewardFunction]) -> dict[str, str]:
    """Name -> a hash of the function's source; empty where the source is not available."""
    return {one.name: _source_digest(one.function) for one in functions}


def _source_digest(function: Any) -> str:
    try:
        text = inspect.getsource(inspect.getmodule(function) or function)
    except (OSError, TypeError):
        return ""
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def compare_facts(saved: Mapping[str, Any], now: Mapping[str, Any], console: Console) -> None:
    """Warns of differences between two fingerprints; ShoalError where the data or the weights of reference or teacher
    differ."""
    if saved["data"] != now["data"]:
        raise ShoalError(f"the training data is not what this run was started with (it had {saved['data']}, now "
                         f"{now['data']}): restore the old data, or start a new run from its weights")
    cures = {"reference": ("the reference weights (model.path)", "restore them, name the very checkpoint "
                           "(model=RUN/checkpoints/N), or set algorithm.kl_coef=0"),
             "teacher": ("the teacher's weights (teacher.path)", "restore them, or start a new run")}
    for name, (what, cure) in cures.items():
        if now.get(name) != saved.get(name, now.get(name)):
            raise ShoalError(f"{what} are not those that this run was started with (checksum {saved[name]}, now "
                             f"{now[name]}): {cure}")
    for name, value in now["machine"].items():
        if (before := saved["machine"].get(name, "unknown")) != value:
            console.warning(f"{name} is {value or 'not set'}, it was {before or 'not set'} when the checkpoint was "
                            "saved: numbers may differ in their last bits")
    for name, digest in now["rewards"].items():
        if digest != saved["rewards"].get(name):
            console.warning(f"the source of reward function {name} is not what it was when the checkpoint was saved")
