"""The compiled steps of sampling: prefill, join, decode and others, over N rows of W slots.

The slots of a row are siblings: completions of one prompt, whose keys the row holds once. A group
of more than W completions takes several rows. Its first W siblings enter together with the prompt
(prefill), the others later, into rows to which the prompt's keys are copied (join). Which of the
two depends only on a sibling's number within its request. So one set of programs (N, W, a bucket of
prompt lengths) gives a completion the same bits whatever the other slots do and whenever it
enters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shoal.mesh import MAX_IN_FLIGHT, Program, Role
from shoal.mesh.programs import CHUNKED_OPTIONS, SAMPLER_OPTIONS
from shoal.model.architecture import Architecture, Layer
from shoal.model.attention import caches as kv_caches
from shoal.model.attention import selector
from shoal.model.attention.blocked import block_size
from shoal.model.attention.caches import (
    RING_SLACK,
    Cache,
    ContextSlots,
    PrefillChunkKeys,
    entries_at,
)
from shoal.model.attention.decode import SlotTokens
from shoal.model.attention.selector import attention_kind, prompt_reads
from shoal.model.block import LayerAux, LayerInputs, PromptKeys, SharedKeys, block
from shoal.model.compiler_habits import computed_once, products_joined, scales_folded
from shoal.model.head import logits
from shoal.model.layers import by_layer, unstacked
from shoal.model.norms import layer_norm
from shoal.model.parameters import Block, LayerEmbedding
from shoal.model.passes import Context, PrefillChunk, Prompts, Slots
from shoal.model.recurrence import empty_state
from shoal.model.rotary import Ropes, rotary
from shoal.model.transformer import Model, embed, forward, layer_embeddings, through_layers
from shoal.records import Params
from shoal.sampler.decode_state import (
    OUT_OF_RANGE_ROW,
    DecodeState,
    StateSizes,
    idle_state,
    state_shapes,
    swap_in_rows,
    swap_out_rows,
)
from shoal.sampler.sample_tokens import (
    BLOCK,
    SAMPLING_TYPES,
    TPU_BLOCK,
    SamplingArrays,
    sample_tokens,
    uniform,
)

DECODE_CHUNK = 32
"""Most tokens that a slot samples in one decode; after each decode the host searches for stop
strings."""

PREFILL_CHUNK = 1024
"""Tokens of a prompt that are computed at once, of a chunked prefill, if attention has no kernel of
its own (see `prefill_chunk_size`)."""

TURNS_AT_ONCE = 4
"""A decode ends when one in this many of the turns under way has ended."""

FEED = 256
"""Tokens of a context that one feed computes at once; the rest, shorter than this, is computed one
by one in decoding."""
FEED_ROWS = 4
"""Completions of a replica in one feed. A constant, whatever the number of rows, because other
shapes give other bits."""

PROGRAMS_KEPT = 4
"""Sets of programs (models, sizes) that this process keeps: a second engine like an earlier one
compiles nothing."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledTokens:
    """Tokens that one step sampled. A slot's tokens are the first `count` of its column."""

    token: Any  # int32[steps, rows, W]
    logprob: Any  # float32[steps, rows, W]
    count: Any  # int32[rows, W]
    done: Any  # bool[rows, W]
    eos: Any  # bool[rows, W]: the slot ended with an end-of-sequence token
    # int32[steps, rows, W, K]: the tokens that each token was sampled from; None if not recorded
    support_ids: Any = None
    # Of a decode, unsigned[steps, rows, W, layers with experts, k]: the experts of the token that
    # was the input of each step, the one before the step's own; None if not recorded.
    experts: Any = None
    # Of a prefill, for each layer with experts unsigned[rows, T, k]: the experts of the prompts'
    # tokens; None if not recorded.
    prompt_experts: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewRows:
    """Rows of a replica that a prefill or a join fills, at most R, each with up to W completions of
    one prompt. Nothing is written for a row past the end."""

    rows: Any  # int32[R]
    limit: Any  # int32[R, W]: most tokens of each completion; 0: the slot stays unused
    keys: Any  # uint32[R, W, 2]: the address of each completion's noise
    sampling: SamplingArrays  # [R] each: temperature and truncation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TurnStarts:
    """How slots [N, W] begin their next turn in a decode: after which tokens, and the tokens of
    context that they get before they sample."""

    resumed: Any  # int32[N, W]: number of tokens of the completion; 0: the slot begins no turn
    last: Any  # int32[N, W]: the last token of the completion
    num_forced: Any  # int32[N, W]: how many of the slot's next tokens are context, not sampled
    forced: Any  # int32[N, W, DECODE_CHUNK]: these tokens of context, then padding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptTokens:
    """Prompts [R, T] of a prefill: what all layers need to know of them."""

    rows: Any  # int32[R]: where they go; nothing is written for a row past the end
    length: Any  # int32[R]
    rope: Ropes  # rotary angles
    reads: Any  # of `prompt_reads`; () if the prompts are computed in chunks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContextTokens:
    """Tokens [M, C] of context of a feed: what all layers need to know of them."""

    at: ContextSlots
    prefix_len: Any  # int32[M]: lengths of the completions' prompts
    rope: Ropes  # rotary angles


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Embedded:
    """Tokens of a prefill or a feed, ready for the layers."""

    x: Any  # [R, T, D]: enters the first layer
    # `LayerInputs` of all L layers, [L, R, T, ...]; or a tuple of each layer's by itself, [R, T,
    # ...], if the layers are compiled one by one
    inputs: Any
    tokens: Any  # `PromptTokens` or `ContextTokens`


class ComputedLayer(NamedTuple):
    """What the program of one layer returns."""

    x: Any  # [R, T, D]: the layer's output
    cache: Any  # the layer's `Cache`, with what the tokens left
    experts: Any  # the `_chosen_experts`; () if none are recorded
    keys: Any  # `SharedKeys` for other layers; None if none reads them


class TokenChoice(NamedTuple):
    """How tokens are chosen, as far as programs are compiled for it."""

    eos_ids: tuple[int, ...]
    truncated: bool  # with top-k, top-p and min-p
    max_support: int  # K, the most tokens that truncation keeps; 0: none are recorded
    records_experts: bool = False  # the experts of each token are recorded


@lru_cache(PROGRAMS_KEPT)
def make_programs(
    model: Model,
    sizes: StateSizes,
    eos_ids: tuple[int, ...],
    truncated: bool,
    max_support: int,
    prefill_chunk: int,
    records_experts: bool = False,
) -> dict[str, Program]:
    """Returns the programs of an engine by name, each compiled at its first call: "make_state",
    "prefill", "join", "decode", "feed", "swap_out", "swap_in". If the model's layers are compiled
    one by one, "prefill" and "feed" compute one layer, "embed" and "embed context" what comes
    before the layers, and "begin" what comes after them: `run_program` calls them in turn.

    `eos_ids`: tokens that end a completion. `truncated`, `max_support`, `records_experts`: see
    `TokenChoice`. Prompts longer than `prefill_chunk` tokens are computed in chunks of that many
    (see `prefill_chunk_size`).

    Equal arguments give the same dict, which must not be changed: the last PROGRAMS_KEPT are
    kept."""
    # A turn's end is seen when the decodes in flight have sampled this much beyond it.
    assert DECODE_CHUNK * MAX_IN_FLIGHT <= RING_SLACK, (
        "rings would lose keys that windows still read"
    )
    get_sharding = attrgetter("sharding")
    layout = jax.tree.map(get_sharding, state_shapes(model, sizes))
    # Swapped-out rows bring their keys along, so they have no pool of pages.
    swapped = jax.tree.map(get_sharding, state_shapes(model, sizes._replace(pages=0)))
    choice = TokenChoice(eos_ids, truncated, max_support, records_experts)
    role = model.role.with_options(SAMPLER_OPTIONS)
    decoding = model.role.with_options(CHUNKED_OPTIONS) if model.ffn_chunks > 1 else role
    compiler = _StepCompiler(model, choice, layout, role)
    make_state = partial(idle_state, model, sizes)
    programs = {
        "make_state": model.role.jit(make_state, out_shardings=layout),
        "join": compiler.sampling_step("join", _join),
        "decode": replace(compiler, role=decoding).sampling_step("decode", _decode),
        "swap_out": role.jit(partial(swap_out_rows, role), out_shardings=swapped),
        "swap_in": role.jit(partial(swap_in_rows, role), donate_argnums=0, out_shardings=layout),
    }
    # 0 unless the layers are compiled one by one
    if model.ffn_chunks:
        return programs | _programs_by_layer(compiler, prefill_chunk)
    return programs | _whole_programs(compiler, prefill_chunk)


@dataclass(frozen=True)
class _StepCompiler:
    """What the steps of an engine, which run on each replica's rows, have in common."""

    model: Model
    choice: TokenChoice
    layout: DecodeState  # how each array of the state is split over devices
    role: Role  # the sampler's, with the options of the compiler

    @property
    def by_row(self) -> PartitionSpec:
        """Each replica has its own rows of an array."""
        return PartitionSpec(self.model.role.row_axes)

    def placed(self, *axes: str | None) -> NamedSharding:
        """Returns the sharding of an array whose first dimension is rows, and whose next ones are
        split over mesh axes."""
        return NamedSharding(self.model.role.mesh, PartitionSpec(self.model.role.row_axes, *axes))

    def step(
        self,
        step: Callable,
        specs: Any,
        shardings: Any,
        donated: Any = "state",
        queued: bool = True,
    ) -> Program:
        """Returns the program of a step. `specs`, `shardings`: of its results, within a replica's
        mesh (see `_by_replica`) and outside. `donated`: names of the arguments whose memory the
        results may use. `queued`: see `Program`."""
        # The state is donated, because the caches are most of a sampler's memory.
        return self.role.jit(
            partial(_by_replica, step, self.model, specs),
            queued,
            donate_argnames=donated,
            out_shardings=shardings,
        )

    def sampling_step(self, name: str, step: Callable) -> Program:
        """Returns the program of a step that samples tokens, like "prefill"; `name` decides which
        `SampledTokens` it records."""
        tokens = _tokens_by_row(self.model.role, self.choice, name)
        # Sampled tokens keep their sharding: if the compiler chose another, the next call would
        # compile again.
        sampled = jax.tree.map(partial(NamedSharding, self.model.role.mesh), tokens)
        return self.step(
            partial(step, choice=self.choice), (self.by_row, tokens), (self.layout, sampled)
        )


def _whole_programs(compiler: _StepCompiler, prefill_chunk: int) -> dict[str, Program]:
    """Returns "prefill" and "feed" as programs that compute all layers."""
    feed = partial(_feed, records_experts=compiler.choice.records_experts)
    by_row = compiler.by_row
    return {
        "prefill": compiler.sampling_step(
            "prefill", partial(_prefill, prefill_chunk=prefill_chunk)
        ),
        "feed": compiler.step(feed, (by_row, by_row), (compiler.layout, compiler.placed())),
    }


def _programs_by_layer(compiler: _StepCompiler, prefill_chunk: int) -> dict[str, Program]:
    """Returns "prefill" and "feed" as programs of one layer, for each kind of layer, with the
    programs of what comes before and after the layers."""
    by_row, placed = compiler.by_row, compiler.placed()
    # Arguments stay on the devices from program to program: what all layers need is embedded too.
    of_prompts = partial(_with_inputs_by_layer, partial(embed_prompts, prefill_chunk=prefill_chunk))
    of_context = partial(_with_inputs_by_layer, embed_context)
    programs = {
        "embed": compiler.step(of_prompts, by_row, placed, donated=()),
        "embed context": compiler.step(of_context, by_row, placed, donated=()),
    }
    architecture = compiler.model.architecture
    for number, (layer, is_read) in enumerate(_programs_of_layers(architecture)):
        cache = compiler.layout.caches[architecture.marked_layers.index((layer, is_read))]
        compile_layer = partial(compiler.step, specs=by_row, donated=("x", "cache"), queued=False)
        of_layer = {
            "layer": layer,
            "records_experts": compiler.choice.records_experts,
            "is_read": is_read,
        }
        # Keys that a layer leaves for others are [R, T, K, A] of prompts, [R, K, T, A] in caches.
        programs[_of_kind("prefill", number)] = compile_layer(
            partial(_prefill_layer, prefill_chunk=prefill_chunk, **of_layer),
            shardings=ComputedLayer(placed, cache, placed, compiler.placed(None, "tensor")),
        )
        programs[_of_kind("feed", number)] = compile_layer(
            partial(_feed_layer, **of_layer),
            shardings=ComputedLayer(placed, cache, placed, compiler.placed("tensor")),
        )
    without_caches = replace(compiler, layout=replace(compiler.layout, caches=()))
    programs["begin"] = without_caches.sampling_step("begin", _after_layers)
    return programs


def _programs_of_layers(a: Architecture) -> tuple[tuple[Layer, bool], ...]:
    """Returns the entries of `Architecture.marked_layers` that differ: each has a program."""
    return tuple(dict.fromkeys(a.marked_layers))


def _of_kind(name: str, number: int) -> str:
    """Returns the name of the program that computes one layer, of the kind with this number in
    `_programs_of_layers`: the step's name for the first kind."""
    return f"{name} {number}" if number else name


def run_program(
    model: Model,
    programs: Mapping[str, Callable],
    name: str,
    parameters: Params,
    state: DecodeState,
    arrays: Mapping[str, Any],
) -> tuple[DecodeState, Any]:
    """Starts "prefill", "join", "feed" or "decode" on a state, without waiting, and returns (the
    next state, the `SampledTokens`; of "feed", which samples none, the experts that `_feed`
    returns). `arrays`: the other arguments of the step, as `empty_batch`, `empty_feed` and
    `no_turn_starts` begin them.

    If the model's layers are compiled one by one, this function calls the program of "prefill" or
    "feed" once for each layer.

    `state` is donated: it must not be used afterwards."""
    if name not in ("prefill", "feed") or "embed" not in programs:
        return programs[name](parameters, state=state, **arrays)
    if name == "prefill":
        return _prefill_one_by_one(model, programs, parameters, state, **arrays)
    return _feed_one_by_one(model, programs, parameters, state, **arrays)


def _prefill_one_by_one(
    model: Model,
    programs: Mapping[str, Callable],
    parameters: Params,
    state: DecodeState,
    *,
    tokens: Any,
    length: Any,
    new_rows: NewRows,
) -> tuple[DecodeState, SampledTokens]:
    """Calls the programs that compute what `_prefill` does."""
    embedded = programs["embed"](
        _tables(parameters), tokens=tokens, length=length, rows=new_rows.rows
    )
    x, caches, experts = _run_layers(model, programs, "prefill", parameters, state, embedded)
    # This program needs neither the layers nor the caches.
    state, sampled = programs["begin"](
        replace(parameters, blocks=()),
        state=replace(state, caches=()),
        x=x,
        length=embedded.tokens.length,
        new_rows=replace(new_rows, rows=embedded.tokens.rows),
    )
    if experts:
        sampled = replace(sampled, prompt_experts=experts)
    return replace(state, caches=caches), sampled


def _feed_one_by_one(
    model: Model,
    programs: Mapping[str, Callable],
    parameters: Params,
    state: DecodeState,
    *,
    tokens: Any,
    at: ContextSlots,
) -> tuple[DecodeState, tuple[jax.Array, ...]]:
    """Calls the programs that compute what `_feed` does."""
    embedded = programs["embed context"](
        _tables(parameters), tokens=tokens, at=at, prefix_len=state.prefix_len
    )
    _, caches, experts = _run_layers(model, programs, "feed", parameters, state, embedded)
    return replace(state, caches=caches), experts


def _run_layers(
    model: Model,
    programs: Mapping[str, Callable],
    name: str,
    parameters: Params,
    state: DecodeState,
    embedded: Embedded,
) -> tuple[jax.Array, tuple[Cache, ...], tuple[jax.Array, ...]]:
    """Calls the program of each layer for "prefill" or "feed". Returns (the last layer's output,
    the new caches, the experts of each layer that has some, () if none are recorded)."""
    layers = model.architecture.marked_layers
    kinds = _programs_of_layers(model.architecture)
    x = embedded.x
    caches = []
    experts: tuple[jax.Array, ...] = ()
    keys_of: list[SharedKeys | None] = []  # by the number of the layer that they are of
    by_layer = zip(layers, parameters.blocks, state.caches, embedded.inputs, strict=True)
    for marked, weights, cache, inputs in by_layer:
        layer, _ = marked
        program = programs[_of_kind(name, kinds.index(marked))]
        computed: ComputedLayer = program(
            weights,
            x=x,
            cache=cache,
            inputs=inputs,
            shared_keys=None if layer.keys_of is None else keys_of[layer.keys_of],
            tokens=embedded.tokens,
        )
        x = computed.x
        caches.append(computed.cache)
        experts += computed.experts
        keys_of.append(computed.keys)
    return x, tuple(caches), experts


def _tokens_by_row(role: Role, choice: TokenChoice, name: str) -> SampledTokens:
    """Returns the partition specs of the `SampledTokens` of the program called `name`: each replica
    has the tokens of its rows."""
    rows = PartitionSpec(role.row_axes)
    steps = PartitionSpec(None, role.row_axes)
    support_ids = steps if choice.max_support else None
    experts = steps if choice.records_experts and name == "decode" else None
    prompt_experts = rows if choice.records_experts and name == "prefill" else None
    return SampledTokens(steps, steps, rows, rows, rows, support_ids, experts, prompt_experts)


def _chosen_experts(model: Model, aux: Sequence[LayerAux]) -> tuple[jax.Array, ...]:
    """Returns the experts of tokens [R, T, k] in each of some layers that has experts, in the type
    that is recorded."""
    route_type = model.architecture.expert_sizes.route_type
    return tuple(layer.experts.astype(route_type) for layer in aux if layer.experts is not None)


def _next_tokens(
    model: Model,
    parameters: Params,
    hidden: jax.Array,
    sampling: SamplingArrays,
    noise: jax.Array,
    choice: TokenChoice,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Samples one token of each completion from the hidden states hidden[N, W, D] (after the last
    norm), with the uniform numbers noise[N, W]. Returns (tokens[N, W], log-probs[N, W], support
    ids[N, W, K]; None for the last if none are recorded)."""
    shape = noise.shape
    flat = jax.tree.map(lambda x: x.reshape(-1), sampling)
    is_tpu = model.role.platform == "tpu"
    if is_tpu:
        # so that the norm is computed once, not within the product
        hidden = jax.lax.optimization_barrier(hidden)
    scores = logits(model, parameters, hidden).reshape(-1, model.architecture.vocab_size)
    # The scores stay split over the vocabulary while the token is chosen.
    scores = model.role.constrain(scores, None, model.vocab_axis)
    split_over = model.role if model.vocab_axis else None
    vocab_block = TPU_BLOCK if is_tpu else BLOCK
    token, logprob, support_ids = sample_tokens(
        scores,
        flat,
        noise.reshape(-1),
        choice.truncated,
        choice.max_support,
        split_over,
        vocab_block,
    )
    if support_ids is not None:
        rows, siblings = shape
        support_ids = support_ids.reshape(rows, siblings, choice.max_support)
    return token.reshape(shape), logprob.reshape(shape), support_ids


def _is_eos(token: jax.Array, eos_ids: tuple[int, ...]) -> jax.Array:
    return jnp.isin(token, jnp.asarray(eos_ids, jnp.int32))


def recorded_calls(
    model: Model,
    programs: Mapping[str, Program],
    name: str,
    parameters: Params,
    state: DecodeState,
    arrays: Mapping[str, Any],
) -> dict[str, tuple[int, tuple, dict[str, Any]]]:
    """Returns which compiled programs `run_program` would call for these arguments, which are
    shapes instead of arrays: name -> (how often, its arguments, its keyword arguments), of several
    calls the last one's arguments. `name`: "prefill", "join", "feed" or "decode". Nothing runs."""
    calls: dict[str, Any] = {}

    def record(name: str, *args: Any, **arrays: Any) -> Any:
        """Notes a call of a program, and returns the shapes of its result."""
        times = 1
        if name in calls:
            times += calls[name][0]
        calls[name] = times, args, arrays
        return programs[name].eval_shape(*args, **arrays)

    recorders = {program: partial(record, program) for program in programs}
    run_program(model, recorders, name, parameters, state, arrays)
    return calls


def _by_replica(step: Callable, model: Model, out: Any, weights: Any, **by_row: Any) -> Any:
    """Runs a step on each replica's rows separately, and returns its results: replicas exchange
    nothing, and each decodes until its own last slot has ended. `out`: partition specs of the
    results. `weights`: what all replicas have; `by_row`: arguments that are split by row."""
    role = model.role
    if role.row_shards == 1:
        return step(weights, model=model, **by_row)

    def on_replica(weights: Any, by_row: dict[str, Any]) -> Any:
        """Runs the step on the rows of one replica."""
        # Rows are split already; the partitioner still splits heads and vocabulary over `tensor`.
        rules = tuple((axis, None if axis == "rows" else mapped) for axis, mapped in role.rules)
        inner = model.on(replace(role, mesh=jax.sharding.get_abstract_mesh(), rules=rules))
        return step(weights, model=inner, **by_row)

    return jax.shard_map(
        on_replica,
        mesh=role.mesh,
        in_specs=(PartitionSpec(), PartitionSpec(role.row_axes)),
        out_specs=out,
        axis_names=set(role.row_axes),
        check_vma=False,
    )(weights, by_row)


def empty_batch(positions: int, siblings: int, bucket: int) -> dict[str, Any]:
    """Returns the arguments of `_prefill` for prompts of `bucket` tokens (0: of `_join`) as NumPy
    arrays in which all positions are unused; the caller fills them. `positions`: R, how many rows
    the step can fill. `siblings`: W. The keys are `new_rows` and, for a prefill, `tokens` and
    `length`, for a join `sources`."""
    new_rows = NewRows(
        rows=np.full(positions, OUT_OF_RANGE_ROW, np.int32),
        limit=np.zeros((positions, siblings), np.int32),
        keys=np.zeros((positions, siblings, 2), np.uint32),
        sampling=jax.tree.map(partial(np.zeros, positions), SAMPLING_TYPES),
    )
    if not bucket:
        return {"new_rows": new_rows, "sources": np.zeros(positions, np.int32)}
    return {
        "new_rows": new_rows,
        "tokens": np.zeros((positions, bucket), np.int32),
        # 1, not 0: the index of the last token stays valid
        "length": np.ones(positions, np.int32),
    }


def _prefill(
    parameters: Params,
    *,
    state: DecodeState,
    tokens: jax.Array,
    length: jax.Array,
    new_rows: NewRows,
    model: Model,
    prefill_chunk: int,
    choice: TokenChoice,
) -> tuple[DecodeState, SampledTokens]:
    """Computes prompts tokens[R, T] of length[R], which get rows of their replica: writes what they
    leave to the caches, and samples the first token of up to W completions of each. If T is more
    than `prefill_chunk`, the prompts are computed in chunks of that many tokens, and T is a
    multiple of it. Returns (state, sampled tokens)."""
    embedded = embed_prompts(
        _tables(parameters),
        tokens=tokens,
        length=length,
        rows=new_rows.rows,
        model=model,
        prefill_chunk=prefill_chunk,
    )
    compute = _prompt_layers(model, embedded.tokens, tokens.shape[1], prefill_chunk)
    x, aux = through_layers(model, parameters.blocks, embedded.x, compute, inputs=embedded.inputs)
    caches = []
    for cache, of_layer in zip(state.caches, aux, strict=True):
        caches.append(cache.write_prompts(of_layer.cache, new_rows.rows, length, model.role))
    state, sampled = _after_layers(
        parameters,
        state=replace(state, caches=tuple(caches)),
        x=x,
        length=length,
        new_rows=new_rows,
        model=model,
        choice=choice,
    )
    if choice.records_experts:
        sampled = replace(sampled, prompt_experts=_chosen_experts(model, aux))
    return state, sampled


def _tables(parameters: Params) -> tuple[jax.Array, LayerEmbedding | None]:
    """Returns the parameters that embed tokens."""
    return parameters.embed_tokens, parameters.layer_embedding


def embed_prompts(
    tables: tuple[jax.Array, LayerEmbedding | None],
    *,
    tokens: jax.Array,
    length: jax.Array,
    rows: jax.Array,
    model: Model,
    prefill_chunk: int,
) -> Embedded:
    """Prepares prompts tokens[R, T] of length[R] for the layers, which write what they leave to
    rows[R]. `tables` are of `_tables`. If T is more than `prefill_chunk`, they are computed in
    chunks."""
    size = tokens.shape[1]
    position = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    x, inputs = _embed(tables, tokens, model)
    prompts = PromptTokens(
        rows=rows,
        length=length,
        rope=rotary(model.architecture, position),
        reads=prompt_reads(model, length, size) if size <= prefill_chunk else (),
    )
    return Embedded(x, inputs, prompts)


def embed_context(
    tables: tuple[jax.Array, LayerEmbedding | None],
    *,
    tokens: jax.Array,
    at: ContextSlots,
    prefix_len: jax.Array,
    model: Model,
) -> Embedded:
    """Prepares tokens[M, C] of context for the layers. prefix_len[N]: lengths of the prompts of all
    rows. `tables` are of `_tables`."""
    own_prefix_len = entries_at(prefix_len, at.rows)
    first = own_prefix_len + at.start
    position = first[:, None] + jnp.arange(tokens.shape[1])
    x, inputs = _embed(tables, tokens, model)
    context = ContextTokens(at, own_prefix_len, rotary(model.architecture, position))
    return Embedded(x, inputs, context)


def _embed(
    tables: tuple[jax.Array, LayerEmbedding | None], tokens: jax.Array, model: Model
) -> tuple[jax.Array, LayerInputs]:
    """Returns what enters the first layer for tokens[R, T], [R, T, D], and what each layer gets
    besides it, [L, R, T, ...]."""
    embed_tokens, layer_embedding = tables
    x = embed(model, embed_tokens, tokens, model.architecture.embedding_scale)
    return x, LayerInputs(layer_embeddings(model, layer_embedding, tokens, x))


def _with_inputs_by_layer(embed_step: Callable, tables: Any, **arguments: Any) -> Embedded:
    """Calls `embed_prompts` or `embed_context`, and returns what it does with the inputs of each
    layer by themselves: rows are then in front, as in all that passes between programs."""
    model: Model = arguments["model"]
    embedded: Embedded = embed_step(tables, **arguments)
    by_layer = unstacked(embedded.inputs, model.architecture.num_layers)
    return replace(embedded, inputs=by_layer)


def _prompt_layers(model: Model, tokens: PromptTokens, size: int, prefill_chunk: int) -> Callable:
    """Returns the function that computes a layer for prompts of `size` tokens with padding (a
    `ComputeLayer`): at once, or in chunks of `prefill_chunk` tokens if that is less."""
    if size > prefill_chunk:
        return partial(
            _in_prefill_chunks,
            model,
            rope=tokens.rope,
            length=tokens.length,
            prefill_chunk=prefill_chunk,
        )
    prompts = Prompts(model, tokens.length, size, tokens.reads)
    return partial(block, model, rope=tokens.rope, attention_pass=prompts)


def _prefill_layer(
    weights: Block,
    *,
    x: jax.Array,
    cache: Cache,
    inputs: LayerInputs,
    shared_keys: SharedKeys | None,
    tokens: PromptTokens,
    model: Model,
    layer: Layer,
    prefill_chunk: int,
    records_experts: bool,
    is_read: bool,
) -> ComputedLayer:
    """Computes one layer of prompts x[R, T, D], and writes what they leave to its cache.
    `inputs`[R, T, ...] are the layer's own; `shared_keys` what the layer left whose keys it reads;
    `is_read` is whether other layers read its keys."""
    compute = _prompt_layers(model, tokens, x.shape[1], prefill_chunk)
    x, aux = compute(layer, weights, x, cache=None, inputs=inputs, keys=shared_keys)
    cache = cache.write_prompts(aux.cache, tokens.rows, tokens.length, model.role)
    experts = _chosen_experts(model, (aux,)) if records_experts else ()
    return ComputedLayer(x, cache, experts, aux.keys if is_read else None)


def _after_layers(
    parameters: Params,
    *,
    state: DecodeState,
    x: jax.Array,
    length: jax.Array,
    new_rows: NewRows,
    model: Model,
    choice: TokenChoice,
) -> tuple[DecodeState, SampledTokens]:
    """Does what is left of a prefill after the layers, whose output is x[R, T, D]: sets the state
    of the rows, and samples the first tokens."""
    # Only the prompt's last state goes through the head: [R, V] logits, not [R, T, V].
    last = jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)[:, 0]  # [R, D]
    last = layer_norm(model, last, parameters.final_norm)
    return _sample_first_tokens(parameters, state, new_rows, length, last, model, choice)


def prefill_chunk_size(model: Model, longest: int) -> int:
    """Returns how many tokens of a prompt are computed at once: PREFILL_CHUNK if attention has no
    kernel of its own, else `longest`, the most tokens of a padded prompt. Longer prompts enter in
    chunks, all by one program.

    An attention kernel takes the longest prompt whole: in chunks 8B on a v6e takes twice as long
    for one of 16k tokens."""
    for layer in model.architecture.kinds:
        if layer.mixer != "attention":
            continue
        if attention_kind(model, 1, longest, layer) in ("reference", "blocked"):
            return PREFILL_CHUNK
    return longest


def _in_prefill_chunks(
    model: Model,
    layer: Layer,
    weights: Block,
    x: jax.Array,
    *,
    rope: Ropes,
    length: jax.Array,
    prefill_chunk: int,
    cache: None,
    inputs: LayerInputs,
    keys: SharedKeys | None,
) -> tuple[jax.Array, LayerAux]:
    """Computes one layer of prompts x[R, T, D] of length[R], `prefill_chunk` tokens at a time; T is
    a multiple of `prefill_chunk`. Returns (the layer's output, aux with `PromptKeys`, or with the
    `State` of a delta net, and with the tokens' experts). `inputs` are those of the layer; `keys`
    what the layer left whose keys it reads, if it has none. `cache` is unused: the argument that a
    layer has in decoding."""
    count, size, _ = x.shape
    longest = length.max()
    block_keys = block_size(prefill_chunk, model.role.platform)
    # what the chunks so far have left
    so_far: Any
    if layer.mixer == "delta_net":
        so_far = empty_state(model.architecture.delta_net_sizes, (count,), model.dtype)
    elif keys is not None:
        so_far = None
        keys = SharedKeys(None, None, PrefillChunkKeys.of(PromptKeys(keys.k, keys.v)))
    else:
        head_dim = model.architecture.head_dim_of(layer)
        zeros = jnp.zeros((count, model.key_heads_of(layer), size, head_dim), model.dtype)
        so_far = PrefillChunkKeys(zeros, zeros)
    experts = None
    if layer.feed_forward != "mlp":
        shape = (count, size, model.architecture.expert_sizes.experts_per_token)
        experts = jnp.zeros(shape, jnp.int32)

    def has_next(carry: tuple) -> jax.Array:
        number, _, _, _ = carry
        return number * prefill_chunk < longest

    def one_chunk(carry: tuple) -> tuple:
        """Computes the layer for the next chunk of all prompts. `carry`: (number of the chunk; x,
        the layer's output for earlier chunks and its input for the others; what earlier chunks
        left; the experts of earlier chunks)."""
        number, x, so_far, experts = carry
        start = number * prefill_chunk

        def own_tokens(whole: jax.Array) -> jax.Array:
            """Returns the chunk's tokens of an array of whole prompts."""
            return jax.lax.dynamic_slice_in_dim(whole, start, prefill_chunk, 1)

        own, own_rope, own_inputs = jax.tree.map(own_tokens, (x, rope, inputs))
        chunk_pass = PrefillChunk(model, length, start, size=prefill_chunk, block=block_keys)
        own, aux = block(
            model,
            layer,
            weights,
            own,
            rope=own_rope,
            attention_pass=chunk_pass,
            cache=so_far,
            inputs=own_inputs,
            keys=keys,
        )
        next_number = number + 1
        x = jax.lax.dynamic_update_slice_in_dim(x, own, start, 1)
        if experts is not None:
            experts = jax.lax.dynamic_update_slice_in_dim(experts, aux.experts, start, 1)
        return next_number, x, aux.cache, experts

    # Compute as many chunks as the longest prompt has: what the other prompts compute beyond their
    # ends is masked, like padding.
    first = jnp.int32(0), x, so_far, experts
    _, x, so_far, experts = jax.lax.while_loop(has_next, one_chunk, first)
    if not isinstance(so_far, PrefillChunkKeys):
        return x, LayerAux(so_far, experts)
    whole = so_far.of_prompts()
    return x, LayerAux(whole, experts, keys=SharedKeys(whole.k, whole.v, None))


def _join(
    parameters: Params,
    *,
    state: DecodeState,
    sources: jax.Array,
    new_rows: NewRows,
    model: Model,
    choice: TokenChoice,
) -> tuple[DecodeState, SampledTokens]:
    """Enters further completions of prompts that have a row into other rows of the same replica
    (vLLM: forks them): copies what the prompts left from rows sources[R], and samples the first
    tokens. Returns (state, sampled tokens)."""
    length = state.prefix_len[sources]
    last = state.last[sources]
    # Copy the keys once for each row that is filled: if rows were read through pointers, each
    # token's attention would gather rows of keys, which XLA for TPU makes a loop over them.
    caches = tuple(cache.copy_prompts(sources, new_rows.rows) for cache in state.caches)
    state = replace(state, caches=caches)
    return _sample_first_tokens(parameters, state, new_rows, length, last, model, choice)


def _sample_first_tokens(
    parameters: Params,
    state: DecodeState,
    new_rows: NewRows,
    length: jax.Array,
    last: jax.Array,
    model: Model,
    choice: TokenChoice,
) -> tuple[DecodeState, SampledTokens]:
    """Sets the state of new rows, which hold prompts of length[R], and samples their completions'
    first tokens from last[R, D], the hidden states of the prompts' last tokens after the last norm.
    Returns (state, sampled tokens)."""
    limit = new_rows.limit
    keys = new_rows.keys
    spread = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], limit.shape), new_rows.sampling)
    num_rows, siblings = limit.shape
    hidden = jnp.broadcast_to(last[:, None], (num_rows, siblings, last.shape[-1]))
    # position 0: the noise of each completion's first token
    first = jnp.zeros(limit.shape, jnp.int32)
    token, logprob, support_ids = _next_tokens(
        model, parameters, hidden, spread, uniform(keys, first), choice
    )
    used = limit > 0
    eos = used & _is_eos(token, choice.eos_ids)
    # also slots that are unused (limit 0)
    done = eos | (limit <= 1)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        # unused positions have a row past the end
        return old.at[new_rows.rows].set(new, mode="drop")

    state = DecodeState(
        caches=state.caches,
        prefix_len=put(state.prefix_len, length),
        last=put(state.last, last),
        token=put(state.token, token),
        length=put(state.length, first + 1),
        done=put(state.done, done),
        limit=put(state.limit, limit),
        keys=put(state.keys, keys),
        sampling=jax.tree.map(put, state.sampling, spread),
    )
    sampled = SampledTokens(token[None], logprob[None], used.astype(jnp.int32), done, eos)
    if support_ids is not None:
        sampled = replace(sampled, support_ids=support_ids[None])
    return state, sampled


def _feed(
    parameters: Params,
    *,
    state: DecodeState,
    tokens: jax.Array,
    at: ContextSlots,
    model: Model,
    records_experts: bool = False,
) -> tuple[DecodeState, tuple[jax.Array, ...]]:
    """Computes context tokens[M, C], and writes what they leave to the caches of their completions.
    Returns (state, with `records_experts` for each layer with experts those of the tokens,
    unsigned[M, C, k], else ())."""
    embedded = embed_context(
        _tables(parameters), tokens=tokens, at=at, prefix_len=state.prefix_len, model=model
    )
    read = [cache.read_completions(at) for cache in state.caches]
    compute = _context_layers(model, embedded.tokens)
    _, aux = through_layers(
        model, parameters.blocks, embedded.x, compute, read, inputs=embedded.inputs
    )
    caches = []
    for cache, of_layer in zip(state.caches, aux, strict=True):
        caches.append(cache.write_completions(of_layer.cache, at))
    experts = _chosen_experts(model, aux) if records_experts else ()
    return replace(state, caches=tuple(caches)), experts


def _context_layers(model: Model, tokens: ContextTokens) -> Callable:
    """Returns the function that computes a layer for tokens of context (a `ComputeLayer`)."""
    context = Context(model, tokens.prefix_len, tokens.at.start, tokens.at.count)
    rope = computed_once(tokens.rope)  # as in `forward`
    return partial(block, model, rope=rope, attention_pass=context)


def _feed_layer(
    weights: Block,
    *,
    x: jax.Array,
    cache: Cache,
    inputs: LayerInputs,
    shared_keys: SharedKeys | None,
    tokens: ContextTokens,
    model: Model,
    layer: Layer,
    records_experts: bool,
    is_read: bool,
) -> ComputedLayer:
    """Computes one layer of context x[M, C, D], and writes what it leaves to its cache. The
    arguments are those of `_prefill_layer`."""
    compute = _context_layers(model, tokens)
    read = cache.read_completions(tokens.at)
    x, aux = compute(layer, weights, x, cache=read, inputs=inputs, keys=shared_keys)
    cache = cache.write_completions(aux.cache, tokens.at)
    experts = _chosen_experts(model, (aux,)) if records_experts else ()
    return ComputedLayer(x, cache, experts, aux.keys if is_read else None)


def empty_feed(positions: int, pages: int = 0) -> dict[str, Any]:
    """Returns the arguments of `_feed` as NumPy arrays with all positions unused. `positions`: M,
    completions that one feed can have. `pages`: most pages of a completion; 0 if keys are not
    stored in pages. Keys: `tokens` and `at`."""
    table = None
    if pages:
        table = np.full((positions, pages), kv_caches.NO_PAGE, np.int32)
    at = ContextSlots(
        rows=np.full(positions, OUT_OF_RANGE_ROW, np.int32),
        slots=np.zeros(positions, np.int32),
        start=np.zeros(positions, np.int32),
        count=np.full(positions, FEED, np.int32),
        pages=table,
    )
    return {"tokens": np.zeros((positions, FEED), np.int32), "at": at}


def no_turn_starts(rows: int, siblings: int) -> TurnStarts:
    """Returns the argument of a decode in which no slot begins a turn, as NumPy arrays. The caller
    fills those in that do."""
    shape = rows, siblings
    return TurnStarts(
        resumed=np.zeros(shape, np.int32),
        last=np.zeros(shape, np.int32),
        num_forced=np.zeros(shape, np.int32),
        forced=np.zeros((rows, siblings, DECODE_CHUNK), np.int32),
    )


def _weights_for_decoding(model: Model, parameters: Params) -> Params:
    """Returns the weights in the layout that decoding reads fastest. Where that is another than
    they have, they are copied once for all tokens of a decode."""
    if model.role.platform == "cpu":
        # XLA for CPU copies each layer out of stacked weights before its products: in the loop, at
        # every token.
        return replace(parameters, blocks=by_layer(model, parameters.blocks))
    if model.role.platform != "gpu":
        return parameters
    joins_products = model.role.tensor == 1 and selector.decodes_by_kernel(model)
    blocks = []
    for weights in by_layer(model, parameters.blocks):
        weights = scales_folded(weights)
        if joins_products:
            # The copies are read and written once for all tokens of a decode. They spare two
            # launches a layer and token of attention, three of delta nets, and three times as many
            # with an adapter.
            weights = products_joined(weights)
        blocks.append(weights)
    return replace(parameters, blocks=tuple(blocks))


def _decode(
    parameters: Params,
    *,
    state: DecodeState,
    stopped: jax.Array,
    interrupt_after: jax.Array,
    turns: TurnStarts,
    model: Model,
    choice: TokenChoice,
    pages: Any = None,
) -> tuple[DecodeState, SampledTokens]:
    """Samples up to DECODE_CHUNK tokens in every slot that is neither done nor `stopped`[N, W] by
    the host. Stops earlier once interrupt_after[0, 0] rows or interrupt_after[0, 1] slots have
    ended in this decode; `interrupt_after` is int32[1, 2], the replica's part.

    Tokens that are given by `turns` have log-prob 0, and none of them ends the slot by being an
    end-of-sequence token. All other tokens are sampled with the noise of their positions, whether
    or not tokens before them were given. Keys are written to `pages`[N, W, T], which must suffice
    for all tokens; None if keys are not stored in pages. Returns (state, sampled tokens); `count`
    of the latter includes given tokens."""
    shape = state.token.shape
    parameters = _weights_for_decoding(model, parameters)
    is_resumed = turns.resumed > 0
    forced = jnp.moveaxis(turns.forced, -1, 0)  # [DECODE_CHUNK, N, W]
    start = replace(
        state,
        # a slot that is resumed may be marked as done, because its last turn has ended
        done=(state.done & ~is_resumed) | stopped,
        token=jnp.where(is_resumed, turns.last, state.token),
        length=jnp.where(is_resumed, turns.resumed, state.length),
    )
    rows, siblings = shape
    by_step = (DECODE_CHUNK, rows, siblings)
    empty = SampledTokens(
        jnp.zeros(by_step, jnp.int32),
        jnp.zeros(by_step, jnp.float32),
        jnp.zeros(shape, jnp.int32),
        start.done,
        jnp.zeros(shape, bool),
    )
    if choice.max_support:
        support_ids = jnp.zeros((DECODE_CHUNK, rows, siblings, choice.max_support), jnp.int32)
        empty = replace(empty, support_ids=support_ids)
    if choice.records_experts:
        a = model.architecture
        assert a.route_shape is not None
        routes = jnp.zeros((*by_step, *a.route_shape), a.expert_sizes.route_type)
        empty = replace(empty, experts=routes)
    # the longest prompt of a row that is still sampled: attention reads no block beyond it
    num_prefix = jnp.max(jnp.where(start.done.all(-1), 1, state.prefix_len))
    # Draw the noise of all tokens at once: a live slot's length grows by one at each token, and
    # Threefry on CPU is a loop of small operations.
    lengths = start.length + jnp.arange(DECODE_CHUNK)[:, None, None]
    noise = uniform(jnp.broadcast_to(state.keys, (DECODE_CHUNK, rows, siblings, 2)), lengths)

    def num_ended(done: jax.Array) -> jax.Array:
        """Returns the numbers of rows and of slots that have ended, int32[2]."""
        return jnp.stack([done.all(-1).sum(dtype=jnp.int32), done.sum(dtype=jnp.int32)])

    # numbers of ended rows and slots at which this decode stops
    stop_at = num_ended(start.done) + interrupt_after[0]

    def unfinished(step: jax.Array, done: jax.Array) -> jax.Array:
        return (step < DECODE_CHUNK) & ~done.all() & (num_ended(done) < stop_at).all()

    def one_token(carry: tuple[jax.Array, jax.Array, DecodeState, SampledTokens]) -> tuple:
        """Samples one token in every live slot. `carry`: (whether to go on; how many tokens this
        decode has sampled in a slot that is still live; the state; the tokens so far)."""
        _, step, s, out = carry
        position = s.length - 1
        # Most keys that a live slot has: attention reads no block beyond them.
        num_own = jnp.max(jnp.where(s.done, 1, s.length))
        tokens = SlotTokens(
            prefix_len=s.prefix_len,
            position=position,
            num_prefix=num_prefix,
            num_own=num_own,
            live=~s.done,
            pages=pages,
        )
        slots = Slots(model, tokens)
        positions = s.prefix_len[:, None] + position
        hidden, aux = forward(model, parameters, s.token, positions, slots, s.caches)
        caches = tuple(of_layer.cache for of_layer in aux)
        token, logprob, support_ids = _next_tokens(
            model, parameters, hidden, s.sampling, noise[step], choice
        )
        live = ~s.done
        # a live slot was live in each step before, so `step` counts its tokens
        is_forced = step < turns.num_forced
        token = jnp.where(is_forced, forced[step], token)
        logprob = jnp.where(is_forced, 0.0, logprob)
        # A finished slot is computed too, and writes its last token again at its own position,
        # where nobody reads.
        token = jnp.where(live, token, s.token)
        length = s.length + live
        eos = live & ~is_forced & _is_eos(token, choice.eos_ids)
        done = s.done | eos | (length >= s.limit)
        out = replace(
            out,
            token=out.token.at[step].set(token),
            logprob=out.logprob.at[step].set(logprob),
            count=out.count + live,
            done=done,
            eos=out.eos | eos,
        )
        if support_ids is not None:
            out = replace(out, support_ids=out.support_ids.at[step].set(support_ids))
        if choice.records_experts:
            experts = jnp.stack(_chosen_experts(model, aux), axis=2)  # [N, W, layers, k]
            out = replace(out, experts=out.experts.at[step].set(experts))
        new = replace(s, caches=caches, token=token, length=length, done=done)
        return unfinished(step + 1, done), step + 1, new, out

    def is_unfinished(carry: tuple) -> jax.Array:
        return carry[0]

    # A while loop, not a scan: it ends with the last live slot instead of after DECODE_CHUNK
    # tokens. Whether it goes on is part of its body, which XLA for GPU records as one graph; a
    # condition is launched operation by operation.
    first = unfinished(jnp.int32(0), start.done), jnp.int32(0), start, empty
    _, _, state, sampled = jax.lax.while_loop(is_unfinished, one_token, first)
    return state, sampled
