"""One layer of the model: attention and feed-forward with their norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shoal.model.activations import ACTIVATIONS
from shoal.model.architecture import Layer
from shoal.model.compiler_habits import Habits, gated, habits_of, split_product
from shoal.model.experts import experts_of_rows, route
from shoal.model.linear import Cast, broadcast, linear
from shoal.model.norms import layer_norm
from shoal.model.parameters import Block, ExpertWeights, LayerInputWeights
from shoal.model.recurrence import delta_net
from shoal.model.rotary import Ropes, no_rotation, rotate_part

if TYPE_CHECKING:
    from shoal.model.transformer import Model


class Attention(Protocol):
    """The attention of one kind of layer in a pass over tokens."""

    @property
    def rotates(self) -> bool:
        """True if it rotates q and k itself: it gets both without rotary positions, and as `rope`
        the angles."""
        ...

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: Any,
        *,
        sinks: jax.Array | None = None,
        rope: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Computes attention: q[R, T, H, A], k and v [R, T, K, A], the layer's cache, sinks[H] ->
        (out[R, T, H, A], what the pass leaves).

        | pass | cache | leaves |
        | --- | --- | --- |
        | packed rows | None | None |
        | prompts | None | `PromptKeys` |
        | a chunk of prompts | `PrefillChunkKeys` | `PrefillChunkKeys` |
        | one token in each slot | a `Cache` of keys | the same, with its key |
        | context | `KeyCache`, `RingCache` | `KeyCache`, `ExtendedRing` |

        For a layer that reads another layer's keys k, v and cache are what that one has left
        (`SharedKeys`). k and v are None if the cache has them already."""
        ...


Recurrence = Callable[..., tuple[jax.Array, Any]]
"""The recurrence of delta nets in a pass over tokens: (inputs: `DeltaNetInputs` of [R, T] tokens,
convolution[C, 1, size], cache of the layer) -> (out[R, T, Hv, dv], what the pass leaves). It leaves
a `State`, in decoding a `StateCache`, in packed rows None."""


class AttentionPass(Protocol):
    """What the tokens of a pass read of each other: those of packed rows in training and scoring,
    of prompts, of a chunk of prompts, a token in each slot, context after a completion
    (`shoal.model.passes`)."""

    def attention(self, layer: Layer) -> Attention:
        """Returns the attention of a kind of layer."""
        ...

    def recurrence(self) -> Recurrence:
        """Returns the recurrence of layers whose mixer is a delta net."""
        ...


class PromptKeys(NamedTuple):
    """What prompts leave in a layer with attention: their keys, rotated, and values."""

    k: jax.Array  # [R, T, K, A]
    v: jax.Array  # as k


class LayerInputs(NamedTuple):
    """What each layer gets besides x, a tree of arrays of all L layers; of one layer without the
    first dimension. None is what the model's layers do not get."""

    embedding: Any = None  # [L, R, T, P]: of `layer_embeddings`
    # int[L, R, T, k]: the experts that a token is given (replay of routes); -1 where the router
    # chooses them. None: it chooses all. Layers without experts have any numbers.
    experts: Any = None


NO_INPUTS = LayerInputs()


class SharedKeys(NamedTuple):
    """What the attention of a layer gives to layers that read its keys: in a pass without caches
    the keys and values, else the cache that has them."""

    k: Any  # [R, T, K, A], as attention got them; None if there is a cache
    v: Any
    cache: Any


class LayerAux(NamedTuple):
    """What a layer returns next to its output."""

    cache: Any  # what the pass leaves of the layer: see `Attention`; None in training
    experts: Any = None  # int32[R, T, k]: the experts of each token; None without experts
    # int32[R, T]: how many of the experts that a token was given the router would not have chosen;
    # None if none were given
    rerouted: Any = None
    # None of a layer that reads other layers' keys, or has none
    keys: SharedKeys | None = None


def block(
    model: Model,
    layer: Layer,
    w: Block,
    x: jax.Array,
    *,
    rope: Ropes,
    attention_pass: AttentionPass,
    cache: Any,
    inputs: LayerInputs = NO_INPUTS,
    keys: SharedKeys | None = None,
) -> tuple[jax.Array, LayerAux]:
    """Computes one layer of the kind `layer` with the weights `w`: x[R, T, D] -> (x[R, T, D],
    `LayerAux`). `rope` are the angles of `rotary`, for all kinds of layers; `cache` is passed to
    the layer's attention or recurrence, and what that leaves is returned. A layer
    with a cache is compiled as one that decodes (`habits_of`). `inputs` are the layer's own;
    `keys` what the layer left whose keys this one reads, if it has none of its own."""
    read_cache = cache if keys is None else keys.cache
    habits = habits_of(model, is_decoding=read_cache is not None)
    w = habits.weights(w)
    norm = partial(layer_norm, model)
    kept = partial(checkpoint_name, name="attention")
    x = checkpoint_name(x, "input")
    h = habits.normed(norm(x, w.attention_norm))
    left: SharedKeys | None = None
    if layer.mixer == "attention":
        own_rope = rope[model.architecture.rotary_index(layer)]
        attention = attention_pass.attention(layer)
        mixed, cache, left = _attend(model, layer, w, h, own_rope, attention, cache, keys, habits)
    else:
        mixed, cache = delta_net(model, w.delta_net, h, attention_pass.recurrence(), cache)
    if w.post_attention_norm is not None:
        mixed = norm(mixed, w.post_attention_norm)
    x = kept(x + mixed)
    h = habits.normed(norm(x, w.mlp_norm))
    out: Any = None
    experts = None
    rerouted = None
    if w.down is not None:
        out = _feed_forward(model, w, h, habits)
    if layer.feed_forward == "mlp+experts":
        out, experts, rerouted = _with_experts_beside(model, w.experts, x, out, inputs.experts)
    elif w.experts is not None:
        of_experts, experts, rerouted = _of_experts(model, w.experts, h, h, inputs.experts)
        if w.experts.shared_gate is not None:
            out = out * jax.nn.sigmoid(linear(w.experts.shared_gate, h))
        out = of_experts if out is None else out + of_experts
    if w.post_mlp_norm is not None:
        out = norm(out, w.post_mlp_norm)
    x = x + out
    if w.layer_input is not None:
        x = x + _of_layer_input(model, w.layer_input, x, inputs.embedding)
    if w.layer_scale is not None:
        x = x * jax.lax.stop_gradient(w.layer_scale).astype(x.dtype)
    aux = LayerAux(cache, experts, rerouted, left)
    return model.role.constrain(x, "rows", None, None), aux


def _attend(
    model: Model,
    layer: Layer,
    w: Block,
    h: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    attention: Attention,
    cache: Any,
    keys: SharedKeys | None,
    habits: Habits,
) -> tuple[jax.Array, Any, SharedKeys | None]:
    """Computes the attention of a layer with its products: h[R, T, D] -> (out[R, T, D], what the
    pass leaves, the keys for layers that read this one's). `rope` are the (cos, sin) of this kind
    of layer. If the layer has fewer key/value heads than `model.key_heads_of` says, k and v are
    repeated before `attention` gets them. `keys` are what another layer left, if this one has no
    keys."""
    a = model.architecture
    kept = partial(checkpoint_name, name="attention")
    q, k, v = _heads(model, layer, w, h, habits)
    gate = None
    if a.output_gate:
        q, gate = jnp.split(q, 2, axis=-1)
    if a.qk_norm:
        q = layer_norm(model, q, w.q_norm)
    if a.qk_norm and keys is None:
        k = layer_norm(model, k, w.k_norm)
    if a.v_norm and keys is None:
        v = layer_norm(model, v, None)
    q = scaled_queries(q, a.query_scale)
    cos, sin = rope
    rotates_halves = 2 * cos.shape[-1] == q.shape[-1]
    rotate = habits.rotate if rotates_halves else rotate_part
    angles = None
    if attention.rotates:
        angles = rope
        if rotates_halves:
            rotate = _unrotated
        else:
            # These forms rotate the halves of a whole head: what is rotated here they get with
            # angles of 0.
            angles = no_rotation(cos, q.shape[-1])
    attend = partial(attention, sinks=w.sinks, rope=angles)
    q = kept(rotate(q, cos, sin))
    left = None
    out: Any
    if keys is not None:
        out, _ = attend(q, keys.k, keys.v, keys.cache)
    else:
        k = rotate(k, cos, sin)
        # above 1 if `tensor` has more devices than the layer has key/value heads
        repeats = model.key_heads_of(layer) // a.kv_heads_of(layer)
        if repeats > 1:
            k = model.role.constrain(jnp.repeat(k, repeats, axis=-2), "rows", None, "heads", None)
            v = model.role.constrain(jnp.repeat(v, repeats, axis=-2), "rows", None, "heads", None)
        k, v = kept(k), kept(v)
        out, new_cache = attend(q, k, v, cache)
        left = SharedKeys(k, v, None) if cache is None else SharedKeys(None, None, new_cache)
        cache = new_cache
    if gate is not None:
        out = out * jax.nn.sigmoid(gate)
    return linear(w.o, jax.lax.collapse(out, out.ndim - 2)), cache, left


def scaled_queries(q: jax.Array, query_scale: float) -> jax.Array:
    """Returns queries q[R, T, H, A] with the factor that gives scores the model's scale
    (`Architecture.query_scale`): all forms of attention multiply scores by 1/sqrt(A) themselves."""
    if not query_scale:
        return q
    factor = query_scale * q.shape[-1] ** 0.5
    # In float32: rounded to q's type, the factor would change all scores alike.
    return (q.astype(jnp.float32) * factor).astype(q.dtype)


def _unrotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return x


def _heads(model: Model, layer: Layer, w: Block, h: jax.Array, habits: Habits) -> tuple[Any, ...]:
    """Computes q[R, T, H, A], k[R, T, K, A] and v[R, T, K, A] from h[R, T, D], without rotary
    positions and norms; k and v are None if the layer has no keys of its own. With an output gate q
    is [R, T, H, 2 A]: each head's gate follows its query."""
    has_keys = layer.keys_of is None
    if has_keys and w.k is None:  # the three weights are joined in one (`products_joined`)
        return split_product(model, layer, linear(w.q, h))

    rows, size, _ = h.shape
    head_dim = model.architecture.head_dim_of(layer)

    def by_head(product: jax.Array) -> jax.Array:
        return product.reshape(rows, size, -1, head_dim)

    q = habits.queries(linear(w.q, h))
    k = v = None
    if has_keys:
        k = by_head(linear(w.k, h))
        v = k if layer.values_are_keys else by_head(linear(w.v, h))
    if model.architecture.output_gate:
        return q.reshape(rows, size, -1, 2 * head_dim), k, v
    return by_head(q), k, v


def _feed_forward(model: Model, w: Block, h: jax.Array, habits: Habits) -> jax.Array:
    """Computes the gated feed-forward part, [R, T, D] -> [R, T, D]: down of `gated` of gate h and
    up h, without its norm and without the sum with x."""
    if not isinstance(w.down, tuple):
        return habits.gated_product(model, linear(w.gate, h), linear(w.up, h), w.down)
    # The matrices are split into chunks, each of which gives a term of the sum.
    total: Any = None
    for gate, up, down in zip(w.gate, w.up, w.down, strict=True):
        inner = habits.inner_of_chunk(gated(model, linear(gate, h), linear(up, h)))
        part = linear(down, inner, jnp.float32)
        total = part if total is None else total + part
    return total.astype(h.dtype)


def _of_layer_input(
    model: Model, w: LayerInputWeights, x: jax.Array, embedding: jax.Array
) -> jax.Array:
    """Computes what a layer adds to its output x[R, T, D] for its own embedding[R, T, P] of each
    token: [R, T, D]."""
    activation = ACTIVATIONS[model.architecture.activation]
    inner = activation(linear(w.gate, x), embedding)
    return layer_norm(model, linear(w.projection, inner), w.norm)


def _with_experts_beside(
    model: Model, w: ExpertWeights, x: jax.Array, of_mlp: jax.Array, given: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Computes the sum of an MLP's output of_mlp[R, T, D] and of experts that read the stream x[R,
    T, D], as transformers' Gemma4TextDecoderLayer does: (the sum, and what `_of_experts` returns
    with it). Both have norms of their own, and so has the router."""
    to_router = layer_norm(model, x, None) * broadcast(w.router_scale.astype(x.dtype), x)
    to_router = to_router * jnp.asarray(model.architecture.hidden_size**-0.5, x.dtype)
    h = layer_norm(model, x, w.norm)
    of_experts, experts, rerouted = _of_experts(model, w, h, to_router, given)
    of_mlp = layer_norm(model, of_mlp, w.post_mlp_norm)
    return of_mlp + layer_norm(model, of_experts, w.post_norm), experts, rerouted


def _of_experts(
    model: Model,
    w: ExpertWeights,
    h: jax.Array,
    to_router: jax.Array,
    given: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Computes the sum of each token's experts, without the one that every token has: h[R, T, D]
    and what the router reads, of the same shape -> (out[R, T, D], the experts int32[R, T, k],
    `LayerAux.rerouted`). The router's product is summed and kept in float32, as are the weights
    that it gives the experts. `given`[R, T, k] are those of `LayerInputs.experts`."""
    a = model.architecture
    sizes = a.expert_sizes
    logits = linear(w.router, to_router, jnp.float32)
    by_logits = partial(
        route, logits, sizes.experts_per_token, sizes.normalise, expert_scale=w.expert_scale
    )
    experts, weights = by_logits()
    rerouted = None
    if given is not None:
        is_chosen = (given[..., None] == experts[..., None, :]).any(-1)  # [R, T, k]
        rerouted = ((given >= 0) & ~is_chosen).sum(-1, dtype=jnp.int32)
        replayed = jnp.where(given >= 0, given, experts)
        experts, weights = by_logits(experts=replayed)

    activation = ACTIVATIONS[a.activation]
    out = experts_of_rows(model.role, h, experts, weights, w.kernels, activation)
    return out, experts, rerouted


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def rounded(weight: jax.Array, dtype: Any) -> jax.Array:
    """Returns a weight that is no product's, in its own type, with the values that it has in the
    type of the computation. Sampler and reference hold it in that type, so that all compute the
    same. The gradient is the weight's own, not rounded."""
    if weight.dtype == dtype:
        return weight
    kind = jnp.finfo(dtype)
    # Not by two casts, which XLA may leave out (`xla_allow_excess_precision`).
    return jax.lax.reduce_precision(weight, kind.nexp, kind.nmant)


def _rounded_forward(weight: jax.Array, dtype: Any) -> tuple[jax.Array, None]:
    return rounded(weight, dtype), None


def _rounded_backward(dtype: Any, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (gradient,)


rounded.defvjp(_rounded_forward, _rounded_backward)


def cast_weight(
    model: Model, weight: jax.Array, axes: tuple[str | None, ...], trained: bool = True
) -> jax.Array | Cast:
    """Returns a product's weight in the form that a layer reads. `axes` are its logical axes.

    A trained weight whose type is not the computation's becomes a `Cast`: a copy in that type,
    gathered along `embed`, with the stored weight as the master that gets the gradient. A frozen
    weight (`trained` is False) is gathered in its stored type. A trained weight that has the
    computation's type already is returned as it is.
    """
    whole = tuple(None if axis == "embed" else axis for axis in axes)

    def gathered(kernel: jax.Array) -> jax.Array:
        # Split as the master is, then gathered: with the second alone XLA may gather the master,
        # twice the bytes.
        split = model.role.constrain(kernel, *axes)
        return model.role.constrain(split, *whole)

    if not trained:  # gathered in the bytes that are stored
        return gathered(weight)
    if weight.dtype == model.dtype:
        return weight
    kernel = gathered(jax.lax.stop_gradient(weight).astype(model.dtype))
    return Cast(kernel, weight, model.reduce_dtype)
