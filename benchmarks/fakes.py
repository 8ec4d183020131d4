"""Parts of a run that sleep instead of computing, around the fleet, hosts and training loop as they
are.

    Run (trainer/loop.py) -> Fleet (rollout/fleet.py) -> ThreadHost
      SleepingUpdater        FakeChannel: numbers         -> EngineHost (rollout/host.py)
                                                          -> SleepingEngine

A version of the weights is its number; a token takes the time of one dispatch.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from shoal.config.merge import compose
from shoal.config.sections.reward import RewardSection
from shoal.protocols import Host, RolloutStats, SampleRequest
from shoal.records import Completion, Example, Group, Purpose, RewardFunction, StopReason
from shoal.report.watch import Watch
from shoal.rewards.pool import RewardPool
from shoal.rollout.fleet import Fleet
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.rollout.ledger import GroupRewards
from shoal.tasks.task import Task
from shoal.trainer.evaluation import Evaluator
from shoal.trainer.loop import Run
from shoal.trainer.prompts import PromptStream, TokenizedExample
from shoal.trainer.schedule import Schedule
from shoal.weights.checkpoints import Restored
from shoal.weights.store import HeldArrays, MemoryVersion, WeightStore
from simulation import Case, Trace, pinned

VOCABULARY = SimpleNamespace(architecture=SimpleNamespace(vocab_size=1000))


def weights(version: int) -> dict[str, np.ndarray]:
    """The weights of a version: its number."""
    return {"version": np.array([version])}


class FakeStore(WeightStore):
    """A store whose weights are numbers. `seconds`: of a publication."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.model: Any = VOCABULARY
        self.num_bytes = 0
        self.versions = {}

    def put_frozen(self, params: Any) -> None:
        raise AssertionError("all of these weights are trained")

    def write(self, version: int, params: Any) -> MemoryVersion:
        time.sleep(self.seconds)
        return MemoryVersion(version, HeldArrays(params, params, None))

    def published_shapes(self) -> dict[str, np.ndarray]:
        return weights(0)


# ---- a sampler that sleeps


@dataclass
class InProgress:
    """A completion that is sampled: its token numbers are those of its address and position, in any
    host."""

    request: SampleRequest
    index: int
    length: int
    began: float
    versions: list[int] = field(default_factory=list)

    def complete(self) -> Completion:
        key = self.request.noise_key.key(self.index).astype(np.int64)
        tokens = (key[0] + np.arange(self.length) * (key[1] | 1)) % 1000
        return Completion(
            self.request.id,
            self.index,
            tokens.astype(np.int32),
            np.full(self.length, -1.0, np.float32),
            np.ones(self.length, bool),
            np.array(self.versions, np.int32),
            StopReason.EOS,
        )


@dataclass
class SleepingEngine:
    """Places that sample completions of given lengths, a token each `token_seconds`; what an
    `EngineHost` calls."""

    places: int
    length_of: Callable[[SampleRequest, int], int]
    token_seconds: float
    model: Any = None
    version: int = -1
    parameters: Any = None
    counters: Counter[str] = field(default_factory=Counter)  # as those of `Engine`
    starting: bool = False
    stuck: bool = False  # none of its completions has turns
    # begin and end of each completion
    sampled: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._waiting: deque[tuple[SampleRequest, int]] = deque()
        self._in_progress: list[InProgress] = []
        self._open: dict[int, list[Completion]] = {}
        # at which the last token was sampled, by a clock that no core's noise delays
        self._time: float | None = None

    def load(self, version: int, params: Any) -> None:
        assert int(params["version"][0]) == version
        self.version, self.parameters = version, params

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            self._open[request.id] = []
            self._waiting.extend((request, index) for index in range(request.num_completions))

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._in_progress

    def release_memory(self) -> None: ...

    def step(self) -> dict[int, list[Completion]]:
        now = self._time or time.perf_counter()
        while self._waiting and len(self._in_progress) < self.places:
            request, index = self._waiting.popleft()
            self._in_progress.append(
                InProgress(request, index, self.length_of(request, index), now)
            )
        now += self.token_seconds
        time.sleep(max(0.0, now - time.perf_counter()))
        finished = {}
        for one in self._in_progress:
            one.versions.append(self.version)
            if len(one.versions) == one.length:
                self.sampled.append((one.began, now))
                self._open[one.request.id].append(one.complete())
                if len(self._open[one.request.id]) == one.request.num_completions:
                    done = self._open.pop(one.request.id)
                    finished[one.request.id] = sorted(done, key=lambda completion: completion.index)
        self.counters["tokens"] += len(self._in_progress)
        self.counters["active_slots"] += len(self._in_progress)
        self.counters["total_slots"] += self.places
        self._in_progress = [one for one in self._in_progress if len(one.versions) < one.length]
        self._time = None if self.idle else now
        return finished


def thread_host(
    name: str, engine: SleepingEngine, capacity: int, woken: threading.Event
) -> ThreadHost:
    host = EngineHost(lambda *_: engine, capacity or None, shares_memory=False)  # type: ignore
    return ThreadHost(host, woken.set, name)


# ---- a trainer that sleeps


@dataclass
class FakeTrainer:
    """Updater, recorder and checkpoints of a `Run`: an update sleeps, the rest takes no time."""

    update_seconds: float
    on_groups: Callable[[int, Sequence[Any]], None] = lambda step, groups: None
    after_step: Callable[[], object] = lambda: None
    updates: list[tuple[float, float]] = field(default_factory=list)  # begin and end
    stats: list[RolloutStats] = field(default_factory=list)  # by step
    evaluations: dict[int, Sequence[Group]] = field(default_factory=dict)  # by version: its answers
    warned: list[Any] = field(default_factory=list)
    protected: int | None = None
    saved: Restored | None = None  # the newest checkpoint

    def __post_init__(self) -> None:
        self.learner = SimpleNamespace(
            init=lambda parameters: SimpleNamespace(trainable=weights(0), frozen=None)
        )
        self.watch = Watch()

    def first_state(self, parameters: Any, critic_parameters: Any) -> Any:
        return self.learner.init(parameters)

    def update(self, state: Any, groups: Sequence[Any], step: int) -> tuple[Any, Any]:
        begin = time.perf_counter()
        time.sleep(self.update_seconds)
        self.updates.append((begin, time.perf_counter()))
        self.on_groups(step, groups)
        table = SimpleNamespace(completion_advantages=None, turn_advantages=None, nonzero_std=None)
        return (
            SimpleNamespace(trainable=weights(step + 1), frozen=None),
            SimpleNamespace(table=table, logprobs={}, metrics=None),
        )

    def evaluation(self, version: int, figures: Any, groups: Sequence[Group], *args: Any) -> None:
        self.evaluations[version] = groups

    def begin_step(self, number: int) -> None:
        """A step is recorded when it is over."""

    def step(self, record: Any) -> dict[str, float]:
        self.after_step()
        return {}

    def state(self) -> dict[str, Any]:
        return {"evaluated": list(self.evaluations)}

    def restore(self, state: Mapping[str, Any], version: int, evaluated: bool, *_: Any) -> None:
        self.evaluations = {number: self.evaluations[number] for number in state["evaluated"]}

    def scores(self) -> dict[str, float]:
        return {}

    def save(
        self, version: int, state: Any, extra: Any, published: dict[int, Any], scores: Any
    ) -> None:
        self.saved = Restored(version, state, json.loads(json.dumps(extra)), dict(published))

    def finish(self, last: int = 0, best: int | None = None) -> dict[str, Any]:
        return {"last": last}

    def ignore(self, *args: Any) -> None: ...

    begin_training = begin_evaluation = sync = spent = data_exhausted = print_next_steps = ignore


REWARD = RewardFunction(
    "sum", lambda completions, **_: [float(len(text)) for text in completions], runs_in_process=True
)
TASK = Task("fake", (), {}, (REWARD,))


def make_fleet(
    hosts: Mapping[str, Host], woken: threading.Event, publish_seconds: float = 0.0, **settings: Any
) -> Fleet:
    pool = RewardPool((REWARD,), RewardSection(workers=0))
    rewards = GroupRewards(TASK, pool, lambda ids: "x" * (sum(ids) % 7))
    return Fleet(
        FakeStore(publish_seconds),
        hosts,
        rewards,
        seed=0,
        in_background=True,
        woken=woken,
        **settings,
    )  # type: ignore[arg-type]


def make_run(
    fleet: Fleet,
    trainer: FakeTrainer,
    steps: int,
    prompts: int,
    group_size: int,
    schedule: Schedule,
    questions: int = 0,
    pins: bool = False,
) -> Run:
    """A run, or the rest of one that the trainer has a checkpoint of; every third step has one.
    Every tenth version is evaluated where there are questions."""
    trainer.after_step = lambda: trainer.stats.append(fleet.read_stats(Purpose.TRAIN))
    config, _ = compose(
        "train",
        [
            f"steps={steps}",
            f"batch.prompts_per_step={prompts}",
            f"batch.group_size={group_size}",
            "sampling.max_completion_tokens=4096",
            "checkpoint.every=3",
            f"train.evaluate_every={10 if questions else 0}",
        ],
    )
    examples = [Example(row, str(row)) for row in range(steps * prompts)]
    stream = PromptStream(examples, lambda prompt: np.array([1]), 0, 10)
    held_out = [TokenizedExample(Example(row, str(row)), np.array([1])) for row in range(questions)]
    evaluator = Evaluator(
        {"held_out": held_out} if questions else {}, config.sampling.params, 0, TASK
    )
    run = Run(
        config,
        weights(0),
        trainer,
        fleet,
        stream,
        evaluator,
        trainer,
        trainer,  # type: ignore[arg-type]
        schedule,
        trainer.saved,
    )
    if pins:
        pinned(run.lookahead)
    return run


def run_case(case: Case, lengths: np.ndarray, update_seconds: float, token_seconds: float) -> Trace:
    """The case with sleeping parts; what is sampled has the lengths of the simulation."""
    by_group = lengths.reshape(-1, case.group_size)
    woken, trace = threading.Event(), Trace()
    # Groups are numbered in the order asked, there as here.
    engines = []
    for _ in range(case.hosts):
        engines.append(
            SleepingEngine(
                case.places_per_host,
                lambda request, index: int(by_group[request.id, index]),
                token_seconds,
            )
        )
    hosts = {
        f"host {n}": thread_host(f"host {n}", engine, case.capacity, woken)
        for n, engine in enumerate(engines)
    }

    def note(step: int, groups: Sequence[Any]) -> None:
        trace.staleness.append(
            np.concatenate([step - one.versions for group in groups for one in group.completions])
        )

    trainer = FakeTrainer(update_seconds, note)
    fleet = make_fleet(hosts, woken)
    cpu = time.process_time()
    try:
        make_run(
            fleet,
            trainer,
            len(lengths),
            case.prompts,
            case.group_size,
            case.schedule,
            pins=case.mode == "newest",
        ).train()
    finally:
        fleet.close()
    trace.cpu_seconds = time.process_time() - cpu
    trace.updates = trainer.updates
    trace.sampled = [one for engine in engines for one in engine.sampled]
    return trace
