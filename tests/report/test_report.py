"""What is told of a run: metrics and their reductions, the run's folder, the terminal."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import json
import math
import re
import time
from collections import Counter
from contextlib import closing
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal import files
from shoal.protocols import RolloutStats
from shoal.records import Completion, Example, Group, Purpose, ShoalError, StopReason
from shoal.report.console import Console, Pace, printable
from shoal.report.recorder import Recorder, StepRecord, token_account
from shoal.runs.groups import group_record, read_file
from shoal.runs.layout import decided_file, parts_of
from shoal.runs.lines import (
    EvaluationLine,
    JsonlSink,
    StepLine,
    Summary,
    json_line,
    json_ready,
)
from shoal.runs.metrics import (
    _TABLE,
    METRICS,
    MetricSet,
    Reduction,
    is_clock,
    metric,
    pass_at_k,
    wilson_interval,
)
from shoal.runs.reader import Evaluations, StoredRun, read_summary
from shoal.runs.reward_changes import RewardChanges
from shoal.runs.summary import (
    account_text,
    curve_text,
    evaluation_text,
    step_texts,
    summary_facts,
    summary_rows,
)
from shoal.runs.writer import RunWriter
from shoal.text import duration, number_text

# ---- metrics


def test_the_table_is_whole():
    assert len(METRICS) == len(_TABLE.strip().splitlines())  # no name twice
    for name, row in METRICS.items():
        assert row.name == name and row.unit and row.meaning
        assert re.fullmatch(r"[a-z_]+(/[a-z_]+){0,2}(/\{(function|name|age|turn)\})?", name)
    assert METRICS["completions/length_max"].reduction is Reduction.MAX
    assert METRICS["version"].reduction is Reduction.LAST


def test_each_reduction():
    metrics = MetricSet()
    for name, value, count in [
        ("kl", 0.6, 3),
        ("kl", 0.2, 1),
        ("tokens/sampled", 10, 4),
        ("tokens/sampled", 5, 1),
        ("completions/length_min", 7, 1),
        ("completions/length_min", 3, 1),
        ("completions/length_min", 9, 1),
        ("completions/length_max", 7, 1),
        ("completions/length_max", 9, 1),
        ("completions/length_max", 3, 1),
        ("lr", 0.5, 1),
        ("lr", 0.25, 1),
    ]:
        metrics.add(name, value, count)
    assert metrics.result() == {
        "completions/length_min": 3,
        "completions/length_max": 9,
        "kl": pytest.approx(0.2),
        "lr": 0.25,
        "tokens/sampled": 15,
    }


def test_a_mean_is_of_items_not_of_means():
    metrics = MetricSet()
    metrics.add("entropy", 1.0 * 90, 90)
    metrics.add("entropy", 0.0, 10)
    assert metrics.result() == {"entropy": 0.9}


def test_nothing_added_is_absent_and_never_zero():
    metrics = MetricSet()
    metrics.add("kl", 0.0, count=0)
    metrics.add("completions/length_min", 0, count=0)
    assert metrics.result() == {}
    metrics.add("kl", 0.0, count=2)
    assert metrics.result() == {"kl": 0.0}


def test_reward_functions_have_a_name_each_and_a_place_in_the_order():
    metrics = MetricSet()
    for name, value, count in (
        ("lr", 1e-4, 1),
        ("rewards/format", 3, 4),
        ("rewards/correct", 1, 4),
        ("reward/mean", 1.5, 4),
    ):
        metrics.add(name, value, count)
    assert list(metrics.result().items()) == [
        ("reward/mean", 0.375),
        ("rewards/correct", 0.25),
        ("rewards/format", 0.75),
        ("lr", 1e-4),
    ]
    assert metric("rewards/format").name == "rewards/format"


@pytest.mark.parametrize("name", ["rewards", "rewards/", "reward", "reward/mena", "", "kl/x"])
def test_an_unknown_name_is_an_error(name):
    with pytest.raises(ValueError, match="unknown metric"):
        MetricSet().add(name, 1.0)


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="count must be 0 or more, got -1"):
        MetricSet().add("kl", 1.0, -1)


@pytest.mark.parametrize("name", ["kl", "completions/length_max", "completions/length_min", "loss"])
@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_is_not_hidden(name, values):
    metrics = MetricSet()
    for value in values:
        metrics.add(name, np.float32(value))
    assert math.isnan(metrics.result()[name])


@pytest.mark.parametrize(
    ("n", "c", "k", "share"),
    [
        (4, 1, 2, Fraction(1, 2)),  # 6 pairs of 4, 3 hold the right one
        (5, 2, 3, Fraction(9, 10)),  # 10 triples, 1 is all wrong
        (8, 1, 1, Fraction(1, 8)),
        (8, 3, 8, Fraction(1)),
        (8, 0, 8, Fraction(0)),
        (8, 8, 1, Fraction(1)),
        (10, 3, 4, Fraction(5, 6)),  # 1 - C(7,4)/C(10,4) = 1 - 35/210
        (3, 2, 2, Fraction(1)),  # one wrong cannot fill two
    ],
)
def test_pass_at_k_by_hand(n, c, k, share):
    assert pass_at_k(n, c, k) == pytest.approx(float(share), abs=1e-15)


def test_pass_at_k_equals_counting_all_draws():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n and k <= n:
            draws = list(itertools.combinations(range(n), k))
            right = sum(any(i < c for i in draw) for draw in draws)
            assert pass_at_k(n, c, k) == pytest.approx(right / len(draws), abs=1e-12)


def test_pass_at_k_is_stable_and_bounded():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5, abs=1e-9)
    assert pass_at_k(2000, 1000, 1000) == 1.0


@pytest.mark.parametrize("k", [0, -1, 5])
def test_pass_at_k_needs_k_samples(k):
    with pytest.raises(ShoalError, match=rf"pass@{k} needs k from 1 to 4, the completions"):
        pass_at_k(4, 2, k)


@pytest.mark.parametrize("correct", [-1, 5])
def test_pass_at_k_refuses_impossible_counts(correct):
    with pytest.raises(ValueError, match="num_correct"):
        pass_at_k(4, correct, 1)


def test_wilson_interval_by_hand():
    # by hand, z^2 = 3.8415: 0 of 10 gives z^2 / (10 + z^2); 50 of 100 is symmetrical about a half
    assert wilson_interval(0, 10) == (0.0, pytest.approx(3.841459 / 13.841459, abs=1e-6))
    assert wilson_interval(10, 10) == (pytest.approx(10 / 13.841459, abs=1e-6), 1.0)
    assert wilson_interval(50, 100) == (
        pytest.approx(0.403832, abs=1e-6),
        pytest.approx(0.596168, abs=1e-6),
    )
    assert wilson_interval(1, 4) == (
        pytest.approx(0.045587, abs=1e-6),
        pytest.approx(0.699358, abs=1e-6),
    )


@settings(deadline=None)
@given(
    st.integers(1, 10_000).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total)))
)
def test_wilson_interval_holds_the_share(pair):
    correct, total = pair
    low, high = wilson_interval(correct, total)
    assert 0 <= low <= correct / total <= high <= 1 and low < high


@pytest.mark.parametrize(("correct", "total"), [(0, 0), (2, 1), (-1, 3)])
def test_wilson_interval_refuses_what_is_no_share(correct, total):
    with pytest.raises(ValueError, match="0 <= correct <= total"):
        wilson_interval(correct, total)


# ---- JSON


def strict(text: str):
    """Parses JSON and fails on the NaN and Infinity that Python's reader would let pass."""

    def parse_constant(name):
        return pytest.fail(f"{name} is not JSON")

    return json.loads(text, parse_constant=parse_constant)


@pytest.mark.parametrize(
    ("value", "ready"),
    [
        (math.nan, None),
        (-math.inf, None),
        (np.float32("nan"), None),
        (np.float64("inf"), None),
        (np.float32(0.1), 0.1),
        (np.float16(0.1), 0.1),
        (np.float64(0.1), 0.1),
        (np.float32(1e-7), 1e-7),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (True, True),
        (None, None),
        (np.str_("a"), "a"),
        (np.array([[1, 2]], np.int32), [[1, 2]]),
        (np.array([True, False]), [True, False]),
        (np.array(2.5), 2.5),
        (np.array([0.1, np.nan], np.float32), [0.1, None]),
        (np.array(["a", None], object), ["a", None]),
        ((1, {2}), [1, [2]]),
        ({3: np.float32(0.5)}, {"3": 0.5}),
        ({Purpose.TRAIN: StopReason.EOS}, {"train": "eos"}),
        (Path("a/b"), "a/b"),
        (b"a\xff", "a\\xff"),
        (np.zeros((0,), np.float32), []),
    ],
)
def test_every_value_becomes_json(value, ready):
    assert json_ready(value) == ready
    assert type(json_ready(value)) is type(ready)
    assert strict(json_line(value)) == ready


def test_bfloat16_becomes_json():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert json_ready(np.array([0.5, np.nan], ml_dtypes.bfloat16)) == [0.5, None]


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
def test_a_record_is_one_strict_line(value):
    line = json_line({"value": value})
    assert len(line.splitlines()) == 1
    assert list(strict(line)) == ["value"]


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_float32_comes_back_bit_for_bit(values):
    array = np.array(values, np.float32)
    back = np.array(strict(json_line(array)), np.float32)
    assert back.tobytes() == array.tobytes()


def test_jsonl_flushes_each_line_and_writes_any_text(tmp_path):
    path = tmp_path / "m.jsonl"
    sink_ = JsonlSink(path)
    sink_.write(StepLine(1, {"reward/mean": np.float32(0.25), "loss": math.nan, "step": 99}))
    assert [strict(line) for line in path.read_text("utf-8").splitlines()] == [
        {"step": 1, "reward/mean": 0.25, "loss": None}
    ]
    sink_.write(StepLine(2, {"text": "é\u2028\ud83d\x00\n"}))
    sink_.close()
    lines = path.read_text("utf-8").splitlines()
    assert len(lines) == 2
    assert strict(lines[1]) == {"step": 2, "text": "é\u2028\ud83d\x00\n"}
    assert lines[1].startswith('{"step": 2')


# ---- the run's folder


NOON = datetime(2026, 11, 21, 12, 0, 5)


def test_a_folder_by_date_and_time_or_by_name(tmp_path):
    with RunWriter.create(tmp_path, now=NOON) as folder:
        assert folder.path == tmp_path / "2026-11-21" / "12-00-05"
    for suffix in ("-1", "-2"):
        with RunWriter.create(tmp_path, now=NOON) as folder:
            assert folder.path == tmp_path / "2026-11-21" / f"12-00-05{suffix}"
    with RunWriter.create(tmp_path, "first") as folder:
        assert folder.path == tmp_path / "first"


def test_a_named_folder_that_holds_something_is_refused_untouched(tmp_path):
    (tmp_path / "empty").mkdir()
    RunWriter.create(tmp_path, "empty").close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(
        ShoalError, match=r"holds something that is not a run \(notes.txt, no config.yaml\)"
    ):
        RunWriter.create(tmp_path, "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["../other", "/other", ".", "a/../../b", "a\0b"])
def test_a_run_name_stays_under_its_base(tmp_path, name):
    with pytest.raises(ShoalError, match="run_name"):
        RunWriter.create(tmp_path / "base", name)
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize("run_name", ["", "first"])
def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path, run_name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShoalError, match=r"cannot write .*file.*: .*base_output_directory"):
        RunWriter.create(tmp_path / "file", run_name)


def test_a_full_disk_is_one_clear_error_and_leaves_the_old_file(tmp_path, monkeypatch):
    folder = RunWriter.create(tmp_path, "first")
    folder.write_summary(Summary(accuracy_before=0.5))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(ShoalError, match=r"cannot write .*summary\.json: No space left"):
        folder.write_summary(Summary(accuracy_before=0.6))
    monkeypatch.undo()
    folder.close()
    assert strict(folder.summary_path.read_text())["accuracy_before"] == 0.5
    assert not list(tmp_path.rglob("*.tmp"))


def test_settings_metrics_evaluations_summary(tmp_path):
    with RunWriter.create(tmp_path, "first") as folder:
        folder.write_config("seed: 3\n", "batch.micro_tokens: {value: 64}")
        folder.write_metrics(1, {"reward/mean": 0.5})
        folder.write_metrics(2, {"reward/mean": 0.6})
        folder.write_evaluation(0, "held_out", {"accuracy": np.float64(0.5), "protocol": "greedy"})
        folder.write_summary(
            Summary(accuracy_after=np.float32(0.7), seconds_by_phase={"train": math.inf})
        )
    assert folder.config_path.read_text() == "seed: 3\n"
    assert folder.decided_path.read_text() == "batch.micro_tokens: {value: 64}\n"
    lines = (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()
    assert [strict(line)["step"] for line in lines] == [1, 2]
    assert strict((tmp_path / "first" / "evaluations.jsonl").read_text()) == {
        "step": 0,
        "name": "held_out",
        "accuracy": 0.5,
        "protocol": "greedy",
    }
    stored = strict(folder.summary_path.read_text())
    assert list(stored) == [field.name for field in dataclasses.fields(Summary)]
    assert (stored["accuracy_after"], stored["seconds_by_phase"]) == (0.7, {"train": None})
    read = Summary(accuracy_after=0.7, seconds_by_phase={"train": None})  # type: ignore[arg-type]
    assert read_summary(folder.path) == read


def test_a_summary_of_another_version_has_defaults_and_a_damaged_one_is_an_error(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 3\n")

    def read(text: str) -> Summary | None:
        (tmp_path / "summary.json").write_text(text)
        assert read_summary(tmp_path) == StoredRun(tmp_path, lenient=True).summary()
        return StoredRun(tmp_path).summary()

    assert read('{"steps": 3, "of_another_version": [1]}') == Summary(steps=3)
    for text in ("{}", "[]", '{"steps": "3"}', '{"before": 1}', '{"steps": true}', '{"tokens": {'):
        with pytest.raises(ShoalError, match=r"summary\.json is damaged"):
            read(text)
        assert read_summary(tmp_path) is None
        run = StoredRun(tmp_path, lenient=True)
        assert run.summary() is None and "summary.json" in run.problems


def test_evaluations_stand_in_for_those_that_a_summary_lacks():
    lines = []
    for version in (0, 3):
        lines.append(EvaluationLine(version, "held_out", {"accuracy": version / 10}))
    evaluations = Evaluations(lines)
    of_lines = ({"held_out": {"accuracy": 0.0}}, {"held_out": {"accuracy": 0.3}})
    assert evaluations.before_after(None) == of_lines
    assert evaluations.before_after(Summary(steps=3)) == of_lines
    before = {"held_out": {"accuracy": 0.1}}
    assert evaluations.before_after(Summary(steps=3, before=before)) == (before, {})
    # Without version 0 (train.evaluate_first=false) nothing is known from before training.
    del lines[0]
    assert Evaluations(lines).before_after(None) == ({}, of_lines[1])
    assert Evaluations([]).before_after(None) == ({}, {})


def make_completion(
    index: int,
    tokens: list[int],
    reason: StopReason = StopReason.EOS,
    drawn: list[bool] | None = None,
    version: int = 3,
) -> Completion:
    size = len(tokens)
    return Completion(
        request_id=1,
        index=index,
        token_ids=np.array(tokens, np.int32),
        logprobs=np.full(size, -0.1, np.float32),
        loss_mask=np.array(drawn or [True] * size),
        versions=np.full(size, version, np.int32),
        stop_reason=reason,
    )


def make_group(**changes) -> Group:
    group = Group(
        purpose=Purpose.TRAIN,
        step=11,
        version=3,
        example=Example(
            row=17,
            prompt=[{"role": "user", "content": "2 + 3 = ?"}],
            columns={"answer": "5", "value": np.int64(5)},
        ),
        prompt_ids=np.array([5, 8, 13], np.int32),
        completions=(
            make_completion(0, [7, 9, 2]),
            make_completion(1, [7, 8], StopReason.LENGTH, [True, False], version=2),
        ),
        texts=("5", "six \ud83d"),
        rewards=np.array([1.1, np.nan]),
        reward_components={"correct": np.array([1.0, np.nan])},
        valid=np.array([True, False]),
    )
    return dataclasses.replace(group, **changes)


def test_an_evaluation_that_is_asked_for_again_is_recorded_once(tmp_path):
    """It was recorded after the checkpoint, in which it was under way."""
    with RunWriter.create(tmp_path, "run") as folder:
        for step in (0, 5, 10):
            folder.write_evaluation(step, "held_out", {"accuracy": 0.5})
        folder.rewind(6, evaluated_again=[5])
        assert list(folder.read_evaluations()) == [0]


@pytest.mark.parametrize(
    ("written", "again", "kept"),
    [
        (["held_out", "hard"], [], [0, 2]),
        (["held_out"], [], [0]),  # killed before the figures of the second data set
        (["held_out", "hard"], [2], [0]),
    ],
)
def test_the_evaluation_after_the_checkpoint_is_kept_if_it_is_whole(tmp_path, written, again, kept):
    """The last version of a run is evaluated after its checkpoint was saved, which counts no
    evaluation of it."""
    with RunWriter.create(tmp_path, "run") as folder:
        for step in (1, 2, 3):
            folder.write_metrics(step, {"loss": 1.0})
        for name in ("held_out", "hard"):
            folder.write_evaluation(0, name, {"accuracy": 0.5})
        for name in written:
            folder.write_evaluation(2, name, {"accuracy": 0.5})
        folder.write_evaluation(3, "held_out", {"accuracy": 0.5})
        folder.groups_path.mkdir(exist_ok=True)
        for step in (0, 2, 3):
            (folder.groups_path / f"evaluate_held_out_{step:06}.parquet").touch()
        recorder = Recorder(
            folder, Console(io.StringIO()), 1, False, lambda _: RolloutStats(), int, int
        )
        recorder.restore(recorder.state(), 2, False, again, ["held_out", "hard"])
        recorder.close()
        assert list(recorder.evaluations) == list(folder.read_evaluations()) == kept
        files = sorted(file.name for file in folder.groups_path.iterdir())
        assert files == [f"evaluate_held_out_{step:06}.parquet" for step in kept]


def events_of(path: Path) -> list[tuple[int, str, str]]:
    result = []
    for event in StoredRun(path).events():
        result.append((event.step, event.phase, event.text))
    return result


def test_events_of_kept_steps_are_there_once_after_each_resumption(tmp_path):
    path = tmp_path / "run"
    with RunWriter.create(tmp_path, "run") as folder:
        folder.write_event("warning", "short data", "task.path")
        with folder.during("evaluation", 0):
            folder.write_event("phase", "evaluation before training")
        for step in range(1, 6):
            folder.begin("training", step)
            folder.write_event("warning", f"of step {step}")
            with folder.during("evaluation", step):
                folder.write_event("warning", f"of version {step}")
    with (path / "events.jsonl").open("a") as file:
        file.write('{"step": 5, "tex')  # killed while it wrote
    for _ in range(2):  # killed again before its first step
        with RunWriter(path) as folder:
            folder.begin("start", 3)
            folder.write_event("warning", "short data", "task.path")
            folder.rewind(3, evaluated=False, evaluated_again=[2])
    assert events_of(path) == [
        (0, "start", "short data"),
        (0, "evaluation", "evaluation before training"),
        (1, "training", "of step 1"),
        (1, "evaluation", "of version 1"),
        (2, "training", "of step 2"),
        (3, "training", "of step 3"),
        (3, "start", "short data"),
        (3, "start", "resumed from the checkpoint of step 3"),
    ]
    with RunWriter(path) as folder:
        folder.begin("end", 6)
        folder.write_event("warning", "a reward failed")
    with RunWriter(path) as folder:
        folder.rewind(-1)
    assert events_of(path) == [
        (0, "start", "the run has no checkpoint: it starts from its beginning")
    ]


def test_a_damaged_event_is_named_and_ends_no_reading_of_a_page(tmp_path):
    with RunWriter.create(tmp_path, "run") as folder:
        folder.write_event("warning", "one\ntwo")
    file = tmp_path / "run" / "events.jsonl"
    good = file.read_text()
    file.write_text(f'{good}{{"time": 1, "step": 0, "phase": "noon"}}\n{good}')
    with pytest.raises(ShoalError, match=r"events.jsonl, line 2 is damaged \(it has no phase\)"):
        StoredRun(tmp_path / "run").events()
    run = StoredRun(tmp_path / "run", lenient=True)
    assert [event.text for event in run.events()] == ["one two"] * 2
    assert list(run.problems) == ["events.jsonl"]


def test_no_run_ends_for_an_event_that_cannot_be_written(tmp_path, monkeypatch):
    def write(*_: Any) -> None:
        raise ShoalError("cannot write: no space left")

    with RunWriter.create(tmp_path, "run") as folder:
        monkeypatch.setattr(folder.events, "write", write)
        folder.write_event("warning", "a full disk")


def test_settings_of_a_part_that_was_lost_hold_from_where_the_run_goes_on(tmp_path):
    """Resumed at step 40 with other settings; the checkpoints from 40 on are lost, so it goes on at
    30 with those."""
    with RunWriter.create(tmp_path, "run") as folder:
        for version, config in ((0, "first\n"), (40, "other\n")):
            folder.write_config(config, f"of {config}", version)
        folder.rewind(30)
        folder.write_config("other\n", "of other\n", 30)
        parts = parts_of(folder.path)
        assert {number: file.read_text() for number, file in parts.items()} == {
            0: "first\n",
            30: "other\n",
        }
        assert {number: decided_file(file).read_text() for number, file in parts.items()} == {
            0: "of first\n",
            30: "of other\n",
        }
        assert not (folder.path / "decided_40.yaml").exists()


def test_a_part_with_other_decisions_keeps_both(tmp_path):
    """Resumed on other devices, with the same settings."""
    with RunWriter.create(tmp_path, "run") as folder:
        folder.write_config("same\n", "one device\n")
        folder.write_config("same\n", "one device\n", 20)
        assert not parts_of(folder.path)
        folder.write_config("same\n", "two devices\n", 40)
        files = {}
        for path in folder.path.glob("*.yaml"):
            files[path.name] = path.read_text()
    assert files == {
        "config.yaml": "same\n",
        "decided.yaml": "two devices\n",
        "config_0.yaml": "same\n",
        "decided_0.yaml": "one device\n",
        "config_40.yaml": "same\n",
        "decided_40.yaml": "two devices\n",
    }


def test_groups_are_written_with_what_the_trainer_returned(tmp_path):
    with RunWriter.create(tmp_path, "first") as folder:
        logprobs = {(0, 0): np.array([-0.1, -0.2, -0.3], np.float32)}
        path = folder.write_groups(12, [make_group()], np.array([[0.7, 0.0]], np.float32), logprobs)
    assert path == tmp_path / "first" / "groups" / "step_000012.parquet"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    (stored,) = read_file(path)
    assert strict(json_line(group_record(stored))) == {
        "purpose": "train",
        "step": 12,
        "version": 3,
        "subset": "train",
        "row": 17,
        "prompt": [{"role": "user", "content": "2 + 3 = ?"}],
        "prompt_ids": [5, 8, 13],
        "columns": {"answer": "5", "value": 5},
        "completions": [
            {
                "text": "5",
                "token_ids": [7, 9, 2],
                "logprobs": [-0.1, -0.1, -0.1],
                "stop_reason": "eos",
                "reward": 1.1,
                "components": {"correct": 1.0},
                "valid": True,
                "advantage": np.float32(0.7),
                "trainer_logprobs": [-0.1, -0.2, -0.3],
            },
            {
                "text": "six \\ud83d",
                "token_ids": [7, 8],
                "logprobs": [-0.1, -0.1],
                "stop_reason": "length",
                "reward": None,
                "components": {"correct": None},
                "valid": False,
                "advantage": 0.0,
                "loss_mask": [True, False],
                "versions": [2, 2],
            },
        ],
    }


def test_groups_of_an_evaluation_lie_beside_those_of_the_step(tmp_path):
    with RunWriter.create(tmp_path, "first") as folder:
        evaluated = make_group(
            purpose=Purpose.EVALUATE,
            subset="held out",
            correct=np.array([True, False]),
            extra={"parsed": ["5", "six"]},
        )
        paths = [folder.write_groups(12, [make_group()] * 2), folder.write_groups(12, [evaluated])]
    assert [path.name for path in paths] == [
        "step_000012.parquet",
        "evaluate_held_out_000012.parquet",
    ]
    assert len(read_file(paths[0])) == 2
    first, second = group_record(read_file(paths[1])[0])["completions"]
    assert (first["correct"], second["correct"]) == (True, False)
    assert (first["extra"], second["extra"]) == ({"parsed": "5"}, {"parsed": "six"})
    assert "advantage" not in first and "trainer_logprobs" not in first


def test_a_run_that_is_resumed_at_another_price_keeps_what_it_cost(tmp_path):
    def recorder(folder: RunWriter, price: float) -> Recorder:
        return Recorder(
            folder,
            Console(io.StringIO()),
            1,
            False,
            lambda _: RolloutStats(),
            lambda: 0,
            lambda: 0,
            started=time.perf_counter() - 10,
            price_per_hour=price,
        )

    with RunWriter.create(tmp_path, "first") as folder:
        first = recorder(folder, 3600.0)
        state = first.state()
        assert state["cost"] == pytest.approx(10, abs=1)
        second = recorder(folder, 7200.0)
        second.restore(state, 0, evaluated=False)
        assert second.cost == pytest.approx(10 + 20, abs=1)
        # Without a price then, the present one stands for it.
        third = recorder(folder, 7200.0)
        third.restore(state | {"cost": 0.0}, 0, evaluated=False)
        assert third.cost == pytest.approx(20 + 20, abs=1)
        unpriced = recorder(folder, 0.0)
        assert unpriced._summary(0).cost is None
        for each in (first, second, third, unpriced):
            each.close()


def recorded_metrics(folder: RunWriter, **record) -> dict[str, float]:
    """The metrics of a step with these fields of its record."""
    metrics = MetricSet()
    for name in ("tokens/trained", "time/update_seconds"):
        metrics.add(name, 0)
    recorder = Recorder(
        folder,
        Console(io.StringIO()),
        1,
        True,
        lambda _: RolloutStats(tokens=8),
        lambda: 0,
        lambda: 0,
    )
    with closing(recorder):
        groups = record["groups"]
        advantages = np.zeros((len(groups), 2))
        return recorder.step(
            StepRecord(
                step=0,
                advantages=advantages,
                nonzero_std=np.ones(len(groups)),
                logprobs={},
                metrics=metrics,
                seconds=1.0,
                **record,
            )
        )


def test_what_functions_logged_is_averaged_over_the_groups_of_the_step(tmp_path):
    """Like the rewards themselves, and not over groups, which may have logged more or less."""
    groups = [
        make_group(logged={"own": [1.0, 2.0], "other": [5.0]}),
        make_group(logged={"own": [6.0]}),
    ]
    with RunWriter.create(tmp_path, "run") as folder:
        metrics = recorded_metrics(folder, groups=groups)
    assert metrics["rewards/logged/own"] == 3 and metrics["rewards/logged/other"] == 5


def test_discarded_groups_are_stored_and_change_no_figure_of_the_step(tmp_path):
    kept = make_group()
    discarded = make_group(
        rewards=np.zeros(2), valid=np.ones(2, bool), reward_components={"correct": np.zeros(2)}
    )
    with RunWriter.create(tmp_path, "run") as folder:
        folder.write_config("steps: 1", "")
        with_discarded = recorded_metrics(folder, groups=[kept], discarded=[discarded] * 2)
        without = recorded_metrics(folder, groups=[kept])
        assert with_discarded.pop("groups/discarded") == 2 and without.pop("groups/discarded") == 0
        for name, value in without.items():
            if not is_clock(name):
                assert with_discarded[name] == value, name
        path = folder.path
        result = shoal.load_run(path)
        assert len(result.groups(1)) == 1 and result.groups(1)[0].advantages is not None
        assert not result.groups(1)[0].discarded
        stored = result.groups(1, discarded=True)
        assert [entry.discarded for entry in stored] == [True] * 2
        # Under these it is sampled again.
        again = stored[0].group
        assert (again.purpose, again.subset, again.step) == (Purpose.TRAIN, "train", 11)
        assert stored[0].advantages is None and not any(stored[0].token_arrays)
        with pytest.raises(ShoalError, match="no groups of this step; it has those of steps 1"):
            result.groups(2, discarded=True)
        folder.rewind(0)  # a resumed run samples step 1 again
        assert not list(folder.groups_path.iterdir())
        # a step in which all groups were kept
        recorded_metrics(folder, groups=[kept])
        assert shoal.load_run(path).groups(1, discarded=True) == []


def test_tokens_of_completions_that_the_loss_leaves_out_were_not_trained_on(tmp_path):
    group = make_group()
    cut_off = dataclasses.replace(group.completions[0], stop_reason=StopReason.LENGTH)
    whole = dataclasses.replace(group.completions[1], stop_reason=StopReason.EOS)
    group = dataclasses.replace(group, completions=(cut_off, whole))
    sizes = [completion.num_sampled for completion in group.completions]
    metrics = MetricSet()
    for name in ("update/count", "update/skipped", "tokens/trained", "time/update_seconds"):
        metrics.add(name, 0)
    logprobs = {}
    for i, completion in enumerate(group.completions):
        logprobs[0, i] = np.zeros(len(completion.token_ids), np.float32)
    accounts = []

    def sampled_since(_: Any) -> RolloutStats:
        return RolloutStats(tokens=sum(sizes), counters=Counter(tokens=sum(sizes)))

    for masks_truncated in (False, True):
        with RunWriter.create(tmp_path, f"run{masks_truncated}") as folder:
            recorder = Recorder(
                folder, Console(io.StringIO()), 1, True, sampled_since, lambda: 0, lambda: 0
            )
            recorder.step(
                StepRecord(
                    step=0,
                    groups=[group],
                    advantages=np.array([[1.0, -1.0]]),
                    nonzero_std=np.ones(1),
                    logprobs=logprobs,
                    metrics=copy.deepcopy(metrics),
                    seconds=1.0,
                    masks_truncated=masks_truncated,
                )
            )
            accounts.append(token_account(recorder.account))
            recorder.close()
    assert [account["trained"] for account in accounts] == [sum(sizes), sizes[1]]
    assert [account["masked"] for account in accounts] == [0, sizes[0]]


def test_the_end_of_a_run_says_what_became_of_its_tokens_and_what_to_do_next(tmp_path):
    """Groups of equal rewards enter no update: their tokens were counted as trained on."""
    stream, stats = io.StringIO(), RolloutStats(tokens=8, counters=Counter(tokens=8))
    right = make_group(rewards=np.ones(2), valid=np.ones(2, bool), correct=np.ones(2, bool))
    with RunWriter.create(tmp_path, "first") as folder:
        recorder = Recorder(folder, Console(stream), 1, True, lambda _: stats, lambda: 0, lambda: 0)
        for version, solved in ((0, np.zeros(2, bool)), (1, np.ones(2, bool))):
            asked = dataclasses.replace(
                right, purpose=Purpose.EVALUATE, subset="held_out", correct=solved
            )
            recorder.begin_evaluation(version, 1)
            recorder.evaluation(version, {"held_out": {"accuracy": 1.0}}, [asked], 1, 1.0)
            stats = RolloutStats(tokens=8, counters=Counter(tokens=8))
            if version == 0:
                metrics = MetricSet()
                for name in (
                    "update/count",
                    "update/skipped",
                    "tokens/trained",
                    "time/update_seconds",
                ):
                    metrics.add(name, 0)
                # of two groups one completion was trained on
                logprobs = {(0, 0): np.zeros(3, np.float32)}
                # and one was in the loss without an advantage, as for a KL
                logprobs[1, 0] = np.zeros(3, np.float32)
                advantages = np.array([[1.0, -1.0], [0.0, 0.0]])
                recorder.step(
                    StepRecord(0, [right, right], advantages, np.zeros(2), logprobs, metrics, 1.0)
                )
                stats = RolloutStats()
        stats = RolloutStats()
        summary = recorder.finish(1)
        recorder.close()
    assert summary.tokens == {
        "sampled": 16,
        "trained": 3,
        "masked": 0,
        "other_terms": 3,
        "no_gradient": 2,
        "discarded": 0,
        "evaluated": 8,
        "lost": 0,
        "unused": 0,
    }
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if line.startswith("== evaluation")] == [
        "== evaluation before training, 1 completion; programs are compiled first",
        "== evaluation after step 1, 1 completion, about 0:01",
    ]
    assert (
        "16 tokens sampled: 3 trained on, 3 only in the KL, entropy, context or teacher term, 2 "
        "without an advantage, 8 in evaluations"
    ) in lines
    assert "a question that was answered wrong before and right after:" in lines
    assert lines[-2:] == [
        f"the run is in {folder.path}: `shoal view {folder.path}` shows every completion",
        f"`shoal export from={folder.path} to=FOLDER` writes the weights in Hugging Face's format",
    ]


# ---- the terminal


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


METRICS_OF_A_STEP = {
    "loss": 0.0,
    "reward/mean": 0.625,
    "groups/nonzero_std": 0.72,
    "completions/length_mean": 41.26,
    "completions/truncated": 0.02,
    "throughput/sample_tokens_per_second": 12_345.0,
    "throughput/train_tokens_per_second": 812.0,
}


def plain(steps: int, seconds: float) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with Console(stream, terminal=False, clock=clock) as console:
        for step in range(1, steps + 1):
            clock.now += seconds
            console.step(step, steps, METRICS_OF_A_STEP)
    return stream.getvalue().splitlines()


def test_a_plain_line_says_what_matters():
    lines = plain(200, 0.5)
    assert lines[0] == (
        "step 1/200  0:00 elapsed  reward 0.625  mixed groups 72%  length 41.3  truncated 2%  "
        "sampling 12.3k tokens/s  training 812 tokens/s"
    )
    assert lines[2].startswith("step 3/200  0:02 elapsed, 1:38 left  reward 0.625")
    assert not any("loss" in line or "kl" in line for line in lines)


def kept(steps: int, seconds: float) -> list[int]:
    result = []
    for line in plain(steps, seconds):
        result.append(int(line.split()[1].split("/")[0]))
    return result


def test_about_forty_lines_stay_and_one_a_minute_at_least():
    assert kept(20, 0.01) == list(range(1, 21))
    assert kept(200, 0.5) == [1, 2, 3, *range(5, 201, 5)]
    assert kept(4000, 20)[:6] == [1, 2, 3, 6, 9, 12]  # 60 s at 20 s a step
    assert kept(0, 1) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.41234, "0.412"),
        (2.17e-14, "0"),
        (-0.00002, "-0.00002"),
        (1234.5, "1,234"),
        (0.0, "0"),
        (1.0, "1"),
        (0.9999, "1"),
        (3e-6, "3e-06"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (5e20, "5e+20"),
    ],
)
def test_numbers_are_written_as_a_person_would(value, text):
    assert number_text(value) == text


def test_kl_and_skipped_updates_show_when_there():
    assert step_texts({"kl": 0.00123, "update/skipped": 2.0}) == [
        "kl 0.00123",
        "skipped updates 2",
    ]
    assert step_texts({"update/skipped": 0.0}) == []
    assert step_texts({"reward/mean": math.nan}) == ["reward nan"]


def test_time_left_does_not_count_steps_that_compile():
    pace = Pace(0.0, window=4)
    pace.mark(60.0, 1)
    assert pace.seconds_left(9) is None
    for step in range(2, 10):
        pace.mark(60.0 + 2 * step, step)
    assert pace.seconds_left(10) == pytest.approx(20.0)
    pace.mark(178.0, 10, compiled=True)  # 100 s
    assert pace.seconds_left(10) == pytest.approx(20.0)


def test_time_left_of_a_run_that_compiles_at_every_step():
    pace = Pace(0.0)
    for step in range(1, 9):
        pace.mark(5.0 * step, step, compiled=True)
    assert pace.seconds_left(10) == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (83, "1:23"), (3723, "1:02:03"), (math.inf, "?"), (-1, "0:00")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_an_evaluation_states_its_size_and_protocol():
    text = evaluation_text(
        {
            "accuracy": 0.5,
            "accuracy_interval": [0.40383, 0.59617],
            "pass@8": 0.805,
            "mean_reward": 0.61,
            "num_questions": 100,
            "protocol": "greedy",
        }
    )
    assert (
        text
        == "accuracy 50.0% (greedy, 100 questions; 95% interval 40.4-59.6)  pass@8 80.5%  mean "
        "reward 0.61"
    )
    assert evaluation_text({"mean_reward": 0.5, "num_questions": 3, "protocol": "greedy"}) == (
        "mean reward 0.5 (greedy, 3 questions)"
    )
    # the metric's name
    assert "rewards/short_reward 0.5" in evaluation_text({"rewards/short_reward": 0.5})
    assert evaluation_text({}) == ""
    assert evaluation_text({"accuracy": None, "num_questions": 3}) == "accuracy - (3 questions)"
    assert "not a number" in evaluation_text({"accuracy": math.nan, "num_questions": 3})


def test_the_summary_compares_before_and_after():
    before = {
        "held_out": {"accuracy": 0.41, "pass@8": 0.81, "num_questions": 500, "protocol": "greedy"}
    }
    after = {
        "held_out": {
            "accuracy": np.float64(0.65),
            "mean_reward": 0.7,
            "num_questions": 500,
            "protocol": "greedy",
        }
    }
    assert summary_rows(before, after) == [
        ("held_out accuracy (greedy, 500 questions)", "41.0%", "65.0%", "+24.0 points"),
        ("held_out pass@8", "81.0%", "-", ""),
        ("held_out mean reward", "-", "0.7", ""),
    ]
    (_, row) = summary_rows(
        {"held_out": {"accuracy": 0.5, "mean_reward": 0.2}}, after, RewardChanges(reward=40)
    )
    assert row == ("held_out mean reward (another reward since step 40)", "0.2", "0.7", "")
    of_source = {"held_out": {"mean_reward": 0.5, "mean_reward/a": 0.2, "best_reward": 0.6}}
    for _, *_, change in summary_rows(of_source, of_source, RewardChanges(reward=40)):
        assert change == ""
    judged = {"held_out": {"accuracy": 0.5, "accuracy/a": 0.2, "pass@4": 0.6, "mean_reward": 1.0}}
    for accuracy_by, expected in (({}, ["+0.0 points"] * 3), ({"accuracy_by": "reward"}, [""] * 3)):
        evaluated = {"held_out": judged["held_out"] | accuracy_by}
        rows = summary_rows(evaluated, evaluated, RewardChanges(reward=40, functions=30))
        assert [change for *_, change in rows] == [*expected, ""]
        assert ("(another reward since step 30)" in rows[0][0]) == bool(accuracy_by)
    stream = io.StringIO()
    console = Console(stream, terminal=False)
    console.summary(
        before,
        after,
        (make_group(texts=("6",)), make_group(texts=("2 + 3 = 5\n5",))),
        [
            summary_facts(
                SimpleNamespace(
                    steps_made=1,
                    stopped_by="",
                    seconds_total=93.25,
                    seconds_training=61.5,
                    sample_tokens_per_second=1500.0,
                    train_tokens_per_second=None,
                    num_compilations=1200,
                    cost=0.0456,
                )  # type: ignore[arg-type]
            ),
            account_text({"sampled": 4321, "trained": 4000, "lost": 0, "unused": 321}),
        ],
    )
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["before", "after", "change"]
    assert lines[1].startswith("held_out accuracy (greedy, 500 questions)") and lines[1].endswith(
        "+24.0 points"
    )
    assert (
        "1 step in 1:33 for 0.0456, 1:02 of it in training steps: sampling 1.5k tokens/s, training "
        "-, with the compilation of 1,200 programs in this process" in lines
    )
    assert "4,321 tokens sampled: 4,000 trained on, 321 unfinished" in lines
    assert lines[-8:] == [
        "a question that was answered wrong before and right after:",
        "prompt:",
        "    user: 2 + 3 = ?",
        "before:",
        "    6",
        "after:",
        "    2 + 3 = 5",
        "    5",
    ]


@pytest.mark.parametrize(
    "text", ["\n".join(f"line {n}" for n in range(500)), "word " * 4000 + "the question"]
)
def test_of_a_long_passage_beginning_and_end_are_shown(text):
    stream = io.StringIO()
    Console(stream, terminal=False).passage("prompt", text, lines=16, characters=1200)
    _, *rows = stream.getvalue().splitlines()
    assert (
        len(rows) <= 17
        and sum(map(len, rows)) < 1400
        and rows[0].strip() == text[: len(rows[0]) - 4].strip()
    )
    assert rows[-1].endswith(text[-8:]) and any("more characters" in row for row in rows)


def test_a_quick_evaluation_says_how_many_questions_it_asked():
    full = {
        "accuracy": 0.37,
        "pass@8": 0.7,
        "sampled_accuracy": 0.26,
        "num_questions": 500,
        "protocol": "greedy",
        "sampled_num_questions": 100,
        "sampled_protocol": "8 completions a question at temperature 1",
    }
    quick = {"accuracy": 0.44, "num_questions": 100, "protocol": "greedy"}
    names = []
    for row in summary_rows({"held_out": full}, {"held_out": full}):
        names.append(row[0])
    assert names == [
        "held_out accuracy (greedy, 500 questions)",
        "held_out pass@8 (100 questions)",
        "held_out sampled accuracy (100 questions)",
    ]
    [name, *_], *_ = summary_rows({"held_out": full}, {"held_out": quick})
    assert name == "held_out accuracy (greedy, 500 and 100 questions)"
    assert "pass@8 70.0% (100 questions; 8 completions a question at temp" in evaluation_text(full)


def test_the_curve_of_a_run_is_one_line():
    def curve(*versions: int, between: int = 100) -> str:
        return curve_text(
            {
                version: {
                    "held_out": {
                        "accuracy": version / 1000,
                        "num_questions": (500 if version in (0, max(versions)) else between),
                    },
                    "other": {"accuracy": 1.0},
                }
                for version in versions
            }
        )

    values = ": 0: 0.0%, 20: 2.0%, 40: 4.0%"
    assert (
        curve(0, 20, 40) == f"held_out accuracy by step (100 questions, 500 at both ends){values}"
    )
    assert curve(40, 0, 20, between=500) == f"held_out accuracy by step{values}"
    # the table says it; nothing was asked
    assert curve(0, 40) == "" and curve_text({0: {}, 20: {}, 40: {}}) == ""
    many = curve(*range(0, 1001, 10)).split(": ", 1)[1].split(", ")
    assert len(many) == 13 and (many[0], many[-1]) == ("0: 0.0%", "1000: 100.0%")
    rewards = {}
    for step in range(3):
        rewards[step] = {"rows": {"mean_reward": step / 10, "num_questions": 4}}
    assert curve_text(rewards) == "rows mean reward by step: 0: 0, 1: 0.1, 2: 0.2"
    changes = RewardChanges(reward=1)
    assert curve_text(rewards, changes) == ""
    rewards[3] = rewards[4] = rewards[2]
    expected = "rows mean reward by step: 2: 0.2, 3: 0.2, 4: 0.2"
    assert curve_text(rewards, changes) == expected


def test_only_evaluations_of_the_same_questions_are_compared():
    def scores(figure: str, *numbers: int, changes=(0, 0)) -> dict[int, float]:
        evaluations = {}
        for step, n in enumerate(numbers):
            evaluations[step] = {"main": {figure: step / 10, "num_questions": n}}
        recorder = SimpleNamespace(evaluations=evaluations, reward_changes=RewardChanges(*changes))
        return Recorder.scores(recorder)  # type: ignore[arg-type]

    assert scores("accuracy", 500, 100, 500) == {0: 0.0, 2: 0.2}
    assert (
        scores("mean_reward", 4, 4) == {0: 0.0, 1: 0.1}
        and scores("other", 4) == scores("accuracy") == {}
    )
    # The reward was changed after version 1: only a figure that depends on it begins anew.
    assert scores("mean_reward", 4, 4, 4, changes=(1, 1)) == {2: 0.2}
    assert scores("accuracy", 4, 4, 4, changes=(1, 1)) == {0: 0.0, 1: 0.1, 2: 0.2}


def test_notes_and_warnings_are_said_once():
    stream = io.StringIO()
    console = Console(stream, terminal=False)
    console.note("12 prompts\ndropped")
    for _ in range(3):
        console.warning("a reward was NaN")
    console.warning("another")
    assert stream.getvalue().splitlines() == [
        "12 prompts dropped",
        "warning: a reward was NaN",
        "warning: another",
    ]


ODD = "é 你好 \ud83d \x1b[31m \x00 [bold] [/] \u202e ﷽ 👩‍👩‍👧 \x9b\r\n\ttab"


def everything(console: Console) -> None:
    with console:
        console.heading(ODD)
        console.note(ODD)
        console.passage("first prompt", ODD * 200)
        for step in range(1, 4):
            console.step(step, 3, METRICS_OF_A_STEP)
            console.warning(ODD)
        console.evaluation(ODD, {"accuracy": 0.5, "num_questions": 10, "protocol": ODD, ODD: ODD})
        console.summary(
            {ODD: {"accuracy": 0.1}},
            {ODD: {"accuracy": 0.2}},
            (make_group(texts=(ODD,)),) * 2,
            {ODD: ODD},
        )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("width", [1, 10, 80])
def test_no_text_encoding_or_width_breaks_it(encoding, terminal, width):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    everything(Console(stream, terminal=terminal, width=width))
    stream.flush()
    shown = raw.getvalue().decode(encoding)
    assert "\x00" not in shown and "\x1b[31m" not in shown and "\x9b" not in shown
    if width == 80:
        assert "[bold] [/]" in shown and "\\x1b[31m" in shown and "more characters" in shown


def test_on_a_terminal_the_bar_shows_the_figures_and_is_taken_down(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream, clock = io.StringIO(), Clock()
    console = Console(stream, terminal=True, clock=clock, width=200)
    console.step(1, 4, METRICS_OF_A_STEP)
    clock.now += 2
    console.step(2, 4, METRICS_OF_A_STEP)
    shown = stream.getvalue()
    assert "2/4  0:02 elapsed, 0:04 left  reward 0.625  mixed groups 72%" in shown
    assert "step 2/4  0:02 elapsed" in shown  # the line that stays
    # the cursor is hidden while the bar stands
    assert shown.count("\x1b[?25l") == 1 and "\x1b[?25h" not in shown
    console.close()
    assert stream.getvalue().count("\x1b[?25h") == 1


def test_a_stream_that_is_no_terminal_gets_no_escapes():
    stream = io.StringIO()
    everything(Console(stream))
    assert "\x1b" not in stream.getvalue()


def test_printable_keeps_text_and_shows_control_characters():
    assert printable("a\tb\nc é") == "a\tb\nc é"
    assert printable("\x1b[0m\x07") == "\\x1b[0m\\x07"
    assert printable("é\ud83d", "ascii") == "\\xe9\\ud83d"
