"""`shoal doctor`: checks a training job before it runs, and estimates what it will cost.

    the job's stages -> reward -> weights -> a trial of one step -> memory, time

If a stage fails, the stages that do not need it are still checked. Each finding is printed when it
is added to `job.findings`; the functions here return the records for the command's result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.budget.auto import all_teachers
from shoal.budget.budget import Budget, held_phase
from shoal.budget.memory import (
    AvailableMemory,
    active_parameter_count,
    available_memory,
    parameter_count,
)
from shoal.checks.inputs import set_sizes
from shoal.checks.reward import (
    OTHER_EXAMPLES,
    ModelText,
    model_text_maker,
    probe,
    reward_findings,
    score_text,
)
from shoal.checks.settings import check_lr_for_size
from shoal.config.commands import DoctorConfig
from shoal.config.derived import evaluation_completions, price_per_hour
from shoal.findings import Finding, Findings
from shoal.job.job import Job, spread_rows
from shoal.job.memory import job_budget, judge_memory, teachers_of
from shoal.job.out_of_memory import explain_out_of_memory
from shoal.job.step_trial import (
    StepTrial,
    best_advice,
    estimate_times,
    trial_budget,
    try_step,
)
from shoal.records import Example, Params
from shoal.report.console import Console
from shoal.runs.diagnosis import row_named
from shoal.text import count, number_text

LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.0125}
"""Type of the model -> the largest expected difference between the sampler's and the trainer's
log-prob of a token. A larger one means that the two do not compute the same policy."""


def doctor(
    config: DoctorConfig, console: Console, reward_functions: Sequence[Callable] = ()
) -> dict[str, Any]:
    """Checks a job, prints each finding as soon as it is made, and returns a record: `ok`, False if
    the run would stop or could not train; `findings`; `first_prompt`, its text; `rewards`, of known
    answers; and of the trial of a step `agreement`, `memory`, `time` and `advice`. What was not
    reached is empty ("", [] or {}). The trial's update is not kept. `reward_functions`: given from
    Python in place of those that the configuration names; empty for the configuration's."""
    with (
        console,
        Job(config, console, functions=reward_functions, findings=Findings(console)) as job,
    ):
        job.collect(through="run_folder_note")
        if job.is_open("check_configuration", "run_folder_note") and job.run_folder_note:
            job.findings.of("configuration").ok(job.run_folder_note)
        job.collect(through="tokenizer")
        first_prompt = check_data(job)
        rewards = None
        if job.is_open("loaded_task", "reward_pool"):
            rewards = check_reward(job)
        step = StepRecords()
        if job.is_open("check_longest_sequence", "model", "teacher_sources", "teacher_servers"):
            can_train = first_prompt is not None and rewards is not None
            step = check_step(job, tries=can_train)
        num_wrong = len(job.findings.at("wrong"))
        num_warnings = len(job.findings.at("warning"))
        text = f"{num_wrong} wrong" if num_wrong else "nothing is wrong"
        console.heading(f"{text}, {count(num_warnings, 'warning')}")
        return {
            "ok": not num_wrong,
            "findings": job.findings.records(),
            "first_prompt": first_prompt or "",
            "rewards": rewards or [],
            "agreement": step.agreement,
            "memory": step.memory,
            "time": step.time,
            "advice": step.advice,
        }


# ---- without weights


def check_data(job: Job) -> str | None:
    """Checks the data, adds findings to the job's, prints the run's first prompt, and returns its
    text. None if there is no such prompt, because the data, the tokenizer or a stage that needs
    them is wrong. The finding that the data is good is added only if nothing is wrong so far."""
    if not job.is_open("loaded_task", "tokenizer"):
        return None
    data, check = job.loaded_task, job.findings.of("data", "task.path")
    for note in data.notes:
        check.warning(note)
    for reason, num_rows in data.data.dropped.items():
        check.warning(
            f"{num_rows:,} of {sum(data.data.train_files.values()):,} training rows were dropped: "
            f"{reason}"
        )
    job.collect(through="sampling_settings")
    if not job.is_open("prompt_lengths", "evaluation_sets", "prompts"):
        return None
    if not job.findings.at("wrong"):
        used = job.requested.steps * job.prompts_per_step
        # Of those that are left: prompts that are too long are dropped.
        sets = ", ".join(f"{len(rows):,} {name}" for name, rows in job.evaluation_sets.items())
        check.ok(
            f"{len(data.train):,} prompts of {job.prompt_lengths}, {used:,} are asked for; {sets}"
        )
    text = job.tokenizer.decode(job.first_prompt.prompt_ids.tolist(), skip_special_tokens=False)
    # The finding of the template reports the prompt's tokens.
    job.console.passage("first prompt", text, lines=16, characters=1200)
    return text


def check_reward(job: Job) -> list[dict[str, Any]] | None:
    """Scores known answers (right, wrong, empty, ...) to the run's first prompt (if it is known)
    and to the first two rows of data. Prints their mean scores as a table, a row for each kind of
    answer, and returns them as records; None if the reward functions fail. Faults of the reward
    become findings. Without a tokenizer each byte of an answer counts as a token."""
    data = job.loaded_task
    examples = [data.train[row] for row in range(min(2, len(data.train)))]
    if "prompts" in job.opened:
        examples.insert(0, job.first_prompt.example)
    sample = bytes_as_model_text
    if "tokenizer" in job.opened:
        sample = model_text_maker(job.tokenizer, job.encode)
    probed = None
    with job.findings.of("reward", "reward.functions").errors():
        others = spread_rows(data.train, OTHER_EXAMPLES)
        probed = probe(job.reward_pool, examples, sample, others=others)
    if probed is None:
        return None
    title = f"reward of answers as {probed.form}" if probed.form else "reward"
    rows = []
    for answer, scores in probed.rows.items():
        texts = [score_text(score) for score in scores.values()]
        rows.append((answer, *texts))
    job.console.table((title, "total", *probed.functions), rows)
    job.findings.extend(reward_findings(probed, has_calls=bool(data.tools or data.environments)))
    return probed.records()


def bytes_as_model_text(_: Example, text: str) -> ModelText:
    """Returns an answer as if a model had sampled it, with one token for each byte of its text; the
    token ids are the bytes. Used in place of the tokenizer if the job has none."""
    return ModelText(text, list(text.encode()))


# ---- with weights


@dataclass
class StepRecords:
    """What the trial of one step found, for the command's result; empty what it did not reach."""

    agreement: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    time: dict[str, Any] = field(default_factory=dict)
    advice: dict[str, Any] = field(default_factory=dict)


def check_step(job: Job, tries: bool) -> StepRecords:
    """Loads the weights, tries one step, and reports what it took. `tries`: False if another part
    of the job is wrong; then the weights are loaded and checked, and no step is tried. Returns the
    records of what was reached: all four after a step; `memory` and `advice` alone if the job's
    budget already exceeds the free memory, which is checked with `tries` alone and before anything
    is loaded; else none. A ShoalError, and running out of memory, become findings; other errors are
    raised."""
    records = StepRecords()
    check_lr_for_size(job.config_for_devices, parameter_count(job.model.architecture), job.findings)
    job.collect(through="engines")
    if not job.is_open("engines"):
        return records
    budget = job_budget(job)
    available = available_memory(job.roles.trainer.mesh.devices.flat)
    # free: 0 if it is not known; sharing: how many devices share one memory
    if tries and available.free and budget.peak() * available.sharing > available.free:
        records.memory, records.advice = report_memory(job, budget, available)
        return records
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
        return records
    if trial is None:
        return records
    records.agreement = report_agreement(job, trial)
    times = estimate_times(
        job.config,
        trial,
        job.engines["training"].num_groups,
        evaluation_completions(job.config, set_sizes(job.loaded_task)),
        job.roles.disaggregated,
    )
    measured = trial_budget(budget, trial, job.engines)
    records.memory, records.advice = report_memory(job, measured, available)
    records.time = vars(times)
    text = times.describe()
    price = price_per_hour(job.config, job.roles.num_devices)
    if price:
        a_step = number_text(price * times.step_seconds / 3600)
        the_run = number_text(price * times.run_seconds / 3600)
        text += f". A step costs about {a_step}, the run {the_run}"
    job.findings.of("time").ok(text)
    if not records.advice:  # the memory suffices: what would save most time
        advice = best_advice(job.config, measured, job.budget_for, times, available)
        records.advice = advice
        job.findings.extend([Finding("advice", "ok", advice["text"], advice["key"])])
    return records


def check_weights(job: Job, parameters: Params) -> bool:
    """Adds a finding: the number of weights, or the names of the arrays that hold NaN or infinity
    (at most five). Returns True if all weights are finite."""
    check = job.findings.of("model", "model.path")

    def is_finite(array: jax.Array) -> jax.Array:
        return jnp.isfinite(array).all()

    def are_finite(arrays: Params) -> Any:
        return jax.tree.map(is_finite, arrays)

    finite = jax.device_get(jax.jit(are_finite)(parameters))  # a bool in place of each array
    not_finite = []
    for path, is_good in jax.tree_util.tree_leaves_with_path(finite):
        if not is_good:
            not_finite.append(jax.tree_util.keystr(path, simple=True, separator="."))
    if not_finite:
        check.wrong(
            f"NaN or infinity in the weights {', '.join(not_finite[:5])} of "
            f"{job.config.model.path}: use another checkpoint"
        )
        return False
    size = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    active = active_parameter_count(job.model.architecture)
    of_a_token = ""
    if active < size:
        of_a_token = f", {active / 1e6:.1f}M of them active per token"
    check.ok(f"{size / 1e6:.1f}M parameters{of_a_token}, all finite")
    return True


def try_first_step(job: Job, parameters: Params) -> StepTrial | None:
    """Samples, scores and trains the first step of the run as a trial, without keeping its update.
    Returns what was measured; None if the step raises ShoalError, which becomes a finding of the
    reward. Takes the first step's prompts from `job.prompts`, which then continues after them."""
    first_prompts = job.prompts.next(job.config.batch.prompts_per_step)
    with job.findings.of("reward", "reward.functions").errors():
        return try_step(
            config=job.config,
            task=job.task,
            tokenizer=job.tokenizer,
            pool=job.reward_pool,
            engine=job.engines["training"],
            learner=job.learner,
            parameters=parameters,
            prompts=first_prompts,
            own_advantage=job.own_advantage,
            teachers=all_teachers(job.config, job.model.architecture, teachers_of(job)),
            critic=job.critic,
            critic_parameters=job.load_critic(parameters),
        )
    return None


# ---- reports of the trial


def report_agreement(job: Job, trial: StepTrial) -> dict[str, Any]:
    """Adds findings: whether sampler and trainer agree on log-probs, and whether the samples can
    train the model, for which not too many may be truncated and rewards must differ within groups.
    Returns these figures by name. Differences of log-probs are absolute; `truncated` and
    `nonzero_std` are shares from 0 to 1. The agreement is wrong if a difference or the gradient is
    not finite, and warned of if the largest difference exceeds LARGEST_DIFFERENCE."""
    agreement = job.findings.of("agreement")
    samples = job.findings.of("samples")
    limit = job.config.sampling.max_completion_tokens
    dtype = jnp.dtype(job.model.dtype).name
    mean = float(trial.differences.mean())
    largest = float(trial.differences.max())
    record = {
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
            f"{text}: more than the expected {LARGEST_DIFFERENCE[dtype]:g}; try "
            "model.dtype=float32, and watch sampler_gap/logprob_mean",
            "model.dtype",
        )
    else:
        agreement.ok(text)
    # A critic learns from every group, and from groups of one completion.
    has_critic = job.config.algorithm.has_critic
    variance = ""
    if not has_critic:
        share = 100 * trial.nonzero_std
        variance = f"{share:.0f}% of {len(trial.groups)} groups with variance, "
    samples.ok(
        f"{trial.lengths.size} completions: entropy {trial.entropy:.2f}, "
        f"{100 * trial.truncated:.0f}% truncated at {limit} tokens, {variance}"
        f"mean reward {trial.mean_reward:.3g}"
    )
    # Only one step was made, so values are compared with bounds without asking for more evidence.
    is_truncated = row_named("truncated").is_beyond_bound(trial.truncated)
    if is_truncated:
        samples.warning(
            f"{100 * trial.truncated:.0f}% of completions are truncated at "
            f"sampling.max_completion_tokens={limit}: raise it",
            "sampling.max_completion_tokens",
        )
    if not has_critic and row_named("no variance").is_beyond_bound(trial.nonzero_std):
        scores = set()
        for group in trial.groups:
            for reward in group.rewards[group.valid]:
                scores.add(round(float(reward), 9))  # sums of scores may differ in the last bits
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
    return record


def report_memory(
    job: Job, budget: Budget, available: AvailableMemory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Adds a finding about the memory needed and free on each device. Returns (these figures,
    advice `{"text": ..., "key": the key whose change saves most}`); the advice is {} if the memory
    suffices. `needed_bytes` counts all devices that share one memory; within `phases`, `parts` and
    `devices` the bytes are of one device. `parts` are those of the program that needs most, the
    largest first."""
    parts = sorted(budget.needed(budget.fullest).items(), key=lambda part: -part[1])
    devices = job.roles.trainer.mesh.devices.flat
    record = {
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
    finding, text = judge_memory(budget, available, job.budget_for)
    job.findings.extend([finding])
    advice = {}
    if finding.level == "wrong":
        advice = {"text": text, "key": finding.key}
    return record, advice
