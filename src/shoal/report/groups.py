"""Groups on disk: one JSON object a group, the prompt once, then its completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from shoal.report.lines import json_ready
from shoal.types import Completion, Group, Purpose

TokenArrays: TypeAlias = "Sequence[Sequence[Mapping[str, Any] | None] | None]"
"""By group, by completion: name -> one value a token, as the trainer returned it; None where it was not trained."""


def groups_name(groups: Sequence[Group]) -> str:
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
