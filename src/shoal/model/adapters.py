"""Adapters (LoRA): decides which weights an adapter changes, and merges adapters into the
weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from shoal.mesh import Role
from shoal.model.architecture import EXPERT_PRODUCTS, Adapter, Architecture
from shoal.model.layers import stacked_blocks
from shoal.model.linear import Adapted
from shoal.model.parameters import (
    TEXT_MODEL,
    TEXT_MODELS_WITHIN,
    ExpertWeights,
    Parameters,
    ParamSpec,
    param_specs,
    target_of,
    without_adapter,
)
from shoal.records import ShoalError
from shoal.text import did_you_mean

ALL = "all-linear"
"""PEFT's name for all linear modules of a layer. The parameters that hold all experts of a layer
are none."""


def make_adapter(
    a: Architecture,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    rslora: bool,
    passed_over: Sequence[str] = (),
) -> Adapter:
    """Returns the adapter that these settings mean for an architecture. ShoalError if a target
    matches no product, or a product in only some of the layers that have it, or if the rank is too
    high.

    `targets`, of which there is at least one, are names of products (q_proj, ...), ends of their
    paths (self_attn.q_proj), one regular expression over whole paths (`.*_attn\\.(q|v)_proj`), or
    `all-linear`. Only a target with `experts` in it means experts (EXPERT_PRODUCTS). A path may
    begin as in a class for several kinds of input. Targets that mean nothing but modules in
    `passed_over`, paths of what is not read of such a class, are left out.

    The adapter's own targets are names of products, in the model's order; `rank`, `alpha` and
    `rslora` are its fields as they are.
    """
    paths = _paths_by_layer(a)
    covered: dict[str, set[int]] = {}  # product -> layers in which it has an adapter
    named_by: dict[str, str] = {}  # product -> a target that names it
    for target in targets:
        is_known = False
        for name, by_layer in paths.items():
            layers = _layers_of(target, name, by_layer)
            if layers:
                is_known = True
                covered[name] = covered.get(name, set()) | layers
                named_by[name] = target
        if not is_known and not any(_is_meant(target, path) for path in passed_over):
            raise ShoalError(
                f"model.lora.targets={target}: no product of the model is called so; it has "
                f"{', '.join(paths)}, and {_all_text(paths)}{did_you_mean(target, list(paths))}"
            )
    # PEFT lists the product of each layer in full if an adapter has fewer than 20: together these
    # may be all layers.
    for name, target in named_by.items():
        if covered[name] != paths[name].keys():
            raise ShoalError(
                f"model.lora.targets={target} is a product in only some of the layers that have "
                "it: give one of all of them"
            )
    if not named_by:
        raise ShoalError(
            f"model.lora.targets={','.join(targets)}: none of these is a product of the text "
            f"model, which has {', '.join(paths)}"
        )
    # in the model's order, which is that of `paths`
    chosen = tuple(name for name in paths if name in named_by)
    limits = _rank_limits(a)
    limited = [name for name in chosen if name in limits]
    expected = "at least 1"
    is_too_high = False
    if limited:
        smallest = min(limited, key=lambda name: (limits[name], name))
        expected = f"1 to {limits[smallest]}, the smaller dimension of {smallest}"
        is_too_high = rank > limits[smallest]
    if rank < 1 or is_too_high:
        raise ShoalError(f"model.lora.rank={rank}: expected {expected}")
    return Adapter(rank, alpha, chosen, rslora)


def _all_text(names: Iterable[str]) -> str:
    """Returns what `all-linear` means of products with these names, for an error."""
    if set(names).isdisjoint(EXPERT_PRODUCTS):
        return f"{ALL} for all of them"
    return f"{ALL} for all of them but experts"


def _product_name(kernel: ParamSpec) -> str:
    """Returns the name of a product, such as "q_proj", from the spec of its kernel."""
    return target_of(kernel.name.removesuffix(".weight"))


def _adaptable(a: Architecture) -> list[ParamSpec]:
    """Returns the specs of the kernels that an adapter may be on, each for a stack of layers: of
    all products but routers, which are no linear modules."""
    kernels = []
    for block in stacked_blocks(param_specs(a.base).blocks):
        if block.experts is not None:
            block = replace(block, experts=replace(block.experts, router=None))
        kernels += [spec for spec in jax.tree.leaves(block) if spec.is_product]
    return kernels


def _rank_limits(a: Architecture) -> dict[str, int]:
    """Returns product name -> the highest rank of an adapter on it, the smaller dimension of its
    kernel. Products that give one number for each head, or for each token, have no limit."""
    limits: dict[str, int] = {}
    for spec in _adaptable(a):
        columns = spec.shape[-1]
        if columns not in (1, spec.heads):
            name = _product_name(spec)
            smaller = min(spec.tensor_shape)
            limits[name] = min(limits.get(name, smaller), smaller)
    return limits


def _paths_by_layer(a: Architecture) -> dict[str, dict[int, list[str]]]:
    """Returns product name -> number of each layer that has the product -> paths of its tensors
    there: {"q_proj": {0: ["model.layers.0.self_attn.q_proj"], ...}, ...}."""
    paths: dict[str, dict[int, list[str]]] = {}
    for spec in _adaptable(a):
        by_layer = paths.setdefault(_product_name(spec), {})
        for (place, *_), tensor_name in spec.names_by_index.items():
            path = tensor_name.removesuffix(".weight")
            if spec.num_experts > 1:
                # an adapter is on the parameter that holds all experts
                before, _, _ = path.partition("experts.")
                path = before + _product_name(spec)
            of_layer = by_layer.setdefault(spec.layers[place], [])
            if path not in of_layer:
                of_layer.append(path)
    return paths


def _layers_of(target: str, name: str, by_layer: Mapping[int, Sequence[str]]) -> set[int]:
    """Returns the numbers of the layers in which a target means the product `name`: by its name,
    the end of its path, a regular expression, or `all-linear`. A layer counts only if the target
    matches each of the product's tensors there. `by_layer` is an entry of `_paths_by_layer`."""
    layers = set()
    for layer, paths in by_layer.items():
        if all(_matches(target, name, path) for path in paths):
            layers.add(layer)
    return layers


def _matches(target: str, name: str, path: str) -> bool:
    """True if a target means the product `name` with this path. Experts are meant only by a target
    that says so: PEFT's `target_modules`, with `all-linear` among them, are modules, and in
    transformers' classes experts are parameters."""
    if name in EXPERT_PRODUCTS and "experts" not in target:
        return False
    if target in (ALL, name):
        return True
    within = path.removeprefix(TEXT_MODEL)
    paths = [path, *(beginning + within for beginning in TEXT_MODELS_WITHIN)]
    return any(_is_meant(target, one) for one in paths)


def _is_meant(target: str, path: str) -> bool:
    """True if a target is a path, its end, or a regular expression that matches the whole path. One
    that is no regular expression matches nothing else."""
    if path == target or path.endswith(f".{target}"):
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
