"""A reward model, `reward=model:PATH`: a sequence classifier in Hugging Face format that scores
completions.

prompt, completions -> text and tokens by the classifier's own template -> rows, in which the tokens
that all sequences begin with stand once -> `forward` -> the head's value at each completion's last
token
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shoal.chat.tokenizer import Tokenizer
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import ModelSection
from shoal.config.sections.optimizer import BatchSection
from shoal.config.sections.sampling import SamplingSection
from shoal.mesh import Program, Role, make_roles
from shoal.model import families
from shoal.model.architecture import Architecture
from shoal.model.config_json import read_config
from shoal.model.head import logits
from shoal.model.transformer import Model
from shoal.records import Params, Prompt, ShoalError
from shoal.tasks.graders.answer import completion_text
from shoal.trainer.batch import (
    LearnerBatch,
    MicroBatch,
    row_shapes,
    split_into_micro_batches,
    unpack,
)
from shoal.trainer.loss import hidden_states
from shoal.trainer.step import PROGRAMS_KEPT, put_batch
from shoal.weights import huggingface
from shoal.weights.checksum import weights_text
from shoal.weights.hub import cached_folder, locate
from shoal.weights.source import PREFIX, check_positions, make_model


@dataclass(frozen=True)
class Classifier:
    """A sequence classifier, without its weights."""

    folder: Path
    architecture: Architecture
    tokenizer: Tokenizer
    pad_id: int | None  # the score is the value at the last token that is not this one

    @classmethod
    def read(cls, path: str, folder: Path) -> Classifier:
        """Reads the sizes and the tokenizer, but no weights, of the classifier in `folder`.
        ShoalError if it is no sequence classifier of a supported family, or has several labels, or
        if the tokenizer has more tokens than the model. `path`: its name in errors."""
        a, config = families.architecture_of(folder), read_config(folder)
        known = []
        for family in families.FAMILIES.values():
            # LlamaForCausalLM -> LlamaForSequenceClassification
            known.append(family.transformers_class.replace("CausalLM", "SequenceClassification"))
        named = config.get("architectures") or []
        if not set(named) & set(known):
            raise ShoalError(
                f"reward={PREFIX}{path}: its config.json names "
                f"{', '.join(named) or 'no architecture'}; expected a sequence classifier, "
                f"{' or '.join(known)}, with one label",
                "reward.functions",
            )
        # transformers writes the labels' names, and assumes two labels if config.json names none.
        num_labels = len(config.get("id2label") or ()) or config.get("num_labels", 2)
        if num_labels != 1:
            raise ShoalError(
                f"reward={PREFIX}{path}: it has {num_labels} labels, and none of them is the "
                "reward; expected a classifier with one (num_labels=1)",
                "reward.functions",
            )
        tokenizer = Tokenizer.load(folder)
        tokenizer.check_vocabulary(a.vocab_size)
        a = replace(a, value_head=True)
        return cls(folder, a, tokenizer, config.get("pad_token_id"))


class RewardModel:
    """A reward function that is a classifier on the reference's devices. It reads its weights when
    it first scores.

    >>> answers = [[{"role": "assistant", "content": text}] for text in ("4", "5")]
    >>> RewardModel("org/reward")([prompt] * 2, answers)
    [1.25, -0.5]
    """

    def __init__(self, path: str) -> None:
        """`path`: a folder or a name on the hub. If it is on this machine, its sizes and tokenizer
        are read now, so that a wrong one is refused: ShoalError."""
        self.path = path
        self.__name__ = Path(path).name
        # The run's date, which the chat template may write; None: the present date.
        self.date: datetime | None = None
        self._section = ModelSection()
        self._find_role = _default_role
        if cached_folder(path):
            self.classifier  # noqa: B018

    @cached_property
    def classifier(self) -> Classifier:
        """The classifier's sizes and tokenizer, read when first needed. ShoalError if the model is
        no classifier. Side effect: downloads a model from the hub, except its weights."""
        return Classifier.read(self.path, locate(self.path, weights=False))

    def prepare(
        self, section: ModelSection, sampling: SamplingSection, find_role: Callable[[], Role]
    ) -> None:
        """Sets the model settings and the devices that the reward model computes with; called
        before it scores. `find_role`: returns the role with the devices; it is called when weights
        are read, because devices are not known yet. ShoalError if completions may be longer than
        the classifier can read, or if its files, in a local folder, do not fit its sizes. Reads no
        weights."""
        self._section = section
        self._find_role = find_role
        c = self.classifier
        check_positions(c.architecture, sampling, f"reward={PREFIX}{self.path}")
        if Path(self.path).expanduser().is_dir():
            huggingface.open_tensors(c.folder, c.architecture)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The classifier's tokenizer; its chat template writes the run's date."""
        if self.date is None:
            return self.classifier.tokenizer
        return Tokenizer.load(self.classifier.folder, date=self.date)

    @cached_property
    def loaded(self) -> tuple[Model, Params]:
        """The model and its weights, read onto the devices when first needed. ShoalError in a run
        with several processes."""
        if jax.process_count() > 1:
            raise ShoalError(
                f"reward={PREFIX}{self.path}: reward models run in one process, and mesh.processes="
                f"{jax.process_count()}; leave one of the two out",
                "reward.functions",
            )
        a = self.classifier.architecture
        role = self._find_role()
        model = make_model(self._section, a, role)
        return model, huggingface.load(locate(self.path), a, role, model.dtype)

    def digest(self) -> str:
        """Returns a checksum of the weights as text. Reads them onto the devices if that has not
        happened yet."""
        return weights_text(self.loaded[1])

    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[Any], **kwargs: Any
    ) -> list[float]:
        """Returns the score of each completion: the classifier's value at the last token of its
        prompt and answer. Other columns (`kwargs`) are ignored. A completion is a text or a list of
        messages. Reads the weights at the first call. ShoalError if prompts are messages and the
        classifier has no chat template; ValueError if a sequence has no tokens, or more than the
        classifier can read. Completions of the same prompt that follow each other are scored
        together, so that their prompt is computed once."""
        scores: list[float] = []
        sequences: list[list[int]] = []  # of the present prompt
        last_prompt: Prompt | None = None
        for prompt, completion in zip(prompts, completions, strict=True):
            if sequences and prompt != last_prompt:
                scores += self._score(sequences)
                sequences = []
            last_prompt = prompt
            sequences.append(self._encode(prompt, completion_text(completion)))
        if sequences:
            scores += self._score(sequences)
        return scores

    def _encode(self, prompt: Prompt, text: str) -> list[int]:
        """Returns the tokens of a prompt with its answer, without padding at the end
        (`pad_token_id`): the head's value at the last one is the score. ShoalError if the prompt is
        messages and the classifier has no chat template; ValueError if there are no tokens, or more
        than the classifier has positions."""
        c = self.classifier
        if not (isinstance(prompt, str) or c.tokenizer.has_template):
            raise ShoalError(
                f"reward={PREFIX}{self.path} has no chat template, and prompts are messages: put "
                "the one that it was trained with into its folder, as chat_template.jinja",
                "reward.functions",
            )
        ids = self.tokenizer.encode_answered(prompt, text)
        while len(ids) > 1 and ids[-1] == c.pad_id:
            ids.pop()
        most = c.architecture.max_positions
        if not ids or 0 < most < len(ids):  # 0: the classifier names no limit
            raise ValueError(
                f"{len(ids):,} tokens: expected 1 to {most:,} (max_position_embeddings)"
            )
        return ids

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Returns the score of each sequence. The tokens that all of them begin with, usually the
        prompt, are computed once. `sequences`: token ids, at least one of each; scores are in their
        order."""
        model, parameters = self.loaded
        lengths = [len(ids) for ids in sequences]
        # The number of tokens that all sequences begin with. It leaves out the last token of the
        # shortest sequence, because the value there is its score.
        shared = 0
        while shared < min(lengths) - 1 and _have_equal_token(sequences, shared):
            shared += 1
        prompt = np.array(sequences[0][:shared], np.int32)
        ends = [np.array(ids[shared:], np.int32) for ids in sequences]
        end_lengths = {index: len(end) for index, end in enumerate(ends)}
        total = shared + sum(end_lengths.values())
        # Powers of two, so that groups of many lengths share few programs, and a group always uses
        # the same program.
        shapes = row_shapes(
            _round_up(max(lengths)),
            _round_up(total),
            BatchSection.micro_tokens,
            model.role.row_shards,
            context=model.role.context,
        )
        batches = []
        values = []
        # group -> (tokens of its prompt, completion -> tokens of it); there is one group, 0
        for shape, rows in split_into_micro_batches({0: (shared, end_lengths)}, shapes):
            batch = MicroBatch.empty(shape, 1.0)  # a temperature, which the head's values ignore
            for row, content in enumerate(rows):
                for _, members in content.parts:
                    # A key is (group, completion, index of its first token).
                    batch.add(row, prompt, {(0, index, 0): ends[index] for index in members})
            batches.append(batch)
            arrays = put_batch(model, batch.arrays)
            values.append(np.asarray(_program(model)(parameters, arrays)))
        # (group, completion) -> the value at each of its tokens; the last one is the score. There
        # is one group, 0.
        scores = unpack(batches, values)
        return [float(scores[0, index][-1]) for index in range(len(sequences))]


def _default_role() -> Role:
    return make_roles(MeshSection()).reference


def _have_equal_token(sequences: Sequence[Sequence[int]], position: int) -> bool:
    """True if all sequences have the same token at this position."""
    first = sequences[0][position]
    return all(ids[position] == first for ids in sequences)


def _round_up(count: int) -> int:
    """Returns the smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


@lru_cache(PROGRAMS_KEPT)
def _program(model: Model) -> Program:
    """Returns the compiled program that computes `_head_values` of a model; those of the last
    PROGRAMS_KEPT models are kept."""
    return model.role.jit(partial(_head_values, model), out_shardings=model.role.host_layout)


def _head_values(model: Model, parameters: Params, batch: LearnerBatch) -> jax.Array:
    """Returns the head's value at each token, float32[R, T]; compiled."""
    hidden, _, _ = hidden_states(model, parameters, batch)
    # [..., 0]: the only label
    return model.role.join_rows(logits(model, parameters, hidden)[..., 0])


def reward_models(functions: Iterable[Any]) -> list[RewardModel]:
    """Returns the `RewardModel` of each of `functions` (objects `RewardFunction`) that has one, in
    order."""
    models = []
    for function in functions:
        if isinstance(function.function, RewardModel):
            models.append(function.function)
    return models
