"""The table of command lines: `lines/*.sh`, one file a line as it is typed, with its source and
what is expected.

`python tests/compat/lines.py` writes what each becomes, `# becomes:`, into its file anew.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
import stand_ins
from huggingface_hub import constants

from shoal import cli
from shoal.commands.compat import SHIMS, shim_argv
from shoal.model import published

FOLDER = Path(__file__).parent / "lines"
ECHO = '#!/bin/sh\nfor word in "$@"; do printf \'%s\\0\' "$word"; done\n'
"""In place of the interpreter: prints the words that it is started with."""


@dataclass(frozen=True)
class Line:
    """One command line of a system's documents."""

    name: str
    title: str
    source: str
    expect: str  # `runs`, or `needs WHAT`
    text: str
    becomes: str  # the step that a dry run shows
    devices: int
    has_bucket: bool

    @property
    def runs(self) -> bool:
        return self.expect == "runs"

    @property
    def is_ours(self) -> bool:
        """False for a line of another program, which is not here."""
        return not re.match(r"xpk|uv |accelerate|bash docker", self.text)


def read(file: Path) -> Line:
    title, *heads, text = file.read_text(encoding="utf-8").splitlines()
    values = dict(head.removeprefix("# ").split(": ", 1) for head in heads)
    return Line(
        file.stem,
        title.removeprefix("# "),
        values["source"],
        values["expect"],
        text,
        values.get("becomes", ""),
        int(values.get("devices", "1")),
        "bucket" in values,
    )


LINES = {file.stem: read(file) for file in sorted(FOLDER.glob("*.sh"))}


def words_of(line: Line, folder: Path, at: Path | None = None) -> list[str]:
    """The words of `shoal` that a line becomes, expanded by bash; `at`: typed in another folder."""
    echo = folder / "echo"
    echo.mkdir(exist_ok=True)
    for name in ("python", "python3", "trl"):
        own = "printf 'bin/trl\\0'\nfor" if name == "trl" else "for"
        (echo / name).write_text(ECHO.replace("for", own, 1))
        (echo / name).chmod(0o755)
    environment = stand_ins.environment(folder, line.devices)
    done = subprocess.run(
        ["bash", "-c", stand_ins.with_places(line.text, folder)],
        cwd=folder / "here",
        text=True,
        env=environment | {"PATH": f"{echo}:{environment['PATH']}"},
        check=True,
        stdout=subprocess.PIPE,
    )
    script, *words = done.stdout.rstrip("\0").split("\0")
    path = f"{words.pop(0).replace('.', '/')}.py" if script == "-m" else script
    path = re.sub(r"^.*/\.\./", "", path)  # test_grpo.sh names the demo from its own folder
    with contextlib.chdir(at or folder / "here"):
        return shim_argv(next(name for name, door in SHIMS.items() if path in door.paths), words)


TOKEN = stand_ins.TOKEN


@contextlib.contextmanager
def among(folder: Path, devices: int) -> Iterator[None]:
    """In this process: the hub is the stand-ins' cache, MaxText's names are theirs, JAX has so many
    devices."""
    environment = stand_ins.environment(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("HF_HUB_CACHE", environment["HF_HUB_CACHE"]),
            ("HF_HUB_OFFLINE", True),
        ):
            patch.setattr(constants, name, value)
        for name in ("HOME", "HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
            patch.setenv(name, environment[name])
        patch.setattr(jax, "devices", lambda *_: jax.local_devices()[:devices])
        patch.chdir(folder / "here")
        known = dict(published.MODELS)
        try:
            stand_ins.name_models(folder)
            yield
        finally:
            published.MODELS.update(known)  # type: ignore[attr-defined]


def run(words: list[str]) -> tuple[int, str, str]:
    """The exit code of a command in this process, and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    return code, out.getvalue(), err.getvalue()


def dry_run(line: Line, folder: Path) -> tuple[int, str, str]:
    words = words_of(line, folder)
    with among(folder, line.devices):
        return run([*words, "--dry-run"])


def becomes(out: str) -> str:
    """The step of the job that a dry run shows."""
    return next(
        (
            text.removeprefix("# this step = ")
            for text in out.splitlines()
            if "this step = " in text
        ),
        "",
    )


if __name__ == "__main__":
    # with the stand-ins' folder: the dry runs of all lines, as JSON, or written into the files
    place = Path(sys.argv[1])
    found = {one.name: dry_run(one, place) for one in LINES.values() if one.is_ours}
    if "--write" in sys.argv:
        for name, (_, out, _) in found.items():
            file = FOLDER / f"{name}.sh"
            *heads, text = [
                row for row in file.read_text().splitlines() if not row.startswith("# becomes: ")
            ]
            step = [f"# becomes: {becomes(out)}"] if becomes(out) else []
            file.write_text("\n".join([*heads, *step, text]) + "\n")
    print(json.dumps(found))
