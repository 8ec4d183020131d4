"""What the checks of a job found: a line a finding, with its level and the key that fixes it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from shoal.config.keys import keys_of
from shoal.config.schema import Config
from shoal.report.console import Console
from shoal.report.figures import one_line
from shoal.types import ShoalError

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

    def __str__(self) -> str:
        return f"{'WRONG ' * (self.level == 'wrong')}{self.check}: {one_line(self.text)}"


@dataclass
class Findings:
    """Findings in the order of the checks, each printed once, when it is added. `of` gives the list of one check, whose
    findings have the first key that their text names, unless given."""

    console: Console | None = None
    check: str = ""
    key: str = ""  # the key of a finding whose text names none
    among: tuple[str, ...] = ()  # the only keys that a finding may have; empty for all
    found: list[Finding] = field(default_factory=list)  # of all checks

    def of(self, check: str, key: str = "", among: tuple[str, ...] = ()) -> Findings:
        return replace(self, check=check, key=key, among=among)

    def extend(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self.found.append(finding)
            if self.console:
                show = {"ok": self.console.note, "warning": self.console.warning, "wrong": self.console.wrong}
                show[finding.level](str(finding))

    def ok(self, text: str) -> None:
        self.extend([Finding(self.check, "ok", one_line(text))])

    def warning(self, text: str, key: str = "") -> None:
        self._add("warning", text, key)

    def wrong(self, text: str | Exception, key: str = "") -> None:
        self._add("wrong", str(text), key)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Reports a ShoalError raised inside, and ends the block there."""
        try:
            yield
        except ShoalError as error:
            self.wrong(error)

    def _add(self, level: Level, text: str, key: str) -> None:
        key = key or key_in(text, self.key)
        key = self.key if self.among and key not in self.among else key
        self.extend([Finding(self.check, level, one_line(text), key)])

    def at(self, *levels: Level) -> list[Finding]:
        return [finding for finding in self.found if finding.level in levels]

    def records(self) -> list[dict[str, Any]]:
        return [asdict(finding) for finding in self.found]


def key_in(text: str, default: str) -> str:
    """The first key of `shoal train` that a text names, else `default`. Short keys (`steps`, `seed`) are also plain
    words, so they do not count."""
    known = keys_of(Config)
    return next((word for word in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)*", text)
                 if word in known and ("." in word or word in ("base_output_directory", "run_name"))), default)


def gib(num_bytes: float) -> str:
    """Bytes for reading: 1.2 GiB, 34 MiB."""
    for limit, unit in ((1 << 40, "TiB"), (1 << 30, "GiB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:,.1f} {unit}"
    return f"{num_bytes / (1 << 20):.1f} MiB"


def seconds_text(seconds: float) -> str:
    """0.34 s, 12 s, 3.4 min, 5.2 h."""
    for limit, divisor, unit in ((100, 1, "s"), (6000, 60, "min")):
        if seconds < limit:
            return f"{seconds / divisor:.{1 if seconds / divisor >= 1 else 2}f} {unit}"
    return f"{seconds / 3600:.1f} h"
