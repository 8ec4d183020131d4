"""What a step and a run will take, by a trial of one step; and the one key that would help most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from shoal.config.schema import Config
from shoal.mesh import Roles
from shoal.model.transformer import Model
from shoal.report.findings import gib, seconds_text
from shoal.run.assembly import activation_bytes
from shoal.run.brief import num_updates
from shoal.run.memory import Need, There
from shoal.run.trial import Trial
from shoal.sampler.engine import Engine, prompt_bucket
from shoal.trainer.batch import Shape, choose_shape
from shoal.trainer.update import needs_all_groups, num_scorings
from shoal.types import Group

SCORING = 1 / 3
"""What a pass for log-probs alone costs of one with its gradient."""
LEAST_GAIN = 0.05
DOTS_GAIN = 0.25
"""What keeping products spares of an update that computes whole blocks again."""


@dataclass(frozen=True)
class Times:
    """Seconds, an estimate: one batch was drawn and a few micro-batches computed."""

    sample_seconds: float  # of a step
    reward_seconds: float
    update_seconds: float
    evaluation_seconds: float  # of the whole run
    compile_seconds: float
    run_seconds: float
    sampled_tokens: int  # of a step
    trained_tokens: int  # of a step, prompts once a group, padding apart
    padding: float

    @property
    def step_seconds(self) -> float:
        return self.sample_seconds + self.reward_seconds + self.update_seconds

    def record(self) -> dict[str, float]:
        return {"step_seconds": self.step_seconds, **asdict(self)}

    def text(self) -> str:
        return (f"about {seconds_text(self.step_seconds)} a step (sampling {seconds_text(self.sample_seconds)}, "
                f"rewards {seconds_text(self.reward_seconds)}, update {seconds_text(self.update_seconds)}) for "
                f"{self.sampled_tokens} tokens drawn and {self.trained_tokens} learnt from; about "
                f"{seconds_text(self.run_seconds)} for the run, {seconds_text(self.evaluation_seconds)} of it "
                "evaluation. An estimate, from one batch")


def estimate(config: Config, trial: Trial, slot_groups: int, evaluated: int) -> Times:
    """`slot_groups`: groups that the sampler holds at once; `evaluated`: completions of all evaluations."""
    b, a = config.batch, config.algorithm
    scale = b.prompts_per_step / len(trial.groups)
    longer = 1.0
    if trial.cancelled:  # what was not waited for is taken to run to its limit
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
    step = sample + reward + update
    compiled = trial.compile_seconds
    prompts = sum(len(group.prompt_ids) for group in trial.groups)
    return Times(sample, reward, update, evaluation, compiled, config.steps * step + evaluation + compiled,
                 round(tokens * scale), round((tokens + prompts) * scale), trial.padding)


# ---- memory


def longest_shape(config: Config, micro_tokens: int, shards: int, prompt: int = 0, completion: int = 0) -> Shape:
    """Of micro-batches with the longest prompts and completions: those that are allowed unless given."""
    s = config.sampling
    longest: Any = SimpleNamespace(prompt_ids=range(prompt or s.max_prompt_tokens),
                                   completions=(range(completion or s.max_completion_tokens),))
    prompts = -(-config.batch.prompts_per_step // config.algorithm.num_minibatches)
    return choose_shape([longest], prompts, config.batch.group_size, micro_tokens, shards)


def add_measured(need: Need, trial: Trial, config: Config, shards: int, engines: Mapping[str, Engine]) -> None:
    """Adds what the compiled programs take beside parameters and caches; where evaluation's engines take more prompts
    at once, or the longest ones allowed are longer than those of the trial, in proportion."""
    assert trial.shape is not None
    longest = longest_shape(config, config.batch.micro_tokens, shards)
    ratio = max(1.0, longest.tokens / trial.shape.tokens)
    programs = trial.programs
    rows = max(engine.scheduler.prefill_rows for engine in engines.values())
    prompts = rows * prompt_bucket(config.sampling.max_prompt_tokens)
    tried = engines["training"].scheduler.prefill_rows * max(prompt_bucket(len(g.prompt_ids)) for g in trial.groups)
    prefill = round(programs["prefill"].extra_bytes() * prompts / tried)
    need.sampling["sampler's temporaries"] = max(prefill, programs["decode"].extra_bytes())
    need.update["activations"] = round(programs["accumulate"].extra_bytes() * ratio)
    if (apply := programs["apply"].extra_bytes()) > need.update["activations"]:
        need.update["update's temporaries"] = apply - need.update["activations"]


def relieve(config: Config, need: Need, roles: Roles, there: int) -> tuple[str, str]:
    """(text, key): what would lower the need most, by the part that dominates."""
    part, size = next((name, size) for name, size in need.parts.items())
    mesh, completions = roles.trainer.mesh.size, config.batch.prompts_per_step * config.batch.group_size
    if part == "activations":
        row = config.sampling.max_prompt_tokens + config.sampling.max_completion_tokens
        if config.batch.micro_tokens > row:
            half = max(row, config.batch.micro_tokens // 2)
            return f"batch.micro_tokens={half} (now {config.batch.micro_tokens}) would take about " \
                   f"{gib(size * (1 - half / config.batch.micro_tokens))} less", "batch.micro_tokens"
        if config.model.remat != "full":
            return f"model.remat=full (now {config.model.remat}) would take much less for activations", "model.remat"
        return "fewer sampling.max_completion_tokens would take less", "sampling.max_completion_tokens"
    if part.startswith("KV caches") or part == "sampler's temporaries":
        slots = config.sampling.slots_per_device or completions // mesh
        least = max(config.batch.group_size, config.pass_k)
        if slots > least:
            half = max(least, slots // 2)
            return f"sampling.slots_per_device={half} (now {slots}) would take about " \
                   f"{gib(size * (1 - half / slots))} less", "sampling.slots_per_device"
        return "a lower sampling.max_prompt_tokens or max_completion_tokens would take less", \
            "sampling.max_prompt_tokens"
    if part == "reference":
        return f"algorithm.kl_coef=0 keeps no reference: {gib(size)} less", "algorithm.kl_coef"
    if mesh < there:
        weights = sum(s for name, s in need.parts.items() if name in ("parameters", "Adam's moments", "gradient"))
        return f"mesh.fsdp={there} splits the weights over the devices that are here: about " \
               f"{gib(weights * (1 - mesh / there))} less on each", "mesh.fsdp"
    return "a smaller model, or more devices (mesh.fsdp)", "model.path"


# ---- advice


@dataclass(frozen=True)
class Advice:
    """The one key that would help most."""

    text: str
    key: str = ""
    gain: float = 0.0  # share of the run's time


def advise(config: Config, model: Model, trial: Trial, times: Times, need: Need, there: There, roles: Roles,
           num_devices: int) -> Advice:
    run = max(times.run_seconds, 1e-9)
    sampling, update = (config.steps * seconds / run for seconds in (times.sample_seconds, times.update_seconds))
    candidates = [*_devices(roles.trainer.mesh.size, num_devices, sampling + update),
                  *_slots(config, roles, trial, sampling), *_padding(config, trial, roles, update, need, there),
                  *_remat(config, model, trial, update, need, there), *_evaluation(config, times)]
    best = max(candidates, key=lambda advice: advice.gain, default=Advice(""))
    if best.gain >= LEAST_GAIN:
        return best
    name, seconds = max((("sampling", times.sample_seconds), ("the reward", times.reward_seconds),
                         ("the update", times.update_seconds)), key=lambda item: item[1])
    return Advice(f"no key stands out; {name} takes {100 * seconds / max(times.step_seconds, 1e-9):.0f}% of a step")


def _devices(used: int, there: int, share: float) -> list[Advice]:
    gain = (1 - used / there) * share
    return [Advice(f"mesh.fsdp=-1: {there} devices instead of {used}, up to {100 * gain:.0f}% less time", "mesh.fsdp",
                   gain)]


def _slots(config: Config, roles: Roles, trial: Trial, share: float) -> list[Advice]:
    slots = config.sampling.slots_per_device * roles.sampler.mesh.size
    completions = config.batch.prompts_per_step * config.batch.group_size
    if not 0 < slots < completions:
        return []
    gain = (1 - slots / completions) * share
    return [Advice(f"sampling.slots_per_device=0: all {completions} completions of a step at once instead of {slots}, "
                   f"up to {100 * gain:.0f}% less time", "sampling.slots_per_device", gain)]


def _padding(config: Config, trial: Trial, roles: Roles, share: float, need: Need, there: There) -> list[Advice]:
    """Another batch.micro_tokens, where it would compute less padding and fit."""
    assert trial.shape is not None
    shards = roles.trainer.row_shards

    def computed(micro: int) -> tuple[int, Shape]:
        prompts = -(-config.batch.prompts_per_step // config.algorithm.num_minibatches)
        shape = choose_shape(trial.groups, prompts, config.batch.group_size, micro, shards)
        rows = config.batch.prompts_per_step * -(-config.batch.group_size // shape.slots)
        return -(-rows // shape.rows) * shape.tokens, shape

    now, shape = computed(config.batch.micro_tokens)
    found = []
    for factor in (0.5, 2, 4):
        micro = round(config.batch.micro_tokens * factor)
        tokens, other = computed(micro)
        grown = need.update.get("activations", 0) * (other.tokens / shape.tokens - 1)
        gain = (1 - tokens / now) * share
        if gain > 0 and (need.phases["update"] + grown) * there.shared < 0.9 * there.free:
            found.append(Advice(f"batch.micro_tokens={micro} (now {config.batch.micro_tokens}): "
                                f"{100 * (1 - tokens / now):.0f}% fewer tokens computed in the update, "
                                f"{100 * gain:.0f}% less time", "batch.micro_tokens", gain))
    return found


def _remat(config: Config, model: Model, trial: Trial, share: float, need: Need, there: There) -> list[Advice]:
    if model.remat != "full" or trial.shape is None:
        return []
    more = activation_bytes(model.architecture, trial.shape.tokens, model.dtype)
    if (need.phases["update"] + more) * there.shared > 0.9 * there.free:
        return []
    gain = DOTS_GAIN * share
    return [Advice(f"model.remat=dots (now {config.model.remat}): there is memory for it, about {100 * gain:.0f}% less "
                   "time", "model.remat", gain)]


def _evaluation(config: Config, times: Times) -> list[Advice]:
    share = times.evaluation_seconds / max(times.run_seconds, 1e-9)
    if share < 0.5 or num_updates(config) == 0:
        return []
    return [Advice(f"task.num_questions: evaluation is {100 * share:.0f}% of the run; a quarter of the questions would "
                   f"take {75 * share:.0f}% less time", "task.num_questions", 0.75 * share)]


def agreement_of(trial: Trial, groups: Sequence[Group], dtype: str) -> dict[str, float | str | int]:
    """Figures of the trial's sampling, and how far the trainer's log-probs are from the sampler's."""
    apart = trial.differences
    return {"dtype": dtype, "tokens": int(apart.size), "mean_difference": float(apart.mean()),
            "largest_difference": float(apart.max()), "entropy": trial.entropy, "cut": trial.cut,
            "nonzero_std": trial.nonzero_std, "completions": int(trial.lengths.size),
            "mean_length": float(trial.lengths.mean()), "mean_reward": _mean_reward(groups)}


def _mean_reward(groups: Sequence[Group]) -> float:
    rewards = [float(r) for group in groups for r in group.rewards[group.valid]]
    return sum(rewards) / len(rewards) if rewards else math.nan
