"""Makes the parts of a run from the sections of its configuration: learner, updater, evaluation sets."""

from __future__ import annotations

from shoal.config.schema import Config
from shoal.mesh import Role
from shoal.model.transformer import Model
from shoal.rollout.publication import place
from shoal.run.derived import longest_sequence, max_support, micro_batch_shapes, num_updates, schedule_of  # noqa: F401
from shoal.run.loading import ModelSpec
from shoal.trainer.loss import make_objective
from shoal.trainer.step import Learner, ModelScorer
from shoal.trainer.update import Updater
from shoal.types import Params


def make_learner(config: Config, model: Model) -> Learner:
    return Learner(model, make_objective(config.algorithm), config.optimizer, num_updates(config))


def open_reference(config: Config, spec: ModelSpec, model: Model, role: Role,
                   first: Params | None) -> ModelScorer | None:
    """The reference on its role's devices, in the type of the computation; None without a KL term, where it would hold
    a model's memory for nothing. `first`: the weights, if they have been read already."""
    if config.algorithm.kl_coef == 0:
        return None
    model = model.on(role)
    return ModelScorer(model, spec.load(role, model.dtype) if first is None else place(model, first))


def make_updater(config: Config, learner: Learner, reference: ModelScorer | None,
                 teacher: ModelScorer | None) -> Updater:
    a = config.algorithm
    return Updater(
        learner, a, config.batch, temperature=config.sampling.temperature, seed=config.seed, reference=reference,
        teacher=teacher, teacher_coef=config.teacher.coef, max_tokens=config.sampling.max_completion_tokens,
        longest=longest_sequence(config), max_support=max_support(config))
