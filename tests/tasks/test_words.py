"""`words`: solutions are right, held-out problems are fixed and never trained on, unseen sentences
stay unseen."""

from __future__ import annotations

import hashlib
import os
import random
import re
import string
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring import score

from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import Example, ShoalError
from shoal.tasks import words
from shoal.tasks.generated import NUM_TRAIN, is_held_out
from shoal.tasks.task import Task
from shoal.tasks.words import PROBLEMS, SEEN, UNSEEN, Problem

DIALS = TaskSection()
HELD_OUT_DIGEST = "2143aacd04e2f49b83795d9a2372b2e8"
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\.")

dials = st.builds(TaskSection, num_steps=st.integers(1, 8), max_value=st.integers(20, 500))
rows = st.integers(0, NUM_TRAIN - 1)


@pytest.fixture(scope="module")
def task() -> Task:
    return load_task(DIALS)


def digest(examples: Any) -> str:
    text = "\n".join(f"{e.row} {e.prompt} {sorted(e.columns.items())}" for e in examples)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def held_out_problems(count: int = 500) -> tuple[Problem, ...]:
    return PROBLEMS.held_out(count, DIALS) + PROBLEMS.held_out(count, DIALS, "unseen_templates")


# ---- solutions


def check_solution(problem: Problem, section: TaskSection) -> None:
    """Reads the worked text as a stranger would, and redoes its arithmetic."""
    found = re.fullmatch(r"<reasoning>(.+)</reasoning><answer>(\d+)</answer>", problem.solution)
    assert found is not None
    equations = EQUATION.findall(found[1])
    assert " ".join("{} {} {} = {}.".format(*equation) for equation in equations) == found[1]
    assert len(equations) == section.num_steps
    value = int(equations[0][0])
    for left, operation, right, result in equations:
        assert int(left) == value
        operand, value = int(right), int(result)
        before = {
            "+": value - operand,
            "-": value + operand,
            "*": value / operand,
            "/": value * operand,
        }[operation]
        assert int(left) == before
        assert min(value, operand) >= 1 and max(value, int(left)) <= section.max_value
        assert operand in range(2, 6) or operation in "+-"
    assert int(found[2]) == value == problem.answer


@settings(deadline=None)
@given(rows, dials, st.booleans())
def test_worked_solutions_are_right_at_any_dials(
    row: int, section: TaskSection, pretraining: bool
) -> None:
    problem = PROBLEMS.train(row, section, "pretrain" if pretraining else "train")
    check_solution(problem, section)
    assert problem == PROBLEMS.train(row, section, "pretrain" if pretraining else "train")


def test_held_out_solutions_are_right() -> None:
    for problem in held_out_problems():
        check_solution(problem, DIALS)


def test_the_question_tells_every_number_in_order() -> None:
    for problem in (*(PROBLEMS.train(row, DIALS) for row in range(500)), *held_out_problems(200)):
        told = []
        for n in re.findall(r"\d+", problem.question.replace("twice", "2 times")):
            told.append(int(n))
        assert told == [problem.start, *(step.operand for step in problem.steps)]
        assert problem.name in problem.question
        assert not re.search(r"[{}]|  ", problem.question)
        assert problem.friend != problem.name
        assert problem.question.count("?") == 1


def numeric_form(problem: Problem) -> str:
    return words.numeric_form((problem.start, problem.steps))


def template_ids(problem: Problem) -> list[str]:
    """Such as `seen:+:3`, one a sentence, in order."""
    kind = "unseen" if problem.unseen else "seen"
    result = []
    for part, index in zip(problem.sentence_kinds, problem.templates, strict=True):
        result.append(f"{kind}:{part}:{index}")
    return result


def test_problems_are_short_and_varied(task: Task) -> None:
    problems = [PROBLEMS.train(row, DIALS) for row in range(2000)]
    lengths = [len(problem.question.split()) for problem in problems]
    assert 28 < np.mean(lengths) < 40
    assert max(lengths) < 50
    # but for names
    assert len({(numeric_form(problem), *template_ids(problem)) for problem in problems}) > 1990
    used = {part for problem in problems for part in template_ids(problem)}
    assert used == {
        f"seen:{part}:{i}" for part, templates in SEEN.items() for i in range(len(templates))
    }
    operations = []
    for problem in problems:
        for step in problem.steps:
            operations.append(step.operation.value)
    for operation in "+-*/":
        assert operations.count(operation) > 0.1 * len(operations)
    assert (
        len({problem.name for problem in problems})
        == 24
        == len({problem.objects for problem in problems})
    )


# ---- splits


def test_no_held_out_problem_is_trained_on_whatever_its_words() -> None:
    held = {numeric_form(problem) for problem in held_out_problems()}
    for row in range(4000):
        for problem in (PROBLEMS.train(row, DIALS), PROBLEMS.train(row, DIALS, "pretrain")):
            assert numeric_form(problem) not in held
            assert not is_held_out(numeric_form(problem))
    for form in held:
        assert is_held_out(form)


@pytest.mark.slow
@settings(deadline=None)
@given(dials, rows)
def test_splits_are_disjoint_at_other_dials_too(section: TaskSection, row: int) -> None:
    held = {numeric_form(problem) for problem in PROBLEMS.held_out(5, section)}
    trained = {numeric_form(PROBLEMS.train(other, section)) for other in range(row, row + 20)}
    for form in held:
        assert is_held_out(form)
    assert not any(is_held_out(form) for form in trained)


@pytest.mark.slow
def test_few_possible_problems_are_still_split() -> None:
    """One step up to 20: a few hundred problems in all, so thousands of rows meet every one of
    them."""
    section = TaskSection(num_steps=1, max_value=20)
    held = {numeric_form(problem) for problem in PROBLEMS.held_out(500, section)}
    trained = {numeric_form(PROBLEMS.train(row, section)) for row in range(4000)}
    assert 10 < len(held) < 50 and len(trained) > 300
    assert not held & trained
    small = load_task(section)
    assert len(small.evaluations["held_out"]) == len(held)
    assert small.notes[0] == (
        f"words: held_out has {len(held)} problems, not 500: there are no more at "
        "task.num_steps=1 task.max_value=20"
    )


def test_numeric_forms_forget_words_alone() -> None:
    problem = PROBLEMS.train(0, DIALS)
    reworded = Problem(
        problem.start,
        problem.steps,
        (5 - problem.templates[0], *problem.templates[1:]),
        False,
        "Zoe",
        "Max",
        "cars",
    )
    assert numeric_form(problem) == numeric_form(reworded) and problem.question != reworded.question
    other = Problem(
        problem.start + 1, problem.steps, problem.templates, False, "Zoe", "Max", "cars"
    )
    assert numeric_form(problem) != numeric_form(other)


@pytest.mark.slow
def test_held_out_problems_are_distinct_and_cut_from_one_order(task: Task) -> None:
    assert list(task.evaluations) == ["held_out", "unseen_templates"]
    for name, examples in task.evaluations.items():
        assert len(examples) == 500
        assert len({example.prompt[0]["content"] for example in examples}) == 500  # type: ignore
        shorter = load_task(TaskSection(num_eval_questions=7)).evaluations[name]
        assert list(shorter) == list(examples[:7])
    held = [numeric_form(problem) for problem in PROBLEMS.held_out(500, DIALS)]
    assert len(set(held)) == 500
    assert load_task(TaskSection(num_eval_questions=0)).evaluations == task.evaluations
    evaluated = []
    for examples in task.evaluations.values():
        for example in examples:
            evaluated.append(example.row)
    assert len(set(evaluated)) == 1000  # no two questions of one evaluation share their noise


@pytest.mark.slow
def test_held_out_is_the_same_everywhere(task: Task) -> None:
    """Whatever the seed: neither Python's random state nor its hash seed reaches it, and it stays
    as published."""
    examples = [
        *task.evaluations["held_out"],
        *task.evaluations["unseen_templates"],
        *task.train[:50],
    ]
    assert digest(examples) == HELD_OUT_DIGEST
    PROBLEMS.held_out.cache_clear()
    random.seed(1234)
    again = load_task(DIALS)
    random.seed()
    assert (
        digest(
            [
                *again.evaluations["held_out"],
                *again.evaluations["unseen_templates"],
                *again.train[:50],
            ]
        )
        == HELD_OUT_DIGEST
    )
    code = (
        "import sys; from shoal.config.train import TaskSection; from shoal.job.task import "
        "load_task; "
        "t = load_task(TaskSection(num_eval_questions=40)); "
        "print(*(e.prompt[0]['content'] for r in t.evaluations.values() for e in r), sep='\\n'); "
        "assert 'jax' not in sys.modules"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONHASHSEED": "77"},
    ).stdout.splitlines()
    assert told == [e.prompt[0]["content"] for r in task.evaluations.values() for e in r[:40]]


def pattern(template: str) -> re.Pattern[str]:
    """Matches a sentence made from a template, whatever its words."""
    pieces = (
        re.escape(text) + (r"[\w ]+" if name else "")
        for text, name, *_ in string.Formatter().parse(template)
    )
    return re.compile("".join(pieces))


@pytest.mark.slow
def test_unseen_sentences_never_occur_in_training() -> None:
    assert SEEN.keys() == UNSEEN.keys()
    for part in SEEN:
        assert len(SEEN[part]) >= 6 and len(UNSEEN[part]) >= 3
        assert len(set(SEEN[part] + UNSEEN[part])) == len(SEEN[part]) + len(UNSEEN[part])
    unseen = []
    for templates in UNSEEN.values():
        for template in templates:
            unseen.append(pattern(template))
    told = PROBLEMS.held_out(200, DIALS, "unseen_templates")
    for problem in told:
        for sentence in sentences(problem):
            assert any(p.fullmatch(sentence) for p in unseen)
    for row in range(1000):
        for problem in (PROBLEMS.train(row, DIALS), PROBLEMS.train(row, DIALS, "pretrain")):
            for name in template_ids(problem):
                assert name.startswith("seen:")
            assert not any(p.fullmatch(sentence) for p in unseen for sentence in sentences(problem))
    for problem in told:
        for name in template_ids(problem):
            assert name.startswith("unseen:")


def sentences(problem: Problem) -> list[str]:
    return re.split(r"(?<=[.?]) ", problem.question)


# ---- the data set


def test_training_rows_are_made_when_asked_for(task: Task) -> None:
    train = task.train
    assert len(train) == 1_000_000
    assert train[17] == train[17] == train[np.int64(17)] == train[17 - 1_000_000]  # type: ignore
    assert train[17].row == 17
    assert train[-1].row == 999_999
    assert [example.row for example in train[3:9:2]] == [3, 5, 7]
    assert train[17].prompt != train[18].prompt
    for index in (1_000_000, -1_000_001):
        with pytest.raises(IndexError, match="of 1000000"):
            train[index]
    example = train[17]
    problem = PROBLEMS.train(17, DIALS)
    assert example.prompt == [{"role": "user", "content": problem.question}]
    assert example.columns == {"answer": str(problem.answer), "solution": problem.solution}


def test_pretraining_draws_other_problems() -> None:
    assert (
        sum(
            PROBLEMS.train(row, DIALS) == PROBLEMS.train(row, DIALS, "pretrain")
            for row in range(200)
        )
        == 0
    )


@pytest.mark.parametrize(("num_steps", "max_value"), [(1, 20), (2, 99), (5, 30), (8, 1000)])
def test_the_dials_make_problems_longer_and_numbers_larger(num_steps: int, max_value: int) -> None:
    section = TaskSection(num_steps=num_steps, max_value=max_value, num_eval_questions=20)
    task = load_task(section)
    problems = [PROBLEMS.train(row, section) for row in range(300)]
    assert {len(problem.steps) for problem in problems} == {num_steps}
    assert (
        0.8 * max_value
        < max(value for problem in problems for value in problem.values)
        <= max_value
    )
    assert task.evaluations["held_out"][0].columns["solution"].count("=") == num_steps
    assert task.train[0].columns["answer"] == str(problems[0].answer)


def test_a_path_is_refused() -> None:
    with pytest.raises(ShoalError, match=r"task.path='x'.*makes its own problems"):
        load_task(TaskSection(path="x"))


# ---- rewards


def test_rewards_and_correctness(task: Task) -> None:
    example = task.train[0]
    gold, solution = example.columns["answer"], example.columns["solution"]
    texts = [
        solution,
        f"<answer>{gold}.0</answer>",
        f"<reasoning>guess</reasoning><answer>{gold}1</answer>",
        gold,
        f"{solution}<answer>{gold}</answer>",
    ]
    scores = score(task.rewards, [example], [example.prompt], [texts], [[[1]] * 5])
    np.testing.assert_array_equal(scores.components["correct"], [[1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(scores.components["format"], [[1, 0, 1, 0, 0]])
    np.testing.assert_allclose(scores.rewards, [[1.1, 1.0, 0.1, 0, 0]], rtol=1e-12)
    assert task.correct is not None and task.well_formed is not None
    assert [task.correct(text, example) for text in texts] == [True, True, False, False, False]
    assert [task.well_formed(text) for text in texts] == [True, False, True, False, False]


def test_every_solution_earns_the_whole_reward(task: Task) -> None:
    examples: list[Example] = [*task.train[:100], *task.evaluations["unseen_templates"][:100]]
    texts = [[example.columns["solution"]] for example in examples]
    scores = score(
        task.rewards, examples, [e.prompt for e in examples], texts, [[[1]]] * len(examples)
    )
    np.testing.assert_allclose(scores.rewards, 1.1, rtol=1e-12)
