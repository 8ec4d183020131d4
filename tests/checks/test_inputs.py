"""Findings about right answers in the data that the model cannot give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.checks.inputs import _check_answers
from shoal.config.merge import compose
from shoal.findings import Findings
from shoal.records import Example


def findings(columns: dict[str, Any], words: list[str]) -> list[str]:
    """The findings about one row whose answer may have 16 tokens, a token being a word."""
    config, _ = compose("train", ["sampling.max_completion_tokens=16", *words])
    task: Any = SimpleNamespace(train=[Example(0, "What?", columns)])
    tokenizer: Any = SimpleNamespace(encode_prompt=lambda text: text.replace("<", " <").split(" "))
    found = Findings()
    _check_answers(config, task, tokenizer, found)
    return [finding.text for finding in found.found]


LONG = "of the capital " * 5


@pytest.mark.parametrize(
    ("answer", "is_too_long"),
    [("Paris", False), (f"{LONG}#### Paris", True), (LONG + "Paris", True)],
)
def test_an_answer_without_reasoning_is_measured_as_it_stands(answer: str, is_too_long: bool):
    found = findings({"answer": answer}, ["reward=mine.py:f"])
    assert bool(found) == is_too_long
    assert all("right answers take more than" in text for text in found)
