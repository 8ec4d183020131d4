"""Hosts that die, hang, lie, and come and go, by a plan: for benchmarks/chaos.py.

Fleet -> UnrulyHost -> ThreadHost -> EngineHost -> SleepingEngine
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fakes import SleepingEngine, thread_host
from shoal.protocols import Host, HostProgress, Load, Message, SampleRequest, Version
from shoal.records import Completion, HostLost

PROMPTS, GROUP_SIZE = 4, 4
TOKEN_SECONDS = 0.002
STEP_SECONDS = 0.1
"""About what a step takes; answers are delayed by up to three."""
NAMES = ("a", "b", "c", "slow")


def length_of(request: SampleRequest, index: int) -> int:
    """Tokens of a completion, by address: long-tailed."""
    noise = np.random.default_rng(request.noise_key.key(index)).standard_normal()
    return int(np.clip(np.rint(6 * np.exp(noise)), 1, 60))


RUBBISH = ("too few", "lengths", "vocabulary", "nan", "positive", "version")


def rubbish(completions: Sequence[Completion], kind: str) -> list[Completion]:
    """An answer as a host that is out of order gives it."""
    first, *rest = completions
    match kind:
        case "too few":
            return rest
        case "lengths":
            return [replace(first, logprobs=first.logprobs[1:]), *rest]
        case "vocabulary":
            return [replace(first, token_ids=first.token_ids + 10**6), *rest]
        case "nan":
            return [replace(first, logprobs=first.logprobs * np.nan), *rest]
        case "positive":
            return [replace(first, logprobs=first.logprobs + 2), *rest]
    return [replace(first, versions=first.versions + 1000), *rest]


@dataclass
class Plan:
    """What goes wrong when: at the n-th answer of all hosts, and at publications."""

    random_: random.Random
    # number of the answer -> kill, stop or leave
    at_answer: dict[int, str] = field(default_factory=dict)
    interrupted: set[int] = field(default_factory=set)  # versions
    shares: Mapping[str, float] = field(default_factory=dict)
    answers: int = 0
    happened: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, options: argparse.Namespace, seed: int) -> Plan:
        random_, answers = random.Random(seed), options.steps * PROMPTS
        kinds = ["kill"] * options.kills + ["stop"] * options.stops + ["leave"] * options.leaves
        at = dict(zip(random_.sample(range(1, answers), len(kinds)), kinds, strict=True))
        versions = set(random_.sample(range(1, options.steps), options.interruptions))
        return cls(
            random_, at, versions, {"delay": 0.10, "lose": 0.05, "double": 0.05, "rubbish": 0.02}
        )

    def next(self) -> str:
        """What becomes of the next answer."""
        self.answers += 1
        kind = self.at_answer.pop(self.answers, "")
        at = self.random_.random()
        for name, share in self.shares.items():
            if not kind and at < share:
                kind = name
            at -= share
        self.happened[kind or "plain"] += 1
        return kind

    def interrupts(self, version: int) -> bool:
        hit = version in self.interrupted
        self.interrupted.discard(version)
        self.happened["interruption"] += hit
        return hit


@dataclass
class TornVersion:
    """Weights whose reader dies half way."""

    inner: Version
    host: UnrulyHost

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def exists(self) -> bool:
        return self.inner.exists

    def read(self, model: Any, frozen: Any = None) -> Any:
        if self.host.plan.interrupts(self.host.torn):
            self.host.dead = "killed while it read weights"
        return self.inner.read(model, frozen)

    def parameters(self, model: Any) -> Any:
        return self.inner.parameters(model)

    def remove(self) -> None:
        self.inner.remove()


class UnrulyHost:
    """A host that does to its answers what a plan says."""

    def __init__(self, name: str, inner: Host, hosts: Hosts) -> None:
        self.name, self.inner, self.hosts = name, inner, hosts
        self.plan, self.woken = hosts.plan, hosts.woken
        self.dead, self.torn = "", -1
        self.stopped: HostProgress | None = None  # what it says of itself from then on
        self.late: list[tuple[float, int, list[Completion]]] = []

    def handle(self, message: Message) -> None:
        self._check()
        if isinstance(message, Load) and message.version.version in self.plan.interrupted:
            self.torn = message.version.version
            message = Load(TornVersion(message.version, self))
        self.inner.handle(message)

    def progress(self) -> HostProgress:
        self._check()
        return self.stopped or self.inner.progress()

    def close(self) -> None:
        self.inner.close()

    def poll(self) -> dict[int, list[Completion]]:
        self._check()
        if self.stopped:
            return {}
        now = time.monotonic()
        answers = {id: one for at, id, one in self.late if at <= now}
        self.late = [one for one in self.late if one[0] > now]
        for id, completions in self.inner.poll().items():
            match self.plan.next():
                case "kill":
                    self.dead = "killed"
                    self._check()
                case "stop":
                    self.stopped = self.inner.progress()
                    return {}
                case "lose":
                    continue
                case "delay":
                    self._later(self.plan.random_.uniform(0, 3 * STEP_SECONDS), id, completions)
                    continue
                case "leave":
                    self.dead, self.hosts.away[self.name] = (
                        "it leaves",
                        time.monotonic() + 10 * STEP_SECONDS,
                    )
                    self._check()
                case "rubbish":
                    answers[id] = rubbish(completions, self.plan.random_.choice(RUBBISH))
                    continue
                case "double":
                    self._later(self.plan.random_.uniform(0, STEP_SECONDS), id, completions)
            answers[id] = completions
        return answers

    def _later(self, seconds: float, id: int, completions: list[Completion]) -> None:
        self.late.append((time.monotonic() + seconds, id, completions))
        timer = threading.Timer(seconds, self.woken.set)
        timer.daemon = True
        timer.start()

    def _check(self) -> None:
        if self.dead:
            raise HostLost(self.dead)


class Absent:
    """A host that has not started."""

    def _raise(self, *args: Any) -> Any:
        raise HostLost("it has not started")

    handle = poll = progress = _raise

    def close(self) -> None: ...


class Hosts:
    """Makes the hosts of a run, and makes them anew."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.woken = plan, threading.Event()
        self.away = {NAMES[1]: time.monotonic() + 2 * STEP_SECONDS}  # a host that joins later
        self.made: Counter[str] = Counter()

    def make(self, name: str) -> UnrulyHost:
        if time.monotonic() < self.away.get(name, 0.0):
            raise HostLost("it is away")
        self.made[name] += 1
        token_seconds = TOKEN_SECONDS * (10 if name == "slow" else 1)
        engine = SleepingEngine(PROMPTS * GROUP_SIZE // 2, length_of, token_seconds)
        inner = thread_host(name, engine, 2 * PROMPTS * GROUP_SIZE, self.woken)
        return UnrulyHost(name, inner, self)
