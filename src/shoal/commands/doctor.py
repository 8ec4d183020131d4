"""`shoal doctor`: checks a training job before it runs, and estimates what it will cost.

    settings -> task -> devices -> tokenizer, template -> data -> reward
    -> weights -> a trial of one step -> memory, time

A check that fails does not stop the checks that do not need its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.config.schema import Config, DoctorConfig, MeshSection, TaskSection
from shoal.mesh import Roles, available_devices, make_roles
from shoal.model.hf import dotted
from shoal.model.transformer import Model
from shoal.report.console import Console
from shoal.report.findings import Findings, gib
from shoal.rewards.pool import RewardPool
from shoal.run.assembly import with_prompts
from shoal.run.loading import ModelSpec, find_teacher, make_model, open_model
from shoal.run.parts import make_learner, training_engines
from shoal.run.preflight.estimate import Advice, add_measured, advise, estimate_times, evaluation_completions
from shoal.run.preflight.inputs import check_data, check_devices, check_template, check_tokenizer, set_sizes
from shoal.run.preflight.memory import (
    AvailableMemory,
    MemoryBudget,
    available_memory,
    explain_out_of_memory,
    parameter_count,
    static_budget,
    suggest_saving,
)
from shoal.run.preflight.reporter import Reporter, key_in
from shoal.run.preflight.reward import probe, reward_findings
from shoal.run.preflight.settings import check_settings, check_size
from shoal.run.preflight.step_trial import StepTrial, try_step
from shoal.run.task import load_task, with_overlong
from shoal.sampler.engine import Engine
from shoal.tasks.task import Task
from shoal.trainer.curriculum import Prepared, PromptStream
from shoal.types import Params, Purpose, ShoalError

LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Of a token's log-probs, sampler against trainer: above it the two do not compute one policy."""
FULL = 0.9
"""Share of memory above which a job is tight."""


@dataclass
class Preflight:
    """The parts of a job, None where a part could not be loaded, and the findings about them."""

    config: Config
    findings: Findings
    reward_functions: Sequence[Callable]
    stack: ExitStack
    task: Task | None = None
    pool: RewardPool | None = None
    roles: Roles | None = None
    loaded: ModelSpec | None = None
    teacher: ModelSpec | None = None
    first: Prepared | None = None
    result: dict[str, Any] = field(default_factory=lambda: {
        "ok": False, "findings": [], "first_prompt": "", "rewards": [], "agreement": {}, "memory": {}, "time": {},
        "advice": {}})


def doctor(config: DoctorConfig, console: Console, reward_functions: Sequence[Callable] = ()) -> dict[str, Any]:
    """Prints findings as checks make them and returns them; `ok` is False if the run would stop or could not train."""
    with console, ExitStack() as stack:
        job = Preflight(config, Findings(console), reward_functions, stack)
        findings = job.findings
        check_settings(config, findings)
        check_task(job)
        usable = check_mesh(job)
        check_model(job)
        check_prompts(job, console)
        check_reward(job, console)
        if job.loaded is not None:
            check_step(job, usable and job.first is not None and job.pool is not None)
        wrong, warnings = len(findings.at("wrong")), len(findings.at("warning"))
        console.heading(f"{f'{wrong} wrong' if wrong else 'nothing is wrong'}, "
                        f"{warnings} warning{'s' * (warnings != 1)}")
        job.result |= {"ok": findings.ok, "findings": findings.records()}
        return job.result


# ---- without weights


def check_task(job: Preflight) -> None:
    """Loads data and reward functions, each even if the other is wrong. The pool's processes start here, before JAX
    has threads."""
    config = job.config
    with Reporter(job.findings, "data", "task.path").errors():
        job.task = load_task(config.task)
    replaced = bool(config.reward.functions or job.reward_functions)
    if not replaced and job.task is None:
        return
    with reward_reporter(job).errors():
        source = TaskSection(num_questions=1) if replaced else config.task  # rewards of your own need no data
        scored = load_task(source, config.reward, job.reward_functions, config.algorithm.uses_rewards)
        scored = with_overlong(scored, config.reward, config.sampling.max_completion_tokens)
        job.pool = job.stack.enter_context(closing(RewardPool(scored.rewards, config.reward, config.steps)))
        if job.task is not None:
            job.task = replace(job.task, rewards=scored.rewards)


def check_mesh(job: Preflight) -> bool:
    """Makes the mesh; if that fails, returns False, and the checks that follow run on one device."""
    mesh, devices = job.config.mesh, available_devices()
    try:
        job.roles = make_roles(mesh)
        job.config = with_prompts(job.config, job.roles)
    except ShoalError as error:
        largest = max(("fsdp", "data", "tensor"), key=lambda name: getattr(mesh, name))
        key = key_in(str(error), "mesh.fsdp") if "does not divide" in str(error) else f"mesh.{largest}"
        job.findings.add("devices", "wrong", str(error), key)
        job.roles = make_roles(MeshSection(), devices)
        return False
    check_devices(job.config, job.roles, job.findings)
    return True


def check_model(job: Preflight) -> None:
    """Loads tokenizer and architecture of the model, and of the teacher."""
    assert job.roles is not None
    try:
        job.loaded = open_model(job.config.model, None)
    except ShoalError as error:
        text = str(error)
        template = "template=" in text or "chat template" in text
        job.findings.add("tokenizer", "wrong", text, "model.template" if template else "model.path")
        return
    check_tokenizer(job.loaded.tokenizer, job.findings)
    if job.config.teacher.path:
        with Reporter(job.findings, "teacher", "teacher.path").errors():
            job.teacher = find_teacher(job.config, job.loaded, None)


def check_prompts(job: Preflight, console: Console) -> None:
    """Checks template and data, and prints the run's first prompt."""
    if job.task is None or job.loaded is None:
        return
    tokenizer, examples = job.loaded.tokenizer, [job.task.train[row] for row in range(min(8, len(job.task.train)))]
    if check_template(tokenizer, examples, job.findings):
        job.first = check_data(job.config, job.task, tokenizer, job.findings)
    if job.first is not None:
        text = tokenizer.decode(job.first.prompt_ids.tolist(), skip_special_tokens=False)
        console.first_prompt(text)
        job.result["first_prompt"] = text


def check_reward(job: Preflight, console: Console) -> None:
    """Scores known answers to the run's first prompt and to the data's first rows, and prints the table."""
    if job.pool is None or job.task is None:
        return
    examples = [job.task.train[row] for row in range(min(2, len(job.task.train)))]
    if job.first is not None:
        examples = [job.first.example, *examples]
    encode = job.loaded.tokenizer.encode_prompt if job.loaded else lambda text: np.frombuffer(text.encode(), np.uint8)
    tried = None
    with reward_reporter(job).errors():
        tried = probe(job.pool, examples, encode)
    if tried is None:
        job.pool = None
        return
    job.result["rewards"] = tried.records()
    head = (f"reward of answers as {tried.form}" if tried.form else "reward", "total", *tried.functions)
    console.table(head, [(kind, *(f"{value:.3g}" for value in row.values())) for kind, row in tried.rows.items()])
    job.findings.extend(reward_findings(tried))


def reward_reporter(job: Preflight) -> Reporter:
    """Reports errors of reward functions, which may name other keys (`reward.on_error`)."""
    return Reporter(job.findings, "reward", "reward.functions", among=("reward.functions", "reward.weights"))


# ---- with weights


def check_step(job: Preflight, trial: bool) -> None:
    """Loads the weights, unless they cannot fit; with `trial`, tries a step and reports its memory and time."""
    assert job.loaded is not None and job.roles is not None
    config, roles, findings = job.config, job.roles, job.findings
    model = make_model(config.model, job.loaded, roles.trainer, config.batch.micro_tokens)
    check_size(config, parameter_count(model.architecture), findings)
    engines = make_engines(job, model)
    budget = static_budget(model, roles, config.algorithm.kl_coef > 0, job.teacher and job.teacher.architecture,
                           engines)
    available = available_memory(roles.trainer.mesh.devices.flat)
    if trial and available.free and budget.total * available.sharing > available.free:
        report_memory(job, budget, available)
        return
    try:
        parameters = job.loaded.load(roles.trainer, jnp.float32)
        if not check_weights(job, parameters) or not trial:
            return
        tried = try_first_step(job, model, engines["training"], parameters)
    except ShoalError as error:
        Reporter(findings, "model", "model.path").wrong(error)
        return
    except Exception as error:
        if (explained := explain_out_of_memory(error, config)) is None:
            raise
        Reporter(findings, "memory", "batch.micro_tokens").wrong(explained)
        return
    if tried is not None:
        report_agreement(job, tried, jnp.dtype(model.dtype).name)
        add_measured(budget, tried, config, roles.trainer.row_shards, engines)
        report_memory(job, budget, available)
        report_time(job, tried, model, engines["training"], budget, available)


def make_engines(job: Preflight, model: Model) -> dict[str, Engine]:
    """The engines of a run: for training's groups, greedy answers and pass@k's groups. Nothing is compiled."""
    assert job.loaded is not None and job.roles is not None
    make = training_engines(job.config, model.on(job.roles.sampler), job.loaded.tokenizer)
    engines = {"training": make(Purpose.TRAIN, job.config.batch.group_size), "evaluation": make(Purpose.EVALUATE, 1)}
    return engines | ({"pass@k": make(Purpose.EVALUATE, job.config.pass_k)} if job.config.pass_k else {})


def check_weights(job: Preflight, parameters: Params) -> bool:
    """True if every weight is finite."""
    finite = jax.device_get(jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))(parameters))
    bad = [dotted(path) for path, good in jax.tree_util.tree_leaves_with_path(finite) if not good]
    if bad:
        job.findings.add("model", "wrong", f"NaN or infinity in the weights {', '.join(bad[:5])} of "
                         f"{job.config.model.path}: take another checkpoint", "model.path")
        return False
    count = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    job.findings.add("model", "ok", f"{count / 1e6:.1f}M parameters, all finite")
    return True


def try_first_step(job: Preflight, model: Model, engine: Engine, parameters: Params) -> StepTrial | None:
    """A trial of the run's first step; None if its reward fails."""
    assert job.task is not None and job.loaded is not None and job.pool is not None
    config, tokenizer = job.config, job.loaded.tokenizer
    stream = PromptStream(job.task.train, tokenizer.encode_prompt, config.seed, config.sampling.max_prompt_tokens,
                          config.sampling.long_prompts)
    prompts = stream.next(config.batch.prompts_per_step)
    with reward_reporter(job).errors():
        return try_step(config, job.task, tokenizer, job.pool, engine, make_learner(config, model), parameters,
                        prompts)
    return None


# ---- reports of the trial


def report_agreement(job: Preflight, trial: StepTrial, dtype: str) -> None:
    """Reports whether sampler and trainer agree, and whether the samples can train the model."""
    limit = job.config.sampling.max_completion_tokens
    agreement, samples = Reporter(job.findings, "agreement"), Reporter(job.findings, "samples")
    mean, largest = float(trial.differences.mean()), float(trial.differences.max())
    job.result["agreement"] = {
        "dtype": dtype, "tokens": int(trial.differences.size), "mean_difference": mean, "largest_difference": largest,
        "entropy": trial.entropy, "truncated": trial.truncated, "nonzero_std": trial.nonzero_std,
        "completions": int(trial.lengths.size), "mean_length": float(trial.lengths.mean()),
        "mean_reward": trial.mean_reward}
    text = (f"log-probs of sampler and trainer differ by {mean:.1e} in the mean, {largest:.1e} at most "
            f"({trial.differences.size} tokens, {dtype})")
    if not np.isfinite(trial.differences).all() or trial.skipped:
        agreement.wrong(f"{text}; the update has no finite gradient: set model.dtype=float32")
    elif largest > LARGEST_DIFFERENCE[dtype]:
        agreement.warning(f"{text}: more than {LARGEST_DIFFERENCE[dtype]:g} is to be expected; try "
                          "model.dtype=float32, and watch sampler_gap/logprob_mean")
    else:
        agreement.ok(text)
    samples.ok(f"{trial.lengths.size} completions: entropy {trial.entropy:.2f}, {100 * trial.truncated:.0f}% truncated "
               f"at {limit} tokens, {100 * trial.nonzero_std:.0f}% of {len(trial.groups)} groups with variance, mean "
               f"reward {trial.mean_reward:.3g}")
    if trial.truncated > 0.5:
        samples.warning(f"{100 * trial.truncated:.0f}% of completions are truncated at "
                        f"sampling.max_completion_tokens={limit}: raise it")
    if trial.nonzero_std == 0:
        values = {round(float(r), 9) for group in trial.groups for r in group.rewards[group.valid]}
        same = f"every completion scored {next(iter(values)):.3g}" if len(values) == 1 else \
            "within each group all completions scored the same"
        samples.warning(f"{same}, so this step would teach nothing: make the task easier or harder, or raise "
                        f"batch.group_size={job.config.batch.group_size}")


def report_memory(job: Preflight, budget: MemoryBudget, available: AvailableMemory) -> None:
    """Reports the memory needed and free on each device, and if it is tight, the key that saves most."""
    assert job.roles is not None
    devices, total = job.roles.trainer.mesh.devices.flat, budget.total * available.sharing
    job.result["memory"] = {
        "needed_bytes": total, "free_bytes": available.free, "total_bytes": available.total, "phase": budget.phase,
        "phases": budget.phases, "parts": budget.parts, "sharing_devices": available.sharing,
        "where": available.where,
        "devices": [{"device": str(device), "needed_bytes": budget.total} for device in devices]}
    shared = f" on each of {available.sharing} devices that share it" if available.sharing > 1 else ""
    text = f"{gib(budget.total)}{shared} at most, in the {budget.phase} phase ({budget.describe()})"
    if not available.free:
        job.findings.add("memory", "ok", f"{text}; the device does not report its memory")
        return
    text += f"; {gib(available.free)} of {gib(available.total)} free ({available.where})"
    if total <= FULL * available.free:
        job.findings.add("memory", "ok", text)
        return
    cure, key = suggest_saving(job.config, budget, job.roles, jax.device_count())
    if total > available.free:
        job.findings.add("memory", "wrong", f"too little: {text}. {cure}", key)
        job.result["advice"] = vars(Advice(cure, key))
    else:
        job.findings.add("memory", "warning", f"tight: {text}. {cure}", key)


def report_time(job: Preflight, trial: StepTrial, model: Model, engine: Engine, budget: MemoryBudget,
                available: AvailableMemory) -> None:
    """Reports the time of a step and of the run, and the key that saves most."""
    assert job.task is not None and job.roles is not None
    times = estimate_times(job.config, trial, engine.num_groups,
                           evaluation_completions(job.config, set_sizes(job.task)))
    job.result["time"] = times.record()
    job.findings.add("time", "ok", times.describe())
    if not job.result["advice"]:
        advice = advise(job.config, model, trial, times, budget, available, job.roles, jax.device_count())
        job.result["advice"] = vars(advice)
        job.findings.add("advice", "ok", advice.text, advice.key)
