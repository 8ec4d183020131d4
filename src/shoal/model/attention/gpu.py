"""Attention of rows of several sequences on GPU by three kernels in Pallas for Triton: forward; dq;
dk and dv.

A program of a kernel holds one block of a head, of queries or of keys, and goes through the list of
the blocks that it reads, or that read it: what lies between is neither loaded nor computed, and
only results are written (FlashAttention-2, Dao 2023, arXiv 2307.08691, algorithms 1 and 2).
Gradients of keys and values are summed over a key head's query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shoal.model.attention import softmax
from shoal.model.attention.rule import Blocks, Tokens, blocks_of, reads
from shoal.model.attention.softmax import LOG2E, NO_KEY, RunningSoftmax, masked, product32


class BlockLists(NamedTuple):
    """Which blocks of keys each block of queries reads, and which blocks of queries read each block
    of keys; rows are filled up to whole blocks."""

    # for each block of queries, the blocks of keys that it reads; those that it reads in full come
    # first
    queries: Blocks
    keys: Blocks  # for each block of keys, the blocks of queries that read it


def block_lists(query: Tokens, key: Tokens, block: int) -> BlockLists:
    """Returns both lists, for queries of whole rows or of a part of each row, and all their
    keys."""
    return BlockLists(
        blocks_of(query, key, block, full_first=True), blocks_of(query, key, block, of_keys=True)
    )


TILES = {128: (64, 2), 256: (32, 1)}
"""Largest dimension of a head -> (tokens of a block, of queries and of keys; query heads of a key
head for which a program loads keys and values together). This is what registers and shared memory
of an A100, L4, H200 or B200 hold (docs/LOG.md). float32 has half the tokens, and one head."""


def block_size(head_dim: int, dtype: Any) -> int:
    """Returns the tokens of a block, for heads of this dimension and type."""
    tokens, _heads = _tiles(head_dim)
    return tokens // 2 if dtype == jnp.float32 else tokens


def _tiles(head_dim: int) -> tuple[int, int]:
    """Returns the entry of `TILES` for heads of this dimension. ValueError if they are wider than
    any entry."""
    for most, tiles in TILES.items():
        if head_dim <= most:
            return tiles
    raise ValueError(f"heads of {head_dim} dimensions have no tiles")


def attend_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, lists: BlockLists, interpret: bool = False
) -> jax.Array:
    """Computes softmax attention of q[R, T, H, A] to k, v[R, S, K, A] -> [R, T, H, A]; for whole
    rows S is T. `lists` are those of `block_lists`. Padding gives 0. Scores are scaled by
    1/sqrt(A), here and not in the kernels; they and all sums are float32. `interpret` runs the
    kernel as plain JAX, on any device, for tests."""
    rows, size, _, head_dim = q.shape
    block = lists.queries.own.segment.shape[1]
    # Triton's arrays have sizes of powers of two, and its products at least 16.
    width = max(16, pl.next_power_of_2(head_dim))

    def by_block(x: jax.Array) -> jax.Array:
        """Returns an array by blocks [N, block, heads, width], filled up with zeros."""
        heads = x.shape[2]
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, width - head_dim)))
        return x.reshape(-1, block, heads, width)

    q = q * jnp.asarray(head_dim**-0.5, q.dtype)
    out: Any = _attend(interpret, by_block(q), by_block(k), by_block(v), lists)
    return out.reshape(rows, -1, q.shape[2], width)[:, :size, :, :head_dim]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, lists: BlockLists
) -> jax.Array:
    return _forward(interpret, q, k, v, lists)[0]


def _forward(
    interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, lists: BlockLists
) -> tuple[jax.Array, Any]:
    """Returns the output, and what the backward pass reads: inputs, output, and the log-sum-exp of
    each query."""
    lse = jax.ShapeDtypeStruct((len(q), q.shape[2], q.shape[1]), jnp.float32)  # [N, H, b]
    # 2 products of a pair of blocks: scores, and weights times values
    out, lse = _call(_forward_kernel, interpret, (q, lse), 2, (q, k, v), lists.queries)
    out = checkpoint_name(out, "kernel")  # see REMAT
    lse = checkpoint_name(lse, "kernel")
    return out, (q, k, v, lists, out, lse)


def _backward(interpret: bool, residuals: Any, d_out: jax.Array) -> tuple:
    """Returns the gradients of q, k and v. `residuals` is what `_forward` returned for it. `lists`
    has no gradient."""
    q, k, v, lists, out, lse = residuals
    delta = jnp.einsum("nbha,nbha->nhb", out, d_out, preferred_element_type=jnp.float32)
    inputs = q, k, v, d_out, lse, delta
    # 3 products: scores again, dp, and the sum of d_q; for keys 4, since they have two sums
    (d_q,) = _call(_query_kernel, interpret, (q,), 3, inputs, lists.queries)
    d_k, d_v = _call(_key_kernel, interpret, (k, v), 4, inputs, lists.keys)
    return d_q, d_k, d_v, None


_attend.defvjp(_forward, _backward)


def _call(
    kernel: Any, interpret: bool, results: tuple, products: int, inputs: tuple, blocks: Blocks
) -> Any:
    """Calls a kernel over all rows, and returns its results: arrays in the shapes and types of
    `results`. If the first result has the shape of q, there is one program for each block of
    queries and some query heads of a key head; else one for each block of keys and key head.

    `inputs` begin with q and k; `blocks` are the lists by blocks of queries, or of keys. `products`
    is the number of matrix products that a pair of blocks takes, for the cost estimate.
    """
    q, k = inputs[:2]
    _, block, num_heads, width = q.shape
    key_heads = k.shape[2]
    count, each = blocks.lists.shape
    pairs = count * each * num_heads * block**2  # if every block read every one of its row
    of_queries = results[0].shape == q.shape
    heads, parts = _heads_per_program(q, k) if of_queries else (1, 1)
    return pl.pallas_call(
        partial(kernel, jnp.exp2 if interpret else _exp2),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        grid=(count, key_heads * parts),
        interpret=interpret,
        name=kernel.__name__.removeprefix("_"),
        compiler_params=triton.CompilerParams(
            num_warps=8 if q.dtype == jnp.float32 else 4 * heads, num_stages=2
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * pairs * width, transcendentals=pairs, bytes_accessed=0
        ),
    )(*inputs, blocks)


def _heads_per_program(q: Any, k: Any) -> tuple[int, int]:
    """Returns (how many query heads of a key head one program of the kernels for queries takes, how
    many programs a key head has). The last program of a key head may repeat its last query head.
    float32 has one head a program."""
    share = q.shape[2] // k.shape[2]
    _tokens, most_heads = _tiles(q.shape[3])
    heads = 1 if q.dtype == jnp.float32 else min(most_heads, share)
    return heads, -(-share // heads)


def _exp2(x: jax.Array) -> jax.Array:
    """Returns 2 to the power of float32 x, but 0 for results below 2^-126: to be exact there would
    take three more instructions for each x."""
    return triton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )[0]


class Queries(NamedTuple):
    """The queries of one program: one block of them, in some query heads of one key head."""

    number: jax.Array  # number of the block
    key_head: jax.Array
    offset: jax.Array  # of each query: its place in the block
    head: jax.Array  # of each query: its query head; past the last head the last one is repeated
    tokens: Tokens

    @classmethod
    def of_program(cls, q_ref: Any, k_ref: Any, blocks: Any) -> Queries:
        """Returns the queries of the program that is running, from its place in the kernel's grid:
        (block of queries, key head and part of its query heads)."""
        number = pl.program_id(0)
        part = pl.program_id(1)
        share = q_ref.shape[2] // k_ref.shape[2]
        heads, parts = _heads_per_program(q_ref, k_ref)
        block = q_ref.shape[1]
        key_head = jax.lax.div(part, parts)
        # One head after the other, each with all places of the block.
        index = jnp.arange(heads * block, dtype=jnp.int32)
        head_of_key_head = jax.lax.rem(part, parts) * heads + jax.lax.div(index, block)
        within = jnp.minimum(head_of_key_head, share - 1)
        offset = jax.lax.rem(index, block)
        own = blocks.own
        return cls(
            number=number,
            key_head=key_head,
            offset=offset,
            head=key_head * share + within,
            tokens=Tokens(
                own.segment[number, offset], own.prompt[number, offset], own.first[number] + offset
            ),
        )


def _for_each_key_block(
    blocks: Any, number: jax.Array, query: Tokens, add: Callable, carry: Any
) -> Any:
    """Calls `carry = add(mask_scores, other, carry)` for each block of keys that the block of
    queries `number` reads, and returns the last carry. `other` is the number of the block of keys;
    `mask_scores(scores)` masks the scores of keys that a query does not read. `query` are the
    tokens of the block of queries. Blocks read in full come first, in a loop of their own: for
    these `mask_scores` changes nothing."""

    def add_full(turn: jax.Array, carry: Any) -> Any:
        """Adds a block that is read in full, without a mask. `turn` is its index in the list."""
        other = blocks.lists[number, turn]

        def unchanged(scores: jax.Array) -> jax.Array:
            return scores

        return add(unchanged, other, carry)

    def add_masked(turn: jax.Array, carry: Any) -> Any:
        """Adds a block of which only some keys are read. `turn` is its index in the list."""
        other = blocks.lists[number, turn]

        def mask_scores(scores: jax.Array) -> jax.Array:
            return masked(scores, _reads(query, blocks.other.at(other)))

        return add(mask_scores, other, carry)

    num_full = blocks.num_full[number]
    carry = jax.lax.fori_loop(0, num_full, add_full, carry)
    return jax.lax.fori_loop(num_full, blocks.counts[number], add_masked, carry)


def _forward_kernel(
    exp2: Callable, q_ref: Any, k_ref: Any, v_ref: Any, blocks: Any, out_ref: Any, lse_ref: Any
) -> None:
    """Computes output and log-sum-exp of one block of queries of some heads. Writes them to
    `out_ref` and `lse_ref`, in base 2. `exp2` is the function for powers of 2."""
    number, key_head, offset, head, query = Queries.of_program(q_ref, k_ref, blocks)
    q = q_ref[number, offset, head]

    def add(mask_scores: Callable, other: jax.Array, running: RunningSoftmax) -> RunningSoftmax:
        """Adds a block of keys to the softmax."""
        k = k_ref[other, :, key_head]
        v = v_ref[other, :, key_head]
        # [queries, keys]
        scores = mask_scores(product32(q, k.T) * LOG2E)

        def weigh_values(weights: jax.Array) -> jax.Array:
            return product32(weights.astype(v.dtype), v)

        return softmax.add_block(running, scores, weigh_values, exp2)

    start = softmax.start(q.shape[:1], q.shape, NO_KEY)
    running = _for_each_key_block(blocks, number, query, add, start)
    out, lse = softmax.finish(running, jnp.log2)
    out_ref[number, offset, head] = out.astype(q.dtype)
    lse_ref[number, head, offset] = lse


def _query_kernel(
    exp2: Callable,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_out_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    blocks: Any,
    d_q_ref: Any,
) -> None:
    """Computes the gradient of one block of queries of some heads. The gradient of softmax's scores
    is p * (dp - delta), with delta the sum of out * d_out over a head's dimensions. Writes it to
    `d_q_ref`."""
    number, key_head, offset, head, query = Queries.of_program(q_ref, k_ref, blocks)
    q = q_ref[number, offset, head]
    d_out = d_out_ref[number, offset, head]
    lse = lse_ref[number, head, offset]
    delta = delta_ref[number, head, offset]

    def add(mask_scores: Callable, other: jax.Array, d_q: jax.Array) -> jax.Array:
        """Adds the gradient that a block of keys gives to the queries."""
        k = k_ref[other, :, key_head]
        v = v_ref[other, :, key_head]
        # [queries, keys], like all products with k.T and v.T here
        p = exp2(mask_scores(product32(q, k.T) * LOG2E - lse[:, None]))
        d_scores = p * (product32(d_out, v.T) - delta[:, None])
        return d_q + product32(d_scores.astype(q.dtype), k)

    d_q = _for_each_key_block(blocks, number, query, add, jnp.zeros(q.shape, jnp.float32))
    d_q_ref[number, offset, head] = d_q.astype(q.dtype)


def _key_kernel(
    exp2: Callable,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_out_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    blocks: Any,
    d_k_ref: Any,
    d_v_ref: Any,
) -> None:
    """Computes the gradients of one block of keys and values of a key head. Writes them to
    `d_k_ref` and `d_v_ref`, summed over the key head's query heads."""
    number = pl.program_id(0)
    key_head = pl.program_id(1)
    share = q_ref.shape[2] // k_ref.shape[2]
    k = k_ref[number, :, key_head]
    v = v_ref[number, :, key_head]
    key = blocks.own.at(number)

    def add(turn: jax.Array, carry: tuple) -> tuple:
        """Adds to `carry`, the gradients (d_k, d_v), what one block of queries of one query head
        contributes. `turn` is the index of this pair (block, head): heads vary fastest."""
        d_k, d_v = carry
        # One loop over blocks and heads, because Triton loads ahead in innermost loops only.
        other = blocks.lists[number, jax.lax.div(turn, share)]
        head = key_head * share + jax.lax.rem(turn, share)
        q = q_ref[other, :, head]
        d_out = d_out_ref[other, :, head]
        mask = _reads(blocks.other.at(other), key).T
        # Scores as [keys, queries], an operand of both sums, stay in registers. All are masked:
        # with a second loop for unmasked blocks, which would carry two sums, each of Hopper's
        # products waits for the one before (docs/LOG.md).
        scores = product32(k, q.T) * LOG2E
        p = exp2(masked(scores - lse_ref[other, head], mask))
        # d_v first, so that fewer registers are held.
        d_v = d_v + product32(p.astype(q.dtype), d_out)
        d_scores = p * (product32(v, d_out.T) - delta_ref[other, head])
        d_k = d_k + product32(d_scores.astype(q.dtype), q)
        return d_k, d_v

    zeros = jnp.zeros(k.shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(0, blocks.counts[number] * share, add, (zeros, zeros))
    d_k_ref[number, :, key_head] = d_k.astype(k.dtype)
    d_v_ref[number, :, key_head] = d_v.astype(v.dtype)


def _reads(query: Tokens, key: Tokens) -> jax.Array:
    """Returns bool[queries, keys] for the tokens of two blocks: which query reads which key."""
    return reads(query.to_meet(1), key.to_meet(0))
