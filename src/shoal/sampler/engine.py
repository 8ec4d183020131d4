"""Samples completions: runs the compiled steps over N rows of W slots.

    submit -> Scheduler -> prefill (prompts enter free rows, each with its first W siblings)
                        -> join    (further siblings enter free rows, to which their prompt's keys are copied)
                        -> decode  (every slot samples up to CHUNK tokens, ends early when all are done)
    step   <- the tokens of each compiled step, gathered by request until all its completions have ended

The host decides what runs next and when a completion ends; it never waits for a step that it has just started, and
gathers the tokens of one while the next runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shoal.mesh import MAX_IN_FLIGHT
from shoal.model.kv_cache import KEY_BLOCK, cache_size
from shoal.model.transformer import Model
from shoal.sampler import programs
from shoal.sampler.programs import CHUNK, DecodeState, SampledTokens, empty_batch, make_programs, piece_size
from shoal.sampler.progress import Decode, PartialCompletion, Progress
from shoal.sampler.scheduler import Admission, Scheduler
from shoal.types import Completion, Params, SampleRequest, ShoalError, StopReason

PREFILL_TOKENS = 2**16
"""Most tokens of one prefill, padding included, unless one prompt has more: they bound its memory."""


class Owner(NamedTuple):
    """Whose tokens a position of a step holds: a row's, those of a part of a request."""

    position: int
    row: int
    part: int
    progress: Progress


class Dispatch(NamedTuple):
    """A compiled step in flight."""

    sampled: SampledTokens
    owners: list[Owner]
    is_decode: bool
    version: int  # of the weights that it sampled from


class Engine:
    """Samples on the devices of one mesh: `slots` completions at once, in rows of `siblings_per_row` (0: of a group).

    A request may have any number of completions; `group_size` is what most have: a quarter of the prompts that there
    is room for enters in one prefill. `decode` turns token ids into text and is needed only for stop strings. With
    `truncated` the compiled program has top-k, top-p and min-p (it then searches their bounds at every token).
    `max_support` is K: truncation keeps at most K tokens, and completions record which, in `extra["support_ids"]`,
    int32[T, K].
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
        siblings_per_row: int = 0,
        decode: Decode | None = None,
        truncated: bool = False,
        max_support: int = 0,
    ):
        shards = model.role.row_shards
        self.model, self.truncated = model, truncated
        self.siblings = min(siblings_per_row, group_size) or group_size
        self.max_support = min(max_support, model.architecture.vocab_size) if truncated else 0
        self.num_rows = num_rows(slots, self.siblings, shards)
        self.num_groups = max(1, self.num_rows // -(-group_size // self.siblings))  # that are sampled at once
        self.max_prompt_tokens, self.max_completion_tokens = max_prompt_tokens, max_completion_tokens
        self.eos_ids, self.decode_text = tuple(eos_ids), decode
        platform, piece = model.role.platform, piece_size(model, prompt_bucket(max_prompt_tokens))
        # A batch costs the same however few of its rows are used, and decoding is interrupted to fill one.
        prompts, rows = (min(self.num_rows, _round_up(max(1, count), shards))
                         for count in (self.num_groups // 4, self.num_rows // 8))
        self.scheduler = Scheduler(self.num_rows, prompts, rows, shards, PREFILL_TOKENS, piece,
                                   _round_up(max_prompt_tokens, piece))
        self.version, self.parameters = -1, None
        self.progress: dict[int, Progress] = {}
        self.in_flight: deque[Dispatch] = deque()
        self.finished: dict[int, list[Completion]] = {}
        self.tokens = 0  # sampled so far, of completions that were cancelled too
        self.places = np.zeros(2, np.int64)  # that sampled a token in decoding, and all, token by token
        self._ended = np.ones((self.num_rows, self.siblings), bool)
        sizes = self._sizes = (self.num_rows, self.siblings, *(
            cache_size(size, platform, model.key_parts) for size in (max_prompt_tokens, max_completion_tokens)))
        self._state: DecodeState | None = None
        self.starting = False  # a program whose shapes are new to this engine, which may compile for minutes
        self._started: set[tuple[str, int]] = set()  # programs and prompt lengths that are not new
        self.programs: dict[str, Any] = dict(make_programs(model, sizes, self.eos_ids, truncated, self.max_support,
                                                          piece))

    def load(self, version: int, params: Params) -> None:
        """Sets the weights of the compiled steps that start from now on, and the number that their tokens carry.

        Completions in progress go on with them: their keys and values stay those of the weights before."""
        self.version, self.parameters = version, params

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queues requests. ShoalError for one that cannot be sampled."""
        for request in requests:
            self._check(request)
            self.scheduler.submit(request.id, prompt_bucket(len(request.prompt_ids)),
                                  -(-request.num_completions // self.siblings))
            self.progress[request.id] = Progress(request, [PartialCompletion() for _ in range(request.num_completions)])

    def step(self) -> dict[int, list[Completion]]:
        """Runs until the tokens of a compiled step have arrived; the requests that have finished, by id."""
        self._start_all()
        if not self.finished:
            if self.in_flight:
                self._drain_one()
            elif not self.scheduler.idle:
                raise RuntimeError(f"the sampler waits for nothing: {self.scheduler}")
        for _ in range(len(self.in_flight)):
            if not all(leaf.is_ready() for leaf in jax.tree.leaves(self.in_flight[0].sampled)):
                break
            self._drain_one()
        finished, self.finished = self.finished, {}
        return finished

    def read_places(self) -> tuple[int, int]:
        """Places that drew a token, and all places, summed over the tokens of decoding since they were last read."""
        (drawing, places), self.places = self.places.tolist(), np.zeros_like(self.places)
        return drawing, places

    @property
    def idle(self) -> bool:
        """True if nothing is queued, in progress or left to hand over."""
        return self.scheduler.idle and not self.in_flight and not self.finished

    def release_memory(self) -> None:
        """Frees the caches and lets go of the weights until the next `load`. RuntimeError unless idle."""
        if not self.idle:
            raise RuntimeError("an engine with requests in progress cannot release its memory")
        self._state, self.parameters = None, None

    def cancel(self, id: int) -> None:
        """Ends a request: `step` returns what was sampled so far, with StopReason.CANCELLED."""
        for partial in self.progress[id].partials:
            partial.reason = partial.reason or StopReason.CANCELLED
        self._ended[[row for row, (other, _) in self.scheduler.running.items() if other == id]] = True
        self.scheduler.cancel(id)
        self._finish(self.progress[id])

    # -- for the checks before a run

    def state_shapes(self) -> DecodeState:
        """Shapes, types and layout of the caches and slots; nothing is allocated."""
        return programs.state_shapes(self.model, *self._sizes)

    def call_shapes(self, program: str) -> dict[str, Any]:
        """Shapes of what `prefill` (of the longest prompts), `join` or `decode` is called with, weights aside."""
        if program == "decode":
            arrays = self._decode_arrays()
        else:
            arrays = self._empty_batch(prompt_bucket(self.max_prompt_tokens) if program == "prefill" else 0)
        return {"state": self.state_shapes(),
                **jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)}

    def limit_of(self, request: SampleRequest, index: int) -> int:
        """The most tokens of one completion. Benchmarks override it to give siblings different lengths."""
        return request.params.max_tokens

    # -- dispatch

    def dispatch_next(self) -> bool:
        """Starts the next compiled step without waiting for it; False if none can start now."""
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            return False
        if (admission := self.scheduler.admit()) is not None:
            self._start_admission(admission)
            return True
        if self.scheduler.running and self._may_decode():
            self._start_decode()
            return True
        return False

    def _start_all(self) -> None:
        while self.dispatch_next():
            pass

    def _may_decode(self) -> bool:
        """True unless a decode step is in flight that may make room for others, or may be the last."""
        if not any(step.is_decode for step in self.in_flight):
            return True
        # Rows that a step finishes are known when it has ended: with prompts waiting, they would idle through the next.
        if self.scheduler.waiting or self.scheduler.entering:
            return False
        running = {id for id, _ in self.scheduler.running.values()}
        # Slots that a stop string ends would be sampled from in vain.
        return not any(self.progress[id].request.params.stop for id in running) and any(
            partial.reason is None and self.limit_of(one.request, index) > max(1, len(partial.tokens)) + CHUNK
            for one in map(self.progress.__getitem__, running) for index, partial in enumerate(one.partials))

    def _start_admission(self, admission: Admission) -> None:
        arrays = self._empty_batch(admission.bucket)
        own, owners = self.num_rows // self.scheduler.replicas, []  # rows are counted within their replica
        for position, id, part, row, source in admission.entries:
            progress = self.progress[id]
            request = progress.request
            params, first = request.params, part * self.siblings
            indices = range(first, min(first + self.siblings, request.num_completions))
            arrays["rows"][position] = row % own
            arrays["limit"][position, :len(indices)] = [self.limit_of(request, index) for index in indices]
            arrays["keys"][position, :len(indices)] = [request.address.key(index) for index in indices]
            for column, value in zip(arrays["sampling"], (params.temperature, params.top_k, params.top_p, params.min_p),
                                     strict=True):
                column[position] = value
            if admission.bucket:
                size = len(request.prompt_ids)
                arrays["tokens"][position, :size], arrays["length"][position] = request.prompt_ids, size
            else:
                arrays["sources"][position] = source % own
            self._ended[row] = False
            owners.append(Owner(position, row, part, progress))
        self._start("prefill" if admission.bucket else "join", arrays, owners)

    def _empty_batch(self, bucket: int) -> dict[str, Any]:
        return empty_batch(self.scheduler.batch_rows(bucket), self.siblings, self.scheduler.padded(bucket))

    def _start_decode(self) -> None:
        owners = [Owner(row, row, part, self.progress[id]) for row, (id, part) in self.scheduler.running.items()]
        self._start("decode", self._decode_arrays(), owners)

    def _decode_arrays(self) -> dict[str, Any]:
        # A copy: on CPU a compiled step may alias the host's array and read it after later steps have changed it.
        return {"stopped": self._ended.copy(), "enough": np.full(self.scheduler.replicas, self.scheduler.enough(),
                                                                 np.int32)}

    def _start(self, program: str, arrays: dict[str, Any], owners: list[Owner]) -> None:
        key = program, arrays["tokens"].shape[1] if program == "prefill" else 0
        self.starting = key not in self._started
        state = self.programs["make_state"]() if self._state is None else self._state
        self._state, sampled = self.programs[program](self.parameters, state=state, **arrays)
        self._started.add(key)
        self.starting = False
        self.in_flight.append(Dispatch(sampled, owners, program == "decode", self.version))

    # -- gathering

    def _drain_one(self) -> None:
        step = self.in_flight.popleft()
        done = np.asarray(step.sampled.done)
        for owner in step.owners:
            self._end(owner, done[owner.position])
        # Before tokens are gathered, so that the device need not wait for that; but stop strings are found in them.
        if not any(owner.progress.request.params.stop for owner in step.owners):
            self._start_all()
        host: SampledTokens = jax.device_get(step.sampled)
        if step.is_decode:
            self._count_places(host.count)
        for owner in step.owners:
            self._gather(owner, host, step.version)
        self._start_all()

    def _gather(self, owner: Owner, host: SampledTokens, version: int) -> None:
        """Adds the new tokens of a row to its completions."""
        position, _, part, progress = owner
        if not self._is_in_progress(progress):
            return  # it was cancelled while the step ran
        first, params = part * self.siblings, progress.request.params
        ended = np.zeros(self.siblings, bool)
        for slot, partial in enumerate(progress.partials[first:first + self.siblings]):
            if partial.reason is None:
                self.tokens -= len(partial.tokens)
                partial.add(host, position, slot, version, params.stop, self.decode_text)
                self.tokens += len(partial.tokens)
                ended[slot] = partial.reason is not None
        self._end(owner, ended)
        if progress.is_done:
            self.scheduler.finish(progress.request.id)
            self._finish(progress)

    def _end(self, owner: Owner, ended: np.ndarray) -> None:
        """Notes which slots of a row have ended, bool[W], and frees it with the last; unless it has another owner."""
        _, row, part, progress = owner
        id = progress.request.id
        if self.scheduler.running.get(row) == (id, part) and self._is_in_progress(progress):
            self._ended[row] |= ended
            if self._ended[row].all():
                self.scheduler.release(row)

    def _is_in_progress(self, progress: Progress) -> bool:
        return self.progress.get(progress.request.id) is progress

    def _count_places(self, count: np.ndarray) -> None:
        # A replica decodes until its last slot has ended, which then has sampled a token each time.
        by_replica = count.reshape(self.scheduler.replicas, -1)
        self.places += count.sum(), by_replica.max(1).sum() * by_replica.shape[1]

    def _finish(self, progress: Progress) -> None:
        id = progress.request.id
        del self.progress[id]
        self.finished[id] = [partial.completion(id, index, self.max_support)
                             for index, partial in enumerate(progress.partials)]

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
        if request.num_completions < 1:
            raise ValueError(f"a request has {request.num_completions} completions, expected at least 1")
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


def run_until_idle(engine: Engine) -> Iterator[tuple[int, list[Completion]]]:
    """Runs an engine until nothing is left; yields each request's id with its completions as it finishes."""
    while not engine.idle:
        yield from engine.step().items()


def drain(engine: Engine) -> dict[tuple[int, int], Completion]:
    """Runs an engine until nothing is left; the completions by (request, index)."""
    return {(id, one.index): one for id, completions in run_until_idle(engine) for one in completions}


def num_rows(slots: int, siblings: int, shards: int) -> int:
    """Rows of an engine with so many slots: as many in each part that they are split into."""
    return _round_up(max(1, slots // siblings), shards)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
