"""Samples a stored group again from its address and compares it, bit for bit, with what was stored.

    the group's version -> nearest checkpoint before it, or the first weights
                        -> retrained on the stored groups
                        -> the run's own compiled sampler -> tokens and log-probs, compared

A run that was resumed with other settings has segments; each step is retrained under the settings
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.chat.tokenizer import Tokenizer
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import ModelSection
from shoal.config.train import Config
from shoal.job.fingerprint import machine
from shoal.job.job import Job
from shoal.model.attention.selector import segment_attention
from shoal.model.head import head_projection, output_head
from shoal.model.parameters import frozen_specs, select
from shoal.model.transformer import Model, forward
from shoal.protocols import GroupRequest, SampleRequest
from shoal.records import Completion, Group, Params, Purpose, SamplingParams, ShoalError, StopReason
from shoal.report.console import Console
from shoal.rollout.ledger import branch_request, rollout_requests, sample_request
from shoal.rollout.turn_driver import joined
from shoal.runs.compare import completion_difference
from shoal.runs.groups import StoredGroup, read_file
from shoal.runs.layout import MODEL_FOLDER
from shoal.runs.lines import json_line, json_ready, write_atomically
from shoal.runs.reader import StoredRun
from shoal.sampler.engine import Engine, drain
from shoal.text import ranges
from shoal.trainer.scorers import load_scorer
from shoal.trainer.step import TrainState
from shoal.trainer.update import Updater, UpdateResult
from shoal.weights.checkpoints import Restored, restore
from shoal.weights.orbax import orbax_silenced
from shoal.weights.sampler_copy import publish_to
from shoal.weights.source import open_model, resolve_model


def sample_again(
    run: StoredRun,
    step: int,
    number: int,
    mesh: MeshSection,
    console: Console,
    name: str = "step",
    likeliest: int = 0,
) -> dict[str, Any]:
    """Samples group `number` of `groups/<name>_<step>` again; `difference` is the first one, None
    where all is equal.

    `mesh`: devices other than the run's own. `likeliest`: as many of the likeliest tokens at each
    position, with the entropy, are added, and written to `replays/` in the run's folder, where
    `shoal view` finds them."""
    stored = run.group(step, number, name)
    group = stored.group
    with Replayer(run, group, mesh, console) as player:
        params, origin = player.weights(group.version)
        sampled = player.sample(params)
        kept = tokens_of_first_version(group)
        if kept != list(map(len, group.completions)):
            console.warning(
                "the weights changed while this group was sampled (train.versions=newest): "
                f"{sum(kept)} of {sum(map(len, group.completions))} tokens are of version "
                f"{group.version} and compared, the others are of newer ones"
            )
        differences = [
            describe_completion_difference(one, other, player.tokenizer, size)
            for one, other, size in zip(group.completions, sampled, kept, strict=True)
        ]
        difference = next(filter(None, differences), None)
        result = json_ready(
            {
                "run": str(run.path),
                "step": step,
                "group": number,
                "version": group.version,
                "identical": difference is None,
                "difference": difference,
                "weights": asdict(origin),
                "row": group.example.row,
                "prompt": group.example.prompt,
                "columns": group.example.columns,
                "completions": [
                    _completion_record(
                        stored, i, sampled[i], differences[i] is None, player.tokenizer
                    )
                    for i in range(group.size)
                ],
            }
        )
        if likeliest:
            for record, tokens in zip(
                result["completions"], player.likeliest(params, likeliest), strict=True
            ):
                for token, alternatives in zip(record["tokens"], tokens, strict=True):
                    token |= alternatives
            path = run.path / "replays" / f"{name}_{step:06d}_{number}.json"
            write_atomically(path, [json_line(result)])
    return result


def tokens_of_first_version(group: Group) -> list[int]:
    """By completion, the tokens that were sampled from the group's version before any from a newer
    one."""
    if len(set(np.concatenate([one.versions for one in group.completions]).tolist())) == 1:
        return list(map(len, group.completions))
    return [int((one.versions == group.version).cumprod().sum()) for one in group.completions]


def describe_completion_difference(
    stored: Completion, sampled: Completion, tokenizer: Tokenizer, size: int | None = None
) -> dict[str, Any] | None:
    """The first difference of two completions, of the first `size` tokens of `stored` (None: all,
    and how it ends), as a record; None where they are equal bit for bit."""
    found = completion_difference(stored, sampled)
    if found is None or (size is not None and size < len(stored) and found[1] >= size):
        return None
    kind, at = found
    tokens = {
        name: {
            "id": int(one.token_ids[at]),
            "text": tokenizer.token_text(int(one.token_ids[at])),
            "logprob": one.logprobs[at],
        }
        if at < len(one)
        else None
        for name, one in (("stored", stored), ("sampled", sampled))
    }
    record: dict[str, Any] = {"completion": stored.index, "token": at, "kind": kind, **tokens}
    if at < min(len(stored), len(sampled)):
        record["logprob_difference"] = float(sampled.logprobs[at]) - float(stored.logprobs[at])
    return json_ready(record | {"stop_reasons": [stored.stop_reason, sampled.stop_reason]})


def _completion_record(
    stored: StoredGroup, i: int, sampled: Completion, identical: bool, tokenizer: Tokenizer
) -> dict[str, Any]:
    group, completion = stored.group, stored.group.completions[i]
    trainer = stored.token_arrays[i].get("trainer_logprobs")
    return {
        "index": i,
        "identical": identical,
        "text": group.texts[i],
        "sampled_text": tokenizer.decode(sampled.token_ids.tolist()),
        "stop_reason": completion.stop_reason,
        "reward": group.rewards[i],
        "components": {name: values[i] for name, values in group.reward_components.items()},
        "valid": group.valid[i],
        "correct": None if group.correct is None else group.correct[i],
        "advantage": None if stored.advantages is None else stored.advantages[i],
        "tokens": [
            {
                "id": int(id),
                "text": tokenizer.token_text(int(id)),
                "logprob": completion.logprobs[t],
                "trainer_logprob": None if trainer is None else trainer[t],
            }
            if completion.loss_mask[t]
            else {
                "id": int(id),
                "text": tokenizer.token_text(int(id)),
                "logprob": None,
                "trainer_logprob": None,
            }
            for t, id in enumerate(completion.token_ids)
        ],
    }


# ---- the run on this machine's devices


@dataclass
class WeightsOrigin:
    """How the weights of a version were made, and whether they are those of the run."""

    source: str  # `checkpoint 2`, or the first weights
    steps_retrained: int
    machine: dict[str, list[str]]  # what has changed since the checkpoint: name -> [then, now]
    updates_retrained: int = 0
    diverged_at: int | None = None  # the first step whose log-probs differ from the stored ones
    verified: bool | None = (
        None  # by the stored log-probs of the step after them; None where there are none
    )


class Replayer:
    """A run opened on this machine's devices: a job for each of its segments, with the model of its
    folder.

    `group`: what is sampled again. `mesh`: devices other than the run's own. Closed at the end,
    with its jobs."""

    def __init__(self, run: StoredRun, group: Group, mesh: MeshSection, console: Console) -> None:
        self.run, self.group, self.console = run, group, console
        self._jobs: dict[int, Job] = {}
        self._stack = ExitStack()
        self.config = run.config_at(
            group.step if group.purpose is Purpose.TRAIN else group.step - 1
        )
        if self.config.sampler.kind == "vllm":
            raise ShoalError(
                "vLLM sampled this group, and samples other tokens when it is asked again: there "
                "is nothing to compare. Its tokens and log-probs are stored: shoal groups "
                f"{run.path}"
            )
        self._spec = resolve_model(
            ModelSection(path=str(run.path / MODEL_FOLDER), quantise=self.config.model.quantise)
        )
        self._mesh = self.config.mesh if mesh == MeshSection() else mesh
        self.job = self._job_of(self.config)
        self.roles, self.tokenizer = self.job.roles, self._spec.tokenizer
        self._updater_of: tuple[Config, Updater] | None = (
            None  # of one segment: each compiles its own
        )

    def __enter__(self) -> Replayer:
        self._stack.enter_context(orbax_silenced())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _job_of(self, config: Config) -> Job:
        """The job of a segment's settings."""
        if id(config) not in self._jobs:
            # A run's settings have all that it decided; its prompts do not follow from the devices
            # of this machine.
            batch = replace(config.batch, prompts_per_device=0)
            settings = replace(config, mesh=self._mesh, batch=batch)
            job = Job(settings, self.console, spec=self._spec)
            # One for all jobs: what they set for all of JAX is reset in the reverse of the order in
            # which it was set.
            job.stack, self._jobs[id(config)] = self._stack, job
        return self._jobs[id(config)]

    # ---- weights

    def weights(self, version: int) -> tuple[Params, WeightsOrigin]:
        """The sampler's parameters of any version, from the nearest checkpoint before it."""
        found = self._nearest(version)
        start, state = (found.version, found.state) if found else (0, None)
        origin = WeightsOrigin(
            f"checkpoint {start}" if start else f"first weights ({self.config.model.path})",
            version - start,
            self._machine_changes(start),
        )
        retrains = version > start
        kl = any(
            self.run.config_at(step).algorithm.scores_reference
            for step in range(start, version + 1)
        )
        first, a = None, self._spec.architecture
        if state is None or (kl and retrains) or a.adapter:  # a KL term refers to the first weights
            began = open_model(self.config.model, self.console)
            first = self.job.load_weights(
                replace(began, read=self._spec.read) if a.adapter else began
            )
        updater = self._updater(start, first, retrains)
        state = (
            replace(state, frozen=select(frozen_specs(a), first))
            if state
            else updater.learner.init(first)
        )
        if retrains:
            steps = "steps" if version > start + 1 else "step"
            self.console.note(
                f"version {version} has no checkpoint: retraining on the stored groups of {steps} "
                f"{ranges(range(start + 1, version + 1))}, from {origin.source}"
            )
            before = int(state.updates)
            for step in range(start, version):
                state = self._retrain(
                    self._updater(step, first), state, self.run.groups(step + 1), step, origin
                )
            origin.updates_retrained, origin.verified = int(state.updates) - before, None
        params = publish_to(self.job.model.on(self.roles.hosts[0]), state.parameters)
        if retrains and (
            file := self.run.group_files().get(version + 1)
        ):  # its log-probs are those before its update
            self._retrain(self._updater(version, first), state, read_file(file), version, origin)
        return params, origin

    def _nearest(self, version: int) -> Restored | None:
        """The newest readable checkpoint up to `version`."""
        for saved in sorted((v for v in self.run.checkpoints() if v <= version), reverse=True):
            try:
                learner = self._job_of(self.run.config_at(saved)).learner
                return restore(self.run.path, saved, learner.shapes())
            except ShoalError as error:
                self.console.warning(f"{error}; the one before it is used")
        return None

    def _updater(self, version: int, first: Params | None, with_teacher: bool = True) -> Updater:
        """The updater of the step from `version` to the next."""
        config = self.run.config_at(version)
        if self._updater_of is None or self._updater_of[0] is not config:
            job, role = self._job_of(config), self.roles.reference
            teacher = (
                load_scorer(config.model, job.teacher, role)
                if with_teacher and job.teacher
                else None
            )
            reference = None if first is None else job.open_reference(first)
            self._updater_of = config, job.make_updater(reference, teacher)
        return self._updater_of[1]

    def _retrain(
        self,
        updater: Updater,
        state: TrainState,
        stored: Sequence[StoredGroup],
        step: int,
        origin: WeightsOrigin,
    ) -> TrainState:
        """Makes one step's updates; the trainer's log-probs, compared with the stored ones, verify
        the weights."""
        state, outcome = updater.update(state, [entry.group for entry in stored], step)
        origin.verified = equal_logprobs(stored, outcome)
        if origin.diverged_at is None and origin.verified is False:
            origin.diverged_at = step + 1
            self.console.warning(
                f"retraining step {step + 1} gives other log-probs than the run's trainer had: "
                "this machine, its threads or versions differ, or the settings or first weights "
                "have changed since"
            )
        return state

    def _machine_changes(self, start: int) -> dict[str, list[str]]:
        """What differs from the machine that saved checkpoint `start`, or without it the oldest
        one."""
        records = self.run.checkpoint_records()
        if not records:
            return {}
        saved = records.get(start, next(iter(records.values())))["facts"]["machine"]
        return {
            name: [saved.get(name, "unknown"), value]
            for name, value in machine().items()
            if saved.get(name) != value
        }

    # ---- sampling

    @property
    def params(self) -> SamplingParams:
        """How the group was sampled: the one answer of an evaluation greedily."""
        params = self.config.sampling.params
        return (
            params.as_greedy()
            if self.group.purpose is Purpose.EVALUATE and self.group.size == 1
            else params
        )

    def sample(self, params: Params) -> list[Completion]:
        """The group's completions from its address, by a sampler compiled as the run's own was."""
        group = self.group
        engine = self.job.make_engine()(group.purpose, group.size)
        request = GroupRequest(
            group.purpose,
            group.step,
            group.version,
            group.example,
            group.prompt_ids,
            group.size,
            self.params,
            group.subset,
        )
        engine.load(group.version, params)
        asked = sample_request(request, 0, self.config.seed)
        if any(_has_turns(one, self.params.max_tokens) for one in group.completions):
            return sample_turns(engine, asked, group)
        engine.submit([asked])
        sampled = drain(engine)
        return [sampled[0, index] for index in range(group.size)]

    def likeliest(self, params: Params, most: int) -> list[list[dict[str, Any]]]:
        """For each token of each stored completion the `entropy` there, and the `likeliest` tokens
        with log-probs: of the whole vocabulary, at the temperature that sampled."""
        model, group = self.job.model.on(self.roles.sampler), self.group
        longest = max(
            len(prompt) + tokens.stop - tokens.start
            for i in range(group.size)
            for prompt, tokens in group.branches_of(i)
        )
        size, most = -(-longest // 64) * 64, min(most, model.architecture.vocab_size)
        temperature = self.params.temperature or 1.0
        by_completion = []
        for number, completion in enumerate(group.completions):
            records = []
            for prompt, tokens in group.branches_of(number):
                ids = np.concatenate([prompt, completion.token_ids[tokens]]).astype(np.int32)
                hidden = _states(
                    model, params, jnp.asarray(np.pad(ids, (0, size - len(ids)))[None]), len(ids)
                )
                # The state before a token gives its distribution; a completion's first one follows
                # the prompt.
                before = np.arange(len(prompt) - 1, len(ids) - 1)
                for start in range(0, len(before), CHUNK):
                    places = np.resize(before[start : start + CHUNK], CHUNK)
                    arrays = jax.device_get(
                        _distributions(model, most, params, hidden[:, places], temperature)
                    )
                    records += [
                        {
                            "entropy": float(entropy),
                            "likeliest": [
                                {
                                    "id": int(id),
                                    "text": self.tokenizer.token_text(int(id)),
                                    "logprob": float(logprob),
                                }
                                for id, logprob in zip(chosen, logprobs, strict=True)
                            ],
                        }
                        for entropy, chosen, logprobs in zip(
                            *(array[0] for array in arrays), strict=True
                        )
                    ][: len(before) - start]
            by_completion.append(records)
        return by_completion


def _has_turns(stored: Completion, max_tokens: int) -> bool:
    """Whether a completion was a rollout of several turns, or of one that was cut before all of its
    `max_tokens`."""
    is_cut = stored.stop_reason is StopReason.LENGTH and len(stored) < max_tokens
    has_context = not stored.loss_mask.all() or stored.prompt_ids is not None
    return is_cut or has_context or bool(stored.messages or stored.branches)


def sample_turns(engine: Engine, asked: SampleRequest, group: Group) -> list[Completion]:
    """Samples the turns of a stored group again: what tools and environments said, and the prompts
    of branches, come from the record, as far as the turns before them have the record's tokens."""
    new_id = count(1).__next__
    prompts = [group.prompt_of(index) for index in range(group.size)]
    turn_limits = [_turn_limit(one, 0, engine.eos_ids) for one in group.completions]
    engine.submit(rollout_requests(asked, prompts, new_id, turn_limits))
    branches: list[list[Completion]] = [[] for _ in range(group.size)]
    sampled: dict[int, Completion] = {}
    while not engine.idle:
        for one in chain.from_iterable(engine.step().values()):
            stored, ended = group.completions[one.index], branches[one.index]
            start = sum(map(len, ended))
            stop = start + len(one)
            is_equal, rest = (
                np.array_equal(stored.token_ids[start:stop], one.token_ids),
                stored.loss_mask[stop:],
            )
            prompt = next(
                (branch.prompt_ids for branch in stored.branches if branch.start == stop), None
            )
            sampled[one.index] = one
            if one.waits and is_equal and prompt is None and len(rest):
                context = stored.token_ids[stop : stop + int((~rest).cumprod().sum())]
                turn_limit = _turn_limit(stored, stop + len(context), engine.eos_ids)
                engine.extend(one.request_id, one.index, context.tolist(), turn_limit)
                continue
            if one.waits:
                engine.end(one.request_id, one.index)
            if is_equal and prompt is not None:
                ended.append(one)
                turn_limit = _turn_limit(stored, stop, engine.eos_ids)
                engine.submit(
                    [
                        branch_request(
                            asked, new_id(), one.index, prompt, len(ended), stop, turn_limit
                        )
                    ]
                )
            elif one.waits:
                sampled[one.index] = replace(
                    one,
                    waits=False,
                    stop_reason=stored.stop_reason if is_equal else one.stop_reason,
                )
    return [
        joined(
            [ids for ids, _ in group.branches_of(index)][: len(ended) + 1], [*ended, sampled[index]]
        )
        for index, ended in enumerate(branches)
    ]


def _turn_limit(stored: Completion, start: int, eos_ids: Sequence[int]) -> int:
    """After how many tokens the stored turn that begins at `start` may have been cut: it has so
    many, and no end of sequence. 0 for a turn that has one.

    An agent's limit of a turn is not stored; a turn that it cut, and was not, has the same
    tokens."""
    stop = min(
        [branch.start for branch in stored.branches if branch.start > start], default=len(stored)
    )
    size = int(stored.loss_mask[start:stop].cumprod().sum())
    is_ended = size > 0 and int(stored.token_ids[start + size - 1]) in eos_ids
    return 0 if is_ended else size


def equal_logprobs(stored: Sequence[StoredGroup], outcome: UpdateResult) -> bool | None:
    """True if an update computed the stored trainer's log-probs, bit for bit; None where none are
    stored."""
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


CHUNK = 128
"""Tokens whose logits exist at once: 150,000 floats each."""


@partial(jax.jit, static_argnums=0)
def _states(model: Model, params: Params, tokens: jax.Array, length: Any) -> jax.Array:
    """Hidden states [1, T, D] of tokens[1, T], of which the first `length` are known."""
    segment = (jnp.arange(tokens.shape[1]) < length)[None].astype(jnp.int32)
    attention = segment_attention(model, segment, segment)
    return forward(model, params, tokens, jnp.arange(tokens.shape[1])[None], attention)[0]


@partial(jax.jit, static_argnums=(0, 1))
def _distributions(
    model: Model, most: int, params: Params, hidden: jax.Array, temperature: float
) -> Any:
    """(entropy[1, T], ids[1, T, most], log-probs[1, T, most]) of the tokens after these states[1,
    T, D]."""
    logprobs = jax.nn.log_softmax(head_projection(model, output_head(params))(hidden) / temperature)
    entropy = -jnp.sum(
        jnp.exp(logprobs) * jnp.where(jnp.isneginf(logprobs), 0.0, logprobs), axis=-1
    )
    values, ids = jax.lax.top_k(logprobs, most)
    return entropy, ids, values
