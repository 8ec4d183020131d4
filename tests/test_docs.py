"""The documentation: its commands, keys, paths and functions exist, and the site builds without a
warning."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from scripts import load

import shoal
from shoal import cli
from shoal.commands.help import command_help
from shoal.commands.multirun import combine
from shoal.config.commands import COMMANDS
from shoal.config.foreign import front_end
from shoal.config.key import keys_of, sections_of
from shoal.config.merge import compose
from shoal.config.names import names_of
from shoal.config.train import Config
from shoal.runs.diagnosis import ROWS, SYMPTOMS
from shoal.runs.metrics import METRICS
from test_architecture import LAYERS
from test_readme import path_of_the_page, resolve

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "shoal"
transcripts = load("docs/transcripts.py")
reference = load("docs/reference.py")
PAGES = [
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in DOCS.glob("*.md") if path.name not in ("LOG.md", *reference.PAGES)),
]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of these languages."""
    found = re.findall(
        r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return [text for language, text in found if language in languages]


def inline(page: Path) -> list[str]:
    """The code spans of the prose."""
    prose = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    result = []
    for _, text in re.findall(r"(?<!`)(`{1,2})(?!`)(.+?)(?<!`)\1(?!`)", prose):
        result.append(text.strip())
    return result


@pytest.mark.parametrize(
    "page", [*PAGES, *map(DOCS.joinpath, reference.PAGES)], ids=lambda path: path.stem
)
def test_a_page_says_first_what_it_is_for_and_is_short(page: Path):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ") and lines[2].startswith("After reading this page you "), (
        page.name
    )
    assert len(lines) <= 300, f"{page.name} has {len(lines)} lines: divide it"


@pytest.mark.parametrize("name", reference.PAGES)
def test_pages_are_those_that_the_tables_make(name: str):
    assert (DOCS / name).read_text(encoding="utf-8") == reference.PAGES[name](), (
        "python docs/reference.py"
    )


# ---- commands and keys


def commands(page: Path) -> list[str]:
    """Every `shoal ...` command of a page: in shell blocks, after a `$`, and in the prose."""
    typed = []
    for text in blocks(page, "bash"):
        for line in joined(text):
            typed.append(line)
    typed += [
        shlex.join(call.words).partition(" '|' ")[0]
        for block in transcripts.transcripts(page.read_text("utf-8"))
        for call in block
        if not "".join(call.shown).startswith("error: ")
    ]
    typed += inline(page)
    return [line for line in typed if line.startswith("shoal ")]


def joined(text: str) -> list[str]:
    return [line.strip() for line in text.replace("\\\n", " ").splitlines()]


def check_command(line: str, folder: Path) -> None:
    """The command exists and its arguments compose to a configuration; missing YAML files are
    created first."""
    _, command, *words = shlex.split(line, comments=True)
    words = [word for word in words if word not in ("|", "source", "...")]
    if command == "--help":
        return
    assert command in COMMANDS, f"{line}: there is no such command"
    if command == "launch" and "--" in words:
        words, job = words[: words.index("--")], words[words.index("--") + 1 :]
        if job[0] in COMMANDS:
            check_command(shlex.join(["shoal", *job]), folder)
    if "--help" in words:
        command_help(command, [word for word in words if word != "--help" and not word.isupper()])
        return
    for word in words:
        if word.endswith(".yaml") and "=" not in word:
            file = folder / word
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("steps: 1\n", encoding="utf-8")
    command = "plan" if "--plan" in words else command
    own = []
    for word in words:
        if word not in ("--dry-run", "--multirun", "--plan"):
            own.append(word)
    for _, each in combine(COMMANDS[command], own) if "--multirun" in words else [({}, own)]:
        compose(command, each)


@pages
def test_every_command_composes(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for line in commands(page):
        check_command(line, tmp_path)


@pages
def test_quick_transcripts_are_what_the_commands_print(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Help texts, dry runs and errors that need no run; `python docs/transcripts.py` rewrites all
    transcripts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    text = page.read_text(encoding="utf-8")
    for name, content in transcripts.files(text):
        Path(name).write_text(content, encoding="utf-8")
    for block in transcripts.transcripts(text):
        for call in block if all(call.is_quick for call in block) else ():
            command, *words = call.words
            if command == "export":
                monkeypatch.setenv(*words[0].split("=", 1))
                continue
            cli.main(words)
            printed = "".join(capfd.readouterr()).splitlines()
            assert transcripts.renewed(call.shown, printed) == call.shown, (
                f"python docs/transcripts.py {page}"
            )


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
    """A dotted name in a section of keys is a key or a section; the value of `key=value` is
    accepted."""
    keys, sections = keys_of(Config), sections_of(Config)
    tops = {section.partition(".")[0] for section in sections}
    for text in inline(page):
        for name in KEY.findall(text):
            if name.partition(".")[0] in tops and not FILES.search(name):
                assert name in keys or name in sections, (
                    f"{page.name}: `{text}` names {name}, which is no key"
                )
        name, _, value = text.partition("=")
        if name in keys and re.fullmatch(r"[^\s=]+", value) and not value.isupper():
            compose("train", [text])


@pages
def test_every_metric_in_the_prose_exists(page: Path):
    heads = {name.partition("/")[0] for name in METRICS if "/" in name} - {"time", "version"}
    patterns = []
    for name in METRICS:
        patterns.append(re.compile(re.sub(r"\\\{\w+\\\}", r"[\\w{}]+", re.escape(name))))
    for text in inline(page):
        if re.fullmatch(r"[a-z_]+/[\w/{}]+", text) and text.partition("/")[0] in heads:
            assert any(pattern.fullmatch(text) for pattern in patterns), (
                f"{page.name}: there is no metric {text}"
            )


@pages
def test_links_lead_somewhere_where_a_page_is_read_as_a_file(page: Path):
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("../..") or (page.parent / target).exists(), (
            f"{page.name} links to {target}"
        )


@pages
def test_python_blocks_are_python(page: Path):
    """They parse, and use attributes and keys of `shoal` that exist."""
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "shoal"
            ):
                assert hasattr(shoal, node.attr), f"{page.name}: shoal.{node.attr}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "shoal.train",
                "shoal.evaluate",
            ):
                config = COMMANDS["train" if ast.unparse(node.func) == "shoal.train" else "eval"]
                known = {name.partition(".")[0] for name in names_of(config)} | {
                    "task",
                    "held_out",
                    "correct",
                    "train_dataset",
                    "eval_dataset",
                }
                given = {word.arg.partition("__")[0] for word in node.keywords if word.arg}
                unknown = []
                for name in given - known - {"config_name"}:
                    if not front_end().find_flag(config, name):
                        unknown.append(name)
                assert not unknown, f"{page.name}: {unknown}"


def strings_of(path: Path) -> Iterator[str]:
    """The string literals of a module, with `...` for the values inside f-strings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.slow
def test_messages_that_troubleshooting_quotes_are_in_the_code():
    """Those in bold, and in the first column of its tables; `...` and names in capitals stand for
    any text."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"\*\*`([^`]+)`", text)
    cells = "".join(re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE))
    quoted += [span for span in re.findall("`([^`]+)`", cells) if " " in span]
    assert len(quoted) > 8
    messages = {string for path in SOURCE.rglob("*.py") for string in strings_of(path)}
    for message in quoted:
        for part in re.split(r"\.\.\.|\b[A-Z]+\b", message):
            assert any(part.strip() in string for string in messages), f"no message has {part!r}"


def test_the_symptoms_of_warnings_are_headings_of_their_page():
    text = (DOCS / SYMPTOMS).read_text(encoding="utf-8")
    headings = {
        heading.lower().replace(" ", "-") for heading in re.findall("^## (.+)$", text, re.MULTILINE)
    }
    named = {row.symptom for row in ROWS if row.symptom}
    assert named and named <= headings, named - headings
    linked = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert linked == headings


def test_extras_are_installed_from_the_clone_by_one_name():
    """Shoal is on no package index: `shoal[view]` would bring another package, or none."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    texts = [
        *SOURCE.rglob("*.py"),
        *DOCS.glob("*.md"),
        *(ROOT / "examples").glob("*.*"),
        ROOT / "README.md",
    ]
    named = set()
    for path in texts:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\bshoal\[", text), f"{path}: write .[NAME]"
        named |= {
            name for names in re.findall(r"'\.\[([a-z0-9,]+)\]'", text) for name in names.split(",")
        }
    assert named and named <= set(extras), named - set(extras)


# ---- the code that pages name

PATH = re.compile(r"(?:src|tests|benchmarks|docs|examples)/[\w./+-]*")


@pages
def test_every_path_in_the_prose_exists(page: Path):
    for text in inline(page):
        for path in PATH.findall(text):
            if "reverse" not in path:  # the file that adding-a-task.md writes
                assert (ROOT / path.rstrip("/.")).exists(), f"{page.name}: there is no {path}"


def test_the_layers_of_the_architecture_page_are_those_of_the_test():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (`[^|]+) \|", text, re.MULTILINE)
    assert {int(layer): tuple(re.findall(r"`(\w+)`", names)) for layer, names in rows} == LAYERS


def test_every_function_on_the_architecture_page_exists():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    for name in path_of_the_page():
        assert callable(resolve(name))
    tree = re.findall(r"^## The tree\n+```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    for name in re.findall(r"([\w.]+(?:/|\.py))", tree.replace("src/shoal/", "", 1)):
        assert (SOURCE / name).exists() or (ROOT / name).exists(), name
    for name in re.findall(r"`([A-Z_]{4,})`", text):  # registries
        assert any(name in file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py")), name


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
    assert (
        settings["plugins"] == ["search"]
        and settings["theme"]["font"] is False
        and settings["strict"]
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "-q",
            "-f",
            str(ROOT / "mkdocs.yml"),
            "-d",
            str(folder / "site"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    return folder / "site"


@pytest.mark.system
def test_the_site_builds_strictly_with_the_examples(site: Path):
    for page in (
        "index.html",
        "troubleshooting/index.html",
        "metrics/index.html",
        "decisions/index.html",
    ):
        assert (site / page).is_file(), page
    for name in ("own_task.py", "first_run.ipynb"):
        assert (site / "examples" / name).read_bytes() == (ROOT / "examples" / name).read_bytes()
    text = (site / "own-task" / "index.html").read_text(encoding="utf-8")
    assert 'href="../examples/own_task.py"' in text and 'href="../examples/first_run/"' in text


@pytest.mark.system
def test_a_page_fetches_nothing_from_elsewhere(site: Path):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"(https?:[^\"]*)\"", text)
        fetched += re.findall(
            r"<link[^>]*rel=\"(?:stylesheet|preconnect|preload)\"[^>]*href=\"(https?:[^\"]*)\"",
            text,
        )
        assert not fetched, f"{page}: {fetched}"


@pytest.mark.system
def test_every_link_of_a_page_leads_somewhere(site: Path):
    for page in site.rglob("index.html"):
        for target in re.findall(
            r"<a [^>]*href=\"([^\"#?:]+)(?:[#?][^\"]*)?\"", page.read_text(encoding="utf-8")
        ):
            place = (page.parent / target).resolve()
            assert place.exists(), f"{page.relative_to(site)} links to {target}"


# ---- the repository's own files


def test_workflows_run_what_exists():
    steps = []
    for path in (ROOT / ".github" / "workflows").iterdir():
        for job in yaml.safe_load(path.read_text("utf-8"))["jobs"].values():
            for step in job["steps"]:
                if "run" in step:
                    steps.append(step["run"])
    assert {".ci/run", ".ci/wheel"} <= set(steps)
    for step in steps:
        for word in step.split():
            if word.startswith(".ci/"):
                assert word.endswith(".py") or os.access(ROOT / word, os.X_OK)
                assert (ROOT / word).is_file()
    tests = []
    for step in steps:
        for word in step.split():
            if word.startswith("tests/"):
                tests.append(word)
    assert tests and all((ROOT / word).is_file() for word in tests)


def test_forms_ask_for_what_commands_print(tmp_path: Path):
    forms = {}
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        forms[path.stem] = yaml.safe_load(path.read_text("utf-8"))
    for name in forms.keys() - {"config"}:
        assert {"name", "description", "body"} <= forms[name].keys()
        for field in forms[name]["body"]:
            assert (
                field["type"] in ("textarea", "input")
                and field["attributes"]["label"]
                and field["id"]
            ), name
    texts = []
    for field in forms["bug"]["body"]:
        for text in field["attributes"].values():
            if isinstance(text, str):
                texts.append(text)
    asked = re.findall("`(shoal [^`]+)`", "".join(texts))
    assert "shoal doctor" in asked
    for line in asked:
        check_command(line, tmp_path)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
