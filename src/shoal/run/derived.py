"""Numbers that follow from a configuration. Imports no JAX: a dry run needs them."""

from __future__ import annotations

from dataclasses import replace

from shoal.config.schema import Config
from shoal.text import count
from shoal.types import ShoalError

MICRO_TOKENS = 2**12
"""On accelerators. 8B on 8 v6e has room for a few more: 4,352 need 30.0 of 31.2 GiB (`benchmarks/aot.py`)."""

CPU_MICRO_TOKENS = 2**11
"""Longer rows leave a CPU's caches, and more of a small update is padding."""


def for_devices(config: Config, devices: int, platform: str) -> Config:
    """The configuration with what follows from the trainer's devices, `batch.prompts_per_step`, where
    `batch.prompts_per_device` is set, and `batch.micro_tokens`, where it is not; and `algorithm.correction`."""
    # Not with the configuration: devices are known only when JAX has started.
    micro_tokens = config.batch.micro_tokens or (CPU_MICRO_TOKENS if platform == "cpu" else MICRO_TOKENS)
    config = replace(config, batch=replace(config.batch, micro_tokens=micro_tokens),
                     algorithm=replace(config.algorithm, correction=correction_of(config)))
    each, parts = config.batch.prompts_per_device, config.algorithm.num_minibatches
    if not each:
        return config
    if parts > each * devices:
        raise ShoalError(f"batch.prompts_per_device={each} on {count(devices, 'device')} gives "
                         f"{count(each * devices, 'prompt')} a step, fewer than algorithm.num_minibatches={parts}: "
                         "raise it or lower that")
    return replace(config, batch=replace(config.batch, prompts_per_step=each * devices))


def oldest_samples(config: Config) -> int:
    """How many versions old samples may be."""
    return max(config.train.max_staleness, config.train.weight_sync_interval - 1)


def correction_of(config: Config) -> str:
    """`algorithm.correction`, with auto decided."""
    chosen = config.algorithm.correction
    return chosen if chosen != "auto" else "tis" if oldest_samples(config) else "none"


def staleness_text(config: Config, own_devices: bool) -> str:
    """How old samples may be and what follows from it; empty where they are all of the trainer's own weights.

    up to 1 version old, corrected by importance weights (algorithm.correction=tis)
    """
    if not (oldest := oldest_samples(config)):
        return ""
    correction = correction_of(config)
    how = "not corrected" if correction == "none" else "corrected by importance weights"
    text = f"up to {count(oldest, 'version')} old, {how} (algorithm.correction={correction})"
    if own_devices:
        return text + ("; the sampler takes new weights while completions go on" if config.train.versions == "newest"
                       else "; the sampler goes on while the trainer learns")
    return text + ("; sampler and trainer share devices and take turns, so with train.versions=newest none is"
                   if config.train.versions == "newest" else "")


def num_updates(config: Config) -> int:
    """Updates of the optimizer in a whole run."""
    return config.steps * config.algorithm.num_epochs * config.algorithm.num_minibatches


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt with the longest completion."""
    return config.sampling.max_prompt_tokens + config.sampling.max_completion_tokens


def max_support(config: Config) -> int:
    """Token ids stored at each position for `match_sampling_support`; 0 for none."""
    s = config.sampling
    if not (s.params.truncated and config.algorithm.match_sampling_support):
        return 0
    return min(s.max_support, s.top_k or s.max_support)


def step_text(config: Config) -> str:
    """The size of a step in one line.

    this step = 32 prompts x 8 completions = 256 completions, 1 update (1 epoch x 1 mini-batch); 80 steps
    """
    batch, algorithm = config.batch, config.algorithm
    completions, updates = step_sizes(config)
    if batch.prompts_per_device:
        return (f"this step = {count(batch.prompts_per_device, 'prompt')} a device x "
                f"{count(batch.group_size, 'completion')}, {count(updates, 'update')}; {count(config.steps, 'step')}")
    return (f"this step = {count(batch.prompts_per_step, 'prompt')} x {count(batch.group_size, 'completion')} = "
            f"{count(completions, 'completion')}, {count(updates, 'update')} ({count(algorithm.num_epochs, 'epoch')} x "
            f"{count(algorithm.num_minibatches, 'mini-batch', 'mini-batches')}); {count(config.steps, 'step')}")


def step_sizes(config: Config) -> tuple[int, int]:
    """Completions (of one device with batch.prompts_per_device) and updates of a step."""
    return ((config.batch.prompts_per_device or config.batch.prompts_per_step) * config.batch.group_size,
            config.algorithm.num_epochs * config.algorithm.num_minibatches)

