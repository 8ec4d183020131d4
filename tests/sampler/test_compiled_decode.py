"""What compilers make of sampling: no loop over slots, no weight copied, nothing exchanged between
replicas.

The TPU's and the GPU's are asked where they are installed (libtpu, jax-cuda13-plugin); no
accelerator is needed.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from compiled import (
    GROUP_SIZE,
    LLAMA_8B,
    LLAMA_70B,
    SAMPLED,
    SLOTS,
    arrays,
    call_of,
    compiled_elsewhere,
    replica_groups,
)
from small import QWEN3, roles

from shoal.mesh.accelerators import ACCELERATORS
from shoal.model.architecture import Architecture
from shoal.model.parameters import param_specs
from shoal.model.transformer import Model
from shoal.plan.hlo import COLLECTIVES, Instruction, Module
from shoal.sampler.engine import Engine
from shoal.sampler.programs import DECODE_CHUNK

pytestmark = pytest.mark.system

NOT_MADE = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "while",
    "constant",
    "conditional",
}


def sizes(one: Instruction, dtype: str = "") -> list[int]:
    """Elements of the arrays that it makes in the device's memory; the TPU's own, S(1), is a
    cache."""
    found = re.findall(r"\b\w+\[[\d,]*\](?:\{[^}]*\})?", one.shape)
    made = found[:1] if one.op == "copy-start" else found  # then comes what is copied
    result = []
    for text in made:
        if "S(1)" not in text:
            for kind, elements in arrays(text):
                if dtype in ("", kind):
                    result.append(elements)
    return result


def loops(hlo: Module, name: str) -> list[str]:
    """Bodies of the loops that stand in a computation."""
    result = []
    for one in hlo.computations[name]:
        if one.op == "while":
            result.append(one.named("body"))
    return result


def sequences(hlo: Module) -> dict[str, list[Instruction]]:
    """What the device runs one by one: the entry and the loops' bodies, not what is inside
    fusions."""
    (tokens,) = loops(hlo, hlo.entry)
    result = {}
    for name in (hlo.entry, tokens, *loops(hlo, tokens)):
        result[name] = hlo.computations[name]
    return result


def collectives(hlo: Module) -> list[Instruction]:
    result = []
    for some in hlo.computations.values():
        for one in some:
            if one.op.removesuffix("-start") in COLLECTIVES:
                result.append(one)
    return result


def weight_sizes(a: Architecture, tensor: int) -> set[int]:
    """Elements on one device of each matrix of a layer, of q, k and v together, and of L and 2 of
    them stacked."""
    one = {
        math.prod(spec.shape[1:]) // tensor
        for spec in jax.tree.leaves(param_specs(a).blocks)
        if len(spec.shape) == 3
    }
    one.add(a.hidden_size * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim // tensor)
    piece = a.hidden_size * a.intermediate_size // tensor // 4  # in which a TPU has them of 70B
    return {size * layers for size in one for layers in (1, 2, a.num_layers)} | {piece}


def check_structure(hlo: Module, a: Architecture, tensor: int, slots: int) -> None:
    """A loop over tokens alone; no copy of a weight or a cache; no logits whole on a device."""
    (tokens,) = loops(hlo, hlo.entry)
    assert not loops(hlo, tokens)
    # values beside keys
    cache = {slots * 512 * a.num_kv_heads * a.head_dim // tensor * beside for beside in (1, 2)}
    copies = [
        one
        for some in sequences(hlo).values()
        for one in some
        if one.op not in NOT_MADE
        and not re.search("/scatter|/decode_kernel/", one.attributes)  # in place
        and (weight_sizes(a, tensor) | cache) & set(sizes(one, "bf16"))
    ]
    assert not copies
    moved = max(max(sizes(one)) for one in collectives(hlo))
    assert moved < slots * a.vocab_size / tensor
    assert {len(group) for one in collectives(hlo) for group in replica_groups(one)} == {tensor}


@pytest.fixture(scope="module")
def on_tpu() -> dict[int, Module]:
    return compiled_layers("v5p:2x2x2", "70b", 1, 2)


def compiled_layers(topology: str, model: str, *layers: int) -> dict[int, Module]:
    texts = compiled_elsewhere(topology, model, *layers).split("\f")
    result = {}
    for number, text in zip(layers, texts, strict=False):
        result[number] = Module(text)
    return result


@pytest.mark.parametrize("layers", [1, 2])
def test_structure_on_tpu(on_tpu, layers):
    check_structure(on_tpu[layers], replace(LLAMA_70B, num_layers=layers), 8, 64)


def share_of_floor(found: dict[int, Module], a: Architecture, name: str, chips: int) -> float:
    """How many times as long a token takes as reading weights and live keys, at 256 tokens of the
    prompt and half of 512 of the completion; by the compiler's cycles and the waits for copies of
    two depths, and the time in which the kernel reads live keys, without collectives."""
    chip = ACCELERATORS[name]
    held, live = (SLOTS // GROUP_SIZE * 256 + SLOTS * own for own in (512, 256))
    (few, first), (more, second) = (
        (layers, sum(hlo.costs([DECODE_CHUNK], chip.hbm / chip.clock, live / held).cycles.values()))
        for layers, hlo in found.items()
    )
    cycles = second + (second - first) / (more - few) * (a.num_layers - more)
    keys = live * 2 * a.num_layers * a.num_kv_heads * a.head_dim
    weights = sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(a)))
    return cycles / DECODE_CHUNK / chip.clock / (2 * (weights + keys) / chips / chip.hbm)


def test_a_token_of_70b_on_8_tpus_takes_at_most_1_4_times_as_long_as_reading_what_it_must(on_tpu):
    assert 1 < share_of_floor(on_tpu, LLAMA_70B, "v5p", 8) < 1.4


def test_a_token_of_8b_on_a_tpu_takes_at_most_1_1_times_as_long_as_reading_what_it_must():
    """Its caches are neither copied nor turned round, at the ends of a dispatch or at a token."""
    found = compiled_layers("v6e:1x1", "8b", 2, 3)
    assert 1 < share_of_floor(found, LLAMA_8B, "v6e", 1) < 1.1
    cache = 64 * 512 * LLAMA_8B.num_kv_heads * 2 * LLAMA_8B.head_dim
    assert not [
        one
        for some in sequences(found[2]).values()
        for one in some
        if one.op.startswith("copy") and cache in sizes(one, "bf16")
    ]


def test_the_kernel_compiles_for_heads_of_64_and_128_in_both_types():
    """Of a v5e; the others' are in the programs above. No cache is copied to another layout."""
    sizes = list(map(int, compiled_elsewhere("v5e:1x1", "decode kernel").split()))
    assert len(sizes) == 4 and max(sizes) < 2**20


def test_caches_that_fit_into_a_tpus_on_chip_memory_are_not_copied_there():
    """Else they were copied in and out at every token, whole, though the kernel reads live
    pages."""
    hlo = Module(compiled_elsewhere("v6e:2x2", "decode"))
    (tokens,) = loops(hlo, hlo.entry)
    shapes = {one.name: one.shape for one in hlo.computations[tokens]}
    read = []
    for one in hlo.computations[tokens]:
        if one.op == "custom-call" and "/decode_kernel/" in one.attributes:
            for name in one.operands[-2:]:
                read.append(shapes[name])
    assert len(read) == 2 * SAMPLED.num_layers and not [shape for shape in read if "S(1)" in shape]


def test_a_layer_of_prefill_takes_at_most_1_9_times_as_long_as_its_products():
    """It copies no weight: divided into heads within its product, that of q would be turned round
    for it (2.1)."""
    chip, hlo = ACCELERATORS["v5p"], Module(compiled_elsewhere("v5p:2x2x2", "prefill of 70b"))
    tokens = SLOTS // GROUP_SIZE // 4 * 256
    products = (
        sum(
            2 * tokens * math.prod(spec.shape[1:]) / 8
            for spec in jax.tree.leaves(param_specs(LLAMA_70B).blocks)
            if len(spec.shape) == 3
        )
        / chip.peaks["bfloat16"]
    )
    assert (
        products
        < sum(hlo.costs(memory_rate=chip.hbm / chip.clock).cycles.values()) / chip.clock
        < 1.9 * products
    )
    assert not [
        one
        for one in hlo.computations[hlo.entry]
        if one.op == "copy"
        and weight_sizes(replace(LLAMA_70B, num_layers=1), 8) & set(sizes(one, "bf16"))
    ]


@pytest.mark.parametrize("topology", ["h200:1", "v6e:1x1"])
def test_context_moves_the_rows_that_it_is_for(topology):
    """Of 64 rows 4 get context, or give way and come back. Keys are written in place; a scatter of
    all heads was a copy of the whole cache before and after, and gathered rows a read of all."""
    for program, text in zip(
        ("feed", "swap_out", "swap_in"),
        compiled_elsewhere(topology, "context").split("\f"),
        strict=False,
    ):
        hlo = Module(text)
        run = []
        for some in (hlo.entry, *loops(hlo, hlo.entry)):
            for one in hlo.computations[some]:
                run.append(one)
        beside = 2 if topology.startswith("v6e") else 1  # values stand beside their keys
        caches = []
        for keys in (256, 512):
            caches.append(64 * 8 * keys * beside * SAMPLED.head_dim)
        # Of a cache that is written into, XLA's name for what does so tells a fusion from a copy.
        made = []
        for one in run:
            if (
                one.op not in NOT_MADE
                and {*caches} & {*sizes(one, "bf16")}
                and not (
                    program != "swap_out"
                    and any(
                        "/scatter" in inner.attributes
                        or inner.op in ("scatter", "dynamic-update-slice")
                        for inner in (one, *hlo.computations.get(one.named("calls") or "", ()))
                    )
                )
            ):
                made.append(one)
        assert not made, (program, made)
        read = []
        for one in run:
            for size in sizes(one, "bf16"):
                if one.op == "slice":
                    read.append(size)
        assert max(read, default=0) < min(caches), program


def test_structure_on_gpu():
    check_structure(Module(compiled_elsewhere("h200:4", "decode")), SAMPLED, 2, 32)


@pytest.mark.parametrize("topology", ["h200:4", "v6e:2x2"])
def test_weights_of_8_bits_are_widened_when_they_are_needed(topology):
    """They enter the loop as they are. A TPU's products widen what they read; cuBLAS, which is
    compiled for here, is given each widened: without a barrier, on one device XLA widens those of
    all layers at the start of each turn."""
    hlo = Module(compiled_elsewhere(topology, "decode of 8 bits"))
    (tokens,) = loops(hlo, hlo.entry)
    weights, body = weight_sizes(SAMPLED, 1), hlo.computations[tokens]
    carried = {size for one in body if one.op in NOT_MADE for size in sizes(one, "s8")}
    before, widened = (
        {
            one.name: max(sizes(one, "bf16"))
            for one in some
            if one.op not in NOT_MADE and weights & {*sizes(one, "bf16")}
        }
        for some in (hlo.computations[hlo.entry], body)
    )
    assert len(weights & carried) >= 3 and not before
    # in the order of execution
    last = {}
    for number, one in enumerate(body):
        for name in one.operands:
            last[name] = number
    first = {one.name: number for number, one in enumerate(body)}
    live = []
    for number in range(len(body)):
        live.append(
            sum(size for name, size in widened.items() if first[name] <= number <= last[name])
        )
    if topology.startswith("v6e"):
        assert not widened
    else:
        assert 0 < 2 * max(live) < sum(widened.values())


@pytest.mark.parametrize(
    ("program", "truncated", "mesh"),
    [
        ("prefill", False, (2, 2, 2)),
        ("prefill in pieces", False, (1, 2, 4)),
        ("join", False, (1, 2, 4)),
        ("decode", False, (2, 2, 2)),
        ("decode", True, (1, 2, 4)),
        ("decode", True, (8, 1, 1)),
        ("feed", False, (2, 2, 2)),
        ("swap_out", False, (2, 2, 2)),
        ("swap_in", False, (2, 2, 2)),
    ],
)
def test_replicas_exchange_nothing(mesh, program, truncated):
    """Also with fewer key/value heads (2) than `tensor` (4). A loop that ends by replica must hold
    no permutation: all devices take part in one."""
    where = roles(*mesh).sampler
    a = replace(QWEN3, num_layers=1)
    engine = Engine(
        Model(a, where),
        slots=16,
        group_size=2,
        eos_ids=(5,),
        max_completion_tokens=300 if program == "feed" else 16,
        max_prompt_tokens=2000 if "pieces" in program else 16,
        truncated=truncated,
        max_support=4,
    )
    program = program.split()[0]
    args, shapes = call_of(engine, program)
    hlo = Module(engine.programs[program].compile(*args, **shapes).as_text())
    tensor, found = where.mesh.shape["tensor"], collectives(hlo)
    assert bool(found) == (tensor > 1 and program not in ("swap_out", "swap_in"))
    assert not [one for one in found if one.op.startswith("collective-permute")]
    if program == "decode" and mesh == (2, 2, 2):
        # a device writes the keys of its own heads: none are gathered
        assert not [
            one
            for one in found
            if one.op == "all-gather" and re.match(r"\w+\[(\d+,){3}", one.shape)
        ]
    replicas = np.arange(where.mesh.size).reshape(-1, tensor).tolist()
    for one in found:
        for group in replica_groups(one):
            assert any(set(group) <= set(replica) for replica in replicas)
