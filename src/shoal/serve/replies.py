"""The API's records of completions, whole or as the events of a stream."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from shoal.serve.calls import Call, Sampled
from shoal.types import StopReason

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
