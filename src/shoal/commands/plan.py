"""`shoal plan`: what a training job costs on devices that need not be here, read from its own
compiled programs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from typing import Any

from shoal.budget.budget import PHASES, Budget, host_text, verdict
from shoal.checks.inputs import idle_text
from shoal.checks.settings import check_trainable
from shoal.config.commands import PlanConfig
from shoal.job.interrupt import terminate_as_interrupt
from shoal.plan.plan import make_plan
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.text import count, gib, seconds_text
from shoal.weights.source import known_architecture

SHOWN = 5
"""Rows of a table of transfers or temporaries that are printed; the JSON has more."""


def plan(config: PlanConfig, console: Console) -> dict[str, Any]:
    """Prints the plan, its verdict last, and returns it; `ok` is False where the job does not
    fit."""
    check_trainable(config)
    with console, terminate_as_interrupt():
        figures = make_plan(config, console.note, partial(show, console=console))
        report(figures, console)
        console.text(verdict(figures), "bold" if figures.fits else "bold red")
    return record(figures)


def estimate(config: PlanConfig) -> list[str]:
    """The lines of a plan for which nothing is compiled or downloaded."""
    stream = io.StringIO()
    try:
        if known_architecture(config.model) is None:
            raise ShoalError(
                f"{config.model.path} is not on this machine; `shoal plan` reads its config.json"
            )
        figures = make_plan(
            config, lambda _: None, partial(show, console=Console(stream)), compiles=False
        )
    except ShoalError as error:
        return [f"no estimate: {error}"]
    return [*stream.getvalue().splitlines(), f"estimated: {verdict(figures)}"]


def show(figures: Budget, console: Console) -> None:
    """A job before anything is compiled, or what was compiled before an interrupt."""
    if figures.programs:
        _show_memory(figures, console)
        console.heading("compiled before the interrupt; the same command keeps it")
        console.table(*_program_table(figures, whole=False))
        return
    for line in _head(figures):
        console.text(line)
    used = {device for role in figures.job["roles"].values() for device in role["devices"]}
    if idle := idle_text(figures.config.mesh, len(used), figures.job["num_devices"]):
        console.warning(idle)
    _show_memory(figures.estimated, console)
    console.note(
        "exact: what is held; estimated: activations; temporary arrays are known when all is "
        "compiled"
    )


def _show_memory(figures: Budget, console: Console) -> None:
    for roles in _apart(figures):
        console.heading(f"memory of a device ({', '.join(roles)}), of {gib(figures.memory)}")
        console.table(*_memory_table(figures, roles))
    if host := host_text(figures):
        console.note(
            f"for each device in the host's memory: {host}; how long it takes to move is not in "
            "the seconds"
        )


def report(figures: Budget, console: Console) -> None:
    if figures.programs:
        _show_memory(figures, console)
        console.heading("a step" if figures.is_timed else "programs")
        console.table(*_program_table(figures))
    if figures.is_timed:
        console.note(
            "seconds: floor, what its operations take at the peak rate, or its weights and caches "
            "to be read; hidden, with all transfers between devices behind the computation; not "
            "hidden, after it"
        )
        longest = max(figures.programs, key=lambda name: figures.seconds(name)[1])
        console.heading(f"where {longest} takes its time, without transfers")
        runs, step = figures.job["programs"][longest]["runs"], figures.step_seconds[1]
        console.table(
            ("made by", "seconds", "share of a step"),
            [
                (source, seconds_text(runs * seconds), f"{100 * runs * seconds / step:.1f}%")
                for source, seconds in list(figures.programs[longest]["sources"].items())[:SHOWN]
            ],
        )
    if rows := _transfer_rows(figures):
        console.heading("transfers between devices, a step")
        console.table(("kind", "program", "axis", "bytes", "seconds", "share", "made by"), rows)
    if figures.programs:
        fullest = figures.fullest
        few = figures.programs[fullest].get("extrapolated")
        console.heading(f"largest temporaries ({fullest}{f' of {few[1]} layers' if few else ''})")
        console.table(
            ("array", "bytes", "made by"),
            [
                (shape, gib(size), source)
                for size, shape, source in figures.programs[fullest]["largest"][:SHOWN]
            ],
        )
    for line in _unknown(figures):
        console.note(line)
    for one in figures.advice[1:]:
        console.note(f"another change: {one['text']}")


def _head(figures: Budget) -> Iterator[str]:
    job, config = figures.job, figures.config
    model, shape = job["model"], job["shape"]
    size = model["parameters"]
    parameters = f"{size / 1e9:.2f}e9" if size > 1e8 else f"{size:,}"
    yield (
        f"{job['devices']}; {parameters} parameters in {model['layers']} layers, "
        f"{model['dtype']}, model.remat={model['remat']}"
    )
    meshes = {
        name: count(len(one["devices"]), "device")
        + (
            f" ({', '.join(f'{axis} {size}' for axis, size in one['mesh'].items())})"
            if one["mesh"]
            else ""
        )
        for name, one in job["roles"].items()
        if any(job["held"][name].values())
    }
    shared = len(set(meshes.values())) == 1
    yield (
        "all roles: " + meshes["trainer"]
        if shared
        else ", ".join(f"{name}: {text}" for name, text in meshes.items())
    )
    if job["hosts"] > 1 and not config.mesh.pathways:
        yield f"{job['hosts']} hosts: runs with mesh.pathways=true, " + (
            f"not as a process on each: {job['refusal']}"
            if job["refusal"]
            else "or as a process on each"
        )
    yield (
        f"assumed: every prompt has {config.sampling.max_prompt_tokens} tokens and every "
        f"completion {config.sampling.max_completion_tokens}; {job['prompts']} x "
        f"{config.batch.group_size} completions a step, {job['slots']} at once; a micro-batch is "
        f"{count(shape['rows'], 'row')} of {shape['length']} tokens"
    )


def _apart(figures: Budget) -> list[list[str]]:
    """The roles by the devices that they share."""
    found: list[list[str]] = []
    for role in figures.job["roles"]:
        roles = [
            name
            for name in figures.sizes.colocated_roles(role)
            if any(figures.job["held"][name].values())
        ]
        if roles and roles not in found:
            found.append(roles)
    return found


def _memory_table(
    figures: Budget, roles: list[str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A row for each kind, a column for each program that runs on these roles' devices, or for
    those that need the same."""
    columns: dict[str, dict[str, int]] = {}
    for program in (name for name, one in figures.job["programs"].items() if one["role"] in roles):
        parts = figures.needed(program)
        same = next((names for names, other in columns.items() if other == parts), "")
        columns = {
            f"{names}, {program}" if names == same else names: other
            for names, other in columns.items()
        }
        columns |= {} if same else {program: parts}
    needed = columns or {"always": figures.sizes.on(roles[0])}
    kinds = dict.fromkeys(kind for parts in needed.values() for kind in parts if parts[kind])
    rows = [
        (kind, *(gib(parts[kind]) if parts.get(kind) else "" for parts in needed.values()))
        for kind in kinds
    ]
    return ("", *needed), [*rows, ("all", *(gib(sum(parts.values())) for parts in needed.values()))]


def _program_table(
    figures: Budget, whole: bool = True
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A row for each program: what it computes and moves in all its runs of a step, and how long
    that takes; of a `whole` job with their sums."""
    head = ("", "runs", "TFLOPs", "moved", *("floor", "hidden", "not hidden") * figures.is_timed)
    rows = []
    for name, one in figures.programs.items():
        runs = figures.job["programs"][name]["runs"]
        moved = runs * sum(row["bytes"] for row in one["collectives"])
        times = (
            [seconds_text(seconds) for seconds in figures.seconds(name)] if figures.is_timed else []
        )
        # One array's publication stands for all, by bytes: that is no number of runs.
        rows.append(
            (
                f"{PHASES[name][0]}: {name}",
                "" if name == "publish" else f"{runs:.3g}",
                f"{runs * one['flops'] / 1e12:,.1f}",
                gib(moved),
                *times,
            )
        )
    if figures.is_timed and whole:
        title = "a step, the next being sampled" if figures.overlaps else "all"
        rows.append(
            (title, "", "", "", *(seconds_text(seconds) for seconds in figures.step_seconds))
        )
        tokens, (_, low, high) = figures.job["tokens"]["sampled"], figures.step_seconds
        rows.append(
            (
                "tokens sampled a second",
                "",
                "",
                "",
                "",
                f"{tokens / low:,.0f}",
                f"{tokens / high:,.0f}",
            )
        )
        rows.append(
            (
                "MFU",
                "",
                "",
                "",
                "",
                f"{100 * figures.mfu(low):.1f}%",
                f"{100 * figures.mfu(high):.1f}%",
            )
        )
    return head, rows


def _transfer_rows(figures: Budget) -> list[tuple[str, ...]]:
    step = figures.step_seconds[2] if figures.is_timed else 0.0
    found = []
    for seconds, program, row in figures.transfers()[:SHOWN]:
        runs = figures.job["programs"][program]["runs"]
        share = f"{100 * seconds / step:.1f}%" if step else ""
        found.append(
            (
                row["kind"],
                program,
                row["axis"],
                gib(runs * row["bytes"]),
                seconds_text(seconds) if step else "",
                share,
                row["source"],
            )
        )
    return found


def _unknown(figures: Budget) -> Iterator[str]:
    """What the figures do not hold."""
    if not figures.programs:
        yield "nothing was compiled: what the roles hold does not fit"
        return
    if copied := figures.job["published_bytes"]:
        yield (
            f"publication copies {gib(copied)} to each of the sampler's devices, counted at the "
            "rate of one link"
        )
    shallow = [name for name, one in figures.programs.items() if one.get("extrapolated")]
    if shallow:
        yield (
            f"extrapolated from 2 and 4 layers: {', '.join(shallow)}; layers=all compiles every "
            "layer"
        )
    if one := figures.job.get("calibration"):
        shown = ", ".join(
            f"{name} {middle:.3g} ({least:.3g} to {most:.3g})"
            for name, (middle, least, most) in one["figures"].items()
        )
        yield (
            f"measured on {count(one['devices'], one['device'])} with JAX {one['jax']}, in place "
            f"of what the maker says: {shown}, in bytes, operations and seconds"
        )
    if share := figures.job.get("kernels"):
        yield (
            f"assumed: attention's kernels reach {share:.0%} of the peak rate, or the memory's; a "
            "transfer's first bytes take 1 us a chip on its way (TPU) or 10 (GPU), 30 over a "
            "network"
            + (
                ""
                if figures.job["is_tpu"]
                else f"; an operation takes {1e6 * figures.job['launch']:.2g} us, to ask "
                "whether a loop goes on 10"
            )
        )
    if figures.job["peak_flops"] is None:
        yield "seconds are not known: the table of accelerators does not hold these devices"
    yield (
        "not in these figures: rewards, evaluation, checkpoints, the host's work, contention of "
        "links, and all that a compiler's estimate leaves out"
        + "; nothing here was measured"
        * (not figures.job.get("calibration"))
    )


def record(figures: Budget) -> dict[str, Any]:
    """The plan as JSON."""
    timed = figures.is_timed
    names = ("floor", "hidden", "not_hidden")
    return {
        "ok": figures.fits,
        "verdict": verdict(figures),
        "advice": figures.advice,
        "micro_tokens": figures.config.batch.micro_tokens,
        "memory": {
            "bytes": figures.memory,
            "peak_bytes": figures.peak,
            "fullest": figures.fullest,
            "host": figures.job["host"],
            "programs": {name: figures.needed(name) for name in figures.job["programs"]},
        },
        "seconds": {
            "step": dict(zip(names, figures.step_seconds, strict=True)),
            "phases": {
                phase: dict(zip(names, each, strict=True))
                for phase, each in figures.phase_seconds().items()
            },
        }
        if timed
        else {},
        "mfu": [figures.mfu(seconds) for seconds in figures.step_seconds[1:]] if timed else [],
        "job": dict(figures.job),
        "programs": {name: dict(one) for name, one in figures.programs.items()},
    }
