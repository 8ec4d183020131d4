"""Hosts in Ray actors: samplers in processes of their own, on any machine of a cluster.

    Fleet -> RayHost  --(messages)---------->  Worker -> ThreadHost -> EngineHost
                      <--(answers, progress)---

A worker is trusted as the trainer is, since Ray pickles what it carries; it knows nothing of
rewards. It ends with the trainer, however that ends. Everything that Ray raises is one of two
things here: `HostLost`, or an error of the user's.
"""

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
"""Ray's variables: the secret of a cluster, and whether there is one."""
LONGEST_REASON = 250
"""Characters of what Ray says of the end of a worker."""
LAST_LINES = 5
"""Of a worker's own output that are shown when it has ended."""
VISIBLE = {"GPU": "CUDA_VISIBLE_DEVICES", "TPU": "TPU_VISIBLE_CHIPS"}
"""Ray's name of an accelerator -> the variable that says which of them a process may use."""


class Place(NamedTuple):
    """Where the process of a worker is."""

    node: str
    pid: int


class Joined(NamedTuple):
    """What a worker tells when it is ready."""

    proof: WorkerFingerprint
    capacity: int


class Worker:
    """The actor: an `EngineHost` in a thread of its own. `make` gives the host and its proof."""

    def __init__(self, name: str, make: Callable[[], tuple[EngineHost, WorkerFingerprint]]) -> None:
        self._name, self._make = name, make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._versions: dict[int, Version] = {}
        self._host: ThreadHost | None = None
        # By number: messages that came before one of a lower number, and the versions that the
        # trainer had when it sent them.
        self._early: dict[int, tuple[Message, Sequence[int]]] = {}
        self._next = 0

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    # These are coroutines, of which only `join` and `news` wait. Ray may begin them in another
    # order than they were called in (of 20,000 calls 870 were overtaken), so messages are numbered.

    async def place(self) -> Place:
        return Place(ray.get_runtime_context().get_node_id(), os.getpid())

    async def join(self) -> Joined:
        # Ray's warning is untrue of other threads, and it would be the last line.
        _ray_worker.blocking_get_inside_async_warned = True
        # Compiles for minutes, where a model is large.
        host, proof = await asyncio.to_thread(self._make)
        self._host = ThreadHost(host, self._wake, self._name)
        return Joined(proof, host.capacity)

    async def handle(self, number: int, message: Message, available: Sequence[int]) -> None:
        """Passes on the messages that `RayHost` has sent, in the order of their numbers: 0, 1, ...
        `available`: the versions that the trainer has not released."""
        self._early[number] = message, available
        while self._next in self._early:
            message, available = self._early.pop(self._next)
            self._next += 1
            self._release_others(available)
            if isinstance(message, Load):
                # Ray has made a copy of it, so this process has to release it as well.
                self._versions[message.version.version] = message.version
            assert self._host is not None
            self._host.handle(message)

    def _release_others(self, available: Sequence[int]) -> None:
        for version in self._versions.keys() - available:
            self._versions.pop(version).remove()

    async def news(self, seconds: float) -> tuple[dict[int, list[Completion]], HostProgress]:
        """Answers as soon as there are some, else none after so many seconds; and what the host has
        done."""
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
    """A `Host` that is a `Worker`. It has room for requests once the worker has a place in the
    cluster, is ready, and has proved itself.

    No call waits for the worker: what it has said since is taken up by the next `poll`."""

    def __init__(self, name: str, cluster: Cluster) -> None:
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
        self._capacity = -1  # no room until it has joined
        self._differs = False

    def handle(self, message: Message) -> None:
        if isinstance(message, Load):
            available = {}
            for number, older_version in self._versions.items():
                if older_version.exists:
                    available[number] = older_version
            available[message.version.version] = message.version
            self._versions = available
            if self._capacity < 0:
                # `_join` sends it: calls that wait for a worker which the cluster has no room for
                # would keep every version that they name.
                return
        self._send(message)

    def poll(self) -> dict[int, list[Completion]]:
        if self._place is None and not self._has_place():
            return {}
        if self._capacity < 0 and self._joining.done():
            self._join()
        for sent in list(self._sent):
            if sent.done():
                self._result(sent)
                self._sent.remove(sent)
        answers = {}
        if self._news is not None and self._news.done():
            reports = self._progress.reports
            answers, self._progress = self._result(self._news)
            self._progress.reports = reports + 1
            self._news = None
        if self._news is None:
            self._news = self._call(self._worker.news, NEWS_SECONDS)
            self._news.add_done_callback(lambda _: self._cluster.wake())
        return answers

    def progress(self) -> HostProgress:
        return replace(self._progress, capacity=self._capacity, differs=self._differs)

    def _has_place(self) -> bool:
        """True once the cluster has given the worker a place, where its process then compiles."""
        if not self._placing.done():
            self._cluster.check_late(self)
            return False
        self._place = self._result(self._placing)
        self._progress.preparing = True
        self._cluster.alive.add(self.name)
        return True

    def _join(self) -> None:
        """Has the worker sample, once it is ready and its numbers are right."""
        try:
            joined: Joined = self._result(self._joining)
        except (HostLost, ShoalError) as error:
            raise HostLost(f"it could not start: {error}") from error
        self._cluster.measure.proofs[self.name] = joined.proof
        differs = self._cluster.measure.judge(self.name, self._cluster.alive)
        if differs is None:
            return
        self._differs = differs
        self._capacity = joined.capacity
        for version in self._versions.values():
            if version.exists:
                self._send(Load(version))

    def close(self) -> None:
        self._cluster.alive.discard(self.name)
        self._cluster.measure.proofs.pop(self.name, None)
        with contextlib.suppress(RayError):
            ray.kill(self._worker)
        is_here = (
            self._place is not None and self._place.node == ray.get_runtime_context().get_node_id()
        )
        if self._place is None or not is_here:
            return
        # A process that is stopped (SIGSTOP) does not end itself as Ray asks it to.
        process = Path(f"/proc/{self._place.pid}")
        with contextlib.suppress(OSError):
            fields_after_name = (process / "stat").read_text().rpartition(")")[2].split()
            is_stopped = fields_after_name[0] == "T"
            # Another process may have its number by now.
            if is_stopped and b"ray::" in (process / "cmdline").read_bytes():
                os.kill(self._place.pid, signal.SIGKILL)

    def _send(self, message: Message) -> None:
        available = list(self._versions)
        sent = self._call(self._worker.handle, self._num_sent, message, available)
        self._sent.append(sent)
        self._num_sent += 1

    def _call(self, method: Any, *args: Any) -> Future:
        try:
            return method.remote(*args).future()
        except RayError as error:
            raise HostLost(self._cluster.reason(error)) from error

    def _result(self, future: Future) -> Any:
        try:
            return future.result()
        except RayTaskError as error:
            if isinstance(error.cause, ShoalError):
                raise ShoalError(str(error.cause)) from error
            raise HostLost(f"{type(error.cause).__name__}: {error.cause}") from error
        except RayError as error:
            raise HostLost(self._cluster.reason(error)) from error


class Connection(NamedTuple):
    """`owned`: made by `connect`. `watcher`: of a cluster that was started here."""

    address: str
    dashboard: str = ""
    owned: bool = True
    watcher: Watcher | None = None
    token: str = ""  # of this cluster alone


@dataclass
class Cluster:
    """The Ray cluster that a run's workers are in."""

    connection: Connection
    workers: int
    resources: Mapping[str, float]  # of one worker
    wait_seconds: float
    environment: Mapping[str, str]  # of a worker
    measure: WorkerParity
    say: Callable[[str], None]
    wake: Callable[[], None] = lambda: None
    make: Callable[[], tuple[EngineHost, WorkerFingerprint]] | None = None  # of a worker
    alive: set[str] = field(default_factory=set)  # hosts that have a process
    trainer_devices: int = 0  # that are held for the trainer; 0 where it has those that it finds
    _late: bool = False

    @property
    def may_span_machines(self) -> bool:
        """True unless Ray was started here: others of a cluster may come at any time, by an
        autoscaler as well."""
        return self.connection.watcher is None

    def start(self, name: str) -> RayHost:
        """A host that joins as soon as the cluster has room for it and it is ready."""
        return RayHost(name, self)

    def make_actor(self, name: str) -> Any:
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
        """Says that a host still has no place; ShoalError where none has."""
        has_said = self._late and self.alive
        if has_said or time.monotonic() - host.started < self.wait_seconds:
            return
        wanted = f"{_resources_text(self.resources)} each"
        cluster_resources = ray.cluster_resources()
        text = (
            f"of sampler.workers={self.workers}, which ask for {wanted}, {len(self.alive)} started "
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
            f"{text}: sampling goes on with {len(self.alive)}; the others join when there is room"
        )

    def reason(self, error: RayError) -> str:
        """Why a worker is gone, with its own last lines where they are on this machine."""
        text = re.sub(r"\x1b\[\d*m", "", str(error)).strip()
        if "creation task" in text:  # the traceback of what it raised
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
        rays_reason = _own_reason(text)
        if "node has died" in text or "unreachable" in text:
            return f"Ray does not reach its machine any more{rays_reason}"
        if "died" in text:
            return f"its process has ended{rays_reason}"
        return f"it cannot be reached{rays_reason}"

    def say_room(self) -> None:
        """Says how many of the workers the cluster has room for now, if not for all: the others
        wait, and nothing else shows that."""
        num_placed = 0
        for free in _ray_state.available_resources_per_node().values():
            num_placed += _times(self.resources, free)
        if num_placed >= self.workers:
            return
        consequence = "they start"
        if num_placed:
            consequence = f"sampling begins with {num_placed}, the others join"
        self.say(
            f"of sampler.workers={self.workers}, which ask for {_resources_text(self.resources)} "
            f"each, the cluster has room for {num_placed} now "
            f"({_resources_text(ray.available_resources())} are free): {consequence} when there is "
            "room"
        )

    def close(self) -> None:
        if self.connection.owned:
            ray.shutdown()
            if self.connection.watcher is not None:
                _forget_token(self.connection.token)
        if self.connection.watcher is not None:
            self.connection.watcher.close()


def connect(address: str, local_cpus: int) -> Connection:
    """Joins the cluster at an address, or starts one here. ShoalError where none answers."""
    if ray.is_initialized():
        return Connection(str(ray.get_runtime_context().gcs_address), owned=False)
    address = check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a line of advice
    # else 15: on the trainer's cores they get what it leaves
    os.environ.setdefault("RAY_worker_niceness", "0")
    watcher = None
    token = ""
    num_cpus = None
    variables: dict[str, str] = {}  # that Ray's own processes inherit
    if not address:
        # Ray ends its workers with this process, but not its own agents where this process is
        # killed.
        watcher = Watcher()
        variables.update(watcher.environment)
        token = _private_token()
        if token:
            variables[TOKEN] = token
        num_cpus = max(os.cpu_count() or 1, local_cpus)
    try:
        os.environ |= variables
        started: Any = ray.init(
            address or "local",
            log_to_driver=False,
            logging_level="ERROR",  # type: ignore[arg-type]
            num_cpus=num_cpus,
        )
    except Exception as error:
        # Ray raises anything, bare Exception included, as on a machine that is overloaded.
        if watcher is not None:
            watcher.close()
            _forget_token(token)
        first = " ".join(str(error).split())[:300]
        raise ShoalError(
            f"ray.address={address}: {first}; start Ray there with the same Python and the same "
            "version of Ray (ray start --head), or leave ray.address out to start it here"
        ) from error
    finally:
        for name in variables:
            del os.environ[name]
    # Of each process that ends Ray would print a paragraph; the run says why.
    _ray_worker._worker_logs_enabled = False
    return Connection(
        str(ray.get_runtime_context().gcs_address),
        started.dashboard_url or "",
        True,
        watcher,
        token,
    )


def _private_token() -> str:
    """A secret for a cluster that is started here; empty where the user has chosen one, or none.
    Without it Ray would write one to ~/.ray/auth_token, with which nobody then joins a cluster that
    was started without."""
    is_chosen = any(name in os.environ for name in (TOKEN, f"{TOKEN}_PATH", TOKEN_MODE))
    if is_chosen or Path("~/.ray/auth_token").expanduser().exists():
        return ""
    return secrets.token_hex(32)


def _forget_token(token: str) -> None:
    """Forgets the secret of a cluster that was started here: this process may join another one."""
    if not token:
        return
    os.environ.pop(TOKEN_MODE, None)
    raylet: Any = importlib.import_module("ray._raylet")
    if hasattr(raylet, "AuthenticationTokenLoader"):  # from Ray 2.60 on
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        raylet.Config.initialize("")


def _output_lines(pid: str) -> list[str]:
    """What a worker's process wrote, where that is on this machine."""
    node: Any = _ray_worker.global_worker.node
    folder = Path(node.get_logs_dir_path())
    lines = []
    for ending in ("out", "err"):
        for file in folder.glob(f"worker-*-{pid}.{ending}"):
            for line in file.read_text(errors="replace").splitlines():
                if not line.startswith(":"):  # Ray's own
                    lines.append(line)
    return lines


def _own_reason(text: str) -> str:
    """What Ray says of the end of an actor, in short and in parentheses; empty where it says
    nothing."""
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


def _times(wanted: Mapping[str, float], free: Mapping[str, float]) -> int:
    """How often the free resources have the wanted ones; 0 where none are wanted."""
    counts = []
    for name, size in wanted.items():
        if size:
            counts.append(int(free.get(name, 0) // size))
    return min(counts, default=0)


def check_address(address: str) -> str:
    """The address of the cluster, empty where Ray is started here. ShoalError where no cluster can
    be joined."""
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
    """ShoalError unless something listens there: Ray itself waits for minutes."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        seconds = max(0.1, deadline - time.monotonic())
        try:
            with socket.create_connection((host, int(port)), timeout=seconds):
                return
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) or time.monotonic() > deadline - 1:
                raise ShoalError(
                    f"ray.address={address}: nothing answers there ({error}); give auto or "
                    "HOST:PORT of a cluster (ray start --head), or leave it out to start Ray here"
                ) from error
            time.sleep(1)


def accelerator() -> str:
    """What Ray calls the accelerators of the cluster: GPU or TPU; CPU where it has none, or none is
    to be used."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "CPU"
    resources = ray.cluster_resources()
    for name in ("TPU", "GPU"):
        if resources.get(name):
            return name
    return "CPU"


class _Holder:
    """Holds the trainer's accelerators, so that Ray gives them to nobody else."""

    def ids(self, kind: str) -> list[str]:
        return ray.get_runtime_context().get_accelerator_ids().get(kind, [])


def hold_accelerators(kind: str, trainer: str, wanted: float, seconds: float) -> tuple[Any, int]:
    """An actor that holds the trainer's accelerators of this machine until it is forgotten, and how
    many; this process sees no others. `trainer`: mesh.trainer; empty for those that the workers
    leave of the `wanted` ones, which take those of other machines first. None and 0 where the
    machine has none of this kind, or Ray chose those of this process already."""
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
        count = len(devices) if isinstance(devices, list) else devices
    else:
        wanted_here = min(here, max(0, wanted - elsewhere))
        count = here - math.ceil(wanted_here)
    if not count:
        raise ShoalError(
            f"the workers ask for {wanted:g} {kind}, which are all {here} of this machine: the "
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
            f"the trainer asks for {count} {kind} of this machine, which has {here}, and others of "
            "the cluster hold some: lower mesh.trainer, or wait for them"
        ) from error
    os.environ[VISIBLE[kind]] = ",".join(ids)
    return holder, count


def _has_chosen(kind: str) -> bool:
    """True if Ray gave this process its accelerators: to a task or an actor, or to the entry point
    of a job. A variable that the user or the batch system has set is no such choice: nothing keeps
    Ray from giving those to a worker."""
    # A job's entry point is a child of the actor that has them, with the last of these variables if
    # that has none.
    is_job = (
        os.environ.get(VISIBLE[kind])
        and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        and "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" not in os.environ
    )
    return bool(is_job or ray.get_runtime_context().get_accelerator_ids().get(kind))


def _resources_text(resources: Mapping[str, float]) -> str:
    texts = []
    for name, size in resources.items():
        # Ray has memory, and nodes by their address, among its resources.
        if ":" not in name and "memory" not in name:
            texts.append(f"{size:g} {name}")
    return ", ".join(texts) or "nothing"
