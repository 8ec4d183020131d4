"""The tools and environments of a run: loaded by name, tried before weights are read, and the
sandbox that their workers enter."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shoal.chat.tokenizer import Tokenizer
from shoal.chat.turns import TurnFormat, schema
from shoal.config.keywords import FROM_PYTHON
from shoal.config.sections.sampling import SamplingSection
from shoal.config.sections.task import EnvironmentSection
from shoal.records import Example, ShoalError
from shoal.rewards.functions import load_functions, load_named
from shoal.rollout.turn_driver import TurnDriver
from shoal.serve.agent import AgentProgram
from shoal.serve.server import require_packages
from shoal.tasks.openenv import PREFIX, openenv
from shoal.tasks.task import Task
from shoal.workers.environments import EnvironmentKind, name_of
from shoal.workers.pool import Supervisor
from shoal.workers.process import live, require_bubblewrap
from shoal.workers.rollout_function import ROLLOUT, Agent, RolloutCall
from shoal.workers.sessions import Reply, Sessions, supervised


def section_of(given: Any) -> EnvironmentSection:
    """The settings of a configuration; the defaults where it has none."""
    return getattr(given, "environment", EnvironmentSection())


def with_environment(task: Task, given: Any) -> Task:
    """The task with the tools and the environments that a configuration names, in place of its own.
    ShoalError for what a file does not have."""
    section, file, specs = section_of(given), "", []
    for spec in section.tools:  # file.py:f,g
        file = spec.rpartition(":")[0] or file
        specs.append(spec if ":" in spec else f"{file}:{spec}")
    task = replace(task, tools=tuple(load_functions(specs, "tool", "")) or task.tools)
    if spec := section.factory:
        if is_server := spec.startswith(PREFIX):
            require_packages("openenv", "websockets")
        made = openenv(spec) if is_server else load_named([spec], "environment")[0]
        task = replace(
            task, environments=made if isinstance(made, Mapping) else {name_of(made): made}
        )
    if section.rollout:
        (function,) = load_functions([section.rollout], "rollout", "")
        task = replace(task, tools=(), environments={ROLLOUT: partial(RolloutCall, function)})
    if section.agent:
        is_function = (
            section.agent.startswith(FROM_PYTHON) or ".py:" in section.agent.partition(" ")[0]
        )
        named = load_functions([section.agent], "agent", "")[0] if is_function else section.agent
        agent = AgentProgram(named, given.sampling, given.model.path)
        task = replace(task, tools=(), environments={ROLLOUT: partial(Agent, agent)})
    return task


@dataclass
class TurnFormats:
    """How turns look in tokens, by the tools of a row's environment. `note` is called with what the
    chat template would change in earlier turns, once for each line."""

    tokenizer: Tokenizer
    sessions: Sessions
    section: EnvironmentSection
    note: Callable[[str], None] = lambda line: None
    limit: int = 1 << 30  # sampling.max_completion_tokens
    _made: dict[EnvironmentKind | None, TurnFormat] = field(default_factory=dict)

    def of(self, columns: Mapping[str, Any]) -> TurnFormat:
        """Of a row with these columns. ShoalError where no answer fits a completion."""
        kind = self.sessions.kind_of(columns)
        if kind not in self._made:
            functions = self.sessions.functions(columns)
            known = {line for made in self._made.values() for line in made.notes}
            form = TurnFormat(
                self.tokenizer,
                list(map(schema, functions.values())),
                self.section.call_format,
                self.section.special_tokens,
            )
            answer = (
                {"role": "tool", "name": name, "content": "1"}
                if (name := next(iter(functions), ""))
                else {"role": "user", "content": "1"}
            )
            if self.limit < (
                least := 2 + len(form.encode_context([answer]))
            ):  # a token before it, and one after
                raise ShoalError(
                    f"sampling.max_completion_tokens={self.limit}: all tokens of a rollout count, "
                    f"and one answer takes at least {least}: raise it",
                    "sampling.max_completion_tokens",
                )
            self._made[kind] = form
            for line in form.notes if self.section.history == "keep" else ():
                if line not in known:
                    self.note(line)
        return self._made[kind]

    def encode(self, example: Example) -> np.ndarray:
        """Token ids of an example's prompt, int32[T], with its tools."""
        kind = self.sessions.kind_of(example.columns)
        return (self.tokenizer if kind and kind.asks else self.of(example.columns)).encode_prompt(
            example.prompt
        )


def make_player(turns: TurnFormats, places: int, sampling: SamplingSection) -> TurnDriver:
    """What plays rollouts of several turns on a sampler of so many places."""
    most = turns.section.rollouts or places
    return TurnDriver(
        turns.sessions, turns.of, turns.section, sampling.max_prompt_tokens, most, turns.tokenizer
    )


def open_sessions(task: Task, given: Any) -> Sessions | None:
    """The sessions of a task's rollouts, forked, and tried on the first row of each set; None
    without tools and environments. ShoalError for a tool without a schema, and an environment that
    cannot begin."""
    if not (task.tools or task.environments):
        return None
    section = section_of(given)
    sessions = Sessions(
        task.tools,
        task.environments,
        section,
        enter_sandbox(task, section) if section.sandbox == "bwrap" else None,
    )
    try:
        for rows in (task.train, *task.evaluations.values()):
            if rows:
                _try(sessions, rows[0])
    except BaseException:
        sessions.close()
        raise
    return sessions


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
        if kind and kind.asks:
            what = (
                ("agent", "environment.agent")
                if kind.type is Agent
                else ("rollout function", "environment.rollout")
            )
            raise ShoalError(f"the {what[0]} failed for {row}: {reply.error}", what[1])
        method, cure = (
            ("get_reward", "a number or None")
            if reply.what == "end"
            else (
                "reset",
                f"a text or None, of the columns {', '.join(example.columns)}; **columns takes "
                "what has no name",
            )
        )
        raise ShoalError(
            f"environment {kind and kind.type.__name__}: {method} failed for {row}: {reply.error}; "
            f"it must return {cure}",
            "environment.factory",
        )


SOCKET_FOLDERS = ("/run", "/var/run", "/tmp", "/var/tmp")
"""Where programs keep their sockets, Docker's and agents' of keys among them. A mount to be read
alone does not keep anybody from connecting, so the sandbox has empty folders in their place."""


_ESCAPED = re.compile(r"\\([0-7]{3})")
"""A space in a path of /proc/self/mountinfo."""


def enter_sandbox(task: Task, section: EnvironmentSection) -> Callable[[socket.socket], Any]:
    """What has a process become the supervisor in the sandbox. ShoalError where there can be
    none."""
    for one in (*task.tools, *task.environments.values()):
        if "<" in getattr(one, "__qualname__", "<"):
            raise ShoalError(
                f"environment.sandbox=bwrap: {name_of(one)!r} is no function or class that a file "
                "names",
                "environment.sandbox",
            )
    files = [str(inspect.getsourcefile(one)) for one in (*task.tools, *task.environments.values())]
    paths = [os.path.abspath(path) for path in sys.path]
    words = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--cap-drop",
        "ALL",
        "--clearenv",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        *_without_sockets([os.getcwd(), sys.prefix, sys.base_prefix, *paths], files),
        "--chdir",
        os.getcwd(),
        "--setenv",
        "HOME",
        "/dev/shm",
        "--setenv",
        "TMPDIR",
        "/dev/shm",
        "--setenv",
        "PYTHONPATH",
        os.pathsep.join(paths),
    ]
    require_bubblewrap("environment.sandbox=bwrap", words, "environment.sandbox")
    made = {name: _spec(one) for name, one in task.environments.items()}
    text = json.dumps([[_spec(one) for one in task.tools], made, asdict(section)])

    def enter(end: socket.socket) -> None:
        os.set_inheritable(end.fileno(), True)
        os.closerange(3, end.fileno())  # libraries open files that programs inherit
        os.closerange(end.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        # An empty environment: that of the sandbox's first process can be read in it, in
        # /proc/1/environ.
        os.execve(
            words[0],
            [
                *words,
                sys.executable,
                "-c",
                f"from {__name__} import serve; serve()",
                str(end.fileno()),
                text,
            ],
            {},
        )

    return enter


def _without_sockets(folders: Iterable[str], files: Iterable[str]) -> list[str]:
    """Words of bwrap that put empty folders in the place of `SOCKET_FOLDERS`, but for the folders
    and files that are named, and nothing in the place of every other socket."""
    hidden = {os.path.realpath(path) for path in SOCKET_FOLDERS if os.path.isdir(path)}
    words: list[str] = []
    for path in sorted(hidden):
        words += ["--tmpfs", path]
    shown: list[str] = []
    for folder in dict.fromkeys([*folders, *map(os.path.dirname, map(os.path.abspath, files))]):
        real = os.path.realpath(folder)
        if real in hidden:  # its files alone: tools may import each other
            shown += [str(one) for one in Path(real).glob("*.py")]
        elif _is_below(real, hidden) and os.path.exists(real):
            shown.append(real)
    for path in sorted(set(shown), key=len):
        words += ["--ro-bind", path, path]
    for path in sorted(set(_sockets())):
        if not _is_below(path, hidden) or _is_below(path, shown):
            words += ["--ro-bind", "/dev/null", path]
    for path in sorted(hidden):
        words += ["--remount-ro", path]
    return words


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _sockets() -> Iterator[str]:
    """Files that are sockets, by their real paths: those of this machine's programs, and those that
    were mounted."""
    listed: list[str] = []
    relative: dict[str, str] = {}
    for line in _lines_of_sockets():
        fields = line.split(maxsplit=7)  # a path may hold spaces
        if len(fields) == 8 and fields[7].startswith("/"):
            listed.append(fields[7])
        elif len(fields) == 8 and not fields[7].startswith("@"):
            relative[f"socket:[{fields[6]}]"] = fields[7]
    if relative:
        listed += _absolute(relative)
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    mounted = [_ESCAPED.sub(lambda match: chr(int(match[1], 8)), mount) for mount in mounts]
    for path in (*listed, *mounted):
        try:
            is_socket = path.startswith("/") and stat.S_ISSOCK(os.stat(path).st_mode)
        except OSError:  # of another root folder, or of another user
            continue
        if is_socket:
            yield os.path.realpath(path)


def _lines_of_sockets() -> Iterator[str]:
    """The lines about sockets of each network namespace that a process of this machine's has: a
    socket in a file is reached from every one."""
    tables = {os.readlink("/proc/self/ns/net"): Path("/proc/net/unix")}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            tables.setdefault(os.readlink(process / "ns" / "net"), process / "net" / "unix")
    for table in tables.values():
        with contextlib.suppress(OSError):
            yield from os.fsdecode(table.read_bytes()).split("\n")[1:]


def _absolute(relative: Mapping[str, str]) -> Iterator[str]:
    """The paths of sockets that were bound to a relative one, by the folder of each process that
    has them open."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            folder = os.readlink(process / "cwd")
            for name in os.listdir(process / "fd"):
                target = ""
                with contextlib.suppress(OSError):  # it was closed
                    target = os.readlink(process / "fd" / name)
                if target in relative:
                    yield os.path.join(folder, relative[target])


def _spec(one: Callable[..., Any]) -> str:
    return f"{inspect.getsourcefile(one)}:{one.__qualname__}"


def serve() -> None:
    """The life of the supervisor in the sandbox."""
    tools, environments, section = json.loads(sys.argv[2])
    found = load_named([*tools, *environments.values()], "tool")
    kinds = {
        name: EnvironmentKind.of(name, one)
        for name, one in zip(environments, found[len(tools) :], strict=True)
    }
    handle, limits, handle_async = supervised(
        {name_of(one): one for one in found[: len(tools)]}, kinds, EnvironmentSection(**section)
    )
    end, trainer = socket.socket(fileno=int(sys.argv[1])), os.getppid()
    live(lambda: Supervisor(end, handle, handle_async, limits, trainer).run())
