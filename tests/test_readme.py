"""What the README promises: two commands of one line, commands that compose, links that lead
somewhere; and the path from the command to the gradient that the architecture page draws."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from shoal.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_first_two_commands_are_one_line_each():
    first, second = blocks("bash")[:2]
    assert first.count("\n") == second.count("\n") == 1
    assert first.rstrip().endswith("shoal train") and second.rstrip().endswith("-m pytest")


def test_it_is_read_in_a_minute_and_its_links_lead_somewhere():
    assert len(README.splitlines()) <= 140
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README) + re.findall(
        r'(?:src|srcset)="([^"]+)"', README
    )
    # ../../actions is the repository's own page beside its files, on a host that has one
    for link in {link for link in links if not link.startswith("../../actions/")}:
        assert (ROOT / link).exists(), f"README links to {link}"
    assert "docs/limits.md" in links and "docs/models-and-devices.md" in links


def path_of_the_page() -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    pattern = r"^## From the command to the gradient\n+```text\n(.*?)^```"
    (section,) = re.findall(pattern, page, re.MULTILINE | re.DOTALL)
    return [line.split()[0] for line in section.splitlines()]


def resolve(name: str) -> Any:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(["shoal", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"the page names {name}, which is not there")


@contextmanager
def watched(functions: Mapping[str, Any], watch: Callable[[str], None]) -> Iterator[None]:
    """Each function calls `watch` with its name first, whoever has imported it. (A profile hook
    would be called two million times.)"""
    kept = {name: function.__code__ for name, function in functions.items()}
    for name, function in functions.items():
        body = FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
        body.__kwdefaults__ = function.__kwdefaults__

        def first(*args: Any, name: str = name, body: Callable = body, **kwargs: Any) -> Any:
            watch(name)
            return body(*args, **kwargs)

        function.__globals__[f"_watched {name}"] = first
        function.__code__ = eval(
            f'lambda *args, **kwargs: globals()["_watched {name}"](*args, **kwargs)'
        ).__code__
    try:
        yield
    finally:
        for name, function in functions.items():
            function.__code__ = kept[name]
            del function.__globals__[f"_watched {name}"]


@pytest.mark.slow
def test_a_run_takes_the_path_that_the_page_draws(tmp_path: Path):
    """Each function of the list is called, and by those above it: the job and the loop are two
    branches under the command, the source's two and the trainer's four under the loop."""
    names = path_of_the_page()
    assert len(names) == 11
    functions = {name: resolve(name) for name in names}
    codes = {function.__code__: name for name, function in functions.items()}
    callers: dict[str, set[str]] = {name: set() for name in names}
    seen: set[str] = set()

    def watch(name: str) -> None:
        seen.add(name)
        above = sys._getframe(1)
        while above := above.f_back:
            if above.f_code in codes:
                callers[name].add(codes[above.f_code])

    with watched(functions, watch):
        code = main(
            [
                "train",
                "steps=1",
                "task.num_eval_questions=2",
                "train.pass_k=0",
                "batch.prompts_per_step=4",
                "sampling.max_completion_tokens=16",
                f"base_output_directory={tmp_path}",
            ]
        )
    assert code == 0
    assert seen == set(names)
    command, train, job, loop, take, engine, groups, update, accumulate, loss, forward = names
    for name, above in (
        (train, command),
        (job, train),
        (loop, train),
        (take, loop),
        (engine, take),
        (groups, take),
        (update, loop),
        (accumulate, update),
        (loss, accumulate),
        (forward, loss),
        (forward, engine),
    ):
        assert above in callers[name], f"{name} was not called by {above}"


@pytest.mark.parametrize(
    "line",
    [
        line
        for line in README.replace("\\\n", " ").splitlines()
        if line.startswith("shoal ") and "--help" not in line
    ],
)
def test_the_example_command_lines_compose(line: str):
    import shlex

    from shoal.commands.multirun import combine
    from shoal.config.commands import COMMANDS
    from shoal.config.merge import compose

    _, command, *words = shlex.split(line, comments=True)
    own = [word for word in words if word not in ("--dry-run", "--multirun")]
    combinations = list(combine(COMMANDS[command], own)) if "--multirun" in words else [({}, own)]
    assert len(combinations) == (2 if "--multirun" in words else 1)
    for _, each in combinations:
        compose(command, each)
