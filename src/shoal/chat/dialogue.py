"""Turns dialogues into streams of tokens to learn from: which tokens are the assistant's, and in
which context each of its turns was said.

    messages -> for each turn of the assistant: the text before it, as a model is asked, and the
                text with it
             -> streams, each growing while the template only adds to it -> tokens, a mask

A turn is learned in the context in which a model samples it. If a template rewrites earlier turns
for a later one (Qwen3 leaves out their reasoning), the later turn begins a new stream, and each
turn is still learned once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.chat.template import GENERATION
from shoal.chat.tokenizer import Tokenizer
from shoal.records import Messages, ShoalError

ASSISTANT = "assistant"


@dataclass(frozen=True)
class Stream:
    """A prompt and the tokens that follow it, `5<|im_end|>...7<|im_end|>`; those with True in
    `loss_mask` are learned."""

    prompt_ids: np.ndarray  # int32[Tp], one or more
    token_ids: np.ndarray  # int32[T], up to the last one that is learned
    loss_mask: np.ndarray  # bool[T]

    @classmethod
    def of(cls, ids: np.ndarray, mask: np.ndarray) -> Stream:
        """Returns the stream of ids[T], of which those with True in mask[T] are learned. The first
        token cannot be learned, as nothing comes before it."""
        learned = np.flatnonzero(mask[1:]) + 1
        first = learned[0]
        last = learned[-1]
        return cls(ids[:first], ids[first : last + 1], mask[first : last + 1])


@dataclass
class _Text:
    """A rendered dialogue, and the spans (from, to) of its characters that are learned."""

    text: str
    spans: list[tuple[int, int]]
    is_marked: bool  # True if the template's own marks say what is learned


def streams_of(
    tokenizer: Tokenizer,
    messages: Messages,
    tools: Sequence[dict[str, Any]] | None = None,
    first: int = 0,
) -> list[Stream]:
    """Returns the streams of a dialogue in which the assistant's messages from number `first` on
    are learned. ShoalError if there is no such message, or if the template does not begin one where
    it asks a model for it."""
    texts: list[_Text] = []
    for number, message in enumerate(messages):
        if number < first or message["role"] != ASSISTANT:
            continue
        if number == 0:
            raise ShoalError(
                f"message {number} is the assistant's, and there is none before it to answer"
            )
        if messages[number - 1]["role"] == ASSISTANT:
            raise ShoalError(
                f"message {number} is the assistant's, and so is the one before it: join the two"
            )
        asked = tokenizer.render(messages[:number], tools=tools)
        with_marks = tokenizer.render(messages[: number + 1], whole=True, tools=tools, marked=True)
        text, marked = _without_marks(with_marks)
        if not text.startswith(asked):
            raise ShoalError(
                f"the chat template does not write message {number} where it asks a model for it "
                f"(behind {asked[-40:]!r}): give another with model.template",
                "model.template",
            )
        spans: list[tuple[int, int]] = []
        if texts and asked.startswith(texts[-1].text):
            # The template only added to the last text: one stream holds both turns.
            spans = texts.pop().spans
        if marked:
            for start, stop in marked:
                if stop > len(asked):
                    spans.append((max(start, len(asked)), stop))
        else:
            spans.append((len(asked), len(text)))
        texts.append(_Text(text, spans, bool(marked)))
    if not texts:
        raise ShoalError("there is no message of the assistant to learn from")
    return [_stream(tokenizer, text) for text in texts]


def unwritten(
    tokenizer: Tokenizer, messages: Messages, tools: Sequence[dict[str, Any]] | None = None
) -> list[str]:
    """Returns what a dialogue has and the chat template does not write, found by rendering the
    dialogue without it: `tools`, keys of messages besides role and content, the contents of a
    role's messages, and those of messages with tool calls.

    >>> unwritten(tokenizer_of_plain_chatml, messages, tools)
    ['tools', 'tool_calls']
    """
    whole = _rendering(tokenizer, messages, tools)

    def is_written(others: Messages, their_tools: Sequence[dict[str, Any]] | None) -> bool:
        """True if the template writes what `others` or `their_tools` leave out."""
        try:
            if _rendering(tokenizer, others, their_tools) != whole:
                return True
            # A template may write something in the last turns alone, as Qwen3 does reasoning.
            for number, message in enumerate(messages[:-1]):
                if message["role"] == ASSISTANT:
                    part = _rendering(tokenizer, messages[: number + 1], tools)
                    if _rendering(tokenizer, others[: number + 1], their_tools) != part:
                        return True
        except ShoalError:  # the template fails without it, so it reads it
            return True
        return False

    names = []
    if tools and not is_written(messages, None):
        names.append("tools")
    for key in _keys_of(messages):
        others = []
        for message in messages:
            others.append({name: value for name, value in message.items() if name != key})
        if not is_written(others, tools):
            names.append(key)
    for role in dict.fromkeys(message["role"] for message in messages):
        others = []
        for message in messages:
            others.append({**message, "content": ""} if message["role"] == role else message)
        if role != ASSISTANT and others != list(messages) and not is_written(others, tools):
            names.append(f"what role {role} says")
    # Llama 3's template writes only the calls of a message with tool calls, not its text.
    others = []
    has_text_beside_calls = False
    for message in messages:
        if message.get("tool_calls"):
            has_text_beside_calls |= bool(message.get("content"))
            message = {**message, "content": ""}
        others.append(message)
    if has_text_beside_calls and "tool_calls" not in names and not is_written(others, tools):
        names.append(f"what role {ASSISTANT} says in a message with tool_calls")
    return names


def _keys_of(messages: Messages) -> list[str]:
    """Returns the keys of messages, besides role and content, that have a value in some message and
    that a template should write."""
    keys = []
    for key in dict.fromkeys(key for message in messages for key in message):
        if key in ("role", "content"):
            continue
        for message in messages:
            if message.get(key) and key not in _LINKS.get(message["role"], ()):
                keys.append(key)
                break
    return keys


_LINKS = {"tool": ("tool_call_id", "name")}
"""Role -> keys that only say which call a message answers: the order says it too, and most
templates leave them out."""


def _rendering(
    tokenizer: Tokenizer, messages: Messages, tools: Sequence[dict[str, Any]] | None
) -> str:
    """Returns the text of a dialogue: the whole dialogue if the assistant has the last word, else
    up to where it answers."""
    return tokenizer.render(messages, whole=messages[-1]["role"] == ASSISTANT, tools=tools)


def text_stream(tokenizer: Tokenizer, prompt: str, completion: str) -> Stream:
    """Returns the stream of a prompt and a completion of plain text, with an end-of-sequence token
    at the end. ShoalError if either is empty."""
    asked = tokenizer.encode_prompt(prompt)
    ids = tokenizer.encode_prompt(prompt + completion)
    # If a token spans the border, the prompt that the model is asked with differs from the one in
    # these ids, so prompt and completion are encoded separately.
    if not np.array_equal(ids[: len(asked)], asked):
        completion_ids, _ = tokenizer.encode_spans(completion, [])
        ids = np.concatenate([asked, completion_ids])
    ids = np.append(ids, np.asarray(tokenizer.eos_ids[:1], np.int32))
    if not 0 < len(asked) < len(ids):
        raise ShoalError("the prompt is empty, or nothing follows it")
    return Stream.of(ids, np.arange(len(ids)) >= len(asked))


def _stream(tokenizer: Tokenizer, text: _Text) -> Stream:
    """Returns the stream of a text: its tokens, and which of them are learned. Of a span that the
    template marked, all tokens are; of any other span those up to its last end-of-sequence token,
    without what the template writes behind it."""
    ids, token_spans = tokenizer.encode_spans(text.text, text.spans)
    mask = np.zeros(len(ids), bool)
    for start, stop in token_spans:
        if not text.is_marked:
            (ends,) = np.nonzero(np.isin(ids[start:stop], tokenizer.eos_ids))
            if ends.size:
                stop = start + ends[-1] + 1
        mask[start:stop] = True
    if not tokenizer.has_template:  # without a template nothing marks the end of a turn
        ids = np.append(ids, np.asarray(tokenizer.eos_ids[:1], np.int32))
        mask = np.append(mask, True)
    if not mask[1:].any():
        raise ShoalError(
            "the chat template leaves out what the assistant says: give another with "
            "model.template",
            "model.template",
        )
    return Stream.of(ids, mask)


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Returns a text without the marks of GENERATION, and the span in it that each pair of marks
    enclosed."""
    begin, end = GENERATION.values()
    plain, *parts = text.split(begin)
    spans = []
    for part in parts:
        inside, _, rest = part.partition(end)
        spans.append((len(plain), len(plain) + len(inside)))
        plain += inside + rest
    return plain, spans
