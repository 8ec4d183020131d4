"""Sessions in bubblewrap (`bwrap`), the supervisor and all of its workers in one sandbox: no
network, no variables of the environment, no sockets of other programs, files to be read alone, but
those of its own in /dev/shm."""

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.config.environment_section import EnvironmentSection
from shoal.rewards.functions import load_named
from shoal.tasks.task import Task
from shoal.types import ShoalError
from shoal.workers.environments import EnvironmentKind, name_of
from shoal.workers.pool import Supervisor
from shoal.workers.process import live, require_bubblewrap
from shoal.workers.sessions import supervised

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
                f"names",
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
    live(lambda: Supervisor(end, handle, handle_async, limits, trainer).run(lambda: None))
