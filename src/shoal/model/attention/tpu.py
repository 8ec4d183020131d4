"""Attention of rows of several sequences on TPU by kernels in Pallas for Mosaic: forward; dq; dk
and dv.

The grid of a kernel is the list of the pairs of blocks in which a query may read a key, for each
key head: what lies between is neither loaded nor computed, and takes no step. Pairs of one block of
queries follow each other (those of one block of keys in the third kernel), so that its sums stay in
on-chip memory (FlashAttention-2, Dao 2023, arXiv 2307.08691, algorithms 1 and 2). Heads stay where
products put them, beside each other in [tokens, heads x A], and q and k are rotated within the
kernels: between products and attention nothing is transposed or copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from shoal.model.attention.decode_tpu import LANES
from shoal.model.attention.rule import Tokens, needed_blocks, reads
from shoal.model.attention.softmax import LOG2E, LOWEST, largest_block


class Pairs(NamedTuple):
    """Pairs of blocks, by their numbers among those of all rows, and -1 after the last: those of
    queries, or those of keys, in order."""

    query: jax.Array  # int32[P + 1]
    key: jax.Array  # int32[P + 1]
    size: jax.Array  # int32[1]


class RowPairs(NamedTuple):
    """What queries [R, T] read of keys [R, S], both rounded up to whole blocks; in whole rows S is
    T."""

    by_query: Pairs
    by_key: Pairs
    query: jax.Array  # int32[R * n, 3, b]: segment, prompt and position of each token, by blocks
    key: jax.Array  # int32[R * S, 3]


BLOCK = 256
"""Tokens of a block, of queries and of keys: prompts and completions are often not much longer."""

MOST_LANES = 8 * LANES
"""Of query heads in a step: one head a step would cost as much again for itself, and its products
be waited for."""

LONG = 2**15
"""Tokens of a row from which blocks are twice as long, as the list of pairs is in the scalar core's
memory."""


def block_size(size: int) -> int:
    """Tokens of a block of rows of `size` tokens, which are rounded up to whole ones."""
    return LANES if size <= LANES else BLOCK if size <= LONG else 2 * BLOCK


def row_pairs(query: Tokens, key: Tokens) -> RowPairs:
    """Of rows' queries, or a part of each row's, and of all their keys."""
    block = block_size(key.segment.shape[1])
    needed = needed_blocks(query, key, block)

    def tokens(of: Tokens) -> jax.Array:
        return jnp.stack(
            [jnp.pad(x, ((0, 0), (0, -x.shape[1] % block))).reshape(-1) for x in of], -1
        )

    return RowPairs(
        _pairs(needed),
        _pairs(needed, of_keys=True),
        tokens(query).reshape(-1, block, 3).mT,
        tokens(key),
    )


def _pairs(needed: jax.Array, of_keys: bool = False) -> Pairs:
    """Of needed[R, n, m], in the order of queries or of keys."""
    needed = needed.mT if of_keys else needed
    # Each block is in a pair, one that is masked if need be: its results would not be written.
    needed = needed.at[..., 0].set(needed[..., 0] | ~needed.any(-1))
    rows, count, others = needed.shape
    # No query reads a key behind it.
    most = rows * (count * (count + 1) // 2 if count == others else count * others)
    order, total = (
        jnp.argsort(~needed.reshape(-1), stable=True)[:most].astype(jnp.int32),
        needed.sum()[None],
    )
    own, other = (
        jnp.pad(jnp.where(jnp.arange(most) < total, x, -1), (0, 1), constant_values=-1)
        for x in (order // others, order // (count * others) * others + order % others)
    )
    return Pairs(other, own, total) if of_keys else Pairs(own, other, total)


def attend_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    pairs: RowPairs,
    interpret: bool = False,
) -> jax.Array:
    """Softmax attention of q[R, T, H * A] to k, v[R, S, K * A] -> [R, T, H * A]; padding gives 0.
    Scores and sums are float32. Before it q and k are rotated by `angles`, float32[R, T, A] and [R,
    S, A] (`side_by_side`)."""
    (rows, size, _), block, head_dim = q.shape, block_size(k.shape[1]), angles[0].shape[-1]
    static = Static(
        rows, q.shape[2] // k.shape[2], k.shape[2] // head_dim, block, head_dim, interpret
    )
    width = static.width

    def flat(x: jax.Array) -> jax.Array:
        """Tokens of all rows, each half of a head filled up to half of its lanes."""
        if width != head_dim:
            x = x.reshape(*x.shape[:2], -1, 2, head_dim // 2)
            x = jnp.pad(x, ((0, 0),) * 4 + ((0, (width - head_dim) // 2),)).reshape(
                *x.shape[:2], -1
            )
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0))).reshape(-1, x.shape[2])

    out: Any = _attend(static, *map(flat, (q, k, v, *angles)), pairs)
    if width == head_dim:
        return out.reshape(rows, -1, q.shape[2])[:, :size]
    return out.reshape(rows, out.shape[0] // rows, -1, 2, width // 2)[
        :, :size, ..., : head_dim // 2
    ].reshape(q.shape)


def side_by_side(rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """cos and sin[R, T, 1, A/2] -> [R, T, A]."""
    return jnp.concatenate(rope, -1)[:, :, 0]


def unrotated(angles: jax.Array) -> jax.Array:
    """The angles of keys that are rotated already."""
    return side_by_side(
        (jnp.ones_like(half := angles[..., None, : angles.shape[-1] // 2]), jnp.zeros_like(half))
    )


class Static(NamedTuple):
    """What a kernel is compiled for."""

    rows: int
    share: int  # query heads to a key head
    heads: int  # key heads
    block: int
    head_dim: int  # before it was filled up to whole registers
    interpret: bool

    @property
    def width(self) -> int:
        """Lanes of a head."""
        return LANES * -(-self.head_dim // LANES)

    @property
    def at_once(self) -> int:
        """Key heads of a step; at least two steps a pair, for devices of two cores."""
        return largest_block(
            self.heads, max(1, min(MOST_LANES // (self.share * self.width), self.heads // 2))
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_angles: jax.Array,
    k_angles: jax.Array,
    pairs: RowPairs,
) -> jax.Array:
    return _forward(static, q, k, v, q_angles, k_angles, pairs)[0]


def _forward(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_angles: jax.Array,
    k_angles: jax.Array,
    pairs: RowPairs,
) -> tuple[jax.Array, Any]:
    lse = jax.ShapeDtypeStruct(
        (static.heads // static.at_once, static.share * static.at_once, len(q)), jnp.float32
    )
    shared = q, k, v, q_angles, k_angles
    out, lse = _call(
        _forward_kernel,
        2,
        static,
        pairs,
        [*zip(shared, "qkkac", strict=True)],
        [(q, "q"), (lse, "s")],
    )
    out, lse = (checkpoint_name(x, "kernel") for x in (out, lse))  # see REMAT
    return out, (shared, pairs, out, lse)


def _backward(static: Static, residuals: Any, d_out: jax.Array) -> tuple:
    shared, pairs, out, lse = residuals
    q, k, v, *_ = shared
    inputs = [*zip((*shared, d_out, lse), "qkkacqs", strict=True)]
    d_q, delta = _call(
        _query_kernel, 3, static, pairs, [*inputs, (out, "q")], [(q, "q"), (lse, "s")]
    )
    d_k, d_v = _call(_key_kernel, 4, static, pairs, [*inputs, (delta, "s")], [(k, "k"), (v, "k")])
    return d_q, d_k, d_v, None, None, None


_attend.defvjp(_forward, _backward)


def _call(
    kernel: Callable, products: int, static: Static, pairs: RowPairs, inputs: list, results: list
) -> Any:
    """A kernel of so many products a pair. Inputs and results are named by what a block of theirs
    is, of h query heads: of q [b, h x A], of k [b, key heads x A], of queries' and keys' angles (a,
    c) [b, A], or of sums (s) [1, h, b]."""
    rows, share, heads, block, _, interpret = static
    few, some = static.at_once, share * static.at_once
    (q, _), (k, _) = inputs[:2]
    width, f32 = static.width, jnp.float32
    of_queries = kernel is not _key_kernel
    order = pairs.by_query if of_queries else pairs.by_key
    specs = {
        "q": pl.BlockSpec(
            (block, some * width), lambda head, pair, query, key: (query[pair], head)
        ),
        "k": pl.BlockSpec((block, few * width), lambda head, pair, query, key: (key[pair], head)),
        "a": pl.BlockSpec((block, width), lambda head, pair, query, key: (query[pair], 0)),
        "c": pl.BlockSpec((block, width), lambda head, pair, query, key: (key[pair], 0)),
        "s": pl.BlockSpec((1, some, block), lambda head, pair, query, key: (head, 0, query[pair])),
    }
    # Scores are [keys, queries]: what is known of a query, or summed for it, has a lane.
    tokens = [
        (
            pairs.query,
            pl.BlockSpec((1, 3, block), lambda head, pair, query, key: (query[pair], 0, 0)),
        ),
        (pairs.key, pl.BlockSpec((block, 3), lambda head, pair, query, key: (key[pair], 0))),
    ]
    kept = [((block, few * width), q.dtype), *[((block, few * width), f32)] * 2]
    if of_queries:
        kept = [((block, some * width), q.dtype), ((some * width, block), f32)]
        kept += [((some, 1, block), f32)] * (2 if kernel is _forward_kernel else 0)
    scores = len(q) * len(k) // rows * share * heads
    return pl.pallas_call(
        partial(kernel, static),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in results],
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(heads // few, order.size[0]),
            out_specs=[specs[name] for _, name in results],
            in_specs=[spec for _, spec in tokens] + [specs[name] for _, name in inputs],
            scratch_shapes=[tpu.VMEM(shape, dtype) for shape, dtype in kept],
        ),
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        # If every block read every one of its row.
        cost_estimate=pl.CostEstimate(
            flops=2 * products * scores * width, transcendentals=scores, bytes_accessed=0
        ),
        interpret=interpret,
        name=kernel.__name__.removeprefix("_"),
    )(order.query, order.key, *(x for x, _ in tokens), *(x for x, _ in inputs))


def _forward_kernel(
    static: Static,
    query: Any,
    key: Any,
    q_tokens: Any,
    k_tokens: Any,
    q: Any,
    k: Any,
    v: Any,
    q_angles: Any,
    k_angles: Any,
    out: Any,
    lse: Any,
    turned: Any,
    sums: Any,
    top: Any,
    total: Any,
) -> None:
    """Output and log-sum-exp of the query heads of some key heads."""
    is_first, is_last = _ends(query)

    @pl.when(is_first)
    def _() -> None:
        turned[...] = jnp.concatenate(_turned_heads(static, q, q_angles), 1)
        # So far above what is masked that this weighs 0 in a query without keys, too.
        top[...] = jnp.full(top.shape, LOWEST / 2, jnp.float32)
        total[...], sums[...] = (jnp.zeros(sums.shape, jnp.float32) for sums in (total, sums))

    heads, mask = _heads(static), _mask(q_tokens, k_tokens)
    keys = [_turned(k[:, lanes], k_angles).astype(k.dtype) for lanes in _key_heads(static)]
    values = [_transposed(v[:, lanes]) for lanes in _key_heads(static)]
    scores = [
        jnp.where(mask, _product(keys[head // static.share], turned[:, lanes], 1) * LOG2E, LOWEST)
        for head, lanes in heads
    ]
    tops = [
        jnp.maximum(top[head], one.max(0, keepdims=True))
        for (head, _), one in zip(heads, scores, strict=True)
    ]
    ps = [jnp.exp2(one - new_top) for one, new_top in zip(scores, tops, strict=True)]
    parts = [_product(values[head // static.share], p.astype(v.dtype)) for head, p in enumerate(ps)]
    for (head, lanes), new_top, p, part in zip(heads, tops, ps, parts, strict=True):
        shrink = jnp.exp2(top[head] - new_top)
        top[head], total[head] = new_top, total[head] * shrink + p.sum(0, keepdims=True)
        sums[lanes] = sums[lanes] * shrink + part

    @pl.when(is_last)
    def _() -> None:
        for head, lanes in _heads(static):
            # A query without keys: 0, and a log-sum-exp that makes no NaN.
            known = jnp.where(total[head] == 0.0, 1.0, total[head])
            out[:, lanes] = (sums[lanes] / known).T.astype(out.dtype)
            lse[0, pl.ds(head, 1)] = top[head] + jnp.log2(known)


def _query_kernel(
    static: Static,
    query: Any,
    key: Any,
    q_tokens: Any,
    k_tokens: Any,
    q: Any,
    k: Any,
    v: Any,
    q_angles: Any,
    k_angles: Any,
    d_out: Any,
    lse: Any,
    out: Any,
    d_q: Any,
    delta: Any,
    turned: Any,
    sums: Any,
) -> None:
    """The gradient of q. Softmax's, of scores, is p * (dp - delta), with delta the sum of out *
    d_out over a head's dimensions."""
    is_first, is_last = _ends(query)

    @pl.when(is_first)
    def _() -> None:
        turned[...] = jnp.concatenate(_turned_heads(static, q, q_angles), 1)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)
        for head, lanes in _heads(static):
            products = out[:, lanes].astype(jnp.float32) * d_out[:, lanes].astype(jnp.float32)
            delta[0, pl.ds(head, 1)] = products.T.sum(0, keepdims=True)

    heads, mask = _heads(static), _mask(q_tokens, k_tokens)
    wide, values = zip(
        *((_turned(k[:, lanes], k_angles), v[:, lanes]) for lanes in _key_heads(static)),
        strict=True,
    )
    keys, of_dimension = ([x.astype(k.dtype) for x in some] for some in (wide, [x.T for x in wide]))
    ps = [
        _weights(keys[head // static.share], turned[:, lanes], mask, lse, head)
        for head, lanes in heads
    ]
    d_ps = [_product(values[head // static.share], d_out[:, lanes], 1) for head, lanes in heads]
    d_scores = [
        p * (d_p - delta[0, pl.ds(head, 1)])
        for (head, _), p, d_p in zip(heads, ps, d_ps, strict=True)
    ]
    for (head, lanes), d_score in zip(heads, d_scores, strict=True):
        sums[lanes] += _product(of_dimension[head // static.share], d_score.astype(k.dtype))

    @pl.when(is_last)
    def _() -> None:
        for _head, lanes in heads:
            d_q[:, lanes] = _turned(sums[lanes].T * _scale(static, q), q_angles, back=True).astype(
                d_q.dtype
            )


def _key_kernel(
    static: Static,
    query: Any,
    key: Any,
    q_tokens: Any,
    k_tokens: Any,
    q: Any,
    k: Any,
    v: Any,
    q_angles: Any,
    k_angles: Any,
    d_out: Any,
    lse: Any,
    delta: Any,
    d_k: Any,
    d_v: Any,
    turned: Any,
    sum_k: Any,
    sum_v: Any,
) -> None:
    """The gradients of keys and values of some key heads, summed over the query heads of each."""
    is_first, is_last = _ends(key)

    @pl.when(is_first)
    def _() -> None:
        for lanes in _key_heads(static):
            turned[:, lanes] = _turned(k[:, lanes], k_angles).astype(k.dtype)
        sum_k[...], sum_v[...] = (jnp.zeros(sums.shape, jnp.float32) for sums in (sum_k, sum_v))

    heads, of_keys, mask = _heads(static), _key_heads(static), _mask(q_tokens, k_tokens)
    queries, d_heads = _turned_heads(static, q, q_angles), [d_out[:, lanes] for _, lanes in heads]
    ps = [
        _weights(turned[:, of_keys[head // static.share]], one, mask, lse, head)
        for head, one in enumerate(queries)
    ]
    d_ps = [
        _product(v[:, of_keys[head // static.share]], d_head, 1)
        for head, d_head in enumerate(d_heads)
    ]
    d_scores = [
        p * (d_p - delta[0, pl.ds(head, 1)])
        for (head, _), p, d_p in zip(heads, ps, d_ps, strict=True)
    ]
    for number, lanes in enumerate(of_keys):
        mine = slice(number * static.share, (number + 1) * static.share)
        sum_v[:, lanes] += _product_of(ps[mine], d_heads[mine])
        sum_k[:, lanes] += _product_of(d_scores[mine], queries[mine])

    @pl.when(is_last)
    def _() -> None:
        for lanes in _key_heads(static):
            d_k[:, lanes] = _turned(sum_k[:, lanes], k_angles, back=True).astype(d_k.dtype)
        d_v[...] = sum_v[...].astype(d_v.dtype)


def _ends(order: Any) -> tuple[jax.Array, jax.Array]:
    """Whether a step's pair is the first of its block, and the last."""
    pair = pl.program_id(1)
    return (pair == 0) | (order[jnp.maximum(pair - 1, 0)] != order[pair]), order[pair + 1] != order[
        pair
    ]


def _heads(static: Static) -> list[tuple[int, Any]]:
    """The query heads of a step, and where each is."""
    return [
        (head, pl.ds(head * static.width, static.width))
        for head in range(static.share * static.at_once)
    ]


def _key_heads(static: Static) -> list[Any]:
    """Where each key head of a step is."""
    return [pl.ds(head * static.width, static.width) for head in range(static.at_once)]


def _turned_heads(static: Static, q: Any, angles: Any) -> list[jax.Array]:
    """Queries by head, rotated and scaled; rounded in between, as elsewhere (`by_key_head`)."""
    turned = (
        _turned(q[:, lanes], angles).astype(q.dtype).astype(jnp.float32)
        for _, lanes in _heads(static)
    )
    return [(x * _scale(static, q)).astype(q.dtype) for x in turned]


def _scale(static: Static, like: Any) -> jax.Array:
    return jnp.asarray(static.head_dim**-0.5, like.dtype).astype(jnp.float32)


def _turned(x: jax.Array, angles_ref: Any, back: bool = False) -> jax.Array:
    """x[b, A] rotated by the angles of its tokens (`rotary.rotate`), or back; float32."""
    x, angles, half = x.astype(jnp.float32), angles_ref[...], x.shape[1] // 2
    exchanged, is_first = (
        tpu.roll(angles, half, 1),
        jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < half,
    )
    cos, sin = jnp.where(is_first, angles, exchanged), jnp.where(is_first, exchanged, angles)
    return x * cos + tpu.roll(x, half, 1) * jnp.where(is_first == back, sin, -sin)


def _mask(q_tokens: Any, k_tokens: Any) -> jax.Array:
    """bool[keys, queries]"""
    return reads(
        tuple(q_tokens[0, pl.ds(number, 1)] for number in range(3)),
        tuple(k_tokens[:, pl.ds(number, 1)] for number in range(3)),
    )


def _weights(
    keys: jax.Array, queries: jax.Array, mask: jax.Array, lse: Any, head: int
) -> jax.Array:
    """Softmax's, [keys, queries], from its log-sum-exp."""
    return jnp.exp2(
        jnp.where(mask, _product(keys, queries, 1) * LOG2E - lse[0, pl.ds(head, 1)], LOWEST)
    )


def _transposed(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32).T.astype(x.dtype)


def _product(a: jax.Array, b: jax.Array, contracted: int = 0) -> jax.Array:
    """a[M, X] with b, of which X is this dimension, in float32."""
    precision = (
        None if b.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    )  # Mosaic has no other of 16 bits
    return jax.lax.dot_general(a, b, (((1,), (contracted,)), ((), ())), precision, jnp.float32)


def _product_of(a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
    """The sum of products of matrices [M, X] and [X, N], as one."""
    return _product(jnp.concatenate(a, 1).astype(b[0].dtype), jnp.concatenate(b, 0))
