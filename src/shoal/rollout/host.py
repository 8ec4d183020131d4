"""Hosts: engines that run by themselves and are sent messages.

EngineHost    samples in the caller's thread, a compiled step at each `poll`
ThreadHost    the same in a thread of its own, on devices of its own
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
    """A version whose weights are being read."""

    version: Version
    weights: Future[Callable[[], Params]]


@dataclass
class EngineHost:
    """The engines of one mesh, one at work at a time; requests enter in the order submitted.

    A request of an exact version waits until requests of another version have ended. Requests that
    may start on newer weights take the newest, and newer ones are loaded while they are sampled.
    `make_engine` returns the engine of a purpose and a group size, perhaps one for several.
    """

    make_engine: Callable[[Purpose, int], Engine]
    # completions that it wants to have at once, those that wait included; 0: all there are
    capacity: int = 0
    # with the trainer: caches are freed as soon as nothing is left to sample
    shares_memory: bool = True
    state: HostProgress = field(default_factory=HostProgress)
    # since the last poll: nothing can be sampled before weights are loaded, or a turn goes on
    stuck: bool = False
    paused: bool = False  # nothing is sampled, and what has begun stays where it is
    _queue: deque[SampleRequest] = field(default_factory=deque)
    _versions: dict[int, Version] = field(default_factory=dict)  # that can be fetched
    _newest: int = -1  # of the versions that `Load` messages have named
    _reading: Reading | None = None
    _engine: Engine | None = None
    _exact: bool = True  # whether what the engine samples is of exactly its version
    _loading: bool = False
    # what was read once, as no version changes it
    _frozen: dict[str, Any] = field(default_factory=dict)

    def handle(self, message: Message) -> None:
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
                # About completions that have begun: the engine's affair, whatever it says.
                assert self._engine is not None
                self._engine.handle(message)

    def _add_version(self, version: Version) -> None:
        available = {}
        for number, older_version in self._versions.items():
            if older_version.exists:
                available[number] = older_version
        available[version.version] = version
        self._versions = available
        self._newest = max(self._newest, version.version)

    def _queue_requests(self, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            if request.branch:
                self._queue.appendleft(request)
            else:
                self._queue.append(request)

    def _cancel(self, message: Cancel) -> None:
        # First what may begin: then the engine answers with what has been sampled, if only nothing.
        self._feed()
        if self._engine is not None and message.request_id in self._engine.progress:
            self._engine.handle(message)
        self._queue = deque(request for request in self._queue if request.id != message.request_id)

    def progress(self) -> HostProgress:
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
        """Asked from other threads, too, while this one is busy."""
        return self._loading or (self._engine is not None and self._engine.starting)

    def close(self) -> None:
        self._queue.clear()
        self._versions.clear()
        self._frozen.clear()
        self._engine = None

    @property
    def idle(self) -> bool:
        return not self._queue and (self._engine is None or self._engine.idle)

    def poll(self) -> dict[int, list[Completion]]:
        if self.paused:
            self.stuck = True
            return {}
        started = time.perf_counter()
        self._feed()
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
        if answers or not self.stuck:
            self.state.dispatches += 1
        if engine.idle and self.shares_memory and not self._queue:
            # before rewards are waited for: the update that follows needs the memory
            engine.release_memory()
        self.state.busy_seconds += time.perf_counter() - started
        return answers

    def _feed(self) -> None:
        """Hands requests to their engine, as long as the next needs no other engine or weights than
        what it samples."""
        while self._queue:
            request = self._queue[0]
            engine = self.make_engine(request.purpose, request.num_completions)
            if engine is not self._engine:
                if self._engine is not None:
                    if not self._engine.idle:
                        return
                    self._engine.release_memory()
                self._engine = engine
            if not self._is_ready(engine, request):
                return
            engine.submit([self._queue.popleft()])

    def _is_ready(self, engine: Engine, request: SampleRequest) -> bool:
        """True if the engine has the weights that a request may start on; it loads them where it
        can."""
        if not engine.idle and (self._exact or request.exact):
            return self._exact and request.exact and engine.version == request.version
        if request.exact:
            is_published = request.version in self._versions
        else:
            is_published = request.version <= self._newest
        if not is_published:
            # A fault of the schedule: sampling from another version would break the bound on
            # staleness unseen.
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
        """Loads the newest version that can be fetched, if it is newer than the engine's, or goes
        on reading it in the background. Returns the version that the engine then has, -1 for
        none."""
        while True:
            newest = None
            if self._versions:
                newest = self._versions[max(self._versions)]
            reading = self._reading
            if reading is not None and not engine.idle:
                # If newer ones were always preferred, a slow host would never end reading.
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
                # The trainer releases a version before it copies the next.
                self._versions.pop(newest.version, None)
        if engine.parameters is None:
            return -1
        return engine.version

    def _load(self, engine: Engine, version: Version) -> None:
        """Gives the engine a version's weights; later, where it samples and they are not read
        yet."""
        started = time.perf_counter()
        self._loading = True
        try:
            if self._reading is None or self._reading.version is not version:
                self._reading = Reading(version, version.read(engine.model, self._frozen))
            weights = self._reading.weights
            if engine.idle or weights.done():
                self._reading = None
                take_weights = weights.result()
                engine.load(version.version, take_weights())
        finally:
            self._loading = False
            self.state.pause_seconds += time.perf_counter() - started


class ThreadHost:
    """An `EngineHost` that runs in a thread of its own; `wake` is called there when answers have
    come."""

    def __init__(self, host: EngineHost, wake: Callable[[], None], name: str) -> None:
        self.host, self._wake = host, wake
        self._messages: deque[Message] = deque()  # that the thread is to pass on
        self._polls_again = False  # though nothing could be sampled when it last polled
        self._answers: dict[int, list[Completion]] = {}
        self._progress = host.progress()
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def handle(self, message: Message) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def poll_again(self) -> None:
        """Has the thread poll its host, though nothing could be sampled when it last did."""
        with self._changed:
            self._polls_again = True
            self._changed.notify()

    def poll(self) -> dict[int, list[Completion]]:
        with self._changed:
            if self._failure is not None:
                raise self._failure
            answers, self._answers = self._answers, {}
            return answers

    def progress(self) -> HostProgress:
        return replace(self._progress, preparing=self.host.preparing)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        # at most a compiled step: what it runs cannot be left while the process goes on
        self._thread.join()

    def _run(self) -> None:
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
            # raised by the next poll: whoever waits for this host must learn of it
            with self._changed:
                self._failure = error
            self._wake()
        finally:
            self.host.close()

    def _wait_until_sampling(self) -> bool:
        """Passes on the messages that have come, and waits for more while nothing can be sampled.
        False once closed."""
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
