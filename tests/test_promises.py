"""What PROMISES.md says: each promise of the README has a witness in the fast tier and a full
proof; and what cpu_seconds.py finds too expensive for that tier."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import cpu_seconds
import pytest

TESTS = Path(__file__).parent
README = " ".join((TESTS.parent / "README.md").read_text(encoding="utf-8").split())
ROWS = [
    [cell.strip() for cell in line.strip("| \n").split(" | ")]
    for line in (TESTS / "PROMISES.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
][2:]
TIERS = {"slow", "system"}


def named_tests(cell: str) -> list[tuple[str, str]]:
    """(file, test) of each test that a cell names; without a test: the whole file."""
    result = []
    for file, _, test in (name.partition("::") for name in re.findall("`([^`]+)`", cell)):
        result.append((file, test))
    return result


def marks(expressions: list[ast.expr]) -> set[str]:
    """Names of `pytest.mark.NAME`, also in lists and with arguments; not those of single cases of a
    test."""
    found = set()
    for expression in expressions:
        if isinstance(expression, ast.Call):
            expression = expression.func
        if isinstance(expression, ast.List):
            found |= marks(expression.elts)
        if isinstance(expression, ast.Attribute):
            found.add(expression.attr)
    return found


@cache
def marks_by_test(file: str) -> dict[str, set[str]]:
    """The tests of a file with their marks, those of the file included."""
    body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
    of_the_file: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark":
            of_the_file = marks([statement.value])
    result = {}
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            result[statement.name] = marks(statement.decorator_list) | of_the_file
    return result


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_promise_has_a_fast_witness_and_a_full_proof(row: list[str]):
    promise, witnesses, proofs = row
    assert promise in README
    assert named_tests(witnesses) and named_tests(proofs)
    for file, test in named_tests(witnesses):
        assert test in marks_by_test(file), f"{file} has no {test}"
        assert not marks_by_test(file)[test] & TIERS, f"{test} is no test of the fast tier"
    for file, test in named_tests(proofs):
        assert test in marks_by_test(file) or (marks_by_test(file) and not test), (
            f"{file} has no {test}"
        )


def test_each_point_of_what_you_get_has_its_promises():
    section = README.partition("## What you get")[2].partition(" ## ")[0]
    points = section.split(" * ")[1:]
    assert len(points) == 6
    for point in points:
        assert any(row[0] in point for row in ROWS), point


def test_a_test_without_a_mark_takes_at_most_five_seconds(tmp_path: Path):
    file = tmp_path / "seconds.tsv"
    file.write_text(
        "4.00\t0.90\t9.00\tfast\tran\ta\n9.00\t0.00\t9.00\tslow\tran\tb\n"
        "4.00\t2.00\t5.00\tfast\tran\tc\n"
        "6.00\t0.00\t6.00\tfast\tran\td\n8.00\t0.00\t8.00\tfast\tran\te.py: fixture whole\n"
    )
    costs = cpu_seconds.read_costs(file)
    assert [cost.test for cost in cpu_seconds.too_expensive(costs)] == ["c", "d"]
    with file.open("a") as more:
        # each once more, alone
        more.write("5.50\t0.00\t6.00\tfast\tran\tc\n3.00\t0.00\t3.00\tfast\tran\td\n")
    assert [cost.test for cost in cpu_seconds.too_expensive(cpu_seconds.read_costs(file))] == ["c"]
    assert cpu_seconds.summary(costs)[0].split()[:5] == ["fast", "3", "tests", "25", "s"]
