"""The one matrix product of the model. Kinds of weight (plain, biased; later adapted, quantised) differ here alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Biased:
    """A weight with a bias: `kernel[in, out]`, `bias[out]`."""

    kernel: Any
    bias: Any


Weight: TypeAlias = "jax.Array | Biased"


def linear(weight: Weight, x: jax.Array) -> jax.Array:
    """x[..., in] -> [..., out], in x's type; the weight is cast to it where it is used."""
    if isinstance(weight, Biased):
        return linear(weight.kernel, x) + weight.bias.astype(x.dtype)
    # Two plain dimensions: on CPU the weight's gradient over several batch dimensions is a fifth slower.
    return jnp.matmul(x.reshape(-1, x.shape[-1]), weight.astype(x.dtype)).reshape(*x.shape[:-1], -1)
