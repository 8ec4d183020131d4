"""Samplers in a Ray cluster: the bits of the caller's thread, whatever becomes of them; and what
goes wrong.

One cluster for all, without a dashboard; workers of one simulated CPU device.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.cluster_utils import Cluster as Nodes
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError
from small import PLAINEST, roles
from tiny_runs import groups, metrics, parameters_of, same_bits
from turn_runs import TurnWorkshop, calling

from shoal import cli
from shoal.checks import settings
from shoal.config.merge import compose
from shoal.config.sections.devices import MeshSection, SamplerSection
from shoal.config.sections.model import ModelSection
from shoal.config.train import Config
from shoal.job import hosts as job_hosts
from shoal.job.hosts import open_cluster
from shoal.job.job import Job
from shoal.mesh import role_devices
from shoal.model.transformer import Model
from shoal.protocols import End, Extend, HostProgress, Load, Message, Submit
from shoal.records import HostRefused, ShoalError
from shoal.report.console import Console
from shoal.rollout import host_health, ray_host, worker_facts
from shoal.rollout.worker_facts import WorkerFingerprint, WorkerParity
from shoal.runs.layout import WORKER_PROOF, make_run_folder
from shoal.weights import ray_store, sampler_copy
from shoal.weights.source import open_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", r"ignore:os\.fork:RuntimeWarning"),
]

NO_MEASURE = WorkerParity(True, print)
LAGGING = ("steps=4", "train.max_staleness=1", "train.evaluate_every=-1")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    # else 15: a machine that has other work starves them
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_worker_niceness": "0",
    }
    made = Nodes(
        initialize_head=True,
        head_node_args={
            "num_cpus": 8,
            "object_store_memory": 100 << 20,
            "include_dashboard": False,
        },
    )
    yield made
    made.shutdown()


@pytest.fixture
def words(nodes) -> Callable[..., tuple[str, ...]]:
    def make(*changes: str) -> tuple[str, ...]:
        return ("sampler.kind=ray", f"ray.address={nodes.address}", *changes)

    return make


@pytest.fixture(scope="module")
def here(workshop) -> Path:
    return workshop.train("here", *LAGGING)


def workers_of(nodes: Nodes) -> list[int]:
    """Processes of samplers in the cluster."""
    raylet, found = nodes.head_node.all_processes["raylet"][0].process.pid, []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == raylet and b"ray::Worker" in (place / "cmdline").read_bytes():
                found.append(int(place.name))
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return found


def assert_same_run(a: Path, b: Path) -> None:
    assert [row["step"] for row in metrics(b)] == [1, 2, 3, 4]
    for step in range(1, 5):
        assert groups(a, step) == groups(b, step)
    assert same_bits(parameters_of(a, 4), parameters_of(b, 4))
    for mine, theirs in zip(metrics(a), metrics(b), strict=True):
        assert {
            name: value
            for name, value in mine.items()
            if name.startswith(("reward", "loss", "staleness"))
        } == {
            name: theirs[name] for name in mine if name.startswith(("reward", "loss", "staleness"))
        }


def attacking(monkeypatch, attacks: Sequence[signal.Signals]) -> set[int]:
    """Sends each worker that is given requests a signal, which it then has, until all are sent; who
    got one. The groups of such a worker are given to another: so all are sent, however groups are
    dealt."""
    handle, left, hit = ray_host.RayHost.handle, list(attacks), set[int]()

    def attacked(self, message):
        handle(self, message)
        if isinstance(message, Submit) and left and self._place.pid not in hit:
            os.kill(self._place.pid, left.pop(0))
            hit.add(self._place.pid)

    monkeypatch.setattr(ray_host.RayHost, "handle", attacked)
    return hit


@pytest.mark.slow
def test_files_give_the_bits_of_arrays(workshop, here, tmp_path):
    words = (*LAGGING, "publish.channel=files", f"publish.folder={tmp_path}")
    workshop.train("files", *words, "steps=2")
    # resumed: older weights are in the checkpoint
    assert_same_run(here, workshop.train("files", *words))
    assert not list(tmp_path.iterdir()), "published files stay behind"


@pytest.mark.system
def test_one_worker_that_reads_files_gives_the_bits_of_the_callers_thread(
    workshop, here, words, nodes, tmp_path
):
    assert_same_run(
        here,
        workshop.train(
            "one",
            *LAGGING,
            *words("publish.channel=files", f"publish.folder={tmp_path}"),
            "report.timeline=true",
        ),
    )
    assert (
        '"worker 0"' in (text := (workshop.runs / "one" / "timeline.json").read_text())
        and '"sample"' in text
    )
    assert not list(tmp_path.iterdir()), "published files stay behind"
    wait_for(lambda: not workers_of(nodes))


@pytest.mark.system
def test_three_workers_killed_and_stopped_give_the_bits_of_the_callers_thread(
    workshop, here, words, nodes, monkeypatch
):
    # one a newcomer
    hit = attacking(monkeypatch, [signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL])
    monkeypatch.setattr(host_health, "MOST_PAUSE_SECONDS", 0.1)
    assert_same_run(
        here,
        workshop.train(
            "three",
            *LAGGING,
            *words(
                "sampler.workers=3",
                "sampler.stall_seconds=4",
                "sampler.restarts=9",
                "publish.channel=ray",
            ),
        ),
    )
    assert len(hit) == 4
    rows = metrics(workshop.runs / "three")
    assert (
        sum(row["fleet/lost"] for row in rows) >= 4
        and sum(row["fleet/asked_again"] for row in rows) >= 4
    )
    tokens = json.loads((workshop.runs / "three" / "summary.json").read_text())["tokens"]
    assert (
        tokens["sampled"] == tokens["trained"] + tokens["evaluated"] + tokens["lost"]
        and tokens["lost"] >= 0
    )
    wait_for(lambda: not workers_of(nodes))  # the one that is stopped, too


@pytest.mark.system
def test_an_adapter_over_two_workers_one_killed_gives_the_bits_of_the_callers_thread(
    workshop, words, nodes, monkeypatch
):
    """The one that takes its place reads what is frozen, too."""
    adapter = (
        *LAGGING,
        "model.lora.rank=2",
        "optimizer.lr=1e-3",
        "task.num_eval_questions=2",
        "train.pass_k=0",
    )
    alone = workshop.train("adapter_alone", *adapter)
    hit = attacking(monkeypatch, [signal.SIGKILL])
    assert_same_run(
        alone,
        workshop.train(
            "adapter_spread",
            *adapter,
            *words(
                "sampler.workers=2",
                "sampler.restarts=2",
                "publish.channel=ray",
                "optimizer.offload=true",
            ),
        ),
    )
    assert (
        len(hit) == 1
        and sum(row["fleet/lost"] for row in metrics(workshop.runs / "adapter_spread")) >= 1
    )
    wait_for(lambda: not workers_of(nodes))


@pytest.mark.system
def test_rollouts_with_turns_over_two_workers_one_killed_give_the_bits_of_the_callers_thread(
    tmp_path, words, nodes, monkeypatch
):
    turns = TurnWorkshop(tmp_path)
    calling(monkeypatch)
    here = turns.train("here")
    hit = attacking(monkeypatch, [signal.SIGKILL])
    monkeypatch.setattr(host_health, "MOST_PAUSE_SECONDS", 0.1)
    run = turns.train("two", *words("sampler.workers=2", "sampler.restarts=9"))
    assert len(hit) == 1 and sum(row["fleet/lost"] for row in metrics(run)) == 1
    for step in (1, 2, 3):
        assert groups(here, step) == groups(run, step)
    assert same_bits(parameters_of(here, 3), parameters_of(run, 3))


@pytest.mark.system
def test_fewer_workers_than_wanted_sample_from_the_newest_weights(
    workshop, words, capfd, monkeypatch
):
    handle, start, hosts = ray_host.RayHost.handle, ray_host.Cluster.start, []

    def late(self, message):
        if isinstance(message, Submit):
            for other in hosts:
                other.started -= 60.0  # as if that time were over
        handle(self, message)

    monkeypatch.setattr(
        ray_host.Cluster, "start", lambda self, name: hosts.append(start(self, name)) or hosts[-1]
    )
    monkeypatch.setattr(ray_host.RayHost, "handle", late)
    run = workshop.train(
        "fewer",
        "steps=4",
        "train.versions=newest",
        "train.max_staleness=2",
        "train.evaluate_every=-1",
        *words("sampler.workers=2", "sampler.resources=[CPU=6]", "ray.wait_seconds=60"),
    )
    assert (
        "of sampler.workers=2, which request 6 CPU each, 1 started in ray.wait_seconds=60; the "
        "cluster has 8 CPU" in " ".join(capfd.readouterr().out.split())
    )
    assert len(metrics(run)) == 4 and all(row["staleness/max"] <= 2 for row in metrics(run))


@pytest.mark.system
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ("sampler.resources=[unicorn=1]", "ray.wait_seconds=1"),
            "of sampler.workers=1, which request 1 unicorn each, 0 started in ray.wait_seconds=1; "
            "the cluster has 8 CPU",
        ),
        (
            ("sampler.devices_per_worker=99", "sampler.resources=[CPU=1]", "sampler.restarts=0"),
            "no sampler host is left: sampler host worker 0 is lost: it could not start: "
            "sampler.devices_per_worker=99: a worker finds 8 of kind cpu",
        ),
    ],
)
def test_a_cluster_without_room_and_workers_that_cannot_start_are_one_error(
    workshop, words, nodes, capsys, changes, message
):
    assert cli.main(workshop.words("none", *words(*changes))) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    wait_for(lambda: not workers_of(nodes))


def test_an_address_where_nothing_answers_and_ray_that_is_missing(workshop, capsys, monkeypatch):
    monkeypatch.setattr(ray_host, "CONNECT_SECONDS", 0.5)
    for address in ("127.0.0.1:1", "127.0.0.1:port"):
        assert cli.main(workshop.words("none", "sampler.kind=ray", f"ray.address={address}")) == 2
        assert f"ray.address={address}: nothing answers there" in capsys.readouterr().err
    config = Config(sampler=SamplerSection(kind="ray"))
    with monkeypatch.context() as patch:

        def overloaded(*args: Any, **options: Any) -> None:
            raise Exception("The current node timed out during startup.\nSome of the raylet failed")

        for name, stand_in in (("is_initialized", lambda: False), ("init", overloaded)):
            patch.setattr(ray_host.ray, name, stand_in)
        with pytest.raises(
            ShoalError,
            match=r"The current node timed out during startup\. Some of the raylet failed",
        ):
            ray_host.connect("", 1)

    def find_spec(name):
        return None

    monkeypatch.setattr(settings, "find_spec", find_spec)
    with pytest.raises(
        ShoalError, match=r"Ray is not installed; pip install '\.\[ray\]' in the clone"
    ):
        settings.check_trainable(config)
    monkeypatch.delattr("shoal.rollout.ray_host")
    monkeypatch.setitem(sys.modules, "shoal.rollout.ray_host", None)  # a broken installation of Ray
    with pytest.raises(
        ShoalError, match=r"Ray cannot be imported \(.*\); pip install '\.\[ray\]' in the clone"
    ):
        open_cluster(config, None, None)


def test_workers_of_a_cluster_that_was_started_here_have_the_trainers_priority_and_its_memory(
    monkeypatch,
):
    """Others may get machines at any time, which share no memory."""
    seen: dict[str, str] = {}

    def Watcher():
        def close():
            return None

        return SimpleNamespace(environment={"MARK": "x"}, close=close)

    monkeypatch.setattr(ray_host, "Watcher", Watcher)

    def is_initialized():
        return False

    monkeypatch.setattr(ray_host.ray, "is_initialized", is_initialized)

    def init(*_, **__):
        return seen.update(os.environ) or SimpleNamespace(dashboard_url="")

    monkeypatch.setattr(
        ray_host.ray,
        "init",
        init,
    )

    def get_runtime_context():
        return SimpleNamespace(gcs_address="here:1")

    monkeypatch.setattr(ray_host.ray, "get_runtime_context", get_runtime_context)
    for address, may_span_machines in (("", False), ("auto", True)):
        seen.clear()
        monkeypatch.setattr(ray_host._ray_worker, "_worker_logs_enabled", True)
        made = ray_host.Cluster(ray_host.connect(address, 1), 1, {}, 1.0, {}, NO_MEASURE, print)
        assert made.may_span_machines == may_span_machines and seen.get("MARK") == (
            None if address else "x"
        )
        assert seen["RAY_worker_niceness"] == "0" and not ray_host._ray_worker._worker_logs_enabled


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_when_the_trainer_ends(workshop, words, nodes, number):
    name = f"ended {number}"
    command = [
        sys.executable,
        "-m",
        "shoal",
        *workshop.words(name, "steps=100000", "train.evaluate_every=-1", *words()),
    ]
    run = workshop.runs / name
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as trainer:

        def target():
            return trainer.stderr.read()

        reader = threading.Thread(target=target)
        reader.start()
        wait_for(lambda: workers_of(nodes) and (run / "metrics.jsonl").is_file() and metrics(run))
        trainer.send_signal(number)
        assert trainer.wait(120) == (130 if number == signal.SIGTERM else -signal.SIGKILL)
        reader.join()
    wait_for(lambda: not workers_of(nodes))


class Actor:
    """In place of a worker: every call of a method is noted, and answered when the test does so."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, Future]] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            self.calls.append((name, args, Future()))

            def future(answer=self.calls[-1][2]):
                return answer

            return SimpleNamespace(future=future)

        return SimpleNamespace(remote=remote)

    def answer(self, name: str, value: Any) -> None:
        next(answer for called, _, answer in self.calls if called == name).set_result(value)


def test_a_worker_without_a_place_is_given_no_versions_and_one_that_gets_ready_is_not_late(
    monkeypatch,
):
    actor = Actor()
    made = ray_host.Cluster(ray_host.Connection(""), 1, {"CPU": 9}, 300.0, {}, NO_MEASURE, print)

    def make_actor(self, name):
        return actor

    monkeypatch.setattr(ray_host.Cluster, "make_actor", make_actor)

    def cluster_resources():
        return {"CPU": 8.0}

    monkeypatch.setattr(ray_host.ray, "cluster_resources", cluster_resources)
    host = ray_host.RayHost("worker 0", made)
    for version in range(3):
        stored = ray_store.RayVersion(version, {"w": None} if version != 1 else {}, {})
        host.handle(Load(stored))
    assert not host.poll() and [name for name, *_ in actor.calls] == ["place", "join"]
    host.started -= 400
    with pytest.raises(
        ShoalError, match=r"of sampler\.workers=1, which request 9 CPU each, 0 started"
    ):
        host.poll()
    actor.answer("place", ray_host.Place("a node", 0))
    assert not host.poll() and host.progress() == HostProgress(capacity=0, preparing=True)
    host.started -= 400  # it compiles
    actor.answer("news", ({}, HostProgress(preparing=True)))
    assert not host.poll() and host.progress() == HostProgress(
        capacity=0, preparing=True, reports=1
    )
    actor.answer("join", ray_host.Joined(proof(), capacity=8))
    host.poll()
    assert host.progress().capacity == 8
    sent = [args for name, args, _ in actor.calls if name == "handle"]
    assert [(number, message.version.version, kept) for number, message, kept in sent] == [
        (0, 0, [0, 2]),
        (1, 2, [0, 2]),
    ]


class Recorder:
    """In place of a host: notes what it is sent."""

    def __init__(self) -> None:
        self.done: list[Message] = []

    def handle(self, message: Message) -> None:
        self.done.append(message)


def test_what_ray_begins_in_another_order_is_done_in_the_order_sent(monkeypatch):
    """An actor with coroutines begins calls in any order: a group of a version came before that
    version."""
    actor = Actor()
    made = ray_host.Cluster(ray_host.Connection(""), 1, {"CPU": 1}, 300.0, {}, NO_MEASURE, print)

    def make_actor(self, name):
        return actor

    monkeypatch.setattr(ray_host.Cluster, "make_actor", make_actor)
    host = ray_host.RayHost("worker 0", made)
    host._joined = ray_host.Joined(proof(), capacity=8)
    for version in range(2):
        host.handle(Load(ray_store.RayVersion(version, {"w": None}, {})))
        host.handle(Submit([version]))  # type: ignore[list-item]
        host.handle(Extend(version, 3, [5]))
        host.handle(End(version, 3))
    sent = [args for name, args, _ in actor.calls if name == "handle"]
    assert len(sent) == 8
    for seed in range(20):
        recorder = Recorder()
        done = recorder.done
        worker = ray_host.Worker("worker 0", lambda: pytest.fail("not asked for"))
        worker._host = recorder  # type: ignore[assignment]
        order = np.random.default_rng(seed).permutation(len(sent))

        async def play(worker: ray_host.Worker = worker, order: np.ndarray = order) -> None:
            for number in order:
                await worker.handle(*sent[number])

        asyncio.run(play())
        assert [type(message) for message in done] == [Load, Submit, Extend, End] * 2
        assert [one.version.version for one in done if isinstance(one, Load)] == [0, 1]
        assert [one.requests for one in done if isinstance(one, Submit)] == [[0], [1]]


def test_tensors_are_fetched_from_another_node_together(monkeypatch):
    """One by one each takes the network's delay: 8 to 10 s for 3.3 MB at 200 ms."""
    model = Model(PLAINEST, roles().sampler)
    specs = sampler_copy.named_specs(model)
    stored = {}
    for number, (name, spec) in enumerate(specs.items()):
        stored[name] = np.full(spec.shape, number, sampler_copy.published_dtype(model, spec))
    refs = {}
    for name, values in stored.items():
        refs[name] = values.reshape(-1).view(np.uint8)
    asked: list[int] = []

    def get(wanted: list[Any]) -> list[Any]:
        asked.append(len(wanted))
        return wanted

    monkeypatch.setattr(ray_host.ray, "get", get)
    for most, batches in ((1 << 30, 1), (0, len(specs))):
        asked.clear()
        monkeypatch.setattr(ray_store, "FETCH_BYTES", most)
        read = ray_store.RayVersion(3, refs, {}).open(model)
        for name, values in stored.items():
            np.testing.assert_array_equal(read(name), values)
            np.testing.assert_array_equal(read(name), values)  # a part of it, for a checkpoint
        assert len(asked) == batches and sum(asked) == len(specs)


def test_the_reason_of_a_workers_end_is_one_line():
    made = ray_host.Cluster(ray_host.Connection(""), 1, {}, 1.0, {}, NO_MEASURE, print)
    for error, reason in (
        (
            OutOfMemoryError(
                "killed ... 3.46GB used / 23.54GB limit (0.146)\n... pid=11128, actual memory"
            ),
            "Ray has killed it, as the memory of its machine ran out (3.46GB used / 23.54GB "
            "limit): lower sampling.s",
        ),
        (
            ActorUnavailableError("rpc error 14", b"0" * 16),
            "it cannot be reached (Ray: The actor 3030",
        ),
        (
            died(
                "The actor is dead because its node has died. Node Id: 5f3a: missed too many "
                "heartbeats."
            ),
            "Ray can no longer reach its machine (Ray: The actor is dead because its node has "
            "died. Node Id: 5f3",
        ),
        (
            died(
                "The actor is dead because its worker process has died. Worker exit type: "
                "SYSTEM_ERROR"
            ),
            "its process has ended (Ray: The actor is dead because its worker process has died. "
            "Worker exit type: S",
        ),
        (ActorDiedError(), "its process has ended"),
    ):
        assert made.reason(error).startswith(reason) and "\n" not in made.reason(error)


def died(text: str) -> ActorDiedError:
    """As Ray puts it together."""
    error = ActorDiedError()
    error.error_msg = (
        f"The actor died unexpectedly before finishing this task.\n\tclass_name: Worker\n{text}"
    )
    return error


def test_a_cluster_that_is_started_here_leaves_no_token_that_others_read(tmp_path, monkeypatch):
    """With ~/.ray/auth_token nobody joined a cluster that was started without one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    seen = {}

    def init(address: str, **options: Any) -> Any:
        seen[address] = os.environ.get("RAY_AUTH_TOKEN", "")
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # as Ray does for a cluster that it starts
        return SimpleNamespace(dashboard_url="")

    context = SimpleNamespace(gcs_address="10.77.0.1:6379")
    for name, stand_in in (
        ("is_initialized", lambda: False),
        ("init", init),
        ("shutdown", lambda: None),
        ("get_runtime_context", lambda: context),
    ):
        monkeypatch.setattr(ray_host.ray, name, stand_in)
    made = ray_host.Cluster(ray_host.connect("", 1), 1, {}, 1.0, {}, NO_MEASURE, print)
    assert len(seen["local"]) == 64 and "RAY_AUTH_TOKEN" not in os.environ
    made.close()
    assert "RAY_AUTH_MODE" not in os.environ and not list(tmp_path.iterdir())
    ray_host.connect("auto", 1)
    assert seen["auto"] == ""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("the user's own")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    ray_host.Cluster(ray_host.connect("", 1), 1, {}, 1.0, {}, NO_MEASURE, print).close()
    assert seen["local"] == ""


@pytest.mark.parametrize(
    ("free", "said"),
    [
        ([{"CPU": 4.0}, {"CPU": 4.0}], ""),
        (
            [{"CPU": 5.0}, {"CPU": 1.0}],
            "of sampler.workers=4, which request 2 CPU each, the cluster has room for 2 now "
            "(6 CPU are free): sampling begins with 2, the others join when there is room",
        ),
        (
            [{"GPU": 1.0}],
            "of sampler.workers=4, which request 2 CPU each, the cluster has room for 0 now "
            "(1 GPU are free): they start when there is room",
        ),
    ],
)
def test_workers_that_have_no_room_yet_are_counted_at_the_start(monkeypatch, free, said):
    total: dict[str, float] = {}
    for one in free:
        for name, value in one.items():
            total[name] = total.get(name, 0.0) + value
    nodes = {str(number): one for number, one in enumerate(free)}

    def available_resources_per_node():
        return nodes

    monkeypatch.setattr(
        ray_host._ray_state, "available_resources_per_node", available_resources_per_node
    )

    def available_resources():
        return total

    monkeypatch.setattr(ray_host.ray, "available_resources", available_resources)
    heard: list[str] = []
    ray_host.Cluster(
        ray_host.Connection(""), 4, {"CPU": 2}, 1.0, {}, NO_MEASURE, heard.append
    ).say_room()
    assert heard == ([said] if said else [])


@pytest.mark.parametrize(
    ("cpus", "cure"),
    [
        (8.0, ": raise ray.wait_seconds if they start slowly; else lower sampler.workers"),
        (1.0, "; the cluster has 1 CPU: lower sampler.workers"),
    ],
)
def test_where_no_worker_has_started_the_cure_depends_on_the_room(monkeypatch, cpus, cure):
    def cluster_resources():
        return {"CPU": cpus}

    monkeypatch.setattr(ray_host.ray, "cluster_resources", cluster_resources)
    cluster = ray_host.Cluster(
        ray_host.Connection(""), 2, {"CPU": 2}, 1.0, {}, NO_MEASURE, print, alive=set()
    )
    with pytest.raises(ShoalError) as caught:
        cluster.check_late(SimpleNamespace(started=time.monotonic() - 2))  # type: ignore[arg-type]
    assert cure in str(caught.value)


def proof(
    facts: dict[str, str] | None = None, token: int = 3, logprob: float = -1.0
) -> WorkerFingerprint:
    return WorkerFingerprint(
        {"python": "3.11", "device": "cpu", **(facts or {})},
        np.array([1, token]),
        np.array([-0.5, logprob], np.float32),
    )


def judging(
    strict: bool = True,
    trainer: WorkerFingerprint | None = None,
    said: Any = print,
    python: str = "3.11",
) -> WorkerParity:
    return WorkerParity(
        strict, said, {"python": python}, {"the trainer": trainer} if trainer else {}
    )


THREE = {"worker 0", "worker 1", "worker 2"}


def joined(
    made: WorkerParity, name: str, shown: WorkerFingerprint, alive: Set[str] = THREE
) -> bool | None:
    made.proofs[name] = shown
    return made.numbers_differ(name, alive)


def test_a_proof_says_how_it_differs():
    assert not proof().difference(proof())
    other = proof({"device": "gpu"}, logprob=-1.0000001)
    assert (
        proof().difference(other)
        == "device is gpu, not cpu, it samples with other log-probs (by up to 1.2e-07)"
    )
    assert proof().difference(proof(token=4)) == "it samples other tokens"


@pytest.mark.parametrize(
    "first", [proof(token=4), proof(logprob=-1.0000001), proof({"device": "gpu"})]
)
def test_an_odd_worker_is_refused_although_it_joins_first(first):
    """With fixed versions the trainer is the measure: the workers that have its numbers stay."""
    made = judging(trainer=proof())
    try:
        assert joined(made, "worker 0", first) is None  # of another device: perhaps all of them are
    except HostRefused as error:
        assert "worker 0 differs from the trainer" in str(error)
    assert joined(made, "worker 1", proof({"threads": "2"})) is False
    assert joined(made, "worker 2", proof()) is False
    with pytest.raises(
        HostRefused, match=r"worker 0 differs from the trainer: (device is gpu, not cpu|it samples)"
    ):
        made.numbers_differ("worker 0", THREE)


def test_where_no_worker_is_like_the_trainer_the_first_is_the_measure():
    made, two = judging(trainer=proof()), {"worker 0", "worker 1"}
    assert joined(made, "worker 0", proof({"device": "gpu"}, token=5), two) is None
    assert joined(made, "worker 1", proof({"device": "gpu"}, token=5), two) is False
    assert made.numbers_differ("worker 0", two) is False
    with pytest.raises(
        HostRefused,
        match="worker 2 differs from worker 1: device is cpu, not gpu, it samples other to",
    ):
        joined(made, "worker 2", proof())


@pytest.mark.parametrize("odd", [proof(token=4), proof({"device": "gpu"})])
def test_after_a_resume_an_odd_worker_is_refused_although_it_joins_first(tmp_path, odd):
    """The trainer cannot sample as a worker does; what the first worker of the run showed is kept
    with the run."""
    before = judging()
    before.keep(tmp_path)
    assert (
        joined(before, "worker 0", proof(logprob=-1 / 3)) is False
        and (tmp_path / WORKER_PROOF).is_file()
    )
    made = judging()
    made.keep(tmp_path)
    try:
        assert joined(made, "worker 0", odd) is None  # of another device: the run may have moved
    except HostRefused as error:
        assert "worker 0 differs from the run's earlier workers: it samples other tokens" in str(
            error
        )
    assert joined(made, "worker 1", proof(logprob=-1 / 3)) is False
    with pytest.raises(HostRefused, match="worker 0 differs from the run's earlier workers"):
        made.numbers_differ("worker 0", THREE)


def test_a_run_that_moves_to_other_devices_has_a_new_measure(tmp_path):
    for device in ("cpu", "gpu", "gpu"):
        made = judging()
        made.keep(tmp_path)
        assert joined(made, "worker 0", proof({"device": device}), {"worker 0"}) is False
        assert WorkerFingerprint.read(tmp_path / WORKER_PROOF).facts["device"] == device


def test_a_proof_is_of_the_settings_with_which_a_worker_samples(monkeypatch):
    """A run that is resumed with another temperature has workers that draw other tokens: they are
    not odd."""

    def fingerprint_of(engine, params, size, facts):
        return facts

    monkeypatch.setattr(job_hosts, "fingerprint_of", fingerprint_of)

    def multiply_exactly(dtype, stack):
        return None

    monkeypatch.setattr(job_hosts, "multiply_exactly", multiply_exactly)
    spec = open_model(ModelSection(), None)

    def settings(*words: str) -> str:
        config, _ = compose("train", ["batch.group_size=4", "train.pass_k=0", *words])
        return job_hosts.make_worker(config, spec.architecture, "float32", spec.tokenizer)[1][
            "settings"
        ]

    others = (
        "sampling.temperature=0.9",
        "sampling.top_k=5",
        "sampling.slots_per_device=4",
        "batch.group_size=2",
        "sampling.max_completion_tokens=2",
        "model.attention=blocked",
    )
    assert len({settings(), *(settings(words) for words in others)}) == 1 + len(others)
    assert settings("steps=9", "optimizer.lr=1e-7") == settings()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"facts": {"pyth',
        '{"facts": {}, "tokens": [1]}',
        '{"facts": {}, "tokens": [1], "logprobs": []}',
        '{"facts": 1, "tokens": [], "logprobs": []}',
        '{"facts": {}, "tokens": ["a"], "logprobs": [1]}',
    ],
)
def test_a_damaged_proof_is_one_error(tmp_path, text):
    folder = make_run_folder(tmp_path, "run")
    (folder / WORKER_PROOF).write_text(text)
    with pytest.raises(
        ShoalError, match=r"worker_proof.json, .* is damaged \(.*\): restore it .*, or remove it"
    ):
        judging().keep(folder)
    judging(strict=False).keep(folder)  # newest weights: nobody reads it
    assert make_run_folder(tmp_path, "run") == folder  # killed before config.yaml was written


def test_a_worker_that_hangs_before_its_proof_does_not_stop_the_others(monkeypatch):
    said: list[str] = []
    made = judging(trainer=proof(), said=said.append)
    now = [1000.0]

    def monotonic():
        return now[0]

    monkeypatch.setattr(worker_facts, "time", SimpleNamespace(monotonic=monotonic))
    other = proof({"device": "gpu"}, token=5)
    assert joined(made, "worker 0", other) is None
    now[0] += worker_facts.FIRST_SECONDS - 1
    assert (
        joined(made, "worker 1", other) is made.numbers_differ("worker 0", THREE) is None
        and not said
    )
    now[0] += 1
    assert made.numbers_differ("worker 0", THREE) is made.numbers_differ("worker 1", THREE) is False
    assert said == [
        "no worker that is ready has the devices and settings of the trainer, and after 600 s "
        "worker 2 still prepare: worker 0's numbers are the measure of others'"
    ]
    with pytest.raises(
        HostRefused, match="worker 2 differs from worker 0: it samples other tokens"
    ):
        joined(made, "worker 2", proof({"device": "gpu"}))


def test_a_host_that_draws_otherwise_is_refused_or_counted():
    said: list[str] = []
    for strict in (True, False):
        made = judging(strict, said=said.append)
        other = proof({"device": "gpu"}, logprob=-1.0000001)
        assert joined(made, "worker 0", proof()) is joined(made, "worker 1", proof()) is False
        assert not said
        if strict:
            with pytest.raises(
                HostRefused,
                match=r"worker 2 differs from worker 0: device is gpu, not cpu, .*; "
                r"refused, as train.versions=fixed promises",
            ):
                joined(made, "worker 2", other)
        else:
            # started again
            assert joined(made, "worker 2", other) is joined(made, "worker 2", other) is True
            assert made.different == {"worker 2"} and len(said) == 1
    with pytest.raises(
        HostRefused, match=r"worker 0 differs from the trainer: python is 3\.11, not 3\.12"
    ):
        joined(judging(python="3.12"), "worker 0", proof())


def machine_of(
    monkeypatch: pytest.MonkeyPatch, here: int, elsewhere: int, own: Sequence[str] = ()
) -> None:
    """A faked Ray: GPUs of this machine and of another, and those that it gave to this process."""
    asked: dict[str, Any] = {}

    class Holder:
        def __init__(self) -> None:
            def remote(kind):
                return [str(number) for number in range(asked["num_gpus"])]

            self.ids = SimpleNamespace(remote=remote)

        def options(self, **options: Any) -> Any:
            asked.update(options)

            def remote():
                return self

            return SimpleNamespace(remote=remote)

    machines = []
    for name, count in (("here", here), ("far", elsewhere)):
        machines.append({"NodeID": name, "Alive": True, "Resources": {"GPU": float(count)}})

    def get_node_id():
        return "here"

    def get_accelerator_ids():
        return {"GPU": list(own)}

    context = SimpleNamespace(get_node_id=get_node_id, get_accelerator_ids=get_accelerator_ids)

    def get_runtime_context():
        return context

    def nodes():
        return machines

    def remote(_):
        return Holder()

    def get(found, timeout):
        return found

    monkeypatch.setattr(
        ray_host,
        "ray",
        SimpleNamespace(
            get_runtime_context=get_runtime_context,
            nodes=nodes,
            remote=remote,
            get=get,
        ),
    )

    def NodeAffinitySchedulingStrategy(*_, **__):
        return None

    monkeypatch.setattr(ray_host, "NodeAffinitySchedulingStrategy", NodeAffinitySchedulingStrategy)


@pytest.mark.parametrize(
    ("trainer", "here", "elsewhere", "wanted", "held"),
    [
        ("", 4, 0, 1, 3),
        ("", 4, 0, 2.5, 1),
        ("", 4, 8, 8, 4),
        ("", 4, 2, 3, 3),
        ("0.5", 4, 0, 2, 2),
        ("[0,2]", 4, 0, 2, 2),
        ("3", 4, 0, 1, 3),
        ("1.0", 4, 4, 4, 4),
        ("", 4, 0, 4, 0),
    ],
)
def test_the_trainer_holds_its_share_of_this_machines_accelerators(
    monkeypatch, trainer, here, elsewhere, wanted, held
):
    """mesh.trainer of them, in any form; else those that the workers leave."""
    machine_of(monkeypatch, here, elsewhere)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if not held:
        with pytest.raises(
            ShoalError, match="the workers request 4 GPU, which are all 4 of this machine"
        ):
            ray_host.hold_accelerators("GPU", trainer, wanted, 1.0)
        return
    holder, count = ray_host.hold_accelerators("GPU", trainer, wanted, 1.0)
    assert holder is not None and count == held
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, range(held)))
    with Job(Config(mesh=MeshSection(trainer=trainer)), Console(io.StringIO())) as job:
        job.opened["cluster"] = SimpleNamespace(trainer_devices=count)
        assert role_devices(job.mesh, held).trainer == list(range(held))


JOB = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}


@pytest.mark.parametrize(
    ("own", "variables", "held"),
    [
        ((), {}, 3),
        (("2",), {}, 0),
        ((), JOB, 0),
        ((), {**JOB, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}, 3),
    ],
)
def test_accelerators_are_held_unless_ray_gave_this_process_its_own(
    monkeypatch, own, variables, held
):
    """Not to be confused with those that the user or Slurm has made visible: as an actor, and in a
    job with and without accelerators of its entry point's."""
    machine_of(monkeypatch, 4, 0, own)
    for name in (*JOB, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"CUDA_VISIBLE_DEVICES": "0,1,2,3", **variables}.items():
        monkeypatch.setenv(name, value)
    holder, count = ray_host.hold_accelerators("GPU", "", 1, 1.0)
    assert (count, holder is None) == (held, not held)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("0,1,2" if held else "0,1,2,3")


@pytest.mark.system
@pytest.mark.parametrize("before", [None, "2,3,4,5"])
def test_the_accelerators_that_a_run_held_are_seen_again_after_it(monkeypatch, before):
    machine_of(monkeypatch, 4, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)

    def close():
        return None

    joined = SimpleNamespace(address="here:1", dashboard="", watcher=None, owned=False, close=close)

    def connect(*_):
        return joined

    monkeypatch.setattr(ray_host, "connect", connect)

    def accelerator():
        return "GPU"

    monkeypatch.setattr(ray_host, "accelerator", accelerator)

    def available_resources_per_node():
        return {"node": {"GPU": 4.0}}

    monkeypatch.setattr(
        ray_host._ray_state, "available_resources_per_node", available_resources_per_node
    )
    config = Config(sampler=SamplerSection(kind="ray", workers=1))
    with ExitStack() as stack:
        made = open_cluster(config, Console(io.StringIO()), stack)
        assert (
            made is not None
            and made.trainer_devices == 3
            and os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2"
        )
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
