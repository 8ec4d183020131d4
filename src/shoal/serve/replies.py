"""The API's records of completions, whole or as the events of a stream."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.serve.calls import Call, Sampled, Sampler, turn_format
from shoal.types import Completion, StopReason

FINISHED = {StopReason.LENGTH: "length", StopReason.CANCELLED: "abort"}
"""Why a completion has ended, as vLLM has it; all others are `stop`."""
OBJECTS = {"chat": "chat.completion", "text": "text_completion", "tokens": "generate"}


def reply(kind: str, call: Call, sampled: Sampled, sampler: Sampler) -> dict[str, Any]:
    """The record of a call's completions."""
    sizes = len(sampled.prompt_ids), sum(map(len, sampled.completions))
    choices = [_choice(kind, call, number, one, sampler) for number, one in enumerate(sampled.completions)]
    prompt = {"prompt_token_ids": sampled.prompt_ids.tolist()} if call.ids else {}
    if kind == "text":  # vLLM has them here by choice
        choices, prompt = [one | prompt for one in choices], {}
    name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
    return {"id": name, "request_id": name, "object": OBJECTS[kind], "created": int(time.time()),
            "model": sampler.name, "choices": choices, **prompt,
            "usage": {"prompt_tokens": sizes[0], "completion_tokens": sizes[1], "total_tokens": sum(sizes)}}


def _choice(kind: str, call: Call, number: int, one: Completion, sampler: Sampler) -> dict[str, Any]:
    ids, stops, decode = one.token_ids.tolist(), call.params.stop, sampler.tokenizer.decode
    choice: dict[str, Any] = {"index": number, "finish_reason": FINISHED.get(one.stop_reason, "stop"),
                              "logprobs": _logprobs(kind, call, one, decode) if call.logprobs else None}
    text, choice["stop_reason"] = cut(decode(ids), stops) if one.stop_reason is StopReason.STOP else (None, None)
    if kind == "text":
        choice["text"] = decode(ids) if text is None else text
    elif kind == "chat":
        message: dict[str, Any] = {"role": "assistant", "content": decode(ids) if text is None else text}
        if call.tools and text is None:
            message, _ = turn_format(sampler.tokenizer, call.tools).read(ids)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {
                    "name": made["function"]["name"],
                    "arguments": json.dumps(made["function"]["arguments"], ensure_ascii=False)}} for made in calls]
            choice["finish_reason"] = "tool_calls" if choice["finish_reason"] == "stop" else choice["finish_reason"]
        choice["message"] = message
    if call.ids:
        choice |= {"token_ids": ids, "weight_versions": spans(one, sampler)}
    return choice


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """A text up to the first stop string in it, and that."""
    found = min(((text.find(stop), stop) for stop in stops if stop in text), default=(len(text), None))
    return text[:found[0]], found[1]


def spans(one: Completion, sampler: Sampler) -> list[dict[str, Any]]:
    """Which weights the tokens [start, end) were sampled from."""
    found, start = [], 0
    for version, tokens in itertools.groupby(one.versions.tolist()):
        found.append({"version": sampler.label(version), "start": start, "end": (start := start + len([*tokens]))})
    return found


def _logprobs(kind: str, call: Call, one: Completion, decode: Any) -> dict[str, Any]:
    ids, values = one.token_ids.tolist(), [float(value) for value in one.logprobs]
    # Under both names: of vLLM's server, and of clients that were written for it before.
    by_id = [f"token_id:{id}" for id in ids]
    if kind == "tokens":
        return {"content": [{"token_id": id, "token": token, "logprob": value, "top_logprobs": []}
                            for id, token, value in zip(ids, by_id, values, strict=True)]}
    tokens = by_id if call.ids_as_tokens else [decode([id], skip_special_tokens=False) for id in ids]
    if kind == "chat":
        return {"content": [{"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                            for token, value in zip(tokens, values, strict=True)]}
    offsets = [0, *itertools.accumulate(map(len, tokens))][:-1]
    return {"tokens": tokens, "token_logprobs": values, "text_offset": offsets, "top_logprobs": [None] * len(ids)}


def events(kind: str, call: Call, whole: dict[str, Any]) -> Iterator[str]:
    """The events of a stream: each choice in one piece, then its end."""
    usage, choices = whole.pop("usage"), whole.pop("choices")
    whole["object"] += ".chunk" if kind == "chat" else ""
    for choice in choices:
        end = {name: choice.pop(name) for name in ("finish_reason", "stop_reason") if name in choice}
        if kind == "chat":
            choice["delta"] = choice.pop("message")
            for number, made in enumerate(choice["delta"].get("tool_calls", ())):
                made["index"] = number
        empty = {"chat": {"delta": {}}, "text": {"text": ""}, "tokens": {"token_ids": []}}[kind]
        for piece in ({**choice, "finish_reason": None}, {"index": choice["index"], **empty, "logprobs": None, **end}):
            yield _event({**whole, "choices": [piece]})
    if call.usage:
        yield _event({**whole, "choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(record: dict[str, Any]) -> str:
    return f"data: {json.dumps(record, ensure_ascii=False)}\n\n"
