"""A trial of one step: the run's own engine and learner, on the run's first prompts; the memory
that it takes, and what a whole run would take.

The sampler's log-probs are compared with the trainer's on the same tokens, and everything is timed.
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
import numpy as np

from shoal.algorithm.advantage import nonzero_std
from shoal.algorithm.aggregation import token_weights
from shoal.budget.advice import TIGHT, Describe, advise
from shoal.budget.budget import LARGEST, Budget
from shoal.budget.memory import AvailableMemory
from shoal.budget.shapes import micro_batch_shapes
from shoal.chat.tokenizer import Tokenizer
from shoal.checks.reward import score
from shoal.config.choices import AGGREGATIONS
from shoal.config.derived import max_support, num_updates
from shoal.config.train import Config
from shoal.mesh import return_freed_memory
from shoal.protocols import GroupRequest
from shoal.records import Completion, Group, Params, Purpose, StopReason
from shoal.rewards.pool import RewardPool
from shoal.rollout.ledger import make_group, sample_request
from shoal.sampler.engine import Engine, run_until_idle
from shoal.sampler.scheduler import prompt_bucket
from shoal.tasks.task import Task
from shoal.text import seconds_text
from shoal.trainer.batch import Shape, pack, unpack
from shoal.trainer.prompts import TokenizedExample
from shoal.trainer.schedule import schedule_of, step_seconds
from shoal.trainer.step import Learner
from shoal.trainer.step_table import StepTable
from shoal.trainer.update import needs_all_groups, num_scorings
from shoal.weights.orbax import load_orbax
from shoal.weights.sampler_copy import publish_to

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


SCORING = 1 / 3
"""Cost of a pass for log-probs alone, as a share of one with its gradient."""


@dataclass(frozen=True)
class Times:
    """Estimated seconds, from one sampled batch and a few micro-batches."""

    sample_seconds: float  # of a step
    reward_seconds: float
    update_seconds: float
    evaluation_seconds: float  # of the whole run
    compile_seconds: float
    run_seconds: float
    step_seconds: float  # in a long run: sampling and update may overlap
    sampled_tokens: int  # of a step
    trained_tokens: int  # of a step: prompts once a group, without padding
    padding: float

    def describe(self) -> str:
        return (
            f"about {seconds_text(self.step_seconds)} a step (sampling "
            f"{seconds_text(self.sample_seconds)}, rewards {seconds_text(self.reward_seconds)}, "
            f"update {seconds_text(self.update_seconds)}) for {self.sampled_tokens} tokens sampled "
            f"and {self.trained_tokens} trained on; about {seconds_text(self.run_seconds)} for the "
            f"run, {seconds_text(self.evaluation_seconds)} of it evaluation. An estimate, from one "
            "batch"
        )


def estimate_times(
    config: Config, trial: StepTrial, slot_groups: int, evaluated: int, own_devices: bool
) -> Times:
    """`slot_groups`: groups that the sampler holds at once, on `own_devices` or the trainer's;
    `evaluated`: completions of all evaluations."""
    b, a = config.batch, config.algorithm
    scale = b.prompts_per_step / len(trial.groups)
    longer = 1.0
    if trial.cancelled:  # cancelled completions are assumed to reach the limit
        longer = config.sampling.max_completion_tokens / max(1, int(trial.lengths.max()))
    waves = math.ceil(b.prompts_per_step / slot_groups) / math.ceil(len(trial.groups) / slot_groups)
    sample = trial.sample_seconds * longer * waves
    batches = trial.num_batches * scale
    has_teacher = bool(config.teacher.path)
    trained = (
        batches
        if needs_all_groups(a, has_teacher)
        else max(a.num_minibatches, batches * trial.nonzero_std)
    )
    update = (
        trained * a.num_epochs + SCORING * num_scorings(a, has_teacher) * batches
    ) * trial.accumulate_seconds + a.num_epochs * a.num_minibatches * trial.apply_seconds
    tokens = float(trial.lengths.sum()) * longer
    evaluation = (
        evaluated * (tokens / trial.lengths.size) * trial.sample_seconds * longer / max(tokens, 1.0)
    )
    reward = trial.reward_seconds * scale
    prompts = sum(len(group.prompt_ids) for group in trial.groups)
    step = step_seconds(schedule_of(config.train), sample + reward, update, own_devices)
    run = config.steps * step + evaluation + trial.compile_seconds
    return Times(
        sample,
        reward,
        update,
        evaluation,
        trial.compile_seconds,
        run,
        step,
        round(tokens * scale),
        round((tokens + prompts) * scale),
        trial.padding,
    )


def trial_figures(
    config: Config, job: Mapping[str, Any], trial: StepTrial, engines: Mapping[str, Engine]
) -> Budget:
    """The figures of a job whose programs were tried. Their memory is scaled from the trial's
    shapes to the longest allowed, and to the engine that prefills most prompts at once."""
    programs, tokens = trial.programs, job["shape"]["tokens"]
    bucket = prompt_bucket(config.sampling.slot_prompt)
    used = max(prompt_bucket(len(group.prompt_ids)) for group in trial.groups)
    largest = max(engine.scheduler.batch_rows(bucket) for engine in engines.values()) * bucket
    tried = engines["training"].scheduler.batch_rows(used) * used
    scale = {"prefill": largest / tried, "accumulate": max(1.0, tokens / trial.shape.tokens)}
    extra = {name: round(programs[name].extra_bytes * scale.get(name, 1.0)) for name in LARGEST}
    if engines["training"].model.role.platform == "cpu":
        job = {**job, "processes": cpu_processes(trial, engines)}
        # A program is compiled beside all that is held, but before it takes memory itself.
        extra = {name: max(size, programs[name].compile_bytes) for name, size in extra.items()}
    return Budget(
        config, job, {name: {"error": "", "extra_bytes": size} for name, size in extra.items()}
    )


def cpu_processes(trial: StepTrial, engines: Mapping[str, Engine]) -> dict[str, int]:
    """Bytes of RAM that a run on a CPU takes besides arrays, by part. Engines of evaluations
    compile programs of their own, as large as those of training, which were tried."""
    others = {id(engine) for engine in engines.values()} - {id(engines["training"])}
    of_engine = sum(trial.programs[name].code_bytes for name in engines["training"].programs)
    return {
        "this process with its libraries": trial.process_bytes + len(others) * of_engine,
        "processes of rewards": trial.worker_bytes,
    }


def best_advice(
    config: Config, figures: Budget, describe: Describe, times: Times, available: AvailableMemory
) -> dict[str, Any]:
    """The key whose change would help the run's time most, as far as that is known; else what takes
    most."""
    share = times.evaluation_seconds / max(times.run_seconds, 1e-9)
    if share >= 0.5 and num_updates(config):
        return {
            "text": f"task.num_eval_questions: evaluation is {100 * share:.0f}% of the run, so ask "
            f"a quarter",
            "key": "task.num_eval_questions",
        }
    for one in advise(figures, describe, TIGHT * available.free / available.sharing)[:1]:
        return {"text": one["text"], "key": one["key"]}
    seconds, name = max(
        (times.sample_seconds, "sampling"),
        (times.reward_seconds, "the reward"),
        (times.update_seconds, "the update"),
    )
    return {
        "text": f"no key stands out; {name} takes "
        f"{100 * seconds / max(times.step_seconds, 1e-9):.0f}% of a step",
        "key": "",
    }


PROC = Path("/proc")


PEAK_SECONDS = 0.02
"""Seconds between two readings for a peak."""


def resident_bytes() -> int:
    """Bytes of this process in RAM; 0 where the system does not say it."""
    try:
        pages = (PROC / "self" / "statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def array_bytes() -> int:
    """Bytes of the arrays on this process's devices; those that share memory count once."""
    sizes: dict[int, int] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            sizes[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(sizes.values())


def process_bytes() -> int:
    """Bytes of this process in RAM without its arrays: libraries, compiled programs, data. 0 if
    they are not known."""
    gc.collect()
    return_freed_memory()
    resident = resident_bytes()
    return max(0, resident - array_bytes()) if resident else 0


def children_bytes(pid: int = 0) -> int:
    """Bytes in RAM that the children of a process (0: of this one), and theirs, share with no
    other."""
    of = PROC / str(pid or os.getpid())
    total = 0
    for task in (of / "task").glob("*"):
        for child in _read(task / "children").split():
            text = _read(PROC / child / "smaps_rollup")
            private = re.findall(r"^Private_(?:Clean|Dirty): +(\d+) kB", text, re.MULTILINE)
            total += 1024 * sum(map(int, private)) + children_bytes(int(child))
    return total


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the process has ended
        return ""


class ResidentPeak:
    """The most that this process takes in RAM within a block, beyond what it had before; what stays
    of it.

    >>> with ResidentPeak() as peak:
    ...     compiled = lowered.compile()
    >>> peak.bytes
    """

    bytes = 0
    stays = 0

    def __enter__(self) -> ResidentPeak:
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
        self._ended.set()
        self._reader.join()
        now = resident_bytes()
        self.bytes = max(self._most, now) - self._before
        self.stays = max(0, now - self._before)

    def _read_until_ended(self) -> None:
        while not self._ended.wait(PEAK_SECONDS):
            self._most = max(self._most, resident_bytes())
