"""Mixture-of-experts feed-forward: which experts a token goes to, and the products of each expert
with its tokens (Shazeer et al. 2017, arXiv:1701.06538).

    out[t] = sum over t's k experts e of weight[t, e] * down_e(activation(gate_e x[t], up_e x[t]))

No token is dropped: an expert takes all tokens that choose it. A pair is a token and one of its
experts; pair t * k + j is token t with its j-th expert. Pairs are sorted by expert, so that each
expert multiplies rows that lie together. There are two forms of the products:

* `ragged`, for accelerators: all experts at once by `jax.lax.ragged_dot`.
* `blocks`, for CPUs, where XLA's `ragged_dot` multiplies all pairs by all experts: each expert's
  pairs are cut into blocks of the same number of rows, and a loop multiplies one block after the
  other by the matrices of its expert alone.

A token's result has the same bits whatever the other tokens are, in the form of blocks: each block
is the same compiled product, whose rows do not depend on each other or on their places in it, and
a token's results are summed in the order of its experts. A program of another number of tokens may
have blocks of another size, and so other bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shoal.model.activations import Activation, silu_gated
from shoal.model.linear import Weight, linear, trained_part, weighted_linear
from shoal.model.parameters import joined

Kernels: TypeAlias = tuple[Weight, Weight, Weight]
"""The weights of all experts, gate[E, D, F], up[E, D, F] and down[E, F, D]: of any kind, each array
with E in front."""

Form: TypeAlias = Literal["blocks", "ragged"]
"""How the products are computed, see the module's head."""


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
    # Kept for the backward pass: choosing is slower than reading.
    numbers = checkpoint_name(numbers.astype(jnp.int32), "product")
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


def experts_product(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    kernels: Kernels,
    activation: Activation = silu_gated,
    form: Form = "ragged",
) -> jax.Array:
    """Computes the sum of each token's experts, x[T, D] -> [T, D], of experts int32[T, k] with
    weights float32[T, k]; see the module's head for the equation and the forms.

    A number outside 0 to E - 1 stands for an expert that is not here: it adds nothing, costs
    nothing in the form of blocks, and its weight gets no gradient. Gradients go to x, the weights
    and the trained parts of the kernels; those of kernels are summed in float32 (of plain ones in
    `ragged` in their own type).
    """
    if form == "blocks":
        return _by_blocks(activation, x, experts, weights, kernels)
    return _by_ragged_products(activation, x, experts, weights, kernels)


def _num_experts(kernels: Kernels) -> int:
    return len(jax.tree.leaves(kernels)[0])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """An order of pairs in M rows: which pair is in each row, and in which row each pair is."""

    pairs: jax.Array  # int32[M] or [blocks, rows of one]; T * k where a row is empty
    places: jax.Array  # int32[T, k]; M for a pair whose expert is not here

    @property
    def tokens(self) -> jax.Array:
        """The token of each row; T where a row is empty."""
        _, k = self.places.shape
        return self.pairs // k

    @property
    def of_pairs(self) -> Rows:
        """The same order, where each pair counts as a token of its own."""
        return replace(self, places=self.places.reshape(-1, 1))


def _sorted_by_expert(experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Returns (the pairs of experts[T, k] in the order of their experts, those of an expert in the
    order of their tokens, int32[T * k]; how many pairs each expert has, int32[E]). Pairs whose
    expert is not here are last."""
    flat = experts.reshape(-1)
    is_here = (flat >= 0) & (flat < num_experts)
    order = jnp.argsort(jnp.where(is_here, flat, num_experts), stable=True)
    sizes = (flat[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
    return order.astype(jnp.int32), sizes


def _places_of(pairs: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the row of each pair, int32[T, k] for `shape` (T, k), from the pair of each row,
    `pairs`[M]; M for a pair that is in no row."""
    num_pairs = shape[0] * shape[1]
    absent = jnp.full(num_pairs, pairs.size, jnp.int32)
    numbers = jnp.arange(pairs.size, dtype=jnp.int32)
    return absent.at[pairs.reshape(-1)].set(numbers, mode="drop").reshape(shape)


def _at(values: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns values[numbers], with zeros for numbers past the end: of empty rows, and of pairs
    that have no row."""
    return values.at[numbers].get(mode="fill", fill_value=0)


def _summed_by_token(results: jax.Array, rows: Rows) -> jax.Array:
    """Returns the sum of each token's rows, of results[M, ...] -> [T, ...]; in float32, rounded to
    their type."""
    _, k = rows.places.shape
    total = jnp.zeros((), jnp.float32)
    for choice in range(k):
        total = total + _at(results, rows.places[:, choice]).astype(jnp.float32)
    return total.astype(results.dtype)


# The form for accelerators


@jax.custom_vjp
def _to_rows(x: jax.Array, rows: Rows) -> jax.Array:
    """Returns the token of each row, of x[T, ...] -> [M, ...]. Its gradient reads the rows of each
    token, because accelerators are slow at adding rows to given places."""
    return _at(x, rows.tokens)


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
    return _at(gradient, rows.tokens), None


_to_tokens.defvjp(_to_tokens_forward, _to_tokens_backward)


def _by_ragged_products(
    activation: Activation, x: jax.Array, experts: jax.Array, weights: jax.Array, kernels: Kernels
) -> jax.Array:
    """Computes `experts_product` for all experts at once, by products with group sizes."""
    gate, up, down = kernels
    order, sizes = _sorted_by_expert(experts, _num_experts(kernels))
    is_here = jnp.arange(order.size) < sizes.sum()
    pairs = jnp.where(is_here, order, order.size)
    rows = Rows(pairs, _places_of(pairs, experts.shape))
    tokens = _to_rows(x, rows)
    kept = partial(checkpoint_name, name="product")
    of_gate = kept(linear(gate, tokens, group_sizes=sizes))
    of_up = kept(linear(up, tokens, group_sizes=sizes))
    factors = _to_rows(weights.reshape(-1), rows.of_pairs)
    results = weighted_linear(down, activation(of_gate, of_up), factors, sizes)
    return _to_tokens(results, rows)


# The form for CPUs

MIN_BLOCK = 8
MAX_BLOCK = 128


def block_size(num_pairs: int, num_experts: int) -> int:
    """Returns the rows of a block: the power of two, from 8 to 128, that is at least half of the
    pairs that an expert has on average.

    Small blocks read an expert's matrices more often and multiply at a lower rate, large ones
    multiply more empty rows. On two cores, forward and backward with D = 256, F = 512 and 16
    experts: at 512 pairs an expert 165 ms with 128 rows, 178 with 64, 204 with 32; at 128 pairs 50
    with 64, 53 with 128, 54 with 32; at 32 pairs 11.2 with 32, 11.8 with 16, 18 with 128.
    """
    size = MIN_BLOCK
    while size < MAX_BLOCK and 2 * size * num_experts < num_pairs:
        size *= 2
    return size


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """Pairs in N blocks of equally many rows, each of one expert."""

    rows: Rows  # pairs[N, rows of a block]; empty rows are the last of a block
    experts: jax.Array  # int32[N]: the expert of each block
    count: jax.Array  # int32: the number of blocks with pairs, which are the first ones


def _in_blocks(experts: jax.Array, num_experts: int) -> Blocks:
    """Sorts the pairs of experts[T, k] into blocks. N is what any choice of experts can need; how
    many are used depends on the choice."""
    size = block_size(experts.size, num_experts)
    order, sizes = _sorted_by_expert(experts, num_experts)
    # An expert's last block may be almost empty, and a block has at least one pair.
    num_blocks = min(experts.size, experts.size // size + num_experts)
    blocks_of_expert = -(-sizes // size)
    ends = jnp.cumsum(blocks_of_expert)
    numbers = jnp.arange(num_blocks)
    expert = jnp.searchsorted(ends, numbers, side="right").astype(jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)  # of blocks that are not used
    first_block = (ends - blocks_of_expert)[expert]
    first_pair = (jnp.cumsum(sizes) - sizes)[expert]
    # Number of each row among the rows of its expert, [N, size].
    of_expert = (numbers - first_block)[:, None] * size + jnp.arange(size)
    pairs = jnp.where(
        of_expert < sizes[expert][:, None],
        order.at[first_pair[:, None] + of_expert].get(mode="clip"),
        experts.size,
    )
    return Blocks(Rows(pairs, _places_of(pairs, experts.shape)), expert, ends[-1])


def _entry(tree: Any, number: jax.Array) -> Any:
    """Returns entry `number` of the first dimension of each array of a tree."""
    return jax.tree.map(
        lambda array: jax.lax.dynamic_index_in_dim(array, number, keepdims=False), tree
    )


def _with_entry(tree: Any, values: Any, number: jax.Array) -> Any:
    """Returns a tree of arrays with `values`, a tree of the same form, as entry `number` of their
    first dimensions."""
    return jax.tree.map(
        lambda array, value: jax.lax.dynamic_update_index_in_dim(array, value, number, 0),
        tree,
        values,
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_blocks(
    activation: Activation, x: jax.Array, experts: jax.Array, weights: jax.Array, kernels: Kernels
) -> jax.Array:
    """Computes `experts_product` block by block."""
    out, _ = _forward_by_blocks(activation, False, x, experts, weights, kernels)
    return out


def _forward_by_blocks(
    activation: Activation,
    keep: bool,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    kernels: Kernels,
) -> tuple[jax.Array, tuple[Blocks, tuple[jax.Array, ...]]]:
    """Returns (out[T, D], (the blocks, the products of gate and up, both [N, rows of a block, F]));
    the products are () if `keep` is false."""
    blocks = _in_blocks(experts, _num_experts(kernels))

    def of_block(number: jax.Array) -> tuple[jax.Array, ...]:
        """Computes block `number`: its results, and the products of gate and up if `keep`."""
        gate, up, down = _entry(kernels, blocks.experts[number])
        tokens = _at(x, blocks.rows.tokens[number])
        factors = _at(weights.reshape(-1), blocks.rows.pairs[number])
        products = linear(gate, tokens), linear(up, tokens)
        results = weighted_linear(down, activation(*products), factors)
        return (results, *products) if keep else (results,)

    def step(number: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return _with_entry(arrays, of_block(number), number)

    arrays = []
    for shape in jax.eval_shape(of_block, jnp.int32(0)):
        arrays.append(jnp.zeros((len(blocks.experts), *shape.shape), shape.dtype))
    results, *products = jax.lax.fori_loop(0, blocks.count, step, tuple(arrays))
    out = _summed_by_token(jax.lax.collapse(results, 0, 2), blocks.rows)
    return out, (blocks, tuple(products))


def _by_blocks_forward(
    activation: Activation, x: jax.Array, experts: jax.Array, weights: jax.Array, kernels: Kernels
) -> tuple[jax.Array, tuple]:
    out, kept = _forward_by_blocks(activation, True, x, experts, weights, kernels)
    kept = jax.tree.map(partial(checkpoint_name, name="product"), kept)
    return out, (x, weights, kernels, *kept)


def _by_blocks_backward(activation: Activation, kept: tuple, gradient: jax.Array) -> tuple:
    """Returns the gradients of (x, experts, weights, kernels); None for the experts and for what is
    not trained of the kernels."""
    x, weights, kernels, blocks, products = kept
    trained = trained_part(kernels[0]), trained_part(kernels[1]), trained_part(kernels[2])

    def of_block(number: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """Computes block `number`: the gradients of its tokens, of their factors, and of the
        trained parts of its expert."""
        expert = blocks.experts[number]
        gate, up, down = _entry(kernels, expert)
        trained_gate, trained_up, trained_down = _entry(trained, expert)
        tokens = _at(x, blocks.rows.tokens[number])
        factors = _at(weights.reshape(-1), blocks.rows.pairs[number])

        def end(trained_down: Any, products: tuple, factors: jax.Array) -> jax.Array:
            return weighted_linear(joined(trained_down, down), activation(*products), factors)

        def start(trained_gate: Any, trained_up: Any, tokens: jax.Array) -> tuple:
            of_gate = linear(joined(trained_gate, gate), tokens)
            return of_gate, linear(joined(trained_up, up), tokens)

        _, backward_of_end = jax.vjp(end, trained_down, _entry(products, number), factors)
        of_results = _at(gradient, blocks.rows.tokens[number])
        d_down, d_products, d_factors = backward_of_end(of_results)
        _, backward_of_start = jax.vjp(start, trained_gate, trained_up, tokens)
        d_gate, d_up, d_tokens = backward_of_start(d_products)
        return d_tokens, d_factors, (d_gate, d_up, d_down)

    def step(number: jax.Array, carry: tuple) -> tuple:
        d_rows, sums = carry
        d_tokens, d_factors, of_expert = of_block(number)
        expert = blocks.experts[number]
        added = jax.tree.map(
            lambda total, part: total + part.astype(jnp.float32), _entry(sums, expert), of_expert
        )
        d_rows = _with_entry(d_rows, (d_tokens, d_factors), number)
        return d_rows, _with_entry(sums, added, expert)

    num_blocks, size = blocks.rows.pairs.shape
    d_rows = (
        jnp.zeros((num_blocks, size, x.shape[-1]), x.dtype),
        jnp.zeros((num_blocks, size), weights.dtype),
    )
    sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
    (d_tokens, d_factors), sums = jax.lax.fori_loop(0, blocks.count, step, (d_rows, sums))
    of_x = _summed_by_token(jax.lax.collapse(d_tokens, 0, 2), blocks.rows)
    of_weights = _at(d_factors.reshape(-1), blocks.rows.places)
    of_kernels = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), sums, trained)
    return of_x, None, of_weights, of_kernels


_by_blocks.defvjp(_by_blocks_forward, _by_blocks_backward)
