"""Samples groups again on demand: `shoal replay` as a process of its own, one at a time, behind everything else.

The server itself loads no model. A run whose settings name code of its own, a task or a reward in a file, is not
replayed from the page: its code would run here. The command for a terminal is shown in its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from shoal.runs.bounded import one_line
from shoal.runs.stored_run import StoredRun
from shoal.tasks.task import TASKS
from shoal.types import ShoalError

LIKELIEST, MAX_KEPT, MAX_SECONDS, NICENESS = 8, 8, 1800.0, 10


def refusal(run: StoredRun, settings: Mapping[str, Any], stem: str) -> str:
    """Why a group cannot be sampled again from the page; empty if it can."""
    if not stem.startswith("step_"):
        return "only groups that were trained on are sampled again"
    if not (run.root / "model" / "tokenizer.json").is_file():
        return "the run has no model folder"
    functions = settings.get("reward.functions") or []
    if settings.get("task.name") not in TASKS or not isinstance(functions, list) or any(
            mark in str(name) for name in functions for mark in ".:/\\"):
        return "its task or a reward is code of its own, which the page does not run"
    return ""


class Replay:
    """One group sampled again; `state` is running, done or failed."""

    def __init__(self, run: StoredRun, step: int, group: int) -> None:
        self.state, self.error, self.result = "running", "", {}
        self.started = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by the thread that reads it)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "shoal", "replay", str(run.path), f"step={step}", f"group={group}",
                   f"likeliest={LIKELIEST}", "json=true"]
        self._process = subprocess.Popen(
            command, stdout=self._output, stderr=self._errors, stdin=subprocess.DEVNULL,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},  # a run's settings must not make this machine fetch anything
            preexec_fn=_be_nice if os.name == "posix" else None)
        threading.Thread(target=self._wait, name="replay", daemon=True).start()

    def _wait(self) -> None:
        with self._output, self._errors:
            try:
                code = self._process.wait(MAX_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                code = self._process.wait()
            self._output.seek(0)
            self._errors.seek(0)
            try:
                self.result = json.loads(self._output.read()) if code == 0 else {}
            except ValueError:
                self.result = {}
            if self.result:
                self.state = "done"
                return
            said = self._errors.read().decode("utf-8", "replace").strip().splitlines() or ["it ended without a message"]
            self.error, self.state = one_line(said[-1].removeprefix("error: ")), "failed"

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()


class Replays:
    """The newest few replays, by run, file and group."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, int], Replay] = {}
        self._lock = threading.Lock()

    def start(self, run: StoredRun, stem: str, group: int, step: int) -> None:
        """Begins one; ShoalError while another is under way."""
        with self._lock:
            if any(one.state == "running" for one in self._kept.values()):
                raise ShoalError("another group is being sampled again: wait for it")
            self._kept[run.name, stem, group] = Replay(run, step, group)
            for old in list(self._kept)[:-MAX_KEPT]:
                del self._kept[old]

    def record(self, run: StoredRun, stem: str, group: int, completion: int) -> dict[str, Any]:
        """How far it is; of a finished one the sentence, and one completion's entropies and likeliest tokens."""
        one = self._kept.get((run.name, stem, group))
        if one is None:
            return {"state": "none"}
        seconds = round(time.monotonic() - one.started)
        found: dict[str, Any] = {"state": one.state, "error": one.error, "seconds": seconds}
        if one.state == "done":
            completions = one.result["completions"]
            found |= {"identical": one.result["identical"], "weights": one.result["weights"]["source"],
                      "by_completion": [own["identical"] for own in completions]}
            if completion < len(completions):
                tokens = completions[completion]["tokens"]
                found |= {"entropy": [token.get("entropy") for token in tokens], "likeliest": [
                    [[other["text"], other["logprob"]] for other in token.get("likeliest", [])] for token in tokens]}
        return found

    def close(self) -> None:
        for one in self._kept.values():
            one.stop()


def _be_nice() -> None:
    os.nice(NICENESS)
