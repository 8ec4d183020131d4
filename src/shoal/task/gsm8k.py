"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): from a local jsonl or parquet file, a folder of them, or the hub.

A row holds `question` and `answer`, the latter ending in `#### <number>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.config.schema import TaskSection
from shoal.task.answer import completion_text, extract_answer, format_reward, parse_number, same_number, well_formed
from shoal.task.reward import RewardFunction
from shoal.task.task import Task
from shoal.types import Example, Messages, ShoalError

HUB_ID = "openai/gsm8k"
SYSTEM_PROMPT = (
    "Solve the user's problem. Think step by step between <reasoning> and </reasoning>, "
    "then write only the final number between <answer> and </answer>."
)


def load(task: TaskSection) -> Task:
    """The task; `task.path` is a file, a folder, a hub id, or empty for the hub's own copy.

    Where a file stands alone, the split to evaluate on is looked for beside it, else its last rows are held out; what
    was dropped or held out is in the task's `notes`.

    Raises `ShoalError` for data that is missing, empty, unreadable or without the two columns.
    """
    train, held_out, notes = _splits(task)
    train, held_out = _gold(train, notes, "training"), _gold(held_out, notes, "held-out")
    known = {row["question"] for row in held_out}
    kept = [row for row in train if row["question"] not in known]
    if len(kept) < len(train):
        notes.append(f"gsm8k: {len(train) - len(kept)} training questions are held out too; they were left out")
    if not kept:
        raise ShoalError("task gsm8k: every training question is held out too; give other data in task.path")
    return Task(
        name="gsm8k",
        train=_examples(kept),
        evaluations={"held_out": _examples(held_out)},
        rewards=(RewardFunction("correct", correct_reward, 1.0, own=True),
                 RewardFunction("format", format_reward, 0.1, own=True)),
        correct=is_correct,
        well_formed=well_formed,
        notes=tuple(notes),
    )


def gold(answer: str) -> str | None:
    """The number after the last `####`, commas removed; None where there is none.

    >>> gold("He has 1000 + 200.\\n#### 1,200")
    '1200'
    """
    _, separator, number = answer.rpartition("####")
    number = number.strip().replace(",", "")
    return number if separator and parse_number(number) is not None else None


def prompt(question: str) -> Messages:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def is_correct(text: str, example: Example) -> bool:
    """Whether the last `<answer>` equals the gold number."""
    return same_number(extract_answer(text), example.columns["answer"])


def correct_reward(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """1.0 where the last `<answer>` equals the gold number, else 0.0 (TRL's convention)."""
    texts = [completion_text(completion) for completion in completions]
    return [float(same_number(extract_answer(text), number)) for text, number in zip(texts, answer, strict=True)]


def _examples(rows: Sequence[dict[str, str]]) -> tuple[Example, ...]:
    return tuple(Example(i, prompt(row["question"]), {"answer": row["gold"], "solution": row["answer"]})
                 for i, row in enumerate(rows))


def _gold(rows: Sequence[dict[str, str]], notes: list[str], kind: str) -> list[dict[str, str]]:
    """Adds the column `gold`; rows without are dropped, which is noted."""
    found = [row | {"gold": number} for row in rows if (number := gold(row["answer"])) is not None]
    if not found:
        raise ShoalError(f"task gsm8k: none of the {len(rows)} {kind} rows has an answer that ends in `#### <number>`")
    if len(found) < len(rows):
        notes.append(f"gsm8k: {len(rows) - len(found)} of {len(rows)} {kind} rows have no `#### <number>` and were "
                     f"dropped")
    return found


# ---- where the rows are


def _splits(task: TaskSection) -> tuple[list[dict[str, str]], list[dict[str, str]], list[str]]:
    """Training rows, held-out rows, notes."""
    path = Path(task.path).expanduser()
    if task.path and path.is_file():
        train, held_out = _siblings(path, task)
    else:
        folder = path if task.path and path.is_dir() else _download(task.path)
        train, held_out = _files(folder, task.split), _files(folder, task.eval_split)
        if not train:
            there = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
            raise ShoalError(f"task gsm8k: {folder} holds no {task.split}.jsonl, gsm8k_{task.split}.jsonl or parquet "
                             f"file of the split {task.split!r}; it holds {there}")
    rows = _read(train)
    if held_out and held_out != train:
        return rows, _read(held_out), []
    return _hold_out(rows, task.num_questions, train[0])


def _hold_out(rows: list[dict[str, str]], num_questions: int, file: Path
              ) -> tuple[list[dict[str, str]], list[dict[str, str]], list[str]]:
    if len(rows) < 2:
        raise ShoalError(f"task gsm8k: {file} has 1 row and no split beside it to evaluate on; 2 or more are needed")
    count = max(1, len(rows) // 10)
    count = min(count, num_questions) if num_questions else count
    note = f"gsm8k: no split to evaluate on beside {file.name}; its last {count} of {len(rows)} rows are held out"
    return rows[:-count], rows[-count:], [note]


def _siblings(path: Path, task: TaskSection) -> tuple[list[Path], list[Path]]:
    """A file named after a split is that split, and the other one is looked for beside it."""
    for mine, other in ((task.split, task.eval_split), (task.eval_split, task.split)):
        before, found, after = path.name.rpartition(mine)
        sibling = path.with_name(f"{before}{other}{after}")
        if found and mine != other and sibling.is_file():
            return ([path], [sibling]) if mine == task.split else ([sibling], [path])
    return [path], []


def _files(folder: Path, split: str) -> list[Path]:
    """The files of a split in a folder, shards in order; the hub's layout has them in `main/`."""
    patterns = (f"gsm8k_{split}.jsonl", f"{split}.jsonl", f"gsm8k_{split}.parquet", f"{split}.parquet",
                f"{split}-*.parquet", f"main/{split}-*.parquet", f"data/{split}-*.parquet")
    return next((files for pattern in patterns if (files := sorted(folder.glob(pattern)))), [])


def _download(path: str) -> Path:
    """The hub's files of a data set, as a folder in its cache."""
    if path and (not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.endswith((".json", ".jsonl", ".parquet"))):
        raise ShoalError(f"task.path={path!r}: there is no such file or folder")
    from huggingface_hub import snapshot_download

    patterns = ["*.jsonl", "*.parquet"] if path else ["main/*.parquet"]
    try:
        return Path(snapshot_download(path or HUB_ID, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # no network, no such data set, no permission: all are mended by a local copy
        what = f"task.path={path!r}: there is no such file or folder here, and" if path else "task gsm8k:"
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ShoalError(f"{what} the data set {path or HUB_ID} could not be fetched ({cause}); give a local jsonl "
                         f"file or folder: task.path=FOLDER") from error


# ---- reading


def _read(files: Sequence[Path]) -> list[dict[str, str]]:
    """All rows of the files, checked to hold the two columns as text."""
    rows: list[dict[str, str]] = []
    for file in files:
        read = _parquet(file) if file.suffix == ".parquet" else _jsonl(file)
        rows.extend(_checked(row, file, where) for where, row in read)
    if not rows:
        raise ShoalError(f"task gsm8k: {files[0]} is empty; rows with `question` and `answer` are needed")
    return rows


def _jsonl(file: Path) -> list[tuple[str, Any]]:
    rows = []
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ShoalError(f"task gsm8k: {file} is no text in UTF-8 ({error.reason} at byte {error.start})") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append((f"line {number}", json.loads(line)))
            except json.JSONDecodeError as error:
                raise ShoalError(f"task gsm8k: {file}, line {number} is no JSON object: {error.msg} at column "
                                 f"{error.colno}; one object a line is needed") from error
    return rows


def _parquet(file: Path) -> list[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ShoalError(f"task gsm8k: {file} cannot be read as parquet: {str(error).splitlines()[0]}") from error
    return [(f"row {i}", row) for i, row in enumerate(rows)]


def _checked(row: Any, file: Path, where: str) -> dict[str, str]:
    if not isinstance(row, dict):
        raise ShoalError(f"task gsm8k: {file}, {where} is a {type(row).__name__}; an object with `question` and "
                         f"`answer` is needed")
    for column in ("question", "answer"):
        if column not in row:
            there = ", ".join(str(name) for name in row) or "none"
            raise ShoalError(f"task gsm8k: {file}, {where} has no column {column!r}; its columns: {there}")
        if not isinstance(row[column], str):
            raise ShoalError(f"task gsm8k: {file}, {where}: {column!r} is a {type(row[column]).__name__}; text is "
                             f"needed")
    return {"question": row["question"], "answer": row["answer"]}
