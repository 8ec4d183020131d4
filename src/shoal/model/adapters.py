"""Adapters (LoRA): decides which weights an adapter changes, and merges adapters into the
weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from shoal.mesh import Role
from shoal.model.architecture import EXPERT_PRODUCTS, PRODUCTS, Adapter, Architecture
from shoal.model.linear import Adapted
from shoal.model.parameters import (
    ExpertWeights,
    Parameters,
    ParamSpec,
    kernel_specs,
    target_of,
    without_adapter,
)
from shoal.records import ShoalError
from shoal.text import did_you_mean

ALL = "all-linear"
"""PEFT's name for all matrices of a layer."""


def make_adapter(
    a: Architecture, rank: int, alpha: float, targets: Sequence[str], rslora: bool
) -> Adapter:
    """Returns the adapter that these settings mean for an architecture. ShoalError if a target
    matches no product, or a product in some layers alone, or if the rank is too high.

    `targets`, of which there is at least one, are names of products (q_proj, ...), ends of their
    paths (self_attn.q_proj), one regular expression over whole paths (`.*_attn\\.(q|v)_proj`), or
    `all-linear`. The adapter's own targets are names of products, in the model's order; `rank`,
    `alpha` and `rslora` are its fields as they are.
    """
    paths = _paths_by_layer(a)
    covered: list[set[str]] = []  # by layer: the products that have an adapter
    for _ in range(a.num_layers):
        covered.append(set())
    named_by: dict[str, str] = {}  # product -> a target that names it
    for target in targets:
        is_known = False
        for layer in range(a.num_layers):
            names = _products_of(target, paths, layer)
            if names:
                is_known = True
            covered[layer] |= names
            for name in names:
                named_by[name] = target
        if not is_known:
            raise ShoalError(
                f"model.lora.targets={target}: no product of the model is called so; it has "
                f"{', '.join(PRODUCTS)}, and {ALL} for all of them{did_you_mean(target, PRODUCTS)}"
            )
    # PEFT lists the product of each layer in full if an adapter has fewer than 20: together these
    # may be all layers.
    for name, target in named_by.items():
        if any(name not in products for products in covered):
            raise ShoalError(
                f"model.lora.targets={target} is a product in some layers alone: give one of all "
                "layers"
            )
    # in the model's order, which is that of `paths`
    chosen = tuple(name for name in paths if name in named_by)
    most_ranks = {}
    for spec in _adaptable(a):
        most_ranks[_product_name(spec)] = min(spec.tensor_shape)
    smallest = min(chosen, key=lambda name: (most_ranks[name], name))
    if not 1 <= rank <= most_ranks[smallest]:
        raise ShoalError(
            f"model.lora.rank={rank}: expected 1 to {most_ranks[smallest]}, the smaller dimension "
            f"of {smallest}"
        )
    return Adapter(rank, alpha, chosen, rslora)


def _adaptable(a: Architecture) -> list[ParamSpec]:
    """Returns the specs of the kernels that an adapter may be on, each for a stack of layers: of
    all products but routers and gates of shared experts, whose few columns are no matter."""
    known = (*PRODUCTS, *EXPERT_PRODUCTS)
    return [spec for spec in kernel_specs(a) if _product_name(spec) in known]


def _product_name(kernel: ParamSpec) -> str:
    """Returns the name of a product, such as "q_proj", from the spec of its kernel."""
    return target_of(kernel.name.removesuffix(".weight"))


def _paths_by_layer(a: Architecture) -> dict[str, list[list[str]]]:
    """Returns product name -> for each layer, the paths of the product's tensors in that layer:
    {"q_proj": [["model.layers.0.self_attn.q_proj"], ...], ...}."""
    paths: dict[str, list[list[str]]] = {}
    for spec in _adaptable(a):
        by_layer: list[list[str]] = [[] for _ in range(a.num_layers)]
        for (layer, *_), tensor_name in spec.names_by_index.items():
            path = tensor_name.removesuffix(".weight")
            if spec.num_experts > 1:
                # an adapter is on the parameter that holds all experts
                place, _, _ = path.partition("experts.")
                path = place + _product_name(spec)
            if path not in by_layer[layer]:
                by_layer[layer].append(path)
        paths[_product_name(spec)] = by_layer
    return paths


def _products_of(target: str, paths: Mapping[str, list[list[str]]], layer: int) -> set[str]:
    """Returns the names of a layer's products that a target means: by their name, the end of their
    path, a regular expression, or `all-linear`. A product counts only if the target matches each of
    its tensors. `paths` is what `_paths_by_layer` returned."""
    names = set()
    for name, by_layer in paths.items():
        if all(_matches(target, name, path) for path in by_layer[layer]):
            names.add(name)
    return names


def _matches(target: str, name: str, path: str) -> bool:
    """True if a target is `all-linear`, the product's name, the end of its path, or a regular
    expression that matches its whole path. A target that is no regular expression matches nothing
    else."""
    if target in (ALL, name) or path.endswith(f".{target}"):
        return True
    try:
        return re.fullmatch(target, path) is not None
    except re.error:
        return False


def merge(a: Architecture, parameters: Parameters, role: Role) -> Parameters:
    """Returns the parameters of the base model with the adapter's change added to each kernel, in
    float32; `parameters` itself if there is no adapter. Kernels without an adapter, and all other
    parameters, keep their type. The arrays that were passed stay as they are."""
    if a.adapter is None:
        return parameters

    def is_adapted(weight: Any) -> bool:
        return isinstance(weight, Adapted)

    def is_experts(node: Any) -> bool:
        return isinstance(node, ExpertWeights)

    def with_own_adapters(node: Any) -> Any:
        """Returns experts with an adapter of its own in each kernel; anything else as it is."""
        if not is_experts(node):
            return node
        gate, up, down = node.kernels
        return replace(node, gate=gate, up=up, down=down)

    def merged_weight(weight: Any) -> Any:
        """Returns a kernel with its adapter's change added, in float32; any other weight as it
        is."""
        if not is_adapted(weight):
            return weight
        change = jnp.matmul(
            weight.a.astype(jnp.float32), weight.b.astype(jnp.float32), precision="highest"
        )
        return weight.kernel.astype(jnp.float32) + change * weight.scale

    def merged_weights(weights: Parameters) -> Any:
        whole = jax.tree.map(with_own_adapters, weights, is_leaf=is_experts)
        return jax.tree.map(merged_weight, whole, is_leaf=is_adapted)

    merged = role.jit(merged_weights)(parameters)
    base_structure = jax.tree.structure(without_adapter(a, parameters))
    return jax.tree.unflatten(base_structure, jax.tree.leaves(merged))
