"""Sends metrics to Trackio with its own package: to a Space or a server, or to the database that
`trackio show` reads on this machine."""

from __future__ import annotations

import contextlib
import io
import os
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.config.sections.train import TrackioSection
from shoal.files import explain_write_errors
from shoal.records import ShoalError
from shoal.report.sinks import Rows
from shoal.runs.lines import json_ready, scalars, write_atomically
from shoal.text import first_line


class TrackioSink:
    """A sink that keeps one Trackio run for a run folder, however often it is resumed.

    Trackio finds a run by its name alone, and run folders in different places may have the same
    name: the run's is followed by six random digits, and `trackio/run_name` holds it. Steps that
    Trackio has from before the process was killed are not sent again."""

    def __init__(
        self, folder: Path, section: TrackioSection, config: Mapping[str, Any], run_name: str
    ) -> None:
        """Begins the run, or continues that of this folder; `close` ends it. `config`: the
        settings, which are sent along; `run_name`: the first part of the run's name, "" for the
        folder's. `place` says where the run is. ShoalError if the package, an address or a login is
        missing, or Trackio refuses."""
        self._trackio, is_online = load(section)
        name_path = folder / "trackio" / "run_name"
        if not name_path.is_file():
            with explain_write_errors(name_path.parent):
                name_path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(name_path, [f"{run_name or folder.name}-{uuid.uuid4().hex[:6]}"])
        name = name_path.read_text(encoding="utf-8").strip()
        try:
            # Trackio prints where its figures go; the line of `place` says it once.
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._run = self._trackio.init(
                    project=section.project,
                    name=name,
                    space_id=section.space_id or None,
                    config=json_ready(config),
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except Exception as error:  # of the hub, of SQLite and of Trackio, without a common type
            raise _refused(section, error) from error
        # Else Trackio ends it once more, with a line in the terminal, when the process ends.
        self._trackio.context_vars.current_run.set(None)
        # The first step that Trackio does not have; of a new run 0.
        self._next_step = int(self._run._next_step)
        self._table: Any = None
        if is_online:
            self.place = self._run.url or "online"
        else:
            self.place = f"offline; `trackio show --project {section.project}` shows it"

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs figures that are numbers, at their step; those of a step not again if Trackio has
        the step already."""
        values: dict[str, Any] = scalars(metrics)
        is_evaluation = all(name.startswith("evaluate/") for name in values)
        if is_evaluation or step >= self._next_step:
            if self._table is not None and not is_evaluation:
                values["completions"] = self._table
                self._table = None
            self._run.log(values, step=step)

    def write_completions(self, step: int, rows: Rows) -> None:
        """Keeps a table of completions for the figures of its step, which come next; nothing
        without rows, or if Trackio has the step already."""
        if rows and step >= self._next_step:
            cells = [list(json_ready(row).values()) for row in rows]
            self._table = self._trackio.Table(columns=list(rows[0]), data=cells)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


def load(section: TrackioSection) -> tuple[Any, bool]:
    """Returns (package `trackio`, whether it sends to a Space or a server). Begins no run.
    ShoalError if the package is not installed, if mode=online has neither a Space nor a server, or
    if mode=offline has one, which Trackio would send to."""
    places = {
        "report.trackio.space_id": section.space_id,
        "TRACKIO_SPACE_ID": os.environ.get("TRACKIO_SPACE_ID", ""),
        "TRACKIO_SERVER_URL": os.environ.get("TRACKIO_SERVER_URL", ""),
    }
    given = [name for name, value in places.items() if value]
    if section.mode == "online" and not given:
        raise ShoalError(
            "report.trackio.mode=online needs a Space or a server: set report.trackio.space_id, "
            "TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, or set report.trackio.mode=offline"
        )
    if section.mode == "offline" and given:
        raise ShoalError(
            f"report.trackio.mode=offline, but {given[0]} is set: remove it, or set "
            "report.trackio.mode=online"
        )
    try:
        import trackio
    except ImportError as error:
        raise ShoalError(
            f"report.trackio.mode={section.mode} needs a package that is not installed: pip "
            "install '.[trackio]' in the clone of Shoal"
        ) from error
    return trackio, bool(given)


def _refused(section: TrackioSection, error: Exception) -> ShoalError:
    """Returns (does not raise) the ShoalError for an error of Trackio, with the first line of its
    message, or the name of its type if it has none."""
    return ShoalError(
        f"report.trackio.mode={section.mode}: Trackio did not start: {first_line(error)}; set "
        "report.trackio.mode=offline to write to this machine, or off"
    )
