"""How quick is `shoal view` on a large run? Makes the run, serves it, asks for every view as a
person does.

    python benchmarks/viewing.py make /tmp/large
                                 [--steps 1000 --prompts 512 --siblings 8 --tokens 500]
    python benchmarks/viewing.py serve /tmp/large [--requests 600]
    python benchmarks/viewing.py fuzz RUN [--requests 10000]

`make` writes a run of given size with random texts, rewards and log-probs: 1,000 steps of 512 x 8
completions of 500 tokens are 2 billion tokens. `serve` starts the server as a process of its own,
waits for its first answer, then measures views in random order: their time on the clock and of
processors, and the server's memory. `fuzz` sends requests with random paths, parameters and
headers: none may be answered with a fault of the server, or with a file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

# ---- a large run


def make(options: argparse.Namespace) -> None:
    """Writes the run folder. The first step's texts and tokens serve all steps, given to other
    prompts each time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shoal.config.stored import texts_of
    from shoal.config.train import Config
    from shoal.runs.groups import to_table
    from shoal.runs.writer import RunWriter

    random_numbers = np.random.default_rng(0)
    groups = _groups(options, random_numbers)
    trainer = {}
    for place, group in enumerate(groups):
        for sibling, completion in enumerate(group.completions):
            trainer[(place, sibling)] = completion.logprobs
    base = to_table(groups, [np.zeros(options.siblings)] * options.prompts, trainer)
    size = base.num_rows
    folder = RunWriter(_new_folder(options.to))
    folder.write_config(*texts_of(Config(steps=options.steps)))
    floats = ("logprobs", "trainer_logprobs")
    dictionaries = [name for name in base.column_names if name not in (*floats, "text")]
    dictionaries += [f"{name}.list.element" for name in ("token_ids", "prompt_ids")]
    for step in range(1, options.steps + 1):
        table = base.take(pa.array(np.roll(np.arange(size), step * options.siblings + 3)))
        skill = step / (options.steps + 200)
        ability = random_numbers.beta(1 + 4 * skill, 2, options.prompts).repeat(options.siblings)
        correct = random_numbers.random(size) < ability
        reward = correct + 0.1 * (random_numbers.random(size) < 0.9)
        rows = (random_numbers.permutation(20 * options.prompts)[: options.prompts]).repeat(
            options.siblings
        )
        names = []
        for row in rows[:: options.siblings]:
            names.append(
                f"Question {row}: how many of {row * 7 % 1009} things are left after {row % 97} of "
                "them are gone? " + "Think step by step and give a number. " * 5
            )
        prompts = pa.array(
            [json.dumps([{"role": "user", "content": text}]) for text in names]
        ).take(pa.array(np.arange(options.prompts).repeat(options.siblings)))
        new = {
            "step": np.full(size, step),
            "version": np.full(size, step - 1),
            "row": rows,
            "group": np.arange(options.prompts).repeat(options.siblings),
            "completion": np.tile(np.arange(options.siblings), options.prompts),
            "reward": reward,
            "component/correct": correct.astype(float),
            "component/format": (reward - correct) * 10,
            "correct": correct,
            "advantage": reward - 0.5,
        }
        for name, values in new.items():
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        table = table.set_column(table.column_names.index("prompt"), "prompt", prompts)
        extra: dict[str, Any] = {
            "use_dictionary": dictionaries,
            "use_byte_stream_split": [f"{name}.list.element" for name in floats],
        }
        pq.write_table(
            table.replace_schema_metadata(base.schema.metadata),
            folder.groups_path / f"step_{step:06d}.parquet",
            compression="zstd",
            **extra,
        )
        folder.write_metrics(
            step, _metrics(step, options.steps, float(reward.mean()), random_numbers)
        )
        if step % 50 == 0:
            print(f"{step} of {options.steps} steps", flush=True)
    folder.close()


def _new_folder(to: str) -> Path:
    path = Path(to)
    (path / "groups").mkdir(parents=True)
    return path


def _groups(options: argparse.Namespace, numbers: np.random.Generator) -> list[Any]:
    from shoal.records import Completion, Example, Group, Purpose, StopReason

    words = np.array(
        [
            "".join(chr(97 + letter) for letter in numbers.integers(0, 26, numbers.integers(2, 9)))
            for _ in range(4000)
        ]
    )
    groups = []
    for place in range(options.prompts):
        completions, texts = [], []
        for sibling in range(options.siblings):
            length = max(8, int(numbers.normal(options.tokens, options.tokens / 5)))
            # Rounded, as log-probs of a bfloat16 model nearly are: files of half the size, on this
            # disk.
            logprobs = (np.round(-numbers.gamma(0.3, 1.0, length) * 512) / 512).astype(np.float32)
            completions.append(
                Completion(
                    place,
                    sibling,
                    (numbers.zipf(1.3, length) % 150_000).astype(np.int32),
                    logprobs,
                    np.ones(length, bool),
                    np.zeros(length, np.int32),
                    StopReason.EOS if numbers.random() < 0.95 else StopReason.LENGTH,
                )
            )
            texts.append(" ".join(words[numbers.zipf(1.2, length * 2 // 3) % 4000]))
        zeros = np.zeros(options.siblings)
        groups.append(
            Group(
                Purpose.TRAIN,
                0,
                0,
                Example(place, [{"role": "user", "content": "?"}], {"answer": str(place)}),
                np.arange(60, dtype=np.int32),
                tuple(completions),
                tuple(texts),
                zeros,
                {"correct": zeros, "format": zeros},
                np.ones(options.siblings, bool),
                zeros.astype(bool),
            )
        )
    return groups


def _metrics(
    step: int, steps: int, reward: float, numbers: np.random.Generator
) -> dict[str, float]:
    names = (
        "reward/std",
        "rewards/correct",
        "groups/nonzero_std",
        "entropy",
        "kl",
        "grad_norm",
        "clip/fraction",
        "completions/length_mean",
        "completions/truncated",
        "sampler_gap/logprob_mean",
        "staleness",
        "throughput/sample_tokens_per_second",
        "time/step_seconds",
        "memory/peak_bytes",
    )
    return {
        "reward/mean": reward,
        **{name: float(numbers.gamma(2, 0.2) * (1 + step / steps)) for name in names},
    }


# ---- a server and its answers


@contextlib.contextmanager
def served(runs: list[str]) -> Iterator[tuple[str, int]]:
    """A server as a process of its own: its address and process number."""
    command = [sys.executable, "-m", "shoal", "view", *runs, "open=false", "port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "http://" in line:
                yield "http://" + line.split("http://")[1].split()[0].rstrip("/"), process.pid
                break
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


def ask(address: str, path: str) -> tuple[float, Any]:
    started = time.perf_counter()
    with urllib.request.urlopen(address + path, timeout=60) as answer:
        body = answer.read()
    return time.perf_counter() - started, json.loads(body) if path.startswith("/api") else body


def serve(options: argparse.Namespace) -> None:
    started = time.perf_counter()
    with served([options.to]) as (address, process):
        seconds = [ask(address, path)[0] for path in ("/", "/static/main.js", "/api/runs")]
        run = urllib.parse.quote(ask(address, "/api/runs")[1]["runs"][0]["name"])
        seconds.append(ask(address, f"/api/overview?run={run}")[0])
        seconds.append(ask(address, f"/api/curves?run={run}")[0])
        print(
            f"first page: {sum(seconds):.2f} s of requests, {time.perf_counter() - started:.2f} s "
            "from the command"
        )
        waiting = 1
        while waiting:
            time.sleep(0.2)
            waiting = ask(address, f"/api/groups?run={run}&limit=1")[1]["waiting"]
        print(
            f"all groups in the table after {time.perf_counter() - started:.1f} s, memory "
            f"{_memory(process)}"
        )
        by_view: dict[str, list[tuple[float, float]]] = {}
        chance = random.Random(0)
        for _ in range(options.requests):
            name, path = _view(chance, run, options)
            before = _processor_seconds(process)
            seconds = ask(address, path)[0]
            by_view.setdefault(name, []).append((seconds, _processor_seconds(process) - before))
        every = [one for own in by_view.values() for one in own]
        for name, times in [*sorted(by_view.items()), ("all", every)]:
            walls, busy = ([1000 * one[place] for one in times] for place in (0, 1))
            print(
                f"{name:12} median {median(walls):5.0f} ms  95% {quantiles(walls, n=20)[-1]:5.0f} "
                f"ms  worst {max(walls):5.0f} ms;  processor: median {median(busy):5.0f} ms  95% "
                f"{quantiles(busy, n=20)[-1]:5.0f} ms  ({len(times)})"
            )
        print(f"memory {_memory(process)}, load of the machine {os.getloadavg()[0]:.1f}")


def _view(chance: random.Random, run: str, options: argparse.Namespace) -> tuple[str, str]:
    file, group = f"step_{chance.randint(1, options.steps):06d}", chance.randrange(options.prompts)
    columns = ("reward", "spread", "length", "truncated", "step", "correct", "length_effect", "row")
    filters = ("", "reward>0.5", "step=10..60 truncated>0", "pass=1", "correct<0.5 length>500")
    groups = (
        f"/api/groups?run={run}&sort={chance.choice(columns)}&desc={chance.choice((0, 1))}&filter="
        + urllib.parse.quote(chance.choice(filters))
        + f"&offset={chance.choice((0, 0, 0, 100, 5000))}"
    )
    orders = ("reward", "step", "length", "advantage", "correct")
    chosen = ("", "right=0", "set=train reward>0.5", "truncated=1", "step=10..60 correct<1")
    completions = (
        f"/api/completions?run={run}&sort={chance.choice(orders)}&desc={chance.choice((0, 1))}"
        f"&filter={urllib.parse.quote(chance.choice(chosen))}&offset={chance.choice((0, 0, 50))}"
    )
    views = {
        "run": f"/api/curves?run={run}",
        "overview": f"/api/overview?run={run}",
        "groups": groups,
        "groups, text": groups + "&text=" + chance.choice(("left", "zqzq", "abc", "question%2017")),
        "completions": completions,
        "completions, text": completions + "&text=" + chance.choice(("left", "abc")),
        "group": f"/api/group?run={run}&file={file}&group={group}",
        "tokens": f"/api/tokens?run={run}&file={file}&group={group}"
        f"&completion={chance.randrange(options.siblings)}",
        "prompt": f"/api/groups?run={run}&filter=set%3Dtrain"
        f"+row%3D{chance.randrange(20 * options.prompts)}",
        "prompts": f"/api/groups?run={run}&prompts=1&sort=change&desc=1",
        "lint": f"/api/lint?run={run}",
    }
    name = chance.choice(list(views))
    return name, views[name]


def _processor_seconds(process: int) -> float:
    """What all threads of a process have had of processors: on a machine that others use, what a
    view really costs."""
    total = 0
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def _memory(process: int) -> str:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    kept = {}
    for line in lines:
        if line.startswith(("VmRSS", "VmHWM")):
            kept[line.split()[0]] = int(line.split()[1])
    return f"{kept['VmRSS:'] / 1024:.0f} MiB now, {kept['VmHWM:'] / 1024:.0f} MiB at most"


# ---- requests that nobody should send

PARTS = (
    "",
    "..",
    "../..",
    "%2e%2e",
    "..%2f..%2fetc%2fpasswd",
    "/etc/passwd",
    "static",
    "api",
    "groups",
    "runs",
    "step_000001",
    "\x00",
    "%00",
    "🐟",
    "<script>",
    "'; DROP TABLE groups_0; --",
    "a" * 5000,
    "-1",
    "1e999",
    "NaN",
    "[",
    "(?i)(a+)+$",
    "(",
    "\\",
    "last",
    "null",
    "reward>0.1",
    "config.yaml",
    "2147483648",
    "9" * 30,
)
NAMES = (
    "run",
    "file",
    "group",
    "completion",
    "sort",
    "desc",
    "filter",
    "text",
    "prompts",
    "offset",
    "limit",
    "set",
    "row",
    "change",
    "first",
    "last",
    "after",
    "token",
)


def fuzz_request(chance: random.Random, runs: list[str]) -> tuple[str, str, dict[str, str]]:
    """A method, a path and headers, near enough to real ones to reach the views."""
    views = (
        *("runs", "overview", "curves", "groups", "completions", "export", "group", "tokens"),
        *("lint", "status", "replay"),
    )

    def part() -> str:
        return chance.choice(
            (*PARTS, *runs, str(chance.randint(-5, 2000)), f"step_{chance.randint(0, 12):06d}")
        )

    if chance.random() < 0.3:
        path = "/" + "/".join(part() for _ in range(chance.randint(0, 5)))
    else:
        pairs = {name: part() for name in chance.sample(NAMES, chance.randint(0, 8))}
        if chance.random() < 0.8:
            pairs["run"] = chance.choice(runs)
        path = f"/api/{chance.choice(views)}?" + urllib.parse.urlencode(
            pairs, errors="surrogatepass"
        )
    headers = {}
    if chance.random() < 0.1:
        headers["Host"] = chance.choice(
            ("evil.example", "127.0.0.1:1", "localhost", "[::1]", "a b", "")
        )
    if chance.random() < 0.1:
        headers["Origin"] = chance.choice(("http://evil.example", "null", "http://127.0.0.1:1"))
    method = chance.choices(
        ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"), (80, 4, 6, 4, 3, 3)
    )[0]
    return method, urllib.parse.quote(path, safe="/?&=%"), headers


def fuzz(options: argparse.Namespace) -> None:
    chance, statuses = random.Random(options.seed), {}
    with served([options.to]) as (address, process):
        runs = [run["name"] for run in ask(address, "/api/runs")[1]["runs"]]
        for _ in range(options.requests):
            method, path, headers = fuzz_request(chance, runs)
            request = urllib.request.Request(address + path, method=method, headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    status, body = answer.status, answer.read()
            except urllib.error.HTTPError as error:
                status, body = error.code, error.read()
            statuses[status] = statuses.get(status, 0) + 1
            if status >= 500 or b"root:x:0" in body:
                print(f"{status}: {method} {path} {headers}: {body[:200]!r}")
        print(
            f"{options.requests} requests: {dict(sorted(statuses.items()))}, memory "
            f"{_memory(process)}"
        )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("make", "serve", "fuzz"))
    parser.add_argument("to")
    for name, value in (
        ("steps", 1000),
        ("prompts", 512),
        ("siblings", 8),
        ("tokens", 500),
        ("requests", 600),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(words)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    {"make": make, "serve": serve, "fuzz": fuzz}[options.what](options)


if __name__ == "__main__":
    main()
