"""What a check of a job found: a line a finding, with its level and the key that fixes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from shoal.report.console import Console
from shoal.report.figures import one_line

Level = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    >>> Finding("data", "wrong", "the data has 3 prompts, fewer than ...: lower it", key="batch.prompts_per_step")
    """

    check: str  # what was checked: configuration, devices, tokenizer, data, reward, model, ...
    level: Level  # wrong: the run would fail, or could not train
    text: str  # one line; for a warning or an error also what fixes it
    key: str = ""  # the key that fixes it, if any


@dataclass
class Findings:
    """Findings in the order of the checks, each printed when it is added."""

    console: Console
    found: list[Finding] = field(default_factory=list)

    def add(self, check: str, level: Level, text: str, key: str = "") -> None:
        self.extend([Finding(check, level, one_line(text), key)])

    def extend(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self.found.append(finding)
            (self.console.note if finding.level == "ok" else self.console.warning)(line(finding))

    def at(self, level: Level) -> list[Finding]:
        return [finding for finding in self.found if finding.level == level]

    @property
    def ok(self) -> bool:
        """True if nothing is wrong; there may be warnings."""
        return not self.at("wrong")

    def records(self) -> list[dict[str, Any]]:
        return [asdict(finding) for finding in self.found]


def line(finding: Finding) -> str:
    """The finding as it is printed."""
    if finding.level == "wrong":
        return f"WRONG {finding.check}: {finding.text}"
    return f"{finding.check}: {finding.text}"


def gib(num_bytes: float) -> str:
    """Bytes for reading: 1.2 GiB, 34 MiB."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.1f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"


def seconds_text(seconds: float) -> str:
    """0.34 s, 12 s, 3.4 min, 5.2 h."""
    for limit, divisor, unit in ((100, 1, "s"), (6000, 60, "min")):
        if seconds < limit:
            return f"{seconds / divisor:.{1 if seconds / divisor >= 1 else 2}f} {unit}"
    return f"{seconds / 3600:.1f} h"
