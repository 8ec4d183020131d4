"""How token losses become one number: a weight a token, so that loss = sum(weight * token_loss).

Weights are made once, on the host, in float64, from all completions of an update; any split of that update into
micro-batches then adds up to the same gradient. Each mode is a pure function of the completions' lengths and stands
in `AGGREGATIONS` under the name that a user sets.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int


def token_mean(lengths: Int[np.ndarray, "P G"], counted: Bool[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
    """1 / (tokens of all completions): every token weighs the same. DAPO, arXiv 2503.14476, eq. 8."""
    return np.full(lengths.shape, 1.0 / max(lengths[counted].sum(), 1))


def seq_mean_token_mean(lengths: Int[np.ndarray, "P G"], counted: Bool[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
    """1 / (completions x tokens of this one): every completion weighs the same. GRPO: DeepSeekMath,
    arXiv 2402.03300, eq. 3."""
    return 1.0 / (max(counted.sum(), 1) * np.maximum(lengths, 1.0))


def seq_mean_token_sum(lengths: Int[np.ndarray, "P G"], counted: Bool[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
    """1 / completions: the sum over tokens, as in Dr. GRPO, arXiv 2503.20783, section 3.2, which has no length in
    the denominator."""
    return np.full(lengths.shape, 1.0 / max(counted.sum(), 1))


AGGREGATIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
}
"""By the names of `algorithm.aggregation`."""


def token_weights(
    mode: str,
    lengths: Int[np.ndarray, "P G"],
    valid: Bool[np.ndarray, "P G"],
    counts: Bool[np.ndarray, "P G"],
) -> Float[np.ndarray, "P G"]:
    """The weight of each token of each completion of one update, float64[P, G].

    `lengths` are numbers of drawn tokens in the whole update, not in a micro-batch. `counts` is False for completions
    that leave the loss and its denominator (`degenerate="renormalise"`: those of groups without variance). A
    completion that does not count, is not `valid`, or has no drawn token has weight 0; one that counts, is valid and
    has no drawn token is still one of the completions that the seq-means divide by. Nothing counts: all weights 0.
    """
    counted = valid & counts
    return np.where(counted & (lengths > 0), AGGREGATIONS[mode](lengths, counted), 0.0)
