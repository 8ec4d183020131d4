"""The plan of a job against what the job really holds, and its figures by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from small import QWEN3, random_parameters

from shoal import cli
from shoal.commands import plan as plan_command
from shoal.config.keys import keys_of
from shoal.config.schema import (
    AlgorithmSection,
    BatchSection,
    Config,
    MeshSection,
    ModelSection,
    PlanConfig,
    SamplingSection,
    TrainSection,
)
from shoal.config.values import build, get_value
from shoal.mesh.accelerators import ACCELERATORS
from shoal.model.hf_config import config_of
from shoal.rollout.publication import publish_to
from shoal.run.advice import advise, changes
from shoal.run.figures import Figures, verdict
from shoal.run.parts import make_updater
from shoal.run.plan import analysis, worker
from shoal.run.plan import compilers as compilers_module
from shoal.run.plan import plan as plan_module
from shoal.run.plan.compilers import compilers
from shoal.run.plan.job import PlannedJob
from shoal.run.plan.plan import extrapolate, make_plan
from shoal.run.predict import NOTHING
from shoal.run.size import AvailableMemory, parameter_count
from shoal.trainer.batch import pack
from shoal.types import Completion, Example, Group, Purpose, ShoalError, StopReason

pytestmark = pytest.mark.compile_quickly

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


def bytes_of(tree: Any) -> int:
    """On the first device, of real arrays."""
    first = jax.devices()[0]
    return sum(shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards
               if shard.device == first)


@pytest.mark.parametrize("mesh", [MeshSection(), MeshSection(fsdp=8), MeshSection(data=2, fsdp=2, tensor=2)],
                         ids=["one", "fsdp", "all"])
def test_what_roles_hold_is_what_the_runs_arrays_take(model, mesh):
    if mesh == MeshSection():
        mesh = MeshSection(trainer="1")
    job = PlannedJob(Config(model=replace(model, dtype="bfloat16"), mesh=mesh, sampling=SAMPLING, batch=BATCH), "")
    held, role = job.describe()["held"], job.roles.trainer
    parameters = jax.device_put(random_parameters(SMALL), jax.tree.map(lambda s: s.sharding,
                                                                      job.learner.shapes().trainable))
    state = job.learner.init(parameters)
    assert role.mesh.size == {1: 1}.get(mesh.fsdp * mesh.data * mesh.tensor, 8)
    assert held["trainer"]["always"] == {"parameters": bytes_of(parameters),
                                         "Adam's moments": bytes_of([leaf for leaf in jax.tree.leaves(state.optimizer)
                                                                    if leaf.ndim])}
    total, _ = job.learner.accumulate(None, state, random_batch(job))
    assert held["trainer"]["update"] == {"gradient": bytes_of(total.gradient)}
    assert held["sampler"]["always"] == {"the sampler's copy": bytes_of(publish_to(job.sampler_model, parameters))}
    caches = {f"KV caches ({name})": bytes_of(engine.programs["make_state"]())
              for name, engine in job.engines.items()}
    largest = max(caches, key=lambda name: caches[name])
    assert held["sampler"]["sampling"] == {largest: caches[largest]}


def random_batch(job: PlannedJob) -> Any:
    """A micro-batch of the planned shape on the host."""
    return jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), job._batch(job.roles.trainer))


def test_a_plan_for_the_devices_here(model, tmp_path, capsys):
    words = ["plan", f"model.path={model.path}", "mesh.trainer=1", "sampling.max_prompt_tokens=64", "json=true",
             "sampling.max_completion_tokens=64", "batch.prompts_per_step=8", "batch.group_size=2", "train.pass_k=0"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and list(found["programs"]) == ["prefill", "decode", "accumulate", "apply"]
    memory, needed = found["programs"]["accumulate"]["memory"], found["memory"]["programs"]["accumulate"]
    by_compiler = memory["arguments"] + memory["temp"] + memory["output"] - memory["alias"]
    assert sum(needed.values()) - needed["Adam's moments"] == pytest.approx(by_compiler, rel=0.15)
    assert found["verdict"].startswith("fits: ") and found["seconds"] == {}
    # what was compiled is kept: nothing compiles again
    files = list((tmp_path / "cache" / "plan").iterdir())
    assert len(files) == 4
    assert cli.main(words[:5] + words[6:]) == 0
    said = capsys.readouterr()
    assert "fits: " in said.out and list((tmp_path / "cache" / "plan").iterdir()) == files
    assert "warning: 1 of 8 devices are used: raise mesh.fsdp (" in said.err


def test_decoding_of_two_and_four_layers_gives_that_of_six(model, tmp_path):
    job = [PlannedJob(Config(model=write_model(tmp_path, replace(SMALL, num_layers=6)), sampling=SAMPLING, batch=BATCH,
                      mesh=MeshSection(fsdp=2, tensor=2, trainer="4")), "", layers) for layers in (2, 4, 0)]
    from shoal.run.plan.analysis import analyse

    two, four, whole = (analyse(one, "decode") for one in job)
    found = extrapolate(two, four, 6)
    assert found["flops"] == pytest.approx(whole["flops"], rel=0.01)
    assert found["extra_bytes"] == pytest.approx(whole["extra_bytes"], rel=0.05)
    moved = [sum(row["bytes"] for row in one["collectives"]) for one in (found, whole)]
    assert moved[0] == pytest.approx(moved[1], rel=0.01) and moved[0] > 0


def figures(**changes: Any) -> Figures:
    """A job on two v5p chips, 100 bytes of memory each, in round numbers."""
    program = {"extra_bytes": 10, "flops": 1e12, "floor_seconds": 1.0, "compute_seconds": 2.0, "transfer_seconds": 1.0,
               "collectives": [], "error": "", "largest": [], "sources": {}}
    job = {
        "roles": {name: {"mesh": {"fsdp": 2}, "devices": [0, 1]} for name in ("trainer", "sampler", "reference")},
        "held": {"trainer": {"always": {"parameters": 20, "Adam's moments": 40}, "sampling": {},
                             "update": {"gradient": 20}},
                 "sampler": {"always": {"the sampler's copy": 5}, "sampling": {"KV caches (training)": 5},
                             "update": {}},
                 "reference": {"always": {}, "sampling": {}, "update": {}}},
        "programs": {"prefill": {"runs": 1, "role": "sampler"}, "decode": {"runs": 4, "role": "sampler"},
                     "accumulate": {"runs": 8, "role": "trainer"}, "apply": {"runs": 1, "role": "trainer"}},
        "memory_bytes": 100, "num_devices": 2, "peak_flops": 1e12, "slots": 16, "prompts": 8,
        "published_bytes": 0, "model_flops": 5.6e12,
        "model": {"dtype": "bfloat16", "parameters": 10, "layers": 2, "remat": "full"}, "shape": {"tokens": 512},
    } | changes
    return Figures(Config(batch=BATCH, model=ModelSection(remat="full")), job, dict.fromkeys(job["programs"], program))


def test_memory_and_seconds_by_hand():
    one = figures()
    assert one.needed("accumulate") == {"parameters": 20, "Adam's moments": 40, "the sampler's copy": 5,
                                        "gradient": 20, "activations": 10}
    assert (one.peak, one.fullest, one.fits) == (95, "accumulate", True)
    assert one.seconds("accumulate") == (8.0, 16.0, 24.0)
    assert one.step_seconds == (14.0, 28.0, 42.0)
    assert one.phase_seconds()["sampling"] == (5.0, 10.0, 15.0)
    assert one.mfu(28.0) == pytest.approx(5.6 / (2 * 28))


@pytest.mark.parametrize(("refusal", "pathways", "text"), [
    ("", False, "32 hosts: runs with mesh.pathways=true, or as a process on each"),
    ("roles apart", False, "32 hosts: runs with mesh.pathways=true, not as a process on each: roles apart"),
    ("roles apart", True, None)])
def test_a_plan_says_how_a_job_of_several_hosts_runs(refusal, pathways, text):
    one = figures(devices="128 v5p chips", hosts=32, refusal=refusal,
                  shape={"tokens": 512, "rows": 1, "prefix": 64, "slots": 1, "length": 64})
    one = replace(one, config=replace(one.config, mesh=MeshSection(pathways=pathways)))
    assert [line for line in plan_command._head(one) if "hosts" in line] == ([text] if text else [])


@pytest.mark.parametrize(("max_staleness", "interval", "step"), [
    (-1, 1, 28.0),  # sampling takes 10 s, training 18
    (1, 1, 18.0), (2, 1, 18.0),
    (-1, 2, (10 + 18 + 18) / 2),  # the second of two steps is sampled while the first is learnt from
])
def test_a_step_takes_as_long_as_the_longer_of_what_overlaps(max_staleness, interval, step):
    apart = {"trainer": [0], "sampler": [1], "reference": [0]}
    one = figures(roles={name: {"mesh": {}, "devices": devices} for name, devices in apart.items()})
    train = TrainSection(max_staleness=max_staleness, weight_sync_interval=interval)
    assert replace(one, config=replace(one.config, train=train)).step_seconds[1] == pytest.approx(step)
    together = replace(figures(), config=replace(one.config, train=train))
    assert together.step_seconds == (14.0, 28.0, 42.0)  # on the same devices they take turns


def test_roles_apart_hold_their_own():
    apart = {"trainer": [0], "sampler": [1], "reference": [1]}
    one = figures(roles={name: {"mesh": {}, "devices": devices} for name, devices in apart.items()})
    assert one.needed("decode") == {"the sampler's copy": 5, "KV caches (training)": 5, "temporaries": 10}
    assert "the sampler's copy" not in one.needed("accumulate")


# ---- advice


def job_here(**keys: Any) -> tuple[Figures, Any]:
    """(figures, describe) of a job of the tiny model on the 8 simulated devices, as if they were accelerators of 100
    MB: each program takes 2 s (half of decoding's to read weights), an update moves data for 1 s, decoding for 4 s."""
    config = build(Config, {"model.dtype": "bfloat16", "sampling.max_prompt_tokens": 64,
                            "sampling.max_completion_tokens": 64, "batch.micro_tokens": 512, "train.pass_k": 0} | keys)

    def describe(other: Config) -> dict[str, Any]:
        job = PlannedJob(other, "").describe()
        roles = {name: role | {"links": dict.fromkeys(role["mesh"], 1e9)} for name, role in job["roles"].items()}
        return job | {"memory_bytes": 100_000_000, "peak_flops": 1e12, "link": 1e9, "roles": roles}

    job = describe(config)
    program: dict[str, Any] = {**NOTHING, "floor_seconds": 1.0, "compute_seconds": 2.0, "extra_bytes": 1000}
    rows = {"accumulate": ("all-gather", "fsdp", 1.0), "decode": ("all-reduce", "tensor", 4.0)}
    programs = {}
    for name in job["programs"]:
        kind, axis, seconds = rows.get(name, ("", "", 0.0))
        mesh = job["roles"][job["programs"][name]["role"]]["mesh"]
        fixed = {"weights_seconds": float(name == "decode")}
        moved = [{"kind": kind, "axis": axis, "source": "here", "times": 1, "bytes": 1e9, "seconds": seconds}]
        programs[name] = program | fixed | {
            "collectives": moved * (axis in mesh), "transfer_seconds": seconds * (axis in mesh)}
    return Figures(config, job, programs), describe


def larger(figures: Figures, **extra_bytes: int) -> Figures:
    """The figures with other temporaries of some programs."""
    return replace(figures, programs={name: {**one, "extra_bytes": extra_bytes.get(name, one["extra_bytes"])}
                                      for name, one in figures.programs.items()})


@pytest.mark.parametrize(("keys", "extra", "expected"), [
    ({"mesh.fsdp": 8}, {"accumulate": 150_000_000}, "batch.micro_tokens=256 (now 512): about 71.5 MiB less a device"),
    ({"mesh.fsdp": 8, "batch.micro_tokens": 128, "model.remat": "dots"}, {"accumulate": 97_500_000},
     "model.remat=full"),
    ({"mesh.fsdp": 8}, {"decode": 150_000_000}, "sampling.slots_per_device="),
    ({}, {"decode": 150_000_000}, "mesh.fsdp=8 (now 1)"),
])
def test_what_does_not_fit_names_the_key_that_mends_it(keys, extra, expected):
    figures, describe = job_here(**keys)
    figures = larger(figures, **extra)
    assert not figures.fits
    text = verdict(replace(figures, **advise(figures, describe)))
    assert "does not fit: " in text and expected in text


def test_what_is_held_is_mended_by_the_mesh():
    """Without a compiled program: the masters of data-parallel copies, a copy of the sampler, no key at all."""
    def advised(memory: int, **keys: Any) -> str:
        figures, describe = job_here(**keys)

        def small(config: Config) -> dict[str, Any]:
            return describe(config) | {"memory_bytes": memory}

        figures = Figures(figures.config, small(figures.config), {})
        assert not figures.fits
        return verdict(replace(figures, **advise(figures, small)))

    copies = advised(6_000_000, **{"mesh.data": 8})
    assert "mesh.fsdp=-1 mesh.data=1 (now 1 and 8)" in copies
    assert ", before anything is compiled (Adam's moments 6.7 MiB, " in copies
    assert "mesh.sampler_tensor=2 (now auto)" in advised(3_500_000, **{"mesh.fsdp": 8, "sampling.slots_per_device": 8})
    assert "more devices (mesh.fsdp): some " in advised(1000, **{"mesh.fsdp": 8})


def test_keys_that_save_time_are_named_with_bytes_and_seconds():
    figures, describe = job_here(**{"mesh.trainer": "4", "mesh.sampler": "4", "mesh.fsdp": 4, "model.remat": "full",
                                    "batch.micro_tokens": 128, "sampling.slots_per_device": 8})
    found = {one["key"]: one for one in advise(figures, describe)["advice"]}
    assert {"batch.micro_tokens", "model.remat", "sampling.slots_per_device", "mesh.trainer"} <= set(found)
    remat = found["model.remat"]
    runs, update = figures.job["programs"]["accumulate"]["runs"], 2.0
    assert remat["seconds"] == pytest.approx(0.25 * update * runs, rel=0.35) and remat["bytes"] < 0
    assert "more a device, about " in remat["text"] and "less a step" in remat["text"]
    together = found["mesh.trainer"]
    assert together["text"].startswith("mesh.trainer=1.0 mesh.sampler=1.0") and together["saves"] > 0.05
    text = verdict(replace(figures, **advise(figures, describe)))
    assert "; a step takes about " in text and text.endswith(advise(figures, describe)["advice"][0]["text"])


def test_a_transfer_that_one_key_removes_is_named_with_the_key():
    figures, describe = job_here(**{"mesh.fsdp": 2, "mesh.tensor": 4, "sampling.slots_per_device": 8})
    named = {row["program"]: row for row in advise(figures, describe)["named_transfers"]}
    assert named["accumulate"]["share"] > 0.05 and named["accumulate"]["axis"] == "fsdp"
    assert named["decode"]["axis"] == "tensor" and "mesh.sampler_tensor=2" in named["decode"]["cure"]
    assert "would leave" in named["decode"]["cure"] or "would remove it" in named["decode"]["cure"]


def test_a_gather_between_machines_is_removed_by_the_placement():
    figures, describe = job_here(**{"mesh.fsdp": 8})

    def machines(config: Config) -> dict[str, Any]:
        """Two machines of four: an axis of eight devices crosses the network between them."""
        job = describe(config)
        roles = {name: role | {"links": {axis: 1e9 if axis == "fsdp" and "data" in role["mesh"] else 1e7
                                         for axis in role["mesh"]}}
                 for name, role in job["roles"].items()}
        return job | {"machines": 2, "roles": roles}

    figures = replace(figures, job=machines(figures.config))
    named = {row["program"]: row for row in advise(figures, machines)["named_transfers"]}
    assert "mesh.dcn_data=2" in named["accumulate"]["cure"]
    assert "would leave" in named["accumulate"]["cure"]


def test_every_key_that_changes_memory_or_time_is_tried():
    figures, _ = job_here(**{"mesh.trainer": "4", "mesh.sampler": "4", "mesh.fsdp": 2, "mesh.data": 2,
                             "model.remat": "full", "algorithm.kl_coef": 0.1})
    job = dict(figures.job) | {"machines": 2}
    tried = {change.key for change in changes(figures.config, job, change_results=True)}
    assert tried >= {"batch.micro_tokens", "model.remat", "sampling.slots_per_device", "optimizer.reduce_dtype",
                     "mesh.fsdp", "mesh.dcn_data", "mesh.tensor", "mesh.sampler_tensor", "mesh.trainer",
                     "mesh.reference", "algorithm.kl_coef", "batch.group_size", "sampling.max_completion_tokens"}
    idle, _ = job_here()
    assert next(change for change in changes(idle.config, idle.job) if change.key == "mesh.fsdp").values == {
        "mesh.fsdp": 8}


def test_a_mesh_that_does_not_divide_the_model_is_never_advised():
    figures, describe = job_here(**{"mesh.fsdp": 8})
    tensors = [change.values.get("mesh.sampler_tensor") for change in changes(figures.config, figures.job)]
    assert 2 in tensors  # tried, and described as a job of its own
    for one in advise(figures, describe)["advice"]:
        describe(build(Config, {name: get_value(figures.config, name) for name in keys_of(Config)} | one["values"]))


def test_the_largest_batch_that_fits_is_proved_by_a_compilation(monkeypatch):
    """Activations take 1000 bytes and one a token; 10,000 are free."""
    tried = []

    def planned(config: PlanConfig, *_: Any) -> Figures:
        tried.append(config.batch.micro_tokens)
        one = figures(memory_bytes=10_085)
        programs = {name: {**program, "extra_bytes": 1000 + config.batch.micro_tokens if name == "accumulate" else 1}
                    for name, program in one.programs.items()}
        return replace(one, config=replace(one.config, batch=config.batch), programs=programs,
                       job=dict(one.job) | {"prompts": 64})

    monkeypatch.setattr(plan_module, "_figures", planned)
    monkeypatch.setattr(compilers_module.Compilers, "answer", lambda self, requests: [{"advice": []}])
    sampling = SamplingSection(max_prompt_tokens=512, max_completion_tokens=512)
    fitted = make_plan(PlanConfig(fit=True, sampling=sampling, batch=BATCH), lambda text: None)
    assert fitted.fits and 7000 <= fitted.config.batch.micro_tokens <= 9000 and len(tried) <= 4


def test_what_cannot_fit_is_said_before_anything_is_compiled(model, monkeypatch):
    def never(*_: Any) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("shoal.run.plan.analysis.analyse", never)
    monkeypatch.setattr("shoal.run.outline.available_memory", lambda _: AvailableMemory(1000, 1000, ""))
    found = make_plan(PlanConfig(model=model, sampling=SAMPLING, batch=BATCH), lambda text: None)
    assert not found.fits and found.programs == {} and verdict(found).startswith("does not fit: ")


def test_a_compiler_that_is_not_installed_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for topology, needed in (("v5p-8", "libtpu"), ("h100:8", "jax_cuda13_plugin")):
        with pytest.raises(ShoalError, match=rf"{needed}: pip install 'shoal\[plan\]'"):
            PlannedJob(Config(model=ModelSection(name="llama3.1-8b")), topology)
    # in the process that compiles, its error is one line of the command
    monkeypatch.setattr("shoal.run.plan.compilers._Compiler", lambda: SimpleNamespace(
        answer=lambda request: compilers_module.found_in(worker.reply(json.dumps(request)), ""), close=lambda: None))
    assert cli.main(["plan", "topology=h100:8", "model.name=llama3.1-8b"]) == 2
    assert "jax_cuda13_plugin: pip install 'shoal[plan]'" in capsys.readouterr().err


def test_a_compiler_that_dies_names_its_program(monkeypatch):
    monkeypatch.setattr("shoal.run.plan.compilers.sys.executable", "/bin/true")
    with compilers(1, "v5p-8") as found, pytest.raises(ShoalError, match=r"decode: .*layers=shallow"):
        found.answer([{"config": {}, "topology": "v5p-8", "program": "decode", "layers": 0}])


def test_a_compiler_without_memory_ends_and_one_with_a_fault_says_it(monkeypatch):
    """Ended, its program is named as above."""
    for fault, expected in ((MemoryError(), SystemExit), (ShoalError("no such device"), {"error": "no such device"}),
                            (ValueError("odd"), {"fault": "ValueError: odd"})):
        monkeypatch.setattr(worker, "answer", lambda request, fault=fault: (_ for _ in ()).throw(fault))
        if expected is SystemExit:
            with pytest.raises(SystemExit):
                worker.reply("{}")
        else:
            assert worker.reply("{}") == expected


def test_the_floor_of_decoding_reads_weights_and_live_keys_for_each_token(model, monkeypatch):
    """By hand: 2 layers of 2 heads of 16, keys and values; half of a completion's on average. Others read what they are
    called with once."""
    job = PlannedJob(Config(model=replace(model, dtype="bfloat16"), sampling=SAMPLING, batch=BATCH,
                     mesh=MeshSection(trainer="1")), "")
    monkeypatch.setattr(PlannedJob, "accelerator", ACCELERATORS["h200"])
    decode, update = (analysis.analyse(job, name) for name in ("decode", "accumulate"))
    weights, tokens = 2 * parameter_count(SMALL), 63 / 2  # in each of two dispatches
    heads = 2 * SMALL.num_layers * SMALL.num_kv_heads * SMALL.head_dim * 2
    keys = heads * (8 * 64 + 16 * 32)
    assert decode["weights_seconds"] == pytest.approx(tokens * weights / 4.8e12)
    assert decode["floor_seconds"] == pytest.approx(tokens * (weights + keys) / 4.8e12)
    assert update["weights_seconds"] == 0.0 < update["floor_seconds"] < decode["floor_seconds"]


@pytest.mark.parametrize(("num_minibatches", "trained"), [(1, 5 * 8 * 1024), (3, 3 * 8 * 1792)])
def test_micro_batches_are_counted_in_the_shapes_that_the_run_packs_them_in(model, num_minibatches, trained):
    """32 groups of 1,088 tokens: rows of 4,096 on 8 devices would be 65,536 of which the last are empty."""
    config = Config(model=model, mesh=MeshSection(fsdp=8), sampling=replace(SAMPLING, max_completion_tokens=128),
                    batch=BatchSection(prompts_per_step=32, group_size=8, micro_tokens=4096),
                    algorithm=AlgorithmSection(num_minibatches=num_minibatches, num_epochs=2))
    job = PlannedJob(config, "")
    ids, ones = np.ones(128, np.int32), np.ones(128)
    groups = [Group(Purpose.TRAIN, 0, 0, Example(row, "q"), ids[:64],
                    tuple(Completion(row, index, ids, ones.astype(np.float32), ones > 0, 0 * ids, StopReason.EOS)
                          for index in range(8)), ("",) * 8, np.ones(8), {}, np.ones(8, bool)) for row in range(32)]
    updater = make_updater(job.config, job.learner, None, None)
    run = sum(batch.arrays.tokens.size for members in updater._minibatches(32, step=0, epoch=0)
              for batch in pack(groups, members, np.ones((32, 8)), np.ones((32, 8)), updater.shapes(groups), 1.0))
    assert run == trained and job.programs()["accumulate"].runs * job.shape.tokens == 2 * trained


@pytest.mark.parametrize(("topology", "needed", "attention"), [("v5p-8", "libtpu", "auto"),
                                                               ("h200:4", "jax_cuda13_plugin", "pallas")])
def test_a_plan_for_devices_that_are_not_here(model, tmp_path, topology, needed, attention):
    """On the GPU with our own kernels, for heads that fill its shared memory."""
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    model = replace(write_model(tmp_path, replace(SMALL, head_dim=128)), attention=attention)
    found = make_plan(PlanConfig(topology=topology, model=model, sampling=SAMPLING, batch=BATCH,
                                 mesh=MeshSection(fsdp=4)), lambda text: None)
    assert found.fits and found.is_timed and found.job["model"]["dtype"] == "bfloat16"
    assert {"publish", "decode", "accumulate"} <= set(found.programs)
    assert any(row["kind"] == "all-gather" and row["axis"] == "fsdp"
               for row in found.programs["accumulate"]["collectives"])
    floor, hidden, none = found.step_seconds
    assert 0 < floor <= hidden <= none


def test_a_dry_run_refuses_what_the_plan_refuses(capsys):
    """The model's heads, by the topology's devices."""
    words = ["plan", "topology=h200:3", "model.name=qwen2.5-1.5b", "mesh.tensor=3", "--dry-run"]
    assert cli.main(words) == 2
    assert "mesh.tensor=3" in capsys.readouterr().err
    assert cli.main([*words[:3], "mesh.fsdp=3", "--dry-run"]) == 0
