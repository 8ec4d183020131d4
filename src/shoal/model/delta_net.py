"""The gated delta rule and its convolution (being written)."""

from __future__ import annotations

import jax


def chain_before(segment: jax.Array, prompt: jax.Array, count: int) -> jax.Array:
    raise NotImplementedError


def convolve(x: jax.Array, weight: jax.Array, before: jax.Array) -> jax.Array:
    raise NotImplementedError


def convolve_after(
    x: jax.Array, tail: jax.Array, weight: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    raise NotImplementedError


def delta_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    segment: jax.Array,
    prompt: jax.Array,
) -> jax.Array:
    raise NotImplementedError


def delta_sequence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    raise NotImplementedError


def delta_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    raise NotImplementedError
