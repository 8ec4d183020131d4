"""A run opened from its folder to sample its groups again: its model, its sampler and the weights of any version."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.config.schema import Config, MeshSection, ModelSection
from shoal.model.segment_attention import segment_attention
from shoal.model.transformer import Model, forward, head_projection, output_head
from shoal.report.console import Console
from shoal.report.groups import StoredGroup, read_file
from shoal.rollout.group import sample_request
from shoal.rollout.publication import publish_to
from shoal.run.fingerprint import machine
from shoal.run.job import Job
from shoal.run.loading import load_scorer, open_model, resolve_model
from shoal.run.parts import make_updater, open_reference
from shoal.runs.stored_run import StoredRun
from shoal.sampler.engine import drain
from shoal.text import ranges
from shoal.trainer.checkpoint import MODEL_FOLDER, Restored, restore
from shoal.trainer.orbax import orbax_silenced
from shoal.trainer.step import TrainState
from shoal.trainer.update import Updater, UpdateResult
from shoal.types import Completion, Group, GroupRequest, Params, Purpose, SamplingParams, ShoalError


@dataclass
class WeightsOrigin:
    """How the weights of a version were made, and whether they are those of the run."""

    source: str  # `checkpoint 2`, or the first weights
    steps_retrained: int
    machine: dict[str, list[str]]  # what has changed since the checkpoint: name -> [then, now]
    updates_retrained: int = 0
    diverged_at: int | None = None  # the first step whose log-probs differ from the stored ones
    verified: bool | None = None  # by the stored log-probs of the step after them; None where there are none


class Replayer:
    """A run opened on this machine's devices: a job for each of its segments, with the model of its folder.

    `group`: what is sampled again. `mesh`: devices other than the run's own. Closed at the end, with its jobs."""

    def __init__(self, run: StoredRun, group: Group, mesh: MeshSection, console: Console) -> None:
        self.run, self.group, self.console = run, group, console
        self._jobs: dict[int, Job] = {}
        self._stack = ExitStack()
        self._spec = resolve_model(ModelSection(path=str(run.path / MODEL_FOLDER)))
        self.config = run.config_at(group.step if group.purpose is Purpose.TRAIN else group.step - 1)
        self._mesh = self.config.mesh if mesh == MeshSection() else mesh
        self.job = self._job_of(self.config)
        self.roles, self.tokenizer = self.job.roles, self._spec.tokenizer
        self._updater_of: tuple[Config, Updater] | None = None  # of one segment: each compiles its own

    def __enter__(self) -> Replayer:
        self._stack.enter_context(orbax_silenced())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _job_of(self, config: Config) -> Job:
        """The job of a segment's settings."""
        if id(config) not in self._jobs:
            job = Job(replace(config, mesh=self._mesh), self.console, spec=self._spec, settled=True)
            # One for all jobs: what they set for all of JAX is reset in the reverse of the order in which it was set.
            job.stack, self._jobs[id(config)] = self._stack, job
        return self._jobs[id(config)]

    # ---- weights

    def weights(self, version: int) -> tuple[Params, WeightsOrigin]:
        """The sampler's parameters of any version, from the nearest checkpoint before it."""
        found = self._nearest(version)
        start, state = (found.version, found.state) if found else (0, None)
        origin = WeightsOrigin(f"checkpoint {start}" if start else f"first weights ({self.config.model.path})",
                               version - start, self._machine_changes(start, version))
        retrains = version > start
        kl = any(self.run.config_at(step).algorithm.kl_coef > 0 for step in range(start, version + 1))
        first = None
        if state is None or (kl and retrains):  # a KL term refers to the first weights
            first = open_model(self.config.model, self.console).load(self.roles.trainer, np.float32)
        updater = self._updater(start, first, retrains)
        state = updater.learner.init(first) if state is None else state
        if retrains:
            steps = "steps" if version > start + 1 else "step"
            self.console.note(f"version {version} has no checkpoint: retraining on the stored groups of {steps} "
                              f"{ranges(range(start + 1, version + 1))}, from {origin.source}")
            before = int(state.updates)
            for step in range(start, version):
                state = self._retrain(self._updater(step, first), state, self.run.groups(step + 1), step, origin)
            origin.updates_retrained, origin.verified = int(state.updates) - before, None
        params = publish_to(self.job.model.on(self.roles.hosts[0]), state.trainable)
        if retrains and (file := self.run.group_files().get(version + 1)):  # its log-probs are those before its update
            self._retrain(self._updater(version, first), state, read_file(file), version, origin)
        return params, origin

    def _nearest(self, version: int) -> Restored | None:
        """The newest readable checkpoint up to `version`."""
        for saved in sorted((v for v in self.run.checkpoints() if v <= version), reverse=True):
            try:
                return restore(self.run.path, saved, self._job_of(self.run.config_at(saved)).learner)
            except ShoalError as error:
                self.console.warning(f"{error}; the one before it is used")
        return None

    def _updater(self, version: int, first: Params | None, with_teacher: bool = True) -> Updater:
        """The updater of the step from `version` to the next."""
        config = self.run.config_at(version)
        if self._updater_of is None or self._updater_of[0] is not config:
            job, role = self._job_of(config), self.roles.reference
            teacher = load_scorer(config.model, job.teacher, role) if with_teacher and job.teacher else None
            reference = None if first is None else open_reference(config, self._spec, job.model, role, first)
            self._updater_of = config, make_updater(config, job.learner, reference, teacher)
        return self._updater_of[1]

    def _retrain(self, updater: Updater, state: TrainState, stored: Sequence[StoredGroup], step: int,
                 origin: WeightsOrigin) -> TrainState:
        """Makes one step's updates; the trainer's log-probs, compared with the stored ones, verify the weights."""
        state, outcome = updater.update(state, [entry.group for entry in stored], step)
        origin.verified = equal_logprobs(stored, outcome)
        if origin.diverged_at is None and origin.verified is False:
            origin.diverged_at = step + 1
            self.console.warning(f"retraining step {step + 1} gives other log-probs than the run's trainer had: this "
                                 "machine, its threads or versions differ, or the settings or first weights have "
                                 "changed since")
        return state

    def _machine_changes(self, start: int, version: int) -> dict[str, list[str]]:
        """Against the checkpoint retrained from; without one, the first after `version`; else any."""
        records = self.run.checkpoint_records()
        if not records:
            return {}
        nearest = min(records, key=lambda saved: (saved != start, saved < version, saved))
        saved = records[nearest]["facts"]["machine"]
        return {name: [saved.get(name, "unknown"), value] for name, value in machine().items()
                if saved.get(name) != value}

    # ---- sampling

    @property
    def params(self) -> SamplingParams:
        """How the group was sampled: the one answer of an evaluation greedily."""
        params = self.config.sampling.params
        return params.as_greedy() if self.group.purpose is Purpose.EVALUATE and self.group.size == 1 else params

    def sample(self, params: Params) -> list[Completion]:
        """The group's completions from its address, by a sampler compiled as the run's own was."""
        group = self.group
        engine = self.job.make_engine()(group.purpose, group.size)
        request = GroupRequest(group.purpose, group.step, group.version, group.example, group.prompt_ids, group.size,
                               self.params, group.subset)
        engine.load(group.version, params)
        engine.submit([sample_request(request, 0, self.config.seed)])
        sampled = drain(engine)
        return [sampled[0, index] for index in range(group.size)]

    def likeliest(self, params: Params, most: int) -> list[list[dict[str, Any]]]:
        """For each token of each stored completion the `entropy` there, and the `likeliest` tokens with log-probs: of
        the whole vocabulary, at the temperature that sampled."""
        model, group = self.job.model.on(self.roles.sampler), self.group
        longest = len(group.prompt_ids) + max(map(len, group.completions))
        size, most = -(-longest // 64) * 64, min(most, model.architecture.vocab_size)
        temperature = self.params.temperature or 1.0
        found = []
        for completion in group.completions:
            arrays = likeliest_tokens(model, params, group.prompt_ids, completion, temperature, most, size)
            found.append([{"entropy": float(entropy), "likeliest": [
                {"id": int(id), "text": self.tokenizer.token_text(int(id)), "logprob": float(logprob)}
                for id, logprob in zip(ids, logprobs, strict=True)]} for entropy, ids, logprobs in
                zip(*arrays, strict=True)])
        return found


def equal_logprobs(stored: Sequence[StoredGroup], outcome: UpdateResult) -> bool | None:
    """True if an update computed the stored trainer's log-probs, bit for bit; None where none are stored."""
    compared = 0
    for number, entry in enumerate(stored):
        for index, arrays in enumerate(entry.token_arrays):
            before, now = arrays.get("trainer_logprobs"), outcome.logprobs.get((number, index))
            if (before is None) != (now is None):
                return False
            if before is not None and np.asarray(now, np.float32).tobytes() != before.tobytes():
                return False
            compared += before is not None
    return True if compared else None


# ---- what the model could have said

CHUNK = 128
"""Tokens whose logits exist at once: 150,000 floats each."""


def likeliest_tokens(model: Model, params: Params, prompt_ids: np.ndarray, completion: Completion, temperature: float,
                     most: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(entropy[T], ids[T, most], log-probs[T, most]) of a completion's tokens, at the temperature that sampled them.

    `size` is a length for which programs are compiled once, at least that of prompt and completion."""
    ids = np.concatenate([prompt_ids, completion.token_ids]).astype(np.int32)
    tokens = np.zeros((1, size), np.int32)
    tokens[0, :len(ids)] = ids
    hidden = _states(model, params, jnp.asarray(tokens), len(ids))
    # The state before a token gives its distribution; a completion's first one follows the prompt.
    before = np.arange(len(prompt_ids) - 1, len(ids) - 1)
    parts = []
    for start in range(0, len(before), CHUNK):
        places = np.resize(before[start:start + CHUNK], CHUNK)
        parts.append(jax.device_get(_distributions(model, most, params, hidden[:, places], temperature)))
    entropy, chosen, logprobs = (np.concatenate([part[n][0] for part in parts])[:len(before)] for n in range(3))
    return entropy, chosen, logprobs


@partial(jax.jit, static_argnums=0)
def _states(model: Model, params: Params, tokens: jax.Array, length: Any) -> jax.Array:
    segment = (jnp.arange(tokens.shape[1]) < length)[None].astype(jnp.int32)
    attention = segment_attention(model, segment, segment)
    return forward(model, params, tokens, jnp.arange(tokens.shape[1])[None], attention)[0]


@partial(jax.jit, static_argnums=(0, 1))
def _distributions(model: Model, most: int, params: Params, hidden: jax.Array, temperature: float) -> Any:
    logprobs = jax.nn.log_softmax(head_projection(model, output_head(params))(hidden) / temperature)
    entropy = -jnp.sum(jnp.exp(logprobs) * jnp.where(jnp.isneginf(logprobs), 0.0, logprobs), axis=-1)
    values, ids = jax.lax.top_k(logprobs, most)
    return entropy, ids, values
