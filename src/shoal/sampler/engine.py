"""Samples completions: runs the compiled steps over the slots of N groups, G in each.

    submit -> Scheduler -> prefill (prompts enter free groups, each slot samples its first token)
                        -> decode  (every slot samples up to CHUNK tokens, ends early when all are done)
    collect <- the tokens of each step, gathered by request until all its completions have ended

The host decides what runs next and when a completion ends; it never waits for a step that it has just started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from shoal.mesh import MAX_IN_FLIGHT
from shoal.model.kv_cache import KEY_BLOCK, cache_size
from shoal.model.transformer import Model
from shoal.sampler.programs import CHUNK, DecodeState, SampledTokens, make_programs
from shoal.sampler.sample_tokens import SamplingArrays
from shoal.sampler.scheduler import Admission, Scheduler
from shoal.types import Completion, Params, Sampler, SampleRequest, ShoalError, StopReason, StopSignal


@dataclass
class PartialCompletion:
    """The tokens of one completion so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support_ids: list[np.ndarray] = field(default_factory=list)  # int32[K] by token, where they are recorded
    reason: StopReason | None = None

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.logprobs[length:], self.support_ids[length:]


@dataclass
class Progress:
    """One request and its completions so far."""

    request: SampleRequest
    partials: list[PartialCompletion]


class Engine:
    """The `Sampler` in this process: `slots` completions at once, in groups of `group_size`.

    `decode` turns token ids into text and is needed only for stop strings. With `truncated` the compiled program has
    top-k, top-p and min-p (it then searches their bounds at every token). `max_support` is K: truncation keeps at most
    K tokens, and completions record which, in `extra["support_ids"]`, int32[T, K].
    """

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
        # A quarter of the groups enters in one prefill: it costs the same however few of its rows are used
        # (docs/decisions/0004).
        rows = min(self.num_groups, _round_up(max(1, self.num_groups // 4), shards))
        self.scheduler = Scheduler(self.num_groups, rows, shards)
        self.version, self.parameters = -1, None
        self.progress: dict[int, Progress] = {}
        self.in_flight: deque[tuple[SampledTokens, tuple[int | None, ...]]] = deque()  # with the request of each row
        self.finished: dict[int, list[Completion]] = {}
        self._stopped = np.zeros((self.num_groups, group_size), bool)
        platform = model.role.platform
        sizes = (self.num_groups, group_size, cache_size(max_prompt_tokens, platform),
                 cache_size(max_completion_tokens, platform))
        self._state: DecodeState | None = None
        programs = make_programs(model, sizes, self.eos_ids, truncated, self.max_support)
        self._shapes, self._layout = jax.eval_shape(programs.make_state.function), programs.layout
        self.programs: dict[str, Any] = {"make_state": programs.make_state, "prefill": programs.prefill,
                                              "decode": programs.decode}

    # -- the Sampler protocol

    def load(self, version: int, params: Params) -> None:
        if not self.idle:
            raise RuntimeError(f"version {version} cannot be loaded while version {self.version} is sampled from")
        # Only between requests: a completion is of one version, which the bound on staleness counts on.
        self.version, self.parameters = version, params

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            self._check(request)
            self.scheduler.submit(request.id, prompt_bucket(len(request.prompt_ids)))
            self.progress[request.id] = Progress(request, [PartialCompletion() for _ in range(request.num_completions)])

    def collect(self) -> dict[int, list[Completion]]:
        self._start_all()
        if not self.finished:
            if self.in_flight:
                self._drain_one()
            elif not self.scheduler.idle:
                raise RuntimeError(f"the sampler waits for nothing: {self.scheduler}")
        while self.in_flight and all(leaf.is_ready() for leaf in jax.tree.leaves(self.in_flight[0][0])):
            self._drain_one()
        finished, self.finished = self.finished, {}
        self._start_all()  # before the caller decodes and scores these: the device must not wait for that
        return finished

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self.in_flight and not self.finished

    def release_memory(self) -> None:
        if not self.idle:
            raise RuntimeError("an engine with requests in progress cannot release its memory")
        self._state, self.parameters = None, None

    # -- for the checks before a run

    def cancel(self, id: int) -> None:
        """Ends a request: `collect` returns what was sampled so far, with StopReason.CANCELLED."""
        progress = self.progress[id]
        for index, partial in enumerate(progress.partials):
            if partial.reason is None:
                self._end(progress, index, StopReason.CANCELLED)
        self._finish_if_done(id)

    def state_shapes(self) -> DecodeState:
        """Shapes, types and layout of the caches and slots; nothing is allocated."""
        return jax.tree.map(lambda shape, place: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place),
                            self._shapes, self._layout)

    # -- dispatch

    def dispatch_next(self) -> bool:
        """Starts the next compiled step without waiting for it; False if none can start now."""
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            return False
        if (admission := self.scheduler.admit()) is not None:
            self._start_prefill(admission)
            return True
        if self.scheduler.running and not self._decoding:
            self._start_decode()
            return True
        return False

    def _start_all(self) -> None:
        while self.dispatch_next():
            pass

    @property
    def _decoding(self) -> bool:
        """True while a decode step is in flight: which slots it finishes is unknown, another would be a guess."""
        return any(sampled.token.shape[:2] == (CHUNK, self.num_groups) for sampled, _ in self.in_flight)

    def _start_prefill(self, admission: Admission) -> None:
        rows, siblings = self.scheduler.prefill_rows, self.group_size
        tokens = np.zeros((rows, admission.bucket), np.int32)
        length, active, limit = np.ones(rows, np.int32), np.zeros(rows, np.int32), np.ones(rows, np.int32)
        own = self.num_groups // self.scheduler.replicas  # a row enters a group of its replica, counted within it
        groups = np.full(rows, own, np.int32)  # past the end: nothing is written
        owners: list[int | None] = [None] * rows
        keys = np.zeros((rows, siblings, 2), np.uint32)
        sampling = [np.zeros(rows, dtype) for dtype in (np.float32, np.int32, np.float32, np.float32)]
        for row, id, group in zip(admission.rows, admission.ids, admission.groups, strict=True):
            request, owners[row] = self.progress[id].request, id
            ids, params = request.prompt_ids, request.params
            tokens[row, : len(ids)], length[row], groups[row] = ids, len(ids), group % own
            active[row], limit[row] = request.num_completions, params.max_tokens
            keys[row] = [request.address.key(index) for index in range(siblings)]
            for column, value in zip(sampling, (params.temperature, params.top_k, params.top_p, params.min_p),
                                     strict=True):
                column[row] = value
            self._stopped[group] = False
        if self._state is None:
            self._state = self.programs["make_state"]()
        self._state, sampled = self.programs["prefill"](
            self.parameters, state=self._state, tokens=tokens, length=length, groups=groups, active=active,
            limit=limit, keys=keys, sampling=SamplingArrays(*sampling))
        self.in_flight.append((sampled, tuple(owners)))

    def _start_decode(self) -> None:
        owners: list[int | None] = [None] * self.num_groups
        for id, group in self.scheduler.running.items():
            owners[group] = id
        # A copy: on CPU a compiled step may alias the host's array and read it after later steps have changed it.
        self._state, sampled = self.programs["decode"](self.parameters, state=self._state, stopped=self._stopped.copy())
        self.in_flight.append((sampled, tuple(owners)))

    # -- gathering

    def _drain_one(self) -> None:
        sampled, owners = self.in_flight.popleft()
        host: SampledTokens = jax.device_get(sampled)
        for row, id in enumerate(owners):
            # Unused row, or a request that was cancelled while the step ran.
            if id is None or id not in self.progress:
                continue
            progress = self.progress[id]
            for index, partial in enumerate(progress.partials):
                if partial.reason is None:
                    self._gather(progress, index, host, row)
            self._finish_if_done(id)

    def _gather(self, progress: Progress, index: int, host: SampledTokens, row: int) -> None:
        """Adds one slot's new tokens to its completion, and ends it where they say so."""
        partial, count = progress.partials[index], int(host.count[row, index])
        partial.tokens.extend(host.token[:count, row, index].tolist())
        partial.logprobs.extend(host.logprob[:count, row, index].tolist())
        if host.support_ids is not None:
            partial.support_ids.extend(host.support_ids[:count, row, index])
        reason = None
        if host.done[row, index]:
            reason = StopReason.EOS if host.eos[row, index] else StopReason.LENGTH
        length = self._stop_length(progress.request.params.stop, partial.tokens, count)
        if length is not None:
            partial.cut(length)
            reason = StopReason.STOP
        if reason is not None:
            self._end(progress, index, reason)

    def _stop_length(self, stop: Sequence[str], tokens: Sequence[int], new: int) -> int | None:
        """Tokens up to the one that completed a stop string; None if no stop string ends in the last `new` tokens."""
        if not stop or new == 0:
            return None
        assert self.decode_text is not None

        def stopped(length: int) -> bool:
            # The whole text, not the last token's: a stop string, or one character of it, may span tokens.
            text = self.decode_text(tokens[:length])  # type: ignore[misc]
            return any(string in text for string in stop)

        if not stopped(len(tokens)):
            return None
        return next(length for length in range(len(tokens) - new + 1, len(tokens) + 1) if stopped(length))

    def _end(self, progress: Progress, index: int, reason: StopReason) -> None:
        progress.partials[index].reason = reason
        group = self.scheduler.running.get(progress.request.id)
        if group is not None:
            self._stopped[group, index] = True

    def _finish_if_done(self, id: int) -> None:
        partials = self.progress[id].partials
        if any(partial.reason is None for partial in partials):
            return
        self.scheduler.finish(id)
        del self.progress[id]
        self.finished[id] = [self._completion(id, index, partial) for index, partial in enumerate(partials)]

    def _completion(self, id: int, index: int, partial: PartialCompletion) -> Completion:
        assert partial.reason is not None
        count, extra = len(partial.tokens), {}
        if self.max_support:
            extra["support_ids"] = np.array(partial.support_ids, np.int32).reshape(count, self.max_support)
        return Completion(
            request_id=id,
            index=index,
            token_ids=np.asarray(partial.tokens, np.int32),
            logprobs=np.asarray(partial.logprobs, np.float32),
            loss_mask=np.ones(count, bool),
            versions=np.full(count, self.version, np.int32),
            stop_reason=partial.reason,
            extra=extra,
        )

    def _check(self, request: SampleRequest) -> None:
        params, size = request.params, len(request.prompt_ids)
        # All checked here: a compiled step would clamp what is out of range and sample on without an error.
        if self.parameters is None:
            raise RuntimeError("no weights are loaded")
        if not 1 <= size <= self.max_prompt_tokens:
            raise ShoalError(f"a prompt has {size} tokens, expected 1 to {self.max_prompt_tokens} "
                             "(sampling.max_prompt_tokens)")
        if params.max_tokens > self.max_completion_tokens or params.max_tokens < 1:
            raise ShoalError(f"a request has max_tokens={params.max_tokens}, expected 1 to "
                             f"{self.max_completion_tokens} (sampling.max_completion_tokens)")
        if not 1 <= request.num_completions <= self.group_size:
            raise ValueError(f"{request.num_completions} completions do not fit groups of {self.group_size}")
        if params.truncated and not self.truncated:
            raise ValueError("this engine was made without truncation (top_k, top_p, min_p)")
        if params.stop and self.decode_text is None:
            raise ValueError("stop strings need an engine that was made with `decode`")


def prompt_bucket(size: int) -> int:
    """The padded length of a prompt: the least KEY_BLOCK x 2^n that holds it, whatever the other prompts are."""
    bucket = KEY_BLOCK
    while bucket < size:
        bucket *= 2
    return bucket


def run_until_idle(sampler: Sampler, stop: StopSignal | None = None) -> Iterator[tuple[int, list[Completion]]]:
    """Runs a sampler until nothing is left; yields each request's id with its completions as it finishes.

    `stop` is checked between two calls of `collect`.
    """
    while not sampler.idle:
        if stop is not None:
            stop.check()
        yield from sampler.collect().items()


def drain(sampler: Sampler) -> dict[tuple[int, int], Completion]:
    """Runs a sampler until nothing is left; the completions by (request, index)."""
    return {(id, one.index): one for id, completions in run_until_idle(sampler) for one in completions}


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
