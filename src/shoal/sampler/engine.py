"""Runs the compiled steps of sampling over fixed slots: N groups of G siblings.

    submit -> Scheduler -> prefill (prompts enter free groups, each draws its first token)
                        -> decode  (every slot draws up to CHUNK tokens, ends early when all are done)
    collect <- tokens drawn in each step, gathered by request until all siblings of a group have ended

One compiled program (N, G, a bucket of prompt lengths) gives a completion the same bits whatever the others do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.mesh import Role
from shoal.model import kv_cache
from shoal.model.attention import prefill_attention
from shoal.model.kv_cache import KEY_BLOCK, LayerCache
from shoal.model.transformer import Model, forward, logits
from shoal.sampler.sample_tokens import SamplingArrays, sample_tokens, uniform
from shoal.sampler.scheduler import Admission, Scheduler
from shoal.types import Completion, Params, SampleRequest, ShoalError, StopReason

CHUNK = 32
"""Tokens a slot draws in one dispatch of the decoder; at its end finished groups make room."""

PROGRAMS_KEPT = 4
"""Engines of this process, other by shape or model, of which the next one like it traces and compiles nothing."""

MAX_IN_FLIGHT = 2
"""Compiled steps that may run undrained (DESIGN: contract 8)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """What the device holds between steps, for N groups of G slots. Donated from step to step."""

    caches: tuple[LayerCache, ...]
    prefix_len: Any  # int32[N]
    token: Any  # int32[N, G]: the last token drawn, not yet in the cache
    length: Any  # int32[N, G]: tokens drawn
    done: Any  # bool[N, G]
    limit: Any  # int32[N, G]: most tokens
    keys: Any  # uint32[N, G, 2]: the address of each completion
    sampling: SamplingArrays  # [N, G] each


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledTokens:
    """Tokens of one step; a slot's are the first `count` of its column."""

    token: Any  # int32[steps, rows, G]
    logprob: Any  # float32[steps, rows, G]
    count: Any  # int32[rows, G]
    done: Any  # bool[rows, G]
    eos: Any  # bool[rows, G]: it ended by drawing an end-of-sequence token
    support_ids: Any = None  # int32[steps, rows, G, K]: what each token was chosen from, where the engine tells it


@dataclass
class Progress:
    """What the host has gathered of one request."""

    request: SampleRequest
    tokens: list[list[int]]
    logprobs: list[list[float]]
    reasons: list[StopReason | None]
    support_ids: list[list[np.ndarray]]  # int32[K] by token, where the engine tells what it kept


class Engine:
    """The `Sampler` in this process. `slots` completions at once, in groups of `group_size`.

    `decode` turns token ids into text and is needed only where stop strings are used. With `truncated` the compiled
    program knows top-k, top-p and min-p (it then sorts the vocabulary at every token). `max_support` is K: truncation
    keeps at most so many tokens, and completions tell which, `extra["support_ids"]` int32[T, K].
    """

    fidelity = "exact"

    def __init__(
        self,
        model: Model,
        *,
        slots: int,
        group_size: int,
        max_prompt_tokens: int,
        max_completion_tokens: int,
        eos_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str] | None = None,
        truncated: bool = False,
        max_support: int = 0,
    ):
        shards = model.role.row_shards
        self.model, self.group_size, self.truncated = model, group_size, truncated
        self.max_support = min(max_support, model.architecture.vocab_size) if truncated else 0
        self.num_groups = _round_up(max(1, slots // group_size), shards)
        self.max_prompt_tokens, self.max_completion_tokens = max_prompt_tokens, max_completion_tokens
        self.eos_ids, self.decode_text = tuple(eos_ids), decode
        rows = min(self.num_groups, _round_up(max(1, self.num_groups // 4), shards))
        self.scheduler = Scheduler(self.num_groups, rows)
        self.version, self.parameters = -1, None
        self.progress: dict[int, Progress] = {}
        self.in_flight: deque[tuple[SampledTokens, tuple[int | None, ...]]] = deque()
        self.finished: list[Completion] = []
        self._stopped = np.zeros((self.num_groups, group_size), bool)
        sizes = (self.num_groups, group_size, _round_up(max_prompt_tokens, KEY_BLOCK),
                 _round_up(max_completion_tokens, KEY_BLOCK))
        self._slots: Slots | None = None
        self._layout, *programs = _programs(model, sizes, self.eos_ids, truncated, self.max_support)
        self.programs: dict[str, Callable] = dict(zip(("make_slots", "prefill", "decode"), programs, strict=True))

    # -- the Sampler protocol

    def load(self, version: int, params: Params) -> None:
        if not self.idle:
            raise RuntimeError(f"version {version} cannot be loaded while completions of {self.version} are drawn")
        self.version, self.parameters = version, params

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            self._check(request)
            self.scheduler.submit(request.id, prompt_bucket(len(request.prompt_ids)))
            n = request.num_completions
            self.progress[request.id] = Progress(
                request, [[] for _ in range(n)], [[] for _ in range(n)], [None] * n, [[] for _ in range(n)])

    def step(self) -> bool:
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            return False
        if (admission := self.scheduler.admit()) is not None:
            self._start_prefill(admission)
            return True
        if self.scheduler.running and not self._decoding:
            self._start_decode()
            return True
        return False

    def collect(self) -> list[Completion]:
        if not self.finished and self.in_flight:
            self._drain_one()
        while self.in_flight and _ready(self.in_flight[0][0]):
            self._drain_one()
        finished, self.finished = self.finished, []
        return finished

    def cancel(self, id: int) -> None:
        """What was drawn so far is returned by `collect`, with StopReason.CANCELLED."""
        progress = self.progress[id]
        for index, reason in enumerate(progress.reasons):
            if reason is None:
                self._end(progress, index, StopReason.CANCELLED)
        self._hand_over_if_done(id)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is to be collected."""
        return self.scheduler.idle and not self.in_flight and not self.finished

    def slot_shapes(self) -> Slots:
        """Shapes, types and layout of caches and slots; nothing is allocated."""
        shapes = jax.eval_shape(self.programs["make_slots"])
        return jax.tree.map(lambda shape, place: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place),
                            shapes, self._layout)

    def release_memory(self) -> None:
        """Lets go of caches and weights until the next `load`; compiled programs stay. Only when idle."""
        if not self.idle:
            raise RuntimeError("an engine with requests under way cannot be parked")
        self._slots, self.parameters = None, None

    # -- dispatch

    @property
    def _decoding(self) -> bool:
        """A decode step is in flight: what it finished is not known yet, so another would be a guess."""
        return any(drawn.token.shape[1] == self.num_groups and drawn.token.shape[0] == CHUNK
                   for drawn, _ in self.in_flight)

    def _start_prefill(self, admission: Admission) -> None:
        rows, siblings = self.scheduler.prefill_rows, self.group_size
        tokens = np.zeros((rows, admission.bucket), np.int32)
        length, active, limit = np.ones(rows, np.int32), np.zeros(rows, np.int32), np.ones(rows, np.int32)
        groups = np.full(rows, self.num_groups, np.int32)  # past the end: nothing is written
        keys = np.zeros((rows, siblings, 2), np.uint32)
        sampling = [np.zeros(rows, dtype) for dtype in (np.float32, np.int32, np.float32, np.float32)]
        for row, (id, slot) in enumerate(zip(admission.ids, admission.slots, strict=True)):
            request = self.progress[id].request
            ids, params = request.prompt_ids, request.params
            tokens[row, : len(ids)], length[row], groups[row] = ids, len(ids), slot
            active[row], limit[row] = request.num_completions, params.max_tokens
            keys[row] = [request.address.key(index) for index in range(siblings)]
            for column, value in zip(sampling, (params.temperature, params.top_k, params.top_p, params.min_p),
                                     strict=True):
                column[row] = value
            self._stopped[slot] = False
        if self._slots is None:
            self._slots = self.programs["make_slots"]()
        self._slots, drawn = self.programs["prefill"](
            self.parameters, slots=self._slots, tokens=tokens, length=length, groups=groups, active=active,
            limit=limit, keys=keys, sampling=SamplingArrays(*sampling))
        self.in_flight.append((drawn, admission.ids + (None,) * (rows - len(admission.ids))))

    def _start_decode(self) -> None:
        owners: list[int | None] = [None] * self.num_groups
        for id, slot in self.scheduler.running.items():
            owners[slot] = id
        # A copy: a compiled step may read the host's own memory, after later steps have changed it.
        self._slots, drawn = self.programs["decode"](
            self.parameters, slots=self._slots, stopped=self._stopped.copy())
        self.in_flight.append((drawn, tuple(owners)))

    # -- gathering

    def _drain_one(self) -> None:
        drawn, owners = self.in_flight.popleft()
        host: SampledTokens = jax.device_get(drawn)
        for row, id in enumerate(owners):
            if id is None or id not in self.progress:
                continue
            progress = self.progress[id]
            for index in range(progress.request.num_completions):
                if progress.reasons[index] is None:
                    self._gather(progress, index, host, row)
            self._hand_over_if_done(id)

    def _gather(self, progress: Progress, index: int, host: SampledTokens, row: int) -> None:
        count = int(host.count[row, index])
        progress.tokens[index].extend(host.token[:count, row, index].tolist())
        progress.logprobs[index].extend(host.logprob[:count, row, index].tolist())
        if host.support_ids is not None:
            progress.support_ids[index].extend(host.support_ids[:count, row, index])
        reason = None
        if host.done[row, index]:
            reason = StopReason.EOS if host.eos[row, index] else StopReason.LENGTH
        cut = self._stop_string(progress, index, count)
        if cut is not None:
            del progress.tokens[index][cut:], progress.logprobs[index][cut:], progress.support_ids[index][cut:]
            reason = StopReason.STOP
        if reason is not None:
            self._end(progress, index, reason)

    def _stop_string(self, progress: Progress, index: int, new: int) -> int | None:
        """Tokens up to and including the one that completed a stop string, if one came up among the new ones."""
        stop, tokens = progress.request.params.stop, progress.tokens[index]
        if not stop or new == 0:
            return None
        assert self.decode_text is not None

        def stopped(length: int) -> bool:
            text = self.decode_text(tokens[:length])  # type: ignore[misc]
            return any(string in text for string in stop)

        if not stopped(len(tokens)):
            return None
        return next(length for length in range(len(tokens) - new + 1, len(tokens) + 1) if stopped(length))

    def _end(self, progress: Progress, index: int, reason: StopReason) -> None:
        progress.reasons[index] = reason
        slot = self.scheduler.running.get(progress.request.id)
        if slot is not None:
            self._stopped[slot, index] = True

    def _hand_over_if_done(self, id: int) -> None:
        progress = self.progress[id]
        if any(reason is None for reason in progress.reasons):
            return
        self.scheduler.finish(id)
        del self.progress[id]
        for index, reason in enumerate(progress.reasons):
            assert reason is not None
            count = len(progress.tokens[index])
            self.finished.append(Completion(
                request_id=id,
                index=index,
                token_ids=np.asarray(progress.tokens[index], np.int32),
                logprobs=np.asarray(progress.logprobs[index], np.float32),
                loss_mask=np.ones(count, bool),
                versions=np.full(count, self.version, np.int32),
                stop_reason=reason,
                extra={"support_ids": np.array(progress.support_ids[index], np.int32).reshape(count, self.max_support)}
                if self.max_support else {},
            ))

    def _check(self, request: SampleRequest) -> None:
        params, size = request.params, len(request.prompt_ids)
        if self.parameters is None:
            raise RuntimeError("no weights are loaded")
        if not 1 <= size <= self.max_prompt_tokens:
            raise ShoalError(f"a prompt has {size} tokens, the sampler takes 1 to {self.max_prompt_tokens} "
                             "(sampling.max_prompt_tokens)")
        if params.max_tokens > self.max_completion_tokens or params.max_tokens < 1:
            raise ShoalError(f"{params.max_tokens} tokens a completion were asked for, the sampler holds "
                             f"1 to {self.max_completion_tokens} (sampling.max_completion_tokens)")
        if not 1 <= request.num_completions <= self.group_size:
            raise ValueError(f"{request.num_completions} completions asked of groups of {self.group_size}")
        if params.truncated and not self.truncated:
            raise ValueError("this engine was made without truncation (top_k, top_p, min_p)")
        if params.stop and self.decode_text is None:
            raise ValueError("stop strings need the engine's `decode`")


def prompt_bucket(size: int) -> int:
    """The padded length of a prompt, from its own length alone: KEY_BLOCK times a power of two."""
    bucket = KEY_BLOCK
    while bucket < size:
        bucket *= 2
    return bucket


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _ready(tree: Any) -> bool:
    return all(leaf.is_ready() for leaf in jax.tree.leaves(tree))


# -- the compiled steps


@lru_cache(PROGRAMS_KEPT)
def _programs(model: Model, sizes: tuple[int, int, int, int], eos_ids: tuple[int, ...], truncated: bool,
              max_support: int) -> tuple[Slots, Callable[[], Slots], Callable, Callable]:
    """Layout of the slots of `sizes` (groups, siblings, prompt, completion); making them, prefill, decode."""
    make = partial(_empty_slots, model, *sizes)
    layout = _layout(model.role, jax.eval_shape(make))
    static = {"model": model, "eos_ids": eos_ids, "truncated": truncated, "max_support": max_support}
    options: dict[str, Any] = {"donate_argnames": "slots", "out_shardings": (layout, model.role.replicated)}
    return (layout, jax.jit(make, out_shardings=layout), jax.jit(partial(_prefill, **static), **options),
            jax.jit(partial(_decode, **static), **options))


def _empty_slots(model: Model, groups: int, siblings: int, prefix: int, own: int) -> Slots:
    shape = (groups, siblings)
    caches = kv_cache.empty(model.architecture, groups, siblings, prefix, own, model.dtype)
    zeros = partial(jnp.zeros, shape)
    return Slots(
        caches=caches,
        prefix_len=jnp.ones(groups, jnp.int32),
        token=zeros(jnp.int32),
        length=jnp.ones(shape, jnp.int32),
        done=jnp.ones(shape, bool),
        limit=zeros(jnp.int32),
        keys=jnp.zeros((*shape, 2), jnp.uint32),
        sampling=SamplingArrays(zeros(jnp.float32), zeros(jnp.int32), zeros(jnp.float32), zeros(jnp.float32)),
    )


def _layout(role: Role, shapes: Slots) -> Slots:
    """Shardings of the slots: groups over the rows of the mesh, key heads over `tensor`."""

    def of(leaf: jax.ShapeDtypeStruct) -> Any:
        heads = ("heads",) if leaf.ndim >= 4 else ()  # only caches have heads: [.., K, A]
        middle = (None,) * (leaf.ndim - 1 - 2 * len(heads))
        return role.sharding(("rows", *middle, *heads, *(None,) * len(heads)), leaf.shape)

    return jax.tree.map(of, shapes)


def _pick(model: Model, parameters: Params, hidden: jax.Array, sampling: SamplingArrays, keys: jax.Array, position: jax.Array,
          truncated: bool, max_support: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The token at place[N, G] of each completion, its log-prob and what it was chosen from, from hidden[N, G, D]."""
    shape = position.shape
    flat = jax.tree.map(lambda x: x.reshape(-1), sampling)
    scores = logits(model, parameters, hidden).reshape(-1, model.architecture.vocab_size)
    token, logprob, support_ids = sample_tokens(scores, flat, uniform(keys, position).reshape(-1), truncated, max_support)
    return token.reshape(shape), logprob.reshape(shape), None if support_ids is None else support_ids.reshape(*shape, max_support)


def _is_eos(token: jax.Array, eos_ids: tuple[int, ...]) -> jax.Array:
    return jnp.isin(token, jnp.asarray(eos_ids, jnp.int32))


def _prefill(parameters: Params, *, slots: Slots, tokens: jax.Array, length: jax.Array, groups: jax.Array,
             active: jax.Array, limit: jax.Array, keys: jax.Array, sampling: SamplingArrays, model: Model,
             eos_ids: tuple[int, ...], truncated: bool, max_support: int) -> tuple[Slots, SampledTokens]:
    """Prompts tokens[R, T] of length[R] enter groups[R]; the first active[R] siblings draw their first token."""
    rows, size = tokens.shape
    siblings = keys.shape[1]
    positions = jnp.broadcast_to(jnp.arange(size), (rows, size))
    hidden, prompt_keys = forward(model, parameters, tokens, positions, prefill_attention(length, size))
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)  # [R, 1, D]
    spread = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (rows, siblings)), sampling)
    hidden = jnp.broadcast_to(last, (rows, siblings, last.shape[-1]))
    first = jnp.zeros((rows, siblings), jnp.int32)
    token, logprob, support_ids = _pick(model, parameters, hidden, spread, keys, first, truncated, max_support)
    used = jnp.arange(siblings) < active[:, None]
    eos = used & _is_eos(token, eos_ids)
    done = ~used | eos | (limit[:, None] <= 1)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[groups].set(new, mode="drop")

    slots = Slots(
        caches=kv_cache.write_prefixes(slots.caches, prompt_keys, groups),
        prefix_len=put(slots.prefix_len, length),
        token=put(slots.token, token),
        length=put(slots.length, first + 1),
        done=put(slots.done, done),
        limit=put(slots.limit, jnp.broadcast_to(limit[:, None], (rows, siblings))),
        keys=put(slots.keys, keys),
        sampling=jax.tree.map(put, slots.sampling, spread),
    )
    return slots, SampledTokens(token[None], logprob[None], used.astype(jnp.int32), done, eos,
                        None if support_ids is None else support_ids[None])


def _decode(parameters: Params, *, slots: Slots, stopped: jax.Array, model: Model, eos_ids: tuple[int, ...],
            truncated: bool, max_support: int) -> tuple[Slots, SampledTokens]:
    """Up to CHUNK tokens for every slot that is neither done nor `stopped`[N, G] by the host."""
    shape = slots.token.shape
    start = replace(slots, done=slots.done | stopped)
    drawn = SampledTokens(jnp.zeros((CHUNK, *shape), jnp.int32), jnp.zeros((CHUNK, *shape), jnp.float32),
                  jnp.zeros(shape, jnp.int32), start.done, jnp.zeros(shape, bool),
                  jnp.zeros((CHUNK, *shape, max_support), jnp.int32) if max_support else None)
    num_prefix = jnp.max(jnp.where(start.done.all(-1), 1, slots.prefix_len))

    def going(carry: tuple[jax.Array, Slots, SampledTokens]) -> jax.Array:
        return (carry[0] < CHUNK) & ~carry[1].done.all()

    def one(carry: tuple[jax.Array, Slots, SampledTokens]) -> tuple[jax.Array, Slots, SampledTokens]:
        step, s, out = carry
        position = s.length - 1
        num_own = jnp.max(jnp.where(s.done, 1, s.length))
        mix = kv_cache.decode_attention(s.prefix_len, position, num_prefix, num_own)
        positions = s.prefix_len[:, None] + position
        hidden, caches = forward(model, parameters, s.token, positions, mix, s.caches)
        token, logprob, support_ids = _pick(model, parameters, hidden, s.sampling, s.keys, s.length, truncated, max_support)
        live = ~s.done
        token = jnp.where(live, token, s.token)
        length = s.length + live
        eos = live & _is_eos(token, eos_ids)
        done = s.done | eos | (length >= s.limit)
        out = SampledTokens(out.token.at[step].set(token), out.logprob.at[step].set(logprob), out.count + live, done,
                    out.eos | eos, None if support_ids is None else out.support_ids.at[step].set(support_ids))
        return step + 1, replace(s, caches=caches, token=token, length=length, done=done), out

    _, slots, drawn = jax.lax.while_loop(going, one, (jnp.int32(0), start, drawn))
    return slots, drawn
