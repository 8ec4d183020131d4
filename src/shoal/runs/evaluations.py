"""The evaluations of a run: a row for each version and data set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.report.sink import evaluation_scalars
from shoal.runs.bounded import rounded

MAX_ROWS = 5000


class Evaluations:
    """Rows of evaluations.jsonl: `step` (the version), `name` (of the data set) and the figures."""

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        self.rows = list(rows)

    def add(self, restarted: bool, rows: Iterable[dict[str, Any]]) -> None:
        """Adds what `GrowingLines.new` found; `restarted`: the file is another than before."""
        if restarted:
            self.rows = []
        self.rows += [row for row in rows if isinstance(row.get("step"), int) and isinstance(row.get("name"), str)]
        del self.rows[MAX_ROWS:]

    def by_version(self) -> dict[tuple[int, str], dict[str, Any]]:
        """(version, data set) -> figures."""
        return {(row["step"], row["name"]): _figures(row) for row in self.rows}

    def at(self, step: int) -> dict[str, dict[str, Any]]:
        """Data set -> figures of one version."""
        return {row["name"]: _figures(row) for row in self.rows if row["step"] == step}

    def before_after(self, summary: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Data set -> figures before the first step and after the last; of a run without a summary, those of its first
        and its newest evaluation."""
        before, after = summary.get("before"), summary.get("after")
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            return before, after
        steps = sorted({row["step"] for row in self.rows})
        return self.at(steps[0]) if steps else {}, self.at(steps[-1]) if len(steps) > 1 else {}

    def curves(self) -> dict[str, dict[str, list[Any]]]:
        """evaluate/<set>/<figure> -> its steps `x` and values `y`."""
        found: dict[str, dict[str, list[Any]]] = {}
        for row in self.rows:
            for name, value in evaluation_scalars(row["name"], _figures(row)).items():
                if math.isfinite(value) and not name.endswith(("_error", "num_questions", "num_responses")):
                    curve = found.setdefault(name, {"x": [], "y": []})
                    curve["x"].append(row["step"])
                    curve["y"].append(rounded(value))
        return found


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("step", "name")}
