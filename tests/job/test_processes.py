"""Several processes: that they do what one does, agree on how to end, and refuse what cannot
work."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small import QWEN3, random_parameters
from tiny_models import write_model_with_tokenizer, write_tokenizer
from tiny_runs import Workshop, groups, metrics, parameters_of, read_lines

from shoal import cli
from shoal.chat import template as template_module
from shoal.chat.tokenizer import Tokenizer
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import LoraSection, ModelSection
from shoal.config.train import Config
from shoal.job.job import Job
from shoal.job.process import check_same, check_same_model, check_shared
from shoal.job.training import open_run
from shoal.mesh import World, make_roles, processes, roles
from shoal.mesh.processes import find_processes, join
from shoal.model.architecture import Adapter
from shoal.model.families import architecture_of
from shoal.model.parameters import select, trained_specs
from shoal.model.transformer import Model
from shoal.protocols import GroupRequest, RolloutStats
from shoal.records import (
    Completion,
    Example,
    Failure,
    Group,
    Purpose,
    SamplingParams,
    ShoalError,
    StopReason,
)
from shoal.report.console import Console
from shoal.rollout.multi_process import MultiProcessSource
from shoal.runs.lines import Summary
from shoal.runs.reader import read_requested
from shoal.runs.writer import NullRunWriter, RunWriter
from shoal.stop import StopRequested, StopSignal
from shoal.weights import peft
from shoal.weights.checkpoints import DAMAGED_FOLDER
from shoal.weights.maxtext import MaxTextCheckpoint
from shoal.weights.source import ModelSource, resolve_model

HELD = """\
import os, time


def held(completions, trainer_state, **kwargs):
    while trainer_state.global_step == 2 and os.path.exists("HOLD"):
        time.sleep(0.05)
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [sum(map(ord, text)) % 3 for text in texts]
"""
"""A reward that waits in the third step while a file is there."""


# ---- real processes

PROGRAM = """
import sys
from shoal import cli
from shoal.mesh import processes
processes.STORE_BYTES = 2000  # groups of tiny runs go by the devices too
sys.exit(cli.main(sys.argv[1:]))
"""
GROUPS, METADATA = "groups/step_000002.parquet", "checkpoints/2/extra/metadata"


class Processes:
    """Starts the command of a workshop in two processes of four devices."""

    def __init__(self, workshop: Workshop):
        self.workshop, self.hold = workshop, workshop.folder / "hold"
        rewards = workshop.folder / "held.py"
        rewards.write_text(HELD.replace("HOLD", str(self.hold)))
        # With a lag, so that a checkpoint holds published weights of an older version too.
        self.changes = (
            f"reward={rewards}:held",
            "mesh.fsdp=-1",
            "batch.prompts_per_step=3",
            "checkpoint.every=1",
            "train.weight_sync_interval=2",
            "train.pass_k=0",
            "algorithm.kl_coef=0.1",
        )

    def start(self, name: str, *changes: str) -> list[subprocess.Popen[str]]:
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        words = [
            *self.workshop.words(name, *self.changes, *changes),
            f"mesh.coordinator=localhost:{port}",
            "mesh.processes=2",
        ]
        flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
        result = []
        for number in range(2):
            result.append(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, *words, f"mesh.process={number}"],
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=os.environ | {"XLA_FLAGS": flags},
                )
            )
        return result


@pytest.fixture(scope="module")
def two(workshop: Workshop) -> Processes:
    return Processes(workshop)


def ends(started: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout (without what XLA's collectives print there) and stderr of each."""
    found = []
    for process in started:
        out, err = process.communicate(timeout=200)
        # Its threads write into each other's lines, so that an end of one may stand alone: "1".
        shown = "".join(
            line
            for line in out.splitlines(keepends=True)
            if not re.search(r"Gloo|peer ranks|^\d*$", line)
        )
        found.append((process.returncode, shown, err))
    return found


@pytest.fixture(scope="module")
def whole(two: Processes) -> Path:
    """A run of two steps in two processes."""
    (_, shown, _), (_, silent, met) = found = ends(two.start("whole", "optimizer.offload=true"))
    assert [code for code, _, _ in found] == [0, 0], found
    assert "step 2/2" in shown and not silent
    assert (
        met.splitlines()[-1]
        == "process 1: all 2 processes are connected; process 0 prints the output"
    )
    return two.workshop.runs / "whole"


@pytest.mark.system
def test_two_processes_sample_and_learn_what_one_does(two: Processes, whole: Path):
    one = two.workshop.train("one", *two.changes)
    for step in (1, 2):
        assert tokens(whole, step) == tokens(one, step)
        for a, b in zip(groups(whole, step), groups(one, step), strict=True):
            assert a["prompt"] == b["prompt"] and a["columns"] == b["columns"]
            assert [c["reward"] for c in a["completions"]] == [
                c["reward"] for c in b["completions"]
            ]
        a, b = parameters_of(whole, step), parameters_of(one, step)
        assert max(np.abs(a[name] - b[name]).max() for name in a) < 1e-5
    assert read_lines(whole / "evaluations.jsonl") == read_lines(one / "evaluations.jsonl")
    assert [line["tokens/sampled"] for line in metrics(whole)] == [
        line["tokens/sampled"] for line in metrics(one)
    ]
    assert read_requested(whole).mesh.coordinator == ""


def tokens(run: Path, step: int) -> list[Any]:
    return [[c["token_ids"] for c in group["completions"]] for group in groups(run, step)]


@pytest.mark.system
def test_a_checkpoint_of_two_processes_is_resumed_by_one_with_roles_apart(
    two: Processes, whole: Path
):
    run = two.workshop.runs / "apart"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "2")
    (run / "summary.json").unlink()
    assert json.loads((run / "checkpoints" / "1" / "extra" / "metadata").read_text())[
        "published"
    ] == [0]
    assert (
        cli.main(
            [
                "train",
                f"resume={run}",
                "mesh.fsdp=4",
                "mesh.trainer=4",
                "mesh.sampler=4",
                "mesh.sampler_tensor=2",
            ]
        )
        == 0
    )
    assert tokens(run, 2) == tokens(whole, 2)
    for name in ("loss", "grad_norm", "kl"):
        # Sums in another order: float32 keeps 1e-7 of a norm of 7, of which CPUs with other vectors
        # used up to 1.4e-6.
        assert metrics(run)[1][name] == pytest.approx(metrics(whole)[1][name], rel=5e-6, abs=1e-5)


@pytest.mark.system
def test_a_damaged_checkpoint_is_passed_over_by_both_and_a_killed_process_named_by_the_other(
    two: Processes, whole: Path
):
    """As after a kill in the second step, of whose checkpoint each process reads what it wrote
    itself."""
    run = two.workshop.runs / "again"
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    (run / GROUPS).unlink()
    for part in (run / "checkpoints" / "2" / "state" / "ocdbt.process_1" / "d").iterdir():
        # of half a file what is missing may be an index that nothing reads
        part.write_bytes(part.read_bytes()[:1])
    two.hold.touch()
    started = two.start("again", "steps=3")
    deadline = time.monotonic() + 200
    while (
        not (run / DAMAGED_FOLDER).exists()
        or not (run / METADATA).exists()
        or not (run / GROUPS).exists()
    ):
        if time.monotonic() > deadline or any(process.poll() is not None for process in started):
            started[0].kill()
            pytest.fail(str(ends(started)))
        time.sleep(0.05)
    sums = []
    for folder in (run, whole):
        sums.append(json.loads((folder / METADATA).read_text())["checksums"])
    assert sums[0] == sums[1]
    assert (run / GROUPS).read_bytes() == (whole / GROUPS).read_bytes()
    # JAX's service is this process's, and its clients would abort
    started[0].send_signal(signal.SIGKILL)
    began = time.monotonic()
    _, (code, _, err) = ends(started)
    assert code == 2 and time.monotonic() - began < 60
    assert "coordination" not in err and err.count("error") == 1
    assert (
        f"error: process 0 ({socket.gethostname()}, pid {started[0].pid}) has ended"
        in err.splitlines()[-1]
    )


# ---- what they exchange, with threads in place of processes


class Store:
    """JAX's key-value store, for threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def key_value_delete(self, key: str) -> None:
        del self.values[key]

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        while key not in self.values:
            time.sleep(0.001)
        return self.values[key]


def together(count: int, call: Callable[[World], Any]) -> list[Any]:
    """What each of some worlds' threads returned or raised."""
    store, found = Store(), {}
    worlds = []
    for index in range(count):
        worlds.append(World(count, index, store, [f"process {number}" for number in range(count)]))

    def work(world: World) -> None:
        try:
            found[world.index] = call(world)
        except BaseException as error:
            found[world.index] = error

    threads = [threading.Thread(target=work, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(store.values) <= count  # what all have read is removed
    return [found[index] for index in range(count)]


def request(row: int, size: int = 2) -> GroupRequest:
    example = Example(
        row, [{"role": "user", "content": f"{row}?"}], {"answer": str(row), "pair": (1, 2)}
    )
    return GroupRequest(
        Purpose.TRAIN, 3, 3, example, np.array([row, 7], np.int32), size, SamplingParams()
    )


def group(one: GroupRequest) -> Group:
    lengths = [1 + one.example.row % 3, 2]
    completions = tuple(
        Completion(
            0,
            index,
            np.full(length, one.example.row, np.int32),
            np.full(length, -1 / 3, np.float32),
            np.ones(length, bool),
            np.full(length, 3, np.int32),
            StopReason.EOS,
        )
        for index, length in enumerate(lengths)
    )
    rewards = np.array([1 / 3, np.nan])
    return Group(
        one.purpose,
        one.step,
        one.version,
        one.example,
        one.prompt_ids,
        completions,
        ("a", "b"),
        rewards,
        {"own": rewards},
        np.array([True, False]),
        np.array([True, False]),
        reward_weights={"own": 1.0},
        logged={"seen": [1 / 3, float(one.example.row)]},
    )


class FakeSource:
    def __init__(self, wrong: BaseException | None = None):
        self.wrong, self.rows, self.asked = wrong, [], []

    def request(self, requests: list[GroupRequest]) -> None:
        self.asked = requests

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        if self.wrong:
            raise self.wrong
        self.rows += [one.example.row for one in self.asked]
        return [group(one) for one in self.asked]

    def publish(self, version: int, params: Any, keep_from: int | None) -> None:
        if self.wrong:
            raise self.wrong

    def read_stats(self, purpose: Purpose) -> RolloutStats:
        return RolloutStats(
            1.0,
            2.0,
            5,
            0.5,
            Counter(active_slots=3, total_slots=4, tokens=6, preempted_rows=2, new_counter=1),
            [Failure("own", 1, 1, "raised", "it raised")],
        )


def dealt_source(
    world: World, source: FakeSource, stop: StopSignal | None = None
) -> MultiProcessSource:
    return MultiProcessSource(source, world, stop or StopSignal())  # type: ignore[arg-type]


def play(
    world: World, requests: list[GroupRequest], wrong: dict[int, BaseException]
) -> tuple[list[Group], Any]:
    source = dealt_source(world, FakeSource(wrong.get(world.index)))
    source.request(requests)
    played = source.take(requests[0].purpose, requests[0].step)
    return played, source.read_stats(Purpose.TRAIN)


def test_processes_have_the_same_kernels(tmp_path: Path):
    """Of two, one whose GPU cannot run them."""
    write_tokenizer(tmp_path)

    def call(world: World) -> None:
        config = Config(base_output_directory=str(tmp_path), run_name="none")
        where = make_roles(MeshSection())
        job = Job(
            config,
            Console(io.StringIO()),
            model_source=ModelSource(tmp_path, QWEN3, lambda *_: random_parameters(QWEN3)),
        )
        attention = "blocked" if world.index else "auto"
        job.opened |= {
            "world": world,
            "config": config,
            "roles": where,
            "teacher_sources": {},
            "model": Model(QWEN3, where.trainer, attention=attention),
        }
        open_run(job)

    for error in together(2, call):
        assert isinstance(error, ShoalError) and "differ in the attention kernels" in str(error)
        assert "process 1 has model.attention blocked, process 0 has auto" in str(error)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_dealt_groups_are_those_of_one_player_in_every_process(count: int):
    requests = [request(row) for row in range(count)]
    for played, stats in together(3, lambda world: play(world, requests, {})):
        for found, wanted in zip(played, map(group, requests), strict=True):
            assert (found.example, found.step, found.version) == (
                wanted.example,
                wanted.step,
                wanted.version,
            )
            assert found.prompt_ids.tolist() == wanted.prompt_ids.tolist()
            assert found.rewards.tobytes() == wanted.rewards.tobytes() and found.reward_weights == {
                "own": 1.0
            }
            assert found.logged == wanted.logged  # which the table of groups does not have
            for a, b in zip(found.completions, wanted.completions, strict=True):
                assert (
                    a.token_ids.tolist() == b.token_ids.tolist()
                    and a.logprobs.tobytes() == b.logprobs.tobytes()
                )
        assert (stats.sample_seconds, stats.tokens) == (1.0, 15)
        assert stats.counters == {
            "active_slots": 9,
            "total_slots": 12,
            "tokens": 18,
            "preempted_rows": 6,
            "new_counter": 3,
        }
        assert stats.failures[0].text == "it raised" and len(stats.failures) == 3


@pytest.mark.parametrize(
    ("wrong", "raised"),
    [
        ({1: StopRequested()}, StopRequested),
        ({2: ShoalError("the reward raised")}, ShoalError),
        ({0: ShoalError("the reward raised"), 1: StopRequested()}, StopRequested),
    ],
)
def test_a_stop_or_an_error_of_one_process_is_raised_by_all(wrong: Any, raised: type):
    for error in together(3, lambda world: play(world, [request(row) for row in range(4)], wrong)):
        assert type(error) is raised
        assert raised is StopRequested or str(error) == "the reward raised"


def test_weights_that_one_process_cannot_publish_end_all():
    """Alone it would save a checkpoint, which takes all of them."""
    wrong = {1: ShoalError("no room for the weights")}
    ends = together(
        3, lambda world: dealt_source(world, FakeSource(wrong.get(world.index))).publish(3, None)
    )
    assert [(type(error), str(error)) for error in ends] == [
        (ShoalError, "no room for the weights")
    ] * 3


def test_a_process_without_a_share_of_the_groups_is_stopped():
    def call(world: World) -> None:
        stop = StopSignal()
        if world.index == 2:
            stop.request()
        source = dealt_source(world, FakeSource(), stop)
        source.request([request(0)])
        source.take(Purpose.TRAIN, 3)

    assert [type(error) for error in together(3, call)] == [StopRequested] * 3


def test_more_requests_of_a_step_are_dealt_on_and_a_step_begins_at_process_0():
    def call(world: World) -> list[list[int]]:
        own, dealt = FakeSource(), []
        several = dealt_source(world, own)
        for rows, step in (([0, 1], 3), ([2], 3), ([3, 4], 3), ([5], 4)):
            own.rows = []
            several.request([replace(request(row), step=step) for row in rows])
            played = several.take(Purpose.TRAIN, step)
            assert [group.example.row for group in played] == rows
            dealt.append(own.rows)
        return dealt

    assert together(3, call) == [[[0], [], [3], [5]], [[1], [], [4], []], [[], [2], [], []]]


def test_long_bytes_are_gathered_by_devices_and_short_ones_by_the_store(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(processes, "STORE_BYTES", 3)
    gathered: dict[int, bytes] = {}
    all_here = threading.Barrier(2)

    def gather(data: bytes, rows: Any, lengths: Any) -> list[bytes]:
        gathered[len(data)] = data
        all_here.wait(10)
        assert lengths == [0, 5]
        return [gathered[length] for length in lengths]

    monkeypatch.setattr(processes, "gather_bytes", gather)
    assert (
        together(2, lambda world: world.exchange("x", [b"\n1", b"a\nbcd"][world.index]))
        == [[b"\n1", b"a\nbcd"]] * 2
    )
    assert gathered == {0: b"", 5: b"a\nbcd"}


@pytest.mark.parametrize(
    ("length", "most"), [(1, 64 << 20), (300_000, 1 << 14), (300_000, 64 << 20)]
)
def test_gathered_bytes_are_those_that_were_given(
    monkeypatch: pytest.MonkeyPatch, length: int, most: int
):
    monkeypatch.setattr(processes, "ROUND_BYTES", most)
    data = np.random.default_rng(0).bytes(length)
    assert processes.gather_bytes(data, [0], [length]) == [data]


def test_processes_that_differ_are_named_with_the_difference():
    same = together(2, lambda world: check_same(world, "versions", {"jax": "1"}))
    assert same == [None, None]
    for error in together(
        3,
        lambda world: check_same(
            world,
            "configuration",
            {"steps": "3", "optimizer.lr": "1e-5" if world.index < 2 else "1e-4"},
        ),
    ):
        assert str(error) == (
            "processes differ in configuration: process 2 has optimizer.lr 1e-4, process 0 has "
            "1e-5; start all of them in the same way"
        )


def change_weights(folder: Path) -> None:
    """One value of the last tensor, as another training step would."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)


def change_template(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text().replace("assistant", "Assistant"))


def change_end(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))


def change_vocabulary(folder: Path) -> None:
    """Two pieces change places."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["he"], vocabulary["in"] = vocabulary["in"], vocabulary["he"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def leave_alone(folder: Path) -> None:
    (folder / "README.md").write_text("not read")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "5"}))


@pytest.mark.parametrize(
    ("change", "what", "name"),
    [
        (change_weights, "the weights of the model", "model.norm.weight"),
        (change_template, "the tokenizer of the model", "the chat template"),
        (change_end, "the tokenizer of the model", "eos_token_id"),
        (change_vocabulary, "the tokenizer of the model", "tokenizer.json"),
        (leave_alone, "", ""),
    ],
)
@pytest.mark.parametrize("given", ["a folder", "the base of an adapter"])
def test_hosts_with_other_files_at_the_same_path_are_refused(
    tmp_path: Path, change: Callable[[Path], None], what: str, name: str, given: str
):
    """Each process reads a part of the weights, so a mixture of two models would be trained."""
    specs = []
    for number in range(2):
        folder = write_model_with_tokenizer(
            tmp_path / str(number) / "model", tie_word_embeddings=True
        )
        if number:
            change(folder)
        section = ModelSection(path=str(folder))
        if given == "the base of an adapter":
            section = ModelSection(
                path=str(write_adapter(tmp_path / str(number) / "adapter", folder))
            )
        specs.append(resolve_model(section))
    found = together(
        2, lambda world: check_same_model(world, "the model", "model.path", specs[world.index])
    )
    if not what:
        assert found == [None, None]
        return
    for error in found:
        assert isinstance(error, ShoalError)
        assert str(error).startswith(f"processes differ in {what}: process 1 has {name} ")
        assert str(error).endswith("; give every host the same files at model.path")


def write_adapter(folder: Path, base: Path, seed: int = 0) -> Path:
    a = replace(architecture_of(base), adapter=Adapter(4, 8.0, ("q_proj",)))
    peft.save(folder, select(trained_specs(a), random_parameters(a, seed)), a, str(base), base)
    return folder


@pytest.mark.parametrize("given", ["model.path", "model.lora.path"])
def test_hosts_with_other_adapters_are_refused(tmp_path: Path, given: str):
    base, specs = write_model_with_tokenizer(tmp_path / "base"), []
    for number in range(2):
        adapter = str(write_adapter(tmp_path / str(number), base, seed=number))
        section = ModelSection(path=adapter)
        if given == "model.lora.path":
            section = ModelSection(path=str(base), lora=LoraSection(path=adapter))
        specs.append(resolve_model(section))
    for error in together(
        2, lambda world: check_same_model(world, "the model", given, specs[world.index])
    ):
        assert "processes differ in the weights of the model: process 1 has " in str(error)
        assert "lora_A" in str(error)


def test_hosts_with_other_checkpoints_of_a_run_or_of_maxtext_are_refused(tmp_path: Path):
    specs = []
    for number in range(2):
        run = tmp_path / str(number) / "run"
        write_model_with_tokenizer(run / "model")
        extra = run / "checkpoints" / "3" / "extra"
        extra.mkdir(parents=True)
        (extra / "metadata").write_text(json.dumps({"checksums": {"trainable": 7 + number}}))
        specs.append(resolve_model(ModelSection(path=str(run))))
    for error in together(
        2, lambda world: check_same_model(world, "the model", "model.path", specs[world.index])
    ):
        assert (
            "process 1 has the weights of run/checkpoints/3 0x00000008, process 0 has 0x00000007"
            in str(error)
        )
    files = []
    for number in range(2):
        folder = tmp_path / f"items{number}"
        (folder / "d").mkdir(parents=True)
        (folder / "d" / "piece").write_bytes(bytes(200_000) + bytes([number]) + bytes(2_000))
        files.append(MaxTextCheckpoint(folder, QWEN3, True, False, "", {}).digests())
    assert files[0].keys() == files[1].keys() == {"d/piece"} and files[0] != files[1]


def test_a_file_that_one_host_cannot_read_is_named_by_all(tmp_path: Path):
    """Alone it would end, and the others wait for it."""
    specs = []
    for number in range(2):
        specs.append(
            resolve_model(
                ModelSection(path=str(write_model_with_tokenizer(tmp_path / str(number))))
            )
        )
    (tmp_path / "1" / "model.safetensors").unlink()
    for error in together(
        2, lambda world: check_same_model(world, "the model", "model.path", specs[world.index])
    ):
        assert isinstance(error, ShoalError)
        assert str(error).startswith(f"process 1: {tmp_path / '1'} holds no safetensors file")


def test_a_template_that_writes_another_date_is_another_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_tokenizer(tmp_path, template="{{ strftime_now('%d') }} {{ messages[0].content }}")
    facts = []
    for day in (1, 2):

        def now(day=day):
            return datetime(2026, 1, day)

        monkeypatch.setattr(
            template_module,
            "datetime",
            SimpleNamespace(now=now),
        )
        facts.append(Tokenizer.load(tmp_path).facts())
    assert {name for name in facts[0] if facts[0][name] != facts[1][name]} == {
        "the prompt of a question"
    }


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.job.process.SHARED_SECONDS", 0.1)
    assert together(2, lambda world: check_shared(world, tmp_path / "runs", False)) == [None, None]
    for index in range(2):
        (tmp_path / str(index)).mkdir()
    for error in together(
        2, lambda world: check_shared(world, tmp_path / str(world.index) / "runs", False)
    ):
        assert "is not shared: process 1 does not see what process 0 writes there" in str(error)
    assert not list(tmp_path.glob("**/.shoal*"))


def test_a_process_without_a_folder_of_its_own_writes_nothing(tmp_path: Path):
    with RunWriter(tmp_path) as folder:
        for version in (0, 5, 10):
            folder.write_evaluation(version, "held_out", {"accuracy": 0.5})
        before = {}
        for path in tmp_path.rglob("*"):
            if path.is_file():
                before[path] = path.read_bytes()
        other = NullRunWriter(tmp_path)
        other.write_metrics(1, {"loss": 1.0})
        other.write_summary(Summary())
        other.rewind(10, evaluated=False)
        other.sync()
        other.close()
        assert sorted(other.read_evaluations()) == [0, 5]
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


# ---- how they hear of an end


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What processes would say when they end."""
    said: list[str] = []

    def write(_, data):
        return said.append(data.decode())

    def exit(code):
        return said.append(f"exit {code}")

    monkeypatch.setattr(
        processes,
        "os",
        SimpleNamespace(
            write=write,
            _exit=exit,
        ),
    )
    return said


@pytest.mark.parametrize("goodbye", [b"", b"farewell\n"])
def test_a_link_that_closes_without_a_farewell_ends_the_others_by_name(
    ended: list[str], goodbye: bytes
):
    with socket.create_server(("localhost", 0)) as server:
        theirs = {}
        for number in (1, 2):
            theirs[number] = socket.create_connection(server.getsockname())
        world = World(3, 0, names=["a", "b", "c"])
        world.watch({number: server.accept()[0] for number in theirs})
    watching = {}
    for number in theirs:
        watching[number] = next(
            one for one in threading.enumerate() if one.name == f"processes {number}"
        )
    theirs[1].sendall(goodbye)
    theirs[1].close()
    watching[1].join(10)
    if goodbye:
        assert ended == []
    else:
        assert ended[0].startswith("error: b has ended, so this one ends too") and ended[1:] == [
            "exit 2"
        ]
        assert theirs[2].recv(100) == b"b has ended"
    said = list(ended)
    theirs[2].sendall(b"farewell\n")
    theirs[2].close()
    watching[2].join(10)  # before its link is closed here: it would end this process
    assert ended == said
    for link in world.links:
        link.close()


# ---- how they find each other


def section(**keys: Any) -> MeshSection:
    return MeshSection(**{"coordinator": "localhost:7777", "processes": 2, "process": 1} | keys)


def test_keys_of_processes_are_checked(monkeypatch: pytest.MonkeyPatch):
    assert (
        find_processes(MeshSection())
        == MeshSection()
        == find_processes(section(processes=1, process=0))
    )
    assert find_processes(section()) == section()
    for wrong, text in (
        (section(process=-1), "mesh.process is missing"),
        (section(processes=0), "mesh.processes is"),
        (section(process=2), "expected 0 to 1"),
        (section(coordinator="here"), "expected HOST:PORT"),
        (section(coordinator=":77"), "HOST:PORT"),
        (section(coordinator="a:70000"), "HOST:PORT"),
        (section(coordinator="10.0.0.1:77"), f"set the environment variable {processes.TOKEN}"),
    ):
        with pytest.raises(ShoalError, match=text):
            find_processes(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "code", "text"),
    [
        (1, 0, "warning: mesh: mesh.processes=2: the devices of the others are not known here"),
        (2, 2, "error: mesh.process=2: with mesh.processes=2 expected 0 to 1"),
    ],
)
def test_a_dry_run_checks_the_keys_of_processes_and_connects_to_none(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    process: int,
    code: int,
    text: str,
):
    # Prompts a device, which are counted where there are devices to count.
    monkeypatch.setenv(processes.TOKEN, "secret")
    assert (
        cli.main(
            [
                "train",
                "--dry-run",
                "mesh.coordinator=nowhere:7777",
                "mesh.processes=2",
                f"mesh.process={process}",
                "batch.prompts_per_device=1",
                "algorithm.num_minibatches=2",
            ]
        )
        == code
    )
    assert text in "".join(capsys.readouterr())


def test_slurm_gives_the_keys_that_are_not_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(processes.TOKEN, "secret")
    for name, value in {
        "JOB_ID": "4711",
        "STEP_NODELIST": "node[003-004]",
        "NTASKS": "2",
        "PROCID": "1",
        "LOCALID": "0",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    found = find_processes(MeshSection())
    assert (found.processes, found.process) == (2, 1) and found.coordinator.startswith("node003:")
    assert find_processes(MeshSection(coordinator="here:1")).coordinator == "here:1"
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert find_processes(MeshSection()) == MeshSection()


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "3"}, [3]),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}, [5]),
        (
            {
                "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "5",
                "JAX_LOCAL_DEVICE_IDS": "6",
            },
            None,
        ),
    ],
)
def test_each_of_several_processes_of_a_node_has_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], gpus: list[int] | None
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert processes.own_gpus() == gpus


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A coordinator's address where nobody listens, which is soon given up."""
    monkeypatch.setattr(processes, "START_SECONDS", 0.3)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    yield f"localhost:{port}"


@pytest.mark.slow
def test_a_coordinator_where_nobody_answers_and_processes_that_do_not_come(
    free: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(ShoalError, match=r"nothing answers there .* start process 0"):
        join(section(coordinator=free))
    assert capsys.readouterr().err == (
        f"waiting for process 0 at {free}, where nothing answers yet (Connection refused; "
        "localhost "
        f"is 127.0.0.1 on "
        "this machine), 0 s at most\n"
    )
    monkeypatch.setattr(processes, "REPEAT_SECONDS", 0.1)
    with pytest.raises(
        ShoalError, match=r"mesh.processes=3: process 1, 2 has not come within 0.3 s"
    ):
        join(section(coordinator=free, processes=3, process=0))
    assert capsys.readouterr().err.count(f"waiting for process 1, 2 at {free}, 0 s at most\n") >= 2


@pytest.mark.parametrize(
    ("error", "code"), [(ShoalError, 2), (KeyboardInterrupt, 130), (ValueError, 1)]
)
def test_a_process_that_fails_alone_keeps_its_exit_code(
    ended: list[str], monkeypatch: pytest.MonkeyPatch, error: type[BaseException], code: int
):
    def leave(world, seconds):
        return False

    monkeypatch.setattr(World, "_leave", leave)
    world = World(2, 1)
    with pytest.raises(error), world:
        raise error
    world.farewell()
    assert ended[0] == f"exit {code}"


def test_a_process_of_another_number_is_refused_by_both(free: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "START_SECONDS", 10)
    found = {}

    def main() -> None:
        with pytest.raises(ShoalError) as raised:
            join(section(coordinator=free, processes=3, process=0))
        found[0] = str(raised.value)

    thread = threading.Thread(target=main)
    thread.start()
    with pytest.raises(
        ShoalError, match=r"was started with mesh.processes=2, process 0 has mesh.processes=3"
    ):
        join(section(coordinator=free))
    thread.join(10)
    assert "was started with mesh.processes=2, process 0 has mesh.processes=3" in found[0]


def signed(text: bytes) -> bytes:
    return processes._signature(text) + b" " + text + b"\n"


STRANGERS = {
    "infinity": lambda: signed(b'{"process": Infinity, "processes": 2, "name": "x"}'),
    "out of range": lambda: signed(b'{"process": 2, "processes": 2, "name": "x"}'),
    "deep": lambda: signed(b"[" * 4000),
    "digits": lambda: signed(b"1" * 4000),
    "endless": lambda: b"x" * (1 << 16),
    "silent": lambda: b"",
    "impostor": lambda: b'{"process": 1, "processes": 2, "name": "x"}\n',
    "another secret": lambda: b"0" * 64 + b' {"process": 1, "processes": 2, "name": "x"}\n',
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_line_of_a_stranger_is_dropped_and_counted(
    free: str, monkeypatch: pytest.MonkeyPatch, stranger: str, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(processes, "START_SECONDS", 30)
    monkeypatch.setattr(processes, "GREETING_SECONDS", 0.3)
    monkeypatch.setenv(processes.TOKEN, "secret")
    met: list[Any] = []

    def target():
        return met.append(processes.meet_others(section(coordinator=free, process=0)))

    main = threading.Thread(target=target)
    main.start()
    link = processes._connect(section(coordinator=free))
    with link, suppress(OSError):
        link.sendall(STRANGERS[stranger]())
        assert link.recv(1) == b""  # closed by process 0
    names, links, address = processes.meet_main(section(coordinator=free))
    assert address == ""  # all on one machine
    main.join(10)
    assert met[0][0] == names and names[1].startswith("process 1 (") and list(links) == [0]
    for socket_ in (*met[0][1].values(), *links.values()):
        socket_.close()
    assert (
        f"dropped connections without the run's {processes.TOKEN}: 1\n" in capsys.readouterr().err
    )


def test_processes_with_different_secrets_do_not_meet(free: str, monkeypatch: pytest.MonkeyPatch):
    """The secret proves process 0 too: here one that knows none answers."""
    monkeypatch.setattr(processes, "OUTLIVES_SECONDS", 0)
    host, _, port = free.rpartition(":")
    with socket.create_server((host, int(port))) as server:

        def answer() -> None:
            with server.accept()[0] as link:
                link.sendall(b'{"names": ["a", "b"]}\n')
                link.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(
            ShoalError, match=rf"not process 0 of a run with this {processes.TOKEN}"
        ):
            processes.meet_main(section(coordinator=free))
        thread.join(10)


def test_process_0_listens_at_the_named_host_alone(free: str, monkeypatch: pytest.MonkeyPatch):
    port = int(free.rpartition(":")[2])
    with processes._listener(section(coordinator=f"127.0.0.1:{port}")):
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
    monkeypatch.setenv(processes.BIND_ADDRESS, f"127.0.0.2:{port}")
    with processes._listener(section(coordinator=f"127.0.0.1:{port}")) as listener:
        assert listener.getsockname() == ("127.0.0.2", port)


def names_of(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> None:
    """A machine whose hosts file has these names."""
    usual = socket.getaddrinfo

    def find(host: str, *args: Any, **options: Any) -> Any:
        return usual(addresses.get(host, host), *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", find)


def test_where_a_name_is_loopback_on_its_own_machine_process_0_can_be_reached_by_others(
    free: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Debian and Ubuntu write `127.0.1.1 NAME` into their hosts file: both waited for 300 s."""
    port = free.rpartition(":")[2]
    names_of(monkeypatch, m1="127.0.1.1", m2="10.77.0.2")
    assert processes.bind_address(section(coordinator=f"m1:{port}")) == f"0.0.0.0:{port}"
    for host in ("localhost", "127.0.0.1", "m2", "10.77.0.2"):
        assert processes.bind_address(section(coordinator=f"{host}:{port}")) == f"{host}:{port}"
    with processes._listener(section(coordinator=f"m1:{port}")):
        for address in ("127.0.1.1", "127.0.0.1"):
            socket.create_connection((address, int(port)), timeout=5).close()
    monkeypatch.setattr(processes, "START_SECONDS", 0)
    monkeypatch.setenv(processes.TOKEN, "secret")
    with pytest.raises(ShoalError, match="has not come within"):
        processes.meet_others(section(coordinator=f"m1:{port}", process=0))
    assert capsys.readouterr().err.startswith(
        f"mesh.coordinator=m1:{port}: m1 is 127.0.1.1 on this machine (its hosts file), which no "
        "other reaches"
    )


def test_gloo_gives_others_an_address_that_they_reach(monkeypatch: pytest.MonkeyPatch):
    ends = {"10.77.0.1": False, "127.0.1.1": True}
    links = []
    for address in ends:
        links.append(SimpleNamespace(getsockname=lambda address=address: (address, 1)))
    assert [processes._address_here([link]) for link in links] == ["10.77.0.1", ""]  # type: ignore
    assert processes._address_here(links[::-1]) == "10.77.0.1"  # type: ignore[arg-type]


def test_a_coordinator_that_does_not_answer_is_said_at_once_with_what_its_name_is(
    free: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(processes, "START_SECONDS", 0.5)
    with pytest.raises(
        ShoalError,
        match=r"nothing answers there \(Connection refused; localhost is 127.0.0.1 on this",
    ):
        processes.meet_main(section(coordinator=free))
    assert (
        f"waiting for process 0 at {free}, where nothing answers yet (Connection refused; "
        "localhost "
        "is 127.0.0.1 on this machine)" in capsys.readouterr().err
    )


@dataclass(frozen=True)
class Device:
    """Of a topology of hosts."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"fsdp": -1}, ""),
        ({"fsdp": 4, "sampler_tensor": 2}, ""),
        ({"trainer": "2", "sampler": "2", "fsdp": -1}, "has all roles on all devices"),
        ({"reference": "2", "fsdp": -1}, "has all roles on all devices"),
        ({"fsdp": 2}, "uses 2 of 4 devices.*set mesh.fsdp=-1"),
        ({"fsdp": -1, "sampler_tensor": 4}, "would lie in two processes.*mesh.sampler_tensor=2"),
    ],
)
def test_meshes_that_several_processes_cannot_have(
    monkeypatch: pytest.MonkeyPatch, keys: Any, text: str
):
    section, devices = MeshSection(**keys), [Device(number, number // 2) for number in range(4)]
    made = roles.make_roles(section, devices)
    found = roles.process_refusal(
        section, made, {device: device.process_index for device in devices}
    )
    assert re.search(text, found) if text else found == ""

    def process_count():
        return 2

    monkeypatch.setattr(roles.jax, "process_count", process_count)
    with pytest.raises(ShoalError, match=text) if text else nullcontext():
        roles.make_roles(section, devices)
