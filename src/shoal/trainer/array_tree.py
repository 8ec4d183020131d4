"""Trees of arrays in other programs' Orbax checkpoints (MaxText's): inspected, read in part, written array by array.

Arrays are named by their path, with `/` between its parts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shoal.trainer.checkpoint import FOLDER
from shoal.trainer.orbax import check_room, load_orbax, reading, writing

CHUNK_BYTES = 64 << 20
"""Largest piece of an array on disk and in memory."""
FILE_BYTES = 2 << 30
"""Target size of Orbax's files, the one that MaxText sets."""
STEP, ITEM = "0", "items"
"""Where MaxText looks for a tree in a folder of checkpoints: `0/items`."""


@dataclass(frozen=True)
class StoredTree:
    """Names, shapes and types of the arrays in a folder, and what its writer stored with them."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, Any]
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class StoredArray:
    """An array of a tree, of which parts can be read."""

    folder: Path
    name: str

    @functools.cached_property
    def opened(self) -> Any:
        import tensorstore

        # As Orbax stores it: in one store with all arrays, or in a folder of its own; Zarr of either version.
        name, base = self.name.replace("/", "."), self.folder.absolute()
        store = {"driver": "ocdbt", "base": f"file://{base}/", "path": f"{name}/"}
        if not (self.folder / "manifest.ocdbt").exists():
            store = {"driver": "file", "path": f"{base / name}/"}
        with reading(self.folder):
            return tensorstore.open({"driver": "auto", "kvstore": store}).result()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.opened.shape)

    @property
    def pieces(self) -> tuple[int, ...]:
        """Shape of its pieces on disk: to read a part of one, all of it is decompressed."""
        return tuple(self.opened.chunk_layout.read_chunk.shape)

    def read(self, part: tuple[slice, ...]) -> np.ndarray:
        with reading(self.folder):
            return self.opened[part].read().result()


def grid(shape: Sequence[int], steps: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """The parts of an array in steps along its axes, in order."""
    ranges = [[slice(start, min(start + step, size)) for start in range(0, size, step)]
              for size, step in zip(shape, steps, strict=True)]
    return itertools.product(*ranges)


@dataclass(frozen=True)
class LazyArray:
    """An array to be written whose values are read in parts: in steps of the pieces on disk along `axes`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], np.ndarray]
    one_by_one: int | None = None  # on disk, a large array has separate pieces for each index of this axis

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def save_args(self) -> dict[str, Any]:
        if self.nbytes <= CHUNK_BYTES:
            return {}
        axes = () if self.one_by_one is None else (self.one_by_one,)
        return {"chunk_byte_size": CHUNK_BYTES, "shard_axes": axes}


def find_tree(folder: Path) -> Path | None:
    """The tree at a path, or in its `items`; None unless Orbax wrote it and it is not part of a run of Shoal's."""
    for path in (folder, folder / ITEM):
        if (path / "_METADATA").is_file() and not (path / "config.json").exists():
            # Our own checkpoints are Orbax trees, too; `checkpoint.py` reads those, and compares checksums.
            return None if path.parent.parent.name == FOLDER and (path.parent / "extra").exists() else path
    return None


def inspect_tree(folder: Path) -> StoredTree:
    """Names, shapes and types of a tree's arrays, without reading their values."""
    with reading(folder), load_orbax().PyTreeCheckpointer() as reader:
        found = reader.metadata(folder.absolute()).item_metadata
        leaves = {"/".join(map(_key, path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found.tree)
                  if hasattr(leaf, "shape")}  # leaves of text have none
        return StoredTree({name: tuple(leaf.shape or ()) for name, leaf in leaves.items()},
                          {name: leaf.dtype for name, leaf in leaves.items()}, found.custom_metadata or {})


def _key(key: Any) -> str:
    return str(next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)))


def write_tree(folder: Path, target: Path, arrays: Mapping[str, LazyArray], metadata: Mapping[str, Any],
               on_written: Callable[[int], None]) -> None:
    """Writes `folder/0/items` as MaxText does: the step, the arrays, an empty optimizer state.

    One piece of one array at a time is in memory; `on_written` gets the bytes of each. Errors name `target`, the folder
    that the result will be moved to.
    """
    ocp = load_orbax()
    tree = {"step": 0, **_nested(arrays), "opt_state": {}}
    args = jax.tree.map(lambda leaf: ocp.SaveArgs(**leaf.save_args() if isinstance(leaf, LazyArray) else {}), tree)
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, type_handler_registry=_slice_by_slice(ocp.type_handlers, on_written))
    options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=False)
    with writing(target, then=""), ocp.CheckpointManager(
            folder.absolute(), item_names=(ITEM,), item_handlers={ITEM: handler}, options=options) as manager:
        check_room(folder, list(arrays.values()))
        manager.save(int(STEP), args=ocp.args.Composite(**{ITEM: ocp.args.PyTreeSave(
            tree, save_args=args, ocdbt_target_data_file_size=FILE_BYTES, custom_metadata=dict(metadata))}))


def _slice_by_slice(type_handlers: Any, on_written: Callable[[int], None]) -> Any:
    """Orbax's registry of leaf types, with a handler that writes a `LazyArray` slice by slice."""
    import tensorstore

    class Slices(type_handlers.NumpyHandler):
        async def serialize(self, values: Sequence[Any], infos: Sequence[Any],
                            args: Sequence[Any] | None = None) -> Sequence[Any]:
            assert args is not None
            for batch in _batches(values):
                # All at once, as Orbax does it, every array would have a slice in memory at the same time.
                for saved in await super().serialize(values[batch], infos[batch], args[batch]):
                    saved.result()  # done before the next batch is read
            return []

        async def _open_and_write(self, value: Any, tspec: Any, ts_context: Any) -> None:
            array: Any = await tensorstore.open(tensorstore.Spec(tspec), create=True, open=True, context=ts_context)
            # In the file's own pieces: one written twice in part is read, merged and compressed twice.
            pieces = array.chunk_layout.write_chunk.shape
            steps = [pieces[axis] if axis in value.axes else size for axis, size in enumerate(value.shape)]
            for part in grid(value.shape, steps):
                values = np.ascontiguousarray(value.read(part), value.dtype)
                await array[part].write(values, can_reference_source_data_indefinitely=True)
                on_written(values.nbytes)

    return type_handlers.create_type_handler_registry(
        (LazyArray, Slices(deepcopy_host_arrays=False)), (int, type_handlers.ScalarHandler()),
        (jax.Array, type_handlers.ArrayHandler()))


def _batches(values: Sequence[LazyArray]) -> Iterator[slice]:
    """Runs of arrays of at most CHUNK_BYTES together, or of one array; each run is written at once."""
    start, total = 0, 0
    for number, value in enumerate(values):
        if start < number and total + value.nbytes > CHUNK_BYTES:
            yield slice(start, number)
            start, total = number, 0
        total += value.nbytes
    yield slice(start, len(values))


def _nested(named: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *folders, last = name.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = leaf
    return tree

