"""How the processes of a run meet, before JAX knows of them: each says who it is to process 0, at the coordinator.

Their links stay open, and tell each of them when another ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
from typing import Any

from shoal.config.schema import MeshSection
from shoal.mesh.coordination import OUTLIVES_SECONDS
from shoal.types import ShoalError

START_SECONDS = 300
"""How long processes wait for each other to start."""
MOST_BYTES = 1 << 20
"""The longest line by which processes meet."""


def meet_others(section: MeshSection) -> tuple[list[str], dict[int, socket.socket]]:
    """In process 0: the names of all processes, and the links to the others, once all have come.

    JAX's own service listens at the same port afterwards: it would abort the process where one does not come.
    """
    names, links = {0: _name(0)}, {}
    with _listener(section) as listener:
        deadline = time.monotonic() + START_SECONDS
        while missing := sorted(set(range(section.processes)) - set(names)):
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                link, _ = listener.accept()
            except TimeoutError:
                raise ShoalError(f"mesh.processes={section.processes}: process {', '.join(map(str, missing))} has not "
                                 f"come within {START_SECONDS} s; start each with its own mesh.process, and "
                                 f"mesh.coordinator={section.coordinator}") from None
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
                for other in (*links.values(), link):
                    _send_line(other, {"error": f"{name} was started with {wrong}"})
                    other.close()
                raise ShoalError(f"{name} was started with {wrong}")
            names[number], links[number] = name, link
    listed = [names[number] for number in range(section.processes)]
    for link in links.values():
        _send_line(link, {"names": listed})
    return listed, links


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
    host, _, port = section.coordinator.rpartition(":")
    deadline, reported = time.monotonic() + START_SECONDS, False
    while True:
        try:
            link = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ShoalError(f"mesh.coordinator={section.coordinator}: nobody answers there "
                                 f"({error.strerror or error}) after {START_SECONDS} s; start process 0 "
                                 "(mesh.process=0) on that host, with this port open") from error
        if not reported:
            reported = True
            print(f"waiting for process 0 at {section.coordinator}", file=sys.stderr, flush=True)
        time.sleep(0.2)
    try:
        _send_line(link, {"process": section.process, "processes": section.processes, "name": _name(section.process)})
        answer = _read_line(link, START_SECONDS + 10)
        if "error" in answer:
            link.close()
            raise ShoalError(answer["error"])
        return list(answer["names"]), {0: link}
    except (OSError, ValueError, KeyError, TypeError) as error:
        link.close()
        raise ShoalError(f"mesh.coordinator={section.coordinator}: what answers there is no process 0 of a run, or it "
                         "has ended; start it again, or give another port") from error


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
