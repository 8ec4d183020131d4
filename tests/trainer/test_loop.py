"""The loop: which version each step samples from, in what order things are asked for, and that
nothing is missed."""

from __future__ import annotations

import io
import json
import math
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_runs import Workshop, checkpoints, groups, metrics

from shoal.config.merge import compose
from shoal.config.sections.optimizer import BatchSection
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.train import CheckpointSection, TrainSection
from shoal.config.stored import to_dict
from shoal.config.train import Config
from shoal.findings import Finding
from shoal.job.job import Job
from shoal.job.resume import resolve_run
from shoal.job.training import open_run
from shoal.protocols import GroupRequest
from shoal.records import Completion, Example, Purpose, ShoalError, StopReason
from shoal.report.console import Console
from shoal.report.recorder import Recorder
from shoal.runs.reward_changes import RewardChanges
from shoal.trainer.loop import Run
from shoal.trainer.prompts import PassRates, PromptStream
from shoal.trainer.schedule import Schedule
from shoal.weights.checkpoints import Restored

# ---- the schedule


@pytest.mark.parametrize(
    ("lag", "every", "versions"),
    [
        (0, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1, 1, [0, 0, 1, 2, 3, 4, 5, 6]),
        (3, 1, [0, 0, 0, 0, 1, 2, 3, 4]),
        (0, 2, [0, 0, 2, 2, 4, 4, 6, 6]),
        (1, 2, [0, 0, 0, 2, 2, 4, 4, 6]),
        (2, 3, [0, 0, 0, 0, 0, 3, 3, 3]),
    ],
)
def test_versions_by_step(lag, every, versions):
    schedule = Schedule(lag, every)
    assert [schedule.version(step) for step in range(8)] == versions
    for version in versions:
        assert schedule.publishes(version)
    stale = [step - schedule.version(step) for step in range(40)]
    assert max(stale) == schedule.max_staleness == lag + every - 1 and min(stale) >= 0
    assert [v for v in range(8) if schedule.publishes(v)] == list(range(0, 8, every))


# ---- the order of things


class State(SimpleNamespace):
    """Stands for a trainer's state; can be watched by a weak reference."""


def state_of(version: int) -> State:
    return State(trainable=("weights", version), frozen=None)


class Diary:
    """A source, updater, evaluator, recorder and checkpoints that only write down what is asked of
    them."""

    older = 0  # versions by which what is taken is older than what was asked for

    def __init__(self) -> None:
        self.sets: dict[str, list] = {}  # of an evaluation
        self.events: list[tuple] = []
        self.available: list[int] = []
        self.pending: dict[int, list[GroupRequest]] = {}
        self.evaluated: dict[int, float] = {}
        self.evaluations = self.evaluated
        self.warned: list[Finding] = []
        self.watch = SimpleNamespace(first_skipped_step=None)
        self.folder = Path("checkpoints")

    def first_state(self, parameters, critic_parameters):
        return state_of(0)

    def request(self, requests) -> None:
        [step] = {request.step for request in requests}
        [version] = {request.version for request in requests}
        assert version in self.available, f"version {version} is asked for before it is published"
        assert step not in self.pending, f"step {step} is asked for twice"
        self.pending[step] = list(requests)
        self.events.append(("ask", step, version))

    def take(self, purpose, step) -> list[SimpleNamespace]:
        assert purpose is Purpose.TRAIN
        self.events.append(("take", step))
        completions = []
        for request in self.pending[step]:
            completions.append(
                Completion(
                    0,
                    0,
                    np.zeros(1),
                    np.zeros(1),
                    np.ones(1, bool),
                    np.array([request.version - self.older]),
                    StopReason.EOS,
                )
            )
        result = []
        for request, one in zip(self.pending[step], completions, strict=True):
            result.append(
                SimpleNamespace(
                    step=step,
                    example=request.example,
                    rewards=np.zeros(3),
                    valid=np.ones(3, bool),
                    correct=None,
                    extra={},
                    completions=[one],
                )
            )
        return result

    def publish(self, version, params, keep_from=None) -> None:
        assert params == ("weights", version)
        self.available.append(version)
        self.events.append(("publish", version))

    def close(self) -> None:
        self.events.append(("close",))

    def published(self) -> dict:
        return dict.fromkeys(self.available[-1:], "weights")

    def state(self) -> dict:
        return {}

    def update(self, state, requests, step):
        assert {request.step for request in requests} == {step} and state.trainable == (
            "weights",
            step,
        )
        self.events.append(("update", step))
        table = SimpleNamespace(completion_advantages=None, turn_advantages=None, nonzero_std=None)
        return state_of(step + 1), SimpleNamespace(table=table, logprobs={}, metrics=None)

    def num_completions(self, full) -> int:
        return 7

    def request_answers(self, source, step, version, full) -> None:
        assert source is self and step == version and version in self.available
        self.events.append(("evaluate", version, full))

    def collect(self, source, step, full) -> int:
        return step

    def score(self, version):
        return {"held_out": {"accuracy": version / 10}}, [f"answer {version}"]

    def check_logprobs(self, groups, logprobs, version):
        # the weights that the step's update began with
        assert {group.step for group in groups} == {version}

    def is_busy_with(self, purpose, step) -> bool:
        return False

    def step(self, record):
        assert record.seconds >= 0 and {group.step for group in record.groups} == {record.step}
        return {"reward/mean": float(record.step)}

    def finish(self, last=None, best=None):
        return {"evaluated": self.evaluated, "last": last}

    def sync(self, *args) -> None: ...
    def begin_evaluation(self, version, num_completions) -> None: ...

    def save(self, version, state, extra, published, scores) -> None:
        assert state.trainable == ("weights", version) and scores == {}
        self.events.append(
            (
                "save",
                version,
                extra["prompts"]["cursor"],
                tuple(step for step, _ in extra["pending"]),
            )
        )

    def evaluation(self, version, figures, answers, num_completions, seconds) -> None:
        assert num_completions == 7 and answers == [f"answer {version}"] and seconds >= 0
        self.evaluated[version] = figures["held_out"]["accuracy"]

    def scores(self) -> dict:
        return {}

    def begin_training(self, first) -> None: ...

    def begin_step(self, number) -> None: ...
    def print_next_steps(self, has_weights) -> None: ...
    def spent(self, *args) -> None: ...


def play(
    schedule: Schedule,
    steps: int,
    evaluate_every: int = 0,
    period: int = 0,
    evaluate_first: bool = True,
) -> tuple[Diary, dict]:
    diary = Diary()
    config = Config(
        steps=steps,
        batch=BatchSection(prompts_per_step=2, group_size=3),
        train=TrainSection(evaluate_every, evaluate_first),
        checkpoint=CheckpointSection(period),
    )
    prompts = PromptStream(
        [Example(row, str(row)) for row in range(50)], lambda prompt: np.array([1]), 0, 10
    )
    run = Run(config, ("weights", 0), diary, diary, prompts, diary, diary, diary, schedule)
    return diary, run.train()


@pytest.mark.parametrize(("older", "ages"), [(3, "3 to 3"), (-1, "-1 to -1")])
def test_no_step_learns_from_tokens_beyond_the_bound(monkeypatch, older, ages):
    monkeypatch.setattr(Diary, "older", older)

    def update(self, state, groups, step):
        return pytest.fail("an update was made")

    monkeypatch.setattr(Diary, "update", update)
    with pytest.raises(
        RuntimeError,
        match=rf"got tokens {ages} versions old, expected 0 to 2 \(train.max_staleness\)",
    ):
        play(Schedule(lag=2), 3)


def test_one_step_after_the_other():
    diary, summary = play(Schedule(), 2)
    assert diary.events == [
        ("publish", 0),
        ("evaluate", 0, True),
        ("ask", 0, 0),
        ("take", 0),
        ("update", 0),
        ("publish", 1),
        ("ask", 1, 1),
        ("take", 1),
        ("update", 1),
        ("publish", 2),
        ("save", 2, 4, ()),
        ("evaluate", 2, True),
    ]
    assert summary["evaluated"] == {0: 0, 2: 0.2}


def test_the_first_evaluation_can_be_left_out():
    diary, summary = play(Schedule(), 2, evaluate_every=1, evaluate_first=False)
    assert diary.events[:2] == [("publish", 0), ("ask", 0, 0)]
    evaluated = [event for event in diary.events if event[0] == "evaluate"]
    assert evaluated == [("evaluate", 1, False), ("evaluate", 2, True)]
    assert summary["evaluated"] == {1: 0.1, 2: 0.2}


def test_a_run_without_steps_evaluates_once():
    diary, summary = play(Schedule(), 0)
    assert diary.events == [("publish", 0), ("evaluate", 0, True)]
    assert summary["evaluated"] == {0: 0}


def test_a_lag_asks_ahead():
    diary, _ = play(Schedule(lag=1), 3, period=1)
    assert diary.events == [
        ("publish", 0),
        ("evaluate", 0, True),
        ("ask", 0, 0),
        ("ask", 1, 0),
        ("take", 0),
        ("update", 0),
        ("publish", 1),
        ("ask", 2, 1),
        ("save", 1, 6, (1, 2)),
        ("take", 1),
        ("update", 1),
        ("publish", 2),
        ("save", 2, 6, (2,)),
        ("take", 2),
        ("update", 2),
        ("publish", 3),
        ("save", 3, 6, ()),
        ("evaluate", 3, True),
    ]


def test_no_state_outlives_the_step_that_follows_it(monkeypatch):
    """The first state was held by its caller's frame: a model's memory for all of a run."""
    held: list[weakref.ref] = []
    alive: list[int] = []

    def update(self: Diary, state: Any, groups: Any, step: int) -> Any:
        held.append(weakref.ref(state))
        alive.append(sum(one() is not None for one in held))
        table = SimpleNamespace(completion_advantages=None, turn_advantages=None, nonzero_std=None)
        return state_of(step + 1), SimpleNamespace(table=table, logprobs={}, metrics=None)

    monkeypatch.setattr(Diary, "update", update)
    play(Schedule(), 4, period=1)
    assert alive == [1, 1, 1, 1]


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_every_step_is_asked_for_once_at_its_version(lag, every, steps):
    schedule = Schedule(lag, every)
    diary, _ = play(schedule, steps, evaluate_every=2)
    asked = [event for event in diary.events if event[0] == "ask"]
    assert asked == [("ask", step, schedule.version(step)) for step in range(steps)]
    assert [event[1] for event in diary.events if event[0] == "take"] == list(range(steps))
    for step in range(steps):
        assert diary.events.index(("ask", step, schedule.version(step))) < diary.events.index(
            ("take", step)
        )
        assert [(r.num_completions, r.purpose) for r in diary.pending[step]] == [
            (3, Purpose.TRAIN)
        ] * 2
    rows = []
    for step in range(steps):
        for request in diary.pending[step]:
            rows.append(request.example.row)
    assert len(set(rows)) == 2 * steps  # in the first epoch no prompt twice
    evaluated = [event[1:] for event in diary.events if event[0] == "evaluate"]
    between = [(version, False) for version in range(2, steps, 2)]
    first = [(0, True)] if steps else []
    assert evaluated == [*first, *between, (steps, True)]
    assert diary.available == sorted(set(diary.available))
    assert set(range(0, steps + 1, every)) <= set(diary.available)


@pytest.mark.parametrize(
    ("period", "saved"), [(0, [7]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (9, [7])]
)
def test_checkpoints_at_the_period_and_the_end(period, saved):
    diary, _ = play(Schedule(), 7, period=period)
    # With the prompts of the step that follows, which is asked for before anything is recorded.
    assert [event[1:3] for event in diary.events if event[0] == "save"] == [
        (version, min(2 * version + 2, 14)) for version in saved
    ]


class Warned(Diary):
    """A diary whose recorder warns after the third step; each earlier step has a checkpoint."""

    def __init__(self, level) -> None:
        super().__init__()
        self.level = level
        self.watch = SimpleNamespace(first_skipped_step=3)

    def step(self, record):
        if record.step == 2:
            self.warned = [
                Finding("training", level, text)
                for level, text in (("warning", "first"), (self.level, "a dull reward"))
            ]
        return super().step(record)

    def versions(self) -> list[int]:
        return [event[1] for event in self.events if event[0] == "save"]


def run_warned(level, on_warning) -> tuple[Warned, str]:
    diary = Warned(level)
    config = Config(
        steps=5,
        batch=BatchSection(prompts_per_step=2, group_size=3),
        train=TrainSection(on_warning=on_warning),
        checkpoint=CheckpointSection(1),
    )
    prompts = PromptStream(
        [Example(row, str(row)) for row in range(50)], lambda prompt: np.array([1]), 0, 10
    )
    run = Run(
        config,
        ("weights", 0),
        diary,
        diary,
        prompts,
        diary,
        diary,
        diary,  # type: ignore[arg-type]
        resume_command="shoal train resume=run",
    )
    try:
        run.train()
    except ShoalError as error:
        return diary, str(error)
    return diary, ""


def test_a_warning_ends_the_run_only_where_that_was_asked():
    diary, error = run_warned("warning", "continue")
    assert not error and diary.versions() == [1, 2, 3, 4, 5]
    diary, error = run_warned("warning", "stop")
    assert (
        "after step 3" in error
        and "first; a dull reward" in error
        and diary.versions() == [1, 2, 3]
    )
    assert "shoal train resume=run train.on_warning=continue" in error


def test_a_hopeless_run_ends_and_names_the_checkpoint_from_before():
    """Step 3 was skipped, so the weights of step 2 were bad already; nothing is saved of what
    followed."""
    diary, error = run_warned("wrong", "continue")
    assert "after step 3: a dull reward" in error and diary.versions() == [1, 2]
    assert "the last good checkpoint is of step 1: shoal train model=checkpoints/1" in error


class Learning(Diary):
    """A diary of a run in which row 0 is never solved and the others are before step
    `solved_until`; weights are let go of as `LocalSource` does."""

    def __init__(self, solved_until: int) -> None:
        super().__init__()
        self.solved_until = solved_until
        self.waiting: dict[int, int] = {}  # step -> version
        self.kept: set[int] = set()
        self.saved: dict[int, dict] = {}
        self.summary: dict = {}

    def request(self, requests) -> None:
        step, version = requests[0].step, requests[0].version
        self.pending[step], self.waiting[step] = list(requests), version
        self.events.append(("ask", step))

    def take(self, purpose, step) -> list[SimpleNamespace]:
        assert self.waiting[step] in self.kept, (
            f"version {self.waiting[step]} was asked for, kept are {self.kept}"
        )
        groups = super().take(purpose, step)
        for group in groups:
            group.correct = np.full(3, group.example.row > 0 and step < self.solved_until)
        del self.waiting[step]
        return groups

    def publish(self, version, params, keep_from=None) -> None:
        super().publish(version, params, keep_from)
        first = version if keep_from is None else keep_from
        self.kept = {v for v in {*self.kept, version} if v >= first or v in self.waiting.values()}

    def published(self) -> dict:
        return {version: ("weights", version) for version in self.kept}

    def save(self, version, state, extra, published, scores) -> None:
        self.events.append(("save", version))
        self.saved[version] = json.loads(json.dumps({**extra, "older": sorted(published)}))

    def data_exhausted(self, text) -> None:
        self.events.append(("exhausted", text))

    def restore(self, *args, **settings) -> None: ...


def learn(lag: int, *words: str, before: Learning | None = None, version: int = -1) -> Learning:
    """Four prompts, two a step, of which three are soon solved: a whole run, or the rest of one
    from a checkpoint."""
    diary = Learning(solved_until=lag + 2)
    config, _ = compose(
        "train",
        [
            "steps=20",
            "batch.prompts_per_step=2",
            "batch.group_size=3",
            "train.retire_above=0.9",
            f"train.max_staleness={lag}",
            "train.evaluate_every=2",
            "checkpoint.every=1",
            *words,
        ],
    )
    prompts = PromptStream(
        [Example(row, str(row)) for row in range(4)],
        lambda prompt: np.array([1]),
        0,
        10,
        rates=PassRates(config.train.retire_above),
    )
    restored = None
    if before is not None:
        extra = before.saved[version]
        diary.evaluated.update(
            {v: x for v, x in before.evaluated.items() if v < version + extra["evaluated"]}
        )
        restored = SimpleNamespace(
            version=version,
            state=state_of(version),
            extra=extra,
            published={v: ("weights", v) for v in extra["older"]},
        )
    run = Run(
        config,
        ("weights", 0),
        diary,
        diary,
        prompts,
        diary,
        diary,
        diary,
        Schedule(lag),  # type: ignore[arg-type]
        restored=restored,
    )  # type: ignore[arg-type]
    diary.summary = run.train()
    return diary


def steps_of(events: list[tuple], kind: str) -> list[int]:
    return [event[1] for event in events if event[0] == kind]


LAGS = pytest.mark.parametrize("lag", [0, 1, 2, 3])


@LAGS
@pytest.mark.parametrize(
    "dynamic", ["algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling=false"]
)
def test_once_the_data_is_learnt_nothing_more_is_asked_for(lag, dynamic):
    """What is pending then is learnt from, though it may bring solved prompts back; the last
    version is evaluated once, at the end."""
    diary = learn(lag, dynamic)
    last, updates = diary.summary["last"], steps_of(diary.events, "update")
    assert updates == list(range(last)) and 1 <= last < 15
    exhausted = [event[0] for event in diary.events].index("exhausted")
    assert (
        max(steps_of(diary.events, "ask"))
        == max(steps_of(diary.events[:exhausted], "ask"))
        == last - 1
    )
    assert len(steps_of(diary.events[exhausted:], "update")) == lag
    assert [event[1:] for event in diary.events if event[0] == "evaluate"] == [
        (0, True),
        *((v, False) for v in range(2, last, 2)),
        (last, True),
    ]
    assert steps_of(diary.events, "save") == list(range(1, last + 1))


class Third(Diary):
    """A diary of a run in which a third of the groups is useful; `rounds` has the groups asked for
    by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: dict[int, list[int]] = {}
        self.useful: dict[int, int] = {}

    def request(self, requests) -> None:
        step = requests[0].step
        self.pending.pop(step, None)
        self.rounds.setdefault(step, []).append(len(requests))
        super().request(requests)

    def take(self, purpose, step) -> list[SimpleNamespace]:
        groups = super().take(purpose, step)
        for group in groups:
            group.rewards, group.reward_components = (
                np.array([0.0, 0.0, group.example.row % 3 == 0]),
                {},
            )
        self.useful[step] = self.useful.get(step, 0) + sum(
            group.example.row % 3 == 0 for group in groups
        )
        return groups


@pytest.mark.parametrize("lag", [0, 1])
def test_with_a_lag_as_many_groups_are_asked_for_as_the_last_step_shows_useful(lag):
    """Without a lag a step asks again for what is missing; with one that would have to be waited
    for."""
    diary = Third()
    config, _ = compose(
        "train",
        [
            "steps=5",
            "batch.prompts_per_step=4",
            "batch.group_size=3",
            "train.max_staleness=1",
            "algorithm.dynamic_sampling=true",
        ],
    )
    prompts = PromptStream(
        [Example(row, str(row)) for row in range(300)], lambda prompt: np.array([1]), 0, 10
    )
    Run(config, ("weights", 0), diary, diary, prompts, diary, diary, diary, Schedule(lag)).train()
    assert list(diary.rounds) == list(range(5))
    for step, rounds in diary.rounds.items():
        learnt = step - 1 - lag  # the newest step when this one was asked for
        share = diary.useful[learnt] / sum(diary.rounds[learnt]) if lag and learnt >= 0 else 1.0
        assert rounds[0] == min(12, math.ceil(4 / share))
    assert any(len(rounds) > 1 for rounds in diary.rounds.values())


class Constant(Diary):
    """A source that asks again, and all of whose groups have one reward; notes what each step was
    filled with, and which groups were kept as discarded ones."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, list[int]] = {}
        self.filled: list[int] = []
        self.discarded: list[tuple[int, int]] = []

    def request(self, requests) -> None:
        step = requests[0].step
        self.pending.pop(step, None)
        self.rows.setdefault(step, []).extend(request.example.row for request in requests)
        super().request(requests)

    def take(self, purpose, step) -> list[SimpleNamespace]:
        groups = super().take(purpose, step)
        for group in groups:
            group.reward_components = {}
        return groups

    def step(self, record):
        self.filled.append(record.num_filled)
        return super().step(record)

    def keep_discarded(self, step, groups) -> None:
        self.discarded.append((step, len(groups)))

    def print_next_steps(self, has_checkpoint) -> None: ...


@pytest.mark.parametrize(
    ("rounds", "num_rows", "expected"),
    [(0, 300, 4), (2, 300, 12), (2, 10, 10)],
)
def test_a_step_that_cannot_be_filled_is_filled_and_counted_or_ends_the_run(
    rounds, num_rows, expected
):
    """A step samples at most (1 + rounds) x 4 prompts, each once."""

    def run(diary, on_too_few_groups):
        words = [
            "steps=1",
            "batch.prompts_per_step=4",
            "batch.group_size=3",
            "algorithm.dynamic_sampling=true",
            f"algorithm.max_sampling_rounds={rounds}",
            f"algorithm.on_too_few_groups={on_too_few_groups}",
        ]
        config, _ = compose("train", words)
        examples = [Example(row, str(row)) for row in range(num_rows)]
        prompts = PromptStream(examples, lambda prompt: np.array([1]), 0, 10)
        run = Run(config, ("weights", 0), diary, diary, prompts, diary, diary, diary, Schedule())
        run.train()

    filled = Constant()
    run(filled, "fill")
    assert filled.filled == [4] and filled.discarded == []
    stopped = Constant()
    with pytest.raises(ShoalError) as raised:
        run(stopped, "stop")
    assert stopped.filled == [] and stopped.discarded == [(0, expected)]
    for diary in (filled, stopped):
        assert len(diary.rows[0]) == len(set(diary.rows[0])) == expected
    message = str(raised.value)
    assert f"step 1: dynamic sampling keeps 0 of {expected} groups" in message
    reason = "no other prompt" if num_rows == 10 else f"max_sampling_rounds={rounds} allows no more"
    assert reason in message and "on_too_few_groups=fill" in message


@LAGS
def test_a_run_whose_data_is_learnt_resumes_to_the_same_end(lag):
    whole = learn(lag)
    for version in whole.saved:
        rest = learn(lag, before=whole, version=version)
        assert rest.summary["last"] == whole.summary["last"] and "exhausted" in [
            event[0] for event in rest.events
        ]
        assert steps_of(rest.events, "update") == [
            step for step in steps_of(whole.events, "update") if step >= version
        ]
        late = version + whole.saved[version]["evaluated"]
        assert [event for event in rest.events if event[0] == "evaluate"] == [
            event for event in whole.events if event[0] == "evaluate" and event[1] >= late
        ]
    on = learn(lag, "train.retire_above=1", before=whole, version=max(whole.saved))
    assert on.summary["last"] == 20


def test_that_the_data_is_learnt_is_said_once():
    said = []
    recorder = SimpleNamespace(_exhausted=False, console=SimpleNamespace(note=said.append))
    for _ in range(3):
        Recorder.data_exhausted(recorder, "so it is")  # type: ignore[arg-type]
    assert said == ["so it is; training ends here"]


def test_only_the_first_evaluation_of_a_process_compiles():
    said: list[str] = []

    def compilations():
        return 3

    def during(*_):
        return nullcontext()

    recorder = SimpleNamespace(
        _evaluation_rate=None,
        _compiled_before=-1,
        compilations=compilations,
        folder=SimpleNamespace(during=during),
        _begin_phase=said.append,
    )
    for version in (0, 5):
        Recorder.begin_evaluation(recorder, version, 8)  # type: ignore[arg-type]
    assert said == [
        "evaluation before training, 8 completions; programs are compiled first",
        "evaluation after step 5, 8 completions",
    ]


def test_a_stop_saves_without_requesting_anything_again():
    """`Diary` refuses a second request of a step, and has nothing that cancels one."""
    diary = Diary()
    diary.stop = diary.sync  # type: ignore[attr-defined]
    config = Config(
        steps=9,
        batch=BatchSection(prompts_per_step=2, group_size=3),
        train=TrainSection(evaluate_every=0),
    )
    prompts = PromptStream(
        [Example(row, str(row)) for row in range(50)], lambda prompt: np.array([1]), 0, 10
    )
    run = Run(config, ("weights", 0), diary, diary, prompts, diary, diary, diary, Schedule(lag=2))
    run.after_step = lambda step, _: run.stop.request() if step == 3 else None
    with pytest.raises(KeyboardInterrupt, match="stopped after step 4 of 9"):
        run.train()
    assert diary.events[-1] == ("save", 4, 14, (4, 5, 6))  # 7 steps of 2 prompts were requested


class Full(Diary):
    """A diary that has no room for version 3."""

    def publish(self, version, params, keep_from=None) -> None:
        if version == 3:
            raise ShoalError("no room for the weights")
        super().publish(version, params, keep_from)

    def step(self, record):
        self.events.append(("record", record.step))
        return super().step(record)


def test_weights_that_cannot_be_published_are_saved_with_their_step():
    diary = Full()
    config = Config(
        steps=9,
        batch=BatchSection(prompts_per_step=2, group_size=3),
        train=TrainSection(evaluate_every=0),
        checkpoint=CheckpointSection(every=0),
    )
    prompts = PromptStream(
        [Example(row, str(row)) for row in range(50)], lambda prompt: np.array([1]), 0, 10
    )
    run = Run(
        config,
        ("weights", 0),
        diary,
        diary,
        prompts,
        diary,
        diary,
        diary,
        Schedule(lag=1),  # type: ignore[arg-type]
        resume_command="shoal train resume=run",
    )
    with pytest.raises(
        ShoalError, match="no room for the weights; stopped after step 3 of 9, which is saved"
    ):
        run.train()
    # With what is pending, once: the resumed run publishes the weights, and requests what follows.
    assert diary.events[-3:] == [("update", 2), ("record", 2), ("save", 3, 8, (3,))]


def test_a_resumed_run_samples_from_what_its_checkpoint_holds():
    """Whatever schedule it had before: of the versions that its steps would name, the checkpoint
    has 4 and 5."""
    schedule = Schedule(lag=3, restored_versions=(4, 5))
    assert [schedule.version(step) for step in range(5, 11)] == [4, 4, 4, 5, 6, 7]
    assert schedule.older_versions(6) == [4, 5] and schedule.keep_from(6) == 4
    for step in range(5, 20):
        assert 0 <= step - schedule.version(step) <= schedule.max_staleness


class Rescored(Diary):
    """A diary of a run whose reward changed at version 2; evaluations since then have scores."""

    reward_changes = RewardChanges(reward=2, functions=2)

    def __init__(self, scores: dict[int, float]) -> None:
        super().__init__()
        self.evaluated.update({0: 0.5, 2: 0.7} | scores)
        self.given = scores
        self.written = io.StringIO()
        self.console = Console(self.written)
        self.settings: tuple = ()

    def restore(self, *arguments: Any, stored_settings: Any, settings: Any, **others: Any) -> None:
        self.settings = (stored_settings, settings)

    def scores(self) -> Any:
        return self.given


@pytest.mark.parametrize(
    ("keep_best", "scores", "told"), [(1, {}, True), (1, {2: 0.7}, False), (0, {}, False)]
)
def test_a_run_says_that_the_best_of_another_reward_counts_no_more(keep_best, scores, told):
    config = Config(
        steps=3,
        reward=RewardSection(functions=("reward.py:old",)),
        train=TrainSection(evaluate_every=0),
        checkpoint=CheckpointSection(keep_best=keep_best),
    )
    diary = Rescored(scores)
    rows = [Example(row, str(row)) for row in range(50)]
    prompts = PromptStream(rows, lambda prompt: np.array([1]), 0, 10)
    extra = {
        "config": json.loads(json.dumps(to_dict(config))),
        "prompts": prompts.state(),
        "pending": [],
        "recorder": {},
        "evaluated": True,
    }
    now = replace(config, reward=RewardSection(functions=("reward.py:new",)))
    restored = Restored(2, state_of(2), extra)
    Run(now, None, diary, diary, prompts, diary, diary, diary, restored=restored).begin()
    said = " ".join(diary.written.getvalue().split())
    assert ("the evaluations up to step 2 are of another reward" in said) == told
    before, after = diary.settings
    assert before["reward.functions"] == ["reward.py:old"]
    assert after["reward.functions"] == ("reward.py:new",)


# ---- with the real source


def train_with(workshop: Workshop, name: str, schedule: Schedule, *words: str):
    """A run with another schedule, and the versions that its source holds after each step."""
    config, _ = compose("train", workshop.words(name, "steps=4", "train.pass_k=0", *words)[1:])
    with Console() as console, Job(resolve_run(config, console).config, console) as job:
        run = open_run(job)
        held = []
        run.after_step = lambda step, _: held.append(sorted(run.source.published()))
        replace(run, schedule=schedule).train()
    return workshop.runs / name, held


def tokens(run, step: int) -> list:
    result = []
    for group in groups(run, step):
        result.append([c["token_ids"] for c in group["completions"]])
    return result


@pytest.fixture(scope="module")
def unmoved(workshop):
    return workshop.train("unmoved", "steps=4", "train.pass_k=0", "optimizer.lr=0")


@pytest.mark.slow
def test_a_lag_of_one_trains_on_older_samples(workshop, unmoved):
    run, held = train_with(workshop, "lagging", Schedule(lag=1))
    # each as long as a step may ask for it, were there more
    assert held == [[0, 1], [1, 2], [2, 3], [3, 4]]
    rows = metrics(run)
    assert [row["staleness"] for row in rows] == [0, 1, 1, 1]
    for step, row in enumerate(rows, 1):
        for group in groups(run, step):
            assert group["version"] == max(0, step - 2)
            # those asked for
            for completion in group["completions"]:
                assert "versions" not in completion
        # the weights have moved on since
        assert (row["sampler_gap/logprob_max"] < 2e-5) == (step == 1)
    assert [tokens(run, step) == tokens(unmoved, step) for step in (1, 2, 3)] == [True, True, False]
    assert checkpoints(run) == [4]


def test_publication_every_second_update(workshop, unmoved):
    run, held = train_with(
        workshop, "sparse", Schedule(weight_sync_interval=2), "steps=5", "train.evaluate_every=3"
    )
    # the evaluated 3 does not drive out 2, which step 3 needs
    assert held == [[0], [2], [2, 3], [4], [4, 5]]
    assert [row["staleness"] for row in metrics(run)] == [0, 1, 0, 1, 0]
    assert [tokens(run, step) == tokens(unmoved, step) for step in (1, 2, 3)] == [True, True, False]


def test_what_is_not_there_is_a_bug_and_says_so(workshop, request):
    config, _ = compose("train", workshop.words("bug", "train.pass_k=0")[1:])
    job = Job(resolve_run(config, Console()).config, Console())
    request.addfinalizer(job.stack.close)
    run = open_run(job)
    source = run.source
    with pytest.raises(ValueError, match="train at step 0 has requested no groups"):
        source.take(Purpose.TRAIN, 0)
    source.publish(0, run.parameters)
    prompt = run.prompts.next(1)[0]
    params = run.config.sampling.params
    source.request(
        [GroupRequest(Purpose.TRAIN, 0, 1, prompt.example, prompt.prompt_ids, 4, params)]
    )
    assert list(source.published()) == [0]
    with pytest.raises(RuntimeError, match="version 1 is requested"):
        source.take(Purpose.TRAIN, 0)


def test_a_run_that_publishes_its_old_weights_ends(workshop, monkeypatch):
    config, _ = compose("train", workshop.words("old", "steps=3", "train.pass_k=0")[1:])
    with Console() as console, Job(resolve_run(config, console).config, console) as job:
        run = open_run(job)
        first, publish = run.parameters, run.source.publish
        monkeypatch.setattr(
            run.source, "publish", lambda version, _, keep_from: publish(version, first, keep_from)
        )
        with pytest.raises(
            ShoalError,
            match="stopped after step 1: an update was made, but the weights from before",
        ):
            run.train()
