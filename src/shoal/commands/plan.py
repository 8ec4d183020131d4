"""`shoal plan`: computes what a training job costs on devices that need not be here, from its own
compiled programs."""

from __future__ import annotations

import io
from dataclasses import asdict
from functools import partial
from typing import Any

from shoal.budget.budget import (
    Budget,
    PlannedStep,
    ProgramCost,
    host_text,
    phase_of,
    verdict,
)
from shoal.budget.memory import ROLES
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
"""How many rows of a table of transfers or temporaries are printed; the JSON has more."""

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""The head and the rows of a table."""


def plan(config: PlanConfig, console: Console) -> dict[str, Any]:
    """Prints the job, then what its compiled programs cost, its verdict last. Returns the plan as a
    record for JSON (`job`, `programs`, `memory`, `seconds`, `mfu`, `advice`, `verdict`); its `ok`
    is False if the job does not fit, which is no error. After Ctrl-C or SIGTERM, prints what was
    compiled until then, and raises KeyboardInterrupt. ShoalError if the settings cannot train."""
    check_trainable(config)
    with console, terminate_as_interrupt():
        budget = make_plan(
            config,
            console.note,
            show_job=partial(show_job, console=console),
            show_compiled=partial(show_compiled, console=console),
        )
        report(budget, console)
        style = "bold" if budget.fits() else "bold red"
        console.text(verdict(budget), style)
    return record(budget)


def estimate(config: PlanConfig) -> list[str]:
    """Returns the lines of a plan made without compiling or downloading anything, for a dry run:
    the job, and the verdict by estimates. If a ShoalError makes that impossible, for example
    because the model's config.json is not on this machine, one line `no estimate: ...` with the
    reason. Nothing is printed."""
    stream = io.StringIO()
    console = Console(stream)

    def say_nothing(_: str) -> None: ...

    try:
        if known_architecture(config.model) is None:
            raise ShoalError(
                f"{config.model.path} is not on this machine; `shoal plan` reads its config.json"
            )
        budget = make_plan(
            config, say_nothing, show_job=partial(show_job, console=console), compiles=False
        )
    except ShoalError as error:
        return [f"no estimate: {error}"]
    lines = stream.getvalue().splitlines()
    lines.append(f"estimated: {verdict(budget)}")
    return lines


def show_job(budget: Budget, console: Console) -> None:
    """Prints what is known of a job before anything is compiled: devices, model, meshes, and the
    memory of each role, with estimates of what only compilers know."""
    for line in _head(budget):
        console.text(line)
    idle = idle_text(budget.config.mesh, budget.num_used_devices, budget.num_devices)
    if idle:
        console.warning(idle)
    _show_memory(budget.estimated(), console)
    console.note(
        "exact: what is held; estimated: activations; temporary arrays are known once "
        "everything is compiled"
    )


def show_compiled(budget: Budget, console: Console) -> None:
    """Prints the memory and the costs of the programs that were compiled before an interrupt.
    `budget`: one with these programs alone."""
    _show_memory(budget, console)
    console.heading("compiled before the interrupt; the same command keeps it")
    head, rows = _program_table(budget)
    console.table(head, rows)


def report(budget: Budget, console: Console) -> None:
    """Prints what is known after compiling: memory, time, transfers, the largest temporaries, what
    the figures leave out or assume, and further advice. If nothing was compiled, because what the
    roles hold does not fit, only the last two. The first advice is not printed here: it is a part
    of the verdict."""
    if budget.costs:
        _show_memory(budget, console)
        _show_time(budget, console)
        _show_transfers(budget, console)
        _show_temporaries(budget, console)
    for line in _limits_of_figures(budget):
        console.note(line)
    for advice in budget.advice[1:]:
        console.note(f"another change: {advice.text}")


def _head(budget: Budget) -> list[str]:
    """Returns the first lines of a plan: the devices and the model, the roles' meshes, how several
    hosts run it (only if there are several and `mesh.pathways` is not set), and the assumed
    lengths and sizes."""
    config = budget.config
    step = _planned(budget)
    model = budget.model
    lines = [
        f"{step.devices}; {model.text()} in {model.layers} layers, {model.dtype}, "
        f"model.remat={model.remat}",
        _meshes_text(budget),
    ]
    if step.hosts > 1 and not config.mesh.pathways:
        alternative = "or as a process on each"
        if step.refusal:
            alternative = f"not as a process on each: {step.refusal}"
        lines.append(f"{step.hosts} hosts: runs with mesh.pathways=true, {alternative}")
    lines.append(
        f"assumed: every prompt has {config.sampling.max_prompt_tokens} tokens and every "
        f"completion {config.sampling.max_completion_tokens}; {budget.prompts_per_step} x "
        f"{config.batch.group_size} completions a step, {budget.slots} at once; a micro-batch is "
        f"{count(budget.batch.rows, 'row')} of {budget.batch.length} tokens"
    )
    return lines


def _planned(budget: Budget) -> PlannedStep:
    """Returns the planned step, which every budget of a plan has."""
    assert budget.step is not None  # every budget of a plan has a step
    return budget.step


def _meshes_text(budget: Budget) -> str:
    """Returns the devices and the mesh of each role that holds anything in memory, `trainer: 8
    devices (fsdp 8), sampler: 1 device`; if these texts are equal for all such roles (also if there
    is one alone), `all roles: ...`. The trainer is always among them."""
    meshes = {}
    for name, placement in budget.roles.items():
        if not _holds_anything(budget, name):
            continue
        text = count(len(placement.devices), "device")
        if placement.mesh:
            axes = [f"{axis} {size}" for axis, size in placement.mesh.items()]
            text += f" ({', '.join(axes)})"
        meshes[name] = text
    if len(set(meshes.values())) == 1:
        return "all roles: " + meshes["trainer"]
    return ", ".join(f"{name}: {text}" for name, text in meshes.items())


def _holds_anything(budget: Budget, role: str) -> bool:
    """True if a role holds anything in the devices' memory."""
    return any(item.role == role for item in budget.items)


def _show_memory(budget: Budget, console: Console) -> None:
    """Prints a table of a device's memory for each set of roles that share devices, and, if there
    is any, a line on what is in the host's memory. Roles that hold nothing are left out."""
    shown = []
    for role in budget.roles:
        roles = [name for name in budget.colocated_roles(role) if _holds_anything(budget, name)]
        if not roles or roles in shown:
            continue
        shown.append(roles)
        console.heading(f"memory of a device ({', '.join(roles)}), of {gib(budget.memory)}")
        head, rows = _memory_table(budget, roles)
        console.table(head, rows)
    on_host = host_text(budget)
    if on_host:
        console.note(
            f"for each device in the host's memory: {on_host}; how long it takes to move is not in "
            "the seconds"
        )


def _memory_table(budget: Budget, roles: list[str]) -> Table:
    """Returns a table of memory, as (head, rows): a row for each part, such as `gradient`, and a
    column for each program of these roles (one or more, which share devices). Programs that need
    the same memory share a column. If none of the roles has a program, the only column is what is
    always held. A part that needs nothing in any column has no row; an empty cell is 0. The last
    row, `all`, has the sums."""
    columns: list[tuple[list[str], dict[str, int]]] = []  # (programs, part -> bytes)
    for name, program in budget.programs.items():
        if program.role not in roles:
            continue
        bytes_by_part = budget.needed(name)
        for names, other_bytes in columns:
            if other_bytes == bytes_by_part:
                names.append(name)
                break
        else:  # no column has the same bytes
            columns.append(([name], bytes_by_part))
    if not columns:
        columns.append((["always"], budget.held(roles[0])))
    head = [""]
    totals = ["all"]
    rows: dict[str, list[str]] = {}  # part -> cells
    for names, bytes_by_part in columns:
        head.append(", ".join(names))
        totals.append(gib(sum(bytes_by_part.values())))
        for part, size in bytes_by_part.items():
            if size:
                rows[part] = [part]  # the first cell; the cells of the columns follow below
    for _, bytes_by_part in columns:
        for part, cells in rows.items():
            size = bytes_by_part.get(part, 0)
            cells.append(gib(size) if size else "")
    rows["all"] = totals
    return tuple(head), [tuple(cells) for cells in rows.values()]


def _show_time(budget: Budget, console: Console) -> None:
    """Prints the table of programs. If the speeds of the devices are known, it has seconds and the
    sums of a step, and a second table shows where the longest program takes its time: the SHOWN
    lines of code with the most seconds in all runs of a step. Which program is longest is decided
    with all transfers hidden. There must be costs."""
    console.heading("a step" if budget.is_timed else "programs")
    head, rows = _program_table(budget)
    if not budget.is_timed:
        console.table(head, rows)
        return
    console.table(head, rows + _step_rows(budget))
    console.note(
        "seconds: floor, the time of its operations at the peak rate, or to read its weights and "
        "caches; hidden, with all transfers between devices hidden behind the computation; not "
        "hidden, after it"
    )
    longest = max(budget.costs, key=lambda name: budget.seconds(name)[1])  # [1]: transfers hidden
    console.heading(f"where {longest} takes its time, without transfers")
    runs = budget.programs[longest].runs
    step_seconds = budget.step_seconds[1]
    sources = list(budget.costs[longest].sources.items())
    rows = []
    for source, seconds in sources[:SHOWN]:
        share = f"{100 * runs * seconds / step_seconds:.1f}%"
        rows.append((source, seconds_text(runs * seconds), share))
    console.table(("made by", "seconds", "share of a step"), rows)


def _program_table(budget: Budget) -> Table:
    """Returns a table, as (head, rows), with a row for each program that has a cost: its runs in a
    step, what it computes and moves in all of them, and how long that takes (the least possible,
    with transfers hidden, with none hidden). Seconds are left out if the speeds of the devices are
    unknown."""
    head = ["", "runs", "TFLOPs", "moved"]
    if budget.is_timed:
        head += ["floor", "hidden", "not hidden"]
    rows = []
    for name, cost in budget.costs.items():
        runs = budget.programs[name].runs
        moved = runs * sum(row.bytes for row in cost.collectives)
        # One array's publication is scaled up to all arrays by bytes, so `runs` is no count.
        runs_text = "" if name == "publish" else f"{runs:.3g}"
        cells = [
            f"{phase_of(name)}: {name}",
            runs_text,
            f"{runs * cost.flops / 1e12:,.1f}",
            gib(moved),
        ]
        if budget.is_timed:
            cells += [seconds_text(seconds) for seconds in budget.seconds(name)]
        rows.append(tuple(cells))
    return tuple(head), rows


def _step_rows(budget: Budget) -> list[tuple[str, ...]]:
    """Returns the last three rows of the table of programs: the seconds of a whole step, tokens
    sampled a second, and MFU in percent. The last two are given with all transfers hidden and with
    none hidden, not for the floor. The devices' speeds must be known."""
    floor, low, high = budget.step_seconds
    title = "a step, the next being sampled" if budget.overlaps else "all"
    tokens = _planned(budget).sampled_tokens
    fastest = f"{tokens / low:,.0f}"
    slowest = f"{tokens / high:,.0f}"
    step_mfu = [f"{100 * budget.mfu(seconds):.1f}%" for seconds in (low, high)]
    return [
        (title, "", "", "", seconds_text(floor), seconds_text(low), seconds_text(high)),
        ("tokens sampled a second", "", "", "", "", fastest, slowest),
        ("MFU", "", "", "", "", step_mfu[0], step_mfu[1]),
    ]


def _show_transfers(budget: Budget, console: Console) -> None:
    """Prints the SHOWN transfers between devices that take longest in a step, the longest first;
    nothing if there are none. Seconds, and the share of a step in which no transfer is hidden, are
    empty if the devices' speeds are unknown."""
    rows = []
    for seconds, program, transfers in budget.transfers()[:SHOWN]:
        moved = budget.programs[program].runs * transfers.bytes
        time = ""
        share = ""
        if budget.is_timed and budget.step_seconds[2]:
            time = seconds_text(seconds)
            share = f"{100 * seconds / budget.step_seconds[2]:.1f}%"
        rows.append(
            (transfers.kind, program, transfers.axis, gib(moved), time, share, transfers.source)
        )
    if rows:
        console.heading("transfers between devices, a step")
        console.table(("kind", "program", "axis", "bytes", "seconds", "share", "made by"), rows)


def _show_temporaries(budget: Budget, console: Console) -> None:
    """Prints the SHOWN largest temporary arrays of the program during which a device needs most
    memory; that program must have a cost. If the cost was extrapolated from programs with fewer
    layers, the arrays are those of the deepest one that was compiled, and the heading says so."""
    program = budget.fullest
    cost = budget.costs[program]
    title = program
    if cost.extrapolated:
        title += f" of {cost.extrapolated[1]} layers"  # the larger of the two compiled depths
    console.heading(f"largest temporaries ({title})")
    rows = [(shape, gib(size), source) for size, shape, source in cost.largest[:SHOWN]]
    console.table(("array", "bytes", "made by"), rows)


def _limits_of_figures(budget: Budget) -> list[str]:
    """Returns lines on what the figures of a plan leave out or assume; a single one, that nothing
    was compiled, if the budget has no costs."""
    if not budget.costs:
        return ["nothing was compiled: what the roles hold does not fit"]
    step = _planned(budget)
    lines = []
    if step.published_bytes:
        lines.append(
            f"publication copies {gib(step.published_bytes)} to each of the sampler's devices, "
            "counted at the rate of one link"
        )
    shallow: dict[tuple[int, ...], list[str]] = {}  # numbers of layers -> programs
    for name, cost in budget.costs.items():
        if cost.extrapolated:
            shallow.setdefault(tuple(cost.extrapolated), []).append(name)
    for (first, second), names in shallow.items():
        lines.append(
            f"extrapolated from {first} and {second} layers: {', '.join(names)}; layers=all "
            "compiles every layer"
        )
    is_measured = False
    if step.rates is not None:
        if step.rates.calibration:
            is_measured = True
            lines.append(_calibration_text(step.rates.calibration))
        if step.rates.kernels:
            lines.append(_assumed_text(step.rates.kernels, step.rates.is_tpu, step.rates.launch))
    if budget.peak_flops is None:
        lines.append("seconds are not known: the table of accelerators does not hold these devices")
    left_out = (
        "not in these figures: rewards, evaluation, checkpoints, the host's work, contention of "
        "links, and all that a compiler's estimate leaves out"
    )
    if not is_measured:
        left_out += "; nothing here was measured"
    lines.append(left_out)
    return lines


def _calibration_text(calibration: Any) -> str:
    """Returns a line on the measured speeds that are used in place of those that the devices' maker
    states. `calibration`: the content of the file `calibration=`, whose `figures` are name ->
    (median, least, most)."""
    figures = []
    for name, (middle, least, most) in calibration["figures"].items():
        figures.append(f"{name} {middle:.3g} ({least:.3g} to {most:.3g})")
    return (
        f"measured on {count(calibration['devices'], calibration['device'])} with JAX "
        f"{calibration['jax']}, instead of the maker's figures: {', '.join(figures)}, in bytes, "
        "operations and seconds"
    )


def _assumed_text(kernels: float, is_tpu: bool, launch: float) -> str:
    """Returns a line on what is assumed about kernels and transfers. `kernels`: the share of the
    peak rate that attention's kernels reach, from 0 to 1; `launch`: seconds to launch an operation,
    which the line names for GPUs alone."""
    text = (
        f"assumed: attention's kernels reach {kernels:.0%} of the peak rate, or the memory's; a "
        "transfer's first bytes take 1 us a chip on its way (TPU) or 10 (GPU), 30 over a network"
    )
    if not is_tpu:
        text += f"; an operation takes {1e6 * launch:.2g} us, to ask whether a loop goes on 10"
    return text


# ---- as JSON

BOUNDS = ("floor", "hidden", "not_hidden")
"""Names of the three numbers that `Budget.seconds` returns."""


def record(budget: Budget) -> dict[str, Any]:
    """Returns the plan as a record for JSON. If the devices' speeds are unknown, its `seconds` are
    {} and its `mfu` is []; else `seconds` has those of the step and of each phase, by the names in
    BOUNDS, and `mfu` is [all transfers hidden, none hidden], shares from 0 to 1. `ok`: True if the
    job fits. `memory` is in bytes of one device, `programs` there program -> part -> bytes; the
    other `programs` are the costs (`cost_record`)."""
    seconds = {}
    mfu = []
    if budget.is_timed:
        phases = {}
        for phase, of_phase in budget.phase_seconds().items():
            phases[phase] = dict(zip(BOUNDS, of_phase, strict=True))
        step_seconds = budget.step_seconds
        seconds = {"step": dict(zip(BOUNDS, step_seconds, strict=True)), "phases": phases}
        mfu = [budget.mfu(step_seconds[1]), budget.mfu(step_seconds[2])]
    return {
        "ok": budget.fits(),
        "verdict": verdict(budget),
        "advice": [asdict(advice) for advice in budget.advice],
        "micro_tokens": budget.config.batch.micro_tokens,
        "memory": {
            "bytes": budget.memory,
            "peak_bytes": budget.peak(),
            "fullest": budget.fullest,
            "host": budget.on_host(),
            "programs": {name: budget.needed(name) for name in budget.programs},
        },
        "seconds": seconds,
        "mfu": mfu,
        "job": job_record(budget),
        "programs": {name: cost_record(cost) for name, cost in budget.costs.items()},
    }


def job_record(budget: Budget) -> dict[str, Any]:
    """Returns what is known of a planned job before anything is compiled, for JSON. Sizes are in
    bytes of one device. The speeds of `DeviceRates`, each under its own name next to the others,
    are left out if the kind of devices is unknown."""
    step = _planned(budget)
    job = {
        "model": asdict(budget.model),
        "roles": {name: asdict(placement) for name, placement in budget.roles.items()},
        "machines": budget.machines,
        "num_devices": budget.num_devices,
        "held": held_record(budget),
        "memory_bytes": budget.memory,
        "peak_flops": budget.peak_flops,
        "published_bytes": step.published_bytes,
        "activations": budget.activations,
        "host": budget.on_host(),
        "shape": asdict(budget.batch),
        "slots": budget.slots,
        "prompts": budget.prompts_per_step,
        "programs": {name: asdict(program) for name, program in budget.programs.items()},
    }
    if step.rates is not None:
        job |= asdict(step.rates)  # its peak_flops, too
    return job | {
        "devices": step.devices,
        "tokens": {"sampled": step.sampled_tokens, "prompts": step.prompt_tokens},
        "model_flops": step.model_flops,
        "hosts": step.hosts,
        "refusal": step.refusal,
    }


def held_record(budget: Budget) -> dict[str, dict[str, dict[str, int]]]:
    """Returns the bytes held on each device: role -> phase (`always`, `sampling`, `update`) -> part
    -> bytes. Every role and phase is there; one that holds nothing is {}. For the trainer also,
    under `host`, part -> the bytes that its host's memory holds for each device, in whatever
    phase."""
    held: dict[str, dict[str, dict[str, int]]] = {}
    for role in ROLES:
        held[role] = {"always": {}, "sampling": {}, "update": {}}
    held["trainer"]["host"] = budget.on_host()
    for item in budget.items:
        if not item.on_host:
            held[item.role][item.phase][item.part] = item.bytes
    return held


def cost_record(cost: ProgramCost) -> dict[str, Any]:
    """Returns the costs of a program for JSON, its fields under their own names; with
    `extrapolated`, the two numbers of layers that were compiled, only if the costs were
    extrapolated from these."""
    costs = asdict(cost)
    if not cost.extrapolated:
        del costs["extrapolated"]
    return costs
