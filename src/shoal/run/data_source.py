"""Groups of the data's own answers, for supervised fine-tuning: the loop learns from them as from samples.

    row -> dialogue, or prompt and answer -> `Stream` of tokens with its loss mask -> group of one completion
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from json import loads
from typing import Any

import numpy as np

from shoal.config.schema import Config
from shoal.model.dialogue import ASSISTANT, Stream, streams_of, text_stream
from shoal.model.tokenizer import Tokenizer
from shoal.run.preflight.reward import gold_of, write_answer
from shoal.tasks.generated import MadeRows
from shoal.tasks.rows import checked_prompt, without_none
from shoal.tasks.task import Task
from shoal.types import Completion, Example, Group, GroupRequest, Purpose, RolloutSource, ShoalError, StopReason


def with_first_turns(task: Task) -> Task:
    """The task whose training prompts end before the assistant's first message: all of its messages are learned."""

    def example_of(row: int) -> Example:
        messages = _dialogue(example := task.train[row])
        first = next((at for at, one in enumerate(messages) if one["role"] == ASSISTANT), 0)
        return replace(example, prompt=messages[:first]) if first else example

    changed = replace(task, train=MadeRows(example_of, len(task.train)))
    # Where nothing is evaluated, nothing is held out, and what the notes say of it has no effect.
    return changed if task.evaluations else replace(changed, notes=(), data=replace(task.data, held_out_files={}))


def _dialogue(example: Example) -> Any:
    """The column `messages`, where that is what is learned; else nothing."""
    return checked_prompt(messages, example.place) if (messages := example.columns.get("messages")) and \
        "completion" not in example.columns else []


def streams(tokenizer: Tokenizer, example: Example) -> list[Stream]:
    """What is learned of a row: its `messages`, its `completion` (text or messages), or its worked solution, written as
    a completion; with the schemas of its `tools`. ShoalError, with the row's place, for one without any of them."""
    columns, prompt = example.columns, example.prompt
    try:
        tools = columns.get("tools")
        tools = without_none(loads(tools) if isinstance(tools, str) and tools else tools)
        if messages := _dialogue(example):
            return streams_of(tokenizer, messages, tools)
        if (answer := columns.get("completion")) is None and (gold := gold_of(example)) is not None:
            answer = write_answer(example, gold, gold)
        if isinstance(prompt, str) and isinstance(answer, str):
            return [text_stream(tokenizer, prompt, answer)]
        if isinstance(prompt, str) or not answer:
            raise ShoalError("expected `messages`, `prompt` and `completion` (both text, or both messages), or a "
                             "column with a right answer")
        answers: Any = checked_prompt([{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else answer,
                                      example.place)
        return streams_of(tokenizer, [*prompt, *answers], tools, len(prompt))
    except (ShoalError, ValueError) as error:
        raise ShoalError(f"{example.place or f'data row {example.row}'}: {error}", getattr(error, "key", "")) from error


@dataclass
class DataSource:
    """A `RolloutSource` whose training groups are the data's answers; all else is the `sampler`'s."""

    sampler: RolloutSource
    tokenizer: Tokenizer
    config: Config
    asked: dict[int, list[GroupRequest]] = field(default_factory=lambda: defaultdict(list))  # by step

    def __post_init__(self) -> None:
        own = self.sampler
        self.publish, self.publish_frozen, self.published = own.publish, own.publish_frozen, own.published
        self.published_shapes, self.read_stats, self.close = own.published_shapes, own.read_stats, own.close

    def request(self, requests: Sequence[GroupRequest]) -> None:
        for one in requests:
            if one.purpose is Purpose.TRAIN:
                self.asked[one.step].append(one)
            else:
                self.sampler.request([one])

    def is_ready(self, purpose: Purpose, step: int) -> bool:
        return purpose is Purpose.TRAIN or self.sampler.is_ready(purpose, step)

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        if purpose is not Purpose.TRAIN:
            return self.sampler.take(purpose, step)
        return [self._group(one, stream) for one in self.asked.pop(step)
                for stream in streams(self.tokenizer, one.example)]

    def _group(self, request: GroupRequest, stream: Stream) -> Group:
        """The group of one stream, cut at the longest completion as a sample is."""
        s, example, length = self.config.sampling, request.example, len(stream.prompt_ids)
        if length > s.max_prompt_tokens:  # without its tools the prompt was found to fit
            raise ShoalError(f"{example.place or f'data row {example.row}'}: what comes before a turn to learn has "
                             f"{length} tokens, its tools included: raise sampling.max_prompt_tokens="
                             f"{s.max_prompt_tokens}", "sampling.max_prompt_tokens")
        ids, mask = (one[: s.max_completion_tokens] for one in (stream.token_ids, stream.loss_mask))
        reason = StopReason.LENGTH if len(ids) < len(stream.token_ids) else StopReason.EOS
        completion = Completion(request.step, 0, ids, np.zeros(len(ids), np.float32), mask,
                                np.full(len(ids), request.version, np.int32), reason)
        return Group(request.purpose, request.step, request.version, example, stream.prompt_ids, (completion,),
                     (self.tokenizer.decode(ids),), np.zeros(1), {}, np.ones(1, bool))
