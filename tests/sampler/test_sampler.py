"""The engine: its log-probs are the trainer's, its tokens a function of address and weights alone,
its ends exact."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np
import pytest
from small import FULLEST, PLAINEST
from small_engine import (
    EOS,
    LENGTHS,
    MAX_TOKENS,
    SMALL,
    TOLERANCE,
    asked,
    full_logits,
    make,
    model,
    play,
    played_groups,
    request,
    same,
    text,
    weights,
)
from test_sample_tokens import truncated_probabilities

from shoal.job.compilations import CompilationCounter
from shoal.mesh import Role
from shoal.mesh.programs import MAX_IN_FLIGHT
from shoal.model.attention import decode_gpu, decode_tpu, selector
from shoal.model.attention.caches import KEY_BLOCK
from shoal.protocols import SampleRequest
from shoal.records import (
    Completion,
    SamplingParams,
    ShoalError,
    StopReason,
)
from shoal.sampler.engine import Engine, drain
from shoal.sampler.programs import DECODE_CHUNK, PREFILL_CHUNK, prefill_chunk_size
from shoal.sampler.scheduler import prompt_bucket
from shoal.trainer.batch import BatchLayout, Shape, TokenTerms, pack, unpack
from shoal.trainer.loss import batch_logprobs
from shoal.weights.sampler_copy import publish_to, published_shapes


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make()


@pytest.fixture(scope="module")
def base(engine: Engine) -> dict[tuple[int, int], Completion]:
    """Seven prompts through room for four groups: slots are filled again."""
    return play(engine, [request(row) for row in range(len(LENGTHS))])


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "by_kernel"), [("gpu", False), ("gpu", True), ("tpu", True)])
def test_an_accelerators_programs_draw_the_same_tokens(monkeypatch, base, platform, by_kernel):
    """A GPU's layers apart, smaller blocks of keys, or a kernel for them in interpret mode, on a
    TPU by pages, and on a GPU one product for queries, keys and values: all of it runs on a CPU
    too."""
    monkeypatch.setattr(Role, "platform", platform)
    if by_kernel:
        # SMALL's heads are for no tensor core
        def decode_kernel_refusal(model, layer=None):
            return ""

        monkeypatch.setattr(selector, "decode_kernel_refusal", decode_kernel_refusal)
        for module, kernel in (
            (decode_gpu, decode_gpu.attend_slots),
            (decode_tpu, decode_tpu.attend_pages),
        ):
            monkeypatch.setattr(module, kernel.__name__, partial(kernel, interpret=True))
    longest = 300 if by_kernel else 250  # else one set of programs would be taken for both
    ours = Engine(
        model(SMALL),
        slots=16,
        group_size=4,
        max_prompt_tokens=100,
        max_completion_tokens=longest,
        eos_ids=EOS,
        decode=text,
    )
    parameters = publish_to(ours.model, weights(SMALL))
    assert platform == "tpu" or (
        len(parameters.blocks) == 2 and parameters.blocks[1].gate.shape == (32, 64)
    )
    declared, made = (
        jax.tree.map(lambda x: (x.shape, x.dtype), tree)
        for tree in (published_shapes(ours.model), parameters)
    )
    assert declared == made
    ours.load(0, parameters)
    counter = CompilationCounter()
    found = play(ours, [request(row) for row in range(len(LENGTHS))])
    # The state, decode, and of two sizes what enters the first layer, one layer of prefill, and
    # what leaves the last; or a prefill of layers that are stacked, as a TPU's in float32.
    assert counter.read() == (4 if platform == "tpu" else 8)
    assert {key: c.token_ids.tolist() for key, c in found.items()} == {
        key: c.token_ids.tolist() for key, c in base.items()
    }
    assert max(np.abs(found[key].logprobs - base[key].logprobs).max() for key in base) < TOLERANCE


# The sampler's log-probs are the trainer's


@pytest.mark.slow
@pytest.mark.parametrize("a", [PLAINEST, FULLEST], ids=["plainest", "fullest"])
def test_log_probs_are_the_trainers(a):
    assert a.num_layers == 4
    engine = make(a, max_completion_tokens=256, eos_ids=())
    limits = (256, 33, 1, 97, 256, 150)
    requests = []
    for row, (size, limit) in enumerate(zip((100, 1, 30, 64, 65, 7), limits, strict=True)):
        requests.append(request(row, size, temperature=(1.0, 0.7)[row % 2], max_tokens=limit))
    assert {prompt_bucket(len(r.prompt_ids)) for r in requests} == {64, 128}
    played = play(engine, requests)
    reference = jax.jit(lambda p, b: batch_logprobs(engine.model, p, b, 2**25))
    worst = 0.0
    for temperature in (1.0, 0.7):
        of = [r for r in requests if r.params.temperature == temperature]
        groups = played_groups(of, played)
        zeros = np.zeros((3, 4))
        (batch,) = pack(
            groups, range(3), TokenTerms(zeros, zeros), BatchLayout([Shape(1, 2560)], temperature)
        )
        lps, entropy = (np.asarray(x) for x in reference(engine.parameters, batch.arrays))
        if temperature == 1:  # of logits of standard deviation s it is about log V - s^2 / 2
            assert entropy[batch.arrays.loss_mask].mean() < np.log(a.vocab_size) - 0.5
        scored = unpack([batch], [lps])
        assert len(scored) == 12
        for (g, i), lp in scored.items():
            completion = groups[g].completions[i]
            assert len(completion) == of[g].params.max_tokens
            worst = max(worst, float(np.abs(lp - completion.logprobs).max()))
    assert worst < TOLERANCE


# Long prompts enter in pieces

PIECES = (2100, 40, 1025, 1024, 1100)


def long(row: int, **changes) -> SampleRequest:
    return request(row, PIECES[row], count=1, max_tokens=20, **changes)


@pytest.fixture(scope="module")
def in_pieces() -> tuple[Engine, dict[tuple[int, int], Completion]]:
    """An engine for prompts of up to 2,100 tokens, and what it samples for long and short ones
    together."""
    engine = make(group_size=1, slots=8, max_prompt_tokens=2100, max_completion_tokens=64)
    counter, played = CompilationCounter(), play(engine, [long(row) for row in range(len(PIECES))])
    assert counter.read() == 5  # the state, prefill of 64 tokens, of 1,024 and in pieces, decode
    return engine, played


@pytest.mark.slow
def test_log_probs_after_a_prompt_in_pieces_are_those_after_the_whole(in_pieces):
    engine, played = in_pieces
    for (row, _), completion in played.items():
        expected = jax.nn.log_softmax(full_logits(engine, long(row).prompt_ids, completion))
        expected = np.asarray(expected)[np.arange(len(completion)), completion.token_ids]
        assert np.abs(completion.logprobs - expected).max() < TOLERANCE


@pytest.mark.slow
def test_a_prompt_in_pieces_depends_on_no_companion(in_pieces):
    """Neither on how many pieces the others have, nor on who was before in its row."""
    engine, first = in_pieces
    for rows in ((2,), (4, 2, 0)):
        same(play(engine, [long(row, id=10 + row) for row in rows]), first)


@pytest.mark.slow
def test_prompts_in_pieces_where_layers_are_apart(in_pieces, monkeypatch):
    _, first = in_pieces
    monkeypatch.setattr(Role, "platform", "gpu")
    engine = Engine(
        replace(model(SMALL), attention="blocked"),
        slots=4,
        group_size=1,
        max_prompt_tokens=1100,
        max_completion_tokens=100,
        eos_ids=EOS,
    )
    engine.load(0, publish_to(engine.model, weights(SMALL)))
    for key, completion in play(engine, [long(2), long(4)]).items():
        assert completion.token_ids.tolist() == first[key].token_ids.tolist()
        assert np.abs(completion.logprobs - first[key].logprobs).max() < TOLERANCE


@pytest.mark.slow
def test_a_kernel_takes_whole_prompts(monkeypatch):
    assert prefill_chunk_size(model(SMALL), 4096) == PREFILL_CHUNK
    monkeypatch.setattr(Role, "platform", "tpu")
    assert prefill_chunk_size(model(SMALL), 4096) == 4096


# Tokens are a function of address and weights


@pytest.mark.slow
@pytest.mark.bitwise
def test_other_companions_another_order_fewer_prompts(engine, base):
    same(play(engine, [request(row) for row in (6, 5, 4, 3, 2, 1, 0)]), base)
    for rows in ([3], [1, 5], [2, 4, 0]):
        same(play(engine, [request(row, id=100 + row) for row in rows]), base)
    strangers = []
    for row in range(1, 7):
        strangers.append(request(row, 10 * row + 3, id=50 + row, step=9, temperature=0.3))
    engine.submit(strangers[:3])
    assert engine.dispatch_next()  # they are in already when the others come
    engine.submit([request(row, id=200 + row) for row in (0, 3, 6)])
    engine.submit(strangers[3:])
    same({(id - 200, index): c for (id, index), c in drain(engine).items() if id >= 200}, base)


@pytest.mark.slow
def test_after_parking_and_by_another_engine(engine, base):
    weights = engine.parameters
    engine.release_memory()
    assert engine.parameters is None  # parked, it holds neither caches nor weights
    engine.load(engine.version, weights)
    same(play(engine, [request(3), request(0)]), base)
    # of one bucket, so one prefill is compiled
    same(play(make(), [request(row) for row in (5, 1)]), base)


def test_fewer_siblings_than_a_group_holds(engine, base):
    played = play(engine, [request(0, count=2), request(2, count=1), request(4)])
    assert sorted(played) == [(0, 0), (0, 1), (2, 0), (4, 0), (4, 1), (4, 2), (4, 3)]
    same(played, base)


@pytest.mark.slow
def test_other_capacities_agree_in_log_probs(base):
    """Room for 150 tokens of prompt is padded to 192, a prompt of 140 tokens to 256."""
    other = make(slots=8, max_prompt_tokens=150, max_completion_tokens=200)
    requests = [request(0), request(1), request(5), request(8, 140, max_tokens=40)]
    played = play(other, requests)
    agree = 0
    for key in [(row, index) for row in (0, 1, 5) for index in range(4)]:
        ours, theirs = played[key], base[key]
        n = min(len(ours), len(theirs))
        equal = ours.token_ids[:n] == theirs.token_ids[:n]
        n = n if equal.all() else int(equal.argmin())
        agree += equal.all() and len(ours) == len(theirs)
        assert n and np.abs(ours.logprobs[:n] - theirs.logprobs[:n]).max() < TOLERANCE
    assert agree >= 11  # a uniform may fall on an edge
    assert prompt_bucket(140) > -(-150 // KEY_BLOCK) * KEY_BLOCK
    for index in range(4):
        completion = played[8, index]
        expected = jax.nn.log_softmax(full_logits(other, requests[-1].prompt_ids, completion))
        expected = np.asarray(expected)[np.arange(len(completion)), completion.token_ids]
        assert np.abs(completion.logprobs - expected).max() < TOLERANCE


def test_steps_and_siblings_differ(engine, base):
    again = play(engine, [request(row, step=1) for row in (0, 3)])
    for key, completion in again.items():
        assert completion.token_ids[:8].tolist() != base[key].token_ids[:8].tolist()
    for row in range(len(LENGTHS)):
        assert len({tuple(base[row, i].token_ids[:8].tolist()) for i in range(4)}) == 4


# Rows of fewer siblings than a group has


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="rows of 1"),
        pytest.param(3, id="rows of 3", marks=pytest.mark.slow),
    ],
)
def in_rows(request: Any) -> tuple[Engine, dict[tuple[int, int], Completion]]:
    """An engine with places for three to four groups of 4, and what it samples for seven
    prompts."""
    engine = make(siblings_per_row=request.param)
    return engine, play(engine, [asked(row) for row in range(len(LENGTHS))])


def test_rows_of_any_size_agree_in_log_probs(in_rows, base):
    _, ours = in_rows
    assert ours.keys() == base.keys()
    agree = 0
    for key, theirs in base.items():
        n = min(len(ours[key]), len(theirs))
        equal = ours[key].token_ids[:n] == theirs.token_ids[:n]
        n = n if equal.all() else int(equal.argmin())
        agree += equal.all() and len(ours[key]) == len(theirs)
        assert n == 0 or np.abs(ours[key].logprobs[:n] - theirs.logprobs[:n]).max() < TOLERANCE
    assert agree >= len(base) - 1  # a uniform may fall on an edge


@pytest.mark.slow
def test_tokens_depend_on_no_companion_and_not_on_when_a_sibling_enters(in_rows):
    engine, first = in_rows
    for rows in ((6, 5, 4, 3, 2, 1, 0), (3,), (2, 4, 0)):
        same(play(engine, [request(row, id=300 + row) for row in rows]), first)
    strangers = []
    for row in range(1, 7):
        strangers.append(
            request(
                row, 9 * row + 3, id=50 + row, step=9, count=(1, 9, 2)[row % 3], temperature=0.3
            )
        )
    engine.submit(strangers[:4])
    assert engine.dispatch_next()  # they are in already when the others come
    engine.submit([request(row, id=200 + row) for row in (0, 3, 6)])
    engine.submit(strangers[4:])
    found = drain(engine)
    same({(id - 200, index): c for (id, index), c in found.items() if id >= 200}, first)
    assert {id: sum(other == id for other, _ in found) for id in (51, 52, 53)} == {
        51: 9,
        52: 2,
        53: 1,
    }


def test_a_prompt_is_computed_once_for_all_its_siblings(in_rows, monkeypatch):
    engine, first = in_rows
    real, computed, joined = engine.programs, [], []

    def prefill(*args, new_rows, length, **arrays):
        computed.extend(length[new_rows.rows < engine.num_rows].tolist())
        return real["prefill"](*args, new_rows=new_rows, length=length, **arrays)

    def join(*args, new_rows, **arrays):
        joined.append(int((new_rows.limit > 0).sum()))
        return real["join"](*args, new_rows=new_rows, **arrays)

    monkeypatch.setattr(engine, "programs", {**real, "prefill": prefill, "join": join})
    same(play(engine, [request(row) for row in range(len(LENGTHS))]), first)
    assert sorted(computed) == sorted(LENGTHS)
    assert sum(joined) == len(LENGTHS) * (4 - engine.siblings)


def test_a_request_is_cancelled_of_which_some_siblings_have_no_place_yet(in_rows):
    engine, first = in_rows
    engine.submit([request(row) for row in (3, 0, 1, 2, 4, 5)])
    found = dict(engine.step())
    while not engine.scheduler.entering:
        found |= engine.step()
    row = next(iter(engine.scheduler.entering))
    engine.cancel(row)
    found = {(c.request_id, c.index): c for c in chain(*found.values())} | drain(engine)
    assert engine.idle and len(engine.scheduler.free) == engine.num_rows and len(found) == 24
    cancelled = [found.pop((row, index)) for index in range(4)]
    assert cancelled[3].stop_reason == StopReason.CANCELLED and len(cancelled[3]) == 0
    for c in cancelled:
        assert c.token_ids.tolist() == first[row, c.index].token_ids[: len(c)].tolist()
    same(found, first)
    same(play(engine, [request(row)]), first)


@pytest.mark.slow
def test_stop_strings_in_rows_of_any_size(in_rows):
    engine, first = in_rows
    (row, index), whole = next((k, c) for k, c in first.items() if len(c) > 12 and k[1] == 3)
    string = text(whole.token_ids[9:11])
    played = play(
        engine, [request(row, stop=(string,)), *(request(other, id=90 + other) for other in (1, 2))]
    )
    assert played[row, index].stop_reason == StopReason.STOP and len(played[row, index]) <= 11
    for i in range(4):
        assert (
            played[row, i].token_ids.tolist()
            == first[row, i].token_ids[: len(played[row, i])].tolist()
        )


@pytest.mark.slow
def test_places_by_completion_are_filled_while_prompts_wait(in_rows):
    """Lengths forced apart: a place is free as soon as its own completion ends, and the figures
    count it."""
    engine, _ = in_rows
    engine.limit_of = lambda request, index: (80, 4, 4, 4)[index]  # type: ignore[method-assign]
    try:
        before = engine.counters.copy()
        played = play(engine, [request(row, 5, id=row) for row in range(100, 130)])
    finally:
        del engine.limit_of
    assert [len(played[100, index]) <= limit for index, limit in enumerate((80, 4, 4, 4))] == [
        True
    ] * 4
    counted = engine.counters - before
    drawing, places = counted["active_slots"], counted["total_slots"]
    assert drawing == sum(len(c) - 1 for c in played.values())  # the first token is prefill's
    if engine.siblings == 1:
        assert drawing / places > 0.5  # with rows of 4 it would be at most (79 + 9) / (4 * 79)


# Ends


def test_a_completion_ends_with_its_eos_or_is_cut(base):
    reasons = {StopReason.EOS: 0, StopReason.LENGTH: 0}
    last = set()
    for completion in base.values():
        tokens = completion.token_ids
        ends = np.isin(tokens, EOS)
        assert (
            not ends[:-1].any()
            and completion.loss_mask.all()
            and completion.token_ids.dtype == np.int32
        )
        assert len(completion.logprobs) == len(completion.versions) == len(completion)
        assert (completion.logprobs < 0).all() and np.isfinite(completion.logprobs).all()
        assert completion.stop_reason == (StopReason.EOS if ends[-1] else StopReason.LENGTH)
        assert ends[-1] or len(completion) == MAX_TOKENS
        reasons[completion.stop_reason] += 1
        last.add(int(tokens[-1]))
    assert min(reasons.values()) >= 2 and last > set(EOS)  # every kind of end occurs


def test_an_eos_as_the_last_token_allowed_is_an_eos(engine, base):
    key, whole = next(
        (k, c)
        for k, c in base.items()
        if c.stop_reason == StopReason.EOS and len(c) > DECODE_CHUNK + 3
    )
    for room, reason in (
        (0, StopReason.EOS),
        (-1, StopReason.LENGTH),
        (1 - len(whole), StopReason.LENGTH),
    ):
        cut = play(engine, [request(key[0], max_tokens=len(whole) + room)])[key]
        assert (
            cut.token_ids.tolist() == whole.token_ids[: len(whole) + room].tolist()
            and cut.stop_reason == reason
        )


@pytest.mark.parametrize("place", [0, 1, 5, DECODE_CHUNK, DECODE_CHUNK + 1, 2 * DECODE_CHUNK + 2])
def test_a_stop_string_ends_with_the_token_that_completes_it(engine, base, place):
    """At the first token, within a piece of decoding, over the border of two, after it; it spans up
    to three tokens."""
    (row, index), whole = next((k, c) for k, c in base.items() if len(c) > place + 4)
    size = 1 if place == 0 else 3 if place == DECODE_CHUNK else 2
    string = text(whole.token_ids[place : place + size])
    played = play(engine, [request(row, stop=(string, "never")), request((row + 1) % 7, id=70)])
    assert (
        len(played[row, index]) <= place + size
        and played[row, index].stop_reason == StopReason.STOP
    )
    for i in range(4):
        ours, without = played[row, i], base[row, i]
        found = text(without.token_ids).find(string)
        end = len(without) if found < 0 else found + size
        assert ours.token_ids.tolist() == without.token_ids[:end].tolist()
        assert ours.logprobs.tobytes() == without.logprobs[:end].tobytes()
        assert ours.stop_reason == (without.stop_reason if found < 0 else StopReason.STOP)
    same({k: c for k, c in played.items() if k[0] != row}, base)


@pytest.mark.slow
def test_greedy_takes_the_likeliest_at_each_step(engine):
    hot = request(
        3, params=SamplingParams(temperature=0.7, top_p=0.5, max_tokens=60).as_greedy(), count=2
    )
    played = play(engine, [hot, request(0)])
    assert played[3, 0].token_ids.tolist() == played[3, 1].token_ids.tolist()
    completion = played[3, 0]
    scores = full_logits(engine, hot.prompt_ids, completion)
    assert len(completion) >= 2 and (scores.argmax(-1) == completion.token_ids).all()
    expected = np.asarray(jax.nn.log_softmax(scores)).max(-1)
    assert np.abs(expected - completion.logprobs).max() < TOLERANCE


# What is asked wrongly


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (request(0, 101), ShoalError, "a prompt has 101 tokens, expected 1 to 100"),
        (request(0, 0), ShoalError, "a prompt has 0 tokens"),
        (
            request(0, max_tokens=101),
            ShoalError,
            "max_tokens=101, expected 1 to 100.*max_completion_tokens",
        ),
        (request(0, max_tokens=0), ShoalError, "max_tokens=0, expected 1 to 100"),
        (request(0, count=0), ValueError, "0 completions, expected at least 1"),
        (request(0, top_p=0.9), ValueError, "without truncation"),
        (
            replace(request(0), turn_limits=(1, 1, 1, 1)),
            ValueError,
            "4 limits of turns: .* of a request with turns",
        ),
        (
            replace(request(0), turn_limits=(1,), has_turns=True),
            ValueError,
            "1 limits of turns: .* each of the 4",
        ),
        (
            replace(request(0), turn_limits=(1, 0, -1, 1), has_turns=True),
            ValueError,
            "expected 0 or more tokens",
        ),
    ],
    ids=[
        "long prompt",
        "no prompt",
        "many tokens",
        "no tokens",
        "no completions",
        "truncation",
        "limits without turns",
        "few limits",
        "limit below 0",
    ],
)
def test_wrong_requests_are_refused_and_nothing_is_left_behind(engine, wrong, error, words):
    with pytest.raises(error, match=words):
        engine.submit([wrong])
    assert engine.idle and not engine.requests


def test_an_id_twice_without_weights_without_decode(engine):
    with pytest.raises(ValueError, match="request 0 was submitted already"):
        engine.submit([request(0, max_tokens=2), request(0, max_tokens=2)])
    assert len(drain(engine)) == 4
    bare = Engine(
        model(SMALL),
        slots=1,
        group_size=1,
        max_prompt_tokens=8,
        max_completion_tokens=8,
        eos_ids=EOS,
    )
    with pytest.raises(RuntimeError, match="no weights are loaded"):
        bare.submit([request(1, count=1)])
    bare.load(0, engine.parameters)
    with pytest.raises(ValueError, match="stop strings need"):
        bare.submit([request(1, count=1, max_tokens=8, stop=("x",))])


# Running


def test_each_token_has_the_version_that_sampled_it_and_weights_change_on_the_way(engine, base):
    before = engine.parameters

    def swapped(params) -> dict:
        """Request 0, whose weights become version 8 after the first compiled step."""
        engine.load(7, before)
        engine.submit([request(0)])
        engine.dispatch_next()
        with pytest.raises(RuntimeError, match="cannot release its memory"):
            engine.release_memory()
        engine.load(8, params)
        return {(0, index): c for (_, index), c in drain(engine).items()}

    try:
        same_weights = swapped(before)
        same(same_weights, base)
        for one in same_weights.values():
            assert (
                one.versions[0] == 7
                and set(one.versions[1:].tolist()) <= {8}
                and len(one.versions) == len(one)
            )
        assert any(len(one) > 1 for one in same_weights.values())
        new, counter = weights(SMALL, seed=1), CompilationCounter()
        others = swapped(new)
        assert counter.read() == 0
        # the first is of the prefill
        for at in others:
            assert others[at].token_ids[0] == base[at].token_ids[0]
        assert any(
            others[at].token_ids[:8].tolist() != base[at].token_ids[:8].tolist() for at in others
        )
        engine.load(9, new)
        whole = play(engine, [request(0)])
        for c in whole.values():
            assert (c.versions == 9).all()
        # Keys and values of the weights before are kept, so a swap is not the same as starting
        # anew.
        assert any(others[at].logprobs.tolist() != whole[at].logprobs.tolist() for at in whole)
    finally:
        engine.load(0, before)


@pytest.mark.slow
def test_a_step_never_waits_and_two_at_most_are_in_flight(engine, base, monkeypatch):
    def waited(*_):
        raise AssertionError("step waited for the device")

    found, deepest = [], 0
    engine.submit([request(row) for row in range(7)])
    while not engine.idle:
        with monkeypatch.context() as patch:
            patch.setattr(jax, "device_get", waited)
            patch.setattr(jax, "block_until_ready", waited)
            patch.setattr(engine, "_gather_oldest", waited)
            while engine.dispatch_next():
                assert len(engine.in_flight) <= MAX_IN_FLIGHT
                assert len(engine.scheduler.running) <= engine.num_rows
            deepest = max(deepest, len(engine.in_flight))
            assert not engine.dispatch_next()
        found += chain(*engine.step().values())
    assert deepest == MAX_IN_FLIGHT == 2
    same({(c.request_id, c.index): c for c in found}, base)


@pytest.mark.slow
def test_the_next_decode_is_started_before_the_last_is_read_unless_prompts_wait(engine, base):
    seen, waited = set(), set()
    engine.submit([request(row) for row in range(7)])
    while not engine.idle:
        engine.step()
        decodes = sum(step.live is not None for step in engine.in_flight)
        (waited if engine.scheduler.waiting else seen).add(decodes)
    assert max(waited) == 1 and max(seen) == 2
    stopping = [request(row, stop=("never",)) for row in (0, 3)]
    engine.submit(stopping)  # what a stop string ends is known when it was read
    while not engine.idle:
        engine.step()
        assert sum(step.live is not None for step in engine.in_flight) <= 1


def test_cancelling_returns_what_was_drawn_and_frees_the_slot(engine, base):
    row = next(
        row for row in range(7) if max(len(base[row, i]) for i in range(4)) > 2 * DECODE_CHUNK
    )
    others = [other for other in range(7) if other != row]
    engine.submit([request(row), *(request(other) for other in others)])
    found = []
    while max(len(partial.tokens) for partial in engine.requests[row].partials) < DECODE_CHUNK:
        engine.dispatch_next()
        found += chain(*engine.step().values())
    running = {id for id, _ in engine.scheduler.running.values()}
    waiting = next(other for other in others if other not in running and other in engine.requests)
    engine.cancel(row)
    engine.cancel(waiting)
    assert (
        not {row, waiting} & {id for id, _ in engine.scheduler.running.values()}
        and waiting not in engine.requests
    )
    found = {(c.request_id, c.index): c for c in found} | drain(engine)
    assert len(found) == 28
    cancelled = {k: found.pop(k) for k in list(found) if k[0] in (row, waiting)}
    assert (
        sum(c.stop_reason == StopReason.CANCELLED for k, c in cancelled.items() if k[0] == row) >= 1
    )
    for key, c in cancelled.items():
        assert c.token_ids.tolist() == base[key].token_ids[: len(c)].tolist()
        assert (c.stop_reason == StopReason.CANCELLED) == (
            key[0] == waiting or len(c) < len(base[key])
        )
        assert key[0] != waiting or len(c) == 0
    same(found, base)
    same(play(engine, [request(row)]), base)  # the id may be asked again


@pytest.mark.slow
def test_nothing_is_compiled_after_warm_up(engine, base):
    counter = CompilationCounter()
    for count, seed in ((1, 0), (3, 1), (9, 2)):
        rng = np.random.default_rng(seed)
        played = play(
            engine,
            [
                request(
                    row,
                    int(rng.integers(1, 101)),
                    temperature=float(rng.uniform(0, 2)),
                    count=int(rng.integers(1, 5)),
                    max_tokens=int(rng.integers(1, 100)),
                )
                for row in range(count)
            ],
        )
        assert len({row for row, _ in played}) == count
    weights = engine.parameters
    engine.release_memory()
    engine.load(engine.version, weights)
    play(engine, [request(0)])
    assert counter.read() == 0


# Truncation


@pytest.mark.slow
def test_truncated_log_probs_are_those_of_the_kept_set():
    engine = make(truncated=True, slots=8, group_size=2)
    cuts: tuple[dict[str, Any], ...] = (
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
        {},
    )
    requests = []
    for row, (cut, temperature) in enumerate(zip(cuts, (1.0, 0.7, 1.3, 0.7, 1.0), strict=True)):
        requests.append(
            request(row, 12 * row + 1, count=2, temperature=temperature, max_tokens=40, **cut)
        )
    for (row, _), completion in play(engine, requests).items():
        p = requests[row].params
        scores = full_logits(engine, requests[row].prompt_ids, completion)
        expected = []
        for x, token in zip(scores, completion.token_ids, strict=True):
            expected.append(
                np.log(truncated_probabilities(x, p.temperature, p.top_k, p.top_p, p.min_p)[token])
            )
        assert np.abs(completion.logprobs - np.asarray(expected)).max() < TOLERANCE
