"""The fingerprint of a run: what its numbers depend on besides its configuration."""

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
    from shoal.trainer.scorers import ModelScorer

MOST_ROWS = 50_000
"""Rows of data above which the digest covers a sample of SAMPLE_ROWS."""
SAMPLE_ROWS = 1000


def fingerprint(
    task: Task,
    seed: int,
    reference: ModelScorer | None = None,
    teacher: ModelScorer | None = None,
    base: Params | None = None,
) -> dict[str, Any]:
    """The inputs of a run besides its configuration, in JSON's types: machine, data, reward
    functions, and the weights that training does not change: of reference, teacher, and under an
    adapter."""
    from shoal.weights.checksum import types_text, weights_text

    # What scores answers, and what gives the model answers of its own.
    functions = list(task.rewards)
    for tool in task.tools:
        functions.append(RewardFunction(f"tool {name_of(tool)}", tool))
    for name, environment in task.environments.items():
        functions.append(RewardFunction(f"environment {name}", environment))
    facts: dict[str, Any] = {
        "machine": machine(),
        "data": data_digest(task, seed),
        "rewards": {function.name: _source_digest(function) for function in functions},
    }
    if base is not None:
        facts["base_types"] = types_text(base)
        facts["base"] = weights_text(base)
    if reference is not None:
        facts["reference"] = weights_text(reference.parameters)
    if teacher is not None:
        facts["teacher"] = weights_text(teacher.parameters)
    return facts


def machine() -> dict[str, str]:
    """Devices, threads and versions: with equal ones, a run's numbers on CPU are equal bit for
    bit."""
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
    """The processor's model name, from /proc/cpuinfo if it exists."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def package_version(package: str) -> str:
    """The version that is installed; `none` without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def data_digest(task: Task, seed: int) -> str:
    """The number of training rows, and a hash of them and of the evaluation sets; of more than
    MOST_ROWS rows a sample is hashed, chosen by the seed."""
    count = len(task.train)
    rows = list(range(count))
    if count > MOST_ROWS:
        sample = set()
        for number in range(SAMPLE_ROWS):
            noise = NoiseKey(seed, "data", number, 0).key(0)
            sample.add(int.from_bytes(noise.tobytes()) % count)
        rows = sorted(sample)
    hashed = hashlib.blake2b(digest_size=8)

    def add(example: Example) -> None:
        line = json_line([example.row, example.prompt, example.columns])
        hashed.update(line.encode("utf-8", "backslashreplace"))

    for row in rows:
        add(task.train[row])
    for examples in task.evaluations.values():
        for example in examples:
            add(example)
    return f"{count} rows, {hashed.hexdigest()}"


def _source_digest(reward: RewardFunction) -> str:
    """A hash of the source of a function's module and, unless it is packaged, of the modules beside
    it that this imports; empty if it is not available."""
    function: Any = reward.function
    digest = getattr(function, "digest", None)
    if digest:  # of a reward model or a judge
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
    """The modules of a file's folder or package that it imports, or that these import, also inside
    functions."""
    root = file.parent
    while (root / "__init__.py").exists():
        root = root.parent
    # In these folders alone, where nothing is that is installed.
    finder = modulefinder.ModuleFinder([str(file.parent), str(root)])
    try:
        finder.import_hook(".".join(file.relative_to(root).with_suffix("").parts))
    except (ImportError, SyntaxError, ValueError):
        return []
    paths: set[Path] = set()
    for module in finder.modules.values():
        path = getattr(module, "__file__", None)
        if path:
            paths.add(Path(path))
    return sorted(path for path in paths - {file} if path.is_file())


def compare_facts(saved: Mapping[str, Any], now: Mapping[str, Any], console: Console) -> None:
    """Warns of differences between two fingerprints; raises ShoalError if the data or the weights
    of reference or teacher differ."""
    if saved["data"] != now["data"]:
        raise ShoalError(
            f"the training data is not what this run was started with (it had {saved['data']}, now "
            f"{now['data']}): restore the old data, or start a new run from its weights"
        )
    cures = {
        "base": (
            "the weights under the adapter (model.path)",
            "restore them, with model.dtype as it was: the adapter belongs to these alone",
        ),
        "reference": (
            "the reference weights (model.path or model.lora.path)",
            "restore them, name the very checkpoint (model=RUN/checkpoints/N), give "
            "algorithm.reference as the run began, or set algorithm.kl_coef=0",
        ),
        "teacher": ("the teacher's weights (teacher.path)", "restore them, or start a new run"),
    }
    for name, (what, cure) in cures.items():
        # With algorithm.kl_coef=0 there is no reference any more.
        is_in_both = name in now and name in saved
        if is_in_both and now[name] != saved[name]:
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
    files: dict[tuple[str, str], list[str]] = {}  # functions of one file have its digest
    for name, digest in now["rewards"].items():
        before = saved["rewards"].get(name, digest)  # another function is another setting
        if before != digest:
            files.setdefault((digest, before), []).append(name)
    for names in files.values():
        console.warning(
            f"the file of {' and '.join(names)}, or one that it imports, has changed since the "
            "checkpoint was saved: if they judge or answer otherwise now, rewards before and after "
            "it cannot be compared"
        )
