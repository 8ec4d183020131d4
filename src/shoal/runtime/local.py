"""Sampling in the trainer's own process: a `RolloutSource` over engines on the same devices.

    request -> pending (by version) -> load -> Engine of the group's size -> completions -> rewards -> take
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from shoal.mesh import Role
from shoal.model.transformer import Model, checksum, shardings
from shoal.rollout import Decode, make_groups, sample_request
from shoal.sampler.engine import Engine
from shoal.task.task import Task
from shoal.types import Completion, Group, GroupRequest, Params, Purpose


@dataclass
class SamplingClock:
    """Seconds and tokens since last asked."""

    sample_seconds: float = 0.0
    reward_seconds: float = 0.0
    tokens: int = 0
    logged: dict[str, list[float]] = field(default_factory=dict)  # what rewards logged with log_metric


@dataclass
class LocalSource:
    """Serves groups from engines in this process, drained at every `take`.

    One engine for each group size (evaluation's greedy answers are groups of one); the one that is not in use keeps
    its compiled programs and gives its caches back.
    """

    model: Model
    make_engine: Callable[[int], Engine]
    task: Task
    decode: Decode
    seed: int
    max_steps: int
    clock: SamplingClock = field(default_factory=SamplingClock)
    engines: dict[int, Engine] = field(default_factory=dict)
    pending: list[GroupRequest] = field(default_factory=list)
    versions: dict[int, Params] = field(default_factory=dict)
    next_id: int = 0

    def request(self, requests: Sequence[GroupRequest]) -> None:
        self.pending.extend(requests)

    def publish(self, version: int, params: Params, subset: Sequence[str] | None = None) -> None:
        """One device and one type: the very same arrays. Else a copy laid out for sampling, with an equal checksum."""
        self._forget(version)
        self.versions[version] = publish_to(self.model, params)

    def _forget(self, newest: int) -> None:
        """Lets go of weights that no pending request names; the newest stay, requests for them may come."""
        needed = {request.version for request in self.pending} | {newest}
        self.versions = {version: params for version, params in self.versions.items() if version in needed}

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        wanted = [request for request in self.pending if request.purpose == purpose and request.step == step]
        if not wanted:
            raise ValueError(f"nothing was asked for {purpose} at step {step}")
        self.pending = [request for request in self.pending
                        if not (request.purpose == purpose and request.step == step)]
        order = {id(request): number for number, request in enumerate(wanted)}
        groups: dict[int, Group] = {}
        batches: dict[tuple[int, str, int], list[GroupRequest]] = defaultdict(list)
        for request in wanted:
            batches[request.version, request.subset, request.num_completions].append(request)
        for (version, _, size), requests in sorted(batches.items(), key=lambda item: item[0][0]):
            for request, group in zip(requests, self._play(requests, version, size), strict=True):
                groups[order[id(request)]] = group
        self._forget(max(self.versions))
        return [groups[number] for number in range(len(wanted))]

    def _play(self, requests: Sequence[GroupRequest], version: int, size: int) -> list[Group]:
        if version not in self.versions:
            raise RuntimeError(f"version {version} was asked for, published and kept are {sorted(self.versions)}")
        started = time.perf_counter()
        engine = self.engines.get(size) or self.engines.setdefault(size, self.make_engine(size))
        engine.load(version, self.versions[version])
        ids = range(self.next_id, self.next_id + len(requests))
        self.next_id += len(requests)
        engine.submit([sample_request(request, id, self.seed) for id, request in zip(ids, requests, strict=True)])
        completions = drive(engine)
        engine.park()
        sampled = time.perf_counter()
        siblings = [[completions[id, index] for index in range(size)] for id in ids]
        groups, logged = make_groups(self.task, requests, siblings, self.decode, self.max_steps)
        for name, value in logged.items():
            self.clock.logged.setdefault(name, []).append(value)
        self.clock.sample_seconds += sampled - started
        self.clock.reward_seconds += time.perf_counter() - sampled
        self.clock.tokens += sum(len(completion) for completion in completions.values())
        return groups

    def read_clock(self) -> SamplingClock:
        """Seconds and tokens since the last call."""
        clock, self.clock = self.clock, SamplingClock()
        return clock

    def state(self) -> dict[str, Any]:
        """Addresses of what is pending; at staleness 0 and between steps, nothing."""
        return {"pending": [(r.purpose.value, r.step, r.version, r.subset, r.example.row, r.num_completions)
                            for r in self.pending]}

    def restore(self, state: dict[str, Any]) -> None:
        if state["pending"]:
            raise RuntimeError("groups were pending when this state was saved: ask for them again by their addresses")

    def close(self) -> None:
        self.engines.clear()
        self.versions.clear()


def drive(engine: Engine) -> dict[tuple[int, int], Completion]:
    """Runs an engine until nothing is left, by (request, index)."""
    found: dict[tuple[int, int], Completion] = {}
    while not engine.idle:
        started = engine.step()
        while engine.step():
            pass
        if not started and not engine.in_flight and not engine.finished:
            raise RuntimeError(f"the sampler waits for nothing: {engine.scheduler}")
        found |= {(completion.request_id, completion.index): completion for completion in engine.collect()}
    return found


@partial(jax.jit, static_argnames="dtype")
def _cast(params: Params, dtype: Any) -> Params:
    return jax.tree.map(lambda x: x.astype(dtype), params)


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
