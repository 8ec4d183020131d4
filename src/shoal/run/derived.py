"""Numbers that follow from a configuration. Imports no JAX: a dry run needs them."""

from __future__ import annotations

from shoal.config.schema import Config


def num_updates(config: Config) -> int:
    """Updates of the optimizer in a whole run."""
    return config.steps * config.algorithm.num_epochs * config.algorithm.num_minibatches


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


def count(number: int, one: str, many: str = "") -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
