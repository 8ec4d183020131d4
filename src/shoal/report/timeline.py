"""Writes `timeline.json`: what trainer, hosts, rewards and publication did when, in Chrome's trace
format, for Perfetto.

Each event is written when it ends. The format does not need the closing bracket, so a killed run
leaves a file that opens."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from shoal.files import explain_write_errors

Method = TypeVar("Method", bound=Callable[..., Any])

TIMELINE = "timeline.json"
LEAST_SECONDS = 1e-4
"""Events shorter than this, such as a look at a host that has nothing to do, are left out."""


class Timeline:
    """Writes events by lane, in microseconds since the epoch; writes nothing if there is no path. A
    resumed run appends to the file. Threads may share it. `close` it at the end."""

    def __init__(
        self, path: Path | None = None, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        """Opens the file `path`, or none if it is None. `warn`: called with a text, once, if the
        disk fails later. ShoalError if the file cannot be opened."""
        self._lock, self._warn = threading.Lock(), warn
        self._lanes: dict[str, int] = {}
        self._ended: dict[str, float] = {}  # lane -> end of the lane's last event
        self._file: TextIO | None = None
        if path is not None:
            with explain_write_errors(path, "report.timeline"):
                begins = not path.exists()
                # buffering=1: each line is written at once
                self._file = path.open("a", encoding="utf-8", buffering=1)
                if begins:
                    self._file.write("[\n")

    @contextlib.contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Context manager that writes an event which begins and ends with the `with` block, also if
        the block raises. `lane`: the row of the viewer, such as "trainer"; `name`: the event's."""
        started = time.time()
        try:
            yield
        finally:
            self._write(lane, name, started, time.time())

    def add(self, lane: str, name: str, seconds: float) -> None:
        """Writes an event of `seconds` that ends now (`lane` and `name` as for `span`). It begins
        no earlier than the end of the lane's last event, since viewers do not show events that
        overlap."""
        ended = time.time()
        self._write(lane, name, max(self._ended.get(lane, 0.0), ended - seconds), ended)

    def _write(self, lane: str, name: str, started: float, ended: float) -> None:
        """Writes an event from `started` to `ended`, both in seconds since the epoch; none if it is
        too short (LEAST_SECONDS) or the timeline is closed. An error of the disk ends the timeline
        with a warning."""
        if self._file is None or ended - started < LEAST_SECONDS:
            return
        with self._lock:
            if self._file.closed:
                return
            self._ended[lane] = ended
            events: list[dict[str, Any]] = []
            if lane not in self._lanes:
                self._lanes[lane] = len(self._lanes)
                # "M": names the lane, before its first event
                events = [{"ph": "M", "name": "thread_name", "args": {"name": lane}}]
            events.append(
                {
                    "ph": "X",  # an event with a duration
                    "name": name,
                    "ts": round(started * 1e6),
                    "dur": round((ended - started) * 1e6),
                }
            )
            try:
                for event in events:
                    event["pid"] = 0
                    event["tid"] = self._lanes[lane]
                    self._file.write(json.dumps(event) + ",\n")
            except OSError as error:  # an error ends the timeline, not the run
                self._close()
                self._warn(f"report.timeline: {error.strerror or error}; the timeline ends here")

    def close(self) -> None:
        """Closes the file; ignores errors, and events that end later."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # closing writes what is left, and may fail
                self._file.close()


def timed(lane: str, name: str) -> Callable[[Method], Method]:
    """Returns a decorator for methods: each call is written as an event (`Timeline.span`, with this
    lane and name) to the attribute `timeline` of the method's object. Arguments, result and errors
    stay the same."""

    def decorate(method: Method) -> Method:
        """Returns the method, with each call written as an event."""

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.timeline.span(lane, name):
                return method(self, *args, **kwargs)

        return cast(Method, call)

    return decorate
