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
from shoal.types import Completion, SamplingParams, ShoalError

MOST = 128
"""Completions of a call, tools and stop strings."""
OWN = {"chat": {"messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "top_logprobs"},
       "text": {"prompt"}, "tokens": {"token_ids", "stop_token_ids"}}
"""Kind of a call -> the settings that no other kind has."""
FREE = ("model", "user", "metadata", "cache_salt", "request_id", "priority", "safety_identifier", "prompt_cache_key",
        "service_tier", "skip_special_tokens", "spaces_between_special_tokens", "output_kind")
"""Settings that do not change what is sampled: accepted, and read by nobody."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens", "prompt_logprobs", "top_logprobs"), (0,)),
    **dict.fromkeys(("echo", "store", "ignore_eos", "continue_final_message", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("detokenize", "add_generation_prompt", "parallel_tool_calls"), (True,)),
    **dict.fromkeys(("repetition_penalty", "best_of"), (1,)), "logit_bias": ({},), "chat_template_kwargs": ({},),
    "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"), "logprobs": (False, True, 0, 1)}
"""Settings that are supported at these values alone."""
NUMBERS = {"temperature": (0.0, 100.0), "top_p": (1e-6, 1.0), "min_p": (0.0, 1.0), "top_k": (-1, 2**31 - 1)}
COMMON = {*NUMBERS, "max_tokens", "stop", "n", "seed", "stream", "stream_options", "return_token_ids"}
TEXT = (str, [{"type": ("text",), "text": str}])
MESSAGE = {"role": ("system", "developer", "user", "assistant", "tool"), "content?": TEXT,
           "tool_calls?": [{"function": {"name": str, "arguments?": (str, dict)}}]}
TOOL = {"function": {"name": str, "parameters?": {"properties?": {"*": dict}}}}


@dataclass(frozen=True)
class Call:
    """What one request asks for.

    >>> Call("chat", [{"role": "user", "content": "2 + 3 = ?"}], SamplingParams(max_tokens=64), num_completions=8)
    """

    kind: str  # of OWN
    prompt: Any  # list[int], str or Messages
    params: SamplingParams
    num_completions: int = 1
    seed: int | None = None
    tools: Sequence[dict[str, Any]] = ()
    stream: bool = False
    usage: bool = False  # at the end of a stream
    logprobs: bool = False
    ids: bool = False  # token ids beside the texts


class Sampled(NamedTuple):
    """The answer to a call: its prompt, and what `described` says of each completion."""

    prompt_ids: list[int]
    choices: list[dict[str, Any]]


class Sampler(Protocol):
    """What answers calls: engines that only sample, or a rollout of a run."""

    name: str  # of the model
    params: SamplingParams  # of calls that give none
    max_tokens: int  # that a call may ask for
    max_prompt_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]

    async def sample(self, call: Call) -> Sampled:
        """All completions; sampling ends if this is cancelled. ShoalError for what cannot be sampled."""
        ...

    def check(self) -> None:
        """HostLost, as `sample` raises it too, where nothing can be sampled any more."""


def described(one: Completion, tools: Sequence[Any], tokenizer: Tokenizer, named: bool,
              start: int = 0) -> dict[str, Any]:
    """What an answer says of a completion's tokens from `start` on, in plain data; `named`: the text of each."""
    ids = one.token_ids[start:].tolist()
    message: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids)}
    return {"ids": ids, "logprobs": one.logprobs[start:].tolist(), "versions": one.versions[start:].tolist(),
            "stop_reason": one.stop_reason.value, "text": message["content"],
            "tokens": [tokenizer.decode([id], skip_special_tokens=False) for id in ids] if named else [],
            "message": turn_format(tokenizer, json.dumps(tools)).read(ids)[0] if tools else message}


@lru_cache(64)
def turn_format(tokenizer: Tokenizer, tools: str) -> TurnFormat:
    """How turns with these tools, as JSON, look. ShoalError for a chat template without a place for them."""
    return TurnFormat(tokenizer, json.loads(tools))


def encode(prompt: Any, tools: Sequence[Any], tokenizer: Tokenizer, most: int) -> np.ndarray:
    """The token ids of a prompt, int32[T]. ShoalError for none, and for more than `most`."""
    if fits(prompt, [int]):
        ids = np.array(prompt, np.int32)
    else:
        ids = (turn_format(tokenizer, json.dumps(tools)) if tools else tokenizer).encode_prompt(prompt)
    if not 1 <= len(ids) <= most:
        raise ShoalError(f"the prompt has {len(ids)} tokens, expected 1 to sampling.max_prompt_tokens={most}", "prompt")
    return ids


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; half of a surrogate pair, which no tokenizer takes, becomes `?`."""
    try:
        plain = json.dumps(json.loads(body), ensure_ascii=False, allow_nan=False)
        read = json.loads(plain.encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"the body is no valid JSON: {error}") from None
    require(isinstance(read, dict), "body", read, "an object")
    return read


def read_call(kind: str, body: Mapping[str, Any], sampler: Sampler) -> Call:
    """The call of a body, of the kind `chat`, `text` or `tokens`. ShoalError names the setting that is wrong."""
    body = {name: value for name, value in body.items() if value is not None}
    if kind == "tokens":  # everything but the prompt is in there
        require(isinstance(given := body.pop("sampling_params", {}), dict), "sampling_params", given, "an object")
        given = {name: value for name, value in given.items() if value is not None}
        body |= {"logprobs": 1, "return_token_ids": True, **given}
    for name, value in body.items():
        if name not in {*COMMON, *OWN[kind], *FREE, *NEUTRAL} or name in set().union(*OWN.values()) - OWN[kind]:
            raise ShoalError(f"{name}: this address has no such setting; leave it out", name)
        if name in NEUTRAL:
            require(any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL[name]),
                    name, value, " or ".join(map(json.dumps, NEUTRAL[name])))
    options = {name: body.get(name, False) for name in ("stream", "return_token_ids")}
    for name, value in options.items():
        require(isinstance(value, bool), name, value, "true or false")
    require(isinstance(usage := body.get("stream_options", {}), dict), "stream_options", usage, "an object")
    require(fits(tools := body.get("tools", []), [TOOL]) and len(tools) <= MOST, "tools", tools, "functions by name")
    for tool in tools:
        tool["function"].setdefault("parameters", {}).setdefault("properties", {})
    logprobs = body.get("logprobs", False)
    return Call(kind, _prompt(kind, body, sampler), _params(body, sampler), _number(body, "n", 1, 1, MOST),
                _number(body, "seed", None, -2**63, 2**63 - 1), tools if body.get("tool_choice") != "none" else (),
                options["stream"], usage.get("include_usage") is True,
                bool(logprobs) if kind == "chat" else logprobs is not False, options["return_token_ids"])


def _params(body: Mapping[str, Any], sampler: Sampler) -> SamplingParams:
    """The settings of sampling, those of the sampler where a body has none."""
    own, stop, ends = sampler.params, body.get("stop", []), body.get("stop_token_ids", [])
    stop = [stop] if isinstance(stop, str) else stop
    require(fits(stop, [str]) and all(stop) and len(stop) <= MOST, "stop", stop, f"a text, or at most {MOST} of them")
    require(isinstance(ends, list) and all(one in sampler.eos_ids for one in ends), "stop_token_ids", ends,
            f"of the model's own, {', '.join(map(str, sampler.eos_ids))}")
    numbers = {name: _number(body, name, getattr(own, name), *bounds) for name, bounds in NUMBERS.items()}
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return replace(own, **numbers | {"top_k": max(0, numbers["top_k"])}, stop=tuple(stop) or own.stop,
                   max_tokens=_number(body, limit, own.max_tokens, 1, sampler.max_tokens))


def _prompt(kind: str, body: Mapping[str, Any], sampler: Sampler) -> Any:
    name = {"chat": "messages", "text": "prompt", "tokens": "token_ids"}[kind]
    value: Any = body.get(name)
    if kind == "chat":
        require(bool(value) and fits(value, [MESSAGE]), name, value, "messages with a role, and a text as content")
        return list(map(_message, value))
    value = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list | str) else value
    are_ids = fits(value, [int]) and all(0 <= id < sampler.vocab_size for id in value)
    require(are_ids or (kind == "text" and isinstance(value, str)), name, value,
            f"token ids below {sampler.vocab_size}")
    return value


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it: its text in one piece, the arguments of calls as objects."""
    message = {name: value for name, value in given.items() if value is not None}
    content = message.get("content", "")
    message["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
    message["role"] = "system" if message["role"] == "developer" else message["role"]
    for call in message.get("tool_calls", ()):
        arguments = call["function"].get("arguments") or "{}"
        call["function"]["arguments"] = parse(arguments.encode()) if isinstance(arguments, str) else arguments
    return message


def fits(value: Any, shape: Any) -> bool:
    """Whether JSON has a shape: a type, (values or shapes to choose from), [of items], {of names, some with a ?}."""
    if isinstance(shape, tuple):
        return any(value == one if isinstance(one, str) else fits(value, one) for one in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(one, shape[0]) for one in value)
    if not isinstance(shape, dict) or not isinstance(value, dict):
        return type(value) is shape
    if "*" in shape:
        return all(fits(one, shape["*"]) for one in value.values())
    given = {name: value.get(name.rstrip("?")) for name in shape}
    return all((one is None and name.endswith("?")) or fits(one, shape[name]) for name, one in given.items())


def require(holds: bool, name: str, value: Any, wanted: str) -> None:
    if not holds:
        raise ShoalError(f"{name}={shorten(json.dumps(value), 60)}: expected {wanted}", name)


def _number(body: Mapping[str, Any], name: str, default: Any, low: Any, high: Any) -> Any:
    value, kind = body.get(name, default), type(low)
    require(name not in body or (type(value) in (int, kind) and low <= value <= high), name, value,
            f"{'an integer' if kind is int else 'a number'} from {low:g} to {high}")
    return kind(value) if name in body else default
