"""The files that a model came from: what they call its tensors, and what they hold besides them.

    in files                                     names of parameters (`ParamSpec`)
    model.language_model.layers.0.*              model.layers.0.*
    language_model.model.layers.0.*              model.layers.0.*
    language_model.lm_head.weight                lm_head.weight
    *.block_sparse_moe.experts.3.w1.weight       *.mlp.experts.3.gate_proj.weight
    *.mlp.router.weight                          *.mlp.gate.weight
    model.visual.*, vision_tower.*, mtp.*, ...   none: passed over

A model for several kinds of input has its text model's tensors under another beginning, next to
those of towers, which are passed over. Exports have all of them as the files did.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from shoal.model.parameters import TEXT_MODEL, TEXT_MODELS_WITHIN
from shoal.records import ShoalError
from shoal.text import count
from shoal.weights.mxfp4 import Mxfp4Tensor
from shoal.weights.tensor_files import (
    DTYPES,
    NAMED_DTYPES,
    BlockScaledTensor,
    OutputTensor,
    StoredTensor,
)

BEGINNINGS: Mapping[str, str] = {
    **dict.fromkeys(TEXT_MODELS_WITHIN, TEXT_MODEL),
    "language_model.lm_head.": "lm_head.",
}
"""Beginning of a tensor's name in the files of a model for several kinds of input -> that of the
parameter's name."""

RENAMED: tuple[tuple[str, str], ...] = (
    # Mixtral's experts
    (r"\.block_sparse_moe\.experts\.(\d+)\.w1\.", r".mlp.experts.\1.gate_proj."),
    (r"\.block_sparse_moe\.experts\.(\d+)\.w2\.", r".mlp.experts.\1.down_proj."),
    (r"\.block_sparse_moe\.experts\.(\d+)\.w3\.", r".mlp.experts.\1.up_proj."),
    (r"\.block_sparse_moe\.gate\.", ".mlp.gate."),
    # gpt-oss' router
    (r"\.mlp\.router\.", ".mlp.gate."),
)
"""(pattern of a part of a tensor's name in files, what the parameter's name has in its place)."""

WRITTEN: Mapping[str, tuple[tuple[str, str], ...]] = {"gpt_oss": ((".mlp.gate.", ".mlp.router."),)}
"""`model_type` -> (part of a parameter's name, what the tensor's name has in its place) in a model
that is written without files to be like. transformers reads others under the parameters' names."""

PASSED_OVER = (
    "model.visual.",
    "visual.",
    "model.vision_tower.",
    "vision_tower.",
    "model.multi_modal_projector.",
    "multi_modal_projector.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
    "mtp.",
)
"""Beginnings of the names of tensors that a text model does not read: towers for images and sound,
their projections, and heads that draft further tokens."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

WINDOW_BYTES = 2**26
"""Bytes of a tensor that are copied at once."""


@dataclass(frozen=True)
class Origin:
    """The tensors in the files of a model."""

    tensors: Mapping[str, StoredTensor]  # by their parameter's name
    others: Mapping[str, StoredTensor]  # those that are passed over, by the files' name

    @classmethod
    def of(cls, stored: Mapping[str, StoredTensor]) -> Origin:
        """Sorts the tensors of a model's files, given by the files' names. ShoalError if two are
        for one parameter."""
        tensors: dict[str, StoredTensor] = {}
        others: dict[str, StoredTensor] = {}
        for name, tensor in stored.items():
            # Old Llama files store the rotary frequencies, which `rotary` computes.
            if name.startswith(PASSED_OVER) or name.endswith("rotary_emb.inv_freq"):
                others[name] = tensor
                continue
            parameter = parameter_name(name)
            if parameter in tensors:
                raise ShoalError(
                    f"{tensor.file.parent} has two tensors for one parameter: "
                    f"{tensors[parameter].name} and {name}; expected one of them."
                )
            tensors[parameter] = tensor
        return cls(tensors, others)

    def notes(self) -> list[str]:
        """Returns what a user should know of the files: that towers and draft heads are passed
        over, and that weights in 4 bits are widened."""
        notes = []
        numbers: Counter[str] = Counter()
        for name in sorted(self.others):
            for beginning in PASSED_OVER:
                if name.startswith(beginning):
                    numbers[beginning.removesuffix(".")] += 1
                    break
        if numbers:
            parts = [f"{count(number, 'tensor')} of {part}" for part, number in numbers.items()]
            notes.append(
                f"only the text model is read and trained; {', '.join(parts)} are ignored, "
                "and are unchanged in exports"
            )
        if self.packed:
            notes.append(
                f"{count(len(self.packed), 'tensor')} of experts, in 4 bits (mxfp4), are widened "
                "when they are read; model.quantise=fp8 holds frozen ones in 8 bits, without "
                "rounding them"
            )
        return notes

    @property
    def packed(self) -> dict[str, Mxfp4Tensor]:
        """The tensors that the files have in 4 bits, by their parameter's name."""
        return {
            name: stored for name, stored in self.tensors.items() if isinstance(stored, Mxfp4Tensor)
        }

    def keeps_packed(self, tensors: Iterable[OutputTensor], dtype: np.dtype) -> bool:
        """True if the files have tensors in 4 bits, and `tensors`, written as `dtype`, would have
        the values of all of them: then they can stay in 4 bits."""
        missing = self.packed
        if not missing:
            return False
        for tensor in tensors:
            stored = missing.pop(tensor.name, None)
            if stored is not None and not stored.holds(tensor, dtype):
                return False
        return not missing

    def restore(
        self, tensors: Iterable[OutputTensor], dtype: np.dtype, packed: bool = False
    ) -> Iterator[OutputTensor]:
        """Yields tensors, which have their parameters' names, under the files' names; and then
        those that no parameter is, as the files have them. If the files' embedding is of type
        `dtype`, so that the tensors are to be written in the files' type, each has the type that it
        has there; else `dtype`. With `packed`, those that the files have in 4 bits are taken from
        there.

        A head that the files have in addition to the embedding that it is tied to is the
        embedding."""
        embedding = self.tensors.get(EMBEDDING)
        keeps_types = embedding is not None and DTYPES.get(embedding.dtype) == dtype
        written = set()
        last = None
        for tensor in tensors:
            written.add(tensor.name)
            stored = self.tensors.get(tensor.name)
            if packed and isinstance(stored, Mxfp4Tensor):
                yield copied(stored.blocks)
                yield copied(stored.scales)
                continue
            yield self._restored(tensor, keeps_types)
            if tensor.name == EMBEDDING:
                last = tensor
        if last is not None and HEAD in self.tensors and HEAD not in written:
            written.add(HEAD)
            yield self._restored(replace(last, name=HEAD), keeps_types)
        for name, stored in self.tensors.items():
            if name not in written:
                yield copied(stored)
        for stored in self.others.values():
            yield copied(stored)

    def _restored(self, tensor: OutputTensor, keeps_types: bool) -> OutputTensor:
        """Returns a tensor under the files' name, with `keeps_types` in the files' type."""
        stored = self.tensors.get(tensor.name)
        if stored is None:
            return replace(tensor, name=self._name_like_others(tensor.name))
        is_widened = isinstance(stored, (BlockScaledTensor, Mxfp4Tensor))
        if keeps_types and not is_widened and tensor.dtype is None:
            return replace(tensor, name=stored.name, dtype=DTYPES[stored.dtype])
        return replace(tensor, name=stored.name)

    def _name_like_others(self, name: str) -> str:
        """Returns the name in files of a parameter that these files do not have: with the beginning
        that they have in place of `model.`."""
        embedding = self.tensors.get(EMBEDDING)
        if embedding is None or not name.startswith(TEXT_MODEL):
            return name
        beginning = embedding.name.removesuffix(EMBEDDING.removeprefix(TEXT_MODEL))
        return beginning + name.removeprefix(TEXT_MODEL)


def parameter_name(name: str) -> str:
    """Returns the parameter's name for a tensor's name in files.

    >>> parameter_name("model.language_model.layers.3.mlp.up_proj.weight")
    'model.layers.3.mlp.up_proj.weight'
    >>> parameter_name("model.layers.3.block_sparse_moe.experts.1.w3.weight")
    'model.layers.3.mlp.experts.1.up_proj.weight'
    """
    for beginning, own in BEGINNINGS.items():
        if name.startswith(beginning):
            name = own + name.removeprefix(beginning)
            break
    for pattern, own in RENAMED:
        name = re.sub(pattern, own, name)
    return name


def written_as(model_type: str, tensors: Iterable[OutputTensor]) -> Iterator[OutputTensor]:
    """Yields tensors, which have their parameters' names, under the names that they are written
    with where there are no files to be like."""
    for tensor in tensors:
        name = tensor.name
        for own, written in WRITTEN.get(model_type, ()):
            name = name.replace(own, written)
        yield replace(tensor, name=name)


def copied(stored: StoredTensor) -> OutputTensor:
    """Returns a tensor to be written with the bytes that are stored. ShoalError if its type is
    unknown."""
    dtype = NAMED_DTYPES.get(stored.dtype)
    if dtype is None:
        raise ShoalError(
            f"{stored.file}: the tensor {stored.name} has the type {stored.dtype}, which is not "
            f"copied; expected {', '.join(NAMED_DTYPES)}."
        )
    return OutputTensor(stored.name, stored.shape, partial(_runs_of, stored, dtype), dtype)


def _runs_of(stored: StoredTensor, dtype: np.dtype, _: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Yields a stored tensor in runs of rows, as `OutputTensor.runs` does."""
    rows, *row_shape = stored.shape or (1,)
    row_bytes = dtype.itemsize * int(np.prod(row_shape))
    step = max(1, WINDOW_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        values = np.empty((min(step, rows - start), *row_shape), dtype)
        stored.read(start, values)
        yield start, values
