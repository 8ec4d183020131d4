"""What can be told of a job without its weights: configuration, devices, tokenizer, data."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from shoal.config.keys import keys_of
from shoal.config.schema import Config
from shoal.mesh import Roles
from shoal.model.tokenizer import Tokenizer
from shoal.report.findings import Findings
from shoal.report.folder import is_run
from shoal.run.assembly import prepare_sets
from shoal.run.brief import num_updates, step_line
from shoal.run.learning import algorithm_warnings, check_trainable
from shoal.run.probe import right_answer
from shoal.tasks.task import Task
from shoal.trainer.curriculum import Prepared, PromptStream
from shoal.types import Example, ShoalError

HIGHEST_LR = 1e-2
HIGHEST_USUAL_LR = 2e-5
"""Above it a model of LARGE parameters or more is seldom trained well."""
LARGE = 100_000_000
NUM_LOOKED_AT = 200
"""Prompts that are tokenised to see how long they are."""
NUM_ANSWERS = 50


def key_in(text: str, default: str) -> str:
    """The first key that a text names, else `default`."""
    known = keys_of(Config)
    return next((word for word in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)*", text) if "." in word and word in known),
                default)


def evaluation_completions(config: Config, sets: dict[str, int]) -> int:
    """Completions that all evaluations of a run draw; `sets`: name -> questions, the main one first."""
    questions = sum(sets.values())
    main = next(iter(sets.values()), 0)
    every = config.train.evaluate_every
    between = max(0, -(-config.steps // every) - 1) if every else 0
    return 2 * (questions + main * config.pass_k) + between * questions


# ---- configuration


class Told:
    """Takes the place of a console for a check that only tells."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def note(self, text: str) -> None: ...

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def check_configuration(config: Config, findings: Findings) -> None:
    """What the settings allow and is a mistake all the same."""
    before, s = len(findings.found), config.sampling
    try:
        check_trainable(config)
    except ShoalError as error:
        findings.add("configuration", "wrong", str(error), key_in(str(error), "sampling.temperature"))
    for text in algorithm_warnings(config):
        findings.add("configuration", "warning", text, key_in(text, "algorithm.loss"))
    _check_learning_rate(config, findings)
    if config.steps == 0:
        findings.add("configuration", "warning", "steps=0: the run would only evaluate; set it to 1 or more", "steps")
    if 0 < s.temperature < 0.3 or s.temperature > 1.5:
        findings.add("configuration", "warning", f"sampling.temperature={s.temperature:g}: groups of "
                     f"{'nearly equal' if s.temperature < 1 else 'rambling'} completions teach little; 1.0 is usual",
                     "sampling.temperature")
    if config.reward.weights and not any(config.reward.weights):
        findings.add("configuration", "wrong", "reward.weights are all 0, so is every reward: set one above 0",
                     "reward.weights")
    if config.algorithm.kl_coef >= 1:
        findings.add("configuration", "warning", f"algorithm.kl_coef={config.algorithm.kl_coef:g} holds the model "
                     "where it is: 0 to 0.1 is usual", "algorithm.kl_coef")
    _check_place(config, findings)
    if len(findings.found) == before:
        findings.add("configuration", "ok", step_line(config))


def _check_learning_rate(config: Config, findings: Findings) -> None:
    o, updates = config.optimizer, num_updates(config)
    if o.lr == 0:
        findings.add("configuration", "wrong", "optimizer.lr=0: nothing would be learnt; 1e-6 for a large model, 5e-5 "
                     "for a tiny one", "optimizer.lr")
    elif o.lr > HIGHEST_LR:
        findings.add("configuration", "wrong", f"optimizer.lr={o.lr:g} would destroy the model in a few updates: 1e-6 "
                     "for a large model, 5e-5 for a tiny one", "optimizer.lr")
    if o.warmup_steps >= updates > 0 and o.lr > 0:
        findings.add("configuration", "warning", f"optimizer.warmup_steps={o.warmup_steps}: the learning rate only "
                     f"begins to rise in a run of {updates} updates; lower it", "optimizer.warmup_steps")


def check_size(config: Config, parameters: int, findings: Findings) -> None:
    """What depends on the model's size."""
    if parameters >= LARGE and HIGHEST_USUAL_LR < config.optimizer.lr <= HIGHEST_LR:
        findings.add("configuration", "warning", f"optimizer.lr={config.optimizer.lr:g} is high for "
                     f"{parameters / 1e9:.1f}B parameters: 1e-6 to 1e-5 is usual", "optimizer.lr")


def _check_place(config: Config, findings: Findings) -> None:
    """Whether the run folder can be made."""
    base = Path(config.base_output_directory).expanduser()
    place = base / config.run_name if config.run_name else base
    above = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists())
    cure = "choose another base_output_directory"
    if config.resume:
        return
    if not above.is_dir():
        findings.add("configuration", "wrong", f"{place} cannot be made, {above} is a file: {cure}",
                     "base_output_directory")
        return
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        findings.add("configuration", "wrong", f"nothing can be written in {above} ({error.strerror or error}): {cure}",
                     "base_output_directory")
    if config.run_name and place.is_dir() and any(place.iterdir()):
        known = is_run(place)
        findings.add("configuration", "ok" if known else "wrong", f"{place} is a run already, `shoal train` would go "
                     "on with it" if known else f"{place} holds something that is no run: choose another run_name",
                     "run_name")


# ---- devices


def check_devices(config: Config, roles: Roles, findings: Findings) -> None:
    used, there = roles.trainer.mesh.size, jax.device_count()
    device = jax.devices()[0]
    findings.add("devices", "ok", f"{used} of {there} x {device.device_kind} ({device.platform}), "
                 f"JAX {jax.__version__}")
    if used < there:
        findings.add("devices", "warning", f"{used} of {there} devices are used: mesh.fsdp=-1 takes them all",
                     "mesh.fsdp")
    if device.platform == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        for file, extra in (("/dev/nvidia0", "cuda"), ("/dev/accel0", "tpu"), ("/dev/vfio/0", "tpu")):
            if Path(file).exists():
                findings.add("devices", "warning", f"JAX runs on the CPU, though {file} is here: install "
                             f"'shoal[{extra}]'")
                break
    if device.platform == "cpu" and config.model.dtype == "bfloat16":
        findings.add("devices", "warning", "model.dtype=bfloat16 is slower than float32 on a CPU: set it to auto",
                     "model.dtype")
    if config.batch.prompts_per_step < roles.trainer.row_shards:
        findings.add("devices", "warning", f"batch.prompts_per_step={config.batch.prompts_per_step} leaves some of "
                     f"{roles.trainer.row_shards} parts of the mesh without a prompt: raise it",
                     "batch.prompts_per_step")


# ---- tokenizer and template


def check_tokenizer(config: Config, tokenizer: Tokenizer, findings: Findings) -> None:
    before = len(findings.found)
    if not tokenizer.eos_ids:
        findings.add("tokenizer", "wrong", "the model has no end-of-sequence token: every completion would run to "
                     "sampling.max_completion_tokens; put eos_token_id into its generation_config.json", "model.path")
    for note in tokenizer.notes:
        if "no end-of-sequence" not in note:
            findings.add("tokenizer", "warning", note, "model.template" if "template" in note else "model.path")
    if len(findings.found) == before:
        findings.add("tokenizer", "ok", f"{tokenizer.vocab_size} tokens, ends with "
                     f"{' or '.join(tokenizer.token_text(id) for id in tokenizer.eos_ids)}")


def check_template(tokenizer: Tokenizer, examples: Sequence[Example], findings: Findings) -> bool:
    """Whether prompts become what the model should read; False where they do not become anything."""
    try:
        ids = [tokenizer.encode_prompt(example.prompt).tolist() for example in examples]
    except ShoalError as error:
        findings.add("template", "wrong", f"{error} Give another with model.template", "model.template")
        return False
    first, prompt = ids[0], examples[0].prompt
    text = tokenizer.decode(first, skip_special_tokens=False)
    asked = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    before = len(findings.found)
    if " ".join(asked.split()) not in " ".join(text.split()):
        findings.add("template", "wrong", f"the prompt as the model reads it does not hold the question "
                     f"{asked[:60]!r}: the template leaves it out; give another with model.template", "model.template")
    if len(ids) > 1 and all(other == first for other in ids) and any(e.prompt != prompt for e in examples):
        findings.add("template", "wrong", "different questions become the same prompt: give another template with "
                     "model.template", "model.template")
    inside = tokenizer.encode_prompt(asked).tolist()
    inside = inside[1:] if inside[:1] == [tokenizer.bos_id] else inside
    if not isinstance(prompt, str) and tokenizer.decode(inside) != tokenizer.decode(inside, skip_special_tokens=False):
        findings.add("template", "warning", "the question holds special tokens of its own, so a template stands within "
                     "the template: give plain text in the data (task.path), or a bare model.template", "task.path")
    if first[-1:] and first[-1] in tokenizer.eos_ids:
        findings.add("template", "warning", f"the prompt ends with {tokenizer.token_text(first[-1])}, after which the "
                     "model has nothing to say: open the answer in the template (add_generation_prompt)",
                     "model.template")
    if tokenizer.bos_id is not None and first[:2] == [tokenizer.bos_id] * 2:
        findings.add("template", "warning", f"the prompt begins with {tokenizer.token_text(first[0])} twice: take it "
                     "out of the template", "model.template")
    if len(findings.found) == before:
        findings.add("template", "ok", f"the first prompt has {len(first)} tokens")
    return True


# ---- data


def check_data(config: Config, task: Task, tokenizer: Tokenizer, findings: Findings) -> Prepared | None:
    """The first prompt of the run, where there is one."""
    for note in task.notes:
        findings.add("data", "warning", note, "task.path")
    before = len(findings.at("ok"))
    rows = np.linspace(0, len(task.train) - 1, min(NUM_LOOKED_AT, len(task.train))).astype(int)
    examples = [task.train[int(row)] for row in rows]
    lengths = np.array([len(tokenizer.encode_prompt(example.prompt)) for example in examples])
    s = config.sampling
    if too_long := int((lengths > s.max_prompt_tokens).sum()):
        findings.add("data", "warning" if too_long < len(lengths) else "wrong", f"{too_long} of {len(lengths)} prompts "
                     f"looked at have more than sampling.max_prompt_tokens={s.max_prompt_tokens} tokens (the longest "
                     f"{lengths.max()}): raise it", "sampling.max_prompt_tokens")
    stream = PromptStream(task.train, tokenizer.encode_prompt, config.seed, s.max_prompt_tokens, s.long_prompts)
    first = None
    if too_long < len(lengths):
        try:
            first = stream.peek(config.batch.prompts_per_step)
        except ShoalError as error:
            findings.add("data", "wrong", str(error), key_in(str(error), "task.path"))
    _check_evaluations(config, task, tokenizer, findings)
    if first is not None:
        _check_answers(config, task, tokenizer, findings)
    if first is not None and len(findings.at("ok")) == before and not findings.at("wrong"):
        epochs = config.steps * config.batch.prompts_per_step / len(task.train)
        findings.add("data", "ok", f"{len(task.train)} prompts of {lengths.min()} to {lengths.max()} tokens, seen "
                     f"{epochs:.2g} times each; " + ", ".join(f"{n} {name}" for name, n in counts(task).items()))
    return first


def counts(task: Task) -> dict[str, int]:
    return {name: len(questions) for name, questions in task.evaluations.items()}


def _check_evaluations(config: Config, task: Task, tokenizer: Tokenizer, findings: Findings) -> None:
    told = Told()
    try:
        prepare_sets(task, tokenizer, config.sampling, told)  # type: ignore[arg-type]
    except ShoalError as error:
        findings.add("data", "wrong", str(error), key_in(str(error), "task.path"))
    for text in told.warnings:
        findings.add("data", "warning", text, "sampling.max_prompt_tokens")
    asked = evaluation_completions(config, counts(task))
    trained = config.steps * config.batch.prompts_per_step * config.batch.group_size
    if config.steps and asked > 2 * trained:
        findings.add("data", "warning", f"evaluation draws {asked} completions, training {trained}: lower "
                     f"task.num_questions={config.task.num_questions} (0 is all) or train.pass_k={config.pass_k}",
                     "task.num_questions")


def _check_answers(config: Config, task: Task, tokenizer: Tokenizer, findings: Findings) -> None:
    """Whether the data's own right answers could be given: within the limit, and not cut by a stop string."""
    s, form, own = config.sampling, "<reasoning> and <answer>", not config.reward.functions
    known = [text for example in (task.train[row] for row in range(min(NUM_ANSWERS, len(task.train))))
             if (text := right_answer(example, form)) is not None]
    if not known:
        return
    lengths = np.array([len(tokenizer.encode_prompt(text)) + 1 for text in known])  # and the end of the sequence
    if (share := float((lengths > s.max_completion_tokens).mean())) > 0.02:
        findings.add("data", "wrong" if share > 0.5 and own else "warning", f"{100 * share:.0f}% of the data's own "
                     f"right answers take more than sampling.max_completion_tokens={s.max_completion_tokens} tokens "
                     f"(up to {lengths.max()}): raise it", "sampling.max_completion_tokens")
    for stop in s.stop:
        cut = sum(stop in text and text.index(stop) + len(stop) < len(text.rstrip()) for text in known)
        if 2 * cut > len(known):
            findings.add("data", "wrong" if own else "warning", f"the stop string {stop!r} ends right answers before "
                         f"their end: take it out of sampling.stop",
                         "sampling.stop")
