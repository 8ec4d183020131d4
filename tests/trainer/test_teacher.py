"""Updates with a teacher's distributions: the gradient by the definition, on meshes, with devices
of its own, against itself; what the compiled update needs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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
from shoal.records import Example, Group, ShoalError
from shoal.trainer.batch import BatchLayout, LearnerBatch, Shape, TokenTerms, pack, unpack
from shoal.trainer.loss import batch_states, make_objective
from shoal.trainer.scorers import ModelScorer, TeacherDistributions, target_shapes
from shoal.trainer.step import Learner, TrainState
from shoal.trainer.teachers import Teachers, check_rows, teacher_of

STUDENT = replace(QWEN3, num_layers=1)
TEACHER = replace(LLAMA3, num_layers=2, hidden_size=48, vocab_size=104, rope_scaling=None)
"""Another family, another width, and a wider head over the same vocabulary."""
CHUNK = 8 * 2 * STUDENT.vocab_size
"""Logits at once: the rows have several chunks."""
TEMPERATURE = 0.7


def section(divergence: Any, beta: float = 1.0, top_k: int = 5) -> TeacherSection:
    return TeacherSection("teacher", coef=0.3, divergence=divergence, beta=beta, top_k=top_k)


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


# ---- prompts of its own, several teachers

HINTED = random_groups(STUDENT, 5, 3, 9, 12, seed=4)
"""Groups whose rows name teachers in turn."""
HINTED = [
    replace(group, example=Example(row, "q", {"teacher": "ab"[row % 2]}))
    for row, group in enumerate(HINTED)
]
ALONE = Shape(1, 48)
"""Room for one completion after the longest prompt."""


def prompt_with_hint(example: Example) -> np.ndarray:
    """A prompt of a teacher: longer than the policy's, or shorter, by row."""
    rng = np.random.default_rng(100 + example.row)
    return rng.integers(0, STUDENT.vocab_size, (3, 14, 20, 1, 9)[example.row]).astype(np.int32)


def teachers_of(given: TeacherSection, where: Roles, student: Model) -> Teachers:
    """Two teachers of two widths, which read prompts of their own."""
    scorers = {}
    for name, (a, seed) in of_names().items():
        theirs = jax.device_put(random_parameters(a, seed), shardings(a, where.reference))
        scorers[name] = ModelScorer(Model(a, where.reference), theirs)
    return Teachers.of(replace(given, hint="{answer}"), scorers, student, prompt_with_hint)


def of_names() -> dict[str, tuple[Architecture, int]]:
    return {"a": (TEACHER, 5), "b": (STUDENT, 6)}


def weights_of(groups: list[Group]) -> np.ndarray:
    return np.random.default_rng(8).uniform(0.1, 1.0, (len(groups), groups[0].size)) / 100


def taught_by_several(given: TeacherSection, where: Roles, shards: int) -> tuple[np.ndarray, float]:
    """The gradient of all micro-batches, and the mean divergence."""
    objective = make_objective(AlgorithmSection(), given)
    one = learner(STUDENT, replace(objective, chunk_elements=CHUNK), where)
    parameters = jax.device_put(random_parameters(STUDENT), shardings(STUDENT, where.trainer))
    teachers = teachers_of(given, where, one.model)
    batches = teachers.pack(
        HINTED,
        range(len(HINTED)),
        TokenTerms(np.zeros((len(HINTED), 3)), weights_of(HINTED)),
        BatchLayout([Shape(shards, 96)], TEMPERATURE),
    )
    assert {batch.teacher for batch in batches} == {"a", "b"}
    total = None
    for batch in batches:
        targets = teachers.targets(parameters, batch)
        total, _ = one.accumulate(total, TrainState(parameters, None, None), batch.arrays, targets)
    assert total is not None
    value, count = jax.device_get(total.sums)["teacher/divergence"]
    gradient = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(total.gradient)])
    return gradient, value / count


def each_alone(prompt: Any) -> list[tuple[int, LearnerBatch]]:
    """Each completion after `prompt` of its group, in a row of its own, with the group's number."""
    alone = []
    for number, group in enumerate(HINTED):
        for index in range(group.size):
            only = replace(
                group,
                prompt_ids=prompt(group),
                completions=(group.completions[index],),
                rewards=np.ones(1),
                valid=np.ones(1, bool),
            )
            weight = weights_of(HINTED)[number : number + 1, index : index + 1]
            (batch,) = pack(
                [only], [0], TokenTerms(np.zeros((1, 1)), weight), BatchLayout([ALONE], TEMPERATURE)
            )
            alone.append((number, batch.arrays))
    return alone


def of_several_by_definition(given: TeacherSection) -> np.ndarray:
    """The gradient from all logits of each completion alone, after both prompts."""
    models = {name: Model(a, roles().trainer) for name, (a, _) in of_names().items()}
    theirs = {name: random_parameters(a, seed) for name, (a, seed) in of_names().items()}

    @partial(jax.jit, static_argnums=0)
    def scores(model: Model, parameters: Any, batch: LearnerBatch) -> jax.Array:
        states = batch_states(model, parameters, batch)
        return logits(model, parameters, states)[..., : STUDENT.vocab_size] / TEMPERATURE

    student = Model(STUDENT, roles().trainer)
    own = each_alone(lambda group: group.prompt_ids)
    hinted = each_alone(lambda group: prompt_with_hint(group.example))

    @jax.jit
    def gradient(batch: LearnerBatch, their_scores: jax.Array) -> Any:
        def loss(parameters: Any) -> jax.Array:
            values = divergence(scores(student, parameters, batch), their_scores, given.beta)
            return (given.coef * batch.weight * jnp.where(batch.loss_mask, values, 0)).sum()

        return jax.grad(loss)(random_parameters(STUDENT))

    total = None
    for (number, batch), (_, batch_of_teacher) in zip(own, hinted, strict=True):
        name = HINTED[number].example.columns["teacher"]
        their_scores = np.asarray(scores(models[name], theirs[name], batch_of_teacher))
        aligned = np.zeros_like(their_scores)
        aligned[batch.loss_mask] = their_scores[batch_of_teacher.loss_mask]
        one = gradient(batch, aligned)
        total = one if total is None else jax.tree.map(jnp.add, total, one)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(total)])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2}, {"context": 2}], ids=str)
def test_teachers_by_row_that_read_prompts_of_their_own_against_the_definition(mesh):
    """Of each completion alone: what packing, shared prompts and the two layouts do not change."""
    given = section("full", 0.4)
    gradient, mean = taught_by_several(given, roles(**mesh), 2 if mesh == {"fsdp": 2} else 1)
    assert mean > 0.1
    assert relative(gradient, of_several_by_definition(given)) < 5e-6


@pytest.mark.slow
def test_the_likeliest_tokens_after_prompts_of_its_own_are_all_of_them_if_k_is():
    alone, _ = taught_by_several(section("full", 0.4), roles(), 1)
    buckets, _ = taught_by_several(section("topk", 0.4, STUDENT.vocab_size), roles(), 1)
    assert relative(buckets, alone) < 5e-6


@pytest.mark.slow
def test_sampled_tokens_are_scored_after_prompts_of_its_own():
    """Also with the tokens that a truncating sampler chose from."""
    rng = np.random.default_rng(2)
    groups = []
    for group in HINTED:
        completions = []
        for completion in group.completions:
            others = rng.integers(0, STUDENT.vocab_size, (len(completion), 4))
            support_ids = np.concatenate([completion.token_ids[:, None], others], 1)
            extra = {"support_ids": support_ids.astype(np.int32)}
            completions.append(replace(completion, extra=extra))
        groups.append(replace(group, completions=tuple(completions)))
    hinted = [replace(one, prompt_ids=prompt_with_hint(one.example)) for one in groups]
    student = Model(STUDENT, roles().trainer)
    teachers = teachers_of(section("sampled"), roles(), student)
    terms = TokenTerms(np.zeros((5, 3)), np.zeros((5, 3)))
    layout = BatchLayout([Shape(1, 96)], TEMPERATURE, max_support=5)
    told = {}
    expected = {}
    for batch in teachers.pack(groups, range(5), terms, layout):
        told |= unpack([batch.of_teacher()], [np.asarray(teachers.score(None, batch))])
    # The same groups with the teacher's prompts as their own.
    for batch in replace(teachers, prompt_of=None).pack(hinted, range(5), terms, layout):
        expected |= unpack([batch], [np.asarray(teachers.score(None, batch))])
    assert told.keys() == expected.keys() and len(told) == 15
    for key in told:
        np.testing.assert_allclose(told[key], expected[key], atol=2e-6)
        assert (told[key] < 0).all()


def test_rows_name_one_of_several_teachers_and_have_room_for_their_prompts():
    given = TeacherSection("a=./x,b=./y", hint="{answer}", hint_tokens=3)
    assert given.paths == {"a": "./x", "b": "./y"}
    assert TeacherSection("sweep/lr=0.1").paths == {"": "sweep/lr=0.1"}
    rows = [Example(0, "q", {"teacher": "a"}), Example(1, "q", {"teacher": "b"})]
    assert [teacher_of(row, given.paths) for row in rows] == ["a", "b"]
    assert teacher_of(Example(0, "q"), [""]) == ""

    def check(rows: list[Example], given: TeacherSection, added: int) -> None:
        def encode(tokens: int) -> Any:
            return lambda _: np.zeros(tokens, np.int32)

        check_rows(given, rows, encode(5), encode(5 + added), max_tokens=9, most_rows=10)

    check(rows, given, 3)
    with pytest.raises(ShoalError, match=r"longer by 4 tokens, and teacher\.hint_tokens is 3"):
        check(rows, given, 4)
    for columns, said in (({}, "has no column `teacher`"), ({"teacher": "c"}, "has teacher='c'")):
        with pytest.raises(ShoalError, match=f"row 7 {said}.*expected one of a, b"):
            check([*rows, Example(7, "q", columns)], given, 3)
