"""What a model could have said at each token of a completion: the entropy there, and the likeliest tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.model.segment_attention import segment_attention
from shoal.model.transformer import Model, forward, head_projection, output_head
from shoal.types import Completion, Params

CHUNK = 128
"""Tokens whose logits exist at once: 150,000 floats each."""


def likeliest_tokens(model: Model, params: Params, prompt_ids: np.ndarray, completion: Completion, temperature: float,
                     most: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(entropy[T], ids[T, most], log-probs[T, most]) of a completion's tokens, at the temperature that sampled them.

    `size` is a length for which programs are compiled once, at least that of prompt and completion."""
    ids = np.concatenate([prompt_ids, completion.token_ids]).astype(np.int32)
    tokens = np.zeros((1, size), np.int32)
    tokens[0, :len(ids)] = ids
    hidden = _states(model, params, jnp.asarray(tokens), len(ids))
    # The state before a token gives its distribution; a completion's first one follows the prompt.
    before = np.arange(len(prompt_ids) - 1, len(ids) - 1)
    parts = []
    for start in range(0, len(before), CHUNK):
        places = np.resize(before[start:start + CHUNK], CHUNK)
        parts.append(jax.device_get(_distributions(model, most, params, hidden[:, places], temperature)))
    entropy, chosen, logprobs = (np.concatenate([part[n][0] for part in parts])[:len(before)] for n in range(3))
    return entropy, chosen, logprobs


@partial(jax.jit, static_argnums=0)
def _states(model: Model, params: Params, tokens: jax.Array, length: Any) -> jax.Array:
    segment = (jnp.arange(tokens.shape[1]) < length)[None].astype(jnp.int32)
    attention = segment_attention(model, segment, segment)
    return forward(model, params, tokens, jnp.arange(tokens.shape[1])[None], attention)[0]


@partial(jax.jit, static_argnums=(0, 1))
def _distributions(model: Model, most: int, params: Params, hidden: jax.Array, temperature: float) -> Any:
    logprobs = jax.nn.log_softmax(head_projection(model, output_head(params))(hidden) / temperature)
    entropy = -jnp.sum(jnp.exp(logprobs) * jnp.where(jnp.isneginf(logprobs), 0.0, logprobs), axis=-1)
    values, ids = jax.lax.top_k(logprobs, most)
    return entropy, ids, values
