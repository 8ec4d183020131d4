"""A trial of one step: the very engine and the very trainer of a run, on its first prompts.

What the sampler said of its tokens is compared with what the trainer says of them, and everything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from shoal.algorithm.advantage import nonzero_std
from shoal.algorithm.aggregation import token_weights
from shoal.config.schema import Config
from shoal.model.tokenizer import Tokenizer
from shoal.rewards.judge import Judge
from shoal.rollout.group import make_group, sample_request
from shoal.rollout.publication import publish_to
from shoal.run.learning import max_support
from shoal.run.memory import Program
from shoal.run.probe import judged
from shoal.sampler.engine import Engine
from shoal.tasks.task import Task
from shoal.trainer.batch import Shape, choose_shape, pack
from shoal.trainer.curriculum import Prepared
from shoal.trainer.loop import sampling_params
from shoal.trainer.step import Learner
from shoal.trainer.update import StepTable
from shoal.types import Completion, Group, GroupRequest, Params, Purpose, StopReason

SAMPLING_SECONDS = 20.0
"""After this time of drawing, compilation apart, the rest of the batch is cancelled."""
NUM_MICRO_BATCHES = 3
"""Micro-batches that are computed: the first warms up, the others are timed."""


@dataclass
class Trial:
    """What was drawn and how long it took."""

    groups: list[Group]
    cancelled: int  # completions
    sample_seconds: float
    reward_seconds: float
    shape: Shape | None = None
    num_batches: int = 0  # micro-batches of all groups, of one pass over them
    accumulate_seconds: float = 0.0  # one micro-batch
    apply_seconds: float = 0.0
    differences: np.ndarray = field(default_factory=lambda: np.zeros(0))  # |trainer's - sampler's log-prob|, by token
    entropy: float = 0.0
    skipped: bool = False  # the update had no finite gradient
    programs: dict[str, Program] = field(default_factory=dict)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(c) for group in self.groups for c in group.completions])

    @property
    def cut(self) -> float:
        """Share of completions that reached their limit."""
        return float(np.mean([c.stop_reason == StopReason.LENGTH for g in self.groups for c in g.completions]))

    @property
    def compile_seconds(self) -> float:
        return sum(program.seconds for program in self.programs.values())

    @property
    def nonzero_std(self) -> float:
        """Share of groups whose rewards differ."""
        return float(np.mean([nonzero_std(group.rewards[None], group.valid[None])[0] for group in self.groups]))

    @property
    def padding(self) -> float:
        """Share of the tokens computed in the update that are padding."""
        assert self.shape is not None
        real = sum(len(group.prompt_ids) for group in self.groups) + int(self.lengths.sum())
        return max(0.0, 1 - real / (self.num_batches * self.shape.tokens))


def watch_engine(engine: Engine, programs: dict[str, Program]) -> None:
    """Has the engine's compiled steps tell what they take."""
    for name in ("_make_slots", "_prefill", "_decode"):
        _watch(engine, name, programs)


def watch_learner(learner: Learner, programs: dict[str, Program]) -> None:
    for name in ("_init", "_zero", "_accumulate", "_apply"):
        _watch(learner, name, programs)


def _watch(owner: Any, attribute: str, programs: dict[str, Program]) -> None:
    name = attribute.removeprefix("_")
    programs[name] = Program(getattr(owner, attribute), name, time.perf_counter)
    setattr(owner, attribute, programs[name])


# ---- sampling


def prepare_decode(engine: Engine, parameters: Params, programs: dict[str, Program], pool: Executor) -> None:
    """Starts to compile the decoder in another thread: prefill is compiled meanwhile."""
    put = partial(jax.tree.map, lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place))
    slots = put(jax.eval_shape(programs["make_slots"].function), engine._layout)
    programs["decode"].prepare(pool, parameters, slots=slots, stopped=engine._stopped)


def prepare_apply(learner: Learner, programs: dict[str, Program], pool: Executor) -> None:
    """The same for the optimizer: the gradient is compiled meanwhile."""
    state = learner.shapes()
    loss = jax.ShapeDtypeStruct((), np.float32, sharding=learner.model.role.replicated)
    programs["apply"].prepare(pool, loss, state.trainable, state.updates, gradient=state.trainable,
                              moments=state.optimizer)


def sample(config: Config, task: Task, tokenizer: Tokenizer, judge: Judge, engine: Engine, parameters: Params,
           prompts: Sequence[Prepared], pool: Executor) -> Trial:
    """The groups of the run's first step, as many as the slots hold at once, with their rewards."""
    programs: dict[str, Program] = {}
    watch_engine(engine, programs)
    size, params = config.batch.group_size, sampling_params(config.sampling)
    requests = [GroupRequest(Purpose.TRAIN, 0, 0, prompt.example, prompt.prompt_ids, size, params)
                for prompt in prompts[: engine.num_groups]]
    engine.load(0, publish_to(engine.model, parameters))
    prepare_decode(engine, engine.parameters, programs, pool)
    engine.submit([sample_request(request, id, config.seed) for id, request in enumerate(requests)])
    drawn, cancelled, seconds = _draw(engine, programs)
    engine.release_memory()
    started = time.perf_counter()
    siblings = [[drawn[id, index] for index in range(size)] for id in range(len(requests))]
    texts = [[tokenizer.decode(completion.token_ids.tolist()) for completion in group] for group in siblings]
    ids = [[completion.token_ids.tolist() for completion in group] for group in siblings]
    scores = judged(judge, [request.example for request in requests], texts, ids)
    reward_seconds = time.perf_counter() - started
    groups = [make_group(task, request, siblings[number], texts[number], scores, number)
              for number, request in enumerate(requests)]
    return Trial(groups, cancelled, seconds, reward_seconds, programs=programs)


def _draw(engine: Engine, programs: dict[str, Program]) -> tuple[dict[tuple[int, int], Completion], int, float]:
    """Completions by (request, index), how many were cancelled, and the seconds without compilation."""

    def clock() -> float:
        return time.perf_counter() - sum(program.seconds for program in programs.values())

    found: dict[tuple[int, int], Completion] = {}
    started, cancelled = clock(), 0
    while not engine.idle:
        while engine.step():
            pass
        found |= {(completion.request_id, completion.index): completion for completion in engine.collect()}
        if clock() - started > SAMPLING_SECONDS and engine.progress:
            for id in list(engine.progress):
                engine.cancel(id)
    cancelled = sum(completion.stop_reason == StopReason.CANCELLED for completion in found.values())
    return found, cancelled, clock() - started


# ---- learning


def learn(trial: Trial, config: Config, learner: Learner, parameters: Params, pool: Executor) -> None:
    """Some of an update on the trial's groups, those without variance included: times and the trainer's log-probs.
    The weights that it makes are thrown away."""
    watch_learner(learner, trial.programs)
    prepare_apply(learner, trial.programs, pool)
    table = StepTable.of(trial.groups, config.algorithm)
    valid = np.ones_like(table.valid)
    everyone = [_all_valid(group) for group in trial.groups]
    prompts = -(-config.batch.prompts_per_step // config.algorithm.num_minibatches)
    shape = trial.shape = choose_shape(everyone, prompts, config.batch.group_size, config.batch.micro_tokens,
                                       learner.model.role.row_shards)
    weights = token_weights(config.algorithm.aggregation, table.lengths, valid, valid,
                            config.algorithm.aggregation_tokens or config.sampling.max_completion_tokens)
    own = {(p, g): c.logprobs for p, group in enumerate(everyone) for g, c in enumerate(group.completions)}
    batches = pack(everyone, range(len(everyone)), np.nan_to_num(table.advantages), weights, shape,
                   config.sampling.temperature, old_logprobs=own, ref_logprobs=own, max_support=max_support(config))
    trial.num_batches = len(batches)
    state, total, seconds, differences = learner.init(parameters), None, [], []
    for number in range(max(2, min(NUM_MICRO_BATCHES, len(batches)))):
        batch = batches[number % len(batches)]
        started = time.perf_counter()
        total, lp = learner.accumulate(total, state, batch.arrays)
        found = batch.unpack(np.asarray(lp))
        seconds.append(time.perf_counter() - started)
        differences += [np.abs(values - own[key]) for key, values in found.items()]
    assert total is not None
    trial.accumulate_seconds = min(seconds[1:])
    trial.differences = np.concatenate(differences)
    value, count = jax.device_get(total.sums["entropy"])
    trial.entropy = float(value) / max(float(count), 1.0)
    started, compiled = time.perf_counter(), trial.programs["apply"].seconds
    _, applied = learner.apply(state, total)
    trial.skipped = bool(applied.skipped)
    trial.apply_seconds = time.perf_counter() - started - (trial.programs["apply"].seconds - compiled)


def _all_valid(group: Group) -> Group:
    """The group with all its siblings: the trainer's log-probs are asked of each."""
    return replace(group, valid=np.ones(group.size, bool))
