"""Routes of the address, limits on requests, and who may call it.

    request -> who sends it, its key -> the body, up to a limit -> a call -> the sampler
            -> a JSON object, or a stream of events

An error is `{"error": {"message", "type", "param", "code"}}`. If a client goes away, sampling for
it ends."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shoal.chat.turns import TOKEN_CHARACTERS
from shoal.records import HostLost, ShoalError
from shoal.serve.api import Call, Sampler, events, has_shape, parse, read_call, reply, require
from shoal.serve.server import cross_site_refusal
from shoal.text import exact

MAX_BODY = 16 * 2**20
MAX_CALLS = 1024
SETTINGS_BYTES = 2**20
"""Most bytes of a body for its settings, without the prompt."""
CHARACTER_BYTES = 6
"""Most bytes of a body that one character of the prompt may take, as `\\u00e9`."""
KINDS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text",
    "/inference/v1/generate": "tokens",
}
WEIGHTS = (
    "pause",
    "resume",
    "collective_rpc",
    "update_weight_version",
    "reset_prefix_cache",
    "weight_checker",
)


@dataclass(frozen=True)
class Api:
    """What the routes work with. `key`: the key that requests must carry, "" for none; `weights`:
    an object that can replace the weights (a `HostSampler`), or None; `posts`: further POST routes,
    path -> function of the body."""

    sampler: Sampler
    key: str = ""
    seconds: float = 600.0  # longest time that a request may take
    weights: Any = None
    posts: Mapping[str, Callable[[dict[str, Any]], None]] = field(default_factory=dict)
    under_way: set[Request] = field(default_factory=set)

    def app(self) -> Starlette:
        """Returns the application with all routes, for a server: those of KINDS, `posts` and
        WEIGHTS for POST; /v1/models, /health and /is_paused for GET. Starts nothing."""
        posts = list(KINDS) + list(self.posts) + [f"/{name}" for name in WEIGHTS]
        routes = [Route(path, self._guarded, methods=["POST"]) for path in posts]
        for path in ("/v1/models", "/health", "/is_paused"):
            routes.append(Route(path, self._guarded))
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    async def _guarded(self, request: Request) -> Response:
        """Answers a request to any route. Refuses those of other sites (403), without the key (401)
        or above MAX_CALLS at once (429). Turns errors and the time limit into replies of the API:
        400 for a wrong call, 503 if the sampler has ended, 408 if it took longer than `seconds` or
        the client went away. Other errors are raised, and the server answers 500."""
        _, _, key = request.headers.get("authorization", "").partition(" ")
        refusal = cross_site_refusal(request.headers, bool(self.key))
        if refusal:
            return error_reply(403, refusal)
        if self.key and not hmac.compare_digest(key.encode(), self.key.encode()):
            return error_reply(401, "Authorization: Bearer KEY: the key is none of this address")
        if len(self.under_way) >= MAX_CALLS:
            return error_reply(429, f"{MAX_CALLS} requests are under way; try again later")
        self.under_way.add(request)
        try:
            async with asyncio.timeout(self.seconds):
                return await self._answer(request.url.path, request)
        except ShoalError as error:
            return error_reply(400, str(error), error.key)
        except HostLost as error:
            return error_reply(503, str(error))
        except (ClientDisconnect, TimeoutError):
            return error_reply(
                408, f"the client went away, or it took longer than {exact(self.seconds)} seconds"
            )
        finally:
            self.under_way.discard(request)

    async def _answer(self, path: str, request: Request) -> Response:
        """Answers a request that may be answered, by its path: samples (KINDS; a stream of events
        if the call asks for one), calls a function of `posts`, names the model, or controls the
        weights. HTTP error 404 for the last if there is no `weights` object. ShoalError for a wrong
        call, HostLost if the sampler has ended."""
        sampler = self.sampler
        if path in KINDS:
            tokens = sampler.max_prompt_tokens + sampler.params.max_tokens
            prompt_bytes = CHARACTER_BYTES * TOKEN_CHARACTERS * tokens
            body = await _body(request, SETTINGS_BYTES + prompt_bytes)
            # Parse in a thread, like encoding, so that others are answered while a long body is
            # read.
            call = await asyncio.to_thread(_parse_call, KINDS[path], body, sampler)
            sampled = await _unless_gone(request, sampler.sample(call))
            whole = reply(call, sampled, sampler.name)
            if call.stream:
                return Response("".join(events(call, whole)), media_type="text/event-stream")
            return JSONResponse(whole)
        if path in self.posts:
            body = parse(await _body(request))
            # the function's errors are those of the call; what it returns, if anything, is the
            # reply
            return JSONResponse(self.posts[path](body) or {})
        if path in ("/health", "/v1/models"):
            sampler.check()
            model = {
                "id": sampler.name,
                "object": "model",
                "created": 0,
                "owned_by": "shoal",
                "max_model_len": sampler.max_prompt_tokens + sampler.params.max_tokens,
            }
            return JSONResponse({"object": "list", "data": [model]})
        if self.weights is None:
            raise HTTPException(
                404, "the weights cannot be replaced: start `shoal serve` with publication=true"
            )
        return JSONResponse(await self._control_weights(self.weights, path[1:], request))

    async def _control_weights(self, weights: Any, name: str, request: Request) -> dict[str, Any]:
        """Carries out one of vLLM's calls that pause sampling and replace or compare weights, and
        returns its JSON reply. `name`: one of WEIGHTS, or `is_paused`; the request's body (JSON;
        none counts as {}) has the arguments, for `pause` its query (`mode`: abort, wait or keep).
        `weights`: the object that can replace them (a `HostSampler`). Waits until the call is
        carried out. ShoalError for wrong arguments."""
        body = parse(await _body(request) or b"{}")
        if name == "pause":
            mode = request.query_params.get("mode", "abort")
            require(mode in ("abort", "wait", "keep"), "mode", mode, "abort, wait or keep")
            await weights.pause(mode)
        elif name == "resume":
            weights.resume()
        elif name == "collective_rpc":
            require(
                has_shape(body, {"method": ("reload_weights",), "kwargs": {"weights_path": str}}),
                "method",
                body,
                '{"method": "reload_weights", "kwargs": {"weights_path": FOLDER}}',
            )
            await weights.reload(body["kwargs"]["weights_path"])
            return {"results": [None]}
        elif name == "update_weight_version":
            require(has_shape(body, {"new_version": str}), "new_version", body, "a text")
            weights.name_version(body["new_version"])
        elif name == "weight_checker":
            actions = ({"action": ("checksum",)}, {"action": ("compare",), "baseline": dict})
            require(
                has_shape(body, actions),
                "action",
                body,
                "the action checksum, or compare with a baseline",
            )
            checksums = await weights.checksums()
            baseline = body.get("baseline")
            if baseline is None:
                return {"checksums": checksums}
            mismatches = []
            # `name` is a weight's from here on; one that either side lacks is a mismatch
            for name in sorted(checksums.keys() | baseline.keys()):
                if checksums.get(name) != baseline.get(name):
                    mismatches.append(name)
            return {"match": not mismatches, "mismatches": mismatches}
        # `reset_prefix_cache` has nothing to do: a prompt's keys live only as long as its call.
        return {
            "success": True,
            "is_paused": weights.is_paused,
            "status": "paused" if weights.is_paused else "resumed",
        }


def _parse_call(kind: str, body: bytes, sampler: Sampler) -> Call:
    """Returns the call that a request's body (JSON) asks for; ShoalError if it is wrong."""
    return read_call(kind, parse(body), sampler)


def error_reply(status: int, message: str, param: str = "") -> Response:
    """Returns an HTTP response of status `status` with an error in the form of OpenAI's API; its
    type is "invalid_request_error" for 400, else "error_STATUS". `param`: the setting that is
    wrong, "" if none is."""
    kind = "invalid_request_error" if status == 400 else f"error_{status}"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": param or None, "code": None}}, status
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Returns the response for an error of Starlette, like 404, in the form of `error_reply`."""
    assert isinstance(error, HTTPException)
    return error_reply(error.status_code, error.detail)


async def _body(request: Request, most: int = MAX_BODY) -> bytes:
    """Returns a request's body. HTTP error 413 as soon as it is longer than the smaller of `most`
    and MAX_BODY, in bytes. ClientDisconnect if the client goes away first."""
    most = min(most, MAX_BODY)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise HTTPException(413, f"the body is longer than {most:,} bytes")
    return bytes(body)


async def _unless_gone(request: Request, answer: Awaitable[Any]) -> Any:
    """Waits for an answer and returns it, or raises its error. If the client disconnects first,
    cancels the answer, which ends its sampling, and raises ClientDisconnect."""
    answering = asyncio.ensure_future(answer)
    # The body has been read: the next message can only say that the client goes away.
    disconnecting = asyncio.ensure_future(request.receive())
    try:
        tasks = (answering, disconnecting)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if answering not in done:
            raise ClientDisconnect
        return answering.result()
    finally:
        answering.cancel()
        disconnecting.cancel()
        # Waits until both have ended; their errors are dropped here.
        await asyncio.gather(answering, disconnecting, return_exceptions=True)
