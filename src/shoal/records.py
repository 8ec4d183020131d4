"""What crosses the package's folders, as plain data: examples, completions, groups, failures,
errors."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

GOLD_COLUMNS = ("ground_truth", "answer", "solution", "target", "label")
"""Data columns that may hold the right answer, by priority: where a row has `answer` and
`solution`, the solution is a worked one."""


def ground_truth(columns: Mapping[str, Any]) -> Any:
    """A row's right answer: verl's `reward_model.ground_truth`, else the first of GOLD_COLUMNS that
    is not empty; None where there is none.

    >>> ground_truth({"solution": "2 + 3 = 5", "answer": "5"})
    '5'
    """
    model = columns.get("reward_model")
    found = [model.get("ground_truth")] if isinstance(model, Mapping) else []
    found += [columns.get(name) for name in GOLD_COLUMNS]
    return next(
        (
            value
            for value in found
            if value is not None and not (isinstance(value, str) and not value)
        ),
        None,
    )


def truth_fault(columns: Mapping[str, Any]) -> str:
    """Why a row gives verl's functions no right answer; empty where it gives one.

    >>> truth_fault({"reward_model": {"style": "rule"}})
    '`reward_model` has no `ground_truth`'
    """
    model = columns.get("reward_model")
    # verl takes no text either. A right answer elsewhere in the row would be another than the one
    # that is meant.
    if isinstance(model, str) and model.lstrip().startswith("{"):
        return (
            f"`reward_model` is text, {model[:40]!r}: expected an object with `ground_truth`, "
            "parsed from that JSON"
        )
    if ground_truth(columns) is not None:
        return ""
    if isinstance(model, Mapping):
        what = "an empty" if "ground_truth" in model else "no"
        return f"`reward_model` has {what} `ground_truth`"
    if "reward_model" in columns:
        return f"`reward_model` is {model!r:.40}: expected an object with `ground_truth`"
    found = [name for name in GOLD_COLUMNS if name in columns]
    if found:
        return f"`{found[0]}` is empty"
    return (
        "expected a column `reward_model` with `ground_truth` in it, or a column `ground_truth`, "
        f"`answer`, `solution`, `target` or `label`; there are: {', '.join(columns) or 'none'}"
    )


Messages: TypeAlias = "list[dict[str, Any]]"


Prompt: TypeAlias = "str | Messages"


Params: TypeAlias = Any
"""A pytree of arrays: the model's parameters."""


class ShoalError(Exception):
    """An error that the user can fix: its text says what is wrong, what was expected and what to
    change; `key` is the key that fixes it, where one alone does.

    The command line prints the text alone, without a traceback."""

    def __init__(self, text: str = "", key: str = "") -> None:
        super().__init__(text)
        self.key = key


class HostLost(Exception):
    """A host does not answer any more: its process has ended, or cannot be reached. Its text says
    why."""


class HostRefused(HostLost):
    """Raised by a host whose numbers differ from those of the others, where they must not. It is
    not made anew."""


class Purpose(enum.StrEnum):
    TRAIN = "train"
    EVALUATE = "evaluate"
    GENERATE = "generate"


class StopReason(enum.StrEnum):
    EOS = "eos"  # the model sampled an end-of-sequence token; it is the completion's last token
    STOP = "stop"  # a stop string appeared; the completion ends with the token that completed it
    # the completion was truncated at max_tokens, or its last turn at a limit of its own
    LENGTH = "length"
    CANCELLED = "cancelled"
    MAX_TURNS = "max_turns"  # the last turn that a rollout may have ended with a tool call
    ENVIRONMENT = "environment"  # the environment said that the rollout is over
    FAILED = "failed"  # the environment failed, or took too long
    # the data's own answer is over, without an end-of-sequence token: it does not teach to end one
    DATA = "data"


@dataclass(frozen=True)
class NoiseKey:
    """The key of a random number: the same key gives the same number, on any machine and in any
    batch.

    One key for each number, in place of a key that is split as sampling goes, makes sampling
    resumable and independent of what else is sampled.

    >>> # folded with the position after the prompt, it gives one token's uniform
    >>> NoiseKey(seed=0, purpose="train", step=3, row=17).key(completion=2)
    array([...], dtype=uint32)
    """

    seed: int
    purpose: str
    step: int
    row: int

    def key(self, completion: int) -> np.ndarray:
        """The two uint32 words from which a completion's uniforms are derived, position by
        position."""
        text = (
            struct.pack("<qqqq", self.seed, self.step, self.row, completion) + self.purpose.encode()
        )
        return np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), dtype=np.uint32)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled. `temperature=0` is greedy. `top_k=0`, `top_p=1`, `min_p=0` truncate
    nothing."""

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
        """The same limits on lengths, with the most likely token always taken."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


@dataclass(frozen=True)
class Example:
    """One row of a data set.

    >>> Example(row=17, prompt=[{"role": "user", "content": "2 + 3 = ?"}], columns={"answer": "5"})
    """

    row: int
    prompt: Prompt
    columns: Mapping[str, Any] = field(default_factory=dict)
    # file and line, for errors; empty where it has none
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class RewardFunction:
    """A reward function in TRL's or verl's convention, its name in metrics, and its weight in the
    sum."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    # fast and pure, as those of tasks: called in this process, without limits
    runs_in_process: bool = False

    @functools.cached_property
    def per_completion(self) -> bool:
        """True for a function in verl's convention, which is called once a completion."""
        try:
            names = set(inspect.signature(self.function).parameters)
        except (TypeError, ValueError):
            return False
        return {"solution_str", "ground_truth"} <= names

    @functools.cached_property
    def awaits(self) -> bool:
        """True if the function, or the object's `__call__`, is `async def`."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            type(self.function).__call__
        )


class Branch(NamedTuple):
    """What follows another prompt than the tokens before it, because what had been said was told
    anew."""

    start: int  # the first of the completion's tokens that follow it
    # int32[Tp]; what of it the model had sampled is learned from before, not here
    prompt_ids: np.ndarray


@dataclass(frozen=True)
class Completion:
    """One completion of a group; T tokens, the end-of-sequence token included if the model sampled
    it.

    `logprobs` are under the distribution that was sampled from (greedy: temperature 1,
    untruncated); 0 where `loss_mask` is False.

    >>> Completion(
    ...     request_id=4, index=0,
    ...     token_ids=np.array([7, 9, 2]), logprobs=np.array([-.1, -.7, -.2]),
    ...     loss_mask=np.array([True, True, True]), versions=np.array([3, 3, 3]),
    ...     stop_reason=StopReason.EOS,
    ... )
    """

    request_id: int
    index: int
    token_ids: np.ndarray  # int32[T]
    logprobs: np.ndarray  # float32[T]
    loss_mask: np.ndarray  # bool[T]
    versions: np.ndarray  # int32[T]
    stop_reason: StopReason
    # further arrays by token, as support_ids int32[T, K]
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)
    # a turn has ended, and its host holds its place until it is extended or ended
    waits: bool = False
    messages: tuple[Mapping[str, Any], ...] = ()  # what followed the prompt, where there are turns
    # int32[Tp] of its own, where an environment's first words differ by rollout
    prompt_ids: np.ndarray | None = None
    branches: tuple[Branch, ...] = ()  # in order of their start, beyond the first prompt

    def __len__(self) -> int:
        """All tokens, those of context too: what memory and computation go by."""
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """The tokens that the model sampled: its length, to whoever judges or counts what the model
        did."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def sampled_versions(self) -> np.ndarray:
        """The versions of the tokens that the model sampled, int32."""
        return self.versions[self.loss_mask]


@dataclass(frozen=True)
class Group:
    """The completions of one prompt with their rewards.

    >>> group.rewards                   # float64[G]; NaN where unscorable (then `valid` is False)
    array([1.1, 0.1, 1.1, 0.])
    >>> group.reward_components         # by function, before weights
    {'correct': array([1., 0., 1., 0.]), 'format': array([1., 1., 1., 0.])}
    """

    purpose: Purpose
    step: int  # the step that requested it
    # the weights that it was requested from; with newest weights the oldest that a token is of
    version: int
    example: Example
    prompt_ids: np.ndarray  # int32[Tp]
    completions: tuple[Completion, ...]  # G, in order of their index
    texts: tuple[str, ...]  # decoded, special tokens skipped
    rewards: np.ndarray  # float64[G]
    reward_components: Mapping[str, np.ndarray]  # name -> float64[G]
    valid: np.ndarray  # bool[G]
    correct: np.ndarray | None = None  # bool[G], where the task defines it
    subset: str = "train"  # the name of the data set that the example is from ("held_out", ...)
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # columns that rewards logged
    reward_weights: Mapping[str, float] = field(default_factory=dict)  # by function

    @property
    def size(self) -> int:
        return len(self.completions)

    @property
    def answers(self) -> tuple[str, ...]:
        """What is judged: the texts, or of rollouts with turns the model's last words."""
        return tuple(
            str(one.messages[-1].get("content") or "") if one.messages else text
            for one, text in zip(self.completions, self.texts, strict=True)
        )

    def prompt_of(self, number: int) -> np.ndarray:
        """The prompt of a completion, int32[Tp]: the group's, unless its environment began it with
        other words."""
        own = self.completions[number].prompt_ids
        return self.prompt_ids if own is None else own

    def branches_of(self, number: int) -> list[tuple[np.ndarray, slice]]:
        """The prompts that a completion's tokens follow, each with the tokens that do."""
        one = self.completions[number]
        all = [Branch(0, self.prompt_of(number)), *one.branches]
        stops = [branch.start for branch in all[1:]] + [len(one)]
        return [
            (branch.prompt_ids, slice(branch.start, stop))
            for branch, stop in zip(all, stops, strict=True)
        ]

    def by_prompt(self) -> list[tuple[np.ndarray, list[tuple[int, slice]]]]:
        """The prompts of its completions, each with the number and the tokens of what follows it:
        one prompt, unless environments began rollouts differently, or what had been said was told
        anew."""
        prompts: dict[bytes, tuple[np.ndarray, list[tuple[int, slice]]]] = {}
        for number in range(self.size):
            for ids, tokens in self.branches_of(number):
                prompts.setdefault(ids.tobytes(), (ids, []))[1].append((number, tokens))
        return list(prompts.values())


@dataclass(frozen=True)
class Failure:
    """A completion for which a reward function gave no value because it failed, or whose
    environment failed.

    >>> Failure(
    ...     "checker", row=17, completion=2, kind="timed out",
    ...     text="reward function 'checker' after ...",
    ... )
    """

    function: str
    row: int  # of the data
    # its index in the group; None where a call of several failed and none of them alone
    completion: int | None
    kind: Literal["raised", "timed out", "died", "not a number"]
    text: str  # one line that names function, step, what happened and the place
