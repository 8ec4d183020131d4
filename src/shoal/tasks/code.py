"""Code that must pass unit tests, from local files of MBPP's form (Austin et al. 2021,
arXiv:2108.07732) or HumanEval's (Chen et al. 2021, arXiv:2107.03374).

A row of MBPP has `text` or `prompt`, `code` and `test_list`; one of HumanEval `prompt`,
`canonical_solution`, `test` and `entry_point`. A model's code runs in bubblewrap alone
(`graders/sandbox.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.config.sections.task import TaskSection
from shoal.records import Example, RewardFunction, ShoalError
from shoal.tasks.data import Published, Splits, read_splits
from shoal.tasks.examples import prompt_key, with_rows
from shoal.tasks.graders.answer import completion_text, solution_of
from shoal.tasks.graders.sandbox import OUTCOMES, require_sandbox, run, run_all
from shoal.tasks.graders.tested_names import undefined_names
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
    """Loads the task. ShoalError for a row without tests, and where there is no sandbox."""
    require_sandbox()
    splits = read_splits(task, Published("code"), _example)
    splits.drop_held_out(prompt_key, "problem")
    _note_undefined(splits)
    return with_rows(
        Task(
            "code",
            rewards=(RewardFunction("passed", passed),),
            correct_by="passed",
            well_formed=lambda text: len(blocks_of(text)) == 1,
            verdict=verdict,
        ),
        splits,
    )


def _note_undefined(splits: Splits) -> None:
    """Notes tests that use what nobody defines: they fail every completion that does not guess
    it."""
    rows = [*splits.train, *(() if splits.shared else splits.held_out)]
    found = [(example.place, undefined_names(case_of("", example.columns))) for example in rows]
    found = [(place, names) for place, names in found if names]
    if found:
        place, names = found[0]
        splits.notes.append(
            f"code: the tests of {count(len(found), 'row')} use names that neither the tests, "
            f"their setup nor the solution define ({', '.join(names)} in {place}): define them in "
            "`test_setup_code`, or leave these rows out"
        )


def _example(number: int, place: str, row: Mapping[str, Any]) -> Example:
    tests: Any = row.get("test_list")
    are_tests = (
        isinstance(tests, list) and bool(tests) and all(isinstance(one, str) for one in tests)
    )
    entry, text = row.get("entry_point"), row.get("text") or row.get("prompt")
    if entry is not None:
        are_tests = (
            isinstance(entry, str) and isinstance(row.get("test"), str) and bool(row["test"])
        )
    if not (isinstance(text, str) and are_tests):
        raise ShoalError(
            f"task code: {place} has neither `text` (or `prompt`) and `test_list`, as MBPP, nor "
            "`prompt`, `test` and `entry_point`, as HumanEval; its columns: "
            f"{', '.join(row) or 'none'} (task.columns=[test_list=OTHER] renames one)"
        )
    if entry is None:
        setup = "\n".join([*_texts(row.get("test_imports")), *_texts(row.get("test_setup_code"))])
        head, solution = "", "".join(_texts(row.get("code")))
        asked = f"{text.strip()}\n\nYour code must pass this test, and others:\n{tests[0]}"
    else:
        head, setup, tests = f"{text}\n", "", [row["test"]]
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
    """The texts of a column that holds one, several or none."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def blocks_of(text: str) -> list[str]:
    """The blocks of Python in a text; where none is marked as Python, those without a language,
    since beside marked code they show what it prints.

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
    """What the sandbox runs for a completion: its last block of code, or all of it where it has
    none. A function that HumanEval begins is redefined, or continued."""
    text = solution_of(text)
    code = (blocks_of(text) or [text])[-1]
    return {
        "code": columns["head"] + code,
        "given": columns["head"],
        "reference": columns.get("solution") or "",
        **{name: columns[name] for name in ("setup", "tests", "entry_point")},
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
    """1.0 where all tests pass, else 0.0. Logged: the share of each outcome, and each
    completion's."""
    solutions = solution or [""] * len(completions)
    found = await run_all(
        [
            case_of(
                completion_text(one),
                {"head": h, "setup": s, "tests": t, "entry_point": e, "solution": given},
            )
            for one, h, s, t, e, given in zip(
                completions, head, setup, tests, entry_point, solutions, strict=True
            )
        ]
    )
    if log_extra and log_metric:
        log_extra("outcome", found)
        for one in found:
            for outcome in OUTCOMES[1:]:
                log_metric(outcome.replace(" ", "_"), float(one == outcome))
    return [float(one == "passed") for one in found]


def verdict(text: str, example: Example) -> dict[str, Any]:
    outcome = run(case_of(text, example.columns))
    return {"correct": outcome == "passed", "outcome": outcome}
