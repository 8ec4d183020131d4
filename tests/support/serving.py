"""A served model in this process: the address of `shoal serve` in a thread, and clients of it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import tokenizers
from chat_models import CHATS, write_chat_tokenizer
from tiny_models import write_model

from shoal.commands.serve import open_sampler
from shoal.config.merge import compose
from shoal.job.job import Job
from shoal.report.console import Console
from shoal.serve.app import Api
from shoal.serve.host_sampler import HostSampler
from shoal.serve.server import served


def write_chat_model(folder: Path, seed: int = 0) -> Path:
    """A tiny random model with Qwen3's chat template, which ends a turn with every third of its
    bytes' tokens."""
    write_chat_tokenizer(folder, "qwen3")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    write_model(folder, "qwen3", seed, vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=1)
    ends = [tokenizer.token_to_id(text) for text in CHATS["qwen3"].eos]
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [*ends, *range(100, 256, 8)]})
    )
    return folder


@dataclass
class Served:
    """`post` and `get` ask it; `url` is what clients are given."""

    url: str
    api: Api
    sampler: HostSampler
    http: httpx2.Client

    def post(self, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        return self.http.post(path, json=body if body is not None else {}, headers=headers)


@contextlib.contextmanager
def serving(*words: str, token: str = "", seconds: float = 60.0) -> Iterator[Served]:
    """What `shoal serve` with these words answers, calls for weights included."""
    config, _ = compose("serve", list(words))
    with Job(config, Console(io.StringIO())) as job:
        job.check()
        with contextlib.closing(open_sampler(job)) as sampler:
            api = Api(sampler, token, seconds, sampler)
            with served(api.app()) as url, httpx2.Client(base_url=url, timeout=60) as client:
                yield Served(url, api, sampler, client)
