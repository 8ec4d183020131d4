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


def linear(weight: Weight, x: jax.Array, out_dtype: Any = None) -> jax.Array:
    """x[..., in] -> [..., out] in x's type, to which the weight is cast; `out_dtype` keeps the sums in a wider one."""
    if isinstance(weight, Biased):
        return linear(weight.kernel, x, out_dtype) + weight.bias.astype(out_dtype or x.dtype)
    # Two plain dimensions: on CPU the weight's gradient over several batch dimensions is a fifth slower.
    flat = x.reshape(-1, x.shape[-1])
    return jnp.matmul(flat, weight.astype(x.dtype), preferred_element_type=out_dtype).reshape(*x.shape[:-1], -1)
