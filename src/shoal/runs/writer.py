"""The run's folder and what is written there: settings, metrics, groups, the summary.

config.yaml  decided.yaml                the settings as requested, and what the run decided where
                                         they leave a key open
config_40.yaml  decided_40.yaml          both from step 40 on, if the run was resumed with others
metrics.jsonl                            a line a step
evaluations.jsonl                        a line an evaluation
groups/step_000012.parquet               a row a completion
checkpoints/                             written by the trainer
pass_rates.jsonl                         a line a prompt: how often its completions passed
log.txt                                  the lines that were printed
summary.json                             written at the end
worker_proof.json                        what Ray's workers must sample of known weights, see
                                         rollout/worker_facts.py
.lock                                    held while a process works here
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.buckets import RUNS, send
from shoal.files import check_local, writing
from shoal.records import Group, Purpose, ShoalError
from shoal.runs.groups import TokenLogprobs, groups_file, read_file, write_file
from shoal.runs.layout import (
    CONFIG,
    DECIDED,
    LAST,
    SUMMARY,
    Lock,
    decided_file,
    make_run_folder,
    parts_of,
)
from shoal.runs.lines import JsonlSink, json_line, json_ready, read_lines, write_atomically
from shoal.runs.mirror import Mirror


class RunWriter:
    """The files of one run. Made by `RunWriter.create`; closed at the end, or used in a `with`.

    >>> with RunWriter.create("outputs", "first") as folder:
    ...     folder.write_metrics(1, {"reward/mean": 0.5})
    """

    def __init__(self, path: str | os.PathLike[str], mirror: Mirror | None = None) -> None:
        self.path, self.mirror = Path(path), mirror
        self.config_path = self.path / CONFIG
        self.decided_path = self.path / DECIDED
        self.groups_path = self.path / "groups"
        self.checkpoints_path = self.path / "checkpoints"
        self.log_path = self.path / "log.txt"
        self.summary_path = self.path / SUMMARY
        self._open()

    def _open(self) -> None:
        self._lock = Lock(self.path)
        self.metrics = JsonlSink(self.path / "metrics.jsonl")
        self.evaluations = JsonlSink(self.path / "evaluations.jsonl")

    @classmethod
    def create(
        cls,
        base: str | os.PathLike[str] = "outputs",
        run_name: str = "",
        now: datetime | None = None,
    ) -> RunWriter:
        """A new folder, or the one of this name (see `make_run_folder`); ShoalError if it cannot be
        written or another process works in it."""
        return cls(make_run_folder(base, run_name, now))

    @property
    def no_locks(self) -> str:
        """Why no process is kept out of this folder; empty if a second one is refused."""
        return self._lock.missing

    def remember(self, base: str | os.PathLike[str]) -> None:
        """Makes `last` mean this run under `base`."""
        base = check_local(os.fspath(base), "base_output_directory", RUNS)
        if self.path.resolve().is_relative_to(base.resolve()):
            write_atomically(base / LAST, [os.path.relpath(self.path, base)])
            send(base / LAST)

    # -- resuming

    def rewind(self, version: int, evaluated: bool = True, again: Collection[int] = ()) -> None:
        """Removes what was written of the steps after `version`, its evaluation unless that was
        complete (`evaluated`), and those that are asked for `again`; torn lines too."""

        def is_kept(number: int) -> bool:
            return number not in again and number <= version - (not evaluated)

        self.metrics.keep(lambda step: step <= version)
        self.evaluations.keep(is_kept)
        with writing(self.groups_path):
            for file in self.groups_path.iterdir() if self.groups_path.is_dir() else ():
                name, _, number = file.stem.rpartition("_")
                kept = not number.isdigit() or (
                    is_kept(int(number)) if name.startswith("evaluate") else int(number) <= version
                )
                if file.name.startswith(".") or not kept:
                    file.unlink()
            self.summary_path.unlink(missing_ok=True)
            for number, file in parts_of(self.path).items():
                if number > max(version, 0):
                    file.unlink()
                    decided_file(file).unlink(missing_ok=True)

    def missing_steps(self, version: int) -> list[int]:
        """Steps up to `version` that have no line in metrics.jsonl."""
        found = {line["step"] for line in read_lines(self.metrics.path)}
        return [step for step in range(1, version + 1) if step not in found]

    def read_evaluations(self) -> dict[int, dict[str, dict[str, Any]]]:
        """version -> data set -> figures."""
        found: dict[int, dict[str, dict[str, Any]]] = {}
        for line in read_lines(self.path / "evaluations.jsonl"):
            figures = {name: value for name, value in line.items() if name not in ("step", "name")}
            found.setdefault(line["step"], {})[line["name"]] = figures
        return found

    def write_config(self, config: str, decided: str, version: int = 0) -> None:
        """Writes the settings as requested and what the run decided, both as YAML text. If a run is
        resumed at `version` with others, those of each part are kept: config_0.yaml and
        decided_0.yaml, config_40.yaml and decided_40.yaml."""
        parts = parts_of(self.path)
        # Not config.yaml: it may hold those of a part that was lost with its checkpoint, which hold
        # again from here on.
        held = parts[max(parts)] if parts else self.config_path
        if held.is_file():
            config_before = held.read_text(encoding="utf-8")
            held_decided = decided_file(held)
            decided_before = ""
            if held_decided.is_file():
                decided_before = held_decided.read_text(encoding="utf-8")
            if (config_before, decided_before) != (config, decided):
                if not parts:
                    self._write_part(0, config_before, decided_before)
                self._write_part(version, config, decided)
        # In this order: decisions of other settings than config.yaml's are taken anew.
        write_atomically(self.config_path, [config.rstrip("\n")])
        write_atomically(self.decided_path, [decided.rstrip("\n")])

    def _write_part(self, version: int, config: str, decided: str) -> None:
        path = self.path / f"config_{version}.yaml"
        # First: the file of the settings is what makes the part.
        write_atomically(decided_file(path), [decided.rstrip("\n")])
        write_atomically(path, [config.rstrip("\n")])

    def write_hydra(self, config: str, overrides: Sequence[str]) -> None:
        """The files that Hydra writes, as those who come from it look for them; nothing here reads
        them."""
        place, cwd = self.path / ".hydra", str(Path.cwd())
        job = {
            "hydra": {
                "job": {"name": self.path.name},
                "mode": "RUN",
                "overrides": {"task": list(overrides)},
                "runtime": {"cwd": cwd, "output_dir": str(self.path.absolute())},
            }
        }
        for name, text in (
            ("config", config.rstrip("\n")),
            ("overrides", json.dumps([*overrides], indent=0)),
            ("hydra", json.dumps(job, indent=2)),
        ):
            write_atomically(place / f"{name}.yaml", [text])

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.metrics.write(step, metrics)
        if self.mirror:
            self.mirror.check()

    def write_evaluation(self, step: int, name: str, figures: Mapping[str, Any]) -> None:
        """One line of evaluations.jsonl: `step`, `name` (of the questions), the figures."""
        self.evaluations.write(step, {"name": name, **figures})

    def write_groups(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Any = None,
        trainer_logprobs: TokenLogprobs | None = None,
    ) -> Path:
        """Writes a step's groups atomically and returns the file, `groups/step_000012.parquet`;
        groups of an evaluation go to `groups/evaluate_<data set>_000012.parquet`. `advantages`: by
        group, by completion, [P, G]."""
        purpose, subset = (groups[0].purpose, groups[0].subset) if groups else (Purpose.TRAIN, "")
        path = self.groups_path / groups_file(purpose, subset, step)
        write_file(path, groups, advantages, trainer_logprobs)
        return path

    def solved_question(self, subset: str, last: int) -> tuple[Group, Group] | None:
        """The first question of a data set that was answered wrong before training and is answered
        right after step `last`, with both answers; None without one, or without the files."""
        with contextlib.suppress(ShoalError):
            before, after = (
                read_file(self.groups_path / groups_file(Purpose.EVALUATE, subset, step))
                for step in (0, last)
            )
            for old, new in (
                (old.group, new.group) for old, new in zip(before, after, strict=False)
            ):
                if (
                    old.correct is not None
                    and new.correct is not None
                    and new.correct[0] > old.correct[0]
                ):
                    return old, new
        return None

    def write_pass_rates(self, record: Iterable[Mapping[str, Any]]) -> None:
        """Writes pass_rates.jsonl atomically, a line a prompt."""
        write_atomically(self.path / "pass_rates.jsonl", map(json_line, record))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json atomically."""
        write_atomically(
            self.summary_path, [json.dumps(json_ready(summary), indent=2, allow_nan=False)]
        )

    def saved(self, version: int) -> None:
        """A checkpoint was saved; of a run in a bucket, waits where too many are here alone."""
        if self.mirror:
            self.mirror.saved(version)

    def flush(self) -> None:
        """Returns when the bucket of a run in a bucket holds everything."""
        if self.mirror:
            self.mirror.flush()

    def close(self) -> None:
        self.metrics.close()
        self.evaluations.close()
        self._lock.release()

    def sync(self) -> None:
        """Returns when the lines written so far would survive a power cut."""
        self.metrics.sync()
        self.evaluations.sync()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NullRunWriter(RunWriter):
    """A run folder in a process that writes nothing there, since process 0 does."""

    last_evaluation = sys.maxsize

    def _open(self) -> None:
        pass

    def rewind(self, version: int, evaluated: bool = True, again: Collection[int] = ()) -> None:
        self.last_evaluation = version if evaluated else version - 1

    def missing_steps(self, version: int) -> list[int]:
        return []

    def read_evaluations(self) -> dict[int, dict[str, dict[str, Any]]]:
        # As they will be when process 0 has removed the later ones.
        return {
            version: figures
            for version, figures in super().read_evaluations().items()
            if version <= self.last_evaluation
        }

    def _nothing(self, *_: Any, **__: Any) -> Any:
        pass

    remember = write_config = write_metrics = write_evaluation = _nothing
    write_groups = write_pass_rates = write_summary = close = sync = _nothing
