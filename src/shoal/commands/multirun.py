"""`shoal train --multirun`: a run for each combination of values, one after the other, each in its own process.

    optimizer.lr=1e-4,1e-5 seed=range(3)     6 runs
    sampling.stop=[a,b] run_name='a,b'       no sweep: lists and quoted text stay whole

    multirun/YYYY-MM-DD/HH-MM-SS/0 1 2 ...   the run folders; with run_name: <base_output_directory>/<run_name>/0 1 2
    .../multirun.json                        the swept values and the result of each run
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.config.arguments import is_file_option, is_file_word, joined, read_word
from shoal.config.foreign import translator
from shoal.config.keys import dataclass_of
from shoal.config.loading import compose
from shoal.config.schema import Config
from shoal.config.text import difference_from_defaults
from shoal.report.console import Console
from shoal.report.figures import figure_text
from shoal.report.folder import named_folder, read_summary
from shoal.report.lines import json_ready, write_atomically
from shoal.run.derived import step_sizes
from shoal.text import count
from shoal.types import ShoalError

MULTIRUN_FOLDER = "multirun"
"""The folder of sweeps without run_name and base_output_directory."""

SUMMARY = "multirun.json"
INTERRUPTED = (130, -2)
"""Exit codes of a process ended by Ctrl-C: its own, and the signal's."""

_FIXED = ("run_name", "base_output_directory", "resume")


@dataclass
class SweptRun:
    """One combination of the swept values, and its result."""

    number: int
    values: dict[str, str]  # by dotted key
    words: list[str]  # without its folder
    folder: Path
    exit_code: int | None = None  # None until it has run
    figures: dict[str, Any] = field(default_factory=dict)  # accuracy before and after, seconds

    @property
    def assignments(self) -> list[str]:
        """`["optimizer.lr=1e-4", "seed=2"]`"""
        return [f"{name}={text}" for name, text in self.values.items()]

    @property
    def state(self) -> str:
        if self.exit_code is None:
            return "not run"
        if self.exit_code in INTERRUPTED:
            return "interrupted"
        return "done" if self.exit_code == 0 else f"failed ({self.exit_code})"


def multirun(command: str, words: Sequence[str], console: Console, dry_run: bool = False) -> dict[str, Any]:
    """Runs every combination and returns the content of multirun.json; a dry run prints the runs.

    All combinations are validated before the first one starts. A failed run does not stop the others, Ctrl-C does."""
    config_type = dataclass_of(command)
    combinations = list(combine(config_type, words))
    composed = [compose(command, each) for _, each in combinations]
    configs, first = [config for config, _ in composed], composed[0][1]
    if configs[0].resume:
        raise ShoalError(f"resume={configs[0].resume}: a sweep is resumed by giving the same run_name and "
                         "base_output_directory")
    root = root_of(configs[0])
    runs = [SweptRun(number, values, each, root / str(number)) for number, (values, each) in enumerate(combinations)]
    check_same_sweep(root, runs)
    console.note(cost_text(configs))
    if dry_run:
        for line in dict.fromkeys([*first.notes, *first.became]):
            console.note(f"run 0: {line}")
        for run in runs:
            console.note(f"{run.folder}: {' '.join(run.assignments) or 'nothing swept'}")
        return _record(root, runs)
    write_record(root, runs)
    interrupted = False
    for run in runs:
        console.heading(f"run {run.number + 1} of {len(runs)}: {' '.join([*run.assignments, str(run.folder)])}")
        folder = [f"base_output_directory={root}", f"run_name={run.number}"]
        run.exit_code, interrupted = run_process([command, *run.words, *folder])
        run.figures = read_figures(run.folder)
        write_record(root, runs)
        if interrupted:
            break
        if run.exit_code:
            console.warning(f"run {run.number} failed with exit code {run.exit_code}")
    console.heading("runs")
    console.table(*table(runs))
    console.note(f"written to {root / SUMMARY}")
    if interrupted:
        raise KeyboardInterrupt(f"interrupted; the same command with base_output_directory={root.parent} "
                                f"run_name={root.name} resumes it")
    return _record(root, runs)


# ---- combinations


def combine(config_type: type, words: Sequence[str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Every combination of swept values, the last key fastest: (dotted key -> text, the whole command line, each word
    in its place).

    >>> list(combine(Config, ["optimizer.lr=1e-4,1e-5", "steps=3"]))
    [({'optimizer.lr': '0.0001'}, ['optimizer.lr=0.0001', 'steps=3']), ({'optimizer.lr': '1e-05'}, [...])]
    """
    choices: dict[str, list[str]] = {}  # the later of two words on one key stands
    places: dict[str, int] = {}  # of the words that are swept
    line: list[str | None] = []
    for place, word in enumerate(joined(config_type, words)):
        line.append(word)
        name, equals, _ = word.partition("=")
        if not equals or is_file_option(word) or is_file_word(word):
            continue
        key, text = read_word(config_type, word)
        flag = translator().find(config_type, key, text)
        key = flag.key or key if flag else key
        texts = sweep_texts(f"{name}={text}", text)
        if choices.pop(key, None):
            line[places.pop(key)] = None
        if isinstance(texts, str):
            line[place] = f"{name}={texts}"
            continue
        if not texts:
            raise ShoalError(f"{name}={text}: nothing to sweep over; give one value at least")
        if key in _FIXED:
            raise ShoalError(f"{name}={text}: this key cannot be swept, the runs of a sweep get folders by number; put "
                             "quotes around a value that holds commas")
        choices[key], places[key] = texts, place
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        swept = {places[name]: f"{name}={text}" for name, text in chosen.items()}
        yield chosen, [found for place, word in enumerate(line) if (found := swept.get(place, word)) is not None]


# ---- values of a swept key

_CLOSING = {"[": "]", "(": ")", "{": "}"}
_CALL = re.compile(r"(\w+)\((.*)\)\s*", re.DOTALL)


def sweep_texts(shown: str, text: str) -> list[str] | str:
    """The texts of a sweep, or one text for a value that is not swept. `shown`: the argument, for an error.

    >>> sweep_texts("optimizer.lr=1e-4,1e-5", "1e-4,1e-5"), sweep_texts("sampling.stop=[a,b]", "[a,b]")
    (['0.0001', '1e-05'], '[a,b]')
    """
    call = _CALL.fullmatch(text.strip())
    if call and call[1] == "interval":
        raise ShoalError(f"{shown}: an interval has no end of values; write a,b or range(from,to,step)")
    try:
        items = list(_split(text))
        if call and call[1] == "range":
            return _range([float(item) for item in _split(call[2])])
        if call and call[1] == "choice":
            return [_item_text(item) for item in _split(call[2])] if call[2].strip() else []
        if call and ("," in text or "*" in text):
            raise ValueError
    except ValueError as error:
        if "," not in text and "*" not in text:
            return text
        raise ShoalError(f"{shown} cannot be read as values of a sweep: write a,b or choice(a,b) or range(1,4), and "
                         "put '...' around text that holds commas but is one value") from error
    if len(items) > 1:
        return [_item_text(item) for item in items]
    return _unquoted(text.strip()) if text.lstrip()[:1] in ("'", '"') else text


def _split(text: str) -> Iterator[str]:
    """The parts between commas outside quotes and brackets; ValueError if a quote or bracket is left open."""
    open_brackets: list[str] = []
    quote, start, place = "", 0, 0
    while place < len(text):
        char = text[place]
        if quote:
            place += char == "\\"
            quote = "" if char == quote else quote
        elif char in "'\"" and (open_brackets or not text[start:place].strip()):
            quote = char
        elif char in _CLOSING:
            open_brackets.append(_CLOSING[char])
        elif open_brackets and char == open_brackets[-1]:
            open_brackets.pop()
        elif char == "," and not open_brackets:
            yield text[start:place].strip()
            start = place + 1
        place += 1
    if quote or open_brackets:
        raise ValueError(text)
    yield text[start:].strip()


def _item_text(item: str) -> str:
    """A value in normal form: without quotes, numbers as Python prints them, items of a list in quotes."""
    if item[:1] in ("'", '"'):
        return _unquoted(item)
    if item.startswith("[") and item.endswith("]"):
        parts = [_item_text(part) for part in _split(item[1:-1])] if item[1:-1].strip() else []
        quoted = (part.replace("\\", "\\\\").replace('"', '\\"') for part in parts)
        return "[" + ",".join(f'"{part}"' for part in quoted) + "]"
    try:
        return str(float(item)) if re.search(r"\d[.e]|[.]\d", item) else item
    except ValueError:
        return item


def _unquoted(text: str) -> str:
    quote = text[0]
    return re.sub(rf"\\([\\{quote}])", r"\1", text[1:-1]) if len(text) > 1 and text[-1] == quote else text


def _range(numbers: list[float]) -> list[str]:
    """The numbers of `range(stop)`, `range(start,stop)` or `range(start,stop,step)`, the stop excluded."""
    start, stop, step = {1: (0.0, *numbers, 1.0), 2: (*numbers, 1.0)}.get(len(numbers), tuple(numbers))
    if step == 0:
        raise ValueError(step)
    count = max(0, -int((start - stop) // step))
    values = [start + number * step for number in range(count)]
    return [str(int(value)) if all(x.is_integer() for x in (start, step)) else str(value) for value in values]


# ---- folders and records


def root_of(config: Config, now: datetime | None = None) -> Path:
    """The folder of a sweep."""
    base = config.base_output_directory
    if config.run_name:
        return named_folder(base, config.run_name)
    if "base_output_directory" not in difference_from_defaults(config):
        base = MULTIRUN_FOLDER
    return Path(base).expanduser() / (now or datetime.now()).strftime("%Y-%m-%d/%H-%M-%S")


def check_same_sweep(root: Path, runs: Sequence[SweptRun]) -> None:
    """ShoalError if the folder holds another sweep: a resumed run must have the values of its number."""
    if (root / "config.yaml").is_file():
        raise ShoalError(f"{root} is the folder of a run, not of a sweep: choose another run_name")
    try:
        stored = json.loads((root / SUMMARY).read_text(encoding="utf-8"))["runs"]
        known = {entry["number"]: entry["values"] for entry in stored}
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShoalError(f"{root / SUMMARY} cannot be read: {error}; choose another run_name, or remove it") from error
    for run in runs:
        if known.get(run.number, run.values) != run.values:
            raise ShoalError(f"{root} holds another sweep: its run {run.number} is {known[run.number]}, not "
                             f"{run.values}; choose another run_name")


def read_figures(folder: Path) -> dict[str, Any]:
    """Accuracy before and after (the mean reward if the task defines none) and seconds, from the run's summary.json;
    empty without one."""
    if (summary := read_summary(folder)) is None:
        return {}
    kind = "mean_reward" if summary.get("accuracy_after") is None else "accuracy"
    return {name: summary.get(name) for name in (f"{kind}_before", f"{kind}_after", "seconds_total")}


def _record(root: Path, runs: Sequence[SweptRun]) -> dict[str, Any]:
    return {
        "folder": str(root),
        "keys": list(runs[0].values),
        "num_failed": sum(run.state.startswith("failed") for run in runs),
        "runs": [{"number": run.number, "values": run.values, "folder": str(run.folder), "state": run.state,
                  "exit_code": run.exit_code, **run.figures} for run in runs],
    }


def write_record(root: Path, runs: Sequence[SweptRun]) -> None:
    write_atomically(root / SUMMARY, [json.dumps(json_ready(_record(root, runs)), indent=2, allow_nan=False)])


# ---- running


def run_process(words: Sequence[str]) -> tuple[int, bool]:
    """Runs `shoal` with these words in a new process: its exit code, and whether the user interrupted it.

    The terminal sends Ctrl-C to the new process too; it saves and ends, and this process waits for it."""
    process = subprocess.Popen([sys.executable, "-m", "shoal", *words])
    interrupted = False
    while True:
        try:
            code = process.wait()
            return code, interrupted or code in INTERRUPTED
        except KeyboardInterrupt:
            interrupted = True


def cost_text(configs: Sequence[Config]) -> str:
    """`6 runs, one after the other: 480 steps, 122880 completions to train on, and their evaluations`."""
    steps = sum(config.steps for config in configs)
    kinds = {"": [config for config in configs if not config.batch.prompts_per_device],
             " on each device": [config for config in configs if config.batch.prompts_per_device]}
    parts = [count(sum(one.steps * step_sizes(one)[0] for one in some), "completion") + on_each +
             (f" ({count(len(some), 'run')})" if len(some) < len(configs) else "")
             for on_each, some in kinds.items() if some]
    return (f"{count(len(configs), 'run')}, one after the other: {count(steps, 'step')}, "
            f"{' and '.join(parts)} to train on, and their evaluations")


def table(runs: Sequence[SweptRun]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the rows of the table at the end."""
    def row(run: SweptRun) -> tuple[str, ...]:
        texts = {name: "" if value is None else figure_text(name, value) for name, value in run.figures.items()}
        before, after = (texts.get(f"accuracy_{when}", texts.get(f"mean_reward_{when}", ""))
                         for when in ("before", "after"))
        return (str(run.number), *run.values.values(), run.state, before, after, texts.get("seconds_total", ""),
                str(run.folder))

    return ("run", *runs[0].values, "state", "before", "after", "time", "folder"), [row(run) for run in runs]
