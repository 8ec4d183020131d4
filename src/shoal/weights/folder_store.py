"""The store for other engines: each version is a model folder that an engine reads by itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.files import explain_write_errors, read_json
from shoal.model import adapters
from shoal.model.families import is_multimodal
from shoal.model.parameters import (
    joined,
    param_shapes,
    param_specs,
    trained_specs,
    without_adapter,
)
from shoal.model.transformer import Model
from shoal.protocols import Version
from shoal.records import Params
from shoal.weights import huggingface, peft
from shoal.weights.checksum import checksum
from shoal.weights.fused import file_specs
from shoal.weights.publish_folder import KEY
from shoal.weights.store import FileStore
from shoal.workers.process import Watcher

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
"""Two names of the same tensor if embeddings are tied."""


class ProbeScores(NamedTuple):
    """What the trainer's weights compute for the N tokens of a probe. An engine with the same
    weights must compute the same, whatever it samples."""

    logprobs: np.ndarray  # float32[N-1]: log-prob of each token after the first
    next_token: np.ndarray
    """float32[K, V]: log-probs of the token that follows each of K beginnings of the probe, under
    the run's own temperature and truncation."""


class FolderStore(FileStore):
    """Versions as model folders in Hugging Face's format, with an adapter merged into its base; or,
    with `adapters`, as PEFT folders with the adapter alone. `starts` means that this process starts
    the servers, which then read the base from `base`, a folder that is written here.

    `score` computes `ProbeScores` from the trainer's parameters. `source` is a folder with the
    tokenizer, and with config.json unless `config` is given. `model` is the trainer's, and so are
    the parameters.
    """

    def __init__(
        self,
        parent: Path,
        model: Model,
        source: Path,
        config: dict[str, Any] | None,
        score: Callable[[Params], ProbeScores],
        adapters: bool = False,
        starts: bool = True,
        origin: Path | None = None,
    ) -> None:
        """Creates the folder, and starts a process that removes it and kills the servers once this
        process has ended. ShoalError if `parent` cannot be written. `source`: a folder with the
        tokenizer, and with config.json unless `config` is given. `score`: the trainer's parameters
        -> `ProbeScores`. `adapters`: versions are PEFT folders with the adapter alone. `starts`:
        this process starts the servers. `origin`: as in `huggingface.save`."""
        super().__init__(parent, model)
        self.source = source
        self.config = config
        self.score = score
        self.adapters = adapters
        self.starts = starts
        self.origin = origin
        self.base = self.folder / "base"
        self._base_params: Params | None = None
        # once this process has ended, kills the servers and removes the folder
        self.watcher = Watcher()
        self.watcher.remove(self.folder)

    def put_frozen(self, params: Params) -> None:
        """Keeps the frozen parameters, and writes them as the folder `base` if servers are started
        here and get adapters."""
        self._base_params = params
        if self.adapters and self.starts:
            self._save(self.base, without_adapter(self.model.architecture, params))

    def write(self, version: int, params: Params) -> Version:
        """Writes a version's folder, scores the probe with its weights, and returns the version.
        `params`: the trained parameters, None in place of the others. Sets `num_bytes` to the
        folder's size. ShoalError if the folder cannot be written."""
        folder = self.new_path(f"{version:06d}")
        a = self.model.architecture
        whole = joined(params, self._base_params)
        if self.adapters:
            # A base that is written here without its origin is a text model (`huggingface.save`).
            is_text = self.starts and self.origin is None
            config = self.config or read_json(self.source / "config.json")
            with explain_write_errors(self.parent, KEY):
                peft.save(
                    folder,
                    params,
                    a,
                    str(self.base),
                    self.source,
                    self.model.dtype,
                    not is_text and is_multimodal(config),
                )
        else:
            self._save(folder, adapters.merge(a, whole, self.model.role))
        self.num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        return FolderVersion(
            version=version,
            folder=folder,
            probe=self.score(whole),
            checksum=checksum(params),
            adapter=params if a.adapter else None,
            base=self.base if self.adapters else None,
        )

    def _save(self, folder: Path, weights: Params) -> None:
        """Writes the weights of a base model (no adapter) as a new folder in Hugging Face's format,
        with the tokenizer of `source` and a config.json. On a CPU a tied head is written as a
        tensor of its own too, and the config does not call it tied. ShoalError if it cannot be
        written."""
        a = self.model.architecture
        specs = file_specs(a.base, param_specs(a.base))
        tensors = list(huggingface.output_tensors(weights, specs))
        config = self.config or read_json(self.source / "config.json")
        # else a tied head is not in the files: the engine takes the embedding
        if a.tie_embeddings and self.model.role.platform == "cpu":
            # vLLM 0.32 on a CPU packs the head once, and again only if the files have the head.
            for tensor in tensors:
                if tensor.name == EMBEDDING:
                    tensors.append(replace(tensor, name=HEAD))
                    break
            config = {**config, "tie_word_embeddings": False}
        with explain_write_errors(self.parent, KEY):
            huggingface.save(
                folder,
                tensors,
                a.base,
                self.source,
                self.model.dtype,
                config=config,
                origin=self.origin,
            )

    def published_shapes(self) -> Params:
        """Returns shapes, types and shardings of a version's trained parameters, as the trainer's
        model has them."""
        return param_shapes(
            trained_specs(self.model.architecture), self.model.role, self.model.dtype
        )

    def close(self) -> None:
        """Deletes all folders, and kills the servers that were started with the watcher's
        environment."""
        super().close()
        self.watcher.close()


@dataclass(frozen=True)
class FolderVersion:
    """A version in a model folder, whose path an engine gets instead of weights."""

    version: int
    folder: Path
    probe: ProbeScores  # what the trainer computes for the probe with these weights
    checksum: int  # that of the trained parameters
    adapter: Params | None = None  # the adapter's parameters, if the model has an adapter
    base: Path | None = None  # the base model's folder, if `folder` holds only the adapter

    @property
    def exists(self) -> bool:
        return self.folder.is_dir()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def read(
        self, model: Model, frozen: MutableMapping[str, Any] | None = None
    ) -> Future[Callable[[], Params]]:
        """Returns a future that is done: a function that returns this version in place of weights,
        because the engine reads the files itself. LookupError, at once, if the folder was removed.
        `model` and `frozen` are not used."""
        if not self.exists:
            raise LookupError(f"version {self.version} is no longer published")
        done: Future[Callable[[], Params]] = Future()
        done.set_result(lambda: self)
        return done

    def parameters(self, model: Model) -> Params:
        """Returns the trained parameters: an adapter's as the trainer gave them (`model` is then
        not used), or without an adapter all, read from the folder to the devices of `model`."""
        if self.adapter is not None:
            return self.adapter
        return huggingface.load(self.folder, model.architecture, model.role, model.dtype)
