"""Reports the findings of one check."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.config.keys import keys_of
from shoal.config.schema import Config
from shoal.report.findings import Findings, Level
from shoal.types import ShoalError


@dataclass(frozen=True)
class Reporter:
    """Adds the findings of one check. A finding's key is the first one that its text names, unless given."""

    findings: Findings
    check: str
    key: str = ""  # the key of a finding whose text names none
    among: tuple[str, ...] = ()  # the only keys that a finding may have; empty for all

    def ok(self, text: str) -> None:
        self.findings.add(self.check, "ok", text)

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
        self.findings.add(self.check, level, text, self.key if self.among and key not in self.among else key)


def key_in(text: str, default: str) -> str:
    """The first key of `shoal train` that a text names, else `default`. Short keys (`steps`, `seed`) are also plain
    words, so they do not count."""
    known = keys_of(Config)
    return next((word for word in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)*", text)
                 if word in known and ("." in word or word in ("base_output_directory", "run_name"))), default)
