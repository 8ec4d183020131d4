"""Makes the packaged models from random weights, by `shoal sft`.

    python benchmarks/make_tiny.py tiny FOLDER        worked solutions of `words`
    python benchmarks/make_tiny.py tiny-tools FOLDER  dialogues of `calculator` and `guess`, good
                                                      and clumsy ones
    python benchmarks/make_tiny.py tiny-qwen3.5-moe FOLDER  `tiny` with delta nets in three of four
                                                      layers, and experts; not packaged
                                   [key=value ...]    other keys of `shoal sft`

A tokenizer is trained on the same dialogues first. Clumsy dialogues leave reinforcement learning
something to improve.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from shoal.chat.tokenizer import Tokenizer
from shoal.commands.export import export
from shoal.commands.train import train
from shoal.config.commands import ExportConfig
from shoal.config.merge import compose
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.task import TaskSection
from shoal.files import check_new_folder
from shoal.mesh import make_roles
from shoal.model.architecture import Architecture, DeltaNet, Experts, Layer
from shoal.model.parameters import initialise
from shoal.records import Example, Messages
from shoal.tasks import calculator, guess, words
from shoal.tasks.generated import LazyRows, pick
from shoal.tasks.task import Task
from shoal.weights import huggingface

TINY_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% if "
    "message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TOOLS_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\n\\nA call: <tool_call>\\n{"name": <name>, "arguments": \
<object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' \
}}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% \
endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function or tool_call %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


@dataclass(frozen=True)
class Stage:
    """What is learned one after the other: `dialogue(row)` for so many rows, with these
    settings."""

    dialogue: Callable[[int], dict[str, Any]]
    rows: int
    settings: Sequence[str]


@dataclass(frozen=True)
class Recipe:
    """A model, and what it learns."""

    stages: Sequence[Stage]
    # tokens that a decoded text leaves out: padding, the end of a turn, and others
    special: Sequence[str]
    tags: Sequence[str]  # whole tokens that it keeps
    template: str
    vocabulary: int
    hidden_size: int
    heads: int  # of size 32, two for each key/value head
    feed_forward: int
    # True: layers, norms and experts as Qwen3.5 with experts has them
    is_hybrid: bool = False


# ---- dialogues


def word_problem(row: int) -> dict[str, Any]:
    problem = words.PROBLEMS.train(row, TaskSection(), "pretrain")
    return {
        "messages": [
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": problem.solution},
        ]
    }


def skill(row: int) -> dict[str, Any]:
    """What a dialogue needs, well done and without the tool's description: copying, calling,
    halving."""
    rng = Random(row)
    if row % 4 == 0:
        text = " ".join(
            pick(rng, ("+", "-", "*", str(rng.randint(1, 10 ** rng.randint(1, 7)))))
            for _ in range(6)
        )
        return {
            "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        }
    return {**(guesses(rng, row, 1) if row % 4 == 3 else calculation(rng, row, 1)), "tools": None}


def dialogue(row: int) -> dict[str, Any]:
    """Of a calculator, and every third of a number that is guessed; half of them are clumsy."""
    rng = Random(row)
    return guesses(rng, row, rng.random()) if row % 3 == 2 else calculation(rng, row, rng.random())


def calculation(rng: Random, row: int, kind: float) -> dict[str, Any]:
    """A problem with the tool: well done, without it, with a call that cannot be read, of a part,
    or without tags."""
    question, expression = calculator.PROBLEMS.train(10**6 + row, TaskSection())
    messages: Messages = [{"role": "user", "content": question}]

    def call(expression: str, text: str = "") -> None:
        if text:
            shown = {"content": text}
        else:
            shown = {
                "tool_calls": [
                    {"function": {"name": "calculate", "arguments": {"expression": expression}}}
                ]
            }
        messages.append({"role": "assistant", "content": "", **shown})
        answer = '{"error": "no call can be read"}' if text else calculator.calculate(expression)
        messages.append({"role": "tool", "content": answer})

    value, said, parts = "0", "<answer>{}</answer>", expression.split(" ")
    if 0.12 < kind < 0.25:
        call(
            "",
            f'<tool_call>\n{{"name": "calculate", "arguments": {{"expression": '
            f'"{expression}"\n</tool_call>',
        )
    if kind > 0.2:
        call((" ".join(parts[:-2]) or parts[0]) if 0.25 < kind < 0.35 else expression)
        value, said = messages[-1]["content"], "It is {}." if 0.35 < kind < 0.42 else said
    messages.append({"role": "assistant", "content": said.format(value)})
    return {"messages": messages, "tools": [SCHEMA]}


def guesses(rng: Random, row: int, kind: float) -> dict[str, Any]:
    """Halving what is left, or any number."""
    (opening, secret), environment = guess.RIDDLES.train(10**6 + row, TaskSection()), guess.Guess()
    environment.reset(secret)
    messages: Messages = [{"role": "user", "content": opening}]
    low, high = 1, guess.MOST
    while messages[-1]["role"] == "user":
        number = (low + high) // 2 if kind > 0.4 else rng.randint(1, guess.MOST)
        messages.append({"role": "assistant", "content": str(number)})
        if answer := environment.respond(str(number)):
            low, high = (
                (max(low, number + 1), high) if answer == "higher" else (low, min(high, number - 1))
            )
            messages.append({"role": "user", "content": answer})
    return {"messages": messages, "tools": None}


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    return get_json_schema(function)


SCHEMA = schema_of(calculator.calculate)

RECIPES = {
    "tiny": Recipe(
        [
            Stage(
                word_problem,
                192_000,
                (
                    "steps=3000",
                    "optimizer.lr=2e-3",
                    "batch.prompts_per_step=64",
                    "optimizer.warmup_steps=100",
                ),
            )
        ],
        ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
        ("<reasoning>", "</reasoning>", "<answer>", "</answer>"),
        TINY_TEMPLATE,
        1024,
        128,
        4,
        384,
    ),
    "tiny-tools": Recipe(
        [
            Stage(
                skill,
                200_000,
                (
                    "steps=1500",
                    "optimizer.lr=5e-3",
                    "batch.prompts_per_step=32",
                    "optimizer.warmup_steps=50",
                ),
            ),
            Stage(
                dialogue,
                600,
                (
                    "steps=150",
                    "optimizer.lr=6e-4",
                    "batch.prompts_per_step=16",
                    "optimizer.warmup_steps=10",
                ),
            ),
        ],
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        (
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "</tool_response>",
            "<tools>",
            "</tools>",
            "<answer>",
            "</answer>",
        ),
        TOOLS_TEMPLATE,
        512,
        64,
        4,
        128,
    ),
}


# Half as wide as `tiny`, which is enough for the same solutions.
RECIPES["tiny-qwen3.5-moe"] = replace(
    RECIPES["tiny"], is_hybrid=True, hidden_size=64, heads=2, feed_forward=192
)


# ---- the model


def make(name: str, folder: str, keys: Sequence[str]) -> None:
    """Trains a tokenizer, then random weights on the dialogues, and writes both in Hugging Face
    format."""
    recipe = RECIPES[name]
    check_new_folder(folder, "FOLDER")
    with tempfile.TemporaryDirectory() as place:
        files, model = Path(place) / "tokenizer", Path(place) / "first"
        texts = (
            json.dumps(stage.dialogue(row))
            for stage in recipe.stages
            for row in range(min(stage.rows, 20_000))
        )
        write_tokenizer(files, texts, recipe)
        architecture = small_architecture(recipe, Tokenizer.load(files).vocab_size)
        role = make_roles(MeshSection()).trainer
        huggingface.save(model, initialise(architecture, 0, role), architecture, files, np.float32)
        for number, stage in enumerate(recipe.stages):
            config, _ = compose(
                "sft",
                [
                    f"model.path={model}",
                    f"base_output_directory={place}",
                    f"run_name=stage_{number}",
                    "task.name=rows",
                    "optimizer.schedule=cosine",
                    "optimizer.weight_decay=0.1",
                    "checkpoint.every=0",
                    "report.groups=false",
                    *stage.settings,
                    *keys,
                ],
            )
            train(config, task=Task(name, LazyRows(partial(example_of, stage), stage.rows)))
            model = Path(place) / f"stage_{number}"
        export(ExportConfig(str(model), folder))


def example_of(stage: Stage, row: int) -> Example:
    columns = stage.dialogue(row)
    return Example(row, columns["messages"][:1], columns)


def write_tokenizer(folder: Path, corpus: Iterable[str], recipe: Recipe) -> None:
    """Trains a byte-level BPE tokenizer in which every digit is a token, and writes it with its
    chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # A number of several digits as one token hides its parts: sums of such tokens must be
    # memorised.
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary - len(recipe.tags),
        special_tokens=list(recipe.special),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in recipe.tags])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    pad, end = recipe.special[:2]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": pad,
        "chat_template": recipe.template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    ids = {"eos_token_id": tokenizer.token_to_id(end), "pad_token_id": tokenizer.token_to_id(pad)}
    (folder / "generation_config.json").write_text(json.dumps(ids) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def small_architecture(recipe: Recipe, vocabulary: int) -> Architecture:
    """A Qwen3-shaped decoder of four layers; of a hybrid recipe a Qwen3.5-shaped one, whose active
    experts are together as wide as the other's feed-forward part."""
    dense = Architecture(
        vocab_size=vocabulary,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.feed_forward,
        num_layers=4,
        num_heads=recipe.heads,
        num_kv_heads=recipe.heads // 2,
        head_dim=32,
        rope_theta=10000.0,
        tie_embeddings=True,
        qk_norm=True,
        model_type="qwen3",
    )
    if not recipe.is_hybrid:
        return dense
    delta_net = Layer(mixer="delta_net", feed_forward="experts")
    return replace(
        dense,
        pattern=(delta_net, delta_net, delta_net, Layer(feed_forward="experts")),
        delta_net=DeltaNet(
            num_key_heads=recipe.heads // 2,
            num_value_heads=recipe.heads,
            key_dim=32,
            value_dim=32,
        ),
        experts=Experts(
            num_experts=8,
            experts_per_token=2,
            intermediate_size=recipe.feed_forward // 3,
            shared_size=recipe.feed_forward // 3,
        ),
        intermediate_size=recipe.feed_forward // 3,  # no layer has a plain MLP
        norm="one_plus_weight",
        output_gate=True,
        rotary_share=0.25,
        model_type="qwen3_5_moe_text",
    )


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in RECIPES:
        raise SystemExit(__doc__)
    make(sys.argv[1], sys.argv[2], sys.argv[3:])
