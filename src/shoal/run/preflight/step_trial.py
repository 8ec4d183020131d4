"""A trial of one step: the run's own engine and learner, on the run's first prompts.

The sampler's log-probs are compared with the trainer's on the same tokens, and everything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from shoal.algorithm.advantage import nonzero_std
from shoal.algorithm.aggregation import token_weights
from shoal.config.algorithm_parts import AGGREGATIONS
from shoal.config.schema import Config
from shoal.model.tokenizer import Tokenizer
from shoal.rewards.pool import RewardPool
from shoal.rollout.group import make_group, sample_request
from shoal.rollout.publication import publish_to
from shoal.run.derived import max_support, micro_batch_shapes
from shoal.run.preflight.resident import ResidentPeak, children_bytes, process_bytes
from shoal.run.preflight.reward import score
from shoal.sampler.drain import run_until_idle
from shoal.sampler.engine import Engine
from shoal.tasks.task import Task
from shoal.trainer.batch import Shape, pack, unpack
from shoal.trainer.curriculum import TokenizedExample
from shoal.trainer.orbax import load_orbax
from shoal.trainer.step import Learner
from shoal.trainer.step_table import StepTable
from shoal.types import Completion, Group, GroupRequest, Params, Purpose, StopReason

SAMPLING_SECONDS = 20.0
"""Seconds of sampling, without compilation, after which the rest of the batch is cancelled."""
NUM_MICRO_BATCHES = 3
"""Micro-batches that are computed: the first warms up, the others are timed."""


class TimedProgram:
    """A jitted function that is compiled once a shape and reports the seconds and the memory this
    took.

    On a CPU, whose memory is this process's: `compile_bytes`, the most that a compilation took
    beside what was there before, and `code_bytes`, what stays of all."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: dict[Any, Any] = {}
        self.seconds = 0.0  # spent compiling
        self.compile_bytes, self.code_bytes = 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = tuple(
            (leaf.shape, str(np.dtype(leaf.dtype))) for leaf in jax.tree.leaves((args, kwargs))
        )
        if key not in self.compiled:
            started = time.perf_counter()
            with ResidentPeak() as peak:
                self.compiled[key] = self.function.lower(*args, **kwargs).compile()
            self.seconds += time.perf_counter() - started
            self.compile_bytes = max(self.compile_bytes, peak.bytes)
            self.code_bytes += peak.stays
        return self.compiled[key](*args, **kwargs)

    @property
    def extra_bytes(self) -> int:
        """The most memory that a call needs on a device besides its arguments: temporaries, and
        results that overwrite none. 0 if the compiler does not report it."""
        found = [
            analysis
            for program in self.compiled.values()
            if (analysis := program.memory_analysis())
        ]
        return max(
            (
                one.temp_size_in_bytes + max(0, one.output_size_in_bytes - one.alias_size_in_bytes)
                for one in found
            ),
            default=0,
        )


@dataclass
class StepTrial:
    """What was sampled, and how long sampling and updating took."""

    groups: list[Group]
    cancelled: int  # completions
    sample_seconds: float
    reward_seconds: float
    programs: dict[str, TimedProgram]
    shape: Shape
    num_batches: int = 0  # micro-batches of one pass over all groups
    accumulate_seconds: float = 0.0  # of one micro-batch
    apply_seconds: float = 0.0
    differences: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # |trainer's - sampler's log-prob|, by token
    entropy: float = 0.0
    skipped: bool = False  # the update had no finite gradient, and no smaller loss scale would help
    process_bytes: int = 0  # of this process in RAM without its arrays, when all programs had run
    worker_bytes: int = 0  # in RAM, of its children, among them the workers of rewards

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(c) for group in self.groups for c in group.completions])

    @property
    def truncated(self) -> float:
        """Share of completions that reached their limit."""
        return float(
            np.mean(
                [c.stop_reason == StopReason.LENGTH for g in self.groups for c in g.completions]
            )
        )

    @property
    def compile_seconds(self) -> float:
        return sum(program.seconds for program in self.programs.values())

    @property
    def nonzero_std(self) -> float:
        """Share of groups whose rewards differ."""
        return float(
            np.mean(
                [nonzero_std(group.rewards[None], group.valid[None])[0] for group in self.groups]
            )
        )

    @property
    def mean_reward(self) -> float:
        rewards = [float(r) for group in self.groups for r in group.rewards[group.valid]]
        return sum(rewards) / len(rewards) if rewards else float("nan")

    @property
    def padding(self) -> float:
        """Share of the tokens computed in the update that are padding."""
        real = sum(len(group.prompt_ids) for group in self.groups) + int(self.lengths.sum())
        return max(0.0, 1 - real / (self.num_batches * self.shape.tokens))


def try_step(
    config: Config,
    task: Task,
    tokenizer: Tokenizer,
    pool: RewardPool,
    engine: Engine,
    learner: Learner,
    parameters: Params,
    prompts: Sequence[TokenizedExample],
) -> StepTrial:
    """Samples the groups of the run's first step, as many as the engine holds at once, and makes
    part of an update on them. The weights that it gives are discarded."""
    for owner in (engine, learner):
        owner.programs = {name: TimedProgram(function) for name, function in owner.programs.items()}
    programs: dict[str, TimedProgram] = {**engine.programs, **learner.programs}  # type: ignore
    size, params = config.batch.group_size, config.sampling.params
    requests = [
        GroupRequest(Purpose.TRAIN, 0, 0, prompt.example, prompt.prompt_ids, size, params)
        for prompt in prompts[: engine.num_groups]
    ]
    engine.load(0, publish_to(engine.model, parameters))
    engine.submit([sample_request(request, id, config.seed) for id, request in enumerate(requests)])
    sampled, sample_seconds = _sample(engine, programs)
    engine.release_memory()
    siblings = [sampled[id] for id in range(len(requests))]
    texts = [
        [tokenizer.decode(completion.token_ids.tolist()) for completion in group]
        for group in siblings
    ]
    ids = [[completion.token_ids.tolist() for completion in group] for group in siblings]
    started = time.perf_counter()
    scores = score(pool, [request.example for request in requests], texts, ids)
    reward_seconds = time.perf_counter() - started
    groups = [
        make_group(task, request, siblings[number], texts[number], scores, number)
        for number, request in enumerate(requests)
    ]
    cancelled = sum(
        completion.stop_reason == StopReason.CANCELLED for group in siblings for completion in group
    )
    shape = micro_batch_shapes(config, learner.model.role.row_shards)[0]
    trial = StepTrial(groups, cancelled, sample_seconds, reward_seconds, programs, shape)
    _update(trial, config, learner, parameters)
    load_orbax()  # a library that the run loads for its checkpoints
    trial.process_bytes, trial.worker_bytes = process_bytes(), children_bytes()
    return trial


def _sample(
    engine: Engine, programs: dict[str, TimedProgram]
) -> tuple[dict[int, list[Completion]], float]:
    """Completions by request, and the seconds without compilation."""

    def clock() -> float:
        return time.perf_counter() - sum(program.seconds for program in programs.values())

    found: dict[int, list[Completion]] = {}
    started, seconds = clock(), 0.0
    while engine.progress and seconds <= SAMPLING_SECONDS:
        found |= engine.step()
        seconds = clock() - started
    for id in list(engine.progress):
        engine.cancel(id)
    return found | dict(run_until_idle(engine)), seconds


def _update(trial: StepTrial, config: Config, learner: Learner, parameters: Params) -> None:
    """Part of an update on the trial's groups, those without variance included: times, and the
    trainer's log-probs."""
    table = StepTable.of(trial.groups, config.algorithm)
    groups = [
        replace(group, valid=np.ones(group.size, bool)) for group in trial.groups
    ]  # log-probs of each completion
    valid = np.ones_like(table.valid)
    weights = token_weights(
        AGGREGATIONS[config.algorithm.aggregation].load(),
        table.lengths,
        valid,
        valid,
        config.algorithm.aggregation_tokens or config.sampling.max_completion_tokens,
    )
    sampled = {
        (p, g): c.logprobs
        for p, group in enumerate(groups)
        for g, c in enumerate(group.completions)
    }
    batches = pack(
        groups,
        range(len(groups)),
        np.nan_to_num(table.advantages),
        weights,
        [trial.shape],
        config.sampling.temperature,
        old_logprobs=sampled,
        ref_logprobs=sampled,
        max_support=max_support(config),
    )
    trial.num_batches = len(batches)
    state, total, seconds, differences = learner.init(parameters), None, [], []
    for number in range(max(2, min(NUM_MICRO_BATCHES, len(batches)))):
        batch = batches[number % len(batches)]
        started = time.perf_counter()
        total, logprobs = learner.accumulate(total, state, batch.arrays)
        found = unpack([batch], [np.asarray(logprobs)])
        seconds.append(time.perf_counter() - started)
        differences += [np.abs(values - sampled[key]) for key, values in found.items()]
    assert total is not None
    trial.accumulate_seconds = min(seconds[1:])
    trial.differences = np.concatenate(differences)
    value, count = jax.device_get(total.sums["entropy"])
    trial.entropy = float(value) / max(float(count), 1.0)
    started = time.perf_counter()
    _, result = learner.apply(state, total)
    trial.skipped = bool(result.skipped) and not result.overflow
    trial.apply_seconds = time.perf_counter() - started - trial.programs["apply"].seconds
