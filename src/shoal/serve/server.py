"""Sockets of the package's servers, and which requests they answer."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.records import ShoalError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(?::\d{0,5})?", re.ASCII)


def host_name(host: str) -> str:
    """Returns the name in a Host header in lower case, without its port ("[::1]:80" -> "::1"); ""
    if the header is malformed."""
    match = _HOST.fullmatch(host)
    if match is None:
        return ""
    return (match["six"] or match["name"]).lower()


def cross_site_refusal(headers: Mapping[str, str], has_token: bool) -> str:
    """Returns why a request must be refused because a page of another site sent it, from its
    headers Host and Origin (`headers` must find names in lower case); "" if it may be answered.
    `has_token`: requests must carry a token, so any Host is allowed.

    A page of another site that makes its own name resolve to 127.0.0.1 sends that name as Host, and
    any page sends its Origin."""
    host = headers.get("host", "")
    if not has_token and host_name(host) not in LOOPBACK:
        return "this is served to 127.0.0.1 and localhost; for another host start it with token="
    if headers.get("origin") not in (None, f"http://{host}", f"https://{host}"):
        return "this answers no other site"
    return ""


def require_packages(extra: str, *packages: str) -> None:
    """Imports packages by their names, in order, which stay imported; raises ShoalError, which
    names the `extra` of Shoal that installs them, if one is missing."""
    for package in packages:
        try:
            __import__(package)
        except ImportError as error:
            raise ShoalError(
                f"{package} is not installed: `pip install '.[{extra}]'` in the clone of Shoal"
            ) from error


def require_token(host: str, token: str, what: str, port: int) -> None:
    """Raises ShoalError if other machines can reach `host` (it is none of LOOPBACK) and `token` is
    empty. For the message: `what` they could do, and the `port` of the advice."""
    if host not in LOOPBACK and not token:
        raise ShoalError(
            f"host={host}: whoever reaches this address could {what}; set token=auto, or leave "
            f"host= out and forward the port: ssh -L {port}:127.0.0.1:{port} HOST",
            "token",
        )


def base_url(host: str, listening: socket.socket) -> str:
    """Returns the address of a listening socket, `http://127.0.0.1:8700`; with this machine's name
    if it listens on all interfaces. `host`: what it was asked to listen on; the port is the
    socket's own."""
    port = listening.getsockname()[1]
    name = host
    if host in ("0.0.0.0", "::"):
        name = socket.gethostname()
    elif ":" in host:
        name = f"[{host}]"
    return f"http://{name}:{port}"


def listen(host: str, port: int, first: int = 8700) -> socket.socket:
    """Returns a socket that listens at a port of `host`. With `port` 0 it is the first free one of
    the 20 ports from `first` on, or else any free port. ShoalError if no port can be had, for
    example because the only one is in use, or `host` is none of this machine's. The caller closes
    the socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = [port]
    if not port:
        ports = list(range(first, first + 20))
        ports.append(0)  # any that is free
    fault = ""
    for candidate in ports:
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, candidate))
            listening.listen(1024)
            return listening
        except OSError as error:
            listening.close()
            fault = error.strerror or ""
    raise ShoalError(
        f"port={port}: cannot listen on {host}:{port} ({fault}): choose another port, or leave "
        "port= out for a free one",
        "port",
    )


def make_server(app: Any) -> Any:
    """Returns a uvicorn server for an ASGI app, not yet started: `run(sockets=[...])` answers
    requests until Ctrl-C, or until `should_exit` is set."""
    import uvicorn

    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Context manager that serves an ASGI app at a free port of this machine, in a thread, and
    yields its address, `http://127.0.0.1:PORT`. Leaving it stops the server, waits for it and
    closes the socket."""
    # port 0, also as the first to try: any free port
    with listen("127.0.0.1", 0, 0) as listening:
        server = make_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            # the socket listens already, so a call that comes before the server runs only waits
            yield base_url("127.0.0.1", listening)
        finally:
            server.should_exit = True
            thread.join()
