"""`shoal sft`: the data's own answers, learned by the update of reinforcement learning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_runs import metrics, parameters_of, same_bits

from shoal import cli
from shoal.chat.tokenizer import Tokenizer
from shoal.checks.inputs import check_template_writes, streams
from shoal.config.commands import SftConfig
from shoal.config.merge import compose
from shoal.findings import Findings
from shoal.job.data_source import DataSource, for_training
from shoal.job.task import load_questions
from shoal.protocols import GroupRequest
from shoal.records import Example, Purpose, ShoalError

TINY = Path(cli.__file__).parent / "assets" / "tiny"


def dialogue(*texts: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "assistant" if number % 2 else "user", "content": text}
            for number, text in enumerate(texts)
        ]
    }


ROWS = [
    dialogue("Tom has 12 apples. He buys 7 more.", "19", "Then he loses 5 of them.", "14"),
    dialogue("2 + 3 = ?", "<answer>5</answer>"),
    dialogue("3 + 3 = ?", "<answer>6</answer>"),
    dialogue("4 + 3 = ?", "7", "Sure?", "yes", "Really?", "<answer>7</answer>"),
]


def sft(folder: Path, *words: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        cli.main(
            [
                "sft",
                f"task.path={folder}/rows.jsonl",
                f"base_output_directory={folder}",
                "run_name=run",
                "batch.prompts_per_step=4",
                "steps=4",
                "optimizer.warmup_steps=1",
                "optimizer.lr=1e-3",
                *words,
            ]
        )
        == 0
    )
    return folder / "run"


@pytest.mark.slow
def test_the_first_loss_is_torchs_cross_entropy_of_the_assistants_tokens(tmp_path: Path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    run = sft(tmp_path, "steps=1")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    tokenizer = Tokenizer.load(TINY)
    total, count = 0.0, 0
    for row in ROWS:
        text, labels = "", []
        for message in row["messages"]:  # the packaged template, by hand
            mine = message["role"] == "assistant"
            if mine:
                piece = message["content"] + "<|end|>"
            else:
                piece = f"<|user|>{message['content']}<|assistant|>"
            ids = tokenizer.encode_spans(piece, [])[0].tolist()
            labels += ids if mine else [-100] * len(ids)
            text += piece
        ids = torch.tensor([tokenizer.encode_spans(text, [])[0].tolist()])
        assert len(labels) == ids.shape[1]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(
            logits, torch.tensor(labels[1:]), reduction="sum", ignore_index=-100
        )
        total, count = total + float(losses), count + sum(label != -100 for label in labels)
    assert count > 20
    assert metrics(run)[0]["loss"] == pytest.approx(total / count, abs=1e-5)


@pytest.mark.slow
def test_the_model_learns_the_answers_and_a_resumed_run_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = sft(tmp_path / "whole", "steps=12")
    parts = sft(tmp_path / "parts", "steps=5")
    assert cli.main(["sft", f"resume={parts}", "steps=12"]) == 0
    losses = [step["loss"] for step in metrics(whole)]
    assert losses[-1] < 0.2 * losses[0]
    assert losses == [step["loss"] for step in metrics(parts)]
    assert same_bits(parameters_of(whole, 12), parameters_of(parts, 12))
    assert cli.main(["groups", str(whole), "step=2", "group=0"]) == 0
    text = capsys.readouterr().out
    assert (
        "advantage 1" in text
        and "nothing has been learned" not in text
        and "reward/mean" not in metrics(whole)[0]
    )


@pytest.mark.slow
def test_a_teacher_holds_the_model_near_it(tmp_path: Path):
    """Here the model that it begins as, in a run whose answers pull it away from there."""
    divergences = {}
    for coef in (0, 100):
        folder = tmp_path / f"coef-{coef}"
        folder.mkdir()
        run = sft(
            folder,
            "teacher.path=tiny",
            "teacher.divergence=full",
            "teacher.beta=0",
            f"teacher.coef={coef}",
            "steps=12",
        )
        divergences[coef] = [step["teacher/divergence"] for step in metrics(run)]
        assert abs(divergences[coef][0]) < 1e-6
    assert 0 <= divergences[100][-1] < 0.3 * divergences[0][-1]


@pytest.fixture(scope="module")
def answers_cut_at_4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one step, in rows of 64 tokens."""
    folder = tmp_path_factory.mktemp("cut")
    return sft(folder, "steps=1", "sampling.max_completion_tokens=4", "batch.micro_tokens=64")


def test_each_group_is_a_row_and_long_answers_are_cut_and_counted(answers_cut_at_4: Path):
    (step,) = metrics(answers_cut_at_4)
    assert step["completions/length_max"] == 4 and step["completions/truncated"] == 0.5
    assert step["tokens/sampled"] == 0 and step["sampler_gap/logprob_max"] == 0


@pytest.mark.slow
def test_an_adapter_alone_is_trained(tmp_path: Path):
    run = sft(tmp_path, "model.lora.rank=4", "steps=2", "optimizer.lr=1e-2")
    first, second = (step["loss"] for step in metrics(run))
    assert second < first


def learned(row: dict[str, Any], prompt: Any = None) -> list[str]:
    tokenizer = Tokenizer.load(TINY)
    columns = {name: value for name, value in row.items() if name != "prompt"}
    result = []
    for one in streams(
        tokenizer, Example(0, row.get("prompt", prompt), columns, "rows.jsonl, line 1")
    ):
        result.append(tokenizer.decode(one.token_ids[one.loss_mask], skip_special_tokens=False))
    return result


USER = [{"role": "user", "content": "2 + 3 = ?"}]


def test_the_forms_of_rows():
    assert learned({"prompt": "2 + 3 =", "completion": " 5"}) == [" 5<|end|>"]
    assert learned({"prompt": USER, "completion": "5"}) == ["5<|end|>"]
    assert learned({"prompt": USER, "completion": [{"role": "assistant", "content": "5"}]}) == [
        "5<|end|>"
    ]
    # Of a prompt that holds an answer already, what is to be completed is learned alone.
    asked = [*USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
    assert learned({"prompt": asked, "completion": "5"}) == ["5<|end|>"]
    assert learned(
        {"messages": [*asked, {"role": "assistant", "content": "no"}], "tools": "[]"}, USER
    ) == ["4<|end|>no<|end|>"]
    solution = "<reasoning>2 + 3 = 5.</reasoning><answer>5</answer>"
    assert learned({"prompt": USER, "answer": "5", "solution": solution}) == [f"{solution}<|end|>"]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": USER, "other": "5"}, "line 1: expected `messages`, `prompt` and `completion`"),
        (
            {"prompt": "2 + 3", "completion": [{"role": "assistant", "content": "5"}]},
            "line 1: expected `messages`",
        ),
        (
            {"prompt": USER, "completion": [{"role": "user", "content": "5"}]},
            "no message of the assistant",
        ),
        ({"prompt": USER, "completion": "5", "tools": "[{"}, "line 1: Expecting"),
    ],
)
def test_rows_that_cannot_be_learned(row: dict[str, Any], error: str):
    with pytest.raises(ShoalError, match=error):
        learned(row)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
WITH_CALLS = [
    {
        "messages": [
            *USER,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "5"},
        ],
        "tools": [CALL],
    },
    {"messages": [*USER, {"role": "assistant", "content": "6"}], "tools": None},
]


def warned(
    folder: Path, template: str = "", rows: Sequence[dict[str, Any]] = WITH_CALLS
) -> list[str]:
    """What is warned of rows to learn, and of the answers that they are."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, _ = compose("sft", [f"task.path={folder}/rows.jsonl"])
    findings = Findings()
    task = for_training(load_questions(config.task, config.reward), config)
    check_template_writes(
        config, task, Tokenizer.load(TINY, template), findings.of("data", "task.path")
    )
    return [found.text for found in findings.at("warning")]


@pytest.mark.parametrize(
    ("rows", "number"),
    [
        ([{"prompt": "2 + 3 =", "completion": ""}, {"prompt": "2 + 4 =", "completion": "6"}], 1),
        ([{"prompt": USER, "completion": [{"role": "assistant", "content": " "}]}] * 2, 2),
        ([{"messages": [*USER, {"role": "assistant", "content": ""}]}], 1),
        (
            [
                {
                    "messages": [
                        *USER,
                        {"role": "assistant", "content": ""},
                        *USER,
                        {"role": "assistant", "content": "5"},
                    ]
                }
            ],
            1,
        ),
        (WITH_CALLS, 0),
        ([{"prompt": "2 + 3 =", "completion": "5"}], 0),
    ],
)
def test_empty_answers_are_counted(rows: list[dict[str, Any]], number: int, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, _ = compose("sft", [f"task.path={tmp_path}/rows.jsonl"])
    notes = for_training(load_questions(config.task, config.reward), config).notes
    assert len(notes) == bool(number)
    assert not number or (
        f"{number} of {len(rows)} rows have an empty answer, the first " in notes[0]
        and "rows.jsonl, line 1: the model learns to say nothing" in notes[0]
    )


def test_rows_without_an_answer_are_counted_before_the_first_step(tmp_path: Path):
    rows = []
    for i in range(3):
        rows.append({"prompt": f"{i} + 4", "answer": "" if i == 1 else "7"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, _ = compose("sft", [f"task.path={tmp_path}/rows.jsonl"])
    with pytest.raises(
        ShoalError,
        match=r"1 of 3 rows have nothing to learn, the first \S+, line 2: expected `mess",
    ):
        for_training(load_questions(config.task, config.reward), config)


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}END{% "
    "endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_what_the_template_leaves_out_of_rows_is_counted(tmp_path: Path):
    assert [text[:75] for text in warned(tmp_path, CHATML.replace("END", "<|end|>"))] == [
        "1 of 2 rows checked hold `tools`, which the chat template does not write: t",
        "1 of 2 rows checked hold `tool_calls`, which the chat template does not wri",
    ]
    whole = CHATML.replace("END", "{{ m.tool_calls }}<|end|>") + "{{ tools }}"
    assert not warned(tmp_path, whole)
    assert not warned(tmp_path, rows=ROWS) and not warned(
        tmp_path, rows=[{"prompt": "2 + 3 =", "completion": "5"}]
    )


def test_answers_that_nothing_ends_are_counted_and_not_said_to_be_ended(tmp_path: Path):
    (text,) = warned(tmp_path, CHATML.replace("END", "\n"), ROWS)
    assert text.startswith("4 of 4 answers checked end without an end-of-sequence token")
    config, _ = compose("sft", [f"task.path={tmp_path}/rows.jsonl"])
    names = (
        "publish",
        "publish_frozen",
        "published",
        "published_shapes",
        "read_stats",
        "check_logprobs",
        "close",
    )
    sampler: Any = SimpleNamespace(**dict.fromkeys(names))
    example = Example(0, USER, {"completion": "5"})
    request = GroupRequest(
        Purpose.TRAIN, 0, 0, example, np.zeros(1, np.int32), 1, config.sampling.params
    )
    for template, reason in ((CHATML.replace("END", "\n"), "data"), ("", "eos")):
        source = DataSource(sampler, Tokenizer.load(TINY, template), config)
        source.request([request])
        (group,) = source.take(Purpose.TRAIN, 0)
        assert group.completions[0].stop_reason == reason


def test_settings():
    config, resolved = compose(
        "sft",
        [
            "task.path=rows.jsonl",
            "max_length=64",
            "packing=true",
            "assistant_only_loss=true",
            "per_device_train_batch_size=2",
            "gradient_accumulation_steps=3",
        ],
    )
    assert (
        isinstance(config, SftConfig)
        and config.algorithm.learns_from_data
        and config.task.name == "custom"
    )
    assert config.sampling.max_completion_tokens == config.sampling.max_prompt_tokens == 64
    assert (config.batch.prompts_per_device, config.batch.group_size, config.evaluate_every) == (
        6,
        1,
        -1,
    )
    assert "packing" in " ".join(resolved.became)
    same, _ = compose("train", ["algorithm=sft", "task=custom", "task.path=rows.jsonl"])
    assert same.algorithm.learns_from_data
    for words, error in (
        (["algorithm=dapo"], "algorithm.advantage='grpo': expected sft"),
        (["batch.group_size=2"], "1: the data has one answer"),
        (["assistant_only_loss=false"], "assistant_only_loss"),
        (["teacher.path=big"], "teacher.divergence='sampled': expected full or topk with sft"),
    ):
        with pytest.raises(ShoalError, match=error):
            compose("sft", ["task.path=rows.jsonl", *words])
    with pytest.raises(ShoalError, match=r"batch.group_size=1: expected 2 or more"):
        compose("train", ["batch.group_size=1"])
