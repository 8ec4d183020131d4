"""Progress and tables in a notebook; progress is one display, updated in place."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

UPDATE_SECONDS = 0.25
"""Minimum time between two updates; the last one is always shown."""


def in_notebook() -> bool:
    """True in an IPython kernel, which shows HTML. Does not import IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None


class NotebookProgress:
    """A progress bar above the newest step's figures; one line of text where HTML is not shown."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, show: Callable[..., Any] | None = None) -> None:
        self._clock = clock
        self._show = show or _ipython_display()
        self._handle: Any = None
        self._pending: dict[str, str] | None = None
        self._last = 0.0

    def update(self, step: int, steps: int, times: str, figures: Sequence[str]) -> None:
        """Shows that `step` of `steps` is done, at most every UPDATE_SECONDS."""
        self._pending = bundle(step, steps, times, figures)
        if self._handle is None or step >= steps or self._clock() - self._last >= UPDATE_SECONDS:
            self.stop()

    def stop(self) -> None:
        """Shows the newest update, if it has not been shown."""
        if self._pending is None:
            return
        if self._handle is None:
            self._handle = self._show(self._pending, raw=True, display_id=True)
        else:
            self._handle.update(self._pending, raw=True)
        self._pending, self._last = None, self._clock()


def bundle(step: int, steps: int, times: str, figures: Sequence[str]) -> dict[str, str]:
    """A step as text and as escaped HTML, by MIME type."""
    line = "  ".join([f"step {step}/{steps}", times, *figures])
    parts = "".join(f"<span style='margin-right:1.2em'>{html.escape(part)}</span>" for part in (times, *figures))
    return {"text/plain": line, "text/html": (
        f"<div style='font-family:monospace'>step {step}/{steps} "
        f"<progress value='{step}' max='{max(steps, 1)}' style='width:20em;vertical-align:middle'></progress>"
        f"<div>{parts}</div></div>")}


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table with escaped cells."""
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]], text: str) -> None:
    """Shows a table in a notebook; `text` where HTML is not shown."""
    _ipython_display()({"text/html": html_table(head, rows), "text/plain": text}, raw=True)


def _ipython_display() -> Callable[..., Any]:
    from IPython.display import display  # pyright: ignore[reportMissingImports]  # only where a kernel runs

    return display
