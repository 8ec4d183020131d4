"""Turns token losses into one number: each token gets a weight, and loss = sum(weight *
token_loss).

Weights are computed once, on the host, in float64, from all completions of an update; any split of
that update into micro-batches then adds up to the same gradient. (A mean of micro-batch means, as
TRL long had it, does not: batches of short completions count too much.) Each mode is a pure
function of the completions' lengths, with a row in `shoal.config.choices`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int

Lengths = Int[np.ndarray, "P G"]
Counted = Bool[np.ndarray, "P G"]
Weights = Float[np.ndarray, "P G"]


def token_mean(lengths: Lengths, counted: Counted, constant: int) -> Weights:
    """Returns 1 / (tokens of all completions): every token weighs the same. The tokens are those of
    the completions that are `counted`; `constant` is not read. DAPO, arXiv 2503.14476, eq. 8."""
    return np.full(lengths.shape, 1.0 / max(lengths[counted].sum(), 1))


def seq_mean_token_mean(lengths: Lengths, counted: Counted, constant: int) -> Weights:
    """Returns 1 / (completions x tokens of this completion): every completion weighs the same. The
    number of completions is that of the `counted` ones; `constant` is not read. GRPO: DeepSeekMath,
    arXiv 2402.03300, eq. 3."""
    # A token of a long wrong answer then weighs less than a token of a short one: the length bias
    # that Dr. GRPO removes.
    return 1.0 / (max(counted.sum(), 1) * np.maximum(lengths, 1.0))


def seq_mean_token_sum(lengths: Lengths, counted: Counted, constant: int) -> Weights:
    """Returns 1 / (number of `counted` completions): a completion's loss is the sum over its
    tokens, with no length in the denominator, as in the policy gradient theorem. With GSPO's loss
    it is LUSPO (each completion's loss times its length), arXiv 2602.05261."""
    return np.full(lengths.shape, 1.0 / max(counted.sum(), 1))


def seq_mean_token_sum_norm(lengths: Lengths, counted: Counted, constant: int) -> Weights:
    """Returns 1 / (number of `counted` completions x `constant`); the constant is the longest
    possible length. Dr. GRPO, arXiv 2503.20783, section 3.2 and its listing 1."""
    return seq_mean_token_sum(lengths, counted, constant) / constant


def prompt_mean(lengths: Lengths, counted: Counted, constant: int) -> Weights:
    """Returns 1 / (prompts x tokens of this prompt's completions): every prompt weighs the same,
    and so does every token within a prompt. ScaleRL, arXiv 2510.13786. `lengths` are the tokens of
    each completion, `counted` says which completions count; `constant` is not read."""
    # A prompt whose completions are all empty still counts: its lack of tokens is no reason to give
    # the others more weight.
    tokens = np.where(counted, lengths, 0).sum(axis=1, keepdims=True)
    prompts = max(counted.any(axis=1).sum(), 1)
    return np.broadcast_to(1.0 / (prompts * np.maximum(tokens, 1)), lengths.shape)


def token_weights(
    mode: Callable[..., np.ndarray],
    lengths: Lengths,
    valid: Bool[np.ndarray, "P G"],
    counts: Bool[np.ndarray, "P G"],
    constant: int = 0,
) -> Weights:
    """Returns the weight of each token of each completion of one update, float64[P, G].

    `lengths` are numbers of sampled tokens in the whole update, not in a micro-batch; 0 for a
    completion that is masked out of the loss. `counts` is False for completions that are left out
    of the loss and its denominator (those of groups without variance, if these are excluded). A
    completion that does not count, is not `valid`, or has no sampled token has weight 0; one that
    counts, is valid and has no sampled token is still one of the completions that the seq-means
    divide by. If nothing counts, all weights are 0. `constant` is the length that
    seq-mean-token-sum-norm divides by, 1 or more. `mode` is one of the functions above, like
    `token_mean`.
    """
    # A completion without sampled tokens still counts as one: leaving it out would raise the weight
    # of the group's others.
    counted = valid & counts
    return np.where(counted & (lengths > 0), mode(lengths, counted, constant), 0.0)
