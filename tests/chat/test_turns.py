"""Turns in tokens: what is appended equals the whole conversation rendered once; calls are read
from markers' ids."""

from __future__ import annotations

import enum
import json
import pickle
import typing
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from chat_models import CHATS, write_chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CHATML

from shoal.chat.tokenizer import Tokenizer
from shoal.chat.tool_calls import FORMATS, LONGEST, ToolCall
from shoal.chat.turns import TurnFormat, find_call_format, schema
from shoal.config.sections.task import EnvironmentSection
from shoal.job.environments import TurnFormats
from shoal.records import ShoalError


def add(a: int, b: float = 1.0) -> float:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number,
            which may be left out.

    Returns:
        Their sum.
    """
    return a + b


def look(where: str, tags: list[str] | None = None, deep: bool = False) -> str:
    """Looks somewhere.

    Args:
        where: The place (choices: ["here", "there "])
        tags: What to look for.
        deep: Whether to dig.
    """
    return where + str(tags) + str(deep)


SCHEMAS = [schema(add), schema(look)]
DATE = datetime(2026, 1, 31)


class Clock(datetime):
    """The date of `ours` for transformers, whose templates write the present one."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return DATE


TOOL_FAMILIES = [family for family in CHATS if family != "gemma3"]
USER: dict[str, Any] = {"role": "user", "content": "What is 2 + 3?"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    result = {}
    for family in CHATS:
        result[family] = write_chat_tokenizer(tmp_path_factory.mktemp(family), family)
    return result


@pytest.fixture(scope="module")
def ours(folders) -> dict[str, Tokenizer]:
    result = {}
    for family, folder in folders.items():
        result[family] = Tokenizer.load(folder, date=DATE)
    return result


@pytest.fixture(scope="module")
def formats(ours) -> dict[str, TurnFormat]:
    result = {}
    for family in CHATS:
        result[family] = TurnFormat(ours[family], SCHEMAS if family != "gemma3" else [])
    return result


@pytest.fixture(scope="module")
def theirs(folders, transformers) -> Iterator[dict[str, Any]]:
    result = {}
    for family, folder in folders.items():
        result[family] = transformers.AutoTokenizer.from_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
        yield result


def in_message(*calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    result = []
    for i, (name, arguments) in enumerate(calls):
        result.append(
            {
                "id": f"call{i:05}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
    return result


def answers(*texts: str) -> list[dict[str, Any]]:
    result = []
    for i, text in enumerate(texts):
        result.append(
            {"role": "tool", "name": "add", "tool_call_id": f"call{i:05}", "content": text}
        )
    return result


# Tokens only grow


def sampled(
    tokenizer: Tokenizer, theirs: Any, before: list[dict], turn: dict, tools: Any
) -> list[int]:
    """The ids that a model samples when it answers as `turn` is rendered, the end of the turn
    included."""
    prompt = theirs.apply_chat_template(
        before, tools=tools, add_generation_prompt=True, tokenize=False
    )
    whole = theirs.apply_chat_template([*before, turn], tools=tools, tokenize=False)
    assert whole.startswith(prompt)
    ids = tokenizer.encode(whole.removeprefix(prompt))
    return ids[: next(i for i, id in enumerate(ids) if id in tokenizer.eos_ids) + 1]


def grow(
    format: TurnFormat,
    tokenizer: Tokenizer,
    theirs: Any,
    rounds: list[tuple[dict, list[dict]]],
    tools: Any,
) -> tuple[list[int], list[int]]:
    """The ids of a rollout, and those of its whole conversation by apply_chat_template."""
    messages: list[dict[str, Any]] = [USER]
    ids = format.encode_prompt(messages).tolist()
    assert ids == list(
        theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False
        )
    )
    for turn, following in rounds:
        turn_ids = sampled(tokenizer, theirs, messages, turn, tools)
        _, calls = format.read(turn_ids)
        assert [(call.name, call.arguments) for call in calls] == [
            (call["function"]["name"], call["function"]["arguments"])
            for call in turn.get("tool_calls", [])
        ]
        ids += [*turn_ids, *format.encode_context(following, calls, last=turn_ids[-1])]
        messages += [turn, *following]
    return ids, list(
        theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False
        )
    )


MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "<|im_end|>",
    "<think>",
    "\n",
    " ",
    "{",
    '"',
    "é",
    "␂END OF MESSAGE␂",
    "10",
]
words = st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=8)
texts = st.lists(st.one_of(st.sampled_from(MARKERS), words), min_size=1, max_size=5).map("".join)


@pytest.mark.parametrize("family", TOOL_FAMILIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_grows_equals_the_conversation_rendered_once(formats, ours, theirs, family, data):
    rounds = []
    for _ in range(data.draw(st.integers(1, 3), "rounds")):
        # Llama 3.1 and gpt-oss take one call in a message; Gemma 4 renders what is said beside a
        # call after its answer.
        count = 1 if family in ("llama3_1", "gpt_oss") else data.draw(st.integers(1, 3), "calls")
        calls = [
            ("add", {"a": data.draw(st.integers(-99, 99))})
            if data.draw(st.booleans())
            else ("look", {"where": 'é{<"'})
            for _ in range(count)
        ]
        said = {"qwen2_5": "So", "qwen3": "<think>\nWhy?\n</think>\n\nSo", "qwen3_5": "So"}.get(
            family, ""
        )
        turn = {"role": "assistant", "content": said, "tool_calls": in_message(*calls)}
        if family in ("qwen3_5_think", "qwen3_8", "gpt_oss"):
            turn["reasoning_content"] = turn["thinking"] = "Why?"
        rounds.append((turn, answers(*(data.draw(texts) for _ in calls))))
    grown, whole = grow(formats[family], ours[family], theirs[family], rounds, SCHEMAS)
    assert grown == whole


@pytest.mark.parametrize(
    "family", ["qwen2_5", "llama3_1", "gemma3", "gemma4", "mistral", "mistral_args"]
)
@settings(max_examples=25, deadline=None)
@given(data=st.lists(texts, min_size=1, max_size=3))
def test_an_environment_that_answers_in_words(ours, theirs, family, data):
    format = TurnFormat(ours[family], [])
    rounds = []
    for text in data:
        rounds.append(
            ({"role": "assistant", "content": "Is it 10?"}, [{"role": "user", "content": text}])
        )
    grown, whole = grow(format, ours[family], theirs[family], rounds, None)
    assert grown == whole
    # Gemma 4 leaves out thoughts of earlier turns, and there are none here.
    assert bool(format.notes) == (family == "gemma4")


def test_a_template_that_rewrites_history_is_said_at_the_start(formats, ours):
    """Qwen3 leaves out the thoughts of turns before the last user message; a rollout keeps them."""
    assert ["user message" in note for note in formats["qwen3"].notes] == [True]
    assert ["user message" in note for note in formats["qwen3_5"].notes] == [True]
    assert ["user message" in note for note in formats["qwen3_5_think"].notes] == [True]
    # moves what is said beside calls, and leaves out thoughts
    assert ["tool message" in note for note in formats["gemma4"].notes] == [True, False]
    # ends an answer with <|return|> only while nothing follows it
    assert ["user message" in note for note in formats["gpt_oss"].notes] == [True]
    # writes tools before the last user message
    assert ["user message" in note for note in formats["mistral"].notes] == [True]
    for family in ("qwen2_5", "qwen3_8", "llama3_1", "mistral_args"):
        assert not formats[family].notes, family
    format, tokenizer = formats["qwen3"], ours["qwen3"]
    said = "<think>\nWhy?\n</think>\n\n5"
    messages = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
    turn = tokenizer.encode(f"{said}<|im_end|>")
    grown = [*format.encode_prompt([USER]), *turn, *format.encode_context(messages[-1:])]
    assert "Why?" in tokenizer.decode(grown) and "Why?" not in tokenizer.render(messages)


def test_a_run_says_it_once(ours):
    """For each environment's tools its own format; the same line for two of them is printed
    once."""

    def kind_of(columns):
        return columns["environment"]

    def functions(columns):
        return {"add": add}

    sessions: Any = SimpleNamespace(kind_of=kind_of, functions=functions)
    printed: list[str] = []
    formats = TurnFormats(ours["qwen3"], sessions, EnvironmentSection(), printed.append)
    for name in ("a", "b", "a"):
        assert formats.of({"environment": name}).notes == printed and len(printed) == 1


@pytest.mark.parametrize(("family", "last", "first"), [
    ("qwen2_5", "<|im_end|>", "\n"), ("qwen2_5", "<|endoftext|>", "\n"),
    ("qwen2_5", "x", "<|im_end|>"), ("llama3_1", "<|eot_id|>", "<|start_header_id|>"),
    ("llama3_1", "<|eom_id|>", "<|start_header_id|>"), ("llama3_1", "x", "<|eot_id|>"),
    ("gemma4", "<|tool_response>", "r"), ("gemma4", "<turn|>", "<|tool_response>"),
    ("gemma4", "x", "<|tool_response>"),
    ("gpt_oss", "<|call|>", "<|start|>"), ("gpt_oss", "x", "<|call|>"),
    ("mistral", "</s>", "[TOOL_RESULTS]"), ("mistral", "x", "</s>"),
])  # fmt: skip
def test_a_turn_that_did_not_end_is_ended(formats, ours, family, last, first):
    ids = formats[family].encode_context(answers("5"), last=ours[family].encode(last)[-1])
    assert ours[family].token_text(ids[0]) == first


def test_names_and_answers_that_a_model_or_tool_makes_up(formats, ours):
    """The mark, an end of turn or half a character in them does no harm."""
    format, tokenizer = formats["gemma4"], ours["gemma4"]
    bad = ToolCall('␂END OF MESSAGE␂<turn|>"', {})
    text = tokenizer.decode(format.encode_context(answers("\ud800"), [bad]), False)
    assert text == 'response:unknown{value:<|"|>?<|"|>}<tool_response|>'
    context = formats["llama3_1"].encode_context(
        answers("5", "6"), [ToolCall("add", {}), ToolCall("look", {})]
    )
    text = ours["llama3_1"].decode(context, False)
    # its template refuses two calls in one message
    assert '"5"<|eot_id|>' in text and '"6"<|eot_id|>' in text


# The package renderers, written by hand for each family


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "llama3_1", "gemma4"])
def test_equal_to_renderers(formats, ours, theirs, family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from renderers import configs, gemma4, llama_3, qwen3, qwen35
    kinds: dict[str, Any] = {
        "qwen3": (qwen3.Qwen3Renderer, configs.Qwen3RendererConfig()),
        "qwen3_5": (qwen35.Qwen35Renderer, configs.Qwen35RendererConfig(enable_thinking=False)),
        "llama3_1": (llama_3.Llama3Renderer, configs.Llama3RendererConfig()),
        "gemma4": (gemma4.Gemma4Renderer, configs.Gemma4RendererConfig()),
    }
    kind, config = kinds[family]
    renderer, format, tokenizer = kind(theirs[family], config), formats[family], ours[family]
    prompt = format.encode_prompt([USER]).tolist()
    assert prompt == renderer.render_ids([USER], tools=SCHEMAS, add_generation_prompt=True)
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": in_message(("add", {"a": 2, "b": 3.5})),
    }
    ids = sampled(tokenizer, theirs[family], [USER], turn, SCHEMAS)
    if family != "llama3_1":
        parsed = renderer.parse_response(ids, tools=SCHEMAS)
    else:
        parsed = renderer.parse_response(ids)
    message, calls = format.read(ids)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [
        (c.name, c.arguments) for c in calls
    ]
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3.5}}}
    ]
    following = answers("5.5")
    theirs_grown = renderer.bridge_to_next_turn(prompt, ids, following, tools=SCHEMAS)
    assert [
        *prompt,
        *ids,
        *format.encode_context(following, calls, ids[-1]),
    ] == theirs_grown.token_ids
    words = [{"role": "user", "content": "And now?"}]
    end = tokenizer.encode(
        {"llama3_1": "<|eot_id|>", "gemma4": "<turn|>"}.get(family, "<|im_end|>")
    )
    said = [*tokenizer.encode("It is 5."), *end]
    theirs_grown = renderer.bridge_to_next_turn(prompt, said, words, tools=SCHEMAS)
    if theirs_grown is not None:  # none where thoughts may have to go
        assert [*prompt, *said, *format.encode_context(words)] == theirs_grown.token_ids


# Reading calls

CALLS = {
    "qwen2_5": '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
    "qwen3_5": "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n"
    "</tool_call>",
    "llama3_1": '{"name": "add", "parameters": {"a": 2}}',
    "gemma4": "<|tool_call>call:add{a:2}<tool_call|>",
    "gpt_oss": "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": 2}<|call|>',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}]',
    "mistral_args": '[TOOL_CALLS]add[ARGS]{"a": 2}',
}
ADD = ToolCall("add", {"a": 2})


@pytest.mark.parametrize("family", CALLS)
def test_one_call_several_and_none(formats, ours, family):
    format, tokenizer = formats[family], ours[family]
    separator = "; " if family == "llama3_1" else "\n"
    message, calls = format.read(tokenizer.encode(separator.join([CALLS[family]] * 3)))
    assert calls == [ADD] * 3 and len(message["tool_calls"]) == 3 and message["content"] == ""
    for text in (" It is {5}, I think.\n", '{"name": "Ann", "age": 5}', '{"type": "number"}'):
        assert format.read(tokenizer.encode(text)) == ({"role": "assistant", "content": text}, [])


@pytest.mark.parametrize(("family", "form"), [
    ("qwen2_5", "hermes"), ("qwen3", "hermes"), ("qwen3_5", "xml"), ("qwen3_5_think", "xml"),
    ("qwen3_8", "xml"), ("llama3_1", "llama"), ("gemma4", "gemma"), ("gpt_oss", "harmony"),
    ("mistral", "mistral"), ("mistral_args", "mistral"),
])  # fmt: skip
def test_the_form_of_calls_is_that_of_the_template(ours, family, form):
    assert find_call_format(ours[family], SCHEMAS) == form


def test_every_form_can_be_chosen():
    choices = typing.get_args(typing.get_type_hints(EnvironmentSection)["call_format"])
    assert set(choices) == {"auto", *FORMATS, "template"}


# gpt-oss: the header of a call

BODY = '<|message|>{"a": 2}'


@pytest.mark.parametrize("text", [
    f"<|channel|>commentary to=functions.add <|constrain|>json{BODY}<|call|>",
    f"<|channel|>commentary to=functions.add<|constrain|>json{BODY}<|call|>",
    f"<|channel|>commentary to=functions.add code{BODY}<|call|>",
    f"<|channel|>commentary to=functions.add{BODY}<|call|>",
    # as the template writes it, and in another channel
    f" to=functions.add<|channel|>commentary json{BODY}<|call|>",
    f" to=functions.add<|channel|>commentary <|constrain|>json{BODY}<|call|>",
    f"<|channel|>analysis to=functions.add <|constrain|>json{BODY}<|call|>",
    f"<|channel|>analysis<|message|>I add.<|end|><|start|>assistant to=functions.add"
    f"<|channel|>commentary json{BODY}<|call|>",
])  # fmt: skip
def test_gpt_oss_addresses_calls_in_several_ways(formats, ours, text):
    message, calls = formats["gpt_oss"].read(ours["gpt_oss"].encode(text))
    assert calls == [ADD]
    assert message["content"] == ("<think>\nI add.\n</think>" if "I add." in text else "")


def test_gpt_oss_calls_one_after_another_and_tools_of_its_own(formats, ours):
    format, tokenizer = formats["gpt_oss"], ours["gpt_oss"]
    call = CALLS["gpt_oss"].removesuffix("<|call|>")
    text = f"{call}<|end|><|start|>assistant{CALLS['gpt_oss']}"
    message, calls = format.read(tokenizer.encode(text))
    assert calls == [ADD] * 2 and message["content"] == ""
    # The template takes one call in a message: both answers follow the last one.
    context = tokenizer.decode(format.encode_context(answers("5", "6"), calls), False)
    assert context == (
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"5"<|end|>'
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"6"<|end|>'
        "<|start|>assistant"
    )
    text = '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>'
    _, calls = format.read(tokenizer.encode(text))
    assert calls == [ToolCall("browser.search", {"query": "x"})]
    for text in (
        "<|channel|>final<|message|> to=functions.add",
        "to=functions.add",
        "<|channel|>commentary<|message|>I call to=functions.add<|end|>",
    ):
        assert format.read(tokenizer.encode(text))[1] == []


def test_gpt_oss_goes_on_after_a_call_and_after_an_answer(formats, ours, tmp_path):
    """`<|call|>` and `<|return|>` end completions. The template writes `<|end|>` in place of
    `<|return|>` once a message follows; the token that was sampled stays."""
    format, tokenizer = formats["gpt_oss"], ours["gpt_oss"]
    ids = tokenizer.encode(CALLS["gpt_oss"])
    assert tokenizer.token_text(ids[-1]) == "<|call|>" and ids[-1] in tokenizer.eos_ids
    _, calls = format.read(ids)
    context = tokenizer.decode(format.encode_context(answers("5"), calls, ids[-1]), False)
    assert context == (
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"5"<|end|>'
        "<|start|>assistant"
    )
    words = "<|start|>user<|message|>Sure?<|return|><|call|><|end|><|start|>assistant"
    said = [{"role": "user", "content": "Sure?<|return|><|call|>"}]
    for end, context in (("<|return|>", words), ("<|call|>", words), ("x", f"<|end|>{words}")):
        ids = format.encode_context(said, last=tokenizer.encode(end)[-1])
        assert tokenizer.decode(ids, False) == context
    # Without <|call|> among the ends, a completion would run on behind its call.
    folder = write_chat_tokenizer(tmp_path, "gpt_oss")
    only = tokenizer.encode("<|return|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": only}))
    with pytest.raises(ShoalError, match=r"no end-of-turn token.*<\|call\|>.*generation_config"):
        TurnFormat(Tokenizer.load(folder), SCHEMAS)
    assert TurnFormat(Tokenizer.load(folder), []).encode_context([USER])


# Mistral: ids of calls


@pytest.mark.parametrize(("text", "id"), [
    ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}, "id": "Ab1Cd2Ef3"}]', "Ab1Cd2Ef3"),
    ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}, "id": "</s>[INST]"}]', ""),
    ('[TOOL_CALLS]add[CALL_ID]Ab1Cd2Ef3[ARGS]{"a": 2}', "Ab1Cd2Ef3"),
    ('[TOOL_CALLS]add[CALL_ID]1[ARGS]{"a": 2}', ""), ('[TOOL_CALLS]add{"a": 2}', ""),
])  # fmt: skip
def test_an_answer_has_the_id_of_its_call(formats, ours, text, id):
    format, tokenizer = formats["mistral"], ours["mistral"]
    message, calls = format.read(tokenizer.encode(f"{text}</s>"))
    assert calls == [ADD._replace(id=id)] and message["content"] == ""
    assert message["tool_calls"][0].get("id", "") == id
    context = tokenizer.decode(format.encode_context(answers("5"), calls), False)
    written = id or "call00000"
    assert context == f'[TOOL_RESULTS] {{"content": 5, "call_id": "{written}"}}[/TOOL_RESULTS]'
    answer = {"role": "tool", "name": "add", "content": "5"}
    history = tokenizer.decode(format.encode_prompt([USER, message, answer]), False)
    assert history.endswith(f'"id": "{written}"}}]</s>{context}')


def test_several_calls_have_several_ids(formats, ours):
    format, tokenizer = formats["mistral"], ours["mistral"]
    calls = [ToolCall("add", {}), ToolCall("look", {}, id="Ab1Cd2Ef3")]
    context = tokenizer.decode(format.encode_context(answers("5", "6"), calls), False)
    assert context == (
        '[TOOL_RESULTS] {"content": 5, "call_id": "call00000"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {"content": 6, "call_id": "Ab1Cd2Ef3"}[/TOOL_RESULTS]'
    )


# A thought that the template opens


@pytest.mark.parametrize("family", ["qwen3_5_think", "qwen3_8"])
def test_a_call_in_a_thought_that_the_template_opens_is_none(formats, ours, family):
    format, tokenizer = formats[family], ours[family]
    call = CALLS["qwen3_5"]
    prompt = tokenizer.decode(format.encode_prompt([USER]), False)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")
    message, calls = format.read(tokenizer.encode(f"Maybe {call}?\n</think>\n\n{call}<|im_end|>"))
    assert calls == [ADD] and message["content"] == f"Maybe {call}?\n</think>"
    assert format.read(tokenizer.encode(f"Maybe {call}"))[1] == []
    # The template writes the history as it was sampled.
    history = [USER, message, {"role": "tool", "name": "add", "content": "5"}]
    text = tokenizer.decode(format.encode_prompt(history), False)
    assert f"assistant\n<think>\nMaybe {call}?\n</think>\n\n{call}<|im_end|>" in text


@pytest.mark.parametrize("text", [
    f"<|python_tag|>{CALLS['llama3_1']}<|eom_id|>", '{"type": "function", "name": "add", '
                                                    '"parameters": {"a": 2}}',
    '{"type": "function", "function": {"name": "add", "arguments": {"a": "2"}}}',
])  # fmt: skip
def test_llama_writes_calls_in_several_ways(formats, ours, text):
    assert formats["llama3_1"].read(ours["llama3_1"].encode(text))[1] == [ADD]


def test_what_stands_beside_calls_is_the_content(formats, ours):
    for family in ("qwen2_5", "qwen3_5", "gemma4"):
        ids = ours[family].encode(f"Let me see.\n{CALLS[family]} Then\n{CALLS[family]}")
        message, calls = formats[family].read(ids)
        assert message["content"] == "Let me see.\n Then" and calls == [ADD] * 2


@pytest.mark.parametrize(
    "family", ["qwen2_5", "qwen3_5", "gemma4", "gpt_oss", "mistral", "mistral_args"]
)
def test_a_literal_marker_never_matches(formats, ours, family):
    """The text of a marker in other tokens is text, in a turn as in what users and tools write."""
    tokenizer = ours[family]
    literal = []
    for character in CALLS[family]:
        for id in tokenizer.encode(character):
            literal.append(id)
    assert tokenizer.decode(literal) == CALLS[family]
    assert formats[family].read(literal) == ({"role": "assistant", "content": CALLS[family]}, [])
    message, calls = formats[family].read([*literal, *tokenizer.encode(CALLS[family])])
    assert calls == [ADD] and message["content"] == CALLS[family]


def test_markers_that_are_no_tokens_are_found_in_the_text(tmp_path):
    """Hermes' form in a model whose vocabulary does not have its markers."""
    template = (Path(__file__).parents[1] / "support/chat_templates/qwen2_5.jinja").read_text()
    template = template.replace("<|im_end|>", "<end_of_turn>")
    tokenizer = Tokenizer.load(write_chat_tokenizer(tmp_path, "gemma3", template))
    message, calls = TurnFormat(tokenizer, SCHEMAS).read(
        tokenizer.encode(f"So: {CALLS['qwen2_5']}<end_of_turn>")
    )
    assert calls == [ADD] and message["content"] == "So:"


def test_calls_in_thoughts_are_thoughts(formats, ours, tmp_path):
    for family, opened, closed in (
        ("qwen3", "<think>", "</think>"),
        ("gemma4", "<|channel>", "<channel|>"),
        ("gpt_oss", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        ("mistral", "[THINK]", "[/THINK]"),
    ):
        call = CALLS.get(family, CALLS["qwen2_5"])
        ids = ours[family].encode(f"{opened}Maybe {call}?{closed}{call}")
        message, calls = formats[family].read(ids)
        assert calls == [ADD] and "Maybe" in message["content"]
        assert formats[family].read(ours[family].encode(f"{opened}Maybe {call}"))[1] == []
    template = (Path(__file__).parents[1] / "support/chat_templates/qwen3.jinja").read_text()
    opens = template.replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    )
    tokenizer = Tokenizer.load(write_chat_tokenizer(tmp_path, "qwen3", opens))
    message, calls = TurnFormat(tokenizer, SCHEMAS).read(
        tokenizer.encode(f"{call}</think>{CALLS['qwen2_5']}")
    )
    assert calls == [ADD]  # the template opens the thought


@pytest.mark.parametrize(("body", "why"), [
    ("", "no valid JSON"), ("{", "no valid JSON"), ("[]", "no name"), ("5", "no name"),
    ("null", "no name"),
    ('{"function": "add"}', "no name"),
    ('{"arguments": {}}', "no name"), ('{"name": 5}', "no name"), ('{"name": "add", "arguments": '
                                                                   '[1]}', "no object"),
    ('{"name": "add", "arguments": "x"}', "no valid JSON"), ('{"name": "add", "name": '
                                                             '"add"}', "twice"),
    ('{"name": "add", "arguments": {"a": 1, "a": 2}}', "twice"), ('{"name": "add", "arguments": '
                                                                  '{"a": NaN}}', "NaN"),
    ('{"name": "add", "arguments": {"a": 1e999}}', "NaN"), ('{"name": "add", "arguments": {"a": '
                                                            '"\\ud800"}}', "half"),
    ('{"name": "add", "arguments": {"a": ' + "[" * 1000 + "]" * 1000 + "}}", "nested"),
    ("[" * 500_000, "nested"), ('{"name": "' + '\\"' * 300_000, "no valid JSON"),
    ("1" * 5000, "digits"),
    (CALLS["qwen2_5"], "no valid JSON"), ("x" * (LONGEST + 1), "longer"),
])  # fmt: skip
def test_what_cannot_be_read_is_answered(formats, ours, body, why):
    ids = ours["qwen2_5"].encode(f"So:<tool_call>{body}</tool_call><|im_end|>")
    message, calls = formats["qwen2_5"].read(ids)
    assert (
        calls
        and calls[0].name == ""
        and why in calls[0].error
        and "could not be read" in calls[0].error
    )
    assert message == {"role": "assistant", "content": ours["qwen2_5"].decode(ids)}


@pytest.mark.parametrize(("family", "text", "why"), [
    ("qwen2_5", "<tool_call>{}", "does not end"),
    ("qwen2_5", f"<tool_call>{CALLS['qwen2_5']}", "no valid JSON"),
    ("qwen3_5", "<tool_call></tool_call>", "no name"),
    ("qwen3_5", "<tool_call><parameter=name>add</parameter></tool_call>", "no name"),
    ("qwen3_5", "<tool_call><function=add><parameter=a>2</function></tool_call>", "no argument"),
    ("qwen3_5", "<tool_call><function=add>a=2</function></tool_call>", "no argument"),
    ("qwen3_5", "<tool_call><function=f>" + "<parameter=a>1</parameter>" * 2
     + "</function></tool_call>", "twice"),
    ("qwen3_5", "<tool_call><function=f>" + "<parameter=a>" * 60_000
     + "</function></tool_call>", "no argument"),
    ("llama3_1", '{"name": "add", "parameters": {"a": 2}} is the call', "no valid JSON"),
    ("llama3_1", '<|python_tag|>print("hello")', "no valid JSON"),
    ("llama3_1", '{"name": "add", "parameters": {"a": 2', "no valid JSON"),
    ("gemma4", "<|tool_call>add(a=2)<tool_call|>", "no valid JSON"),
    ("gemma4", '<|tool_call>call:look{where:<|"|>here}<tool_call|>', "no valid JSON"),
    ("gpt_oss", "<|channel|>commentary to=functions.add<|message|>{<|call|>", "no valid JSON"),
    ("gpt_oss", "<|channel|>commentary to=functions.add<|message|>[2]<|call|>", "no object"),
    ("gpt_oss", "<|channel|>commentary to=functions.add<|message|><|call|>", "no valid JSON"),
    ("gpt_oss", "<|channel|>commentary to=functions.add <|call|>", "no valid JSON"),
    ("gpt_oss", '<|channel|>commentary to=functions.add<|message|>{"a": 2}', "does not end"),
    ("gpt_oss", '<|channel|>commentary <|constrain|>json<|message|>{"a": 2}<|call|>', "no name"),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "argu', "no valid JSON"),
    ("mistral", "[TOOL_CALLS] []", "no name"),
    ("mistral_args", '[TOOL_CALLS]add[ARGS]{"a": ', "no valid JSON"),
    ("mistral_args", "[TOOL_CALLS]add[ARGS]", "no valid JSON"),
    ("mistral_args", '[TOOL_CALLS][ARGS]{"a": 2}', "no valid JSON"),
    ("gemma4", "<|tool_call>call:add" + "{a:" * 1000 + "1" + "}" * 1000 + "<tool_call|>", "nested"),
])  # fmt: skip
def test_what_cannot_be_read_in_other_formats(formats, ours, family, text, why):
    _, calls = formats[family].read(ours[family].encode(text))
    assert len(calls) == 1 and why in calls[0].error


@pytest.mark.slow
@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_long_turns_are_read_in_bounded_time(formats, ours, family):
    """Texts that are quadratic for careless patterns, of 40,000 tokens."""
    tokenizer = ours[family]
    call = CALLS.get(family, CALLS["qwen2_5"])
    for text in (
        call.replace("2", "3"),
        "<tool_call>",
        "</tool_call>",
        "<think>",
        '{"name":',
        '"\\',
        "<|channel>",
        "<|tool_call>call:a{",
        "\n \n",
        "{a:",
        '<|"|>',
        "<parameter=a>\n",
        "<|channel|>",
        "<|channel|>analysis<|message|>",
        "<|channel|>commentary to=functions.add",
        " to=a",
        "[TOOL_CALLS]",
        "[THINK]",
    ):
        ids = tokenizer.encode(text)
        formats[family].read(ids * (40_000 // len(ids)))
        formats[family].read([*tokenizer.encode(call)[:12], *ids * (40_000 // len(ids))])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=60), family=st.sampled_from(sorted(CHATS)))
def test_any_tokens_are_a_message(formats, ours, family, ids):
    ids = [id for id in ids if id < ours[family].vocab_size]
    message, calls = formats[family].read(ids)
    json.dumps([message, calls], allow_nan=False)
    if not any(not call.error for call in calls):
        assert message["content"] == ours[family].text(ids)
    formats[family].encode_context(answers("5") if family != "gemma3" else [USER], calls[:1])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "arguments", "parameters", "function", "type", "a", "b"]),
            inner,
            max_size=4,
        )
    ),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(value=values, name=st.text(max_size=6), family=st.sampled_from(sorted(CALLS)))
def test_any_json_in_a_call_is_a_call_or_an_error(formats, ours, family, value, name):
    written = json.dumps(value)
    xml = ("<tool_call>", f"<function={name}><parameter=a>{written}</parameter></function>")
    parts = {
        "qwen3_5": (*xml, "</tool_call>"),
        "gemma4": ("<|tool_call>", f"call:{name}{written}", "<tool_call|>"),
        "llama3_1": ("<|python_tag|>", written, ""),
        "gpt_oss": (f"<|channel|>commentary to={name} <|message|>", written, "<|call|>"),
        "mistral": ("[TOOL_CALLS]", written, ""),
        "mistral_args": ("[TOOL_CALLS]", f"{name}[ARGS]{written}", ""),
    }
    opened, text, closed = parts.get(family, ("<tool_call>", written, "</tool_call>"))
    message, calls = formats[family].read(ours[family].encode(f"{opened}{text}{closed}"))
    assert calls and all(bool(call.name) != bool(call.error) for call in calls)
    assert len(message.get("tool_calls", [])) == sum(not call.error for call in calls)
    formats[family].encode_context(answers(*"1" * len(calls)), calls)


@pytest.mark.parametrize(("text", "value"), [
    ("7", 7), (" 7\n", 7), ("7.0", 7), ("seven", "seven"), ("7.5", "7.5"), ("true", "true"),
    ("[7]", "[7]"),
])  # fmt: skip
def test_texts_get_the_types_of_the_schema(formats, ours, text, value):
    xml = f"<tool_call><function=add><parameter=a>\n{text}\n</parameter></function></tool_call>"
    assert formats["qwen3_5"].read(ours["qwen3_5"].encode(xml))[1] == [
        ToolCall("add", {"a": text if isinstance(value, str) else value})
    ]
    hermes = (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 7, \\"b\\": \\"1.5\\"}"}</tool_call>'
    )
    assert formats["qwen2_5"].read(ours["qwen2_5"].encode(hermes))[1] == [
        ToolCall("add", {"a": 7, "b": 1.5})
    ]


def test_types_of_other_arguments(formats, ours):
    xml = (
        "<tool_call><function=look><parameter=where>\n 7 "
        '\n</parameter><parameter=tags>\n["a"]\n</parameter>'
        "<parameter=deep>\nTrue\n</parameter></function></tool_call>"
    )
    assert formats["qwen3_5"].read(ours["qwen3_5"].encode(xml))[1] == [
        ToolCall("look", {"where": " 7 ", "tags": ["a"], "deep": True})
    ]
    none = "<tool_call><function=look><parameter=tags>None</parameter></function></tool_call>"
    assert formats["qwen3_5"].read(ours["qwen3_5"].encode(none))[1] == [
        ToolCall("look", {"tags": None})
    ]
    gemma = (
        '<|tool_call>call:look{where:<|"|>a, b: '
        '{"c"}<|"|>,tags:[<|"|>x<|"|>],deep:true}<tool_call|>'
    )
    assert formats["gemma4"].read(ours["gemma4"].encode(gemma))[1] == [
        ToolCall("look", {"where": 'a, b: {"c"}', "tags": ["x"], "deep": True})
    ]


# The tokenizer's own response_template

ANCHOR = {"start_anchor": "<|im_start|>assistant\n"}
THOUGHTS = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
REST = {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}
RESPONSE_TEMPLATES: dict[str, dict[str, Any]] = {
    "json": {
        **ANCHOR,
        "fields": {
            "reasoning_content": THOUGHTS,
            "content": REST,
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    },
    "xml": {
        **ANCHOR,
        "fields": {
            "reasoning_content": THOUGHTS,
            "content": REST,
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
                },
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
        },
    },
    "list": {
        **ANCHOR,
        "fields": {
            "content": REST,
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "content": "json",
                "transform_each": True,
                "transform": {
                    "type": "function",
                    "function": {"name": "{tool}", "arguments": "{input}"},
                },
            },
        },
    },
    "gemma": {
        "start_anchor_pattern": r"(?:<\|turn>model\n|<tool_response\|>)",
        "fields": {
            "reasoning_content": {
                "open": "<|channel>thought\n",
                "close": "<channel|>",
                "content": "text",
            },
            "content": {
                "close_pattern": r"(?:<turn\|>|<\|tool_response>|<eos>)\s*|$",
                "content": "text",
            },
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close_pattern": r"<tool_call\|>\s*",
                "repeats": True,
                "content": "json",
                "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
        },
    },
}
TURNS = {
    "json": [
        "<think>Why?</think>\nSo" + CALLS["qwen2_5"] * 2,
        "None.",
        "<think>" + CALLS["qwen2_5"],
    ],
    "xml": ["So\n" + CALLS["qwen3_5"] * 2, "None."],
    "list": [
        '<tool_call>[{"tool": "add", "input": {"a": 2}}, {"tool": "add", "input": {"a": '
        "2}}]</tool_call>"
    ],
    "gemma": [
        "<|channel>thought\nWhy?<channel|>" + CALLS["gemma4"] * 2,
        "None.",
        '<|tool_call>call:look{where:<|"|>a: {b}, "c"<|"|>,tags:[<|"|>x<|"|>]}<tool_call|>',
    ],
}


@pytest.mark.parametrize("kind", RESPONSE_TEMPLATES)
def test_response_template_as_transformers_reads_it(tmp_path, transformers, kind):
    family, end = ("gemma4", "<turn|>") if kind == "gemma" else ("qwen3", "<|im_end|>")
    folder = write_chat_tokenizer(tmp_path, family, response_template=RESPONSE_TEMPLATES[kind])
    tokenizer, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert pickle.loads(pickle.dumps(tokenizer)).response_template == RESPONSE_TEMPLATES[kind]
    format = TurnFormat(tokenizer, SCHEMAS)
    prompt = format.encode_prompt([USER]).tolist()
    for text in TURNS[kind]:
        ids = tokenizer.encode(f"{text}{end}")
        message, calls = format.read(ids)
        expected = theirs.parse_response(ids, prefix=prompt, tools=SCHEMAS)
        assert message.get("tool_calls", []) == expected.get("tool_calls", [])
        assert len(calls) == len(expected.get("tool_calls", []))
    literal = []
    for character in TURNS[kind][0]:
        for id in tokenizer.encode(character):
            literal.append(id)
    assert format.read(literal)[1] == []


@pytest.mark.parametrize("table", [
    {"fields": {}}, [], {"fields": {"tool_calls": {"open": "<t>", "content": "kv-lines"}}},
    {"fields": {"tool_calls": {"open_pattern": "(", "content": "json"}}},
    {"fields": {"tool_calls": {"open": "<t>", "content": "xml-inline",
                               "content_args": {"tag_pattern": "(.)"}}}},
])  # fmt: skip
def test_a_response_template_that_cannot_be_used(tmp_path, table):
    tokenizer = Tokenizer.load(write_chat_tokenizer(tmp_path, "qwen3", response_template=table))
    with pytest.raises(ShoalError, match=r"response_template .* environment\.call_format"):
        TurnFormat(tokenizer, SCHEMAS, "template")
    assert TurnFormat(tokenizer, SCHEMAS, "hermes").read(tokenizer.encode(CALLS["qwen2_5"]))[1] == [
        ADD
    ]


# What is refused


@pytest.mark.parametrize(
    ("turn", "content", "calls"),
    [
        ('Well <tool_call>\n{"name": "add", "argu', 'Well <tool_call>\n{"name": "add", "argu', 0),
        ("Well <tool_call>", "Well <tool_call>", 0),
        (f'{CALLS["qwen2_5"]}\n<tool_call>\n{{"name": "ad', '<tool_call>\n{"name": "ad', 1),
    ],
)
def test_a_call_that_a_limit_cuts_is_text_and_an_end_of_turn_comes_before_the_answer(
    formats, ours, turn, content, calls
):
    form, ids = formats["qwen2_5"], ours["qwen2_5"].encode(turn)
    message, _ = form.read(ids)
    made = message.get("tool_calls", [])
    assert message["content"] == content and len(made) == calls
    answers = [{"role": "tool", "name": "add", "content": "5"}] if made else [USER]
    context = form.encode_context(answers, [ADD] * calls, ids[-1])
    assert context[0] in ours["qwen2_5"].eos_ids
    assert context[1:] == form.encode_context(answers, [ADD] * calls)


def test_templates_without_tools_or_ends_are_refused(ours, tmp_path):
    with pytest.raises(ShoalError, match=r"no place for tools.*model\.template"):
        TurnFormat(ours["gemma3"], SCHEMAS)
    only_tools = CHATML.replace("{%- for message", "{{ tools | tojson }}{%- for message", 1)
    tokenizer = Tokenizer.load(write_chat_tokenizer(tmp_path / "1", "qwen2_5", only_tools))
    with pytest.raises(ShoalError, match="no place for tool calls"):
        TurnFormat(tokenizer, SCHEMAS)
    no_answers = only_tools.replace(
        "message['content'] | trim", "(message.tool_calls or '') | tojson"
    )
    tokenizer = Tokenizer.load(write_chat_tokenizer(tmp_path / "2", "qwen2_5", no_answers))
    with pytest.raises(ShoalError, match="no place for tool answers"):
        TurnFormat(tokenizer, SCHEMAS)
    glm = (
        "{% for c in message.tool_calls %}<tool_call>{{ c.function.name }}<arg>{{ "
        "c.function.arguments }}</tool_call>"
    )
    unknown = only_tools.replace("{{- '<|im_start|>'", glm + "{% endfor %}{{- '<|im_start|>'")
    tokenizer = Tokenizer.load(write_chat_tokenizer(tmp_path / "3", "qwen2_5", unknown))
    with pytest.raises(ShoalError, match=r"form that is not known.*environment\.call_format"):
        TurnFormat(tokenizer, SCHEMAS)
    assert TurnFormat(tokenizer, SCHEMAS, "hermes").read(tokenizer.encode(CALLS["qwen2_5"]))[1] == [
        ADD
    ]


def test_a_model_without_an_end_of_turn_is_refused(tmp_path):
    folder = write_chat_tokenizer(tmp_path, "qwen2_5")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0]}')
    with pytest.raises(ShoalError, match=r"no end-of-turn token.*<\|im_end\|>.*generation_config"):
        TurnFormat(Tokenizer.load(folder), [])


def test_a_prompt_that_is_a_text_is_refused(formats):
    with pytest.raises(ShoalError, match="prompts of messages"):
        formats["qwen2_5"].encode_prompt("2 + 3 = ?")


# Schemas


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Things:
    def find(self, name: str, color: Color, size: Literal[1, 2, "big"] = 1) -> dict[str, int]:
        """Finds a thing.

        More about it: it is here.

        Args:
          name:
              What it is called
          color: Its color: one
              of two
          size: How big

        Raises:
          KeyError: If there is none.
        """
        return {name: size if isinstance(size, int) else 0, color.value: 1}


def many(
    a: int | None,
    b: str | int,
    c: list[dict[str, float]],
    d: tuple[int, str],
    e: dict,
    f: Any,
    g: list | tuple,
    h: list[int] | str | None = None,
    i: Literal["x", None] = None,
    *,
    j: bool,
) -> "list[str]":
    """Takes many types.

    Args:
        a: One
        b: Two

        c: Three
        d: Four
        e: Five
        f: Six
        g: Seven
        h: Eight
        i: Nine
        j: Ten (choices: [true, false])
    Returns:
        Names
          of things.
    """
    return [str((a, b, c, d, e, f, g, h, i, j))]


def nothing() -> Things:
    """Does nothing; returns: no."""
    return Things()


@pytest.mark.parametrize("function", [add, look, Things().find, Things.find, many, nothing])
def test_schemas_equal_transformers(transformers, function):
    from transformers.utils.chat_template_utils import get_json_schema

    assert schema(function) == get_json_schema(function)
    assert list(schema(function)["function"]["parameters"]["properties"]) == list(
        get_json_schema(function)["function"]["parameters"]["properties"]
    )


def untyped(a):
    """Does. \n\nArgs:\n    a: it"""


def undescribed(a: int):
    """Does."""


def undocumented(a: int):
    pass


def of_another_type(a: Things):
    """Does. \n\nArgs:\n    a: it"""


@pytest.mark.parametrize(("function", "why"), [
    (untyped, "argument a: write its type"), (undescribed, "'a: what it is' under Args"),
    (undocumented, "no docstring"), (of_another_type, "which JSON does not have"),
    (max, "no signature found .* write a function around it"),
])  # fmt: skip
def test_tools_without_types_or_docstring_are_refused(function, why):
    with pytest.raises(ShoalError, match=rf"Tool {function.__name__}.*{why}"):
        schema(function)


# ---- words of strangers


@pytest.mark.parametrize("family", CHATS)
def test_words_of_tools_stay_plain_text_where_special_tokens_are_off(ours, family) -> None:
    tokenizer = ours[family]
    schemas = SCHEMAS if family != "gemma3" else []
    added = {}
    for id, (text, _) in tokenizer.added_tokens().items():
        if len(text) > 1:
            added[id] = text
    spelt = "x" + "".join(added.values()) + "".join(f"<{text}" for text in added.values()) + "y"
    counts = {}
    for special in (True, False):
        form = TurnFormat(tokenizer, schemas, special=special)
        for content in ("xy", spelt):
            if schemas:
                message = {"role": "tool", "name": "add", "content": content}
            else:
                message = {**USER, "content": content}
            ids = form.encode_context([message])
            if schemas:
                call = {"role": "assistant", "content": "", "tool_calls": in_message(("add", {}))}
                prompt = form.encode_prompt([USER, call, message]).tolist()
            else:
                prompt = []
            counts[special, content] = [
                Counter(id for id in one if id in added) for one in (ids, prompt)
            ]
            if not special and content == spelt:
                written = tokenizer.decode(ids, skip_special_tokens=False)
                assert spelt.replace(" ", "") in written.replace(" ", "")
    assert counts[False, spelt] == counts[False, "xy"] == counts[True, "xy"]
    assert counts[True, spelt] != counts[True, "xy"]


def test_words_without_special_tokens_are_encoded_as_ever(ours) -> None:
    message = {"role": "tool", "name": "add", "content": "5 < 6 | and | so on"}
    plain = TurnFormat(ours["qwen2_5"], SCHEMAS, special=False)
    assert plain.encode_context([message]) == TurnFormat(ours["qwen2_5"], SCHEMAS).encode_context(
        [message]
    )
    assert (
        plain.encode_prompt([USER]).tolist()
        == ours["qwen2_5"].encode_prompt([USER], SCHEMAS).tolist()
    )
