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
    files = {one: (inspect.getsourcefile(inspect.unwrap(one)), getattr(one, "__qualname__", "<"))
             for one in (*task.tools, *task.environments.values()) if inspect.isroutine(one) or inspect.isclass(one)}
    if len(files) < len(task.tools) + len(task.environments) or any("<" in name for _, name in files.values()):
        raise ShoalError("environment.sandbox=bwrap: tools and environments must be functions and classes that a file "
                         "names", "environment.sandbox")
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--clearenv", "--ro-bind", "/", "/",
             "--proc", "/proc", "--dev", "/dev", "--chdir", "/dev/shm", "--setenv", "HOME", "/dev/shm", "--setenv",
             "TMPDIR", "/dev/shm", "--setenv", "PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path))]
    require_bubblewrap("environment.sandbox=bwrap", words, "environment.sandbox")
    specs = {one: f"{file}:{name}" for one, (file, name) in files.items()}
    made = {name: specs[one] for name, one in task.environments.items()}
    text = json.dumps([[specs[one] for one in task.tools], made, asdict(section)])

    def enter(end: socket.socket) -> None:
        os.set_inheritable(end.fileno(), True)
        os.execvp("bwrap", [*words, sys.executable, "-c", f"from {__name__} import serve; serve()", str(end.fileno()),
                            text])

    return enter


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
