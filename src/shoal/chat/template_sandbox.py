"""The sandbox in which chat templates are rendered: Jinja's immutable one, with limits.

A template comes with a checkpoint and is untrusted code. Jinja's sandbox keeps it from Python's
attributes. `TemplateSandbox` also limits what one rendering may use:

| limit | of what | checked |
| --- | --- | --- |
| MOST_ROUNDS, RENDER_SECONDS | rounds of loops and calls of macros | at the start of each of them |
| MOST_CHARACTERS | one text, list or number | before the operator, filter or method that makes it |
| MOST_CHARACTERS | all written text | when Jinja writes a value, and when it joins the pieces |
| MOST_BYTES | all texts and lists together | after each was made |

Jinja lets a sandbox intercept filters, calls, `+`, `*`, `**` and `%`. It does not let it intercept
loops, macros, `~`, slices, and lists and dicts that are spelled out: before a template is compiled,
calls of the sandbox's own methods are put into its syntax tree there.

Beyond a limit everything here raises jinja2.TemplateError.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

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


# ---- what a rendering has used


class _Usage(threading.local):
    """What the current rendering of this thread has used."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Sets all counts to 0 and the deadline to RENDER_SECONDS from now."""
        self.num_rounds = 0
        self.num_written = 0  # characters
        self.num_bytes = 0
        self.deadline = time.monotonic() + RENDER_SECONDS


_usage = _Usage()


def begin_rendering() -> None:
    """Gives this thread the whole limits again, for a new rendering."""
    _usage.reset()


def _check_size(size: int) -> None:
    """Raises jinja2.TemplateError if a text or list would have more than MOST_CHARACTERS characters
    or entries."""
    if size > MOST_CHARACTERS:
        raise jinja2.TemplateError(
            f"it makes a text or a list of more than {MOST_CHARACTERS:,} characters or entries"
        )


def _count_memory(value: Any) -> Any:
    """Counts the memory of a text, list, tuple or dict that a template has made: a byte for each
    character, _ENTRY_BYTES for each entry (what is in an entry was counted when it was made).
    Returns the value itself. Raises jinja2.TemplateError if the rendering has made more than
    MOST_BYTES together. Any other value counts nothing."""
    if isinstance(value, str):
        _usage.num_bytes += len(value)
    elif isinstance(value, list | tuple | dict):
        _usage.num_bytes += _ENTRY_BYTES * len(value)
    if _usage.num_bytes > MOST_BYTES:
        raise jinja2.TemplateError(f"its texts and lists take more than {MOST_BYTES >> 20:,} MiB")
    return value


def _written_text(value: Any) -> str:
    """Returns the text that Jinja writes for a value, its `str`, after counting its characters.
    Raises jinja2.TemplateError if all values that the rendering has written, not this one alone,
    have more than MOST_CHARACTERS."""
    text = str(value)
    _usage.num_written += len(text)
    _check_size(_usage.num_written)
    return text


# ---- the sandbox


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment for untrusted templates; see the module for its limits.

    extensions  Jinja's, which add statements
    filters     name -> filter, in addition to Jinja's own
    functions   name -> function that templates may call, in addition to Jinja's own
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))  # Jinja calls `call_binop` for these

    def __init__(
        self,
        extensions: Sequence[str | type[Extension]],
        filters: Mapping[str, Callable[..., Any]],
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:
        """Adds `extensions`, and `filters` and `functions` (name -> function), to Jinja's own. All
        filters, Jinja's and these, get a limit; functions get none. Jinja's function `lipsum` is
        removed."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_written_text,  # Jinja calls it with each value that it writes
            extensions=extensions,
        )
        self.filters.update(filters)
        for name, function in self.filters.items():
            self.filters[name] = _limited_filter(name, function)
        self.globals.update(functions)
        del self.globals["lipsum"]  # it makes pages of text

    def compile_tree(self, tree: nodes.Template) -> jinja2.Template:
        """Compiles a parsed template, whose syntax tree it changes in place: loops and macros call
        `count_round` at the start of each round or call, `a ~ b` becomes a call of `joined_text`,
        and lists, dicts and slices become arguments of `counted`."""
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            node.body.insert(0, nodes.ExprStmt(_call("count_round", [])))
            if isinstance(node, nodes.For) and node.test is not None:
                # `for ... if test`: the rounds that the test leaves out count too.
                node.test = nodes.And(_call("count_round", []), node.test)
        _CountMemory().visit(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    # Called by compiled templates, at the places where `compile_tree` has put the calls.

    def count_round(self) -> bool:
        """Counts a round of a loop or a call of a macro. Returns True, so that it can be a part of
        a loop's condition. Raises jinja2.TemplateError after MOST_ROUNDS of them, or if the
        rendering has taken more than RENDER_SECONDS."""
        _usage.num_rounds += 1
        if _usage.num_rounds > MOST_ROUNDS or time.monotonic() > _usage.deadline:
            raise jinja2.TemplateError(
                f"it loops: more than {MOST_ROUNDS:,} rounds, or {RENDER_SECONDS:.0f} s"
            )
        return True

    def joined_text(self, *values: Any) -> str:
        """Returns the texts of values joined, like Jinja's `~`, within the limits of `concat`."""
        return self.concat(map(str, values))

    def counted(self, value: Any) -> Any:
        """Counts the memory of a list, dict or slice, and returns it."""
        return _count_memory(value)

    # Called by Jinja.

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Joins the pieces of a rendering, or of a block in it, and counts the result's memory. All
        pieces count towards MOST_CHARACTERS, because a template's own text does not go through
        `finalize`. Raises jinja2.TemplateError at the first piece beyond it."""
        kept = []
        size = 0
        for piece in pieces:
            size += len(piece)
            _check_size(size)
            kept.append(piece)
        return _count_memory("".join(kept))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function for the template. A method of a text, such as `"a".center(9)`, is called
        only if its result is within the limit (else jinja2.TemplateError), and the memory of the
        result is counted; nothing of this is done for other functions. Jinja's sandbox decides
        which functions may be called at all. `context`: Jinja's state of the rendering."""
        positional = list(args)
        text = getattr(function, "__self__", None)
        is_method_of_text = isinstance(text, str)
        if is_method_of_text:
            name = getattr(function, "__name__", "")
            if name == "join" and positional:  # `text` is the separator
                parts = list(positional[0])  # a generator's length is known only when it is read
                positional[0] = parts
                _check_join(text, parts)
            else:
                _check_result(name, text, positional + list(kwargs.values()))
        result = super().call(context, function, *positional, **kwargs)
        return _count_memory(result) if is_method_of_text else result

    def wrap_str_format(self, value: Any) -> Any:
        """Returns the method `format` or `format_map` of a text with a check of the widths that its
        text asks for; None for any other value. Jinja calls it when a template looks a method
        up."""
        format_method = super().wrap_str_format(value)
        if format_method is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            """Formats the text if none of its widths is beyond the limit."""
            values = list(args) + list(kwargs.values())
            if args and isinstance(args[0], Mapping):  # format_map
                values += args[0].values()
            _check_format(value.__self__, values)
            return format_method(*args, **kwargs)

        return functools.update_wrapper(limited, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes and returns `left + right`, `*`, `**` or `%` (`operator`), if the result is
        within the limit; else raises jinja2.TemplateError. Counts the memory of the result. `%` is
        checked only if `left` is a text, which it formats."""
        if operator == "+":
            _check_sum(left, right)
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif isinstance(left, str):  # "%" formats a text
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return _count_memory(super().call_binop(context, operator, left, right))


def _call(method: str, arguments: list[nodes.Expr], line: int | None = None) -> nodes.Call:
    """Returns the syntax tree of a call of the sandbox's method of this name. `line`: of the
    template, for messages; None for none."""
    function = nodes.EnvironmentAttribute(method)
    # [], None, None: no arguments by name, no *args, no **kwargs
    return nodes.Call(function, arguments, [], None, None, lineno=line)


class _CountMemory(NodeTransformer):
    """Replaces `a ~ b` in a syntax tree by a call of the sandbox's `joined_text`, and puts lists,
    dicts and slices into calls of `counted`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return self.generic_visit(_call("joined_text", node.nodes, node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._counted(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._counted(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        if isinstance(node.arg, nodes.Slice):
            return self._counted(node)
        return self.generic_visit(node)

    def _counted(self, node: nodes.Expr) -> nodes.Node:
        """Returns a call of `counted` with this expression, whose parts are changed first."""
        changed = self.generic_visit(node)
        assert isinstance(changed, nodes.Expr)
        return _call("counted", [changed], node.lineno)


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that calls `function`, the filter `name`, only if its result is within the
    limit; else it raises jinja2.TemplateError. The memory of the result is counted, except of
    filters in _PASSING_ON."""
    # Some filters get the context, the environment or its state before the value.
    value_position = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        """Calls the filter if its result is within the limit. `args`: the value, perhaps behind
        Jinja's context, then the filter's own arguments."""
        positional = list(args)
        value = positional[value_position]
        arguments = positional[value_position + 1 :]
        if name == "join":
            parts = list(value)  # a generator's length is known only when it is read
            positional[value_position] = parts
            separator = arguments[0] if arguments else ""
            _check_join(kwargs.get("d", separator), parts)  # `d`: Jinja's name of the separator
        else:
            _check_result(name, value, arguments + list(kwargs.values()))
        result = function(*positional, **kwargs)
        return result if name in _PASSING_ON else _count_memory(result)

    return limited


_PASSING_ON = ("attr", "d", "default", "first", "last", "max", "min", "random")
"""Filters that return their value, or a part of it, and so take no further memory."""


# ---- how large a result would be


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


def _check_result(name: str, value: Any, arguments: Sequence[Any]) -> None:
    """Raises jinja2.TemplateError if the filter or text method `name` would make too large a result
    of a value and further arguments. The size is estimated from these, and nothing is computed.
    Names that can make no large result pass; so does `join`, for which there is `_check_join`."""
    largest = 0  # the largest number among the arguments, or the longest text's length
    for argument in arguments:
        largest = max(largest, abs(_amount(argument)))
    if name in _WIDENERS:
        _check_size(_WIDENERS[name] * largest)
        return
    if name == "sum" and isinstance(value, list | tuple):
        # Lists are summed to one list.
        _check_size(sum(len(item) for item in value if isinstance(item, list | tuple)))
        return
    if not isinstance(value, str):
        return
    if name == "indent":
        _check_size(largest * (value.count("\n") + 1))
    elif name == "expandtabs":
        _check_size(largest * value.count("\t"))
    elif name == "replace" and len(arguments) > 1:
        _check_size(value.count(str(arguments[0])) * abs(_amount(arguments[1])))
    elif name == "translate":
        _check_size(len(value) * _longest_text(arguments[0].values()))
    elif name == "wordwrap":
        _check_size(len(value) * _longest_text(arguments))
    elif name == "format":
        _check_format(value, arguments)


def _check_join(separator: Any, parts: Sequence[Any]) -> None:
    """Raises jinja2.TemplateError if the joined text would exceed the limit. Parts that are no
    texts, which a filter turns into some, count as empty."""
    size = len(parts) * len(str(separator))
    for part in parts:
        if isinstance(part, str):
            size += len(part)
    _check_size(size)


_FORMAT_SPEC = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.*]*|\{[^{}]*")
"""Matches `%(name)8.3` or `{name:>8.3`, the parts of a format that may have numbers."""
_NESTED_SPEC = re.compile(r"\{[^{}]*\{")
"""Matches a format whose width is a value, as in `{:{}}`."""
_NUMBER = re.compile(r"\d{1,20}")


def _check_format(text_format: str, values: Iterable[Any]) -> None:
    """Raises jinja2.TemplateError if a format of texts asks for a width beyond the limit:
    as a number, as in `"%1000000d"`, or as one of the `values`, as in `"%*d"` and `"{:{}}"`; in the
    second case no value may be beyond the limit, nor a text among them longer."""
    for spec in _FORMAT_SPEC.findall(text_format):
        for number in _NUMBER.findall(spec):
            _check_size(int(number))
    if "*" in text_format or _NESTED_SPEC.search(text_format):
        for value in values:
            _check_size(abs(_amount(value)))


def _check_sum(left: Any, right: Any) -> None:
    """Raises jinja2.TemplateError if `left + right` would be too long a text or list."""
    if _has_length(left) or _has_length(right):
        _check_size(_amount(left) + _amount(right))


def _check_product(left: Any, right: Any) -> None:
    """Raises jinja2.TemplateError if `left * right` would be too long a text, list or number."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    elif _has_length(left) or _has_length(right):
        _check_size(_amount(left) * _amount(right))


def _check_power(left: Any, right: Any) -> None:
    """Raises jinja2.TemplateError if `left ** right` would be too long a number, or is of whole
    numbers whose product exceeds MOST_CHARACTERS. Fractions pass."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)
    _check_size(_amount(left) * _amount(right))


def _check_bits(num_bits: int) -> None:
    """Raises jinja2.TemplateError for a whole number of more than MOST_CHARACTERS / 64 bits, since
    products of such numbers take seconds."""
    _check_size(num_bits << 6)


def _has_length(value: Any) -> bool:
    """True for a text, list or tuple."""
    return isinstance(value, str | list | tuple)


def _amount(value: Any) -> int:
    """Returns a whole number as it is (also a negative one), the length of a text, list or tuple,
    and 0 for anything else, such as a float."""
    if isinstance(value, int):
        return value
    return len(value) if _has_length(value) else 0


def _longest_text(values: Iterable[Any]) -> int:
    """Returns the length of the longest text among values; 0 if there is none."""
    longest = 0
    for value in values:
        if isinstance(value, str):
            longest = max(longest, len(value))
    return longest
