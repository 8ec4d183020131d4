"""Numbers that follow from a configuration. Imports no JAX: a dry run needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.config.schema import Config, TrainSection
from shoal.text import count
from shoal.trainer.schedule import Schedule
from shoal.types import ShoalError

if TYPE_CHECKING:
    from shoal.trainer.batch import Shape

MICRO_TOKENS = 2**12
"""On accelerators. 8B on 8 v6e has room for a few more: 4,352 need 28.5 of 31.2 GiB
(`benchmarks/aot.py`)."""

CPU_MICRO_TOKENS = 2**11
"""Longer rows leave a CPU's caches, and more of a small update is padding. Where a group does not
fit them, `fitting.cpu_micro_tokens` takes up to twice as many."""

ROUNDS = 64
"""Publications after which a run is steady, and over which its steps are then averaged."""


def for_devices(config: Config, devices: int, platform: str) -> Config:
    """The configuration with what follows from the trainer's devices, `batch.prompts_per_step`,
    where `batch.prompts_per_device` is set, and `batch.micro_tokens`, where it is not; and
    `algorithm.correction`."""
    # Not with the configuration: devices are known only when JAX has started.
    micro_tokens = config.batch.micro_tokens or (
        CPU_MICRO_TOKENS if platform == "cpu" else MICRO_TOKENS
    )
    config = replace(
        config,
        batch=replace(config.batch, micro_tokens=micro_tokens),
        algorithm=replace(config.algorithm, correction=correction_of(config)),
    )
    each, parts = config.batch.prompts_per_device, config.algorithm.num_minibatches
    if not each:
        return config
    if parts > each * devices:
        raise ShoalError(
            f"batch.prompts_per_device={each} on {count(devices, 'device')} gives "
            f"{count(each * devices, 'prompt')} a step, fewer than "
            f"algorithm.num_minibatches={parts}: "
            "raise it or lower that"
        )
    return replace(config, batch=replace(config.batch, prompts_per_step=each * devices))


def oldest_samples(config: Config) -> int:
    """How many versions old samples may be."""
    return max(config.train.max_staleness, config.train.weight_sync_interval - 1)


def samples_are_the_trainers(config: Config) -> bool:
    """True if the trainer's own weights sample, by its own programs: log-probs of sampler and
    trainer are equal."""
    sampler = config.sampler
    return not oldest_samples(config) and sampler.kind != "vllm" and sampler.quantise == "none"


def correction_of(config: Config) -> str:
    """`algorithm.correction`, with auto decided."""
    chosen = config.algorithm.correction
    if chosen != "auto":
        return chosen
    return "none" if samples_are_the_trainers(config) else "tis"


def staleness_text(config: Config, own_devices: bool) -> str:
    """How old samples may be, or that another engine samples them, and what follows; empty where
    they are all of the trainer's own weights and programs.

    up to 1 version old, corrected by importance weights (algorithm.correction=tis)
    """
    oldest, correction = oldest_samples(config), correction_of(config)
    how = {"none": "not corrected", "direct": "with the ratio to the sampler's log-probs"}.get(
        correction, "corrected by importance weights"
    )
    text = f"up to {count(oldest, 'version')} old, {how} (algorithm.correction={correction})"
    if config.sampler.kind == "vllm":
        return (
            "by vLLM, whose numbers are not the trainer's and which samples other tokens when it "
            "is asked again; "
            f"{text}"
        )
    if config.sampler.quantise != "none":
        text = f"by weights in {config.sampler.quantise}, which are not quite the trainer's; {text}"
        if not oldest:
            return text
    if not oldest:
        return ""
    if own_devices:
        return text + (
            "; the sampler takes new weights while completions go on"
            if config.train.versions == "newest"
            else "; the sampler goes on while the trainer learns"
        )
    return text + (
        "; sampler and trainer share devices and take turns, so with train.versions=newest none is"
        if config.train.versions == "newest"
        else ""
    )


def num_updates(config: Config) -> int:
    """Updates of the optimizer in a whole run."""
    return config.steps * config.algorithm.num_epochs * config.algorithm.num_minibatches


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt with the longest completion."""
    return config.sampling.max_prompt_tokens + config.sampling.max_completion_tokens


def micro_batch_shapes(config: Config, row_shards: int) -> tuple[Shape, ...]:
    """The shapes of micro-batches; nearly all have the first."""
    from shoal.trainer.update import update_shapes

    return update_shapes(
        longest_sequence(config),
        config.sampling.max_completion_tokens,
        config.batch,
        config.algorithm.num_minibatches,
        row_shards,
        config.mesh.context,
    )


def group_rows(config: Config, row_shards: int) -> list[int]:
    """Tokens of a row on each device in which whole groups of the longest lengths fit, by the
    numbers of them that divide those of a device."""
    b, s, context = config.batch, config.sampling, config.mesh.context
    prompts = -(-b.prompts_per_step // config.algorithm.num_minibatches)
    group = s.max_prompt_tokens + b.group_size * s.max_completion_tokens
    groups = max(1, prompts * context // row_shards)
    return [
        _row_on_a_device(number * group, context)
        for number in range(1, groups + 1)
        if groups % number == 0
    ]


def completion_rows(config: Config) -> list[int]:
    """Tokens of a row on each device in which completions of the longest length fit with their
    prompt, by the numbers of them that divide a group."""
    s, group_size = config.sampling, config.batch.group_size
    return [
        _row_on_a_device(s.max_prompt_tokens + held * s.max_completion_tokens, config.mesh.context)
        for held in range(1, group_size + 1)
        if group_size % held == 0
    ]


def _row_on_a_device(tokens: int, context: int) -> int:
    """Tokens of a row on each of the `context` devices that share it, in which so many fit."""
    from shoal.trainer.batch import row_unit

    on_a_device = -(-tokens // context)
    unit = row_unit(on_a_device)
    return -(-on_a_device // unit) * unit


def packed_tokens(config: Config, shapes: Sequence[Shape], prompts: int) -> int:
    """Tokens, padding included, of the micro-batches in which a run packs the groups of so many
    prompts; all have the longest prompts and completions."""
    from shoal.trainer.batch import in_batches

    s = config.sampling
    group = (
        s.max_prompt_tokens,
        dict.fromkeys(range(config.batch.group_size), s.max_completion_tokens),
    )
    return (
        sum(shape.tokens for shape, _ in in_batches(dict.fromkeys(range(prompts), group), shapes))
        if prompts
        else 0
    )


def computed_tokens(config: Config, row_shards: int, prompts: int, micro_tokens: int) -> int:
    """`packed_tokens` of a run with another `batch.micro_tokens`."""
    changed = replace(config, batch=replace(config.batch, micro_tokens=micro_tokens))
    return packed_tokens(changed, micro_batch_shapes(changed, row_shards), prompts)


def max_support(config: Config) -> int:
    """Token ids stored at each position for `match_sampling_support`; 0 for none."""
    s = config.sampling
    if config.algorithm.learns_from_data or not (
        s.params.truncated and config.algorithm.match_sampling_support
    ):
        return 0
    return min(s.max_support, s.top_k or s.max_support)


def step_text(config: Config) -> str:
    """The size of a step in one line.

    this step = 32 prompts x 8 completions = 256 completions, 1 update (1 epoch x 1 mini-batch); 80
    steps
    """
    batch, algorithm = config.batch, config.algorithm
    completions, updates = step_sizes(config)
    if batch.prompts_per_device:
        m = config.mesh
        devices = m.data * m.fsdp * m.tensor * m.context * m.dcn_data * m.dcn_fsdp
        whole = (
            f" x {count(devices, 'device')} = {devices * completions} completions"
            if devices > 0
            else ""
        )
        return (
            f"this step = {count(batch.prompts_per_device, 'prompt')} a device x "
            f"{count(batch.group_size, 'completion')}{whole}, {count(updates, 'update')}; "
            f"{count(config.steps, 'step')}"
        )
    return (
        f"this step = {count(batch.prompts_per_step, 'prompt')} x "
        f"{count(batch.group_size, 'completion')} = "
        f"{count(completions, 'completion')}, {count(updates, 'update')} "
        f"({count(algorithm.num_epochs, 'epoch')} x "
        f"{count(algorithm.num_minibatches, 'mini-batch', 'mini-batches')}); "
        f"{count(config.steps, 'step')}"
    )


THEIR_SIZES = {
    "torchrl": "TorchRL counts {completions:,} dialog turns a batch, {all:,} in all, {updates:,} "
    "updates of {each:,}",
    "maxtext": "MaxText counts {completions:,} sequences a step of at most {length:,} tokens: "
    "{tokens:,} tokens",
    "tunix": "Tunix counts {prompts:,} prompts a batch, {completions:,} completions in "
    "mini-batches of {each:,}",
    "trl": "TRL counts a generation_batch_size of {completions:,}, and max_steps={updates:,} of "
    "{each:,} completions",
    "verl": "verl counts a train_batch_size of {prompts:,} prompts and a ppo_mini_batch_size of "
    "{part:,}, {updates:,} "
    "updates",
}
"""Recipe -> the quantities that its system's users know."""


def their_sizes(config: Config) -> str:
    """A run's sizes in the words of the system whose recipe it has, once its devices are known;
    empty without one."""
    prompts, each = config.batch.prompts_per_step, config.algorithm.num_minibatches
    completions = prompts * config.batch.group_size
    return THEIR_SIZES.get(config.recipe, "").format(
        prompts=prompts,
        completions=completions,
        all=config.steps * completions,
        updates=num_updates(config),
        part=prompts // each,
        each=completions // each,
        length=longest_sequence(config),
        tokens=completions * longest_sequence(config),
    )


def step_sizes(config: Config) -> tuple[int, int]:
    """Completions (of one device with batch.prompts_per_device) and updates of a step."""
    return (
        (config.batch.prompts_per_device or config.batch.prompts_per_step)
        * config.batch.group_size,
        config.algorithm.num_epochs * config.algorithm.num_minibatches,
    )


# ---- when


def schedule_of(t: TrainSection) -> Schedule:
    """The version that each step samples from: `max_staleness = lag + weight_sync_interval - 1`."""
    # The n - 1 steps between two publications are stale anyway; only what exceeds them is a lag.
    lag = 0 if t.max_staleness == -1 else t.max_staleness - (t.weight_sync_interval - 1)
    return Schedule(lag, t.weight_sync_interval, t.versions == "newest")


def step_seconds(schedule: Schedule, sampling: float, training: float, own_devices: bool) -> float:
    """Mean seconds of a step in a long run.

    Sampling waits for the weights that its step is sampled from, training for its step's samples.
    Where the sampler has no devices of its own, the two take turns.

    >>> step_seconds(Schedule(lag=0), 3.0, 2.0, own_devices=True)
    5.0
    >>> step_seconds(Schedule(lag=1), 3.0, 2.0, own_devices=True)
    3.0
    """
    if not own_devices:
        return sampling + training
    sampled, trained = (
        0.0,
        [0.0],
    )  # when each step's update has ended, the first entry being the start
    steady = ROUNDS * schedule.weight_sync_interval
    for step in range(2 * steady):
        # Asked for as early as its age allows, and answered by the version that was published for
        # it.
        known = max(trained[max(0, step - schedule.max_staleness)], trained[schedule.version(step)])
        sampled = max(sampled, known) + sampling
        trained.append(max(trained[-1], sampled) + training)
    return (trained[-1] - trained[steady]) / steady
