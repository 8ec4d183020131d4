"""Makes the packaged model `tiny`: a tokenizer and a random model, trained on the worked solutions of `words`.

    python benchmarks/make_tiny.py FOLDER [--seed 0 --steps 3000 --batch 64 --lr 2e-3 --hidden-size 128 --layers 4
                                           --vocabulary 1024 --stop-at-accuracy 0.35]

Its steps use the `forward` and the batches of reinforcement learning; only the loss differs. It stops when that share
of held-out problems is solved greedily (measured every 100 updates; 0 for never).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shoal.config.schema import EvalConfig, ModelSection, RewardSection, SamplingSection, TaskSection
from shoal.files import check_new_folder
from shoal.mesh import Role
from shoal.model import hf
from shoal.model.architecture import Architecture
from shoal.model.parameters import initialise, param_specs
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformer import Model
from shoal.report.console import Console
from shoal.run.job import Job
from shoal.run.loading import ModelSpec
from shoal.tasks.words import train_problem
from shoal.trainer.batch import LearnerBatch, MicroBatch, Shape
from shoal.trainer.evaluation import Evaluator
from shoal.trainer.loss import batch_logprobs
from shoal.trainer.step import put_batch
from shoal.types import Params

END, PAD, SYSTEM, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

EVALUATE_EVERY = 100
"""Updates between evaluations."""


def make_tiny(options: argparse.Namespace) -> None:
    """Trains a tokenizer, then a random model by supervised steps, and writes both in Hugging Face format."""
    output, section, sampling = check_new_folder(options.folder, "FOLDER"), TaskSection(), SamplingSection()
    with Console() as console, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        corpus = (train_problem(row, section, "pretrain") for row in range(20_000))
        write_tokenizer(folder, (f"{one.question}\n{one.solution}" for one in corpus), options.vocabulary)
        tokenizer = Tokenizer.load(folder)
        architecture = tiny_architecture(options.hidden_size, options.layers, tokenizer.vocab_size)
        evaluation = EvalConfig(task=section, sampling=sampling, reward=RewardSection(workers=0), seed=options.seed,
                                model=ModelSection(dtype="float32"), batch=128, pass_k=0)
        job = stack.enter_context(Job(evaluation, console, spec=ModelSpec(folder, architecture)))
        source, evaluator = job.source, Evaluator(job.sets, sampling.params, 0, job.task)

        def batch_of(step: int) -> LearnerBatch:
            first = step * options.batch
            problems = [train_problem(row, section, "pretrain") for row in range(first, first + options.batch)]
            prompts = [tokenizer.encode_prompt([{"role": "user", "content": one.question}]) for one in problems]
            return supervised_batch(prompts, [np.append(tokenizer.encode_prompt(one.solution), tokenizer.eos_ids[0])
                                              for one in problems])

        def after(step: int, loss: Any, parameters: Params) -> bool:
            if step % EVALUATE_EVERY and step != options.steps:
                return False
            source.publish(step, parameters)
            figures, _ = evaluator.score(evaluator.answers(source, step, step, full=False))
            accuracy = next(iter(figures.values()))["accuracy"]
            console.note(f"step {step}/{options.steps}  loss {float(loss):.4f}  greedy accuracy {100 * accuracy:.1f}%")
            return 0 < options.stop_at_accuracy <= accuracy

        parameters = run_pretraining(architecture, job.roles.trainer, batch_of, steps=options.steps, lr=options.lr,
                                     seed=options.seed, after=after)
        hf.save(output, parameters, architecture, folder, np.float32)


def write_tokenizer(folder: Path, corpus: Iterable[str], vocabulary: int) -> None:
    """Trains a byte-level BPE tokenizer in which every digit is a token, and writes it with its chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # A number of several digits as one token hides its parts: sums of such tokens must be memorised.
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    specials = [PAD, END, SYSTEM, USER, ASSISTANT]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TAGS), special_tokens=specials, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD, "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False, "model_max_length": 1024,
    }
    ids = {"eos_token_id": tokenizer.token_to_id(END), "pad_token_id": tokenizer.token_to_id(PAD)}
    (folder / "generation_config.json").write_text(json.dumps(ids) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def tiny_architecture(hidden_size: int, layers: int, vocabulary: int) -> Architecture:
    """A Qwen3-shaped decoder: heads of size 32, two for each key/value head; the feed-forward is 3 x hidden_size."""
    heads = hidden_size // 32
    return Architecture(
        vocab_size=vocabulary, hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_layers=layers,
        num_heads=heads, num_kv_heads=max(1, heads // 2), head_dim=32, rope_theta=10000.0, tie_embeddings=True,
        qk_norm=True)


def supervised_batch(prompts: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> LearnerBatch:
    """A batch with one row for each pair of token ids; every target token weighs the same."""
    longest = max(len(prompt) + len(target) for prompt, target in zip(prompts, targets, strict=True))
    batch = MicroBatch.empty(Shape(len(prompts), -(-longest // 16) * 16), 1.0)
    for row, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
        batch.add(row, prompt, {(row, 0): target})
    for place in batch.positions.values():
        batch.arrays.loss_mask[place] = True
    batch.arrays.weight[:] = batch.arrays.loss_mask / batch.arrays.loss_mask.sum()
    return batch.arrays


def run_pretraining(
    architecture: Architecture,
    role: Role,
    batch_of: Callable[[int], LearnerBatch],
    *,
    steps: int,
    lr: float,
    seed: int,
    after: Callable[[int, float, Params], bool],
) -> Params:
    """Minimises the cross-entropy of `batch_of(step)`'s targets until `steps`, or until `after(step, loss, parameters)`
    returns True."""
    model = Model(architecture, role)
    warmup = min(100, max(1, steps // 10))
    rate = optax.warmup_cosine_decay_schedule(0.0, lr, warmup, max(steps, warmup + 1), lr / 10)
    weight_decay = jax.tree.map(lambda d: d.weight_decay, param_specs(architecture))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0),
                            optax.adamw(rate, 0.9, 0.95, weight_decay=0.1, mask=weight_decay))
    # The parameters are not donated: `after` may sample from them.
    update = model.role.jit(partial(_update, model, optimizer), donate_argnums=1)
    parameters = initialise(architecture, seed, role)
    moments = model.role.jit(optimizer.init)(parameters)
    for step in range(steps):
        parameters, moments, loss = update(parameters, moments, put_batch(model, batch_of(step)))
        if after(step + 1, loss, parameters):
            break
    return parameters


def _update(model: Model, optimizer: optax.GradientTransformation, parameters: Params, moments: Any,
            batch: LearnerBatch) -> tuple[Params, Any, jax.Array]:
    def loss(parameters: Params) -> jax.Array:
        lp, _ = batch_logprobs(model, parameters, batch)
        return -jnp.sum(batch.weight * lp)

    value, gradient = jax.value_and_grad(loss)(parameters)
    change, moments = optimizer.update(gradient, moments, parameters)
    return optax.apply_updates(parameters, change), moments, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    for name, value in (("seed", 0), ("steps", 3000), ("batch", 64), ("lr", 2e-3), ("hidden-size", 128), ("layers", 4),
                        ("vocabulary", 1024), ("stop-at-accuracy", 0.35)):
        parser.add_argument(f"--{name}", type=type(value), default=value)
    make_tiny(parser.parse_args())


if __name__ == "__main__":
    main()
