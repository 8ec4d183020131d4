"""Names and messages use the field's words: a short list of others is refused where a user or a
reader meets them."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from scripts import load

from shoal.config.commands import COMMANDS
from shoal.config.key import keys_of
from shoal.runs.metrics import METRICS

PACKAGE = Path(__file__).parent.parent / "src" / "shoal"

CLASSES = {
    "became",
    "declared",
    "desk",
    "drawn",
    "gathered",
    "given",
    "judge",
    "judged",
    "learnt",
    "look",
    "need",
    "opened",
    "settled",
    "sheet",
    "there",
    "told",
}
MODULES = {"brief", "call", "choose", "judge", "learning", "look", "made", "trial"}
WORDS = {"beh", "brought", "drawn", "learnt", "tell", "told"}
"""Words that no key, metric, figure or public function has in its name."""
KEY_WORDS = {*WORDS, "cut", "degenerate", "informative", "mismatch", "renormalise"}
"""Words that no key, metric or figure has in its name."""

IN_ERRORS = re.compile(
    r"\b(told|brought|learnt|informative|degenerate|beside|apart|of which|one's own|mend(s|ed)?|"
    r"(goes|gone) on|go on with|(take|takes|took) up|look(s|ed)? at|(not|nothing) there yet)\b"
)


def named(words: set[str], name: str) -> set[str]:
    """The words of `words` that a name in snake case, with dots or slashes, is made of."""
    return words & set(re.split(r"[^a-z]+", name.lower()))


@cache
def trees() -> list[tuple[str, ast.Module]]:
    """Each module of the package, by its path there."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        found.append((str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))))
    return found


def test_classes_and_modules_are_nouns_of_the_field():
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name.strip("_").lower() in CLASSES:
                found.append(f"{path}: class {node.name}")
    found += [f"{path}: module" for path, _ in trees() if Path(path).stem in MODULES]
    assert not found, "\n".join(found)


def test_public_functions_have_plain_names():
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.FunctionDef)
                and not node.name.startswith("_")
                and named(WORDS, node.name)
            ):
                found.append(f"{path}:{node.lineno}: {node.name}")
    assert not found, "\n".join(found)


def test_keys_metrics_and_figures_have_plain_names():
    keys = {
        f"key {key}"
        for config in COMMANDS.values()
        for key in keys_of(config)
        if named(KEY_WORDS, key)
    }
    figures = {
        f"figure {name}"
        for name in (*METRICS, *load("docs/reference.py").EVALUATION)
        if named(KEY_WORDS, name)
    }
    assert not keys | figures


def test_error_messages_have_plain_words():
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("ShoalError", "UnknownKey")
            ):
                continue
            text = " ".join(
                part.value
                for argument in node.args
                for part in ast.walk(argument)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
            if word := IN_ERRORS.search(text):
                found.append(f"{path}:{node.lineno}: {word[0]!r} in {text[:90]!r}")
    assert not found, "\n".join(found)
