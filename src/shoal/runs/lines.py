"""Typed lines of a run's files: of a step, an evaluation, an event; and the summary. The files are
strict JSON, in which NaN and infinities are `null`. Also here: writing files atomically or line by
line, and reading within bounds what somebody else may have written."""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, SupportsFloat, cast, get_args

import numpy as np
import yaml

from shoal.files import atomic_write, explain_write_errors
from shoal.records import ShoalError
from shoal.text import one_line

_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def json_ready(value: Any) -> Any:
    """Returns a value in JSON's own types. NaN and infinity become None. Lists, tuples and sets
    become lists, those of a set in no particular order. An array becomes nested lists, a number of
    numpy and an array without dimensions a single value. A mapping becomes a dict whose keys are
    texts. An enum becomes its value. Bytes become text as UTF-8, with escapes for what is not
    UTF-8. Anything else that JSON lacks becomes its `str`. What is inside is converted likewise.

    A float narrower than 64 bits becomes the shortest decimal that gives it back: float32(0.1)
    becomes 0.1."""
    if isinstance(value, enum.Enum):
        return json_ready(value.value)
    if isinstance(value, str):
        return str(value)  # a subclass becomes a plain str
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and not isinstance(value, np.floating):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(json_ready(key)): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_ready(item) for item in value]
    if hasattr(value, "__array__"):  # arrays and numbers of numpy and JAX
        return _array_ready(np.asarray(value))
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _array_ready(array: np.ndarray) -> Any:
    """Returns an array as nested lists in JSON's own types; one without dimensions as its single
    value. Floats become the shortest decimals, NaN and infinity None; what is neither a number, a
    boolean, a text nor an object, such as a complex number or a date, becomes its `str`."""
    # The kinds are numpy's: b boolean, i and u integers, S bytes, U text, O objects, f floats.
    if array.dtype.kind in "biu":
        return array.tolist()
    if array.ndim:
        return [_array_ready(np.asarray(row)) for row in array]
    if array.dtype.kind in "SUO":
        return json_ready(array.item())
    if array.dtype.kind in "fV":  # V: bfloat16 and similar types
        with contextlib.suppress(ValueError):
            return json_ready(float(str(array[()])))  # `str` gives the shortest decimal
    return str(array[()])


def json_line(record: Any) -> str:
    """Returns a record as one line of strict JSON, without its line end; values that JSON lacks
    become what `json_ready` makes of them, and characters that some programs take for line ends are
    escapes."""
    return json.dumps(json_ready(record), ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)


# ---- the records


@dataclass(frozen=True)
class StepLine:
    """A line of metrics.jsonl: the metrics of one step, by name.

    >>> StepLine.parse({"step": 3, "loss": 0.5})
    StepLine(step=3, metrics={'loss': 0.5})
    """

    FILE: ClassVar[str] = "metrics.jsonl"
    step: int  # from 1
    metrics: Mapping[str, Any]

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> StepLine:
        """Makes a line from a JSON record, all of whose other entries are metrics, with values of
        any type. ValueError if it has no integer `step`."""
        metrics = {name: value for name, value in record.items() if name != "step"}
        return cls(_step_of(record), metrics)

    def record(self) -> dict[str, Any]:
        """Returns the line as a JSON record; leaves out a metric that is called `step`."""
        metrics = {name: value for name, value in self.metrics.items() if name != "step"}
        return {"step": int(self.step), **metrics}


@dataclass(frozen=True)
class EvaluationLine:
    """A line of evaluations.jsonl: the figures of one version of the weights on one data set.

    >>> EvaluationLine.parse({"step": 0, "name": "held_out", "accuracy": 0.5})
    EvaluationLine(step=0, name='held_out', figures={'accuracy': 0.5})
    """

    FILE: ClassVar[str] = "evaluations.jsonl"
    step: int  # version of the weights, which is the number of steps made before
    name: str  # name of the data set
    figures: Mapping[str, Any]

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> EvaluationLine:
        """Makes a line from a JSON record, all of whose other entries are figures, with values of
        any type. ValueError if it has no integer `step` or no text `name`."""
        step = _step_of(record)
        name = record.get("name")
        if not isinstance(name, str):
            raise ValueError("it has no name")
        figures = {key: value for key, value in record.items() if key not in ("step", "name")}
        return cls(step, name, figures)

    def record(self) -> dict[str, Any]:
        """Returns the line as a JSON record."""
        return {"step": int(self.step), "name": self.name, **self.figures}


EventLevel = Literal["phase", "note", "warning", "wrong", "error"]
"""phase: a part of the run begins. note: a fact, such as that the run was resumed. warning:
something may be wrong. wrong: a finding that makes the run fail or learn nothing. error: the error
that ended the run."""

Phase = Literal["start", "training", "evaluation", "end"]


@dataclass(frozen=True)
class EventLine:
    """A line of events.jsonl: what happened at a time of the run, in a sentence.

    >>> EventLine.parse(
    ...     {"time": 1e9, "step": 3, "phase": "training", "level": "warning", "text": "cut off"}
    ... )
    EventLine(time=1000000000.0, step=3, phase='training', level='warning', text='cut off', key='')
    """

    FILE: ClassVar[str] = "events.jsonl"
    time: float  # seconds since the epoch
    # training: the step under way, from 1; evaluation: the version; start: the number of steps made
    step: int
    phase: Phase
    level: EventLevel
    text: str  # one line
    key: str = ""  # the configuration key that helps, or ""

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> EventLine:
        """Makes a line from a JSON record; entries that are no field are left out, and a missing
        `key` is "". ValueError if `step`, `time`, `phase`, `level` or `text` is missing, or if its
        value is not one that the field can have."""
        step = _step_of(record)
        time = record.get("time")
        if not isinstance(time, int | float) or isinstance(time, bool) or not abs(time) < 1e15:
            raise ValueError("it has no time")
        phase = record.get("phase")
        if phase not in get_args(Phase):
            raise ValueError("it has no phase")
        level = record.get("level")
        if level not in get_args(EventLevel):
            raise ValueError("it has no level")
        text = record.get("text")
        if not isinstance(text, str):
            raise ValueError("it has no text")
        key = str(record.get("key", ""))
        return cls(float(time), step, cast(Phase, phase), cast(EventLevel, level), text, key)

    def record(self) -> dict[str, Any]:
        """Returns the line as a JSON record."""
        return asdict(self)


@dataclass(frozen=True)
class Summary:
    """Content of summary.json: what a run that came to its end reached, and what that
    took. The defaults stand in for fields that the file of another version of Shoal lacks.

    >>> Summary.parse({"steps": 3, "a_field_of_another_version": 1}).steps
    3
    """

    # on the first data set; None if the task defines no accuracy
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    mean_reward_before: float | None = None
    mean_reward_after: float | None = None
    num_questions: int = 0  # number of questions of the last evaluation
    protocol: str | None = None
    before: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # data set -> figures
    after: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds_total: float = 0.0
    seconds_by_phase: Mapping[str, float] = field(default_factory=dict)
    seconds_training: float = 0.0
    sample_tokens_per_second: float | None = None
    train_tokens_per_second: float | None = None
    steps: int = 0  # number of steps in the settings
    steps_made: int = 0  # fewer than `steps` if the data was exhausted, or with `stopped_by`
    stopped_by: str = ""  # who ended the run before its last step, as `the callback NAME`; or ""
    # number of tokens that were sampled, and what became of them
    tokens: Mapping[str, int] = field(default_factory=dict)
    num_compilations: int = 0
    prompts_dropped: int = 0
    # number of failures by function and kind
    reward_failures: Mapping[str, int] = field(default_factory=dict)
    run_folder: str = ""
    # of all devices and all processes of the run, in the currency of `price`; None without a price
    cost: float | None = None

    @classmethod
    def parse(cls, record: Any) -> Summary:
        """Makes a summary from the JSON value of the file. A field that is missing has its default;
        a field that this version does not know is left out. ValueError if the value is not an
        object, is an empty one, or if a field has a value of another type."""
        if not isinstance(record, Mapping) or not record:
            raise ValueError("it is not the record of a finished run")
        values = {}
        for known in fields(cls):
            if known.name not in record:
                continue
            value = record[known.name]
            if not _has_type(value, str(known.type)):
                raise ValueError(f"{known.name} is not of type {known.type}")
            values[known.name] = value
        return cls(**values)

    def is_end_for(self, steps: int, resume: str) -> bool:
        """True if a command with these values of the keys `steps` and `resume` has nothing left to
        do: the run came to its end with as many steps in its settings. One that a callback stopped
        goes on if `resume` names it."""
        return self.steps == steps and not (resume and self.stopped_by)

    def record(self) -> dict[str, Any]:
        """Returns the summary as a JSON record."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


_JSON_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "None": type(None),
    "int": int,
    "float": (int, float),
    "str": str,
    "Mapping": Mapping,
}


def _has_type(value: Any, annotation: str) -> bool:
    """True if a JSON value has the type of a field's annotation, a text such as "float | None". Of
    a `Mapping[...]` only the outermost type is checked, not its keys and values. An integer is a
    float, too; true and false have no type of a field."""
    if isinstance(value, bool):  # which Python counts among the integers
        return False
    for name in annotation.split(" | "):
        outermost = name.partition("[")[0]
        if isinstance(value, _JSON_TYPES[outermost]):
            return True
    return False


def _step_of(record: Mapping[str, Any]) -> int:
    """Returns the value of "step" in a JSON record. ValueError if it is missing, or is not an
    integer from -10**15 to 10**15."""
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not abs(step) <= 10**15:
        raise ValueError("it has no step")
    return step


# ---- writing


def open_text(path: Path, mode: str) -> Any:
    """Opens a text file as UTF-8 with "\\n" as line end, and returns it; the caller closes it. Lone
    surrogates are written as escapes. `mode`: of `open`, like "a". OSError if it cannot be
    opened."""
    # A lone surrogate, which UTF-8 cannot hold, is written as \udcxx, JSON's own escape for it.
    return path.open(mode, encoding="utf-8", errors="backslashreplace", newline="\n")


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Writes lines (without their line ends) to a file such that the file appears whole or not at
    all, and waits until it is on the disk. Replaces an existing file. ShoalError if it cannot be
    written."""
    with (
        atomic_write(path) as temporary,
        explain_write_errors(path),
        open_text(temporary, "w") as file,
    ):
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file, one a line; [] if there is no file. Empty lines are left
    out, and so is a last line without its end that is not JSON, because a killed process left it
    incomplete. ShoalError if any other line is not JSON."""
    if not path.is_file():
        return []
    records = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):  # the line has its end, so it was written whole
                raise ShoalError(
                    f"{path}, line {number}: this is not JSON; remove the line"
                ) from error
    return records


class JsonlSink:
    """Appends lines to a file and flushes each, so that they survive if the process is killed;
    after a power cut only those before the last `sync` are certain. Threads may share it. `close`
    it at the end."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens the file, which need not exist; what it holds stays. ShoalError if it cannot be
        opened."""
        self.path = Path(path)
        self._lock = threading.Lock()
        with explain_write_errors(self.path):
            self._file = open_text(self.path, "a")

    def write(self, line: StepLine | EvaluationLine | EventLine) -> None:
        """Appends one line and flushes it; not after `close`. ShoalError if it cannot be
        written."""
        text = json_line(line.record())
        with self._lock, explain_write_errors(self.path):
            self._file.write(text + "\n")
            self._file.flush()

    def keep(self, is_kept: Callable[[dict[str, Any]], bool], of_first: int | None = None) -> None:
        """Rewrites the file without the lines (as JSON records) for which `is_kept` returns False,
        and without an incomplete last line. With `of_first`, only that many lines at the beginning
        are checked; all later ones stay. ShoalError if a line is damaged, or the file cannot be
        written; the file is then closed, and no line can be added any more."""
        self.close()  # the file is replaced by another one
        lines = []
        for number, line in enumerate(read_lines(self.path)):
            is_checked = of_first is None or number < of_first
            if not is_checked or is_kept(line):
                lines.append(json_line(line))
        write_atomically(self.path, lines)
        self._file = open_text(self.path, "a")

    def sync(self) -> None:
        """Waits until everything written would survive a power cut. ShoalError if the disk reports
        an error."""
        with explain_write_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; ignores errors."""
        with contextlib.suppress(OSError):  # `write` has raised the same error before
            self._file.close()


# ---- reading within bounds

MAX_NESTING, MAX_DIGITS, MAX_VALUES = 40, 40, 10_000


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The YAML loader: libyaml's if PyYAML has it, with which 50 runs are listed in a third of the
time."""


class _BoundedLoader(_Loader):
    """A YAML loader that refuses numbers with too many digits."""

    def construct_number(self, node: Any) -> int | float:
        """Returns the number of a YAML node whose tag is that of an integer or a float. ValueError
        if its text has more than MAX_DIGITS characters."""
        if len(node.value) > MAX_DIGITS:
            raise ValueError(f"it has a number of more than {MAX_DIGITS} digits")
        if node.tag.endswith(":int"):
            return self.construct_yaml_int(node)
        return self.construct_yaml_float(node)


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _BoundedLoader.add_constructor(_tag, _BoundedLoader.construct_number)


def flat_yaml(text: str) -> dict[str, Any]:
    """Parses YAML of nested mappings, and returns dotted key -> value; an empty mapping is a value.
    ValueError if the text is anything else, or exceeds the bounds of `bounded_yaml`."""
    return dict(leaves(bounded_yaml(text)))


def bounded_yaml(text: str) -> Mapping[str, Any]:
    """Parses YAML that another program may have written, and returns its nested mappings.
    ValueError if the text is anything else (also an empty one), exceeds the bounds on depth or
    number of values (MAX_NESTING, MAX_VALUES), has a number of more than MAX_DIGITS digits, or has
    aliases, with which a small file can stand for billions of values."""
    depth = 0
    num_values = 0
    try:
        # A first pass over the text makes no values, so that the second makes none beyond bounds.
        for event in yaml.parse(text, _BoundedLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            elif isinstance(event, yaml.AliasEvent):
                raise ValueError("it has aliases")
            if isinstance(event, yaml.NodeEvent):
                num_values += 1
            if depth > MAX_NESTING or num_values > MAX_VALUES:
                raise ValueError(
                    f"it is nested more than {MAX_NESTING} deep, or has more than {MAX_VALUES:,} "
                    "values"
                )
        settings = yaml.load(text, _BoundedLoader)
    except yaml.YAMLError as error:
        raise ValueError(bounded_line(str(error))[:200]) from error
    # PyYAML raises these for `!!int ""` or `!!bool foo`.
    except (LookupError, AttributeError, TypeError) as error:
        raise ValueError("a value is not what its tag says") from error
    if not isinstance(settings, Mapping):
        raise ValueError("it holds no settings")
    return settings


def bounded_json(text: str | bytes) -> Any:
    """Parses JSON that another program may have written, and returns its value. ValueError if the
    text is not JSON, is nested more than MAX_NESTING deep, or has an integer of more than
    MAX_DIGITS digits. The number of values is not bounded."""
    try:
        value = json.loads(text, parse_int=_bounded_int)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    items = [value]  # all items at one depth
    for _ in range(MAX_NESTING):
        one_deeper: list[Any] = []
        for item in items:
            if isinstance(item, dict):
                one_deeper += item.values()
            elif isinstance(item, list):
                one_deeper += item
        if not one_deeper:
            return value
        items = one_deeper
    raise ValueError(f"it is nested more than {MAX_NESTING} deep")


def _bounded_int(text: str) -> int:
    """Returns the integer of a text. ValueError if it has too many digits."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it has a number of more than {MAX_DIGITS} digits")
    return int(text)


def leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of nested mappings, in order; an empty mapping counts as a value.
    `prefix` is put before each key, with its dot: "optimizer.".

    >>> list(leaves({"optimizer": {"lr": 1e-5}, "extra": {}}))
    [('optimizer.lr', 1e-05), ('extra', {})]
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def bounded_line(text: object) -> str:
    """Returns the first 400 characters of a text of any length, as one line."""
    return one_line(text)[:400]


def reason(error: BaseException) -> str:
    """Returns the message of an error as one line of at most 160 characters, or the name of its
    type if it has no message."""
    # `strerror`: of an OSError what is wrong, without number and path.
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return bounded_line(text)[:160]


def rounded(value: float) -> float | None:
    """Returns a number rounded to six significant digits, which is more than a screen shows; None
    if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def evaluation_scalars(name: str, figures: Mapping[str, Any]) -> dict[str, float]:
    """Returns an evaluation's numbers under `evaluate/<name>/<figure>`, for sinks. Its texts and
    intervals are left out; evaluations.jsonl has them.

    >>> evaluation_scalars("held_out", {"accuracy": 0.5, "protocol": "greedy", "num_questions": 4})
    {'evaluate/held_out/accuracy': 0.5, 'evaluate/held_out/num_questions': 4.0}
    """
    return {f"evaluate/{name}/{figure}": value for figure, value in scalars(figures).items()}


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the entries whose values are numbers (also True and False), as floats; leaves out
    texts, None and lists."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, SupportsFloat) and not isinstance(value, str)
    }
