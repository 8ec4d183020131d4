"""One thought a statement: expressions that a reader has to unfold are not in the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "shoal"

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
COMPUTED = (ast.IfExp, ast.BinOp, ast.List, ast.Tuple, ast.Set, ast.Dict, *COMPREHENSIONS)
"""What is given a name before it is unpacked into a call."""


def has(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    return any(isinstance(inner, kinds) for inner in ast.walk(node))


def unpacked(call: ast.Call) -> Iterator[ast.expr]:
    """What a call unpacks with * and **."""
    for argument in call.args:
        if isinstance(argument, ast.Starred):
            yield argument.value
    for keyword in call.keywords:
        if keyword.arg is None:
            yield keyword.value


def fault_of(node: ast.AST) -> str:
    """Why a node reads badly; empty if it does not."""
    if isinstance(node, ast.NamedExpr):
        return "an assignment within an expression: make it a statement"
    if isinstance(node, ast.IfExp) and any(
        has(part, (ast.IfExp,)) for part in (node.test, node.body, node.orelse)
    ):
        return "a conditional expression within another: use if statements"
    if isinstance(node, COMPREHENSIONS):
        has_condition = any(generator.ifs for generator in node.generators)
        if len(node.generators) > 2 or (len(node.generators) == 2 and has_condition):
            return "a comprehension over several sources with a condition: use loops"
    if isinstance(node, ast.For | ast.While) and isinstance(node.body[0], ast.Pass):
        return "a loop without a body: its work is hidden in its head"
    if isinstance(node, ast.Lambda) and has(node.body, (ast.IfExp, *COMPREHENSIONS)):
        return "a lambda that needs thought: use a function with a name"
    if isinstance(node, ast.Call) and any(isinstance(part, COMPUTED) for part in unpacked(node)):
        return "what is unpacked into a call is computed there: give it a name"
    return ""


def faults(source: str, name: str) -> list[str]:
    """The faults of a module's functions. Tables of data at its top, as of other systems' flags,
    may be composed of computed rows."""
    lines = []
    for definition in ast.parse(source).body:
        if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for node in ast.walk(definition):
            fault = fault_of(node)
            if fault:
                lines.append(f"{name}:{node.lineno}: {fault}")
    return lines


def test_no_function_needs_to_be_unfolded():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        found += faults(path.read_text(encoding="utf-8"), str(path.relative_to(PACKAGE)))
    assert found == []


@pytest.mark.parametrize(
    "statement",
    [
        "if (size := len(values)) > 1: return size",
        "return 1 if a else 2 if b else 3",
        "return [x for row in rows for x in row if x]",
        "while step(): pass",
        "return sorted(rows, key=lambda row: row.a if row.a else row.b)",
        "return join(*(part.name for part in parts))",
        "return make(**{name: value})",
    ],
)
def test_a_form_that_must_be_unfolded_is_found(statement: str):
    assert len(faults(f"def f():\n    {statement}\n", "a.py")) == 1


@pytest.mark.parametrize(
    "statement",
    [
        "return a if b else c",
        "return [x for row in rows for x in row]",
        "return join(*parts, *names())",
        "return sorted(rows, key=lambda row: -row.size)",
    ],
)
def test_a_form_that_reads_at_once_is_not(statement: str):
    assert faults(f"def f():\n    {statement}\n", "a.py") == []
