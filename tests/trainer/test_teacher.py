"""Updates with a teacher's distributions: the gradient by the definition, on meshes, with devices
of its own, against itself; what the compiled update needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import arrays
from small import (
    LLAMA3,
    QWEN3,
    batches,
    learner,
    random_groups,
    random_parameters,
    relative,
    roles,
)

from shoal.algorithm.divergence import bucket_scores, divergence, top_buckets
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import TeacherSection
from shoal.mesh import Roles, make_roles
from shoal.model.architecture import Architecture
from shoal.model.head import logits
from shoal.model.parameters import shardings
from shoal.model.transformer import Model
from shoal.trainer.batch import LearnerBatch, Shape
from shoal.trainer.loss import batch_states, make_objective
from shoal.trainer.scorers import ModelScorer, TeacherDistributions, target_shapes
from shoal.trainer.step import Learner, TrainState

STUDENT = replace(QWEN3, num_layers=1)
TEACHER = replace(LLAMA3, num_layers=2, hidden_size=48, vocab_size=104, rope_scaling=None)
"""Another family, another width, and a wider head over the same vocabulary."""
CHUNK = 8 * 2 * STUDENT.vocab_size
"""Logits at once: the rows have several chunks."""
TEMPERATURE = 0.7


def section(divergence: Any, beta: float = 1.0, top_k: int = 5) -> TeacherSection:
    return TeacherSection("teacher", 0.3, divergence, beta, top_k)


def batch_of_rows(shards: int = 1) -> LearnerBatch:
    (batch,) = batches(random_groups(STUDENT, 8, 2, 9, 12), temperature=TEMPERATURE, shards=shards)
    return batch


def taught(
    given: TeacherSection,
    where: Roles,
    batch: LearnerBatch,
    teacher: Architecture = TEACHER,
    teacher_seed: int = 5,
) -> tuple[np.ndarray, dict[str, Any], Learner]:
    """The gradient of a micro-batch and its sums."""
    objective = make_objective(AlgorithmSection(), given)
    one = learner(STUDENT, replace(objective, chunk_elements=CHUNK), where)
    parameters = jax.device_put(random_parameters(STUDENT), shardings(STUDENT, where.trainer))
    model = Model(teacher, where.reference)
    theirs = random_parameters(teacher, teacher_seed)
    scorer = ModelScorer(model, jax.device_put(theirs, shardings(teacher, where.reference)))
    distributions = TeacherDistributions.of(given, scorer, one.model)
    targets = distributions.targets(batch)
    total, _ = one.accumulate(None, TrainState(parameters, None, None), batch, targets)
    gradient = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(total.gradient)])
    return gradient, jax.device_get(total.sums), one


def by_definition(given: TeacherSection, batch: LearnerBatch) -> tuple[np.ndarray, float]:
    """The same from all logits at once: (gradient of the divergence's term alone, its mean)."""
    student = Model(STUDENT, roles().trainer)
    teacher = Model(TEACHER, roles().trainer)
    theirs = random_parameters(TEACHER, 5)

    def scores(model: Model, parameters: Any) -> jax.Array:
        states = batch_states(model, parameters, batch)
        return logits(model, parameters, states)[..., : STUDENT.vocab_size] / TEMPERATURE

    their_scores = scores(teacher, theirs)

    def loss(parameters: Any) -> tuple[jax.Array, jax.Array]:
        own = scores(student, parameters)
        if given.divergence == "topk":
            ids, logprobs = top_buckets(their_scores, given.top_k)
            values = divergence(bucket_scores(own, ids), logprobs, given.beta)
        else:
            values = divergence(own, their_scores, given.beta)
        term = (given.coef * batch.weight * jnp.where(batch.loss_mask, values, 0)).sum()
        return term, values[batch.loss_mask].mean()

    gradient, mean = jax.grad(loss, has_aux=True)(random_parameters(STUDENT))
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)]), float(mean)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        section("full", 0.4),
        pytest.param(section("full", 1.0), marks=pytest.mark.slow),
        pytest.param(section("full", 0.0), marks=pytest.mark.slow),
        pytest.param(section("topk", 0.4), marks=pytest.mark.slow),
        section("topk", 0.0),
    ],
    ids=str,
)
def test_the_update_has_the_gradient_of_the_definition(given):
    """Without a reward, whose term is 0 where advantages are."""
    batch = batch_of_rows()
    batch = replace(batch, advantage=np.zeros_like(batch.advantage))
    gradient, sums, _ = taught(given, roles(), batch)
    expected, mean = by_definition(given, batch)
    assert relative(gradient, expected) < 2e-6
    value, count = sums["teacher/divergence"]
    assert value / count == pytest.approx(mean, rel=1e-5) and count == batch.loss_mask.sum()


@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"fsdp": 2, "tensor": 2}, {"context": 2}], ids=str)
@pytest.mark.parametrize("divergence", ["full", "topk"])
@pytest.mark.slow
def test_on_a_mesh_the_gradient_is_that_of_one_device(divergence, mesh):
    batch = batch_of_rows(shards=2)
    given = section(divergence, 0.4)
    alone, sums, _ = taught(given, roles(), batch)
    split, split_sums, _ = taught(given, roles(**mesh), batch)
    assert relative(split, alone) < 1e-5
    assert split_sums["teacher/divergence"][0] == pytest.approx(
        sums["teacher/divergence"][0], rel=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["full", "topk"])
def test_a_teacher_on_devices_of_its_own_says_the_same(divergence):
    """Also if they are more than the rows: then rows of padding are added and taken away."""
    batch = batch_of_rows(shards=2)
    given = section(divergence, 0.4)
    alone, _, _ = taught(given, roles(), batch)
    devices = jax.devices()
    mesh = MeshSection(fsdp=2, trainer="2", sampler="[2,3]", reference="[4,5,6,7]")
    apart, _, _ = taught(given, make_roles(mesh, devices, 16), batch)
    assert relative(apart, alone) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_from_itself_nothing_is_learned(beta):
    """The teacher has the student's weights: its states come from another program, whose rounding
    is all that is left."""
    batch = batch_of_rows()
    given = replace(section("full", beta), coef=1.0)
    batch = replace(batch, advantage=np.zeros_like(batch.advantage))
    gradient, sums, _ = taught(given, roles(), batch, STUDENT, 0)
    other, _, _ = taught(given, roles(), batch, STUDENT, 1)
    assert np.linalg.norm(gradient) < 1e-5 * np.linalg.norm(other)
    value, count = sums["teacher/divergence"]
    assert abs(value / count) < 1e-6


@pytest.mark.system
@pytest.mark.parametrize("divergence", ["full", "topk"])
def test_an_update_needs_little_more_than_without_distributions(divergence):
    """By the compiler's account, with a large vocabulary and the teacher's head included: arguments
    and temporary arrays."""
    student = replace(STUDENT, vocab_size=32768, hidden_size=64, num_layers=4)
    teacher = replace(student, num_layers=8)
    shape = Shape(1, 4096)
    needed = {}
    for name in ("sampled", divergence):
        given = section(name)
        one = learner(student, make_objective(AlgorithmSection(), given))
        targets = None
        if given.gives_distributions:
            targets = target_shapes(given, teacher, one.model, shape)
        (batch,) = batches(random_groups(student, 1, 2, 9, 12), shape)
        state = one.shapes()
        programs: dict[str, Any] = one.programs
        compiled = programs["accumulate"].compile(
            programs["zero"].eval_shape(), state.trainable, None, batch, None, targets
        )
        memory = compiled.memory_analysis()
        needed[name] = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        largest = max(elements for _, elements in arrays(compiled.as_text()))
        assert largest < shape.tokens * student.vocab_size
    assert needed[divergence] < 1.2 * needed["sampled"]
