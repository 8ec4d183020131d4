"""Layers of several kinds in the engine: a recurrent state, a ring of keys, and all keys. What is
sampled has the log-probs of one pass over the whole sequence, however it came about."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from small import GEMMA, SHARED_KEYS, SINKS, roles
from small_engine import SMALL, TOLERANCE, full_logits, make, prompt, request, same, text, weights

from shoal.mesh import MAX_IN_FLIGHT, Role
from shoal.model.architecture import Architecture, DeltaNet, Experts, Layer, Rotary
from shoal.model.attention import decode_tpu, selector, softmax
from shoal.model.attention.caches import (
    RING_SLACK,
    KeyCache,
    NoCache,
    PagedCache,
    PrefillChunkKeys,
    RingCache,
)
from shoal.model.attention.decode import ContextAttention, PrefillChunkAttention
from shoal.model.attention.reference import attend
from shoal.model.attention.selector import (
    attention_kind,
    by_pages,
    decode_kernel_refusal,
    has_pages,
)
from shoal.model.passes import Prompts
from shoal.model.transformer import Model, forward
from shoal.protocols import SampleRequest
from shoal.records import Completion, Purpose, ShoalError, StopReason
from shoal.sampler import programs
from shoal.sampler.engine import Engine, run_until_idle
from shoal.weights.sampler_copy import publish_to

WINDOW = 24
HYBRID = replace(
    SMALL,
    num_layers=4,
    pattern=(Layer("delta_net"), Layer(window=WINDOW), Layer("delta_net"), Layer()),
    delta_net=DeltaNet(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6),
)
LIMIT = 700  # more tokens than the rings have keys
SIZES = (20, 1, 100)  # of the prompts
STOP = (text([40]), text([41]), text([42]), text([43]))

Key = tuple[int, int]


def engine_of(a: Architecture = HYBRID, **changes) -> Engine:
    sizes = {"slots": 8, "max_completion_tokens": LIMIT, "siblings_per_row": 2}
    engine = make(a, **{**sizes, **changes})
    # smaller than others: with weights ten times as large as the first ones, differences of
    # rounding grow from layer to layer
    engine.load(0, publish_to(engine.model, weights(a, scale=7.0)))
    return engine


def in_turns(row: int, count: int = 3) -> SampleRequest:
    asked = request(row, SIZES[row], count=count, max_tokens=LIMIT, stop=STOP)
    return replace(asked, has_turns=True, purpose=Purpose.TRAIN)


def answer(row: int, index: int, turn: int) -> list[int]:
    """A tool's answer: shorter and longer than a feed."""
    rng = np.random.default_rng([row, index, turn])
    return rng.integers(50, 60, (3, 256, 300, 40)[(row + index + turn) % 4]).tolist()


def turn_limit(row: int, index: int, turn: int) -> int:
    return (0, 5, 33, 1)[(row + index + turn) % 4]


def play(engine: Engine, rows: tuple[int, ...], most: int = LIMIT) -> dict[Key, Completion]:
    """Plays each completion for up to four turns, which end by a stop string, a limit or an end; of
    up to `most` tokens."""
    requests = []
    for row in rows:
        asked = in_turns(row)
        requests.append(replace(asked, params=replace(asked.params, max_tokens=most)))
    engine.submit(requests)
    by_id = {one.id: one.noise_key.row for one in requests}
    done: dict[Key, Completion] = {}
    turns: dict[Key, int] = {}
    reasons = set()
    while not engine.idle:
        for completions in engine.step().values():
            for one in completions:
                key = by_id[one.request_id], one.index
                turns[key] = turns.get(key, 0) + 1
                reasons.add(one.stop_reason)
                context = answer(*key, turns[key])
                if not one.waits:
                    done[key] = one
                elif turns[key] == 4 or len(one) + len(context) >= most - 1:
                    engine.end(one.request_id, one.index)
                    done[key] = one
                else:
                    limit = turn_limit(*key, turns[key])
                    engine.extend(one.request_id, one.index, context, limit)
    assert {StopReason.STOP, StopReason.LENGTH} <= reasons
    return done


def check_logprobs(engine: Engine, done: dict[Key, Completion]) -> None:
    """Each sampled token has the log-prob of one pass over prompt and completion."""
    for (row, _), one in done.items():
        logits = full_logits(engine, prompt(row, SIZES[row]), one).astype(np.float64)
        logprobs = scipy.special.log_softmax(logits, -1)[np.arange(len(one)), one.token_ids]
        assert np.abs(logprobs - one.logprobs)[one.loss_mask].max() < TOLERANCE


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of()


@pytest.fixture(scope="module")
def played(engine: Engine) -> dict[Key, Completion]:
    return play(engine, (0, 1, 2))


@pytest.mark.slow
def test_turns_that_the_host_has_cut_go_on_from_the_right_state(engine, played):
    """The device has sampled beyond a stop string or a turn's limit: keys are written over, a state
    is computed anew; contexts enter in pieces, and rings are written over and over."""
    assert max(len(one) for one in played.values()) > 400
    check_logprobs(engine, played)


@pytest.mark.slow
def test_company_changes_no_bit_of_turns(engine, played):
    same(play(engine, (2,)), played)


@pytest.mark.slow
def test_rows_that_give_way_keep_their_states(played, monkeypatch):
    monkeypatch.setattr("shoal.sampler.engine.SWAP_SHARE", 2)
    engine = engine_of(slots=4)
    done = play(engine, (0, 1, 2))
    assert {"swap_out", "swap_in"} <= {name for name, _ in engine._started}
    for key, one in done.items():
        assert one.token_ids.tolist() == played[key].token_ids.tolist()
    check_logprobs(engine, done)


@pytest.mark.slow
def test_layers_with_arrays_of_their_own_are_computed_kind_by_kind(played, monkeypatch):
    monkeypatch.setattr(Model, "ffn_chunks", 1)
    engine = engine_of(slots=6)  # a set of programs of its own
    done = play(engine, (0, 1, 2))
    assert {"prefill 1", "feed 2"} <= engine.programs.keys()
    for key, one in done.items():
        assert one.token_ids.tolist() == played[key].token_ids.tolist()
    check_logprobs(engine, done)


@pytest.mark.slow
def test_long_prompts_in_pieces_and_completions_beyond_the_rings(monkeypatch):
    """Prompts of several pieces, in whose caches a window's keys are the last ones."""
    monkeypatch.setattr("shoal.sampler.programs.PREFILL_CHUNK", 64)
    sizes = {0: 200, 1: 30, 2: 129}
    engine = engine_of(max_prompt_tokens=200, max_completion_tokens=300, eos_ids=())
    requests = [request(row, size, count=3, max_tokens=300) for row, size in sizes.items()]
    engine.submit(requests)
    found = 0
    while not engine.idle:
        for id, completions in engine.step().items():
            for one in completions:
                logits = full_logits(engine, prompt(id, sizes[id]), one).astype(np.float64)
                scores = scipy.special.log_softmax(logits, -1)
                logprobs = scores[np.arange(len(one)), one.token_ids]
                assert np.abs(logprobs - one.logprobs).max() < TOLERANCE
                found = max(found, len(one))
    assert found > 192  # the keys of a ring


@pytest.mark.parametrize("window", [0, 20, 64])
def test_a_piece_reads_no_block_of_keys_that_its_window_does_not_reach(window, monkeypatch):
    """Counted without a compiler, which says nothing of how often a loop runs: a piece of four
    blocks of 16 tokens, after 512 and after 960 tokens."""
    layer = Layer(window=window)
    model = Model(replace(SMALL, pattern=(layer,)), roles().sampler)
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    k, v = draw(1, 1024, 2, 8), draw(1, 1024, 2, 8)
    q = draw(1, 64, 4, 8)
    added = []
    add_block = softmax.add_block

    def counted(*given: Any) -> Any:
        added.append(1)
        return add_block(*given)

    monkeypatch.setattr(softmax, "add_block", counted)
    reached = -(-(window - 1) // 16)  # blocks before the one of a query
    for start in (512, 960):
        before = jnp.arange(1024)[:, None, None] < start
        so_far = PrefillChunkKeys(
            jnp.where(before, k, 0).swapaxes(1, 2), jnp.where(before, v, 0).swapaxes(1, 2)
        )
        added.clear()
        piece = slice(start, start + 64)
        attention = PrefillChunkAttention(model, layer, jnp.int32(start), jnp.int32(1024), block=16)
        with jax.disable_jit():
            out, _ = attention(q, k[:, piece], v[:, piece], so_far)
        blocks = [start // 16 + number for number in range(4)]
        assert len(added) == sum(1 + (reached if window else number) for number in blocks)
        distance = start + np.arange(64)[:, None] - np.arange(1024)
        mask = (distance >= 0) & (distance < (window or 1024))
        wanted = attend(q, k, v, jnp.asarray(mask)[None])
        np.testing.assert_allclose(out, wanted, atol=2e-6)


def test_a_context_whose_padding_exceeds_the_cache_reads_each_key_once():
    """As a feed of a few tokens does, at a completion's end: 40 real ones after 560, in a cache of
    five blocks of 128 keys."""
    layer = Layer()
    model = Model(replace(SMALL, pattern=(layer,)), roles().sampler)
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def first(x: jax.Array, count: int) -> jax.Array:
        return x.at[:, count:].set(0).swapaxes(1, 2)

    prompt_k, prompt_v, k, v = draw(1, 64, 2, 8), draw(1, 64, 2, 8), *draw(2, 1, 816, 2, 8)
    before = KeyCache(
        first(prompt_k, 50), first(prompt_v, 50), first(k[:, :640], 560), first(v[:, :640], 560)
    )
    q = draw(1, 256, 4, 8)
    attention = ContextAttention(model, layer, jnp.array([50]), jnp.array([560]))
    out, after = attention(q, k[:, 560:], v[:, 560:], before)
    np.testing.assert_array_equal(after.own_k[:, :, :600], first(k[:, :640], 600)[:, :, :600])
    mask = np.arange(650) <= 50 + 560 + np.arange(40)[:, None]
    all_k = jnp.concatenate([prompt_k[:, :50], k[:, :600]], axis=1)
    all_v = jnp.concatenate([prompt_v[:, :50], v[:, :600]], axis=1)
    wanted = attend(q[:, :40], all_k, all_v, jnp.asarray(mask)[None])
    np.testing.assert_allclose(out[:, :40], wanted, atol=2e-6)


GEMMA4_FULL = Layer(head_dim=16, rotary=Rotary(1e6, share=0.25, over_whole_head=True))
GEMMA4: dict[str, Any] = {
    "activation": "gelu_tanh",
    "norm": "weight_float32",
    "post_norms": True,
    "query_scale": 0.3,
    "logit_cap": 30.0,
    "embedding_scale": 32**0.5,
    "v_norm": True,
    "layer_scale": True,
}
OTHERS = {
    "embeddings of layers": replace(
        SMALL,
        num_layers=3,
        pattern=(Layer(window=9), Layer(), Layer(window=9)),
        layer_embedding_size=6,
    ),
    "sinks": replace(SINKS, num_layers=3),
    "gemma": GEMMA,
    "windows alone": replace(SMALL, pattern=(Layer(window=9),)),
    "states alone": replace(HYBRID, num_layers=2, pattern=(Layer("delta_net"),)),
    "Gemma 4's small models": replace(
        SMALL,
        num_layers=7,
        pattern=(
            *(Layer(window=9), Layer(window=9), GEMMA4_FULL),
            *(Layer(window=9, keys_of=1, intermediate_size=48),) * 3,
            replace(GEMMA4_FULL, keys_of=2, intermediate_size=48),
        ),
        **GEMMA4,
        layer_embedding_size=6,
    ),
    "Gemma 4's large models": replace(
        SMALL,
        num_layers=4,
        pattern=(Layer(window=9), replace(GEMMA4_FULL, num_kv_heads=1, values_are_keys=True)),
        **GEMMA4,
    ),
}
"""Architectures by what their layers have."""


@pytest.mark.slow
@pytest.mark.parametrize("apart", [0, 1], ids=["stacked", "apart"])
@pytest.mark.parametrize("a", OTHERS.values(), ids=OTHERS.keys())
def test_other_kinds_of_layers(a, apart, monkeypatch):
    """Prompts in pieces, siblings that join, contexts that are fed, rows that give way."""
    monkeypatch.setattr(Model, "ffn_chunks", apart)
    monkeypatch.setattr("shoal.sampler.programs.PREFILL_CHUNK", 64)
    monkeypatch.setattr("shoal.sampler.engine.SWAP_SHARE", 2)
    engine = engine_of(a, slots=4)
    done = play(engine, (0, 1, 2))
    used = {name for name, _ in engine._started}
    assert used == {"prefill", "join", "decode", "feed", "swap_out", "swap_in"}
    check_logprobs(engine, done)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_window_that_no_sequence_exceeds_has_the_caches_of_none(platform, monkeypatch):
    monkeypatch.setattr(Role, "platform", platform)
    base = replace(SMALL, head_dim=64)

    def caches(window: int) -> Any:
        a = replace(base, pattern=(Layer(window=window),))
        return (
            Engine(
                Model(a, roles().sampler),
                slots=4,
                group_size=2,
                max_prompt_tokens=100,
                max_completion_tokens=900,
                eos_ids=(),
            )
            .state_shapes()
            .caches
        )

    assert caches(1000) == caches(0)
    assert caches(300) != caches(0)


@pytest.mark.slow
@pytest.mark.bitwise
def test_a_window_that_no_sequence_exceeds_changes_no_bit():
    a = replace(SMALL, pattern=(Layer(window=100 + LIMIT),))
    same(play(engine_of(a), (0, 2)), play(engine_of(SMALL), (0, 2)))


def test_a_ring_has_room_for_what_decodes_in_flight_sample_beyond_a_turns_end(monkeypatch):
    monkeypatch.setattr(programs, "DECODE_CHUNK", 1 + RING_SLACK // MAX_IN_FLIGHT)
    with pytest.raises(AssertionError, match="rings would lose keys that windows still read"):
        make(GEMMA, max_completion_tokens=LIMIT + 1)  # programs that no other test has made


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_model_of_states_alone_asks_for_no_kernel_of_attention(platform, monkeypatch):
    monkeypatch.setattr(Role, "platform", platform)
    model = Model(OTHERS["states alone"], roles().sampler)
    assert attention_kind(model, 1, 4096) == "reference"
    assert not has_pages(model)
    refusal = decode_kernel_refusal(model)
    assert (platform == "cpu") == ("this is a CPU" in refusal)
    assert (platform != "cpu") == (refusal == "none of the model's layers has attention")


def test_each_kind_of_layer_is_asked_for_its_pages_and_its_kernel(monkeypatch):
    """Heads of 80 have no kernel, those of 64 have one, whichever come first."""
    sizes = {
        "slots": 4,
        "group_size": 2,
        "max_prompt_tokens": 8,
        "max_completion_tokens": 8,
        "eos_ids": (),
    }
    monkeypatch.setattr(Role, "platform", "tpu")
    layers = (Layer(head_dim=80), Layer(head_dim=64))
    model = Model(replace(SMALL, pattern=layers), roles().sampler)
    assert [by_pages(model, layer) for layer in layers] == [False, True]
    assert Engine(model, **sizes).pool is not None
    monkeypatch.setattr(Role, "platform", "gpu")
    a = replace(SMALL, pattern=layers[::-1])
    with pytest.raises(ShoalError, match="the model's head_dim is 80"):
        Engine(replace(model, architecture=a, attention="pallas"), **sizes)


# ---- experts

MOE = replace(
    SMALL,
    num_layers=3,
    pattern=(Layer(feed_forward="experts"), Layer(), Layer(feed_forward="experts")),
    experts=Experts(num_experts=12, experts_per_token=3, intermediate_size=20),
)


def own_experts(engine: Engine, ids: np.ndarray) -> np.ndarray:
    """Those that one pass over a sequence chooses, [tokens, layers with experts, k]."""
    model = engine.model
    size = -(-len(ids) // 64) * 64

    @jax.jit
    def run(parameters, tokens):
        positions = jnp.arange(size)[None]
        prompts = Prompts.of(model, jnp.array([len(ids)]), size)
        _, aux = forward(model, parameters, tokens, positions, prompts)
        return [layer.experts[0] for layer in aux if layer.experts is not None]

    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(ids)] = ids
    return np.stack(run(engine.parameters, tokens), axis=1)[: len(ids)]


def check_experts(engine: Engine, done: dict[Key, Completion]) -> None:
    """Each token's record, the prompt's too, is what a pass over the whole sequence chooses; the
    last token has none."""
    for (row, _), one in done.items():
        ids = prompt(row, SIZES[row])
        assert one.prompt_experts is not None
        own = own_experts(engine, np.concatenate([ids, one.token_ids]))
        recorded = one.extra["experts"]
        assert recorded.dtype == one.prompt_experts.dtype == np.uint8
        np.testing.assert_array_equal(one.prompt_experts, own[: len(ids)])
        np.testing.assert_array_equal(recorded[:-1], own[len(ids) : -1])
        assert recorded.shape == (len(one), 2, 3)
        assert not recorded[-1].any()


@pytest.mark.slow
@pytest.mark.parametrize("apart", [0, 1], ids=["stacked", "apart"])
def test_the_experts_of_every_token_are_recorded(apart, monkeypatch):
    """Of prompts in pieces, of siblings that join, of contexts that are fed or appended token by
    token, of turns that the host has cut, of rows that gave way."""
    monkeypatch.setattr(Model, "ffn_chunks", apart)
    monkeypatch.setattr("shoal.sampler.programs.PREFILL_CHUNK", 64)
    monkeypatch.setattr("shoal.sampler.engine.SWAP_SHARE", 2)
    engine = engine_of(MOE, slots=4, records_experts=True)
    done = play(engine, (0, 1, 2))
    used = {name for name, _ in engine._started}
    assert used == {"prefill", "join", "decode", "feed", "swap_out", "swap_in"}
    assert not all(one.loss_mask.all() for one in done.values())
    check_experts(engine, done)
    of_row = [one.prompt_experts for (row, _), one in done.items() if row == 2]
    assert all(experts is of_row[0] for experts in of_row)  # held once for a group


@pytest.mark.slow
def test_experts_are_recorded_for_training_alone():
    engine = engine_of(MOE, records_experts=True)
    engine.submit([request(0, 20, count=2, max_tokens=5)])
    (completions,) = [one for _, one in run_until_idle(engine)]
    for one in completions:
        assert one.prompt_experts is None and not one.extra


@pytest.mark.slow
@pytest.mark.compile_quickly(False)  # hundreds of tokens, by an interpreted kernel
def test_keys_in_pages_are_read_by_other_layers_too(monkeypatch):
    """As a TPU has its keys: in pages without a window, in rings with one."""
    theirs = play(engine_of(SHARED_KEYS, slots=2, siblings_per_row=1), (0, 2), most=400)
    monkeypatch.setattr(Role, "platform", "tpu")

    def decode_kernel_refusal(model: Model, layer: Layer | None = None) -> str:
        return "it has no windows" if layer is not None and layer.window else ""

    monkeypatch.setattr(selector, "decode_kernel_refusal", decode_kernel_refusal)
    kernel = partial(decode_tpu.attend_pages, interpret=True)
    monkeypatch.setattr(decode_tpu, "attend_pages", kernel)
    # other sizes: else the programs of the first engine would be taken
    engine = engine_of(SHARED_KEYS, slots=2, siblings_per_row=1, max_completion_tokens=800)
    kinds = [type(cache) for cache in engine.state_shapes().caches]
    assert kinds == [RingCache, PagedCache, RingCache, PagedCache, NoCache, NoCache]
    ours = play(engine, (0, 2), most=400)
    assert {"feed", "swap_out", "swap_in"} <= {name for name, _ in engine._started}
    assert ours.keys() == theirs.keys()
    for key, one in theirs.items():
        assert one.token_ids.tolist() == ours[key].token_ids.tolist()
        assert np.abs(one.logprobs - ours[key].logprobs).max() < TOLERANCE
