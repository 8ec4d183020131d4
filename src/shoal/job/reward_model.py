"""A reward model, `reward=model:PATH`: a sequence classifier in Hugging Face format that scores
completions.

prompt, completions -> text and tokens by the classifier's own template -> rows, in which the tokens
that all begin with stand once -> `forward` -> the head's value at each completion's last token
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
from shoal.model.attention.selector import segment_attention
from shoal.model.head import logits
from shoal.model.parameters import classifier_specs
from shoal.model.transformer import Model, forward
from shoal.records import Params, Prompt, ShoalError
from shoal.tasks.graders.answer import completion_text
from shoal.trainer.batch import LearnerBatch, MicroBatch, in_batches, row_shapes, unpack
from shoal.trainer.step import PROGRAMS_KEPT, put_batch
from shoal.weights import huggingface
from shoal.weights.checksum import weights_text
from shoal.weights.hub import cached_folder, locate
from shoal.weights.source import PREFIX, check_positions, make_model


@dataclass(frozen=True)
class Classifier:
    """A sequence classifier without its weights."""

    folder: Path
    architecture: Architecture
    tokenizer: Tokenizer
    pad_id: int | None  # a sequence's score is that of its last other token

    @classmethod
    def read(cls, path: str, folder: Path) -> Classifier:
        """ShoalError for another kind of model, and for several labels."""
        a, config = families.architecture_of(folder), families.read_config(folder)
        known = [
            family.transformers_class.replace("CausalLM", "SequenceClassification")
            for family in families.FAMILIES.values()
        ]
        named = config.get("architectures") or []
        if not set(named) & set(known):
            raise ShoalError(
                f"reward={PREFIX}{path}: its config.json names "
                f"{', '.join(named) or 'no architecture'}; expected a sequence classifier, "
                f"{' or '.join(known)}, with one label",
                "reward.functions",
            )
        # transformers writes the labels' names, and has two labels where config.json names none.
        if (labels := len(config.get("id2label") or ()) or config.get("num_labels", 2)) != 1:
            raise ShoalError(
                f"reward={PREFIX}{path}: it has {labels} labels, and none of them is the reward; "
                "expected a classifier with one (num_labels=1)",
                "reward.functions",
            )
        tokenizer = Tokenizer.load(folder)
        tokenizer.check_vocabulary(a.vocab_size)
        return cls(folder, a, tokenizer, config.get("pad_token_id"))


class RewardModel:
    """A reward function that is a classifier on the reference's devices. Its weights are read when
    it first scores.

    >>> answers = [[{"role": "assistant", "content": text}] for text in ("4", "5")]
    >>> RewardModel("org/reward")([prompt] * 2, answers)
    [1.25, -0.5]
    """

    def __init__(self, path: str) -> None:
        self.path, self.__name__ = path, Path(path).name
        self.date: datetime | None = (
            None  # that its chat template writes, of the run; None for the present one
        )
        self._section, self._find_role = ModelSection(), lambda: make_roles(MeshSection()).reference
        if cached_folder(path):
            self.classifier  # noqa: B018

    @cached_property
    def classifier(self) -> Classifier:
        """ShoalError unless the model is one; of a model on the hub all but the weights is
        downloaded."""
        return Classifier.read(self.path, locate(self.path, weights=False))

    def prepare(
        self, section: ModelSection, sampling: SamplingSection, find_role: Callable[[], Role]
    ) -> None:
        """Says where and how it computes. ShoalError where completions may be longer than it
        reads."""
        self._section, self._find_role = section, find_role
        c = self.classifier
        check_positions(c.architecture, sampling, f"reward={PREFIX}{self.path}")
        if Path(self.path).expanduser().is_dir():
            huggingface.open_tensors(c.folder, c.architecture, classifier_specs(c.architecture))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The classifier's tokenizer, on the date of the run."""
        return (
            Tokenizer.load(self.classifier.folder, date=self.date)
            if self.date
            else self.classifier.tokenizer
        )

    @cached_property
    def loaded(self) -> tuple[Model, Params]:
        if jax.process_count() > 1:
            raise ShoalError(
                f"reward={PREFIX}{self.path}: reward models run in one process, and mesh.processes="
                f"{jax.process_count()}; leave one of the two out",
                "reward.functions",
            )
        a, role = self.classifier.architecture, self._find_role()
        model = make_model(self._section, a, role)
        return model, huggingface.load(
            locate(self.path), a, role, model.dtype, specs=classifier_specs(a)
        )

    def digest(self) -> str:
        """A checksum of the weights."""
        return weights_text(self.loaded[1])

    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[Any], **kwargs: Any
    ) -> list[float]:
        scores: list[float] = []
        pairs = zip(prompts, map(completion_text, completions), strict=True)
        for prompt, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
            scores += self._score([self._encode(prompt, text) for _, text in group])
        return scores

    def _encode(self, prompt: Prompt, text: str) -> list[int]:
        """The tokens up to the one whose score counts."""
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
        if not ids or 0 < most < len(ids):
            raise ValueError(
                f"{len(ids):,} tokens: expected 1 to {most:,} (max_position_embeddings)"
            )
        return ids

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Scores of sequences that begin alike."""
        model, parameters = self.loaded
        least = min(map(len, sequences)) - 1
        shared = next((at for at in range(least) if len({ids[at] for ids in sequences}) > 1), least)
        prompt = np.array(sequences[0][:shared], np.int32)
        ends = [np.array(ids[shared:], np.int32) for ids in sequences]
        longest, total = max(map(len, sequences)), shared + sum(map(len, ends))
        # Powers of two: groups of many lengths share few programs, and a group always has the same
        # one.
        shapes = row_shapes(
            _round_up(longest),
            _round_up(total),
            BatchSection.micro_tokens,
            model.role.row_shards,
            context=model.role.context,
        )
        batches, found = [], []
        for shape, rows in in_batches(
            {0: (shared, {i: len(ids) for i, ids in enumerate(ends)})}, shapes
        ):
            batch = MicroBatch.empty(shape, 1.0)
            for row, content in enumerate(rows):
                for _, members in content.parts:
                    batch.add(row, prompt, {(0, i, 0): ends[i] for i in members})
            batches.append(batch)
            found.append(np.asarray(_program(model)(parameters, put_batch(model, batch.arrays))))
        scores = unpack(batches, found)
        return [float(scores[0, i][-1]) for i in range(len(sequences))]


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()


@lru_cache(PROGRAMS_KEPT)
def _program(model: Model) -> Program:
    return model.role.jit(partial(_head_values, model), out_shardings=model.role.host_layout)


def _head_values(model: Model, parameters: Params, batch: LearnerBatch) -> jax.Array:
    """The head's value at each token, float32[R, T]."""
    role = model.role
    tokens, position, segment, prompt = map(
        role.split_rows, (batch.tokens, batch.position, batch.segment, batch.prompt)
    )
    hidden, _ = forward(
        model, parameters, tokens, position, segment_attention(model, segment, prompt)
    )
    return role.join_rows(logits(model, parameters, hidden)[..., 0])


def reward_models(functions: Iterable[Any]) -> list[RewardModel]:
    """The reward models among reward functions."""
    return [one.function for one in functions if isinstance(one.function, RewardModel)]
