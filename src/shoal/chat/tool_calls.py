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
from itertools import accumulate
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
_THOUGHTS = {
    "open_pattern": r"<think>|<\|channel>",
    "close_pattern": r"</think>|<channel\|>",
}  # calls in them are none


class ToolCall(NamedTuple):
    """A tool call of a turn; `error`, if it could not be read, is the answer to the model."""

    name: str
    arguments: dict[str, Any]
    error: str = ""


class CallReader:
    """Reads the calls of turns. `start`: ids that the chat template begins a turn with, which may
    open a thought."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: str,
        start: Sequence[int] = (),
        schemas: Sequence[dict] = (),
    ):
        self._tokenizer = tokenizer
        self._schemas = {
            tool["function"]["name"]: tool["function"]["parameters"]["properties"]
            for tool in schemas
        }
        table: Any = {
            "fields": {"thoughts": _THOUGHTS, "tool_calls": FORMATS.get(form)},
            "start_anchor_pattern": f".*(?={_THOUGHTS['open_pattern']})",
        }
        table = tokenizer.response_template if form == "template" else table
        # A marker that is one token is a private character in texts and patterns, which no other
        # token decodes to.
        used = json.dumps(table, ensure_ascii=False).replace("\\\\", "").replace('\\"', '"')
        added = sorted(
            (
                (token, id, special)
                for id, (token, special) in tokenizer.added_tokens().items()
                if token in used
            ),
            key=lambda one: -len(one[0]),
        )
        self._marks = {token: chr(0xF0000 + i) for i, (token, _, _) in enumerate(added)}
        self._by_id = {id: self._marks[token] for token, id, _ in added}
        self._tokens = {mark: token for token, mark in self._marks.items()}
        self._decoded = {
            self._marks[token]: "" if special else token for token, _, special in added
        }
        try:
            opening = {
                name: text
                for name, field in table["fields"].items()
                if (text := self._pattern(field, "open"))
            }
            self._opening = re.compile(
                "|".join(f"(?P<_{name}>{text})" for name, text in opening.items()), re.DOTALL
            )
            self._closing = {
                f"_{name}": re.compile(
                    self._pattern(table["fields"][name], "close") or r"\Z", re.DOTALL
                )
                for name in opening
            }
            self._field = table["fields"]["tool_calls"]
            anchor = re.compile(self._pattern(table, "start_anchor") or r"\Z", re.DOTALL)
            self._args = self._field.get("content_args") or {}
            self._tag = re.compile(
                rf"[\s,]*(?:{self._marked(self._args.get('tag_pattern', ''))})", re.DOTALL
            )
            if self._field["content"] != "json" and not (
                self._field["content"] == "xml-inline"
                and {"key", "value"} <= {*self._tag.groupindex}
            ):
                raise ValueError(
                    f"tool_calls with content {self._field['content']!r} are not supported"
                )
        except (KeyError, TypeError, AttributeError, ValueError, re.error) as error:
            key = "environment.call_format"
            raise ShoalError(
                f"The response_template of tokenizer_config.json cannot be used ({error!r}): "
                f"choose {key}=hermes, xml, llama or gemma.",
                key,
            ) from error
        text = self._text(start)
        self._start = text[
            max((match.end() for match in anchor.finditer(text)), default=len(text)) :
        ]

    def read(self, ids: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """The text outside calls, and the calls; a turn without one that can be read is text as a
        whole."""
        whole, text = self._tokenizer.decode(ids), self._start + self._text(ids)
        if len(text) > LONGEST:
            return whole, [_unread(f"the turn is longer than {LONGEST:,} characters")]
        calls: list[ToolCall] = []
        outside: list[str] = []
        at = 0
        while opened := self._opening.search(text, at):
            closed = self._closing[str(opened.lastgroup)].search(text, opened.end())
            body, end = (
                text[opened.end() : closed.start() if closed else None],
                closed.end() if closed else len(text),
            )
            is_call = opened.lastgroup == "_tool_calls"
            made = self._calls(body, opened.groupdict(), closed is not None) if is_call else []
            is_read = bool(made) and not any(call.error for call in made)
            calls += made
            outside.append(text[at : opened.start() if is_read else end])
            if end == at:
                break
            at = end
        content = self._shown(
            "".join([*outside, text[at:]]).removeprefix(self._start), self._decoded
        )
        return content.strip() if any(not call.error for call in calls) else whole, calls

    def _text(self, ids: Sequence[int]) -> str:
        """The text of ids with markers as private characters."""
        parts, at = [], 0
        for i in [*(i for i, id in enumerate(ids) if id in self._by_id), len(ids)]:
            parts.append(_PRIVATE.sub("\ufffd", self._tokenizer.decode(ids[at:i])))
            parts += [self._by_id[ids[i]]] if i < len(ids) else []
            at = i + 1
        return "".join(parts)

    def _shown(self, text: str, tokens: Mapping[str, str] | None = None) -> str:
        return _PRIVATE.sub(lambda match: (tokens or self._tokens)[match[0]], text)

    def _marked(self, pattern: str) -> str:
        for token, mark in self._marks.items():
            pattern = pattern.replace(token, mark).replace(re.escape(token), mark)
        return pattern

    def _pattern(self, field: Mapping[str, Any], name: str) -> str:
        literals = [field[name]] if isinstance(field.get(name), str) else field.get(name, [])
        text = "|".join(map(re.escape, sorted(literals, key=len, reverse=True)))
        return self._marked(text or field.get(f"{name}_pattern", ""))

    def _calls(self, body: str, captured: dict[str, str], is_closed: bool) -> list[ToolCall]:
        form = self._field.get("transform", "{content}")
        try:
            if not is_closed:
                raise ValueError("it does not end")
            contents = self._contents(body)
            contents = contents[0] or [None] if isinstance(contents[0], list) else contents
            return [
                self._call(
                    _filled(
                        form,
                        {
                            **(content if isinstance(content, dict) else {}),
                            **captured,
                            "content": content,
                        },
                    )
                )
                for content in contents
            ]
        except ValueError as error:
            return [_unread(str(error))]

    def _call(self, value: Any) -> ToolCall:
        value = value.get("function", value) if isinstance(value, dict) else {}
        value = value if isinstance(value, dict) else {}
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters")) or {}
        if not isinstance(name, str) or not name.strip():
            raise ValueError("it has no name")
        if isinstance(arguments, str):  # as in OpenAI's messages
            arguments = _values(arguments)[0]
        if not isinstance(arguments, dict):
            raise ValueError("its arguments are no object")
        schemas = self._schemas.get(name.strip(), {})
        return ToolCall(
            name.strip(), {key: _typed(one, schemas.get(key, {})) for key, one in arguments.items()}
        )

    def _contents(self, text: str) -> list[Any]:
        """The values of a region's text: JSON, one or several, or one object of tags."""
        if self._field["content"] == "json":
            # JSON's own strings may have other quotes, and its keys none; every second part is the
            # inside of a string.
            quotes = [
                re.escape(self._marked(quote))
                for pair in self._args.get("string_delims", ())
                for quote in pair
            ]
            parts = re.split("|".join(quotes), text) if quotes else [text]
            if self._args.get("unquoted_keys"):
                parts[::2] = [
                    _BARE_KEY.sub(lambda m: f'{m[1]}"{m[2]}":' if m[2] else m[0], one)
                    for one in parts[::2]
                ]
            parts[1::2] = map(json.dumps, parts[1::2])
            return _values(self._shown("".join(parts)))
        at, pairs = 0, []
        while match := self._tag.match(
            text, at
        ):  # one after the other, so that a missing end is searched for once
            at = match.end()
            pairs.append((match["key"].strip(), self._shown(match["value"] or "")))
        if not re.fullmatch(r"\s*(?:</\w+>\s*)?", text[at:]):
            raise ValueError(f"{self._shown(text[at : at + 40]).strip()!r} is no argument")
        return [_unique(pairs)]


_PRIVATE = re.compile("[\U000f0000-\U000f0fff]")
# one without an end goes on to the end, else each later quote would be tried
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
    if len(dict(pairs)) < len(pairs):
        raise ValueError("it gives an argument twice")
    return dict(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _values(text: str) -> list[Any]:
    """The JSON values in a text, one after the other; ValueError for none, for NaN, and for what is
    nested too deep."""
    steps = ({"[": 1, "{": 1, "]": -1, "}": -1}.get(part, 0) for part in _BRACKET.findall(text))
    if max(accumulate(steps), default=0) > DEEPEST:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    values, at = [], len(text) - len(text.lstrip())
    while at < len(text) or not values:
        try:
            value, at = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"it is no valid JSON, {error.msg} at character {error.pos}"
            ) from error
        values.append(value)
        while at < len(text) and text[at] in " \t\r\n;,":
            at += 1
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ValueError("it holds NaN, an infinite number or half a character") from error
    return values


def _filled(form: Any, values: Mapping[str, Any]) -> Any:
    """A table's `transform` with its placeholders `{name}` and `{content.name}` replaced."""
    if isinstance(form, dict):
        return {key: _filled(one, values) for key, one in form.items()}
    placeholder = re.fullmatch(r"\{([\w.]+)\}", form) if isinstance(form, str) else None
    value: Any = values if placeholder else form
    for key in placeholder[1].split(".") if placeholder else ():
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"it has no {key}")
        value = value[key]
    return value


def _typed(value: Any, schema: Mapping[str, Any]) -> Any:
    """An argument that came as text in another type that the tool's schema allows; else as it
    is."""
    others = schema.get("anyOf")  # by strangers, perhaps: it may be anything
    allowed = [
        schema,
        *(others if isinstance(others, list) else ()),
        {"type": ["null"] * bool(schema.get("nullable"))},
    ]
    types = [one.get("type") for one in allowed if isinstance(one, Mapping)]
    names = {
        name
        for one in types
        for name in (one if isinstance(one, list) else [one])
        if isinstance(name, str)
    }
    if not isinstance(value, str) or not names - {"string"}:
        return value
    try:
        read = _values(_WORDS.get(value.strip(), value))[0]
    except ValueError:
        return value
    read = (
        int(read) if isinstance(read, float) and read.is_integer() and "integer" in names else read
    )
    return read if names & {*_TYPES.get(type(read), ())} else value
