"""What the README promises: two commands of one line, and the path from the command to the gradient."""

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

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_first_two_commands_are_one_line_each():
    first, second = blocks("bash")[:2]
    assert first.count("\n") == second.count("\n") == 1
    assert first.rstrip().endswith("shoal train") and second.rstrip().endswith("-m pytest")


def path_of_the_readme() -> list[str]:
    (section,) = re.findall(r"^## From the command to the gradient\n+```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
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
    raise AssertionError(f"README names {name}, which is not there")


@contextmanager
def watched(functions: Mapping[str, Any], watch: Callable[[str], None]) -> Iterator[None]:
    """Each function calls `watch` with its name first, whoever has imported it. (A profile hook would be called two
    million times.)"""
    kept = {name: function.__code__ for name, function in functions.items()}
    for name, function in functions.items():
        body = FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
        body.__kwdefaults__ = function.__kwdefaults__

        def first(*args: Any, name: str = name, body: Callable = body, **kwargs: Any) -> Any:
            watch(name)
            return body(*args, **kwargs)

        function.__globals__[f"_watched {name}"] = first
        function.__code__ = eval(f'lambda *args, **kwargs: globals()["_watched {name}"](*args, **kwargs)').__code__
    try:
        yield
    finally:
        for name, function in functions.items():
            function.__code__ = kept[name]
            del function.__globals__[f"_watched {name}"]


@pytest.mark.compile_quickly
def test_a_run_takes_the_path_that_the_readme_draws(tmp_path: Path):
    """Each function of the list is called, and by those above it: the job and the loop are two branches under the
    command, the source's two and the trainer's four under the loop."""
    names = path_of_the_readme()
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
        code = main(["train", "steps=1", "task.num_eval_questions=2", "train.pass_k=0", "batch.prompts_per_step=4",
                     "sampling.max_completion_tokens=16",
                     f"base_output_directory={tmp_path}"])
    assert code == 0
    assert seen == set(names)
    command, train, job, loop, take, engine, groups, update, accumulate, loss, forward = names
    for name, above in ((train, command), (job, train), (loop, train), (take, loop), (engine, take),
                        (groups, take), (update, loop), (accumulate, update), (loss, accumulate),
                        (forward, loss), (forward, engine)):
        assert above in callers[name], f"{name} was not called by {above}"


@pytest.mark.parametrize("line", [line for line in README.splitlines()
                                  if line.startswith("shoal ") and "--help" not in line])
def test_the_example_command_lines_compose(line: str):
    import shlex

    from shoal.commands.multirun import combine
    from shoal.config.keys import COMMANDS
    from shoal.config.loading import compose

    _, command, *words = shlex.split(line, comments=True)
    own = [word for word in words if word not in ("--dry-run", "--multirun")]
    combinations = list(combine(COMMANDS[command], own)) if "--multirun" in words else [({}, own)]
    assert len(combinations) == (2 if "--multirun" in words else 1)
    for _, each in combinations:
        compose(command, each)
