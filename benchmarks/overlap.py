"""How much do sampling and training at once gain, by simulation and with the real fleet and loop over sleeping parts?

    python benchmarks/overlap.py [--cases targets|all|none] [--table] [--steps 30] [--token-ms 10] [--seed 0]

A step learns from P x G completions. One place samples one of them at a time, a token each `--token-ms`. Lengths are
constant, or lognormal with a given sigma. An update takes a share of the synchronous sampling time: what a step's
completions take when nothing else is sampled, in the mean. Nothing else takes time in the simulation.

    fixed k     step t samples from version t - k; a host samples all of a version before it loads the next
    newest k    step t is asked for k steps ahead, starts on the newest weights, and goes on through new ones
    auto k      the same, asked for 1 to k steps ahead, as few as keep the trainer from waiting

`--table` prints the simulation alone. Each case of `--cases` is simulated, and run with `rollout/fleet.py`,
`rollout/host.py` and `trainer/loop.py` as they are over engines and updates that sleep (benchmarks/fakes.py), with the
same lengths; `run/sim` is the run's seconds a step over those predicted. The first steps, in which the pipeline fills,
and the last are left out of all figures.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
        return f"{lengths}, update {self.update:g}, {self.hosts} host{'s' * (self.hosts > 1)}, places {places:.2g}"

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.k, newest=self.mode != "fixed", ahead=self.k if self.mode == "newest" else 0)

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


@dataclass
class Trace:
    """What happened: moments of one clock, in seconds."""

    updates: list[tuple[float, float]] = field(default_factory=list)  # begin and end, by step
    sampled: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each completion
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
    return Figures((end - begin) / steps, max(0.0, 1 - learning / (end - begin)),
                   max(0.0, 1 - sampling / (end - begin) / case.places_per_host / case.hosts),
                   float(tokens.mean()), int(tokens.max()), trace.cpu_seconds / len(starts))


# ---- the simulation


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
    """Events in the order of their time: a completion ends, an update ends. Groups are numbered in the order asked."""

    def __init__(self, case: Case, lengths: np.ndarray, update_seconds: float, token_seconds: float) -> None:
        self.case, self.update_seconds, self.token_seconds = case, update_seconds, token_seconds
        self.steps = len(lengths)
        self.lengths = lengths.reshape(-1, case.group_size)
        self.hosts = [SimulatedHost(case.places_per_host) for _ in range(case.hosts)]
        self.now, self.order = 0.0, itertools.count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.waiting: deque[int] = deque()  # groups for a host
        self.left = np.full(len(self.lengths), case.group_size)  # completions of each group that have not ended
        self.published: list[float] = []  # when each version was
        self.begins = np.zeros(self.lengths.shape)
        self.asked = 0  # steps
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
        while self.asked < min(self.steps, version + self.lookahead.steps + 1) \
                and self.version_of(self.asked) <= version:
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
        """Gives groups to hosts, the oldest first, each to the one with the most room."""
        while self.waiting:
            room = [self.case.capacity - host.given if self.case.capacity else 1 for host in self.hosts]
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
        self.after(self.lengths[completion] * self.token_seconds, lambda: self.end(host, completion))

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
            return np.full(int(self.lengths[self.groups_of(step)].sum()), step - self.version_of(step))
        begins, lengths = self.begins[self.groups_of(step)].ravel(), self.lengths[self.groups_of(step)].ravel()
        times = np.concatenate([begin + self.token_seconds * np.arange(count)
                                for begin, count in zip(begins, lengths, strict=True)])
        return step + 1 - np.searchsorted(self.published, times, side="right")


def sampling_seconds(case: Case, lengths: np.ndarray, token_seconds: float) -> float:
    """What a step's completions take when nothing else is sampled, in the mean over steps."""
    alone = replace(case, mode="fixed", k=0)
    trace = Simulation(alone, lengths, 0.0, token_seconds).run()
    return trace.updates[-1][0] / len(lengths)


def simulate(case: Case, lengths: np.ndarray, token_seconds: float) -> Figures:
    seconds = case.update * sampling_seconds(case, lengths, token_seconds)
    return figures(Simulation(case, lengths, seconds, token_seconds).run(), case)


# ---- what is printed

MODES = [("fixed", 0), ("fixed", 1), ("fixed", 2), ("fixed", 4), ("newest", 1), ("newest", 2), ("newest", 4),
         ("auto", 4)]


def modes(case: Case, wanted: Iterable[tuple[str, int]] = MODES) -> list[Case]:
    return [replace(case, mode=mode, k=k) for mode, k in wanted]


LONG = Case(sigma=1, most=16, update=0.6)
TABLE = [Case(), LONG, replace(LONG, update=0.2), replace(LONG, update=1.0), replace(LONG, most=4),
         replace(LONG, most=0), replace(LONG, sigma=0.5), replace(LONG, sigma=1.5), replace(LONG, prompts=64),
         replace(LONG, places=16), replace(LONG, places=32), replace(LONG, hosts=4, capacity=64)]
"""What the simulation alone says something of; the default has as many places as a step has completions."""
ENDLESS = replace(LONG, most=0)
TARGETS = [*modes(Case(), [("fixed", 0), ("fixed", 1)]),
           *modes(LONG, [("fixed", 0), ("fixed", 1), ("newest", 1), ("newest", 2)]),
           *modes(ENDLESS, [("fixed", 0), ("newest", 1), ("newest", 2)])]
MORE = [*modes(LONG, [("fixed", 0), ("fixed", 2), ("newest", 4), ("auto", 4)]),
        *modes(replace(LONG, places=16), [("fixed", 0), ("fixed", 1), ("newest", 1), ("newest", 2)]),
        *modes(replace(LONG, hosts=4, capacity=64), [("fixed", 0), ("fixed", 1), ("newest", 2)])]
HEAD = "mode       speed  idle: trainer  sampler  staleness: mean  max"


def line(name: str, one: Figures, slowest: float) -> str:
    return (f"{name:<9} {slowest / one.seconds:5.2f}x {one.idle_trainer:13.0%} {one.idle_sampler:8.0%} "
            f"{one.staleness:16.2f} {one.staleness_max:4}")


def print_table(steps: int, seed: int, token_seconds: float) -> None:
    """The simulation alone, over many steps."""
    for case in TABLE:
        print(f"\n{case}, P {case.prompts}\n{HEAD}")
        lengths, slowest = case.lengths(steps, seed), 0.0
        for one in modes(case):
            found = simulate(one, lengths, token_seconds)
            slowest = slowest or found.seconds
            print(line(f"{one.mode} {one.k}", found, slowest), flush=True)


def print_capacities(steps: int, seed: int, token_seconds: float) -> None:
    """How much a host must have at once where the sampler is the bottleneck: a group counts until its longest ends."""
    print("\nidle places, newest 2, update 0.2: completions that a host has at once, over its places\n"
          "longest  hosts  places of each      1x      2x      4x      8x")
    for most, hosts, places in itertools.product((4, 16), (1, 4), (4, 8, 16)):
        case = replace(LONG, mode="newest", k=2, most=most, update=0.2, hosts=hosts, places=places)
        lengths = case.lengths(steps, seed)
        idle = [simulate(replace(case, capacity=times * places), lengths, token_seconds).idle_sampler
                for times in (1, 2, 4, 8)]
        print(f"{most:7} {hosts:6} {places:15} " + "".join(f"{share:8.0%}" for share in idle), flush=True)


def print_runs(cases: Sequence[Case], steps: int, seed: int, token_seconds: float) -> None:
    """Simulation and run of each case, one below the other; `speed` is over that of the first with the same work."""
    from fakes import run_case

    slowest: dict[str, tuple[float, float]] = {}
    ratios = []
    for case in cases:
        lengths = case.lengths(steps, seed)
        seconds = case.update * sampling_seconds(case, lengths, token_seconds)
        simulated = simulate(case, lengths, token_seconds)
        ran = figures(run_case(case, lengths, seconds, token_seconds), case)
        if str(case) not in slowest:
            print(f"\n{case}: sampling {seconds / case.update:.2f} s, update {seconds:.2f} s\n      {HEAD}  ms of CPU")
        base = slowest.setdefault(str(case), (simulated.seconds, ran.seconds))
        ratios.append(ran.seconds / simulated.seconds)
        print("sim  ", line(f"{case.mode} {case.k}", simulated, base[0]))
        print("run  ", line(f"{case.mode} {case.k}", ran, base[1]), f" {1e3 * ran.cpu_seconds:9.0f}  "
              f"run/sim {ratios[-1]:.3f}", flush=True)
    if ratios:
        print(f"\nrun/sim: {min(ratios):.3f} to {max(ratios):.3f}, mean {statistics.mean(ratios):.3f}")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", choices=("targets", "all", "none"), default="targets")
    parser.add_argument("--table", action="store_true", help="the simulation alone, over 200 steps")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--token-ms", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    started = time.monotonic()
    if options.table:
        print_table(200, options.seed, options.token_ms / 1e3)
        print_capacities(100, options.seed, options.token_ms / 1e3)
    cases = {"targets": TARGETS, "all": TARGETS + MORE, "none": []}[options.cases]
    print_runs(cases, options.steps, options.seed, options.token_ms / 1e3)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
