"""Teachers of a run: what each says of a micro-batch, and which groups it teaches.

    Updater -> Teachers -> one Teacher by name: a model whose weights stay (`FixedTeacher`),
                           the policy as it is (`LiveTeacher`),
                           a server somewhere else (`ServedTeacher`)

A teacher may read another prompt than the policy (`teacher.hint`): its rows then have the same
completions, after prompts of its own (`MicroBatch.teacher_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from shoal.algorithm.divergence import add_rest
from shoal.config.sections.model import TeacherSection
from shoal.mesh import Role
from shoal.model.transformer import Model
from shoal.protocols import Scorer, SequenceScorer, TokenScores
from shoal.records import Example, Group, Params, ShoalError
from shoal.trainer.batch import (
    BatchLayout,
    Key,
    MicroBatch,
    TeacherStates,
    TeacherTop,
    TokenTerms,
    pack,
)
from shoal.trainer.prompts import Encode, prepare
from shoal.trainer.scorers import ModelScorer, TeacherDistributions


class Teacher(Protocol):
    """What every kind of teacher does. `parameters` are the policy's, as they are."""

    def score(self, parameters: Params, batch: MicroBatch) -> Any:
        """Returns the log-probs of the tokens of `batch.of_teacher()`, float32[R, T]."""
        ...

    def targets(self, parameters: Params, batch: MicroBatch) -> TeacherStates | TeacherTop:
        """Returns what the teacher says of each token of the policy's rows, on the trainer's
        devices."""
        ...


@dataclass(frozen=True)
class FixedTeacher:
    """A teacher whose weights do not change: a model of its own, or the policy at the start."""

    scorer: Scorer
    distributions: TeacherDistributions | None = None  # None: it only scores samples

    @classmethod
    def of(cls, section: TeacherSection, scorer: ModelScorer, student: Model) -> FixedTeacher:
        """Returns the teacher whose weights `scorer` has, by the settings of `teacher`. `student`:
        the model that is trained."""
        if not section.gives_distributions:
            return cls(scorer)
        return cls(scorer, TeacherDistributions.of(section, scorer, student))

    def score(self, parameters: Params, batch: MicroBatch) -> Any:
        return self.scorer.score(batch.of_teacher().arrays)

    def targets(self, parameters: Params, batch: MicroBatch) -> TeacherStates | TeacherTop:
        assert self.distributions is not None, "teacher.divergence is that of distributions"
        return self.distributions.targets(batch.of_teacher().arrays)


@dataclass(frozen=True)
class LiveTeacher:
    """The policy as its own teacher, with the weights that it has before each update."""

    section: TeacherSection
    student: Model

    def _now(self, parameters: Params) -> FixedTeacher:
        scorer = ModelScorer(self.student, parameters)
        return FixedTeacher.of(self.section, scorer, self.student)

    def score(self, parameters: Params, batch: MicroBatch) -> Any:
        return self._now(parameters).score(parameters, batch)

    def targets(self, parameters: Params, batch: MicroBatch) -> TeacherStates | TeacherTop:
        return self._now(parameters).targets(parameters, batch)


@dataclass(frozen=True)
class ServedTeacher:
    """A teacher whose weights are somewhere else, and which is asked for the log-probs of each
    completion after its prompt."""

    scorer: SequenceScorer
    top_k: int  # how many of the likeliest tokens it names in each place
    role: Role  # the trainer's

    def _ask(self, theirs: MicroBatch) -> dict[Key, TokenScores]:
        """Returns what the teacher says of the tokens of each completion's part."""
        sequences = [theirs.sequence(key) for key in theirs.positions]
        return dict(zip(theirs.positions, self.scorer.score(sequences), strict=True))

    def score(self, parameters: Params, batch: MicroBatch) -> Any:
        theirs = batch.of_teacher()
        logprobs = np.zeros(theirs.arrays.tokens.shape, np.float32)
        for key, scores in self._ask(theirs).items():
            logprobs[theirs.positions[key]] = scores.logprobs
        return logprobs

    def targets(self, parameters: Params, batch: MicroBatch) -> TeacherStates | TeacherTop:
        rows, length = batch.arrays.tokens.shape
        # Nothing reads the tokens that are named of prompts and padding, but they must differ.
        ids = np.tile(np.arange(self.top_k, dtype=np.int32), (rows, length, 1))
        logprobs = np.zeros((rows, length, self.top_k + 1), np.float32)
        for key, scores in self._ask(batch.of_teacher()).items():
            place = batch.positions[key]
            ids[place] = scores.top_ids
            logprobs[place] = add_rest(scores.top_logprobs)
        return self.role.put_rows(TeacherTop(ids, logprobs))


@dataclass(frozen=True)
class Teachers:
    """All teachers of a run. `by_name`: at least one; a single one has the name "". `prompt_of`: a
    row -> the token ids of the prompt that teachers read, int32[Tp]; None: the policy's."""

    section: TeacherSection
    by_name: Mapping[str, Teacher]
    prompt_of: Encode | None = None

    @classmethod
    def of(
        cls,
        section: TeacherSection,
        scorers: Mapping[str, ModelScorer],
        student: Model,
        prompt_of: Encode | None = None,
        servers: Mapping[str, SequenceScorer] | None = None,
    ) -> Teachers:
        """Makes the teachers by the settings of `teacher`. `scorers`: the weights of those that
        have weights of their own here, by name. `servers`: the teachers that are somewhere else, by
        name. `student`: the model that is trained."""
        by_name: dict[str, Teacher] = {}
        for name, scorer in scorers.items():
            by_name[name] = FixedTeacher.of(section, scorer, student)
        if section.is_live_policy:
            by_name[""] = LiveTeacher(section, student)
        for name, server in (servers or {}).items():
            top_k = num_likeliest(section, student.architecture.vocab_size)
            by_name[name] = ServedTeacher(server, top_k, student.role)
        return cls(section, by_name, prompt_of)

    def pack(
        self,
        groups: Sequence[Group],
        include: Iterable[int],
        terms: TokenTerms,
        layout: BatchLayout,
    ) -> list[MicroBatch]:
        """Packs the groups numbered in `include` as `batch.pack` does; each micro-batch has groups
        of one teacher, and its name."""
        members: dict[str, list[int]] = {name: [] for name in self.by_name}
        for number in include:
            members[teacher_of(groups[number].example, self.by_name)].append(number)
        # An update without groups has one micro-batch, too.
        taught = [name for name, numbers in members.items() if numbers] or list(members)[:1]
        batches = []
        for name in taught:
            numbers = members[name]
            prompts = self._prompts(groups, numbers)
            packed = pack(groups, numbers, terms, layout, teacher_prompts=prompts)
            batches += [replace(batch, teacher=name) for batch in packed]
        return batches

    def _prompts(
        self, groups: Sequence[Group], numbers: Sequence[int]
    ) -> dict[int, np.ndarray] | None:
        """Returns the teacher's prompt of each of these groups; None if it is the policy's.
        ShoalError if rows of an update have no room for it."""
        if self.prompt_of is None:
            return None
        prompts = {}
        for number in numbers:
            group = groups[number]
            prompts[number] = self.prompt_of(group.example)
            check_room(self.section, group.example, group.prompt_ids, prompts[number])
        return prompts

    def score(self, parameters: Params, batch: MicroBatch) -> Any:
        """Returns what the micro-batch's teacher does."""
        return self.by_name[batch.teacher].score(parameters, batch)

    def targets(self, parameters: Params, batch: MicroBatch) -> TeacherStates | TeacherTop:
        """Returns what the micro-batch's teacher does."""
        return self.by_name[batch.teacher].targets(parameters, batch)


def num_likeliest(section: TeacherSection, vocab_size: int) -> int:
    """Returns how many of the likeliest tokens a server names in each place: those of
    `teacher.divergence=topk`, of a vocabulary of `vocab_size` tokens; 0 with another divergence."""
    if not section.gives_distributions:
        return 0
    return min(section.top_k, vocab_size)


def teacher_of(example: Example, names: Iterable[str]) -> str:
    """Returns the name of a row's teacher: "" if there is one teacher alone, else what the row's
    column `teacher` says, which must be one of `names` (ShoalError)."""
    known = list(names)
    if known == [""]:
        return ""
    name = example.columns.get("teacher")
    if name in known:
        return str(name)
    place = example.place or f"row {example.row}"
    said = "has no column `teacher`" if name is None else f"has teacher={name!r}"
    raise ShoalError(
        f"{place} {said}: with several teachers expected one of {', '.join(known)}",
        "teacher.path",
    )


def check_room(
    section: TeacherSection, example: Example, prompt: np.ndarray, theirs: np.ndarray
) -> None:
    """Raises ShoalError if the teacher's prompt of a row, `theirs`, is longer than the policy's by
    more than `teacher.hint_tokens`."""
    added = len(theirs) - len(prompt)
    if added > section.room:
        raise ShoalError(
            f"{example.place or f'row {example.row}'}: teacher.hint makes its prompt longer by "
            f"{added} tokens, and teacher.hint_tokens is {section.hint_tokens}: raise it",
            "teacher.hint_tokens",
        )


def check_rows(
    section: TeacherSection,
    examples: Sequence[Example],
    encode: Encode,
    encode_with_hint: Encode | None,
    max_tokens: int,
    most_rows: int,
) -> None:
    """Raises ShoalError if a row names no teacher although there are several, or if the hint cannot
    be put into its prompt or makes that too long. Of more than `most_rows` examples a part is
    checked, spread over all. `encode` and `encode_with_hint`: a row -> the token ids of the prompt
    that the policy reads, and that teachers read (None: the same). Prompts that are dropped, of
    more than `max_tokens` tokens, need no room."""
    spread = max(1, len(examples) // most_rows)
    for number in range(0, len(examples), spread):
        example = examples[number]
        teacher_of(example, section.names)
        if encode_with_hint is None:
            continue
        theirs = encode_with_hint(example)
        prompt = prepare(example, encode, max_tokens, "drop", lambda _: None)
        if prompt is not None:
            check_room(section, example, prompt.prompt_ids, theirs)
