"""Floating point operations that a step needs, from which its MFU (model FLOPs utilisation) is computed.

A product of a matrix with n elements and a vector counts 2n. Counted are the products with weights and the two
products of attention, as in the PaLM paper (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), but with the number
of keys that each token really has; norms, activations and sampling are left out, and so is what a program recomputes or
computes on padding. A backward pass costs two forward passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.model.architecture import Architecture

GroupLengths = tuple[int, Sequence[int]]
"""Tokens of a prompt, and of each of its completions."""


def forward_flops(a: Architecture, prompt: int, completions: Sequence[int]) -> float:
    """One forward pass over a prompt, once, and its completions: with N the weights of the blocks' products,

        prompt        2 N Tp            + 4 L H A Tp (Tp + 1) / 2
        completion    2 (N + D V) T     + 4 L H A (T Tp + T (T + 1) / 2)

    since a prompt's tokens need no logits and a completion's tokens attend to the prompt too.
    """
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    blocks = a.num_layers * a.hidden_size * (2 * queries + 2 * keys + 3 * a.intermediate_size)
    tokens = sum(completions)
    pairs = prompt * (prompt + 1) / 2 + sum(n * prompt + n * (n + 1) / 2 for n in completions)
    products = 2.0 * (blocks * (prompt + tokens) + a.hidden_size * a.vocab_size * tokens)
    return products + 4.0 * a.num_layers * queries * pairs


def model_flops(a: Architecture, sampled: Iterable[GroupLengths], trained: Iterable[GroupLengths],
                num_epochs: int = 1, num_scorings: int = 0) -> float:
    """A whole step: a forward pass over what was sampled; over what was trained on, a forward and a backward pass an
    epoch and a forward pass for each scoring (the reference's, and the one before the first of several updates)."""
    passes = 3 * num_epochs + num_scorings
    return (sum(forward_flops(a, *group) for group in sampled)
            + passes * sum(forward_flops(a, *group) for group in trained))
