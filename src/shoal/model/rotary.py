"""Rotary positions (Su et al. 2021, arXiv:2104.09864): rotates pairs of a head's dimensions by
angles that grow with the position."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shoal.model.architecture import Architecture


def frequencies(a: Architecture) -> jax.Array:
    """Returns the rotary frequencies, float32[A/2], scaled by the architecture's rule: none,
    `linear`, which divides all by `factor`, or `llama3`.

    Llama 3's rule divides the frequencies of long wavelengths by `factor`, keeps those of short
    ones and interpolates between. https://github.com/meta-llama/llama-models, `apply_scaling`.
    """
    base = a.rope_theta ** -(jnp.arange(0, a.head_dim, 2, dtype=jnp.float32) / a.head_dim)
    scaling = a.rope_scaling
    if scaling is None:
        return base
    if scaling.kind == "linear":
        return base / scaling.factor
    # Llama 3.1's rule is computed from turns instead of wavelengths: the same bounds, without a
    # division.
    turns = scaling.original_max_position * base / (2 * jnp.pi)  # within the original length
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    # 1 for short wavelengths, which are kept; 0 for long ones, which are divided
    share = jnp.clip(share, 0.0, 1.0)
    return share * base + (1.0 - share) * base / scaling.factor


def rotary(a: Architecture, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin) of the angles at positions[R, T], float32[R, T, 1, A/2] each."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies(a)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + A/2) of x[R, T, heads, A] by the angles: the layout of Hugging Face
    checkpoints. cos and sin are those of `rotary`; the result has x's type."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


@jax.custom_vjp
def rotate_by_product(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Computes `rotate`, but exchanges the halves of a head by a product with a permutation matrix,
    which is exact in any type: XLA for TPU would copy halves of a register's 128 lanes."""
    half = x.shape[-1] // 2
    # x times this matrix is [second half, first half].
    exchange = jnp.roll(jnp.eye(2 * half, dtype=x.dtype), half, axis=1)
    cos = jnp.concatenate([cos, cos], -1)
    sin = jnp.concatenate([-sin, sin], -1)
    rotated = x.astype(jnp.float32) * cos + jnp.matmul(x, exchange).astype(jnp.float32) * sin
    return rotated.astype(x.dtype)


def _rotate_forward(
    x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rotate_by_product(x, cos, sin), (cos, sin)


def _rotate_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple:
    """Returns the gradient of x, which is the result's gradient rotated back."""
    cos, sin = kept
    return rotate_by_product(gradient, cos, -sin), None, None


rotate_by_product.defvjp(_rotate_forward, _rotate_backward)
