"""`shoal doctor`: checks a training job before it runs, and estimates what it will cost.

    settings -> task -> devices -> tokenizer, template -> data -> reward
    -> weights -> a trial of one step -> memory, time

A check that fails does not stop the checks that do not need its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.config.schema import Config, DoctorConfig, MeshSection, TaskSection
from shoal.mesh import Roles, available_devices, make_roles
from shoal.model.hf import dotted
from shoal.report.console import Console
from shoal.report.findings import Finding, Findings
from shoal.rewards.pool import RewardPool
from shoal.run.derived import for_devices
from shoal.run.engines import run_engines
from shoal.run.figures import PHASES, Figures, resolved
from shoal.run.fitting import run_roles, trained_model
from shoal.run.loading import ModelSpec, find_teacher, open_model
from shoal.run.memory import describer, explain_out_of_memory, judge_memory
from shoal.run.outline import outline
from shoal.run.parts import make_learner, open_prompts, prepare_sets
from shoal.run.preflight.estimate import Times, best_advice, estimate_times, evaluation_completions, trial_figures
from shoal.run.preflight.inputs import check_devices, check_prompts, check_tokenizer, set_sizes
from shoal.run.preflight.reward import probe, reward_findings, score_text
from shoal.run.preflight.settings import check_run_folder, check_settings, check_size
from shoal.run.preflight.step_trial import StepTrial, try_step
from shoal.run.size import available_memory, parameter_count
from shoal.run.task import load_task, with_overlong
from shoal.tasks.task import Task
from shoal.trainer.curriculum import PromptStream
from shoal.types import Params, ShoalError

LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Of a token's log-probs, sampler against trainer: above it the two do not compute one policy."""


@dataclass
class Report:
    """The findings and figures so far; each check adds its own."""

    console: Console
    findings: Findings
    result: dict[str, Any]

    def check(self, name: str, key: str = "") -> Findings:
        return self.findings.of(name, key)

    @property
    def rewards(self) -> Findings:
        """The check of reward functions."""
        return self.findings.of("reward", "reward.functions")


def doctor(config: DoctorConfig, console: Console, reward_functions: Sequence[Callable] = ()) -> dict[str, Any]:
    """Prints findings as checks make them and returns them; `ok` is False if the run would stop or could not train."""
    with console, ExitStack() as stack:
        findings = Findings(console)
        report = Report(console, findings, {"ok": False, "findings": [], "first_prompt": "", "rewards": [],
                                            "agreement": {}, "memory": {}, "time": {}, "advice": {}})
        check_settings(config, findings)
        with report.check("configuration", "base_output_directory").errors():
            if note := check_run_folder(config):
                report.check("configuration").ok(note)
        task, pool = check_task(config, reward_functions, stack, report)
        trained, roles, has_mesh = check_mesh(config, report)
        loaded = check_model(trained, report)
        if loaded and has_mesh:
            has_mesh = False
            with report.check("devices", "mesh").errors():
                roles, has_mesh = run_roles(trained, loaded.architecture, available_devices(trained.mesh)), True
        prompts = check_data(trained, task, loaded, report) if task and loaded else None
        if task and pool and not check_reward(pool, task, loaded, prompts, report):
            pool = None
        if loaded:
            with report.check("model", "model.path").errors():
                asked = (task, pool, prompts) if has_mesh and task and pool and prompts else None
                Job(trained, roles, loaded, report).check(asked)
        wrong, warnings = len(findings.at("wrong")), len(findings.at("warning"))
        console.heading(f"{f'{wrong} wrong' if wrong else 'nothing is wrong'}, "
                        f"{warnings} warning{'s' * (warnings != 1)}")
        return report.result | {"ok": not wrong, "findings": findings.records()}


# ---- without weights


def check_task(config: Config, reward_functions: Sequence[Callable], stack: ExitStack,
               report: Report) -> tuple[Task | None, RewardPool | None]:
    """Loads data and reward functions, each even if the other is wrong. The pool's processes start here, before JAX
    has threads."""
    task = pool = None
    with report.check("data", "task.path").errors():
        task = load_task(config.task)
    replaced = bool(config.reward.functions or reward_functions)
    if not replaced and task is None:
        return None, None
    with report.rewards.errors():
        source = TaskSection(num_eval_questions=1) if replaced else config.task  # rewards of your own need no data
        scored = load_task(source, config.reward, reward_functions, config.algorithm.uses_rewards)
        scored = with_overlong(scored, config.reward, config.sampling.max_completion_tokens)
        pool = stack.enter_context(closing(RewardPool(scored.rewards, config.reward, config.steps)))
        task = task and replace(task, rewards=scored.rewards)
    return task, pool


def check_mesh(config: Config, report: Report) -> tuple[Config, Roles, bool]:
    """The configuration with the prompts of its devices, the mesh, True; if it cannot be made, one device and False."""
    devices = available_devices(config.mesh)
    try:
        roles = make_roles(config.mesh)
        config = for_devices(config, roles.trainer.mesh.size, roles.trainer.platform)
    except ShoalError as error:
        largest = max(("fsdp", "data", "tensor"), key=lambda name: getattr(config.mesh, name))
        report.check("devices", f"mesh.{largest}").wrong(error)
        return config, make_roles(MeshSection(), devices), False
    check_devices(config, roles, report.findings)
    return config, roles, True


def check_model(config: Config, report: Report) -> ModelSpec | None:
    """Loads tokenizer and architecture."""
    loaded = None
    with report.check("tokenizer", "model.path").errors():
        loaded = open_model(config.model, None)
    if loaded is None:
        return None
    check_tokenizer(loaded.tokenizer, (*loaded.notes, *loaded.tokenizer.notes), report.findings)
    return loaded


def check_data(config: Config, task: Task, loaded: ModelSpec, report: Report) -> PromptStream | None:
    """Checks template and data, prints the run's first prompt, and returns the prompts; None if a run cannot begin."""
    tokenizer, check = loaded.tokenizer, report.check("data", "task.path")
    for note in task.notes:
        check.warning(note)
    for reason, number in task.data.dropped.items():
        check.warning(f"{number:,} of {sum(task.data.train_files.values()):,} training rows were dropped: {reason}",
                      "task.path")
    try:
        lengths = check_prompts(config, task, tokenizer, report.findings)
    except ShoalError as error:
        report.check("template").wrong(f"{error} Give another with model.template", "model.template")
        return None
    prompts = None
    with check.errors():
        prepare_sets(task, tokenizer, config.sampling, check.warning)
        prompts = open_prompts(config, task, tokenizer)
    if prompts is None:
        return None
    if not report.findings.at("wrong"):
        used, sets = config.steps * config.batch.prompts_per_step, set_sizes(task)
        check.ok(f"{len(task.train):,} prompts of {lengths}, {used:,} are asked for; "
                 + ", ".join(f"{number:,} {name}" for name, number in sets.items()))
    text = tokenizer.decode(prompts.peek().prompt_ids.tolist(), skip_special_tokens=False)
    report.console.passage("first prompt", text)
    report.result["first_prompt"] = text
    return prompts


def check_reward(pool: RewardPool, task: Task, loaded: ModelSpec | None, prompts: PromptStream | None,
                 report: Report) -> bool:
    """Scores known answers to the run's first prompt and to the data's first rows, and prints the table; False for a
    reward that cannot work."""
    examples = [task.train[row] for row in range(min(2, len(task.train)))]
    if prompts is not None:
        examples = [prompts.peek().example, *examples]
    encode = loaded.tokenizer.encode_prompt if loaded else lambda text: np.frombuffer(text.encode(), np.uint8)
    tried = None
    with report.rewards.errors():
        tried = probe(pool, examples, encode)
    if tried is None:
        return False
    report.result["rewards"] = tried.records()
    head = (f"reward of answers as {tried.form}" if tried.form else "reward", "total", *tried.functions)
    report.console.table(head, [(kind, *map(score_text, row.values()))
                                for kind, row in tried.rows.items()])
    report.findings.extend(reward_findings(tried))
    return True


# ---- with weights


class Job:
    """A job whose model and devices are there."""

    def __init__(self, config: Config, roles: Roles, loaded: ModelSpec, report: Report) -> None:
        self.config, self.roles, self.loaded, self.report = config, roles, loaded, report
        self.teacher = None
        if config.teacher.path:
            with report.check("teacher", "teacher.path").errors():
                self.teacher = find_teacher(config, loaded, None).architecture
        self.model = trained_model(config, loaded, roles)
        self.engines = dict(run_engines(config, self.model, roles, loaded.tokenizer))
        self.available = available_memory(roles.trainer.mesh.devices.flat)

    def check(self, asked: tuple[Task, RewardPool, PromptStream] | None) -> None:
        """Loads the weights, unless they cannot fit, and tries a step; only the weights if part of it is wrong."""
        check_size(self.config, parameter_count(self.model.architecture), self.report.findings)
        devices = available_devices(self.config.mesh)
        job = outline(self.config, self.model, self.roles, devices, teacher=self.teacher)
        config = resolved(self.config, job)
        figures = Figures(config, job, {})
        if asked and self.available.free and figures.peak * self.available.sharing > self.available.free:
            report_memory(self, figures)
            return
        try:
            parameters = self.loaded.load(self.roles.trainer, jnp.float32)
            tried = None
            if check_weights(self.config, parameters, self.report) and asked:
                tried = try_first_step(self, *asked, parameters)
        except ShoalError:
            raise
        except Exception as error:
            if (explained := explain_out_of_memory(error, self.config)) is None:
                raise
            self.report.check("memory", "batch.micro_tokens").wrong(explained)
            return
        if tried is not None and asked:
            report_agreement(self.config, tried, jnp.dtype(self.model.dtype).name, self.report)
            times = estimate_times(self.config, tried, self.engines["training"].num_groups,
                                   evaluation_completions(self.config, set_sizes(asked[0])), self.roles.disaggregated)
            figures = trial_figures(config, job, tried, times, self.engines)
            report_memory(self, figures)
            report_time(self, times, figures)


def check_weights(config: Config, parameters: Params, report: Report) -> bool:
    """True if every weight is finite."""
    finite = jax.device_get(jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))(parameters))
    bad = [dotted(path) for path, good in jax.tree_util.tree_leaves_with_path(finite) if not good]
    if bad:
        report.check("model").wrong(f"NaN or infinity in the weights {', '.join(bad[:5])} of {config.model.path}: take "
                                    "another checkpoint", "model.path")
        return False
    count = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    report.check("model").ok(f"{count / 1e6:.1f}M parameters, all finite")
    return True


def try_first_step(job: Job, task: Task, pool: RewardPool, prompts: PromptStream,
                   parameters: Params) -> StepTrial | None:
    """A trial of the run's first step; None if its reward fails."""
    config, first = job.config, prompts.next(job.config.batch.prompts_per_step)
    with job.report.rewards.errors():
        return try_step(config, task, job.loaded.tokenizer, pool, job.engines["training"],
                        make_learner(config, job.model), parameters, first)
    return None


# ---- reports of the trial


def report_agreement(config: Config, trial: StepTrial, dtype: str, report: Report) -> None:
    """Reports whether sampler and trainer agree, and whether the samples can train the model."""
    agreement, samples, limit = report.check("agreement"), report.check("samples"), \
        config.sampling.max_completion_tokens
    mean, largest = float(trial.differences.mean()), float(trial.differences.max())
    report.result["agreement"] = {
        "dtype": dtype, "tokens": int(trial.differences.size), "mean_difference": mean, "largest_difference": largest,
        "entropy": trial.entropy, "truncated": trial.truncated, "nonzero_std": trial.nonzero_std,
        "completions": int(trial.lengths.size), "mean_length": float(trial.lengths.mean()),
        "mean_reward": trial.mean_reward}
    text = (f"log-probs of sampler and trainer differ by {mean:.1e} in the mean, {largest:.1e} at most "
            f"({trial.differences.size:,} tokens, {dtype})")
    if not np.isfinite(trial.differences).all() or trial.skipped:
        agreement.wrong(f"{text}; the update has no finite gradient: set model.dtype=float32", "model.dtype")
    elif largest > LARGEST_DIFFERENCE[dtype]:
        agreement.warning(f"{text}: more than {LARGEST_DIFFERENCE[dtype]:g} is to be expected; try "
                          "model.dtype=float32, and watch sampler_gap/logprob_mean", "model.dtype")
    else:
        agreement.ok(text)
    samples.ok(f"{trial.lengths.size} completions: entropy {trial.entropy:.2f}, {100 * trial.truncated:.0f}% truncated "
               f"at {limit} tokens, {100 * trial.nonzero_std:.0f}% of {len(trial.groups)} groups with variance, mean "
               f"reward {trial.mean_reward:.3g}")
    if trial.truncated > 0.5:
        samples.warning(f"{100 * trial.truncated:.0f}% of completions are truncated at "
                        f"sampling.max_completion_tokens={limit}: raise it", "sampling.max_completion_tokens")
    if trial.nonzero_std == 0:
        values = {round(float(r), 9) for group in trial.groups for r in group.rewards[group.valid]}
        same = f"every completion scored {next(iter(values)):.3g}" if len(values) == 1 else \
            "within each group all completions scored the same"
        first = "raise sampling.max_completion_tokens first, then " if trial.truncated > 0.5 else ""
        samples.warning(f"{same}, so this step would teach nothing: {first}make the task easier or harder, or raise "
                        f"batch.group_size={config.batch.group_size}", "batch.group_size")


def report_memory(job: Job, figures: Figures) -> None:
    """Reports the memory needed and free on each device, and if it is tight, the key that saves most."""
    report, available, needed = job.report, job.available, figures.needed(figures.fullest)
    report.result["memory"] = {
        "needed_bytes": figures.peak * available.sharing, "free_bytes": available.free,
        "total_bytes": available.total, "phase": PHASES[figures.fullest][1], "phases": figures.phase_bytes(),
        "parts": dict(sorted(needed.items(), key=lambda item: -item[1])),
        "sharing_devices": available.sharing, "where": available.where,
        "devices": [{"device": str(device), "needed_bytes": figures.peak}
                    for device in job.roles.trainer.mesh.devices.flat]}
    found = judge_memory(figures, available, describer(job.model.architecture))
    report.findings.extend([found.finding])
    if found.finding.level == "wrong":
        report.result["advice"] = {"text": found.advice, "key": found.finding.key, "gain": 0.0}


def report_time(job: Job, times: Times, figures: Figures) -> None:
    """Reports the time of a step and of the run, and the key that saves most."""
    result = job.report.result
    result["time"] = vars(times)
    job.report.check("time").ok(times.describe())
    if not result["advice"]:
        result["advice"] = advice = best_advice(job.config, figures, describer(job.model.architecture), times,
                                                       job.available)
        job.report.findings.extend([Finding("advice", "ok", advice["text"], advice["key"])])
