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
        """Splits ids[T] into a prompt, up to the first token with True in mask[T], and the tokens
        from there to the last one with True. True at the first token is ignored: nothing comes
        before it that could predict it. The mask must have True at a later one."""
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
    """Returns the streams of a dialogue from which the assistant's messages with index `first` or
    more (from 0) are learned: one stream if the template only adds to its text from turn to turn,
    else a new one after each turn that the template rewrites. Each of these messages is learned in
    one stream. Earlier messages and those of other roles are context. Of a template that marks the
    assistant's text (`generation` blocks), only what it marks is learned.

    ShoalError if there is no such message, if one follows another message of the assistant or
    comes first, if the template raises, if it writes one in another place than where it asks a
    model for it, or if no token of a stream is learned. `tools`: schemas that the template shows.
    """
    texts: list[_Text] = []
    for index, message in enumerate(messages):
        if index < first or message["role"] != ASSISTANT:
            continue
        if index == 0:
            raise ShoalError(
                f"message {index} is the assistant's, and there is none before it to answer"
            )
        if messages[index - 1]["role"] == ASSISTANT:
            raise ShoalError(
                f"message {index} is the assistant's, and so is the one before it: join the two"
            )
        prompt_text = tokenizer.render(messages[:index], tools=tools)
        turn = _turn_text(tokenizer, messages[: index + 1], tools, prompt_text)
        if turn is None:
            # The template rewrites what is before a turn because of that turn: gpt-oss's leaves out
            # the thoughts of calls once an answer follows, Mistral's the system's words. The turn
            # itself looks as it does behind any question.
            question = {"role": "user", "content": "What next?"}
            short_prompt = tokenizer.render([question], tools=tools)
            turn = _turn_text(tokenizer, [question, message], tools, short_prompt)
        if turn is None:
            raise ShoalError(
                f"the chat template does not write message {index} where it asks a model for it "
                f"(after {prompt_text[-40:]!r}): give another with model.template",
                "model.template",
            )
        turn_text, marked = turn
        text = prompt_text + turn_text
        spans: list[tuple[int, int]] = []
        if texts and prompt_text.startswith(texts[-1].text):
            # The template only added to the last text: one stream holds both turns.
            spans = texts.pop().spans
        if marked is None:
            spans.append((len(prompt_text), len(text)))
        else:
            for start, stop in marked:
                spans.append((len(prompt_text) + start, len(prompt_text) + stop))
        texts.append(_Text(text, spans, marked is not None))
    if not texts:
        raise ShoalError("there is no message of the assistant to learn from")
    return [_stream(tokenizer, text) for text in texts]


def _turn_text(
    tokenizer: Tokenizer,
    messages: Messages,
    tools: Sequence[dict[str, Any]] | None,
    prompt_text: str,
) -> tuple[str, list[tuple[int, int]] | None] | None:
    """Returns (the text of the last message's turn with its end, the spans of its characters that
    the template marks, or None if the template marks nothing); None if the template does not write
    the turn behind `prompt_text`, the text with which a model is asked for it. ShoalError if the
    template raises."""
    with_marks = tokenizer.render(messages, finished=True, tools=tools, marked=True)
    text, marked = _without_marks(with_marks)
    if not text.startswith(prompt_text):
        return None
    begin = len(prompt_text)
    spans = []
    for start, stop in marked:
        if stop > begin:  # the others are in earlier turns
            spans.append((max(start, begin) - begin, stop - begin))
    return text[begin:], spans if marked else None


def unwritten(
    tokenizer: Tokenizer, messages: Messages, tools: Sequence[dict[str, Any]] | None = None
) -> list[str]:
    """Returns the names of what a dialogue has and the chat template does not write: `tools`, keys
    of messages such as `reasoning_content`, `what role tool says`, and the text of messages with
    tool calls; [] if it writes everything. Each is found by rendering the dialogue without it: an
    equal text shows that the template does not read it. If it fails without a thing, it reads that
    thing. ShoalError if it raises for the whole dialogue. The contents of the assistant's messages
    without tool calls are not tried.

    >>> unwritten(tokenizer_of_plain_chatml, messages, tools)
    ['tools', 'tool_calls']
    """
    full_text = _rendering(tokenizer, messages, tools)

    def is_written(reduced: Messages, reduced_tools: Sequence[dict[str, Any]] | None) -> bool:
        """True if `messages` with `tools` and `reduced` with `reduced_tools`, the same dialogue
        without one thing, are rendered differently: then the template writes that thing."""
        try:
            if _rendering(tokenizer, reduced, reduced_tools) != full_text:
                return True
            # A template may write something in the last turns alone, as Qwen3 does reasoning, or
            # only while the last message is a user's, as Mistral the system's words.
            for number, message in enumerate(messages):
                if message["role"] != ASSISTANT:
                    continue
                for size in range(max(1, number), number + 2):  # without that turn, and with it
                    text_so_far = _rendering(tokenizer, messages[:size], tools)
                    if _rendering(tokenizer, reduced[:size], reduced_tools) != text_so_far:
                        return True
        except ShoalError:  # the template fails without it, so it reads it
            return True
        return False

    names = []
    if tools and not is_written(messages, None):
        names.append("tools")
    # Without one key of all messages.
    for key in _keys_of(messages):
        reduced = []
        for message in messages:
            reduced.append({name: value for name, value in message.items() if name != key})
        if not is_written(reduced, tools):
            names.append(key)
    # Without the contents of all messages of one role.
    for role in dict.fromkeys(message["role"] for message in messages):
        reduced = []
        for message in messages:
            reduced.append({**message, "content": ""} if message["role"] == role else message)
        if role != ASSISTANT and reduced != list(messages) and not is_written(reduced, tools):
            names.append(f"what role {role} says")
    # gpt-oss's template writes only the first call of a message.
    reduced = []
    for message in messages:
        calls = message.get("tool_calls") or []
        reduced.append({**message, "tool_calls": calls[:1]} if len(calls) > 1 else message)
    if "tool_calls" not in names and reduced != list(messages) and not is_written(reduced, tools):
        names.append("tool calls after the first of a message")
    # Llama 3's template writes only the calls of a message with tool calls, not its text.
    reduced = []
    has_text_beside_calls = False
    for message in messages:
        if message.get("tool_calls"):
            has_text_beside_calls |= bool(message.get("content"))
            message = {**message, "content": ""}
        reduced.append(message)
    if has_text_beside_calls and "tool_calls" not in names and not is_written(reduced, tools):
        names.append(f"what role {ASSISTANT} says in a message with tool_calls")
    return names


def _keys_of(messages: Messages) -> list[str]:
    """Returns the keys that have a value in some message and that a template should write, in the
    order of their first use: all but role, content and the keys in _LINKS."""
    has_value: dict[str, bool] = {}  # key -> True if some message has a value that counts
    for message in messages:
        links = _LINKS.get(message["role"], ())
        for key, value in message.items():
            counts = bool(value) and key not in links
            has_value[key] = has_value.get(key, False) or counts
    return [key for key in has_value if has_value[key] and key not in ("role", "content")]


_LINKS = {"tool": ("tool_call_id", "name")}
"""Role -> keys that only say which call a message answers: the order says it too, and most
templates leave them out."""


def _rendering(
    tokenizer: Tokenizer, messages: Messages, tools: Sequence[dict[str, Any]] | None
) -> str:
    """Returns the text that the chat template writes for a dialogue of at least one message: with
    the end of the last turn if its last message is the assistant's, else up to where the
    assistant's answer begins. ShoalError if the template raises."""
    return tokenizer.render(messages, finished=messages[-1]["role"] == ASSISTANT, tools=tools)


def text_stream(tokenizer: Tokenizer, prompt: str, completion: str) -> Stream:
    """Returns the stream of a prompt and a completion of plain text, without the chat template. The
    whole completion is learned, with the model's first end-of-sequence token at its end if it has
    one. The two are tokenized as one text, or separately if a token would span their border.
    ShoalError if the prompt has no token, or if no token follows it."""
    prompt_ids = tokenizer.encode_prompt(prompt)
    ids = tokenizer.encode_prompt(prompt + completion)
    # If a token spans the border, the prompt that the model is asked with differs from the one in
    # these ids, so prompt and completion are encoded separately.
    if not np.array_equal(ids[: len(prompt_ids)], prompt_ids):
        completion_ids, _ = tokenizer.encode_spans(completion, [])
        ids = np.concatenate([prompt_ids, completion_ids])
    ids = np.append(ids, np.asarray(tokenizer.eos_ids[:1], np.int32))
    if not 0 < len(prompt_ids) < len(ids):
        raise ShoalError("the prompt is empty, or nothing follows it")
    return Stream.of(ids, np.arange(len(ids)) >= len(prompt_ids))


def _stream(tokenizer: Tokenizer, text: _Text) -> Stream:
    """Tokenizes a rendered dialogue and returns its stream. Of a span that the template marked, all
    tokens are learned; of any other span those up to its last end-of-sequence token, because the
    model does not sample what the template writes after it (a newline); all of them if the span has
    none. Without a chat template an end-of-sequence token is appended, if the model has one; it is
    learned too.
    ShoalError if no token but the first is learned."""
    ids, token_spans = tokenizer.encode_spans(text.text, text.spans, split=not text.is_marked)
    mask = np.zeros(len(ids), bool)
    for start, stop in token_spans:
        if not text.is_marked:
            (ends,) = np.nonzero(np.isin(ids[start:stop], tokenizer.eos_ids))
            if ends.size:
                stop = start + ends[-1] + 1
        mask[start:stop] = True
    if not tokenizer.has_template:  # without a template nothing marks the end of a turn
        end = np.asarray(tokenizer.eos_ids[:1], np.int32)  # empty if the model has none
        ids = np.append(ids, end)
        mask = np.append(mask, np.ones(len(end), bool))
    if not mask[1:].any():
        raise ShoalError(
            "the chat template leaves out what the assistant says: give another with "
            "model.template",
            "model.template",
        )
    return Stream.of(ids, mask)


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Returns (a text without the marks of GENERATION, the spans (from, to) of its characters that
    were between two marks). A mark without an end reaches to the next one or the end of the
    text."""
    begin, end = GENERATION.values()
    parts = text.split(begin)
    plain = parts[0]
    spans = []
    for part in parts[1:]:
        inside, _, rest = part.partition(end)
        spans.append((len(plain), len(plain) + len(inside)))
        plain += inside + rest
    return plain, spans
