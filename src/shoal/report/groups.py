"""Groups as records, and back: one JSON object a group, the prompt once, then its completions.

`group_record` and `read_record` are each other's inverse, to the bit: float32 log-probs are written as the shortest
decimals that give them back, rewards and advantages as float64; NaN is `null`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from shoal.report.lines import json_ready
from shoal.types import Completion, Example, Group, Purpose, StopReason

TokenArrays: TypeAlias = "Sequence[Sequence[Mapping[str, Any] | None] | None]"
"""By group, by completion: name -> one value a token, as the trainer returned it; None where it was not trained."""

COMPLETION_FIELDS = ("text", "token_ids", "logprobs", "stop_reason", "reward", "components", "valid", "correct",
                     "advantage", "loss_mask", "versions", "support_ids", "extra")
"""Of a completion's record; every other field is an array by token."""


def groups_name(groups: Sequence[Group]) -> str:
    if not groups or groups[0].purpose is Purpose.TRAIN:
        return "step"
    subset = "".join(c if c.isalnum() or c in "-_" else "_" for c in groups[0].subset)
    return f"{groups[0].purpose.value}_{subset}"


def group_records(groups: Sequence[Group], advantages: Any = None,
                  token_arrays: TokenArrays | None = None) -> list[dict[str, Any]]:
    """`group_record` of each; ValueError where advantages or token arrays are not of as many groups."""
    for what, given in (("advantages", advantages), ("token_arrays", token_arrays)):
        if given is not None and len(given) != len(groups):
            raise ValueError(f"{what}: expected one entry for each of {len(groups)} groups, came {len(given)}")
    return [group_record(group, None if advantages is None else advantages[i],
                         None if token_arrays is None else token_arrays[i]) for i, group in enumerate(groups)]


def group_record(group: Group, advantages: Any = None,
                 token_arrays: Sequence[Mapping[str, Any] | None] | None = None) -> dict[str, Any]:
    """A group as one JSON object: the prompt once, then its completions with rewards and log-probs by token."""
    for what, given in (("advantages", advantages), ("token_arrays", token_arrays)):
        if given is not None and len(given) != group.size:
            raise ValueError(f"{what}: expected one entry for each of {group.size} completions, came {len(given)}")
    record = {
        "purpose": group.purpose, "step": group.step, "version": group.version, "subset": group.subset,
        "row": group.example.row, "prompt": group.example.prompt, "prompt_ids": group.prompt_ids,
        "columns": group.example.columns, **({"reward_weights": group.reward_weights} if group.reward_weights else {}),
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
    if not np.all(completion.loss_mask):
        record["loss_mask"] = completion.loss_mask
    if np.any(np.asarray(completion.versions) != group.version):
        record["versions"] = completion.versions
    if (kept := completion.extra.get("support_ids")) is not None:  # what each token was chosen from
        record["support_ids"] = [row[row >= 0] for row in kept]
    if group.extra:
        record["extra"] = {name: values[i] for name, values in group.extra.items()}
    return record | _token_record(completion, None if token_arrays is None else token_arrays[i], record)


def _token_record(completion: Completion, arrays: Mapping[str, Any] | None, taken: Mapping[str, Any]) -> dict[str, Any]:
    for name, values in (arrays or {}).items():
        if name in taken or name in COMPLETION_FIELDS:
            raise ValueError(f"token array {name!r}: the record already has a field of this name")
        if len(values) != len(completion):
            raise ValueError(f"token array {name!r}: expected {len(completion)} values, one a token, "
                             f"came {len(values)}")
    return dict(arrays or {})


# ---- back


@dataclass(frozen=True)
class StoredGroup:
    """A group read back, with what was stored beside it."""

    group: Group
    advantages: np.ndarray | None  # float64[G]; None where nothing was learnt from it
    token_arrays: tuple[Mapping[str, np.ndarray], ...]  # by completion: name -> float32[T]; empty where not trained


def read_record(record: Mapping[str, Any], number: int = 0) -> StoredGroup:
    """The group of a record; `number` becomes the request's. KeyError, TypeError or ValueError for another thing."""
    completions, version = record["completions"], record["version"]
    names = dict.fromkeys(name for c in completions for name in c["components"])
    extras = dict.fromkeys(name for c in completions for name in c.get("extra") or {})
    group = Group(
        purpose=Purpose(record["purpose"]), step=record["step"], version=version,
        example=Example(record["row"], record["prompt"], record["columns"]),
        prompt_ids=np.array(record["prompt_ids"], np.int32),
        completions=tuple(_completion(c, number, i, version) for i, c in enumerate(completions)),
        texts=tuple(c["text"] for c in completions),
        rewards=_floats([c["reward"] for c in completions]),
        reward_components={name: _floats([c["components"].get(name) for c in completions]) for name in names},
        valid=np.array([c["valid"] for c in completions], bool),
        correct=np.array([c["correct"] for c in completions], bool) if _all_have(completions, "correct") else None,
        subset=record["subset"],
        extra={name: [(c.get("extra") or {}).get(name) for c in completions] for name in extras},
        reward_weights=record.get("reward_weights") or {},
    )
    advantages = _floats([c["advantage"] for c in completions]) if _all_have(completions, "advantage") else None
    arrays = tuple({name: _floats(values, np.float32) for name, values in c.items()
                    if name not in COMPLETION_FIELDS and values is not None} for c in completions)
    return StoredGroup(group, advantages, arrays)


def _all_have(completions: Sequence[Mapping[str, Any]], name: str) -> bool:
    return bool(completions) and all(name in c for c in completions)


def _completion(record: Mapping[str, Any], number: int, index: int, version: int) -> Completion:
    tokens = np.array(record["token_ids"], np.int32)
    drawn, versions = record.get("loss_mask"), record.get("versions")
    logprobs = _floats(record["logprobs"], np.float32)
    if len(logprobs) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probs")
    return Completion(
        request_id=number, index=index, token_ids=tokens, logprobs=logprobs,
        loss_mask=np.ones(len(tokens), bool) if drawn is None else np.array(drawn, bool),
        versions=np.full(len(tokens), version, np.int32) if versions is None else np.array(versions, np.int32),
        stop_reason=StopReason(record["stop_reason"]),
        extra={} if record.get("support_ids") is None else {"support_ids": _ragged(record["support_ids"])})


def _ragged(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """int32[T, K] with -1 after the end of each shorter row."""
    width = max(map(len, rows), default=0)
    return np.array([[*row, *[-1] * (width - len(row))] for row in rows], np.int32).reshape(len(rows), width)


def _floats(values: Sequence[float | None], dtype: Any = np.float64) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype)
