"""A run's results for Python programs: summary, metrics as a table, evaluations, groups, paths, a
plot."""

from __future__ import annotations

import html
import subprocess
import sys
import tempfile
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.files import explain_write_errors
from shoal.records import ShoalError
from shoal.runs.groups import DISCARDED, StoredGroup
from shoal.runs.layout import find_run
from shoal.runs.lines import Summary
from shoal.runs.reader import StoredRun, read_config
from shoal.text import count, duration, figure_text, nearest, text_table


class Table:
    """A table of rows with the same columns; a missing value is None.

    >>> result.metrics["reward/mean"]
    [0.31, 0.4]
    >>> result.metrics.rows[0]["step"]
    1
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Copies the rows (column -> value). The columns are those of all rows, in the order of
        their first appearance."""
        self.rows: list[dict[str, Any]] = [dict(row) for row in rows]
        names: dict[str, None] = {}  # names in order of appearance, each once
        for row in self.rows:
            names.update(dict.fromkeys(row))
        self.columns: dict[str, list[Any]] = {}
        """Name -> values, one a row, as pandas and polars take them."""
        for name in names:
            self.columns[name] = [row.get(name) for row in self.rows]

    def __getitem__(self, name: str) -> list[Any]:
        """Returns the values of a column, one a row; None where a row lacks it. It is not copied.
        ShoalError, with the nearest name, if there is no such column."""
        if name not in self.columns:
            hint = ": the table is empty"
            if self.columns:
                hint = f"; did you mean {nearest(str(name), self.columns)!r}?"
            raise ShoalError(f"there is no column {name!r}{hint}")
        return self.columns[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the values of a column, one a row; `default` if there is no such column."""
        return self.columns.get(name, default)

    def keys(self) -> KeysView[str]:
        """Returns the names of the columns; with it `dict(table)` is name -> values."""
        return self.columns.keys()

    def items(self) -> ItemsView[str, list[Any]]:
        """Returns the columns as (name, values) pairs."""
        return self.columns.items()

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def to_pandas(self) -> Any:
        """Returns the table as a pandas DataFrame. ShoalError if pandas is not installed."""
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ShoalError(
                "pandas is not installed: `pip install pandas`, or use .columns in another library"
            ) from error
        return pandas.DataFrame(self.columns)

    def __repr__(self) -> str:
        """Returns a text table of the usual columns (_SHOWN), or of the first 8 if it has none of
        them, with the first and last _SHOWN_ROWS rows, or all if there are no more; and a line that
        names all columns."""
        names = [name for name in _SHOWN if name in self.columns]
        if not names:
            names = list(self.columns)[:8]
        rows = []
        for row in self.rows:
            cells = []
            for name in names:
                value = row.get(name)
                cells.append("" if value is None else figure_text(name, value))
            rows.append(cells)
        if len(rows) > 2 * _SHOWN_ROWS:
            rows[_SHOWN_ROWS:-_SHOWN_ROWS] = [["..."] * len(names)]
        lines = []
        if rows:
            lines += text_table(names, rows)
        columns = ", ".join(self.columns) or "no columns"
        lines.append(f"Table of {count(len(self), 'row')}: {columns}")
        return "\n".join(lines)


_SHOWN = (
    "step",
    "reward/mean",
    "groups/nonzero_std",
    "entropy",
    "kl",
    "completions/length_mean",
    "completions/truncated",
    "grad_norm",
    "time/step_seconds",
)
_SHOWN_ROWS = 10  # at either end


class Result(Mapping[str, Any]):
    """A run read from its folder. As a mapping it is the run's summary, empty until the run has
    finished. Metrics, evaluations and summary are read once and do not change when the run goes on;
    groups are read at each call.

    >>> result = shoal.train(task=rows, reward=f)
    >>> result["accuracy_after"], result.metrics["reward/mean"], result.evaluations[-1]["accuracy"]
    """

    def __init__(self, folder: Path, summary: Summary | None = None) -> None:
        """Reads metrics and evaluations of a run's folder. `summary`: its summary; None reads that
        from the folder, too. ShoalError if a file is damaged."""
        self.folder = Path(folder)
        self.config_path = self.folder / "config.yaml"
        self.metrics_path = self.folder / "metrics.jsonl"
        self.evaluations_path = self.folder / "evaluations.jsonl"
        self.groups_path = self.folder / "groups"
        self.checkpoints_path = self.folder / "checkpoints"
        self.summary_path = self.folder / "summary.json"
        self._run = StoredRun(self.folder)
        self._summary = self._run.summary() if summary is None else summary
        self.summary: dict[str, Any] = {}
        """The content of summary.json; empty until the run has finished."""
        if self._summary is not None:
            self.summary = self._summary.record()
        self.metrics = Table([line.record() for line in self._run.steps()])
        """A row a step."""
        self._evaluations = self._run.evaluations()
        self.evaluations: list[dict[str, Any]] = [line.record() for line in self._evaluations.lines]
        """An entry for each evaluation and data set: `step`, `name` and the figures."""

    @property
    def finished(self) -> bool:
        """True if the run came to its end, after all its steps or because a callback stopped it,
        and has written its summary."""
        return self._summary is not None

    @property
    def steps(self) -> list[int]:
        """The steps whose groups were written."""
        return list(self._run.group_files())

    def groups(self, step: int, discarded: bool = False) -> list[StoredGroup]:
        """Returns the groups that a training step (from 1) trained on, each with `.group` (prompt,
        texts, rewards) and `.advantages`; with `discarded` those that dynamic sampling discarded,
        which have no advantages ([] if there are none). Reads the file at each call. ShoalError if
        the step has no groups, or if the file is damaged."""
        if not discarded:
            return self._run.groups(step)
        if step in self._run.group_files(DISCARDED):
            return self._run.groups(step, DISCARDED)
        self._run.groups(step)  # called for its error alone
        return []

    @property
    def notes(self) -> str:
        """The note on the run, from the key `notes` or the page of `shoal view`; "" if there is
        none. Read at each call, like `tags`; ShoalError if the file is damaged."""
        return self._run.notes().notes

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that people gave the run, or ()."""
        return self._run.notes().tags

    @property
    def before(self) -> dict[str, Mapping[str, Any]]:
        """Data set -> figures of the evaluation before the first step; {} if there is none."""
        return dict(self._evaluations.before_after(self._summary)[0])

    @property
    def after(self) -> dict[str, Mapping[str, Any]]:
        """Data set -> figures after the last step; for an unfinished run those of its newest
        evaluation after a step, {} if it has none."""
        return dict(self._evaluations.before_after(self._summary)[1])

    # ---- the summary

    def __getitem__(self, key: str) -> Any:
        """Returns a value of the summary. ShoalError if the run has not finished, KeyError if the
        summary has no such key."""
        if not self.finished:
            raise ShoalError(
                f"{self.folder} has no summary: the run has not finished (.metrics and "
                ".evaluations hold its steps so far); resume it with shoal.train(resume=FOLDER)"
            )
        return self.summary[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.summary)

    def __len__(self) -> int:
        return len(self.summary)

    def __bool__(self) -> bool:
        return True

    # ---- for reading

    def __repr__(self) -> str:
        """Returns lines with the run's folder, how far it is, and the table before and after
        training, which is left out if there is no evaluation."""
        rows = self._run.before_after(self._evaluations, self._summary)
        steps = count(len(self.metrics), "step")
        if self._summary is not None and self._summary.stopped_by:
            steps += f" of {self._summary.steps}"
        if self._summary is not None:
            head = f"{steps} in {duration(self._summary.seconds_total)}"
            if self._summary.stopped_by:
                head += f", stopped by {self._summary.stopped_by}"
        else:
            head = f"not finished, {steps} done"
        lines = [f"Run in {self.folder}: {head}"]
        if rows:
            lines += text_table(("", "before", "after", "change"), rows)
        return "\n".join(lines)

    def view(self, groups: Sequence[str] = (), height: int = 800) -> Page:
        """Returns the page of `shoal view` on this run, which a notebook shows inline;
        `.save(path)` writes it to a file.

        The page contains the curves so far and some groups: the newest step's, or `groups`, such as
        `["12", "40:0-7"]` (all of step 12, and groups 0 to 7 of step 40). `height`: of the frame in
        a notebook, in pixels. ShoalError if the extra `view` is not installed, or if the run has no
        such groups."""
        return Page(make_page(self.folder, groups), self.folder, height)

    def plot(self) -> Any:
        """Returns a matplotlib figure of reward, accuracy (mean reward if the task defines none),
        entropy and KL, and length. It is neither shown nor written; a panel whose figures the run
        lacks is empty.

        ShoalError if matplotlib is not installed, or if there is no step and no evaluation yet."""
        try:
            from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ShoalError(
                "matplotlib is not installed: `pip install '.[plot]'` in the clone of Shoal, or "
                "plot .metrics.columns with what you have"
            ) from error
        if not len(self.metrics) and not self.evaluations:
            raise ShoalError(
                f"{self.folder} holds no step and no evaluation yet: there is nothing to plot"
            )
        has_accuracy = not self.evaluations or any("accuracy" in row for row in self.evaluations)
        evaluated: dict[str, list[dict[str, Any]]] = {}  # rows of the evaluations, by data set
        for row in self.evaluations:
            evaluated.setdefault(row["name"], []).append(row)
        if has_accuracy:
            score, score_title = "accuracy", "accuracy"
        else:
            score, score_title = "mean_reward", "mean reward of the answers"
        steps = self.metrics.rows
        figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained")
        rewards, scores, policy, lengths = axes.flat
        _draw(rewards, steps, "reward/mean", "reward/mean")
        for name, rows in evaluated.items():
            _draw_interval(scores, rows)
            _draw(scores, rows, score, name)
        for name in ("entropy", "kl"):
            _draw(policy, steps, name, name)
        for name in ("completions/length_mean", "completions/length_max"):
            _draw(lengths, steps, name, name)
        titles = ("reward", score_title, "entropy and KL, nats", "length, tokens")
        for axis, title in zip(axes.flat, titles, strict=True):
            axis.set(title=title, xlabel="step")
            axis.grid(alpha=0.3)
            if len(axis.lines) > 1 or axis is scores:
                axis.legend()
        # closed, because a notebook would otherwise show the returned figure twice
        pyplot.close(figure)  # the figure stays usable
        return figure


def _draw(axis: Any, rows: Sequence[Mapping[str, Any]], column: str, label: str) -> None:
    """Draws a column of the rows over their steps, as a line named `label`, with a mark at each
    point if there are fewer than _FEW_POINTS. Rows without a value are left out; draws nothing if
    no row has the column."""
    known = [row for row in rows if row.get(column) is not None]
    if not known:
        return
    steps = [row["step"] for row in known]
    values = [row[column] for row in known]
    marker = "o" if len(known) < _FEW_POINTS else ""
    axis.plot(steps, values, label=label, marker=marker, markersize=3)


def _draw_interval(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws the 95% intervals of the accuracy as a band over the steps; rows (of evaluations)
    without one are left out, and nothing is drawn if none has one."""
    known = [row for row in rows if row.get("accuracy_interval")]
    if not known:
        return
    steps = [row["step"] for row in known]
    low = [row["accuracy_interval"][0] for row in known]
    high = [row["accuracy_interval"][1] for row in known]
    axis.fill_between(steps, low, high, alpha=0.15)


_FEW_POINTS = 30


@dataclass(frozen=True)
class Page:
    """A page as one HTML file that needs no network: `html` is its text, `folder` the run's folder,
    `height` that of its frame in a notebook, in pixels. Nothing is written until `save`."""

    html: str
    folder: Path
    height: int = 800

    def save(self, path: str | Path) -> Path:
        """Writes the page to a file, which any browser opens, and returns its path; replaces an
        existing file. ShoalError if it cannot be written."""
        path = Path(path)
        with explain_write_errors(path):
            path.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """Returns the page in a frame, for notebooks."""
        # A sandboxed frame, so that what a model wrote cannot reach anything of the notebook.
        return (
            f'<iframe sandbox="allow-scripts" title="Shoal: {html.escape(self.folder.name)}" '
            f'width="100%" '
            f'height="{self.height}" frameborder="0" srcdoc="{html.escape(self.html)}"></iframe>'
        )

    def __repr__(self) -> str:
        return (
            f"Page on {self.folder}, {len(self.html) / 1e6:.1f} MB: .save(PATH) writes it to a file"
        )


def make_page(folder: Path, groups: Sequence[str]) -> str:
    """Returns the text of the HTML page that `shoal view` writes for a run; `groups` as in
    `Result.view`. Runs `shoal view` in another process, since a run may be of any size. ShoalError,
    with the last line that it printed to stderr, if that fails. Leaves no file behind."""
    with tempfile.TemporaryDirectory() as temporary:
        to = Path(temporary) / "page.html"
        command = [sys.executable, "-m", "shoal", "view", str(folder), f"to={to}"]
        if groups:
            command.append(f"groups=[{','.join(groups)}]")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not to.is_file():
            lines = done.stderr.strip().splitlines() or ["it ended without a message"]
            raise ShoalError(lines[-1].removeprefix("error: "))
        return to.read_text(encoding="utf-8")


def load_run(folder: Any, base_output_directory: str = "outputs") -> Result:
    """Reads a run's folder, or the run that was started last under a base directory if `folder` is
    `last`, and returns its results. The run may be finished, running or stopped. ShoalError if the
    folder is not a run's, or if a file is damaged."""
    path = find_run(str(folder), base_output_directory)
    read_config(path)  # called for its error alone: raises if the folder is not a run's
    return Result(path)
