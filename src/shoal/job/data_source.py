"""Groups of the data's own answers, for supervised fine-tuning: the loop learns from them as from
samples.

row -> dialogue, or prompt and answer -> `Stream` of tokens with its loss mask -> group of one
completion
"""

from __future__ import annotations

from collections import defaultdict
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
        messages = dialogue_messages(example := task.train[row])
        first = next((at for at, one in enumerate(messages) if one["role"] == ASSISTANT), 0)
        return replace(example, prompt=messages[:first]) if first else example

    changed = task if config.evaluate_every >= 0 else replace(task, evaluations={})
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
            turns = [one for one in dialogue_messages(example) if one["role"] == ASSISTANT]
            answer = turns or answer_to_learn(example)
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
    held = [[value for key, value in turn.items() if key != "role"] for turn in answer]
    return any(
        not any(value.strip() if isinstance(value, str) else value for value in values)
        for values in held
    )


@dataclass
class DataSource:
    """A `RolloutSource` whose training groups are the data's answers; all else is the
    `sampler`'s."""

    sampler: RolloutSource
    tokenizer: Tokenizer
    config: Config
    asked: dict[int, list[GroupRequest]] = field(
        default_factory=lambda: defaultdict(list)
    )  # by step

    def __post_init__(self) -> None:
        own = self.sampler
        self.publish, self.publish_frozen, self.published = (
            own.publish,
            own.publish_frozen,
            own.published,
        )
        self.published_shapes, self.read_stats, self.close = (
            own.published_shapes,
            own.read_stats,
            own.close,
        )
        self.check_logprobs = own.check_logprobs

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
        return [
            self._group(one, stream)
            for one in self.asked.pop(step)
            for stream in streams(self.tokenizer, one.example)
        ]

    def _group(self, request: GroupRequest, stream: Stream) -> Group:
        """The group of one stream, cut at the longest completion as a sample is."""
        most = self.config.sampling.max_completion_tokens
        ids, mask = stream.token_ids[:most], stream.loss_mask[:most]
        if len(ids) < len(stream.token_ids):
            reason = StopReason.LENGTH
        else:
            reason = StopReason.EOS if int(ids[-1]) in self.tokenizer.eos_ids else StopReason.DATA
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
