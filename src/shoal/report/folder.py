"""The run's folder and what is written there: settings, metrics, groups, the summary.

    config.yaml  config_difference.yaml      the settings, resolved, and what differs from the defaults
    metrics.jsonl                            a line a step
    evaluations.jsonl                        a line an evaluation
    groups/step_000012.jsonl                 a line a group
    checkpoints/                             written by the trainer
    summary.json                             written at the end
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.report.groups import TokenArrays, group_record, groups_name
from shoal.report.lines import json_line, json_ready, write_atomically, writing
from shoal.report.sink import JsonlSink
from shoal.types import Group, ShoalError


def make_run_folder(base: str | os.PathLike[str], run_name: str = "", now: datetime | None = None) -> Path:
    """Makes `base/run_name`, or `base/YYYY-MM-DD/HH-MM-SS` (-1, -2, ... where taken in the same second).

    Raises ShoalError where a named folder already holds something or the place cannot be written."""
    if run_name:
        return _make_named(Path(base), run_name)
    now = now or datetime.now()
    day, second = Path(base) / now.strftime("%Y-%m-%d"), now.strftime("%H-%M-%S")
    with writing(day / second):
        day.mkdir(parents=True, exist_ok=True)
        for attempt in range(10_000):
            path = day / (f"{second}-{attempt}" if attempt else second)
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    raise ShoalError(f"cannot make a run folder: {day / second} and its numbered names are all taken; set run_name")


def _make_named(base: Path, run_name: str) -> Path:
    name = Path(run_name)
    if name.is_absolute() or ".." in name.parts or not name.parts or "\0" in run_name:
        raise ShoalError(f"run_name={run_name!r}: expected a name under base_output_directory, without '..' or a "
                         "leading '/'")
    path = base / name
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        taken = any(path.iterdir())
    if taken:
        raise ShoalError(f"the run folder {path} already holds a run: choose another run_name or delete the folder "
                         "(going on with a stopped run is not there yet)")
    return path


LAST = "last"
"""In base_output_directory: a file that names the run started last there; and the word for it on the command line."""


def find_run(name: str, base: str | os.PathLike[str] = "outputs") -> Path:
    """The run folder that `name` means: a path, or `last` for the run started last under `base`; else ShoalError."""
    if name == LAST and not Path(name).is_dir():
        pointer = Path(base) / LAST
        if not pointer.is_file():
            raise ShoalError(f"last: no run was started under {base} yet; name a run folder, or set "
                             "base_output_directory")
        path = Path(base) / pointer.read_text(encoding="utf-8").strip()
    else:
        path = Path(name).expanduser()
    if not (path / "config.yaml").is_file():
        raise ShoalError(f"{path} is no run folder: it holds no config.yaml")
    return path


class RunFolder:
    """What one run leaves behind. Made by `RunFolder.create`; closed at the end, or used in a `with`.

    >>> with RunFolder.create("outputs", "first") as folder:
    ...     folder.write_metrics(1, {"reward/mean": 0.5})
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.config_difference_path = self.path / "config_difference.yaml"
        self.groups_path = self.path / "groups"
        self.checkpoints_path = self.path / "checkpoints"
        self.summary_path = self.path / "summary.json"
        self.metrics = JsonlSink(self.path / "metrics.jsonl")
        self.evaluations = JsonlSink(self.path / "evaluations.jsonl")

    @classmethod
    def create(cls, base: str | os.PathLike[str] = "outputs", run_name: str = "",
               now: datetime | None = None) -> RunFolder:
        """A new folder (see `make_run_folder`); ShoalError where it is taken or cannot be written."""
        return cls(make_run_folder(base, run_name, now))

    def write_config(self, config: str, difference: str) -> None:
        """The resolved settings and what differs from the defaults, both as YAML text."""
        write_atomically(self.config_path, [config.rstrip("\n")])
        write_atomically(self.config_difference_path, [difference.rstrip("\n")])

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.metrics.write(step, metrics)

    def write_evaluation(self, step: int, name: str, figures: Mapping[str, Any]) -> None:
        """One line of evaluations.jsonl: `step`, `name` (of the questions), the figures."""
        self.evaluations.write(step, {"name": name, **figures})

    def write_groups(self, step: int, groups: Sequence[Group], advantages: Any = None,
                     token_arrays: TokenArrays | None = None, name: str = "") -> Path:
        """Writes a step's groups, a line each, atomically, and returns the file `groups/<name>_<step>.jsonl`.

        `advantages`: by group, by completion ([P, G]). `token_arrays`: by group, by completion, name -> [T] (such as
        `trainer_logprobs`). `name` is `step` for training and `<purpose>_<subset>` otherwise unless given: two sets
        of one step must differ in it, or the later replaces the earlier. Raises ValueError where lengths differ."""
        for what, given in (("advantages", advantages), ("token_arrays", token_arrays)):
            if given is not None and len(given) != len(groups):
                raise ValueError(f"{what}: expected one entry for each of {len(groups)} groups, came {len(given)}")
        path = self.groups_path / f"{name or groups_name(groups)}_{step:06d}.jsonl"
        write_atomically(path, (
            json_line(group_record(group, None if advantages is None else advantages[i],
                                   None if token_arrays is None else token_arrays[i]))
            for i, group in enumerate(groups)))
        return path

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """summary.json, whole or not at all."""
        write_atomically(self.summary_path, [json.dumps(json_ready(summary), indent=2, allow_nan=False)])

    def close(self) -> None:
        self.metrics.close()
        self.evaluations.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
