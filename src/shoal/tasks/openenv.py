"""Environments that run on OpenEnv servers, asked over their WebSocket: `environment=openenv:URL`.
OpenEnv's package is not needed.

reset(**columns) -> {"type": "reset"}             a server's tools (MCP) -> tools of the rollout
respond(message) -> {"type": "step"}              an action that is one text: the model's words
step(**action)   -> {"type": "step"}              any other action: a tool, by the server's schema
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from shoal.config.sections.task import TaskSection
from shoal.records import Example, ShoalError
from shoal.tasks.generated import NUM_HELD_OUT, NUM_TRAIN, LazyRows, refuse_path
from shoal.tasks.task import Task
from shoal.text import describe_error, shorten

PREFIX = "openenv:"


CONNECT_SECONDS = 30.0


MOST_BYTES = 100 << 20
"""The largest message of a server that is accepted."""


_FIELDS = ("done", "reward", "metadata")
"""Fields of an observation or an action that the model neither sees nor writes."""


class OpenEnv:
    """A session at a server. Its attribute `reward` is the reward of the last step, for the record;
    `get_reward` returns the sum of all steps."""

    url: ClassVar[str]

    def __init__(self) -> None:
        self._socket: Any = None
        self.total, self.done = 0.0, False

    async def reset(self, **columns: Any) -> str | None:
        """Begins a rollout: resets the server's environment with the row's columns, and with its
        column `row`, if there is one, as the seed, unless the row has a column `seed`. Returns the
        first observation as text, None if it is empty. The columns `prompt` and `environment` are
        not sent. RuntimeError if the server refuses."""
        self.total, self.done = 0.0, False
        # Of the rollout before: a turn's reward is what this attribute holds.
        vars(self).pop("reward", None)
        arguments = dict(columns)
        arguments.pop("prompt", None)
        arguments.pop("environment", None)
        if "row" in columns:
            arguments.setdefault("seed", columns["row"])
        reset = await self._request("reset", arguments)
        return _observation_text(reset["observation"]) or None

    async def get_reward(self) -> float:
        return self.total

    async def _step(self, action: Mapping[str, Any]) -> Any:
        """Sends an action and returns the observation. Adds the step's reward to the total.
        RuntimeError if the server refuses the action, or if the rollout is over."""
        if self.done:
            raise RuntimeError("the environment is done: give your answer")
        step = await self._request("step", action)
        self.done = bool(step.get("done"))
        if step.get("reward") is not None:
            self.reward = float(step["reward"])
            self.total += self.reward
        return step["observation"]

    async def close(self) -> None:
        """Closes the connection, if there is one; the next message opens another."""
        if self._socket is not None:
            await self._socket.close()
        self._socket = None

    async def _request(self, kind: str, data: Mapping[str, Any]) -> Any:
        """Sends a message (`kind`: "reset" or "step") and returns the data of the answer. Before a
        reset it connects again if the server has closed the idle connection; in other cases raises
        ConnectionClosed then. RuntimeError if the answer is an error. `data` is what is sent with
        it."""
        from websockets import ConnectionClosed

        message = json.dumps({"type": kind, "data": data})
        is_new = self._socket is None
        try:
            answer = await self._exchange(message)
        except ConnectionClosed:
            await self.close()
            if kind != "reset" or is_new:
                raise
            # A server may close a connection that idled between two rollouts.
            answer = await self._exchange(message)
        if answer["type"] == "error":
            said = answer["data"]
            raise RuntimeError(
                f"the server answered: {said.get('message')} {shorten(str(said.get('errors', '')))}"
            )
        return answer["data"]

    async def _exchange(self, message: str) -> Any:
        """Sends a message and returns the server's next one, parsed. Connects first if there is no
        connection."""
        from websockets.asyncio.client import connect

        if self._socket is None:
            self._socket = await connect(
                f"{self.url}/ws", open_timeout=CONNECT_SECONDS, max_size=MOST_BYTES
            )
        await self._socket.send(message)
        return json.loads(await self._socket.recv())


def openenv(address: str) -> type[OpenEnv]:
    """Returns the environment class for a server's address, after asking the server for its schema.
    It opens no connection yet. Its methods besides `reset` are the server's tools; without tools it
    has `respond` if an action is one text, else a tool `step`. ShoalError if the server does not
    answer, or does not speak OpenEnv's protocol."""
    url = address.removeprefix(PREFIX).rstrip("/")
    try:
        action = _get(f"{url}/schema")["action"]
        tools = _post(
            f"{url}/mcp", {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShoalError(
            f"environment={address}: no OpenEnv server answers there ({describe_error(error)}): "
            "start it, or give the address that its /health has",
            "environment.factory",
        ) from error
    listed = (tools.get("result") or {}).get("tools") or []
    fields = dict(action.get("properties") or {})
    for name in _FIELDS:
        fields.pop(name, None)
    field_names = list(fields)
    members: dict[str, Any] = {}
    if listed:
        for tool in listed:
            members[tool["name"]] = _tool_method(tool)
    elif len(field_names) == 1 and fields[field_names[0]].get("type") == "string":
        members["respond"] = _respond_method(field_names[0])
    else:
        members["step"] = _step_method({**action, "properties": fields})
    # http -> ws, https -> wss.
    members["url"] = "ws" + url.removeprefix("http")
    return type("OpenEnv", (OpenEnv,), members)


def _respond_method(field: str) -> Callable[..., Awaitable[str | None]]:
    """Returns an async method `respond` that sends the model's text as the field `field` of an
    action. It returns the observation as text, None if the environment is done."""

    async def respond(self: OpenEnv, message: str) -> str | None:
        observation = await self._step({field: message})
        return None if self.done else _observation_text(observation)

    return respond


def _tool_method(tool: Mapping[str, Any]) -> Callable[..., Awaitable[str]]:
    """Returns an async method, with the tool's name and schema, that calls a tool of the server and
    returns its result as text. `tool` is what the server lists: `name`, `description`,
    `inputSchema`. The method raises RuntimeError if the server reports an error, or if the
    environment is done."""

    async def call(self: OpenEnv, **arguments: Any) -> str:
        """Calls the tool and returns its result: the texts of its `content` if it has such, joined;
        else its fields as text."""
        observation = await self._step(
            {"type": "call_tool", "tool_name": tool["name"], "arguments": arguments}
        )
        if observation.get("error"):
            raise RuntimeError(observation["error"]["message"])
        result = observation.get("result")
        if isinstance(result, Mapping) and result.get("content"):
            return "".join(str(part.get("text", "")) for part in result["content"])
        return _observation_text(result)

    return _with_schema(
        call,
        tool["name"],
        tool.get("description") or tool["name"],
        tool.get("inputSchema") or tool.get("input_schema") or {},
    )


def _step_method(action: Mapping[str, Any]) -> Callable[..., Awaitable[str]]:
    """Returns an async method `step`, with the schema `action`, that sends an action and returns
    the observation as text. Its arguments are the action's fields. The method raises RuntimeError
    if the server refuses the action, or if the environment is done."""

    async def step(self: OpenEnv, **fields: Any) -> str:
        return _observation_text(await self._step(fields))

    return _with_schema(
        step, "step", action.get("description") or "Acts in the environment.", action
    )


def _with_schema(
    function: Any, name: str, description: str, parameters: Mapping[str, Any]
) -> Callable[..., Any]:
    """Sets a function's name and its tool schema, which stands for type hints and a docstring.
    Returns the same function. `parameters` is the JSON schema of its arguments; of that `type`,
    `properties`, `required` and `$defs` are used."""
    function.__name__ = name
    schema_of_parameters: dict[str, Any] = {"type": "object", "properties": {}}
    for key in ("type", "properties", "required", "$defs"):
        if key in parameters:
            schema_of_parameters[key] = parameters[key]
    function.schema = {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": schema_of_parameters,
        },
    }
    return function


def _observation_text(observation: Any) -> str:
    """Returns an observation as text, without _FIELDS and fields that are None: the text itself if
    it has one field, which is text, else its fields as JSON. "" if no field is left. An observation
    that is no dict is text itself, or becomes JSON."""
    if isinstance(observation, Mapping):
        fields = {}
        for name, value in observation.items():
            if name not in _FIELDS and value is not None:
                fields[name] = value
        if not fields:
            return ""
        observation = fields
        if len(fields) == 1:
            (value,) = fields.values()
            if isinstance(value, str):
                return value
    if isinstance(observation, str):
        return observation
    return json.dumps(observation)


def _get(url: str) -> Any:
    """Returns the JSON at an address."""
    with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as answer:
        return json.load(answer)


def _post(url: str, data: Mapping[str, Any]) -> Any:
    """Posts JSON to an address and returns the parsed answer; {} if the answer is an HTTP error,
    which a server without tools sends. OSError if nothing answers in CONNECT_SECONDS, ValueError if
    the answer is no JSON."""
    request = urllib.request.Request(
        url, json.dumps(data).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError:  # the server has no tools
        return {}


def load(task: TaskSection) -> Task:
    """Loads the task `environment`, for environments that ask their own questions: prompts are
    empty, and `reset(row, **columns)` returns the user's words. The column `row` is the row's
    number for training rows, and begins at a million for held-out rows. ShoalError if `task.path`
    is set. There are a million training rows, and `task.num_eval_questions` (0: 500) held-out
    ones."""
    refuse_path(task, "environment")
    num_held_out = task.num_eval_questions or NUM_HELD_OUT
    held_out = [_example(row, NUM_TRAIN + row) for row in range(num_held_out)]
    return Task(
        "environment",
        train=LazyRows(lambda row: _example(row, row), NUM_TRAIN),
        evaluations={"held_out": held_out},
    )


def _example(row: int, number: int) -> Example:
    return Example(row, [{"role": "user", "content": ""}], {"row": number})
