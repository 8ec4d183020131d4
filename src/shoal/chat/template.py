"""Chat templates: compiled for the sandbox of `template_sandbox`, and rendered on plain data.

The names that a template may use are those of
https://huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension

from shoal.chat.template_sandbox import TemplateSandbox, begin_rendering
from shoal.records import ShoalError

GENERATION = {
    "generation_begins": "\ue0f1GENERATION\ue0f1",
    "generation_ends": "\ue0f2GENERATION\ue0f2",
}
"""Variable -> the mark that is written where a template's `generation` block begins or ends. The
variables are undefined, and so write nothing, unless a rendering asks for the marks."""

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The roles of special tokens that every tokenizer may have."""

GIVEN_NAMES = {
    *("messages", "tools", "documents", "add_generation_prompt"),
    *SPECIAL_TOKENS,
    *GENERATION,
}
"""The variables that every rendering of a chat template gives it."""


def compile_template(
    template: str, date: datetime | None = None, name: str = "The chat template"
) -> jinja2.Template:
    """Compiles the text of a chat template for `render_template`.

    `date`: the date that `strftime_now` writes; None for the time of rendering. `name`: how error
    messages call the template; they begin with it. Nothing is rendered. ShoalError if it is not
    valid Jinja, or does not use the name `messages` anywhere.
    """
    sandbox = _sandbox(date)
    tree = _parse(sandbox, template, name)
    names = {node.name for node in tree.find_all(nodes.Name)}
    try:
        compiled = sandbox.compile_tree(tree)
    except jinja2.TemplateError as error:
        raise _invalid(name, error) from error
    if "messages" not in names:
        # It may be a file of data: every prompt would then be this text.
        raise ShoalError(
            f"{name} {template[:40]!r} does not use `messages`, so it is not a chat template: "
            "every prompt would be the same; expected a Jinja template, as in a model's "
            "chat_template.jinja",
            "model.template",
        )
    return compiled


def variables_read(template: str) -> set[str]:
    """Returns the names of the variables that a chat template reads without setting them first,
    except those that every rendering gives it. ShoalError if it is not valid Jinja."""
    sandbox = _sandbox(None)
    tree = _parse(sandbox, template, "The chat template")
    return jinja2.meta.find_undeclared_variables(tree) - GIVEN_NAMES - set(sandbox.globals)


def _sandbox(date: datetime | None) -> TemplateSandbox:
    """Returns a sandbox with what chat templates may call besides Jinja's own; `date` as in
    `compile_template`."""

    def strftime_now(format: str) -> str:
        return (date or datetime.now()).strftime(format)

    return TemplateSandbox(
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        filters={"tojson": _to_json},
        functions={"raise_exception": _raise_exception, "strftime_now": strftime_now},
    )


def _parse(sandbox: TemplateSandbox, template: str, name: str) -> nodes.Template:
    """Returns the syntax tree of a template; ShoalError if it is not valid Jinja."""
    try:
        return sandbox.parse(template)
    except jinja2.TemplateError as error:
        raise _invalid(name, error) from error


def _invalid(name: str, error: jinja2.TemplateError) -> ShoalError:
    return ShoalError(f"{name} is not valid Jinja: {error}", "model.template")


def render_template(template: jinja2.Template, **variables: Any) -> str:
    """Renders a compiled template and returns the text. Raises whatever the template raises, and
    jinja2.TemplateError if it exceeds a limit of the sandbox."""
    begin_rendering()
    return template.render(variables)


def plain_data(value: Any) -> Any:
    """Returns a copy of a value in JSON's types, as an untrusted template may see it: NumPy's
    numbers and arrays become numbers and lists, mappings dicts, tuples lists, and an object of any
    other class its `str`. Keys become texts; TypeError for a key that is no text, number, bool or
    None. NaN and infinity stay."""

    def default(item: Any) -> Any:
        """Returns what to write for an object that JSON does not know."""
        if isinstance(item, Mapping):
            return dict(item)
        if isinstance(item, np.generic | np.ndarray):
            return item.tolist()
        return str(item)

    return json.loads(json.dumps(value, default=default))


# ---- what templates may use


def _raise_exception(message: str) -> None:
    """Raises jinja2.TemplateError with a template's own message."""
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`: returns a value as JSON without the HTML escapes of Jinja's own filter,
    like transformers. The arguments are those of `json.dumps`."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _GenerationBlock(Extension):
    """The block `{% generation %} ... {% endgeneration %}`, which marks the assistant's text. It
    writes its body, between the two marks of GENERATION if the rendering asks for them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """Parses a block, whose first word is the parser's next token, to its end. Returns the
        syntax tree of its body, with the two variables of GENERATION written before and after it.
        Jinja calls it."""
        line = next(parser.stream).lineno
        # Up to the word `endgeneration`, which drop_needle removes from the stream.
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begins, ends = GENERATION  # the variables' names
        body.insert(0, nodes.Output([nodes.Name(begins, "load")], lineno=line))
        body.append(nodes.Output([nodes.Name(ends, "load")], lineno=line))
        return nodes.Scope(body, lineno=line)
