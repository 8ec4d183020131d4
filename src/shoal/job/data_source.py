"""Groups of the data's own answers, for supervised fine-tuning: the loop learns from them as from
samples.

row -> dialogue, or prompt and answer -> `Stream` of tokens with its loss mask -> group of one
completion
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shoal.chat.dialogue import ASSISTANT, Stream
from shoal.chat.tokenizer import Tokenizer
from shoal.checks.inputs import EXPECTED_COLUMNS, answer_to_learn, dialogue_messages, streams
from shoal.config.train import Config
from shoal.protocols import GroupRequest, RolloutSource
from shoal.records import Completion, Example, Group, Purpose, ShoalError, StopReason
from shoal.tasks.generated import MadeRows
from shoal.tasks.task import Task


def for_training(task: Task, config: Config) -> Task:
    """The task as a training run has it; prompts of answers that are learned end before the
    assistant's first turn."""

    def example_of(row: int) -> Example:
        example = task.train[row]
        messages = dialogue_messages(example)
        for position, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                return replace(example, prompt=messages[:position]) if position else example
        return example

    changed = task
    if config.evaluate_every < 0:
        changed = replace(task, evaluations={})
    if not config.algorithm.learns_from_data:
        return changed
    if not changed.evaluations:  # what notes say of them has no effect
        changed = replace(changed, notes=(), data=replace(task.data, held_out_files={}))
    notes = (*changed.notes, *_notes_of_answers(task))
    return replace(changed, notes=notes, train=MadeRows(example_of, len(task.train)))


def _notes_of_answers(task: Task) -> list[str]:
    """How many rows have an empty answer, which is learned as one; ShoalError for rows that have
    none at all."""
    if isinstance(task.train, MadeRows):  # a packaged task makes whole rows
        return []
    empty: list[str] = []
    lacking: list[str] = []
    for example in task.train:
        place = example.place or f"data row {example.row}"
        with suppress(ShoalError, ValueError):  # raised where the row is learned
            messages = dialogue_messages(example)
            answer = [message for message in messages if message["role"] == ASSISTANT]
            if not answer:
                answer = answer_to_learn(example)
            if answer is None:
                lacking.append(place)
            elif _is_empty(answer):
                empty.append(place)
    total = len(task.train)
    if lacking:
        raise ShoalError(
            f"task {task.name}: {len(lacking)} of {total} rows have nothing to learn, the first "
            f"{lacking[0]}: {EXPECTED_COLUMNS}; leave these rows out",
            "task.path",
        )
    if not empty:
        return []
    return [
        f"{task.name}: {len(empty)} of {total} rows have an empty answer, the first {empty[0]}: "
        "the model learns to say nothing; fill them in or leave these rows out"
    ]


def _is_empty(answer: Any) -> bool:
    """True for a text without a word, and for turns of which one holds nothing but its role."""
    if isinstance(answer, str):
        return not answer.strip()
    for turn in answer:
        has_content = False
        for key, value in turn.items():
            content = value.strip() if isinstance(value, str) else value
            if key != "role" and content:
                has_content = True
        if not has_content:
            return True
    return False


@dataclass
class DataSource:
    """A `RolloutSource` whose training groups are the data's answers; all else is the
    `sampler`'s."""

    sampler: RolloutSource
    tokenizer: Tokenizer
    config: Config
    requested: dict[int, list[GroupRequest]] = field(default_factory=dict)  # by step

    def __post_init__(self) -> None:
        sampler = self.sampler
        self.publish = sampler.publish
        self.publish_frozen = sampler.publish_frozen
        self.published = sampler.published
        self.published_shapes = sampler.published_shapes
        self.read_stats = sampler.read_stats
        self.close = sampler.close
        self.check_logprobs = sampler.check_logprobs

    def request(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            if request.purpose is Purpose.TRAIN:
                self.requested.setdefault(request.step, []).append(request)
            else:
                self.sampler.request([request])

    def is_ready(self, purpose: Purpose, step: int) -> bool:
        return purpose is Purpose.TRAIN or self.sampler.is_ready(purpose, step)

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        if purpose is not Purpose.TRAIN:
            return self.sampler.take(purpose, step)
        groups = []
        for request in self.requested.pop(step):
            for stream in streams(self.tokenizer, request.example):
                groups.append(self._group(request, stream))
        return groups

    def _group(self, request: GroupRequest, stream: Stream) -> Group:
        """The group of one stream, cut at the longest completion as a sample is."""
        most = self.config.sampling.max_completion_tokens
        ids = stream.token_ids[:most]
        mask = stream.loss_mask[:most]
        if len(ids) < len(stream.token_ids):
            reason = StopReason.LENGTH
        elif int(ids[-1]) in self.tokenizer.eos_ids:
            reason = StopReason.EOS
        else:
            reason = StopReason.DATA
        completion = Completion(
            request.step,
            0,
            ids,
            np.zeros(len(ids), np.float32),
            mask,
            np.full(len(ids), request.version, np.int32),
            reason,
        )
        return Group(
            request.purpose,
            request.step,
            request.version,
            request.example,
            stream.prompt_ids,
            (completion,),
            (self.tokenizer.decode(ids),),
            np.zeros(1),
            {},
            np.ones(1, bool),
        )
