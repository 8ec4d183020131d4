"""Attention of decoding on TPU, by one kernel a layer in Pallas for Mosaic.

A step of the grid has some rows. Their keys come in turns, first those of prompts, then the slots'
own, which are in pages anywhere; the next turn's keys are copied onto the chip while those of one
turn are read. One softmax is gathered over all turns, and what a slot computes does not depend on
any other, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from shoal.model.attention import softmax
from shoal.model.attention.softmax import (
    LOG2E,
    LOWEST,
    RunningSoftmax,
    largest_block,
    masked,
)

LANES, SUBLANES = 128, 8
"""Dimensions of a register of 32 bits. The queries of a slot and a key head are filled up to a
multiple of its rows."""


MOST_PAGES = 4
"""Most pages of a slot, or of a prompt, that one turn reads."""


BUFFER_BYTES = 6 << 20
"""Bytes of a TPU's on-chip memory for the own keys of two turns, unless a single page of every slot
takes more."""


ROWS_OF_PRODUCTS = 64
"""A product of few rows takes as long as one of so many, because its keys have to enter the matrix
units. With products at half of the peak, this is about what Mosaic schedules for a page on v5p."""


class Tiles(NamedTuple):
    """Sizes of a step: its rows and key heads, and the pages that a turn reads of each prompt and
    of every slot."""

    rows: int
    heads: int
    prompt_pages: int
    pages: int

    @classmethod
    def of(
        cls, rows: int, slots: int, heads: int, prompt_pages: int, pages: int, page_bytes: int
    ) -> Tiles:
        """Returns the tiles for sizes on one device. `prompt_pages` and `pages` are those of a
        whole prompt and a whole slot; `page_bytes` are the bytes of one head's keys and values in a
        page. Each size divides its whole; the buffer of own keys stays within BUFFER_BYTES, unless
        one page of every slot takes more."""
        # Pages of every slot that fit: the buffer holds two turns. They are spent on heads first,
        # then on rows, then on pages of a turn.
        most_slot_pages = max(1, BUFFER_BYTES // (2 * page_bytes * slots))
        step_heads = largest_block(heads, most_slot_pages)
        # At least two steps, for devices of two cores.
        most_rows = max(1, min(most_slot_pages // step_heads, rows // 2))
        step_rows = largest_block(rows, most_rows)
        most_pages = most_slot_pages // (step_heads * step_rows)
        most_prompt_pages = max(1, slots * most_pages // 2)
        return cls(
            rows=step_rows,
            heads=step_heads,
            prompt_pages=largest_block(prompt_pages, min(MOST_PAGES, most_prompt_pages)),
            pages=largest_block(pages, min(MOST_PAGES, most_pages)),
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
    """Computes attention of one token in each of [N, W] slots, q[N, W, H, A] -> [N, W, H, A].

    `prompts`[N, K, Tp, 2 A] are the keys of the rows' prompts, with their values next to them: the
    first prefix_len[N] are read. `own`[P, K, B, 2 A] is a pool of pages of B keys, with their
    values; pages[N, W, T] are the numbers of each slot's pages, of which the first length[N, W]
    keys are read. If both lengths are 0, a result means nothing. A is a multiple of 64, B of 128,
    and Tp of B. q is rotated already; scores are scaled by 1/sqrt(A) here. They and all sums are
    float32. Nothing is written into the pages. `interpret` runs the kernel as plain JAX, on any
    device, for tests.
    """
    rows, slots, num_heads, head_dim = q.shape
    _, heads, size, width = prompts.shape
    page = own.shape[2]
    share = num_heads // heads
    item = own.dtype.itemsize
    tiles = Tiles.of(rows, slots, heads, size // page, pages.shape[2], page * width * item)
    steps = rows // tiles.rows * heads // tiles.heads
    # over the cores of a device that has two
    grid = (2, steps // 2) if steps % 2 == 0 else (1, steps)
    # Heads of half a register's lanes are read together with their values, which are multiplied by
    # zeros that fill up the queries.
    num_zeros = 0 if head_dim % LANES == 0 else head_dim
    q = q * jnp.asarray(head_dim**-0.5, q.dtype)
    q = q.reshape(rows, slots, heads, share, head_dim).swapaxes(1, 2)
    q = jnp.pad(q.astype(jnp.float32), ((0, 0),) * 3 + ((0, -share % SUBLANES), (0, num_zeros)))
    lengths = jnp.concatenate([prefix_len[:, None], length], 1)
    longest = lengths.reshape(-1, tiles.rows, 1 + slots).max(1)
    prompt_turns = -(-longest[:, 0] // (page * tiles.prompt_pages))
    own_turns = -(-longest[:, 1:].max(1) // (page * tiles.pages))
    turns = jnp.stack([prompt_turns, own_turns])

    def block_of_step(core: Any, number: Any, *_: Any) -> tuple:
        row, head = _digits(core * grid[1] + number, heads // tiles.heads)
        return row, head, 0, 0, 0

    def row_of_step(core: Any, number: Any, *_: Any) -> tuple:
        row, _head = _digits(core * grid[1] + number, heads // tiles.heads)
        return row, 0, 0, 0

    _, _, _, sublanes, q_width = q.shape
    block = pl.BlockSpec((tiles.rows, tiles.heads, slots, sublanes, q_width), block_of_step)
    by_lane = pl.BlockSpec((tiles.rows, 1 + slots, 1, LANES), row_of_step)
    keys = pl.BlockSpec(memory_space=tpu.MemorySpace.HBM)
    prompt_buffer = tpu.VMEM(
        (2, tiles.rows, tiles.heads, 1, tiles.prompt_pages * page, width), own.dtype
    )
    own_buffer = tpu.VMEM((2, tiles.rows, tiles.heads, slots, tiles.pages * page, width), own.dtype)
    # the number if every key were read
    num_scores = rows * heads * (size + slots * pages.shape[2] * page)
    # Without this XLA copies whole caches into on-chip memory and back, as if the kernel read all
    # of them.
    if not interpret:
        prompts = tpu.with_memory_space_constraint(prompts, tpu.MemorySpace.HBM)
        own = tpu.with_memory_space_constraint(own, tpu.MemorySpace.HBM)
    out = pl.pallas_call(
        partial(_page_kernel, tiles),
        jax.ShapeDtypeStruct(q.shape, own.dtype),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[block, by_lane, keys, keys],
            out_specs=block,
            scratch_shapes=[prompt_buffer, own_buffer, tpu.SemaphoreType.DMA((2, 2))],
        ),
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * num_scores * ROWS_OF_PRODUCTS * (head_dim + num_zeros),
            transcendentals=num_scores * SUBLANES,
            bytes_accessed=num_scores * width * item,
        ),
        interpret=interpret,
        name="decode_kernel",
    )(
        # Each step copies and waits at least once, so that copies and waits match.
        jnp.maximum(turns, 1),
        lengths.reshape(-1),
        pages.reshape(-1),
        q,
        jnp.broadcast_to(lengths[..., None, None], (rows, 1 + slots, 1, LANES)),
        prompts,
        own,
    )
    # If keys and values were read as one array, the values' result is its second half.
    return out[..., :share, num_zeros:].swapaxes(1, 2).reshape(rows, slots, num_heads, head_dim)


def _digits(number: Any, *sizes: int) -> tuple[Any, ...]:
    """Splits the number of an element of an array [.., *sizes], counted row by row, into its index
    in each dimension: of 7 with sizes (3,) -> (2, 1). The first dimension's size is not needed."""
    digits: list[Any] = []
    for size in reversed(sizes):
        digits.insert(0, jax.lax.rem(number, jnp.int32(size)))
        number = jax.lax.div(number, jnp.int32(size))
    digits.insert(0, number)
    return tuple(digits)


def _products(a: jax.Array, b: jax.Array, contracted: int = 1) -> jax.Array:
    """Multiplies U matrices a[U, M, X] with U others, each with its own, to float32 matrices;
    `contracted` is the dimension of b that is X, 1 or 2."""
    precision = None if b.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    # Mosaic has no other precision of 16 bits.
    return jax.lax.dot_general(a, b, (((2,), (contracted,)), ((0,), (0,))), precision, jnp.float32)


def _page_kernel(
    tiles: Tiles,
    turns: Any,
    lengths: Any,
    pages: Any,
    q_ref: Any,
    by_lane: Any,
    prompts: Any,
    own: Any,
    out_ref: Any,
    prompt_buffer: Any,
    own_buffer: Any,
    semaphores: Any,
) -> None:
    """Computes the output of one step: some rows and key heads of all slots. Writes it to
    `out_ref`. `turns`[2, groups of rows] are the numbers of turns of prompts and of slots;
    `lengths` has, for each row, the keys of its prompt and of each slot, `by_lane` the same numbers
    once for each lane; `prompts` and `own` stay outside of the chip, and are copied into the two
    buffers."""
    number = pl.program_id(1)
    steps = pl.num_programs(1)
    page = own.shape[2]
    step = pl.program_id(0) * steps + number
    num_head_groups = own.shape[1] // tiles.heads
    _, _, slots, sublanes, width = q_ref.shape
    most_pages = pages.shape[0] // (prompts.shape[0] * slots)

    def move(act: str, step: Any, turn: Any, is_own: bool) -> None:
        """Starts the copies of a turn's keys into one half of the buffer (`act` "start"), or waits
        for them ("wait"). The keys are those of prompts, or of slots if `is_own`."""
        row_group, head_group = _digits(step, num_head_groups)
        half = jax.lax.rem(turn, 2)
        buffer = own_buffer if is_own else prompt_buffer
        num_owners = buffer.shape[3]  # slots of a row; 1 for its prompt
        pages_at_once = buffer.shape[4] // page

        def move_page(number: Any, _: None) -> None:
            """Copies one page of a turn, or waits for it; fills the buffer with zeros if the page
            has no key to read."""
            row_of_step, slot, page_of_turn = _digits(number, num_owners, pages_at_once)
            row = row_group * tiles.rows + row_of_step
            # in its prompt or slot
            page_number = turn * pages_at_once + page_of_turn
            step_heads = pl.ds(head_group * tiles.heads, tiles.heads)
            pool_page: Any = 0
            if is_own:
                first_page = (row * slots + slot) * most_pages
                pool_page = pages[first_page + jnp.minimum(page_number, most_pages - 1)]
            keys = pl.ds(pl.multiple_of(page_number * page, page), page)
            if is_own:
                source = own.at[pool_page, step_heads]
                length = lengths[row * (1 + slots) + 1 + slot]
            else:
                source = prompts.at[row, step_heads, keys]
                length = lengths[row * (1 + slots)]
            target = buffer.at[half, row_of_step, :, slot, pl.ds(page_of_turn * page, page)]
            is_read = page_number * page < length
            # One semaphore for each buffer and half. `act` is the name of a method of the copy.
            copy = tpu.make_async_copy(source, target, semaphores.at[int(is_own), half])
            pl.when(is_read)(getattr(copy, act))
            if act == "start":  # a masked key has weight 0, but its value must be a number

                @pl.when(jnp.logical_not(is_read))
                def _() -> None:
                    target[...] = jnp.zeros(target.shape, target.dtype)

        jax.lax.fori_loop(0, tiles.rows * num_owners * pages_at_once, move_page, None)

    def over_turns(
        is_own: bool, running: RunningSoftmax, then: Callable[[], None]
    ) -> RunningSoftmax:
        """Adds all turns of prompts, or of slots, to the softmax; calls `then` before it reads the
        last turn."""
        buffer = own_buffer if is_own else prompt_buffer
        rows, _ = _digits(step, num_head_groups)
        count = turns[int(is_own), rows]
        products = tiles.rows * tiles.heads * buffer.shape[3]
        running = RunningSoftmax(
            top=running.top.reshape(products, -1, 1),
            total=running.total.reshape(products, -1, 1),
            out=running.out.reshape(products, -1, width),
        )
        q = q_ref[...].reshape(running.out.shape).astype(own.dtype)
        length = by_lane[:, 1:, :, :1] if is_own else by_lane[:, :1, :, :1]
        by_product = tiles.rows, tiles.heads, buffer.shape[3], 1, 1
        length = jnp.broadcast_to(length[:, None], by_product).reshape(-1, 1, 1)

        def add_turn(number: Any, running: RunningSoftmax) -> RunningSoftmax:
            """Starts the next turn's copies, waits for this turn's, and adds its keys."""

            @pl.when(number + 1 < count)
            def _() -> None:
                move("start", step, number + 1, is_own)

            # Before the last turn is waited for: what comes next is copied meanwhile.
            pl.when(number + 1 == count)(then)
            move("wait", step, number, is_own)
            keys = buffer[jax.lax.rem(number, 2)].reshape(len(q), -1, buffer.shape[-1])
            # One array if a head has half a register's lanes: queries have zeros for the values.
            k = v = keys
            if width != buffer.shape[-1]:
                k = keys[..., :width]
                v = keys[..., width:]
            scores = _products(q, k, 2)
            key = number * keys.shape[1] + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
            scores = masked(scores * LOG2E, key < length)

            def weigh_values(weights: jax.Array) -> jax.Array:
                return _products(weights.astype(v.dtype), v)

            return softmax.add_block(running, scores, weigh_values, jnp.exp2)

        return jax.lax.fori_loop(0, count, add_turn, running)

    def start_first_of_own() -> None:
        move("start", step, first, True)

    def start_next_step() -> None:
        @pl.when(number + 1 < steps)
        def _() -> None:
            move("start", step + 1, first, False)

    # number of the first turn
    first = jnp.int32(0)

    @pl.when(number == 0)
    def _() -> None:
        move("start", step, first, False)

    products = tiles.rows * tiles.heads
    queries = slots * sublanes
    running = softmax.start((products, queries, 1), (products, queries, width), LOWEST)
    running = over_turns(False, running, start_first_of_own)
    running = over_turns(True, running, start_next_step)
    out = softmax.attention_of(running)
    out_ref[...] = out.reshape(out_ref.shape).astype(out_ref.dtype)
