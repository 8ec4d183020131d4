"""Tool calls in the tokens of a turn; one that cannot be read is a call with an error, and nothing
raises.

Tables say where calls are and how they are written, in the form of `response_template` in
tokenizer_config.json (https://huggingface.co/docs/transformers/chat_response_parsing), which can
take their place. A marker that is one token is found by its id: the same text in other tokens never
matches. A model wrote the text, so no step is quadratic in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shoal.chat.tokenizer import Tokenizer
from shoal.records import ShoalError

LONGEST = 1 << 20
"""Characters of a turn in which calls are read."""
DEEPEST = 100
"""Levels of nested arguments; templates and stores are recursive."""

_PARTS = {"name": "{name}", "arguments": "{content}"}
FORMATS: dict[str, dict[str, Any]] = {
    "hermes": {"open": "<tool_call>", "close": "</tool_call>", "content": "json"},
    "xml": {
        "open_pattern": r"<tool_call>\s*(?:<function=(?P<name>[^>\n]+)>)?",
        "close": "</tool_call>",
        "content": "xml-inline",
        "transform": _PARTS,
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
        },
    },
    # An answer in JSON is no call, an object that begins like one is.
    "llama": {
        "open_pattern": r'<\|python_tag\|>|\A\s*(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
        r'(?:"function"\s*:\s*\{\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:)',
        "close_pattern": r"\Z",
        "content": "json",
    },
    "gemma": {
        "open_pattern": r"(?:<\|tool_call>|<start_function_call>)(?:\s*call:(?P<name>[\w.-]+))?",
        "close": ["<tool_call|>", "<end_function_call>"],
        "content": "json",
        "transform": _PARTS,
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>'] * 2, ["<escape>"] * 2]},
    },
}
"""Of Qwen2.5, Qwen3 and Hermes; Qwen3.5; Llama 3.1 and later; Gemma 4 and FunctionGemma."""
# calls in them are none
_THOUGHTS = {"open_pattern": r"<think>|<\|channel>", "close_pattern": r"</think>|<channel\|>"}


class ToolCall(NamedTuple):
    """A tool call of a turn; `error`, if it could not be read, is the answer to the model."""

    name: str
    arguments: dict[str, Any]
    error: str = ""


class CallReader:
    """Reads the tool calls of turns.

    form     hermes, xml, llama, gemma; or template: as the model's own `response_template` says
    start    ids that the chat template begins a turn with, which may open a thought
    schemas  of the tools, by whose types arguments that came as text are read

    Markers that are one token are *private characters* in the texts and patterns of this class,
    which no other token decodes to.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: str,
        start: Sequence[int] = (),
        schemas: Sequence[dict] = (),
    ):
        self._tokenizer = tokenizer
        self._schemas: dict[str, dict[str, Any]] = {}
        for tool in schemas:
            function = tool["function"]
            self._schemas[function["name"]] = function["parameters"]["properties"]
        table: Any = {
            "fields": {"thoughts": _THOUGHTS, "tool_calls": FORMATS.get(form)},
            "start_anchor_pattern": f".*(?={_THOUGHTS['open_pattern']})",
        }
        if form == "template":
            table = tokenizer.response_template
        self._set_private_characters(table)
        try:
            self._compile(table)
        except (KeyError, TypeError, AttributeError, ValueError, re.error) as error:
            key = "environment.call_format"
            raise ShoalError(
                f"The response_template of tokenizer_config.json cannot be used ({error!r}): "
                f"choose {key}=hermes, xml, llama or gemma.",
                key,
            ) from error
        text = self._text(start)
        start_of_turn = len(text)
        anchors = list(self._anchor.finditer(text))
        if anchors:
            start_of_turn = max(match.end() for match in anchors)
        self._start = text[start_of_turn:]

    def _set_private_characters(self, table: Any) -> None:
        """Gives each added token that the table names a private character."""
        used = json.dumps(table, ensure_ascii=False).replace("\\\\", "").replace('\\"', '"')
        markers = []
        for token_id, (token, is_special) in self._tokenizer.added_tokens().items():
            if token in used:
                markers.append((token, token_id, is_special))
        # The longest first, as patterns are rewritten in this order.
        markers.sort(key=lambda marker: -len(marker[0]))
        self._char_of_token: dict[str, str] = {}
        self._token_of_char: dict[str, str] = {}
        self._char_of_id: dict[int, str] = {}
        self._decoded: dict[str, str] = {}  # character -> its text where special tokens are skipped
        for number, (token, token_id, is_special) in enumerate(markers):
            char = chr(0xF0000 + number)
            self._char_of_token[token] = char
            self._token_of_char[char] = token
            self._char_of_id[token_id] = char
            self._decoded[char] = "" if is_special else token

    def _compile(self, table: Any) -> None:
        """Compiles a table's patterns. Raises various errors for a table that is no such table."""
        openings = []
        self._closing: dict[str, re.Pattern[str]] = {}
        for name, field in table["fields"].items():
            opening = self._pattern(field, "open")
            if opening:
                closing = self._pattern(field, "close") or r"\Z"
                openings.append(f"(?P<_{name}>{opening})")
                self._closing[f"_{name}"] = re.compile(closing, re.DOTALL)
        self._opening = re.compile("|".join(openings), re.DOTALL)
        self._anchor = re.compile(self._pattern(table, "start_anchor") or r"\Z", re.DOTALL)
        self._field = table["fields"]["tool_calls"]
        self._args = self._field.get("content_args") or {}
        tag_pattern = self._with_chars(self._args.get("tag_pattern", ""))
        self._tag = re.compile(rf"[\s,]*(?:{tag_pattern})", re.DOTALL)
        content = self._field["content"]
        has_tags = content == "xml-inline" and {"key", "value"} <= self._tag.groupindex.keys()
        if content != "json" and not has_tags:
            raise ValueError(f"tool_calls with content {content!r} are not supported")

    def _pattern(self, field: Mapping[str, Any], name: str) -> str:
        """A marker's pattern: of literal texts under `name`, or a pattern under `name_pattern`."""
        literals = field.get(name, [])
        if isinstance(literals, str):
            literals = [literals]
        longest_first = sorted(literals, key=len, reverse=True)
        pattern = "|".join(re.escape(literal) for literal in longest_first)
        return self._with_chars(pattern or field.get(f"{name}_pattern", ""))

    def _with_chars(self, pattern: str) -> str:
        for token, char in self._char_of_token.items():
            pattern = pattern.replace(token, char).replace(re.escape(token), char)
        return pattern

    def read(self, ids: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """The text outside calls, and the calls; a turn without a readable call is text as a
        whole."""
        whole = self._tokenizer.decode(ids)
        text = self._start + self._text(ids)
        if len(text) > LONGEST:
            return whole, [_unread(f"the turn is longer than {LONGEST:,} characters")]
        calls: list[ToolCall] = []
        outside: list[str] = []
        position = 0
        opened = self._opening.search(text)
        while opened:
            closed = self._closing[str(opened.lastgroup)].search(text, opened.end())
            if closed:
                body = text[opened.end() : closed.start()]
                end = closed.end()
            else:
                body = text[opened.end() :]
                end = len(text)
            region_calls: list[ToolCall] = []
            if opened.lastgroup == "_tool_calls":
                region_calls = self._read_calls(body, opened.groupdict(), closed is not None)
                calls += region_calls
            is_read = bool(region_calls) and all(not call.error for call in region_calls)
            outside.append(text[position : opened.start() if is_read else end])
            if end == position:  # an empty match would be found again
                break
            position = end
            opened = self._opening.search(text, position)
        if all(call.error for call in calls):
            return whole, calls
        outside.append(text[position:])
        content = "".join(outside).removeprefix(self._start)
        return self._without_chars(content, self._decoded).strip(), calls

    def _text(self, ids: Sequence[int]) -> str:
        """The text of ids with markers as private characters."""
        parts = []
        start = 0
        for number, token_id in enumerate(ids):
            if token_id in self._char_of_id:
                parts.append(self._decode(ids[start:number]))
                parts.append(self._char_of_id[token_id])
                start = number + 1
        parts.append(self._decode(ids[start:]))
        return "".join(parts)

    def _decode(self, ids: Sequence[int]) -> str:
        return _PRIVATE.sub("\ufffd", self._tokenizer.decode(ids))

    def _without_chars(self, text: str, texts: Mapping[str, str]) -> str:
        return _PRIVATE.sub(lambda match: texts[match[0]], text)

    def _read_calls(self, body: str, captured: dict[str, str], is_closed: bool) -> list[ToolCall]:
        """The calls in a region of the turn; one call with an error where it cannot be read.
        `captured`: the groups of the marker that opened it."""
        form = self._field.get("transform", "{content}")
        try:
            if not is_closed:
                raise ValueError("it does not end")
            contents = self._contents(body)
            if isinstance(contents[0], list):
                contents = contents[0] or [None]
            calls = []
            for content in contents:
                values = dict(content) if isinstance(content, dict) else {}
                values |= captured
                values["content"] = content
                calls.append(self._call(_filled(form, values)))
            return calls
        except ValueError as error:
            return [_unread(str(error))]

    def _call(self, value: Any) -> ToolCall:
        """A call of an object with name and arguments, in OpenAI's form too."""
        if isinstance(value, dict):
            value = value.get("function", value)
        if not isinstance(value, dict):
            value = {}
        name = value.get("name")
        arguments = value.get("arguments", value.get("parameters")) or {}
        if not isinstance(name, str) or not name.strip():
            raise ValueError("it has no name")
        if isinstance(arguments, str):  # as in OpenAI's messages
            arguments = _values(arguments)[0]
        if not isinstance(arguments, dict):
            raise ValueError("its arguments are no object")
        name = name.strip()
        schemas = self._schemas.get(name, {})
        typed = {key: _typed(value, schemas.get(key, {})) for key, value in arguments.items()}
        return ToolCall(name, typed)

    def _contents(self, text: str) -> list[Any]:
        """The values of a region's text: JSON, one or several, or one object of tags."""
        if self._field["content"] == "json":
            return _values(self._json(text))
        pairs = []
        position = 0
        # One after the other, so that a missing end is searched for once.
        match = self._tag.match(text)
        while match:
            position = match.end()
            value = self._without_chars(match["value"] or "", self._token_of_char)
            pairs.append((match["key"].strip(), value))
            match = self._tag.match(text, position)
        if not re.fullmatch(r"\s*(?:</\w+>\s*)?", text[position:]):
            begin = self._without_chars(text[position : position + 40], self._token_of_char)
            raise ValueError(f"{begin.strip()!r} is no argument")
        return [_unique(pairs)]

    def _json(self, text: str) -> str:
        """Standard JSON of a text whose strings may have other quotes, and whose keys none."""
        quotes = []
        for begin, end in self._args.get("string_delims", ()):
            quotes += [re.escape(self._with_chars(begin)), re.escape(self._with_chars(end))]
        parts = re.split("|".join(quotes), text) if quotes else [text]
        for number, part in enumerate(parts):
            is_string = number % 2 == 1  # between two quotes
            if is_string:
                parts[number] = json.dumps(part)
            elif self._args.get("unquoted_keys"):
                parts[number] = _BARE_KEY.sub(_quoted_key, part)
        return self._without_chars("".join(parts), self._token_of_char)


def _quoted_key(match: re.Match[str]) -> str:
    if match[2]:
        return f'{match[1]}"{match[2]}":'
    return match[0]


_PRIVATE = re.compile("[\U000f0000-\U000f0fff]")
# A string without an end goes on to the end of the text, else each later quote would be tried.
_STRING = r'"(?:[^"\\]|\\.)*"?'
_BARE_KEY = re.compile(rf"{_STRING}|([{{,]\s*)([A-Za-z_][\w.-]*)\s*:", re.DOTALL)
_BRACKET = re.compile(rf"{_STRING}|[\[{{]|[\]}}]", re.DOTALL)
_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write Python's values
_TYPES = {
    int: ("integer", "number"),
    float: ("number",),
    bool: ("boolean",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def _unread(why: str) -> ToolCall:
    return ToolCall(
        "",
        {},
        f"The tool call could not be read: {why}. Write it in the form in which tools are called.",
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("it gives an argument twice")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _values(text: str) -> list[Any]:
    """The JSON values in a text, one after the other; ValueError for none, for NaN, and for what is
    nested too deep."""
    depth = deepest = 0
    for part in _BRACKET.findall(text):
        if part in ("[", "{"):
            depth += 1
        elif part in ("]", "}"):
            depth -= 1
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    values = []
    position = len(text) - len(text.lstrip())
    while position < len(text) or not values:
        try:
            value, position = _DECODER.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"it is no valid JSON, {error.msg} at character {error.pos}"
            ) from error
        values.append(value)
        while position < len(text) and text[position] in " \t\r\n;,":
            position += 1
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ValueError("it holds NaN, an infinite number or half a character") from error
    return values


def _filled(form: Any, values: Mapping[str, Any]) -> Any:
    """A table's `transform` with its placeholders `{name}` and `{content.name}` replaced."""
    if isinstance(form, dict):
        return {key: _filled(value, values) for key, value in form.items()}
    if not isinstance(form, str):
        return form
    placeholder = re.fullmatch(r"\{([\w.]+)\}", form)
    if not placeholder:
        return form
    value: Any = values
    for key in placeholder[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"it has no {key}")
        value = value[key]
    return value


def _typed(value: Any, schema: Mapping[str, Any]) -> Any:
    """An argument that came as text, in another type that the tool's schema allows; else as it
    is."""
    if not isinstance(value, str):
        return value
    types = _types(schema)
    if not types - {"string"}:
        return value
    try:
        read = _values(_WORDS.get(value.strip(), value))[0]
    except ValueError:
        return value
    if isinstance(read, float) and read.is_integer() and "integer" in types:
        read = int(read)
    if types.isdisjoint(_TYPES.get(type(read), ())):
        return value
    return read


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The names of the types that a schema allows. Strangers write schemas: any entry may be
    anything."""
    allowed: list[Any] = [schema]
    if isinstance(schema.get("anyOf"), list):
        allowed += schema["anyOf"]
    types = set()
    for entry in allowed:
        if not isinstance(entry, Mapping):
            continue
        names = entry.get("type")
        if not isinstance(names, list):
            names = [names]
        types |= {name for name in names if isinstance(name, str)}
    if schema.get("nullable"):
        types.add("null")
    return types
