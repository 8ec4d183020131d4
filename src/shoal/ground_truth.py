"""The right answer of a row of data, wherever it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GOLD_COLUMNS = ("ground_truth", "answer", "solution", "target", "label")
"""Data columns that may hold the right answer, by priority: where a row has `answer` and `solution`, the solution is a
worked one."""


def ground_truth(columns: Mapping[str, Any]) -> Any:
    """A row's right answer: verl's `reward_model.ground_truth`, else the first of GOLD_COLUMNS that is not empty; None
    where there is none.

    >>> ground_truth({"solution": "2 + 3 = 5", "answer": "5"})
    '5'
    """
    model = columns.get("reward_model")
    found = [model.get("ground_truth")] if isinstance(model, Mapping) else []
    found += [columns.get(name) for name in GOLD_COLUMNS]
    return next((value for value in found if value is not None and not (isinstance(value, str) and not value)), None)
