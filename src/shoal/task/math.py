"""MATH (Hendrycks et al. 2021, arXiv:2103.03874): competition problems whose answers are checked with math-verify.

A row holds `problem` and `answer`, or a `solution` that ends in `\\boxed{answer}`. By default the hub's training split
of 7,500 problems is trained on and MATH-500 evaluated on, which shares none with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.config.schema import TaskSection
from shoal.task import math_check
from shoal.task.answer import completion_text, extract_answer, format_reward, well_formed
from shoal.task.data import Published, read_splits, without_held_out
from shoal.task.final_answer import behind_hashes, last_boxed, said_answer, solution_of
from shoal.task.reward import RewardFunction
from shoal.task.task import Task
from shoal.types import Example, Messages, ShoalError

TRAIN = Published("math", "DigitalLearningGmbH/MATH-lighteval", ("problem",), ("math_{split}", "{split}"),
                  texts=("problem",))
EVALUATION = replace(TRAIN, hub_id="HuggingFaceH4/MATH-500")
SYSTEM_PROMPT = (
    "Solve the user's problem. Think step by step between <reasoning> and </reasoning>, "
    "then write only the final answer, in LaTeX, between <answer> and </answer>."
)
TAIL_CHARS = 10_000
"""The answer is looked for in so many last characters."""

_DOLLARS = re.compile(r"\$([^$\n]+)\$")
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_EQUALS = re.compile(r"=\s*([^\s=][^=\n]*)\Z")
_NUMBER = re.compile(r"-?[0-9]+(?:,[0-9]{3})*(?:[./][0-9]+)?")


def load(task: TaskSection) -> Task:
    """The task; `task.path` is a file, a folder or a hub id with `problem` and `answer` or `solution`.

    Raises `ShoalError` for data that is missing or without answers, and where math-verify is not installed.
    """
    math_check.require_math_verify()
    train, held_out, notes = _rows(task)
    train = _gold(train, notes, "training") if train else []
    held_out = _gold(held_out, notes, "held-out")
    kept = without_held_out(train, held_out, lambda row: row["problem"].strip(), "math", "problem", notes)
    return _task(_examples(kept), {"held_out": _examples(held_out)}, notes)


def blank(task: TaskSection) -> Task:
    """The task without data: it judges rows that bring their own answer."""
    math_check.require_math_verify()
    return _task((), {}, ())


def _task(train: Sequence[Example], evaluations: Mapping[str, Sequence[Example]], notes: Sequence[str]) -> Task:
    return Task(
        name="math",
        train=train,
        evaluations=evaluations,
        rewards=(RewardFunction("correct", correct_reward, 1.0, own=True),
                 RewardFunction("format", format_reward, 0.1, own=True)),
        correct=is_correct,
        well_formed=well_formed,
        extract=lambda text: None if (answer := answer_of(text)) is None else math_check.plain(answer),
        verdict=verdict,
        figures=lambda verdicts: {"unchecked": float(sum(one["unchecked"] for one in verdicts))},
        question="problem",
        of_row=_of_row,
        notes=tuple(notes),
    )


def answer_of(text: str) -> str | None:
    """What stands in the last `<answer>`, without a `\\boxed{}` around it, else in the last `\\boxed{}`; None where the
    last 10,000 characters have neither."""
    tail = text[-TAIL_CHARS:]
    tagged = extract_answer(tail)
    boxed = last_boxed(tail if tagged is None else tagged)
    return tagged if boxed is None else boxed


def is_correct(text: str, example: Example) -> bool:
    """Whether the answer is the same as the gold one."""
    return bool(_same([text], [example.columns["answer"]], answer_of)[0])


def correct_reward(completions: Sequence[Any], answer: Sequence[str],
                   log_metric: Callable[[str, float], None] | None = None, **kwargs: Any) -> list[float]:
    """1.0 where the answer is the same as the gold one, else 0.0 (TRL's convention).

    Logged: `unchecked`, the share of answers whose check came to no end (0.0 for them)."""
    found = _same([completion_text(completion) for completion in completions], answer, answer_of)
    for one in found if log_metric else ():
        log_metric("unchecked", float(one is None))  # pyright: ignore[reportOptionalCall]
    return [float(bool(one)) for one in found]


def verdict(text: str, example: Example) -> dict[str, Any]:
    """Whether a solution of whatever form ends with the gold answer, that answer, and whether its check came to no
    end."""
    same = _same([text], [example.columns["answer"]], final_answer)[0]
    answer = final_answer(text)
    return {"correct": bool(same), "answer": None if answer is None else answer[:math_check.MAX_CHARS],
            "unchecked": same is None}


def final_answer(text: str) -> str | None:
    """The answer of a solution of whatever form: in a tag or a box, behind `####` or "the answer is"; else of the last
    formula between `$`, the last bold text or what stands behind the last line's `=` the one that comes last; else the
    last number. Thoughts before the solution are left out.

    >>> final_answer("so x = 5"), final_answer("Thus **5**."), final_answer("#### 42"), final_answer("none")
    ('5', '5', '42', None)
    """
    text = solution_of(text[-TAIL_CHARS:])
    found = answer_of(text)
    if found is not None:
        return found
    found = behind_hashes(text)
    found = said_answer(text) if found is None else found
    if found is not None:
        formulas = _DOLLARS.findall(found)
        return formulas[-1] if formulas else found
    return _at_the_end(text.rstrip())


def _at_the_end(text: str) -> str | None:
    """Of the last formula, bold text and `=` the one that ends last, else the last number; None where all lack."""
    found = [match for pattern in (_DOLLARS, _BOLD) for match in pattern.finditer(text)]
    last = max(found, key=lambda match: match.end(), default=None)
    tail = text.rstrip(" .")
    line = tail.rfind("\n") + 1
    if (last is None or last.end() <= line) and (equal := _EQUALS.search(tail, line)):
        return equal[1].strip(" *")
    if last is not None:
        return last[1].strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _same(texts: Sequence[str], golds: Sequence[str], find: Callable[[str], str | None]) -> list[bool | None]:
    answers = [find(text) for text in texts]
    return math_check.same_all([(gold, answer or "") for gold, answer in zip(golds, answers, strict=True)])


# ---- rows


def _rows(task: TaskSection) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Training rows, held-out rows, notes; without a path of two data sets of the hub, the other one's split alone."""
    if task.path:
        return read_splits(task, TRAIN)
    train, _, notes = read_splits(task, TRAIN)
    alone = replace(task, split=task.eval_split, subset="", files=())
    first, last, _ = read_splits(alone, EVALUATION)
    return train, [*first, *last], notes


def _prompt(problem: str) -> Messages:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem}]


def gold(row: Mapping[str, Any]) -> str | None:
    """The answer of a row: its `answer`, else what its `solution` has in its last box; None where there is none."""
    answer = row.get("answer")
    if answer is None or not str(answer).strip():
        answer = last_boxed(str(row.get("solution") or ""))
    return str(answer).strip() if answer is not None and str(answer).strip() else None


def _example(number: int, row: Mapping[str, Any], answer: str) -> Example:
    columns = {"answer": answer, "solution": str(row.get("solution") or "")}
    return Example(number, _prompt(row["problem"]), columns)


def _of_row(number: int, row: Mapping[str, Any]) -> Example:
    answer = gold(row)
    if answer is None or "problem" not in row:
        raise ShoalError(f"task math: row {number} has no `problem` with an `answer` or a `solution` that ends in "
                         "`\\boxed{...}`")
    return _example(number, row, answer)


def _examples(rows: Sequence[Mapping[str, Any]]) -> tuple[Example, ...]:
    return tuple(_example(i, row, row["gold"]) for i, row in enumerate(rows))


def _gold(rows: Sequence[dict[str, Any]], notes: list[str], kind: str) -> list[dict[str, Any]]:
    """Adds the column `gold`; rows without are dropped, which is noted."""
    found = [row | {"gold": answer} for row in rows if (answer := gold(row)) is not None]
    if not found:
        raise ShoalError(f"task math: none of the {len(rows)} {kind} rows has an `answer`, or a `solution` with "
                         "`\\boxed{...}`")
    if len(found) < len(rows):
        notes.append(f"math: {len(rows) - len(found)} of {len(rows)} {kind} rows have no answer and were dropped")
    return found
