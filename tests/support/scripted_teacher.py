"""A server that gives log-probs of a prompt's tokens, as vLLM does, by the standard library: those
of a function from tokens to logits. Its faults are named."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from shoal.chat.tokenizer import Tokenizer

Logits = Callable[[list[int]], np.ndarray]
"""Token ids of length T -> the logits after each, float[T, V]."""


class ScriptedTeacher:
    """Serves until it is closed. `tokenizer`: it then says the text of each token. `fault` is one
    of "no logprobs", "few", "short", "positive", "other tokens", "large id", "two models", "key",
    or a status, which strikes `times` of the requests; `most_logprobs`: `--max-logprobs`."""

    def __init__(
        self,
        logits: Logits,
        tokenizer: Tokenizer | None = None,
        max_model_len: int = 4096,
        most_logprobs: int = 10**6,
    ) -> None:
        self.logits = logits
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.most_logprobs = most_logprobs
        self.fault = ""
        self.times = 10**9
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        own = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                models = [{"id": "big", "max_model_len": own.max_model_len}]
                models.append({"id": "its-adapter", "parent": "big"})
                if own.fault == "two models":
                    models.append({"id": "other"})
                self.answer(200 if self.path == "/v1/models" else 404, {"data": models})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                own.keys.add(self.headers.get("Authorization"))
                self.answer(*own.reply(self.path, body))

            def answer(self, status: int, reply: Any) -> None:
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """The answer to a call: (status, what is sent as JSON)."""
        if self.fault.isdecimal() and self.times > 0:
            self.times -= 1
            return int(self.fault), {"error": "no"}
        if path != "/v1/completions" or body["model"] != "big":
            return 404, {"error": f"{path}, {body['model']}"}
        k = body["prompt_logprobs"]
        if k > self.most_logprobs:
            return 400, {"error": f"prompt_logprobs of {k}: at most {self.most_logprobs}"}
        self.bodies.append(body)
        named: Any = self.prompt_logprobs(body["prompt"], 1 if self.fault == "few" else k)
        if self.fault == "no logprobs":
            named = None
        elif self.fault == "short":
            named = named[:-1]
        return 200, {"choices": [{"text": "x", "prompt_logprobs": named}]}

    def prompt_logprobs(self, ids: list[int], k: int) -> list[Any]:
        """The `k` likeliest tokens in each place, and the token itself."""
        scores = np.asarray(self.logits(ids), np.float64)
        scores -= scores.max(-1, keepdims=True)
        logprobs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        named: list[Any] = [None]
        for before, id in zip(logprobs[:-1], ids[1:], strict=True):
            entries = {}
            for other in [*np.argsort(-before, kind="stable")[:k].tolist(), id]:
                entry: dict[str, Any] = {"logprob": float(before[other])}
                if self.tokenizer is not None:
                    shift = self.fault == "other tokens"
                    entry["decoded_token"] = self.tokenizer.decode([other + shift])
                entries[str(other)] = entry
            if self.fault == "positive":
                entries[str(id)]["logprob"] = 0.5
            if self.fault == "large id":
                entries["1000000"] = {"logprob": -1.0}
            named.append(entries)
        return named
