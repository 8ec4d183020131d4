"""MaxText checkpoints: read as its sources lay them out, written so, and back; what does not fit is
refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file
from small import HYBRID, shoal_logits
from tiny_models import save_tensors, write_model, write_model_with_tokenizer
from tiny_runs import by_path, same_bits

from shoal import cli
from shoal.checks.inputs import check_tokenizer
from shoal.commands.convert import convert
from shoal.commands.export import export
from shoal.config.commands import ConvertConfig, ExportConfig
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import ModelSection
from shoal.findings import Findings
from shoal.mesh import make_roles
from shoal.model import published
from shoal.model.config_writer import config_of
from shoal.model.families import architecture_of
from shoal.model.parameters import ParamSpec, param_specs, shardings
from shoal.model.published import MODELS, NamedModel, model_named
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.weights import huggingface, maxtext
from shoal.weights.source import copy_model_files, open_model, resolve_model

ROLE = make_roles(MeshSection(), jax.devices()[:1]).trainer
ODD = {
    "hidden_size": 24,
    "intermediate_size": 52,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "num_hidden_layers": 3,
}


def folder_of(folder: Path, family: str = "llama3", style: str = "llama3", **changes: Any) -> Path:
    """A model with its tokenizer, in Hugging Face's format."""
    return write_model_with_tokenizer(folder, family, style, **changes)


def maxtext_tree(folder: Path, pairs: bool, scan_layers: bool) -> dict[str, Any]:
    """The weights of a folder in the tree of MaxText, by MaxText's own steps in NumPy:
    reshape_kernel, adjust_rope, scale_query_layer of checkpoint_conversion/utils/param_mapping.py,
    layers stacked on axis 1. Llama and Qwen."""
    config = json.loads((folder / "config.json").read_text())
    d = config["hidden_size"]
    heads = config["num_attention_heads"]
    keys = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or d // heads
    weights = load_file(folder / "model.safetensors")

    def rope(kernel: np.ndarray) -> np.ndarray:
        first, second = kernel[..., : head_dim // 2], kernel[..., head_dim // 2 :]
        return np.stack([first, second], axis=-1).reshape(kernel.shape) if pairs else kernel

    def layer(number: int) -> dict[str, Any]:
        def get(name: str) -> np.ndarray:
            return weights[f"model.layers.{number}.{name}.weight"]

        query = rope(get("self_attn.q_proj").transpose().reshape(d, heads, head_dim))
        if config["model_type"] == "llama":
            query = query * np.float32(1 / np.sqrt(head_dim))
        attention: dict[str, Any] = {
            "query": {"kernel": query},
            "key": {"kernel": rope(get("self_attn.k_proj").transpose().reshape(d, keys, head_dim))},
            "value": {"kernel": get("self_attn.v_proj").transpose().reshape(d, keys, head_dim)},
            "out": {"kernel": get("self_attn.o_proj").transpose().reshape(heads, head_dim, d)},
        }
        if config["model_type"] == "qwen2":
            for ours, theirs, count in (
                ("query", "q", heads),
                ("key", "k", keys),
                ("value", "v", keys),
            ):
                bias = weights[f"model.layers.{number}.self_attn.{theirs}_proj.bias"]
                attention[ours]["bias"] = bias.reshape(count, head_dim)
        if config["model_type"] == "qwen3":
            attention["query_norm"] = {"scale": get("self_attn.q_norm")}
            attention["key_norm"] = {"scale": get("self_attn.k_norm")}
        return {
            "pre_self_attention_layer_norm": {"scale": get("input_layernorm")},
            "self_attention": attention,
            "post_self_attention_layer_norm": {"scale": get("post_attention_layernorm")},
            "mlp": {
                "wi_0": {"kernel": get("mlp.gate_proj").transpose()},
                "wi_1": {"kernel": get("mlp.up_proj").transpose()},
                "wo": {"kernel": get("mlp.down_proj").transpose()},
            },
        }

    layers = [layer(number) for number in range(config["num_hidden_layers"])]
    decoder: dict[str, Any] = {"decoder_norm": {"scale": weights["model.norm.weight"]}}
    if "lm_head.weight" in weights:
        decoder["logits_dense"] = {"kernel": weights["lm_head.weight"].transpose()}
    if scan_layers:
        decoder["layers"] = jax.tree.map(lambda *parts: np.stack(parts, axis=1), *layers)
    else:
        decoder |= {f"layers_{number}": part for number, part in enumerate(layers)}
    return {
        "token_embedder": {"embedding": weights["model.embed_tokens.weight"]},
        "decoder": decoder,
    }


def save_maxtext(base: Path, tree: dict[str, Any], trained: bool = False) -> Path:
    """Saved as MaxText saves: a manager's step 0, item `items`, `params/params`; of a training run
    with the optimizer's moments. Returns `.../0/items`."""
    state: dict[str, Any] = {"step": 0, "params": {"params": tree}, "opt_state": {}}
    if trained:
        ones = jax.tree.map(np.ones_like, tree)
        state |= {
            "step": 7,
            "opt_state": [{"count": 7, "mu": {"params": ones}, "nu": {"params": ones}}],
        }
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    with ocp.CheckpointManager(
        base.absolute(), item_names=("items",), item_handlers={"items": handler}
    ) as manager:
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))
    return base / "0" / "items"


def arrays_of(items: Path) -> dict[str, np.ndarray]:
    """What Orbax itself reads, by name under params/params."""
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.restore(items.absolute())
    assert set(tree) == {"step", "params", "opt_state"} and tree["step"] == 0
    result = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree["params"]["params"]):
        result["/".join(key.key for key in path)] = leaf
    return result


def flat(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    result = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        result["/".join(key.key for key in path)] = leaf
    return result


def load(section: ModelSection, role=ROLE) -> Any:
    return resolve_model(section).load(role, np.float32)


def maxtext_logits(
    tree: dict[str, Any], config: dict[str, Any], pairs: bool, tokens: np.ndarray
) -> np.ndarray:
    """float64[T, V] as MaxText's layers compute them: normalizations.RMSNorm, attention that does
    not scale, embeddings.LLaMARotaryEmbedding (pairs, stretched) or RotaryEmbedding (halves), a
    gated feed-forward part."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    exponents = 2 * np.arange(head_dim // 2) / head_dim
    scales = config.get("rope_theta", 10000.0) ** exponents
    if stretched := config.get("rope_scaling"):
        old, factor = stretched["original_max_position_embeddings"], stretched["factor"]
        low = stretched["low_freq_factor"]
        high = stretched["high_freq_factor"]
        waves = 2 * np.pi * scales
        smooth = (old / waves - low) / (high - low)
        middle = 1 / ((1 - smooth) / scales / factor + smooth / scales)
        scales = np.where(
            waves < old / high, scales, np.where(waves > old / low, scales * factor, middle)
        )

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale

    def rotate(x: np.ndarray) -> np.ndarray:
        angles = np.arange(len(x))[:, None, None] / scales
        a, b = (x[..., ::2], x[..., 1::2]) if pairs else np.split(x, 2, axis=-1)
        turned = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
        return np.stack(turned, -1).reshape(x.shape) if pairs else np.concatenate(turned, -1)

    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
    x, decoder = tree["token_embedder"]["embedding"][tokens], tree["decoder"]
    for number in range(config["num_hidden_layers"]):
        layer = jax.tree.map(lambda leaf: leaf[:, number], decoder["layers"])  # noqa: B023
        attention = layer["self_attention"]
        h = norm(x, layer["pre_self_attention_layer_norm"]["scale"])
        q, k, v = (
            np.einsum("td,dha->tha", h, attention[name]["kernel"])
            for name in ("query", "key", "value")
        )
        groups = q.shape[1] // k.shape[1]
        k, v = (np.repeat(part, groups, axis=1) for part in (rotate(k), v))
        scores = np.einsum("tha,sha->hts", rotate(q), k)
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hts,sha->tha", weights / weights.sum(-1, keepdims=True), v)
        x = x + np.einsum("tha,had->td", mixed, attention["out"]["kernel"])
        h = norm(x, layer["post_self_attention_layer_norm"]["scale"])
        gate, up = h @ layer["mlp"]["wi_0"]["kernel"], h @ layer["mlp"]["wi_1"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["wo"]["kernel"]
    x = norm(x, decoder["decoder_norm"]["scale"])
    tied = "logits_dense" not in decoder
    return x @ (
        tree["token_embedder"]["embedding"].T if tied else decoder["logits_dense"]["kernel"]
    )


def logits_of(section: ModelSection, tokens: np.ndarray) -> np.ndarray:
    found = resolve_model(section)
    with jax.default_matmul_precision("highest"):
        return shoal_logits(found.architecture, found.load(ROLE, np.float32), tokens)


# Reading


TOKENS = np.array([3, 17, 42, 5, 9, 33, 60, 2, 2, 51, 7, 28])
MODELS_READ = {
    "tied, grouped, pairs": ("llama3", True, {}),
    "untied, odd, pairs": ("llama3", True, {**ODD, "tie_word_embeddings": False}),
    "halves": ("llama2", False, ODD),
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "pairs", "changes"), MODELS_READ.values(), ids=MODELS_READ)
@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unscanned"])
def test_a_tree_laid_out_as_maxtext_does_has_the_logits_of_its_model(
    tmp_path, family, pairs, changes, scan_layers
):
    folder = folder_of(tmp_path / "hf", family, "llama3", **changes)
    config = json.loads((folder / "config.json").read_text())
    items = save_maxtext(tmp_path / "m", maxtext_tree(folder, pairs, scan_layers))
    section = ModelSection(path=str(items), tokenizer=str(folder), scan_layers=scan_layers)
    read, wanted = logits_of(section, TOKENS), logits_of(ModelSection(path=str(folder)), TOKENS)
    np.testing.assert_allclose(read, wanted, atol=2e-5)
    theirs = maxtext_logits(maxtext_tree(folder, pairs, True), config, pairs, TOKENS)
    np.testing.assert_allclose(read, theirs, atol=1e-4)
    wrong = maxtext_logits(maxtext_tree(folder, not pairs, True), config, pairs, TOKENS)
    # the order of rotary dimensions matters to these logits
    assert np.abs(read - wrong).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3-tied"])
def test_qwen_is_read_too(tmp_path, family):
    """Biases as [heads, width], norms of queries and keys, queries that are not scaled."""
    folder = folder_of(tmp_path / "hf", family, "chatml", num_hidden_layers=3)
    for scan_layers in (True, False):
        items = save_maxtext(tmp_path / f"m{scan_layers}", maxtext_tree(folder, False, scan_layers))
        section = ModelSection(path=str(items), tokenizer=str(folder), scan_layers=scan_layers)
        assert same_bits(by_path(load(section)), by_path(load(ModelSection(path=str(folder)))))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 4, 2), (2, 2, 2)])
@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unscanned"])
def test_each_device_gets_its_part(tmp_path, mesh, scan_layers):
    folder = folder_of(tmp_path / "hf")
    items = save_maxtext(tmp_path / "m", maxtext_tree(folder, True, scan_layers), trained=True)
    section = ModelSection(path=str(items), tokenizer=str(folder), scan_layers=scan_layers)
    role = make_roles(MeshSection(*mesh)).trainer
    read = load(section, role)
    assert same_bits(by_path(read), by_path(load(section)))
    for leaf, wanted in zip(
        jax.tree.leaves(read),
        jax.tree.leaves(shardings(architecture_of(folder), role)),
        strict=True,
    ):
        assert leaf.sharding == wanted


def test_a_type_is_read_as_it_is_wanted(tmp_path):
    folder = folder_of(tmp_path / "hf")
    tree = jax.tree.map(
        lambda leaf: leaf.astype(jax.numpy.bfloat16), maxtext_tree(folder, True, True)
    )
    section = ModelSection(path=str(save_maxtext(tmp_path / "m", tree)), tokenizer=str(folder))
    found = resolve_model(section)
    in_bfloat16, in_float32 = (
        found.load(ROLE, np.dtype(dtype)) for dtype in (jax.numpy.bfloat16, np.float32)
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(in_bfloat16)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(in_float32)} == {"float32"}
    np.testing.assert_array_equal(
        in_float32.blocks.down.astype(jax.numpy.bfloat16), in_bfloat16.blocks.down
    )


# There and back


def run_convert(**keys: Any) -> dict[str, Any]:
    texts: dict[str, Any] = {}
    for key, value in keys.items():
        texts[key] = value if isinstance(value, bool) else str(value)
    return convert(ConvertConfig(**texts), Console())


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unscanned"])
@pytest.mark.parametrize(
    ("family", "pairs", "changes"),
    [
        ("llama3", True, {"head_dim": 16}),
        ("llama2", False, {"head_dim": 4, "num_hidden_layers": 3}),
        ("qwen3", False, {}),
        ("qwen2-tied", False, {}),
    ],
    ids=["llama3", "llama2", "qwen3", "qwen2"],
)
def test_there_and_back_is_the_same_to_the_bit(tmp_path, family, pairs, changes, scan_layers):
    """sqrt(A) is a power of two in these; see below for others. What is written is what MaxText's
    own steps give."""
    folder = folder_of(tmp_path / "hf", family, "llama3", **changes)
    items, back = tmp_path / "m" / "0" / "items", tmp_path / "back"
    run_convert(source=folder, base_output_directory=tmp_path / "m", scan_layers=scan_layers)
    written, wanted = arrays_of(items), flat(maxtext_tree(folder, pairs, scan_layers))
    assert {name: leaf.shape for name, leaf in written.items()} == {
        name: leaf.shape for name, leaf in wanted.items()
    }
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(written[name], leaf, err_msg=name)
    run_convert(
        source=items, to=back, format="huggingface", tokenizer=folder, scan_layers=scan_layers
    )
    before, after = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)
    assert (back / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert architecture_of(back) == architecture_of(folder)


def test_a_head_of_a_tied_model_that_is_not_its_embedding_goes_there_and_back(tmp_path):
    folder = write_model_with_tokenizer(tmp_path / "model", "qwen3-tied")
    named = dict(load_file(folder / "model.safetensors"))
    head = named["model.embed_tokens.weight"][::-1].copy()
    save_tensors(folder / "model.safetensors", {**named, "lm_head.weight": head})
    run_convert(source=folder, base_output_directory=tmp_path / "m")
    run_convert(
        source=tmp_path / "m" / "0" / "items",
        to=tmp_path / "back",
        format="huggingface",
        tokenizer=folder,
    )
    np.testing.assert_array_equal(
        load_file(tmp_path / "back" / "model.safetensors")["lm_head.weight"], head
    )
    assert (
        json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is False
    )


@pytest.mark.slow
def test_queries_scaled_by_a_root_that_is_no_power_of_two_come_back_to_the_last_bits(
    tmp_path, capsys
):
    """Not every float32 is some float32 times sqrt(8); values that came from bfloat16 are
    themselves again."""
    folder = folder_of(tmp_path / "hf", "llama3", head_dim=8)
    weights = load_file(folder / "model.safetensors")
    run_convert(source=folder, to=tmp_path / "items", tokenizer=folder)
    assert (
        f"warning: tokenizer={folder} is not used: MaxText's layout holds no tokenizer"
        in capsys.readouterr().out
    )
    run_convert(
        source=tmp_path / "items", to=tmp_path / "back", format="huggingface", tokenizer=folder
    )
    assert "is not used" not in capsys.readouterr().out
    after = load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in weights.items():
        if "q_proj" in name:
            np.testing.assert_array_max_ulp(after[name], tensor, maxulp=2)
        else:
            np.testing.assert_array_equal(after[name], tensor)
    write_model(tmp_path / "short", "llama3", dtype=jax.numpy.bfloat16, vocab_size=270)
    run_convert(source=tmp_path / "short", to=tmp_path / "short_items")
    run_convert(
        source=tmp_path / "short_items",
        to=tmp_path / "short_back",
        format="huggingface",
        tokenizer=tmp_path / "short",
        dtype="bfloat16",
    )
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("short", "short_back")
    )
    for name, tensor in before.items():
        assert np.array_equal(after[name], tensor)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "head_dim", "warned"),
    [("llama3", 8, True), ("llama3", 16, False), ("qwen3", 8, False)],
)
def test_bfloat16_that_does_not_come_back_is_warned_of(tmp_path, capsys, family, head_dim, warned):
    folder = write_model(
        tmp_path / "hf", family, dtype=jax.numpy.bfloat16, vocab_size=270, head_dim=head_dim
    )
    run_convert(source=folder, to=tmp_path / "items", dtype="bfloat16")
    line = (
        f"divided by the square root of head_dim={head_dim}, which rounds them once more; "
        "dtype=float32 keeps"
    )
    out = " ".join(capsys.readouterr().out.split())
    assert (line in out) == warned
    run_convert(
        source=tmp_path / "items",
        to=tmp_path / "back",
        format="huggingface",
        tokenizer=folder,
        dtype="bfloat16",
    )
    before, after = (
        load_file(place / "model.safetensors") for place in (folder, tmp_path / "back")
    )
    changed = {
        name.split(".")[-2]
        for name, tensor in before.items()
        if not np.array_equal(after[name], tensor)
    }
    assert changed == ({"q_proj"} if warned else set())
    assert "divided" not in capsys.readouterr().out


@pytest.mark.slow
def test_what_is_large_is_written_a_piece_at_a_time(tmp_path, monkeypatch):
    from shoal.commands.convert import open_source
    from shoal.weights import orbax

    folder = folder_of(tmp_path / "hf", num_hidden_layers=3, tie_word_embeddings=False)
    a, read = open_source(str(folder))
    asked: list[tuple[str, slice]] = []

    def counted(spec: ParamSpec, index: tuple[slice, ...]) -> np.ndarray:
        asked.append((spec.name.split(".")[-2], index[0]))
        return read(spec, index)

    arrays = maxtext.arrays_to_write(
        counted, maxtext.arrays_of(a, True, True), np.dtype(np.float32)
    )
    sizes: list[int] = []
    (tmp_path / "m").mkdir()
    monkeypatch.setattr(orbax, "CHUNK_BYTES", 7000)  # a layer's largest tensor has 6144
    maxtext.write_tree(tmp_path / "m", tmp_path / "m", arrays, {}, sizes.append)
    assert [layers for name, layers in asked if name == "down_proj"] == [
        slice(n, n + 1) for n in range(3)
    ]
    assert len([name for name, _ in asked if name == "embed_tokens"]) > 4
    assert sum(sizes) == sum(array.nbytes for array in arrays.values())
    assert max(sizes) <= 7000
    found = arrays_of(tmp_path / "m" / "0" / "items")
    wanted = flat(maxtext_tree(folder, True, True))
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert np.array_equal(found[name], leaf)


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unscanned"])
def test_large_models_pass_in_parts(tmp_path, monkeypatch, scan_layers):
    """To two devices, and back to files: no part is larger than a window, or a piece of the file
    with whole heads."""
    from shoal.weights import layout as weight_layout
    from shoal.weights import orbax

    sizes: list[int] = []
    plain_read = orbax.StoredArray.read

    def counted(array: Any, part: tuple[slice, ...]) -> np.ndarray:
        values = plain_read(array, part)
        sizes.append(values.nbytes)
        return values

    folder = folder_of(tmp_path / "hf", tie_word_embeddings=False, head_dim=16)
    section = ModelSection(
        path=str(tmp_path / "items"), tokenizer=str(folder), scan_layers=scan_layers
    )
    monkeypatch.setattr(orbax, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(orbax.StoredArray, "read", counted)
    monkeypatch.setattr(weight_layout, "SMALL_BYTES", 0)
    monkeypatch.setattr(maxtext, "WINDOW_BYTES", 3000)
    run_convert(source=folder, to=section.path, scan_layers=scan_layers)
    a, role = architecture_of(folder), make_roles(MeshSection(fsdp=2), jax.devices()[:2]).trainer
    read = load(section, role)
    assert max(sizes) <= 4096 and sum(sizes) == sum(leaf.nbytes for leaf in jax.tree.leaves(read))
    assert [leaf.sharding for leaf in jax.tree.leaves(read)] == jax.tree.leaves(shardings(a, role))
    run_convert(
        source=section.path,
        to=tmp_path / "back",
        format="huggingface",
        tokenizer=folder,
        scan_layers=scan_layers,
    )
    monkeypatch.undo()
    expected = by_path(load(ModelSection(path=str(folder))))
    assert same_bits(by_path(read), expected)
    assert same_bits(by_path(load(ModelSection(path=str(tmp_path / "back")))), expected)


def small_model_called(monkeypatch: pytest.MonkeyPatch, name: str, folder: Path) -> None:
    """Makes the model in a folder the one that a name of MaxText's stands for."""
    monkeypatch.setattr(
        published, "MODELS", {**MODELS, name: NamedModel("org/model", architecture_of(folder))}
    )


def test_names_decide_the_order_of_rotary_dimensions(tmp_path, monkeypatch):
    llama3 = model_named("llama3.3-70b").architecture
    assert maxtext.rope_is_in_pairs("", llama3) and maxtext.rope_is_in_pairs(
        "llama3.1-70b-Instruct", llama3
    )
    assert not maxtext.rope_is_in_pairs("llama3.3-70b", llama3) and not maxtext.rope_is_in_pairs(
        "llama3-8b", llama3
    )
    folder = folder_of(tmp_path / "hf", "llama3")
    small_model_called(monkeypatch, "llama3.3-70b", folder)
    for name, pairs in (("", True), ("org/model", True), ("llama3.3-70b", False)):
        items = tmp_path / f"m{Path(name).name}"
        run_convert(source=folder, to=items, model_name=name)
        wanted = flat(maxtext_tree(folder, pairs, True))["decoder/layers/self_attention/key/kernel"]
        np.testing.assert_array_equal(
            arrays_of(items)["decoder/layers/self_attention/key/kernel"], wanted
        )
        # and what was written says so itself
        section = ModelSection(path=str(items), tokenizer=str(folder))
        assert same_bits(
            by_path(load(section).blocks.k), by_path(load(ModelSection(path=str(folder))).blocks.k)
        )


@pytest.mark.parametrize(
    ("family", "name", "parts"),
    [
        (
            "llama3",
            "llama-3.1-8b",
            ["no model is called 'llama-3.1-8b', did you mean llama3.1-8b?", "without a name"],
        ),
        (
            "llama3",
            "llama3.1-8b",
            [
                "model_name=llama3.1-8b is not the model at ",
                "hf, whose config.json has other sizes",
                ": leave model_name out, or give the right one",
            ],
        ),
    ],
    ids=["unknown", "another size"],
)
def test_a_name_that_is_not_the_models_is_refused(tmp_path, family, name, parts):
    """Else it would decide the order of rotary dimensions, and MaxText would read rubbish."""
    folder = folder_of(tmp_path / "hf", family)
    with pytest.raises(ShoalError) as error:
        run_convert(source=folder, to=tmp_path / "m", model_name=name)
    assert not [part for part in parts if part not in str(error.value)] and "\n" not in str(
        error.value
    )
    assert not (tmp_path / "m").exists()


def test_a_name_whose_frequencies_differ_is_refused(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "hf", "llama3")
    other = folder_of(tmp_path / "other", "llama3", rope_scaling=None)
    small_model_called(monkeypatch, "llama3-8b", other)
    with pytest.raises(ShoalError, match=r"llama3-8b is not the model at .*leave"):
        run_convert(source=folder, to=tmp_path / "m", model_name="llama3-8b")
    run_convert(source=other, to=tmp_path / "m", model_name="LLAMA3-8b")  # of any case


# In use


@pytest.mark.slow
def test_eval_and_generate_say_the_same_on_both(tmp_path, capsys):
    folder = folder_of(tmp_path / "hf", "llama3", "chatml", head_dim=16, num_hidden_layers=1)
    base, prompts = tmp_path / "out" / "run", tmp_path / "prompts.jsonl"
    assert (
        cli.main(
            ["convert", f"from={folder}", f"base_output_directory={base.parent}", "run_name=run"]
        )
        == 0
    )
    assert f"wrote {base / '0' / 'items'}" in capsys.readouterr().out
    prompts.write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("hello", "one two", "3 + 4"))
    )
    said: dict[str, list[str]] = {"hf": [], "maxtext": []}
    for name, model in (
        ("hf", [f"model={folder}"]),
        ("maxtext", [f"model={base / '0' / 'items'}", f"model.tokenizer={folder}"]),
    ):
        for words in (
            ["generate", f"prompts={prompts}", "temperature=0", "batch=3"],
            ["eval", "task=words", "task.num_eval_questions=3", "pass_k=0", "batch=3"],
        ):
            output = tmp_path / f"{name}-{words[0]}.json"
            assert cli.main([*words, *model, f"output={output}", "max_new_tokens=6", "seed=1"]) == 0
            said[name].append(output.read_text().replace(str(model[0].partition("=")[2]), "MODEL"))
    assert said["hf"] == said["maxtext"]
    assert "rotary dimensions in pairs" in capsys.readouterr().out


def test_a_run_gets_a_config_of_its_own(tmp_path):
    """The tokenizer's folder may be another model's: config.json is then made from the
    architecture."""
    folder, other = folder_of(tmp_path / "hf"), folder_of(tmp_path / "other", "qwen3", "chatml")
    items = save_maxtext(tmp_path / "m", maxtext_tree(folder, True, True))
    section = ModelSection(path=str(items), tokenizer=str(folder))
    opened = open_model(section, Console())
    assert opened.config is None and opened.folder == folder
    copy_model_files(opened, tmp_path / "same")
    assert (tmp_path / "same" / "config.json").read_text() == (folder / "config.json").read_text()
    opened = open_model(ModelSection(path=str(folder), tokenizer=str(other)), Console())
    copy_model_files(opened, tmp_path / "kept")
    assert architecture_of(tmp_path / "kept") == architecture_of(folder)
    assert (tmp_path / "kept" / "tokenizer.json").read_text() == (
        other / "tokenizer.json"
    ).read_text()
    assert (
        opened.tokenizer.eos_ids
        == open_model(ModelSection(path=str(other)), Console()).tokenizer.eos_ids
    )


# Refusals


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """hf: a model; m, m_apart: it in MaxText's form, stacked and not."""
    place = tmp_path_factory.mktemp("place")
    folder_of(place / "hf")
    for name, scan_layers in (("m", True), ("m_apart", False)):
        save_maxtext(place / name, maxtext_tree(place / "hf", True, scan_layers))
    return place


def refusal(section: ModelSection) -> str:
    with pytest.raises(ShoalError) as error:
        load(section)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_of_a_folder_of_steps_the_newest_is_read(place):
    tree, newest = place / "m/0/items", place / "steps/10/items"
    for step in ("9", "10"):
        shutil.copytree(tree, place / "steps" / step / "items")
    (place / "steps/11").mkdir()
    opened = open_model(
        ModelSection(path=str(place / "steps"), tokenizer=str(place / "hf")), Console()
    )
    assert f"MaxText checkpoint {newest}: " in opened.notes[0].text
    check_tokenizer(opened.tokenizer, opened.notes, findings := Findings())
    assert {found.level for found in findings.found} == {"ok"}


def test_a_tokenizer_that_cannot_be_had_names_its_key(place, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    told = refusal(ModelSection(path=str(place / "m/0/items"), name="llama3.1-8b"))
    assert "0/items has no tokenizer, and that of model.name=llama3.1-8b" in told
    assert "Or give model.tokenizer=FOLDER" in told


def test_what_does_not_fit_is_refused(place, tmp_path):
    stacked, apart = str(place / "m/0/items"), str(place / "m_apart/0/items")
    own = str(place / "hf")
    assert "give scan_layers=false" in refusal(ModelSection(path=apart, tokenizer=own))
    assert "give scan_layers=true" in refusal(
        ModelSection(path=stacked, tokenizer=own, scan_layers=False)
    )
    told = refusal(ModelSection(path=stacked))
    assert (
        "does not say what model it is: give model.name (llama3.1-8b, ...), or as model.tokenizer "
        "a folder" in told
    )
    told = refusal(ModelSection(path=stacked, tokenizer=own, name="llama3.1-8b"))
    assert (
        "does not fit llama3.1-8b: token_embedder/embedding is [" in told
        and "instead of [128256, 4096]" in told
    )
    assert "did you mean llama3.1-8b?" in refusal(
        ModelSection(path=stacked, tokenizer=own, name="llama31-8b")
    )
    assert "did you mean qwen3-4b?" in refusal(ModelSection(name="qwen34b"))
    write_model_with_tokenizer(tmp_path / "deeper", "llama3", "llama3", num_hidden_layers=3)
    told = refusal(ModelSection(path=stacked, tokenizer=str(tmp_path / "deeper")))
    assert "pre_self_attention_layer_norm/scale is [32, 2] instead of [32, 3]" in told
    told = refusal(ModelSection(path=apart, tokenizer=str(tmp_path / "deeper"), scan_layers=False))
    assert "it lacks decoder/layers_2/mlp/wi_0/kernel and 8 more" in told
    write_model_with_tokenizer(tmp_path / "untied", "llama3", "llama3", tie_word_embeddings=False)
    assert "it lacks decoder/logits_dense/kernel;" in refusal(
        ModelSection(path=stacked, tokenizer=str(tmp_path / "untied"))
    )


def test_a_tree_with_other_arrays_is_refused(place, tmp_path):
    own = str(place / "hf")
    tree = maxtext_tree(place / "hf", True, True)
    del tree["decoder"]["layers"]["mlp"]["wo"]
    items = save_maxtext(tmp_path / "lacks", tree)
    assert "it lacks decoder/layers/mlp/wo/kernel;" in refusal(
        ModelSection(path=str(items), tokenizer=own)
    )
    tree = maxtext_tree(place / "hf", True, True)
    tree["decoder"]["more"] = {"kernel": np.ones((4, 4), np.float32)}
    items = save_maxtext(tmp_path / "more", tree)
    assert "it also has decoder/more/kernel;" in refusal(
        ModelSection(path=str(items), tokenizer=own)
    )
    tree = maxtext_tree(place / "hf", True, True)
    tree["decoder"]["logits_dense"] = {"kernel": np.ones((4, 4), np.float32)}
    items = save_maxtext(tmp_path / "head", tree)
    assert "logits_dense/kernel is [4, 4] instead of" in refusal(
        ModelSection(path=str(items), tokenizer=own)
    )
    with ocp.PyTreeCheckpointer() as writer:
        writer.save((tmp_path / "strange").absolute(), {"weights": {"a": np.ones(3)}})
    told = refusal(ModelSection(path=str(tmp_path / "strange"), tokenizer=own))
    assert "holds no MaxText model" in told and "found weights/a" in told


def test_a_file_cut_short_is_refused(place, tmp_path):
    items = save_maxtext(tmp_path / "m", maxtext_tree(place / "hf", True, True))
    largest = max(
        (path for path in items.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    told = refusal(ModelSection(path=str(items), tokenizer=str(place / "hf")))
    assert f"the checkpoint {items} cannot be read" in told


def test_convert_refuses(place, tmp_path):
    def refused(**keys: Any) -> str:
        with pytest.raises(ShoalError) as error:
            run_convert(**keys)
        return str(error.value)

    own, items = place / "hf", place / "m" / "0" / "items"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("precious")
    assert "exists and is not empty" in refused(source=own, to=tmp_path / "taken")
    assert "exists and is not empty" in refused(
        source=own, base_output_directory=place, run_name="m"
    )
    assert "nothing was given" in refused(to=tmp_path / "new")
    assert "nothing was given" in refused(source=own)
    assert "give it, or base_output_directory with run_name, not both" in refused(
        source=own, to=tmp_path / "new", base_output_directory=tmp_path
    )
    assert "is a MaxText checkpoint already" in refused(source=items, to=tmp_path / "new")
    assert "is not a MaxText checkpoint" in refused(
        source=own, to=tmp_path / "new", format="huggingface"
    )
    assert (
        "give model_name (llama3.1-8b, ...), or as tokenizer a folder that also holds config.json"
        in refused(source=items, to=tmp_path / "new", format="huggingface")
    )
    for key, others in (
        ("from", {"source": "zz://bucket/m", "to": tmp_path / "new"}),
        ("to", {"source": own, "to": "zz://bucket/m"}),
        ("base_output_directory", {"source": own, "base_output_directory": "zz://bucket/m"}),
        (
            "tokenizer",
            {
                "source": items,
                "to": tmp_path / "new",
                "format": "huggingface",
                "tokenizer": "zz://bucket/m",
            },
        ),
    ):
        told = refused(**others)
        assert told.startswith(f"{key}=zz://bucket/m") and ": zz:// is not known" in told
    for name in ("../esc", "/esc", "a/../../esc", "."):
        told = refused(source=own, base_output_directory=tmp_path / "out", run_name=name)
        assert f"run_name={name!r}: expected a name under base_output_directory" in told
    assert "no home folder is known for that user" in refused(source=own, to="~no-such-user/m")
    write_model(tmp_path / "biased", "llama-linear")
    assert "MaxText has no model with these biases" in refused(
        source=tmp_path / "biased", to=tmp_path / "new"
    )
    (tmp_path / "hybrid").mkdir()
    (tmp_path / "hybrid" / "config.json").write_text(json.dumps(config_of(HYBRID)))
    assert "this model has other layers" in refused(source=tmp_path / "hybrid", to=tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["biased", "hybrid", "taken"]


def test_export_names_the_command_that_reads_a_maxtext_checkpoint(place, tmp_path):
    for items in (place / "m" / "0" / "items", place / "m" / "0"):
        with pytest.raises(
            ShoalError, match=r"is a MaxText checkpoint: use `shoal convert format=huggingface`"
        ):
            export(ExportConfig(source=str(items), to=str(tmp_path / "to")))


@pytest.mark.slow
def test_targets_are_in_the_users_home(place, tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    assert run_convert(source=place / "hf", to="~/items")["to"] == str(home / "items")
    run_convert(source=place / "hf", base_output_directory="~/out", run_name="r")
    run_convert(source="~/items", to="~/back", format="huggingface", tokenizer=place / "hf")
    run_convert(
        source="~/items",
        base_output_directory="~/out",
        run_name="hf",
        format="huggingface",
        tokenizer=place / "hf",
    )
    assert export(ExportConfig(source="~/back", to="~/exported")) == {"to": str(home / "exported")}
    a = architecture_of(place / "hf")
    huggingface.save("~/saved", huggingface.load(place / "hf", a, ROLE), a)
    (home / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    assert (
        cli.main(
            [
                "generate",
                f"model={place / 'hf'}",
                "prompts=~/prompts.jsonl",
                "output=~/said.jsonl",
                "max_new_tokens=2",
            ]
        )
        == 0
    )
    assert (
        cli.main(
            [
                "eval",
                f"model={place / 'hf'}",
                "task=words",
                "task.num_eval_questions=1",
                "pass_k=0",
                "batch=1",
                "max_new_tokens=2",
                "output=~/eval.json",
            ]
        )
        == 0
    )
    with pytest.raises(ShoalError, match="to=~/items exists and is not empty"):
        run_convert(source=place / "hf", to="~/items")
    assert list(here.iterdir()) == []
    assert sorted(str(path.relative_to(home)) for path in home.iterdir()) == [
        "back",
        "eval.json",
        "exported",
        "items",
        "out",
        "prompts.jsonl",
        "said.jsonl",
        "saved",
    ]
    assert (home / "out" / "r" / "0" / "items" / "_METADATA").is_file()
    assert (home / "out" / "hf" / "config.json").is_file()


def test_nothing_is_left_of_a_conversion_that_failed(place, tmp_path, monkeypatch):
    def fails(*_: Any, **__: Any) -> np.ndarray:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface.StoredParameter, "read", fails)
    with pytest.raises(ShoalError, match="No space left on device"):
        run_convert(
            source=place / "hf", base_output_directory=tmp_path / "deep" / "er", run_name="r"
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_checkpoint_of_a_run_is_converted(place, tmp_path):
    from small import learner

    from shoal.weights.checkpoints import Checkpoints

    a, folder = architecture_of(place / "hf"), place / "hf"
    roles = make_roles(MeshSection(), jax.devices()[:1])
    run = tmp_path / "run"
    copy_model_files(open_model(ModelSection(path=str(folder)), Console()), run / "model")
    checkpoints = Checkpoints(run / "checkpoints", keep_last=1)
    checkpoints.save(
        3, learner(a, where=roles).init(huggingface.load(folder, a, roles.trainer)), {}
    )
    checkpoints.close()
    run_convert(source=run, to=tmp_path / "items", scan_layers=False)
    wanted = flat(maxtext_tree(folder, True, False))
    found = arrays_of(tmp_path / "items")
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert np.array_equal(found[name], leaf)


# Names


def test_a_name_alone_is_the_hubs_model(tmp_path, monkeypatch):
    import huggingface_hub

    asked: list[tuple[str, bool]] = []

    def snapshot(repository: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append((repository, "*.safetensors" in allow_patterns))
        return str(folder)

    folder = folder_of(tmp_path / "hf")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    resolve_model(ModelSection(name="llama3.1-8b"))
    resolve_model(ModelSection(name="org/model"))
    resolve_model(ModelSection(path=str(folder), tokenizer="org/tokenizer"))
    run_convert(model_name="qwen3-0.6b", to=tmp_path / "items")
    # The configuration first: weights of a model that is not supported are not downloaded.
    assert asked == [
        ("meta-llama/Llama-3.1-8B", False),
        ("meta-llama/Llama-3.1-8B", True),
        ("org/model", False),
        ("org/model", True),
        ("org/tokenizer", False),
        ("Qwen/Qwen3-0.6B", True),
    ]
    items = save_maxtext(tmp_path / "m", maxtext_tree(folder, True, True))
    with pytest.raises(ShoalError, match=r"does not fit llama3\.3-70b"):
        resolve_model(ModelSection(path=str(items), name="llama3.3-70b"))
    assert asked[-1] == ("meta-llama/Llama-3.3-70B-Instruct", False)
    with pytest.raises(ShoalError, match=r"model\.name=llama3\.1-8b is not the model at"):
        resolve_model(ModelSection(path=str(folder), name="llama3.1-8b"))


def test_the_models_have_the_sizes_that_their_names_say():
    for name, model in MODELS.items():
        if not maxtext._is_plain(model.architecture):
            continue  # of families whose MaxText checkpoints are not read
        declared = jax.tree.leaves(param_specs(model.architecture))
        billions = sum(float(np.prod(d.shape)) for d in declared) / 1e9
        said = float(name.split("-")[1].removesuffix("b"))
        assert abs(billions - said) < max(0.1 * said, 0.3), (name, billions)
        assert maxtext.arrays_of(model.architecture, True, True)
