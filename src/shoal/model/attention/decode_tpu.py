"""Attention of decoding by one kernel a layer on TPU, in Pallas for Mosaic.

A step has some rows; their keys come in turns, prompts' before slots' own, which are in pages
anywhere, and the next turn's are copied on the chip while one's are read. One softmax is gathered
over all (Milakov and Gimelshein 2018, arXiv 1805.02867), and what a slot computes depends on no
other, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from shoal.model.attention.decode_gpu import add_block
from shoal.model.attention.softmax import LOWEST, largest_block

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
