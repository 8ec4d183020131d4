"""Floating point operations that a step needs, from which its MFU (model FLOPs utilisation) is
computed.

A product of a matrix with n elements and a vector counts 2n. Counted are the products with weights
and the two products of attention, as in the PaLM paper (Chowdhery et al. 2022, arXiv:2204.02311,
appendix B), but with the number of keys that each token really has; norms, activations and sampling
are left out, and so is what a program recomputes or computes on padding. A backward pass costs two
forward passes; of frozen weights' products, one.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax

from shoal.mesh import peak_flops
from shoal.model.architecture import Architecture
from shoal.model.parameters import param_specs
from shoal.records import Group

GroupLengths = tuple[int, Sequence[int]]
"""Tokens of a prompt, and of each of its completions."""


def forward_flops(a: Architecture, prompt: int, completions: Sequence[int]) -> float:
    """One forward pass over a prompt, once, and its completions: with N the weights of the blocks'
    products,

        prompt        2 N Tp            + 4 L H A Tp (Tp + 1) / 2
        completion    2 (N + D V) T     + 4 L H A (T Tp + T (T + 1) / 2)

    since a prompt's tokens need no logits and a completion's tokens attend to the prompt too.
    """
    pairs = prompt * (prompt + 1) / 2
    for length in completions:
        pairs += length * prompt + length * (length + 1) / 2
    attention = 4.0 * a.num_layers * a.num_heads * a.head_dim * pairs
    return _product_flops(a, prompt, completions) + attention


def _product_flops(a: Architecture, prompt: int, completions: Sequence[int]) -> float:
    """The products with weights in one forward pass; those of an adapter, some hundredths of them,
    are left out."""
    tokens = sum(completions)
    head = a.hidden_size * a.vocab_size
    return 2.0 * (_block_weights(a) * (prompt + tokens) + head * tokens)


@lru_cache
def _block_weights(a: Architecture) -> int:
    """Elements of all matrices of all layers, as they are declared."""
    weights = 0
    for spec in jax.tree.leaves(param_specs(replace(a, adapter=None, quantised="")).blocks):
        if not spec.is_vector:
            weights += math.prod(spec.shape)
    return weights


def model_flops(
    a: Architecture,
    sampled: Iterable[GroupLengths],
    trained: Iterable[GroupLengths],
    num_epochs: int = 1,
    num_scorings: int = 0,
) -> float:
    """A whole step: a forward pass over what was sampled; over what was trained on, a forward and a
    backward pass an epoch and a forward pass for each scoring (the reference's, and the one before
    the first of several updates)."""
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
    if a.adapter:  # no gradients of frozen weights
        flops -= num_epochs * products_of_trained
    return flops


@dataclass(frozen=True)
class Utilisation:
    """The figures from which MFU is computed; `peak` is in operations a second of all devices."""

    architecture: Architecture
    peak: float
    num_epochs: int
    # forward passes over the trained tokens besides the updates: old, reference, teacher
    num_scorings: int

    @classmethod
    def on(
        cls,
        devices: Iterable[Any],
        architecture: Architecture,
        dtype: Any,
        num_epochs: int = 1,
        num_scorings: int = 0,
    ) -> Utilisation | None:
        """None if the peak rate of a device is unknown, as that of any CPU."""
        peak = 0.0
        for device in devices:
            rate = peak_flops(device.device_kind, dtype)
            if rate is None:
                return None
            peak += rate
        if not peak:
            return None
        return cls(architecture, peak, num_epochs, num_scorings)

    def share(
        self, groups: Sequence[Group], entered: Container[tuple[int, int]], seconds: float
    ) -> float:
        """MFU of a step of so many seconds; `entered` holds the (group, completion) pairs that
        entered the update."""
        sampled: list[GroupLengths] = []
        trained: list[GroupLengths] = []
        for number, group in enumerate(groups):
            for prompt, members in group.by_prompt():
                sampled_lengths = []
                trained_lengths = []
                for index, tokens in members:
                    length = tokens.stop - tokens.start
                    sampled_lengths.append(length)
                    if (number, index) in entered:
                        trained_lengths.append(length)
                sampled.append((len(prompt), sampled_lengths))
                if trained_lengths:  # else the prompt was not computed either
                    trained.append((len(prompt), trained_lengths))
        flops = model_flops(self.architecture, sampled, trained, self.num_epochs, self.num_scorings)
        return flops / (self.peak * seconds)
