"""`shoal train --multirun`: a run for each combination of values, one after the other, each in its
own process.

optimizer.lr=1e-4,1e-5 seed=range(3)     6 runs; a list [a,b] and text in quotes are one value

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
from shoal.config.commands import dataclass_of
from shoal.config.derived import step_sizes
from shoal.config.merge import compose
from shoal.config.stored import difference_from_defaults
from shoal.config.train import FOLDER_KEYS, Config
from shoal.config.words import is_file_option, is_file_word, joined, read_word
from shoal.files import check_local, read_json
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.runs.layout import named_folder
from shoal.runs.lines import json_ready, write_atomically
from shoal.runs.reader import read_summary
from shoal.text import count, figure_text

MULTIRUN_FOLDER = "multirun"
"""The folder of sweeps without run_name and base_output_directory."""

SUMMARY = "multirun.json"
INTERRUPTED = (130, -2)
"""Exit codes of a process ended by Ctrl-C: its own, and the signal's."""


@dataclass
class SweptRun:
    """One combination of the swept values, and its result."""

    number: int
    values: dict[str, str]  # by dotted key, or another system's flag
    words: list[str]  # without its folder
    folder: Path
    exit_code: int | None = None  # None until it has run
    figures: dict[str, Any] = field(default_factory=dict)  # accuracy before and after, seconds

    @property
    def assignments(self) -> str:
        """`optimizer.lr=1e-4 seed=2`"""
        return " ".join(f"{name}={text}" for name, text in self.values.items())

    @property
    def state(self) -> str:
        if self.exit_code is None:
            return "not run"
        if self.exit_code in INTERRUPTED:
            return "interrupted"
        return "done" if self.exit_code == 0 else f"failed ({self.exit_code})"


def multirun(
    command: str, words: Sequence[str], console: Console, dry_run: bool = False
) -> dict[str, Any]:
    """Runs every combination and returns the content of multirun.json; a dry run prints the runs.

    All combinations are validated before the first one starts. A failed run does not stop the
    others, Ctrl-C does."""
    combinations = list(combine(dataclass_of(command), words))
    configs = [compose(command, each)[0] for _, each in combinations]
    if configs[0].resume:
        raise ShoalError(
            f"resume={configs[0].resume}: a sweep is resumed by giving the same run_name and "
            "base_output_directory"
        )
    root = root_of(configs[0])
    if area_of(root):
        fetch_into(root / SUMMARY, may_be_empty=True)
    runs = [
        SweptRun(number, values, each, root / str(number))
        for number, (values, each) in enumerate(combinations)
    ]
    check_same_sweep(root, runs)
    console.note(cost_text(configs))
    if dry_run:
        for run in runs:
            console.note(f"{address(run.folder)}: {run.assignments or 'nothing swept'}")
        return _record(root, runs)
    _write_record(root, runs)
    interrupted = False
    for run in runs:
        console.heading(
            f"run {run.number + 1} of {len(runs)}: {run.assignments} {address(run.folder)}"
        )
        folder = [f"base_output_directory={address(root)}", f"run_name={run.number}"]
        run.exit_code, interrupted = run_process([command, *run.words, *folder])
        run.figures = _read_figures(run.folder)
        _write_record(root, runs)
        if interrupted:
            break
        if run.exit_code:
            console.warning(f"run {run.number} failed with exit code {run.exit_code}")
    console.heading("runs")
    console.table(*_table(runs))
    console.note(f"written to {address(root / SUMMARY)}")
    if interrupted:
        raise KeyboardInterrupt(
            f"interrupted; the same command with base_output_directory={address(root.parent)} "
            f"run_name={root.name} resumes it"
        )
    return _record(root, runs)


# ---- combinations


def combine(config_type: type, words: Sequence[str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Every combination of swept values, the last key fastest: (name -> text, the whole command
    line).

    >>> list(combine(Config, ["optimizer.lr=1e-4,1e-5", "steps=3"]))
    [({'optimizer.lr': '1e-4'}, ['optimizer.lr=1e-4', 'steps=3']),
     ({'optimizer.lr': '1e-5'}, [...])]
    """
    line = joined(config_type, words)
    choices: dict[str, list[str]] = {}
    places: dict[str, int] = {}
    for place, word in enumerate(line):
        if "=" not in word or is_file_option(word) or is_file_word(word):
            continue
        name, text = read_word(config_type, word)
        texts = sweep_texts(text)
        if name in choices or (name in places and len(texts) > 1):
            raise ShoalError(f"{name} is given more than once, and swept: write it once")
        places[name] = place
        if len(texts) > 1:
            if name in FOLDER_KEYS:
                raise ShoalError(
                    f"{name}={text}: this key cannot be swept, the runs of a sweep get folders by "
                    "number; put quotes around a value that holds commas"
                )
            choices[name] = texts
        elif texts != [text]:
            line[place] = f"{name}={texts[0]}"
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        swept = {places[name]: f"{name}={text}" for name, text in chosen.items()}
        yield chosen, [swept.get(place, word) for place, word in enumerate(line)]


_ITEM = re.compile(r"""(?:\[[^]]*\]|\([^)]*\)|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""")
"""What stands between two commas; those in brackets or quotes divide nothing."""

_RANGE = re.compile(r"range\((-?\d+)(?:,(-?\d+))?(?:,(-?[1-9]\d*))?\)")


def sweep_texts(text: str) -> list[str]:
    """The texts of a sweep; of a value that is not swept one.

    >>> sweep_texts("1e-4,1e-5"), sweep_texts("[a,b]"), sweep_texts("range(1,4)")
    (['1e-4', '1e-5'], ['[a,b]'], ['1', '2', '3'])
    """
    if match := _RANGE.fullmatch(text.replace(" ", "")):
        start, stop, step = (int(number) if number else None for number in match.groups())
        numbers = range(start or 0) if stop is None else range(start or 0, stop, step or 1)
        if not numbers:
            raise ShoalError(
                f"{text}: there is no number in this range; write range(stop) or "
                "range(start,stop,step)"
            )
        return [str(number) for number in numbers]
    items = [item.strip() for item in _ITEM.findall(text)]
    if len(items) < 2 and text[:1] not in ("'", '"'):
        return [text]
    return [
        item[1:-1] if len(item) > 1 and item[0] == item[-1] and item[0] in "'\"" else item
        for item in items
    ]


# ---- folders and records


def root_of(config: Config, now: datetime | None = None) -> Path:
    """The folder of a sweep."""
    base = config.base_output_directory
    if config.run_name:
        return named_folder(base, config.run_name)
    if "base_output_directory" not in difference_from_defaults(config):
        base = MULTIRUN_FOLDER
    return check_local(base, "base_output_directory", RUNS) / (now or datetime.now()).strftime(
        "%Y-%m-%d/%H-%M-%S"
    )


def check_same_sweep(root: Path, runs: Sequence[SweptRun]) -> None:
    """ShoalError if the folder holds another sweep: a resumed run must have the values of its
    number."""
    if (root / "config.yaml").is_file():
        raise ShoalError(f"{root} is the folder of a run, not of a sweep: choose another run_name")
    if not (root / SUMMARY).is_file():
        return
    known = {
        entry["number"]: entry["values"] for entry in read_json(root / SUMMARY).get("runs", ())
    }
    for run in runs:
        if known.get(run.number, run.values) != run.values:
            raise ShoalError(
                f"{root} holds another sweep: its run {run.number} is {known[run.number]}, not "
                f"{run.values}; choose another run_name"
            )


def _read_figures(folder: Path) -> dict[str, Any]:
    """Accuracy before and after (the mean reward if the task defines none) and seconds, from the
    run's summary.json; empty without one."""
    if (summary := read_summary(folder)) is None:
        return {}
    kind = "mean_reward" if summary.get("accuracy_after") is None else "accuracy"
    return {
        name: summary.get(name) for name in (f"{kind}_before", f"{kind}_after", "seconds_total")
    }


def _record(root: Path, runs: Sequence[SweptRun]) -> dict[str, Any]:
    return {
        "folder": address(root),
        "keys": list(runs[0].values),
        "num_failed": sum(run.state.startswith("failed") for run in runs),
        "runs": [
            {
                "number": run.number,
                "values": run.values,
                "folder": address(run.folder),
                "state": run.state,
                "exit_code": run.exit_code,
                **run.figures,
            }
            for run in runs
        ],
    }


def _write_record(root: Path, runs: Sequence[SweptRun]) -> None:
    write_atomically(
        root / SUMMARY, [json.dumps(json_ready(_record(root, runs)), indent=2, allow_nan=False)]
    )
    send(root / SUMMARY)


# ---- running


def run_process(words: Sequence[str]) -> tuple[int, bool]:
    """Runs `shoal` with these words in a new process: its exit code, and whether the user
    interrupted it.

    The terminal sends Ctrl-C to the new process too; it saves and ends, and this process waits for
    it."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        code = subprocess.call([sys.executable, "-m", "shoal", *words])
    finally:
        signal.signal(signal.SIGINT, before)
    return code, bool(interrupts) or code in INTERRUPTED


def cost_text(configs: Sequence[Config]) -> str:
    """`6 runs, one after the other: 480 steps, 122,880 completions to train on, and their
    evaluations`."""
    steps = sum(one.steps for one in configs)
    kinds = {
        "": [one for one in configs if not one.batch.prompts_per_device],
        " on each device": [one for one in configs if one.batch.prompts_per_device],
    }
    parts = [
        count(sum(one.steps * step_sizes(one)[0] for one in some), "completion")
        + on_each
        + (f" ({count(len(some), 'run')})" if len(some) < len(configs) else "")
        for on_each, some in kinds.items()
        if some
    ]
    return (
        f"{count(len(configs), 'run')}, one after the other: {count(steps, 'step')}, "
        f"{' and '.join(parts)} to train on, and their evaluations"
    )


def _table(runs: Sequence[SweptRun]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the rows of the table at the end."""

    def row(run: SweptRun) -> tuple[str, ...]:
        texts = {
            name: "" if value is None else figure_text(name, value)
            for name, value in run.figures.items()
        }
        before, after = (
            texts.get(f"accuracy_{when}", texts.get(f"mean_reward_{when}", ""))
            for when in ("before", "after")
        )
        return (
            str(run.number),
            *run.values.values(),
            run.state,
            before,
            after,
            texts.get("seconds_total", ""),
            str(run.folder),
        )

    return ("run", *runs[0].values, "state", "before", "after", "time", "folder"), [
        row(run) for run in runs
    ]
