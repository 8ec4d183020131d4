"""Decides which form of attention computes a model's rows on its devices, and says why not another:
makes the `Attention`s of training, scoring and prefill, and decides whether a kernel decodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.mesh import Role, listed
from shoal.model.architecture import Architecture, Layer
from shoal.model.attention.blocked import SCORES_AT_ONCE, attend_by_blocks, block_size
from shoal.model.attention.reference import attend_at_once
from shoal.model.attention.rule import Tokens, blocks_of, spans_of
from shoal.model.attention.softmax import Scoring, kernel_fault_of, largest_block
from shoal.model.attention.spans import QUERIES, TILE, attend_by_spans
from shoal.model.block import PromptKeys
from shoal.model.recurrence import step_kernel, steps_by_kernel
from shoal.model.rotary import rotate_by_product
from shoal.model.transformer import Model
from shoal.records import ShoalError

SCORE_BYTES = 2**31
"""Bytes of scores on a GPU or TPU above which `model.attention=auto` computes by blocks, if it uses
no kernel. Counted are the scores of one layer, since the backward pass computes them again, or of
all layers if `model.remat=none` keeps them."""


SHORT = 128
"""Tokens of a row up to which all its scores are computed at once on CPU: blocks would leave out
next to nothing."""


LONG = 384
"""Tokens of the longest sequence from which `blocked` goes by spans on CPU. Shorter ones gain
little or nothing on two cores (docs/LOG.md), and keep lists and their bits."""


KERNEL_TOKENS = 512
"""Tokens of a row from which `auto` uses a kernel. On TPU a shorter row is one or two blocks. By
the compiler's account of an H200 a micro-batch of 1.5B with a row of 4,096 tokens takes 208 ms with
all scores at once and 76 with the kernels."""


MOST_HEAD = {"gpu": 256, "tpu": 512}
"""Most dimensions of a head in the kernels, by platform: of wider heads not even a small block fits
a GPU's registers. A TPU's on-chip memory has room for 512, Gemma 4's widest, with 8 query heads for
each key head."""


MOST_TPU_TOKENS = 2**16
"""Most tokens of a row in the kernels for TPUs: the list of its pairs of blocks has to fit the
scalar core's memory."""


def attention_kind(model: Model, rows: int, size: int, layer: Layer | None = None) -> str:
    """Returns "reference", "blocked" or "pallas": how attention is computed for `rows` rows of
    `size` tokens by a kind of layer, without one by the model's first kind with attention. It is
    `model.attention`; for `auto` it depends on device and shape. ShoalError if `model.attention` is
    `pallas` and its kernels cannot compute these rows; the other values are returned unchecked.
    `size` is that of whole rows, also if `mesh.context` splits them."""
    layer = layer or first_attention(model.architecture)
    if layer is None:  # no layer computes attention
        return "reference"
    if model.attention == "auto":
        return _fitting_kind(model, layer, rows, size)
    if model.attention == "pallas":
        refusal = _row_kernel_refusal(model, layer, size)
        if refusal:
            raise ShoalError(
                f"model.attention=pallas: {refusal}; model.attention=auto uses "
                f"{_fitting_kind(model, layer, rows, size)} here"
            )
    return model.attention


def first_attention(a: Architecture) -> Layer | None:
    """Returns the first kind of layer with attention, of those without a window if there is one;
    None if no layer has attention."""
    kinds = [layer for layer in a.kinds if layer.mixer == "attention"]
    for layer in kinds:
        if not layer.window:
            return layer
    return kinds[0] if kinds else None


def scoring_of(model: Model, layer: Layer, size: int = 0) -> Scoring:
    """Returns how a kind of layer computes scores; `size` is that of `Model.window_of`."""
    return Scoring(cap=model.architecture.score_cap, window=model.window_of(layer, size))


def _fitting_kind(model: Model, layer: Layer, rows: int, size: int) -> str:
    """Returns the kind of attention that `auto` chooses for these rows: on CPU by blocks, but for
    short rows; elsewhere the kernels if they can, else all scores at once if these fit
    (`SCORE_BYTES`), else by blocks."""
    role = model.role
    if role.platform == "cpu":
        return "reference" if size <= SHORT else "blocked"
    if size >= KERNEL_TOKENS and not _row_kernel_refusal(model, layer, size):
        return "pallas"
    a = model.architecture
    layers = a.num_layers if model.remat == "none" else 1
    # of one device: its part of rows and heads
    scores = rows * size**2 * a.num_heads * layers // (role.row_shards * role.tensor)
    # float32
    score_bytes = 4 * scores
    return "reference" if score_bytes <= SCORE_BYTES else "blocked"


def kernel_fault(model: Model) -> str:
    """Returns why the kernels that `model.attention=auto` would use do not work on this device; ""
    if they work, if they are not used, or if none of the model's devices is in this process. Runs
    them once in each process to find out: some GPUs have too little shared memory, or are too old
    for Triton.

    Never call this inside of a compiled function. If there is a fault, a model is made with
    `blocked`.
    """
    a = model.architecture
    kinds = []
    for layer in a.kinds:
        if layer.mixer == "attention" and not _row_kernel_refusal(model, layer, KERNEL_TOKENS):
            kinds.append(layer)
    steps = steps_by_kernel(model)
    if model.attention != "auto" or not (kinds or steps):
        return ""
    devices = set(model.role.mesh.devices.flat) & set(jax.local_devices())
    if not devices:  # the devices of a plan are not here
        return ""
    # Pallas takes a second to import.
    from shoal.model.attention.trials import fault_on, state_fault_on

    device = min(devices, key=lambda device: device.id)
    for layer in kinds:
        share = a.num_heads // a.kv_heads_of(layer)
        fault = fault_on(device, share, a.head_dim_of(layer), model.dtype.name)
        if fault:
            return fault
    if steps and a.delta_net is not None:
        sizes = a.delta_net
        kernel = step_kernel(model.role.platform)
        return state_fault_on(kernel, device, sizes.key_dim, sizes.value_dim, model.dtype.name)
    return ""


def platform_fault(attention: str, platform: str) -> str:
    """Returns why this value of `model.attention` cannot be used on a platform; "" if it can."""
    if attention != "pallas" or platform in ("gpu", "tpu"):
        return ""
    return f"pallas attention is for GPUs and TPUs, and this is a {platform.upper()}"


def _row_kernel_refusal(model: Model, layer: Layer, size: int) -> str:
    """Returns why the kernels for rows cannot compute a kind of layer in rows of so many tokens; ""
    if they can."""
    a = model.architecture
    fault = platform_fault("pallas", model.role.platform)
    fault = fault or kernel_fault_of(scoring_of(model, layer, size), a.sinks)
    if fault:
        return fault
    head_dim = a.head_dim_of(layer)
    most = MOST_HEAD[model.role.platform]
    if head_dim > most:
        return (
            f"pallas attention needs heads of at most {most}, and the model's head_dim is "
            f"{head_dim}"
        )
    if size > MOST_TPU_TOKENS and model.role.platform == "tpu":
        return f"a row has {size:,} tokens, and at most {MOST_TPU_TOKENS:,} are supported"
    return ""


class RowForm(NamedTuple):
    """One way to compute the attention of whole rows, on the arrays of one device."""

    # (tokens of queries, tokens of keys) -> a description of what each token reads, a tree of
    # arrays by row
    find_reads: Callable[[Tokens, Tokens], Any]
    # (q[R, T, H, A], k[R, S, K, A], v, result of find_reads, sinks[H] if the model has them) ->
    # [R, T, H, A]. A form that rotates takes heads side by side in one dimension, and the angles of
    # queries and keys after v
    attend: Callable[..., jax.Array]
    rotates: bool = False


def _row_form(model: Model, layer: Layer, rows: int, size: int) -> RowForm:
    """Returns the form that computes a kind of layer for arrays [rows, size] (`attention_kind`).
    With `mesh.context` above 1 these are parts of rows: so many of them are one row."""
    role = model.role
    whole = size * role.context
    kind = attention_kind(model, rows // role.context, whole, layer)
    scoring = scoring_of(model, layer, whole)
    if kind == "reference":
        return _reference_form(scoring)
    if kind == "blocked":
        if role.platform == "cpu" and model.longest_sequence >= LONG:
            return _span_form(scoring, size, whole)
        return _blocked_form(model, scoring, size)
    if role.platform == "tpu":
        return _tpu_form()
    return _gpu_form(model, layer)


def _reference_form(scoring: Scoring) -> RowForm:
    """Returns the form that computes all scores at once."""

    def find_reads(query: Tokens, key: Tokens) -> tuple[Tokens, Tokens]:
        return query, key

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, reads: Any, sinks: jax.Array | None = None
    ) -> jax.Array:
        query, key = reads
        return attend_at_once(q, k, v, query, key, scoring, sinks)

    return RowForm(find_reads, attend)


def _blocked_form(model: Model, scoring: Scoring, size: int) -> RowForm:
    """Returns the form that computes by blocks, without a kernel. On CPU a pass computes as many
    blocks of queries together as keep their scores within SCORES_AT_ONCE; elsewhere all (0)."""
    role = model.role
    block = block_size(size, role.platform)
    at_once = 0
    if role.platform == "cpu":
        scores = block**2 * model.architecture.num_heads // role.tensor
        at_once = max(1, SCORES_AT_ONCE // scores)
    return RowForm(
        partial(blocks_of, block=block, window=scoring.window),
        partial(attend_by_blocks, at_once=at_once, scoring=scoring),
    )


def _span_form(scoring: Scoring, size: int, num_keys: int) -> RowForm:
    """Returns the form that computes by spans, for `size` queries and `num_keys` keys of a row."""
    block = largest_block(size, QUERIES)
    tile = min(TILE, num_keys)
    return RowForm(
        partial(spans_of, block=block, tile=tile, window=scoring.window),
        partial(attend_by_spans, tile=tile, scoring=scoring),
    )


def _gpu_form(model: Model, layer: Layer) -> RowForm:
    """Returns the form by the kernels for GPUs."""
    from shoal.model.attention import gpu  # Pallas takes a second to import

    block = gpu.block_size(model.architecture.head_dim_of(layer), model.dtype)
    return RowForm(partial(gpu.block_lists, block=block), gpu.attend_rows)


def _tpu_form() -> RowForm:
    """Returns the form by the kernels for TPUs."""
    from shoal.model.attention import tpu  # Pallas takes a second to import

    return RowForm(tpu.block_pairs, tpu.attend_rows, rotates=True)


@dataclass(frozen=True)
class RowAttention:
    """The `Attention` of whole rows, or of the parts that they are split into, computed by one
    form."""

    role: Role
    form: RowForm
    reads: Any  # what each token reads, found once and not in every layer
    is_prefill: bool = False  # True: it leaves `PromptKeys`

    @property
    def rotates(self) -> bool:
        return self.form.rotates

    def __call__(
        self,
        q: jax.Array,
        k: Any,
        v: Any,
        cache: None,
        *,
        sinks: jax.Array | None = None,
        rope: Any = None,
    ) -> tuple[jax.Array, PromptKeys | None]:
        """Returns (out, `PromptKeys` in a prefill, else None). With a form that rotates, `rope` is
        the (cos, sin) of the layer, and q and k are not rotated yet. `sinks` are [H], or None."""
        if self.rotates:
            out, k = self._rotate_and_attend(q, k, v, rope)
        elif sinks is None:
            out = _on_each_device(self.role, self._attend, (q, k, v), self.reads)
        else:
            # like heads of one token, so that they are split by heads
            by_row = jnp.broadcast_to(sinks, (len(q), 1, len(sinks)))
            out = _on_each_device(self.role, self._attend, (q, k, v, by_row), self.reads)
        return out, PromptKeys(k, v) if self.is_prefill else None

    def _attend(self, heads: tuple[jax.Array, ...], reads: Any) -> jax.Array:
        """Computes attention on one device, for a form that does not rotate. `heads` are q, k, v,
        and [R, 1, H] copies of the sinks if there are any."""
        q, k, v, *by_row = heads
        # Queries stay where they are. The keys and values of a row, which have few heads, are
        # gathered: for one layer at a time, as the backward pass gathers them again.
        k = _whole(self.role, k)
        v = _whole(self.role, v)
        if not by_row:
            return self.form.attend(q, k, v, reads)
        (sinks,) = by_row
        return self.form.attend(q, k, v, reads, sinks=sinks[0, 0])

    def _rotate_and_attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, rope: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Computes attention by a form that rotates q and k itself. Returns (out, k), with k
        rotated in a prefill, since the cache keeps rotated keys, else as it came."""
        from shoal.model.attention.tpu import (  # Pallas takes a second to import
            side_by_side,
            unrotated,
        )

        q_angles = side_by_side(rope)
        k_angles = q_angles
        if self.is_prefill:  # the cache keeps rotated keys
            cos, sin = rope
            k = rotate_by_product(k, cos, sin)
            k_angles = unrotated(q_angles)

        def attend(heads: tuple[jax.Array, ...], by_row: tuple) -> jax.Array:
            """Computes attention on one device."""
            q, k, v = heads
            (q_angles, k_angles), reads = by_row
            k = _whole(self.role, k)
            v = _whole(self.role, v)
            angles = q_angles, _whole(self.role, k_angles)
            return self.form.attend(q, k, v, angles, reads)

        # Heads and dimensions are flattened to one, as products take and give them, for each
        # device: with heads as a separate dimension XLA would divide them in products.
        flat = jax.lax.collapse(q, 2), jax.lax.collapse(k, 2), jax.lax.collapse(v, 2)
        by_row = (q_angles, k_angles), self.reads
        out = _on_each_device(self.role, attend, flat, by_row)
        return out.reshape(q.shape), k


def row_reads(model: Model, segment: jax.Array, prompt: jax.Array, position: jax.Array) -> Any:
    """Returns which keys the tokens of rows read, for each of `Architecture.kinds` in the form that
    its attention takes: a tuple of trees of arrays by row; () for a kind without attention. The
    arguments are [R, T], those of a `LearnerBatch`; found once and not in every layer."""
    rows, size = segment.shape
    found: dict[Any, Any] = {}  # kinds that find the same share it
    by_kind = []
    for layer in model.architecture.kinds:
        if layer.mixer != "attention":
            by_kind.append(())
            continue
        whole = size * model.role.context
        kind = attention_kind(model, rows // model.role.context, whole, layer)
        window = model.window_of(layer, whole)
        same = kind, window, model.architecture.head_dim_of(layer)
        if same not in found:
            form = _row_form(model, layer, rows, size)
            place = position if window else None
            found[same] = _find_reads(model, form, segment, prompt, place)
        by_kind.append(found[same])
    return tuple(by_kind)


def prompt_reads(model: Model, length: jax.Array, size: int) -> Any:
    """Returns which keys the tokens of prompts [R, `size`] of length[R] read, like `row_reads`."""
    segment = (jnp.arange(size) < length[:, None]).astype(jnp.int32)
    position = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), segment.shape)
    return row_reads(model, segment, segment, position)


def row_attention(
    model: Model, layer: Layer, shape: tuple[int, ...], reads: Any, is_prefill: bool = False
) -> RowAttention:
    """Returns the attention of a kind of layer for arrays of tokens of this shape, [R, T]. `reads`
    is what `row_reads` returned. With `is_prefill` it leaves `PromptKeys`."""
    rows, size = shape
    form = _row_form(model, layer, rows, size)
    own_reads = reads[model.architecture.kinds.index(layer)]
    return RowAttention(model.role, form, own_reads, is_prefill)


def _find_reads(
    model: Model,
    form: RowForm,
    segment: jax.Array,
    prompt: jax.Array,
    place: jax.Array | None,
) -> Any:
    """Returns what `form.find_reads` returns for these tokens, computed on each device for its own
    rows: a tree of arrays by row, which `form.attend` takes. `segment`, `prompt` and `place` are
    [R, T], of whole rows or of the parts that `mesh.context` splits them into; `place`, the
    positions in the tokens' sequences, is None where no window needs it."""
    role = model.role
    size = segment.shape[1]

    def find(tokens: tuple[jax.Array, ...], _: None) -> Any:
        """Finds which tokens each query of one device reads. The keys are those of whole rows; with
        context parallelism the queries are the device's part of each row."""
        whole_rows = [_whole(role, array) for array in tokens]
        key = Tokens.of(*whole_rows)
        query = key
        if role.context > 1:
            first = jax.lax.axis_index("context") * size

            def part_of_row(x: jax.Array) -> jax.Array:
                return jax.lax.dynamic_slice_in_dim(x, first, size, 1)

            query = jax.tree.map(part_of_row, key)
        return form.find_reads(query, key)

    tokens = (segment, prompt) if place is None else (segment, prompt, place)
    return _on_each_device(role, find, tokens, None)


def _whole(role: Role, x: jax.Array) -> jax.Array:
    """Returns whole rows, gathered from the parts [R, T / context, ...] that the devices of
    `context` have; x itself if rows are not split."""
    return x if role.context == 1 else jax.lax.all_gather(x, "context", axis=1, tiled=True)


def _on_each_device(role: Role, function: Callable, own: tuple[jax.Array, ...], by_row: Any) -> Any:
    """Calls function(own, by_row) on each device with the device's part of both, and returns the
    results of all devices, split like `own`: the partitioner can neither split a kernel nor skip
    work by device. `own` are arrays [R, T], split by rows, or [R, T, heads, ...], split by heads
    too; `by_row` is a tree of arrays with rows in front. On a single device the function is called
    as it is."""
    if role.mesh.size == 1:
        return function(own, by_row)
    row_axes = role.row_axes or None
    rows = PartitionSpec(row_axes)
    rows_and_heads = PartitionSpec(row_axes, None, "tensor")
    # Arrays of tokens have two dimensions, and no heads to split.
    spec = rows_and_heads if own[0].ndim > 2 else rows
    return jax.shard_map(
        function,
        mesh=role.mesh,
        in_specs=(spec, rows),
        out_specs=spec,
        axis_names=set(role.row_axes) | {"tensor"},
        check_vma=False,
    )(own, by_row)


def decode_kernel_refusal(model: Model, layer: Layer | None = None) -> str:
    """Returns why the decoding kernel for the model's devices cannot compute a kind of layer; "" if
    it can. Always a reason on a CPU. `layer`: the kind; None: the model's first one with
    attention."""
    a = model.architecture
    layer = layer or first_attention(a)
    platform = model.role.platform
    if platform == "cpu":
        return f"it is for GPUs and TPUs, and this is a {platform.upper()}"
    if layer is None:
        return "none of the model's layers has attention"
    fault = kernel_fault_of(scoring_of(model, layer), a.sinks)
    if fault:
        return fault
    if platform == "gpu" and layer.keys_of is not None:
        return "it writes the keys that it reads, and some layers read those of other layers"
    parts = model.key_parts_of(layer)
    if parts > 1:
        return (
            f"a key head would be on {parts} devices: it needs mesh.sampler_tensor of at most "
            f"{a.kv_heads_of(layer)}, the model's key/value heads"
        )
    head_dim = a.head_dim_of(layer)
    if platform == "tpu":
        if head_dim % 64 == 0:
            return ""
        return f"it needs heads of a multiple of 64, and the model's head_dim is {head_dim}"
    from shoal.model.attention.decode_gpu import HEADS  # Pallas takes a second to import

    if head_dim in HEADS:
        return ""
    return f"it needs heads of {listed(HEADS)} dimensions, and the model's head_dim is {head_dim}"


def decodes_by_kernel(model: Model, layer: Layer | None = None) -> bool:
    """True if a kind of layer, without one the model's first kind with attention, decodes by its
    kernel: with `model.attention` `auto` or `pallas`, and a kernel that can compute it. False on a
    CPU, also with `pallas`. ShoalError if it is `pallas` on a GPU or TPU whose kernel cannot
    compute the layer."""
    reason = decode_kernel_refusal(model, layer)
    if reason and model.attention == "pallas" and model.role.platform != "cpu":
        raise ShoalError(
            f"model.attention=pallas: decoding's kernel cannot compute this model, {reason}; with "
            "model.attention=auto decoding goes without it",
            "model.attention",
        )
    return not reason and model.attention in ("auto", "pallas")


def by_pages(model: Model, layer: Layer) -> bool:
    """True if a kind of layer reads a slot's own keys by pages, as the kernel for TPUs does: on a
    TPU, if `decodes_by_kernel`. ShoalError if that raises it."""
    return model.role.platform == "tpu" and decodes_by_kernel(model, layer)


def has_pages(model: Model) -> bool:
    """True if any kind of layer reads its keys by pages, of which all slots then share a pool.
    ShoalError if `decodes_by_kernel` raises it for a kind with attention."""
    found = False
    for layer in model.architecture.kinds:
        if layer.mixer == "attention" and by_pages(model, layer):
            found = True
    return found
