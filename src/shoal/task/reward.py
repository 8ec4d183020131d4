"""Reward functions in TRL's convention: finding them, calling them, checking what they return.

A function is called once a batch, with keywords only: `prompts`, `completions`, `completion_ids`, every data column,
`trainer_state`, `log_extra`, `log_metric`. The lists are flat, P*G long, the G completions of a prompt side by side.
It returns as many numbers, or None where it cannot judge. After messages, a completion is
`[{"role": "assistant", "content": text}]`, the whole text always in `content`; after a plain prompt it is a string.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from shoal.types import Example, Prompt, ShoalError

_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


@dataclass(frozen=True)
class RewardFunction:
    """A function in TRL's convention, the name its figures go by, and its weight in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0


@dataclass(frozen=True)
class TrainerState:
    """What a function reads of the run: the fields of transformers' `TrainerState` that rewards use."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0  # the share of the run that is done
    num_train_epochs: int = 1
    num_input_tokens_seen: int = 0
    log_history: tuple[dict[str, float], ...] = ()
    is_world_process_zero: bool = True


@dataclass(frozen=True)
class Scores:
    """The rewards of P groups of G completions.

    >>> Scores(rewards=np.array([[1.1, 0.1]]), components={"correct": np.array([[1., 0.]]),
    ...        "format": np.array([[1., 1.]])}, valid=np.array([[True, True]]))
    """

    rewards: np.ndarray  # float64[P, G]: the weighted sum; NaN where no function could judge
    components: Mapping[str, np.ndarray]  # name -> float64[P, G], before weights; NaN where it returned None
    valid: np.ndarray  # bool[P, G]: at least one function could judge
    extra: Mapping[str, list[list[Any]]] = field(default_factory=dict)  # log_extra: column -> [P][G]
    metrics: Mapping[str, float] = field(default_factory=dict)  # log_metric: name -> mean of what was logged


# ---- finding


def load_functions(specs: Sequence[str]) -> list[Callable[..., Any]]:
    """The functions that `file.py:name` names, each file run once; only what is named counts.

    Raises `ShoalError` for a missing file or name, a file that raises, and what cannot be called.
    """
    modules: dict[Path, ModuleType] = {}
    return [_find(spec, modules) for spec in specs]


def load_function(spec: str) -> Callable[..., Any]:
    """The one function that `file.py:name` names; see `load_functions`."""
    return load_functions([spec])[0]


def name_functions(functions: Iterable[Callable[..., Any]],
                   weights: Sequence[float] = ()) -> tuple[RewardFunction, ...]:
    """Names by `__name__` (or the class), a number added where one occurs twice; weights 1.0 unless given.

    Raises `ShoalError` for what cannot be called, for `async` functions and for a wrong number of weights.
    """
    functions = list(functions)
    if weights and len(weights) != len(functions):
        raise ShoalError(f"reward.weights: expected {len(functions)} numbers, one for each reward function, "
                         f"got {len(weights)}")
    named: dict[str, RewardFunction] = {}
    for i, function in enumerate(functions):
        _check_callable(function)
        name = _unused(_name(function), named)
        named[name] = RewardFunction(name, function, float(weights[i]) if weights else 1.0)
    return tuple(named.values())


def _find(spec: str, modules: dict[Path, ModuleType]) -> Callable[..., Any]:
    file, separator, name = spec.rpartition(":")
    if not (separator and file and name):
        raise ShoalError(f"reward function {spec!r}: expected `file.py:function`")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ShoalError(f"reward function {spec!r}: there is no file {file}")
    if path not in modules:
        modules[path] = _run_file(path)
    if not hasattr(modules[path], name):
        public = [key for key, value in vars(modules[path]).items() if callable(value) and not key.startswith("_")]
        raise ShoalError(f"reward function {spec!r}: {path.name} defines no {name!r}{_nearest(name, public)}")
    function = getattr(modules[path], name)
    _check_callable(function, spec)
    return function


def _run_file(path: Path) -> ModuleType:
    """Runs a file as a module of its own; modules beside it can be imported, but hide none that is installed."""
    name = f"shoal_reward_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a function's module up by name
    sys.path.append(str(path.parent))
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f" at line {lines[-1]}" if lines else ""
        raise ShoalError(f"reward file {path} cannot be loaded: {_told(error)}{line}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _check_callable(function: Any, spec: str = "") -> None:
    label = spec or (_name(function) if callable(function) else repr(function))
    if not callable(function):
        raise ShoalError(f"reward function {label!r}: expected something that can be called, "
                         f"got a {type(function).__name__}")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ShoalError(f"reward function {label!r} is `async def`: synchronous functions are supported; "
                         f"write it with `def`")
    if inspect.isclass(function):
        raise ShoalError(f"reward function {label!r} is a class: give an instance of it, or a function")


def _name(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        return _name(function.func)
    return getattr(function, "__name__", type(function).__name__)


def _unused(name: str, taken: Iterable[str]) -> str:
    taken = set(taken)
    return next(free for n in range(1, len(taken) + 2) if (free := name if n == 1 else f"{name}_{n}") not in taken)


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are: {', '.join(names)}" if names else ""


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# ---- calling


def score(functions: Sequence[RewardFunction], examples: Sequence[Example], prompts: Sequence[Prompt],
          texts: Sequence[Sequence[str]], completion_ids: Sequence[Sequence[Sequence[int] | np.ndarray]],
          step: int = 0, max_steps: int = 0, num_input_tokens_seen: int = 0) -> Scores:
    """Scores `texts[P][G]`, the completions of P prompts, with every function; None stays out of the weighted sum.

    Raises `ShoalError`, naming function, step and example, where a function raises or returns a wrong count, something
    that is no number, NaN or infinity.
    """
    if not functions or len({one.name for one in functions}) < len(functions):
        raise ValueError(f"expected one function or more, each with its own name; got {[f.name for f in functions]}")
    batch = _Batch.of(examples, prompts, texts, completion_ids)
    state = TrainerState(step, max_steps, step / max_steps if max_steps else 0.0, 1, num_input_tokens_seen)
    shape = (len(texts), len(texts[0]))
    journal = _Journal(shape)
    components = {one.name: _call(one, batch, state, journal).reshape(shape) for one in functions}
    stacked = np.stack(list(components.values()))  # [F, P, G]
    valid = np.asarray(np.isfinite(stacked).any(axis=0))
    weights = np.array([one.weight for one in functions])
    rewards = np.where(valid, np.einsum("f,fpg->pg", weights, np.nan_to_num(stacked, nan=0.0)), np.nan)
    metrics = {name: float(np.mean(values)) for name, values in journal.metrics.items()}
    return Scores(rewards, components, valid, journal.extra, metrics)


@dataclass(frozen=True)
class _Batch:
    """The flat lists of P*G entries that functions are called with."""

    rows: list[tuple[int, int]]  # the data row and the completion's index in its group
    prompts: list[Prompt]
    texts: list[str]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]

    @classmethod
    def of(cls, examples: Sequence[Example], prompts: Sequence[Prompt], texts: Sequence[Sequence[str]],
           completion_ids: Sequence[Sequence[Sequence[int] | np.ndarray]]) -> _Batch:
        if not len(examples) == len(prompts) == len(texts) == len(completion_ids):
            raise ValueError("examples, prompts, texts and completion_ids must be of one length, P")
        sizes = {len(group) for group in (*texts, *completion_ids)}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError("every group must hold the same number of completions, G, which is 1 or more")
        at = [(p, g) for p, group in enumerate(texts) for g in range(len(group))]
        names = dict.fromkeys(name for example in examples for name in example.columns if name not in _NOT_COLUMNS)
        return cls(rows=[(examples[p].row, g) for p, g in at],
                   prompts=[prompts[p] for p, _ in at],
                   texts=[texts[p][g] for p, g in at],
                   completion_ids=[[int(token) for token in completion_ids[p][g]] for p, g in at],
                   columns={name: [examples[p].columns.get(name) for p, _ in at] for name in names})

    def __len__(self) -> int:
        return len(self.texts)

    def arguments(self, part: slice) -> dict[str, Any]:
        """Lists of their own for each call, so that a function that changes them in place harms no other."""
        prompts = self.prompts[part]
        completions = [text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                       for prompt, text in zip(prompts, self.texts[part], strict=True)]
        own = [prompt if isinstance(prompt, str) else [dict(message) for message in prompt] for prompt in prompts]
        ids = [list(tokens) for tokens in self.completion_ids[part]]
        columns = {name: values[part] for name, values in self.columns.items()}
        return {**columns, "prompts": own, "completions": completions, "completion_ids": ids}

    def place(self, i: int) -> str:
        row, index = self.rows[i]
        prompt = self.prompts[i]
        asked = prompt if isinstance(prompt, str) else str(prompt[-1].get("content")) if prompt else ""
        return f"example row {row}, completion {index} (prompt {_short(asked)!r}, completion {_short(self.texts[i])!r})"


@dataclass
class _Journal:
    """What functions log besides their rewards."""

    shape: tuple[int, int]
    extra: dict[str, list[list[Any]]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        num_prompts, size = self.shape
        if len(values) != num_prompts * size:
            raise ValueError(f"log_extra({column!r}): expected {num_prompts * size} values, got {len(values)}")
        groups = [list(values[p * size:(p + 1) * size]) for p in range(num_prompts)]
        self.extra[_unused(column, self.extra)] = groups

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(name, []).append(float(value))


def _call(one: RewardFunction, batch: _Batch, state: TrainerState, journal: _Journal) -> np.ndarray:
    """float64[P*G], NaN for None."""
    head = f"reward function {one.name!r} at step {state.global_step}"
    loggers = {"trainer_state": state, "log_extra": journal.log_extra, "log_metric": journal.log_metric}
    arguments = _accepted(one.function, {**batch.arguments(slice(None)), **loggers}, head)
    try:
        result = one.function(**arguments)
    except Exception as error:
        guilty = _guilty(one.function, batch, arguments)
        where = f"for {batch.place(guilty)}" if guilty is not None else \
            f"in a batch of {len(batch)} that starts with {batch.place(0)}, though for no part of it alone"
        raise ShoalError(f"{head} raised {_told(error)} {where}") from error
    if inspect.iscoroutine(result):
        result.close()
        raise ShoalError(f"{head} returned a coroutine: synchronous functions are supported; write it with `def`")
    return _numbers(result, batch, head)


def _accepted(function: Callable[..., Any], given: dict[str, Any], head: str) -> dict[str, Any]:
    """All keywords for a function with `**kwargs`, else those that it names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some compiled functions tell no signature
        return given
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise ShoalError(f"{head} takes {p.name!r} by position only, but is called with keywords; remove the `/`")
    for name, p in named.items():
        if p.default is p.empty and name not in given:
            raise ShoalError(f"{head} wants {name!r}, which is no column of the data{_nearest(name, list(given))}")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given
    return {name: value for name, value in given.items() if name in named}


def _guilty(function: Callable[..., Any], batch: _Batch, arguments: dict[str, Any]) -> int | None:
    """The completion at which a function raises, by halves; None where it raises for no part alone."""

    def silent(*_: Any) -> None: ...

    def raises(low: int, high: int) -> bool:
        part = batch.arguments(slice(low, high)) | {"trainer_state": arguments.get("trainer_state")}
        part |= {"log_extra": silent, "log_metric": silent}
        try:
            function(**{name: part[name] for name in arguments})
        except Exception:
            return True
        return False

    low, high = 0, len(batch)
    while high - low > 1:
        middle = (low + high) // 2
        if raises(low, middle):
            high = middle
        elif raises(middle, high):
            low = middle
        else:
            return None
    return low


def _numbers(result: Any, batch: _Batch, head: str) -> np.ndarray:
    wanted = f"expected a list of {len(batch)} numbers (or None), one for each completion"
    if isinstance(result, str | bytes | Mapping) or not (hasattr(result, "__len__") and hasattr(result, "__iter__")):
        raise ShoalError(f"{head} returned {_short(repr(result))} for {batch.place(0)} and others: {wanted}")
    values = list(result)
    if len(values) != len(batch):
        raise ShoalError(f"{head} returned {len(values)} values for {len(batch)} completions, "
                         f"the first {batch.place(0)}: {wanted}")
    return np.array([_number(value, i, batch, head) for i, value in enumerate(values)], dtype=np.float64)


def _number(value: Any, i: int, batch: _Batch, head: str) -> float:
    if value is None:
        return math.nan
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is no number")
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ShoalError(f"{head} returned {_short(repr(value))} for {batch.place(i)}: "
                         f"expected a number or None") from error
    if not math.isfinite(number):
        raise ShoalError(f"{head} returned {number} for {batch.place(i)}: expected a finite number, "
                         f"or None where it cannot judge")
    return number


def _short(text: str, limit: int = 80) -> str:
    """One line of at most `limit` characters, the middle left out."""
    line = " ".join(text.split())
    half = (limit - 5) // 2
    return line if len(line) <= limit else f"{line[:half]} ... {line[-half:]}"
