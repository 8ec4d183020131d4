"""Versions of the weights as files: a folder each, in a file system in memory or one that several hosts share.

    shoal-x81k2/000003-4/weights.safetensors     tensors in the sampler's type, layers stacked
                         manifest.json           last: names, shapes and checksums
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shoal.files import appearing, writing
from shoal.model.tensor_file import OutputTensor, StoredTensor, read_header, write_file
from shoal.model.transformer import Model
from shoal.rollout.publication import from_host, tensor_names, to_host
from shoal.types import Params, ShoalError

MEMORY_FOLDER = Path("/dev/shm")
"""Linux's file system in memory that every process may use."""
ROOM = 4
"""Copies of the weights that MEMORY_FOLDER must have room for to be chosen: versions that wait, and the next."""
KEY = "publish.folder"

MANIFEST, WEIGHTS, LOCK = "manifest.json", "weights.safetensors", ".lock"


class FileStore:
    """Versions as folders with a safetensors file and, last, a manifest, in a folder of this process's own.

    What trainers that were killed have left in `parent` is removed first.
    """

    def __init__(self, parent: Path) -> None:
        self.parent, self.count = parent, 0
        with writing(parent, KEY):
            parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(parent)
            new = Path(tempfile.mkdtemp(prefix=".shoal-", dir=parent))
            self._lock = _locked(new / LOCK)  # before it has a name that others look for
            self.folder = new.rename(parent / new.name.removeprefix("."))

    def write(self, version: int, model: Model, params: Params) -> StoredFiles:
        # A place of its own each time: JAX on CPU computes with mapped files as they are, without copying them, so
        # what is written over would change the weights of samplers that are at work.
        self.count += 1
        place = self.folder / f"{version:06d}-{self.count}"
        try:
            with writing(self.parent, KEY):
                place.mkdir()
                self._write(place, version, model, params)
        except BaseException:  # of a full disk, the part that was written would stay in the way
            shutil.rmtree(place, ignore_errors=True)
            raise
        return StoredFiles(version, place)

    def _write(self, place: Path, version: int, model: Model, params: Params) -> None:
        names, checksums, values = tensor_names(model), {}, to_host(model, params)

        def runs(name: str, _: np.dtype) -> Iterator[tuple[int, np.ndarray]]:
            written, array, sum = next(values)
            assert written == name
            yield 0, array
            checksums[name] = int(sum)

        write_file(place / WEIGHTS, [OutputTensor(name, shape, partial(runs, name)) for name, shape in names.items()],
                   np.dtype(model.dtype))
        manifest = {"version": version, "base": None, "dtype": np.dtype(model.dtype).name, "place": WEIGHTS,
                    "tensors": {name: {"shape": shape, "checksum": checksums[name]} for name, shape in names.items()}}
        with appearing(place / MANIFEST, KEY) as file:
            file.write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    def remove(self, stored: StoredFiles) -> None:
        # The manifest first: a host finds all of a version, or nothing.
        (stored.place / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(stored.place, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


@dataclass(frozen=True)
class StoredFiles:
    """A version in a folder."""

    version: int
    place: Path

    @property
    def exists(self) -> bool:
        return (self.place / MANIFEST).is_file()

    def forget(self) -> None:
        pass

    def read(self, model: Model) -> Callable[[], Params]:
        """On a CPU, of a file system in memory, the parameters are the mapped file itself."""
        if not self.place.parent.is_dir():
            raise ShoalError(f"{KEY}={self.place.parent.parent}: the weights of version {self.version} were published "
                             f"there, but {socket.gethostname()} finds no such folder: give one that trainer and "
                             "samplers share, or publish.channel=ray")
        try:
            return self._read(model)
        except (OSError, ShoalError) as error:
            if not self.exists:
                raise LookupError(f"version {self.version} is not in {self.place} any more") from error
            if isinstance(error, ShoalError):
                raise
            raise ShoalError(f"the weights in {self.place} cannot be read ({error}): check the disk, or choose another "
                             f"{KEY}") from error

    def _read(self, model: Model) -> Callable[[], Params]:
        manifest = json.loads((self.place / MANIFEST).read_text(encoding="utf-8"))
        declared, file = manifest["tensors"], self.place / manifest["place"]
        shapes = {name: tuple(one["shape"]) for name, one in declared.items()}
        if shapes != tensor_names(model) or manifest["dtype"] != np.dtype(model.dtype).name:
            raise ShoalError(f"the weights in {self.place} are of another model than this sampler's "
                             f"({np.dtype(model.dtype).name}): trainer and sampler have to be of one run")
        tensors, read = read_header(file), _mapped(file) if in_memory(self.place) else _copied
        return from_host(model, lambda name: read(tensors[name], np.dtype(model.dtype)),
                         {name: one["checksum"] for name, one in declared.items()}, str(self.place))


def _mapped(file: Path) -> Callable[[StoredTensor, np.dtype], np.ndarray]:
    whole = np.memmap(file, np.uint8, "r")

    def read(tensor: StoredTensor, dtype: np.dtype) -> np.ndarray:
        count = dtype.itemsize * int(np.prod(tensor.shape))
        return np.asarray(whole[tensor.offset:tensor.offset + count]).view(dtype).reshape(tensor.shape)

    return read


def _copied(tensor: StoredTensor, dtype: np.dtype) -> np.ndarray:
    # Of a file on a disk that several hosts share, a part that was not read yet is lost once the file is removed.
    values = np.empty(tensor.shape, dtype)
    tensor.read(0, values)
    return values


def in_memory(folder: Path, mounts: Path = Path("/proc/mounts")) -> bool:
    """Whether a folder lies in a file system in memory."""
    with contextlib.suppress(OSError):
        found = [line.split()[1:3] for line in mounts.read_text().splitlines()]
        inside = [(point, kind) for point, kind in found if folder.resolve().is_relative_to(point)]
        return max(inside, key=lambda one: len(one[0]), default=("", ""))[1] in ("tmpfs", "ramfs")
    return False


def default_folder(num_bytes: int) -> Path:
    """Where versions of so many bytes are written: a file system in memory with room for them, else a temporary one."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY_FOLDER).free >= ROOM * num_bytes:
            with tempfile.TemporaryFile(dir=MEMORY_FOLDER):
                return MEMORY_FOLDER
    return Path(tempfile.gettempdir())


def _locked(file: Path) -> Any:
    """An open file with a lock that ends with this process. BlockingIOError where another process has it."""
    import fcntl

    stream = open(file, "a")  # noqa: SIM115
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.close()
        raise
    return stream


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob("shoal-*"):
        with contextlib.suppress(OSError), _locked(folder / LOCK):
            shutil.rmtree(folder, ignore_errors=True)
