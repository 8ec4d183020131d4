"""Attention by blocks against the reference: values and gradients, ragged, packed, with and without a prompt."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import ON_POLICY, QWEN3, batches, random_groups, random_parameters, relative, roles

from shoal.config.schema import OptimizerSection
from shoal.model.attention import Keys, attend, largest_block
from shoal.model.blocked_attention import KeyValues, attend_by_blocks
from shoal.model.kv_cache import KEYS_AT_ONCE, cache_size
from shoal.model.prefix_attention import attention_kind
from shoal.model.transformer import Model, shardings
from shoal.trainer.step import Learner

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


def test_a_large_layer_is_computed_by_blocks():
    """By its scores on one device: of 4 rows of 2,048 + 8 x 2,048 tokens with 64 heads, for example."""
    one, eight = (Model(replace(QWEN3, num_heads=64, num_kv_heads=8), roles(*mesh).trainer)
                  for mesh in ((1, 1, 1), (1, 1, 8)))
    assert attention_kind(one, 4, 64, 8, 64) == "reference"
    assert attention_kind(one, 4, 2048, 8, 2048) == attention_kind(eight, 4, 2048, 8, 2048) == "blocked"
    assert attention_kind(one, 8, 256, 8, 512) == "blocked" and attention_kind(eight, 8, 256, 8, 512) == "reference"
    kept = replace(one, remat="none")  # of all layers
    assert attention_kind(kept, 2, 256, 8, 512) == "blocked" and attention_kind(one, 2, 256, 8, 512) == "reference"
    assert attention_kind(replace(one, attention="reference"), 4, 2048, 8, 2048) == "reference"


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
    size, blocks = cache_size(tokens), -(-tokens // KEYS_AT_ONCE)
    assert tokens <= size < tokens + 64 * blocks
    assert size // largest_block(size, KEYS_AT_ONCE) == blocks
