"""Computes the shapes of a step's micro-batches: how many rows of how many tokens, and how many
completions fit into each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.config.derived import longest_prompt, longest_sequence
from shoal.config.train import Config

if TYPE_CHECKING:
    from shoal.trainer.batch import Shape


def micro_batch_shapes(config: Config, row_shards: int) -> tuple[Shape, ...]:
    """Returns the shapes that a run's micro-batches may have, largest first; nearly all
    micro-batches have the first. `row_shards`: the number of devices of the trainer that rows are
    split over."""
    from shoal.trainer.update import update_shapes

    return update_shapes(
        longest=longest_sequence(config),
        max_tokens=config.sampling.max_completion_tokens,
        batch=config.batch,
        num_minibatches=config.algorithm.num_minibatches,
        row_shards=row_shards,
        context=config.mesh.context,
    )


def group_rows(config: Config, row_shards: int) -> list[int]:
    """Returns candidates for `batch.micro_tokens`, the tokens of a row on each device: rows with
    room for 1, 2, ... groups whose prompts and completions all have the longest length. Only
    numbers of groups that divide the groups which a device gets in an update; in ascending order.
    `row_shards`: the number of devices of the trainer that rows are split over."""
    batch = config.batch
    sampling = config.sampling
    context = config.mesh.context
    # of one update, rounded up
    prompts = -(-batch.prompts_per_step // config.algorithm.num_minibatches)
    group_tokens = longest_prompt(config) + batch.group_size * sampling.max_completion_tokens
    groups_of_a_device = max(1, prompts * context // row_shards)
    rows = []
    for number in _divisors(groups_of_a_device):
        rows.append(_row_on_a_device(number * group_tokens, context))
    return rows


def completion_rows(config: Config) -> list[int]:
    """Returns candidates for `batch.micro_tokens` that are smaller than a group: rows with room for
    a prompt and 1, 2, ... of its completions, all of the longest length. Only numbers that divide
    the size of a group; in ascending order, the whole group last."""
    sampling = config.sampling
    rows = []
    for number in _divisors(config.batch.group_size):
        tokens = longest_prompt(config) + number * sampling.max_completion_tokens
        rows.append(_row_on_a_device(tokens, config.mesh.context))
    return rows


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _row_on_a_device(tokens: int, context: int) -> int:
    """Returns the tokens that each of the `context` devices which share a row has of it, if
    `tokens` tokens must fit into the row; rounded up to a multiple of `row_unit`, because attention
    works in whole blocks."""
    from shoal.trainer.batch import row_unit

    on_a_device = -(-tokens // context)
    unit = row_unit(on_a_device)
    return -(-on_a_device // unit) * unit


def packed_tokens(config: Config, shapes: Sequence[Shape], prompts: int) -> int:
    """Returns the tokens, padding included, of all micro-batches into which the groups of `prompts`
    prompts are packed, if all prompts and completions have the longest length; 0 for no prompts.
    `shapes`: those of `micro_batch_shapes`."""
    from shoal.trainer.batch import split_into_micro_batches

    if not prompts:
        return 0
    sampling = config.sampling
    # number of a completion -> its tokens
    completions = dict.fromkeys(range(config.batch.group_size), sampling.max_completion_tokens)
    # number of a group -> (tokens of its prompt, its completions)
    groups = dict.fromkeys(range(prompts), (longest_prompt(config), completions))
    return sum(shape.tokens for shape, _ in split_into_micro_batches(groups, shapes))


def computed_tokens(config: Config, row_shards: int, prompts: int, micro_tokens: int) -> int:
    """Returns the tokens, padding included, of an update of `prompts` prompts, if the run had
    `micro_tokens` as its `batch.micro_tokens` and all prompts and completions had the longest
    length; 0 for no prompts. `row_shards`: the number of devices of the trainer that rows are split
    over. `config` stays as it is."""
    changed = replace(config, batch=replace(config.batch, micro_tokens=micro_tokens))
    return packed_tokens(changed, micro_batch_shapes(changed, row_shards), prompts)
