"""The hosts of a run or a command: which engines sample where."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal.config.schema import Config
from shoal.mesh import Roles
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformer import Model
from shoal.rollout.fleet import Fleet
from shoal.rollout.group_rewards import GroupRewards
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.rollout.publish import MemoryChannel
from shoal.run.engines import training_engine_maker, training_places
from shoal.sampler.engine import Engine
from shoal.types import Purpose, StopSignal

HERE = "here"
"""The host in the caller's thread."""
QUEUED = 4
"""Completions that a host has at once, for each of its places: a group counts until its longest has ended. With twice
the places 19 to 40% of them were idle where lengths are long-tailed and the sampler is slower than the trainer, with
four times up to 8% (benchmarks/overlap.py)."""


def local_fleet(model: Model, make_engine: Callable[[Purpose, int], Engine], rewards: GroupRewards, seed: int,
                on_progress: Callable[[str, int, int], None] | None = None, stop: StopSignal | None = None) -> Fleet:
    """One host, in the caller's thread. `model` is the sampler's, on all of its devices."""
    channel = MemoryChannel(model, {HERE: model.on(model.role.local)})
    return Fleet(channel, {HERE: EngineHost(make_engine)}, rewards, seed, stop=stop or StopSignal(),
                 on_progress=on_progress)


def training_fleet(config: Config, model: Model, roles: Roles, tokenizer: Tokenizer, rewards: GroupRewards,
                   stop: StopSignal, on_progress: Callable[[str, int, int], None]) -> Fleet:
    """The hosts of a training run in this process: one in the caller's thread, or, on devices of their own, one in a
    thread of its own for each replica."""
    own = model.on(roles.sampler)
    if not roles.disaggregated:
        make = training_engine_maker(config, model, roles, tokenizer)
        return local_fleet(own, make, rewards, config.seed, on_progress, stop)
    slots, woken = training_places(config, roles, model.architecture).slots, threading.Event()
    hosts = {f"sampler {number}": EngineHost(training_engine_maker(config, model, roles, tokenizer, host=number),
                                             capacity=QUEUED * slots, shares_memory=False)
             for number in range(len(roles.hosts))}
    channel = MemoryChannel(own, {name: model.on(role) for name, role in zip(hosts, roles.hosts, strict=True)})
    threads = {name: ThreadHost(host, woken.set, name) for name, host in hosts.items()}
    return Fleet(channel, threads, rewards, config.seed, by_itself=True, stop=stop, on_progress=on_progress,
                 woken=woken)
