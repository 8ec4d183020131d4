"""Estimates the time and memory of a run from a trial of one step, and the key to change first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.config.schema import Config
from shoal.report.findings import seconds_text
from shoal.run.advice import TIGHT, Describe, advise
from shoal.run.derived import num_updates, schedule_of, step_seconds
from shoal.run.figures import LARGEST, Figures
from shoal.run.preflight.step_trial import StepTrial
from shoal.run.size import AvailableMemory
from shoal.sampler.engine import Engine
from shoal.sampler.scheduler import prompt_bucket
from shoal.trainer.update import needs_all_groups, num_scorings

SCORING = 1 / 3
"""Cost of a pass for log-probs alone, as a share of one with its gradient."""


@dataclass(frozen=True)
class Times:
    """Estimated seconds, from one sampled batch and a few micro-batches."""

    sample_seconds: float  # of a step
    reward_seconds: float
    update_seconds: float
    evaluation_seconds: float  # of the whole run
    compile_seconds: float
    run_seconds: float
    step_seconds: float  # in a long run: sampling and update may overlap
    sampled_tokens: int  # of a step
    trained_tokens: int  # of a step: prompts once a group, without padding
    padding: float

    def describe(self) -> str:
        return (
            f"about {seconds_text(self.step_seconds)} a step (sampling "
            f"{seconds_text(self.sample_seconds)}, "
            f"rewards {seconds_text(self.reward_seconds)}, update "
            f"{seconds_text(self.update_seconds)}) for "
            f"{self.sampled_tokens} tokens sampled and {self.trained_tokens} trained on; about "
            f"{seconds_text(self.run_seconds)} for the run, "
            f"{seconds_text(self.evaluation_seconds)} of it "
            "evaluation. An estimate, from one batch"
        )


def evaluation_completions(config: Config, sets: Mapping[str, int]) -> int:
    """Completions that all evaluations of a run sample; `sets`: name -> questions, the main set
    first."""
    quick = [min(size, config.quick_questions or size) for size in sets.values()]
    every = config.evaluate_every
    between = max(0, -(-config.steps // every) - 1) if every > 0 else 0
    return 2 * (sum(sets.values()) + sum(quick[:1]) * config.pass_k) + between * sum(quick)


def estimate_times(
    config: Config, trial: StepTrial, slot_groups: int, evaluated: int, own_devices: bool
) -> Times:
    """`slot_groups`: groups that the sampler holds at once, on `own_devices` or the trainer's;
    `evaluated`: completions of all evaluations."""
    b, a = config.batch, config.algorithm
    scale = b.prompts_per_step / len(trial.groups)
    longer = 1.0
    if trial.cancelled:  # cancelled completions are assumed to reach the limit
        longer = config.sampling.max_completion_tokens / max(1, int(trial.lengths.max()))
    waves = math.ceil(b.prompts_per_step / slot_groups) / math.ceil(len(trial.groups) / slot_groups)
    sample = trial.sample_seconds * longer * waves
    batches = trial.num_batches * scale
    has_teacher = bool(config.teacher.path)
    trained = (
        batches
        if needs_all_groups(a, has_teacher)
        else max(a.num_minibatches, batches * trial.nonzero_std)
    )
    update = (
        trained * a.num_epochs + SCORING * num_scorings(a, has_teacher) * batches
    ) * trial.accumulate_seconds + a.num_epochs * a.num_minibatches * trial.apply_seconds
    tokens = float(trial.lengths.sum()) * longer
    evaluation = (
        evaluated * (tokens / trial.lengths.size) * trial.sample_seconds * longer / max(tokens, 1.0)
    )
    reward = trial.reward_seconds * scale
    prompts = sum(len(group.prompt_ids) for group in trial.groups)
    step = step_seconds(schedule_of(config.train), sample + reward, update, own_devices)
    run = config.steps * step + evaluation + trial.compile_seconds
    return Times(
        sample,
        reward,
        update,
        evaluation,
        trial.compile_seconds,
        run,
        step,
        round(tokens * scale),
        round((tokens + prompts) * scale),
        trial.padding,
    )


def trial_figures(
    config: Config, job: Mapping[str, Any], trial: StepTrial, engines: Mapping[str, Engine]
) -> Figures:
    """The figures of a job whose programs were tried. Their memory is scaled from the trial's
    shapes to the longest allowed, and to the engine that prefills most prompts at once."""
    programs, tokens = trial.programs, job["shape"]["tokens"]
    bucket = prompt_bucket(config.sampling.slot_prompt)
    used = max(prompt_bucket(len(group.prompt_ids)) for group in trial.groups)
    largest = max(engine.scheduler.batch_rows(bucket) for engine in engines.values()) * bucket
    tried = engines["training"].scheduler.batch_rows(used) * used
    scale = {"prefill": largest / tried, "accumulate": max(1.0, tokens / trial.shape.tokens)}
    extra = {name: round(programs[name].extra_bytes * scale.get(name, 1.0)) for name in LARGEST}
    if engines["training"].model.role.platform == "cpu":
        job = {**job, "processes": cpu_processes(trial, engines)}
        # A program is compiled beside all that is held, but before it takes memory itself.
        extra = {name: max(size, programs[name].compile_bytes) for name, size in extra.items()}
    return Figures(
        config, job, {name: {"error": "", "extra_bytes": size} for name, size in extra.items()}
    )


def cpu_processes(trial: StepTrial, engines: Mapping[str, Engine]) -> dict[str, int]:
    """Bytes of RAM that a run on a CPU takes besides arrays, by part. Engines of evaluations
    compile programs of their own, as large as those of training, which were tried."""
    others = {id(engine) for engine in engines.values()} - {id(engines["training"])}
    of_engine = sum(trial.programs[name].code_bytes for name in engines["training"].programs)
    return {
        "this process with its libraries": trial.process_bytes + len(others) * of_engine,
        "processes of rewards": trial.worker_bytes,
    }


def best_advice(
    config: Config, figures: Figures, describe: Describe, times: Times, available: AvailableMemory
) -> dict[str, Any]:
    """The key whose change would help the run's time most, as far as that is known; else what takes
    most."""
    share = times.evaluation_seconds / max(times.run_seconds, 1e-9)
    if share >= 0.5 and num_updates(config):
        return {
            "text": f"task.num_eval_questions: evaluation is {100 * share:.0f}% of the run, so ask "
            f"a quarter",
            "key": "task.num_eval_questions",
        }
    for one in advise(figures, describe, TIGHT * available.free / available.sharing)[:1]:
        return {"text": one["text"], "key": one["key"]}
    seconds, name = max(
        (times.sample_seconds, "sampling"),
        (times.reward_seconds, "the reward"),
        (times.update_seconds, "the update"),
    )
    return {
        "text": f"no key stands out; {name} takes "
        f"{100 * seconds / max(times.step_seconds, 1e-9):.0f}% of a step",
        "key": "",
    }
