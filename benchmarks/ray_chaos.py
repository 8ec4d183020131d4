"""Does a run over Ray's workers end with the bits of the caller's thread, whatever becomes of them
and of the trainer?

    python benchmarks/ray_chaos.py [bits] [kills] [newest] [node] [trainer] [--seed 0] [--log FILE]
                                   [KEY=VALUE ...]

Real commands (`shoal train`, the tiny model) over a real cluster on this machine; processes get
real signals, at moments drawn from the seed. Equal means: groups, metrics (clocks and what counts
hosts apart), evaluations and final weights, bit for bit.

    bits      fixed, lag 0, 1 and 3: 1 and 3 workers; 3 of which five are killed and one is stopped
              (SIGSTOP); a run cut twice (SIGKILL, SIGTERM) and resumed on another number of
              workers. Each against the caller's thread
    kills     fixed, lag 1: 50 times a worker is killed, those that are just starting included
    newest    the same with versions=newest: each row exactly once, the bound held, accuracy beside
              undisturbed runs
    node      fixed, lag 1: one of two nodes is taken away, a third joins
    trainer   fixed, lag 1: the trainer is killed 10 times and resumed, over a cluster of its own
              and a running one in turn; no process is left over
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ray.cluster_utils import Cluster as Nodes

from kills import command, differences
from shoal.runs.lines import read_lines

FIXED = ("train.versions=fixed", "train.max_staleness=1")
CHILD = """import sys
from shoal import cli
from shoal.rollout import host_health
# between a loss and the restart: 50 kills would take half an hour
host_health.MOST_PAUSE_SECONDS = 1.0
sys.exit(cli.main(sys.argv[1:]))"""
MARK = "RAY_CHAOS_RUN"
"""Environment of a run's own processes, by which those that are left over are found."""
MOST_SECONDS = 1500.0


class Bench:
    """A cluster, a folder of runs, and ways to start, attack and compare them."""

    def __init__(
        self, base: Path, nodes: Nodes, seed: int, log: Path, extra: Sequence[str]
    ) -> None:
        self.base, self.nodes, self.random, self.log, self.extra = (
            base,
            nodes,
            random.Random(seed),
            log,
            extra,
        )

    def start(
        self, name: str, *words: str, own: bool = False, workers: int = 0
    ) -> subprocess.Popen[bytes]:
        """`shoal train` in a process; `own`: it starts Ray itself."""
        if not workers:
            cluster = ()
        else:
            cluster = (
                "sampler.kind=ray",
                f"sampler.workers={workers}",
                "sampler.restarts=1000",
                "sampler.stall_seconds=30",
                *(() if own else (f"ray.address={self.nodes.address}",)),
            )
        given = command(self.base, name, [*self.extra, *words, *cluster])[3:]
        with self.log.open("ab") as file:
            file.write(f"\n$ shoal {' '.join(given)}\n".encode())
            file.flush()
            return subprocess.Popen(
                [sys.executable, "-c", CHILD, *given],
                stdout=file,
                stderr=file,
                env=os.environ | {MARK: name},
                start_new_session=True,
            )

    def steps(self, name: str) -> int:
        file = self.base / name / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.is_file() else 0

    def end(self, process: subprocess.Popen[bytes], expected: int = 0) -> None:
        if (code := process.wait(MOST_SECONDS)) != expected:
            raise SystemExit(f"exit {code}, not {expected}: {self.log.read_text()[-3000:]}")

    def run(
        self,
        name: str,
        *words: str,
        workers: int = 0,
        attack: Callable[[str, subprocess.Popen[bytes]], None] | None = None,
    ) -> Path:
        process = self.start(name, *words, workers=workers)
        if attack:
            attack(name, process)
        self.end(process)
        return self.base / name

    def until_step(self, name: str, process: subprocess.Popen[bytes], step: int) -> bool:
        """Waits for the record of a step; False where the run has ended."""
        deadline = time.monotonic() + MOST_SECONDS
        while self.steps(name) < step:
            if process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def workers(self) -> list[int]:
        """Processes of samplers in the cluster."""
        raylets = {
            node.all_processes["raylet"][0].process.pid for node in self.nodes.list_all_nodes()
        }
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
                if (
                    int(parent) in raylets
                    and state not in "ZT"
                    and b"ray::Worker" in (place / "cmdline").read_bytes()
                ):
                    found.append(int(place.name))
        return sorted(found)

    def attacking(
        self, kills: int, stops: int, steps: int
    ) -> Callable[[str, subprocess.Popen[bytes]], None]:
        """Signals to workers drawn at moments drawn: steps, and up to a second after their
        record."""
        signals = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
        self.random.shuffle(signals)
        moments = sorted(self.random.randrange(1, steps) for _ in signals)

        def attack(name: str, process: subprocess.Popen[bytes]) -> None:
            for number, step in zip(signals, moments, strict=True):
                if not self.until_step(name, process, step):
                    raise SystemExit(f"{name} ended before it was attacked {len(signals)} times")
                time.sleep(self.random.uniform(0, 1))
                while not (found := self.workers()):
                    if process.poll() is not None:
                        raise SystemExit(
                            f"{name} ended before it was attacked: {self.log.read_text()[-3000:]}"
                        )
                    time.sleep(0.01)
                pid = self.random.choice(found)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                while pid in self.workers():
                    # on a busy machine a killed process has to wait for its end
                    time.sleep(0.01)

        return attack

    def left_over(self, name: str = "", seconds: float = 20.0) -> int:
        """Processes of a run, or samplers of the cluster, that are still there after so many
        seconds."""
        deadline = time.monotonic() + seconds
        while (found := marked(name) if name else self.workers()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return len(found)

    def show(self, what: str, run: Path, whole: Path, began: float, more: str = "") -> bool:
        found, rows = differences(whole, run, ("state",)), read_lines(run / "metrics.jsonl")
        total = {}
        for name in ("lost", "asked_again"):
            total[name] = int(sum(row.get(f"fleet/{name}", 0) for row in rows))
        print(
            f"| {what} | {'equal' if not found else 'DIFFERS: ' + ', '.join(found)} | "
            f"{total['lost']} | {total['asked_again']} | {time.monotonic() - began:.0f} | {more} |",
            flush=True,
        )
        return not found


def marked(name: str) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={name}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


def head() -> None:
    print(
        "\n| run | groups, metrics, weights | workers lost | groups asked again | seconds | |\n"
        "| --- | --- | --- | --- | --- | --- |",
        flush=True,
    )


def bits(bench: Bench) -> bool:
    head()
    good = True
    for lag in (0, 1, 3):
        words = ("train.versions=fixed", f"train.max_staleness={lag}")
        whole = bench.run(f"caller-{lag}", *words)
        for what, workers, attack in (
            ("1 worker", 1, None),
            ("3 workers", 3, None),
            ("3 workers, five killed, one stopped", 3, bench.attacking(5, 1, 11)),
        ):
            began = time.monotonic()
            run = bench.run(
                f"{what.replace(' ', '-')}-{lag}", *words, workers=workers, attack=attack
            )
            good &= bench.show(f"lag {lag}, {what}", run, whole, began)
        began, name = time.monotonic(), f"cut-{lag}"
        for workers, number, step in ((3, signal.SIGKILL, 5), (1, signal.SIGTERM, 9)):
            process = bench.start(name, *words, workers=workers)
            cut = bench.until_step(name, process, step)
            process.send_signal(number)
            bench.end(process, 130 if number == signal.SIGTERM else -number)
            assert cut
        run = bench.run(name, *words, workers=2)
        good &= bench.show(f"lag {lag}, cut and resumed: 3, 1, 2 workers", run, whole, began)
    return good


def kills(bench: Bench) -> bool:
    head()
    words, began = (*FIXED, "steps=60"), time.monotonic()
    whole = bench.run("kills-caller", *words)
    run = bench.run("kills", *words, workers=3, attack=bench.attacking(50, 0, 59))
    return bench.show("fixed, lag 1, 3 workers, 50 kills", run, whole, began)


def newest(bench: Bench) -> bool:
    words = (
        "train.versions=newest",
        "train.max_staleness=2",
        "steps=60",
        "task.num_eval_questions=64",
    )
    runs = [bench.run(f"newest-{number}", *words, workers=3) for number in range(4)]
    killed = bench.run("newest-killed", *words, workers=3, attack=bench.attacking(50, 0, 59))
    print(
        "\n| newest, k=2, 3 workers | rows, each once | oldest token | workers lost | accuracy at "
        "the end | "
        "reward, last 20 steps |\n| --- | --- | --- | --- | --- | --- |",
        flush=True,
    )
    good, figures = True, []
    for run in (*runs, killed):
        rows, wanted, found = read_lines(run / "metrics.jsonl"), rows_of(runs[0]), rows_of(run)
        oldest = max(row["staleness/max"] for row in rows)
        accuracy = [
            row["accuracy"]
            for row in read_lines(run / "evaluations.jsonl")
            if row["name"] == "held_out"
        ][-1]
        reward = sum(row["reward/mean"] for row in rows[-20:]) / 20
        once = found == wanted and max(Counter(itertools.chain(*found.values())).values()) == 1
        figures.append((accuracy, reward))
        good &= once and oldest <= 2
        print(
            f"| {'50 kills' if run is killed else 'undisturbed'} | {'yes' if once else 'NO'} | "
            f"{oldest:.0f} | {sum(row['fleet/lost'] for row in rows):.0f} | {accuracy:.3f} | "
            f"{reward:.3f} |",
            flush=True,
        )
    for name, place in (("accuracy", 0), ("reward", 1)):
        *undisturbed, last = [one[place] for one in figures]
        print(
            f"{name} with kills {last:.3f}, undisturbed {min(undisturbed):.3f} to "
            f"{max(undisturbed):.3f}"
        )
    return good


def rows_of(run: Path) -> Mapping[int, list[int]]:
    """Rows of the data by step, in order."""
    from shoal.runs.groups import read_file

    return {
        int(file.stem.rpartition("_")[2]): [one.group.example.row for one in read_file(file)]
        for file in sorted((run / "groups").glob("step_*.parquet"))
    }


def node(bench: Bench) -> bool:
    """A cluster of its own: a node of 1 CPU, where the trainer is, and one of 2, which goes; one of
    2 comes."""
    head()
    began, shared = time.monotonic(), bench.nodes
    whole = bench.run("node-caller", *FIXED)
    shared.shutdown()
    bench.nodes = started(1)
    bench.nodes.add_node(num_cpus=2)
    bench.nodes.wait_for_nodes()

    def attack(name: str, process: subprocess.Popen[bytes]) -> None:
        bench.until_step(name, process, 4)
        (other,) = bench.nodes.worker_nodes
        bench.nodes.remove_node(other, allow_graceful=False)
        bench.until_step(name, process, 8)
        bench.nodes.add_node(num_cpus=2)

    good = bench.show(
        "fixed, lag 1, 3 workers, 2 of them on a node that goes",
        bench.run("node", *FIXED, workers=3, attack=attack),
        whole,
        began,
    )
    bench.nodes.shutdown()
    bench.nodes = started(8)
    return good


def trainer(bench: Bench, kills: int = 10) -> bool:
    head()
    began, steps = time.monotonic(), 24
    words = (*FIXED, f"steps={steps}")
    whole = bench.run("trainer-caller", *words)
    left, moments = 0, sorted(bench.random.sample(range(1, steps), kills))
    for number, step in enumerate(moments):
        process = bench.start("trainer", *words, own=number % 2 == 0, workers=1 + number % 3)
        if not bench.until_step("trainer", process, step):
            raise SystemExit(f"the run ended before step {step}: {bench.log.read_text()[-3000:]}")
        time.sleep(bench.random.uniform(0, 0.5))
        process.kill()
        process.wait()
        left += bench.left_over("trainer") + bench.left_over()
    run = bench.run("trainer", *words, workers=3)
    left += bench.left_over("trainer") + bench.left_over()
    return (
        bench.show(
            f"fixed, lag 1, trainer killed {kills} times at 1 to 3 workers",
            run,
            whole,
            began,
            f"processes left over: {left}",
        )
        and not left
    )


def started(cpus: int) -> Nodes:
    return Nodes(
        initialize_head=True,
        head_node_args={
            "num_cpus": cpus,
            "object_store_memory": 200 << 20,
            "include_dashboard": False,
        },
    )


PARTS = {part.__name__: part for part in (bits, kills, newest, node, trainer)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "words", nargs="*", help=f"of {', '.join(PARTS)} (all), and keys of shoal train"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="what the runs print; a temporary file")
    options = parser.parse_args()
    parts = [word for word in options.words if word in PARTS] or list(PARTS)
    # by default 15: other programs would starve them
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_worker_niceness": "0",
    }
    print(f"seed {options.seed}, {os.cpu_count()} CPU cores", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        bench = Bench(
            base,
            started(8),
            options.seed,
            options.log or base / "log.txt",
            [word for word in options.words if word not in PARTS],
        )
        try:
            good = True
            for part in parts:
                good &= PARTS[part](bench)
        finally:
            bench.nodes.shutdown()
    sys.exit(not good)


if __name__ == "__main__":
    main()
