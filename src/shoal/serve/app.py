"""The routes of the address, what bounds a request, and who may ask.

    request -> its site, its key -> the body, bounded -> a call -> the sampler -> a record, or events

An error is `{"error": {"message", "type", "param", "code"}}`. A client that goes away ends what is sampled for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shoal.serve.calls import Sampler, parse, read_call
from shoal.serve.replies import events, reply
from shoal.serve.server import foreign
from shoal.types import HostLost, ShoalError

MAX_BODY, MAX_CALLS = 16 * 2**20, 1024
PAUSES = ("abort", "wait", "keep")
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Weights(Protocol):
    """What replaces the weights of a sampler; vLLM's calls for it."""

    @property
    def is_paused(self) -> bool: ...

    async def pause(self, mode: str) -> None:
        """Begins no further call before `resume`. Those under way are given up (`abort`), ended (`wait`) or held."""
        ...

    async def resume(self) -> None: ...

    async def reload(self, folder: str) -> None:
        """Samples from the weights of a folder. ShoalError if they are not the model's."""
        ...

    async def checksums(self) -> dict[str, str]: ...

    def name_version(self, label: str) -> None:
        """What the weights loaded last are called from now on."""
        ...


@dataclass(frozen=True)
class Api:
    """What the routes answer from. `allows`: whether a key may ask; `remote`: other machines may."""

    sampler: Sampler
    allows: Callable[[str], bool]
    remote: bool = False
    seconds: float = 600.0  # of a call
    weights: Weights | None = None
    routes: tuple[Route, ...] = ()  # further ones
    going: set[Request] = field(default_factory=set)

    # ---- calls

    async def call(self, kind: str, request: Request) -> Response:
        call = read_call(kind, parse(await _body(request)), key_of(request), self.sampler)
        sampled = await _unless_gone(request, self.sampler.sample(call))
        whole = reply(kind, call, sampled, self.sampler)
        if call.stream:
            return Response("".join(events(kind, call, whole)), media_type="text/event-stream")
        return JSONResponse(whole)

    async def models(self, request: Request) -> Response:
        sampler = self.sampler
        return JSONResponse({"object": "list", "data": [{
            "id": sampler.name, "object": "model", "created": 0, "owned_by": "shoal",
            "max_model_len": sampler.max_prompt_tokens + sampler.params.max_tokens}]})

    # ---- weights, as vLLM's server has them

    async def collective_rpc(self, weights: Weights, request: Request) -> dict[str, Any]:
        body = parse(await _body(request))
        folder = (body.get("kwargs") or {}).get("weights_path") if isinstance(body.get("kwargs"), dict | None) else None
        if body.get("method") != "reload_weights" or not isinstance(folder, str):
            raise ShoalError('expected {"method": "reload_weights", "kwargs": {"weights_path": FOLDER}}', "method")
        await weights.reload(folder)
        return {"results": [None]}

    async def pause(self, weights: Weights, request: Request) -> dict[str, Any]:
        if (mode := request.query_params.get("mode", "abort")) not in PAUSES:
            raise ShoalError(f"mode={mode}: expected {', '.join(PAUSES)}", "mode")
        await weights.pause(mode)
        return {"status": "paused"}

    async def resume(self, weights: Weights, request: Request) -> dict[str, Any]:
        await weights.resume()
        return {"status": "resumed"}

    async def is_paused(self, weights: Weights, request: Request) -> dict[str, Any]:
        return {"is_paused": weights.is_paused}

    async def update_weight_version(self, weights: Weights, request: Request) -> dict[str, Any]:
        label = parse(await _body(request)).get("new_version")
        if not isinstance(label, str):
            raise ShoalError("new_version: expected a text", "new_version")
        weights.name_version(label)
        return {"success": True, "new_version": label}

    async def reset_prefix_cache(self, weights: Weights, request: Request) -> dict[str, Any]:
        return {"success": True}  # a prompt's keys live as long as its call: there is none

    async def weight_checker(self, weights: Weights, request: Request) -> dict[str, Any]:
        body, found = parse(await _body(request)), await weights.checksums()
        if body.get("action") == "checksum":
            return {"checksums": found}
        baseline = body.get("baseline")
        if body.get("action") != "compare" or not isinstance(baseline, dict):
            raise ShoalError("action: expected checksum, or compare with a baseline", "action")
        names = sorted(name for name in {*found, *baseline} if found.get(name) != baseline.get(name))
        return {"match": not names, "mismatches": names}

    # ---- the application

    def app(self) -> Starlette:
        """All of it, for a server."""
        calls = {"/v1/chat/completions": "chat", "/v1/completions": "text", "/inference/v1/generate": "tokens"}
        routes = [Route(path, self._guarded(lambda request, kind=kind: self.call(kind, request)), methods=["POST"])
                  for path, kind in calls.items()]
        routes += [Route("/v1/models", self._guarded(self.models)), Route("/health", self._guarded(self.health))]
        for answer, method in ((self.collective_rpc, "POST"), (self.pause, "POST"), (self.resume, "POST"),
                               (self.is_paused, "GET"), (self.update_weight_version, "POST"),
                               (self.reset_prefix_cache, "POST"), (self.weight_checker, "POST")):
            routes.append(Route(f"/{answer.__name__}", self._guarded(self._with_weights(answer)), methods=[method]))
        routes += [Route(one.path, self._guarded(one.endpoint), methods=[*(one.methods or ())]) for one in self.routes]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    async def health(self, request: Request) -> Response:
        self.sampler.check()
        return Response()

    def _with_weights(self, answer: Callable[[Weights, Request], Awaitable[dict[str, Any]]]) -> Any:
        async def answered(request: Request) -> Response:
            if self.weights is None:
                raise HTTPException(404, "the weights cannot be replaced: start `shoal serve` with publication=true")
            return JSONResponse(await answer(self.weights, request))
        return answered

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Any:
        """The endpoint for those who may ask, within its seconds, with its errors as records."""
        going = self.going

        async def answered(request: Request) -> Response:
            if refused := foreign(request.headers, self.remote):
                raise HTTPException(403, refused)
            if not self.allows(key_of(request)):
                raise HTTPException(401, "the key in Authorization: Bearer KEY is none of this address")
            if len(going) >= MAX_CALLS:
                raise HTTPException(429, f"{MAX_CALLS} requests are under way; try again later")
            going.add(request)
            try:
                async with asyncio.timeout(self.seconds):
                    return await endpoint(request)
            except ShoalError as error:
                return error_reply(400, str(error), error.key)
            except ClientDisconnect:
                return Response(status_code=499)
            except TimeoutError:
                return error_reply(408, f"it took longer than {self.seconds:g} seconds")
            except HostLost as error:
                return error_reply(503, str(error))
            finally:
                going.discard(request)

        return answered


def key_of(request: Request) -> str:
    """The key that a request brings; empty for none."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def error_reply(status: int, message: str, param: str = "") -> Response:
    return JSONResponse({"error": {"message": message, "type": TYPES.get(status, "invalid_request_error" if status < 500
                                                                        else "server_error"),
                                   "param": param or None, "code": None}}, status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_reply(error.status_code, error.detail)


async def _body(request: Request) -> bytes:
    """The body; 413 as soon as it is too long."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise HTTPException(413, f"the body is longer than {MAX_BODY:,} bytes")
        parts.append(part)
    return b"".join(parts)


async def _unless_gone(request: Request, answer: Awaitable[Any]) -> Any:
    """What is awaited; given up with ClientDisconnect where the client goes away first."""
    tasks = asyncio.ensure_future(answer), asyncio.ensure_future(_gone(request))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] not in done:
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
