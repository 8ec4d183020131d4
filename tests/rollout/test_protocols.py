"""Each protocol has an implementation, each member of it is used, and no more than its members are
needed.

The assignments under TYPE_CHECKING are checked by pyright, the signatures and the uses here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from small import PLAINEST, random_parameters, roles

from shoal import findings, protocols
from shoal.config.choices import ADVANTAGES, POLICY_LOSSES
from shoal.config.sections.reward import RewardSection
from shoal.job import job as job_module
from shoal.job import training as job_training
from shoal.job.teacher_server import TeacherServer
from shoal.model.transformer import Model
from shoal.protocols import GroupRequest
from shoal.records import (
    Completion,
    Example,
    NoiseKey,
    Purpose,
    RewardFunction,
    SamplingParams,
    StopReason,
)
from shoal.report.console import Console
from shoal.rewards.pool import RewardPool
from shoal.rollout import fleet, host_health
from shoal.rollout.fleet import Fleet
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.rollout.ledger import GroupRewards
from shoal.rollout.multi_process import MultiProcessSource
from shoal.rollout.ray_host import RayHost
from shoal.runs import mirror
from shoal.sampler.engine import Engine
from shoal.tasks.task import Task
from shoal.trainer import evaluation, loop, update
from shoal.trainer.scorers import ModelScorer, ParameterScorer
from shoal.weights import source
from shoal.weights.folder_store import FolderVersion
from shoal.weights.ray_store import RayVersion
from shoal.weights.store import FileVersion, MemoryStore, MemoryVersion, StoredVersion


class Elsewhere:
    """A `Host` written from the protocol alone: each token of a completion is its index."""

    def __init__(self) -> None:
        self.weights, self.queued = {}, []

    def handle(self, message: protocols.Message) -> None:
        match message:
            case protocols.Load(version):
                self.weights[version.version] = version
            case protocols.Submit(requests):
                self.queued.extend(requests)
            case _:
                raise AssertionError(f"completions of one turn get no {message}")

    def poll(self) -> dict[int, list[Completion]]:
        request = self.queued.pop()  # the last first: the fleet puts groups in order
        version = self.weights[request.version]
        assert version.exists and version.read(Model(PLAINEST, roles().sampler)).result()()
        size = request.params.max_tokens
        return {
            request.id: [
                Completion(
                    request.id,
                    index,
                    np.full(size, index, np.int32),
                    np.zeros(size, np.float32),
                    np.ones(size, bool),
                    np.full(size, request.version, np.int32),
                    StopReason.LENGTH,
                )
                for index in range(request.num_completions)
            ]
        }

    def progress(self) -> protocols.HostProgress:
        return protocols.HostProgress()

    def close(self) -> None:
        self.weights.clear()


if TYPE_CHECKING:
    from typing import cast

    HOSTS: tuple[protocols.Host, protocols.Host, protocols.Host, protocols.Host] = cast(
        tuple[EngineHost, ThreadHost, RayHost, Elsewhere], None
    )
    VERSIONS: tuple[
        protocols.Version,
        protocols.Version,
        protocols.Version,
        protocols.Version,
        protocols.Version,
    ] = cast(tuple[MemoryVersion, FileVersion, RayVersion, FolderVersion, RecordingVersion], None)
    SOURCES: tuple[protocols.RolloutSource, protocols.RolloutSource] = cast(
        tuple[Fleet, MultiProcessSource], None
    )
    SCORERS: tuple[protocols.Scorer, protocols.Scorer] = cast(
        tuple[ParameterScorer, ModelScorer], None
    )

PAIRS = [
    (protocols.Host, EngineHost),
    (protocols.Host, ThreadHost),
    (protocols.Host, RayHost),
    (protocols.Version, MemoryVersion),
    (protocols.Version, StoredVersion),
    (protocols.Version, FolderVersion),
    (protocols.RolloutSource, Fleet),
    (protocols.RolloutSource, MultiProcessSource),
    (protocols.Scorer, ParameterScorer),
    (protocols.Scorer, ModelScorer),
    (protocols.SequenceScorer, TeacherServer),
    (protocols.Printer, Console),
]


def members_of(protocol: type) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}


def parameters(function: Callable) -> list[tuple[str, object]]:
    """Names in order, with their defaults."""
    result = []
    for p in inspect.signature(function).parameters.values():
        result.append((p.name, p.default))
    return result


@pytest.mark.parametrize(("protocol", "implementation"), [*PAIRS, (protocols.Host, Elsewhere)])
def test_an_implementation_has_the_members_of_its_protocol(protocol, implementation):
    assert members_of(protocol)
    fields = {
        name for one in implementation.__mro__ for name in vars(one).get("__annotations__", ())
    }
    for name in members_of(protocol):
        if isinstance(getattr(protocol, name), property) and name in fields:
            continue
        ours, theirs = getattr(implementation, name), getattr(protocol, name)
        assert isinstance(ours, property) == isinstance(theirs, property), name
        if callable(theirs):
            assert parameters(ours) == parameters(theirs), name


@pytest.mark.parametrize(
    ("protocol", "name", "users"),
    [
        (protocols.Host, "host", (fleet, host_health)),
        (
            protocols.RolloutSource,
            "source",
            (loop, evaluation, job_module, job_training),
        ),
        (protocols.Scorer, r"(?:reference|teacher|scorer)", (update,)),
        (protocols.Printer, "console", (findings, mirror, source)),
    ],
)
def test_every_member_of_a_protocol_is_used(protocol, name, users):
    text = "".join(map(inspect.getsource, users))
    used = set(re.findall(rf"\b{name}\.(\w+)", text))
    if "closing(source)" in text:
        used.add("close")
    assert members_of(protocol) <= used


class RecordingVersion:
    """A `Version` of given weights that notes which of its members are used."""

    def __init__(self, version: int, params: Any) -> None:
        self._version, self._params = version, params
        self.used: list[str] = []

    @property
    def version(self) -> int:
        self.used.append("version")
        return self._version

    @property
    def exists(self) -> bool:
        self.used.append("exists")
        return True

    def read(self, model: Any, frozen: Any = None) -> Future[Callable[[], Any]]:
        self.used.append("read")
        reading: Future[Callable[[], Any]] = Future()
        reading.set_result(lambda: self._params)
        return reading

    def parameters(self, model: Any) -> Any:
        self.used.append("parameters")
        return self._params

    def remove(self) -> None:
        self.used.append("remove")


class RecordingStore(MemoryStore):
    """Keeps all versions that were written, also those that were dropped."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.written: list[RecordingVersion] = []

    def write(self, version: int, params: Any) -> protocols.Version:
        self.written.append(RecordingVersion(version, params))
        return self.written[-1]


def test_a_host_reads_a_version_once_when_a_request_needs_it():
    """With the fleet, which drops versions, it uses every member of the protocol."""
    model = Model(PLAINEST, roles().sampler)
    engine = Engine(
        model,
        slots=2,
        group_size=2,
        max_prompt_tokens=4,
        max_completion_tokens=4,
        eos_ids=(),
    )
    unneeded = RecordingVersion(0, random_parameters(PLAINEST))
    needed = RecordingVersion(1, random_parameters(PLAINEST))
    host = EngineHost(lambda purpose, size: engine)
    host.handle(protocols.Load(unneeded))
    host.handle(protocols.Load(needed))
    assert needed.used.count("read") == 0
    request = protocols.SampleRequest(
        0, np.array([1, 2]), 2, NoiseKey(0, "t", 0, 0), SamplingParams(max_tokens=4), version=1
    )
    host.handle(protocols.Submit([request]))
    while not host.idle:
        host.poll()
    assert engine.version == 1 and needed.used.count("read") == 1
    assert set(unneeded.used) == {"version", "exists"}

    store = RecordingStore(model)
    with closing(Fleet(store, {"far": Elsewhere()}, group_rewards(), seed=0)) as source:
        source.publish(0, random_parameters(PLAINEST))
        source.published()
        source.publish(1, random_parameters(PLAINEST))
    assert [version.used.count("remove") for version in store.written] == [1, 1]
    of_the_fleet = set(store.written[0].used)
    assert of_the_fleet | set(needed.used) | set(unneeded.used) == members_of(protocols.Version)


def group_rewards() -> GroupRewards:
    """The reward of a completion is the sum of its tokens."""
    task = Task(
        "t",
        (),
        {},
        (RewardFunction("sum", lambda completions, **_: [float(text) for text in completions]),),
    )
    pool = RewardPool(task.rewards, RewardSection(workers=0))
    return GroupRewards(task, pool, lambda ids: str(sum(ids)))


def test_a_host_needs_no_more_than_the_protocol():
    """Groups, their order, versions, rewards and figures come from a host that knows the protocol
    alone."""
    shown: list[tuple[str, int, int]] = []
    model, elsewhere = Model(PLAINEST, roles().sampler), Elsewhere()

    def on_progress(*now):
        return shown.append(now)

    source = Fleet(
        MemoryStore(model),
        {"far": elsewhere},
        group_rewards(),
        seed=0,
        on_progress=on_progress,
    )
    with closing(source):
        source.publish(7, random_parameters(PLAINEST))
        requests = {}
        for purpose, count in ((Purpose.TRAIN, 4), (Purpose.EVALUATE, 1)):
            requests[purpose] = [
                GroupRequest(
                    purpose,
                    7,
                    7,
                    Example(row, "q"),
                    np.array([1, 2]),
                    count,
                    SamplingParams(max_tokens=3),
                )
                for row in (5, 2)
            ]
        for queued in requests.values():
            source.request(queued)
        groups = source.take(Purpose.TRAIN, 7)
        assert [group.example.row for group in groups] == [5, 2]
        for group in groups:
            assert group.rewards.tolist() == [0.0, 3.0, 6.0, 9.0]
            for one in group.completions:
                assert (one.versions == 7).all()
        assert not shown and len(source.take(Purpose.EVALUATE, 7)) == 2
        assert shown == [("train, sampled", 1, 2), ("train, sampled", 2, 2)]
        tokens = []
        for purpose in (*requests, *requests):
            tokens.append(source.read_stats(purpose).tokens)
        assert tokens == [2 * 4 * 3, 2 * 3, 0, 0]
        # a further round of dynamic sampling, of the same weights
        source.request(requests[Purpose.TRAIN])
        source.take(Purpose.TRAIN, 7)
    assert not elsewhere.weights


def test_every_protocol_has_an_implementation():
    classes = []
    for value in vars(protocols).values():
        if inspect.isclass(value):
            classes.append(value)
    names = {one.__name__ for one in classes if getattr(one, "_is_protocol", False)} - {"Protocol"}
    assert names == {protocol.__name__ for protocol, _ in PAIRS}


@pytest.mark.parametrize("functions", [POLICY_LOSSES, ADVANTAGES])
def test_the_functions_of_a_registry_share_their_first_parameters(functions):
    """Losses have one signature; advantages share two arrays and take settings by name. Those of a
    critic have no function of groups."""
    first = []
    for part in functions.values():
        if part.function:
            first.append([name for name, _ in parameters(part.load())])
    if functions is POLICY_LOSSES:
        for names in first:
            assert names[:5] == first[0][:5]
    assert {tuple(names[:2]) for names in first} == {tuple(first[0][:2])}
