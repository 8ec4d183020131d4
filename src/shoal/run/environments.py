"""The tools and environments of a run: loaded by name, and tried before weights are read."""

from __future__ import annotations

import inspect
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from shoal.config.environment_section import EnvironmentSection
from shoal.model.turns import schema
from shoal.rewards.functions import load_functions, load_named
from shoal.tasks.task import Task
from shoal.types import Example, ShoalError
from shoal.workers.environments import EnvironmentKind, name_of
from shoal.workers.pool import Supervisor
from shoal.workers.process import live, require_bubblewrap
from shoal.workers.sessions import Reply, Sessions, supervised


def with_environment(task: Task, given: Any) -> Task:
    """The task with the tools and the environments that a configuration names, in place of its own. ShoalError for what
    a file does not have."""
    section, file, specs = getattr(given, "environment", EnvironmentSection()), "", []
    for spec in section.tools:  # file.py:f,g
        file = spec.rpartition(":")[0] or file
        specs.append(spec if ":" in spec else f"{file}:{spec}")
    task = replace(task, tools=tuple(load_functions(specs, "tool", "")) or task.tools)
    for made in load_named([section.factory] if section.factory else [], "environment"):
        task = replace(task, environments=made if isinstance(made, Mapping) else {name_of(made): made})
    return task


def open_sessions(task: Task, given: Any) -> Sessions | None:
    """The sessions of a task's rollouts, forked, and tried on the first row of each set; None without tools and
    environments. ShoalError for a tool that a model cannot be told of, and an environment that cannot begin."""
    if not (task.tools or task.environments):
        return None
    section = getattr(given, "environment", EnvironmentSection())
    sessions = Sessions(task.tools, task.environments, section,
                        _sandbox(task, section) if section.sandbox == "bwrap" else None)
    try:
        for rows in (task.train, *task.evaluations.values()):
            if rows:
                _try(sessions, rows[0])
    except BaseException:
        sessions.close()
        raise
    return sessions


def _sandbox(task: Task, section: EnvironmentSection) -> Callable[[socket.socket], Any]:
    """Becomes the supervisor in bubblewrap, with all of its workers: no network, no variables of the environment,
    files to be read alone, but those of its own in /dev/shm. ShoalError where that cannot be."""
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


def _try(sessions: Sessions, example: Example) -> None:
    for function in sessions.functions(example.columns).values():
        schema(function)
    sessions.open("tried", {**example.columns, "prompt": example.prompt})
    sessions.end("tried")
    replies: list[Reply] = []
    while not any(reply.fatal or reply.what == "end" for reply in replies):
        replies += sessions.collect(1.0)
    for reply in filter(lambda one: one.kind, replies):
        kind, row = sessions.kind_of(example.columns), example.place or f"data row {example.row}"
        method, cure = ("get_reward", "a number or None") if reply.what == "end" else \
            ("reset", f"a text or None, of the columns {', '.join(example.columns)}; **columns takes what has no name")
        raise ShoalError(f"environment {kind and kind.type.__name__}: {method} failed for {row}: {reply.error}; it "
                         f"must return {cure}", "environment.factory")
