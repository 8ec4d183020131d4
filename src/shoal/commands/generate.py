"""`shoal generate`: samples completions of the prompts in a file and writes them to another file,
one row for each completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.chat.tokenizer import Tokenizer
from shoal.checks.settings import check_model
from shoal.commands.responses import output_names
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
from shoal.tasks.data_files import read_file
from shoal.tasks.examples import UnknownRoles, example_of
from shoal.text import count
from shoal.trainer.prompts import TokenizedExample
from shoal.weights.sampler_copy import publish_to

WRITTEN = (
    "index",
    "prompt",
    "prompt_ids",
    "token_ids",
    "logprobs",
    "completion",
    "stop_reason",
)
"""Columns of the output besides those of the input."""


def generate(config: GenerateConfig, console: Console | None = None) -> dict[str, Any]:
    """Samples `num_generations` completions of each prompt in a file, and writes them to
    `config.output` as JSON lines, in the order of the prompts, completely or not at all. Returns
    {"completions": the number of lines, "output": the file}. Raises ShoalError before the first
    token is sampled if a key is missing, if the output exists already, or if the model or a row
    cannot be used. Nothing is written before all completions are sampled. A `console` that is given
    can be used afterwards; None: one for this command."""
    require_given(config, "prompts", "output")
    output = check_new_file(config.output, "output")
    check_model(config.model)
    with console or Console() as console, Job(config, console) as job:
        job.check()
        file = check_input(config.prompts, "prompts")
        examples = read_prompts(file)
        roles = UnknownRoles()
        for example in examples:
            roles.add(example)
        for note in roles.notes:
            console.warning(f"{file.name}: {note}")
        named = "" if config.model != ModelSection() else "; model=... names another"
        console.note(f"model: {model_text(config.model, job.model_source, job.model)}{named}")
        tokenizer = job.tokenizer
        size = config.num_generations
        prompts = encode_all(
            file.name, examples, job.encode, config.sampling, console.warning, console.note
        )
        console.note(f"prompts: {encoding_text(prompts, tokenizer, bool(config.model.template))}")
        engine = job.engine_maker()(Purpose.GENERATE, size)
        # Version 0. delete_source: the weights as loaded are not needed besides the sampler's copy.
        engine.load(0, publish_to(job.model, job.load_weights(), delete_source=True))
        requests = []
        for prompt in prompts:
            row = prompt.example.row
            noise = NoiseKey(config.seed, Purpose.GENERATE.value, 0, row)  # 0: there are no steps
            params = config.sampling.params
            requests.append(
                SampleRequest(
                    id=row,
                    prompt_ids=prompt.prompt_ids,
                    num_completions=size,
                    noise_key=noise,
                    params=params,
                )
            )
        engine.submit(requests)
        lines = list(completion_rows(prompts, drain(engine), tokenizer.text, size))
        write_text(output, "".join(f"{line}\n" for line in lines))
        console.note(f"wrote {count(len(lines), 'completion')} to {output}")
    return {"completions": len(lines), "output": str(output)}


def read_prompts(path: Path) -> list[Example]:
    """Reads an example from every row of a file, in order: its `prompt` (text or messages) or its
    `messages`. Rows are numbered from 0. ShoalError for the first row that has neither, and for a
    file without rows."""
    examples = []
    for row_index, (line, row) in enumerate(read_file(path)):
        examples.append(example_of(row_index, line, row))
    if not examples:
        raise ShoalError(
            f'{path} holds no prompt: write one JSON object per line, {{"prompt": ...}}'
        )
    return examples


def encoding_text(
    prompts: Sequence[TokenizedExample], tokenizer: Tokenizer, template_given: bool
) -> str:
    """Returns how prompts are encoded: `2 of messages, through the model's chat template; 3 of
    text, unchanged, without a chat template`; a kind without a prompt is left out.
    `template_given`: True if the key model.template chooses the template."""
    num_texts = sum(isinstance(prompt.example.prompt, str) for prompt in prompts)
    num_messages = len(prompts) - num_texts
    if not tokenizer.has_template:
        how = "as plain `User: ...` lines, because there is no chat template"
    elif template_given:
        how = "through model.template"
    else:
        how = "through the model's chat template"
    parts = []
    if num_messages:
        parts.append(f"{num_messages:,} of messages, {how}")
    if num_texts:
        parts.append(f"{num_texts:,} of text, unchanged, without a chat template")
    return "; ".join(parts)


def completion_rows(
    prompts: Sequence[TokenizedExample],
    completions: Mapping[tuple[int, int], Completion],
    decode: Callable[[Sequence[int]], str],
    count: int,
) -> Iterator[str]:
    """Yields a JSON line for each completion, in the order of the prompts, and of the indices of
    each, without a line break. A line has the prompt's own columns, then the fields WRITTEN, of
    which `index` is the prompt's row, from 0; a column with the name of such a field is renamed to
    `given_NAME`. `completions`: (row, index) -> completion, with every index below `count`;
    `decode`: ids -> text; `count`: the number of completions of each prompt."""
    column_names: set[str] = set()
    for prompt in prompts:
        column_names.update(prompt.example.columns)
    names = output_names(column_names, WRITTEN)
    for prompt in prompts:
        example = prompt.example
        columns = {names[name]: value for name, value in example.columns.items()}
        for index in range(count):
            completion = completions[example.row, index]
            tokens = completion.token_ids.tolist()
            written = {
                "index": example.row,
                "prompt": example.prompt,
                "prompt_ids": prompt.prompt_ids.tolist(),
                "token_ids": tokens,
                "logprobs": [float(value) for value in completion.logprobs],
                "completion": decode(tokens),
                "stop_reason": completion.stop_reason.value,
            }
            assert tuple(written) == WRITTEN
            yield json_line(columns | written)
