"""Compiled programs as text: collectives in loops, groups of devices in every form, bytes,
FLOPs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shoal.config.sections.devices import MeshSection
from shoal.mesh import make_mesh
from shoal.mesh.topology import parse_topology
from shoal.model import grouped_gpu
from shoal.model.attention import gpu as gpu_attention
from shoal.model.attention import tpu as tpu_attention
from shoal.model.attention.rule import Tokens
from shoal.model.linear import Groups, linear
from shoal.plan.analysis import jaxpr_flops
from shoal.plan.hlo import Collective, Module
from shoal.plan.transfers import device_groups, group_size, link_of, transfer_rows

LAYERS, SIZE, ROWS = 5, 64, 16


@pytest.fixture(scope="module")
def layered() -> tuple:
    """Traced and compiled: rows through LAYERS products whose weights are split over `fsdp`, as a
    trainer's."""
    mesh = make_mesh(MeshSection(data=2, fsdp=4), jax.devices())

    def spread(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes))
        )

    def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            whole = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec()))
            x = jnp.tanh(x @ whole)
            return jax.lax.with_sharding_constraint(
                x, NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
            ), None

        return jax.lax.scan(layer, x, weights)[0].sum(1)

    traced = jax.jit(layers).trace(
        spread((ROWS, SIZE), ("data", "fsdp")), spread((LAYERS, SIZE, SIZE), None, "fsdp")
    )
    return traced, traced.lower().compile()


def test_a_gather_in_a_loop_counts_once_a_round(layered):
    costs = Module(layered[1].as_text()).costs()
    gathers = [one for one in costs.collectives if one.kind == "all-gather"]
    assert sum(one.total for one in gathers) == LAYERS * SIZE * SIZE * 4 and costs.assumed == []
    for one in gathers:
        assert device_groups(one.groups) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert {group_size(one.groups) for one in gathers} == {4}


def test_flops_of_the_jaxpr_are_those_of_the_program(layered):
    traced, compiled = layered
    expected = 2.0 * ROWS * SIZE * SIZE * LAYERS
    assert jaxpr_flops(traced.jaxpr.jaxpr) == expected
    here = sum(one.times * one.flops for one in Module(compiled.as_text()).costs().operations)
    assert here == expected / 8


def test_bytes_of_a_loop_are_those_of_its_slices(layered):
    costs = Module(layered[1].as_text()).costs()
    # A layer's part is sliced, gathered, multiplied: some thrice the weights, never the stack once
    # a layer.
    assert LAYERS * SIZE * SIZE * 4 < sum(costs.bytes.values()) < 6 * LAYERS * SIZE * SIZE * 4


def test_recomputation_counts_and_loops_of_unknown_length_are_assumed():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x).sum()

    shapes = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    product = 2.0 * 4 * 8 * 8
    assert jaxpr_flops(jax.make_jaxpr(loss)(*shapes).jaxpr) == product
    assert jaxpr_flops(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*shapes).jaxpr) == 4 * product

    def rounds(x: jax.Array, limit: jax.Array) -> jax.Array:
        return jax.lax.while_loop(
            lambda c: (c[0] < limit) & (c[1].sum() < 9), lambda c: (c[0] + 1, c[1] @ c[1]), (0, x)
        )[1]

    traced = jax.jit(rounds).trace(shapes[0], jax.ShapeDtypeStruct((), jnp.int32))
    assert jaxpr_flops(traced.jaxpr.jaxpr, [7]) == 7 * 2.0 * 8**3
    costs = Module(traced.lower().compile().as_text()).costs([7])
    assert sum(times * flops for times, _, flops in costs.operations) == 7 * 2.0 * 8**3
    assert len(costs.assumed) == 1 and costs.assumed[0].endswith("7 times")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("[1,4]<=[4]", [[0, 1, 2, 3]]),
        ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=4,'b'=1] {'a','b'}", [[0, 1, 2, 3]]),
        ("mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ("mesh['a'=4], device_ids=(3,2,1,0) {'a'}", [[3, 2, 1, 0]]),
        ("mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("something else", []),
    ],
)
def test_groups_of_devices(text, groups):
    assert device_groups(text) == groups


def test_pairs_are_a_ring():
    assert group_size("{{0,1},{1,2},{2,3},{3,0}}") == 4 and group_size("{{0,1},{2,3}}") == 2


def test_one_branch_of_a_conditional_runs():
    """Where a layer's weights are chosen among those of all layers there are as many branches."""
    copy = (
        '  ROOT %copy.{0} = bf16[8,{0}] copy(%p.{0}), backend_config={{"estimated_cycles":"{0}"}}'
    )
    branch = (
        "%branch.{0} (p.{0}: bf16[8,{0}]) -> bf16[8,{0}] {{\n  %p.{0} = bf16[8,{0}] parameter(0)\n"
    )
    text = (
        "".join(map((branch + copy + "\n}}\n\n").format, (20, 30, 10)))
        + """\
ENTRY %main (n: s32[], p: bf16[8,30]) -> bf16[8,30] {
  %n = s32[] parameter(0)
  %p = bf16[8,30] parameter(1)
  ROOT %conditional.1 = bf16[8,30] conditional(%n, %p, %p, %p), branch_computations={%branch.20, \
%branch.30, %branch.10}
}
"""
    )
    costs = Module(text).costs()
    assert sum(costs.cycles.values()) == 30 and sum(costs.bytes.values()) == 2 * 2 * 8 * 30


TPU = """\
HloModule jit_f, is_scheduled=true

FileNames
1 "/home/me/src/shoal/model/linear.py"
2 "/home/me/src/shoal/model/transformer.py"

FunctionNames
1 "linear"
2 "block"

FileLocations
1 {file_name_id=2 function_name_id=2 line=251 end_line=251 column=1 end_column=9}
2 {file_name_id=1 function_name_id=1 line=29 end_line=29 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%fused.1 (p: bf16[8,16]) -> (bf16[8,64], u32[]) {
  %p = bf16[8,16]{1,0} parameter(0)
  %all-gather.1 = bf16[8,64]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=3, \
replica_groups=mesh['axis_0'=4] {'axis_0'}, dimensions={1}, metadata={op_name="jit(f)/dot_general" \
stack_frame_id=2}
  ROOT %tuple.1 = (bf16[8,64]{1,0}, u32[]) tuple(%all-gather.1)
}

%fused.2 (p: bf16[8,16]) -> bf16[8,64] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[8,64]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=3, \
replica_groups=mesh['axis_0'=4] {'axis_0'}, dimensions={1}, metadata={op_name="jit(f)/dot_general" \
stack_frame_id=2}
}

%all-reduce-scatter.1 (p: f32[64,16]) -> f32[16,16] {
  %p = f32[64,16]{1,0} parameter(0)
  %all-reduce.1 = f32[64,16]{1,0} all-reduce(%p), channel_id=4, replica_groups={{0,1,2,3}}, \
to_apply=%add
  ROOT %dynamic-slice.1 = f32[16,16]{1,0} dynamic-slice(%all-reduce.1, %p), \
dynamic_slice_sizes={16,16}
}

%body (s: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %s = (s32[], bf16[8,16]{1,0}) parameter(0)
  %gte = bf16[8,16]{1,0} get-tuple-element(%s), index=1
  %fusion.1 = (bf16[8,64]{1,0}, u32[]) fusion(%gte), kind=kCustom, calls=%fused.1, \
metadata={op_name="jit(f)/dot_general" stack_frame_id=2}, \
backend_config={"window_config":{"estimated_cycles":"100"}}
  %fusion.2 = bf16[8,64]{1,0} fusion(%gte), kind=kCustom, calls=%fused.2, \
metadata={op_name="jit(f)/dot_general" stack_frame_id=2}, \
backend_config={"window_config":{"estimated_cycles":"50"}}
  ROOT %tuple.2 = (s32[], bf16[8,16]{1,0}) tuple(%gte)
}

%condition (s: (s32[], bf16[8,16])) -> pred[] {
  %s = (s32[], bf16[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %constant.1 = s32[] constant(32)
  ROOT %compare.1 = pred[] compare(%i, %constant.1), direction=LT
}

%called (p: f32[64,16]) -> f32[16,16] {
  %p = f32[64,16]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = f32[16,16]{1,0} reduce-scatter(%p), channel_id=5, \
replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}

ENTRY %main (a: bf16[8,16], b: f32[64,16]) -> f32[16,16] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = f32[64,16]{1,0} parameter(1)
  %tuple.3 = (s32[], bf16[8,16]{1,0}) tuple(%a)
  %while.1 = (s32[], bf16[8,16]{1,0}) while(%tuple.3), condition=%condition, body=%body
  %dot.1 = f32[64,16]{1,0} add(%b, %b), metadata={op_name="jit(f)/dot_general" stack_frame_id=2}
  %call-start.1 = ((f32[64,16]{1,0}), f32[16,16]{1,0}) call-start(%dot.1), \
async_execution_thread="sparsecore", to_apply=%called
  %call-done.1 = f32[16,16]{1,0} call-done(%call-start.1)
  ROOT %fusion.3 = f32[16,16]{1,0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1, \
metadata={op_name="jit(f)/add" stack_frame_id=1}, \
backend_config={"window_config":{"estimated_cycles":"7"}}
}
"""
"""As libtpu writes it: a gather that two fusions share, a sum of which a fusion keeps a part, one
that a SparseCore makes beside, cycles, stack frames."""


OF_A_GPU = """HloModule m

%fused (p: f32[8,1000], t: f32[8,1000], i: s32[8,1]) -> f32[8] {
  %p = f32[8,1000]{1,0} parameter(0)
  %t = f32[8,1000]{1,0} parameter(1)
  %i = s32[8,1]{1,0} parameter(2)
  %divide.1 = f32[8,1000]{1,0} divide(%p, %t)
  ROOT %gather.1 = f32[8]{0} gather(%divide.1, %i), slice_sizes={1,1}
}

ENTRY %main (a: f32[8,1000], b: f32[8,1000], i: s32[8,1], cache: bf16[4000]) -> f32[8] {
  %a = f32[8,1000]{1,0} parameter(0)
  %b = f32[8,1000]{1,0} parameter(1)
  %i = s32[8,1]{1,0} parameter(2)
  %cache = bf16[4000]{0} parameter(3)
  %kernel.1 = (f32[8]{0}, bf16[4000]{0}) custom-call(%i, %cache), \
custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{1}: (1, {})}, \
api_version=API_VERSION_TYPED_FFI, metadata={op_name="jit(f)/decode_kernel/pallas_call"}
  ROOT %fusion.1 = f32[8]{0} fusion(%a, %b, %i), kind=kLoop, calls=%fused
}
"""


def test_a_gpu_reads_what_a_gather_needs_and_a_share_of_what_a_kernel_writes_into():
    """8 numbers, their places and what is gathered of two arrays; and of the kernel's 8 KB a
    quarter, and not twice."""
    costs = Module(OF_A_GPU).costs(kernel_share=0.25)
    assert [size for _, size, _ in costs.operations] == [(32 + 8000 + 32) / 4, 32 + 32 + 32 + 32]
    assert costs.in_kernels == (32 + 8000 + 32) / 4


def test_the_room_that_a_product_has_for_itself_is_not_counted_as_written():
    text = """HloModule m

ENTRY %main (x: bf16[8,16], w: bf16[16,4]) -> bf16[8,4] {
  %x = bf16[8,16]{1,0} parameter(0)
  %w = bf16[16,4]{1,0} parameter(1)
  %product.1 = (bf16[8,4]{1,0}, s8[4194304]{0}) custom-call(%x, %w), \
custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/dot_general"}
  ROOT %result.1 = bf16[8,4]{1,0} get-tuple-element(%product.1), index=0
}
"""
    assert [size for _, size, _ in Module(text).costs().operations] == [2 * (8 * 16 + 16 * 4 + 32)]


def test_the_kernel_of_states_writes_all_that_it_reads():
    """4,000 numbers of 2 bytes in place, 8 places, 8 numbers out; it has no products of
    matrices."""
    costs = Module(OF_A_GPU.replace("decode_kernel", "delta_step")).costs(kernel_share=0.25)
    assert costs.operations[0].bytes == 32 + 8000 + 32 + 8000
    assert costs.in_kernels == 0.0


def test_a_fusion_within_a_fusion_reads_the_layer_that_it_takes_of_a_stack():
    """1,024 of 4,096 bytes, 32 of x, 64 written; the whole stack where it is also summed."""
    text = """HloModule m

%layer (p: bf16[4,16,32]) -> bf16[16,32] {
  %p = bf16[4,16,32]{2,1,0} parameter(0)
  ROOT %slice.1 = bf16[1,16,32]{2,1,0} slice(%p), slice={[1:2], [0:16], [0:32]}
}

%product (s: bf16[4,16,32], x: bf16[1,16]) -> bf16[1,32] {
  %s = bf16[4,16,32]{2,1,0} parameter(0)
  %x = bf16[1,16]{1,0} parameter(1)
  %w = bf16[16,32]{1,0} fusion(%s), kind=kLoop, calls=%layer
  ROOT %dot.1 = bf16[1,32]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
}

ENTRY %main (a: bf16[4,16,32], x: bf16[1,16]) -> bf16[1,32] {
  %a = bf16[4,16,32]{2,1,0} parameter(0)
  %x = bf16[1,16]{1,0} parameter(1)
  ROOT %fusion.1 = bf16[1,32]{1,0} fusion(%a, %x), kind=kOutput, calls=%product
}
"""
    summed = text.replace(
        "  ROOT %dot.1", "  %sum.1 = bf16[16]{0} reduce(%s), dimensions={0,2}\n  ROOT %dot.1"
    )
    assert [Module(one).costs().operations[0][1] for one in (text, summed)] == [
        1024 + 32 + 64,
        4096 + 32 + 64,
    ]


def test_decodings_kernels_on_a_tpu_take_as_long_as_what_they_move_at_the_memorys_rate():
    """Of attention a quarter of 8,064 bytes, its live pages, at 2 a cycle; of states all of them.
    Nothing is copied beside it."""
    text = """HloModule m

ENTRY %main (q: f32[8], cache: bf16[4000]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %cache = bf16[4000]{0} parameter(1)
  ROOT %k = f32[8]{0} custom-call(%q, %cache), target="tpu_custom_call", \
metadata={op_name="/decode_kernel/"}
}
"""
    costs = Module(text).costs(memory_rate=2.0, kernel_share=0.25)
    assert list(costs.cycles.values()) == [1008] and costs.in_kernels == costs.memory == 2016
    of_states = Module(text.replace("decode_kernel", "delta_step"))
    costs = of_states.costs(memory_rate=2.0, kernel_share=0.25)
    assert list(costs.cycles.values()) == [4032] and costs.memory == 8064
    assert costs.in_kernels == 0.0


def test_a_gather_inside_asynchronous_fusions_counts_once():
    costs = Module(TPU).costs()
    gather, beside, scatter = costs.collectives
    assert (gather.kind, gather.bytes, gather.times) == ("all-gather", 8 * 64 * 2, 32)
    assert gather.source == "model/linear.py:29 < model/transformer.py:251 dot_general"
    assert [(one.kind, one.bytes, one.times) for one in (beside, scatter)] == [
        ("reduce-scatter", 64 * 16 * 4, 1)
    ] * 2
    assert beside.source == gather.source
    assert scatter.source == "model/transformer.py:251 add"
    assert sum(costs.cycles.values()) == 32 * 150 + 7 and not costs.unknown


def test_an_operation_without_an_estimate_is_not_counted_as_the_largest_integer():
    costs = Module(
        TPU.replace('"estimated_cycles":"50"', f'"estimated_cycles":"{2**63 - 1}"')
    ).costs()
    assert sum(costs.cycles.values()) == 32 * 100 + 7
    assert costs.unknown == [(32, 2 * 8 * (16 + 64), 0.0)]
    assert np.isclose(costs.cycles["model/transformer.py:251 add"], 7)


FRAMES = """\
HloModule jit_f

FileNames
1 "/home/me/src/shoal/trainer/step.py"
2 "/home/me/src/shoal/mesh/programs.py"
3 "/home/me/src/shoal/plan/analysis.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=377 end_line=377 column=1 end_column=9}
2 {file_name_id=2 function_name_id=1 line=170 end_line=170 column=1 end_column=9}
3 {file_name_id=3 function_name_id=1 line=52 end_line=52 column=1 end_column=9}

StackFrames
1 {file_location_id=3 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=1 parent_frame_id=3}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0), metadata={op_name="a" stack_frame_id=2}
  ROOT %add.1 = f32[8]{0} add(%a, %a), metadata={op_name="jit(f)/add" stack_frame_id=3}
}
"""


@pytest.mark.parametrize("parent", ["3", "2"], ids=["all frames", "without Program.trace"])
def test_the_code_that_compiles_a_program_is_no_source_of_its_operations(parent):
    text = FRAMES.replace("parent_frame_id=3", f"parent_frame_id={parent}")
    module = Module(text)
    assert module.source(module.by_name["add.1"]) == "trainer/step.py:377 add"
    assert module.source(module.by_name["a"]) == "a"


def test_packages_installed_in_a_checkout_are_no_source():
    text = FRAMES.replace(
        "/home/me/src/shoal/trainer/step.py", "/shoal/.venv/lib/site-packages/optax/update.py"
    )
    module = Module(text)
    assert module.source(module.by_name["add.1"]) == "add"


COPIES = """\
%fused (p: bf16[64,64], q: bf16[1000]) -> bf16[64,64] {
  %p = bf16[64,64]{1,0} parameter(0)
  ROOT %q = bf16[64,64]{1,0:S(1)} add(%p, %p)
}

ENTRY %main (a: bf16[1000], b: bf16[4000]) -> bf16[64,64] {
  %a = bf16[1000]{0} parameter(0)
  %b = bf16[4000]{0} parameter(1)
  %first = (bf16[1000]{0:S(1)}, bf16[1000]{0}, u32[]{:S(2)}) copy-start(%a)
  %second = ((bf16[4000]{0}), bf16[2000]{0:S(1)}, s32[]{:S(2)}) slice-start(%b), slice={[0:2000]}
  %busy = bf16[500]{0:S(1)} fusion(%a), kind=kLoop, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"400"}}
  %quiet = bf16[500]{0:S(1)} fusion(%busy), kind=kLoop, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"100"}}
  %done = bf16[1000]{0:S(1)} copy-done(%first)
  %third = (bf16[1000]{0}, bf16[1000]{0:S(1)}, u32[]{:S(2)}) copy-start(%done)
  %rest = bf16[2000]{0:S(1)} slice-done(%second)
  ROOT %out = bf16[1000]{0} copy-done(%third)
}
"""


def test_copies_run_beside_operations_while_these_leave_the_memory_free():
    """By hand, 10 bytes a cycle. `busy` reads 2,000 bytes in 400 cycles and leaves 2,000 to copies:
    all of the first; `quiet` 1,000 of the second's 4,000. The second waits for 300 cycles, the
    third, behind it, for its own 200."""
    costs = Module(COPIES).costs(memory_rate=10.0)
    waits = []
    for source, cycles in costs.cycles.items():
        if source.startswith("waits for"):
            waits.append(cycles)
    assert waits == [300.0, 200.0] and sum(costs.cycles.values()) == 1000
    assert costs.memory == 2000 + 2000 + 4000 + 2000
    assert sum(Module(COPIES).costs().cycles.values()) == 500


def one_collective(shape: str, op: str) -> tuple[str, int]:
    """(kind, bytes of the whole arrays) of a collective over four devices."""
    done = f"  %done = f32[8]{{0}} {op.replace('start', 'done')}(%start)\n" * op.endswith("start")
    costs = Module(f"""ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[64,16]{{1,0}} parameter(0)
  %start = {shape} {op}(%a), channel_id=1, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
{done}}}""").costs()
    (found,) = costs.collectives
    return found.kind, found.bytes


@pytest.mark.parametrize(
    ("shape", "op", "whole"),
    [
        # at once: results; of a reduce-scatter the part that each keeps
        ("bf16[64,16]{1,0}", "all-gather", 2048),
        ("f32[16,16]{1,0}", "reduce-scatter", 4096),
        ("(f32[16,16]{1,0}, f32[4]{0})", "reduce-scatter", 4096 + 64),
        ("(f32[64,16]{1,0}, f32[16]{0})", "all-reduce", 4096 + 64),
        # as GPUs start them: operands and results, each an array or several
        ("(bf16[16,16]{1,0}, bf16[64,16]{1,0})", "all-gather-start", 2048),
        (
            "((bf16[16,16]{1,0:T(8,128)(2,1)}, bf16[4]{0}), (bf16[64,16]{1,0:T(8,128)(2,1)}, "
            "bf16[16]{0}))",
            "all-gather-start",
            2048 + 32,
        ),
        ("((f32[64,16]{1,0}), f32[16,16]{1,0})", "reduce-scatter-start", 4096),
        (
            "((f32[64,16]{1,0}, f32[16]{0}), (f32[16,16]{1,0}, f32[4]{0}))",
            "reduce-scatter-start",
            4096 + 64,
        ),
        ("f32[268]{0}", "all-reduce-start", 1072),
        ("(f32[64,16]{1,0}, /*index=1*/f32[16]{0})", "all-reduce-start", 4096 + 64),
        ("((bf16[8,16]{1,0}), bf16[8,16]{1,0})", "all-to-all-start", 256),
        ("(f32[64]{0}, f32[64]{0}, u32[], u32[])", "collective-permute-start", 256),
        (
            "((f32[64]{0}, f32[16]{0}), (f32[64]{0}, f32[16]{0}), u32[], u32[])",
            "collective-permute-start",
            256 + 64,
        ),
    ],
)
def test_each_form_of_a_collective_counts_its_whole_arrays_once(shape, op, whole):
    assert one_collective(shape, op) == (op.removesuffix("-start"), whole)


def test_an_asynchronous_transfer_reads_and_writes_its_arrays_once():
    shape = "((f32[64,16]{1,0}), f32[16,16]{1,0})"
    text = f"""ENTRY %main (a: f32[64,16]) -> f32[16,16] {{
  %a = f32[64,16]{{1,0}} parameter(0)
  %start = {shape} reduce-scatter-start(%a), channel_id=1, replica_groups={{{{0,1,2,3}}}}, \
dimensions={{0}}
  ROOT %done = f32[16,16]{{1,0}} reduce-scatter-done(%start)
}}"""
    costs = Module(text).costs()
    assert sum(costs.bytes.values()) == 4096 + 1024
    # its time is the transfer's: on a GPU it was counted as an operation, too
    assert costs.operations == []


@pytest.mark.parametrize(
    ("topology", "axes", "ways", "hops"),
    [
        ("v5p:4x4x8", {"fsdp": 128}, 6, 8),
        ("v5p:4x4x8", {"fsdp": 8, "data": 16}, 2, 4),
        ("v5p:4x4x8", {"fsdp": 16, "data": 8}, 3, 5),  # half of an axis has no way round
        ("v5p:4x4x8", {"fsdp": 4, "data": 32}, 1, 3),
        ("v5p:4x4x4", {"fsdp": 64}, 6, 6),
        ("v5p:2x2x2", {"fsdp": 8}, 3, 3),
        ("v6e:8x16", {"fsdp": 128}, 3, 15),
        ("v6e:8x8", {"fsdp": 64}, 2, 14),
    ],
)
def test_only_a_whole_axis_of_a_torus_has_two_ways(topology, axes, ways, hops):
    found = parse_topology(topology)
    shape = found.shape if len(found.shape) == 3 else (*found.shape, 1)
    devices = np.array(
        [
            SimpleNamespace(id=number, slice_index=0, coords=coords)
            for number, coords in enumerate(np.ndindex(*shape))
        ]
    )
    mesh: Any = SimpleNamespace(devices=devices.reshape(axes.get("data", 1), axes["fsdp"]))
    rate, seconds = link_of(found, found.accelerator, mesh, range(axes["fsdp"]))
    assert rate == ways * found.accelerator.link and seconds == pytest.approx(hops * 1e-6)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [("all-reduce", 2e-5 + 2 * 3 / 4 * 4096 / 450e9), ("all-gather", 1e-5 + 3 / 4 * 4096 / 450e9)],
)
def test_a_small_transfer_takes_its_latency(kind, seconds):
    """Of four GPUs of a machine; a sum is scattered, then gathered."""
    found = parse_topology("h200:4")
    mesh: Any = SimpleNamespace(
        devices=np.array([SimpleNamespace(id=n, coords=(0, 0, n)) for n in range(4)]),
        size=4,
        axis_names=("fsdp",),
    )
    (row,) = transfer_rows(
        [Collective(kind, 4096, 5.0, "{{0,1,2,3}}", "")], found, found.accelerator, mesh
    )
    assert row.seconds == pytest.approx(5 * seconds)


@pytest.mark.parametrize(
    ("kind", "group", "rate"),
    [
        ("all-gather", range(32), 8 * 50e9),
        ("reduce-scatter", range(0, 32, 8), 50e9),
        ("all-to-all", range(32), 50e9),
    ],
)
def test_machines_exchange_an_array_over_the_network_of_all_their_devices(kind, group, rate):
    """Four machines of eight GPUs: of an array that all get, each brings a part into its
    machine."""
    found = parse_topology("h200:4x8")
    devices = []
    for n in range(32):
        devices.append(SimpleNamespace(id=n, slice_index=0, coords=(n // 8, n % 8, 0)))
    mesh: Any = SimpleNamespace(devices=np.array(devices), size=32, axis_names=("fsdp",))
    groups = f"{{{{{','.join(map(str, group))}}}}}"
    (row,) = transfer_rows(
        [Collective(kind, 32 << 20, 1.0, groups, "")], found, found.accelerator, mesh
    )
    assert row.seconds == pytest.approx(3e-5 + (len(group) - 1) / len(group) * (32 << 20) / rate)


def test_pairs_of_chips_exchange_along_one_way_and_wait_for_the_farthest():
    """A ring over 2x2x2 chips in the order of their numbers: from 1 to 2 and from 3 to 4 are two
    and three steps."""
    found = parse_topology("v5p:2x2x2")
    devices = []
    for n in range(8):
        devices.append(SimpleNamespace(id=n, slice_index=0, coords=(n % 2, n // 2 % 2, n // 4)))
    mesh: Any = SimpleNamespace(devices=np.array(devices), size=8, axis_names=("fsdp",))
    pairs = ",".join(f"{{{n},{(n + 1) % 8}}}" for n in range(8))
    (row,) = transfer_rows(
        [Collective("collective-permute", 1 << 20, 1.0, f"{{{pairs}}}", "")],
        found,
        found.accelerator,
        mesh,
    )
    assert row.seconds == pytest.approx((1 << 20) / 100e9 + 3e-6)


def test_a_loop_in_steps_of_two_runs_half_as_often():
    """XLA unrolls a product whose parts devices exchange: its cycles would count twice."""
    last = "  ROOT %tuple.2 = (s32[], bf16[8,16]{1,0}) tuple("
    assert last in TPU
    unrolled = TPU.replace(
        last,
        f"""  %i = s32[] get-tuple-element(%s), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
{last}%next, """,
    )
    costs = Module(unrolled).costs()
    assert sum(costs.cycles.values()) == 16 * 150 + 7 and costs.assumed == []


def test_what_follows_a_kernel_counts():
    """A kernel's configuration is written in lines of its own, which begin as the end of a
    computation does."""
    text = TPU.replace(
        "  %dot.1 =",
        """  %kernel.1 = f32[8]{0} custom-call(%b), frontend_attributes={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(f)/forward_kernel"}
  %dot.1 =""",
    )
    assert Module(text).costs().cycles == Module(TPU).costs().cycles


@pytest.mark.parametrize(("platform", "width"), [("gpu", 64), ("tpu", 128)])
def test_a_kernel_is_counted_by_the_share_that_is_read(platform, width):
    """The products of the three kernels of a gradient: two, three and four. A TPU's heads of 64
    fill registers of 128."""
    q, k = (jax.ShapeDtypeStruct((1, 512, heads, 64), jnp.bfloat16) for heads in (4, 2))
    ones = Tokens.of(*[jnp.ones((1, 512), jnp.int32)] * 2)

    def loss(q, k):
        if platform == "tpu":
            angles, pairs = (jnp.zeros((1, 512, 64)),) * 2, tpu_attention.block_pairs(ones, ones)
            flat = (jax.lax.collapse(x, 2) for x in (q, k, k))
            return tpu_attention.attend_rows(*flat, angles, pairs).astype(jnp.float32).sum()
        readings = gpu_attention.block_lists(ones, ones, gpu_attention.block_size(64, q.dtype))
        return gpu_attention.attend_rows(q, k, k, readings).astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(q, k).jaxpr
    found = []
    for share in (0.5, 0.25):
        found.append(jaxpr_flops(jaxpr, of_kernels=True, kernel_share=share))
    assert found == [share * (2 + 3 + 4) * 2 * 512 * 512 * 4 * width for share in (0.5, 0.25)]


def test_products_by_kernels_are_counted_whatever_attention_reads():
    """32 rows by matrices of 8 x 16; not those whose result nothing reads."""
    shapes = (32, 8), (4, 8, 16)
    x, matrices = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    def product(x, matrices):
        tiles = grouped_gpu.tiles_of(jnp.full(4, 8), 32)
        grouped_gpu.product(x, -matrices, tiles, x.dtype)
        return grouped_gpu.product(x, matrices, tiles, x.dtype)

    jaxpr = jax.make_jaxpr(product)(x, matrices).jaxpr
    assert jaxpr_flops(jaxpr, of_kernels=True, kernel_share=0.25) == 2 * 32 * 8 * 16


def test_products_of_experts_on_tpus_are_counted_by_the_rows_of_each_group():
    """1,024 rows in 4 groups, times matrices of 8 x 16, forward and for both gradients: XLA's
    `ragged_dot`, and JAX's kernels, whatever attention reads."""
    shapes = (1024, 8), (4, 8, 16)
    x, matrices = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    def loss(x, matrices):
        product = linear(matrices, x, groups=Groups(jnp.full(4, 256)))
        return product.astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, matrices).jaxpr
    of_product = 2 * 1024 * 8 * 16
    assert jaxpr_flops(jaxpr, kernel_share=0.25) == 3 * of_product
    assert jaxpr_flops(jaxpr, of_kernels=True, kernel_share=0.25) == 3 * of_product


def test_the_body_of_a_shard_map_counts_once_for_each_manual_part():
    mesh = jax.make_mesh((2, 4), ("replica", "tensor"))
    product = jax.shard_map(
        jnp.matmul,
        mesh=mesh,
        in_specs=(PartitionSpec("replica"), PartitionSpec()),
        out_specs=PartitionSpec("replica"),
        axis_names={"replica"},
        check_vma=False,
    )
    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert jaxpr_flops(jax.make_jaxpr(product)(square, square).jaxpr) == 2 * 8**3
