"""How the processes of a run meet before JAX starts: each sends process 0 a signed line that says
who it is.

    process 1  ->  SIGNATURE {"process": 1, "processes": 2, "name": "process 1 (host, pid 12)"}
    process 0  ->  SIGNATURE {"names": [...]}    once all have come, or {"error": "..."}

Lines are signed with the secret in SHOAL_MESH_TOKEN. The links stay open: they show each process
the end of another.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jaxlib._jax as jaxlib

from shoal.config.schema import MeshSection
from shoal.types import ShoalError

START_SECONDS = 300
"""How long processes wait for each other to start."""
REPEAT_SECONDS = 30
"""Seconds between two reports of a wait."""
GREETING_SECONDS, GREETING_BYTES = 2.0, 1 << 12
"""Limits of a stranger's line: process 0 reads one link at a time."""
ANSWER_SECONDS, ANSWER_BYTES = 10.0, 1 << 20
OUTLIVES_SECONDS = 5
"""So long JAX's coordination service outlives process 0: by then the other processes have seen its
end."""
TOKEN = "SHOAL_MESH_TOKEN"
"""The environment's, since a key would stand in the list of processes and in the run folder."""
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's variable for a process 0 that others reach by an address that its machine does not have."""
MALFORMED = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""What reading a line of something else than a process of the run raises."""


def is_loopback(host: str) -> bool:
    """True for a host that only processes of the same machine reach."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def bind_address(section: MeshSection) -> str:
    """HOST:PORT where process 0 and JAX's service listen: the coordinator's, or all addresses of
    this machine where its name is a loopback address here, as in the hosts file of Debian and
    Ubuntu (127.0.1.1), which no other reaches."""
    if given := os.environ.get(BIND_ADDRESS):
        return given
    host, _, port = section.coordinator.rpartition(":")
    return f"0.0.0.0:{port}" if loopback_of_name(host) else section.coordinator


def loopback_of_name(name: str) -> str:
    """The address that a name has on this machine, where it is loopback alone though the name does
    not say so; "" for all others."""
    if is_loopback(name):
        return ""
    try:
        found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    addresses = [str(address[0]) for *_, address in found]
    return addresses[0] if all(map(is_loopback, addresses)) else ""


def _address_here(links: Iterable[socket.socket]) -> str:
    """An address of this machine by which another one's process has a link to it; "" where all are
    of this machine."""
    addresses = (str(link.getsockname()[0]) for link in links)
    return next((address for address in addresses if not is_loopback(address)), "")


@dataclass
class Wait:
    """A wait of START_SECONDS at most."""

    began: float = field(default_factory=time.monotonic)
    reports: int = 0

    @property
    def left(self) -> float:
        return self.began + START_SECONDS - time.monotonic()

    def report(self, what: str) -> None:
        """Prints what is waited for on stderr: at once, and again every REPEAT_SECONDS."""
        if time.monotonic() >= self.began + self.reports * REPEAT_SECONDS:
            self.reports += 1
            print(
                f"waiting for {what}, {max(self.left, 0):.0f} s at most",
                file=sys.stderr,
                flush=True,
            )


class Met(NamedTuple):
    """What a process knows once all have come."""

    names: list[str]  # of all processes
    links: dict[int, socket.socket]  # to process 0, or in process 0 to all others
    address: str  # of this machine, for the others; empty where all are on it


def meet_others(section: MeshSection) -> Met:
    """In process 0: waits until all have come.

    Links without a correct line are closed and counted. JAX's service listens at the same port
    afterwards; it would abort the process where another does not come.
    """
    names, links, dropped = {0: _name(0)}, {}, 0
    host = section.coordinator.rpartition(":")[0]
    if BIND_ADDRESS not in os.environ and (address := loopback_of_name(host)):
        print(
            f"mesh.coordinator={section.coordinator}: {host} is {address} on this machine (its "
            f"hosts file), which no "
            "other reaches, so process 0 listens at all addresses of this machine",
            file=sys.stderr,
            flush=True,
        )
    with _listener(section) as listener:
        listener.settimeout(0.2)
        wait = Wait()
        while missing := sorted(set(range(section.processes)) - set(names)):
            awaited = f"process {', '.join(map(str, missing))}"
            strangers = (
                f" (dropped connections without the run's {TOKEN}: {dropped})" if dropped else ""
            )
            if wait.left <= 0:
                raise _refused(
                    links.values(),
                    f"mesh.processes={section.processes}: {awaited} has not come within "
                    f"{START_SECONDS} s{strangers}; start each with its own mesh.process, the same "
                    f"{TOKEN} "
                    f"and mesh.coordinator={section.coordinator}",
                )
            try:
                link, _ = listener.accept()
            except TimeoutError:
                wait.report(f"{awaited} at {section.coordinator}{strangers}")
                continue
            try:
                number, count, name = _read_greeting(link, section.processes)
            except MALFORMED:
                dropped += 1
                link.close()
                continue
            if count != section.processes:
                fault = f"mesh.processes={count}, process 0 has mesh.processes={section.processes}"
            else:
                fault = f"mesh.process={number}, as {names[number]} has" if number in names else ""
            if fault:
                raise _refused((*links.values(), link), f"{name} was started with {fault}")
            names[number], links[number] = name, link
    if dropped:
        print(
            f"dropped connections without the run's {TOKEN}: {dropped}", file=sys.stderr, flush=True
        )
    ordered = [names[number] for number in range(section.processes)]
    address = _address_here(links.values())
    for link in links.values():
        _send_line(link, {"names": ordered, "address": address})
    return Met(ordered, links, address)


def _read_greeting(link: socket.socket, processes: int) -> tuple[int, int, str]:
    """Number, count of processes and name that a process sends; one of MALFORMED if it is none of
    this run."""
    line = _read_line(link, GREETING_SECONDS, GREETING_BYTES)
    number, count, name = line["process"], line["processes"], line["name"]
    if [type(value) for value in (number, count, name)] != [
        int,
        int,
        str,
    ] or not 0 < number < count:
        raise ValueError("not a greeting")
    return number, count, name


def _refused(links: Iterable[socket.socket], text: str) -> ShoalError:
    """The error with this text, which the processes of these links raise too."""
    for link in links:
        _send_line(link, {"error": text})
        link.close()
    return ShoalError(text)


def _listener(section: MeshSection) -> socket.socket:
    """Listens at the named host alone."""
    host, _, port = bind_address(section).rpartition(":")
    deadline = (
        time.monotonic() + 2 * OUTLIVES_SECONDS
    )  # the service of a run that was killed just now has the port
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )[0]
            return socket.create_server(address, family=family, backlog=section.processes)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise ShoalError(
                    f"mesh.coordinator={section.coordinator}: process 0 cannot listen at "
                    f"{host}:{port} "
                    f"({error.strerror}); give an address of this host and a free port"
                ) from error
        time.sleep(0.5)


def meet_main(section: MeshSection) -> Met:
    """In the other processes: waits until all have come."""
    deadline = (
        time.monotonic() + 2 * OUTLIVES_SECONDS
    )  # the service of a run that was killed just now may answer
    while True:
        link = _connect(section)
        try:
            _send_line(
                link,
                {
                    "process": section.process,
                    "processes": section.processes,
                    "name": _name(section.process),
                },
            )
            wait = Wait()
            # Process 0 gives up first, with its reason.
            while not select.select([link], [], [], 1)[0] and wait.left > -ANSWER_SECONDS:
                wait.report("the other processes, which have yet to meet process 0")
            answer = _read_line(link, ANSWER_SECONDS, ANSWER_BYTES)
            if "error" not in answer:
                print(
                    f"process {section.process}: all {section.processes} have come; process 0 "
                    f"prints what they do",
                    file=sys.stderr,
                    flush=True,
                )
                # By loopback it is on process 0's machine, and has its address.
                return Met(
                    list(answer["names"]),
                    {0: link},
                    _address_here([link]) or str(answer["address"]),
                )
        except MALFORMED as error:
            link.close()
            if time.monotonic() > deadline:
                raise ShoalError(
                    f"mesh.coordinator={section.coordinator}: what answers there is no process 0 "
                    f"of a "
                    f"run with this {TOKEN}, or it has ended; start it again, or give another port"
                ) from error
            time.sleep(0.5)
            continue
        link.close()
        raise ShoalError(answer["error"])


def _connect(section: MeshSection) -> socket.socket:
    """A link to process 0; ShoalError if nothing listens there within START_SECONDS."""
    host, _, port = section.coordinator.rpartition(":")
    wait = Wait()
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        except OSError as error:
            cause = f"{error.strerror or error}{_address_text(host)}"
            if wait.left <= 0:
                raise ShoalError(
                    f"mesh.coordinator={section.coordinator}: nobody answers there "
                    f"({cause}) after {START_SECONDS} s; start process 0 "
                    "(mesh.process=0) on that host, with this port open"
                ) from error
        wait.report(f"process 0 at {section.coordinator}, where nobody answers yet ({cause})")
        time.sleep(0.2)


def _address_text(name: str) -> str:
    """Behind what goes wrong with a name: the address that it has on this machine."""
    with contextlib.suppress(OSError, ValueError):
        address = socket.gethostbyname(name)
        return "" if address == name else f"; {name} is {address} on this machine"
    return ""


def _name(number: int) -> str:
    return f"process {number} ({socket.gethostname()}, pid {os.getpid()})"


def _signature(text: bytes) -> bytes:
    return hmac.new(os.environ.get(TOKEN, "").encode(), text, "sha256").hexdigest().encode()


def _send_line(link: socket.socket, value: Any) -> None:
    text = json.dumps(value).encode()
    with contextlib.suppress(OSError):
        link.sendall(_signature(text) + b" " + text + b"\n")


def _read_line(link: socket.socket, seconds: float, most_bytes: int) -> Any:
    """The value of a signed line, read a byte at a time: what follows it is for another reader."""
    line, deadline = b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        link.settimeout(max(deadline - time.monotonic(), 1e-3))
        if len(line) == most_bytes or time.monotonic() > deadline or not (byte := link.recv(1)):
            raise ValueError("no line")
        line += byte
    signature, _, text = line.rstrip(b"\n").partition(b" ")
    if not hmac.compare_digest(signature, _signature(text)):
        raise ValueError("signed with another secret")
    return json.loads(text)


# ---- what JAX starts next

SERVICE = f"""
import json, os, sys, time
from jaxlib import _jax
address, count, options = json.loads(sys.argv[1])
service = _jax.get_distributed_runtime_service(address, count, **options)
print("ready", flush=True)
time.sleep(0 if sys.stdin.read() else {OUTLIVES_SECONDS})
os._exit(0)
"""


class CoordinationService:
    """JAX's coordination service of an address in a process of its own, with JAX's arguments; it
    listens once this is made.

    In process 0, where JAX would have it, it ends with that process, and JAX's clients in all
    others abort with a page of text, often before they can say who has ended. So they do wherever
    the service reports the end of a process: JAX 0.10.2 cannot call Python then
    (`missed_heartbeat_callback` ends in std::bad_cast), and without links of our own nobody would
    hear why.
    """

    def __init__(self, address: str, count: int, **options: Any):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, json.dumps([address, count, options])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )  # no Ctrl-C
        assert self.process.stdout
        if self.process.stdout.readline() != "ready\n":
            raise ShoalError(
                f"mesh.coordinator: JAX's coordination service cannot listen at {address}; choose "
                f"another "
                "port"
            )

    def shutdown(self) -> None:
        self.process.communicate("stop")


@contextlib.contextmanager
def service_apart() -> Iterator[None]:
    """Inside, `jax.distributed.initialize` starts the service in a process of its own."""
    usual = jaxlib.get_distributed_runtime_service
    jaxlib.get_distributed_runtime_service = CoordinationService
    try:
        yield
    finally:
        jaxlib.get_distributed_runtime_service = usual
