"""Stores of weights: each holds the versions that the trainer publishes, and hosts read a version
when they like.

    MemoryStore   arrays on the sampler's devices, which are this process's
    FileStore     files, for hosts in other processes: in memory, or in a folder that several
                  machines share
    RayStore      Ray's objects, for hosts on other machines (ray_store.py)
    FolderStore   model folders in Hugging Face's format, or PEFT's, for other engines
                  (folder_store.py)

A version appears whole or not at all; it is written once, and dropped when nobody may request it
any more. The trainer never waits for a host, nor a host for the trainer. Frozen parameters are
stored once, before the first version.
"""

from __future__ import annotations

import abc
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from shoal.files import atomic_write, explain_write_errors
from shoal.model.layers import published_specs
from shoal.model.parameters import (
    ParamSpec,
    joined,
    param_shapes,
    param_specs,
    trained_of,
    trained_specs,
)
from shoal.model.transformer import Model
from shoal.protocols import Version
from shoal.records import Params, ShoalError
from shoal.weights.publish_folder import (
    KEY,
    MEMORY_FILE_SYSTEMS,
    file_system,
    mark_folder,
    remove_abandoned,
)
from shoal.weights.sampler_copy import (
    arrays_on,
    from_host,
    named_leaves,
    named_specs,
    num_bytes,
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

FROZEN = -1
"""Version number of the frozen parameters, which are stored once."""


class WeightStore(abc.ABC):
    """Versions of the trainer's weights, by number, each kept until it is dropped. The fleet owns
    the store.

    `model` is the sampler's, on all of its devices in this process.
    """

    def __init__(self, model: Model) -> None:
        """`model`: the sampler's, on all of its devices in this process. The store is empty."""
        self.model = model
        self.num_bytes = num_bytes(model)
        """Bytes that the last `put` copied or wrote."""
        self.versions: Mapping[int, Version] = {}
        """Versions by number. Replaced as a whole, never changed, as other threads read it."""

    @abc.abstractmethod
    def put_frozen(self, params: Params) -> None:
        """Stores the parameters that no version changes; `params` has None in the places of the
        others."""

    @abc.abstractmethod
    def write(self, version: int, params: Params) -> Version:
        """Writes the trained parameters as a new version, and returns it without adding it to
        `versions` (`put` does). `params` has None in the places of the frozen ones."""

    def put(self, version: int, params: Params) -> Version:
        """Writes a version, adds it to `versions` and returns it. If there is a version of this
        number, it is replaced and then removed."""
        replaced = self.versions.get(version)
        written = self.write(version, params)
        self.versions = {**self.versions, version: written}
        if replaced is not None:
            replaced.remove()
        return written

    def drop(self, versions: Iterable[int]) -> None:
        """Removes these versions from the store. KeyError if the store lacks one of them: the
        others are then out of `versions`, but files of some may stay. A host that samples from one
        of them still has its arrays."""
        previous = self.versions
        dropped = set(versions)
        self.versions = {
            number: version for number, version in previous.items() if number not in dropped
        }
        for number in dropped:
            previous[number].remove()

    def published_shapes(self) -> Params:
        """Returns shapes and types of a version's trained parameters, with None in place of the
        frozen ones. They have shardings only if the store keeps versions on devices; here they have
        none."""

        def shape_of(spec: ParamSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(spec.shape, published_dtype(self.model, spec))

        return jax.tree.map(shape_of, trained_specs(self.model.architecture))

    def close(self) -> None:
        """Drops all versions."""
        self.drop(list(self.versions))


# Arrays of this process


class MemoryStore(WeightStore):
    """Versions as arrays of this process: the trainer's own arrays, or copies if the sampler has
    other devices, types or layouts (a copy is compared by checksum).

    `in_parts`: there are several hosts, each with some of the sampler's devices, which hold whole
    replicas. `delete_source`: nothing trains, so `write` deletes arrays of `params` once they are
    copied, if the sampler has separate arrays for layers (see `publish_to`)."""

    def __init__(self, model: Model, in_parts: bool = False, delete_source: bool = False) -> None:
        """`in_parts`: several hosts each have some of the sampler's devices. `delete_source`:
        `write` passes this to `publish_to`, which then deletes arrays that it has copied, because
        nothing trains on them."""
        super().__init__(model)
        self.in_parts = in_parts
        self.delete_source = delete_source
        self._frozen: Params | None = None

    def put_frozen(self, params: Params) -> None:
        """Puts the frozen parameters on the sampler's devices."""
        self._frozen = publish_to(self.model, params)

    def write(self, version: int, params: Params) -> Version:
        """Puts trained parameters on the sampler's devices, and returns the version. Sets
        `num_bytes` to the bytes that were copied: arrays that are the trainer's own count nothing.
        RuntimeError if a copy's checksum differs."""
        trainers_own = {id(leaf) for leaf in jax.tree.leaves(params)}
        trained = publish_to(self.model, params, self.delete_source)
        self.num_bytes = 0
        for leaf in jax.tree.leaves(trained):
            if id(leaf) not in trainers_own:
                self.num_bytes += leaf.nbytes
        whole = joined(trained, self._frozen)
        # In this thread, because JAX fills an array's list of shards at the first read, and a host
        # that reads the list meanwhile gets an incomplete one.
        shards = shards_of(whole) if self.in_parts else None
        return MemoryVersion(version, HeldArrays(trained, whole, shards))

    def published_shapes(self) -> Params:
        """Returns shapes, types and shardings of a version's trained parameters, as the sampler
        holds them."""
        return param_shapes(
            trained_of(published_specs(self.model)), self.model.role, self.model.dtype
        )


class HeldArrays(NamedTuple):
    """The arrays of a version in memory."""

    trained: Params
    whole: Params  # trained and frozen parameters together
    # shards of `whole` by device, if each host has some of the devices; else None
    shards: list[dict[Any, jax.Array]] | None


@dataclass
class MemoryVersion:
    """A version in arrays of this process; `held` is None once the version is removed."""

    version: int
    held: HeldArrays | None

    @property
    def exists(self) -> bool:
        return self.held is not None

    def read(
        self, model: Model, frozen: MutableMapping[str, Any] | None = None
    ) -> Future[Callable[[], Params]]:
        """Returns a future that is done: a function that returns the arrays on the devices of
        `model`, or raises LookupError if the version was removed. `frozen` is not used."""
        done: Future[Callable[[], Params]] = Future()
        done.set_result(partial(self._arrays_of, model))
        return done

    def _arrays_of(self, model: Model) -> Params:
        """Returns all parameters of the version, as arrays on the devices of `model`: all of the
        sampler's, or some of them. Nothing is copied. If `held.shards` is None, `model` is not
        used: the arrays are on all of the sampler's devices. LookupError if the version was
        removed."""
        held = self.held  # read once: another thread may remove the version meanwhile
        if held is None:
            raise LookupError(f"version {self.version} is no longer published")
        if held.shards is None:
            return held.whole
        return arrays_on(model, held.shards)

    def parameters(self, model: Model) -> Params:
        """Returns the trained parameters."""
        assert self.held is not None
        return self.held.trained

    def remove(self) -> None:
        """Gives up the arrays; hosts that have read them keep them alive."""
        self.held = None


# Tensors outside of any device


class StoredVersion(abc.ABC):
    """A version outside of any device, which is verified when it is read, and can be sent to
    another process."""

    version: int
    checksums: Mapping[str, int]  # by names of tensors, as `named_specs` has them
    # the frozen parameters, which were stored once; None if all are trained
    frozen: StoredVersion | None

    @property
    @abc.abstractmethod
    def location(self) -> str:
        """Says where the version's tensors are, for messages."""

    @property
    def title(self) -> str:
        """Names the version, for messages."""
        if self.version == FROZEN:
            return "what is frozen in all versions"
        return f"version {self.version}"

    @property
    @abc.abstractmethod
    def exists(self) -> bool: ...

    @abc.abstractmethod
    def remove(self) -> None: ...

    @abc.abstractmethod
    def open(self, model: Model) -> Callable[[str], np.ndarray]:
        """Returns a function: name of one of the version's tensors -> its values, in the sampler's
        type, with layers stacked. LookupError if the version was removed."""

    def read_now(self, model: Model, frozen: MutableMapping[str, Any]) -> Callable[[], Params]:
        """Reads the weights to the devices of `model`, waits for them, and returns a function that
        verifies their checksums and returns all parameters. That function can be called once; it
        raises ShoalError if a checksum differs. LookupError if the version was removed.

        `frozen`: the caller's frozen parameters by name. If it is empty, they are read too, and
        that function adds them to it; else they are taken from it.
        """
        versions: list[StoredVersion] = [self]
        if self.frozen is not None and not frozen:
            versions.append(self.frozen)
        readers: dict[str, Callable[[str], np.ndarray]] = {}
        checksums: dict[str, int] = {}
        for version in versions:
            reader = version.open(model)
            for name, expected in version.checksums.items():
                readers[name] = reader
                checksums[name] = expected

        def read_tensor(name: str) -> np.ndarray:
            return readers[name](name)

        return from_host(model, read_tensor, checksums, self.location, frozen)

    def read(
        self, model: Model, frozen: MutableMapping[str, Any] | None = None
    ) -> Future[Callable[[], Params]]:
        """Runs `read_now` in a background thread (`frozen` None: an empty mapping of its own), and
        returns the future of its result, which has its errors too."""
        # The background thread computes nothing: only the host's own thread may dispatch programs
        # to its devices.
        pool = ThreadPoolExecutor(1, "weights")
        reading = pool.submit(self.read_now, model, {} if frozen is None else frozen)
        pool.shutdown(wait=False)
        return reading

    def parameters(self, model: Model) -> Params:
        """Returns the trained parameters in the sampler's type as `LazyArray`s, which read their
        tensors when they are used, with None in place of the frozen ones. LookupError if the
        version was removed."""
        # Lazily: arrays on devices would make each of the trainer's devices hold a replica's
        # weights besides the trainer's.
        reader = self.open(model)

        def read_part(name: str, part: tuple[slice, ...]) -> np.ndarray:
            # the whole tensor is read, and the part is cut from it
            return reader(name)[part]

        arrays: list[LazyArray | None] = []
        for name, spec in named_specs(model).items():
            if name in self.checksums:
                dtype = published_dtype(model, spec)
                arrays.append(LazyArray(spec.shape, dtype, partial(read_part, name)))
            else:
                arrays.append(None)
        return jax.tree.unflatten(jax.tree.structure(param_specs(model.architecture)), arrays)


class FileStore(WeightStore):
    """Versions as safetensors files in a new folder within `parent`. The new folder is deleted when
    the store is closed.

    Creating a store also removes such folders in `parent` of processes of this machine that were
    killed.

        shoal-x81k2/owner.json            names the folder's process, which keeps the file locked
                    000003-4.safetensors  a version: tensors in the sampler's type, layers stacked
    """

    def __init__(self, parent: Path, model: Model) -> None:
        """Creates the folder, locks its `owner.json`, and removes such folders in `parent` of
        processes of this machine that were killed. ShoalError if `parent` cannot be written;
        `parent` itself is created if only it is missing."""
        super().__init__(model)
        self.parent = parent
        self.num_written = 0
        self._frozen: FileVersion | None = None
        with explain_write_errors(parent, KEY):
            # without its parents: if a mount is missing, it must not be created as a folder
            parent.mkdir(exist_ok=True)
            remove_abandoned(parent)
            self.folder = Path(tempfile.mkdtemp(prefix="shoal-", dir=parent))
            self._owner_file = mark_folder(self.folder)

    def put_frozen(self, params: Params) -> None:
        self._frozen = self._write_file("frozen", FROZEN, params)

    def write(self, version: int, params: Params) -> Version:
        return replace(self._write_file(f"{version:06d}", version, params), frozen=self._frozen)

    def new_path(self, name: str) -> Path:
        """Returns a path in the store's folder that no version had before, `<name>-<number>`;
        creates nothing."""
        self.num_written += 1
        return self.folder / f"{name}-{self.num_written}"

    def _write_file(self, name: str, version: int, params: Params) -> FileVersion:
        """Writes the parameters that are not None to a new safetensors file
        `<name>-<number>.safetensors`, and returns it as a version with the checksums of its
        tensors. ShoalError if it cannot be written."""
        # A new file each time: JAX on CPU computes with mapped files as they are, without copying
        # them, so overwriting a file would change the weights of samplers that are working.
        path = self.new_path(name).with_suffix(".safetensors")
        leaves = named_leaves(self.model, params)
        values = to_host(self.model, leaves)
        checksums: dict[str, int] = {}

        # `_`: the type that `write_file` asks for, which the values have already
        def runs(name: str, _: np.dtype) -> Iterator[tuple[int, np.ndarray]]:
            """Yields all of a tensor as one run, and stores its checksum in `checksums`. Tensors
            must be asked for in their order."""
            tensor_name, array, array_sum = next(values)
            assert tensor_name == name
            yield 0, array
            # after the write, because `int` waits for the device to compute the sum
            checksums[name] = int(array_sum)

        tensors = [
            OutputTensor(name, spec.shape, partial(runs, name), published_dtype(self.model, spec))
            for name, (_, spec, _) in leaves.items()
        ]
        with atomic_write(path, KEY) as temporary, explain_write_errors(self.parent, KEY):
            write_file(temporary, tensors, np.dtype(self.model.dtype))
        return FileVersion(version, path, checksums)

    def close(self) -> None:
        """Drops all versions, deletes the store's folder, and gives up the lock on its
        `owner.json`."""
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._owner_file)


@dataclass(frozen=True)
class FileVersion(StoredVersion):
    """A version in a safetensors file."""

    version: int
    path: Path
    checksums: Mapping[str, int]
    frozen: StoredVersion | None = None

    @property
    def location(self) -> str:
        return str(self.path)

    @property
    def exists(self) -> bool:
        return self.path.is_file()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def open(self, model: Model) -> Callable[[str], np.ndarray]:
        """Returns a function that reads one tensor of the file by name. ShoalError if this machine
        does not have the folder; LookupError if it has the folder, but the file was removed."""
        folder = self.path.parent
        if not folder.is_dir():
            raise ShoalError(
                f"{KEY}={folder.parent}: the weights of {self.title} were published "
                f"there, but {socket.gethostname()} finds no such folder: give one that trainer "
                "and samplers share, or publish.channel=ray"
            )
        try:
            tensors = read_header(self.path)
        except OSError as error:
            raise LookupError(f"{self.title} is not in {folder} any more") from error
        # In a file system in memory the file is mapped, and on a CPU the parameters are the mapped
        # file itself. It is not mapped on a disk that several hosts share: there, what was not read
        # yet is lost once the file is removed.
        mapped: np.memmap | None = None
        if file_system(self.path) in MEMORY_FILE_SYSTEMS:
            mapped = np.memmap(self.path, np.uint8, "r")

        def read(name: str) -> np.ndarray:
            """Returns a tensor: a view of the mapped file, or a new array."""
            tensor: StoredTensor = tensors[name]
            dtype = OWN_DTYPES[tensor.dtype]
            if mapped is None:
                values = np.empty(tensor.shape, dtype)
                tensor.read(0, values)
                return values
            size = dtype.itemsize * int(np.prod(tensor.shape))
            # a plain array that views the mapping; nothing is copied
            tensor_bytes = np.asarray(mapped[tensor.offset : tensor.offset + size])
            return tensor_bytes.view(dtype).reshape(tensor.shape)

        return read

    def read_now(self, model: Model, frozen: MutableMapping[str, Any]) -> Callable[[], Params]:
        """Reads the weights like `StoredVersion.read_now`, but raises LookupError instead of
        ShoalError if the file was removed while it was read."""
        try:
            return super().read_now(model, frozen)
        except ShoalError as error:
            if self.path.parent.is_dir() and not self.exists:
                raise LookupError(f"{self.title} was removed while it was read") from error
            raise
