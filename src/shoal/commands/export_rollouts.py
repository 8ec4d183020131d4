"""`shoal export-rollouts`: a run's training groups in the file formats of TRL and verl.

    trl    completions_00001.parquet, ...   step, prompt, completion, each reward function, extra
                                            columns, advantage
    verl   1.jsonl, ...                     input, output, gts, score, step, each reward function,
                                            extra columns

Prompts are the text that the model read, special tokens included; steps count from 1. TRL's
completion is the messages of a rollout with turns as JSON, verl's output the text of all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.buckets import address
from shoal.chat.tokenizer import Tokenizer
from shoal.config.commands import ExportRolloutsConfig
from shoal.config.stored import require_given
from shoal.files import appearing, check_new_folder
from shoal.records import ShoalError, ground_truth
from shoal.report.console import Console
from shoal.runs.groups import StoredGroup, free_column, read_file
from shoal.runs.layout import MODEL_FOLDER, find_run
from shoal.runs.lines import json_line, write_atomically
from shoal.runs.reader import StoredRun
from shoal.text import count


def export_rollouts(config: ExportRolloutsConfig, console: Console | None = None) -> dict[str, Any]:
    """Writes a file a step to the folder `config.to`, which must be new or empty."""
    require_given(config, "run", "to")
    with console or Console() as console:
        run, to = StoredRun(find_run(config.run)), check_new_folder(config.to, "to")
        files = run.require_groups()
        decode = Tokenizer.load(run.path / MODEL_FOLDER).decode
        if not run.is_finished:
            console.note(f"{address(run.path)} has not finished: its steps so far are written")
        written = 0
        for step, file in files.items():
            stored = read_file(file)
            written += sum(entry.group.size for entry in stored)
            if config.format == "trl":
                _write_trl(
                    to / f"completions_{step:05d}.parquet", trl_columns(step, stored, decode)
                )
            else:
                write_atomically(
                    to / f"{step}.jsonl", map(json_line, verl_rows(step, stored, decode))
                )
        console.note(
            f"wrote {count(written, 'completion')} of {count(len(files), 'step')} to {config.to}"
        )
    return {
        "run": address(run.path),
        "format": config.format,
        "to": address(to),
        "steps": list(files),
        "completions": written,
    }


def trl_columns(
    step: int, stored: Sequence[StoredGroup], decode: Callable[..., str]
) -> dict[str, list[Any]]:
    """Column -> one value a completion, in TRL's order."""
    rows = [
        {
            "step": step,
            "prompt": decode(entry.group.prompt_of(i), skip_special_tokens=False),
            "completion": list(entry.group.completions[i].messages) or entry.group.texts[i],
            **_rewards(entry, i),
            **_extra(entry, i),
            "advantage": None if entry.advantages is None else entry.advantages[i],
        }
        for entry in stored
        for i in range(entry.group.size)
    ]
    names = dict.fromkeys(name for row in rows for name in row if name != "advantage")
    return {name: [row.get(name) for row in rows] for name in [*names, "advantage"]}


def verl_rows(
    step: int, stored: Sequence[StoredGroup], decode: Callable[..., str]
) -> list[dict[str, Any]]:
    """A row a completion."""
    return [
        {
            "input": decode(entry.group.prompt_of(i), skip_special_tokens=False),
            "output": entry.group.texts[i],
            "gts": ground_truth(entry.group.example.columns),
            "score": entry.group.rewards[i],
            "step": step,
            **_rewards(entry, i),
            **_extra(entry, i),
        }
        for entry in stored
        for i in range(entry.group.size)
    ]


def _rewards(entry: StoredGroup, i: int) -> dict[str, Any]:
    return {name: values[i] for name, values in entry.group.reward_components.items()}


_COLUMNS = ("step", "prompt", "completion", "advantage", "input", "output", "gts", "score")


def _extra(entry: StoredGroup, i: int) -> dict[str, Any]:
    """Columns that rewards logged; a name that is a column already becomes `extra_<name>`."""
    taken = {*_COLUMNS, *entry.group.reward_components}
    return {
        f"extra_{name}" if name in taken else name: values[i]
        for name, values in entry.group.extra.items()
    }


def _write_trl(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {name: free_column(_numbers(values))[0] for name, values in columns.items()}
    with appearing(path) as temporary:
        try:
            pq.write_table(pa.table(arrays), temporary)
        except OSError as error:
            raise ShoalError(
                f"cannot write {path}: {error}; make room or choose another place"
            ) from error


def _numbers(values: Sequence[Any]) -> list[Any]:
    """Integers among floats as floats, so that they stay numbers."""
    has_float = any(isinstance(value, float) for value in values)
    return [float(value) if has_float and type(value) is int else value for value in values]
