"""Describes a job on the devices of a topology: its roles, what they hold, and the programs that
they run, all as shapes.

The learner and the engines are made as in a run; nothing is loaded or allocated.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from shoal.algorithm.loss import Objective
from shoal.budget.budget import Budget, DeviceRates, PlannedStep, StepProgram, step_of
from shoal.budget.memory import (
    bytes_per_device,
    copied_shapes,
    parameter_count,
    reference_architecture,
)
from shoal.budget.shapes import micro_batch_shapes, packed_tokens
from shoal.budget.slots import num_hosts
from shoal.config.commands import PlanConfig
from shoal.config.derived import max_support, replays_routes
from shoal.config.sections.model import ModelSection
from shoal.config.train import Config
from shoal.job.hosts import run_engines
from shoal.job.job import Job
from shoal.job.memory import job_budget
from shoal.mesh import Program, Role, available_devices
from shoal.mesh.accelerators import Accelerator, accelerator_of, calibrated, read_calibration
from shoal.mesh.reshard import in_order_of
from shoal.mesh.roles import process_refusal
from shoal.mesh.topology import Topology, parse_topology, placeholder_devices, topology_devices
from shoal.model.architecture import Layer
from shoal.model.attention.blocked import block_size
from shoal.model.attention.caches import (
    KEY_BLOCK,
    PAGE,
    RING_SLACK,
    Cache,
    is_ring,
    keys_at_once,
    ring_size,
)
from shoal.model.attention.selector import attention_kind, by_pages, decodes_by_kernel
from shoal.model.flops import model_flops
from shoal.model.layers import stacked_blocks
from shoal.model.linear import Quantised
from shoal.model.parameters import (
    ExpertWeights,
    Parameters,
    param_shapes,
    param_specs,
    trained_specs,
)
from shoal.model.transformer import Model
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.sampler.engine import Engine
from shoal.sampler.programs import DECODE_CHUNK
from shoal.sampler.scheduler import prompt_bucket
from shoal.text import count
from shoal.trainer.batch import LearnerBatch, TeacherStates, TeacherTop, ValueTargets
from shoal.trainer.critic import Critic
from shoal.trainer.scorers import shared_vocab_size, target_shapes
from shoal.trainer.step import TrainState, score_program, states_program, top_program
from shoal.trainer.update import critic_epochs, needs_old_logprobs, num_scorings
from shoal.weights.sampler_copy import publication_program, published_shapes
from shoal.weights.source import ModelSource, check_positions, planned_architecture


@dataclass(frozen=True)
class Planned:
    """One program of a step, with the shapes of the arguments that it is called with."""

    program: Program
    role: Role
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    runs: float = 1.0  # in a step
    assumed_trips: tuple[float, ...] = ()  # rounds of loops for which the compiler knows no number
    kernel_share: float | None = None  # of what a kernel declares, what it computes; None: unknown
    batch_bytes: int = 0  # on a device, of arguments that no role's items contain
    weights_read: float = 1.0  # how often one run of the program reads the weights
    # on a device, bytes of weights that it does not read, like embeddings but for single rows
    unread: float = 0.0
    keys_read: float = 0.0  # on a device, bytes of keys and values that it reads


@contextmanager
def planned_job(
    config: Config, topology: str, layers: int = 0, compiles: bool = True
) -> Iterator[PlannedJob]:
    """Yields a training job on the devices of a topology such as `v5p-8`; on the devices here if it
    is empty. Nothing of it is allocated. `layers`: fewer layers than the model has, of its longest
    run whole patterns less (`Architecture.shortened`); 0: all.
    `compiles`: False: placeholders stand for the devices, so that no compiler for them need be
    installed, and `programs()` can be asked for, but not compiled; without effect for the devices
    here. ShoalError if such a job is impossible, also for `optimizer.offload` if a topology is
    given and `compiles` is False. The job is closed at the end of the block."""
    parsed = None
    if topology:
        if config.optimizer.offload and not compiles:
            raise ShoalError(
                "optimizer.offload=true: only a compiler knows the host memory of devices that you "
                "do not have; plan without --dry-run",
                "optimizer.offload",
            )
        parsed = parse_topology(topology)
        devices = _devices(topology, compiles)
    else:
        devices = available_devices(config.mesh)
    # Path(): a model without a folder; only its architecture is read
    spec = ModelSource(Path(), planned_architecture(config.model))
    with Job(config, Console(io.StringIO()), devices=devices, model_source=spec) as job:
        job.open("check_longest_sequence")
        teachers = {}
        for name, path in config.teacher.paths.items():
            teacher = planned_architecture(
                ModelSection(path=path, quantise=config.teacher.quantise)
            )
            check_positions(teacher, config.sampling, f"teacher.path={path}", config.teacher.room)
            teachers[name] = ModelSource(Path(), teacher)
        job.opened["teacher_sources"] = teachers
        yield PlannedJob(job, parsed, layers)


@lru_cache
def _devices(topology: str, compiles: bool) -> Sequence[Any]:
    """Returns the devices of a topology: described by its compiler if `compiles`, else
    placeholders. The same arguments give the same objects."""
    parsed = parse_topology(topology)
    if compiles:
        return topology_devices(parsed)
    return placeholder_devices(parsed)


class PlannedJob:
    """The learner and the engines of a job, with the programs that they run. `planned_job` makes
    it."""

    def __init__(self, job: Job, topology: Topology | None, layers: int) -> None:
        """Makes the learner's programs of an open job, which the caller closes. `topology`: None
        for the devices here. `layers`: 0 for all of the model; another number replaces the model
        that the job has opened (`architecture` keeps all layers)."""
        self.job = job
        self.topology = topology
        self.roles = job.roles
        self.config = job.config
        self.architecture = job.model_source.architecture
        if layers:
            # Made from the job's model, because with fewer layers model.remat=auto might choose
            # another program.
            shallow = self.architecture.shortened(layers)
            # `job.model` from now on
            job.opened["model"] = replace(job.model, architecture=shallow)
        self.model = job.model
        self.learner = job.learner
        # The full shape comes first.
        self.shapes = micro_batch_shapes(self.config, self.roles.trainer.row_shards)
        self.shape = self.shapes[0]

    @property
    def known(self) -> Accelerator | None:
        """The job's kind of devices with the figures of its maker; None if unknown."""
        if self.topology is None:
            return accelerator_of(self.roles.trainer.device_kind)
        return self.topology.accelerator

    @cached_property
    def calibration(self) -> Mapping[str, Any] | None:
        """What was measured on such a device: the content of the file that the key `calibration`
        names; None if that is empty, or if the configuration is none of `shoal plan`. ShoalError if
        the file is of other devices or not valid."""
        if not isinstance(self.config, PlanConfig) or not self.config.calibration:
            return None
        return read_calibration(self.config.calibration, self.roles.trainer.device_kind, self.known)

    @property
    def accelerator(self) -> Accelerator | None:
        """The job's kind of devices with the figures that the plan assumes: measured ones if there
        are any, else the maker's. None if unknown."""
        if self.calibration:
            return calibrated(self.known, self.calibration)
        return self.known

    @cached_property
    def engines(self) -> dict[str, Engine]:
        """The engines of the run by name, for training and evaluations."""
        return dict(
            run_engines(self.config, self.model, self.roles, _NO_TOKENIZER, self.architecture)
        )

    def _copied(self) -> list[tuple[Any, Any]]:
        """Returns a pair (shape in the trainer, shape in the sampler) for each array that
        publication copies; [] if it copies none. Both have shardings; the sampler's may be
        `Quantised`."""
        return copied_shapes(
            self.learner.shapes().trainable,
            trained_specs(self.model.architecture),
            self.roles.sampler,
            self.model.dtype,
            self.model.on(self.roles.sampler).architecture,
        )

    def _scorers(self) -> dict[str, Model]:
        """Returns the models that score completions, by name: `reference` if the algorithm compares
        with one, `teacher` if the job has one (the largest of several); {} if neither. They are on
        the reference's devices, except the current policy as its own teacher, which is on the
        trainer's."""
        models = {}
        section = self.config.teacher
        model = self.model.on(self.roles.reference)
        first = replace(model, architecture=reference_architecture(self.config, model.architecture))
        if self.config.algorithm.scores_reference:
            models["reference"] = first
        sources = self.job.opened.get("teacher_sources") or {}
        architectures = [source.architecture for source in sources.values()]
        if architectures:
            models["teacher"] = replace(model, architecture=max(architectures, key=parameter_count))
        elif section.is_first_policy:
            models["teacher"] = first
        elif section.is_live_policy:
            models["teacher"] = self.model
        return models

    # ---- what they run

    def programs(self) -> dict[str, Planned]:
        """Returns the programs of a step by name, in the order in which they run: sampling, then
        the trainer's, then `publish`."""
        return {**self._sampling(), **self._learning(), **self._publishing()}

    def _sampling(self) -> dict[str, Planned]:
        """Returns name -> program of the training engine: it prefills all prompts of a step, joins
        further rows of slots to a prompt, and decodes all tokens. `runs` are those of one host's
        part of a step, if every completion has the greatest length. A program that never runs is
        left out, like `join` if a row holds a whole group."""
        config = self.config
        role = self.roles.sampler
        engine = self.engines["training"]
        scheduler = engine.scheduler
        prompt_tokens = config.sampling.max_prompt_tokens
        # -(-a // b) rounds up.
        prompts = -(-config.batch.prompts_per_step // num_hosts(self.roles))
        rows = scheduler.batch_rows(prompt_bucket(prompt_tokens))
        rows_of_a_group = -(-config.batch.group_size // engine.siblings)
        waves = -(-prompts // engine.num_groups)
        decoded = config.sampling.max_completion_tokens - 1  # prefilling samples the first
        dispatches = max(1, -(-decoded // DECODE_CHUNK))
        # mean number of tokens of a dispatch
        chunk = min(DECODE_CHUNK, max(1, decoded / dispatches))
        runs = {
            "prefill": -(-prompts // rows),
            "join": prompts * (rows_of_a_group - 1) / scheduler.join_rows,
            "decode": waves * dispatches,
        }
        loops: dict[str, dict[str, Any]] = {
            "prefill": {"assumed_trips": self._prefill_trips(engine)},
            "decode": self._decode_loops(engine, chunk),
        }
        parameters = published_shapes(engine.model)
        # Only single rows are read of the layers' own embeddings, and of the model's if it is not
        # used as the head too.
        embedding = bytes_per_device(parameters.embed_tokens)
        of_layers = 0
        if parameters.layer_embedding is not None:
            of_layers = bytes_per_device(parameters.layer_embedding.tokens)
        unread: dict[str, float] = {
            "embed": embedding + of_layers,
            "decode": of_layers,
            "begin": of_layers,
        }
        if parameters.lm_head is not None:
            unread["decode"] += embedding
            unread["begin"] += embedding
        unread["decode"] += _idle_expert_bytes(engine, parameters)
        planned = {}
        for name, calls in runs.items():
            if not calls:
                continue
            # A call of the engine runs one program or several, each `times` times.
            for program_name, (times, args, arrays) in engine.calls(name, parameters).items():
                planned[program_name] = Planned(
                    engine.programs[program_name],
                    role,
                    args,
                    arrays,
                    runs=calls * times,
                    unread=unread.get(program_name, 0.0),
                    **loops.get(step_of(program_name), {}),
                )
        all_layers = range(engine.model.architecture.num_layers)
        planned["decode"] = replace(
            planned["decode"],
            weights_read=chunk,
            keys_read=chunk * self._live_bytes(engine, all_layers),
        )
        return planned

    def _decode_loops(self, engine: Engine, chunk: float) -> dict[str, Any]:
        """Returns what is assumed of decoding's loops and kernel, as fields of `Planned`: how often
        its two nested loops run, over the tokens of a dispatch (`chunk`) and over blocks of keys,
        and the share of all keys that the kernel reads. The second loop's number is the mean of the
        loops over a prompt's and over a completion's keys in all layers without the kernel, 0 if
        none needs one. Assumes the longest prompts and completions, of which the kernel's share
        counts half of a completion (`_live_bytes`)."""
        model = engine.model
        by_kernel = []  # numbers of the layers that decode by the kernel
        num_loops = 0
        num_blocks = 0.0
        for number, layer in enumerate(model.architecture.layers_in_order):
            if layer.mixer != "attention":
                continue
            if decodes_by_kernel(model, layer):
                by_kernel.append(number)
                continue
            blocks = self._decode_blocks(model, layer)
            num_loops += len(blocks)
            num_blocks += sum(blocks)
        found: dict[str, Any] = {"assumed_trips": (chunk, num_blocks / max(1, num_loops))}
        if by_kernel:
            first = model.architecture.layer(by_kernel[0])
            block = PAGE if by_pages(model, first) else KEY_BLOCK
            caches = engine.state_shapes().caches
            read = [_cache_read_by(model, caches, number) for number in by_kernel]
            all_keys = bytes_per_device(read)
            found["kernel_share"] = self._live_bytes(engine, by_kernel, block) / all_keys
        return found

    def _decode_blocks(self, model: Model, layer: Layer) -> list[float]:
        """Returns the rounds of the loops over blocks of keys in which a kind of layer decodes
        without a kernel: over the longest prompt's and, in the mean, over the longest completion's.
        Keys in a single block need no loop."""
        sampling = self.config.sampling
        platform = model.role.platform
        parts = model.key_parts_of(layer)
        # -(-a // b) rounds up. A device holds one part of the keys of each head.
        prompt_keys = -(-sampling.max_prompt_tokens // parts)
        completion_keys = -(-sampling.max_completion_tokens // parts)
        if is_ring(model, layer):
            prompt_keys = ring_size(layer.window, 0, prompt_keys)
            completion_keys = ring_size(layer.window, RING_SLACK, completion_keys)
        prompt_blocks = -(-prompt_keys // keys_at_once(platform, prompt_keys))
        completion_blocks = -(-completion_keys // keys_at_once(platform, completion_keys))
        loops: list[float] = []
        if prompt_blocks > 1:
            loops.append(prompt_blocks)
        # A completion's own keys grow from one block to all.
        if completion_blocks > 1:
            loops.append((completion_blocks + 1) / 2)
        return loops

    def _prefill_trips(self, engine: Engine) -> tuple[float, ...]:
        """Returns how often the two nested loops of prefilling run: (over the chunks of a long
        prompt, over blocks of keys); empty if the longest prompt is one chunk. The second number is
        a mean over chunks and layers: later chunks read more blocks, up to those of a window."""
        prefill_chunk = engine.scheduler.prefill_chunk
        num_chunks = -(-self.config.sampling.max_prompt_tokens // prefill_chunk)
        if num_chunks == 1:
            return ()
        block = block_size(prefill_chunk, self.roles.sampler.platform)
        num_blocks = num_chunks * prefill_chunk // block
        # Each block of queries reads itself, and the blocks of keys before it that it reaches.
        by_layer = []
        for layer in engine.model.architecture.layers_in_order:
            if layer.mixer != "attention":
                continue
            window = engine.model.window_of(layer)
            most_before = -(-(window - 1) // block) if window else num_blocks
            read = [1 + min(number, most_before) for number in range(num_blocks)]
            by_layer.append(statistics.mean(read))
        return num_chunks, statistics.mean(by_layer)

    def _live_bytes(self, engine: Engine, layers: Iterable[int], block: int = 1) -> float:
        """Returns the bytes of keys, values and states of some layers, given by their numbers, that
        a device reads to sample one token in every slot, keys rounded up to whole blocks of `block`
        tokens. Assumes the longest prompts, and that completions are half done; their length is the
        mean one, if it is set, else the greatest."""
        sampling = self.config.sampling
        model = engine.model
        prompt = block * -(-sampling.max_prompt_tokens // block)
        mean = sampling.mean_completion_tokens or sampling.max_completion_tokens  # 0: not set
        completion = (mean + block - 1) / 2
        num_slots = engine.num_rows * engine.siblings
        num_bytes = 0.0
        caches = engine.state_shapes().caches
        for number in layers:
            cache = _cache_read_by(model, caches, number)
            of_prompts, of_slots = cache.shares_read(prompt, completion, num_slots)
            num_bytes += of_prompts * bytes_per_device(cache.of_prompts)
            num_bytes += of_slots * bytes_per_device(cache.of_slots)
        return num_bytes

    def _learning(self) -> dict[str, Planned]:
        """Returns name -> program of the trainer, in the order in which they run: `score` if it
        needs old log-probs, `reference` and `teacher` if the job has these models, `accumulate` and
        `apply`, and with a critic `score critic`, `accumulate critic` and `apply critic`. `runs`
        are those of a whole step, of all its epochs and mini-batches."""
        config = self.config
        algorithm = config.algorithm
        role = self.roles.trainer
        state = self.job.state_shapes
        batch = self._batch(role)
        batch_bytes = bytes_per_device(batch)
        prompts = config.batch.prompts_per_step
        scored = self._runs(prompts)  # scoring takes whole steps, not mini-batches
        programs: dict[str, Any] = self.learner.programs
        planned = {}
        if needs_old_logprobs(algorithm, config.teacher.scores_samples):
            planned["score"] = Planned(
                programs["score"],
                role,
                (state.parameters, batch),
                runs=scored,
                batch_bytes=batch_bytes,
                **self._row_loops(self.model),
            )
        runs_of_scorers = dict.fromkeys(self._scorers(), scored)
        targets = None
        teacher = self._scorers().get("teacher")
        if config.teacher.gives_distributions:
            if teacher:
                runs_of_scorers["teacher"] = algorithm.num_epochs * scored
            # A server is none of the scorers. Its tokens are the policy's.
            of_teacher = (teacher or self.model).architecture
            targets = target_shapes(config.teacher, of_teacher, self.learner.model, self.shape)
        for name, model in self._scorers().items():
            scorer_batch = replace(self._batch(model.role), experts=None)
            if name == "teacher" and config.teacher.hint:
                scorer_batch = replace(scorer_batch, read_at=scorer_batch.before)
            weights = param_shapes(param_specs(model.architecture), model.role, model.dtype)
            planned[name] = Planned(
                self._scorer_program(name, model),
                model.role,
                (weights, scorer_batch),
                runs=runs_of_scorers[name],
                batch_bytes=bytes_per_device(scorer_batch),
                **self._row_loops(model),
            )
        total = programs["zero"].eval_shape()  # shapes of the sums that `accumulate` adds to
        # Mini-batches differ by at most one prompt.
        minibatches = algorithm.num_minibatches
        num_larger = prompts % minibatches  # this many mini-batches have one prompt more
        num_smaller = minibatches - num_larger
        runs_of_smaller = self._runs(prompts // minibatches)
        runs_of_larger = self._runs(prompts // minibatches + 1)
        runs_of_epoch = num_smaller * runs_of_smaller + num_larger * runs_of_larger
        value_head = None
        trained_batch = batch
        if self.job.critic is not None and self.job.critic.shares_layers:
            assert state.critic is not None, "a job with a critic has its state"
            value_head = state.critic.trainable.lm_head
            trained_batch = _with_value_targets(batch)
        planned["accumulate"] = Planned(
            programs["accumulate"],
            role,
            (
                total,
                state.trainable,
                state.frozen,
                trained_batch,
                state.loss_scale,
                targets,
                value_head,
            ),
            runs=algorithm.num_epochs * runs_of_epoch,
            batch_bytes=bytes_per_device(trained_batch) + self._target_bytes(targets),
            **self._row_loops(self.model),
        )
        moments_in_flight = 0
        if role.platform == "gpu":
            moments_in_flight = self._moments_in_flight(state.trainable)
        planned["apply"] = Planned(
            programs["apply"],
            role,
            (total.loss, state.trainable, state.updates, state.loss_scale),
            {"gradient": total.gradient, "optimizer_state": state.optimizer},
            runs=algorithm.num_epochs * minibatches,
            batch_bytes=moments_in_flight,
        )
        critic = self.job.critic
        if critic is not None:
            planned |= self._learning_of_critic(critic, state, batch, planned, scored)
        return planned

    def _scorer_program(self, name: str, model: Model) -> Program:
        """Returns the program of one of the `_scorers`: of a teacher whose distributions are
        compared with the policy's the one that computes them."""
        section = self.config.teacher
        if name != "teacher" or not section.gives_distributions:
            return score_program(model, Objective.chunk_elements)
        if section.divergence == "full":
            return states_program(model)
        vocab_size = shared_vocab_size(model.architecture, self.model.architecture)
        return top_program(model, min(section.top_k, vocab_size), vocab_size)

    def _target_bytes(self, targets: TeacherStates | TeacherTop | None) -> int:
        """Returns the bytes on a device of what a teacher says of a micro-batch, without its head,
        which is one of the items of the budget."""
        if isinstance(targets, TeacherStates):
            return bytes_per_device(targets.states)
        return bytes_per_device(targets)

    def _learning_of_critic(
        self,
        critic: Critic,
        state_of_policy: TrainState,
        policy_batch: LearnerBatch,
        of_policy: Mapping[str, Planned],
        scored: float,
    ) -> dict[str, Planned]:
        """Returns name -> program of the critic, each like the policy's of the same name:
        `state_of_policy`, `policy_batch` and `of_policy` are the policy's. A critic that shares the
        policy's layers has no `accumulate critic`. `scored`: how often it computes values in a
        step."""
        role = self.roles.trainer
        learner = critic.learner
        batch = critic.read(policy_batch)
        with_targets = _with_value_targets(batch)
        state = learner.shapes()
        programs: dict[str, Any] = learner.programs
        total = programs["zero"].eval_shape()
        loops = self._row_loops(learner.model)
        planned = {
            "score critic": Planned(
                programs["score"],
                role,
                (critic.parameters(state_of_policy), batch),
                runs=scored,
                batch_bytes=bytes_per_device(batch),
                **loops,
            )
        }
        if not critic.shares_layers:
            planned["accumulate critic"] = Planned(
                programs["accumulate"],
                role,
                (total, state.trainable, state.frozen, with_targets, state.loss_scale, None, None),
                runs=of_policy["accumulate"].runs,
                batch_bytes=bytes_per_device(with_targets),
                **loops,
            )
        planned["apply critic"] = Planned(
            programs["apply"],
            role,
            (total.loss, state.trainable, state.updates, state.loss_scale),
            {"gradient": total.gradient, "optimizer_state": state.optimizer},
            runs=of_policy["apply"].runs,
            batch_bytes=of_policy["apply"].batch_bytes,
        )
        return planned

    def _moments_in_flight(self, trainable: Parameters) -> int:
        """Returns the bytes of Adam's moments that are on a device at a time during an update with
        `optimizer.offload`; 0 without it. These are the moments of one layer, the largest, and of
        all weights outside of the layers. Needed for a GPU that is only described: JAX knows no
        host memory there, and compiles the update as if all moments stayed on the device."""
        section = self.config.optimizer
        if not section.offload:
            return 0
        stacks = self.model.architecture.stacks
        of_layers = []
        for stack, block in zip(stacks, stacked_blocks(trainable.blocks), strict=True):
            of_layers.append(bytes_per_device(block) // len(stack.numbers))
        masters = bytes_per_device(replace(trainable, blocks=None)) + max(of_layers)
        of_a_moment = masters
        if section.moments == "bfloat16":  # master weights are float32
            of_a_moment = masters // 2
        return 2 * 2 * of_a_moment  # two moments, in and out

    def _runs(self, prompts: int) -> float:
        """Returns how often a trainer's program must run for the groups of `prompts` prompts, as a
        float: the program of the full shape stands for all shapes, so a micro-batch of a shorter
        one counts as a part of a run."""
        return packed_tokens(self.config, self.shapes, prompts) / self.shape.tokens

    def _row_loops(self, model: Model) -> dict[str, Any]:
        """Returns what is assumed of attention in the trainer's programs, as fields of `Planned`,
        with the longest prompt and completion: the rounds of its loop, how many blocks of keys are
        read for each block of queries; and of kernels, which declare the cost of all blocks, the
        share that they read, at most 1. Both are means over the layers; a field is left out if no
        layer has such a loop or kernel. `model`: the trainer's or a scorer's, on its own role."""
        size = self.shape.length
        context = model.role.context
        platform = model.role.platform
        prompt = self.config.sampling.max_prompt_tokens
        completion = self.config.sampling.max_completion_tokens
        shares = []
        rounds = []
        for layer in model.architecture.layers_in_order:
            if layer.mixer != "attention":
                continue
            # The last part of a row reads most, and the devices with the others wait for it.
            of_last_part = 1 - 0.5 / context
            reach = min(layer.window or size, prompt + completion * of_last_part)
            kind = attention_kind(model, self.shape.rows, size, layer)
            if kind == "pallas":  # each block of queries reads as many as it needs
                shares.append(min(1.0, (reach + self._kernel_block(model, layer)) / size))
            elif kind == "blocked":
                # Each block of queries reads as many blocks as the one that needs most. The
                # prompt's keys and the completion's may each begin and end within a block: one
                # block more for each.
                block = block_size(size // context, platform)
                most = min(layer.window or size, prompt + completion)
                rounds.append(min(size / block, most / block + 2))
        found: dict[str, Any] = {}
        if shares:
            found["kernel_share"] = statistics.mean(shares)
        if rounds:
            found["assumed_trips"] = (statistics.mean(rounds),)
        return found

    def _kernel_block(self, model: Model, layer: Layer) -> int:
        """Returns the tokens of a block in the kernels that compute a kind of layer for rows."""
        if model.role.platform == "tpu":
            from shoal.model.attention.tpu import block_size as tpu_block_size

            return tpu_block_size(self.shape.length)
        from shoal.model.attention.gpu import block_size as gpu_block_size

        return gpu_block_size(model.architecture.head_dim_of(layer), model.dtype)

    def _publishing(self) -> dict[str, Planned]:
        """Returns the program `publish`, which copies the largest array from the trainer to the
        sampler. A run has one such program for each array; this one counts as often as all arrays
        together are larger than it. `runs` is the mean of a step, and no whole number: with
        `train.weight_sync_interval` not every step publishes. {} if publication copies nothing."""
        pairs = self._copied()
        if not pairs:
            return {}
        trainer_array, sampler_array = max(pairs, key=lambda pair: bytes_per_device(pair[1]))
        if isinstance(sampler_array, Quantised):  # quantised before it is copied
            sampler_array = sampler_array.values
            trainer_array = trainer_array.update(dtype=sampler_array.dtype)
        trainer_array = trainer_array.update(
            sharding=in_order_of(trainer_array.sharding, sampler_array.sharding)
        )
        program = publication_program(
            self.model.on(self.roles.sampler),
            trainer_array.sharding,
            sampler_array.sharding,
            sampler_array.dtype,
        )
        all_bytes = sum(bytes_per_device(copied) for _, copied in pairs)
        num_arrays = all_bytes / bytes_per_device(sampler_array)
        return {
            "publish": Planned(
                program,
                self.roles.trainer,
                # The second argument: the array's number, for its checksum.
                (trainer_array, jax.ShapeDtypeStruct((), jnp.uint32)),
                runs=num_arrays / self.config.train.weight_sync_interval,
            )
        }

    def _batch(self, role: Role) -> LearnerBatch:
        """Returns the shapes of a micro-batch of the full shape on a role's devices: [rows, tokens
        of a row], rows split over the devices, and their number rounded up to a multiple of
        `role.batch_shards`. Nothing is allocated. `support_ids` is None unless the trainer needs
        the tokens that were sampled from, `experts` unless it replays routes."""
        shape = self.shape
        rows_to_add = -shape.rows % role.batch_shards  # up to the next multiple; 0 if it is one
        grid = (shape.rows + rows_to_add, shape.length)

        def rows(dtype: Any, sizes: tuple[int, ...] = grid) -> jax.ShapeDtypeStruct:
            """Returns the shape of an array of `sizes` whose first dimension is rows, split over
            the devices."""
            sharding = role.sharding(("batch", *(None,) * (len(sizes) - 1)), sizes)
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

        integers = rows(jnp.int32)
        floats = rows(jnp.float32)
        support = max_support(self.config)
        support_ids = None
        if support:
            support_ids = rows(jnp.int32, (*grid, support))
        experts = None
        route_shape = self.model.architecture.route_shape
        if route_shape and replays_routes(self.config):
            experts = rows(jnp.int16, (*grid, *route_shape))
        return LearnerBatch(
            tokens=integers,
            position=integers,
            before=integers,
            segment=integers,
            prompt=integers,
            loss_mask=rows(jnp.bool_),
            weight=floats,
            advantage=floats,
            sampler_logprobs=floats,
            old_logprobs=floats,
            ref_logprobs=floats,
            temperature=jax.ShapeDtypeStruct((), jnp.float32, sharding=role.replicated),
            support_ids=support_ids,
            experts=experts,
        )

    # ---- in figures

    def budget(self) -> Budget:
        """Returns the budget of the job before anything is compiled: what `shoal train` knows too,
        and the programs, machines and step that only the plan knows. It has no costs and no advice.
        `memory` is what the kind of devices leaves to programs, if that is known."""
        budget = job_budget(self.job)
        memory = budget.memory
        if self.accelerator and self.accelerator.usable_bytes:
            memory = self.accelerator.usable_bytes
        programs = {}
        for name, planned in self.programs().items():
            programs[name] = StepProgram(planned.role.name, planned.runs)
        machines = 1
        if self.topology:
            machines = self.topology.machines
        return replace(
            budget,
            memory=memory,
            machines=machines,
            programs=programs,
            step=self._planned_step(),
        )

    def _planned_step(self) -> PlannedStep:
        """Returns what only a plan knows of a step: the devices and hosts in words and numbers, why
        a process on each host is impossible if it is, and the step's tokens, FLOPs and published
        bytes. All completions have the greatest length. `published_bytes` is 0 if trainer and
        sampler share devices."""
        config = self.config
        if self.topology:
            devices = self.topology.describe()
            hosts = self.topology.hosts(self.job.devices)
        else:
            devices = f"the {count(len(self.job.devices), 'device')} here"
            hosts = dict.fromkeys(self.job.devices, 0)  # device -> number of its host
        prompts = config.batch.prompts_per_step
        prompt_tokens = config.sampling.max_prompt_tokens
        completions = [config.sampling.max_completion_tokens] * config.batch.group_size
        groups = [(prompt_tokens, completions)] * prompts
        published_bytes = 0
        if self.roles.disaggregated:
            published_bytes = bytes_per_device([own for _, own in self._copied()])
        return PlannedStep(
            devices=devices,
            hosts=len(set(hosts.values())),
            refusal=process_refusal(config.mesh, self.roles, hosts),
            sampled_tokens=prompts * sum(completions),
            prompt_tokens=prompts * prompt_tokens,
            model_flops=model_flops(
                self.architecture,
                groups,
                groups,
                config.algorithm.num_epochs,
                num_scorings(config.algorithm, config.teacher),
                critic_epochs(config.algorithm, config.critic),
            ),
            published_bytes=published_bytes,
            rates=self._rates(),
        )

    def _rates(self) -> DeviceRates | None:
        """Returns the speeds that the plan assumes of a device: measured ones if there is a
        calibration, else its maker's; None if its kind is unknown. `peak_flops` is always the
        maker's, for the type of the model; None if the maker states none for it."""
        device = self.accelerator
        if device is None:
            return None
        # The peak rate is the maker's, because a measured rate is no peak.
        maker = self.known or device
        return DeviceRates(
            peak_flops=maker.peaks.get(self.model.dtype.name),
            link=device.link,
            hbm=device.hbm,
            kernels=device.kernels,
            launch=device.launch,
            is_tpu=device.is_tpu,
            calibration=self.calibration,
        )


def _with_value_targets(batch: LearnerBatch) -> LearnerBatch:
    """Returns the shapes of a batch with what a critic learns of it."""
    of_tokens = batch.weight
    return replace(batch, targets=ValueTargets(of_tokens, of_tokens, of_tokens))


def _cache_read_by(model: Model, caches: Sequence[Cache], number: int) -> Cache:
    """Returns the cache that the layer with this number reads: its own, or that of the layer whose
    keys it reads."""
    layer = model.architecture.layer(number)
    return caches[number if layer.keys_of is None else layer.keys_of]


_NO_TOKENIZER: Any = SimpleNamespace(eos_ids=(0,), decode=None)
"""Stands in for a tokenizer, because costs do not depend on which tokens end a completion."""


def _idle_expert_bytes(engine: Engine, parameters: Parameters) -> float:
    """Returns the bytes, on a device, of the experts that no token of a step of decoding has. Of E
    experts, of which each token has k, n tokens in all slots of a replica have E (1 - (1 - k/E)^n)
    different ones in the mean, if each expert is chosen as often as the others."""
    experts = engine.model.architecture.experts
    if experts is None:
        return 0.0

    def is_experts(node: Any) -> bool:
        return isinstance(node, ExpertWeights)

    num_bytes = 0
    for node in jax.tree.leaves(parameters.blocks, is_leaf=is_experts):
        if is_experts(node):
            num_bytes += bytes_per_device((node.gate, node.up, node.down))
    tokens = engine.replica_rows * engine.siblings
    idle_share = (1 - experts.experts_per_token / experts.num_experts) ** tokens
    return num_bytes * idle_share
