"""Reads the tool calls in the tokens of a turn. A call that cannot be read is returned as a call
with an error; reading never raises.

Tables say how calls are marked and written, in the form of `response_template` in
tokenizer_config.json (https://huggingface.co/docs/transformers/chat_response_parsing); a model's
own `response_template` can replace them. A marker that is one token is found by its id (see
`markers.py`). Since a model wrote the text, no step is quadratic in its length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shoal.chat.markers import Markers
from shoal.chat.thoughts import ThoughtTags, pattern_of, thoughts_of
from shoal.chat.tokenizer import CALL_ID, Tokenizer
from shoal.records import ShoalError

LONGEST = 1 << 20
"""A turn with more characters is not searched for calls."""
DEEPEST = 100
"""The deepest nesting of arguments: templates and stores recurse over them."""

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
    # An answer that is any JSON is no call; an object that begins with a name and arguments is.
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
    # Any message whose header has more than its channel. The recipient follows the channel as
    # models write it, before it as their template does. Built-in tools have no `functions.`.
    "harmony": {
        "open_pattern": r"(?:<\|channel\|>(?!\w{1,32}<\|message\|>)\w{0,32}"
        r"|(?:\A|(?<=assistant))(?= to=)) ?"
        r"(?:to=(?:functions\.)?(?P<name>[\w.-]{1,64}+))? ?(?:<\|constrain\|>)?.{0,64}?"
        r"(?:<\|message\|>|(?=<\|call\|>))",
        "close_pattern": r"<\|call\|>|<\|end\|>|<\|return\|>",
        "content": "json",
        "transform": _PARTS,
    },
    # A list of calls (7B v0.3, Nemo), or a name before the arguments (Small 3.2, Ministral 3).
    "mistral": {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]{1,64}+)\s*"
        r"(?:\[CALL_ID\](?P<id>\w{1,64}))?(?:\[ARGS\])?)?",
        "close_pattern": r"(?=\[TOOL_CALLS\])|\Z",
        "content": "json",
        "transform": _PARTS,
    },
}
"""How models write tool calls: hermes is of Qwen2.5, Qwen3 and Hermes; xml of Qwen3.5 and later and
Qwen3-Coder; llama of Llama 3.1 and later; gemma of Gemma 4 and FunctionGemma; harmony of gpt-oss;
mistral of Mistral's models. Groups of an opening marker may be the tool's `name`, and the call's
`id`; where it has no name, JSON content is an object with both name and arguments."""

CALL_FORMATS = f"{', '.join(list(FORMATS)[:-1])} or {list(FORMATS)[-1]}"
"""The values of environment.call_format that name a form, for messages."""


class ToolCall(NamedTuple):
    """A tool call of a turn. `error`, if it could not be read, is the text to answer the model
    with. `id`: the one that the model gave it, of CALL_ID's form; "" if it gave none."""

    name: str
    arguments: dict[str, Any]
    error: str = ""
    id: str = ""


class CallReader:
    """Reads the tool calls of turns.

    call_format  a key of FORMATS; or template: as the model's own `response_template` says
    start        ids that the chat template begins a turn with, which may open a thought
    schemas      of the tools; arguments that came as text are converted to the types that these
                 allow

    In the texts and patterns of this class each marker that is one token is a private character
    (see `Markers`). ShoalError for a `response_template` that cannot be used.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        call_format: str,
        start: Sequence[int] = (),
        schemas: Sequence[dict] = (),
    ):
        """Prepares the patterns of a form of calls. `call_format`: a key of FORMATS, or `template`
        for the tokenizer's own table. `start`: the ids that each turn begins with, which `read`
        does not get. `schemas`: of the tools; arguments are converted to their types. ShoalError
        for a table that cannot be used, and for any other `call_format`."""
        self._tokenizer = tokenizer
        self._schemas: dict[str, dict[str, Any]] = {}
        for tool in schemas:
            function = tool["function"]
            self._schemas[function["name"]] = function["parameters"]["properties"]
        added = tokenizer.added_tokens()
        thoughts = thoughts_of(added)
        # What looks like a call within a thought is not a call.
        fields: dict[str, Any] = {f"thoughts_{name}": row for name, row in thoughts.items()}
        openings = [pattern_of(row, "open") for row in thoughts.values()]
        table: Any = {
            "fields": {**fields, "tool_calls": FORMATS.get(call_format)},
            "start_anchor_pattern": f".*(?={'|'.join(openings)})",
        }
        if call_format == "template":
            table = tokenizer.response_template
        self._markers = Markers(added, tokenizer.decode, [table, thoughts])
        self._tags = ThoughtTags(self._markers, thoughts)
        try:
            self._compile(table)
        except (KeyError, TypeError, AttributeError, ValueError, re.error) as error:
            key = "environment.call_format"
            raise ShoalError(
                f"The response_template of tokenizer_config.json cannot be used ({error!r}): "
                f"choose {key}={CALL_FORMATS}.",
                key,
            ) from error
        # Only what follows the last anchor belongs to the turn, such as a tag that opens a thought.
        # Without an anchor in the text, nothing of it does.
        text = self._markers.text(start)
        start_of_turn = len(text)
        anchors = list(self._anchor.finditer(text))
        if anchors:
            start_of_turn = max(match.end() for match in anchors)
        self._start = text[start_of_turn:]

    def _compile(self, table: Any) -> None:
        """Compiles the patterns of a table: one that matches any opening marker, whose group says
        which field it opens (`_NAME`), and for each field one for the closing marker (without one:
        the end of the text). Raises KeyError, TypeError, AttributeError, ValueError or re.error if
        the table is not valid."""
        openings = []
        self._closing: dict[str, re.Pattern[str]] = {}
        for name, field in table["fields"].items():
            opening = self._marker_pattern(field, "open")
            if opening:
                closing = self._marker_pattern(field, "close") or r"\Z"
                openings.append(f"(?P<_{name}>{opening})")
                self._closing[f"_{name}"] = re.compile(closing, re.DOTALL)
        self._opening = re.compile("|".join(openings), re.DOTALL)
        self._anchor = re.compile(self._marker_pattern(table, "start_anchor") or r"\Z", re.DOTALL)
        self._field = table["fields"]["tool_calls"]
        self._args = self._field.get("content_args") or {}
        tag_pattern = self._markers.in_pattern(self._args.get("tag_pattern", ""))
        self._tag = re.compile(rf"[\s,]*(?:{tag_pattern})", re.DOTALL)
        content = self._field["content"]
        has_tags = content == "xml-inline" and {"key", "value"} <= self._tag.groupindex.keys()
        if content != "json" and not has_tags:
            raise ValueError(f"tool_calls with content {content!r} are not supported")

    def _marker_pattern(self, field: Mapping[str, Any], name: str) -> str:
        """Returns `pattern_of` a field's marker, with markers as private characters."""
        return self._markers.in_pattern(pattern_of(field, name))

    def read(self, ids: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """Reads the ids of a turn. Returns (its text outside of calls, its calls in order). The
        text is the whole turn, without special tokens, if it has no call that could be read; else
        calls that were read are cut out, and it has no spaces around it. A call that could not be
        read has an `error`, and its region stays in the text. Calls within a thought do not count.
        A turn of more than LONGEST characters is not searched: its text comes with one call that
        has an error. Never raises for what a model wrote."""
        whole_text = self._tokenizer.text(ids)
        text = self._start + self._markers.text(ids)
        if len(text) > LONGEST:
            return whole_text, [_unread(f"the turn is longer than {LONGEST:,} characters")]
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
            is_read = bool(region_calls) and not any(call.error for call in region_calls)
            # A region of calls that were read is left out of the text; any other one, such as a
            # thought, is kept.
            outside.append(text[position : opened.start() if is_read else end])
            if end == position:  # an empty match at the same place would be found again
                break
            position = end
            opened = self._opening.search(text, position)
        if all(call.error for call in calls):
            return whole_text, calls
        outside.append(text[position:])
        # What the prompt has of the turn is cut off after tags are written, which it may open.
        content = self._tags.tagged("".join(outside)).removeprefix(self._tags.tagged(self._start))
        return self._markers.decoded(content).strip(), calls

    def _read_calls(
        self, body: str, captured: dict[str, str | None], is_closed: bool
    ) -> list[ToolCall]:
        """Returns the calls in the text between two markers (`body`), at least one; a single call
        with an error if any of them cannot be read, or if the closing marker is missing
        (`is_closed` False). `captured`: the groups of the opening marker's match, such as the
        tool's name. A list of calls counts as these calls."""
        transform = self._field.get("transform", "{content}")
        is_json = self._field["content"] == "json"
        if is_json and "name" in captured and captured["name"] is None:
            transform = "{content}"  # the content has the tool's name, or nothing has
        try:
            if not is_closed:
                raise ValueError("it does not end")
            contents = self._contents(body)
            if isinstance(contents[0], list):
                contents = contents[0] or [None]  # [None]: an empty list, for the error below
            calls = []
            for content in contents:
                values = dict(content) if isinstance(content, dict) else {}
                values |= captured
                values["content"] = content
                call = self._call(_fill_placeholders(transform, values))
                if CALL_ID.fullmatch(captured.get("id") or ""):
                    call = call._replace(id=str(captured["id"]))
                calls.append(call)
            return calls
        except ValueError as error:
            return [_unread(str(error))]

    def _call(self, value: Any) -> ToolCall:
        """Returns the call that an object describes: `{"name": ..., "arguments": {...}}`, or with
        `parameters`, or inside `function` as in OpenAI's messages. Arguments may be missing, or
        JSON in a text. They are converted to the types of the tool's schema; a tool without a
        schema is no error, and its arguments stay as they are. ValueError if the object is not a
        call: without a name, or with arguments that are no object."""
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
        call_id = str(value.get("id", ""))
        return ToolCall(name, typed, id=call_id if CALL_ID.fullmatch(call_id) else "")

    def _contents(self, text: str) -> list[Any]:
        """Returns the values in the text between two markers: one or several JSON values, or, if
        the table has tags (`<parameter=x>1</parameter>`), one object `{"x": "1"}`, whose values are
        texts. ValueError if the text cannot be read, or gives a key twice; without any tag the
        object is {}."""
        if self._field["content"] == "json":
            return _values(self._json(text))
        pairs = []
        position = 0
        # Match tag after tag, so that the end of an unclosed tag is searched for only once.
        match = self._tag.match(text)
        while match:
            position = match.end()
            value = self._markers.spelled(match["value"] or "")
            pairs.append((match["key"].strip(), value))
            match = self._tag.match(text, position)
        # Only one closing tag may follow the last tag, such as `</function>`.
        if not re.fullmatch(r"\s*(?:</\w+>\s*)?", text[position:]):
            begin = self._markers.spelled(text[position : position + 40])
            raise ValueError(f"{begin.strip()!r} is no argument")
        return [_unique(pairs)]

    def _json(self, text: str) -> str:
        """Returns a text as standard JSON: strings in the table's own quotes (`string_delims`) and,
        if it allows them (`unquoted_keys`), keys without quotes get double quotes. Private
        characters become the tokens' texts. Whether the result is valid is not checked."""
        quotes = []
        for begin, end in self._args.get("string_delims", ()):
            for quote in (begin, end):
                quotes.append(re.escape(self._markers.in_pattern(quote)))
        parts = re.split("|".join(quotes), text) if quotes else [text]
        for part_index, part in enumerate(parts):
            is_string = part_index % 2 == 1  # between two quotes
            if is_string:
                parts[part_index] = json.dumps(part)
            elif self._args.get("unquoted_keys"):
                parts[part_index] = _BARE_KEY.sub(_quoted_key, part)
        return self._markers.spelled("".join(parts))


def _quoted_key(match: re.Match[str]) -> str:
    """Returns the replacement for a match of _BARE_KEY: what is before the key (`{` or `,`), the
    key in double quotes, and a colon. Strings, which the pattern matches too so that keys in them
    are skipped, stay as they are."""
    if match[2]:
        return f'{match[1]}"{match[2]}":'
    return match[0]


# A string without an end extends to the end of the text; otherwise each later quote would be tried.
_STRING = r'"(?:[^"\\]|\\.)*"?'
_BARE_KEY = re.compile(rf"{_STRING}|([{{,]\s*)([A-Za-z_][\w.-]*)\s*:", re.DOTALL)
_BRACKET = re.compile(rf"{_STRING}|[\[{{]|[\]}}]", re.DOTALL)
# How templates write Python's values -> JSON.
_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES = {
    int: ("integer", "number"),
    float: ("number",),
    bool: ("boolean",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def _unread(why: str) -> ToolCall:
    """Returns a call with the name "" and no arguments, whose `error` says why it could not be read
    (`why`: a clause, without a point). The error asks the model to write the call again."""
    return ToolCall(
        "",
        {},
        f"The tool call could not be read: {why}. Write it in the form in which tools are called.",
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns pairs (key, value) as a dict; ValueError if a key occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("it gives an argument twice")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _values(text: str) -> list[Any]:
    """Returns the JSON values in a text, in order: `'{"a": 1}; 2'` -> `[{"a": 1}, 2]`. Spaces,
    commas and semicolons may be between them. ValueError if there is none, if one is not valid or
    gives a key twice, for NaN, infinity and half a character, and for a text in which brackets are
    nested deeper than DEEPEST (brackets in strings do not count)."""
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
    # `not values`: an empty text is tried once, for its error
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


def _fill_placeholders(transform: Any, values: Mapping[str, Any]) -> Any:
    """Returns a table's `transform` with each string that is a placeholder, `{name}` or
    `{content.name}`, replaced by that entry of `values`, in the entry's own type. Looks into dicts,
    not into lists; other strings, also those with more around a placeholder, stay as they are.
    ValueError if there is no such entry. `transform` is not changed."""
    if isinstance(transform, dict):
        filled = {}
        for key, value in transform.items():
            filled[key] = _fill_placeholders(value, values)
        return filled
    if not isinstance(transform, str):
        return transform
    placeholder = re.fullmatch(r"\{([\w.]+)\}", transform)
    if not placeholder:
        return transform
    value: Any = values
    for key in placeholder[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"it has no {key}")
        value = value[key]
    return value


def _typed(value: Any, schema: Mapping[str, Any]) -> Any:
    """Converts an argument that came as text to a type that the tool's schema allows: `"2"` -> 2
    for `{"type": "integer"}`. Unchanged are any other argument, a text that is no such value, and
    every text if the schema names no type but `string`; `"2"` becomes 2 even if `string` is allowed
    besides `integer`. A whole number like `2.0` becomes 2 if `integer` is allowed. True, False and
    None may be written like in Python. Of several values in the text the first counts."""
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
    """Returns the names of the JSON types that a schema allows, `{"type": "integer", "nullable":
    true}` -> `{"integer", "null"}`: those of `type` and of the members of `anyOf`, but not deeper;
    an empty set if it names none. Schemas come from users, so any entry may be of any type; what is
    of another form is left out."""
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
