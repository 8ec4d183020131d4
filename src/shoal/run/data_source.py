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
from shoal.types import (
    Completion,
    Example,
    Group,
    GroupRequest,
    Purpose,
    RolloutSource,
    RolloutStats,
    ShoalError,
    StopReason,
)

DROPPED = "dropped_rows"
"""The metric of rows that are left out, since their prompts exceed sampling.max_prompt_tokens."""


def with_first_turns(task: Task) -> Task:
    """The task whose training prompts end before the assistant's first message: all of its messages are learned."""
    train = task.train
    return replace(task, train=MadeRows(lambda row: _asked_first(train[row]), len(train)))


def _asked_first(example: Example) -> Example:
    messages = _dialogue(example)
    first = next((at for at, one in enumerate(messages) if one["role"] == ASSISTANT), 0)
    return replace(example, prompt=messages[:first]) if first else example


def _dialogue(example: Example) -> list[Any]:
    """The column `messages`, where the row has no prompt of its own; else nothing."""
    messages = example.columns.get("messages")
    found = checked_prompt(messages, example.place) if messages and "completion" not in example.columns else []
    return found if isinstance(found, list) else []


def streams(tokenizer: Tokenizer, example: Example, everything: bool = False) -> list[Stream]:
    """What is learned of a row: its `messages`, its `completion` (text or messages), or its worked solution, written as
    a completion; with the schemas of its `tools`. ShoalError, with the row's place, for one without any of them."""
    columns, prompt = example.columns, example.prompt
    try:
        tools = columns.get("tools")
        tools = without_none(loads(tools) if isinstance(tools, str) and tools else tools)
        if messages := _dialogue(example):
            return streams_of(tokenizer, messages, tools, everything=everything)
        if (answer := columns.get("completion")) is None and (gold := gold_of(example)) is not None:
            answer = write_answer(example, gold, gold)
        if isinstance(prompt, str) and isinstance(answer, str):
            return [text_stream(tokenizer, prompt, answer, everything)]
        answers = [{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else \
            checked_prompt(answer, example.place) if answer else answer
        if isinstance(prompt, str) or not isinstance(answers, list):
            raise ShoalError("expected `messages`, `prompt` and `completion` (both text, or both messages), or a "
                             "column with a right answer")
        return streams_of(tokenizer, [*prompt, *answers], tools, first=len(prompt), everything=everything)
    except (ShoalError, ValueError) as error:
        raise ShoalError(f"{example.place or f'data row {example.row}'}: {error}", getattr(error, "key", "")) from error


@dataclass
class DataSource:
    """A `RolloutSource` whose training groups are the data's answers; all else is the `sampler`'s."""

    sampler: RolloutSource
    tokenizer: Tokenizer
    config: Config
    asked: dict[int, list[GroupRequest]] = field(default_factory=lambda: defaultdict(list))  # by step
    dropped: int = 0  # rows whose prompts are too long, since the figures were read

    def __post_init__(self) -> None:
        own = self.sampler
        self.publish, self.publish_frozen, self.published = own.publish, own.publish_frozen, own.published
        self.published_shapes, self.close = own.published_shapes, own.close

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
        a, limit = self.config.algorithm, self.config.sampling.max_prompt_tokens
        found = [(one, stream) for one in self.asked.pop(step)
                 for stream in streams(self.tokenizer, one.example, a.loss_on == "all")]
        kept = [self._group(*one) for one in found if len(one[1].prompt_ids) <= limit]
        self.dropped += len(found) - len(kept)
        if not kept:
            raise ShoalError(f"no row of step {step + 1} has a prompt of at most {limit} tokens (its tools included): "
                             f"raise sampling.max_prompt_tokens to {max(len(one.prompt_ids) for _, one in found)}",
                             "sampling.max_prompt_tokens")
        return kept

    def read_stats(self, purpose: Purpose) -> RolloutStats:
        stats = self.sampler.read_stats(purpose)
        if purpose is Purpose.TRAIN and self.dropped:
            stats.logged[DROPPED], self.dropped = [float(self.dropped)], 0
        return stats

    def _group(self, request: GroupRequest, stream: Stream) -> Group:
        """The group of one stream, cut at the longest completion as a sample is."""
        most = self.config.sampling.max_completion_tokens
        ids, mask = stream.token_ids[:most], stream.loss_mask[:most]
        reason = StopReason.LENGTH if len(stream.token_ids) > most else StopReason.EOS
        completion = Completion(request.step, 0, ids, np.zeros(len(ids), np.float32), mask,
                                np.full(len(ids), request.version, np.int32), reason)
        return Group(request.purpose, request.step, request.version, request.example, stream.prompt_ids, (completion,),
                     (self.tokenizer.decode(ids),), np.zeros(1), {}, np.ones(1, bool))
