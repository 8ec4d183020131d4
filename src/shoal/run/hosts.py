"""The hosts of a run or a command: which engines sample where."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config.schema import Config, PublishSection
from shoal.files import check_local
from shoal.mesh import Roles
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformer import Model
from shoal.report.console import Console
from shoal.rollout.fleet import Fleet
from shoal.rollout.group import GroupRewards
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.rollout.publication import num_bytes
from shoal.rollout.publisher import KEY, FilePublisher, MemoryPublisher, Publisher, default_folder
from shoal.run.engines import QUEUED, training_engine_maker, training_places
from shoal.run.workers import ray_fleet
from shoal.sampler.engine import Engine
from shoal.types import Purpose, StopSignal

if TYPE_CHECKING:
    from shoal.rollout.cluster import Cluster

HERE = "here"
"""The host in the caller's thread."""


def local_fleet(publisher: Publisher, make_engine: Callable[[Purpose, int], Engine], rewards: GroupRewards, seed: int,
                on_progress: Callable[[str, int, int], None] | None = None, stop: StopSignal | None = None) -> Fleet:
    """One host, in the caller's thread."""
    return Fleet(publisher, {HERE: EngineHost(make_engine)}, rewards, seed, stop=stop or StopSignal(),
                 on_progress=on_progress)


def training_fleet(config: Config, model: Model, roles: Roles, tokenizer: Tokenizer, rewards: GroupRewards,
                   stop: StopSignal, console: Console, cluster: Cluster | None = None) -> Fleet:
    """The hosts of a training run: workers of a Ray cluster; or in this process one in the caller's thread; or, on
    devices of their own, one in a thread of its own for each replica."""
    publisher = make_publisher(config.publish, model.on(roles.sampler), cluster, roles.hosts != [roles.sampler])
    if cluster is not None:
        return ray_fleet(config, publisher, tokenizer, rewards, stop, console.answered, cluster)
    if not roles.disaggregated:
        make = training_engine_maker(config, model, roles, tokenizer)
        return local_fleet(publisher, make, rewards, config.seed, console.answered, stop)
    slots, woken = training_places(config, roles, model.architecture).slots, threading.Event()
    hosts = {f"sampler {number}": EngineHost(training_engine_maker(config, model, roles, tokenizer, host=number),
                                             capacity=QUEUED * slots, shares_memory=False)
             for number in range(len(roles.hosts))}
    threads = {name: ThreadHost(host, woken.set, name) for name, host in hosts.items()}
    return Fleet(publisher, threads, rewards, config.seed, by_itself=True, on_note=console.warning, stop=stop,
                 on_progress=console.answered, woken=woken)


def make_publisher(section: PublishSection, model: Model, cluster: Cluster | None, in_parts: bool) -> Publisher:
    """How hosts get the weights: as arrays, in this process; else as files, or, where a cluster may span machines that
    share no folder, as Ray's objects."""
    folder = check_local(section.folder, KEY)
    if cluster is None and section.channel != "files":
        return MemoryPublisher(model, in_parts)
    if cluster is not None and section.channel != "files" and (
            section.channel == "ray" or (not section.folder and cluster.may_span_machines)):
        from shoal.rollout.cluster import ObjectPublisher

        return ObjectPublisher(model)
    publisher = FilePublisher(folder if folder != Path() else default_folder(num_bytes(model)), model)
    if cluster is not None and cluster.connection.watcher is not None:
        cluster.connection.watcher.remove(publisher.folder)
    return publisher
