"""Answers what the page asks for: a view's name and parameters in, a JSON record out. Without HTTP, so that the served
page and the page in one file show the same.

    metrics.jsonl, evaluations.jsonl -> Curves, Evaluations  \\
    groups/*.parquet                 -> GroupTable            > answer(view, parameters) -> record
    one groups file                  -> detail               /

A thread takes up what a run writes while it goes on, a piece at a time.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.commands.view.curves import Curves
from shoal.commands.view.detail import group_detail, prompt_history, prompt_list, token_detail
from shoal.commands.view.lint import TextLint, lint, number_findings
from shoal.commands.view.overview import comparison, overview, progress
from shoal.commands.view.pieces import Pieces
from shoal.commands.view.query import Searches, group_rows
from shoal.commands.view.replays import Replays, refusal
from shoal.report.folder import CONFIG, SUMMARY
from shoal.runs.database import Database
from shoal.runs.group_table import GroupTable
from shoal.runs.growing_lines import GrowingLines
from shoal.runs.stored_run import Evaluations, StoredRun
from shoal.text import did_you_mean
from shoal.types import ShoalError

POLL_SECONDS, IDLE_POLL_SECONDS, IDLE_AFTER = 1.0, 5.0, 20.0
"""Seconds between two looks at the runs; while nobody asks, and after how long."""
MAX_NUMBER = 2**31 - 1


@dataclass
class OpenRun:
    """A run with what has been read of it."""

    run: StoredRun
    index: GroupTable
    curves: Curves
    evaluations: Evaluations
    evaluation_lines: GrowingLines
    pieces: Pieces
    lint: TextLint | None = None
    lint_revision: int = -1
    _kept: dict[Any, Any] = field(default_factory=dict)  # answers that hold until the run writes again

    def kept(self, name: str, revision: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made again only when the revision is another."""
        held = self._kept.get(name)
        if held is None or held[0] != revision:
            self._kept[name] = held = (revision, make())
        return held[1]

    def _stored(self, file: str, read: Callable[[], Any]) -> Any:
        """What `read` gives of a file, read again only when the file has changed."""
        path = self.run.file(file)
        return self.kept(file, path and path.stat().st_mtime_ns, read)

    @property
    def settings(self) -> dict[str, Any]:
        return self._stored(CONFIG, self.run.settings)

    @property
    def progress(self) -> dict[str, Any]:
        return progress(self.run, self.curves, self.settings, bool(self._stored(SUMMARY, self.run.summary)))


class Viewer:
    """The runs of a page. `refresh` reads what is new, `start` does so in a thread until `close`."""

    def __init__(self, runs: Sequence[StoredRun]) -> None:
        self.database = Database(runs)
        self.runs = {run.name: OpenRun(
            run, GroupTable(run, self.database, number), Curves(run), Evaluations(),
            GrowingLines(run, "evaluations.jsonl"), Pieces(run)) for number, run in enumerate(runs)}
        self.searches, self.replays = Searches(), Replays()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._lint_lock = threading.Lock()
        self._asked_last = time.monotonic()

    # ---- reading

    def refresh(self, groups: bool = True) -> bool:
        """Reads a piece of what is new in each run; True if more is waiting."""
        more = False
        for one in self.runs.values():
            try:
                one.curves.read()
                one.evaluations.add(*one.evaluation_lines.new(0.2))
                more |= not one.curves.complete
                if groups:
                    self.database.give_way()
                    more |= one.index.refresh()
            except Exception as error:  # a folder that was removed, whatever a hostile file brings about
                one.run.problem("reading", f"{type(error).__name__}: {error}")
        return more

    def read_all(self) -> None:
        while self.refresh():
            pass

    def start(self) -> None:
        self.refresh(groups=False)  # the first page needs curves alone
        self._thread = threading.Thread(target=self._watch, name="reading runs", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.is_set():
            more = self.refresh()
            idle = time.monotonic() - self._asked_last > IDLE_AFTER
            self._end.wait(0.002 if more else IDLE_POLL_SECONDS if idle else POLL_SECONDS)

    def close(self) -> None:
        self._end.set()
        self.replays.close()
        self.searches.close()
        for one in self.runs.values():
            if one.lint:
                one.lint.work.close()
        if self._thread:
            self._thread.join(10)

    # ---- answering

    def answer(self, view: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        """The record of a view; ShoalError for a view, a run or a value that there is none of."""
        if view not in VIEWS:
            raise ShoalError(f"there is no view {view[:40]!r}{did_you_mean(view, VIEWS) or ''}")
        asked, self._asked_last = Parameters(parameters), time.monotonic()
        # Groups wait for their own search, which must not give way to them meanwhile.
        with contextlib.nullcontext() if view == "groups" else self.database.asked():
            if view in ("runs", "compare"):
                return VIEWS[view](self, asked)
            name = asked.text("run")
            if name not in self.runs:
                raise ShoalError(f"there is no run {name[:80]!r} here: {', '.join(list(self.runs)[:8])}")
            return VIEWS[view](self.runs[name], asked, self)

    def replay(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Begins to sample a group again; ShoalError where that is not possible from the page."""
        asked = Parameters(parameters)
        group = self.answer("group", parameters)
        if group["no_replay"]:
            raise ShoalError(f"this group cannot be sampled again here: {group['no_replay']}")
        one = self.runs[asked.text("run")]
        self.replays.start(one.run, group["file"], group["group"], group["step"])
        return self.replays.record(one.run, group["file"], group["group"], 0)

    def text_lint(self, one: OpenRun) -> TextLint:
        """The lint of a run's texts; begun again once a live run has written more."""
        with self._lint_lock:
            if one.lint is None or (one.lint.work.is_over and one.lint_revision != one.index.revision):
                one.lint, one.lint_revision = TextLint(one.index), one.index.revision
            return one.lint


class Parameters:
    """Parameters of a request by name and kind; ShoalError for a value that is none."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def text(self, name: str, most: int = 4000) -> str:
        return str(self._values.get(name, ""))[:most]

    def number(self, name: str, default: int | None = None, least: int = 0, most: int = MAX_NUMBER) -> int:
        text = self.text(name, 40)
        if not text and default is not None:
            return default
        try:
            value = int(text)
        except ValueError:
            raise ShoalError(f"{name}={text!r}: expected an integer") from None
        if not least <= value <= most:
            raise ShoalError(f"{name}={text}: expected {least} to {most}")
        return value

    def real(self, name: str, default: float) -> float:
        try:
            value = float(self.text(name, 40) or default)
        except ValueError:
            raise ShoalError(f"{name}: expected a number") from None
        return default if math.isnan(value) else value

    def flag(self, name: str) -> bool:
        return self.text(name) in ("1", "true")


def _runs(viewer: Viewer, _: Parameters) -> dict[str, Any]:
    return {"runs": [{"name": name, "path": str(one.run.path), "progress": one.progress,
                      "problems": len(one.run.problems)} for name, one in viewer.runs.items()]}


def _compare(viewer: Viewer, asked: Parameters) -> dict[str, Any]:
    names = [name for name in asked.text("runs").split(",") if name in viewer.runs]
    return comparison([(name, viewer.runs[name].settings) for name in names])


def _overview(one: OpenRun, asked: Parameters, viewer: Viewer) -> dict[str, Any]:
    revision = (one.curves.revision, len(one.evaluations.rows), len(one.run.problems), bool(one.index.weights))
    record = one.kept("overview", revision, lambda: overview(one.run, one.curves, one.evaluations, one.index.weights,
                                                             one.settings))
    return record | {"progress": one.progress, "waiting": one.index.waiting}


def _curves(one: OpenRun, asked: Parameters, viewer: Viewer) -> dict[str, Any]:
    first, last = asked.real("first", -math.inf), asked.real("last", math.inf)
    if asked.text("first") or asked.text("last"):
        return one.curves.thinned(first, last) | {"revision": one.curves.revision}
    return one.kept("curves", one.curves.revision, lambda: one.curves.thinned(first, last)) | {
        "revision": one.curves.revision}


def _status(one: OpenRun, asked: Parameters, viewer: Viewer) -> dict[str, Any]:
    return {"revision": one.curves.revision, "index": one.index.revision, "waiting": one.index.waiting,
            "progress": one.progress}


def _groups(one: OpenRun, asked: Parameters, viewer: Viewer) -> dict[str, Any]:
    within = asked.text("within")
    return group_rows(
        one.index, viewer.searches, sort=asked.text("sort") or "step", descending=asked.flag("desc"),
        filter=asked.text("filter", 2000), text=asked.text("text"), is_regex=asked.flag("regex"),
        within=within if within in ("prompt", "completion") else "any",
        offset=asked.number("offset", 0), limit=asked.number("limit", 100, 1, 500))


def _group(one: OpenRun, asked: Parameters, viewer: Viewer) -> dict[str, Any]:
    return group_detail(one.index, asked.text("file"), asked.number("group")) | {
        "path": str(one.run.path), "no_replay": refusal(one.run, one.settings, asked.text("file"))}


def _tokens(one: OpenRun, asked: Parameters, viewer: Viewer) -> dict[str, Any]:
    return token_detail(one.index, asked.text("file"), asked.number("group"), asked.number("completion", 0),
                        one.pieces, one.settings)


def _replay(one: OpenRun, asked: Parameters, viewer: Viewer) -> dict[str, Any]:
    return viewer.replays.record(one.run, asked.text("file"), asked.number("group"), asked.number("completion", 0))


def _prompt(one: OpenRun, asked: Parameters, viewer: Viewer) -> dict[str, Any]:
    return prompt_history(one.index, asked.text("set"), asked.number("row", most=2**62))


def _prompts(one: OpenRun, asked: Parameters, viewer: Viewer) -> dict[str, Any]:
    key = (asked.text("set"), asked.text("change"), asked.number("offset", 0), asked.number("limit", 100, 1, 500))
    return one.kept("prompts", (key, one.index.revision),
                 lambda: prompt_list(one.index, *key)) | {"waiting": one.index.waiting}


def _lint(one: OpenRun, asked: Parameters, viewer: Viewer) -> dict[str, Any]:
    numbers = one.kept("lint", one.index.revision, lambda: number_findings(one.index))
    return lint(one.index, numbers, viewer.text_lint(one)) | {"waiting": one.index.waiting}


VIEWS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "runs": _runs, "compare": _compare, "overview": _overview, "curves": _curves, "status": _status,
    "groups": _groups, "group": _group, "tokens": _tokens, "prompt": _prompt, "prompts": _prompts, "lint": _lint,
    "replay": _replay,
}
"""View -> what answers it."""
