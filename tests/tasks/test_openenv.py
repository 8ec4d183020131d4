"""Environments of OpenEnv servers, by one that speaks their wire: words, tools, other actions, and
what goes wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from shoal.chat.turns import schema
from shoal.config.sections.task import EnvironmentSection
from shoal.job.environments import with_environment
from shoal.records import ShoalError
from shoal.tasks.openenv import OpenEnv, openenv
from shoal.tasks.task import Task
from shoal.workers.environments import EnvironmentKind

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
ACTIONS: dict[str, dict[str, Any]] = {
    "words": {
        "properties": {"metadata": {"type": "object"}, "message": TEXT},
        "required": ["message"],
    },
    "move": {"description": "Moves.", "properties": {"x": NUMBER, "y": NUMBER}, "required": ["x"]},
    "tools": {},
}
TOOL = {
    "name": "add",
    "description": "Adds two numbers.",
    "inputSchema": {
        "type": "object",
        "properties": {"a": NUMBER, "b": NUMBER},
        "required": ["a", "b"],
    },
}


class Server:
    """Guesses a number: the seed. The second connection is closed in its first message."""

    def __init__(self, kind: str) -> None:
        self.kind, self.sessions, self.resets = kind, 0, list[Any]()
        self.closes_next = False
        routes = [
            Route("/schema", lambda request: JSONResponse({"action": ACTIONS[kind]})),
            Route("/mcp", self.mcp, methods=["POST"]),
            WebSocketRoute("/ws", self.talk),
        ]
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", ws="websockets-sansio")
        self.server = uvicorn.Server(config)

        def target():
            return self.server.run(sockets=[self.listener])

        self.thread = threading.Thread(target=target, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    async def mcp(self, request: Any) -> JSONResponse:
        return JSONResponse(
            {"id": 1, "result": {"tools": [TOOL]}}
            if self.kind == "tools"
            else {"id": 1, "error": {"code": -32603, "message": "no tools here"}}
        )

    async def talk(self, socket: WebSocket) -> None:
        await socket.accept()
        self.sessions += 1
        asked = number = 0
        try:
            while True:
                message = await socket.receive_json()
                if self.closes_next:
                    self.closes_next = False
                    return await socket.close()
                if message["type"] == "reset":
                    self.resets.append(message["data"])
                    number, asked = message["data"].get("seed"), 0
                    answer: Any = {
                        "observation": {"reply": "Guess."},
                        "reward": None,
                        "done": False,
                    }
                else:
                    asked += 1
                    answer = self.step(message["data"], number, asked)
                await socket.send_json(
                    answer if "type" in answer else {"type": "observation", "data": answer}
                )
        except WebSocketDisconnect:
            pass

    def step(self, action: dict[str, Any], number: int, asked: int) -> dict[str, Any]:
        if action.get("type") == "call_tool":
            if "b" not in action["arguments"]:
                return {
                    "observation": {"tool_name": "add", "error": {"message": "b is missing"}},
                    "done": False,
                }
            total = str(sum(action["arguments"].values()))
            return {
                "observation": {
                    "tool_name": "add",
                    "result": {"content": [{"type": "text", "text": total}]},
                },
                "reward": 0.5,
                "done": asked == 3,
            }
        if not action:
            return {
                "type": "error",
                "data": {"message": "Invalid message", "errors": ["x is missing"]},
            }
        if "x" in action:
            return {"observation": {"x": action["x"], "board": [1, 2]}, "reward": 1, "done": False}
        is_right = action["message"] == str(number)
        return {
            "observation": {"reply": "yes" if is_right else "no"},
            "reward": float(is_right),
            "done": is_right,
        }


@pytest.fixture(params=["words"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    one = Server(request.param)
    yield one
    one.server.should_exit = True
    one.thread.join()


def run(kind: type[OpenEnv], play: Callable[[Any], Any]) -> None:
    async def whole() -> None:
        one = kind()
        await play(one)
        await one.close()

    asyncio.run(whole())


def test_words_are_the_one_text_of_an_action(server):
    kind = openenv(f"openenv:{server.url}/")
    assert (
        EnvironmentKind.of("OpenEnv", kind).shares and EnvironmentKind.of("OpenEnv", kind).responds
    )

    async def play(one: Any) -> None:
        assert await one.reset(row=7, prompt=[], level="low") == "Guess."
        assert await one.respond("6") == "no" and one.reward == 0
        assert await one.respond("7") is None and one.reward == 1
        assert await one.get_reward() == 1
        with pytest.raises(RuntimeError, match="is done"):
            await one.respond("7")
        server.closes_next = True  # what has idled is connected anew, once
        await one.reset(row=8)
        assert not one.done and not hasattr(one, "reward") and server.sessions == 2
        server.closes_next = True
        with pytest.raises(Exception, match="received 1000"):
            await one.respond("8")

    run(kind, play)
    assert server.resets == [{"row": 7, "level": "low", "seed": 7}, {"row": 8, "seed": 8}]


@pytest.mark.parametrize("server", ["tools"], indirect=True)
def test_tools_of_a_server_are_tools(server):
    kind = openenv(f"openenv:{server.url}")
    tools = EnvironmentKind.of("OpenEnv", kind).tools
    assert [schema(one) for one in tools.values()] == [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds two numbers.",
                "parameters": TOOL["inputSchema"],
            },
        }
    ]

    async def play(one: Any) -> None:
        await one.reset(row=1)
        assert await one.add(a=2, b=3) == "5"
        with pytest.raises(RuntimeError, match="b is missing"):
            await one.add(a=2)
        await one.add(a=2, b=3)
        assert await one.get_reward() == 1.0
        with pytest.raises(RuntimeError, match="is done"):
            await one.add(a=2, b=3)

    run(kind, play)


@pytest.mark.parametrize("server", ["move"], indirect=True)
def test_any_other_action_is_a_tool(server):
    kind = openenv(f"openenv:{server.url}")
    tools = EnvironmentKind.of("OpenEnv", kind).tools
    assert schema(tools["step"])["function"]["parameters"]["required"] == ["x"]

    async def play(one: Any) -> None:
        await one.reset()
        assert json.loads(await one.step(x=3)) == {"x": 3, "board": [1, 2]}
        with pytest.raises(RuntimeError, match=r"Invalid message .*x is missing"):
            await one.step()

    run(kind, play)


def test_the_package_that_a_server_needs_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets", None)
    section = EnvironmentSection(factory="openenv:http://127.0.0.1:1")
    with pytest.raises(
        ShoalError, match=r"websockets is not installed: `pip install .\.\[openenv\].` in the clone"
    ):
        with_environment(Task("t", (), {}, ()), SimpleNamespace(environment=section))


def test_where_no_server_answers(server):
    free = socket.create_server(("127.0.0.1", 0))
    address = f"openenv:http://127.0.0.1:{free.getsockname()[1]}"
    free.close()
    for place in (address, "openenv:nowhere", f"openenv:{server.url}/elsewhere"):
        with pytest.raises(ShoalError, match="no OpenEnv server answers there"):
            openenv(place)
    assert not hasattr(OpenEnv, "respond")
