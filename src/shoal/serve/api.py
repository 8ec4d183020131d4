"""OpenAI's API, and vLLM's: reads the bodies of calls and builds the answers. A setting that is
unknown or has no effect is refused by name."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from shoal.records import SamplingParams, ShoalError, StopReason
from shoal.text import exact, shorten


class Within(NamedTuple):
    """The shape of a number from `low` to `high`; only integers fit if `low` is an integer."""

    low: float
    high: float


MOST_DEPTH = 200
"""Most levels of lists and objects inside one another in a body."""
MOST = 128
"""Most completions of a call; also most tools and most stop strings."""
MESSAGE = {
    "role": ("system", "developer", "user", "assistant", "tool"),
    "content?": (str, [{"type": ("text",), "text": str}]),
    "tool_calls?": [{"function": {"name": str, "arguments?": (str, dict)}}],
}
TOOL = {"function": {"name": str, "parameters?": {"properties?": {"*": dict}}}}
ONLY_AT = {
    "frequency_penalty": Within(0.0, 0.0),
    "presence_penalty": Within(0.0, 0.0),
    "repetition_penalty": Within(1.0, 1.0),
    "min_tokens": Within(0.0, 0.0),
    "prompt_logprobs": Within(0.0, 0.0),
    "top_logprobs": Within(0.0, 0.0),
    "best_of": Within(1, 1),
    "echo": (False,),
    "store": (False,),
    "ignore_eos": (False,),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "detokenize": (True,),
    "add_generation_prompt": (True,),
    "parallel_tool_calls": (True,),
    "response_format": {"type": ("text",)},
    "tool_choice": ("auto", "none"),
    "logit_bias": {"*": ()},
    "chat_template_kwargs": {"*": ()},
}
"""Settings for which only one value is supported: the value that they have by default."""
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
"""Settings that do not change what is sampled; accepted and ignored."""
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
"""Kind of call -> name and shape of its prompt."""
SHAPES: dict[str, Any] = {
    "n": Within(1, MOST),
    "stream": bool,
    "tools": [TOOL],
    "seed": Within(-(2**63), 2**63 - 1),
    "stop": (str, [str]),
    "stream_options": dict,
    "return_token_ids": bool,
    "logprobs": (False, True, 0, 1),
    "stop_token_ids": [int],
}
"""Setting of a call -> its shape; the shape of `max_tokens` depends on the sampler."""
SHAPES |= ONLY_AT | SAMPLING | dict.fromkeys(FREE, object) | dict(PROMPTS.values())


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
    usage: bool = False  # whether a stream ends with the numbers of tokens
    logprobs: bool = False
    ids: bool = False  # whether the answer has token ids, too


class Sampled(NamedTuple):
    """The answer to a call: the prompt's token ids, and what `completion_record` returns for each
    completion."""

    prompt_ids: list[int]
    choices: list[dict[str, Any]]


class Sampler(Protocol):
    """Something that answers calls: a sampler alone, or a rollout of a run. `max_tokens`: the most
    tokens that a call may ask for."""

    name: str
    params: SamplingParams
    max_tokens: int
    max_prompt_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]

    async def sample(self, call: Call) -> Sampled:
        """Samples and returns all completions of a call; cancelling it ends sampling. ShoalError if
        the call cannot be sampled."""
        ...

    def check(self) -> None:
        """Raises HostLost if nothing can be sampled any more; `sample` raises the same then."""


def parse(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a body. `body`: UTF-8, UTF-16 or UTF-32, as JSON allows. Half of a
    surrogate pair, which no tokenizer takes, becomes `?`. ShoalError if the body is not a JSON
    object, contains NaN or Infinity, or is nested more than MOST_DEPTH levels deep."""
    try:
        plain = json.dumps(json.loads(body), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"the body is not valid JSON: {error}") from None
    read = json.loads(plain.encode("utf-8", "replace"))
    require(isinstance(read, dict), "body", read, "an object")
    _check_depth(read)
    return read


def _check_depth(body: dict[str, Any]) -> None:
    """Raises ShoalError if lists and objects are nested more than MOST_DEPTH levels deep: writing
    them again takes more of Python's stack than reading."""
    level: list[Any] = [body]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for container in level:
            items = container.values() if isinstance(container, dict) else container
            for item in items:
                if isinstance(item, dict | list):
                    below.append(item)
        if not below:
            return
        level = below
    raise ShoalError(
        f"the body is not a valid request: more than {MOST_DEPTH} lists and objects inside one "
        "another"
    )


def read_call(kind: str, body: dict[str, Any], sampler: Sampler) -> Call:
    """Returns the call that the JSON object of a request asks for, with the defaults and limits of
    `sampler`. `kind`: "chat", "text" or "tokens". Settings that are null count as missing. `body`
    is changed: `sampling_params` is taken out, tools that lack parameters get empty ones, and the
    arguments of tool calls become objects. With `tool_choice` "none" the call has no tools. Of kind
    "tokens" the settings are in `sampling_params`, and log-probs and token ids are returned by
    default; of kind "text" a list of one prompt is that prompt. ShoalError, which names the
    setting, if one is unknown or wrong, or if there is no prompt."""
    if kind == "tokens":  # all settings but the prompt are in there
        nested = body.pop("sampling_params", {})
        require(has_shape(nested, dict), "sampling_params", nested, "an object")
        body = {"logprobs": 1, "return_token_ids": True} | body | nested
    settings = {name: value for name, value in body.items() if value is not None}
    prompt_name, _ = PROMPTS[kind]
    if kind == "text" and has_shape(settings.get("prompt"), [(str, list)]):
        if len(settings["prompt"]) == 1:
            settings["prompt"] = settings["prompt"][0]
    _check_shapes(kind, settings, sampler)
    prompt = settings[prompt_name]
    ids = prompt if has_shape(prompt, [int]) else []
    are_ids = all(0 <= id < sampler.vocab_size for id in ids)
    require(
        bool(prompt) and are_ids, prompt_name, prompt, f"some, of ids below {sampler.vocab_size}"
    )
    eos_ids = settings.get("stop_token_ids", [])
    require(
        set(eos_ids) <= set(sampler.eos_ids),
        "stop_token_ids",
        eos_ids,
        f"of the model's own, {sampler.eos_ids}",
    )
    stop = settings.get("stop", [])
    if isinstance(stop, str):
        stop = [stop]
    require(all(stop) and len(stop) <= MOST, "stop", stop, f"at most {MOST}, none of them empty")
    params = _read_params(settings, stop, sampler.params)
    tools = settings.get("tools", [])
    for tool in tools:
        require(bool(tool["function"]["name"]), "tools", tool, "a name of each")
        tool["function"].setdefault("parameters", {}).setdefault("properties", {})
    if settings.get("tool_choice") == "none":
        tools = ()
    logprobs = settings.get("logprobs", False)
    # 0 too: the log-prob of the sampled token alone
    has_logprobs = logprobs is not False
    if kind == "chat":  # in this kind `logprobs` is a yes or a no, so 0 means none
        has_logprobs = bool(logprobs)
        prompt = [_template_message(message) for message in prompt]
    return Call(
        kind=kind,
        prompt=prompt,
        # -1, as vLLM has it, and 0 both mean no top-k
        params=replace(params, top_k=max(0, params.top_k)),
        num_completions=settings.get("n", 1),
        seed=settings.get("seed"),
        tools=tools,
        stream=settings.get("stream", False),
        usage=settings.get("stream_options", {}).get("include_usage") is True,
        logprobs=has_logprobs,
        ids=settings.get("return_token_ids", False),
    )


def _check_shapes(kind: str, settings: dict[str, Any], sampler: Sampler) -> None:
    """Raises ShoalError if a setting is unknown for this kind of call or has the wrong shape, or if
    the prompt is missing; `settings` must have no null values. `kind`: "chat", "text" or "tokens".
    "max_tokens" has the sampler's limit; "max_completion_tokens" exists for chat alone."""
    prompt_name, _ = PROMPTS[kind]
    max_tokens = Within(1, sampler.max_tokens)
    shapes = SHAPES | {"max_tokens": max_tokens}
    if kind == "chat":
        shapes["max_completion_tokens"] = max_tokens
    for other_name, _ in PROMPTS.values():
        if other_name != prompt_name:
            del shapes[other_name]
    # None fits no prompt's shape, so a prompt that is missing is refused too
    for name, value in ({prompt_name: None} | settings).items():
        require(name in shapes, name, value, "nothing: this address has no such setting")
        require(has_shape(value, shapes[name]), name, value, shape_text(shapes[name]))


def _read_params(
    settings: dict[str, Any], stop: Sequence[str], default: SamplingParams
) -> SamplingParams:
    """Returns the sampling settings of a call: its own, else those of `default`. `stop`: its stop
    strings; if empty, those of `default` hold. `max_completion_tokens` goes before `max_tokens`."""
    numbers = {name: settings[name] for name in SAMPLING if name in settings}
    # Both names may be given: OpenAI's newer one wins, as in vLLM.
    max_tokens = settings.get("max_tokens", default.max_tokens)
    max_tokens = settings.get("max_completion_tokens", max_tokens)
    # a call cannot turn off the default's stop strings
    stop_strings = tuple(stop) or default.stop
    return replace(default, **numbers, max_tokens=max_tokens, stop=stop_strings)


def _template_message(given: dict[str, Any]) -> dict[str, Any]:
    """Returns a message of a request in the form that chat templates read: parts of text joined to
    one, the role `developer` as `system`, and the arguments of tool calls as objects in place of
    JSON texts. Fields that are null are left out. Tool calls are changed in `given` too. ShoalError
    if a JSON text of arguments is not an object."""
    message = {name: value for name, value in given.items() if value is not None}
    content = message.get("content", "")
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    message["content"] = content
    message["role"] = message["role"].replace("developer", "system")
    for call in message.get("tool_calls", ()):
        arguments = call["function"].get("arguments") or "{}"
        if isinstance(arguments, str):
            arguments = parse(arguments.encode())
        call["function"]["arguments"] = arguments
    return message


def has_shape(value: Any, shape: Any) -> bool:
    """True if a JSON value has a shape. A shape is a type, a number `Within`, (values or shapes to
    choose from), [shape of all items], or {name: shape}, where a name with ? may be missing and *
    stands for all names. Types must be the very same (true is no integer); `object` stands for any
    type. An object may have more names than its shape; null at a name with ? counts as missing."""
    if isinstance(shape, Within):
        return type(value) in (int, type(shape.low)) and shape.low <= value <= shape.high
    if isinstance(shape, tuple):
        return any(_is_choice(value, choice) for choice in shape)
    if isinstance(shape, list):
        (item_shape,) = shape
        if not isinstance(value, list):
            return False
        if isinstance(item_shape, type) and item_shape is not object:
            # A fast path: a prompt may have thousands of ids.
            return {type(item) for item in value} <= {item_shape}
        return all(has_shape(item, item_shape) for item in value)
    if not isinstance(shape, dict) or not isinstance(value, dict):
        return shape is object or type(value) is shape
    if "*" in shape:
        return all(has_shape(item, shape["*"]) for item in value.values())
    for name, item_shape in shape.items():
        item = value.get(name.rstrip("?"))
        if item is None and name.endswith("?"):
            continue
        if not has_shape(item, item_shape):
            return False
    return True


def _is_choice(value: Any, choice: Any) -> bool:
    """True if `value` has the shape `choice` (a type, list or object), or equals it, with the very
    same type. `choice`: one entry of a tuple in a shape."""
    if isinstance(choice, type | list | dict):
        return has_shape(value, choice)
    return value is choice or (type(value) is type(choice) and value == choice)


def shape_text(shape: Any) -> str:
    """Returns what a value of this shape would be, for errors: `an integer from 1 to 128`, or
    `false or true`; for other shapes, and tuples without a text, number or truth value, only that
    OpenAI's API says it."""
    if isinstance(shape, Within):
        number = "an integer" if isinstance(shape.low, int) else "a number"
        return f"{number} from {exact(shape.low)} to {shape.high}"
    values = []
    if isinstance(shape, tuple):
        for choice in shape:
            if isinstance(choice, str | int):
                values.append(json.dumps(choice))
    # of texts alone: content such as images is not supported
    return " or ".join(values) or "what OpenAI's API has there, of texts alone"


def require(holds: bool, name: str, value: Any, wanted: str) -> None:
    """Raises ShoalError, which names the setting `name` and its `value`, unless `holds`, and
    returns nothing otherwise; `wanted` says what was expected."""
    if not holds:
        raise ShoalError(f"{name}={shorten(json.dumps(value), 60)}: expected {wanted}", name)


FINISHED = {StopReason.LENGTH: "length", StopReason.CANCELLED: "abort"}
"""Why a completion has ended -> vLLM's name for it; all other reasons are `stop`."""


def reply(call: Call, sampled: Sampled, model: str) -> dict[str, Any]:
    """Returns the JSON reply to a call, as OpenAI's API has it: an id, the model's name, the
    completions as `choices`, numbered from 0, and the numbers of tokens as `usage`; with `call.ids`
    also the prompt's token ids, for kind "text" in each choice, too. `model`: the name to
    report."""
    num_prompt = len(sampled.prompt_ids)
    num_sampled = sum(len(described["ids"]) for described in sampled.choices)
    prompt: dict[str, Any] = {}
    if call.ids:
        prompt["prompt_token_ids"] = sampled.prompt_ids
    choices = []
    for index, described in enumerate(sampled.choices):
        choice = {"index": index} | _choice(call, described)
        if call.kind == "text":
            choice |= prompt
        choices.append(choice)
    id = f"cmpl-{uuid.uuid4().hex}"
    record = {
        "id": id,
        "request_id": id,
        "created": int(time.time()),
        "model": model,
        "object": "chat.completion" if call.kind == "chat" else "text_completion",
        "choices": choices,
    }
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
    return record | prompt | {"usage": usage}


def _choice(call: Call, described: dict[str, Any]) -> dict[str, Any]:
    """Returns one completion in the form of the API, without its index. `described`: the completion
    as `shoal.chat.turns.completion_record` returns it. If it ended at a stop string of the call,
    its text ends before the first of these, and its message has that text and no tool calls."""
    choice: dict[str, Any] = {
        "finish_reason": FINISHED.get(described["stop_reason"], "stop"),
        "stop_reason": None,
        "logprobs": None,
    }
    if call.logprobs:
        choice["logprobs"] = _logprobs(call.kind, described)
    text = described["text"]
    message = dict(described["message"])
    if described["stop_reason"] == StopReason.STOP:  # the text must not contain the stop string
        ends = [(text.find(stop), stop) for stop in call.params.stop if stop in text]
        # the first in the text; of two at the same place the one that sorts first
        length, choice["stop_reason"] = min(ends)
        text = text[:length]
        message = {"role": "assistant", "content": text}
    if call.kind == "text":
        choice["text"] = text
    elif call.kind == "chat":
        tool_calls = message.get("tool_calls")
        if tool_calls:
            message["tool_calls"] = [_tool_call(tool_call) for tool_call in tool_calls]
            # only an answer that ended regularly; one that was cut stays `length`
            choice["finish_reason"] = choice["finish_reason"].replace("stop", "tool_calls")
        choice["message"] = message
    if call.ids:
        choice["token_ids"] = described["ids"]
        choice["weight_versions"] = _version_spans(described["versions"])
    return choice


def _tool_call(tool_call: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool call in the form of the API, with a new id if the model gave it none."""
    function = dict(tool_call["function"])
    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    call_id = tool_call.get("id") or f"call_{uuid.uuid4().hex}"
    return {"id": call_id, "type": "function", "function": function}


def _version_spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the spans of successive tokens with the same version, in order; `end` is exclusive.

    >>> _version_spans(["a", "a", "b"])
    [{'version': 'a', 'start': 0, 'end': 2}, {'version': 'b', 'start': 2, 'end': 3}]
    """
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": position, "end": position})
        spans[-1]["end"] = position + 1
    return spans


def _logprobs(kind: str, described: dict[str, Any]) -> dict[str, Any]:
    """Returns a completion's log-probs in the form of the API: for `text` lists of tokens,
    log-probs and offsets (where each token begins, in characters); for `chat` and `tokens`
    {"content": an object for each token}, with its text and bytes, or with its id."""
    tokens = described["tokens"]
    if kind == "text":
        offsets = []
        length = 0
        for token in tokens:
            offsets.append(length)
            length += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": described["logprobs"],
            "text_offset": offsets,
            "top_logprobs": [None] * len(offsets),
        }
    names: list[dict[str, Any]] = []
    if kind == "chat":
        for token in tokens:
            names.append({"token": token, "bytes": list(token.encode())})
    else:
        # The id has two names: that of vLLM's server, and that of older clients.
        for id in described["ids"]:
            names.append({"token": f"token_id:{id}", "token_id": id})
    content = []
    for name, logprob in zip(names, described["logprobs"], strict=True):
        content.append(name | {"logprob": logprob, "top_logprobs": []})
    return {"content": content}


def events(call: Call, whole: dict[str, Any]) -> Iterator[str]:
    """Yields the server-sent events of a streamed reply. `whole`: the reply as `reply` returns it;
    side effects: `choices` and `usage` are taken out of it, and `object` of a chat becomes
    "chat.completion.chunk". Each completion comes in one piece, because it has been sampled
    already; then an event with its reason to finish. At the end come the numbers of tokens, if
    `call.usage`, and "data: [DONE]"."""
    usage = whole.pop("usage")
    choices = whole.pop("choices")
    whole["object"] = whole["object"].replace("chat.completion", "chat.completion.chunk")
    records: list[dict[str, Any]] = []
    for choice in choices:
        last: dict[str, Any] = {
            "index": choice["index"],
            "logprobs": None,
            "text": "",
            "finish_reason": choice.pop("finish_reason"),
            "stop_reason": choice.pop("stop_reason"),
        }
        message = choice.pop("message", None)
        if message:
            tool_calls = message.pop("tool_calls", ())
            if tool_calls:
                message["tool_calls"] = [
                    {"index": index} | tool_call for index, tool_call in enumerate(tool_calls)
                ]
            choice["delta"] = message
            last["delta"] = {}
        choice["finish_reason"] = None
        records.append({"choices": [choice]})
        records.append({"choices": [last]})
    if call.usage:
        records.append({"choices": [], "usage": usage})
    for record in records:
        # each event repeats what is left of `whole`: id, model and so on
        yield f"data: {json.dumps(whole | record, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"
