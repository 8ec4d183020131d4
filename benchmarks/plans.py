"""What do the five jobs of docs/scale.md need on their devices, and what does planning them take?

    python benchmarks/plans.py [JOB ...] [--cache FOLDER] [--out FOLDER] [key=value ...]

Plans each job twice by `shoal plan`, the first time with nothing stored (in FOLDER, where `--cache` names one, what an
earlier run stored), and prints its tables. `key=value` is added to every job, such as `layers=all`. `--out` keeps the
plans as JSON. Where libtpu or the CUDA plug-in is not installed, the jobs that need it fail with one line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LENGTHS = "batch.group_size=8 sampling.max_prompt_tokens=256 sampling.max_completion_tokens=512"

JOBS: Mapping[str, str] = {
    "70b-v5p-256": "topology=v5p-256 model.name=llama3.3-70b mesh.trainer=64 mesh.sampler=64 mesh.fsdp=-1 "
                   "mesh.sampler_tensor=8 batch.prompts_per_device=1 layers=shallow",
    "70b-v5p-64": "topology=v5p-64 model.name=llama3.1-70b mesh.trainer=16 mesh.sampler=16 mesh.fsdp=-1 "
                  "mesh.sampler_tensor=4 batch.prompts_per_device=1 layers=shallow",
    "8b-v5p-8": "topology=v5p-8 model.name=llama3.1-8b mesh.fsdp=-1",
    "8b-v6e-8": "topology=v6e-8 model.name=llama3.1-8b mesh.fsdp=-1",
    "1.5b-h200": "topology=h200:1 model.name=qwen2.5-1.5b batch.micro_tokens=32768",
    "1.5b-h200-fit": "topology=h200:1 model.name=qwen2.5-1.5b batch.micro_tokens=32768 fit=true",
}
"""Name -> the words after `shoal plan`, and before LENGTHS."""

PHASES = {"sampling": ("prefill", "decode"), "scoring": ("score", "reference", "teacher"),
          "update": ("accumulate", "apply"), "publication": ("publish",)}
GIB = 2**30


def plan(words: Sequence[str], cache: str) -> tuple[dict[str, Any], float, float]:
    """(the plan, seconds, seconds of CPU) of one `shoal plan`."""
    command, before = [sys.executable, "-m", "shoal", "plan", *words, "json=true"], _cpu()
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          env={**os.environ, "JAX_COMPILATION_CACHE_DIR": cache})
    seconds = time.perf_counter() - started
    if not done.stdout.startswith("{"):
        raise SystemExit(f"{shlex.join(command[2:])}: {done.stderr.strip()[-1000:]}")
    return json.loads(done.stdout), seconds, _cpu() - before


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 20 else ""


def memory_table(found: Mapping[str, Any]) -> str:
    """A row for each kind, a column for each phase, at its fullest program."""
    needed, columns = found["memory"]["programs"], {}
    for phase, names in PHASES.items():
        if there := [name for name in names if name in needed]:
            fullest = max(there, key=lambda name: sum(needed[name].values()))
            columns[f"{phase}: {found['job']['programs'][fullest]['role']}"] = needed[fullest]
    kinds = dict.fromkeys(kind for parts in columns.values() for kind in parts)
    rows = [[kind, *(gib(parts.get(kind, 0)) for parts in columns.values())] for kind in kinds]
    rows = [row for row in rows if any(row[1:])]
    return table(["", *columns], [*rows, ["all", *(gib(sum(parts.values())) for parts in columns.values())]])


def seconds_table(found: Mapping[str, Any]) -> str:
    rows = {**found["seconds"]["phases"], "all": found["seconds"]["step"]}
    return table(["", "floor", "transfers hidden", "not hidden"],
                 [[name, *(f"{one[key]:.2f} s" for key in ("floor", "hidden", "not_hidden"))]
                  for name, one in rows.items()])


def report(name: str, words: Sequence[str], found: Mapping[str, Any], times: Sequence[str]) -> Iterator[str]:
    yield f"## {name}\n\n    shoal plan {shlex.join(words)}\n\n{found['verdict']}\n"
    yield memory_table(found) + "\n"
    if found["seconds"]:
        yield seconds_table(found) + "\n"
    yield from (f"- {one['text']}" for one in found["advice"])
    yield f"\nplanned in {' and again in '.join(times)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache")
    parser.add_argument("--out", type=Path)
    args, words = parser.parse_known_args()
    names, added = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    if unknown := set(names) - JOBS.keys():
        parser.error(f"no such job: {', '.join(unknown)}; there are {', '.join(JOBS)}")
    with tempfile.TemporaryDirectory() as own:
        for name in names or JOBS:
            settings = {word.partition("=")[0]: word for word in [*JOBS[name].split(), *LENGTHS.split(), *added]}
            asked = list(settings.values())
            (_, *first), (found, *again) = (plan(asked, args.cache or own) for _ in range(2))
            times = [f"{seconds:.0f} s ({cpu:.0f} s of CPU)" for seconds, cpu in (first, again)]
            print("\n".join(report(name, asked, found, times)), flush=True)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / f"{name}.json").write_text(json.dumps(found, indent=1))
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(f"the largest process took {gib(largest)}; load {' '.join(f'{n:.1f}' for n in os.getloadavg())}")


if __name__ == "__main__":
    main()
