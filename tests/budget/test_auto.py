"""What settings leave open: the devices of one replica of the sampler, and what the backward pass
keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pods import gpu, tpu

from shoal.budget import auto, memory
from shoal.budget.auto import (
    decided_micro_tokens,
    decided_remat,
    open_budget,
    run_roles,
    with_update,
)
from shoal.budget.memory import (
    activation_bytes,
    held_versions,
    input_bytes,
    parameter_count,
    teacher_update_bytes,
    unstacked_bytes,
    update_bytes,
    weight_budget,
)
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.devices import MeshSection, SamplerSection
from shoal.config.sections.model import LoraSection, ModelSection, TeacherSection
from shoal.config.sections.optimizer import BatchSection
from shoal.config.sections.sampling import SamplingSection
from shoal.config.sections.train import TrainSection
from shoal.config.train import Config
from shoal.mesh import make_roles, roles
from shoal.model.parameters import shardings
from shoal.model.published import model_named
from shoal.weights.source import adapted

OWN = {"trainer": "4", "sampler": "2", "fsdp": 4}
V5P, V6E = tpu("v5p", 2, 2), tpu("v6e", 2, 4)


def config(kl_coef: float = 0.0, teacher: str = "", max_staleness: int = -1, **mesh: Any) -> Config:
    return replace(
        Config(),
        mesh=MeshSection(**mesh),
        model=ModelSection(dtype="bfloat16"),
        algorithm=AlgorithmSection(kl_coef=kl_coef),
        teacher=TeacherSection(path=teacher),
        train=TrainSection(max_staleness=max_staleness),
    )


@pytest.mark.parametrize(
    ("model", "devices", "settings", "tensor"),
    [
        # 24 GB of masters and moments a device, 16 GB of weights
        ("llama3.1-8b", V5P, {"fsdp": 4}, 1),
        ("llama3.1-8b", V6E, {"fsdp": 8}, 2),  # 12 GB and 16 GB of 33.6
        # sampling would fit with 2, but no update beside 13 GiB of masters and moments
        ("qwen3.5-9b", V6E, {"fsdp": 8}, 4),
        ("llama3.1-8b", V6E, {}, 1),  # the mesh is one device
        # 24 GB: each of two copies is of four devices
        ("llama3.1-8b", V6E, {"fsdp": 4, "data": 2}, 8),
        ("llama3.1-8b", V6E, {**OWN, "kl_coef": 0.1}, 1),  # 16 GB and 8 of the reference
        # and 8 of the teacher
        ("llama3.1-8b", V6E, {**OWN, "kl_coef": 0.1, "teacher": "Qwen/Qwen2.5-7B-Instruct"}, 2),
        (
            "llama3.1-8b",
            V6E,
            {**OWN, "kl_coef": 0.1, "teacher": "Qwen/Qwen2.5-7B-Instruct", "reference": "2"},
            1,
        ),
        ("llama3.1-70b", tpu("v5p", 4, 4, 8), {"trainer": "64", "sampler": "64", "fsdp": 64}, 2),
        (
            "llama3.1-70b",
            tpu("v5p", 4, 4, 8),
            {"trainer": "64", "sampler": "64", "fsdp": 64, "sampler_tensor": 8},
            8,
        ),
        (
            "llama3.1-70b",
            tpu("v5p", 4, 4, 8),
            {"trainer": "64", "sampler": "64", "fsdp": 64, "max_staleness": 1},
            4,
        ),
        ("llama3.1-70b", tpu("v5p", 2, 4, 4), {"fsdp": 32}, 4),
        ("llama3.1-70b", tpu("v6e", 8, 8), {"fsdp": 32, "tensor": 2}, 16),
        ("llama3.1-8b", jax.devices(), {"fsdp": 8}, 1),
        ("qwen2.5-1.5b", gpu("h200", 1, 1), {}, 1),
    ],
)
def test_a_replica_has_the_least_devices_that_hold_it(model, devices, settings, tensor):
    assert (
        run_roles(config(**settings), model_named(model).architecture, devices).sampler.tensor
        == tensor
    )


@pytest.mark.parametrize(
    ("model", "devices", "settings", "expert"),
    [
        # in parts, decoding would not fit: 192 columns of an expert have another layout
        ("qwen3-30b-a3b", tpu("v6e", 8, 8), {"fsdp": 64}, 4),
        ("qwen3-30b-a3b", tpu("v6e", 8, 8), {"fsdp": 16, "expert": 4}, 4),
        ("qwen3-30b-a3b", V6E, {"fsdp": 8, "sampler_tensor": 2}, 2),
        # the trainer's experts are in parts, which the sampler may share
        ("qwen3-30b-a3b", V6E, {"fsdp": 4, "tensor": 2, "sampler_tensor": 2}, 1),
        ("qwen3-30b-a3b", gpu("h200", 1, 1), {}, 1),
        ("qwen3.5-9b", V6E, {"fsdp": 8}, 1),  # without experts
    ],
)
def test_a_replicas_devices_share_experts_by_their_number(model, devices, settings, expert):
    made = run_roles(config(**settings), model_named(model).architecture, devices)
    assert made.sampler.expert == expert
    assert made.trainer.expert == settings.get("expert", 1)


def test_experts_whose_number_a_replica_does_not_divide_are_split_by_features():
    a = model_named("qwen3-30b-a3b").architecture
    odd = replace(a, experts=replace(a.experts, num_experts=126))
    made = run_roles(config(fsdp=8, sampler_tensor=4), odd, V6E)
    assert (made.sampler.tensor, made.sampler.expert) == (4, 1)


def test_of_several_processes_a_replica_has_no_more_devices_than_each(monkeypatch):
    def process_count():
        return 16

    monkeypatch.setattr(roles.jax, "process_count", process_count)
    made = run_roles(
        config(fsdp=32, tensor=2), model_named("llama3.1-70b").architecture, tpu("v6e", 8, 8)
    )
    assert made.sampler.tensor == 4


def test_a_reference_on_devices_that_do_not_divide_the_model_has_copies():
    a = model_named("qwen2.5-7b").architecture
    made = run_roles(config(0.1, trainer="2", sampler="6", fsdp=2), a, jax.devices())
    assert made.reference.mesh.devices.shape == (3, 2, 1, 1, 1)
    kernel = shardings(a, made.reference).embed_tokens
    assert kernel.shard_shape((a.vocab_size, a.hidden_size)) == (a.vocab_size, a.hidden_size // 2)


@pytest.mark.parametrize(
    ("max_staleness", "interval", "held"),
    [
        (-1, 1, [(1, 0)]),  # the trainer's own arrays, where type and devices are its own
        (1, 1, [(2, 1)]),
        (-1, 3, [(1, 0), (1, 1), (1, 1)]),  # between two publications the trainer goes on
        (2, 2, [(2, 1), (2, 2)]),
    ],
)
def test_versions_that_are_held_at_once(max_staleness, interval, held):
    section = TrainSection(max_staleness=max_staleness, weight_sync_interval=interval)
    assert list(held_versions(replace(Config(), train=section))) == held


# ---- what the backward pass keeps

PODS = {"trainer": "64", "sampler": "64", "fsdp": 64, "sampler_tensor": 8}


@pytest.mark.parametrize(
    ("model", "devices", "mesh", "micro_tokens", "remat"),
    [
        ("llama3.1-70b", tpu("v5p", 4, 4, 8), PODS, 2048, "dots"),
        # all products would take 60 of 54 GiB
        ("llama3.1-70b", tpu("v5p", 4, 4, 8), PODS, 4352, "attention"),
        ("llama3.1-70b", tpu("v5p", 2, 4, 4), {"fsdp": 32}, 16384, "full"),
        ("llama3.1-8b", tpu("v5p", 2, 2), {"fsdp": 4}, 4352, "dots"),
        # as fast, whatever fits
        ("llama3.1-8b", tpu("v6e", 2, 4), {"fsdp": 8, "sampler_tensor": 8}, 2048, "full"),
        ("qwen2.5-1.5b", gpu("h200", 1, 1), {}, 32768, "dots"),
        ("qwen2.5-1.5b", gpu("h200", 1, 1), {}, 131072, "attention"),
        ("qwen2.5-1.5b", jax.devices(), {}, 512, "dots"),  # a CPU: by 2 GiB alone
        ("qwen2.5-1.5b", jax.devices(), {}, 4096, "full"),
    ],
)
def test_as_much_is_kept_as_there_is_memory_for(
    model: str, devices: Any, mesh: dict[str, Any], micro_tokens: int, remat: str
) -> None:
    made = Config(mesh=MeshSection(**mesh), batch=BatchSection(micro_tokens=micro_tokens))
    a = model_named(model).architecture
    assert decided_remat(made, run_roles(made, a, devices), a) == remat


@pytest.mark.parametrize(
    ("model", "devices", "settings", "micro_tokens"),
    [
        # four groups; of eight 34,816 are more than are asked for
        ("qwen2.5-1.5b", gpu("h200", 1, 1), {}, 17408),
        ("qwen2.5-1.5b", gpu("l4", 1, 1), {}, 4096),  # 18 of 24 GB are held
        # 24 of 33.5 GB are held
        ("llama3.1-8b", tpu("v6e", 2, 4), {"mesh": MeshSection(fsdp=8)}, 4096),
        # two would be three quarters of it
        ("llama3.1-8b", tpu("v5p", 2, 2), {"mesh": MeshSection(fsdp=4)}, 4352),
        # of which as much is kept as of 4,096
        ("llama3.1-70b", tpu("v5p", 4, 4, 8), {"mesh": MeshSection(**PODS)}, 4352),
        (
            "qwen2.5-1.5b",
            gpu("h200", 1, 1),
            {"algorithm": AlgorithmSection(num_minibatches=32)},
            4352,
        ),
        ("qwen2.5-1.5b", gpu("h200", 1, 1), {"model": ModelSection(remat="none")}, 4096),
    ],
)
def test_rows_hold_as_many_whole_groups_as_leave_a_quarter_of_the_memory(
    model: str, devices: Any, settings: dict[str, Any], micro_tokens: int
) -> None:
    sizes: dict[str, Any] = {"max_prompt_tokens": 256, "max_completion_tokens": 512}
    made = Config(
        batch=BatchSection(prompts_per_step=32 * len(devices), micro_tokens=4096),
        **{"sampling": SamplingSection(**sizes), **settings},
    )
    a = model_named(model).architecture
    assert decided_micro_tokens(made, run_roles(made, a, devices), a) == micro_tokens


@pytest.mark.parametrize(("gib", "micro_tokens"), [(32.0, 4096), (30.5, 2304), (20.0, 4096)])
def test_where_the_default_does_not_fit_rows_hold_a_part_of_a_group(
    monkeypatch: pytest.MonkeyPatch, gib: float, micro_tokens: int
) -> None:
    """Four of eight completions; the default where nothing fits."""

    def device_memory(device: Any) -> int:
        return int(gib * 2**30)

    for module in (auto, memory):
        monkeypatch.setattr(module, "device_memory", device_memory)
    sizes: dict[str, Any] = {"max_prompt_tokens": 256, "max_completion_tokens": 512}
    made = Config(
        batch=BatchSection(prompts_per_step=1024, micro_tokens=4096),
        sampling=SamplingSection(**sizes),
        mesh=MeshSection(fsdp=32, sampler_tensor=16),
    )
    a = model_named("qwen3-32b").architecture
    devices = tpu("v6e", 4, 8)
    assert decided_micro_tokens(made, run_roles(made, a, devices), a) == micro_tokens


@pytest.mark.parametrize(
    ("prompt", "completion", "micro_tokens"),
    [
        (256, 64, 2048),  # whole groups fit a row
        (64, 128, 2048),
        (64, 256, 2304),  # a group
        (64, 512, 2304),  # four completions; a row of 2,048 holds three
        (64, 1024, 2304),  # two; a row of 2,048 holds one, and half of it is padding
        (128, 768, 3328),
        (512, 2048, 2048),  # a row holds one completion, whatever its length is
    ],
)
def test_rows_of_a_cpu_hold_a_number_of_the_longest_completions(
    prompt: int, completion: int, micro_tokens: int
) -> None:
    sampling = SamplingSection(max_prompt_tokens=prompt, max_completion_tokens=completion)
    made = Config(
        batch=BatchSection(prompts_per_step=4, group_size=8, micro_tokens=2048), sampling=sampling
    )
    a = model_named("qwen2.5-1.5b").architecture
    assert decided_micro_tokens(made, run_roles(made, a, jax.devices()[:1]), a) == micro_tokens


def test_activations_of_a_layer_by_hand():
    """Qwen3 4B: 36 layers of 2560, 32 heads and 8 of keys of 128, a feed-forward part of 9728."""
    a = model_named("qwen3-4b").architecture
    products = 4096 + 2 * 1024 + 2560 + 2 * 9728 + 2560
    by_attention = 4096 + 2 * 1024 + 4096 + 2560
    for remat, width in (("dots", products + 2560), ("attention", by_attention), ("full", 0)):
        assert activation_bytes(a, 10, "bfloat16", remat) == 2 * 10 * 36 * width
    adapter = adapted(LoraSection(rank=16), a)
    assert activation_bytes(adapter, 10, "bfloat16") == activation_bytes(a, 10, "bfloat16")


def test_scores_that_no_kernel_computes_are_counted():
    """Gemma 4's heads of 512 have no kernel on GPUs: 4,096 tokens have 2 GiB of scores a layer."""
    a = model_named("gemma4-31b").architecture

    def activations(devices: Any, attention: str) -> int:
        made = config()
        made = replace(made, model=replace(made.model, attention=attention))
        made_roles = run_roles(made, a, devices)
        budget = with_update(
            weights=open_budget(made, made_roles, a),
            a=a,
            role=made_roles.trainer,
            dtype=jnp.dtype(jnp.bfloat16),
            tokens=4096,
            remat="full",
        )
        return budget.activations

    h200, v5p = gpu("h200", 1, 1), V5P[:1]
    scores = 4096**2 * 32 * (4 + 2)
    assert activations(h200, "auto") - activations(h200, "blocked") == scores
    assert activations(v5p, "auto") == activations(v5p, "blocked")
    assert activations(v5p, "reference") - activations(v5p, "blocked") == scores


def test_what_a_pattern_of_layers_stored_is_taken_out_of_the_stack_at_once():
    """On a TPU: of six layers of 60, and their weights; layers of one kind are read in place."""
    patterned, plain = (model_named(name).architecture for name in ("gemma4-31b", "qwen3-4b"))
    of_tpu = make_roles(MeshSection(), V5P[:1]).trainer
    of_gpu = make_roles(MeshSection(), gpu("h200", 1, 1)).trainer
    weights = unstacked_bytes(patterned, of_tpu, "bfloat16", 0)
    of_layers = 2 * (parameter_count(patterned) - 262144 * 5376 - 5376)  # but embeddings and a norm
    assert weights == of_layers // 10
    assert unstacked_bytes(patterned, of_tpu, "bfloat16", 600) == weights + 60
    for a, role in ((plain, of_tpu), (patterned, of_gpu)):
        assert unstacked_bytes(a, role, "bfloat16", 600) == 0


@pytest.mark.parametrize(
    ("model", "devices", "remat"),
    [
        # With what `dots` keeps, XLA needed 97.2 of 95.7 GiB where 85.7 had been estimated.
        ("gemma4-31b", V5P, "attention"),
        ("qwen3.5-9b", gpu("h200", 1, 1), "dots"),
    ],
)
def test_an_adapters_update_of_a_pattern_of_layers_keeps_what_fits(model, devices, remat):
    """Of 256 + 512 tokens, as the record of plans has them."""
    made = config(fsdp=-1)
    lengths = SamplingSection(max_prompt_tokens=256, max_completion_tokens=512)
    made = replace(made, sampling=lengths, batch=replace(made.batch, group_size=8))
    made = replace(made, model=replace(made.model, lora=LoraSection(rank=16)))
    made = replace(made, batch=replace(made.batch, micro_tokens=4096))
    a = adapted(LoraSection(rank=16), model_named(model).architecture)
    assert decided_remat(made, run_roles(made, a, devices), a) == remat


def test_logits_of_few_tokens_take_no_more_than_they_are():
    a = replace(model_named("qwen2.5-1.5b").architecture, vocab_size=1000)
    role = make_roles(MeshSection()).trainer
    few, more = (
        update_bytes(a, role, "float32", tokens) - input_bytes(a, tokens, "float32")
        for tokens in (512, 1024)
    )
    assert more - few == 3 * 4 * 512 * 1000
    one = replace(a, num_layers=1)  # whose one layer is whole, too
    assert update_bytes(one, role, "float32", 512) < update_bytes(a, role, "float32", 512)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("local", {"parameters", "Adam's moments", "the sampler's copy", "reference", "gradient"}),
        ("ray", {"parameters", "Adam's moments", "reference", "gradient"}),
    ],
)
def test_a_device_holds_what_all_of_its_roles_do_and_rays_samplers_have_their_own(kind, parts):
    made = replace(config(0.1, fsdp=4), sampler=SamplerSection(kind=kind))
    a = model_named("llama3.1-8b").architecture
    budget = weight_budget(made, a, run_roles(made, a, V5P), "bfloat16", {})
    assert set(budget.held("trainer", "update")) == parts and "gradient" not in budget.held(
        "trainer", "sampling"
    )
    assert ("parameters" in budget.held("sampler")) == (kind == "local")
    # a quarter of 8,030,261,248, in float32
    assert budget.held("trainer")["parameters"] == 4 * 2_007_565_312


@pytest.mark.parametrize(("staleness", "versions"), [(-1, 1), (1, 2)])
def test_what_an_adapter_takes_by_hand(staleness, versions):
    """Rank 16 of Qwen3 4B on one GPU, whose sampler reads layers apart: 36 layers of q, k, v, o and
    three products."""
    made = replace(
        config(0.1, max_staleness=staleness), model=ModelSection(lora=LoraSection(rank=16))
    )
    a = adapted(LoraSection(rank=16), model_named("qwen3-4b").architecture)
    roles = run_roles(made, a, gpu("h200", 1, 1))
    budget = weight_budget(made, a, roles, "bfloat16", {})
    own = 36 * 16 * ((2560 + 4096) + 2 * (2560 + 1024) + (4096 + 2560) + 3 * (2560 + 9728))
    layers = 36 * (2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128)
    assert budget.held("trainer", "update") == {
        "parameters": 4 * own,
        "Adam's moments": 8 * own,
        "gradient": 4 * own,
        "reference": 0,
        "frozen parameters": 2 * (layers + 151936 * 2560 + 2560),
        "the sampler's copy": 2 * layers + 2 * own * versions,
    }
    # An adapter that training goes on from is kept as it was, too; the base alone is not.
    for lora, path in (
        (LoraSection(path="adapter"), ""),
        (LoraSection(path="adapter", rank=16), ""),
        (LoraSection(), "outputs/run"),
    ):
        goes_on = replace(made, model=ModelSection(path=path or "tiny", lora=lora))
        assert (
            weight_budget(goes_on, a, roles, "bfloat16", {}).held("reference")["reference"]
            == 2 * own
        )
        base = replace(goes_on, algorithm=replace(goes_on.algorithm, reference="base"))
        assert weight_budget(base, a, roles, "bfloat16", {}).held("reference")["reference"] == 0


@pytest.mark.parametrize(
    ("divergence", "mesh", "head"),
    [
        ("full", OWN, 2 * 152064 * 3584 // 4),
        ("full", {"fsdp": 8}, None),  # the reference is the trainer: the same arrays
        ("topk", OWN, None),
        ("sampled", OWN, None),
    ],
)
def test_a_teachers_head_is_held_where_its_logits_are_computed(divergence, mesh, head):
    teacher = TeacherSection("Qwen/Qwen2.5-7B-Instruct", divergence=divergence)
    made = replace(config(**mesh), teacher=teacher)
    a = model_named("llama3.1-8b").architecture
    of_teacher = model_named("qwen2.5-7b").architecture
    roles = run_roles(made, a, V6E)
    held = weight_budget(made, a, roles, "bfloat16", {"": of_teacher}).held("trainer")
    assert held.get("the teacher's head") == head
    needed = teacher_update_bytes(teacher, [of_teacher], roles.trainer, "bfloat16", 1000)
    assert (
        needed
        == {
            "full": 2 * 152064 * 3584 + 2 * 1000 * 2 * 3584,
            "topk": 2 * 1000 * (4 * 64 + 4 * 65),
            "sampled": 0,
        }[divergence]
    )
    assert teacher_update_bytes(teacher, [], roles.trainer, "bfloat16", 1000) == 0
