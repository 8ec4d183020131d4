"""Samples a stored group again from its address and compares it, bit for bit, with what was stored.

    the group's version -> nearest checkpoint before it, or the first weights
                        -> retrained on the stored groups
                        -> the run's own compiled sampler -> tokens and log-probs, compared

A run that was resumed with other settings has segments; each step is retrained under the settings
of its own segment.
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
from shoal.config.derived import needs_first_weights
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import ModelSection
from shoal.config.train import Config
from shoal.job.fingerprint import machine
from shoal.job.job import Job
from shoal.model.head import head_projection, output_head
from shoal.model.parameters import frozen_specs, select
from shoal.model.passes import PackedRows
from shoal.model.transformer import Model, forward
from shoal.protocols import GroupRequest, SampleRequest
from shoal.records import Completion, Group, Params, Purpose, SamplingParams, ShoalError, StopReason
from shoal.report.console import Console
from shoal.rollout.ledger import branch_request, rollout_requests, sample_request
from shoal.rollout.turn_driver import join_branches
from shoal.runs.compare import completion_difference
from shoal.runs.groups import StoredGroup, read_file, values_by_turn
from shoal.runs.layout import MODEL_FOLDER
from shoal.runs.lines import json_line, json_ready, write_atomically
from shoal.runs.reader import StoredRun
from shoal.sampler.engine import Engine, drain
from shoal.text import ranges
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
    """Samples group `number` (from 0) of the file `groups/<name>_<step>` (steps count from 1) again
    and returns a record of it for JSON. The record has the group's data and tokens, whether all is
    `identical`, where its `weights` come from, and as `difference` the first one from the stored
    group (a dict with `completion`, `token`, `kind` and both tokens), None if there is none.
    ShoalError if there is no such group, or if another engine sampled it. Prints warnings and notes
    on `console`.

    `mesh`: devices other than the run's own; the default section: the run's. `name`: `step` for a
    step's groups, or the beginning of the file names of an evaluation's. `likeliest`: if not 0,
    this many of the likeliest tokens at each position, with the entropy, are added to the record,
    which is then written to `replays/` in the run's folder, where `shoal view` finds it.
    """
    stored = run.group(step, number, name)
    group = stored.group
    with Replayer(run, group, mesh, console) as replayer:
        params, origin = replayer.weights(group.version)
        sampled = replayer.sample(params)
        compared = num_tokens_of_first_version(group)
        lengths = [len(completion) for completion in group.completions]
        if compared != lengths:
            console.warning(
                "the weights changed while this group was sampled (train.versions=newest): "
                f"{sum(compared)} of {sum(lengths)} tokens are of version "
                f"{group.version} and compared, the others are of newer ones"
            )
        first_difference = None
        completions = []
        for index, completion in enumerate(group.completions):
            difference = describe_completion_difference(
                completion, sampled[index], replayer.tokenizer, compared[index]
            )
            if first_difference is None:
                first_difference = difference
            is_identical = difference is None
            completions.append(
                _completion_record(stored, index, sampled[index], is_identical, replayer.tokenizer)
            )
        result = json_ready(
            {
                "run": str(run.path),
                "step": step,
                "group": number,
                "version": group.version,
                "identical": first_difference is None,
                "difference": first_difference,
                "weights": asdict(origin),
                "row": group.example.row,
                "prompt": group.example.prompt,
                "columns": group.example.columns,
                "completions": completions,
            }
        )
        if likeliest:
            alternatives = replayer.likeliest(params, likeliest)
            for record, of_tokens in zip(result["completions"], alternatives, strict=True):
                for token, of_token in zip(record["tokens"], of_tokens, strict=True):
                    token.update(of_token)
            path = run.path / "replays" / f"{name}_{step:06d}_{number}.json"
            write_atomically(path, [json_line(result)])
    return result


def num_tokens_of_first_version(group: Group) -> list[int]:
    """Returns for each completion the number of tokens at its beginning that were sampled from the
    group's version, before the first token from a newer one; the number of all its tokens if the
    group has a single version."""
    versions = np.concatenate([completion.versions for completion in group.completions])
    if np.unique(versions).size == 1:
        return [len(completion) for completion in group.completions]
    numbers = []
    for completion in group.completions:
        is_first = completion.versions == group.version
        # the number of True before the first False
        numbers.append(int(is_first.cumprod().sum()))
    return numbers


def describe_completion_difference(
    stored: Completion, sampled: Completion, tokenizer: Tokenizer, size: int | None = None
) -> dict[str, Any] | None:
    """Returns the first difference of two completions as a record for JSON: `completion` and
    `token` (indices), `kind` (`token`, `log-prob`, `length` or `stop reason`), the token of each
    under `stored` and `sampled` (a dict with `id`, `text` and `logprob`; None if that completion
    has ended before), `stop_reasons` (stored, sampled), and `logprob_difference` (sampled minus
    stored) if both have such a token; None if what is compared is equal, tokens and log-probs bit
    for bit. `size`: how many tokens of `stored` are compared; None: all of them, and also the
    reason why each completion ended."""
    difference = completion_difference(stored, sampled)
    if difference is None:
        return None
    kind, token_index = difference
    # The difference lies behind the tokens that are compared.
    if size is not None and size < len(stored) and token_index >= size:
        return None

    def token_of(completion: Completion) -> dict[str, Any] | None:
        """Returns the record of a completion's token at the difference; None if it has ended
        before."""
        if token_index >= len(completion):
            return None
        token_id = int(completion.token_ids[token_index])
        return {
            "id": token_id,
            "text": tokenizer.token_text(token_id),
            "logprob": completion.logprobs[token_index],
        }

    record: dict[str, Any] = {
        "completion": stored.index,
        "token": token_index,
        "kind": kind,
        "stored": token_of(stored),
        "sampled": token_of(sampled),
    }
    if token_index < min(len(stored), len(sampled)):
        record["logprob_difference"] = float(sampled.logprobs[token_index]) - float(
            stored.logprobs[token_index]
        )
    record["stop_reasons"] = [stored.stop_reason, sampled.stop_reason]
    return json_ready(record)


def _completion_record(
    stored: StoredGroup, index: int, sampled: Completion, identical: bool, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns the record of the completion at `index` of a stored group for JSON: its tokens,
    rewards, advantage, and the text of `sampled`, which was sampled again. `identical`: whether the
    two are equal. Tokens of context have no log-probs."""
    group = stored.group
    completion = group.completions[index]
    trainer_logprobs = stored.token_arrays[index].get("trainer_logprobs")
    tokens = []
    for position, token_id in enumerate(completion.token_ids.tolist()):
        token: dict[str, Any] = {
            "id": token_id,
            "text": tokenizer.token_text(token_id),
            "logprob": None,
            "trainer_logprob": None,
        }
        if completion.loss_mask[position]:  # else the token is context, which was not sampled
            token["logprob"] = completion.logprobs[position]
            if trainer_logprobs is not None:
                token["trainer_logprob"] = trainer_logprobs[position]
        tokens.append(token)
    return {
        "index": index,
        "identical": identical,
        "text": group.texts[index],
        "sampled_text": tokenizer.text(sampled.token_ids),
        "stop_reason": completion.stop_reason,
        "reward": group.rewards[index],
        "components": {name: values[index] for name, values in group.reward_components.items()},
        "valid": group.valid[index],
        "correct": None if group.correct is None else group.correct[index],
        "advantage": None if stored.advantages is None else stored.advantages[index],
        **values_by_turn(stored, index),
        "tokens": tokens,
    }


# ---- the run on this machine's devices


@dataclass
class WeightsOrigin:
    """How the weights of a version were made, and whether they are those of the run."""

    source: str  # `checkpoint 2`, or the first weights
    steps_retrained: int
    machine: dict[str, list[str]]  # what has changed since the checkpoint, name -> [then, now]
    updates_retrained: int = 0
    diverged_at: int | None = None  # the first step whose log-probs differ from the stored ones
    # Checked by the stored log-probs of the next step; None if there are none.
    verified: bool | None = None


class Replayer:
    """A stored run that is opened on this machine's devices, to sample one group again: a job for
    the settings of each segment, with the model in the run's folder.

    `group`: the group that is sampled again. `mesh`: devices other than the run's own. Leaving the
    `with` block closes all jobs.
    """

    def __init__(self, run: StoredRun, group: Group, mesh: MeshSection, console: Console) -> None:
        """Opens the run's model, without its weights, on this machine's devices. `mesh`: the
        default section means the run's own devices. ShoalError if another engine than Shoal's
        sampled the group."""
        self.run = run
        self.group = group
        self.console = console
        self._jobs: dict[int, Job] = {}
        self._stack = ExitStack()
        # An evaluation after a step belongs to the segment of that step.
        is_training = group.purpose is Purpose.TRAIN
        self.config = run.config_at(group.step if is_training else group.step - 1)
        engine = self.config.sampler.engine
        if engine:
            raise ShoalError(
                f"{engine} sampled this group, and samples other tokens when it is asked again: "
                "there is nothing to compare. Its tokens and log-probs are stored: shoal groups "
                f"{run.path}"
            )
        self._spec = resolve_model(
            ModelSection(path=str(run.path / MODEL_FOLDER), quantise=self.config.model.quantise)
        )
        self._mesh = self.config.mesh if mesh == MeshSection() else mesh
        self.job = self._job_of(self.config)
        self.roles = self.job.roles
        self.tokenizer = self._spec.tokenizer
        # Only the updater of the last segment is kept, because each compiles programs of its own.
        self._updater_of: tuple[Config, Updater] | None = None

    def __enter__(self) -> Replayer:
        self._stack.enter_context(orbax_silenced())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _job_of(self, config: Config) -> Job:
        """Returns the job for the settings of a segment, made when it is first needed. `config`:
        the segment's configuration; the same object, not one that is equal, gives the same job. The
        jobs are closed with the `Replayer`."""
        known = self._jobs.get(id(config))
        if known is not None:
            return known
        # The run's settings contain all that it decided; the prompts of a step must not be decided
        # again from this machine's devices.
        batch = replace(config.batch, prompts_per_device=0)
        settings = replace(config, mesh=self._mesh, batch=batch)
        job = Job(settings, self.console, model_source=self._spec)
        # All jobs share one stack, so that what they set for all of JAX is reset in the reverse
        # order.
        job.stack = self._stack
        self._jobs[id(config)] = job
        return job

    # ---- weights

    def weights(self, version: int) -> tuple[Params, WeightsOrigin]:
        """Returns (the sampler's parameters of a version, where they come from). They come from the
        newest checkpoint up to that version, or from the first weights (version 0); if it is an
        older version, it is trained on the stored groups of the steps between. Then the log-probs
        of the next step, if it is stored, are compared too, which shows whether retraining was
        exact. Prints a note before it retrains."""
        state = None
        start = 0
        source = f"first weights ({self.config.model.path})"
        checkpoint = self._nearest(version)
        if checkpoint:
            start = checkpoint.version
            state = checkpoint.state
            if start:
                source = f"checkpoint {start}"
        origin = WeightsOrigin(source, version - start, self._machine_changes(start))
        retrains = version > start
        first = self._first_weights(state is None, retrains, range(start, version + 1))
        updater = self._updater(start, first, retrains)
        if state is None:
            critic = None
            if first is not None:
                critic = self._job_of(self.run.config_at(start)).load_critic(first)
            state = updater.first_state(first, critic)
        else:
            frozen = select(frozen_specs(self._spec.architecture), first)
            job = self._job_of(self.run.config_at(start))
            state = state.with_frozen(frozen, job.load_frozen_of_critic(frozen))
        if retrains:
            steps = "steps" if version > start + 1 else "step"
            self.console.note(
                f"version {version} has no checkpoint: retraining on the stored groups of {steps} "
                f"{ranges(range(start + 1, version + 1))}, from {origin.source}"
            )
            before = int(state.updates)
            for step in range(start, version):
                updater = self._updater(step, first)
                state = self._retrain(updater, state, self.run.groups(step + 1), step, origin)
            origin.updates_retrained = int(state.updates) - before
            # These steps do not show whether the weights after them are right; the next one does.
            origin.verified = None
        params = publish_to(self.job.model.on(self.roles.hosts[0]), state.parameters)
        next_file = self.run.group_files().get(version + 1)
        if retrains and next_file:  # a step's stored log-probs are those before its update
            updater = self._updater(version, first)
            # called for its comparison alone, which goes into `origin`; the new state is discarded
            self._retrain(updater, state, read_file(next_file), version, origin)
        return params, origin

    def _first_weights(self, is_start: bool, retrains: bool, versions: range) -> Params | None:
        """Reads and returns the weights that the run began with; None if they are not needed. They
        are needed in three cases: training starts from them (`is_start`); steps of `versions` are
        retrained (`retrains`) with a KL term, whose reference they are, or with themselves as
        teacher; or the model has an adapter, which leaves most of them unchanged."""
        has_adapter = bool(self._spec.architecture.adapter)
        needs_first = False
        for step in versions:
            needs_first = needs_first or needs_first_weights(self.run.config_at(step))
        needs_reference = needs_first and retrains
        if not (is_start or needs_reference or has_adapter):
            return None
        began = open_model(self.config.model, self.console)
        if has_adapter:
            began = replace(began, read=self._spec.read)
        return self.job.load_weights(began)

    def _nearest(self, version: int) -> Restored | None:
        """Restores the newest checkpoint up to `version` that can be read; warns of those that
        cannot. None if there is none."""
        for saved in sorted(self.run.checkpoints(), reverse=True):
            if saved > version:
                continue
            try:
                job = self._job_of(self.run.config_at(saved))
                a = job.learner.model.architecture
                return restore(self.run.path, saved, a, job.state_shapes)
            except ShoalError as error:
                self.console.warning(f"{error}; the one before it is used")
        return None

    def _updater(self, version: int, first: Params | None, with_teacher: bool = True) -> Updater:
        """Makes the updater from `version` to the next one, with the settings that the run had
        then. If the last one was made for the same segment's settings, returns that one again:
        `first` and `with_teacher` are then not read. `first`: the weights that the run began with,
        which the reference is made of; None: it has no reference. `with_teacher`: False leaves out
        the teacher."""
        config = self.run.config_at(version)
        if self._updater_of is not None and self._updater_of[0] is config:
            return self._updater_of[1]
        job = self._job_of(config)
        teachers = job.load_teachers() if with_teacher else {}
        reference = None
        if first is not None:
            reference = job.open_reference(first)
        servers = job.teacher_servers if with_teacher else {}
        updater = job.make_updater(reference, teachers, servers)
        self._updater_of = (config, updater)
        return updater

    def _retrain(
        self,
        updater: Updater,
        state: TrainState,
        stored: Sequence[StoredGroup],
        step: int,
        origin: WeightsOrigin,
    ) -> TrainState:
        """Makes the updates of step `step` (from 0) on its groups, `stored`, and returns the new
        state. Compares the trainer's log-probs with the stored ones and writes into `origin`
        whether they are equal (`verified`, `diverged_at`); warns at the first step at which they
        are not."""
        state, result = updater.update(state, [entry.group for entry in stored], step)
        origin.verified = equal_logprobs(stored, result)
        if origin.diverged_at is None and origin.verified is False:
            origin.diverged_at = step + 1
            self.console.warning(
                f"retraining step {step + 1} gives other log-probs than the run's trainer had: "
                "this machine, its threads or versions differ, or the settings or first weights "
                "have changed since"
            )
        return state

    def _machine_changes(self, start: int) -> dict[str, list[str]]:
        """Returns the facts in which this machine differs from the one that saved the checkpoint of
        version `start` (if there is none, the oldest checkpoint): name -> [then, now]. Empty if
        nothing differs, or without any checkpoint."""
        records = self.run.checkpoint_records()
        if not records:
            return {}
        oldest = next(iter(records.values()))
        saved = records.get(start, oldest)["facts"]["machine"]
        changes = {}
        for name, value in machine().items():
            if saved.get(name) != value:
                changes[name] = [saved.get(name, "unknown"), value]
        return changes

    # ---- sampling

    @property
    def params(self) -> SamplingParams:
        """The settings that the group was sampled with: those of training, or, for the answers of
        an evaluation, those of `evaluation.*`."""
        params = self.config.sampling.params
        evaluation = self.config.evaluation
        if self.group.purpose is not Purpose.EVALUATE:
            return params
        # Samples for pass@k, besides greedy answers, have the settings of training.
        if evaluation.is_greedy and self.group.size > 1:
            return params
        return evaluation.params(params)

    def sample(self, params: Params) -> list[Completion]:
        """Samples the group's completions again, from its address, with the run's own compiled
        sampler, and returns them in the order of their indices. `params`: the weights of the
        group's version. Tools and environments are not called: their stored answers are used."""
        group = self.group
        engine = self.job.engine_maker()(group.purpose, group.size)
        request = GroupRequest(
            purpose=group.purpose,
            step=group.step,
            version=group.version,
            example=group.example,
            prompt_ids=group.prompt_ids,
            num_completions=group.size,
            params=self.params,
            subset=group.subset,
        )
        engine.load(group.version, params)
        sampled_as = sample_request(request, 0, self.config.seed)
        max_tokens = self.params.max_tokens
        if any(_has_turns(completion, max_tokens) for completion in group.completions):
            return sample_turns(engine, sampled_as, group)
        engine.submit([sampled_as])
        sampled = drain(engine)
        # 0: the id of the only request
        return [sampled[0, index] for index in range(group.size)]

    def likeliest(self, params: Params, most: int) -> list[list[dict[str, Any]]]:
        """Returns for each stored completion a record for each token: a dict with the `entropy` of
        the distribution that it was sampled from, and under `likeliest` the `most` likeliest
        tokens, the first one the likeliest, each with `id`, `text` and `logprob`. The distribution
        is over the whole vocabulary, at the temperature of sampling (1 for greedy sampling).
        `params`: the weights."""
        model = self.job.model.on(self.roles.sampler)
        group = self.group
        most = min(most, model.architecture.vocab_size)
        longest = 0
        for index in range(group.size):
            for prompt, tokens in group.branches_of(index):
                longest = max(longest, len(prompt) + tokens.stop - tokens.start)
        padded_length = -(-longest // LENGTH_STEP) * LENGTH_STEP  # rounded up
        by_completion = []
        for index, completion in enumerate(group.completions):
            records: list[dict[str, Any]] = []
            for prompt, tokens in group.branches_of(index):
                ids = np.concatenate([prompt, completion.token_ids[tokens]]).astype(np.int32)
                padded = jnp.asarray(np.pad(ids, (0, padded_length - len(ids)))[None])
                hidden = _states(model, params, padded, len(ids))
                # The state before a token gives its distribution; a completion's first one follows
                # the prompt.
                before = np.arange(len(prompt) - 1, len(ids) - 1)
                for start in range(0, len(before), CHUNK):
                    positions = before[start : start + CHUNK]
                    # Repeated up to CHUNK positions, so that one program serves all chunks.
                    states = hidden[:, np.resize(positions, CHUNK)]
                    of_chunk = self._distribution_records(model, most, params, states)
                    records.extend(of_chunk[: len(positions)])
            by_completion.append(records)
        return by_completion

    def _distribution_records(
        self, model: Model, most: int, params: Params, hidden: jax.Array
    ) -> list[dict[str, Any]]:
        """Returns T records with `entropy` and `likeliest`, one for the token after each of the
        states `hidden` [1, T, D]. Greedy sampling counts as temperature 1."""
        temperature = self.params.temperature or 1.0
        arrays = jax.device_get(_distributions(model, most, params, hidden, temperature))
        entropies, ids, logprobs = arrays
        records = []
        for position in range(hidden.shape[1]):
            likeliest = []
            for rank in range(most):
                token_id = int(ids[0, position, rank])
                likeliest.append(
                    {
                        "id": token_id,
                        "text": self.tokenizer.token_text(token_id),
                        "logprob": float(logprobs[0, position, rank]),
                    }
                )
            records.append({"entropy": float(entropies[0, position]), "likeliest": likeliest})
        return records


def _has_turns(stored: Completion, max_tokens: int) -> bool:
    """True if a stored completion had several turns, or had one that was cut before all of its
    `max_tokens`, which only happens to rollouts with turns; also if it has tokens of context or a
    prompt of its own."""
    is_cut = stored.stop_reason is StopReason.LENGTH and len(stored) < max_tokens
    has_context = not stored.loss_mask.all() or stored.prompt_ids is not None
    return is_cut or has_context or bool(stored.messages or stored.branches)


def sample_turns(engine: Engine, sampled_as: SampleRequest, group: Group) -> list[Completion]:
    """Samples the turns of a stored group again and returns its completions, in the order of their
    indices; `engine` has the weights already. Tools and environments are not called: their answers,
    and the prompts of branches, are taken from the stored completion. `sampled_as`: the request of
    the whole group. A completion ends at the first turn that differs from the stored one, because
    the answers would not fit."""
    new_id = count(1).__next__
    prompts = [group.prompt_of(index) for index in range(group.size)]
    turn_limits = []
    for completion in group.completions:
        # 0: the first turn begins with the completion
        turn_limits.append(_turn_limit(completion, 0, engine.eos_ids))
    engine.submit(rollout_requests(sampled_as, prompts, new_id, turn_limits))
    # For each completion: the branches that have ended, and the last one, which has not.
    ended_branches: list[list[Completion]] = [[] for _ in range(group.size)]
    last_branch: dict[int, Completion] = {}
    while not engine.idle:
        for sampled in chain.from_iterable(engine.step().values()):
            index = sampled.index
            stored = group.completions[index]
            ended = ended_branches[index]
            last_branch[index] = sampled
            start = sum(len(branch) for branch in ended)
            stop = start + len(sampled)
            is_equal = np.array_equal(stored.token_ids[start:stop], sampled.token_ids)
            next_prompt = None
            for branch in stored.branches:
                if branch.start == stop:
                    next_prompt = branch.prompt_ids
                    break
            rest = stored.loss_mask[stop:]  # False at tokens of context
            if sampled.waits and is_equal and next_prompt is None and len(rest):
                # In the record a tool's or the environment's answer follows: the tokens before the
                # next sampled one.
                context = stored.token_ids[stop : stop + int((~rest).cumprod().sum())]
                # The next turn begins after this context.
                turn_limit = _turn_limit(stored, stop + len(context), engine.eos_ids)
                engine.extend(sampled.request_id, index, context.tolist(), turn_limit)
                continue
            if sampled.waits:
                engine.end(sampled.request_id, index)
            if is_equal and next_prompt is not None:
                # In the record, a branch with a prompt of its own follows this turn.
                ended.append(sampled)
                turn_limit = _turn_limit(stored, stop, engine.eos_ids)
                request = branch_request(
                    request=sampled_as,
                    id=new_id(),
                    index=index,
                    prompt_ids=next_prompt,
                    branch=len(ended),
                    used=stop,
                    turn_limit=turn_limit,
                )
                engine.submit([request])
            elif sampled.waits:
                stop_reason = stored.stop_reason if is_equal else sampled.stop_reason
                last_branch[index] = replace(sampled, waits=False, stop_reason=stop_reason)
    completions = []
    for index, ended in enumerate(ended_branches):
        branch_prompts = [prompt_ids for prompt_ids, _ in group.branches_of(index)]
        branches = [*ended, last_branch[index]]
        completions.append(join_branches(branch_prompts[: len(branches)], branches))
    return completions


def _turn_limit(stored: Completion, start: int, eos_ids: Sequence[int]) -> int:
    """Returns the number of tokens after which the stored turn that begins at `start` may have been
    cut: its length if it has no end of sequence, else 0, which means no limit.

    The limit that an agent sets for a turn is not stored. A turn that was cut by it and one that
    was not have the same tokens.
    """
    stop = len(stored)
    for branch in stored.branches:
        if branch.start > start:
            stop = min(stop, branch.start)
    size = int(stored.loss_mask[start:stop].cumprod().sum())
    is_ended = size > 0 and int(stored.token_ids[start + size - 1]) in eos_ids
    return 0 if is_ended else size


def equal_logprobs(stored: Sequence[StoredGroup], result: UpdateResult) -> bool | None:
    """Compares the log-probs that an update computed with those that the run's trainer stored
    (`trainer_logprobs`). Returns True if all are equal bit for bit, False if one differs or only
    one side has it, None if there are none to compare. `stored`: the step's groups, in the order of
    the update."""
    compared = 0
    for number, entry in enumerate(stored):
        for index, arrays in enumerate(entry.token_arrays):
            before = arrays.get("trainer_logprobs")
            now = result.logprobs.get((number, index))
            if (before is None) != (now is None):
                return False
            if before is None:
                continue
            if np.asarray(now, np.float32).tobytes() != before.tobytes():
                return False
            compared += 1
    return True if compared else None


LENGTH_STEP = 64
"""Sequences whose states are computed are padded to a multiple of this length, so that few programs
are compiled."""


CHUNK = 128
"""Tokens whose logits are computed at once; each has some 150,000 floats."""


@partial(jax.jit, static_argnums=0)
def _states(model: Model, params: Params, tokens: jax.Array, length: Any) -> jax.Array:
    """Returns the hidden states [1, T, D] of tokens[1, T], of which the first `length` are real,
    the rest padding."""
    segment = (jnp.arange(tokens.shape[1]) < length)[None].astype(jnp.int32)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    # Stored sequences may be longer than those that the settings allow now.
    model = replace(model, longest_sequence=tokens.shape[1])
    before = jnp.maximum(positions - 1, 0)
    rows = PackedRows.of(model, segment, segment, positions, before)
    return forward(model, params, tokens, positions, rows)[0]


@partial(jax.jit, static_argnums=(0, 1))
def _distributions(
    model: Model, most: int, params: Params, hidden: jax.Array, temperature: float
) -> Any:
    """Returns (entropy[1, T], ids[1, T, most], log-probs[1, T, most]) of the distribution of the
    token after each of these states[1, T, D]. Entropies are in nats; `most`: how many of the
    likeliest tokens, the likeliest first."""
    logits = head_projection(model, output_head(params))(hidden)
    logprobs = jax.nn.log_softmax(logits / temperature)
    # Tokens of probability 0 add nothing (0 x -inf would be NaN).
    entropy = -jnp.sum(
        jnp.exp(logprobs) * jnp.where(jnp.isneginf(logprobs), 0.0, logprobs), axis=-1
    )
    values, ids = jax.lax.top_k(logprobs, most)
    return entropy, ids, values
