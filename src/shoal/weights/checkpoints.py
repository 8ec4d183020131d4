"""Checkpoints of a run: parameters, optimizer state and everything else that an exact resumption
needs.

    checkpoints/<version>/state       parameters, optimizer, update counter
    checkpoints/<version>/published   weights of older versions that are still sampled from, if
                                      there are any
    checkpoints/<version>/extra       JSON: data position, pending prompts, checksums of the others,
                                      which layers each stack of parameters has, ...

A checkpoint appears whole (Orbax renames it into place), and is compared bit for bit, by checksum,
when it is read. Layers may be stacked otherwise in it than in the program that reads it: they are
read as they were saved, split over the devices, and then restacked.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from shoal.buckets import Unreachable, complete
from shoal.files import find_input
from shoal.mesh import Role, World, return_freed_memory
from shoal.model.architecture import Architecture
from shoal.model.layers import layers_of_stacks
from shoal.model.parameters import Keep, keep_as_read, param_shapes, trained_specs
from shoal.records import Params, ShoalError
from shoal.runs.layout import is_run
from shoal.weights.checksum import checksum
from shoal.weights.orbax import (
    GB,
    StoredArray,
    cause,
    check_room,
    explain_write_errors,
    leaf_types,
    load_orbax,
    save_args,
    written_at_once,
)
from shoal.weights.restack import restacked_arrays, restacked_shapes, saved_stacks
from shoal.weights.tensor_files import LazyArray

FOLDER = "checkpoints"
DAMAGED_FOLDER = "checkpoints_damaged"
"""Folder in a run's folder to which damaged checkpoints are moved."""


class Checkpointed(Protocol):
    """The trainer's state, or its shapes, as a checkpoint stores it: trees of arrays by name."""

    @property
    def trainable(self) -> Params: ...

    def to_trees(self) -> dict[str, Any]: ...

    @classmethod
    def from_trees(cls, trees: Mapping[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Restored:
    """What was read from a checkpoint."""

    version: int
    state: Any  # of the same class as the shapes that were passed to `restore`
    extra: dict[str, Any]
    published: dict[int, Params] = field(default_factory=dict)
    """Weights of older versions that were still sampled from when the checkpoint was saved."""


class Checkpoints:
    """Writes the checkpoints of one run, and keeps the newest `keep_last` and the `keep_best` with
    the highest scores. Its owner calls `close` at the end, which waits for a save that still goes
    on."""

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        keep_best: int = 0,
        in_background: bool | None = None,
        largest_array: int = 0,
    ):
        """Opens the folder, creates it if need be, and removes what an interrupted save left in it.
        `keep_last`, `keep_best`: how many checkpoints are kept of the newest (0: all), and of those
        with the highest scores (0: none for its score). ShoalError if the folder cannot be written.

        `in_background` writes while training goes on; None does so where it is safe. On CPU it is
        not safe: the next step reuses the memory that is being written. `largest_array` is the
        number of bytes of the largest array that `save` will get; with it, a checkpoint on CPU is
        written with little memory besides the arrays; 0: it is not known, and Orbax copies all
        arrays at once."""
        ocp = load_orbax()
        self.folder = folder.absolute()
        self.keep_last = keep_last
        self.keep_best = keep_best
        if in_background is None:
            in_background = jax.default_backend() != "cpu"
        self.in_background = in_background
        self.protected: int | None = None  # a version whose checkpoint is never deleted
        self._scores: Mapping[int, float] = {}
        options = ocp.CheckpointManagerOptions(
            create=True, enable_async_checkpointing=self.in_background, cleanup_tmp_directories=True
        )
        arrays: dict[str, Any] = {"type_handler_registry": leaf_types()}
        if largest_array and not self.in_background:
            arrays["save_concurrent_gb"] = written_at_once(largest_array) / GB
        handlers = {
            "state": ocp.PyTreeCheckpointHandler(**arrays),
            "published": ocp.PyTreeCheckpointHandler(**arrays),
            "extra": ocp.JsonCheckpointHandler(),
        }
        with self.explain_write_errors():
            self._manager = ocp.CheckpointManager(
                self.folder, options=options, item_names=tuple(handlers), item_handlers=handlers
            )
        self._args = ocp.args

    def explain_write_errors(self, name: str = "") -> AbstractContextManager[None]:
        """Returns a context for code that writes the checkpoint `name` ("" for the folder of all):
        any Exception in it becomes a ShoalError that says from which checkpoint the run can be
        resumed: the newest when this method was called."""
        saved = versions(self.folder.parent)
        if saved:
            then = f"resume the run, which continues from the checkpoint of step {saved[-1]}"
        else:
            then = "start the run again: it has no checkpoint yet"
        return explain_write_errors(self.folder / name, then)

    def save(
        self,
        version: int,
        state: Checkpointed,
        extra: Mapping[str, Any],
        published: Mapping[int, Params] | None = None,
        scores: Mapping[int, float] | None = None,
    ) -> None:
        """Saves a version: the state, `extra` as JSON, and `published`, version -> weights of the
        older versions that are still sampled from (arrays on devices or `LazyArray`s). Waits for
        the save before it, and then for this one too, unless `in_background`.

        To `extra` the entries `checksums`, `layouts`, `stacks` and `published` are added, in place
        of any that it has. `scores`: version -> score of the evaluated ones, the higher the better;
        None: no version has a score; from this save on they decide which checkpoints `keep_best`
        keeps; none is deleted before a newer one is complete. ShoalError if the checkpoint cannot
        be written: the older ones are then kept."""
        self.finish()
        items = {"state": state.to_trees()}
        published_versions = sorted(published or {})
        if published:
            items["published"] = {str(number): published[number] for number in published_versions}
        # Orbax notices a lost or shortened file, but not every flipped bit.
        sums = {name: checksum(tree) for name, tree in items.items()}
        sums["trainable"] = checksum(state.trainable)
        saves: dict[str, Any] = {}
        layouts: dict[str, str] = {}
        for name, tree in items.items():
            saves[name] = self._args.PyTreeSave(tree, save_args=jax.tree.map(save_args, tree))
            # compared before the arrays are read: tells another model from a damaged file
            layouts[name] = layout_digest(tree)
        extra = {
            **extra,
            "checksums": sums,
            "layouts": layouts,
            "stacks": layers_of_stacks(state.trainable.blocks),
            "published": published_versions,
        }
        saves["extra"] = self._args.JsonSave(extra)
        # Not before: `finish` above deletes by the scores of the save before.
        self._scores = scores or {}
        with self.explain_write_errors(str(version)):
            check_room(self.folder, items)
            self._manager.save(version, args=self._args.Composite(**saves))
        if not self.in_background:
            self.finish()
            return_freed_memory()

    def finish(self) -> None:
        """Waits until the last save is complete, then deletes the checkpoints that are not kept.
        ShoalError if that save failed."""
        with self.explain_write_errors():
            self._manager.wait_until_finished()
            self._prune()

    def versions(self) -> list[int]:
        """Returns the versions that have a checkpoint, in ascending order."""
        return sorted(self._manager.all_steps())

    def ranked(self, scores: Mapping[int, float]) -> list[int]:
        """Returns the versions that have a checkpoint and a score, the best last. `scores`:
        version -> score, the higher the better."""
        # Of equal scores the newer is better: with few questions ties are common, and the newer has
        # trained longer.
        scored = [version for version in self.versions() if version in scores]
        return sorted(scored, key=lambda version: (scores[version], version))

    def _prune(self) -> None:
        """Deletes all checkpoints but the newest `keep_last` (0: all), the `keep_best` with the
        highest scores, and the protected one. Of equal scores the newer is better."""
        saved = self.versions()
        keep = set(saved[-self.keep_last :])  # with 0 this is the whole list
        if self.keep_best:
            keep.update(self.ranked(self._scores)[-self.keep_best :])
        for version in saved:
            if version not in keep and version != self.protected:
                self._manager.delete(version)

    def close(self) -> None:
        with self.explain_write_errors():
            self._manager.close()


def layout_digest(tree: Any) -> str:
    """Returns a digest (16 hexadecimal digits) of the names, shapes and types in a tree of arrays,
    or in a tree of shapes; values do not count. Another digest than a checkpoint's means that it
    was saved with another model or optimizer, not that it is damaged."""
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        lines.append(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def checkpoint_bytes(shapes: Checkpointed) -> int:
    """Returns the bytes of the arrays of one checkpoint."""
    leaves = jax.tree.leaves(shapes.to_trees())
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def largest_array(shapes: Checkpointed) -> int:
    """Returns the bytes of the largest array of a checkpoint."""
    leaves = jax.tree.leaves(shapes.to_trees())
    return max(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def versions(run: Path) -> list[int]:
    """Returns the versions that a run has checkpoints of, in ascending order; [] if it has none."""
    folder = run / FOLDER
    if not folder.is_dir():
        return []
    numbered = [entry.name for entry in folder.iterdir() if re.fullmatch(r"\d+", entry.name)]
    return sorted(map(int, numbered))


def find_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """Returns (run folder, version) if `folder` is a run's folder or its `checkpoints` (the newest
    version), or one of the numbered folders in that. A folder in which there is a folder
    `checkpoints` counts as a run's. None if `folder` belongs to no run; ShoalError if the run has
    no checkpoint. Nothing is read from a checkpoint."""
    folder = folder.resolve()  # the names of `.` and `..` say nothing
    if folder.name.isdigit() and folder.parent.name == FOLDER and folder.is_dir():
        return folder.parent.parent, int(folder.name)
    if folder.name == FOLDER:
        folder = folder.parent
    if not (folder / FOLDER).is_dir():
        is_model = (folder / "config.json").is_file()
        if is_model or not is_run(folder):
            return None
    saved = versions(folder)
    if not saved:
        raise ShoalError(
            f"the run {folder} has no checkpoint: wait for its first one if it is training, else "
            "give another model"
        )
    return folder, saved[-1]


def checkpoint_named(path: str, key: str) -> tuple[Path, int] | None:
    """Returns what `find_checkpoint` finds at `path`, the value of the setting `key`: a folder, an
    address in a bucket, which is fetched, or a hub id. None for an empty path, which names no
    folder; the working folder is `.`."""
    return find_checkpoint(find_input(path, key)) if path else None


class DamagedCheckpoint(ShoalError):
    """Raised for a checkpoint whose content differs from what was saved."""


def restore(
    run: Path,
    version: int,
    a: Architecture,
    shapes: Checkpointed,
    sampler: Params | None = None,
    world: World | None = None,
) -> Restored:
    """Reads a checkpoint of a model, each array with the sharding of `shapes`. `sampler`: shapes of
    one version's published weights. If these have shardings, the weights are read too; if they have
    none, each weight becomes a `LazyArray` of the checkpoint; if `sampler` is None, published
    weights are left out. `world`: the run's processes; None: this one alone. All processes must
    call it.

    Raises `DamagedCheckpoint` if a part is missing or differs by a single bit from what was saved,
    ShoalError if the checkpoint was saved with another model or optimizer, or if the machine cannot
    read it now (memory, permissions, network). If there are several processes, all raise the same
    error, whichever of them met it.
    """
    path = (run / FOLDER / str(version)).absolute()
    wanted: dict[str, Any] = {"state": shapes.to_trees()}  # as it was saved
    world = world or World()

    def read_entries() -> tuple[dict[str, Any], list[str], dict[str, int]]:
        """Reads the JSON. Returns (extra, names of trees whose layout differs from the saved one,
        checksums by name of tree). Adds the published weights to `wanted`, and puts all
        layers there into the saved stacks."""
        with _reader(load_orbax().JsonCheckpointHandler()) as reader:
            extra = reader.restore(path / "extra")
        if sampler is not None and extra["published"]:
            wanted["published"] = {str(number): sampler for number in extra["published"]}
        stacks = saved_stacks(extra.get("stacks"), a)
        layouts = extra["layouts"]
        others = []
        for name, tree in wanted.items():
            if stacks != a.stack_layers:
                wanted[name] = restacked_shapes(tree, stacks)
            if layout_digest(wanted[name]) != layouts[name]:
                others.append(name)
        return extra, others, extra["checksums"]

    def read_arrays(name: str) -> Any:
        """Reads the tree of this name in `wanted`: `state` or `published`."""
        if name == "published":
            leaves = jax.tree.leaves(wanted[name])
            if all(leaf.sharding is None for leaf in leaves):
                return jax.tree_util.tree_map_with_path(partial(_lazily, path / name), wanted[name])
        with _reader(load_orbax().StandardCheckpointHandler()) as reader:
            return reader.restore(path / name, args=load_orbax().args.StandardRestore(wanted[name]))

    _read_everywhere(path, "files", partial(complete, path), world)
    extra, others, checksums = _read_everywhere(path, "extra", read_entries, world)
    if others:
        raise ShoalError(
            f"checkpoint {path} was saved with another model or optimizer (its {others[0]} has "
            "other names, shapes or types): give model.* and optimizer.* as they were, above all "
            "optimizer.clip_grad_norm and weight_decay, 0 or not, optimizer.moments, and "
            "model.dtype, float16 or not"
        )
    trees: dict[str, Any] = {}
    for name in wanted:
        # all processes read the same tree at a time, in the order of `wanted`
        trees[name] = _read_everywhere(path, name, partial(read_arrays, name), world)
    for name, tree in trees.items():
        read_sum = _read_everywhere(path, name, partial(checksum, tree), world)
        saved_sum = checksums[name]
        if read_sum != saved_sum:
            raise DamagedCheckpoint(
                f"checkpoint {path} is damaged ({name} has checksum {read_sum:#010x}, saved was "
                f"{saved_sum:#010x})"
            )
    if saved_stacks(extra.get("stacks"), a) != a.stack_layers:
        for name in wanted:
            trees[name] = restacked_arrays(trees[name], a.stack_layers)
    published = {int(number): params for number, params in trees.get("published", {}).items()}
    return Restored(version, shapes.from_trees(trees["state"]), extra, published)


def _lazily(folder: Path, keys: Any, wanted: jax.ShapeDtypeStruct) -> LazyArray:
    """Returns the array at `keys` of the tree in `folder`, which is read when it is used, with the
    shape and type of `wanted`."""
    name = jax.tree_util.keystr(keys, simple=True, separator=".")
    return LazyArray(wanted.shape, np.dtype(wanted.dtype), StoredArray(folder, name).read)


def _reader(handler: Any) -> Any:
    """Returns a reader of Orbax that waits for no other process (close it: use it in `with`). By
    default it meets all processes after each part, and one that has met a damaged file would never
    come."""
    ocp = load_orbax()
    alone = ocp.options.MultiprocessingOptions(active_processes={jax.process_index()})
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _read_everywhere(path: Path, part: str, read: Callable[[], Any], world: World) -> Any:
    """Calls `read` in every process, and returns this process's result once all have returned. If
    it failed in any process, all of them raise the same: ShoalError if a machine is at fault, else
    `DamagedCheckpoint`. `part`: a name of what is read, the same in all processes. `path`: the
    checkpoint."""
    content = None
    error = None
    fault = None
    try:
        content = read()
    except Exception as raised:  # for a bad file Orbax raises anything, bare Exception included
        error = raised
        where = f" in {world.names[world.index]}" if world.count > 1 else ""
        fault = [_is_machine_fault(error), cause(error) + where]  # a list, because it goes as JSON
    of_all = world.exchange_json(f"{part} of checkpoint {path.name}", fault)
    faults = [fault for fault in of_all if fault]
    if not faults:
        return content
    # If a machine is at fault (True is larger than False), the checkpoint may be whole, whatever
    # another process has met.
    is_machine, text = max(faults, key=operator.itemgetter(0))
    if is_machine:
        raise ShoalError(
            f"checkpoint {path} cannot be read now ({text}): nothing was changed; solve that and "
            "repeat the command"
        ) from error
    raise DamagedCheckpoint(f"checkpoint {path} is damaged ({text})") from error


def _is_machine_fault(error: Exception) -> bool:
    """True for an error of memory, permissions or a network disk, which says nothing about the
    checkpoint's files: MemoryError, a bucket that did not answer, any OSError but
    FileNotFoundError, or an error of XLA or TensorStore whose text says that memory ran out, a
    permission is missing or a service is unavailable."""
    if isinstance(error, MemoryError | Unreachable):
        return True
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return True
    text = str(error)
    return any(word in text for word in _MACHINE_FAULTS)


_MACHINE_FAULTS = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", "Out of memory")
"""Texts in errors of XLA and TensorStore that mean a fault of the machine."""


def restore_newest(
    run: Path,
    a: Architecture,
    shapes: Checkpointed,
    sampler: Params,
    warn: Callable[[str], None],
    world: World,
) -> Restored | None:
    """Reads the newest checkpoint that is not damaged, and returns it. Damaged newer ones are then
    moved to DAMAGED_FOLDER, each with a warning: `warn` is called with its text, by the first
    process. `a`: the model's architecture. `shapes`: those of the trainer's state, with the
    shardings in which it is read. `sampler`: shapes of one version's published weights; without
    shardings each weight becomes a `LazyArray`. `world`: the run's processes, all of which must
    call this function.

    None if the run has no checkpoint. ShoalError, with nothing moved, if all are damaged, or if one
    cannot be read for another reason (it was saved with another model, or a machine is at fault):
    older ones are then not tried. If there are several processes, all read the checkpoints that the
    first one sees."""
    damaged: dict[int, str] = {}
    for version in reversed(world.exchange_json("checkpoints", versions(run))[0]):
        try:
            restored = restore(run, version, a, shapes, sampler, world)
        except DamagedCheckpoint as error:
            damaged[version] = str(error)
            continue
        if world.is_main:
            for number, text in damaged.items():
                target = _move_away(run, number)
                warn(f"{text}; it is moved to {target}, the one before it is used")
        return restored
    if damaged:
        raise ShoalError(
            f"no checkpoint of {run} is whole ({'; '.join(damaged.values())}): nothing was "
            "changed; restore one, or start a new run with another run_name"
        )
    return None


def _move_away(run: Path, version: int) -> Path:
    """Moves a damaged checkpoint to `DAMAGED_FOLDER`, and returns its new path: `<version>`, or
    `<version>-1` and so on if that exists."""
    # Moved, not deleted: a file that is lost today may be on a disk that comes back.
    folder = run / DAMAGED_FOLDER
    folder.mkdir(exist_ok=True)
    target = folder / f"{version}"
    attempt = 0
    while target.exists():
        attempt += 1
        target = folder / f"{version}-{attempt}"
    return (run / FOLDER / str(version)).rename(target)


def read_extra(run: Path, version: int, name: str) -> Any:
    """Returns one entry of the JSON next to a checkpoint's arrays: `facts` (about the inputs of its
    run), `checksums` or `stacks`. {} if it cannot be read, because reading the weights will raise
    the error."""
    file = run / FOLDER / str(version) / "extra" / "metadata"
    try:
        return json.loads(file.read_text("utf-8"))[name]
    except (OSError, ValueError, KeyError):
        return {}


def load_parameters(
    run: Path,
    version: int,
    architecture: Architecture,
    role: Role,
    dtype: Any = jnp.float32,
    keep: Keep = keep_as_read,
) -> Params:
    """Reads the trained parameters of one checkpoint, on a role's devices and in `dtype`, with None
    in place of frozen ones; no optimizer state. Then `keep` is called with each spec and array, and
    returns what takes the array's place. Downloads the files first if they are a bucket's.
    ShoalError if the files cannot be read, DamagedCheckpoint if they differ from what was saved
    (not checked if the checkpoint has no checksum of them)."""
    ocp = load_orbax()
    specs = trained_specs(architecture)
    path = (run / FOLDER / str(version) / "state").absolute()
    complete(path.parent)
    stacks = saved_stacks(read_extra(run, version, "stacks"), architecture)

    def saved_shapes(dtype: Any) -> dict[str, Any]:
        """Returns the shapes of the parameters in a type, as they were saved."""
        shapes = {"trainable": param_shapes(specs, role, dtype)}
        if stacks == architecture.stack_layers:
            return shapes
        return restacked_shapes(shapes, stacks)

    wanted = saved_shapes(dtype)
    # Only a part is read: the two moments of Adam would triple what is read, and evaluation has no
    # optimizer to tell their shapes.
    restore_args = ocp.args.PyTreeRestore(
        item=wanted,
        partial_restore=True,
        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
    )
    try:
        with _reader(ocp.PyTreeCheckpointHandler()) as reader:
            restored = reader.restore(path, args=restore_args)
    # for a bad file Orbax raises anything, bare Exception included
    except Exception as error:
        raise ShoalError(
            f"checkpoint {path.parent} cannot be read ({cause(error)}): choose another of {run}"
        ) from error
    parameters = restored["trainable"]
    saved_sum = read_extra(run, version, "checksums").get("trainable")
    if saved_sum is not None:
        as_saved = parameters
        if dtype != jnp.float32:
            # The files are read again, by pieces: in memory there would not be room for all
            # parameters both in `dtype` and as they were saved, in float32.
            whole = saved_shapes(jnp.float32)
            as_saved = jax.tree_util.tree_map_with_path(partial(_lazily, path), whole)
        if checksum(as_saved) != saved_sum:
            raise DamagedCheckpoint(
                f"checkpoint {path.parent} is damaged (its weights have another checksum than was "
                f"saved): choose another of {run}"
            )
    if stacks != architecture.stack_layers:
        parameters = restacked_arrays(parameters, architecture.stack_layers)
    return jax.tree.map(keep, specs, parameters)
