"""Which attention computes a model's rows on its devices, and why not another: the `AttentionFn`s
of training, scoring and prefill, and whether a kernel decodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.mesh import Role, listed
from shoal.model.attention.blocked import SCORES_AT_ONCE, attend_by_blocks, block_size
from shoal.model.attention.reference import attend_at_once
from shoal.model.attention.rule import Tokens, blocks_of
from shoal.model.block import AttentionFn
from shoal.model.rotary import rotate_by_product
from shoal.model.transformer import Model
from shoal.records import ShoalError

SCORE_BYTES = 2**31
"""Scores on a GPU or TPU above which `model.attention=auto` computes them by blocks, where it takes
no kernel: of a layer, since the backward pass computes them again, or of all where
`model.remat=none` keeps them."""


SHORT = 128
"""Tokens of a row up to which all its scores are computed at once on CPU: blocks would leave out
next to nothing."""


KERNEL_TOKENS = 512
"""Tokens of a row from which `auto` takes a kernel. On TPU a shorter row is one or two blocks. By
the compiler's account of an H200 a micro-batch of 1.5B with a row of 4,096 tokens takes 208 ms with
all scores at once and 76 with the kernels."""


MOST_PALLAS_HEAD = 256
"""Dimensions of a head in the kernels: of wider ones, not even a small block fits a GPU's
registers."""


MOST_TPU_TOKENS = 2**16
"""Of a row in the kernels for TPUs: the list of its pairs of blocks is in the memory of the scalar
core."""


def attention_kind(model: Model, rows: int, size: int) -> str:
    """How attention is computed for rows of so many tokens: `model.attention`; for `auto` by device
    and shape."""
    kind, platform = model.attention, model.role.platform
    if kind == "pallas" and (reason := _kernel_refusal(model, size)):
        instead = attention_kind(replace(model, attention="auto"), rows, size)
        raise ShoalError(
            f"model.attention={kind}: {reason}; model.attention=auto uses {instead} here"
        )
    if kind != "auto":
        return kind
    if platform == "cpu":
        return "reference" if size <= SHORT else "blocked"
    if size >= KERNEL_TOKENS and not _kernel_refusal(model, size):
        return "pallas"
    layers = model.architecture.num_layers if model.remat == "none" else 1
    scores = (
        rows
        * size**2
        * model.architecture.num_heads
        * layers
        // (model.role.row_shards * model.role.tensor)
    )
    return "reference" if 4 * scores <= SCORE_BYTES else "blocked"


def kernel_fault(model: Model) -> str:
    """Why our kernels that `model.attention=auto` takes do not work on this device, found by trying
    them once a process; empty if they work, or are not taken. Some GPUs have too little shared
    memory, or are too old for Triton.

    Never inside of a compiled function: a model is made with `blocked` where there is a fault."""
    if model.attention != "auto" or _kernel_refusal(model, KERNEL_TOKENS):
        return ""
    own = set(model.role.mesh.devices.flat) & set(jax.local_devices())
    if not own:  # the devices of a plan are not here
        return ""
    from shoal.model.attention.trials import fault_on  # Pallas takes a second to import

    a = model.architecture
    return fault_on(
        min(own, key=lambda device: device.id),
        a.num_heads // a.num_kv_heads,
        a.head_dim,
        model.dtype.name,
    )


def platform_fault(attention: str, platform: str) -> str:
    """Why `model.attention` computes no model on a platform; empty if it may."""
    if attention != "pallas" or platform in ("gpu", "tpu"):
        return ""
    return f"pallas attention is for GPUs and TPUs, and this is a {platform.upper()}"


def _kernel_refusal(model: Model, size: int) -> str:
    """Why the kernels cannot compute a model's rows of so many tokens; empty if they can."""
    if fault := platform_fault("pallas", model.role.platform):
        return fault
    if model.architecture.head_dim > MOST_PALLAS_HEAD:
        return (
            f"pallas attention needs heads of at most {MOST_PALLAS_HEAD}, and the model's head_dim "
            f"is {model.architecture.head_dim}"
        )
    if size > MOST_TPU_TOKENS and model.role.platform == "tpu":
        return f"a row has {size:,} tokens, and at most {MOST_TPU_TOKENS:,} are supported"
    return ""


def segment_attention(model: Model, segment: jax.Array, prompt: jax.Array) -> AttentionFn:
    """Of rows segment[R, T], prompt[R, T]."""
    return _over_rows(model, segment, prompt)[0]


@dataclass(frozen=True)
class RowAttention:
    """The `AttentionFn` of whole rows. Kernels for TPUs rotate what they read."""

    over_rows: Callable
    rotates: bool
    is_prefill: bool = False  # its keys and values are the new cache

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, _: None, rope: Any = None
    ) -> tuple[jax.Array, Any]:
        if not self.rotates:
            return self.over_rows(q, k, v), (k, v) if self.is_prefill else None
        from shoal.model.attention.tpu import (  # Pallas takes a second to import
            side_by_side,
            unrotated,
        )

        own = of_keys = side_by_side(rope)
        if self.is_prefill:  # whose keys are kept as they are read
            k, of_keys = rotate_by_product(k, *rope), unrotated(own)
        # As products take and give them, for each device: with heads as a dimension XLA would
        # divide them in products.
        out = self.over_rows(*(jax.lax.collapse(x, 2) for x in (q, k, v)), own, of_keys)
        return out.reshape(q.shape), (k, v) if self.is_prefill else None


def prefill_attention(model: Model, length: jax.Array, size: int, reads: tuple = ()) -> AttentionFn:
    """Prompts [R, T] of length[R] attend to themselves; their keys and values are the new cache.
    `reads`: of `prompt_reads`, where a program before has found them."""
    segment = (jnp.arange(size) < length[:, None]).astype(jnp.int32)
    return replace(_over_rows(model, segment, segment, reads)[0], is_prefill=True)


def prompt_reads(model: Model, length: jax.Array, size: int) -> tuple:
    """What the tokens of prompts read, in the form that the kind of attention takes: arrays by
    row."""
    segment = (jnp.arange(size) < length[:, None]).astype(jnp.int32)
    return _over_rows(model, segment, segment)[1]


def _over_rows(
    model: Model, segment: jax.Array, prompt: jax.Array, reads: tuple = ()
) -> tuple[RowAttention, tuple]:
    """Attention of whole rows, or of the parts that they are split into: q[R, T, H, A], k and v[R,
    T, K, A] -> [R, T, H, A]; for `tpu_attention` all with heads beside each other, and with angles.
    With what each token reads, if that is not known."""
    role, (parts, size) = model.role, segment.shape
    kind = attention_kind(model, parts // role.context, size * role.context)

    def whole(x: jax.Array) -> jax.Array:
        return x if role.context == 1 else jax.lax.all_gather(x, "context", axis=1, tiled=True)

    def over_rows(
        attend: Callable, known_of: Callable, rotates: bool = False
    ) -> tuple[RowAttention, tuple]:
        def find(segment: jax.Array, prompt: jax.Array) -> Any:
            query = key = Tokens.of(whole(segment), whole(prompt))
            if role.context > 1:
                first = jax.lax.axis_index("context") * size
                query = Tokens(*(jax.lax.dynamic_slice_in_dim(x, first, size, 1) for x in key))
            return known_of(query, key)

        # Queries stay where they are. Keys and values of a row are gathered, those of few heads: a
        # layer's alone, as the backward pass gathers them again.
        known = reads or _on_each_device(role, find)(segment, prompt)
        return RowAttention(
            lambda q, k, v, *angles: _on_each_device(
                role, lambda q, k, v, *rest: attend(q, whole(k), whole(v), *rest), *angles, *known
            )(q, k, v),
            rotates,
        ), known

    if kind == "reference":
        return over_rows(attend_at_once, lambda query, key: (query, key))
    # What each token reads is found once, not in every layer.
    if kind == "pallas" and role.platform == "tpu":
        from shoal.model.attention.tpu import (  # Pallas takes a second to import
            attend_rows,
            row_pairs,
        )

        return over_rows(
            lambda q, k, v, own, of_keys, pairs: attend_rows(q, k, v, (own, whole(of_keys)), pairs),
            lambda query, key: (row_pairs(query, key),),
            rotates=True,
        )
    if kind == "pallas":
        from shoal.model.attention import gpu as gpu_attention

        block = gpu_attention.block_size(model.architecture.head_dim, model.dtype)
        return over_rows(
            gpu_attention.attend_rows,
            lambda query, key: (gpu_attention.block_lists(query, key, block),),
        )
    block = block_size(size, role.platform)
    scores = block**2 * model.architecture.num_heads // role.tensor
    at_once = max(1, SCORES_AT_ONCE // scores) if role.platform == "cpu" else 0
    return over_rows(
        partial(attend_by_blocks, at_once=at_once),
        lambda query, key: (blocks_of(query, key, block),),
    )


def _on_each_device(role: Role, function: Callable, *known: jax.Array) -> Callable:
    """Each device computes its own rows, and its heads of [R, T, heads, ...]: the partitioner
    cannot split a kernel, nor skip by device. `known`, by row, follows the arguments of a call."""
    if role.mesh.size == 1:
        return lambda *args: function(*args, *known)
    by_row = PartitionSpec(role.row_axes or None)

    def local(*args: jax.Array) -> jax.Array:
        own = PartitionSpec(*by_row, None, "tensor") if args[0].ndim > 2 else by_row
        return jax.shard_map(
            function,
            mesh=role.mesh,
            in_specs=(own,) * len(args) + (by_row,) * len(known),
            out_specs=own,
            axis_names={*role.row_axes, "tensor"},
            check_vma=False,
        )(*args, *known)

    return local


def kernel_refusal(model: Model) -> str:
    """Why decoding's kernel cannot compute a model; empty if it can."""
    platform, width = model.role.platform, model.architecture.head_dim
    if platform == "cpu":
        return f"it is for GPUs and TPUs, and this is a {platform.upper()}"
    if model.key_parts > 1:
        return (
            f"a key head would be on {model.key_parts} devices: it needs mesh.sampler_tensor of at "
            f"most {model.architecture.num_kv_heads}, the model's key/value heads"
        )
    if platform == "tpu":
        return (
            f"it needs heads of a multiple of 64, and the model's head_dim is {width}"
            if width % 64
            else ""
        )
    from shoal.model.attention.decode_gpu import HEADS  # Pallas takes a second to import

    if width in HEADS:
        return ""
    return f"it needs heads of {listed(HEADS)} dimensions, and the model's head_dim is {width}"


def decodes_by_kernel(model: Model) -> bool:
    """True if decoding takes the kernel, as `auto` does where it can. ShoalError if it cannot and
    was asked for."""
    reason = kernel_refusal(model)
    if reason and model.attention == "pallas" and model.role.platform != "cpu":
        raise ShoalError(
            f"model.attention=pallas: decoding's kernel cannot compute this model, {reason}; with "
            "model.attention=auto decoding goes without it",
            "model.attention",
        )
    return not reason and model.attention in ("auto", "pallas")


def by_pages(model: Model) -> bool:
    """True if decoding reads own keys by pages, as the kernel for TPUs does."""
    return model.role.platform == "tpu" and decodes_by_kernel(model)
