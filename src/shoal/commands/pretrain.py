"""`shoal pretrain`: trains the tiny model from random weights, on the worked solutions of `words`."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from shoal.commands.tiny_model import run_pretraining, supervised_batch, tiny_architecture, write_tokenizer
from shoal.config.schema import EvalConfig, ModelSection, PretrainConfig, RewardSection, SamplingSection
from shoal.config.text import require_given
from shoal.files import check_new_folder, writing
from shoal.model import hf
from shoal.model.tokenizer import Tokenizer
from shoal.report.console import Console
from shoal.run.job import Job
from shoal.run.loading import ModelSpec
from shoal.run.task import load_task
from shoal.tasks import words
from shoal.trainer.batch import LearnerBatch
from shoal.trainer.evaluation import Evaluator
from shoal.types import Params, ShoalError

EVALUATE_EVERY = 100
"""Updates between evaluations."""


def pretrain(config: PretrainConfig, console: Console | None = None) -> dict[str, Any]:
    """Trains a tokenizer, then a random model by supervised steps, and writes both in Hugging Face format."""
    require_given(config, "output")
    check_new_folder(config.output, "output")
    with console or Console() as console, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        task, sampling = load_task(config.task), SamplingSection()
        example = task.pretrain_example
        if example is None:
            raise ShoalError(f"task.name={config.task.name!r} has no worked solutions to train on: use words")
        write_tokenizer(folder, words.corpus(20_000), config.vocabulary)
        tokenizer = Tokenizer.load(folder)
        architecture = tiny_architecture(config.hidden_size, config.layers, tokenizer.vocab_size)
        evaluation = EvalConfig(task=config.task, sampling=sampling, reward=RewardSection(workers=0), seed=config.seed,
                                model=ModelSection(dtype="float32"), batch=128, pass_k=0)
        job = stack.enter_context(Job(evaluation, console, task=task, spec=ModelSpec(folder, architecture)))
        source, evaluator = job.source, Evaluator(job.sets, sampling.params, 0, task)

        def batch_of(step: int) -> LearnerBatch:
            rows = range(step * config.batch, (step + 1) * config.batch)
            pairs = [example(row) for row in rows]
            prompts = [tokenizer.encode_prompt(prompt) for prompt, _ in pairs]
            eos = tokenizer.eos_ids[0]
            return supervised_batch(prompts, [np.append(tokenizer.encode_prompt(text), eos) for _, text in pairs])

        def after(step: int, loss: Any, parameters: Params) -> bool:
            if step % EVALUATE_EVERY and step != config.steps:
                return False
            source.publish(step, parameters)
            figures, _ = evaluator.score(evaluator.answers(source, step, step, full=False))
            accuracy = next(iter(figures.values()))["accuracy"]
            console.note(f"step {step}/{config.steps}  loss {float(loss):.4f}  greedy accuracy {100 * accuracy:.1f}%")
            return 0 < config.stop_at_accuracy <= accuracy

        parameters = run_pretraining(architecture, job.roles.trainer, batch_of, steps=config.steps, lr=config.lr,
                                     seed=config.seed, after=after)
        with writing(config.output, "output"):
            hf.save(config.output, parameters, architecture, folder, np.float32)
    return {"output": config.output}
