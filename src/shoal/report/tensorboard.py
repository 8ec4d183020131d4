"""Writes metrics as TensorBoard's event files, with the package `tensorboard` alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.files import explain_write_errors
from shoal.records import ShoalError
from shoal.report.sinks import Rows
from shoal.runs.lines import scalars

_PREFIX = "events.out.tfevents."


class TensorboardSink:
    """A sink that writes one event file for each start of a run; each row is flushed before the
    next is accepted.

    After a resumption the file begins with TensorBoard's mark of a restart, which makes TensorBoard
    discard what the killed run wrote beyond the version that is resumed."""

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        """Makes the folder and a new file in it, which `close` closes. `resumed_at`: the version
        that a resumed run continues from; None for a new run. ShoalError if the package is missing,
        or the file cannot be written."""
        events, summaries, text, writer = load()
        self._event = events.Event
        self._summary = summaries.Summary
        self._text = text
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / _next_name(folder)).open("xb")  # x: never an existing file
        self._records = writer(self._file)
        with explain_write_errors(folder):
            self._add(file_version="brain.Event:2")
            if resumed_at is not None:
                start = events.SessionLog(status=events.SessionLog.START)
                # TensorBoard discards this step and later ones; from version 0 on that is all.
                self._add(step=resumed_at + 1 if resumed_at else 0, session_log=start)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the numbers of a step; texts and lists are left out."""
        values = []
        for name, value in scalars(metrics).items():
            values.append(self._summary.Value(tag=name, simple_value=value))
        self._add(step=step, summary=self._summary(value=values))

    def write_completions(self, step: int, rows: Rows) -> None:
        """Writes a table of completions as text; nothing without rows. All rows have the columns of
        the first."""
        if not rows:
            return
        cells = [list(rows[0])]  # the names of the columns
        for row in rows:
            cells.append([str(value) for value in row.values()])
        self._add(step=step, summary=self._text("completions", cells))

    def close(self) -> None:
        self._file.close()

    def _add(self, **content: Any) -> None:
        """Writes one event, with the time and the fields in `content`, and flushes it."""
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._records.flush()


def load() -> tuple[Any, Any, Any, Any]:
    """Imports what is needed of the package `tensorboard`, and returns (module of event messages,
    module of summary messages, function that makes a text summary, class that writes records).
    ShoalError if the package is missing."""
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise ShoalError(
            "report.tensorboard=true needs a package that is not installed: pip install "
            "'.[tensorboard]' in the clone of Shoal"
        ) from error
    return event_pb2, summary_pb2, text_pb, RecordWriter


def _next_name(folder: Path) -> str:
    """Returns the name of a new event file, with the time in seconds, as TensorBoard names them. It
    reads files in the order of their names, so the time is moved on if an existing file has the
    same or a later one."""
    number = int(time.time())
    for path in folder.glob(f"{_PREFIX}[0-9]*"):
        existing = int(path.name.removeprefix(_PREFIX)[:10])  # the time has ten digits
        number = max(number, existing + 1)
    return f"{_PREFIX}{number:010d}.shoal"
