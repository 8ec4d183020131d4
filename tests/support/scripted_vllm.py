"""A server with vLLM's calls, by the standard library: its tokens are the seed's, its weights a
JSON file, its faults are named. `python scripted_vllm.py --port=N ...` serves until it is killed.

A folder of weights, or of an adapter, has `weights.json`: {"checksum": ..., "probe": [log-probs of
the second and later tokens]}.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VOCABULARY = 8


class Deep(str):
    """A text that is sent as JSON."""


class Listener(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing is said of those who have hung up."""


class ScriptedServer:
    """`fault` is one of those in `change`, or 500, 429, cut, hang, trickle, old, noop, html, deep,
    choices, aborts, raw, "JSON metrics", "no counters", "empty probe" or "no models"; it strikes
    `times` answers. Or it is a call for sleep, which answers 500. `takes_adapters`: None for no
    such call, False without --enable-lora."""

    def __init__(
        self,
        port: int = 0,
        seconds: float = 0.0,
        has_generate: bool = True,
        has_weights: bool = True,
        takes_adapters: bool | None = None,
    ) -> None:
        self.seconds, self.has_generate, self.has_weights = seconds, has_generate, has_weights
        self.fault, self.times, self.version, self.paused, self.aborts = (
            "",
            10**9,
            "default",
            False,
            0,
        )
        self.takes_adapters, self.adapters, self.is_asleep = takes_adapters, dict[str, Any](), False
        self.weights: dict[str, Any] = {"checksum": "none", "probe": []}
        self.bodies: list[dict[str, Any]] = []  # of sampled completions
        self.calls: list[str] = []
        self.tokens = 1
        own = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body: dict[str, Any]) -> None:
                status, reply = own.reply(self.path, body)
                data = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header(
                    "Content-Type", "text/plain" if type(reply) is str else "application/json"
                )
                self.end_headers()
                while (
                    own.fault == "trickle"
                    and status == 200
                    and own.struck(self.path, body, "trickle")
                ):
                    self.wfile.write(data[:1])
                    self.wfile.flush()
                    time.sleep(0.05)
                self.wfile.write(
                    data[:20] if status == 200 and own.struck(self.path, body, "cut") else data
                )

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = Listener(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def struck(self, path: str, body: dict[str, Any], *faults: str) -> bool:
        """True if a completion is asked for and the fault is one of these."""
        is_sampling = "seed" in {**body, **body.get("sampling_params", {})}
        if self.fault not in faults or not is_sampling or self.times <= 0:
            return False
        self.times -= 1
        return True

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        whole, (path, _, query) = path, path.partition("?")
        self.calls.append(path if path not in ("/sleep", "/wake_up") else whole)
        if whole == self.fault:
            return 500, "no memory"
        if self.struck(path, body, "500", "429"):
            return int(self.fault), "no"
        if self.struck(path, body, "hang"):
            time.sleep(60)
        if self.struck(path, body, "html"):
            return 200, "<html>the gateway is busy</html>"
        if self.struck(path, body, "deep"):
            return 200, Deep("[" * 100_000)
        if self.struck(path, body, "choices"):
            return 200, {"choices": []}
        if path == "/v1/models" and self.fault == "no models":
            return 200, {"data": []}
        if path in ("/v1/completions", "/inference/v1/generate"):
            if path == "/inference/v1/generate" and not self.has_generate:
                return 404, "Not Found"
            if body["model"] not in ("m", *self.adapters) or self.is_asleep:
                return 404, f"The model {body['model']} does not exist, or sleeps"
            return 200, self.complete(body)
        if path.endswith("_lora_adapter") and self.takes_adapters is not None:
            return self.change_adapters(path, body)
        answers: dict[str, Any] = {
            "/health": "",
            "/v1/models": {"data": [{"id": "m", "max_model_len": 64}]},
            "/metrics": f'vllm:generation_tokens_total{{engine="0"}} {self.tokens}',
        }
        if self.has_weights:
            answers |= {
                "/is_paused": {},
                "/weight_checker": {"checksums": self.weights["checksum"]},
                "/collective_rpc": {},
                "/update_weight_version": {},
                "/reset_prefix_cache": {},
                "/pause": {},
                "/resume": {},
                "/sleep": {"status": "sleeping"},
                "/wake_up": {"status": "awake"},
            }
        if path == "/metrics" and self.fault == "JSON metrics":
            return 200, {"detail": "no counters here"}
        if path == "/metrics" and self.fault == "no counters":
            return 200, 'vllm:generation_tokens_total{engine="0"} many'
        if path not in answers:
            return 404, "Not Found"
        if path == "/collective_rpc" and self.fault != "noop":
            told = json.loads((Path(body["kwargs"]["weights_path"]) / "weights.json").read_text())
            self.weights = {"checksum": "new", "probe": [0.5, 0.5]} if self.fault == "old" else told
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if whole in ("/sleep?level=1", "/sleep?level=2", "/wake_up?tags=kv_cache"):
            self.is_asleep = path == "/sleep"
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            self.aborts += query == "mode=abort"
        return 200, answers[path]

    def change_adapters(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Loads one under a new name, or unloads one."""
        name = body.get("lora_name", "")
        if not name or (path == "/v1/load_lora_adapter") == (name in self.adapters):
            return (
                400,
                "Both 'lora_name' and 'lora_path' must be provided, or the name is known, or "
                "unknown",
            )
        if not self.takes_adapters:
            return 500, "LoRA is not enabled. Use --enable-lora to enable LoRA."
        if path == "/v1/load_lora_adapter":
            if self.fault != "noop":
                self.weights = json.loads(
                    (Path(body["lora_path"]) / "weights.json").read_text()
                ) | {"checksum": "base"}
            self.adapters[name] = self.weights
        else:
            del self.adapters[name]
        return 200, f"Success: LoRA adapter '{name}'."

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Tokens by the seed, one every `seconds`; an end-of-sequence token (0) ends them."""
        params = body.get("sampling_params", body)
        ids = body.get("token_ids") or body.get("prompt") or []
        if "seed" not in params:
            while self.paused:
                time.sleep(0.005)
            if "logprobs" in params:  # a token that is sampled after a beginning of the probe
                choice = self.choice([1], [self.version], "length")
                if self.fault == "raw":
                    choice["logprobs"]["content"][0]["logprob"] = -0.9
                return {"choices": [] if self.fault == "empty probe" else [choice]}
            scored = zip(
                ids[1:], self.adapters.get(body["model"], self.weights)["probe"], strict=False
            )
            probe = [None, *({str(id): {"logprob": value}} for id, value in scored)]
            return {
                "choices": [self.choice([1], [self.version], "length")],
                "prompt_logprobs": probe,
            }
        self.bodies.append(body)
        tokens, versions, aborts, reason = [], [], self.aborts, "length"
        for position in range(params["max_tokens"]):
            time.sleep(self.seconds)
            while self.paused and aborts == self.aborts:
                time.sleep(0.005)
            if aborts != self.aborts:
                reason = "abort"
                break
            tokens.append((params["seed"] + len(ids) + position) % VOCABULARY)
            versions.append(self.version)
            self.tokens += 1
            if tokens[-1] in params["stop_token_ids"]:
                reason = "stop"
                break
        choice = self.choice(tokens, versions, reason)
        if self.struck("", body, "aborts"):
            return {"choices": [self.choice([], [], "abort")]}
        if self.struck(
            "",
            body,
            "middle",
            "short",
            "more",
            "counts",
            "ids",
            "spans",
            "minus",
            "ends",
            "endless",
            "large",
            "long span",
            "large version",
            "nan",
        ):
            self.change(choice)
        return {"choices": [choice]}

    def choice(self, tokens: list[int], versions: list[str], reason: str) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for position, version in enumerate(versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": position, "end": position})
            spans[-1]["end"] += 1
        logprobs = {"content": [{"token_id": one, "logprob": -0.5} for one in tokens]}
        return {
            "token_ids": tokens,
            "finish_reason": reason,
            **(
                {"logprobs": logprobs, "weight_versions": spans}
                if self.has_generate
                else {"logprobs": {"token_logprobs": [-0.5] * len(tokens)}}
            ),
        }

    def change(self, choice: dict[str, Any]) -> None:
        """Makes an answer wrong."""
        entries = choice["logprobs"]["content"]
        if self.fault == "counts":
            entries.append(entries[-1])
        elif self.fault == "middle":
            choice |= self.choice(
                [0, *choice["token_ids"][1:], 1],
                [self.version] * (len(choice["token_ids"]) + 1),
                "length",
            )
        elif self.fault in ("short", "more"):
            number = 3 if self.fault == "short" else 7
            choice |= self.choice([1] * number, [self.version] * number, "length")
        elif self.fault == "ids":
            choice["token_ids"][0] = entries[0]["token_id"] = 99
        elif self.fault == "spans":
            choice["weight_versions"][0]["start"] = 1
        elif self.fault == "endless":
            choice["token_ids"][0] = entries[0]["token_id"] = float("inf")
        elif self.fault == "large":
            choice["token_ids"][0] = entries[0]["token_id"] = 10**12
        elif self.fault == "large version":
            choice["weight_versions"][0]["version"] = "9" * 30
        elif self.fault == "long span":
            choice["weight_versions"][0]["end"] = 10**18
        elif self.fault == "nan":
            entries[0]["logprob"] = float("nan")
        elif self.fault == "minus":
            entries[0]["logprob"] = -9999.0
        elif self.fault == "ends":
            choice |= {
                "finish_reason": "stop",
                "token_ids": [3],
                "weight_versions": None,
                "logprobs": {"content": [{"token": "token_id:3", "logprob": -0.5}]},
            }


if __name__ == "__main__":
    ScriptedServer(
        int(next(word for word in sys.argv if word.startswith("--port=")).removeprefix("--port=")),
        0.002,
    )
    threading.Event().wait()
