"""Sends metrics to MLflow with its own client: to a tracking server, or to a database in the run's
folder."""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.config.sections.train import MlflowSection
from shoal.files import explain_write_errors
from shoal.records import ShoalError
from shoal.report.sinks import Rows
from shoal.runs.lines import json_ready, scalars, write_atomically
from shoal.runs.notes import NO_NOTES, RunNotes
from shoal.text import first_line

MOST_METRICS = 1000
"""Most metrics that MLflow accepts in one request."""

MOST_PARAMS = 100
"""Most parameters that MLflow accepts in one request."""

LONGEST_NAME = 250
LONGEST_PARAM = 6000
LONGEST_TAG = 8000

LAST_STEP = "shoal.last_step"
"""The run's tag with the last step that MLflow has; it is sent after the metrics of that step."""


class MlflowSink:
    """A sink that keeps one MLflow run for a run folder, however often it is resumed:
    `mlflow/run_id` holds the id.

    Metrics have the step that they are of. Steps that MLflow has from before the process was killed
    are not sent again. The settings are the run's parameters, without those that it has already,
    because MLflow does not let parameters change."""

    def __init__(
        self,
        folder: Path,
        section: MlflowSection,
        config: Mapping[str, Any],
        run_name: str,
        labels: RunNotes = NO_NOTES,
    ) -> None:
        """Begins the run, or continues that of this folder; `close` ends it. `config`: the
        settings; `run_name`: the run's name in MLflow, "" for the folder's; `labels`: the note and
        the tags that a new run begins with. `place` says where the run is. ShoalError if the
        package or an address is missing, or the server refuses."""
        self._mlflow, uri = load(section)
        id_path = folder / "mlflow" / "run_id"
        artifacts = None  # the server decides
        self.place = uri
        if not uri:
            with explain_write_errors(id_path.parent):
                id_path.parent.mkdir(parents=True, exist_ok=True)
            database = (id_path.parent / "mlflow.db").resolve()
            artifacts = (id_path.parent / "artifacts").resolve().as_uri()
            uri = f"sqlite:///{database}"
            self.place = f"offline; `mlflow ui --backend-store-uri {uri}` shows it"
        try:
            with _quick_and_quiet():
                self._client = self._mlflow.MlflowClient(tracking_uri=uri)
                if not id_path.is_file():
                    run_id = self._create_run(
                        section.experiment, artifacts, run_name or folder.name, tags_of(labels)
                    )
                    write_atomically(id_path, [run_id])
                self._id = id_path.read_text(encoding="utf-8").strip()
                run = self._client.get_run(self._id)
                self._client.update_run(self._id, status="RUNNING")
                self._send_params(config, run.data.params)
        except (self._mlflow.MlflowException, OSError) as error:
            raise _refused(section, error) from error
        self._last_step = int(run.data.tags.get(LAST_STEP, -1))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs figures that are numbers, at their step; those of a step not again if MLflow has the
        step already. What MLflow permits in no name becomes `_`."""
        values = scalars(metrics)
        is_evaluation = all(name.startswith("evaluate/") for name in values)
        if not is_evaluation and step <= self._last_step:
            return
        entities = self._mlflow.entities
        milliseconds = int(1000 * time.time())
        figures = []
        for name, value in values.items():
            figures.append(entities.Metric(permitted_name(name), float(value), milliseconds, step))
        for start in range(0, len(figures), MOST_METRICS):
            self._client.log_batch(self._id, metrics=figures[start : start + MOST_METRICS])
        if not is_evaluation:
            self._client.set_tag(self._id, LAST_STEP, str(step))

    def write_completions(self, step: int, rows: Rows) -> None:
        """Logs a table of completions as the artifact `completions/step_N.json`, with `columns` and
        `data`; nothing without rows, or if MLflow has the step already."""
        if rows and step > self._last_step:
            cells = [list(json_ready(row).values()) for row in rows]
            table = {"columns": list(rows[0]), "data": cells}
            self._client.log_dict(self._id, table, f"completions/step_{step}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id, status="FINISHED")

    def _create_run(
        self, experiment: str, artifacts: str | None, run_name: str, tags: Mapping[str, str]
    ) -> str:
        """Creates a run in the experiment of this name, which is created if there is none, and
        returns its id. `artifacts`: address of the artifacts of a new experiment; None: MLflow's
        default. `tags`: MLflow's, names with values."""
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            number = self._client.create_experiment(experiment, artifact_location=artifacts)
        else:
            number = found.experiment_id
        return self._client.create_run(number, run_name=run_name, tags=dict(tags)).info.run_id

    def _send_params(self, config: Mapping[str, Any], sent: Mapping[str, str]) -> None:
        """Sends the settings as parameters `section.key`, without those in `sent`, which the run
        has."""
        params = []
        for name, value in flattened(config).items():
            if name not in sent:
                params.append(self._mlflow.entities.Param(name, str(value)[:LONGEST_PARAM]))
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MOST_PARAMS])


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings in one dictionary, with names like `batch.group_size`. Values are
    those that JSON has; an empty mapping has no entry."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = json_ready(value)
    return flat


def tags_of(labels: RunNotes) -> dict[str, str]:
    """Returns a run's note and tags as tags of MLflow, which have a name and a value: each tag is
    `true`, and the note has the name under which MLflow shows a run's description."""
    tags = {permitted_name(tag): "true" for tag in labels.tags}
    if labels.notes:
        tags["mlflow.note.content"] = labels.notes[:LONGEST_TAG]
    return tags


def permitted_name(name: str) -> str:
    """Returns a metric's name as MLflow permits it: letters, digits, `_ - . : /` and spaces, at
    most 250 characters, and no empty or dotted part between slashes."""
    name = re.sub(r"[^/\w.\- :]", "_", name)[:LONGEST_NAME]
    if posixpath.normpath(name) != name or name.startswith(("..", "/")):
        name = name.replace("/", "_").replace("..", "__")
    return name


def load(section: MlflowSection) -> tuple[Any, str]:
    """Returns (package `mlflow`, address of the tracking server; "" for a database in the run's
    folder). Sends nothing. ShoalError if the package is not installed, or if mode=online has no
    address."""
    uri = section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if section.mode == "online" and not uri:
        raise ShoalError(
            "report.mlflow.mode=online needs an address: set MLFLOW_TRACKING_URI or "
            "report.mlflow.tracking_uri, or set report.mlflow.mode=offline"
        )
    try:
        with _quick_and_quiet():
            import mlflow
            import mlflow.entities

            is_offline = section.mode == "offline" or not uri
            if is_offline:
                # MLflow's databases need them, and its small package does not bring them.
                import alembic  # noqa: F401
                import sqlalchemy  # noqa: F401
    except ImportError as error:
        raise ShoalError(
            f"report.mlflow.mode={section.mode} needs a package that is not installed: pip install "
            "'.[mlflow]' in the clone of Shoal"
        ) from error
    return mlflow, "" if is_offline else uri


@contextlib.contextmanager
def _quick_and_quiet() -> Iterator[None]:
    """Context manager for the import and the start of the package. It sends no usage statistics, a
    server that does not answer is given up after a minute, not after ten, and how a database is
    made is not logged. Variables that are set already stay; the others are removed again."""
    values = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    }
    set_here = [name for name in values if name not in os.environ]
    for name in set_here:
        os.environ[name] = values[name]
    logger = logging.getLogger("mlflow")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name in set_here:
            os.environ.pop(name, None)


def _refused(section: MlflowSection, error: Exception) -> ShoalError:
    """Returns (does not raise) the ShoalError for an error of MLflow, with the first line of its
    message, or the name of its type if it has none."""
    return ShoalError(
        f"report.mlflow.mode={section.mode}: MLflow did not start: {first_line(error)}; set "
        "report.mlflow.mode=offline to write to the run's folder, or off"
    )
