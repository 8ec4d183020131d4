"""The two files of `shoal generate`: prompts in, a row a completion out, both jsonl."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.types import Completion, Prompt, ShoalError


@dataclass(frozen=True)
class NumberedPrompt:
    """A prompt and where it stands: `place` is `FILE, line N`."""

    place: str
    prompt: Prompt

    def encode(self, encode: Callable[[Prompt], np.ndarray], max_tokens: int) -> np.ndarray:
        """Its tokens, int32[Tp]; ShoalError naming its line where the template refuses it or it is too long."""
        try:
            ids = encode(self.prompt)
        except ShoalError as error:
            raise ShoalError(f"{self.place}: {error}") from error
        if not 1 <= len(ids) <= max_tokens:
            raise ShoalError(f"{self.place}: the prompt has {len(ids)} tokens, expected 1 to {max_tokens}: raise "
                             "max_prompt_tokens, or take the line out")
        return ids


def read_prompts(path: Path) -> list[NumberedPrompt]:
    """The `prompt` of every line that is not blank: text, or messages. ShoalError naming the first line without."""
    if not path.is_file():
        raise ShoalError(f"prompts={path}: there is no such file; give a jsonl file with a `prompt` a line")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ShoalError(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}): convert it") from error
    found = [NumberedPrompt(f"{path}, line {number}", _prompt(line, f"{path}, line {number}"))
             for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ShoalError(f"{path} holds no prompt: write one JSON object a line, {{\"prompt\": ...}}")
    return found


def _prompt(line: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ShoalError(f"{place} is no JSON: {error.msg} at column {error.colno}; one object a line is "
                         "needed") from error
    if not isinstance(row, dict) or "prompt" not in row:
        raise ShoalError(f"{place} has no `prompt`: a text, or a list of messages, is needed")
    prompt = row["prompt"]
    messages = isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)
    if not isinstance(prompt, str) and not messages:
        raise ShoalError(f"{place}: `prompt` is {json.dumps(prompt):.60}; a text, or a list of messages with role and "
                         "content, is needed")
    return prompt


def completion_rows(prompt_ids: Sequence[np.ndarray], completions: Mapping[tuple[int, int], Completion],
                    decode: Callable[[Sequence[int]], str], count: int) -> Iterator[str]:
    """A line a completion, in the order of the prompts; `completions` by (prompt, index)."""
    for number, ids in enumerate(prompt_ids):
        for index in range(count):
            completion = completions[number, index]
            row: dict[str, Any] = {
                "prompt_ids": ids.tolist(),
                "completion_ids": completion.token_ids.tolist(),
                "logprobs": [float(value) for value in completion.logprobs],
                "completion": decode(completion.token_ids.tolist()),
                "stop_reason": completion.stop_reason.value,
            }
            yield json.dumps(row, ensure_ascii=False)
