"""`shoal doctor`: checks a training job before it runs, and estimates what it will cost.

    the job's stages -> reward -> weights -> a trial of one step -> memory, time

If a stage fails, the stages that do not need it are still checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.budget.budget import Budget, held_phase
from shoal.budget.memory import AvailableMemory, available_memory, parameter_count
from shoal.checks.inputs import set_sizes
from shoal.checks.reward import ModelText, model_text_maker, probe, reward_findings, score_text
from shoal.checks.settings import check_lr_for_size
from shoal.config.commands import DoctorConfig
from shoal.config.derived import evaluation_completions
from shoal.findings import Finding, Findings
from shoal.job.job import Job
from shoal.job.memory import job_budget, judge_memory
from shoal.job.out_of_memory import explain_out_of_memory
from shoal.job.step_trial import (
    StepTrial,
    Times,
    best_advice,
    estimate_times,
    trial_budget,
    try_step,
)
from shoal.records import Example, Params
from shoal.report.console import Console
from shoal.runs.diagnosis import row_named
from shoal.text import count

LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.0125}
"""Type of the model -> the largest expected difference between the sampler's and the trainer's
log-prob of a token. A larger one means that the two do not compute the same policy."""


def doctor(
    config: DoctorConfig, console: Console, reward_functions: Sequence[Callable] = ()
) -> dict[str, Any]:
    """Checks a job, prints each finding as soon as it is made, and returns all of them. `ok` is
    False if the run would stop or could not train."""
    with (
        console,
        Job(config, console, functions=reward_functions, findings=Findings(console)) as job,
    ):
        findings = job.findings
        result: dict[str, Any] = {
            "ok": False,
            "findings": [],
            "first_prompt": "",
            "rewards": [],
            "agreement": {},
            "memory": {},
            "time": {},
            "advice": {},
        }
        job.collect(through="run_folder_note")
        if job.is_open("check_configuration", "run_folder_note") and job.run_folder_note:
            findings.of("configuration").ok(job.run_folder_note)
        job.collect(through="tokenizer")
        begins = check_data(job, result)
        scored = job.is_open("questions", "reward_pool") and check_reward(job, result)
        if job.is_open("check_longest_sequence", "model", "teacher_source"):
            check_step(job, result, begins and scored)
        wrong = len(findings.at("wrong"))
        warnings = len(findings.at("warning"))
        text = f"{wrong} wrong" if wrong else "nothing is wrong"
        console.heading(f"{text}, {count(warnings, 'warning')}")
        return result | {"ok": not wrong, "findings": findings.records()}


# ---- without weights


def check_data(job: Job, result: dict[str, Any]) -> bool:
    """Checks the data and prints the run's first prompt; False if a run could not begin."""
    if not job.is_open("questions", "tokenizer"):
        return False
    data, check = job.questions, job.findings.of("data", "task.path")
    for note in data.notes:
        check.warning(note)
    for reason, number in data.data.dropped.items():
        check.warning(
            f"{number:,} of {sum(data.data.train_files.values()):,} training rows were dropped: "
            f"{reason}"
        )
    job.collect(through="sampling_settings")
    if not job.is_open("prompt_lengths", "evaluation_sets", "prompts"):
        return False
    if not job.findings.at("wrong"):
        used = job.requested.steps * job.prompts_per_step
        sets = ", ".join(f"{number:,} {name}" for name, number in set_sizes(data).items())
        check.ok(
            f"{len(data.train):,} prompts of {job.prompt_lengths}, {used:,} are asked for; {sets}"
        )
    text = job.tokenizer.decode(job.first_prompt.prompt_ids.tolist(), skip_special_tokens=False)
    # The finding of the template reports the prompt's tokens.
    job.console.passage("first prompt", text, lines=16, characters=1200)
    result["first_prompt"] = text
    return True


def check_reward(job: Job, result: dict[str, Any]) -> bool:
    """Scores known answers to the run's first prompt and to the first rows of data, and prints the
    scores as a table; False if the reward fails."""
    data = job.questions
    examples = [data.train[row] for row in range(min(2, len(data.train)))]
    if "prompts" in job.opened:
        examples = [job.first_prompt.example, *examples]
    sample = bytes_as_model_text
    if "tokenizer" in job.opened:
        sample = model_text_maker(job.tokenizer, job.encode)
    tried = None
    with job.findings.of("reward", "reward.functions").errors():
        tried = probe(job.reward_pool, examples, sample)
    if tried is None:
        return False
    result["rewards"] = tried.records()
    title = f"reward of answers as {tried.form}" if tried.form else "reward"
    rows = []
    for answer, scores in tried.rows.items():
        texts = [score_text(score) for score in scores.values()]
        rows.append((answer, *texts))
    job.console.table((title, "total", *tried.functions), rows)
    job.findings.extend(reward_findings(tried, has_calls=bool(data.tools or data.environments)))
    return True


def bytes_as_model_text(_: Example, text: str) -> ModelText:
    """Returns an answer as if a model had sampled it, one token for each byte; for a job whose
    tokenizer is missing."""
    return ModelText(text, list(text.encode()))


# ---- with weights


def check_step(job: Job, result: dict[str, Any], tries: bool) -> None:
    """Loads the weights, unless they cannot fit into memory, and tries one step. `tries`: False if
    another part of the job is wrong; then only the weights are checked."""
    check_lr_for_size(job.config_for_devices, parameter_count(job.model.architecture), job.findings)
    job.collect(through="engines")
    if not job.is_open("engines"):
        return
    budget = job_budget(job)
    available = available_memory(job.roles.trainer.mesh.devices.flat)
    if tries and available.free and budget.peak() * available.sharing > available.free:
        report_memory(job, result, budget, available)
        return
    trial = None
    try:
        with job.findings.of("model", "model.path").errors():
            parameters = job.load_weights()
            if check_weights(job, parameters) and tries:
                trial = try_first_step(job, parameters)
    except Exception as error:  # running out of memory raises one of several types
        explained = explain_out_of_memory(error, job.advised_config)
        if explained is None:
            raise
        job.findings.of("memory", "batch.micro_tokens").wrong(explained)
        return
    if trial is None:
        return
    report_agreement(job, result, trial)
    times = estimate_times(
        job.config,
        trial,
        job.engines["training"].num_groups,
        evaluation_completions(job.config, set_sizes(job.questions)),
        job.roles.disaggregated,
    )
    tried = trial_budget(budget, trial, job.engines)
    report_memory(job, result, tried, available)
    report_time(job, result, times, tried, available)


def check_weights(job: Job, parameters: Params) -> bool:
    """Reports whether all weights are finite; True if they are."""
    check = job.findings.of("model", "model.path")

    def is_finite(array: jax.Array) -> jax.Array:
        return jnp.isfinite(array).all()

    def are_finite(arrays: Params) -> Any:
        return jax.tree.map(is_finite, arrays)

    finite = jax.device_get(jax.jit(are_finite)(parameters))
    not_finite = []
    for path, is_good in jax.tree_util.tree_leaves_with_path(finite):
        if not is_good:
            not_finite.append(jax.tree_util.keystr(path, simple=True, separator="."))
    if not_finite:
        check.wrong(
            f"NaN or infinity in the weights {', '.join(not_finite[:5])} of "
            f"{job.config.model.path}: take another checkpoint"
        )
        return False
    size = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    check.ok(f"{size / 1e6:.1f}M parameters, all finite")
    return True


def try_first_step(job: Job, parameters: Params) -> StepTrial | None:
    """Samples, scores and trains the first step of the run as a trial; returns None if its reward
    fails."""
    first = job.prompts.next(job.config.batch.prompts_per_step)
    with job.findings.of("reward", "reward.functions").errors():
        return try_step(
            job.config,
            job.task,
            job.tokenizer,
            job.reward_pool,
            job.engines["training"],
            job.learner,
            parameters,
            first,
        )
    return None


# ---- reports of the trial


def report_agreement(job: Job, result: dict[str, Any], trial: StepTrial) -> None:
    """Reports whether sampler and trainer agree on log-probs, and whether the samples can train the
    model."""
    agreement = job.findings.of("agreement")
    samples = job.findings.of("samples")
    limit = job.config.sampling.max_completion_tokens
    dtype = jnp.dtype(job.model.dtype).name
    mean = float(trial.differences.mean())
    largest = float(trial.differences.max())
    result["agreement"] = {
        "dtype": dtype,
        "tokens": int(trial.differences.size),
        "mean_difference": mean,
        "largest_difference": largest,
        "entropy": trial.entropy,
        "truncated": trial.truncated,
        "nonzero_std": trial.nonzero_std,
        "completions": int(trial.lengths.size),
        "mean_length": float(trial.lengths.mean()),
        "mean_reward": trial.mean_reward,
    }
    text = (
        f"log-probs of sampler and trainer differ by {mean:.1e} in the mean, {largest:.1e} at most "
        f"({trial.differences.size:,} tokens, {dtype})"
    )
    if not np.isfinite(trial.differences).all() or trial.skipped:
        agreement.wrong(
            f"{text}; the update has no finite gradient: set model.dtype=float32", "model.dtype"
        )
    elif largest > LARGEST_DIFFERENCE[dtype]:
        agreement.warning(
            f"{text}: more than {LARGEST_DIFFERENCE[dtype]:g} is to be expected; try "
            "model.dtype=float32, and watch sampler_gap/logprob_mean",
            "model.dtype",
        )
    else:
        agreement.ok(text)
    samples.ok(
        f"{trial.lengths.size} completions: entropy {trial.entropy:.2f}, "
        f"{100 * trial.truncated:.0f}% truncated at {limit} tokens, {100 * trial.nonzero_std:.0f}% "
        f"of {len(trial.groups)} groups with variance, mean reward {trial.mean_reward:.3g}"
    )
    # Only one step was made, so values are compared with bounds without asking for more evidence.
    is_truncated = row_named("truncated").passes_bound(trial.truncated)
    if is_truncated:
        samples.warning(
            f"{100 * trial.truncated:.0f}% of completions are truncated at "
            f"sampling.max_completion_tokens={limit}: raise it",
            "sampling.max_completion_tokens",
        )
    if row_named("no variance").passes_bound(trial.nonzero_std):
        scores = set()
        for group in trial.groups:
            for reward in group.rewards[group.valid]:
                scores.add(round(float(reward), 9))
        same = "within each group all completions scored the same"
        if len(scores) == 1:
            same = f"every completion scored {next(iter(scores)):.3g}"
        first = ""
        if is_truncated:
            first = "raise sampling.max_completion_tokens first, then "
        samples.warning(
            f"{same}, so this step would teach nothing: {first}make the task easier or harder, or "
            f"raise batch.group_size={job.config.batch.group_size}",
            "batch.group_size",
        )


def report_memory(
    job: Job, result: dict[str, Any], budget: Budget, available: AvailableMemory
) -> None:
    """Reports the memory needed and free on each device; if it does not fit, also the key that
    saves most."""
    parts = sorted(budget.needed(budget.fullest).items(), key=lambda part: -part[1])
    devices = job.roles.trainer.mesh.devices.flat
    result["memory"] = {
        "needed_bytes": budget.peak() * available.sharing,
        "free_bytes": available.free,
        "total_bytes": available.total,
        "phase": held_phase(budget.fullest),
        "phases": {phase: budget.peak(phase) for phase in ("sampling", "update")},
        "parts": dict(parts),
        "sharing_devices": available.sharing,
        "where": available.where,
        "devices": [{"device": str(device), "needed_bytes": budget.peak()} for device in devices],
    }
    finding, advice = judge_memory(budget, available, job.budget_for)
    job.findings.extend([finding])
    if finding.level == "wrong":
        result["advice"] = {"text": advice, "key": finding.key}


def report_time(
    job: Job, result: dict[str, Any], times: Times, budget: Budget, available: AvailableMemory
) -> None:
    """Reports the time of a step and of the run, and the key that saves most time."""
    result["time"] = vars(times)
    job.findings.of("time").ok(times.describe())
    if not result["advice"]:
        advice = best_advice(job.config, budget, job.budget_for, times, available)
        result["advice"] = advice
        job.findings.extend([Finding("advice", "ok", advice["text"], advice["key"])])
