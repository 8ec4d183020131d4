"""Sinks for metrics and some completions besides the run's folder: TensorBoard, Weights & Biases,
MLflow and Trackio, if configured. Also the thread that writes groups."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from shoal.config.sections.train import ReportSection
from shoal.records import Group, ShoalError
from shoal.report.console import completion_text, prompt_text
from shoal.runs.notes import NO_NOTES, RunNotes

GROUPS_SHOWN = 4
"""Number of groups of a step in a table of completions; each is shown with its completions of least
and of most reward."""


Rows = Sequence[Mapping[str, Any]]


class Sink(Protocol):
    """Receives figures by name, of a step or an evaluation (`evaluation_scalars`), and tables of
    completions (`completion_rows`), in the order of steps; a step's table comes before its
    figures."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def write_completions(self, step: int, rows: Rows) -> None: ...
    def close(self) -> None: ...


class Background:
    """Runs a sink in a thread. A sink that fails or hangs neither ends nor delays the run: it is
    switched off, and `warn` is called once, in the thread that writes here. `close` it at the end,
    which may wait for it."""

    def __init__(
        self,
        sink: Sink,
        name: str,
        warn: Callable[[str], None],
        most_pending: int = 1000,
        seconds_to_close: float = 60.0,
    ) -> None:
        """Starts the thread. `sink` is called there alone, and closed there. `name`: the sink's in
        texts. `warn`: called with the text of the warning. `most_pending`: how many calls may wait
        in the queue; one more is a fault of the sink. `seconds_to_close`: how long `close`
        waits."""
        self.name = name
        self._sink = sink
        self._warn = warn
        self.seconds_to_close = seconds_to_close
        self._pending: queue.Queue[tuple[Callable[..., None], int, Any] | None] = queue.Queue(
            most_pending
        )
        self._fault: str | None = None  # why the sink failed, as noted by either thread
        self._on = True  # False once the sink is switched off, or closed
        self._thread = threading.Thread(target=self._work, name=f"metrics to {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queues a copy of the figures for the sink, without waiting; does nothing if the sink is
        switched off."""
        self._put((self._sink.write, step, dict(metrics)))
        self._check()

    def write_completions(self, step: int, rows: Rows) -> None:
        """Queues a table of completions for the sink, without waiting; the rows are not copied.
        Does nothing if the sink is switched off."""
        self._put((self._sink.write_completions, step, rows))
        self._check()

    def close(self) -> None:
        """Lets the sink receive what is queued, and closes it. Waits at most `seconds_to_close`; a
        sink that takes longer is left to its thread, with a warning."""
        self._put(None)
        if self._on and self._fault is None:
            self._thread.join(self.seconds_to_close)
            if self._thread.is_alive():
                self._fault = f"it has not ended within {self.seconds_to_close:g} s"
        self._check()
        self._on = False

    def _put(self, item: tuple[Callable[..., None], int, Any] | None) -> None:
        """Queues a call (method of the sink, step, content) for the thread; None ends the thread. A
        full queue is noted as a fault of the sink; nothing is raised. Does nothing if there is a
        fault already, or if the sink is switched off or closed."""
        if self._on and self._fault is None:
            try:
                self._pending.put_nowait(item)
            except queue.Full:
                self._fault = f"it accepts no more rows, {self._pending.maxsize} are waiting"

    def _check(self) -> None:
        """Switches the sink off, with a warning, if its thread has noted a fault. Called after each
        write, so that the warning comes from the run's thread."""
        if self._on and self._fault is not None:
            self._on = False
            self._warn(
                f"{self.name} is switched off: {self._fault}; metrics.jsonl continues and holds "
                "every step"
            )

    def _work(self) -> None:
        """Runs in the sink's thread: makes the queued calls until its end or the first error."""
        try:
            item = self._pending.get()
            while item is not None:
                write, step, content = item
                write(step, content)
                item = self._pending.get()
            self._sink.close()
        except Exception as error:
            lines = str(error).strip().splitlines()
            self._fault = f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"
            with contextlib.suppress(Exception):  # the sink has failed already
                self._sink.close()


def completion_rows(groups: Sequence[Group], advantages: np.ndarray) -> list[dict[str, Any]]:
    """Returns the rows of a table of completions: of each of the first GROUPS_SHOWN groups those of
    least and of most reward (one of NaN counts as the most), as a dictionary of `prompt`,
    `completion`, `reward`, the value of each reward function under its name, and `advantage`. A
    group of one completion has one row, all others two. `advantages[P, G]`."""
    rows = []
    for group, of_group in zip(groups[:GROUPS_SHOWN], advantages, strict=False):
        order = np.argsort(group.rewards)  # NaN last
        # dict.fromkeys: a group of one completion has one row.
        for index in dict.fromkeys((int(order[0]), int(order[-1]))):
            row: dict[str, Any] = {
                "prompt": prompt_text(group.example.prompt),
                "completion": completion_text(group, index),
                "reward": float(group.rewards[index]),
            }
            for name, values in group.reward_components.items():
                row[name] = float(values[index])
            row["advantage"] = float(of_group[index])
            rows.append(row)
    return rows


def check_sinks(section: ReportSection) -> None:
    """Raises ShoalError if a package or a login that `report` needs is missing. Writes and sends
    nothing."""
    if section.tensorboard:
        from shoal.report.tensorboard import load

        load()
    if section.wandb.mode != "off":
        from shoal.report.wandb import load

        load(section.wandb)
    if section.mlflow.mode != "off":
        from shoal.report.mlflow import load

        load(section.mlflow)
    if section.trackio.mode != "off":
        from shoal.report.trackio import load

        load(section.trackio)


def make_sinks(
    folder: Path,
    section: ReportSection,
    config: Mapping[str, Any],
    run_name: str,
    resumed_at: int | None,
    note: Callable[[str], None],
    warn: Callable[[str], None],
    labels: RunNotes = NO_NOTES,
) -> list[Background]:
    """Returns the sinks that `report` (`section`) configures, each with its thread running. [] if
    it configures none. The caller closes them. ShoalError if a package or a login is missing, a
    file cannot be written or a service refuses.

    `folder`: the run's, in which the sinks write their files. `run_name`: the run's name at a
    service; "": that of the folder. `config`: the resolved configuration, which is sent along.
    `resumed_at`: the version that a resumed run continues from, None for a new run. `note` prints a
    line, `warn` a warning. `labels`: note and tags, with which Weights & Biases and MLflow begin a
    run; Trackio has none, and shows them among the settings."""
    sinks: list[Background] = []
    if section.tensorboard:
        from shoal.report.tensorboard import TensorboardSink

        sinks.append(
            Background(TensorboardSink(folder / "tensorboard", resumed_at), "TensorBoard", warn)
        )
    if section.wandb.mode != "off":
        from shoal.report.wandb import WandbSink

        wandb = WandbSink(folder, section.wandb, config, run_name, labels)
        note(
            "Weights & Biases: "
            f"{wandb.url or f'offline; `wandb sync {folder}/wandb/offline-*` sends it'}"
        )
        sinks.append(Background(wandb, "Weights & Biases", warn))
    if section.mlflow.mode != "off":
        from shoal.report.mlflow import MlflowSink

        mlflow = MlflowSink(folder, section.mlflow, config, run_name, labels)
        note(f"MLflow: {mlflow.place}")
        sinks.append(Background(mlflow, "MLflow", warn))
    if section.trackio.mode != "off":
        from shoal.report.trackio import TrackioSink

        trackio = TrackioSink(folder, section.trackio, config, run_name)
        note(f"Trackio: {trackio.place}")
        sinks.append(Background(trackio, "Trackio", warn))
    return sinks


# ---- the thread that writes while the next step is sampled

MOST_PENDING = 2
"""Number of steps that may wait to be written; with a slower disk, training waits."""


STUCK_SECONDS = 300.0
"""Time after which waiting for the disk is given up."""


class GroupWriter:
    """Calls `write` in another thread, in order. An error of `write` is raised by the next `put`,
    `flush` or `close`, once; anything queued meanwhile is not written. `close` it at the end.
    `folder` is named in the error if the disk does not answer."""

    def __init__(self, write: Callable[..., Any], folder: object = "the run folder") -> None:
        """Starts no thread yet; the first `put` does. `write` is called with the arguments of
        `put`."""
        self._write, self._folder = write, folder
        # An event is set once everything before it is written; None ends the thread.
        self._pending: queue.Queue[tuple[Any, ...] | threading.Event | None] = queue.Queue(
            MOST_PENDING
        )
        self._failure: BaseException | None = None
        self._stuck = False
        self._thread: threading.Thread | None = None

    def put(self, *arguments: Any) -> None:
        """Queues a call of `write` with these arguments; waits if MOST_PENDING calls are queued
        already. The arguments are not copied. Raises the error of an earlier call, and queues
        nothing then; ShoalError if the disk has not answered for STUCK_SECONDS."""
        self._raise_failure()
        self._put(arguments)

    def flush(self) -> None:
        """Waits until `write` has returned for everything that was put; called before a checkpoint
        is saved. Returns at once if nothing was put. Raises the error of an earlier call;
        ShoalError if the disk has not answered for STUCK_SECONDS."""
        if self._thread is not None:
            done = threading.Event()
            self._put(done)
            if not done.wait(STUCK_SECONDS):
                self._give_up()
        self._raise_failure()

    def close(self) -> None:
        """Writes what was put and ends the thread; errors like `flush`, after which the thread goes
        on. A thread that is stuck is left alone, without an error; it ends with the process."""
        if self._thread is not None and not self._stuck:
            self.flush()
            self._put(None)
            self._thread.join()
            self._thread = None

    def _put(self, item: tuple[Any, ...] | threading.Event | None) -> None:
        """Queues an item, starting the thread at the first call. ShoalError if the disk does not
        answer."""
        if self._stuck:
            self._give_up()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="groups to disk", daemon=True)
            self._thread.start()
        try:
            self._pending.put(item, timeout=STUCK_SECONDS)
        except queue.Full:
            self._give_up()

    def _give_up(self) -> NoReturn:
        """Raises ShoalError because the disk does not answer; each later `put` raises it, too, and
        `close` does nothing any more."""
        self._stuck = True
        raise ShoalError(
            f"{self._folder}: the disk has not answered for {STUCK_SECONDS:.0f} s, and groups are "
            "not written; check the disk, then resume the run"
        )

    def _raise_failure(self) -> None:
        """Raises the error of the thread, if there is one, and forgets it, so that it is raised
        once."""
        # Read the field once: an error that the thread sets between two reads would be lost.
        failure = self._failure
        if failure is not None:
            self._failure = None
            raise failure

    def _work(self) -> None:
        """Runs in the thread: makes the queued calls, and sets queued events when it reaches them.
        After an error calls are dropped, until `put` or `flush` has raised it."""
        item = self._pending.get()
        while item is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self._failure is None:
                try:
                    self._write(*item)
                except BaseException as error:  # raised again in the caller, where the run can end
                    self._failure = error
            item = self._pending.get()
