"""What do the five jobs of docs/scale.md need on their devices, and how long does a step of each
take?

    python benchmarks/plans.py [JOB ...] [--estimated] [--cache FOLDER] [--out FOLDER]
                               [key=value ...]
    python benchmarks/plans.py --fits [key=value ...]

Plans each job by `shoal plan`, with the settings that it advises for the job's mesh, and prints the
tables of docs/scale.md. `--cache` takes what FOLDER stores; `--out` keeps the plans as JSON, and
the tables are then of all plans in FOLDER. `key=value` is added to every job, such as
`layers=shallow`. `--estimated` compiles nothing: without seconds, and with activations as they are
estimated. Needs compilers: `pip install '.[plan]'`.

`--fits` prints the table of docs/models-and-devices.md: whether full training of a model fits on
devices, by what a plan knows of a job before it compiles anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.commands.plan import record
from shoal.config.merge import compose
from shoal.mesh.topology import parse_topology
from shoal.plan.plan import compilers, describe, make_plan

LENGTHS = "batch.group_size=8 sampling.max_prompt_tokens=256 sampling.max_completion_tokens=512"

JOBS: Mapping[str, str] = {
    "70B, v5p-256": "topology=v5p-256 model.name=llama3.3-70b mesh.trainer=64 mesh.sampler=64 "
    "mesh.fsdp=-1 "
    "mesh.sampler_tensor=8 batch.prompts_per_device=1",
    "70B, v5p-64": "topology=v5p-64 model.name=llama3.1-70b mesh.trainer=16 mesh.sampler=16 "
    "mesh.fsdp=-1 "
    "mesh.sampler_tensor=8 batch.prompts_per_device=1",
    "8B, v5p-8": "topology=v5p-8 model.name=llama3.1-8b mesh.fsdp=-1",
    "8B, v6e-8": "topology=v6e-8 model.name=llama3.1-8b mesh.fsdp=-1",
    "1.5B, H200": "topology=h200:1 model.name=qwen2.5-1.5b",
}
"""Name -> the words after `shoal plan`, before LENGTHS and what is advised."""

ADVISED = ("batch.micro_tokens", "model.remat", "sampling.slots_per_device", "optimizer.offload")
"""Keys whose advice is taken: those of a mesh would make another job."""
MOST_CHANGES = 6

FITTED = {
    "qwen3-0.6b": "0.6B",
    "qwen2.5-1.5b": "1.5B",
    "qwen3-4b": "4B",
    "qwen2.5-7b": "7B",
    "llama3.1-8b": "8B",
    "qwen3-14b": "14B",
    "qwen3-32b": "32B",
    "llama3.3-70b": "70B",
}
TOPOLOGIES = (
    "l4:1",
    "h100:1",
    "h200:1",
    "h100:8",
    "h200:8",
    "v5e-8",
    "v6e-8",
    "v5p-8",
    "v5p-16",
    "v5p-64",
    "h200:4x8",
    "v6e-64",
    "v5p-256",
)
"""The columns and rows of `--fits`."""
USUAL = "batch.micro_tokens=4096"
"""Else a job on a large device takes longer rows by itself."""
LEAN = "batch.micro_tokens=1024 model.remat=full sampling.slots_per_device=8"
"""Keys that change no result and take less memory, for a model that does not fit without them."""

GIB = 2**30


def need(topology: str, words: Sequence[str]) -> tuple[int, int]:
    """(bytes that a device needs at its fullest, bytes that it has), before anything is
    compiled."""
    config, *_ = compose("plan", [f"topology={topology}", *words])
    figures = describe(config, topology).estimated
    return figures.peak, figures.memory


def fits(added: Sequence[str]) -> str:
    """A row for each topology, a column for each model: the bytes that a device needs."""
    jobs = {
        (topology, model): [f"model.name={model}", "mesh.fsdp=-1", *LENGTHS.split(), USUAL, *added]
        for topology in TOPOLOGIES
        for model in FITTED
    }
    with compilers(2, TOPOLOGIES[0]) as answers:
        usual, lean = (
            dict(
                zip(
                    jobs,
                    answers(
                        [(need, topology, [*words, *more]) for (topology, _), words in jobs.items()]
                    ),
                    strict=True,
                )
            )
            for more in ((), LEAN.split())
        )

    def cell(job: tuple[str, str]) -> str:
        (needed, memory), (least, _) = usual[job], lean[job]
        shown = needed if needed <= memory else least
        return f"**{shown / GIB:.1f}**" if shown <= memory else f"no: {least / GIB:.0f}"

    return table(
        ["topology", "devices", "GiB of one", *FITTED.values()],
        [
            [
                f"`{topology}`",
                parse_topology(topology).describe(),
                f"{usual[topology, next(iter(FITTED))][1] / GIB:.1f}",
                *(cell((topology, model)) for model in FITTED),
            ]
            for topology in TOPOLOGIES
        ],
    )


def advised(words: Sequence[str]) -> list[str]:
    """The words with the settings that are advised for them before anything is compiled."""
    settings = {word.partition("=")[0]: word for word in words}
    for _ in range(MOST_CHANGES):
        config, *_ = compose("plan", list(settings.values()))
        figures = make_plan(config, lambda _: None, compiles=False)
        changes = [one["values"] for one in figures.advice if {*one["values"]} <= {*ADVISED}]
        if not changes:
            break
        settings |= {key: f"{key}={str(value).lower()}" for key, value in changes[0].items()}
    return list(settings.values())


def estimated(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """(words, plan) with the settings that are advised, of which nothing is compiled."""
    asked = advised(words)
    config, *_ = compose("plan", asked)
    return asked, record(make_plan(config, lambda _: None, compiles=False))


def plan(words: Sequence[str], cache: str) -> dict[str, Any]:
    """The plan of one `shoal plan`."""
    command = [sys.executable, "-m", "shoal", "plan", *words, "json=true"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": cache},
    )
    if not done.stdout.startswith("{"):
        raise SystemExit(f"{shlex.join(command[2:])}: {done.stderr.strip()[-1000:]}")
    return json.loads(done.stdout)


def best_plan(words: Sequence[str], cache: str) -> tuple[list[str], dict[str, Any]]:
    """(words, plan) with the settings that are advised. What was estimated to fit may not once it
    is compiled: then with what that plan advises."""
    settings = {word.partition("=")[0]: word for word in advised(words)}
    while not (found := plan(list(settings.values()), cache))["ok"] and (
        values := found["advice"][0]["values"]
    ):
        settings |= {key: f"{key}={str(value).lower()}" for key, value in values.items()}
    return list(settings.values()), found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|"
        for row in (head, ["---"] * len(head), *rows)
    )


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 20 else ""


def rows_of(found: Mapping[str, Any]) -> dict[str, str]:
    """Row of the table -> the cell of one plan."""
    needed, rows = found["memory"]["programs"], {}
    sampling = max(("prefill", "decode"), key=lambda name: sum(needed[name].values()))
    for place, name in (("training", "accumulate"), ("sampling", sampling)):
        for kind, size in needed[name].items():
            rows[f"{place}: {kind.partition(' (')[0]}"] = gib(size)
        rows[f"**{place}: all**"] = gib(sum(needed[name].values()))
    rows["memory of a device"] = gib(found["memory"]["bytes"])
    if found["seconds"]:
        for phase, one in {
            **found["seconds"]["phases"],
            "**a step**": found["seconds"]["step"],
        }.items():
            low, high = f"{one['hidden']:.1f}", f"{one['not_hidden']:.1f}"
            rows[phase] = f"{low} s" if low == high else f"{low} to {high} s"
        low, high = (f"{100 * share:.0f}" for share in found["mfu"][::-1])
        rows["MFU"] = f"{low}%" if low == high else f"{low} to {high}%"
    return rows


def all_plans(plans: Mapping[str, Mapping[str, Any]]) -> str:
    columns = {name: rows_of(found) for name, found in plans.items()}
    order = [
        row
        for place in ("training", "**training", "sampling:", "**sampling")
        for rows in columns.values()
        for row in rows
        if row.startswith(place)
    ]
    order += [row for rows in columns.values() for row in rows]
    return table(
        ["", *columns],
        [[row, *(rows.get(row, "") for rows in columns.values())] for row in dict.fromkeys(order)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fits", action="store_true")
    parser.add_argument("--estimated", action="store_true")
    args, words = parser.parse_known_args()
    names = [word for word in words if "=" not in word]
    added = [word for word in words if "=" in word]
    if args.fits:
        print(fits(added))
        return
    if unknown := set(names) - JOBS.keys():
        parser.error(f"no such job: {', '.join(unknown)}; there are {', '.join(JOBS)}")
    plans: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as own:
        for name in names or JOBS:
            given = [*JOBS[name].split(), *LENGTHS.split(), *added]
            asked, found = (
                estimated(given) if args.estimated else best_plan(given, args.cache or own)
            )
            plans[name] = found | {"words": asked}
            print(f"{name}: {found['verdict']}", file=sys.stderr, flush=True)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / f"{name}.json").write_text(json.dumps(plans[name], indent=1))
    if args.out:
        plans = {
            name: json.loads(file.read_text())
            for name in JOBS
            if (file := args.out / f"{name}.json").is_file()
        }
    commands = "\n".join(
        textwrap.fill(
            f"shoal plan {shlex.join(one['words'])}",
            116,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        ).replace("\n", " \\\n")
        for one in plans.values()
    )
    print(f"```bash\n{commands}\n```\n\n{all_plans(plans)}")


if __name__ == "__main__":
    main()
