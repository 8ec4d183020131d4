"""`shoal generate`: completions of the prompts in a file, a row a completion in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.chat.tokenizer import Tokenizer
from shoal.checks.settings import check_model
from shoal.commands.responses import given_names
from shoal.config.commands import GenerateConfig
from shoal.config.sections.model import ModelSection
from shoal.config.stored import require_given
from shoal.files import check_input, check_new_file, write_text
from shoal.job.head import model_text
from shoal.job.job import Job
from shoal.job.task import encode_all
from shoal.protocols import SampleRequest
from shoal.records import Completion, Example, NoiseKey, Purpose, ShoalError
from shoal.report.console import Console
from shoal.runs.lines import json_line
from shoal.sampler.engine import drain
from shoal.tasks.data import read_file
from shoal.tasks.examples import UnknownRoles, example_of
from shoal.text import count
from shoal.trainer.prompts import TokenizedExample
from shoal.weights.sampler_copy import publish_to

WRITTEN = (
    "index",
    "prompt",
    "prompt_ids",
    "completion_ids",
    "logprobs",
    "completion",
    "stop_reason",
)
"""Columns of the output, beside those of the input."""


def generate(config: GenerateConfig, console: Console | None = None) -> dict[str, Any]:
    """Writes the rows in the order of the prompts, whole or not at all. Raises ShoalError for a row
    that cannot be used before the first token is sampled."""
    require_given(config, "prompts", "output")
    output = check_new_file(config.output, "output")
    check_model(config.model)
    with console or Console() as console, Job(config, console) as job:
        job.check()
        examples = read_prompts(file := check_input(config.prompts, "prompts"))
        roles = UnknownRoles()
        for example in examples:
            roles.add(example)
        for note in roles.notes:
            console.warning(f"{file.name}: {note}")
        named = "" if config.model != ModelSection() else "; model=... names another"
        console.note(f"model: {model_text(config.model, job.spec, job.model)}{named}")
        tokenizer, size, params = job.tokenizer, config.num_generations, config.sampling.params
        prompts = encode_all(file.name, examples, job.encode, config.sampling, console.warning)
        console.note(f"prompts: {encoding_text(prompts, tokenizer, bool(config.model.template))}")
        engine = job.make_engine()(Purpose.GENERATE, size)
        engine.load(0, publish_to(job.model, job.load_weights(), delete_source=True))
        engine.submit(
            [
                SampleRequest(
                    row,
                    one.prompt_ids,
                    size,
                    NoiseKey(config.seed, Purpose.GENERATE.value, 0, row),
                    params,
                )
                for one in prompts
                for row in [one.example.row]
            ]
        )
        lines = list(completion_rows(prompts, drain(engine), tokenizer.decode, size))
        write_text(output, "".join(line + "\n" for line in lines))
        console.note(f"wrote {count(len(lines), 'completion')} to {output}")
    return {"completions": len(lines), "output": str(output)}


def read_prompts(path: Path) -> list[Example]:
    """The example of every row; its `prompt` is text or messages, or its `messages` are. ShoalError
    with the first row that has none."""
    found = [example_of(number, place, row) for number, (place, row) in enumerate(read_file(path))]
    if not found:
        raise ShoalError(f'{path} holds no prompt: write one JSON object a line, {{"prompt": ...}}')
    return found


def encoding_text(
    prompts: Sequence[TokenizedExample], tokenizer: Tokenizer, template_given: bool
) -> str:
    """`2 of messages, through the model's chat template; 3 of text, as it is, past any template`"""
    texts = sum(isinstance(one.example.prompt, str) for one in prompts)
    template = "model.template" if template_given else "the model's chat template"
    how = (
        f"through {template}"
        if tokenizer.has_template
        else "as plain `User: ...` lines, for want of a chat template"
    )
    kinds = [
        (len(prompts) - texts, f"of messages, {how}"),
        (texts, "of text, as it is, past any chat template"),
    ]
    return "; ".join(f"{number:,} {kind}" for number, kind in kinds if number)


def completion_rows(
    prompts: Sequence[TokenizedExample],
    completions: Mapping[tuple[int, int], Completion],
    decode: Callable[[Sequence[int]], str],
    count: int,
) -> Iterator[str]:
    """A line a completion, in the order of the prompts; `completions` by (row, index)."""
    names = given_names((name for one in prompts for name in one.example.columns), WRITTEN)
    for one in prompts:
        columns = {names[name]: value for name, value in one.example.columns.items()}
        for index in range(count):
            completion = completions[one.example.row, index]
            tokens = completion.token_ids.tolist()
            values = (
                one.example.row,
                one.example.prompt,
                one.prompt_ids.tolist(),
                tokens,
                [float(value) for value in completion.logprobs],
                decode(tokens),
                completion.stop_reason.value,
            )
            yield json_line(columns | dict(zip(WRITTEN, values, strict=True)))
