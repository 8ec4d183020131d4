"""Kills runs with SIGKILL at random moments, saving included, gives the same command again, and
compares the ends.

    python benchmarks/kills.py [--kills 30] [--kills-a-run 5] [--seed 0]
                               [--processes 2 --devices 4] [--bucket]

Each is compared with an unbroken run. It is killed up to `--kills-a-run` times, each time at a
moment drawn evenly from the time of a whole run (every third time: later, while a checkpoint is
being written), and then left to its end; a run that ended before its moment was not killed. Of
several processes one is killed, drawn each time; the others must end by themselves, and all are
started again. Equal means: parameters, optimizer, metrics (clocks aside), groups and evaluations,
bit for bit; each step once.

With `--bucket` the folders of the killed runs are in a bucket of a moto server, to which 5% of the
connections break off and which is away for six seconds at a random moment of each life. Every other
killed run goes on on "another machine", one with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

CLOCKS = (
    "time/",
    "throughput/",
    "memory/",
    "compilations",
    "mfu",
    "idle/",
    "queue/",
    "publish/",
    "fleet/",
    "sampler/places_drawing",
)
"""Beginnings of metrics that tell of the machine and of how many hosts sample."""


MOST_SECONDS_TO_END = 60
"""What the other processes may take to end when one was killed."""


def command(base: Path | str, name: str, extra: list[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "shoal",
        "train",
        f"base_output_directory={base}",
        f"run_name={name}",
        "steps=12",
        "task.num_eval_questions=16",
        "train.pass_k=0",
        "batch.prompts_per_step=4",
        "batch.group_size=4",
        "checkpoint.every=2",
        "train.evaluate_every=5",
        "sampling.max_completion_tokens=48",
        *extra,
    ]


def start(words: list[str], log: Path, count: int) -> list[subprocess.Popen[bytes]]:
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    keys = [f"mesh.coordinator=localhost:{port}", f"mesh.processes={count}"] if count > 1 else []
    with log.open("ab") as file:
        return [
            subprocess.Popen(
                [*words, *keys, *([f"mesh.process={number}"] if keys else [])],
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            for number in range(count)
        ]


def kill(processes: list[subprocess.Popen[bytes]], random_: random.Random) -> str:
    """SIGKILL to the whole of one; the others end by themselves. Which it was, and after how long
    all had ended."""
    number = random_.randrange(len(processes))
    os.killpg(processes[number].pid, signal.SIGKILL)
    began = time.monotonic()
    for process in processes:
        process.wait(MOST_SECONDS_TO_END)
    seconds = time.monotonic() - began
    if len(processes) > 1:
        return f", process {number}, the others ended {seconds:.1f} s later"
    return ""


def ended(processes: list[subprocess.Popen[bytes]]) -> bool:
    return any(process.poll() is not None for process in processes)


def is_saving(run: Path) -> bool:
    """True while a checkpoint is written, and while one is uploaded."""
    folder = run / "checkpoints"
    return (folder.is_dir() and any("tmp" in entry.name for entry in folder.iterdir())) or any(
        entry.is_dir() for entry in run.glob(".upload-*/*")
    )


class Machines:
    """Caches of machines, by the environment: a run is in a bucket, and its folder in the cache of
    one of them."""

    def __init__(self, base: Path, address: str, share: float) -> None:
        import buckets

        self.base, self.number, self.faults = base, 0, buckets.Faults(address, share)
        os.environ |= buckets.environment(self.faults.address)
        self.url = f"s3://{buckets.BUCKET}/runs"

    def change(self) -> None:
        self.number += 1
        os.environ["XDG_CACHE_HOME"] = str(self.base / f"machine{self.number}")

    def folder(self, name: str) -> Path:
        """Of the run, where it works now."""
        from shoal.buckets import RUNS, cache_path

        return cache_path(f"{self.url}/{name}", RUNS)

    def fetched(self, name: str) -> Path:
        """What the bucket holds of the run, on one more machine."""
        from shoal.buckets import complete, fetch

        self.change()
        folder = fetch(f"{self.url}/{name}")
        complete(max((folder / "checkpoints").glob("[0-9]*"), key=lambda one: int(one.name)))
        return folder

    def go_away(self, random_: random.Random, seconds: float) -> None:
        """The bucket does not answer for six seconds, somewhen within the next `seconds`."""

        def away() -> None:
            time.sleep(begins)
            self.faults.is_down = True
            time.sleep(6)
            self.faults.is_down = False

        begins = random_.uniform(0, seconds)
        threading.Thread(target=away, daemon=True).start()


def break_run(
    words: list[str],
    run: Path,
    kills: int,
    seconds: float,
    random_: random.Random,
    log: Path,
    count: int,
    machines: Machines | None = None,
    first: int = 0,
) -> list[str]:
    """Kills the command `kills` times on its way, then lets it end; where it was each time.
    `first`: kills before."""
    places = []
    for number in range(first, first + kills):
        if machines:
            if number > first or number % 2:
                machines.change()
            machines.go_away(random_, seconds)
            run = machines.folder(run.name)
        processes = start(words, log, count)
        moment = time.monotonic() + random_.uniform(0, seconds)
        aim_at_saving = number % 3 == 2
        while not ended(processes) and (
            time.monotonic() < moment or (aim_at_saving and not is_saving(run))
        ):
            time.sleep(0.0005)
        if ended(processes):
            check_ends(processes, "a run failed by itself", log)
            break
        saving = is_saving(run)
        killed = kill(processes, random_)
        lines = run / "metrics.jsonl"
        step = len(lines.read_text().splitlines()) if lines.is_file() else 0
        places.append(f"after step {step}" + (", saving" if saving else "") + killed)
    if machines and first % 2 == 0:
        machines.change()
    # To its end; where it has ended, it says so.
    check_ends(start(words, log, count), "the run did not resume", log)
    return places


def check_ends(processes: list[subprocess.Popen[bytes]], text: str, log: Path) -> None:
    if any(codes := [process.wait() for process in processes]):
        raise SystemExit(f"{text}, exit {codes}: {log.read_text()[-2000:]}")


def without_clocks(file: Path) -> list[dict[str, object]]:
    rows = []
    for line in file.read_text().splitlines():
        rows.append(
            {name: value for name, value in json.loads(line).items() if not name.startswith(CLOCKS)}
        )
    # evaluations beside training are recorded when they are whole
    return sorted(rows, key=lambda row: row["step"])


def differences(a: Path, b: Path, weights: Sequence[str] = ("state", "published")) -> list[str]:
    """What two finished runs differ in; empty where they are equal bit for bit. `weights`: of a
    checkpoint. Which versions are published in it depends on evaluations that are under way, where
    these stop no training."""
    found = []
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        if without_clocks(a / name) != without_clocks(b / name):
            found.append(name)
    groups = [sorted(file.name for file in (run / "groups").iterdir()) for run in (a, b)]
    if groups[0] != groups[1]:
        found.append("names in groups/")
    found += [
        name
        for name in set(groups[0]) & set(groups[1])
        if (a / "groups" / name).read_bytes() != (b / "groups" / name).read_bytes()
    ]
    newest = [
        max((run / "checkpoints").glob("[0-9]*"), key=lambda folder: int(folder.name))
        for run in (a, b)
    ]
    stored = [
        json.loads((folder / "extra" / "metadata").read_text())["checksums"] for folder in newest
    ]
    # published: with older versions alone
    sums = []
    for one in stored:
        sums.append({name: one.get(name) for name in weights})
    return found + ([f"checksums {sums}"] if sums[0] != sums[1] else [])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--kills-a-run", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--devices",
        type=int,
        default=0,
        help="simulated CPU devices of each process, all trained on",
    )
    parser.add_argument("--bucket", action="store_true", help="the run folders are in a bucket")
    options, extra = parser.parse_known_args()
    if options.devices:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"
        extra = ["mesh.fsdp=-1", *extra]
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        base, machines = Path(temporary), None
        if options.bucket:
            import buckets

            os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{temporary}/jax")
            machines = Machines(base, stack.enter_context(buckets.s3_server()), 0.05)
        log, random_ = base / "log.txt", random.Random(options.seed)
        count = options.processes
        # fills the compile cache
        check_ends(start(command(base, "warm", extra), log, count), "a run failed", log)
        began = time.monotonic()
        check_ends(start(command(base, "whole", extra), log, count), "a run failed", log)
        seconds = time.monotonic() - began
        print(f"the unbroken run: {seconds:.1f} s\n\nrun  kills  equal  killed")
        equal = total = killed = 0
        while killed < options.kills:
            run = base / f"broken{total}"
            most = min(options.kills_a_run, options.kills - killed)
            words = command(machines.url if machines else base, run.name, extra)
            places = break_run(
                words, run, most, seconds, random_, log, count, machines, killed if machines else 0
            )
            run = machines.fetched(run.name) if machines else run
            different = differences(base / "whole", run)
            total, equal, killed = total + 1, equal + (not different), killed + len(places)
            print(
                f"{total:>3}  {len(places):>5}  "
                f"{'no: ' + ', '.join(different) if different else 'yes':>5}  "
                f"{'; '.join(places)}",
                flush=True,
            )
        print(
            f"\n{equal} of {total} runs, killed {killed} times in all, ended equal to the unbroken "
            f"one" + (f"; {machines.faults.broken} connections broke off" if machines else "")
        )
        sys.exit(equal != total)


if __name__ == "__main__":
    main()
