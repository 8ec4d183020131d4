"""Programs that later steps may need are compiled beside training, in an order that follows what was seen."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from small import QWEN3, batches, learner, random_groups, random_parameters, roles

from shoal.config.schema import AlgorithmSection, BatchSection, Config
from shoal.model.transformer import Model
from shoal.run.assembly import open_ahead
from shoal.run.compilation import CompilationCounter
from shoal.trainer.batch import Shape, bucket, pack
from shoal.trainer.compile_ahead import AheadCompiler
from shoal.trainer.step import ModelScorer, ParameterScorer
from shoal.trainer.update import Updater

pytestmark = pytest.mark.compile_quickly


def shape(prefix: int, length: int) -> Shape:
    return Shape(1, prefix, 1, length)


def test_the_next_longer_completions_of_all_prompt_buckets_are_compiled_once():
    compiled: list[tuple[int, int]] = []
    ahead = AheadCompiler(lambda *sizes: compiled.append(sizes), max_tokens=64)
    for sizes in [(48, 32), (64, 32), (48, 48), (48, 64)]:
        ahead.begin_step(shape(*sizes))
        ahead.end_step(shape(*sizes))
        ahead._pool.submit(int).result()  # the thread has done what was queued
    ahead.close()
    # (48, 48) was compiled before its step; nothing beyond 64 is, as no completion can be longer
    assert compiled == [(48, 48), (64, 48), (48, 64), (64, 64)]


def test_a_step_waits_for_its_own_program_alone_and_compiles_what_has_not_begun():
    begun, release, compiled = threading.Event(), threading.Event(), []

    def compile(*sizes: int) -> None:
        begun.set()
        assert release.wait(20)
        compiled.append(sizes)
        raise ValueError("a failure is the step's to report")

    ahead = AheadCompiler(compile, max_tokens=1000)
    ahead.end_step(shape(16, 16))
    ahead.end_step(shape(32, 16))
    assert begun.wait(20)  # (16, 24) is being compiled, (32, 24) waits
    ahead.begin_step(shape(32, 24))  # returns at once
    waiting = threading.Thread(target=ahead.begin_step, args=(shape(16, 24),))
    waiting.start()
    assert waiting.is_alive() and not compiled
    release.set()
    waiting.join(20)
    ahead.close()
    assert compiled == [(16, 24)]


def test_a_program_compiled_ahead_is_the_one_that_the_step_uses():
    groups = random_groups(QWEN3, 2, 2, 12, 17)
    one, [batch] = learner(QWEN3), batches(groups)
    state = one.init(random_parameters(QWEN3))
    scorers = [ParameterScorer(one, state.trainable), ModelScorer(Model(QWEN3, roles().reference), state.trainable)]
    _, size = batch.segment.shape[1:]
    assert size == bucket(17)
    total, _ = one.accumulate(None, state, batches(random_groups(QWEN3, 2, 2, 12, 9))[0])
    nothing = batch.weight[:0, 0]
    [empty] = pack([], [], nothing, nothing, Shape(*batch.prefix.shape, *batch.segment.shape[1:]), 1.0)
    one.compile(empty.arrays)
    for scorer in scorers:
        scorer.compile(empty.arrays)
    counter = CompilationCounter()
    one.accumulate(total, state, batch)
    for scorer in scorers:
        scorer.score(batch)
    assert counter.read() == 0


@pytest.mark.parametrize("has_reference", [True, False])
def test_what_a_run_scores_with_is_compiled_ahead(has_reference):
    """Not the policy's program for the reference's sake, which has other parameters, perhaps elsewhere."""
    compiled: list[str] = []

    def part(name: str, **others: Any) -> Any:
        return SimpleNamespace(compile=lambda batch: compiled.append(name), **others)

    one = learner(QWEN3)
    updater = Updater(part("update", model=one.model, shapes=one.shapes, objective=one.objective), AlgorithmSection(),
                      BatchSection(micro_tokens=64), temperature=1.0, seed=0, max_tokens=8,
                      reference=part("reference") if has_reference else None)
    updater.compile(8, 8)
    assert compiled == ["update", *["reference"] * has_reference]


def test_nothing_is_compiled_ahead_in_short_runs_and_on_gpus(monkeypatch):
    compiled: list[tuple[int, int]] = []
    updater: Any = SimpleNamespace(compile=lambda *sizes: compiled.append(sizes))
    with ExitStack() as stack:
        assert open_ahead(Config(steps=19), updater, 0, stack) is None
        assert open_ahead(Config(steps=80), updater, 70, stack) is None
        ahead = open_ahead(Config(steps=20), updater, 0, stack)
        assert ahead is not None
        ahead.end_step(shape(48, 48))
    assert compiled in ([], [(48, 64)])  # the end of a run drops what has not begun
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert open_ahead(Config(steps=80), updater, 0, ExitStack()) is None
