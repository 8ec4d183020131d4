"""A server of vLLM as it is reached: its address, its calls over HTTP, and where it was started
here its process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shoal.text import describe_error, shorten
from shoal.types import HostLost

CALL_SECONDS = 60.0
"""How long most calls may take."""
CHUNK_BYTES = 1 << 16
LAST_LINES, PORTS = 5, range(20_000, 32_000)
"""Of an ended server's output, what is shown; where those that are started listen (systems connect
from others)."""
GENERATE, COMPLETE, ADAPTER = "/inference/v1/generate", "/v1/completions", "/v1/load_lora_adapter"
RELOAD = "/collective_rpc"


def _read_body(reply: http.client.HTTPResponse, socket: Any, deadline: float) -> bytes:
    """All of an answer. TimeoutError at the deadline: a socket's own timeout begins anew with each
    byte, so an answer that trickles would never end."""
    chunks = []
    while True:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        socket.settimeout(seconds)
        chunk = reply.read1(CHUNK_BYTES)
        if not chunk:
            break
        chunks.append(chunk)
    body = b"".join(chunks)
    if reply.length:  # `read1` does not compare with Content-Length at the end of a connection
        raise http.client.IncompleteRead(body, reply.length)
    return body


class TurnedDown(HostLost):
    """A server's answer of another status than 200."""

    def __init__(self, path: str, status: int, text: str) -> None:
        super().__init__(f"it answered {path} with {status}: {shorten(text, 300)}")
        self.path, self.status = path, status


@dataclass(frozen=True)
class Server:
    """A server's address and, where it was started here, its process and the file with its
    output."""

    url: str
    process: subprocess.Popen | None = None
    log: Path = Path()

    @classmethod
    def start(cls, words: Sequence[str], environment: Mapping[str, str], log: Path) -> Server:
        """A process of its own at a port of this machine; `words`: the command without the port."""
        port = random.choice(PORTS)  # if it is taken, the process says so and ends
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [*words, "--host=127.0.0.1", f"--port={port}"],
                env={**environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return cls(f"http://127.0.0.1:{port}", process, log)

    def call(
        self, path: str, body: Mapping[str, Any] | None = None, seconds: float = CALL_SECONDS
    ) -> Any:
        """What it answers: what its JSON says, or a text. Waits `seconds` at most; raises
        HostLost."""
        url, data = urlsplit(self.url), None if body is None else json.dumps(body)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ.get('VLLM_API_KEY')}",
        }
        seconds = max(0.1, seconds)
        deadline = time.monotonic() + seconds
        try:
            with contextlib.closing(
                kind(url.hostname or "", url.port, timeout=seconds)
            ) as connection:
                connection.request(
                    "GET" if data is None else "POST", url.path + path, data, headers
                )
                socket = connection.sock
                with connection.getresponse() as reply:
                    text = _read_body(reply, socket, deadline).decode()
                    form = reply.headers.get_content_type()
            if reply.status != 200:
                raise TurnedDown(
                    path, reply.status, text + (f" ({self.log})" if self.process else "")
                )
            return json.loads(text) if form == "application/json" else text
        except TimeoutError:
            raise HostLost(f"it has not answered {path} in {seconds:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise HostLost(self.ended() or f"{self.url}{path}: {describe_error(error)}") from error
        except (ValueError, RecursionError) as error:
            raise HostLost(
                f"it answered {path} with what is no JSON: {describe_error(error)}"
            ) from error

    def ask(
        self, path: str, body: Mapping[str, Any] | None = None, seconds: float = CALL_SECONDS
    ) -> dict[str, Any]:
        """`call` for an answer that must be a JSON object; HostLost for anything else, as a proxy's
        HTML page."""
        reply = self.call(path, body, seconds)
        if not isinstance(reply, dict):
            raise HostLost(
                f"it answered {path} with what is no JSON object: {shorten(str(reply), 200)}"
            )
        return reply

    def ended(self, patience: float = 1.0) -> str:
        """That its process has ended, with its last lines; "" unless it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # its connections end first
            if self.process is not None:
                code, said = (
                    self.process.wait(patience),
                    self.log.read_text("utf-8", "replace").split("\n"),
                )
                last = " | ".join([line for line in said if line.strip()][-LAST_LINES:])
                return f"its process has ended ({code}); {self.log} ends with: {last}"
        return ""

    def wait_until_ready(self, seconds: float) -> None:
        """HostLost where it does not answer in time, or its process ends."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.call("/health", seconds=5.0)
                return
            except HostLost as error:
                if (ended := self.ended(0.0)) or time.monotonic() > deadline:
                    raise HostLost(
                        ended or f"{self.url} has not answered in {seconds:.0f} s ({error})"
                    ) from error
            time.sleep(0.2)

    def takes_adapters(self) -> bool:
        """True if it has the call for adapters, as VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 gives it."""
        try:
            self.call(ADAPTER, {})
        except TurnedDown as error:
            return error.status not in (404, 405)
        return True

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(
                    self.process.pid, signal.SIGKILL
                )  # its own processes too, and one that is stopped
            self.process.wait()
