"""Writes a run's folder: settings, metrics, groups, the summary. It holds:

config.yaml  decided.yaml                the settings as requested, and what the run decided where
                                         they leave a key open
config_40.yaml  decided_40.yaml          both from step 40 on, if the run was resumed with others
metrics.jsonl                            a line a step
evaluations.jsonl                        a line for each evaluation and data set
events.jsonl                             a line for each warning, error and phase
groups/step_000012.parquet               a row a completion
groups/discarded_000012.parquet          those of groups that dynamic sampling discarded
checkpoints/                             written by the trainer
pass_rates.jsonl                         a line a prompt: how often its completions passed
log.txt                                  the lines that were printed, for people; nothing reads it
summary.json                             written at the end
notes.json                               what people write about the run; not written here, see
                                         runs/notes.py
worker_proof.json                        what Ray's workers must sample of known weights, see
                                         rollout/worker_facts.py
.lock                                    held while a process works here
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.buckets import RUNS, send
from shoal.files import check_local, explain_write_errors
from shoal.records import Group, Purpose, ShoalError
from shoal.runs.groups import (
    TokenLogprobs,
    TurnAdvantages,
    groups_file,
    read_file,
    write_file,
)
from shoal.runs.layout import (
    CONFIG,
    DECIDED,
    LAST,
    RECIPE,
    SUMMARY,
    Lock,
    decided_file,
    make_run_folder,
    parts_of,
)
from shoal.runs.lines import (
    EvaluationLine,
    EventLevel,
    EventLine,
    JsonlSink,
    Phase,
    StepLine,
    Summary,
    json_line,
    json_ready,
    read_lines,
    write_atomically,
)
from shoal.runs.mirror import Mirror
from shoal.runs.reader import StoredRun
from shoal.text import one_line


class RunWriter:
    """Writes the files of one run. Make one with `RunWriter.create`; close it at the end, or use it
    in a `with`.

    >>> with RunWriter.create("outputs", "first") as folder:
    ...     folder.write_metrics(1, {"reward/mean": 0.5})
    """

    def __init__(self, path: str | os.PathLike[str], mirror: Mirror | None = None) -> None:
        """Opens a run's folder, which must exist, and takes its lock. `mirror`: keeps the run's
        bucket equal to the folder; None if the run is in no bucket. ShoalError if another process
        works in the folder, or if it cannot be written."""
        self.path, self.mirror = Path(path), mirror
        self.config_path = self.path / CONFIG
        self.decided_path = self.path / DECIDED
        self.groups_path = self.path / "groups"
        self.checkpoints_path = self.path / "checkpoints"
        self.log_path = self.path / "log.txt"
        self.summary_path = self.path / SUMMARY
        self._open()

    phase: Phase = "start"
    step = 0
    """Phase and step under way, which events get when they are written."""

    def _open(self) -> None:
        """Takes the run's lock, and opens the files of lines, to which lines are appended. Removes
        an incomplete last line of the events. ShoalError if another process has the lock, a file
        cannot be written, or a line of the events is damaged."""
        self._lock = Lock(self.path)
        self.metrics = JsonlSink(self.path / StepLine.FILE)
        self.evaluations = JsonlSink(self.path / EvaluationLine.FILE)
        self.events = JsonlSink(self.path / EventLine.FILE)
        # Unlike other lines, events of this process are written before `rewind` removes what was
        # lost; `rewind` keeps them. An incomplete last line, which they would follow, is removed
        # now.
        self.events.keep(lambda line: True)  # keeps all that is complete
        self._events_before = len(read_lines(self.events.path))

    @classmethod
    def create(
        cls,
        base: str | os.PathLike[str] = "outputs",
        run_name: str = "",
        now: datetime | None = None,
    ) -> RunWriter:
        """Makes a new folder below `base`, or opens the one of this name, which may hold a run, and
        takes its lock (see `make_run_folder`). The writer has no mirror, so nothing is uploaded if
        `base` is in a bucket. Close it. ShoalError if the folder cannot be written, or if another
        process works in it."""
        return cls(make_run_folder(base, run_name, now))

    @property
    def no_locks(self) -> str:
        """The reason why a second process would not be kept out of this folder; "" if it would."""
        return self._lock.missing

    def remember(self, base: str | os.PathLike[str]) -> None:
        """Writes this run to the file `last` under `base` (and to the bucket, if `base` is in one),
        so that the word `last` means it; replaces the name of an earlier run. Does nothing if the
        run is not below `base`. ShoalError if the file cannot be written."""
        base = check_local(os.fspath(base), "base_output_directory", RUNS)
        if self.path.resolve().is_relative_to(base.resolve()):
            write_atomically(base / LAST, [os.path.relpath(self.path, base)])
            send(base / LAST)

    # -- resuming

    def rewind(
        self, version: int, evaluated: bool = True, evaluated_again: Collection[int] = ()
    ) -> None:
        """Brings the folder to the state of a checkpoint, from which the run is resumed. Removes
        the metrics, groups, events and settings of all steps after `version`, the evaluation of
        `version` unless it was complete (`evaluated`), the evaluations of the versions in
        `evaluated_again`, incomplete lines, and the summary. Steps are numbered like in the lines:
        step n made version n. Writes an event that says that the run was resumed.

        `version` -1: the run has no checkpoint and starts from its beginning. Events that this
        process has written already are kept."""

        last_evaluation = version if evaluated else version - 1

        def is_kept_evaluation(number: int) -> bool:
            # `number`: the version that was evaluated.
            return number not in evaluated_again and number <= last_evaluation

        def is_kept_event(line: Mapping[str, Any]) -> bool:
            """True if an event of an earlier process is kept."""
            event = EventLine.parse(line)
            if event.phase == "evaluation":
                return is_kept_evaluation(event.step)
            if event.phase == "training":
                return event.step <= version
            # A start after which no step was kept is repeated, and so is the end.
            return event.phase == "start" and event.step < version

        self.metrics.keep(lambda line: line["step"] <= version)
        self.evaluations.keep(lambda line: is_kept_evaluation(line["step"]))
        self.events.keep(is_kept_event, self._events_before)
        with explain_write_errors(self.groups_path):
            files = list(self.groups_path.iterdir()) if self.groups_path.is_dir() else []
            for file in files:
                name, _, digits = file.stem.rpartition("_")
                if not digits.isdigit():  # no file of groups
                    kept = True
                elif name.startswith("evaluate"):
                    kept = is_kept_evaluation(int(digits))
                else:
                    kept = int(digits) <= version
                # A hidden file is the incomplete one of a process that was killed while it wrote.
                if file.name.startswith(".") or not kept:
                    file.unlink()
            self.summary_path.unlink(missing_ok=True)
            for number, file in parts_of(self.path).items():
                if number > max(version, 0):  # part 0 stays, also if the run starts again
                    file.unlink()
                    decided_file(file).unlink(missing_ok=True)
        if version >= 0:
            self.write_event("note", f"resumed from the checkpoint of step {version}")
        else:
            self.write_event("note", "the run has no checkpoint: it starts from its beginning")

    def missing_steps(self, version: int) -> list[int]:
        """Returns the steps from 1 to `version` that have no line in metrics.jsonl, in order."""
        written = StoredRun(self.path).metrics()
        return [step for step in range(1, version + 1) if step not in written]

    def read_steps(self) -> dict[int, Mapping[str, Any]]:
        """Returns step (from 1) -> its metrics, of all steps written. {} if there are none;
        ShoalError if a line is damaged."""
        return {line.step: line.metrics for line in StoredRun(self.path).steps()}

    def read_evaluations(self) -> dict[int, dict[str, Mapping[str, Any]]]:
        """Returns version -> data set -> figures, of all evaluations written; of two lines of one
        version and data set the last counts. {} if there are none; ShoalError if a line is
        damaged."""
        evaluations: dict[int, dict[str, Mapping[str, Any]]] = {}
        for line in StoredRun(self.path).evaluations().lines:
            evaluations.setdefault(line.step, {})[line.name] = line.figures
        return evaluations

    def write_config(self, config: str, decided: str, version: int = 0) -> None:
        """Writes config.yaml, the settings as requested, and decided.yaml, what the run decided;
        both are YAML text. `version`: at which the settings begin to count, 0 for a new run. If a
        run is resumed at `version` with other settings or decisions, those of each part are kept
        too: config_0.yaml and decided_0.yaml of the first part, config_40.yaml and decided_40.yaml
        of the part that began at version 40."""
        parts = parts_of(self.path)
        # Not config.yaml if there are parts, because it may hold the settings of a part that was
        # lost together with its checkpoint.
        newest_config = parts[max(parts)] if parts else self.config_path
        if newest_config.is_file():
            config_before = newest_config.read_text(encoding="utf-8")
            newest_decided = decided_file(newest_config)
            decided_before = ""
            if newest_decided.is_file():
                decided_before = newest_decided.read_text(encoding="utf-8")
            if (config_before, decided_before) != (config, decided):
                if not parts:  # this is the first change, so the first part has no files yet
                    self._write_part(0, config_before, decided_before)
                self._write_part(version, config, decided)
        # Settings before decisions: if the process is killed in between, decisions that belong to
        # other settings are made again.
        write_atomically(self.config_path, [config.rstrip("\n")])
        write_atomically(self.decided_path, [decided.rstrip("\n")])

    def _write_part(self, version: int, config: str, decided: str) -> None:
        """Writes the settings and decisions of the part of the run that begins at `version`."""
        path = self.path / f"config_{version}.yaml"
        # Decisions first, because the file of settings is what makes the part exist.
        write_atomically(decided_file(path), [decided.rstrip("\n")])
        write_atomically(path, [config.rstrip("\n")])

    def write_recipe(self, text: str) -> None:
        """Writes recipe.yaml, the recipe that the run follows (`Followed.stored_text`)."""
        write_atomically(self.path / RECIPE, [text.rstrip("\n")])

    def write_hydra(self, config: str, overrides: Sequence[str]) -> None:
        """Writes the files that Hydra writes (config.yaml, overrides.yaml, hydra.yaml) to the run's
        folder `.hydra`, for people who look for them there; nothing in Shoal reads them. `config`:
        the settings as YAML text; `overrides`: the arguments of the command line, such as
        "steps=3"."""
        job = {
            "hydra": {
                "job": {"name": self.path.name},
                "mode": "RUN",
                "overrides": {"task": list(overrides)},
                "runtime": {"cwd": str(Path.cwd()), "output_dir": str(self.path.absolute())},
            }
        }
        folder = self.path / ".hydra"
        write_atomically(folder / "config.yaml", [config.rstrip("\n")])
        write_atomically(folder / "overrides.yaml", [json.dumps(list(overrides), indent=0)])
        write_atomically(folder / "hydra.yaml", [json.dumps(job, indent=2)])

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends a step's metrics (`step` from 1) to metrics.jsonl. If the run is in a bucket that
        does not answer, prints that; ShoalError if the bucket has failed for good."""
        self.metrics.write(StepLine(step, metrics))
        if self.mirror:
            self.mirror.check()

    def write_evaluation(self, step: int, name: str, figures: Mapping[str, Any]) -> None:
        """Appends a line to evaluations.jsonl: `step`, `name` (of the questions) and the
        figures."""
        self.evaluations.write(EvaluationLine(step, name, figures))

    def begin(self, phase: Phase, step: int) -> None:
        """Sets the phase ("start", "training", "evaluation" or "end") and the step that events get
        from now on. Writes nothing."""
        self.phase = phase
        self.step = step

    @contextlib.contextmanager
    def during(self, phase: Phase, step: int) -> Iterator[None]:
        """Context manager: events written within it get this phase and step; those after it get
        again what was set before."""
        before = self.phase, self.step
        self.begin(phase, step)
        try:
            yield
        finally:
            self.begin(*before)

    def write_event(self, level: EventLevel, text: str, key: str = "") -> None:
        """Appends a line to events.jsonl, with the time and the current phase and step (`begin`).
        `level`: "phase", "note", "warning", "wrong" or "error"; `text` becomes one line; `key`: the
        configuration key that helps, or "". Ignores errors: a full disk shows when something is
        written that the run needs."""
        event = EventLine(
            time=time.time(),
            step=self.step,
            phase=self.phase,
            level=level,
            text=one_line(text),
            key=key,
        )
        with contextlib.suppress(ShoalError):
            self.events.write(event)

    def write_groups(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Any = None,
        trainer_logprobs: TokenLogprobs | None = None,
        turn_advantages: TurnAdvantages = (),
        discarded: bool = False,
    ) -> Path:
        """Writes a step's groups atomically to `groups/step_000012.parquet`, with `discarded` to
        `groups/discarded_000012.parquet`, or those of an evaluation to `groups/evaluate_<data
        set>_000012.parquet`, and returns the path. The first group says whether it is of an
        evaluation; without groups it is a training step. `step`: from 1, of an evaluation the
        version. `advantages`: by group and completion, [P, G]; `trainer_logprobs`: (number of the
        group, index of the completion) -> the trainer's log-probs; `turn_advantages`: by group,
        completion and turn, if advantages are by turn. All are absent for an evaluation and for
        discarded groups. ShoalError if the file cannot be written."""
        purpose, subset = (groups[0].purpose, groups[0].subset) if groups else (Purpose.TRAIN, "")
        path = self.groups_path / groups_file(purpose, subset, step, discarded)
        write_file(path, groups, advantages, trainer_logprobs, turn_advantages, discarded)
        return path

    def solved_question(self, subset: str, last: int) -> tuple[Group, Group] | None:
        """Returns (group before training, group after step `last`) of the first question of a data
        set (`subset`) whose first answer was wrong and became right; None if there is none, if the
        task says of no answer whether it is right, or if the groups of an evaluation are missing or
        damaged."""
        try:
            before = read_file(self.groups_path / groups_file(Purpose.EVALUATE, subset, 0))
            after = read_file(self.groups_path / groups_file(Purpose.EVALUATE, subset, last))
        except ShoalError:
            return None
        for stored_before, stored_after in zip(before, after, strict=False):
            old = stored_before.group
            new = stored_after.group
            if old.correct is None or new.correct is None:
                continue
            if new.correct[0] > old.correct[0]:  # [0]: the first answer; True > False
                return old, new
        return None

    def write_pass_rates(self, record: Iterable[Mapping[str, Any]]) -> None:
        """Writes pass_rates.jsonl atomically, one line per prompt."""
        write_atomically(self.path / "pass_rates.jsonl", map(json_line, record))

    def write_summary(self, summary: Summary) -> None:
        """Writes summary.json atomically."""
        write_atomically(
            self.summary_path, [json.dumps(json_ready(summary.record()), indent=2, allow_nan=False)]
        )

    def saved(self, version: int) -> None:
        """Notes that the checkpoint of `version` was saved; saves nothing itself. If the run is in
        a bucket, waits while more than checkpoint.most_unsaved checkpoints exist only on this
        machine; ShoalError if the bucket has failed. Does nothing for a run in no bucket."""
        if self.mirror:
            self.mirror.saved(version)

    def flush(self) -> None:
        """Waits until the bucket, if the run is in one, holds everything that the folder holds now.
        ShoalError if the bucket has failed."""
        if self.mirror:
            self.mirror.flush()

    def close(self) -> None:
        """Closes the files and releases the lock. The mirror stays open: who made it closes it."""
        self.metrics.close()
        self.evaluations.close()
        self.events.close()
        self._lock.release()

    def sync(self) -> None:
        """Waits until the lines of metrics, evaluations and events written so far would survive a
        power cut. ShoalError if the disk reports an error."""
        self.metrics.sync()
        self.evaluations.sync()
        self.events.sync()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NullRunWriter(RunWriter):
    """A `RunWriter` for processes other than process 0, which alone writes: reads the folder, takes
    no lock, and its methods that write do nothing (but for `write_hydra`, which only process 0
    calls)."""

    last_evaluation = sys.maxsize
    """The last version whose evaluation process 0 keeps; set by `rewind`."""

    def _open(self) -> None:
        pass

    def rewind(
        self, version: int, evaluated: bool = True, evaluated_again: Collection[int] = ()
    ) -> None:
        self.last_evaluation = version if evaluated else version - 1

    def missing_steps(self, version: int) -> list[int]:
        return []

    def read_evaluations(self) -> dict[int, dict[str, Mapping[str, Any]]]:
        """Returns version -> data set -> figures, of the evaluations that process 0 keeps when it
        rewinds the run."""
        evaluations = super().read_evaluations()
        # The same as after process 0 has removed the later ones.
        for version in list(evaluations):
            if version > self.last_evaluation:
                del evaluations[version]
        return evaluations

    def _nothing(self, *_: Any, **__: Any) -> Any:
        pass

    remember = write_config = write_recipe = write_metrics = write_evaluation = write_event = (
        _nothing
    )
    write_groups = write_pass_rates = write_summary = close = sync = _nothing
