"""`shoal train --multirun`: makes a run for each combination of values, one after the other, each
in its own process.

optimizer.lr=1e-4,1e-5 seed=range(3) 6 runs; a list [a,b] and text in quotes are one value

multirun/YYYY-MM-DD/HH-MM-SS/0 1 2 ...   the run folders; with run_name:
                                         <base_output_directory>/<run_name>/0 1 2
.../multirun.json                        the swept values and the result of each run
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.buckets import RUNS, address, area_of, fetch_into, send
from shoal.config.arguments import is_file_argument, is_file_option, join_values, read_argument
from shoal.config.commands import dataclass_of
from shoal.config.derived import step_sizes
from shoal.config.merge import compose
from shoal.config.stored import difference_from_defaults
from shoal.config.train import FOLDER_KEYS, Config
from shoal.files import check_local, read_json
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.runs.layout import named_folder, with_last_runs
from shoal.runs.lines import json_ready, write_atomically
from shoal.runs.reader import read_summary
from shoal.text import count, figure_text

MULTIRUN_FOLDER = "multirun"
"""The folder in which sweeps are created if neither run_name nor base_output_directory is given."""

SUMMARY = "multirun.json"
INTERRUPTED = (130, -2)
"""Exit codes of a process ended by Ctrl-C: Shoal's own, and the signal's."""


@dataclass
class SweptRun:
    """One combination of the swept values, and its result."""

    number: int
    values: dict[str, str]  # the swept values by dotted key, or by another system's flag
    words: list[str]  # the command line, without the keys of the run's folder
    folder: Path
    exit_code: int | None = None  # None until it has run
    figures: dict[str, Any] = field(default_factory=dict)  # accuracy before and after, seconds

    @property
    def assignments(self) -> str:
        """Returns the swept values: `optimizer.lr=1e-4 seed=2`."""
        return " ".join(f"{name}={text}" for name, text in self.values.items())

    @property
    def state(self) -> str:
        """Returns the run's state in words: `not run`, `interrupted`, `done`, or `failed (1)` with
        the exit code, which is negative for a signal."""
        if self.exit_code is None:
            return "not run"
        if self.exit_code in INTERRUPTED:
            return "interrupted"
        return "done" if self.exit_code == 0 else f"failed ({self.exit_code})"


def multirun(
    command: str, words: Sequence[str], console: Console, dry_run: bool = False
) -> dict[str, Any]:
    """Runs every combination of the swept values, one after the other, prints a table of their
    results, and returns the content of multirun.json (`_record`). `command`: the subcommand, such
    as `train`; `words`: its command line.

    All combinations are validated before the first one starts. If run_name names the folder of an
    earlier sweep with the same values, that sweep is continued: each run resumes in its own folder.
    A failed run does not stop the others, Ctrl-C does (it raises KeyboardInterrupt). A dry run
    prints the runs, starts none, does not write multirun.json, and returns the same content with
    every state `not run`. ShoalError for `resume=`, for keys or values that are wrong in any
    combination, and if the folder holds a single run or another sweep. Runs are numbered from 0."""
    combinations = list(combine(dataclass_of(command), words))
    configs = []
    for _, line in combinations:
        config, resolved = compose(command, line)
        named, resolved = with_last_runs(config, resolved)
        if named != config:
            raise ShoalError(
                f"{resolved.notes[0]}; each run of a sweep becomes that when it starts, so give "
                "the path"
            )
        configs.append(config)
    if configs[0].resume:
        raise ShoalError(
            f"resume={configs[0].resume}: a sweep is resumed by giving the same run_name and "
            "base_output_directory"
        )
    root = root_of(configs[0])
    runs = []
    for run_number, (values, line) in enumerate(combinations):
        runs.append(SweptRun(run_number, values, line, root / str(run_number)))
    if area_of(root):  # a bucket may hold this sweep already
        fetch_into(root / SUMMARY, may_be_empty=True)
    check_same_sweep(root, runs)
    console.note(cost_text(configs))
    if dry_run:
        for run in runs:
            console.note(f"{address(run.folder)}: {run.assignments or 'nothing swept'}")
        return _record(root, runs)
    interrupted = _run_all(command, root, runs, console)
    console.heading("runs")
    head, rows = _table(runs)
    console.table(head, rows)
    console.note(f"written to {address(root / SUMMARY)}")
    if interrupted:
        raise KeyboardInterrupt(
            f"interrupted; the same command with base_output_directory={address(root.parent)} "
            f"run_name={root.name} resumes it"
        )
    return _record(root, runs)


# ---- combinations


def combine(config_type: type, words: Sequence[str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yields (swept values, command line) for every combination of the swept values in `words`, the
    last swept key varying fastest; a single one, with {}, if nothing is swept. The values are name
    -> text; the command line has every word, each swept one with its single value. A value in
    quotes loses them. Words without `=`, and those that name a file, pass unchanged. ShoalError,
    raised when the first combination is asked for: for a key of the run's folder that is swept, and
    for a swept key that is given twice, even if only one of the two is swept.

    >>> list(combine(Config, ["optimizer.lr=1e-4,1e-5", "steps=3"]))
    [({'optimizer.lr': '1e-4'}, ['optimizer.lr=1e-4', 'steps=3']),
     ({'optimizer.lr': '1e-5'}, [...])]
    """
    line = join_values(config_type, words)
    choices: dict[str, list[str]] = {}  # name -> its swept texts
    positions: dict[str, int] = {}  # name -> the position of its word on the line
    for position, word in enumerate(line):
        if "=" not in word or is_file_option(word) or is_file_argument(word):
            continue
        name, text = read_argument(config_type, word)
        texts = sweep_texts(text)
        if name in choices or (name in positions and len(texts) > 1):
            raise ShoalError(f"{name} is given more than once, and swept: write it once")
        positions[name] = position
        if len(texts) > 1:
            if name in FOLDER_KEYS:
                raise ShoalError(
                    f"{name}={text}: this key cannot be swept, the runs of a sweep get folders by "
                    "number; put quotes around a value that contains commas"
                )
            choices[name] = texts
        elif texts != [text]:  # quotes were removed
            line[position] = f"{name}={texts[0]}"
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        combined = list(line)
        for name, text in chosen.items():
            combined[positions[name]] = f"{name}={text}"
        yield chosen, combined


_ITEM = re.compile(r"""(?:\[[^]]*\]|\([^)]*\)|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""")
"""Matches what is between two commas; commas in brackets or quotes do not count."""

# Matches range(stop), range(start,stop) or range(start,stop,step), without a step of 0.
_RANGE = re.compile(r"range\((-?\d+)(?:,(-?\d+))?(?:,(-?[1-9]\d*))?\)")


def sweep_texts(text: str) -> list[str]:
    """Returns the texts that a value sweeps over; a list of one if the value is not swept. Commas
    in brackets or quotes do not separate. Quotes around one of several texts, or around the whole
    value, are removed. `range(...)` counts like Python's: the stop is not included. ShoalError for
    a range that holds no number.

    >>> sweep_texts("1e-4,1e-5"), sweep_texts("[a,b]"), sweep_texts("range(1,4)")
    (['1e-4', '1e-5'], ['[a,b]'], ['1', '2', '3'])
    """
    match = _RANGE.fullmatch(text.replace(" ", ""))
    if match:
        first, stop, step = match.groups()
        if stop is None:
            numbers = range(int(first))  # the only number is the stop
        else:
            numbers = range(int(first), int(stop), int(step or 1))
        if not numbers:
            raise ShoalError(
                f"{text}: there is no number in this range; write range(stop) or "
                "range(start,stop,step)"
            )
        return [str(number) for number in numbers]
    items = [item.strip() for item in _ITEM.findall(text)]
    if len(items) < 2 and text[:1] not in ("'", '"'):
        return [text]  # unchanged, with spaces around it
    texts = []
    for item in items:
        is_quoted = len(item) > 1 and item[0] == item[-1] and item[0] in "'\""
        texts.append(item[1:-1] if is_quoted else item)
    return texts


# ---- before the first run


def root_of(config: Config, now: datetime | None = None) -> Path:
    """Returns the folder of a sweep, in which each run gets a folder by its number: the one that
    run_name and base_output_directory name, else a new one named after the time `now`. The new one
    is in MULTIRUN_FOLDER if base_output_directory is not set. `now`: None for the present time.
    Makes no folder. ShoalError for a run_name or base_output_directory that cannot name one."""
    base = config.base_output_directory
    if config.run_name:
        return named_folder(base, config.run_name)
    if "base_output_directory" not in difference_from_defaults(config):
        base = MULTIRUN_FOLDER
    begun = now or datetime.now()
    return check_local(base, "base_output_directory", RUNS) / begun.strftime("%Y-%m-%d/%H-%M-%S")


def check_same_sweep(root: Path, runs: Sequence[SweptRun]) -> None:
    """Raises ShoalError if the folder `root` itself is that of a run, or if its multirun.json has
    other values for one of these runs' numbers: a run that is resumed must keep its values. A
    number that multirun.json does not list is accepted, and so is a folder without one."""
    if (root / "config.yaml").is_file():
        raise ShoalError(f"{root} is the folder of a run, not of a sweep: choose another run_name")
    if not (root / SUMMARY).is_file():
        return
    known = {}
    for record in read_json(root / SUMMARY).get("runs", ()):
        known[record["number"]] = record["values"]
    for run in runs:
        if known.get(run.number, run.values) != run.values:  # the same values if it is not known
            raise ShoalError(
                f"{root} holds another sweep: its run {run.number} is {known[run.number]}, not "
                f"{run.values}; choose another run_name"
            )


def cost_text(configs: Sequence[Config]) -> str:
    """Returns the size of a sweep in words: `6 runs, one after the other: 480 steps, 122,880
    completions to train on, and their evaluations`. Completions of runs whose step grows with the
    number of devices are counted apart: `... 480 completions on each device (2 runs) ...`."""
    num_steps = sum(config.steps for config in configs)
    fixed: list[Config] = []  # configurations with a fixed number of prompts a step
    by_device: list[Config] = []  # configurations whose step grows with the number of devices
    for config in configs:
        if config.batch.prompts_per_device:
            by_device.append(config)
        else:
            fixed.append(config)
    texts = []
    for configs_of_unit, unit in ((fixed, ""), (by_device, " on each device")):
        if not configs_of_unit:
            continue
        num_completions = 0
        for config in configs_of_unit:
            completions_of_step, _ = step_sizes(config)
            num_completions += config.steps * completions_of_step
        text = f"{count(num_completions, 'completion')}{unit}"
        if len(configs_of_unit) < len(configs):
            text += f" ({count(len(configs_of_unit), 'run')})"
        texts.append(text)
    return (
        f"{count(len(configs), 'run')}, one after the other: {count(num_steps, 'step')}, "
        f"{' and '.join(texts)} to train on, and their evaluations"
    )


# ---- running


def _run_all(command: str, root: Path, runs: Sequence[SweptRun], console: Console) -> bool:
    """Runs each combination in its own process, in order, and writes its exit code and figures into
    its `SweptRun` and, after each run, into multirun.json; that file is also written before the
    first run. Returns True if the user interrupted a run; the runs after it are not started. A run
    that fails is warned of, and the next one starts. `command`: the subcommand, such as `train`."""
    _write_record(root, runs)
    for run in runs:
        console.heading(
            f"run {run.number + 1} of {len(runs)}: {run.assignments} {address(run.folder)}"
        )
        words = [command]
        words += run.words
        words += [f"base_output_directory={address(root)}", f"run_name={run.number}"]
        run.exit_code, interrupted = run_process(words)
        run.figures = _read_figures(run.folder)
        _write_record(root, runs)
        if interrupted:
            return True
        if run.exit_code:
            console.warning(f"run {run.number} failed with exit code {run.exit_code}")
    return False


def run_process(words: Sequence[str]) -> tuple[int, bool]:
    """Runs `shoal` with these words in a new process and waits for it. Returns (its exit code, True
    if the user interrupted it).

    The terminal sends Ctrl-C to both processes. The new one saves and ends; this one only notes the
    signal until then, and raises no KeyboardInterrupt. The exit code is negative if a signal ended
    the process. Only the main thread may call this function, because it sets a signal's
    handler."""
    interrupts: list[int] = []

    def note_interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)

    before = signal.signal(signal.SIGINT, note_interrupt)
    try:
        code = subprocess.call([sys.executable, "-m", "shoal", *words])
    finally:
        signal.signal(signal.SIGINT, before)
    return code, bool(interrupts) or code in INTERRUPTED


def _read_figures(folder: Path) -> dict[str, Any]:
    """Returns three figures of a run's summary.json: `accuracy_before`, `accuracy_after` (or
    `mean_reward_before` and `mean_reward_after` if the summary has no accuracy after training) and
    `seconds_total`. {} if there is no summary. A figure that the summary lacks is None."""
    summary = read_summary(folder)
    if summary is None:
        return {}
    figure = "accuracy"
    if summary.accuracy_after is None:
        figure = "mean_reward"
    names = (f"{figure}_before", f"{figure}_after", "seconds_total")
    return {name: getattr(summary, name) for name in names}


# ---- results


def _record(root: Path, runs: Sequence[SweptRun]) -> dict[str, Any]:
    """Returns the content of multirun.json: `folder`; `keys`, the names of the swept values;
    `num_failed`, without interrupted runs and those not run; `runs`, for each run its number,
    `number`, `values`, `folder`, `state`, `exit_code` (None if it has not run), and its figures
    under their own names. `runs` must not be empty. Writes nothing."""
    records = []
    for run in runs:
        records.append(
            {
                "number": run.number,
                "values": run.values,
                "folder": address(run.folder),
                "state": run.state,
                "exit_code": run.exit_code,
                **run.figures,
            }
        )
    return {
        "folder": address(root),
        "keys": list(runs[0].values),
        "num_failed": sum(run.state.startswith("failed") for run in runs),
        "runs": records,
    }


def _write_record(root: Path, runs: Sequence[SweptRun]) -> None:
    """Writes multirun.json into the sweep's folder `root`, completely or not at all, and copies it
    to the bucket if the folder is in one. Replaces an earlier one."""
    text = json.dumps(json_ready(_record(root, runs)), indent=2, allow_nan=False)
    write_atomically(root / SUMMARY, [text])
    send(root / SUMMARY)


def _table(runs: Sequence[SweptRun]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns (head, rows) of the table that is printed at the end: a row for each run with its
    number, its swept values, its state, its accuracy (or mean reward) before and after, its time
    and its folder. A figure that is unknown is an empty text. `runs` must not be empty."""
    rows = []
    for run in runs:
        texts = {}
        for name, value in run.figures.items():
            texts[name] = "" if value is None else figure_text(name, value)
        before = texts.get("accuracy_before", texts.get("mean_reward_before", ""))
        after = texts.get("accuracy_after", texts.get("mean_reward_after", ""))
        seconds = texts.get("seconds_total", "")
        values = tuple(run.values.values())
        rows.append((str(run.number), *values, run.state, before, after, seconds, str(run.folder)))
    names = tuple(runs[0].values)
    return ("run", *names, "state", "before", "after", "time", "folder"), rows
