"""What the parts of a run are to each other: hosts, sources of rollouts, scorers, published
weights; and the requests and messages that pass between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shoal.records import (
    Completion,
    Example,
    Failure,
    Group,
    NoiseKey,
    Params,
    Purpose,
    SamplingParams,
)

if TYPE_CHECKING:
    from concurrent.futures import Future


@dataclass(frozen=True)
class SampleRequest:
    """A request to a `Host` for G completions of one prompt.

    `version`: of the weights that it is sampled from, or with `exact=False` the oldest that it may
    start on.

    >>> SampleRequest(id=4, prompt_ids=np.array([5, 8, 13]), num_completions=8,
    ...               noise_key=NoiseKey(0, "train", 3, 17), params=SamplingParams(max_tokens=64))
    """

    id: int
    prompt_ids: np.ndarray
    num_completions: int
    noise_key: NoiseKey
    params: SamplingParams
    purpose: Purpose = Purpose.GENERATE
    version: int = 0
    exact: bool = True
    first: int = 0  # the index of the first completion
    # a completion whose turn ends keeps its place until it is extended or ended
    has_turns: bool = False
    branch: int = 0  # of a rollout that has begun: it goes ahead of what was asked for before
    # tokens by completion after which its first turn is cut; 0, or (): no such limit
    turn_limits: tuple[int, ...] = ()

    def turn_limit_of(self, number: int) -> int:
        """After how many tokens the first turn of a completion is cut, 0 for none; `number`: of the
        completion within this request, from 0."""
        if not self.turn_limits:
            return 0
        return self.turn_limits[number]

    @property
    def is_read_first(self) -> bool:
        """True if what follows a token may depend on its text: it may end with a stop string, or be
        answered."""
        return bool(self.params.stop) or self.has_turns


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


@dataclass
class RolloutStats:
    """Seconds, tokens and reward failures of a `RolloutSource` since they were last read."""

    sample_seconds: float = 0.0
    # waited for rewards after sampling ended, not the time that they took
    reward_seconds: float = 0.0
    tokens: int = 0  # of the groups that were taken
    busy_seconds: float = 0.0  # in which hosts sampled, in the mean over them
    # what the hosts' engines counted, whatever became of the completions: `HostProgress.counters`
    counters: Counter[str] = field(default_factory=Counter)
    # what rewards logged with log_metric
    logged: dict[str, list[float]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    unchanged: int = 0  # publications of the weights of the publication before
    publish: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("seconds", "bytes", "pause_seconds"), 0.0)
    )
    # share of the slots, over the time since, that drew nothing; None: not counted
    sampler_idle: float | None = None
    # groups that wait, run, or are sampled and not handed over
    queue: dict[str, int] = field(default_factory=dict)
    fleet: dict[str, int] = field(default_factory=dict)  # the metrics fleet/*


class Printer(Protocol):
    """Prints lines for the people who watch a run: the console."""

    def note(self, text: str) -> None: ...

    def warning(self, text: str, key: str = "") -> None: ...

    def wrong(self, text: str, key: str = "") -> None: ...


class Version(Protocol):
    """A published version of the weights: where it can be read, verified, by any host. A
    `WeightStore` keeps it until nobody may request it any more."""

    @property
    def version(self) -> int: ...

    @property
    def exists(self) -> bool:
        """False once it was removed."""
        ...

    def read(
        self, model: Any, frozen: MutableMapping[str, Any] | None = None
    ) -> Future[Callable[[], Params]]:
        """Begins to bring the weights to the devices of `model`, in its type and layout, while
        these may sample. `frozen` is the host's: what no version changes is kept there, and read
        once.

        The function in the future returns them, once, in the thread that dispatches to these
        devices. LookupError where the version does not exist any more, ShoalError where the weights
        are not those that were published."""
        ...

    def parameters(self, model: Any) -> Params:
        """The trained weights, for a checkpoint."""
        ...

    def remove(self) -> None:
        """Removes the weights; in another process than the store's, what that process keeps of
        them. A host that samples from them keeps its own copy."""
        ...


@dataclass
class HostProgress:
    """What a host has done since it started, and how much it can have at once."""

    version: int = -1  # of the weights that it samples from; -1: none yet
    preparing: bool = False  # it reads weights or compiles: no token may arrive for minutes
    # completions that it wants to have at once, those that wait included; 0: all there are
    capacity: int = 0
    # What its engines counted, by name. `tokens`: sampled, those of completions under way too;
    # `active_slots`: slots that sampled a token, of `total_slots`, summed over the tokens of
    # decoding. Any other name is the metric sampler/NAME.
    counters: Counter[str] = field(default_factory=Counter)
    dispatches: int = 0  # compiled steps whose tokens have arrived
    # in which it loaded weights; those compiled steps that are under way are waited for
    pause_seconds: float = 0.0
    busy_seconds: float = 0.0  # in which it had completions to sample
    # its numbers differ from what they should be, and it samples nevertheless
    differs: bool = False
    reports: int = 0  # how often a process elsewhere was heard of: proof of life while it prepares
    # how long it may not be heard of until it samples; 0: as long as compiling takes
    silence_seconds: float = 0.0


@dataclass(frozen=True)
class Load:
    """A version of the weights was published. A host fetches it when a request needs it, or, for
    requests that may start on newer weights, between two compiled steps."""

    version: Version


@dataclass(frozen=True)
class Submit:
    """Requests to queue. ShoalError for one that cannot be sampled, such as a prompt that is too
    long."""

    requests: Sequence[SampleRequest]


@dataclass(frozen=True)
class Extend:
    """A completion whose turn has ended continues after tokens of context.

    The context and one token more fit within the request's `max_tokens`. The new turn is cut after
    `turn_limit` tokens, if that is not 0: it has then ended as by an end-of-sequence token, with
    StopReason.LENGTH. Only a turn that was cut so may be continued by an empty context."""

    request_id: int
    index: int  # of the completion within its group
    context: Sequence[int]
    turn_limit: int = 0


@dataclass(frozen=True)
class End:
    """A completion whose turn has ended is over: its slot is freed."""

    request_id: int
    index: int  # of the completion within its group


@dataclass(frozen=True)
class Cancel:
    """A request is given up, unless it is over. Its completions are what has been sampled; a
    request that has not begun gets no answer."""

    request_id: int


@dataclass(frozen=True)
class Pause:
    """Sampling stops after the compiled steps that have begun, or resumes where it stopped."""

    paused: bool


Message = Load | Submit | Extend | End | Cancel | Pause
"""What a `Host` is sent. `EngineHost` acts on messages about versions and whole requests, and
passes all others on to its engine; hosts around another host pass every message on. A new message
is a class here and a case in `Engine.handle`."""


class Host(Protocol):
    """Samples completions by itself, on any machine, from the versions of the weights that `Load`
    named; it knows nothing of rewards.

    `Fleet` calls all members from one thread at a time, and none of them waits for another host.
    Each may raise HostLost; the fleet then closes the host, requests its groups from another one
    and restarts it, unless that was HostRefused. A process elsewhere implements it as well as
    `EngineHost` does: docs/architecture.md, "A sampler on another machine".
    """

    def handle(self, message: Message) -> None:
        """Acts on a message, or passes it on. Messages take effect in the order that they were
        sent."""
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
