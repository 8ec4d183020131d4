"""Makes training groups of the data's own answers, for supervised fine-tuning: the loop learns from
them as it does from sampled completions.

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
from shoal.config.sections.task import TaskSection
from shoal.config.train import Config
from shoal.protocols import GroupRequest, RolloutSource
from shoal.records import Completion, Example, Group, Purpose, ShoalError, StopReason
from shoal.tasks.generated import LazyRows
from shoal.tasks.task import Task


def up_to_answer(example: Example) -> Example:
    """Returns an example whose prompt ends before the assistant's first turn; the example itself if
    it has no such turn, or begins with one."""
    messages = dialogue_messages(example)
    for position, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            return replace(example, prompt=messages[:position]) if position else example
    return example


def for_training(task: Task, config: Config) -> Task:
    """Returns the task as a training run uses it: if `evaluate_every` is negative, the evaluation
    sets are moved to `unused_evaluations`; if the data's answers are learned, prompts end before
    the assistant's first turn. In that case a note is added if rows have empty answers, and
    ShoalError is raised if rows have nothing to learn. If there are no evaluation sets then, the
    task's own notes and the held-out files of its report are dropped. ShoalError if the run
    evaluates, and `task.hold_out=false` leaves no rows to evaluate on."""

    def example_of(row: int) -> Example:
        return up_to_answer(task.train[row])

    changed = task
    if config.evaluate_every < 0:
        changed = replace(task, evaluations={}, unused_evaluations=task.evaluations)
    elif not (task.evaluations or config.task.hold_out):
        split = config.task.eval_split
        missing = ""
        if config.task.path and split != TaskSection.eval_split:
            missing = f"task.eval_split={split}: there is no such split at {config.task.path}; "
        raise ShoalError(
            f"{missing}task.hold_out=false leaves no rows to evaluate on, and "
            f"train.evaluate_every={config.evaluate_every} asks for evaluations: give rows for "
            "them (in Python held_out= or eval_dataset=, else task.eval_split=FILE), hold out a "
            "tenth by task.hold_out=true, or leave evaluations out by train.evaluate_every=-1",
            "task.hold_out",
        )
    if not config.algorithm.learns_from_data:
        return changed
    if not changed.evaluations:  # notes about evaluation sets would be wrong
        changed = replace(changed, notes=(), data=replace(task.data, held_out_files={}))
    notes = (*changed.notes, *_notes_of_answers(task))
    return replace(changed, notes=notes, train=LazyRows(example_of, len(task.train)))


def _notes_of_answers(task: Task) -> list[str]:
    """Returns a note that says how many rows have an empty answer, which the model learns as such;
    empty if none has. ShoalError if rows have no answer at all. Rows whose dialogue is malformed
    are left out here."""
    if isinstance(task.train, LazyRows):  # rows that a packaged task generates always have answers
        return []
    empty: list[str] = []
    lacking: list[str] = []
    for example in task.train:
        place = example.place or f"data row {example.row}"
        with suppress(ShoalError, ValueError):  # raised later, when the row is learned
            messages = dialogue_messages(example)
            answer = [message for message in messages if message["role"] == ASSISTANT]
            if not answer:
                # no turn of the assistant: the answer is a column, text or messages
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
    """True if an answer is a text of only white space, or turns among which at least one has
    nothing besides its role. `answer`: a text, or a list of messages."""
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
    """A `RolloutSource` that takes training groups from the data's answers. Requests of
    evaluations, and everything else, go to `sampler`."""

    sampler: RolloutSource
    tokenizer: Tokenizer
    config: Config
    requested: dict[int, list[GroupRequest]] = field(default_factory=dict)  # step -> its requests

    def __post_init__(self) -> None:
        """Makes `publish`, `publish_frozen`, `published`, `published_shapes`, `read_stats`,
        `check_logprobs` and `close` those of the sampler."""
        sampler = self.sampler
        self.publish = sampler.publish
        self.publish_frozen = sampler.publish_frozen
        self.published = sampler.published
        self.published_shapes = sampler.published_shapes
        self.read_stats = sampler.read_stats
        self.close = sampler.close
        self.check_logprobs = sampler.check_logprobs

    def request(self, requests: Sequence[GroupRequest]) -> None:
        """Keeps requests for training groups, by their step, until `take`, because they need no
        sampling; passes all others, of evaluations, to `sampler`."""
        for request in requests:
            if request.purpose is Purpose.TRAIN:
                self.requested.setdefault(request.step, []).append(request)
            else:
                self.sampler.request([request])

    def is_busy_with(self, purpose: Purpose, step: int) -> bool:
        """True while the sampler makes a step's groups in the background; never for training."""
        return purpose is not Purpose.TRAIN and self.sampler.is_busy_with(purpose, step)

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        """Returns the groups of a step, whose requests are then forgotten; those of training are
        made of the data's answers, without waiting, in the order of the requests, and a row may
        give several groups, one for each stream of tokens. KeyError if no training group of this
        step was requested; ShoalError if a row has nothing to learn. Groups of other purposes are
        those that the sampler returns."""
        if purpose is not Purpose.TRAIN:
            return self.sampler.take(purpose, step)
        groups = []
        for request in self.requested.pop(step):
            for stream in streams(self.tokenizer, request.example):
                groups.append(self._group(request, stream))
        return groups

    def _group(self, request: GroupRequest, stream: Stream) -> Group:
        """Makes a group whose single completion is the answer of the data that `stream` holds, cut
        at `sampling.max_completion_tokens` as sampling would cut it. Log-probs and the reward are
        0, and each token has the requested version. The stop reason is LENGTH if the answer was
        cut, else EOS if the last token ends a sequence, else DATA."""
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
            request_id=request.step,
            index=0,
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            loss_mask=mask,
            versions=np.full(len(ids), request.version, np.int32),
            stop_reason=reason,
        )
        return Group(
            purpose=request.purpose,
            step=request.step,
            version=request.version,
            example=request.example,
            prompt_ids=stream.prompt_ids,
            completions=(completion,),
            texts=(self.tokenizer.text(ids),),
            rewards=np.zeros(1),
            reward_components={},
            valid=np.ones(1, bool),
        )
