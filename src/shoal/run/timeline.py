"""`timeline.json`: what trainer, hosts, rewards and publication did when, in Chrome's trace format, for Perfetto.

A lane each; the methods of a run's parts are wrapped, so that none of them knows of it. Of a host elsewhere the lane
shows how long it sampled, as it tells that, about once a second. Each event is written as it
ends: the format lets the closing bracket be missing, so a killed run leaves a file that opens.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from shoal.files import writing
from shoal.rollout.fleet import Fleet
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.rollout.member import Member
from shoal.trainer.loop import Run

TIMELINE = "timeline.json"
LEAST_SECONDS = 1e-4
"""Shorter calls, such as a look at a host that has nothing to do, are left out."""


class Timeline:
    """Events by lane, in microseconds since the epoch; a resumed run adds to the file."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._lock, self._warn = threading.Lock(), warn
        self._lanes: dict[str, int] = {}
        with writing(path, "report.timeline"):
            begins = not path.exists()
            self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
            if begins:
                self._file.write("[\n")

    def wrap(self, owner: Any, method: str, lane: str, name: str = "") -> None:
        """Every call of a method of this object becomes an event."""
        call = getattr(owner, method)

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.time()
            try:
                return call(*args, **kwargs)
            finally:
                self._add(lane, name or method, started, time.time() - started)

        object.__setattr__(owner, method, timed)  # an updater is frozen

    def follow(self, member: Member) -> None:
        """What a host tells of its work becomes an event each time that it is looked at, whoever the host then is."""
        look, ended = member.look, 0.0

        def looked(now: float) -> None:
            nonlocal ended
            before = member.progress.busy_seconds
            look(now)
            if (busy := member.progress.busy_seconds - before) > 0:
                # Told late, it may seem to begin before the last one's end, which viewers do not show.
                started, ended = max(ended, time.time() - busy), time.time()
                self._add(member.name, "sample", started, ended - started)

        member.look = looked  # type: ignore[method-assign]

    def _add(self, lane: str, name: str, started: float, seconds: float) -> None:
        if seconds < LEAST_SECONDS:
            return
        with self._lock:
            if self._file.closed:
                return
            try:
                if lane not in self._lanes:
                    self._lanes[lane] = len(self._lanes)
                    self._write({"ph": "M", "name": "thread_name", "args": {"name": lane}}, lane)
                self._write({"ph": "X", "name": name, "ts": round(started * 1e6), "dur": round(seconds * 1e6)}, lane)
            except OSError as error:  # a run does not end for want of its timeline
                self._file.close()
                self._warn(f"report.timeline: {error.strerror or error}; the timeline ends here")

    def _write(self, event: dict[str, Any], lane: str) -> None:
        self._file.write(json.dumps({**event, "pid": 0, "tid": self._lanes[lane]}) + ",\n")

    def close(self) -> None:
        with self._lock:
            self._file.close()


def trace(run: Run, timeline: Timeline) -> None:
    """Wraps what a run spends its time with."""
    for method, name in (("take", "wait for groups"), ("evaluate", "evaluate"), ("record", "record"), ("save", "save")):
        timeline.wrap(run, method, "trainer", name)
    timeline.wrap(run.updater, "update", "trainer")
    timeline.wrap(run, "publish", "publication")
    if isinstance(run.source, Fleet):
        for method in ("submit", "collect"):
            timeline.wrap(run.source.rewards, method, "rewards")
        for name, member in run.source.members.items():
            host = member.host.host if isinstance(member.host, ThreadHost) else member.host
            if isinstance(host, EngineHost):
                timeline.wrap(host, "poll", name, "sample")
            else:
                timeline.follow(member)
