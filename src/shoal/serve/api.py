"""The API of OpenAI, and vLLM's: calls are read by their names of settings, and answered in their
form. What is unknown or has no effect is refused by name."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from shoal.records import SamplingParams, ShoalError, StopReason
from shoal.text import exact, shorten


class Within(NamedTuple):
    """The shape of a number from `low` to `high`, of their type."""

    low: float
    high: float


MOST_DEPTH = 200
"""Of lists and objects inside one another in a body."""


MOST = 128
"""Completions of a call, tools and stop strings."""


MESSAGE = {
    "role": ("system", "developer", "user", "assistant", "tool"),
    "content?": (str, [{"type": ("text",), "text": str}]),
    "tool_calls?": [{"function": {"name": str, "arguments?": (str, dict)}}],
}


TOOL = {"function": {"name": str, "parameters?": {"properties?": {"*": dict}}}}


ONLY_AT = {
    **dict.fromkeys(
        ("frequency_penalty", "presence_penalty", "min_tokens", "prompt_logprobs", "top_logprobs"),
        Within(0.0, 0.0),
    ),
    "repetition_penalty": Within(1.0, 1.0),
    "best_of": Within(1, 1),
    **dict.fromkeys(
        ("echo", "store", "ignore_eos", "continue_final_message", "include_stop_str_in_output"),
        (False,),
    ),
    **dict.fromkeys(("detokenize", "add_generation_prompt", "parallel_tool_calls"), (True,)),
    "response_format": {"type": ("text",)},
    "tool_choice": ("auto", "none"),
    "logit_bias": {"*": ()},
    "chat_template_kwargs": {"*": ()},
}
"""Settings of which one value is supported, and is what it would be without them."""


FREE = (
    "model",
    "user",
    "metadata",
    "cache_salt",
    "request_id",
    "priority",
    "safety_identifier",
    "prompt_cache_key",
    "service_tier",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "output_kind",
)
"""Settings that do not change what is sampled: accepted, and read by nobody."""


SAMPLING = {
    "temperature": Within(0.0, 100.0),
    "top_p": Within(1e-6, 1.0),
    "min_p": Within(0.0, 1.0),
    "top_k": Within(-1, 2**30),
}


PROMPTS = {
    "chat": ("messages", [MESSAGE]),
    "text": ("prompt", (str, [int])),
    "tokens": ("token_ids", [int]),
}
"""Kind of a call -> the name and the shape of its prompt."""


SHAPES = {
    **ONLY_AT,
    **SAMPLING,
    **dict.fromkeys(FREE, object),
    "n": Within(1, MOST),
    "stream": bool,
    "tools": [TOOL],
    "seed": Within(-(2**63), 2**63 - 1),
    "stop": (str, [str]),
    "stream_options": dict,
    "return_token_ids": bool,
    "logprobs": (False, True, 0, 1),
    "stop_token_ids": [int],
    **dict(PROMPTS.values()),
}


@dataclass(frozen=True)
class Call:
    """What one request asks for.

    >>> messages = [{"role": "user", "content": "2 + 3 = ?"}]
    >>> Call("chat", messages, SamplingParams(max_tokens=64), num_completions=8)
    """

    kind: str
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
    """What answers calls: engines that only sample, or a rollout of a run. `max_tokens`: that a
    call may ask for."""

    name: str
    params: SamplingParams
    max_tokens: int
    max_prompt_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]

    async def sample(self, call: Call) -> Sampled:
        """All completions; sampling ends if this is cancelled. ShoalError for what cannot be
        sampled."""
        ...

    def check(self) -> None:
        """HostLost, as `sample` raises it too, where nothing can be sampled any more."""


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; half of a surrogate pair, which no tokenizer takes, becomes
    `?`."""
    try:
        plain = json.dumps(json.loads(body), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"the body is no valid JSON: {error}") from None
    read = json.loads(plain.encode("utf-8", "replace"))
    require(isinstance(read, dict), "body", read, "an object")
    _check_depth(read)
    return read


def _check_depth(body: dict[str, Any]) -> None:
    """ShoalError for lists and objects too deep inside one another: writing them again takes more
    of Python's stack than reading."""
    level: list[Any] = [body]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for one in level:
            inner = one.values() if isinstance(one, dict) else one
            below += [value for value in inner if isinstance(value, dict | list)]
        if not below:
            return
        level = below
    raise ShoalError(
        f"the body is no valid request: more than {MOST_DEPTH} lists and objects inside one another"
    )


def read_call(kind: str, body: dict[str, Any], sampler: Sampler) -> Call:
    """The call of a body. ShoalError names the setting that is wrong."""
    if kind == "tokens":  # everything but the prompt is in there
        require(
            fits(given := body.pop("sampling_params", {}), dict),
            "sampling_params",
            given,
            "an object",
        )
        body = {"logprobs": 1, "return_token_ids": True, **body, **given}
    body = {name: value for name, value in body.items() if value is not None}
    prompt = PROMPTS[kind][0]
    if kind == "text" and fits(body.get("prompt"), [(str, list)]) and len(body["prompt"]) == 1:
        [body["prompt"]] = body["prompt"]
    limits = ("max_tokens", "max_completion_tokens") if kind == "chat" else ("max_tokens",)
    shapes = {**SHAPES, **dict.fromkeys(limits, Within(1, sampler.max_tokens))}
    others = {name for name, _ in PROMPTS.values()} - {prompt}
    for name, value in {prompt: None, **body}.items():
        require(
            name in shapes and name not in others,
            name,
            value,
            "nothing: this address has no such setting",
        )
        require(fits(value, shapes[name]), name, value, expected(shapes[name]))
    ids = body[prompt] if fits(body[prompt], [int]) else []
    require(
        bool(body[prompt]) and all(0 <= id < sampler.vocab_size for id in ids),
        prompt,
        body[prompt],
        f"some, of ids below {sampler.vocab_size}",
    )
    ends, own, stop = body.get("stop_token_ids", []), sampler.params, body.get("stop", [])
    require(
        {*ends} <= {*sampler.eos_ids},
        "stop_token_ids",
        ends,
        f"of the model's own, {sampler.eos_ids}",
    )
    stop = [stop] if isinstance(stop, str) else stop
    require(all(stop) and len(stop) <= MOST, "stop", stop, f"at most {MOST}, none of them empty")
    numbers = {name: body[name] for name in SAMPLING if name in body}
    # Both may be given: OpenAI's newer name counts, as in vLLM.
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens", own.max_tokens))
    params = replace(own, **numbers, max_tokens=max_tokens, stop=tuple(stop) or own.stop)
    for tool in (tools := body.get("tools", [])):
        require(bool(tool["function"]["name"]), "tools", tool, "a name of each")
        tool["function"].setdefault("parameters", {}).setdefault("properties", {})
    logprobs = body.get("logprobs", False)
    return Call(
        kind,
        [*map(_message, body[prompt])] if kind == "chat" else body[prompt],
        replace(params, top_k=max(0, params.top_k)),
        body.get("n", 1),
        body.get("seed"),
        tools if body.get("tool_choice") != "none" else (),
        body.get("stream", False),
        body.get("stream_options", {}).get("include_usage") is True,
        bool(logprobs) if kind == "chat" else logprobs is not False,
        body.get("return_token_ids", False),
    )


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it: its text in one piece, the arguments of calls as
    objects."""
    message = {name: value for name, value in given.items() if value is not None}
    content = message.get("content", "")
    message["content"] = (
        content if isinstance(content, str) else "".join(part["text"] for part in content)
    )
    message["role"] = message["role"].replace("developer", "system")
    for call in message.get("tool_calls", ()):
        arguments = call["function"].get("arguments") or "{}"
        call["function"]["arguments"] = (
            parse(arguments.encode()) if isinstance(arguments, str) else arguments
        )
    return message


def fits(value: Any, shape: Any) -> bool:
    """Whether JSON has a shape: a type, a number `Within`, (values or shapes to choose from), [of
    all items], {of names, some with a ?; * for all}."""
    if isinstance(shape, Within):
        return type(value) in (int, type(shape.low)) and shape.low <= value <= shape.high
    if isinstance(shape, tuple):
        return any(
            fits(value, one)
            if isinstance(one, type | list | dict)
            else value is one or (type(value) is type(one) and value == one)
            for one in shape
        )
    if isinstance(shape, list):
        if isinstance(value, list) and isinstance(shape[0], type) and shape[0] is not object:
            return {*map(type, value)} <= {*shape}  # of a prompt, thousands of ids
        return isinstance(value, list) and all(fits(one, shape[0]) for one in value)
    if not isinstance(shape, dict) or not isinstance(value, dict):
        return shape is object or type(value) is shape
    if "*" in shape:
        return all(fits(one, shape["*"]) for one in value.values())
    given = {name: value.get(name.rstrip("?")) for name in shape}
    return all(
        (one is None and name.endswith("?")) or fits(one, shape[name])
        for name, one in given.items()
    )


def expected(shape: Any) -> str:
    """A setting's shape in words."""
    if isinstance(shape, Within):
        return (
            f"{'an integer' if isinstance(shape.low, int) else 'a number'} from {exact(shape.low)} "
            f"to {shape.high}"
        )
    values = (
        [json.dumps(one) for one in shape if isinstance(one, str | int)]
        if isinstance(shape, tuple)
        else []
    )
    return " or ".join(values) or "what OpenAI's API has there, of texts alone"


def require(holds: bool, name: str, value: Any, wanted: str) -> None:
    """ShoalError for a setting that is not what is wanted."""
    if not holds:
        raise ShoalError(f"{name}={shorten(json.dumps(value), 60)}: expected {wanted}", name)


FINISHED = {StopReason.LENGTH: "length", StopReason.CANCELLED: "abort"}
"""Why a completion has ended, as vLLM has it; all others are `stop`."""


def reply(call: Call, sampled: Sampled, model: str) -> dict[str, Any]:
    """The record of a call's completions."""
    sizes = len(sampled.prompt_ids), sum(len(one["ids"]) for one in sampled.choices)
    prompt = {"prompt_token_ids": sampled.prompt_ids} if call.ids else {}
    choices = [
        {"index": number, **_choice(call, one), **(prompt if call.kind == "text" else {})}
        for number, one in enumerate(sampled.choices)
    ]
    return {
        "id": (name := f"cmpl-{uuid.uuid4().hex}"),
        "request_id": name,
        "created": int(time.time()),
        "model": model,
        "object": "chat.completion" if call.kind == "chat" else "text_completion",
        "choices": choices,
        **prompt,
        "usage": {
            "prompt_tokens": sizes[0],
            "completion_tokens": sizes[1],
            "total_tokens": sum(sizes),
        },
    }


def _choice(call: Call, one: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "finish_reason": FINISHED.get(one["stop_reason"], "stop"),
        "stop_reason": None,
        "logprobs": _logprobs(call.kind, one) if call.logprobs else None,
    }
    text, message = one["text"], dict(one["message"])
    if one["stop_reason"] == StopReason.STOP:  # which the text does not have
        at, choice["stop_reason"] = min(
            (text.find(stop), stop) for stop in call.params.stop if stop in text
        )
        text, message = text[:at], {"role": "assistant", "content": text[:at]}
    if call.kind == "text":
        choice["text"] = text
    elif call.kind == "chat":
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {
                    "id": f"call_{uuid.uuid4().hex}",
                    "type": "function",
                    "function": {
                        **made["function"],
                        "arguments": json.dumps(made["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for made in calls
            ]
            choice["finish_reason"] = choice["finish_reason"].replace("stop", "tool_calls")
        choice["message"] = message
    if call.ids:
        ends = itertools.accumulate(
            len([*tokens]) for _, tokens in itertools.groupby(one["versions"])
        )
        labels = [label for label, _ in itertools.groupby(one["versions"])]
        spans = itertools.pairwise([0, *ends])
        choice |= {
            "token_ids": one["ids"],
            "weight_versions": [
                {"version": label, "start": start, "end": end}
                for label, (start, end) in zip(labels, spans, strict=True)
            ],
        }
    return choice


def _logprobs(kind: str, one: dict[str, Any]) -> dict[str, Any]:
    if kind == "text":
        offsets = [0, *itertools.accumulate(map(len, one["tokens"]))][:-1]
        return {
            "tokens": one["tokens"],
            "token_logprobs": one["logprobs"],
            "text_offset": offsets,
            "top_logprobs": [None] * len(offsets),
        }
    # An id under both names: of vLLM's server, and of clients that were written for it before.
    names = (
        [{"token": token, "bytes": list(token.encode())} for token in one["tokens"]]
        if kind == "chat"
        else [{"token": f"token_id:{id}", "token_id": id} for id in one["ids"]]
    )
    return {
        "content": [
            {**name, "logprob": value, "top_logprobs": []}
            for name, value in zip(names, one["logprobs"], strict=True)
        ]
    }


def events(call: Call, whole: dict[str, Any]) -> Iterator[str]:
    """The events of a stream: each choice in one piece, then its end."""
    usage, choices = whole.pop("usage"), whole.pop("choices")
    whole["object"] = whole["object"].replace("chat.completion", "chat.completion.chunk")
    records = []
    for choice in choices:
        end = {
            "finish_reason": choice.pop("finish_reason"),
            "stop_reason": choice.pop("stop_reason"),
        }
        last: dict[str, Any] = {"index": choice["index"], "logprobs": None, "text": "", **end}
        if message := choice.pop("message", None):
            calls = [
                {"index": number, **made}
                for number, made in enumerate(message.pop("tool_calls", ()))
            ]
            choice["delta"] = message | ({"tool_calls": calls} if calls else {})
            last["delta"] = {}
        records += [{"choices": [piece]} for piece in ({**choice, "finish_reason": None}, last)]
    for record in [*records, *([{"choices": [], "usage": usage}] if call.usage else [])]:
        yield f"data: {json.dumps(whole | record, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"
