"""Attention of decoding by one kernel a layer: on GPU in Pallas for Triton, on TPU in Pallas for
Mosaic.

Both go through the keys of a row's prompt, once for all of its slots, then through each slot's own:
no block is read beyond its row's length, and one softmax is gathered over all (Milakov and
Gimelshein 2018, arXiv 1805.02867). What a slot computes depends on no other, to the bit. On GPU a
program has one key head of some slots of a row; it also turns their queries and their new key by
rotary positions, and writes that key and its value into the cache. On TPU a step has some rows;
their keys come in turns, prompts' before slots' own, which are in pages anywhere, and the next
turn's are copied on the chip while one's are read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu, triton

from shoal.model.attention import LOG2E, LOWEST, attend, largest_block, product32
from shoal.model.rotary import rotate

HEADS = (32, 64, 128, 256)
"""Dimensions of a head that the kernel takes: powers of two, whose halves it rotates."""

PROGRAMS = 256
"""Programs of a kernel that keep a GPU busy: where there are more, each takes more slots, and fewer
read a prompt."""

MOST_RESULTS = 64 * 128
"""Queries of a program times the dimensions of a head, of 16 bits: they stay in registers and
shared memory."""


def block_keys(head_dim: int, dtype: Any) -> int:
    """Keys of a block, whose sizes divide all caches."""
    return (64 if head_dim <= 128 else 32) // (2 if dtype == jnp.float32 else 1)


def slots_at_once(
    rows: int, siblings: int, heads: int, share: int, width: int, programs: int = PROGRAMS
) -> int:
    """Slots of a row that one program takes, of `share` query heads to a key head."""
    return next(
        slots
        for slots in range(siblings, 0, -1)
        if siblings % slots == 0
        and (
            slots == 1
            or (
                rows * heads * (siblings // slots) >= programs
                and slots * share * width <= MOST_RESULTS
            )
        )
    )


def attend_slots(
    heads: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: tuple[jax.Array, ...],
    prefix_len: jax.Array,
    position: jax.Array,
    interpret: bool = False,
    programs: int = PROGRAMS,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of one token for each of [N, W] slots -> (out[N, W, H, A], own keys, own values).

    `heads`[N, W, H + 2 K, A] are queries, key and value as products gave them; cos and sin
    float32[N, W, A/2]. `keys` are a cache's: of prompts [N, K, Tp, A] twice, of which prefix_len[N]
    are read; of slots [N, W, K, C, A] twice, of which those before position[N, W], where the new
    ones are written, in place. A is a power of two from 32 on; Tp and C are multiples of 64. Scores
    and sums are float32.
    """
    rows, siblings, key_heads, size, width = keys[2].shape
    num_heads = heads.shape[2] - 2 * key_heads
    slots = slots_at_once(
        rows,
        siblings,
        key_heads,
        num_heads // key_heads,
        width * heads.dtype.itemsize // 2,
        programs,
    )
    out = jax.ShapeDtypeStruct((rows, siblings, num_heads, width), heads.dtype)
    read = rows * siblings * num_heads * (keys[0].shape[2] + size)
    results = pl.pallas_call(
        partial(_kernel, slots, block_keys(width, heads.dtype)),
        [out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in keys[2:])],
        grid=(rows, siblings // slots, key_heads),
        interpret=interpret,
        name="decode_kernel",
        input_output_aliases={5: 1, 6: 2},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        # If every key were read.
        cost_estimate=pl.CostEstimate(
            flops=4 * read * width, transcendentals=read, bytes_accessed=0
        ),
    )(heads, cos, sin, *keys, prefix_len, position)
    return tuple(results)


def add_block(
    scores: jax.Array, mask: jax.Array, values: jax.Array, carry: tuple, product: Callable
) -> tuple:
    """Adds a block of keys to the maxima and sums [.., M, 1] and outputs [.., M, A] of queries,
    from their products with it [.., M, T]. What is masked changes no bit of a query that has a
    key."""
    top, total, out = carry
    scores = jnp.where(mask, scores * LOG2E, LOWEST)
    new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
    shrink, p = jnp.exp2(top - new_top), jnp.exp2(scores - new_top)  # 0 where masked
    return (
        new_top,
        total * shrink + p.sum(-1, keepdims=True),
        out * shrink + product(p.astype(values.dtype), values),
    )


def trial(
    device: Any, share: int, head_dim: int, dtype: str, interpret: bool
) -> tuple[tuple, tuple]:
    """What the kernel gives on a device for a few slots of random numbers, and what the reference
    does: results, own keys, own values."""
    rng, prefix_len, position = (
        np.random.default_rng(0),
        np.array([70, 1]),
        np.array([[0, 63], [40, 5]]),
    )

    def draw(*shape: int) -> jax.Array:
        return jax.device_put(jnp.asarray(rng.standard_normal(shape), dtype), device)

    heads, prompt, own = (2, 2, share + 2, head_dim), (2, 1, 128, head_dim), (2, 2, 1, 64, head_dim)
    angles = jax.device_put(
        jnp.asarray(rng.uniform(0, 6, (2, 2, head_dim // 2)), jnp.float32), device
    )

    def exact(heads: jax.Array, cos: jax.Array, sin: jax.Array, keys: tuple) -> tuple:
        q, k, v = jnp.split(heads, (share, share + 1), axis=2)
        q, k = (rotate(x, cos[:, :, None], sin[:, :, None]) for x in (q, k))
        row, slot = jnp.indices(position.shape)
        own = tuple(
            old.at[row, slot, 0, position].set(new[:, :, 0])
            for old, new in zip(keys[2:], (k, v), strict=True)
        )
        k, v = (
            jnp.concatenate(
                [jnp.repeat(prompt, 2, 0), mine.reshape(4, 1, *mine.shape[3:])], 2
            ).swapaxes(1, 2)
            for prompt, mine in zip(keys, own, strict=False)
        )
        mask = jnp.concatenate(
            [
                jnp.repeat(jnp.arange(128) < prefix_len[:, None], 2, 0),
                jnp.arange(64) <= position.reshape(4, 1),
            ],
            1,
        )
        return attend(q.reshape(4, 1, share, head_dim), k, v, mask[:, None]).reshape(q.shape), *own

    lengths, places = jnp.asarray(prefix_len, jnp.int32), jnp.asarray(position, jnp.int32)
    inputs: Any = (
        draw(*heads),
        jnp.cos(angles),
        jnp.sin(angles),
        tuple(draw(*shape) for shape in (prompt, prompt, own, own)),
    )
    # All slots of a row in one program.
    ours = jax.jit(
        lambda heads, cos, sin, keys: attend_slots(
            heads, cos, sin, keys, lengths, places, interpret, 1
        )
    )
    return ours(*inputs), jax.jit(exact)(*inputs)


def trial_of_pages(
    device: Any, share: int, head_dim: int, dtype: str, interpret: bool
) -> tuple[tuple, tuple]:
    """What the kernel for TPUs gives for a few slots of random numbers on scattered pages, in two
    turns and two steps, and what the reference does."""
    rng, pages = np.random.default_rng(0), np.random.default_rng(1).permutation(24).reshape(2, 2, 6)
    prefix_len, length = np.array([70, 128]), np.array([[1, 128], [700, 385]])

    def draw(*shape: int) -> jax.Array:
        return jax.device_put(jnp.asarray(rng.standard_normal(shape), dtype), device)

    def exact(q: jax.Array, prompts: jax.Array, own: jax.Array) -> jax.Array:
        mine = own[pages].swapaxes(2, 3).reshape(4, 2, -1, 2 * head_dim)
        k, v = jnp.split(
            jnp.concatenate([jnp.repeat(prompts, 2, 0), mine], 2).swapaxes(1, 2), 2, -1
        )
        mask = jnp.concatenate(
            [
                jnp.repeat(np.arange(128) < prefix_len[:, None], 2, 0),
                np.arange(6 * 128) < length.reshape(4, 1),
            ],
            1,
        )
        return attend(q.reshape(4, 1, -1, head_dim), k, v, mask[:, None]).reshape(q.shape)

    inputs = (
        draw(2, 2, 2 * share, head_dim),
        draw(2, 2, 128, 2 * head_dim),
        draw(24, 2, 128, 2 * head_dim),
    )
    numbers = (jnp.asarray(x, jnp.int32) for x in (prefix_len, length, pages))
    return (jax.jit(partial(attend_pages, interpret=interpret))(*inputs, *numbers),), (
        jax.jit(exact)(*inputs),
    )


def _kernel(
    slots: int,
    block: int,
    heads_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    prefix_k: Any,
    prefix_v: Any,
    own_k: Any,
    own_v: Any,
    prefix_len: Any,
    position_ref: Any,
    out_ref: Any,
    new_k: Any,
    new_v: Any,
) -> None:
    row, part, head = (pl.program_id(axis) for axis in range(3))
    key_heads, width, num_heads = prefix_k.shape[1], heads_ref.shape[3], out_ref.shape[2]
    share, half = num_heads // key_heads, heads_ref.shape[3] // 2
    # Triton's arrays have sizes of powers of two, and its products at least 16: what is beyond
    # repeats the last slot, and writes the same again.
    index = jnp.arange(max(16, pl.next_power_of_2(slots * share)), dtype=jnp.int32)
    within = jnp.minimum(jax.lax.div(index, share), slots - 1)
    slot, query = part * slots + within, jax.lax.rem(index, share)
    cos, sin, position = cos_ref[row, slot], sin_ref[row, slot], position_ref[row, slot]

    def turned(place: Any) -> tuple[jax.Array, jax.Array]:
        first, second = (
            heads_ref[row, slot, place, pl.ds(start, half)].astype(jnp.float32)
            for start in (0, half)
        )
        return tuple(
            x.astype(heads_ref.dtype)
            for x in (first * cos - second * sin, second * cos + first * sin)
        )

    scale = jnp.asarray(width**-0.5, heads_ref.dtype)
    q = tuple(x * scale for x in turned(head * share + query))
    k, v = (
        turned(num_heads + head + 0 * query),
        heads_ref[row, slot, num_heads + key_heads + head + 0 * query],
    )
    for ref, new, start in ((new_k, k[0], 0), (new_k, k[1], half), (new_v, v, 0)):
        ref[row, slot, head, position, pl.ds(start, new.shape[1])] = new
    # The slot's new key, as if it had been read first.
    first, second = (
        (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(1, keepdims=True)
        for a, b in zip(q, k, strict=True)
    )
    scores = (first + second) * LOG2E
    carry = scores, jnp.ones(scores.shape, jnp.float32), v.astype(jnp.float32)

    def add(
        k_ref: Any,
        v_ref: Any,
        place: tuple,
        mask_of: Callable[[jax.Array], jax.Array],
        turn: jax.Array,
        carry: tuple,
    ) -> tuple:
        at = *place, pl.ds(turn * block, block)
        mask = mask_of(turn * block + jnp.arange(block, dtype=jnp.int32)[None])
        first, second = (
            product32(part, k_ref[*at, pl.ds(start, half)].T)
            for part, start in zip(q, (0, half), strict=True)
        )
        return add_block(first + second, mask, v_ref[at], carry, product32)

    def blocks(count: jax.Array) -> jax.Array:
        return jax.lax.div(count + block - 1, block)

    length = prefix_len[row]
    carry = jax.lax.fori_loop(
        0,
        blocks(length),
        partial(add, prefix_k, prefix_v, (row, head), lambda key: key < length),
        carry,
    )

    def of_slot(number: jax.Array, carry: tuple) -> tuple:
        at = part * slots + number
        before, mine = position_ref[row, at], (within == number)[:, None]
        return jax.lax.fori_loop(
            0,
            blocks(before),
            partial(add, own_k, own_v, (row, at, head), lambda key: mine & (key < before)),
            carry,
        )

    _, total, out = jax.lax.fori_loop(0, slots, of_slot, carry)
    out_ref[row, slot, head * share + query] = (out / total).astype(out_ref.dtype)


# ---- for TPUs

LANES, SUBLANES = 128, 8
"""Of a register of 32 bits; the queries of a slot and a key head fill up its rows."""

MOST_PAGES = 4
"""Pages of a slot, or of a prompt, in a turn."""

BUFFER_BYTES = 6 << 20
"""Of a TPU's on-chip memory, for own keys of two turns, unless one page of every slot takes
more."""

ROWS_OF_PRODUCTS = 64
"""As many a product of few rows takes a TPU's time of: its keys have to enter the matrix units.
With products at half of the peak about what Mosaic schedules for a page on v5p."""


class Tiles(NamedTuple):
    """What a step has: rows and key heads, and of each the pages that a turn reads of a prompt and
    of every slot."""

    rows: int
    heads: int
    prompt_pages: int
    pages: int

    @classmethod
    def of(
        cls, rows: int, slots: int, heads: int, prompt_pages: int, pages: int, page_bytes: int
    ) -> Tiles:
        """Of sizes on a device, and the bytes of one head's keys and values in a page."""
        most = max(1, BUFFER_BYTES // (2 * page_bytes * slots))
        some = largest_block(heads, most)
        # At least two steps, for devices of two cores.
        left = most // (some * (few := largest_block(rows, max(1, min(most // some, rows // 2)))))
        return cls(
            few,
            some,
            largest_block(prompt_pages, min(MOST_PAGES, max(1, slots * left // 2))),
            largest_block(pages, min(MOST_PAGES, left)),
        )


def attend_pages(
    q: jax.Array,
    prompts: jax.Array,
    own: jax.Array,
    prefix_len: jax.Array,
    length: jax.Array,
    pages: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Attention of one token for each of [N, W] slots, q[N, W, H, A] -> [N, W, H, A].

    Values stand beside their keys: of prompts [N, K, Tp, 2 A], of which prefix_len[N] are read; of
    slots as pages [P, K, B, 2 A], of which those of length[N, W] keys are read, a slot's being
    pages[N, W, T]. Where both lengths are 0 a result means nothing. A is a multiple of 64, B of
    128, and Tp of B. Scores and sums are float32.
    """
    (rows, slots, num_heads, head_dim), (_, heads, size, width) = q.shape, prompts.shape
    page, share, item = own.shape[2], num_heads // heads, own.dtype.itemsize
    t = Tiles.of(rows, slots, heads, size // page, pages.shape[2], page * width * item)
    steps = rows // t.rows * heads // t.heads
    grid = (2, steps // 2) if steps % 2 == 0 else (1, steps)  # by core, where a device has two
    # Heads of half a register's lanes are read with their values, which meet their queries' zeros.
    beside = 0 if head_dim % LANES == 0 else head_dim
    q = (
        (q * jnp.asarray(head_dim**-0.5, q.dtype))
        .reshape(rows, slots, heads, share, head_dim)
        .swapaxes(1, 2)
    )
    q = jnp.pad(q.astype(jnp.float32), ((0, 0),) * 3 + ((0, -share % SUBLANES), (0, beside)))
    lengths = jnp.concatenate([prefix_len[:, None], length], 1)
    longest = lengths.reshape(-1, t.rows, 1 + slots).max(1)
    turns = jnp.stack(
        [
            -(-longest[:, 0] // (page * t.prompt_pages)),
            -(-longest[:, 1:].max(1) // (page * t.pages)),
        ]
    )

    def place(core: Any, number: Any, *_: Any) -> tuple:
        return *_digits(core * grid[1] + number, heads // t.heads), 0, 0, 0

    block, keys = (
        pl.BlockSpec((t.rows, t.heads, *q.shape[2:]), place),
        pl.BlockSpec(memory_space=tpu.MemorySpace.HBM),
    )
    by_lane = pl.BlockSpec((t.rows, 1 + slots, 1, LANES), lambda *at: (place(*at)[0], 0, 0, 0))
    read = rows * heads * (size + slots * pages.shape[2] * page)
    # else XLA copies whole caches into on-chip memory and back, as if the kernel read all of them
    if not interpret:
        prompts, own = (
            tpu.with_memory_space_constraint(x, tpu.MemorySpace.HBM) for x in (prompts, own)
        )
    out = pl.pallas_call(
        partial(_page_kernel, t),
        jax.ShapeDtypeStruct((*q.shape[:-1], head_dim + beside), own.dtype),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[block, by_lane, keys, keys],
            out_specs=block,
            scratch_shapes=[
                *(
                    tpu.VMEM((2, t.rows, t.heads, count, each * page, width), own.dtype)
                    for count, each in ((1, t.prompt_pages), (slots, t.pages))
                ),
                tpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
        ),
        # If every key were read.
        cost_estimate=pl.CostEstimate(
            flops=4 * read * ROWS_OF_PRODUCTS * (head_dim + beside),
            transcendentals=read * SUBLANES,
            bytes_accessed=read * width * item,
        ),
        interpret=interpret,
        name="decode_kernel",
    )(
        jnp.maximum(turns, 1),
        lengths.reshape(-1),
        pages.reshape(-1),
        q,
        jnp.broadcast_to(lengths[..., None, None], (*lengths.shape, 1, LANES)),
        prompts,
        own,
    )
    return out[..., :share, beside:].swapaxes(1, 2).reshape(rows, slots, num_heads, head_dim)


def _digits(number: Any, *sizes: int) -> tuple[Any, ...]:
    """Where an element of this number is in an array of [.., *sizes]."""
    found: tuple = ()
    for size in reversed(sizes):
        found = jax.lax.rem(number, jnp.int32(size)), *found
        number = jax.lax.div(number, jnp.int32(size))
    return number, *found


def _products(a: jax.Array, b: jax.Array, contracted: int = 1) -> jax.Array:
    """Of matrices [U, M, X] with as many, of which X is the first dimension or the second, in
    float32."""
    precision = (
        None if b.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    )  # Mosaic has no other of 16 bits
    return jax.lax.dot_general(a, b, (((2,), (contracted,)), ((0,), (0,))), precision, jnp.float32)


def _page_kernel(
    t: Tiles,
    turns: Any,
    lengths: Any,
    pages: Any,
    q_ref: Any,
    by_lane: Any,
    prompts: Any,
    own: Any,
    out_ref: Any,
    *scratch: Any,
) -> None:
    *buffers, semaphores = scratch  # of prompts and of slots
    number, steps, page = pl.program_id(1), pl.num_programs(1), own.shape[2]
    step, parts = pl.program_id(0) * steps + number, own.shape[1] // t.heads
    (_, _, slots, sublanes, width), most = (
        q_ref.shape,
        pages.shape[0] // (prompts.shape[0] * q_ref.shape[2]),
    )

    def move(act: str, step: Any, turn: Any, is_own: bool) -> None:
        """Starts the copies of a turn, or waits for them."""
        (rows, head), which, buffer = _digits(step, parts), jax.lax.rem(turn, 2), buffers[is_own]
        count, each = buffer.shape[3], buffer.shape[4] // page

        def one(number: Any, _: None) -> None:
            i, slot, k = _digits(number, count, each)
            row, at, some = rows * t.rows + i, turn * each + k, pl.ds(head * t.heads, t.heads)
            held = pages[(row * slots + slot) * most + jnp.minimum(at, most - 1)] if is_own else 0
            keys = pl.ds(pl.multiple_of(at * page, page), page)
            source = own.at[held, some] if is_own else prompts.at[row, some, keys]
            target = buffer.at[which, i, :, slot, pl.ds(k * page, page)]
            is_read = at * page < lengths[row * (1 + slots) + is_own * (1 + slot)]
            pl.when(is_read)(
                getattr(tpu.make_async_copy(source, target, semaphores.at[int(is_own), which]), act)
            )
            if act == "start":  # what is masked is weighed by 0, and must be a number

                @pl.when(jnp.logical_not(is_read))
                def _() -> None:
                    target[...] = jnp.zeros(target.shape, target.dtype)

        jax.lax.fori_loop(0, t.rows * count * each, one, None)

    def over_turns(is_own: bool, carry: tuple, then: Callable[[], None]) -> tuple:
        """Adds all turns of prompts, or of slots, to maxima, sums and outputs; after the last,
        `then`."""
        count, buffer = turns[int(is_own), _digits(step, parts)[0]], buffers[is_own]
        carry = tuple(x.reshape(t.rows * t.heads * buffer.shape[3], -1, x.shape[-1]) for x in carry)
        q = q_ref[...].reshape(carry[2].shape).astype(own.dtype)
        length = by_lane[:, 1:, :, :1] if is_own else by_lane[:, :1, :, :1]
        length = jnp.broadcast_to(length[:, None], (*buffer.shape[1:4], 1, 1)).reshape(-1, 1, 1)

        def turn(number: Any, carry: tuple) -> tuple:
            pl.when(number + 1 < count)(lambda: move("start", step, number + 1, is_own))
            pl.when(number + 1 == count)(then)
            move("wait", step, number, is_own)
            keys = buffer[jax.lax.rem(number, 2)].reshape(len(q), -1, buffer.shape[-1])
            k, v = (
                (keys, keys)
                if width == buffer.shape[-1]
                else (keys[..., :width], keys[..., width:])
            )
            scores = _products(q, k, 2)
            place = number * keys.shape[1] + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
            return add_block(scores, place < length, v, carry, _products)

        return jax.lax.fori_loop(0, count, turn, carry)

    first = jnp.int32(0)
    pl.when(number == 0)(lambda: move("start", step, first, False))
    carry = tuple(
        jnp.full((t.rows * t.heads, slots * sublanes, size), value, jnp.float32)
        for size, value in ((1, LOWEST), (1, 0.0), (width, 0.0))
    )
    carry = over_turns(False, carry, lambda: move("start", step, first, True))
    _, total, out = over_turns(
        True,
        carry,
        lambda: pl.when(number + 1 < steps)(lambda: move("start", step + 1, first, False)),
    )
    out_ref[...] = (out / total).reshape(out_ref.shape).astype(out_ref.dtype)
