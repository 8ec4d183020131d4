"""The one matrix product of the model: kinds of weight (plain, biased) differ here and nowhere else."""

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


def linear(weight: Weight, x: jax.Array, out_dtype: Any = None) -> jax.Array:
    """x[..., in] -> [..., out]: the weight is cast to x's type, and so is the result unless `out_dtype` is given."""
    if isinstance(weight, Biased):
        return linear(weight.kernel, x, out_dtype) + weight.bias.astype(out_dtype or x.dtype)
    # Flattened to two dimensions: on CPU the weight's gradient over several batch dimensions is a fifth slower.
    flat = x.reshape(-1, x.shape[-1])
    return jnp.matmul(flat, weight.astype(x.dtype), preferred_element_type=out_dtype).reshape(*x.shape[:-1], -1)
