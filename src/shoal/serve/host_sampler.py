"""Answers the calls of an address with a host: one request a call, and weights that a trainer
elsewhere replaces.

event loop --Load, Submit, Cancel, Pause--> ThreadHost   (its thread samples)
event loop <---------wake, poll------------'
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from shoal.chat.tokenizer import Tokenizer
from shoal.chat.turns import described, encode
from shoal.protocols import Cancel, Load, Pause, SampleRequest, Submit
from shoal.records import (
    Completion,
    HostLost,
    NoiseKey,
    Params,
    Purpose,
    SamplingParams,
    ShoalError,
)
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.sampler.engine import Engine
from shoal.serve.api import Call, Sampled, require
from shoal.text import describe_error
from shoal.weights import huggingface
from shoal.weights.checksum import weights_text
from shoal.weights.store import MemoryStore

GATHERED = 0.01
"""Seconds without a further call after which those that came begin, where nothing is sampled: a
compiled step that has begun with the first of them would hold up the others for many tokens. Five
times as long while those come that were answered together, who are likely to ask again."""


class HostSampler:
    """A `Sampler` whose weights can be replaced. `make_engine`: of any request; `params`: of calls
    that say nothing.

    With a seed the same call gives the same tokens, whatever else is sampled. Calls without one are
    numbered."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        make_engine: Callable[[Purpose, int], Engine],
        params: SamplingParams,
        store: MemoryStore,
        weights: Params,
        seed: int = 0,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.params = params
        self.max_tokens = params.max_tokens
        self.engine, self.store, self.seed = make_engine(Purpose.GENERATE, 1), store, seed
        self.vocab_size, self.eos_ids = store.model.architecture.vocab_size, tokenizer.eos_ids
        self.max_prompt_tokens = self.engine.max_prompt_tokens
        # calls under way, by their request's id
        self.waiting: dict[int, asyncio.Future[list[Completion]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gathered: list[SampleRequest] = []
        self._timer: asyncio.TimerHandle | None = None
        self._num_answered = 0  # of the requests that were answered together last
        self._ids = itertools.count()
        self._version = 0
        self._labels = {0: "default"}  # the trainer's name of versions, from each on
        self._fault = ""  # why nothing can be sampled any more
        self._open = asyncio.Event()  # not set while paused
        self._open.set()
        self._loading = asyncio.Lock()
        self.host = ThreadHost(EngineHost(make_engine, shares_memory=False), self._wake, "sampler")
        self.host.handle(Load(store.put(0, weights)))
        self.close = self.host.close

    async def sample(self, call: Call) -> Sampled:
        # In a thread: a template, and a long text, take a while.
        ids = await asyncio.to_thread(
            encode, call.prompt, call.tools, self.tokenizer, self.max_prompt_tokens
        )
        require(
            self.engine.truncated or not call.params.truncated,
            "top_p",
            call.params.top_p,
            "no truncation",
        )
        await self._open.wait()
        self._loop = asyncio.get_running_loop()
        id = next(self._ids)
        noise_key = NoiseKey(self.seed, Purpose.GENERATE, 1, id)
        if call.seed is not None:
            # A seed's purpose is its own: no other request's noise is theirs.
            noise_key = NoiseKey(call.seed, "serve", 0, 0)
        request = SampleRequest(id, ids, call.num_completions, noise_key, call.params, exact=False)
        answer = self._loop.create_future()
        self.waiting[id] = answer
        choices: list[dict[str, Any]] = []
        try:
            self._submit(request, self._loop)
            for completion in await answer:
                choice = described(completion, call.tools, self.tokenizer, call.logprobs)
                choices.append(choice)
        finally:
            if not answer.done() or answer.cancelled():
                self.host.handle(Cancel(id))
            self.waiting.pop(id, None)
        for choice in choices:
            labels = {version: self._label_of(version) for version in set(choice["versions"])}
            choice["versions"] = [labels[version] for version in choice["versions"]]
        return Sampled(ids.tolist(), choices)

    def _label_of(self, version: int) -> str:
        """The name of the newest named version that is not newer."""
        newest = max(named for named in self._labels if named <= version)
        return self._labels[newest]

    def _submit(self, request: SampleRequest, loop: asyncio.AbstractEventLoop) -> None:
        """Sends a request to the host, with those that come soon after it where the host is
        idle."""
        self._gathered.append(request)
        if self._timer is not None:
            self._timer.cancel()
        num_gathered = len(self._gathered)
        is_idle = num_gathered == len(self.waiting) < self.engine.num_rows
        seconds = 0.0
        if is_idle:
            seconds = GATHERED
            if num_gathered < self._num_answered:
                seconds *= 5
        self._timer = loop.call_later(seconds, self._send)

    def _send(self) -> None:
        requests = self._gathered
        self._timer = None
        self._gathered = []
        awaited = [request for request in requests if request.id in self.waiting]
        self.host.handle(Submit(awaited))
        self._collect()

    def check(self) -> None:
        """HostLost where nothing can be sampled any more."""
        self._collect()
        if self._fault:
            raise HostLost(f"the sampler has ended: {self._fault}")

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        answers: dict[int, list[Completion]] = {}
        if not self._fault:
            try:
                answers = self.host.poll()
            except Exception as error:
                # Of its thread, which has ended: whoever waits must learn of it.
                self._fault = describe_error(error)
        if answers:
            self._num_answered = len(answers)
        for id, answer in self.waiting.items():
            if self._fault and not answer.done():
                answer.set_exception(HostLost(f"the sampler has ended: {self._fault}"))
            elif id in answers and not answer.done():
                answer.set_result(answers[id])

    # ---- weights

    @property
    def is_paused(self) -> bool:
        return not self._open.is_set()

    async def pause(self, mode: str) -> None:
        """Lets no further call begin. `mode`: calls under way stop where they are (keep), are
        awaited (wait), or end with what has been sampled (abort)."""
        self._open.clear()
        self.host.handle(Pause(mode == "keep"))
        if mode == "keep":
            return
        if self._gathered:
            self._send()
        if mode == "abort":
            for id in self.waiting:
                self.host.handle(Cancel(id))
        while self.waiting:
            await asyncio.wait(list(self.waiting.values()))
            await asyncio.sleep(0)  # those who wait for them take them out

    def resume(self) -> None:
        self.host.handle(Pause(False))
        self._open.set()

    async def reload(self, folder: str) -> None:
        async with self._loading:
            await asyncio.to_thread(self._load, folder)

    def _load(self, folder: str) -> None:
        model = self.store.model
        try:
            if model.architecture.adapter:
                raise ShoalError(
                    "the weights of a model with an adapter cannot be replaced", "weights_path"
                )
            weights = huggingface.load(folder, model.architecture, model.role, model.dtype)
        except (OSError, ValueError) as error:
            raise ShoalError(f"weights_path={folder}: {error}", "weights_path") from error
        version = self.store.put(self._version + 1, weights)
        previous = [number for number in self.store.versions if number != version.version]
        self.store.drop(previous)
        self._version = version.version
        self.host.handle(Load(version))

    async def checksums(self) -> dict[str, str]:
        held = self.store.versions[self._version].parameters(self.store.model)
        return {"parameters": await asyncio.to_thread(weights_text, held)}

    def name_version(self, label: str) -> None:
        self._labels[self._version] = label
