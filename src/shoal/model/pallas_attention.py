"""Attention of rows of several sequences on GPU by kernels in Pallas for Triton: forward; dq; dk
and dv.

A program of a kernel holds one block of a head, of queries or of keys, and goes through the list of
the blocks that it reads or that read it: what lies between is neither loaded nor computed, and only
results are written (FlashAttention-2, Dao 2023, arXiv 2307.08691, algorithms 1 and 2). Gradients of
keys and values are summed over a key head's query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shoal.model import decode_kernel, tpu_attention
from shoal.model.attention import LOG2E, LOWEST, Tokens, attend_at_once, product32, reads
from shoal.model.blocked_attention import Blocks, blocks_of
from shoal.model.rotary import rotate


class BlockLists(NamedTuple):
    """What the queries of rows read, both rounded up to whole blocks."""

    queries: (
        Blocks  # with lists of the blocks of keys that each reads, those that it reads whole first
    )
    keys: Blocks  # with lists of the blocks of queries that read each


def block_lists(query: Tokens, key: Tokens, block: int) -> BlockLists:
    """Of rows' queries, or a part of each row's, and of all their keys."""
    return BlockLists(
        blocks_of(query, key, block, whole_first=True), blocks_of(query, key, block, of_keys=True)
    )


TILES = {128: (64, 2), 256: (32, 1)}
"""The most dimensions of a head -> the tokens of a block, of queries and of keys, and the query
heads of a key head for which a program loads keys and values together: what registers and shared
memory of an A100, L4, H200 or B200 hold (docs/LOG.md). float32 has half the tokens, and one
head."""


def block_size(head_dim: int, dtype: Any) -> int:
    """Tokens of a block."""
    return _tiles(head_dim)[0] // (2 if dtype == jnp.float32 else 1)


def _tiles(head_dim: int) -> tuple[int, int]:
    return next(tiles for most, tiles in TILES.items() if head_dim <= most)


def attend_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, lists: BlockLists, interpret: bool = False
) -> jax.Array:
    """Softmax attention of q[R, T, H, A] to k, v[R, S, K, A] -> [R, T, H, A]; padding gives 0, and
    in whole rows S is T. Scores and sums are float32."""
    rows, size, _, head_dim = q.shape
    block = lists.queries.own.segment.shape[1]
    # Triton's arrays have sizes of powers of two, and its products at least 16.
    width = max(16, pl.next_power_of_2(head_dim))

    def by_block(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, width - head_dim)))
        return x.reshape(-1, block, *x.shape[2:])

    q = q * jnp.asarray(head_dim**-0.5, q.dtype)
    out: Any = _attend(interpret, by_block(q), by_block(k), by_block(v), lists)
    return out.reshape(rows, -1, *out.shape[2:])[:, :size, :, :head_dim]


MOST_DIFFERENCE = {"bfloat16": 2e-2, "float16": 2e-2, "float32": 1e-3}
"""Between the kernels and the reference in `fault_on`, as a share of the values' norm."""


def fault_on(device: Any, share: int, head_dim: int, dtype: str, interpret: bool = False) -> str:
    """What is wrong with our kernels on a device, in seconds: values and gradients of a packed row
    of three blocks, with `share` query heads to a key head, and decoding's of a few slots, against
    the reference's; empty if nothing is. Found once a process."""
    try:
        return _fault_on(device, share, head_dim, dtype, interpret)
    except (
        jax.errors.JaxRuntimeError
    ) as error:  # not kept: other programs' memory may be free the next time
        return _first_line(error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0][:200]}"


@lru_cache
def _fault_on(device: Any, share: int, head_dim: int, dtype: str, interpret: bool) -> str:
    """JaxRuntimeError where memory ends."""
    on_tpu = device.platform == "tpu"
    block = tpu_attention.BLOCK if on_tpu else block_size(head_dim, jnp.dtype(dtype))
    sizes = (
        block // 2 + 3,
        block,
        block // 2,
        block // 4,
        block // 2,
    )  # a prompt, two completions, a prompt, padding
    tokens = Tokens.of(
        *(
            jnp.asarray(np.repeat([numbers], sizes, axis=1), jnp.int32)
            for numbers in ((1, 2, 3, 4, 0), (1, 1, 1, 4, 0))
        )
    )
    rng = np.random.default_rng(0)
    q, k, v, weight = (
        rng.standard_normal((1, sum(sizes), heads, head_dim)) for heads in (share, 1, 1, share)
    )

    def results(attention: Callable[..., jax.Array]) -> list[np.ndarray]:
        def value(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = attention(*arrays).astype(jnp.float32)
            return (out * weight).sum(), out

        arrays = (jax.device_put(jnp.asarray(x, dtype), device) for x in (q, k, v))
        (_, out), gradient = jax.jit(jax.value_and_grad(value, (0, 1, 2), has_aux=True))(*arrays)
        return [np.asarray(x, np.float64) for x in (out, *gradient)]

    names = (
        "values",
        "dq",
        "dk",
        "dv",
        "results in decoding",
        "keys in decoding",
        "values in decoding",
    )
    try:
        # As the model multiplies; the reference in float32 has nothing that a kernel's faults could
        # hide behind.
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            exactly = partial(attend_at_once, query=tokens, key=tokens)
            if on_tpu:
                angles = jnp.asarray(
                    rng.uniform(0, 6, (1, sum(sizes), 1, head_dim // 2)), jnp.float32
                )
                cos, sin, pairs = (
                    jnp.cos(angles),
                    jnp.sin(angles),
                    tpu_attention.row_pairs(tokens, tokens),
                )
                turns, flat = (
                    tpu_attention.side_by_side((cos, sin)),
                    partial(jax.lax.collapse, start_dimension=2),
                )
                ours = results(
                    lambda q, k, v: tpu_attention.attend_rows(
                        flat(q), flat(k), flat(v), (turns, turns), pairs, interpret
                    ).reshape(q.shape)
                )
                exact = results(
                    lambda q, k, v: exactly(rotate(q, cos, sin), rotate(k, cos, sin), v)
                )
                try_kernel = None if head_dim % 64 else decode_kernel.trial_of_pages
            else:
                ours = results(
                    lambda q, k, v: attend_rows(
                        q, k, v, block_lists(tokens, tokens, block), interpret
                    )
                )
                exact = results(exactly)
                try_kernel = decode_kernel.trial if head_dim in decode_kernel.HEADS else None
            if try_kernel:
                both = try_kernel(device, share, head_dim, dtype, interpret)
                ours, exact = (
                    [*found, *(np.asarray(x, np.float64) for x in more)]
                    for found, more in zip((ours, exact), both, strict=True)
                )
    except (
        Exception
    ) as error:  # whatever a compiler or a device may raise: the model goes on without the kernels
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            raise
        return _first_line(error)
    for name, one, other in zip(names, ours, exact, strict=False):
        difference = float(np.linalg.norm(one - other) / np.linalg.norm(other))
        if not difference <= MOST_DIFFERENCE[dtype]:  # also where it is no number
            return f"their {name} differ by {difference:.2g} of their norm from the reference"
    return ""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, lists: BlockLists
) -> jax.Array:
    return _forward(interpret, q, k, v, lists)[0]


def _forward(
    interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, lists: BlockLists
) -> tuple[jax.Array, Any]:
    lse = jax.ShapeDtypeStruct((len(q), q.shape[2], q.shape[1]), jnp.float32)  # [N, H, b]
    out, lse = _call(_forward_kernel, interpret, (q, lse), 2, q, k, v, lists.queries)
    out, lse = (checkpoint_name(x, "kernel") for x in (out, lse))  # see REMAT
    return out, (q, k, v, lists, out, lse)


def _backward(interpret: bool, residuals: Any, d_out: jax.Array) -> tuple:
    q, k, v, lists, out, lse = residuals
    delta = jnp.einsum("nbha,nbha->nhb", out, d_out, preferred_element_type=jnp.float32)
    inputs = q, k, v, d_out, lse, delta
    (d_q,) = _call(_query_kernel, interpret, (q,), 3, *inputs, lists.queries)
    return d_q, *_call(_key_kernel, interpret, (k, v), 4, *inputs, lists.keys), None


_attend.defvjp(_forward, _backward)


def _call(
    kernel: Any,
    interpret: bool,
    results: tuple,
    products: int,
    q: jax.Array,
    k: jax.Array,
    *rest: Any,
) -> Any:
    """A kernel of so many products a pair of blocks: a program for each block of a key head, or of
    some query heads."""
    (_, block, num_heads, width), key_heads, (count, each) = (
        q.shape,
        k.shape[2],
        rest[-1].lists.shape,
    )
    pairs, of_queries = count * each * num_heads * block**2, results[0].shape == q.shape
    heads, parts = _heads(q, k) if of_queries else (1, 1)
    return pl.pallas_call(
        partial(kernel, jnp.exp2 if interpret else _exp2),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        grid=(count, key_heads * parts),
        interpret=interpret,
        name=kernel.__name__.removeprefix("_"),
        compiler_params=triton.CompilerParams(
            num_warps=8 if q.dtype == jnp.float32 else 4 * heads, num_stages=2
        ),
        # If every block read every one of its row.
        cost_estimate=pl.CostEstimate(
            flops=2 * products * pairs * width, transcendentals=pairs, bytes_accessed=0
        ),
    )(q, k, *rest)


def _heads(q: Any, k: Any) -> tuple[int, int]:
    """Query heads of a program, and the programs of a key head."""
    share = q.shape[2] // k.shape[2]
    heads = 1 if q.dtype == jnp.float32 else min(_tiles(q.shape[3])[1], share)
    return heads, -(-share // heads)


def _exp2(x: jax.Array) -> jax.Array:
    """2 to the power of float32 x; 0 below 2^-126, for which each would take three instructions
    more."""
    return triton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )[0]


def _queries(q_ref: Any, k_ref: Any, blocks: Any) -> tuple:
    """A program's block and key head; of its queries places in the block, heads (the last,
    repeated) and tokens."""
    number, part, share = pl.program_id(0), pl.program_id(1), q_ref.shape[2] // k_ref.shape[2]
    (heads, parts), block = _heads(q_ref, k_ref), q_ref.shape[1]
    key_head, index = jax.lax.div(part, parts), jnp.arange(heads * block, dtype=jnp.int32)
    within = jnp.minimum(jax.lax.rem(part, parts) * heads + jax.lax.div(index, block), share - 1)
    place, own = jax.lax.rem(index, block), blocks.own
    return (
        number,
        key_head,
        place,
        key_head * share + within,
        Tokens(own.segment[number, place], own.prompt[number, place], own.first[number] + place),
    )


def _over(blocks: Any, number: jax.Array, query: Tokens, add: Callable, carry: Any) -> Any:
    """`add(masked, other, carry)` for each block of keys that a block reads; `masked` changes the
    scores of keys that a query does not read. Blocks that are read whole have none, and a loop of
    their own."""

    def turn(is_whole: bool, turn: jax.Array, carry: Any) -> Any:
        other = blocks.lists[number, turn]
        return add(
            lambda scores: (
                scores
                if is_whole
                else jnp.where(_reads(query, _tokens(blocks.other, other)), scores, LOWEST)
            ),
            other,
            carry,
        )

    whole = blocks.whole[number]
    carry = jax.lax.fori_loop(0, whole, partial(turn, True), carry)
    return jax.lax.fori_loop(whole, blocks.counts[number], partial(turn, False), carry)


def _forward_kernel(
    exp2: Callable, q_ref: Any, k_ref: Any, v_ref: Any, blocks: Any, out_ref: Any, lse_ref: Any
) -> None:
    """Output and log-sum-exp of one block of queries of some heads."""
    number, key_head, place, head, query = _queries(q_ref, k_ref, blocks)
    q = q_ref[number, place, head]

    def add(masked: Callable, other: jax.Array, carry: tuple) -> tuple:
        top, total, out = carry
        k, v = k_ref[other, :, key_head], v_ref[other, :, key_head]
        scores = masked(product32(q, k.T) * LOG2E)
        new_top = jnp.maximum(top, scores.max(1))
        shrink, p = exp2(top - new_top), exp2(scores - new_top[:, None])
        return (
            new_top,
            total * shrink + p.sum(1),
            out * shrink[:, None] + product32(p.astype(v.dtype), v),
        )

    zeros = jnp.zeros(q.shape[:1], jnp.float32)
    # So far above what is masked that this weighs 0 in a query without keys, too.
    start = zeros + LOWEST / 2, zeros, jnp.zeros(q.shape, jnp.float32)
    top, total, out = _over(blocks, number, query, add, start)
    # A query without keys: 0, and a log-sum-exp that makes no NaN.
    known = jnp.where(total == 0.0, 1.0, total)
    out_ref[number, place, head] = (out / known[:, None]).astype(q.dtype)
    lse_ref[number, head, place] = top + jnp.log2(known)


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
    """The gradient of one block of queries of some heads. Softmax's, of scores, is p * (dp -
    delta), with delta the sum of out * d_out over a head's dimensions."""
    number, key_head, place, head, query = _queries(q_ref, k_ref, blocks)
    q, d_out = q_ref[number, place, head], d_out_ref[number, place, head]
    lse, delta = lse_ref[number, head, place], delta_ref[number, head, place]

    def add(masked: Callable, other: jax.Array, d_q: jax.Array) -> jax.Array:
        k, v = k_ref[other, :, key_head], v_ref[other, :, key_head]
        p = exp2(masked(product32(q, k.T) * LOG2E - lse[:, None]))
        d_scores = p * (product32(d_out, v.T) - delta[:, None])
        return d_q + product32(d_scores.astype(q.dtype), k)

    d_q = _over(blocks, number, query, add, jnp.zeros(q.shape, jnp.float32))
    d_q_ref[number, place, head] = d_q.astype(q.dtype)


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
    """The gradients of one block of keys and values of a key head."""
    number, key_head = pl.program_id(0), pl.program_id(1)
    share = q_ref.shape[2] // k_ref.shape[2]
    k, v, key = k_ref[number, :, key_head], v_ref[number, :, key_head], _tokens(blocks.own, number)

    def add(turn: jax.Array, carry: tuple) -> tuple:
        # One loop over blocks and heads: Triton loads ahead in innermost loops alone.
        other, head = (
            blocks.lists[number, jax.lax.div(turn, share)],
            key_head * share + jax.lax.rem(turn, share),
        )
        q, d_out, mask = (
            q_ref[other, :, head],
            d_out_ref[other, :, head],
            _reads(_tokens(blocks.other, other), key).T,
        )
        # Scores as [keys, queries], an operand of both sums, stay in registers. All are masked:
        # with a second loop for two sums each of Hopper's products waits for the one before
        # (docs/LOG.md).
        p = exp2(jnp.where(mask, product32(k, q.T) * LOG2E - lse_ref[other, head], LOWEST))
        d_v = carry[1] + product32(
            p.astype(q.dtype), d_out
        )  # first, so that fewer registers are held
        d_scores = p * (product32(v, d_out.T) - delta_ref[other, head])
        return carry[0] + product32(d_scores.astype(q.dtype), q), d_v

    zeros = jnp.zeros(k.shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(0, blocks.counts[number] * share, add, (zeros, zeros))
    d_k_ref[number, :, key_head], d_v_ref[number, :, key_head] = (
        d_k.astype(k.dtype),
        d_v.astype(v.dtype),
    )


def _tokens(of: Any, number: jax.Array) -> Tokens:
    """Of a block. Positions follow from the first, so that none has to be held beside the
    others."""
    return Tokens(
        of.segment[number], of.prompt[number], of.first[number] + jnp.arange(of.segment.shape[1])
    )


def _reads(query: Tokens, key: Tokens) -> jax.Array:
    """bool[queries, keys] of the tokens of two blocks."""
    return reads(query.to_meet(1), key.to_meet(0))
