"""Thoughts in channels and tags: what rewards read of them, and where templates write them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_models import CHATS, template_of, write_chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.chat.thoughts import split_thoughts
from shoal.chat.tokenizer import Tokenizer
from shoal.records import ShoalError
from shoal.tasks.graders.answer import solution_of

DATE = datetime(2026, 1, 31)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    result = {}
    for family in CHATS:
        folder = write_chat_tokenizer(tmp_path_factory.mktemp(family), family)
        result[family] = Tokenizer.load(folder, date=DATE)
    return result


# Text of a model's tokens

ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(("family", "written", "text"), [
    ("gpt_oss", f"{ANALYSIS}2 + 3{NEXT}{FINAL}5<|return|>", "<think>\n2 + 3\n</think>\n\n5"),
    ("gpt_oss", f"{FINAL}5<|return|>", "5"),
    ("gpt_oss", f"{FINAL}\n5 \n<|return|>", "\n5 \n"),
    ("gpt_oss", "5<|return|>", "5"),
    ("gpt_oss", f"{ANALYSIS}2 + ", "<think>\n2 + "),
    ("gpt_oss", ANALYSIS, "<think>\n"),
    ("gpt_oss", f"{ANALYSIS}{NEXT}{FINAL}5", "5"),
    ("gpt_oss", f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c",
     "<think>\na\n</think>\n\n<think>\nb\n</think>\n\nc"),
    # What is said before a call is no answer.
    ("gpt_oss", f"<|channel|>commentary<|message|>I look.{NEXT}{FINAL}5",
     "<think>\nI look.\n</think>\n\n5"),
    # What a tool says is no thought.
    ("gpt_oss", '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"5"<|end|>',
     'functions.add to=assistantcommentary"5"'),
    # The next message ends one that has no end.
    ("gpt_oss", f"{ANALYSIS}2 + 3<|start|>assistant{FINAL}5", "<think>\n2 + 3\n</think>\n\n5"),
    ("gpt_oss", "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
     '{"a": 2}<|call|>', 'commentary to=functions.add json{"a": 2}'),
    ("gemma4", "<|channel>thought\n2 + 3\n<channel|>5<turn|>", "<think>\n2 + 3\n</think>\n\n5"),
    ("gemma4", "<|channel>thought\n<channel|>5<turn|>", "5"),
    ("gemma4", "<|channel>thought\n2 +", "<think>\n2 +"),
    # The prompt has opened the thought.
    ("gemma4", "2 + 3<channel|>5<turn|>", "2 + 3\n</think>\n\n5"),
    ("mistral", "[THINK]2 + 3[/THINK]5</s>", "<think>\n2 + 3\n</think>\n\n5"),
    ("qwen3", "<think>\n2 + 3\n</think>\n\n5<|im_end|>", "<think>\n2 + 3\n</think>\n\n5"),
    ("qwen3", f"{ANALYSIS}2 + 3{NEXT}{FINAL}5", f"{ANALYSIS}2 + 3{NEXT}{FINAL}5"),
    ("gemma3", "[THINK]2 + 3[/THINK]5<end_of_turn>", "[THINK]2 + 3[/THINK]5"),
])  # fmt: skip
def test_thoughts_that_special_tokens_mark_get_tags(
    tokenizers: dict[str, Tokenizer], family: str, written: str, text: str
):
    tokenizer = tokenizers[family]
    assert tokenizer.text(tokenizer.encode(written)) == text
    if "</think>" in text:
        assert solution_of(text).strip() == text.rpartition("</think>")[2].strip()


def test_the_text_of_a_marker_in_other_tokens_marks_nothing(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["gpt_oss"]
    written = f"{ANALYSIS}2 + 3{NEXT}{FINAL}5"
    ids = []
    for character in written:
        ids += tokenizer.encode(character)
    assert tokenizer.text(ids) == written


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=40), family=st.sampled_from(sorted(CHATS)))
def test_any_tokens_have_a_text(tokenizers: dict[str, Tokenizer], ids: list[int], family: str):
    tokenizer = tokenizers[family]
    ids = [id for id in ids if id < tokenizer.vocab_size]
    text = tokenizer.text(ids)
    added = tokenizer.added_tokens()
    if not any(id in added for id in ids):
        assert text == tokenizer.decode(ids)


# Where templates write thoughts


@pytest.mark.parametrize(("content", "parts"), [
    ("<think>\nWhy?\n</think>\n\nSo.", ("Why?", "So.")),
    ("Why?\n</think>\n\nSo.", ("Why?", "So.")),  # the template has opened the thought
    ("<think>a</think><think>b</think> So.", ("a\n\nb", " So.")),
    ("<think>\nWhy", ("Why", "")),
    ("So.", ("", "So.")), ("So <think>", ("", "So <think>")), ("", ("", "")),
])  # fmt: skip
def test_thoughts_are_split_from_the_answer(content: str, parts: tuple[str, str]):
    assert split_thoughts(content) == parts


THOUGHT = {"role": "assistant", "content": "<think>\nWhy?\n</think>\n\nSo."}
QUESTION = {"role": "user", "content": "And?"}


@pytest.mark.parametrize(("family", "turn"), [
    ("gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>Why?<|end|><|start|>assistant"
                "<|channel|>final<|message|>So.<|return|>"),
    ("gemma4", "<|turn>model\n<|channel>thought\nWhy?\n<channel|>So.<turn|>\n"),
    ("qwen3", "<|im_start|>assistant\n<think>\nWhy?\n</think>\n\nSo.<|im_end|>\n"),
    ("qwen3_5", "<|im_start|>assistant\n<think>\nWhy?\n</think>\n\nSo.<|im_end|>\n"),
    ("qwen3_5_think", "<|im_start|>assistant\n<think>\nWhy?\n</think>\n\nSo.<|im_end|>\n"),
    ("qwen3_8", "<|im_start|>assistant\n<think>\nWhy?\n</think>\n\nSo.<|im_end|>\n"),
    ("qwen2_5", "<|im_start|>assistant\n<think>\nWhy?\n</think>\n\nSo.<|im_end|>\n"),
    ("mistral", " <think>\nWhy?\n</think>\n\nSo.</s>"),
])  # fmt: skip
def test_thoughts_in_tags_stand_where_the_template_writes_thoughts(
    tokenizers: dict[str, Tokenizer], family: str, turn: str
):
    tokenizer = tokenizers[family]
    messages = [QUESTION, THOUGHT]
    assert tokenizer.render(messages, finished=True).endswith(turn)
    apart = {"role": "assistant", "content": "So.", "reasoning": "Why?"}
    if "</think>" not in turn or family.startswith("qwen3"):
        assert tokenizer.render([QUESTION, apart], finished=True).endswith(turn)
    # Reasoning of its own counts, and other roles say what they say.
    both = {**THOUGHT, "reasoning_content": "Because."}
    if family == "gpt_oss":
        assert "<|message|>Because.<|end|>" in tokenizer.render([QUESTION, both], finished=True)
    assert THOUGHT["content"] in tokenizer.render([{**THOUGHT, "role": "user"}])


def test_a_thought_is_continued_where_the_template_writes_thoughts(
    tokenizers: dict[str, Tokenizer],
):
    begun = {"role": "assistant", "content": "<think>\nTwo and"}
    text = tokenizers["gpt_oss"].render([QUESTION, begun])
    assert text.endswith("<|start|>assistant<|channel|>analysis<|message|>Two and")
    text = tokenizers["qwen3_8"].render([QUESTION, begun])
    assert text.endswith("<|im_start|>assistant\n<think>\nTwo and")
    closed = {**begun, "content": "<think>\nTwo and three.\n</think>\n\nIt is"}
    text = tokenizers["gpt_oss"].render([QUESTION, closed])
    assert text.endswith(f"Two and three.{NEXT}{FINAL}It is")


# Switches of templates


@pytest.mark.parametrize(("family", "line", "end"), [
    ("qwen3_5_think", "", "<think>\n"),
    ("qwen3_5_think", "{%- set enable_thinking = false %}", "<think>\n\n</think>\n\n"),
    ("qwen3_5", "", "<think>\n\n</think>\n\n"),
    ("qwen3_5", "{%- set enable_thinking = true %}", "<think>\n"),
    ("qwen3", "", "assistant\n"),
    ("qwen3", "{%- set enable_thinking = false %}", "<think>\n\n</think>\n\n"),
    ("qwen3_8", "{%- set enable_thinking = false %}", "<think>\n\n</think>\n\n"),
])  # fmt: skip
def test_a_line_before_the_template_switches_thinking(
    tmp_path: Path, family: str, line: str, end: str
):
    tokenizer = Tokenizer.load(write_chat_tokenizer(tmp_path, family), line + template_of(family))
    assert tokenizer.render([QUESTION]).endswith(end)


@pytest.mark.parametrize(("family", "entry", "end"), [
    ("qwen3_5_think", "enable_thinking=false", "<think>\n\n</think>\n\n"),
    ("qwen3_5", "enable_thinking = True", "<think>\n"),
    ("qwen3", "enable_thinking=false", "<think>\n\n</think>\n\n"),
])  # fmt: skip
def test_a_variable_of_the_template_switches_thinking_and_stays_with_the_model(
    tmp_path: Path, family: str, entry: str, end: str
):
    folder = write_chat_tokenizer(tmp_path, family)
    tokenizer = Tokenizer.load(folder, template_variables=[entry])
    assert tokenizer.render([QUESTION]).endswith(end)
    # the written template sets the variable itself, so that a run and an export ask alike
    tokenizer.write_templates(folder)
    assert Tokenizer.load(folder).render([QUESTION]).endswith(end)


def test_variables_of_a_template_are_texts_numbers_and_switches(tmp_path: Path):
    folder = write_chat_tokenizer(tmp_path, "gpt_oss")
    shown = "{% for m in messages %}{{ m.content }}{{ [a, b, c, d] }}{% endfor %}"
    entries = ["a=none", "b=-1.5", 'c=say "{{ x }}"\n', "d=2 big = 3"]
    tokenizer = Tokenizer.load(folder, shown, template_variables=entries)
    assert tokenizer.render([QUESTION]).endswith("""[None, -1.5, 'say "{{ x }}"', '2 big = 3']""")


@pytest.mark.parametrize(("entry", "fault"), [
    ("reasoning_efort=low", "does not read reasoning_efort.* did you mean reasoning_effort"),
    ("messages=low", "does not read messages"),
    ("reasoning_effort", "expected NAME=VALUE"),
    ("a b=1", "expected NAME=VALUE"),
])  # fmt: skip
def test_a_variable_without_effect_is_refused(tmp_path: Path, entry: str, fault: str):
    folder = write_chat_tokenizer(tmp_path, "gpt_oss")
    with pytest.raises(ShoalError, match=fault):
        Tokenizer.load(folder, template_variables=[entry])


def test_gpt_oss_has_a_date_that_is_kept_an_effort_and_three_ends(tmp_path: Path):
    folder = write_chat_tokenizer(tmp_path, "gpt_oss")
    first = Tokenizer.load(folder, date=DATE)
    assert first.writes_date and "Current date: 2026-01-31" in first.render([QUESTION])
    later = Tokenizer.load(folder, date=datetime(2026, 2, 1))
    assert first.facts()["the prompt of a question"] != later.facts()["the prompt of a question"]
    ends = [first.token_text(id) for id in first.eos_ids]
    assert ends == ["<|return|>", "<|endoftext|>", "<|call|>"] and not first.notes
    template = '{%- set reasoning_effort = "low" %}' + template_of("gpt_oss")
    assert "Reasoning: low" in Tokenizer.load(folder, template).render([QUESTION])


@pytest.mark.parametrize(("family", "noted"), [("gemma3", True), ("gpt_oss", True),
                                               ("mistral", False)])  # fmt: skip
def test_an_end_of_turn_that_generation_config_lacks_is_warned_of(
    tmp_path: Path, family: str, noted: bool
):
    """Gemma 3's `<eos>` alone does not end its turns, nor gpt-oss's `<|endoftext|>`."""
    folder = write_chat_tokenizer(tmp_path, family)
    tokenizer = Tokenizer.load(folder)
    end = {"gemma3": "<eos>", "gpt_oss": "<|endoftext|>", "mistral": "</s>"}[family]
    (id,) = tokenizer.encode(end)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": id}))
    notes: list[Any] = [note.text for note in Tokenizer.load(folder).notes]
    assert any("does not end a completion" in note for note in notes) == noted


# Roles


def test_the_systems_words_are_the_users_or_are_refused(tmp_path: Path):
    """Gemma 3 folds them into the user's first message; Gemma 2's template refuses them."""
    system = {"role": "system", "content": "Be brief."}
    folder = write_chat_tokenizer(tmp_path, "gemma3")
    text = Tokenizer.load(folder).render([system, QUESTION])
    assert text == (
        "<bos><start_of_turn>user\nBe brief.\n\nAnd?<end_of_turn>\n<start_of_turn>model\n"
    )
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer = Tokenizer.load(folder, refuses + template_of("gemma3"))
    with pytest.raises(Exception, match="refused a prompt: no system"):
        tokenizer.render([system, QUESTION])
