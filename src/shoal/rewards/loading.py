"""Loads a user's reward functions, tools and environments: the objects that texts like
`file.py:function` name. Gives reward functions their names and weights."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.config.keywords import FROM_PYTHON, PYTHON_OBJECTS
from shoal.records import RewardFunction, ShoalError
from shoal.rewards.reward_call import unused_name
from shoal.runs.metrics import RESERVED_FUNCTIONS
from shoal.text import count, describe_error, did_you_mean

_NO_MODEL = (
    "; a reward model is model:PATH, with its folder or hub id, and any other model needs a "
    "function that asks it and returns a number for each completion"
)
_BOUND = re.compile(r"(?P<function>.+\.py:\w+)\s*\((?P<arguments>.*)\)", re.DOTALL)
_FOLDERS: set[Path] = set()
"""Folders of all files that `_run_file` has run."""


def load_functions(
    specs: Sequence[str], noun: str = "reward function", hint: str = _NO_MODEL
) -> list[Callable[..., Any]]:
    """Returns the functions that texts like `file.py:name` name, in the order of the texts.
    ShoalError for a text of another form, a missing file or name, a file that raises, and an object
    that cannot be called. In messages `noun` says what the functions are, and `hint` ends the
    sentence on what was expected. The functions are not called. Classes are refused."""
    functions = load_objects(specs, noun, hint)
    for spec, function in zip(specs, functions, strict=True):
        _check_callable(function, f"{noun} {spec!r}", hint)
    return functions


def load_reward_functions(specs: Sequence[str]) -> list[Callable[..., Any]]:
    """Returns the reward functions that texts name, in the order of the texts: `file.py:name`, or
    `file.py:name(KEY=VALUE, ...)` with arguments that are the same in all calls, Python's literals.
    ShoalError as by `load_functions`, and for arguments of another form."""
    parts = [split_arguments(spec) for spec in specs]
    functions = load_functions([function for function, _ in parts])
    bound = []
    for function, (_, arguments) in zip(functions, parts, strict=True):
        bound.append(functools.partial(function, **arguments) if arguments else function)
    return bound


def split_arguments(spec: str) -> tuple[str, dict[str, Any]]:
    """Returns (the text before the parentheses, name -> value of each argument in them) of a reward
    function's text; (the text, {}) of one without parentheses. ShoalError for arguments that are
    not KEY=VALUE with literals.

    >>> split_arguments("score.py:compute_score(bonus=2.0)")
    ('score.py:compute_score', {'bonus': 2.0})
    """
    match = _BOUND.fullmatch(spec.strip())
    if match is None:
        return spec, {}
    fault = f"reward function {spec!r}: expected file.py:function(KEY=VALUE, ...)"
    try:
        call = ast.parse(f"f({match['arguments']})", mode="eval").body
        assert isinstance(call, ast.Call)
        arguments = {given.arg: ast.literal_eval(given.value) for given in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise ShoalError(f"{fault}: {error}") from error
    # `**x` has no name; a name that is given twice is one here.
    named = {name: value for name, value in arguments.items() if name}
    if call.args or len(named) < len(call.keywords):
        raise ShoalError(fault)
    return match["function"], named


def load_objects(specs: Sequence[str], noun: str, hint: str = "") -> list[Any]:
    """Returns the objects that texts name, in their order. `file.py:name`: runs the file as a
    Python module, once for all texts of this call, and takes the object of that name. A name in
    `PYTHON_OBJECTS`: the object that was given from Python.

    Raises `ShoalError` for a text of another form, a missing file or name, and a file that raises.
    In messages `noun` says what the objects are, and `hint` ends the sentence on the form of the
    texts.
    """
    modules: dict[Path, ModuleType] = {}
    objects = []
    for spec in specs:
        if spec in PYTHON_OBJECTS:
            objects.append(PYTHON_OBJECTS[spec])
        else:
            objects.append(_find(spec, noun, hint, modules))
    return objects


def name_functions(
    functions: Iterable[Callable[..., Any] | RewardFunction], weights: Sequence[float] = ()
) -> tuple[RewardFunction, ...]:
    """Returns the functions as `RewardFunction`s with distinct names and their weights.

    The name is `__name__` (or that of the class), with a number added if it occurs twice. The
    weight is 1.0 unless `weights` are given, whatever weight a `RewardFunction` has. A
    `RewardFunction` is a built-in: its name is the one that it has (with a number added too if it
    occurs twice), and it runs in the run's own process; all others run in worker processes. Raises
    `ShoalError` for objects that cannot be called, for models, for a name that a metric has, and
    for a wrong number of weights.
    """
    functions = list(functions)
    if weights and len(weights) != len(functions):
        raise ShoalError(
            f"reward.weights: expected {count(len(functions), 'number')}, one for each reward "
            f"function, got {len(weights)}",
            "reward.weights",
        )
    named: dict[str, RewardFunction] = {}
    for i, function in enumerate(functions):
        if isinstance(function, RewardFunction):
            wanted, called, in_process = function.name, function.function, True
        else:
            _check_callable(function, f"reward function {function!r}", _NO_MODEL)
            wanted, called, in_process = _name(function), function, False
        if wanted in RESERVED_FUNCTIONS:
            raise ShoalError(
                f"reward function {wanted!r}: metrics have this name already; give it another"
            )
        name = unused_name(wanted, named)
        weight = float(weights[i]) if weights else 1.0
        named[name] = RewardFunction(name, called, weight, in_process)
    return tuple(named.values())


def _find(spec: str, noun: str, hint: str, modules: dict[Path, ModuleType]) -> Any:
    """Returns the object that one text `file.py:name` names. Takes the file's module from `modules`
    (path -> module), or runs the file and adds its module there. ShoalError if there is no such
    file or name; it lists the file's functions. ShoalError also for a name of an object that was
    given from Python in an earlier process. In messages `noun` says what the object is, and `hint`
    ends the sentence on the form of the text."""
    if spec.startswith(FROM_PYTHON):
        raise ShoalError(
            f"{noun} {spec!r} came from Python: pass it again in Python, "
            "shoal.train(resume=FOLDER, "
            "...)"
        )
    # A file without a name of a function is run too, so that the error can list its functions.
    is_file = spec.endswith(".py") and Path(spec).expanduser().is_file()
    file, separator, name = (spec, "", "") if is_file else spec.rpartition(":")
    if not (is_file or (separator and file and name)):
        raise ShoalError(f"{noun} {spec!r}: expected `file.py:function`{hint}")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ShoalError(f"{noun} {spec!r}: there is no file {file}")
    if path not in modules:
        modules[path] = _run_file(path)
    if is_file or not hasattr(modules[path], name):
        public = []
        for key, value in vars(modules[path]).items():
            if callable(value) and not key.startswith("_"):
                public.append(key)
        fault = "expected `file.py:function`" if is_file else f"{path.name} defines no {name!r}"
        raise ShoalError(f"{noun} {spec!r}: {fault}{did_you_mean(name, public, lists_all=True)}")
    return getattr(modules[path], name)


def _run_file(path: Path) -> ModuleType:
    """Runs a file as a module and returns the module; writes no compiled copy next to the file. The
    file can import modules of its folder, which is added to the end of `sys.path` and stays there;
    installed modules come before them. The module is registered in `sys.modules`. ShoalError if the
    file raises or exits, with the line, and for a module of its folder that `_check_neighbours`
    refuses; then `sys.modules` and `sys.path` are as before."""
    name = f"shoal_reward_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and pickle look a function's module up by name
    # The folder stays: a function may import its neighbour when it is called, in the workers that
    # are forked from here.
    folder = str(path.parent)
    is_new = folder not in sys.path
    if is_new:
        sys.path.append(folder)
    try:
        code = path.read_bytes()
        _check_neighbours(path, code)
        exec(compile(code, str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if is_new:
            sys.path.remove(folder)
        if isinstance(error, ShoalError):
            raise
        line = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == str(path):
                line = f" at line {frame.lineno}"
        raise ShoalError(f"file {path} cannot be loaded: {describe_error(error)}{line}") from error
    _FOLDERS.add(path.parent)
    return module


def _check_neighbours(path: Path, code: bytes) -> None:
    """Raises ShoalError if a user's file imports a module of its own folder, and Python would
    import another module of the same name: one of another user file's folder, or one on Python's
    path that is not installed. Python keeps one module per name, so one of the two files would get
    the wrong module. Also checks the modules that those modules import from the folder. `code` is
    the file's content. A module is of the folder if it is NAME.py or a folder NAME there. Runs none
    of the files."""
    unread = [(path, code)]
    known: set[str] = set()  # names of modules that were checked
    while unread:
        file, text = unread.pop()
        for name in _imported_names(text) - known:
            known.add(name)
            neighbours = (
                path.parent / f"{name}.py",
                path.parent / name / "__init__.py",
                path.parent / name,
            )
            existing = [candidate for candidate in neighbours if candidate.exists()]
            if not existing:
                continue
            neighbour = existing[0]
            for origin in _origins(name):
                if origin.resolve() == neighbour.resolve():
                    continue
                is_of_another_file = bool(_FOLDERS.intersection(origin.parents))
                if is_of_another_file or (_holds_code(neighbour) and not _is_installed(origin)):
                    raise ShoalError(
                        f"file {file} imports {name!r} from its folder, but {origin} has that name "
                        "already: rename one of the two modules"
                    )
            files = sorted(neighbour.glob("*.py")) if neighbour.is_dir() else [neighbour]
            for file_of_neighbour in files:
                unread.append((file_of_neighbour, file_of_neighbour.read_bytes()))


def _holds_code(neighbour: Path) -> bool:
    """True for a .py file, or a folder that has one; False for a folder of data, which Python could
    import as an empty package."""
    return neighbour.is_file() or any(neighbour.glob("*.py"))


def _is_installed(origin: Path) -> bool:
    """True if the file of a module belongs to Python itself or to an installed package; False for a
    module that Python finds only through PYTHONPATH or in the folder it was started in. A path that
    is not absolute is `built-in` or `frozen`: True."""
    if not origin.is_absolute():  # `built-in` and `frozen`
        return True
    standard = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    is_standard = bool(standard.intersection(origin.parents))
    return is_standard or not {"site-packages", "dist-packages"}.isdisjoint(origin.parts)


def _origins(name: str) -> list[Path]:
    """Returns the file that `import name` would run, as a list of one path. Returns the folders of
    a package without an __init__.py, and [] if there is no such module. A built-in module has the
    path `built-in` or `frozen`."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return []
    if spec.origin:
        return [Path(spec.origin)]
    return [Path(folder) for folder in spec.submodule_search_locations or ()]


def _imported_names(code: bytes) -> set[str]:
    """Returns the modules that a Python text imports, anywhere in it, by their first name: `import
    a.b` -> {"a"}. An empty set if the text is not valid Python. Imports with leading dots are left
    out; `import_module("a.b")` with a text counts."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return set()
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.append(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            if node.args and isinstance(node.args[0], ast.Constant):
                modules.append(str(node.args[0].value))
    names = {module.partition(".")[0] for module in modules}
    return {name for name in names if name.isidentifier()}


def _check_callable(function: Any, what: str, hint: str) -> None:
    """Raises ShoalError unless an object can be called and is not a class. The message begins with
    `what` and ends with `hint`."""
    if not callable(function) or inspect.isclass(function):
        given = "class" if callable(function) else type(function).__name__
        raise ShoalError(
            f"{what}: expected a function, or an object that can be called, not a {given}{hint}"
        )


def _name(function: Callable[..., Any]) -> str:
    """Returns the name of a function, or of the class of another callable. A `partial` has the name
    of its function."""
    if isinstance(function, functools.partial):
        return _name(function.func)
    return getattr(function, "__name__", type(function).__name__)
