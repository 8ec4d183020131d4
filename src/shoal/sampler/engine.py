"""Engine that samples completions: runs the compiled steps over N rows of W slots.

    submit -> Scheduler -> prefill  (prompts enter free rows, each with its first W completions)
                        -> join     (further completions of a prompt enter free rows, to which the
                                    prompt's keys are copied)
                        -> decode   (every slot samples up to DECODE_CHUNK tokens; ends early when
                                    all are done)
                        -> swap_out (rows are copied to the host's memory to make room for others)
                        -> swap_in  (and copied back)
    step   <- the tokens of each compiled step, gathered by request until all its completions have
              ended
    extend -> decode  (a completion whose turn has ended goes on after tokens of context: a tool's
                      answer)

A request is sampled by subgroups: those of its completions that share a row (see the scheduler).
The host decides what runs next and when a completion ends. It gathers the tokens of one step while
the next runs, and so does not wait for a step that it has just started; only a swap_in waits, for
each swap_out before it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from shoal.mesh import MAX_IN_FLIGHT
from shoal.model.attention.caches import NO_PAGE, PAGE, cache_size
from shoal.model.attention.selector import decodes_by_kernel, has_pages
from shoal.model.transformer import Model
from shoal.protocols import Cancel, End, Extend, Message, SampleRequest
from shoal.records import Completion, Params, Purpose, ShoalError
from shoal.sampler.decode_state import (
    OUT_OF_RANGE_ROW,
    SWAP_ROWS,
    SWAP_SHARE,
    DecodeState,
    StateSizes,
    state_shapes,
)
from shoal.sampler.partial import (
    ActiveRequest,
    Decode,
    FedTokens,
    InFlightStep,
    PartialCompletion,
    Phase,
    RowOwner,
    check_request,
    experts_in_row,
)
from shoal.sampler.programs import (
    DECODE_CHUNK,
    FEED,
    FEED_ROWS,
    TURNS_AT_ONCE,
    SampledTokens,
    empty_batch,
    empty_feed,
    make_programs,
    no_turn_starts,
    prefill_chunk_size,
    recorded_calls,
    run_program,
)
from shoal.sampler.row_memory import PagePool, SubgroupKey, SwappedRows
from shoal.sampler.scheduler import (
    PREFILL_TOKENS,
    Admission,
    Scheduler,
    num_rows,
    prompt_bucket,
    round_up,
)


class Engine:
    """Sampler on the devices of one mesh: `slots` completions at once, in rows of W =
    `siblings_per_row` completions of the same prompt (0: of a whole group).

    A completion's tokens do not depend on what other slots do or on when it enters. The caller of
    `step` owns the engine: use it from one thread. A `load` or `cancel` takes effect between two
    steps."""

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
        records_experts: bool = False,
        pages: int = 0,
    ):
        """Makes an engine without weights; `load` gives it some. Compiles nothing: each program is
        compiled at its first call.

        `slots`: completions at once, of all replicas together, divided into whole rows of W: as
        many rows as fit in `slots`, then rounded up to an equal number in each replica.
        `group_size`: the number of completions that most requests have; any number is allowed. One
        prefill takes a quarter of the prompts that fit at that size. `siblings_per_row`: W; 0, or
        more than `group_size`, means `group_size`.

        `decode` turns token ids into text. It is needed for stop strings only; None: requests with
        stop strings are refused. `truncated`: the compiled programs have top-k, top-p and min-p,
        and search their bounds at every token; False: requests with these settings are refused, and
        `max_support` counts as 0. `max_support` is K: truncation keeps at most K tokens, and
        completions record which, in `extra["support_ids"]`, int32[T, K]; 0: no bound and no record.
        `records_experts`: completions of training record the experts of their tokens, in
        `extra["experts"]` and `prompt_experts`; only for a model with experts.

        `pages`: pages in the pool of each replica, if keys are stored in pages; 0: enough for all
        rows at their limits. If pages run out, rows are swapped out to the host's memory.
        ValueError if `pages` do not suffice for one row at its limits; ShoalError if
        model.attention=pallas and decoding's kernel cannot compute the model."""
        model = replace(model, longest_sequence=max_prompt_tokens + max_completion_tokens)
        for layer in model.architecture.kinds:
            if layer.mixer == "attention":
                # called for its error, which it raises before anything is compiled
                decodes_by_kernel(model, layer)
        shards = model.role.row_shards
        self.model = model
        self.truncated = truncated
        # True if a layer's cache is a state, which cannot drop a completion's last tokens.
        self.has_states = model.architecture.delta_net is not None
        self.siblings = min(siblings_per_row, group_size) or group_size
        self.max_support = min(max_support, model.architecture.vocab_size) if truncated else 0
        self.records_experts = records_experts
        self.num_rows = num_rows(slots, self.siblings, shards)
        self.replica_rows = self.num_rows // shards  # programs number rows within a replica
        rows_per_group = -(-group_size // self.siblings)
        # number of groups that are sampled at once
        self.num_groups = max(1, self.num_rows // rows_per_group)
        self.max_prompt_tokens = max_prompt_tokens
        self.max_completion_tokens = max_completion_tokens
        self.eos_ids = tuple(eos_ids)
        self.decode_text = decode
        platform = model.role.platform
        prefill_chunk = prefill_chunk_size(model, prompt_bucket(max_prompt_tokens))
        # A batch costs the same however few of its rows are used, and decoding is interrupted to
        # fill one, so batches are neither small nor large.
        prefill_rows = min(self.num_rows, round_up(max(1, self.num_groups // 4), shards))
        join_rows = min(self.num_rows, round_up(max(1, self.num_rows // 8), shards))
        prompt_cache = cache_size(max_prompt_tokens, platform, model.key_parts)
        completion_cache = cache_size(max_completion_tokens, platform, model.key_parts)
        # Number of a replica's rows that fit in memory when all their completions are at their
        # limits. Without pages each row has memory of its own, so that all fit.
        rows_at_limits = self.replica_rows
        self.pool: PagePool | None = None
        row_pages = 0
        total_pages = 0
        if has_pages(model):
            pages_per_slot = completion_cache // PAGE
            pages_per_row = self.siblings * pages_per_slot
            replica_pages = pages or self.replica_rows * pages_per_row
            self.pool = PagePool(
                self.num_rows, self.siblings, pages_per_slot, replica_pages, shards
            )
            rows_at_limits = replica_pages // pages_per_row
            row_pages = self.pool.pages_to_enter(np.ones(self.siblings, int))
            total_pages = shards * replica_pages
        swap_rows = shards * max(1, min(SWAP_ROWS, rows_at_limits // SWAP_SHARE))
        self.scheduler = Scheduler(
            num_rows=self.num_rows,
            prefill_rows=prefill_rows,
            join_rows=join_rows,
            replicas=shards,
            prefill_tokens=PREFILL_TOKENS,
            prefill_chunk=prefill_chunk,
            longest=round_up(max_prompt_tokens, prefill_chunk),
            swap_rows=swap_rows,
            pool=self.pool,
            row_pages=row_pages,
        )
        self.version = -1
        self.parameters: Params | None = None
        # requests that were submitted and are not finished, by id
        self.requests: dict[int, ActiveRequest] = {}
        self.in_flight: deque[InFlightStep] = deque()
        self.finished: dict[int, list[Completion]] = {}
        # Counts so far. `tokens`: sampled tokens, including those of cancelled completions.
        # `total_slots` and `active_slots`: slots, and slots that sampled a token, summed over the
        # tokens of decoding. `preempted_rows`: rows that were swapped out to make room although
        # their completions went on. Any other name is the metric sampler/NAME of a step.
        self.counters = Counter[str]()
        # bool[N, W]: slots in which the next decode samples nothing: unused, ended, or waiting for
        # the next turn.
        self._inactive = np.ones((self.num_rows, self.siblings), bool)
        self._sizes = StateSizes(
            self.num_rows, self.siblings, prompt_cache, completion_cache, total_pages
        )
        # The steps in flight, preceded by the one whose tokens are being gathered.
        self._ungathered: deque[InFlightStep] = deque()
        self._state: DecodeState | None = None
        swapped_sizes = self._sizes._replace(rows=self.scheduler.swap_rows, pages=0)
        swapped_shapes = state_shapes(model, swapped_sizes)
        self.swapped = SwappedRows(swapped_shapes)
        # True during a call of a program whose shapes are new: it may compile for minutes.
        self.starting = False
        # (program, prompt length) that were called before, so that they are compiled
        self._started: set[tuple[str, int]] = set()
        programs = make_programs(
            model,
            self._sizes,
            self.eos_ids,
            truncated,
            self.max_support,
            prefill_chunk,
            records_experts,
        )
        self.programs: dict[str, Any] = dict(programs)

    def load(self, version: int, params: Params) -> None:
        """Sets the weights of the compiled steps that start from now on, and the version that their
        tokens carry. Keeps `params` without a copy; the weights before are dropped.

        Completions in progress continue with the new weights; their existing keys and values stay
        those of the old weights."""
        self.version = version
        self.parameters = params

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queues requests; `step` samples them. ShoalError if a prompt is empty or too long, or
        `max_tokens` is below 1 or too large; ValueError if a request has no completions, wrong
        limits of turns, or settings that this engine was made without (truncation, stop strings),
        or if its id is in use; RuntimeError if no weights are loaded. The requests before a refused
        one stay queued."""
        if self.parameters is None:
            raise RuntimeError("no weights are loaded")
        for request in requests:
            if request.has_turns and self.has_states and self.model.key_parts > 1:
                raise ShoalError(
                    "turns of a model with recurrent layers: the sampler's mesh splits the "
                    f"positions of its key heads over {self.model.key_parts} devices; give "
                    "mesh.sampler_tensor at most as many as key heads",
                    "mesh.sampler_tensor",
                )
            check_request(
                request,
                self.max_prompt_tokens,
                self.max_completion_tokens,
                self.truncated,
                self.decode_text is not None,
            )
            num_subgroups = -(-request.num_completions // self.siblings)
            self.scheduler.submit(request.id, prompt_bucket(len(request.prompt_ids)), num_subgroups)
            partials = []
            for i in range(request.num_completions):
                limit = self.limit_of(request, request.first + i)
                partials.append(PartialCompletion(limit, request.turn_limit_of(i)))
            self.requests[request.id] = ActiveRequest(request, partials)

    def handle(self, message: Message) -> None:
        """Acts on `Extend`, `End` or `Cancel`, like `extend`, `end` and `cancel`. TypeError for any
        other message, since the host handles versions and the queue of requests. Raises the errors
        of these methods: KeyError if no request of that id is in progress, ValueError if an
        `Extend` is not allowed now or does not fit."""
        match message:
            case Extend(id, index, context, turn_limit):
                self.extend(id, index, context, turn_limit)
            case End(id, index):
                self.end(id, index)
            case Cancel(id):
                self.cancel(id)
            case _:
                raise TypeError(f"an engine does not act on {type(message).__name__}")

    def extend(self, id: int, index: int, context: Sequence[int], turn_limit: int = 0) -> None:
        """Continues a completion whose turn has ended, after tokens of context, with a turn of at
        most `turn_limit` tokens (0: no limit). `index`: the completion's index within its group,
        which must be one of this request's: that is not checked. If its row was swapped out to the
        host's memory, the row is queued to return. ValueError if the completion does not wait, or
        if the context and one more token do not fit; KeyError if no request `id` is in progress."""
        partial, subgroup, row, slot = self._locate(id, index)
        partial.extend(context, turn_limit, self.has_states)
        if row is not None:
            # the next decode samples in this slot again
            self._inactive[row, slot] = False
        else:
            self.scheduler.returning[id, subgroup] = self._pages_to_return(id, subgroup)

    def end(self, id: int, index: int) -> None:
        """Ends a completion whose turn has ended: it is not extended any more. `step` does not
        return it again. Its row is freed once all completions in the row are over, and the request
        is forgotten once all its completions are. KeyError if no request `id` is in progress.
        Changes nothing if the completion is still being sampled."""
        partial, _, row, _ = self._locate(id, index)
        partial.end()
        if row is not None:
            self._release_if_over(row)
        elif self.requests[id].is_done:
            self._finish(self.requests[id])

    def step(self) -> dict[int, list[Completion]]:
        """Starts compiled steps, waits until the tokens of one have arrived (and gathers those of
        others that are there too), and returns the completions that have finished, by request id;
        {} if none has. Does not wait if nothing is in flight, or if finished completions are there
        already. RuntimeError if requests are left, none waits to be extended, and nothing can be
        started: a fault of the scheduler.

        A request's completions come together, when all have ended; those of a request with turns
        come one by one, each time that a turn of one has ended."""
        self._start_all()
        if not self.finished:
            if self.in_flight:
                self._gather_oldest()
            elif not self.scheduler.idle and not self.stuck:
                raise RuntimeError(f"the sampler waits for nothing: {self.scheduler}")
        # Gather the further steps that have ended already, without waiting. Gathering starts new
        # steps, so the number of turns is fixed before.
        for _ in range(len(self.in_flight)):
            arrays = jax.tree.leaves(self.in_flight[0].sampled)
            if not all(array.is_ready() for array in arrays):
                break
            self._gather_oldest()
        finished = self.finished
        self.finished = {}
        return finished

    @property
    def stuck(self) -> bool:
        """True if nothing can be sampled before a completion is extended or ended. False if the
        engine is idle, or if there are finished completions that `step` has not returned yet."""
        if self.in_flight or self.finished or self.scheduler.idle:
            return False
        for active in self.requests.values():
            if any(partial.waits for partial in active.partials):
                return True
        return False

    def _locate(self, id: int, index: int) -> tuple[PartialCompletion, int, int | None, int]:
        """Returns a completion of a request, the number of its subgroup, the subgroup's row (None
        if it has none, because it was swapped out to the host's memory), and the completion's slot
        in the row. `index`: the completion's index within the group. KeyError if no request `id` is
        in progress. `index` must be one of the request's: that is not checked."""
        active = self.requests[id]
        number = index - active.request.first
        partial = active.partials[number]
        subgroup, slot = divmod(number, self.siblings)
        for row, owner in self.scheduler.running.items():
            if owner == (id, subgroup):
                return partial, subgroup, row, slot
        # swapped out to the host's memory
        return partial, subgroup, None, slot

    @property
    def idle(self) -> bool:
        """True if nothing is queued, in progress or left to return."""
        return self.scheduler.idle and not self.in_flight and not self.finished

    def release_memory(self) -> None:
        """Frees the caches on the devices, and drops the weights until the next `load`.
        RuntimeError unless the engine is idle. The compiled programs are kept. The caches are
        allocated again by the next step."""
        if not self.idle:
            raise RuntimeError("an engine with requests in progress cannot release its memory")
        self._state = None
        self.parameters = None

    def cancel(self, id: int) -> None:
        """Ends a request, queued or begun, and frees its rows. The next `step` returns its
        completions with the tokens so far, and StopReason.CANCELLED if they had not ended; it
        returns nothing for a request with turns. Tokens of steps in flight are dropped. KeyError if
        no request `id` is in progress."""
        for partial in self.requests[id].partials:
            partial.cancel()
        for row, (owner_id, _) in self.scheduler.running.items():
            if owner_id == id:
                self._inactive[row] = True
        self.scheduler.cancel(id)
        self.swapped.forget(id)
        self._finish(self.requests[id])

    # -- for the checks before a run

    def state_shapes(self) -> DecodeState:
        """Returns shapes, data types and layout of the caches and slots, without allocating
        them."""
        return state_shapes(self.model, self._sizes)

    def calls(
        self, program: str, parameters: Params
    ) -> dict[str, tuple[int, tuple, dict[str, Any]]]:
        """Returns which compiled programs run for "prefill" (of the longest prompts), "join",
        "feed" or "decode", and with arrays of which shapes: name -> (how often, arguments, keyword
        arguments). `program`: one of these four. `parameters`: shapes of the weights. Runs
        nothing."""
        if program == "decode":
            arrays = self._decode_arrays()
        elif program == "feed":
            arrays = self._empty_feed()
        elif program == "prefill":
            arrays = self._empty_batch(prompt_bucket(self.max_prompt_tokens))
        else:
            # "join", which has no prompts
            arrays = self._empty_batch(0)

        def shape_of(array: np.ndarray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, array.dtype)

        shapes = jax.tree.map(shape_of, arrays)
        return recorded_calls(
            self.model, self.programs, program, parameters, self.state_shapes(), shapes
        )

    def limit_of(self, request: SampleRequest, index: int) -> int:
        """Returns the most tokens of the request's completion `index` (within its group): the
        request's `max_tokens`, whatever the index. Benchmarks override this method to give siblings
        different lengths."""
        return request.params.max_tokens

    # -- dispatch

    def dispatch_next(self) -> bool:
        """Starts the next compiled step without waiting for it: a step that fills rows, else a
        decode. Returns True if it started one; False if none can start now, or if MAX_IN_FLIGHT
        steps are in flight. If rows are lacking, first swaps out rows whose completions all wait
        for tools."""
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            return False
        # Rows are lacking: swap out rows whose completions wait for tools, until enough are free or
        # no such row is left.
        num_lacking = self.scheduler.num_lacking_rows
        while num_lacking > 0:
            idle_rows = np.flatnonzero(self._inactive.all(1)).tolist()
            waiting_rows = [row for row in idle_rows if row in self.scheduler.running]
            # False if there is no such row
            if not self._swap_out(waiting_rows[:num_lacking]):
                break
            num_lacking = self.scheduler.num_lacking_rows
        # Swapped-out subgroups whose tokens have not all been gathered cannot return yet.
        busy: set[SubgroupKey] = set()
        # Without pages none is busy: then a row is swapped out only if all its completions wait,
        # and so after all its tokens were gathered.
        if self.pool:
            for step in self._ungathered:
                busy.update((owner.active.request.id, owner.subgroup) for owner in step.owners)
        admission = self.scheduler.admit(busy)
        if admission is not None:
            self._start_admission(admission)
            return True
        if not self._inactive.all() and self._may_decode():
            self._start_decode()
            return True
        return False

    def _start_all(self) -> None:
        """Starts compiled steps until none can start now."""
        has_started = True
        while has_started:
            has_started = self.dispatch_next()

    def _may_decode(self) -> bool:
        """True if a decode may start now: none is in flight, or the next is needed whatever the one
        in flight brings. That is not so if prompts wait for rows that it may free, if the host must
        read its tokens first (stop strings, turns), or if it reaches the limits of all
        completions."""
        if not any(step.live is not None for step in self.in_flight):
            return True
        # Which rows a step frees is known only when it has ended: with prompts waiting, these rows
        # would idle through the next decode.
        if self.scheduler.waiting or self.scheduler.entering:
            return False
        running_ids = {id for id, _ in self.scheduler.running.values()}
        running = [self.requests[id] for id in running_ids]
        # The next decode would sample in vain in slots that a stop string has ended, and slots
        # whose turns have ended would idle.
        if any(active.request.is_read_first for active in running):
            return False
        for active in running:
            for partial in active.partials:
                # At most DECODE_CHUNK tokens arrive from the decode in flight. A completion whose
                # prefill is not gathered yet has its first token already.
                tokens_after_chunk = max(1, len(partial.tokens)) + DECODE_CHUNK
                if partial.reason is None and partial.limit > tokens_after_chunk:
                    return True
        return False

    def _swap_out(self, rows: Sequence[int]) -> bool:
        """Starts the compiled step that copies rows (their keys, values and slots) to the host's
        memory, and frees the rows for others. One step copies at most `swap_rows` rows, an equal
        share of each replica: if `rows` has more, the first ones go and the others stay. Returns
        True if at least one row goes; False if `rows` is empty. All `rows` must be running.

        A row whose completions still sample is queued to return by itself, before those that were
        queued earlier. One whose completions all wait is queued when one of them is extended."""
        swap_rows = self.scheduler.swap_rows
        take_position = self.scheduler.position_taker(swap_rows)
        positions: dict[SubgroupKey, int] = {}
        # Positions that stay unused copy row 0, and nobody reads the copy.
        row_numbers = np.zeros(swap_rows, np.int32)  # within the replica
        table = self._empty_page_table(swap_rows)
        for row in rows:
            position = take_position(row)
            # no position is left for the row's replica
            if position is None:
                continue
            id, subgroup = self.scheduler.running[row]
            row_numbers[position] = row % self.replica_rows
            positions[id, subgroup] = position
            if table is not None and self.pool is not None:
                table[position] = self.pool.table[row]
            if not self._inactive[row].all():
                self.counters["preempted_rows"] += 1
                # A row that is swapped out later entered earlier, so it returns first.
                returning = {(id, subgroup): self._pages_to_return(id, subgroup, row)}
                returning.update(self.scheduler.returning)
                self.scheduler.returning = returning
                self._inactive[row] = True
            self.scheduler.release(row)
        if not positions:
            return False
        with self._may_compile("swap_out"):
            swapped = self.programs["swap_out"](self._state, row_numbers, table)
        self.swapped.add(positions, swapped)
        return True

    def _empty_page_table(self, rows: int) -> np.ndarray | None:
        """Returns a table for the pages of `rows` rows, int32[rows, W, T], filled with NO_PAGE;
        None if keys are not stored in pages."""
        if self.pool is None:
            return None
        _, siblings, pages_per_slot = self.pool.table.shape
        return np.full((rows, siblings, pages_per_slot), NO_PAGE, np.int32)

    def _pages_needed(self, id: int, subgroup: int, row: int | None = None) -> np.ndarray:
        """Returns how many pages each slot of a subgroup needs, int[W], for all keys that it may
        have after the next decode; 0 for slots that are unused or over. `row`: the subgroup's row,
        if steps for it may be in flight; None otherwise."""
        decodes_in_flight = np.zeros(self.siblings, int)
        if row is not None:
            for step in self._ungathered:
                if step.live is not None:
                    # in a decode, a row's position is the row itself
                    decodes_in_flight += step.live[row].astype(int)
        wanted = np.zeros(self.siblings, int)
        for slot, partial in enumerate(self._partials(subgroup, self.requests[id])):
            num_keys = partial.most_keys_after(int(decodes_in_flight[slot]))
            wanted[slot] = -(-num_keys // PAGE)
        return wanted

    def _pages_to_return(self, id: int, subgroup: int, row: int | None = None) -> int:
        """Returns how many pages must be spare before a subgroup that is swapped out returns to a
        row; 0 if keys are not stored in pages. `row`: as in `_pages_needed`."""
        if self.pool is None:
            return 0
        return self.pool.pages_to_enter(self._pages_needed(id, subgroup, row))

    def _give_pages(self, pool: PagePool) -> None:
        """Gives every slot pages for the keys of the next decode. Whenever a row's replica has too
        few, swaps out one of the replica's rows: the last to enter whose completions all wait, or
        else the last to enter, so that the first row always continues."""
        for row, (id, subgroup) in list(self.scheduler.running.items()):
            # ends without pages if the row itself had to be swapped out
            while row in self.scheduler.running:
                if pool.give(row, self._pages_needed(id, subgroup, row)):
                    break
                replica = pool.replica_of(row)
                rows = [
                    other for other in self.scheduler.running if pool.replica_of(other) == replica
                ]
                waiting_rows = [other for other in rows if self._inactive[other].all()]
                candidates = waiting_rows or rows
                # `running` is in the order in which the rows entered
                self._swap_out(candidates[-1:])

    def _start_swap_in(self, admission: Admission) -> None:
        """Starts the step that copies swapped-out subgroups back to rows of the device, gives the
        rows pages, and marks the slots that have something to sample. First waits for steps in
        flight that swap rows out, because their rows may be among these."""
        self.swapped.copy_to_host(self.requests, wait=True)
        swap_rows = self.scheduler.swap_rows
        # a row past the end, for which nothing is written
        rows = np.full(swap_rows, OUT_OF_RANGE_ROW, np.int32)
        table = self._empty_page_table(swap_rows)
        positions: list[tuple[SubgroupKey, int]] = []
        for position, id, subgroup, row, _ in admission.entries:
            rows[position] = row % self.replica_rows
            if table is not None and self.pool is not None:
                table[position] = self.pool.enter(row, self._pages_needed(id, subgroup))
            # also slots beyond the subgroup's completions
            self._inactive[row] = True
            for slot, partial in enumerate(self._partials(subgroup, self.requests[id])):
                # a completion with a reason has ended, or waits for its next turn
                self._inactive[row, slot] = partial.reason is not None
            positions.append(((id, subgroup), position))
        swapped = self.swapped.take(positions)
        with self._may_compile("swap_in"):
            self._state = self.programs["swap_in"](self._state, rows, swapped, table)

    def _start_admission(self, admission: Admission) -> None:
        """Starts the step that the scheduler has chosen: a prefill, a join or a swap in. Gives the
        rows pages, and marks the slots that the requests use. The rows count as running already."""
        if admission.is_swap_in:
            self._start_swap_in(admission)
            return
        arrays = self._empty_batch(admission.bucket)
        new_rows = arrays["new_rows"]
        owners = []
        for position, id, subgroup, row, source in admission.entries:
            active = self.requests[id]
            request = active.request
            first = request.first + subgroup * self.siblings
            partials = self._partials(subgroup, active)
            count = len(partials)
            new_rows.rows[position] = row % self.replica_rows
            new_rows.limit[position, :count] = [partial.limit for partial in partials]
            noise_keys = [request.noise_key.key(first + i) for i in range(count)]
            new_rows.keys[position, :count] = noise_keys
            new_rows.sampling.set(position, request.params)
            if admission.bucket:
                size = len(request.prompt_ids)
                arrays["tokens"][position, :size] = request.prompt_ids
                arrays["length"][position] = size
            else:
                arrays["sources"][position] = source % self.replica_rows
            # slots that the request does not use count as ended
            self._inactive[row] = new_rows.limit[position] == 0
            if self.pool:
                self.pool.enter(row, self._pages_needed(id, subgroup))
            owners.append(RowOwner(position, row, subgroup, active))
        program = "prefill" if admission.bucket else "join"
        self._start_step(program, arrays, owners)

    def _empty_batch(self, bucket: int) -> dict[str, Any]:
        """Returns the arguments of a prefill of prompts of `bucket` tokens (0: of a join), with all
        positions unused."""
        return empty_batch(
            self.scheduler.batch_rows(bucket), self.siblings, self.scheduler.padded(bucket)
        )

    def _start_feeds(self, owners: Sequence[RowOwner]) -> list[FedTokens]:
        """Starts steps that compute the keys of contexts of FEED tokens or more, FEED tokens at a
        time, in the rows of `owners`, for completions that were extended and not sampled since.
        Starts nothing if no context is that long. Moves these tokens to the completions' `tokens`;
        the rest of a context, shorter than FEED, is left for the next decode. So a context's length
        alone decides which tokens are computed in which way. Returns the tokens whose experts are
        recorded; [] if none are.

        If the model has states, a completion whose last turn the host has cut is computed again
        before its context, from its prompt's state on: the device may have sampled further. The
        experts that its tokens had before stay recorded."""
        all_fed: list[FedTokens] = []
        while True:
            to_feed: list[tuple[int, int, PartialCompletion]] = []
            for _, row, subgroup, active in owners:
                for slot, partial in enumerate(self._partials(subgroup, active)):
                    if partial.needs_feed:
                        to_feed.append((row, slot, partial))
            if not to_feed:
                return all_fed
            arrays = self._empty_feed()
            at = arrays["at"]
            take_position = self.scheduler.position_taker(FEED_ROWS * self.scheduler.replicas)
            fed: list[tuple[PartialCompletion, int, int]] = []  # (.., position, number of tokens)
            for row, slot, partial in to_feed:
                position = take_position(row)
                if position is None:
                    # this feed is full: the next turn of the outer loop has the rest
                    continue
                at.rows[position] = row % self.replica_rows
                at.slots[position] = slot
                if self.pool:
                    at.pages[position] = self.pool.table[row, slot]
                if partial.phase is Phase.RECOMPUTING:
                    start, tokens = partial.recompute(FEED)
                else:
                    # the feed begins with the last token before the context, which has no key yet
                    start = len(partial.tokens) - 1
                    tokens = partial.feed(FEED, self.version, self.max_support)
                    fed.append((partial, position, len(tokens)))
                at.start[position] = start
                at.count[position] = len(tokens)
                arrays["tokens"][position, : len(tokens)] = tokens
            experts = self._run("feed", arrays)
            if self.records_experts:
                for partial, position, count in fed:
                    all_fed.append(FedTokens(partial, position, count, experts))

    def _empty_feed(self) -> dict[str, Any]:
        """Returns the arrays of a feed, with all positions unused."""
        pages_per_slot = self.pool.table.shape[2] if self.pool else 0
        return empty_feed(FEED_ROWS * self.scheduler.replicas, pages_per_slot)

    def _start_decode(self) -> None:
        """Starts a decode of all running rows, after giving them pages, which may swap some of them
        out, and feeding long contexts. Slots that wait or are over sample nothing."""
        if self.pool:
            self._give_pages(self.pool)
        owners = []
        for row, (id, subgroup) in self.scheduler.running.items():
            owners.append(RowOwner(row, row, subgroup, self.requests[id]))
        with_turns = [owner for owner in owners if owner.active.request.has_turns]
        # If the positions of a cache are split over devices, all of a context is computed by the
        # decode, token by token.
        fed: list[FedTokens] = []
        if with_turns and self.model.key_parts == 1:
            fed = self._start_feeds(with_turns)
        arrays = self._decode_arrays(bool(with_turns))
        turns = arrays["turns"]
        for _, row, subgroup, active in with_turns:
            for slot, partial in enumerate(self._partials(subgroup, active)):
                if partial.phase is Phase.FEEDING:
                    turns.resumed[row, slot] = len(partial.tokens)
                    turns.last[row, slot] = partial.tokens[-1]
                    partial.begin_decode()
                # These leave `context` once the step is gathered (`PartialCompletion.add`).
                next_tokens = partial.context[:DECODE_CHUNK]
                if next_tokens:
                    turns.num_forced[row, slot] = len(next_tokens)
                    turns.forced[row, slot, : len(next_tokens)] = next_tokens
        self._start_step("decode", arrays, owners, fed)

    def _partials(self, subgroup: int, active: ActiveRequest) -> list[PartialCompletion]:
        """Returns the completions of a request's subgroup number `subgroup`."""
        return active.partials[subgroup * self.siblings : (subgroup + 1) * self.siblings]

    def _decode_arrays(self, has_turns: bool = False) -> dict[str, Any]:
        """Returns the arguments of a decode (see `programs._decode`) in which no slot continues
        after a turn; the caller fills in those that do. The arguments are `stopped`,
        `interrupt_after`, `turns`, and `pages` if keys are stored in pages. `has_turns`: interrupt
        the decode when one in TURNS_AT_ONCE of the live slots have ended."""
        replicas = self.scheduler.replicas
        # as many slots as there are: the decode is not interrupted for them
        num_slots = self._inactive.size
        if has_turns:
            # A slot idles between its turns, so decoding is interrupted when a share of the slots
            # have ended their turns.
            num_live = int((~self._inactive).sum())
            num_slots = max(1, num_live // (TURNS_AT_ONCE * replicas))
        interrupt_after = np.array([self.scheduler.interrupt_after(), num_slots], np.int32)
        # Copies: on CPU a compiled step may alias the host's array and read it after later steps
        # have changed it.
        arrays: dict[str, Any] = {
            "stopped": self._inactive.copy(),
            "interrupt_after": np.tile(interrupt_after, (replicas, 1)),
            "turns": no_turn_starts(self.num_rows, self.siblings),
        }
        if self.pool:
            arrays["pages"] = self.pool.table.copy()
        return arrays

    def _start_step(
        self,
        program: str,
        arrays: dict[str, Any],
        owners: list[RowOwner],
        fed: Sequence[FedTokens] = (),
    ) -> None:
        """Starts "prefill", "join" or "decode" with these arguments, and adds it to the steps in
        flight. `owners`: the rows whose tokens it samples. `fed`: what feeds for it compute. The
        first step allocates the caches."""
        if not self._state:
            self._state = self.programs["make_state"]()
        prompt_size = arrays["tokens"].shape[1] if program == "prefill" else 0
        sampled = self._run(program, arrays, prompt_size)
        # which slots this decode samples
        live = ~arrays["stopped"] if program == "decode" else None
        step = InFlightStep(sampled, owners, live, self.version, fed)
        self.in_flight.append(step)
        self._ungathered.append(step)

    def _run(self, program: str, arrays: dict[str, Any], prompt_size: int = 0) -> Any:
        """Starts "prefill", "join", "feed" or "decode" on the state, replaces the state by the next
        one, and returns what `run_program` does, on the device. Does not wait for the device.
        `prompt_size`: of "prefill", to how many tokens the prompts are padded; else 0."""
        assert self.parameters is not None and self._state is not None
        with self._may_compile(program, prompt_size):
            self._state, sampled = run_program(
                self.model, self.programs, program, self.parameters, self._state, arrays
            )
        return sampled

    @contextmanager
    def _may_compile(self, program: str, prompt_size: int = 0) -> Iterator[None]:
        """Context manager for a call of a program: `starting` is True inside if the program is
        called for the first time, because that may compile it for minutes. `prompt_size`: to how
        many tokens prompts are padded, because prefill is compiled for each; 0 for other
        programs."""
        self.starting = (program, prompt_size) not in self._started
        try:
            yield
            self._started.add((program, prompt_size))
        finally:
            self.starting = False

    # -- gathering

    def _gather_oldest(self) -> None:
        """Waits for the oldest step in flight and adds its tokens to their completions. Starts
        further steps as soon as it is known which rows are free, so that the device does not wait
        for the gathering. IndexError if none is in flight."""
        step = self.in_flight.popleft()
        done = np.asarray(step.sampled.done)
        for owner in step.owners:
            # For requests with turns the tokens show whether a slot has ended or waits; see
            # `_gather_row`.
            if not owner.active.request.has_turns:
                self._note_ended(owner, done[owner.position])
        # Stop strings and turns need the tokens on the host before it is known what has ended.
        if not any(owner.active.request.is_read_first for owner in step.owners):
            self._start_all()
        on_host = jax.device_get(step.sampled)
        # without waiting: only rows whose swap-out step has ended
        self.swapped.copy_to_host(self.requests)
        if step.live is not None:
            self._count_slots(on_host.count)
        for fed in step.fed:
            fed.partial.experts.append(experts_in_row(fed.experts, fed.position, fed.num_tokens))
        for owner in step.owners:
            if on_host.prompt_experts is not None:
                _note_prompt_experts(owner, on_host.prompt_experts)
            self._gather_row(owner, on_host, step)
        self._ungathered.popleft()
        self._start_all()

    def _gather_row(self, owner: RowOwner, sampled: SampledTokens, step: InFlightStep) -> None:
        """Adds the tokens that a step sampled in a row to the row's completions, and notes which
        have ended. Of a request with turns, hands over each completion whose turn has ended; of any
        other, all completions are handed over once all have ended (`_finish`). Does nothing if the
        request was cancelled. `sampled`: the step's tokens, on the host."""
        position, row, subgroup, active = owner
        if active.is_forgotten:
            return  # the request was cancelled while the step ran
        request = active.request
        ended = np.zeros(self.siblings, bool)
        for slot, partial in enumerate(self._partials(subgroup, active)):
            # ended or waiting: the step sampled nothing for it, or in vain
            if partial.reason is not None:
                continue
            if step.live is not None and not step.live[position, slot]:
                continue
            self.counters["tokens"] += partial.add(
                sampled, position, slot, step.version, request, self.decode_text
            )
            ended[slot] = partial.reason is not None
            if not ended[slot] or not request.has_turns:
                continue
            self._hand_over(active, subgroup * self.siblings + slot)
            # A step that has begun already must not add tokens to this completion.
            for later in self.in_flight:
                if later.live is None:
                    continue
                # The row may belong to another subgroup in that step.
                if any(
                    later_owner.active is active and later_owner.subgroup == subgroup
                    for later_owner in later.owners
                ):
                    later.live[row, slot] = False
        self._note_ended(owner, ended)

    def _note_ended(self, owner: RowOwner, ended: np.ndarray) -> None:
        """Notes that a subgroup's slots with ended[W] have nothing to sample any more, and frees
        its row once all have.

        Called twice for a step of requests with a single turn: with what the device says, which
        frees the row, and once the tokens were gathered, which finishes the request. The subgroup
        then has no row: the first call has freed it, or it was swapped out. If it was swapped out
        and all its completions have ended, it is kept from returning."""
        _, row, subgroup, active = owner
        if active.is_forgotten:
            return
        request_id = active.request.id
        if self.scheduler.running.get(row) == (request_id, subgroup):
            self._inactive[row] |= ended
            self._release_if_over(row)
            return
        if all(partial.reason is not None for partial in self._partials(subgroup, active)):
            # Nothing to remove if the first call has freed the row.
            self.scheduler.returning.pop((request_id, subgroup), None)
        if active.is_done:
            self._finish(active)

    def _release_if_over(self, row: int) -> None:
        """Frees a row if all its completions are over (a completion that waits to be extended is
        not), and finishes the row's request if all completions of the request are over. `row` must
        be running."""
        id, subgroup = self.scheduler.running[row]
        active = self.requests[id]
        has_waiting = any(partial.waits for partial in self._partials(subgroup, active))
        if self._inactive[row].all() and not has_waiting:
            self.scheduler.release(row)
        if active.is_done:
            self._finish(active)

    def _count_slots(self, count: np.ndarray) -> None:
        """Adds a decode's slots to the counters `active_slots` and `total_slots`. count[N, W]:
        tokens that each slot sampled."""
        # A replica decodes until its last slot has ended, and that slot has sampled a token in each
        # step.
        by_replica = count.reshape(self.scheduler.replicas, -1)
        num_decoded = by_replica.max(1).sum() * by_replica.shape[1]
        self.counters["active_slots"] += int(count.sum())
        self.counters["total_slots"] += int(num_decoded)

    def _finish(self, active: ActiveRequest) -> None:
        """Forgets a request whose completions are all over. The next `step` returns them, unless
        it returned them turn by turn."""
        self.scheduler.finish(active.request.id)
        self.swapped.forget(active.request.id)
        del self.requests[active.request.id]
        active.is_forgotten = True
        if not active.request.has_turns:
            for index in range(len(active.partials)):
                self._hand_over(active, index)

    def _hand_over(self, active: ActiveRequest, number: int) -> None:
        """Lets the next `step` return completion `number` (from 0, within the request) with its
        tokens so far. The completion must have ended, or wait for its next turn."""
        request = active.request
        completion = active.partials[number].completion(
            request.id, request.first + number, self.max_support, active.prompt_experts
        )
        self.finished.setdefault(request.id, []).append(completion)


def _note_prompt_experts(owner: RowOwner, experts: Sequence[Any]) -> None:
    """Notes the experts of the prompt that a prefill computed in a row, once for its request, and
    only for training: nothing reads those of other requests. `experts`: of each layer that has
    some, [rows, T, k]."""
    active = owner.active
    request = active.request
    if request.purpose is Purpose.TRAIN and active.prompt_experts is None:
        size = len(request.prompt_ids)
        active.prompt_experts = experts_in_row(experts, owner.position, size)


def run_until_idle(engine: Engine) -> Iterator[tuple[int, list[Completion]]]:
    """Runs an engine until nothing is left. Yields (id, completions) of each request as it
    finishes. Of a request with turns, yields each completion whenever a turn of it has ended; the
    caller must then extend or end it, or the loop never ends."""
    while not engine.idle:
        yield from engine.step().items()


def drain(engine: Engine) -> dict[tuple[int, int], Completion]:
    """Runs an engine until nothing is left. Returns all completions by (request id, index). The
    requests must have no turns: otherwise the loop never ends."""
    by_index = {}
    for id, completions in run_until_idle(engine):
        for completion in completions:
            by_index[id, completion.index] = completion
    return by_index
