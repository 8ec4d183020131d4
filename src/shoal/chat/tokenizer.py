"""Converts text to tokens and back, by the model's tokenizer.json and chat template.

Prompt ids equal those of transformers' `apply_chat_template(messages, add_generation_prompt=True)`,
or with `continue_final_message=True` if the last message is the assistant's.
"""

from __future__ import annotations

import functools
import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers

from shoal.chat import tokenizer_files
from shoal.chat.markers import Markers
from shoal.chat.template import GENERATION, compile_template, plain_data, render_template
from shoal.chat.thoughts import ThoughtTags, split_thoughts, thoughts_of
from shoal.findings import Finding, Findings
from shoal.records import Messages, Prompt, ShoalError

MARK = "\u2402END OF MESSAGE\u2402 "
"""Marks the end of an assistant's message that is to be continued. A template that trims messages
removes the mark's final space, which shows that it does."""

CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""The ids of tool calls that Mistral's models write, and that their templates want."""

TOOL_USE = "tool_use"
"""The name of the template for prompts with tools, as in transformers."""

LONG_TEXT = 1 << 14
"""A text with more characters, some 0.1 s of work, is encoded in a way that lets other threads
run."""


@dataclass(frozen=True)
class TurnEnd:
    """What the chat template writes behind a turn of the assistant.

    >>> tokenizer.turn_end
    TurnEnd(text='<|im_end|>\\n', id=2, is_eos=True)
    """

    text: str
    id: int | None  # the token that ends the turn; None if plain text, or nothing, ends it
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
    notes          what the user should know about the files, as findings of the check `tokenizer`

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
        notes: Sequence[Finding] = (),
        response_template: dict[str, Any] | None = None,
        named_templates: Mapping[str, str] | None = None,
        date: datetime | None = None,
    ):
        """`backend`: the tokenizer of tokenizer.json, whose padding and truncation are turned off.
        `special`: role -> text, such as `bos_token` -> `<s>`. `pad_id`: for a model that has no pad
        token among `special`; None: the first of `eos_ids`, or 0. `template`: the default chat
        template, '' for none. ShoalError if it is no valid template; `named_templates` are not
        checked here. The other arguments are those of the class's fields."""
        # tokenizer.json may store both from training the tokenizer; they would change prompts
        # without an error.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._special = dict(special)
        self.template = template  # as text; empty for none
        self.named_templates = dict(named_templates or {})
        self.date = date
        self._template = compile_template(template, date) if template else None
        self.eos_ids: tuple[int, ...] = tuple(eos_ids)
        self.bos_id: int | None = self._special_id("bos_token")
        own_pad_id = self._special_id("pad_token")
        if own_pad_id is not None:
            pad_id = own_pad_id
        elif pad_id is None:
            # Any id will do, since no token attends to padding.
            pad_id = self.eos_ids[0] if self.eos_ids else 0
        self.pad_id: int = pad_id
        # -1 without tokens: the size is then 0
        largest_id = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size: int = largest_id + 1
        self.notes: list[Finding] = list(notes)
        self.response_template = response_template

    def __reduce__(self) -> tuple:
        """Pickles the tokenizer by its arguments: samplers in other processes get it, and a
        compiled template cannot be pickled."""
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
        cls,
        folder: str | Path,
        template: str = "",
        date: datetime | None = None,
        template_variables: Sequence[str] = (),
    ) -> Tokenizer:
        """Reads the tokenizer of a model folder. `template` replaces the folder's chat template: a
        template, a file with one, or the name of one of the folder's; '' keeps it. `date`: the date
        that the template writes; None for the one that the folder keeps, if any.
        `template_variables`: variables that its templates are given, as NAME=VALUE. A chat template
        or end-of-sequence token that is missing or looks wrong becomes a note. ShoalError if
        tokenizer.json is missing, if a file or the template is not valid, or if no template reads
        one of the variables."""
        folder = Path(folder)
        config = tokenizer_files.read_object(folder / "tokenizer_config.json")
        model_config = tokenizer_files.read_object(folder / "config.json")
        generation_config = tokenizer_files.read_object(folder / "generation_config.json")
        backend = tokenizer_files.read_backend(folder / "tokenizer.json")
        special = tokenizer_files.read_special_tokens(folder, config)
        tokenizer_files.add_tokens(backend, config, special)

        def configured_ids(name: str) -> list[int]:
            """Returns the token ids of an entry of the model's configuration."""
            # generation_config.json first: chat models end a turn with another token than a
            # document (Llama 3: eot_id).
            ids = tokenizer_files.token_ids(generation_config.get(name))
            return ids or tokenizer_files.token_ids(model_config.get(name))

        own_eos = None
        if "eos_token" in special:
            own_eos = backend.token_to_id(special["eos_token"])
        eos_ids = configured_ids("eos_token_id") or tokenizer_files.token_ids(own_eos)
        pad_ids = configured_ids("pad_token_id")
        default, named = tokenizer_files.read_templates(folder, config, template)
        if template_variables:
            default, named = tokenizer_files.with_variables(default, named, template_variables)

        findings = Findings(check="tokenizer", key="model.path")
        if not default:
            findings.warning(
                f"no chat template in {folder}: messages are rendered as plain 'User: ...' lines; "
                "set model.template to choose one",
                "model.template",
            )
        if not eos_ids:
            findings.wrong(
                f"no end-of-sequence token in {folder}: every completion would run to "
                "sampling.max_completion_tokens; put eos_token_id into its generation_config.json"
            )
        elif own_eos is not None and own_eos not in eos_ids:
            findings.warning(
                f"eos_token {special['eos_token']!r} of {folder} is not among its eos_token_id "
                f"{eos_ids}"
            )
        tokenizer = cls(
            backend,
            special,
            eos_ids,
            pad_id=pad_ids[0] if pad_ids else None,
            template=default,
            notes=findings.found,
            response_template=config.get("response_template"),
            named_templates=named,
            date=date or tokenizer_files.read_date(folder),
        )
        turn_note = tokenizer._turn_note()
        if turn_note:
            tokenizer.notes.append(Finding("tokenizer", "warning", turn_note, "model.template"))
        return tokenizer

    @functools.cached_property
    def _tool_template(self) -> jinja2.Template | None:
        """The compiled template for prompts with tools. It is compiled when the first such prompt
        is rendered, so that a broken one does not prevent prompts without tools."""
        tool_use = self.named_templates.get(TOOL_USE)
        if not tool_use:
            return self._template
        return compile_template(tool_use, self.date, f"The chat template {TOOL_USE}")

    @functools.cached_property
    def _thought_tags(self) -> tuple[Markers, ThoughtTags] | None:
        """What writes the thoughts that this model marks by special tokens with tags; None if the
        model has no such tokens."""
        added = self.added_tokens()
        thoughts = thoughts_of(added)
        if not any("tokens" in row for row in thoughts.values()):
            return None
        markers = Markers(added, self.decode, thoughts)
        return markers, ThoughtTags(markers, thoughts)

    @functools.cached_property
    def _has_place_for_thoughts(self) -> bool:
        """True if the template writes a message's `reasoning_content`, and otherwise than thoughts
        with tags in its content (gpt-oss, Gemma 4, Qwen3.8). False if it has no such place, or
        finds thoughts in the content by itself (Qwen3)."""
        if self._template is None:
            return False
        question = {"role": "user", "content": "What next?"}
        thought = "Why so?"
        answer = {"role": "assistant", "content": "So."}
        apart = {**answer, "reasoning_content": thought, "thinking": thought}
        inside = {**answer, "content": f"<think>\n{thought}\n</think>\n\n{answer['content']}"}
        variables = {**self._special, "tools": None, "documents": None}
        variables["add_generation_prompt"] = False
        texts = []
        for message in (apart, inside):
            try:
                texts.append(_fill_in(self._template, [question, message], variables))
            except Exception:  # a template may raise anything, and may refuse this alone
                return False
        return thought in texts[0] and texts[0] != texts[1]

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def writes_date(self) -> bool:
        """True if prompts depend on the date, because a template writes it."""
        if "strftime_now" in self.template:
            return True
        return any("strftime_now" in template for template in self.named_templates.values())

    @property
    def turn_end(self) -> TurnEnd | None:
        """What the chat template writes to end a turn of the assistant, found by rendering one each
        time; None if there is no template, or if it refuses or does not write such a turn. The
        token is the first end-of-sequence token in that text, else the first added token, else
        None."""
        if self._template is None:
            return None
        turns = [{"role": "user", "content": "What next?"}, {"role": "assistant", "content": MARK}]
        try:
            rendered = self.render(turns, finished=True)
        except ShoalError:
            return None
        _, mark, text = rendered.rpartition(MARK.strip())
        if not mark:
            return None
        text = text.removeprefix(" ")  # the mark's final space, unless the template trims messages
        ids = self.encode(text)
        for token_id in ids:
            if token_id in self.eos_ids:
                return TurnEnd(text, token_id, is_eos=True)
        added = self.added_tokens()
        for token_id in ids:
            if token_id in added:
                return TurnEnd(text, token_id, is_eos=False)
        return TurnEnd(text, None, is_eos=False)

    def _turn_note(self) -> str:
        """Returns the text of a warning if the template ends a turn with a token that does not end
        a completion; else "", also if there is no such token, no template, or nothing that ends a
        completion."""
        end = self.turn_end
        if end is None or end.id is None or end.is_eos or not self.eos_ids:
            return ""
        known = " or ".join(self.token_text(token_id) for token_id in self.eos_ids)
        return (
            f"the chat template ends a turn with {self.token_text(end.id)} (id {end.id}), which "
            f"does not end a completion ({known} does): completions run on to their limit; add "
            f"{end.id} to eos_token_id in the model's generation_config.json, or give another "
            "model.template"
        )

    def encode_prompt(
        self, prompt: Prompt, tools: Sequence[dict[str, Any]] | None = None
    ) -> np.ndarray:
        """Returns the token ids of a prompt, int32[T]: messages by the chat template, up to where
        the answer begins; a text as it is, with the tokenizer's special tokens around it, but
        without an eos that the tokenizer appends. A last message of the assistant is continued.

        `tools`: schemas that the template shows; without effect on a text. ShoalError if the
        template raises for these messages, or if there are none. A text may give no token.
        """
        if isinstance(prompt, str):
            ids = self._encode_text(prompt)
        else:
            text = self.render(prompt, tools=tools)
            # A template writes the special tokens itself.
            ids = self.encode(text) if self.has_template else self._encode_text(text)
        return np.asarray(ids, np.int32)

    def encode_answered(self, prompt: Prompt, answer: str) -> list[int]:
        """Returns the token ids of a prompt with its answer, as a reward model reads them: a text
        with the tokenizer's special tokens; messages, with the answer as the assistant's last
        message, by the chat template, up to the end of that turn. If the prompt ends with an
        assistant's message, the answer continues that message; `prompt` is not changed. ShoalError
        if the template raises for these messages."""
        if isinstance(prompt, str):
            return self.encode(prompt + answer, special=True)
        messages = list(prompt)
        beginning = ""
        if messages and messages[-1].get("role") == "assistant":
            beginning = messages.pop().get("content") or ""
        messages.append({"role": "assistant", "content": beginning + answer})
        return self.encode(self.render(messages, finished=True))

    def render(
        self,
        messages: Messages,
        finished: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        marked: bool = False,
    ) -> str:
        """Returns the text that the chat template writes for messages, up to where the answer
        begins (transformers' `add_generation_prompt`). If the last message is the assistant's, the
        text ends at the end of its content, so that a model continues it (transformers'
        `continue_final_message`); with empty content it is a turn like others, and a new answer
        begins. Without a template: lines such as `User: ...`. Keys whose value is None are left
        out. `messages` are not changed.

        `finished`: the conversation is over, and no answer follows. `tools`: schemas that the
        template shows; with some, the model's template `tool_use` is taken, if there is one.
        `marked`: also write GENERATION's marks around the template's `generation` blocks.
        ShoalError if there are no messages, if the template raises for these, or if it leaves out
        the message that is to be continued.
        """
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise ShoalError(
                f"A prompt is a text or a list of messages with role and content; got {messages!r}."
            )
        clean = []
        for message in messages:
            # Without keys of None, which data sets with columns of several roles fill in: templates
            # ask `is defined`.
            clean.append(
                {key: plain_data(value) for key, value in message.items() if value is not None}
            )
        last_message = clean[-1]
        is_of_assistant = last_message.get("role") == "assistant"
        continued = not finished and is_of_assistant and bool(last_message.get("content"))
        opens_answer = not (finished or continued)
        template = self._tool_template if tools else self._template
        if template is None:
            return _plain_text(clean, opens_answer)
        if continued:
            last_message["content"] = f"{last_message['content']}{MARK}"

        variables: dict[str, Any] = dict(self._special)
        variables |= {
            "tools": plain_data(tools or None),
            "documents": None,
            "add_generation_prompt": opens_answer,
        }
        if marked:
            variables |= GENERATION
        shown = [_with_reasoning(self._with_thoughts_apart(message)) for message in clean]
        try:
            text = _fill_in(template, shown, variables)
        except Exception as error:  # a template may raise anything
            first_message = f"{messages[0]!r:.200}"
            raise ShoalError(
                f"The chat template refused a prompt: {error}. Its first message: {first_message}",
                "model.template",
            ) from error
        if not continued:
            return text
        text, mark, rest = text.rpartition(MARK.strip())  # the answer continues where MARK is
        if not mark:
            raise ShoalError(
                "The chat template leaves out the assistant's message that a prompt ends with, "
                f"{messages[-1]['content']!r:.60}: remove it, or give another template with "
                "model.template."
            )
        # A template that trims messages has removed the mark's final space: trim the content too.
        return text if rest.startswith(" ") else text.rstrip()

    def _with_thoughts_apart(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message of the assistant with the thoughts that its content has in tags under
        `reasoning_content`, if the template has a place of its own for them. A message without such
        thoughts, with reasoning of its own, or of another role is returned itself, any other as a
        copy."""
        content = message.get("content")
        if message.get("role") != "assistant" or not isinstance(content, str):
            return message
        if any(message.get(name) for name in _REASONING):
            return message
        thoughts, answer = split_thoughts(content)
        if not thoughts or not self._has_place_for_thoughts:
            return message
        return {**message, "content": answer, "reasoning_content": thoughts}

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Returns the token ids of a text. `special`: True: with the tokens that the tokenizer puts
        around a text, such as bos (or eos at the end, for some); False: without. Special tokens
        that the text spells out become those tokens in either case."""
        if len(text) > LONG_TEXT:
            # Unlike `encode`, a batch lets other threads of Python run meanwhile: a server's, and a
            # fleet's.
            return self._backend.encode_batch([text], add_special_tokens=special)[0].ids
        return self._backend.encode(text, add_special_tokens=special).ids

    def encode_spans(
        self, text: str, spans: Sequence[tuple[int, int]], split: bool = False
    ) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Returns the token ids of a rendered text, int32[T], and for each span of its characters
        the span (from, to) of its tokens, in the order of `spans`. `to` is not included, in neither
        kind of span; a token of which only a part lies in a span is. No tokens are put around the
        text. `split`: a token that reaches over the start of a span is replaced by those of its two
        parts, because a model is asked with the first part and writes the second."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        # A span has the tokens from the first that ends behind its start, which may reach over the
        # start as in transformers, up to the first that begins at its end or behind it. Offsets may
        # lack leading spaces.
        ids = list(encoding.ids)
        starts, ends = [], []
        for start, end in encoding.offsets:
            starts.append(start)
            ends.append(end)
        for border, _ in spans:
            position = bisect_right(ends, border)
            if not split or position == len(ids) or starts[position] >= border:
                continue
            before = self.encode(text[starts[position] : border])
            after = self.encode(text[border : ends[position]])
            new_starts = [starts[position]] * len(before) + [border] * len(after)
            new_ends = [border] * len(before) + [ends[position]] * len(after)
            ids[position : position + 1] = before + after
            starts[position : position + 1] = new_starts
            ends[position : position + 1] = new_ends
        token_spans = []
        for start, stop in spans:
            token_spans.append((bisect_right(ends, start), bisect_left(starts, stop)))
        return np.asarray(ids, np.int32), token_spans

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids. `skip_special_tokens`: True to leave out special tokens,
        such as the one that ends a turn."""
        plain_ids = [int(token_id) for token_id in ids]
        return self._backend.decode(plain_ids, skip_special_tokens=skip_special_tokens)

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of a model's tokens as rewards and records have it: without special
        tokens, but with the thoughts that some of them mark between `<think>` and `</think>` (see
        `thoughts.py`). For other models it is `decode`."""
        if self._thought_tags is None:
            return self.decode(ids)
        markers, tags = self._thought_tags
        plain_ids = [int(token_id) for token_id in ids]
        return markers.decoded(tags.tagged(markers.text(plain_ids)))

    def token_text(self, id: int) -> str:
        """Returns one token as text, for tables: special tokens and leading spaces are shown, so
        joining such texts does not give a text's exact characters. `<17>` for an id (17) without a
        token. A token that is only a part of a character becomes U+FFFD."""
        token = self._backend.id_to_token(int(id))
        if token is None:
            return f"<{int(id)}>"
        if "▁" in token:  # SentencePiece's leading space, which decoding strips
            return token.replace("▁", " ")
        return self.decode([id], skip_special_tokens=False)

    def vocabulary(self) -> dict[str, int]:
        """Returns token -> id, including added tokens."""
        return self._backend.get_vocab(with_added_tokens=True)

    def facts(self) -> dict[str, Any]:
        """Returns name -> short text for everything that prompts and answers depend on: hashes of
        the tokenizer, its templates and a rendered prompt, and the special tokens. Two tokenizers
        with equal facts behave the same; hosts and resumed runs compare them. If the template
        writes the present date, the facts differ from day to day."""
        question = [{"role": "user", "content": "2 + 3 = ?"}]
        try:
            rendered = self.encode_prompt(question).tolist()  # a template may write the date
        except ShoalError as error:
            rendered = str(error)
        return {
            "tokenizer.json": _digest(self._backend.to_str()),
            "the chat template": _digest(self.template),
            "the further chat templates": _digest(sorted(self.named_templates.items())),
            "response_template": _digest(self.response_template),
            "the prompt of a question": _digest(rendered),
            "special tokens": str(self._special),
            "eos_token_id": str(self.eos_ids),
            "pad_token_id": str(self.pad_id),
        }

    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Returns id -> (text, special) of the added tokens, which are found before a text is
        split; `special`: True if `decode` leaves the token out by default."""
        return {
            id: (token.content, token.special)
            for id, token in self._backend.get_added_tokens_decoder().items()
        }

    def write_templates(self, folder: Path) -> None:
        """Writes the chat templates into a model folder, in the files that transformers uses. A
        model without one gets no file."""
        tokenizer_files.write_templates(folder, self.template, self.named_templates)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ShoalError if a token id of the tokenizer, its pad id or an end-of-sequence id is
        outside of an embedding with `vocab_size` entries."""
        largest = max(self.vocab_size - 1, self.pad_id, max(self.eos_ids, default=0))
        if largest >= vocab_size:
            raise ShoalError(
                f"The tokenizer has token ids up to {largest}, but the model's vocabulary has "
                f"{vocab_size} entries: the tokenizer and the weights belong to different models."
            )

    def _encode_text(self, text: str) -> list[int]:
        """Returns the ids of a text with the tokenizer's special tokens around it, but without a
        second bos (if the text spells one out) and without an eos that the tokenizer appends; an
        eos that the text itself ends with stays.

        Some tokenizers append eos: to a model a prompt that ends with it is finished, and it would
        go on with another text.
        """
        ids = self.encode(text, special=True)
        plain = self.encode(text)
        if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            ids = ids[1:]
        # The text's own ids, and behind them one more.
        appended = bool(plain) and ids[-1 - len(plain) : -1] == plain
        if appended and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return ids

    def _special_id(self, name: str) -> int | None:
        """Returns the id of a special token by its role, such as `bos_token`; None if the model has
        none."""
        token = self._special.get(name)
        return None if token is None else self._backend.token_to_id(token)


_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold its thoughts; the first that is there counts."""


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its reasoning under both keys that templates read, `thinking` and
    `reasoning_content`; data sets use these or `reasoning`. Of several, `reasoning_content` counts,
    then `thinking`; a `thinking` that the message has stays. A message without reasoning is
    returned itself, any other as a copy."""
    for name in _REASONING:
        if name in message:
            reasoning = message[name]
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _fill_in(template: jinja2.Template, messages: list[dict[str, Any]], variables: dict) -> str:
    """Returns what a template writes for messages. If it raises, and calls of tools lack an id as
    Mistral's templates want them, they are tried with ids. Raises whatever the template raises."""
    try:
        return render_template(template, messages=messages, **variables)
    except Exception:  # a template may raise anything
        with_ids = _with_call_ids(messages)
        if with_ids == messages:
            raise
        return render_template(template, messages=with_ids, **variables)


def _with_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages in which every tool call has an id of CALL_ID's form, and every answer of a
    tool that of its call: by the id that both have, else by their order. Ids of another form are
    replaced. Messages without calls are returned themselves."""
    new_ids: dict[str, str] = {}  # id in `messages` -> id in the result
    unanswered: list[str] = []  # ids of the last calls, without those that have been answered
    num_calls = 0
    changed = []
    for message in messages:
        calls = message.get("tool_calls") or []
        if not all(isinstance(call, Mapping) for call in calls):
            return messages
        if calls:
            unanswered = []
            calls_with_ids = []
            for call in calls:
                old_id = str(call.get("id", ""))
                new_id = old_id if CALL_ID.fullmatch(old_id) else f"call{num_calls:05}"
                num_calls += 1
                new_ids[old_id] = new_id
                unanswered.append(new_id)
                calls_with_ids.append({**call, "id": new_id})
            message = {**message, "tool_calls": calls_with_ids}
        elif message.get("role") == "tool" and new_ids:
            old_id = str(message.get("tool_call_id", ""))
            if old_id and old_id in new_ids:
                new_id = new_ids[old_id]
            elif unanswered:
                new_id = unanswered[0]
            else:
                new_id = list(new_ids.values())[-1]
            if new_id in unanswered:
                unanswered.remove(new_id)
            message = {**message, "tool_call_id": new_id}
        changed.append(message)
    return changed


def _plain_text(messages: Messages, opens_answer: bool) -> str:
    """Returns the text of messages for a model without a template: the system's text as it is,
    other messages as lines `User: ...` and `Assistant: ...`, with the role's first letter in
    capitals. A message without a role is the user's; calls of tools are left out. `opens_answer`:
    end with `Assistant:`, for the model to continue."""
    lines = []
    for message in messages:
        role = str(message.get("role", "user"))
        content = str(message.get("content", ""))
        lines.append(content if role == "system" else f"{role.capitalize()}: {content}")
    if opens_answer:
        lines.append("Assistant:")
    return "\n".join(lines)


def _digest(value: Any) -> str:
    """Returns a short hash of a value's `repr`."""
    text = repr(value).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(text, digest_size=8).hexdigest()
