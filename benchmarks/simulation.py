"""Sampling while training as events: what benchmarks/overlap.py predicts, and its figures of what a
run did.

    publish -> ask -> assign -> feed -> start -> end -> learn -> publish

The rules are those of the fleet, of a host and of the loop; that an update and a token take time is
all that there is.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from shoal.trainer.schedule import Lookahead, Schedule

MEDIAN_TOKENS = 12
"""The median of lognormal lengths."""
CONSTANT_TOKENS = 60
FILLING = 4
"""Steps at a run's start that are not measured, besides those that are asked for ahead."""


@dataclass(frozen=True)
class Case:
    """The work of a step, and how it is done."""

    mode: str = "fixed"  # or "newest", "auto"
    k: int = 0  # how old a sample may be, and, but with auto, how many steps ahead are asked for
    sigma: float = 0.0  # of lognormal lengths; 0: constant
    most: float = 0.0  # medians that a completion has at most; 0: no limit
    update: float = 1.0  # seconds of an update over those of synchronous sampling
    prompts: int = 16
    group_size: int = 8
    hosts: int = 1
    places: int = 0  # of each host; 0: together as many as a step has completions
    capacity: int = 0  # completions that a host has at once, those that wait included; 0: all

    def __str__(self) -> str:
        lengths = f"lognormal {self.sigma:g}" if self.sigma else "constant"
        lengths += f" (at most {self.most:g} medians)" if self.most else ""
        places = self.places_per_host * self.hosts / (self.prompts * self.group_size)
        return (
            f"{lengths}, update {self.update:g}, {self.hosts} host{'s' * (self.hosts > 1)}, places "
            f"{places:.2g}"
        )

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.k, takes_newest=self.mode != "fixed")

    @property
    def places_per_host(self) -> int:
        return self.places or self.prompts * self.group_size // self.hosts

    def lengths(self, steps: int, seed: int) -> np.ndarray:
        """Tokens [steps, P, G]."""
        shape = steps, self.prompts, self.group_size
        if not self.sigma:
            return np.full(shape, CONSTANT_TOKENS)
        tokens = np.random.default_rng(seed).lognormal(np.log(MEDIAN_TOKENS), self.sigma, shape)
        most = self.most * MEDIAN_TOKENS or np.inf
        return np.rint(np.clip(tokens, 1, most)).astype(int)


def pinned(lookahead: Lookahead) -> Lookahead:
    """All steps that the lag allows are asked for ahead, from the start on."""
    lookahead.adapts, lookahead.steps = False, lookahead.most
    return lookahead


@dataclass
class Trace:
    """What happened: moments of one clock, in seconds."""

    updates: list[tuple[float, float]] = field(default_factory=list)  # begin and end, by step
    # begin and end of each completion
    sampled: list[tuple[float, float]] = field(default_factory=list)
    staleness: list[np.ndarray] = field(default_factory=list)  # by step: of its tokens
    cpu_seconds: float = 0.0  # of this process


@dataclass(frozen=True)
class Figures:
    seconds: float  # a step
    idle_trainer: float
    idle_sampler: float
    staleness: float
    staleness_max: int
    cpu_seconds: float  # a step


def figures(trace: Trace, case: Case) -> Figures:
    """Of the steps between the first, in which the pipeline fills, and the last."""
    first = FILLING + case.k
    starts = [begin for begin, _ in trace.updates]
    begin, end = starts[first], starts[-1]
    steps = len(starts) - 1 - first
    learning = sum(done - started for started, done in trace.updates[first:-1])
    sampling = sum(max(0.0, min(last, end) - max(start, begin)) for start, last in trace.sampled)
    tokens = np.concatenate(trace.staleness[first:-1])
    return Figures(
        (end - begin) / steps,
        max(0.0, 1 - learning / (end - begin)),
        max(0.0, 1 - sampling / (end - begin) / case.places_per_host / case.hosts),
        float(tokens.mean()),
        int(tokens.max()),
        trace.cpu_seconds / len(starts),
    )


@dataclass
class SimulatedHost:
    free: int  # places
    version: int = -1
    given: int = 0  # completions that it has
    queue: deque[int] = field(default_factory=deque)  # groups that are not sampled yet
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # completions, for a place

    def is_idle(self, places: int) -> bool:
        return not self.waiting and self.free == places


class Simulation:
    """Events in the order of their time: a completion ends, an update ends. Groups are numbered in
    the order asked."""

    def __init__(
        self, case: Case, lengths: np.ndarray, update_seconds: float, token_seconds: float
    ) -> None:
        self.case, self.update_seconds, self.token_seconds = case, update_seconds, token_seconds
        self.steps = len(lengths)
        self.lengths = lengths.reshape(-1, case.group_size)
        self.hosts = [SimulatedHost(case.places_per_host) for _ in range(case.hosts)]
        self.now, self.order = 0.0, itertools.count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.waiting: deque[int] = deque()  # groups for a host
        # completions of each group that have not ended
        self.left = np.full(len(self.lengths), case.group_size)
        self.published: list[float] = []  # when each version was
        self.begins = np.zeros(self.lengths.shape)
        self.asked = 0  # steps
        if case.mode == "newest":
            self.lookahead = pinned(Lookahead(case.schedule))
        else:
            self.lookahead = Lookahead(case.schedule)
        self.updating = False
        self.trace = Trace()

    def run(self) -> Trace:
        self.publish()
        while self.events:
            self.now, _, act = heapq.heappop(self.events)
            act()
        self.trace.staleness = [self.staleness_of(step) for step in range(self.steps)]
        return self.trace

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), act))

    # -- the trainer

    def publish(self) -> None:
        self.published.append(self.now)
        self.updating = False
        version = len(self.published) - 1
        if version:
            begin, end = self.trace.updates[-1]
            self.lookahead.note(begin - self.published[-2], end - self.published[-2])
        while (
            self.asked < min(self.steps, version + self.lookahead.steps + 1)
            and self.version_of(self.asked) <= version
        ):
            first = self.asked * self.case.prompts
            self.waiting.extend(range(first, first + self.case.prompts))
            self.asked += 1
        self.assign()
        self.learn()

    def version_of(self, step: int) -> int:
        """That a step samples from, or the oldest that it may start on."""
        return self.case.schedule.version(step)

    def learn(self) -> None:
        step = len(self.trace.updates)
        if self.updating or step >= self.asked or self.left[self.groups_of(step)].any():
            return
        self.updating = True
        self.trace.updates.append((self.now, self.now + self.update_seconds))
        self.after(self.update_seconds, self.publish)

    def groups_of(self, step: int) -> slice:
        return slice(step * self.case.prompts, (step + 1) * self.case.prompts)

    # -- the hosts

    def assign(self) -> None:
        """Gives groups to hosts, which are alike, the oldest first, each to the one with the most
        room."""
        while self.waiting:
            room = [
                self.case.capacity - host.given if self.case.capacity else 1 for host in self.hosts
            ]
            host = self.hosts[room.index(max(room))]
            if max(room) <= 0:
                break
            host.given += self.case.group_size
            host.queue.append(self.waiting.popleft())
        for host in self.hosts:
            self.feed(host)

    def feed(self, host: SimulatedHost) -> None:
        while host.queue:
            version = self.version_of(host.queue[0] // self.case.prompts)
            if self.case.mode == "fixed" and version != host.version:
                if not host.is_idle(self.case.places_per_host):
                    break
                host.version = version
            group = host.queue.popleft()
            host.waiting.extend((group, index) for index in range(self.case.group_size))
        while host.free and host.waiting:
            self.start(host, host.waiting.popleft())

    def start(self, host: SimulatedHost, completion: tuple[int, int]) -> None:
        host.free -= 1
        self.begins[completion] = self.now
        self.after(
            self.lengths[completion] * self.token_seconds, lambda: self.end(host, completion)
        )

    def end(self, host: SimulatedHost, completion: tuple[int, int]) -> None:
        host.free += 1
        self.trace.sampled.append((self.begins[completion], self.now))
        self.left[completion[0]] -= 1
        if not self.left[completion[0]]:
            host.given -= self.case.group_size
            self.assign()
            self.learn()
        else:
            self.feed(host)

    def staleness_of(self, step: int) -> np.ndarray:
        """By token: the step minus the version that it was sampled from."""
        if self.case.mode == "fixed":
            return np.full(
                int(self.lengths[self.groups_of(step)].sum()), step - self.version_of(step)
            )
        begins = self.begins[self.groups_of(step)].ravel()
        lengths = self.lengths[self.groups_of(step)].ravel()
        times = np.concatenate(
            [
                begin + self.token_seconds * np.arange(count)
                for begin, count in zip(begins, lengths, strict=True)
            ]
        )
        return step + 1 - np.searchsorted(self.published, times, side="right")


def sampling_seconds(case: Case, lengths: np.ndarray, token_seconds: float) -> float:
    """What a step's completions take when nothing else is sampled, in the mean over steps."""
    alone = replace(case, mode="fixed", k=0)
    trace = Simulation(alone, lengths, 0.0, token_seconds).run()
    return trace.updates[-1][0] / len(lengths)


def simulate(case: Case, lengths: np.ndarray, token_seconds: float) -> Figures:
    seconds = case.update * sampling_seconds(case, lengths, token_seconds)
    return figures(Simulation(case, lengths, seconds, token_seconds).run(), case)
