"""Tests of programs that read an input and print, or of a solution's function: how they become
cases of the sandbox of `sandbox.py`, and how outputs are compared.

    code    sandbox_program.py     runs the candidate, in its process
    setup   the comparison below   runs in the tests' process, which alone knows what is expected
    tests   a line for each input with its expected output
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Any

from shoal.tasks.graders.sandbox import run
from shoal.tasks.graders.sandbox_program import shoal_call, shoal_printed, shoal_run

MOST_TOGETHER = 8 << 20
"""Tests of more characters than these are not run in one sandbox together."""


@dataclass(frozen=True)
class InputOutput:
    """One test: an input and the output that is expected for it."""

    given: str
    expected: str


@dataclass(frozen=True)
class ProgramTests:
    """A candidate and its tests. `function` is "" for a program that reads its input and prints;
    else the function of a solution whose arguments are the lines of an input, each in JSON, and
    whose result is the output, in JSON."""

    source: str
    tests: Sequence[InputOutput]
    function: str = ""


def outcome_of(candidate: ProgramTests) -> str:
    """Returns the outcome of a candidate's tests, one of OUTCOMES of `sandbox.py`: that of the
    first test that it does not pass, else "passed". Each test has the limits of a sandbox of its
    own; all are tried in one sandbox first, since most candidates need no more."""
    together = case_of(candidate, candidate.tests)
    if sum(map(len, together["tests"])) <= MOST_TOGETHER and run(together) == "passed":
        return "passed"
    for test in candidate.tests:
        outcome = run(case_of(candidate, [test]))
        if outcome != "passed":
            return outcome
    return "passed"


def case_of(candidate: ProgramTests, tests: Sequence[InputOutput]) -> dict[str, Any]:
    """Returns the sandbox's case of some of a candidate's tests."""
    lines = []
    for test in tests:
        if candidate.function:
            lines.append(
                f"check_call(SOURCE, {candidate.function!r}, {test.given!r}, {test.expected!r})"
            )
        else:
            lines.append(f"check_program(SOURCE, {test.given!r}, {test.expected!r})")
    return {
        "code": _program_text(),
        "setup": f"{_comparison_text()}\nSOURCE = {candidate.source!r}\n",
        "tests": lines,
        "entry_point": "",
    }


@cache
def _program_text() -> str:
    """The source of the file that runs a candidate in its process."""
    return Path(__file__).with_name("sandbox_program.py").read_text(encoding="utf-8")


@cache
def _comparison_text() -> str:
    """The source of the functions below, which run in the tests' process."""
    parts = ["import json", "from decimal import Decimal, InvalidOperation"]
    for function in (decimals_of, same_output, check_program, check_call):
        source = inspect.getsource(function)
        parts.append(source)
    return "from __future__ import annotations\n" + "\n".join(parts)


# ---- in the tests' process


def decimals_of(line: str) -> list[Decimal] | None:
    """Returns the numbers in a line, which spaces separate; None if anything else is in it."""
    try:
        return [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None


def same_output(printed: str, expected: str) -> bool:
    """True if two outputs have the same lines: equal without spaces at their ends, or the same
    numbers, exactly. Blank lines at the beginning and the end do not count.

    >>> same_output("1.0 2\\n", "1 2"), same_output("0.333", "0.3333"), same_output("a  b", "a b")
    (True, False, False)
    """
    printed_lines = printed.strip().split("\n")
    expected_lines = expected.strip().split("\n")
    if len(printed_lines) != len(expected_lines):
        return False
    for printed_line, expected_line in zip(printed_lines, expected_lines, strict=True):
        if printed_line.strip() == expected_line.strip():
            continue
        numbers = decimals_of(printed_line)
        if numbers is None or numbers != decimals_of(expected_line):
            return False
    return True


def check_program(source: str, given: str, expected: str) -> None:
    """Runs a program in the candidate's process; AssertionError if it prints something else. The
    two functions that it calls are the candidate's (`sandbox_program.py`)."""
    num_parts = shoal_run(source, given)
    printed = "".join(shoal_printed(part) for part in range(num_parts))
    assert same_output(printed, expected)


def check_call(source: str, name: str, given: str, expected: str) -> None:
    """Calls a solution's function in the candidate's process; AssertionError if it returns
    something else. A tuple counts as a list."""
    arguments = [json.loads(line) for line in given.split("\n")]
    returned = shoal_call(source, name, arguments)
    if isinstance(returned, tuple):
        returned = list(returned)
    assert returned == json.loads(expected)
