"""The plan of a job against what the job really holds, and its figures by hand."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import HYBRID, QWEN3, SHARED_KEYS, WINDOWED, random_parameters, roles

from shoal import cli
from shoal.budget import advice as advice_module
from shoal.budget.advice import (
    Change,
    advise,
    faster_changes,
    lossy_changes,
    memory_saving_changes,
    saving_trials,
    suggest_fit,
)
from shoal.budget.budget import (
    BatchSize,
    Budget,
    DeviceRates,
    Item,
    ModelSize,
    PlannedStep,
    ProgramCost,
    RolePlacement,
    StepProgram,
    phase_of,
    verdict,
)
from shoal.budget.memory import AvailableMemory, bytes_per_device, parameter_count
from shoal.commands import plan
from shoal.config.commands import PlanConfig
from shoal.config.derived import longest_sequence
from shoal.config.key import build, get_value, keys_of
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.critic import CriticSection
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import ModelSection, TeacherSection
from shoal.config.sections.optimizer import BatchSection, OptimizerSection
from shoal.config.sections.sampling import SamplingSection
from shoal.config.sections.train import TrainSection
from shoal.config.train import Config
from shoal.job.memory import job_budget
from shoal.mesh import make_mesh
from shoal.mesh.accelerators import ACCELERATORS, calibrated, read_calibration
from shoal.model.architecture import Architecture, Experts, Layer
from shoal.model.attention import caches
from shoal.model.attention.blocked import block_size
from shoal.model.config_writer import config_of
from shoal.model.flops import forward_flops
from shoal.model.published import model_named
from shoal.model.transformer import Model
from shoal.plan.analysis import _compute_seconds, analyse, traced_costs
from shoal.plan.hlo import Costs, Operation
from shoal.plan.job import Planned, PlannedJob, planned_job
from shoal.plan.plan import (
    compilers,
    cost,
    describe,
    extrapolate,
    is_deep,
    make_plan,
    shallow_layers,
)
from shoal.records import Completion, Example, Group, Purpose, ShoalError, StopReason
from shoal.sampler.programs import DECODE_CHUNK
from shoal.trainer.batch import BatchLayout, TokenTerms, pack
from shoal.weights.sampler_copy import publish_to
from shoal.weights.source import planned_architecture

SMALL = replace(QWEN3, num_layers=2)
SAMPLING = SamplingSection(max_prompt_tokens=64, max_completion_tokens=64)
BATCH = BatchSection(prompts_per_step=8, group_size=2, micro_tokens=256)


@pytest.fixture
def model(tmp_path, monkeypatch) -> ModelSection:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    return write_model(tmp_path, SMALL)


def write_model(folder, architecture) -> ModelSection:
    (folder / "config.json").write_text(json.dumps(config_of(architecture)))
    return ModelSection(path=str(folder))


@pytest.fixture
def planned() -> Iterator[Callable[..., PlannedJob]]:
    """Opens planned jobs, which are closed with the test."""
    with ExitStack() as stack:
        yield lambda config, layers=0: stack.enter_context(planned_job(config, "", layers))


@pytest.mark.parametrize("before", [None, "tensorfloat32"])
def test_a_planned_job_leaves_jaxs_precision_as_it_was(before):
    key = "jax_default_matmul_precision"
    kept = jax.config.values[key]
    try:
        jax.config.update(key, before)
        with planned_job(Config(model=ModelSection(dtype="float32")), "") as job:
            job.job.budget_for(replace(job.config, model=ModelSection(dtype="bfloat16")))
            assert jax.config.values[key] == "highest"  # also after another job was described
        assert jax.config.values[key] == before
    finally:
        jax.config.update(key, kept)


def bytes_of(tree: Any) -> int:
    """On the first device, of real arrays."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == first
    )


@pytest.mark.slow
def test_a_critic_is_held_and_its_programs_are_the_runs(model, planned):
    mesh = MeshSection(trainer="1")
    algorithm = AlgorithmSection(advantage="gae", num_minibatches=2)
    job = planned(
        Config(model=model, mesh=mesh, sampling=SAMPLING, batch=BATCH, algorithm=algorithm)
    )
    critic = job.job.critic
    budget = job.budget()
    held = {item.part: item.bytes for item in budget.items_of("trainer", "always")}
    shapes = critic.learner.shapes()
    assert held["critic"] == bytes_per_device(shapes.trainable)
    assert held["critic's moments"] == 2 * held["critic"]
    planned_programs = job.programs()
    for name in ("score", "accumulate", "apply"):
        of_critic = planned_programs[f"{name} critic"]
        assert of_critic.runs == planned_programs[name].runs
        assert of_critic.program is critic.learner.programs[name]
        # The arguments are those that the program takes.
        of_critic.program.lower(*of_critic.args, **of_critic.kwargs)


@pytest.mark.slow
def test_a_critic_on_the_policys_layers_is_a_head(model, planned):
    mesh = MeshSection(trainer="1")
    algorithm = AlgorithmSection(advantage="gae", num_minibatches=2)
    config = Config(
        model=model,
        mesh=mesh,
        sampling=SAMPLING,
        batch=BATCH,
        algorithm=algorithm,
        critic=CriticSection(shared=True),
    )
    job = planned(config)
    held = {item.part: item.bytes for item in job.budget().items_of("trainer", "always")}
    assert held["critic"] == 4 * job.job.model.architecture.hidden_size
    assert held["critic's moments"] == 2 * held["critic"]
    programs = job.programs()
    assert "accumulate critic" not in programs
    for name in ("accumulate", "score critic", "apply critic"):
        programs[name].program.lower(*programs[name].args, **programs[name].kwargs)
    alone = planned(replace(config, critic=CriticSection()))
    assert job._planned_step().model_flops < alone._planned_step().model_flops


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [MeshSection(), MeshSection(fsdp=8), MeshSection(data=2, fsdp=2, tensor=2)],
    ids=["one", "fsdp", "all"],
)
def test_what_roles_hold_is_what_the_runs_arrays_take(model, planned, mesh):
    if mesh == MeshSection():
        mesh = MeshSection(trainer="1")
    moments = OptimizerSection(moments="bfloat16" if mesh.tensor > 1 else "float32")
    job = planned(
        Config(
            model=replace(model, dtype="bfloat16"),
            mesh=mesh,
            sampling=SAMPLING,
            batch=BATCH,
            optimizer=moments,
        )
    )
    budget = job.budget()
    role = job.roles.trainer

    def held(role: str, phase: str) -> dict[str, int]:
        return {item.part: item.bytes for item in budget.items_of(role, phase)}

    parameters = jax.device_put(
        random_parameters(SMALL), jax.tree.map(lambda s: s.sharding, job.learner.shapes().trainable)
    )
    state = job.learner.init(parameters)
    assert role.mesh.size == {1: 1}.get(mesh.fsdp * mesh.data * mesh.tensor, 8)
    assert held("trainer", "always") == {
        "parameters": bytes_of(parameters),
        "Adam's moments": bytes_of(
            [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
        ),
    }
    total, _ = job.learner.accumulate(None, state, random_batch(job))
    assert held("trainer", "update") == {"gradient": bytes_of(total.gradient)}
    published = publish_to(job.model.on(job.roles.sampler), parameters)
    assert held("sampler", "always") == {"the sampler's copy": bytes_of(published)}
    caches = {}
    for name, engine in job.engines.items():
        caches[f"KV caches ({name})"] = bytes_of(engine.programs["make_state"]())
    largest = max(caches, key=lambda name: caches[name])
    assert held("sampler", "sampling") == {largest: caches[largest]}


def random_batch(job: PlannedJob) -> Any:
    """A micro-batch of the planned shape on the host."""
    return jax.tree.map(
        lambda shape: np.zeros(shape.shape, shape.dtype), job._batch(job.roles.trainer)
    )


@pytest.mark.slow
def test_a_plan_for_the_devices_here(model, tmp_path, capsys):
    words = [
        "plan",
        f"model.path={model.path}",
        "mesh.trainer=1",
        "sampling.max_prompt_tokens=64",
        "json=true",
        "sampling.max_completion_tokens=64",
        "batch.prompts_per_step=8",
        "batch.group_size=2",
        "train.pass_k=0",
    ]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and list(found["programs"]) == ["prefill", "decode", "accumulate", "apply"]
    memory = found["programs"]["accumulate"]["memory"]
    needed = found["memory"]["programs"]["accumulate"]
    by_compiler = memory["arguments"] + memory["temp"] + memory["output"] - memory["alias"]
    assert sum(needed.values()) - needed["Adam's moments"] == pytest.approx(by_compiler, rel=0.15)
    assert found["verdict"].startswith("fits: ") and found["seconds"] == {}
    # what was compiled is kept: nothing compiles again
    files = list((tmp_path / "cache" / "plan").iterdir())
    assert len(files) == 4
    # and with a calibration of these devices their seconds are known, too
    figures = {
        "hbm": [2e10, 1e10, 3e10],
        "float32": [5e10] * 3,
        "bfloat16": [1e9] * 3,
        "launch": [1e-6] * 3,
    }
    calibration = tmp_path / "cpu.json"
    calibration.write_text(
        json.dumps({"device": "cpu", "devices": 8, "jax": "0.10.2", "figures": figures})
    )
    timed = [
        *(word for word in words if word != "json=true"),
        f"calibration={calibration}",
        "price=1000",
        "steps=20",
    ]
    assert cli.main(timed) == 0
    said = capsys.readouterr()
    cost = re.search(
        r"; a step with completions of 64 tokens takes about \S+ s and costs ([\d.]+) \(20 steps: "
        r"([\d.]+)\)",
        said.out,
    )
    assert cost and float(cost[2]) == pytest.approx(20 * float(cost[1]), rel=0.01)
    assert (
        "measured on 8 cpus with JAX 0.10.2, instead of the maker's figures: hbm 2e+10 (1e+10 to "
        "3e+10)" in said.out
    )
    assert "nothing here was measured" not in said.out
    assert "fits: " in said.out and list((tmp_path / "cache" / "plan").iterdir()) == files
    assert "warning: 1 of 8 devices are used: raise mesh.fsdp (" in said.out
    before, _, compiled = said.out.partition("compiling its programs")
    assert "parameters" in before and "activations" in before and "reference" not in before
    assert (
        "\n1 of 4 compiled: accumulate, " in compiled
        and "; left: decode, prefill, apply\n" in compiled
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_plan_says_what_was_compiled(model, monkeypatch, capsys, number):
    def stopped(config, topology, program, layers):
        if program == "decode":
            signal.raise_signal(number)
        return cost(config, topology, program, layers)

    monkeypatch.setattr("shoal.plan.plan.cost", stopped)
    words = [
        f"model.path={model.path}",
        "mesh.trainer=1",
        "sampling.max_prompt_tokens=64",
        "sampling.max_completion_tokens=64",
        "batch.prompts_per_step=8",
        "batch.group_size=2",
    ]
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["plan", *words]) == 130
    said = capsys.readouterr().out.partition("1 of 4 compiled: accumulate")[2]
    assert (
        "compiled before the interrupt" in said
        and "update: accumulate" in said
        and "temporary" not in said
    )
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("divergence", "kind"),
    [
        ("full", "path"),
        ("topk", "path"),
        ("full", "several"),
        ("full", "base"),
        ("full", "live"),
        ("topk", "live"),
    ],
)
def test_a_plan_has_the_programs_of_a_teachers_distributions(model, planned, divergence, kind):
    """Traced, not compiled: the update takes what the teacher's program returns."""
    kinds: dict[str, Any] = {
        "path": {"path": model.path},
        "several": {"path": f"a={model.path},b={model.path}", "quantise": "int8"},
        "base": {"hint": "{answer}"},
        "live": {"hint": "{answer}", "weights": "live"},
    }
    teacher = TeacherSection(divergence=divergence, top_k=7, **kinds[kind])
    job = planned(
        Config(
            model=model,
            mesh=MeshSection(fsdp=2, trainer="2", sampler="2", reference="1"),
            sampling=SAMPLING,
            batch=BATCH,
            teacher=teacher,
            algorithm=AlgorithmSection(num_epochs=3),
        )
    )
    programs = job.programs()
    of_teacher, update = programs["teacher"], programs["accumulate"]
    assert of_teacher.runs == update.runs
    said = jax.tree.leaves(of_teacher.program.eval_shape(*of_teacher.args))
    targets = update.args[5]
    taken = [targets.states] if divergence == "full" else [targets.ids, targets.logprobs]
    assert [(x.shape, x.dtype) for x in said] == [(x.shape, x.dtype) for x in taken]
    assert taken[0].shape[-1] == {"full": SMALL.hidden_size, "topk": 7}[divergence]
    total, _ = update.program.eval_shape(*update.args)
    assert "teacher/divergence" in total.sums
    held = job_budget(job.job).held("trainer" if kind == "live" else "reference")
    expected = {"path": ["teacher"], "several": ["teacher a", "teacher b"], "base": ["teacher"]}
    assert [name for name in held if name.startswith("teacher")] == expected.get(kind, [])
    of_rows = of_teacher.args[1]
    assert (of_rows.read_at is None) == (not teacher.hint)
    longest = longest_sequence(job.config)
    assert update.args[3].tokens.shape[1] >= longest
    assert longest == SAMPLING.max_prompt_tokens + SAMPLING.max_completion_tokens + teacher.room


@pytest.mark.slow
def test_a_plan_has_no_program_of_a_teacher_behind_an_address(model, planned):
    """Traced, not compiled: the update takes what the server says."""
    teacher = TeacherSection(address="http://nowhere:1", divergence="topk", top_k=7)
    job = planned(
        Config(
            model=model, mesh=MeshSection(fsdp=2), sampling=SAMPLING, batch=BATCH, teacher=teacher
        )
    )
    programs = job.programs()
    assert "teacher" not in programs
    update = programs["accumulate"]
    assert update.args[5].ids.shape[-1] == 7
    total, _ = update.program.eval_shape(*update.args)
    assert "teacher/divergence" in total.sums
    held = job_budget(job.job).held("reference")
    assert not [name for name in held if name.startswith("teacher")]


def test_a_dry_run_estimates_without_compiling(model, monkeypatch, capsys):
    def cost(*_):
        return pytest.fail("compiled")

    monkeypatch.setattr("shoal.plan.plan.cost", cost)
    assert cli.main(["plan", f"model.path={model.path}", "mesh.trainer=1", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "# parameters" in said and "# estimated: fits: " in said and "activations" in said
    assert cli.main(["plan", "model.path=nobody/nothing", "mesh.trainer=1", "--dry-run"]) == 0
    assert "# no estimate: nobody/nothing is not on this machine" in capsys.readouterr().out


@pytest.mark.slow
def test_a_dry_run_estimates_jobs_that_do_not_fit_devices_without_a_compiler(capsys):
    words = ["plan", "topology=v6e-8", "model.name=llama3.1-8b", "mesh.trainer=1", "--dry-run"]
    assert cli.main(words) == 0
    printed = " ".join(capsys.readouterr().out.replace("#", "").split())
    assert "estimated: does not fit: " in printed and "mesh.fsdp=8" in printed
    assert cli.main([*words, "optimizer.offload=true"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("#", "").split())
    assert "no estimate: optimizer.offload=true: only a compiler knows the host memory" in printed


@pytest.mark.slow
def test_where_layers_are_apart_a_prefill_is_a_call_for_each(model, planned, monkeypatch):
    monkeypatch.setattr(Model, "ffn_chunks", 1)
    # else programs of another test would be taken
    sampling = replace(SAMPLING, max_prompt_tokens=320)
    job = planned(
        Config(model=model, sampling=sampling, batch=BATCH, mesh=MeshSection(trainer="1"))
    )
    found, (one, *others) = job.programs(), job.engines["training"].state_shapes().caches
    assert (
        found["prefill"].runs
        == SMALL.num_layers * found["embed"].runs
        > found["begin"].runs
        == found["embed"].runs
    )
    assert found["prefill"].kwargs["cache"] == one and len(others) == SMALL.num_layers - 1
    whole = traced_costs(
        job,
        found["prefill"],
        found["prefill"].program.trace(*found["prefill"].args, **found["prefill"].kwargs),
    )
    assert whole[0] > 2 * 64 * sum(
        leaf.size for leaf in jax.tree.leaves(found["prefill"].args) if leaf.ndim == 2
    )


@pytest.fixture
def planned_of(planned, monkeypatch) -> Callable[..., PlannedJob]:
    """Opens planned jobs of a model of this architecture, on one device."""

    def make(a: Architecture, layers: int = 0, **changes: Any) -> PlannedJob:
        monkeypatch.setattr("shoal.plan.job.planned_architecture", lambda section: a)
        return planned(Config(batch=BATCH, mesh=MeshSection(trainer="1"), **changes), layers=layers)

    return make


def test_of_a_deep_model_whole_patterns_are_compiled():
    deep = replace(SMALL, num_layers=32)
    assert shallow_layers(deep) == (2, 4) and deep.shortened(4) == replace(deep, num_layers=4)
    hybrid = replace(HYBRID, num_layers=32)
    assert shallow_layers(hybrid) == (4, 8) and is_deep(hybrid)
    assert hybrid.shortened(8) == replace(hybrid, num_layers=8)
    assert not is_deep(replace(HYBRID, num_layers=8))
    # The layers after the patterns stay.
    windowed = replace(WINDOWED, num_layers=17)
    assert shallow_layers(windowed) == (5, 8)
    assert windowed.shortened(8) == replace(windowed, num_layers=8)
    with pytest.raises(ValueError, match="no whole patterns make 7 of 17 layers"):
        windowed.shortened(7)
    # Layers that read another's keys read those of the same one, with its new number. Those whose
    # keys are read stay: of the pattern three repetitions are whole without them.
    local, whole = Layer(window=16), Layer()
    shared = replace(local, keys_of=10)
    kinds = (*(local, local, whole) * 4, shared, shared, replace(whole, keys_of=11))
    sharing = replace(SMALL, num_layers=15, pattern=kinds)
    few = sharing.shortened(9)
    assert few.layers_in_order[:6] == kinds[:6] and few.num_layers == 9
    assert [layer.keys_of for layer in few.layers_in_order[6:]] == [4, 4, 5]


def test_a_token_reads_live_keys_windows_and_states(planned_of):
    """By hand, of 8 prompts of 200 tokens and 16 completions of half of 300 on average, in float32:
    of two heads of 8, keys and values; and of states all."""
    lengths = SamplingSection(max_prompt_tokens=200, max_completion_tokens=300)
    keys = 2 * 2 * 8 * 4
    full = (8 * 200 + 16 * 150) * keys
    hybrid = planned_of(HYBRID, sampling=lengths)
    state = 4 * (4 * 8 * 8 + 3 * (2 * 16 + 32))
    engine = hybrid.engines["training"]
    assert hybrid._live_bytes(engine, range(4)) == pytest.approx(full + 3 * 16 * state)
    windowed = planned_of(WINDOWED, sampling=lengths)
    # rings of whole blocks of 64 keys, the completion's with room for a turn's end
    ring = (8 * 64 + 16 * 150) * keys
    engine = windowed.engines["training"]
    assert windowed._live_bytes(engine, range(5)) == pytest.approx(full + 4 * ring)
    shared = planned_of(SHARED_KEYS, sampling=lengths)
    # two layers with rings and two with all keys, twice as wide; of each kind one more reads them
    engine = shared.engines["training"]
    assert shared._live_bytes(engine, range(6)) == pytest.approx(3 * ring + 3 * 2 * full)
    # Loops over the full layer's 4 blocks of a prompt and 1 to 3 of a completion, and over 1 to 3
    # of each completion's ring; a prompt's ring is one block.
    blocks = windowed.programs()["decode"].assumed_trips[1]
    assert blocks == pytest.approx((4 + 2 + 4 * 2) / 6)


def test_a_piece_of_a_prompt_reads_what_each_layers_window_reaches():
    """A window of 128 keys reaches 127 before a token: with them a block of queries reads itself
    and the blocks before it in which they stand."""
    model = Model(
        replace(QWEN3, num_layers=2, pattern=(Layer(window=128), Layer())), roles().sampler
    )
    sampling = SamplingSection(max_prompt_tokens=4096, max_completion_tokens=32)
    job: Any = SimpleNamespace(
        config=SimpleNamespace(sampling=sampling), roles=SimpleNamespace(sampler=model.role)
    )
    engine: Any = SimpleNamespace(model=model, scheduler=SimpleNamespace(prefill_chunk=1024))
    block = block_size(1024, "cpu")
    num_blocks = 4096 // block
    reached = -(-127 // block)
    in_window = 1 + reached - reached * (reached + 1) / (2 * num_blocks)
    pieces, blocks = PlannedJob._prefill_trips(job, engine)
    assert pieces == 4 and blocks == pytest.approx((in_window + (num_blocks + 1) / 2) / 2)


def test_loops_over_keys_are_those_of_each_kind_of_layer():
    """On four devices two share a head of the kind with two heads, none one of the kind with
    four: 600 keys are blocks of 128, 300 too."""
    kinds = (Layer(num_kv_heads=2), Layer(num_kv_heads=4))
    model = Model(replace(QWEN3, pattern=kinds), roles(tensor=4).sampler)
    sampling = SamplingSection(max_prompt_tokens=600, max_completion_tokens=32)
    job: Any = SimpleNamespace(config=SimpleNamespace(sampling=sampling))
    blocks = [PlannedJob._decode_blocks(job, model, layer) for layer in kinds]
    assert blocks == [[3], [5]]


@pytest.mark.slow
@pytest.mark.parametrize("a", [HYBRID, WINDOWED], ids=["hybrid", "windowed"])
def test_decoding_of_whole_patterns_gives_that_of_more(planned_of, a):
    deep = replace(a, num_layers=a.num_layers + 2 * len(a.pattern))
    few = shallow_layers(deep)
    first, second, whole = (analyse(planned_of(deep, n), "decode") for n in (*few, 0))
    assert (first.layers, second.layers) == few
    found = extrapolate(first, second, deep.num_layers)
    assert found.flops == pytest.approx(whole.flops, rel=0.01)
    assert found.floor_seconds == pytest.approx(whole.floor_seconds, rel=0.01)
    assert found.extra_bytes == pytest.approx(whole.extra_bytes, rel=0.1)


@pytest.mark.slow
def test_where_layers_are_apart_each_kind_has_a_program(planned_of, monkeypatch):
    monkeypatch.setattr(Model, "ffn_chunks", 1)
    sampling = replace(SAMPLING, max_prompt_tokens=320)  # else programs of another test are taken
    job = planned_of(replace(WINDOWED, num_layers=8), sampling=sampling)
    found = job.programs()
    runs = found["embed"].runs
    assert found["prefill"].runs == 6 * runs and found["prefill 1"].runs == 2 * runs
    budget = replace(job.budget(), costs={"prefill 1": ProgramCost(extra_bytes=7)})
    assert phase_of("prefill 1") == "sampling" and budget.needed("prefill 1")["temporaries"] == 7


@pytest.mark.slow
def test_decoding_of_two_and_four_layers_gives_that_of_six(model, tmp_path, planned):
    config = Config(
        model=write_model(tmp_path, replace(SMALL, num_layers=6)),
        sampling=SAMPLING,
        batch=BATCH,
        mesh=MeshSection(fsdp=2, tensor=2, trainer="4"),
    )
    two, four, whole = (analyse(planned(config, layers), "decode") for layers in (2, 4, 0))
    found = extrapolate(two, four, 6)
    assert found.flops == pytest.approx(whole.flops, rel=0.01)
    assert found.extra_bytes == pytest.approx(whole.extra_bytes, rel=0.05)
    moved = []
    for one in (found, whole):
        moved.append(sum(row.bytes for row in one.collectives))
    assert moved[0] == pytest.approx(moved[1], rel=0.01) and moved[0] > 0


def placed(**devices: tuple[int, ...]) -> dict[str, RolePlacement]:
    """Roles on these devices, else on two."""
    result = {}
    for name in ("trainer", "sampler", "reference"):
        result[name] = RolePlacement({"fsdp": 2}, devices.get(name, (0, 1)))
    return result


STEP = PlannedStep(
    devices="two devices",
    hosts=1,
    refusal="",
    sampled_tokens=1024,
    prompt_tokens=512,
    model_flops=5.6e12,
    rates=DeviceRates(1e12, 1.0, 1.0, 0.5, 1e-6, False, None),
)


def by_hand(**changes: Any) -> Budget:
    """A budget whose programs take 2 seconds of computation and 1 of transfers each run."""
    cost = ProgramCost(
        extra_bytes=10,
        code_bytes=1,
        flops=1e12,
        floor_seconds=1.0,
        compute_seconds=2.0,
        transfer_seconds=1.0,
    )
    programs = {
        "prefill": StepProgram("sampler", 1),
        "decode": StepProgram("sampler", 4),
        "accumulate": StepProgram("trainer", 8),
        "apply": StepProgram("trainer", 1),
    }
    budget = Budget(
        config=Config(batch=BATCH, model=ModelSection(remat="full")),
        memory=100,
        roles=placed(),
        items=[
            Item("parameters", "trainer", "always", 20),
            Item("Adam's moments", "trainer", "always", 40),
            Item("gradient", "trainer", "update", 20),
            Item("the sampler's copy", "sampler", "always", 5),
            Item("KV caches (training)", "sampler", "sampling", 5),
        ],
        num_devices=2,
        model=ModelSize(10, 2, "bfloat16", "full"),
        batch=BatchSize(1, 512, 512),
        slots=16,
        prompts_per_step=8,
        programs=programs,
        costs=dict.fromkeys(programs, cost),
        step=STEP,
    )
    return replace(budget, **changes)


def test_memory_and_seconds_by_hand():
    budget = by_hand()
    assert budget.needed("accumulate") == {
        "parameters": 20,
        "Adam's moments": 40,
        "the sampler's copy": 5,
        "gradient": 20,
        "activations": 10,
        "compiled programs": 4,
    }
    assert (budget.peak(), budget.fullest, budget.fits()) == (99, "accumulate", True)
    assert (budget.peak("sampling"), budget.peak("update")) == (84, 99)
    assert budget.fits(0.99) and not budget.fits(0.98)
    assert budget.seconds("accumulate") == (8.0, 16.0, 24.0)
    assert budget.step_seconds == (14.0, 28.0, 42.0)
    assert budget.phase_seconds()["sampling"] == (5.0, 10.0, 15.0)
    assert budget.mfu(28.0) == pytest.approx(5.6 / (2 * 28))


def test_a_record_has_all_that_the_host_holds():
    items = [
        Item("Adam's moments", "trainer", "always", 40, on_host=True),
        Item("stored for the backward pass", "trainer", "update", 30, on_host=True),
        Item("gradient", "trainer", "update", 20),
    ]
    budget = by_hand(items=items)
    held = plan.held_record(budget)["trainer"]
    assert held["host"] == budget.on_host()
    assert held["host"] == {"Adam's moments": 40, "stored for the backward pass": 30}
    assert (held["always"], held["update"]) == ({}, {"gradient": 20})


@pytest.mark.parametrize(
    ("refusal", "pathways", "text"),
    [
        ("", False, "32 hosts: runs with mesh.pathways=true, or as a process on each"),
        (
            "roles apart",
            False,
            "32 hosts: runs with mesh.pathways=true, not as a process on each: roles apart",
        ),
        ("roles apart", True, None),
    ],
)
def test_a_plan_says_how_a_job_of_several_hosts_runs(refusal, pathways, text):
    budget = by_hand(step=replace(STEP, devices="128 v5p chips", hosts=32, refusal=refusal))
    budget = replace(budget, config=replace(budget.config, mesh=MeshSection(pathways=pathways)))
    assert [line for line in plan._head(budget) if "hosts" in line] == ([text] if text else [])


@pytest.mark.parametrize(
    ("max_staleness", "interval", "step"),
    [
        (-1, 1, 28.0),  # sampling takes 10 s, training 18
        (1, 1, 18.0),
        (2, 1, 18.0),
        # the second of two steps is sampled while the first is learnt from
        (-1, 2, (10 + 18 + 18) / 2),
    ],
)
def test_a_step_takes_as_long_as_the_longer_of_what_overlaps(max_staleness, interval, step):
    budget = by_hand(roles=placed(trainer=(0,), sampler=(1,), reference=(0,)))
    train = TrainSection(max_staleness=max_staleness, weight_sync_interval=interval)
    config = replace(budget.config, train=train)
    assert replace(budget, config=config).step_seconds[1] == pytest.approx(step)
    together = by_hand(config=config)
    assert together.step_seconds == (14.0, 28.0, 42.0)  # on the same devices they take turns


def test_roles_apart_hold_their_own():
    budget = by_hand(roles=placed(trainer=(0,), sampler=(1,), reference=(1,)))
    assert budget.needed("decode") == {
        "the sampler's copy": 5,
        "KV caches (training)": 5,
        "temporaries": 10,
        "compiled programs": 2,
    }
    assert "the sampler's copy" not in budget.needed("accumulate")


# ---- advice


@pytest.fixture
def job_here(planned, monkeypatch) -> Callable[..., tuple[Budget, Any]]:
    """(budget, describe) of a job of the tiny model on the 8 simulated devices, as if they were
    accelerators of `memory` bytes; each program takes 1000 bytes, or those that are given."""
    monkeypatch.setattr(caches, "keys_dtype", lambda model: model.dtype)  # a CPU's are float32

    def make(
        keys: Mapping[str, Any], memory: int = 100_000_000, **extra: int
    ) -> tuple[Budget, Any]:
        job = planned(
            build(
                Config,
                {
                    "model.dtype": "bfloat16",
                    "sampling.max_prompt_tokens": 64,
                    "sampling.max_completion_tokens": 64,
                    "batch.micro_tokens": 512,
                    "train.pass_k": 0,
                    **keys,
                },
            )
        ).job

        def describe(other: Config) -> Budget:
            return replace(job.budget_for(other), memory=memory)

        budget = job_budget(job)
        costs = {}
        for name in budget.programs:
            costs[name] = ProgramCost(extra_bytes=extra.get(name, 1000))
        return replace(budget, memory=memory, costs=costs), describe

    return make


def reckoned(tokens: int) -> int:
    """Bytes that an update of so many tokens of the tiny model, in bfloat16, is reckoned to need on
    one of 8 devices besides what roles hold: the weights, a layer of them whole with its gradient,
    each layer's input, three arrays of logits in float32, and what the backward pass finds
    stored."""
    whole = 256
    layer = 196_928
    layers = 4
    hidden = 128
    heads = (4 + 2 * 2) * 32
    inner = 384
    vocabulary = 685
    # the norms of queries and keys, 32 of each a layer, are whole
    weights = 2 * ((875_520 - whole) // 8 + whole)
    return (
        weights
        + layer * (2 * 2 + 4)
        + tokens
        * (2 * layers * hidden + 3 * 4 * vocabulary + 2 * layers * (3 * hidden + heads + 2 * inner))
    )


SAVED = 150_000_000 * (1 - reckoned(256) / reckoned(512))


@pytest.mark.parametrize(
    ("keys", "extra", "expected"),
    [
        (
            {"mesh.fsdp": 8},
            {"accumulate": 150_000_000},
            f"batch.micro_tokens=256 (now 512): about {SAVED / 2**20:.1f} MiB less a device, "
            "weights are gathered more often",
        ),
        (
            {"mesh.fsdp": 8, "batch.micro_tokens": 128, "model.remat": "dots"},
            {"accumulate": 97_500_000},
            "model.remat=full",
        ),
        ({"mesh.fsdp": 8}, {"decode": 150_000_000}, "sampling.slots_per_device="),
        ({}, {"decode": 150_000_000}, "sampling.slots_per_device="),
    ],
)
def test_what_does_not_fit_names_the_key_that_mends_it(job_here, keys, extra, expected):
    budget, describe = job_here(keys, **extra)
    assert not budget.fits()
    text = verdict(replace(budget, advice=advise(budget, describe)))
    assert "does not fit: " in text and expected in text


@pytest.mark.slow
def test_what_is_held_is_mended_by_the_mesh(job_here):
    """Without a compiled program: the masters of data-parallel copies, a copy of the sampler, no
    key at all."""

    def advised(memory: int, **keys: Any) -> str:
        budget, describe = job_here(keys, memory)
        budget = replace(budget, costs={})
        assert not budget.fits()
        return verdict(replace(budget, advice=advise(budget, describe)))

    copies = advised(6_000_000, **{"mesh.data": 8})
    assert "mesh.fsdp=-1 mesh.data=1 (now 1 and 8)" in copies
    assert ", before anything is compiled (Adam's moments 6.7 MiB, " in copies
    assert "mesh.sampler_tensor=2 (now auto)" in advised(
        3_500_000, **{"mesh.fsdp": 8, "sampling.slots_per_device": 8}
    )
    assert "more devices (mesh.fsdp): about " in advised(1000, **{"mesh.fsdp": 8})


def test_rays_samplers_hold_nothing_beside_the_trainer_and_their_keys_mend_nothing_there(job_here):
    keys = {"mesh.fsdp": 8, "sampler.kind": "ray"}
    budget, describe = job_here(keys, accumulate=150_000_000)
    assert "the sampler's copy" not in budget.needed("accumulate")
    assert budget.needed("decode").keys() == {
        "the sampler's copy",
        "KV caches (evaluation)",
        "temporaries",
    }
    trials = saving_trials(budget, describe, memory_saving_changes(budget))
    tried = {trial.change.key for trial in trials}
    assert tried >= {"batch.micro_tokens", "model.remat"}
    assert not tried & {"sampling.slots_per_device", "mesh.sampler_tensor", "mesh.trainer"}
    assert advise(budget, describe)[0].key == "batch.micro_tokens"
    budget, describe = job_here(keys, memory=3_000_000)  # too little for a worker's caches
    assert [advice.key for advice in advise(budget, describe)] == ["sampling.slots_per_device"]


def test_what_fits_is_told_what_its_free_memory_is_good_for(job_here):
    keys = {
        "mesh.trainer": "4",
        "mesh.sampler": "4",
        "mesh.fsdp": 4,
        "model.remat": "full",
        "batch.micro_tokens": 128,
        "sampling.slots_per_device": 8,
    }
    budget, describe = job_here(keys)
    found = {advice.key: advice for advice in advise(budget, describe)}
    assert list(found) == [
        "batch.micro_tokens",
        "model.remat",
        "sampling.slots_per_device",
        "mesh.trainer",
    ]
    assert found["model.remat"].bytes <= 0 > found["sampling.slots_per_device"].bytes
    assert re.search(
        r" more a device, \d+ completions at once instead of \d+$",
        found["sampling.slots_per_device"].text,
    )
    assert found["mesh.trainer"].text.startswith("mesh.trainer=1.0 mesh.sampler=1.0")
    text = verdict(replace(budget, advice=advise(budget, describe)))
    assert text.startswith("fits: ") and text.endswith(advise(budget, describe)[0].text)
    assert advise(budget, describe, available=budget.peak()) == []  # none is free


def test_rows_of_whole_groups_are_advised_where_others_compute_more(job_here):
    """32 groups of 576 tokens are 18,432: in rows of 2,048 prompts are computed twice, and the last
    row is padding."""

    def sizes(**keys: Any) -> dict[int, str]:
        budget, _ = job_here(
            {"mesh.trainer": "1", "batch.prompts_per_step": 32, "batch.group_size": 8, **keys}
        )
        result = {}
        for change in faster_changes(budget):
            if change.key == "batch.micro_tokens":
                result[change.values[change.key]] = change.cost
        return result

    assert sizes(**{"batch.micro_tokens": 2048}) == dict.fromkeys(
        (2304, 4608), "10% fewer tokens are computed"
    )
    assert sizes(**{"batch.micro_tokens": 2304, "mesh.trainer": "4", "mesh.fsdp": 4}) == {
        4608: "weights and gradients are moved less often"
    }
    assert sizes(**{"batch.micro_tokens": 18432}) == {}  # all groups


def test_every_key_that_changes_memory_is_tried(job_here):
    budget, _ = job_here(
        {
            "mesh.trainer": "4",
            "mesh.sampler": "4",
            "mesh.fsdp": 2,
            "mesh.data": 2,
            "model.remat": "dots",
            "algorithm.kl_coef": 0.1,
        }
    )
    budget = replace(budget, machines=2)
    tried = set()
    for changes in (memory_saving_changes, faster_changes, lossy_changes):
        tried |= {change.key for change in changes(budget)}
    assert tried >= {
        "batch.micro_tokens",
        "model.remat",
        "sampling.slots_per_device",
        "mesh.fsdp",
        "mesh.dcn_data",
        "mesh.expert",
        "mesh.tensor",
        "mesh.sampler_tensor",
        "mesh.trainer",
        "mesh.reference",
        "algorithm.kl_coef",
        "batch.group_size",
        "sampling.max_completion_tokens",
        "optimizer.moments",
        "optimizer.offload",
    }
    idle, _ = job_here({})
    assert next(
        change for change in memory_saving_changes(idle) if change.key == "mesh.fsdp"
    ).values == {"mesh.fsdp": 8}


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        (60, "optimizer.offload=true (now false): about 0.0 MiB less a device, moved"),
        (40, "model.lora.rank=4 (now off): about 0.0 MiB less a device"),
    ],
)
def test_a_change_that_a_later_one_makes_needless_is_not_advised(available, expected, monkeypatch):
    budget = by_hand(activations=10)

    def describe(config: Config) -> Budget:
        size = 1 if config.model.lora.rank else 20
        on_host = config.optimizer.offload
        trainer = [
            Item("parameters", "trainer", "always", size),
            Item("Adam's moments", "trainer", "always", 2 * size, on_host),
            Item("gradient", "trainer", "update", size),
        ]
        others = [item for item in budget.items if item.role != "trainer"]
        return replace(budget, items=[*trainer, *others])

    def saving(_: Budget) -> list[Change]:
        return [Change({"optimizer.offload": True}, "moved")]

    def lossy(_: Budget) -> list[Change]:
        return [Change({"model.lora.rank": 4})]

    monkeypatch.setattr(advice_module, "memory_saving_changes", saving)
    monkeypatch.setattr(advice_module, "lossy_changes", lossy)
    assert suggest_fit(budget, describe, available).text == expected


def test_an_adapter_is_advised_where_masters_and_moments_take_most(job_here):
    budget, describe = job_here({})
    bare = replace(budget, activations=0, costs={})
    trials = saving_trials(bare, describe, lossy_changes(bare))
    trial = next(trial for trial in trials if trial.change.key == "model.lora.rank")
    assert "model.lora.rank=16 (now off)" in trial.text()
    held = {}
    for item in trial.after.items_of("trainer", "always"):
        held[item.part] = item.bytes
    assert held["Adam's moments"] == 2 * held["parameters"] < held["frozen parameters"] * 4
    with_adapter = replace(bare, items=trial.after.items)
    for other in (replace(bare, activations=1 << 40), with_adapter):
        assert "model.lora.rank" not in {change.key for change in lossy_changes(other)}


@pytest.mark.slow
def test_a_mesh_that_does_not_divide_the_model_is_never_advised(job_here):
    budget, describe = job_here({"mesh.fsdp": 8, "mesh.sampler_tensor": 2}, 1000)
    tensors = []
    for change in memory_saving_changes(budget):
        tensors.append(change.values.get("mesh.sampler_tensor"))
    assert 4 in tensors  # tried, and refused: the model has two heads of keys
    values = {name: get_value(budget.config, name) for name in keys_of(Config)}
    for advice in advise(budget, describe):
        describe(build(Config, {**values, **advice.values}))


@pytest.mark.slow
def test_what_cannot_fit_is_said_before_anything_is_compiled(model, monkeypatch):
    def never(*_: Any) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("shoal.plan.plan.cost", never)

    def available_memory(_):
        return AvailableMemory(1000, 1000, "")

    monkeypatch.setattr("shoal.job.memory.available_memory", available_memory)
    found = make_plan(PlanConfig(model=model, sampling=SAMPLING, batch=BATCH), lambda text: None)
    assert not found.fits() and found.costs == {} and verdict(found).startswith("does not fit: ")


def test_a_compiler_that_is_not_installed_names_the_extra(monkeypatch):
    def find_spec(name):
        return None

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    for topology, needed in (("v5p-8", "libtpu"), ("h100:8", "jax_cuda13_plugin")):
        with (
            pytest.raises(ShoalError, match=rf"{needed}: pip install '\.\[plan\]'"),
            planned_job(Config(model=ModelSection(name="llama3.1-8b")), topology),
        ):
            pass


@pytest.mark.slow
def test_what_a_compiler_finds_wrong_is_raised_and_one_that_dies_is_said():
    with compilers(1, "v5p-8") as answers:
        told: list[Any] = []
        assert answers([(os.getenv, "TPU_ACCELERATOR_TYPE")], lambda *one: told.append(one)) == [
            "v5p-8"
        ]
        assert told == [((os.getenv, "TPU_ACCELERATOR_TYPE"), "v5p-8")]
        with pytest.raises(ShoalError, match=r"mesh.fsdp=3 does not divide"):
            answers([(make_mesh, MeshSection(fsdp=3), [None] * 4)])
        with pytest.raises(ShoalError, match=r"a compiler ended without an answer.*layers=shallow"):
            answers([(os._exit, 1)])
    assert "TPU_ACCELERATOR_TYPE" not in os.environ


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_the_floor_of_decoding_reads_weights_and_live_keys_for_each_token(
    tmp_path, planned, monkeypatch, tied
):
    """By hand: 2 layers of 2 heads of 16, keys and values; half of a completion's on average; of an
    embedding that is no head, single rows. Others read what they are called with once."""
    a = replace(SMALL, tie_embeddings=tied)
    model = write_model(tmp_path, a)
    job = planned(
        Config(
            model=replace(model, dtype="bfloat16"),
            sampling=SAMPLING,
            batch=BATCH,
            mesh=MeshSection(trainer="1"),
        )
    )
    monkeypatch.setattr(PlannedJob, "accelerator", ACCELERATORS["h200"])
    decode, update = (analyse(job, name) for name in ("decode", "accumulate"))
    read = parameter_count(a) - (not tied) * a.vocab_size * a.hidden_size
    weights, tokens = 2 * read, 63 / 2  # in each of two dispatches
    # On the CPU that stands for the device here, keys have 4 bytes (`caches.keys_dtype`).
    heads = 2 * SMALL.num_layers * SMALL.num_kv_heads * SMALL.head_dim * 4
    keys = heads * (8 * 64 + 16 * 32)
    assert decode.floor_seconds == pytest.approx(tokens * (weights + keys) / 4.8e12)
    assert 0.0 < update.floor_seconds < decode.floor_seconds


def test_the_floor_of_decoding_leaves_out_experts_that_no_token_has(tmp_path, planned):
    """Four tokens with 2 of 8 experts each have 8 (1 - (3/4)^4) of them in the mean; with 256 slots
    hardly one is idle."""
    a = replace(
        QWEN3,
        num_layers=2,
        pattern=(Layer(feed_forward="experts"),),
        experts=Experts(num_experts=8, experts_per_token=2, intermediate_size=24),
        model_type="qwen3_moe",
    )
    model = replace(write_model(tmp_path, a), dtype="bfloat16")
    unread = []
    for slots in (4, 256):
        job = planned(
            Config(
                model=model,
                sampling=replace(SAMPLING, slots_per_device=slots),
                batch=replace(BATCH, prompts_per_step=slots // BATCH.group_size),
                mesh=MeshSection(trainer="1"),
                train=TrainSection(pass_k=0),
            )
        )
        assert job.engines["training"].num_rows == slots // BATCH.group_size
        unread.append(job.programs()["decode"].unread)
    of_experts = 2 * a.num_layers * 8 * 3 * a.hidden_size * 24
    assert unread[0] == pytest.approx(of_experts * 0.75**4)
    assert unread[1] < 1e-9 * of_experts


@pytest.mark.parametrize(("pages", "block"), [(True, 128), (False, 64)])
def test_decodings_kernel_reads_whole_blocks_of_live_keys(
    model, planned, monkeypatch, pages, block
):
    """Of 8 prompts of 64 tokens and 16 completions of half of 64; of each the last block is half
    beyond, on average."""
    job = planned(
        Config(model=model, sampling=SAMPLING, batch=BATCH, mesh=MeshSection(trainer="1"))
    )

    def decodes_by_kernel(_, layer):
        return True

    monkeypatch.setattr("shoal.plan.job.decodes_by_kernel", decodes_by_kernel)

    def by_pages(_, layer):
        return pages

    monkeypatch.setattr("shoal.plan.job.by_pages", by_pages)
    share = (8 * block + 16 * (64 + block - 1) / 2) / (8 * 64 + 16 * 64)
    assert job.programs()["decode"].kernel_share == pytest.approx(share)


@pytest.mark.parametrize(
    ("name", "seconds"), [("h200", 4 * 3e-6 + 1.0 + 7e-5), ("v5p", 100 / 1.75e9)]
)
def test_an_operation_takes_its_launch_and_a_kernel_a_share_of_the_peak(name, seconds):
    """Of a GPU four small operations, one that reads for a second, seven turns of a loop; of both,
    kernels."""
    kind = ACCELERATORS[name]
    job: Any = SimpleNamespace(
        accelerator=kind, model=SimpleNamespace(dtype=jnp.dtype(jnp.bfloat16))
    )
    costs = Costs(
        cycles={"": 100.0},
        operations=[Operation(4.0, 8.0, 8.0), Operation(1.0, kind.hbm, 0.0)],
        awaited=7.0,
    )
    kernels = 1e12 / (kind.kernels * kind.peaks["bfloat16"])
    assert _compute_seconds(job, costs, 1e12) == pytest.approx(seconds + kernels)
    assert kind.kernels == {"h200": 0.35, "v5p": 0.75}[name]


CALIBRATION = {
    "device": "NVIDIA H200",
    "devices": 8,
    "jax": "0.10.2",
    "figures": {
        "hbm": [4e12, 3e12, 5e12],
        "bfloat16": [7e14] * 3,
        "float32": [5e13] * 3,
        "launch": [2e-6] * 3,
        "link": [3e11] * 3,
    },
}


def test_what_was_measured_takes_the_place_of_what_the_maker_says(tmp_path):
    file, known = tmp_path / "h200.json", ACCELERATORS["h200"]
    file.write_text(json.dumps(CALIBRATION))
    found = calibrated(known, read_calibration(str(file), "NVIDIA H200", known))
    assert (found.hbm, found.launch, found.link) == (4e12, 2e-6, 3e11)
    assert found.peaks == dict(known.peaks) | {"bfloat16": 7e14, "float32": 5e13}
    assert found.kernels * 7e14 == pytest.approx(known.kernels * known.peaks["bfloat16"])
    assert replace(found, hbm=0, launch=0, link=0, peaks={}, kernels=0) == replace(
        known, hbm=0, launch=0, link=0, peaks={}, kernels=0
    )


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (
            {"device": "TPU v5p"},
            "h200",
            "was measured on TPU v5p, and the plan is for NVIDIA H200: give one",
        ),
        ({}, "", "was measured on NVIDIA H200, and the plan is for cpu"),
        (
            {"figures": {"hbm": [1, 1, 1]}},
            "h200",
            "has no launch: measure again with `python benchmarks/accelerator.py",
        ),
        (
            {"figures": CALIBRATION["figures"] | {"hbm": [1, 1, 0]}},
            "h200",
            "hbm is not three positive numbers: measure",
        ),
        (
            {"figures": CALIBRATION["figures"] | {"hmb": [1, 1, 1]}},
            "h200",
            "has hmb, which no plan knows: measure",
        ),
        ({"device": None}, "h200", "was measured on None, and the plan is for NVIDIA H200"),
        ({"devices": math.inf}, "h200", "is not a calibration ("),
        ({"figures": [1]}, "h200", "is not a calibration ("),
    ],
)
def test_a_calibration_of_another_device_or_form_is_refused(tmp_path, change, kind, text):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(CALIBRATION | change))
    with pytest.raises(
        ShoalError, match=re.escape(f"calibration={file} {text}" if "hbm is" not in text else text)
    ):
        read_calibration(str(file), "NVIDIA H200" if kind else "cpu", ACCELERATORS.get(kind))


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", "[" * 100_000])
def test_a_file_that_is_no_calibration_is_refused(tmp_path, capsys, content):
    file = tmp_path / "broken.json"
    if content is not None:
        file.write_text(content)
    assert cli.main(["plan", "model.name=qwen3-0.6b", "mesh.trainer=1", f"calibration={file}"]) == 2
    assert f"calibration={file} " in (said := capsys.readouterr().err) and said.count("\n") == 1
    assert f"measure again with `python benchmarks/accelerator.py --calibration {file}`" in said


def test_a_product_that_nobody_reads_is_no_operation():
    """On a TPU each layer's last product was counted again where the backward pass recomputes it:
    7% of 1.5B's."""
    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    traced = jax.jit(lambda x: (x @ x, (x @ x @ x).sum())[1]).trace(square)
    planned = Planned(None, SimpleNamespace(mesh=SimpleNamespace(size=1)), (), {})  # type: ignore
    job: Any = SimpleNamespace(accelerator=None)
    assert traced_costs(job, planned, traced) == (2 * 2 * 8**3, 0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("num_minibatches", "trained"), [(1, 5 * 8 * 1024), (3, 3 * 8 * 1792)])
def test_micro_batches_are_counted_in_the_shapes_that_the_run_packs_them_in(
    model, planned, num_minibatches, trained
):
    """32 groups of 1,088 tokens: rows of 4,096 on 8 devices would be 65,536 of which the last are
    empty."""
    config = Config(
        model=model,
        mesh=MeshSection(fsdp=8),
        sampling=replace(SAMPLING, max_completion_tokens=128),
        batch=BatchSection(prompts_per_step=32, group_size=8, micro_tokens=4096),
        algorithm=AlgorithmSection(num_minibatches=num_minibatches, num_epochs=2),
    )
    job = planned(config)
    ids, ones = np.ones(128, np.int32), np.ones(128)
    groups = []
    for row in range(32):
        groups.append(
            Group(
                Purpose.TRAIN,
                0,
                0,
                Example(row, "q"),
                ids[:64],
                tuple(
                    Completion(
                        row, index, ids, ones.astype(np.float32), ones > 0, 0 * ids, StopReason.EOS
                    )
                    for index in range(8)
                ),
                ("",) * 8,
                np.ones(8),
                {},
                np.ones(8, bool),
            )
        )
    updater = job.job.make_updater(None, None)
    run = sum(
        batch.arrays.tokens.size
        for members in updater._minibatches(32, step=0, epoch=0)
        for batch in pack(
            groups,
            members,
            TokenTerms(np.ones((32, 8)), np.ones((32, 8))),
            BatchLayout(updater.shapes(groups), 1.0),
        )
    )
    assert run == trained and job.programs()["accumulate"].runs * job.shape.tokens == 2 * trained


@pytest.mark.system
@pytest.mark.parametrize(
    ("topology", "needed", "attention"),
    [("v5p-8", "libtpu", "auto"), ("h200:4", "jax_cuda13_plugin", "pallas")],
)
def test_a_plan_for_devices_that_are_not_here(model, tmp_path, topology, needed, attention):
    """On the GPU with our own kernels, for heads that fill its shared memory."""
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    model = replace(
        write_model(tmp_path, replace(SMALL, num_layers=1, head_dim=128)), attention=attention
    )
    found = make_plan(
        PlanConfig(
            topology=topology, model=model, sampling=SAMPLING, batch=BATCH, mesh=MeshSection(fsdp=4)
        ),
        lambda text: None,
    )
    assert found.fits() and found.is_timed and found.model.dtype == "bfloat16"
    assert {"publish", "decode", "accumulate"} <= set(found.costs)
    assert any(
        row.kind == "all-gather" and row.axis == "fsdp"
        for row in found.costs["accumulate"].collectives
    )
    floor, hidden, none = found.step_seconds
    assert 0 < floor <= hidden <= none


@pytest.mark.system
@pytest.mark.parametrize("name", ["hybrid", "windowed"])
@pytest.mark.parametrize(
    ("topology", "needed"), [("v6e-4", "libtpu"), ("h200:4", "jax_cuda13_plugin")]
)
def test_models_of_several_kinds_of_layers_are_planned(
    tmp_path, monkeypatch, topology, needed, name
):
    """Heads as wide as the kernels for keys want them."""
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    if name == "hybrid":
        a = replace(HYBRID, hidden_size=128, head_dim=128)
    else:
        a = replace(model_named("gemma3-270m").architecture, num_layers=7, vocab_size=512)
    found = make_plan(
        PlanConfig(
            topology=topology,
            model=write_model(tmp_path, a),
            sampling=SAMPLING,
            batch=BATCH,
            mesh=MeshSection(fsdp=4),
        ),
        lambda text: None,
    )
    assert found.fits() and found.is_timed
    assert {"decode", "accumulate", "apply"} <= set(found.costs)
    floor, hidden, none = found.step_seconds
    assert 0 < floor <= hidden <= none


@pytest.mark.system
def test_a_token_of_1_5b_on_an_h200(tmp_path, monkeypatch):
    """256 places, prompts of 256 tokens: reading weights and live keys once is its floor, and no
    operation is thought shorter than 3 us. A kernel a layer for attention (before, 757 and 2,565
    launches, and 3.4 and 5.1 times the floor).
    """
    if find_spec("jax_cuda13_plugin") is None:
        pytest.skip("jax_cuda13_plugin is not installed")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    model, few = ModelSection(name="qwen2.5-1.5b"), (1, 2)
    configs = {}
    for longest in (512, 4096):
        configs[longest] = PlanConfig(
            topology="h200:1",
            model=model,
            batch=BatchSection(prompts_per_step=32, group_size=8),
            sampling=replace(SAMPLING, max_prompt_tokens=256, max_completion_tokens=longest),
        )
    with compilers(1, "h200:1") as answers:
        costs = answers(
            [
                (cost, config, "h200:1", "decode", layers)
                for config in configs.values()
                for layers in few
            ]
        )
    a, most = planned_architecture(model), {512: 1.76, 4096: 1.22}
    for longest, one, two in zip(configs, costs[::2], costs[1::2], strict=True):
        tokens = (longest - 1) / -(-(longest - 1) // DECODE_CHUNK)  # of a dispatch
        token = extrapolate(one, two, a.num_layers)
        keys = 2 * a.num_layers * a.num_kv_heads * a.head_dim * 32 * (256 + 8 * longest / 2)
        floor = 2 * (parameter_count(a) + keys) / ACCELERATORS["h200"].hbm
        assert token.launches / tokens < 300
        assert 1 < token.compute_seconds / tokens / floor < most[longest]


@pytest.mark.system
def test_the_default_update_of_1_5b_on_an_h200_takes_at_most_1_9_times_its_operations(
    tmp_path, monkeypatch
):
    """Of the model, none of them twice, at the peak; attention's kernels at a share of it. With
    rows of 4,096 tokens, in which no group fits, 2.5."""
    if find_spec("jax_cuda13_plugin") is None:
        pytest.skip("jax_cuda13_plugin is not installed")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    config = PlanConfig(
        topology="h200:1",
        model=ModelSection(name="qwen2.5-1.5b"),
        sampling=replace(SAMPLING, max_prompt_tokens=256, max_completion_tokens=512),
    )
    with compilers(1, "h200:1") as answers:
        budget, one, two = answers(
            [
                (describe, config, "h200:1"),
                (cost, config, "h200:1", "accumulate", 1),
                (cost, config, "h200:1", "accumulate", 2),
            ]
        )
    a = planned_architecture(config.model)
    seconds_of_a_run = extrapolate(one, two, a.num_layers).compute_seconds
    seconds = budget.programs["accumulate"].runs * seconds_of_a_run
    completions = [config.sampling.max_completion_tokens] * config.batch.group_size
    flops = 3 * budget.prompts_per_step * forward_flops(a, 256, completions)
    assert 1 < seconds / (flops / budget.peak_flops) < 1.9


@pytest.mark.slow
def test_a_dry_run_refuses_what_the_plan_refuses(capsys):
    """The model's heads, by the topology's devices."""
    words = ["plan", "topology=h200:3", "model.name=qwen2.5-1.5b", "mesh.tensor=3", "--dry-run"]
    assert cli.main(words) == 2
    assert "mesh.tensor=3" in capsys.readouterr().err
    assert cli.main([*words[:3], "mesh.fsdp=3", "model.attention=pallas", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert (
        not any(line and not line.startswith("#") for line in said.out.splitlines())
        and not said.err
    )


@pytest.mark.system
def test_where_slots_are_counted_by_the_longest_completion_a_mean_is_advised(capsys):
    """On a TPU, whose completions share a pool; the advice says how many more have slots."""
    words = [
        "plan",
        "topology=v6e-8",
        "model.name=llama3.1-8b",
        "mesh.fsdp=-1",
        "mesh.sampler_tensor=4",
        "--dry-run",
        "batch.micro_tokens=17408",
        "sampling.max_prompt_tokens=1024",
        "sampling.max_completion_tokens=16384",
    ]

    def advised(*more: str) -> list[str]:
        assert cli.main([*words, *more]) == 0
        return re.findall(
            r"mean_completion_tokens=(\d+) \(now the longest\): (\d+) completions at once instead "
            r"of "
            r"(\d+)",
            capsys.readouterr().out,
        )

    ((mean, more, now),) = advised()
    assert mean == "8192" and int(more) > 1.5 * int(now)
    assert not advised("sampling.mean_completion_tokens=8192")
