"""Countdown: problems that can be solved, held-out ones apart, and a parser that reads expressions
and nothing else."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring import score

from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import ShoalError
from shoal.tasks.countdown import PROBLEMS, solves
from shoal.tasks.generated import is_held_out
from shoal.tasks.graders import arithmetic
from shoal.tasks.graders.arithmetic import Expression
from shoal.tasks.task import Task


def section(**keys: int) -> TaskSection:
    return TaskSection(**{"name": "countdown", "num_eval_questions": 40} | keys)  # type: ignore


def load(**keys: int) -> Task:
    return load_task(section(**keys))


# ---- expressions


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, (7,)),
        ("1 + 2 * 3", 7, (1, 2, 3)),
        ("(1 + 2) * 3", 9, (1, 2, 3)),
        ("8 - 3 - 2", 3, (8, 3, 2)),
        ("8 / 4 / 2", 1, (8, 4, 2)),
        ("1 / 3", Fraction(1, 3), (1, 3)),
        ("8 / (3 - 8 / 3)", 24, (8, 3, 8, 3)),
        ("-3 + 5", 2, (3, 5)),
        ("2 * -3", -6, (2, 3)),
        ("2 - -3", 5, (2, 3)),
        ("6 × 7 ÷ 2 − 1", 20, (6, 7, 2, 1)),
        ("6 – 7", -1, (6, 7)),
        ("6\u20117", -1, (6, 7)),
        ("((((5))))", 5, (5,)),
        (" 1+1\n", 2, (1, 1)),
        ("007", 7, (7,)),
    ],
)
def test_expressions(text: str, value: int | Fraction, numbers: tuple[int, ...]) -> None:
    assert arithmetic.parse_expression(text) == Expression(Fraction(value), numbers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "1 +",
        "+ 1",
        "1 2",
        "2 (3)",
        "(1 + 2",
        "1 + 2)",
        "()",
        "1 ** 2",
        "9**9**9**9",
        "7 // 2",
        "1.5",
        "1e3",
        "1 = 1",
        "1 / 0",
        "1 / (2 - 2)",
        "x",
        "__import__('os')",
        "1; 2",
        "[1]",
        "1,2",
        "２ + ３",
        "1_000",
        "0x1f",
        "1\x00",
        "1" * 10,
        "1 + " * 60 + "1",
        "(" * 21 + "1" + ")" * 21,
        "-" * 21 + "1",
        "(" * 100_000,
        "1+" * 500_000 + "1",
        "lambda: 1",
        "1 if 1 else 2",
        "1 < 2",
        "~1",
        "1 % 2",
        "print(1)",
    ],
)
def test_what_is_no_expression(text: str) -> None:
    assert arithmetic.parse_expression(text) is None


TREES = st.recursive(
    st.integers(0, 999).map(lambda n: (str(n), Fraction(n), [n])),
    lambda below: st.tuples(below, st.sampled_from("+-*/"), below).map(lambda made: join(*made)),
    max_leaves=8,
)


def join(
    left: tuple[str, Fraction | None, list[int]],
    sign: str,
    right: tuple[str, Fraction | None, list[int]],
) -> tuple[str, Fraction | None, list[int]]:
    (a, x, m), (b, y, n) = left, right
    if x is None or y is None or (sign == "/" and y == 0):
        value = None
    else:
        value = {"+": x + y, "-": x - y, "*": x * y, "/": x / (y or 1)}[sign]
    return f"({a} {sign} {b})", value, m + n


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_expressions_come_to_what_their_tree_does(
    tree: tuple[str, Fraction | None, list[int]],
) -> None:
    text, value, numbers = tree
    expected = None if value is None else Expression(value, tuple(numbers))
    assert arithmetic.parse_expression(text) == expected


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text("0123456789+-*/() ", max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    found = arithmetic.parse_expression(text)
    assert found is None or all(str(number) in text for number in found.numbers)


# ---- answers


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("(25 - 5) * 3", True),
        ("3 * (25 - 5)", True),
        ("25 * 3 - 5 * 3", False),
        ("25 + 5 * 7", False),
        ("60", False),
        ("25 * 3 - 15", False),
        ("(25 - 5) * 3 = 60", False),
        ("(25 - 5) * 3 * 1", False),
        ("25 - 5 * 3", False),
        ("25 * 5 - 3", False),
        ("", False),
        (None, False),
    ],
)
def test_every_number_is_used_once_and_the_target_is_reached(
    answer: str | None, right: bool
) -> None:
    assert solves(answer, [3, 25, 5], 60) is right


def test_a_number_given_twice_is_used_twice() -> None:
    assert solves("4 * 4", [4, 4], 16)
    assert not solves("4 * 4", [4], 16)
    assert not solves("4", [4, 4], 4)


def test_rewards() -> None:
    task = load()
    one = task.train[0]
    right = one.columns["solution"]
    texts = [
        f"<reasoning>r</reasoning><answer>{right}</answer>",
        f"<answer>1</answer><answer> {right} </answer>",
        "<answer>1 + 1</answer>",
        "<answer>__import__('os').abort()</answer>",
        "<answer> </answer>",
        right,
        "<answer>9**9**9**9</answer>",
        f"<answer>{'(' * 10**6}</answer>",
    ]
    scores = score(task.rewards, [one], [one.prompt], [texts], [[[1]] * len(texts)])
    np.testing.assert_allclose(scores.rewards, [[1, 0.1, 0.1, 0.1, 0, 0, 0.1, 0.1]], rtol=1e-12)
    assert task.correct and task.well_formed and task.extract
    assert [task.correct(text, one) for text in texts] == [True] + [False] * 7
    assert task.extract(texts[0]) == right and task.extract("<answer> </answer>") is None
    assert [task.well_formed(text) for text in texts] == [True] * 4 + [False] * 2 + [True] * 2
    assert [task.extract(text) for text in texts[:2]] == [right, None]


# ---- problems


@pytest.mark.parametrize(("num_numbers", "max_value"), [(2, 99), (3, 20), (4, 99), (6, 30)])
def test_every_target_can_be_reached_within_the_dials(num_numbers: int, max_value: int) -> None:
    task = load(num_numbers=num_numbers, max_value=max_value)
    targets = Counter()
    for one in [*task.train[:200], *task.evaluations["held_out"]]:
        numbers, target = one.columns["numbers"], one.columns["target"]
        assert len(numbers) == num_numbers
        for number in [*numbers, target]:
            assert 1 <= number <= max_value
        assert solves(one.columns["solution"], numbers, target)
        assert (
            f"Numbers: {', '.join(map(str, numbers))}. Target: {target}."
            == one.prompt[-1]["content"]
        )  # type: ignore[index]
        targets[target] += 1
    assert len(targets) > 10


def test_held_out_problems_are_not_trained_on() -> None:
    keys = section(num_numbers=2, max_value=20)
    held = PROBLEMS.held_out(500, keys)
    trained = [PROBLEMS.train(row, keys) for row in range(2000)]
    for problem in held:
        assert is_held_out(PROBLEMS.key(problem))
    assert not {problem.normal_form for problem in held} & {
        problem.normal_form for problem in trained
    }
    assert len({problem.normal_form for problem in held}) == len(held)
    assert PROBLEMS.held_out(5, keys) == held[:5]


def test_rows_are_the_same_on_every_machine() -> None:
    """Written down once: another number is another data set, which stored runs would not be resumed
    on."""
    one, last = load().train[0], load().train[-1]
    assert (one.row, one.columns["numbers"], one.columns["target"]) == (0, [14, 9, 90, 16], 51)
    assert one.columns["solution"] == "90 - ((16 + 9) + 14)"
    assert last.row == len(load().train) - 1
    assert load().train[7] == load().train[7] != load(max_value=50).train[7]


def test_the_dials_and_the_path(tmp_path: object) -> None:
    assert len(load(num_eval_questions=0).evaluations["held_out"]) == 500
    small = load(num_numbers=2, max_value=20, num_eval_questions=500)
    assert small.notes == (
        f"countdown: held_out has {len(small.evaluations['held_out'])} problems, not 500: there "
        "are no more at task.num_numbers=2 task.max_value=20",
    )
    with pytest.raises(
        ShoalError, match=r"task.path='x': the task countdown makes its own problems"
    ):
        load_task(TaskSection(name="countdown", path="x"))
