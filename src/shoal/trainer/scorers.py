"""Models that score tokens and do not learn: the reference, a teacher, the policy before the
update; and a teacher that gives whole distributions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.algorithm.loss import Objective
from shoal.config.derived import longest_sequence
from shoal.config.sections.model import TeacherSection
from shoal.config.train import Config
from shoal.mesh import Role, dispatching
from shoal.model.architecture import Architecture
from shoal.model.head import head_alone
from shoal.model.parameters import param_shapes, param_specs, shardings_of
from shoal.model.transformer import Model
from shoal.protocols import Printer
from shoal.records import Params, ShoalError
from shoal.trainer.batch import LearnerBatch, Shape, TeacherStates, TeacherTop
from shoal.trainer.step import Learner, put_batch, score_program, states_program, top_program
from shoal.weights.source import ModelSource, check_positions, make_model, open_model, teacher_model


def find_teachers(
    config: Config, student: ModelSource, console: Printer | None
) -> dict[str, ModelSource]:
    """Returns the source of each teacher that `teacher.path` names, by the teacher's name; weights
    are not read yet. Prints notes about them to `console`. ShoalError if the vocabulary of one is
    not the student's, or its files or positions do not fit."""
    found = {}
    for name, path in config.teacher.paths.items():
        teacher = open_model(teacher_model(config, path), console)
        # Vocabularies are compared, not families, because log-probs are compared id by id.
        if teacher.tokenizer.vocabulary() != student.tokenizer.vocabulary():
            raise ShoalError(
                f"teacher.path={path}: its vocabulary is not that of the model "
                f"{config.model.path}, so its log-probs would be of other tokens; give one of the "
                "same family"
            )
        check_positions(
            teacher.architecture, config.sampling, f"teacher.path={path}", config.teacher.room
        )
        # Called for its error alone.
        teacher.check()
        found[name] = teacher
    return found


def load_scorer(config: Config, source: ModelSource, role: Role) -> ModelScorer:
    """Loads the weights of a model that only scores onto the devices of `role`, in the type of the
    computation, and returns its scorer. `config` is the run's, `source` are the model's files."""
    model = make_model(config.model, source.architecture, role, longest_sequence(config))
    return ModelScorer(model, source.load(role, model.dtype))


@dataclass(frozen=True)
class ParameterScorer:
    """A `Scorer` by the trained model with given parameters: the trainer's before an update."""

    learner: Learner
    parameters: Params

    def score(self, batch: LearnerBatch) -> jax.Array:
        return self.learner.score(self.parameters, batch)


@dataclass(frozen=True)
class ModelScorer:
    """A `Scorer` by another model on its own devices, with weights that are never trained: the
    reference, or a teacher with the same vocabulary."""

    model: Model
    parameters: Params

    def score(self, batch: LearnerBatch) -> jax.Array:
        """Returns the log-probs float32[R, T] of the batch's tokens, without rows that were added
        as padding."""
        num_rows = len(batch.tokens)
        # the default of the class, by which the platform decides
        score = score_program(self.model, Objective.chunk_elements)
        logprobs = score(self.parameters, self.put(batch))
        with dispatching(self.model.role.mesh.devices.flat):  # samplers may decode there
            if len(logprobs) > num_rows:
                return logprobs[:num_rows]
            return logprobs

    def put(self, batch: LearnerBatch) -> LearnerBatch:
        """Puts the batch on this model's devices; rows of zeros, which are padding, are added if
        the devices do not divide its rows. The batch that was passed is unchanged."""
        num_padding = -len(batch.tokens) % self.model.role.batch_shards
        if num_padding == 0:
            return put_batch(self.model, batch)

        def pad(array: np.ndarray) -> np.ndarray:
            widths = [(0, 0)] * array.ndim
            widths[0] = (0, num_padding)
            return np.pad(array, widths)

        # the temperature has no rows to pad
        padded = jax.tree.map(pad, replace(batch, temperature=None))
        return put_batch(self.model, replace(padded, temperature=batch.temperature))


@dataclass(frozen=True)
class TeacherDistributions:
    """A teacher whose distributions of the next token the policy is compared with, a micro-batch at
    a time, just before its gradient is computed. A prompt is computed once for its completions, as
    in training.

    Of a divergence over the whole vocabulary the teacher computes its hidden states, on its own
    devices; its head, of which the trainer's devices have a copy unless they are the same, makes
    logits of them in the update, some tokens at a time. No device ever has [tokens, vocabulary]."""

    scorer: ModelScorer
    student: Model
    top_k: int  # 0: the whole vocabulary
    head: Params | None  # on the trainer's devices; None with `top_k`

    @classmethod
    def of(
        cls, section: TeacherSection, scorer: ModelScorer, student: Model
    ) -> TeacherDistributions:
        """Returns the distributions of a teacher whose weights `scorer` has, by the settings of
        `teacher`. Side effect: the head is copied to the devices of the trainer's role, which is
        that of `student`."""
        if section.divergence == "topk":
            return cls(scorer, student, section.top_k, None)
        head = head_alone(scorer.parameters)
        if scorer.model.role != student.role:
            specs = head_alone(param_specs(scorer.model.architecture))
            with dispatching(_devices_of(scorer.model, student)):
                head = jax.device_put(head, shardings_of(specs, student.role))
        return cls(scorer, student, 0, head)

    def targets(self, batch: LearnerBatch) -> TeacherStates | TeacherTop:
        """Returns what the teacher says of a micro-batch of host arrays, on the trainer's devices;
        with `read_at` of the tokens of the policy's rows."""
        model = self.scorer.model
        own_batch = self.scorer.put(replace(batch, experts=None, targets=None))
        program = states_program(model)
        if self.top_k:
            vocab_size = shared_vocab_size(model.architecture, self.student.architecture)
            program = top_program(model, min(self.top_k, vocab_size), vocab_size)
        said = program(self.scorer.parameters, own_batch)
        if model.role != self.student.role:
            num_rows = len(batch.tokens)  # the scorer's devices may have more, as padding
            with dispatching(_devices_of(model, self.student)):
                said = self.student.role.put_rows(jax.tree.map(lambda x: x[:num_rows], said))
        if self.top_k:
            return TeacherTop(*said)
        return TeacherStates(said, self.head, _head_model(self.student, model.architecture))


def target_shapes(
    section: TeacherSection, a: Architecture, student: Model, shape: Shape
) -> TeacherStates | TeacherTop:
    """Returns the shapes, with shardings, of what `TeacherDistributions.targets` returns for a
    micro-batch of this shape. `a`: the teacher's architecture. ShoalError if the trainer's mesh
    does not divide its sizes."""
    role = student.role

    def by_token(size: int, dtype: Any) -> jax.ShapeDtypeStruct:
        dimensions = (shape.rows, shape.length, size)
        sharding = role.sharding(("batch", None, None), dimensions)
        return jax.ShapeDtypeStruct(dimensions, dtype, sharding=sharding)

    if section.divergence == "topk":
        k = min(section.top_k, shared_vocab_size(a, student.architecture))
        return TeacherTop(by_token(k, jnp.int32), by_token(k + 1, jnp.float32))
    head = param_shapes(head_alone(param_specs(a)), role, student.dtype)
    return TeacherStates(by_token(a.hidden_size, student.dtype), head, _head_model(student, a))


def shared_vocab_size(a: Architecture, other: Architecture) -> int:
    """Returns how many tokens the heads of two models with one vocabulary share: heads may be wider
    than it, each by its own padding."""
    return min(a.vocab_size, other.vocab_size)


def _head_model(student: Model, a: Architecture) -> Model:
    """Returns the teacher's `Model`, of architecture `a`, where the student is trained: there its
    head alone is computed."""
    return replace(student, architecture=a)


def _devices_of(*models: Model) -> set[Any]:
    """Returns the devices of several models."""
    devices: set[Any] = set()
    for model in models:
        devices.update(model.role.mesh.devices.flat)
    return devices
