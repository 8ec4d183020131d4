"""Where a step's metrics go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shoal.report.lines import json_line, open_text, writing


class Sink(Protocol):
    """Where a step's metrics go. `JsonlSink` is one; TensorBoard and W&B are others."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class JsonlSink:
    """Appends a line a step, `step` first, flushed at once: what was written survives a killed process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with writing(self.path):
            self._file = open_text(self.path, "a")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        line = json_line({"step": int(step), **{name: value for name, value in metrics.items() if name != "step"}})
        with writing(self.path):
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()
