"""Serves the page and its records over HTTP, to this machine alone unless a token is given.

A request is answered only if its Host is this machine's name, or if it carries the token; a page of
another site whose name resolves to 127.0.0.1 sends its own name as Host. If a request has an
Origin, it must be this server. Paths are names in a table, never paths of files. One request
writes: the note and tags of a run (`POST /api/notes`), as JSON, which a form of another site cannot
send."""

from __future__ import annotations

import hmac
import json
import sys
import traceback
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.commands.view.completions import FORMATS
from shoal.commands.view.views import Viewer
from shoal.records import ShoalError
from shoal.runs.lines import bounded_json, bounded_line, json_ready
from shoal.serve.server import cross_site_refusal

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' "
    "data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
KINDS = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
}
"""Endings of the page's files -> their media types."""
MAX_URL = 16_384
NOTES_PATH, MAX_NOTES_BODY = "/api/notes", 256 << 10
"""The one address that is written to, and the most bytes that it takes."""


def page_files() -> dict[str, bytes]:
    """Returns name -> content of the page's own files, like "main.js": those in the package's
    folder `page` whose endings are in KINDS. Reads them at each call."""
    folder = resources.files("shoal.commands.view") / "page"
    return {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if entry.name.endswith(tuple(KINDS)) and entry.is_file()
    }


def make_app(viewer: Viewer, token: str = "") -> ASGIApp:
    """Returns the ASGI application that serves the page and answers `/api/VIEW` with records of the
    viewer, behind a `Guard`. If `token` is not empty, requests for records must carry it."""
    files = page_files()

    async def page(request: Request) -> Response:
        return _file(files, "index.html")

    async def static(request: Request) -> Response:
        return _file(files, request.path_params["name"])

    async def view(request: Request) -> Response:
        """Answers with the record of a view, or with an error of status 400 in one line."""
        try:
            record = await run_in_threadpool(
                viewer.answer, request.path_params["view"], request.query_params
            )
        except ShoalError as error:
            return _json({"error": " ".join(str(error).split())}, 400)
        except viewer.database.error as error:
            # The database ran out of memory, or a file vanished while it was read.
            return _json({"error": " ".join(str(error).split("\nLINE")[0].split())[:300]}, 400)
        return _json(record)

    async def export(request: Request) -> Response:
        """Answers with the file of the completions that the query chooses, piece by piece."""
        try:
            pieces = await run_in_threadpool(viewer.export, request.query_params)
        except (ShoalError, viewer.database.error) as error:
            return _json({"error": " ".join(str(error).split())[:300]}, 400)
        kind = request.query_params.get("format", "csv")
        return StreamingResponse(map(_encoded, pieces), media_type=FORMATS[kind])

    async def notes(request: Request) -> Response:
        """Writes a note and tags to a run's folder, and answers with them, or with an error of
        status 400 in one line."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _json({"error": "notes are sent as application/json"}, 415)
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_NOTES_BODY:
                return _json({"error": "the note is too long"}, 413)
        try:
            record = bounded_json(body)
            if not isinstance(record, dict):
                raise ValueError("it is not a JSON object")
            saved = await run_in_threadpool(viewer.save_notes, record)
        except (ShoalError, ValueError) as error:
            return _json({"error": " ".join(str(error).split())}, 400)
        return _json(saved)

    async def nothing(request: Request, error: Exception) -> Response:
        return _json({"error": "there is no such page"}, 404)

    async def fault(request: Request, error: Exception) -> Response:
        """Answers with an error of status 500 in one line after an unexpected exception, from a bug
        or a damaged run, and prints it to the terminal with its file and line."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = bounded_line(f"{request.url.path} cannot be shown: {type(error).__name__}: {error}")
        print(f"{text} ({Path(frame.filename).name}:{frame.lineno})", file=sys.stderr, flush=True)
        return _json({"error": text}, 500)

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/static/{name}", static),
            Route("/api/export", export),
            Route(NOTES_PATH, notes, methods=["POST"]),
            Route("/api/{view}", view),
        ],
        exception_handlers={404: nothing, Exception: fault},
    )
    return Guard(app, token)


def _file(files: Mapping[str, bytes], name: str) -> Response:
    """Returns the response with the page's file of this name, or an error of status 404 if `files`
    (name -> content) has none; nothing is read from disk."""
    if name not in files:
        return _json({"error": "there is no such page"}, 404)
    kind = KINDS["." + name.rpartition(".")[2]]
    return Response(files[name], media_type=kind)


def _encoded(text: str) -> bytes:
    """Returns a text in UTF-8; halves of characters, which a hostile file may have, as escapes."""
    return text.encode("utf-8", "backslashreplace")


def _json(record: Any, status: int = 200) -> Response:
    """Returns a response with a record as JSON; NaN and infinities are null, and other values that
    JSON lacks texts (`json_ready`)."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):
        # The record has numbers that JSON lacks, or DuckDB's values that `json` does not know.
        text = json.dumps(json_ready(record), ensure_ascii=False, allow_nan=False)
    return Response(_encoded(text), status, media_type="application/json")


class Guard:
    """An ASGI application around another one: refuses requests from other sites and machines, and
    adds HEADERS to every answer. `token`: what requests for records must carry; "": none is asked
    for."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request: with an error if it is refused, otherwise by the inner application.
        Of what is no HTTP request, the inner application gets the events of start and end
        (`lifespan`); anything else, such as a web socket, gets no answer."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            """Sends a message of the answer, with HEADERS added at its start."""
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                for name, value in HEADERS.items():
                    headers.append((name.lower().encode(), value.encode()))
                message["headers"] = headers
            await send(message)

        refused = self._refusal(Request(scope))  # (status, reason) or None
        if refused:
            await _json({"error": refused[1]}, refused[0])(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> tuple[int, str] | None:
        """Returns (HTTP status, reason) if a request must be refused, else None. Refused are all
        methods but GET and HEAD (and POST of notes), addresses that are too long, requests of other
        sites and machines (`cross_site_refusal`), and, if there is a token, requests for records
        without it in the header x-shoal-token."""
        writes_notes = request.method == "POST" and request.url.path == NOTES_PATH
        if request.method not in ("GET", "HEAD") and not writes_notes:
            return 405, "this page only reads, and writes nothing but notes: only GET is allowed"
        if len(request.scope.get("raw_path") or b"") + len(request.scope["query_string"]) > MAX_URL:
            return 414, "the address is too long"
        refused = cross_site_refusal(request.headers, bool(self._token))
        if refused:
            return 403, refused
        # The header says where a browser's request comes from; other programs do not send it.
        if request.headers.get("sec-fetch-site", "none") not in (
            "none",
            "same-origin",
        ) and request.url.path.startswith("/api"):
            return 403, "this page answers no other site"
        given = request.headers.get("x-shoal-token", "")
        if (
            self._token
            and request.url.path.startswith("/api")
            and not hmac.compare_digest(given.encode(), self._token.encode())
        ):
            return 401, "a token is needed: open the address with ?token=..., as it was printed"
        return None
