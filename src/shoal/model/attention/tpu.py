"""Attention of rows of several sequences on TPU by three kernels in Pallas for Mosaic: forward; dq;
dk and dv.

The grid of a kernel is, for each key head, the list of the pairs of blocks in which a query may
read a key: what lies between is neither loaded nor computed, and takes no step. Pairs of the same
block of queries follow each other (in the third kernel those of the same block of keys), so that
its sums stay in on-chip memory (FlashAttention-2, Dao 2023, arXiv 2307.08691, algorithms 1 and 2).
Heads stay where products put them, side by side in [tokens, heads x A], and q and k are rotated
within the kernels: between products and attention nothing is transposed or copied.
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

from shoal.model.attention import softmax
from shoal.model.attention.decode_tpu import LANES
from shoal.model.attention.rule import Tokens, needed_blocks, reads
from shoal.model.attention.softmax import LOG2E, LOWEST, NO_KEY, RunningSoftmax, largest_block


class Pairs(NamedTuple):
    """Pairs (block of queries, block of keys) in the order of one of the two. Blocks are numbered
    over all rows; after the last pair all numbers are -1."""

    query: jax.Array  # int32[P + 1]: number of the block of queries of each pair
    key: jax.Array  # int32[P + 1]: number of the block of keys of each pair
    size: jax.Array  # int32[1]: number of pairs


class RowPairs(NamedTuple):
    """Which blocks of queries [R, T] read which blocks of keys [R, S], and the tokens of both, each
    row filled up to whole blocks; for whole rows S is T.

    The mask is computed from each token's three numbers (segment, prompt, position). A kernel's
    scores are [keys, queries], so a query's numbers lie along the last dimension, a key's along the
    first.
    """

    by_query: Pairs  # the pairs in the order of blocks of queries
    by_key: Pairs  # the pairs in the order of blocks of keys
    # int32[R * n, 3, b]: by block of queries, (segment, prompt, position) of each of its b tokens
    query: jax.Array
    key: jax.Array  # int32[R * S, 3]: (segment, prompt, position) of each key


BLOCK = 256
"""Tokens of a block, of queries and of keys: prompts and completions are often not much longer."""

MOST_LANES = 8 * LANES
"""Most lanes that the query heads of a step take together: with one head a step, the step itself
would cost as much again as the head, and products would wait for each other."""

WIDE_VMEM = 32 << 20
"""Bytes of on-chip memory of a kernel whose step has more lanes, because one key head has so many
query heads: 8 heads of 512 do not fit the 16 MB that a v5p's programs have by default."""

LONG = 2**15
"""Tokens of a row above which blocks are twice as long, because the list of pairs has to fit the
scalar core's memory."""


def block_size(size: int) -> int:
    """Returns the tokens of a block for rows of `size` tokens, which are filled up to whole blocks:
    128 up to 128 tokens, 256 up to LONG, 512 above."""
    if size <= LANES:
        return LANES
    if size <= LONG:
        return BLOCK
    return 2 * BLOCK


def block_pairs(query: Tokens, key: Tokens) -> RowPairs:
    """Lists which blocks of queries read which blocks of keys, once ordered by query block and once
    by key block, together with each token's three numbers (segment, prompt, position). `query` are
    the tokens of whole rows or of a part of each row, `key` those of whole rows. `RowPairs` says
    why the numbers of queries and keys lie in different orders."""
    block = block_size(key.segment.shape[1])
    needed = needed_blocks(query, key, block)

    def in_columns(tokens: Tokens) -> jax.Array:
        """Returns int32[R * T', 3], the (segment, prompt, position) of each token. T' is T rounded
        up to whole blocks: each row is filled up with tokens of segment 0, which read nothing and
        are not read."""
        columns = []
        for numbers in (tokens.segment, tokens.prompt, tokens.position):
            filled = jnp.pad(numbers, ((0, 0), (0, -numbers.shape[1] % block)))
            columns.append(filled.reshape(-1))
        return jnp.stack(columns, -1)

    return RowPairs(
        by_query=_pairs(needed),
        by_key=_pairs(needed, of_keys=True),
        query=in_columns(query).reshape(-1, block, 3).mT,
        key=in_columns(key),
    )


def _pairs(needed: jax.Array, of_keys: bool = False) -> Pairs:
    """Returns the pairs of blocks for which needed[R, n, m] is True, in the order of query blocks,
    or of key blocks if `of_keys`. A block that needs no other is in one pair nevertheless, in which
    the mask is False: otherwise its results would never be written."""
    needed = needed.mT if of_keys else needed
    needed = needed.at[..., 0].set(needed[..., 0] | ~needed.any(-1))
    rows, count, others = needed.shape
    # No query reads a later key, so whole rows need at most half of all pairs.
    most_of_row = count * (count + 1) // 2 if count == others else count * others
    most = rows * most_of_row
    order = jnp.argsort(~needed.reshape(-1), stable=True)[:most].astype(jnp.int32)
    total = needed.sum()[None]
    is_pair = jnp.arange(most) < total

    def ended(numbers: jax.Array) -> jax.Array:
        """Returns numbers of blocks, with -1 after the last pair."""
        return jnp.pad(jnp.where(is_pair, numbers, -1), (0, 1), constant_values=-1)

    # `order` numbers the entries of needed[R, n, m] row by row: entry (r, i, j) is the pair of the
    # blocks r * n + i and r * m + j, numbered over all rows.
    own = ended(order // others)
    other = ended(order // (count * others) * others + order % others)
    if of_keys:
        return Pairs(query=other, key=own, size=total)
    return Pairs(query=own, key=other, size=total)


def attend_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    pairs: RowPairs,
    interpret: bool = False,
) -> jax.Array:
    """Computes softmax attention of q[R, T, H * A] to k, v[R, S, K * A] -> [R, T, H * A]; padding
    gives 0. Scores are scaled by 1/sqrt(A), within the kernels; they and all sums are float32. q
    and k are first rotated by `angles`, float32[R, T, A] and float32[R, S, A] (`side_by_side`).
    `pairs` are those of `block_pairs`. `interpret` runs the kernel as plain JAX, on any device, for
    tests."""
    rows, size, _ = q.shape
    q_angles, k_angles = angles
    block = block_size(k.shape[1])
    head_dim = q_angles.shape[-1]
    static = Static(
        rows=rows,
        share=q.shape[2] // k.shape[2],
        heads=k.shape[2] // head_dim,
        block=block,
        head_dim=head_dim,
        interpret=interpret,
    )
    width = static.width

    def flat(x: jax.Array) -> jax.Array:
        """Returns the tokens of all rows in one dimension, with each half of a head filled up to
        half of the head's lanes. Rows are filled up to whole blocks first."""
        if width != head_dim:
            rows, size, _ = x.shape
            halves = x.reshape(rows, size, -1, 2, head_dim // 2)
            halves = jnp.pad(halves, ((0, 0),) * 4 + ((0, (width - head_dim) // 2),))
            x = halves.reshape(rows, size, -1)
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0))).reshape(-1, x.shape[2])

    out: Any = _attend(static, flat(q), flat(k), flat(v), flat(q_angles), flat(k_angles), pairs)
    if width == head_dim:
        return out.reshape(rows, -1, q.shape[2])[:, :size]
    # Takes away the lanes that filled up each half of a head.
    halves = out.reshape(rows, out.shape[0] // rows, -1, 2, width // 2)
    return halves[:, :size, ..., : head_dim // 2].reshape(q.shape)


def side_by_side(rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Joins cos and sin, [R, T, 1, A/2] each, to [R, T, A]: the form in which kernels take
    angles."""
    return jnp.concatenate(rope, -1)[:, :, 0]


def unrotated(angles: jax.Array) -> jax.Array:
    """Returns angles of 0 (cos 1, sin 0) in the shape of `angles`, for keys that are rotated
    already."""
    half = angles[..., None, : angles.shape[-1] // 2]
    return side_by_side((jnp.ones_like(half), jnp.zeros_like(half)))


class Static(NamedTuple):
    """Sizes that a kernel is compiled for."""

    rows: int
    share: int  # query heads of each key head
    heads: int  # number of key heads
    block: int
    head_dim: int  # before it is filled up to whole registers
    interpret: bool

    @property
    def width(self) -> int:
        """Lanes that a head takes: A, rounded up to whole registers."""
        return LANES * -(-self.head_dim // LANES)

    @property
    def key_heads_at_once(self) -> int:
        """Key heads of a step. There are at least two steps a pair if possible, for devices of two
        cores."""
        most = min(MOST_LANES // (self.share * self.width), self.heads // 2)
        return largest_block(self.heads, max(1, most))

    @property
    def heads_at_once(self) -> int:
        """Query heads of a step."""
        return self.share * self.key_heads_at_once

    def lanes(self, head: int) -> Any:
        """The slice of lanes in which a head of a step is."""
        return pl.ds(head * self.width, self.width)


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
    """Returns the output, and what the backward pass reads: all inputs, the output, and the
    log-sum-exp of each query."""
    steps = static.heads // static.key_heads_at_once
    lse = jax.ShapeDtypeStruct((steps, static.heads_at_once, len(q)), jnp.float32)
    shared = [
        (q, "queries"),
        (k, "keys"),
        (v, "keys"),
        (q_angles, "query angles"),
        (k_angles, "key angles"),
    ]
    # 2 products of a pair of blocks: scores, and weights times values
    out, lse = _call(
        _forward_kernel, 2, static, pairs, shared, [(q, "queries"), (lse, "sums of queries")]
    )
    out = checkpoint_name(out, "kernel")  # see REMAT
    lse = checkpoint_name(lse, "kernel")
    return out, (q, k, v, q_angles, k_angles, pairs, out, lse)


def _backward(static: Static, residuals: Any, d_out: jax.Array) -> tuple:
    """Returns the gradients of q, k and v; angles and pairs have none. `residuals` is what
    `_forward` returned for it."""
    q, k, v, q_angles, k_angles, pairs, out, lse = residuals
    inputs = [
        (q, "queries"),
        (k, "keys"),
        (v, "keys"),
        (q_angles, "query angles"),
        (k_angles, "key angles"),
        (d_out, "queries"),
        (lse, "sums of queries"),
    ]
    inputs_of_queries = inputs.copy()
    inputs_of_queries.append((out, "queries"))
    results = [(q, "queries"), (lse, "sums of queries")]
    # 3 products: scores again, dp, and the sum of d_q; for keys 4, since they have two sums
    d_q, delta = _call(_query_kernel, 3, static, pairs, inputs_of_queries, results)
    inputs_of_keys = inputs.copy()
    inputs_of_keys.append((delta, "sums of queries"))
    results = [(k, "keys"), (v, "keys")]
    d_k, d_v = _call(_key_kernel, 4, static, pairs, inputs_of_keys, results)
    return d_q, d_k, d_v, None, None, None


_attend.defvjp(_forward, _backward)


def _call(
    kernel: Callable, products: int, static: Static, pairs: RowPairs, inputs: list, results: list
) -> Any:
    """Calls a kernel over all pairs of blocks, one step a pair and some heads, and returns its
    results. Each of `inputs` and `results` is (array, key of `block_specs`): the key says which
    part of the array a step gets. It is "queries", "keys", "query angles", "key angles" or "sums of
    queries". Of results only shapes and types are read. `products` is the number of matrix products
    that a pair takes, for the cost estimate."""
    block = static.block
    width = static.width
    key_heads = static.key_heads_at_once
    heads = static.heads_at_once
    of_queries = kernel is not _key_kernel
    order = pairs.by_query if of_queries else pairs.by_key

    # Each function maps a step, its group of heads and its pair, to the place of the step's block
    # in an array, counted in blocks. `query` and `key` are the numbers of all pairs' blocks.
    def heads_of_queries(head: Any, pair: Any, query: Any, key: Any) -> tuple:
        return query[pair], head

    def heads_of_keys(head: Any, pair: Any, query: Any, key: Any) -> tuple:
        return key[pair], head

    def queries_of_pair(head: Any, pair: Any, query: Any, key: Any) -> tuple:
        return query[pair], 0

    def keys_of_pair(head: Any, pair: Any, query: Any, key: Any) -> tuple:
        return key[pair], 0

    def sums_of_queries(head: Any, pair: Any, query: Any, key: Any) -> tuple:
        return head, 0, query[pair]

    def query_tokens_of_pair(head: Any, pair: Any, query: Any, key: Any) -> tuple:
        return query[pair], 0, 0

    block_specs = {
        "queries": pl.BlockSpec((block, heads * width), heads_of_queries),
        "keys": pl.BlockSpec((block, key_heads * width), heads_of_keys),
        "query angles": pl.BlockSpec((block, width), queries_of_pair),
        "key angles": pl.BlockSpec((block, width), keys_of_pair),
        "sums of queries": pl.BlockSpec((1, heads, block), sums_of_queries),
    }
    # Scores are [keys, queries], so numbers of a query, and sums for it, lie along the lanes.
    query_tokens = pl.BlockSpec((1, 3, block), query_tokens_of_pair)
    key_tokens = pl.BlockSpec((block, 3), keys_of_pair)
    q, _ = inputs[0]
    k, _ = inputs[1]
    by_token = (block, heads * width)
    by_dimension = (heads * width, block)
    by_key = (block, key_heads * width)
    by_query = (heads, 1, block)
    if kernel is _key_kernel:
        scratch = [(by_key, q.dtype), (by_key, jnp.float32), (by_key, jnp.float32)]
    else:
        scratch = [(by_token, q.dtype), (by_dimension, jnp.float32)]
    if kernel is _forward_kernel:
        scratch += [(by_query, jnp.float32), (by_query, jnp.float32)]
    arrays = [x for x, _ in inputs]
    # The number of scores if every block read every other of its row.
    num_scores = len(q) * len(k) // static.rows * static.share * static.heads
    return pl.pallas_call(
        partial(kernel, static),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in results],
        grid_spec=tpu.PrefetchScalarGridSpec(
            # the first two arguments, the numbers of pairs' blocks, are known before a step
            num_scalar_prefetch=2,
            grid=(static.heads // key_heads, order.size[0]),
            out_specs=[block_specs[name] for _, name in results],
            in_specs=[query_tokens, key_tokens] + [block_specs[name] for _, name in inputs],
            scratch_shapes=[tpu.VMEM(shape, dtype) for shape, dtype in scratch],
        ),
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=WIDE_VMEM if heads * width > MOST_LANES else None,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * num_scores * width, transcendentals=num_scores, bytes_accessed=0
        ),
        interpret=static.interpret,
        name=kernel.__name__.removeprefix("_"),
    )(order.query, order.key, pairs.query, pairs.key, *arrays)


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
    rotated_q: Any,
    sums: Any,
    top: Any,
    total: Any,
) -> None:
    """Computes output and log-sum-exp of the query heads of some key heads, for one pair of blocks
    a step. Sums are kept in `rotated_q`, `sums`, `top` and `total` from a block's first pair to its
    last, which writes `out` and `lse` (in base 2). `query` and `key` are the numbers of the pairs'
    blocks."""
    is_first, is_last = _is_first_and_last(query)
    heads = range(static.heads_at_once)

    @pl.when(is_first)
    def _() -> None:
        """Rotates the queries, and starts their softmax."""
        rotated_q[...] = jnp.concatenate(_rotated_queries(static, q, q_angles), 1)
        top[...] = jnp.full(top.shape, NO_KEY, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    mask = _mask(q_tokens, k_tokens)
    keys = []
    for key_head in range(static.key_heads_at_once):
        keys.append(_rotated(k[:, static.lanes(key_head)], k_angles).astype(k.dtype))
    values = []
    for key_head in range(static.key_heads_at_once):
        values.append(_transposed(v[:, static.lanes(key_head)]))
    # Stage by stage, not head by head, so that the products of several heads follow each other
    # directly.
    scores = []
    for head in heads:
        # 1: both have their dimensions last
        products = _product(keys[head // static.share], rotated_q[:, static.lanes(head)], 1)
        scores.append(jnp.where(mask, products * LOG2E, LOWEST))
    # Scores are [keys, queries]: 0 is the keys' dimension, here and below.
    tops = [softmax.raise_top(top[head], scores[head], 0) for head in heads]
    weights = [jnp.exp2(scores[head] - tops[head]) for head in heads]
    weighted_values = []
    for head in heads:
        weighted_values.append(
            _product(values[head // static.share], weights[head].astype(v.dtype))
        )
    for head in heads:
        lanes = static.lanes(head)
        running = RunningSoftmax(top[head], total[head], sums[lanes])
        running = softmax.accumulate(
            running, tops[head], weights[head], weighted_values[head], jnp.exp2, 0
        )
        top[head], total[head], sums[lanes] = running

    @pl.when(is_last)
    def _() -> None:
        """Writes the results of the block of queries."""
        for head in heads:
            lanes = static.lanes(head)
            running = RunningSoftmax(top[head], total[head], sums[lanes])
            mean, log_sum = softmax.finish(running, jnp.log2)
            out[:, lanes] = mean.T.astype(out.dtype)
            lse[0, pl.ds(head, 1)] = log_sum


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
    rotated_q: Any,
    sums: Any,
) -> None:
    """Computes, for one pair of blocks a step, the gradient of q, and delta, the sum of out * d_out
    over a head's dimensions. The gradient of softmax's scores is p * (dp - delta). `delta` is
    written at a block's first pair, `d_q` at its last; in between its sum is kept in `sums`."""
    is_first, is_last = _is_first_and_last(query)
    heads = range(static.heads_at_once)

    @pl.when(is_first)
    def _() -> None:
        """Rotates the queries, sets their sums to 0, and writes `delta`."""
        rotated_q[...] = jnp.concatenate(_rotated_queries(static, q, q_angles), 1)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)
        for head in heads:
            lanes = static.lanes(head)
            products = out[:, lanes].astype(jnp.float32) * d_out[:, lanes].astype(jnp.float32)
            delta[0, pl.ds(head, 1)] = products.T.sum(0, keepdims=True)

    mask = _mask(q_tokens, k_tokens)
    wide_keys = []
    values = []
    for key_head in range(static.key_heads_at_once):
        lanes = static.lanes(key_head)
        wide_keys.append(_rotated(k[:, lanes], k_angles))
        values.append(v[:, lanes])
    transposed_keys = [x.T for x in wide_keys]
    keys = [x.astype(k.dtype) for x in wide_keys]
    keys_by_dimension = [x.astype(k.dtype) for x in transposed_keys]
    ps = []
    for head in heads:
        queries = rotated_q[:, static.lanes(head)]
        ps.append(_weights(keys[head // static.share], queries, mask, lse, head))
    d_ps = []
    for head in heads:
        d_ps.append(_product(values[head // static.share], d_out[:, static.lanes(head)], 1))
    # [keys, queries], like `ps` and `d_ps`; delta has one number a query.
    d_scores = [ps[head] * (d_ps[head] - delta[0, pl.ds(head, 1)]) for head in heads]
    for head in heads:
        of_dimension = keys_by_dimension[head // static.share]
        sums[static.lanes(head)] += _product(of_dimension, d_scores[head].astype(k.dtype))

    @pl.when(is_last)
    def _() -> None:
        """Writes the gradient of the block of queries, rotated back."""
        for head in heads:
            lanes = static.lanes(head)
            gradient = _rotated(sums[lanes].T * _scale(static, q), q_angles, back=True)
            d_q[:, lanes] = gradient.astype(d_q.dtype)


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
    rotated_k: Any,
    sum_k: Any,
    sum_v: Any,
) -> None:
    """Computes the gradients of keys and values of some key heads, summed over the query heads of
    each, for one pair of blocks a step. Sums are kept in `sum_k` and `sum_v` from a block's first
    pair to its last, which writes `d_k` and `d_v`."""
    is_first, is_last = _is_first_and_last(key)
    heads = range(static.heads_at_once)
    key_heads = range(static.key_heads_at_once)

    @pl.when(is_first)
    def _() -> None:
        """Rotates the keys, and sets the sums to 0."""
        for key_head in key_heads:
            lanes = static.lanes(key_head)
            rotated_k[:, lanes] = _rotated(k[:, lanes], k_angles).astype(k.dtype)
        sum_k[...] = jnp.zeros(sum_k.shape, jnp.float32)
        sum_v[...] = jnp.zeros(sum_v.shape, jnp.float32)

    mask = _mask(q_tokens, k_tokens)
    queries = _rotated_queries(static, q, q_angles)
    d_outs = [d_out[:, static.lanes(head)] for head in heads]
    ps = []
    for head in heads:
        keys = rotated_k[:, static.lanes(head // static.share)]
        ps.append(_weights(keys, queries[head], mask, lse, head))
    d_ps = []
    for head in heads:
        d_ps.append(_product(v[:, static.lanes(head // static.share)], d_outs[head], 1))
    # [keys, queries], like `ps` and `d_ps`; delta has one number a query.
    d_scores = [ps[head] * (d_ps[head] - delta[0, pl.ds(head, 1)]) for head in heads]
    for key_head in key_heads:
        lanes = static.lanes(key_head)
        # the query heads that read this key head
        readers = slice(key_head * static.share, (key_head + 1) * static.share)
        sum_v[:, lanes] += _sum_of_products(ps[readers], d_outs[readers])
        sum_k[:, lanes] += _sum_of_products(d_scores[readers], queries[readers])

    @pl.when(is_last)
    def _() -> None:
        """Writes the gradients of the block of keys, that of k rotated back."""
        for key_head in key_heads:
            lanes = static.lanes(key_head)
            gradient = _rotated(sum_k[:, lanes], k_angles, back=True)
            d_k[:, lanes] = gradient.astype(d_k.dtype)
        d_v[...] = sum_v[...].astype(d_v.dtype)


def _is_first_and_last(order: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (True if the running step's pair is the first of its block, True if it is the last).
    `order` are the numbers of the pairs' blocks, with -1 after the last pair."""
    pair = pl.program_id(1)
    is_first = (pair == 0) | (order[jnp.maximum(pair - 1, 0)] != order[pair])
    is_last = order[pair + 1] != order[pair]
    return is_first, is_last


def _rotated_queries(static: Static, q: Any, angles: Any) -> list[jax.Array]:
    """Returns the queries of each head of the step, rotated and scaled by 1/sqrt(A), in the type of
    `q`. They are rounded in between, as in the other forms (`by_key_head`)."""
    queries = []
    for head in range(static.heads_at_once):
        rotated = _rotated(q[:, static.lanes(head)], angles).astype(q.dtype).astype(jnp.float32)
        queries.append((rotated * _scale(static, q)).astype(q.dtype))
    return queries


def _scale(static: Static, like: Any) -> jax.Array:
    """Returns 1/sqrt(A), rounded to the type of `like`, as float32. A is the dimension before it is
    filled up."""
    return jnp.asarray(static.head_dim**-0.5, like.dtype).astype(jnp.float32)


def _rotated(x: jax.Array, angles_ref: Any, back: bool = False) -> jax.Array:
    """Rotates x[b, A] by the angles of its tokens (like `rotary.rotate`), or back; the result is
    float32."""
    x = x.astype(jnp.float32)
    angles = angles_ref[...]  # cos in the first half of the lanes, sin in the second
    half = x.shape[1] // 2
    exchanged = tpu.roll(angles, half, 1)
    is_first_half = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < half
    cos = jnp.where(is_first_half, angles, exchanged)
    sin = jnp.where(is_first_half, exchanged, angles)
    # [first * cos - second * sin, second * cos + first * sin]; back, sin has the other sign.
    return x * cos + tpu.roll(x, half, 1) * jnp.where(is_first_half == back, sin, -sin)


def _mask(q_tokens: Any, k_tokens: Any) -> jax.Array:
    """Returns bool[keys, queries]: which query reads which key."""
    query = tuple(q_tokens[0, pl.ds(number, 1)] for number in range(3))
    key = tuple(k_tokens[:, pl.ds(number, 1)] for number in range(3))
    return reads(query, key)


def _weights(
    keys: jax.Array, queries: jax.Array, mask: jax.Array, lse: Any, head: int
) -> jax.Array:
    """Returns softmax's weights [keys, queries], computed again from the log-sum-exp `lse`, which
    is in base 2; 0 where the mask is False. `head` is the number of a query head in the step."""
    scores = _product(keys, queries, 1) * LOG2E
    return jnp.exp2(jnp.where(mask, scores - lse[0, pl.ds(head, 1)], LOWEST))


def _transposed(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32).T.astype(x.dtype)


def _product(a: jax.Array, b: jax.Array, contracted: int = 0) -> jax.Array:
    """Multiplies a[M, X] with b to a float32 matrix; `contracted` is the dimension of b that is
    X."""
    precision = None if b.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    # Mosaic has no other precision of 16 bits.
    return jax.lax.dot_general(a, b, (((1,), (contracted,)), ((), ())), precision, jnp.float32)


def _sum_of_products(a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
    """Returns the sum of the products of matrices [M, X] and [X, N], computed as one product."""
    return _product(jnp.concatenate(a, 1).astype(b[0].dtype), jnp.concatenate(b, 0))
