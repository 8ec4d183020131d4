"""How the processes of a run meet, before JAX knows of them: each says who it is to process 0, at the coordinator.

Their links stay open, and tell each of them when another ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shoal.config.schema import MeshSection
from shoal.mesh.coordination import OUTLIVES_SECONDS
from shoal.types import ShoalError

START_SECONDS = 300
"""How long processes wait for each other to start."""
REPEAT_SECONDS = 30
"""How often a process says again what it waits for."""
MOST_BYTES = 1 << 20
"""The longest line by which processes meet."""


@dataclass
class Wait:
    """A wait of START_SECONDS at most."""

    began: float = field(default_factory=time.monotonic)
    reports: int = 0

    @property
    def left(self) -> float:
        return self.began + START_SECONDS - time.monotonic()

    def report(self, what: str) -> None:
        """Says on stderr what is waited for: at once, and again every REPEAT_SECONDS."""
        if time.monotonic() >= self.began + self.reports * REPEAT_SECONDS:
            self.reports += 1
            print(f"waiting for {what}, {max(self.left, 0):.0f} s at most", file=sys.stderr, flush=True)


def meet_others(section: MeshSection) -> tuple[list[str], dict[int, socket.socket]]:
    """In process 0: the names of all processes, and the links to the others, once all have come.

    JAX's own service listens at the same port afterwards: it would abort the process where one does not come.
    """
    names, links = {0: _name(0)}, {}
    with _listener(section) as listener:
        wait = Wait()
        while missing := sorted(set(range(section.processes)) - set(names)):
            those = f"process {', '.join(map(str, missing))}"
            if wait.left <= 0:
                raise _refused(links.values(), f"mesh.processes={section.processes}: {those} has not come within "
                               f"{START_SECONDS} s; start each with its own mesh.process, and mesh.coordinator="
                               f"{section.coordinator}")
            listener.settimeout(0.2)
            try:
                link, _ = listener.accept()
            except TimeoutError:
                wait.report(f"{those} at {section.coordinator}")
                continue
            try:
                one = _read_line(link, seconds=10)
                number, count, name = int(one["process"]), int(one["processes"]), str(one["name"])
            except (OSError, ValueError, KeyError, TypeError):  # not a process of a run
                link.close()
                continue
            wrong = f"mesh.processes={count}, process 0 has mesh.processes={section.processes}" \
                if count != section.processes else f"mesh.process={number}, as {names[number]} has" \
                if number in names else ""
            if wrong:
                raise _refused((*links.values(), link), f"{name} was started with {wrong}")
            names[number], links[number] = name, link
    listed = [names[number] for number in range(section.processes)]
    for link in links.values():
        _send_line(link, {"names": listed})
    return listed, links


def _refused(links: Iterable[socket.socket], text: str) -> ShoalError:
    """The error with this text, which the processes of these links raise too."""
    for link in links:
        _send_line(link, {"error": text})
        link.close()
    return ShoalError(text)


def _listener(section: MeshSection) -> socket.socket:
    port, dual = int(section.coordinator.rpartition(":")[2]), socket.has_dualstack_ipv6()
    deadline = time.monotonic() + 2 * OUTLIVES_SECONDS  # the service of a run that was killed just now has the port
    while True:
        try:
            return socket.create_server(("", port), family=socket.AF_INET6 if dual else socket.AF_INET,
                                        backlog=section.processes, dualstack_ipv6=dual)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise ShoalError(f"mesh.coordinator={section.coordinator}: process 0 cannot listen there "
                                 f"({error.strerror}); choose another port") from error
        time.sleep(0.5)


def meet_main(section: MeshSection) -> tuple[list[str], dict[int, socket.socket]]:
    """In the other processes: the names of all, and the link to process 0, once all have come."""
    deadline = time.monotonic() + 2 * OUTLIVES_SECONDS  # the service of a run that was killed just now may answer
    while True:
        try:
            return _meet_main(section)
        except _Unreadable:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


class _Unreadable(ShoalError):
    """What answers at the coordinator's address is no process 0 that waits for others."""


def _meet_main(section: MeshSection) -> tuple[list[str], dict[int, socket.socket]]:
    host, _, port = section.coordinator.rpartition(":")
    wait = Wait()
    while True:
        try:
            link = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
            break
        except OSError as error:
            if wait.left <= 0:
                raise ShoalError(f"mesh.coordinator={section.coordinator}: nobody answers there "
                                 f"({error.strerror or error}) after {START_SECONDS} s; start process 0 "
                                 "(mesh.process=0) on that host, with this port open") from error
        wait.report(f"process 0 at {section.coordinator}")
        time.sleep(0.2)
    try:
        _send_line(link, {"process": section.process, "processes": section.processes, "name": _name(section.process)})
        wait = Wait()
        while not select.select([link], [], [], 1)[0] and wait.left > -10:  # process 0 gives up first, with its reason
            wait.report("the other processes, which have yet to meet process 0")
        answer = _read_line(link, seconds=10)
        if "error" in answer:
            link.close()
            raise ShoalError(answer["error"])
        print(f"process {section.process}: all {section.processes} have come; process 0 prints what they do",
              file=sys.stderr, flush=True)
        return list(answer["names"]), {0: link}
    except (OSError, ValueError, KeyError, TypeError) as error:
        link.close()
        raise _Unreadable(f"mesh.coordinator={section.coordinator}: what answers there is no process 0 of a run, or "
                          "it has ended; start it again, or give another port") from error


def _name(number: int) -> str:
    return f"process {number} ({socket.gethostname()}, pid {os.getpid()})"


def _send_line(link: socket.socket, value: Any) -> None:
    with contextlib.suppress(OSError):
        link.sendall(json.dumps(value).encode() + b"\n")


def _read_line(link: socket.socket, seconds: float) -> Any:
    """One line of JSON, a byte at a time: what follows it is not this reader's."""
    link.settimeout(seconds)
    line = b""
    while not line.endswith(b"\n") and len(line) < MOST_BYTES and (byte := link.recv(1)):
        line += byte
    return json.loads(line)
