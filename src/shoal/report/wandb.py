"""Sends metrics to Weights & Biases with its own package: at once, or written to disk for `wandb
sync`."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.config.sections.train import WandbSection
from shoal.records import ShoalError
from shoal.report.sinks import Rows
from shoal.runs.lines import json_ready, scalars, write_atomically
from shoal.runs.notes import NO_NOTES, RunNotes
from shoal.text import first_line

SECONDS_TO_START = 60.0
SECONDS_TO_FINISH = 30.0
SECONDS_BETWEEN_FLUSHES = 1.0
"""Most seconds that a killed process may lose of the file of an offline run."""


class WandbSink:
    """A sink that keeps one run at Weights & Biases for a run folder, however often it is resumed:
    `wandb/run_id` holds the id.

    A step's metrics are logged at that step. Evaluations have another axis, `evaluate/step`,
    because a row that was sent cannot be extended. Steps that the service has from before the
    process was killed are not sent again."""

    def __init__(
        self,
        folder: Path,
        section: WandbSection,
        config: Mapping[str, Any],
        run_name: str,
        labels: RunNotes = NO_NOTES,
    ) -> None:
        """Begins the service's run, or continues that of this folder; `close` ends it. `config`:
        the settings, which are sent along; `run_name`: the run's name there, "" for the folder's;
        `labels`: its note and tags, which are sent when it begins, as people may change them there.
        Files of the service are written to `folder`/wandb. `url` is the run's address, None if it
        is offline. ShoalError if the package or a login is missing, or if the service refuses."""
        wandb, mode = load(section)
        id_path = folder / "wandb" / "run_id"
        is_new = not id_path.is_file()
        if is_new:
            write_atomically(id_path, [uuid.uuid4().hex[:12]])
        # no output on the terminal, and nothing about the terminal, git or the code is sent
        settings = wandb.Settings(
            mode=mode,
            root_dir=str(folder),
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            init_timeout=SECONDS_TO_START,
            finish_timeout=SECONDS_TO_FINISH,
            x_transaction_log_flush_interval=SECONDS_BETWEEN_FLUSHES,
        )
        try:
            with _no_error_reports(section):
                self._run = wandb.init(
                    project=section.project,
                    entity=section.entity or None,
                    name=run_name or folder.name,
                    id=id_path.read_text(encoding="utf-8").strip(),
                    config=json_ready(config),
                    # None leaves those of a run that is there.
                    tags=(labels.tags or None) if is_new else None,
                    notes=(labels.notes or None) if is_new else None,
                    resume="allow",
                    reinit="create_new",
                    settings=settings,
                )
            self._run.define_metric("evaluate/*", step_metric="evaluate/step")
        except (wandb.Error, OSError) as error:
            raise _refused(section, error) from error
        self._table = wandb.Table
        self.url: str | None = None if mode == "offline" else self._run.url

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs figures that are numbers. Those of an evaluation (all are `evaluate/...`) get the
        axis `evaluate/step`, and are sent with the next step; those of a step are logged at that
        step, unless the service has it already."""
        values = scalars(metrics)
        if all(name.startswith("evaluate/") for name in values):
            self._run.log({"evaluate/step": step} | values, commit=False)
        elif step >= self._run.step:
            self._run.log(values, step=step, commit=True)

    def write_completions(self, step: int, rows: Rows) -> None:
        """Logs a table of completions, which is sent with the step's metrics; nothing without rows,
        or if the service has the step already. All rows have the columns of the first."""
        if rows and step >= self._run.step:
            steps_first: list[dict[str, Any]] = [{"step": step, **row} for row in rows]
            cells = [list(row.values()) for row in steps_first]
            table = self._table(columns=list(steps_first[0]), data=cells)
            self._run.log({"completions": table}, step=step, commit=False)

    def close(self) -> None:
        self._run.finish()


def load(section: WandbSection) -> tuple[Any, str]:
    """Returns (package `wandb`, mode) for a section whose mode is not "off". The returned mode is
    "online" if the section's is "online", or if it is "auto" and there is a login; else "offline".
    Begins no run, and asks for no login. ShoalError if the package is not installed, if "online"
    was asked for without a login, or if the login cannot be checked."""
    try:
        with _no_error_reports(section):
            import wandb
            from wandb.sdk.lib.wbauth import authenticate_session
    except ImportError as error:
        raise ShoalError(
            f"report.wandb.mode={section.mode} needs a package that is not installed: pip install "
            "'.[wandb]' in the clone of Shoal"
        ) from error
    if section.mode == "offline":
        return wandb, "offline"
    try:
        login = authenticate_session(host=wandb.Settings().base_url, source="shoal", prompt=False)
    except wandb.Error as error:
        raise _refused(section, error) from error
    if login is None and section.mode == "online":
        raise ShoalError(
            "report.wandb.mode=online needs a login: run `wandb login`, set WANDB_API_KEY, or set "
            "report.wandb.mode=offline"
        )
    return wandb, "online" if login else "offline"


@contextlib.contextmanager
def _no_error_reports(section: WandbSection) -> Iterator[None]:
    """Context manager for the import and start of the package, which would otherwise report errors
    to its makers even for an offline run: sets WANDB_ERROR_REPORTING to false, and removes it
    again. Does nothing if the mode is "online", or if the variable is set already."""
    name = "WANDB_ERROR_REPORTING"
    is_set_here = section.mode != "online" and name not in os.environ
    if is_set_here:
        os.environ[name] = "false"
    try:
        yield
    finally:
        if is_set_here:
            os.environ.pop(name, None)


def _refused(section: WandbSection, error: Exception) -> ShoalError:
    """Returns (does not raise) the ShoalError for an error of Weights & Biases, with the first line
    of its message, or the name of its type if it has none."""
    return ShoalError(
        f"report.wandb.mode={section.mode}: Weights & Biases did not start: {first_line(error)}; "
        "set report.wandb.mode=offline to write without sending, or off"
    )
