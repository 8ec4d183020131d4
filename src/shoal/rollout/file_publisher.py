"""Versions of the weights as files: a folder each, in a file system in memory or one that several hosts share.

    shoal-x81k2/owner.json                       whose folder it is, locked while that process lives
                000003-4/weights.safetensors     tensors in the sampler's type, layers stacked
                         manifest.json           last: names, shapes and checksums
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from shoal.files import appearing, writing
from shoal.model.tensor_file import OutputTensor, StoredTensor, read_header, write_file
from shoal.model.transformer import Model
from shoal.rollout.publication import tensor_names, to_host
from shoal.rollout.publisher import StoredManifest, StoredPublisher
from shoal.types import Params, ShoalError

MEMORY_FOLDER = Path("/dev/shm")
"""Linux's file system in memory that every process may use."""
ROOM = 4
"""Copies of the weights that MEMORY_FOLDER must have room for to be chosen: versions that wait, and the next."""
KEY = "publish.folder"
MEMORY = ("tmpfs", "ramfs")
LOCAL = (*MEMORY, "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs")
"""Kinds of file systems that one machine alone writes to."""

MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
OWNER, PROGRAM = "owner.json", "shoal: published weights"
"""The file that marks a folder as made here, and what it says of that."""


class FilePublisher(StoredPublisher):
    """Versions as folders with a safetensors file and, last, a manifest, in a folder of this process's own.

    What processes of this machine that were killed have left in `parent` is removed first.
    """

    def __init__(self, parent: Path, model: Model) -> None:
        super().__init__(model)
        self.parent, self.count = parent, 0
        with writing(parent, KEY):
            parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(parent)
            new = Path(tempfile.mkdtemp(prefix=".shoal-", dir=parent))
            self.folder = parent / new.name.removeprefix(".")
            self._owner = _mark(new, self.folder)  # before it has a name that others look for
            new.rename(self.folder)

    def write(self, version: int, params: Params) -> StoredManifest:
        # A place of its own each time: JAX on CPU computes with mapped files as they are, without copying them, so
        # what is written over would change the weights of samplers that are at work.
        self.count += 1
        place = self.folder / f"{version:06d}-{self.count}"
        try:
            with writing(self.parent, KEY):
                place.mkdir()
                self._write(place, version, params)
        except BaseException:  # of a full disk, the part that was written would stay in the way
            shutil.rmtree(place, ignore_errors=True)
            raise
        return FileManifest(version, place)

    def _write(self, place: Path, version: int, params: Params) -> None:
        model = self.model
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

    def remove(self, manifest: FileManifest) -> None:
        # The manifest first: a host finds all of a version, or nothing.
        (manifest.place / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(manifest.place, ignore_errors=True)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._owner)


@dataclass(frozen=True)
class FileManifest(StoredManifest):
    """A version in a folder."""

    version: int
    place: Path

    @property
    def exists(self) -> bool:
        return (self.place / MANIFEST).is_file()

    def read_now(self, model: Model) -> Callable[[], Params]:
        """On a CPU, of a file system in memory, the parameters are the mapped file itself."""
        if not self.place.parent.is_dir():
            raise ShoalError(f"{KEY}={self.place.parent.parent}: the weights of version {self.version} were published "
                             f"there, but {socket.gethostname()} finds no such folder: give one that trainer and "
                             "samplers share, or publish.channel=ray")
        try:
            return super().read_now(model)
        except (OSError, ShoalError) as error:
            if not self.exists:
                raise LookupError(f"version {self.version} is not in {self.place} any more") from error
            if isinstance(error, ShoalError):
                raise
            raise ShoalError(f"the weights in {self.place} cannot be read ({error}): check the disk, or choose another "
                             f"{KEY}") from error

    def open(self, model: Model) -> tuple[Callable[[str], np.ndarray], Mapping[str, int], str]:
        manifest = json.loads((self.place / MANIFEST).read_text(encoding="utf-8"))
        declared, file = manifest["tensors"], self.place / manifest["place"]
        shapes = {name: tuple(one["shape"]) for name, one in declared.items()}
        if shapes != tensor_names(model) or manifest["dtype"] != np.dtype(model.dtype).name:
            raise ShoalError(f"the weights in {self.place} are of another model than this sampler's "
                             f"({np.dtype(model.dtype).name}): trainer and sampler have to be of one run")
        tensors, read = read_header(file), _mapped(file) if file_system(self.place) in MEMORY else _copied
        return (lambda name: read(tensors[name], np.dtype(model.dtype)),
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


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The kind of file system that a folder lies in; "" where the system does not say."""
    with contextlib.suppress(OSError):
        found = [line.split()[1:3] for line in mounts.read_text().splitlines()]
        inside = [(point, kind) for point, kind in found if folder.resolve().is_relative_to(point)]
        return max(inside, key=lambda one: len(one[0]), default=("", ""))[1]
    return ""


def default_folder(num_bytes: int) -> Path:
    """Where versions of so many bytes are written: a file system in memory with room for them, else a temporary one."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY_FOLDER).free >= ROOM * num_bytes:
            with tempfile.TemporaryFile(dir=MEMORY_FOLDER):
                return MEMORY_FOLDER
    return Path(tempfile.gettempdir())


def _mark(folder: Path, name: Path) -> int:
    """Marks a folder that will have a name as this process's; the open file, locked until the process ends."""
    import fcntl

    owner = {"program": PROGRAM, "folder": str(name.resolve()), "host": socket.gethostname(), "process": os.getpid()}
    file = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(file, json.dumps(owner).encode())
    return file


def remove_abandoned(parent: Path, mounts: Path = Path("/proc/mounts")) -> None:
    """Removes folders of publishers of this machine whose process has ended. Nothing where other machines may write:
    their processes cannot be seen."""
    if file_system(parent, mounts) in LOCAL:
        for folder in parent.glob("shoal-*"):
            with contextlib.suppress(OSError, ValueError):
                _remove_abandoned(folder)


def _remove_abandoned(folder: Path) -> None:
    import fcntl

    # Never made where there was none: only what this program has marked is its own.
    with open(folder / OWNER, "r+b") as file:
        owner = json.loads(file.read(4096))
        wanted = {"program": PROGRAM, "folder": str(folder.resolve()), "host": socket.gethostname()}
        if isinstance(owner, dict) and wanted.items() <= owner.items():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError while its process lives
            shutil.rmtree(folder, ignore_errors=True)
