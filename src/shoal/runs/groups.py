"""Groups on disk: one parquet file a step, one row a completion, so that pandas and polars need no
unpacking.

    df.groupby(["step", "group"])["reward"].mean()          df[df.text.str.contains("boxed")]

    step version row group completion purpose subset   numbers and names; `group` is the place in
                                                       the file
    prompt prompt_ids                                  messages as JSON text
    column/<name> weight/<name>                        the data's columns, the rewards' weights
    text token_ids logprobs stop_reason                the completion, one entry a token in the
                                                       lists
    reward component/<name> valid correct advantage    NaN is null
    loss_mask versions support_ids                     null where every token was sampled, from
                                                       `version`, from all
    trainer_logprobs extra/<name>                      null where the completion was not trained on
    messages own_prompt_ids                            of rollouts with turns: what followed the
                                                       prompt, as JSON text; its prompt where an
                                                       environment began it differently
    branches                                           what follows other prompts, as JSON text

`column/*` and `extra/*` are text, numbers or booleans where all values are of that kind, else JSON
text. What a group's completions share stands in each of its rows: for prompts four times as long as
their completions, 16 to a group, that costs 1% of the file. A row a group is as small, and holds
lists of lists, which each of the lines above must explode.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shoal.files import appearing, writing
from shoal.records import Branch, Completion, Example, Group, Purpose, ShoalError, StopReason
from shoal.runs.lines import json_ready

if TYPE_CHECKING:
    import pyarrow as pa


TokenLogprobs: TypeAlias = "Mapping[tuple[int, int], np.ndarray]"
"""(group, completion) -> float32[T], the trainer's log-probs; a completion that was not trained on
is absent."""


Advantages: TypeAlias = "Sequence[Any] | None"
"""By group, an array [G]; None for a group that no update used."""


_NOTES = b"shoal"
"""The key of the file's own metadata: which columns hold JSON text."""


_BY_TOKEN = {
    "token_ids": np.int32,
    "logprobs": np.float32,
    "loss_mask": bool,
    "versions": np.int32,
    "trainer_logprobs": np.float32,
}


@dataclass(frozen=True)
class StoredGroup:
    """A group read from disk, with what was stored beside it."""

    group: Group
    advantages: np.ndarray | None  # float64[G]; None where no update used the group
    token_arrays: tuple[
        Mapping[str, np.ndarray], ...
    ]  # by completion: name -> float32[T]; empty where not trained on


def groups_file(purpose: Purpose, subset: str, step: int) -> str:
    """The name of the file of a step's groups: `step_000012.parquet`, or `evaluate_<data
    set>_000012.parquet`."""
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in f"{purpose.value}_{subset}")
    return f"{'step' if purpose is Purpose.TRAIN else name}_{step:06d}.parquet"


def stored_step(purpose: Purpose, step: int) -> int:
    """The step as metrics, files and messages count it: from 1 in training, while `Group.step`, the
    address of random numbers, counts from 0. Of an evaluation, the version that it evaluates."""
    return step + (purpose is Purpose.TRAIN)


# ---- writing


def write_file(
    path: Path,
    groups: Sequence[Group],
    advantages: Advantages = None,
    logprobs: TokenLogprobs | None = None,
) -> None:
    """Writes groups to a parquet file that appears whole or not at all.

    ShoalError if it cannot be written, ValueError where lengths differ."""
    import pyarrow.parquet as pq

    table, floats = to_table(groups, advantages, logprobs), ("logprobs", "trainer_logprobs")
    dictionaries = [name for name in table.column_names if name not in (*floats, "text")]
    dictionaries += [f"{name}.list.element" for name in ("token_ids", "prompt_ids")]
    with appearing(path) as temporary, writing(path), temporary.open("wb") as file:
        # Log-probs hardly repeat: a dictionary of them takes twice the time. Split by byte the file
        # is 7% smaller.
        options: dict[str, Any] = {
            "use_dictionary": dictionaries,
            "use_byte_stream_split": [f"{name}.list.element" for name in floats],
        }
        pq.write_table(table, file, compression="zstd", write_page_checksum=True, **options)
        file.flush()
        os.fsync(file.fileno())


def to_table(
    groups: Sequence[Group], advantages: Advantages = None, logprobs: TokenLogprobs | None = None
) -> pa.Table:
    """The groups as an Arrow table. Arrays by token are concatenated; no token becomes a Python
    object."""
    import pyarrow as pa

    advantages = [None] * len(groups) if advantages is None else advantages
    _check_lengths(groups, advantages, logprobs or {})
    group_of = np.repeat(np.arange(len(groups)), [group.size for group in groups])
    place_of = np.array([place for group in groups for place in range(group.size)], np.int64)
    completions = [completion for group in groups for completion in group.completions]
    table = {
        name: column.take(pa.array(group_of)) for name, column in _group_columns(groups).items()
    }
    table |= {"group": pa.array(group_of), "completion": pa.array(place_of)}
    table["text"] = pa.array(
        [encodable(text) for group in groups for text in group.texts], pa.string()
    )
    table["token_ids"] = _lists([c.token_ids for c in completions], np.int32)
    table["logprobs"] = _lists([c.logprobs for c in completions], np.float32)
    table["stop_reason"] = pa.array([c.stop_reason.value for c in completions], pa.string())
    table["reward"] = _numbers([group.rewards for group in groups], groups)
    for name in _names(group.reward_components for group in groups):
        table[f"component/{name}"] = _numbers(
            [group.reward_components.get(name) for group in groups], groups
        )
    table["valid"] = pa.array(
        [bool(value) for group in groups for value in group.valid], pa.bool_()
    )
    table["correct"] = pa.array(
        [
            None if group.correct is None else bool(group.correct[i])
            for group in groups
            for i in range(group.size)
        ],
        pa.bool_(),
    )
    table["advantage"] = _numbers(advantages, groups)
    table["loss_mask"] = _lists(
        [None if np.all(c.loss_mask) else c.loss_mask for c in completions], bool
    )
    table["versions"] = _lists(
        [
            c.versions if np.any(c.versions != group.version) else None
            for group in groups
            for c in group.completions
        ],
        np.int32,
    )
    keys = zip(group_of.tolist(), place_of.tolist(), strict=True)
    table["trainer_logprobs"] = _lists([(logprobs or {}).get(key) for key in keys], np.float32)
    table["support_ids"] = _nested_lists([c.extra.get("support_ids") for c in completions])
    as_json = _add_free_columns(
        table,
        {
            f"extra/{name}": [
                value for group in groups for value in group.extra.get(name, [None] * group.size)
            ]
            for name in _names(group.extra for group in groups)
        },
    )
    if any(c.messages for c in completions):
        as_json += _add_free_columns(table, {"messages": [list(c.messages) for c in completions]})
    if any(c.prompt_ids is not None for c in completions):
        table["own_prompt_ids"] = _lists([c.prompt_ids for c in completions], np.int32)
    if any(c.branches for c in completions):
        as_json += _add_free_columns(
            table, {"branches": [list(map(_branch, c.branches)) for c in completions]}
        )
    shared = {"prompt": [group.example.prompt for group in groups]} | {
        f"column/{name}": [group.example.columns.get(name) for group in groups]
        for name in _names(group.example.columns for group in groups)
    }
    as_json += _add_free_columns(table, shared, pa.array(group_of))
    return pa.table(table, metadata={_NOTES: json.dumps({"json": as_json})})


def _group_columns(groups: Sequence[Group]) -> dict[str, pa.Array]:
    """What the completions of a group share and has one type in every file, a value a group."""
    import pyarrow as pa

    numbers = {
        "step": [stored_step(group.purpose, group.step) for group in groups],
        "version": [group.version for group in groups],
        "row": [group.example.row for group in groups],
    }
    texts = {
        "purpose": [group.purpose.value for group in groups],
        "subset": [encodable(group.subset) for group in groups],
    }
    weights = {
        f"weight/{name}": [group.reward_weights.get(name) for group in groups]
        for name in _names(group.reward_weights for group in groups)
    }
    return (
        {name: pa.array(values, pa.int64()) for name, values in numbers.items()}
        | {name: pa.array(values, pa.string()) for name, values in texts.items()}
        | {name: pa.array(values, pa.float64()) for name, values in weights.items()}
        | {"prompt_ids": _lists([group.prompt_ids for group in groups], np.int32)}
    )


def _check_lengths(
    groups: Sequence[Group], advantages: Sequence[Any], logprobs: TokenLogprobs
) -> None:
    sizes = [
        group.size if values is None else len(values)
        for group, values in zip(groups, advantages, strict=True)
    ]
    if sizes != [group.size for group in groups]:
        raise ValueError("advantages: expected one for each completion of each group")
    tokens = {
        (p, g): completion
        for p, group in enumerate(groups)
        for g, completion in enumerate(group.completions)
    }
    for name, arrays in (
        ("trainer_logprobs", logprobs),
        ("logprobs", {key: c.logprobs for key, c in tokens.items()}),
    ):
        for key, values in arrays.items():
            if len(values) != len(tokens[key]):
                raise ValueError(
                    f"{name} of (group, completion) {key}: expected one a token, "
                    f"{len(tokens[key])}, "
                    f"got {len(values)}"
                )


def _names(mappings: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _lists(arrays: Sequence[np.ndarray | None], kind: Any) -> pa.ListArray:
    """A list a row, null for None."""
    import pyarrow as pa

    return pa.array(arrays, pa.list_(pa.from_numpy_dtype(kind)))


def _nested_lists(arrays: Sequence[np.ndarray | None]) -> pa.ListArray:
    """Of int32[T, K], padded with -1 at the end of each token's row: a list of T lists without the
    padding."""
    import pyarrow as pa

    present = [array for array in arrays if array is not None]
    counts = np.concatenate([np.zeros(1, int), *((array >= 0).sum(axis=1) for array in present)])
    values = np.concatenate([np.empty(0, np.int32), *(array[array >= 0] for array in present)])
    tokens = pa.ListArray.from_arrays(
        pa.array(np.cumsum(counts), pa.int32()), pa.array(values, pa.int32())
    )
    offsets = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)])
    missing = pa.array([array is None for array in arrays], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), tokens, mask=missing)


def _numbers(values: Sequence[Any], groups: Sequence[Group]) -> pa.Array:
    """A number a completion from an array a group; NaN, and every completion of a group without an
    array, is null."""
    import pyarrow as pa

    parts = [
        np.full(group.size, np.nan) if of_group is None else np.asarray(of_group, np.float64)
        for of_group, group in zip(values, groups, strict=True)
    ]
    flat = np.concatenate(parts) if parts else np.empty(0)
    return pa.array(flat, mask=np.isnan(flat))


def _add_free_columns(
    table: dict[str, pa.Array], columns: Mapping[str, list[Any]], rows: pa.Array | None = None
) -> list[str]:
    """Adds columns with whatever values the data has; returns the names of those that hold JSON
    text."""
    as_json = []
    for name, values in columns.items():
        column, is_json = free_column(values)
        table[name] = column if rows is None else column.take(rows)
        as_json += [name] if is_json else []
    return as_json


def free_column(values: Sequence[Any]) -> tuple[pa.Array, bool]:
    """Values of any kind as a column: texts, numbers or booleans where all are of that kind, else,
    and then True, JSON text."""
    import pyarrow as pa

    types = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    ready = [json_ready(value) for value in values]
    kinds = {type(value) for value in ready if value is not None} or {str}
    is_huge = kinds == {int} and any(
        not -(2**63) <= value < 2**63 for value in ready if value is not None
    )
    is_json = len(kinds) > 1 or is_huge or not kinds <= types.keys()
    if is_json:
        ready = [
            value if value is None else json.dumps(value, ensure_ascii=False) for value in ready
        ]
        kinds = {str}
    return pa.array([encodable(value) for value in ready], types[kinds.pop()]), is_json


def encodable(value: Any) -> Any:
    """A text with lone surrogates, which UTF-8 cannot hold, as escapes; any other value as it
    is."""
    return (
        value.encode("utf-8", "backslashreplace").decode("utf-8")
        if isinstance(value, str)
        else value
    )


# ---- reading


def read_file(path: Path) -> list[StoredGroup]:
    """The groups of one file, bit for bit those that were written; ShoalError, naming it, where it
    is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Of one thread: pyarrow's own threads, which `read_table` starts, may abort a process that
        # ends soon after.
        file = pq.ParquetFile(pa.BufferReader(path.read_bytes()), page_checksum_verification=True)
        return from_table(file.read(use_threads=False))
    except (
        pa.ArrowException,
        OSError,
        AttributeError,
        KeyError,
        OverflowError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ShoalError(
            f"{path} is damaged ({reason}): restore it from a backup, or leave out this step"
        ) from error


def from_table(table: pa.Table) -> list[StoredGroup]:
    """The groups of a table that `to_table` made; KeyError, TypeError or ValueError for another
    one."""
    as_json = json.loads((table.schema.metadata or {})[_NOTES])["json"]
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        columns[name] = (
            _arrays(table[name], _BY_TOKEN[name]) if name in _BY_TOKEN else table[name].to_pylist()
        )
        if name in as_json:
            columns[name] = [
                value if value is None else json.loads(value) for value in columns[name]
            ]
    starts = [row for row, place in enumerate(columns["completion"]) if place == 0]
    return [
        _stored_group(number, {name: values[start:stop] for name, values in columns.items()})
        for number, (start, stop) in enumerate(itertools.pairwise([*starts, table.num_rows]))
    ]


def _stored_group(number: int, rows: Mapping[str, list[Any]]) -> StoredGroup:
    """One group from its rows, by column."""
    first = {name: values[0] for name, values in rows.items()}
    completions = tuple(
        _completion(number, {name: values[index] for name, values in rows.items()})
        for index in range(len(rows["group"]))
    )
    group = Group(
        purpose=Purpose(first["purpose"]),
        step=first["step"] - stored_step(Purpose(first["purpose"]), 0),
        version=first["version"],
        example=Example(first["row"], first["prompt"], _under(first, "column/")),
        prompt_ids=np.array(first["prompt_ids"], np.int32),
        completions=completions,
        texts=tuple(rows["text"]),
        rewards=_floats(rows["reward"]),
        reward_components={
            name: _floats(values) for name, values in _under(rows, "component/").items()
        },
        valid=np.array(rows["valid"], bool),
        correct=None if None in rows["correct"] else np.array(rows["correct"], bool),
        subset=first["subset"],
        extra=_under(rows, "extra/"),
        reward_weights={
            name: value for name, value in _under(first, "weight/").items() if value is not None
        },
    )
    trained = [
        {} if values is None else {"trainer_logprobs": values}
        for values in rows["trainer_logprobs"]
    ]
    return StoredGroup(
        group, None if None in rows["advantage"] else _floats(rows["advantage"]), tuple(trained)
    )


def _completion(number: int, row: Mapping[str, Any]) -> Completion:
    size = len(row["token_ids"])
    if wrong := [name for name in _BY_TOKEN if row[name] is not None and len(row[name]) != size]:
        raise ValueError(
            f"completion {row['completion']}: {size} tokens, but {wrong[0]} has "
            f"{len(row[wrong[0]])} "
            "entries"
        )
    mask, versions, kept, own = (
        row["loss_mask"],
        row["versions"],
        row["support_ids"],
        row.get("own_prompt_ids"),
    )
    return Completion(
        request_id=number,
        index=row["completion"],
        token_ids=row["token_ids"],
        logprobs=row["logprobs"],
        loss_mask=np.ones(size, bool) if mask is None else mask,
        versions=np.full(size, row["version"], np.int32) if versions is None else versions,
        stop_reason=StopReason(row["stop_reason"]),
        extra={} if kept is None else {"support_ids": _padded(kept)},
        messages=tuple(row.get("messages") or ()),
        prompt_ids=None if own is None else np.array(own, np.int32),
        branches=tuple(
            Branch(one["start"], np.array(one["prompt_ids"], np.int32))
            for one in row.get("branches") or ()
        ),
    )


def _branch(branch: Branch) -> dict[str, Any]:
    return {"start": branch.start, "prompt_ids": branch.prompt_ids.tolist()}


def _under(columns: Mapping[str, Any], head: str) -> dict[str, Any]:
    return {
        name.removeprefix(head): values for name, values in columns.items() if name.startswith(head)
    }


def _arrays(column: pa.ChunkedArray, kind: Any) -> list[np.ndarray | None]:
    """An array a row of a column of lists, None where it is null."""
    return [
        row.values.to_numpy(zero_copy_only=False).astype(kind, copy=False) if row.is_valid else None
        for row in column
    ]


def _padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """int32[T, K] with -1 after the end of each shorter row."""
    width = max(map(len, rows), default=0)
    return np.array([[*row, *[-1] * (width - len(row))] for row in rows], np.int32).reshape(
        len(rows), width
    )


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def group_record(stored: StoredGroup) -> dict[str, Any]:
    """A stored group as JSON: the prompt once, then its completions. Fields that hold for every
    token are left out."""
    group, version = stored.group, stored.group.version
    completions = []
    for i, completion in enumerate(group.completions):
        record: dict[str, Any] = {
            "text": group.texts[i],
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "stop_reason": completion.stop_reason,
            "reward": group.rewards[i],
            "components": {name: values[i] for name, values in group.reward_components.items()},
            "valid": group.valid[i],
        }
        optional = {
            "correct": None if group.correct is None else group.correct[i],
            "advantage": None if stored.advantages is None else stored.advantages[i],
            "loss_mask": None if np.all(completion.loss_mask) else completion.loss_mask,
            "versions": completion.versions if np.any(completion.versions != version) else None,
            "messages": list(completion.messages) or None,
            "own_prompt_ids": completion.prompt_ids,
            "branches": list(map(_branch, completion.branches)) or None,
            "extra": {name: values[i] for name, values in group.extra.items()} or None,
        }
        record |= {name: value for name, value in optional.items() if value is not None}
        if (kept := completion.extra.get("support_ids")) is not None:
            record["support_ids"] = [row[row >= 0] for row in kept]
        completions.append(record | dict(stored.token_arrays[i]))
    return json_ready(
        {
            "purpose": group.purpose,
            "step": stored_step(group.purpose, group.step),
            "version": version,
            "subset": group.subset,
            "row": group.example.row,
            "prompt": group.example.prompt,
            "prompt_ids": group.prompt_ids,
            "columns": group.example.columns,
            **({"reward_weights": group.reward_weights} if group.reward_weights else {}),
            "completions": completions,
        }
    )
