"""`shoal generate`: completions of the prompts in a jsonl file, a row a completion in another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config.schema import GenerateConfig
from shoal.config.text import require_given
from shoal.files import check_local, check_writable, write_text
from shoal.mesh import make_roles
from shoal.report.console import Console
from shoal.rollout.publication import publish_to
from shoal.run.loading import make_model, open_model
from shoal.run.parts import engine_maker
from shoal.run.preflight.settings import check_model
from shoal.sampler.engine import drain
from shoal.types import Address, Completion, Prompt, Purpose, SampleRequest, ShoalError


def generate(config: GenerateConfig, console: Console | None = None) -> dict[str, Any]:
    """Writes the rows in the order of the prompts, whole or not at all. Raises ShoalError for a prompt that cannot be
    used before the first token is sampled."""
    require_given(config, "prompts", "output")
    output = check_writable(config.output, "output")
    check_model(config.model)
    with console or Console() as console:
        prompts = read_prompts(check_local(config.prompts, "prompts"))
        role = make_roles(config.mesh).sampler
        loaded = open_model(config.model, console)
        model, tokenizer = make_model(config.model, loaded, role, 0), loaded.tokenizer
        params, count = config.sampling.params, config.num_generations
        prompt_ids = [prompt.encode(tokenizer.encode_prompt, config.sampling.max_prompt_tokens) for prompt in prompts]
        engine = engine_maker(model, tokenizer, config.sampling, config.batch * role.mesh.size)(
            Purpose.GENERATE, count)
        engine.load(0, publish_to(model, loaded.load(role, model.dtype)))
        engine.submit([
            SampleRequest(number, ids, count, Address(config.seed, Purpose.GENERATE.value, 0, number), params)
            for number, ids in enumerate(prompt_ids)])
        lines = list(completion_rows(prompt_ids, drain(engine), tokenizer.decode, count))
        write_text(output, "".join(line + "\n" for line in lines))
        console.note(f"wrote {len(lines)} completions to {output}")
    return {"completions": len(lines), "output": str(output)}


@dataclass(frozen=True)
class NumberedPrompt:
    """A prompt with its place, `FILE, line N`."""

    place: str
    prompt: Prompt

    def encode(self, encode: Callable[[Prompt], np.ndarray], max_tokens: int) -> np.ndarray:
        """Its tokens, int32[Tp]; ShoalError with its line where the template refuses it or it is too long."""
        try:
            ids = encode(self.prompt)
        except ShoalError as error:
            raise ShoalError(f"{self.place}: {error}") from error
        if not 1 <= len(ids) <= max_tokens:
            raise ShoalError(f"{self.place}: the prompt has {len(ids)} tokens, expected 1 to {max_tokens}: raise "
                             "max_prompt_tokens, or remove the line")
        return ids


def read_prompts(path: Path) -> list[NumberedPrompt]:
    """The `prompt`, text or messages, of every line that is not blank. ShoalError with the first line that has none."""
    if not path.is_file():
        raise ShoalError(f"prompts={path}: there is no such file; give a jsonl file with a `prompt` a line")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ShoalError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it") from error
    found = [NumberedPrompt(f"{path}, line {number}", _prompt(line, f"{path}, line {number}"))
             for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ShoalError(f"{path} holds no prompt: write one JSON object a line, {{\"prompt\": ...}}")
    return found


def _prompt(line: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ShoalError(f"{place} is not JSON: {error.msg} at column {error.colno}; one object a line is "
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
