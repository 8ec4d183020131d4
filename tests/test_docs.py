"""The documentation: what it names exists, every error has its entry, the site builds without a warning."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import shoal
from shoal import cli
from shoal.commands.multirun import combine
from shoal.config.arguments import names_of
from shoal.config.loading import compose
from shoal.commands.help import command_help
from shoal.config.keys import COMMANDS, keys_of, sections_of
from shoal.config.schema import Config
from shoal.report.metrics import METRICS
from shoal.types import ShoalError

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "shoal"
PAGES = sorted(path for path in DOCS.glob("*.md") if path.name not in ("LOG.md", "metrics.md", "migrating.md"))

pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of these languages."""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def inline(page: Path) -> list[str]:
    """What stands between backticks in the prose."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [text.strip() for _, text in re.findall(r"(?<!`)(`{1,2})(?!`)(.+?)(?<!`)\1(?!`)", prose)]


# ---- commands and keys


def commands(page: Path) -> list[str]:
    """Every `shoal ...` that the page says to type: in shell blocks, after a `$`, and in the prose."""
    typed = [line for text in blocks(page, "bash") for line in joined(text)]
    typed += [line[2:] for text in blocks(page, "console") for line in joined(text) if line.startswith("$ ")]
    typed += inline(page)
    return [line for line in typed if line.startswith("shoal ")]


def joined(text: str) -> list[str]:
    return [line.strip() for line in text.replace("\\\n", " ").splitlines()]


def check_command(line: str, folder: Path) -> None:
    """The command exists and its words compose to a configuration; files of settings that it names are made."""
    _, command, *words = shlex.split(line, comments=True)
    words = [word for word in words if word not in ("|", "source", "...")]
    if command in ("--help", "completion"):
        return
    assert command in COMMANDS, f"{line}: there is no such command"
    if "--help" in words:
        command_help(command, [word for word in words if word != "--help" and not word.isupper()])
        return
    for word in words:
        if word.endswith(".yaml") and "=" not in word:
            (folder / word).write_text("steps: 1\n", encoding="utf-8")
    own = [word for word in words if word not in ("--dry-run", "--multirun")]
    for _, each in combine(COMMANDS[command], own) if "--multirun" in words else [({}, own)]:
        compose(command, each)


@pages
def test_every_command_composes(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for line in commands(page):
        check_command(line, tmp_path)


def test_help_in_the_pages_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "110")
    shown = dict(text[2:].split("\n", 1) for page in PAGES for text in blocks(page, "console")
                 if re.match(r"\$ shoal .*--help", text))
    assert shown.keys() >= {"shoal --help", "shoal train --help optimizer"}
    for line, output in shown.items():
        assert cli.main(line.split()[1:]) == 0
        assert capsys.readouterr().out == output, line


def test_commands_are_found():
    assert len(commands(DOCS / "command-line.md")) > 15
    assert any("--multirun" in line and "run_name=sweep" in line for line in commands(DOCS / "command-line.md"))


@pytest.mark.parametrize("line", ["shoal trian", "shoal train no.such=1", "shoal train optimizer.lr=high",
                                  "shoal train --help optimiser", "shoal diff a b c"])
def test_a_wrong_command_would_be_found(line: str, tmp_path: Path):
    with pytest.raises((ShoalError, AssertionError)):
        check_command(line, tmp_path)


@pages
def test_settings_in_yaml_compose(page: Path, tmp_path: Path):
    for number, text in enumerate(blocks(page, "yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text, encoding="utf-8")
        compose("train", [str(file)])


KEY = re.compile(r"(?<![\w./:=-])([a-z]\w*(?:\.[a-z]\w*)+)(?==|\b)")
FILES = re.compile(r"\.(py|md|yaml|yml|json|jsonl|parquet|ipynb|txt)$")


@pages
def test_every_key_in_the_prose_exists(page: Path):
    """A dotted name whose first part is a section of keys is a key, or a section in it; `key=value` has a value that
    the key takes."""
    keys, sections = keys_of(Config), sections_of(Config)
    tops = {section.partition(".")[0] for section in sections}
    for text in inline(page):
        for name in KEY.findall(text):
            if name.partition(".")[0] in tops and not FILES.search(name):
                assert name in keys or name in sections, f"{page.name}: `{text}` names {name}, which is no key"
        name, _, value = text.partition("=")
        if name in keys and re.fullmatch(r"[^\s=]+", value) and not value.isupper():
            compose("train", [text])


@pages
def test_every_metric_in_the_prose_exists(page: Path):
    heads = {name.partition("/")[0] for name in METRICS if "/" in name} - {"time", "version"}
    patterns = [re.compile(re.sub(r"\\\{\w+\\\}", r"[\\w{}]+", re.escape(name))) for name in METRICS]
    for text in inline(page):
        if re.fullmatch(r"[a-z_]+/[\w/{}]+", text) and text.partition("/")[0] in heads:
            assert any(pattern.fullmatch(text) for pattern in patterns), f"{page.name}: there is no metric {text}"


@pages
def test_python_blocks_are_python(page: Path):
    """They compile, and what they take from `shoal` is there."""
    for text in blocks(page, "python"):
        if text.startswith("INCLUDE "):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "shoal":
                assert hasattr(shoal, node.attr), f"{page.name}: shoal.{node.attr}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("shoal.train", "shoal.evaluate"):
                config = COMMANDS["train" if ast.unparse(node.func) == "shoal.train" else "eval"]
                known = {name.partition(".")[0] for name in names_of(config)} | {"task", "held_out", "correct"}
                given = {word.arg.partition("__")[0] for word in node.keywords if word.arg}
                assert given <= known | {"config_name"}, f"{page.name}: {sorted(given - known)}"


# ---- errors

CARRIED = {
    "_a_model(spec)": "a model is not supported as a reward",
    "_a_model(function)": "a model is not supported as a reward",
    "message + ': raise it, or set sampling.long_prompts=drop'": "sampling.max_prompt_tokens is",
}
"""Messages that come from elsewhere -> words of theirs."""

BARE = ("{self.place}: {error}", "{self._head} {outcome.text}")
"""Messages that add a place to another one, which has its own entry."""

Part = str | None
"""A piece of a message: constant words, or None for what a run fills in."""


def errors() -> Iterator[tuple[str, list[Part], str]]:
    """Each `ShoalError(...)` of the source, and each breach of the rewards' convention: (place, parts, source)."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args and \
                    node.func.id in ("ShoalError", "UnknownKey", "_Wrong"):
                for parts in variants(node.args[0]):
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}", parts, ast.unparse(node.args[0])


def variants(node: ast.expr) -> list[list[Part]]:
    """The message as parts; two where a condition at its top decides between texts."""
    if isinstance(node, ast.IfExp):
        return [*variants(node.body), *variants(node.orelse)]
    return [list(parts_of(node))]


def parts_of(node: ast.expr) -> Iterator[Part]:
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from parts_of(value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from parts_of(node.left)
        yield from parts_of(node.right)
    else:
        yield None


def pattern(parts: list[Part]) -> re.Pattern[str]:
    """What an entry must look like: the constant words as they are, anything where a run fills in."""
    return re.compile("".join(".*" if part is None else re.escape(part) for part in parts), re.DOTALL)


def entries() -> list[str]:
    """The messages that the page lists: lines in backticks with a cure under them."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    return [found[1].strip() for found in re.findall(r"^(`+)(.+?)\1\n+: {3}\S", text, re.MULTILINE)]


def has_entry(parts: list[Part], source: str, listed: list[str]) -> bool:
    if source in CARRIED:
        return any(CARRIED[source] in entry for entry in listed)
    if any(source == f"f{quote}{bare}{quote}" for bare in BARE for quote in "'\""):
        return True
    return any(pattern(parts).fullmatch(entry) for entry in listed)


def test_every_error_has_an_entry_in_troubleshooting():
    listed, found = entries(), list(errors())
    assert len(found) > 150 and len(listed) > 100
    missing = [f"{place}: {source}" for place, parts, source in found if not has_entry(parts, source, listed)]
    assert not missing, "docs/troubleshooting.md has no entry for:\n" + "\n".join(missing)


def test_every_entry_is_an_error_that_can_occur():
    found = list(errors())
    stale = [entry for entry in entries()
             if not any(pattern(parts).fullmatch(entry) for _, parts, _ in found)
             and not any(words in entry for words in CARRIED.values())]
    assert not stale, "no message of the source is like:\n" + "\n".join(stale)


@pages
def test_errors_in_shown_output_are_those_of_today(page: Path):
    found = list(errors())
    for text in blocks(page, "console", "text"):
        for line in re.findall(r"^error: (.+)$", text, re.MULTILINE):
            assert any(sum(map(len, filter(None, parts))) > 20 and pattern(parts).fullmatch(line)
                       for _, parts, _ in found), f"{page.name}: {line}"


def test_an_error_without_entry_would_be_found():
    node = ast.parse("ShoalError(f'the {thing} is upside down: turn it round')", mode="eval").body
    assert isinstance(node, ast.Call)
    (parts,) = variants(node.args[0])
    assert not has_entry(parts, ast.unparse(node.args[0]), entries())
    assert has_entry(parts, ast.unparse(node.args[0]), ["the THING is upside down: turn it round"])


# ---- the site


def nav_pages(entries: list[object]) -> Iterator[str]:
    for entry in entries:
        values = list(entry.values()) if isinstance(entry, dict) else [entry]
        for value in values:
            yield from nav_pages(value) if isinstance(value, list) else [str(value)]


def test_the_navigation_is_whole():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = list(nav_pages(settings["nav"]))
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert there <= set(listed), f"not in the navigation: {sorted(there - set(listed))}"
    titles = [next(iter(entry)) for entry in settings["nav"]]
    assert titles == ["Start", "Own task", "Tasks", "Own reward", "Algorithms", "Evaluation", "Resume",
                      "MaxText checkpoints", "Reading a run", "Doctor", "Command line", "Migrating", "Metrics",
                      "Troubleshooting", "Architecture", "Decisions"]
    assert settings["plugins"] == ["search"] and settings["theme"]["font"] is False and settings["strict"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(ROOT / "mkdocs.yml"),
                            "-d", str(folder / "site")], capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    return folder / "site"


def test_the_site_builds_strictly_with_the_examples(site: Path):
    for page in ("index.html", "troubleshooting/index.html", "metrics/index.html", "decisions/index.html"):
        assert (site / page).is_file(), page
    for name in ("own_task.py", "own_task.ipynb"):
        assert (site / "examples" / name).read_bytes() == (ROOT / "examples" / name).read_bytes()
    text = (site / "own-task" / "index.html").read_text(encoding="utf-8")
    assert "INCLUDE" not in text and "NEAR_ENOUGH" in text


def test_a_page_fetches_nothing_from_elsewhere(site: Path):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"(https?:[^\"]*)\"", text)
        fetched += re.findall(r"<link[^>]*rel=\"(?:stylesheet|preconnect|preload)\"[^>]*href=\"(https?:[^\"]*)\"", text)
        assert not fetched, f"{page}: {fetched}"


def test_every_link_of_a_page_leads_somewhere(site: Path):
    for page in site.rglob("index.html"):
        for target in re.findall(r"<a [^>]*href=\"([^\"#?:]+)(?:[#?][^\"]*)?\"", page.read_text(encoding="utf-8")):
            place = (page.parent / target).resolve()
            assert place.exists(), f"{page.relative_to(site)} links to {target}"
