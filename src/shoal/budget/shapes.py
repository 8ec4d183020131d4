"""The shapes of a step's micro-batches: how many rows of how many tokens, and how many completions
each holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.config.derived import longest_sequence
from shoal.config.train import Config

if TYPE_CHECKING:
    from shoal.trainer.batch import Shape


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
    batch = config.batch
    sampling = config.sampling
    context = config.mesh.context
    prompts = -(-batch.prompts_per_step // config.algorithm.num_minibatches)
    group_tokens = sampling.max_prompt_tokens + batch.group_size * sampling.max_completion_tokens
    groups_of_a_device = max(1, prompts * context // row_shards)
    rows = []
    for number in _divisors(groups_of_a_device):
        rows.append(_row_on_a_device(number * group_tokens, context))
    return rows


def completion_rows(config: Config) -> list[int]:
    """Tokens of a row on each device in which completions of the longest length fit with their
    prompt, by the numbers of them that divide a group."""
    sampling = config.sampling
    rows = []
    for number in _divisors(config.batch.group_size):
        tokens = sampling.max_prompt_tokens + number * sampling.max_completion_tokens
        rows.append(_row_on_a_device(tokens, config.mesh.context))
    return rows


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


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

    if not prompts:
        return 0
    sampling = config.sampling
    completions = dict.fromkeys(range(config.batch.group_size), sampling.max_completion_tokens)
    groups = dict.fromkeys(range(prompts), (sampling.max_prompt_tokens, completions))
    return sum(shape.tokens for shape, _ in in_batches(groups, shapes))


def computed_tokens(config: Config, row_shards: int, prompts: int, micro_tokens: int) -> int:
    """`packed_tokens` of a run with another `batch.micro_tokens`."""
    changed = replace(config, batch=replace(config.batch, micro_tokens=micro_tokens))
    return packed_tokens(changed, micro_batch_shapes(changed, row_shards), prompts)
