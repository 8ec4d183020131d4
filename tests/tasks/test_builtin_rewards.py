"""Reward functions known by name: the numbers of TRL's own, and errors of names and arguments."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import ShoalError
from shoal.tasks.builtin_rewards import (
    accuracy_reward,
    cosine_scaled_reward,
    find_builtin,
    reasoning_accuracy_reward,
    repetition_penalty,
    think_format_reward,
    verl_reward,
)
from shoal.tasks.graders import dapo

# completion, solution, and what TRL 1.16.0 gives: accuracy, reasoning accuracy, think format
RECORDED = [
    ("\\boxed{\\frac{1}{3}}", "\\frac{1}{3}", 1.0, 0.0, 0.0),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{3}", 0.0, 0.0, 0.0),
    ("so $x=5$", "5", 0.0, 0.0, 0.0),
    ("5", "5", 0.0, 0.0, 0.0),
    ("The answer is 5.", "$5$", 0.0, 0.0, 0.0),
    ("\\boxed{0.5}", "$\\frac{1}{2}$", 1.0, 0.0, 0.0),
    ("\\boxed{x+1}", "$1+x$", 1.0, 0.0, 0.0),
    ("$7$ then $8$", "$8$", 0.0, 0.0, 0.0),
    ("\\boxed{3} and $4$", "3", 1.0, 0.0, 0.0),
    ("\\boxed{5\\text{ cm}}", "$5$", 1.0, 0.0, 0.0),
    ("nothing", "none", None, 0.0, 0.0),
    ("\\boxed{3}", "", None, 0.0, 0.0),
    ("<think>a \\boxed{2}</think> \\boxed{3}", "3", 0.0, 1.0, 1.0),
    ("<think>a \\boxed{3}", "3", 1.0, 0.0, 0.0),
    ("", "4", 0.0, 0.0, 0.0),
    ("\\boxed{10\\%}", "$10$", 0.0, 0.0, 0.0),
    ("\\[ x^2 \\]", "$x \\cdot x$", 0.0, 0.0, 0.0),
    ("<think>\nok\n</think>\nyes", "1", 0.0, 0.0, 1.0),
    ("<think><think></think>", "1", 0.0, 0.0, 0.0),
    (" <think>a</think>b", "1", 0.0, 0.0, 0.0),
    ("<think>a</think>", "1", 0.0, 0.0, 1.0),
    ("x\n<think>a</think>", "1", 0.0, 0.0, 0.0),
    ("<think>a</think> <think>", "1", 0.0, 0.0, 0.0),
]
LENGTHS = [
    [0] * 0,
    [0] * 1,
    [0] * 50,
    [0] * 100,
    [0] * 150,
    [1, 2, 3, 1, 2, 3],
    [5, 5, 5, 5, 5, 5],
    [1, 2],
]
RIGHT = [
    1.0,
    0.999876640091433,
    0.75,
    0.5,
    0.5,
    0.9955718126821722,
    0.9955718126821722,
    0.999506682107068,
]
REPEATED = [
    0.0,
    0.0,
    -0.9791666666666666,
    -0.9897959183673469,
    -0.9932432432432432,
    -0.25,
    -0.75,
    0.0,
]
PAIRS = [0.0, 0.0, -0.4897959183673469, -0.494949494949495, -0.4966442953020134, -0.2, -0.4, 0.0]


def messages(texts: list[str]) -> list[Any]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.slow
def test_rewards_of_texts_equal_trls() -> None:
    completions, solutions = messages([row[0] for row in RECORDED]), [row[1] for row in RECORDED]
    assert accuracy_reward(completions, solution=solutions) == [row[2] for row in RECORDED]
    assert accuracy_reward([row[0] for row in RECORDED], solution=solutions) == [
        row[2] for row in RECORDED
    ]
    assert reasoning_accuracy_reward(completions, solution=solutions) == [
        row[3] for row in RECORDED
    ]
    assert think_format_reward(completions) == [row[4] for row in RECORDED]


def test_rewards_of_lengths_equal_trls() -> None:
    cosine = cosine_scaled_reward(100)
    texts = messages(["\\boxed{3}"] * len(LENGTHS))
    assert cosine(texts, solution=["3"] * len(LENGTHS), completion_ids=LENGTHS) == pytest.approx(
        RIGHT, abs=1e-12
    )
    wrong = cosine(texts, solution=["4"] * len(LENGTHS), completion_ids=LENGTHS)
    assert wrong == pytest.approx([-one for one in RIGHT], abs=1e-12)
    assert cosine(texts[:1], solution=[""], completion_ids=[[]]) == [None]
    assert repetition_penalty()(completion_ids=LENGTHS) == pytest.approx(REPEATED, abs=1e-12)
    assert repetition_penalty(2, -0.5)(completion_ids=LENGTHS) == pytest.approx(PAIRS, abs=1e-12)
    overlong = find_builtin(
        "get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)"
    )
    assert overlong is not None
    found = overlong.function(completion_ids=[[0] * n for n in (1, 80, 81, 90, 100, 101)])
    assert found == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])


@pytest.mark.slow
def test_a_hostile_completion_ends_and_is_wrong() -> None:
    assert accuracy_reward(["\\boxed{9^{9^{9^{9}}}}"], solution=["7"]) == [0.0]


def test_names_stand_for_functions_of_a_run() -> None:
    names = (
        "accuracy_reward",
        "get_soft_overlong_punishment",
        "get_repetition_penalty_reward(ngram_size=2)",
    )
    task = load_task(TaskSection(num_eval_questions=1), RewardSection(names, (1.0, 0.5, 0.25)))
    assert [(one.name, one.weight, one.runs_in_process) for one in task.rewards] == [
        ("accuracy_reward", 1.0, True),
        ("soft_overlong_punishment_reward", 0.5, True),
        ("repetition_penalty_reward", 0.25, True),
    ]
    lengths = task.rewards[1].function(completion_ids=[[0] * 1024, [0] * 1152])
    assert lengths == [0.0, -0.5]  # 1280 and 256, as in TRL's script


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "acuracy_reward",
            r"expected `file\.py:function`, or the name of a ready one, did you mean "
            r"accuracy_reward\?",
        ),
        ("correctness_reward", "for your own, write reward=FILE.py:correctness_reward"),
        (
            "get_cosine_scaled_reward",
            "missing 1 required positional argument: 'max_len'; expected get_cosine_scaled_rew",
        ),
        ("get_repetition_penalty_reward(size=2)", "unexpected keyword argument 'size'"),
        ("get_repetition_penalty_reward(max_penalty=1)", "max_penalty=1: expected 0 or less"),
        ("get_cosine_scaled_reward(max_len=open('x'))", "malformed node"),
        ("accuracy_reward(1)", "accuracy_reward takes no arguments"),
    ],
)
def test_a_wrong_name_or_argument_is_an_error(spec: str, message: str) -> None:
    with pytest.raises(ShoalError, match=message):
        load_task(TaskSection(num_eval_questions=1), RewardSection((spec,)))


def test_a_file_is_no_name() -> None:
    assert find_builtin("rewards.py:f") is None


# what verl 0.9.1's math_dapo gives: (completion, ground truth, right, answer)
DAPO = [
    ("So 2 + 3 = 5.\nAnswer: 5", "5", True, "5"),
    ("answer :  x = \\frac12 meters", "\\frac{1}{2}", True, "\\frac{1}{2}"),
    ("Answer: 5.", "5", False, "5."),
    ("Answer: $5$.", "5", True, "5"),
    ("Answer: 4\nAnswer: 1,234", "1234", True, "1234"),  # the last one
    ("Answer: 5" + " and so on" * 40, "5", False, None),  # too far from the end
    ("it is \\boxed{\\text{a}}", "\\text{a}", True, "\\text{a}"),
    ("it is \\boxed{ 5 }", "5", False, " 5 "),  # a box is compared as it is written
    ("\\boxed{5}" + "." * 100, "5", False, None),
    ("Answer: no \\boxed{5}", "5", False, "no5"),  # stated before the box
    ("\\boxed{5", "5", False, None),
    ("Answer: 30^\\circ", "30", True, "30"),
    ("Answer: a \\textbf{square} root \\sqrt2", "root\\sqrt{2}", True, "root\\sqrt{2}"),
    ("", "5", False, None),
]


@pytest.mark.parametrize(("completion", "truth", "right", "answer"), DAPO)
def test_dapos_grader_reads_what_verl_reads(completion, truth, right, answer):
    assert dapo.grade(completion, truth) == (right, answer)


def test_verls_reward_is_that_of_each_rows_source():
    logged: dict[str, Any] = {}
    truth = {"ground_truth": "5"}
    sources = ["openai/gsm8k", "math_dapo", "aime2024", "math_dapo"]
    texts = ["#### 5", "Answer: 5", "Answer: 6", "#### 5"]
    scores = verl_reward(texts, sources, [truth] * 4, logged.__setitem__)
    assert scores == [1.0, 1.0, -1.0, -1.0]
    assert logged == {"acc": [1.0, 1.0, 0.0, 0.0], "pred": [None, "5", "6", None]}
    logged.clear()
    assert verl_reward(texts[:1], sources[:1], [truth], logged.__setitem__) == [1.0]
    assert logged == {"acc": [1.0]}
    assert verl_reward(texts[1:2], sources[1:2], [truth]) == [1.0]
    with pytest.raises(ValueError, match="data_source=codecontests: only GSM8K, MATH and DAPO"):
        verl_reward(["x"], ["codecontests"], [truth])
