"""A task of Inspect that asks `shoal serve`; docs/evaluation.md has the command."""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate


@task
def sums() -> Task:
    file = Path(__file__).with_name("sums.jsonl")
    return Task(
        json_dataset(str(file), FieldSpec(input="question", target="answer")),
        solver=generate(),
        scorer=pattern(r"<answer>(.*?)</answer>"),
        config=GenerateConfig(temperature=0, max_tokens=64),
    )
