"""Several processes that train one model: they find each other, authenticate by a shared secret,
exchange bytes, and notice each other's end.

    find_processes   the number of processes and of this one, from the keys, Slurm or a TPU slice;
                     starts nothing
    join             JAX's world of all processes, and the `World` in which they exchange
    World.exchange   every process gives bytes and gets those of all, in the processes' order

Whatever the processes decide, they decide from what they have exchanged, so it never depends on
which process is faster.
"""

from __future__ import annotations

import atexit
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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jaxlib._jax as jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shoal.config.sections.devices import MeshSection
from shoal.mesh.devices import uses_pathways
from shoal.records import ShoalError

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A link whose other machine is gone closes after 10 + 4 x 5 seconds."""


HEARTBEAT_SECONDS = 40
"""If a process gives no sign of life for this time (it is frozen), JAX ends the others."""


LEAVE_SECONDS = 45
"""How long a process that fails waits for the others to fail too; if they do not, it has failed
alone."""


REPORT_SECONDS = 60
"""The interval at which a wait in an exchange is reported, with the process that is waited for."""


STORE_BYTES = 1 << 16
"""More bytes than this are exchanged by the devices' collectives. JAX's store would be slower,
because process 0 sends all that it holds to all others (100 MB between two processes of a machine:
2.2 s, by Gloo 0.7)."""


ROUND_BYTES = 64 << 20
"""The most bytes, of all processes together, that a device gathers in one round of an exchange."""


LEAST_BYTES = 1 << 14
"""The fewest bytes that a device sends in a round. Sizes are powers of two from here on, so that
few programs are compiled."""


ENVIRONMENTS = ("slurm", "ompi", "gcetpu", "gketpu")
"""JAX's names of the launchers of several processes that are looked for."""


PER_NODE = {
    "SLURM_STEP_TASKS_PER_NODE": "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "OMPI_COMM_WORLD_LOCAL_RANK",
}
"""Launchers' variables: the number of processes on this node (Slurm's may be `4(x2)`, for several
nodes) -> the variable with the number of this process among them."""


NO_SECTION = {"coordinator": "", "processes": 0, "process": -1}
"""The values of these keys in a run of one process. The keys say how a run is started, not what it
computes."""


def find_processes(section: MeshSection) -> MeshSection:
    """Returns the section with `coordinator`, `processes` and `process` filled in for a run in
    several processes: values that are not given come from the launcher's environment. For a run in
    one process returns it without these keys; under Pathways returns it as it is, and refuses these
    keys. ShoalError if they are incomplete or impossible, or if the coordinator can be reached from
    other machines and no secret is set. Starts nothing."""
    given = {}
    for name, none in NO_SECTION.items():
        if getattr(section, name) != none:
            given[name] = getattr(section, name)
    are_all_given = len(given) == len(NO_SECTION)
    if uses_pathways(section):  # its hosts may look like a launcher of several processes
        if given:
            raise ShoalError(
                f"{_shown(given)}: under Pathways one process has the devices of all hosts; leave "
                "out mesh.coordinator, mesh.processes and mesh.process"
            )
        return section
    cluster = _environment()
    if cluster is not None and cluster.get_process_count() > 1 and not are_all_given:
        port = os.environ.get("JAX_COORDINATOR_PORT")
        section = replace(
            section,
            processes=section.processes or cluster.get_process_count(),
            # -1: not given
            process=cluster.get_process_id() if section.process < 0 else section.process,
            coordinator=section.coordinator or cluster.get_coordinator_address(START_SECONDS, port),
        )
    elif given and not are_all_given:
        missing = ", ".join(f"mesh.{name}" for name in NO_SECTION if name not in given)
        raise ShoalError(
            f"{_shown(given)}: {missing} is missing; each process of a run needs mesh.coordinator="
            "HOST:PORT (of process 0), mesh.processes=NUMBER and mesh.process=0, 1, ..."
        )
    if section.process >= max(section.processes, 1):
        raise ShoalError(
            f"mesh.process={section.process}: with mesh.processes={section.processes} expected 0 "
            f"to {section.processes - 1}"
        )
    host, _, port = section.coordinator.rpartition(":")
    if section.processes > 1 and not (host and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ShoalError(
            f"mesh.coordinator={section.coordinator}: expected HOST:PORT, such as 10.0.0.1:7777"
        )
    if section.processes > 1 and not is_loopback(host) and not os.environ.get(TOKEN):
        raise ShoalError(
            f"mesh.coordinator={section.coordinator} can be reached from other machines: set the "
            f"environment variable {TOKEN} to one secret for all processes, as with export "
            f"{TOKEN}=$(openssl rand -hex 16) in the job's script"
        )
    return section if section.processes > 1 else replace(section, **NO_SECTION)


def _environment() -> Any:
    """Returns JAX's class for the launcher that this process was started by, if it is one of
    ENVIRONMENTS; else None."""
    from jax._src.clusters import ClusterEnv

    return next(
        (
            cluster
            for cluster in ClusterEnv._cluster_types
            if cluster.name in ENVIRONMENTS and cluster.is_env_present()
        ),
        None,
    )


def _shown(given: dict[str, Any]) -> str:
    """Returns settings as `mesh.NAME=VALUE`, for messages."""
    return ", ".join(f"mesh.{name}={value}" for name, value in given.items())


@dataclass
class World:
    """The processes of a run, as one of them sees them; a single process, which exchanges with
    nobody, unless `join` made it.

    It is a context manager: at its end all processes leave together; if one leaves alone, the
    others name it in their messages.
    """

    count: int = 1
    index: int = 0
    client: Any = None  # client of JAX's key-value store, which belongs to process 0
    names: list[str] = field(default_factory=list)  # of all processes: `process 1 (host, pid 12)`
    sequence: int = 0  # number of the last exchange
    # Process 0 has a link to each other process; each other process has one, to process 0.
    links: list[socket.socket] = field(default_factory=list)
    alone_code: int | None = None  # the exit code of a process that leaves while others do not

    @property
    def is_main(self) -> bool:
        """True for the process that writes files and prints, process 0."""
        return self.index == 0

    def exchange(self, what: str, data: bytes) -> list[bytes]:
        """Sends `data` to all processes, and returns what each of them sent, in the processes'
        order, this one's included; a single process gets [data] at once. Waits, without a deadline,
        until all have called it. RuntimeError if another process is at another exchange. `what`
        describes the exchange in messages, and must be the same in all processes."""
        if self.count == 1:
            return [data]
        self.sequence += 1
        head = f"{what}\n".encode()
        is_large = len(data) > STORE_BYTES
        # Small data goes through JAX's store, large data by the devices (STORE_BYTES). The store
        # gets its length first, so that all processes know how much there is to gather.
        gathered_length = len(data) if is_large else 0
        own_part = json.dumps([gathered_length, jax.process_index()]).encode() + b"\n"
        if not is_large:
            own_part += data
        self.client.key_value_set_bytes(f"shoal/{self.sequence}/{self.index}", head + own_part)
        lengths, rows, stored = [], [], []
        for number in range(self.count):
            part = own_part if number == self.index else self._wait(number, head)
            mark, _, small = part.partition(b"\n")
            length, row = json.loads(mark)
            lengths.append(length)
            rows.append(row)
            stored.append(small)
        # A process that wrote its part of this exchange has read all of the last one.
        if self.sequence > 1:
            self.client.key_value_delete(f"shoal/{self.sequence - 1}/{self.index}")
        if not any(lengths):
            return stored
        gathered = gather_bytes(data if is_large else b"", rows, lengths)
        # One of the two is b"": a process sent its bytes in one of the two ways.
        return [large or small for large, small in zip(gathered, stored, strict=True)]

    def exchange_json(self, what: str, value: Any) -> list[Any]:
        """Sends `value`, which JSON can hold, to all processes, and returns the values of all in
        the processes' order, this one's included. Waits, without a deadline, until all have called
        it. `what` describes the exchange in messages, and must be the same in all processes."""
        return [json.loads(data) for data in self.exchange(what, json.dumps(value).encode())]

    def _wait(self, number: int, head: bytes) -> bytes:
        """Waits until process `number` has sent its data of this exchange, and returns the data
        after `head`. Process 0 reports a wait of more than a minute on stderr. RuntimeError if the
        data begins with another head, because that process is at another exchange. Waits as long as
        that process lives."""
        report_at = time.monotonic() + REPORT_SECONDS
        while True:
            try:  # a second at a time, so that Ctrl-C is handled in between
                data = self.client.blocking_key_value_get_bytes(
                    f"shoal/{self.sequence}/{number}", 1000
                )
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            # There is no deadline: a slow process is waited for, and if it ends, `_watch` ends this
            # process.
            if time.monotonic() > report_at and self.is_main:
                report_at += REPORT_SECONDS
                print(
                    f"waiting for {self.names[number]}: {head.decode().strip()}",
                    file=sys.stderr,
                    flush=True,
                )
        if not data.startswith(head):
            raise RuntimeError(
                f"processes have lost step: {head!r} here, {data[:80]!r} in {self.names[number]}"
            )
        return data.removeprefix(head)

    # -- the end

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until the other processes leave too: at most START_SECONDS, or LEAVE_SECONDS if
        this one leaves with an error. If they do not, this process leaves alone: `farewell` then
        ends it with the exit code of its error, which is stored here. A single process waits for
        nothing."""
        if self.count == 1:
            return
        self.alone_code = exit_code_of(kind or Exception)
        if self._leave(START_SECONDS if kind is None else LEAVE_SECONDS):
            self.alone_code = None

    def _leave(self, seconds: float) -> bool:
        """Announces that this process leaves, and waits for the others; returns True once all have
        announced it, False after `seconds`. Does not raise if another process has ended."""
        self.sequence += 1
        self.client.key_value_set(f"shoal/left/{self.sequence}/{self.index}", "")
        deadline, number = time.monotonic() + seconds, 0
        while number < self.count and time.monotonic() < deadline:
            # A second at a time, so that Ctrl-C is handled in between.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.client.blocking_key_value_get(f"shoal/left/{self.sequence}/{number}", 1000)
                number += 1
        return number == self.count

    def watch(self, links: dict[int, socket.socket]) -> None:
        """Starts a thread for each link (number of the other process -> socket). It ends this
        process as soon as the link closes, unless the other process said farewell before.

        However a process ends, its kernel closes its links at once; if a whole machine is gone, the
        kernels of the others notice (KEEPALIVE).
        """
        self.links = list(links.values())
        for number, link in links.items():
            link.settimeout(None)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in KEEPALIVE.items():
                if hasattr(socket, option):  # Linux has all of them
                    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
            threading.Thread(
                target=self._watch, args=(link, number), name=f"processes {number}", daemon=True
            ).start()

    def _watch(self, link: socket.socket, number: int) -> None:
        """Runs in a thread: reads a link until it closes, and then ends this process by os._exit
        with a message on stderr, unless the other process said farewell. Process 0 first tells the
        others which process has ended, because they have no link to it."""
        text = b""
        with contextlib.suppress(OSError):
            part = link.recv(4096)
            while part:
                text += part
                part = link.recv(4096)
        if text.endswith(b"farewell\n"):
            return
        # Process 0 hears of every end; the others hear its name from process 0.
        ended = text.decode() or f"{self.names[number]} has ended"
        for other in self.links:
            with contextlib.suppress(OSError):
                if other is not link:
                    other.sendall(ended.encode())
        reason = (
            f"error: {ended}, so this one ends too: the output of that process says why. Start all "
            "of them again to resume\n"
        )
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            os.write(2, reason.encode())
        os._exit(exit_code_of(ShoalError))

    def farewell(self) -> None:
        """Runs at the exit of this process, when its errors are printed already. Sends `farewell`
        over all links, so that the others do not take its end for a failure; or, if it left alone
        (`__exit__`), ends it at once with the exit code of its error."""
        if self.alone_code is not None:
            # A normal exit would let JAX wait for the others first, and end this process with
            # another code when they end because this one has failed.
            sys.stdout.flush()
            os._exit(self.alone_code)
        for link in self.links:
            with contextlib.suppress(OSError):
                link.sendall(b"farewell\n")


def own_gpus() -> list[int] | None:
    """Returns a list with one index of a GPU, from 0: the number of this process on its node, if a
    launcher has started several processes on the node, because each then uses one GPU; None if this
    process uses all GPUs that it sees, also if the user chose them by JAX_LOCAL_DEVICE_IDS."""
    for per_node, number in PER_NODE.items():
        is_one_a_node = os.environ.get(per_node, "1").partition("(")[0] == "1"
        if not is_one_a_node and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
            return [int(os.environ[number])]
    return None


def exit_code_of(kind: type[BaseException]) -> int:
    """Returns the exit code with which the command line ends after such an exception: 2 for
    ShoalError, 130 for KeyboardInterrupt, else 1. For ending a process by os._exit."""
    if issubclass(kind, ShoalError):
        return 2
    if issubclass(kind, KeyboardInterrupt):
        return 130
    return 1


_joined: list[World] = []
"""The world that this process has joined, if any: JAX allows one for each process."""


def join(section: MeshSection) -> World:
    """Joins the processes that the section names and returns their `World`: meets the others, and
    starts JAX's distributed runtime. Called again, returns the same world, whatever the section. If
    the section names one process, returns a world of it and starts nothing. ShoalError if the
    processes do not come together. Side effects: this process ends when another one fails
    (`World.watch`), and says farewell at its exit."""
    if _joined:
        return _joined[0]
    if section.processes <= 1:
        return World()
    world = World(section.processes, section.process)
    met = meet_main(section) if section.process else meet_others(section)
    world.names = met.names
    world.watch(met.links)
    # For CPU devices; by default JAX has no collectives between processes there.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if met.address and loopback_of_name(socket.gethostname()):
        # Gloo gives the others the address of this machine's name, and JAX has no key for another.
        jaxlib.make_gloo_tcp_collectives = partial(
            jaxlib.make_gloo_tcp_collectives, hostname=met.address
        )
    # JAX's service would take SIGTERM, by which a run is asked to stop.
    jax.config.update("jax_enable_preemption_service", False)
    with service_apart():
        jax.distributed.initialize(
            section.coordinator,
            section.processes,
            section.process,
            initialization_timeout=START_SECONDS,
            # JAX's default: every address of the machine
            coordinator_bind_address=bind_address(section),
            cluster_detection_method="deactivate",
            local_device_ids=own_gpus(),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=LEAVE_SECONDS,
        )
    from jax._src import distributed

    world.client = distributed.global_state.client
    atexit.register(world.farewell)
    _joined.append(world)
    return world


# ---- what is too large for JAX's store


def gather_bytes(data: bytes, rows: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    """Returns the bytes of all processes, `data` being this one's (b"" if it has none to send),
    exchanged by collectives of the devices. Each device gathers a part of every process's bytes:

        process 0, devices 0 1: [a0 a1]       ->  device 0: [a0 b0]  device 1: [a1 b1]
        process 1, devices 2 3: [b0 b1]       ->  device 2: [a0 b0]  device 3: [a1 b1]

        device 0: [a0 b0]  device 1: [a1 b1]  ->  process 0: a0 a1, b0 b1
        device 2: [a0 b0]  device 3: [a1 b1]  ->  process 1: a0 a1, b0 b1

    The results are in the order of `lengths`, the processes' order; `rows` has the
    `jax.process_index()` of each. All processes have to call this at the same point in the order of
    their computations, with the same rows and lengths. `lengths`: the number of bytes of each
    process, 0 for one with none to send.
    """
    num_devices = jax.local_device_count()
    longest = max(lengths)
    # Bytes that a device sends in a round: a power of two, so that few programs are compiled;
    # enough for all bytes at once (rounded up), unless a device would gather more than ROUND_BYTES
    # from all processes together (rounded down).
    of_device = max(-(-longest // num_devices), LEAST_BYTES)
    most_of_process = ROUND_BYTES // len(lengths)
    exponent = min((of_device - 1).bit_length(), max(most_of_process.bit_length() - 1, 0))
    round_size = num_devices << exponent
    num_rounds = -(-longest // round_size)
    padded = np.zeros(num_rounds * round_size, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    gathered = []
    for begin in range(0, len(padded), round_size):
        gathered.append(_gather()(padded[begin : begin + round_size]))
    parts = []
    for row, length in zip(rows, lengths, strict=True):
        whole = b"".join(rows_of_round[row] for rows_of_round in gathered)
        parts.append(whole[:length])
    return parts


@cache
def _gather() -> Callable[[np.ndarray], np.ndarray]:
    """Returns a compiled function of this process's bytes, (size,) -> (processes, size), whose rows
    are in the order of `jax.process_index()`."""
    processes = jax.process_count()
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(processes, -1), ("processes", "local"))
    by_process = NamedSharding(mesh, PartitionSpec("processes", "local"))
    # A device gathers a part of each process's bytes, so a host receives them once.
    exchange = jax.jit(
        lambda whole: whole, out_shardings=NamedSharding(mesh, PartitionSpec(None, "local"))
    )

    def gather(part: np.ndarray) -> np.ndarray:
        """Returns the bytes of all processes, (processes, size), for this process's bytes, (size,).
        `size` is the same in all processes."""
        whole = jax.make_array_from_process_local_data(
            by_process, part[None], (processes, part.size)
        )
        # Each device has some columns of all rows: in the order of the columns.
        shards = sorted(
            exchange(whole).addressable_shards, key=lambda shard: shard.index[1].start or 0
        )
        return np.concatenate([np.asarray(shard.data) for shard in shards], axis=1)

    return gather


START_SECONDS = 300
"""How long processes wait for each other to start."""


REPEAT_SECONDS = 30
"""Seconds between two lines of `Wait.report`."""


GREETING_SECONDS, GREETING_BYTES = 2.0, 1 << 12
"""Limits of the first line on a link, which may come from a stranger: process 0 reads one link at a
time."""


ANSWER_SECONDS, ANSWER_BYTES = 10.0, 1 << 20


OUTLIVES_SECONDS = 5
"""How long JAX's coordination service outlives process 0: by then the other processes have noticed
that process 0 has ended."""


TOKEN = "SHOAL_MESH_TOKEN"
"""The environment variable with the run's secret. It is no setting, because a setting would be
visible in the list of processes and in the run folder."""


BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's variable for the address at which process 0 listens, if the others reach it by an address
that its machine does not have."""


MALFORMED = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""What reading a line raises if the other end is not a process of the run."""


def is_loopback(host: str) -> bool:
    """True if a host's name or address can be reached only by processes of the same machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def bind_address(section: MeshSection) -> str:
    """Returns HOST:PORT at which process 0 and JAX's service listen: the environment's
    JAX_COORDINATOR_BIND_ADDRESS, else the coordinator's address. If its name is a loopback address
    on this machine, which no other machine reaches (as in the hosts file of Debian and Ubuntu,
    127.0.1.1), they listen at all addresses of this machine."""
    given = os.environ.get(BIND_ADDRESS)
    if given:
        return given
    host, _, port = section.coordinator.rpartition(":")
    if loopback_of_name(host):
        return f"0.0.0.0:{port}"
    return section.coordinator


def loopback_of_name(name: str) -> str:
    """Returns the loopback address that a name has on this machine, if it has no other address and
    does not look like a loopback name. "" otherwise, also if the name cannot be resolved."""
    if is_loopback(name):
        return ""
    try:
        entries = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    addresses = [str(address[0]) for *_, address in entries]
    if not all(is_loopback(address) for address in addresses):
        return ""
    return addresses[0]


def _address_here(links: Iterable[socket.socket]) -> str:
    """Returns an address of this machine by which a process on another machine has a link to it; ""
    if all links are within this machine."""
    addresses = (str(link.getsockname()[0]) for link in links)
    return next((address for address in addresses if not is_loopback(address)), "")


@dataclass
class Wait:
    """A wait of at most START_SECONDS, with reports."""

    began: float = field(default_factory=time.monotonic)
    reports: int = 0

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.began + START_SECONDS - time.monotonic()

    def report(self, what: str) -> None:
        """Prints on stderr what is waited for and how long still: at the first call, and after that
        at most once for each REPEAT_SECONDS that have passed since the wait began. Does not wait
        itself."""
        if time.monotonic() >= self.began + self.reports * REPEAT_SECONDS:
            self.reports += 1
            print(
                f"waiting for {what}, {max(self.left, 0):.0f} s at most",
                file=sys.stderr,
                flush=True,
            )


class Met(NamedTuple):
    """What a process knows once all processes have come."""

    names: list[str]  # of all processes
    links: dict[int, socket.socket]  # to process 0, or in process 0 to all others
    address: str  # of this machine, for the others; "" if all processes are on it


def meet_others(section: MeshSection) -> Met:
    """Runs in process 0: listens until all other processes have connected, and returns the names of
    all processes in their order, the links (number of the process -> socket), and this machine's
    address. ShoalError, which is sent to the others and raised there too, if one has not come
    within START_SECONDS or was started with another `mesh.processes` or with the `mesh.process` of
    another one.

    A link that does not begin with a correct signed line is closed and counted, and the count is
    printed. JAX's service listens at the same port only afterwards, because it would abort this
    process if another one does not come.
    """
    names = {0: _name(0)}
    links: dict[int, socket.socket] = {}
    dropped = 0
    host = section.coordinator.rpartition(":")[0]
    loopback = loopback_of_name(host)
    if loopback and BIND_ADDRESS not in os.environ:
        print(
            f"mesh.coordinator={section.coordinator}: {host} is {loopback} on this machine (its "
            "hosts file), which no other reaches, so process 0 listens at all addresses of this "
            "machine",
            file=sys.stderr,
            flush=True,
        )
    with _listener(section) as listener:
        listener.settimeout(0.2)
        wait = Wait()
        while len(names) < section.processes:
            missing = [str(number) for number in range(section.processes) if number not in names]
            awaited = f"process {', '.join(missing)}"
            strangers = ""
            if dropped:
                strangers = f" (dropped connections without the run's {TOKEN}: {dropped})"
            if wait.left <= 0:
                raise _refused(
                    links.values(),
                    f"mesh.processes={section.processes}: {awaited} has not come within "
                    f"{START_SECONDS} s{strangers}; start each with its own mesh.process, the same "
                    f"{TOKEN} and mesh.coordinator={section.coordinator}",
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
            fault = ""
            if count != section.processes:
                fault = f"mesh.processes={count}, process 0 has mesh.processes={section.processes}"
            elif number in names:
                fault = f"mesh.process={number}, as {names[number]} has"
            if fault:
                raise _refused([*links.values(), link], f"{name} was started with {fault}")
            names[number] = name
            links[number] = link
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
    """Reads the first line that a process sends, waiting at most GREETING_SECONDS, and returns its
    (number, number of processes that it was started with, name). Raises one of MALFORMED if the
    line is not from a process of this run."""
    line = _read_line(link, GREETING_SECONDS, GREETING_BYTES)
    number, count, name = line["process"], line["processes"], line["name"]
    has_types = type(number) is int and type(count) is int and type(name) is str
    if not has_types or not 0 < number < count:
        raise ValueError("not a greeting")
    return number, count, name


def _refused(links: Iterable[socket.socket], text: str) -> ShoalError:
    """Sends an error to the processes of these links, which raise it too, closes the links and
    returns the error."""
    for link in links:
        _send_line(link, {"error": text})
        link.close()
    return ShoalError(text)


def _listener(section: MeshSection) -> socket.socket:
    """Returns a socket that listens at `bind_address`. If the port is in use, tries for 2 x
    OUTLIVES_SECONDS. ShoalError if the address cannot be used. Other errors than a port in use are
    raised at once."""
    host, _, port = bind_address(section).rpartition(":")
    # The coordination service of a run that was killed just now may still have the port.
    deadline = time.monotonic() + 2 * OUTLIVES_SECONDS
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
                    f"{host}:{port} ({error.strerror}); give an address of this host and a free "
                    "port"
                ) from error
        time.sleep(0.5)


def meet_main(section: MeshSection) -> Met:
    """Runs in each process but 0: connects to process 0, waits until all have connected, and
    returns the names of all processes, the link to process 0 under the key 0, and this machine's
    address. ShoalError if process 0 refuses this process or cannot be reached. If the answer is no
    signed line, connects again for 2 x OUTLIVES_SECONDS."""
    # The coordination service of a run that was killed just now may still answer.
    deadline = time.monotonic() + 2 * OUTLIVES_SECONDS
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
            # Also read if nothing has come: that raises one of MALFORMED.
            answer = _read_line(link, ANSWER_SECONDS, ANSWER_BYTES)
            if "error" not in answer:
                print(
                    f"process {section.process}: all {section.processes} processes are connected; "
                    "process 0 prints the output",
                    file=sys.stderr,
                    flush=True,
                )
                # A process with a loopback link is on process 0's machine, and has its address.
                return Met(
                    list(answer["names"]),
                    {0: link},
                    _address_here([link]) or str(answer["address"]),
                )
        except MALFORMED as error:
            link.close()
            if time.monotonic() > deadline:
                raise ShoalError(
                    f"mesh.coordinator={section.coordinator}: the program that answers there is "
                    f"not process 0 of a run with this {TOKEN}, or it has ended; start it again, "
                    "or give another port"
                ) from error
            time.sleep(0.5)
            continue
        # Process 0 has answered that it refuses the processes.
        link.close()
        raise ShoalError(answer["error"])


def _connect(section: MeshSection) -> socket.socket:
    """Tries to connect to process 0 until it listens, with reports on stderr, and returns the link;
    ShoalError if nothing listens there within START_SECONDS."""
    host, _, port = section.coordinator.rpartition(":")
    wait = Wait()
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        except OSError as error:
            cause = f"{error.strerror or error}{_address_text(host)}"
            if wait.left <= 0:
                raise ShoalError(
                    f"mesh.coordinator={section.coordinator}: nothing answers there ({cause}) "
                    f"after {START_SECONDS} s; start process 0 (mesh.process=0) on that host, "
                    "with this port open"
                ) from error
        wait.report(f"process 0 at {section.coordinator}, where nothing answers yet ({cause})")
        time.sleep(0.2)


def _address_text(name: str) -> str:
    """Returns `; NAME is ADDRESS on this machine`, to be appended to a message about a host's name;
    "" if `name` is an address itself or cannot be resolved."""
    with contextlib.suppress(OSError, ValueError):
        address = socket.gethostbyname(name)
        return "" if address == name else f"; {name} is {address} on this machine"
    return ""


def _name(number: int) -> str:
    """Returns a text for messages: the number, the host and the id of this process."""
    return f"process {number} ({socket.gethostname()}, pid {os.getpid()})"


def _signature(text: bytes) -> bytes:
    """Returns the HMAC of a line, by the run's secret."""
    return hmac.new(os.environ.get(TOKEN, "").encode(), text, "sha256").hexdigest().encode()


def _send_line(link: socket.socket, value: Any) -> None:
    """Sends a value as a signed line of JSON; does nothing if the link is broken. The signature is
    made with the run's secret; without one, with an empty secret."""
    text = json.dumps(value).encode()
    with contextlib.suppress(OSError):
        link.sendall(_signature(text) + b" " + text + b"\n")


def _read_line(link: socket.socket, seconds: float, most_bytes: int) -> Any:
    """Reads a signed line of JSON and returns its value, without reading anything behind the line.
    Waits at most `seconds`, and reads at most `most_bytes`. ValueError or OSError if there is no
    such line in time; ValueError if it is signed with another secret."""
    line = b""
    deadline = time.monotonic() + seconds
    while not line.endswith(b"\n"):
        link.settimeout(max(deadline - time.monotonic(), 1e-3))
        if len(line) == most_bytes or time.monotonic() > deadline:
            raise ValueError("no line")
        byte = link.recv(1)
        if not byte:  # the link was closed
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
    """JAX's coordination service in a separate process, with JAX's arguments. Once this is made,
    the service listens.

    If it ran in process 0, as JAX would have it, it would end with that process, and JAX's clients
    in all others would abort with a page of text, often before they can say which process has
    ended. The same happens whenever the service reports the end of a process: JAX 0.10.2 cannot
    call Python then (`missed_heartbeat_callback` ends in std::bad_cast), so without the links of
    this module no process would tell why.
    """

    def __init__(self, address: str, count: int, **options: Any):
        """Starts the service and returns once it listens. `address`: HOST:PORT to listen at;
        `count`: the number of processes; `options`: further ones of JAX's
        `get_distributed_runtime_service`. ShoalError if it cannot listen."""
        # In a session of its own, so that Ctrl-C does not reach it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, json.dumps([address, count, options])],
            # The service ends OUTLIVES_SECONDS after this pipe closes, because process 0 has ended.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout
        if self.process.stdout.readline() != "ready\n":
            raise ShoalError(
                f"mesh.coordinator: JAX's coordination service cannot listen at {address}; choose "
                "another port"
            )

    def shutdown(self) -> None:
        """Ends the service, and waits until its process has ended."""
        self.process.communicate("stop")


@contextlib.contextmanager
def service_apart() -> Iterator[None]:
    """Returns a context in which `jax.distributed.initialize` starts the coordination service in a
    separate process. After the block JAX's own function is back."""
    usual = jaxlib.get_distributed_runtime_service
    jaxlib.get_distributed_runtime_service = CoordinationService
    try:
        yield
    finally:
        jaxlib.get_distributed_runtime_service = usual
