"""Servers of vLLM as hosts: what they are asked, whose weights they have, and that what they do
wrong is noticed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import scripted_vllm
from scripted_vllm import ScriptedServer
from serving import serving
from small import PLAINEST, QWEN3, CausalRows, random_parameters, roles
from tiny_runs import PLAIN, Workshop, metrics

from shoal.config.merge import compose
from shoal.config.sections.devices import VllmSection
from shoal.config.sections.reward import RewardSection
from shoal.job.hosts import sends_adapters, server_command, trainer_probe
from shoal.model import adapters
from shoal.model.architecture import Adapter
from shoal.model.head import logits
from shoal.model.parameters import frozen_specs, select, trained_specs, without_adapter
from shoal.model.transformer import Model, forward
from shoal.protocols import End, Extend, GroupRequest, Load, SampleRequest, Submit
from shoal.records import (
    Example,
    HostLost,
    NoiseKey,
    Params,
    Purpose,
    RewardFunction,
    SamplingParams,
    ShoalError,
    StopReason,
)
from shoal.rewards.pool import RewardPool
from shoal.rollout import host_health, http_engine
from shoal.rollout.fleet import Fleet
from shoal.rollout.http_engine import HttpHost, Server, Settings
from shoal.rollout.ledger import GroupRewards
from shoal.rollout.vllm import VllmEngine, read_support
from shoal.runs.reader import read_config
from shoal.tasks.task import Task
from shoal.weights import huggingface, peft
from shoal.weights.folder_store import FolderStore, FolderVersion, ProbeScores
from shoal.weights.store import WeightStore
from shoal.weights.tensor_files import read_header

TASK = Task(
    "t",
    (),
    {},
    (RewardFunction("sum", lambda completions, **_: [float(text) for text in completions]),),
)
PARAMS = SamplingParams(max_tokens=6)
SETTINGS = Settings(
    probe=[1, 2, 3], tolerance=1e-3, eos_ids=[0], longest=16, capacity=8, beginnings=[2, 3]
)


class Folders(WeightStore):
    """Versions as what a scripted server reads; `base`: those of an adapter on it."""

    def __init__(self, folder: Path, base: Path | None = None) -> None:
        super().__init__(Model(PLAINEST, roles().sampler))
        self.folder, self.base = folder, base

    def put_frozen(self, params: Params) -> None:
        pass

    def write(self, version: int, params: Params) -> FolderVersion:
        place = self.folder / f"{version}-{time.monotonic_ns()}"
        place.mkdir()
        probe = [-1.0 - version, -2.0]
        (place / "weights.json").write_text(
            json.dumps({"checksum": f"sum {version}", "probe": probe})
        )
        scores = ProbeScores(np.array(probe), np.full((2, scripted_vllm.VOCABULARY), -0.5))
        return FolderVersion(version, place, scores, version, None, self.base)


@contextmanager
def fleet(
    folder: Path,
    *urls: str,
    open_server: Callable[[str], Server] = Server,
    settings: Settings = SETTINGS,
    base: Path | None = None,
    **options: Any,
) -> Iterator[Fleet]:
    rewards = GroupRewards(
        TASK, RewardPool(TASK.rewards, RewardSection(workers=0)), lambda ids: str(sum(ids))
    )

    woken = threading.Event()

    def start(name: str) -> HttpHost:
        return HttpHost(name, VllmEngine, lambda version: open_server(name), settings, woken.set)

    with closing(
        Fleet(
            Folders(folder, base),
            {url: start(url) for url in urls},
            rewards,
            seed=0,
            in_background=True,
            restart=start,
            woken=woken,
            **{"restarts": 9, **options},
        )
    ) as made:
        made.publish(0, {"w": np.zeros(1)})
        yield made


def ask(
    source: Fleet,
    step: int,
    version: int,
    rows: Sequence[int] = range(4),
    exact: bool = True,
    params: SamplingParams = PARAMS,
) -> None:
    source.request(
        [
            GroupRequest(
                Purpose.TRAIN,
                step,
                version,
                Example(row, "q"),
                np.array([1, 2]),
                3,
                params,
                exact=exact,
            )
            for row in rows
        ]
    )


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    made = ScriptedServer()
    yield made
    made.close()


class CuringNotes(list[str]):
    """What a fleet says of its hosts; with its first word the server's fault is over, and its
    sleep."""

    def __init__(self, server: ScriptedServer) -> None:
        super().__init__()
        self.server = server

    def __call__(self, text: str) -> None:
        self.append(text)
        self.server.fault, self.server.is_asleep = "", False


@pytest.fixture
def notes(server: ScriptedServer) -> CuringNotes:
    return CuringNotes(server)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_health, "MOST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(http_engine, "NEWS_SECONDS", 0.1)


def test_groups_have_the_version_that_was_asked_for_and_every_completion_a_seed_of_its_own(
    tmp_path: Path, server: ScriptedServer
):
    with fleet(tmp_path, server.url) as source:
        ask(source, 0, 0)
        first = source.take(Purpose.TRAIN, 0)
        source.publish(1, {"w": np.ones(1)}, keep_from=0)
        ask(source, 1, 1)
        ask(source, 2, 0)
        groups = [*first, *source.take(Purpose.TRAIN, 1), *source.take(Purpose.TRAIN, 2)]
        stats = source.read_stats(Purpose.TRAIN)
    for group, version in zip(groups, [0] * 4 + [1] * 4 + [0] * 4, strict=True):
        for one in group.completions:
            assert (
                set(one.versions) == {version}
                and one.loss_mask.all()
                and np.all(one.logprobs == -0.5)
            )
            assert one.stop_reason is (
                StopReason.EOS if one.token_ids[-1] == 0 else StopReason.LENGTH
            )
            assert 0 not in one.token_ids[:-1] and 1 <= len(one) <= 6
    params = [body["sampling_params"] for body in server.bodies]
    assert len({one["seed"] for one in params}) == len(params) == 36
    assert [body["cache_salt"] for body in server.bodies] == ["0"] * 12 + ["1"] * 12 + ["0"] * 12
    for one in params:
        assert one["stop_token_ids"] == [0] and one["logprobs"] == 0 and one["max_tokens"] == 6
    assert (
        stats.tokens
        == stats.counters["tokens"]
        == sum(len(one) for group in groups for one in group.completions)
    )
    assert server.calls.count("/collective_rpc") == server.calls.count("/reset_prefix_cache") == 3
    assert stats.fleet["lost"] == stats.fleet["duplicates"] == 0


FAULTS = {
    "500": "answered /inference/v1/generate with 500: no",
    "cut": "IncompleteRead",
    "counts": r"\d log-probs that are not those of its \d tokens",
    "ids": "a token that is not in the vocabulary of",
    "spans": "weight_versions that do not cover",
    "minus": "a log-prob of -9999",
    "ends": "an end at token 3, which is none of",
    "short": r"finish_reason length at \d tokens, and max_tokens was 6: has the server another "
    r"limit",
    "more": "finish_reason length at 7 tokens, and max_tokens was 6",
    "middle": r"the end token 0 at position 0 of \d, and tokens after it",
    "choices": "not enough values to unpack",
    "html": "is not a JSON object: <html>the gateway",
    "endless": "OverflowError",
    "long span": "weight_versions that do not cover",
    "large": "a token id below 0 or beyond",
    "large version": "which are not the run's",
    "nan": "a log-prob that is not a finite number",
    "deep": "is not JSON: RecursionError",
    "hang": "it has made no progress for",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_server_does_wrong_is_named_and_its_groups_come_once(
    fault: str, tmp_path: Path, server: ScriptedServer
):
    notes: list[str] = []
    server.fault, server.times = fault, 1
    with fleet(
        tmp_path, server.url, on_note=notes.append, stall_seconds=3 if fault == "hang" else 60
    ) as source:
        ask(source, 0, 0)
        groups = source.take(Purpose.TRAIN, 0)
        stats = source.read_stats(Purpose.TRAIN)
    assert [group.example.row for group in groups] == [0, 1, 2, 3] and not source.ledger.entries
    assert len(notes) == stats.fleet["lost"] == 1 and re.search(FAULTS[fault], notes[0]), notes
    assert 1 <= stats.fleet["asked_again"] <= 4 and stats.fleet["duplicates"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["JSON metrics", "no counters"])
def test_a_server_whose_counters_cannot_be_read_makes_progress_by_answering(
    fault: str, tmp_path: Path, server: ScriptedServer
):
    notes: list[str] = []
    server.fault, server.seconds = fault, 0.3
    with fleet(tmp_path, server.url, on_note=notes.append, stall_seconds=1) as source:
        ask(source, 0, 0, rows=[0])
        assert len(source.take(Purpose.TRAIN, 0)) == 1
    assert not notes


@pytest.mark.slow
def test_a_server_that_takes_a_completion_back_for_ever_is_lost(
    tmp_path: Path, server: ScriptedServer
):
    notes: list[str] = []
    server.fault, server.times = "aborts", 12 * http_engine.EMPTY_ABORTS
    with fleet(tmp_path, server.url, on_note=notes.append) as source:
        ask(source, 0, 0)
        assert len(source.take(Purpose.TRAIN, 0)) == 4
    assert notes and all(
        f"{http_engine.EMPTY_ABORTS} times in a row with finish_reason abort and no token" in one
        for one in notes
    )


@pytest.mark.slow
def test_an_answer_that_trickles_ends_at_its_deadline(
    tmp_path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, notes: CuringNotes
):
    monkeypatch.setattr(http_engine, "REQUEST_SECONDS", 1.0)
    server.fault = "trickle"
    with fleet(tmp_path, server.url, on_note=notes) as source:
        ask(source, 0, 0, rows=[0])
        assert len(source.take(Purpose.TRAIN, 0)) == 1
    assert len(notes) == 1 and "has not answered /inference/v1/generate in 1 s" in notes[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (
            "raw",
            "the log-probs of tokens that it samples differ from the trainer's by up to 0.4 at "
            "version 0, more than vllm.tolerance=0.001: start it with "
            "--logprobs-mode=processed_logprobs",
        ),
        ("empty probe", "not enough values to unpack"),
        ("no models", "it answered /v1/models with IndexError"),
    ],
)
def test_a_server_is_lost_whose_first_answers_are_wrong(
    fault: str, text: str, tmp_path: Path, server: ScriptedServer, notes: CuringNotes
):
    server.fault = fault
    with fleet(tmp_path, server.url, on_note=notes) as source:
        ask(source, 0, 0)
        assert len(source.take(Purpose.TRAIN, 0)) == 4
    assert len(notes) == 1 and text in notes[0]


@pytest.mark.slow
def test_weights_that_a_server_does_not_see_are_named_with_their_folder(
    tmp_path: Path, server: ScriptedServer, notes: CuringNotes
):
    server.fault = "/collective_rpc"
    with fleet(tmp_path, server.url, on_note=notes) as source:
        ask(source, 0, 0)
        assert len(source.take(Purpose.TRAIN, 0)) == 4
    assert len(notes) == 1
    assert (
        f"its files are in {tmp_path}" in notes[0]
        and "publish.folder under the same path" in notes[0]
    )


def test_a_server_gets_no_group_before_it_has_answered(tmp_path: Path, server: ScriptedServer):
    notes: list[str] = []
    with socket.socket() as taken:
        # never listens: who connects is refused, as behind a cut cable
        taken.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with fleet(tmp_path, away, server.url, on_note=notes.append) as source:
            ask(source, 0, 0, rows=range(8))
            assert len(source.take(Purpose.TRAIN, 0)) == 8
            assert source.read_stats(Purpose.TRAIN).fleet["asked_again"] == 0
    assert not notes


def test_log_probs_are_compared_at_a_step_that_earns_a_restart_back(
    tmp_path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
):
    """A loss that is forgotten is no loss since the step was sampled."""
    monkeypatch.setattr("shoal.rollout.host_health.HEALTHY_STEPS", 1)
    notes: list[str] = []
    with fleet(tmp_path, server.url, on_note=notes.append, logprob_tolerance=3e-3) as source:
        member = next(iter(source.members.values()))
        assert member.restarts is not None
        # one loss before
        member.restarts, member.losses, member.all_losses = (member.restarts - 1, 1, 1)
        ask(source, 0, 0)
        groups = source.take(Purpose.TRAIN, 0)
        assert member.losses == 0
        trained = {(0, 0): groups[0].completions[0].logprobs - 0.1}
        source.check_logprobs(groups, trained, version=0)
        assert len(notes) == 1 and "differ from the trainer's by" in notes[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "is_lost"),
    [
        (lambda sampled: sampled, False),
        (lambda sampled: sampled + 0.0025, False),  # within three times the tolerance
        (lambda sampled: sampled - 0.1, True),  # log-probs that are not the tokens'
        (lambda sampled: np.full_like(sampled, np.nan), False),
    ],
)  # the trainer's own fault, whose update is skipped
def test_a_server_is_lost_whose_tokens_have_other_log_probs(
    change: Callable[[np.ndarray], np.ndarray],
    is_lost: bool,
    tmp_path: Path,
    server: ScriptedServer,
):
    notes: list[str] = []
    with fleet(tmp_path, server.url, on_note=notes.append, logprob_tolerance=3e-3) as source:
        ask(source, 0, 0)
        groups = source.take(Purpose.TRAIN, 0)
        trained = {}
        for number, group in enumerate(groups):
            for index, completion in enumerate(group.completions):
                trained[(number, index)] = change(completion.logprobs)
        source.check_logprobs(groups, trained, version=1)
        assert not notes  # tokens of another version than the trainer's say nothing
        source.check_logprobs(groups, trained, version=0)
        assert len(notes) == is_lost and all("differ from the trainer's by" in one for one in notes)
        source.check_logprobs(groups, trained, version=0)
        assert len(notes) == is_lost  # the host that came after it has sampled none of these
        ask(source, 1, 0)
        assert len(source.take(Purpose.TRAIN, 1)) == 4


@pytest.mark.slow
def test_a_busy_server_is_asked_again_and_not_lost(tmp_path: Path, server: ScriptedServer):
    server.fault, server.times = "429", 3
    with fleet(tmp_path, server.url) as source:
        ask(source, 0, 0)
        assert len(source.take(Purpose.TRAIN, 0)) == 4
        assert source.read_stats(Purpose.TRAIN).fleet["lost"] == 0 and server.times == 0


def test_a_server_that_was_left_paused_goes_on(tmp_path: Path, server: ScriptedServer):
    server.paused = True
    with fleet(tmp_path, server.url) as source:
        ask(source, 0, 0)
        assert len(source.take(Purpose.TRAIN, 0)) == 4 and not server.paused


def test_a_server_whose_weights_do_not_move_is_refused(tmp_path: Path, server: ScriptedServer):
    with fleet(tmp_path, server.url) as source:
        ask(source, 0, 0)
        source.take(Purpose.TRAIN, 0)
        server.fault = "noop"
        source.publish(1, {"w": np.ones(1)})
        ask(source, 1, 1)
        with pytest.raises(
            ShoalError,
            match="refused: it answered reload_weights with 200 and still has the weights "
            "of version 0, not 1",
        ):
            source.take(Purpose.TRAIN, 1)


@pytest.mark.slow
def test_a_server_with_other_weights_than_the_trainers_is_lost(
    tmp_path: Path, server: ScriptedServer, notes: CuringNotes
):
    server.fault = "old"
    with fleet(tmp_path, server.url, on_note=notes) as source:
        ask(source, 0, 0)
        assert len(source.take(Purpose.TRAIN, 0)) == 4
    assert len(notes) == 1 and "differ from the trainer's by up to 2.5 at version 0" in notes[0]


@pytest.mark.parametrize("has_generate", [True, False])
def test_an_adapter_has_a_name_of_its_own_at_each_load(has_generate: bool, tmp_path: Path):
    with (
        closing(ScriptedServer(takes_adapters=True, has_generate=has_generate)) as server,
        fleet(tmp_path, server.url, base=tmp_path) as source,
    ):
        ask(source, 0, 0)
        groups = source.take(Purpose.TRAIN, 0)
        source.publish(1, {"w": np.ones(1)}, keep_from=0)
        for step, version in ((1, 1), (2, 0)):
            ask(source, step, version)
            groups += source.take(Purpose.TRAIN, step)
        assert source.read_stats(Purpose.TRAIN).fleet["lost"] == 0
        names = [body["model"] for body in server.bodies]
        assert (
            list(server.adapters) == names[-1:]
            and len({*names}) == 3
            and names == sorted(names, key=names.index)
        )
    for group, version in zip(groups, [0] * 4 + [1] * 4 + [0] * 4, strict=True):
        for one in group.completions:
            assert {*one.versions} == {version}
    assert (
        server.calls.count("/v1/load_lora_adapter") == 3
        and server.calls.count("/v1/unload_lora_adapter") == 2
    )
    assert not {"/collective_rpc", "/update_weight_version", "/pause"} & {*server.calls}


@pytest.mark.slow
def test_completions_under_way_keep_their_adapter_and_it_is_unloaded_after_them(tmp_path: Path):
    long, settings = SamplingParams(max_tokens=20), SETTINGS._replace(eos_ids=[], longest=24)
    with (
        # A second for a completion: none of the first eight ends before the new weights come.
        closing(ScriptedServer(seconds=0.05, takes_adapters=True)) as server,
        fleet(tmp_path, server.url, settings=settings, base=tmp_path) as source,
    ):
        ask(source, 0, 0, exact=False, params=long)
        deadline = time.monotonic() + 10
        while len(server.bodies) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        source.publish(1, {"w": np.ones(1)}, keep_from=0)
        versions = []
        for group in source.take(Purpose.TRAIN, 0):
            for one in group.completions:
                versions.append({*one.versions})
        # Each was sampled by one adapter to its end. More than eight began with the old one if the
        # new one came late.
        assert versions.count({0}) + versions.count({1}) == 12
        assert versions.count({0}) >= 8 and versions.count({1}) > 0
        assert len(server.adapters) == 2
        source.publish(2, {"w": np.full(1, 2)})
        ask(source, 1, 2)
        source.take(Purpose.TRAIN, 1)
        assert len(server.adapters) == 1


@pytest.mark.parametrize(
    ("takes_adapters", "text"),
    [
        (
            True,
            "refused: it answered load_lora_adapter with 200 and still has the weights of version "
            "0, not 1",
        ),
        (
            False,
            "does not take the adapter (it answered /v1/load_lora_adapter with 500: LoRA is not "
            "enabled. Use --enable-lora to enable LoRA.): start it with --enable-lora, "
            "--max-lora-rank of at least",
        ),
    ],
)
def test_a_server_that_does_not_load_an_adapter_is_refused(
    takes_adapters: bool, text: str, tmp_path: Path
):
    with (
        closing(ScriptedServer(takes_adapters=takes_adapters)) as server,
        fleet(tmp_path, server.url, base=tmp_path) as source,
        pytest.raises(ShoalError, match=re.escape(text)),
    ):
        ask(source, 0, 0)
        source.take(Purpose.TRAIN, 0)
        server.fault = "noop"
        source.publish(1, {"w": np.ones(1)})
        ask(source, 1, 1)
        source.take(Purpose.TRAIN, 1)


LEVEL = {None: "/sleep?level=2", Path("base"): "/sleep?level=1"}


@pytest.mark.parametrize("base", LEVEL)
def test_a_server_on_the_trainers_gpu_sleeps_between_its_completions(
    base: Path | None, tmp_path: Path
):
    changes = (
        "/sleep",
        "/wake_up",
        "/collective_rpc",
        "/v1/load_lora_adapter",
        "/inference/v1/generate",
    )
    load = "/v1/load_lora_adapter" if base else "/collective_rpc"
    with (
        closing(ScriptedServer(takes_adapters=True)) as server,
        fleet(
            tmp_path,
            server.url,
            base=base,
            settings=SETTINGS._replace(sleeps=True),
            shares_memory=True,
        ) as source,
    ):
        source.publish(1, {"w": np.ones(1)}, keep_from=0)
        for step, version in ((0, 0), (1, 0), (2, 1)):
            ask(source, step, version, rows=[step])
            source.take(Purpose.TRAIN, step)
            assert server.is_asleep  # before the trainer has the groups
        ask(source, 3, 1, rows=[0])
        # the caller waits for an evaluation before it learns
        assert not source.is_busy_with(Purpose.TRAIN, 3)
        source.take(Purpose.TRAIN, 3)
        assert source.read_stats(Purpose.TRAIN).fleet["lost"] == 0
    calls = [call for call in server.calls if call.startswith(changes)]
    probe, sample = ["/inference/v1/generate"], ["/inference/v1/generate"] * 3
    check = probe * (1 + len(SETTINGS.beginnings))
    night = [LEVEL[base], "/wake_up?tags=weights", load, "/wake_up?tags=kv_cache", *check, *sample]
    assert calls == [*probe, load, *check, *sample, *night, *night, *night, LEVEL[base]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["/sleep?level=2", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]
)
def test_a_server_that_cannot_sleep_or_wake_is_lost_by_the_name_of_the_call(
    call: str, tmp_path: Path, server: ScriptedServer, notes: CuringNotes
):
    server.fault = call
    with fleet(
        tmp_path,
        server.url,
        settings=SETTINGS._replace(sleeps=True),
        shares_memory=True,
        on_note=notes,
    ) as source:
        for step in range(2):
            ask(source, step, 0)
            assert len(source.take(Purpose.TRAIN, step)) == 4
    assert len(notes) == 1 and f"it answered {call} with 500: no memory; " in notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("has_generate", [True, False])
def test_newer_weights_are_loaded_in_mid_completion_and_every_token_has_its_version(
    has_generate: bool, tmp_path: Path
):
    long = SamplingParams(max_tokens=40)
    settings = SETTINGS._replace(eos_ids=[], longest=44)
    with (
        # 1.2 s a completion: the weights come in its middle also on a machine that is busy
        closing(ScriptedServer(seconds=0.03, has_generate=has_generate)) as server,
        fleet(tmp_path, server.url, settings=settings) as source,
    ):
        ask(source, 0, 0, exact=False, params=long)
        deadline = time.monotonic() + 10
        while len(server.bodies) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        source.publish(1, {"w": np.ones(1)}, keep_from=0)
        groups = source.take(Purpose.TRAIN, 0)
        assert source.read_stats(Purpose.TRAIN).fleet["lost"] == 0
    completions = []
    for group in groups:
        for one in group.completions:
            completions.append(one)
    for one in completions:
        assert len(one) == 40 and list(one.versions) == sorted(one.versions)
    both = [one for one in completions if set(one.versions) == {0, 1}]
    assert len(both) == 8 and {1} in [set(one.versions) for one in completions]
    if has_generate:
        assert len(server.bodies) == 12
    else:  # the tokens that were there are part of the next request, with another seed
        assert server.aborts == 1 and len(server.bodies) == 20
        rest = [body for body in server.bodies if len(body["prompt"]) > 2]
        assert len(rest) == 8 and all(
            len(body["prompt"]) - 2 + body["max_tokens"] == 40 for body in rest
        )
        assert len({body["seed"] for body in server.bodies}) == 20


def test_a_turn_that_is_extended_is_a_new_request_with_all_tokens_so_far(
    tmp_path: Path, server: ScriptedServer
):
    host = HttpHost("one", VllmEngine, lambda version: Server(server.url), SETTINGS, lambda: None)
    found = []
    request = SampleRequest(
        5,
        np.array([1, 2]),
        1,
        NoiseKey(0, "train", 0, 3),
        SamplingParams(max_tokens=24),
        first=2,
        has_turns=True,
    )
    with closing(host):
        host.handle(Load(Folders(tmp_path).write(0, {})))
        host.handle(Submit([request]))

        def next_turn() -> Any:
            deadline = time.monotonic() + 10
            while not (answers := host.poll()) and time.monotonic() < deadline:
                time.sleep(0.01)
            return answers[5][0]

        first = next_turn()
        assert first.waits and first.index == 2 and first.stop_reason is StopReason.EOS
        host.handle(Extend(5, 2, [7, 7]))
        second = next_turn()
        found = [*first.token_ids, 7, 7]
        assert list(second.token_ids[: len(found)]) == found and len(second) > len(found)
        assert list(np.flatnonzero(~second.loss_mask)) == [len(first), len(first) + 1]
        assert server.bodies[1]["token_ids"] == [1, 2, *found]
        assert server.bodies[1]["sampling_params"]["max_tokens"] == 24 - len(found)
        host.handle(End(5, 2))
        while not host.host.idle:
            time.sleep(0.01)


def test_a_server_is_asked_for_no_more_than_the_limit_of_a_turn(
    tmp_path: Path, server: ScriptedServer
):
    """What it then ends by length is a turn; what the completion's own limit ends is over."""
    settings = SETTINGS._replace(eos_ids=[])
    host = HttpHost("one", VllmEngine, lambda version: Server(server.url), settings, lambda: None)
    request = SampleRequest(
        5,
        np.array([1, 2]),
        2,
        NoiseKey(0, "train", 0, 3),
        SamplingParams(max_tokens=12),
        has_turns=True,
        turn_limits=(4, 0),
    )
    with closing(host):
        host.handle(Load(Folders(tmp_path).write(0, {})))
        host.handle(Submit([request]))
        found: dict[int, Any] = {}

        def wait_for(index: int, size: int) -> Any:
            deadline = time.monotonic() + 10
            while (index not in found or len(found[index]) < size) and time.monotonic() < deadline:
                found.update({one.index: one for one in host.poll().get(5, ())})
                time.sleep(0.01)
            return found[index]

        first, whole = wait_for(0, 4), wait_for(1, 12)
        assert (len(first), first.waits, first.stop_reason) == (4, True, StopReason.LENGTH)
        assert (len(whole), whole.waits, whole.stop_reason) == (12, False, StopReason.LENGTH)
        host.handle(Extend(5, 0, [7, 7], 3))
        second = wait_for(0, 9)
        assert (len(second), second.waits, second.stop_reason) == (9, True, StopReason.LENGTH)
        host.handle(Extend(5, 0, [7], 100))
        last = wait_for(0, 12)
        assert (len(last), last.waits, last.stop_reason) == (12, False, StopReason.LENGTH)
        assert (
            last.loss_mask.tolist() == [True] * 4 + [False] * 2 + [True] * 3 + [False] + [True] * 2
        )
        asked = sorted(
            (len(body["token_ids"]), body["sampling_params"]["max_tokens"])
            for body in server.bodies
        )
        assert asked == [(2, 4), (2, 12), (8, 3), (12, 2)]


@pytest.mark.parametrize(
    ("lacks", "text"),
    [
        (
            {"has_weights": False},
            "VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out",
        ),
        (
            {},
            "takes 64 tokens, and a prompt with its completion may have 65: start it with "
            "--max-model-len=65",
        ),
    ],
)
def test_a_server_without_what_is_needed_is_an_error_that_says_what(
    lacks: dict[str, bool], text: str, tmp_path: Path
):
    settings = Settings([1, 2, 3], 1e-3, [0], 65 if not lacks else 16, 8)
    with (
        closing(ScriptedServer(**lacks)) as server,
        fleet(tmp_path, server.url, settings=settings) as source,
    ):
        ask(source, 0, 0)
        with pytest.raises(ShoalError, match=re.escape(text)):
            source.take(Purpose.TRAIN, 0)


@pytest.mark.slow
def test_servers_that_are_killed_and_stopped_cost_no_group(tmp_path: Path):
    """40 steps over two servers; one is killed five times, and stopped once."""
    processes, notes = dict[str, Server](), []

    def start(name: str) -> Server:
        words = [sys.executable, scripted_vllm.__file__]
        processes[name] = Server.start(words, dict(os.environ), tmp_path / f"{name}.log")
        return processes[name]

    with fleet(
        tmp_path, "a", "b", open_server=start, on_note=notes.append, stall_seconds=2.0, restarts=99
    ) as source:
        seen = []
        for step in range(40):
            ask(source, step, step, rows=range(4 * step, 4 * step + 4))
            process = processes["a"].process if step in (3, 11, 19, 23, 27, 35) else None
            with contextlib.suppress(ProcessLookupError):  # it may be on its way to be started anew
                if process is not None:
                    os.kill(process.pid, signal.SIGSTOP if step == 23 else signal.SIGKILL)
            seen += [group.example.row for group in source.take(Purpose.TRAIN, step)]
            source.publish(step + 1, {"w": np.ones(step + 1)})
        lost = source.read_stats(Purpose.TRAIN).fleet["lost"]
    assert seen == list(range(160)) and not source.ledger.entries and lost == len(notes)
    assert any("a is lost: its process has ended (-9)" in note for note in notes)
    assert all(
        re.search(r"is lost: (its process has ended|it has made no progress)", note)
        for note in notes
    ), notes
    for one in processes.values():
        assert one.process is not None and one.process.poll() is not None


@pytest.mark.slow
def test_a_server_that_is_stopped_while_it_loads_is_lost_in_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without `sampler.stall_seconds`: a first compilation may be silent for ten minutes, a server
    may not."""
    assert http_engine.SILENCE_SECONDS == 60.0
    monkeypatch.setattr(http_engine, "SILENCE_SECONDS", 1.0)
    processes, notes = list[Server](), []

    def start(name: str) -> Server:
        processes.append(
            Server.start(
                [sys.executable, scripted_vllm.__file__], dict(os.environ), tmp_path / "log"
            )
        )
        return processes[-1]

    with fleet(tmp_path, "a", open_server=start, on_note=notes.append) as source:
        ask(source, 0, 0)
        source.take(Purpose.TRAIN, 0)
        process = processes[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        source.publish(1, {"w": np.ones(1)})
        ask(source, 1, 1)
        assert len(source.take(Purpose.TRAIN, 1)) == 4
    assert len(processes) == 2 and len(notes) == 1 and "it has made no progress" in notes[0]


def test_a_process_that_ends_at_the_start_is_lost_with_its_last_lines(tmp_path: Path):
    server = Server.start(
        [sys.executable, "-c", "import sys; sys.exit('no vLLM here')"], {}, tmp_path / "log"
    )
    with pytest.raises(
        HostLost, match=r"its process has ended \(1\); .*/log ends with: no vLLM here"
    ):
        server.wait_until_ready(10.0)


@pytest.mark.parametrize("adapter", [None, Adapter(2, 4.0, ("q_proj", "down_proj"))])
def test_a_version_is_a_folder_with_the_trainers_weights(tmp_path: Path, adapter: Adapter | None):
    a = replace(QWEN3, adapter=adapter)
    model, params = Model(a, roles().trainer), random_parameters(a)
    huggingface.save(tmp_path / "source", random_parameters(QWEN3), QWEN3)
    trained, frozen = select(trained_specs(a), params), select(frozen_specs(a), params)
    with closing(
        FolderStore(tmp_path, model, tmp_path / "source", None, lambda whole: np.zeros(3))
    ) as made:
        if frozen is not None:
            made.put_frozen(frozen)
        first, second = (
            made.put(number, jax.tree.map(lambda leaf, add=number: leaf + add, trained))
            for number in (0, 1)
        )
        assert isinstance(first, FolderVersion) and isinstance(second, FolderVersion)
        assert first.checksum != second.checksum and first.read(model).result()() is first
        wanted = adapters.merge(a, params, model.role)
        assert same(huggingface.load(first.folder, QWEN3, model.role), wanted)
        assert same(first.parameters(model), trained)
        # Tied embeddings are apart for vLLM on a CPU, which would not pack its output layer anew.
        stored = read_header(first.folder / "model.safetensors")
        assert (
            QWEN3.tie_embeddings
            and stored["lm_head.weight"].shape == stored["model.embed_tokens.weight"].shape
        )
        config = json.loads((first.folder / "config.json").read_text())
        assert config["tie_word_embeddings"] is False
        made.drop([0])
        assert not first.exists and second.exists
        with pytest.raises(LookupError, match="version 0 is no longer published"):
            first.read(model)
    assert not second.exists and not made.folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.7), SamplingParams(temperature=1.3, top_k=3)]
)
def test_a_probe_has_the_log_probs_of_the_tokens_that_a_server_would_sample(params: SamplingParams):
    model, parameters = Model(PLAINEST, roles().trainer), random_parameters(PLAINEST)
    ids, beginnings, score = trainer_probe(model, 9, params)
    probe = score(parameters)
    assert len(ids) == 8 and beginnings == [2, 4, 6, 8]
    vocabulary = PLAINEST.vocab_size
    assert probe.logprobs.shape == (7,) and probe.next_token.shape == (4, vocabulary)
    positions = np.arange(8)[None]
    hidden, _ = forward(model, parameters, np.array([ids]), positions, CausalRows())
    scaled = (
        np.asarray(logits(model, parameters, hidden))[0, [one - 1 for one in beginnings]]
        / params.temperature
    )
    kept = np.sort(scaled, axis=-1)[:, -params.top_k :] if params.top_k else scaled
    expected = scaled - np.log(np.exp(kept).sum(-1, keepdims=True))
    np.testing.assert_allclose(probe.next_token, expected, atol=2e-6)
    whole = np.asarray(jax.nn.log_softmax(logits(model, parameters, hidden)))[0]
    np.testing.assert_allclose(probe.logprobs, whole[np.arange(7), ids[1:]], atol=2e-6)


@pytest.mark.parametrize("starts", [False, True])
def test_an_adapter_has_the_names_of_the_class_that_servers_load(tmp_path: Path, starts: bool):
    """That of a base for several kinds of input; one that is written here without its files is a
    text model."""
    a = replace(QWEN3, adapter=Adapter(2, 4.0, ("q_proj", "down_proj")))
    model = Model(a, roles().trainer, dtype=np.dtype(np.float32))
    trained = select(trained_specs(a), random_parameters(a))
    (tmp_path / "source").mkdir()
    config = {"model_type": "gemma3"}
    with closing(
        FolderStore(
            tmp_path,
            model,
            tmp_path / "source",
            config,
            lambda whole: np.zeros(3),
            adapters=True,
            starts=starts,
        )
    ) as made:
        version = made.put(3, trained)
        assert isinstance(version, FolderVersion)
        names = read_header(version.folder / peft.WEIGHTS)
        place = "model.layers." if starts else "model.language_model.layers."
        assert names and all(name.startswith(f"base_model.model.{place}") for name in names)
        assert peft.read_adapter(version.folder, QWEN3) == a.adapter
        assert same(peft.load(version.folder, a, model.role, np.float32), trained)


def test_an_adapter_alone_is_a_folder_of_pefts_on_a_base_that_is_written_once(tmp_path: Path):
    a = replace(QWEN3, adapter=Adapter(2, 4.0, ("q_proj", "down_proj")))
    model, params = Model(a, roles().trainer, dtype=np.dtype(np.float32)), random_parameters(a)
    base = random_parameters(QWEN3)
    huggingface.save(tmp_path / "source", base, QWEN3)
    trained, frozen = select(trained_specs(a), params), select(frozen_specs(a), params)
    with closing(
        FolderStore(tmp_path, model, tmp_path / "source", None, lambda whole: np.zeros(3), True)
    ) as made:
        made.put_frozen(frozen)
        version = made.put(3, trained)
        assert (
            isinstance(version, FolderVersion)
            and version.base == made.base
            and made.num_bytes < 1e6
        )
        assert same(peft.load(version.folder, a, model.role, np.float32), trained)
        assert peft.read_adapter(version.folder, QWEN3) == a.adapter
        assert same(huggingface.load(made.base, QWEN3, model.role), without_adapter(a, params))
        words = server_command(
            compose("train", ["sampler.kind=vllm", "vllm.python=python", "vllm.memory=0.4"])[0],
            model,
            version,
        )
        # which a CPU has not
        assert f"--model={made.base}" in words and "--enable-sleep-mode" not in words
        assert {
            "--enable-lora",
            "--max-lora-rank=8",
            "--max-loras=2",
            "--gpu-memory-utilization=0.4",
        } <= {*words}


def test_an_adapter_goes_alone_to_servers_that_take_one():
    given = []
    for takes in (True, False, None):
        given.append(ScriptedServer(takes_adapters=takes))
    taking, off, without = (server.url for server in given)
    adapted = Model(replace(QWEN3, adapter=Adapter(2, 4.0, ("q_proj",))), roles().trainer)
    wide = Model(replace(QWEN3, adapter=Adapter(513, 4.0, ("q_proj",))), roles().trainer)
    for section, model, wanted in (
        (VllmSection(urls=(taking, off)), adapted, True),
        (VllmSection(urls=(taking, without)), adapted, False),
        (VllmSection(urls=(taking,)), Model(QWEN3, roles().trainer), False),
        (VllmSection(python="python"), adapted, True),
        (VllmSection(python="python"), wide, False),
    ):
        assert sends_adapters(section, model) == wanted
    for server in given:
        server.close()


def same(one: Any, other: Any) -> bool:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


def test_the_tokens_that_truncation_kept_come_with_each_token():
    choice = {"sampling_mask": [[3, 5], [1, 2, 4]]}
    assert [one.tolist() for one in read_support(choice, 2, 3)] == [[3, 5, -1], [1, 2, 4]]
    assert read_support({}, 2, 0) == []
    with pytest.raises(ShoalError, match="start it with --return-sampling-mask"):
        read_support({}, 2, 3)
    with pytest.raises(
        ShoalError, match=r"sampling.max_support=2: the server sampled from 3 tokens; raise it"
    ):
        read_support(choice, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("versions", "words"), [("fixed", []), ("newest", ["model.lora.rank=2"])])
def test_one_shoal_samples_for_another(versions: str, words: list[str], workshop: Workshop):
    """A whole run against `shoal serve`, resumed: versions, correction, and log-probs as the
    trainer's."""
    sizes = ("sampling.max_prompt_tokens=64", "sampling.max_completion_tokens=12")
    with serving(f"model={workshop.model}", f"model.template={PLAIN}", *sizes, "batch=8") as served:
        for steps in (2, 3):
            # the second time the weights of an older version are read from the checkpoint
            run = workshop.train(
                f"served-{versions}",
                "sampler.kind=vllm",
                f"vllm.urls=[{served.url}]",
                f"steps={steps}",
                "train.max_staleness=1",
                f"train.versions={versions}",
                "train.pass_k=0",
                *words,
            )
    log, found = (run / "log.txt").read_text(), metrics(run)
    assert (
        "by vLLM, whose numbers are not the trainer's" in log and "warning: sampler host" not in log
    )
    assert "sampler: 1 server of vLLM, 8 completions at once at each" in log
    assert [one["staleness"] for one in found] == [0, 1, 1] or versions == "newest"
    assert found[0]["sampler_gap/logprob_max"] < 2e-5 and all(
        one["fleet/lost"] == 0 for one in found
    )
    assert read_config(run).algorithm.correction == "tis"
