"""Estimates the memory of a job before anything is compiled, and judges whether it fits the
devices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.budget.advice import Describe, suggest_fit
from shoal.budget.auto import all_teachers, teacher_architectures
from shoal.budget.budget import (
    LARGEST,
    TIGHT,
    BatchSize,
    Budget,
    Item,
    ModelSize,
    StepProgram,
    parts_text,
    phase_of,
)
from shoal.budget.memory import (
    AvailableMemory,
    activation_bytes,
    active_parameter_count,
    available_memory,
    cache_items,
    input_bytes,
    parameter_count,
    score_bytes,
    teacher_update_bytes,
    unstacked_bytes,
    update_bytes,
    weight_budget,
)
from shoal.budget.shapes import micro_batch_shapes
from shoal.budget.slots import engine_states, num_hosts, training_slots
from shoal.findings import Finding
from shoal.model.architecture import Architecture
from shoal.records import ShoalError
from shoal.sampler.scheduler import num_rows
from shoal.text import gib

if TYPE_CHECKING:
    from shoal.job.job import Job


def job_budget(job: Job) -> Budget:
    """Returns the memory budget of a job before anything is compiled: what its roles hold on each
    device, and what an update is estimated to need besides. What compiled programs need is empty in
    it; a plan and a trial fill it in. Opens the stages of the job that it reads; the teacher counts
    also if its stage is not open."""
    config = job.config
    model = job.model
    roles = job.roles
    a = model.architecture
    weights = weight_budget(config, a, roles, model.dtype, teachers_of(job))
    caches = cache_items(engine_states(config, model, roles, a))
    shape = micro_batch_shapes(config, roles.trainer.row_shards)[0]
    activations, stored = update_memory(job, shape.tokens // roles.trainer.row_shards)
    memory = weights.memory
    if not memory:  # the maker's figure is not known, as for a CPU
        available = available_memory(roles.trainer.mesh.devices.flat)
        memory = available.total // available.sharing
    plan = training_slots(config, roles, a)
    rows = num_rows(plan.slots, plan.siblings, roles.hosts[0].row_shards)
    return replace(
        weights,
        config=job.advised_config,
        memory=memory,
        items=list(weights.items) + caches + stored,
        num_devices=len(job.devices),
        model=ModelSize(
            parameters=parameter_count(a),
            layers=a.num_layers,
            dtype=model.dtype.name,
            remat=model.remat,
            active=active_parameter_count(a),
        ),
        batch=BatchSize(shape.rows, shape.length, shape.tokens),
        slots=rows * plan.siblings * num_hosts(roles),
        prompts_per_step=config.batch.prompts_per_step,
        activations=activations,
        programs={name: StepProgram(role) for name, role in LARGEST.items()},
    )


def teachers_of(job: Job) -> dict[str, Architecture]:
    """Returns the architectures of the job's teachers that have weights of their own, by name, also
    if their stage is not open."""
    sources = job.opened.get("teacher_sources")
    if sources is None:
        return teacher_architectures(job.config)
    return {name: source.architecture for name, source in sources.items()}


def update_memory(job: Job, tokens: int) -> tuple[int, list[Item]]:
    """Returns a pair: (bytes that an update of `tokens` tokens on a device is estimated to need
    there, besides what the roles hold, the layers' activations included; items that it stores in
    the host's memory, which is empty unless `model.remat` is `offload` on an accelerator)."""
    model = job.model
    role = job.roles.trainer
    a = model.architecture
    remat = model.remat
    if remat == "none":  # has no estimate of its own; it stores at least what `dots` stores
        remat = "dots"
    needed = update_bytes(a, role, model.dtype, tokens)
    teachers = all_teachers(job.config, a, teachers_of(job))
    needed += teacher_update_bytes(job.config.teacher, teachers, role, model.dtype, tokens)
    needed += score_bytes(model, tokens)
    kept = activation_bytes(a, tokens / role.tensor, model.dtype, remat, role.expert)
    stored = kept + input_bytes(a, tokens, model.dtype)
    needed += kept
    if remat != "offload" or role.platform == "cpu":
        return needed + unstacked_bytes(a, role, model.dtype, stored), []
    # Layers store their inputs and `kept` in the host's memory. The device then holds only what two
    # layers store, while it is moved.
    moved_away = stored * max(0, a.num_layers - 2) // a.num_layers
    needed -= moved_away
    return needed, [Item("stored for the backward pass", "trainer", "update", stored, on_host=True)]


def check_memory(job: Job) -> Finding:
    """Returns a finding that says whether the memory which is known before compilation fits into
    what is free. ShoalError if a device would need more than its whole memory, free or not. If the
    free memory is too little, but not the whole, the finding is `wrong`."""
    budget = job_budget(job)
    available = available_memory(job.roles.trainer.mesh.devices.flat)
    finding, _ = judge_memory(budget, available, job.budget_for, "at least")
    if finding.level == "wrong" and budget.peak() * available.sharing > available.total:
        raise ShoalError(finding.text)
    return finding


def judge_memory(
    budget: Budget, available: AvailableMemory, describe: Describe, bound: str = "at most"
) -> tuple[Finding, str]:
    """Returns (a finding that says what each device needs and has; the advice in it as text, '' if
    the job fits easily). The finding is `ok`, `warning` if the fit is tight, or `wrong` if memory
    is not enough. `bound`: the words before the estimate, `at least` if it leaves out what
    compilation will show. `describe`: returns the budget of a job with another configuration, to
    try advice. `available`: what the devices report. If the device does not report its memory, the
    finding is `ok` and the advice ''."""
    shared = ""
    if available.sharing > 1:
        shared = f" on each of {available.sharing} devices that share it"
    text = (
        f"{bound} {gib(budget.peak())}{shared}, in the {phase_of(budget.fullest)} phase "
        f"({parts_text(budget)})"
    )
    if not available.free:
        return Finding("memory", "ok", f"{text}; the device does not report its memory"), ""
    text += f"; {gib(available.free)} of {gib(available.total)} free ({available.where})"
    free = available.free / available.sharing
    if budget.peak() <= TIGHT * free:
        return Finding("memory", "ok", text), ""
    advice = suggest_fit(budget, describe, TIGHT * free)
    if budget.peak() > free:
        text = f"not enough memory: {text}. {advice.text}"
        return Finding("memory", "wrong", text, advice.key), advice.text
    return Finding("memory", "warning", f"tight: {text}. {advice.text}", advice.key), advice.text
