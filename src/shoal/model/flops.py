"""Computes the floating point operations that a step needs, and from them its MFU (model FLOPs
utilisation).

A product of a matrix with n elements and a vector counts 2n. Counted are the products with weights
and the two products of attention, as in the PaLM paper (Chowdhery et al. 2022, arXiv:2204.02311,
appendix B), but with the number of keys that each token really has, of a window those in it. Of
experts the chosen ones count. Of a gated delta net count its convolution and, for each token and
head, the three products with the state: what the key reads of it, what it changes, what the query
reads (Yang et al. 2024, arXiv:2412.06464, equation 10); not what computing by chunks adds. Norms,
activations and sampling are left out, and so is what a program recomputes or computes on padding. A
backward pass costs two forward passes, but for products with frozen weights one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from shoal.mesh import peak_flops
from shoal.model.architecture import Architecture
from shoal.model.parameters import active_size, kernel_specs
from shoal.records import Group

GroupLengths = tuple[int, Sequence[int]]
"""(tokens of a prompt, tokens of each of its completions)."""


def forward_flops(a: Architecture, prompt: int, completions: Sequence[int]) -> float:
    """Returns the operations of one forward pass over a prompt, computed once, and its completions.
    With N the weights of the blocks' products and of that which makes the layers' own embeddings,
    of experts those of k for each token, and layers of attention alone:

        prompt        2 N Tp            + 4 L H A Tp (Tp + 1) / 2
        completion    2 (N + D V) T     + 4 L H A (T Tp + T (T + 1) / 2)

    because a prompt's tokens need no logits, and a completion's tokens attend to the prompt too. A
    delta net has in place of the second term, for each token, 2 C conv_size + 6 Hv dk dv. An
    adapter's products are left out.
    """
    return _product_flops(a, prompt, completions) + _mixer_flops(a, prompt, completions)


def _mixer_flops(a: Architecture, prompt: int, completions: Sequence[int]) -> float:
    """Returns the operations of attention's two products, and of delta nets without their products
    with matrices, in one forward pass."""
    tokens = prompt + sum(completions)
    flops = 0.0
    for layer, num_layers in Counter(a.layers_in_order).items():
        if layer.mixer == "delta_net":
            flops += num_layers * _recurrence_flops(a) * tokens
            continue
        pairs = _pairs(0, prompt, layer.window)
        for length in completions:
            pairs += _pairs(prompt, length, layer.window)
        flops += 4.0 * num_layers * a.num_heads * a.head_dim_of(layer) * pairs
    return flops


def _pairs(before: int, tokens: int, window: int) -> float:
    """Returns how many pairs of a query and a key that it reads there are, for `tokens` tokens
    after `before` others; with a window each reads at most `window` keys, 0: all before it."""
    # The tokens that read all before them: with a window the first ones, if any.
    whole = tokens
    if window:
        whole = min(tokens, max(0, window - before))
    return whole * before + whole * (whole + 1) / 2 + (tokens - whole) * window


def _recurrence_flops(a: Architecture) -> float:
    """Returns the operations of one token in one delta net's convolution and state."""
    sizes = a.delta_net_sizes
    state = sizes.num_value_heads * sizes.key_dim * sizes.value_dim
    return 2.0 * sizes.conv_size * sizes.conv_width + 6.0 * state


def _product_flops(a: Architecture, prompt: int, completions: Sequence[int]) -> float:
    """Returns the operations of the products with weights in one forward pass, the head's for
    completions' tokens only. Those of an adapter, some hundredths of them, are left out."""
    tokens = sum(completions)
    head = a.hidden_size
    if not a.value_head:
        head *= a.vocab_size
    return 2.0 * (_block_weights(a) * (prompt + tokens) + head * tokens)


@lru_cache
def _block_weights(a: Architecture) -> int:
    """Returns the number of elements of all kernels but the head's that a token is multiplied
    by."""
    return sum(active_size(a, spec) for spec in kernel_specs(a))


def model_flops(
    a: Architecture,
    sampled: Iterable[GroupLengths],
    trained: Iterable[GroupLengths],
    num_epochs: int = 1,
    num_scorings: int = 0,
    critic_epochs: int | None = None,
) -> float:
    """Returns the operations of a whole step, whose prompts and completions are given as (tokens of
    a prompt, tokens of each of its completions): a forward pass over what was sampled; over what
    was trained on, a forward and a backward pass for each epoch and a forward pass for each scoring
    (the reference's, and the one before the first of several updates). With an adapter, the frozen
    weights get no gradient, so the backward pass counts as one forward pass over the products, not
    two. `critic_epochs`: a critic computes its values once, and then has so many epochs of its own;
    0 if it shares the policy's layers, None without a critic."""
    trained = list(trained)
    forward_of_sampled = 0.0
    for prompt, completions in sampled:
        forward_of_sampled += forward_flops(a, prompt, completions)
    forward_of_trained = 0.0
    products_of_trained = 0.0
    for prompt, completions in trained:
        forward_of_trained += forward_flops(a, prompt, completions)
        products_of_trained += _product_flops(a, prompt, completions)
    passes = 3 * num_epochs + num_scorings
    flops = forward_of_sampled + passes * forward_of_trained
    if a.adapter:  # without the third pass, the gradients of frozen weights
        flops -= num_epochs * products_of_trained
    if critic_epochs is not None:
        critic = replace(a, value_head=True)
        flops += model_flops(critic, (), trained, critic_epochs, num_scorings=1)
    return flops


@dataclass(frozen=True)
class Utilisation:
    """What MFU is computed from; `peak` is in operations a second, of all devices together."""

    architecture: Architecture
    peak: float
    num_epochs: int
    # number of forward passes over the trained tokens besides the updates: for old, reference and
    # teacher log-probs
    num_scorings: int
    critic_epochs: int | None = None  # see `model_flops`

    @classmethod
    def on(
        cls,
        devices: Iterable[Any],
        architecture: Architecture,
        dtype: Any,
        num_epochs: int = 1,
        num_scorings: int = 0,
        critic_epochs: int | None = None,
    ) -> Utilisation | None:
        """Returns the `Utilisation` of a model on these devices; None if there is no device, or the
        peak rate of one is unknown, as that of any CPU is."""
        peak = 0.0
        for device in devices:
            rate = peak_flops(device.device_kind, dtype)
            if rate is None:
                return None
            peak += rate
        if not peak:
            return None
        return cls(architecture, peak, num_epochs, num_scorings, critic_epochs)

    def mfu(
        self, groups: Sequence[Group], entered: Container[tuple[int, int]], seconds: float
    ) -> float:
        """Returns the MFU of a step that took so many seconds; `entered` has the (group,
        completion) pairs that entered the update. Both are numbers from 0, of a group in `groups`
        and of a completion in it. Only these count as trained; all of `groups` count as sampled.
        `seconds` is above 0."""
        sampled: list[GroupLengths] = []
        trained: list[GroupLengths] = []
        for group_index, group in enumerate(groups):
            for prompt, members in group.by_prompt():
                sampled_lengths = []
                trained_lengths = []
                for index, tokens in members:
                    length = tokens.stop - tokens.start
                    sampled_lengths.append(length)
                    if (group_index, index) in entered:
                        trained_lengths.append(length)
                sampled.append((len(prompt), sampled_lengths))
                if trained_lengths:  # without any, the prompt was not computed in training either
                    trained.append((len(prompt), trained_lengths))
        flops = model_flops(
            self.architecture,
            sampled,
            trained,
            self.num_epochs,
            self.num_scorings,
            self.critic_epochs,
        )
        return flops / (self.peak * seconds)
