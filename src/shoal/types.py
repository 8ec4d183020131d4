"""Records that cross borders between the folders, and the protocols between sampling, scoring and
training.

Dimensions, used in the whole package:

    P prompts      G completions a group  R rows of a micro-batch  S slots a group  C tokens a slot
    T tokens       V vocabulary           D hidden size            F intermediate   L layers
    H query heads  K key/value heads      A head size

Words, used in code, metrics and documents alike:

    example      one row of a data set: a prompt and the columns that rewards read
    group        the G completions of one prompt, with rewards: the unit of sampling, advantages,
                 records and metrics
    completion   the tokens after a prompt; `loss_mask` is True at those that the model sampled
                 itself
    row          a stream of prompts and completions in a micro-batch, the tokens of one after the
                 other
    segment      one prompt or completion in a row
    slot         room for one completion in the sampler, G a group
    version      the number of steps that the weights had been trained for
    sampler_logprobs, old_logprobs, ref_logprobs
                 log-probs of the same tokens: the sampler's when it sampled them, the trainer's
                 before the first update on this batch, the reference model's
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import struct
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:  # the command line starts 5 ms sooner without it
    from concurrent.futures import Future

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
class Address:
    """The address of a random number: the same address gives the same number, on any machine and in
    any batch.

    Noise by address instead of by a running key makes sampling resumable and independent of what
    else is sampled.

    >>> # folded with the position after the prompt, it gives one token's uniform
    >>> Address(seed=0, purpose="train", step=3, row=17).key(completion=2)
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
    place: str = field(
        default="", compare=False
    )  # file and line, for errors; empty where it has none


@dataclass(frozen=True)
class RewardFunction:
    """A reward function in TRL's or verl's convention, its name in metrics, and its weight in the
    sum."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    runs_in_process: bool = (
        False  # fast and pure, as those of tasks: called in this process, without limits
    )

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


@dataclass(frozen=True)
class SampleRequest:
    """A request to a `Host` for G completions of one prompt.

    `version`: of the weights that it is sampled from, or with `exact=False` the oldest that it may
    start on.

    >>> SampleRequest(id=4, prompt_ids=np.array([5, 8, 13]), num_completions=8,
    ...               address=Address(0, "train", 3, 17), params=SamplingParams(max_tokens=64))
    """

    id: int
    prompt_ids: np.ndarray
    num_completions: int
    address: Address
    params: SamplingParams
    purpose: Purpose = Purpose.GENERATE
    version: int = 0
    exact: bool = True
    first: int = 0  # the index of the first completion
    has_turns: bool = (
        False  # a completion whose turn ends keeps its place until it is extended or ended
    )
    branch: int = 0  # of a rollout that has begun: it goes ahead of what was asked for before
    turn_limits: tuple[
        int, ...
    ] = ()  # tokens by completion after which its first turn is cut; 0, or (): no such limit

    def turn_limit_of(self, number: int) -> int:
        """After how many tokens the first turn of a completion is cut, by its number here, from 0;
        0: only where the completion is."""
        return self.turn_limits[number] if self.turn_limits else 0

    @property
    def is_read_first(self) -> bool:
        """True if what follows a token may depend on its text: it may end with a stop string, or be
        answered."""
        return bool(self.params.stop) or self.has_turns


class Branch(NamedTuple):
    """What follows another prompt than the tokens before it, because what had been said was told
    anew."""

    start: int  # the first of the completion's tokens that follow it
    prompt_ids: (
        np.ndarray
    )  # int32[Tp]; what of it the model had sampled is learnt from before, not here


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
    extra: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # further arrays by token, as support_ids int32[T, K]
    waits: bool = (
        False  # a turn has ended, and its host holds its place until it is extended or ended
    )
    messages: tuple[Mapping[str, Any], ...] = ()  # what followed the prompt, where there are turns
    prompt_ids: np.ndarray | None = (
        None  # int32[Tp] of its own, where an environment's first words differ by rollout
    )
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
class GroupRequest:
    """A request to a `RolloutSource` for G completions of one example, sampled from the weights of
    one version; with `exact=False` from that version or newer ones, which may change while they are
    sampled."""

    purpose: Purpose
    step: int
    version: int
    example: Example
    prompt_ids: np.ndarray
    num_completions: int
    params: SamplingParams
    subset: str = "train"
    exact: bool = True


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
    completion: (
        int | None
    )  # its index in the group; None where a call of several failed and none of them alone
    kind: Literal["raised", "timed out", "died", "not a number"]
    text: str  # one line that names function, step, what happened and the place


@dataclass
class RolloutStats:
    """Seconds, tokens and reward failures of a `RolloutSource` since they were last read."""

    sample_seconds: float = 0.0
    reward_seconds: float = (
        0.0  # waited for rewards after sampling ended, not the time that they took
    )
    tokens: int = 0  # of the groups that were taken
    busy_seconds: float = 0.0  # in which hosts sampled, in the mean over them
    drawing: int = 0  # places of the sampler that drew a token, of
    places: int = 0  # all, summed over the tokens of decoding
    logged: dict[str, list[float]] = field(
        default_factory=dict
    )  # what rewards logged with log_metric
    failures: list[Failure] = field(default_factory=list)
    unchanged: int = 0  # publications of the weights of the publication before
    publish: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("seconds", "bytes", "pause_seconds"), 0.0)
    )
    sampler_idle: float | None = (
        None  # share of the places, over the time since, that drew nothing; None: not counted
    )
    queue: dict[str, int] = field(
        default_factory=dict
    )  # groups that wait, run, or are sampled and not handed over
    fleet: dict[str, int] = field(default_factory=dict)  # the metrics fleet/*
    host_tokens: int = 0  # that hosts sampled, whatever became of them
    preempted: int = 0  # rows of completions that gave way to others, for want of pages


class Printer(Protocol):
    """Prints lines for the people who watch a run: the console."""

    def note(self, text: str) -> None: ...

    def warning(self, text: str) -> None: ...

    def wrong(self, text: str) -> None: ...


class Manifest(Protocol):
    """Where a published version of the weights can be fetched from. It is light: it holds no
    weights."""

    @property
    def version(self) -> int: ...

    @property
    def exists(self) -> bool:
        """False once nobody may ask for this version any more."""
        ...

    def read(
        self, model: Any, frozen: MutableMapping[str, Any] | None = None
    ) -> Future[Callable[[], Params]]:
        """Begins to bring the weights to the devices of `model`, in its type and layout, while
        these may sample. `frozen` is the host's: what no version changes is kept there, and read
        once.

        What it ends with gives them, once, in the thread that dispatches to these devices.
        LookupError where the version does not exist any more, ShoalError where the weights are not
        those that were published."""
        ...


@dataclass
class HostProgress:
    """What a host has done since it started, and how much it can have at once."""

    version: int = -1  # of the weights that it samples from; -1: none yet
    preparing: bool = False  # it reads weights or compiles: no token may arrive for minutes
    capacity: int = (
        0  # completions that it wants to have at once, those that wait included; 0: all there are
    )
    tokens: int = 0  # sampled, those of completions under way too
    dispatches: int = 0  # compiled steps whose tokens have arrived
    preempted: int = 0  # rows of completions that gave way to others, for want of pages
    drawing: int = 0  # places that drew a token, of
    places: int = 0  # all, summed over the tokens of decoding
    pause_seconds: float = (
        0.0  # in which it loaded weights; those compiled steps that are under way are waited for
    )
    busy_seconds: float = 0.0  # in which it had completions to sample
    differs: bool = (
        False  # its numbers differ from what they should be, and it samples nevertheless
    )
    reports: int = 0  # how often a process elsewhere was heard of: proof of life while it prepares
    silence_seconds: float = (
        0.0  # how long it may not be heard of until it samples; 0: as long as compiling takes
    )


class Host(Protocol):
    """Samples completions by itself, wherever it is, from the versions of the weights that it was
    told of; it knows nothing of rewards.

    `Fleet` calls all of these from one thread at a time, and none of them waits for another host.
    Each may raise HostLost; the fleet then closes the host, asks its groups again elsewhere and
    makes it anew, unless that was HostRefused. A process elsewhere implements it as well as
    `EngineHost` does: docs/architecture.md, "A sampler on another machine".
    """

    def load(self, manifest: Manifest) -> None:
        """Says where a version can be fetched; it is fetched when a request needs it, or, for those
        that may start on newer weights, between two compiled steps."""
        ...

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queues requests. ShoalError for one that cannot be sampled, as a prompt that is too
        long."""
        ...

    def extend(self, id: int, index: int, context: Sequence[int], turn_limit: int = 0) -> None:
        """Has a completion whose turn has ended go on after tokens of context. There is room for
        them and one more within the request's `max_tokens`. The turn that begins is cut after
        `turn_limit` tokens, if that is not 0: it has ended then, as by an end-of-sequence token,
        with StopReason.LENGTH. Such a turn may be continued by no tokens of context."""
        ...

    def end(self, id: int, index: int) -> None:
        """Frees the place of a completion whose turn has ended."""
        ...

    def poll(self) -> dict[int, list[Completion]]:
        """The requests that have finished since the last call, by id: all completions of each, in
        order of their index. Of requests with turns: each completion by itself, whenever a turn has
        ended, and then all of its tokens.

        A host in the caller's thread samples in here, one compiled step at a time. Raises what went
        wrong."""
        ...

    def progress(self) -> HostProgress: ...

    def close(self) -> None:
        """Ends what runs by itself, and releases the weights."""
        ...


class Scorer(Protocol):
    """Log-probs of given tokens: the reference's, a teacher's, or the trainer's before its
    update."""

    def score(self, batch: Any) -> Any:
        """LearnerBatch -> float32[R, T], 0 at prompts and padding."""
        ...


class RolloutSource(Protocol):
    """Hands over finished groups, with rewards, sampled from the requested version of the
    weights."""

    def request(self, requests: Sequence[GroupRequest]) -> None:
        """Queues groups."""
        ...

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        """The groups that this step requested, in the order of the requests; waits for them."""
        ...

    def check_logprobs(
        self, groups: Sequence[Group], logprobs: Mapping[tuple[int, int], np.ndarray], version: int
    ) -> None:
        """Compares log-probs that a step's groups were sampled with with the trainer's under the
        weights of `version`, float32[T] by the numbers of group and completion. A host of another
        engine that differs is given up."""
        ...

    def is_ready(self, purpose: Purpose, step: int) -> bool:
        """False if `take` would wait for what is sampled meanwhile."""
        ...

    def publish_frozen(self, params: Params) -> None:
        """Makes weights available that are the same in every version, once, before the first
        version; None in place of the others, which alone are then published."""
        ...

    def publish(self, version: int, params: Params, keep_from: int | None = None) -> None:
        """Makes weights available under a number.

        Versions from `keep_from` on (None: this one) stay available; an older one is released once
        no pending request names it.
        """
        ...

    def published_shapes(self) -> Params:
        """Shapes, type and layout of published weights: a checkpoint restores older versions to
        them."""
        ...

    def read_stats(self, purpose: Purpose) -> RolloutStats:
        """The figures of a purpose since they were last read; those of the hosts are with
        training's."""
        ...

    def published(self) -> Mapping[int, Params]:
        """The weights by version that may still be sampled from."""
        ...

    def close(self) -> None:
        """Ends worker processes and releases weights."""
        ...
