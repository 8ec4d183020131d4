"""Hosts in Ray actors: samplers in processes of their own, on any machine of a cluster.

    Fleet -> RayHost  --(messages)---------->  Worker -> ThreadHost -> EngineHost
                      <--(answers, progress)---

A worker is trusted like the trainer, because Ray pickles what passes between them. A worker knows
nothing of rewards. It ends when the trainer ends, however that happens. Every error of Ray becomes
either a `HostLost` or an error of the user's (ShoalError)."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._private import state as _ray_state  # what is free on each node has no public name,
from ray._private import worker as _ray_worker  # nor has the folder of logs
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.mesh import devices_asked
from shoal.protocols import HostProgress, Load, Message, Version
from shoal.records import Completion, HostLost, ShoalError
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.rollout.worker_facts import WorkerFingerprint, WorkerParity
from shoal.text import exact
from shoal.workers.process import Watcher

NEWS_SECONDS = 1.0
"""How often a worker that has no answers reports its progress."""
CONNECT_SECONDS = 30.0
TOKEN, TOKEN_MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"
"""Ray's environment variables for the secret of a cluster, and for whether there is one."""
LONGEST_REASON = 250
"""Most characters of what Ray says about the end of a worker."""
LAST_LINES = 5
"""Number of lines of a worker's own output that are shown after it has ended."""
VISIBLE = {"GPU": "CUDA_VISIBLE_DEVICES", "TPU": "TPU_VISIBLE_CHIPS"}
"""Ray's name of an accelerator -> the environment variable that says which of them a process may
use."""


class Place(NamedTuple):
    """The node and the process id of a worker."""

    node: str
    pid: int


class Joined(NamedTuple):
    """What a worker returns when it is ready to sample."""

    proof: WorkerFingerprint
    capacity: int | None


class Worker:
    """The Ray actor: an `EngineHost` in a thread of its own."""

    def __init__(self, name: str, make: Callable[[], tuple[EngineHost, WorkerFingerprint]]) -> None:
        """Makes nothing yet: `join` calls `make`, which takes minutes and returns the host and the
        worker's fingerprint. `name`: the host's, for its thread."""
        self._name, self._make = name, make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._versions: dict[int, Version] = {}
        self._host: ThreadHost | None = None
        # by number: messages that arrived before one with a lower number, each with the versions
        # that the trainer had when it sent them
        self._early: dict[int, tuple[Message, Sequence[int]]] = {}
        self._next = 0

    def _wake(self) -> None:
        """Wakes `news`; called in the host's thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    # The methods below are coroutines; only `join` and `news` wait. Ray may begin them in another
    # order than they were called in (of 20,000 calls 870 were overtaken), so messages are numbered.

    async def place(self) -> Place:
        """Returns where this process runs. That it answers shows that the cluster has started the
        worker's process."""
        return Place(ray.get_runtime_context().get_node_id(), os.getpid())

    async def join(self) -> Joined:
        """Makes the worker's host, which compiles its programs for minutes, starts its thread, and
        returns the worker's fingerprint and the host's capacity. Called once."""
        # Suppresses a warning of Ray's that is untrue of other threads, and that would be the last
        # line of output.
        _ray_worker.blocking_get_inside_async_warned = True
        # This compiles for minutes if the model is large.
        host, proof = await asyncio.to_thread(self._make)
        self._host = ThreadHost(host, self._wake, self._name)
        return Joined(proof, host.capacity)

    async def handle(self, number: int, message: Message, available: Sequence[int]) -> None:
        """Passes the messages that `RayHost` has sent to the host, in the order of their numbers 0,
        1, ...; keeps one that arrives too early. `available`: the versions that the trainer has not
        released; this process's copies of others are removed. Must not be called before `join` has
        returned (AssertionError)."""
        self._early[number] = message, available
        while self._next in self._early:
            message, available = self._early.pop(self._next)
            self._next += 1
            self._release_others(available)
            if isinstance(message, Load):
                # Ray has made a copy of the version, so this process must release it as well.
                self._versions[message.version.version] = message.version
            # `RayHost` sends nothing before `join` has returned
            assert self._host is not None
            self._host.handle(message)

    def _release_others(self, available: Sequence[int]) -> None:
        """Removes this process's copies of the versions that are not `available`."""
        for version in self._versions.keys() - available:
            self._versions.pop(version).remove()

    async def news(self, seconds: float) -> tuple[dict[int, list[Completion]], HostProgress]:
        """Waits up to `seconds` for answers of the host, and returns (answers by request id, {} if
        there are none; the host's progress). Before `join` has made the host, waits all of
        `seconds` and reports that the worker prepares. Raises the error that ended the host."""
        self._loop = asyncio.get_running_loop()
        if self._host is None:
            await asyncio.sleep(seconds)
            return {}, HostProgress(preparing=True)
        answers = self._host.poll()
        if not answers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), seconds)
            self._news.clear()
            answers = self._host.poll()
        return answers, self._host.progress()


class RayHost:
    """A `Host` whose work is done by a `Worker` in the cluster. It has room for requests once the
    worker has a place in the cluster, is ready, and has shown the right numbers.

    No call waits for the worker: the next `poll` reads what the worker has said since the last."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        """Asks the cluster for the worker, and the worker to join, without waiting. Close the host
        (`close`), which kills the worker. HostLost if Ray refuses."""
        self.name = name
        self.started = time.monotonic()
        self._cluster = cluster
        self._worker = cluster.make_actor(name)
        self._place: Place | None = None
        self._placing = self._call(self._worker.place)
        self._joining = self._call(self._worker.join)
        self._news: Future | None = None
        self._sent: list[Future] = []
        self._num_sent = 0
        self._versions: dict[int, Version] = {}
        self._progress = HostProgress()
        self._joined: Joined | None = None  # None until the worker may sample
        self._differs = False

    def handle(self, message: Message) -> None:
        """Sends a message to the worker, without waiting; a `Load` is only remembered until the
        worker has joined. Forgets versions that were removed. HostLost if Ray refuses."""
        if isinstance(message, Load):
            available = {}
            for number, older_version in self._versions.items():
                if older_version.exists:
                    available[number] = older_version
            available[message.version.version] = message.version
            self._versions = available
            if self._joined is None:
                # `_join` sends it later: calls that wait for a worker for which the cluster has no
                # room would keep every version that they name.
                return
        self._send(message)

    def poll(self) -> dict[int, list[Completion]]:
        """Returns the worker's answers that have arrived, by request id, and asks for the next; {}
        if there are none. Also lets the worker join once it is ready. HostLost if the worker is
        gone, HostRefused if its numbers are wrong, ShoalError if the worker raised one or no worker
        has started in time."""
        if self._place is None and not self._has_started():
            return {}
        if self._joined is None and self._joining.done():
            self._join()
        for sent in list(self._sent):
            if sent.done():
                # called for its error alone
                self._result(sent)
                self._sent.remove(sent)
        answers = {}
        if self._news is not None and self._news.done():
            # counted here: each answer to `news` is a report
            reports = self._progress.reports
            answers, self._progress = self._result(self._news)
            self._progress.reports = reports + 1
            self._news = None
        if self._news is None:
            self._news = self._call(self._worker.news, NEWS_SECONDS)
            self._news.add_done_callback(lambda _: self._cluster.wake())
        return answers

    def progress(self) -> HostProgress:
        """Returns the worker's figures as it last reported them, without asking it; capacity 0
        until it may sample."""
        capacity = 0
        if self._joined is not None:
            capacity = self._joined.capacity
        return replace(self._progress, capacity=capacity, differs=self._differs)

    def _has_started(self) -> bool:
        """True if the worker's process has started; it then compiles, and counts as alive. Does not
        wait. If it has not started `wait_seconds` after this host was made, says once for all hosts
        that workers are late, or raises ShoalError if no worker has started (`Cluster.check_late`).
        HostLost if it cannot start."""
        if not self._placing.done():
            self._cluster.check_late(self)
            return False
        self._place = self._result(self._placing)
        self._progress.preparing = True
        self._cluster.alive.add(self.name)
        return True

    def _join(self) -> None:
        """Called once the worker is ready. If its numbers are those that they must be, or may
        differ, lets it sample, and sends the versions so far; does nothing while that is undecided.
        HostLost if the worker could not start, HostRefused if its numbers are wrong."""
        try:
            joined: Joined = self._result(self._joining)
        except (HostLost, ShoalError) as error:
            raise HostLost(f"it could not start: {error}") from error
        self._cluster.parity.proofs[self.name] = joined.proof
        differs = self._cluster.parity.numbers_differ(self.name, self._cluster.alive)
        if differs is None:
            return
        self._differs = differs
        self._joined = joined
        for version in self._versions.values():
            if version.exists:
                self._send(Load(version))

    def close(self) -> None:
        """Kills the worker without waiting for its end, on this machine also if its process is
        stopped (SIGSTOP). The host must not be used afterwards."""
        self._cluster.alive.discard(self.name)
        self._cluster.parity.proofs.pop(self.name, None)
        with contextlib.suppress(RayError):
            ray.kill(self._worker)
        is_here = (
            self._place is not None and self._place.node == ray.get_runtime_context().get_node_id()
        )
        if self._place is None or not is_here:
            return
        # A process that is stopped (SIGSTOP) does not end when Ray asks it to, so kill it.
        process = Path(f"/proc/{self._place.pid}")
        with contextlib.suppress(OSError):
            # The name is in parentheses and may contain some; the state follows it.
            fields_after_name = (process / "stat").read_text().rpartition(")")[2].split()
            is_stopped = fields_after_name[0] == "T"
            # Another process may have its id by now.
            if is_stopped and b"ray::" in (process / "cmdline").read_bytes():
                os.kill(self._place.pid, signal.SIGKILL)

    def _send(self, message: Message) -> None:
        """Sends a message to the worker, with its number and the versions that are published,
        without waiting. An error of the worker is raised by a later `poll`; HostLost if Ray refuses
        the call."""
        available = list(self._versions)
        sent = self._call(self._worker.handle, self._num_sent, message, available)
        self._sent.append(sent)
        self._num_sent += 1

    def _call(self, method: Any, *args: Any) -> Future:
        """Starts a call of the worker, and returns its future. HostLost if Ray refuses."""
        try:
            return method.remote(*args).future()
        except RayError as error:
            raise HostLost(self._cluster.reason(error)) from error

    def _result(self, future: Future) -> Any:
        """Waits for a call and returns its result. ShoalError if the worker raised one, HostLost
        for any other failure."""
        try:
            return future.result()
        except RayTaskError as error:
            if isinstance(error.cause, ShoalError):
                raise ShoalError(str(error.cause)) from error
            raise HostLost(f"{type(error.cause).__name__}: {error.cause}") from error
        except RayError as error:
            raise HostLost(self._cluster.reason(error)) from error


class Connection(NamedTuple):
    """This process's connection to a Ray cluster. `owned`: `connect` made the connection.
    `watcher`: ends a cluster that was started here; None for another cluster."""

    address: str
    dashboard: str = ""
    owned: bool = True
    watcher: Watcher | None = None
    token: str = ""  # secret of a cluster that was started here, or ""


@dataclass
class Cluster:
    """The Ray cluster that a run's workers are in."""

    connection: Connection
    # number of workers of the run: sampler.workers
    workers: int
    resources: Mapping[str, float]  # resources that one worker asks for, by Ray's names
    # how long a worker's start may take before something is said or raised: ray.wait_seconds
    wait_seconds: float
    environment: Mapping[str, str]  # environment variables of a worker
    parity: WorkerParity
    say: Callable[[str], None]
    wake: Callable[[], None] = lambda: None
    make: Callable[[], tuple[EngineHost, WorkerFingerprint]] | None = None  # makes a worker's host
    alive: set[str] = field(default_factory=set)  # names of the hosts whose worker has a process
    # number of devices that are held for the trainer; 0 if the trainer uses whatever it finds
    trainer_devices: int = 0
    # True once it was said that workers are late
    _late: bool = False

    @property
    def may_span_machines(self) -> bool:
        """True unless Ray was started here. Other machines may join any other cluster at any time,
        also by an autoscaler."""
        return self.connection.watcher is None

    def start(self, name: str) -> RayHost:
        """Returns a new host, which joins as soon as the cluster has room for its worker and the
        worker is ready."""
        return RayHost(name, self)

    def make_actor(self, name: str) -> Any:
        """Asks Ray for the actor of a worker, and returns its handle at once; Ray starts it as soon
        as the cluster has room. Nobody restarts an actor that ends. `make` must be set."""
        resources = dict(self.resources)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
        }
        actor_class = ray.remote(Worker).options(
            **options,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": dict(self.environment)},
        )
        return actor_class.remote(name, self.make)

    def check_late(self, host: RayHost) -> None:
        """Called for a host whose worker has not started. Once the host has waited for
        `wait_seconds`, says that workers are late, once for all hosts while some worker is alive;
        ShoalError if no worker is alive by then."""
        # if none is alive any more, the error below is due although it was said
        has_said = self._late and self.alive
        if has_said or time.monotonic() - host.started < self.wait_seconds:
            return
        wanted = f"{_resources_text(self.resources)} each"
        cluster_resources = ray.cluster_resources()
        text = (
            f"of sampler.workers={self.workers}, which request {wanted}, {len(self.alive)} started "
            f"in ray.wait_seconds={exact(self.wait_seconds)}; the cluster has "
            f"{_resources_text(cluster_resources)}"
        )
        if not self.alive:
            cure = (
                "lower sampler.workers, sampler.devices_per_worker or sampler.resources, or add "
                "nodes"
            )
            has_room = all(
                cluster_resources.get(name, 0) >= size for name, size in self.resources.items()
            )
            if has_room:
                cure = f"raise ray.wait_seconds if they start slowly; else {cure}"
            raise ShoalError(f"{text}: {cure}")
        self._late = True
        self.say(
            f"{text}: sampling continues with {len(self.alive)}; the others join when there is room"
        )

    def reason(self, error: RayError) -> str:
        """Returns why a worker is gone, from Ray's error, as a text for people ("its process has
        ended; ..."): what failed when it started, that memory ran out, the last lines of its output
        if they are on this machine, or else the reason that Ray gives, if it gives one."""
        text = re.sub(r"\x1b\[\d*m", "", str(error)).strip()
        if "creation task" in text:  # the text is the traceback of the worker's error
            # the last line of a traceback names the error
            return f"it could not start: {text.splitlines()[-1]}"
        if isinstance(error, OutOfMemoryError):
            match = re.search(r"[\d.]+GB used / [\d.]+GB limit", text)
            used = "no figures"
            if match is not None:
                used = match[0]
            return (
                f"Ray has killed it, as the memory of its machine ran out ({used}): lower "
                "sampling.slots_per_device, or give each worker more of a machine by "
                "sampler.resources"
            )
        pid = re.search(r"pid[:=] ?(\d+)", text)
        if pid is not None:
            lines = _output_lines(pid[1])
            if lines:
                return f"its process has ended; it said last: {' | '.join(lines[-LAST_LINES:])}"
        # in parentheses after a blank, or ""
        rays_reason = _rays_reason(text)
        if "node has died" in text or "unreachable" in text:
            return f"Ray can no longer reach its machine{rays_reason}"
        if "died" in text:
            return f"its process has ended{rays_reason}"
        return f"it cannot be reached{rays_reason}"

    def say_room(self) -> None:
        """Passes to `say` how many of the workers the cluster has room for now, unless it is enough
        for all: the others wait, and nothing else shows that."""
        num_placed = 0
        for free in _ray_state.available_resources_per_node().values():
            num_placed += _num_fitting(self.resources, free)
        if num_placed >= self.workers:
            return
        consequence = "they start"
        if num_placed:
            consequence = f"sampling begins with {num_placed}, the others join"
        self.say(
            f"of sampler.workers={self.workers}, which request {_resources_text(self.resources)} "
            f"each, the cluster has room for {num_placed} now "
            f"({_resources_text(ray.available_resources())} are free): {consequence} when there is "
            "room"
        )

    def close(self) -> None:
        """Ends this process's connection, and the cluster if it was started here. A connection that
        `connect` found, and did not make, stays."""
        if self.connection.owned:
            ray.shutdown()
            if self.connection.watcher is not None:
                _forget_token(self.connection.token)
        if self.connection.watcher is not None:
            self.connection.watcher.close()


def connect(address: str, local_cpus: int) -> Connection:
    """Connects this process to a cluster and returns the connection. `address`: "auto" or
    HOST:PORT; "" means RAY_ADDRESS, and if that is empty too, a cluster is started here. A
    connection that the process already has is used, whatever the address. `local_cpus`: fewest CPUs
    that a cluster which is started here says it has. ShoalError if no cluster answers. The caller
    ends the connection (`Cluster.close`). Side effects: sets environment variables for Ray's
    processes, and silences Ray's output. With a connection that the process already has there are
    none."""
    if ray.is_initialized():
        return Connection(str(ray.get_runtime_context().gcs_address), owned=False)
    address = check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # without this Ray prints a line of advice
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # instead of 15, with which workers on the trainer's cores would get only what the trainer
    # leaves
    os.environ.setdefault("RAY_worker_niceness", "0")
    watcher = None
    token = ""
    num_cpus = None
    variables: dict[str, str] = {}  # environment variables that Ray's own processes inherit
    if not address:
        # If this process is killed, Ray ends its workers, but not its own agents.
        watcher = Watcher()
        variables.update(watcher.environment)
        token = _private_token()
        if token:
            variables[TOKEN] = token
        num_cpus = max(os.cpu_count() or 1, local_cpus)
    try:
        os.environ |= variables
        started: Any = ray.init(
            # "local": start a cluster here
            address or "local",
            log_to_driver=False,
            logging_level="ERROR",  # type: ignore[arg-type]
            num_cpus=num_cpus,
        )
    except Exception as error:
        # Ray may raise anything, even a bare Exception, for example on an overloaded machine.
        if watcher is not None:
            watcher.close()
            _forget_token(token)
        first = " ".join(str(error).split())[:300]
        raise ShoalError(
            f"ray.address={address}: {first}; start Ray there with the same Python and the same "
            "version of Ray (ray start --head), or leave ray.address out to start it here"
        ) from error
    finally:
        # only Ray's processes that were started meanwhile keep them
        for name in variables:
            del os.environ[name]
    # Ray would print a paragraph for each process that ends; the run says why itself.
    _ray_worker._worker_logs_enabled = False
    return Connection(
        str(ray.get_runtime_context().gcs_address),
        started.dashboard_url or "",
        True,
        watcher,
        token,
    )


def _private_token() -> str:
    """Returns a new secret for a cluster that is started here; "" if the user has chosen a secret,
    or to have none. Without a secret Ray would write one to ~/.ray/auth_token, and then nobody
    could join a cluster that was started without one."""
    is_chosen = any(name in os.environ for name in (TOKEN, f"{TOKEN}_PATH", TOKEN_MODE))
    if is_chosen or Path("~/.ray/auth_token").expanduser().exists():
        return ""
    return secrets.token_hex(32)


def _forget_token(token: str) -> None:
    """Forgets the secret of a cluster that was started here, so that this process can join another
    cluster."""
    if not token:
        return
    os.environ.pop(TOKEN_MODE, None)
    raylet: Any = importlib.import_module("ray._raylet")
    if hasattr(raylet, "AuthenticationTokenLoader"):  # from Ray 2.60 on
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        raylet.Config.initialize("")


def _output_lines(pid: str) -> list[str]:
    """Returns the lines that the worker with process id `pid` wrote, those of its standard output
    first, then those of its errors; [] if its files are on another machine, or it wrote nothing.
    Lines that Ray wrote itself are left out."""
    node: Any = _ray_worker.global_worker.node
    folder = Path(node.get_logs_dir_path())
    lines = []
    for ending in ("out", "err"):
        for file in folder.glob(f"worker-*-{pid}.{ending}"):
            for line in file.read_text(errors="replace").splitlines():
                if not line.startswith(":"):  # lines with ":" are Ray's own
                    lines.append(line)
    return lines


def _rays_reason(text: str) -> str:
    """Returns the sentence in an error of Ray's that says why an actor ended, shortened and in
    parentheses: " (Ray: The actor is dead because ...)"; "" if there is none."""
    about_actor: list[str] = []
    about_connection: list[str] = []
    for line in text.splitlines():
        line = line.strip()
        if line.startswith(("The actor is dead because", "The actor's node")):
            about_actor.append(line)
        elif "unavailable:" in line or "uthenticat" in line:
            about_connection.append(line)
    reasons = about_actor + about_connection
    if not reasons:
        return ""
    return f" (Ray: {reasons[0][:LONGEST_REASON]})"


def _num_fitting(wanted: Mapping[str, float], free: Mapping[str, float]) -> int:
    """Returns how many workers that need `wanted` fit into the `free` resources (of one node) at
    once; names are Ray's, and one that `free` lacks counts as 0; 0 if `wanted` asks for nothing."""
    counts = []
    for name, size in wanted.items():
        if size:
            counts.append(int(free.get(name, 0) // size))
    return min(counts, default=0)


def check_address(address: str) -> str:
    """Returns the address of the cluster to join, from the argument or, if that is "", RAY_ADDRESS;
    "" if Ray is to be started here. ShoalError if no cluster can be joined at the address: it
    begins with ray://, or nothing answers at HOST:PORT within CONNECT_SECONDS. Other addresses,
    like "auto", are not tried."""
    address = address or os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ShoalError(
            f"ray.address={address}: the trainer has to run on a machine of the cluster: give auto "
            "or HOST:PORT there, or ray job submit -- shoal train ..."
        )
    host, _, port = address.rpartition(":")
    if host:
        _check_answers(address, host, port)
    return address


def _check_answers(address: str, host: str, port: str) -> None:
    """Waits until something listens at port `port` of `host`, trying once a second; `address` is
    for the message; ShoalError if nothing does within CONNECT_SECONDS, or the port is no number.
    Ray itself would wait for minutes."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        seconds = max(0.1, deadline - time.monotonic())
        try:
            with socket.create_connection((host, int(port)), timeout=seconds):
                return
        except (OSError, ValueError) as error:
            # Less than the second of the next pause is left.
            if isinstance(error, ValueError) or time.monotonic() > deadline - 1:
                raise ShoalError(
                    f"ray.address={address}: nothing answers there ({error}); give auto or "
                    "HOST:PORT of a cluster (ray start --head), or leave it out to start Ray here"
                ) from error
            time.sleep(1)


def accelerator() -> str:
    """Returns Ray's name for the accelerators of the cluster: "GPU" or "TPU"; "TPU" if it has both;
    "CPU" if there are none, or JAX_PLATFORMS is cpu here."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "CPU"
    resources = ray.cluster_resources()
    for name in ("TPU", "GPU"):
        if resources.get(name):
            return name
    return "CPU"


class _Holder:
    """Ray actor that holds the trainer's accelerators, so that Ray gives them to nobody else."""

    def ids(self, kind: str) -> list[str]:
        """Returns the ids of the accelerators that this actor holds."""
        return ray.get_runtime_context().get_accelerator_ids().get(kind, [])


def hold_accelerators(kind: str, trainer: str, wanted: float, seconds: float) -> tuple[Any, int]:
    """Reserves the trainer's accelerators on this machine in Ray. Returns (an actor, which holds
    them until its handle is garbage-collected, so keep it; their number); this process then sees
    only these (sets the variable in VISIBLE). Returns (None, 0) if the machine has none of this
    kind, or Ray has chosen those of this process already.

    `kind`: Ray's name of the accelerators, a key of VISIBLE; any other gives (None, 0). `trainer`:
    mesh.trainer; if "", the trainer gets what the workers leave of this machine. The workers ask
    for `wanted` in all, and take those of other machines first. ShoalError if nothing is left for
    the trainer, or if Ray has not given it the accelerators after `seconds`."""
    own_node = ray.get_runtime_context().get_node_id()
    here = 0
    elsewhere = 0.0
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        if node["NodeID"] == own_node:
            here = int(node["Resources"].get(kind, 0))
        else:
            elsewhere += node["Resources"].get(kind, 0)
    if kind not in VISIBLE or not here or _has_chosen(kind):
        return None, 0
    if trainer:
        devices = devices_asked("mesh.trainer", trainer, here)
        # `devices`: a list of their numbers, or how many
        count = len(devices) if isinstance(devices, list) else devices
    else:
        wanted_here = min(here, max(0, wanted - elsewhere))
        count = here - math.ceil(wanted_here)
    if not count:
        raise ShoalError(
            f"the workers request {wanted:g} {kind}, which are all {here} of this machine: the "
            "trainer would have none; lower sampler.workers or sampler.devices_per_worker, or set "
            "mesh.trainer"
        )
    resources: dict[str, Any] = {"resources": {kind: count}}
    if kind == "GPU":
        resources = {"num_gpus": count}
    holder_class = ray.remote(_Holder).options(
        **resources,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(own_node, soft=False),
    )
    holder: Any = holder_class.remote()
    try:
        ids = ray.get(holder.ids.remote(kind), timeout=seconds)
    except RayError as error:
        raise ShoalError(
            f"the trainer requests {count} {kind} of this machine, which has {here}, and others of "
            "the cluster hold some: lower mesh.trainer, or wait for them"
        ) from error
    os.environ[VISIBLE[kind]] = ",".join(ids)
    return holder, count


def _has_chosen(kind: str) -> bool:
    """True if Ray gave this process its accelerators: as a task, an actor, or the entry point of a
    job. A variable that the user or the batch system has set does not count, because Ray may still
    give those accelerators to a worker."""
    # A job's entry point is a child of the actor that has the accelerators; it has the last of
    # these variables if that actor has none.
    is_job = (
        os.environ.get(VISIBLE[kind])
        and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        and "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" not in os.environ
    )
    return bool(is_job or ray.get_runtime_context().get_accelerator_ids().get(kind))


def _resources_text(resources: Mapping[str, float]) -> str:
    """Returns resources as a text, "2 GPU, 8 CPU", without memory and the addresses of nodes;
    "nothing" if there are none."""
    texts = []
    for name, size in resources.items():
        # Ray counts memory, and nodes by their address, among the resources.
        if ":" not in name and "memory" not in name:
            texts.append(f"{size:g} {name}")
    return ", ".join(texts) or "nothing"
