"""The store for other engines: versions as model folders that they read by themselves."""

from __future__ import annotations

import shutil
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.files import read_json, writing
from shoal.model import adapters
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
from shoal.weights.publish_folder import KEY
from shoal.weights.store import FileStore
from shoal.workers.process import Watcher

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
"""Tensors that are one where embeddings are tied."""


class ProbeScores(NamedTuple):
    """What the trainer's weights give for a probe's N tokens. An engine with the same weights must
    give the same, whatever it samples."""

    logprobs: np.ndarray  # float32[N-1]: of each token after the first
    next_token: np.ndarray
    """float32[K, V]: log-probs of the token that follows each of K beginnings of the probe, under
    the run's own temperature and truncation."""


class FolderStore(FileStore):
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
        self.source = source
        self.config = config
        self.score = score
        self.adapters = adapters
        self.starts = starts
        self.base = self.folder / "base"
        self._base_params: Params | None = None
        self.watcher = Watcher()  # of processes that read the folders
        self.watcher.remove(self.folder)

    def put_frozen(self, params: Params) -> None:
        self._base_params = params
        if self.adapters and self.starts:
            self._save(self.base, without_adapter(self.model.architecture, params))

    def write(self, version: int, params: Params) -> Version:
        folder = self.new_path(f"{version:06d}")
        a = self.model.architecture
        whole = joined(params, self._base_params)
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
            adapter=params if a.adapter else None,
            base=self.base if self.adapters else None,
        )

    def _save(self, folder: Path, weights: Params) -> None:
        a = self.model.architecture
        tensors = list(huggingface.output_tensors(weights, param_specs(a.base)))
        config = self.config or read_json(self.source / "config.json")
        if a.tie_embeddings and self.model.role.platform == "cpu":
            # vLLM 0.32 on a CPU packs the head, and packs it again only where the files have it.
            for tensor in tensors:
                if tensor.name == EMBEDDING:
                    tensors.append(replace(tensor, name=HEAD))
                    break
            config = {**config, "tie_word_embeddings": False}
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
class FolderVersion:
    """A version in a model folder, which an engine is given instead of weights."""

    version: int
    folder: Path
    probe: ProbeScores  # what the trainer makes of the probe with it
    checksum: int  # of the trained parameters
    adapter: Params | None = None  # the adapter's parameters, of a model with one
    base: Path | None = None  # the base model's folder, where `folder` holds the adapter alone

    @property
    def exists(self) -> bool:
        return self.folder.is_dir()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

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
        if self.adapter is not None:
            return self.adapter
        return huggingface.load(self.folder, model.architecture, model.role, model.dtype)
