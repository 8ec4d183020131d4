"""A user's advantage function, `algorithm.advantage=file.py:function`: loaded, called on the host,
and what it returns checked. Does not load JAX.

    def above_the_median(rewards, valid, **others):
        middle = np.nanmedian(rewards, axis=1, keepdims=True)
        return rewards - middle

It is called once a step, with those of `ARGUMENTS` that it names, all by keyword, and returns the
advantages of what `rewards` are of: completions [P, G], or with `algorithm.credit=turn` their turns
[P, G, K].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.config.sections.algorithm import AlgorithmSection
from shoal.records import Group, ShoalError
from shoal.rewards.loading import load_functions
from shoal.rewards.reward_call import line_of_function
from shoal.text import describe_error, shorten

KEY = "algorithm.advantage"

ARGUMENTS: Mapping[str, str] = {
    "rewards": "float64[P, G], NaN where a completion has none; by turn [P, G, K], 0 where none is",
    "valid": "bool of that shape: False where a completion has no reward, or no such turn",
    "lengths": "int of that shape: how many tokens the model sampled",
    "components": "name of a reward function -> its values, float64[P, G], before weights",
    "rows": "the columns of each prompt's row of data, P dicts",
}
"""The keyword arguments of a user's advantage function -> what each is."""


@dataclass
class OwnAdvantage:
    """A user's advantage function. Calling it gives advantages, or a ShoalError that says what is
    wrong with them."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]  # those of ARGUMENTS that it takes
    # True once two calls with equal arguments have returned the same
    was_compared: bool = False

    def __call__(
        self,
        groups: Sequence[Group],
        rewards: np.ndarray,
        valid: np.ndarray,
        lengths: np.ndarray,
        components: Mapping[str, np.ndarray],
    ) -> np.ndarray:
        """Returns the advantages of a step's groups, float64 of the shape of `rewards`; 0 where
        `valid` is False. The arguments are explained in `ARGUMENTS`; the function gets copies.

        ShoalError if the function raises, returns something else than finite numbers of that shape,
        or, the first time, returns something else when it is called again.
        """

        def once() -> np.ndarray:
            copies = {name: values.copy() for name, values in components.items()}
            given = {
                "rewards": rewards.copy(),
                "valid": valid.copy(),
                "lengths": lengths.copy(),
                "components": copies,
                "rows": [dict(group.example.columns) for group in groups],
            }
            return self._checked(self._called(given), groups, valid)

        advantages = once()
        if not self.was_compared:
            again = once()
            differs = np.argwhere(advantages != again)
            if len(differs):
                place = tuple(differs[0])
                raise self._fault(
                    f"is not deterministic: for {_place(groups, place)} it returned "
                    f"{advantages[place]:g}, and called again with the same arguments "
                    f"{again[place]:g}; a run could not be resumed or replayed. It must keep "
                    "nothing between calls, and seed its random numbers itself"
                )
            self.was_compared = True
        return advantages

    def _called(self, given: Mapping[str, Any]) -> Any:
        """Returns what the function returns for those of the arguments that it takes; ShoalError if
        it raises."""
        taken = {name: given[name] for name in self.arguments}
        try:
            return self.function(**taken)
        except (Exception, SystemExit) as error:
            where = line_of_function(self.function, error)
            at = f" at {where}" if where else ""
            text = shorten(describe_error(error), 300)
            raise self._fault(f"raised {text}{at}") from error

    def _checked(self, returned: Any, groups: Sequence[Group], valid: np.ndarray) -> np.ndarray:
        """Returns what the function returned as float64, 0 where `valid` is False; ShoalError if it
        has another shape than `valid`, or is not a finite number where `valid` is True."""
        axes = "[prompts, completions]" if valid.ndim == 2 else "[prompts, completions, turns]"
        expected = f"expected the advantages of {axes}, numbers of the shape {valid.shape}"
        try:
            array = np.asarray(returned)
        except ValueError:  # lists of different lengths
            array = np.array(None)
        if array.dtype.kind not in "biuf":  # truth values, whole numbers, floats
            raise self._fault(f"returned {shorten(repr(returned))}: {expected}")
        advantages = array.astype(np.float64)
        if advantages.shape != valid.shape:
            raise self._fault(f"returned numbers of the shape {advantages.shape}: {expected}")
        wrong = np.argwhere(valid & ~np.isfinite(advantages))
        if len(wrong):
            place = tuple(wrong[0])
            text = f"returned {advantages[place]} for {_place(groups, place)}"
            if not valid[place[0]].all():
                text += (
                    "; where `valid` is False there is no reward, and it must leave that out (as "
                    "np.mean(rewards, axis=1, where=valid) does)"
                )
            raise self._fault(text)
        return np.where(valid, advantages, 0.0)

    def _fault(self, text: str) -> ShoalError:
        return ShoalError(f"advantage function {self.name!r} {text}", KEY)


def load_advantage(a: AlgorithmSection) -> OwnAdvantage | None:
    """Loads the function that `algorithm.advantage` names; None if that is an estimator of Shoal's.
    ShoalError for a missing file or name, a file that raises, an `async` function, and one that
    requires another argument than those of `ARGUMENTS`. Runs the file; does not call the
    function."""
    if not a.has_own_advantage:
        return None
    [function] = load_functions([a.advantage], "advantage function", "")
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(called):
        raise ShoalError(
            f"advantage function {a.advantage!r} is `async`: expected a plain function", KEY
        )
    try:
        arguments = _accepted(function)
    except TypeError as error:
        raise ShoalError(
            f"advantage function {a.advantage!r} cannot be called: {error}; it gets, by keyword, "
            f"{', '.join(ARGUMENTS)}",
            KEY,
        ) from None
    return OwnAdvantage(getattr(function, "__name__", called.__qualname__), function, arguments)


def _accepted(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns those of `ARGUMENTS` that a function takes by keyword: all if it has `**kwargs`, or
    no signature that can be read. TypeError if it requires another argument."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled functions have no signature
        return tuple(ARGUMENTS)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    names = tuple(ARGUMENTS)
    if inspect.Parameter.VAR_KEYWORD not in kinds.values():
        names = tuple(name for name in ARGUMENTS if name in kinds)
    signature.bind(**dict.fromkeys(names))  # raises what a call would
    return names


def _place(groups: Sequence[Group], place: Sequence[int]) -> str:
    """Returns which completion, or turn of one, is at a place of advantages, as text."""
    row, completion = groups[place[0]].example.row, place[1]
    turn = f", turn {place[2]}" if len(place) == 3 else ""
    return f"data row {row}, completion {completion}{turn}"
