"""Sizes and switches of a decoder, as its config.json says them, and the pattern of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the pretraining length: `llama3` and `yarn` (by
    wavelength) or `linear`."""

    kind: Literal["llama3", "linear", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    # of `yarn`: turns within the original length between which frequencies are interpolated
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # of `yarn`: factor of cosine and sine; and whether the bounds are rounded to whole dimensions
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of a layer's queries and keys."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    # Part of a head's dimensions that is rotated: the first ones, and the others stay.
    share: float = 1.0
    # True: the frequencies are those of a whole head, and the pairs (i, i + A/2) beyond `share`
    # are not rotated. False: the first `share` of the dimensions are rotated like a narrower head.
    over_whole_head: bool = False


@dataclass(frozen=True)
class Layer:
    """One kind of layer. What is 0 or None is as the architecture says."""

    mixer: Literal["attention", "delta_net"] = "attention"
    # Most keys that a query reads, its own included; 0: all before it.
    window: int = 0
    rotary: Rotary | None = None
    num_kv_heads: int = 0
    head_dim: int = 0
    # True: there is no product for values; they are the product for keys, before norm and rotation.
    values_are_keys: bool = False
    # The layer has no keys and values of its own: it reads those of the layer with this number,
    # an earlier one, which has the same window, rotary positions and heads.
    keys_of: int | None = None
    intermediate_size: int = 0
    # Its feed-forward part: a gated MLP, experts, or the sum of both, with norms of each (Gemma 4).
    feed_forward: Literal["mlp", "experts", "mlp+experts"] = "mlp"


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of gated delta net layers (Yang et al. 2024, arXiv:2412.06464)."""

    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads
    key_dim: int  # of a head
    value_dim: int  # of a head
    conv_size: int = 4  # tokens that the causal convolution reads

    @property
    def key_width(self) -> int:
        """Dimensions of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Dimensions of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True)
class Experts:
    """Sizes and switches of feed-forward parts with experts."""

    num_experts: int  # E
    experts_per_token: int  # k
    intermediate_size: int  # F of one expert
    # True: the weights of a token's experts sum up to 1.
    normalise: bool = True
    # F of an expert that every token has besides the chosen ones; 0: none. Its output is multiplied
    # by a gate, the sigmoid of a product with the token.
    shared_size: int = 0
    router_bias: bool = False
    bias: bool = False  # on the products of each expert

    @property
    def route_type(self) -> str:
        """The type in which the numbers of a token's experts are recorded: the smallest unsigned
        one that holds them."""
        return "uint8" if self.num_experts <= 256 else "uint16"


@dataclass(frozen=True)
class Stack:
    """Layers of one kind whose parameters are stacked in one array each."""

    layer: Layer
    numbers: range  # the layers' numbers in the model


StackLayers = tuple[tuple[int, ...], ...]
"""The numbers of the layers of each stack."""


@dataclass(frozen=True)
class Adapter:
    """Low-rank changes of a frozen model's products (LoRA, Hu et al. 2021, arXiv:2106.09685,
    equation 3):

    x W + (x A) B * scale        A[in, rank], B[rank, out]
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of products, such as q_proj, and EXPERT_PRODUCTS
    # True: scale is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732) in place of alpha /
    # rank
    rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


EXPERT_PRODUCTS = ("experts.gate_up_proj", "experts.down_proj")
"""The parameters of a layer's experts, as transformers' classes and PEFT's `target_parameters` call
them."""


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a decoder. Without any switch it is Llama 2; `families` says which of
    them each family has."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # A
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # on the attention's output projection (Llama's `attention_bias`)
    mlp_bias: bool = False
    qk_norm: bool = False
    # None, or an adapter, which is then the only part that is trained
    adapter: Adapter | None = None
    # The pattern of layers, which repeats: layer i is of kind pattern[i % len(pattern)].
    pattern: tuple[Layer, ...] = (Layer(),)
    # Part of a head's dimensions that is rotated, see `Rotary`.
    rotary_share: float = 1.0
    # Sizes of the layers of these kinds, if the pattern has any.
    delta_net: DeltaNet | None = None
    experts: Experts | None = None
    # What the feed-forward part has between its products: silu(gate) * up; gelu, approximated by
    # tanh, in place of silu; or gate * sigmoid(1.702 gate) * (up + 1), both bounded to 7.
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    # How norms multiply by their weight: by the weight; or in float32, by the weight or 1 + weight.
    norm: Literal["weight", "weight_float32", "one_plus_weight"] = "weight"
    post_norms: bool = False  # norms on the outputs of attention and of the feed-forward part, too
    query_scale: float = 0.0  # factor of the scores; 0: 1/sqrt(A)
    output_gate: bool = False  # attention's output is multiplied by the sigmoid of a product
    sinks: bool = False  # each query head has a number that enters the softmax like a key's score
    score_cap: float = 0.0  # c: scores become c tanh(score / c); 0: they stay
    logit_cap: float = 0.0  # the same for logits
    embedding_scale: float = 1.0
    v_norm: bool = False  # values have a norm, without a weight
    layer_scale: bool = False  # each layer's output is multiplied by a number, which stays
    # Width of an embedding that each layer has for itself (Gemma 4); 0: none.
    layer_embedding_size: int = 0
    # True: in place of logits the head gives one number, [D, 1]: a critic's value, a reward model's
    # score.
    value_head: bool = False
    # True: the head alone is trained, and is all that this model has of its own: that of a critic
    # that shares the policy's layers.
    shares_layers: bool = False
    # the type of the weights of frozen products; "": like all others
    quantised: Literal["", "int8", "float8_e4m3fn"] = ""
    # Tokens of the longest sequence that its positions are made for; 0: not known. Architectures
    # that differ only in this and the next are equal.
    max_positions: int = field(default=0, compare=False)
    # The family whose config.json describes it, and whose files its weights have: a key of
    # FAMILIES.
    model_type: str = field(default="llama", compare=False)

    def key_parts(self, tensor: int) -> int:
        """Returns how many devices of `tensor` share a key/value head, of the kind of layer with
        fewest heads; each holds a part of the positions of the head's cache."""
        return max(self.key_parts_of(layer, tensor) for layer in self.kinds)

    def key_parts_of(self, layer: Layer, tensor: int) -> int:
        """Returns how many devices of `tensor` share a key/value head of a kind of layer."""
        if layer.mixer != "attention":
            return 1
        return max(1, tensor // self.kv_heads_of(layer))

    def layer(self, number: int) -> Layer:
        """Returns the kind of the layer with this number."""
        return self.pattern[number % len(self.pattern)]

    def rotary_of(self, layer: Layer) -> Rotary:
        """Returns the rotary positions of a kind of layer."""
        if layer.rotary is not None:
            return layer.rotary
        return Rotary(self.rope_theta, self.rope_scaling, self.rotary_share)

    def kv_heads_of(self, layer: Layer) -> int:
        """Returns the number of key/value heads of a kind of layer."""
        return layer.num_kv_heads or self.num_kv_heads

    def head_dim_of(self, layer: Layer) -> int:
        """Returns the dimensions of a head of a kind of layer."""
        return layer.head_dim or self.head_dim

    def intermediate_size_of(self, layer: Layer) -> int:
        """Returns the width of the gated MLP of a kind of layer."""
        return layer.intermediate_size or self.intermediate_size

    @cached_property
    def rotaries(self) -> tuple[tuple[int, Rotary], ...]:
        """(dimensions of a head, its rotary positions) of attention's kinds of layers, each
        once."""
        found: dict[tuple[int, Rotary], None] = {}
        for layer in self.kinds:
            if layer.mixer == "attention":
                found[self.head_dim_of(layer), self.rotary_of(layer)] = None
        return tuple(found)

    def rotary_index(self, layer: Layer) -> int:
        """Returns the index in `rotaries` of a kind of layer with attention."""
        return self.rotaries.index((self.head_dim_of(layer), self.rotary_of(layer)))

    @cached_property
    def layers_in_order(self) -> tuple[Layer, ...]:
        """The kind of each layer."""
        return tuple(self.layer(number) for number in range(self.num_layers))

    @cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have experts, in order."""
        numbers = []
        for number, layer in enumerate(self.layers_in_order):
            if layer.feed_forward != "mlp":
                numbers.append(number)
        return tuple(numbers)

    @property
    def expert_sizes(self) -> Experts:
        """`experts` of a model that has some; ValueError if it has none."""
        if self.experts is None:
            raise ValueError("this model has no experts")
        return self.experts

    @property
    def delta_net_sizes(self) -> DeltaNet:
        """`delta_net` of a model that has some; ValueError if it has none."""
        if self.delta_net is None:
            raise ValueError("this model has no delta nets")
        return self.delta_net

    @property
    def route_shape(self) -> tuple[int, int] | None:
        """(layers with experts, k), the shape of what is recorded of the experts of one token; None
        without experts."""
        if self.experts is None:
            return None
        return len(self.expert_layers), self.experts.experts_per_token

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The different kinds of layers, in the order of their first layers."""
        return tuple(dict.fromkeys(self.layers_in_order))

    @cached_property
    def read_layers(self) -> frozenset[int]:
        """The numbers of the layers whose keys and values other layers read."""
        return frozenset(layer.keys_of for layer in self.kinds if layer.keys_of is not None)

    @cached_property
    def marked_layers(self) -> tuple[tuple[Layer, bool], ...]:
        """(kind of the layer, whether other layers read its keys) of each layer."""
        marked = []
        for number, layer in enumerate(self.layers_in_order):
            marked.append((layer, number in self.read_layers))
        return tuple(marked)

    @cached_property
    def scan_groups(self) -> tuple[tuple[Stack, ...], ...]:
        """The layers in groups, each of which is one scan: a pattern of kinds that repeats. A group
        has a stack for each place in its pattern, all with equally many layers. Each layer whose
        keys others read is a group of its own: a scan would keep the keys of all layers of its
        stack.
        """
        groups = []
        for group in repeating_patterns(self.marked_layers):
            groups.append(tuple(Stack(self.layer(numbers.start), numbers) for numbers in group))
        return tuple(groups)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks of all scan groups, one after the other."""
        return tuple(stack for group in self.scan_groups for stack in group)

    @property
    def stack_layers(self) -> StackLayers:
        """The numbers of the layers of each of `stacks`."""
        return tuple(tuple(stack.numbers) for stack in self.stacks)

    @property
    def longest_scan_group(self) -> tuple[Stack, ...]:
        """The scan group with most layers, of several the first."""

        def num_layers(group: tuple[Stack, ...]) -> int:
            return sum(len(stack.numbers) for stack in group)

        return max(self.scan_groups, key=num_layers)

    def shortened(self, num_layers: int) -> Architecture:
        """Returns the architecture with fewer layers: the longest scan group repeats its pattern
        less often, and its last repetitions stay; all other layers stay too. ValueError if that
        cannot give `num_layers` layers."""
        group = self.longest_scan_group
        repeats = len(group[0].numbers)
        fewer, rest = divmod(self.num_layers - num_layers, len(group))
        if rest or not 0 <= fewer < repeats:
            raise ValueError(f"no whole patterns make {num_layers} of {self.num_layers} layers")
        first = group[0].numbers.start
        left_out = range(first, first + fewer * len(group))
        kept = [number for number in range(self.num_layers) if number not in left_out]
        kinds = []
        for number in kept:
            layer = self.layer(number)
            if layer.keys_of is not None:
                layer = replace(layer, keys_of=kept.index(layer.keys_of))
            kinds.append(layer)
        shorter = replace(self, num_layers=num_layers)
        if shorter.layers_in_order == tuple(kinds):
            return shorter
        return replace(shorter, pattern=tuple(kinds))

    @property
    def base(self) -> Architecture:
        """The architecture without its adapter."""
        return replace(self, adapter=None)


def repeating_patterns(kinds: Sequence[Any]) -> list[tuple[range, ...]]:
    """Groups layers, given by their kinds, so that in each group a pattern of kinds repeats.
    Returns for each group the numbers of the layers at each place of its pattern.

    Found from the first layer on: the pattern whose repetitions have most layers; of several, the
    shortest. Layers that repeat nothing are a group of their own.

    >>> local, whole = Layer(window=4), Layer()
    >>> repeating_patterns([local, whole, local, whole, whole])
    [(range(0, 4, 2), range(1, 4, 2)), (range(4, 5),)]
    """
    groups = []
    start = 0
    while start < len(kinds):
        length, repeats = _longest_pattern(kinds[start:])
        stop = start + length * repeats
        groups.append(tuple(range(place, stop, length) for place in range(start, start + length)))
        start = stop
    return groups


def _longest_pattern(kinds: Sequence[Any]) -> tuple[int, int]:
    """Returns (length of a pattern, how often it repeats) at the beginning of some layers:
    the pattern of at least two repetitions that covers most layers, of several the shortest; (1, 1)
    if nothing repeats.

    >>> local, whole = Layer(window=4), Layer()
    >>> _longest_pattern([local, local, whole, local, local, whole, local])
    (3, 2)
    """
    best = (1, 1)
    for length in range(1, len(kinds) // 2 + 1):
        repeats = 1
        while kinds[:length] == kinds[repeats * length : (repeats + 1) * length]:
            repeats += 1
        if repeats > 1 and length * repeats > best[0] * best[1]:
            best = length, repeats
    return best
