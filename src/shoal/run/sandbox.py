"""Sessions in bubblewrap (`bwrap`), the supervisor and all of its workers in one sandbox: no network, no variables of
the environment, files to be read alone, but those of its own in /dev/shm."""

from __future__ import annotations

import inspect
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from shoal.config.environment_section import EnvironmentSection
from shoal.rewards.functions import load_named
from shoal.tasks.task import Task
from shoal.types import ShoalError
from shoal.workers.environments import EnvironmentKind, name_of
from shoal.workers.pool import Supervisor
from shoal.workers.process import live, require_bubblewrap
from shoal.workers.sessions import supervised


def enter_sandbox(task: Task, section: EnvironmentSection) -> Callable[[socket.socket], Any]:
    """What has a process become the supervisor in the sandbox. ShoalError where there can be none."""
    for one in (*task.tools, *task.environments.values()):
        if "<" in getattr(one, "__qualname__", "<"):
            raise ShoalError(f"environment.sandbox=bwrap: {name_of(one)!r} is no function or class that a file names",
                             "environment.sandbox")
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--clearenv", "--ro-bind", "/", "/",
             "--proc", "/proc", "--dev", "/dev", "--chdir", os.getcwd(), "--setenv", "HOME", "/dev/shm", "--setenv",
             "TMPDIR", "/dev/shm", "--setenv", "PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path))]
    require_bubblewrap("environment.sandbox=bwrap", words, "environment.sandbox")
    made = {name: _spec(one) for name, one in task.environments.items()}
    text = json.dumps([[_spec(one) for one in task.tools], made, asdict(section)])

    def enter(end: socket.socket) -> None:
        os.set_inheritable(end.fileno(), True)
        os.execvp("bwrap", [*words, sys.executable, "-c", f"from {__name__} import serve; serve()", str(end.fileno()),
                            text])

    return enter


def _spec(one: Callable[..., Any]) -> str:
    return f"{inspect.getsourcefile(one)}:{one.__qualname__}"


def serve() -> None:
    """The life of the supervisor in the sandbox."""
    tools, environments, section = json.loads(sys.argv[2])
    found = load_named([*tools, *environments.values()], "tool")
    kinds = {name: EnvironmentKind.of(name, one) for name, one in
             zip(environments, found[len(tools):], strict=True)}
    handle, limits, handle_async = supervised({name_of(one): one for one in found[:len(tools)]}, kinds,
                                              EnvironmentSection(**section))
    end, trainer = socket.socket(fileno=int(sys.argv[1])), os.getppid()
    live(lambda: Supervisor(end, handle, handle_async, limits, trainer).run(lambda: None))
