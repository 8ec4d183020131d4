"""Rotary positions (Su et al. 2021, arXiv:2104.09864): rotates pairs of a head's dimensions by
angles that grow with the position."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from shoal.model.architecture import Architecture, RopeScaling, Rotary

Ropes = tuple[tuple[jax.Array, jax.Array], ...]
"""The (cos, sin) of each of `Architecture.rotaries`."""


def frequencies(rotary: Rotary, head_dim: int) -> jax.Array:
    """Returns the rotary frequencies of heads of A = `head_dim` dimensions, float32[n]: n is half
    of the dimensions that are rotated. They are scaled by the rule of `rotary.scaling`: none,
    `linear`, which divides all by `factor`, or `llama3` or `yarn`, which divide those of long
    wavelengths, keep those of short ones and interpolate between.
    """
    rotated = int(head_dim * rotary.share)
    if rotary.over_whole_head:
        # Pairs beyond the share have the frequency 0: they are not rotated.
        base = _powers(rotary.theta, head_dim, rotated // 2)
        base = jnp.pad(base, (0, head_dim // 2 - rotated // 2))
    else:
        base = _powers(rotary.theta, rotated, rotated // 2)
    scaling = rotary.scaling
    if scaling is None:
        return base
    if scaling.kind == "linear":
        return base / scaling.factor
    if scaling.kind == "yarn":
        kept = _kept_by_yarn(rotary.theta, scaling, rotated)
    else:
        kept = _kept_by_llama3(base, scaling)
    return kept * base + (1.0 - kept) * base / scaling.factor


def _kept_by_llama3(base: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Returns the part of each of the frequencies `base` that Llama 3's rule keeps, float32[n].
    https://github.com/meta-llama/llama-models, `apply_scaling`."""
    # Llama 3.1's rule is computed from turns instead of wavelengths: the same bounds, without a
    # division.
    turns = scaling.original_max_position * base / (2 * jnp.pi)  # within the original length
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    # 1 for short wavelengths, which are kept; 0 for long ones, which are divided
    return jnp.clip(share, 0.0, 1.0)


def _kept_by_yarn(theta: float, scaling: RopeScaling, rotated: int) -> jax.Array:
    """Returns the part of each frequency of `rotated` dimensions that YaRN keeps, float32[rotated /
    2] (Peng et al. 2023, arXiv:2309.00071, section 3.2). Between its bounds it falls by the number
    of the frequency, not by its turns."""

    def number_with(turns: float) -> float:
        """Returns the number, with a fraction, of the frequency that makes so many turns within
        the original length."""
        wavelength = scaling.original_max_position / turns
        return rotated * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first = number_with(scaling.beta_fast)
    last = number_with(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    # Bounded by the dimensions, as in transformers, although there are half as many frequencies.
    first = max(first, 0)
    last = min(last, rotated - 1)
    if first == last:
        last += 0.001
    numbers = jnp.arange(rotated // 2, dtype=jnp.float32)
    return 1.0 - jnp.clip((numbers - first) / (last - first), 0.0, 1.0)


def _powers(theta: float, dims: int, count: int) -> jax.Array:
    """Returns theta ** -(2 i / dims) for i from 0 to `count` - 1, float32."""
    return theta ** -(jnp.arange(0, 2 * count, 2, dtype=jnp.float32) / dims)


def rotary(a: Architecture, positions: jax.Array) -> Ropes:
    """Returns for each of `a.rotaries` the (cos, sin) of the angles at positions[R, T], float32[R,
    T, 1, n] each, with n frequencies. YaRN multiplies both by a factor, which makes queries and
    keys longer."""
    angles = []
    for head_dim, kind in a.rotaries:
        of_kind = positions[..., None, None].astype(jnp.float32) * frequencies(kind, head_dim)
        length = kind.scaling.attention_factor if kind.scaling else 1.0
        angles.append((jnp.cos(of_kind) * length, jnp.sin(of_kind) * length))
    return tuple(angles)


def no_rotation(cos: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Returns the (cos, sin) that rotate nothing, for whole heads of `head_dim` dimensions; `cos`
    has the tokens' dimensions."""
    shape = (*cos.shape[:-1], head_dim // 2)
    return jnp.ones(shape, cos.dtype), jnp.zeros(shape, cos.dtype)


def rotate_part(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first 2 n dimensions of x[R, T, heads, A] by angles of n frequencies, like a
    narrower head; the others stay."""
    rotated = 2 * cos.shape[-1]
    return jnp.concatenate([rotate(x[..., :rotated], cos, sin), x[..., rotated:]], axis=-1)


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
