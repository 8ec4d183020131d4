"""Access to Orbax, the library that writes and reads arrays: import, errors, free space, and arrays
that are read and written in parts. No other file imports Orbax.

Orbax reports trouble in several ways (exceptions of any kind, log lines, tracebacks of its event
loop); here each failure becomes one `ShoalError`.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import logging
import os
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shoal.records import ShoalError
from shoal.weights.tensor_files import LazyArray, grid

CHUNK_BYTES = 64 << 20
"""Largest piece of an array on disk and in memory."""

WRITTEN_BYTES = 256 << 20
"""Most bytes of arrays that are written at once on a CPU. By itself Orbax copies and compresses all
arrays at once: with a checkpoint of 1.6 GB it takes 1.4 GB more while it writes, within this bound
0.45 GB, in the same time."""

GB = 10**9
"""Unit in which Orbax takes the bound on bytes that are written at once."""

REPLICA_BYTES = 1 << 20
"""Smallest part of an array that one replica writes for the others: each part is cut out by a
separate program."""

LONGEST_CAUSE = 120
"""Longest text of an error's line, in characters, that is shown whole."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@functools.cache
def load_orbax() -> Any:
    """Imports `orbax.checkpoint`, changes how it reads arrays (`_read_to_the_end`), and returns the
    module. Called late, because the import takes a second.

    As a side effect one message of its event loops is dropped from now on. When one array of many
    cannot be read or written, Orbax closes its loop, and for each other array a thread that is not
    Python's calls back at any later moment.
    """
    import orbax.checkpoint as ocp

    hook = sys.unraisablehook

    def without_closed_loops(unraisable: Any) -> None:
        """Drops the message of a closed loop that belongs to no object; passes any other to the
        hook that was there before."""
        is_closed_loop = str(unraisable.exc_value) == "Event loop is closed"
        if unraisable.object is not None or not is_closed_loop:
            hook(unraisable)

    sys.unraisablehook = without_closed_loops
    arrays: Any = ocp.type_handlers.get_type_handler(jax.Array)
    arrays.deserialize = functools.partial(_read_to_the_end, arrays.deserialize)
    return ocp


async def _read_to_the_end(read: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Reads arrays as Orbax's handler does (`read` is its method, and gets all other arguments),
    but raises an error only after all reads have ended. If one array, or a part of it, cannot be
    read, Orbax raises while the others are still being read, and drops these: threads of
    TensorStore would then call back for each of them at any later moment, during a run that goes on
    from an older checkpoint."""
    begun_before = asyncio.all_tasks()
    try:
        return await read(*args, **options)
    finally:
        dropped = asyncio.all_tasks() - begun_before
        if dropped:
            await asyncio.wait(dropped)
            for task in dropped:
                task.exception()  # retrieved, because otherwise Python prints it


@contextmanager
def orbax_silenced() -> Iterator[None]:
    """Silences the log lines and warnings that Orbax writes in addition to the errors it raises,
    until the end of the block."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "coroutine 'async_serialize_from_host.* was never awaited", RuntimeWarning
        )
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def written_at_once(largest_array: int) -> int:
    """Returns the bound on the bytes of arrays that are written at once on a CPU. It exceeds the
    largest array, because Orbax refuses an array that is as large as the bound."""
    return max(WRITTEN_BYTES, largest_array + GB // 1000)


@contextmanager
def explain_write_errors(path: Path, then: str = "give the same command again") -> Iterator[None]:
    """Turns any exception in the block, which writes `path` by Orbax, into a ShoalError that names
    the cause. `then`: the advice at the end of its text."""
    try:
        yield
    except Exception as error:
        cure = "make room" if _is_full_disk(error) else "mend that"
        raise ShoalError(
            f"the checkpoint {path} cannot be written ({cause(error)}): {cure}, then {then}"
        ) from error


def _is_full_disk(error: Exception) -> bool:
    """True if an error says that the disk or a quota is full, or a file too large, by its number or
    in its text."""
    if getattr(error, "errno", None) in _FULL:
        return True
    text = str(error)
    return any(os.strerror(number) in text for number in _FULL)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns any exception in the block, which reads `path` by Orbax, into a ShoalError that names
    the cause and advises to copy the checkpoint again."""
    try:
        yield
    except Exception as error:
        raise ShoalError(
            f"the checkpoint {path} cannot be read ({cause(error)}): copy it again, whole"
        ) from error


def cause(error: BaseException) -> str:
    """Returns the reason of an error in one line for a message: its first line without settings, or
    the end of that line if it is long. If the end is long too, or settings are left in it: `a part
    of it is damaged or missing`.

    Also frees what the error's frames hold: a coroutine that is freed later would warn then, after
    the end of `orbax_silenced`.
    """
    unfreed: list[BaseException | None] = [error]
    while unfreed:
        current = unfreed.pop()
        if current is None:
            continue
        traceback.clear_frames(current.__traceback__)
        unfreed.append(current.__cause__ or current.__context__)
        unfreed.extend(getattr(current, "exceptions", ()))
    gc.collect()
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    line = re.sub(r" \[(source locations|tensorstore_spec).*", "", line)
    if len(line) > LONGEST_CAUSE:
        # libraries put the innermost reason last
        _, _, line = line.rpartition(": ")
    if len(line) > LONGEST_CAUSE or "{" in line:
        return "a part of it is damaged or missing"
    return line


def check_room(folder: Path, tree: Any) -> None:
    """Raises OSError (no space) if the disk of `folder` has less free space than the arrays of
    `tree` (anything with `nbytes`) take. Does nothing if there are several processes, because each
    writes only a part. `folder` must exist."""
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    free = shutil.disk_usage(folder).free
    if jax.process_count() == 1 and free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: {needed / 2**20:.1f} MiB are needed, "
            f"{free / 2**20:.1f} MiB are free",
        )


@dataclass(frozen=True)
class StoredArray:
    """An array in a tree on disk, which can be read in parts."""

    folder: Path
    name: str

    @functools.cached_property
    def opened(self) -> Any:
        """The array's store (TensorStore's), opened at the first use. ShoalError if it cannot be
        opened."""
        import tensorstore

        # Orbax stores an array in one store with all others, or in a folder of its own; as Zarr of
        # either version.
        name = self.name.replace("/", ".")
        base = self.folder.absolute()
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
        """Shape of the array's pieces on disk: to read a part of a piece, all of it is
        decompressed."""
        return tuple(self.opened.chunk_layout.read_chunk.shape)

    def read(self, part: tuple[slice, ...]) -> np.ndarray:
        """Returns the values of a part; ShoalError if they cannot be read."""
        with reading(self.folder):
            return self.opened[part].read().result()


def leaf_types(on_written: Callable[[int], None] = lambda size: None) -> Any:
    """Returns Orbax's registry of handlers by type of leaf: with it, a `LazyArray` is written part
    by part. `on_written` is called with the number of bytes of each part, after it was written."""
    import tensorstore

    type_handlers = load_orbax().type_handlers

    class Slices(type_handlers.NumpyHandler):
        """Orbax's handler of NumPy arrays, changed to write a `LazyArray` part by part."""

        async def serialize(
            self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
        ) -> Sequence[Any]:
            """Writes arrays in batches (`_batches`), and returns when all are written."""
            assert args is not None
            for batch in _batches(values):
                # Batch by batch: Orbax would write all at once, and every array would have a slice
                # in memory at the same time.
                for saved in await super().serialize(values[batch], infos[batch], args[batch]):
                    saved.result()  # waits, so that a batch is written before the next is read
            # nothing is left for Orbax to wait for
            return []

        async def _open_and_write(self, value: Any, tspec: Any, ts_context: Any) -> None:
            """Writes one `LazyArray` in parts: each is read from the array just before it is
            written."""
            array: Any = await tensorstore.open(
                tensorstore.Spec(tspec), create=True, open=True, context=ts_context
            )
            # In the file's own pieces, because a piece that is written in two parts is read, merged
            # and compressed twice.
            piece = array.chunk_layout.write_chunk.shape
            steps = list(value.shape)
            for axis in value.axes:
                steps[axis] = piece[axis]
            for part in grid(value.shape, steps):
                values = np.ascontiguousarray(value.read(part), value.dtype)
                await array[part].write(values, can_reference_source_data_indefinitely=True)
                on_written(values.nbytes)

    return type_handlers.create_type_handler_registry(
        (LazyArray, Slices(deepcopy_host_arrays=False)),
        (int, type_handlers.ScalarHandler()),
        (jax.Array, type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=REPLICA_BYTES)),
    )


def save_args(leaf: Any) -> Any:
    """Returns Orbax's settings for writing a leaf: pieces of at most CHUNK_BYTES on disk for a
    large `LazyArray`, the default for others."""
    save_args_of = load_orbax().SaveArgs
    if not isinstance(leaf, LazyArray) or leaf.nbytes <= CHUNK_BYTES:
        return save_args_of()
    axes = () if leaf.one_by_one is None else (leaf.one_by_one,)
    return save_args_of(chunk_byte_size=CHUNK_BYTES, shard_axes=axes)


def _batches(values: Sequence[LazyArray]) -> Iterator[slice]:
    """Yields consecutive slices of `values`, each to be written at the same time: arrays of at most
    CHUNK_BYTES together, or a single larger one. For no values: one empty slice."""
    start = 0
    total = 0
    for number, value in enumerate(values):
        # `start < number`: the batch has an array already
        if start < number and total + value.nbytes > CHUNK_BYTES:
            yield slice(start, number)
            start = number
            total = 0
        total += value.nbytes
    yield slice(start, len(values))
