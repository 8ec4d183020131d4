"""Which tokens of a dialogue are learned, and in which context: `shoal.chat.dialogue`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from chat_models import write_chat_tokenizer

from shoal.chat.dialogue import Stream, streams_of, text_stream, unwritten
from shoal.chat.tokenizer import Tokenizer
from shoal.records import ShoalError

TINY = Path(__file__).parents[2] / "src" / "shoal" / "assets" / "tiny"
CHAT = (
    "{%- if tools %}<|system|>{{ tools | tojson }}\n{% endif %}"
    "{%- for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}BEGIN{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor "
    "%}<|end|>END\n"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PLAIN = CHAT.replace("BEGIN", "").replace("END", "")
MARKED = CHAT.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")
REWRITES = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}{{ "
    "m.content.split('</reasoning>')[-1] }}{% else %}{{ m.content }}{% endif %}{% if m.role == "
    "'assistant' %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% "
    "endif %}"
)
"""Leaves the reasoning out of all turns but the last, as Qwen3's does."""

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}]
DIALOGUE = [
    {"role": "user", "content": "2 + 3 = ?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}],
    },
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "Sure? 5<|end|>"},
    {"role": "assistant", "content": "Yes, 5."},
]


def learned(tokenizer: Tokenizer, stream: Stream) -> list[str]:
    """The runs of learned tokens, as text."""
    runs = np.split(np.arange(len(stream.token_ids)), np.flatnonzero(np.diff(stream.loss_mask)) + 1)
    result = []
    for run in runs:
        if stream.loss_mask[run[0]]:
            result.append(tokenizer.decode(stream.token_ids[run], skip_special_tokens=False))
    return result


def whole(tokenizer: Tokenizer, stream: Stream) -> str:
    return tokenizer.decode([*stream.prompt_ids, *stream.token_ids], skip_special_tokens=False)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistants_turns_alone_each_with_its_end(template: str):
    """A tag in a user's text neither begins nor ends a turn; the line break that a template writes
    behind is left."""
    tokenizer = Tokenizer.load(TINY, template)
    (stream,) = streams_of(tokenizer, DIALOGUE, TOOLS)
    assert learned(tokenizer, stream) == [
        '<call>{"name": "add", "arguments": {"a": 2}}</call><|end|>',
        "It is 5.<|end|>",
        "Yes, 5.<|end|>",
    ]
    assert tokenizer.decode(stream.prompt_ids, skip_special_tokens=False).endswith(
        "2 + 3 = ?\n<|assistant|>\n"
    )
    text = tokenizer.render(DIALOGUE, finished=True, tools=TOOLS)
    assert whole(tokenizer, stream) == text.rstrip()
    assert '"name": "add"' in tokenizer.decode(stream.prompt_ids)
    (stream,) = streams_of(tokenizer, DIALOGUE, TOOLS, first=4)
    assert learned(tokenizer, stream) == ["Yes, 5.<|end|>"]


@pytest.mark.slow
def test_masks_equal_those_of_transformers(tmp_path: Path):
    """Where a template marks the assistant's text, token for token."""
    transformers = pytest.importorskip("transformers")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / name)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for template in (
        MARKED,
        MARKED.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>"),
    ):
        tokenizer = Tokenizer.load(TINY, template)
        for length in (2, 4, 6):
            found = theirs.apply_chat_template(
                DIALOGUE[:length],
                tools=TOOLS,
                chat_template=template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            (stream,) = streams_of(tokenizer, DIALOGUE[:length], TOOLS)
            ids = [*stream.prompt_ids, *stream.token_ids]
            mask = [*[0] * len(stream.prompt_ids), *stream.loss_mask.astype(int)]
            assert ids == found["input_ids"][: len(ids)]
            assert mask == found["assistant_masks"][: len(ids)] and not any(
                found["assistant_masks"][len(ids) :]
            )
            assert sum(mask) > 3


def test_a_turn_is_learned_once_and_where_it_is_sampled():
    """Where a template rewrites what was said before, the later turn has a stream of its own."""
    tokenizer = Tokenizer.load(TINY, REWRITES)
    first = {"role": "assistant", "content": "<reasoning>2 + 3</reasoning>5"}
    second = {"role": "assistant", "content": "<reasoning>again</reasoning>yes"}
    dialogue = [DIALOGUE[0], first, {"role": "user", "content": "Sure?"}, second]
    one, other = streams_of(tokenizer, dialogue)
    assert learned(tokenizer, one) == ["<reasoning>2 + 3</reasoning>5<|end|>"]
    assert learned(tokenizer, other) == ["<reasoning>again</reasoning>yes<|end|>"]
    for stream, number in ((one, 1), (other, 3)):
        np.testing.assert_array_equal(stream.prompt_ids, tokenizer.encode_prompt(dialogue[:number]))


SAYS_BEFORE = {
    "role": "assistant",
    "content": "",
    "reasoning": "I add.",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}],
}
OF_FAMILIES = [
    {"role": "user", "content": "2 + 3?"},
    SAYS_BEFORE,
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "<think>\nIt says 5.\n</think>\n\nIt is 5."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
SCHEMA = {"description": "Adds.", "parameters": {"type": "object", "properties": {}}}
OF_ADD = [{"type": "function", "function": {"name": "add", **SCHEMA}}]
XML = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
THINKS = [
    f"I add.\n</think>\n\n{XML}<|im_end|>",
    "It says 5.\n</think>\n\nIt is 5.<|im_end|>",
    # the template has opened the thought, and ends the line
    "\n</think>\n\nYes.<|im_end|>",
]
WITH_TAGS = "<think>\nIt says 5.\n</think>\n\nIt is 5."


@pytest.mark.parametrize(("family", "streams", "turns"), [
    ("qwen3_5_think", 2, THINKS),
    ("qwen3_8", 1, THINKS),
    ("gemma4", 2, [
        "<|channel>thought\nI add.\n<channel|>"
        "<|tool_call>call:add{a:2}<tool_call|><|tool_response>",
        "<|channel>thought\nIt says 5.\n<channel|>It is 5.<turn|>", "Yes.<turn|>"]),
    # Its thoughts before a call stay in the context of the answer that is learned there.
    ("gpt_oss", 2, [
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant to=functions.add"
        '<|channel|>commentary json<|message|>{"a": 2}<|call|>',
        "<|channel|>analysis<|message|>It says 5.<|end|><|start|>assistant<|channel|>final"
        "<|message|>It is 5.<|return|>", "<|channel|>final<|message|>Yes.<|return|>"]),
    # The ids of calls, which the rows do not have, are filled in.
    ("mistral", 3, [
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}, "id": "call00000"}]</s>',
        f" {WITH_TAGS}</s>", " Yes.</s>"]),
    ("mistral_args", 1, ['[TOOL_CALLS]add[ARGS]{"a": 2}</s>', f"{WITH_TAGS}</s>", "Yes.</s>"]),
])  # fmt: skip
def test_turns_of_families_are_learned_in_the_context_in_which_they_are_sampled(
    tmp_path: Path, family: str, streams: int, turns: list[str]
):
    tokenizer = Tokenizer.load(write_chat_tokenizer(tmp_path, family))
    system = [{"role": "system", "content": "Be brief."}]
    found = streams_of(tokenizer, system + OF_FAMILIES, OF_ADD)
    assert len(found) == streams
    runs = []
    for stream in found:
        runs += learned(tokenizer, stream)
    assert runs == turns
    ids = []
    for stream in found:
        ids.append([*stream.prompt_ids.tolist(), *stream.token_ids.tolist()])
    # What stands before each learned turn is what a model is asked with for it.
    asked = 0
    for index, message in enumerate(OF_FAMILIES):
        if message["role"] == "assistant":
            prompt = tokenizer.encode_prompt(system + OF_FAMILIES[:index], OF_ADD).tolist()
            asked += any(one[: len(prompt)] == prompt for one in ids)
    assert asked == len(turns)
    left_out = unwritten(tokenizer, system + OF_FAMILIES, OF_ADD)
    assert left_out == (["reasoning"] if family.startswith("mistral") else [])


def test_a_call_that_the_template_leaves_out_is_found(tmp_path: Path):
    """gpt-oss's template writes the first call of a message alone."""
    twice = {**SAYS_BEFORE, "tool_calls": SAYS_BEFORE["tool_calls"] * 2}
    dialogue = [OF_FAMILIES[0], twice, *OF_FAMILIES[2:]]
    for family, left_out in (
        ("gpt_oss", ["tool calls after the first of a message"]),
        ("gemma4", []),
    ):
        tokenizer = Tokenizer.load(write_chat_tokenizer(tmp_path / family, family))
        assert unwritten(tokenizer, dialogue, OF_ADD) == left_out


def test_prompts_and_completions_of_text():
    tokenizer = Tokenizer.load(TINY)
    stream = text_stream(tokenizer, "2 + 3 =", " 5")
    np.testing.assert_array_equal(stream.prompt_ids, tokenizer.encode_prompt("2 + 3 ="))
    assert (
        tokenizer.decode(stream.token_ids, skip_special_tokens=False) == " 5<|end|>"
        and stream.loss_mask.all()
    )
    # `ha` + `s` is one token: the prompt stays what a model is asked with.
    joined = text_stream(tokenizer, "He ha", "s")
    assert len(tokenizer.encode_prompt("He has")) < len(joined.prompt_ids) + 1
    np.testing.assert_array_equal(joined.prompt_ids, tokenizer.encode_prompt("He ha"))


@pytest.mark.parametrize(
    ("messages", "template", "error"),
    [
        (DIALOGUE[:1], PLAIN, "no message of the assistant"),
        (DIALOGUE[1:2], PLAIN, "there is none before it"),
        ([*DIALOGUE[:4], DIALOGUE[3]], PLAIN, "so is the one before it"),
        (
            DIALOGUE[:2],
            PLAIN.replace("<|assistant|>\n{% endif %}", "<|assistant|>\n<think>{% endif %}"),
            "does not write message 1 where it asks a model for it",
        ),
        (
            DIALOGUE[:2],
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor "
            "%}",
            "leaves out what the assistant says",
        ),
    ],
)
def test_what_cannot_be_learned(messages: list, template: str, error: str):
    with pytest.raises(ShoalError, match=error):
        streams_of(Tokenizer.load(TINY, template), messages)


NO_TOOLS = PLAIN.replace("{%- if tools %}<|system|>{{ tools | tojson }}\n{% endif %}", "")
NO_CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% "
    "endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_RESULTS = NO_CALLS.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
)
LAST_THOUGHT = NO_CALLS.replace(
    "{{ m.content }}", "{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}"
)
CALLS_ALONE = NO_CALLS.replace(
    "{{ m.content }}",
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}",
)
SAID_AND_CALLED = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "I add them.",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}],
    },
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "5"},
]
THOUGHT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning": "why"},
    {"role": "user", "content": "c", "name": "Ann"},
    {"role": "assistant", "content": "d"},
]


@pytest.mark.parametrize(
    ("template", "messages", "tools", "left_out"),
    [
        (PLAIN, DIALOGUE, TOOLS, []),
        (NO_TOOLS, DIALOGUE, TOOLS, ["tools"]),
        (NO_CALLS, DIALOGUE, TOOLS, ["tools", "tool_calls"]),
        (NO_CALLS, DIALOGUE[3:], None, []),
        (NO_RESULTS, DIALOGUE, None, ["tool_calls", "what role tool says"]),
        # Reasoning is written where a turn is the last one, in which it is learned.
        (LAST_THOUGHT, THOUGHT, None, ["name"]),
        (NO_CALLS, THOUGHT, None, ["reasoning", "name"]),
        (
            CALLS_ALONE,
            SAID_AND_CALLED,
            None,
            ["what role assistant says in a message with tool_calls"],
        ),
        (NO_CALLS, SAID_AND_CALLED, None, ["tool_calls"]),
        (PLAIN, SAID_AND_CALLED, None, []),
        ("", DIALOGUE, TOOLS, ["tools", "tool_calls"]),  # without a template, as plain lines
    ],
)
def test_what_a_template_does_not_write_is_found(
    tmp_path: Path, template: str, messages: list, tools: list | None, left_out: list[str]
):
    folder = TINY
    if not template:
        folder = Path(shutil.copytree(TINY, tmp_path / "bare"))
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    given = []
    for message in messages:
        given.append(
            {**message, "tool_call_id": "1", "name": "add", "content": message["content"] or None}
            if message["role"] == "tool"
            else message
        )
    given = [
        {**message, "weight": None, "tool_calls": message.get("tool_calls", [])}
        for message in given
    ]
    assert unwritten(Tokenizer.load(folder, template), given, tools) == left_out


def test_a_model_without_template_and_end_has_no_token_appended(tmp_path: Path):
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(TINY / "tokenizer.json", folder)
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    for key in ("chat_template", "eos_token"):
        config.pop(key, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_ids == () and not tokenizer.has_template
    messages = [{"role": "user", "content": "2 + 3 = ?"}, {"role": "assistant", "content": "5"}]
    [stream] = streams_of(tokenizer, messages)
    assert len(stream.loss_mask) == len(stream.token_ids)
    assert learned(tokenizer, stream) == [" 5"]
