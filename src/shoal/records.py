"""Plain data that passes between the package's folders: examples, completions, groups, failures,
errors."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

GOLD_COLUMNS = ("ground_truth", "answer", "solution", "target", "label")
"""Data columns that may hold the right answer, the first found wins. `answer` comes before
`solution`, because in a row with both the solution is a worked one."""


def ground_truth(columns: Mapping[str, Any]) -> Any:
    """Returns a row's right answer: verl's `reward_model.ground_truth`, else the first of
    GOLD_COLUMNS that is not empty; None if there is none. Empty are None and ""; 0, False and an
    empty list count as answers.

    >>> ground_truth({"solution": "2 + 3 = 5", "answer": "5"})
    '5'
    """
    reward_model = columns.get("reward_model")
    candidates = []
    if isinstance(reward_model, Mapping):
        candidates.append(reward_model.get("ground_truth"))
    candidates += [columns.get(name) for name in GOLD_COLUMNS]
    for value in candidates:
        # Compared as text alone: the truth of an array is an error, and 0 is an answer.
        is_empty = value is None or (isinstance(value, str) and not value)
        if not is_empty:
            return value
    return None


def truth_fault(columns: Mapping[str, Any]) -> str:
    """Returns why verl's reward functions would get no right answer from a row, as a text for an
    error; "" if the row has one. A `reward_model` that is JSON as text is a fault, also if another
    column has an answer.

    >>> truth_fault({"reward_model": {"style": "rule"}})
    '`reward_model` has no `ground_truth`'
    """
    model = columns.get("reward_model")
    # verl does not accept a text here either. An answer from another column might not be the one
    # that `reward_model` means.
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
    """An error that the user can fix. Its text says what is wrong, what was expected and what to
    change; `key` is the configuration key that fixes it, or "" if no single key does.

    The command line prints the text alone, without a traceback."""

    def __init__(self, text: str = "", key: str = "") -> None:
        super().__init__(text)
        self.key = key


class HostLost(Exception):
    """Raised if a host does not answer any more, because its process has ended or cannot be
    reached, or if its answers are wrong. The text says why."""


class HostRefused(HostLost):
    """Raised if a host's numbers differ from those of the others although they must be equal. The
    fleet never restarts such a host."""


class Purpose(enum.StrEnum):
    """What a group is sampled for."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    GENERATE = "generate"


class StopReason(enum.StrEnum):
    """Why a completion ended."""

    EOS = "eos"  # the model sampled an end-of-sequence token; it is the completion's last token
    STOP = "stop"  # a stop string appeared; the completion ends with the token that completed it
    # the completion was cut at max_tokens, or its last turn at the limit of that turn
    LENGTH = "length"
    CANCELLED = "cancelled"
    MAX_TURNS = "max_turns"  # the rollout's last permitted turn ended with a tool call
    ENVIRONMENT = "environment"  # the environment said that the rollout is over
    FAILED = "failed"  # the environment failed, or took too long
    # the completion is an answer from the data that ends without an end-of-sequence token, so it
    # does not teach the model to end one
    DATA = "data"


@dataclass(frozen=True)
class NoiseKey:
    """The address of a random number: the same key gives the same number, on any machine and in any
    batch.

    Each number has its own key, instead of one key that is split during sampling; this makes
    sampling resumable and independent of what else is sampled.

    >>> # folded with the position after the prompt, it gives one token's uniform
    >>> NoiseKey(seed=0, purpose="train", step=3, row=17).key(completion=2)
    array([...], dtype=uint32)
    """

    seed: int
    purpose: str
    step: int
    row: int

    def key(self, completion: int) -> np.ndarray:
        """Returns the random key of one completion, two uint32 words: a hash of this address and
        the completion's number. The uniform number that samples a token follows from the key and
        the token's position."""
        # four signed 64-bit integers, then the purpose; the order is part of the address
        text = (
            struct.pack("<qqqq", self.seed, self.step, self.row, completion) + self.purpose.encode()
        )
        return np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), dtype=np.uint32)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled. `temperature=0` is greedy. `top_k=0`, `top_p=1` and `min_p=0`
    truncate nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()

    @property
    def truncated(self) -> bool:
        """True if top_k, top_p or min_p exclude tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def as_greedy(self) -> SamplingParams:
        """Returns a copy with the same limits on lengths that always takes the most likely
        token."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


@dataclass(frozen=True)
class Example:
    """One row of a data set.

    >>> Example(row=17, prompt=[{"role": "user", "content": "2 + 3 = ?"}], columns={"answer": "5"})
    """

    row: int
    prompt: Prompt
    columns: Mapping[str, Any] = field(default_factory=dict)
    # file and line of the row, for error messages; "" if unknown
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class RewardFunction:
    """A reward function in TRL's or verl's convention, with its name in metrics and its weight in
    the sum of rewards."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    # if True, the function is fast and pure, like those of tasks: it is called in this process,
    # without time limits
    runs_in_process: bool = False

    @functools.cached_property
    def per_completion(self) -> bool:
        """True if the function follows verl's convention for one completion, that is, is called
        once per completion: it has the parameters `solution_str` and `ground_truth`. False also if
        its signature cannot be read."""
        return self._takes("solution_str", "ground_truth")

    @functools.cached_property
    def takes_verl_lists(self) -> bool:
        """True if the function follows the convention of verl's BatchRewardManager, which is called
        with lists: it has the parameters `solution_strs` and `ground_truths`. False also if its
        signature cannot be read."""
        return self._takes("solution_strs", "ground_truths")

    @property
    def follows_verl(self) -> bool:
        """True if the function follows one of verl's conventions: it compares with a ground truth,
        and may return a dict with `score` for a completion."""
        return self.per_completion or self.takes_verl_lists

    def _takes(self, *names: str) -> bool:
        """True if the function's signature has all these parameters; False if it cannot be read."""
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            return False
        return all(name in parameters for name in names)

    @functools.cached_property
    def awaits(self) -> bool:
        """True if the function, or the object's `__call__`, is `async def`."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            type(self.function).__call__
        )


class Branch(NamedTuple):
    """A second or later prompt of a rollout: the tokens from `start` on follow `prompt_ids` rather
    than the tokens before them, because the conversation was rewritten (an agent or a template
    changed its history)."""

    start: int  # index of the first token of the completion that follows this prompt
    # int32[Tp]; tokens in it that the model sampled earlier are trained on where they were sampled,
    # not here
    prompt_ids: np.ndarray
    experts: np.ndarray | None = None  # as `Completion.prompt_experts`, of these tokens


def turns_of(loss_mask: np.ndarray, branch_starts: Iterable[int] = ()) -> tuple[slice, ...]:
    """Returns the slices of the tokens that the model sampled without a break, in order.
    `loss_mask`: bool[T], True at tokens that the model sampled; a branch, which starts at a token,
    is a break although no context is before it."""
    begins = loss_mask.copy()
    begins[1:] &= ~loss_mask[:-1]
    ends = loss_mask.copy()
    ends[:-1] &= ~loss_mask[1:]
    for start in branch_starts:
        if 0 < start < len(loss_mask):
            begins[start] = loss_mask[start]
            ends[start - 1] = loss_mask[start - 1]
    starts = np.flatnonzero(begins).tolist()
    stops = (np.flatnonzero(ends) + 1).tolist()
    return tuple(map(slice, starts, stops))


@dataclass(frozen=True)
class Completion:
    """One completion of a group, with T tokens. If the model sampled an end-of-sequence token, that
    is the last one.

    `loss_mask` is True at tokens that the model sampled, False at context such as a tool's answer.
    `logprobs` are under the distribution that was sampled from (greedy: temperature 1,
    untruncated), and 0 where `loss_mask` is False.

    >>> Completion(
    ...     request_id=4, index=0,
    ...     token_ids=np.array([7, 9, 2]), logprobs=np.array([-.1, -.7, -.2]),
    ...     loss_mask=np.array([True, True, True]), versions=np.array([3, 3, 3]),
    ...     stop_reason=StopReason.EOS,
    ... )
    """

    request_id: int
    index: int
    token_ids: np.ndarray = field(repr=False)  # int32[T]
    logprobs: np.ndarray = field(repr=False)  # float32[T]
    loss_mask: np.ndarray = field(repr=False)  # bool[T]
    versions: np.ndarray = field(repr=False)  # int32[T]
    stop_reason: StopReason
    # Further arrays with one row per token: support_ids int32[T, K]; experts unsigned[T, layers
    # with experts, k], those that each token was sent to when it was computed, zeros for the last
    # token of each branch, which was not.
    extra: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    # True if only a turn has ended: the host keeps the slot until `Extend` or `End` arrives
    waits: bool = False
    # the messages after the prompt, if the rollout has turns; else ()
    messages: tuple[Mapping[str, Any], ...] = ()
    # int32[Tp], if this rollout's environment began with another prompt than the group's; else None
    prompt_ids: np.ndarray | None = field(default=None, repr=False)
    branches: tuple[Branch, ...] = ()  # the prompts after the first one, in order of `start`
    # unsigned[Tp, layers with experts, k]: the experts of the (first) prompt's tokens, one array
    # for all completions of it; None if they are not recorded, or were read from a file, where an
    # earlier completion of the group has them (`Group.experts_by_prompt`)
    prompt_experts: np.ndarray | None = field(default=None, repr=False)

    def __len__(self) -> int:
        """Returns the number of all tokens, including context: the number that memory and
        computation depend on."""
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the model sampled itself; use this, not len(), to judge or
        count what the model did."""
        return int(np.count_nonzero(self.loss_mask))

    @functools.cached_property
    def turns(self) -> tuple[slice, ...]:
        """The model's turns, in order: of each the slice of its tokens. A turn is what the model
        sampled without a break: context ends it, and so does a branch.

        >>> # two turns of two tokens, with one token of a tool's answer between them
        >>> replace(completion, loss_mask=np.array([True, True, False, True, True])).turns
        (slice(0, 2, None), slice(3, 5, None))
        """
        return turns_of(self.loss_mask, [branch.start for branch in self.branches])

    @property
    def sampled_versions(self) -> np.ndarray:
        """The version of the weights behind each token that the model sampled, int32."""
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
    step: int  # the step that requested the group
    # the version that was requested; if newer weights were allowed, the oldest version that a token
    # was sampled from
    version: int
    example: Example
    prompt_ids: np.ndarray = field(repr=False)  # int32[Tp]
    completions: tuple[Completion, ...] = field(repr=False)  # G, in order of their index
    # the completions' text without special tokens, thoughts in tags (`Tokenizer.text`)
    texts: tuple[str, ...]
    rewards: np.ndarray  # float64[G]
    reward_components: Mapping[str, np.ndarray]  # name -> float64[G]
    valid: np.ndarray  # bool[G]
    correct: np.ndarray | None = None  # bool[G]; None if neither task nor rewards say what is right
    subset: str = "train"  # the name of the data set that the example is from ("held_out", ...)
    # columns that reward functions logged, one value per completion
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # weight of each reward function, by name
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    # float64[number of turns] of each completion: its reward by the turns that earned it, which add
    # up to it; () if no function judged by turn, so that the last turn has all of it
    turn_rewards: tuple[np.ndarray, ...] = ()
    # values that reward functions gave to `log_metric` when they judged the group, by name; not
    # stored with the group
    logged: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.completions)

    def experts_by_prompt(self) -> dict[bytes, np.ndarray]:
        """Returns the recorded experts of the tokens of the group's prompts, by the bytes of their
        token ids: those of the first completion, or branch, that has them."""
        experts: dict[bytes, np.ndarray] = {}
        for number, completion in enumerate(self.completions):
            first = Branch(0, self.prompt_of(number), completion.prompt_experts)
            for branch in (first, *completion.branches):
                if branch.experts is not None:
                    experts.setdefault(branch.prompt_ids.tobytes(), branch.experts)
        return experts

    @property
    def answers(self) -> tuple[str, ...]:
        """The texts that rewards and graders judge: the whole completion or, for a rollout with
        turns, the content of the last message ("" if that has none). In order of the
        completions."""
        return tuple(
            str(completion.messages[-1].get("content") or "") if completion.messages else text
            for completion, text in zip(self.completions, self.texts, strict=True)
        )

    def prompt_of(self, number: int) -> np.ndarray:
        """Returns the prompt of a completion, int32[Tp]: the group's prompt, unless the
        completion's environment began with another one. `number`: the completion's index in the
        group."""
        own = self.completions[number].prompt_ids
        return self.prompt_ids if own is None else own

    def branches_of(self, number: int) -> list[tuple[np.ndarray, slice]]:
        """Returns the branches of one completion (see `Branch`), in order, each as (token ids of
        its prompt, slice of the completion's tokens that follow that prompt). A completion whose
        history was never rewritten has one, with all its tokens. `number`: the completion's index
        in the group."""
        completion = self.completions[number]
        branches = [Branch(0, self.prompt_of(number)), *completion.branches]
        # A branch ends at the start of the next one, the last at the completion's end.
        stops = [branch.start for branch in branches[1:]] + [len(completion)]
        return [
            (branch.prompt_ids, slice(branch.start, stop))
            for branch, stop in zip(branches, stops, strict=True)
        ]

    def by_prompt(self) -> list[tuple[np.ndarray, list[tuple[int, slice]]]]:
        """Returns the distinct prompts of the group, each with a list of (index of a completion,
        slice of its tokens that follow the prompt). Prompts are in order of their first use;
        prompts with the same tokens are one. There is one prompt, unless environments began
        rollouts differently or conversations were rewritten (`Branch`)."""
        prompts: dict[bytes, tuple[np.ndarray, list[tuple[int, slice]]]] = {}
        for number in range(self.size):
            for ids, tokens in self.branches_of(number):
                # keyed by the tokens' bytes, because arrays cannot be keys
                _, uses = prompts.setdefault(ids.tobytes(), (ids, []))
                uses.append((number, tokens))
        return list(prompts.values())


@dataclass(frozen=True)
class Failure:
    """A completion that has no reward value because a reward function or its environment failed.

    >>> Failure(
    ...     "checker", row=17, completion=2, kind="timed out",
    ...     text="reward function 'checker' after ...",
    ... )
    """

    function: str
    row: int  # row of the data
    # index of the completion in the group; None if a call for several completions failed as a whole
    completion: int | None
    kind: Literal["raised", "timed out", "died", "not a number"]
    text: str  # one line that names the function, the step, what happened and the place in the data
