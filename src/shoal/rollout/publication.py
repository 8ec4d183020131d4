"""How the trainer's weights become the sampler's: the same arrays where possible, else a verified copy."""

from __future__ import annotations

from functools import lru_cache

import jax

from shoal.mesh import Program
from shoal.model.transformer import Model, checksum, is_param_spec, param_specs, shardings
from shoal.types import Params

PROGRAMS_KEPT = 4
"""Programs (models) kept by this process."""


def publish_to(model: Model, params: Params) -> Params:
    """The sampler's parameters for `model`: `params` themselves on one device and in one type, else a copy.

    A copy to another layout is compared with the original by checksum, so that sampling from old or missing weights
    cannot go unnoticed. RuntimeError where they differ.
    """
    mesh = model.role.mesh
    # The arrays themselves where nothing changes: a copy would cost a model's memory at each step.
    if mesh.size == 1 and all(leaf.dtype == model.dtype for leaf in jax.tree.leaves(params)):
        return params
    # Cast before the copy: half of the bytes move where the sampler computes in bfloat16.
    cast = _cast_to(model)(params)
    if mesh.size == 1:
        return cast
    copy = jax.device_put(cast, shardings(model.architecture, model.role))
    sums = int(checksum(cast)), int(checksum(copy))
    if sums[0] != sums[1]:
        raise RuntimeError(f"the sampler's weights differ from the trainer's (checksums {sums[1]:#x}, {sums[0]:#x}): "
                           "a copy between devices failed; resume the run from its newest checkpoint")
    return copy


def published_shapes(model: Model) -> Params:
    """Shapes, type and layout of what `publish_to` returns."""
    return jax.tree.map(
        lambda d, sharding: jax.ShapeDtypeStruct(d.shape, model.dtype, sharding=sharding),
        param_specs(model.architecture), shardings(model.architecture, model.role), is_leaf=is_param_spec)


@lru_cache(PROGRAMS_KEPT)
def _cast_to(model: Model) -> Program:
    return model.role.jit(lambda params: jax.tree.map(lambda x: x.astype(model.dtype), params))
