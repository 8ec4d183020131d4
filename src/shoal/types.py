"""The records that cross borders, and the three protocols between sampling, scoring and training.

Dimensions, used in the whole package:

    P prompts      G completions a group   R rows of a micro-batch   S slots a row     C tokens a slot
    T tokens       V vocabulary            D model width             F feed-forward    L layers
    H query heads  K key/value heads       A head width

Words, used in code, metrics and documents alike:

    example      one row of a data set: a prompt and the columns that rewards read
    group        the G completions of one prompt, with rewards: the unit of everything
    completion   the tokens after a prompt; `drawn` marks those that the model drew itself
    version      the number of steps that the weights had seen
    beh old ref  log-probs of the same tokens: the sampler's when it drew them, the trainer's before the first
                 update on this batch, the reference model's
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import inspect
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

Messages: TypeAlias = "list[dict[str, Any]]"
Prompt: TypeAlias = "str | Messages"
Params: TypeAlias = Any
"""A pytree of arrays: the model's parameters."""


class ShoalError(Exception):
    """A mistake that a user can mend: its text says what was wanted, what came and what to change.

    The command line prints it alone, without a traceback."""


class StopRequested(KeyboardInterrupt):
    """Raised where a run can be left after somebody asked it to stop; the step under way is given up."""


class StopSignal:
    """Whether somebody asked the run to stop. Loops and waits call `check` wherever the step can be given up."""

    def __init__(self) -> None:
        self.requested_at: float | None = None
        self.raises_at_once = False

    def request(self) -> None:
        if self.requested_at is None:
            self.requested_at = time.monotonic()
        if self.raises_at_once:
            raise StopRequested

    def check(self, patience_seconds: float = 0.0) -> None:
        """Raises StopRequested once a request is so many seconds old."""
        if self.requested_at is not None and time.monotonic() - self.requested_at >= patience_seconds:
            raise StopRequested

    @contextlib.contextmanager
    def raising_at_once(self) -> Iterator[None]:
        """Around a wait, or a call of a user's code, that may hang: a signal raises StopRequested out of it."""
        self.check()
        self.raises_at_once = True
        try:
            yield
        finally:
            self.raises_at_once = False


class Purpose(enum.StrEnum):
    TRAIN = "train"
    EVALUATE = "evaluate"
    GENERATE = "generate"


class StopReason(enum.StrEnum):
    EOS = "eos"  # the model drew an end-of-sequence token; it is the completion's last token
    STOP = "stop"  # a stop string appeared; the completion ends with the token that completed it
    LENGTH = "length"  # max_tokens reached: the completion is cut
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Address:
    """Where a random number lives: same address, same number, on any machine, in any company (DESIGN: randomness).

    >>> Address(seed=0, purpose="train", step=3, row=17).key(completion=2)
    array([...], dtype=uint32)      # folded with the position after the prompt, it gives one token's uniform
    """

    seed: int
    purpose: str
    step: int
    row: int

    def key(self, completion: int) -> np.ndarray:
        """The two uint32 words from which a completion's uniforms are derived, position by position."""
        text = struct.pack("<qqqq", self.seed, self.step, self.row, completion) + self.purpose.encode()
        return np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), dtype=np.uint32)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. `temperature=0` is greedy. `top_k=0`, `top_p=1`, `min_p=0` truncate nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()

    @property
    def truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def as_greedy(self) -> SamplingParams:
        """The same limits, always the likeliest token."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


@dataclass(frozen=True)
class Example:
    """One row of a data set.

    >>> Example(row=17, prompt=[{"role": "user", "content": "2 + 3 = ?"}], columns={"answer": "5"})
    """

    row: int
    prompt: Prompt
    columns: Mapping[str, Any] = field(default_factory=dict)


GOLD_COLUMNS = ("ground_truth", "answer", "solution", "target", "label")
"""Data columns that hold what is right, in the order in which they count. A `solution` beside an `answer` is worked."""


def ground_truth(columns: Mapping[str, Any]) -> Any:
    """What a row says is right: verl's `reward_model.ground_truth`, else the first of GOLD_COLUMNS that is not empty;
    None where there is none.

    >>> ground_truth({"solution": "2 + 3 = 5", "answer": "5"})
    '5'
    """
    model = columns.get("reward_model")
    found = [model.get("ground_truth")] if isinstance(model, Mapping) else []
    found += [columns.get(name) for name in GOLD_COLUMNS]
    return next((value for value in found if value is not None and not (isinstance(value, str) and not value)), None)


@dataclass(frozen=True)
class RewardFunction:
    """A function in TRL's or verl's convention, the name its figures go by, and its weight in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    builtin: bool = False  # one of the task's: quick and pure, so it runs in the caller's process

    @functools.cached_property
    def per_completion(self) -> bool:
        """In verl's convention: a call for each completion."""
        try:
            names = set(inspect.signature(self.function).parameters)
        except (TypeError, ValueError):
            return False
        return {"solution_str", "ground_truth"} <= names

    @functools.cached_property
    def awaits(self) -> bool:
        """`async def`, of the function or of the object's `__call__`."""
        return inspect.iscoroutinefunction(self.function) or \
            inspect.iscoroutinefunction(type(self.function).__call__)


@dataclass(frozen=True)
class SampleRequest:
    """G completions of one prompt, asked of a `Sampler`.

    >>> SampleRequest(id=4, prompt_ids=np.array([5, 8, 13]), num_completions=8,
    ...               address=Address(0, "train", 3, 17), params=SamplingParams(max_tokens=64))
    """

    id: int
    prompt_ids: np.ndarray
    num_completions: int
    address: Address
    params: SamplingParams


@dataclass(frozen=True)
class Completion:
    """What a `Sampler` returns for one sibling; T tokens, the end-of-sequence token included where it was drawn.

    `logprobs` are under the distribution that was sampled from (greedy: temperature 1, untruncated); 0 where not drawn.

    >>> Completion(request_id=4, index=0, token_ids=np.array([7, 9, 2]), logprobs=np.array([-.1, -.7, -.2]),
    ...            loss_mask=np.array([True, True, True]), versions=np.array([3, 3, 3]), stop_reason=StopReason.EOS)
    """

    request_id: int
    index: int
    token_ids: np.ndarray  # int32[T]
    logprobs: np.ndarray  # float32[T]
    loss_mask: np.ndarray  # bool[T]
    versions: np.ndarray  # int32[T]
    stop_reason: StopReason
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)  # further arrays by token: kept sets, experts

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Group:
    """The completions of one prompt with their rewards: what training, metrics, records and the page go by.

    >>> group.rewards                   # float64[G]; NaN where unscorable (then `valid` is False)
    array([1.1, 0.1, 1.1, 0.])
    >>> group.reward_components         # by function, before weights
    {'correct': array([1., 0., 1., 0.]), 'format': array([1., 1., 1., 0.])}
    """

    purpose: Purpose
    step: int  # the step that asked
    version: int  # the weights that were asked for
    example: Example
    prompt_ids: np.ndarray  # int32[Tp]
    completions: tuple[Completion, ...]  # G, in order of their index
    texts: tuple[str, ...]  # decoded, special tokens skipped
    rewards: np.ndarray  # float64[G]
    reward_components: Mapping[str, np.ndarray]  # name -> float64[G]
    valid: np.ndarray  # bool[G]
    correct: np.ndarray | None = None  # bool[G], where the task defines it
    subset: str = "train"  # the name of the data it was drawn from ("held_out", ...)
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # columns that rewards logged
    reward_weights: Mapping[str, float] = field(default_factory=dict)  # by function

    @property
    def size(self) -> int:
        return len(self.completions)


@dataclass(frozen=True)
class GroupRequest:
    """G completions of one example, asked of a `RolloutSource` at a named version."""

    purpose: Purpose
    step: int
    version: int
    example: Example
    prompt_ids: np.ndarray
    num_completions: int
    params: SamplingParams
    subset: str = "train"


class Sampler(Protocol):
    """Draws tokens. Slots are fixed; nothing here knows of rewards."""

    fidelity: Literal["exact", "corrected"]
    """`corrected`: log-probs are another engine's, the loss must weigh by importance."""

    def submit(self, requests: Sequence[SampleRequest]) -> None: ...
    def step(self) -> bool:
        """Starts the next piece of device work and returns without waiting for it; False when there is none."""
        ...

    def collect(self) -> list[Completion]:
        """What is done by now; waits for the oldest piece in flight where nothing is."""
        ...

    def extend(self, id: int, index: int, tokens: np.ndarray) -> None:
        """A further turn of a finished completion: tokens that the model did not draw, without another prefill."""
        ...

    def cancel(self, id: int) -> None: ...
    def release(self, id: int) -> None:
        """The group's keys and values may be forgotten."""
        ...

    def load(self, version: int, params: Params) -> None:
        """Samples from these weights from now on; refused while anything is in flight."""
        ...


class Scorer(Protocol):
    """Log-probs of given tokens: the reference, a teacher, or the trainer before its update (`old`)."""

    def score(self, batch: Any) -> Any:
        """LearnerBatch -> float32[R, S, C], 0 at padding; a token's value at its own place."""
        ...


class RolloutSource(Protocol):
    """Hands over finished groups, with rewards, of the weights that were asked for."""

    def request(self, requests: Sequence[GroupRequest]) -> None:
        """Queues groups; versions are served in order, each drained before the next is loaded."""
        ...

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        """The groups that this step asked for, in the order asked; waits for them."""
        ...

    def cancel(self, purpose: Purpose, step: int) -> None:
        """Takes back what this step asked for and was not handed over."""
        ...

    def publish(self, version: int, params: Params, subset: Sequence[str] | None = None,
                keep_from: int | None = None) -> None:
        """Makes weights available under a number; `subset` names the parameters that changed (LoRA), None for all.
        Versions from `keep_from` on (None: this one) may yet be asked for; older ones only where something pending
        names them."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold: pending groups and their addresses."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...
