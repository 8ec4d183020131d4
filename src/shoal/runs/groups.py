"""Groups on disk: one parquet file per step, one row per completion, so that pandas and polars can
use it without unpacking.

    df.groupby(["step", "group"])["reward"].mean()          df[df.text.str.contains("boxed")]

    step version row group completion purpose subset   numbers and names; `group` is the number of
                                                       the group in the file
    prompt prompt_ids                                  messages as JSON text
    column/<name> weight/<name>                        the data's columns, the rewards' weights
    text token_ids logprobs stop_reason                the completion, one entry a token in the
                                                       lists
    reward component/<name> valid correct advantage    NaN is null
    loss_mask versions support_ids                     null where every token was sampled, from
                                                       `version`, from all
    trainer_logprobs extra/<name>                      null where the completion was not trained on
    experts prompt_experts branch_experts              of tokens, where they are recorded: the bytes
                                                       of [tokens, layers, k] numbers, whose sizes
                                                       the file's metadata have; those of a prompt
                                                       in the first row that has it
    messages own_prompt_ids                            of rollouts with turns: what followed the
                                                       prompt, as JSON text; its prompt where an
                                                       environment began it differently
    branches                                           what follows other prompts, as JSON text
    turn_rewards turn_advantages                       where rewards, or advantages, are by turn:
                                                       one entry a turn of the model

`column/*` and `extra/*` are text, numbers or booleans if all values have that type, else JSON text.
Values that a group's completions share are repeated in each row of the group: for prompts four
times as long as their completions, 16 to a group, that costs 1% of the file. One row per group
would be as small, but would hold lists of lists, which each of the lines above would have to
explode.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shoal.files import atomic_write, explain_write_errors
from shoal.records import Branch, Completion, Example, Group, Purpose, ShoalError, StopReason
from shoal.runs.lines import json_ready

if TYPE_CHECKING:
    import pyarrow as pa


TokenLogprobs: TypeAlias = "Mapping[tuple[int, int], np.ndarray]"
"""(number of the group, index of the completion) -> float32[T], the trainer's log-probs. A
completion that was not trained on is absent."""


Advantages: TypeAlias = "Sequence[Any] | None"
"""For each group an array [G], or None if no update used the group; None for all if there are
none."""


TurnAdvantages: TypeAlias = "Sequence[Sequence[np.ndarray]]"
"""For each group the advantages of the turns of each completion, float64[number of turns]; empty
if advantages are of whole completions."""


_NOTES = b"shoal"
"""The key of the parquet file's own metadata, which say which columns hold JSON text."""


_BY_TOKEN = {
    "token_ids": np.int32,
    "logprobs": np.float32,
    "loss_mask": bool,
    "versions": np.int32,
    "trainer_logprobs": np.float32,
}


EXPERT_COLUMNS = ("experts", "prompt_experts", "branch_experts")
"""Columns with the bytes of the experts of tokens (`_add_experts`)."""

_BY_TURN = ("turn_rewards", "turn_advantages")
"""Columns with one float64 for each turn. A file whose rewards and advantages are of whole
completions does not have them."""


@dataclass(frozen=True)
class StoredGroup:
    """A group read from disk, with the advantages and arrays that were stored with it."""

    group: Group
    advantages: np.ndarray | None  # float64[G]; None if no update used the group
    # for each completion: name -> float32[T]; {} if it was not trained on
    token_arrays: tuple[Mapping[str, np.ndarray], ...] = field(repr=False)
    # of each completion, float64[number of turns]; () if advantages are of whole completions
    turn_advantages: tuple[np.ndarray, ...] = ()
    discarded: bool = False  # True if dynamic sampling discarded it, so that no update used it


DISCARDED = "discarded"
"""Stands in the column `subset` of training groups that dynamic sampling discarded, so that no
update used them. The names of their files begin with it."""


def groups_file(purpose: Purpose, subset: str, step: int, discarded: bool = False) -> str:
    """Returns the name of the file of a step's groups: `step_000012.parquet`, or with `discarded`
    `discarded_000012.parquet`; of an evaluation `evaluate_<data set>_000012.parquet`. `step`: as
    `stored_step` counts it; `subset`: the data set, in whose name all but letters, digits, - and _
    becomes _."""
    name = DISCARDED if discarded else "step"
    if purpose is not Purpose.TRAIN:
        name = ""
        for character in f"{purpose.value}_{subset}":
            is_plain = character.isalnum() or character in "-_"
            name += character if is_plain else "_"
    return f"{name}_{step:06d}.parquet"


def stored_step(purpose: Purpose, step: int) -> int:
    """Returns the step as metrics, files and messages count it. In training that is from 1, while
    `Group.step`, which addresses random numbers, counts from 0. For an evaluation it is the version
    that is evaluated."""
    return step + (purpose is Purpose.TRAIN)  # True counts as 1


# ---- writing


def write_file(
    path: Path,
    groups: Sequence[Group],
    advantages: Advantages = None,
    logprobs: TokenLogprobs | None = None,
    turn_advantages: TurnAdvantages = (),
    discarded: bool = False,
) -> None:
    """Writes groups to a parquet file that appears whole or not at all, and waits until it is on
    the disk; makes its folder if there is none, and replaces an existing file. `advantages`,
    `logprobs`, `turn_advantages`: the trainer's, as their types say; absent for an evaluation.
    `discarded`: True marks the groups as those that dynamic sampling discarded.

    ShoalError if the file cannot be written; ValueError if there is not one advantage per
    completion and one log-prob per token."""
    import pyarrow.parquet as pq

    table = to_table(groups, advantages, logprobs, turn_advantages, discarded)
    # Log-probs hardly repeat: a dictionary of them takes twice the time. Split by byte, they make
    # the file 7% smaller.
    dictionaries = set(table.column_names) - {"logprobs", "trainer_logprobs", "text"}
    dictionaries |= {"token_ids.list.element", "prompt_ids.list.element"}
    with atomic_write(path) as temporary, explain_write_errors(path), temporary.open("wb") as file:
        options: dict[str, Any] = {
            "use_dictionary": sorted(dictionaries),
            "use_byte_stream_split": [
                "logprobs.list.element",
                "trainer_logprobs.list.element",
            ],
        }
        pq.write_table(table, file, compression="zstd", write_page_checksum=True, **options)
        file.flush()
        os.fsync(file.fileno())


def to_table(
    groups: Sequence[Group],
    advantages: Advantages = None,
    logprobs: TokenLogprobs | None = None,
    turn_advantages: TurnAdvantages = (),
    discarded: bool = False,
) -> pa.Table:
    """Returns the groups as an Arrow table with one row per completion, in the columns that the
    head of this module lists; `discarded` as in `write_file`. ValueError if there is not one
    advantage per completion and one log-prob per token."""
    import pyarrow as pa

    if advantages is None:
        advantages = [None] * len(groups)
    logprobs = logprobs or {}
    _check_lengths(groups, advantages, logprobs)
    group_rows: list[int] = []  # the number of the group of each row
    completions: list[Completion] = []
    columns: dict[str, list[Any]] = {name: [] for name in _OF_COMPLETION}
    for number, group in enumerate(groups):
        for index, completion in enumerate(group.completions):
            # What the group or its tokens say already is stored as null.
            has_mask = not np.all(completion.loss_mask)
            has_versions = bool(np.any(completion.versions != group.version))
            correct = None if group.correct is None else bool(group.correct[index])
            group_rows.append(number)
            completions.append(completion)
            columns["completion"].append(index)
            columns["text"].append(encodable(group.texts[index]))
            columns["token_ids"].append(completion.token_ids)
            columns["logprobs"].append(completion.logprobs)
            columns["stop_reason"].append(completion.stop_reason.value)
            columns["valid"].append(bool(group.valid[index]))
            columns["correct"].append(correct)
            columns["loss_mask"].append(completion.loss_mask if has_mask else None)
            columns["versions"].append(completion.versions if has_versions else None)
            columns["trainer_logprobs"].append(logprobs.get((number, index)))
            columns["support_ids"].append(completion.extra.get("support_ids"))

    group_of = pa.array(group_rows, pa.int64())
    table = {name: column.take(group_of) for name, column in _group_columns(groups).items()}
    table["group"] = group_of
    if discarded:
        table["subset"] = pa.repeat(pa.scalar(DISCARDED), len(group_rows))
    table["completion"] = pa.array(columns["completion"], pa.int64())
    table["text"] = pa.array(columns["text"], pa.string())
    table["token_ids"] = _lists(columns["token_ids"], np.int32)
    table["logprobs"] = _lists(columns["logprobs"], np.float32)
    table["stop_reason"] = pa.array(columns["stop_reason"], pa.string())
    table["reward"] = _numbers([group.rewards for group in groups], groups)
    for name in _names([group.reward_components for group in groups]):
        values = [group.reward_components.get(name) for group in groups]
        table[f"component/{name}"] = _numbers(values, groups)
    table["valid"] = pa.array(columns["valid"], pa.bool_())
    table["correct"] = pa.array(columns["correct"], pa.bool_())
    table["advantage"] = _numbers(advantages, groups)
    table["loss_mask"] = _lists(columns["loss_mask"], bool)
    table["versions"] = _lists(columns["versions"], np.int32)
    table["trainer_logprobs"] = _lists(columns["trainer_logprobs"], np.float32)
    table["support_ids"] = _nested_lists(columns["support_ids"])

    as_json = []  # names of the columns that hold JSON text
    extras = {}
    for name in _names([group.extra for group in groups]):
        column = extras[f"extra/{name}"] = []
        for group in groups:
            column.extend(group.extra.get(name, [None] * group.size))
    as_json += _add_free_columns(table, extras)
    as_json += _add_turns(table, completions)
    turn_rewards: list[np.ndarray | None] = []
    for group in groups:
        turn_rewards.extend(group.turn_rewards or [None] * group.size)
    if any(rewards is not None for rewards in turn_rewards):
        table["turn_rewards"] = _lists(turn_rewards, np.float64)
    if turn_advantages:
        flat = [of_completion for of_group in turn_advantages for of_completion in of_group]
        table["turn_advantages"] = _lists(flat, np.float64)
    notes = {"json": as_json, **_add_experts(table, groups)}
    shared: dict[str, list[Any]] = {"prompt": []}
    for group in groups:
        shared["prompt"].append(group.example.prompt)
    for name in _names([group.example.columns for group in groups]):
        shared[f"column/{name}"] = [group.example.columns.get(name) for group in groups]
    as_json += _add_free_columns(table, shared, group_of)
    return pa.table(table, metadata={_NOTES: json.dumps(notes)})


_OF_COMPLETION = (
    "completion",
    "text",
    "token_ids",
    "logprobs",
    "stop_reason",
    "valid",
    "correct",
    "loss_mask",
    "versions",
    "trainer_logprobs",
    "support_ids",
)


def _add_turns(table: dict[str, pa.Array], completions: Sequence[Completion]) -> list[str]:
    """Adds the columns of rollouts with turns (`messages`, `own_prompt_ids`, `branches`), each only
    if a completion has a value for it. Returns the names of the added columns that hold JSON
    text."""
    messages = []
    own_prompts = []
    branches = []
    for completion in completions:
        messages.append(list(completion.messages))
        own_prompts.append(completion.prompt_ids)
        branches.append(list(map(_branch, completion.branches)))
    as_json = []
    if any(messages):
        as_json += _add_free_columns(table, {"messages": messages})
    if any(prompt_ids is not None for prompt_ids in own_prompts):
        table["own_prompt_ids"] = _lists(own_prompts, np.int32)
    if any(branches):
        as_json += _add_free_columns(table, {"branches": branches})
    return as_json


def _add_experts(table: dict[str, pa.Array], groups: Sequence[Group]) -> dict[str, Any]:
    """Adds the columns of recorded experts, if a completion has any, and returns what the file's
    metadata say of them: `experts`, the number of layers, of experts of a token, and the type."""
    import pyarrow as pa

    sizes: list[Any] = []
    columns: dict[str, list[Any]] = {name: [] for name in EXPERT_COLUMNS}

    def stored(experts: np.ndarray | None) -> bytes | None:
        """Returns the bytes of an array of experts, and notes its sizes."""
        if experts is None:
            return None
        sizes[:] = [*experts.shape[1:], experts.dtype.name]
        return experts.tobytes()

    for group in groups:
        known: set[bytes] = set()  # prompts of the group whose experts are in an earlier row
        for number, completion in enumerate(group.completions):
            prompt = group.prompt_of(number).tobytes()
            of_prompt = None if prompt in known else stored(completion.prompt_experts)
            if of_prompt is not None:
                known.add(prompt)
            columns["experts"].append(stored(completion.extra.get("experts")))
            columns["prompt_experts"].append(of_prompt)
            columns["branch_experts"].append(
                [stored(branch.experts) for branch in completion.branches] or None
            )
    if not sizes:
        return {}
    for name, values in columns.items():
        is_list = name == "branch_experts"
        if is_list and not any(values):
            continue
        kind = pa.list_(pa.large_binary()) if is_list else pa.large_binary()
        table[name] = pa.array(values, kind)
    return {"experts": sizes}


def _group_columns(groups: Sequence[Group]) -> dict[str, pa.Array]:
    """Returns the columns of what a group's completions share, with one value per group: names,
    numbers, weights of the rewards, tokens of the prompt. Prompt and data columns, whose types
    differ from file to file, are not among them (`_add_free_columns`)."""
    import pyarrow as pa

    steps = []
    versions = []
    rows = []
    purposes = []
    subsets = []
    prompts = []
    for group in groups:
        steps.append(stored_step(group.purpose, group.step))
        versions.append(group.version)
        rows.append(group.example.row)
        purposes.append(group.purpose.value)
        subsets.append(encodable(group.subset))
        prompts.append(group.prompt_ids)
    columns = {
        "step": pa.array(steps, pa.int64()),
        "version": pa.array(versions, pa.int64()),
        "row": pa.array(rows, pa.int64()),
        "purpose": pa.array(purposes, pa.string()),
        "subset": pa.array(subsets, pa.string()),
    }
    for name in _names([group.reward_weights for group in groups]):
        weights = [group.reward_weights.get(name) for group in groups]
        columns[f"weight/{name}"] = pa.array(weights, pa.float64())
    columns["prompt_ids"] = _lists(prompts, np.int32)
    return columns


def _check_lengths(
    groups: Sequence[Group], advantages: Sequence[Any], logprobs: TokenLogprobs
) -> None:
    """Raises ValueError if a group has advantages, but not one per completion, or if a completion
    has not one log-prob per token: the sampler's, and the trainer's if it has them."""
    for group, of_group in zip(groups, advantages, strict=True):
        if of_group is not None and len(of_group) != group.size:
            raise ValueError("advantages: expected one for each completion of each group")
    for (number, index), values in logprobs.items():
        completion = groups[number].completions[index]
        _check_one_a_token("trainer_logprobs", number, index, values, completion)
    for number, group in enumerate(groups):
        for index, completion in enumerate(group.completions):
            _check_one_a_token("logprobs", number, index, completion.logprobs, completion)


def _check_one_a_token(
    name: str, number: int, index: int, values: np.ndarray, completion: Completion
) -> None:
    """Raises ValueError if `values` has not one entry per token of the completion. The error names
    them (`name`), the group (`number`) and the completion (`index`)."""
    if len(values) != len(completion):
        raise ValueError(
            f"{name} of (group, completion) {(number, index)}: expected one a token, "
            f"{len(completion)}, got {len(values)}"
        )


def _names(mappings: Iterable[Iterable[str]]) -> list[str]:
    """Returns the names in all mappings, each once, in order of their first appearance."""
    return list(dict.fromkeys(itertools.chain.from_iterable(mappings)))


def _lists(arrays: Sequence[np.ndarray | None], dtype: Any) -> pa.ListArray:
    """Returns a column with one list per row, null for None. `dtype`: numpy's type of the
    entries."""
    import pyarrow as pa

    return pa.array(arrays, pa.list_(pa.from_numpy_dtype(dtype)))


def _nested_lists(arrays: Sequence[np.ndarray | None]) -> pa.ListArray:
    """Returns a column of nested lists: one entry per array int32[T, K], with T lists of at most K
    numbers, because the -1 that pad each token's list at its end are left out; null for None.

    >>> _nested_lists([np.array([[5, 7], [6, -1]]), None]).to_pylist()
    [[[5, 7], [6]], None]
    """
    import pyarrow as pa

    # Arrow stores lists as one flat array and the positions at which each list ends.
    counts = [np.zeros(1, int)]  # length of each token's list, after a leading 0
    values = [np.empty(0, np.int32)]
    sizes = [0]  # number of tokens of each array, after a leading 0
    is_missing = []
    for array in arrays:
        is_missing.append(array is None)
        sizes.append(0 if array is None else len(array))
        if array is not None:
            counts.append((array >= 0).sum(axis=1))
            values.append(array[array >= 0])
    token_ends = pa.array(np.cumsum(np.concatenate(counts)), pa.int32())
    tokens = pa.ListArray.from_arrays(token_ends, pa.array(np.concatenate(values), pa.int32()))
    array_ends = pa.array(np.cumsum(sizes), pa.int32())
    return pa.ListArray.from_arrays(array_ends, tokens, mask=pa.array(is_missing, pa.bool_()))


def _numbers(values: Sequence[Any], groups: Sequence[Group]) -> pa.Array:
    """Returns a column with one number per completion. `values`: for each group an array with one
    entry per completion, or None. NaN becomes null, and None a null for each completion."""
    import pyarrow as pa

    parts = [np.empty(0)]
    for of_group, group in zip(values, groups, strict=True):
        if of_group is None:
            parts.append(np.full(group.size, np.nan))
        else:
            parts.append(np.asarray(of_group, np.float64))
    flat = np.concatenate(parts)
    return pa.array(flat, mask=np.isnan(flat))


def _add_free_columns(
    table: dict[str, pa.Array], columns: Mapping[str, list[Any]], rows: pa.Array | None = None
) -> list[str]:
    """Adds columns whose values may be of any type (`free_column`). Returns the names of those that
    hold JSON text.

    `columns`: name -> values, one per row of the table, or, with `rows`, one per group; `rows` is
    then the group's number of each row."""
    as_json = []
    for name, values in columns.items():
        column, is_json = free_column(values)
        if rows is not None:
            column = column.take(rows)
        table[name] = column
        if is_json:
            as_json.append(name)
    return as_json


def free_column(values: Sequence[Any]) -> tuple[pa.Array, bool]:
    """Returns (column, is_json) for values of any type. If all of them, except None, are texts,
    integers of 64 bits, floats or booleans, the column has that type. Otherwise, also if integers
    and floats are mixed, it holds each value as JSON text, and `is_json` is True. None, NaN and
    infinity are null; without any other value the column is one of texts."""
    import pyarrow as pa

    arrow_types = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    ready = [json_ready(value) for value in values]
    types = {type(value) for value in ready} - {type(None)}
    if not types:  # all values are None
        types = {str}
    is_json = len(types) > 1 or not types <= arrow_types.keys()
    if types == {int} and not _fit_int64(ready):
        is_json = True
    if is_json:
        types = {str}
        ready = [None if value is None else _json_text(value) for value in ready]
    return pa.array([encodable(value) for value in ready], arrow_types[types.pop()]), is_json


def _fit_int64(values: Sequence[int | None]) -> bool:
    """True if all integers fit into 64 bits; None always does."""
    for value in values:
        if value is not None and not -(2**63) <= value < 2**63:
            return False
    return True


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def encodable(value: Any) -> Any:
    """Returns a text with lone surrogates, which UTF-8 cannot hold, as escapes; returns any other
    value unchanged."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


# ---- reading


def read_file(path: Path) -> list[StoredGroup]:
    """Returns the groups of one file, bit for bit as they were written, all in memory. ShoalError,
    which names the file, if it is damaged or missing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Read with one thread: pyarrow's own threads, which `read_table` starts, may abort a
        # process that ends soon after.
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
    """Returns the groups of a table that `to_table` made, in the order in which they were given to
    it. KeyError, TypeError or ValueError if another program made the table."""
    notes = json.loads((table.schema.metadata or {})[_NOTES])
    as_json = notes["json"]
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        if name in _BY_TOKEN:
            columns[name] = _arrays(table[name], _BY_TOKEN[name])
            continue
        if name in _BY_TURN:
            columns[name] = _arrays(table[name], np.float64)
            continue
        values = table[name].to_pylist()
        if name in as_json:
            values = [None if value is None else json.loads(value) for value in values]
        if name in EXPERT_COLUMNS:
            values = [_experts(value, notes["experts"]) for value in values]
        columns[name] = values
    # Each group begins with the row of its completion 0.
    # `borders`: the row at which each group begins, and at the end the number of rows.
    borders = np.flatnonzero(np.array(columns["completion"]) == 0).tolist()
    borders.append(table.num_rows)
    groups = []
    for number, (start, end) in enumerate(itertools.pairwise(borders)):
        rows = {name: values[start:end] for name, values in columns.items()}
        groups.append(_stored_group(number, rows))
    return groups


def _stored_group(number: int, rows: Mapping[str, list[Any]]) -> StoredGroup:
    """Makes a group from its rows of the table (`rows`: column -> the values of these rows).
    `number`: of the group in its file, which becomes the `request_id` of its completions. What the
    completions share is that of the first row. `correct` and `advantages` are None if a row has
    none."""
    completions = []
    for index in range(len(rows["group"])):
        completions.append(_completion(number, _row(rows, index)))
    first = _row(rows, 0)
    purpose = Purpose(first["purpose"])
    components = {}
    for name, values in _under(rows, "component/").items():
        components[name] = _floats(values)
    weights = {}
    for name, weight in _under(first, "weight/").items():
        if weight is not None:
            weights[name] = weight
    correct = None
    if None not in rows["correct"]:
        correct = np.array(rows["correct"], bool)
    discarded = purpose is Purpose.TRAIN and first["subset"] == DISCARDED
    group = Group(
        purpose=purpose,
        step=first["step"] - stored_step(purpose, 0),  # `Group.step` of training counts from 0
        version=first["version"],
        example=Example(first["row"], first["prompt"], _under(first, "column/")),
        prompt_ids=np.array(first["prompt_ids"], np.int32),
        completions=tuple(completions),
        texts=tuple(rows["text"]),
        rewards=_floats(rows["reward"]),
        reward_components=components,
        valid=np.array(rows["valid"], bool),
        correct=correct,
        # Noise depends on this name, so a discarded group has the one that it was sampled under.
        subset="train" if discarded else first["subset"],
        extra=_under(rows, "extra/"),
        reward_weights=weights,
        turn_rewards=_of_turns(rows, "turn_rewards"),
    )
    advantages = None
    if None not in rows["advantage"]:
        advantages = _floats(rows["advantage"])
    token_arrays = []
    for logprobs in rows["trainer_logprobs"]:
        token_arrays.append({} if logprobs is None else {"trainer_logprobs": logprobs})
    turn_advantages = _of_turns(rows, "turn_advantages")
    return StoredGroup(group, advantages, tuple(token_arrays), turn_advantages, discarded)


def _of_turns(rows: Mapping[str, list[Any]], name: str) -> tuple[np.ndarray, ...]:
    """Returns a group's values by turn from its rows of the table, an array for each completion; ()
    if it has none."""
    values = rows.get(name, [None])
    return () if values[0] is None else tuple(values)


def _row(rows: Mapping[str, list[Any]], index: int) -> dict[str, Any]:
    """Returns one row as column -> value."""
    return {name: values[index] for name, values in rows.items()}


def _completion(request_id: int, row: Mapping[str, Any]) -> Completion:
    """Makes a completion from its row of the table. A loss mask that the file leaves out is all
    true, and versions that it leaves out are the group's. ValueError if an array has not one entry
    per token."""
    size = len(row["token_ids"])
    for name in _BY_TOKEN:
        if row[name] is not None and len(row[name]) != size:
            raise ValueError(
                f"completion {row['completion']}: {size} tokens, but {name} has "
                f"{len(row[name])} entries"
            )
    loss_mask = row["loss_mask"]
    if loss_mask is None:
        loss_mask = np.ones(size, bool)
    versions = row["versions"]
    if versions is None:
        versions = np.full(size, row["version"], np.int32)
    extra = {}
    if row["support_ids"] is not None:
        extra["support_ids"] = _padded(row["support_ids"])
    prompt_ids = row.get("own_prompt_ids")
    if prompt_ids is not None:
        prompt_ids = np.array(prompt_ids, np.int32)
    if row.get("experts") is not None:
        extra["experts"] = row["experts"]
        if len(row["experts"]) != size:
            raise ValueError(
                f"completion {row['completion']}: {size} tokens, but the experts of "
                f"{len(row['experts'])}"
            )
    branches = []
    stored_branches = row.get("branches") or ()
    branch_experts = row.get("branch_experts") or [None] * len(stored_branches)
    for branch, experts in zip(stored_branches, branch_experts, strict=True):
        prompt = np.array(branch["prompt_ids"], np.int32)
        branches.append(Branch(branch["start"], prompt, experts))
    return Completion(
        request_id=request_id,
        index=row["completion"],
        token_ids=row["token_ids"],
        logprobs=row["logprobs"],
        loss_mask=loss_mask,
        versions=versions,
        stop_reason=StopReason(row["stop_reason"]),
        extra=extra,
        messages=tuple(row.get("messages") or ()),
        prompt_ids=prompt_ids,
        branches=tuple(branches),
        prompt_experts=row.get("prompt_experts"),
    )


def _experts(value: Any, sizes: Sequence[Any]) -> Any:
    """Returns the experts of tokens, unsigned[tokens, layers, k], from their bytes; None for None,
    and of a list a list. `sizes`: layers, k and the name of the type."""
    if value is None:
        return None
    if isinstance(value, list):
        return [_experts(entry, sizes) for entry in value]
    layers, per_token, dtype = sizes
    return np.frombuffer(value, dtype).reshape(-1, layers, per_token)


def _branch(branch: Branch) -> dict[str, Any]:
    """Returns a branch as a JSON record."""
    return {"start": branch.start, "prompt_ids": branch.prompt_ids.tolist()}


def _under(columns: Mapping[str, Any], head: str) -> dict[str, Any]:
    """Returns the columns whose names begin with `head`, by the rest of their names.

    >>> _under({"weight/format": [1.0], "reward": [0.5]}, "weight/")
    {'format': [1.0]}
    """
    below = {}
    for name, values in columns.items():
        if name.startswith(head):
            below[name.removeprefix(head)] = values
    return below


def _arrays(column: pa.ChunkedArray, dtype: Any) -> list[np.ndarray | None]:
    """Returns one array per row of a column of lists, None for null."""
    arrays: list[np.ndarray | None] = []
    for row in column:
        if row.is_valid:
            arrays.append(row.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False))
        else:
            arrays.append(None)
    return arrays


def _padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns T rows of different lengths as int32[T, K], K the length of the longest, padded with
    -1 at the end of the shorter ones."""
    width = max(map(len, rows), default=0)
    padded = np.full((len(rows), width), -1, np.int32)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def _floats(values: Sequence[float | None]) -> np.ndarray:
    """Returns a float64 array, with NaN for None."""
    return np.array(values, np.float64)


def group_record(stored: StoredGroup) -> dict[str, Any]:
    """Returns a stored group in JSON's own types, which `shoal groups` prints: the prompt once,
    then under `completions` a record for each completion (`_completion_record`). Leaves out what
    says nothing, such as a loss mask that is always true. `step` counts from 1; of an evaluation it
    is the version. The number of the group in its file is not in the record."""
    group = stored.group
    record: dict[str, Any] = {
        "purpose": group.purpose,
        "step": stored_step(group.purpose, group.step),
        "version": group.version,
        "subset": DISCARDED if stored.discarded else group.subset,
        "row": group.example.row,
        "prompt": group.example.prompt,
        "prompt_ids": group.prompt_ids,
        "columns": group.example.columns,
    }
    if group.reward_weights:
        record["reward_weights"] = group.reward_weights
    completions = []
    for index in range(group.size):
        completions.append(_completion_record(stored, index))
    record["completions"] = completions
    return json_ready(record)


def _completion_record(stored: StoredGroup, index: int) -> dict[str, Any]:
    """Returns the record of completion `index` of a stored group, whose values are not JSON yet. It
    always has text, tokens, log-probs, stop reason, reward, components and `valid`; all else only
    if the group has it and it differs from the usual: a loss mask that is not all true, versions
    that are not all the group's, messages, prompts or branches of the completion's own."""
    group = stored.group
    completion = group.completions[index]
    record: dict[str, Any] = {
        "text": group.texts[index],
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "stop_reason": completion.stop_reason,
        "reward": group.rewards[index],
        "components": _of_index(group.reward_components, index),
        "valid": group.valid[index],
    }
    if group.correct is not None:
        record["correct"] = group.correct[index]
    if stored.advantages is not None:
        record["advantage"] = stored.advantages[index]
    record.update(values_by_turn(stored, index))
    if not np.all(completion.loss_mask):
        record["loss_mask"] = completion.loss_mask
    if np.any(completion.versions != group.version):
        record["versions"] = completion.versions
    if completion.messages:
        record["messages"] = list(completion.messages)
    if completion.prompt_ids is not None:
        record["own_prompt_ids"] = completion.prompt_ids
    if completion.branches:
        record["branches"] = list(map(_branch, completion.branches))
    if group.extra:
        record["extra"] = _of_index(group.extra, index)
    support_ids = completion.extra.get("support_ids")
    if support_ids is not None:
        record["support_ids"] = [token_ids[token_ids >= 0] for token_ids in support_ids]
    record.update(stored.token_arrays[index])
    return record


def values_by_turn(stored: StoredGroup, index: int) -> dict[str, np.ndarray]:
    """Returns the rewards and advantages of a completion's turns under their columns' names, those
    that there are."""
    values = {}
    if stored.group.turn_rewards:
        values["turn_rewards"] = stored.group.turn_rewards[index]
    if stored.turn_advantages:
        values["turn_advantages"] = stored.turn_advantages[index]
    return values


def _of_index(by_name: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Returns name -> the value of one completion."""
    return {name: values[index] for name, values in by_name.items()}
