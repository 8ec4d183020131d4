"""Computes the fingerprint of a run: what its numbers depend on besides its configuration. A
resumed run compares it with the one in its checkpoint."""

from __future__ import annotations

import functools
import hashlib
import inspect
import modulefinder
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.records import Example, NoiseKey, Params, RewardFunction, ShoalError
from shoal.report.console import Console
from shoal.runs.lines import json_line
from shoal.workers.environments import name_of
from shoal.workers.process import num_cores

if TYPE_CHECKING:
    from shoal.tasks.task import Task
    from shoal.trainer.own_advantage import OwnAdvantage
    from shoal.trainer.scorers import ModelScorer

MOST_ROWS = 50_000
"""If the data has more rows, the digest covers a sample of SAMPLE_ROWS."""
SAMPLE_ROWS = 1000


def fingerprint(
    task: Task,
    seed: int,
    reference: ModelScorer | None = None,
    teachers: Mapping[str, ModelScorer] | None = None,
    base: Params | None = None,
    own_advantage: OwnAdvantage | None = None,
    critic: Params | None = None,
) -> dict[str, Any]:
    """Returns what a run's numbers depend on besides its configuration, as a dict that JSON can
    hold: the machine, a digest of the data, digests of the reward functions, tools, environments
    and the user's advantage function, and checksums of the weights that training does not change
    (`reference`, `teachers`; `base`: the weights under an adapter, with `base_types`; `critic`:
    those under the critic's adapter, if they are others). The keys are `machine`, `data` (training
    rows and evaluation sets), `training_rows` (without these sets), `rewards` (function -> digest)
    and, for models that are given, `base`, `base_types`, `reference`, `teacher` and `critic`.
    Checksums of models that are not given are left out."""
    from shoal.weights.checksum import types_text, weights_text

    # Functions that score answers; tools and environments, which answer the model; advantages.
    functions = list(task.rewards)
    for tool in task.tools:
        functions.append(RewardFunction(f"tool {name_of(tool)}", tool))
    for name, environment in task.environments.items():
        functions.append(RewardFunction(f"environment {name}", environment))
    if own_advantage is not None:
        name = f"advantage {own_advantage.name}"
        functions.append(RewardFunction(name, own_advantage.function))
    rows, data = data_digests(task, seed)
    facts: dict[str, Any] = {
        "machine": machine(),
        "data": data,
        "training_rows": rows,
        "rewards": {function.name: _source_digest(function) for function in functions},
    }
    if base is not None:
        facts["base_types"] = types_text(base)
        facts["base"] = weights_text(base)
    if reference is not None:
        facts["reference"] = weights_text(reference.parameters)
    if teachers:
        texts = [weights_text(teacher.parameters) for teacher in teachers.values()]
        facts["teacher"] = ", ".join(texts)
    if critic is not None:
        facts["critic"] = weights_text(critic)
    return facts


def machine() -> dict[str, str]:
    """Returns this process's devices, threads and versions, by name, as texts: `none` for a package
    that is not installed, '' for XLA_FLAGS that are not set. On CPU two runs in which all of these
    are equal have numbers that are equal bit for bit."""
    import jax

    facts = {
        "platform": platform.machine(),
        "processor": _processor(),
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "devices": str(jax.device_count()),
        "threads": str(num_cores()),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    for name in ("shoal", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "tokenizers"):
        facts[name] = package_version(name)
    return facts


def _processor() -> str:
    """Returns the processor's model name, from /proc/cpuinfo if that exists. '' if that file does
    not name it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def package_version(package: str) -> str:
    """Returns the version of an installed package, or `none`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def data_digests(task: Task, seed: int) -> tuple[str, str]:
    """Returns two texts with the number of training rows and a hash: the first of these rows alone,
    the second of them and of the evaluation sets, whether the run evaluates or not. If there are
    more than MOST_ROWS rows, the hashes cover a sample that the seed chooses, and the evaluation
    sets whole. `seed`: the run's."""
    count = len(task.train)
    rows = list(range(count))
    if count > MOST_ROWS:
        sample = set()
        for number in range(SAMPLE_ROWS):
            noise = NoiseKey(seed, "data", number, 0).key(0)  # a hash of these numbers
            sample.add(int.from_bytes(noise.tobytes()) % count)
        rows = sorted(sample)
    hashed = hashlib.blake2b(digest_size=8)

    def add(example: Example) -> None:
        line = json_line([example.row, example.prompt, example.columns])
        hashed.update(line.encode("utf-8", "backslashreplace"))

    for row in rows:
        add(task.train[row])
    of_rows = f"{count} rows, {hashed.hexdigest()}"
    # `train.evaluate_every` may change when a run is resumed, so the sets always count.
    evaluations = task.evaluations or task.unused_evaluations
    for examples in evaluations.values():
        for example in examples:
            add(example)
    return of_rows, f"{count} rows, {hashed.hexdigest()}"


def _source_digest(reward: RewardFunction) -> str:
    """Returns a hash of the source of a function's module and, unless it is part of an installed
    package, of the modules in its folder that it imports. '' if the source is not available. For a
    reward model or a judge it is what its own method `digest` returns. A `functools.partial` counts
    as its function, without its arguments."""
    function: Any = reward.function
    digest = getattr(function, "digest", None)
    if digest:  # the function is a reward model or a judge
        return digest()
    while isinstance(function, functools.partial):
        function = function.func
    try:
        module = inspect.getmodule(function) or function
        source = inspect.getsource(module)
    except (OSError, TypeError):
        return ""
    hashed = hashlib.blake2b(source.encode("utf-8", "backslashreplace"), digest_size=8)
    file = getattr(module, "__file__", None)
    is_packaged = reward.runs_in_process or (file and "site-packages" in file)
    if file and not is_packaged:
        for path in _local_imports(Path(file)):
            hashed.update(path.read_bytes())
    return hashed.hexdigest()


def _local_imports(file: Path) -> list[Path]:
    """Returns the files that a module imports from its own folder or package, directly or through
    each other, also inside functions; without the module itself, sorted. Empty if the module cannot
    be parsed."""
    root = file.parent
    while (root / "__init__.py").exists():
        root = root.parent
    # Searches only these folders, so that installed packages are left out.
    finder = modulefinder.ModuleFinder([str(file.parent), str(root)])
    try:
        # called with the module's dotted name, for the modules that `finder` collects; it executes
        # none of them
        finder.import_hook(".".join(file.relative_to(root).with_suffix("").parts))
    except (ImportError, SyntaxError, ValueError):
        return []
    paths: set[Path] = set()
    for module in finder.modules.values():
        path = getattr(module, "__file__", None)
        if path:
            paths.add(Path(path))
    return sorted(path for path in paths - {file} if path.is_file())


def compare_facts(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    console: Console,
    evaluates: bool = True,
    has_evaluated: bool = True,
) -> None:
    """Compares the fingerprint of a checkpoint, `saved`, with that of this process, `now`. Raises
    ShoalError if the data, the frozen weights, the reference or the teacher differ; warns if the
    machine or the files of reward functions, tools, environments or an advantage function do, or if
    weights cannot be compared. Models and functions that only one of the two has are not
    compared.

    Other evaluation sets are an error only if the run evaluates now (`evaluates`) and has an
    evaluation from before (`has_evaluated`), with which it would be compared; else they are a
    note."""
    from shoal.weights.checksum import same_weights

    _compare_data(saved, now, console, evaluates and has_evaluated)
    cures = {
        "base": (
            "the weights under the adapter (model.path)",
            "restore them, with model.dtype as it was: the adapter belongs only to them",
        ),
        "reference": (
            "the reference weights (model.path or model.lora.path)",
            "restore them, name the very checkpoint (model=RUN/checkpoints/N), give "
            "algorithm.reference as the run began, or set algorithm.kl_coef=0",
        ),
        "teacher": ("the teacher's weights (teacher.path)", "restore them, or start a new run"),
        "critic": (
            "the weights under the critic's adapter (critic.path)",
            "restore them, or start a new run",
        ),
    }
    for name, (what, cure) in cures.items():
        # A run that was resumed with algorithm.kl_coef=0 has no reference any more.
        if name not in now or name not in saved:
            continue
        is_same = same_weights(saved[name], now[name])
        if is_same is None:
            console.warning(
                f"not checked: whether {what} are those that this run was started with, because "
                "its checkpoint is from an earlier version of Shoal"
            )
        if is_same is False:
            raise ShoalError(
                f"{what} are not those that this run was started with (checksum {saved[name]}, now "
                f"{now[name]}): {cure}"
            )
    for name, value in now["machine"].items():
        before = saved["machine"].get(name, "unknown")
        if before != value:
            console.warning(
                f"{name} is {value or 'not set'}, it was {before or 'not set'} when the checkpoint "
                "was saved: numbers may differ in their last bits"
            )
    files: dict[tuple[str, str], list[str]] = {}  # functions of one file have the same digest
    for name, digest in now["rewards"].items():
        # A new function is not warned of here: it is a change of the settings, not of a file.
        before = saved["rewards"].get(name, digest)
        if before != digest:
            files.setdefault((digest, before), []).append(name)
    for names in files.values():
        console.warning(
            f"the file of {' and '.join(names)}, or one that it imports, has changed since the "
            "checkpoint was saved: if they judge or answer differently now, figures before and "
            "after it cannot be compared"
        )


def _compare_data(
    saved: Mapping[str, Any], now: Mapping[str, Any], console: Console, compares_evaluations: bool
) -> None:
    """Raises ShoalError if the training rows of two fingerprints differ, or, with
    `compares_evaluations`, their evaluation sets; without it, other sets are a note."""
    # If a run did not evaluate, earlier versions of Shoal saved the digest of its rows alone.
    if saved["data"] in (now["data"], now["training_rows"]):
        return
    if saved.get("training_rows") != now["training_rows"]:
        raise ShoalError(
            f"the training data is not what this run was started with (it had {saved['data']}, now "
            f"{now['data']}): restore the old data, or start a new run from its weights"
        )
    changed = "the evaluation sets are not those that this run was started with"
    if compares_evaluations:
        raise ShoalError(
            f"{changed} (with the training rows they were {saved['data']}, now {now['data']}): "
            "restore the old ones, go on without evaluations by train.evaluate_every=-1, or start "
            "a new run from its weights"
        )
    console.note(
        f"{changed}: it goes on, because it compares no earlier evaluation with one on the new sets"
    )
