"""The sentence on a run: what it says follows from intervals."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from shoal.commands.view.verdict import (
    accuracy_change,
    drivers,
    paired_change,
    reward_change,
    verdict,
)
from shoal.runs.group_table import Added
from shoal.runs.lines import EvaluationLine
from shoal.runs.metrics import paired_interval, wilson_interval
from shoal.runs.reader import Evaluations

STEPS = 80


def curve(*points: tuple[int, float, int]) -> dict[str, Any]:
    """Of evaluations: step, accuracy, number of questions."""
    lines = []
    for step, share, n in points:
        interval = list(wilson_interval(share * n, n))
        figures = {"accuracy": share, "num_questions": n, "accuracy_interval": interval}
        lines.append(EvaluationLine(step, "held_out", figures))
    return Evaluations(lines).main_curve()[1]


class Columns:
    """The metrics of a run whose reward functions go linearly from one value to another, with
    noise."""

    def __init__(
        self,
        steps: int = STEPS,
        noise: float = 0.02,
        mixed: float = 0.8,
        **functions: tuple[float, float],
    ):
        random = np.random.default_rng(0)
        columns = {}
        for name, ends in functions.items():
            columns[f"rewards/{name}"] = np.linspace(*ends, steps) + random.normal(0, noise, steps)
        self.columns = {
            **columns,
            "reward/mean": sum(columns.values()),
            "groups/nonzero_std": np.full(steps, mixed),
        }
        self.steps = range(1, steps + 1)


def said(
    columns: Any, *points: tuple[int, float, int], events: Any = (), total: int = STEPS
) -> tuple[str, str]:
    weights = {name.removeprefix("rewards/"): 1.0 for name in columns.columns}
    driven = drivers(columns.columns, weights)
    of_points = curve(*points)
    figure = "evaluate/held_out/accuracy" if points else ""
    steps = len(columns.steps)
    found = verdict(figure, of_points, None, columns.columns, driven, events, steps, total)
    return found["level"], found["text"]


def said_of_rewards(columns: Any, *means: float, num_questions: int = 100) -> dict[str, str]:
    """The verdict where evaluations, at even distances, have a mean reward but no accuracy. Rewards
    of questions differ more than what training changes, and each changes with some noise."""
    random = np.random.default_rng(0)
    of_questions = random.uniform(-0.3, 0.3, num_questions)
    of_questions -= of_questions.mean()
    lines = []
    answers = []
    for number, mean in enumerate(means):
        step = number * STEPS // (len(means) - 1)
        figures = {"mean_reward": mean, "num_questions": num_questions}
        lines.append(EvaluationLine(step, "held_out", figures))
        noise = random.normal(0, 0.02, num_questions)
        rewards = mean + of_questions + noise - noise.mean()
        answers.append(dict(enumerate(rewards.tolist())))
    figure, of_rewards = Evaluations(lines).main_curve()
    paired = paired_change(answers[0], answers[-1])
    weights = {name.removeprefix("rewards/"): 1.0 for name in columns.columns}
    driven = drivers(columns.columns, weights)
    steps = len(columns.steps)
    return verdict(figure, of_rewards, paired, columns.columns, driven, (), steps, STEPS)


RISES = Columns(correct=(0.3, 0.6), format=(0.9, 0.91))
FLAT = Columns(correct=(0.3, 0.3), format=(0.9, 0.9))


def test_a_function_that_scores_no_more_completions_is_no_error():
    columns = Columns(correct=(0.3, 0.5), bonus=(0.5, 0.5), noise=0, mixed=0.01)
    columns.columns["rewards/bonus"][STEPS // 2 :] = np.nan
    added = [Added(0.25, 0.5)] * (STEPS // 2) + [Added(0.0, 0.0)] * (STEPS // 2)
    weights = {"correct": 1.0, "bonus": 1.0}
    driven = drivers(columns.columns, weights, {"bonus": added})
    [row] = [row for row in driven if row["function"] == "bonus"]
    assert (row["first"], row["last"], row["adds"], row["sign"]) == (0.5, None, -0.25, -1)
    found = verdict("", {}, None, columns.columns, driven, (), STEPS, STEPS)
    assert "driven by `correct`" in found["text"]
    # What it added at one end is unknown: so is the change.
    driven = drivers(columns.columns, weights, {"bonus": [None] * STEPS})
    [row] = [row for row in driven if row["function"] == "bonus"]
    assert row["adds"] is None and row["scored"] == [None, None]


def test_a_run_learns():
    level, text = said(RISES, (0, 0.374, 500), (40, 0.6, 100), (80, 0.672, 500))
    assert (level, text) == (
        "good",
        "learns: accuracy 37.4% → 67.2% in 80 steps, driven by `correct`",
    )


def test_a_gain_is_dated_by_the_evaluation_that_shows_it():
    assert said(RISES, (0, 0.374, 500), (60, 0.672, 500))[1].startswith(
        "learns: accuracy 37.4% → 67.2% in 60 steps"
    )
    # Without an evaluation before the first step the gain is that of the steps between.
    assert said(RISES, (20, 0.374, 500), (60, 0.672, 500))[1].startswith(
        "learns: accuracy 37.4% → 67.2% in 40 steps"
    )


def test_rewards_alone_are_too_early_while_the_next_evaluation_is_awaited():
    steady = Columns(20, noise=0.01, a=(0.4, 0.4))
    assert said(steady, (0, 0.37, 500), total=40)[1] == "too early to say: 20 steps"
    assert said(steady, total=40)[1].startswith("does not learn: reward in training ")
    assert said(steady, (0, 0.37, 500), total=39)[1].startswith(
        "does not learn: reward in training "
    )


def test_a_jump_within_few_steps_is_too_early_to_say():
    """The first part then holds both levels, so that its spread hides the rise."""
    columns = Columns(14, a=(0.9, 0.98))
    columns.columns["reward/mean"][:3] = [0.5, 0.55, 0.63]
    assert said(columns, total=14)[1] == "too early to say: 14 steps"


def test_a_run_is_hacked():
    columns = Columns(correct=(0.4, 0.05), has_digits=(0.1, 1.0))
    level, text = said(columns, (0, 0.667, 500), (80, 0.2, 500))
    assert level == "bad" and text.endswith("accuracy -46.7 points: looks hacked by `has_digits`")
    assert text.startswith("reward in training +0.49")


@pytest.mark.parametrize(
    ("stuck", "is_hacked"),
    [
        ({"completions/truncated": 1.0}, True),
        ({"groups/nonzero_std": 0.02}, True),
        ({}, False),
        ({"completions/truncated": 0.1}, False),
    ],
)
def test_a_reward_that_is_lost_looks_hacked_only_where_groups_teach_nothing(stuck, is_hacked):
    columns = Columns(accuracy=(0.22, -0.002), format=(0.1, 1.0))
    columns.columns |= {name: np.linspace(value / 2, value, STEPS) for name, value in stuck.items()}
    level, text = said(columns)
    assert (
        (level == "bad")
        == is_hacked
        == text.endswith(", `accuracy` 0.22 → 0.016: looks hacked by `format`")
    ), text
    # One that fell by half, or a penalty that grew, is not lost.
    for other in (
        Columns(accuracy=(0.4, 0.2), format=(0.1, 1.0)),
        Columns(penalty=(-0.1, -0.3), format=(0.1, 1.0)),
    ):
        other.columns |= {name: np.full(STEPS, value) for name, value in stuck.items()}
        assert said(other)[0] == "note"


def test_the_heaviest_reward_that_is_hardly_ever_given_is_named():
    columns = Columns(accuracy_reward=(0.0, 0.003), short_reward=(0.1, 0.9), noise=0)
    level, text = said(columns)
    assert level == "warning" and text.endswith(
        "; `accuracy_reward` is 0 on nearly all completions"
    ), text
    assert said(Columns(accuracy_reward=(0.0, 0.1), short_reward=(0.1, 0.9), noise=0))[0] == "note"


def test_a_reward_may_rise_without_more_right_answers():
    level, text = said(
        Columns(correct=(0.3, 0.3), format=(0.1, 0.9)), (0, 0.37, 500), (80, 0.38, 500)
    )
    assert (
        level == "warning"
        and "driven by `format`, but hardly more right answers: accuracy 37.0% → 38.0%" in text
    )


def test_the_mean_reward_of_evaluations_decides_without_an_accuracy():
    """The reward in training has means of its own, which would be a second pair for one gain."""
    found = said_of_rewards(RISES, 0.393, 0.7, 0.9888)
    assert (found["level"], found["text"]) == (
        "note",
        "the reward rises: held_out mean reward 0.393 → 0.989 in 80 steps, driven by `correct`; "
        "accuracy is not measured",
    )
    assert re.fullmatch(
        r"Interval of the change: held_out mean reward \+0\.5\d to \+0\.6\d? "
        r"\(99%, 100 questions, each before and after\)\.",
        found["detail"],
    )
    found = said_of_rewards(RISES, 0.4, 0.4)
    assert found["level"] == "warning" and found["text"] == (
        "reward in training +0.27 in 80 steps, driven by `correct`, but not in evaluations: "
        "held_out mean reward 0.4 → 0.4 is within noise"
    )
    found = said_of_rewards(FLAT, 0.4, 0.401)
    assert (
        found["text"]
        == "does not learn: held_out mean reward 0.4 → 0.401 in 80 steps, within noise"
    )
    assert "reward in training" not in found["detail"]


def test_a_loss_in_evaluations_is_said_whatever_the_reward_in_training_is():
    """The figures of the sentence lie within its interval, and both are of what it names."""
    short = Columns(11, noise=0.1, correct=(0.15, 0.2))
    found = said_of_rewards(short, 0.552, 0.0985, num_questions=24)
    assert (found["level"], found["text"]) == (
        "bad",
        "got worse: held_out mean reward 0.552 → 0.0985 in 80 steps",
    )
    low, high = re.findall(r"[+-]0\.\d+", found["detail"])
    assert float(low) < 0.0985 - 0.552 < float(high) < 0 and "training" not in found["detail"]
    found = said_of_rewards(RISES, 0.6, 0.2)
    assert found["text"] == (
        "got worse: held_out mean reward 0.6 → 0.2 in 80 steps, though reward in training +0.27, "
        "driven by `correct`"
    )


def test_of_few_questions_the_reward_in_training_decides_and_is_named():
    found = said_of_rewards(Columns(correct=(0.6, 0.1)), 0.6, 0.7, num_questions=9)
    assert found["text"].startswith("got worse: reward in training 0.58")
    assert found["detail"].startswith("Interval of the change: reward in training -0.")
    assert "held_out" not in found["text"] + found["detail"]


@pytest.mark.parametrize(("n", "student"), [(10, 3.2498), (24, 2.8073), (100, 2.6264)])
def test_the_interval_of_pairs_is_students(n, student):
    """Its table, at 99%; fewer than ten pairs have none."""
    differences = [0.0, 1.0] * (n // 2)
    error = np.std(differences, ddof=1) / n**0.5
    expected = pytest.approx((0.5 - student * error, 0.5 + student * error), abs=1e-3)
    assert paired_interval(differences) == expected
    assert paired_interval(differences[:9]) is None


def test_a_pair_of_answers_is_one_of_the_same_question():
    before = {row: row / 100 for row in range(100)}
    after = {row: row / 100 + 0.01 for row in range(50, 200)}
    change = paired_change(before, after)
    assert change and change.size == 50 and change.sign == 1
    assert (change.before, change.after) == pytest.approx((0.745, 0.755))
    assert paired_change(dict.fromkeys(range(9), 0.1), dict.fromkeys(range(9), 0.9)) is None


def test_few_questions_do_not_show_that_a_reward_misleads():
    level, text = said(RISES, (0, 0.5, 2), (80, 1.0, 2))
    assert level == "note" and text.endswith(
        "accuracy 50.0% → 100.0%, from too few questions to tell"
    )


def test_a_run_does_not_learn():
    level, text = said(FLAT, (0, 0.37, 500), (80, 0.39, 500))
    assert level == "warning" and text.startswith(
        "does not learn: accuracy 37.0% → 39.0% in 80 steps, within noise"
    )
    assert "groups" not in text
    assert (
        "only 10% of the groups have rewards that differ"
        in said(Columns(mixed=0.1, a=(0.3, 0.3)))[1]
    )


def test_a_run_gets_worse_and_what_moved_first():
    collapse = {"level": "collapse", "step": 41, "metrics": ["entropy", "reward/mean"]}
    level, text = said(
        Columns(correct=(0.6, 0.1)), (0, 0.6, 500), (80, 0.2, 500), events=[collapse]
    )
    assert (level, text) == (
        "bad",
        "got worse: accuracy 60.0% → 20.0% in 80 steps; from step 41 on, `entropy` first",
    )
    assert said(Columns(correct=(0.6, 0.1)))[1].startswith("got worse: reward in training 0.585 → ")


def test_what_was_learned_can_be_lost_again():
    level, text = said(RISES, (0, 0.2, 500), (40, 0.7, 500), (80, 0.4, 500))
    assert (
        level == "warning"
        and text
        == "learned and lost again: accuracy 20.0% → 40.0% in 80 steps, but 70.0% at step 40"
    )


@pytest.mark.parametrize(
    ("columns", "points", "total"),
    [
        (Columns(6, a=(0.1, 0.9)), (), 6),
        (Columns(6, a=(0.1, 0.9)), ((0, 0.3, 40), (6, 0.45, 40)), 6),
        (Columns(15, a=(0.3, 0.3)), (), 80),
    ],
)
def test_it_can_be_too_early_to_say(columns, points, total):
    level, text = said(columns, *points, total=total)
    assert level == "none" and text.startswith("too early to say: ") and "groups" not in text


def test_an_interval_too_wide_is_too_early_whatever_the_steps():
    few, many = (Columns(steps, noise=0.1, a=(0.2, 0.2)) for steps in (10, 1000))
    assert said(few, total=10)[1] == "too early to say: 10 steps"
    assert said(many, total=1000)[1].startswith("does not learn: reward in training ")
    assert said(few, (0, 0.2, 2000), (10, 0.21, 2000), total=10)[1].startswith(
        "does not learn: accuracy "
    )
    # Whatever the reward's interval is: that of accuracy reaches from -7 to +31 points.
    flat = Columns(10, a=(0.35, 0.36))
    assert (
        said(flat, (0, 0.44, 50), (10, 0.56, 50), total=10)[1]
        == "too early to say: 10 steps, accuracy 44.0% → 56.0%"
    )


def test_without_differences_in_any_group_it_is_never_too_early():
    text = said(Columns(6, mixed=0, a=(0.3, 0.3)))[1]
    assert text == "too early to say: 6 steps; no group has rewards that differ"


def test_six_steps_are_enough_where_the_evaluations_are():
    assert said(Columns(6, a=(0.1, 0.9)), (0, 0.3, 500), (6, 0.6, 500))[0] == "good"


def test_without_right_answers_only_the_reward_is_said():
    level, text = said(RISES)
    assert (
        level == "note"
        and text.startswith("the reward rises: ")
        and text.endswith("accuracy is not measured")
    )


def test_the_interval_follows_the_number_of_questions():
    few, many = (accuracy_change(curve((0, 0.4, n), (80, 0.5, n))) for n in (50, 2000))
    assert few and many and few.sign == 0 and many.sign == 1
    assert accuracy_change(curve((0, 0.4, 500))) is None
    # Newcombe (1998), table II, (a): 56/70 - 48/80, method 10.
    other = accuracy_change(curve((0, 48 / 80, 80), (80, 56 / 70, 70)))
    assert other and (other.low, other.high) == pytest.approx((0.0524, 0.3339), abs=1e-4)


def test_noise_is_rarely_a_change():
    random = np.random.default_rng(1)
    signs = []
    for _ in range(400):
        signs.append(reward_change(random.normal(0.5, 0.1, 80).tolist()))
    assert sum(change is not None and change.sign != 0 for change in signs) <= 12
    same = reward_change((np.full(80, 0.1) + random.normal(0, 1e-12, 80)).tolist())
    assert same and same.sign == 0
