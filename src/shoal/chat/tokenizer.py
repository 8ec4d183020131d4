"""Text to tokens and back, by the model's tokenizer.json and chat template.

Prompt ids equal those of transformers' `apply_chat_template(messages, add_generation_prompt=True)`,
or with `continue_final_message=True` where the last message is the assistant's. Templates come with
checkpoints and are untrusted code: they run in Jinja's immutable sandbox on plain data. The names
that they may use follow https://huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from shoal.files import read_json, write_text
from shoal.records import Messages, Prompt, ShoalError

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


MARK = "\u2402END OF MESSAGE\u2402 "
"""Marks where an assistant's message that is continued ends. A template that trims messages takes
its space away."""


GENERATION = {
    "generation_begins": "\ue0f1GENERATION\ue0f1",
    "generation_ends": "\ue0f2GENERATION\ue0f2",
}
"""What marks where a template's `generation` blocks begin and end, by the names of two variables in
it."""


TOOL_USE = "tool_use"
"""The name of the template for prompts with tools, as in transformers."""


DATE_FILE = "template_date.json"
"""Beside the tokenizer of a run: the date that the chat template writes, the one on which the run
first started."""


LONG_TEXT = 1 << 14
"""Characters, some 0.1 s of work, above which a text is encoded without holding up other
threads."""


MOST_ROUNDS, RENDER_SECONDS, MOST_CHARACTERS, MOST_BYTES = 300_000, 30.0, 1 << 26, 1 << 30
"""Of one rendering: rounds of loops and calls of macros, and time; what an operator of a template
may make; and what all of them may, as it could keep each."""


_TEMPLATE_NAME = re.compile(r"\w[\w. -]{0,99}")


_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TurnEnd:
    """What the chat template writes behind a turn of the assistant's.

    >>> tokenizer.turn_end
    TurnEnd(text='<|im_end|>\\n', id=2, is_eos=True)
    """

    text: str
    id: int | None  # the token that ends the turn; None where it is plain text, or nothing
    is_eos: bool  # a completion ends with it


class Tokenizer:
    """The tokens of one model.

    eos_ids        token ids that end a completion: of generation_config.json, else config.json,
                   else eos_token
    pad_id         the pad token, else an end-of-sequence one; the model never attends to it
    bos_id         None if the model has none
    vocab_size     the largest token id + 1
    has_template   True if messages are rendered by a chat template
    named_templates
                   the model's other templates by name; prompts with tools are rendered by the one
                   named `tool_use`
    date           the date that the template writes (`strftime_now`); None for the present one
    response_template
                   how to read a turn, as tokenizer_config.json has it (transformers'
                   `parse_response`); else None
    notes          warnings for the user, a line each

    >>> tokenizer = Tokenizer.load(folder)
    >>> ids = tokenizer.encode_prompt([{"role": "user", "content": "2 + 3 = ?"}])
    >>> tokenizer.decode(ids, skip_special_tokens=False)
    '<|im_start|>user\\n2 + 3 = ?<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: Mapping[str, str],
        eos_ids: Sequence[int],
        pad_id: int | None = None,
        template: str = "",
        notes: Sequence[str] = (),
        response_template: dict[str, Any] | None = None,
        named_templates: Mapping[str, str] | None = None,
        date: datetime | None = None,
    ):
        # tokenizer.json may store both from training the tokenizer; they would change prompts
        # without an error.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._special = dict(special)
        self.template = template  # as text; empty for none
        self.named_templates = dict(named_templates or {})
        self.date = date
        self._template = _compile(template, date) if template else None
        self.eos_ids: tuple[int, ...] = tuple(eos_ids)
        self.bos_id: int | None = self._special_id("bos_token")
        # Any id will do, since no token attends to padding: 0 where the model names none.
        choices = (self._special_id("pad_token"), pad_id, *self.eos_ids, 0)
        self.pad_id: int = next(id for id in choices if id is not None)
        self.vocab_size: int = (
            max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        self.notes: list[str] = list(notes)
        self.response_template = response_template

    def __reduce__(self) -> tuple:
        # Sent to samplers in other processes; a compiled template cannot be.
        return Tokenizer, (
            self._backend,
            self._special,
            self.eos_ids,
            self.pad_id,
            self.template,
            self.notes,
            self.response_template,
            self.named_templates,
            self.date,
        )

    @classmethod
    def load(
        cls, folder: str | Path, template: str = "", date: datetime | None = None
    ) -> Tokenizer:
        """Reads a model folder. `template`, a chat template, a file with one or the name of one of
        the folder's, replaces the folder's. `date`: the one that the template writes, in place of
        the folder's."""
        folder = Path(folder)
        config = _read(folder / "tokenizer_config.json")
        backend = _backend(folder / "tokenizer.json")
        special = _special_tokens(folder, config)
        _add_tokens(backend, config, special)
        model, generation = _read(folder / "config.json"), _read(folder / "generation_config.json")
        own_eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        # generation_config.json first: chat models end a turn with another token than a document
        # (Llama 3: eot_id).
        eos_ids = (
            _ids(generation.get("eos_token_id")) or _ids(model.get("eos_token_id")) or _ids(own_eos)
        )
        text, named = _templates(folder, config, template)
        notes = (
            []
            if text
            else [
                f"no chat template in {folder}: messages are rendered as plain 'User: ...' lines; "
                "set model.template to choose one"
            ]
        )
        if not eos_ids:
            notes.append(
                f"no end-of-sequence token in {folder}: every completion runs to its limit"
            )
        elif own_eos is not None and own_eos not in eos_ids:
            notes.append(
                f"eos_token {special['eos_token']!r} of {folder} is not among its eos_token_id "
                f"{eos_ids}"
            )
        pad_id = next(
            iter(_ids(generation.get("pad_token_id")) or _ids(model.get("pad_token_id"))), None
        )
        tokenizer = cls(
            backend,
            special,
            eos_ids,
            pad_id,
            text,
            notes,
            config.get("response_template"),
            named,
            date or read_date(folder),
        )
        tokenizer.notes += tokenizer._turn_note()
        return tokenizer

    @functools.cached_property
    def _tool_template(self) -> jinja2.Template | None:
        """The template of prompts with tools. Compiled where there are some: a broken one keeps
        nobody from prompts without them."""
        tool_use = self.named_templates.get(TOOL_USE)
        return (
            _compile(tool_use, self.date, f"The chat template {TOOL_USE}")
            if tool_use
            else self._template
        )

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def writes_date(self) -> bool:
        """True if prompts depend on the date."""
        templates = (self.template, *self.named_templates.values())
        return any("strftime_now" in template for template in templates)

    @property
    def turn_end(self) -> TurnEnd | None:
        """What ends a turn of the assistant's; None without a template, or where it does not write
        such a turn."""
        if self._template is None:
            return None
        turns = [{"role": "user", "content": "What next?"}, {"role": "assistant", "content": MARK}]
        try:
            _, mark, text = self.render(turns, whole=True).rpartition(MARK.strip())
        except ShoalError:
            return None
        if not mark:
            return None
        text = text.removeprefix(" ")
        ids = self.encode(text)
        eos = next((id for id in ids if id in self.eos_ids), None)
        if eos is not None:
            return TurnEnd(text, eos, is_eos=True)
        added = self.added_tokens()
        return TurnEnd(text, next((id for id in ids if id in added), None), is_eos=False)

    def _turn_note(self) -> list[str]:
        """A warning where the template ends a turn with a token that does not end a completion."""
        end = self.turn_end
        if end is None or end.id is None or end.is_eos or not self.eos_ids:
            return []
        known = " or ".join(self.token_text(id) for id in self.eos_ids)
        return [
            f"the chat template ends a turn with {self.token_text(end.id)} (id {end.id}), which "
            f"does not end a completion ({known} does): completions run on to their limit; add "
            f"{end.id} to eos_token_id in the model's generation_config.json, or give another "
            "model.template"
        ]

    def encode_prompt(
        self, prompt: Prompt, tools: Sequence[dict[str, Any]] | None = None
    ) -> np.ndarray:
        """Token ids of a prompt, int32[T]: messages by the chat template, ready for the answer; a
        text as it is.

        `tools`: schemas that the template shows. ShoalError if the template raises for these
        messages.
        """
        text = prompt if isinstance(prompt, str) else self.render(prompt, tools=tools)
        is_rendered = self.has_template and not isinstance(prompt, str)
        return np.asarray(self.encode(text) if is_rendered else self._encode_text(text), np.int32)

    def encode_answered(self, prompt: Prompt, answer: str) -> list[int]:
        """Token ids of a prompt with its answer, as a model that judges it reads them: messages
        whole by the chat template, a text with the tokenizer's special tokens."""
        if isinstance(prompt, str):
            return self.encode(prompt + answer, special=True)
        begun = (
            prompt[-1].get("content") or ""
            if prompt and prompt[-1].get("role") == "assistant"
            else None
        )
        messages = [
            *(prompt if begun is None else prompt[:-1]),
            {"role": "assistant", "content": (begun or "") + answer},
        ]
        return self.encode(self.render(messages, whole=True))

    def render(
        self,
        messages: Messages,
        whole: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        marked: bool = False,
    ) -> str:
        """The text of messages, up to where the answer starts; a last message of the assistant's is
        continued, as by transformers' `continue_final_message`. `whole`: the conversation is over.
        `tools`: schemas to show. `marked`: with GENERATION's marks."""
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise ShoalError(
                f"A prompt is a text or a list of messages with role and content; got {messages!r}."
            )
        # Without keys of None, which data sets with columns of several roles fill in: templates ask
        # `is defined`.
        clean = [
            {key: _plain(value) for key, value in m.items() if value is not None} for m in messages
        ]
        continued = (
            not whole and clean[-1].get("role") == "assistant" and bool(clean[-1].get("content"))
        )
        template = self._tool_template if tools else self._template
        if template is None:
            return _plain_text(clean, opens_answer=not (whole or continued))
        if continued:
            clean[-1]["content"] = f"{clean[-1]['content']}{MARK}"
        reserved = {"messages", "tools", "documents", "add_generation_prompt"}
        special = {name: token for name, token in self._special.items() if name not in reserved}
        _renderings.begin()
        try:
            text = template.render(
                messages=[_with_reasoning(m) for m in clean],
                tools=_plain(tools or None),
                documents=None,
                add_generation_prompt=not (whole or continued),
                **special,
                **(GENERATION if marked else {}),
            )
        except Exception as error:  # a template may raise anything
            first = f"{messages[0]!r:.200}"
            raise ShoalError(
                f"The chat template refused a prompt: {error}. Its first message: {first}",
                "model.template",
            ) from error
        if not continued:
            return text
        text, mark, rest = text.rpartition(MARK.strip())
        if not mark:
            raise ShoalError(
                "The chat template leaves out the assistant's message that a prompt ends with, "
                f"{messages[-1]['content']!r:.60}: remove it, or give another template with "
                "model.template."
            )
        return text if rest.startswith(" ") else text.rstrip()

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a rendered text; `special`: with what the tokenizer puts around a text, as
        bos."""
        if len(text) > LONG_TEXT:
            # Unlike `encode`, a batch lets other threads of Python run meanwhile: a server's, and a
            # fleet's.
            return self._backend.encode_batch([text], add_special_tokens=special)[0].ids
        return self._backend.encode(text, add_special_tokens=special).ids

    def encode_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Token ids of a rendered text, int32[T], and the tokens of each span of its characters,
        from, to."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        # A token that reaches over a span's start belongs to it, as in transformers. Offsets may
        # lack leading spaces.
        starts, ends = zip(*encoding.offsets, strict=True) if encoding.offsets else ((), ())
        return np.asarray(encoding.ids, np.int32), [
            (bisect_right(ends, start), bisect_left(starts, stop)) for start, stop in spans
        ]

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._backend.decode(
            [int(id) for id in ids], skip_special_tokens=skip_special_tokens
        )

    def token_text(self, id: int) -> str:
        """One token as text, for tables: special tokens and leading spaces are shown, so texts
        cannot be joined."""
        token = self._backend.id_to_token(int(id))
        if token is None:
            return f"<{int(id)}>"
        return (
            token.replace("▁", " ")
            if "▁" in token
            else self.decode([id], skip_special_tokens=False)
        )

    def vocabulary(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self._backend.get_vocab(with_added_tokens=True)

    def facts(self) -> dict[str, Any]:
        """What prompts and answers depend on, each as a short text: equal in tokenizers that do the
        same."""
        question = [{"role": "user", "content": "2 + 3 = ?"}]
        try:
            rendered = self.encode_prompt(question).tolist()  # a template may write the date
        except ShoalError as error:
            rendered = str(error)
        long = {
            "tokenizer.json": self._backend.to_str(),
            "the chat template": self.template,
            "the further chat templates": sorted(self.named_templates.items()),
            "response_template": self.response_template,
            "the prompt of a question": rendered,
        }
        short = {
            "special tokens": self._special,
            "eos_token_id": self.eos_ids,
            "pad_token_id": self.pad_id,
        }
        hashed = {
            name: hashlib.blake2b(
                repr(value).encode("utf-8", "backslashreplace"), digest_size=8
            ).hexdigest()
            for name, value in long.items()
        }
        return {**hashed, **{name: str(value) for name, value in short.items()}}

    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Id -> text of the tokens that are found before a text is split, and True for those that
        decoding skips."""
        return {
            id: (token.content, token.special)
            for id, token in self._backend.get_added_tokens_decoder().items()
        }

    def check_vocabulary(self, vocab_size: int) -> None:
        """ShoalError if a token id is outside an embedding of `vocab_size` entries."""
        largest = max(self.vocab_size - 1, self.pad_id, *self.eos_ids)
        if largest >= vocab_size:
            raise ShoalError(
                f"The tokenizer has token ids up to {largest}, but the model's vocabulary has "
                f"{vocab_size} entries: the tokenizer and the weights belong to different models."
            )

    def _encode_text(self, text: str) -> list[int]:
        """A text with the tokenizer's special tokens, but neither a second bos nor a closing eos.

        Some tokenizers append eos: a prompt that ends with it is finished, and a model continues it
        with another text.
        """
        ids, plain = self.encode(text, special=True), self.encode(text)
        if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            ids = ids[1:]
        appended = bool(plain) and ids[-1 - len(plain) : -1] == plain
        if appended and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return ids

    def _special_id(self, name: str) -> int | None:
        """The id of a special token by its role, as `bos_token`; None if the model has none."""
        token = self._special.get(name)
        return None if token is None else self._backend.token_to_id(token)


# Files


def _read(file: Path) -> dict[str, Any]:
    """The file's JSON object; empty if there is no such file."""
    return read_json(file) if file.is_file() else {}


def _backend(file: Path) -> tokenizers.Tokenizer:
    """The tokenizer in a tokenizer.json; ShoalError if it is missing or invalid."""
    if not file.is_file():
        raise ShoalError(
            f"{file.parent} holds no tokenizer.json; save the tokenizer with transformers to make "
            "one."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ShoalError(f"{file} is no valid tokenizer: {error}") from error


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... with their text. The older special_tokens_map.json counts only
    if tokenizer_config.json lists no added tokens, as in transformers."""
    older = {} if "added_tokens_decoder" in config else _read(folder / "special_tokens_map.json")
    texts = {
        name: value.get("content") if isinstance(value, Mapping) else value
        for name, value in {**config, **older}.items()
    }
    names = dict.fromkeys(
        (*_NAMED, *texts)
    )  # transformers' order, which numbers tokens that have no id yet
    named = ((name, texts.get(name)) for name in names if name.endswith("_token"))
    return {name: text for name, text in named if isinstance(text, str)}


def _add_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Adds tokens that only tokenizer_config.json has, in the order of transformers, which decides
    their ids."""
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    tokens = [
        tokenizers.AddedToken(**{flag: value[flag] for flag in _FLAGS if flag in value})
        for _, value in listed
    ]
    backend.add_tokens([token for token in tokens if repr(token) not in known])
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    further = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    contents = [token["content"] if isinstance(token, Mapping) else token for token in further]
    backend.add_special_tokens(
        [text for text in dict.fromkeys([*special.values(), *contents]) if text not in added]
    )


def _ids(value: Any) -> list[int]:
    return (
        []
        if value is None
        else [int(value)]
        if isinstance(value, int)
        else [int(id) for id in value]
    )


def _templates(
    folder: Path, config: Mapping[str, Any], given: str = ""
) -> tuple[str, dict[str, str]]:
    """The chat template of a model, and its further ones by name; empty if it has none. `given`:
    the value of model.template, which then is the only one, as transformers' `chat_template=`."""
    own = _own_templates(folder, config)
    if given in own:
        return own[given], {}
    if given:
        return _given_template(given, own), {}
    if own and "default" not in own:
        raise ShoalError(
            f"{folder} has chat templates {', '.join(own)} but no default: choose one by its name, "
            f"model.template={next(iter(own))}",
            "model.template",
        )
    return own.pop("default", ""), own


def _own_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a model folder by name, the usual one as `default`. Files count before
    the entry of tokenizer_config.json, as in transformers."""
    files = {file.stem: file for file in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))}
    default = folder / "chat_template.jinja"
    if default.is_file():
        files["default"] = default
    if files:
        return {name: _read_template(file) for name, file in files.items()}
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
    """The templates of an entry of tokenizer_config.json that is no text, by name: of a list with
    name and template, or of an object, which transformers reads too. None for anything else."""
    if isinstance(entry, list) and all(isinstance(one, Mapping) for one in entry):
        pairs = [(one.get("name"), one.get("template")) for one in entry]
    elif isinstance(entry, Mapping):
        pairs = list(entry.items())
    else:
        return None
    if not all(isinstance(name, str) and isinstance(template, str) for name, template in pairs):
        return None
    return dict(pairs)


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ShoalError(
            f"the chat template {file} is not UTF-8 ({error.reason} at byte {error.start}): save "
            "it as UTF-8",
            "model.template",
        ) from error


def _given_template(template: str, own: Mapping[str, str]) -> str:
    """The text of model.template, which is a template or the name of a file with one."""
    if "{" in template or "\n" in template:
        return template
    file = Path(template).expanduser()
    if not file.is_file():
        known = f", nor a name of the model's ({', '.join(own)})" if own else ""
        raise ShoalError(
            f"model.template={template!r} is neither a file nor a Jinja template{known}.",
            "model.template",
        )
    return _read_template(file)


def write_templates(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the chat templates of a tokenizer into a model folder, in files as transformers has
    them."""
    if tokenizer.template:
        (folder / "chat_template.jinja").write_text(tokenizer.template, encoding="utf-8")
    for name, template in tokenizer.named_templates.items():
        (folder / NAMED_TEMPLATES).mkdir(exist_ok=True)
        (folder / NAMED_TEMPLATES / f"{name}.jinja").write_text(template, encoding="utf-8")


def read_date(folder: Path) -> datetime | None:
    """The date that the chat template of a run writes; None where the folder keeps none."""
    value = _read(folder / DATE_FILE).get("strftime_now")
    try:
        return datetime.fromisoformat(value) if value else None
    except (TypeError, ValueError) as error:
        raise ShoalError(
            f"{folder / DATE_FILE} holds no date ({value!r:.60}): write the one on which the run "
            "first started, as 2026-01-31T12:00:00"
        ) from error


def write_date(date: datetime, folder: Path) -> None:
    """Keeps the date that the chat template writes in the folder of a run's model."""
    text = json.dumps({"strftime_now": date.isoformat(timespec="seconds")})
    write_text(folder / DATE_FILE, f"{text}\n", "base_output_directory")


# Templates


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's text: rendered as its
    body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # Variables that are undefined unless `render` marks them: then they are written as nothing.
        begin, end = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in GENERATION)
        return nodes.Scope([begin, *body, end], lineno=line)


_ENTRY_BYTES = 8


class _Renderings(threading.local):
    """The rendering of this thread, which may take so many rounds and so long, and write so
    much."""

    written = made = 0

    def begin(self) -> None:
        self.rounds = self.written = self.made = 0
        self.deadline = time.monotonic() + RENDER_SECONDS

    def count(self) -> None:
        self.rounds += 1
        if self.rounds > MOST_ROUNDS or time.monotonic() > self.deadline:
            raise jinja2.TemplateError(
                f"it loops: more than {MOST_ROUNDS:,} rounds, or {RENDER_SECONDS:.0f} s"
            )

    def measured(self, value: Any) -> Any:
        """A new text or list, whose memory counts."""
        if isinstance(value, str):
            self.made += len(value)
        elif isinstance(value, list | tuple | dict):
            self.made += _ENTRY_BYTES * len(value)
        if self.made > MOST_BYTES:
            raise jinja2.TemplateError(
                f"its texts and lists take more than {MOST_BYTES >> 20:,} MiB"
            )
        return value

    def write(self, value: Any) -> str:
        """What Jinja writes of a value."""
        text = str(value)
        self.written += len(text)
        _check_size(self.written)
        return text


_renderings = _Renderings()


class _Measured(NodeTransformer):
    """Has `a ~ b` made by a function, and what lists, dicts and slices make measured by another."""

    def __init__(self, concatenate: nodes.Expr, measured: nodes.Expr) -> None:
        self.concatenate, self.measured = concatenate, measured

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return self.generic_visit(
            nodes.Call(self.concatenate, node.nodes, [], None, None, lineno=node.lineno)
        )

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._measure(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._measure(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        if isinstance(node.arg, nodes.Slice):
            return self._measure(node)
        return self.generic_visit(node)

    def _measure(self, node: nodes.Expr) -> nodes.Node:
        return nodes.Call(
            self.measured, [self.generic_visit(node)], [], None, None, lineno=node.lineno
        )


class _Bounded(Extension):
    """What a template's loops, macros and concatenations call, so that none goes on without an
    end."""

    def bound(self, template: nodes.Template) -> nodes.Template:
        """The same template, with its rounds counted and its texts measured."""
        count = nodes.Call(nodes.ExtensionAttribute(self.identifier, "count"), [], [], None, None)
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            node.body.insert(0, nodes.ExprStmt(count))
            if (
                isinstance(node, nodes.For) and node.test is not None
            ):  # rounds that it leaves out count too
                node.test = nodes.And(
                    nodes.Call(
                        nodes.ExtensionAttribute(self.identifier, "counts"), [], [], None, None
                    ),
                    node.test,
                )
        names = ("concatenate", "measured")
        _Measured(*(nodes.ExtensionAttribute(self.identifier, name) for name in names)).visit(
            template
        )
        template.set_environment(self.environment)
        return template

    def concatenate(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return _renderings.measured("".join(texts))

    def measured(self, value: Any) -> Any:
        return _renderings.measured(value)

    def count(self) -> None:
        _renderings.count()

    def counts(self) -> bool:
        _renderings.count()
        return True


def _check_size(size: int) -> None:
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
"""Methods of texts, and filters, that make a text or a list as long as a number says: of how many
bytes for each, or for JSON, whose every entry is indented, of how many entries."""


_FORM = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.*]*|\{[^{}]*")


_NUMBER = re.compile(r"\d{1,20}")


def _check_call(name: str, value: Any, others: Sequence[Any]) -> None:
    """Refuses a method of a text, or a filter, that would make a text or a list without measure."""
    longest = max(map(_size, others), default=0)
    if name in _WIDENERS:
        _check_size(_WIDENERS[name] * longest)
    elif name == "sum" and isinstance(value, list | tuple):
        _check_size(sum(len(one) for one in value if isinstance(one, list | tuple)))
    elif not isinstance(value, str):
        return
    elif name == "indent":
        _check_size(longest * (value.count("\n") + 1))
    elif name == "expandtabs":
        _check_size(longest * value.count("\t"))
    elif name == "replace" and len(others) > 1:
        _check_size(value.count(str(others[0])) * _size(others[1]))
    elif name == "translate":
        _check_size(
            len(value)
            * max((_size(one) for one in others[0].values() if isinstance(one, str)), default=0)
        )
    elif name == "wordwrap":
        _check_size(
            len(value) * max((len(one) for one in others if isinstance(one, str)), default=0)
        )
    elif name == "format":
        _check_format(value, others)


def _check_join(between: Any, parts: Sequence[Any]) -> None:
    lengths = (len(part) for part in parts if isinstance(part, str))
    _check_size(sum(lengths) + len(parts) * len(str(between)))


def _size(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_format(form: str, values: Sequence[Any]) -> None:
    """Refuses a format with a width without measure, in it or among the values, as `"%*d"` takes
    it."""
    for spec in _FORM.findall(form):
        widths = [int(number) for number in _NUMBER.findall(spec)]
        _check_size(max(widths, default=0))
    if "*" in form or re.search(r"\{[^{}]*\{", form):
        _check_size(max(map(_size, values), default=0))


_SELECTING = ("attr", "d", "default", "first", "last", "max", "min", "random")


def _bounded_filter(name: str, made_by: Any) -> Any:
    """A filter of Jinja's that refuses to make what is without measure."""
    has_context = getattr(made_by, "jinja_pass_arg", None) is not None

    @functools.wraps(made_by)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        own = list(args[1:] if has_context else args)
        if name == "join":
            own[0] = list(own[0])  # a generator is known only when it is read
            _check_join(kwargs.get("d", own[1] if len(own) > 1 else ""), own[0])
            return _renderings.measured(made_by(*args[:has_context], *own, **kwargs))
        _check_call(name, own[0], [*own[1:], *kwargs.values()])
        made = made_by(*args, **kwargs)
        # What it only passes on, as `first` or `default` do, takes no memory.
        return made if name in _SELECTING else _renderings.measured(made)

    return bounded


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a limit of what an operator, a filter or a method of a text makes: `"a"
    * 10**12` is a text of 1 TB."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The text of a rendering. Its literals go through no `finalize`."""
        kept, size = [], 0
        for piece in pieces:
            size += len(piece)
            _check_size(size)
            kept.append(piece)
        return _renderings.measured("".join(kept))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            name = getattr(function, "__name__", "")
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
                _check_join(owner, args[0])
            _check_call(name, owner, [*args, *kwargs.values()])
            return _renderings.measured(super().call(context, function, *args, **kwargs))
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        # Called where the method is taken, as Jinja's own check.
        made = super().wrap_str_format(value)
        if made is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            named = args[0].values() if args and isinstance(args[0], Mapping) else ()
            _check_format(value.__self__, [*args, *named, *kwargs.values()])
            return made(*args, **kwargs)

        return functools.update_wrapper(bounded, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            if isinstance(left, str):
                _check_format(left, right if isinstance(right, tuple) else (right,))
            return _renderings.measured(super().call_binop(context, operator, left, right))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = (
                left.bit_length() * right
                if operator == "**"
                else left.bit_length() + right.bit_length()
            )
            _check_size(bits << 6)  # products of longer ones take seconds
        sizes = [
            len(one) if isinstance(one, str | list | tuple) else one if isinstance(one, int) else 0
            for one in (left, right)
        ]
        is_text = isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple)
        made = sizes[0] + sizes[1] if operator == "+" else sizes[0] * sizes[1]
        if is_text or operator == "**":
            _check_size(made)
        return _renderings.measured(super().call_binop(context, operator, left, right))


def _compile(
    template: str, date: datetime | None = None, name: str = "The chat template"
) -> jinja2.Template:
    """A chat template, ready to be rendered in the sandbox, with loops and texts that are bounded;
    on a `date`, else on the present one. ShoalError if it is no valid Jinja, or does not write
    messages."""
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_renderings.write,
        extensions=[_Generation, _Bounded, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.filters = {
        name: _bounded_filter(name, one) for name, one in environment.filters.items()
    }
    del environment.globals["lipsum"]  # pages of text
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: (date or datetime.now()).strftime(form),
    }
    try:
        bounded: Any = environment.extensions[_Bounded.identifier]
        compiled = environment.from_string(bounded.bound(environment.parse(template)))
        names = {node.name for node in environment.parse(template).find_all(nodes.Name)}
    except jinja2.TemplateError as error:
        raise ShoalError(f"{name} is not valid Jinja: {error}", "model.template") from error
    if "messages" not in names:
        # A file of data, say: every prompt would be this text.
        raise ShoalError(
            f"{name} {template[:40]!r} does not use `messages`, so it is none: every prompt "
            "would be the same; expected a Jinja template, as in a model's chat_template.jinja",
            "model.template",
        )
    return compiled


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter, as in transformers."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _plain(value: Any) -> Any:
    """Plain data for an untrusted template: JSON types, NumPy values as JSON types, the text of
    anything else."""
    return json.loads(
        json.dumps(
            value,
            default=lambda one: (
                dict(one)
                if isinstance(one, Mapping)
                else one.tolist()
                if isinstance(one, (np.generic, np.ndarray))
                else str(one)
            ),
        )
    )


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under both names that templates read, of the three that data
    sets use."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if name in message), None)
    return (
        message
        if reasoning is None
        else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


def _plain_text(messages: Messages, opens_answer: bool) -> str:
    """Messages without a template: the system's text, then `User: ...` and `Assistant: ...`
    lines."""
    lines = []
    for message in messages:
        role, content = str(message.get("role", "user")), str(message.get("content", ""))
        lines.append(content if role == "system" else f"{role.capitalize()}: {content}")
    return "\n".join([*lines, *["Assistant:"] * opens_answer])


NAMED_TEMPLATES = "additional_chat_templates"
"""The folder of a model's chat templates other than the default, in files called by their names."""
