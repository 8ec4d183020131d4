"""Checkpoint formats of other systems: their protocols and their registry.

The core imports none of them. `shoal/__init__.py` fills FORMATS; a format is imported when a path is first checked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from shoal.config.schema import ModelSection
    from shoal.mesh import Role
    from shoal.model.architecture import Architecture
    from shoal.model.lazy_array import LazyArray
    from shoal.run.loading import ModelSpec
    from shoal.types import Params, ShoalError

FORMATS: dict[str, str] = {}
"""Name of a format -> `module:object` of its CheckpointFormat."""

ReadRows = Callable[[str, int, slice], "np.ndarray"]
"""Dotted path of a parameter, layer (0 if it has none), rows -> values [rows, columns] as in Hugging Face's files."""


class ForeignCheckpoint(Protocol):
    """A checkpoint whose arrays fit an architecture."""

    @property
    def architecture(self) -> Architecture: ...
    def describe(self) -> str: ...
    def load(self, role: Role, dtype: Any) -> Params: ...
    def open_lazily(self, scratch: Path, dtype: Any) -> AbstractContextManager[Any]:
        """Parameters as `hf.LazyParameter`s, each read when it is used; `scratch` is a folder for temporary files."""
        ...


@dataclass(frozen=True)
class ForeignArrays:
    """A model's arrays in another system's layout, each read when it is written."""

    arrays: Mapping[str, LazyArray]
    metadata: Mapping[str, Any]
    description: str
    warnings: tuple[str, ...] = ()


class CheckpointFormat(Protocol):
    """Reads and writes one system's checkpoints."""

    @property
    def inner(self) -> Path:
        """Where the arrays are in a folder that holds a checkpoint."""
        ...

    def find(self, path: Path) -> Path | None:
        """The checkpoint at a path; None if there is none of this format."""
        ...

    def resolve(self, section: ModelSection, found: Path) -> ModelSpec:
        """The model that the settings describe; no weights are read."""
        ...

    def open(self, found: Path, model_name: str, reference: Path | None, scan_layers: bool) -> ForeignCheckpoint:
        """The checkpoint, checked against the model of a name, else of the config.json in `reference`."""
        ...

    def arrays(self, read: ReadRows, a: Architecture, model_name: str, scan_layers: bool,
               dtype: np.dtype) -> ForeignArrays: ...

    def write(self, folder: Path, target: Path, made: ForeignArrays, on_written: Callable[[int], None]) -> None:
        """Writes the arrays to `inner` of a folder, one piece of one array at a time; `on_written` gets its bytes.
        Errors name `target`, the folder that the result will be moved to."""
        ...

    def unnamed(self, found: Path, name_key: str, tokenizer_key: str) -> ShoalError:
        """The error if neither key names the checkpoint's model."""
        ...


def load_format(name: str) -> CheckpointFormat:
    """The registered format of a name."""
    module, _, attribute = FORMATS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def find_foreign(path: Path) -> tuple[CheckpointFormat, Path] | None:
    """The format and the path of another system's checkpoint; None if there is none."""
    for name in FORMATS:
        if found := load_format(name).find(path):
            return load_format(name), found
    return None
