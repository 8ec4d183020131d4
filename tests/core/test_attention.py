"""Attention by blocks against the reference: values and gradients, ragged, packed, with and without a prompt."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import ON_POLICY, QWEN3, batches, random_groups, random_parameters, relative, roles

from shoal.config.schema import OptimizerSection
from shoal.mesh import Role
from shoal.model.attention import Keys, attend, largest_block
from shoal.model.blocked_attention import KeyValues, attend_by_blocks
from shoal.model.kv_cache import cache_size, keys_at_once
from shoal.model.prefix_attention import attention_kind, prefill_attention, shared_prefix_attention
from shoal.model.splash_attention import attend_rows
from shoal.model.transformer import Model, shardings
from shoal.run.plan.flops import inner_jaxprs, jaxpr_flops
from shoal.trainer.loss import batch_loss
from shoal.trainer.step import Learner
from shoal.types import ShoalError

pytestmark = pytest.mark.compile_quickly

ROWS, SLOTS, HEAD_DIM = 2, 3, 8


def segments(size: int) -> np.ndarray:
    """Whole slots, slots of two completions and padding, an empty one."""
    found = np.zeros((ROWS, SLOTS, size), np.int32)
    found[0, 0] = 1
    found[0, 1, : size // 2], found[0, 1, size // 2 : size - 3] = 1, 2
    found[1, 0, :1] = 1
    found[1, 2, : size - 1] = 1
    return found


def reference(q, prefix: KeyValues, prefix_len, own: KeyValues, segment):
    size = segment.shape[-1]
    mask = (segment[..., None] == segment[..., None, :]) & np.tri(size, dtype=bool) & (segment > 0)[..., None]
    shared = Keys(*prefix, np.arange(prefix.k.shape[1]) < prefix_len[:, None]) if prefix.k.shape[1] else None
    return attend(q, shared, Keys(*own, mask))


def inputs(prefix: int, size: int, heads: int, key_heads: int, dtype):
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((*shape, HEAD_DIM)), dtype)

    q, weight = draw(ROWS, SLOTS, size, heads), draw(ROWS, SLOTS, size, heads)
    return q, KeyValues(draw(ROWS, prefix, key_heads), draw(ROWS, prefix, key_heads)), KeyValues(
        draw(ROWS, SLOTS, size, key_heads), draw(ROWS, SLOTS, size, key_heads)), weight


@pytest.mark.parametrize(("prefix", "size", "heads", "key_heads", "block"), [
    (24, 48, 4, 2, 16), (16, 16, 2, 2, 512), (0, 32, 4, 1, 8), (48, 24, 6, 2, 16),
])
def test_blocks_give_the_values_and_gradients_of_the_reference(prefix, size, heads, key_heads, block):
    prefix_len, segment = np.array([prefix - 5, 0], np.int32).clip(0), segments(size)

    def results(dtype):
        q, shared, own, weight = inputs(prefix, size, heads, key_heads, jnp.float32)
        exact = jax.tree.map(lambda x: x.astype(dtype), (q, shared, own))

        def value(attention, *args):
            return (attention(*args).astype(jnp.float32) * weight).sum()

        def by_blocks(q, shared, own):
            return attend_by_blocks(q, (shared, prefix_len), own, segment, block)

        def by_reference(q, shared, own):
            return reference(q, shared, prefix_len, own, segment)

        for attention in (by_blocks, by_reference):
            out = jax.jit(attention)(*exact)
            gradient = jax.jit(jax.grad(lambda *args, f=attention: value(f, *args), argnums=(0, 1, 2)))(*exact)
            yield [np.asarray(x, np.float64) for x in (out, *jax.tree.leaves(gradient))]

    ours, exact = results(jnp.float32)
    for one, other in zip(ours, exact, strict=True):
        assert relative(one, other) < 1e-6 if other.any() else not one.any()
    half, half_reference = results(jnp.bfloat16)
    for one, rounded, other in zip(half, half_reference, exact, strict=True):
        if other.any():
            assert relative(one, other) < 1.5 * max(relative(rounded, other), 2e-3)


def test_blocks_without_a_common_segment_are_not_computed():
    """Two completions of two blocks each: values that are not numbers in one do not reach the other, though 0 times
    them would, as it does in the reference."""
    size = 32
    segment = np.repeat([1, 2], size // 2)[None, None]
    q, _, own, _ = inputs(0, size, 2, 1, jnp.float32)
    q, own = q[:1, :1], KeyValues(own.k[:1, :1], own.v[:1, :1].at[:, :, : size // 2].set(jnp.nan))
    nothing, none = KeyValues(own.k[:, 0, :0], own.v[:, 0, :0]), np.zeros(1, np.int32)
    of_second = jax.jit(lambda own: attend_by_blocks(q, None, own, segment, 8)[:, :, size // 2 :])(own)
    assert np.isfinite(of_second).all()
    assert np.isnan(reference(q, nothing, none, own, segment)[:, :, size // 2 :]).all()


@pytest.mark.parametrize(("prefix", "slots", "size", "key_heads", "head_dim", "dtype"), [
    (70, 2, 150, 1, 64, jnp.float32), (70, 2, 150, 1, 64, jnp.bfloat16), (200, 0, 0, 2, 128, jnp.float32),
])
def test_splash_gives_the_values_and_gradients_of_the_reference(prefix, slots, size, key_heads, head_dim, dtype):
    """Its kernels run as JAX operations here; rows are padded to blocks of 128, of which some are skipped."""
    total, heads = prefix + slots * size, 2
    prefix_len = np.array([prefix - 5, 0], np.int32)
    segment = np.zeros((ROWS, slots, size), np.int32)
    if slots:
        segment[0, 0, :60], segment[0, 0, 60:140], segment[0, 1] = 1, 2, 1
        segment[1, 1, :1] = 1  # and an empty slot
    model = Model(QWEN3, roles(1, 1, 1).trainer, attention="reference")
    by_reference = (shared_prefix_attention(model, prefix, prefix_len, segment) if slots
                    else prefill_attention(model, prefix_len, prefix))
    rng = np.random.default_rng(0)
    q, k, v, weight = (jnp.asarray(rng.standard_normal((ROWS, total, count, head_dim)), dtype)
                       for count in (heads, key_heads, key_heads, heads))
    is_real = np.concatenate([np.arange(prefix) < prefix_len[:, None], segment.reshape(ROWS, slots * size) > 0], 1)
    weight = weight * is_real[..., None, None]  # what padding reads is of no account

    def results(attention, dtype):
        def value(*args):
            out = attention(*args)
            return (out * weight).astype(jnp.float32).sum(), out

        (_, out), gradient = jax.jit(jax.value_and_grad(value, (0, 1, 2), has_aux=True))(
            *(x.astype(dtype) for x in (q, k, v)))
        return [np.asarray(x, np.float64) for x in (out, *gradient)]

    ours = results(partial(attend_rows, prefix_len=prefix_len, segment=segment, interpret=True), dtype)
    assert not ours[0][~is_real].any()
    ours[0] += results(lambda *args: by_reference(*args, None)[0], dtype)[0] * ~is_real[..., None, None]
    exact = results(lambda *args: by_reference(*args, None)[0], jnp.float32)
    rounded = results(lambda *args: by_reference(*args, None)[0], dtype)
    for one, other, true in zip(ours, rounded, exact, strict=True):
        assert relative(one, true) < (1e-6 if dtype == jnp.float32 else 1.5 * max(relative(other, true), 2e-3))


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_log_probs_and_gradients_of_a_model_are_those_of_the_reference(mesh):
    groups = random_groups(QWEN3, 4, 3, 16, 16)
    where = roles(*mesh)
    (batch,) = batches(groups, shards=where.trainer.row_shards)
    found = []
    for attention in ("reference", "blocked"):
        one = Learner(Model(QWEN3, where.trainer, attention=attention), ON_POLICY, OptimizerSection(), 10)
        state = one.init(jax.device_put(random_parameters(QWEN3), shardings(QWEN3, where.trainer)))
        total, lp = one.accumulate(None, state, batch)
        found.append([np.concatenate([np.ravel(x) for x in jax.tree.leaves(total.gradient)]), np.asarray(lp)])
    for ours, exact in zip(*found, strict=True):
        assert 0 < relative(exact, ours) < 1e-6


def gradient_jaxpr(remat: str, dtype=jnp.float32):
    (batch,) = batches(random_groups(QWEN3, 2, 2, 9, 8))
    model = Model(QWEN3, roles(1, 1, 1).trainer, jnp.dtype(dtype), remat, "blocked")
    return jax.make_jaxpr(jax.grad(lambda p: batch_loss(model, ON_POLICY, p, batch)[0]))(random_parameters(QWEN3)).jaxpr


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_remat_computes_less_again_than_the_next(dtype):
    """In bfloat16 `dots` once computed all products again: the policy did not see those of cast weights."""
    kinds = ("none", "dots", "attention", "full")
    none, dots, attention, full = (jaxpr_flops(gradient_jaxpr(remat, dtype)) for remat in kinds)
    assert none == dots < attention < full  # dots keeps what attention's own backward pass needs


def test_no_product_is_float32_where_bfloat16_is_meant():
    def types(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                yield {x.aval.dtype.name for x in equation.invars}
            for inner in inner_jaxprs(equation.params):
                yield from types(inner)

    found = list(types(gradient_jaxpr("full", jnp.bfloat16)))
    assert len(found) > 50 and all(one == {"bfloat16"} for one in found)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_large_layer_is_computed_by_blocks(monkeypatch, platform):
    """By its scores on one device: on a GPU from 4 rows of 2,048 + 8 x 2,048 tokens with 64 heads, for example."""
    monkeypatch.setattr(Role, "platform", platform)
    wide = replace(QWEN3, num_heads=64, num_kv_heads=8, head_dim=64)
    one, eight = (Model(wide, roles(*mesh).trainer) for mesh in ((1, 1, 1), (1, 1, 8)))
    kept = replace(one, remat="none")  # of all layers

    def kinds(*shape: int) -> list[str]:
        return [attention_kind(model, *shape) for model in (one, eight, kept)]

    assert attention_kind(one, 1, 16, 8, 16) == "reference"
    assert kinds(4, 2048, 8, 2048) == ["blocked"] * 3
    if platform == "cpu":  # what leaves the cache is slower
        assert kinds(1, 32, 8, 32) == ["blocked", "reference", "blocked"]
    else:
        assert kinds(4, 64, 8, 64) == ["reference"] * 3
        assert kinds(8, 256, 8, 512) == ["blocked", "reference", "blocked"]
        assert kinds(2, 256, 8, 512) == ["reference", "reference", "blocked"]
    assert attention_kind(replace(one, attention="reference"), 4, 2048, 8, 2048) == "reference"


def test_splash_is_refused_where_it_cannot_run(monkeypatch):
    def refused(head_dim: int, size: int) -> str:
        a = replace(QWEN3, head_dim=head_dim)
        with pytest.raises(ShoalError) as raised:
            attention_kind(Model(a, roles(1, 1, 1).trainer, attention="splash"), 1, 64, 1, size)
        return str(raised.value)

    assert refused(64, 64) == ("model.attention=splash: splash attention is for TPUs, and this is a CPU; "
                               "model.attention=auto uses reference here")
    monkeypatch.setattr(Role, "platform", "tpu")
    assert "head_dim is 80; model.attention=auto uses reference here" in refused(80, 64)
    assert "65,600 tokens, and at most 65,535" in refused(64, 65536) and "auto uses blocked" in refused(64, 65536)
    auto = Model(replace(QWEN3, head_dim=64), roles(1, 1, 1).trainer)
    assert attention_kind(auto, 1, 256, 8, 512) == "splash" and attention_kind(auto, 1, 64, 1, 64) == "reference"


def test_memory_grows_with_tokens():
    def temporaries(size: int, kind) -> int:
        shape = jax.ShapeDtypeStruct((1, 2, size, 2, 8), jnp.float32)

        def loss(q, k, v):
            segment = jnp.ones((1, 2, size), jnp.int32)
            if kind == "blocked":
                return attend_by_blocks(q, None, KeyValues(k, v), segment, 64).sum()
            return attend(q, None, Keys(k, v, jnp.broadcast_to(jnp.tri(size, dtype=bool), (1, 2, size, size)))).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(1024, "blocked") < 2.2 * temporaries(512, "blocked")
    assert temporaries(1024, "blocked") < temporaries(1024, "reference") / 4


@pytest.mark.parametrize("tokens", [1, 64, 200, 257, 320, 448, 500, 1600, 5000])
def test_a_cache_is_read_in_as_few_blocks_as_its_tokens_need(tokens):
    """1,600 tokens were read in 25 blocks of 64 on accelerators, since 256 does not divide them."""
    for platform in ("cpu", "tpu"):
        size, most = cache_size(tokens, platform), keys_at_once(platform)
        assert tokens <= size < tokens + max(64 * -(-tokens // most), 64)
        assert size // largest_block(size, most) == -(-tokens // most)
