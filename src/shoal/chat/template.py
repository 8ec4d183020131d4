"""Chat templates: compiled in Jinja's immutable sandbox, and rendered on plain data within limits.

A template comes with a checkpoint and is untrusted code. The sandbox keeps it from Python's
attributes; this module limits its loops, its time, the text that it writes and the memory of the
texts and lists that it makes. The names that a template may use are those of
https://huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from shoal.records import ShoalError

GENERATION = {
    "generation_begins": "\ue0f1GENERATION\ue0f1",
    "generation_ends": "\ue0f2GENERATION\ue0f2",
}
"""Variable -> the mark that is written where a template's `generation` block begins or ends. The
variables are undefined, and so write nothing, unless a rendering asks for the marks."""

MOST_ROUNDS = 300_000
"""The most rounds of loops and calls of macros in one rendering."""

RENDER_SECONDS = 30.0
"""The longest time of one rendering."""

MOST_CHARACTERS = 1 << 26
"""The most characters or entries of one text or list that a template makes, and the most characters
of all that it writes."""

MOST_BYTES = 1 << 30
"""The most memory of all texts and lists that one rendering makes together, since it could keep
each of them."""

_ENTRY_BYTES = 8


class _Usage(threading.local):
    """How much of the limits the current rendering of this thread has used."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Resets the counts, at the beginning of a rendering."""
        self.rounds = 0
        self.characters_written = 0
        self.bytes_made = 0
        self.deadline = time.monotonic() + RENDER_SECONDS

    def count_round(self) -> None:
        """Counts one round of a loop or call of a macro; jinja2.TemplateError beyond the limits of
        rounds and time."""
        self.rounds += 1
        if self.rounds > MOST_ROUNDS or time.monotonic() > self.deadline:
            raise jinja2.TemplateError(
                f"it loops: more than {MOST_ROUNDS:,} rounds, or {RENDER_SECONDS:.0f} s"
            )

    def count_memory(self, value: Any) -> Any:
        """Counts the memory of a text or list that a template made, and returns it unchanged;
        jinja2.TemplateError beyond the limit."""
        if isinstance(value, str):
            self.bytes_made += len(value)
        elif isinstance(value, list | tuple | dict):
            self.bytes_made += _ENTRY_BYTES * len(value)
        if self.bytes_made > MOST_BYTES:
            raise jinja2.TemplateError(
                f"its texts and lists take more than {MOST_BYTES >> 20:,} MiB"
            )
        return value

    def written_text(self, value: Any) -> str:
        """Returns the text that Jinja writes for a value, and counts its characters."""
        text = str(value)
        self.characters_written += len(text)
        _check_size(self.characters_written)
        return text


_usage = _Usage()


def compile_template(
    template: str, date: datetime | None = None, name: str = "The chat template"
) -> jinja2.Template:
    """Compiles a chat template for `render_template`. Its rendering is sandboxed: it has no access
    to Python's attributes, and is limited in rounds, time, text and memory.

    `date`: the date that `strftime_now` writes; None for the time of rendering. `name`: how error
    messages call the template. ShoalError if it is not valid Jinja, or does not use `messages`.
    """

    def strftime_now(form: str) -> str:
        return (date or datetime.now()).strftime(form)

    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_usage.written_text,
        extensions=[_Generation, _Bounded, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    for filter_name, filter_function in environment.filters.items():
        environment.filters[filter_name] = _bounded_filter(filter_name, filter_function)
    del environment.globals["lipsum"]  # it makes pages of text
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        bounded: Any = environment.extensions[_Bounded.identifier]
        compiled = environment.from_string(bounded.bound(environment.parse(template)))
        names = {node.name for node in environment.parse(template).find_all(nodes.Name)}
    except jinja2.TemplateError as error:
        raise ShoalError(f"{name} is not valid Jinja: {error}", "model.template") from error
    if "messages" not in names:
        # It may be a file of data: every prompt would then be this text.
        raise ShoalError(
            f"{name} {template[:40]!r} does not use `messages`, so it is none: every prompt "
            "would be the same; expected a Jinja template, as in a model's chat_template.jinja",
            "model.template",
        )
    return compiled


def render_template(template: jinja2.Template, **variables: Any) -> str:
    """Renders a compiled template and returns the text. Raises whatever the template raises, and
    jinja2.TemplateError if it exceeds a limit."""
    _usage.begin()
    return template.render(**variables)


def plain_data(value: Any) -> Any:
    """Returns a value as plain data that an untrusted template may see: JSON types; NumPy values
    become JSON types, and any other object its text."""

    def default(item: Any) -> Any:
        """Returns what JSON is to write for an object that it does not know."""
        if isinstance(item, Mapping):
            return dict(item)
        if isinstance(item, np.generic | np.ndarray):
            return item.tolist()
        return str(item)

    return json.loads(json.dumps(value, default=default))


# What templates may call


def _raise_exception(message: str) -> None:
    """Raises an error with a template's message."""
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns a value as JSON without the HTML escapes of Jinja's own filter, like transformers."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    """Reads `{% generation %} ... {% endgeneration %}`, which marks the assistant's text: writes
    the block's body, between the two marks of GENERATION if the rendering asks for them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """Reads the body of a block, and returns it between two variables that write the marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begins, ends = GENERATION
        begin = nodes.Output([nodes.Name(begins, "load")], lineno=line)
        end = nodes.Output([nodes.Name(ends, "load")], lineno=line)
        return nodes.Scope([begin, *body, end], lineno=line)


# Limits of a template: its syntax tree is changed so that it counts


class _Bounded(Extension):
    """Rewrites a template's syntax tree so that its loops and macros count their rounds, and the
    texts and lists that it makes are measured."""

    def bound(self, template: nodes.Template) -> nodes.Template:
        """Rewrites a template in place and returns it."""
        count = self._call("count")
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            node.body.insert(0, nodes.ExprStmt(count))
            if isinstance(node, nodes.For) and node.test is not None:
                # The rounds that a condition leaves out count too.
                node.test = nodes.And(self._call("counts"), node.test)
        concatenate = nodes.ExtensionAttribute(self.identifier, "concatenate")
        measured = nodes.ExtensionAttribute(self.identifier, "measured")
        _Measure(concatenate, measured).visit(template)
        template.set_environment(self.environment)
        return template

    def _call(self, method: str) -> nodes.Call:
        """Returns the node of a call of one of the methods below."""
        return nodes.Call(nodes.ExtensionAttribute(self.identifier, method), [], [], None, None)

    # Called by rendered templates, by their names.

    def concatenate(self, *values: Any) -> str:
        """Joins values to a text, like Jinja's `~`; counts its memory."""
        texts = [str(value) for value in values]
        _check_size(sum(len(text) for text in texts))
        return _usage.count_memory("".join(texts))

    def measured(self, value: Any) -> Any:
        """Returns a value after counting its memory."""
        return _usage.count_memory(value)

    def count(self) -> None:
        """Counts a round."""
        _usage.count_round()

    def counts(self) -> bool:
        """Counts a round and returns True, as part of a loop's condition."""
        _usage.count_round()
        return True


class _Measure(NodeTransformer):
    """Replaces `a ~ b` by a call of `concatenate`, and wraps lists, dicts and slices in calls of
    `measured`."""

    def __init__(self, concatenate: nodes.Expr, measured: nodes.Expr) -> None:
        self.concatenate = concatenate
        self.measured = measured

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        call = nodes.Call(self.concatenate, node.nodes, [], None, None, lineno=node.lineno)
        return self.generic_visit(call)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._measure(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._measure(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        if isinstance(node.arg, nodes.Slice):
            return self._measure(node)
        return self.generic_visit(node)

    def _measure(self, node: nodes.Expr) -> nodes.Node:
        inner = self.generic_visit(node)
        return nodes.Call(self.measured, [inner], [], None, None, lineno=node.lineno)


# Limits of a call: refused before it makes a text or list of unlimited size


def _check_size(size: int) -> None:
    """Raises jinja2.TemplateError if a text or list would have more than MOST_CHARACTERS characters
    or entries."""
    if size > MOST_CHARACTERS:
        raise jinja2.TemplateError(
            f"it makes a text or a list of more than {MOST_CHARACTERS:,} characters or entries"
        )


_WIDENERS = {
    "center": 1,
    "ljust": 1,
    "rjust": 1,
    "zfill": 1,
    "batch": 64,
    "slice": 64,
    "tojson": 1 << 20,
}
"""Methods of texts, and filters, whose result grows with a number among their arguments -> by how
much for each unit of that number: bytes, or for `tojson`, which indents each entry, the entries."""

_PASSING_ON = ("attr", "d", "default", "first", "last", "max", "min", "random")
"""Filters that return what they were given, or a part of it, and so take no further memory."""

_FORMAT_SPEC = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.*]*|\{[^{}]*")
_NESTED_SPEC = re.compile(r"\{[^{}]*\{")
_NUMBER = re.compile(r"\d{1,20}")


def _check_call(name: str, value: Any, arguments: Sequence[Any]) -> None:
    """Raises jinja2.TemplateError if the result of a method of a text, or of a filter, would exceed
    the limit. The call has not been made yet."""
    longest = max((_size(argument) for argument in arguments), default=0)
    if name in _WIDENERS:
        _check_size(_WIDENERS[name] * longest)
        return
    if name == "sum" and isinstance(value, list | tuple):
        _check_size(sum(len(item) for item in value if isinstance(item, list | tuple)))
        return
    if not isinstance(value, str):
        return
    if name == "indent":
        _check_size(longest * (value.count("\n") + 1))
    elif name == "expandtabs":
        _check_size(longest * value.count("\t"))
    elif name == "replace" and len(arguments) > 1:
        _check_size(value.count(str(arguments[0])) * _size(arguments[1]))
    elif name == "translate":
        _check_size(len(value) * _longest_text(arguments[0].values()))
    elif name == "wordwrap":
        _check_size(len(value) * _longest_text(arguments))
    elif name == "format":
        _check_format(value, arguments)


def _check_join(separator: Any, parts: Sequence[Any]) -> None:
    """Raises jinja2.TemplateError if the joined text would exceed the limit."""
    length_of_texts = sum(len(part) for part in parts if isinstance(part, str))
    _check_size(length_of_texts + len(parts) * len(str(separator)))


def _check_format(form: str, values: Sequence[Any]) -> None:
    """Raises jinja2.TemplateError if a width in a format exceeds the limit; the width may also be
    among the values, as in `"%*d"`."""
    for spec in _FORMAT_SPEC.findall(form):
        widths = [int(number) for number in _NUMBER.findall(spec)]
        _check_size(max(widths, default=0))
    if "*" in form or _NESTED_SPEC.search(form):
        _check_size(max((_size(value) for value in values), default=0))


def _size(value: Any) -> int:
    """Returns the length of a text or list; the absolute value of a number; 0 for anything else."""
    if isinstance(value, int):
        return abs(value)
    if isinstance(value, str | list | tuple):
        return len(value)
    return 0


def _longest_text(values: Iterable[Any]) -> int:
    """Returns the length of the longest text among values; 0 if there is none."""
    return max((len(value) for value in values if isinstance(value, str)), default=0)


def _bounded_filter(name: str, filter_function: Any) -> Any:
    """Returns one of Jinja's filters with a check that refuses to make what exceeds the limit."""
    # Some filters take the context or the environment first.
    num_leading = 1 if getattr(filter_function, "jinja_pass_arg", None) is not None else 0

    @functools.wraps(filter_function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        leading = args[:num_leading]
        value, *arguments = args[num_leading:]
        if name == "join":
            value = list(value)  # the length of a generator is known only when it is read
            separator = arguments[0] if arguments else ""
            _check_join(kwargs.get("d", separator), value)
        else:
            _check_call(name, value, [*arguments, *kwargs.values()])
        result = filter_function(*leading, value, *arguments, **kwargs)
        if name in _PASSING_ON:
            return result
        return _usage.count_memory(result)

    return bounded


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with a limit on what an operator, a filter or a method of a text
    makes: `"a" * 10**12` would be a text of 1 TB."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Joins the pieces of a rendering; counts them all, since literal text does not go through
        `finalize`."""
        kept = []
        size = 0
        for piece in pieces:
            size += len(piece)
            _check_size(size)
            kept.append(piece)
        return _usage.count_memory("".join(kept))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function for the template; a method of a text is checked before, and its result
        counted."""
        text = getattr(function, "__self__", None)
        if not isinstance(text, str):
            return super().call(context, function, *args, **kwargs)
        name = getattr(function, "__name__", "")
        if name == "join" and args:
            parts = list(args[0])
            args = (parts, *args[1:])
            _check_join(text, parts)
        _check_call(name, text, [*args, *kwargs.values()])
        return _usage.count_memory(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """Returns the method `format` of a text with a check of its widths; None for any other
        function."""
        # Jinja calls this where the method is looked up, for its own check.
        format_method = super().wrap_str_format(value)
        if format_method is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            values = [*args, *kwargs.values()]
            if args and isinstance(args[0], Mapping):  # format_map
                values += args[0].values()
            _check_format(value.__self__, values)
            return format_method(*args, **kwargs)

        return functools.update_wrapper(bounded, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes `+`, `*`, `**` or `%`, after checking the size of its result."""
        is_text_or_list = isinstance(left, str | list | tuple) or isinstance(
            right, str | list | tuple
        )
        if operator == "%":
            if isinstance(left, str):
                _check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+":
            if is_text_or_list:
                _check_size(_factor(left) + _factor(right))
        else:  # "*" or "**"
            if isinstance(left, int) and isinstance(right, int):
                if operator == "**":
                    bits = left.bit_length() * right
                else:
                    bits = left.bit_length() + right.bit_length()
                _check_size(bits << 6)  # products of longer numbers take seconds
            if is_text_or_list or operator == "**":
                _check_size(_factor(left) * _factor(right))
        return _usage.count_memory(super().call_binop(context, operator, left, right))


def _factor(operand: Any) -> int:
    """Returns the length of a text or list; a number itself; 0 for anything else."""
    if isinstance(operand, str | list | tuple):
        return len(operand)
    if isinstance(operand, int):
        return operand
    return 0
