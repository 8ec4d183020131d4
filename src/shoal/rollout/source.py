"""Sampling in the trainer's own process: a `RolloutSource` over engines on the same devices.

    request -> pending (by version) -> load -> Engine of the group's size -> completions -> RewardPool -> take
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from shoal.mesh import Role
from shoal.model.transformer import Model, checksum, is_param_spec, param_specs, shardings
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Failure, Scores
from shoal.rollout.group import make_group, sample_request
from shoal.sampler.engine import Engine
from shoal.tasks.task import Task
from shoal.types import Completion, Group, GroupRequest, Params, Purpose, StopSignal


@dataclass
class SamplingClock:
    """Seconds and tokens since last asked. Rewards are judged while sampling goes on: their seconds are those that
    remain to be waited for."""

    sample_seconds: float = 0.0
    reward_seconds: float = 0.0
    tokens: int = 0
    logged: dict[str, list[float]] = field(default_factory=dict)  # what rewards logged with log_metric
    failures: list[Failure] = field(default_factory=list)  # of reward functions


@dataclass
class LocalSource:
    """Serves groups from engines in this process, drained at every `take`.

    One engine for each group size (evaluation's greedy answers are groups of one); the one that is not in use keeps
    its compiled programs and gives its caches back.
    """

    model: Model
    make_engine: Callable[[int], Engine]
    task: Task
    judge: RewardPool
    decode: Callable[[Sequence[int]], str]
    seed: int
    clock: SamplingClock = field(default_factory=SamplingClock)
    engines: dict[int, Engine] = field(default_factory=dict)
    pending: list[GroupRequest] = field(default_factory=list)
    versions: dict[int, Params] = field(default_factory=dict)
    next_id: int = 0
    keep_from: int = 0  # the oldest version that may yet be asked for
    answered: Callable[[str, int, int], None] | None = None  # told of an evaluation's part: groups done, of how many
    stop: StopSignal = field(default_factory=StopSignal)

    def request(self, requests: Sequence[GroupRequest]) -> None:
        self.pending.extend(requests)

    def cancel(self, purpose: Purpose, step: int) -> None:
        self.pending = [request for request in self.pending if (request.purpose, request.step) != (purpose, step)]

    def publish(self, version: int, params: Params, subset: Sequence[str] | None = None,
                keep_from: int | None = None) -> None:
        """One device and one type: the very same arrays. Else a copy laid out for sampling, with an equal checksum."""
        self.keep_from = version if keep_from is None else keep_from
        self._forget()
        self.versions[version] = publish_to(self.model, params)

    def _forget(self) -> None:
        """Lets go of weights that no pending request names and none that may come."""
        needed = {request.version for request in self.pending}
        self.versions = {version: params for version, params in self.versions.items()
                         if version in needed or version >= self.keep_from}

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        wanted = [request for request in self.pending if request.purpose == purpose and request.step == step]
        if not wanted:
            raise ValueError(f"nothing was asked for {purpose} at step {step}")
        order = {id(request): number for number, request in enumerate(wanted)}
        groups: dict[int, Group] = {}
        batches: dict[tuple[int, str, int], list[GroupRequest]] = defaultdict(list)
        for request in wanted:
            batches[request.version, request.subset, request.num_completions].append(request)
        for (version, _, size), requests in sorted(batches.items(), key=lambda item: item[0][0]):
            for request, group in zip(requests, self._play(requests, version, size), strict=True):
                groups[order[id(request)]] = group
        self.pending = [request for request in self.pending if id(request) not in order]
        self._forget()
        return [groups[number] for number in range(len(wanted))]

    def _play(self, requests: Sequence[GroupRequest], version: int, size: int) -> list[Group]:
        if version not in self.versions:
            raise RuntimeError(f"version {version} was asked for, published and kept are {sorted(self.versions)}")
        started = time.perf_counter()
        engine = self.engines.get(size) or self.engines.setdefault(size, self.make_engine(size))
        engine.load(version, self.versions[version])
        asked = dict(zip(range(self.next_id, self.next_id + len(requests)), requests, strict=True))
        self.next_id += len(requests)
        engine.submit([sample_request(request, id, self.seed) for id, request in asked.items()])
        drawn: dict[int, list[Completion]] = {}
        texts: dict[int, list[str]] = {}
        scores: dict[Hashable, Scores] = {}
        for id, siblings in finished(engine, self.stop):
            drawn[id], texts[id] = siblings, [self.decode(one.token_ids.tolist()) for one in siblings]
            if not self.judge.by_step:
                self._submit(id, [asked[id]], [siblings], [texts[id]])
            scores |= self.judge.collect()
            if self.answered and requests[0].purpose is Purpose.EVALUATE:
                kind = "greedy" if requests[0].params.temperature == 0 else "sampled"
                self.answered(f"{requests[0].subset}, {kind}", len(drawn), len(requests))
        engine.release_memory()
        sampled = time.perf_counter()
        if self.judge.by_step:
            self._submit("step", requests, [drawn[id] for id in asked], [texts[id] for id in asked])
        tickets = ["step"] if self.judge.by_step else list(asked)
        while not scores.keys() >= set(tickets):
            with self.stop.raising_at_once():
                scores |= self.judge.collect(wait=True)
        self.clock.sample_seconds += sampled - started
        self.clock.reward_seconds += time.perf_counter() - sampled
        self.clock.tokens += sum(len(completion) for siblings in drawn.values() for completion in siblings)
        groups = []
        for place, (id, request) in enumerate(asked.items()):
            own, number = (scores["step"], place) if self.judge.by_step else (scores[id], 0)
            groups.append(make_group(self.task, request, drawn[id], texts[id], own, number))
        for ticket in tickets:
            self._count(scores[ticket])
        return groups

    def _submit(self, ticket: Hashable, requests: Sequence[GroupRequest], siblings: Sequence[Sequence[Completion]],
                texts: Sequence[Sequence[str]]) -> None:
        token_ids = [[completion.token_ids.tolist() for completion in group] for group in siblings]
        with self.stop.raising_at_once():  # functions that are called in this process may hang
            self.judge.submit(ticket, [request.example for request in requests], texts, token_ids, requests[0].step)

    def _count(self, scores: Scores) -> None:
        self.clock.failures.extend(scores.failures)
        for name, values in scores.metrics.items():
            self.clock.logged.setdefault(name, []).extend(values)

    def shapes(self) -> Params:
        """Of the weights that are published here."""
        return published_shapes(self.model)

    def read_clock(self) -> SamplingClock:
        """Seconds and tokens since the last call."""
        clock, self.clock = self.clock, SamplingClock()
        return clock

    def state(self) -> dict[str, Any]:
        """Addresses of what is pending (training only: an evaluation is taken as soon as it is asked for), and the
        weights that are still sampled from."""
        return {"pending": self._addresses(), "published": dict(self.versions)}

    def restore(self, state: dict[str, Any]) -> None:
        """What was pending must have been asked for again: the same addresses."""
        if self._addresses() != [tuple(address) for address in state["pending"]]:
            raise RuntimeError(f"pending were {state['pending']}, asked for again are {self._addresses()}")

    def _addresses(self) -> list[tuple[str, int, int, str, int, int]]:
        return [(r.purpose.value, r.step, r.version, r.subset, r.example.row, r.num_completions) for r in self.pending
                if r.purpose is Purpose.TRAIN]

    def close(self) -> None:
        self.engines.clear()
        self.versions.clear()
        self.judge.close()


def drive(engine: Engine) -> dict[tuple[int, int], Completion]:
    """Runs an engine until nothing is left, by (request, index)."""
    return {(id, completion.index): completion for id, siblings in finished(engine) for completion in siblings}


def finished(engine: Engine, stop: StopSignal | None = None) -> Iterator[tuple[int, list[Completion]]]:
    """Runs an engine until nothing is left: each request with its completions, in order of their index, as it ends.

    While the caller looks at one, the next piece of device work is under way. `stop` is checked between the pieces."""
    while not engine.idle:
        if stop is not None:
            stop.check()
        started = _start(engine)
        if not started and not engine.in_flight and not engine.finished:
            raise RuntimeError(f"the sampler waits for nothing: {engine.scheduler}")
        done: dict[int, list[Completion]] = {}
        for completion in engine.collect():
            done.setdefault(completion.request_id, []).append(completion)
        _start(engine)
        yield from done.items()


def _start(engine: Engine) -> bool:
    """Starts what can be started; whether anything could."""
    started = engine.step()
    while engine.step():
        pass
    return started


@partial(jax.jit, static_argnames="dtype")
def _cast(params: Params, dtype: Any) -> Params:
    return jax.tree.map(lambda x: x.astype(dtype), params)


def published_shapes(model: Model) -> Params:
    """Shapes, type and layout of what `publish_to` returns."""
    return jax.tree.map(
        lambda d, place: jax.ShapeDtypeStruct(d.shape, model.dtype, sharding=place),
        param_specs(model.architecture), shardings(model.architecture, model.role), is_leaf=is_param_spec)


def publish_to(model: Model, params: Params) -> Params:
    """The sampler's parameters: the same arrays where layout and type allow, else a checked copy."""
    role: Role = model.role
    if role.mesh.size == 1 and all(leaf.dtype == model.dtype for leaf in jax.tree.leaves(params)):
        return params
    cast = _cast(params, model.dtype)
    if role.mesh.size == 1:
        return cast
    copy = jax.device_put(cast, shardings(model.architecture, role))
    sums = int(checksum(cast)), int(checksum(copy))
    if sums[0] != sums[1]:
        raise RuntimeError(f"the sampler's weights differ from the trainer's: checksums {sums[1]:#x}, {sums[0]:#x}")
    return copy
