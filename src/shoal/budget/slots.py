"""Plans the engines of a sampler: how many completions they hold at once, how many siblings (the
completions of one prompt) share a row, and how much memory their caches have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax

from shoal.budget.auto import free_cache_bytes
from shoal.budget.memory import CacheBytes, cache_bytes
from shoal.config.derived import evaluates_as_in_training
from shoal.config.sections.sampling import SamplingSection
from shoal.config.train import Config, Turns
from shoal.mesh import Roles
from shoal.model.architecture import Architecture
from shoal.model.attention.caches import MOST_SIBLINGS, PAGE, cache_size
from shoal.model.attention.selector import has_pages
from shoal.model.attention.softmax import largest_block
from shoal.model.transformer import Model
from shoal.records import ShoalError
from shoal.sampler.decode_state import DecodeState, StateSizes, state_shapes
from shoal.sampler.scheduler import num_rows
from shoal.text import count
from shoal.weights.source import make_model

QUEUED = 4
"""How many completions are requested of a host at once, for each of its slots. A group counts until
its longest completion has ended. With twice the slots 19 to 40% of them were idle where lengths are
long-tailed and the sampler is slower than the trainer, with four times up to 8%
(benchmarks/overlap.py)."""


class KVCacheBudget(NamedTuple):
    """The memory of a sampler's caches: room for tokens of a prompt (`prompt`), of a completion of
    the mean length (`own`), and of the longest (`longest`), the bytes that these take
    (`of_caches`), and the `bytes` that each device may use for caches, 0 for no limit. Each of the
    `replicas` has caches of its own. Of layers with pages, completions take pages of a common
    pool; of others each slot has room for the longest, for the last tokens of a window, or for a
    state."""

    prompt: int
    own: int
    longest: int
    of_caches: CacheBytes
    bytes: int
    replicas: int

    def slots(self, most: int, siblings: int) -> int:
        """Returns the number of completions that the caches of all replicas have memory for at the
        same time, at most `most`, if a row has `siblings` of them; 0 if there is no memory for one
        row of the longest completions; `most` if memory has no limit (`bytes` is 0)."""
        if not self.bytes:
            return most
        of_caches = self.of_caches
        # a row holds its prompt once, and the caches of each sibling
        rows_of_completions = self.bytes // self.row_bytes(siblings)
        # All prompts, and all slots without their pages, must fit besides the pages of one row of
        # the longest completions.
        pages_of_longest = siblings * (self.longest // PAGE * of_caches.page)
        without_pages = of_caches.row + siblings * of_caches.slot
        rows_beside_the_longest = (self.bytes - pages_of_longest) // without_pages
        rows = max(0, min(rows_of_completions, rows_beside_the_longest))
        return min(most, rows * self.replicas * siblings)

    def row_bytes(self, siblings: int) -> int:
        """Returns the bytes of a row with `siblings` completions of the mean length."""
        return self.of_caches.row + siblings * self.of_caches.of_slot(self.own)

    def pages(self, slots: int, siblings: int) -> int:
        """Returns the pages of one replica's pool, if all replicas together have `slots` slots and
        a row has `siblings` of them: as many as there is memory for, at most what all rows need for
        the longest completions, at least what one row needs for them. 0 if caches have no pages."""
        of_caches = self.of_caches
        if not of_caches.page:
            return 0
        rows = num_rows(slots, siblings, self.replicas) // self.replicas
        pages = rows * siblings * self.own // PAGE
        if self.bytes:
            # The other caches take their part of the memory first.
            others = rows * (of_caches.row + siblings * of_caches.slot)
            pages = (self.bytes - others) // of_caches.page
        of_longest = siblings * self.longest // PAGE
        return max(of_longest, min(pages, rows * of_longest))


class SlotPlan(NamedTuple):
    """How many completions an engine samples at once (`slots`), and how many siblings share a row.
    `evaluated`: the most completions that an evaluation has, 0 if that is not known."""

    slots: int
    siblings: int
    room: KVCacheBudget
    evaluated: int = 0

    def rows_for(self, size: int, group_size: int, is_shared: bool = True) -> tuple[int, int]:
        """Returns (slots, siblings in a row) of the engine that samples groups of `size`
        completions. The engine of training samples these too if its rows can be filled with such
        groups.

        `group_size`: that of training. `is_shared`: if False, evaluations have engines of their
        own, which get no more slots than an evaluation has completions (`evaluated`).
        """
        siblings = self.siblings
        if size != group_size:
            # so that rows of the group are all full
            siblings = math.gcd(self.siblings, size)
        slots = self.room.slots(self.slots, siblings)
        is_engine_of_training = is_shared and siblings == self.siblings
        if self.evaluated and not is_engine_of_training:
            # at least one row
            slots = min(slots, max(siblings, self.evaluated))
        return slots, siblings


def plan_slots(
    sampling: SamplingSection,
    model: Model,
    slots: int,
    group_size: int,
    completions: float,
    free_bytes: int = 0,
    turns: Turns = "",
) -> SlotPlan:
    """Returns how many completions an engine samples at once, and how many siblings share a row: at
    most `slots`, as far as there is memory, of `completions` that are requested at the same time.

    `free_bytes`: the bytes of each device that caches may take; 0: no limit. `turns`: "tools"
    or "environments" if rollouts have them, else "". ShoalError if a mean length of completions is
    set although caches have no pages.

    At least one row is planned, also if there is no memory for it. All siblings of a group share a
    row if every completion gets a slot at once, because then no slot that becomes free early could
    be used. Otherwise a row holds only so many siblings that their caches take more memory than
    the prompt's.
    """
    role = model.role
    # as the engine has it
    longest_sequence = sampling.slot_prompt + sampling.max_completion_tokens
    model = replace(model, longest_sequence=longest_sequence)
    mean = sampling.mean_completion_tokens
    if mean and not has_pages(model):
        raise ShoalError(
            f"sampling.mean_completion_tokens={mean}: only decoding by the kernel for TPUs has "
            f"caches by pages ({role.platform.upper()}, model.attention={model.attention}); use 0",
            "sampling.mean_completion_tokens",
        )

    def cached(tokens: int) -> int:
        """Returns how many keys a cache for `tokens` tokens has room for, padding included."""
        return cache_size(tokens, role.platform, model.key_parts)

    prompt = cached(sampling.slot_prompt)
    longest = cached(sampling.max_completion_tokens)
    own = cached(mean) if mean else longest
    of_caches = cache_bytes(model, prompt, longest)
    room = KVCacheBudget(prompt, own, longest, of_caches, free_bytes, role.row_shards)
    all_at_once = room.slots(slots, group_size) >= completions
    if all_at_once:
        siblings = group_size
    else:
        siblings = _fewest_siblings(group_size, of_caches.row, of_caches.of_slot(own))
        if not room.slots(slots, siblings):  # no memory for one row of so many
            siblings = 1
    if turns == "environments" or (turns and not all_at_once):
        siblings = 1  # so a completion that waits for a tool can give up its row
    if role.platform == "tpu":
        siblings = largest_block(siblings, MOST_SIBLINGS)
    return SlotPlan(max(room.slots(slots, siblings), siblings), siblings, room)


def _fewest_siblings(group_size: int, prompt: int, own: int) -> int:
    """Returns the smallest divisor of the group's size with which the caches of a row's siblings
    take at least as much memory as those of their prompt; the whole group's size if that is not
    enough either. `prompt`, `own`: bytes of a prompt, and of one completion."""
    for size in range(1, group_size + 1):
        if group_size % size == 0 and prompt <= size * own:
            return size
    return group_size


def training_slots(config: Config, roles: Roles, a: Architecture) -> SlotPlan:
    """Returns the slot plan of each host of a training run's sampler."""
    role = roles.hosts[0]
    group_size = config.batch.group_size
    # of one host, with prompts rounded up
    completions = -(-config.batch.prompts_per_step // num_hosts(roles)) * group_size
    # 0 slots on a device: open, so one for each completion, as far as there is memory
    slots = config.sampling.slots_per_device * role.mesh.size or completions
    plan = plan_slots(
        sampling=config.sampling,
        model=make_model(config.model, a, role),
        slots=slots,
        group_size=group_size,
        completions=completions,
        free_bytes=free_cache_bytes(config, roles, a),
        turns=config.turns,
    )
    return plan._replace(evaluated=config.sampling.evaluation_slots)


def all_slots(config: Config, roles: Roles, a: Architecture) -> int:
    """Returns how many completions are sampled at once by all hosts of this process, or, if the
    sampler is remote, by all its workers: the slots of one host times their number."""
    hosts = len(roles.hosts)
    if config.sampler.is_remote:
        hosts = config.num_workers
    return training_slots(config, roles, a).slots * hosts


def num_hosts(roles: Roles) -> int:
    """Returns the number of hosts, in all processes, that share the groups of a step."""
    return len(roles.hosts) * jax.process_count()


def slots_text(config: Config, roles: Roles, a: Architecture) -> str:
    """Returns a text for the user, '' if there is nothing to say: how many completions are sampled
    at once, unless that is all of a step with whole groups in rows; and how long prompts may be, if
    slots have less room than `sampling.max_prompt_tokens`. For another engine: its servers."""
    plan = training_slots(config, roles, a)
    group_size = config.batch.group_size
    engine = config.sampler.engine
    if engine:
        return (
            f"{count(config.num_workers, 'server')} of {engine}, {count(plan.slots, 'completion')} "
            "at once at each"
        )
    parts = []
    completions = config.batch.prompts_per_step * group_size
    if plan.siblings != group_size or plan.slots * num_hosts(roles) < completions:
        shared = "each in a row of its own"
        if plan.siblings > 1:
            shared = f"{plan.siblings} of a prompt share a row"
        each = ""
        if len(roles.hosts) > 1:
            each = " at each host"
        parts.append(f"{count(plan.slots, 'completion')} at once{each}, {shared}")
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
    """Yields (name, shapes of the state) of each engine of `run_engines` that a run uses:
    "training" (unless the run learns from data), "evaluation" (if the run evaluates) and "pass@k"
    (if `pass_k` is set too). Makes no engine. `a`: the architecture that memory is estimated
    with."""
    plan = training_slots(config, roles, a)
    own = model.on(roles.hosts[0])
    group_sizes = {}
    if not config.algorithm.learns_from_data:
        group_sizes["training"] = config.batch.group_size
    if config.evaluate_every >= 0:
        group_sizes["evaluation"] = config.evaluation.samples
        if config.pass_k:
            group_sizes["pass@k"] = config.pass_k
    shards = own.role.row_shards
    for name, size in group_sizes.items():
        is_shared = name == "training" or evaluates_as_in_training(config)
        slots, siblings = plan.rows_for(size, config.batch.group_size, is_shared)
        rows = num_rows(slots, siblings, shards)
        pages = shards * plan.room.pages(slots, siblings)
        sizes = StateSizes(rows, siblings, plan.room.prompt, plan.room.longest, pages)
        yield name, state_shapes(own, sizes)
