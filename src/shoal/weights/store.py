"""Publication: versions of the weights, where hosts fetch them when they like.

    MemoryPublisher   arrays on the sampler's devices, which are this process's
    FilePublisher     files, for hosts in other processes: in memory, or in a folder that several
                      machines share
    ObjectPublisher   Ray's objects, for hosts on other machines (rollout/ray_host.py)
    FolderPublisher   model folders in Hugging Face's format, or PEFT's, for other engines (vllm.py)

A version appears whole or not at all; it is written once and goes when nobody may ask for it. The
trainer never waits for a host, nor a host for the trainer. Frozen parameters are published once,
before the first version.

    shoal-x81k2/owner.json              whose folder of files it is, locked while that process lives
                000003-4.safetensors    a version: tensors in the sampler's type, layers stacked
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from shoal.files import appearing, read_json, writing
from shoal.model import adapters
from shoal.model.parameters import (
    joined,
    param_shapes,
    param_specs,
    trained_of,
    trained_specs,
    without_adapter,
)
from shoal.model.transformer import Model, published_specs
from shoal.records import Params, ShoalError
from shoal.weights import huggingface, peft
from shoal.weights.checksum import checksum
from shoal.weights.sampler_copy import (
    from_host,
    named_leaves,
    named_specs,
    num_bytes,
    part_of,
    publish_to,
    published_dtype,
    shards_of,
    to_host,
)
from shoal.weights.tensor_files import (
    OWN_DTYPES,
    LazyArray,
    OutputTensor,
    StoredTensor,
    read_header,
    write_file,
)
from shoal.workers.process import Watcher

MEMORY_FOLDER = Path("/dev/shm")
"""Linux's file system in memory that every process may use."""
ROOM = 4
"""Copies of the weights that MEMORY_FOLDER must have room for to be chosen: versions that wait, and
the next."""
KEY = "publish.folder"
MEMORY = ("tmpfs", "ramfs")
LOCAL = (*MEMORY, "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs")
"""Kinds of file systems that one machine alone writes to."""
OWNER, PROGRAM = "owner.json", "shoal: published weights"
"""The file that marks a folder as made here, and what it says of that."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Tensors that are one where embeddings are tied."""

FROZEN = -1
"""The number of what is published once."""


class Version(abc.ABC):
    """A published version: a `Manifest`, and what its publisher does with it."""

    version: int

    @property
    @abc.abstractmethod
    def exists(self) -> bool: ...

    @abc.abstractmethod
    def read(
        self, model: Model, frozen: MutableMapping[str, Any] | None = None
    ) -> Future[Callable[[], Params]]: ...

    @abc.abstractmethod
    def parameters(self, model: Model) -> Params:
        """The trained weights, for a checkpoint."""

    @abc.abstractmethod
    def remove(self) -> None:
        """The weights go, or in another process than the publisher's what it has of them; a host
        that samples from them keeps its own."""


class Publisher(abc.ABC):
    """How the trainer's weights reach hosts. `model` is the sampler's, on all of its devices in
    this process."""

    def __init__(self, model: Model) -> None:
        self.model, self.num_bytes = model, num_bytes(model)
        """Bytes that the last publication copied or wrote."""
        self.versions: Mapping[int, Version] = {}
        """Those published and not released; a new table each time, as other threads read it."""

    @abc.abstractmethod
    def publish_frozen(self, params: Params) -> None:
        """Parameters that no version has, as none changes them; None in place of the others."""

    @abc.abstractmethod
    def write(self, version: int, params: Params) -> Version: ...

    def publish(self, version: int, params: Params) -> Version:
        before, written = self.versions.get(version), self.write(version, params)
        self.versions = {**self.versions, version: written}
        if before is not None:
            before.remove()
        return written

    def release(self, needed: Callable[[int], bool]) -> None:
        """Forgets the versions that are not needed."""
        before, self.versions = (
            self.versions,
            {number: one for number, one in self.versions.items() if needed(number)},
        )
        for number in before.keys() - self.versions:
            before[number].remove()

    def published_shapes(self) -> Params:
        """Shapes and type of a version's weights, and their layout where they are on devices."""
        return jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, published_dtype(self.model, spec)),
            trained_specs(self.model.architecture),
        )

    def close(self) -> None:
        self.release(lambda version: False)


class MemoryPublisher(Publisher):
    """Weights are copied where the sampler has other devices, types or layouts (compared by
    checksum). `in_parts`: its hosts have a part of the sampler's devices each, with whole replicas.
    `frees`: nothing trains, see `publish_to`."""

    def __init__(self, model: Model, in_parts: bool = False, frees: bool = False) -> None:
        super().__init__(model)
        self.in_parts, self.frees = in_parts, frees
        self._frozen: Params | None = None

    def publish_frozen(self, params: Params) -> None:
        self._frozen = publish_to(self.model, params)

    def write(self, version: int, params: Params) -> Version:
        own, published = (
            set(map(id, jax.tree.leaves(params))),
            publish_to(self.model, params, self.frees),
        )
        self.num_bytes = sum(
            leaf.nbytes for leaf in jax.tree.leaves(published) if id(leaf) not in own
        )
        whole = joined(published, self._frozen)
        # By this thread: JAX fills an array's list of shards at the first look, and a host that
        # looks meanwhile gets a part of it.
        return MemoryVersion(
            version, (published, whole, shards_of(whole) if self.in_parts else None)
        )

    def published_shapes(self) -> Params:
        return param_shapes(
            trained_of(published_specs(self.model)), self.model.role, self.model.dtype
        )


@dataclass
class MemoryVersion(Version):
    """`held`: the trained weights, all of them, and the parts of these by device where hosts have
    parts; None once they are removed."""

    version: int
    held: tuple[Params, Params, Any] | None

    @property
    def exists(self) -> bool:
        return self.held is not None

    def read(
        self, model: Model, frozen: MutableMapping[str, Any] | None = None
    ) -> Future[Callable[[], Params]]:
        done: Future[Callable[[], Params]] = Future()
        done.set_result(partial(self._give, model))
        return done

    def _give(self, model: Model) -> Params:
        if (held := self.held) is None:
            raise LookupError(f"version {self.version} is not published any more")
        return held[1] if held[2] is None else part_of(model, held[2])

    def parameters(self, model: Model) -> Params:
        assert self.held is not None
        return self.held[0]

    def remove(self) -> None:
        self.held = None


class StoredVersion(Version):
    """A version outside of any device, verified when it is read; it can be sent to another
    process."""

    checksums: Mapping[str, int]  # by the names of its tensors
    place: Any  # for messages
    frozen: StoredVersion | None  # what was published once

    @property
    def title(self) -> str:
        """What it is, for messages."""
        return (
            f"version {self.version}"
            if self.version != FROZEN
            else "what is frozen in all versions"
        )

    @abc.abstractmethod
    def open(self, model: Model) -> Callable[[str], np.ndarray]:
        """What reads a tensor of it by its name."""

    def read_now(self, model: Model, frozen: MutableMapping[str, Any]) -> Callable[[], Params]:
        """Brings the weights to the devices of `model`; what is returned verifies them and gives
        them, once."""
        parts = [self] if frozen or self.frozen is None else [self, self.frozen]
        readers = {
            name: read for part in parts for read in [part.open(model)] for name in part.checksums
        }
        checksums = {name: sum for part in parts for name, sum in part.checksums.items()}
        return from_host(model, lambda name: readers[name](name), checksums, self.place, frozen)

    def read(
        self, model: Model, frozen: MutableMapping[str, Any] | None = None
    ) -> Future[Callable[[], Params]]:
        # In the background nothing is computed: only the host's own thread dispatches programs to
        # its devices.
        pool = ThreadPoolExecutor(1, "weights")
        reading = pool.submit(self.read_now, model, {} if frozen is None else frozen)
        pool.shutdown(wait=False)
        return reading

    def parameters(self, model: Model) -> Params:
        # Lazily: on devices, each of the trainer's would hold a replica's weights beside its own.
        read = self.open(model)
        arrays = [
            LazyArray(
                spec.shape, published_dtype(model, spec), lambda part, name=name: read(name)[part]
            )
            if name in self.checksums
            else None
            for name, spec in named_specs(model).items()
        ]
        return jax.tree.unflatten(jax.tree.structure(param_specs(model.architecture)), arrays)


class FilePublisher(Publisher):
    """Versions as safetensors files in a folder of this process's own.

    What processes of this machine that were killed have left in `parent` is removed first."""

    def __init__(self, parent: Path, model: Model) -> None:
        super().__init__(model)
        self.parent, self.count = parent, 0
        self._frozen: FileVersion | None = None
        with writing(parent, KEY):
            parent.mkdir(exist_ok=True)  # not its parents: a mount that is missing is not made
            remove_abandoned(parent)
            self.folder = Path(tempfile.mkdtemp(prefix="shoal-", dir=parent))
            self._owner = _mark(self.folder)

    def publish_frozen(self, params: Params) -> None:
        self._frozen = self._write("frozen", FROZEN, params)

    def write(self, version: int, params: Params) -> Version:
        return replace(self._write(f"{version:06d}", version, params), frozen=self._frozen)

    def _write(self, name: str, version: int, params: Params) -> FileVersion:
        # A file of its own each time: JAX on CPU computes with mapped files as they are, without
        # copying them, so what is written over would change the weights of samplers that are at
        # work.
        self.count += 1
        file = self.folder / f"{name}-{self.count}.safetensors"
        checksums, leaves = {}, named_leaves(self.model, params)
        values = to_host(self.model, leaves)

        def runs(name: str, _: np.dtype) -> Iterator[tuple[int, np.ndarray]]:
            written, array, sum = next(values)
            assert written == name
            yield 0, array
            checksums[name] = int(sum)

        tensors = [
            OutputTensor(name, spec.shape, partial(runs, name), published_dtype(self.model, spec))
            for name, (_, spec, _) in leaves.items()
        ]
        with appearing(file, KEY) as temporary, writing(self.parent, KEY):
            write_file(temporary, tensors, np.dtype(self.model.dtype))
        return FileVersion(version, file, checksums)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._owner)


@dataclass(frozen=True)
class FileVersion(StoredVersion):
    """A version in a file."""

    version: int
    place: Path
    checksums: Mapping[str, int]
    frozen: StoredVersion | None = None

    @property
    def exists(self) -> bool:
        return self.place.is_file()

    def remove(self) -> None:
        self.place.unlink(missing_ok=True)

    def open(self, model: Model) -> Callable[[str], np.ndarray]:
        if not self.place.parent.is_dir():
            raise ShoalError(
                f"{KEY}={self.place.parent.parent}: the weights of {self.title} were published "
                f"there, but {socket.gethostname()} finds no such folder: give one that trainer "
                "and samplers share, or publish.channel=ray"
            )
        try:
            tensors = read_header(self.place)
        except OSError as error:
            raise LookupError(f"{self.title} is not in {self.place.parent} any more") from error
        # On a CPU, of a file system in memory, the parameters are the mapped file itself. Of a file
        # on a disk that several hosts share, a part that was not read yet is lost once the file is
        # removed.
        whole = np.memmap(self.place, np.uint8, "r") if file_system(self.place) in MEMORY else None

        def read(name: str) -> np.ndarray:
            tensor: StoredTensor = tensors[name]
            dtype = OWN_DTYPES[tensor.dtype]
            if whole is not None:
                count = dtype.itemsize * int(np.prod(tensor.shape))
                return (
                    np.asarray(whole[tensor.offset : tensor.offset + count])
                    .view(dtype)
                    .reshape(tensor.shape)
                )
            values = np.empty(tensor.shape, dtype)
            tensor.read(0, values)
            return values

        return read

    def read_now(self, model: Model, frozen: MutableMapping[str, Any]) -> Callable[[], Params]:
        try:
            return super().read_now(model, frozen)
        except ShoalError as error:
            if self.place.parent.is_dir() and not self.exists:
                raise LookupError(f"{self.title} was removed while it was read") from error
            raise


class ProbeScores(NamedTuple):
    """What the trainer's weights give for a probe's N tokens. An engine with the same weights must
    give the same, whatever it samples."""

    logprobs: np.ndarray  # float32[N-1]: of each token after the first
    next_token: np.ndarray
    """float32[K, V]: log-probs of the token that follows each of K beginnings of the probe, under
    the run's own temperature and truncation."""


class FolderPublisher(FilePublisher):
    """Versions as model folders in Hugging Face's format, an adapter merged into its base; or, with
    `adapters`, as folders of PEFT's with the adapter alone. `starts`: servers are started here, and
    read the base from `base`.

    `score` gives what the trainer's parameters make of a probe; `source` has the tokenizer,
    and config.json unless there is `config`. `model` is the trainer's, as are the parameters."""

    def __init__(
        self,
        parent: Path,
        model: Model,
        source: Path,
        config: dict[str, Any] | None,
        score: Callable[[Params], ProbeScores],
        adapters: bool = False,
        starts: bool = True,
    ) -> None:
        super().__init__(parent, model)
        self.source, self.config, self.score, self.adapters, self.starts = (
            source,
            config,
            score,
            adapters,
            starts,
        )
        self.base, self._base = self.folder / "base", None
        self.watcher = Watcher()  # of processes that read the folders
        self.watcher.remove(self.folder)

    def publish_frozen(self, params: Params) -> None:
        self._base = params
        if self.adapters and self.starts:
            self._save(self.base, without_adapter(self.model.architecture, params))

    def write(self, version: int, params: Params) -> Version:
        self.count += 1
        folder, a = self.folder / f"{version:06d}-{self.count}", self.model.architecture
        whole = joined(params, self._base)
        if self.adapters:
            with writing(self.parent, KEY):
                peft.save(folder, params, a, str(self.base), self.source, self.model.dtype)
        else:
            self._save(folder, adapters.merge(a, whole, self.model.role))
        self.num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        return FolderVersion(
            version,
            folder,
            self.score(whole),
            checksum(params),
            params if a.adapter else None,
            self.base if self.adapters else None,
        )

    def _save(self, folder: Path, weights: Params) -> None:
        a = self.model.architecture
        tensors = [*huggingface.output_tensors(weights, param_specs(a.base))]
        config = self.config or read_json(self.source / "config.json")
        if a.tie_embeddings and self.model.role.platform == "cpu":
            # vLLM 0.32 on a CPU packs the head, and packs it anew only where the files have it.
            embedding = next(one for one in tensors if one.name == EMBEDDING)
            tensors, config = (
                [*tensors, replace(embedding, name=HEAD)],
                {**config, "tie_word_embeddings": False},
            )
        with writing(self.parent, KEY):
            huggingface.save(folder, tensors, a.base, self.source, self.model.dtype, config=config)

    def published_shapes(self) -> Params:
        return param_shapes(
            trained_specs(self.model.architecture), self.model.role, self.model.dtype
        )

    def close(self) -> None:
        super().close()
        self.watcher.close()


@dataclass(frozen=True)
class FolderVersion(Version):
    """A version in a folder. `probe`: what the trainer makes of the probe with it."""

    version: int
    place: Path
    probe: ProbeScores
    checksum: int  # of the trained parameters
    adapter: Params | None  # those of an adapter
    base: Path | None = (
        None  # of the model, where the files are the adapter's; else they have it merged
    )

    @property
    def exists(self) -> bool:
        return self.place.is_dir()

    def remove(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)

    def read(
        self, model: Model, frozen: MutableMapping[str, Any] | None = None
    ) -> Future[Callable[[], Params]]:
        """Gives itself: the engine reads the files."""
        if not self.exists:
            raise LookupError(f"version {self.version} is not published any more")
        done: Future[Callable[[], Params]] = Future()
        done.set_result(lambda: self)
        return done

    def parameters(self, model: Model) -> Params:
        return self.adapter or huggingface.load(
            self.place, model.architecture, model.role, model.dtype
        )


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The kind of file system that a folder lies in; "" where the system does not say."""
    with contextlib.suppress(OSError):
        found = [line.split()[1:3] for line in mounts.read_text().splitlines()]
        inside = [(point, kind) for point, kind in found if folder.resolve().is_relative_to(point)]
        return max(inside, key=lambda one: len(one[0]), default=("", ""))[1]
    return ""


def default_folder(num_bytes: int) -> Path:
    """Where versions of so many bytes are written: a file system in memory with room for them, else
    a temporary one."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY_FOLDER).free >= ROOM * num_bytes:
            with tempfile.TemporaryFile(dir=MEMORY_FOLDER):
                return MEMORY_FOLDER
    return Path(tempfile.gettempdir())


def _owner_of(folder: Path) -> dict[str, str]:
    return {"program": PROGRAM, "folder": str(folder.resolve()), "host": socket.gethostname()}


def _mark(folder: Path) -> int:
    """Marks a folder as this process's; the open file, which is locked before it says so, until the
    process ends."""
    import fcntl

    file = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(file, json.dumps({**_owner_of(folder), "process": os.getpid()}).encode())
    return file


def remove_abandoned(parent: Path, mounts: Path = Path("/proc/mounts")) -> None:
    """Removes folders of publishers of this machine whose process has ended. Nothing where other
    machines may write: their processes cannot be seen."""
    import fcntl

    for folder in parent.glob("shoal-*") if file_system(parent, mounts) in LOCAL else ():
        # Never made where there was none: only what this program has marked is its own.
        with contextlib.suppress(OSError, ValueError), open(folder / OWNER, "r+b") as file:
            owner = json.loads(file.read(4096))
            if isinstance(owner, dict) and _owner_of(folder).items() <= owner.items():
                fcntl.flock(
                    file, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # BlockingIOError while its process lives
                shutil.rmtree(folder, ignore_errors=True)
