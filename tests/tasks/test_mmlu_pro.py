"""MMLU-Pro: letters A to J as its own script finds them; prompts with five worked examples; rows of
our own in the published form."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scoring import score

from shoal.config.merge import compose
from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import ShoalError
from shoal.tasks.graders.choice import letter_in_answer_sentence
from shoal.tasks.splits import evaluating


def row(number: int, category: str = "law", **other: Any) -> dict[str, Any]:
    options = [f"{number}{digit}" for digit in range(10)]
    return {
        "question_id": number,
        "question": f"Question {number}?",
        "options": options,
        "answer": "ABCDEFGHIJ"[number % 10],
        "answer_index": number % 10,
        "cot_content": "",
        "category": category,
    } | other


def shot(number: int, category: str = "law") -> dict[str, Any]:
    return row(number, category, cot_content=f"A: Let's think {number} times. The answer is (A).")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (C).", "C"),
        ("the answer is J", "J"),
        ("The answer is **(B)**.", "B"),
        ("The answer is (A). No, the answer is (B).", "A"),
        ("Answer: D", "D"),
        ("answer:\n\nE", "E"),
        ("Answer: D or answer: F\nAnswer: G", "F"),  # the last of the first line
        ("The answer is (K). Answer: K. So H", "H"),
        ("Either B or C, I think", "I"),  # a word of one letter is read as one, as theirs does
        ("The answer is: (C)", "C"),
        ("none", None),
        ("", None),
    ],
)
def test_the_letter_is_found_as_their_script_finds_it(text: str, letter: str | None) -> None:
    assert letter_in_answer_sentence(text) == letter


def published(text: str) -> str | None:
    """The three patterns of the authors' script, one after the other, which take quadratic time."""
    text = text.replace("**", "")
    for pattern in (r"answer is \(?([A-J])\)?", r".*[aA]nswer:\s*([A-J])"):
        found = re.search(pattern, text)
        if found:
            return found[1]
    found = re.search(r"\b[A-J]\b(?!.*\b[A-J]\b)", text, re.DOTALL)
    return found[0] if found else None


PARTS = ["answer is ", "Answer:", "answer:", "(", ")", "A", "J", "K", " ", "\n", "**", "x", "I"]


@example("Answer:Answer:J")  # the second label begins with a letter that the first one has
@given(st.lists(st.sampled_from(PARTS), max_size=14).map("".join))
def test_every_text_has_the_letter_of_their_patterns(text: str) -> None:
    assert letter_in_answer_sentence(text) == published(text)


def test_long_texts_take_linear_time() -> None:
    for text in ("answer: " * 50_000, "A " * 200_000, "answer:" + " " * 300_000, "x" * 500_000):
        start = time.process_time()
        letter_in_answer_sentence(text)
        assert time.process_time() - start < 1


def test_the_published_protocol(tmp_path: Path) -> None:
    rows = [shot(i) for i in range(7)] + [shot(i, "physics") for i in range(20, 22)]
    write(tmp_path / "validation.jsonl", rows)
    write(tmp_path / "test.jsonl", [row(103, options=[*"abcde", "N/A"]), row(104, "physics")])
    config = compose("eval", ["task=mmlu_pro", f"task.path={tmp_path}"])[0]
    assert (config.pass_k, config.sampling.max_completion_tokens) == (0, 4000)
    with evaluating():
        task = load_task(config.task)
    assert task.notes == ()
    law, physics = task.evaluations["held_out"]
    assert not isinstance(law.prompt, str)
    content = law.prompt[0]["content"]
    assert content.startswith(
        "The following are multiple choice questions (with answers) about law. Think step by step "
        'and then output the answer in the format of "The answer is (X)" at the end.\n\n'
        "Question: Question 0?\nOptions: A. 00\nB. 01\n"
    )
    assert "J. 09\nAnswer: Let's think 0 times. The answer is (A).\n\nQuestion: " in content
    assert content.count("Question: ") == 6 and "Question 5?" not in content
    assert content.endswith(
        "Question: Question 103?\nOptions: A. a\nB. b\nC. c\nD. d\nE. e\n"
        "Answer: Let's think step by step.\n\n"
    )
    assert "about physics." in str(physics.prompt) and str(physics.prompt).count("Question: ") == 3
    assert law.columns["answer"] == "D" and law.columns["options"] == [*"abcde"]


def test_without_worked_examples_a_note_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [row(i) for i in range(3)])
    with evaluating():
        task = load_task(TaskSection(name="mmlu_pro", path=str(path), split="validation"))
    assert len(task.evaluations["held_out"]) == 3
    assert "prompts have no worked examples" in task.notes[-1]
    shared = load_task(TaskSection(name="mmlu_pro", path=str(path), eval_split="train"))
    assert shared.train == list(shared.evaluations["held_out"])


def test_a_row_to_train_on_is_no_worked_example_of_itself(tmp_path: Path) -> None:
    write(tmp_path / "validation.jsonl", [shot(i) for i in range(6)])
    write(tmp_path / "test.jsonl", [row(7)])
    config = compose("train", ["task=mmlu_pro", f"task.path={tmp_path}"])[0]
    task = load_task(config.task)
    for number, one in enumerate(task.train):
        content = str(one.prompt)
        assert content.count(f"Question: Question {number}?") == 1
        assert content.count("Question: ") == 6
    assert "an evaluation set" in task.notes[-1]


def test_answers_are_judged(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [row(3)])
    task = load_task(TaskSection(name="mmlu_pro", path=str(path), eval_split="train"))
    one = task.train[0]
    texts = ["The answer is (D).", "The answer is (C).", "D", "no"]
    scores = score(task.rewards, [one], [one.prompt], [texts], [[[1]] * 4])
    assert scores.rewards.tolist() == [[1, 0, 1, 0]]
    assert task.correct and task.verdict and task.well_formed and task.of_row
    assert [task.correct(text, one) for text in texts] == [True, False, True, False]
    assert task.verdict("The answer is (C).", one) == {"correct": False, "answer": "C"}
    assert [task.well_formed(text) for text in texts] == [True, True, False, False]
    assert task.of_row(0, row(3)).columns == one.columns
    with pytest.raises(ShoalError, match="row 1 has no `options`"):
        task.of_row(1, {"question": "?"})


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"options": "a, b"}, r"`options` is 'a, b' with the answer 'B'; expected a list"),
        ({"options": ["a"]}, r"expected a list of two to ten texts and the letter of one"),
        ({"answer": "K"}, r"with the answer 'K'"),
        ({"answer": "AB"}, r"with the answer 'AB'"),
        ({"category": 3}, r"'category' is a int; text is needed"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(
    tmp_path: Path, changed: dict[str, Any], fault: str
) -> None:
    path = write(tmp_path / "mine.jsonl", [row(0), row(1) | changed])
    with pytest.raises(ShoalError, match=rf"mine\.jsonl, line 2: .*{fault}"):
        load_task(TaskSection(name="mmlu_pro", path=str(path), eval_split="train"))
    path = write(tmp_path / "short.jsonl", [{"question": "?", "options": ["a", "b"]}])
    with pytest.raises(ShoalError, match="line 1 has no column 'answer'"):
        load_task(TaskSection(name="mmlu_pro", path=str(path)))
