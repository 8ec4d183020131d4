"""Run folders made without a model: groups with given rewards and texts, metrics, evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import write_tokenizer

from shoal.config.merge import compose
from shoal.config.stored import texts_of, to_dict, to_yaml
from shoal.config.train import Config
from shoal.records import Completion, Example, Group, Purpose, StopReason
from shoal.runs.layout import RECIPE
from shoal.runs.lines import Summary
from shoal.runs.metrics import wilson_interval
from shoal.runs.writer import RunWriter

HOSTILE = (
    "<script>document.title='hacked'</script><img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b[0m \u202eright\u202c",
    "שלום עולם 你好 👩‍🔬🏽",
    "x" * 100_000,
)


def completion(index: int, size: int, version: int) -> Completion:
    ids = (np.arange(size) % 40 + 70).astype(np.int32)
    return Completion(
        0,
        index,
        ids,
        np.linspace(-0.1, -3, size).astype(np.float32),
        np.ones(size, bool),
        np.full(size, version, np.int32),
        StopReason.EOS,
    )


def stored_group(
    step: int,
    row: int,
    rewards: Sequence[float],
    texts: Sequence[str] | None = None,
    *,
    subset: str = "",
    correct: Sequence[bool] | None = None,
    **columns: Any,
) -> Group:
    """A group as a step (from 0) leaves it; with `subset` one of an evaluation of that version."""
    values = np.array(rewards, float)
    texts = tuple(texts or (f"answer {value:g} of step {step}" for value in rewards))
    right = np.array(values >= 1 if correct is None else correct)
    return Group(
        Purpose.EVALUATE if subset else Purpose.TRAIN,
        step,
        step,
        Example(
            row, [{"role": "user", "content": f"question {row}"}], {"answer": str(row), **columns}
        ),
        np.arange(5, dtype=np.int32),
        tuple(completion(i, len(text) % 50 + 3, step) for i, text in enumerate(texts)),
        texts,
        values,
        {"correct": right.astype(float), "format": np.ones(len(values))},
        ~np.isnan(values),
        right,
        subset or "train",
        {"verdict": [f"grader says {value:g}" for value in rewards]},
        {"correct": 1.0, "format": 0.1},
    )


MESSAGES = (
    {
        "role": "assistant",
        "content": "I add.",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "add", "arguments": {"a": 2, "b": "<b>3</b>"}},
            }
        ],
    },
    {"role": "tool", "name": "add", "content": "5 " + "z" * 200, "truncated_bytes": 7},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "It is 5."},
)


def in_turns(group: Group) -> Group:
    """The group with a first completion of two turns, on a prompt of its own: tokens 1 and 2 are
    context."""
    first = group.completions[0]
    mask = np.ones(len(first), bool)
    mask[1:3] = False
    first = replace(
        first,
        loss_mask=mask,
        logprobs=np.where(mask, first.logprobs, 0).astype(np.float32),
        messages=MESSAGES,
        prompt_ids=np.arange(7, dtype=np.int32),
        stop_reason=StopReason.MAX_TURNS,
    )
    rest = []
    for one, text in zip(group.completions[1:], group.texts[1:], strict=True):
        rest.append(replace(one, messages=({"role": "assistant", "content": text},)))
    return replace(group, completions=(first, *rest))


def write_run(
    path: Path,
    steps: int = 6,
    groups: Callable[[int], list[Group]] | None = None,
    *,
    finished: bool = True,
    settings: Sequence[str] = (),
    spike: int = 0,
) -> Path:
    """A run of so many steps with two groups each, evaluated before and after; `spike`: a step of
    large gradients."""
    config = compose(Config, [f"steps={steps}", *settings])[0]
    make = groups or (
        lambda step: [
            stored_group(step, step % 3, [0.1, 1.1, 0.1, 1.1]),
            stored_group(step, 10 + step, [0.1, 0.1, 0.1, 0.1]),
        ]
    )
    with RunWriter(_made(path)) as folder:
        folder.write_config(*texts_of(config))
        for version, right in ((0, (False, True)), (steps, (True, True))):
            asked = []
            for row, one in enumerate(right):
                asked.append(stored_group(version, row, [1.1 if one else 0.1], subset="held_out"))
            folder.write_groups(version, asked)
            folder.write_evaluation(
                version,
                "held_out",
                {
                    "num_questions": 2,
                    "protocol": "greedy",
                    "accuracy": sum(right) / 2,
                    "accuracy_interval": list(wilson_interval(sum(right), 2)),
                },
            )
        for step in range(steps):
            made = make(step)
            advantages = []
            for group in made:
                advantages.append(np.nan_to_num(group.rewards - np.nanmean(group.rewards)))
            trained = {}
            for place, group in enumerate(made):
                trained[(place, 0)] = group.completions[0].logprobs + 0.01
            folder.write_groups(step + 1, made, advantages, trained)
            folder.write_metrics(step + 1, metrics(step + 1, steps, spike))
        folder.begin("training", 2)
        folder.write_event("warning", "something to look at <b>here</b>")
        if finished:
            folder.write_summary(
                Summary(
                    before={
                        "held_out": {"accuracy": 0.5, "num_questions": 2, "protocol": "greedy"}
                    },
                    after={"held_out": {"accuracy": 1.0, "num_questions": 2, "protocol": "greedy"}},
                )
            )
    write_tokenizer(path / "model")
    return path


def recipe_about(
    steps: Mapping[int, Sequence[float]], parameters: int = 875520, jax: str = "0.10.2"
) -> dict[str, Any]:
    """The section `about` of a recipe whose band has these steps; weights and model are made up."""
    return {
        "what": "a model learns",
        "hardware": "two cores",
        "seconds": 5,
        "expected": {"metric": "evaluate/held_out/accuracy", "seeds": 3, "steps": dict(steps)},
        "measured": {
            "command": "shoal train mine.yaml",
            "date": "2026-11-30",
            "cpu": "a processor",
            "versions": {"jax": jax},
            "parameters": parameters,
            "weights": "0x00000012 float32",
        },
    }


def follow_recipe(run: Path, apart: str = "", holds: bool = True) -> None:
    """Makes a stored run one that follows the packaged recipe word-problems."""
    recipe = compose("train", ["config_name=word-problems"])[1].recipe
    assert recipe is not None
    about = {**recipe.about, "name": recipe.name, "apart": apart, "holds": holds}
    text = to_yaml({**to_dict(recipe.config), "about": about})
    (run / RECIPE).write_text(text, encoding="utf-8")


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def metrics(step: int, steps: int, spike: int = 0) -> dict[str, float]:
    return {
        "reward/mean": 0.3 + step / steps / 2,
        "rewards/correct": 0.2 + step / steps / 2,
        "rewards/format": 1.0,
        "grad_norm": 90.0 if step == spike else 1.0 + 0.01 * (step % 3),
        "entropy": 0.5 - 0.001 * step,
        "completions/length_mean": 40.0 + step % 5,
        "time/step_seconds": 1.0,
        "lr": 1e-5,
    }


def append_step(path: Path, step: int, groups: Sequence[Group]) -> None:
    """A further step, written as a run under way writes it."""
    with RunWriter(path) as folder:
        folder.write_groups(step, groups)
        folder.write_metrics(step, metrics(step, step))


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
