"""Turns of a dialogue in one model's tokens: prompts with tools, the tool calls of a turn, and the
tokens of the answers.

A rollout's tokens are only ever appended to. To get the tokens that a message adds, a short
conversation with a mark in the assistant's turn is rendered, and the text behind the mark is
encoded alone; earlier turns are never rendered or encoded again (docs/decisions/0046).
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, Union

import numpy as np

from shoal.chat.tokenizer import MARK, Tokenizer
from shoal.chat.tool_calls import CALL_FORMATS, CallReader, ToolCall
from shoal.records import Completion, Messages, Prompt, ShoalError

_CUT = "\ue0f4"
"""A private character that marks where a text is to be encoded in two pieces."""


_QUESTION = {"role": "user", "content": "What next?"}


_NO_PLACE = (
    "The chat template has no place for {}: choose a model that calls tools, or give another "
    "template with model.template."
)


class TurnFormat:
    """How turns look in one model's tokens; made once for a tokenizer and a set of tools.

    schemas      of the tools that may be called, as `schema` makes them; empty if an environment
                 answers in words
    call_format  a key of FORMATS, or template; auto: as the chat template writes calls
    special      False: a tool's or environment's text never becomes an added (special) token of the
                 tokenizer, whatever it spells
    notes        what the chat template would change in earlier turns, a line each

    ShoalError if the template shows no tools or no answers of tools, or if nothing ends a turn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        schemas: Sequence[dict[str, Any]],
        call_format: str = "auto",
        special: bool = True,
    ):
        """Renders short dialogues to find how the chat template writes turns. The arguments and the
        errors are described at the class: `schemas` is empty without tools; with `special`
        False, texts of tools are encoded without added tokens. `call_format` is not read without
        tools."""
        self._tokenizer = tokenizer
        self._schemas = list(schemas)
        self._reader: CallReader | None = None
        # Does a turn have calls -> the id that ends it.
        self._ends: dict[bool, int] = {}
        # Finds spelled-out added tokens; None: they may become tokens.
        self._added = None if special else _added_tokens(tokenizer)
        names = [tool["function"]["name"] for tool in schemas]
        prompt = self._render([_QUESTION])
        answer: dict[str, Any] = dict(_QUESTION)
        if names:
            shows_tools = prompt != tokenizer.render([_QUESTION])
            for name in names:
                shows_tools = shows_tools and name in prompt
            if not shows_tools:
                raise ShoalError(_NO_PLACE.format("tools"), "model.template")
            answer = {**_QUESTION, "role": "tool", "name": names[0]}
        if answer["content"] not in tokenizer.decode(self.encode_context([answer])):
            raise ShoalError(_NO_PLACE.format("tool answers"), "model.template")
        if names:
            if call_format == "auto":
                call_format = find_call_format(tokenizer, self._schemas)
            # What follows the question: the end of its turn, and what opens the answer.
            generation_prompt = prompt.rpartition(_QUESTION["content"])[2]
            start = tokenizer.encode(generation_prompt)
            self._reader = CallReader(tokenizer, call_format, start, schemas)
        self.notes: list[str] = []
        next_messages = [answer]  # what may follow a turn: an answer of a tool, or of a user
        if names:
            # Not _QUESTION again: Mistral's template looks for the last user's text.
            next_messages.append({"role": "user", "content": "And then?"})
        for message in next_messages:
            # A template may refuse the turn that this is tried on.
            with contextlib.suppress(ShoalError):
                note = self._history_note(message)
                if note:
                    self.notes.append(note)

    def encode_prompt(self, prompt: Prompt) -> np.ndarray:
        """Returns the token ids of a prompt of messages with the tools, int32[T]. If `special` is
        False, answers of tools in it are encoded without added tokens. ShoalError if the prompt is
        a text, or if the chat template raises for it."""
        if isinstance(prompt, str):
            raise ShoalError(
                f"Rollouts of several turns need prompts of messages, but {prompt!r:.60} is a "
                'text: give [{"role": "user", "content": ...}].'
            )
        if self._added is None:
            return self._tokenizer.encode_prompt(prompt, self._schemas)
        messages = []
        has_cuts = False
        for message in prompt:
            if message["role"] == "tool":
                message = self.split_special_tokens(message)
                has_cuts = True  # or may have some
            # Other messages may have been split before, those of an environment.
            has_cuts = has_cuts or _CUT in str(message.get("content"))
            messages.append(message)
        if not has_cuts:
            return self._tokenizer.encode_prompt(prompt, self._schemas)
        return np.asarray(self._encode_pieces(self._render(messages)), np.int32)

    def split_special_tokens(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message of a tool or an environment with the private character _CUT inside each
        added token that its text spells out: the text is encoded in pieces there, so that no piece
        becomes that token. The message is returned unchanged (the same object) if `special` is
        True, if the tokenizer has no added token of more than one character, or if its content is
        no text; else a copy. _CUT characters that the text had are removed."""
        text = message.get("content")
        if self._added is None or not isinstance(text, str):
            return message
        text = text.replace(_CUT, "")
        pieces = []
        start = 0
        for match in self._added.finditer(text):
            cut = match.start() + 1  # behind the first character of what could become the token
            pieces.append(text[start:cut])
            start = cut
        pieces.append(text[start:])
        return {**message, "content": _CUT.join(pieces)}

    def _encode_pieces(self, text: str) -> list[int]:
        """Returns the ids of a rendered text, whose pieces between _CUT characters are encoded
        separately. Without a chat template the first piece gets the tokens that begin a prompt,
        such as bos."""
        text = text.encode(errors="replace").decode()  # tokenizers refuse half a character
        pieces = text.split(_CUT)
        if self._tokenizer.has_template:
            ids = self._tokenizer.encode(pieces[0])
        else:
            ids = self._tokenizer.encode_prompt(pieces[0]).tolist()
        for piece in pieces[1:]:
            if piece:
                ids += self._tokenizer.encode(piece)
        return ids

    def read(self, ids: Sequence[int]) -> tuple[dict[str, Any], list[ToolCall]]:
        """Reads the sampled ids of a turn. Returns (the assistant's message, all tool calls in
        order, including those that could not be read and have an `error`). The message's content is
        the turn's text with its thoughts and without the calls, or all of its text if no call could
        be read; its `tool_calls` are the calls without an error, in OpenAI's form, and missing if
        there are none. Without tools all is text, and the calls are []. Never raises for what a
        model wrote."""
        calls: list[ToolCall] = []
        if self._reader:
            content, calls = self._reader.read(ids)
        else:
            content = self._tokenizer.text(ids)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        without_error = [_in_message(call) for call in calls if not call.error]
        if without_error:
            message["tool_calls"] = without_error
        return message, calls

    def encode_context(
        self, messages: Messages, calls: Sequence[ToolCall] = (), last: int | None = None
    ) -> list[int]:
        """Returns the ids that follow a turn's last sampled token: the messages that answer the
        turn, and the next generation prompt. If `special` is False, no added token is made of the
        answers' texts. ShoalError if the template does not take such answers.

        messages  of role tool, one for each of `calls` in their order, or of role user
        calls     the turn's tool calls; empty: the names are taken from `messages`
        last      the turn's last sampled id; if it did not end the turn, the returned ids begin
                  with the token that does. None: the turn was ended
        """
        called: list[ToolCall] = []
        answered = [message.get("name", "") for message in messages if message["role"] == "tool"]
        if answered:  # tools answer; else a user, and the turn is rendered without calls
            called = list(calls) or [ToolCall(name, {}) for name in answered]
        end, ids = self._end_and_context(messages, called)
        if last is None or last == end:
            return ids
        if last in self._tokenizer.eos_ids:
            # Another end-of-sequence token will do, unless the answers are part of the turn, as in
            # Gemma 4, where the token that ends the calls opens the answers.
            if end == self._end_of_turn(has_calls=False):
                return ids
        ids.insert(0, end)
        return ids

    def _render(self, messages: Messages, finished: bool = False) -> str:
        """Returns the text of messages with the tools by the chat template."""
        return self._tokenizer.render(messages, finished, self._schemas)

    def _end_and_context(
        self, messages: Messages, calls: Sequence[ToolCall] = ()
    ) -> tuple[int, list[int]]:
        """Renders a turn with these tool calls, and the messages that answer it. Returns (the id
        that ends the turn, the ids after it: the answers and the next generation prompt). Without
        `calls` the turn is one of text. ShoalError if the template raises or writes no calls, or if
        no end-of-sequence token ends the turn."""
        end = self._end_of_turn(bool(calls))
        ids = self._ids_behind_mark(messages, calls)
        if end not in ids:
            raise self._no_end(ids)
        position = ids.index(end)
        return end, ids[position + 1 :]

    def _no_end(self, ids: list[int]) -> ShoalError:
        """Returns the error for a turn that no end-of-sequence token ends. `ids`: what follows the
        turn."""
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return ShoalError(
            "The model has no end-of-turn token: its chat template ends a turn with "
            f"{text[:40]!r}, without a token of eos_token_id in generation_config.json. Add the "
            "one that ends turns."
        )

    def _end_of_turn(self, has_calls: bool) -> int:
        """Returns the id that ends a turn with calls, or one of text: the first end-of-sequence
        token behind it. It is found once, with an answer whose text spells no token. ShoalError as
        in `_end_and_context`."""
        if has_calls in self._ends:
            return self._ends[has_calls]
        answer: dict[str, Any] = dict(_QUESTION)
        calls = []
        if has_calls:
            name = self._schemas[0]["function"]["name"] if self._schemas else "unknown"
            answer |= {"role": "tool", "name": name}
            calls.append(ToolCall(name, {}))
        ids = self._ids_behind_mark([answer], calls)
        ends = [id for id in ids if id in self._tokenizer.eos_ids]
        last_end = self._tokenizer.turn_end
        if not ends and not has_calls and last_end is not None and last_end.is_eos:
            # gpt-oss ends a turn with <|return|>, but its template writes <|end|> in that place
            # once a message follows. The tokens that were sampled stay.
            added = self._tokenizer.added_tokens()
            ends = [id for id in ids if id in added]
        if not ends:
            raise self._no_end(ids)
        self._ends[has_calls] = ends[0]
        return ends[0]

    def _ids_behind_mark(self, messages: Messages, calls: Sequence[ToolCall]) -> list[int]:
        """Renders a turn with these tool calls, or one of text without `calls`, and the messages
        that answer it. Returns the ids of what the template writes behind the last argument of the
        last call, or behind the text. ShoalError if the template raises or writes no calls. A name
        of other characters than letters, digits, `_`, `.` and `-`, or of more than 64, is rendered
        as `unknown`; the calls' arguments are not rendered."""
        # The model wrote the names: a text that is no name could contain the end of a turn.
        written = []
        for call_index, call in enumerate(calls):
            name = call.name if re.fullmatch(r"[\w.-]{1,64}", call.name) else "unknown"
            call_id = call.id or f"call{call_index:05}"
            written.append(_in_message(ToolCall(name, {}, id=call_id)))
        turn: dict[str, Any] = {"role": "assistant", "content": MARK}
        if written:
            written[-1]["function"]["arguments"] = {"text": MARK}
            turn["content"] = ""
            turn["tool_calls"] = written
        conversation = [_QUESTION, turn]
        for message_index, message in enumerate(messages):
            answer = self.split_special_tokens(message)
            if message_index < len(written):
                answer = {**answer, "tool_call_id": written[message_index]["id"]}
            conversation.append(answer)
        text = self._render_calls(conversation, turn)
        _, mark, rest = text.partition(MARK.strip())
        if not mark:
            raise ShoalError(_NO_PLACE.format("tool calls"), "model.template")
        if self._added is None:
            # Tokenizers refuse half a character.
            return self._tokenizer.encode(rest.encode(errors="replace").decode())
        return self._encode_pieces(rest)

    def _render_calls(self, conversation: Messages, turn: dict[str, Any]) -> str:
        """Returns the text of a conversation whose assistant's message is `turn`, with MARK in its
        last tool call. A template that takes one call in a message and refuses others (Llama 3.1),
        or leaves them out (gpt-oss), gets that call alone; this changes `turn`. ShoalError if the
        template raises for one call too."""
        calls = turn.get("tool_calls", [])
        if len(calls) > 1:
            with contextlib.suppress(ShoalError):
                text = self._render(conversation)
                if MARK.strip() in text:
                    return text
            turn["tool_calls"] = calls[-1:]
        return self._render(conversation)

    def _history_note(self, answer: dict[str, Any]) -> str:
        """Returns a note for the user if the chat template renders a turn differently once the
        message `answer` follows it, for example without its thoughts; "" if it does not. `answer`:
        one of a user, or of a tool with its `name`, which the turn then calls. ShoalError if the
        template refuses such a turn."""
        turn: dict[str, Any] = {
            "role": "assistant",
            "content": "<think>\nWhy?\n</think>\n\nSo.",
        }
        if "name" in answer:
            turn["tool_calls"] = [_in_message(ToolCall(answer["name"], {}))]
        turn_alone = self._render([_QUESTION, turn], finished=True).rstrip()
        if self._render([_QUESTION, turn, answer]).startswith(turn_alone):
            return ""
        return (
            f"the chat template renders a turn in another way once a {answer['role']} message "
            "follows it, as without its thoughts; rollouts keep the tokens that were sampled"
        )


def find_call_format(tokenizer: Tokenizer, schemas: Sequence[dict[str, Any]]) -> str:
    """Returns the form in which the model writes calls of these tools: `template` if the tokenizer
    has a `response_template`, else the form of a call that the chat template renders, a key of
    FORMATS. ShoalError if it renders none of these, or raises. `schemas`: one or more; a call of
    the first tool is rendered."""
    if tokenizer.response_template:
        return "template"
    name = schemas[0]["function"]["name"]
    call = _in_message(ToolCall(name, {"text": MARK}))
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "tool", "name": name, "content": ""}
    text = tokenizer.render([_QUESTION, turn, answer], False, list(schemas))
    before_mark = text.partition(MARK.strip())[0]
    # What the template writes on both sides of the tool's name in the call; `after` ends before
    # the argument's value.
    before, _, after = before_mark.rpartition(name)
    if before.endswith("<function="):
        return "xml"
    if before.endswith("call:"):
        return "gemma"
    if before.endswith("to=functions."):
        return "harmony"
    if "[TOOL_CALLS]" in before[-40:]:
        return "mistral"
    if "<tool_call>" in before[-40:] and '"arguments"' in after:
        return "hermes"
    if '"parameters"' in after:
        return "llama"
    raise ShoalError(
        f"The chat template writes tool calls in a form that is not known, {before[-40:]!r}: "
        f"choose environment.call_format={CALL_FORMATS}.",
        "environment.call_format",
    )


def _added_tokens(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Returns a pattern that matches, without consuming text, at the start of each place where a
    text spells out an added token of more than one character, special or not. None if the tokenizer
    has no such token."""
    texts = [text for text, _ in tokenizer.added_tokens().values() if len(text) > 1]
    if not texts:
        return None
    longest_first = sorted(texts, key=len, reverse=True)
    # A lookahead, so that an occurrence that begins within another one is found too.
    alternatives = "|".join(re.escape(text) for text in longest_first)
    return re.compile(f"(?={alternatives})")


def _in_message(call: ToolCall) -> dict[str, Any]:
    """Returns a tool call in the form of a message's `tool_calls`, without an error; with an `id`
    if the model gave it one."""
    own_id = {"id": call.id} if call.id else {}
    function = {"name": call.name, "arguments": call.arguments}
    return {**own_id, "type": "function", "function": function}


# Schemas

_JSON_TYPES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    tuple: "array",
    dict: "object",
}


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the JSON schema of a tool, `{"type": "function", "function": {...}}`: the function's
    attribute `schema` if it has one, else what transformers' `get_json_schema` makes of its type
    hints and its docstring in Google's style. ShoalError if the docstring, or an argument's type or
    description, is missing, or if JSON does not have the type.

    A description that ends with `(choices: ["a", "b"])` gives the argument these values. An
    argument without a default is required. `self` and `cls` without a type are left out. The
    result's type and description, under `return`, are left out if the type is missing or not in
    JSON. An attribute `schema` is returned itself, unchecked. The function is not called."""
    own_schema = getattr(function, "schema", None)
    if own_schema:
        return own_schema
    name = getattr(function, "__name__", "operation")
    about, described, returned = _split_docstring(inspect.getdoc(function) or "")
    if not about:
        raise ShoalError(
            f"Tool {name} has no docstring: write what it does, and its arguments under Args:."
        )
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ShoalError(f"The type hints of tool {name} cannot be read: {error}.") from error
    properties: dict[str, Any] = {}
    required = []
    try:
        arguments = inspect.signature(function).parameters
    except ValueError as error:  # of some functions that are written in C
        raise ShoalError(
            f"Tool {name}: its arguments cannot be read ({error}); write a function around it."
        ) from error
    for argument, parameter in arguments.items():
        if argument in ("self", "cls") and argument not in hints:
            continue
        if argument not in hints or argument not in described:
            raise ShoalError(
                f"Tool {name}, argument {argument}: write its type in the signature, and a line "
                f"'{argument}: what it is' under Args: in the docstring."
            )
        property_schema = _json_type(hints[argument], f"Tool {name}, argument {argument}")
        text = described[argument]
        choices = re.search(r"\(choices:\s*(.*?)\)\s*$", text, re.IGNORECASE)
        if choices:
            values = []
            for value in json.loads(choices[1]):
                values.append(value.strip() if isinstance(value, str) else value)
            property_schema["enum"] = values
            text = text[: choices.start()].strip()
        property_schema["description"] = text
        properties[argument] = property_schema
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    tool: dict[str, Any] = {"name": name, "description": about, "parameters": parameters}
    # The type of the result may be missing or unreadable: a model never writes results.
    with contextlib.suppress(ShoalError, KeyError):
        tool["return"] = _json_type(hints["return"], name)
        if returned:
            tool["return"]["description"] = returned
    return {"type": "function", "function": tool}


def _split_docstring(text: str) -> tuple[str, dict[str, str], str]:
    """Splits a docstring in Google's style. Returns (what the tool does, argument -> description,
    what it returns); what is missing is empty ("" or {}). A section begins with `Args:`, `Returns:`
    or `Raises:` at the start of a line; what is raised is left out. Lines that are indented further
    than their argument, or that name none, continue its description and are joined to it with
    spaces."""
    # [about, title of a section, its text, title, text, ...]
    parts = re.split(r"(?:^|\n)[ \t]*(Args|Returns|Raises):", text.strip())
    about = parts[0]
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    described: dict[str, str] = {}
    indent = ""
    argument = ""
    for line in sections.get("Args", "").split("\n"):
        if not line.strip():
            continue
        start = re.match(r"([ \t]*)(\w+):\s*(.*)", line)
        is_indented_further = argument and re.match(rf"{indent}[ \t]", line)
        if start and not is_indented_further:
            indent = start[1]
            argument = start[2]
            described[argument] = start[3].strip()
        elif argument:
            described[argument] = f"{described[argument]} {line.strip()}".strip()
    return about.strip(), described, sections.get("Returns", "").strip()


def _json_type(hint: Any, where: str) -> dict[str, Any]:
    """Returns the JSON schema of a type hint, `list[int]` -> `{"type": "array", "items": {"type":
    "integer"}}`; {} for Any, which allows all values. A Literal or Enum becomes an `enum`, a
    union with None is `nullable`, a tuple of types has `prefixItems`, and a dict's keys are not
    looked at. ShoalError for a type that JSON does not have, such as `tuple[int, ...]` or `set`.
    `where`: the tool and argument, for the message."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        values = list(args) or [member.value for member in hint]
        names: list[str] = []
        for value in values:
            name = _JSON_TYPES.get(type(value), "")  # "" for a type that an enum cannot have
            if name not in names:
                names.append(name)
        if values and not {"", "array", "object"}.intersection(names):
            return {"type": _one_or_list(names), "enum": values}
    elif origin in (Union, types.UnionType):
        union = _union([_json_type(arg, where) for arg in args if arg is not type(None)])
        if type(None) in args:
            union["nullable"] = True
        return union
    elif origin is list:
        return {"type": "array", "items": _json_type(args[0], where)}
    elif origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [_json_type(arg, where) for arg in args]}
    elif origin is dict and len(args) == 2:
        return {"type": "object", "additionalProperties": _json_type(args[1], where)}
    raise ShoalError(
        f"{where} has the type {hint}, which JSON does not have: use int, float, str, bool, list, "
        "dict, Literal, an Enum, or a union of them."
    )


def _union(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the schema of a union from the schemas of its members, one or more. A single member:
    its own schema, the same object. Members that all say nothing but one type: the types, sorted,
    each once, `{"type": ["integer", "string"]}`; one name, no list, if they are the same. Else
    `{"anyOf": schemas}`."""
    if len(schemas) == 1:
        return schemas[0]
    are_simple = all(
        schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas
    )
    if are_simple:
        return {"type": _one_or_list(sorted({schema["type"] for schema in schemas}))}
    return {"anyOf": schemas}


def _one_or_list(names: list[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else names


TOKEN_CHARACTERS = 128
"""The most characters of a token: a text with more per allowed token cannot fit, and is not
encoded."""


LIKELY_CHARACTERS = 8
"""A text with more characters than this per allowed token is likely to be too long, and is counted
in pieces."""

PIECE = 1 << 14
"""Characters of one piece of a text that is counted in pieces."""

BORDER = 16
"""By how many tokens the count may change at each border between two pieces."""


def completion_record(
    completion: Completion,
    tools: Sequence[Any],
    tokenizer: Tokenizer,
    with_token_texts: bool,
    start: int = 0,
) -> dict[str, Any]:
    """Returns a completion as plain data, for an answer of the server. Of its tokens from index
    `start` on: `ids`, `logprobs`, `versions` (the version of the weights for each token), `text`
    (without special tokens) and `message`, the assistant's message with its tool calls. Also its
    `stop_reason`.

    `tools`: schemas of the tools that may be called; empty: calls are not looked for.
    `with_token_texts`: also the text of each token, special ones too, under `tokens`, which is else
    empty. ShoalError if there are tools and the chat template has no place for them."""
    ids = completion.token_ids[start:].tolist()
    text = tokenizer.decode(ids)
    if tools:
        message, _ = turn_format(tokenizer, json.dumps(tools)).read(ids)
    else:
        message = {"role": "assistant", "content": tokenizer.text(ids)}
    tokens = []
    if with_token_texts:
        tokens = [tokenizer.decode([id], skip_special_tokens=False) for id in ids]
    return {
        "ids": ids,
        "logprobs": completion.logprobs[start:].tolist(),
        "versions": completion.versions[start:].tolist(),
        "stop_reason": completion.stop_reason.value,
        "text": text,
        "tokens": tokens,
        "message": message,
    }


@lru_cache(64)
def turn_format(tokenizer: Tokenizer, tools: str) -> TurnFormat:
    """Returns the `TurnFormat` for tools given as JSON; the latest 64 are cached. ShoalError if the
    chat template has no place for tools."""
    return TurnFormat(tokenizer, json.loads(tools))


def encode(prompt: Any, tools: Sequence[Any], tokenizer: Tokenizer, most: int) -> np.ndarray:
    """Returns the token ids of a prompt from a request, int32[T]. A list of ids is taken as it is,
    without a look into the vocabulary; a text is encoded, and refused if there are tools; messages
    are rendered by the chat template, which shows the tools. ShoalError if the prompt has no token
    or more than `most`, or if the template raises; a text or messages that are much longer are
    refused without encoding all of them. `most`: the limit of tokens,
    `sampling.max_prompt_tokens`."""
    if _is_token_ids(prompt):
        ids = np.array(prompt, np.int32)
    else:
        check_size(prompt, tools, most, "sampling.max_prompt_tokens")
        _check_count(prompt, tokenizer, most)
        encoder = turn_format(tokenizer, json.dumps(tools)) if tools else tokenizer
        ids = encoder.encode_prompt(prompt)
    if not 1 <= len(ids) <= most:
        raise _wrong_length(f"{len(ids)} tokens", f"1 to sampling.max_prompt_tokens={most}")
    return ids


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(id) is int for id in prompt)


def _wrong_length(length: str, wanted: str) -> ShoalError:
    """Returns the error for a prompt of a wrong length."""
    return ShoalError(f'prompt="{length}": expected {wanted}', "prompt")


def check_size(prompt: Any, tools: Sequence[Any], most: int, key: str) -> None:
    """Raises ShoalError if a prompt with its tools has more characters than `most` tokens can hold,
    TOKEN_CHARACTERS each. `key`: the setting that limits it, for the message. Characters are
    counted in the JSON of both, so that keys and quotes count too."""
    size = len(json.dumps([prompt, *tools], ensure_ascii=False))
    if size > TOKEN_CHARACTERS * most:
        raise _wrong_length(f"{size} characters", f"what fits the {most} tokens of {key}")


def _check_count(prompt: Any, tokenizer: Tokenizer, most: int) -> None:
    """Raises ShoalError if a text or messages are so long that they certainly have more than `most`
    tokens. A long prompt's tokens are counted piece by piece up to there, because encoding takes
    some seconds and a gigabyte for each 4 million characters. A prompt that passes may still be
    too long: one of at most LIKELY_CHARACTERS for each token is not counted at all, and of messages
    only the contents are."""
    if isinstance(prompt, str):
        texts = [prompt]
    else:
        texts = [str(message.get("content", "")) for message in prompt]
    num_characters = sum(len(text) for text in texts)
    if num_characters <= LIKELY_CHARACTERS * most:
        return
    count = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            # BORDER is taken off, so that the count is a lower bound.
            count += len(tokenizer.encode(text[start : start + PIECE])) - BORDER
            if count > most:
                raise _wrong_length(
                    f"more than {most} tokens", f"1 to sampling.max_prompt_tokens={most}"
                )
