"""Mixture-of-experts feed-forward: which experts a token goes to, and the products of each expert
with its tokens (Shazeer et al. 2017, arXiv:1701.06538).

    out[t] = sum over t's k experts e of weight[t, e] * down_e(activation(gate_e x[t], up_e x[t]))

No token is dropped: an expert takes all tokens that choose it. An assignment is a token and one of
its experts; assignment t * k + j is token t with its j-th expert. Assignments are sorted by expert,
so that each expert multiplies rows that lie together. The products have four forms:

* `ragged`, for TPUs: all experts at once by `jax.lax.ragged_dot`.
* `triton`, for NVIDIA GPUs, where XLA's `ragged_dot` multiplies all rows by all experts: all
  experts at once by kernels of our own (`grouped_gpu.py`).
* `blocks`, for CPUs, where XLA's `ragged_dot` multiplies all rows by all experts: each expert's
  rows are cut into blocks of equally many rows, and a loop multiplies one block after the other by
  the matrices of its expert alone. Whatever the other tokens are, a token's result has the same
  bits, as sampling needs it: its row is in a product of the same shape, where it depends on neither
  the other rows nor its place, and its results are summed in the order of its experts. A program of
  another number of tokens may have blocks of another size, and so other bits. In decoding, where
  most experts have one block, the first block of each is in one product over all experts.
* `mixed_blocks`, for training on CPUs: most rows are in blocks of a larger size, which is faster.
  Which size a token's row is in depends on the other tokens, and so may its last bits.

Experts may be split over devices by their number (`Role.expert_axis`). A device computes the
assignments to its own experts, and a token's results are summed where the token is:

* In training each of n devices has tokens of its own. All of them are gathered, and the results go
  back by an all-to-all: n - 1 rows of D numbers for each token in both directions. A ragged
  all-to-all of assignments, which XLA for CPU does not have, would exchange k (n - 1) / n: more if
  n is less than k.
* The devices of a sampler's replica have the same tokens: results are summed over these devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shoal.mesh import Role
from shoal.model.activations import Activation, silu_gated
from shoal.model.linear import (
    Biased,
    Groups,
    Weight,
    linear,
    split_of,
    trained_part,
    weighted_linear,
)
from shoal.model.parameters import joined

Kernels: TypeAlias = tuple[Weight, Weight, Weight]
"""The weights of all experts, gate[E, D, F], up[E, D, F] and down[E, F, D]: of any kind, each array
with E in front."""

Form: TypeAlias = Literal["ragged", "triton", "blocks", "mixed_blocks"]
"""How the products are computed, see the module's head."""


def form_of(role: Role) -> Form:
    """Returns the form of the products on the devices of a role."""
    if role.platform == "gpu":
        return "triton"
    if role.platform != "cpu":
        return "ragged"
    return "blocks" if role.name == "sampler" else "mixed_blocks"


def kernel_fault(role: Role, dtype: str, frozen: str) -> str:
    """Returns why the kernels that multiply experts do not work on the devices of a role; "" if
    they work, if this role has none, or if none of its devices is in this process. `dtype` is the
    computation's type, `frozen` that of frozen experts. Runs the kernels once in each process to
    find out. Never call this inside of a compiled function."""
    devices = set(role.mesh.devices.flat) & set(jax.local_devices())
    if form_of(role) != "triton" or not devices:
        return ""
    from shoal.model.grouped_gpu import fault_on  # Pallas takes a second to import

    return fault_on(min(devices, key=lambda device: device.id), dtype, frozen)


def route(
    logits: jax.Array,
    k: int,
    normalise: bool,
    expert_scale: jax.Array | None = None,
    experts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Chooses k experts for each token by the router's float32 logits[..., E]; returns (experts
    int32[..., k], weights float32[..., k]). The experts are those of the largest logits, largest
    first; of equal ones the lower number is first.

    A weight is the expert's softmax among all experts; with `normalise` among the chosen ones,
    which is the same as dividing the former by their sum. `expert_scale`[E] then multiplies each
    weight by its expert's entry (Gemma 4).

    Given `experts`[..., k], numbers from 0 to E - 1, these are chosen (replay), and the weights are
    those that the logits give them. Gradients of the weights reach the logits in both cases.
    """
    numbers: Any = experts
    if numbers is None:
        _, numbers = jax.lax.top_k(jax.lax.stop_gradient(logits), k)
    # Kept for the backward pass, which might choose others.
    numbers = checkpoint_name(numbers.astype(jnp.int32), "experts")
    chosen = _of_experts(logits, numbers)
    if normalise:
        weights = jax.nn.softmax(chosen, axis=-1)
    else:
        weights = jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    if expert_scale is not None:
        weights = weights * _of_experts(expert_scale, numbers)
    return numbers, weights


def _of_experts(values: jax.Array, experts: jax.Array) -> jax.Array:
    """Returns the values[..., E] of experts[..., k] -> [..., k]. Computed by comparison, because
    accelerators are slow at reading, and in the gradient at adding, single numbers."""
    is_chosen = experts[..., None] == jnp.arange(values.shape[-1])  # [..., k, E]
    return jnp.where(is_chosen, values[..., None, :], 0).sum(-1)


def load(experts: jax.Array, mask: jax.Array, num_experts: int) -> jax.Array:
    """Returns float32[E]: how many of the tokens in mask[...] chose each of E experts, given their
    experts[..., k]. The entries sum up to k times the tokens in the mask."""
    is_chosen = experts[..., None] == jnp.arange(num_experts)
    counted = is_chosen & mask[..., None, None]
    return counted.reshape(-1, num_experts).sum(0, dtype=jnp.float32)


def experts_of_rows(
    role: Role,
    h: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    kernels: Kernels,
    activation: Activation,
) -> jax.Array:
    """Computes `experts_product` of rows, h[R, T, D] -> [R, T, D] with experts and weights [R, T,
    k], on the devices of a role: each sorts tokens that it has. See the module's head for experts
    that are split over devices by their number; `tensor` otherwise splits the F of each."""
    axis = role.expert_axis
    has_own_tokens = axis in role.row_axes
    inner = "tensor" if role.tensor > 1 and axis != "tensor" else None

    def on_device(
        kernels: Kernels, h: jax.Array, experts: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """Computes the rows of one device, with what of the experts is here."""
        x = jax.lax.collapse(h, 0, 2)
        experts = jax.lax.collapse(experts, 0, 2)
        weights = jax.lax.collapse(weights, 0, 2)
        if has_own_tokens:
            gather = partial(jax.lax.all_gather, axis_name=axis, tiled=True)
            x, experts, weights = gather(x), gather(experts), gather(weights)
        if axis is not None:
            # The experts here become 0 and on; the others are numbers that no expert here has.
            experts = experts - jax.lax.axis_index(axis) * _num_experts(kernels)
        if inner is not None:
            # Each device adds a part of the last product, and one of them its bias.
            kernels = (*kernels[:2], _bias_of_first(kernels[2], inner))
        # With rows for the assignments of several devices, of which a share is computed, nothing is
        # kept.
        out: Any = experts_product(
            x, experts, weights, kernels, activation, form_of(role), keeps=not has_own_tokens
        )
        if has_own_tokens:
            # [devices, own tokens, D]: sent to the devices that have the tokens, and received from
            # those that have the experts. Sums are in float32 and in the order of the devices.
            by_device = out.reshape(role.expert, -1, out.shape[-1])
            parts = jax.lax.all_to_all(by_device, axis, split_axis=0, concat_axis=0)
            out = parts.astype(jnp.float32).sum(0)
        if role.tensor > 1:
            out = jax.lax.psum(out.astype(jnp.float32), "tensor")
        return out.astype(h.dtype).reshape(h.shape)

    if role.row_shards == 1 and role.tensor == 1:
        return on_device(kernels, h, experts, weights)
    gate, up, down = kernels
    of_kernels = (
        split_of(gate, axis, None, inner),
        split_of(up, axis, None, inner),
        split_of(down, axis, inner, None),
    )
    rows = PartitionSpec(role.row_axes or None)
    mesh: Any = role.mesh
    # All axes that are not manual already: kernels for TPUs allow no axis that XLA could split.
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(of_kernels, rows, rows, rows),
        out_specs=rows,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(kernels, h, experts, weights)


def _bias_of_first(weight: Weight, axis: str) -> Weight:
    """Returns a weight whose bias is 0 on all devices of a mesh axis but the first."""
    if not isinstance(weight, Biased):
        return weight
    is_first = jax.lax.axis_index(axis) == 0
    return replace(weight, bias=jnp.where(is_first, weight.bias, 0))


def experts_product(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    kernels: Kernels,
    activation: Activation = silu_gated,
    form: Form = "ragged",
    keeps: bool = True,
    interpret: bool = False,
) -> jax.Array:
    """Computes the sum of each token's experts, x[T, D] -> [T, D], of experts int32[T, k] with
    weights float32[T, k]; see the module's head for the equation and the forms.

    A number outside 0 to E - 1 stands for an expert that is not here: it adds nothing, costs
    nothing in the forms of kernels and blocks, and its weight gets no gradient. Gradients go to x,
    the weights and the trained parts of the kernels; those of kernels are summed in float32 (of
    plain ones in `ragged` in their own type). `keeps`: True if `model.remat=dots` keeps the
    products of gate and up for the backward pass. `interpret` runs the kernels of `triton` as plain
    JAX, on any device, for tests.
    """
    # The other name is one that no `REMAT` keeps.
    kept_name = "product" if keeps else "product of gathered tokens"
    if form in ("blocks", "mixed_blocks"):
        is_mixed = form == "mixed_blocks"
        return _by_blocks(activation, is_mixed, kept_name, x, experts, weights, kernels)
    order, sizes = _sorted_by_expert(experts, _num_experts(kernels))
    groups = Groups(sizes)
    if form == "triton":
        from shoal.model.grouped_gpu import tiles_of  # Pallas takes a second to import

        groups = Groups(sizes, tiles_of(sizes, order.size, interpret))
    return _by_group(activation, kept_name, x, experts, weights, kernels, order, groups)


def _num_experts(kernels: Kernels) -> int:
    return len(jax.tree.leaves(kernels)[0])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """An order of assignments in M rows: which is in each row, and in which row each is."""

    assignments: jax.Array  # int32[M]; T * k where a row is empty
    indices: jax.Array  # int32[T, k]: its row; M for an assignment whose expert is not here

    @property
    def tokens(self) -> jax.Array:
        """The token of each row; T where a row is empty."""
        _, k = self.indices.shape
        return self.assignments // k

    @property
    def of_assignments(self) -> Rows:
        """The same order, where each assignment counts as a token of its own."""
        return replace(self, indices=self.indices.reshape(-1, 1))


def _sorted_by_expert(experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Returns (the assignments of experts[T, k] in the order of their experts, those of an expert
    in the order of their tokens, int32[T * k]; how many each expert has, int32[E]). Assignments
    whose expert is not here are last."""
    flat = experts.reshape(-1)
    is_here = (flat >= 0) & (flat < num_experts)
    order = jnp.argsort(jnp.where(is_here, flat, num_experts), stable=True)
    sizes = (flat[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
    return order.astype(jnp.int32), sizes


def _rows_of(assignments: jax.Array, shape: tuple[int, ...]) -> Rows:
    """Returns rows with these `assignments`[M], of `shape` (T, k) in all."""
    num_rows = assignments.size
    absent = jnp.full(shape[0] * shape[1], num_rows, jnp.int32)
    numbers = jnp.arange(num_rows, dtype=jnp.int32)
    return Rows(assignments, absent.at[assignments].set(numbers, mode="drop").reshape(shape))


def _at(values: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns values[numbers], with zeros for numbers past the end, which stand for empty rows and
    for assignments without a row."""
    return values.at[numbers].get(mode="fill", fill_value=0)


def _summed_by_token(results: jax.Array, rows: Rows) -> jax.Array:
    """Returns the sum of each token's rows, of results[M, ...] -> [T, ...]; in float32, rounded to
    their type."""
    _, k = rows.indices.shape
    total = jnp.zeros((), jnp.float32)
    for choice in range(k):
        total = total + _at(results, rows.indices[:, choice]).astype(jnp.float32)
    return total.astype(results.dtype)


# The forms for accelerators


@jax.custom_vjp
def _to_rows(x: jax.Array, rows: Rows) -> jax.Array:
    """Returns the token of each row, of x[T, ...] -> [M, ...]; any token for an empty row. Its
    gradient reads the rows of each token, because accelerators are slow at adding rows to given
    rows."""
    # Without zeros in empty rows, which would take a pass over all rows.
    return x.at[rows.tokens].get(mode="clip")


def _to_rows_forward(x: jax.Array, rows: Rows) -> tuple[jax.Array, Rows]:
    return _to_rows(x, rows), rows


def _to_rows_backward(rows: Rows, gradient: jax.Array) -> tuple[jax.Array, None]:
    return _summed_by_token(gradient, rows), None


_to_rows.defvjp(_to_rows_forward, _to_rows_backward)


@jax.custom_vjp
def _to_tokens(results: jax.Array, rows: Rows) -> jax.Array:
    """Computes `_summed_by_token`, whose gradient is `_to_rows`."""
    return _summed_by_token(results, rows)


def _to_tokens_forward(results: jax.Array, rows: Rows) -> tuple[jax.Array, Rows]:
    return _summed_by_token(results, rows), rows


def _to_tokens_backward(rows: Rows, gradient: jax.Array) -> tuple[jax.Array, None]:
    return _to_rows(gradient, rows), None


_to_tokens.defvjp(_to_tokens_forward, _to_tokens_backward)


def _by_group(
    activation: Activation,
    kept_name: str,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    kernels: Kernels,
    order: jax.Array,
    groups: Groups,
) -> jax.Array:
    """Computes `experts_product` for all experts at once, by products with groups: the assignments
    in `order`, as `_sorted_by_expert` returns it. What it keeps for the backward pass has the name
    `kept_name`."""
    gate, up, down = kernels
    is_here = jnp.arange(order.size) < groups.sizes.sum()
    rows = _rows_of(jnp.where(is_here, order, order.size), experts.shape)
    kept = partial(checkpoint_name, name=kept_name)
    # The tokens' rows twice: compilers compute them once, and the gradients of both products are
    # summed by token, not once more before that as rows.
    of_gate = kept(linear(gate, _to_rows(x, rows), groups=groups))
    of_up = kept(linear(up, _to_rows(x, rows), groups=groups))
    factors = _to_rows(weights.reshape(-1), rows.of_assignments)
    results = weighted_linear(down, activation(of_gate, of_up), factors, groups)
    return _to_tokens(results, rows)


# The form for CPUs


MIN_BLOCK = 8
MAX_BLOCK = 128
MAX_MIXED_BLOCK = 512
MIN_BATCHED = 2
"""The least mean number of an expert's rows with which the first blocks of all experts are one
product: it reads all experts, and with fewer rows many have none."""


def block_sizes(num_assignments: int, num_experts: int, mixed: bool) -> tuple[int, ...]:
    """Returns the numbers of rows that blocks have, powers of two from 8 on, in falling order.

    A block costs a copy of its expert's matrices and their rearrangement for the product, whatever
    its rows are; and the last rows of an expert's last block are empty. Blocks of one size have at
    least half of the assignments that an expert has on average, at most 128. If they are `mixed`,
    the large ones have about as many rows as an expert has assignments, at most 512, the small ones
    an eighth.

    Forward and backward against a dense feed-forward part of equally many active parameters, on two
    cores in float32 with D = 256, F = 512, 16 experts and 512 rows for each: 1.32 times as long
    with blocks of 128, 1.10 with 512 and 64, 1.11 with 512, 256, 128 and 64. With 128 rows: 1.97
    with 64, 1.69 with 128 and 16, 1.73 with 128 and 32.
    """
    average = num_assignments / num_experts
    size = MIN_BLOCK
    if not mixed:
        while size < MAX_BLOCK and size < average / 2:
            size *= 2
        return (size,)
    while size < MAX_MIXED_BLOCK and 2 * size <= average:
        size *= 2
    small = max(MIN_BLOCK, size // 8)
    return (size, small) if small < size else (size,)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """Blocks of equally many rows, each of one expert."""

    experts: jax.Array  # int32[N]: the expert of each block
    starts: jax.Array  # int32[N]: its first row
    count: jax.Array  # int32: how many blocks are used; they are the first ones
    size: int = field(metadata={"static": True})  # rows of a block


def _in_blocks(
    experts: jax.Array, num_experts: int, mixed: bool
) -> tuple[Rows, tuple[Blocks, ...]]:
    """Sorts the assignments of experts[T, k] into rows and cuts these into blocks of the
    `block_sizes`.

    The rows of an expert are its assignments, and empty rows up to a multiple of the smallest size.
    They are cut into as many blocks of the larger size as they fill, and the rest into those of the
    smaller. There are as many rows and blocks as any choice of experts can need; how many blocks
    are used depends on the choice.
    """
    num_assignments = experts.size
    sizes = block_sizes(num_assignments, num_experts, mixed)
    smallest = sizes[-1]
    order, num_of_expert = _sorted_by_expert(experts, num_experts)
    # In blocks of the smallest size, each has an assignment, and each expert at most one block that
    # is not full.
    blocks_of_expert = -(-num_of_expert // smallest)
    num_blocks = min(num_assignments, num_assignments // smallest + num_experts)
    expert, number = _numbered_by_expert(blocks_of_expert, num_blocks)
    # Index of each row among the assignments of its expert, [blocks, rows of one].
    index = number[:, None] * smallest + jnp.arange(smallest)
    first = jnp.cumsum(num_of_expert) - num_of_expert  # of the expert's assignments in `order`
    assignments = jnp.where(
        index < num_of_expert[expert][:, None],
        order.at[first[expert][:, None] + index].get(mode="clip"),
        num_assignments,
    )
    # Of each expert: its first row that is in no block yet, and how many such rows it has.
    start = (jnp.cumsum(blocks_of_expert) - blocks_of_expert) * smallest
    remaining = blocks_of_expert * smallest
    blocks = []
    for size in sizes:
        blocks_of_size = remaining // size
        most = num_blocks * smallest // size
        expert, number = _numbered_by_expert(blocks_of_size, most)
        starts = start[expert] + number * size
        blocks.append(Blocks(expert, starts, blocks_of_size.sum(), size))
        start = start + blocks_of_size * size
        remaining = remaining - blocks_of_size * size
    return _rows_of(assignments.reshape(-1), experts.shape), tuple(blocks)


def _first_blocks(blocks: Blocks, num_experts: int, num_rows: int) -> tuple[jax.Array, Blocks]:
    """Returns (the first row of the first block of each expert, int32[E], `num_rows` where it has
    none; all other blocks)."""
    is_used = jnp.arange(len(blocks.experts)) < blocks.count
    is_after_another = blocks.experts == jnp.roll(blocks.experts, 1)
    is_first = is_used & ~is_after_another.at[0].set(False)
    starts = jnp.full(num_experts, num_rows, jnp.int32)
    expert = jnp.where(is_first, blocks.experts, num_experts)
    starts = starts.at[expert].set(blocks.starts.astype(jnp.int32), mode="drop")
    is_other = is_used & ~is_first
    order = jnp.argsort(~is_other, stable=True)
    others = Blocks(blocks.experts[order], blocks.starts[order], is_other.sum(), blocks.size)
    return starts, others


def _numbered_by_expert(counts: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns the experts of blocks, of which counts[0] are of expert 0, the next counts[1] of
    expert 1, and so on: (the expert of each of the first `length` blocks, the block's number among
    its expert's). Blocks past the last one get the last expert, and numbers past its count."""
    ends = jnp.cumsum(counts)
    numbers = jnp.arange(length, dtype=jnp.int32)
    expert = jnp.searchsorted(ends, numbers, side="right").astype(jnp.int32)
    expert = jnp.minimum(expert, len(counts) - 1)
    return expert, numbers - (ends - counts)[expert]


def _entry(tree: Any, number: jax.Array) -> Any:
    """Returns entry `number` of the first dimension of each array of a tree."""
    return jax.tree.map(
        lambda array: jax.lax.dynamic_index_in_dim(array, number, keepdims=False), tree
    )


def _rows_at(tree: Any, start: jax.Array, size: int) -> Any:
    """Returns `size` rows from `start` on of each array of a tree."""
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, start, size), tree)


def _with_rows(tree: Any, rows: Any, start: jax.Array) -> Any:
    """Returns a tree of arrays with `rows`, a tree of the same form, from row `start` on."""
    return jax.tree.map(
        lambda array, part: jax.lax.dynamic_update_slice_in_dim(array, part, start, 0), tree, rows
    )


def _add_at(sums: Any, number: jax.Array, part: Any) -> Any:
    """Returns a tree of arrays with a tree `part` added to entry `number` of their first
    dimension."""

    def add(total: jax.Array, addend: jax.Array) -> jax.Array:
        old = jax.lax.dynamic_index_in_dim(total, number, keepdims=False)
        new = old + addend.astype(total.dtype)
        return jax.lax.dynamic_update_index_in_dim(total, new, number, 0)

    return jax.tree.map(add, sums, part)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _by_blocks(
    activation: Activation,
    mixed: bool,
    kept_name: str,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    kernels: Kernels,
) -> jax.Array:
    """Computes `experts_product` block by block. `mixed`: blocks of two sizes. What it keeps for
    the backward pass has the name `kept_name`."""
    out, _ = _forward_by_blocks(activation, mixed, False, x, experts, weights, kernels)
    return out


def _forward_by_blocks(
    activation: Activation,
    mixed: bool,
    keep: bool,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    kernels: Kernels,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Returns (out[T, D], (rows, blocks, the products of gate and up, both [M, F])); the products
    are () if `keep` is false.

    Where the experts have few rows, as in decoding, the first block of each is in one batched
    product over all experts, which unlike the loop copies no matrices: 0.67 of the CPU time of 16
    experts of 256 x 512. Its rows have the bits that they have in the loop."""
    num_experts = _num_experts(kernels)
    rows, all_blocks = _in_blocks(experts, num_experts, mixed)

    def of_expert(kernels: Kernels, assignments: jax.Array) -> tuple[jax.Array, ...]:
        """Computes rows of one expert, whose kernels are given: their results, and the products of
        gate and up if `keep`."""
        gate, up, down = kernels
        tokens = _at(x, assignments // experts.shape[1])
        products = linear(gate, tokens), linear(up, tokens)
        factors = _at(weights.reshape(-1), assignments)
        results = weighted_linear(down, activation(*products), factors)
        return (results, *products) if keep else (results,)

    def compute(number: jax.Array, blocks: Blocks) -> tuple[jax.Array, ...]:
        """Computes a block by `of_expert`."""
        assignments = _rows_at(rows.assignments, blocks.starts[number], blocks.size)
        return of_expert(_entry(kernels, blocks.experts[number]), assignments)

    def step(number: jax.Array, arrays: tuple[jax.Array, ...], blocks: Blocks) -> tuple:
        return _with_rows(arrays, compute(number, blocks), blocks.starts[number])

    arrays = []
    for of_block in jax.eval_shape(partial(compute, blocks=all_blocks[0]), jnp.int32(0)):
        arrays.append(jnp.zeros((rows.assignments.size, *of_block.shape[1:]), of_block.dtype))
    arrays = tuple(arrays)
    in_loop = all_blocks
    # Few rows: most experts have one block, and few have none.
    if not mixed and MIN_BATCHED <= experts.size / num_experts <= all_blocks[0].size:
        starts, others = _first_blocks(all_blocks[0], num_experts, rows.assignments.size)
        row_numbers = starts[:, None] + jnp.arange(others.size)  # [E, rows of a block]
        assignments = rows.assignments.at[row_numbers].get(mode="fill", fill_value=experts.size)
        of_first = jax.vmap(of_expert)(kernels, assignments)

        def put(array: jax.Array, part: jax.Array) -> jax.Array:
            return array.at[row_numbers].set(part, mode="drop")

        arrays = jax.tree.map(put, arrays, of_first)
        in_loop = (others,)
    for blocks in in_loop:
        arrays = jax.lax.fori_loop(0, blocks.count, partial(step, blocks=blocks), arrays)
    results, *products = arrays
    return _summed_by_token(results, rows), (rows, all_blocks, tuple(products))


def _by_blocks_forward(
    activation: Activation,
    mixed: bool,
    kept_name: str,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    kernels: Kernels,
) -> tuple[jax.Array, tuple]:
    out, kept = _forward_by_blocks(activation, mixed, True, x, experts, weights, kernels)
    kept = jax.tree.map(partial(checkpoint_name, name=kept_name), kept)
    return out, (x, weights, kernels, *kept)


def _by_blocks_backward(
    activation: Activation, mixed: bool, kept_name: str, kept: tuple, gradient: jax.Array
) -> tuple:
    """Returns the gradients of (x, experts, weights, kernels); None for the experts and for what is
    not trained of the kernels. `mixed` and `kept_name` are not read, because the blocks are
    kept."""
    x, weights, kernels, rows, all_blocks, products = kept
    trained = trained_part(kernels[0]), trained_part(kernels[1]), trained_part(kernels[2])

    def compute(number: jax.Array, blocks: Blocks) -> tuple[tuple[jax.Array, ...], Any]:
        """Computes a block's gradients: (those of its tokens and their factors, those of the
        trained parts of its expert)."""
        gate, up, down = _entry(kernels, blocks.experts[number])
        trained_gate, trained_up, trained_down = _entry(trained, blocks.experts[number])
        start = blocks.starts[number]
        assignments = _rows_at(rows.assignments, start, blocks.size)
        token_indices = assignments // weights.shape[1]
        tokens = _at(x, token_indices)
        factors = _at(weights.reshape(-1), assignments)

        def results_of(trained_down: Any, products: tuple, factors: jax.Array) -> jax.Array:
            return weighted_linear(joined(trained_down, down), activation(*products), factors)

        def products_of(trained_gate: Any, trained_up: Any, tokens: jax.Array) -> tuple:
            of_gate = linear(joined(trained_gate, gate), tokens)
            return of_gate, linear(joined(trained_up, up), tokens)

        of_block = _rows_at(products, start, blocks.size)
        _, backward = jax.vjp(results_of, trained_down, of_block, factors)
        d_down, d_products, d_factors = backward(_at(gradient, token_indices))
        _, backward = jax.vjp(products_of, trained_gate, trained_up, tokens)
        d_gate, d_up, d_tokens = backward(d_products)
        return (d_tokens, d_factors), (d_gate, d_up, d_down)

    def step(number: jax.Array, carry: tuple, blocks: Blocks) -> tuple:
        """Adds a block's gradients: those of its rows to `d_rows`, those of its expert's kernels to
        `sums`."""
        d_rows, sums = carry
        d_block, d_kernels = compute(number, blocks)
        sums = _add_at(sums, blocks.experts[number], d_kernels)
        return _with_rows(d_rows, d_block, blocks.starts[number]), sums

    num_rows = rows.assignments.size
    d_rows = jnp.zeros((num_rows, x.shape[-1]), x.dtype), jnp.zeros(num_rows, weights.dtype)
    sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
    carry = d_rows, sums
    for blocks in all_blocks:
        carry = jax.lax.fori_loop(0, blocks.count, partial(step, blocks=blocks), carry)
    (d_tokens, d_factors), sums = carry
    d_x = _summed_by_token(d_tokens, rows)
    d_weights = _at(d_factors, rows.indices)
    d_all_kernels = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), sums, trained)
    return d_x, None, d_weights, d_all_kernels


_by_blocks.defvjp(_by_blocks_forward, _by_blocks_backward)
