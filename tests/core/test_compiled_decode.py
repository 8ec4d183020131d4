"""What compilers make of decoding: no loop over slots, no weight copied, nothing exchanged between replicas.

The TPU's and the GPU's are asked where they are installed (libtpu, jax-cuda13-plugin); no accelerator is needed.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest
from compile_decode import ENVIRONMENT, LLAMA_70B
from compile_decode import SMALL as SMALL_ON_GPU
from small import QWEN3, roles

from shoal.model.transformer import Architecture, Model, is_param_spec, param_specs
from shoal.rollout.publication import published_shapes
from shoal.sampler.engine import Engine

COLLECTIVE = r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?"
NOT_MADE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "constant", "conditional"}
V5P_CLOCK, V5P_BANDWIDTH = 1.75e9, 2.765e12  # of a chip, as its maker states them


@dataclass
class Instruction:
    shape: str
    kind: str
    line: str

    def sizes(self, dtype: str = r"\w+") -> list[int]:
        """Elements of the arrays that it makes in the device's memory; the TPU's own, S(1), is a cache."""
        arrays = re.findall(rf"\b{dtype}\[([\d,]*)\](\{{[^}}]*\}})?", self.shape)
        made = arrays[:1] if self.kind == "copy-start" else arrays  # then comes what is copied
        return [math.prod(int(n) for n in dims.split(",") if n) for dims, layout in made if "S(1)" not in layout]

    @property
    def cycles(self) -> int:
        """The TPU compiler's own estimate."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.line)
        return int(found[1]) if found and self.kind not in ("call", "conditional") else 0


class Hlo:
    """An optimised program: its computations by name, those of loops first of all."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        current: list[Instruction] = []
        for line in text.splitlines():
            if begins := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*->.*\{$", line):
                current = self.computations[begins[1]] = []
            elif found := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(", line):
                current.append(Instruction(found[1], found[2], line))
        self.entry = next(m[1] for m in [re.search(r"^ENTRY %?([\w.\-]+) ", text, re.M)] if m)

    def loops(self, name: str) -> list[str]:
        """Bodies of the loops that stand in a computation."""
        return [re.search(r"body=%?([\w.\-]+)", one.line)[1]  # type: ignore[index]
                for one in self.computations[name] if one.kind == "while"]

    def sequences(self) -> dict[str, list[Instruction]]:
        """What the device runs one by one: the entry and the loops' bodies, not what is inside fusions."""
        (tokens,) = self.loops(self.entry)
        return {name: self.computations[name] for name in (self.entry, tokens, *self.loops(tokens))}

    def collectives(self) -> list[Instruction]:
        return [one for some in self.computations.values() for one in some if re.fullmatch(COLLECTIVE, one.kind)]


def replica_groups(line: str) -> list[list[int]]:
    """The groups of devices that a collective joins, in each of the three ways in which HLO writes them.

    >>> replica_groups("replica_groups={{0,1},{2,3}}"), replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)")
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    >>> replica_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}, dimensions={0}")
    [[0, 2], [1, 3]]
    """
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    if tiled := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, dims, order = ([int(n) for n in (part or "").split(",") if n] for part in tiled.groups())
        devices = np.arange(math.prod(dims)).reshape(dims)
        return devices.transpose(order or None).reshape(shape[0], -1).tolist()  # type: ignore[return-value]
    mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    assert mesh, line
    sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", mesh[1])}
    joined = [list(sizes).index(name) for name in mesh[2].split(",")]
    devices = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    last = np.moveaxis(devices, joined, range(-len(joined), 0))
    return last.reshape(-1, math.prod(devices.shape[axis] for axis in joined)).tolist()  # type: ignore[return-value]


def weight_sizes(a: Architecture, tensor: int) -> set[int]:
    """Elements on one device of each matrix of a layer, and of L and 2 of them stacked."""
    one = {math.prod(spec.shape[1:]) // tensor for spec in jax.tree.leaves(param_specs(a).blocks, is_leaf=is_param_spec)
           if len(spec.shape) == 3}
    return {size * layers for size in one for layers in (1, 2, a.num_layers)}


def check_structure(hlo: Hlo, a: Architecture, tensor: int, slots: int) -> None:
    """Loops over tokens and key blocks alone; no copy of a weight or a cache; no logits whole on a device."""
    (tokens,) = hlo.loops(hlo.entry)
    assert len(hlo.loops(tokens)) == 2 * a.num_layers
    assert not any(hlo.loops(body) for body in hlo.loops(tokens))
    cache = slots * 512 * a.num_kv_heads * a.head_dim // tensor
    copies = [one.line.strip()[:200] for some in hlo.sequences().values() for one in some
              if one.kind not in NOT_MADE and "/scatter" not in one.line  # writes into a cache, in place
              and (weight_sizes(a, tensor) | {cache}) & set(one.sizes("bf16"))]
    assert not copies
    moved = max(max(one.sizes()) for one in hlo.collectives())
    assert moved < slots * a.vocab_size / tensor
    assert {len(group) for one in hlo.collectives() for group in replica_groups(one.line)} == {tensor}


def compile_for(platform: str, folder: Path) -> Path:
    pytest.importorskip("libtpu" if platform == "tpu" else "jax_cuda13_plugin")
    script = Path(__file__).parent.parent / "support" / "compile_decode.py"
    done = subprocess.run([sys.executable, script, platform, folder], capture_output=True, text=True,
                          env=os.environ | ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def on_tpu(tmp_path_factory) -> dict[int, Hlo]:
    folder = compile_for("tpu", tmp_path_factory.mktemp("tpu"))
    return {layers: Hlo((folder / f"{layers}.hlo").read_text()) for layers in (2, 4)}


@pytest.mark.parametrize("layers", [2, 4])
def test_structure_on_tpu(on_tpu, layers):
    check_structure(on_tpu[layers], replace(LLAMA_70B, num_layers=layers), 8, 64)


def test_a_token_of_70b_on_8_tpus_takes_at_most_four_times_as_long_as_reading_the_weights(on_tpu):
    """By the compiler's cycles, without collectives, at 256 tokens of the prompt and 256 of the completion."""

    def token(hlo: Hlo) -> float:
        (body,) = hlo.loops(hlo.entry)
        cycles = {name: sum(one.cycles for one in some) for name, some in hlo.sequences().items()}
        loops = hlo.loops(body)
        assert all(cycles.values()) and len(loops) % 2 == 0
        # One block of the prompt's keys; of the completion's half of the time one, half of the time two.
        return cycles[body] + sum(cycles[name] * (1, 1.5)[number % 2] for number, name in enumerate(loops))

    of_two, of_four = token(on_tpu[2]), token(on_tpu[4])
    seconds = (of_two + (of_four - of_two) / 2 * (LLAMA_70B.num_layers - 2)) / V5P_CLOCK
    num_weights = sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(LLAMA_70B), is_leaf=is_param_spec))
    assert seconds < 4 * num_weights * 2 / 8 / V5P_BANDWIDTH


def test_structure_on_gpu(tmp_path):
    hlo = Hlo((compile_for("gpu", tmp_path) / "2.hlo").read_text())
    check_structure(hlo, SMALL_ON_GPU, 2, 32)


@pytest.mark.compile_quickly
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 2, 4), (8, 1, 1)])
def test_replicas_exchange_nothing(mesh):
    """Also with fewer key/value heads (2) than `tensor` (4). A loop that ends by replica must hold no permutation: all
    devices take part in one."""
    where = roles(*mesh).sampler
    a = replace(QWEN3, num_layers=1)
    engine = Engine(Model(a, where), slots=16, group_size=2, max_prompt_tokens=16, max_completion_tokens=16,
                    eos_ids=(5,))
    stopped = jax.ShapeDtypeStruct((8, 2), bool)
    hlo = Hlo(engine.programs["decode"].compile(published_shapes(engine.model), state=engine.state_shapes(),
                                                stopped=stopped).as_text())
    tensor, found = where.mesh.shape["tensor"], hlo.collectives()
    assert bool(found) == (tensor > 1)
    assert not [one.line for one in found if one.kind.startswith("collective-permute")]
    replicas = np.arange(where.mesh.size).reshape(-1, tensor).tolist()
    for one in found:
        assert all(any(set(group) <= set(replica) for replica in replicas) for group in replica_groups(one.line))
