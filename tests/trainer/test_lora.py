"""Adapters: their gradients, what is trained and what stays, PEFT's files in both directions, and
mistakes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from safetensors.numpy import load_file, save_file
from small import (
    FULLEST,
    HYBRID,
    LLAMA2,
    PLAINEST,
    QWEN3,
    batches,
    learner,
    random_groups,
    random_parameters,
    relative,
    roles,
    shoal_logits,
    whole,
)
from tiny_models import write_model
from tiny_runs import by_path, same_bits

from shoal.budget.auto import trained_model
from shoal.budget.memory import bytes_per_device, copied_shapes
from shoal.commands.convert import open_source
from shoal.config.sections.model import LoraSection, ModelSection
from shoal.config.train import Config
from shoal.mesh import Role
from shoal.model import adapters
from shoal.model.architecture import EXPERT_PRODUCTS, Adapter, Architecture, Layer
from shoal.model.attention import selector
from shoal.model.block import _heads
from shoal.model.compiler_habits import PLAIN, gated_product, products_joined, scales_folded
from shoal.model.families import MULTIMODAL, architecture_of
from shoal.model.flops import model_flops
from shoal.model.layers import by_layer
from shoal.model.linear import Adapted, Biased, Quantised, linear, quantise
from shoal.model.parameters import (
    as_frozen,
    frozen_specs,
    joined,
    param_shapes,
    param_specs,
    quantiser,
    select,
    shardings,
    trained_specs,
    without_adapter,
)
from shoal.model.published import MODELS
from shoal.model.recurrence import SequenceRecurrence, delta_net
from shoal.model.transformer import Model
from shoal.records import ShoalError
from shoal.sampler.engine import Engine
from shoal.trainer.batch import BatchLayout, TokenTerms, pack
from shoal.trainer.loss import batch_loss
from shoal.trainer.step import put_batch
from shoal.weights import huggingface, peft
from shoal.weights.checkpoints import checkpoint_bytes
from shoal.weights.checksum import checksum
from shoal.weights.sampler_copy import (
    named_leaves,
    named_specs,
    num_bytes,
    published_dtype,
    published_shapes,
    to_host,
)
from shoal.weights.source import resolve_model
from shoal.weights.store import FileStore, MemoryStore

ROLE = roles().trainer
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK3 = Adapter(3, 6.0, PRODUCTS)


def adapted(a: Architecture, adapter: Adapter = RANK3) -> Architecture:
    return replace(a, adapter=adapter)


def with_adapter(a: Architecture, base: Any, adapter: Any) -> Any:
    return joined(adapter, as_frozen(a, base))


def kernels(weights: Any) -> dict[str, Adapted]:
    found = {}
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        found[name] = getattr(weights.blocks, name)
    result = {}
    for name, weight in found.items():
        result[name] = (
            getattr(weight, "kernel", weight) if not isinstance(weight, Adapted) else weight
        )
    return result


@pytest.mark.parametrize(
    ("a", "number"),
    [
        (QWEN3, 0),
        (HYBRID, 3),
        (replace(QWEN3, pattern=(Layer(head_dim=4, num_kv_heads=1),)), 0),
        (adapted(QWEN3), 0),
        (adapted(replace(QWEN3, qkv_bias=True)), 0),
        (adapted(replace(HYBRID, quantised="int8")), 3),
    ],
    ids=[
        "plain",
        "with an output gate",
        "with other heads",
        "with an adapter",
        "with biases and an adapter",
        "of 8 bits with an adapter",
    ],
)
def test_joined_products_are_the_three(a, number):
    model, parameters = Model(a, ROLE), random_parameters(a)
    layer, weights = a.layer(number), by_layer(model, parameters.blocks)[number]
    h = jax.random.normal(jax.random.key(0), (2, 3, a.hidden_size))
    together = products_joined(weights)
    assert together.k is None
    for found, expected in zip(
        _heads(model, layer, together, h, PLAIN),
        _heads(model, layer, weights, h, PLAIN),
        strict=True,
    ):
        assert found.shape == expected.shape and relative(found, expected) < 1e-6


DELTA_PRODUCTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


@pytest.mark.parametrize("targets", [(), DELTA_PRODUCTS], ids=["plain", "with an adapter"])
def test_joined_products_of_a_delta_net_are_the_four(targets):
    a = adapted(HYBRID, Adapter(3, 6.0, targets)) if targets else HYBRID
    model, parameters = Model(a, ROLE), random_parameters(a)
    weights = by_layer(model, parameters.blocks)[0]
    together = products_joined(weights)
    assert together.delta_net.z is together.delta_net.b is together.delta_net.a is None
    h = jax.random.normal(jax.random.key(0), (2, 3, a.hidden_size))
    recurrence = SequenceRecurrence(a.delta_net_sizes, ROLE, jnp.asarray([3, 2]))
    for found, expected in zip(
        jax.tree.leaves(delta_net(model, together.delta_net, h, recurrence, None)),
        jax.tree.leaves(delta_net(model, weights.delta_net, h, recurrence, None)),
        strict=True,
    ):
        assert found.shape == expected.shape and relative(found, expected) < 1e-5


def test_where_some_products_alone_have_an_adapter_they_stay_apart():
    for a, number in (
        (adapted(QWEN3, Adapter(3, 6.0, ("q_proj", "v_proj"))), 0),
        (adapted(HYBRID, Adapter(3, 6.0, ("in_proj_qkv",))), 0),
    ):
        weights = by_layer(Model(a, ROLE), random_parameters(a).blocks)[number]
        assert jax.tree.structure(products_joined(weights)) == jax.tree.structure(weights)


def test_adapters_of_gate_and_up_share_their_first_product():
    a = adapted(QWEN3)
    weights = by_layer(Model(a, ROLE), random_parameters(a).blocks)[0]
    together = products_joined(weights)
    assert together.gate.a is together.up.a
    h = jax.random.normal(jax.random.key(0), (5, a.hidden_size))
    for name in ("gate", "up"):
        found, expected = linear(getattr(together, name), h), linear(getattr(weights, name), h)
        assert relative(found, expected) < 1e-6

    def both(h: jax.Array) -> tuple[jax.Array, jax.Array]:
        return linear(together.gate, h), linear(together.up, h)

    # two kernels, two second matrices, and one first
    text = jax.jit(both).lower(h).compile().as_text() or ""
    assert len(re.findall(r"f32\[5,6\]\S* dot\(", text)) == 1


@pytest.mark.parametrize(("scale", "folds"), [(4.0, True), (0.5, True), (3.0, False)])
def test_a_scale_that_is_a_power_of_two_is_folded_with_the_same_bits(scale, folds):
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    weight = Adapted(draw(24, 16), draw(24, 4), draw(4, 16), scale)
    folded = scales_folded({"q": weight, "norm": draw(24)})["q"]
    assert (folded.scale == 1.0) == folds
    x = draw(5, 24)
    assert np.array_equal(linear(folded, x), linear(weight, x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "a", [QWEN3, LLAMA2, replace(QWEN3, qkv_bias=True)], ids=["qwen3", "llama", "with biases"]
)
def test_on_a_gpu_an_adapters_products_are_joined_too(a, monkeypatch):
    """The columns of a are then three times the rows that each b had, which once ended every run
    with an adapter on a GPU whose model has no biases."""
    monkeypatch.setattr(Role, "platform", "gpu")

    def decode_kernel_refusal(model, layer=None):
        return ""

    monkeypatch.setattr(selector, "decode_kernel_refusal", decode_kernel_refusal)
    for one in (a, adapted(a)):
        model = Model(one, ROLE)
        engine = Engine(
            model,
            slots=8,
            group_size=4,
            max_prompt_tokens=16,
            max_completion_tokens=16,
            eos_ids=(5,),
        )
        assert engine.calls("decode", published_shapes(model))
        layer: Any = jax.eval_shape(
            lambda blocks, model=model: products_joined(by_layer(model, blocks)[0]),
            published_shapes(model).blocks,
        )
        assert layer.k is None


def float64_logprobs(
    a: Architecture, parameters: Any, tokens: np.ndarray, start: int
) -> np.ndarray:
    """Log-probs of tokens[start:], each after those before it, in NumPy alone: also of complex
    parameters."""

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + a.norm_eps) * weight

    def product(weight: Any, x: Any) -> Any:
        if isinstance(weight, Biased):
            return product(weight.kernel, x) + weight.bias
        if isinstance(weight, Adapted):
            return x @ weight.kernel + x @ weight.a @ weight.b * weight.scale
        return x @ weight

    def heads(x: Any, weight: Any) -> Any:
        x = x.reshape(len(tokens), -1, a.head_dim)
        x = x if weight is None else norm(x, weight)
        angle = np.arange(len(tokens))[:, None, None] * a.rope_theta ** -(
            np.arange(0, a.head_dim, 2) / a.head_dim
        )
        first, second = np.split(x, 2, -1)
        return np.concatenate(
            [
                first * np.cos(angle) - second * np.sin(angle),
                second * np.cos(angle) + first * np.sin(angle),
            ],
            -1,
        )

    x, mask = parameters.embed_tokens[tokens], np.tril(np.ones((len(tokens),) * 2, bool))
    for layer in range(a.num_layers):
        w = jax.tree.map(lambda leaf, layer=layer: leaf[layer], parameters.blocks)
        h, repeats = norm(x, w.attention_norm), a.num_heads // a.num_kv_heads
        q, k = heads(product(w.q, h), w.q_norm), heads(product(w.k, h), w.k_norm).repeat(repeats, 1)
        v = product(w.v, h).reshape(len(tokens), -1, a.head_dim).repeat(repeats, 1)
        scores = np.where(mask, np.exp(np.einsum("tha,sha->hts", q, k) / a.head_dim**0.5), 0)
        out = np.einsum("hts,sha->tha", scores / scores.sum(-1, keepdims=True), v)
        x = x + product(w.o, out.reshape(len(tokens), -1))
        h = norm(x, w.mlp_norm)
        gate = product(w.gate, h)
        x = x + product(w.down, gate / (1 + np.exp(-gate)) * product(w.up, h))
    head = parameters.embed_tokens.T if a.tie_embeddings else parameters.lm_head
    found = (norm(x, parameters.final_norm) @ head)[start - 1 : -1]
    return found[np.arange(len(found)), tokens[start:]] - np.log(np.exp(found).sum(-1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "a",
    [LLAMA2, replace(LLAMA2, num_kv_heads=2, qkv_bias=True), QWEN3],
    ids=["llama", "qwen2", "qwen3"],
)
def test_the_gradients_are_the_oracles(a):
    """The loss and its slope by log-probs are the oracle's, in float64; an imaginary step along A
    or B, through a model in NumPy, gives how log-probs change."""
    one = replace(adapted(a), num_layers=2)
    parameters = jax.tree.map(
        lambda leaf, spec: leaf * (0.3 if spec.trained else 1.0),
        random_parameters(one, scale=2.0),
        param_specs(one),
    )
    groups = random_groups(one, 3, 2, 8, 8)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parameters)
    rows = []
    for group in groups:
        for c in group.completions:
            rows.append((np.concatenate([group.prompt_ids, c.token_ids]), len(group.prompt_ids)))
    advantages = np.random.default_rng(5).standard_normal((3, 2))
    lps = [float64_logprobs(one, exact, *row) for row in rows]
    completions = []
    for lp, advantage in zip(lps, advantages.ravel(), strict=True):
        completions.append(oracle.Completion(lp, lp, lp, np.ones(len(lp), bool), advantage))
    slopes, count = oracle.gradients(oracle.Settings(), completions), sum(map(len, lps))
    (batch,) = pack(
        groups,
        range(3),
        TokenTerms(advantages, np.full((3, 2), 1 / count)),
        BatchLayout([whole(groups)], 1.0),
    )
    trainer = learner(one)
    total, _ = trainer.accumulate(None, trainer.init(parameters), batch.arrays)
    assert float(total.loss) == pytest.approx(oracle.loss(oracle.Settings(), completions), rel=1e-5)
    rng, leaves, structure = np.random.default_rng(6), *jax.tree.flatten(exact)
    trained = [spec.trained for spec in jax.tree.leaves(param_specs(one))]
    for found, number in zip(jax.tree.leaves(total.gradient), np.flatnonzero(trained), strict=True):
        for direction in rng.standard_normal((2, *found.shape)):
            moved = [*leaves]
            moved[number] = leaves[number] + 1j * oracle.STEP * direction
            tree = jax.tree.unflatten(structure, moved)
            wanted = sum(
                slope @ np.imag(float64_logprobs(one, tree, *row)) / oracle.STEP
                for slope, row in zip(slopes, rows, strict=True)
            )
            assert abs(np.sum(np.asarray(found) * direction) - wanted) < 1e-5 * np.linalg.norm(
                found
            )


def gradient_of(a: Architecture, parameters: Any, where: Any = None) -> Any:
    return loss_and_gradient(a, parameters, where)[1]


def loss_and_gradient(a: Architecture, parameters: Any, where: Any = None) -> tuple[float, Any]:
    one = learner(a, where=where)
    state = one.init(jax.device_put(parameters, shardings(a, one.model.role)))
    total, _ = one.accumulate(
        None, state, batches(random_groups(a, 4, 3, 12, 12), shards=one.model.role.row_shards)[0]
    )
    return float(total.loss), jax.device_get(total.gradient)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "rslora"), [(PLAINEST, True), (FULLEST, False)], ids=["plainest", "fullest"]
)
def test_the_gradients_are_those_of_the_merged_weights_by_the_chain_rule(a, rslora):
    """W' = W + scale A B, so dA = scale dW' B^T and dB = scale A^T dW'; dW' is full training's,
    held to the oracle."""
    one = adapted(a, Adapter(3, 6.0, PRODUCTS, rslora))
    # Of larger weights, whose attention is sharper, float32 gives fewer digits.
    parameters = jax.tree.map(
        lambda leaf, spec: leaf * (0.3 if spec.trained else 1.0),
        random_parameters(one, scale=2.0),
        param_specs(one),
    )
    found = gradient_of(one, parameters)
    whole = kernels(gradient_of(a, adapters.merge(one, parameters, ROLE)))
    for name, weight in kernels(parameters).items():
        scale, dense = 6.0 / (3**0.5 if rslora else 3), np.asarray(whole[name], np.float64)
        mine = kernels(found)[name]
        assert mine.kernel is None, "a frozen weight has no gradient"
        assert relative(mine.a, scale * dense @ np.asarray(weight.b).swapaxes(1, 2)) < 2e-5
        assert relative(mine.b, scale * np.asarray(weight.a).swapaxes(1, 2) @ dense) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "kind"), [((2, 2, 2), "int8"), ((1, 2, 2, 2), "")])
def test_eight_devices_have_one_devices_gradient(mesh, kind):
    a = adapted(replace(FULLEST, vocab_size=128, quantised=kind))
    parameters = random_parameters(replace(a, quantised=""))
    if kind:
        parameters = jax.tree.map(
            quantiser(a, ROLE), param_specs(replace(a, quantised="")), parameters
        )
    (loss, ours), (same, alone) = (
        loss_and_gradient(a, parameters, where) for where in (roles(*mesh), roles())
    )
    assert loss == pytest.approx(same, rel=1e-5)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(alone), strict=True):
        # Sums in another order: 1.07e-5 on some processors.
        assert np.abs(other).max() > 0 and relative(one, other) < 2e-5


@pytest.mark.slow
def test_an_update_changes_the_adapter_alone_and_has_moments_for_it_alone():
    a = adapted(FULLEST)
    one, parameters = learner(a, dtype=jnp.bfloat16), random_parameters(a)
    frozen = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16), select(frozen_specs(a), parameters)
    )
    state = one.init(
        with_adapter(a, without_adapter(a, frozen), select(trained_specs(a), parameters))
    )
    before, kept = by_path(state.trainable), checksum(state.frozen)
    total, _ = one.accumulate(None, state, batches(random_groups(a, 4, 3, 12, 12))[0])
    state, _ = one.apply(state, total)
    assert checksum(state.frozen) == kept
    for name, leaf in by_path(state.trainable).items():
        assert not np.array_equal(before[name], leaf)
    sizes = {leaf.shape for leaf in jax.tree.leaves(state.optimizer)} - {()}
    assert sizes == {spec.shape for spec in jax.tree.leaves(trained_specs(a))}
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state.trainable, total.gradient))} == {
        "float32"
    }
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), one.shapes()) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )


@pytest.mark.slow
def test_frozen_products_cost_one_pass_less():
    a, groups = FULLEST, [(10, [5, 7])]
    products = 2.0 * (
        sum(
            spec.shape[0] * spec.shape[1] * spec.shape[2]
            for spec in jax.tree.leaves(param_specs(a))
            if len(spec.shape) == 3
        )
        * 22
        + a.hidden_size * a.vocab_size * 12
    )
    assert model_flops(a, [], groups) - model_flops(adapted(a), [], groups) == products


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "files"])
def test_frozen_weights_are_published_once(kind, tmp_path):
    """Each version is the adapter alone, and whoever reads it has all weights."""
    a = adapted(FULLEST)
    model, parameters = learner(a).model, random_parameters(a)
    store = MemoryStore(model) if kind == "arrays" else FileStore(tmp_path, model)
    trained, kept = select(trained_specs(a), parameters), dict[str, Any]()
    store.put_frozen(select(frozen_specs(a), parameters))
    manifest: Any = None
    for version in range(3):
        now = jax.tree.map(lambda leaf, by=version: leaf + by, trained)
        manifest = store.put(version, now)
        read = manifest.read(model, kept).result()()
        assert same_bits(
            by_path(read), by_path(with_adapter(a, without_adapter(a, parameters), now))
        )
        assert same_bits(
            by_path(jax.tree.map(np.asarray, manifest.parameters(model))), by_path(now)
        )
    shapes = [leaf.shape for leaf in jax.tree.leaves(store.published_shapes())]
    assert shapes == [leaf.shape for leaf in jax.tree.leaves(trained)]
    if kind == "files":
        assert len(kept) == len(jax.tree.leaves(frozen_specs(a)))
        frozen, *versions = sorted(
            tmp_path.glob("*/*.safetensors"), key=lambda file: "frozen" not in file.name
        )
        assert frozen.name.startswith("frozen") and len(versions) == 3
        for one in versions:
            assert set(load_file(one)).isdisjoint(load_file(frozen))
        frozen.unlink()  # as if it were gone: hosts that have read it go on
        manifest.read(model, kept).result()()
        with pytest.raises(LookupError, match="what is frozen in all versions is not in"):
            manifest.read(model, {}).result()()
    store.close()
    assert len(jax.tree.leaves(published_shapes(model))) == len(jax.tree.leaves(parameters))


@pytest.mark.slow
def test_a_large_models_checkpoint_and_publication_are_of_the_adapter_alone():
    """By arithmetic on shapes: at most 3% and 2% of the whole model's."""
    a = MODELS["qwen2.5-1.5b"].architecture
    adapter, full = (
        learner(one, dtype=jnp.bfloat16) for one in (adapted(a, Adapter(16, 32.0, PRODUCTS)), a)
    )
    of_all, of_adapter = (checkpoint_bytes(one.shapes()) for one in (full, adapter))
    assert of_all > 18e9 and of_adapter < 0.03 * of_all
    assert num_bytes(full.model) > 3e9 and num_bytes(adapter.model) < 0.02 * num_bytes(full.model)
    assert num_bytes(adapter.model, trained=False) == num_bytes(full.model)


# ---- PEFT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers by an older name
@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3", "llama-linear", "qwen3_moe"])
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_reads_what_is_written_and_writes_what_is_read(tmp_path, family, rslora):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    package = pytest.importorskip("peft")
    folder = write_model(tmp_path / "base", family)
    base = resolve_model(ModelSection(path=str(folder))).architecture
    targets = ["q_proj", "down_proj", "o_proj"]
    if base.experts:
        targets = ["q_proj", "mlp.experts.gate_up_proj", "experts.down_proj"]
    a = replace(base, adapter=adapters.make_adapter(base, 4, 8.0, targets, rslora))
    parameters = with_adapter(
        a, huggingface.load(folder, base, ROLE), select(trained_specs(a), random_parameters(a))
    )
    peft.save(tmp_path / "adapter", select(trained_specs(a), parameters), a, str(folder), folder)
    tokens = np.arange(20) * 7 % base.vocab_size
    with jax.default_matmul_precision("highest"):
        ours = shoal_logits(a, parameters, tokens)
        plain, whole = (
            shoal_logits(base, one, tokens)
            for one in (without_adapter(a, parameters), adapters.merge(a, parameters, ROLE))
        )
    assert np.abs(ours - whole).max() < 1e-4 < 0.1 < np.abs(ours - plain).max()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = package.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    with torch.no_grad():
        assert np.abs(model(torch.tensor(tokens[None])).logits[0].numpy() - ours).max() < 1e-4
    model.save_pretrained(tmp_path / "again")
    for section in (
        ModelSection(path=str(folder), lora=LoraSection(path=str(tmp_path / "again"))),
        ModelSection(path=str(tmp_path / "again")),
    ):
        # on the base that is given, or that it names
        spec = resolve_model(section)
        assert spec.architecture == a
        assert same_bits(by_path(spec.load(ROLE, np.float32)), by_path(parameters))


# ---- mistakes


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"rank": 4, "targets": ("q_prj",)},
            "model.lora.targets=q_prj: no product of the model is called so; it has q_proj, "
            "k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, and all-linear for all of "
            "them, did you mean q_proj?",
        ),
        ({"rank": 33}, "model.lora.rank=33: expected 1 to 32, the smaller dimension of down_proj"),
        (
            {"rank": 4, "targets": (r".*layers\.0\.self_attn\.q_proj",)},
            "is a product in only some of the layers",
        ),
        (
            {"rank": 40, "targets": ("gate_proj",)},
            "expected 1 to 32, the smaller dimension of gate_proj",
        ),
    ],
)
def test_what_no_adapter_can_be_is_refused(base, changes, text):
    with pytest.raises(ShoalError) as error:
        resolve_model(ModelSection(path=str(base), lora=LoraSection(**changes)))
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (["all-linear"], PRODUCTS),
        (["self_attn.q_proj"], ("q_proj",)),
        ([r".*mlp\..*_proj"], PRODUCTS[4:]),
        (["v_proj", "q_proj"], ("q_proj", "v_proj")),
    ],
)
def test_targets_have_pefts_names_and_patterns(base, targets, names):
    assert adapters.make_adapter(architecture_of(base), 2, 4.0, targets, False).targets == names


DELTA_NET_PRODUCTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (["all-linear"], {*PRODUCTS, *DELTA_NET_PRODUCTS}),
        (["in_proj_qkv", "q_proj"], {"in_proj_qkv", "q_proj"}),
        (["linear_attn.out_proj"], {"out_proj"}),
        ([r".*(self|linear)_attn\..*"], {*PRODUCTS[:4], *DELTA_NET_PRODUCTS}),
        ([f"model.layers.{layer}.linear_attn.out_proj" for layer in (0, 1, 2)], {"out_proj"}),
        (["model.layers.3.self_attn.v_proj"], {"v_proj"}),
    ],
)
def test_a_target_covers_the_layers_that_have_the_product(targets, names):
    assert set(adapters.make_adapter(HYBRID, 2, 4.0, targets, False).targets) == names


@pytest.mark.parametrize(
    "targets",
    [
        [r"model\.language_model\..*\.(q|v)_proj"],
        [r"(.*?)language_model.*self_attn.*(q_proj|v_proj)"],
        [
            "language_model.model.layers.3.self_attn.q_proj",
            "model.language_model.layers.3.self_attn.v_proj",
        ],
    ],
)
def test_targets_may_have_the_names_of_a_class_for_several_kinds_of_input(targets):
    assert adapters.make_adapter(HYBRID, 2, 4.0, targets, False).targets == ("q_proj", "v_proj")


def test_a_target_of_towers_alone_is_left_out():
    towers = ["model.vision_tower.encoder.layers.0.self_attn.out_proj", "model.visual.blocks.0.qkv"]
    one = adapters.make_adapter(HYBRID, 2, 4.0, ["q_proj", "qkv"], False, towers)
    assert one.targets == ("q_proj",)
    with pytest.raises(ShoalError, match=r"targets=qkv: none of these is a product of the text"):
        adapters.make_adapter(HYBRID, 2, 4.0, ["qkv"], False, towers)


def test_of_layers_that_have_a_product_none_is_left_out():
    for target in ("model.layers.0.linear_attn.out_proj", r".*\.[13]\..*"):
        with pytest.raises(ShoalError, match="in only some of the layers that have it"):
            adapters.make_adapter(HYBRID, 2, 4.0, [target], False)
    with pytest.raises(ShoalError, match="no product of the model is called so; it has gate_proj"):
        adapters.make_adapter(HYBRID, 2, 4.0, ["conv1d"], False)


def test_products_of_one_number_a_head_do_not_bound_the_rank():
    """PEFT takes any rank: that of all products was at most the number of heads."""
    adapter = adapters.make_adapter(HYBRID, 16, 4.0, ["all-linear"], False)
    assert {"in_proj_a", "in_proj_b"} < set(adapter.targets)
    with pytest.raises(ShoalError, match="expected 1 to 16, the smaller dimension of k_proj"):
        adapters.make_adapter(HYBRID, 17, 4.0, ["all-linear"], False)
    with pytest.raises(ShoalError, match=r"model\.lora\.rank=0: expected at least 1"):
        adapters.make_adapter(HYBRID, 0, 4.0, ["in_proj_a"], False)


EXPERTS = list(EXPERT_PRODUCTS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3_5_text", []),
        ("gemma3_text", []),
        ("qwen3_5", []),
        ("gemma3", []),
        ("qwen3_5_moe", []),
        ("qwen3_5_moe", EXPERTS),
        ("gpt_oss", []),
        ("gpt_oss", EXPERTS),
        ("qwen3_moe", []),
        ("qwen3_moe", EXPERTS),
        ("mixtral", EXPERTS),
    ],
)
def test_an_adapter_on_several_kinds_of_layers_is_pefts(name, parameters, tmp_path):
    """PEFT's choice of all linear products, its names, and its files in both directions: logits are
    those of its model, in each class that transformers has for these files. That of a class for
    several kinds of input has an adapter on its tower, too."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("peft")
    from family_checkpoints import load_theirs, write_checkpoint
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = write_checkpoint(tmp_path / "base", name)
    base = architecture_of(folder)
    torch.manual_seed(3)
    modules: str | list[str] = "all-linear"
    if name in ("qwen3_moe", "mixtral"):
        # PEFT 0.21 takes their routers and experts, too, these at another rank.
        modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    theirs = get_peft_model(
        load_theirs(folder, name),
        LoraConfig(
            r=2,
            lora_alpha=2,
            target_modules=modules,
            target_parameters=parameters or None,
            init_lora_weights=False,
        ),
    )
    theirs.save_pretrained(str(tmp_path / "theirs"))
    ours = adapters.make_adapter(base, 2, 2.0, ["all-linear", *parameters], False)
    assert set(parameters) == set(ours.targets) & set(EXPERT_PRODUCTS)
    a = replace(base, adapter=ours)
    assert peft.read_adapter(tmp_path / "theirs", base) == ours
    loaded = joined(
        peft.load(tmp_path / "theirs", a, ROLE, jnp.float32),
        as_frozen(a, huggingface.load(folder, base, ROLE, jnp.float32)),
    )
    tokens = np.arange(1, 40, dtype=np.int32)

    def logits_of(model: Any) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor(tokens)[None]).logits[0].numpy()

    expected = logits_of(theirs)
    assert relative(shoal_logits(a, loaded, tokens), expected) < 1e-5
    assert relative(logits_of(load_theirs(folder, name)), expected) > 0.05
    is_multimodal = name in MULTIMODAL
    assert bool(peft.notes(tmp_path / "theirs")) == is_multimodal
    peft.save(
        tmp_path / "ours",
        select(trained_specs(a), loaded),
        a,
        str(folder),
        folder,
        is_multimodal=is_multimodal,
    )
    assert peft.read_adapter(tmp_path / "ours", base) == ours
    again = peft.load(tmp_path / "ours", a, ROLE, jnp.float32)
    assert same_bits(by_path(again), by_path(select(trained_specs(a), loaded)))
    causal = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    for model in (load_theirs(folder, name), causal):
        renamed = {}
        if is_multimodal and type(model).__name__.endswith("ForCausalLM"):
            renamed = {"model.language_model": "model"}  # as docs/lora.md says
        adapted_model = PeftModel.from_pretrained(
            model, str(tmp_path / "ours"), key_mapping=renamed or None
        )
        assert relative(logits_of(adapted_model), expected) < 1e-5


def test_targets_may_name_the_product_of_each_layer_in_full(base):
    """PEFT writes them so below 20 products."""
    a = architecture_of(base)
    full = []
    for layer in range(a.num_layers):
        for name in ("q_proj", "v_proj"):
            full.append(f"model.layers.{layer}.self_attn.{name}")
    assert adapters.make_adapter(a, 2, 4.0, full, False).targets == ("q_proj", "v_proj")
    mixed = [*full[::2], "mlp.up_proj"]
    assert adapters.make_adapter(a, 2, 4.0, mixed, False).targets == ("q_proj", "up_proj")
    for missing in (full[:-1], full[2:]):
        with pytest.raises(ShoalError, match="is a product in only some of the layers"):
            adapters.make_adapter(a, 2, 4.0, missing, False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"use_dora": True}, "has use_dora, which is not supported: expected plain LoRA"),
        ({"bias": "all"}, "has bias all, "),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save, "),
        ({"peft_type": "IA3"}, "has peft_type IA3, "),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights pissa, "),
        ({"r": None}, "r, lora_alpha or target_modules is wrong"),
        ({"r": 5}, "does not fit its adapter_config.json and the model: "),
        ({"base_model_name_or_path": "/no/such"}, "was trained on /no/such: There is no "),
        ({"base_model_name_or_path": None}, "does not name the model it belongs to"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_one_error(base, tmp_path, changes, text):
    a = adapted(architecture_of(base), Adapter(4, 8.0, ("q_proj",)))
    peft.save(tmp_path / "a", select(trained_specs(a), random_parameters(a)), a, str(base), base)
    file = tmp_path / "a" / peft.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ShoalError) as error:  # before weights are read
        resolve_model(ModelSection(path=str(tmp_path / "a")))
    assert text in str(error.value)


def test_a_name_is_compared_with_the_model_of_an_adapter(base, tmp_path):
    a = adapted(architecture_of(base))
    peft.save(tmp_path / "a", select(trained_specs(a), random_parameters(a)), a, str(base), base)
    for path in (base, tmp_path / "a"):
        with pytest.raises(ShoalError, match=r"model.name=llama3.1-8b is not the model at"):
            resolve_model(ModelSection(path=str(path), name="llama3.1-8b"))


def test_an_adapter_is_not_converted_as_if_it_were_a_model(base, tmp_path):
    a = adapted(architecture_of(base), Adapter(4, 8.0, ("q_proj",)))
    peft.save(tmp_path / "a", select(trained_specs(a), random_parameters(a)), a, str(base), base)
    with pytest.raises(
        ShoalError, match=r"is an adapter on .*: write a whole model of it .* merge=true"
    ):
        open_source(str(tmp_path / "a"))


@pytest.mark.slow
def test_the_gated_product_of_tpus_has_the_gradients_of_the_plain_one():
    """With a frozen weight of integers, which has no gradient."""
    rng, model = np.random.default_rng(0), learner(PLAINEST).model
    down = quantise(jnp.asarray(rng.standard_normal((64, 32)), jnp.float32), "int8")
    shapes = ((2, 5, 64), (2, 5, 64), (64, 3), (3, 32))
    inputs = []
    for shape in shapes:
        inputs.append(jnp.asarray(rng.standard_normal(shape), jnp.float32))

    def fused(gate: Any, up: Any, a: Any, b: Any) -> Any:
        return jnp.square(gated_product(model, gate, up, Adapted(down, a, b, 2.0))).sum()

    def plain(gate: Any, up: Any, a: Any, b: Any) -> Any:
        return jnp.square(linear(Adapted(down, a, b, 2.0), jax.nn.silu(gate) * up)).sum()

    ours, theirs = (jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*inputs) for loss in (fused, plain))
    assert max(map(relative, ours, theirs)) < 1e-6


def test_an_adapter_of_another_model_is_one_error(base, tmp_path):
    a = adapted(architecture_of(base), Adapter(4, 8.0, ("q_proj",)))
    peft.save(tmp_path / "a", select(trained_specs(a), random_parameters(a)), a, str(base), base)
    wider = write_model(tmp_path / "wider", "qwen3", hidden_size=64)
    section = ModelSection(path=str(wider), lora=LoraSection(path=str(tmp_path / "a")))
    with pytest.raises(
        ShoalError,
        match=r"lora_A.weight is \[4, 32\], here \[4, 64\] \(\d+ tensors in all\); give "
        r"the model that it was trained on",
    ) as error:
        resolve_model(section)
    assert len(str(error.value).replace(str(tmp_path), "")) < 400
    deeper = write_model(tmp_path / "deeper", "qwen3", num_hidden_layers=9)
    with pytest.raises(
        ShoalError, match=r"the model has model.layers.2.self_attn.q_proj.lora_A.weight, it has not"
    ):
        resolve_model(ModelSection(path=str(deeper), lora=section.lora))
    shallow = write_model(tmp_path / "shallow", "qwen3", num_hidden_layers=1)
    with pytest.raises(
        ShoalError, match=r"it has model.layers.1.self_attn.q_proj.lora_A.weight, the model has not"
    ):
        resolve_model(ModelSection(path=str(shallow), lora=section.lora))
    with pytest.raises(
        ShoalError, match=r"model.lora.rank=8: the adapter in .* has rank 4; leave it out"
    ):
        resolve_model(
            ModelSection(path=str(base), lora=LoraSection(path=str(tmp_path / "a"), rank=8))
        )
    with pytest.raises(ShoalError, match=r"is not an adapter: it holds no adapter_config.json"):
        resolve_model(ModelSection(path=str(base), lora=LoraSection(path=str(wider))))
    with pytest.raises(ShoalError, match=r"already has an adapter on "):
        resolve_model(ModelSection(path=str(tmp_path / "a"), lora=LoraSection(rank=2)))
    weights = tmp_path / "a" / peft.WEIGHTS
    save_file(
        {name: tensor for name, tensor in load_file(weights).items() if "layers.1" not in name},
        weights,
    )
    with pytest.raises(
        ShoalError, match=r"the model has model.layers.1.self_attn.q_proj.lora_A.weight, it has not"
    ):
        resolve_model(ModelSection(path=str(tmp_path / "a")))
    weights.unlink()
    with pytest.raises(ShoalError, match=r"holds no adapter_model.safetensors"):
        resolve_model(ModelSection(path=str(tmp_path / "a")))


# ---- quantised bases


def widened(a: Architecture, parameters: Any) -> Any:
    """The parameters of the architecture whose kernels are not quantised, of the same values."""

    def widen(weight: Any) -> Any:
        if not isinstance(weight, Quantised):
            return weight
        return weight.values.astype(jnp.float32) * weight.scale[..., None, :]

    def is_leaf(weight):
        return isinstance(weight, Quantised)

    wide = jax.tree.map(widen, parameters, is_leaf=is_leaf)
    return jax.tree.unflatten(
        jax.tree.structure(param_specs(replace(a, quantised=""))), jax.tree.leaves(wide)
    )


def quantised(family: str, folder: Path, kind: Any) -> tuple[Architecture, Any]:
    """A quantised model with a random adapter, as it is loaded."""
    write_model(folder, family)
    section = ModelSection(path=str(folder), quantise=kind, lora=LoraSection(rank=3))
    spec = resolve_model(section)
    a, parameters = spec.architecture, spec.load(ROLE, np.float32)
    noise = jax.tree.map(lambda leaf: 0.1 * leaf, select(trained_specs(a), random_parameters(a)))
    return a, with_adapter(a, without_adapter(a, parameters), noise)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [("llama-linear", "int8"), ("qwen3-tied", "fp8")])
def test_a_quantised_base_computes_as_its_widened_values(tmp_path, family, kind):
    a, parameters = quantised(family, tmp_path / "model", kind)
    wide = replace(a, quantised="")
    plain = huggingface.load(tmp_path / "model", replace(a.base, quantised=""), ROLE)
    same = widened(a, parameters)
    tokens = np.arange(20) * 7 % a.vocab_size
    ours, theirs = shoal_logits(a, parameters, tokens), shoal_logits(wide, same, tokens)
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()
    (loss, gradient), (other_loss, other) = (
        loss_and_gradient(a, parameters),
        loss_and_gradient(wide, same),
    )
    assert loss == pytest.approx(other_loss, rel=1e-5)
    assert max(map(relative, jax.tree.leaves(gradient), jax.tree.leaves(other))) < 1e-5
    kept = without_adapter(wide, same)
    for one, before in zip(jax.tree.leaves(kept), jax.tree.leaves(plain), strict=True):
        if before.ndim < 3:
            assert np.array_equal(one, before)
        else:  # half a step of int8; of fp8, 3 bits after the first
            most = np.abs(before).max(axis=1, keepdims=True)
            if kind == "int8":
                bound = most / 127 * 0.51
            else:
                bound = np.maximum(np.abs(before) / 15.5, most / 448)
            assert (np.abs(one - before) <= bound).all() and np.abs(one - before).max() > 0
    scales = []
    for weight in jax.tree.leaves(parameters, is_leaf=lambda one: isinstance(one, Quantised)):
        if isinstance(weight, Quantised):
            scales.append(weight.scale)
    assert len(scales) == 7 and all(
        np.array_equal(scale, scale.astype(jnp.bfloat16)) for scale in scales
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "files"])
def test_quantised_weights_are_published_as_they_are(kind, tmp_path):
    a, parameters = quantised("qwen3", tmp_path / "model", "int8")
    model = Model(a, ROLE, jnp.bfloat16)
    frozen = jax.tree.map(
        lambda leaf: (
            leaf if leaf.dtype == jnp.int8 or leaf.ndim == 2 else leaf.astype(jnp.bfloat16)
        ),
        select(frozen_specs(a), parameters),
    )
    store = MemoryStore(model) if kind == "arrays" else FileStore(tmp_path, model)
    store.put_frozen(frozen)
    read = store.put(0, select(trained_specs(a), parameters)).read(model, {}).result()()
    for leaf, shape in zip(
        jax.tree.leaves(read), jax.tree.leaves(published_shapes(model)), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
    assert {"int8", "bfloat16", "float32"} == {leaf.dtype.name for leaf in jax.tree.leaves(read)}
    assert same_bits(
        by_path([leaf for leaf in jax.tree.leaves(read) if leaf.dtype == jnp.int8]),
        by_path([leaf for leaf in jax.tree.leaves(parameters) if leaf.dtype == jnp.int8]),
    )
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "kind"), [(None, "int8"), (RANK3, "float8_e4m3fn")])
def test_a_sampler_in_8_bits_has_the_trainers_weights_to_the_nearest(adapter, kind, tmp_path):
    a = replace(FULLEST, adapter=adapter)
    trainer, parameters = Model(a, ROLE, sampler_type=kind), random_parameters(a)
    model, frozen = trainer.on(replace(ROLE, name="sampler")), select(frozen_specs(a), parameters)
    read = []
    for store in (MemoryStore(model), FileStore(tmp_path, model)):
        if adapter:
            store.put_frozen(frozen)
        first = store.put(0, select(trained_specs(a), parameters))
        # What a checkpoint stores of an older version is published again as it was.
        stored = jax.tree.map(
            lambda leaf, shape: jnp.asarray(np.asarray(leaf), shape.dtype),
            first.parameters(model),
            store.published_shapes(),
        )
        read += [version.read(model, {}).result()() for version in (first, store.put(1, stored))]
        store.close()
    wanted = jax.tree.leaves(published_shapes(model))
    for one in read:
        assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(one)] == [
            (s.shape, s.dtype) for s in wanted
        ]
        assert same_bits(by_path(jax.tree.leaves(one)), by_path(jax.tree.leaves(read[0])))
    sent = {}
    for name, values, _ in to_host(model, named_leaves(model, parameters)):
        sent[name] = values.dtype
    # as Ray's objects
    assert sent == {name: published_dtype(model, spec) for name, spec in named_specs(model).items()}
    before, after = parameters.blocks.down, read[0].blocks.down
    if adapter:
        before, after = before.kernel, after.kernel
    assert same_bits(
        by_path(jax.tree.leaves(after)), by_path(jax.tree.leaves(quantise(before, kind)))
    )
    # what a plan counts
    copies = copied_shapes(
        param_shapes(param_specs(a), ROLE, jnp.float32),
        param_specs(a),
        model.role,
        jnp.float32,
        model.architecture,
    )
    small = []
    for one in jax.tree.leaves(read[0], is_leaf=lambda one: isinstance(one, Quantised)):
        if isinstance(one, Quantised):
            small.append(one)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(small)) == bytes_per_device(
        [own for _, own in copies]
    )


def test_what_cannot_be_quantised_is_refused(base):
    section = ModelSection(path=str(base), quantise="int8")
    with pytest.raises(
        ShoalError, match=r"model.quantise=int8: expected none, or model.lora.rank=16 with it"
    ):
        trained_model(Config(model=section), resolve_model(section), roles())
    with pytest.raises(ShoalError, match=r"expected none with model.dtype=float16"):
        ModelSection(quantise="fp8", dtype="float16")


@pytest.mark.slow
def test_an_adapter_keeps_no_products_for_the_backward_pass():
    """With model.remat=dots; they were 1.8 times what the table of memory knows."""

    def kept(a: Architecture) -> int:
        one, batch = learner(a), batches(random_groups(a, 4, 3, 12, 12))[0]
        parameters = jax.eval_shape(
            lambda: jax.tree.map(lambda d: jnp.zeros(d.shape), param_specs(a))
        )
        trained = select(trained_specs(a), parameters)

        def loss(trained: Any) -> Any:
            if a.adapter:
                frozen = jax.tree.map(lambda d: jnp.zeros(d.shape), frozen_specs(a))
            else:
                frozen = None
            return batch_loss(one.model, one.objective, joined(trained, frozen), batch)[0]

        shapes = jax.eval_shape(lambda tree: jax.vjp(loss, tree)[1], trained)
        tokens = batch.tokens.size
        return sum(
            leaf.size
            for leaf in jax.tree.leaves(shapes)
            if leaf.ndim > 2
            and tokens in (leaf.shape[-2], leaf.size // leaf.shape[0] // leaf.shape[-1])
        )

    assert kept(adapted(PLAINEST)) <= kept(PLAINEST)


@pytest.mark.slow
def test_the_backward_pass_computes_only_the_narrow_products_again():
    """With model.remat=dots, read from the compiled update of one layer's loop. The change of each
    product was computed twice, and A's gradient as [in, rank], which takes four times as long on
    CPU."""
    rank = 5  # as no other dimension
    a = replace(PLAINEST, adapter=Adapter(rank, 8.0, PRODUCTS))
    one = learner(a)
    batch = put_batch(one.model, batches(random_groups(a, 4, 3, 12, 12))[0])
    state = one.shapes()
    programs: dict[str, Any] = one.programs
    text = (
        programs["accumulate"]
        .compile(programs["zero"].eval_shape(), state.trainable, state.frozen, batch)
        .as_text()
    )
    rows = batch.tokens.size
    shapes = dict(re.findall(r"%([\w.-]+) = f32\[([\d,]+)\]", text))
    dots = []
    for out, *names in re.findall(r" = f32\[([\d,]+)\]\S* dot\(%([\w.-]+), %([\w.-]+)\)", text):
        dots.append((out, *(shapes[name] for name in names)))
    wide = []
    for out, left, _ in dots:
        if left == f"{rows},{rank}" and out.startswith(f"{rows},"):
            wide.append(out)
    assert len(wide) == 14  # forward by B, backward by A
    # forward, again, backward by B
    assert len([out for out, *_ in dots if out == f"{rows},{rank}"]) == 21
    assert not [
        out for out, *_ in dots if out.endswith(f",{rank}") and not out.startswith(f"{rows},")
    ]
    assert len([out for out, *_ in dots if out.startswith(f"{rank},")]) == 14


@pytest.mark.slow
def test_fsdp_gathers_the_stored_bytes():
    """Read from the compiled update: all-gathers of weights move int8, never the widened kernel."""
    where = roles(1, 8, 1)
    a = replace(FULLEST, adapter=RANK3, quantised="int8", intermediate_size=112)
    one = learner(a, where=where, dtype=jnp.bfloat16)
    groups = random_groups(a, 8, 3, 12, 12)
    batch = put_batch(one.model, batches(groups, shards=8)[0])
    state = one.shapes()
    programs: dict[str, Any] = one.programs
    compiled = programs["accumulate"].compile(
        programs["zero"].eval_shape(), state.trainable, state.frozen, batch
    )
    text = compiled.as_text()
    kernel = f"{a.hidden_size},{a.intermediate_size}]"
    gathers = [line for line in text.splitlines() if "all-gather(" in line]
    moved = [line.split("all-gather(")[0] for line in gathers]
    assert any("s8[" in line and kernel in line for line in moved)
    assert not any("s8[" not in line and kernel in line for line in moved)


@pytest.mark.slow
def test_the_gradient_of_logits_converts_no_frozen_weight_to_float32():
    kernel, x = jnp.ones((48, 80), jnp.bfloat16), jnp.ones((2, 48), jnp.bfloat16)
    gradient = jax.grad(lambda x: linear(kernel, x, jnp.float32).sum())
    assert "f32[48,80]" not in str(jax.make_jaxpr(gradient)(x)) and float(gradient(x)[0, 0]) == 80.0
