"""Base of hosts that are servers behind HTTP: the server, the threads that wait for its answers,
and the inbox that collects them.

    Fleet -> HttpHost (a ThreadHost) -> EngineHost -> HttpEngine
        a thread for each completion that is under way: asks the server, again while it is busy
        a thread that reaches or starts the server
        a thread that asks for the counters of its work

A subclass of `HttpEngine` knows the calls of one system, for example `vllm.py`. Any fault of a
server becomes a `HostLost` that says what is wrong."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import queue
import random
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from shoal.protocols import End, Extend, HostProgress, Load, Message, SampleRequest
from shoal.records import Completion, HostLost, Purpose, SamplingParams, StopReason
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.sampler.partial import ActiveRequest, PartialCompletion
from shoal.text import describe_error, shorten
from shoal.weights.folder_store import FolderVersion

CALL_SECONDS = 60.0
"""Longest time that most calls may take."""
CONNECT_SECONDS = 30.0
"""Longest time that a server which runs already may take to answer."""
START_SECONDS = 300.0
"""Longest time that a server may take to start."""
REQUEST_SECONDS = 1800.0
"""Longest time that a completion may take, including the time that it waits in the server."""
NEWS_SECONDS = 1.0
"""How often a server is asked for its counters."""
BUSY_SECONDS = 2.0
"""Time after which a server that was too busy for a completion is asked again."""
SILENCE_SECONDS = 60.0
"""Longest time without an answer about counters from a server that reads weights or has sampled
nothing yet."""
EMPTY_ABORTS = 20
"""How often in a row a server may return a completion unfinished and without a new token, though
nobody asked for that."""
CHUNK_BYTES = 1 << 16
LAST_LINES = 5
"""Number of lines of an ended server's output that are shown."""
PORTS = range(20_000, 32_000)
"""Ports for servers that are started here; systems open outgoing connections from higher ports."""


class TurnedDown(HostLost):
    """Raised if a server answers with another status than 200."""

    def __init__(self, path: str, status: int, text: str) -> None:
        super().__init__(f"it answered {path} with {status}: {shorten(text, 300)}")
        self.path, self.status = path, status


@dataclass(frozen=True)
class Server:
    """A server's address and, if it was started here, its process and the file with its output.
    `api_key`: the secret that the server asks for; "" if it has none."""

    url: str
    process: subprocess.Popen | None = None
    log: Path = Path()
    api_key: str = ""

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str], log: Path, api_key: str = ""
    ) -> Server:
        """Starts a server as a process, at a random port of this machine, and returns at once: the
        server may not answer yet. `command`: its program and arguments, to which `--host` and
        `--port` are added. `environment`: all of its environment variables. `log`: file to which
        its output is appended. `api_key`: the secret that the server will ask for, "" if none; the
        server must get it from `command` or `environment`. OSError if the program cannot be
        started. Close the server (`close`)."""
        port = random.choice(PORTS)  # if the port is taken, the process says so and ends
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [*command, "--host=127.0.0.1", f"--port={port}"],
                env={**environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return cls(f"http://127.0.0.1:{port}", process, log, api_key)

    def call(
        self, path: str, body: Mapping[str, Any] | None = None, seconds: float = CALL_SECONDS
    ) -> Any:
        """Calls the server, with POST if there is a `body`, else with GET, and returns the value of
        its JSON answer, or the text if the answer's Content-Type is not JSON. Waits at most
        `seconds`, or 0.1 if `seconds` is less. `path`: the part of the address after `url`, like
        "/health". TurnedDown if the status is not 200, HostLost if there is no answer or its JSON
        is wrong."""
        url = urlsplit(self.url)
        method, data = "GET", None
        if body is not None:
            method, data = "POST", json.dumps(body)
        connection_type = http.client.HTTPConnection
        if url.scheme == "https":
            connection_type = http.client.HTTPSConnection
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        seconds = max(0.1, seconds)
        deadline = time.monotonic() + seconds
        try:
            connection = connection_type(url.hostname or "", url.port, timeout=seconds)
            with contextlib.closing(connection):
                connection.request(method, url.path + path, data, headers)
                # kept here: `getresponse` takes it from a connection that is to be closed
                socket = connection.sock
                with connection.getresponse() as reply:
                    text = _read_body(reply, socket, deadline).decode()
                    content_type = reply.headers.get_content_type()
            if reply.status != 200:
                if self.process is not None:
                    # the file has what the server's process wrote about the fault
                    text += f" ({self.log})"
                raise TurnedDown(path, reply.status, text)
            if content_type != "application/json":
                return text
            return json.loads(text)
        except TimeoutError:
            raise HostLost(f"it has not answered {path} in {seconds:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise HostLost(
                self.describe_end() or f"{self.url}{path}: {describe_error(error)}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise HostLost(f"its answer to {path} is not JSON: {describe_error(error)}") from error

    def ask(
        self, path: str, body: Mapping[str, Any] | None = None, seconds: float = CALL_SECONDS
    ) -> dict[str, Any]:
        """Calls the server like `call`, with the same arguments and errors, and returns the JSON
        object that it answers. HostLost if the answer is anything else, for example a proxy's HTML
        page."""
        reply = self.call(path, body, seconds)
        if not isinstance(reply, dict):
            raise HostLost(f"its answer to {path} is not a JSON object: {shorten(str(reply), 200)}")
        return reply

    def describe_end(self, patience: float = 1.0) -> str:
        """Returns a text that says that the server's process has ended, with its exit code and the
        last LAST_LINES lines of its output that are not blank; "" if it still runs after `patience`
        seconds, or was not started here. It waits because connections end before the process
        does."""
        if self.process is None:
            return ""
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return ""
        output = self.log.read_text("utf-8", "replace")
        lines = [line for line in output.split("\n") if line.strip()]
        last_lines = " | ".join(lines[-LAST_LINES:])
        return f"its process has ended ({code}); {self.log} ends with: {last_lines}"

    def wait_until_ready(self, seconds: float) -> None:
        """Waits until the server answers /health with status 200. HostLost if it does not within
        `seconds`, or its process ends."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.call("/health", seconds=5.0)
                return
            except HostLost as error:
                end = self.describe_end(0.0)
                if end:
                    raise HostLost(end) from error
                if time.monotonic() > deadline:
                    raise HostLost(
                        f"{self.url} has not answered in {seconds:.0f} s ({error})"
                    ) from error
            time.sleep(0.2)

    def close(self) -> None:
        """Kills the server's process and all that it started, if it was started here, and waits for
        its end. A server that ran already is left alone."""
        if self.process is None:
            return
        # Kill the whole session: also the server's own child processes, and a process that is
        # stopped.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _read_body(reply: http.client.HTTPResponse, socket: Any, deadline: float) -> bytes:
    """Returns the whole body of an answer. `socket`: that of the connection; `deadline`: as
    `time.monotonic()`. TimeoutError at the deadline: a socket's own timeout starts again with each
    byte, so an answer that trickles in would never end. IncompleteRead if the connection ends
    early."""
    chunks = []
    while True:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        socket.settimeout(seconds)
        chunk = reply.read1(CHUNK_BYTES)
        if not chunk:
            break
        chunks.append(chunk)
    body = b"".join(chunks)
    if reply.length:  # `read1` does not compare with Content-Length at the end of a connection
        raise http.client.IncompleteRead(body, reply.length)
    return body


@contextlib.contextmanager
def reading(path: str, reply: Any) -> Iterator[None]:
    """Context manager in which the answer to a call of `path` is parsed: a LookupError, TypeError,
    ValueError, AttributeError or OverflowError, raised because the answer is not as expected,
    becomes a HostLost with the beginning of the answer. `reply`: the answer's JSON value."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise HostLost(
            f"it answered {path} with {describe_error(error)}: {shorten(json.dumps(reply), 200)}"
        ) from error


class Settings(NamedTuple):
    """What the servers of a run have in common."""

    # token ids whose log-probs are compared with the trainer's after each load of weights
    probe: Sequence[int]
    tolerance: float  # largest difference of the probe's log-probs
    eos_ids: Sequence[int]
    longest: int  # most tokens of a prompt together with its completion
    capacity: int  # most completions at once
    max_support: int = 0  # number of ids per token in `support_ids`; 0: none are stored
    # True if the server gives back memory while it has no completions, because its device is also
    # the trainer's
    sleeps: bool = False
    # lengths of beginnings of the probe; one token is sampled after each, as a check
    beginnings: Sequence[int] = ()
    params: SamplingParams = SamplingParams()  # how these tokens are sampled: like the run's own


class CompletionCall(NamedTuple):
    """A call to a server for the rest of a completion's turn."""

    path: str
    body: dict[str, Any]
    max_tokens: int


class AddedTokens(NamedTuple):
    """The tokens that a server's answer to a `CompletionCall` adds to a completion."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]  # version of the weights, per token
    support_ids: list[np.ndarray]  # int32[max_support] per token; [] if they are not recorded
    # why the turn ended; None: the server returned it unfinished, and the rest must be requested
    reason: StopReason | None


class HttpEngine(ABC):
    """The engine of an `EngineHost` whose completions a server samples. A subclass knows the calls
    of a system.

    Only the host's thread calls the methods; threads that wait for an answer put it into an inbox
    and call `wake`."""

    model = None  # no devices of this process have the weights
    starting = False  # never True: what takes minutes shows in `HttpHost.progress`

    def __init__(
        self,
        open_server: Callable[[FolderVersion], Server],
        settings: Settings,
        wake: Callable[[], None],
    ) -> None:
        """Makes the engine; `begin_opening` opens the server. `open_server`: called once, in a
        thread of its own, with the first version; reaches or starts the server and returns it.
        `wake`: called from any thread when something is in the inbox, so that `step` is called."""
        self.settings = settings
        self.version = -1
        self.parameters: FolderVersion | None = None
        self.requests: dict[int, ActiveRequest] = {}
        # only counts tokens; the number of the server's slots is unknown
        self.counters = Counter[str]()
        self.busy_seconds = 0.0
        self.reports = 0  # how often the server has answered about its counters
        self.opening: Future[Server] | None = None  # done once the server can be used
        self.server: Server | None = None
        self.is_asleep = False  # True while the server has given back its device's memory
        # True while the server is asked to return unfinished completions
        self.is_taking_back = False
        self.is_closed = False
        self.under_way = Counter[int]()  # number of completions that the server has, by version
        self._open_server = open_server
        self._wake = wake
        # completions to request: (request id, number of the completion)
        self._waiting: deque[tuple[int, int]] = deque()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers: dict[int, list[Completion]] = {}
        self._counted_at = time.monotonic()
        self._has_news = False  # True if something arrived since the last `step`
        self._counter_sum = -1.0  # sum of the server's counters when it was last read
        # number of successive answers that returned a completion unfinished and without a token, by
        # completion
        self._empty_aborts = Counter[tuple[int, int]]()

    # -- the calls of a system

    @abstractmethod
    def prepare(self, server: Server) -> None:
        """Checks and sets up the server. Called once the server answers, in a thread of its own.
        ShoalError if the server lacks what is needed."""

    @abstractmethod
    def load(self, version: int, weights: FolderVersion) -> None:
        """Makes the server read a version of the weights, after waking it if it sleeps. LookupError
        if the version does not exist any more, HostLost if the server then has other weights."""

    @abstractmethod
    def release_memory(self) -> None:
        """Makes the server give back its device's memory, if `settings.sleeps`."""

    @abstractmethod
    def completion_call(self, id: int, number: int) -> CompletionCall:
        """Returns the call for the rest of the current turn of a completion: number `number`, from
        0, of request `id`."""

    @abstractmethod
    def read_completion(self, call: CompletionCall, reply: Any, version: int) -> AddedTokens:
        """Returns the tokens in the answer to a call that was made while the server had `version`.
        LookupError, TypeError or ValueError if the answer cannot be right."""

    @abstractmethod
    def read_counter_sum(self, server: Server) -> float:
        """Returns the sum of counters that grow while the server makes progress; 0 if it has no
        counters."""

    # -- requests

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queues the completions of requests, without checking them, which `step` sends to the
        server; those that continue rollouts (branches) go to the front. If the server sleeps, first
        wakes it with the same weights, which takes a while; HostLost if that fails."""
        if self.is_asleep and self.parameters:
            self.load(self.version, self.parameters)
        for request in requests:
            partials = []
            for number in range(request.num_completions):
                limit = request.turn_limit_of(number)
                partials.append(PartialCompletion(request.params.max_tokens, limit))
            self.requests[request.id] = ActiveRequest(request, partials)
            completions = [(request.id, number) for number in range(request.num_completions)]
            if request.branch:
                self._waiting.extendleft(completions)
            else:
                self._waiting.extend(completions)

    def handle(self, message: Message) -> None:
        """Acts on `Extend` or `End`. TypeError for any other message; a server's requests cannot be
        cancelled. KeyError if no request of that id is unfinished."""
        match message:
            case Extend():
                self._extend(message)
            case End():
                self._end(message)
            case _:
                raise TypeError(f"a server does not act on {type(message).__name__}")

    def _extend(self, message: Extend) -> None:
        """Queues the next turn of a completion, ahead of all that wait, after adding its context to
        its tokens. ValueError if the completion does not wait, or the context does not fit."""
        active = self.requests[message.request_id]
        number = message.index - active.request.first
        partial = active.partials[number]
        partial.extend(message.context, message.turn_limit)
        # All at once: the server gets the tokens so far as its prompt.
        partial.feed(len(message.context), self.version, self.settings.max_support)
        partial.begin_decode()
        self._waiting.appendleft((message.request_id, number))

    def _end(self, message: End) -> None:
        """Ends a completion whose turn has ended; forgets the request once all its completions are
        over. Sends nothing: the server keeps nothing of a completion between its turns."""
        active = self.requests[message.request_id]
        active.partials[message.index - active.request.first].end()
        if active.is_done:
            del self.requests[message.request_id]

    @property
    def idle(self) -> bool:
        """True if no request is unfinished."""
        return not self.requests

    @property
    def stuck(self) -> bool:
        """True if the last step brought nothing; `wake` is called when there is something new."""
        return not self._has_news

    def step(self) -> dict[int, list[Completion]]:
        """Handles the answers that have arrived, sends waiting completions to the server until it
        has `settings.capacity`, and returns what has ended since the last step, by request id. Does
        not wait. Raises the error of a call that failed, of any completion: the host then counts as
        lost."""
        self._has_news = False
        while not self._inbox.empty():
            handle_event = self._inbox.get()
            # adds an answer, or raises the error of a call
            handle_event()
        while self._waiting and self.under_way.total() < self.settings.capacity:
            id, number = self._waiting.popleft()
            self._count_under_way(1, self.version)
            call = self.completion_call(id, number)
            arguments = (id, number, self.version, call)
            threading.Thread(target=self._await_answer, args=arguments, daemon=True).start()
        answers = self._answers
        self._answers = {}
        return answers

    def _count_under_way(self, change: int, version: int) -> None:
        """Adds `change` to the number of completions that the server has of a version, and the time
        since the last change to `busy_seconds` if the server had any completions meanwhile.
        `change` may be 0, which brings `busy_seconds` up to date."""
        now = time.monotonic()
        if self.under_way.total() > 0:
            self.busy_seconds += now - self._counted_at
        self.under_way[version] += change
        self._counted_at = now

    def _await_answer(self, id: int, number: int, version: int, call: CompletionCall) -> None:
        """Runs in a thread for each call: calls the server for completion `number` of request `id`,
        again while the server is busy (status 429 or 503) and REQUEST_SECONDS have not passed, and
        puts the answer or the error into the inbox, where the host's thread handles it. `version`:
        the server's when the call was made."""
        assert self.server is not None
        deadline = time.monotonic() + REQUEST_SECONDS
        while True:
            try:
                reply = self.server.ask(call.path, call.body, deadline - time.monotonic())
                self._hand_in(
                    functools.partial(self._accept_answer, id, number, version, call, reply)
                )
                return
            except HostLost as error:
                is_busy = isinstance(error, TurnedDown) and error.status in (429, 503)
                has_time = time.monotonic() + BUSY_SECONDS <= deadline
                if self.is_closed or not is_busy or not has_time:
                    self._hand_in(functools.partial(self._raise, error))
                    return
            except Exception as error:
                # otherwise the error would end this thread unnoticed, and its answer would be
                # awaited forever
                self._hand_in(functools.partial(self._raise, error))
                return
            time.sleep(BUSY_SECONDS)

    def _hand_in(self, event: Callable[[], None]) -> None:
        """Puts a function into the inbox, which the host's thread will call, and wakes that
        thread."""
        self._inbox.put(event)
        self._wake()

    def _raise(self, error: Exception) -> None:
        """Raises an error; as an event in the inbox, it does so in the host's thread."""
        raise error

    def wait_for_answers(self) -> None:
        """Handles answers until the server has no completions, or no answer has come for
        NEWS_SECONDS. Raises the error of a call that failed."""
        try:
            while self.under_way.total():
                handle_event = self._inbox.get(timeout=NEWS_SECONDS)
                # adds an answer, or raises the error of a call
                handle_event()
        except queue.Empty:
            return

    def _accept_answer(
        self, id: int, number: int, version: int, call: CompletionCall, reply: Any
    ) -> None:
        """Adds an answer's tokens to completion `number` of request `id`. If its turn has ended,
        lets the next `step` return the completion (without turns: once the whole request is
        finished); if the server returned it unfinished, queues it again for the rest. `version`:
        the server's when `call` was made. HostLost if the answer cannot be right."""
        self._count_under_way(-1, version)
        self._has_news = True
        active = self.requests[id]
        request = active.request
        partial = active.partials[number]
        with reading(call.path, reply):
            sampled = self.read_completion(call, reply, version)
        num_sampled = len(sampled.token_ids)
        partial.tokens += sampled.token_ids
        partial.logprobs += sampled.logprobs
        partial.versions += sampled.versions
        partial.support_ids += sampled.support_ids
        partial.is_sampled += [True] * num_sampled
        self.counters["tokens"] += num_sampled
        if sampled.reason is None:
            # unfinished: the rest is requested by another call
            self._count_empty_abort(call.path, id, number, num_sampled)
            self._waiting.appendleft((id, number))
            return
        self._empty_aborts.pop((id, number), None)
        partial.end_turn(sampled.reason, request.has_turns)
        finished: list[int] = []
        if request.has_turns:
            finished = [number]
        elif active.is_done:
            # without turns all completions are returned together
            finished = list(range(request.num_completions))
        for finished_number in finished:
            completion = active.partials[finished_number].completion(
                id, request.first + finished_number, self.settings.max_support
            )
            self._answers.setdefault(id, []).append(completion)
        if active.is_done:
            del self.requests[id]

    def _count_empty_abort(self, path: str, id: int, number: int, num_tokens: int) -> None:
        """Counts the successive answers in which the server returned a completion unfinished and
        without a token: adds 1, or starts again at 0 if `num_tokens` is not 0 or the server was
        asked to do that. HostLost at EMPTY_ABORTS, since the server would otherwise be asked
        forever. `path`: the call's, for the message."""
        if num_tokens or self.is_taking_back:
            self._empty_aborts.pop((id, number), None)
            return
        self._empty_aborts[id, number] += 1
        if self._empty_aborts[id, number] >= EMPTY_ABORTS:
            raise HostLost(
                f"it answered {path} {EMPTY_ABORTS} times in a row with finish_reason "
                "abort and no token"
            )

    # -- the server

    def begin_opening(self, version: FolderVersion) -> Future[Server]:
        """Returns the future of the server, which is done once the server can be used; it has the
        error if opening failed. The first call starts a thread that reaches or starts the server,
        with the weights of `version`; later calls ignore `version`."""
        if self.opening is None:
            self.opening = Future()
            arguments = (self.opening, version)
            threading.Thread(target=self._open_into, args=arguments, daemon=True).start()
        return self.opening

    def _open_into(self, opening: Future[Server], version: FolderVersion) -> None:
        """Opens the server, and puts it or the error into the future. Raises nothing; after an
        error it wakes the host's thread."""
        try:
            opening.set_result(self._open(version))
        except BaseException as error:
            # `HttpHost.progress` raises it, and so does whoever waits for the server
            opening.set_exception(error)
            self._wake()

    def _open(self, version: FolderVersion) -> Server:
        """Reaches or starts the server, waits until it is ready, prepares it, and starts the thread
        that watches it. Returns the server. HostLost if it is not ready in time (START_SECONDS, or
        CONNECT_SECONDS if it ran already), ShoalError if it lacks what is needed."""
        server = self._open_server(version)
        self.server = server
        if self.is_closed:
            # closed while it was opened: its process ends, and the wait below raises HostLost
            server.close()
        server.wait_until_ready(START_SECONDS if server.process else CONNECT_SECONDS)
        self.prepare(server)
        threading.Thread(target=self._watch, args=(server,), daemon=True).start()
        return server

    def _watch(self, server: Server) -> None:
        """Runs in a thread of its own: reads the counters that show whether the server makes
        progress, every NEWS_SECONDS until its end, and then hands in a HostLost that says how it
        ended (also after `close`). For a server without counters each answer counts as progress."""
        while not (self.is_closed or server.describe_end(0.0)):
            with contextlib.suppress(HostLost):
                # 0: no counters, so the time stands for a change
                counter_sum = self.read_counter_sum(server) or time.monotonic()
                self.reports += 1
                self._hand_in(functools.partial(self._note_counter_sum, counter_sum))
            time.sleep(NEWS_SECONDS)
        self._hand_in(functools.partial(self._raise, HostLost(server.describe_end(0.0))))

    def _note_counter_sum(self, counter_sum: float) -> None:
        """Notes the sum of the server's counters; if it has changed, `stuck` becomes False, so that
        the host counts this as progress. Also brings `busy_seconds` up to date."""
        if counter_sum != self._counter_sum:
            self._has_news = True
        self._counter_sum = counter_sum
        self._count_under_way(0, self.version)

    def close(self) -> None:
        """Kills the server, if it was started here; a server that ran already goes on with its
        completions; the engine's threads end by themselves."""
        self.is_closed = True
        if self.server is not None:
            self.server.close()


class HttpHost(ThreadHost):
    """A `Host` that is one server: an `EngineHost` around an `HttpEngine`, in a thread."""

    def __init__(
        self,
        name: str,
        make_engine: Callable[
            [Callable[[FolderVersion], Server], Settings, Callable[[], None]], HttpEngine
        ],
        open_server: Callable[[FolderVersion], Server],
        settings: Settings,
        wake: Callable[[], None],
    ) -> None:
        """Makes the engine and starts the host's thread. The server is not opened before the first
        `Load`.

        `name`: name of the thread. `make_engine`: called once with (`open_server`, `settings`, the
        engine's `wake`), like the class of an engine; returns the engine. `open_server`: called
        with the first version, in another thread; reaches or starts the server and returns it.
        `wake`: called when there are answers for `poll`."""
        # The engine calls `poll_again` only after the first `Load`, and so only when the thread
        # exists.
        self.engine: Any = make_engine(open_server, settings, self.poll_again)
        # number of calls of `progress` before the server's first report
        self._early_progress_calls = 0

        def engine_for(purpose: Purpose, group_size: int) -> Any:
            """Returns the one engine, which samples for every purpose and group size."""
            return self.engine

        # a server that sleeps gives memory back whenever nothing is left to sample
        host = EngineHost(engine_for, settings.capacity, settings.sleeps)
        super().__init__(host, wake, name)

    def handle(self, message: Message) -> None:
        """Queues a message; the first `Load` also starts to open the server."""
        super().handle(message)
        if isinstance(message, Load):
            self.engine.begin_opening(message.version)

    def progress(self) -> HostProgress:
        """Returns the host's figures; capacity 0 until the server can be used. Raises the error
        with which opening the server failed."""
        if not self.engine.reports:
            # counted as reports, because the start has a time limit of its own
            self._early_progress_calls += 1
        progress = replace(
            super().progress(),
            busy_seconds=self.engine.busy_seconds,
            reports=self._early_progress_calls + self.engine.reports,
            silence_seconds=SILENCE_SECONDS,
        )
        opening = self.engine.opening
        if opening is None or not opening.done():
            # Groups given to this host now would wait while another server is idle.
            progress.capacity = 0
        else:
            # called for its error alone
            opening.result()
        return progress

    def close(self) -> None:
        """Kills the server if it was started here, and ends the host's thread, without waiting for
        the thread."""
        self.engine.close()
        # The host's thread may be waiting for an answer, so end it in the background.
        threading.Thread(target=super().close, daemon=True).start()
