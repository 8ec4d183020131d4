"""Finds out whether the kernels are right on this device: each is run once on small inputs, and
compared with the reference."""

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
from shoal.model.delta_net import delta_step
from shoal.model.rotary import rotate

MOST_DIFFERENCE = {"bfloat16": 2e-2, "float16": 2e-2, "float32": 1e-3}
"""Largest difference between the kernels and the reference in `fault_on`, as a share of the values'
norm."""


Pairs = list[tuple[str, np.ndarray, np.ndarray]]
"""(name, the kernel's result, the reference's result) for each result."""


Draw = Callable[..., jax.Array]
"""(*shape) -> normal random numbers on the device."""


def _make_draw(rng: np.random.Generator, dtype: str, device: Any) -> Draw:
    """Returns a function that draws normal random numbers, as an array of this type on a
    device."""

    def draw(*shape: int) -> jax.Array:
        return jax.device_put(jnp.asarray(rng.standard_normal(shape), dtype), device)

    return draw


def slot_kernel_trial(
    device: Any, share: int, head_dim: int, dtype: str, interpret: bool
) -> tuple[tuple, tuple]:
    """Runs decoding's kernel for GPUs on a device for a few slots of random numbers. Returns what
    the kernel computes and what the reference computes: (results, own keys, own values) each.
    `share` is the number of query heads, for one key head."""
    rng = np.random.default_rng(0)
    # 2 rows of 2 slots; caches have room for 128 keys of a prompt and 64 of a slot.
    prefix_len = np.array([70, 1])
    position = np.array([[0, 63], [40, 5]])
    angles = jnp.asarray(rng.uniform(0, 6, (2, 2, head_dim // 2)), jnp.float32)
    angles = jax.device_put(angles, device)
    draw = _make_draw(rng, dtype, device)
    heads = draw(2, 2, share + 2, head_dim)
    prefix_k = draw(2, 1, 128, head_dim)
    prefix_v = draw(2, 1, 128, head_dim)
    own_k = draw(2, 2, 1, 64, head_dim)
    own_v = draw(2, 2, 1, 64, head_dim)
    keys = prefix_k, prefix_v, own_k, own_v

    def by_reference(heads: jax.Array, cos: jax.Array, sin: jax.Array, keys: tuple) -> tuple:
        """Computes what the kernel does, with plain rotation, scatter and `reference.attend`."""
        prefix_k, prefix_v, own_k, own_v = keys
        q, k, v = jnp.split(heads, (share, share + 1), axis=2)
        q = rotate(q, cos[:, :, None], sin[:, :, None])
        k = rotate(k, cos[:, :, None], sin[:, :, None])
        row, slot = jnp.indices(position.shape)
        own_k = own_k.at[row, slot, 0, position].set(k[:, :, 0])
        own_v = own_v.at[row, slot, 0, position].set(v[:, :, 0])

        # Here 4 are the slots: 2 rows of 2.
        def by_slot(prefix: jax.Array, own: jax.Array) -> jax.Array:
            """Returns the keys (or values) of the prompt and of the slot, [slots, T, 1, A]."""
            own = own.reshape(4, 1, 64, head_dim)
            return jnp.concatenate([jnp.repeat(prefix, 2, 0), own], 2).swapaxes(1, 2)

        prefix_mask = jnp.repeat(jnp.arange(128) < prefix_len[:, None], 2, 0)
        own_mask = jnp.arange(64) <= position.reshape(4, 1)
        mask = jnp.concatenate([prefix_mask, own_mask], 1)
        by_query = q.reshape(4, 1, share, head_dim)
        out = attend(by_query, by_slot(prefix_k, own_k), by_slot(prefix_v, own_v), mask[:, None])
        return out.reshape(q.shape), own_k, own_v

    def by_kernel(heads: jax.Array, cos: jax.Array, sin: jax.Array, keys: tuple) -> tuple:
        """Computes the results with the kernel."""
        num_prefix = jnp.asarray(prefix_len, jnp.int32)
        positions = jnp.asarray(position, jnp.int32)
        # All slots of a row in one program.
        return attend_slots(heads, cos, sin, keys, num_prefix, positions, interpret, programs=1)

    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    return jax.jit(by_kernel)(heads, cos, sin, keys), jax.jit(by_reference)(heads, cos, sin, keys)


def page_kernel_trial(
    device: Any, share: int, head_dim: int, dtype: str, interpret: bool
) -> tuple[tuple, tuple]:
    """Runs decoding's kernel for TPUs for a few slots of random numbers on scattered pages, in two
    turns and two steps, with `share` query heads to each of two key heads. Returns (result of the
    kernel,), (result of the reference,)."""
    # 2 rows of 2 slots with 6 pages of 128 keys each, in a pool of 24 pages.
    pages = np.random.default_rng(1).permutation(24).reshape(2, 2, 6)
    prefix_len = np.array([70, 128])
    length = np.array([[1, 128], [700, 385]])
    draw = _make_draw(np.random.default_rng(0), dtype, device)
    q = draw(2, 2, 2 * share, head_dim)
    prompts = draw(2, 2, 128, 2 * head_dim)
    own = draw(24, 2, 128, 2 * head_dim)

    # Here 4 are the slots: 2 rows of 2, each with 2 key heads.
    def by_reference(q: jax.Array, prompts: jax.Array, own: jax.Array) -> jax.Array:
        """Computes what the kernel does, with `reference.attend`, from pages gathered by slot."""
        # [slots, key heads, keys of all pages, keys and values]
        by_slot = own[pages].swapaxes(2, 3).reshape(4, 2, -1, 2 * head_dim)
        keys = jnp.concatenate([jnp.repeat(prompts, 2, 0), by_slot], 2).swapaxes(1, 2)
        k, v = jnp.split(keys, 2, -1)
        prompt_mask = jnp.repeat(np.arange(128) < prefix_len[:, None], 2, 0)
        own_mask = np.arange(6 * 128) < length.reshape(4, 1)
        mask = jnp.concatenate([prompt_mask, own_mask], 1)
        return attend(q.reshape(4, 1, -1, head_dim), k, v, mask[:, None]).reshape(q.shape)

    by_kernel = jax.jit(partial(attend_pages, interpret=interpret))
    ours = by_kernel(
        q,
        prompts,
        own,
        jnp.asarray(prefix_len, jnp.int32),
        jnp.asarray(length, jnp.int32),
        jnp.asarray(pages, jnp.int32),
    )
    return (ours,), (jax.jit(by_reference)(q, prompts, own),)


def fault_on(device: Any, share: int, head_dim: int, dtype: str, interpret: bool = False) -> str:
    """Returns what is wrong with the kernels on a device; "" if nothing is. Takes seconds, once a
    process: compares values and gradients of a packed row of three blocks, with `share` query heads
    to a key head, and decoding of a few slots, with the reference. A result is wrong if it differs
    by more than MOST_DIFFERENCE. Whatever a compiler or a device raises is a fault too. `interpret`
    runs the kernel as plain JAX, on any device, for tests."""
    try:
        return _fault_on(device, share, head_dim, dtype, interpret)
    except jax.errors.JaxRuntimeError as error:
        # This fault is not cached: memory that other programs use now may be free the next time.
        return _first_line(error)


def _first_line(error: Exception) -> str:
    """Returns an error's class and the beginning of its text."""
    text = str(error) or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}"


@lru_cache
def _fault_on(device: Any, share: int, head_dim: int, dtype: str, interpret: bool) -> str:
    """Returns what is wrong with the kernels on a device; "" if nothing is. Computed once for the
    same arguments. Raises JaxRuntimeError if the device's memory runs out, which is not cached."""
    on_tpu = device.platform == "tpu"

    def trial() -> Pairs:
        if on_tpu:
            pairs = _row_trial_on_tpu(device, share, head_dim, dtype, interpret)
            if head_dim % 64 == 0:
                ours, exact = page_kernel_trial(device, share, head_dim, dtype, interpret)
                pairs += name_results(("results in decoding",), ours, exact)
        else:
            pairs = _row_trial_on_gpu(device, share, head_dim, dtype, interpret)
            if head_dim in decode_gpu.HEADS:
                ours, exact = slot_kernel_trial(device, share, head_dim, dtype, interpret)
                names = "results in decoding", "keys in decoding", "values in decoding"
                pairs += name_results(names, ours, exact)
        return pairs

    return fault_of(trial, dtype)


@lru_cache
def state_fault_on(
    kernel: Any, device: Any, key_dim: int, value_dim: int, dtype: str, interpret: bool = False
) -> str:
    """Returns what is wrong on a device with the kernel of delta nets' decoding in the module
    `kernel`, for heads of these sizes; "" if nothing is. Takes a second, once a process: compares a
    step of a few slots with `delta_step`. `interpret` runs the kernel as plain JAX, on any device,
    for tests."""
    platform = "tpu" if device.platform == "tpu" else "gpu"
    draw = _make_draw(np.random.default_rng(0), dtype, device)
    # 2 rows of 3 slots, with 2 key heads of 2 value heads each.
    tokens = (
        draw(2, 3, 2, key_dim),
        draw(2, 3, 2, key_dim),
        draw(2, 3, 4, value_dim),
        -abs(draw(2, 3, 4).astype(jnp.float32)),
        jax.nn.sigmoid(draw(2, 3, 4)),
    )
    state = draw(2, 3, 4, key_dim, value_dim).astype(jnp.float32)

    def trial() -> Pairs:
        by_kernel = partial(kernel.step_by_kernel, interpret=interpret)
        ours = jax.jit(by_kernel)(*tokens, state)
        exact = jax.jit(partial(delta_step, platform=platform))(*tokens, state)
        return name_results(("results of delta nets", "states"), ours, exact)

    return fault_of(trial, dtype)


def fault_of(trial: Callable[[], Pairs], dtype: str) -> str:
    """Returns what is wrong with the results of kernels that `trial` returns; "" if nothing is.
    `dtype` is the type in which it computes them. Raises JaxRuntimeError if the device's memory
    runs out."""
    try:
        # The precision is the model's; for float32 it is the highest, so that no rounding in the
        # reference could hide a kernel's fault.
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            pairs = trial()
    except Exception as error:
        # Whatever a compiler or a device raises is a fault.
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            raise
        return _first_line(error)
    for name, ours, exact in pairs:
        difference = float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))
        if not difference <= MOST_DIFFERENCE[dtype]:  # also true if the difference is NaN
            return f"their {name} differ by {difference:.2g} of their norm from the reference"
    return ""


def name_results(names: tuple[str, ...], ours: tuple, exact: tuple) -> Pairs:
    """Returns each result of the kernel with its name and the reference's result, as float64."""
    pairs = []
    for name, of_kernel, of_reference in zip(names, ours, exact, strict=True):
        pairs.append(
            (name, np.asarray(of_kernel, np.float64), np.asarray(of_reference, np.float64))
        )
    return pairs


class _RowInputs:
    """A packed row of three blocks: its tokens, and random q, k and v."""

    def __init__(self, device: Any, block: int, share: int, head_dim: int, dtype: str) -> None:
        """Makes the tokens of one row with sequences that end within blocks, and random q of
        `share` heads, k and v of one head; float64 until they are used in `dtype`. `block` is the
        kernels' block in tokens."""
        # A prompt, two completions, a prompt, padding.
        sizes = block // 2 + 3, block, block // 2, block // 4, block // 2
        segment = jnp.asarray(np.repeat([(1, 2, 3, 4, 0)], sizes, axis=1), jnp.int32)
        prompt = jnp.asarray(np.repeat([(1, 1, 1, 4, 0)], sizes, axis=1), jnp.int32)
        self.tokens = Tokens.of(segment, prompt)
        self.size = sum(sizes)
        self.rng = np.random.default_rng(0)
        self._device = device
        self._dtype = dtype
        self._q = self.rng.standard_normal((1, self.size, share, head_dim))
        self._k = self.rng.standard_normal((1, self.size, 1, head_dim))
        self._v = self.rng.standard_normal((1, self.size, 1, head_dim))
        self._weight = self.rng.standard_normal((1, self.size, share, head_dim))

    def results(self, attention: Callable[..., jax.Array]) -> tuple[np.ndarray, ...]:
        """Returns (values, dq, dk, dv): the values of an attention function of q, k and v, float32,
        and the gradients of their weighted sum. The weights are random, and the same in each
        call."""

        def weighted_sum(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = attention(q, k, v).astype(jnp.float32)
            return (out * self._weight).sum(), out

        def put(x: np.ndarray) -> jax.Array:
            return jax.device_put(jnp.asarray(x, self._dtype), self._device)

        value_and_gradient = jax.jit(jax.value_and_grad(weighted_sum, (0, 1, 2), has_aux=True))
        (_, out), (d_q, d_k, d_v) = value_and_gradient(put(self._q), put(self._k), put(self._v))
        return out, d_q, d_k, d_v


_ROW_RESULTS = ("values", "dq", "dk", "dv")


def _row_trial_on_gpu(device: Any, share: int, head_dim: int, dtype: str, interpret: bool) -> Pairs:
    """Runs the kernels for rows on a GPU, and the reference. Returns (name, the kernel's result,
    the reference's result) for values, dq, dk and dv."""
    block = block_size(head_dim, jnp.dtype(dtype))
    row = _RowInputs(device, block, share, head_dim, dtype)

    def by_kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_rows(q, k, v, block_lists(row.tokens, row.tokens, block), interpret)

    ours = row.results(by_kernel)
    exact = row.results(partial(attend_at_once, query=row.tokens, key=row.tokens))
    return name_results(_ROW_RESULTS, ours, exact)


def _row_trial_on_tpu(device: Any, share: int, head_dim: int, dtype: str, interpret: bool) -> Pairs:
    """Runs the kernels for rows on a TPU, and the reference. Returns (name, the kernel's result,
    the reference's result) for values, dq, dk and dv."""
    row = _RowInputs(device, tpu_attention.BLOCK, share, head_dim, dtype)
    angles = jnp.asarray(row.rng.uniform(0, 6, (1, row.size, 1, head_dim // 2)), jnp.float32)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    pairs = tpu_attention.block_pairs(row.tokens, row.tokens)
    side_by_side = tpu_attention.side_by_side((cos, sin))

    def by_kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Computes attention with the kernel, which takes heads side by side and rotates them
        itself."""
        flat_q = jax.lax.collapse(q, 2)
        flat_k = jax.lax.collapse(k, 2)
        flat_v = jax.lax.collapse(v, 2)
        angles = side_by_side, side_by_side
        out = tpu_attention.attend_rows(flat_q, flat_k, flat_v, angles, pairs, interpret)
        return out.reshape(q.shape)

    def by_reference(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_at_once(rotate(q, cos, sin), rotate(k, cos, sin), v, row.tokens, row.tokens)

    return name_results(_ROW_RESULTS, row.results(by_kernel), row.results(by_reference))
