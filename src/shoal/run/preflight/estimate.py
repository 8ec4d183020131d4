"""Estimates the time and memory of a run from a trial of one step, and the key whose change would save most."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.config.schema import Config
from shoal.mesh import Roles
from shoal.model.transformer import Model
from shoal.report.findings import seconds_text
from shoal.run.clock import step_seconds
from shoal.run.derived import num_updates
from shoal.run.parts import micro_batch_shapes, schedule_of
from shoal.run.preflight.memory import AvailableMemory, MemoryBudget
from shoal.run.preflight.step_trial import StepTrial
from shoal.run.remat import activation_bytes
from shoal.sampler.engine import Engine, prompt_bucket
from shoal.trainer.update import needs_all_groups, num_scorings

SCORING = 1 / 3
"""Cost of a pass for log-probs alone, as a share of one with its gradient."""
LEAST_GAIN = 0.05
"""Share of the run's time below which no key is advised."""
UPDATE_WORK = {"none": 0.75, "dots": 0.75, "attention": 0.93, "full": 1.0}
"""Work of an update by model.remat, as a share of recomputing everything."""
MOST_MEMORY = 0.9
"""Share of the free memory that advice may use."""


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
        return (f"about {seconds_text(self.step_seconds)} a step (sampling {seconds_text(self.sample_seconds)}, "
                f"rewards {seconds_text(self.reward_seconds)}, update {seconds_text(self.update_seconds)}) for "
                f"{self.sampled_tokens} tokens sampled and {self.trained_tokens} trained on; about "
                f"{seconds_text(self.run_seconds)} for the run, {seconds_text(self.evaluation_seconds)} of it "
                "evaluation. An estimate, from one batch")


def evaluation_completions(config: Config, sets: Mapping[str, int]) -> int:
    """Completions that all evaluations of a run sample; `sets`: name -> questions, the main set first."""
    questions, main = sum(sets.values()), next(iter(sets.values()), 0)
    every = config.train.evaluate_every
    between = max(0, -(-config.steps // every) - 1) if every > 0 else 0
    return 2 * (questions + main * config.pass_k) + between * questions


def estimate_times(config: Config, trial: StepTrial, slot_groups: int, evaluated: int, own_devices: bool) -> Times:
    """`slot_groups`: groups that the sampler holds at once, on `own_devices` or the trainer's; `evaluated`: completions
    of all evaluations."""
    b, a = config.batch, config.algorithm
    scale = b.prompts_per_step / len(trial.groups)
    longer = 1.0
    if trial.cancelled:  # cancelled completions are assumed to reach the limit
        longer = config.sampling.max_completion_tokens / max(1, int(trial.lengths.max()))
    waves = math.ceil(b.prompts_per_step / slot_groups) / math.ceil(len(trial.groups) / slot_groups)
    sample = trial.sample_seconds * longer * waves
    batches = trial.num_batches * scale
    has_teacher = bool(config.teacher.path)
    trained = batches if needs_all_groups(a, has_teacher) else max(a.num_minibatches, batches * trial.nonzero_std)
    update = (trained * a.num_epochs + SCORING * num_scorings(a, has_teacher) * batches) * trial.accumulate_seconds \
        + a.num_epochs * a.num_minibatches * trial.apply_seconds
    tokens = float(trial.lengths.sum()) * longer
    evaluation = evaluated * (tokens / trial.lengths.size) * trial.sample_seconds * longer / max(tokens, 1.0)
    reward = trial.reward_seconds * scale
    prompts = sum(len(group.prompt_ids) for group in trial.groups)
    step = step_seconds(schedule_of(config.train), sample + reward, update, own_devices)
    run = config.steps * step + evaluation + trial.compile_seconds
    return Times(sample, reward, update, evaluation, trial.compile_seconds, run, step,
                 round(tokens * scale), round((tokens + prompts) * scale), trial.padding)


def add_measured(budget: MemoryBudget, trial: StepTrial, config: Config, shards: int,
                 engines: Mapping[str, Engine]) -> None:
    """Adds the compiled programs' temporary memory, scaled from the trial's shapes to the longest allowed, and to the
    engine that prefills most prompts at once."""
    s, programs, shape = config.sampling, trial.programs, micro_batch_shapes(config, shards)[0]
    bucket, used = prompt_bucket(s.max_prompt_tokens), max(prompt_bucket(len(g.prompt_ids)) for g in trial.groups)
    largest = max(engine.scheduler.batch_rows(bucket) for engine in engines.values()) * bucket
    tried = engines["training"].scheduler.batch_rows(used) * used
    prefill = round(programs["prefill"].extra_bytes * largest / tried)
    budget.sampling["sampler's temporaries"] = max(prefill, programs["decode"].extra_bytes)
    activations = round(programs["accumulate"].extra_bytes * max(1.0, shape.tokens / trial.shape.tokens))
    budget.update["activations"] = activations
    if (apply := programs["apply"].extra_bytes) > activations:
        budget.update["update's temporaries"] = apply - activations


# ---- advice


@dataclass(frozen=True)
class Advice:
    """The key whose change would save most."""

    text: str
    key: str = ""
    gain: float = 0.0  # share of the run's time


def advise(config: Config, model: Model, trial: StepTrial, times: Times, budget: MemoryBudget,
           available: AvailableMemory, roles: Roles, num_devices: int) -> Advice:
    """The change that saves most of the run's time, if it saves LEAST_GAIN; else the dominant phase."""

    def fits(more: float) -> bool:
        return (budget.phases["update"] + more) * available.sharing < MOST_MEMORY * available.free

    run, used = max(times.run_seconds, 1e-9), roles.trainer.mesh.size
    sampling, update = (config.steps * seconds / run for seconds in (times.sample_seconds, times.update_seconds))
    slots = config.sampling.slots_per_device * roles.sampler.mesh.size
    completions = config.batch.prompts_per_step * config.batch.group_size
    found = [Advice(f"mesh.fsdp=-1: {num_devices} devices instead of {used}", "mesh.fsdp",
                    (1 - used / num_devices) * (sampling + update))]
    if 0 < slots < completions:
        found.append(Advice(f"sampling.slots_per_device=0: all {completions} completions of a step at once instead of "
                            f"{slots}", "sampling.slots_per_device", (1 - slots / completions) * sampling))
    for remat in ("dots", "attention"):
        more, gain = (activation_bytes(model.architecture, trial.shape.tokens, model.dtype, remat),
                      1 - UPDATE_WORK[remat] / UPDATE_WORK[model.remat])
        if gain > 0 and fits(more):
            found.append(Advice(f"model.remat={remat} (now {config.model.remat}): there is memory for it",
                                "model.remat", gain * update))
            break
    share = times.evaluation_seconds / run
    if share >= 0.5 and num_updates(config):
        found.append(Advice(f"task.num_eval_questions: evaluation is {100 * share:.0f}% of the run, so ask a quarter",
                            "task.num_eval_questions", 0.75 * share))
    best = max(found, key=lambda advice: advice.gain)
    if best.gain >= LEAST_GAIN:
        return replace(best, text=f"{best.text}; up to {100 * best.gain:.0f}% less time")
    name, seconds = max((("sampling", times.sample_seconds), ("the reward", times.reward_seconds),
                         ("the update", times.update_seconds)), key=lambda item: item[1])
    return Advice(f"no key stands out; {name} takes {100 * seconds / max(times.step_seconds, 1e-9):.0f}% of a step")
