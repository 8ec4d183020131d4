"""What does the address of `shoal serve` cost, and does it outlive any request?

    python benchmarks/serve.py [--sizes 1M 8M 50M] [--requests 96] [--tokens 128] [--repeats 3]
                               [--fuzz 0]

The same completions, 32 in flight at any time: of an engine that is called directly, and over HTTP
by a client in a process of its own that shares the machine. Random weights, and none ends early.
`share` is the second's tokens a second over the first's, by turns, the median of `--repeats`; `cpu`
the same by this process's seconds of CPUs, which others on the machine do not change; `full` the
share of places that drew a token.

`--fuzz` sends so many random requests instead, 32 at once: bodies cut and mixed, settings of every
name with values of every kind, clients that hang up. It fails if one is answered with 500 or above,
or if anything is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from typing import Any

import jax
import numpy as np

from shoal.chat.tokenizer import Tokenizer
from shoal.config.sections.devices import MeshSection
from shoal.mesh import make_roles
from shoal.model.architecture import Architecture
from shoal.model.parameters import initialise
from shoal.model.transformer import Model
from shoal.protocols import SampleRequest
from shoal.records import NoiseKey, SamplingParams
from shoal.sampler.engine import Engine
from shoal.serve.api import SHAPES
from shoal.serve.app import Api
from shoal.serve.host_sampler import HostSampler
from shoal.serve.server import listen, make_server
from shoal.weights.hub import locate
from shoal.weights.store import MemoryStore

AT_ONCE, PROMPT = 32, 32
SIZES = {
    "1M": Architecture(1024, 128, 512, 4, 4, 2, 32),
    "8M": Architecture(4096, 256, 1024, 6, 8, 4, 32),
    "50M": Architecture(8192, 512, 2048, 12, 8, 4, 64),
}
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/inference/v1/generate",
    "/v1/models",
    "/pause",
    "/resume",
    "/collective_rpc",
    "/update_weight_version",
    "/weight_checker",
    "/reset_prefix_cache",
    "/is_paused",
    "/health",
)


def make_sampler(a: Architecture, tokens: int, eos: tuple[int, ...] = ()) -> HostSampler:
    model = Model(a, make_roles(MeshSection(), jax.devices()[:1]).sampler)
    tokenizer = Tokenizer.load(locate("tiny-tools"))
    engine = Engine(
        model,
        slots=AT_ONCE,
        group_size=1,
        max_prompt_tokens=4 * PROMPT,
        max_completion_tokens=tokens,
        eos_ids=eos,
        decode=tokenizer.decode,
    )
    return HostSampler(
        "random",
        tokenizer,
        lambda purpose, size: engine,
        SamplingParams(max_tokens=tokens),
        MemoryStore(model),
        initialise(a, 0, model.role),
    )


def directly(engine: Engine, requests: int, tokens: int) -> None:
    """Samples with the engine alone."""
    given = 0
    while given < requests or not engine.idle:
        while given < requests and len(engine.requests) < AT_ONCE:
            prompt = np.full(PROMPT, 7 + given % 100, np.int32)
            engine.submit(
                [
                    SampleRequest(
                        given,
                        prompt,
                        1,
                        NoiseKey(0, "direct", 0, given),
                        SamplingParams(max_tokens=tokens),
                        exact=False,
                    )
                ]
            )
            given += 1
        engine.step()


async def ask(port: int, raw: bytes, hang_up: float | None = None) -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own; 0 where it is left after so many
    seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        async with asyncio.timeout(hang_up):
            answer = await reader.read()
        return int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2]
    except TimeoutError:
        return 0, b""
    finally:
        writer.close()


def request(path: str, body: bytes, method: str = "POST") -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: "
        f"{len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def client(port: int, requests: int, tokens: int) -> None:
    """Samples over HTTP."""
    numbers = iter(range(requests))

    async def one() -> None:
        for number in numbers:
            body = json.dumps(
                {"model": "random", "prompt": [7 + number % 100] * PROMPT, "max_tokens": tokens}
            )
            status, answer = await ask(port, request("/v1/completions", body.encode()))
            assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == tokens, (
                answer
            )

    await asyncio.gather(*(one() for _ in range(AT_ONCE)))


def measure(size: str, requests: int, tokens: int, repeats: int) -> None:
    words = ["--requests", str(requests), "--tokens", str(tokens)]
    with closing(make_sampler(SIZES[size], tokens)) as sampler, Serving(sampler) as port:
        rates = []
        for number in range(repeats + 1):  # the first compiles
            with subprocess.Popen(
                [sys.executable, __file__, "--client", str(port), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            ) as process:
                assert process.stdout and process.stdout.readline() == b"ready\n"
                pair = []
                for run in (
                    lambda: process.communicate(b"go\n"),
                    lambda: directly(sampler.engine, requests, tokens),
                ):
                    started, cpu = time.perf_counter(), time.process_time()
                    before = sampler.engine.counters.copy()
                    run()
                    made = requests * tokens
                    counted = sampler.engine.counters - before
                    full = counted["active_slots"] / counted["total_slots"]
                    pair.append(
                        (
                            made / (time.perf_counter() - started),
                            made / (time.process_time() - cpu),
                            full,
                        )
                    )
                assert not process.returncode
            rates += [pair] if number else []
    http, direct = (statistics.median(one[i][0] for one in rates) for i in (0, 1))
    shares = [one[0][0] / one[1][0] for one in rates]
    cpu = statistics.median(one[0][1] / one[1][1] for one in rates)
    full = [statistics.median(one[i][2] for one in rates) for i in (0, 1)]
    print(
        f"{size:>4}  directly {direct:7,.0f} tokens/s   over HTTP {http:7,.0f}   share "
        f"{statistics.median(shares):.2f}  of {', '.join(f'{share:.2f}' for share in shares)}   "
        f"cpu {cpu:.2f}   full {full[1]:.2f}, over HTTP {full[0]:.2f}",
        flush=True,
    )


class Serving:
    """The address in a thread; its port."""

    def __init__(self, sampler: HostSampler) -> None:
        self.socket, self.api = listen("127.0.0.1", 0), Api(sampler, weights=sampler)
        self.server = make_server(self.api.app())
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )

    def __enter__(self) -> int:
        self.thread.start()
        return self.socket.getsockname()[1]

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self.thread.join()


# ---- random requests


def anything(rng: random.Random, depth: int = 0) -> Any:
    """A value of any kind."""
    plain = [
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        2**40,
        -(2**70),
        0.5,
        1e300,
        "",
        "abc",
        "\ud800",
        "𝔸" * 9,
        "text",
        [],
    ]
    kind = rng.random()
    if depth > 3 or kind < 0.7:
        return rng.choice(plain)
    if kind < 0.85:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = (
        "role",
        "content",
        "type",
        "function",
        "name",
        "parameters",
        "properties",
        "text",
        "tool_calls",
        "anyOf",
    )
    return {rng.choice(names): anything(rng, depth + 1) for _ in range(rng.randrange(4))}


def random_request(rng: random.Random) -> bytes:
    path = rng.choice(PATHS) if rng.random() < 0.3 else rng.choice(PATHS[:3])
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 8), "stream": rng.random() < 0.3}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}},
    }
    messages: list[Any] = [{"role": rng.choice(("user", "system", "tool")), "content": "1 + 2"}]
    body |= {
        PATHS[0]: {"prompt": rng.choice(["abc", [5, 6, 7]])},
        PATHS[1]: {"messages": messages},
        PATHS[2]: {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}},
    }.get(path, {})
    if path == PATHS[1] and rng.random() < 0.3:
        body["tools"] = [tool]
        messages.append(
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "function": {
                            "name": "f",
                            "arguments": rng.choice(["{}", "[", '{"a": 1}', "5"]),
                        }
                    }
                ],
            }
        )
    names = [
        *SHAPES,
        "max_tokens",
        "max_completion_tokens",
        "kwargs",
        "method",
        "action",
        "baseline",
        "new_version",
        "surprise",
    ]
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        place = rng.choice(
            [body, *(one for one in messages if isinstance(one, dict)), tool["function"]]
        )
        place[
            rng.choice(
                names if place is body else ["role", "content", "name", "tool_calls", "parameters"]
            )
        ] = anything(rng)
    raw = json.dumps(body).encode()
    if rng.random() < 0.1:
        at = rng.randrange(len(raw))
        raw = raw[:at] + rng.choice((b"", b"\xff", b"[" * 9000, raw)) + raw[at + rng.randrange(3) :]
    query = f"?mode={rng.choice(('abort', 'wait', 'none'))}" if path == "/pause" else ""
    return request(
        path + query, raw, "GET" if path in ("/v1/models", "/is_paused", "/health") else "POST"
    )


async def fuzz(port: int, count: int, seed: int = 0) -> Counter[int]:
    """The statuses of so many random requests."""
    rng, found, numbers = random.Random(seed), Counter[int](), iter(range(count))

    async def one() -> None:
        for _ in numbers:
            raw = random_request(rng)
            status, answer = await ask(port, raw, rng.choice((None, None, None, 0.0, 0.02)))
            found[status] += 1
            assert status < 500, (raw, answer)
            if raw.startswith(b"POST /pause"):
                await ask(port, request("/resume", b""))

    await asyncio.gather(*(one() for _ in range(AT_ONCE)))
    await ask(port, request("/resume", b""))
    return found


def survive(count: int) -> None:
    with closing(make_sampler(SIZES["1M"], 8, (3,))) as sampler:
        serving = Serving(sampler)
        with serving as port:
            started = time.perf_counter()
            found = asyncio.run(fuzz(port, count))
            deadline = time.monotonic() + 30
            while (
                serving.api.going or sampler.waiting or sampler.engine.requests
            ) and time.monotonic() < deadline:
                time.sleep(0.05)
            left = len(serving.api.going), len(sampler.waiting), len(sampler.engine.requests)
        print(
            f"{count:,} requests in {time.perf_counter() - started:.0f} s, by status (0: hung up) "
            f"{dict(sorted(found.items()))}; left: requests {left[0]}, calls {left[1]}, rows "
            f"{left[2]}"
        )
        assert not any(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    for name, value in (
        ("requests", 96),
        ("tokens", 128),
        ("repeats", 3),
        ("fuzz", 0),
        ("client", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    if a.client:
        print("ready", flush=True)
        sys.stdin.readline()
        asyncio.run(client(a.client, a.requests, a.tokens))
    elif a.fuzz:
        survive(a.fuzz)
    else:
        for size in a.sizes:
            measure(size, a.requests, a.tokens, a.repeats)


if __name__ == "__main__":
    main()
