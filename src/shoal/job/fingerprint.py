"""The fingerprint of a run: what its numbers depend on besides its configuration."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import modulefinder
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.records import NoiseKey, Params, RewardFunction, ShoalError
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

    acts = [
        *((f"tool {name_of(one)}", one) for one in task.tools),
        *((f"environment {name}", one) for name, one in task.environments.items()),
    ]
    found = {
        "machine": machine(),
        "data": data_digest(task, seed),
        "rewards": {
            one.name: _source_digest(one)
            for one in (*task.rewards, *itertools.starmap(RewardFunction, acts))
        },
    }
    weights = {
        "base": base,
        "reference": reference and reference.parameters,
        "teacher": teacher and teacher.parameters,
    }
    found |= {} if base is None else {"base_types": types_text(base)}
    return found | {
        name: weights_text(params) for name, params in weights.items() if params is not None
    }


def machine() -> dict[str, str]:
    """Devices, threads and versions: with equal ones, a run's numbers on CPU are equal bit for
    bit."""
    import jax

    packages = ("shoal", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "tokenizers")
    return {
        "platform": platform.machine(),
        "processor": _processor(),
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "devices": str(jax.device_count()),
        "threads": str(num_cores()),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        **{name: package_version(name) for name in packages},
    }


def _processor() -> str:
    """The processor's model name, from /proc/cpuinfo if it exists."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )


def package_version(package: str) -> str:
    """The version that is installed; `none` without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def data_digest(task: Task, seed: int) -> str:
    """The number of training rows, and a hash of them and of the evaluation sets; of more than
    MOST_ROWS rows a sample is hashed, chosen by the seed."""
    count, rows = len(task.train), range(len(task.train))
    if count > MOST_ROWS:
        rows = sorted(
            {
                int.from_bytes(NoiseKey(seed, "data", number, 0).key(0).tobytes()) % count
                for number in range(SAMPLE_ROWS)
            }
        )
    hashed = hashlib.blake2b(digest_size=8)
    for example in itertools.chain((task.train[row] for row in rows), *task.evaluations.values()):
        hashed.update(
            json_line([example.row, example.prompt, example.columns]).encode(
                "utf-8", "backslashreplace"
            )
        )
    return f"{count} rows, {hashed.hexdigest()}"


def _source_digest(one: RewardFunction) -> str:
    """A hash of the source of a function's module and, unless it is packaged, of the modules beside
    it that this imports; empty if it is not available."""
    function = one.function
    if digest := getattr(function, "digest", None):  # of a reward model or a judge
        return digest()
    while isinstance(function, functools.partial):
        function = function.func
    try:
        module = inspect.getmodule(function) or function
        hashed = hashlib.blake2b(
            inspect.getsource(module).encode("utf-8", "backslashreplace"), digest_size=8
        )
    except (OSError, TypeError):
        return ""
    if (
        not one.runs_in_process
        and (file := getattr(module, "__file__", None))
        and "site-packages" not in file
    ):
        for path in _local_imports(Path(file)):
            hashed.update(path.read_bytes())
    return hashed.hexdigest()


def _local_imports(file: Path) -> list[Path]:
    """The modules of a file's folder or package that it imports, or that these import, also inside
    functions."""
    root = next(folder for folder in file.parents if not (folder / "__init__.py").exists())
    finder = modulefinder.ModuleFinder(
        [str(file.parent), str(root)]
    )  # what is installed is not found there
    try:
        finder.import_hook(".".join(file.relative_to(root).with_suffix("").parts))
    except (ImportError, SyntaxError, ValueError):
        return []
    found = {
        Path(path)
        for module in finder.modules.values()
        if (path := getattr(module, "__file__", None))
    }
    return sorted(path for path in found - {file} if path.is_file())


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
        if name in now and now[name] != saved.get(
            name, now[name]
        ):  # with algorithm.kl_coef=0 there is none any more
            raise ShoalError(
                f"{what} are not those that this run was started with (checksum {saved[name]}, now "
                f"{now[name]}): {cure}"
            )
    for name, value in now["machine"].items():
        if (before := saved["machine"].get(name, "unknown")) != value:
            console.warning(
                f"{name} is {value or 'not set'}, it was {before or 'not set'} when the checkpoint "
                "was saved: numbers may differ in their last bits"
            )
    files: dict[tuple[str, str], list[str]] = {}  # functions of one file have its digest
    for name, digest in now["rewards"].items():
        if digest != (
            before := saved["rewards"].get(name, digest)
        ):  # another function is another setting
            files.setdefault((digest, before), []).append(name)
    for names in files.values():
        console.warning(
            f"the file of {' and '.join(names)}, or one that it imports, has changed since the "
            "checkpoint was saved: if they judge or answer otherwise now, rewards before and after "
            "it cannot be compared"
        )
