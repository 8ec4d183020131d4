"""Model folders of strangers: what never ends, or is without measure, is one clear error."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from shoal.chat import template_sandbox
from shoal.chat import tokenizer as tokenizer_module
from shoal.chat.tokenizer import Tokenizer
from shoal.chat.turns import encode
from shoal.model.families import architecture_of
from shoal.records import ShoalError
from shoal.serve.api import parse
from shoal.weights import huggingface, tensor_files

TINY = Path(tokenizer_module.__file__).parents[1] / "assets" / "tiny"
AT_END = "{{ messages | length }}"
"""A template that never uses the messages is refused for that."""
QUESTION = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) "
        "}}",
        "{% macro f() %}{{ caller() }}{% endmacro %}{% for a in range(9999) %}{% call f() %}{% "
        "endcall %}{% endfor %}",
    ],
)
def test_a_template_that_loops_is_refused(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(template_sandbox, "MOST_ROUNDS", 5000)
    made = Tokenizer.load(TINY, template + AT_END)
    with pytest.raises(
        ShoalError, match="The chat template refused a prompt: it loops: more than 5,000 rounds"
    ):
        made.render(QUESTION)


def test_a_template_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "RENDER_SECONDS", 0.0)
    with pytest.raises(ShoalError, match="it loops"):
        Tokenizer.load(TINY, "{% for a in range(9) %}{% endfor %}" + AT_END).render(QUESTION)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**12 }}",
        "{{ 10**12 * 'a' }}",
        "{{ [1] * 10**12 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s "
        "%}{% endfor %}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s "
        "%}{% endfor %}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] "
        "| join %}{% endfor %}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set s %}{{ ns.s }}{{ "
        "ns.s }}{% endset %}{% set ns.s = s %}{% endfor %}",
        "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% "
        "endfor %}",
        "{% for i in range(9999) %}{{ 'aaaaaaaa' }}{% endfor %}",
        "{{ '%100000d' % 1 }}",
        "{{ '%*d' % (100000, 1) }}",
        "{{ '%(n)100000d' % {'n': 1} }}",
        "{{ '{:>100000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 100000) }}",
        "{{ '%100000d' | format(1) }}",
        "{{ '{n:{w}}'.format_map({'n': 1, 'w': 100000}) }}",
        "{{ 'a' | center(100000) }}",
        "{{ 'a'.ljust(100000) }}",
        "{{ 'a'.zfill(100000) }}",
        "{{ ('a\n' * 100) | indent(1000) }}",
        "{{ '\t'.expandtabs(100000) }}",
        "{{ ('a' * 1000).replace('a', 'b' * 1000) }}",
        "{{ ('a' * 1000) | replace('a', 'b' * 1000) }}",
        "{{ range(1000) | join('b' * 1000) }}",
        "{{ ('b' * 1000).join('a' * 1000) }}",
        "{{ range(1000) | map('string') | join(d='b' * 1000) }}",
        "{{ [1] | slice(100000) | list }}",
        "{{ [1] | batch(100000, 0) | list }}",
        "{{ [[1]] | tojson(indent=100000) }}",
        "{{ ([[1] * 1000] * 1000) | sum(start=[]) }}",
        "{{ ('a ' * 1000) | wordwrap(1, wrapstring='b' * 1000) }}",
        "{{ ('a' * 1000).translate({97: 'b' * 1000}) }}",
        "{{ ['a'] | map('center', 100000) | list }}",
    ],
)
def test_a_template_that_makes_endless_texts_is_refused(
    monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(template_sandbox, "MOST_CHARACTERS", 1 << 16)
    with pytest.raises(
        ShoalError, match="it makes a text or a list of more than 65,536 characters or entries"
    ):
        Tokenizer.load(TINY, template + AT_END).render(QUESTION)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' | center(10**10) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' | format(1) }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '{:>10000000000}'.format('a') }}",
        "{{ '{:>{}}'.format('a', 10**10) }}",
        "{{ ('a' * 10**7).replace('a', 'b' * 10**7) }}",
        "{{ 'x' | indent(10**10, true) }}",
        "{{ [1] | batch(10**10, 'x') | list }}",
        "{{ range(5) | slice(10**10) | list }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{{ ('a' * 10**6) | join('b' * 10**6) }}",
        "{{ ['a'] | map('center', 10**10) | list }}",
    ],
)
def test_a_template_that_widens_texts_without_measure_is_refused(template: str) -> None:
    with pytest.raises(
        ShoalError, match=r"a prompt: (its format .* is wider|\S+ has a width of|it makes a text)"
    ):
        Tokenizer.load(TINY, template + AT_END).render(QUESTION)


def test_widths_and_numbers_of_a_template_are_written() -> None:
    template = (
        "{{ '%d %05d' | format(1234567890123, 42) }}|{{ '{} {:>3}'.format(1234567, 'x') }}|"
        "{{ '{\"id\": 1234567} %s' % 3 }}|{{ 'a' | center(3) }}|{{ 7 % 3 }}|{{ ['a', 'b'] | "
        "join(', ') }}|"
        "{{ 'aa'.replace('a', 'b') }}|{{ 'x\ny' | indent(2) }}|{{ messages | length }}"
    )
    assert Tokenizer.load(TINY, template).render(QUESTION, finished=True) == (
        '1234567890123 00042|1234567   x|{"id": 1234567} 3| a |1|a, b|bb|x\n  y|1'
    )


def test_what_bounded_templates_write_is_what_jinja_writes() -> None:
    template = (
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{% for m in messages if m.role != 'system' %}{{ "
        "loop.index ~ '/' ~ loop.length ~ m.content }}{% if loop.last %}!{% else %}{{ "
        "loop.nextitem.role }}{% endif %}{% else %}none{% endfor %}{{ f(1 + 2) }}{{ 'a' * 3 + 'b' "
        "}}{{ ([1] + [2]) | length }}{{ 2 ** 10 }}{{ none ~ true }}{% for n in [1, [2]] recursive "
        "%}{{ loop(n) if n is not number else n }}{% endfor %}"
    )
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    assert (
        Tokenizer.load(TINY, template).render(messages, finished=True)
        == "1/2auser2/2b!<3>aaab21024NoneTrue12"
    )


def test_a_long_text_has_the_same_tokens() -> None:
    made = Tokenizer.load(TINY)
    text = "2 + 3 = ? " * (tokenizer_module.LONG_TEXT // 8)
    assert len(text) > tokenizer_module.LONG_TEXT
    assert made.encode(text) == made._backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("num_key_value_heads", -1),
        ("num_key_value_heads", "2"),
        ("num_key_value_heads", True),
        ("head_dim", 10**12),
        ("head_dim", -4),
        ("head_dim", 1.5),
        ("head_dim", "64"),
        ("rope_theta", "x"),
        ("rope_theta", -1),
        ("rms_norm_eps", float("nan")),
        ("rope_scaling", "x"),
        ("layer_types", 5),
        ("rope_scaling", {"rope_type": "linear", "factor": float("inf")}),
        ("quantization_config", "x"),
        ("hidden_size", True),
    ],
)
def test_an_entry_of_a_config_that_is_no_such_number_is_named(
    folder: Path, entry: str, value: object
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, entry: value}))
    named = "factor" if isinstance(value, dict) else entry
    with pytest.raises(ShoalError, match=rf"config.json: {named} is .*expected"):
        architecture_of(folder)


@pytest.mark.parametrize(
    ("entry", "most"),
    [
        ("num_hidden_layers", "10,000"),
        ("num_attention_heads", "100,000"),
        ("hidden_size", "2,147,483,647"),
        ("vocab_size", "2,147,483,647"),
    ],
)
def test_a_model_without_measure_is_refused(folder: Path, entry: str, most: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, entry: 10**12}))
    with pytest.raises(ShoalError, match=f"{entry} is 1000000000000; expected {most} at most"):
        architecture_of(folder)


def test_a_pipe_in_place_of_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ShoalError, match=r"model\.safetensors is not a file but a pipe"):
        tensor_files.read_header(folder / "model.safetensors")
    with pytest.raises(ShoalError, match=r"model\.safetensors is not a file but a pipe"):
        huggingface.open_tensors(folder, architecture_of(folder))


# ---- requests


@pytest.mark.parametrize(
    "prompt", ["2 + 3 = ? " * 60_000, [{"role": "user", "content": "2 + 3 = ? " * 2_000}] * 30]
)
def test_of_a_prompt_that_is_too_long_no_more_is_encoded_than_shows_it(
    monkeypatch: pytest.MonkeyPatch, prompt: str | list[dict[str, str]]
) -> None:
    made = Tokenizer.load(TINY)
    encoded: list[int] = []
    encode_text = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer,
        "encode",
        lambda self, text, special=False: (
            encoded.append(len(text)),
            encode_text(self, text, special),
        )[1],
    )
    with pytest.raises(
        ShoalError, match=r'prompt="6\d{5} characters": expected what fits the 100 tokens'
    ):
        encode(prompt, (), made, 100)
    assert not encoded
    with pytest.raises(
        ShoalError,
        match=r'prompt="more than 10000 tokens": expected 1 to sampling\.max_prompt_tokens',
    ):
        encode(prompt, (), made, 10_000)
    assert sum(encoded) < 100_000


def test_a_prompt_that_fits_is_encoded_whole() -> None:
    made = Tokenizer.load(TINY)
    text = "2 + 3 = ? " * 4_000
    assert encode(text, (), made, 50_000).tolist() == made.encode_prompt(text).tolist()


@pytest.mark.parametrize("depth", [199, 500, 985, 990, 5000])
def test_a_body_that_is_nested_too_deeply_is_refused(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    with pytest.raises(
        ShoalError, match=r"the body is not (a valid request: more than 200 lists|valid JSON)"
    ):
        parse(f'{{"messages": [{{"role": "user", "content": "x", "a": {nested}}}]}}'.encode())
