"""Answers the calls of an address with a host in this process: one request per call, and weights
that a trainer elsewhere can replace.

event loop --Load, Submit, Cancel, Pause--> ThreadHost   (its thread samples)
event loop <---------wake, poll------------'
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from shoal.chat.tokenizer import Tokenizer
from shoal.chat.turns import completion_record, encode
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
"""Seconds to wait for further calls before the first ones start, if nothing is being sampled: a
compiled step that has begun with the first calls would delay the others for many tokens. The wait
is five times as long until as many calls have come as were answered together last, since those
callers are likely to call again."""


class HostSampler:
    """A `Sampler` that samples with engines of this process, and whose weights can be replaced.

    The same call with the same seed gives the same tokens, whatever else is sampled. Calls without
    a seed get noise by their number."""

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
        """Makes an engine, starts the host's thread, and publishes `weights` to it as version 0,
        with the name "default". Close the sampler (`close`), which ends the thread; the store stays
        open.

        `name`: the model's name in replies. `make_engine`: (purpose, group size) -> engine.
        `params`: the settings that calls leave out; its `max_tokens` is the most of any call.
        `store`: where weights are published for the host. `seed`: of the noise of calls that have
        no seed of their own."""
        self.name = name
        self.tokenizer = tokenizer
        self.params = params
        self.max_tokens = params.max_tokens
        self.engine, self.store, self.seed = make_engine(Purpose.GENERATE, 1), store, seed
        self.vocab_size, self.eos_ids = store.model.architecture.vocab_size, tokenizer.eos_ids
        self.max_prompt_tokens = self.engine.max_prompt_tokens
        # answers that calls wait for, by request id
        self.waiting: dict[int, asyncio.Future[list[Completion]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gathered: list[SampleRequest] = []
        self._timer: asyncio.TimerHandle | None = None
        self._num_answered = 0  # number of requests that were answered together last
        self._ids = itertools.count()
        self._version = 0
        self._labels = {0: "default"}  # version from which a name holds -> the trainer's name
        self._fault = ""  # why nothing can be sampled any more; "" while sampling works
        self._open = asyncio.Event()  # not set while paused
        self._open.set()
        self._loading = asyncio.Lock()
        self.host = ThreadHost(EngineHost(make_engine, shares_memory=False), self._wake, "sampler")
        self.host.handle(Load(store.put(0, weights)))
        self.close = self.host.close

    async def sample(self, call: Call) -> Sampled:
        """Answers a call: waits while sampling is paused, samples all completions, and returns them
        with the names of the weights (`name_version`) that each token was sampled from. If this
        coroutine is cancelled, because the caller went away, the request is cancelled too.
        ShoalError if the call cannot be sampled, HostLost if the sampler has ended."""
        # Encode in a thread, because a template or a long text takes a while.
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
        # (seed, purpose, step, row): the number of the call is its row
        noise_key = NoiseKey(self.seed, Purpose.GENERATE, 1, id)
        if call.seed is not None:
            # A purpose of its own: no request without a seed has this noise.
            noise_key = NoiseKey(call.seed, "serve", 0, 0)
        request = SampleRequest(id, ids, call.num_completions, noise_key, call.params, exact=False)
        answer = self._loop.create_future()
        self.waiting[id] = answer
        choices: list[dict[str, Any]] = []
        try:
            self._submit(request, self._loop)
            for completion in await answer:
                choice = completion_record(completion, call.tools, self.tokenizer, call.logprobs)
                choices.append(choice)
        finally:
            # the caller went away
            if not answer.done() or answer.cancelled():
                self.host.handle(Cancel(id))
            self.waiting.pop(id, None)
        for choice in choices:
            # Now, after sampling: a version may have been named meanwhile.
            labels = {version: self._label_of(version) for version in set(choice["versions"])}
            choice["versions"] = [labels[version] for version in choice["versions"]]
        return Sampled(ids.tolist(), choices)

    def _label_of(self, version: int) -> str:
        """Returns the name of the newest named version that is not newer than `version`."""
        # version 0 has a name, so there is one
        newest = max(named for named in self._labels if named <= version)
        return self._labels[newest]

    def _submit(self, request: SampleRequest, loop: asyncio.AbstractEventLoop) -> None:
        """Schedules a request to be sent to the host: in the event loop's next round if the host is
        busy or full, else after a short wait (GATHERED), together with the requests that come
        meanwhile. Each new one starts the wait again. The wait is five times as long while fewer
        requests are gathered than were answered together last."""
        self._gathered.append(request)
        if self._timer is not None:
            self._timer.cancel()
        num_gathered = len(self._gathered)
        # All that wait are gathered, so nothing is being sampled; and the engine has more rows than
        # there are requests.
        is_idle = num_gathered == len(self.waiting) < self.engine.num_rows
        seconds = 0.0
        if is_idle:
            seconds = GATHERED
            if num_gathered < self._num_answered:
                seconds *= 5
        self._timer = loop.call_later(seconds, self._send)

    def _send(self) -> None:
        """Sends the gathered requests to the host, without those whose callers went away, and
        passes answers that have come to the calls that wait for them."""
        requests = self._gathered
        self._timer = None
        self._gathered = []
        awaited = [request for request in requests if request.id in self.waiting]
        self.host.handle(Submit(awaited))
        self._collect()

    def check(self) -> None:
        """Raises HostLost if nothing can be sampled any more. Also passes on answers that have
        arrived."""
        self._collect()
        if self._fault:
            raise HostLost(f"the sampler has ended: {self._fault}")

    def _wake(self) -> None:
        """Makes the event loop collect answers; called in the host's thread. Does nothing before
        the first call, or after the loop was closed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        """Polls the host, and passes its answers to the calls that wait for them; if the host has
        failed, now or before, all of these get HostLost."""
        answers: dict[int, list[Completion]] = {}
        if not self._fault:
            try:
                answers = self.host.poll()
            except Exception as error:
                # The error ended the host's thread, and whoever waits must learn of it.
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
        """True while no new call may begin."""
        return not self._open.is_set()

    async def pause(self, mode: str) -> None:
        """Stops new calls from beginning, until `resume`. `mode` says what happens to unfinished
        calls: "keep" stops them where they are, to go on at `resume`; "wait" returns when all have
        ended; "abort" ends them with the tokens sampled so far, and returns when all have ended."""
        self._open.clear()
        # Pause(False): what an earlier "keep" has stopped goes on, so that it can end
        self.host.handle(Pause(mode == "keep"))
        if mode == "keep":
            return
        # requests that are not sent yet have begun, too
        if self._gathered:
            self._send()
        if mode == "abort":
            for id in self.waiting:
                self.host.handle(Cancel(id))
        while self.waiting:
            await asyncio.wait(list(self.waiting.values()))
            await asyncio.sleep(0)  # lets the waiting calls remove themselves

    def resume(self) -> None:
        """Resumes sampling, and lets calls begin again."""
        self.host.handle(Pause(False))
        self._open.set()

    async def reload(self, folder: str) -> None:
        """Replaces the weights by those in a folder, one replacement at a time. Calls that are
        being sampled continue with the new weights. `folder`: in Hugging Face's format. The new
        weights have the name of those before until `name_version`. ShoalError if they cannot be
        loaded."""
        async with self._loading:
            await asyncio.to_thread(self._load, folder)

    def _load(self, folder: str) -> None:
        """Reads the weights in a folder (Hugging Face's format), publishes them to the host as the
        next version, and drops the previous ones from the store. Does not wait until the host
        samples from them. ShoalError if they cannot be read, or if the model has an adapter."""
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
        """Returns {"parameters": checksum of the newest weights}."""
        held = self.store.versions[self._version].parameters(self.store.model)
        return {"parameters": await asyncio.to_thread(weights_text, held)}

    def name_version(self, label: str) -> None:
        """Names the newest weights; tokens sampled from them carry this name, also in answers to
        calls that have begun already."""
        self._labels[self._version] = label
