"""Reads the bodies of requests: what is unknown, or would have no effect, is refused by name.

Settings have OpenAI's names and vLLM's: https://platform.openai.com/docs/api-reference,
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from shoal.model.tokenizer import Tokenizer
from shoal.model.turns import TurnFormat
from shoal.text import shorten
from shoal.types import Completion, Messages, SamplingParams, ShoalError

MOST_COMPLETIONS, MOST_STOPS, MOST_MESSAGES = 128, 16, 4096
ROUTES = {"chat": ("messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "top_logprobs"),
          "text": ("prompt",), "tokens": ("token_ids", "stop_token_ids")}
"""Kind of a call -> the settings that no other kind has."""
FREE = ("model", "user", "metadata", "cache_salt", "request_id", "priority", "safety_identifier", "prompt_cache_key",
        "service_tier")
"""Settings that do not change what is sampled: accepted, and read by nobody."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens", "prompt_logprobs"), (0,)),
    **dict.fromkeys(("echo", "store", "ignore_eos", "use_beam_search", "continue_final_message"), (False,)),
    **dict.fromkeys(("detokenize", "add_generation_prompt", "parallel_tool_calls"), (True,)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)), "repetition_penalty": (1,), "best_of": (1,),
    "length_penalty": (1,), "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"),
    "top_logprobs": (0,), "skip_special_tokens": (True, False), "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,), "output_kind": (0, 1, 2), "modalities": (["text"],)}
"""Settings that are supported at these values alone."""
COMMON = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "n", "seed", "logprobs", "stream",
          "stream_options", "return_token_ids", "return_tokens_as_token_ids")


@dataclass(frozen=True)
class Call:
    """What one request asks for.

    >>> Call("sk-1", [{"role": "user", "content": "2 + 3 = ?"}], SamplingParams(max_tokens=64), num_completions=8)
    """

    key: str  # of the request's Authorization
    prompt: np.ndarray | str | Messages  # int32[T], a text, or messages
    params: SamplingParams
    num_completions: int = 1
    seed: int | None = None
    tools: tuple[dict[str, Any], ...] = ()
    stream: bool = False
    usage: bool = False  # at the end of a stream
    logprobs: bool = False
    ids: bool = False  # token ids beside the texts
    ids_as_tokens: bool = False  # `token_id:7` in place of a token's text


class Sampled(NamedTuple):
    """The answer to a call."""

    prompt_ids: np.ndarray
    completions: Sequence[Completion]


class Sampler(Protocol):
    """What answers calls: engines that only sample, or the rollouts of a run."""

    @property
    def name(self) -> str:
        """Of the model."""
        ...

    @property
    def params(self) -> SamplingParams:
        """The settings of calls that give none; `max_tokens` is also the most."""
        ...

    @property
    def max_prompt_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    async def sample(self, call: Call) -> Sampled:
        """All completions of a call; sampling ends if this is cancelled. ShoalError for what cannot be sampled,
        HostLost where nothing can be."""
        ...

    def label(self, version: int) -> str:
        """What a version of the weights is called outside."""
        ...

    def check(self) -> None:
        """HostLost where nothing can be sampled any more."""
        ...


@lru_cache(64)
def _format(tokenizer: Tokenizer, tools: str) -> TurnFormat:
    return TurnFormat(tokenizer, json.loads(tools))


def turn_format(tokenizer: Tokenizer, tools: Sequence[dict[str, Any]]) -> TurnFormat:
    """How turns with these tools look. ShoalError for a chat template without a place for them."""
    return _format(tokenizer, json.dumps(tools))


def encode(call: Call, tokenizer: Tokenizer) -> np.ndarray:
    """The token ids of a call's prompt, int32[T]."""
    if isinstance(call.prompt, np.ndarray):
        return call.prompt
    return turn_format(tokenizer, call.tools).encode_prompt(call.prompt) if call.tools else \
        tokenizer.encode_prompt(call.prompt)


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; half of a surrogate pair, which no tokenizer takes, becomes `?`."""
    try:
        read = json.loads(body, parse_constant=_no_number)
        if b"\\ud" in body or b"\\uD" in body:
            read = json.loads(json.dumps(read, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"the body is no valid JSON: {error}") from None
    if not isinstance(read, dict):
        raise ShoalError("the body must be a JSON object")
    return read


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def read_call(kind: str, body: Mapping[str, Any], key: str, sampler: Sampler) -> Call:
    """The call of a body, of the kind `chat`, `text` or `tokens`. ShoalError names the setting that is wrong."""
    body = {name: value for name, value in body.items() if value is not None}
    if kind == "tokens":  # everything but the prompt is in there
        given = body.pop("sampling_params", {})
        _require(isinstance(given, dict), "sampling_params", given, "an object")
        body |= {"logprobs": True, **{name: value for name, value in given.items() if value is not None}}
    for name, value in body.items():
        known = name in (*COMMON, *ROUTES[kind], *FREE, *NEUTRAL)
        if not known or name in set().union(*ROUTES.values()) - {*ROUTES[kind]}:
            raise ShoalError(f"{name}: this address has no such setting; leave it out", name)
        if name in NEUTRAL:
            _require(any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL[name]),
                     name, value, " or ".join(map(json.dumps, NEUTRAL[name])))
    if "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")
    options = _option(body, "stream_options", {})
    logprobs = body.get("logprobs", False)
    if kind == "chat":
        _option(body, "logprobs", False)
    else:  # how many, of which there is the sampled token's alone
        _require(logprobs in (False, 0, 1, True), "logprobs", logprobs, "0 or 1: the log-probs of sampled tokens")
        logprobs = "logprobs" in body and logprobs is not False
    return Call(
        key, PROMPTS[kind](body, sampler), read_params(body, sampler),
        _number(body, "n", 1, 1, MOST_COMPLETIONS), _number(body, "seed", None, -2**63, 2**63 - 1),
        tools=_tools(body), stream=_option(body, "stream", False), usage=options.get("include_usage") is True,
        logprobs=bool(logprobs), ids=_option(body, "return_token_ids", kind == "tokens"),
        ids_as_tokens=_option(body, "return_tokens_as_token_ids", False))


def read_params(body: Mapping[str, Any], sampler: Sampler) -> SamplingParams:
    """The settings of sampling, those of the sampler where a body has none."""
    own = sampler.params
    stop = body.get("stop", list(own.stop))
    stop = [stop] if isinstance(stop, str) else stop
    _require(isinstance(stop, list) and len(stop) <= MOST_STOPS and all(isinstance(one, str) and one for one in stop),
             "stop", stop, f"a text or at most {MOST_STOPS} of them")
    ends = body.get("stop_token_ids", [])
    _require(isinstance(ends, list) and all(type(one) is int and one in sampler.tokenizer.eos_ids for one in ends),
             "stop_token_ids", ends, f"some of the model's own, {', '.join(map(str, sampler.tokenizer.eos_ids))}")
    bounds = {"temperature": (0.0, 100.0), "top_p": (1e-6, 1.0), "min_p": (0.0, 1.0), "max_tokens": (1, own.max_tokens)}
    numbers = {name: _number(body, name, getattr(own, name), *bound) for name, bound in bounds.items()}
    return replace(own, **numbers, top_k=max(0, _number(body, "top_k", own.top_k, -1, 2**31 - 1)), stop=tuple(stop))


def _require(holds: bool, name: str, value: Any, wanted: str) -> None:
    if not holds:
        raise ShoalError(f"{name}={shorten(json.dumps(value), 60)}: expected {wanted}", name)


def _option(body: Mapping[str, Any], name: str, default: Any) -> Any:
    value = body.get(name, default)
    _require(type(value) is type(default), name, value, "an object" if default == {} else "true or false")
    return value


def _number(body: Mapping[str, Any], name: str, default: Any, low: Any, high: Any) -> Any:
    if name not in body:
        return default
    value, kind = body[name], type(low)
    _require(type(value) in (int, kind) and low <= value <= high, name, value,
             f"{'an integer' if kind is int else 'a number'} from {low:g} to {high:g}")
    return kind(value)


# Prompts


def _ids(name: str, value: Any, sampler: Sampler) -> np.ndarray:
    _require(isinstance(value, list) and all(type(id) is int and 0 <= id < sampler.vocab_size for id in value), name,
             value, f"a list of token ids from 0 to {sampler.vocab_size - 1}")
    return np.asarray(value, np.int32)


def _text(body: Mapping[str, Any], sampler: Sampler) -> np.ndarray | str:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    return _ids("prompt", prompt, sampler)


def _messages(body: Mapping[str, Any], sampler: Sampler) -> Messages:
    messages: Any = body.get("messages")
    _require(isinstance(messages, list) and 1 <= len(messages) <= MOST_MESSAGES, "messages", messages,
             f"a list of 1 to {MOST_MESSAGES} messages")
    return [_message(one, f"messages[{number}]") for number, one in enumerate(messages)]


def _message(given: Any, where: str) -> dict[str, Any]:
    """A message as chat templates read it: its text in one piece, the arguments of calls as objects."""
    _require(isinstance(given, dict), where, given, "an object with role and content")
    message = {name: value for name, value in given.items() if value is not None}
    role, content = message.get("role"), message.get("content", "")
    _require(role in ("system", "developer", "user", "assistant", "tool"), f"{where}.role", role,
             "system, developer, user, assistant or tool")
    if isinstance(content, list):
        _require(all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
                     for part in content), f"{where}.content", content, "a text, or parts of the type text")
        content = "".join(part["text"] for part in content)
    _require(isinstance(content, str), f"{where}.content", content, "a text, or parts of the type text")
    message |= {"role": "system" if role == "developer" else role, "content": content}
    if "tool_calls" in message:
        calls = message["tool_calls"]
        _require(isinstance(calls, list), f"{where}.tool_calls", calls, "a list")
        message["tool_calls"] = [_tool_call(one, f"{where}.tool_calls[{i}]") for i, one in enumerate(calls)]
    return message


def _tool_call(given: Any, where: str) -> dict[str, Any]:
    function: Any = given.get("function") if isinstance(given, dict) else None
    _require(isinstance(function, dict) and isinstance(function.get("name"), str), where, given,
             "an object with function.name and function.arguments")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments.encode())
        except ShoalError as error:
            raise ShoalError(f"{where}.function.arguments: {error}", "messages") from None
    return {**given, "type": "function", "function": {**function, "arguments": arguments}}


def _tools(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = body.get("tools", [])
    _require(isinstance(tools, list) and len(tools) <= MOST_COMPLETIONS, "tools", tools,
             f"a list of at most {MOST_COMPLETIONS} functions")
    for number, tool in enumerate(tools):
        function: Any = tool.get("function") if isinstance(tool, dict) else None
        _require(isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"]),
                 f"tools[{number}]", tool, "a function with a name")
        parameters = function.setdefault("parameters", {"type": "object", "properties": {}})
        _require(isinstance(parameters, dict) and isinstance(parameters.setdefault("properties", {}), dict) and
                 all(map(_is_schema, parameters["properties"].values())),
                 f"tools[{number}].function.parameters", parameters, "a JSON schema of an object")
    return () if body.get("tool_choice") == "none" else tuple(tools)


def _is_schema(value: Any) -> bool:
    """Whether a tool's argument can be read by it."""
    kinds = [value, *value["anyOf"]] if isinstance(value, dict) and isinstance(value.get("anyOf"), list) else [value]
    return all(isinstance(one, dict) and all(isinstance(name, str) for name in _listed(one.get("type", [])))
               and isinstance(one.get("anyOf", []), list) for one in kinds)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


PROMPTS: Mapping[str, Any] = {"chat": _messages, "text": _text,
                              "tokens": lambda body, sampler: _ids("token_ids", body.get("token_ids"), sampler)}
