"""Decides which names of a candidate's code the tests of a task get to see: those that the tests
use and that nothing else defines.

Tests run in their own globals. Builtins are Python's, modules are of the standard library, and
imports are those of the tests, of the prompt's code and of the reference solution; so if a
candidate defines `set`, `abs` or `math`, the tests do not use it.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TestedNames:
    """What the sandbox puts into the globals of the tests.

    >>> tests = ["assert math.isclose(area(1), math.pi)"]
    >>> tested_names({"setup": "", "tests": tests, "entry_point": ""})
    TestedNames(names=(), spare=('area',), given='', imports=('import math',))
    """

    # Names that must come from the candidate: the reference solution defines them, or only imports
    # them.
    names: tuple[str, ...]
    spare: tuple[str, ...]  # names that come from the candidate unless an import defines them
    given: str  # the prompt's code, which is run first
    imports: tuple[str, ...]  # statements that are run before the tests


def tested_names(case: Mapping[str, Any]) -> TestedNames:
    """Decides which names the tests of a case get, and from where. Reads the case's `setup`,
    `tests`, `entry_point` and, if the data has them, `given` (the prompt's code) and `reference`
    (its solution). Code that is not valid Python counts as having no names: the sandbox then fails
    on it."""
    tests = _Code.read([case.get("setup", ""), *case["tests"]])
    given_text = _completed(case.get("given", ""))
    given = _Code.read([given_text])
    reference = _Code.read([case.get("reference", "")])
    entry_point = case.get("entry_point", "")

    own = tests.bound | given.bound  # what needs nothing from the candidate
    wanted = {name for name in tests.used - own if not name.startswith("__")}
    # What the solution defines is what is tested, even if it has the name of a builtin or a module.
    names = wanted & reference.defined
    if not (names or entry_point):
        names = _re_exported(tests, wanted, reference)
    wanted -= names
    imports = []
    for statement, bound in reference.imports:
        if bound & (wanted | {"*"}):  # `from module import *` may bind any of them
            imports.append(statement)
    wanted -= reference.imported
    # What is left, the reference neither defines nor imports: a module, or a spare name.
    # A name whose attributes are read, and that is not called, is a module.
    modules = (wanted & sys.stdlib_module_names & tests.opened) - tests.called
    for name in sorted(modules):
        imports.append(f"import {name}")
    spare = {name for name in wanted - modules if not hasattr(builtins, name)}
    if not (names or spare or entry_point or case.get("reference")):
        # MBPP has tasks whose function has the name of a builtin, such as `sum`.
        hidden = tests.called - own
        # With several it is not clear which one is tested.
        if len(hidden) == 1:
            spare = set(hidden)
    if entry_point:
        names.add(entry_point)
        spare.discard(entry_point)
    return TestedNames(tuple(sorted(names)), tuple(sorted(spare)), given_text, tuple(imports))


def undefined_names(case: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names that the tests use and that neither the tests, the setup, the prompt's
    code, an import nor the reference solution defines. A completion passes such tests only if it
    happens to define these names. () without a reference solution, since the completion may then be
    expected to define them.

    >>> case = {"setup": "", "tests": ["assert is_near(area(1), 3)"], "entry_point": ""}
    >>> undefined_names({**case, "reference": "def area(r): return 3 * r"})
    ('is_near',)
    """
    if not _Code.read([case.get("reference", "")]).bound:
        return ()
    return tested_names(case).spare


def _re_exported(tests: _Code, wanted: set[str], reference: _Code) -> set[str]:
    """Returns the names that the tests call and that the reference solution does not define but
    only imports, as in `from math import gcd`; an empty set if it does not import all of them.
    `wanted` are the names that the tests use and do not define."""
    called = {name for name in wanted & tests.called if not hasattr(builtins, name)}
    imported = reference.imported
    if called <= imported or ("*" in imported and len(called) == 1):
        return called
    return set()


def _completed(text: str) -> str:
    """Returns code that compiles: the text itself, or with the body `pass` added if it ends with
    the head of a function; "" if neither is valid Python."""
    for body in ("", "    pass\n"):
        try:
            compile(text + body, "<given>", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return text + body
    return ""


@dataclass(frozen=True)
class _Code:
    """The global names that occur in some texts of code, by their use."""

    used: frozenset[str]
    bound: frozenset[str]
    defined: frozenset[str]  # bound by more than an import
    called: frozenset[str]
    opened: frozenset[str]  # names whose attributes are read, like a module's
    imports: tuple[tuple[str, frozenset[str]], ...]  # statements, and the names that each binds

    @property
    def imported(self) -> set[str]:
        """All names that the imports bind."""
        names: set[str] = set()
        for _, bound in self.imports:
            names |= bound
        return names

    @staticmethod
    def read(texts: Sequence[str]) -> _Code:
        """Returns the names that occur in several texts of code. A text that is not valid Python is
        left out."""
        used: set[str] = set()
        bound: set[str] = set()
        defined: set[str] = set()
        called: set[str] = set()
        opened: set[str] = set()
        imports: list[tuple[str, frozenset[str]]] = []
        for text in texts:
            try:
                tree = ast.parse(text)
                table = symtable.symtable(text, "<tests>", "exec")
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            used.update(_global_uses(table))
            for symbol in table.get_symbols():
                if symbol.is_assigned():
                    defined.add(symbol.get_name())
                if symbol.is_assigned() or symbol.is_imported():
                    bound.add(symbol.get_name())
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    called.add(node.func.id)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    opened.add(node.value.id)
            for statement in _run_with_module(tree):
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    names = set()
                    for alias in statement.names:
                        names.add(alias.asname or alias.name.partition(".")[0])
                    imports.append((ast.unparse(statement), frozenset(names)))
        return _Code(
            used=frozenset(used),
            bound=frozenset(bound),
            defined=frozenset(defined),
            called=frozenset(called),
            opened=frozenset(opened),
            imports=tuple(imports),
        )


def _run_with_module(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes below `node` that running the module executes: all but the bodies of
    functions and classes, and the insides of expressions."""
    for inner in ast.iter_child_nodes(node):
        yield inner
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from _run_with_module(inner)


def _global_uses(table: symtable.SymbolTable) -> Iterator[str]:
    """Yields the names that a scope and its inner scopes read as globals. A name may be yielded
    more than once."""
    is_module = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (is_module or symbol.is_global()):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _global_uses(inner)
