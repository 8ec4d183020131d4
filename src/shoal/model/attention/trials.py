"""Whether the kernels are right on this device: each is tried once on small inputs, and compared
with the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.model.attention import decode_gpu
from shoal.model.attention import tpu as tpu_attention
from shoal.model.attention.decode_gpu import attend_slots
from shoal.model.attention.decode_tpu import attend_pages
from shoal.model.attention.gpu import attend_rows, block_lists, block_size
from shoal.model.attention.reference import attend, attend_at_once
from shoal.model.attention.rule import Tokens
from shoal.model.rotary import rotate


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
                try_kernel = None if head_dim % 64 else trial_of_pages
            else:
                ours = results(
                    lambda q, k, v: attend_rows(
                        q, k, v, block_lists(tokens, tokens, block), interpret
                    )
                )
                exact = results(exactly)
                try_kernel = trial if head_dim in decode_gpu.HEADS else None
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
