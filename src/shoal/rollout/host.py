"""Hosts in this process: engines that take messages and sample by themselves.

EngineHost    samples in the caller's thread, one compiled step per `poll`
ThreadHost    does the same in a thread of its own, on devices of its own
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shoal.protocols import (
    Cancel,
    HostProgress,
    Load,
    Message,
    Pause,
    SampleRequest,
    Submit,
    Version,
)
from shoal.records import Completion, Params, Purpose
from shoal.sampler.engine import Engine


class Reading(NamedTuple):
    """A version whose weights are being read in the background."""

    version: Version
    weights: Future[Callable[[], Params]]


@dataclass
class EngineHost:
    """A host around the engines of one mesh, of which one works at a time. Requests enter in the
    order in which they were submitted; those for branches of rollouts go first.

    A request with `exact` waits until requests of other versions have ended. Requests that may
    start on newer weights take the newest, and still newer ones are loaded while they are sampled.
    `make_engine` returns the engine for a purpose and a group size; it may return the same engine
    for several."""

    make_engine: Callable[[Purpose, int], Engine]
    # most completions that the host wants to have at once, including those that wait in its queue;
    # None: no limit
    capacity: int | None = None
    # True if the devices are also the trainer's: the caches are freed as soon as nothing is left to
    # sample
    shares_memory: bool = True
    state: HostProgress = field(default_factory=HostProgress)
    # True if the last poll found nothing to sample, because weights must be loaded or turns
    # extended first
    stuck: bool = False
    # True after `Pause`: nothing is sampled, and unfinished completions keep their slots
    paused: bool = False
    _queue: deque[SampleRequest] = field(default_factory=deque)
    # versions whose weights can still be read, by number
    _versions: dict[int, Version] = field(default_factory=dict)
    _newest: int = -1  # the highest version that a `Load` message has named; -1: none
    _reading: Reading | None = None
    _engine: Engine | None = None
    # True if the engine samples requests with `exact`, that is, from one version only
    _exact: bool = True
    _loading: bool = False
    # weights that no version changes, read once
    _frozen: dict[str, Any] = field(default_factory=dict)

    def handle(self, message: Message) -> None:
        """Acts on `Load`, `Submit`, `Cancel` and `Pause`; passes other messages, about completions
        that have begun, to the engine, which must have sampled them: AssertionError if there is
        none. Raises the engine's errors, and for `Cancel` those of `_start_queued`."""
        match message:
            case Load(version):
                self._add_version(version)
            case Submit(requests):
                self._queue_requests(requests)
            case Cancel():
                self._cancel(message)
            case Pause(paused):
                self.paused = paused
            case _:
                # The message is about completions that have begun, so the engine must act on it.
                assert self._engine is not None
                self._engine.handle(message)

    def _add_version(self, version: Version) -> None:
        """Notes a version that was published, and forgets those that were removed (`exists` is
        False)."""
        available = {}
        for number, older_version in self._versions.items():
            if older_version.exists:
                available[number] = older_version
        available[version.version] = version
        self._versions = available
        self._newest = max(self._newest, version.version)

    def _queue_requests(self, requests: Sequence[SampleRequest]) -> None:
        """Queues requests in the order given; each one for a branch of a rollout that has begun
        goes to the very front. Checks none of them: the engine does when they begin."""
        for request in requests:
            if request.branch:
                self._queue.appendleft(request)
            else:
                self._queue.append(request)

    def _cancel(self, message: Cancel) -> None:
        """Cancels a request: the engine answers with what was sampled; a request that must still
        wait in the queue is dropped without an answer."""
        # First give the engine what may begin: the engine then answers with what has been sampled,
        # even if that is nothing.
        self._start_queued()
        if self._engine is not None and message.request_id in self._engine.requests:
            self._engine.handle(message)
        self._queue = deque(request for request in self._queue if request.id != message.request_id)

    def progress(self) -> HostProgress:
        """Returns a copy of the host's figures since it was made, with the version that its engine
        has now; -1 if it has none."""
        version = -1
        if self._engine is not None:
            version = self._engine.version
        return replace(
            self.state,
            counters=self.state.counters.copy(),
            capacity=self.capacity,
            version=version,
            preparing=self.preparing,
        )

    @property
    def preparing(self) -> bool:
        """True while weights are loaded or a program is compiled. Other threads read this while the
        host's own thread is busy."""
        return self._loading or (self._engine is not None and self._engine.starting)

    def close(self) -> None:
        """Drops the queue, the versions and the engine, so that their memory is freed. The versions
        are not removed from their store, and a read that has begun goes on."""
        self._queue.clear()
        self._versions.clear()
        self._frozen.clear()
        self._engine = None

    @property
    def idle(self) -> bool:
        """True if nothing is queued, sampled or left to return."""
        return not self._queue and (self._engine is None or self._engine.idle)

    def poll(self) -> dict[int, list[Completion]]:
        """Gives queued requests to the engine, waits for the tokens of one compiled step, and
        returns what has finished, by request id. Loads newer weights first if the requests allow
        that. Frees the caches when nothing is left to sample, if the devices are also the
        trainer's. Returns {} at once if the host is paused or has nothing to sample. Sets `stuck`
        to whether nothing could be sampled. RuntimeError if a request names a version that was
        never published; errors of `make_engine` and of the engine are raised too."""
        if self.paused:
            self.stuck = True
            return {}
        started = time.perf_counter()
        self._start_queued()
        engine = self._engine
        self.stuck = engine is None or engine.idle
        if engine is None or self.stuck:
            return {}
        if not self._exact:
            self._load_newest(engine)
        counted_before = engine.counters.copy()
        answers = engine.step()
        for name, value in engine.counters.items():
            self.state.counters[name] += value - counted_before[name]
        self.stuck = engine.stuck
        # otherwise the engine had nothing to do, and no compiled step has ended
        if answers or not self.stuck:
            self.state.dispatches += 1
        if engine.idle and self.shares_memory and not self._queue:
            # free memory now, before rewards are waited for: the update that follows needs it
            engine.release_memory()
        self.state.busy_seconds += time.perf_counter() - started
        return answers

    def _start_queued(self) -> None:
        """Moves requests from the queue to the engine, in order, until one must wait because it
        needs another engine or other weights, and the engine is still sampling. An idle engine is
        replaced by the one that the request needs, and its memory is freed. Raises the errors of
        `make_engine` and `Engine.submit`, and RuntimeError if a request names a version that was
        never published; requests before the refused one are with the engine then."""
        while self._queue:
            request = self._queue[0]
            engine = self.make_engine(request.purpose, request.num_completions)
            if engine is not self._engine:
                if self._engine is not None:
                    if not self._engine.idle:
                        return
                    self._engine.release_memory()
                self._engine = engine
            if not self._has_weights_for(engine, request):
                return
            engine.submit([self._queue.popleft()])

    def _has_weights_for(self, engine: Engine, request: SampleRequest) -> bool:
        """True if the engine has weights that the request may start on; loads them first, unless
        requests that are being sampled forbid that. Also sets `_exact` to the request's `exact` if
        the engine is idle, or if neither its requests nor this one are exact. RuntimeError if the
        version was never published."""
        if not engine.idle and (self._exact or request.exact):
            # An exact request shares the engine with requests of the very same version only.
            return self._exact and request.exact and engine.version == request.version
        if request.exact:
            is_published = request.version in self._versions
        else:
            is_published = request.version <= self._newest
        if not is_published:
            # An error in the program's schedule: sampling from another version would break the
            # bound on staleness unnoticed.
            raise RuntimeError(
                f"version {request.version} is requested, but only {sorted(self._versions)} are "
                "published"
            )
        self._exact = request.exact
        if not request.exact:
            return self._load_newest(engine) >= request.version
        if engine.parameters is None or engine.version != request.version:
            self._load(engine, self._versions[request.version])
        return True

    def _load_newest(self, engine: Engine) -> int:
        """Loads the newest version that can be read, if it is newer than the engine's. Waits for it
        if the engine is idle; while the engine samples, the weights are read in the background and
        loaded by the first call after they are complete. Returns the version that the engine then
        has, -1 for none."""
        while True:
            newest = None
            if self._versions:
                newest = self._versions[max(self._versions)]
            reading = self._reading
            # an idle engine waits anyway, so it takes the newest
            if reading is not None and not engine.idle:
                # Finish the version that is being read: if a newer one always replaced it, a slow
                # host would never finish reading.
                if reading.version.version > engine.version:
                    newest = reading.version
            if newest is None:
                break
            if engine.parameters is not None and engine.version >= newest.version:
                break
            try:
                self._load(engine, newest)
                break
            except LookupError:
                if newest.exists:
                    raise
                # The trainer removes an old version before it copies the next one; try the next.
                self._versions.pop(newest.version, None)
        if engine.parameters is None:
            return -1
        return engine.version

    def _load(self, engine: Engine, version: Version) -> None:
        """Starts to read a version's weights, unless that has begun, and gives them to the engine
        if they have arrived. Waits for them if the engine is idle; otherwise a later call gives
        them. LookupError if the version does not exist any more, ShoalError if the weights differ
        from those that were published."""
        started = time.perf_counter()
        self._loading = True
        try:
            if self._reading is None or self._reading.version is not version:
                self._reading = Reading(version, version.read(engine.model, self._frozen))
            # a future whose result is a function: called once, it returns the weights
            weights = self._reading.weights
            if engine.idle or weights.done():
                self._reading = None
                take_weights = weights.result()
                engine.load(version.version, take_weights())
        finally:
            self._loading = False
            self.state.pause_seconds += time.perf_counter() - started


class ThreadHost:
    """An `EngineHost` that runs in a thread of its own. It calls `wake` in that thread when it has
    answers, or an error, for `poll` to return."""

    def __init__(self, host: EngineHost, wake: Callable[[], None], name: str) -> None:
        """Starts the thread, which owns `host` from now on. Whoever makes this object closes it
        (`close`). `wake`: called in that thread when `poll` has something to return or raise.
        `name`: name of the thread."""
        self.host, self._wake = host, wake
        # messages that the thread has yet to pass to its host
        self._messages: deque[Message] = deque()
        # if True, the thread polls its host once more though nothing could be sampled last time
        self._polls_again = False
        self._answers: dict[int, list[Completion]] = {}
        self._progress = host.progress()
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def handle(self, message: Message) -> None:
        """Queues a message for the host's thread, and returns at once. If the message causes an
        error there, the thread ends and `poll` raises the error. After `close` messages are
        dropped."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def poll_again(self) -> None:
        """Makes the thread poll its host once more, though nothing could be sampled last time."""
        with self._changed:
            self._polls_again = True
            self._changed.notify()

    def poll(self) -> dict[int, list[Completion]]:
        """Returns the answers since the last call, by request id, without waiting; {} if there are
        none. Raises the error that ended the thread, if there was one, at every call."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            answers, self._answers = self._answers, {}
            return answers

    def progress(self) -> HostProgress:
        """Returns the host's figures after its last step, and whether it prepares now."""
        return replace(self._progress, preparing=self.host.preparing)

    def close(self) -> None:
        """Ends the thread, which closes the host, and waits for that. Messages that are still
        queued are dropped, and an error of the thread is not raised."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        # lasts at most one compiled step, which cannot be abandoned while the process goes on
        self._thread.join()

    def _run(self) -> None:
        """Runs in the host's thread: polls the host whenever something can be sampled, until
        closed, then closes the host. An error ends the thread and is kept for `poll`."""
        try:
            while self._wait_until_sampling():
                answers = self.host.poll()
                self._progress = self.host.progress()
                if answers:
                    with self._changed:
                        for id, completions in answers.items():
                            self._answers.setdefault(id, []).extend(completions)
                    self._wake()
        except BaseException as error:
            # the next poll raises it, so that whoever waits for this host learns of it
            with self._changed:
                self._failure = error
            self._wake()
        finally:
            self.host.close()

    def _wait_until_sampling(self) -> bool:
        """Passes queued messages to the host, and waits for more while nothing can be sampled.
        Returns True when the host should be polled, False once it is closed."""
        with self._changed:
            while not self._closed:
                messages = self._messages
                has_news = len(messages) > 0 or self._polls_again
                self._messages = deque()
                self._polls_again = False
                for message in messages:
                    self.host.handle(message)
                if not self.host.idle and (has_news or not self.host.stuck):
                    return True
                if not has_news:
                    self._changed.wait()
            return False
