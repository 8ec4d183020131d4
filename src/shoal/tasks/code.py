"""The task `code`: code that must pass unit tests, from local files in the form of MBPP (Austin et
al. 2021, arXiv:2108.07732) or HumanEval (Chen et al. 2021, arXiv:2107.03374).

A row of MBPP has `text` or `prompt`, `code` and `test_list`; one of HumanEval `prompt`,
`canonical_solution`, `test` and `entry_point`. A model's code runs only inside of bubblewrap
(`graders/sandbox.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.config.sections.task import TaskSection
from shoal.records import Example, RewardFunction, ShoalError
from shoal.tasks.data_folder import Published
from shoal.tasks.examples import prompt_key
from shoal.tasks.graders.answer import completion_text, solution_of
from shoal.tasks.graders.sandbox import OUTCOMES, require_sandbox, run, run_all
from shoal.tasks.graders.tested_names import undefined_names
from shoal.tasks.splits import Splits, read_splits, with_rows
from shoal.tasks.task import Task
from shoal.text import count

SYSTEM_PROMPT = (
    "Solve the task in Python, with its standard library alone. Write the whole code in one block "
    "that begins with ```python and ends with ```."
)
_BLOCK = re.compile(
    r"(?P<indent>(?<![^\n])[ \t]++)?```"
    r"(?:(?P<language>[\w+#.-]++)(?:[ \t][^`\r\n]*+)?|[ \t]*+)\r?\n(?P<code>.*?)```",
    re.DOTALL,
)
_PYTHON = re.compile(r"py(?:thon)?[0-9.]*", re.IGNORECASE)


def load(task: TaskSection) -> Task:
    """Loads the task from local rows in MBPP's or HumanEval's form. Training rows with a held-out
    prompt are dropped. ShoalError for a row without tests, and if sandboxes do not work on this
    machine. Tests that use undefined names are noted. If the data has no other split, some training
    rows are held out."""
    require_sandbox()
    splits = read_splits(task, Published("code"), _example)
    splits.drop_held_out(prompt_key, "problem")
    _note_undefined(splits)
    return with_rows(
        Task(
            "code",
            rewards=(RewardFunction("passed", passed),),
            correct_by="passed",
            well_formed=has_one_block,
            verdict=verdict,
        ),
        splits,
    )


def _note_undefined(splits: Splits) -> None:
    """Adds a note to `splits` if the tests of some rows use names that nothing defines: they fail
    every completion that does not happen to define these names. The note has the number of such
    rows, and the names in the first of them."""
    with_undefined = []
    for example in splits.all_rows:
        # "": the names are those of the tests and the solution, whatever a completion is.
        names = undefined_names(case_of("", example.columns))
        if names:
            with_undefined.append((example.place, names))
    if with_undefined:
        place, names = with_undefined[0]
        rows = count(len(with_undefined), "row")
        splits.notes.append(
            f"code: the tests of {rows} use names that neither the tests, "
            f"their setup nor the solution define ({', '.join(names)} in {place}): define them in "
            "`test_setup_code`, or leave these rows out"
        )


def _example(number: int, place: str, row: Mapping[str, Any]) -> Example:
    """Returns the example of a row of MBPP or HumanEval, with the columns that `case_of` reads and
    `question`; ShoalError if the row is neither. `tests` is a list of texts. `head` (HumanEval's
    prompt) and `entry_point` (the function that HumanEval's test checks) are "" for MBPP. The
    prompt of a row of MBPP shows its first test. `number` is the row's number, `place` where it was
    read, for messages."""
    tests: Any = row.get("test_list")
    entry = row.get("entry_point")
    text = row.get("text") or row.get("prompt")
    if entry is None:
        has_tests = isinstance(tests, list) and bool(tests)
        has_tests = has_tests and all(isinstance(test, str) for test in tests)
    else:
        test = row.get("test")
        has_tests = isinstance(entry, str) and isinstance(test, str) and bool(test)
    if not (isinstance(text, str) and has_tests):
        raise ShoalError(
            f"task code: {place} has neither `text` (or `prompt`) and `test_list`, as MBPP, nor "
            "`prompt`, `test` and `entry_point`, as HumanEval; its columns: "
            f"{', '.join(row) or 'none'} (task.columns=[test_list=OTHER] renames one)"
        )
    if entry is None:
        setup = "\n".join(_texts(row.get("test_imports")) + _texts(row.get("test_setup_code")))
        head = ""
        solution = "".join(_texts(row.get("code")))
        asked = f"{text.strip()}\n\nYour code must pass this test, and others:\n{tests[0]}"
    else:
        head = f"{text}\n"
        setup = ""
        tests = [row["test"]]
        asked = f"Complete this code:\n```python\n{text.rstrip()}\n```"
        solution = text + "".join(_texts(row.get("canonical_solution")))
    prompt = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": asked}]
    return Example(
        number,
        prompt,
        {
            "question": text,
            "solution": solution,
            "head": head,
            "setup": setup,
            "tests": list(tests),
            "entry_point": entry or "",
        },
        place=place,
    )


def _texts(value: Any) -> list[str]:
    """Returns the texts of a column that holds one text, a list of texts or none."""
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def has_one_block(text: str) -> bool:
    """True if a text has exactly one block marked as Python, or none such and exactly one without a
    language."""
    return len(blocks_of(text)) == 1


def blocks_of(text: str) -> list[str]:
    """Returns the contents of the fenced code blocks in a text that are marked as Python. If there
    are none, returns those without a language; next to Python blocks these usually show what the
    code prints. [] if there are neither.

    >>> blocks_of("```python\\nf()\\n```\\nprints\\n```\\n1\\n```")
    ['f()\\n']
    """
    marked: list[str] = []
    unmarked: list[str] = []
    for block in _BLOCK.finditer(text):
        language, indent = block["language"], block["indent"] or ""
        # In an item of a list the whole block is indented, and its code is not.
        code = re.sub(f"^{indent}", "", block["code"], flags=re.MULTILINE)
        if language is None:
            unmarked.append(code)
        elif _PYTHON.fullmatch(language):
            marked.append(code)
    return marked or unmarked


def case_of(text: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the case that the sandbox runs for a completion: `code`, `given`, `reference`,
    `setup`, `tests` and `entry_point`. `given` is the code of a HumanEval prompt, `reference` the
    row's solution ("" if it has none). `code` is the completion's last block of code, or all of its
    text if it has no block; after the code of a HumanEval prompt, so that the completion can
    redefine the function or continue it. Thoughts before the solution are left out. `columns` are
    the row's."""
    text = solution_of(text)
    code = (blocks_of(text) or [text])[-1]
    return {
        "code": columns["head"] + code,
        "given": columns["head"],
        "reference": columns.get("solution") or "",
        "setup": columns["setup"],
        "tests": columns["tests"],
        "entry_point": columns["entry_point"],
    }


async def passed(
    completions: Sequence[Any],
    head: Sequence[str],
    setup: Sequence[str],
    tests: Sequence[list[str]],
    entry_point: Sequence[str],
    solution: Sequence[str | None] = (),
    log_extra: Any = None,
    log_metric: Any = None,
    **kwargs: Any,
) -> list[float]:
    """Returns 1.0 for each completion whose code passes all tests, which run in a sandbox, else
    0.0. A reward function in TRL's convention. Logs each completion's `outcome`, and the share of
    each kind of failure as the metrics `failed`, `timed_out` and `crashed`. The outcome is one of
    OUTCOMES of `graders/sandbox.py`. `head`, `setup`, `tests`, `entry_point` and `solution` are the
    rows' columns, one value for each completion."""
    cases = []
    for i, completion in enumerate(completions):
        columns = {
            "head": head[i],
            "setup": setup[i],
            "tests": tests[i],
            "entry_point": entry_point[i],
            "solution": solution[i] if solution else "",
        }
        cases.append(case_of(completion_text(completion), columns))
    return scores_of(await run_all(cases), log_extra, log_metric)


def scores_of(outcomes: Sequence[str], log_extra: Any, log_metric: Any) -> list[float]:
    """Returns 1.0 for each outcome of tests that is "passed", else 0.0, and logs them as `passed`
    says; `log_extra` and `log_metric` are the run's, None outside of one."""
    if log_extra and log_metric:
        log_extra("outcome", outcomes)
        for outcome in outcomes:
            for failure in OUTCOMES[1:]:
                log_metric(failure.replace(" ", "_"), float(outcome == failure))
    return [float(outcome == "passed") for outcome in outcomes]


def verdict(text: str, example: Example) -> dict[str, Any]:
    """Returns the verdict on a text: `correct`, and the `outcome` of its tests. Runs them in the
    sandbox. The outcome is one of OUTCOMES."""
    outcome = run(case_of(text, example.columns))
    return {"correct": outcome == "passed", "outcome": outcome}
