"""Ctrl-C and SIGTERM as a wish to stop: the step is finished and saved; the second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Listens while it is entered; false until somebody asks. Outside the main thread nothing can be listened to."""

    def __init__(self) -> None:
        self.asked = False
        self._old: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt("stopped at once: what came after the newest checkpoint is lost")
        self.asked = True
        os.write(2, b"\nstopping: this step is finished and saved first; once more to stop at once\n")
