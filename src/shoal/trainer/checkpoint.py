"""Saves a run's state with Orbax and reads it back; the only file that knows Orbax.

    checkpoints/<version>/state       parameters, optimizer, update counter
    checkpoints/<version>/published   weights of older versions that are still sampled from, where there are some
    checkpoints/<version>/extra       what JSON holds: data position, pending prompts, checksums of the others, ...

A checkpoint appears whole (Orbax renames it into place) and is checked bit for bit when it is read.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.mesh import Role
from shoal.model.transformer import Architecture, checksum, is_param_spec, param_specs, shardings
from shoal.trainer.step import Learner, TrainState
from shoal.types import Params, ShoalError

MODEL_FOLDER = "model"
"""In a run folder: the model's config and tokenizer, so that a checkpoint can be read without its source."""

FOLDER = "checkpoints"
DAMAGED_FOLDER = "checkpoints_damaged"
"""In a run folder: where a checkpoint that cannot be read is moved."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint as it was saved."""

    version: int
    state: TrainState
    extra: dict[str, Any]
    published: dict[int, Params] = field(default_factory=dict)  # older versions that groups are still drawn from


class Checkpoints:
    """Checkpoints of one run, `<run>/checkpoints/<version>`: the newest `keep_last` and the `keep_best` of the highest
    score stay."""

    def __init__(self, folder: Path, keep_last: int, keep_best: int = 0, in_background: bool | None = None):
        """`in_background`: writes while training goes on; None for where that is safe. On CPU it is not: what is
        written would be the memory that the next step reuses."""
        ocp = _orbax()
        self.folder, self.keep_last, self.keep_best = folder.absolute(), keep_last, keep_best
        self.in_background = jax.default_backend() != "cpu" if in_background is None else in_background
        self._scores: Mapping[int, float] = {}
        options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=self.in_background,
                                               cleanup_tmp_directories=True)
        with _saving(self.folder):
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._args = ocp.args

    def save(self, version: int, state: TrainState, extra: Mapping[str, Any],
             published: Mapping[int, Params] | None = None, scores: Mapping[int, float] | None = None) -> None:
        """Parameters, optimizer state and update counter; `extra` is what JSON can hold; `published` older weights.
        `scores` of evaluated versions decide which of the older checkpoints stay; none goes before a newer one is
        whole. ShoalError where it cannot be written: the checkpoints before it stay."""
        self.finish()
        items = {"state": _tree(state)}
        if published:
            items["published"] = {str(number): params for number, params in sorted(published.items())}
        sums = {name: int(checksum(tree)) for name, tree in items.items()}
        saves = {name: self._args.StandardSave(tree) for name, tree in items.items()}
        layouts = {name: layout(tree) for name, tree in items.items()}
        whole = {**extra, "checksums": sums, "layouts": layouts, "published": sorted(published or {})}
        self._scores = scores or {}
        with _saving(self.folder / str(version)):
            _check_room(self.folder, items)
            self._manager.save(version, args=self._args.Composite(**saves, extra=self._args.JsonSave(whole)))
        if not self.in_background:
            self.finish()

    def finish(self) -> None:
        """Returns when what was saved is whole, and lets go of what is not to stay."""
        with _saving(self.folder):
            self._manager.wait_until_finished()
            self._prune()

    def _prune(self) -> None:
        there, scores = sorted(self._manager.all_steps()), self._scores
        scored = sorted((v for v in there if v in scores), key=lambda v: (scores[v], v))
        keep = {*there[-self.keep_last:], *(scored[-self.keep_best:] if self.keep_best else [])}
        for version in there:
            if version not in keep:
                self._manager.delete(version)

    def close(self) -> None:
        with _saving(self.folder):
            self._manager.close()


def layout(tree: Any) -> str:
    """A digest of names, shapes and types, that tells another model or optimizer from damage."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    text = "\n".join(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}" for path, leaf in leaves)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _tree(state: TrainState) -> dict[str, Any]:
    return {"trainable": state.trainable, "optimizer": state.optimizer, "updates": state.updates}


def _check_room(folder: Path, tree: Any) -> None:
    """OSError where the disk has less room than the arrays take: met before anything is written."""
    needed, free = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)), shutil.disk_usage(folder).free
    if jax.process_count() == 1 and free < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed / 2**20:.1f} MiB are needed, "
                                    f"{free / 2**20:.1f} MiB are free")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _saving:
    """Turns whatever Orbax raises while it writes `path` into one line."""

    def __init__(self, path: Path, then: str = "; it goes on from the checkpoint before"):
        self.path, self.then = path, then

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            full = getattr(error, "errno", None) in _FULL or any(os.strerror(number) in str(error) for number in _FULL)
            cure = "make room" if full else "mend that"
            raise ShoalError(f"the checkpoint {self.path} cannot be written ({_cause(error)}): {cure}, then give the "
                             f"same command again{self.then}") from error


def versions(run: Path) -> list[int]:
    """Versions of which a run has a checkpoint, in order."""
    folder = run / FOLDER
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if re.fullmatch(r"\d+", entry.name))


def find_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """(run folder, version) of a run folder (its newest checkpoint), `<run>/checkpoints` or one of its numbers."""
    folder = folder.resolve()  # `.` and `..` have names of their own
    if folder.name.isdigit() and folder.parent.name == FOLDER and folder.is_dir():
        return folder.parent.parent, int(folder.name)
    folder = folder.parent if folder.name == FOLDER else folder
    if not (folder / FOLDER).is_dir():
        return None
    if not (numbers := versions(folder)):
        raise ShoalError(f"{folder / FOLDER} holds no checkpoint: the run did not get to its first one")
    return folder, numbers[-1]


class Damaged(ShoalError):
    """A checkpoint that is not what was saved."""


def restore(run: Path, version: int, learner: Learner, sampler: Params | None = None) -> Restored:
    """A checkpoint, each array laid out for the trainer as it is read. `sampler`: shapes and layout of published
    weights; None leaves them.

    Raises `Damaged` where a part is missing or differs from what was saved by a single bit, ShoalError where it was
    saved with another model or optimizer, or cannot be read for a reason of the machine's."""
    path = (run / FOLDER / str(version)).absolute()
    ocp = _orbax()
    wanted = {"state": _tree(learner.shapes())}
    try:
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            extra = reader.restore(path / "extra")
        if sampler is not None and extra["published"]:
            wanted["published"] = {str(number): sampler for number in extra["published"]}
        others = [name for name, tree in wanted.items() if layout(tree) != extra["layouts"][name]]
        found = {} if others else {name: _read(path, name, tree, extra) for name, tree in wanted.items()}
    except Exception as error:  # what Orbax finds wrong with a file, it raises as anything, bare Exception included
        if _is_of_the_machine(error):
            raise ShoalError(f"checkpoint {path} cannot be read now ({_cause(error)}): nothing was changed; mend that "
                             "and give the same command again") from error
        raise Damaged(f"checkpoint {path} is damaged ({_cause(error)})") from error
    if others:
        raise ShoalError(f"checkpoint {path} was saved with another model or optimizer (its {others[0]} has other "
                         "names, shapes or types): give model.* and optimizer.* as they were, above all "
                         "optimizer.clip_grad_norm and weight_decay, 0 or not")
    tree, published = found["state"], found.get("published", {})
    nothing = jax.tree.map(lambda _: None, tree["trainable"])
    state = TrainState(tree["trainable"], nothing, tree["optimizer"], tree["updates"])
    return Restored(version, state, extra, {int(number): params for number, params in published.items()})


def _read(path: Path, name: str, wanted: Any, extra: Mapping[str, Any]) -> Any:
    with _orbax().StandardCheckpointer() as reader:
        tree = reader.restore(path / name, wanted)
    found, saved = int(checksum(tree)), extra["checksums"][name]
    if found != saved:
        raise ValueError(f"{name} has checksum {found:#010x}, saved was {saved:#010x}")
    return tree


def _is_of_the_machine(error: Exception) -> bool:
    """Memory, permissions, a network disk: not the checkpoint's fault."""
    text = str(error)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and not isinstance(error, FileNotFoundError)) \
        or any(word in text for word in ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", "Out of memory"))


def restore_newest(run: Path, learner: Learner, sampler: Params, warn: Callable[[str], None]) -> Restored | None:
    """The newest checkpoint that is whole; newer ones, damaged, are named and moved aside. None where there is none at
    all; ShoalError, with nothing moved, where every one is damaged."""
    damaged: dict[int, Damaged] = {}
    for version in reversed(versions(run)):
        try:
            restored = restore(run, version, learner, sampler)
        except Damaged as error:
            damaged[version] = error
            continue
        for number, error in damaged.items():
            warn(f"{error}; it is moved to {_move_aside(run, number)}, the one before it is used")
        return restored
    if damaged:
        raise ShoalError(f"no checkpoint of {run} is whole ({'; '.join(map(str, damaged.values()))}): nothing was "
                         "changed; bring one back, or start anew under another run_name")
    return None


def _move_aside(run: Path, version: int) -> Path:
    folder = run / DAMAGED_FOLDER
    folder.mkdir(exist_ok=True)
    names = (f"{version}" if attempt == 0 else f"{version}-{attempt}" for attempt in range(1000))
    target = next(folder / name for name in names if not (folder / name).exists())
    return (run / FOLDER / str(version)).rename(target)


def load_parameters(run: Path, version: int, architecture: Architecture, role: Role,
                    dtype: Any = jnp.float32) -> Params:
    """The parameters of one checkpoint, each laid out for this role as it is read, in `dtype`."""
    ocp = _orbax()
    places = shardings(architecture, role)
    wanted = jax.tree.map(
        lambda d, sharding: jax.ShapeDtypeStruct(d.shape, dtype, sharding=sharding),
        param_specs(architecture), places, is_leaf=is_param_spec)
    path = (run / FOLDER / str(version) / "state").absolute()
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(
                item={"trainable": wanted}, partial_restore=True,
                restore_args=ocp.checkpoint_utils.construct_restore_args({"trainable": wanted})))
    except Exception as error:  # as above
        raise ShoalError(
            f"checkpoint {path.parent} cannot be read ({_cause(error)}): choose another of {run}") from error
    return restored["trainable"]


# Trees of other programs


@dataclass(frozen=True)
class Tree:
    """What a folder that Orbax wrote holds: arrays by name, `/` between its parts."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, Any]
    said: Mapping[str, Any]  # by who wrote it, beside the arrays


@dataclass(frozen=True)
class Unread:
    """An array to be written, read in slices along an axis; None for at once."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int | None
    read: Callable[[slice], np.ndarray]
    one_by_one: bool = False  # each index of the axis in pieces of its own on disk, where the array is large

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
        return {"chunk_byte_size": CHUNK_BYTES} | ({"shard_axes": (self.axis,)} if self.one_by_one else {})


CHUNK_BYTES = 64 << 20
"""Most bytes of an array in one piece on disk."""
FILE_BYTES = 2 << 30
"""Size that Orbax's files are made to have, as MaxText has it."""
STEP, ITEM = "0", "items"
"""Where MaxText looks for a tree in a folder of checkpoints: `0/items`."""


def find_tree(folder: Path) -> Path | None:
    """The tree at a path: a folder that Orbax wrote (and that is no checkpoint of ours), or such a step's `items`."""
    for path in (folder, folder / ITEM):
        if (path / "_METADATA").is_file() and not (path / "config.json").exists():
            return None if path.parent.parent.name == FOLDER and (path.parent / "extra").exists() else path
    return None


def look_at_tree(folder: Path) -> Tree:
    """Names and shapes of a tree's arrays; none is read."""
    with _reading(folder), _orbax().PyTreeCheckpointer() as reader:
        found = reader.metadata(folder.absolute()).item_metadata
        leaves = {"/".join(map(_key, path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found.tree)
                  if hasattr(leaf, "shape")}  # of text, say, there is none
        return Tree({name: tuple(leaf.shape or ()) for name, leaf in leaves.items()},
                    {name: leaf.dtype for name, leaf in leaves.items()}, found.custom_metadata or {})


def _key(key: Any) -> str:
    return str(next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)))


def read_leaves(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Some arrays of a tree, each read for the devices that its sharding names; the rest stays where it is."""
    ocp, tree = _orbax(), _nested(wanted)
    with _reading(folder), ocp.PyTreeCheckpointer() as reader:
        read = reader.restore(folder.absolute(), args=ocp.args.PyTreeRestore(
            item=tree, partial_restore=True, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)))
        return {name: _at(read, name) for name in wanted}


def write_tree(folder: Path, target: Path, arrays: Mapping[str, Unread], said: Mapping[str, Any],
               written: Callable[[int], None]) -> None:
    """Writes `folder/0/items` as MaxText does: step, the arrays, an optimizer's state without anything. One piece of
    one array at a time is in memory; `written` is told the bytes of each. Errors name `target`, where it will stand."""
    ocp = _orbax()
    tree = {"step": 0, **_nested(arrays), "opt_state": {}}
    args = jax.tree.map(lambda leaf: ocp.SaveArgs(**leaf.save_args() if isinstance(leaf, Unread) else {}), tree)
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, type_handler_registry=_slice_by_slice(written))
    options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=False)
    with _saving(target, then=""), ocp.CheckpointManager(
            folder.absolute(), item_names=(ITEM,), item_handlers={ITEM: handler}, options=options) as manager:
        _check_room(folder, list(arrays.values()))
        manager.save(int(STEP), args=ocp.args.Composite(**{ITEM: ocp.args.PyTreeSave(
            tree, save_args=args, ocdbt_target_data_file_size=FILE_BYTES, custom_metadata=dict(said))}))


def _slice_by_slice(written: Callable[[int], None]) -> Any:
    """Orbax's handlers of leaves, and one for `Unread`."""
    import tensorstore
    from orbax.checkpoint import type_handlers

    class Slices(type_handlers.NumpyHandler):
        async def serialize(self, values: Sequence[Any], infos: Sequence[Any],
                            args: Sequence[Any] | None = None) -> Sequence[Any]:
            assert args is not None
            for some in _batches(values):
                for saved in await super().serialize(values[some], infos[some], args[some]):
                    saved.result()  # before the next are read
            return []

        async def _open_and_write(self, value: Any, tspec: Any, ts_context: Any) -> None:
            array: Any = await tensorstore.open(tensorstore.Spec(tspec), create=True, open=True, context=ts_context)
            axis = value.axis or 0
            size = value.shape[axis]
            step = size if value.axis is None else array.chunk_layout.write_chunk.shape[axis]
            for start in range(0, size, step):
                part = slice(start, min(start + step, size))
                values = np.ascontiguousarray(value.read(part), value.dtype)
                where = array[(slice(None),) * axis + (part,)]
                await where.write(values, can_reference_source_data_indefinitely=True)
                written(values.nbytes)

    return type_handlers.create_type_handler_registry(
        (Unread, Slices(deepcopy_host_arrays=False)), (int, type_handlers.ScalarHandler()),
        (jax.Array, type_handlers.ArrayHandler()))


def _batches(values: Sequence[Unread]) -> Iterator[slice]:
    """Runs of arrays that take at most a piece's bytes, or one: each run is written in one go."""
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


def _at(tree: Mapping[str, Any], name: str) -> Any:
    for part in name.split("/"):
        tree = tree[part]
    return tree


class _reading:
    """Turns whatever Orbax raises while it reads `path` into one line."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            raise ShoalError(f"the checkpoint {self.path} cannot be read ({_cause(error)}): copy it again, whole"
                             ) from error


def _cause(error: BaseException) -> str:
    """The first line of what was raised, short: where it is long the reason stands at its end."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= 200 else f"{line[:60]} ... {line[-120:]}"


def _orbax() -> Any:
    import orbax.checkpoint as ocp

    for name in ("absl", "asyncio"):  # what it logs of a failed save is raised too, and told in one line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine 'async_serialize_from_host.* was never awaited", RuntimeWarning)
    if not isinstance(sys.unraisablehook, _WithoutClosedLoops):
        sys.unraisablehook = _WithoutClosedLoops(sys.unraisablehook)
    return ocp


class _WithoutClosedLoops:
    """Where one array of many cannot be read or written, Orbax ends its event loop, and each of the others' callbacks
    then prints a traceback that says no more than that; the error itself is raised."""

    def __init__(self, before: Callable[[Any], Any]):
        self.before = before

    def __call__(self, unraisable: Any) -> None:
        if not (unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"):
            self.before(unraisable)
