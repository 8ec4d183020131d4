"""Makes the parts of a run from the sections of its configuration: learner, updater, evaluation sets."""

from __future__ import annotations

from collections.abc import Callable

from shoal.config.schema import Config, SamplingSection
from shoal.mesh import Role
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformer import Model
from shoal.rollout.publication import place
from shoal.run.derived import longest_sequence, max_support, micro_batch_shapes, num_updates, schedule_of  # noqa: F401
from shoal.run.loading import ModelSpec
from shoal.tasks.task import Task
from shoal.text import count
from shoal.trainer.curriculum import PassRates, PromptStream, TokenizedExample, prepare
from shoal.trainer.loss import make_objective
from shoal.trainer.step import Learner, ModelScorer
from shoal.trainer.update import Updater
from shoal.types import Params, ShoalError


def make_learner(config: Config, model: Model) -> Learner:
    return Learner(model, make_objective(config.algorithm), config.optimizer, num_updates(config))


def open_reference(config: Config, spec: ModelSpec, model: Model, role: Role,
                   first: Params | None) -> ModelScorer | None:
    """The reference on its role's devices, in the type of the computation; None without a KL term, where it would hold
    a model's memory for nothing. `first`: the weights, if they have been read already."""
    if config.algorithm.kl_coef == 0:
        return None
    model = model.on(role)
    return ModelScorer(model, spec.load(role, model.dtype) if first is None else place(model, first))


def make_updater(config: Config, learner: Learner, reference: ModelScorer | None,
                 teacher: ModelScorer | None) -> Updater:
    a = config.algorithm
    return Updater(
        learner, a, config.batch, temperature=config.sampling.temperature, seed=config.seed, reference=reference,
        teacher=teacher, teacher_coef=config.teacher.coef, max_tokens=config.sampling.max_completion_tokens,
        longest=longest_sequence(config), max_support=max_support(config))


def open_prompts(config: Config, task: Task, tokenizer: Tokenizer) -> PromptStream:
    """The training prompts, tokenised as they are drawn. ShoalError where the first step lacks prompts."""
    s, count = config.sampling, config.batch.prompts_per_step
    prompts = PromptStream(task.train, tokenizer.encode_prompt, config.seed, s.max_prompt_tokens, s.long_prompts,
                           PassRates(config.train.retire_above))
    prompts.peek(count)
    if s.long_prompts == "error":  # a prompt of any step ends the run: raised before it begins
        prompts.check(count * config.steps)
    return prompts


def prepare_sets(task: Task, tokenizer: Tokenizer, sampling: SamplingSection,
                 warn: Callable[[str], None]) -> dict[str, list[TokenizedExample]]:
    """Each evaluation set's questions with their tokens. Those too long or refused are dropped with a warning;
    ShoalError where a set has no others."""
    sets = {}
    for subset, examples in task.evaluations.items():
        refused: list[str] = []
        prepared = [prepare(example, tokenizer.encode_prompt, sampling.max_prompt_tokens, sampling.long_prompts,
                            refused.append) for example in examples]
        sets[subset] = [entry for entry in prepared if entry is not None]
        if dropped := len(prepared) - len(sets[subset]) - len(refused):
            warn(f"{dropped} of {count(len(prepared), 'question')} of {subset} have more than "
                 f"sampling.max_prompt_tokens={sampling.max_prompt_tokens} tokens and are dropped")
        if refused and sets[subset]:
            warn(f"{len(refused)} of {count(len(prepared), 'question')} of {subset} are dropped; the last: "
                 f"{refused[-1]}")
        # An empty set would have no figures, and a run on it would end without saying what it reached.
        if not sets[subset]:
            raise ShoalError(refused[-1] if refused else f"no question of {subset} has at most "
                             f"{sampling.max_prompt_tokens} tokens: raise sampling.max_prompt_tokens",
                             "" if refused else "sampling.max_prompt_tokens")
    return sets
