"""The gated delta rule and its convolution (Yang et al. 2024, arXiv:2412.06464), over packed rows,
sequences, and single tokens.

A head's state S[dk, dv] changes with each token, which has a query q, a key k, a value v, a decay
and a rate beta:

    S = exp(log_decay) S            the state is forgotten in part
    S = S + k (beta (v - k S))      what the key reads is replaced, in part, by the value
    out = q S

Over many tokens this is computed by chunks. Within a chunk all replaced values v' solve a
triangular system (the WY form), so that everything is a product of matrices; a scan carries the
state from chunk to chunk.

In a packed row a prompt is followed by its completions, and each of them goes on from the state
after the prompt. The tokens before one in its own sequence are its ancestors; within a chunk they
are a mask, as in attention. Two states are carried: that of the sequence under way, and that after
the latest prompt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64
"""Most tokens of a chunk, a power of two."""

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by it."""


# ---- the convolution


def chain_before(segment: jax.Array, prompt: jax.Array, count: int) -> jax.Array:
    """Returns the index in its row of the first to `count`-th token before each token in its own
    sequence, int32[R, T, count]; T where there is none. A completion's sequence begins with its
    prompt. `segment` and `prompt` are [R, T], those of a `LearnerBatch`."""
    size = segment.shape[1]
    index = jnp.arange(size, dtype=jnp.int32)
    before = jnp.pad(segment[:, :-1], ((0, 0), (1, 0)))
    start = jax.lax.cummax(jnp.where(segment != before, index, 0), axis=1)
    is_prompt = (segment == prompt) & (segment > 0)
    # The latest prompt's last token, and its first.
    prompt_last = jax.lax.cummax(jnp.where(is_prompt, index, -1), axis=1)
    prompt_start = jnp.take_along_axis(start, jnp.maximum(prompt_last, 0), axis=1)
    has_prompt = (segment != prompt) & (prompt_last >= 0)
    steps = []
    for step in range(1, count + 1):
        own = index - step
        # Steps that are left at the first token of a completion go on from its prompt's end.
        of_prompt = prompt_last - (start - own - 1)
        in_prompt = has_prompt & (of_prompt >= prompt_start)
        found = jnp.where(own >= start, own, jnp.where(in_prompt, of_prompt, size))
        steps.append(jnp.where(segment > 0, found, size))
    return jnp.stack(steps, axis=-1)


def convolve(x: jax.Array, weight: jax.Array, before: jax.Array) -> jax.Array:
    """Computes silu of the causal convolution of each channel of x[R, T, C] with weight[C, size],
    in x's type. `before` is what `chain_before` returned for size - 1 tokens; the last column of
    `weight` is for the token itself."""
    padded = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))  # index T reads zeros
    taps = [x]
    for step in range(before.shape[-1]):
        taps.append(jnp.take_along_axis(padded, before[..., step, None], axis=1))
    return _weigh(taps, weight, x)


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
    return _weigh(taps, weight, x), new_tail


def _weigh(taps: list[jax.Array], weight: jax.Array, x: jax.Array) -> jax.Array:
    """Returns silu of the sum of taps times their columns of `weight`, in x's type. The first tap
    is the token itself."""
    total = jnp.zeros(x.shape, jnp.float32)
    for step, tap in enumerate(taps):
        column = weight[:, weight.shape[1] - 1 - step]
        total = total + tap.astype(jnp.float32) * column.astype(jnp.float32)
    return jax.nn.silu(total).astype(x.dtype)


# ---- the rule


def delta_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    segment: jax.Array,
    prompt: jax.Array,
) -> jax.Array:
    """Computes the gated delta rule over packed rows -> [R, T, Hv, dv], in v's type.

    q and k are [R, T, Hk, dk], which are divided by their lengths here; v[R, T, Hv, dv],
    log_decay[R, T, Hv] and beta[R, T, Hv]. Each key head serves Hv // Hk consecutive value heads.
    `segment` and `prompt` are [R, T], those of a `LearnerBatch`; padding gives 0, and no gradient.
    """
    size = segment.shape[1]
    chunk = _chunk_size(size)
    tokens = _chunked(q, k, v, log_decay, beta, chunk)
    segment = _by_chunk(segment, chunk)
    prompt = _by_chunk(prompt, chunk)
    # The sequence under way at the end of the chunk before; 0 before the first.
    at_end = segment.max(-1)
    before = jnp.pad(jax.lax.cummax(at_end, axis=1)[:, :-1], ((0, 0), (1, 0)))
    is_own = segment[..., :, None] == segment[..., None, :]
    is_of_prompt = prompt[..., :, None] == segment[..., None, :]
    index = jnp.arange(chunk)
    is_real = segment > 0
    ancestors = (is_own | is_of_prompt) & (index[:, None] >= index) & is_real[..., None]
    from_carried = ((segment == before[..., None]) | (prompt == before[..., None])) & is_real
    has_prompt_here = (is_of_prompt & is_real[..., None, :]).any(-1)
    is_completion = segment != prompt
    from_prompt = is_completion & is_real & ~from_carried & ~has_prompt_here
    # The latest token of a prompt in each chunk: -1 if there is none.
    of_prompts = jnp.where(is_real & ~is_completion, index, -1).max(-1)
    history = _History(ancestors, from_carried, from_prompt, is_real, of_prompts)
    out, _ = _by_chunks(tokens, history, None)
    return _whole_rows(out, size).astype(v.dtype)


def delta_sequence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gated delta rule over R sequences that go on from state[R, Hv, dk, dv], of which
    the first count[R] tokens are real. Returns (out[R, T, Hv, dv] in v's type, the state after
    these tokens, float32). The other arguments are those of `delta_rows`."""
    size = q.shape[1]
    chunk = _chunk_size(size)
    tokens = _chunked(q, k, v, log_decay, beta, chunk)
    is_real = _by_chunk((jnp.arange(size) < count[:, None]).astype(jnp.int32), chunk) > 0
    index = jnp.arange(chunk)
    ancestors = (index[:, None] >= index) & is_real[..., None]
    history = _History(ancestors, is_real, None, is_real, None)
    out, state = _by_chunks(tokens, history, state)
    return _whole_rows(out, size).astype(v.dtype), state


def delta_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gated delta rule for one token in each of [N, W] slots: q and k [N, W, Hk, dk],
    v[N, W, Hv, dv], log_decay and beta [N, W, Hv], state[N, W, Hv, dk, dv]. Returns (out[N, W, Hv,
    dv] in v's type, the new state, float32)."""
    q, k = _unit_queries_and_keys(q, k)
    share = v.shape[-2] // k.shape[-2]
    q = jnp.repeat(q, share, axis=-2)
    k = jnp.repeat(k, share, axis=-2)
    decay = jnp.exp(log_decay.astype(jnp.float32))[..., None]
    # Query and key read the state in one pass; the new state is written in another.
    both = jnp.stack([k, q], axis=-2)  # [N, W, Hv, 2, dk]
    read = decay[..., None] * _product("nwhxd,nwhde->nwhxe", both, state)
    read_by_key = read[..., 0, :]
    read_by_query = read[..., 1, :]
    rate = beta.astype(jnp.float32)[..., None]
    change = rate * (v.astype(jnp.float32) - read_by_key)
    overlap = (q * k).sum(-1, keepdims=True)
    out = read_by_query + overlap * change
    state = decay[..., None] * state + k[..., None] * change[..., None, :]
    return out.astype(v.dtype), state


class _Tokens(NamedTuple):
    """Tokens in n chunks of c; h counts key heads, g the value heads of each."""

    q: jax.Array  # [R, n, c, h, dk], float32
    k: jax.Array  # [R, n, c, h, dk], float32
    v: jax.Array  # [R, n, c, h, g, dv]
    log_decay: jax.Array  # float32[R, n, c, h, g]
    beta: jax.Array  # float32[R, n, c, h, g]


class _History(NamedTuple):
    """What each token of a chunk follows."""

    ancestors: jax.Array  # bool[R, n, c, c]: which tokens of the chunk are its ancestors, or itself
    from_carried: jax.Array  # bool[R, n, c]: its sequence goes on from the carried state
    from_prompt: jax.Array | None  # bool[R, n, c]: from the latest prompt's; None: no prompts apart
    is_real: jax.Array  # bool[R, n, c]
    of_prompts: jax.Array | None  # int[R, n]: the chunk's last token of a prompt; -1: none


def _by_chunks(
    tokens: _Tokens, history: _History, state: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Computes the rule chunk after chunk, from state[R, Hv, dk, dv] on, None: zeros. Returns
    (out[R, n, c, Hv, dv], the last state)."""
    q, k, v, log_decay, beta = tokens
    ancestors = history.ancestors
    rows, _, chunk, key_heads, share = beta.shape
    # Letters: r rows, n chunks, i and j tokens, h key heads, g value heads of each, d dimensions of
    # a key, e of a value.
    total = _product("rnij,rnjhg->rnhgi", ancestors.astype(jnp.float32), log_decay)
    mask = ancestors[:, :, None, None]
    between = jnp.where(mask, total[..., :, None] - total[..., None, :], 0.0)
    decay = jnp.where(mask, jnp.exp(between), 0.0)  # [r, n, h, g, i, j]
    rate = jnp.moveaxis(beta, 2, -1)[..., None]  # [r, n, h, g, i, 1]
    overlap = _product("rnihd,rnjhd->rnhij", k, k)[:, :, :, None]
    strictly = jnp.tril(jnp.ones((chunk, chunk), jnp.float32), -1)
    inverse = _unit_lower_inverse(rate * overlap * decay * strictly)
    from_start = jnp.exp(total)[..., None]  # [r, n, h, g, i, 1]: decay since the chunk's start
    keys = jnp.moveaxis(k, 2, 3)[:, :, :, None]  # [r, n, h, 1, i, d]
    values = jnp.moveaxis(v, 2, 4).astype(jnp.float32)  # [r, n, h, g, i, e]
    queries = jnp.moveaxis(q, 2, 3)[:, :, :, None]
    carried = [history.from_carried]
    if history.from_prompt is not None:
        carried.append(history.from_prompt)

    def by_state(x: jax.Array) -> jax.Array:
        """Returns x[r, n, h, g, i, d] once for each carried state, side by side, with zeros where a
        token does not go on from that state."""
        copies = []
        for goes_on in carried:
            copies.append(jnp.where(goes_on[:, :, None, None, :, None], x, 0.0))
        return jnp.concatenate(copies, axis=-1)

    of_values = _product("rnhgij,rnhgje->rnhgie", inverse, rate * values)
    of_states = _product("rnhgij,rnhgjd->rnhgid", inverse, by_state(rate * from_start * keys))
    from_queries = by_state(from_start * queries)
    scores = _product("rnihd,rnjhd->rnhij", q, k)[:, :, :, None] * decay

    def at_token(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns what gives the state after one token of each chunk, index[r, n]: (keys with their
        decay until then [r, n, h, g, j, d], factors of the carried states [r, n, h, g, states])."""
        place = index[:, :, None, None, None, None]
        until = jnp.take_along_axis(decay, jnp.maximum(place, 0), axis=4)[..., 0, :, None]
        since = jnp.take_along_axis(from_start, jnp.maximum(place, 0), axis=4)[..., 0, 0]
        factors = []
        for goes_on in carried:
            here = jnp.take_along_axis(goes_on, jnp.maximum(index, 0)[..., None], axis=2)
            factors.append(jnp.where(here[:, :, :, None], since, 0.0))
        return until * keys, jnp.stack(factors, axis=-1)

    index = jnp.arange(chunk)
    last = jnp.where(history.is_real, index, -1).max(-1)
    ends = [last]
    if history.of_prompts is not None:
        ends.append(history.of_prompts)
    of_ends = [at_token(end) for end in ends]
    has_end = jnp.stack([end >= 0 for end in ends], axis=-1)  # [r, n, states]

    def one_chunk(states: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array]:
        """Returns the states after a chunk, [states, r, h, g, d, e], and the chunk's output."""
        of_values, of_states, from_queries, scores, of_ends, has_end = chunk
        stacked = jnp.concatenate(list(states), axis=-2)
        replaced = of_values - _product("rhgid,rhgde->rhgie", of_states, stacked)
        out = _product("rhgid,rhgde->rhgie", from_queries, stacked)
        out = out + _product("rhgij,rhgje->rhgie", scores, replaced)
        new_states = []
        for number, (keys, factors) in enumerate(of_ends):
            new = _product("rhgjd,rhgje->rhgde", keys, replaced)
            for source in range(len(states)):
                new = new + factors[..., source, None, None] * states[source]
            is_new = has_end[:, number, None, None, None, None]
            new_states.append(jnp.where(is_new, new, states[number]))
        return jnp.stack(new_states), out

    key_dim = k.shape[-1]
    value_dim = v.shape[-1]
    shape = (rows, key_heads, share, key_dim, value_dim)
    first = jnp.zeros(shape, jnp.float32) if state is None else state.reshape(shape)
    starts = jnp.stack([first] + [jnp.zeros_like(first)] * (len(carried) - 1))
    inputs = (of_values, of_states, from_queries, scores, of_ends, has_end)
    by_chunk = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
    states, out = jax.lax.scan(one_chunk, starts, by_chunk)
    out = jnp.transpose(out, (1, 0, 4, 2, 3, 5))  # [r, n, i, h, g, e]
    out = out.reshape(*out.shape[:3], key_heads * share, value_dim)
    return out, states[0].reshape(rows, key_heads * share, key_dim, value_dim)


@jax.custom_jvp
def _unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """Returns the inverse of I + lower, for strictly lower triangular lower[..., c, c] with c a
    power of two. Inverses X of blocks on the diagonal are joined to those of twice the size:

        [X11  0 ]        X21 = -X22 A21 X11
        [X21 X22]

    All pairs of blocks are joined by two products of whole matrices, in which all but the blocks
    A21 are 0, in a loop over the sizes of blocks. By the compiler's account of a v6e, products of
    the small blocks alone take twice as long; and XLA takes seconds for each product that it
    compiles.
    """
    size = lower.shape[-1]
    index = jnp.arange(size)
    widths = []
    width = 2
    while width < size:
        widths.append(width)
        width *= 2

    def below(width: Any) -> jax.Array:
        """Returns the blocks A21 of all pairs of blocks of this size, and zeros."""
        block = index // width
        is_second = block % 2 == 1
        of_pairs = is_second[:, None] & (block[:, None] == block + 1)
        return jnp.where(of_pairs, lower, 0.0)

    def joined(inverse: jax.Array, width: jax.Array) -> tuple[jax.Array, None]:
        corners = _product("...ij,...jk->...ik", below(width), inverse)
        return inverse - _product("...ij,...jk->...ik", inverse, corners), None

    # Blocks of one element are 1.
    inverse = jnp.eye(size, dtype=lower.dtype) - below(1)
    inverse, _ = jax.lax.scan(joined, inverse, jnp.array(widths, jnp.int32))
    return inverse


@_unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the inverse X, and its change -X dA X with the change dA of the matrix."""
    (lower,) = primals
    (change,) = tangents
    inverse = _unit_lower_inverse(lower)
    strictly = jnp.tril(change, -1)
    changed = _product("...ij,...jk->...ik", strictly, inverse)
    return inverse, -_product("...ij,...jk->...ik", inverse, changed)


def _product(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes `jnp.einsum` of float32 arrays with all of their bits."""
    return jnp.einsum(form, a, b, precision="highest", preferred_element_type=jnp.float32)


def _unit_queries_and_keys(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys [.., dk] in float32, divided by their lengths; queries also by the
    root of dk, the usual factor of scores."""

    def unit(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return wide * jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + NORM_EPS)

    return unit(q) * q.shape[-1] ** -0.5, unit(k)


def _chunk_size(size: int) -> int:
    """Returns the tokens of a chunk for rows of `size` tokens: CHUNK, or fewer for short rows."""
    chunk = 1
    while chunk < min(size, CHUNK):
        chunk *= 2
    return chunk


def _chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    chunk: int,
) -> _Tokens:
    """Divides tokens [R, T, ...] into chunks, the last of which is filled up."""
    q, k = _unit_queries_and_keys(q, k)
    key_heads = k.shape[-2]

    def by_key_head(x: jax.Array) -> jax.Array:
        """Separates value heads by their key head: [R, T, Hv, ..] -> [R, T, h, g, ..]."""
        return x.reshape(*x.shape[:2], key_heads, -1, *x.shape[3:])

    log_decay = log_decay.astype(jnp.float32)
    beta = beta.astype(jnp.float32)
    return _Tokens(
        q=_by_chunk(q, chunk),
        k=_by_chunk(k, chunk),
        v=_by_chunk(by_key_head(v), chunk),
        log_decay=_by_chunk(by_key_head(log_decay), chunk),
        beta=_by_chunk(by_key_head(beta), chunk),
    )


def _by_chunk(x: jax.Array, chunk: int) -> jax.Array:
    """Fills [R, T, ..] up with zeros and divides it into chunks: [R, n, c, ..]."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % chunk)
    filled = jnp.pad(x, padding)
    return filled.reshape(len(x), -1, chunk, *x.shape[2:])


def _whole_rows(x: jax.Array, size: int) -> jax.Array:
    """Joins chunks [R, n, c, ..] to rows [R, `size`, ..]."""
    return jax.lax.collapse(x, 1, 3)[:, :size]
