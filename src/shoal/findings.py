"""What the checks of a job found: one line for each finding, with its level and the key that fixes
it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from shoal.protocols import Printer
from shoal.records import ShoalError
from shoal.text import one_line

Level = Literal["ok", "warning", "wrong"]


NOT_HERE = "download"
"""The name of the check under which a dry run reports what it leaves out, because that would have
to be downloaded."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    >>> Finding(
    ...     "data", "wrong", "the data has 3 prompts, fewer than ...: lower it",
    ...     key="batch.prompts_per_step",
    ... )
    """

    check: str  # what was checked: configuration, devices, tokenizer, data, reward, model, ...
    level: Level  # wrong: the run would fail, or could not train
    text: str  # one line; for a warning or an error also what fixes it
    key: str = ""  # the key that fixes it, if any

    def __str__(self) -> str:
        return f"{'WRONG ' * (self.level == 'wrong')}{self.check}: {one_line(self.text)}"


@dataclass
class Findings:
    """The findings in the order of the checks; each is printed once, when it is added. `of` returns
    a view for one check, which adds to the same list: its findings get the view's key, unless they,
    or the error that they report, name another."""

    console: Printer | None = None
    check: str = ""
    key: str = ""
    found: list[Finding] = field(default_factory=list)  # the findings of all checks

    def of(self, check: str, key: str = "") -> Findings:
        """Returns a view of the same list for one check, with the key that its findings get by
        default. What the view adds is in `found` here, too."""
        return replace(self, check=check, key=key)  # `found` stays the same list

    def extend(self, findings: Iterable[Finding]) -> None:
        """Adds findings, and prints each on the console, if there is one."""
        for finding in findings:
            self.found.append(finding)
            if self.console is None:
                continue
            if finding.level == "ok":
                self.console.note(str(finding))
            elif finding.level == "warning":
                self.console.warning(str(finding), finding.key)
            else:
                self.console.wrong(str(finding), finding.key)

    def ok(self, text: str) -> None:
        self.extend([Finding(self.check, "ok", one_line(text))])

    def warning(self, text: str, key: str = "") -> None:
        self.extend([Finding(self.check, "warning", one_line(text), key or self.key)])

    def wrong(self, fault: str | ShoalError, key: str = "") -> None:
        """Adds a finding of the level `wrong` and prints it: a text, or the text of a ShoalError.
        Raises nothing. The key is `key`, else the error's, else the view's."""
        key = key or getattr(fault, "key", "") or self.key
        self.extend([Finding(self.check, "wrong", one_line(fault), key)])

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Returns a context that catches a ShoalError, adds it as a finding, and so ends the block
        there. Other errors pass."""
        try:
            yield
        except ShoalError as error:
            self.wrong(error)

    def at(self, *levels: Level) -> list[Finding]:
        """Returns the findings of these levels, of all checks and in the order in which they were
        added."""
        return [finding for finding in self.found if finding.level in levels]

    def records(self) -> list[dict[str, Any]]:
        """Returns all findings as dicts with the keys check, level, text and key."""
        return [asdict(finding) for finding in self.found]
