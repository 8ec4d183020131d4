"""The gated delta rule and its convolution (Yang et al. 2024, arXiv:2412.06464), over packed rows,
sequences, and single tokens.

A head's state S[dk, dv] changes with each token, which has a query q, a key k, a value v, a decay
and a rate beta:

    S = exp(log_decay) S            the state is forgotten in part
    S = S + k (beta (v - k S))      what the key reads is replaced, in part, by the value
    out = q S

Over many tokens this is computed by chunks. Within a chunk all replaced values solve a triangular
system (the WY form), so that everything is a product of matrices; a scan carries the state from
chunk to chunk. Products read arrays in the type of q, k and v, and sum in float32; states, decays
and the system's inverse are float32.

In a packed row a prompt is followed by its completions, and each of them goes on from the state
after the prompt. The tokens before one in its own sequence are its ancestors; within a chunk they
are a mask, as in attention. Two states are carried: that of the sequence under way, and that after
the latest prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.model.attention.rule import Tokens, reads
from shoal.model.attention.softmax import einsum32

CHUNK = {"cpu": 64, "gpu": 128, "tpu": 128}
"""Most tokens of a chunk, a power of two, by platform. Accelerators get chunks of twice the size:
half as many operations in a row, each with larger products of matrices, whose sides of 128 are
those of a TPU's matrix unit."""

INVERTED_AT_ONCE = {"cpu": 16, "gpu": 128, "tpu": 128}
"""Most rows of a triangular matrix that is inverted by products of its own size, by platform: few
operations. A larger one is inverted by halves: few FLOPs."""

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by it."""


# ---- the convolution


def chain_before(before: jax.Array, count: int) -> jax.Array:
    """Returns the index in its row of the first to `count`-th token before each token in its own
    sequence, int32[R, T, count]; T where there is none. `before`[R, T] is that of a
    `LearnerBatch`."""
    size = before.shape[1]
    index = jnp.arange(size, dtype=jnp.int32)
    one_before = jnp.where(before == index, size, before)  # T at a sequence's first token
    found = one_before
    steps = [found]
    for _ in range(count - 1):
        found = jnp.take_along_axis(one_before, found, axis=1, mode="fill", fill_value=size)
        steps.append(found)
    return jnp.stack(steps, axis=-1)


@jax.custom_vjp
def convolve(x: jax.Array, weight: jax.Array, before: jax.Array) -> jax.Array:
    """Computes silu of the causal convolution of each channel of x[R, T, C] with weight[C, size],
    in x's type. `before` is what `chain_before` returned for size - 1 tokens; the last column of
    `weight` is for the token itself."""
    return convolve_taps(_taps(x, before), weight)


def _convolve_forward(
    x: jax.Array, weight: jax.Array, before: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return convolve(x, weight, before), (x, weight, before)


def _convolve_backward(kept: tuple[jax.Array, ...], gradient: jax.Array) -> tuple:
    """Returns the gradients of x and of weight. A token's gradient comes from the tokens behind it
    in the row, which is read in order. Only the first tokens of completions add theirs elsewhere,
    at their prompt's end: sums by index are slow on all platforms."""
    x, weight, before = kept
    size = x.shape[1]
    taps = _taps(x, before)
    _, silu_backward = jax.vjp(jax.nn.silu, _weighed(taps, weight))
    (d_sum,) = silu_backward(gradient.astype(jnp.float32))
    add_at = jax.vmap(lambda array, index, values: array.at[index].add(values, mode="drop"))
    index = jnp.arange(size)
    d_x = d_sum * _column(weight, 0)
    d_columns = [(d_sum * taps[0]).sum((0, 1))]
    for step in range(1, len(taps)):
        tap_of = before[..., step - 1]
        is_in_order = tap_of == index - step
        reads_this = jnp.pad(is_in_order[:, step:], ((0, 0), (0, min(step, size))))
        behind = jnp.where(reads_this, index + step, size)
        d_x = d_x + _tokens_at(d_sum, behind) * _column(weight, step)
        elsewhere = jnp.where(is_in_order, size, tap_of)
        d_x = add_at(d_x, elsewhere, d_sum * _column(weight, step))
        d_columns.append((d_sum * taps[step]).sum((0, 1)))
    d_weight = jnp.stack(d_columns[::-1], axis=-1)
    return d_x.astype(x.dtype), d_weight.astype(weight.dtype), None


convolve.defvjp(_convolve_forward, _convolve_backward)


def convolve_after(
    x: jax.Array, tail: jax.Array, weight: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes `convolve` of sequences x[R, T, C] that go on after tail[R, size - 1, C], their last
    inputs. Returns (result, the tail after the first count[R] tokens)."""
    size = x.shape[1]
    steps = tail.shape[1]
    inputs = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    taps = []
    for step in range(steps + 1):
        first = steps - step
        taps.append(inputs[:, first : first + size])
    last = count[:, None] + jnp.arange(steps)
    new_tail = jnp.take_along_axis(inputs, last[..., None], axis=1)
    return convolve_taps(taps, weight), new_tail


def convolve_taps(taps: Sequence[jax.Array], weight: jax.Array) -> jax.Array:
    """Computes the convolution of tokens whose inputs are side by side: silu of the sum of
    taps[..., C] times their columns of weight[C, size], in the taps' type. The first tap is the
    token itself, the next one the token before it, and so on."""
    return jax.nn.silu(_weighed(taps, weight)).astype(taps[0].dtype)


def _taps(x: jax.Array, before: jax.Array) -> list[jax.Array]:
    """Returns x[R, T, C], and for each step back the tokens so far before, zeros where there are
    none."""
    taps = [x]
    for step in range(before.shape[-1]):
        taps.append(_tokens_at(x, before[..., step]))
    return taps


def _tokens_at(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the tokens of x[R, T, C] at index[R, T]; zeros where it is T."""
    return jnp.take_along_axis(x, index[..., None], axis=1, mode="fill", fill_value=0)


def _weighed(taps: Sequence[jax.Array], weight: jax.Array) -> jax.Array:
    """Returns the sum of taps[..., C] times their columns of weight[C, size], in float32. The
    first tap is the token itself."""
    total = taps[0].astype(jnp.float32) * _column(weight, 0)
    for step in range(1, len(taps)):
        total = total + taps[step].astype(jnp.float32) * _column(weight, step)
    return total


def _column(weight: jax.Array, step: int) -> jax.Array:
    """Returns the column of weight[C, size] for the token `step` before, in float32."""
    return weight[:, weight.shape[1] - 1 - step].astype(jnp.float32)


# ---- the rule


def delta_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    segment: jax.Array,
    prompt: jax.Array,
    platform: str,
) -> jax.Array:
    """Computes the gated delta rule over packed rows -> [R, T, Hv, dv], in v's type.

    q and k are [R, T, Hk, dk], which are divided by their lengths here; v[R, T, Hv, dv],
    log_decay[R, T, Hv], none above 0, and beta[R, T, Hv]. Each key head serves Hv // Hk consecutive
    value heads. `segment` and `prompt` are [R, T], those of a `LearnerBatch`; padding gives 0, and
    no gradient. The backward pass keeps the states before each chunk and the replaced values, and
    computes most of the rest again. `platform` is a key of CHUNK.
    """
    size = segment.shape[1]
    chunk = _chunk_size(size, platform)
    history = _history_of_rows(_by_chunk(segment, chunk), _by_chunk(prompt, chunk))
    tokens = _chunked(q, k, v, log_decay, beta, chunk)
    rows, _, key_heads, dk = k.shape
    value_heads, dv = v.shape[2:]
    share = value_heads // key_heads
    all_states = len(history.states) * dk
    start = jnp.zeros((rows, key_heads, share, all_states, dv), jnp.float32)
    out, _ = _through_chunks(tokens, history, start, platform)
    return _whole_rows(out, size).astype(v.dtype)


def delta_sequence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    count: jax.Array,
    platform: str,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gated delta rule over R sequences that go on from state[R, Hv, dk, dv], of which
    the first count[R] tokens are real. Returns (out[R, T, Hv, dv] in v's type, the state after
    these tokens, float32). The other arguments are those of `delta_rows`."""
    size = q.shape[1]
    chunk = _chunk_size(size, platform)
    is_real = jnp.arange(size) < count[:, None]
    history = _history_of_sequences(_by_chunk(is_real, chunk))
    tokens = _chunked(q, k, v, log_decay, beta, chunk)
    key_heads = k.shape[2]
    start = state.astype(jnp.float32).reshape(len(state), key_heads, -1, *state.shape[2:])
    out, last = _through_chunks(tokens, history, start, platform)
    return _whole_rows(out, size).astype(v.dtype), last.reshape(state.shape)


def delta_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    platform: str,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gated delta rule for one token in each of [N, W] slots: q and k [N, W, Hk, dk],
    v[N, W, Hv, dv], log_decay and beta [N, W, Hv], state[N, W, Hv, dk, dv]. Returns (out[N, W, Hv,
    dv] in v's type, the new state, float32). `platform` is a key of CHUNK."""
    share = v.shape[-2] // k.shape[-2]
    q, k = unit_queries_and_keys(q, k)
    q = jnp.repeat(q.astype(jnp.float32), share, axis=-2)
    k = jnp.repeat(k.astype(jnp.float32), share, axis=-2)
    # Query and key read the state in one pass; the new state is written in another.
    if platform == "gpu":
        # XLA for GPU computes both sums in one fusion, without a product's launches.
        of_query = (q[..., None] * state).sum(-2)
        of_key = (k[..., None] * state).sum(-2)
    else:
        both = jnp.stack([q, k], axis=-2)  # [N, W, Hv, 2, dk]
        of_query, of_key = jnp.unstack(_product(both, state), axis=-2)
    decay = jnp.exp(log_decay.astype(jnp.float32))[..., None]
    rate = beta.astype(jnp.float32)[..., None]
    replaced = rate * (v.astype(jnp.float32) - decay * of_key)
    out = decay * of_query + (q * k).sum(-1, keepdims=True) * replaced
    state = decay[..., None] * state + k[..., None] * replaced[..., None, :]
    return out.astype(v.dtype), state


# ---- tokens in chunks


class _Tokens(NamedTuple):
    """Tokens in n chunks of c. h counts key heads, g the value heads of each."""

    both: jax.Array  # [n, R, h, 2 c, dk]: queries, then keys
    v: jax.Array  # [n, R, h, g, c, dv]
    log_decay: jax.Array  # float32[n, R, h, g, c]
    beta: jax.Array  # float32[n, R, h, g, c]


class _Carried(NamedTuple):
    """One of the states that are carried from chunk to chunk."""

    # bool[n, R, c]: the tokens whose sequence goes on from it. A token that reads no carried state
    # begins in its chunk, with a state of zeros.
    read_by: jax.Array
    # float32[n, R, c]: 1 at the token whose state it becomes; 0 everywhere: it stays
    becomes: jax.Array

    @classmethod
    def of(cls, read_by: jax.Array, may_become: jax.Array) -> _Carried:
        """Returns the carried state that becomes the one after the last token of each chunk for
        which may_become[n, R, c] is True."""
        return cls(read_by, _at_last(may_become))


class _History(NamedTuple):
    """What the tokens of n chunks follow: tokens of their chunk, and a carried state. One state is
    carried of a sequence. Of a packed row two are: that of the sequence under way, and that after
    the latest prompt. For example a prompt p and its completions a and b, in chunks of four:

        tokens                        p p p a | a b b b
        read the state under way              | a
        read the state after p                |   b b b
        the state under way becomes         a |       b     that after this token
        the state after p becomes         p   |             and stays

    The first a reads no carried state: its ancestors are in its chunk.
    """

    ancestors: jax.Array  # bool[n, R, c, c]: which tokens of the chunk are its ancestors, or itself
    states: tuple[_Carried, ...]


def _history_of_rows(segment: jax.Array, prompt: jax.Array) -> _History:
    """Returns the history of tokens of packed rows, segment and prompt [n, R, c]."""
    index = jnp.broadcast_to(jnp.arange(segment.shape[-1]), segment.shape)
    tokens = Tokens(segment, prompt, index)
    ancestors = reads(tokens.to_meet(3), tokens.to_meet(2))

    def before(numbers: jax.Array) -> jax.Array:
        """Returns the number of the latest token before each chunk, [n, R, 1]; 0 if there is none.
        Numbers rise along a row, so it is the largest."""
        latest = jax.lax.cummax(numbers.max(-1), axis=0)
        return jnp.pad(latest[:-1], ((1, 0), (0, 0)))[..., None]

    is_real = segment > 0
    is_under_way = is_real & (segment == before(segment))
    is_of_prompt = is_real & ~is_under_way & (prompt == before(prompt))
    under_way = _Carried.of(is_under_way, may_become=is_real)
    after_prompt = _Carried.of(is_of_prompt, may_become=is_real & (segment == prompt))
    return _History(ancestors, (under_way, after_prompt))


def _history_of_sequences(is_real: jax.Array) -> _History:
    """Returns the history of tokens [n, R, c] of one sequence a row, of which the first ones are
    real."""
    index = np.arange(is_real.shape[-1])
    ancestors = is_real[..., None] & (index[:, None] >= index)
    return _History(ancestors, (_Carried.of(is_real, may_become=is_real),))


def _at_last(mask: jax.Array) -> jax.Array:
    """Returns float32[..., c]: 1 at the last token for which mask[..., c] is True, else 0."""
    index = np.arange(mask.shape[-1])
    last = jnp.where(mask, index, -1).max(-1, keepdims=True)
    return (index == last).astype(jnp.float32)


def _chunk_size(size: int, platform: str) -> int:
    """Returns the tokens of a chunk for rows of `size` tokens: CHUNK, or fewer for short rows."""
    chunk = 1
    while chunk < min(size, CHUNK[platform]):
        chunk *= 2
    return chunk


def _chunked(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, chunk: int
) -> _Tokens:
    """Divides tokens [R, T, ...] into chunks, the last of which is filled up."""
    q, k = unit_queries_and_keys(q, k)
    key_heads = k.shape[2]

    def by_head(x: jax.Array, first: int, last: int) -> jax.Array:
        """Returns x[n, R, c, heads, ...] with the tokens behind the heads."""
        return jnp.moveaxis(_by_chunk(x, chunk), first, last)

    def by_key_head(x: jax.Array) -> jax.Array:
        """Separates value heads by their key head: [R, T, Hv, ..] -> [R, T, h, g, ..]."""
        return x.reshape(*x.shape[:2], key_heads, -1, *x.shape[3:])

    return _Tokens(
        both=jnp.concatenate([by_head(q, 2, 3), by_head(k, 2, 3)], axis=3),
        v=by_head(by_key_head(v), 2, 4),
        log_decay=by_head(by_key_head(log_decay.astype(jnp.float32)), 2, 4),
        beta=by_head(by_key_head(beta.astype(jnp.float32)), 2, 4),
    )


def _by_chunk(x: jax.Array, chunk: int) -> jax.Array:
    """Fills [R, T, ..] up with zeros and divides it into chunks: [n, R, c, ..]."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % chunk)
    filled = jnp.pad(x, padding)
    return jnp.moveaxis(filled.reshape(len(x), -1, chunk, *x.shape[2:]), 1, 0)


def _whole_rows(x: jax.Array, size: int) -> jax.Array:
    """Joins chunks [n, R, h, g, c, dv] to rows [R, `size`, Hv, dv]."""
    by_token = jnp.transpose(x, (1, 0, 4, 2, 3, 5))  # [R, n, c, h, g, dv]
    rows, chunks, chunk, key_heads, share, dv = by_token.shape
    return by_token.reshape(rows, chunks * chunk, key_heads * share, dv)[:, :size]


def unit_queries_and_keys(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys [.., dk] divided by their lengths, in their own type; queries also
    divided by the root of dk, the usual factor of scores."""

    def unit(x: jax.Array, scale: float) -> jax.Array:
        wide = x.astype(jnp.float32)
        length = jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + NORM_EPS)
        return (wide * (length * scale)).astype(x.dtype)

    return unit(q, q.shape[-1] ** -0.5), unit(k, 1.0)


# ---- the scan


class _OfStates(NamedTuple):
    """What the states of n chunks are computed with, besides values and rates. n is the first
    dimension of each; products with states are with all K of a head, one below the other."""

    keys: jax.Array  # [R, h, c, K dk]: a key next to the state that it reads, else zeros
    # [R, h, g, c, K dk]: a key for each state, decayed until the token whose state that becomes
    writers: jax.Array
    system: jax.Array  # float32[R, h, g, c, c]: what each key reads of them, times the rate
    inverse: jax.Array  # [R, h, g, c, c]: of I + system; it gets no gradient
    since_start: jax.Array  # float32[R, h, g, c]: decay since the chunk's first token
    kept: jax.Array  # float32[R, h, g, K, K]: the share of each state before in each after


class _Prepared(NamedTuple):
    """What does not depend on the carried states, of n chunks."""

    of_states: _OfStates
    queries: jax.Array  # [n, R, h, c, K dk]: as `keys`
    scores: jax.Array  # [n, R, h, g, c, c]: what each query reads of the chunk's replaced values


def _through_chunks(
    tokens: _Tokens, history: _History, state: jax.Array, platform: str
) -> tuple[jax.Array, jax.Array]:
    """Computes the rule chunk after chunk, from state[R, h, g, K dk, dv] on: the K carried states
    of a head stand below each other, in the order of `_History.states`. Returns (out[n, R, h, g, c,
    dv] in the type of q and k, the last state).

    Only what needs the state before a chunk is computed chunk after chunk, by few operations: each
    is small, and waits for the one before. All else is computed for all chunks together, and again
    in the backward pass. On a CPU, where a chunk's arrays stay in its caches and those of all
    chunks do not, all is computed chunk after chunk."""

    # If the layer as a whole is computed again, so are these, and a compiler may join them.
    again = partial(jax.checkpoint, prevent_cse=False)
    is_whole = platform != "cpu"
    prepare = jax.vmap(partial(_prepare, INVERTED_AT_ONCE[platform]))
    prepare = again(prepare) if is_whole else prepare
    outputs = again(jax.vmap(_outputs)) if is_whole else jax.vmap(_outputs)

    def compute(state: jax.Array, chunks: tuple[_Tokens, _History]) -> tuple[jax.Array, jax.Array]:
        """Computes some chunks: (states before them, the chunks) -> (states after them, out)."""
        tokens, history = chunks
        prepared = prepare(tokens, history)
        last, states, replaced = _through_states(state, tokens.v, tokens.beta, prepared.of_states)
        return last, outputs(prepared, states, replaced)

    if is_whole:
        last, out = compute(state, (tokens, history))
        return out, last
    single = jax.tree.map(lambda x: x[:, None], (tokens, history))
    last, out = jax.lax.scan(again(compute), state, single)
    return out[:, 0], last


def _prepare(at_once: int, tokens: _Tokens, history: _History) -> _Prepared:
    """Computes what does not depend on the carried states, of one chunk, whose arrays are those of
    `_Tokens` and `_History` without n. `at_once` is that of `_unit_lower_inverse`."""
    # Letters: r rows, h key heads, g value heads of each, i and j tokens, d features of a key, e of
    # a value.
    both, _, log_decay, beta = tokens
    dtype = both.dtype
    share, size = log_decay.shape[2:]
    decay, since_start = _decays(log_decay, history.ancestors)

    # Tokens of the chunk: what a query reads of values, and what a key reads of them.
    overlaps = einsum32("rhid,rhjd->rhij", both, both[:, :, size:])
    of_queries, of_keys = jnp.split(overlaps, 2, axis=2)
    scores: Any = _for_value_heads(of_queries, share)
    scores = scores * decay
    system: Any = _for_value_heads(of_keys * _comes_after(size), share)
    system = system * decay * beta[..., None]
    # Of 16 bits, no more is left of the inverse than half of float32's.
    precision = "highest" if dtype == jnp.float32 else "high"
    inverse = _unit_lower_inverse(jax.lax.stop_gradient(system), at_once, precision)

    # Carried states: each token reads the one that its sequence goes on from.
    readers = []
    for carried in history.states:
        reads_it = jnp.concatenate([carried.read_by, carried.read_by], axis=-1).astype(dtype)
        readers.append(both * reads_it[:, None, :, None])
    queries, keys = jnp.split(jnp.concatenate(readers, -1), 2, axis=2)

    # What each token adds to a carried state: it decays until the token whose state that becomes.
    becomes = jnp.stack([carried.becomes for carried in history.states], axis=1)  # [R, K, c]
    until_then = _product(becomes[:, None, None], decay)  # [R, h, g, K, c]
    own_keys: Any = _for_value_heads(both[:, :, size:], share)
    writers = []
    for number in range(len(history.states)):
        writers.append((until_then[..., number, :, None] * own_keys).astype(dtype))
    of_states = _OfStates(
        keys=keys,
        writers=jnp.concatenate(writers, -1),
        system=system,
        inverse=inverse.astype(dtype),
        since_start=since_start,
        kept=_kept_shares(since_start, history),
    )
    return _Prepared(of_states, queries, scores.astype(dtype))


@jax.custom_vjp
def _through_states(
    state: jax.Array, v: jax.Array, beta: jax.Array, given: _OfStates
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the states of all chunks, from state[R, h, g, K dk, dv] on; v[n, R, h, g, c, dv] and
    beta[n, R, h, g, c] are those of `_Tokens`. Returns (the last states, those before each chunk
    [n, ..], the replaced values [n, R, h, g, c, dv] in the type of the products).

    The backward pass goes through the chunks with the gradient of the states alone; from these and
    the states it computes all other gradients for all chunks together.
    """

    def step(state: jax.Array, chunk: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        v, beta, given = chunk
        dtype = given.keys.dtype
        by_key = einsum32("rhid,rhgde->rhgie", given.keys, state.astype(dtype))
        wanted = beta[..., None] * (v - given.since_start[..., None] * by_key)
        # The solution of (I + system) replaced = wanted.
        replaced = jnp.matmul(given.inverse, wanted.astype(dtype), preferred_element_type=dtype)
        new = einsum32("rhgjd,rhgje->rhgde", given.writers, replaced)
        return _mixed(state, given.kept) + new, (state, replaced)

    last, (states, replaced) = jax.lax.scan(step, state, (v, beta, given))
    return last, states, replaced


def _through_states_forward(
    state: jax.Array, v: jax.Array, beta: jax.Array, given: _OfStates
) -> tuple[tuple[jax.Array, ...], tuple]:
    last, states, replaced = _through_states(state, v, beta, given)
    return (last, states, replaced), (v, beta, given, states, replaced)


def _through_states_backward(kept: tuple, gradients: tuple[jax.Array, ...]) -> tuple:
    """Returns the gradients of (state, v, beta, what is given)."""
    v, beta, given, states, replaced = kept
    d_last, d_states, d_replaced = gradients
    dtype = given.keys.dtype

    def step(d_after: jax.Array, chunk: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Goes back through a chunk: from the gradient of the states after it to that of the states
        before it; returns also the former, and that of the values that are wanted."""
        given, rate, d_states, d_replaced = chunk
        by_states = einsum32("rhgjd,rhgde->rhgje", given.writers, d_after.astype(dtype))
        d_replaced = (d_replaced + by_states).astype(dtype)
        d_wanted = jnp.matmul(given.inverse.mT, d_replaced, preferred_element_type=dtype)
        d_by_key = (-rate * d_wanted).astype(dtype)
        by_key = einsum32("rhid,rhgie->rhgde", given.keys, d_by_key)
        d_before = _mixed(d_after, given.kept.mT) + by_key + d_states
        return d_before, (d_after, d_wanted)

    rate = (beta * given.since_start)[..., None]
    chunks = given, rate, d_states, d_replaced
    d_state, (d_after, d_wanted) = jax.lax.scan(step, d_last, chunks, reverse=True)

    read = states.astype(dtype)
    by_key = einsum32("nrhid,nrhgde->nrhgie", given.keys, read)
    wide = d_wanted.astype(jnp.float32)
    d_by_key = (-rate * wide).astype(dtype)
    d_rate = (wide * (v - given.since_start[..., None] * by_key)).sum(-1)
    d_given = _OfStates(
        keys=einsum32("nrhgie,nrhgde->nrhid", d_by_key, read).astype(dtype),
        writers=einsum32("nrhgje,nrhgde->nrhgjd", replaced, d_after.astype(dtype)).astype(dtype),
        # Without products of inverses, which the gradient of an inverse would have.
        system=-einsum32("nrhgie,nrhgje->nrhgij", d_wanted, replaced),
        inverse=jnp.zeros_like(given.inverse),
        since_start=-beta * (wide * by_key).sum(-1),
        kept=_shares_of(d_after, states, given.kept.shape[-1]),
    )
    return d_state, (beta[..., None] * wide).astype(v.dtype), d_rate, d_given


_through_states.defvjp(_through_states_forward, _through_states_backward)


def _outputs(prepared: _Prepared, state: jax.Array, replaced: jax.Array) -> jax.Array:
    """Computes the outputs of one chunk, [R, h, g, c, dv], from the states before it and its
    replaced values, in their type."""
    dtype = replaced.dtype
    by_query = einsum32("rhid,rhgde->rhgie", prepared.queries, state.astype(dtype))
    by_query = prepared.of_states.since_start[..., None] * by_query
    out = by_query + einsum32("rhgij,rhgje->rhgie", prepared.scores, replaced)
    return out.astype(dtype)


def _decays(log_decay: jax.Array, ancestors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the decays until each token i of a chunk: (from each of its ancestors j and itself,
    [R, h, g, c, c], 0 for other tokens; from the state before the chunk, [R, h, g, c]).

    They are sums over the ancestors of i that come after j. Differences between two sums from the
    chunk's start would lose the small decays that follow large ones.
    """
    mask = ancestors[:, None, None]
    of_ancestors = jnp.where(mask, log_decay[..., None, :], 0.0)  # [R, h, g, i, ancestor]
    between = _product(of_ancestors, _comes_after(log_decay.shape[-1]))
    # Sums of what is never above 0: no power overflows.
    return jnp.where(mask, jnp.exp(between), 0.0), jnp.exp(of_ancestors.sum(-1))


def _kept_shares(since_start: jax.Array, history: _History) -> jax.Array:
    """Returns shares[R, h, g, K, K]: the k-th carried state after a chunk has the share [k, l] of
    the l-th before it. A state that is replaced by that of a token of the chunk keeps the decayed
    state that this token read; a state that is not replaced keeps itself."""
    num_states = len(history.states)
    # For each pair of states: 1 at the token that replaces the first, if it reads the second.
    links = []
    for replaced in history.states:
        for source in history.states:
            links.append(jnp.where(source.read_by, replaced.becomes, 0.0))
    linked = jnp.stack(links, axis=1)[:, None, None]  # [R, 1, 1, K K, c]
    decayed = _product(linked, since_start[..., None])[..., 0]
    decayed = decayed.reshape(*decayed.shape[:3], num_states, num_states)
    stays = jnp.stack([1.0 - state.becomes.sum(-1) for state in history.states], axis=-1)
    return decayed + (stays[:, :, None] * np.eye(num_states))[:, None, None]


def _mixed(states: jax.Array, shares: jax.Array) -> jax.Array:
    """Returns sums of the K states of each head, [R, h, g, K dk, dv]: the k-th has the share
    shares[R, h, g, k, l] of the l-th."""
    count = shares.shape[-1]
    before = jnp.split(states, count, axis=3)
    after = []
    for number in range(count):
        total = shares[..., number, 0, None, None] * before[0]
        for source in range(1, count):
            total = total + shares[..., number, source, None, None] * before[source]
        after.append(total)
    return jnp.concatenate(after, axis=3)


def _shares_of(gradient: jax.Array, states: jax.Array, count: int) -> jax.Array:
    """Returns the gradient of the shares with which `_mixed` mixed states[.., K dk, dv], given that
    of its result: [.., K, K], `count` is K."""
    after = jnp.split(gradient, count, axis=-2)
    before = jnp.split(states, count, axis=-2)
    rows = []
    for of_mixed in after:
        rows.append(jnp.stack([(of_mixed * source).sum((-1, -2)) for source in before], -1))
    return jnp.stack(rows, -2)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _for_value_heads(x: jax.Array, share: int) -> jax.Array:
    """Returns x[R, h, ..] for each of the `share` value heads of a key head, [R, h, g, ..]. Its
    gradient is computed by additions: XLA's sum over a dimension that is not the last takes ten
    times as long on CPU."""
    return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], share, *x.shape[2:]))


def _for_value_heads_forward(x: jax.Array, share: int) -> tuple[jax.Array, None]:
    return _for_value_heads(x, share), None


def _for_value_heads_backward(share: int, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    """Sums the gradient[R, h, g, ..] over the g = `share` value heads of a key head."""
    total = gradient[:, :, 0]
    for number in range(1, share):
        total = total + gradient[:, :, number]
    return (total,)


_for_value_heads.defvjp(_for_value_heads_forward, _for_value_heads_backward)


def _unit_lower_inverse(lower: jax.Array, at_once: int, precision: str = "highest") -> jax.Array:
    """Returns the inverse of I + lower, for strictly lower triangular lower[..., h, c, c] with c a
    power of two. Inverses of blocks on the diagonal are joined to those of twice the size:

        [X11  0 ]        X21 = -X22 A21 X11
        [X21 X22]

    Up to `at_once` rows, all pairs of blocks are joined by two products of whole matrices, in which
    all but the blocks A21 are 0: few operations. A larger matrix is divided into halves: few FLOPs.
    """
    size = lower.shape[-1]
    product = partial(_product, precision=precision)
    if size > at_once:
        half = size // 2
        diagonal = [lower[..., :half, :half], lower[..., half:, half:]]
        inverses = _unit_lower_inverse(jnp.concatenate(diagonal, axis=-3), at_once, precision)
        first, second = jnp.split(inverses, 2, axis=-3)
        corner = -product(second, product(lower[..., half:, :half], first))
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
    index = np.arange(size)
    inverse = jnp.eye(size, dtype=lower.dtype)
    width = 1
    while width < size:
        block = index // width
        is_second = block % 2 == 1
        of_pairs = is_second[:, None] & (block[:, None] == block + 1)
        below = jnp.where(of_pairs, lower, 0.0)
        if width == 1:  # blocks of one element are 1
            inverse = inverse - below
        else:
            inverse = inverse - product(inverse, product(below, inverse))
        width *= 2
    return inverse


def _comes_after(size: int) -> jax.Array:
    """Returns float32[size, size]: 1 if the first token comes after the second, else 0. It is a
    constant of the program, not computed again for each chunk."""
    return jnp.asarray(np.tril(np.ones((size, size), np.float32), -1))


def _product(a: jax.Array, b: jax.Array, precision: str = "highest") -> jax.Array:
    """Computes the products of float32 matrices, by default with all of their bits."""
    return jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)
