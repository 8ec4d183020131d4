"""Computation in bfloat16 over float32 parameters: sampler and trainer agree, and small updates are
not lost."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import call_of
from small import (
    GEMMA,
    HYBRID,
    QWEN3,
    SINKS,
    batches,
    learner,
    random_groups,
    random_parameters,
    relative,
    roles,
    whole,
)
from small_engine import play, played_groups, request

from shoal.model.attention.caches import ChunkedCache
from shoal.model.block import scaled_queries
from shoal.model.compiler_habits import gated_product
from shoal.model.linear import Adapted, Biased, Cast, linear, writing_float32
from shoal.model.rotary import rotary, rotate, rotate_by_product
from shoal.model.transformer import REMAT, Model, keeping_integers
from shoal.sampler.engine import Engine
from shoal.trainer.batch import BatchLayout, TokenTerms, pack, unpack
from shoal.trainer.loss import batch_logprobs
from shoal.weights.sampler_copy import publish_to


def largest_gap(dtype) -> tuple[float, float]:
    """(largest, mean) difference of the sampler's log-probs and the trainer's for the tokens of one
    engine."""
    parameters = random_parameters(QWEN3, scale=5.0)
    model = Model(QWEN3, roles().sampler, dtype)
    engine = Engine(
        model, slots=16, group_size=4, max_prompt_tokens=64, max_completion_tokens=64, eos_ids=()
    )
    engine.load(0, publish_to(model, parameters))
    assert {leaf.dtype for leaf in jax.tree.leaves(engine.parameters)} == {jnp.dtype(dtype)}
    requests = []
    for row, size in enumerate((20, 1, 64, 33)):
        requests.append(request(row, size, max_tokens=48))
    played = play(engine, requests)
    groups = played_groups(requests, played)
    zeros = np.zeros((4, 4))
    (batch,) = pack(groups, range(4), TokenTerms(zeros, zeros), BatchLayout([whole(groups)], 1.0))
    # float32 masters
    lps, _ = jax.jit(lambda p, b: batch_logprobs(model, p, b, 2**25))(parameters, batch.arrays)
    assert lps.dtype == jnp.float32
    gaps = np.concatenate(
        [
            np.abs(lp - groups[g].completions[i].logprobs)
            for (g, i), lp in unpack([batch], [np.asarray(lps)]).items()
        ]
    )
    return float(gaps.max()), float(gaps.mean())


@pytest.mark.slow
def test_log_probs_of_sampler_and_trainer_agree():
    """They read the same rounded weights; the order of sums is all that differs. bfloat16 has 8
    bits, a step of 1/256 relative to a logit."""
    largest, mean = largest_gap(jnp.bfloat16)
    assert largest < 0.1 and mean < 0.01
    assert largest_gap(jnp.float32)[0] < 2e-5 < mean  # so the first was bfloat16 indeed


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [QWEN3, HYBRID, GEMMA, SINKS])
def test_the_trainer_scores_as_a_model_with_its_rounded_weights(architecture):
    """Weights that no product has, such as norms and sinks, were read as the float32 masters by the
    trainer and rounded by the sampler and the reference."""
    masters = random_parameters(architecture, scale=5.0)
    model = Model(architecture, roles().trainer, jnp.bfloat16)
    (batch,) = batches(random_groups(architecture, 3, 4, 20, 20))
    score = jax.jit(lambda parameters: batch_logprobs(model, parameters, batch, 2**25)[0])
    of_masters = np.asarray(score(masters))
    of_published = np.asarray(score(publish_to(model, masters)))
    assert np.array_equal(of_masters, of_published)


def test_a_scale_of_scores_is_not_rounded_before_it_multiplies_queries():
    """Rounded, it would change all scores by up to 1/512: another temperature of the softmax."""
    query_scale = 168**-0.5
    q = jax.random.normal(jax.random.key(0), (1, 64, 2, 128), jnp.bfloat16)
    ours = np.asarray(scaled_queries(q, query_scale), np.float64)
    exact = np.asarray(q, np.float64) * query_scale * 128**0.5
    changes = ours / exact - 1
    assert np.abs(changes).max() <= 2**-8  # bfloat16's own rounding
    assert abs(changes.mean()) < 2**-12
    factor = np.float64(jnp.bfloat16(query_scale * 128**0.5)) / (query_scale * 128**0.5)
    assert abs(factor - 1) > 2**-10  # what it would have been


@pytest.mark.slow
def test_an_update_moves_float32_masters_by_less_than_bfloat16_can_hold():
    groups = random_groups(QWEN3, 3, 4, 20, 20)
    (batch,) = batches(groups)
    parameters = random_parameters(QWEN3)
    results = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        one = learner(QWEN3, lr=1e-6, dtype=dtype)
        state = one.init(parameters)
        total, lp = one.accumulate(None, state, batch)
        gradient = jax.device_get(total.gradient)
        after, applied = one.apply(state, total)
        assert int(applied.skipped) == 0 and lp.dtype == jnp.float32
        for tree in (gradient, after.trainable, after.optimizer):
            kinds = {leaf.dtype for leaf in jax.tree.leaves(tree)}
            assert kinds <= {np.dtype(np.float32), np.dtype(np.int32)}  # counters are int32
        results[dtype] = gradient, after
    (exact, _), (rounded, after) = results.values()
    for name in ("embed_tokens", "final_norm"):
        assert 1e-4 < relative(getattr(rounded, name), getattr(exact, name)) < 0.1
    moved = kept = count = 0
    for new, old in zip(jax.tree.leaves(after.trainable), jax.tree.leaves(parameters), strict=True):
        new, old = np.asarray(new), np.asarray(old)
        moved += int((new != old).sum())
        kept += int((new.astype(jnp.bfloat16) == old.astype(jnp.bfloat16)).sum())
        count += new.size
    # in bfloat16 most of this update would have been lost
    assert moved > 0.9 * count and kept > 0.95 * count


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_tpus_compute_in_another_way_has_the_same_values_and_gradients(dtype):
    """To the bit where it is the same sums: compared without a compiler, which may sum in another
    order."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((2, 5, 3, QWEN3.head_dim)), dtype)
    (rope,) = rotary(QWEN3, jnp.arange(10).reshape(2, 5))
    model = Model(QWEN3, roles().trainer, dtype)
    gate, up, down = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((2, 5, 24), (2, 5, 24), (24, 8))
    )
    pairs = [
        (lambda q: rotate(q, *rope), lambda q: rotate_by_product(q, *rope), (q,)),
        (
            lambda *x: linear(x[2], jax.nn.silu(x[0]) * x[1]),
            lambda *x: gated_product(model, *x),
            (gate, up, down),
        ),
    ]
    with jax.disable_jit():
        for plain, other, inputs in pairs:
            (value, backward), (other_value, other_backward) = (
                jax.vjp(plain, *inputs),
                jax.vjp(other, *inputs),
            )
            np.testing.assert_array_equal(value, other_value)
            given = jnp.asarray(rng.standard_normal(value.shape), dtype)
            for one, another in zip(backward(given), other_backward(given), strict=True):
                np.testing.assert_array_equal(one, another)


KERNEL = np.random.default_rng(0).standard_normal((48, 24)).astype(np.float32)


@pytest.mark.parametrize(
    "weight",
    [
        jnp.asarray(KERNEL, jnp.bfloat16),
        Cast(jnp.asarray(KERNEL, jnp.bfloat16), jnp.asarray(KERNEL)),
        Biased(jnp.asarray(KERNEL, jnp.bfloat16), jnp.ones(24)),
        Adapted(
            jnp.asarray(KERNEL, jnp.bfloat16),
            Cast(jnp.asarray(KERNEL[:, :4], jnp.bfloat16), jnp.asarray(KERNEL[:, :4])),
            jnp.asarray(KERNEL[:4], jnp.bfloat16),
            scale=2.0,
        ),
    ],
    ids=["plain", "cast", "biased", "adapted"],
)
def test_products_that_are_written_in_float32_have_the_same_values_and_gradients(weight):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 16, 48)), jnp.bfloat16)

    def value_and_gradients(weight):
        value, backward = jax.vjp(linear, weight, x)
        return value, backward(jnp.ones_like(value))

    expected = value_and_gradients(weight)
    found = value_and_gradients(writing_float32(weight, jnp.bfloat16))
    gradients = jax.tree.leaves(expected[1])
    assert [leaf.dtype for leaf in jax.tree.leaves(found[1])] == [leaf.dtype for leaf in gradients]
    for one, another in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # One place of bfloat16, of which the sums may be rounded to either side.
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(another, np.float32), rtol=2**-7, atol=1e-2
        )


def test_a_product_that_is_written_in_float32_may_be_transposed():
    """XLA for CPU folds a transposition into a product of bfloat16, and cannot compute the result:
    that of a tied head's gradient, for one."""
    x = jnp.ones((192, 48), jnp.bfloat16)
    master = jnp.asarray(KERNEL)

    def transposed(master, x):
        kernel = Cast(master.astype(jnp.bfloat16), master)
        weight = writing_float32(kernel, jnp.bfloat16)
        return linear(weight, x, jnp.float32).T

    def summed(table, x):
        return transposed(table.T, x).sum()

    assert jax.jit(transposed)(master, x).shape == (24, 192)
    gradient = jax.jit(jax.grad(summed))(master.T, x)
    np.testing.assert_array_equal(gradient, np.full((24, 48), 192.0))


def test_a_cpu_gets_its_products_of_bfloat16_in_the_form_that_it_does_not_widen():
    """Every product of an update and of its log-probs is written in float32, and no factor is an
    array that was only transposed: XLA for CPU widens the factors of all others to float32."""
    model = Model(QWEN3, roles().trainer, jnp.bfloat16)
    parameters = random_parameters(QWEN3)
    groups = random_groups(QWEN3, 1, 4, 12, 8)
    zeros = np.zeros((1, 4))
    (batch,) = pack(groups, range(1), TokenTerms(zeros, zeros), BatchLayout([whole(groups)], 1.0))

    def loss(parameters):
        return batch_logprobs(model, parameters, batch.arrays, 2**25)[0].sum()

    text = jax.jit(jax.grad(loss)).lower(parameters).as_text()
    products = re.findall(r"dot_general .*tensor<\S+xbf16>, tensor<\S+xbf16>\) -> (\S+)", text)
    assert len(products) >= 3 * 7  # of a layer's seven weights
    assert [kind for kind in products if not kind.endswith("xf32>")] == []
    num_transposed = 0
    for function in text.split("func.func"):  # a name is a function's own
        for name in re.findall(r"(%\S+) = stablehlo.transpose .*xbf16>", function):
            num_transposed += 1
            assert not re.search(rf"dot_general {name},|dot_general %\S+, {name},", function), name
    assert num_transposed


def test_a_cpu_does_not_convert_what_all_layers_keep_for_each_layer():
    """XLA for CPU converts an array of bfloat16 to float32, and back, to write a part of it: what a
    scan's layers keep would be converted as often as there are layers."""
    model = Model(QWEN3, roles().trainer, jnp.bfloat16)
    parameters = random_parameters(QWEN3)
    groups = random_groups(QWEN3, 1, 4, 12, 8)
    zeros = np.zeros((1, 4))
    (batch,) = pack(groups, range(1), TokenTerms(zeros, zeros), BatchLayout([whole(groups)], 1.0))

    def loss(parameters):
        return batch_logprobs(model, parameters, batch.arrays, 2**25)[0].sum()

    text = jax.jit(jax.grad(loss)).lower(parameters).compile().as_text()
    layers = QWEN3.num_layers
    assert re.search(rf"= u16\[{layers},", text)  # what they keep is there
    assert re.findall(rf"bf16\[({layers},[\d,]+)\]\) -> f32\[\1\]", text) == []


def test_a_cpu_does_not_convert_a_cache_for_each_token():
    """The cache of keys is float32: XLA for CPU would convert one of bfloat16 to float32, and back,
    to write one token into it, and 1,024 tokens would take four times as long."""
    a = replace(QWEN3, num_layers=1)
    engine = Engine(
        Model(a, roles().sampler, jnp.bfloat16),
        slots=8,
        group_size=4,
        max_prompt_tokens=16,
        max_completion_tokens=192,
        eos_ids=(),
    )
    args, shapes = call_of(engine, "decode")
    text = engine.programs["decode"].compile(*args, **shapes).as_text()
    (cache,) = engine.state_shapes().caches
    assert isinstance(cache, ChunkedCache)
    for array in (*cache.of_prompts, *cache.of_slots):
        sizes = ",".join(map(str, array.shape))
        assert f"f32[{sizes}]" in text
        assert f"bf16[{sizes}]" not in text


@pytest.mark.parametrize("remat", ["dots", "attention", "full"])
def test_a_layer_that_keeps_integers_has_the_same_gradients_and_passes_weights_on(remat):
    @REMAT[remat]
    def layer(x, weights, numbers):
        product = linear(weights["kernel"], x) * weights["scale"].astype(x.dtype)
        return x + jnp.tanh(product), (product.sum(), numbers + 1)

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((8, 16)), jnp.bfloat16)
    kernel = jnp.asarray(rng.standard_normal((16, 16)), jnp.bfloat16)
    weights = {"kernel": kernel, "scale": jnp.ones(16)}
    numbers = jnp.arange(8)

    def value_and_gradients(layer):
        (value, sums), backward, _ = jax.vjp(
            lambda *x: split(layer(*x, numbers)), x, weights, has_aux=True
        )
        return value, sums, backward((jnp.ones_like(value), jnp.ones_like(sums)))

    def split(result):
        x, (sums, numbers) = result
        return (x, sums), numbers

    expected = jax.jit(lambda: value_and_gradients(layer))()
    found = jax.jit(lambda: value_and_gradients(keeping_integers(layer)))()
    for one, another in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == another.dtype
        np.testing.assert_array_equal(one, another)

    _, kept = jax.vjp(lambda *x: keeping_integers(layer)(*x, numbers)[0], x, weights)
    shapes = {(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(kept)}
    assert ("uint16", (8, 16)) in shapes
    assert ("bfloat16", (16, 16)) in shapes
