"""MaxText's trees of arrays in Orbax checkpoints: found, inspected, written array by array.

Arrays are named by their path, with `/` between its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from shoal.model.lazy_array import LazyArray
from shoal.trainer.checkpoint import FOLDER
from shoal.trainer.orbax import check_room, leaf_types, load_orbax, reading, save_args, writing

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
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, type_handler_registry=leaf_types(on_written))
    options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=False)
    with writing(target), ocp.CheckpointManager(
            folder.absolute(), item_names=(ITEM,), item_handlers={ITEM: handler}, options=options) as manager:
        check_room(folder, list(arrays.values()))
        manager.save(int(STEP), args=ocp.args.Composite(**{ITEM: ocp.args.PyTreeSave(
            tree, save_args=jax.tree.map(save_args, tree), ocdbt_target_data_file_size=FILE_BYTES,
            custom_metadata=dict(metadata))}))


def _nested(named: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *folders, last = name.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = leaf
    return tree
