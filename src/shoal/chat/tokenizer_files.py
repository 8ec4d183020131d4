"""The files of a tokenizer in a model folder: tokenizer.json, its special and added tokens, its
chat templates, and the date that a run's template writes. They are read like transformers reads
them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

from shoal.chat.template import SPECIAL_TOKENS, variables_read
from shoal.files import read_json, write_text
from shoal.records import ShoalError
from shoal.text import did_you_mean

DEFAULT_TEMPLATE = "chat_template.jinja"
"""The file of a model folder with its chat template."""

NAMED_TEMPLATES = "additional_chat_templates"
"""The folder with a model's chat templates other than the default one; each file has the name of
its template."""

DATE_FILE = "template_date.json"
"""A file next to the tokenizer of a run, with the date that the chat template writes: the day on
which the run first started."""

_TOKEN_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
_TEMPLATE_NAME = re.compile(r"\w[\w. -]{0,99}")


# Tokens


def read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; {} if there is no such file. ShoalError if the file holds
    anything else than one JSON object."""
    if not file.is_file():
        return {}
    return read_json(file)


def read_backend(file: Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer in a tokenizer.json; ShoalError if the file is missing or invalid."""
    if not file.is_file():
        raise ShoalError(
            f"{file.parent} holds no tokenizer.json; save the tokenizer with transformers to make "
            "one."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ShoalError(f"{file} is not a valid tokenizer: {error}") from error


def read_special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of special tokens by their role, such as `bos_token`. `config`:
    tokenizer_config.json.

    The older special_tokens_map.json counts only if tokenizer_config.json has no entry
    `added_tokens_decoder`, and then replaces its entries, as in transformers. A role that is null
    or missing is left out; further keys that end in `_token` count as roles. The usual roles come
    first, in a fixed order.
    """
    entries = dict(config)
    if "added_tokens_decoder" not in config:
        entries |= read_object(folder / "special_tokens_map.json")
    special = {}
    # In transformers' order, which numbers the tokens that have no id yet.
    names = dict.fromkeys(SPECIAL_TOKENS) | dict.fromkeys(entries)
    for name in names:
        value = entries.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    return special


def add_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Adds to a tokenizer in place the added and special tokens that tokenizer_config.json
    (`config`) lists and tokenizer.json does not have. They are added in transformers' order, which
    decides their ids: the listed ones by their id in `config` (which is not taken over), then the
    special ones, then further special ones. `special`: the special tokens' texts by role, in the
    order of `read_special_tokens`."""
    # By their `repr`, which shows the flags too: a token with other flags is added again.
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder", {})
    new_tokens = []
    for id_text in sorted(listed, key=int):
        entry = listed[id_text]
        flags = {flag: entry[flag] for flag in _TOKEN_FLAGS if flag in entry}
        token = tokenizers.AddedToken(**flags)
        if repr(token) not in known:
            new_tokens.append(token)
    backend.add_tokens(new_tokens)

    texts = list(special.values())
    further = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    for token in further:
        texts.append(token["content"] if isinstance(token, Mapping) else token)
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = []
    for text in dict.fromkeys(texts):
        if text not in added:
            missing.append(text)
    backend.add_special_tokens(missing)


def token_ids(value: Any) -> list[int]:
    """Returns the token ids in an entry of a configuration such as `eos_token_id`, which is a
    number, a list of numbers, or null: `2` -> `[2]`, `None` -> `[]`."""
    if value is None:
        return []
    if isinstance(value, int):
        return [int(value)]
    return [int(token_id) for token_id in value]


# Chat templates


def read_templates(
    folder: Path, config: Mapping[str, Any], requested: str = ""
) -> tuple[str, dict[str, str]]:
    """Returns (default chat template of a model, "" if it has none; its other templates by name).

    `config`: tokenizer_config.json. `requested`: the value of model.template: the text of a
    template, a file with one, or the name of one of the model's; '' for the model's own. If it is
    given, its template is the default and the only one (the second member is {}), like
    transformers' `chat_template=`. ShoalError if it is none of these; and, without it, if the model
    has templates but none with the name `default`."""
    own = _own_templates(folder, config)
    if requested in own:
        return own[requested], {}
    if requested:
        return _requested_template(requested, own), {}
    if own and "default" not in own:
        raise ShoalError(
            f"{folder} has chat templates {', '.join(own)} but no default: choose one by its name, "
            f"model.template={next(iter(own))}",
            "model.template",
        )
    default = own.pop("default", "")
    return default, own


def _own_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns name -> text of a model folder's chat templates; the default one has the name
    `default`. They are read from template files, or, only if there are none, from the entry
    `chat_template` of tokenizer_config.json (`config`), as in transformers. {} if it has none.
    ShoalError for an entry of another form or a name that a file could not have."""
    files = {file.stem: file for file in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))}
    default = folder / DEFAULT_TEMPLATE
    if default.is_file():
        files["default"] = default
    if files:
        templates = {}
        for name, file in files.items():
            templates[name] = _read_template(file)
        return templates
    entry = config.get("chat_template") or []
    if isinstance(entry, str):
        return {"default": entry}
    named = _listed_templates(entry)
    if named is None:
        raise ShoalError(
            f"{folder}/tokenizer_config.json has the chat_template {entry!r:.60}: expected a "
            "template, or a list of entries with name and template",
            "model.template",
        )
    for name in named:
        # They become names of files in the folder of a run.
        if not _TEMPLATE_NAME.fullmatch(name):
            raise ShoalError(
                f"{folder}/tokenizer_config.json has a chat template called {name!r:.60}: expected "
                "a name of letters, digits, '_', '-', '.' and spaces",
                "model.template",
            )
    return named


def _listed_templates(entry: Any) -> dict[str, str] | None:
    """Returns name -> text of the templates in an entry `chat_template` of tokenizer_config.json
    that is a list, `[{"name": "rag", "template": "..."}]`, or an object, `{"rag": "..."}`, which
    transformers reads too. None if it is neither, or if a name or template is no text. The last of
    several with one name counts."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(entry, list):
        for item in entry:
            if not isinstance(item, Mapping):
                return None
            pairs.append((item.get("name"), item.get("template")))
    elif isinstance(entry, Mapping):
        pairs = list(entry.items())
    else:
        return None
    for name, template in pairs:
        if not isinstance(name, str) or not isinstance(template, str):
            return None
    return dict(pairs)


def _read_template(file: Path) -> str:
    """Returns the text of a file with a template; ShoalError if it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ShoalError(
            f"the chat template {file} is not UTF-8 ({error.reason} at byte {error.start}): save "
            "it as UTF-8",
            "model.template",
        ) from error


def _requested_template(requested: str, own: Mapping[str, str]) -> str:
    """Returns the text of the template that model.template asks for (`requested`): the value
    itself if it has an opening brace or several lines, else the content of the file that it names
    (`~` is the home folder). ShoalError if there is no such file, or if it is not UTF-8. `own`: the
    model's templates, whose names the error message lists; a name among them is not looked up
    here."""
    if "{" in requested or "\n" in requested:
        return requested
    file = Path(requested).expanduser()
    if not file.is_file():
        known = f", nor a name of the model's ({', '.join(own)})" if own else ""
        raise ShoalError(
            f"model.template={requested!r} is neither a file nor a Jinja template{known}.",
            "model.template",
        )
    return _read_template(file)


def with_variables(
    default: str, named: Mapping[str, str], variables: Sequence[str]
) -> tuple[str, dict[str, str]]:
    """Returns a model's chat templates, the default one and the others by name, each beginning with
    lines that set `variables`. So an exported template sets them as well: whoever loads the model
    asks it as it was trained.

    `variables`: NAME=VALUE each. A value `true`, `false` or `none`, in any case, and a number are
    those of Jinja; any other is a text. ShoalError if there is no default template, if an entry has
    another form, or if no template reads the variable: it would have no effect."""
    key = "model.template_variables"
    if not default:
        raise ShoalError(f"{key}: the model has no chat template that could read them", key)
    read = variables_read(default)
    for template in named.values():
        read |= variables_read(template)
    lines = []
    for entry in variables:
        name, equals, value = entry.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise ShoalError(
                f"{key} has the entry {entry!r}: expected NAME=VALUE, such as "
                "enable_thinking=false",
                key,
            )
        if name not in read:
            raise ShoalError(
                f"{key}: the chat template does not read {name}, so it would have no effect: leave "
                f"it out{did_you_mean(name, read)}",
                key,
            )
        lines.append(f"{{%- set {name} = {_jinja_literal(value.strip())} %}}\n")
    setting = "".join(lines)
    return setting + default, {name: setting + template for name, template in named.items()}


def _jinja_literal(text: str) -> str:
    """Returns the value of a template variable in Jinja's syntax."""
    if text.lower() in ("true", "false", "none"):
        return text.lower()
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return text
    return json.dumps(text)


def write_templates(folder: Path, default: str, named: Mapping[str, str]) -> None:
    """Writes chat templates into a model folder, in the files that transformers uses. `default`: ""
    for none; `named`: name -> template. Replaces files of these names, and removes none. The folder
    must exist."""
    if default:
        (folder / DEFAULT_TEMPLATE).write_text(default, encoding="utf-8")
    for name, template in named.items():
        (folder / NAMED_TEMPLATES).mkdir(exist_ok=True)
        (folder / NAMED_TEMPLATES / f"{name}.jinja").write_text(template, encoding="utf-8")


# The date


def read_date(folder: Path) -> datetime | None:
    """Returns the date in a run's model folder that the chat template writes; None if there is no
    such file, or if it has no entry `strftime_now`. ShoalError if the entry is no valid date."""
    value = read_object(folder / DATE_FILE).get("strftime_now")
    if not value:
        return None
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise ShoalError(
            f"{folder / DATE_FILE} holds no date ({value!r:.60}): write the one on which the run "
            "first started, as 2026-01-31T12:00:00"
        ) from error


def write_date(date: datetime, folder: Path) -> None:
    """Writes `template_date.json` into a run's model folder, with the date that the chat template
    writes. It is written to the second, and replaces an earlier one."""
    text = json.dumps({"strftime_now": date.isoformat(timespec="seconds")})
    write_text(folder / DATE_FILE, f"{text}\n", "base_output_directory")
