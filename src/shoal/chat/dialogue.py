"""Dialogues as streams of tokens to learn from: which tokens are the assistant's, and what each
turn was answered to.

    messages -> for each turn of the assistant: the text before it, as a model is asked, and the
                text with it
             -> streams, each growing while the template only adds to it -> tokens, a mask

A turn is learned in the context in which a model samples it. Where a template rewrites earlier
turns for a later one (Qwen3 leaves out their reasoning), the later turn begins a stream of its own,
and each turn is still learned once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.chat.tokenizer import GENERATION, Tokenizer
from shoal.records import Messages, ShoalError

ASSISTANT = "assistant"


@dataclass(frozen=True)
class Stream:
    """A prompt and what follows it, `5<|im_end|>...7<|im_end|>`; where `loss_mask` is True it is
    learned."""

    prompt_ids: np.ndarray  # int32[Tp], one or more
    token_ids: np.ndarray  # int32[T], up to the last that is learned
    loss_mask: np.ndarray  # bool[T]

    @classmethod
    def of(cls, ids: np.ndarray, mask: np.ndarray) -> Stream:
        """`mask[T]`: the tokens of ids[T] that are learned; the first cannot be, as nothing comes
        before it."""
        first, last = np.flatnonzero(mask[1:])[[0, -1]] + 1
        return cls(ids[:first], ids[first : last + 1], mask[first : last + 1])


def streams_of(
    tokenizer: Tokenizer,
    messages: Messages,
    tools: Sequence[dict[str, Any]] | None = None,
    first: int = 0,
) -> list[Stream]:
    """The streams of a dialogue, of which the assistant's messages from number `first` on are
    learned. ShoalError without such a message, and where the template does not begin it as it asks
    a model to."""
    found: list[
        tuple[str, list[tuple[int, int]], bool]
    ] = []  # a text, what is learned of it, whether that is marked
    for at, message in enumerate(messages):
        if at < first or message["role"] != ASSISTANT:
            continue
        if at == 0 or messages[at - 1]["role"] == ASSISTANT:
            raise ShoalError(
                f"message {at} is the assistant's, and "
                + (
                    "there is none before it to answer"
                    if at == 0
                    else "so is the one before it: join the two"
                )
            )
        asked = tokenizer.render(messages[:at], tools=tools)
        text, marked = _without_marks(
            tokenizer.render(messages[: at + 1], whole=True, tools=tools, marked=True)
        )
        if not text.startswith(asked):
            raise ShoalError(
                f"the chat template does not write message {at} where it asks a model for it "
                f"(behind {asked[-40:]!r}): give another with model.template",
                "model.template",
            )
        own = (
            [(max(start, len(asked)), stop) for start, stop in marked if stop > len(asked)]
            if marked
            else [(len(asked), len(text))]
        )
        before = found.pop()[1] if found and asked.startswith(found[-1][0]) else []
        found.append((text, [*before, *own], bool(marked)))
    if not found:
        raise ShoalError("there is no message of the assistant to learn from")
    return [_stream(tokenizer, *one) for one in found]


def unwritten(
    tokenizer: Tokenizer, messages: Messages, tools: Sequence[dict[str, Any]] | None = None
) -> list[str]:
    """What a dialogue holds and the chat template does not write, found by rendering it without:
    `tools`, keys of messages besides role and content, the contents of a role's messages, and those
    of messages with tool calls.

    >>> unwritten(tokenizer_of_plain_chatml, messages, tools)
    ['tools', 'tool_calls']
    """
    whole = _rendering(tokenizer, messages, tools)
    found = []

    def check(name: str, others: Messages, their_tools: Sequence[dict[str, Any]] | None) -> None:
        try:
            if _rendering(tokenizer, others, their_tools) != whole:
                return
            # A template may write something in the last turns alone, as Qwen3 does reasoning.
            for at, message in enumerate(messages[:-1]):
                if message["role"] == ASSISTANT:
                    part = _rendering(tokenizer, messages[: at + 1], tools)
                    if _rendering(tokenizer, others[: at + 1], their_tools) != part:
                        return
        except ShoalError:  # the template does not do without it
            return
        found.append(name)

    if tools:
        check("tools", messages, None)
    for key in dict.fromkeys(key for message in messages for key in message):
        holders = [
            message
            for message in messages
            if message.get(key) and key not in _LINKS.get(message["role"], ())
        ]
        if key in ("role", "content") or not holders:
            continue
        check(
            key,
            [
                {name: value for name, value in message.items() if name != key}
                for message in messages
            ],
            tools,
        )
    for role in dict.fromkeys(message["role"] for message in messages):
        others = [
            {**message, "content": ""} if message["role"] == role else message
            for message in messages
        ]
        if role != ASSISTANT and others != list(messages):
            check(f"what role {role} says", others, tools)
    # Llama 3's template writes of a message with calls the calls alone.
    others = [
        {**message, "content": ""} if message.get("tool_calls") else message for message in messages
    ]
    has_text = any(message.get("content") and message.get("tool_calls") for message in messages)
    if has_text and "tool_calls" not in found:
        check(f"what role {ASSISTANT} says in a message with tool_calls", others, tools)
    return found


_LINKS = {"tool": ("tool_call_id", "name")}
"""Role -> keys that only say which call a message answers: the order says it too, and most
templates leave them out."""


def _rendering(
    tokenizer: Tokenizer, messages: Messages, tools: Sequence[dict[str, Any]] | None
) -> str:
    """The text of a dialogue: whole where the assistant has the last word, else up to where it
    answers."""
    return tokenizer.render(messages, whole=messages[-1]["role"] == ASSISTANT, tools=tools)


def text_stream(tokenizer: Tokenizer, prompt: str, completion: str) -> Stream:
    """The stream of a prompt and a completion of plain text, which an end-of-sequence token
    ends."""
    asked, ids = tokenizer.encode_prompt(prompt), tokenizer.encode_prompt(prompt + completion)
    # Where a token reaches over the border, the model would be asked with another prompt than the
    # one it learned.
    if not np.array_equal(ids[: len(asked)], asked):
        ids = np.concatenate([asked, tokenizer.encode_spans(completion, [])[0]])
    ids = np.append(ids, np.asarray(tokenizer.eos_ids[:1], np.int32))
    if not 0 < len(asked) < len(ids):
        raise ShoalError("the prompt is empty, or nothing follows it")
    return Stream.of(ids, np.arange(len(ids)) >= len(asked))


def _stream(
    tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]], exact: bool
) -> Stream:
    """`exact`: the spans are just what is learned; else each ends with its last end-of-sequence
    token, without what a template writes behind that."""
    ids, places = tokenizer.encode_spans(text, spans)
    mask = np.zeros(len(ids), bool)
    for start, stop in places:
        ends = np.flatnonzero(np.isin(ids[start:stop], tokenizer.eos_ids))
        mask[start : stop if exact or not ends.size else start + ends[-1] + 1] = True
    if not tokenizer.has_template:  # whose lines end with nothing
        ids, mask = (
            np.append(ids, np.asarray(tokenizer.eos_ids[:1], np.int32)),
            np.append(mask, True),
        )
    if not mask[1:].any():
        raise ShoalError(
            "the chat template leaves out what the assistant says: give another with "
            "model.template",
            "model.template",
        )
    return Stream.of(ids, mask)


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and from where to where in it each pair of them stood."""
    begin, end = GENERATION.values()
    (plain, *parts), spans = text.split(begin), []
    for part in parts:
        inside, _, rest = part.partition(end)
        spans.append((len(plain), len(plain) + len(inside)))
        plain += inside + rest
    return plain, spans
