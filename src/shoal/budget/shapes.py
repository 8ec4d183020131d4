"""Computes the shapes of a step's micro-batches: how many rows of how many tokens, and how many
completions fit into each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.config.derived import longest_sequence
from shoal.config.train import Config

if TYPE_CHECKING:
    from shoal.trainer.batch import Shape


def micro_batch_shapes(config: Config, row_shards: int) -> tuple[Shape, ...]:
    """Returns the shapes that a run's micro-batches may have, the full shape first; nearly all
    micro-batches have it."""
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
    """Returns candidates for the tokens of a row on each device: for each number of groups that
    divides the groups of a device, the tokens in which that many groups of the longest lengths
    fit."""
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
    """Returns candidates for the tokens of a row on each device: for each number that divides the
    size of a group, the tokens in which a prompt with that many completions of the longest lengths
    fits."""
    sampling = config.sampling
    rows = []
    for number in _divisors(config.batch.group_size):
        tokens = sampling.max_prompt_tokens + number * sampling.max_completion_tokens
        rows.append(_row_on_a_device(tokens, config.mesh.context))
    return rows


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _row_on_a_device(tokens: int, context: int) -> int:
    """Returns the tokens of a row on each of the `context` devices that share it, if `tokens`
    tokens must fit into the row; rounded up to the unit of rows."""
    from shoal.trainer.batch import row_unit

    on_a_device = -(-tokens // context)
    unit = row_unit(on_a_device)
    return -(-on_a_device // unit) * unit


def packed_tokens(config: Config, shapes: Sequence[Shape], prompts: int) -> int:
    """Returns the tokens, padding included, of the micro-batches that a run packs the groups of
    `prompts` prompts into, if all prompts and completions have the longest length."""
    from shoal.trainer.batch import split_into_micro_batches

    if not prompts:
        return 0
    sampling = config.sampling
    completions = dict.fromkeys(range(config.batch.group_size), sampling.max_completion_tokens)
    groups = dict.fromkeys(range(prompts), (sampling.max_prompt_tokens, completions))
    return sum(shape.tokens for shape, _ in split_into_micro_batches(groups, shapes))


def computed_tokens(config: Config, row_shards: int, prompts: int, micro_tokens: int) -> int:
    """Returns `packed_tokens` for a run whose `batch.micro_tokens` is `micro_tokens`."""
    changed = replace(config, batch=replace(config.batch, micro_tokens=micro_tokens))
    return packed_tokens(changed, micro_batch_shapes(changed, row_shards), prompts)
