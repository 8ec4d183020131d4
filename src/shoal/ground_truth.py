"""The right answer of a row of data, wherever it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GOLD_COLUMNS = ("ground_truth", "answer", "solution", "target", "label")
"""Data columns that may hold the right answer, by priority: where a row has `answer` and
`solution`, the solution is a worked one."""


def ground_truth(columns: Mapping[str, Any]) -> Any:
    """A row's right answer: verl's `reward_model.ground_truth`, else the first of GOLD_COLUMNS that
    is not empty; None where there is none.

    >>> ground_truth({"solution": "2 + 3 = 5", "answer": "5"})
    '5'
    """
    model = columns.get("reward_model")
    found = [model.get("ground_truth")] if isinstance(model, Mapping) else []
    found += [columns.get(name) for name in GOLD_COLUMNS]
    return next(
        (
            value
            for value in found
            if value is not None and not (isinstance(value, str) and not value)
        ),
        None,
    )


def truth_fault(columns: Mapping[str, Any]) -> str:
    """Why a row gives verl's functions no right answer; empty where it gives one.

    >>> truth_fault({"reward_model": {"style": "rule"}})
    '`reward_model` has no `ground_truth`'
    """
    model = columns.get("reward_model")
    # verl takes no text either. A right answer elsewhere in the row would be another than the one
    # that is meant.
    if isinstance(model, str) and model.lstrip().startswith("{"):
        return (
            f"`reward_model` is text, {model[:40]!r}: expected an object with `ground_truth`, "
            f"parsed from that JSON"
        )
    if ground_truth(columns) is not None:
        return ""
    if isinstance(model, Mapping):
        what = "an empty" if "ground_truth" in model else "no"
        return f"`reward_model` has {what} `ground_truth`"
    if "reward_model" in columns:
        return f"`reward_model` is {model!r:.40}: expected an object with `ground_truth`"
    found = [name for name in GOLD_COLUMNS if name in columns]
    if found:
        return f"`{found[0]}` is empty"
    return (
        "expected a column `reward_model` with `ground_truth` in it, or a column `ground_truth`, "
        "`answer`, "
        f"`solution`, `target` or `label`; there are: {', '.join(columns) or 'none'}"
    )
