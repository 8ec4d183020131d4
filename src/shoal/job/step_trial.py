"""Tries one step of a run: samples and trains on its first prompts with the run's own engine and
learner, and estimates from that the memory and the time of the whole run.

The sampler's log-probs are compared with the trainer's on the same tokens.
"""

from __future__ import annotations

import gc
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.algorithm.advantage import nonzero_std
from shoal.algorithm.aggregation import token_weights
from shoal.budget.advice import Describe, advise
from shoal.budget.budget import LARGEST, TIGHT, Budget, ProgramCost
from shoal.budget.memory import AvailableMemory
from shoal.budget.shapes import micro_batch_shapes
from shoal.chat.tokenizer import Tokenizer
from shoal.checks.reward import score
from shoal.config.choices import AGGREGATIONS
from shoal.config.derived import max_support, num_updates, replays_routes
from shoal.config.train import Config
from shoal.mesh import return_freed_memory
from shoal.model.architecture import Architecture
from shoal.protocols import GroupRequest
from shoal.records import Completion, Group, Params, Purpose, StopReason
from shoal.rewards.pool import RewardPool
from shoal.rollout.ledger import make_group, sample_request
from shoal.sampler.engine import Engine, run_until_idle
from shoal.sampler.scheduler import prompt_bucket
from shoal.tasks.task import Task
from shoal.text import seconds_text
from shoal.trainer.batch import (
    BatchLayout,
    MicroBatch,
    Shape,
    TokenTerms,
    ValueTargets,
    pack,
    unpack,
)
from shoal.trainer.critic import Critic
from shoal.trainer.own_advantage import OwnAdvantage
from shoal.trainer.prompts import TokenizedExample
from shoal.trainer.schedule import schedule_of, step_seconds
from shoal.trainer.scorers import target_shapes
from shoal.trainer.step import GradientSum, Learner, TrainState
from shoal.trainer.step_table import StepTable
from shoal.trainer.update import critic_epochs, needs_all_groups, num_scorings
from shoal.weights.orbax import load_orbax
from shoal.weights.sampler_copy import publish_to

SAMPLING_SECONDS = 20.0
"""Seconds of sampling, without compilation, after which the rest of the batch is cancelled."""


NUM_MICRO_BATCHES = 3
"""Number of micro-batches that are computed; the first warms up, the others are timed."""


class TimedProgram:
    """A jitted function that is compiled once for each shape of its arguments and measures the
    seconds and the memory that compiling takes.

    On a CPU, whose memory is that of this process: `compile_bytes`, the most that a compilation
    took in passing, and `code_bytes`, what all of them left.
    """

    def __init__(self, function: Any) -> None:
        """`function`: what `jax.jit` returned, or a `Program`. Nothing is compiled yet."""
        self.function = function
        self.compiled: dict[Any, Any] = {}
        self.seconds = 0.0  # spent compiling
        self.compile_bytes, self.code_bytes = 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function and returns its result, which may still be computed. If it has not
        been called with these shapes before, compiles it first and adds the seconds and bytes of
        that to this object's."""
        leaves = jax.tree.leaves((args, kwargs))
        key = tuple((leaf.shape, str(np.dtype(leaf.dtype))) for leaf in leaves)
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
        """The most bytes, of all shapes that were compiled, that a call needs on a device besides
        its arguments: temporaries, and results that do not overwrite an argument. 0 if the compiler
        does not report them."""
        most = 0
        for program in self.compiled.values():
            report = program.memory_analysis()
            if report:
                results = max(0, report.output_size_in_bytes - report.alias_size_in_bytes)
                most = max(most, report.temp_size_in_bytes + results)
        return most


@dataclass
class StepTrial:
    """What the trial of a step sampled, and what it measured of sampling, rewards and the
    update."""

    groups: list[Group]
    cancelled: int  # completions that were cancelled before they ended
    sample_seconds: float
    reward_seconds: float
    programs: dict[str, TimedProgram]
    shape: Shape
    num_batches: int = 0  # micro-batches in one pass over all groups
    accumulate_seconds: float = 0.0  # for one micro-batch
    apply_seconds: float = 0.0
    # |trainer's - sampler's log-prob| of each token
    differences: np.ndarray = field(default_factory=lambda: np.zeros(0))
    entropy: float = 0.0
    # The gradient, of the policy or of a critic, was not finite, and no smaller loss scale would
    # help.
    skipped: bool = False
    critic_accumulate_seconds: float = 0.0  # for one micro-batch; 0 without a critic
    critic_apply_seconds: float = 0.0
    process_bytes: int = 0  # RAM of this process besides arrays, after all programs had run
    worker_bytes: int = 0  # RAM of its child processes, among them the workers of rewards

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each completion, of all groups one after the other."""
        return np.array([len(completion) for completion in self._completions()])

    def _completions(self) -> list[Completion]:
        """Returns the completions of all groups in one list."""
        completions: list[Completion] = []
        for group in self.groups:
            completions.extend(group.completions)
        return completions

    @property
    def truncated(self) -> float:
        """Share of completions that reached their limit of tokens."""
        reached = []
        for completion in self._completions():
            reached.append(completion.stop_reason == StopReason.LENGTH)
        return float(np.mean(reached))

    @property
    def compile_seconds(self) -> float:
        """Seconds spent compiling all programs."""
        return sum(program.seconds for program in self.programs.values())

    @property
    def nonzero_std(self) -> float:
        """Share of groups in which the rewards of valid completions differ; only these have a
        signal to learn from."""
        differs = []
        for group in self.groups:
            differs.append(nonzero_std(group.rewards[None], group.valid[None])[0])
        return float(np.mean(differs))

    @property
    def mean_reward(self) -> float:
        """Mean of the valid rewards; NaN if there is none."""
        rewards: list[float] = []
        for group in self.groups:
            rewards.extend(float(reward) for reward in group.rewards[group.valid])
        if not rewards:
            return float("nan")
        return sum(rewards) / len(rewards)

    @property
    def padding(self) -> float:
        """Share of padding among the tokens that the update computes; a prompt counts once for its
        group, and the share is at least 0."""
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
    own_advantage: OwnAdvantage | None = None,
    teachers: Sequence[Architecture] = (),
    critic: Critic | None = None,
    critic_parameters: Params | None = None,
) -> StepTrial:
    """Tries the run's first step: samples a group of `batch.group_size` completions for each of
    `prompts`, up to as many as the engine holds at once and for at most SAMPLING_SECONDS, scores
    them, and computes the gradients of up to NUM_MICRO_BATCHES micro-batches. Returns what was
    measured; the updated weights are discarded. `own_advantage`: the user's function that
    `algorithm.advantage` names; None if that is an estimator. `teachers`: the architectures of all
    teachers, for the distributions of the first of which zeros stand in. `critic` and
    `critic_parameters`: the critic, which is updated too, and its first weights; None without one.
    Side effects: `engine` and the learners get programs that measure their compilation
    (`TimedProgram`), and the engine's caches are freed."""
    programs = _timed(engine) | _timed(learner)
    if critic is not None:
        for name, program in _timed(critic.learner).items():
            programs[f"{name} critic"] = program
    requests = []
    for prompt in prompts[: engine.num_groups]:
        requests.append(
            GroupRequest(
                purpose=Purpose.TRAIN,
                step=0,
                version=0,
                example=prompt.example,
                prompt_ids=prompt.prompt_ids,
                num_completions=config.batch.group_size,
                params=config.sampling.params,
            )
        )
    engine.load(0, publish_to(engine.model, parameters))
    sample_requests = []
    for request_id, request in enumerate(requests):
        sample_requests.append(sample_request(request, request_id, config.seed))
    engine.submit(sample_requests)
    sampled, sample_seconds = _sample(engine, programs)
    engine.release_memory()
    token_ids: list[list[list[int]]] = []
    texts: list[list[str]] = []
    cancelled = 0
    for request_id in range(len(requests)):
        siblings = sampled[request_id]
        of_group = [completion.token_ids.tolist() for completion in siblings]
        token_ids.append(of_group)
        texts.append([tokenizer.text(tokens) for tokens in of_group])
        for completion in siblings:
            if completion.stop_reason == StopReason.CANCELLED:
                cancelled += 1
    started = time.perf_counter()
    scores = score(pool, [request.example for request in requests], texts, token_ids)
    reward_seconds = time.perf_counter() - started
    groups = []
    for number, request in enumerate(requests):
        groups.append(
            make_group(
                task=task,
                request=request,
                completions=sampled[number],
                texts=texts[number],
                scores=scores,
                position=number,
            )
        )
    shape = micro_batch_shapes(config, learner.model.role.row_shards)[0]
    trial = StepTrial(
        groups=groups,
        cancelled=cancelled,
        sample_seconds=sample_seconds,
        reward_seconds=reward_seconds,
        programs=programs,
        shape=shape,
    )
    table = StepTable.of(groups, config.algorithm, own_advantage=own_advantage)
    state = learner.init(parameters)
    if critic is not None:
        state = replace(state, critic=critic.learner.init(critic_parameters))
    batch, total = _update(trial, table, config, learner, state, teachers, critic is not None)
    if critic is not None:
        _update_critic(trial, batch, critic, state, total)
    load_orbax()  # a run loads this library for its checkpoints, so its memory counts
    trial.process_bytes, trial.worker_bytes = process_bytes(), children_bytes()
    return trial


def _timed(owner: Engine | Learner) -> dict[str, TimedProgram]:
    """Puts programs that measure their compilation in the place of an engine's or a learner's, and
    returns them by name."""
    timed = {name: TimedProgram(function) for name, function in owner.programs.items()}
    owner.programs = timed  # type: ignore
    return timed


def _sample(
    engine: Engine, programs: dict[str, TimedProgram]
) -> tuple[dict[int, list[Completion]], float]:
    """Samples until all completions are done; cancels the rest after SAMPLING_SECONDS. Returns
    (request id -> its completions, the cancelled ones too; the seconds of sampling without
    compilation)."""

    def clock() -> float:
        """Returns the present time without the seconds spent compiling."""
        return time.perf_counter() - sum(program.seconds for program in programs.values())

    completions: dict[int, list[Completion]] = {}
    started = clock()
    seconds = 0.0
    while engine.requests and seconds <= SAMPLING_SECONDS:
        completions |= engine.step()
        seconds = clock() - started
    for request_id in list(engine.requests):
        engine.cancel(request_id)
    completions |= dict(run_until_idle(engine))
    return completions, seconds


def _update(
    trial: StepTrial,
    table: StepTable,
    config: Config,
    learner: Learner,
    state: TrainState,
    teachers: Sequence[Architecture],
    has_critic: bool,
) -> tuple[MicroBatch, GradientSum]:
    """Computes the gradients of up to NUM_MICRO_BATCHES micro-batches of the trial's groups (of
    all, also those whose rewards do not differ), applies them, and writes into `trial` their number
    in a pass over all groups, the times, how the trainer's log-probs differ from the sampler's, the
    entropy, and whether the update was skipped. A single micro-batch is computed twice, because the
    first time compiles. The new weights are discarded. `table`: that of the trial's groups. Returns
    (the first micro-batch, the sum of the gradients, of which the policy's is consumed). With
    `has_critic` the micro-batch also has what a critic learns of it."""
    # Completions whose reward is invalid are included, because their log-probs can be compared too.
    groups = [replace(group, valid=np.ones(group.size, bool)) for group in trial.groups]
    valid = np.ones_like(table.valid)
    weights = token_weights(
        AGGREGATIONS[config.algorithm.aggregation].load(),
        table.lengths,
        valid,
        valid,
        config.algorithm.aggregation_tokens or config.sampling.max_completion_tokens,
    )
    # The sampler's log-probs also stand in for those of the old policy and the reference.
    sampled = {}
    for group_index, group in enumerate(groups):
        for completion_index, completion in enumerate(group.completions):
            sampled[group_index, completion_index] = completion.logprobs
    terms = TokenTerms(
        advantages=np.nan_to_num(table.advantages),
        weights=weights,
        old_logprobs=sampled,
        ref_logprobs=sampled,
    )
    layout = BatchLayout(
        shapes=[trial.shape],
        temperature=config.sampling.temperature,
        max_support=max_support(config),
        route_shape=learner.model.architecture.route_shape if replays_routes(config) else None,
    )
    batches = pack(groups, range(len(groups)), terms, layout)
    trial.num_batches = len(batches)
    if has_critic:
        batches = [_with_value_targets(batch, trial.mean_reward) for batch in batches]
    targets = None
    if teachers and config.teacher.gives_distributions:
        shapes = target_shapes(config.teacher, teachers[0], learner.model, trial.shape)
        targets = jax.tree.map(_zeros, shapes)
    total = None
    seconds = []
    differences = []
    # At least two, because the first one compiles; a single micro-batch is computed twice.
    for number in range(max(2, min(NUM_MICRO_BATCHES, len(batches)))):
        batch = batches[number % len(batches)]
        started = time.perf_counter()
        total, logprobs = learner.accumulate(total, state, batch.arrays, targets)
        trained = unpack([batch], [np.asarray(logprobs)])
        seconds.append(time.perf_counter() - started)
        for key, values in trained.items():
            differences.append(np.abs(values - sampled[key]))
    assert total is not None
    # The first call compiled.
    trial.accumulate_seconds = min(seconds[1:])
    trial.differences = np.concatenate(differences)
    value, count = jax.device_get(total.sums["entropy"])
    trial.entropy = float(value) / max(float(count), 1.0)
    started = time.perf_counter()
    _, result = learner.apply(state, total)
    # overflow: a smaller loss scale would help
    trial.skipped = bool(result.skipped) and not result.overflow
    trial.apply_seconds = time.perf_counter() - started - trial.programs["apply"].seconds
    return batches[0], total


def _with_value_targets(batch: MicroBatch, mean_reward: float) -> MicroBatch:
    """Returns a micro-batch from which a critic learns to say `mean_reward` of every token, as its
    values begin with 0."""
    loss_mask = batch.arrays.loss_mask
    zeros = np.zeros(loss_mask.shape, np.float32)
    targets = ValueTargets(
        values=zeros,
        returns=zeros + np.float32(np.nan_to_num(mean_reward)),
        weight=(loss_mask / max(loss_mask.sum(), 1)).astype(np.float32),
    )
    return replace(batch, arrays=replace(batch.arrays, targets=targets))


def _update_critic(
    trial: StepTrial, batch: MicroBatch, critic: Critic, state: TrainState, total: GradientSum
) -> None:
    """Computes the critic's values of a micro-batch, and one update of it towards the mean reward;
    writes the times into `trial`, and whether the update was skipped. The new weights are
    discarded. `state` has the critic's first weights. `total` has the gradient of a critic that
    shares the policy's layers; of others it is computed here, twice, because the first time
    compiles."""
    assert state.critic is not None, "a run with a critic has its state"
    learner = critic.learner
    arrays = critic.read(batch.arrays)
    # Computed for its compilation alone, which the trial measures: a new head says 0 everywhere.
    values = learner.score(critic.parameters(state), arrays.of_policy())
    jax.block_until_ready(values)
    of_critic = None
    if critic.shares_layers:
        of_critic = critic.sum_of_head(state, total)
    else:
        for _ in range(2):
            started = time.perf_counter()
            of_critic, values = learner.accumulate(of_critic, state.critic, arrays)
            jax.block_until_ready(values)
            trial.critic_accumulate_seconds = time.perf_counter() - started
    assert of_critic is not None
    started = time.perf_counter()
    _, result = learner.apply(state.critic, of_critic)
    if bool(result.skipped) and not result.overflow:
        trial.skipped = True
    seconds = time.perf_counter() - started
    trial.critic_apply_seconds = seconds - trial.programs["apply critic"].seconds


SCORING = 1 / 3
"""Cost of a pass that only computes log-probs, as a share of a pass with gradients."""


@dataclass(frozen=True)
class Times:
    """Estimated seconds of a run, from one sampled batch and a few micro-batches."""

    sample_seconds: float  # in a step
    reward_seconds: float
    update_seconds: float
    evaluation_seconds: float  # in the whole run
    compile_seconds: float
    run_seconds: float
    step_seconds: float  # mean in a long run, in which sampling and update may overlap
    sampled_tokens: int  # in a step
    trained_tokens: int  # in a step, without padding; a prompt counts once for its group
    padding: float

    def describe(self) -> str:
        """Returns the estimate as one line of text: seconds of a step and of its parts, tokens, and
        seconds of the run."""
        return (
            f"about {seconds_text(self.step_seconds)} a step (sampling "
            f"{seconds_text(self.sample_seconds)}, rewards {seconds_text(self.reward_seconds)}, "
            f"update {seconds_text(self.update_seconds)}) for {self.sampled_tokens} tokens sampled "
            f"and {self.trained_tokens} trained on; about {seconds_text(self.run_seconds)} for the "
            f"run, {seconds_text(self.evaluation_seconds)} of it evaluation. An estimate, from one "
            "batch"
        )


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array of zeros of this shape, type and sharding."""
    return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)


def estimate_times(
    config: Config, trial: StepTrial, slot_groups: int, evaluated: int, own_devices: bool
) -> Times:
    """Estimates and returns the seconds of a run, and of a step and its parts, from the trial of
    its first step. Completions that were cancelled there are assumed to reach
    `sampling.max_completion_tokens`. `slot_groups`: groups that the sampler holds at once;
    `evaluated`: completions of all evaluations of the run; `own_devices`: True if the sampler has
    devices of its own, so that it works while the trainer does."""
    batch, algorithm = config.batch, config.algorithm
    # prompts of a step for each one of the trial
    scale = batch.prompts_per_step / len(trial.groups)
    longer = 1.0
    if trial.cancelled:  # cancelled completions are assumed to reach the limit
        longer = config.sampling.max_completion_tokens / max(1, int(trial.lengths.max()))
    # How many times as often as in the trial the sampler's slots are filled.
    waves = math.ceil(batch.prompts_per_step / slot_groups) / math.ceil(
        len(trial.groups) / slot_groups
    )
    sample = trial.sample_seconds * longer * waves
    batches = trial.num_batches * scale
    trained = batches
    if not needs_all_groups(algorithm, config.teacher.exists):
        trained = max(algorithm.num_minibatches, batches * trial.nonzero_std)
    passes = (
        trained * algorithm.num_epochs + SCORING * num_scorings(algorithm, config.teacher) * batches
    )
    updates = algorithm.num_epochs * algorithm.num_minibatches
    update = passes * trial.accumulate_seconds + updates * trial.apply_seconds
    epochs_of_critic = critic_epochs(algorithm, config.critic)
    if epochs_of_critic is not None:
        # A critic that shares the policy's layers has no gradient of its own to time.
        seconds = trial.critic_accumulate_seconds or trial.accumulate_seconds
        update += (trained * epochs_of_critic + SCORING * batches) * seconds
        update += updates * trial.critic_apply_seconds
    tokens = float(trial.lengths.sum()) * longer
    # completions x tokens of one in the mean x seconds of a token
    evaluation = (
        evaluated * (tokens / trial.lengths.size) * trial.sample_seconds * longer / max(tokens, 1.0)
    )
    reward = trial.reward_seconds * scale
    prompts = sum(len(group.prompt_ids) for group in trial.groups)
    step = step_seconds(schedule_of(config.train), sample + reward, update, own_devices)
    run = config.steps * step + evaluation + trial.compile_seconds
    return Times(
        sample_seconds=sample,
        reward_seconds=reward,
        update_seconds=update,
        evaluation_seconds=evaluation,
        compile_seconds=trial.compile_seconds,
        run_seconds=run,
        step_seconds=step,
        sampled_tokens=round(tokens * scale),
        trained_tokens=round((tokens + prompts) * scale),
        padding=trial.padding,
    )


def trial_budget(budget: Budget, trial: StepTrial, engines: Mapping[str, Engine]) -> Budget:
    """Returns the budget of a job with the memory that the trial of its programs measured. It is
    scaled from the shapes of the trial to the longest prompts and rows that the settings allow, and
    to the engine that prefills most prompts at once. `engines`: all that the run has, by name;
    `training` was tried. On a CPU also what compiling takes and what this process and its children
    hold."""
    training = engines["training"]
    bucket = prompt_bucket(budget.config.sampling.slot_prompt)
    # Tokens that one prefill computes: at most in the run, and in the trial.
    largest = max(engine.scheduler.batch_rows(bucket) for engine in engines.values()) * bucket
    tried_bucket = max(prompt_bucket(len(group.prompt_ids)) for group in trial.groups)
    tried = training.scheduler.batch_rows(tried_bucket) * tried_bucket
    scale = {
        "prefill": largest / tried,
        "accumulate": max(1.0, budget.batch.tokens / trial.shape.tokens),
    }
    is_cpu = training.model.role.platform == "cpu"
    costs = {}
    for name in LARGEST:
        extra = 0
        # A critic's program runs in the same phase as the policy's of its name: what the larger of
        # both needs.
        for program_name in (name, f"{name} critic"):
            program = trial.programs.get(program_name)
            if program is None:
                continue
            extra = max(extra, round(program.extra_bytes * scale.get(name, 1.0)))
            if is_cpu:
                # While a program is compiled all arrays are held, but the program needs no memory
                # yet.
                extra = max(extra, program.compile_bytes)
        costs[name] = ProgramCost(extra_bytes=extra)
    process_bytes = None
    if is_cpu:
        process_bytes = cpu_process_bytes(trial, engines)
    return replace(budget, costs=costs, process_bytes=process_bytes)


def cpu_process_bytes(trial: StepTrial, engines: Mapping[str, Engine]) -> dict[str, int]:
    """Returns a dict (name of a part -> bytes of RAM) that a run on a CPU needs besides arrays. The
    parts are this process with its libraries and compiled programs, and the processes of rewards.
    Engines of evaluations compile programs of their own; they count as much as those of training,
    which were measured."""
    others = {id(engine) for engine in engines.values()} - {id(engines["training"])}
    code_bytes = sum(trial.programs[name].code_bytes for name in engines["training"].programs)
    return {
        "this process with its libraries": trial.process_bytes + len(others) * code_bytes,
        "processes of rewards": trial.worker_bytes,
    }


def best_advice(
    config: Config, budget: Budget, describe: Describe, times: Times, available: AvailableMemory
) -> dict[str, Any]:
    """Returns the advice, a dict with `text` and `key`, that shortens the run most as far as that
    is known. An evaluation that takes half of the run or more comes first, then what `budget`
    suggests. If no key stands out, the text says what takes most of a step and `key` is empty.
    `describe`: returns the budget of a job with another configuration."""
    share = times.evaluation_seconds / max(times.run_seconds, 1e-9)
    if share >= 0.5 and num_updates(config):
        return {
            "text": f"task.num_eval_questions: evaluation is {100 * share:.0f}% of the run, so ask "
            f"a quarter",
            "key": "task.num_eval_questions",
        }
    advice = advise(budget, describe, TIGHT * available.free / available.sharing)
    if advice:
        return {"text": advice[0].text, "key": advice[0].key}
    seconds, name = max(
        (times.sample_seconds, "sampling"),
        (times.reward_seconds, "the reward"),
        (times.update_seconds, "the update"),
    )
    share_of_step = seconds / max(times.step_seconds, 1e-9)
    return {
        "text": f"no key stands out; {name} takes {100 * share_of_step:.0f}% of a step",
        "key": "",
    }


PROC = Path("/proc")


PEAK_SECONDS = 0.02
"""Seconds between two readings of this process's memory."""


def resident_bytes() -> int:
    """Returns the bytes of RAM that this process holds; 0 if the system does not report them."""
    try:
        pages = (PROC / "self" / "statm").read_text().split()[1]  # the resident ones
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def array_bytes() -> int:
    """Returns the bytes of all JAX arrays on this process's devices; memory that several arrays
    share counts once."""
    sizes: dict[int, int] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            sizes[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(sizes.values())


def process_bytes() -> int:
    """Returns the bytes of RAM that this process holds besides JAX arrays: libraries, compiled
    programs, data. 0 if the system does not report them. Side effects: collects garbage and gives
    freed memory back to the system."""
    gc.collect()
    return_freed_memory()
    resident = resident_bytes()
    if not resident:
        return 0
    return max(0, resident - array_bytes())


def children_bytes(pid: int = 0) -> int:
    """Returns the bytes of RAM that only the descendants of a process use, without memory that they
    share with other processes. `pid`: the process; 0: this one. 0 on systems without Linux's
    /proc."""
    process = PROC / str(pid or os.getpid())
    total = 0
    for task in (process / "task").glob("*"):
        for child in _read(task / "children").split():
            text = _read(PROC / child / "smaps_rollup")
            private = re.findall(r"^Private_(?:Clean|Dirty): +(\d+) kB", text, re.MULTILINE)
            # its own descendants too
            total += 1024 * sum(map(int, private)) + children_bytes(int(child))
    return total


def _read(file: Path) -> str:
    """Returns a file's text, or '' if its process has ended."""
    try:
        return file.read_text()
    except OSError:  # the process has ended
        return ""


class ResidentPeak:
    """Measures, around a block, by how much this process's RAM grew at most (`bytes`) and in the
    end (`stays`). A thread reads it every PEAK_SECONDS.

    >>> with ResidentPeak() as peak:
    ...     compiled = lowered.compile()
    >>> peak.bytes
    """

    bytes = 0
    stays = 0

    def __enter__(self) -> ResidentPeak:
        """Begins to measure, in a thread."""
        self._before = self._most = resident_bytes()
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read_until_ended, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the measurement, and sets `bytes` and `stays`, in bytes, neither below 0. An
        exception of the block is not suppressed."""
        self._ended.set()
        self._reader.join()
        now = resident_bytes()
        self.bytes = max(self._most, now) - self._before
        self.stays = max(0, now - self._before)

    def _read_until_ended(self) -> None:
        while not self._ended.wait(PEAK_SECONDS):
            self._most = max(self._most, resident_bytes())
