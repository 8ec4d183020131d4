"""Going on with a run: bitwise the unbroken one, wherever it was cut; what is damaged, changed or
in use is named."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small import QWEN3, learner, random_parameters
from tiny_runs import (
    PROGRAMS_OF_TWO,
    Workshop,
    by_path,
    checkpoints,
    groups,
    metrics,
    read_lines,
    trainer,
)

from shoal import cli
from shoal.budget.auto import teacher_architectures
from shoal.chat import template as template_module
from shoal.chat.tokenizer_files import DATE_FILE
from shoal.commands.convert import convert
from shoal.commands.export import export
from shoal.commands.replay import replay
from shoal.commands.train import train, unfinished
from shoal.config.commands import ConvertConfig, ExportConfig, ReplayConfig
from shoal.config.merge import compose
from shoal.config.sections.model import LoraSection, ModelSection, TeacherSection
from shoal.config.stored import Decision, texts_of
from shoal.config.train import Config
from shoal.job import job as job_module
from shoal.job.fingerprint import machine
from shoal.job.interrupt import stop_on_signals
from shoal.job.job import Job
from shoal.job.resume import (
    ResumePlan,
    config_for_resume,
    from_overrides_on_run,
    overrides_for_resume,
    resolve_run,
)
from shoal.job.training import kept_text, open_run
from shoal.model.families import architecture_of
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.report.recorder import Recorder
from shoal.runs.layout import MODEL_FOLDER, find_run
from shoal.runs.lines import JsonlSink
from shoal.runs.metrics import METRICS
from shoal.runs.reader import StoredRun, read_config, read_decisions, read_requested
from shoal.runs.writer import RunWriter
from shoal.sampler.engine import Engine
from shoal.stop import StopRequested
from shoal.trainer.loop import Run
from shoal.trainer.prompts import PassRates
from shoal.trainer.schedule import Schedule
from shoal.trainer.scorers import find_teachers
from shoal.trainer.step import Learner
from shoal.trainer.update import Updater
from shoal.weights import checkpoints as checkpoints_module
from shoal.weights import huggingface
from shoal.weights.checkpoints import DAMAGED_FOLDER, Checkpoints, versions
from shoal.weights.checksum import checksum
from shoal.weights.source import copy_model_files, open_model, resolve_model

CLOCKS = ("time/", "throughput/", "memory/", "publish/", "compilations")
WORDS = (
    "steps=6",
    "checkpoint_period=2",
    "train.evaluate_every=3",
    "checkpoint.keep_last=2",
    "train.pass_k=4",
    "train.quick_questions=3",
)

UNEVALUATED = ("train.evaluate_every=-1", "train.pass_k=0")
"""Greedy answers have rows, and so programs, of their own."""


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.fixture(scope="module")
def whole(workshop) -> Path:
    return workshop.train("whole", *WORDS)


SEVERAL = (
    *WORDS,
    "algorithm.kl_coef=0.1",
    "algorithm.num_epochs=2",
    "algorithm.num_minibatches=2",
    "optimizer.schedule=linear",
)


@pytest.fixture(scope="module")
def several(workshop) -> Path:
    """A run of four updates a step, with a reference."""
    return workshop.train("several", *SEVERAL)


def without_clocks(rows: list[dict]) -> list[dict]:
    result = []
    for row in rows:
        result.append({name: value for name, value in row.items() if not name.startswith(CLOCKS)})
    return result


def assert_equal_ends(a: Path, b: Path) -> None:
    """Metrics (each step once), evaluations, groups and the last checkpoint's checksums."""
    rows = metrics(b)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert without_clocks(rows) == without_clocks(metrics(a))
    assert read_lines(b / "evaluations.jsonl") == read_lines(a / "evaluations.jsonl")
    assert warnings_of_steps(b) == warnings_of_steps(a)
    names = []
    for run in (a, b):
        names.append(sorted(file.name for file in (run / "groups").iterdir()))
    assert names[0] == names[1]
    for name in names[0]:
        assert (a / "groups" / name).read_bytes() == (b / "groups" / name).read_bytes(), name
    assert saved(a, max(checkpoints(a)))["checksums"] == saved(b, max(checkpoints(b)))["checksums"]
    ends = [json.loads((run / "summary.json").read_text()) for run in (a, b)]
    assert ends[0]["before"] == ends[1]["before"] and ends[0]["after"] == ends[1]["after"]


def warnings_of_steps(run: Path) -> list[tuple[int, str, str]]:
    """What a run warned of after its start."""
    result = []
    for event in StoredRun(run).events():
        if event.level == "warning" and event.phase != "start":
            result.append((event.step, event.phase, event.text))
    return result


def saved(run: Path, version: int) -> dict:
    return json.loads((run / "checkpoints" / str(version) / "extra" / "metadata").read_text())


def cut(
    workshop: Workshop, name: str, monkeypatch, place, method: str, call: int, *words: str
) -> Path:
    """A run that dies at the `call`-th call of a method, before or (a name that ends in `+`) after
    it."""
    after, method = method.endswith("+"), method.rstrip("+")
    original, count = getattr(place, method), 0

    def dies(*args, **kwargs):
        nonlocal count
        count += 1
        if count == call and not after:
            raise Killed
        result = original(*args, **kwargs)
        if count == call:
            raise Killed
        return result

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(place, method, dies)
        cli.main(workshop.words(name, *words))
    return workshop.runs / name


@pytest.fixture(scope="module")
def stopped_in(workshop, tmp_path_factory) -> Callable[[int], Path]:
    """What a run leaves that dies in an update: made once, put back for each test."""

    @cache
    def made(update: int) -> tuple[Path, Path]:
        with pytest.MonkeyPatch.context() as patch:
            run = cut(workshop, f"stopped_in_{update}", patch, Updater, "update", update, *WORDS)
        return run, Path(shutil.copytree(run, tmp_path_factory.mktemp("kept") / "run"))

    def put_back(update: int) -> Path:
        run, kept = made(update)
        shutil.rmtree(run)
        return Path(shutil.copytree(kept, run))

    return put_back


@pytest.fixture
def stopped(stopped_in) -> Path:
    return stopped_in(4)


@pytest.mark.parametrize(
    ("place", "method", "call"),
    [
        (Updater, "update+", 4),
        (Checkpoints, "save", 2),
        *(
            pytest.param(*place, marks=pytest.mark.slow)
            for place in (
                (Recorder, "step", 3),
                (Checkpoints, "save+", 2),
                (Checkpoints, "_prune", 3),
                (JsonlSink, "write+", 7),
                (RunWriter, "write_groups", 6),
                (RunWriter, "write_config", 1),
                (Run, "begin", 1),
                (Recorder, "evaluation", 3),
                (RunWriter, "write_summary", 1),
            )
        ),
    ],
)
def test_cut_anywhere_it_ends_as_the_unbroken_run(
    workshop, whole, monkeypatch, place, method, call
):
    name = f"cut_{place.__name__}_{method}_{call}"
    cut(workshop, name, monkeypatch, place, method, call, *WORDS)
    assert_equal_ends(whole, workshop.train(name, *WORDS))


@pytest.mark.slow
def test_cut_twice_and_in_the_middle_of_going_on(workshop, whole, monkeypatch):
    cut(workshop, "twice", monkeypatch, Updater, "update", 4, *WORDS)
    cut(workshop, "twice", monkeypatch, RunWriter, "rewind", 1, *WORDS)
    cut(workshop, "twice", monkeypatch, RunWriter, "rewind+", 1, *WORDS)
    cut(workshop, "twice", monkeypatch, Checkpoints, "save+", 1, *WORDS)
    assert_equal_ends(whole, workshop.train("twice", *WORDS))


@pytest.mark.slow
def test_a_run_of_several_updates_a_step(workshop, several, monkeypatch):
    cut(workshop, "several_cut", monkeypatch, Updater, "update+", 4, *SEVERAL)
    assert_equal_ends(several, workshop.train("several_cut", *SEVERAL))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("train.retire_above=0.1", "batch.prompts_per_step=7", *PROGRAMS_OF_TWO),
        (
            "mesh.fsdp=2",
            "mesh.tensor=2",
            "model.dtype=float16",
            "optimizer.moments=bfloat16",
            "algorithm.num_minibatches=2",
            "steps=4",
            "train.evaluate_every=2",
        ),
        (
            "optimizer.offload=true",
            "model.remat=offload",
            "model.lora.rank=4",
            "algorithm.kl_coef=0.1",
            "algorithm.num_minibatches=2",
        ),
        (
            "sampler.quantise=fp8",
            "train.max_staleness=1",
            "train.pass_k=0",
            "mesh.fsdp=2",
            "mesh.tensor=2",
        ),
    ],
)
def test_other_kinds_of_run(workshop, monkeypatch, words):
    name = words[0].replace("=", "_")
    unbroken = workshop.train(name, *WORDS, *words)
    cut(workshop, f"{name}_cut", monkeypatch, Updater, "update+", 4, *WORDS, *words)
    assert_equal_ends(unbroken, workshop.train(f"{name}_cut", *WORDS, *words))


@pytest.mark.slow
def test_a_resumed_run_may_keep_its_moments_elsewhere(workshop, monkeypatch, capsys):
    unbroken = workshop.train("moments_here", *WORDS)
    cut(workshop, "moments_moved", monkeypatch, Updater, "update+", 4, *WORDS)
    moved = workshop.train("moments_moved", *WORDS, "optimizer.offload=true")
    assert saved(moved, 6)["checksums"] == saved(unbroken, 6)["checksums"]
    assert "optimizer.offload changes from false to true" in capsys.readouterr().out


DATED = (
    "{% for m in messages %}<|im_start|>{{ strftime_now('%d %b %Y') }} {{ m.content }}<|im_end|>{% "
    "endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def test_the_date_of_the_first_start_belongs_to_the_run(workshop, tmp_path, monkeypatch):
    """It stays when the run is resumed on another day, and where the run is the model; a run that
    begins from it has the date of its own start."""

    def on(day: int) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(2026, 1, day, 23, 59, 58, 7, tz)

        for module in (job_module, template_module):
            monkeypatch.setattr(module, "datetime", Clock)

    def prompt(tokenizer) -> str:
        return tokenizer.render([{"role": "user", "content": "2 + 3 = ?"}])

    def job_of(model: Path, template: str = "", resumed: Path | None = None) -> Job:
        words = workshop.words("dated", f"model={model}", f"model.template={template}")
        return Job(compose("train", words[1:])[0], Console(), resumed=resumed)

    on(1)
    run = tmp_path / "run"
    with job_of(workshop.model, DATED) as job:
        started = prompt(job.model_source.tokenizer)
        assert "01 Jan 2026" in started
        on(2)  # midnight passes while it runs
        assert prompt(job.model_source.tokenizer) == started
        copy_model_files(job.model_source, run / MODEL_FOLDER)
    with job_of(workshop.model, DATED, run) as job:
        assert prompt(job.model_source.tokenizer) == started
    # As eval, generate, serve and replay read it.
    assert prompt(open_model(ModelSection(path=str(run / MODEL_FOLDER)), None).tokenizer) == started
    with job_of(run / MODEL_FOLDER) as job:
        assert "02 Jan 2026" in prompt(job.model_source.tokenizer)
    (run / MODEL_FOLDER / DATE_FILE).unlink()  # as a version that kept none wrote the folder
    with job_of(workshop.model, DATED, run) as job:
        assert "02 Jan 2026" in prompt(job.model_source.tokenizer)
        assert "did not store it" in job.findings.at("warning")[0].text


@pytest.mark.slow
def test_weights_published_as_files_resume_from_a_checkpoint(workshop, monkeypatch):
    """Older versions go through the host; whoever samples, the weights are the same."""
    words = (*WORDS, "train.max_staleness=2", "mesh.trainer=1", "mesh.sampler=1", *UNEVALUATED)
    unbroken = workshop.train("lagging_arrays", *words)
    run = cut(
        workshop,
        "lagging_files",
        monkeypatch,
        Updater,
        "update",
        5,
        *words,
        "publish.channel=files",
    )
    assert saved(run, 4)["published"] == [2, 3]
    workshop.train(run.name, *words, "publish.channel=files", "optimizer.offload=true")
    assert saved(run, 6)["checksums"] == saved(unbroken, 6)["checksums"]


@pytest.mark.slow
def test_an_adapter_is_published_and_saved_alone(workshop, monkeypatch):
    """With samplers of their own, frozen weights go to them once, as arrays or files, and into no
    checkpoint; where they are not those of the start, a resumed run is refused."""
    words = (
        *WORDS,
        "model.lora.rank=4",
        "algorithm.kl_coef=0.1",
        "train.max_staleness=2",
        "mesh.trainer=1",
        "mesh.sampler=1",
        *UNEVALUATED,
    )
    unbroken = workshop.train("adapter_arrays", *words)
    run = cut(
        workshop,
        "adapter_files",
        monkeypatch,
        Updater,
        "update",
        5,
        *words,
        "publish.channel=files",
    )
    assert saved(run, 4)["published"] == [2, 3]
    workshop.train(run.name, *words, "publish.channel=files")
    assert saved(run, 6)["checksums"] == saved(unbroken, 6)["checksums"]
    adapter = 4 * sum(array.size for array in adapter_of(unbroken, 6).values())
    for folder in (unbroken, run):
        sent = {row["publish/bytes"] for row in metrics(folder)}
        # after a resume, of 4 versions
        for count in sent:
            assert count % adapter == 0 and count <= 4 * adapter
    before, after = adapter_of(unbroken, 4), adapter_of(unbroken, 6)
    for name in after:
        assert not np.array_equal(before[name], after[name])
    file = workshop.model / "model.safetensors"
    tensors = load_file(file)
    try:
        save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, file, {"format": "pt"})
        config = compose(Config, [f"config_name={run / 'config.yaml'}", "steps=7"])[0]
        with (
            pytest.raises(
                ShoalError,
                match=r"the weights under the adapter \(model.path\) are not those that this "
                r"run was started with .*: restore them",
            ),
            Job(config, Console(), resumed=run) as job,
        ):
            open_run(job)
        spec = resolve_model(ModelSection(path=str(run)))
        with pytest.raises(
            ShoalError, match=r"are not those that this adapter was trained on .*: restore them, or"
        ):
            spec.load(trainer(), np.float32)  # as `shoal eval` does
        spec.load(trainer(), jnp.bfloat16)  # of another type nothing is known
    finally:
        save_file(tensors, file, {"format": "pt"})


@pytest.mark.slow
def test_an_adapter_goes_on_without_the_one_it_began_with_and_keeps_its_base(
    workshop, tmp_path, monkeypatch, capsys
):
    """The base is the checkpoint that it was trained on, though that run has gone on; template and
    settings hold."""
    first = workshop.train("plain_base", "steps=1")
    begun = workshop.train(
        "on_plain", f"model={first}", "model.lora.rank=2", "model.quantise=int8", *UNEVALUATED
    )
    base = checksum(resolve_model(ModelSection(path=str(begun))).read(trainer(), np.float32))
    workshop.train("plain_base", f"resume={first}", "steps=2")
    spec = resolve_model(ModelSection(path=str(begun)))
    assert checksum(spec.read(trainer(), np.float32)) == base and spec.base.endswith(
        "plain_base/checkpoints/1"
    )
    assert replay(ReplayConfig(run=str(begun), step=2, group=0))["identical"] is True
    assert spec.architecture.quantised == "int8"
    again = workshop.train("on_quantised", f"model={begun}", "steps=1", *UNEVALUATED)
    assert (
        read_config(again).model.quantise == "int8"
        and saved(again, 1)["facts"]["base"] == saved(begun, max(versions(begun)))["facts"]["base"]
    )
    export(ExportConfig(source=str(again), to=str(tmp_path / "merged"), merge=True))
    merged = load_file(tmp_path / "merged" / "model.safetensors")[
        "model.layers.0.mlp.up_proj.weight"
    ]
    # merged into the weights as they were before 8 bits
    assert len(np.unique(merged[0])) > 0.9 * len(merged[0])
    export(ExportConfig(source=str(begun), to=str(tmp_path / "adapter")))
    assert "PEFT needs base_model_name_or_path to be a folder or hub id" in " ".join(
        capsys.readouterr().out.split()
    )
    read, other = (
        resolve_model(ModelSection(path=str(tmp_path / "adapter"), template=template))
        for template in ("", "{{ messages[0].content }}?")
    )
    asked = [{"role": "user", "content": "1"}]
    assert (
        read.tokenizer.render(asked)
        == spec.tokenizer.render(asked)
        == "1="
        != other.tokenizer.render(asked)
        == "1?"
    )
    words = ("model.lora.path=" + str(tmp_path / "adapter"), "checkpoint_period=1", *UNEVALUATED)
    cut(workshop, "from_adapter", monkeypatch, Updater, "update", 2, *words)
    shutil.rmtree(tmp_path / "adapter")
    workshop.train("from_adapter", f"resume={workshop.runs / 'from_adapter'}")
    teacher = find_teachers(
        Config(
            teacher=TeacherSection(path=str(begun)),
            model=ModelSection(path=str(workshop.model), lora=LoraSection(rank=4)),
        ),
        spec,
        None,
    )[""]
    assert teacher.architecture.adapter and teacher.architecture.adapter.rank == 2
    assert teacher_architectures(
        Config(
            teacher=TeacherSection(path=str(workshop.model)),
            model=ModelSection(path=str(workshop.model), lora=LoraSection(rank=4), quantise="int8"),
        )
    ) == {"": architecture_of(workshop.model)}


@pytest.mark.slow
def test_kl_is_measured_from_the_policy_at_the_start_however_it_is_stored(
    workshop, tmp_path, monkeypatch, capsys
):
    """Of a run with an adapter, of PEFT's folder on its base, and of the merged model: 0 before the
    first update."""
    begun = workshop.train(
        "with_adapter", "model.lora.rank=2", "optimizer.lr=0.2", "steps=2", *UNEVALUATED
    )
    for name, merge in (("adapter", False), ("merged", True)):
        export(ExportConfig(source=str(begun), to=str(tmp_path / name), merge=merge))
    words = ("algorithm.kl_coef=0.04", "steps=2", "checkpoint_period=1", *UNEVALUATED)
    ways = {
        "run": [f"model={begun}"],
        "merged": [f"model={tmp_path / 'merged'}"],
        "path": [f"model.lora.path={tmp_path / 'adapter'}"],
    }
    runs = {}
    for name, way in ways.items():
        runs[name] = workshop.train(f"kl_{name}", *words, *way)
        assert abs(metrics(runs[name])[0]["kl"]) < 1e-6, name
    assert metrics(runs["run"])[1]["kl"] > 1e-6  # and the reference stays where it was
    assert "the policy with the adapter that the run begins with" in " ".join(
        capsys.readouterr().out.split()
    )
    base = workshop.train("kl_base", *words, *ways["run"], "algorithm.reference=base")
    assert metrics(base)[0]["kl"] > 1e-3
    broken = cut(workshop, "kl_cut", monkeypatch, Updater, "update", 2, *words, *ways["run"])
    workshop.train("kl_cut", *words, *ways["run"])
    assert without_clocks(metrics(broken)) == without_clocks(metrics(runs["run"]))
    assert saved(broken, 2)["facts"]["reference"] == saved(runs["run"], 2)["facts"]["reference"]


@pytest.mark.slow
def test_an_adapter_on_a_maxtext_checkpoint_remembers_its_layout(workshop, tmp_path):
    convert(
        ConvertConfig(
            source=str(workshop.model),
            to=str(tmp_path / "0" / "items"),
            format="maxtext",
            scan_layers=False,
        )
    )
    run = workshop.train(
        "on_maxtext",
        f"model={tmp_path}",
        f"model.tokenizer={workshop.model}",
        "model.scan_layers=false",
        "model.lora.rank=2",
        "steps=1",
        *UNEVALUATED,
    )
    spec = resolve_model(ModelSection(path=str(run)))
    assert checksum(spec.read(trainer(), np.float32)) == checksum(
        huggingface.load(workshop.model, architecture_of(workshop.model), trainer())
    )


def adapter_of(run: Path, version: int) -> dict[str, np.ndarray]:
    a = resolve_model(ModelSection(path=str(run))).architecture
    return by_path(checkpoints_module.load_parameters(run, version, a, trainer()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [Schedule(lag=2), Schedule(weight_sync_interval=3), Schedule(lag=1, weight_sync_interval=2)],
)
def test_groups_asked_for_ahead_are_asked_for_again(workshop, schedule):
    def play(name: str, stop_at: int | None) -> Path:
        config, _ = compose("train", workshop.words(name, *WORDS)[1:])
        with (
            Console() as console,
            Job((plan := resolve_run(config, console)).config, console, resumed=plan.run) as job,
        ):
            run = replace(open_run(job), schedule=schedule)
            if stop_at is None:
                run.train()
                return workshop.runs / name
            run.after_step = lambda step, _: run.stop.request() if step + 1 == stop_at else None
            with pytest.raises(
                KeyboardInterrupt, match=f"after step {stop_at} of 6, which is saved"
            ):
                run.train()
        return workshop.runs / name

    label = f"{schedule.lag}_{schedule.weight_sync_interval}"
    unbroken = play(f"ahead_{label}", None)
    for stop in (4,):
        run = play(f"ahead_{label}_{stop}", stop)
        waiting = [step for step, _ in saved(run, stop)["pending"]]
        assert waiting == [step for step in range(stop, 6) if schedule.version(step) <= stop]
        assert saved(run, stop)["published"] == sorted(
            {schedule.version(step) for step in waiting} - {stop}
        )
        assert_equal_ends(unbroken, play(f"ahead_{label}_{stop}", None))


# ---- damage


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(bytes(data))


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        "half a file",
        *(pytest.param(damage, marks=pytest.mark.slow) for damage in ("a bit", "extra", "state")),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    workshop, whole, stopped_in, capsys, damage
):
    run = stopped_in(6)
    assert versions(run) == [2, 4]
    newest = run / "checkpoints" / "4"
    largest = max(
        (file for file in newest.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    if damage == "a bit":
        flip(largest)
    elif damage == "half a file":
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    else:
        shutil.rmtree(newest / damage)
    capsys.readouterr()
    assert_equal_ends(whole, workshop.train(run.name, *WORDS))
    said = capsys.readouterr().out
    assert "checkpoints/4 is damaged" in said and "resumed from the checkpoint of step 2" in said
    assert (run / DAMAGED_FOLDER / "4").is_dir()


def files(run: Path) -> dict[Path, bytes]:
    result = {}
    for file in run.rglob("*"):
        if file.is_file() and file.name != ".lock":
            result[file] = file.read_bytes()
    return result


@pytest.mark.slow
def test_with_no_whole_checkpoint_nothing_is_touched(workshop, stopped, capsys):
    shutil.rmtree(stopped / "checkpoints" / "2" / "state")
    before = files(stopped)
    error = failed(capsys, workshop.words(stopped.name, *WORDS))
    assert f"no checkpoint of {stopped} is whole" in error and "nothing was changed" in error
    assert files(stopped) == before


@pytest.mark.slow
def test_a_run_whose_checkpoints_were_deleted_is_not_written_over(workshop, stopped_in, capsys):
    """Finished, or under way beyond its first checkpoint. One that ended before it starts again."""
    done = workshop.train("deleted", "steps=2", "train.pass_k=0", "checkpoint_period=1")
    for run in (done, stopped_in(6)):
        shutil.rmtree(run / "checkpoints")
        before = files(run)
        for words in (
            ["train", f"resume={run}", "steps=9"],
            ["train", f"resume={run}", "steps=9", "--dry-run"],
        ):
            error = failed(capsys, words)
            assert "holds no checkpoint to resume from" in error and error.rstrip().endswith(
                "nothing was changed"
            )
        assert files(run) == before
    assert (
        cli.main(["train", f"resume={done}"]) == 0
        and "has made its 2 steps" in capsys.readouterr().out
    )
    assert cli.main(["train", f"resume={done}", "optimizer.lr=0.5"]) == 0
    said = capsys.readouterr().out
    assert "optimizer.lr stays 0.01: the run has made all its steps, so 0.5 has no effect" in said
    assert "changes from" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "fault", "said"),
    [
        (("optimizer.clip_grad_norm=0",), None, "was saved with another model or optimizer"),
        (
            (),
            OSError(5, "Input/output error"),
            "cannot be read now ([Errno 5] Input/output error): nothing was changed",
        ),
        (
            (),
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
            "cannot be read now (RESOURCE_EXHAUSTED",
        ),
    ],
)
def test_what_is_no_damage_touches_nothing(
    workshop, stopped, monkeypatch, capsys, words, fault, said
):
    def fails(*args):
        raise fault

    before = files(stopped)
    with monkeypatch.context() as patch:
        if fault:
            patch.setattr(checkpoints_module, "_reader", fails)
        assert said in failed(capsys, ["train", f"resume={stopped}", *words])
    assert files(stopped) == before


@pytest.mark.slow
def test_no_checkpoint_goes_before_a_newer_one_is_whole(tmp_path):
    """Written in the background, as on accelerators."""
    state = learner(QWEN3).init(random_parameters(QWEN3))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1, in_background=True)
    for version in (1, 2, 3):
        checkpoints.save(version, state, {})
        assert [v for v in versions(tmp_path) if v < version] == (
            [version - 1] if version > 1 else []
        )
    checkpoints.finish()
    assert versions(tmp_path) == [3]
    checkpoints.close()


@pytest.mark.slow
def test_an_evaluation_that_was_not_filed_whole_is_made_again(workshop, whole, monkeypatch):
    # that of version 3
    run = cut(workshop, "half_filed", monkeypatch, RunWriter, "write_groups", 6, *WORDS)

    def fails(self, *args, **kwargs):
        raise ShoalError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "write_evaluation", fails)
        assert cli.main(workshop.words(run.name, *WORDS)) == 2
    assert versions(run) == [2, 3] and not saved(run, 3)["evaluated"]
    assert_equal_ends(whole, workshop.train(run.name, *WORDS))


@pytest.mark.slow
def test_reference_weights_that_changed_are_refused(workshop, monkeypatch, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(workshop.model, model)
    words = (*SEVERAL, f"model={model}")
    run = cut(workshop, "reference", monkeypatch, Updater, "update", 4, *words)
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: value * np.float32(1.5) for name, value in weights.items()},
        model / "model.safetensors",
    )
    error = failed(capsys, workshop.words(run.name, *words))
    assert "the reference weights (model.path or model.lora.path) are not those" in error


@pytest.mark.slow
def test_training_ends_where_everything_is_learnt(workshop, capsys):
    """Every answer passes, so no prompt is left after the first epoch."""
    rewards = workshop.folder / "always.py"
    rewards.write_text("def always(completions, **_):\n    return [1.0] * len(completions)\n")
    words = (
        "steps=30",
        "batch.prompts_per_step=5",
        "train.retire_above=0.9",
        "train.pass_k=0",
        *PROGRAMS_OF_TWO,
    )
    with pytest.MonkeyPatch.context() as patch:

        def add(self, groups):
            return self.counts.update({group.example.row: (4, 4.0) for group in groups})

        patch.setattr(
            PassRates,
            "add",
            add,
        )
        run = workshop.train("learnt", *words, f"reward={rewards}:always")
    summary = json.loads((run / "summary.json").read_text())
    assert (
        (summary["steps"], summary["steps_made"]) == (30, 4)
        and len(metrics(run)) == 4
        and checkpoints(run)[-1] == 4
    )
    text = " ".join(capsys.readouterr().out.split())
    assert "are retired (train.retire_above=0.9), fewer than 5 are left; training ends here" in text
    # it has ended
    assert cli.main(workshop.words("learnt", *words, f"reward={rewards}:always")) == 0
    assert len(metrics(run)) == 4


@pytest.mark.slow
def test_parts_with_other_settings_keep_theirs(workshop, stopped):
    assert cli.main(["train", f"resume={stopped}", "algorithm.std_ddof=0"]) == 0
    ddof = {}
    for name in ("config_0", "config_2", "config"):
        ddof[name] = compose("train", [str(stopped / f"{name}.yaml")])[0].algorithm.std_ddof
    assert ddof == {"config_0": 1, "config_2": 0, "config": 0}
    assert saved(stopped, 6)["config"]["algorithm"]["std_ddof"] == 0


@pytest.mark.slow
def test_evaluations_may_be_requested_of_a_version_that_was_not_published(workshop, monkeypatch):
    words = (
        "steps=4",
        "checkpoint_period=3",
        "train.weight_sync_interval=2",
        "train.evaluate_every=0",
    )
    run = cut(workshop, "sparse", monkeypatch, Updater, "update", 4, *words, "train.pass_k=0")
    assert cli.main(["train", f"resume={run}", "train.evaluate_every=1"]) == 0
    assert [row["step"] for row in read_lines(run / "evaluations.jsonl")] == [0, 3, 4]
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "word", ["batch.group_size=6", "train.weight_sync_interval=3", "train.max_staleness=2"]
)
def test_what_pending_groups_are_sampled_by_may_change(workshop, stopped_in, word):
    run = stopped_in(4)  # the checkpoint of version 2 has a step's groups pending
    assert cli.main(["train", f"resume={run}", word]) == 0
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_setting_that_ends_the_first_step_is_not_kept(workshop, stopped, monkeypatch):
    before = {}
    for file in stopped.glob("config*.yaml"):
        before[file.name] = file.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(Killed):

        def update(*_):
            return (_ for _ in ()).throw(Killed)

        patch.setattr(Updater, "update", update)
        cli.main(["train", f"resume={stopped}", "optimizer.lr=1e-3"])
    assert {file.name: file.read_bytes() for file in stopped.glob("config*.yaml")} == before
    assert cli.main(["train", f"resume={stopped}", "steps=3"]) == 0
    assert [f"{row['lr']:g}" for row in metrics(stopped)] == ["0.01", "0.01", "0.01"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "ended"), [(StopRequested(), "shoal train resume="), (KeyboardInterrupt(), "")]
)
def test_settings_of_a_resumed_run_that_is_stopped_in_its_first_step_are_kept(
    workshop, stopped, monkeypatch, capsys, reason, ended
):
    """The command that then resumes it does not name them."""
    with monkeypatch.context() as patch:

        def update(*_):
            return (_ for _ in ()).throw(reason)

        patch.setattr(Updater, "update", update)
        assert cli.main(["train", f"resume={stopped}", "steps=4"]) == 130
    assert ended in capsys.readouterr().err
    assert cli.main(["train", f"resume={stopped}"]) == 0
    assert [row["step"] for row in metrics(stopped)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_schedule_that_is_stretched_is_said(workshop, capsys):
    workshop.train("stretched", "steps=2", "optimizer.schedule=linear", "train.pass_k=0")
    workshop.train("stretched", "steps=3", "optimizer.schedule=linear", "train.pass_k=0")
    assert "steps changes from 2 to 3: the learning rate" in capsys.readouterr().out


def test_a_full_disk_under_the_metrics_is_one_line(workshop, stopped, capsys):
    (stopped / "metrics.jsonl").unlink()
    (stopped / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.MonkeyPatch.context() as patch:

        def keep(*_):
            return None

        patch.setattr(JsonlSink, "keep", keep)

        def missing_steps(*_):
            return []

        patch.setattr(RunWriter, "missing_steps", missing_steps)
        error = failed(capsys, ["train", f"resume={stopped}"])
    assert error.count("\n") == 1 and "cannot write" in error and "No space left" in error
    RunWriter(stopped).close()  # the lock was let go


def test_a_file_system_without_locks_is_said(workshop, monkeypatch, capsys):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    workshop.train("no_locks", "steps=0", "train.pass_k=0")
    assert "grants no locks (Function not implemented)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_summary_cut_short_is_made_again(workshop):
    run = workshop.train("short_summary", "steps=1", "train.pass_k=0")
    whole = without_seconds(json.loads((run / "summary.json").read_text()))
    (run / "summary.json").write_text("")
    workshop.train("short_summary", "steps=1", "train.pass_k=0")
    assert without_seconds(json.loads((run / "summary.json").read_text())) == whole


def without_seconds(summary: dict) -> dict:
    result = {}
    for name, value in summary.items():
        if "second" not in name and name != "num_compilations":
            result[name] = value
    return result


def test_a_bracket_in_the_path_is_refused_before_anything_is_made(workshop, capsys):
    """Checkpoints are opened by a pattern: [ is one."""
    assert "has a [ in its path" in failed(capsys, workshop.words("h[1]"))
    assert not (workshop.runs / "h[1]").exists()


def test_home_is_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with RunWriter.create("~/runs", "first") as made:
        made.write_config("", "")
        made.remember("~/runs")
    assert (
        made.path
        == tmp_path / "runs" / "first"
        == find_run("last", "~/runs")
        == find_run("~/runs/first")
    )


def test_hidden_leftovers_do_not_make_a_folder_foreign(workshop):
    (workshop.runs / "hidden").mkdir(parents=True)
    (workshop.runs / "hidden" / ".config.yaml.tmp").write_text("seed: ")
    workshop.train("hidden", "steps=0", "train.pass_k=0")


@pytest.mark.slow
def test_a_torn_line_is_taken_back(workshop, whole, stopped_in):
    run = stopped_in(6)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 6, "reward/me')
    (run / "groups" / ".step_000006.parquet.tmp").write_text("{")
    assert_equal_ends(whole, workshop.train(run.name, *WORDS))


# ---- what may change, and what is said


def failed(capsys, words: list[str]) -> str:
    capsys.readouterr()
    assert cli.main(words) == 2
    return capsys.readouterr().err


def test_another_configuration_under_the_same_name_is_refused(workshop, stopped, capsys):
    error = failed(capsys, workshop.words(stopped.name, *WORDS, "optimizer.lr=1e-3", "seed=1"))
    assert (
        "was started with seed=0, optimizer.lr=0.01; given now: seed=1, optimizer.lr=0.001" in error
    )
    assert "or change all but seed with resume=" in error
    error = failed(capsys, workshop.words(stopped.name, *WORDS, "optimizer.lr=1e-3"))
    assert "or change them with resume=" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.path=/nowhere/model"], "there is no model folder /nowhere/model"),
        (["task=custom", "task.path=/nowhere/rows.jsonl"], "/nowhere/rows.jsonl"),
        (["reward=/nowhere/judge.py:f"], "/nowhere/judge.py"),
        (["reward=nobody", "seed=1"], "reward function 'nobody': expected"),
    ],
)
def test_what_is_not_there_is_named_before_the_settings_of_a_run_of_that_name(
    workshop, stopped, capsys, words, said
):
    error = failed(capsys, workshop.words(stopped.name, *WORDS, *words))
    assert said in error and "was started with" not in error


def test_the_type_of_the_samplers_weights_is_a_number_of_the_run(workshop, stopped, capsys):
    error = failed(capsys, workshop.words(stopped.name, *WORDS, "sampler.quantise=int8"))
    assert "was started with sampler.quantise=none; given now: sampler.quantise=int8" in error


DIFFERENT_SAMPLES = (
    "sampler.quantise=int8",
    "train.max_staleness=1",
    "train.weight_sync_interval=2",
    "sampler.kind=vllm vllm.python=python",
)
"""By each of these a sampler's log-probs cease to be the trainer's."""


DECIDED = {
    "algorithm.correction",
    "algorithm.correction_floor",
    "algorithm.aggregation_tokens",
    "train.evaluate_every",
    "train.quick_questions",
    "train.pass_k",
    "train.max_staleness",
    "model.dtype",
    "model.remat",
    "model.router_replay",
    "mesh.sampler_tensor",
    "publish.channel",
    "sampling.evaluation_slots",
    "sampling.prompt_slot_tokens",
}
"""What a run decides, whatever its batch and its data are."""


def begin(base: Path, name: str, *words: str) -> Path:
    """A run as far as its settings: what was requested, and what it decided."""
    config = compose("train", [f"base_output_directory={base}", f"run_name={name}", *words])[0]
    with RunWriter.create(base, name) as made, Job(config, Console()) as job:
        assert job.config
        made.write_config(*texts_of(job.requested, job.decisions))
    return made.path


def go_on(run: Path, *words: str) -> Config:
    """The settings that a resumed run works with."""
    plan = resolve_run(config_for_resume(Config, [f"resume={run}", *words])[0], Console())
    with Job(plan.config, Console(), resumed=plan.run) as job:
        return job.config


@pytest.fixture
def decided(tmp_path) -> Path:
    """A run as far as its settings, which has decided what was left open."""
    return begin(tmp_path, "decided")


def test_another_name_of_a_resumed_run_is_said_to_have_no_effect(decided, capsys):
    """verl would go on in another folder."""
    for name, is_said in (("other", True), ("decided", False)):
        words = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={decided}"]
        config, _ = config_for_resume(Config, [*words, f"trainer.experiment_name={name}"])
        plan = resolve_run(config, Console())
        assert (plan.config.run_name, plan.run) == ("decided", decided)
        said = capsys.readouterr().out
        assert (f"run_name={name} has no effect: the run goes on" in said) == is_said


def test_what_was_requested_and_what_the_run_decided_are_two_files(stopped, decided, tmp_path):
    requested = read_requested(decided)
    assert (requested.batch.micro_tokens, requested.algorithm.correction) == (0, "auto")
    assert read_requested(decided) == compose("train", [str(decided / "config.yaml")])[0]
    decisions = read_decisions(decided)
    assert decisions.keys() == {"batch.micro_tokens", *DECIDED}
    assert decisions["algorithm.correction"] == Decision(
        "none",
        {
            "train.max_staleness": 0,
            "train.weight_sync_interval": 1,
            "sampler.kind": "local",
            "sampler.quantise": "none",
        },
    )
    assert decisions["batch.micro_tokens"].sources["devices of the trainer"] == "1 x cpu"
    assert decisions["model.dtype"] == Decision("float32", {"platform of the trainer": "cpu"})
    sources = {"task.name": "words", "evaluation.temperature": 0.0}
    assert decisions["train.pass_k"] == Decision(8, sources)
    assert decisions["publish.channel"].value == "memory"
    assert decisions["train.max_staleness"] == Decision(0, {"train.weight_sync_interval": 1})
    assert decisions["model.remat"].value == "dots"
    assert decisions["model.remat"].sources["batch.micro_tokens"] > 0
    assert decisions["mesh.sampler_tensor"].value == 1
    assert decisions["mesh.sampler_tensor"].sources["devices of the sampler"] == "1 x cpu"
    config = read_config(decided)
    assert config.batch.micro_tokens == decisions["batch.micro_tokens"].value > 0
    assert (config.model.dtype, config.train.evaluate_every) == ("float32", 10)
    assert config.algorithm.aggregation_tokens == config.sampling.max_completion_tokens
    assert StoredRun(decided).decided_keys == decisions.keys()
    given = {"train.evaluate_every", "train.quick_questions", "train.pass_k"}
    assert read_decisions(stopped).keys() == decisions.keys() - given
    by_device = begin(tmp_path, "by_device", "batch.micro_tokens=640", "batch.prompts_per_device=2")
    assert read_decisions(by_device)["batch.prompts_per_step"].value == 2
    assert read_decisions(by_device).keys() == {"batch.prompts_per_step", *DECIDED}
    assert read_config(by_device).batch.prompts_per_step == 2
    (decided / "decided.yaml").unlink()  # and all is decided anew
    assert read_decisions(decided) == {} and read_config(decided) == requested


@pytest.mark.parametrize("text", ["{", "batch.nothing: {value: 3}", "batch.micro_tokens: 3", "[]"])
def test_a_damaged_file_of_decisions_is_an_error_that_says_what_to_do(decided, text, capsys):
    (decided / "decided.yaml").write_text(text)
    for read in (read_config, lambda run: StoredRun(run).settings()):
        with pytest.raises(ShoalError, match=r"decided\.yaml .*: remove it"):
            read(decided)
    page = StoredRun(decided, lenient=True)
    assert page.settings()["batch.micro_tokens"] == 0 and "decided.yaml" in page.problems
    (decided / "decided.yaml").unlink()
    assert go_on(decided).batch.micro_tokens > 0
    assert "it was given before" not in " ".join(capsys.readouterr().out.split())


def test_settings_of_a_run_are_read_as_they_are(decided):
    path = decided / "config.yaml"
    path.write_text(path.read_text().replace("recipe: ''", "recipe: verl"))
    assert read_requested(decided) == replace(
        compose("train", [])[0],
        recipe="verl",
        run_name="decided",
        base_output_directory=str(decided.parent),
    )
    path.write_text("actor_rollout_ref.actor.optim.lr: 1.0")
    with pytest.raises(ShoalError, match=r"another version of Shoal\? there is no key actor_rollo"):
        read_requested(decided)


@pytest.mark.parametrize("text", ["${HOME}", "a\\${b}", "\\\\${", "a\x85b", "$"])
def test_a_text_with_a_reference_is_stored_as_it_is(tmp_path, text):
    config = replace(Config(), task=replace(Config().task, path=text))
    decision = {"batch.micro_tokens": Decision(64, {"model.path": text})}
    with RunWriter.create(tmp_path, "run") as made:
        made.write_config(*texts_of(config, decision))
    assert read_requested(made.path).task.path == text
    assert read_decisions(made.path) == decision


@pytest.mark.parametrize("words", DIFFERENT_SAMPLES)
def test_the_correction_is_decided_again_where_samples_cease_to_be_the_trainers(
    decided, words, capsys
):
    assert go_on(decided, *words.split()).algorithm.correction == "tis"
    said = " ".join(capsys.readouterr().out.split())
    assert "algorithm.correction changes from none to tis, which the run decides itself: " in said
    key, _, value = words.split()[0].partition("=")
    assert re.search(rf"{key} was \S+, and is {value} now", said)
    from_python = from_overrides_on_run(
        {"resume": str(decided), **dict(word.split("=", 1) for word in words.split())}
    )
    assert from_python[0].algorithm.correction == "auto"


def test_what_is_set_by_hand_is_not_decided_again(decided, tmp_path, capsys):
    words = ["sampler.quantise=int8", "algorithm.correction=none"]
    assert go_on(decided, *words).algorithm.correction == "none"
    run = begin(tmp_path, "set", "algorithm.correction=none")
    assert go_on(run, "sampler.quantise=int8").algorithm.correction == "none"
    assert "correction changes" not in capsys.readouterr().out


def test_what_was_set_by_hand_is_decided_anew_where_it_is_left_open(tmp_path, capsys):
    words = ["algorithm.correction=none", "train.max_staleness=2", "batch.micro_tokens=640"]
    run = begin(tmp_path, "set", *words)
    config = go_on(run, "algorithm.correction=auto", "batch.micro_tokens=0")
    said = " ".join(capsys.readouterr().out.split())
    assert config.algorithm.correction == "tis" and config.batch.micro_tokens not in (0, 640)
    for change in (
        "algorithm.correction changes from none to tis",
        "micro_tokens changes from 640",
    ):
        assert change in said
    assert "which the run decides itself: it was given before, and is left open now" in said
    config = go_on(run)
    assert (config.algorithm.correction, config.batch.micro_tokens) == ("none", 640)


def test_a_run_goes_on_as_it_decided_while_what_it_followed_from_is_the_same(decided, capsys):
    decisions = read_decisions(decided)
    before = decisions["batch.micro_tokens"]
    decisions["batch.micro_tokens"] = replace(before, value=640)  # of another version
    with RunWriter(decided) as folder:
        folder.write_config(*texts_of(read_requested(decided), decisions))
    for words in (["steps=50"], ["reward.workers=0"], ["optimizer.lr=1e-5"]):
        assert go_on(decided, *words).batch.micro_tokens == 640
    assert "micro_tokens changes" not in capsys.readouterr().out
    config = go_on(decided, "sampling.max_completion_tokens=200")
    assert config.batch.micro_tokens not in (0, 640)
    said = " ".join(capsys.readouterr().out.split())
    assert "batch.micro_tokens changes from 640 to" in said
    assert "sampling.max_completion_tokens was 64, and is 200 now" in said


def with_decision(run: Path, key: str, value: object) -> None:
    """Puts another value in place of a decision of the run, as if another version had taken it."""
    decisions = read_decisions(run)
    decisions[key] = replace(decisions[key], value=value)
    with RunWriter(run) as folder:
        folder.write_config(*texts_of(read_requested(run), decisions))


def test_rematerialisation_is_kept_until_its_sources_change(decided, capsys):
    with_decision(decided, "model.remat", "full")
    assert go_on(decided, "steps=50", "optimizer.lr=1e-5").model.remat == "full"
    assert "model.remat changes" not in capsys.readouterr().out
    assert go_on(decided, "batch.micro_tokens=1024").model.remat == "dots"
    said = " ".join(capsys.readouterr().out.split())
    assert "model.remat changes from full to dots, which the run decides itself: " in said
    assert re.search(r"batch\.micro_tokens was \d+, and is 1024 now", said)
    assert go_on(decided, "model.remat=attention").model.remat == "attention"


def test_replicas_of_the_sampler_are_kept_until_their_sources_change(tmp_path, capsys):
    run = begin(tmp_path, "two", "mesh.fsdp=2")
    with_decision(run, "mesh.sampler_tensor", 2)
    plan = resolve_run(config_for_resume(Config, [f"resume={run}"])[0], Console())
    with Job(plan.config, Console(), resumed=plan.run) as job:
        assert job.roles.sampler.tensor == job.config.mesh.sampler_tensor == 2
        assert job.advised_config.mesh.sampler_tensor == 0  # advice tries the key as it is open
        assert job.advised_config.model.remat == "auto" != job.config.model.remat
    assert "mesh.sampler_tensor changes" not in capsys.readouterr().out
    assert go_on(run, "mesh.fsdp=1").mesh.sampler_tensor == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "mesh.sampler_tensor changes from 2 to 1" in said
    assert "mesh.fsdp was 2, and is 1 now" in said


def test_staleness_follows_the_interval_of_a_resumed_run(decided, capsys):
    assert go_on(decided, "train.weight_sync_interval=3").train.max_staleness == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "train.max_staleness changes from 0 to 2" in said


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-3), ("auto", 1e-3), ("bfloat16", 0.1)]
)
def test_the_tolerance_of_servers_is_decided_by_the_type_of_the_computation(
    tmp_path, dtype, tolerance
):
    vllm = DIFFERENT_SAMPLES[-1].split()
    run = begin(tmp_path, "vllm", *vllm, f"model.dtype={dtype}")
    decisions = read_decisions(run)
    assert decisions["vllm.tolerance"].value == tolerance
    assert "mesh.sampler_tensor" not in decisions  # servers split a model themselves
    assert read_config(run).vllm.tolerance == tolerance


def test_workers_of_ray_have_all_their_devices_in_a_replica(tmp_path):
    words = ["sampler.kind=ray", "sampler.devices_per_worker=4"]
    config = compose("train", [f"base_output_directory={tmp_path}", *words])[0]
    with Job(config, Console()) as job:
        job.opened["cluster"] = None  # as if it had no room for the trainer
        assert job.config.mesh.sampler_tensor == 4
        assert job.roles.sampler.tensor == 1


def test_the_form_of_tool_calls_is_decided_once(tmp_path):
    words = [f"base_output_directory={tmp_path}", "model.path=tiny-tools", "task=calculator"]
    with Job(compose("train", words)[0], Console()) as job:
        assert job.turn_formats
        decision = job.decisions["environment.call_format"]
        assert decision.value == job.turn_formats.section.call_format == "hermes"
        assert decision.sources["task.name"] == "calculator"
    with Job(compose("train", [*words, "environment.call_format=xml"])[0], Console()) as job:
        assert job.turn_formats
        assert "environment.call_format" not in job.decisions
        assert job.turn_formats.section.call_format == "xml"


def test_vllm_in_place_of_this_process_is_no_free_change(decided, tmp_path, capsys):
    words = [f"base_output_directory={tmp_path}", "run_name=decided"]
    vllm = DIFFERENT_SAMPLES[-1].split()
    error = failed(capsys, ["train", *words, *vllm, "--dry-run"])
    assert (
        "was started with sampler.kind=local, " in error
        and "given now: sampler.kind=vllm, " in error
    )
    resolve_run(compose("train", [*words, "sampler.kind=ray"])[0], Console())
    assert (
        "sampler.kind changes from local to ray, for later resumes too: from now on numbers may "
        "differ in their last bits" in " ".join(capsys.readouterr().out.split())
    )


@pytest.mark.slow
def test_resume_takes_the_stored_configuration_and_says_what_changes(workshop, stopped, capsys):
    assert (
        cli.main(
            ["train", f"resume={stopped}", "steps=3", "optimizer.lr=1e-3", "report.groups=false"]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "optimizer.lr changes from 0.01 to 0.001" in said and "report.groups changes" not in said
    assert [f"{row['lr']:g}" for row in metrics(stopped)] == ["0.01", "0.01", "0.001"]
    stored = (stopped / "config.yaml").read_text()
    assert (
        "steps: 3\n" in stored
        and f"run_name: {stopped.name}\n" in stored
        and "resume: ''\n" in stored
    )


@pytest.fixture
def begun(tmp_path) -> Path:
    """A run as far as its configuration, which stands no flag that the defaults would."""
    with RunWriter.create(tmp_path, "begun") as made:
        words = [
            "sampling.max_prompt_tokens=100",
            f"base_output_directory={tmp_path}",
            "run_name=begun",
        ]
        made.write_config(compose("train", words)[1].text, "")
        made.remember(tmp_path)
    return made.path


@pytest.mark.parametrize(
    "words",
    [
        ["resume=RUN"],
        ["resume=last", "base_output_directory=BASE"],
        ["gsm8k.yml", "resume=last", "output_dir=BASE"],
        ["FILE"],
        ["FILE", "resume=RUN"],
        ["--resume_from_checkpoint", "True", "base_output_directory=BASE"],
        ["--resume_from_checkpoint", "RUN"],
        ["--resume_from_checkpoint=RUN/checkpoints/20"],
    ],
)
def test_a_job_is_composed_once_on_its_run(begun, tmp_path, monkeypatch, capsys, words):
    file = tmp_path / "mine.yaml"
    file.write_text(f"resume: last\noutput_dir: {tmp_path}\nsampling: {{max_prompt_tokens: 300}}\n")
    (begun / "checkpoints" / "20").mkdir(parents=True)
    for name, path in (("RUN", begun), ("BASE", tmp_path), ("FILE", file)):
        words = [word.replace(name, str(path)) for word in words]
    config, resolved = config_for_resume(Config, [*words, "max_target_length=150"])
    assert (config.resume, config.sampling.max_prompt_tokens) == (str(begun), 100)
    assert (config.sampling.max_completion_tokens, config.task.name, config.run_name) == (
        50,
        "words",
        "begun",
    )
    became = "max_target_length=150 became sampling.max_completion_tokens=50"
    assert sum(line.startswith(became) for line in resolved.became) == 1
    assert resolve_run(config, Console()) == ResumePlan(replace(config, resume=""), begun)
    assert "sampling.max_completion_tokens changes from 64 to 50" in capsys.readouterr().out


def test_a_run_of_verls_words_is_resumed_from_its_path(begun):
    (begun / "checkpoints" / "20").mkdir(parents=True)
    path = f"trainer.resume_from_path={begun}/checkpoints/20"
    config, _ = config_for_resume(Config, ["trainer.resume_mode=resume_path", path])
    assert (config.resume, config.sampling.max_prompt_tokens) == (str(begun), 100)
    assert config_for_resume(Config, [path])[0].resume == ""  # as verl, whose mode is auto


def test_a_new_run_says_where_an_unfinished_one_of_its_settings_is(
    stopped, tmp_path, monkeypatch, capsys
):
    left = Path(shutil.copytree(stopped, tmp_path / "left"))
    (tmp_path / "last").write_text("left")
    config = replace(read_config(left), run_name="", base_output_directory=str(tmp_path))
    # as a command that leaves it to the run
    config = replace(config, batch=replace(config.batch, micro_tokens=0))
    assert unfinished(config) is None  # this process holds it
    (left / ".lock").write_text(f"process 999999999 on {socket.gethostname()}\n")
    assert unfinished(config) == left and unfinished(replace(config, seed=5)) is None

    def Job(*_, **__):
        return {}["no job"]

    monkeypatch.setattr("shoal.commands.train.Job", Job)
    with pytest.raises(KeyError):
        train(config)
    assert (
        f"an unfinished run with these settings is in {left}: resume={left} continues it"
        in " ".join(capsys.readouterr().out.split())
    )
    (left / "summary.json").write_text("{}")
    assert unfinished(config) is None
    (left / "summary.json").unlink()
    shutil.rmtree(left / "checkpoints")
    assert unfinished(config) is None


@pytest.mark.parametrize("flag", ["resume", "resume_from_checkpoint"])
@pytest.mark.parametrize(("step", "weights"), [("checkpoints/20", "20"), ("checkpoint-28", "STEP")])
def test_a_checkpoint_that_is_not_the_newest_is_not_resumed_from(begun, flag, step, weights):
    for number in (20, 40):
        (begun / "checkpoints" / str(number)).mkdir(parents=True)
    with pytest.raises(
        ShoalError,
        match=rf"{flag}={begun}/{step}: .*checkpoints of steps 20, 40, .* newest one, "
        rf"resume={begun}. `shoal train {begun}/config.yaml model={begun}/checkpoints/{weights} ",
    ):
        config_for_resume(Config, [f"{flag}={begun}/{step}"])
    for newest in ("checkpoints/40", "checkpoint-40", "checkpoints"):
        config, _ = config_for_resume(Config, [f"{flag}={begun}/{newest}"])
        assert config.resume == str(begun)


def test_last_is_a_run_also_within_a_run(begun, monkeypatch):
    monkeypatch.chdir(begun)
    with pytest.raises(ShoalError, match="no run was started"):
        config_for_resume(Config, ["resume=last"])
    with pytest.raises(ShoalError, match="there is no such folder"):
        config_for_resume(Config, ["resume=other"])


@pytest.mark.slow
def test_both_ways_back_to_an_earlier_checkpoint(workshop, tmp_path, capsys):
    """The command of the error begins a new run; a copy without what came later goes on exactly."""
    words = ("steps=3", "checkpoint_period=1", "checkpoint.keep_last=0", *UNEVALUATED)
    run = workshop.train("there", *words)
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    error = failed(capsys, ["train", f"resume={run}/checkpoints/1"])
    command = error.split("`")[1].replace("NEW", "and_back").split()
    assert cli.main(command[1:]) == 0
    new = workshop.runs / "and_back"
    assert f"model: {run}/checkpoints/1 " in (new / "log.txt").read_text()
    assert read_config(new).steps == 3 and checkpoints(new) == [1, 2, 3]
    for step in (2, 3):
        shutil.rmtree(copy / "checkpoints" / str(step))
    (copy / "summary.json").unlink()
    capsys.readouterr()
    assert cli.main(["train", f"resume={copy}"]) == 0
    assert "resumed from the checkpoint of step 1" in capsys.readouterr().out
    assert_equal_ends(run, copy)


def test_a_run_is_resumed_from_python_by_another_systems_flag(begun):
    overrides, run = overrides_for_resume({"resume_from_checkpoint": str(begun), "steps": 9})
    assert overrides["resume"] == str(begun) == str(run)
    overrides, run = overrides_for_resume({"num_generations": 4, "resume_from_checkpoint": False})
    assert overrides["resume_from_checkpoint"] is False and run is None


def test_a_job_that_names_no_run_is_composed_as_ever(begun, tmp_path):
    assert config_for_resume(Config, ["resume_from_checkpoint=False"])[0] == compose(Config, [])[0]
    for words in ([], ["gsm8k.yml", "steps=3"], ["resume=", f"base_output_directory={tmp_path}"]):
        assert config_for_resume(Config, words) == compose(Config, words)


@pytest.mark.parametrize("words", ["resume=last", "run_name=begun sampling.max_prompt_tokens=100"])
def test_a_run_goes_on_on_another_mesh(begun, tmp_path, capsys, words):
    config, _ = config_for_resume(
        Config,
        [*words.split(), f"base_output_directory={tmp_path}", "mesh.fsdp=4", "mesh.trainer=4"],
    )
    plan = resolve_run(config, Console())
    assert (plan.run, plan.config.mesh.fsdp, plan.config.run_name) == (begun, 4, "begun")
    said = capsys.readouterr().out
    assert (
        "mesh.trainer changes from '' to 4, for later resumes too: from now on numbers may differ "
        "in their" in said
    )


@pytest.mark.slow
def test_a_dry_run_refuses_what_the_run_it_names_would_refuse(begun, tmp_path, capsys):
    words = [
        f"base_output_directory={tmp_path}",
        "run_name=begun",
        "sampling.max_prompt_tokens=100",
    ]
    error = failed(
        capsys, ["train", *words, "seed=1", "optimizer.lr=1e-3", "mesh.fsdp=4", "--dry-run"]
    )
    assert "given now: seed=1, optimizer.lr=0.001. Choose" in error
    assert failed(capsys, ["train", *words, "seed=1", "optimizer.lr=1e-3", "mesh.fsdp=4"]) == error
    assert cli.main(["train", *words, "mesh.fsdp=4", "--dry-run"]) == 0
    assert "# warning: configuration: mesh.fsdp changes from 1 to 4" in capsys.readouterr().out


def test_what_cannot_change(workshop, stopped, capsys):
    error = failed(capsys, ["train", f"resume={stopped}", "seed=3"])
    assert "seed was 0 and cannot become 3" in error and f"model={stopped}" in error
    assert "has made 2 already" in failed(capsys, ["train", f"resume={stopped}", "steps=1"])


@pytest.mark.parametrize("adapter", [True, False])
def test_the_type_of_the_base_under_an_adapter_cannot_change(tmp_path, adapter):
    words = ["model.dtype=float32", f"model.lora.rank={4 if adapter else 0}"]
    place = [f"base_output_directory={tmp_path}", "run_name=typed"]
    with RunWriter.create(tmp_path, "typed") as made:
        made.write_config(compose("train", [*place, *words])[1].text, "")
    again = compose("train", [*place, *words, "model.dtype=bfloat16"])[0]
    with pytest.raises(ShoalError, match=r"given now: model\.dtype=bfloat16") as refused:
        resolve_run(again, Console())
    assert ("with resume=" in str(refused.value)) is not adapter
    resumed = config_for_resume(Config, [f"resume={made.path}", "model.dtype=bfloat16"])[0]
    if adapter:
        with pytest.raises(ShoalError, match=r"cannot become 'bfloat16', because the adapter"):
            resolve_run(resumed, Console())
    else:
        assert resolve_run(resumed, Console()).config.model.dtype == "bfloat16"


def test_fewer_steps_than_were_made_are_refused_before_anything_is_loaded(begun):
    (begun / "checkpoints/3").mkdir(parents=True)
    config, _ = config_for_resume(Config, [f"resume={begun}", "steps=2"])
    with pytest.raises(ShoalError, match=r"steps=2: the run .* has made 3 already"):
        resolve_run(config, Console())


@pytest.mark.slow
def test_more_steps_go_on_from_the_end(workshop, whole, capsys):
    run = workshop.train("longer", *WORDS, "steps=4", "train.evaluate_every=0")
    assert metrics(run) == read_lines(
        workshop.train("longer", *WORDS, "steps=4", "train.evaluate_every=0") / "metrics.jsonl"
    )
    assert "has made its 4 steps already" in capsys.readouterr().out
    workshop.train("longer", *WORDS, "train.evaluate_every=0")
    assert without_clocks(metrics(run)) == without_clocks(metrics(whole)) and checkpoints(run) == [
        4,
        6,
    ]


@pytest.mark.slow
def test_the_last_evaluation_of_a_run_that_gets_more_steps_is_kept(workshop, monkeypatch):
    words = ("train.evaluate_every=5", "train.quick_questions=3")
    run = workshop.train("extended", *words, "steps=2")
    before = read_lines(run / "evaluations.jsonl")
    answers = run / "groups" / "evaluate_held_out_000002.parquet"
    bytes_before = answers.read_bytes()
    assert [line["step"] for line in before] == [0, 2]
    # Killed before the next checkpoint, so that the run is resumed from version 2 twice.
    cut(workshop, run.name, monkeypatch, Updater, "update", 1, *words, "steps=3")
    workshop.train(run.name, *words, "steps=3")
    after = read_lines(run / "evaluations.jsonl")
    assert after[:2] == before and [line["step"] for line in after] == [0, 2, 3]
    assert answers.read_bytes() == bytes_before
    # Now an evaluation of version 3 is due, with fewer questions: it replaces the last one.
    workshop.train(run.name, "train.evaluate_every=3", "train.quick_questions=3", "steps=4")
    lines = read_lines(run / "evaluations.jsonl")
    assert [line["step"] for line in lines] == [0, 2, 3, 4]
    assert lines[2]["num_questions"] == 3 < after[2]["num_questions"]


@pytest.mark.slow
def test_the_model_need_not_be_there_any_more(workshop, whole, monkeypatch, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(workshop.model, model)
    words = (*WORDS, f"model={model}")
    cut(workshop, "moved", monkeypatch, Updater, "update", 4, *words)
    shutil.rmtree(model)
    assert_equal_ends(whole, workshop.train("moved", *words))


@pytest.mark.slow
def test_last_is_the_run_started_last(workshop, whole, monkeypatch, capsys):
    stopped = cut(workshop, "last_of_all", monkeypatch, Updater, "update", 4, *WORDS)
    base = f"base_output_directory={workshop.runs}"
    assert find_run("last", workshop.runs) == stopped
    assert cli.main(["train", "resume=last", base]) == 0
    assert_equal_ends(whole, stopped)
    assert "no run was started" in failed(
        capsys, ["train", "resume=last", "base_output_directory=/nowhere"]
    )
    assert "not a run folder" in failed(capsys, ["train", f"resume={workshop.folder}"])


def test_other_data_is_refused(workshop, stopped, capsys):
    text = workshop.data.read_text()
    try:
        workshop.data.write_text(text.replace("17", "18"))
        assert "the training data is not what this run was started with" in failed(
            capsys, ["train", f"resume={stopped}"]
        )
    finally:
        workshop.data.write_text(text)


def test_evaluations_are_turned_off_and_on_again(workshop, stopped):
    """The evaluation sets belong to the data, whether the run evaluates or not."""
    resume = ("train", f"resume={stopped}")
    assert cli.main([*resume, "steps=3", "train.evaluate_every=-1"]) == 0
    assert cli.main([*resume, "steps=4", "train.evaluate_every=4"]) == 0
    evaluated = [line["step"] for line in read_lines(stopped / "evaluations.jsonl")]
    assert evaluated[0] == 0 and set(evaluated) == {0, 4}


@pytest.mark.slow
def test_evaluation_sets_count_once_the_run_evaluates(workshop, tmp_path, capsys):
    questions = tmp_path / "questions.jsonl"
    text = workshop.data.with_name("gsm8k_test.jsonl").read_text()
    questions.write_text(text)
    run = workshop.train("quiet", "steps=1", f"task.eval_split={questions}", *UNEVALUATED)
    resume = ["train", f"resume={run}"]
    questions.write_text(text.replace("58", "59"))
    capsys.readouterr()
    assert cli.main([*resume, "steps=2"]) == 0
    note = "the evaluation sets are not those that this run was started with: it goes on"
    assert note in " ".join(capsys.readouterr().out.split())
    assert cli.main([*resume, "steps=3", "train.evaluate_every=0"]) == 0  # its first evaluation
    assert note in " ".join(capsys.readouterr().out.split())
    assert [line["step"] for line in read_lines(run / "evaluations.jsonl")] == [3]
    questions.write_text(text)
    error = failed(capsys, [*resume, "steps=4"])
    assert "the evaluation sets are not those that this run was started with (" in error
    # The sets of the evaluation stay those of the run while it makes none.
    assert cli.main([*resume, "steps=4", "train.evaluate_every=-1"]) == 0
    assert "the evaluation sets" in failed(capsys, [*resume, "steps=5", "train.evaluate_every=0"])


@pytest.mark.slow
def test_another_machine_and_another_reward_are_said(workshop, stopped, capsys):
    file = stopped / "checkpoints" / "2" / "extra" / "metadata"
    extra = json.loads(file.read_text())
    assert extra["facts"]["machine"] == machine()
    extra["facts"]["machine"] |= {"threads": "96", "jax": "0.9.9"}
    extra["facts"]["rewards"]["letters"] = "0" * 16
    file.write_text(json.dumps(extra))
    assert cli.main(["train", f"resume={stopped}"]) == 0
    said = capsys.readouterr().out
    for line in ("it was 96 when", "jax is ", "it was 0.9.9 when", "the file of letters, or one"):
        assert line in said


@pytest.mark.slow
def test_a_reward_that_fails_loses_no_step(workshop, capsys):
    words = workshop.words(
        "tired", f"reward={workshop.rewards}:raises_later", "steps=3", "checkpoint_period=0"
    )
    assert "tired" in failed(capsys, words)
    run = workshop.runs / "tired"
    assert (
        checkpoints(run) == [1] and saved(run, 1)["pending"][0][0] == 1 and says_what_is_next(run)
    )
    text = workshop.rewards.read_text()
    try:
        workshop.rewards.write_text(text.replace('raise ValueError("tired")', "pass"))
        assert cli.main(words) == 0
    finally:
        workshop.rewards.write_text(text)
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]


@pytest.mark.slow
def test_a_reward_that_fails_in_an_evaluation_loses_no_step(workshop, whole, tmp_path, capsys):
    """What it fails on is seen in the evaluation after step 3; then its file is mended."""
    rewards = tmp_path / "rewards.py"
    good = workshop.rewards.read_text()
    rewards.write_text(
        good.replace(
            "def letters(completions, **kwargs):",
            "def letters(completions, trainer_state, "
            "**kwargs):\n    assert trainer_state.global_step != 3, 'tired'",
        )
    )
    words = (*WORDS, f"reward={rewards}:letters")
    error = failed(capsys, workshop.words("tired_evaluation", *words))
    run = workshop.runs / "tired_evaluation"
    assert (run / "log.txt").read_text().splitlines()[-1].startswith("error: ")
    assert (
        "tired" in error
        and checkpoints(run) == [2, 3]
        and [row["step"] for row in metrics(run)] == [1, 2, 3]
    )
    rewards.write_text(good)
    assert_equal_ends(whole, workshop.train(run.name, *words))


def test_a_fault_of_the_program_is_the_last_line_of_the_log(workshop, monkeypatch):
    def fail(*_):
        raise RuntimeError("odd\nshape")

    monkeypatch.setattr(Recorder, "begin_training", fail)
    with pytest.raises(RuntimeError):
        cli.main(workshop.words("faulty", "steps=1"))
    assert (
        (workshop.runs / "faulty" / "log.txt")
        .read_text()
        .endswith("\nerror: RuntimeError: odd shape\n")
    )


@pytest.mark.slow
def test_means_of_two_rewards_are_not_compared(workshop):
    run = workshop.train("rewarded_otherwise", "steps=1")
    assert cli.main(["train", f"resume={run}", "steps=2", "reward.weights=[0.5]"]) == 0
    table = (run / "log.txt").read_text().rpartition("== before and after")[2].splitlines()
    (rewards,) = [line for line in table if "mean reward" in line]
    assert "(another reward since step 1)" in rewards and not re.search(r"[+-]\d", rewards)
    assert any("accuracy" in line and line.endswith("points") for line in table)


def test_evaluations_between_the_ends_ask_fewer_questions(whole):
    rows = read_lines(whole / "evaluations.jsonl")
    assert [
        (row["step"], row["num_questions"], row.get("sampled_num_questions")) for row in rows
    ] == [(0, 4, 3), (3, 3, None), (6, 4, 3)]
    assert (
        "held_out accuracy by step (3 questions, 4 at both ends): 0: "
        in (whole / "log.txt").read_text()
    )


def says_what_is_next(run: Path) -> bool:
    """True if the run's last lines say where it is, what shows it and what exports its weights."""
    lines = (run / "log.txt").read_text().splitlines()
    return any(
        line.startswith(f"the run is in {run}: `shoal view {run}`") for line in lines[-3:]
    ) and any(line.startswith(f"`shoal export from={run} to=FOLDER`") for line in lines[-3:])


def test_pass_rates_are_filed(workshop, whole):
    record = read_lines(whole / "pass_rates.jsonl")
    rows = []
    for step in range(1, 7):
        for group in groups(whole, step):
            rows.append(group["row"])
    assert [entry["row"] for entry in record] == sorted(set(rows))
    assert [entry["drawn"] for entry in record] == [
        4 * rows.count(entry["row"]) for entry in record
    ]
    assert not any(entry["retired"] for entry in record)


@pytest.mark.slow
def test_the_best_are_kept_beside_the_newest(workshop):
    run = workshop.train(
        "best",
        "steps=7",
        "checkpoint_period=1",
        "train.evaluate_every=2",
        "checkpoint.keep_last=1",
        "checkpoint.keep_best=1",
        "train.pass_k=0",
        f"reward={workshop.rewards}:letters",
    )
    scores = {}
    for row in read_lines(run / "evaluations.jsonl"):
        scores[row["step"]] = row["accuracy"]
    best = max((step for step in (2, 4, 6)), key=lambda step: (scores[step], step))
    assert checkpoints(run) == sorted({7, best})


@pytest.mark.slow
def test_the_best_is_that_of_the_present_reward(workshop, tmp_path, capsys):
    """After a resume with a reward of a smaller scale the best was always a checkpoint before."""
    (tmp_path / "rows.jsonl").write_text("\n".join(f'{{"prompt": "{n} + 3 ="}}' for n in range(20)))
    (tmp_path / "judge.py").write_text(
        "def high(completions, **kwargs):\n"
        "    return [100.0 + len(text) for text in completions]\n"
        "def low(completions, **kwargs):\n"
        "    return [len(text) / 100 for text in completions]\n"
    )
    run = workshop.train(
        "judged_twice",
        "steps=2",
        "checkpoint_period=1",
        "train.evaluate_every=1",
        "checkpoint.keep_best=1",
        "task=custom",
        f"task.path={tmp_path}/rows.jsonl",
        f"reward={tmp_path}/judge.py:high",
    )
    assert {"mean_reward", "accuracy"}.intersection(read_lines(run / "evaluations.jsonl")[-1]) == {
        "mean_reward"
    }
    capsys.readouterr()
    assert cli.main(["train", f"resume={run}", "steps=4", f"reward={tmp_path}/judge.py:low"]) == 0
    [line] = [
        line for line in capsys.readouterr().out.splitlines() if "the best evaluation" in line
    ]
    assert re.search(r"is that of step [34]:", line), line


# ---- a folder in use, or that cannot be written


def test_two_runs_in_one_folder(workshop, stopped, tmp_path, capsys):
    before = {}
    for file in stopped.rglob("*"):
        if file.is_file():
            before[file] = file.read_bytes()
    with RunWriter(stopped):
        for words in (workshop.words(stopped.name, *WORDS), ["train", f"resume={stopped}"]):
            error = failed(capsys, words)
            assert (
                f"is in use by process {os.getpid()} on " in error and "another run_name" in error
            )
    for file, data in before.items():
        if file.name != ".lock":
            assert file.read_bytes() == data
    with RunWriter.create(tmp_path, "new"), pytest.raises(ShoalError, match="in use by"):
        RunWriter.create(tmp_path, "new")
    RunWriter.create(tmp_path, "new").close()


def test_a_folder_that_holds_something_else(workshop, tmp_path, capsys):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("")
    error = failed(capsys, workshop.words("thesis", f"base_output_directory={tmp_path}"))
    assert "holds something that is not a run (chapter.tex" in error


def test_a_clock_set_back_changes_nothing(tmp_path):
    from datetime import datetime

    later = RunWriter.create(tmp_path, now=datetime(2030, 1, 1, 12))
    earlier = RunWriter.create(tmp_path, now=datetime(2020, 1, 1, 12))
    later.remember(tmp_path)
    earlier.write_config("", "")
    earlier.remember(tmp_path)
    assert find_run("last", tmp_path) == earlier.path  # the run started last, not the latest date
    later.close()
    earlier.close()


# ---- whole processes


def process(workshop: Workshop, name: str, *words: str) -> subprocess.Popen[str]:
    """The program itself."""
    words = (*words, "reward.workers=2")
    code = (
        "import sys; from shoal.cli import main; "
        f"sys.exit(main({workshop.words(name, *WORDS, *words)!r}))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for(condition, running: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < until
        time.sleep(0.002)


def num_lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def is_saving(run: Path) -> bool:
    folder = run / "checkpoints"
    return folder.is_dir() and any("tmp" in entry.name for entry in folder.iterdir())


@pytest.mark.system
def test_kills_of_the_process(workshop, whole):
    """Twice SIGKILL, then to the end here: equal to the unbroken run. Killed as it saves first, the
    run has lines of metrics and no whole checkpoint; killed later, both."""
    kill_and_end(
        workshop, whole, "process_cut", lambda run: is_saving(run), lambda run: num_lines(run) == 3
    )


def kill_and_end(
    workshop: Workshop,
    unbroken: Path,
    name: str,
    *moments: Callable[[Path], bool],
    words: tuple[str, ...] = (),
) -> None:
    run = workshop.runs / name
    for moment in moments:
        running = process(workshop, run.name, *words)
        wait_for(partial(moment, run), running)
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    assert_equal_ends(unbroken, workshop.train(run.name, *WORDS, *words, "reward.workers=2"))


HANGING = """
import time
from pathlib import Path
from types import SimpleNamespace

reached = Path({reached!r})


def letters(completions, trainer_state, **kwargs):
    if reached.with_name("hang_at").read_text() == str(trainer_state.global_step):
        reached.touch()
        time.sleep(1000)
    texts = [completion if isinstance(completion, str) else completion[0]["content"]
             for completion in completions]
    return [sum(map(ord, text)) % 3 for text in texts]
"""


@pytest.fixture(scope="module")
def hanging(workshop, tmp_path_factory) -> tuple[Path, tuple[str, ...], Path]:
    """The file that is touched where a stop is to be requested, the words of the runs, and an
    unbroken one. Rewards hang at the step that stands in `hang_at`; an update has as many
    micro-batches as completions."""
    reached = tmp_path_factory.mktemp("hanging") / "reached"
    rewards = reached.with_name("hanging.py")
    rewards.write_text(HANGING.format(reached=str(reached)))
    reached.with_name("hang_at").write_text("")
    words = (
        f"reward={rewards}:letters",
        "reward.timeout_seconds=300",
        "batch.micro_tokens=1",
        *WORDS,
    )
    return reached, words, workshop.train("hanging", *words)


def assert_stopped(run: Path, saved_step: int, code: int, error: str, seconds: float) -> None:
    assert seconds < 10 and code == 130, error
    assert (
        f"stopped after step {saved_step} of 6, which is saved; resume: shoal train resume="
        in error
    )
    assert "Traceback" not in error and versions(run)[-1] == saved_step and says_what_is_next(run)


@pytest.mark.system
def test_an_interrupted_process_whose_workers_hang_ends_within_seconds(workshop, hanging):
    reached, words, unbroken = hanging
    run = workshop.runs / "stopped_process"
    reached.with_name("hang_at").write_text("4")
    reached.unlink(missing_ok=True)
    running = process(workshop, run.name, *words)
    wait_for(reached.exists, running)
    started = time.monotonic()
    running.send_signal(signal.SIGINT)
    _, error = running.communicate(timeout=100)
    assert "stopping: the steps completed so far, if any, are saved" in error
    assert_stopped(run, 4, running.returncode, error, time.monotonic() - started)
    reached.with_name("hang_at").write_text("")
    assert_equal_ends(unbroken, workshop.train(run.name, *words, "reward.workers=2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "hang_at", "saved_step", "workers", "waits_for"),
    [
        ("evaluation", "3", 3, 2, "the evaluation after step 3"),
        ("training", "4", 4, 0, "the completions of step 5"),
        ("sampling", "", 4, 0, "the completions of step 5"),
        ("update", "", 4, 0, "the update of step 5"),
    ],
)
def test_a_stop_takes_seconds_wherever_the_run_is(
    workshop, hanging, monkeypatch, capfd, stage, hang_at, saved_step, workers, waits_for
):
    """SIGTERM to this process; device work of the fifth step, sampling or its update, comes in
    pieces of a second."""
    reached, words, unbroken = hanging
    words = (*words, f"reward.workers={workers}")
    run = workshop.runs / f"stopped_in_{stage}"
    reached.with_name("hang_at").write_text(hang_at)
    reached.unlink(missing_ok=True)
    step, accumulate = Engine.step, Learner.accumulate
    ended, asked_at = threading.Event(), []

    def slow_step(self: Engine):
        if stage == "sampling" and self.version == 4:
            reached.touch()
            time.sleep(1)
            return {}
        return step(self)

    def slow_accumulate(self: Learner, total, state, batch, teacher):
        if stage == "update" and int(state.updates) == 4:
            reached.touch()
            time.sleep(1)
        return accumulate(self, total, state, batch, teacher)

    def ask() -> None:
        while not ended.wait(0.002):
            if reached.exists():
                asked_at.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGTERM)
                return

    asking = threading.Thread(target=ask)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", slow_step)
        patch.setattr(Learner, "accumulate", slow_accumulate)
        asking.start()
        try:
            code = cli.main(workshop.words(run.name, *words))
        finally:
            ended.set()
            asking.join()
    error = capfd.readouterr().err
    assert_stopped(run, saved_step, code, error, time.monotonic() - asked_at[0])
    assert (
        f"the steps completed so far, if any, are saved; waits for {waits_for}; press Ctrl-C again"
        in error
    )
    reached.with_name("hang_at").write_text("")
    assert_equal_ends(unbroken, workshop.train(run.name, *words))


@pytest.mark.slow
def test_a_stop_takes_seconds_where_hosts_run_by_themselves(workshop, hanging, capfd):
    """Rewards hang in this process, in the fleet's thread."""
    reached, words, unbroken = hanging
    run = workshop.runs / "stopped_fleet"
    words = (*words, "reward.workers=0", "mesh.trainer=1", "mesh.sampler=1")
    reached.with_name("hang_at").write_text("3")
    reached.unlink(missing_ok=True)
    asked_at = []

    def ask() -> None:
        while not reached.exists():
            time.sleep(0.002)
        asked_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    code = cli.main(workshop.words(run.name, *words))
    asking.join()
    error = capfd.readouterr().err
    assert (
        time.monotonic() - asked_at[0] < 15 and code == 130 and "stopped after step 3 of 6" in error
    ), error
    assert "Traceback" not in error and versions(run)[-1] == 3
    reached.with_name("hang_at").write_text("")
    workshop.train(run.name, *words)
    assert saved(run, 6)["checksums"] == saved(unbroken, 6)["checksums"]


def test_a_second_signal_ends_at_once(capfd):
    # Ray, tested in the same process, may have set its own
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert "press Ctrl-C again to stop at once" in capfd.readouterr().err
        stop.check(patience_seconds=60)
        with pytest.raises(StopRequested):
            stop.check()
        with pytest.raises(KeyboardInterrupt, match="the newest checkpoint is kept"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_stop_says_what_was_kept_and_how_to_start_again(tmp_path):
    command = "shoal train resume=runs/a"
    nothing = f"nothing was kept, as the run has no checkpoint yet; start again: {command}"
    run: Any = SimpleNamespace(saved=-1, resume_command=command)
    assert Run.stopped_text(run) == f"stopped: {nothing}"
    run.saved = 0
    assert Run.stopped_text(run).startswith("stopped before the first step, with its")
    assert kept_text(tmp_path, command) == nothing
    for name in ("2", "10", "12.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    text = f"the checkpoint of step 10 is kept, what came after it is lost; resume: {command}"
    with stop_on_signals(kept=lambda: kept_text(tmp_path, command)) as stop:
        stop.request()
        with pytest.raises(KeyboardInterrupt, match=f"^stopped at once: {text}$"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_a_signal_is_raised_out_of_a_wait():
    with stop_on_signals() as stop, pytest.raises(StopRequested), stop.raising_at_once():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
        raise AssertionError


@pytest.mark.slow
def test_several_updates_a_step_end_within_the_patience_or_go_back(workshop, several, monkeypatch):
    """After the first update of a step the state that it began with is spent: the newest checkpoint
    stands."""
    original, calls = Updater._update_once, 0

    def stops(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 14:  # the second of the fourth step
            self.stop.requested_at = time.monotonic() - 60
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "_update_once", stops)
        assert cli.main(workshop.words("several_stopped", *SEVERAL)) == 130
    assert (
        versions(workshop.runs / "several_stopped") == [2]
        and len(metrics(workshop.runs / "several_stopped")) == 3
    )
    assert_equal_ends(several, workshop.train("several_stopped", *SEVERAL))


@pytest.mark.slow
def test_a_full_disk_loses_nothing(workshop, whole, stopped, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # no file may grow above it; a checkpoint's would
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        error = failed(capsys, workshop.words(stopped.name, *WORDS))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "Traceback" not in error
    [line] = [line for line in error.splitlines() if line.startswith("error: ")]
    assert "cannot be written" in line and "make room" in line
    assert versions(stopped) == [2]
    assert_equal_ends(whole, workshop.train(stopped.name, *WORDS))


def test_too_little_room_for_a_checkpoint_is_met_before_anything_is_made(
    workshop, stopped, monkeypatch, capsys
):
    before = files(stopped)
    with monkeypatch.context() as patch:

        def disk_usage(path):
            return SimpleNamespace(free=1000)

        patch.setattr(shutil, "disk_usage", disk_usage)
        errors = []
        for name in (stopped.name, "no_room"):
            errors.append(failed(capsys, workshop.words(name, *WORDS)))
    for error in errors:
        assert "the disk has 0.0 MiB free: make room" in error and error.count("\n") == 1
    assert files(stopped) == before and not (workshop.runs / "no_room").exists()


@pytest.mark.slow
def test_a_disk_that_fills_names_the_checkpoint_that_is_there(
    workshop, whole, stopped, monkeypatch, capsys
):
    """None, then that of step 2."""
    first = cut(workshop, "fills", monkeypatch, Updater, "update", 1, *WORDS)
    for run, said in (
        (first, "start the run again: it has no checkpoint yet"),
        (stopped, "resume the run, which continues from the checkpoint of step 2"),
    ):
        usage = iter([1 << 40])
        with monkeypatch.context() as patch:

            def disk_usage(path, usage=usage):
                return SimpleNamespace(free=next(usage, 1000))

            patch.setattr(
                shutil,
                "disk_usage",
                disk_usage,
            )
            error = failed(capsys, workshop.words(run.name, *WORDS))
        assert "No space left on device" in error and "MiB are needed, 0.0 MiB are free" in error
        assert f"make room, then {said}" in error and error.count("\n") == 1 and not is_saving(run)
    assert_equal_ends(whole, workshop.train(stopped.name, *WORDS))


def test_the_names_left_out_are_clocks():
    names = [name for name in METRICS if name.startswith(CLOCKS)]
    assert len(names) >= 6 and all(
        METRICS[name].unit in ("seconds", "tokens/second", "bytes", "programs", "share")
        for name in names
    )
