"""Loads the tools and environments of a run, tries them before weights are read, and makes the
sandbox that their worker processes enter."""

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
from shoal.chat.turns import TurnFormat, find_call_format, schema
from shoal.config.keywords import FROM_PYTHON
from shoal.config.sections.sampling import SamplingSection
from shoal.config.sections.task import EnvironmentSection
from shoal.records import Example, ShoalError
from shoal.rewards.loading import load_functions, load_objects
from shoal.rollout.turn_driver import TurnDriver
from shoal.serve.agent import AgentProgram
from shoal.serve.server import require_packages
from shoal.tasks.openenv import PREFIX, openenv
from shoal.tasks.task import Task
from shoal.workers.environments import EnvironmentKind, name_of
from shoal.workers.pool import Supervisor
from shoal.workers.process import require_bubblewrap, run_child
from shoal.workers.rollout_function import ROLLOUT, Agent, RolloutCall
from shoal.workers.sessions import Reply, Sessions, supervisor_settings


def section_of(given: Any) -> EnvironmentSection:
    """Returns the section `environment` of a configuration; the defaults if its command has
    none."""
    return getattr(given, "environment", EnvironmentSection())


def with_environment(task: Task, given: Any) -> Task:
    """Returns the task with the tools and environments of the section `environment` of the
    configuration `given` in place of its own: `tools`, `factory` (also an environment of OpenEnv),
    or, as an environment by which a program of the user drives the whole rollout, `rollout` or
    `agent`. `rollout` and `agent` also remove the task's tools. Without these keys returns the task
    as it is. A given configuration without the section counts as one without the keys. ShoalError
    if a file lacks what is named."""
    section = section_of(given)
    if section.tools:
        specs = []
        file = ""
        for spec in section.tools:  # in [file.py:f,g], g is from the file of f
            file = spec.rpartition(":")[0] or file
            if ":" in spec:
                specs.append(spec)
            else:
                specs.append(f"{file}:{spec}")
        task = replace(task, tools=tuple(load_functions(specs, "tool", "")))
    if section.factory:
        if section.factory.startswith(PREFIX):
            require_packages("openenv", "websockets")
            made = openenv(section.factory)
        else:
            made = load_objects([section.factory], "environment")[0]
        environments = made if isinstance(made, Mapping) else {name_of(made): made}
        task = replace(task, environments=environments)
    if section.rollout:
        [function] = load_functions([section.rollout], "rollout", "")
        task = replace(task, tools=(), environments={ROLLOUT: partial(RolloutCall, function)})
    if section.agent:
        first_word = section.agent.partition(" ")[0]
        # a function, from Python or as file.py:NAME; anything else is the command line of a program
        is_function = section.agent.startswith(FROM_PYTHON) or ".py:" in first_word
        program = section.agent
        if is_function:
            [program] = load_functions([section.agent], "agent", "")
        agent = AgentProgram(program, given.sampling, given.model.path)
        task = replace(task, tools=(), environments={ROLLOUT: partial(Agent, agent)})
    return task


def _no_note(line: str) -> None:
    """Does nothing; stands in for `TurnFormats.note`."""


@dataclass
class TurnFormats:
    """How the turns of rollouts are written as tokens: a format for each kind of environment, by
    its tools. `note` is called, once for each line, with what the chat template would change in
    earlier turns."""

    tokenizer: Tokenizer
    sessions: Sessions
    section: EnvironmentSection
    note: Callable[[str], None] = _no_note
    limit: int = 1 << 30  # sampling.max_completion_tokens
    _made: dict[EnvironmentKind | None, TurnFormat] = field(default_factory=dict)

    def of(self, columns: Mapping[str, Any]) -> TurnFormat:
        """Returns the format of rollouts on a row with these columns; one is made for each kind of
        environment when it is first needed, and kept. Rows without an environment share one.
        ShoalError if `sampling.max_completion_tokens` is too small for even one answer of a
        tool."""
        kind = self.sessions.kind_of(columns)
        if kind in self._made:
            return self._made[kind]
        functions = self.sessions.functions(columns)
        turn_format = TurnFormat(
            self.tokenizer,
            [schema(function) for function in functions.values()],
            self.section.call_format,
            self.section.special_tokens,
        )
        if functions:
            shortest_answer = {"role": "tool", "name": next(iter(functions)), "content": "1"}
        else:
            shortest_answer = {"role": "user", "content": "1"}
        # One token must be sampled before the answer, and one after it.
        least = 2 + len(turn_format.encode_context([shortest_answer]))
        if self.limit < least:
            raise ShoalError(
                f"sampling.max_completion_tokens={self.limit}: all tokens of a rollout count, "
                f"and one answer takes at least {least}: raise it",
                "sampling.max_completion_tokens",
            )
        noted: set[str] = set()
        for made in self._made.values():
            noted.update(made.notes)
        self._made[kind] = turn_format
        if self.section.history == "keep":
            for line in turn_format.notes:
                if line not in noted:
                    self.note(line)
        return turn_format

    def encode(self, example: Example) -> np.ndarray:
        """Returns the token ids of an example's prompt, int32[T], including the description of its
        tools; without it if a program of the user drives the rollout. ShoalError if
        `sampling.max_completion_tokens` is too small for one answer of a tool."""
        kind = self.sessions.kind_of(example.columns)
        if (
            kind and kind.is_rollout_function
        ):  # the environment is a program that writes its own prompts
            return self.tokenizer.encode_prompt(example.prompt)
        return self.of(example.columns).encode_prompt(example.prompt)


def written_call_format(tokenizer: Tokenizer, sessions: Sessions) -> str:
    """Returns the form in which the tokenizer or its chat template writes tool calls, a value of
    `environment.call_format`. '' if rollouts have no tools, or if the form is not known. Of
    environments it asks for the first kind that has tools."""
    functions = dict(sessions.tools)
    for kind in sessions.kinds.values():
        # Any tools will do, because all kinds of environments have the same template.
        functions = functions or dict(kind.tools)
    if not functions:
        return ""
    with contextlib.suppress(ShoalError):  # raised again, with the row, by `TurnFormats.of`
        return find_call_format(tokenizer, [schema(function) for function in functions.values()])
    return ""


def make_turn_driver(turns: TurnFormats, num_slots: int, sampling: SamplingSection) -> TurnDriver:
    """Makes the driver, which answers the turns of rollouts by tools and environments. The sessions
    stay the caller's to close. As many rollouts run at once as `environment.rollouts` says, by
    default one for each of the sampler's `num_slots` slots."""
    num_rollouts = turns.section.rollouts or num_slots
    return TurnDriver(
        sessions=turns.sessions,
        format_of=turns.of,
        section=turns.section,
        max_prompt_tokens=sampling.max_prompt_tokens,
        most=num_rollouts,
        tokenizer=turns.tokenizer,
    )


def open_sessions(task: Task, given: Any) -> Sessions | None:
    """Forks the processes that run a task's tools and environments, tries them on the first row of
    each set, and returns their sessions, which the caller closes. `given`: a configuration, with or
    without the section `environment`. None if the task has neither. ShoalError if a tool has no
    schema or an environment cannot begin."""
    if not (task.tools or task.environments):
        return None
    section = section_of(given)
    enter = None
    if section.sandbox == "bwrap":
        enter = enter_sandbox(task, section)
    sessions = Sessions(task.tools, task.environments, section, enter)
    try:
        for rows in [task.train, *task.evaluations.values()]:
            if rows:
                _try(sessions, rows[0])
    except BaseException:
        sessions.close()
        raise
    return sessions


def _try(sessions: Sessions, example: Example) -> None:
    """Tries the tools and the environment of a row: reads the tools' schemas, begins a session and
    ends it, and waits until both are done. ShoalError if one of these fails, for the first
    failure."""
    for function in sessions.functions(example.columns).values():
        schema(function)
    sessions.open("tried", {**example.columns, "prompt": example.prompt})
    sessions.end("tried")
    replies: list[Reply] = []
    while not any(reply.fatal or reply.what == "end" for reply in replies):
        replies += sessions.collect(1.0)
    for reply in replies:
        if reply.kind:  # the kind of fault; empty for none
            raise _fault_of(reply, sessions.kind_of(example.columns), example)


def _fault_of(reply: Reply, kind: EnvironmentKind | None, example: Example) -> ShoalError:
    """Returns the error that names the function of the user that failed on a row: the agent, the
    rollout function, or the method of an environment (`get_reward` if the session failed at its
    end, else `reset`), with what it must return. `kind`: the row's kind of environment, if any;
    `reply`: the one that says what failed."""
    row = example.place or f"data row {example.row}"
    if kind and kind.is_rollout_function and kind.type is Agent:
        return ShoalError(f"the agent failed for {row}: {reply.error}", "environment.agent")
    if kind and kind.is_rollout_function:
        return ShoalError(
            f"the rollout function failed for {row}: {reply.error}", "environment.rollout"
        )
    if reply.what == "end":
        method = "get_reward"
        returned = "a number or None"
    else:
        method = "reset"
        returned = (
            f"a text or None, of the columns {', '.join(example.columns)}; **columns takes what "
            "has no name"
        )
    return ShoalError(
        f"environment {kind and kind.type.__name__}: {method} failed for {row}: {reply.error}; "
        f"it must return {returned}",
        "environment.factory",
    )


SOCKET_FOLDERS = ("/run", "/var/run", "/tmp", "/var/tmp")
"""Folders in which programs keep sockets, for example Docker and agents that hold keys. A read-only
mount does not prevent connecting to a socket, so the sandbox has empty folders in their place."""


_ESCAPED = re.compile(r"\\([0-7]{3})")
"""An escaped character, like a space, in a path of /proc/self/mountinfo."""


def enter_sandbox(task: Task, section: EnvironmentSection) -> Callable[[socket.socket], Any]:
    """Prepares `environment.sandbox=bwrap`. Returns a function that a forked process calls to
    become the supervisor of tools and environments in the sandbox: it executes bubblewrap, which
    starts `serve` there, and so does not return; its argument is the supervisor's end of a socket.
    Nothing is forked here. ShoalError if bubblewrap cannot be used, or if a tool or environment has
    no name by which the new process could import it."""
    loaded = list(task.tools) + list(task.environments.values())
    files = []
    for function in loaded:
        # Lambdas, nested functions (`f.<locals>.g`) and objects without a name cannot be imported.
        if "<" in getattr(function, "__qualname__", "<"):
            raise ShoalError(
                f"environment.sandbox=bwrap: {name_of(function)!r} is not a function or class "
                "of a file",
                "environment.sandbox",
            )
        files.append(str(inspect.getsourcefile(function)))
    paths = [os.path.abspath(path) for path in sys.path]
    words = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent"]
    words += ["--cap-drop", "ALL", "--clearenv"]
    words += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    # after the mount of /, because these mounts lie in it
    words += _without_sockets([os.getcwd(), sys.prefix, sys.base_prefix, *paths], files)
    words += ["--chdir", os.getcwd()]
    words += ["--setenv", "HOME", "/dev/shm", "--setenv", "TMPDIR", "/dev/shm"]
    words += ["--setenv", "PYTHONPATH", os.pathsep.join(paths)]
    require_bubblewrap("environment.sandbox=bwrap", words, "environment.sandbox")
    tools = [_spec(tool) for tool in task.tools]
    environments = {name: _spec(made) for name, made in task.environments.items()}
    text = json.dumps([tools, environments, asdict(section)])
    program = f"from {__name__} import serve; serve()"

    def enter(end: socket.socket) -> None:
        """Replaces this process by the supervisor in the sandbox; keeps only the socket `end` open.
        Does not return."""
        os.set_inheritable(end.fileno(), True)
        os.closerange(3, end.fileno())  # libraries open files that programs inherit
        os.closerange(end.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        # The environment is empty, because in the sandbox that of its first process can be read
        # from /proc/1/environ.
        command = [*words, sys.executable, "-c", program, str(end.fileno()), text]
        os.execve(words[0], command, {})

    return enter


def _without_sockets(folders: Iterable[str], files: Iterable[str]) -> list[str]:
    """Returns arguments of bwrap, in their order, that hide the machine's sockets. SOCKET_FOLDERS
    become empty folders, read-only, in which only the `folders` and the folders of the `files` are
    visible (of a folder that is one of SOCKET_FOLDERS itself, its Python files); a socket anywhere
    else is replaced by /dev/null. `folders` and `files` that do not lie in SOCKET_FOLDERS are
    visible anyway."""
    hidden = {os.path.realpath(path) for path in SOCKET_FOLDERS if os.path.isdir(path)}
    words: list[str] = []
    for path in sorted(hidden):
        words += ["--tmpfs", path]
    named = list(folders)
    for file in files:
        named.append(os.path.dirname(os.path.abspath(file)))
    shown: list[str] = []
    for folder in dict.fromkeys(named):
        real = os.path.realpath(folder)
        if real in hidden:  # only its Python files are shown, because tools may import each other
            shown += [str(path) for path in Path(real).glob("*.py")]
        elif _is_below(real, hidden) and os.path.exists(real):
            shown.append(real)
    # Outer folders come first: a later mount of an outer folder would hide an inner one.
    for path in sorted(set(shown), key=len):
        words += ["--ro-bind", path, path]
    for path in sorted(set(_sockets())):
        if not _is_below(path, hidden) or _is_below(path, shown):
            words += ["--ro-bind", "/dev/null", path]
    # Last, because bwrap has to make the mount points above in these folders.
    for path in sorted(hidden):
        words += ["--remount-ro", path]
    return words


def _is_below(path: str, folders: Iterable[str]) -> bool:
    """True if a path is one of the folders, or lies in one."""
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _sockets() -> Iterator[str]:
    """Yields the real paths of files that are sockets: those that programs of this machine listen
    at, and those that were mounted."""
    listed: list[str] = []
    relative: dict[str, str] = {}
    for line in _lines_of_sockets():
        # Num RefCount Protocol Flags Type St Inode Path; @ begins names that are no files.
        fields = line.split(maxsplit=7)  # a path may hold spaces
        if len(fields) == 8 and fields[7].startswith("/"):
            listed.append(fields[7])
        elif len(fields) == 8 and not fields[7].startswith("@"):
            relative[f"socket:[{fields[6]}]"] = fields[7]
    if relative:
        listed += _absolute(relative)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount = line.split()[4]  # the mount point
        listed.append(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), mount))
    for path in listed:
        try:
            is_socket = path.startswith("/") and stat.S_ISSOCK(os.stat(path).st_mode)
        except OSError:  # the socket belongs to another root folder or another user
            continue
        if is_socket:
            yield os.path.realpath(path)


def _lines_of_sockets() -> Iterator[str]:
    """Yields the lines of /proc/net/unix of each network namespace that a process of this machine
    is in, because a socket in a file can be reached from all of them. Namespaces of other users'
    processes are left out. A namespace is read once."""
    tables = {os.readlink("/proc/self/ns/net"): Path("/proc/net/unix")}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            tables.setdefault(os.readlink(process / "ns" / "net"), process / "net" / "unix")
    for table in tables.values():
        with contextlib.suppress(OSError):
            # The first line has the columns' names.
            yield from os.fsdecode(table.read_bytes()).split("\n")[1:]


def _absolute(relative: Mapping[str, str]) -> Iterator[str]:
    """Yields the full paths of sockets that were bound to a relative path, from `relative`:
    `socket:[inode]` -> that path. It is relative to the working folder of a process that has the
    socket open, so there is one full path for each such process."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            folder = os.readlink(process / "cwd")
            for name in os.listdir(process / "fd"):
                target = ""
                with contextlib.suppress(OSError):  # it was closed
                    target = os.readlink(process / "fd" / name)
                if target in relative:
                    yield os.path.join(folder, relative[target])


def _spec(function: Callable[..., Any]) -> str:
    """Returns `FILE:NAME` of a function or class."""
    return f"{inspect.getsourcefile(function)}:{function.__qualname__}"


def serve() -> None:
    """Runs the supervisor of tools and environments in the sandbox, until the trainer is gone. It
    is the program that `enter_sandbox` starts; `sys.argv` has the number of the socket's file
    descriptor and a JSON text [tools, environments, section], in which each tool and environment is
    `FILE:NAME`. Does not return."""
    tool_specs, environment_specs, section = json.loads(sys.argv[2])
    # Loaded in one call, so that what comes from one file shares one module.
    specs = list(tool_specs) + list(environment_specs.values())
    loaded = load_objects(specs, "tool")
    tools = {name_of(tool): tool for tool in loaded[: len(tool_specs)]}
    kinds = {}
    for name, environment in zip(environment_specs, loaded[len(tool_specs) :], strict=True):
        kinds[name] = EnvironmentKind.of(name, environment)
    handle, limits, handle_async = supervisor_settings(tools, kinds, EnvironmentSection(**section))
    end = socket.socket(fileno=int(sys.argv[1]))
    trainer = os.getppid()

    def supervise() -> None:
        Supervisor(end, handle, handle_async, limits, trainer).run()

    run_child(supervise)
