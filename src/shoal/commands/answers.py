"""What both forms of `shoal eval` share: names of columns, the report, the file of answers."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.files import write_text
from shoal.report.console import Console
from shoal.report.lines import json_ready
from shoal.rewards.scores import failure_lines
from shoal.types import Failure


def given_names(given: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """The names of an input's columns in the output; one that the output has itself is `given_...` there."""
    given, names = set(given), {}
    for name in sorted(given):
        new = name
        while new in taken or (new != name and new in given):
            new = f"given_{new}"
        names[name] = new
    return names


def report_evaluation(figures: Mapping[str, Mapping[str, Any]], failures: Sequence[Failure], console: Console) -> None:
    """Prints the figures of each set of questions and warns of failed reward functions."""
    for name, values in figures.items():
        console.evaluation(name, values)
    for line in failure_lines(failures):
        console.warning(line)


def write_answers(output: Path, content: Mapping[str, Any]) -> None:
    """Writes the JSON file of an evaluation, whole or not at all."""
    write_text(output, json.dumps(json_ready(content), indent=2, ensure_ascii=False) + "\n")
