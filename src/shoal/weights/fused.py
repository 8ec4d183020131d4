"""Tensors in files that hold all experts of a layer, where the parameters have a name for each.

    in files                                        parts, as `ParamSpec` names them
    mlp.experts.gate_up_proj [E, 2 F, D]            mlp.experts.{e}.gate_proj.weight [F, D]
                                                    mlp.experts.{e}.up_proj.weight [F, D]
    mlp.experts.down_proj [E, D, F]                 mlp.experts.{e}.down_proj.weight [D, F]

A fused tensor is read as views of its parts, and written from them, so nothing else knows of it.
Which of a model's tensors are fused is seen from the names in its files. Of an expert, the rows of
gate come before those of up; or, in files that are "interleaved" (`Family.expert_files`), matrices
are [in, out], and columns of gate and up alternate:

    mlp.experts.gate_up_proj [E, D, 2 F]            mlp.experts.{e}.gate_proj.weight [D, F]
    mlp.experts.gate_up_proj_bias [E, 2 F]          mlp.experts.{e}.gate_proj.bias [F]

Adapters on experts are always fused (PEFT's `ParamWrapper`). Names without their beginning:

    mlp.experts.base_layer.lora_A.weight [E r, D]  mlp.experts.{e}.gate_up_proj.lora_A.weight [r, D]
    mlp.experts.base_layer.lora_B.weight [2F, r E] mlp.experts.gate_proj.lora_B.weight [F, r, E]
                                                   mlp.experts.up_proj.lora_B.weight [F, r, E]
    mlp.experts.lora_A.weight [E r, F]             mlp.experts.{e}.down_proj.lora_A.weight [r, F]
    mlp.experts.lora_B.weight [D, r E]             mlp.experts.down_proj.lora_B.weight [D, r, E]
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from shoal.model.architecture import EXPERT_PRODUCTS, Architecture
from shoal.model.families import FAMILIES
from shoal.model.linear import Adapted, Biased, Quantised
from shoal.model.parameters import ADAPTER_PREFIX, ExpertWeights, ParamSpec
from shoal.records import ShoalError
from shoal.weights.mxfp4 import Mxfp4Tensor
from shoal.weights.tensor_files import OutputTensor, StoredTensor

Run = tuple[int, np.ndarray]
"""(number of the first row, values of rows)."""


@dataclass(frozen=True)
class FusedTensor(ABC):
    """A tensor in files that consists of other tensors of one shape."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]  # names, in order
    part_shape: tuple[int, ...]

    @abstractmethod
    def opened(self, stored: StoredTensor) -> dict[str, StoredTensor]:
        """Returns the parts of a stored tensor of this shape, by name."""

    def joined(self, parts: Mapping[str, OutputTensor]) -> OutputTensor:
        """Returns the tensor to be written that consists of these parts, given by name."""
        in_order = [parts[name] for name in self.parts]
        return OutputTensor(self.name, self.shape, partial(self._runs, in_order), in_order[0].dtype)

    @abstractmethod
    def _runs(self, parts: Sequence[OutputTensor], dtype: np.dtype) -> Iterator[Run]:
        """Yields the tensor in runs of rows, in a type, as `OutputTensor.runs` does."""


@dataclass(frozen=True)
class Concatenated(FusedTensor):
    """Its parts are stored one after the other."""

    def opened(self, stored: StoredTensor) -> dict[str, StoredTensor]:
        opened: dict[str, StoredTensor] = {}
        for number, name in enumerate(self.parts):
            opened[name] = stored.part(number, self.part_shape)
        return opened

    def _runs(self, parts: Sequence[OutputTensor], dtype: np.dtype) -> Iterator[Run]:
        # A row is as long as a part's.
        for number, part in enumerate(parts):
            first = number * self.part_shape[0]
            for row, values in part.runs(dtype):
                yield first + row, values


@dataclass(frozen=True)
class Interleaved(FusedTensor):
    """Its parts are stored pair after pair. A row has the numbers of a row of both, `chunk` of one
    and `chunk` of the other in turn: with 1 their columns alternate, with a whole row their
    rows."""

    chunk: int = 1

    def opened(self, stored: StoredTensor) -> dict[str, StoredTensor]:
        of_both = (*self.part_shape[:-1], 2 * self.part_shape[-1])
        opened: dict[str, StoredTensor] = {}
        for number, name in enumerate(self.parts):
            pair, place = divmod(number, 2)
            both = stored.part(pair, of_both)
            if isinstance(both, Mxfp4Tensor):
                opened[name] = both.every_second_column(place)
                continue
            part = replace(both, shape=self.part_shape)
            opened[name] = InterleavedPart(**vars(part), place=place, chunk=self.chunk)
        return opened

    def _runs(self, parts: Sequence[OutputTensor], dtype: np.dtype) -> Iterator[Run]:
        # A row is twice as long as a part's.
        for number in range(0, len(parts), 2):
            first = number // 2 * self.part_shape[0]
            # Both have one layout, so that they come in the same runs.
            runs = zip(parts[number].runs(dtype), parts[number + 1].runs(dtype), strict=True)
            for (row, values), (other_row, others) in runs:
                assert row == other_row
                in_chunks = (len(values), -1, self.chunk)
                pairs = np.stack([values.reshape(in_chunks), others.reshape(in_chunks)], axis=2)
                yield first + row, pairs.reshape(len(values), -1)


@dataclass(frozen=True)
class InterleavedPart(StoredTensor):
    """One of two tensors of `shape` that are stored as one, with `chunk` numbers of each in turn.
    `offset` is that of both."""

    place: int  # 0 or 1
    chunk: int

    def read(self, start: int, values: np.ndarray) -> None:
        row_size = math.prod(values.shape[1:])
        pairs = np.empty((len(values), row_size // self.chunk, 2, self.chunk), values.dtype)
        super().read(start, pairs)
        values[...] = pairs[:, :, self.place].reshape(values.shape)

    def sample(self) -> bytes:
        both = (2, *self.shape)
        return StoredTensor(self.file, self.name, self.dtype, both, self.offset).sample()


def is_interleaved(a: Architecture) -> bool:
    """True if the family's files have the experts' matrices as [in, out], with columns of gate and
    up in turn."""
    return FAMILIES[a.model_type].expert_files == "interleaved"


def file_specs(a: Architecture, specs: Any) -> Any:
    """Returns a tree of `ParamSpec` with the dimensions of tensors in the order that they have in
    the family's files: only matrices of interleaved experts have another than elsewhere."""

    def in_files(spec: ParamSpec) -> ParamSpec:
        is_of_adapter = spec.name.startswith(ADAPTER_PREFIX)
        if spec.num_experts == 1 or is_of_adapter:
            return spec
        return replace(spec, transposed=False)

    return jax.tree.map(in_files, specs) if is_interleaved(a) else specs


def fused_tensors(a: Architecture, specs: Any) -> list[FusedTensor]:
    """Returns the tensors that files may have in place of the experts' own, for a tree of
    `file_specs`, in which those that are not asked for are None."""

    def is_experts(node: Any) -> bool:
        return isinstance(node, ExpertWeights)

    fused: list[FusedTensor] = []
    for node in jax.tree.leaves(specs, is_leaf=is_experts):
        if is_experts(node):
            fused += _of_products(a, [node.gate, node.up], "gate_up_proj")
            fused += _of_products(a, [node.down], "down_proj")
    return fused


def _of_products(a: Architecture, products: Sequence[Any], name: str) -> list[FusedTensor]:
    """Returns the fused tensors, called `name`, of one product of experts, or of two side by side,
    given as their trees of specs."""
    alternate = len(products) == 2 and is_interleaved(a)
    fused: list[FusedTensor] = []
    if isinstance(products[0], Biased):
        biases = [product.bias for product in products]
        fused += _of_experts(biases, f"{name}_bias", alternate)
        products = [product.kernel for product in products]
    if isinstance(products[0], Adapted):
        fused += _of_adapters(a, products, name, alternate)
        products = [product.kernel for product in products]
    if isinstance(products[0], Quantised):
        products = [product.values for product in products]
    return fused + _of_experts(products, name, alternate)


def _of_experts(specs: Sequence[ParamSpec | None], name: str, alternate: bool) -> list[FusedTensor]:
    """Returns the fused tensors of all layers, called `name`, of which each expert has a part of
    each of `specs`. Empty if the specs are None."""
    present = [spec for spec in specs if spec is not None]
    if not present:
        return []
    names = [spec.names_by_index for spec in present]
    part_shape = present[0].tensor_shape
    num_experts = present[0].num_experts
    if alternate:
        shape = (num_experts, *part_shape[:-1], 2 * part_shape[-1])
    else:
        shape = (num_experts, len(present) * part_shape[0], *part_shape[1:])
    fused = []
    for layer, place in enumerate(_places(present[0])):
        parts = []
        for expert in range(num_experts):
            parts += [of_spec[layer, expert] for of_spec in names]
        kind = Interleaved if alternate else Concatenated
        fused.append(kind(f"{place}.{name}", shape, tuple(parts), part_shape))
    return fused


def _of_adapters(
    a: Architecture, adapted: Sequence[Adapted], name: str, alternate: bool
) -> list[FusedTensor]:
    """Returns the fused tensors of all layers of an adapter on one product, or on two side by side,
    which have one first matrix."""
    assert a.adapter is not None
    # PEFT puts an adapter on a module's second parameter around that on the first.
    has_both = set(EXPERT_PRODUCTS) <= set(a.adapter.targets)
    inner = ".base_layer" if has_both and name == "gate_up_proj" else ""
    first: ParamSpec = adapted[0].a
    second: list[ParamSpec] = [weight.b for weight in adapted]
    names_of_first = first.names_by_index
    names_of_second = [spec.names_by_index for spec in second]
    rank, width = first.tensor_shape
    columns, *of_column = second[0].tensor_shape  # [columns, rank, E]
    row_size = math.prod(of_column)
    fused = []
    for layer, place in enumerate(_places(first)):
        parts = tuple(names_of_first[layer, expert] for expert in range(first.num_experts))
        shape = (len(parts) * rank, width)
        whole = f"{place}{inner}.lora_A.weight"
        fused.append(Concatenated(whole, shape, parts, (rank, width)))
        parts = tuple(of_spec[layer,] for of_spec in names_of_second)
        shape = (len(parts) * columns, row_size)
        whole = f"{place}{inner}.lora_B.weight"
        part_shape = (columns, *of_column)
        if alternate:
            fused.append(Interleaved(whole, shape, parts, part_shape, chunk=row_size))
        else:
            fused.append(Concatenated(whole, shape, parts, part_shape))
    return fused


def _places(spec: ParamSpec) -> Iterator[str]:
    """Yields what is before the number of an expert in the names of a parameter's tensors, for each
    layer."""
    place, _, _ = spec.name.partition(".{expert}")
    for index in range(spec.shape[0]):
        layer = spec.layers[index] if spec.layers else index
        yield place.format(layer=layer)


def with_parts(
    stored: Mapping[str, StoredTensor], fused: Iterable[FusedTensor], where: str
) -> dict[str, StoredTensor]:
    """Returns the stored tensors by name, with the parts of fused ones in their places. ShoalError
    if a fused one has another shape; `where` is what the message says after "The tensors in"."""
    opened = dict(stored)
    for tensor in fused:
        found = stored.get(tensor.name)
        if found is None:
            continue
        if found.shape != tensor.shape:
            raise ShoalError(
                f"The tensors in {where}. not as expected: {tensor.name} {list(found.shape)} "
                f"instead of {list(tensor.shape)}."
            )
        del opened[tensor.name]
        opened |= tensor.opened(found)
    return opened


def with_fused(
    tensors: Iterable[OutputTensor], fused: Iterable[FusedTensor]
) -> Iterator[OutputTensor]:
    """Yields tensors to be written, with each of `fused` in the place of the last of its parts."""
    by_part: dict[str, FusedTensor] = {}
    for whole in fused:
        by_part |= dict.fromkeys(whole.parts, whole)
    waiting: dict[str, dict[str, OutputTensor]] = {}
    for tensor in tensors:
        whole = by_part.get(tensor.name)
        if whole is None:
            yield tensor
            continue
        parts = waiting.setdefault(whole.name, {})
        parts[tensor.name] = tensor
        if len(parts) == len(whole.parts):
            yield whole.joined(waiting.pop(whole.name))
