"""Reads requests by OpenAI's names of settings, and vLLM's: what is unknown or has no effect is
refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from shoal.model.tokenizer import Tokenizer
from shoal.model.turns import TurnFormat
from shoal.text import exact, shorten
from shoal.types import Completion, SamplingParams, ShoalError


class Within(NamedTuple):
    """The shape of a number from `low` to `high`, of their type."""

    low: float
    high: float


TOKEN_CHARACTERS = 128
"""Characters of a token, at most: a text with more of them in the mean fits no prompt, and is not
encoded."""
MOST_DEPTH = 200
"""Of lists and objects inside one another in a body."""
PIECE, BORDER, LIKELY_CHARACTERS = 1 << 14, 16, 8
"""Characters that are counted at once of a text that has more than `LIKELY_CHARACTERS` a token; the
tokens by which cutting it may change the count, at each border."""
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


def described(
    one: Completion, tools: Sequence[Any], tokenizer: Tokenizer, named: bool, start: int = 0
) -> dict[str, Any]:
    """What an answer says of a completion's tokens from `start` on, in plain data; `named`: the
    text of each."""
    ids = one.token_ids[start:].tolist()
    message: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids)}
    return {
        "ids": ids,
        "logprobs": one.logprobs[start:].tolist(),
        "versions": one.versions[start:].tolist(),
        "stop_reason": one.stop_reason.value,
        "text": message["content"],
        "tokens": [tokenizer.decode([id], skip_special_tokens=False) for id in ids]
        if named
        else [],
        "message": turn_format(tokenizer, json.dumps(tools)).read(ids)[0] if tools else message,
    }


@lru_cache(64)
def turn_format(tokenizer: Tokenizer, tools: str) -> TurnFormat:
    """How turns with these tools, as JSON, look. ShoalError for a chat template without a place for
    them."""
    return TurnFormat(tokenizer, json.loads(tools))


def encode(prompt: Any, tools: Sequence[Any], tokenizer: Tokenizer, most: int) -> np.ndarray:
    """The token ids of a prompt, int32[T]. ShoalError for none, and for more than `most`: of a text
    that is much longer, no more is encoded than shows it."""
    if _is_token_ids(prompt):
        ids = np.array(prompt, np.int32)
    else:
        check_size(prompt, tools, most, "sampling.max_prompt_tokens")
        _check_count(prompt, tokenizer, most)
        form = turn_format(tokenizer, json.dumps(tools)) if tools else tokenizer
        ids = form.encode_prompt(prompt)
    if not 1 <= len(ids) <= most:
        raise _wrong_length(f"{len(ids)} tokens", f"1 to sampling.max_prompt_tokens={most}")
    return ids


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(id) is int for id in prompt)


def _wrong_length(length: str, wanted: str) -> ShoalError:
    return ShoalError(f'prompt="{length}": expected {wanted}', "prompt")


def check_size(prompt: Any, tools: Sequence[Any], most: int, key: str) -> None:
    """ShoalError for a prompt with its tools that has more characters than `most` tokens can
    have."""
    size = len(json.dumps([prompt, *tools], ensure_ascii=False))
    if size > TOKEN_CHARACTERS * most:
        raise _wrong_length(f"{size} characters", f"what fits the {most} tokens of {key}")


def _check_count(prompt: Any, tokenizer: Tokenizer, most: int) -> None:
    """ShoalError as soon as the pieces of a long prompt have more than `most` tokens: encoding
    takes some seconds and a gigabyte for each 4 million characters."""
    texts = (
        [prompt]
        if isinstance(prompt, str)
        else [str(message.get("content", "")) for message in prompt]
    )
    if sum(map(len, texts)) <= LIKELY_CHARACTERS * most:
        return
    count = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            count += len(tokenizer.encode(text[start : start + PIECE])) - BORDER
            if count > most:
                raise _wrong_length(
                    f"more than {most} tokens", f"1 to sampling.max_prompt_tokens={most}"
                )


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
