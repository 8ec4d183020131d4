"""Adapters (LoRA): which weights they change, and their merge into these."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shoal.mesh import Role
from shoal.model.architecture import PRODUCTS, Adapter, Architecture
from shoal.model.linear import Adapted
from shoal.model.parameters import Parameters, param_specs, without_adapter
from shoal.records import ShoalError
from shoal.text import did_you_mean

ALL = "all-linear"
"""PEFT's name for all products of a layer."""


def make_adapter(
    a: Architecture, rank: int, alpha: float, targets: Sequence[str], rslora: bool
) -> Adapter:
    """The adapter of an architecture; ShoalError for targets that it does not have, and for too
    high a rank.

    `targets`: names of products (q_proj, ...), ends of their paths (self_attn.q_proj), one regular
    expression over whole paths (`.*_attn\\.(q|v)_proj`), or `all-linear`.
    """
    paths = _paths(a)
    covered: list[set[str]] = [
        set() for _ in range(a.num_layers)
    ]  # of each layer, the products with an adapter
    named_by: dict[str, str] = {}  # product -> a target that names it
    for target in targets:
        layers = [
            {
                name
                for name, path in paths.items()
                if _matches(target, name, path.replace(".0.", f".{layer}."))
            }
            for layer in range(a.num_layers)
        ]
        if not any(layers):
            raise ShoalError(
                f"model.lora.targets={target}: no product of the model is called so; it has "
                f"{', '.join(PRODUCTS)}, and {ALL} for all of them{did_you_mean(target, PRODUCTS)}"
            )
        for products, found in zip(covered, layers, strict=True):
            products |= found
            named_by |= dict.fromkeys(found, target)
    # PEFT writes the product of each layer in full where an adapter has fewer than 20: together
    # they may be all layers.
    for name, target in named_by.items():
        if any(name not in products for products in covered):
            raise ShoalError(
                f"model.lora.targets={target} is a product in some layers alone: give one of all "
                "layers"
            )
    chosen = tuple(name for name in paths if name in named_by)
    sizes = {
        spec.name: min(spec.shape[1:])
        for spec in jax.tree.leaves(param_specs(a))
        if len(spec.shape) == 3
    }
    least, name = min(
        (sizes[f"{paths[name]}.weight".replace(".0.", ".{layer}.")], name) for name in chosen
    )
    if not 1 <= rank <= least:
        raise ShoalError(
            f"model.lora.rank={rank}: expected 1 to {least}, the smaller dimension of {name}"
        )
    return Adapter(rank, alpha, chosen, rslora)


def _paths(a: Architecture) -> dict[str, str]:
    """Name -> path of each product of the first layer."""
    paths = [
        spec.tensor_names[0].removesuffix(".weight")
        for spec in jax.tree.leaves(param_specs(a.base))
        if len(spec.shape) == 3
    ]
    return {path.rpartition(".")[2]: path for path in paths}


def _matches(target: str, name: str, path: str) -> bool:
    if target in (ALL, name) or path.endswith(f".{target}"):
        return True
    try:
        return re.fullmatch(target, path) is not None
    except re.error:
        return False


def merge(a: Architecture, parameters: Parameters, role: Role) -> Parameters:
    """The parameters of the base with the adapter's change added to each kernel, in float32."""

    def add(weight: Any) -> Any:
        if not isinstance(weight, Adapted):
            return weight
        change = jnp.matmul(
            weight.a.astype(jnp.float32), weight.b.astype(jnp.float32), precision="highest"
        )
        return weight.kernel.astype(jnp.float32) + change * weight.scale

    def is_adapted(weight: Any) -> bool:
        return isinstance(weight, Adapted)

    if a.adapter is None:
        return parameters
    merged = role.jit(lambda weights: jax.tree.map(add, weights, is_leaf=is_adapted))(parameters)
    return jax.tree.unflatten(
        jax.tree.structure(without_adapter(a, parameters)), jax.tree.leaves(merged)
    )
