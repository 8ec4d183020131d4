"""Protocols and messages that the parts of a run share: `Host` (samples), `RolloutSource` (returns
finished groups), `Scorer` (computes log-probs), `Version` (published weights), and the requests and
messages that pass between them."""

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

    `version` is the version of the weights to sample from; with `exact=False` it is the oldest
    version that sampling may start on.

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
    first: int = 0  # the index, within the group, of this request's first completion
    # if True, a completion whose turn has ended keeps its slot until `Extend` or `End` arrives
    has_turns: bool = False
    # number of the branch if this continues a rollout that has begun, else 0; a branch enters the
    # queue before older requests
    branch: int = 0
    # for each completion, the number of tokens after which its first turn is cut, 0 for no limit;
    # (): no limits
    turn_limits: tuple[int, ...] = ()

    def turn_limit_of(self, number: int) -> int:
        """Returns the number of tokens after which a completion's first turn is cut, 0 for no
        limit. `number` is the completion's position within this request, from 0."""
        if not self.turn_limits:
            return 0
        return self.turn_limits[number]

    @property
    def is_read_first(self) -> bool:
        """True if a completion's tokens must be read on the host before it may continue, because it
        may end with a stop string, or a tool or an environment may answer it."""
        return bool(self.params.stop) or self.has_turns


@dataclass(frozen=True)
class GroupRequest:
    """A request to a `RolloutSource` for G completions of one example, sampled from the weights of
    `version`. With `exact=False` sampling may use that version or newer ones, and may change to
    newer weights before a completion ends."""

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
    """Seconds, tokens and reward failures of a `RolloutSource`, counted since the previous
    `read_stats`."""

    sample_seconds: float = 0.0
    # time spent waiting for rewards after sampling had ended; not the time that the reward
    # functions took
    reward_seconds: float = 0.0
    tokens: int = 0  # sampled tokens of the groups that `take` returned
    busy_seconds: float = 0.0  # time during which a host sampled, as the mean over all hosts
    # what the hosts' engines counted, including completions that were lost or dropped:
    # `HostProgress.counters`
    counters: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    unchanged: int = 0  # number of publications whose weights equal those of the publication before
    publish: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("seconds", "bytes", "pause_seconds"), 0.0)
    )
    # share of the hosts' slots, over the time since the previous reading, that sampled nothing;
    # None if the source does not measure it
    sampler_idle: float | None = None
    # number of groups that are "waiting", "running" at a host, or "sampled" but not yet taken
    queue: dict[str, int] = field(default_factory=dict)
    fleet: dict[str, int] = field(default_factory=dict)  # the metrics fleet/*


class Printer(Protocol):
    """Prints lines for the people who watch a run; the console implements it."""

    def note(self, text: str) -> None:
        """Prints a line of information."""
        ...

    def warning(self, text: str, key: str = "") -> None:
        """Prints a warning; `key` is the configuration key that it is about, if any."""
        ...

    def wrong(self, text: str, key: str = "") -> None:
        """Prints that something is wrong; `key` is the configuration key that it is about, if
        any."""
        ...


class Version(Protocol):
    """One published version of the weights, which any host can read and verify. A `WeightStore`
    keeps each version until no request may name it any more."""

    @property
    def version(self) -> int: ...

    @property
    def exists(self) -> bool:
        """True until the version is removed."""
        ...

    def read(
        self, model: Any, frozen: MutableMapping[str, Any] | None = None
    ) -> Future[Callable[[], Params]]:
        """Starts to bring the weights to the devices of `model`, in its data type and layout; these
        devices may sample meanwhile.

        The returned future holds a function. That function returns the weights; call it once, in
        the thread that dispatches to these devices. It raises LookupError if the version does not
        exist any more, and ShoalError if the weights differ from those that were published.

        `frozen` belongs to the host: this method stores there the weights that no version changes,
        so that they are read once."""
        ...

    def parameters(self, model: Any) -> Params:
        """Returns the trained weights, to be written to a checkpoint."""
        ...

    def remove(self) -> None:
        """Removes the weights. In another process than the store's, removes what that process keeps
        of them. A host that samples from them keeps its own copy."""
        ...


@dataclass
class HostProgress:
    """What a host has done since it started, and how many completions it can take at once."""

    version: int = -1  # version of the weights that the host samples from; -1: none loaded yet
    # the host reads weights or compiles, so no token may arrive for minutes
    preparing: bool = False
    # most completions that the host wants to have at once, including those that wait in its queue;
    # 0 while it cannot take any yet; None: no limit
    capacity: int | None = None
    # What the host's engines counted, by name. `tokens`: tokens sampled, including those of
    # unfinished completions. `total_slots` and `active_slots`: slots, and slots that sampled a
    # token, summed over the tokens of decoding. Any other name is the metric sampler/NAME.
    counters: Counter[str] = field(default_factory=Counter)
    dispatches: int = 0  # compiled steps whose tokens have arrived
    # time spent loading weights, including the wait for compiled steps that have begun
    pause_seconds: float = 0.0
    busy_seconds: float = 0.0  # time during which the host had completions to sample
    # the host's numbers differ from what they should be, but it may sample nevertheless
    # (`WorkerParity`)
    differs: bool = False
    # number of reports received from a process elsewhere; a new one shows that the process lives
    # while it prepares
    reports: int = 0
    # longest time without a report while the host prepares or has not sampled yet; 0: as long as
    # compiling may take
    silence_seconds: float = 0.0


@dataclass(frozen=True)
class Load:
    """Says that a version of the weights was published. A host fetches it when a request needs it
    or, for requests that may start on newer weights, between two compiled steps."""

    version: Version


@dataclass(frozen=True)
class Submit:
    """Requests for the host to queue. The host raises ShoalError for a request that it cannot
    sample, such as one whose prompt is too long."""

    requests: Sequence[SampleRequest]


@dataclass(frozen=True)
class Extend:
    """Continues a completion whose turn has ended, after tokens of context such as a tool's answer.

    The context and one more token must fit within the request's `max_tokens`. If `turn_limit` is
    not 0, the new turn is cut after that many tokens, with StopReason.LENGTH, and can then be
    extended like a turn that ended with an end-of-sequence token. `context` may be empty only after
    a turn that was cut in this way."""

    request_id: int
    index: int  # index of the completion within its group
    context: Sequence[int]
    turn_limit: int = 0


@dataclass(frozen=True)
class End:
    """Ends a completion whose turn has ended; its slot becomes free."""

    request_id: int
    index: int  # index of the completion within its group


@dataclass(frozen=True)
class Cancel:
    """Gives up a request that has not finished. The host answers with the tokens that were sampled
    so far; a request that has not begun gets no answer."""

    request_id: int


@dataclass(frozen=True)
class Pause:
    """Stops sampling after the compiled steps that have begun (`paused=True`), or resumes it where
    it stopped (False)."""

    paused: bool


Message = Load | Submit | Extend | End | Cancel | Pause
"""Any message to a `Host`. `EngineHost` acts on messages about versions and whole requests, and
passes all others, which are about completions that have begun, to its engine; a host that wraps
another host passes every message on. To add a message, write a class here, and a case in
`EngineHost.handle` or `Engine.handle`; for servers also in `HttpEngine.handle`."""


class Host(Protocol):
    """Something that samples completions by itself, on any machine, from the versions of the
    weights that `Load` named. A host knows nothing of rewards.

    `Fleet` calls the members of a host from one thread at a time, and no call may wait for another
    host. Each member may raise HostLost; the fleet then closes the host, requests its groups from
    another host, and restarts it, except after HostRefused. A process elsewhere can implement this
    protocol just as `EngineHost` does: docs/architecture.md, "A sampler on another machine"."""

    def handle(self, message: Message) -> None:
        """Acts on a message, or passes it on to the host or engine inside. Messages take effect in
        the order in which they were sent."""
        ...

    def poll(self) -> dict[int, list[Completion]]:
        """Returns what has finished since the last call, by request id: for each finished request
        all its completions, in order of their index. For a request with turns, each completion
        comes by itself whenever one of its turns has ended, each time with all its tokens from the
        start.

        A host that runs in the caller's thread samples inside this call, one compiled step per
        call. Raises the error that stopped the host, if there was one."""
        ...

    def progress(self) -> HostProgress:
        """Returns what the host has done so far and how much it can take; must not wait."""
        ...

    def close(self) -> None:
        """Ends the threads or processes of the host, and releases its weights."""
        ...


class Scorer(Protocol):
    """Computes the log-probs of given tokens under one model: the reference, a teacher, or the
    trainer's before its update."""

    def score(self, batch: Any) -> Any:
        """Returns the log-probs of a LearnerBatch's tokens, float32[R, T], with 0 at prompts and
        padding."""
        ...


@dataclass(frozen=True)
class TokenScores:
    """What a model says of the last T tokens of a sequence, each after those before it. The arrays
    are those of NumPy."""

    logprobs: np.ndarray  # float32[T]: log-probs of these tokens
    top_ids: np.ndarray  # int32[T, K]: the K tokens that it finds likeliest in their places
    top_logprobs: np.ndarray  # float32[T, K]: log-probs of those


class SequenceScorer(Protocol):
    """A model somewhere else that scores sequences of tokens: a teacher's server."""

    def score(self, sequences: Sequence[tuple[np.ndarray, int]]) -> list[TokenScores]:
        """Returns the scores of each of `sequences`, (token ids int32[N], how many of them, from
        the first, are not scored), in their order. It waits for them. ShoalError if it cannot."""
        ...


class RolloutSource(Protocol):
    """Returns finished groups, with rewards, that were sampled from the requested version of the
    weights; the loop publishes new weights to it."""

    def request(self, requests: Sequence[GroupRequest]) -> None:
        """Queues requests for groups; `take` returns the groups."""
        ...

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        """Waits for the groups that a step requested, and returns them in the order of the
        requests."""
        ...

    def check_logprobs(
        self, groups: Sequence[Group], logprobs: Mapping[tuple[int, int], np.ndarray], version: int
    ) -> None:
        """Compares the log-probs of a step's groups with those that the trainer computed under the
        weights of `version`, and gives up a host of another engine that differs too much.

        `logprobs`: by (number of the group, index of the completion), the trainer's log-probs,
        float32[T]."""
        ...

    def is_busy_with(self, purpose: Purpose, step: int) -> bool:
        """True while a step's groups are sampled or scored in the background, so that the caller
        may do other work before it calls `take`. False once they are complete, and also if only the
        wait in `take` makes them."""
        ...

    def publish_frozen(self, params: Params) -> None:
        """Makes the weights available that are the same in every version. Called once, before the
        first `publish`. In `params` the weights that change are None; `publish` then passes those
        alone."""
        ...

    def publish(self, version: int, params: Params, keep_from: int | None = None) -> None:
        """Makes weights available to the hosts as `version`.

        Versions from `keep_from` on (None: from `version` on) stay available; an older version is
        released once no pending request names it."""
        ...

    def published_shapes(self) -> Params:
        """Returns the shapes, data types and layout of published weights; a checkpoint restores
        older versions to them."""
        ...

    def read_stats(self, purpose: Purpose) -> RolloutStats:
        """Returns the figures of one purpose and resets them. The figures of the hosts are part of
        training's."""
        ...

    def published(self) -> Mapping[int, Params]:
        """Returns the weights that may still be sampled from, by version."""
        ...

    def close(self) -> None:
        """Ends what samples, and releases the weights. What scores the groups stays open for its
        owner to close."""
        ...
