"""What compilers make of sampling: no loop over slots, no weight copied, nothing exchanged between replicas.

The TPU's and the GPU's are asked where they are installed (libtpu, jax-cuda13-plugin); no accelerator is needed.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from compiled import LLAMA_70B, SAMPLED, arrays, call_of, compiled_elsewhere, replica_groups
from small import QWEN3, roles

from shoal.model.architecture import Architecture
from shoal.model.parameters import param_specs
from shoal.model.transformer import Model
from shoal.run.plan.hlo import COLLECTIVES, Instruction, Module
from shoal.sampler.engine import Engine

NOT_MADE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "constant", "conditional"}
V5P_CLOCK, V5P_BANDWIDTH = 1.75e9, 2.765e12  # of a chip, as its maker states them


def sizes(one: Instruction, dtype: str = "") -> list[int]:
    """Elements of the arrays that it makes in the device's memory; the TPU's own, S(1), is a cache."""
    found = re.findall(r"\b\w+\[[\d,]*\](?:\{[^}]*\})?", one.shape)
    made = found[:1] if one.op == "copy-start" else found  # then comes what is copied
    return [elements for text in made if "S(1)" not in text for kind, elements in arrays(text)
            if dtype in ("", kind)]


def cycles(one: Instruction) -> int:
    """The TPU compiler's own estimate."""
    found = re.search(r'"estimated_cycles":"(\d+)"', one.attributes)
    return int(found[1]) if found and one.op not in ("call", "conditional") else 0


def loops(hlo: Module, name: str) -> list[str]:
    """Bodies of the loops that stand in a computation."""
    return [one.named("body") for one in hlo.computations[name] if one.op == "while"]


def sequences(hlo: Module) -> dict[str, list[Instruction]]:
    """What the device runs one by one: the entry and the loops' bodies, not what is inside fusions."""
    (tokens,) = loops(hlo, hlo.entry)
    return {name: hlo.computations[name] for name in (hlo.entry, tokens, *loops(hlo, tokens))}


def collectives(hlo: Module) -> list[Instruction]:
    return [one for some in hlo.computations.values() for one in some if one.op.removesuffix("-start") in COLLECTIVES]


def weight_sizes(a: Architecture, tensor: int) -> set[int]:
    """Elements on one device of each matrix of a layer, and of L and 2 of them stacked."""
    one = {math.prod(spec.shape[1:]) // tensor for spec in jax.tree.leaves(param_specs(a).blocks)
           if len(spec.shape) == 3}
    return {size * layers for size in one for layers in (1, 2, a.num_layers)}


def check_structure(hlo: Module, a: Architecture, tensor: int, slots: int) -> None:
    """A loop over tokens alone; no copy of a weight or a cache; no logits whole on a device."""
    (tokens,) = loops(hlo, hlo.entry)
    assert not loops(hlo, tokens)
    cache = slots * 512 * a.num_kv_heads * a.head_dim // tensor
    copies = [one for some in sequences(hlo).values() for one in some
              if one.op not in NOT_MADE and "/scatter" not in one.attributes  # writes into a cache, in place
              and (weight_sizes(a, tensor) | {cache}) & set(sizes(one, "bf16"))]
    assert not copies
    moved = max(max(sizes(one)) for one in collectives(hlo))
    assert moved < slots * a.vocab_size / tensor
    assert {len(group) for one in collectives(hlo) for group in replica_groups(one)} == {tensor}


def test_a_token_of_70b_on_8_tpus_takes_at_most_three_times_as_long_as_reading_the_weights():
    """By the compiler's cycles, without collectives, at 256 tokens of the prompt and 512 of the completion. Compiled
    are two layers, and what reads or makes no logits is counted as theirs: at least what 80 of them take."""
    hlo = Module(compiled_elsewhere("v5p:2x2x2", "70b", 2))
    check_structure(hlo, replace(LLAMA_70B, num_layers=2), 8, 64)
    (tokens,) = loops(hlo, hlo.entry)
    body, logits = hlo.computations[tokens], 64 * LLAMA_70B.vocab_size // 8
    made = {one.name: max(sizes(one, "f32"), default=0) for one in body}
    once = sum(cycles(one) for one in body if max(made[name] for name in {one.name, *one.operands} & {*made}) >= logits)
    both = sum(map(cycles, body)) - once
    seconds = (once + both * LLAMA_70B.num_layers / 2) / V5P_CLOCK
    num_weights = sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(LLAMA_70B)))
    assert 0 < once < both and seconds < 3 * num_weights * 2 / 8 / V5P_BANDWIDTH


def test_caches_of_all_heads_on_a_tpu_are_not_turned_round():
    """Written with all of its heads at once, each cache was copied at both ends of every dispatch."""
    hlo = Module(compiled_elsewhere("v6e:1x1", "decode", 8))
    cache = 64 * 512 * 8 * SAMPLED.head_dim
    assert not [one for one in hlo.computations[hlo.entry] if one.op.startswith("copy") and cache in sizes(one, "bf16")]


@pytest.mark.parametrize("topology", ["h200:1", "v6e:1x1"])
def test_context_moves_the_rows_that_it_is_for(topology):
    """Of 64 rows 4 get context, or give way and come back. Keys are written in place; a scatter of all heads was a copy
    of the whole cache before and after, and gathered rows a read of all."""
    for program, text in zip(("feed", "save", "restore"), compiled_elsewhere(topology, "context").split("\f"),
                             strict=False):
        hlo = Module(text)
        run = [one for some in (hlo.entry, *loops(hlo, hlo.entry)) for one in hlo.computations[some]]
        caches = [64 * 8 * keys * SAMPLED.head_dim for keys in (256, 512)]
        # Of a cache that is written into, XLA's name for what does so tells a fusion from a copy.
        made = [one for one in run if one.op not in NOT_MADE and {*caches} & {*sizes(one, "bf16")} and not (
            program != "save" and any("/scatter" in inner.attributes or inner.op in ("scatter", "dynamic-update-slice")
                                      for inner in (one, *hlo.computations.get(one.named("calls") or "", ()))))]
        assert not made, (program, made)
        read = [size for one in run for size in sizes(one, "bf16") if one.op == "slice"]
        assert max(read, default=0) < min(caches), program


def test_structure_on_gpu():
    check_structure(Module(compiled_elsewhere("h200:4", "decode")), SAMPLED, 2, 32)


@pytest.mark.parametrize("topology", ["h200:4", "v6e:2x2"])
def test_weights_of_8_bits_are_widened_when_they_are_needed(topology):
    """They enter the loop as they are. A TPU's products widen what they read; cuBLAS, which is compiled for here, is
    given each widened: without a barrier, on one device XLA widens those of all layers at the start of each turn."""
    hlo = Module(compiled_elsewhere(topology, "decode of 8 bits"))
    (tokens,) = loops(hlo, hlo.entry)
    weights, body = weight_sizes(SAMPLED, 1), hlo.computations[tokens]
    carried = {size for one in body if one.op in NOT_MADE for size in sizes(one, "s8")}
    before, widened = ({one.name: max(sizes(one, "bf16")) for one in some if one.op not in NOT_MADE
                        and weights & {*sizes(one, "bf16")}} for some in (hlo.computations[hlo.entry], body))
    assert len(weights & carried) >= 3 and not before
    last = {name: number for number, one in enumerate(body) for name in one.operands}  # in the order of execution
    first = {one.name: number for number, one in enumerate(body)}
    live = [sum(size for name, size in widened.items() if first[name] <= number <= last[name])
            for number in range(len(body))]
    if topology.startswith("v6e"):
        assert not widened
    else:
        assert 0 < 2 * max(live) < sum(widened.values())


@pytest.mark.parametrize(("program", "truncated", "mesh"), [
    ("prefill", False, (2, 2, 2)), ("prefill in pieces", False, (1, 2, 4)), ("join", False, (1, 2, 4)),
    ("decode", False, (2, 2, 2)), ("decode", True, (1, 2, 4)), ("decode", True, (8, 1, 1)),
    ("feed", False, (2, 2, 2)), ("save", False, (2, 2, 2)), ("restore", False, (2, 2, 2))])
def test_replicas_exchange_nothing(mesh, program, truncated):
    """Also with fewer key/value heads (2) than `tensor` (4). A loop that ends by replica must hold no permutation: all
    devices take part in one."""
    where = roles(*mesh).sampler
    a = replace(QWEN3, num_layers=1)
    engine = Engine(Model(a, where), slots=16, group_size=2, eos_ids=(5,),
                    max_completion_tokens=300 if program == "feed" else 16,
                    max_prompt_tokens=2000 if "pieces" in program else 16, truncated=truncated, max_support=4)
    program = program.split()[0]
    args, shapes = call_of(engine, program)
    hlo = Module(engine.programs[program].compile(*args, **shapes).as_text())
    tensor, found = where.mesh.shape["tensor"], collectives(hlo)
    assert bool(found) == (tensor > 1 and program not in ("save", "restore"))
    assert not [one for one in found if one.op.startswith("collective-permute")]
    replicas = np.arange(where.mesh.size).reshape(-1, tensor).tolist()
    for one in found:
        assert all(any(set(group) <= set(replica) for replica in replicas) for group in replica_groups(one))
