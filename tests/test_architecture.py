"""The frame of the package: who may import whom, what `import shoal` loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "shoal"

LAYERS = {
    0: (
        "records",
        "protocols",
        "findings",
        "text",
        "files",
        "paths",
        "buckets",
        "stop",
        "config",
        "mesh",
        "workers",
    ),
    1: ("chat", "model", "algorithm", "runs"),
    2: ("weights", "sampler", "rewards", "tasks", "report"),
    3: ("rollout", "trainer"),
    4: ("serve", "budget", "checks"),
    5: ("job",),
    6: ("plan", "compat"),
    7: ("commands",),
    8: ("cli", "benchmarks", "__init__", "__main__"),
}
LAYER = {noun: layer for layer, nouns in LAYERS.items() for noun in nouns}

WITHIN_LAYER = {  # who may import whom inside one layer
    ("protocols", "records"),
    ("text", "records"),
    ("findings", "records"),
    ("findings", "protocols"),
    ("findings", "text"),
    ("config", "records"),
    ("config", "text"),
    ("paths", "records"),
    ("buckets", "paths"),
    ("buckets", "records"),
    ("files", "records"),
    ("files", "stop"),
    ("files", "buckets"),
    ("mesh", "records"),
    ("mesh", "config"),
    ("mesh", "text"),
    ("workers", "records"),
    ("workers", "text"),
    ("workers", "config"),
    ("cli", "__init__"),
    ("__main__", "cli"),
    ("benchmarks", "__init__"),
}

ONLY_IN = {  # a foreign package -> the files that may import it
    "ray": {"rollout/ray_host.py", "weights/ray_store.py"},
    "orbax": {"weights/orbax.py"},
    "math_verify": {"tasks/graders/math_check.py"},
    "tensorboard": {"report/tensorboard.py"},
    "wandb": {"report/wandb.py"},
    "mlflow": {"report/mlflow.py"},
    "trackio": {"report/trackio.py"},
    "duckdb": {"runs/group_table.py"},
    "starlette": {"commands/view/server.py", "serve/app.py"},
    "uvicorn": {"serve/server.py"},
    "torch": set(),
    "transformers": set(),
    "vllm": set(),
    "pickle": set(),
    "cloudpickle": set(),
    "dill": set(),
    "marshal": set(),
    "shelve": set(),
}


def noun_of(path: Path, package: Path) -> str:
    """The layer table's name of a file: its folder in the package, or its own name at the top."""
    first = path.relative_to(package).parts[0]
    return first.removesuffix(".py")


def imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that a file imports, inside functions too;
    `shoal.records.Group` where a name is taken from a module."""
    here = ("shoal", *path.relative_to(package).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if isinstance(node.func, ast.Attribute):
                name = node.func.attr
            else:
                name = getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def target_of(name: str, package: Path) -> str | None:
    """The layer table's name of what `shoal...` refers to; None for another package."""
    parts = name.split(".")
    if parts[0] != "shoal":
        return None
    if len(parts) > 1 and ((package / parts[1]).is_dir() or (package / f"{parts[1]}.py").is_file()):
        return parts[1]
    return "__init__"


def layer_fault(importer: str, target: str) -> str | None:
    """Why `importer` may not import `target`, both names of the layer table; None where it may."""
    for noun in (importer, target):
        if noun not in LAYER:
            return f"{noun} has no layer: give it one in the table"
    if importer == target or LAYER[target] < LAYER[importer] or (importer, target) in WITHIN_LAYER:
        return None
    if LAYER[target] == LAYER[importer]:
        return f"{importer} and {target} are of one layer: neither may import the other"
    return f"{importer} (layer {LAYER[importer]}) may not import {target} (layer {LAYER[target]})"


def import_faults(package: Path) -> list[str]:
    """Every import that breaks a rule, as `file:line: reason`."""
    faults = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).as_posix()
        for line, name in imports(path, package):
            target, foreign = target_of(name, package), name.split(".")[0]
            fault = layer_fault(noun_of(path, package), target) if target else None
            if foreign in ONLY_IN and place not in ONLY_IN[foreign]:
                fault = (
                    f"{foreign} may be imported in {', '.join(ONLY_IN[foreign]) or 'no file'} only"
                )
            if fault:
                faults.append(f"{place}:{line}: {fault}")
        if noun_of(path, package) not in LAYER:
            faults.append(
                f"{place}:1: {noun_of(path, package)} has no layer: give it one in the table"
            )
    return faults


@pytest.mark.slow
def test_the_package_imports_downwards_only():
    assert (PACKAGE / "records.py").is_file()  # the right folder is being read
    assert import_faults(PACKAGE) == []


def circle_of(package: Path, folder: str) -> list[str]:
    """Modules of a folder between which a circle of imports runs, those in functions included;
    those for types alone are not counted."""
    names = {}
    for path in (package / folder).rglob("*.py"):
        names[".".join(("shoal", *path.relative_to(package).with_suffix("").parts))] = path
    edges = set()
    for name, path in names.items():
        typed = {
            line
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
            for line in range(node.lineno, (node.end_lineno or 0) + 1)
        }
        edges |= {
            (name, target)
            for line, full in imports(path, package)
            if line not in typed
            for target in (full, full.rpartition(".")[0])
            if target in names and target != name
        }
    while bare := {
        edge
        for edge in edges
        if edge[0] not in {target for _, target in edges}
        or edge[1] not in {name for name, _ in edges}
    }:
        edges -= bare
    return sorted({name for name, _ in edges})


FOLDERS = sorted(
    path.name
    for path in PACKAGE.iterdir()
    if (path / "__init__.py").is_file()
    and path.name != "report"  # `sinks` loads those that are asked for
)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_in_a_folder_is_imported_in_a_circle(folder):
    assert circle_of(PACKAGE, folder) == []


def test_a_circle_is_found(tmp_path):
    make_tree(
        tmp_path,
        {
            "job/job.py": "def f():\n    from shoal.job.head import show",
            "job/size.py": "",
            "job/head.py": "from shoal.job import job\nfrom shoal.job.size import bytes_of",
        },
    )
    assert circle_of(tmp_path, "job") == ["shoal.job.head", "shoal.job.job"]


def make_tree(root: Path, files: dict[str, str]) -> Path:
    """A package of given files, with an empty module for each noun that they name."""
    defaults = {
        "records.py": "",
        "mesh.py": "",
        "config/train.py": "",
        "model/linear.py": "",
        "algorithm/loss.py": "",
        "report/sinks.py": "",
        "sampler/engine.py": "",
        "tasks/words.py": "",
        "rollout.py": "",
        "trainer/loop.py": "",
        "rollout/source.py": "",
        "rollout/ray_host.py": "",
        "cli.py": "",
        "__init__.py": "",
        "weights/checkpoints.py": "",
        "job/job.py": "",
        "commands/train.py": "",
        "compat/trl.py": "",
    }
    for name, text in {**defaults, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("place", "text", "reason"),
    [
        ("records.py", "import shoal.mesh", "one layer"),
        ("records.py", "from shoal.model import linear", "layer 1"),
        ("config/train.py", "from shoal import mesh", "one layer"),
        ("model/linear.py", "from shoal.algorithm.loss import k3", "one layer"),
        ("model/linear.py", "from shoal import ShoalError", "__init__"),
        ("report/sinks.py", "def f():\n    from shoal.tasks import words", "one layer"),
        ("sampler/engine.py", "from ..tasks import words", "one layer"),
        ("sampler/engine.py", "import importlib\nimportlib.import_module('shoal.cli')", "layer 8"),
        ("trainer/loop.py", "import shoal.rollout.ledger", "one layer"),
        (
            "rollout/ledger.py",
            "def f():\n    if True:\n        from shoal.trainer.loop import run",
            "one layer",
        ),
        ("trainer/loop.py", "import shoal.job.job", "layer 5"),
        ("rollout/source.py", "from shoal import cli", "layer 8"),
        ("rollout/source.py", "import ray", "rollout/ray_host.py"),
        ("trainer/loop.py", "from orbax.checkpoint import CheckpointManager", "weights/orbax.py"),
        ("model/linear.py", "import torch.nn as nn", "no file"),
        ("model/linear.py", "def f():\n    from transformers import AutoModel", "no file"),
        ("rollout/source.py", "import vllm", "no file"),
        ("weights/checkpoints.py", "import pickle", "no file"),
        ("utils.py", "", "has no layer"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, place, text, reason):
    faults = import_faults(make_tree(tmp_path, {place: text}))
    assert len(faults) == 1
    assert faults[0].startswith(f"{place}:")
    assert reason in faults[0]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (
            "mesh.py",
            "from shoal.config.train import MeshSection\nfrom shoal.records import ShoalError",
        ),
        ("config/train.py", "from shoal import records"),
        ("model/linear.py", "import jax\nimport raytracer\nfrom shoal.mesh import axis"),
        ("model/linear.py", "from . import linear\nfrom ..records import Group"),
        (
            "trainer/loop.py",
            "from shoal.sampler.engine import Engine\nfrom .checkpoint import save",
        ),
        ("weights/orbax.py", "import orbax.checkpoint as ocp"),
        ("rollout/ray_host.py", "import ray"),
        ("job/resume.py", "import shoal.rollout.ledger, shoal.trainer.loop"),
        ("cli.py", "import shoal\nfrom shoal.job import job"),
        ("__init__.py", "def train():\n    from shoal.job import job"),
    ],
)
def test_an_allowed_import_passes(tmp_path, place, text):
    assert import_faults(make_tree(tmp_path, {place: text})) == []


LIGHT = [
    "shoal",
    "shoal.records",
    "shoal.config.train",
    "shoal.runs.metrics",
    "shoal.report.sinks",
    "shoal.report.console",
    "shoal.cli",
]


def test_light_modules_load_no_jax():
    modules = []
    for name in LIGHT:
        if name.count(".") == 0 or any(
            PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(suffix).exists()
            for suffix in (".py", "")
        ):
            modules.append(name)
    heavy = ("jax", "optax", "orbax", "torch", "transformers", "pyarrow", "rich", "tokenizers")
    code = (
        f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        f"    loaded = [heavy for heavy in {heavy!r} if heavy in sys.modules]\n"
        "    assert not loaded, f'{name} loads {loaded}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
