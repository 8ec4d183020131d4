"""Reward functions: finding them, and the scores of groups from what their calls came to (`call.py`)."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from shoal.report.metrics import RESERVED_FUNCTIONS
from shoal.rewards.call import (
    WRONG,
    Batch,
    Loop,
    Outcome,
    TrainerState,
    call,
    call_async,
    told,
    unused,
)
from shoal.text import suggest
from shoal.types import Example, Prompt, RewardFunction, ShoalError

Policy = Literal["error", "zero", "skip"]
Kind = Literal["raised", "timed out", "died", "not a number"]


@dataclass(frozen=True)
class Failure:
    """A completion that a function could not be brought to judge.

    >>> Failure("checker", row=17, completion=2, kind="timed out", text="reward function 'checker' after ...")
    """

    function: str
    row: int  # of the data
    completion: int | None  # its index in the group; None where a call of several failed and none of them alone
    kind: Kind
    text: str  # one line that names function, step, what happened and the place


@dataclass(frozen=True)
class Scores:
    """The rewards of P groups of G completions.

    >>> Scores(rewards=np.array([[1.1, 0.1]]), components={"correct": np.array([[1., 0.]]),
    ...        "format": np.array([[1., 1.]])}, valid=np.array([[True, True]]))
    """

    rewards: np.ndarray  # float64[P, G]: the weighted sum; NaN where not valid
    components: Mapping[str, np.ndarray]  # name -> float64[P, G], before weights; NaN where it returned None
    valid: np.ndarray  # bool[P, G]: at least one function could judge, and none failed with `reward.on_error=skip`
    extra: Mapping[str, list[list[Any]]] = field(default_factory=dict)  # log_extra: column -> [P][G]
    metrics: Mapping[str, list[float]] = field(default_factory=dict)  # log_metric: name -> what was logged
    failures: tuple[Failure, ...] = ()


def failure_lines(failures: Iterable[Failure]) -> list[str]:
    """The first example of each way in which a function failed, then the number of each."""
    failures = list(failures)
    first: dict[tuple[str, str], str] = {}
    for one in failures:
        first.setdefault((one.function, one.kind), one.text)
    counts = Counter((one.function, one.kind) for one in failures)
    return [*first.values(), *(f"reward function {name}: {kind} for {count} completions"
                               for (name, kind), count in sorted(counts.items()))]


def failed_figures(failures: Iterable[Failure]) -> dict[str, int]:
    """For how many completions functions failed, `failed`, and each one, `failed/{function}`; none where none did."""
    counts = Counter(one.function for one in failures if one.completion is not None)
    return {"failed": counts.total()} | {f"failed/{name}": count for name, count in counts.items()} if counts else {}


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

    Raises `ShoalError` for what cannot be called, for models and for a wrong number of weights.
    """
    functions = list(functions)
    if weights and len(weights) != len(functions):
        raise ShoalError(f"reward.weights: expected {len(functions)} numbers, one for each reward function, "
                         f"got {len(weights)}")
    named: dict[str, RewardFunction] = {}
    for i, function in enumerate(functions):
        _check_callable(function)
        if _name(function) in RESERVED_FUNCTIONS:
            raise ShoalError(f"reward function {_name(function)!r}: metrics have this name already; give it another")
        name = unused(_name(function), named)
        named[name] = RewardFunction(name, function, float(weights[i]) if weights else 1.0)
    return tuple(named.values())


def _find(spec: str, modules: dict[Path, ModuleType]) -> Callable[..., Any]:
    file, separator, name = spec.rpartition(":")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and not spec.endswith(".py"):
        raise ShoalError(_a_model(spec))
    if not (separator and file and name):
        raise ShoalError(f"reward function {spec!r}: expected `file.py:function`")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ShoalError(f"reward function {spec!r}: there is no file {file}")
    if path not in modules:
        modules[path] = _run_file(path)
    if not hasattr(modules[path], name):
        public = [key for key, value in vars(modules[path]).items() if callable(value) and not key.startswith("_")]
        raise ShoalError(f"reward function {spec!r}: {path.name} defines no {name!r}{suggest(name, public)}")
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
        raise ShoalError(f"reward file {path} cannot be loaded: {told(error)}{line}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _check_callable(function: Any, spec: str = "") -> None:
    label = spec or (_name(function) if callable(function) else repr(function))
    if isinstance(function, str):
        raise ShoalError(_a_model(function))
    if not callable(function):
        raise ShoalError(f"reward function {label!r}: expected something that can be called, "
                         f"got a {type(function).__name__}")
    if inspect.isclass(function):
        raise ShoalError(f"reward function {label!r} is a class: give an instance of it, or a function")


def _a_model(spec: str) -> str:
    return (f"reward {spec!r}: a model is not supported as a reward; expected `file.py:function`, or a function from "
            f"Python (one that asks the model and returns a number for each completion)")


def _name(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        return _name(function.func)
    return getattr(function, "__name__", type(function).__name__)


# ---- calling in this process


def score(functions: Sequence[RewardFunction], examples: Sequence[Example], prompts: Sequence[Prompt],
          texts: Sequence[Sequence[str]], completion_ids: Sequence[Sequence[Sequence[int] | np.ndarray]],
          step: int = 0, max_steps: int = 0, num_input_tokens_seen: int = 0, on_error: Policy = "error") -> Scores:
    """Scores `texts[P][G]`, the completions of P prompts, with every function; None stays out of the weighted sum.

    All in this process, without limits of time and memory. Raises `ShoalError`, naming function, step and example,
    for a function that breaks its convention, and with `on_error="error"` for any that fails.
    """
    if not functions or len({one.name for one in functions}) < len(functions):
        raise ValueError(f"expected one function or more, each with its own name; got {[f.name for f in functions]}")
    batch = Batch.of(examples, prompts, texts, completion_ids, trainer_state(step, max_steps, num_input_tokens_seen))
    loop = Loop()
    try:
        return total(functions, batch, call_here(functions, batch, loop, on_error), on_error)
    finally:
        loop.close()


def trainer_state(step: int, max_steps: int, num_input_tokens_seen: int = 0) -> TrainerState:
    return TrainerState(step, max_steps, step / max_steps if max_steps else 0.0, 1, num_input_tokens_seen)


@dataclass
class Case:
    """What the calls of one function for one batch came to: all at once, and one by one where that failed."""

    whole: Outcome | None = None
    singles: dict[int, Outcome] = field(default_factory=dict)


def call_here(functions: Sequence[RewardFunction], batch: Batch, loop: Loop, on_error: Policy) -> dict[str, Case]:
    """Calls functions in this process, the `async` ones together, by name."""
    everything = range(len(batch))
    parts = {one.name: [range(i, i + 1) for i in everything] if one.per_completion else [everything] for one in functions}
    waiting = [(one, part) for one in functions if one.awaits for part in parts[one.name]]
    came = dict(zip([(one.name, part) for one, part in waiting], loop.run(_together(waiting, batch)), strict=True)) \
        if waiting else {}
    cases = {}
    for one in functions:
        cases[one.name] = case = Case()
        if not one.per_completion:
            case.whole = came.get((one.name, everything)) or call(one, batch, everything, loop.run)
        if case.whole is None or (case.whole.kind == "raised" and len(batch) > 1):
            for part in (range(i, i + 1) for i in everything):
                case.singles[part.start] = outcome = came.get((one.name, part)) or call(one, batch, part, loop.run)
                if outcome.kind == WRONG or (on_error == "error" and outcome.failed):
                    break
    return cases


async def _together(wanted: Sequence[tuple[RewardFunction, range]], batch: Batch) -> list[Outcome]:
    return await asyncio.gather(*(call_async(one, batch, part) for one, part in wanted))


# ---- scores from calls


def weighted_sum(weights: Sequence[float], values: np.ndarray) -> np.ndarray:
    """values[F, N] of F functions -> float64[N]: what one could not judge, NaN, is left out; NaN where all are."""
    summed = np.einsum("f,fn->n", np.asarray(weights, np.float64), np.nan_to_num(values, nan=0.0))
    return np.where(np.isnan(values).all(axis=0), np.nan, summed)


def total(functions: Sequence[RewardFunction], batch: Batch, cases: Mapping[str, Case], on_error: Policy,
          limit_seconds: float = 0.0) -> Scores:
    """The weighted sum. Raises `ShoalError` for the first function that breaks its convention, or failed under the
    policy `error`."""
    sheets = [_Sheet(one, batch, on_error, limit_seconds).fill(cases[one.name]) for one in functions]
    stacked = np.stack([sheet.values for sheet in sheets])  # [F, P*G]
    skipped = np.any([sheet.skipped for sheet in sheets], axis=0)
    valid = np.isfinite(stacked).any(axis=0) & ~skipped
    rewards = np.where(valid, weighted_sum([one.weight for one in functions], stacked), np.nan)
    extra: dict[str, list[list[Any]]] = {}
    metrics: dict[str, list[float]] = {}
    num_prompts, group_size = batch.shape
    for sheet in sheets:
        for column, values in sheet.extra.items():
            groups = [values[p * group_size:(p + 1) * group_size] for p in range(num_prompts)]
            extra[unused(column, extra)] = groups
        for name, logged in sheet.metrics.items():
            metrics.setdefault(name, []).extend(logged)
    return Scores(rewards.reshape(batch.shape),
                  {sheet.one.name: sheet.values.reshape(batch.shape) for sheet in sheets},
                  valid.reshape(batch.shape), extra, metrics,
                  tuple(failure for sheet in sheets for failure in sheet.failures))


def made_steps(count: int) -> str:
    """When a call was made: `after 3 steps`, which an evaluation of version 3 and the fourth step are."""
    return f"after {count} step{'' if count == 1 else 's'}"


class _Sheet:
    """One function's column of a batch."""

    def __init__(self, one: RewardFunction, batch: Batch, on_error: Policy, limit_seconds: float) -> None:
        self.one, self.batch, self.on_error, self.limit_seconds = one, batch, on_error, limit_seconds
        self.values = np.full(len(batch), np.nan)
        self.skipped = np.zeros(len(batch), dtype=bool)
        self.failures: list[Failure] = []
        self.extra: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def fill(self, case: Case) -> _Sheet:
        whole, size = case.whole, len(self.batch)
        if whole is not None and (whole.kind in ("", WRONG) or size == 1):
            self._take(whole, range(size))
            return self
        at = f"in a batch of {size} that starts with {self.batch.place(0)}"
        for i, outcome in sorted(case.singles.items()):
            if whole is not None and outcome.kind == WRONG:
                raise ShoalError(f"{self._head} {self._happened(whole)} {at}; called for one completion it "
                                 f"{outcome.text}") from whole.cause
            self._take(outcome, range(i, i + 1))
        if whole is not None and not self.failures:
            self._fail(None, whole, f"{at}, though for no part of it alone")
        return self

    def _take(self, outcome: Outcome, part: range) -> None:
        if outcome.kind == WRONG:
            raise ShoalError(f"{self._head} {outcome.text}") from outcome.cause
        if outcome.kind:
            self._fail(part.start, outcome, f"for {self.batch.place(part.start)}")
            return
        self.values[part.start:part.stop] = [np.nan if value is None else value for value in outcome.values]
        for i, came in outcome.bad:
            self._fail(part.start + i, Outcome(kind="not a number", text=came),
                       f"for {self.batch.place(part.start + i)}: expected a finite number, or None where it cannot "
                       f"judge")
        for column, values in outcome.extra.items():
            self.extra.setdefault(column, [None] * len(self.batch))[part.start:part.stop] = values
        for name, logged in outcome.metrics.items():
            self.metrics.setdefault(name, []).extend(logged)

    def _fail(self, i: int | None, outcome: Outcome, at: str) -> None:
        text = f"{self._head} {self._happened(outcome)} {at}" + (f"; {outcome.where}" if outcome.where else "")
        if self.on_error == "error":
            raise ShoalError(f"{text}. To go on where it fails: reward.on_error=zero or skip") from outcome.cause
        row, index = self.batch.rows[i or 0]
        kind: Any = outcome.kind
        self.failures.append(Failure(self.one.name, row, None if i is None else index, kind, text))
        if i is not None:
            self.values[i] = 0.0 if self.on_error == "zero" else np.nan
            self.skipped[i] = self.on_error == "skip"

    def _happened(self, outcome: Outcome) -> str:
        return {"raised": f"raised {outcome.text}", "not a number": f"returned {outcome.text}",
                "died": f"ended its process ({outcome.text})",
                "timed out": f"took longer than reward.timeout_seconds={self.limit_seconds:g}"}[outcome.kind]

    @property
    def _head(self) -> str:
        return f"reward function {self.one.name!r} {made_steps(self.batch.state.global_step)}"
