"""A teacher behind an address (`teacher.address`): a server that gives log-probs of a prompt's
tokens, by vLLM's `prompt_logprobs`.

    GET  /v1/models        the model's name, and the most tokens that it takes
    POST /v1/completions   a completion with its prompt, as token ids
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.chat.tokenizer import Tokenizer
from shoal.config.derived import longest_sequence
from shoal.config.train import Config
from shoal.mesh import World
from shoal.protocols import TokenScores
from shoal.records import HostLost, ShoalError
from shoal.rollout.http_engine import Server, TurnedDown, reading
from shoal.tasks.graders.judge_model import KEY_VARIABLE
from shoal.trainer.teachers import num_likeliest

KEY = "teacher.address"
MODELS = "/v1/models"
COMPLETE = "/v1/completions"
REQUESTS = 32
"""Most requests that are under way at once."""
REQUEST_SECONDS = 600.0
"""Longest time that a request may take, including the time that it waits in the server."""
TRIES = 4
"""How often a request is sent in all, if the server does not answer or is too busy."""
FIRST_PAUSE_SECONDS = 2.0
"""The pause before the second try, which is doubled before each further one."""
RETRIED = (408, 425, 429)
"""Statuses below 500 after which the same request may succeed."""
PROBE = "The answer to 12 + 30 is 42."


@dataclass(frozen=True)
class TeacherServer:
    """A server that scores sequences (`SequenceScorer`). In a run of several processes the first
    one asks, and the others get its answers."""

    server: Server
    model: str  # its name there
    top_k: int  # how many of the likeliest tokens it names in each place; 0: none
    vocab_size: int  # ids of tokens are below it
    world: World = field(default_factory=World)
    pause_seconds: float = FIRST_PAUSE_SECONDS

    @classmethod
    def open(
        cls, address: str, config: Config, tokenizer: Tokenizer, vocab_size: int, world: World
    ) -> TeacherServer:
        """Reaches the server at `address` and returns it. `tokenizer` and `vocab_size` are those of
        the model that is trained. ShoalError if it does not answer, serves several models, takes no
        sequence of the run's length, gives no log-probs of a prompt's tokens, or too few, or has
        other tokens."""
        top_k = num_likeliest(config.teacher, vocab_size)
        url = address.rstrip("/").removesuffix("/v1")
        server = Server(url, api_key=os.environ.get(KEY_VARIABLE, ""))
        try:
            described = _only_model(server, address)
        except HostLost as error:
            raise ShoalError(
                f"{KEY}={address}: {error}; expected the address of a running server", KEY
            ) from error
        longest = longest_sequence(config)
        limit = described.get("max_model_len")
        if isinstance(limit, int) and limit < longest + 1:
            raise ShoalError(
                f"{KEY}={address}: the server takes {limit} tokens (max_model_len), and a prompt "
                f"with its completion may have {longest}, and it samples one more: start it with "
                f"--max-model-len={longest + 1}",
                KEY,
            )
        teacher = cls(server, str(described["id"]), top_k, vocab_size, world)
        try:
            teacher._check_tokens(address, tokenizer)
        except HostLost as error:
            likeliest = f" and of the {top_k} likeliest tokens at each position" if top_k else ""
            cure = f"vLLM with --max-logprobs={max(top_k, 1)}"
            if top_k:
                cure += ", or a lower teacher.top_k"
            raise ShoalError(
                f"{KEY}={address}: {error}; expected the log-probs of a prompt's tokens{likeliest} "
                f"(prompt_logprobs): {cure}",
                KEY,
            ) from error
        return teacher

    def score(self, sequences: Sequence[tuple[np.ndarray, int]]) -> list[TokenScores]:
        """Returns what the server says of the sequences' tokens (`SequenceScorer`)."""
        scores = []
        if self.world.is_main:
            with ThreadPoolExecutor(REQUESTS) as threads:
                scores = list(threads.map(self._score_one, sequences))
        if self.world.count == 1:
            return scores
        # A server may answer the same request with other last bits, and processes must not differ.
        data = _to_bytes(scores, self.top_k)
        first, *_ = self.world.exchange("what the teacher's server says", data)
        return _from_bytes(first, [len(ids) - start for ids, start in sequences])

    def _score_one(self, sequence: tuple[np.ndarray, int]) -> TokenScores:
        """Returns what the server says of a sequence, and asks again where that may help."""
        ids, start = sequence
        fault: HostLost | None = None
        for number in range(TRIES):
            if number > 0:
                time.sleep(self.pause_seconds * 2 ** (number - 1))
            try:
                return self._ask(ids, start)
            except TurnedDown as error:
                if error.status < 500 and error.status not in RETRIED:
                    raise ShoalError(f"{KEY}={self.server.url}: {error}", KEY) from error
                fault = error
            except HostLost as error:
                fault = error
        raise ShoalError(
            f"{KEY}={self.server.url}: {fault}, also at the last of {TRIES} tries; once it "
            "answers, resume the run",
            KEY,
        )

    def _ask(self, ids: np.ndarray, start: int) -> TokenScores:
        """Sends one request and returns what the server says of the tokens from `start` on.
        HostLost if it does not answer, or its answer cannot be right."""
        return self._read_scores(self._prompt_logprobs(ids.tolist()), ids, start)

    def _read_scores(
        self, named_tokens: Sequence[Mapping[str, Any]], ids: np.ndarray, start: int
    ) -> TokenScores:
        """Returns what an answer (`_prompt_logprobs`) says of the tokens `ids` from `start` on.
        HostLost if it cannot be right."""
        shape = (len(ids) - start, self.top_k)
        logprobs = np.zeros(shape[0], np.float32)
        top_ids = np.zeros(shape, np.int32)
        top_logprobs = np.zeros(shape, np.float32)
        with reading(COMPLETE, {"prompt_logprobs": named_tokens[start : start + 1]}):
            for place in range(start, len(ids)):
                by_id = _logprobs_by_id(named_tokens[place], self.vocab_size)
                # The token itself comes in addition to the likeliest, unless it is one of them.
                likeliest = sorted(by_id, key=lambda id: -by_id[id])[: self.top_k]
                if len(likeliest) < self.top_k:
                    raise ValueError(f"{len(likeliest)} tokens in a place, not {self.top_k}")
                logprobs[place - start] = by_id[int(ids[place])]
                top_ids[place - start] = likeliest
                top_logprobs[place - start] = [by_id[id] for id in likeliest]
        return TokenScores(logprobs, top_ids, top_logprobs)

    def _prompt_logprobs(self, ids: list[int]) -> list[Mapping[str, Any]]:
        """Returns the tokens that the server names in each place of a prompt, id -> what it says of
        it; {} in the first place, which nothing is before. HostLost if it does not."""
        body = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self.top_k,
        }
        reply = self.server.ask(COMPLETE, body, REQUEST_SECONDS)
        with reading(COMPLETE, reply):
            named_tokens = reply["choices"][0].get("prompt_logprobs")
            if named_tokens is None:
                raise ValueError("no prompt_logprobs")
            if len(named_tokens) != len(ids):
                raise ValueError(f"prompt_logprobs of {len(named_tokens)} tokens, not {len(ids)}")
        return [named or {} for named in named_tokens]

    def _check_tokens(self, address: str, tokenizer: Tokenizer) -> None:
        """Scores a text. ShoalError if the server calls its tokens by other texts than the
        tokenizer; nothing is compared if it has none for them. HostLost as `_ask`."""
        ids = np.array(tokenizer.encode(PROBE), np.int32)
        named_tokens = self._prompt_logprobs(ids.tolist())
        self._read_scores(named_tokens, ids, 1)  # called for its error alone
        for id, named in zip(ids.tolist()[1:], named_tokens[1:], strict=True):
            own = tokenizer.decode([id])
            theirs = named[str(id)].get("decoded_token")
            # Some tokenizers leave out the space before a word that is alone.
            if theirs is not None and str(theirs).strip() != own.strip():
                raise ShoalError(
                    f"{KEY}={address}: its token {id} is {theirs!r}, and the model's is {own!r}, "
                    "so its log-probs would be of other tokens; give one of the same family",
                    KEY,
                )


def _only_model(server: Server, address: str) -> Mapping[str, Any]:
    """Returns what the server says of the model that it serves. HostLost if it does not answer;
    ShoalError if it serves several."""
    reply = server.ask(MODELS)
    with reading(MODELS, reply):
        # Adapters of a model have it as `parent`.
        models = [model for model in reply["data"] if not model.get("parent")]
        names = [str(model["id"]) for model in models]
    if len(models) != 1:
        raise ShoalError(
            f"{KEY}={address}: the server has {len(models)} models ({', '.join(names)}); expected "
            "one, the teacher",
            KEY,
        )
    return models[0]


def _logprobs_by_id(named: Mapping[str, Any], vocab_size: int) -> dict[int, float]:
    """Returns id -> log-prob of the tokens that a server names in one place. ValueError if one
    cannot be right."""
    by_id = {}
    for text, entry in named.items():
        id, logprob = int(text), float(entry["logprob"])
        if not 0 <= id < vocab_size:
            raise ValueError(f"a token {id}, and the model's vocabulary has {vocab_size}")
        # Sums of rounded probabilities may pass 1 a little.
        if not logprob <= 1e-3:
            raise ValueError(f"a log-prob {logprob}")
        by_id[id] = logprob
    return by_id


def _to_bytes(scores: Sequence[TokenScores], top_k: int) -> bytes:
    """Returns scores as bytes, those of all tokens after each other."""
    none = TokenScores(np.zeros(0), np.zeros((0, top_k)), np.zeros((0, top_k)))
    all_scores = [none, *scores]
    file = io.BytesIO()
    np.savez(
        file,
        logprobs=np.concatenate([one.logprobs for one in all_scores]),
        top_ids=np.concatenate([one.top_ids for one in all_scores]),
        top_logprobs=np.concatenate([one.top_logprobs for one in all_scores]),
    )
    return file.getvalue()


def _from_bytes(data: bytes, lengths: Sequence[int]) -> list[TokenScores]:
    """Undoes `_to_bytes`. `lengths`: the scored tokens of each sequence."""
    arrays = np.load(io.BytesIO(data))
    scores = []
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        scores.append(
            TokenScores(
                logprobs=arrays["logprobs"][part].astype(np.float32),
                top_ids=arrays["top_ids"][part].astype(np.int32),
                top_logprobs=arrays["top_logprobs"][part].astype(np.float32),
            )
        )
        start += length
    return scores
