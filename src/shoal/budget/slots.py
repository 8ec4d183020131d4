"""The engines of a run: how many completions at once, in rows of how many siblings, within how much
memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax

from shoal.budget.auto import free_cache_tokens
from shoal.config.derived import max_support
from shoal.config.sections.sampling import SamplingSection
from shoal.config.train import Config, Turns
from shoal.mesh import Roles
from shoal.model.architecture import Architecture
from shoal.model.attention.caches import MOST_SIBLINGS, PAGE, cache_size
from shoal.model.attention.selector import by_pages
from shoal.model.attention.softmax import largest_block
from shoal.model.transformer import Model
from shoal.records import ShoalError
from shoal.sampler.programs import DecodeState, state_shapes
from shoal.sampler.scheduler import num_rows
from shoal.text import count
from shoal.weights.source import make_model

QUEUED = 4
"""Completions that a host has at once, for each of its places: a group counts until its longest has
ended. With twice the places 19 to 40% of them were idle where lengths are long-tailed and the
sampler is slower than the trainer, with four times up to 8% (benchmarks/overlap.py)."""


class KVCacheBudget(NamedTuple):
    """The memory of a sampler's caches: keys of a prompt, of a completion and of the longest, and
    how many there may be in all its replicas, or 0. `by_pages`: completions share a pool."""

    prompt: int
    own: int
    longest: int
    tokens: int
    replicas: int
    by_pages: bool

    def slots(self, most: int, siblings: int) -> int:
        """At most so many slots, in rows of `siblings`; 0 if there is no room for a row at its
        limit."""
        if not self.tokens:
            return most
        each = self.tokens // self.replicas
        rows = min(
            each // (self.prompt + siblings * self.own),
            (each - siblings * self.longest) // self.prompt,
        )
        return min(most, max(0, rows) * self.replicas * siblings)

    def pages(self, slots: int, siblings: int) -> int:
        """Pages of a replica's pool: what there is memory for, at most as many as all limits need,
        at least as a row's do. 0 where caches are not by pages."""
        rows = num_rows(slots, siblings, self.replicas) // self.replicas
        keys = (
            self.tokens // self.replicas - rows * self.prompt
            if self.tokens
            else rows * siblings * self.own
        )
        most = rows * siblings * self.longest
        return max(siblings * self.longest, min(keys, most)) // PAGE if self.by_pages else 0


class SlotPlan(NamedTuple):
    """How many completions are sampled at once, and how many siblings share a row. `evaluated`: how
    many an evaluation has at most, 0 where that is not known."""

    slots: int
    siblings: int
    room: KVCacheBudget
    evaluated: int = 0

    def rows_for(self, size: int, group_size: int, is_shared: bool = True) -> tuple[int, int]:
        """(slots, siblings a row) of the engine for groups of `size`: the same for all sizes that
        its rows can be filled with. `is_shared`: training uses the one with its rows, too; others
        are for evaluations alone."""
        fits = size == group_size or size % self.siblings == 0
        siblings = self.siblings if fits else math.gcd(self.siblings, size)
        slots = self.room.slots(self.slots, siblings)
        trains = is_shared and siblings == self.siblings
        if self.evaluated and not trains:
            slots = min(slots, max(siblings, self.evaluated))
        return slots, siblings


def plan_slots(
    sampling: SamplingSection,
    model: Model,
    slots: int,
    group_size: int,
    completions: float,
    free_tokens: int = 0,
    turns: Turns = "",
) -> SlotPlan:
    """At most `slots` of so many completions, as there are `free_tokens` for their keys and values;
    0 for no bound. ShoalError for a mean length of completions where caches are not by pages.

    The siblings of a group share a row if all completions have places at once: no place that is
    free early could be used. Else a row holds so few that their keys take most of it, not the
    prompt's.
    """
    role, mean, paged = model.role, sampling.mean_completion_tokens, by_pages(model)
    if mean and not paged:
        raise ShoalError(
            f"sampling.mean_completion_tokens={mean}: only decoding by the kernel for TPUs has "
            f"caches by pages ({role.platform.upper()}, model.attention={model.attention}); use 0",
            "sampling.mean_completion_tokens",
        )
    longest = sampling.max_completion_tokens
    prompt, own, longest = (
        cache_size(size, role.platform, model.key_parts)
        for size in (sampling.slot_prompt, mean or longest, longest)
    )
    room = KVCacheBudget(prompt, own, longest, free_tokens, role.row_shards, paged)
    few = next(
        size
        for size in range(1, group_size + 1)
        if not group_size % size and (prompt <= size * own or size == group_size)
    )
    siblings = (
        group_size
        if room.slots(slots, group_size) >= completions
        else few
        if room.slots(slots, few)
        else 1
    )
    if turns == "environments" or (turns and room.slots(slots, group_size) < completions):
        siblings = 1  # one that waits for a tool can then give up its row alone
    if role.platform == "tpu":
        siblings = largest_block(siblings, MOST_SIBLINGS)
    return SlotPlan(max(room.slots(slots, siblings), siblings), siblings, room)


def training_slots(config: Config, roles: Roles, a: Architecture) -> SlotPlan:
    """The places of a host of a training run's sampler."""
    role, size = roles.hosts[0], config.batch.group_size
    step = -(-config.batch.prompts_per_step // num_hosts(roles)) * size
    slots = config.sampling.slots_per_device * role.mesh.size or step
    model = make_model(config.model, a, role)
    places = plan_slots(
        config.sampling, model, slots, size, step, free_cache_tokens(config, roles, a), config.turns
    )
    return places._replace(evaluated=config.sampling.evaluation_slots)


def all_slots(config: Config, roles: Roles, a: Architecture) -> int:
    """Completions that the hosts of this process's sampler, or its Ray workers, sample at once."""
    hosts = config.num_workers if config.sampler.is_remote else len(roles.hosts)
    return training_slots(config, roles, a).slots * hosts


def num_hosts(roles: Roles) -> int:
    """Hosts that share a step's groups."""
    return len(roles.hosts) * jax.process_count()


def slots_text(config: Config, roles: Roles, a: Architecture) -> str:
    """How many completions are sampled at once, where these are not all of a step, each group in a
    row; and of which prompts, where they are shorter than those that are allowed."""
    places, size = training_slots(config, roles, a), config.batch.group_size
    if config.sampler.kind == "vllm":
        return (
            f"{count(config.num_workers, 'server')} of vLLM, {count(places.slots, 'completion')} "
            "at once at each"
        )
    parts = []
    if (
        places.siblings != size
        or places.slots * num_hosts(roles) < config.batch.prompts_per_step * size
    ):
        shared = (
            f"{places.siblings} of a prompt share a row"
            if places.siblings > 1
            else "each in a row of its own"
        )
        each = " at each host" if len(roles.hosts) > 1 else ""
        parts.append(f"{count(places.slots, 'completion')} at once{each}, {shared}")
    room = config.sampling.slot_prompt
    if room < config.sampling.max_prompt_tokens:
        parts.append(
            f"room for prompts of {count(room, 'token')}, as the data has them "
            "(sampling.prompt_slot_tokens)"
        )
    return "; ".join(parts)


def engine_states(
    config: Config, model: Model, roles: Roles, a: Architecture
) -> Iterator[tuple[str, DecodeState]]:
    """Name and shapes of what each of `run_engines` holds that a run uses; no engine is made. `a`:
    the model that memory is reckoned with."""
    places, own = training_slots(config, roles, a), model.on(roles.hosts[0])
    sizes = {} if config.algorithm.learns_from_data else {"training": config.batch.group_size}
    if config.evaluate_every >= 0:
        sizes |= {"evaluation": 1, "pass@k": config.pass_k}
    for name, size in sizes.items():
        if size:
            is_shared = name == "training" or not max_support(config)
            slots, siblings = places.rows_for(size, config.batch.group_size, is_shared)
            rows, shards = num_rows(slots, siblings, own.role.row_shards), own.role.row_shards
            room = places.room
            yield (
                name,
                state_shapes(
                    own,
                    rows,
                    siblings,
                    room.prompt,
                    room.longest,
                    shards * room.pages(slots, siblings),
                ),
            )
