"""Attention by blocks and by kernels against the reference: values and gradients, ragged, several
groups in a row."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    ON_POLICY,
    QWEN3,
    batches,
    learner,
    random_groups,
    random_parameters,
    relative,
    roles,
)

from shoal.config.commands import EvalConfig, GenerateConfig
from shoal.config.sections.model import ModelSection
from shoal.config.sections.optimizer import OptimizerSection
from shoal.config.train import Config
from shoal.job.job import Job
from shoal.mesh import Role
from shoal.model.architecture import Layer
from shoal.model.attention import gpu as gpu_attention
from shoal.model.attention import selector
from shoal.model.attention import tpu as tpu_attention
from shoal.model.attention import trials as kernel_trials
from shoal.model.attention.blocked import attend_by_blocks
from shoal.model.attention.caches import cache_size, keys_at_once
from shoal.model.attention.reference import attend_at_once
from shoal.model.attention.rule import (
    Blocks,
    Spans,
    Tokens,
    blocks_of,
    full_blocks,
    needed_blocks,
    reads,
    spans_of,
)
from shoal.model.attention.selector import attention_kind, by_pages, decodes_by_kernel
from shoal.model.attention.softmax import PLAIN, Scoring, kernel_fault_of, largest_block
from shoal.model.attention.spans import attend_by_spans
from shoal.model.parameters import shardings
from shoal.model.rotary import rotate
from shoal.model.transformer import Model
from shoal.plan.analysis import inner_jaxprs, jaxpr_flops
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.trainer.loss import batch_loss
from shoal.trainer.step import Learner, check_lengths
from shoal.weights.source import ModelSource, make_model


def rows_of(size: int) -> tuple[np.ndarray, np.ndarray]:
    """A row of ragged groups with padding at its end, one of a single prompt, one of padding
    alone."""
    rng = np.random.default_rng(0)
    segment, prompt = np.zeros((2, 3, size), np.int32)
    at, number = 0, 0
    while at < size - 5:
        number += 1
        first = number
        for length in rng.integers(1, size // 4, 4):
            end = min(at + length, size - 5)
            segment[0, at:end], prompt[0, at:end] = number, first
            at, number = end, number + 1
    segment[1], prompt[1] = 1, 1
    return segment, prompt


def places(segment: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """The position in its sequence of each token: those of its segment before it, and of its
    prompt's. Padding has any, here -7."""
    found = np.full(segment.shape, -7, np.int32)
    for row, at in zip(*segment.nonzero(), strict=True):
        own, first = segment[row, at], prompt[row, at]
        found[row, at] = (segment[row, :at] == own).sum()
        if first != own:
            found[row, at] += (segment[row] == first).sum()
    return found


def allowed(segment: np.ndarray, prompt: np.ndarray, window: int = 0) -> np.ndarray:
    """The rule, token by token: [R, T, T]. With a window, the last so many keys of a sequence."""
    rows, size = segment.shape
    found = np.zeros((rows, size, size), bool)
    for row in range(rows):
        for query in range(size):
            for key in range(query + 1):
                found[row, query, key] = segment[row, query] > 0 and (
                    segment[row, key] in (segment[row, query], prompt[row, query])
                )
            if window:
                found[row, query, found[row, query].nonzero()[0][:-window]] = False
    return found


def by_rule(q, k, v, segment, prompt):
    """Softmax in float64 over the keys of the rule."""
    mask, share = allowed(segment, prompt), q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, share, 2) for x in (k, v))
    scores = np.where(
        mask[:, None], np.einsum("rqha,rtha->rhqt", q, k) * q.shape[-1] ** -0.5, -np.inf
    )
    p = np.exp(scores - np.where(mask.any(-1), scores.max(-1).min(1), 0)[:, None, :, None])
    total = p.sum(-1, keepdims=True)
    return np.einsum("rhqt,rtha->rqha", p / np.where(total == 0, 1, total), v)


def inputs(size: int, heads: int, key_heads: int, head_dim: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    result = []
    for n in (heads, key_heads, key_heads, heads):
        result.append(rng.standard_normal((3, size, n, head_dim)))
    return result


def blocked(block: int, at_once: int):
    def attention(q, k, v, query, key, scoring=PLAIN, sinks=None):
        blocks = blocks_of(query, key, block, window=scoring.window)
        return attend_by_blocks(q, k, v, blocks, at_once, scoring, sinks)

    return attention


def by_spans(block: int, tile: int):
    def attention(q, k, v, query, key, scoring=PLAIN, sinks=None):
        spans = spans_of(query, key, block, tile, scoring.window)
        return attend_by_spans(q, k, v, spans, tile, scoring, sinks)

    return attention


def on_tpu(q, k, v, query, key):
    """Of q and k that are turned back before."""
    size = k.shape[1] * k.shape[3] // 2
    angles = jax.random.uniform(jax.random.key(0), (1, size), maxval=6.0).reshape(
        1, k.shape[1], 1, -1
    )
    of_keys = jnp.cos(angles), -jnp.sin(angles)
    of_queries = tuple(jnp.take_along_axis(x, query.position[..., None, None], 1) for x in of_keys)
    q, k = rotate(q, *of_queries), rotate(k, *of_keys)
    own, others = (
        jnp.broadcast_to(
            tpu_attention.side_by_side((cos, -sin)), (len(q), cos.shape[1], q.shape[3])
        )
        for cos, sin in (of_queries, of_keys)
    )
    flat_q, flat_k, flat_v = (jax.lax.collapse(x, 2) for x in (q, k, v))
    pairs = tpu_attention.block_pairs(query, key)
    out = tpu_attention.attend_rows(flat_q, flat_k, flat_v, (own, others), pairs, interpret=True)
    return out.reshape(q.shape)


def by_pallas(block: int):
    def attention(q, k, v, query, key):
        readings = gpu_attention.block_lists(query, key, block)
        return gpu_attention.attend_rows(q, k, v, readings, interpret=True)

    return attention


def in_parts(attention, count: int):
    """Each part of the rows' queries by itself, as on the devices of `mesh.context`."""

    def whole(q, k, v, query, key, *rest):
        parts = jax.tree.map(lambda x: jnp.stack(jnp.split(x, count, 1)), (q, query))
        results = []
        for number in range(count):
            own, tokens = jax.tree.map(itemgetter(number), parts)
            results.append(attention(own, k, v, tokens, key, *rest))
        return jnp.concatenate(results, 1)

    return whole


@pytest.mark.slow
def test_the_reference_reads_what_the_rule_says():
    (q, k, v, _), (segment, prompt) = inputs(32, 4, 2, 8), rows_of(32)
    tokens = Tokens.of(jnp.asarray(segment), jnp.asarray(prompt))
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    found = attend_at_once(*arrays, query=tokens, key=tokens)
    np.testing.assert_allclose(found, by_rule(q, k, v, segment, prompt), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "size", "heads", "key_heads", "head_dim"),
    [
        pytest.param(blocked(16, 0), 96, 4, 2, 8, id="blocked"),
        pytest.param(blocked(8, 4), 64, 2, 2, 16, id="blocked in parts"),
        pytest.param(blocked(32, 1), 96, 6, 1, 8, id="one key head"),
        pytest.param(by_spans(16, 24), 96, 4, 2, 8, id="spans"),
        pytest.param(by_spans(32, 96), 96, 6, 1, 8, id="spans, a row a tile"),
        pytest.param(in_parts(by_spans(8, 16), 2), 96, 2, 2, 16, id="spans of a part"),
        pytest.param(on_tpu, 300, 8, 4, 64, id="TPU", marks=pytest.mark.slow),
        pytest.param(on_tpu, 520, 3, 1, 128, id="TPU, one key head", marks=pytest.mark.slow),
        pytest.param(on_tpu, 300, 8, 1, 512, id="TPU, wide heads", marks=pytest.mark.slow),
        pytest.param(by_pallas(16), 90, 6, 2, 24, id="pallas"),
        pytest.param(
            by_pallas(64), 200, 4, 2, 128, id="pallas in a GPU's tiles", marks=pytest.mark.slow
        ),
        pytest.param(in_parts(attend_at_once, 2), 64, 4, 2, 8, id="reference of a part"),
        pytest.param(in_parts(blocked(16, 0), 3), 96, 4, 2, 8, id="blocked of a part"),
        pytest.param(in_parts(on_tpu, 2), 600, 2, 2, 48, id="TPU, a part", marks=pytest.mark.slow),
        pytest.param(
            in_parts(by_pallas(16), 2), 90, 4, 2, 24, id="pallas of a part", marks=pytest.mark.slow
        ),
    ],
)
def test_values_and_gradients_are_the_references(attention, size, heads, key_heads, head_dim):
    tokens = Tokens.of(*map(jnp.asarray, rows_of(size)))
    *arrays, weight = inputs(size, heads, key_heads, head_dim)

    def results(attention, dtype):
        exact = [jnp.asarray(x, dtype) for x in arrays]

        def value(*args):
            out = attention(*args, tokens, tokens)
            return (out.astype(jnp.float32) * weight).sum(), out

        (_, out), gradient = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))(
            *exact
        )
        return [np.asarray(x, np.float64) for x in (out, *gradient)]

    ours, exact = results(attention, jnp.float32), results(attend_at_once, jnp.float32)
    for one, other in zip(ours, exact, strict=True):
        assert relative(one, other) < 1e-6
    assert not ours[0][2].any() and not any(x[2].any() for x in ours[1:])  # padding
    half, rounded = results(attention, jnp.bfloat16), results(attend_at_once, jnp.bfloat16)
    for one, reference, other in zip(half, rounded, exact, strict=True):
        assert relative(one, other) < 1.5 * max(relative(reference, other), 2e-3)


def with_a_column_of_sinks(q, k, v, sinks, mask, scoring):
    """What gpt-oss computes in transformers: the sinks are one more column of scores, which is
    dropped after the softmax. A query without keys gives 0."""
    share = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, share, 2) for x in (k, v))
    scores = jnp.einsum("rqha,rtha->rhqt", q, k) * q.shape[-1] ** -0.5
    if scoring.cap:
        scores = scoring.cap * jnp.tanh(scores / scoring.cap)
    has_keys = mask.any(-1)[:, None, :, None]
    scores = jnp.where(mask[:, None] | ~has_keys, scores, -jnp.inf)
    column = jnp.full((*scores.shape[:-1], 1), -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], column.shape)
    p = jax.nn.softmax(jnp.concatenate([scores, column], -1), -1)[..., :-1]
    return jnp.einsum("rhqt,rtha->rqha", jnp.where(has_keys, p, 0.0), v)


def value_and_gradients(function, arrays, weight) -> list[np.ndarray]:
    """Of the sum of weight * function(*arrays), as float64: the function's result and the gradients
    of all arrays."""

    def total(args):
        out = function(*args)
        return (out.astype(weight.dtype) * weight).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(tuple(arrays))
    return [np.asarray(x, np.float64) for x in (out, *gradients)]


SCORINGS = [
    pytest.param(
        Scoring(cap, window),
        has_sinks,
        marks=[] if (cap, window, has_sinks) == (1.5, 5, True) else pytest.mark.slow,
    )
    for cap, window, has_sinks in product((0.0, 1.5), (0, 1, 5, 40), (False, True))
]


@pytest.mark.parametrize(("scoring", "has_sinks"), SCORINGS)
def test_windows_caps_and_sinks_are_those_of_float64(scoring, has_sinks):
    """In value and gradient. Windows are shorter than a block of 16 tokens, and longer; prompts are
    longer than most windows, and have several completions in a row."""
    segment, prompt = rows_of(96)
    mask = allowed(segment, prompt, scoring.window)
    *arrays, weight = inputs(96, 4, 2, 8)
    if has_sinks:
        arrays.append(np.random.default_rng(2).standard_normal(4) + 1)

    def oracle(q, k, v, sinks=None):
        return with_a_column_of_sinks(q, k, v, sinks, jnp.asarray(mask), scoring)

    with jax.enable_x64(True):
        wanted = value_and_gradients(oracle, [jnp.asarray(x) for x in arrays], jnp.asarray(weight))
    tokens = Tokens.of(*(jnp.asarray(x) for x in (segment, prompt, places(segment, prompt))))
    for form in (attend_at_once, blocked(16, 4), by_spans(16, 20)):

        def ours(q, k, v, sinks=None, form=form):
            return form(q, k, v, tokens, tokens, scoring, sinks)

        single = [jnp.asarray(x, jnp.float32) for x in arrays]
        found = value_and_gradients(ours, single, jnp.asarray(weight, jnp.float32))
        for one, other in zip(found, wanted, strict=True):
            if other.any():
                assert relative(one, other) < 1e-6
            else:  # queries that read one key each give it the weight 1, whatever its score
                assert np.abs(one).max() < 2e-6
        assert not found[0][2].any() and not any(x[2].any() for x in found[1:4])  # padding


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [blocked(16, 0), in_parts(blocked(16, 0), 3), in_parts(by_spans(16, 20), 3)]
)
def test_windows_caps_and_sinks_in_bfloat16_and_in_parts_of_rows(form):
    segment, prompt = rows_of(96)
    tokens = Tokens.of(*(jnp.asarray(x) for x in (segment, prompt, places(segment, prompt))))
    *arrays, weight = inputs(96, 4, 2, 8)
    arrays.append(np.random.default_rng(2).standard_normal(4) + 1)

    def results(form, dtype):
        def attention(q, k, v, sinks):
            q, k, v = (x.astype(dtype) for x in (q, k, v))
            return form(q, k, v, tokens, tokens, Scoring(1.5, 5), sinks)

        single = [jnp.asarray(x, jnp.float32) for x in arrays]
        return value_and_gradients(attention, single, jnp.asarray(weight, jnp.float32))

    exact = results(attend_at_once, jnp.float32)
    for one, other in zip(results(form, jnp.float32), exact, strict=True):
        assert relative(one, other) < 1e-6
    half, rounded = results(form, jnp.bfloat16), results(attend_at_once, jnp.bfloat16)
    for one, reference, other in zip(half, rounded, exact, strict=True):
        assert relative(one, other) < 1.5 * max(relative(reference, other), 2e-3)


def test_a_completion_reads_through_its_window_the_last_keys_of_its_prompt_alone():
    """A prompt of 10 tokens with completions of 3 and 4, through a window of 4."""
    segment = np.array([[1] * 10 + [2] * 3 + [3] * 4 + [0]])
    prompt = np.array([[1] * 17 + [0]])
    tokens = Tokens.of(*(jnp.asarray(x) for x in (segment, prompt, places(segment, prompt))))
    mask = np.asarray(reads(tokens.to_meet(2), tokens.to_meet(1), window=4))[0]
    read = {query: mask[query].nonzero()[0].tolist() for query in (2, 9, 10, 12, 13, 16, 17)}
    assert read == {
        2: [0, 1, 2],
        9: [6, 7, 8, 9],
        10: [7, 8, 9, 10],
        12: [9, 10, 11, 12],
        13: [7, 8, 9, 13],
        16: [13, 14, 15, 16],
        17: [],
    }


@pytest.mark.parametrize("form", [attend_at_once, blocked(16, 0), by_spans(16, 32)])
def test_padding_gives_sinks_no_gradient(form):
    (q, k, v, _), padding = inputs(32, 4, 2, 8), jnp.zeros((3, 32), jnp.int32)
    tokens = Tokens.of(padding, padding)

    def total(sinks):
        out = form(*(jnp.asarray(x) for x in (q, k, v)), tokens, tokens, Scoring(), sinks)
        return out.sum(), out

    gradient, out = jax.grad(total, has_aux=True)(jnp.array([-90.0, 0.0, 1.0, 90.0]))
    assert not gradient.any() and not out.any()


@pytest.mark.slow
@pytest.mark.bitwise
@pytest.mark.parametrize("form", [attend_at_once, blocked(16, 4), by_spans(16, 20)])
def test_a_window_longer_than_all_sequences_changes_no_bit(form):
    segment, prompt = rows_of(96)
    tokens = Tokens.of(*(jnp.asarray(x) for x in (segment, prompt, places(segment, prompt))))
    *arrays, weight = (jnp.asarray(x, jnp.float32) for x in inputs(96, 4, 2, 8))
    found = []
    for scoring in (Scoring(), Scoring(window=96)):
        attention = partial(form, query=tokens, key=tokens, scoring=scoring)
        found.append(value_and_gradients(attention, arrays, weight))
    for ours, plain in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_a_window_over_tokens_without_places_is_an_error():
    tokens = Tokens.of(*[jnp.ones((1, 16), jnp.int32)] * 2)
    with pytest.raises(ValueError, match="place in the sequence"):
        needed_blocks(tokens, tokens, 8, window=4)
    with pytest.raises(ValueError, match="place in the sequence"):
        reads(tokens.to_meet(2), tokens.to_meet(1), window=4)


def test_what_the_kernels_cannot_compute_is_named():
    assert kernel_fault_of(Scoring(), sinks=False) == ""
    assert kernel_fault_of(Scoring(window=8), sinks=False) == "the kernels have no windows"
    assert kernel_fault_of(Scoring(30.0, 8), sinks=True) == (
        "the kernels have no windows and no soft caps and no sinks"
    )


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_another_scale_of_scores_costs_no_kernel(platform, monkeypatch):
    """As Gemma 3 27B has it, in its layers without a window."""
    monkeypatch.setattr(Role, "platform", platform)
    a = replace(QWEN3, head_dim=128, query_scale=168**-0.5)
    assert attention_kind(Model(a, roles().trainer), 1, 4096) == "pallas"
    assert decodes_by_kernel(Model(a, roles().sampler))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_window_that_hides_no_key_costs_no_kernel(platform, monkeypatch):
    """Mistral 7B's, with prompts and completions of 4,096 tokens together."""
    monkeypatch.setattr(Role, "platform", platform)
    a = replace(QWEN3, head_dim=64, pattern=(Layer(window=4096),))
    model = Model(a, roles().trainer)
    assert attention_kind(model, 1, 4096) == "pallas"
    assert attention_kind(model, 1, 4352) != "pallas"
    assert attention_kind(replace(model, longest_sequence=4096), 1, 4352) == "pallas"
    assert attention_kind(replace(model, longest_sequence=4097), 1, 4352) != "pallas"
    sampler = model.on(roles().sampler)
    assert not decodes_by_kernel(sampler)
    assert not decodes_by_kernel(replace(sampler, longest_sequence=4097))
    assert decodes_by_kernel(replace(sampler, longest_sequence=4096))
    paged = by_pages(replace(sampler, longest_sequence=4096), a.pattern[0])
    assert paged == (platform == "tpu")


@pytest.mark.slow
@pytest.mark.bitwise
@pytest.mark.parametrize("longest_sequence", [0, 32])
def test_a_window_that_hides_no_key_changes_no_log_prob(longest_sequence):
    """Nor is a longer sequence computed without it."""
    groups = random_groups(QWEN3, 3, 4, 16, 16)
    (batch,) = batches(groups)
    assert batch.tokens.shape[1] > 128  # computed by blocks
    parameters = random_parameters(QWEN3)
    window = longest_sequence or batch.tokens.shape[1]
    found = []
    for a in (QWEN3, replace(QWEN3, pattern=(Layer(window=window),))):
        one = learner(a, longest_sequence=longest_sequence)
        found.append(np.asarray(one.score(parameters, batch)))
    np.testing.assert_array_equal(*found)


def test_a_sequence_longer_than_a_window_that_is_left_out_is_an_error():
    (batch,) = batches(random_groups(QWEN3, 3, 4, 16, 16))
    local = replace(QWEN3, pattern=(Layer(window=31), Layer(window=64)))
    model = Model(local, roles().trainer)
    check_lengths(model, batch)
    check_lengths(replace(model, longest_sequence=32), batch)
    with pytest.raises(
        ShoalError, match=r"has 32 tokens, .* at most 30: .* without its window of 31 tokens"
    ):
        check_lengths(replace(model, longest_sequence=30), batch)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 5, 12, 40])
@pytest.mark.parametrize("block", [8, 32])
def test_a_window_leaves_out_the_blocks_before_it_and_none_that_is_needed(block, window):
    segment, prompt = rows_of(96)
    tokens = Tokens.of(*(jnp.asarray(x) for x in (segment, prompt, places(segment, prompt))))
    pairs = allowed(segment, prompt, window).reshape(3, 96 // block, block, 96 // block, block)
    wanted = np.asarray(pairs.any((2, 4)))
    whole = np.asarray(full_blocks(tokens, tokens, block, window))
    one = (segment.reshape(3, -1, block).min(-1) == segment.reshape(3, -1, block).max(-1))[:, None]
    np.testing.assert_array_equal(whole, pairs.all((2, 4)) & one)
    found = np.asarray(needed_blocks(tokens, tokens, block, window))
    assert np.all(found >= wanted)
    np.testing.assert_array_equal(found[1], wanted[1])  # a single sequence
    assert (found & ~wanted).sum() <= len(np.unique(segment[0]))
    # Queries of a part of the rows.
    half = jax.tree.map(lambda x: x[:, 32:64], tokens)
    np.testing.assert_array_equal(
        needed_blocks(half, tokens, block, window), found[:, 32 // block : 64 // block]
    )


def test_the_end_of_a_completion_in_a_block_does_not_make_its_beginning_needed():
    """Two completions of 44 and 42 tokens after a prompt of 8, through a window of 4, in blocks of
    8: each block reads itself and the one before, or the prompt. Padding in the last block reads
    nothing."""
    segment = np.repeat([[1, 2, 3, 0]], [8, 44, 42, 2], 1)
    prompt = (segment > 0).astype(np.int32)
    tokens = Tokens.of(*(jnp.asarray(x) for x in (segment, prompt, places(segment, prompt))))
    found = np.asarray(needed_blocks(tokens, tokens, 8, window=4))[0]
    wanted = allowed(segment, prompt, 4).reshape(12, 8, 12, 8).any((1, 3))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("block", [8, 32])
def test_no_block_that_is_needed_is_left_out_and_few_others_are_computed(block):
    segment, prompt = rows_of(96)
    read, tokens = allowed(segment, prompt), Tokens.of(jnp.asarray(segment), jnp.asarray(prompt))
    pairs = read.reshape(3, 96 // block, block, 96 // block, block)
    wanted, whole = pairs.any((2, 4)), np.asarray(full_blocks(tokens, tokens, block))
    # Keys of two segments that are all read are masked, too.
    one = (segment.reshape(3, -1, block).min(-1) == segment.reshape(3, -1, block).max(-1))[:, None]
    np.testing.assert_array_equal(whole, pairs.all((2, 4)) & one)
    assert whole[0].any() == (block == 8) and whole[1].any()
    found = np.asarray(needed_blocks(tokens, tokens, block))
    assert (found >= wanted).all()
    # On the diagonal of blocks, a query and a key of its own segment may stand in the wrong order.
    assert (found & ~wanted).sum() <= len(np.unique(segment[0]))
    assert found[0].sum() < np.tri(96 // block).sum() or block > 8


@pytest.mark.parametrize("window", [0, 1, 5, 12, 40])
@pytest.mark.parametrize(("block", "tile"), [(8, 8), (16, 20), (32, 96)])
def test_two_spans_hold_all_that_a_block_reads(block, tile, window):
    segment, prompt = rows_of(96)
    tokens = Tokens.of(*(jnp.asarray(x) for x in (segment, prompt, places(segment, prompt))))
    spans = spans_of(tokens, tokens, block, tile, window)
    first, end = np.asarray(spans.first), np.asarray(spans.end)
    key = np.arange(96)
    inside = (key >= first[..., None]) & (key < end[..., None])  # [R, n, 2, T]
    read = allowed(segment, prompt, window).reshape(3, 96 // block, block, 96).any(2)
    times = inside.sum(2)  # each key is in how many spans
    assert (times <= 1).all() and not (read & (times == 0)).any()
    assert not inside[2].any()  # padding
    half = jax.tree.map(lambda x: x[:, 32:64], tokens)  # queries of a part of the rows
    np.testing.assert_array_equal(
        spans_of(half, tokens, block, tile, window).first, first[:, 32 // block : 64 // block]
    )


def test_a_completion_takes_the_tiles_of_its_causal_half():
    """Four completions of 64 tokens after a prompt of 16, in blocks and tiles of 16: block n of a
    completion takes the prompt's tile and n + 1 of its own, whichever completion it is."""
    segment = np.repeat([[1, 2, 3, 4, 5]], [16, 64, 64, 64, 64], 1)
    tokens = Tokens.of(jnp.asarray(segment), jnp.ones_like(segment))
    spans = spans_of(tokens, tokens, 16, 16)
    tiles = np.asarray(-(-(spans.end - spans.first) // 16)).sum(-1)[0]
    assert tiles.tolist() == [1] + 4 * [2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "kind", "platform", "longest"),
    [
        ((1, 1, 1), "blocked", "cpu", 0),
        ((1, 2, 2, 2), "blocked", "cpu", 0),
        ((1, 1, 1), "blocked", "cpu", selector.LONG),  # by spans
        ((1, 2, 2, 2), "blocked", "cpu", selector.LONG),
        ((2, 1, 2, 2), "pallas", "gpu", 0),
        ((1, 1, 1), "pallas", "tpu", 0),
        ((1, 2, 2, 2), "pallas", "tpu", 0),
    ],
)
def test_log_probs_and_gradients_of_a_model_are_those_of_the_reference(
    mesh, kind, platform, longest, monkeypatch
):
    def row_kernel_refusal(model, layer, size):
        return ""

    monkeypatch.setattr(selector, "_row_kernel_refusal", row_kernel_refusal)
    for module in (gpu_attention, tpu_attention):
        monkeypatch.setattr(module, "attend_rows", partial(module.attend_rows, interpret=True))
    a = replace(QWEN3, query_scale=0.4)
    groups = random_groups(a, 12, 3, 16, 16)
    where = roles(*mesh)
    (batch,) = batches(groups, shards=where.trainer.row_shards // where.trainer.context)
    found = []
    for attention in ("reference", kind):
        if attention == kind and platform == "tpu":
            monkeypatch.setattr(Role, "platform", platform)
        model = Model(a, where.trainer, attention=attention, longest_sequence=longest)
        one = Learner(model, ON_POLICY, OptimizerSection(), 10)
        state = one.init(jax.device_put(random_parameters(a), shardings(a, where.trainer)))
        total, lp = one.accumulate(None, state, batch)
        found.append(
            [np.concatenate([np.ravel(x) for x in jax.tree.leaves(total.gradient)]), np.asarray(lp)]
        )
    for ours, exact in zip(*found, strict=True):
        assert 0 < relative(exact, ours) < 2e-6  # 1.01e-6 on some processors


def gradient_jaxpr(remat: Any, dtype=jnp.float32):
    (batch,) = batches(random_groups(QWEN3, 2, 2, 9, 8))
    model = Model(QWEN3, roles(1, 1, 1).trainer, jnp.dtype(dtype), remat, "blocked")
    return jax.make_jaxpr(jax.grad(lambda p: batch_loss(model, ON_POLICY, p, batch)[0]))(
        random_parameters(QWEN3)
    ).jaxpr


def test_long_sequences_go_by_spans_on_a_cpu_alone(monkeypatch):
    def reads_of(longest: int):
        model = Model(QWEN3, roles(1, 1, 1).trainer, attention="blocked", longest_sequence=longest)
        segment = jnp.ones((1, 512), jnp.int32)
        (found,) = selector.row_reads(model, segment, segment, segment)
        return type(found)

    assert reads_of(selector.LONG) is Spans
    assert reads_of(selector.LONG - 1) is reads_of(0) is Blocks
    monkeypatch.setattr(Role, "platform", "gpu")
    assert reads_of(selector.LONG) is Blocks


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_remat_computes_less_again_than_the_next(dtype):
    """In bfloat16 `dots` once computed all products again: the policy did not see those of cast
    weights."""
    kinds = ("none", "dots", "attention", "full")
    none, dots, attention, full = (jaxpr_flops(gradient_jaxpr(remat, dtype)) for remat in kinds)
    assert none == dots < attention < full  # dots keeps what attention's own backward pass needs
    assert jaxpr_flops(gradient_jaxpr("offload", dtype)) == attention


@pytest.mark.slow
def test_no_product_is_float32_where_bfloat16_is_meant():
    def types(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                yield {x.aval.dtype.name for x in equation.invars}
            for inner in inner_jaxprs(equation.params):
                yield from types(inner)

    found = list(types(gradient_jaxpr("full", jnp.bfloat16)))
    assert len(found) > 30 and all(one == {"bfloat16"} for one in found)


def test_the_kind_follows_from_device_and_shape(monkeypatch):
    wide = replace(QWEN3, num_heads=64, num_kv_heads=8, head_dim=64)
    one, eight = (Model(wide, roles(*mesh).trainer) for mesh in ((1, 1, 1), (1, 1, 8)))
    kept = replace(one, remat="none")  # the scores of all layers

    def kinds(rows: int, size: int) -> list[str]:
        result = []
        for model in (one, eight, kept):
            result.append(attention_kind(model, rows, size))
        return result

    assert kinds(4, 128) == ["reference"] * 3 and kinds(1, 256) == ["blocked"] * 3
    monkeypatch.setattr(Role, "platform", "gpu")
    assert kinds(1, 511) == ["reference"] * 3 and kinds(1, 512) == kinds(1, 16384) == ["pallas"] * 3
    one, eight, kept = (
        replace(model, architecture=replace(wide, head_dim=320)) for model in (one, eight, kept)
    )
    assert kinds(1, 4096) == ["blocked", "reference", "blocked"] and kinds(2, 1500) == [
        "reference"
    ] * 2 + ["blocked"]
    one, eight, kept = (replace(model, architecture=wide) for model in (one, eight, kept))
    monkeypatch.setattr(Role, "platform", "tpu")
    assert kinds(1, 256) == ["reference"] * 3 and kinds(1, 512) == ["pallas"] * 3
    for head_dim, kind in ((512, "pallas"), (640, "reference")):  # Gemma 4 has 512
        wider = replace(one, architecture=replace(wide, head_dim=head_dim))
        assert attention_kind(wider, 1, 2048) == kind
    assert attention_kind(replace(one, attention="reference"), 1, 16384) == "reference"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_that_work_have_no_fault(dtype):
    assert kernel_trials.fault_on(jax.devices()[0], 3, 24, dtype, interpret=True) == ""


@pytest.mark.slow
def test_kernels_that_do_not_compile_or_give_other_results_are_not_taken(monkeypatch):
    """A CPU compiles none; a wrong sum or gradient is found by its size."""
    device, right = jax.devices()[0], gpu_attention.attend_rows
    assert "interpret mode" in kernel_trials.fault_on(device, 2, 16, "float32")
    faults = {
        "values": lambda q, k, v, *rest: 1.01 * right(q, k, v, *rest),
        "dv": lambda q, k, v, *rest: right(q, k, jax.lax.stop_gradient(v), *rest),
        "values differ by nan": lambda q, k, v, *rest: right(q, k, v * jnp.nan, *rest),
    }
    for number, (text, wrong) in enumerate(faults.items(), 1):
        monkeypatch.setattr(kernel_trials, "attend_rows", wrong)
        assert f"their {text}" in kernel_trials.fault_on(
            device, number, 8, "float32", interpret=True
        )


@pytest.mark.slow
def test_memory_that_another_program_holds_is_no_lasting_fault(monkeypatch):
    def full(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    asked = jax.devices()[0], 1, 24, "float32", True
    with monkeypatch.context() as patched:
        patched.setattr(kernel_trials, "attend_rows", full)
        assert "RESOURCE_EXHAUSTED" in kernel_trials.fault_on(*asked)
    assert kernel_trials.fault_on(*asked) == ""


def test_a_model_on_a_gpu_has_blocked_attention_where_the_kernels_fail(monkeypatch):
    """Tried only on a device that is here, and not where attention was chosen."""
    spec, role = ModelSource(Path(), QWEN3, lambda *_: None), roles(1, 1, 1).trainer
    assert make_model(ModelSection(), QWEN3, role).attention == "auto"  # a CPU has none
    monkeypatch.setattr(Role, "platform", "gpu")
    tried = []

    def fault_on(*asked):
        return tried.append(asked) or "too old"

    monkeypatch.setattr(kernel_trials, "fault_on", fault_on)
    monkeypatch.setattr(jax, "local_devices", list)
    assert make_model(ModelSection(), QWEN3, role).attention == "auto" and not tried

    def local_devices():
        return list(role.mesh.devices.flat)

    monkeypatch.setattr(jax, "local_devices", local_devices)
    made = make_model(ModelSection(), QWEN3, role)
    assert made.attention == "blocked" and tried == [
        (role.mesh.devices.flat[0], 2, QWEN3.head_dim, "bfloat16")
    ]
    assert (
        make_model(ModelSection(attention="pallas"), QWEN3, role).attention == "pallas"
        and len(tried) == 1
    )
    for config in (EvalConfig(), GenerateConfig(), Config()):  # replay's jobs are of the last kind
        out = io.StringIO()
        with Job(
            config, Console(out), model_source=spec, devices=list(role.mesh.devices.flat)
        ) as job:
            assert job.model.attention == "blocked"
        assert (
            out.getvalue()
            == "attention is blocked: our kernels do not work on this GPU (too old)\n"
        )


def test_a_kernel_is_refused_where_it_cannot_run(monkeypatch):
    def refused(head_dim: int, size: int) -> str:
        a = replace(QWEN3, head_dim=head_dim)
        with pytest.raises(ShoalError) as raised:
            attention_kind(Model(a, roles(1, 1, 1).trainer, attention="pallas"), 1, size)
        return str(raised.value)

    assert refused(64, 64) == (
        "model.attention=pallas: pallas attention is for GPUs and TPUs, and this is a CPU; "
        "model.attention=auto uses reference here"
    )
    monkeypatch.setattr(Role, "platform", "tpu")
    assert "65,600 tokens, and at most 65,536" in refused(
        64, 65600
    ) and "auto uses blocked" in refused(64, 65600)
    monkeypatch.setattr(Role, "platform", "gpu")
    assert "head_dim is 320; model.attention=auto uses blocked here" in refused(320, 16384)


@pytest.mark.slow
def test_memory_grows_with_tokens():
    def temporaries(size: int, attention) -> int:
        shape = jax.ShapeDtypeStruct((1, size, 2, 8), jnp.float32)
        ones = Tokens.of(*[jnp.ones((1, size), jnp.int32)] * 2)
        compiled = (
            jax.jit(
                jax.grad(lambda q, k, v: attention(q, k, v, ones, ones).sum(), argnums=(0, 1, 2))
            )
            .lower(shape, shape, shape)
            .compile()
        )
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporaries(1024, blocked(64, 4)) < 2.2 * temporaries(512, blocked(64, 4))
    assert temporaries(1024, blocked(64, 4)) < temporaries(1024, attend_at_once) / 4
    assert temporaries(1024, by_spans(64, 64)) < temporaries(1024, blocked(64, 4))


@pytest.mark.parametrize("tokens", [1, 64, 200, 257, 320, 448, 500, 1600, 5000])
def test_a_cache_is_read_in_as_few_blocks_as_its_tokens_need(tokens):
    """1,600 tokens were read in 25 blocks of 64 on accelerators, since 256 does not divide them."""
    assert cache_size(tokens, "tpu") == -(-tokens // 128) * 128  # read by live pages
    for platform in ("cpu", "gpu"):
        size, most = cache_size(tokens, platform), keys_at_once(platform, tokens)
        assert tokens <= size < tokens + max(64 * -(-tokens // most), 64)
        assert size // largest_block(size, most) == -(-tokens // most)
