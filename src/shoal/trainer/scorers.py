"""Models that score tokens and do not learn: the reference, a teacher, the policy before the
update."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np

from shoal.algorithm.loss import Objective
from shoal.config.sections.model import ModelSection
from shoal.config.train import Config
from shoal.mesh import Role, dispatching
from shoal.model.transformer import Model
from shoal.protocols import Printer
from shoal.records import Params, ShoalError
from shoal.trainer.batch import LearnerBatch
from shoal.trainer.step import Learner, put_batch, score_program
from shoal.weights.source import ModelSource, check_positions, make_model, open_model, section_of


def find_teacher(config: Config, student: ModelSource, console: Printer | None) -> ModelSource:
    """Returns the source of the teacher that `teacher.path` names; its weights are not read yet.
    Prints notes about it to `console`. ShoalError if its vocabulary is not the student's, or its
    files or positions do not fit."""
    teacher = open_model(section_of(config.model, config.teacher.path), console)
    # Vocabularies are compared, not families, because log-probs are compared id by id.
    if teacher.tokenizer.vocabulary() != student.tokenizer.vocabulary():
        raise ShoalError(
            f"teacher.path={config.teacher.path}: its vocabulary is not that of the model "
            f"{config.model.path}, so its log-probs would be of other tokens; give one of the same "
            "family"
        )
    check_positions(teacher.architecture, config.sampling, f"teacher.path={config.teacher.path}")
    # Called for its error alone.
    teacher.check()
    return teacher


def load_scorer(section: ModelSection, source: ModelSource, role: Role) -> ModelScorer:
    """Loads the weights of a model that only scores onto the devices of `role`, in the type of the
    computation, and returns its scorer. `section` are its settings, `source` its files."""
    model = make_model(section, source.architecture, role)
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
