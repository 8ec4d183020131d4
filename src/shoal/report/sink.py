"""The run's folder and what is written there: settings, metrics, groups, the summary.

    config.yaml  config_difference.yaml      the settings, resolved, and what differs from the defaults
    metrics.jsonl                            a line a step
    evaluations.jsonl                        a line an evaluation
    groups/step_000012.jsonl                 a line a group
    checkpoints/                             written by the trainer
    summary.json                             written at the end

JSON here is strict: NaN and infinities are `null`.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from shoal.types import Completion, Group, Purpose, ShoalError

TokenArrays: TypeAlias = "Sequence[Sequence[Mapping[str, Any] | None] | None]"
"""By group, by completion: name -> one value a token, as the trainer returned it; None where it was not trained."""

_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class Sink(Protocol):
    """Where a step's metrics go. `JsonlSink` is one; TensorBoard and W&B are others."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def json_ready(value: Any) -> Any:
    """The value in JSON's own types: arrays as lists, NaN and infinity as None, what JSON lacks as text.

    A float narrower than 64 bits becomes the shortest decimal that gives it back: float32(0.1) is 0.1."""
    if isinstance(value, enum.Enum):
        return json_ready(value.value)
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and not isinstance(value, np.floating):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(json_ready(key)): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_ready(item) for item in value]
    if hasattr(value, "__array__"):
        return _array_ready(np.asarray(value))
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _array_ready(array: np.ndarray) -> Any:
    if array.dtype.kind in "biu":
        return array.tolist()
    if array.ndim:
        return [_array_ready(row) if array.ndim > 1 else _scalar_ready(row) for row in array]
    return _scalar_ready(array[()])


def _scalar_ready(value: Any) -> Any:
    if isinstance(value, np.generic) and value.dtype.kind in "SUO":
        return json_ready(value.item())
    if isinstance(value, np.generic) and value.dtype.kind in "fV":  # V: bfloat16 and its like
        with contextlib.suppress(ValueError):
            return json_ready(float(str(value)))
    return json_ready(value) if not isinstance(value, np.generic) else str(value)


def json_line(record: Any) -> str:
    """One line of strict JSON, without its line end."""
    return json.dumps(json_ready(record), ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ShoalError(f"cannot write {path}: {error.strerror or error}; make room or set base_output_directory to "
                         "a folder that can be written") from error


def _open_text(path: Path, mode: str) -> Any:
    # a lone surrogate, which UTF-8 cannot hold, becomes \udcxx: JSON's own escape for it
    return path.open(mode, encoding="utf-8", errors="backslashreplace", newline="\n")


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Writes lines to a file that appears whole or not at all; ShoalError where the place cannot be written."""
    temporary = path.with_name(f".{path.name}.tmp")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _writing(path), _open_text(temporary, "w") as file:
            file.writelines(line + "\n" for line in lines)
        with _writing(path):
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


class JsonlSink:
    """Appends a line a step, `step` first, flushed at once: what was written survives a killed process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with _writing(self.path):
            self._file = _open_text(self.path, "a")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        line = json_line({"step": int(step), **{name: value for name, value in metrics.items() if name != "step"}})
        with _writing(self.path):
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def make_run_folder(base: str | os.PathLike[str], run_name: str = "", now: datetime | None = None) -> Path:
    """Makes `base/run_name`, or `base/YYYY-MM-DD/HH-MM-SS` (-1, -2, ... where taken in the same second).

    Raises ShoalError where a named folder already holds something or the place cannot be written."""
    if run_name:
        return _make_named(Path(base), run_name)
    now = now or datetime.now()
    day, second = Path(base) / now.strftime("%Y-%m-%d"), now.strftime("%H-%M-%S")
    with _writing(day / second):
        day.mkdir(parents=True, exist_ok=True)
        for attempt in range(10_000):
            path = day / (f"{second}-{attempt}" if attempt else second)
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    raise ShoalError(f"cannot make a run folder: {day / second} and its numbered names are all taken; set run_name")


def _make_named(base: Path, run_name: str) -> Path:
    name = Path(run_name)
    if name.is_absolute() or ".." in name.parts or not name.parts or "\0" in run_name:
        raise ShoalError(f"run_name={run_name!r}: expected a name under base_output_directory, without '..' or a "
                         "leading '/'")
    path = base / name
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        taken = any(path.iterdir())
    if taken:
        raise ShoalError(f"the run folder {path} already holds a run: choose another run_name or delete the folder "
                         "(going on with a stopped run is not there yet)")
    return path


class RunFolder:
    """What one run leaves behind. Made by `RunFolder.create`; closed at the end, or used in a `with`.

    >>> with RunFolder.create("outputs", "first") as folder:
    ...     folder.write_metrics(1, {"reward/mean": 0.5})
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.config_difference_path = self.path / "config_difference.yaml"
        self.groups_path = self.path / "groups"
        self.checkpoints_path = self.path / "checkpoints"
        self.summary_path = self.path / "summary.json"
        self.metrics = JsonlSink(self.path / "metrics.jsonl")
        self.evaluations = JsonlSink(self.path / "evaluations.jsonl")

    @classmethod
    def create(cls, base: str | os.PathLike[str] = "outputs", run_name: str = "",
               now: datetime | None = None) -> RunFolder:
        """A new folder (see `make_run_folder`); ShoalError where it is taken or cannot be written."""
        return cls(make_run_folder(base, run_name, now))

    def write_config(self, config: str, difference: str) -> None:
        """The resolved settings and what differs from the defaults, both as YAML text."""
        write_atomically(self.config_path, [config.rstrip("\n")])
        write_atomically(self.config_difference_path, [difference.rstrip("\n")])

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.metrics.write(step, metrics)

    def write_evaluation(self, step: int, name: str, figures: Mapping[str, Any]) -> None:
        """One line of evaluations.jsonl: `step`, `name` (of the questions), the figures."""
        self.evaluations.write(step, {"name": name, **figures})

    def write_groups(self, step: int, groups: Sequence[Group], advantages: Any = None,
                     token_arrays: TokenArrays | None = None, name: str = "") -> Path:
        """Writes a step's groups, a line each, atomically, and returns the file `groups/<name>_<step>.jsonl`.

        `advantages`: by group, by completion ([P, G]). `token_arrays`: by group, by completion, name -> [T] (such as
        `trainer_logprobs`). `name` is `step` for training and `<purpose>_<subset>` otherwise unless given: two sets
        of one step must differ in it, or the later replaces the earlier. Raises ValueError where lengths differ."""
        for what, given in (("advantages", advantages), ("token_arrays", token_arrays)):
            if given is not None and len(given) != len(groups):
                raise ValueError(f"{what}: expected one entry for each of {len(groups)} groups, came {len(given)}")
        path = self.groups_path / f"{name or _groups_name(groups)}_{step:06d}.jsonl"
        write_atomically(path, (
            json_line(group_record(group, None if advantages is None else advantages[i],
                                   None if token_arrays is None else token_arrays[i]))
            for i, group in enumerate(groups)))
        return path

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """summary.json, whole or not at all."""
        write_atomically(self.summary_path, [json.dumps(json_ready(summary), indent=2, allow_nan=False)])

    def close(self) -> None:
        self.metrics.close()
        self.evaluations.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _groups_name(groups: Sequence[Group]) -> str:
    if not groups or groups[0].purpose is Purpose.TRAIN:
        return "step"
    subset = "".join(c if c.isalnum() or c in "-_" else "_" for c in groups[0].subset)
    return f"{groups[0].purpose.value}_{subset}"


def group_record(group: Group, advantages: Any = None,
                 token_arrays: Sequence[Mapping[str, Any] | None] | None = None) -> dict[str, Any]:
    """A group as one JSON object: the prompt once, then its completions with rewards and log-probs by token."""
    for what, given in (("advantages", advantages), ("token_arrays", token_arrays)):
        if given is not None and len(given) != group.size:
            raise ValueError(f"{what}: expected one entry for each of {group.size} completions, came {len(given)}")
    record = {
        "purpose": group.purpose, "step": group.step, "version": group.version, "subset": group.subset,
        "row": group.example.row, "prompt": group.example.prompt, "prompt_ids": group.prompt_ids,
        "columns": group.example.columns,
        "completions": [_completion_record(group, i, advantages, token_arrays) for i in range(group.size)],
    }
    return json_ready(record)


def _completion_record(group: Group, i: int, advantages: Any, token_arrays: Any) -> dict[str, Any]:
    completion = group.completions[i]
    record: dict[str, Any] = {
        "text": group.texts[i], "token_ids": completion.token_ids,
        "logprobs": np.asarray(completion.logprobs, np.float32), "stop_reason": completion.stop_reason,
        "reward": group.rewards[i],
        "components": {name: values[i] for name, values in group.reward_components.items()},
        "valid": group.valid[i],
    }
    if group.correct is not None:
        record["correct"] = group.correct[i]
    if advantages is not None:
        record["advantage"] = advantages[i]
    if not np.all(completion.drawn):
        record["drawn"] = completion.drawn
    if np.any(np.asarray(completion.versions) != group.version):
        record["versions"] = completion.versions
    if group.extra:
        record["extra"] = {name: values[i] for name, values in group.extra.items()}
    return record | _token_record(completion, None if token_arrays is None else token_arrays[i], record)


def _token_record(completion: Completion, arrays: Mapping[str, Any] | None, taken: Mapping[str, Any]) -> dict[str, Any]:
    for name, values in (arrays or {}).items():
        if name in taken:
            raise ValueError(f"token array {name!r}: the record already has a field of this name")
        if len(values) != len(completion):
            raise ValueError(f"token array {name!r}: expected {len(completion)} values, one a token, "
                             f"came {len(values)}")
    return dict(arrays or {})
