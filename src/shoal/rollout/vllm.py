"""vLLM as a host: a server that is asked by token ids over HTTP and reads each version of the
weights from a folder.

    Fleet -> VllmHost (a ThreadHost) -> VllmEngine, a thread each
        -> POST /inference/v1/generate: a completion
        -> pause, reload_weights, update_weight_version, resume;
           or load_lora_adapter; on a shared GPU sleep and wake_up

vLLM is never imported. Its calls (0.32): `entrypoints/scale_out/token_in_token_out/protocol.py`,
`entrypoints/rl/online/api_router.py`, `entrypoints/serve/lora`, `entrypoints/serve/dev/sleep`. What
is wrong with a server is a `HostLost` that says what.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import queue
import random
import re
import secrets
import signal
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from shoal.protocols import End, Extend, HostProgress, Load, Message, SampleRequest
from shoal.records import Completion, HostLost, HostRefused, SamplingParams, ShoalError, StopReason
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.sampler.partial import PartialCompletion, Progress
from shoal.text import describe_error, exact, shorten
from shoal.weights.folder_store import FolderVersion

NEWS_SECONDS, BUSY_SECONDS = 1.0, 2.0
"""How often a server is asked for its counters, and one that was too busy for a completion is asked
again."""


LOAD_SECONDS, REQUEST_SECONDS, START_SECONDS, CONNECT_SECONDS = 600.0, 1800.0, 300.0, 30.0
"""How long may take reading weights, a completion with its waiting, a start, and a first answer."""


EMPTY_ABORTS = 20
"""How often in a row a completion may be answered by `abort` without a token, while nobody asked
for that."""


SILENCE_SECONDS = 60.0
"""How long a server that reads weights, or has sampled nothing yet, may not answer for its
counters."""


COUNTERS = re.compile(
    r"^vllm:(?:prompt_tokens|generation_tokens|iteration_tokens)_total(?:_count)?\{\S* (\S+)", re.M
)


class Settings(NamedTuple):
    """What the servers of a run share."""

    probe: Sequence[int]  # token ids whose log-probs are compared after each load
    tolerance: float  # of a log-prob of the probe
    eos_ids: Sequence[int]
    longest: int  # tokens of a prompt with its completion
    capacity: int  # completions at once
    max_support: int = 0  # ids a token of `support_ids`; 0: none are stored
    sleeps: bool = False  # while it has no completions, as its device is the trainer's, too
    beginnings: Sequence[
        int
    ] = ()  # lengths of the probe's beginnings after each of which a token is sampled
    params: SamplingParams = SamplingParams()  # how these are sampled: as the run's own tokens


class VllmEngine:
    """What an `EngineHost` asks of an engine, by a server; `open_server` is given the first
    version.

    One thread calls it; those that wait for an answer leave it in `_inbox` and call `wake`."""

    model, starting = None, False  # its weights have no devices of this process

    def __init__(
        self,
        open_server: Callable[[FolderVersion], Server],
        settings: Settings,
        wake: Callable[[], None],
    ) -> None:
        self._open_server, self.settings, self._wake = open_server, settings, wake
        self.version, self.busy_seconds, self.reports = -1, 0.0, 0
        # Of tokens alone: how many slots a server has is its own affair.
        self.counters = Counter[str]()
        self.parameters: FolderVersion | None = None
        self.progress: dict[int, Progress] = {}
        self._server: Server | None = None
        self._queue: deque[tuple[int, int]] = deque()  # id and number of completions
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers: dict[int, list[Completion]] = {}
        self._going, self._counted_at = (
            Counter[int](),
            time.monotonic(),
        )  # completions under way, by version
        self._adapters: dict[str, int] = {}  # that the server has, and their versions
        self._path, self._name, self._work, self._moved, self._closed = (
            GENERATE,
            "",
            -1.0,
            False,
            False,
        )
        self._is_asleep = False
        self._seen: tuple[Any, list[float]] = (
            None,
            [],
        )  # the server's checksums and log-probs of the last load
        self.opening: Future[Server] | None = (
            None  # done once the server has answered and has what is needed
        )
        self._taking_back = False
        self._empty_aborts = Counter[
            tuple[int, int]
        ]()  # by completion: answers in a row that took it back untouched

    # -- requests

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        if self._is_asleep and self.parameters:
            self.load(self.version, self.parameters)
        for one in requests:
            self.progress[one.id] = Progress(
                one,
                [
                    PartialCompletion(one.params.max_tokens, one.turn_limit_of(number))
                    for number in range(one.num_completions)
                ],
            )
            add = self._queue.extendleft if one.branch else self._queue.extend
            add((one.id, number) for number in range(one.num_completions))

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
        self._queue.appendleft((message.request_id, number))

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
        return not self._moved

    def step(self) -> dict[int, list[Completion]]:
        """What has ended since the last."""
        self._moved = False
        while not self._inbox.empty():
            self._inbox.get()()
        while self._queue and self._going.total() < self.settings.capacity:
            place = self._queue.popleft()
            self._count(1, self.version)
            threading.Thread(
                target=self._ask, args=(*place, self.version, self._body(*place)), daemon=True
            ).start()
        answers, self._answers = self._answers, {}
        return answers

    def _count(self, change: int, version: int) -> None:
        """Begins or ends completions, and notes for how long there were some."""
        now = time.monotonic()
        self.busy_seconds += (now - self._counted_at) * (self._going.total() > 0)
        self._going[version], self._counted_at = self._going[version] + change, now

    def _body(self, id: int, number: int) -> dict[str, Any]:
        request, one = self.progress[id].request, self.progress[id].partials[number]
        p, tokens = request.params, one.tokens
        # Of its own, as the engines of a data-parallel server seed alike; what follows a pause has
        # another.
        seed = request.noise_key.key(request.first + number).tobytes() + len(tokens).to_bytes(8)
        return self._request(
            [*request.prompt_ids.tolist(), *tokens],
            str(self.version),
            {
                "max_tokens": one.turn_end - len(tokens),
                **_distribution(p),
                "stop": list(p.stop),
                "stop_token_ids": list(self.settings.eos_ids),
                "logprobs": 0,
                "seed": int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest()) >> 1,
                "skip_special_tokens": False,
            },
        )

    def _request(self, ids: list[int], salt: str, params: dict[str, Any]) -> dict[str, Any]:
        """`salt`: the keys of prompts that the server keeps are for requests with the same
        alone."""
        if self._path == GENERATE:
            return {
                "model": self._name,
                "token_ids": ids,
                "cache_salt": salt,
                "sampling_params": params,
            }
        return {
            "model": self._name,
            "prompt": ids,
            "return_token_ids": True,
            "cache_salt": salt,
            **params,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }

    def _ask(self, id: int, number: int, version: int, body: dict[str, Any]) -> None:
        """In a thread of its own. A busy server is asked again."""
        assert self._server is not None
        deadline = time.monotonic() + REQUEST_SECONDS
        max_tokens = body.get("sampling_params", body)["max_tokens"]
        while True:
            try:
                reply = self._server.ask(self._path, body, deadline - time.monotonic())
                return self._hand_in(partial(self._take, id, number, version, max_tokens, reply))
            except HostLost as error:
                is_busy = isinstance(error, TurnedDown) and error.status in (429, 503)
                if self._closed or not is_busy or time.monotonic() + BUSY_SECONDS > deadline:
                    return self._hand_in(partial(self._fail, error))
            except (
                Exception
            ) as error:  # unseen it would end this thread, and its answer be awaited for ever
                return self._hand_in(partial(self._fail, error))
            time.sleep(BUSY_SECONDS)

    def _hand_in(self, event: Callable[[], None]) -> None:
        self._inbox.put(event)
        self._wake()

    def _fail(self, error: Exception) -> None:
        raise error

    def _take(self, id: int, number: int, version: int, max_tokens: int, reply: Any) -> None:
        """Enters an answer. HostLost for one that cannot be right."""
        self._count(-1, version)
        self._moved, most, progress = True, self.settings.max_support, self.progress[id]
        request, one = progress.request, progress.partials[number]
        with reading(self._path, reply):
            (choice,) = reply["choices"]
            ids, logprobs = read_tokens(choice)
            reason = read_reason(choice, ids, self.settings.eos_ids)
            spans = {} if self._adapters else choice  # these know the base's version alone
            one.versions += read_versions(spans, len(ids)) or [version] * len(ids)
            one.support_ids += read_support(choice, len(ids), most)
            check_length(choice, len(ids), max_tokens)
        one.tokens += ids
        one.logprobs += logprobs
        one.is_sampled += [True] * len(ids)
        self.counters["tokens"] += len(ids)
        if reason is None:
            self._count_empty_abort(id, number, len(ids))
            self._queue.appendleft((id, number))
            return
        self._empty_aborts.pop((id, number), None)
        one.end_turn(reason, request.has_turns)
        for each in (
            [number]
            if request.has_turns
            else range(request.num_completions)
            if progress.is_done
            else ()
        ):
            completion = progress.partials[each].completion(id, request.first + each, most)
            self._answers.setdefault(id, []).append(completion)
        if progress.is_done:
            del self.progress[id]

    def _count_empty_abort(self, id: int, number: int, num_tokens: int) -> None:
        """HostLost where a server takes a completion back again and again without a token of it: it
        would be asked for ever."""
        if num_tokens or self._taking_back:
            self._empty_aborts.pop((id, number), None)
            return
        self._empty_aborts[id, number] += 1
        if self._empty_aborts[id, number] >= EMPTY_ABORTS:
            raise HostLost(
                f"it answered {self._path} {EMPTY_ABORTS} times in a row with finish_reason "
                "abort and no token"
            )

    # -- the server

    def begin_opening(self, version: FolderVersion) -> Future[Server]:
        """Reaches or starts the server in a thread of its own, once."""
        if self.opening is None:
            self.opening = Future()
            threading.Thread(
                target=self._open_into, args=(self.opening, version), daemon=True
            ).start()
        return self.opening

    def _open_into(self, opening: Future[Server], version: FolderVersion) -> None:
        try:
            opening.set_result(self._open(version))
        except (
            BaseException
        ) as error:  # raised by `VllmHost.progress`, and by whoever waits for the server
            opening.set_exception(error)
            self._wake()

    def _open(self, version: FolderVersion) -> Server:
        """The server, ready. ShoalError where it lacks what is needed."""
        self._server = server = self._open_server(version)
        if self._closed:
            server.close()
        server.wait_until_ready(START_SECONDS if server.process else CONNECT_SECONDS)
        longest, models = self.settings.longest, server.ask("/v1/models")
        with reading("/v1/models", models):
            model = models["data"][0]
            self._name, most = model["id"], int(model.get("max_model_len") or longest)
        if most < longest:
            raise ShoalError(
                f"the server at {server.url} takes {most} tokens, and a prompt with its completion "
                f"may have {longest}: start it with --max-model-len={longest}"
            )
        try:
            server.call("/is_paused")
            with contextlib.suppress(TurnedDown):
                server.call(
                    "/resume", {}
                )  # a host that was lost may have left it paused, with requests
                server.call("/abort_requests", {})
            server.call(
                GENERATE, self._request(list(self.settings.probe), "join", {"max_tokens": 1})
            )
        except TurnedDown as error:
            if error.status not in (403, 404, 405):
                raise
            if error.path != GENERATE or error.status == 403:
                raise ShoalError(
                    f"the server at {server.url} lacks what a sampler needs ({error}): start it "
                    "with VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out"
                ) from error
            self._path = COMPLETE  # of an older version
        threading.Thread(target=self._watch, args=(server,), daemon=True).start()
        return server

    def _watch(self, server: Server) -> None:
        """In a thread of its own: asks for the counters that show whether the server makes
        progress; one that has none makes some by answering."""
        while not (self._closed or server.ended(0.0)):
            with contextlib.suppress(HostLost):
                text = ""
                with contextlib.suppress(TurnedDown):
                    text = server.call("/metrics")
                self.reports += 1
                self._hand_in(partial(self._note, read_counters(text) or time.monotonic()))
            time.sleep(NEWS_SECONDS)
        self._hand_in(partial(self._fail, HostLost(server.ended(0.0))))

    def _note(self, work: float) -> None:
        self._moved, self._work = self._moved or work != self._work, work
        self._count(0, self.version)

    def release_memory(self) -> None:
        """Has the server give back its device's memory. The weights stay on the host only where an
        adapter is all that comes anew."""
        if self.settings.sleeps and self._server and not self._is_asleep:
            self._server.call(f"/sleep?level={1 if self._adapters else 2}", {})
            self._is_asleep = True

    def load(self, version: int, weights: FolderVersion) -> None:
        """Has the server read a version, and wakes it first if it sleeps."""
        server = self.begin_opening(weights).result()
        try:
            if self._is_asleep:
                server.call("/wake_up?tags=weights", {}, LOAD_SECONDS)
            if weights.base is None:
                self._reload(server, weights)
            else:
                self._load_adapter(server, weights)
            if self._is_asleep:
                server.call("/wake_up?tags=kv_cache", {})
            self._is_asleep = False
            self._check(server, weights)  # what is sampled meanwhile is not looked at before
        except TurnedDown as error:
            if not weights.exists:
                raise LookupError(f"version {version} is not published any more") from error
            hint = ""
            if error.path in (RELOAD, ADAPTER):
                hint = (
                    f" (its files are in {weights.folder}: the server must see the folder "
                    "publish.folder under the same path)"
                )
            raise HostLost(f"version {version} could not be loaded: {error}{hint}") from error
        self.version, self.parameters = version, weights

    def _reload(self, server: Server, weights: FolderVersion) -> None:
        """What is under way waits and goes on with the new weights; an older server does not tell
        which tokens are of which version: from it they are taken back, and the rest is asked for
        afterwards."""
        if goes_on := self._going.total() > 0:
            if self._path == GENERATE:
                server.call("/pause?mode=keep", {})
            else:
                self._take_back(server)
        server.call(
            RELOAD,
            {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}},
            LOAD_SECONDS,
        )
        server.call("/update_weight_version", {"new_version": str(weights.version)})
        # Keys of what is under way are computed anew, so that its next tokens are of the new
        # version alone.
        server.call(f"/reset_prefix_cache?reset_running_requests={str(goes_on).lower()}", {})
        if goes_on:
            server.call("/resume", {})

    def _load_adapter(self, server: Server, weights: FolderVersion) -> None:
        """What is under way goes on with the adapter that it began with, which is unloaded once
        nothing asks for it."""
        for name in [name for name, version in self._adapters.items() if not self._going[version]]:
            server.call("/v1/unload_lora_adapter", {"lora_name": name})
            del self._adapters[name]
        # a name used twice may give older keys and weights
        self._name = f"{weights.folder.name}-{secrets.token_hex(4)}"
        try:
            server.call(
                ADAPTER, {"lora_name": self._name, "lora_path": str(weights.folder)}, LOAD_SECONDS
            )
        except TurnedDown as error:
            if "LoRA" not in str(error) or not weights.exists:
                raise
            raise ShoalError(
                f"the server at {server.url} does not take the adapter ({error}): start it with "
                "--enable-lora, --max-lora-rank of at least model.lora.rank, and --max-loras of at "
                "least train.max_staleness + 2; or without VLLM_ALLOW_RUNTIME_LORA_UPDATING, for "
                "whole models"
            ) from error
        self._adapters[self._name] = weights.version

    def _take_back(self, server: Server) -> None:
        """Has all that is under way answered with what there is of it."""
        deadline = time.monotonic() + CALL_SECONDS
        self._taking_back = True
        while self._going.total():
            server.call("/pause?mode=abort", {})
            with contextlib.suppress(queue.Empty):
                while self._going.total():
                    self._inbox.get(timeout=NEWS_SECONDS)()
            if self._going.total():  # a request that came after the pause waits for its end
                server.call("/resume", {})
            if time.monotonic() > deadline:
                raise HostLost(
                    f"after pause?mode=abort it has not answered {self._going.total()} requests"
                )
        self._taking_back = False

    def _check(self, server: Server, weights: FolderVersion) -> None:
        """HostLost unless the server's weights moved if the trainer's did, and both have the same
        log-probs of the probe, and of tokens that the server samples after it."""
        sums = None
        with contextlib.suppress(TurnedDown):
            reply = server.ask("/weight_checker", {"action": "checksum"})
            with reading("/weight_checker", reply):
                sums = reply["checksums"]
        found = self._score_probe(server, weights)
        if not found and sums is None:
            raise HostRefused(
                "it has no /weight_checker and no prompt_logprobs: nothing shows which weights it "
                "has"
            )
        before, self._seen = self._seen, (sums, found)
        most, last = self.settings.tolerance, self.parameters
        # vLLM on CPU frees the matrices that it packs, and its checksum has none of these: both
        # must stand still. No checksum has an adapter, and a small change of one is less than the
        # rounding of the probe.
        if (
            last
            and before == self._seen
            and last.checksum != weights.checksum
            and (
                weights.base is None
                or np.abs(weights.probe.logprobs - last.probe.logprobs).max() > most / 10
            )
        ):
            what = "reload_weights" if weights.base is None else "load_lora_adapter"
            raise HostRefused(
                f"it answered {what} with 200 and still has the weights of version "
                f"{self.version}, not {weights.version}: it takes no weights over HTTP"
            )
        if found:
            gap = np.abs(np.array(found) - weights.probe.logprobs).max()
            self._check_gap(
                gap, weights, "its log-probs differ", "other weights, another model or another type"
            )
        self._check_sampling(server, weights)

    def _score_probe(self, server: Server, weights: FolderVersion) -> list[float]:
        """The server's log-probs of the probe; empty where it gives none."""
        ids = list(self.settings.probe)
        reply = server.ask(
            self._path,
            self._request(
                ids,
                f"probe {weights.version}",
                {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
            ),
        )
        with reading(self._path, reply):
            scored = (
                reply.get("prompt_logprobs") or reply["choices"][0].get("prompt_logprobs") or []
            )
            found = [
                float(one[str(id)]["logprob"]) for id, one in zip(ids, scored, strict=False) if one
            ]
            if found and len(found) != len(weights.probe.logprobs):
                raise ValueError(
                    f"prompt_logprobs of {len(found)} tokens in place of "
                    f"{len(weights.probe.logprobs)}"
                )
        return found

    def _check_sampling(self, server: Server, weights: FolderVersion) -> None:
        """Has the server sample a token after beginnings of the probe, as the run's tokens are
        sampled.

        Log-probs of given tokens can be right while those of sampled ones are not: taken before
        temperature and truncation, or of other tokens than those that are returned."""
        settings = self.settings
        for length, expected in zip(settings.beginnings, weights.probe.next_token, strict=True):
            reply = server.ask(
                self._path,
                self._request(
                    list(settings.probe[:length]),
                    f"probe {weights.version}",
                    {
                        "max_tokens": 1,
                        **_distribution(settings.params),
                        "logprobs": 0,
                        "skip_special_tokens": False,
                    },
                ),
            )
            with reading(self._path, reply):
                (choice,) = reply["choices"]
                ids, logprobs = read_tokens(choice)
                if len(ids) != 1 or not 0 <= ids[0] < len(expected):
                    raise ValueError(f"tokens {ids[:5]}: expected one, below {len(expected)}")
            gap = abs(logprobs[0] - float(expected[ids[0]]))
            self._check_gap(
                gap,
                weights,
                "the log-probs of tokens that it samples differ",
                "start it with --logprobs-mode=processed_logprobs and --generation-config=vllm",
            )

    def _check_gap(self, gap: float, weights: FolderVersion, what: str, cause: str) -> None:
        most = self.settings.tolerance
        if not gap <= most:  # so that NaN is a gap
            raise HostLost(
                f"{what} from the trainer's by up to {gap:.3g} at version {weights.version}, more "
                f"than vllm.tolerance={exact(most)}: {cause}"
            )

    def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()


class VllmHost(ThreadHost):
    """A `Host` that is one server."""

    def __init__(
        self,
        name: str,
        open_server: Callable[[FolderVersion], Server],
        settings: Settings,
        wake: Callable[[], None],
    ) -> None:
        self.engine: Any = VllmEngine(open_server, settings, self.poll_again)
        self._looks = 0
        super().__init__(
            EngineHost(lambda purpose, size: self.engine, settings.capacity, settings.sleeps),
            wake,
            name,
        )

    def handle(self, message: Message) -> None:
        super().handle(message)
        if isinstance(message, Load):
            self.engine.begin_opening(message.manifest)

    def progress(self) -> HostProgress:
        self._looks += not self.engine.reports  # a start ends by a limit of its own
        progress = replace(
            super().progress(),
            busy_seconds=self.engine.busy_seconds,
            reports=self._looks + self.engine.reports,
            silence_seconds=SILENCE_SECONDS,
        )
        opening = self.engine.opening
        if opening is None or not opening.done():
            progress.capacity = (
                -1
            )  # groups that it had now would wait, while another server is idle
        else:
            opening.result()
        return progress

    def close(self) -> None:
        self.engine.close()
        threading.Thread(
            target=super().close, daemon=True
        ).start()  # its thread may wait for an answer


def _distribution(p: SamplingParams) -> dict[str, Any]:
    """The fields of a request that say from which distribution tokens are sampled."""
    return {"temperature": p.temperature, "top_k": p.top_k, "top_p": p.top_p, "min_p": p.min_p}


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


def read_counters(text: Any) -> float:
    """The sum of a server's counters of tokens; 0 where an answer has none, as a proxy's page or
    JSON."""
    if not isinstance(text, str):
        return 0.0
    try:
        return sum(map(float, COUNTERS.findall(text)))
    except ValueError:
        return 0.0


def read_tokens(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Token ids and log-probs of a choice, by any of its forms. ValueError where they do not fit
    each other."""
    ids, told = [int(id) for id in choice["token_ids"]], choice.get("logprobs") or {"content": []}
    entries = told.get("content") or ()
    logprobs = (
        told["token_logprobs"] if "content" not in told else [one["logprob"] for one in entries]
    )
    named = [
        int(one["token_id"] if "token_id" in one else one["token"].removeprefix("token_id:"))
        for one in entries
    ]
    if len(logprobs) != len(ids) or (entries and named != ids):
        raise ValueError(f"{len(logprobs)} log-probs that are not those of its {len(ids)} tokens")
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        raise ValueError("a token id below 0 or beyond 2^31")
    if min(logprobs, default=0) <= -9999:
        raise ValueError("a log-prob of -9999, which stands for none")
    return ids, logprobs


def read_versions(choice: Mapping[str, Any], count: int) -> list[int]:
    """The version of each token, by the spans of a choice; empty where it has none. ValueError
    where they do not cover `count` tokens."""
    versions, spans = [], choice.get("weight_versions") or ()
    for span in spans:
        length = min(
            span["end"] - span["start"], count + 1
        )  # a wrong end may name any number of tokens
        versions += [int(span["version"])] * length if span["start"] == len(versions) else []
    if spans and len(versions) != count:
        raise ValueError(f"weight_versions that do not cover {count} tokens")
    if versions and not 0 <= min(versions) <= max(versions) < 2**31:
        raise ValueError(f"weight_versions {versions[:5]}, which are none of the run's")
    return versions


def read_reason(
    choice: Mapping[str, Any], ids: Sequence[int], eos_ids: Sequence[int]
) -> StopReason | None:
    """Why a completion ended; None where it was taken back. ValueError for an end that is none of
    the model's, and for tokens after an end."""
    inner_ends = [position for position, id in enumerate(ids[:-1]) if id in eos_ids]
    if inner_ends:
        position = inner_ends[0]
        raise ValueError(
            f"the end token {ids[position]} at position {position} of {len(ids)}, and tokens after "
            "it"
        )
    if choice["finish_reason"] != "stop":
        return {"length": StopReason.LENGTH, "abort": None}[choice["finish_reason"]]
    if isinstance(choice.get("stop_reason"), str):
        return StopReason.STOP
    if ids[-1] not in eos_ids:
        raise ValueError(f"an end at token {ids[-1]}, which is none of {list(eos_ids)}")
    return StopReason.EOS


def check_length(choice: Mapping[str, Any], count: int, max_tokens: int) -> None:
    """ValueError for a completion of more tokens than were asked for, or one that is said to have
    reached its limit and has fewer: a limit of the server's own ended it."""
    is_cut = choice["finish_reason"] == "length" and count < max_tokens
    if is_cut or count > max_tokens:
        raise ValueError(
            f"finish_reason {choice['finish_reason']} at {count} tokens, and max_tokens was "
            f"{max_tokens}: has the server another limit, as by --max-model-len?"
        )


def read_support(choice: Mapping[str, Any], count: int, most: int) -> list[np.ndarray]:
    """The ids that each token was sampled from, int32[most], -1 fills up; none where these are not
    asked for (0)."""
    mask = choice.get("sampling_mask") or ()
    if most and len(mask) != count:
        raise ShoalError(
            "the server does not return what top_k, top_p and min_p kept: start it with "
            "--return-sampling-mask, or set algorithm.match_sampling_support=false"
        )
    if most and (largest := max(map(len, mask), default=0)) > most:
        raise ShoalError(
            f"sampling.max_support={most}: the server sampled from {largest} tokens; raise it"
        )
    return (
        [np.array([*kept, *[-1] * (most - len(kept))], np.int32) for kept in mask] if most else []
    )


CALL_SECONDS = 60.0
"""How long most calls may take."""


CHUNK_BYTES = 1 << 16


LAST_LINES, PORTS = 5, range(20_000, 32_000)
"""Of an ended server's output, what is shown; where those that are started listen (systems connect
from others)."""


GENERATE, COMPLETE, ADAPTER = "/inference/v1/generate", "/v1/completions", "/v1/load_lora_adapter"


RELOAD = "/collective_rpc"


def _read_body(reply: http.client.HTTPResponse, socket: Any, deadline: float) -> bytes:
    """All of an answer. TimeoutError at the deadline: a socket's own timeout begins anew with each
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


class TurnedDown(HostLost):
    """A server's answer of another status than 200."""

    def __init__(self, path: str, status: int, text: str) -> None:
        super().__init__(f"it answered {path} with {status}: {shorten(text, 300)}")
        self.path, self.status = path, status


@dataclass(frozen=True)
class Server:
    """A server's address and, where it was started here, its process and the file with its
    output."""

    url: str
    process: subprocess.Popen | None = None
    log: Path = Path()

    @classmethod
    def start(cls, words: Sequence[str], environment: Mapping[str, str], log: Path) -> Server:
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
        return cls(f"http://127.0.0.1:{port}", process, log)

    def call(
        self, path: str, body: Mapping[str, Any] | None = None, seconds: float = CALL_SECONDS
    ) -> Any:
        """What it answers: what its JSON says, or a text. Waits `seconds` at most; raises
        HostLost."""
        url, data = urlsplit(self.url), None if body is None else json.dumps(body)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ.get('VLLM_API_KEY')}",
        }
        seconds = max(0.1, seconds)
        deadline = time.monotonic() + seconds
        try:
            with contextlib.closing(
                kind(url.hostname or "", url.port, timeout=seconds)
            ) as connection:
                connection.request(
                    "GET" if data is None else "POST", url.path + path, data, headers
                )
                socket = connection.sock
                with connection.getresponse() as reply:
                    text = _read_body(reply, socket, deadline).decode()
                    form = reply.headers.get_content_type()
            if reply.status != 200:
                raise TurnedDown(
                    path, reply.status, text + (f" ({self.log})" if self.process else "")
                )
            return json.loads(text) if form == "application/json" else text
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
        """That its process has ended, with its last lines; "" unless it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # its connections end first
            if self.process is not None:
                code, said = (
                    self.process.wait(patience),
                    self.log.read_text("utf-8", "replace").split("\n"),
                )
                last = " | ".join([line for line in said if line.strip()][-LAST_LINES:])
                return f"its process has ended ({code}); {self.log} ends with: {last}"
        return ""

    def wait_until_ready(self, seconds: float) -> None:
        """HostLost where it does not answer in time, or its process ends."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.call("/health", seconds=5.0)
                return
            except HostLost as error:
                if (ended := self.ended(0.0)) or time.monotonic() > deadline:
                    raise HostLost(
                        ended or f"{self.url} has not answered in {seconds:.0f} s ({error})"
                    ) from error
            time.sleep(0.2)

    def takes_adapters(self) -> bool:
        """True if it has the call for adapters, as VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 gives it."""
        try:
            self.call(ADAPTER, {})
        except TurnedDown as error:
            return error.status not in (404, 405)
        return True

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(
                    self.process.pid, signal.SIGKILL
                )  # its own processes too, and one that is stopped
            self.process.wait()
