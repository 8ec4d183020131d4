"""Answers what the page asks for: a view's name and parameters in, a JSON record out. Without HTTP,
so that the served page and the page in one file show the same.

    metrics.jsonl, evaluations.jsonl -> Curves, Evaluations  \\
    events.jsonl                     -> EventLine             \\ answer(view, parameters) -> record
    groups/*.parquet                 -> GroupTable            /
    one groups file                  -> detail               /

A thread takes up what runs write while they go on, a piece at a time, and runs that begin.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.buckets import COPIES, address, area_of, fetch
from shoal.commands.view import groups
from shoal.commands.view.curves import Curves
from shoal.commands.view.groups import MAX_TEXT, Searches
from shoal.commands.view.lint import TextLint, lint, number_findings
from shoal.commands.view.run import (
    comparison,
    differing_settings,
    failure,
    home_row,
    overview,
    progress,
)
from shoal.files import check_local
from shoal.records import ShoalError
from shoal.runs.group_table import Database, GroupTable
from shoal.runs.layout import CONFIG, DECIDED, LAST, SUMMARY, is_run
from shoal.runs.lines import EvaluationLine, EventLine
from shoal.runs.reader import Evaluations, LineReader, StoredRun, open_runs
from shoal.tasks.task import ROWS
from shoal.text import did_you_mean

POLL_SECONDS, IDLE_POLL_SECONDS, IDLE_AFTER = 1.0, 5.0, 20.0
"""Seconds between two looks at the runs; while nobody asks, and after how long."""
LOOK_SECONDS, START_SECONDS = 1.0, 1.0
"""Seconds between two looks for runs that have begun; of reading before the first answer."""
GROUP_SECONDS = 2.0
"""Seconds that a link to a group waits for its file."""
MAX_NUMBER, MOST_COMPARED, MAX_RUNS = 2**31 - 1, 3, 64


class OpenRun:
    """A run with what has been read of it."""

    def __init__(self, run: StoredRun, database: Database, number: int) -> None:
        self.run, self.index, self.curves = run, GroupTable(run, database, number), Curves(run)
        self.evaluations = Evaluations()
        self._evaluation_lines = LineReader(run, EvaluationLine)
        self.pieces = groups.Pieces(run)
        self.is_opened = False  # somebody asked for it: its groups are read
        self.all_read = threading.Event()  # all of them were, at some time
        self.lint: TextLint | None = None
        self.lint_revision = -1
        self._kept: dict[str, Any] = {}  # answers that hold until the run writes again

    def read(self, seconds: float = 0.3) -> bool:
        """Reads a piece of what is new in its curves, for about so long; True if more is waiting.
        Of a run in a bucket all that is new is fetched first, but for checkpoints."""
        if area_of(self.run.path):
            fetch(address(self.run.path), weights=False, groups=self.is_opened)
        self.curves.read(seconds)
        self.evaluations.read(self._evaluation_lines, seconds)
        return not self.curves.complete

    def open(self) -> None:
        """From now on its groups are read too."""
        if not self.is_opened:
            self.is_opened, self.index.waiting = True, len(self.run.group_files())

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
        # A run writes what it decided after what was requested.
        files = [self.run.file(name) for name in (CONFIG, DECIDED)]
        revision = [path and path.stat().st_mtime_ns for path in files]
        return self.kept(CONFIG, revision, self.run.settings)

    @property
    def decided_keys(self) -> frozenset[str]:
        return self._stored(DECIDED, lambda: self.run.decided_keys)

    @property
    def home_row(self) -> dict[str, Any]:
        return self.kept(
            "home",
            (self.curves.revision, len(self.evaluations.lines)),
            lambda: home_row(self.run, self.curves, self.evaluations, self.settings),
        )

    @property
    def events(self) -> list[EventLine]:
        return self._stored(EventLine.FILE, self.run.events)

    @property
    def progress(self) -> dict[str, Any]:
        return progress(
            self.run,
            self.curves,
            self.settings,
            bool(self._stored(SUMMARY, self.run.summary)),
            failure(self.events),
        )


class Viewer:
    """The runs that words name. `refresh` reads what is new, `start` does so in a thread until
    `close`."""

    def __init__(self, words: Sequence[str]) -> None:
        runs = open_runs(words)
        paths = [check_local(word, "runs", COPIES) for word in words if word != LAST]
        self._folders = [path for path in paths if not is_run(path)]  # where runs may begin
        self.database = Database(
            [*(path.resolve() for path in self._folders), *(run.root for run in runs)]
        )
        self.runs: dict[str, OpenRun] = {}
        self.notice = ""  # why runs are not shown
        self._numbers = itertools.count()
        self._open(runs)
        self.searches = Searches()
        self._end, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._lint_lock = threading.Lock()
        self._asked_last = self._looked_last = time.monotonic()

    @property
    def has_home(self) -> bool:
        """False where the page begins with a run: the only one, or a few that were named one by
        one."""
        return not 1 <= len(self.runs) <= (1 if self._folders else MOST_COMPARED)

    # ---- reading

    def _open(self, runs: Sequence[StoredRun]) -> None:
        """Opens further runs; of more than fit on a page the newest stay."""
        found = [*(one.run for one in self.runs.values()), *runs]
        self.notice = (
            ""
            if found
            else (
                f"{', '.join(map(str, self._folders))}: no folder in there is a run yet; those "
                "that begin appear here"
            )
        )
        if len(found) > MAX_RUNS:
            self.notice = (
                f"{len(found)} runs found: the newest {MAX_RUNS} are shown; name others to see them"
            )
            found.sort(key=lambda run: -run.began)
        # Replaced, not changed: a request may be going over it.
        self.runs = {
            run.name: self.runs.get(run.name) or OpenRun(run, self.database, next(self._numbers))
            for run in found[:MAX_RUNS]
        }

    def look(self) -> None:
        """Opens runs that have begun below the folders that were named."""
        self._looked_last = time.monotonic()
        try:
            if self._folders:
                self._open(
                    open_runs(
                        list(map(address, self._folders)),
                        known=[one.run for one in self.runs.values()],
                    )
                )
        except ShoalError as error:
            self.notice = str(error)

    def refresh(self, groups: bool = True, seconds: float = 0.3) -> bool:
        """Reads a piece of what is new in each run, its groups if it was opened; True if more is
        waiting."""
        more = False
        for one in self.runs.values():
            try:
                more |= one.read(seconds)
                if groups and one.is_opened:
                    self.database.give_way()
                    more |= one.index.refresh()
                    if not one.index.waiting:
                        one.all_read.set()
            except (
                Exception
            ) as error:  # a folder that was removed, whatever a hostile file brings about
                one.run.problem("reading", f"{type(error).__name__}: {error}")
        return more

    def read_all(self) -> None:
        for one in self.runs.values():
            one.open()
        while self.refresh():
            pass

    def start(self) -> None:
        # The first page needs curves alone.
        self.refresh(groups=False, seconds=min(0.3, START_SECONDS / max(1, len(self.runs))))
        self.answer("home", {})  # reads all settings
        self._thread = threading.Thread(target=self._watch, name="reading runs", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.is_set():
            if time.monotonic() - self._looked_last > LOOK_SECONDS:
                self.look()
            more = self.refresh()
            idle = time.monotonic() - self._asked_last > IDLE_AFTER
            self._wake.wait(0.002 if more else IDLE_POLL_SECONDS if idle else POLL_SECONDS)
            self._wake.clear()

    def close(self) -> None:
        self._end.set()
        self._wake.set()
        if self._thread:
            self._thread.join(10)

    # ---- answering

    def answer(self, view: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        """The record of a view; ShoalError for a view, a run or a value that there is none of."""
        if view not in VIEWS:
            raise ShoalError(f"there is no view {view[:40]!r}{did_you_mean(view, VIEWS) or ''}")
        asked, self._asked_last = Query(parameters), time.monotonic()
        if (one := self.runs.get(asked.text("run"))) and self._thread:
            self._await_groups(one, view)
        with self.database.asked():
            if view in ("runs", "home", "compare"):
                return VIEWS[view](self, asked)
            name = asked.text("run")
            if name not in self.runs:
                raise ShoalError(
                    f"there is no run {name[:80]!r} here: {', '.join(list(self.runs)[:8])}"
                )
            return VIEWS[view](self.runs[name], asked, self)

    def _await_groups(self, one: OpenRun, view: str) -> None:
        """Has the groups of a run read from now on, and waits a little for them."""
        is_new = not one.is_opened
        one.open()
        if is_new:
            self._wake.set()
        if view != "overview" and (is_new or view in ("group", "tokens")):
            one.all_read.wait(GROUP_SECONDS)

    def text_lint(self, one: OpenRun) -> TextLint:
        """The lint of a run's texts; begun again once a live run has written more."""
        with self._lint_lock:
            if one.lint is None or (
                one.lint.num_read == one.lint.num_files and one.lint_revision != one.index.revision
            ):
                is_own = one.settings.get("task.name") not in ("custom", ROWS)
                one.lint, one.lint_revision = TextLint(one.index, is_own), one.index.revision
            texts = one.lint
        texts.read_on()
        return texts


class Query:
    """Query of a request by name and kind; ShoalError for a value that is none."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def text(self, name: str, most: int = 4000) -> str:
        return str(self._values.get(name, ""))[:most]

    def number(
        self, name: str, default: int | None = None, least: int = 0, most: int = MAX_NUMBER
    ) -> int:
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


def _runs(viewer: Viewer, _: Query) -> dict[str, Any]:
    """Each run, how far it is, and the numbers that change when its curves or its groups do.
    `home`: whether the page begins with the list of runs."""
    return {
        "notice": viewer.notice,
        "home": viewer.has_home,
        "runs": [
            {
                "name": name,
                "path": str(one.run.path),
                "progress": one.progress,
                "problems": len(one.run.problems),
                "revision": one.curves.revision,
                "index": one.index.revision,
                "waiting": one.index.waiting,
                "measured": one.index.is_measured,
            }
            for name, one in viewer.runs.items()
        ],
    }


def _home(viewer: Viewer, _: Query) -> dict[str, Any]:
    """The list of runs, the newest first."""
    runs = viewer.runs
    settings = [one.settings for one in runs.values()]
    decided = [one.decided_keys for one in runs.values()]
    rows = [
        {
            "name": name,
            "path": str(one.run.path),
            "progress": one.progress,
            "chips": own,
            **one.home_row,
        }
        for (name, one), own in zip(
            runs.items(), differing_settings(settings, decided), strict=True
        )
    ]
    return {"rows": sorted(rows, key=lambda row: -row["began"])}


def _compare(viewer: Viewer, asked: Query) -> dict[str, Any]:
    names = [name for name in asked.text("runs").split(",") if name in viewer.runs]
    runs = [viewer.runs[name] for name in names]
    found = comparison([one.settings for one in runs], [one.decided_keys for one in runs])
    if len(names) == 2:
        keys = [row["key"] for row in found["differing"]]
        a, b = (viewer.runs[name].curves for name in names)
        found["first"] = groups.first_difference(a, b, viewer.database, keys)
    return found


def _overview(one: OpenRun, asked: Query, viewer: Viewer) -> dict[str, Any]:
    progress = one.progress
    events = one.events
    revision = (
        one.curves.revision,
        len(one.evaluations.lines),
        len(events),
        len(one.run.problems),
        progress["state"],
    )

    def make() -> dict[str, Any]:
        return overview(
            one.run, one.curves, one.evaluations, events, one.index.weights, one.settings
        )

    record = one.kept("overview", revision, make)
    return record | {"progress": progress, "waiting": one.index.waiting}


def _curves(one: OpenRun, asked: Query, viewer: Viewer) -> dict[str, Any]:
    limits = asked.real("first", -math.inf), asked.real("last", math.inf)
    return one.kept("curves", (one.curves.revision, limits), lambda: one.curves.thinned(*limits))


def _groups(one: OpenRun, asked: Query, viewer: Viewer) -> dict[str, Any]:
    """A page of rows, how many there are in all, and how far a search has come."""
    state, hits = None, ""
    if text := asked.text("text", MAX_TEXT):
        search = viewer.searches.get(one.index, text)
        state, hits = search.read_on(), search.table
    rows, total = one.index.rows(
        asked.text("filter", 2000),
        asked.text("sort") or "step",
        asked.flag("desc"),
        asked.number("offset", 0),
        asked.number("limit", 100, 1, 500),
        hits,
        asked.flag("prompts"),
    )
    return {
        "rows": rows,
        "total": total,
        "functions": one.index.functions,
        "waiting": one.index.waiting,
        "search": state,
    }


def _group(one: OpenRun, asked: Query, viewer: Viewer) -> dict[str, Any]:
    return groups.group_detail(one.index, asked.text("file"), asked.number("group")) | {
        "path": str(one.run.path)
    }


def _tokens(one: OpenRun, asked: Query, viewer: Viewer) -> dict[str, Any]:
    return groups.token_detail(
        one.index,
        asked.text("file"),
        asked.number("group"),
        asked.number("completion", 0),
        one.pieces,
        one.settings,
    )


def _lint(one: OpenRun, asked: Query, viewer: Viewer) -> dict[str, Any]:
    numbers = one.kept("lint", one.index.revision, lambda: number_findings(one.index))
    return lint(one.index, numbers, viewer.text_lint(one)) | {"waiting": one.index.waiting}


VIEWS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "runs": _runs,
    "home": _home,
    "compare": _compare,
    "overview": _overview,
    "curves": _curves,
    "groups": _groups,
    "group": _group,
    "tokens": _tokens,
    "lint": _lint,
}
"""View -> what answers it."""
