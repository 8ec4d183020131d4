"""How the trainer's weights become the sampler's: the same arrays where possible, else a verified copy."""

from __future__ import annotations

from functools import lru_cache

import jax

from shoal.mesh import Program
from shoal.model.transformer import Model, checksum, is_param_spec, layers_apart, published_specs, reads_layers_apart
from shoal.types import Params

PROGRAMS_KEPT = 4
"""Programs (models) kept by this process."""


def publish_to(model: Model, params: Params) -> Params:
    """The sampler's parameters for `model`: `params` themselves on one device and in one type, else a copy.

    A copy to another layout is compared with the original by checksum, so that sampling from old or missing weights
    cannot go unnoticed. RuntimeError where they differ.
    """
    mesh, is_cast = model.role.mesh, any(leaf.dtype != model.dtype for leaf in jax.tree.leaves(params))
    # The arrays themselves where nothing changes: a copy would cost a model's memory at each step.
    if mesh.size == 1 and not is_cast and not reads_layers_apart(model.role):
        return params
    # Cast before the copy: half of the bytes move where the sampler computes in bfloat16.
    cast = _cast_to(model)(params)
    if mesh.size == 1:
        return cast
    copy = jax.device_put(cast, jax.tree.map(lambda shape: shape.sharding, published_shapes(model)))
    sums = int(checksum(cast)), int(checksum(copy))
    if sums[0] != sums[1]:
        raise RuntimeError(f"the sampler's weights differ from the trainer's (checksums {sums[1]:#x}, {sums[0]:#x}): "
                           "a copy between devices failed; resume the run from its newest checkpoint")
    return copy


def published_shapes(model: Model) -> Params:
    """Shapes, type and layout of what `publish_to` returns."""
    return jax.tree.map(
        lambda d: jax.ShapeDtypeStruct(d.shape, model.dtype, sharding=model.role.sharding(d.axes, d.shape)),
        published_specs(model), is_leaf=is_param_spec)


@lru_cache(PROGRAMS_KEPT)
def _cast_to(model: Model) -> Program:
    def cast(params: Params) -> Params:
        params = jax.tree.map(lambda x: x.astype(model.dtype), params)
        return layers_apart(params) if reads_layers_apart(model.role) else params

    return model.role.jit(cast)
