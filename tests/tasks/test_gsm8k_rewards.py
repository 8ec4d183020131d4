"""GSM8K's reward presets against tables worked by hand, and the answer check for solutions made
elsewhere."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring import score

from shoal.compat.gsm8k_rewards import exact_answer, has_reasoning_and_answer, hash_answer
from shoal.config.sections.reward import REWARD_PRESETS, RewardSection
from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import Example, ShoalError
from shoal.tasks.graders.answer import final_number, last_boxed
from shoal.tasks.graders.numbers import answer_key, number_in, write_number
from shoal.tasks.gsm8k import load_reward_preset, verdict
from shoal.tasks.task import Task

PRESETS = {name: load_reward_preset(name) for name in REWARD_PRESETS}
GOOD = "<reasoning>6 * 7 = 42</reasoning>\n<answer>42</answer>"


def example(gold: str) -> Example:
    return Example(0, [{"role": "user", "content": "?"}], {"answer": gold})


def scored(preset: str, text: str, gold: str) -> list[float]:
    """The points of each function, then the weighted sum."""
    case = example(gold)
    scores = score(PRESETS[preset].rewards, [case], [case.prompt], [[text]], [[[1]]])
    return [float(scores.components[one.name][0, 0]) for one in PRESETS[preset].rewards] + [
        float(scores.rewards[0, 0])
    ]


# ---- tables: text, gold, points of each function, sum


@pytest.mark.parametrize(
    ("text", "gold", "points"),
    [
        (GOOD, "42", [1, 1, 1.1]),
        ("<answer>42</answer>", "42", [1, 0, 1.0]),
        ("<answer>7</answer> no: <answer>$42.00</answer>", "42", [1, 0, 1.0]),
        ("<reasoning>r</reasoning><answer>41</answer>", "42", [0, 1, 0.1]),
        ("<reasoning>r</reasoning><answer>42 apples</answer>", "42", [0, 1, 0.1]),
        ("so <reasoning>r</reasoning><answer>42</answer>", "42", [1, 0, 1.0]),
        ("#### 42", "42", [0, 0, 0]),
        ("", "42", [0, 0, 0]),
        ("<reasoning>r</reasoning><answer>1,200</answer>", "1200", [1, 1, 1.1]),
        *(
            (f"<answer>{wrong}</answer>", "42", [0, 0, 0])
            for wrong in ("4 2", "4%2", "4$2", "4\n2", "4-2", "0 42")
        ),
        *(
            (f"<answer>{right}</answer>", "1200", [1, 0, 1])
            for right in ("1 200", "1\u202f200.0", "$ 1200 .", "1,200 %", "+ $1200")
        ),
        ("<answer>-$5</answer>", "-5", [1, 0, 1]),
        ("<answer>$-5</answer>", "-5", [1, 0, 1]),
    ],
)
def test_shoal(text: str, gold: str, points: list[float]) -> None:
    np.testing.assert_allclose(scored("shoal", text, gold), points, rtol=1e-12)


@pytest.mark.parametrize(
    ("text", "gold", "points"),
    [
        (GOOD, "42", [1, 1, 1.1]),
        # anything around
        ("Well: <reasoning>r</reasoning> so <answer> 42 </answer> done", "42", [1, 1, 1.1]),
        ("<answer>42</answer>", "42", [1, 0, 1.0]),
        ("<answer>42</answer><reasoning>r</reasoning>", "42", [1, 0, 1.0]),  # the wrong way round
        ("<reasoning></reasoning><answer>42</answer>", "42", [1, 1, 1.1]),  # nothing was reasoned
        ("so \\boxed{42}", "42", [1, 0, 1.0]),  # no tag: the last box
        ("<answer>41</answer> or \\boxed{42}", "42", [0, 0, 0]),
        # the last one counts
        ("<reasoning>r</reasoning><answer>7</answer><answer>42</answer>", "42", [1, 1, 1.1]),
        ("<reasoning>r</reasoning><answer>42 apples</answer>", "42", [1, 1, 1.1]),
        ("<reasoning>r</reasoning><answer>$1,200.00</answer>", "1200", [1, 1, 1.1]),
        ("<reasoning>r</reasoning><answer>\\boxed{\\frac{84}{2}}</answer>", "42", [1, 1, 1.1]),
        ("<reasoning>r</reasoning><answer>6 * (3 + 4)</answer>", "42", [1, 1, 1.1]),
        ("<reasoning>r</reasoning><answer>x = 42</answer>", "42", [1, 1, 1.1]),
        ("<reasoning>r</reasoning><answer>40 + 3</answer>", "42", [0, 1, 0.1]),
        ("<reasoning>r</reasoning><answer>3 boxes of 14 = 42 apples.</answer>", "42", [1, 1, 1.1]),
        ("<reasoning>r</reasoning><answer>42 or 43</answer>", "42", [0, 1, 0.1]),  # two numbers
        ("<reasoning>r</reasoning><answer>43, no, 42</answer>", "42", [0, 1, 0.1]),
        ("<reasoning>r</reasoning><answer>42 boxes of 3</answer>", "42", [0, 1, 0.1]),
        ("<reasoning>r</reasoning><answer>The answer is 42</answer>", "42", [0, 1, 0.1]),
        ("<reasoning>r</reasoning><answer>+42,</answer>", "42", [1, 1, 1.1]),
        ("<reasoning>r</reasoning><answer>none</answer>", "42", [0, 1, 0.1]),
        ("<reasoning>r</reasoning>42", "42", [0, 0, 0]),
    ],
)
def test_maxtext(text: str, gold: str, points: list[float]) -> None:
    np.testing.assert_allclose(scored("maxtext", text, gold), points, rtol=1e-12)


@pytest.mark.parametrize(
    ("text", "gold", "points"),
    [  # format, tags, answer, number
        (GOOD, "42", [3, 2, 3, 1.5, 9.5]),  # all that can be had; 5 of it for the format
        ("<reasoning>r</reasoning><answer> 42 </answer>", "42", [3, 2, 3, 1.5, 9.5]),
        ("<reasoning>r</reasoning><answer>42.0</answer>", "42", [3, 2, 3, 1.5, 9.5]),
        ("<reasoning>r</reasoning><answer>45</answer>", "42", [3, 2, 0.5, 0, 5.5]),  # 1.07
        ("<reasoning>r</reasoning><answer>50</answer>", "42", [3, 2, 0.25, 0, 5.25]),  # 1.19
        ("<reasoning>r</reasoning><answer>33</answer>", "42", [3, 2, -1, 0, 4.0]),  # 0.79
        ("<reasoning>r</reasoning><answer>110</answer>", "100", [3, 2, 0.5, 0, 5.5]),  # 1.1 itself
        ("<reasoning>r</reasoning><answer>80</answer>", "100", [3, 2, 0.25, 0, 5.25]),  # 0.8 itself
        ("<reasoning>r</reasoning><answer>42 apples</answer>", "42", [3, 2, -0.5, 1.5, 6.0]),
        # the number ends at the comma
        ("<reasoning>r</reasoning><answer>1,200</answer>", "1200", [3, 2, 3, 0, 8.0]),
        ("<reasoning>r</reasoning><answer>5</answer>", "0", [3, 2, -1, 0, 4.0]),  # no ratio to 0
        ("<reasoning>r</reasoning><answer>0</answer>", "0", [3, 2, 3, 1.5, 9.5]),
        ("<answer>42</answer>", "42", [0, 0, 0, 1.5, 1.5]),  # two tags of four
        # anything around
        ("so <reasoning>r</reasoning><answer>42</answer>", "42", [3, 2, 3, 1.5, 9.5]),
        ("<reasoning>r</reasoning><answer>42", "42", [3, 1, 3, 1.5, 8.5]),  # up to the line's end
        ("<reasoning>r</reasoning><answer>42\nof them</answer>", "42", [3, 2, 3, 1.5, 9.5]),
        # nothing was reasoned
        ("<reasoning></reasoning><answer>42</answer>", "42", [0, 2, 0, 1.5, 3.5]),
        ("so\n<reasoning>r</reasoning><answer>42</answer>", "42", [3, 2, 3, 1.5, 9.5]),
        ("<reasoning>r</reasoning><answer>42</answer> done", "42", [3, 2, 3, 1.5, 9.5]),
        (
            "<reasoning>r</reasoning><answer>42</answer><answer>42</answer>",
            "42",
            [3, 1 - 1, 3, 1.5, 7.5],
        ),
        # digits of any script are numbers there
        ("<answer>\u0664\u0662 apples</answer>", "42", [0, 0, 0, 1.5, 1.5]),
        ("<answer>\uff14\uff12</answer>", "42", [0, 0, 0, 1.5, 1.5]),
        ("<answer>4\u00b2</answer>", "4", [0, 0, 0, 1.5, 1.5]),  # but not what is raised
        ("42", "42", [0, -2, 0, 0, -2]),
        ("", "42", [0, -2, 0, 0, -2]),
    ],
)
def test_tunix(text: str, gold: str, points: list[float]) -> None:
    np.testing.assert_allclose(scored("tunix", text, gold), points, rtol=1e-12)


@pytest.mark.parametrize(
    ("text", "gold", "points"),
    [
        ("<think>t</think><answer>42</answer>", "42", [1, 1, 1.0]),
        ("<answer>42</answer>", "42", [1, 1, 1.0]),  # thoughts are not asked for
        ("<answer> $42.00. </answer>", "42", [1, 1, 1.0]),
        ("<answer>1,200</answer>", "1200", [1, 1, 1.0]),
        ("<answer>120</answer>", "12", [0, 1, 0.1]),  # zeros go only behind a decimal point
        ("<answer>41</answer>", "42", [0, 1, 0.1]),
        ("<answer>42 apples</answer>", "42", [0, 1, 0.1]),
        ("<answer>41</answer><answer>42</answer>", "42", [0, 1, 0.1]),  # the first one counts
        ("<answer> </answer>", "42", [0, 0, 0]),
        ("<answer>42", "42", [0, 0, 0]),
        ("42", "42", [0, 0, 0]),
    ],
)
def test_torchrl(text: str, gold: str, points: list[float]) -> None:
    np.testing.assert_allclose(scored("torchrl", text, gold), points, rtol=1e-12)


@pytest.mark.parametrize(
    ("text", "gold", "points"),
    [
        ("6 * 7 = 42\n#### 42", "42", [1, 1]),
        ("#### 1,200", "1200", [1, 1]),
        ("#### -5", "-5", [1, 1]),
        ("#### 41\n#### 42", "42", [1, 1]),  # the last one counts
        ("#### 42.", "42", [0, 0]),  # text for text
        ("#### 42.0", "42", [0, 0]),
        ("#### $42", "42", [0, 0]),
        ("####42", "42", [0, 0]),
        ("#### 42" + "x" * 294, "42", [0, 0]),  # cut off by the last 300 characters
        ("#### 42" + "x" * 293, "42", [1, 1]),
        ("<answer>42</answer>", "42", [0, 0]),
    ],
)
def test_verl(text: str, gold: str, points: list[float]) -> None:
    np.testing.assert_allclose(scored("verl", text, gold), points, rtol=1e-12)


# ---- what presets do besides


TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
SAID = [
    "The answer is ",
    "Answer:",
    "A:",
    "#### ",
    "\\boxed{",
    "}",
    "?",
    "!",
    ".",
    " ",
    "\n",
    "*",
    "$",
    "\\$",
    "-",
    "4",
    "2",
    "x",
    "=",
    "**",
    "\\(",
    "\\)",
    "\\[",
    "\\]",
    "√",
    "sqrt(",
]
"""Pieces of solutions."""
PIECES = st.lists(
    st.sampled_from([*TAGS, *TAGS, "a", " ", "\n", "7", ".", "\r", "\u2003"]), max_size=14
).map("".join)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(PIECES)
def test_formats_are_what_the_patterns_of_their_systems_match(text: str) -> None:
    anywhere = re.compile(r"<reasoning>.*?</reasoning>.*?<answer>(.+?)</answer>", re.DOTALL)
    lines = re.compile(
        r"<reasoning>.+?</reasoning>.*?<answer>(.+?)(?:</answer>|$)", re.DOTALL | re.MULTILINE
    )
    assert has_reasoning_and_answer(text) == bool(anywhere.search(text))
    match = lines.search(text)
    assert exact_answer(text) == (match[1] if match else None)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=40)
    | PIECES
    | st.text("#<>/-.,$ 0123456789e\n", max_size=30)
    | st.lists(st.sampled_from(SAID), max_size=10).map("".join),
    st.sampled_from(sorted(PRESETS)),
)
def test_no_text_breaks_a_preset(text: str, preset: str) -> None:
    for gold in ("42", "0", "-1.5"):
        assert all(np.isfinite(scored(preset, text, gold)))
        assert isinstance(PRESETS[preset].right(PRESETS[preset].answer(text), gold), bool)
    found = final_number(text)
    assert found is None or (
        isinstance(found, Fraction) and number_in(write_number(found) or "") == found
    )


@pytest.mark.parametrize(
    "text",
    [
        "<reasoning>" * 20_000,
        "x" + "<reasoning>" * 20_000,
        "<answer>" * 20_000,
        "\\boxed{" * 20_000,
        "9" * 200_000,
        "<answer>" + "9" * 200_000 + "</answer>",
        "1," * 100_000,
        "answer to " * 20_000,
        "the answer is " * 20_000,
        "**a" * 60_000,
        "<<" * 90_000,
        "#### $" * 30_000,
        " " * 200_000,
        "\nA:" * 60_000,
        "<answer>" + "\\frac{1" * 20_000,
    ],
)
@pytest.mark.timeout(60)
def test_long_texts_cost_little_and_earn_nothing(text: str) -> None:
    for name, preset in PRESETS.items():
        assert not preset.right(preset.answer(text), "42"), name
        assert scored(name, text, "42")[-1] <= 0.1
        answer_key(preset.answer(text))
    assert not verdict(text, example("42"))["correct"]


def write(folder: Path, rows: list[dict[str, str]]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, preset: str) -> Task:
    return load_task(TaskSection(name="gsm8k", path=str(path)), RewardSection(preset=preset))


@pytest.mark.parametrize(
    ("preset", "roles", "asked", "right", "wrong"),
    [
        ("shoal", ["system", "user"], TAGS, "<answer>1,001</answer>", "#### 1001"),
        ("maxtext", ["user"], TAGS, "<answer>1001 eggs</answer>", "#### 1001"),
        ("tunix", ["user"], TAGS, "<answer>1001</answer>", "#### 1001"),
        (
            "torchrl",
            ["system", "user"],
            ("<think>", "</think>", "<answer>", "</answer>"),
            "<answer>1001.0</answer>",
            "#### 1001",
        ),
        ("verl", ["user"], ("####",), "#### 1,001", "<answer>1001</answer>"),
    ],
)
def test_a_preset_is_chosen_by_key(
    tmp_path: Path, preset: str, roles: list[str], asked: Any, right: str, wrong: str
) -> None:
    rows = [
        {"question": f"q{i}?", "answer": f"a <<{i}+1000={i + 1000}>>\n#### {i + 1000:,}"}
        for i in range(4)
    ]
    task = load(write(tmp_path, rows), preset)
    one = task.train[1]
    assert [message["role"] for message in one.prompt] == roles  # type: ignore[index]
    text = " ".join(message["content"] for message in one.prompt)  # type: ignore[index]
    assert "q1?" in text and all(mark in text for mark in asked)
    assert [reward.name for reward in task.rewards] == [
        reward.name for reward in PRESETS[preset].rewards
    ]
    for reward in task.rewards:
        assert reward.runs_in_process
    assert task.correct and task.extract and task.well_formed and task.verdict and task.of_row
    assert [task.correct(answer, one) for answer in (right, wrong)] == [True, False]
    assert task.extract(wrong) is None
    # of whatever form
    assert task.verdict(wrong, one)["correct"] and task.verdict(right, one)["correct"]
    assert task.of_row(1, rows[1]) == one
    assert task.question == "question"


@pytest.mark.parametrize("text", ["#### 42.", "#### 42.0"])
def test_what_verl_does_not_reward_is_not_right_there(text: str) -> None:
    preset = PRESETS["verl"]
    assert scored("verl", text, "42") == [0, 0] and not preset.right(preset.answer(text), "42")
    assert preset.right(preset.answer("#### 42"), "42") and preset.well_formed(text)


def test_what_tunix_rewards_is_right_there() -> None:
    preset = PRESETS["tunix"]
    for text in (
        "<reasoning>r</reasoning><answer>1,200",
        "<reasoning>r</reasoning><answer> 1200.0\n</answer>",
        "<answer>1200</answer>",
    ):
        assert preset.right(preset.answer(text), "1200")
    assert not preset.right(preset.answer("<answer>1200"), "1200")


def test_answers_are_counted_in_one_spelling(tmp_path: Path) -> None:
    task = load(
        write(tmp_path, [{"question": f"q{i}?", "answer": "#### 5"} for i in range(4)]), "shoal"
    )
    assert task.extract
    spelled = ("<answer>1200</answer>", "<answer>$1,200.00</answer>", "<answer> 1,200. </answer>")
    assert {task.extract(text) for text in spelled} == {"1200"}
    assert task.extract("<answer>a dozen</answer>") == "a dozen"
    assert task.extract("<answer> </answer>") is None  # which would have a vote
    assert hash_answer("#### 1,200") == "1200"


def test_a_row_without_gold_is_no_example(tmp_path: Path) -> None:
    task = load(
        write(tmp_path, [{"question": f"q{i}?", "answer": "#### 5"} for i in range(4)]), "verl"
    )
    assert task.of_row
    with pytest.raises(
        ShoalError, match="task gsm8k: row 3 has no `answer` that is a number or ends in `#### <nu"
    ):
        task.of_row(3, {"question": "q", "answer": "five"})


# ---- solutions of whatever form


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("48/2 = <<48/2=24>>24\n48+24 = <<48+24=72>>72\n#### 72", "72"),
        ("#### 41\nOr rather\n#### 42", "41"),  # the published labels take the first
        ("#### 1,234.50", "1234.5"),
        ("#### -7", "-7"),
        ("#### 42.", "42"),
        ("####42", "42"),
        ("#### $42", "42"),
        ("#### **42**", "42"),
        ("\\boxed{7}\n#### 42", "42"),
        ("So 3.\n#### 42 apples in 3 boxes", "42"),
        ("half = <<48/2=24>>24\nA: 24", "24"),
        ("A: 1,200", "1200"),
        ("A: -1", "-1"),
        ("A: 2.50", "2.5"),
        ("A: 12 eggs were laid.\nSo she has 9.", "9"),  # no last line
        ("<reasoning>1</reasoning><answer>42</answer>", "42"),
        ("<answer>$42</answer> for 3 days", "42"),
        ("<answer>1</answer> no <answer>\\boxed{42}</answer>", "42"),
        ("<answer>none</answer> 42", None),
        ("it is \\boxed{42} after 3 days", "42"),
        ("\\boxed{1} then \\boxed{\\text{about } 42 \\text{ km}}", "42"),
        ("\\(\\boxed{\\$1{,}234.50}\\)", "1234.5"),
        ("\\boxed{\\frac{7}{2}}", "3.5"),
        ("\\boxed{x = 7/2}", "3.5"),
        ("The answer is 42. It took 3 days.", "42"),
        ("the final answer is: **$1,234.50**", "1234.5"),
        ("Final Answer:\n42", "42"),
        ("Answer: 5 * 8 = 40 eggs", "40"),
        ("The answer is −5.", "-5"),
        ("The answer to the question is 42.", "42"),
        ("The answer is 3 1/2 cups.", "3.5"),
        ("Answer: 42 apples (6 a box)", "42"),
        ("The answer is that after 5 days she has 42.", "42"),
        ("So she pays **$42** for 3 of them.", "42"),
        ("Total: 6 * 7 = 42 in 3 days", "42"),
        ("6 * 7 = 42.", "42"),
        ("She has 3 bags with 14 each, so 42", "42"),
        ("42 apples", "42"),
        ("42%", "42"),
        ("$42.", "42"),
        ("5 - 3 and then 10-15", "15"),
        ("left: -4", "-4"),
        ("none at all", None),
        ("", None),
        ("1/0 of it: \\frac{1}{0}", None),
        ("cut off in <<48/2=", None),
        ("9" * 200, None),
    ],
)
def test_final_numbers(text: str, number: str | None) -> None:
    found = final_number(text)
    assert write_number(found) == number
    gold = number or "42"
    assert verdict(text, example(gold)) == {"correct": number is not None, "answer": number}
    assert not verdict(text, example("12345"))["correct"]


WORKING = "She eats 3 of 16, so 16 - 3 = 13 are left.\nShe sells 9 * 2 = 18 dollars' worth"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (f"Answer: {WORKING}", "18"),
        (f"Answer:\n{WORKING}", "18"),
        (f"To find the answer: {WORKING}", "18"),
        (f"The answer is found by halving 36.\n{WORKING}", "18"),
        (f"**Answer:** {WORKING}", "18"),
        ("Answer: She ate 3 eggs. 9 are left. So 9 * 2 = 18", "18"),
        ("The answer is 18 eggs.\n\nLet me check: 20 - 2 = 18, 3 left.\nStep 4 is done", "18"),
        ("The answer is 5. Wait, that is wrong. The answer is 6.", "6"),
        ("The answer is not 5; it is 6.", "6"),
        ("Answer: 18 dollars per day\n(9 eggs at 2)", "18"),
        ("Ans: 18\n(3 steps)", "18"),
        ("#### 1. Find eggs\n16 - 3 = 13\n#### 18", "18"),
        ("#### 18.\n\nThat took 3 steps.", "18"),
        ("#### **1. Eggs**\n3\n#### $18", "18"),
        ("#### 5/2", "2.5"),
        ("#### −5", "-5"),
        ("#### –5", "-5"),
        ("#### \u20115", "-5"),
        ("The answer is x = \u20115.", "-5"),
        ("She has 10–20 eggs, so 15", "15"),
        ("The answer is 12\u2009345 eggs.", "12345"),
        ("The answer is 1\u202f234\u202f567.", "1234567"),
        ("#### 12\u2009345.5", "12345.5"),
        ("12\u2009eggs", "12"),
        ("2024\u2009100", "100"),  # no groups of three digits: two numbers
        ("<think>The answer is 3. #### 4</think>\nThe answer is 18.", "18"),
        ("<think>\\boxed{3}</think>It is 18.", "18"),
        ("<reasoning>#### 3</reasoning> so 18", "18"),
        ("<think>the answer is 3</think> \n", "3"),
        (
            "So 9.\nThe answer is 18.\n\nQuestion: Tom has 3 and 4?\nAnswer: It is 3+4=7. The "
            "answer is 7",
            "18",
        ),
        ("It is 18.\n\n**Q:** and 5?\nA: 5", "18"),
        ("Question: 3 + 4?\nIt is 7", "7"),
        ("Sure.\nQuestion: 3?\nIt is 7", "7"),
        ("A: She sells 9 for 2 each. The answer is 18.", "18"),
        ("A: 9 eggs, so the answer is 18", "18"),
        ("\\boxed{-\\frac{1}{2}}", "-0.5"),
        ("\\boxed{\\frac{-1}{2}}", "-0.5"),
        ("\\boxed{3\\frac12}", "3.5"),
        ("\\boxed{2\\frac{1}{2}}", "2.5"),
        ("x = - 18", "-18"),
        ("\\boxed{- 18}", "-18"),
        ("The sum:\n- 18 eggs", "18"),
        ("It is 118 000 in all.", "118000"),
        ("Answer: 1 234 567", "1234567"),
        ("3 + 4 = 2 + 5", "2"),
        ("5 * 4 = 20", "20"),
        ("She pays Rs.18", "18"),
        ("It is No.18", "18"),
        ("It is .5", "0.5"),
        ("The answer is 12,34,567", "1234567"),
        ("The answer is 1,234,567", "1234567"),
    ],
)
def test_final_numbers_that_were_read_wrongly(text: str, number: str) -> None:
    assert write_number(final_number(text)) == number


@pytest.mark.parametrize(
    "text", ["The answer is ", "Answer: ", "the final answer is: ", "**Answer:** "]
)
@pytest.mark.parametrize("signs", ["?", "!", ".", "...", "? !", "…", "??\n"])
def test_an_answer_of_punctuation_alone_is_none(text: str, signs: str) -> None:
    assert final_number(text + signs) is None
    assert write_number(final_number(f"It is 42.\n{text}{signs}")) == "42"


def test_gold_with_a_thousand_places_or_a_fraction() -> None:
    assert write_number(Fraction(1, 3)) == "1/3"
    assert write_number(Fraction(10**60 + 1, 8)) == f"{(10**60 + 1) // 8}.125"
    assert verdict("#### 2.50", example("2.5"))["correct"]


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("\\boxed{1}", "1"),
        ("\\boxed{\\frac{1}{2}} or \\fbox{ {3} }", "{3}"),
        ("\\boxed{1", None),
        ("boxed", None),
        ("\\boxed{1} and \\boxed{2", None),
        ("\\boxed{}", ""),
    ],
)
def test_last_boxed(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside
