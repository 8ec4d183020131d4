"""The `AttentionFn`s of training, scoring and prefill, over rows of several sequences, and which kind computes them.

A token reads the tokens at or before it of its own segment and of its prompt's (`LearnerBatch`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.mesh import Role
from shoal.model.attention import MOST_SPLASH_TOKENS, Tokens, attend_at_once
from shoal.model.blocked_attention import SCORES_AT_ONCE, attend_by_blocks, block_size, blocks_of
from shoal.model.transformer import AttentionFn, Model
from shoal.types import ShoalError

SCORE_BYTES = 2**31
"""Scores on a GPU or TPU above which `model.attention=auto` computes them by blocks, where it takes no kernel: of a
layer, since the backward pass computes them again, or of all where `model.remat=none` keeps them."""

SHORT = 128
"""Tokens of a row up to which all its scores are computed at once on CPU: blocks would leave out next to nothing."""

KERNEL_TOKENS = 512
"""Tokens of a row from which `auto` takes a kernel. On TPU a shorter row is one or two of splash's blocks. By the
compiler's account of an H200 a micro-batch of 1.5B with a row of 4,096 tokens takes 208 ms with all scores at once and
76 with the kernels."""

MOST_PALLAS_HEAD = 256
"""Dimensions of a head in the kernels for GPUs: of wider ones, not even a small block fits the registers."""


def attention_kind(model: Model, rows: int, size: int) -> str:
    """How attention is computed for rows of so many tokens: `model.attention`; for `auto` by device and shape."""
    kind, platform = model.attention, model.role.platform
    if kind in _REFUSALS and (reason := _REFUSALS[kind](model, size)):
        instead = attention_kind(replace(model, attention="auto"), rows, size)
        raise ShoalError(f"model.attention={kind}: {reason}; model.attention=auto uses {instead} here")
    if kind != "auto":
        return kind
    if platform == "cpu":
        return "reference" if size <= SHORT else "blocked"
    if size >= KERNEL_TOKENS:
        for kernel, refusal in _REFUSALS.items():
            if not refusal(model, size):
                return kernel
    layers = model.architecture.num_layers if model.remat == "none" else 1
    scores = rows * size**2 * model.architecture.num_heads * layers // (model.role.row_shards * model.role.tensor)
    return "reference" if 4 * scores <= SCORE_BYTES else "blocked"


def kernel_fault(model: Model) -> str:
    """Why our kernels that `model.attention=auto` takes do not work on this device, found by trying them once a
    process; empty if they work, or are not taken. Some GPUs have too little shared memory, or are too old for Triton.

    Never inside of a compiled function: a model is made with `blocked` where there is a fault."""
    if model.attention != "auto" or all(refusal(model, KERNEL_TOKENS) for refusal in _REFUSALS.values()):
        return ""
    own = set(model.role.mesh.devices.flat) & set(jax.local_devices())
    if not own:  # the devices of a plan are not here
        return ""
    from shoal.model.pallas_attention import fault_on  # Pallas takes a second to import

    a = model.architecture
    return fault_on(min(own, key=lambda device: device.id), a.num_heads // a.num_kv_heads, a.head_dim, model.dtype.name)


def platform_fault(attention: str, platform: str) -> str:
    """Why `model.attention` computes no model on a platform; empty if it may."""
    needed, devices = {"splash": ("tpu", "TPUs"), "pallas": ("gpu", "GPUs")}.get(attention, (platform, ""))
    return "" if needed == platform else f"{attention} attention is for {devices}, and this is a {platform.upper()}"


def _splash_refusal(model: Model, size: int) -> str:
    """Why splash attention cannot compute a model's rows of so many tokens; empty if it can."""
    if fault := platform_fault("splash", model.role.platform):
        return fault
    if model.architecture.head_dim % 64:
        return f"splash attention needs heads of a multiple of 64, and the model's head_dim is " \
               f"{model.architecture.head_dim}"
    if size > MOST_SPLASH_TOKENS:
        return f"a row has {size:,} tokens, and at most {MOST_SPLASH_TOKENS:,} are supported"
    return ""


def _pallas_refusal(model: Model, size: int) -> str:
    """Why the kernels for GPUs cannot compute a model's rows; empty if they can."""
    if fault := platform_fault("pallas", model.role.platform):
        return fault
    if model.architecture.head_dim > MOST_PALLAS_HEAD:
        return f"pallas attention needs heads of at most {MOST_PALLAS_HEAD}, and the model's head_dim is " \
               f"{model.architecture.head_dim}"
    return ""


_REFUSALS = {"splash": _splash_refusal, "pallas": _pallas_refusal}


def segment_attention(model: Model, segment: jax.Array, prompt: jax.Array) -> AttentionFn:
    """Of rows segment[R, T], prompt[R, T]."""
    over_rows, _ = _over_rows(model, segment, prompt)
    return lambda q, k, v, cache: (over_rows(q, k, v), None)


def prefill_attention(model: Model, length: jax.Array, size: int, reads: tuple = ()) -> AttentionFn:
    """Prompts [R, T] of length[R] attend to themselves; their keys and values are the new cache. `reads`: of
    `prompt_reads`, where a program before has found them."""
    segment = (jnp.arange(size) < length[:, None]).astype(jnp.int32)
    over_rows, _ = _over_rows(model, segment, segment, reads)
    return lambda q, k, v, cache: (over_rows(q, k, v), (k, v))


def prompt_reads(model: Model, length: jax.Array, size: int) -> tuple:
    """What the tokens of prompts read, in the form that the kind of attention takes: arrays by row."""
    segment = (jnp.arange(size) < length[:, None]).astype(jnp.int32)
    return _over_rows(model, segment, segment)[1]


def _over_rows(model: Model, segment: jax.Array, prompt: jax.Array, reads: tuple = ()) -> tuple[Callable, tuple]:
    """Attention of whole rows, or of the parts that they are split into: q[R, T, H, A], k and v[R, T, K, A] ->
    [R, T, H, A]. With what each token reads, if that is not known."""
    role, (parts, size) = model.role, segment.shape
    kind = attention_kind(model, parts // role.context, size * role.context)

    def whole(x: jax.Array) -> jax.Array:
        return x if role.context == 1 else jax.lax.all_gather(x, "context", axis=1, tiled=True)

    def over_rows(attend: Callable, known_of: Callable) -> tuple[Callable, tuple]:
        def find(segment: jax.Array, prompt: jax.Array) -> Any:
            query = key = Tokens.of(whole(segment), whole(prompt))
            if role.context > 1:
                first = jax.lax.axis_index("context") * size
                query = Tokens(*(jax.lax.dynamic_slice_in_dim(x, first, size, 1) for x in key))
            return known_of(query, key)

        # Queries stay where they are. Keys and values of a row are gathered, those of few heads: a layer's alone, as
        # the backward pass gathers them again.
        known = reads or _on_each_device(role, find)(segment, prompt)
        return _on_each_device(role, lambda q, k, v, *known: attend(q, whole(k), whole(v), *known), *known), known

    if kind == "reference":
        return over_rows(attend_at_once, lambda query, key: (query, key))
    # What each token reads is found once, not in every layer.
    if kind == "splash":
        from shoal.model.splash_attention import attend_rows, row_masks  # Pallas takes a second to import

        return over_rows(attend_rows, lambda query, key: (row_masks(query, key),))
    if kind == "pallas":
        from shoal.model import pallas_attention as pallas

        block = pallas.block_size(model.architecture.head_dim, model.dtype)
        return over_rows(pallas.attend_rows, lambda query, key: (pallas.block_lists(query, key, block),))
    block = block_size(size, role.platform)
    scores = block**2 * model.architecture.num_heads // role.tensor
    at_once = max(1, SCORES_AT_ONCE // scores) if role.platform == "cpu" else 0
    return over_rows(partial(attend_by_blocks, at_once=at_once), lambda query, key: (blocks_of(query, key, block),))


def _on_each_device(role: Role, function: Callable, *known: jax.Array) -> Callable:
    """Each device computes its own rows, and its heads of [R, T, heads, A]: the partitioner cannot split a kernel, nor
    skip by device. `known` follows the arguments of a call."""
    if role.mesh.size == 1:
        return lambda *args: function(*args, *known)
    rows = role.row_axes or None

    def spec(x: jax.Array) -> PartitionSpec:
        return PartitionSpec(rows, None, "tensor") if x.ndim == 4 else PartitionSpec(rows)

    def local(*args: jax.Array) -> jax.Array:
        out = spec(args[0]) if args[0].ndim == 4 else PartitionSpec(rows)
        return jax.shard_map(function, mesh=role.mesh, in_specs=jax.tree.map(spec, (*args, *known)), out_specs=out,
                             axis_names={*role.row_axes, "tensor"}, check_vma=False)(*args, *known)

    return local
