"""Decoding's kernels, in interpret mode: their numbers are the other form's, and a slot's bits its
own."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import QWEN3, roles

from shoal.config.commands import GenerateConfig
from shoal.job.job import Job
from shoal.mesh import Role
from shoal.model.architecture import Layer
from shoal.model.attention import decode_gpu, decode_tpu, selector
from shoal.model.attention import tpu as tpu_attention
from shoal.model.attention import trials as kernel_trials
from shoal.model.attention.caches import PAGE, KeyCache, PagedCache, in_pages
from shoal.model.attention.decode import Keys, SlotAttention, SlotTokens, online_softmax
from shoal.model.attention.decode_gpu import attend_slots, block_keys, slots_at_once
from shoal.model.attention.decode_tpu import Tiles, attend_pages
from shoal.model.attention.reference import attend
from shoal.model.attention.selector import decodes_by_kernel
from shoal.model.attention.softmax import RunningSoftmax, Scoring
from shoal.model.rotary import rotary, rotate
from shoal.model.transformer import Model
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.sampler.engine import Engine
from shoal.weights.source import ModelSource

PREFIX_LEN, POSITION = np.array([1, 64, 100]), np.array([[0, 1], [63, 64], [127, 90]])
EVERY, ONE = 1, 10**6
"""Programs that are wanted: a program then takes every slot of a row, or one."""


class Inputs(NamedTuple):
    heads: Any
    cos: Any
    sin: Any
    keys: Any


def drawn(share: int, width: int, dtype: Any = jnp.float32, seed: int = 0) -> Inputs:
    """Three rows of two slots, two key heads; prompts and completions of up to 128 tokens."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    angles = jnp.asarray(rng.uniform(0, 6, (3, 2, width // 2)), jnp.float32)
    own, prompt = (3, 2, 2, 128, width), (3, 2, 128, width)
    return Inputs(
        draw(3, 2, 2 * share + 4, width),
        jnp.cos(angles),
        jnp.sin(angles),
        (draw(*prompt), draw(*prompt), draw(*own), draw(*own)),
    )


@partial(jax.jit, static_argnums=1)
def by_kernel(inputs: Inputs, programs: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return attend_slots(*inputs, jnp.asarray(PREFIX_LEN), jnp.asarray(POSITION), True, programs)


@jax.jit
def by_softmax(inputs: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    heads, cos, sin, (prefix_k, prefix_v, own_k, own_v) = inputs
    q, k, v = jnp.split(heads, (heads.shape[2] - 4, heads.shape[2] - 2), axis=2)
    q, k = (rotate(x, cos[:, :, None], sin[:, :, None]) for x in (q, k))
    row, slot, head = jnp.indices(k.shape[:3], sparse=True)
    own_k, own_v = (
        old.at[row, slot, head, POSITION[..., None]].set(new)
        for old, new in ((own_k, k), (own_v, v))
    )
    prompt = Keys(prefix_k, prefix_v, jnp.arange(128) < PREFIX_LEN[:, None, None])
    own = Keys(own_k, own_v, jnp.arange(128) <= POSITION[..., None])
    out = online_softmax(q[:, :, None], prompt, [own], jnp.int32(128), jnp.int32(128), (64, 64))
    return out[:, :, 0], own_k, own_v


@pytest.mark.parametrize(
    ("share", "width", "dtype", "programs", "tolerance"),
    [
        (3, 32, jnp.float32, EVERY, 2e-6),
        (3, 32, jnp.float32, ONE, 2e-6),
        (10, 16, jnp.float32, EVERY, 2e-6),
        (6, 128, jnp.bfloat16, EVERY, 2e-2),
    ],
)
def test_it_gives_what_the_other_form_gives(share, width, dtype, programs, tolerance):
    """At the edges of blocks, with query heads that fill no power of two; the last case has the
    tiles of a GPU."""
    inputs = drawn(share, width, dtype)
    assert dtype == jnp.float32 or block_keys(width, dtype) == 64
    for ours, theirs in zip(by_kernel(inputs, programs), by_softmax(inputs), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (ours, theirs)), atol=tolerance, rtol=tolerance
        )


def test_each_slot_may_read_other_keys_of_its_rows_prompt():
    """As with a window: the last 70 keys of prompt and completion together, of each slot; for some
    slots that is a part of the second block of the prompt, and for one none of its keys."""
    heads, _, _, (prefix_k, prefix_v, own_k, own_v) = drawn(2, 32)
    q = heads[:, :, :4]
    end = PREFIX_LEN[:, None] + POSITION
    first = (end - 69)[..., None]
    number = np.arange(128)
    prompt_mask = (number < PREFIX_LEN[:, None, None]) & (number >= first)
    own_mask = (number <= POSITION[..., None]) & (PREFIX_LEN[:, None, None] + number >= first)
    prompt = Keys(prefix_k, prefix_v, jnp.asarray(prompt_mask))
    own = Keys(own_k, own_v, jnp.asarray(own_mask))
    out = online_softmax(q[:, :, None], prompt, [own], jnp.int32(128), jnp.int32(128), (64, 64))
    for row, slot in np.ndindex(3, 2):
        mask = jnp.asarray(np.concatenate([prompt_mask[row, slot], own_mask[row, slot]]))
        k = jnp.concatenate([prefix_k[row], own_k[row, slot]], 1).swapaxes(0, 1)
        v = jnp.concatenate([prefix_v[row], own_v[row, slot]], 1).swapaxes(0, 1)
        wanted = attend(q[row, slot][None, None], k[None], v[None], mask[None, None])
        np.testing.assert_allclose(out[row, slot], wanted[0], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_caps_and_sinks_over_caches_are_those_of_float64(cap, has_sinks):
    """Over keys that two devices have, too: their sums are joined before the sinks are added."""
    heads, _, _, (prefix_k, prefix_v, own_k, own_v) = drawn(2, 32)
    q = heads[:, :, :4]
    sinks = np.random.default_rng(1).standard_normal(4) + 2
    first = (PREFIX_LEN[:, None] + POSITION - 69)[..., None]  # of a window of 70
    number = np.arange(128)
    prompt_mask = (number < PREFIX_LEN[:, None, None]) & (number >= first)
    own_mask = (number <= POSITION[..., None]) & (PREFIX_LEN[:, None, None] + number >= first)
    prompt = Keys(prefix_k, prefix_v, jnp.asarray(prompt_mask))
    own = Keys(own_k, own_v, jnp.asarray(own_mask))

    def twice(running: RunningSoftmax) -> RunningSoftmax:
        return RunningSoftmax(running.top, 2 * running.total, 2 * running.out)

    for devices, merge in ((1, None), (2, twice)):
        count = jnp.int32(128)
        inputs = q[:, :, None], prompt, [own], count, count, (64, 64), merge
        of_heads = jnp.asarray(sinks, jnp.float32) if has_sinks else None
        out = online_softmax(*inputs, Scoring(cap), of_heads)
        for row, slot, head in np.ndindex(3, 2, 4):
            mask = np.concatenate([prompt_mask[row, slot], own_mask[row, slot]])
            of_head = []
            for before, after in ((prefix_k, own_k), (prefix_v, own_v)):
                both = np.concatenate([before[row, head // 2], after[row, slot, head // 2]])
                of_head.append(both.astype(np.float64)[mask])
            k, v = of_head
            scores = k @ np.asarray(q[row, slot, head], np.float64) * 32**-0.5
            if cap:
                scores = cap * np.tanh(scores / cap)
            weights = devices * np.exp(scores)
            total = weights.sum() + has_sinks * np.exp(sinks[head])
            np.testing.assert_allclose(out[row, slot, 0, head], weights @ v / total, atol=2e-6)


@pytest.mark.slow
@pytest.mark.bitwise
@pytest.mark.parametrize("programs", [EVERY, ONE])
def test_a_slots_bits_are_its_own(programs):
    """Whatever its neighbours hold, and whatever lies beyond its own keys and its prompt's."""
    base, other = drawn(3, 32), drawn(3, 32, seed=1)
    row, slot = 1, 1
    beyond = []
    for n in (PREFIX_LEN[row], PREFIX_LEN[row], POSITION[row, slot], POSITION[row, slot]):
        beyond.append(np.arange(128) >= n)

    def mixed(
        own: jax.Array, strange: jax.Array, at: tuple[int, ...], where: Any = False
    ) -> jax.Array:
        kept = jnp.where(where, strange[at], own[at])
        return strange.at[at].set(kept)

    places = (row,), (row,), (row, slot), (row, slot)
    keys = tuple(
        mixed(own, strange, at, mask[:, None])
        for own, strange, at, mask in zip(base.keys, other.keys, places, beyond, strict=True)
    )
    inputs = Inputs(
        *(
            mixed(own, strange, (row, slot))
            for own, strange in zip(base[:3], other[:3], strict=True)
        ),
        keys,
    )
    assert np.array_equal(
        by_kernel(base, programs)[0][row, slot], by_kernel(inputs, programs)[0][row, slot]
    )


class Paged(NamedTuple):
    q: Any
    prompts: Any
    own: Any
    prefix_len: Any
    length: Any
    pages: Any


def paged(width: int, heads: int, seed: int = 0, dtype: Any = jnp.float32) -> Paged:
    """Four rows of two slots, three query heads to a key head; prompts of up to 256 tokens,
    completions of up to 384 in scattered pages of a pool. Lengths at the edges of pages; a slot and
    a row that sample nothing."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    pages = rng.permutation(30)[:24].reshape(4, 2, 3)
    return Paged(
        draw(4, 2, 3 * heads, width),
        draw(4, heads, 2 * PAGE, 2 * width),
        draw(30, heads, PAGE, 2 * width),
        np.int32([1, 128, 0, 256]),
        np.int32([[1, 0], [128, 129], [0, 0], [384, 300]]),
        np.int32(pages),
    )


by_pages = jax.jit(partial(attend_pages, interpret=True))


@jax.jit
def by_softmax_of_pages(inputs: Paged) -> jax.Array:
    q, prompts, pool, prefix_len, length, pages = inputs
    own, width = pool[pages].swapaxes(2, 3), q.shape[-1]
    own = own.reshape(4, 2, -1, 3 * PAGE, 2 * width)
    prompt = Keys(
        prompts[..., :width],
        prompts[..., width:],
        jnp.arange(prompts.shape[2]) < prefix_len[:, None, None],
    )
    mine = Keys(own[..., :width], own[..., width:], jnp.arange(own.shape[3]) < length[..., None])
    return online_softmax(
        q[:, :, None], prompt, [mine], jnp.int32(256), jnp.int32(384), (256, 384)
    )[:, :, 0]


@pytest.mark.parametrize(
    ("width", "heads", "dtype", "tolerance"),
    [(64, 2, jnp.float32, 2e-6), (128, 4, jnp.bfloat16, 2e-2)],
)
def test_a_tpus_gives_what_the_other_form_gives(monkeypatch, width, heads, dtype, tolerance):
    """With heads of half a register's lanes, and with heads in two steps."""
    inputs = paged(width, heads, dtype=dtype)
    monkeypatch.setattr(decode_tpu, "BUFFER_BYTES", 2 << 18)
    assert Tiles.of(4, 2, heads, 2, 3, 4 * PAGE * width).heads == 2
    ours, theirs = (
        np.asarray(x, np.float32)[[0, 1, 1, 3, 3], [0, 0, 1, 0, 1]]
        for x in (by_pages(*inputs), by_softmax_of_pages(inputs))
    )
    np.testing.assert_allclose(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.bitwise
def test_a_tpus_slots_bits_are_its_own_wherever_its_pages_are():
    """Whatever its neighbours and all other pages hold, how long these are, and what lies beyond
    its own keys."""
    base, other = paged(64, 2), paged(64, 2, seed=1)
    row, slot = 1, 1
    kept = (np.arange(2 * PAGE) < base.prefix_len[row])[:, None]
    pool, pages = np.array(other.own), np.array(other.pages)
    for number in range(2):  # its 129 keys
        held = (np.arange(PAGE) < base.length[row, slot] - number * PAGE)[:, None]
        at = pages[row, slot, number]
        pool[at] = np.where(held, base.own[base.pages[row, slot, number]], pool[at])
    inputs = Paged(
        other.q.at[row, slot].set(base.q[row, slot]),
        other.prompts.at[row].set(jnp.where(kept, base.prompts[row], other.prompts[row])),
        pool,
        np.where(np.arange(4) == row, base.prefix_len, base.prefix_len[::-1]),
        np.where(np.arange(8).reshape(4, 2) == 3, base.length, base.length[::-1, ::-1]),
        pages,
    )
    assert np.array_equal(by_pages(*base)[row, slot], by_pages(*inputs)[row, slot])


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_on_several_devices_each_has_its_heads(monkeypatch, platform):
    """Two of them, each with one of two key heads, as on one."""

    def decode_kernel_refusal(model, layer=None):
        return ""

    monkeypatch.setattr(selector, "decode_kernel_refusal", decode_kernel_refusal)
    monkeypatch.setattr(Role, "platform", platform)
    for module, kernel in ((decode_gpu, attend_slots), (decode_tpu, attend_pages)):
        monkeypatch.setattr(module, kernel.__name__, partial(kernel, interpret=True))
    a, inputs = replace(QWEN3, head_dim=32), drawn(2, 32)
    q, k, v = jnp.split(inputs.heads, (4, 6), axis=2)
    keys, live = KeyCache(*inputs.keys), jnp.arange(6).reshape(3, 2) != 3
    pages = jnp.arange(6).reshape(3, 2, 1) if platform == "tpu" else None
    if platform == "tpu":
        own = in_pages(*inputs.keys[2:])
        prompts = jnp.concatenate(inputs.keys[:2], -1)
        keys = PagedCache(prompts, own.reshape(-1, *own.shape[3:]))

    def results(tensor: int) -> list[np.ndarray]:
        model = Model(a, roles(1, 1, tensor).sampler)
        slots = SlotTokens(
            jnp.asarray(PREFIX_LEN),
            jnp.asarray(POSITION),
            jnp.int32(0),
            jnp.int32(0),
            live,
            pages,
        )
        attention = SlotAttention(model, Layer(), slots)
        given = {"rope": rotary(a, slots[0][:, None] + slots[1])[0]} if platform == "gpu" else {}
        step = jax.jit(lambda *args: attention(*args, **given))
        return [np.asarray(x) for x in jax.tree.leaves(step(q, k, v, keys))]

    for one, two in zip(results(1), results(2), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)


def test_without_it_where_it_cannot_run(monkeypatch):
    """`auto` says why at the head of a run, and goes on; asked for by key it is an error."""
    role = roles(1, 1, 1).sampler

    def model(head_dim: int, **changes: Any) -> Model:
        return Model(replace(QWEN3, head_dim=head_dim), role, **changes)

    assert not decodes_by_kernel(model(64))
    monkeypatch.setattr(Role, "platform", "gpu")
    assert decodes_by_kernel(model(64)) and not decodes_by_kernel(model(64, attention="blocked"))
    assert not decodes_by_kernel(model(80))
    with pytest.raises(
        ShoalError, match="heads of 32, 64, 128 or 256 dimensions, and the model's head_dim is 80"
    ):
        Engine(
            model(80, attention="pallas"),
            slots=4,
            group_size=2,
            max_prompt_tokens=8,
            max_completion_tokens=8,
            eos_ids=(),
        )
    monkeypatch.setattr(Role, "platform", "tpu")
    assert decodes_by_kernel(model(64)) and not decodes_by_kernel(model(80))
    with pytest.raises(
        ShoalError, match="it needs heads of a multiple of 64, and the model's head_dim is 80; with"
    ):
        decodes_by_kernel(model(80, attention="pallas"))
    monkeypatch.setattr(Role, "platform", "gpu")
    wide = Model(QWEN3, roles(1, 1, 4).sampler)
    assert (
        "on 2 devices: it needs mesh.sampler_tensor of at most 2"
        in selector.decode_kernel_refusal(wide)
    )
    monkeypatch.setattr(jax, "local_devices", list)  # the kernels are tried on none
    out, spec = io.StringIO(), ModelSource(Path(), replace(QWEN3, head_dim=80), lambda *_: None)
    with Job(
        GenerateConfig(), Console(out), model_source=spec, devices=list(role.mesh.devices.flat)
    ) as job:
        assert job.model.attention == "auto"
    assert (
        out.getvalue()
        == "decoding goes without its kernel: it needs heads of 32, 64, 128 or 256 dimensions, and "
        "the model's head_dim is 80\n"
    )


def test_what_a_tpu_reads_in_a_turn_fits_its_memory():
    """64 places of 8B in groups of 8, in two parts of their heads; of 70B on 8 devices four rows at
    once, two steps; one prompt of 16,384 tokens and one head; 32 siblings in float32: a page of all
    at once."""
    assert [
        tuple(Tiles.of(*sizes))
        for sizes in (
            (8, 8, 8, 2, 4, 2**16),
            (8, 8, 1, 2, 4, 2**16),
            (1, 1, 1, 128, 128, 2**16),
            (4, 32, 8, 4, 4, 2**17),
        )
    ] == [(1, 4, 2, 1), (4, 1, 2, 1), (1, 1, 4, 4), (1, 1, 4, 1)]


@pytest.mark.slow
def test_more_slots_a_program_where_there_are_enough_programs():
    """256 places of 1.5B in groups of 8: two slots; of 8B, with 8 key heads: all; one prompt:
    one."""
    assert [
        slots_at_once(*sizes)
        for sizes in (
            (32, 8, 2, 6, 128),
            (32, 8, 8, 4, 128),
            (1, 8, 2, 6, 128),
            (64, 8, 8, 16, 128),
            (64, 8, 8, 16, 256),
        )
    ] == [2, 8, 1, 4, 2]


@pytest.mark.slow
def test_a_device_on_which_it_gives_other_results_does_without(monkeypatch):
    def block_size(*_):
        return 16

    monkeypatch.setattr(kernel_trials, "block_size", block_size)
    device = jax.devices()[0]
    assert kernel_trials.fault_on(device, 2, 32, "float32", interpret=True) == ""
    monkeypatch.setattr(decode_gpu, "LOG2E", 1.4)
    assert "their results in decoding differ" in kernel_trials.fault_on(
        device, 1, 32, "float32", interpret=True
    )


@pytest.mark.slow
def test_a_tpu_on_which_it_gives_other_results_does_without(monkeypatch):
    device = type("Device", (), {"platform": "tpu"})()  # where numbers are drawn is the CPU

    def device_put(x, _):
        return x

    monkeypatch.setattr(jax, "device_put", device_put)
    assert kernel_trials.fault_on(device, 2, 64, "float32", interpret=True) == ""
    assert "interpret mode" in kernel_trials.fault_on(device, 2, 64, "float32")
    with monkeypatch.context() as patched:
        patched.setattr(tpu_attention, "LOG2E", 1.4)
        assert "their values differ" in kernel_trials.fault_on(
            device, 3, 64, "float32", interpret=True
        )
    right = decode_tpu.attend_pages

    def attend_pages(*args, **keys):
        return right(*args, **keys) * 1.01

    monkeypatch.setattr(kernel_trials, "attend_pages", attend_pages)
    assert "their results in decoding differ" in kernel_trials.fault_on(
        device, 1, 64, "float32", interpret=True
    )
