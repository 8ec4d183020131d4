"""Floating point operations that a step needs, from which its MFU (model FLOPs utilisation) is
computed.

A product of a matrix with n elements and a vector counts 2n. Counted are the products with weights
and the two products of attention, as in the PaLM paper (Chowdhery et al. 2022, arXiv:2204.02311,
appendix B), but with the number of keys that each token really has; norms, activations and sampling
are left out, and so is what a program recomputes or computes on padding. A backward pass costs two
forward passes; of frozen weights' products, one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.mesh import peak_flops
from shoal.model.architecture import Architecture
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
    pairs = prompt * (prompt + 1) / 2 + sum(n * prompt + n * (n + 1) / 2 for n in completions)
    return (
        _product_flops(a, prompt, completions)
        + 4.0 * a.num_layers * a.num_heads * a.head_dim * pairs
    )


def _product_flops(a: Architecture, prompt: int, completions: Sequence[int]) -> float:
    """The products with weights in one forward pass; those of an adapter, some hundredths of them,
    are left out."""
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    blocks = a.num_layers * a.hidden_size * (2 * queries + 2 * keys + 3 * a.intermediate_size)
    tokens = sum(completions)
    return 2.0 * (blocks * (prompt + tokens) + a.hidden_size * a.vocab_size * tokens)


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
    trained, passes = list(trained), 3 * num_epochs + num_scorings
    saved = num_epochs * sum(_product_flops(a, *group) for group in trained) if a.adapter else 0.0
    return (
        sum(forward_flops(a, *group) for group in sampled)
        + passes * sum(forward_flops(a, *group) for group in trained)
        - saved
    )


@dataclass(frozen=True)
class Utilisation:
    """The figures from which MFU is computed; `peak` is in operations a second of all devices."""

    architecture: Architecture
    peak: float
    num_epochs: int
    num_scorings: (
        int  # forward passes over the trained tokens besides the updates: old, reference, teacher
    )

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
        rates = [peak_flops(device.device_kind, dtype) for device in devices]
        known = [rate for rate in rates if rate is not None]
        if not rates or len(known) < len(rates):
            return None
        return cls(architecture, sum(known), num_epochs, num_scorings)

    def share(
        self, groups: Sequence[Group], entered: Container[tuple[int, int]], seconds: float
    ) -> float:
        """MFU of a step of so many seconds; `entered` holds the (group, completion) pairs that
        entered the update."""
        sampled, trained = [], []
        for number, group in enumerate(groups):
            for prompt, members in group.by_prompt():
                sampled.append((len(prompt), [tokens.stop - tokens.start for _, tokens in members]))
                inside = [
                    tokens.stop - tokens.start for i, tokens in members if (number, i) in entered
                ]
                if inside:  # else the prompt was not computed either
                    trained.append((len(prompt), inside))
        flops = model_flops(self.architecture, sampled, trained, self.num_epochs, self.num_scorings)
        return flops / (self.peak * seconds)
