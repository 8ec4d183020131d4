"""Reports what one check finds."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.config.keys import keys_of
from shoal.config.schema import Config
from shoal.report.findings import Findings, Level


@dataclass(frozen=True)
class Reporter:
    """Adds the findings of one check. A finding's key is the first that its text names, unless it is given."""

    findings: Findings
    check: str
    key: str = ""  # where the text names none

    def ok(self, text: str) -> None:
        self.findings.add(self.check, "ok", text)

    def warning(self, text: str, key: str = "") -> None:
        self._add("warning", text, key)

    def wrong(self, text: str | Exception, key: str = "") -> None:
        self._add("wrong", str(text), key)

    def _add(self, level: Level, text: str, key: str) -> None:
        self.findings.add(self.check, level, text, key or key_in(text, self.key))


def key_in(text: str, default: str) -> str:
    """The first key of `shoal train` that a text names, else `default`."""
    known = keys_of(Config)
    return next((word for word in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)*", text)
                 if word in known and ("." in word or word in ("base_output_directory", "run_name"))), default)
