"""An engine behind HTTP as a host: its server, the threads that wait for answers, their inbox.

    Fleet -> HttpHost (a ThreadHost) -> EngineHost -> HttpEngine
        a thread for each completion that is under way: asks the server, again while it is busy
        a thread that reaches or starts the server
        a thread that asks for the counters of its work

A subclass of `HttpEngine` knows the calls of one system, as `vllm.py` does. What is wrong with a
server is a `HostLost` that says what.
"""

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
from shoal.records import Completion, HostLost, SamplingParams, StopReason
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.sampler.partial import PartialCompletion, Progress
from shoal.text import describe_error, shorten
from shoal.weights.folder_store import FolderVersion

CALL_SECONDS = 60.0
"""How long most calls may take."""
CONNECT_SECONDS = 30.0
"""How long a server that runs already may take to answer."""
START_SECONDS = 300.0
"""How long a server may take to start."""
REQUEST_SECONDS = 1800.0
"""How long a completion may take, with the time that it waits in the server."""
NEWS_SECONDS = 1.0
"""How often a server is asked for its counters."""
BUSY_SECONDS = 2.0
"""After how long a server that was too busy for a completion is asked for it again."""
SILENCE_SECONDS = 60.0
"""How long a server that reads weights, or has sampled nothing yet, may not answer for its
counters."""
EMPTY_ABORTS = 20
"""How often in a row a server may give back a completion without a token of it, while nobody asked
for that."""
CHUNK_BYTES = 1 << 16
LAST_LINES = 5
"""Lines of an ended server's output that are shown."""
PORTS = range(20_000, 32_000)
"""Where servers that are started listen: systems connect from higher ports."""


class TurnedDown(HostLost):
    """A server's answer of another status than 200."""

    def __init__(self, path: str, status: int, text: str) -> None:
        super().__init__(f"it answered {path} with {status}: {shorten(text, 300)}")
        self.path, self.status = path, status


@dataclass(frozen=True)
class Server:
    """A server's address and, where it was started here, its process and the file with its output.
    `api_key`: its secret, empty where it has none."""

    url: str
    process: subprocess.Popen | None = None
    log: Path = Path()
    api_key: str = ""

    @classmethod
    def start(
        cls, words: Sequence[str], environment: Mapping[str, str], log: Path, api_key: str = ""
    ) -> Server:
        """A process of its own at a port of this machine; `words`: the command without the port."""
        port = random.choice(PORTS)  # if it is taken, the process says so and ends
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [*words, "--host=127.0.0.1", f"--port={port}"],
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
        """What it answers: the value of its JSON, or a text. Waits `seconds` at most; raises
        HostLost."""
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
                socket = connection.sock
                with connection.getresponse() as reply:
                    text = _read_body(reply, socket, deadline).decode()
                    content_type = reply.headers.get_content_type()
            if reply.status != 200:
                if self.process is not None:
                    text += f" ({self.log})"
                raise TurnedDown(path, reply.status, text)
            if content_type != "application/json":
                return text
            return json.loads(text)
        except TimeoutError:
            raise HostLost(f"it has not answered {path} in {seconds:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise HostLost(self.ended() or f"{self.url}{path}: {describe_error(error)}") from error
        except (ValueError, RecursionError) as error:
            raise HostLost(
                f"it answered {path} with what is no JSON: {describe_error(error)}"
            ) from error

    def ask(
        self, path: str, body: Mapping[str, Any] | None = None, seconds: float = CALL_SECONDS
    ) -> dict[str, Any]:
        """`call` for an answer that must be a JSON object; HostLost for anything else, as a proxy's
        HTML page."""
        reply = self.call(path, body, seconds)
        if not isinstance(reply, dict):
            raise HostLost(
                f"it answered {path} with what is no JSON object: {shorten(str(reply), 200)}"
            )
        return reply

    def ended(self, patience: float = 1.0) -> str:
        """That its process has ended, with its last lines; "" unless it has. Waits `patience`
        seconds for the end, as connections end before the process does."""
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
        """HostLost where it does not answer in time, or its process ends."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.call("/health", seconds=5.0)
                return
            except HostLost as error:
                end = self.ended(0.0)
                if end:
                    raise HostLost(end) from error
                if time.monotonic() > deadline:
                    raise HostLost(
                        f"{self.url} has not answered in {seconds:.0f} s ({error})"
                    ) from error
            time.sleep(0.2)

    def close(self) -> None:
        if self.process is None:
            return
        # The whole session: its own processes too, and one that is stopped.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _read_body(reply: http.client.HTTPResponse, socket: Any, deadline: float) -> bytes:
    """All of an answer. TimeoutError at the deadline: a socket's own timeout begins again with each
    byte, so an answer that trickles would never end."""
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
    """HostLost, with the beginning of the answer, where it has not the form that is read from
    it."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise HostLost(
            f"it answered {path} with {describe_error(error)}: {shorten(json.dumps(reply), 200)}"
        ) from error


class Settings(NamedTuple):
    """What the servers of a run share."""

    probe: Sequence[int]  # token ids whose log-probs are compared after each load
    tolerance: float  # of a log-prob of the probe
    eos_ids: Sequence[int]
    longest: int  # tokens of a prompt with its completion
    capacity: int  # completions at once
    max_support: int = 0  # ids a token of `support_ids`; 0: none are stored
    sleeps: bool = False  # while it has no completions, as its device is the trainer's, too
    # lengths of the probe's beginnings after each of which a token is sampled
    beginnings: Sequence[int] = ()
    params: SamplingParams = SamplingParams()  # how these are sampled: as the run's own tokens


class CompletionCall(NamedTuple):
    """A server's call for the rest of a completion's turn."""

    path: str
    body: dict[str, Any]
    max_tokens: int


class SampledPart(NamedTuple):
    """What a server's answer to a `CompletionCall` adds to a completion."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]  # of each token
    support_ids: list[np.ndarray]  # of each token, int32[max_support]; empty without
    reason: StopReason | None  # None: the server gave it back, and the rest is to be asked for


class HttpEngine(ABC):
    """What an `EngineHost` asks of an engine, by the calls of a server. `open_server` gets the
    first version. A subclass knows the calls of a system.

    One thread, the host's, calls its methods; threads that wait for an answer leave it in an inbox
    and call `wake`."""

    model = None  # its weights have no devices of this process
    starting = False  # what takes minutes shows in `HttpHost.progress`

    def __init__(
        self,
        open_server: Callable[[FolderVersion], Server],
        settings: Settings,
        wake: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.version = -1
        self.parameters: FolderVersion | None = None
        self.progress: dict[int, Progress] = {}
        # Of tokens alone: how many slots a server has is its own affair.
        self.counters = Counter[str]()
        self.busy_seconds = 0.0
        self.reports = 0  # how often the server was heard of
        self.opening: Future[Server] | None = None  # done once the server can be used
        self.server: Server | None = None
        self.is_asleep = False  # it gave back its device's memory
        self.is_taking_back = False  # it was told to give back what is under way
        self.is_closed = False
        self.under_way = Counter[int]()  # completions that the server has, by version
        self._open_server = open_server
        self._wake = wake
        self._waiting: deque[tuple[int, int]] = deque()  # completions: request's id, and number
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers: dict[int, list[Completion]] = {}
        self._counted_at = time.monotonic()
        self._has_news = False  # since the last `step`
        self._work = -1.0  # the server's counters when they were last read
        # by completion: answers in a row that gave it back without a token
        self._empty_aborts = Counter[tuple[int, int]]()

    # -- the calls of a system

    @abstractmethod
    def prepare(self, server: Server) -> None:
        """Called once the server answers, in a thread of its own. ShoalError where it lacks what is
        needed."""

    @abstractmethod
    def load(self, version: int, weights: FolderVersion) -> None:
        """Has the server read a version, and wakes it first if it sleeps. LookupError where the
        version does not exist any more, HostLost where the server's weights are others."""

    @abstractmethod
    def release_memory(self) -> None:
        """Has the server give back its device's memory, where `settings.sleeps`."""

    @abstractmethod
    def completion_call(self, id: int, number: int) -> CompletionCall:
        """The call for the rest of a completion's turn."""

    @abstractmethod
    def read_completion(self, call: CompletionCall, reply: Any, version: int) -> SampledPart:
        """The answer to a call that was made while the server had `version`. LookupError, TypeError
        or ValueError for one that cannot be right."""

    @abstractmethod
    def read_work(self, server: Server) -> float:
        """The sum of counters that show whether the server makes progress; 0 where it has none."""

    # -- requests

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        if self.is_asleep and self.parameters:
            self.load(self.version, self.parameters)
        for request in requests:
            partials = []
            for number in range(request.num_completions):
                limit = request.turn_limit_of(number)
                partials.append(PartialCompletion(request.params.max_tokens, limit))
            self.progress[request.id] = Progress(request, partials)
            completions = [(request.id, number) for number in range(request.num_completions)]
            if request.branch:
                self._waiting.extendleft(completions)
            else:
                self._waiting.extend(completions)

    def handle(self, message: Message) -> None:
        """Acts on a message about completions that have begun. TypeError for any other."""
        match message:
            case Extend():
                self._extend(message)
            case End():
                self._end(message)
            case _:
                raise TypeError(f"a server does not act on {type(message).__name__}")

    def _extend(self, message: Extend) -> None:
        progress = self.progress[message.request_id]
        number = message.index - progress.request.first
        partial = progress.partials[number]
        partial.extend(message.context, message.turn_limit)
        partial.feed(len(message.context), self.version, self.settings.max_support)
        self._waiting.appendleft((message.request_id, number))

    def _end(self, message: End) -> None:
        progress = self.progress[message.request_id]
        progress.partials[message.index - progress.request.first].waits = False
        if progress.is_done:
            del self.progress[message.request_id]

    @property
    def idle(self) -> bool:
        return not self.progress

    @property
    def stuck(self) -> bool:
        """True if the last step brought nothing: `wake` says when the next one does."""
        return not self._has_news

    def step(self) -> dict[int, list[Completion]]:
        """What has ended since the last."""
        self._has_news = False
        while not self._inbox.empty():
            enter = self._inbox.get()
            enter()
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
        """Begins or ends completions, and adds up for how long there were some."""
        now = time.monotonic()
        if self.under_way.total() > 0:
            self.busy_seconds += now - self._counted_at
        self.under_way[version] += change
        self._counted_at = now

    def _await_answer(self, id: int, number: int, version: int, call: CompletionCall) -> None:
        """In a thread of its own. A busy server is asked again."""
        assert self.server is not None
        deadline = time.monotonic() + REQUEST_SECONDS
        while True:
            try:
                reply = self.server.ask(call.path, call.body, deadline - time.monotonic())
                self._hand_in(functools.partial(self._enter, id, number, version, call, reply))
                return
            except HostLost as error:
                is_busy = isinstance(error, TurnedDown) and error.status in (429, 503)
                has_time = time.monotonic() + BUSY_SECONDS <= deadline
                if self.is_closed or not is_busy or not has_time:
                    self._hand_in(functools.partial(self._fail, error))
                    return
            except Exception as error:
                # unseen it would end this thread, and its answer be awaited for ever
                self._hand_in(functools.partial(self._fail, error))
                return
            time.sleep(BUSY_SECONDS)

    def _hand_in(self, event: Callable[[], None]) -> None:
        self._inbox.put(event)
        self._wake()

    def _fail(self, error: Exception) -> None:
        raise error

    def wait_for_answers(self) -> None:
        """Enters answers until nothing is under way, or none has come for NEWS_SECONDS."""
        try:
            while self.under_way.total():
                enter = self._inbox.get(timeout=NEWS_SECONDS)
                enter()
        except queue.Empty:
            return

    def _enter(self, id: int, number: int, version: int, call: CompletionCall, reply: Any) -> None:
        """Enters an answer. HostLost for one that cannot be right."""
        self._count_under_way(-1, version)
        self._has_news = True
        progress = self.progress[id]
        request = progress.request
        partial = progress.partials[number]
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
            self._count_empty_abort(call.path, id, number, num_sampled)
            self._waiting.appendleft((id, number))
            return
        self._empty_aborts.pop((id, number), None)
        partial.end_turn(sampled.reason, request.has_turns)
        finished: list[int] = []
        if request.has_turns:
            finished = [number]
        elif progress.is_done:
            finished = list(range(request.num_completions))
        for finished_number in finished:
            completion = progress.partials[finished_number].completion(
                id, request.first + finished_number, self.settings.max_support
            )
            self._answers.setdefault(id, []).append(completion)
        if progress.is_done:
            del self.progress[id]

    def _count_empty_abort(self, path: str, id: int, number: int, num_tokens: int) -> None:
        """HostLost where a server gives back a completion again and again without a token of it: it
        would be asked for ever."""
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
        """Reaches or starts the server in a thread of its own, once."""
        if self.opening is None:
            self.opening = Future()
            arguments = (self.opening, version)
            threading.Thread(target=self._open_into, args=arguments, daemon=True).start()
        return self.opening

    def _open_into(self, opening: Future[Server], version: FolderVersion) -> None:
        try:
            opening.set_result(self._open(version))
        except BaseException as error:
            # raised by `HttpHost.progress`, and by whoever waits for the server
            opening.set_exception(error)
            self._wake()

    def _open(self, version: FolderVersion) -> Server:
        server = self._open_server(version)
        self.server = server
        if self.is_closed:
            server.close()
        server.wait_until_ready(START_SECONDS if server.process else CONNECT_SECONDS)
        self.prepare(server)
        threading.Thread(target=self._watch, args=(server,), daemon=True).start()
        return server

    def _watch(self, server: Server) -> None:
        """In a thread of its own: asks for the counters that show whether the server makes
        progress; one that has none makes some by answering."""
        while not (self.is_closed or server.ended(0.0)):
            with contextlib.suppress(HostLost):
                work = self.read_work(server) or time.monotonic()
                self.reports += 1
                self._hand_in(functools.partial(self._note_work, work))
            time.sleep(NEWS_SECONDS)
        self._hand_in(functools.partial(self._fail, HostLost(server.ended(0.0))))

    def _note_work(self, work: float) -> None:
        if work != self._work:
            self._has_news = True
        self._work = work
        self._count_under_way(0, self.version)

    def close(self) -> None:
        self.is_closed = True
        if self.server is not None:
            self.server.close()


class HttpHost(ThreadHost):
    """A `Host` that is one server, by an engine of the type `make_engine`."""

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
        self.engine: Any = make_engine(open_server, settings, self.poll_again)
        self._asked_before_reports = 0
        host = EngineHost(lambda purpose, size: self.engine, settings.capacity, settings.sleeps)
        super().__init__(host, wake, name)

    def handle(self, message: Message) -> None:
        super().handle(message)
        if isinstance(message, Load):
            self.engine.begin_opening(message.version)

    def progress(self) -> HostProgress:
        if not self.engine.reports:
            self._asked_before_reports += 1  # a start ends by a limit of its own
        progress = replace(
            super().progress(),
            busy_seconds=self.engine.busy_seconds,
            reports=self._asked_before_reports + self.engine.reports,
            silence_seconds=SILENCE_SECONDS,
        )
        opening = self.engine.opening
        if opening is None or not opening.done():
            # Groups that it had now would wait, while another server is idle.
            progress.capacity = -1
        else:
            opening.result()
        return progress

    def close(self) -> None:
        self.engine.close()
        # Its thread may wait for an answer.
        threading.Thread(target=super().close, daemon=True).start()
