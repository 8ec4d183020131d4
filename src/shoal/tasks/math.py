"""The task `math` (Hendrycks et al. 2021, arXiv:2103.03874): competition problems whose answers are
checked with math-verify.

A row has `problem`, and `answer` or a `solution` that ends in `\\boxed{answer}`. By default the
hub's training split of 7,500 problems is trained on, and MATH-500, which shares no problem with it,
is evaluated on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.config.sections.task import TaskSection
from shoal.records import Example, RewardFunction, ShoalError
from shoal.tasks.data_folder import Published
from shoal.tasks.examples import has_answer
from shoal.tasks.graders import math_check
from shoal.tasks.graders.answer import (
    FORMAT,
    completion_text,
    extract_answer,
    last_boxed,
    solution_of,
    well_formed,
)
from shoal.tasks.splits import paths_to_evaluate, read_splits, with_rows
from shoal.tasks.task import Task

TRAIN = Published(
    "math",
    "DigitalLearningGmbH/MATH-lighteval",
    ("problem",),
    ("math_{split}", "{split}"),
    texts=("problem",),
)
EVALUATION = replace(TRAIN, hub_id="HuggingFaceH4/MATH-500")
SYSTEM_PROMPT = (
    "Solve the user's problem. Think step by step between <reasoning> and </reasoning>, "
    "then write only the final answer, in LaTeX, between <answer> and </answer>."
)
TAIL_CHARS = 10_000
"""An answer is only looked for in this many last characters of a text."""


def load(task: TaskSection) -> Task:
    """Loads the task; `task.path` is a file, a folder or a hub id with `problem` and `answer` or
    `solution`.

    Without a path, TRAIN is trained on and all of EVALUATION is evaluated on, both from the hub,
    unless `task.eval_split` names files.
    Rows without a gold answer are dropped. Raises `ShoalError` for data that is missing or has no
    answers, and if math-verify is not installed. Training rows with a held-out problem are dropped
    too.
    """
    empty = blank(task)
    splits = read_splits(task, TRAIN, _make)
    # The evaluation set has no split to train on: all its rows are evaluated on.
    if not task.path and not paths_to_evaluate(task):
        evaluation_task = replace(task, split=task.eval_split, subset="", files=())
        evaluation = read_splits(evaluation_task, EVALUATION, _make)
        splits.held_out = evaluation.train
        # Held-out rows come from another data set, whatever `read_splits` has held out.
        splits.shared = False
        splits.data = replace(splits.data, held_out_files=evaluation.data.train_files)
    splits.keep(
        has_answer,
        "an `answer` that can be read, or a `solution` with `\\boxed{...}`",
        "no answer that can be read",
    )
    splits.drop_held_out(_problem_of, "problem")
    return with_rows(empty, splits)


def _problem_of(example: Example) -> str:
    messages: Any = example.prompt
    return messages[-1]["content"].strip()


def blank(task: TaskSection) -> Task:
    """Returns the task without rows, to judge answers that were made elsewhere: its `of_row` makes
    the example of a published row. ShoalError if math-verify is not installed. `task` is not
    used."""
    math_check.require_math_verify()
    return Task(
        name="math",
        rewards=(RewardFunction("correct", correct_reward, 1.0, runs_in_process=True), FORMAT),
        correct=is_correct,
        well_formed=well_formed,
        extract=extract,
        verdict=verdict,
        figures=figures,
        question="problem",
        of_row=_of_row,
    )


def answer_of(text: str) -> str | None:
    """Returns the answer in a text: the content of the last `\\boxed{}` inside of the last
    `<answer>`, else the content of that tag; without a tag, that of the last `\\boxed{}`. None if
    the last TAIL_CHARS characters have neither."""
    tail = text[-TAIL_CHARS:]
    tagged = extract_answer(tail)
    boxed = last_boxed(tail if tagged is None else tagged)
    return tagged if boxed is None else boxed


def extract(text: str) -> str | None:
    """Returns the answer in a normal form, in which equal answers are counted for maj@k; None if
    there is none."""
    return math_check.plain(answer_of(text) or "") or None


def figures(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the figure `unchecked`: how many checks were ended at their limit."""
    return {"unchecked": float(sum(verdict["unchecked"] for verdict in verdicts))}


def is_correct(text: str, example: Example) -> bool:
    """True if the answer is the same as the gold one. False if there is no answer, or if the check
    was ended at its limit."""
    return bool(math_check.same(example.columns["answer"], answer_of(text) or ""))


def correct_reward(
    completions: Sequence[Any],
    answer: Sequence[str],
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float]:
    """Returns 1.0 for each completion whose answer is the same as the gold one, else 0.0. A reward
    function in TRL's convention, whose metric `unchecked` is the share of completions whose check
    was ended at its limit or not made, for which the reward is 0.0.
    """
    answers = [answer_of(completion_text(completion)) or "" for completion in completions]
    verdicts = math_check.same_all(list(zip(answer, answers, strict=True)))
    if log_metric:
        for is_same in verdicts:
            log_metric("unchecked", float(is_same is None))
    return [float(bool(is_same)) for is_same in verdicts]


def verdict(text: str, example: Example) -> dict[str, Any]:
    """Returns the verdict on a solution in any form, such as another model's; only its last
    TAIL_CHARS characters are read. `answer` is what its tag or box holds, at most
    `math_check.MAX_CHARS` characters of it; None if it has neither, and math-verify then looks for
    the answer in the text. `correct` says whether that is the gold answer, `unchecked` whether the
    check was ended at its limit or not made."""
    text = solution_of(text[-TAIL_CHARS:])
    gold, answer = example.columns["answer"], answer_of(text)
    if answer is None:
        is_same = math_check.is_found_in(gold, text)
    else:
        is_same = math_check.same(gold, answer)
        answer = answer[: math_check.MAX_CHARS]
    # `is_same` is None if the check was ended at its limit.
    return {"correct": bool(is_same), "answer": answer, "unchecked": is_same is None}


# ---- rows


def gold(row: Mapping[str, Any]) -> str | None:
    """Returns the gold answer of a row: its `answer`, else the last box in its `solution`; None if
    there is none that can be read. Its braces must be in pairs, and it has at most
    `math_check.MAX_CHARS` characters."""
    answer: str | None = None
    if row.get("answer") is not None:
        answer = str(row["answer"]).strip()
    if not answer:
        answer = last_boxed(str(row.get("solution") or ""))
    if not answer or not math_check.has_balanced_braces(answer):
        return None
    return answer


def _make(number: int, place: str, row: Mapping[str, Any]) -> Example:
    """Returns the example of a row. Its column `answer` is None if the row has no gold answer."""
    columns = {"answer": gold(row), "solution": str(row.get("solution") or "")}
    prompt = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": row["problem"]},
    ]
    return Example(number, prompt, columns)


def _of_row(number: int, row: Mapping[str, Any]) -> Example:
    """Returns the example of a published row; ShoalError if it has no answer."""
    example = _make(number, "", row) if "problem" in row else None
    if example is None or example.columns["answer"] is None:
        raise ShoalError(
            f"task math: row {number} has no `problem` with an `answer` or a `solution` that ends "
            f"in "
            f"`\\boxed{{...}}`, its braces in pairs and at most {math_check.MAX_CHARS} characters"
        )
    return example
