"""The task `livecodebench` (Jain et al. 2024, arXiv:2403.07974): programming problems of contests,
by release, judged by hidden tests.

A row has `question_content`, `starter_code`, `metadata` and two columns of tests; the private ones
are text in JSON, or such text pickled, compressed and in base64. Prompt and grader are those of the
authors' runner. A model's code runs only inside of bubblewrap (`graders/sandbox.py`).
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from shoal.config.sections.task import TaskSection
from shoal.records import Example, RewardFunction, ShoalError
from shoal.tasks.code import scores_of
from shoal.tasks.data_folder import Published
from shoal.tasks.examples import prompt_key
from shoal.tasks.graders.answer import completion_text
from shoal.tasks.graders.program_tests import InputOutput, ProgramTests, outcome_of
from shoal.tasks.graders.sandbox import in_threads, require_sandbox
from shoal.tasks.splits import read_splits, with_rows
from shoal.tasks.task import Task

PUBLISHED = Published(
    "livecodebench",
    "livecodebench/code_generation_lite",
    (
        "question_content",
        "starter_code",
        "public_test_cases",
        "private_test_cases",
        "metadata",
    ),
    texts=(
        "question_content",
        "starter_code",
        "public_test_cases",
        "private_test_cases",
        "metadata",
    ),
)
NUM_FILES = 6
LATEST = f"release_v{NUM_FILES}"
SYSTEM_PROMPT = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests."
)
WITH_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your "
    "code within delimiters."
)
WITHOUT_STARTER = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly "
    "test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when "
    "the python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT."
)
MOST_TEST_BYTES = 1 << 30
"""A row whose tests have more bytes than these is refused."""
_TEXTS = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_AROUND_TEXTS = ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP")
_WRITTEN_OUT = re.compile(r"\s*[\[{]")


def load(task: TaskSection) -> Task:
    """Loads the task; `task.path` is a file, a folder, a hub id, or "" for all problems on the hub.
    `task.subset` is a release (`release_v5`) or a part of one (`v6`, `v4_v5`).

    `shoal eval` asks all rows. For training, if there is a single split, every tenth row is held
    out. Raises `ShoalError` for data that is missing or unreadable, an unknown release, a row whose
    tests cannot be read, and if sandboxes do not work on this machine.
    """
    require_sandbox()
    splits = read_splits(with_release(task), PUBLISHED, _make, spread=True)
    splits.on_purpose = f"task.eval_split={task.split}"
    splits.note_benchmark(task.num_eval_questions)
    splits.drop_held_out(prompt_key, "problem")
    return with_rows(blank(task), splits)


def blank(task: TaskSection) -> Task:
    """Returns the task without rows, to judge answers that were made elsewhere: its `of_row` makes
    the example of a published row. `task` is not used."""
    return Task(
        name="livecodebench",
        rewards=(RewardFunction("passed", passed),),
        correct_by="passed",
        well_formed=has_code,
        verdict=verdict,
        question="question_content",
        of_row=_of_row,
    )


# ---- releases


def with_release(task: TaskSection) -> TaskSection:
    """Returns the settings with the files of the release that `task.subset` names in place of it;
    by default the latest one, if the data is the hub's. Unchanged for data in one file, and for
    other data without a subset. ShoalError for a release that is not known."""
    is_file = bool(task.path) and Path(task.path).expanduser().is_file()
    if is_file or not (task.subset or not (task.path or task.files)):
        return task
    # A split of this name has no files: those of the release are not those of a split.
    eval_split = "release" if task.eval_split == task.split else task.eval_split
    files = files_of(task.subset or LATEST)
    return replace(task, subset="", files=files, split="release", eval_split=eval_split)


def files_of(release: str) -> tuple[str, ...]:
    """Returns the files of a release, as the published data set names them. ShoalError if it is not
    known.

    >>> files_of("release_v2"), files_of("v6"), files_of("v2_v3")
    (('test.jsonl', 'test2.jsonl'), ('test6.jsonl',), ('test2.jsonl', 'test3.jsonl'))
    """
    if release == "release_latest":
        release = LATEST
    whole = re.fullmatch(r"release_v(\d)", release)
    part = re.fullmatch(r"v(\d)(?:_v(\d))?", release)
    first, last = 1, 0
    if whole is not None:
        last = int(whole[1])
    elif part is not None:
        first = int(part[1])
        last = int(part[2] or part[1])
    if not 1 <= first <= last <= NUM_FILES:
        raise ShoalError(
            f"task livecodebench: task.subset={release!r}: there is no such release; expected "
            f"release_v1 to {LATEST}, or a part, v1 to v{NUM_FILES}, or v4_v5 for several",
            "task.subset",
        )
    return tuple(f"test{number if number > 1 else ''}.jsonl" for number in range(first, last + 1))


# ---- rows


def _make(number: int, place: str, row: Mapping[str, Any]) -> Example:
    """Returns the example of a row. Its tests are read once here, and stay in their columns as they
    were published: unpacked they have gigabytes. ShoalError if they cannot be read."""
    columns = {column: row[column] for column in PUBLISHED.columns}
    tests_of(columns, place)
    starter = row["starter_code"]
    parts = [f"### Question:\n{row['question_content']}\n\n"]
    if starter:
        parts.append(f"### Format: {WITH_STARTER}\n```python\n{starter}\n```\n\n")
    else:
        parts.append(f"### Format: {WITHOUT_STARTER}\n```python\n# YOUR CODE HERE\n```\n\n")
    parts.append("### Answer: (use the provided format with backticks)\n\n")
    prompt = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "".join(parts)},
    ]
    return Example(number, prompt, columns, place)


def _of_row(number: int, row: Mapping[str, Any]) -> Example:
    """Returns the example of a published row; ShoalError if a column is no text, or its tests
    cannot be read."""
    for column in PUBLISHED.columns:
        if not isinstance(row.get(column), str):
            raise ShoalError(f"task livecodebench: row {number} has no `{column}` that is text")
    return _make(number, f"row {number}", row)


def tests_of(columns: Mapping[str, str], place: str) -> tuple[Sequence[InputOutput], str]:
    """Returns (the tests of a row, public ones first; the function that they call, "" if they are
    inputs of a program). ShoalError, which names the place and the column, if there are none, or
    they cannot be read."""
    tests: list[InputOutput] = []
    for column in ("public_test_cases", "private_test_cases"):
        try:
            tests.extend(_read_tests(columns[column]))
        except ValueError as error:
            raise ShoalError(f"task livecodebench: {place}: `{column}` {error}") from error
    try:
        metadata = json.loads(columns["metadata"] or "{}")
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict):
        raise ShoalError(f"task livecodebench: {place}: `metadata` is not a JSON object")
    function = str(metadata.get("func_name") or "")
    if not tests:
        raise ShoalError(f"task livecodebench: {place} has no tests")
    if function:
        for test in tests:
            _check_call(test, place)
    return tests, function


def _check_call(test: InputOutput, place: str) -> None:
    """Raises ShoalError if the test of a function has an input line or an output that is no
    JSON."""
    for text in (*test.given.split("\n"), test.expected):
        try:
            json.loads(text)
        except ValueError as error:
            raise ShoalError(
                f"task livecodebench: {place}: a test of a function has {text[:40]!r}, which is "
                "not JSON"
            ) from error


@lru_cache(8)
def _read_tests(text: str) -> tuple[InputOutput, ...]:
    """Returns the tests in a column. ValueError, which says what the column is, if it holds
    anything else than a JSON list of inputs and outputs, packed or not. A few are kept."""
    written = text if _WRITTEN_OUT.match(text) else unpacked(text)
    try:
        entries = json.loads(written)
    except ValueError as error:
        raise ValueError("is not a JSON list of tests") from error
    if not isinstance(entries, list):
        raise ValueError("is not a JSON list of tests")
    tests = []
    for entry in entries:
        given, expected = None, None
        if isinstance(entry, dict):
            given, expected = entry.get("input"), entry.get("output")
        if not (isinstance(given, str) and isinstance(expected, str)):
            raise ValueError("has a test without `input` and `output` that are text")
        tests.append(InputOutput(given, expected))
    return tuple(tests)


def unpacked(text: str) -> str:
    """Returns the text that was pickled, compressed and written in base64. Nothing is unpickled:
    the pickle's instructions are read, and any that does not make its one text is refused.
    ValueError, which says what the column is, if it is anything else."""
    try:
        compressed = base64.b64decode(text, validate=True)
        unzip = zlib.decompressobj()
        pickled = unzip.decompress(compressed, MOST_TEST_BYTES)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError("is neither JSON nor compressed text in base64") from error
    if unzip.unconsumed_tail:
        raise ValueError(f"has more than {MOST_TEST_BYTES >> 20} MiB of tests")
    texts = []
    try:
        for instruction, argument, _ in pickletools.genops(pickled):
            if instruction.name in _TEXTS:
                texts.append(argument)
            elif instruction.name not in _AROUND_TEXTS:
                raise ValueError(
                    f"is a pickle of something else than a text (it has {instruction.name}), which "
                    "is not read: a pickle can run code"
                )
    except UnicodeDecodeError as error:
        raise ValueError("is a pickle of something else than a text") from error
    except ValueError as error:
        if "not read" in str(error):
            raise
        raise ValueError("is no pickle of a text") from error
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError("is a pickle of something else than a text")
    return texts[0]


# ---- judging


def code_of(text: str) -> str:
    """Returns the lines between the last two lines with ``` in them, as the published harness does;
    "" if there are fewer than two.

    >>> code_of("So:\\n```python\\nprint(1)\\n```\\nThat prints 1.")
    'print(1)'
    """
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if "```" in line]
    if len(fences) < 2:
        return ""
    return "\n".join(lines[fences[-2] + 1 : fences[-1]])


def has_code(text: str) -> bool:
    """True if a text has code between two lines with ```."""
    return bool(code_of(text).strip())


async def passed(
    completions: Sequence[Any],
    public_test_cases: Sequence[str],
    private_test_cases: Sequence[str],
    metadata: Sequence[str],
    log_extra: Any = None,
    log_metric: Any = None,
    **kwargs: Any,
) -> list[float]:
    """Returns 1.0 for each completion whose code passes all tests of its row, which run in
    sandboxes, else 0.0. A reward function in TRL's convention, which logs what that of the task
    `code` logs. The columns have one value for each completion."""
    candidates = []
    for i, completion in enumerate(completions):
        columns = {
            "public_test_cases": public_test_cases[i],
            "private_test_cases": private_test_cases[i],
            "metadata": metadata[i],
        }
        candidates.append(candidate_of(completion_text(completion), columns))
    return scores_of(await in_threads(outcome_of, candidates), log_extra, log_metric)


def candidate_of(text: str, columns: Mapping[str, str]) -> ProgramTests:
    """Returns a completion's code with the tests of its row."""
    tests, function = tests_of(columns, "a row")
    return ProgramTests(code_of(text), tests, function)


def verdict(text: str, example: Example) -> dict[str, Any]:
    """Returns the verdict on a text: `correct`, and the `outcome` of its tests, which run in
    sandboxes."""
    outcome = outcome_of(candidate_of(text, example.columns))
    return {"correct": outcome == "passed", "outcome": outcome}
