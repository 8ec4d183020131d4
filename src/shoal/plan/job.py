"""A job on the devices of a topology: its roles, what they hold, and the programs that they run,
all as shapes.

These are the run's own learner and engines, made as a run makes them; nothing is loaded or
allocated.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from shoal.algorithm.loss import Objective
from shoal.budget.budget import Budget
from shoal.budget.memory import bytes_per_device, copied_shapes, reference_architecture
from shoal.budget.shapes import micro_batch_shapes, packed_tokens
from shoal.budget.slots import num_hosts
from shoal.config.commands import PlanConfig
from shoal.config.derived import max_support
from shoal.config.sections.model import ModelSection
from shoal.config.train import Config
from shoal.job.hosts import run_engines
from shoal.job.job import Job, memory_report
from shoal.mesh import Program, Role, available_devices
from shoal.mesh.accelerators import Accelerator, accelerator_of, calibrated, read_calibration
from shoal.mesh.reshard import in_order_of
from shoal.mesh.roles import refusal
from shoal.mesh.topology import Topology, parse_topology, placeholder_devices, topology_devices
from shoal.model.attention.blocked import block_size
from shoal.model.attention.caches import KEY_BLOCK, PAGE, keys_at_once
from shoal.model.attention.selector import attention_kind, by_pages, decodes_by_kernel
from shoal.model.flops import model_flops
from shoal.model.linear import Quantised
from shoal.model.parameters import Parameters, param_shapes, param_specs, trained_specs
from shoal.model.transformer import Model
from shoal.report.console import Console
from shoal.sampler.engine import Engine
from shoal.sampler.programs import CHUNK
from shoal.sampler.scheduler import prompt_bucket
from shoal.text import count
from shoal.trainer.batch import LearnerBatch
from shoal.trainer.step import score_program
from shoal.trainer.update import needs_old_logprobs, num_scorings
from shoal.weights.sampler_copy import publication_program, published_shapes
from shoal.weights.source import ModelSource, check_positions, planned_architecture


@dataclass(frozen=True)
class Planned:
    """One program of a step, with the shapes of what it is called with."""

    program: Program
    role: Role
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    runs: float = 1.0  # a step
    assumed_trips: tuple[float, ...] = ()  # of loops whose rounds no compiler knows
    batch_bytes: int = 0  # of its arguments on a device that are nothing that a role holds
    weights_read: float = 1.0  # how often a run reads its weights,
    looked_up: int = 0  # the bytes of them on a device of which it reads single rows, and
    keys_read: float = 0.0  # the bytes of keys and values that it reads on a device


@contextmanager
def planned_job(
    config: Config, topology: str, layers: int = 0, compiles: bool = True
) -> Iterator[PlannedJob]:
    """A training job on a topology (empty: the devices here). `layers`: fewer than the model has, 0
    for all. Where nothing `compiles` no compiler need be installed."""
    where = parse_topology(topology) if topology else None
    devices = _devices(topology, compiles) if where else available_devices(config.mesh)
    spec = ModelSource(Path(), planned_architecture(config.model))
    with Job(config, Console(io.StringIO()), devices=devices, spec=spec) as job:
        job.open("positions")
        if config.teacher.path:
            teacher = planned_architecture(ModelSection(path=config.teacher.path))
            check_positions(teacher, config.sampling, f"teacher.path={config.teacher.path}")
            job.opened["teacher"] = ModelSource(Path(), teacher)
        yield PlannedJob(job, where, layers)


@lru_cache
def _devices(topology: str, compiles: bool) -> Sequence[Any]:
    where = parse_topology(topology)
    return topology_devices(where) if compiles else placeholder_devices(where)


class PlannedJob:
    """The learner and the engines of a job, with the programs that they run; `planned_job` opens
    it."""

    def __init__(self, job: Job, topology: Topology | None, layers: int) -> None:
        self.job, self.topology = job, topology
        self.roles, self.config, self.architecture = job.roles, job.config, job.spec.architecture
        if (
            layers
        ):  # of the job's model: with fewer layers model.remat=auto would choose another program
            job.opened["model"] = replace(
                job.model, architecture=replace(self.architecture, num_layers=layers)
            )
        self.model, self.learner = job.model, job.learner
        self.shapes = micro_batch_shapes(
            self.config, self.roles.trainer.row_shards
        )  # the whole one first
        self.shape = self.shapes[0]

    @property
    def known(self) -> Accelerator | None:
        """What the makers say of its devices."""
        return (
            accelerator_of(self.roles.trainer.device_kind)
            if self.topology is None
            else self.topology.accelerator
        )

    @cached_property
    def calibration(self) -> Mapping[str, Any] | None:
        """What was measured on such a device."""
        file = self.config.calibration if isinstance(self.config, PlanConfig) else ""
        return read_calibration(file, self.roles.trainer.device_kind, self.known) if file else None

    @property
    def accelerator(self) -> Accelerator | None:
        return calibrated(self.known, self.calibration) if self.calibration else self.known

    @cached_property
    def engines(self) -> dict[str, Engine]:
        return dict(
            run_engines(self.config, self.model, self.roles, _NO_TOKENIZER, self.architecture)
        )

    def _copied(self) -> list[tuple[Any, Any]]:
        return copied_shapes(
            self.learner.shapes().trainable,
            trained_specs(self.model.architecture),
            self.roles.sampler,
            self.model.dtype,
            self.model.on(self.roles.sampler).architecture,
        )

    def _scorers(self) -> dict[str, Model]:
        """The models whose weights are only scored with, on the reference's devices."""
        found, model = {}, self.model.on(self.roles.reference)
        if self.config.algorithm.scores_reference:
            a = reference_architecture(self.config, model.architecture)
            found["reference"] = replace(model, architecture=a)
        if teacher := self.job.opened.get("teacher"):
            found["teacher"] = replace(model, architecture=teacher.architecture)
        return found

    # ---- what they run

    def programs(self) -> dict[str, Planned]:
        """The programs of a step by name, in the order of a step."""
        return {**self._sampling(), **self._learning(), **self._publishing()}

    def _sampling(self) -> dict[str, Planned]:
        c, role, engine = self.config, self.roles.sampler, self.engines["training"]
        prompts, parameters = (
            -(-c.batch.prompts_per_step // num_hosts(self.roles)),
            published_shapes(engine.model),
        )
        rows = engine.scheduler.batch_rows(prompt_bucket(c.sampling.max_prompt_tokens))
        joins = (
            prompts * (-(-c.batch.group_size // engine.siblings) - 1) / engine.scheduler.join_rows
        )
        waves = -(-prompts // engine.num_groups)
        tokens = c.sampling.max_completion_tokens - 1
        # Over a completion's tokens its own keys grow from one block to all. Keys in one block need
        # no loop.
        lengths = (
            -(-size // engine.model.key_parts)
            for size in (c.sampling.max_prompt_tokens, c.sampling.max_completion_tokens)
        )
        prompt, own = (-(-size // keys_at_once(role.platform, size)) for size in lengths)
        turns = [turns for turns, most in ((prompt, prompt), ((own + 1) / 2, own)) if most > 1]
        blocks = sum(turns) / max(1, len(turns))
        dispatches = max(1, -(-tokens // CHUNK))
        chunk = min(CHUNK, max(1, tokens / dispatches))
        runs = {"prefill": -(-prompts // rows), "join": joins, "decode": waves * dispatches}
        trips = {"decode": (chunk, blocks)}
        if decodes_by_kernel(engine.model):  # of all keys, those in its blocks that are live
            read = self._live_keys(engine, PAGE if by_pages(engine.model) else KEY_BLOCK)
            trips["decode"] = chunk, read / bytes_per_device(engine.state_shapes().caches)
        piece = engine.scheduler.whole
        if (pieces := -(-c.sampling.max_prompt_tokens // piece)) > 1:
            # Of the blocks of keys, each block of queries reads those before it.
            trips["prefill"] = pieces, (pieces * piece // block_size(piece, role.platform) + 1) / 2
        # An embedding that is no head is read in single rows.
        table = bytes_per_device(parameters.embed_tokens)
        looked_up = {
            "embed": table,
            **dict.fromkeys(("decode", "enter"), parameters.lm_head is not None and table),
        }
        found = {
            part: Planned(
                engine.programs[part],
                role,
                args,
                arrays,
                count * times,
                trips.get(part, ()),
                looked_up=looked_up.get(part, 0),
            )
            for name, count in runs.items()
            if count
            for part, (times, args, arrays) in engine.calls(name, parameters).items()
        }
        found["decode"] = replace(
            found["decode"], weights_read=chunk, keys_read=chunk * self._live_keys(engine)
        )
        return found

    def _live_keys(self, engine: Engine, block: int = 1) -> float:
        """Bytes on a device of the keys and values that one token of every slot reads, in whole
        blocks: of the longest prompts, and half of completions, as these grow, of the mean length
        where it is set, or of the longest."""
        s, parts, total = self.config.sampling, engine.model.key_parts, 0.0
        prompt, mean = (
            block * -(-s.max_prompt_tokens // block),
            s.mean_completion_tokens or s.max_completion_tokens,
        )
        for cache in engine.state_shapes().caches:
            # Of a slot, or its share of a pool.
            own = (
                math.prod(cache.own_k.shape[2:-1]) // engine.model.key_heads
                if cache.own_k.ndim == 5
                else cache.own_k.shape[0]
                * cache.own_k.shape[2]
                / (engine.num_rows * engine.siblings)
            )
            for arrays, tokens, held in (
                ((cache.prefix_k, cache.prefix_v), prompt, cache.prefix_k.shape[-2]),
                ((cache.own_k, cache.own_v), (mean + block - 1) / 2, own),
            ):
                total += bytes_per_device(arrays) * tokens / (parts * held)
        return total

    def _learning(self) -> dict[str, Planned]:
        c, role, state = self.config, self.roles.trainer, self.learner.shapes()
        batch = self._batch(role)
        a, size = c.algorithm, bytes_per_device(batch)
        prompts, parts = c.batch.prompts_per_step, a.num_minibatches
        smaller, larger = (
            prompts // parts,
            prompts % parts,
        )  # so many mini-batches have a prompt more
        trained = a.num_epochs * (
            (parts - larger) * self._runs(smaller) + larger * self._runs(smaller + 1)
        )
        programs: dict[str, Any] = self.learner.programs
        total, found = programs["zero"].eval_shape(), {}
        scored = self._runs(prompts)  # whole steps, whatever the mini-batches
        if needs_old_logprobs(a, bool(c.teacher.path)):
            found["score"] = Planned(
                programs["score"],
                role,
                (state.parameters, batch),
                runs=scored,
                assumed_trips=self._blocks_read(self.model),
                batch_bytes=size,
            )
        for name, model in self._scorers().items():
            own = self._batch(model.role)
            weights = param_shapes(param_specs(model.architecture), model.role, model.dtype)
            program = score_program(model, Objective.chunk_elements)
            found[name] = Planned(
                program,
                model.role,
                (weights, own),
                runs=scored,
                assumed_trips=self._blocks_read(model),
                batch_bytes=bytes_per_device(own),
            )
        found["accumulate"] = Planned(
            programs["accumulate"],
            role,
            (total, state.trainable, state.frozen, batch, state.loss_scale),
            runs=trained,
            assumed_trips=self._blocks_read(self.model),
            batch_bytes=size,
        )
        found["apply"] = Planned(
            programs["apply"],
            role,
            (total.loss, state.trainable, state.updates, state.loss_scale),
            {"gradient": total.gradient, "moments": state.optimizer},
            a.num_epochs * parts,
            batch_bytes=self._moments_in_flight(state.trainable) if role.platform == "gpu" else 0,
        )
        return found

    def _moments_in_flight(self, trainable: Parameters) -> int:
        """Bytes that an update with `optimizer.offload` brings to a device at a time. Of a GPU that
        is only described JAX knows no memory of the host, and compiles the update as if the moments
        stayed on it."""
        section = self.config.optimizer
        layer = bytes_per_device(trainable.blocks) // self.model.architecture.num_layers
        once = 2 * (
            bytes_per_device(replace(trainable, blocks=None)) + layer
        )  # two moments, in and out
        return section.offload * once * (1 if section.moments == "bfloat16" else 2)

    def _runs(self, prompts: int) -> float:
        """Runs over the groups of so many prompts. A micro-batch in a shorter shape is a part of
        one: a program of the whole shape stands for all, and its memory for the largest."""
        return packed_tokens(self.config, self.shapes, prompts) / self.shape.tokens

    def _blocks_read(self, model: Model) -> tuple[float, ...]:
        """Blocks of keys that attention goes through for one of queries, at the longest prompt and
        completion; of kernels, which say what all would cost, the share of them; empty where it
        computes all scores."""
        size, s = self.shape.length, self.config.sampling
        kind = attention_kind(model, self.shape.rows, size)
        if kind == "reference":
            return ()
        if kind == "pallas":  # each as many as it needs
            from shoal.model.attention import gpu as gpu_attention
            from shoal.model.attention import tpu as tpu_attention

            block = (
                tpu_attention.block_size(size)
                if model.role.platform == "tpu"
                else gpu_attention.block_size(model.architecture.head_dim, model.dtype)
            )
            # Of a row's parts the last reads most, and the others wait for it.
            share = 1 - 0.5 / model.role.context
            return (
                min(1.0, (s.max_prompt_tokens + s.max_completion_tokens * share + block) / size),
            )
        block = block_size(
            size // model.role.context, model.role.platform
        )  # all as many as any needs
        return (min(size / block, (s.max_prompt_tokens + s.max_completion_tokens) / block + 2),)

    def _publishing(self) -> dict[str, Planned]:
        """The largest array's program, as often as all arrays together are larger: there is one for
        each array."""
        pairs = self._copied()
        if not pairs:
            return {}
        mine, own = max(pairs, key=lambda pair: bytes_per_device(pair[1]))
        if isinstance(own, Quantised):  # made before
            own, mine = own.values, mine.update(dtype=own.values.dtype)
        mine = mine.update(sharding=in_order_of(mine.sharding, own.sharding))
        program = publication_program(
            self.model.on(self.roles.sampler), mine.sharding, own.sharding, own.dtype
        )
        arrays = sum(bytes_per_device(own) for _, own in pairs) / bytes_per_device(own)
        return {
            "publish": Planned(
                program,
                self.roles.trainer,
                (mine, jax.ShapeDtypeStruct((), jnp.uint32)),
                runs=arrays / self.config.train.weight_sync_interval,
            )
        }

    def _batch(self, role: Role) -> LearnerBatch:
        """The shapes of a micro-batch, laid out as `put_batch` does it, with rows for all of the
        role's devices."""
        shape = self.shape
        grid = (shape.rows + -shape.rows % role.batch_shards, shape.length)

        def rows(dtype: Any, sizes: tuple[int, ...] = grid) -> jax.ShapeDtypeStruct:
            sharding = role.sharding(("batch", *(None,) * (len(sizes) - 1)), sizes)
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

        whole, real, support = rows(jnp.int32), rows(jnp.float32), max_support(self.config)
        return LearnerBatch(
            tokens=whole,
            position=whole,
            before=whole,
            segment=whole,
            prompt=whole,
            loss_mask=rows(jnp.bool_),
            weight=real,
            advantage=real,
            sampler_logprobs=real,
            old_logprobs=real,
            ref_logprobs=real,
            temperature=jax.ShapeDtypeStruct((), jnp.float32, sharding=role.replicated),
            support_ids=rows(jnp.int32, (*grid, support)) if support else None,
        )

    # ---- in figures

    def describe(self) -> Budget:
        """What is known before anything is compiled."""
        c, a, kind = self.config, self.architecture, self.accelerator
        hosts = (
            self.topology.hosts(self.job.devices)
            if self.topology
            else dict.fromkeys(self.job.devices, 0)
        )
        group = (
            c.sampling.max_prompt_tokens,
            [c.sampling.max_completion_tokens] * c.batch.group_size,
        )
        groups = [group] * c.batch.prompts_per_step
        found = memory_report(self.job)
        if kind:
            found |= {
                "memory_bytes": kind.usable_bytes or found["memory_bytes"],
                "link": kind.link,
                "hbm": kind.hbm,
                "peak_flops": (self.known or kind).peaks.get(self.model.dtype.name),
                "kernels": kind.kernels,
                "launch": kind.launch,
                "is_tpu": kind.is_tpu,
                "calibration": self.calibration,
            }
        if self.roles.disaggregated:
            found["published_bytes"] = bytes_per_device([own for _, own in self._copied()])
        return Budget(
            c,
            found
            | {
                "devices": self.topology.describe()
                if self.topology
                else f"the {count(len(hosts), 'device')} here",
                "machines": self.topology.machines if self.topology else 1,
                "programs": {
                    name: {"runs": one.runs, "role": one.role.name}
                    for name, one in self.programs().items()
                },
                "tokens": {
                    "sampled": c.batch.prompts_per_step * sum(group[1]),
                    "prompts": c.batch.prompts_per_step * group[0],
                },
                "model_flops": model_flops(
                    a,
                    groups,
                    groups,
                    c.algorithm.num_epochs,
                    num_scorings(c.algorithm, bool(c.teacher.path)),
                ),
                "hosts": len(set(hosts.values())),
                "refusal": refusal(c.mesh, self.roles, hosts),
            },
            {},
        )


_NO_TOKENIZER: Any = SimpleNamespace(eos_ids=(0,), decode=None)
"""In place of a tokenizer: which tokens end a completion changes no cost."""
