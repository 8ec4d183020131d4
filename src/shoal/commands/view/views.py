"""Answers what the page asks for: takes the name of a view and parameters, and returns a JSON
record. It knows nothing of HTTP, so the served page and the page in one file show the same records.

    metrics.jsonl, evaluations.jsonl -> Curves, Evaluations  \\
    events.jsonl                     -> EventLine             \\ answer(view, parameters) -> record
    groups/*.parquet                 -> GroupTable            /
    one groups file                  -> detail               /

A thread reads what runs write meanwhile, a piece at a time, and finds runs that begin."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.buckets import COPIES, address, area_of, fetch
from shoal.commands.view import groups
from shoal.commands.view.completions import MAX_COMPLETION_ROWS, exported, with_texts
from shoal.commands.view.curves import Curves
from shoal.commands.view.groups import MAX_TEXT, SEARCH_SECONDS, Searches
from shoal.commands.view.lint import TextLint, lint, number_findings
from shoal.commands.view.run import (
    comparison,
    distinguishing_settings,
    failure,
    home_row,
    overview,
    progress,
    recipe_band,
    shown_differences,
)
from shoal.commands.view.verdict import Change, paired_change
from shoal.config.keywords import ROWS
from shoal.files import check_local
from shoal.records import ShoalError
from shoal.runs.compare import folder_of_start
from shoal.runs.group_table import COLUMNS, COMPLETION_COLUMNS, Database, GroupTable
from shoal.runs.layout import CONFIG, DECIDED, LAST, RECIPE, SUMMARY, is_run
from shoal.runs.lines import EvaluationLine, EventLine, reason
from shoal.runs.notes import NOTES, RunNotes, write_notes
from shoal.runs.reader import Evaluations, LineReader, StoredRun, open_runs
from shoal.text import did_you_mean

POLL_SECONDS, IDLE_POLL_SECONDS, IDLE_AFTER = 1.0, 5.0, 20.0
"""Seconds between two looks at the runs' files: usually, and while no page asks; and the seconds
without a request after which no page asks."""
LOOK_SECONDS, START_SECONDS = 1.0, 1.0
"""Seconds between two looks for new runs; and seconds of reading before the first answer."""
GROUP_SECONDS = 2.0
"""How many seconds a request for a group waits until its file is read."""
NEED_GROUPS = ("group", "tokens", "prompt", "shared")
"""Views that show nothing before a run's groups were read."""
MAX_NUMBER, MAX_NUMBER_CHARS, MOST_COMPARED, MAX_RUNS = 2**31 - 1, 40, 3, 64
"""The largest number in a request, and the most characters of one; the most runs that a page shows
without the list of runs (`Viewer.has_home`); and the most runs of a page."""


class OpenRun:
    """A run together with everything that was read of it. `settings`, `events` and `progress` read
    a file again only if it was written since. Callers must not change what the properties
    return."""

    def __init__(self, run: StoredRun, database: Database, number: int) -> None:
        """Prepares the reading, and reads nothing yet. `number`: the run's own among those of the
        database, for the names of its tables."""
        self.run = run
        self.index = GroupTable(run, database, number)
        self.curves = Curves(run)
        self.evaluations = Evaluations()
        self._evaluation_lines = LineReader(run, EvaluationLine)
        self.pieces = groups.Pieces(run)
        self.is_opened = False  # True once somebody asked for the run, so that its groups are read
        self.all_read = threading.Event()  # set once all groups of the run were read
        self.lint: TextLint | None = None
        self.lint_revision = -1
        self._kept: dict[str, Any] = {}  # name -> (revision, cached result)

    def read(self, seconds: float = 0.3) -> bool:
        """Reads what the run has written to metrics and evaluations since the last call, each for
        at most this many seconds. Returns True if there are more metrics to read. If the run is in
        a bucket, its new files (without checkpoints) are first copied to this machine."""
        if area_of(self.run.path):
            fetch(address(self.run.path), weights=False, groups=self.is_opened)
        self.curves.read(seconds)
        self.evaluations.read(self._evaluation_lines, seconds)
        return not self.curves.complete

    def open(self) -> None:
        """Marks the run as opened by somebody: from now on `Viewer.refresh` reads its groups, too,
        and until then all of its groups files count as waiting."""
        if not self.is_opened:
            self.is_opened = True
            self.index.waiting = len(self.run.group_files())

    def kept(self, name: str, revision: Any, make: Callable[[], Any]) -> Any:
        """Returns the result of `make()`, from the cache if the last result under this name was
        made at the same `revision` (any value that changes with what `make` reads). The cache
        holds one result a name, which callers share and must not change."""
        if name not in self._kept or self._kept[name][0] != revision:
            self._kept[name] = (revision, make())
        return self._kept[name][1]

    def _stored(self, file: str, read: Callable[[], Any]) -> Any:
        """Returns the result of `read()`, which reads this file of the run, from the cache if the
        file was not written since."""
        return self.kept(file, self._written(file), read)

    def _written(self, file: str) -> int | None:
        """Returns when a file of the run was last written, in nanoseconds; None if it does not
        exist."""
        path = self.run.file(file)
        return path.stat().st_mtime_ns if path else None

    @property
    def settings(self) -> dict[str, Any]:
        """Returns the run's settings, by dotted key, as it uses them."""
        # Both files count: a run writes its decisions later than the requested settings.
        revision = (self._written(CONFIG), self._written(DECIDED))
        return self.kept(CONFIG, revision, self.run.settings)

    @property
    def decided_keys(self) -> frozenset[str]:
        """Returns the keys whose values the run decided itself."""

        def read() -> frozenset[str]:
            return self.run.decided_keys

        return self.kept("decided keys", self._written(DECIDED), read)

    @property
    def started_in(self) -> Path:
        """Returns the folder that the run was started in, in which its relative paths begin."""
        return folder_of_start(self.run.path, self.settings)

    @property
    def paired(self) -> Change | None:
        """Returns the change of the evaluations' main figure by question, if that is a mean reward
        (`paired_change`); None if it is another figure, if there are not two evaluations, or if
        their answers are not stored, or not yet."""
        figure, curve = self.evaluations.main_curve(self.run.reward_changes)
        if not figure.endswith("/mean_reward") or len(curve["x"]) < 2:
            return None
        data_set = figure.removeprefix("evaluate/").removesuffix("/mean_reward")
        first = curve["x"][0]
        newest = curve["x"][-1]
        # A thread of the run writes the answers, which may come later than the figures.
        revision = (
            self.index.evaluation_stamp(data_set, first),
            self.index.evaluation_stamp(data_set, newest),
        )

        def read() -> Change | None:
            before = self.index.evaluated_rewards(data_set, first)
            after = self.index.evaluated_rewards(data_set, newest)
            return paired_change(before, after)

        return self.kept("paired", (first, newest, revision), read)

    @property
    def home_row(self) -> dict[str, Any]:
        """Returns the run's row in the list of runs."""
        paired = self.paired

        def make() -> dict[str, Any]:
            return home_row(self.run, self.curves, self.evaluations, self.settings, paired)

        revision = (self.curves.revision, len(self.evaluations.lines), paired)
        return self.kept("home", revision, make)

    @property
    def events(self) -> list[EventLine]:
        return self._stored(EventLine.FILE, self.run.events)

    @property
    def notes(self) -> RunNotes:
        """Returns the note and the tags that people wrote about the run."""
        return self._stored(NOTES, self.run.notes)

    @property
    def notes_written(self) -> str:
        """Returns a text that changes whenever the run's notes are written."""
        return str(self._written(NOTES))

    @property
    def recipe(self) -> dict[str, Any] | None:
        """Returns the band of the recipe that the run follows (`recipe_band`)."""
        return self._stored(RECIPE, lambda: recipe_band(self.run))

    @property
    def progress(self) -> dict[str, Any]:
        """Returns the record on how far the run is."""
        summary = self._stored(SUMMARY, self.run.summary)
        cause = failure(self.events)
        return progress(self.run, self.curves, self.settings, summary, cause)


class Viewer:
    """All runs that a page shows. `refresh` reads what is new; `start` does that in a thread until
    `close`, which must be called. `runs`: name -> run."""

    def __init__(self, words: Sequence[str]) -> None:
        """Opens the runs that `words` name (`open_runs`): run folders, the word `last`, or folders
        in which runs are and may begin; without words the newest run. Reads none of their figures
        yet, and starts no thread. ShoalError if a word names none of these, or if duckdb is
        missing."""
        runs = open_runs(words)
        self._folders: list[Path] = []  # the named folders in which runs may begin
        for word in words:
            if word == LAST:
                continue
            path = check_local(word, "runs", COPIES)
            if not is_run(path):
                self._folders.append(path)
        folders = [path.resolve() for path in self._folders]
        self.database = Database(folders + [run.root for run in runs])
        self.runs: dict[str, OpenRun] = {}
        self.notice = ""  # why some or all runs are not shown; '' if all are
        self._numbers = itertools.count()
        self._open(runs)
        self.searches = Searches()
        self._end, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._lint_lock = threading.Lock()
        self._notes_lock = threading.Lock()
        self._asked_last = self._looked_last = time.monotonic()

    @property
    def has_home(self) -> bool:
        """True if the page begins with the list of runs. False if it begins with a run: the only
        run, or one of at most MOST_COMPARED runs if all were named one by one."""
        most = 1 if self._folders else MOST_COMPARED
        return not 1 <= len(self.runs) <= most

    # ---- reading

    def _open(self, runs: Sequence[StoredRun]) -> None:
        """Adds runs to those that the page shows; if there are more than MAX_RUNS, only the newest
        stay. Sets `notice` to why some or all runs are not shown, "" if all are."""
        shown = [opened.run for opened in self.runs.values()]
        shown += runs
        self.notice = ""
        if not shown:
            folders = ", ".join(map(str, self._folders))
            self.notice = (
                f"{folders}: none of its folders is a run yet; runs that begin appear here"
            )
        if len(shown) > MAX_RUNS:
            self.notice = (
                f"{len(shown)} runs found: the newest {MAX_RUNS} are shown; name others to see them"
            )
            shown.sort(key=lambda run: -run.began)
        opened_runs = {}
        for run in shown[:MAX_RUNS]:
            opened = self.runs.get(run.name)
            if opened is None:
                opened = OpenRun(run, self.database, next(self._numbers))
            opened_runs[run.name] = opened
        # A run that is shown already keeps what was read of it.
        # The dict is replaced, not changed: a request may be iterating over the old one.
        self.runs = opened_runs

    def find_new_runs(self) -> None:
        """Opens the runs that have begun in the named folders since the last call. An error becomes
        the `notice` of the page. Does nothing if no folder was named, only runs."""
        self._looked_last = time.monotonic()
        try:
            if self._folders:
                known = [opened.run for opened in self.runs.values()]
                self._open(open_runs([address(path) for path in self._folders], known=known))
        except ShoalError as error:
            self.notice = str(error)

    def refresh(self, groups: bool = True, seconds: float = 0.3) -> bool:
        """Reads a piece of what each run has written since the last call: metrics and evaluations
        and, with `groups`, the groups of runs that somebody opened. Returns True if there is more
        to read. An error becomes a problem of its run."""
        more = False
        for opened in self.runs.values():
            try:
                more |= opened.read(seconds)
                if groups and opened.is_opened:
                    self.database.wait_for_user_queries()
                    more |= opened.index.refresh()
                    if not opened.index.waiting:
                        opened.all_read.set()
            # Any exception: the folder may be gone, and a hostile file may cause anything.
            except Exception as error:
                opened.run.add_problem("reading", f"{type(error).__name__}: {error}")
        return more

    def read_all(self) -> None:
        """Reads all runs with all their groups to the end, however long that takes."""
        for opened in self.runs.values():
            opened.open()
        more = True
        while more:
            more = self.refresh()

    def start(self) -> None:
        """Reads the beginnings of all curves, so that the first page has something to show, then
        starts the thread that reads on until `close`."""
        self.refresh(groups=False, seconds=min(0.3, START_SECONDS / max(1, len(self.runs))))
        self.answer("home", {})  # reads all settings
        self._thread = threading.Thread(target=self._watch, name="reading runs", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        """Runs in the thread until `close`: finds new runs and reads what is new, without a pause
        as long as there is more, and less often while no page asks."""
        while not self._end.is_set():
            if time.monotonic() - self._looked_last > LOOK_SECONDS:
                self.find_new_runs()
            more = self.refresh()
            pause = POLL_SECONDS
            if more:
                pause = 0.002
            elif time.monotonic() - self._asked_last > IDLE_AFTER:
                pause = IDLE_POLL_SECONDS
            self._wake.wait(pause)
            self._wake.clear()

    def close(self) -> None:
        """Ends the thread, if `start` began one, and waits for it up to 10 seconds. The database
        stays open."""
        self._end.set()
        self._wake.set()
        if self._thread:
            self._thread.join(10)

    # ---- answering

    def answer(self, view: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Answers a request of the page: returns the record of a view (a name in VIEWS). All but
        the first three views need the parameter `run`. May wait for groups (`_await_groups`), if
        `start` was called. ShoalError for an unknown view or run, or a bad parameter.

        >>> viewer.answer("curves", {"run": "first", "last": "100"})
        """
        if view not in VIEWS:
            raise ShoalError(f"there is no view {view[:40]!r}{did_you_mean(view, VIEWS) or ''}")
        query = Query(parameters)
        self._asked_last = time.monotonic()
        name = query.text("run")
        for asked in (name, query.text("other")):
            # Without a thread nothing reads groups meanwhile.
            if asked in self.runs and self._thread:
                self._await_groups(self.runs[asked], view)
        with self.database.user_query():
            if view in ("runs", "home", "compare"):
                return VIEWS[view](self, query)
            if name not in self.runs:
                raise ShoalError(
                    f"there is no run {name[:80]!r} here: {', '.join(list(self.runs)[:8])}"
                )
            return VIEWS[view](self.runs[name], query, self)

    def export(self, parameters: Mapping[str, str]) -> Iterator[str]:
        """Returns the pieces of a file of all completions that the parameters `filter` and `text`
        choose of a `run` (`exported`). `format`: csv or jsonl. ShoalError for an unknown run or
        format, or a bad filter."""
        query = Query(parameters)
        name = query.text("run")
        if name not in self.runs:
            raise ShoalError(f"there is no run {name[:80]!r} here")
        opened = self.runs[name]
        if self._thread:
            self._await_groups(opened, "completions")
        hits, _ = _searched(opened, query, self, seconds=math.inf)
        return exported(
            opened.index, query.text("filter", 2000), hits, query.text("format") or "csv"
        )

    def save_notes(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Writes a note and tags to a run's folder, and returns them as they are stored.

        request: `run`, the run's name; `notes` and `tags`; `before`, the `notes` and `tags` that
            the page showed when somebody began to edit them

        ShoalError for an unknown run or notes that are not allowed, and if the run is in a bucket,
        its folder cannot be written, its file of notes is damaged or a link that leads out of the
        run, or somebody else has changed the notes since."""
        name = str(request.get("run", ""))
        if name not in self.runs:
            raise ShoalError(f"there is no run {name[:80]!r} here")
        opened = self.runs[name]
        try:
            notes = RunNotes.parse(request)
            before = RunNotes.parse(request.get("before"))
        except ValueError as error:
            raise ShoalError(f"the note was not saved: {error}") from error
        if area_of(opened.run.path):
            raise ShoalError(
                f"the note was not saved: {name} is in a bucket, and this is a copy; write it to "
                f"{address(opened.run.path)}/{NOTES} yourself"
            )
        with self._notes_lock:
            stored = StoredRun(opened.run.path, lenient=True)
            stored_notes = stored.notes()
            # A damaged file, which somebody may have edited by hand, is not replaced.
            if stored.problems:
                raise ShoalError(f"the note was not saved: {', '.join(stored.problems.values())}")
            if stored_notes != before:
                raise ShoalError(
                    "the note was not saved: somebody has changed the note or the tags since you "
                    "began; copy your text, and reload the page"
                )
            try:
                write_notes(opened.run.root, notes)
            except ShoalError as error:
                why = reason(error.__cause__ or error)
                raise ShoalError(
                    f"the note was not saved: {opened.run.where} cannot be written ({why})"
                ) from error
            opened.run.problems.pop(NOTES, None)
        return notes.record()

    def _await_groups(self, opened: OpenRun, view: str) -> None:
        """Marks a run as opened, so that its groups are read. If that is new, or if the view is one
        of NEED_GROUPS, waits up to GROUP_SECONDS until all groups were read; the overview never
        waits."""
        is_new = not opened.is_opened
        opened.open()
        if is_new:
            self._wake.set()
        if view != "overview" and (is_new or view in NEED_GROUPS):
            opened.all_read.wait(GROUP_SECONDS)

    def text_lint(self, opened: OpenRun) -> TextLint:
        """Reads further texts of a run, for about a third of a second, and returns its `TextLint`
        with the counts so far. Starts a new one, with counts of 0, if there is none, or if the last
        has read all its files and more groups were indexed since."""
        with self._lint_lock:
            texts = opened.lint
            is_outdated = False
            if texts is not None and texts.num_read == texts.num_files:
                is_outdated = opened.lint_revision != opened.index.revision
            if texts is None or is_outdated:
                # Of a user's own task a prompt has to mention the tag first.
                has_tag = opened.settings.get("task.name") not in ("custom", ROWS)
                texts = opened.lint = TextLint(opened.index, has_tag)
                opened.lint_revision = opened.index.revision
        texts.read_on()
        return texts


class Query:
    """The parameters of a request, read by name as text, number or flag; ShoalError for a bad
    value."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def text(self, name: str, most: int = 4000) -> str:
        """Returns a parameter, without an error cut off after `most` characters; '' if it is
        missing."""
        return str(self._values.get(name, ""))[:most]

    def number(
        self, name: str, default: int | None = None, least: int = 0, most: int = MAX_NUMBER
    ) -> int:
        """Returns a parameter as an integer from `least` to `most`, both included; the default,
        which is not compared with them, if it is missing or empty. ShoalError if it is no integer,
        is out of range, or is missing without a default."""
        text = self.text(name, MAX_NUMBER_CHARS)
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
        """Returns a parameter as a float, also an infinite one; the default if it is missing, empty
        or NaN. ShoalError if it is no number."""
        try:
            value = float(self.text(name, MAX_NUMBER_CHARS) or default)
        except ValueError:
            raise ShoalError(f"{name}: expected a number") from None
        return default if math.isnan(value) else value

    def flag(self, name: str) -> bool:
        """True if a parameter is `1` or `true`."""
        return self.text(name) in ("1", "true")


def _runs(viewer: Viewer, query: Query) -> dict[str, Any]:
    """Returns the record that the page polls: for each run how far it is, and the revisions of its
    curves, groups and notes, which change when these are written; `notice`; and `home`, True if the
    page begins with the list of runs. The query is not read."""
    runs = []
    for name, opened in viewer.runs.items():
        runs.append(
            {
                "name": name,
                "path": str(opened.run.path),
                "progress": opened.progress,
                "problems": len(opened.run.problems),
                "revision": opened.curves.revision,
                "index": opened.index.revision,
                "waiting": opened.index.waiting,
                "measured": opened.index.is_measured,
                "discarded": opened.index.has_discarded,
                "notes_written": opened.notes_written,
            }
        )
    return {"notice": viewer.notice, "home": viewer.has_home, "runs": runs}


def _home(viewer: Viewer, query: Query) -> dict[str, Any]:
    """Returns the record of the list of runs: `rows`, the newest first, each with the run's notes
    and tags, and the settings that distinguish it from the others (`chips`: pairs of key and
    value). The query is not read."""
    runs = viewer.runs
    settings = [opened.settings for opened in runs.values()]
    decided = [opened.decided_keys for opened in runs.values()]
    started_in = [opened.started_in for opened in runs.values()]
    differing = shown_differences(settings, decided, started_in)
    distinguishing = distinguishing_settings(differing, len(runs))
    rows = []
    for (name, opened), own in zip(runs.items(), distinguishing, strict=True):
        row = {
            "name": name,
            "path": str(opened.run.path),
            "progress": opened.progress,
            "chips": own,
        }
        row |= opened.notes.record()
        rows.append(row | opened.home_row)
    rows.sort(key=lambda row: -row["began"])
    return {"rows": rows}


def _compare(viewer: Viewer, query: Query) -> dict[str, Any]:
    """Returns the record that compares the runs whose names the query's `runs` lists, with commas
    between (`comparison`). For two runs it has also their `first` difference
    (`groups.first_difference`); unknown names are left out."""
    names = [name for name in query.text("runs").split(",") if name in viewer.runs]
    runs = [viewer.runs[name] for name in names]
    settings = [opened.settings for opened in runs]
    decided = [opened.decided_keys for opened in runs]
    differing = shown_differences(settings, decided, [opened.started_in for opened in runs])
    record = comparison(differing)
    if len(runs) == 2:
        record["first"] = groups.first_difference(
            runs[0].curves, runs[1].curves, viewer.database, differing
        )
    return record


def _overview(opened: OpenRun, query: Query, viewer: Viewer) -> dict[str, Any]:
    """Returns the record of the Run view: verdict, table, topics of metrics, events, settings and
    more (`overview`), with `progress`, the band of its `recipe`, `notes` and `tags`, and the number
    of groups files that are `waiting` to be read. All but these are cached until something has
    changed."""
    progress = opened.progress
    events = opened.events
    recipe = opened.recipe
    notes = opened.notes
    paired = opened.paired
    revision = (
        opened.curves.revision,
        opened.index.revision,
        len(opened.evaluations.lines),
        len(events),
        len(opened.run.problems),
        progress["state"],
        paired,
    )

    def make() -> dict[str, Any]:
        """Returns the record from what was read so far."""
        return overview(
            opened.run,
            opened.curves,
            opened.evaluations,
            events,
            opened.index.weights,
            opened.settings,
            paired,
            opened.index.partial_functions(),
        )

    record = opened.kept("overview", revision, make)
    record |= {"progress": progress, "recipe": recipe, "waiting": opened.index.waiting}
    return record | notes.record()


def _curves(opened: OpenRun, query: Query, viewer: Viewer) -> dict[str, Any]:
    """Returns the curves of a run between the steps `first` and `last` of the query (by default
    all), thinned (`Curves.thinned`)."""
    first = query.real("first", -math.inf)
    last = query.real("last", math.inf)

    def make() -> dict[str, Any]:
        return opened.curves.thinned(first, last)

    return opened.kept("curves", (opened.curves.revision, first, last), make)


def _groups(opened: OpenRun, query: Query, viewer: Viewer) -> dict[str, Any]:
    """Returns the record of the Groups view: the rows that the query asks for (filter, order,
    offset and limit), their `total`, and, if a text is searched for, how far the search has come.
    Each request continues the search."""
    hits, state = _searched(opened, query, viewer)
    rows, total = opened.index.rows(
        query.text("filter", 2000),
        query.text("sort") or "step",
        query.flag("desc"),
        query.number("offset", 0),
        query.number("limit", 100, 1, 500),
        hits,
        query.text("prompts"),
    )
    return {
        "rows": rows,
        "total": total,
        "functions": opened.index.functions,
        "blank": _blank(opened, COLUMNS),
        "waiting": opened.index.waiting,
        "search": state,
    }


def _blank(opened: OpenRun, columns: Mapping[str, str]) -> list[str]:
    """Returns the columns that say nothing of the run (`GroupTable.blank_columns`), which the page
    leaves out."""

    def make() -> list[str]:
        return opened.index.blank_columns(columns)

    name = f"blank columns of {len(columns)}"
    return opened.kept(name, opened.index.revision, make)


def _searched(
    opened: OpenRun, query: Query, viewer: Viewer, seconds: float = SEARCH_SECONDS
) -> tuple[str, dict[str, Any] | None]:
    """Continues the search for the query's `text`, for so many seconds, and returns (the table of
    what was found, how far it has come); ("", None) without a text."""
    text = query.text("text", MAX_TEXT)
    if not text:
        return "", None
    search = viewer.searches.get(opened.index, text)
    return search.table, search.read_on(seconds)


def _completions(opened: OpenRun, query: Query, viewer: Viewer) -> dict[str, Any]:
    """Returns the record of the Completions view: as that of the Groups view, each row a completion
    with the beginning of its `text` (`with_texts`); `left_out`: how many completions the
    table has no place for."""
    hits, state = _searched(opened, query, viewer)
    rows, total = opened.index.completion_rows(
        query.text("filter", 2000),
        query.text("sort") or "step",
        query.flag("desc"),
        query.number("offset", 0),
        query.number("limit", 50, 1, MAX_COMPLETION_ROWS),
        hits,
    )
    return {
        "rows": with_texts(opened.index, rows),
        "total": total,
        "functions": opened.index.functions,
        "blank": _blank(opened, COMPLETION_COLUMNS),
        "waiting": opened.index.waiting,
        "left_out": opened.index.num_left_out,
        "search": state,
    }


def _group(opened: OpenRun, query: Query, viewer: Viewer) -> dict[str, Any]:
    """Returns the record of one group, with its prompt, completions, rewards and neighbours
    (`group_detail`), and the `path` of its run. The query names the group by `file` and `group`;
    ShoalError if there is no such group."""
    detail = groups.group_detail(
        opened.index, query.text("file"), query.number("group"), opened.pieces.text
    )
    return detail | {"path": str(opened.run.path)}


def _prompt(opened: OpenRun, query: Query, viewer: Viewer) -> dict[str, Any]:
    """Returns the record of a prompt with all of its groups (`prompt_detail`), which the query
    names by `set` and `row`."""
    return groups.prompt_detail(opened.index, query.text("set"), query.number("row"))


def _shared(opened: OpenRun, query: Query, viewer: Viewer) -> dict[str, Any]:
    """Returns the record of the questions that this run and the `other` of the query were both
    asked (`shared_questions`); ShoalError if there is no such run."""
    other = query.text("other")
    if other not in viewer.runs:
        raise ShoalError(f"there is no run {other[:80]!r} here")
    return groups.shared_questions(opened.index, viewer.runs[other].index)


def _tokens(opened: OpenRun, query: Query, viewer: Viewer) -> dict[str, Any]:
    """Returns the record of one completion with everything stored by token (`token_detail`). The
    query names it by `file`, `group` and `completion` (0 if it is missing); ShoalError if there is
    no such completion."""
    return groups.token_detail(
        index=opened.index,
        stem=query.text("file"),
        number=query.number("group"),
        completion=query.number("completion", 0),
        pieces=opened.pieces,
        settings=opened.settings,
    )


def _lint(opened: OpenRun, query: Query, viewer: Viewer) -> dict[str, Any]:
    """Returns the record of the Lint view: all `findings`, and how far the reading of texts has
    come (`lint`), with the number of groups files that are `waiting` to be indexed. Each request
    reads further texts, until `done`."""
    has_critic = opened.settings.get("algorithm.advantage") == "gae"

    def make() -> list[dict[str, Any]]:
        return number_findings(opened.index, has_critic)

    numbers = opened.kept("lint", opened.index.revision, make)
    record = lint(opened.index, numbers, viewer.text_lint(opened))
    return record | {"waiting": opened.index.waiting}


VIEWS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "runs": _runs,
    "home": _home,
    "compare": _compare,
    "overview": _overview,
    "curves": _curves,
    "groups": _groups,
    "completions": _completions,
    "group": _group,
    "prompt": _prompt,
    "shared": _shared,
    "tokens": _tokens,
    "lint": _lint,
}
"""Name of a view -> the function that makes its record. The first three get the viewer and the
query, the others a run, the query and the viewer."""
