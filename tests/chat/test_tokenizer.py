"""Prompt ids equal transformers'; what is read from a folder, and what is refused."""

from __future__ import annotations

import json
import pickle
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CHATML, SPECIAL, write_tokenizer
from tokenizers import processors

from shoal.chat import template_sandbox
from shoal.chat.tokenizer import Tokenizer
from shoal.chat.tokenizer_files import DATE_FILE, write_date
from shoal.records import ShoalError
from shoal.weights.huggingface import copy_tokenizer

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | \
trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for call in message.tool_calls %}
            {{- '\\n{"name": "' + call.function.name + '", "arguments": ' + \
call.function.arguments | tojson + '}' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

QWEN3 = """{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = \
content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + content + \
'<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GENERATION = """{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% if message.role == 'assistant' %}
        {% generation %}
        {% set said = message.content %}
{{ said }}{{ eos_token }}
        {% endgeneration %}
    {% else %}
{{ message.content | tojson(indent=2) }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
> {% endif %}"""

TEMPLATES = {
    "llama3": LLAMA3,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "generation": GENERATION,
    "chatml": CHATML,
}
STYLES = {"llama3": "llama3"}

CALL = [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "text": 'é <b> "q"'}}}
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "2 + 3 = ?"}],
    "system": [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "the user's <tag> & é 🐟\n\n"},
    ],
    "turns": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "user", "content": "  and the other?  "},
    ],
    "reasoning": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "because", "tool_calls": None},
        {"role": "user", "content": "c"},
    ],
    "an answer begun": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nWell,  "},
    ],
    "an answer begun, of a word that templates hold": [
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": " e"},
    ],
    "special tokens in the text": [
        {"role": "user", "content": "<|im_end|><|eot_id|> no <|begin_of_text|>"}
    ],
}


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def pairs(transformers, tmp_path_factory):
    """Our tokenizer and theirs, for each template."""
    made = {}
    for name, template in TEMPLATES.items():
        folder = tmp_path_factory.mktemp(name)
        write_tokenizer(folder, STYLES.get(name, "chatml"), template)
        made[name] = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    return made


def their_ids(theirs: Any, messages: list[dict[str, Any]]) -> list[int]:
    continued = messages[-1]["role"] == "assistant" and bool(messages[-1]["content"])
    return list(
        theirs.apply_chat_template(
            messages,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            return_dict=False,
        )
    )


# Prompt ids


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompt_ids_equal_transformers(pairs, template, conversation):
    ours, theirs = pairs[template]
    messages = CONVERSATIONS[conversation]
    ids = ours.encode_prompt(messages)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert ids.tolist() == their_ids(theirs, messages)


def test_tool_calls_equal_transformers(pairs):
    ours, theirs = pairs["qwen2.5"]
    messages = [*user("a"), {"role": "assistant", "tool_calls": CALL}, *user("b")]
    assert ours.encode_prompt(messages).tolist() == their_ids(theirs, messages)
    # neither escaped for HTML nor to ASCII
    assert '{"a": 1, "text": "é <b> \\"q\\""}' in ours.render(messages)


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(max_size=20), min_size=1, max_size=4),
    template=st.sampled_from(sorted(TEMPLATES)),
)
def test_any_text_equals_transformers(pairs, texts, template):
    ours, theirs = pairs[template]
    messages = []
    for i, text in enumerate(texts):
        messages.append({"role": ("user", "assistant")[i % 2], "content": text})
    assert ours.encode_prompt(messages).tolist() == their_ids(theirs, messages)
    assert ours.encode_prompt(texts[0]).tolist() == theirs(texts[0])["input_ids"]


def test_what_the_templates_give(tmp_path):
    write_tokenizer(tmp_path, "llama3", LLAMA3)
    tokenizer = Tokenizer.load(tmp_path)
    today = datetime.now().strftime("%d %b %Y")
    assert tokenizer.render(user(" 1 ")) == (
        f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: "
        f"{today}\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    ids = tokenizer.encode_prompt(user("1")).tolist()
    # the template's, not another
    assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1
    given = Tokenizer.load(tmp_path, GENERATION)
    turns = [{"role": "system", "content": "x"}, *user('"'), {"role": "assistant", "content": "b"}]
    assert given.render(turns) == '"\\""\nb'  # an answer that is begun is continued
    assert given.render([*turns, *user("c")]) == '"\\""\nb<|eot_id|>\n"c"\n> '


def test_a_date_that_is_kept_is_written_for_good(tmp_path):
    write_tokenizer(tmp_path / "run", "llama3", LLAMA3)
    first, later = datetime(2024, 1, 2, 23, 59), datetime(2025, 3, 4)
    assert "02 Jan 2024" in Tokenizer.load(tmp_path / "run", date=first).render(user("1"))
    live = Tokenizer.load(tmp_path / "run")
    assert live.date is None and live.writes_date
    write_date(first, tmp_path / "run")
    kept = Tokenizer.load(tmp_path / "run")
    for tokenizer in (kept, pickle.loads(pickle.dumps(kept))):
        assert tokenizer.date == first and "02 Jan 2024" in tokenizer.render(user("1"))
    assert "04 Mar 2025" in Tokenizer.load(tmp_path / "run", date=later).render(user("1"))
    # An export is a model for any day.
    (tmp_path / "export").mkdir()
    copy_tokenizer(tmp_path / "run", tmp_path / "export")
    assert Tokenizer.load(tmp_path / "export").date is None
    for damaged in ('{"strftime_now": "yesterday"}', '{"strftime_now": 5}'):
        (tmp_path / "run" / DATE_FILE).write_text(damaged)
        with pytest.raises(ShoalError, match="holds no date"):
            Tokenizer.load(tmp_path / "run")


def test_data_from_parquet_renders_like_plain_data(tmp_path):
    write_tokenizer(tmp_path, "chatml", QWEN25)
    tokenizer = Tokenizer.load(tmp_path)
    arrays: Any = [
        {"role": "assistant", "tool_calls": np.array([CALL[0]], object), "content": None}
    ]
    assert tokenizer.render(arrays) == tokenizer.render([{"role": "assistant", "tool_calls": CALL}])


# Texts and models without a template


def test_a_text_is_encoded_as_it_stands(transformers, tmp_path):
    for style in SPECIAL:
        write_tokenizer(tmp_path / style, style)
        ours = Tokenizer.load(tmp_path / style)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / style)
        assert (
            ours.encode_prompt("the user in 10").tolist() == theirs("the user in 10")["input_ids"]
        )


def test_never_a_second_bos_nor_a_closing_eos(tmp_path):
    backend = write_tokenizer(tmp_path, "plain")
    tokenizer = Tokenizer.load(tmp_path)
    once = tokenizer.encode_prompt("<s>hello").tolist()
    assert once == tokenizer.encode_prompt("hello").tolist() and once.count(tokenizer.bos_id) == 1
    bos, eos = (backend.token_to_id(token) for token in ("<s>", "</s>"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    closing = Tokenizer.load(tmp_path)
    assert closing.encode_prompt("hello").tolist() == once
    assert closing.encode_prompt("hello</s>").tolist() == [*once, eos]  # the text's own stays


def test_without_a_template_messages_are_written_plainly(tmp_path):
    write_tokenizer(tmp_path, "plain")
    tokenizer = Tokenizer.load(tmp_path)
    assert not tokenizer.has_template
    [note] = tokenizer.notes
    assert "no chat template" in note.text and "model.template" in note.text
    assert (note.level, note.key) == ("warning", "model.template")
    rules = {"role": "system", "content": "Be brief."}
    answer = {"role": "assistant", "content": "yes"}
    turns = [rules, *user("hi"), answer, *user("?")]
    text = "Be brief.\nUser: hi\nAssistant: yes\nUser: ?\nAssistant:"
    assert tokenizer.render(turns) == text and tokenizer.render(turns[:3]) == text[:33]
    assert tokenizer.encode_prompt(turns).tolist() == tokenizer.encode_prompt(text).tolist()
    assert tokenizer.encode_prompt(turns)[0] == tokenizer.bos_id


def test_decode_is_the_inverse(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    prompt = tokenizer.encode_prompt(user("2 + 3 é 🐟"))
    assert tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>user\n2 + 3 é 🐟<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(prompt) == "user\n2 + 3 é 🐟\nassistant\n"
    assert tokenizer.token_text(tokenizer.eos_ids[0]) == "<|im_end|>"
    assert [tokenizer.token_text(id) for id in tokenizer.encode_prompt("a the user")] == [
        "a",
        " the",
        " ",
        "user",
    ]
    assert tokenizer.token_text(10_000) == "<10000>"


# Which template


def test_a_template_may_be_given_as_text_or_file(tmp_path):
    write_tokenizer(tmp_path, "plain")
    text = "{{ bos_token }}{{ messages[0].content }}?"
    file = tmp_path / "mine.jinja"
    file.write_text(text)
    for template in (text, str(file)):
        tokenizer = Tokenizer.load(tmp_path, template)
        assert tokenizer.has_template and not tokenizer.notes
        assert (
            tokenizer.encode_prompt(user("a")).tolist() == tokenizer.encode_prompt("<s>a?").tolist()
        )
    with pytest.raises(ShoalError, match="neither a file nor a Jinja template"):
        Tokenizer.load(tmp_path, "absent.jinja")


def test_the_templates_of_a_folder(tmp_path):
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [
        {"name": "rag", "template": "r{# messages #}{{ messages | length }}"},
        {"name": "default", "template": "d{{ messages | length }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert Tokenizer.load(tmp_path).render(user("a")) == "d1"
    assert Tokenizer.load(tmp_path, "rag").render(user("a")) == "r1"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": named[:1]})
    )
    with pytest.raises(
        ShoalError, match=r"chat templates rag but no default: .*model\.template=rag"
    ):
        Tokenizer.load(tmp_path)
    with pytest.raises(
        ShoalError, match=r"neither a file nor a Jinja template, nor a name of the model's \(rag\)"
    ):
        Tokenizer.load(tmp_path, "rga")
    (tmp_path / "chat_template.jinja").write_text("file{{ messages | length }}")
    assert Tokenizer.load(tmp_path).render(user("a")) == "file1"
    hostile = [{"name": "../../rag", "template": named[0]["template"]}]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": hostile})
    )
    with pytest.raises(ShoalError, match=r"a chat template called '\.\./\.\./rag'"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "entry", [5, ["{{ messages }}"], [{"template": "{{ messages }}"}], {"default": None}]
)
def test_an_entry_that_holds_no_templates_is_refused(tmp_path, entry):
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": entry}))
    with pytest.raises(
        ShoalError,
        match=r"tokenizer_config\.json has the chat_template .*: expected a template, or a",
    ):
        Tokenizer.load(tmp_path)
    file.write_text(
        json.dumps({**config, "chat_template": {"default": "d{{ messages | length }}"}})
    )
    assert Tokenizer.load(tmp_path).render(user("a")) == "d1"
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ messages }}\xe9")
    with pytest.raises(ShoalError, match=r"chat_template\.jinja is not UTF-8 .*: save it as UTF-8"):
        Tokenizer.load(tmp_path)


def test_what_hosts_compare_has_the_template_of_tools(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "additional_chat_templates").mkdir()
    facts = []
    for text in ("a{{ messages }}", "b{{ messages }}"):
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(text)
        facts.append(Tokenizer.load(tmp_path).facts())
    assert [name for name in facts[0] if facts[0][name] != facts[1][name]] == [
        "the further chat templates"
    ]


TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
NAMED = {
    "default": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    "tool_use": "TOOLS:{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% "
    "endfor %}",
    "rag": "RAG{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("form", ["files", "a list"])
def test_with_tools_prompts_are_rendered_by_the_template_for_tools_as_in_transformers(
    transformers, tmp_path, form
):
    write_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.chat_template = dict(NAMED)
    theirs.save_pretrained(tmp_path, save_jinja_files=form == "files")
    ours = Tokenizer.load(tmp_path)
    copied = pickle.loads(pickle.dumps(ours))
    for tokenizer in (ours, copied):
        for tools in (None, TOOLS):
            wanted = theirs.apply_chat_template(
                user("a"), tools=tools, tokenize=False, add_generation_prompt=True
            )
            assert tokenizer.render(user("a"), tools=tools) == wanted
    # A template that is given by name is used for all, as transformers' chat_template=.
    rag = Tokenizer.load(tmp_path, "rag")
    assert rag.render(user("a"), tools=TOOLS) == "RAGa" and not rag.named_templates


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{% for %}", "The chat template tool_use is not valid Jinja"),
        ("no template", "does not use `messages`"),
    ],
)
def test_a_broken_template_of_tools_is_refused_where_there_are_tools(tmp_path, text, said):
    write_tokenizer(tmp_path)
    named = []
    for name, one in {**NAMED, "tool_use": text, "rag": "{% if %}"}.items():
        named.append({"name": name, "template": one})
    change(tmp_path / "tokenizer_config.json", chat_template=named)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.render(user("a")) == "[user]a"
    with pytest.raises(ShoalError, match=said):
        tokenizer.render(user("a"), tools=TOOLS)


@pytest.mark.parametrize(
    "grow",
    [
        "[messages] * 100000",
        "range(99999) | list",
        "[" + "1," * 5000 + "]",
        "long[:]",
        "'a' * 1000000",
        "('a' * 1000).split('')[0:] if false else ('a ' * 100000).split()",
        "long + [1]",
        "'%s' % text",
        "text ~ 'a'",
        "{" + ",".join(f"{i}: 1" for i in range(5000)) + "}",
        "long | sort",
    ],
)
def test_what_a_template_makes_altogether_is_bounded(tmp_path, monkeypatch, grow):
    monkeypatch.setattr(template_sandbox, "MOST_BYTES", 1 << 24)
    write_tokenizer(tmp_path)
    template = (
        "{% set long = range(50000) | list %}{% set text = 'b' * 100000 %}{% set kept = "
        "namespace(all=[]) %}"
        "{% for i in range(3000) %}{% set kept.all = [kept.all, " + grow + "] %}{% endfor %}"
        "{{ messages | length }}"
    )
    with pytest.raises(ShoalError, match="its texts and lists take more than 16 MiB"):
        Tokenizer.load(tmp_path, template).render(user("a"))


def test_what_a_template_only_reads_counts_for_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MOST_BYTES", 1 << 24)
    write_tokenizer(tmp_path)
    template = (
        "{% for i in range(3000) %}{% set one = messages[0].content %}{% set one = "
        "messages[0]['content'] %}{% set one = messages[0].get('content') | default('a') %}{% set "
        "all = messages %}{% endfor %}{{ messages[0].content[:3] }}"
    )
    assert Tokenizer.load(tmp_path, template).render(user("a" * 100_000)) == "aaa"


def test_all_templates_go_into_a_copy_of_the_model(transformers, tmp_path):
    write_tokenizer(tmp_path / "source")
    config_file = tmp_path / "source" / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    named = [{"name": name, "template": text} for name, text in NAMED.items()]
    config_file.write_text(json.dumps({**config, "chat_template": named}))
    (tmp_path / "run").mkdir()
    Tokenizer.load(tmp_path / "source").write_templates(tmp_path / "run")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "source" / name, tmp_path / "run" / name)
    (tmp_path / "export").mkdir()
    copy_tokenizer(tmp_path / "run", tmp_path / "export")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "export").chat_template == NAMED
    assert Tokenizer.load(tmp_path / "export").render(user("a"), tools=TOOLS).startswith("TOOLS:[{")


@pytest.mark.parametrize(
    "text",
    [
        '{"messages": [{"role": "user", "content": "2 + 3 = ?"}]}\n',
        "a,b\n1,2\n",
        "{{ bos_token }}{{ question }}",
    ],
)
def test_a_file_of_data_is_no_chat_template(tmp_path, text):
    write_tokenizer(tmp_path)
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(ShoalError, match="does not use `messages`, so it is not a chat template"):
        Tokenizer.load(tmp_path, str(file))
    (tmp_path / "chat_template.jinja").write_text(text)
    with pytest.raises(ShoalError, match="does not use `messages`, so it is not a chat template"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("end", "eos", "noted"),
    [
        ("<|im_end|>\n", "<|endoftext|>", True),
        ("<|im_end|>\n", "<|im_end|>", False),
        ("<|endoftext|><|im_end|>", "<|endoftext|>", False),
        ("\n", "<|endoftext|>", False),
    ],
)
def test_an_end_of_turn_that_ends_no_completion_is_warned_of(tmp_path, end, eos, noted):
    backend = write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": backend.token_to_id(eos)})
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": eos}))
    template = "{% for m in messages %}<|im_start|>{{ m.content }}" + end + "{% endfor %}"
    tokenizer = Tokenizer.load(tmp_path, template)
    end_id = backend.token_to_id("<|im_end|>")
    notes = []
    for note in tokenizer.notes:
        if f"ends a turn with <|im_end|> (id {end_id})" in note.text:
            notes.append(note)
    assert bool(notes) == noted
    # What the note says cures it.
    both = [backend.token_to_id(eos), end_id]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": both}))
    assert not Tokenizer.load(tmp_path, template).notes


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refused a prompt"),
        ("{{ messages.append(1) }}", "refused a prompt"),  # the sandbox: nothing may be changed
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refused a prompt"),  # nor reached
    ],
)
def test_a_template_that_refuses(tmp_path, template, said):
    write_tokenizer(tmp_path)
    with pytest.raises(ShoalError, match=said):
        Tokenizer.load(tmp_path, template).encode_prompt(user("a"))


def test_a_template_that_is_no_jinja(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(ShoalError, match="not valid Jinja"):
        Tokenizer.load(tmp_path, "{% for %}")


@pytest.mark.parametrize("messages", [[], ["text"], [None]])
def test_prompts_that_are_no_messages(tmp_path, messages):
    write_tokenizer(tmp_path)
    with pytest.raises(ShoalError, match="a list of messages"):
        Tokenizer.load(tmp_path).encode_prompt(messages)


# Special tokens


def change(file: Path, **values: Any) -> None:
    config = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**config, **values}))


def test_end_of_sequence_ids_come_from_the_first_that_names_them(tmp_path):
    backend = write_tokenizer(tmp_path)
    generation, config = tmp_path / "generation_config.json", tmp_path / "config.json"
    own = backend.token_to_id("<|im_end|>")
    change(generation, eos_token_id=[5, 6])
    change(config, eos_token_id=7)
    assert Tokenizer.load(tmp_path).eos_ids == (5, 6)
    note = Tokenizer.load(tmp_path).notes[0]
    assert "not among" in note.text and (note.level, note.key) == ("warning", "model.path")
    change(generation, eos_token_id=8)
    assert Tokenizer.load(tmp_path).eos_ids == (8,)
    generation.unlink()
    assert Tokenizer.load(tmp_path).eos_ids == (7,)
    change(config, eos_token_id=None)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == (own,) and tokenizer.notes == []
    change(tmp_path / "tokenizer_config.json", eos_token=None)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == () and "no end-of-sequence" in tokenizer.notes[0].text


def test_padding_and_beginning(tmp_path):
    backend = write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.pad_id == backend.token_to_id("<|endoftext|>") and tokenizer.bos_id is None
    change(
        tmp_path / "tokenizer_config.json", pad_token=None, bos_token={"content": "<|im_start|>"}
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.pad_id == tokenizer.eos_ids[0] and tokenizer.bos_id == backend.token_to_id(
        "<|im_start|>"
    )
    change(tmp_path / "generation_config.json", pad_token_id=9)
    assert Tokenizer.load(tmp_path).pad_id == 9


def test_tokens_that_only_the_config_knows(transformers, tmp_path):
    size = write_tokenizer(tmp_path).get_vocab_size()
    file = tmp_path / "tokenizer_config.json"
    change(file, pad_token="<pad>", unk_token="<unk>", additional_special_tokens=["<more>"])
    ours, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "a<more><pad>b <unk>"
    assert ours.encode_prompt(text).tolist() == theirs(text)["input_ids"]
    assert ours.vocab_size == size + 3 == len(theirs) and ours.pad_id == theirs.pad_token_id
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|endoftext|>"}})
    )
    (tmp_path / "generation_config.json").unlink()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert Tokenizer.load(tmp_path).eos_ids == (theirs.eos_token_id,)


def test_padding_and_truncation_in_the_file_do_nothing(tmp_path):
    backend = write_tokenizer(tmp_path)
    backend.enable_truncation(3)
    backend.enable_padding(length=40)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode_prompt("abcdefgh")) == 8


def test_the_vocabulary_must_fit_the_model(tmp_path):
    size = write_tokenizer(tmp_path).get_vocab_size()
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == size

    def check(tokenizer: Tokenizer, vocab_size: int) -> None:
        tokenizer.check_vocabulary(vocab_size)

    check(tokenizer, size)
    check(tokenizer, size + 100)  # models round their embedding up
    with pytest.raises(ShoalError, match=f"up to {size - 1}.*has {size - 1} entries"):
        check(tokenizer, size - 1)
    change(tmp_path / "generation_config.json", eos_token_id=[1, 5000])
    with pytest.raises(ShoalError, match="up to 5000"):
        check(Tokenizer.load(tmp_path), size)


def test_no_tokenizer_or_a_broken_one(tmp_path):
    with pytest.raises(ShoalError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ShoalError, match="not a valid tokenizer"):
        Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ShoalError, match="as JSON"):
        Tokenizer.load(tmp_path)
