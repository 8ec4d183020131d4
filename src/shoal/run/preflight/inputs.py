"""Checks of a run's devices, tokenizer, chat template and data, before weights are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from shoal.config.schema import Config
from shoal.mesh import Roles
from shoal.model.tokenizer import Tokenizer
from shoal.report.findings import Findings
from shoal.run.parts import prepare_sets
from shoal.run.preflight.estimate import evaluation_completions
from shoal.run.preflight.reporter import Reporter
from shoal.run.preflight.reward import right_answer
from shoal.tasks.task import Task
from shoal.trainer.curriculum import Prepared, PromptStream
from shoal.types import Example, ShoalError

NUM_PROMPTS = 200
"""Prompts that are tokenised to find how long they are."""
NUM_ANSWERS = 50
"""Right answers that are tokenised."""


def check_devices(config: Config, roles: Roles, findings: Findings) -> None:
    report = Reporter(findings, "devices")
    used, count, device = roles.trainer.mesh.size, jax.device_count(), jax.devices()[0]
    report.ok(f"{used} of {count} x {device.device_kind} ({device.platform}), JAX {jax.__version__}")
    if used < count:
        report.warning(unused_devices(used, count))
    if device.platform == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        for file, extra in (("/dev/nvidia0", "cuda"), ("/dev/accel0", "tpu"), ("/dev/vfio/0", "tpu")):
            if Path(file).exists():
                report.warning(f"JAX runs on the CPU, though this machine has {file}: install 'shoal[{extra}]'")
                break
    if device.platform == "cpu" and config.model.dtype == "bfloat16":
        report.warning("model.dtype=bfloat16 is slower than float32 on a CPU: set it to auto")
    if config.batch.prompts_per_step < roles.trainer.row_shards:
        report.warning(f"batch.prompts_per_step={config.batch.prompts_per_step} leaves some of "
                       f"{roles.trainer.row_shards} parts of the mesh without a prompt: raise it")


def unused_devices(used: int, count: int) -> str:
    return f"{used} of {count} devices are used: mesh.fsdp=-1 takes them all"


def check_tokenizer(tokenizer: Tokenizer, findings: Findings) -> None:
    report, before = Reporter(findings, "tokenizer"), len(findings.found)
    if not tokenizer.eos_ids:
        report.wrong("the model has no end-of-sequence token: every completion would run to "
                     "sampling.max_completion_tokens; put eos_token_id into its generation_config.json", "model.path")
    for note in tokenizer.notes:
        if "no end-of-sequence" not in note:
            report.warning(note, "model.template" if "template" in note else "model.path")
    if len(findings.found) == before:
        ends = " or ".join(tokenizer.token_text(id) for id in tokenizer.eos_ids)
        report.ok(f"{tokenizer.vocab_size} tokens, ends with {ends}")


def check_template(tokenizer: Tokenizer, examples: Sequence[Example], findings: Findings) -> bool:
    """Reports faults of the chat template in prompts; False if the template raises an error."""
    report, before = Reporter(findings, "template", "model.template"), len(findings.found)
    try:
        ids = [tokenizer.encode_prompt(example.prompt).tolist() for example in examples]
    except ShoalError as error:
        report.wrong(f"{error} Give another with model.template")
        return False
    first, prompt = ids[0], examples[0].prompt
    text = tokenizer.decode(first, skip_special_tokens=False)
    question = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    if " ".join(question.split()) not in " ".join(text.split()):
        report.wrong(f"the prompt as the model reads it does not hold the question {question[:60]!r}: the template "
                     "leaves it out; give another with model.template", "model.template")
    if len(ids) > 1 and all(other == first for other in ids) and any(e.prompt != prompt for e in examples):
        report.wrong("different questions become the same prompt: give another template with model.template")
    inside = tokenizer.encode_prompt(question).tolist()
    inside = inside[1:] if inside[:1] == [tokenizer.bos_id] else inside
    if not isinstance(prompt, str) and tokenizer.decode(inside) != tokenizer.decode(inside, skip_special_tokens=False):
        report.warning("the question holds special tokens itself, so a template stands within the template: give "
                       "plain text in the data (task.path), or a bare model.template")
    if first[-1:] and first[-1] in tokenizer.eos_ids:
        report.warning(f"the prompt ends with {tokenizer.token_text(first[-1])}, after which the model has nothing to "
                       "say: open the answer in the template (add_generation_prompt)")
    if tokenizer.bos_id is not None and first[:2] == [tokenizer.bos_id] * 2:
        report.warning(f"the prompt begins with {tokenizer.token_text(first[0])} twice: remove it from the template")
    if len(findings.found) == before:
        report.ok(f"the first prompt has {len(first)} tokens")
    return True


def check_data(config: Config, task: Task, tokenizer: Tokenizer, findings: Findings) -> Prepared | None:
    """Reports prompts and answers that exceed their limits; returns the run's first prompt, None without one."""
    report, s, first = Reporter(findings, "data", "task.path"), config.sampling, None
    for note in task.notes:
        report.warning(note, "task.path")
    rows = np.linspace(0, len(task.train) - 1, min(NUM_PROMPTS, len(task.train))).astype(int)
    lengths = np.array([len(tokenizer.encode_prompt(task.train[int(row)].prompt)) for row in rows])
    if too_long := int((lengths > s.max_prompt_tokens).sum()):
        (report.warning if too_long < len(lengths) else report.wrong)(
            f"{too_long} of {len(lengths)} prompts checked have more than "
            f"sampling.max_prompt_tokens={s.max_prompt_tokens} tokens (the longest {lengths.max()}): raise it")
    if too_long < len(lengths):
        stream = PromptStream(task.train, tokenizer.encode_prompt, config.seed, s.max_prompt_tokens, s.long_prompts)
        with report.errors():
            first = stream.peek(config.batch.prompts_per_step)
    _check_evaluations(config, task, tokenizer, report)
    if first is not None:
        _check_answers(config, task, tokenizer, report)
        if not findings.at("wrong"):
            epochs = config.steps * config.batch.prompts_per_step / len(task.train)
            sets = ", ".join(f"{number} {name}" for name, number in set_sizes(task).items())
            report.ok(f"{len(task.train)} prompts of {lengths.min()} to {lengths.max()} tokens, seen {epochs:.2g} "
                      f"times each; {sets}")
    return first


def set_sizes(task: Task) -> dict[str, int]:
    """Questions of each evaluation set."""
    return {name: len(questions) for name, questions in task.evaluations.items()}


def _check_evaluations(config: Config, task: Task, tokenizer: Tokenizer, report: Reporter) -> None:
    with report.errors():
        prepare_sets(task, tokenizer, config.sampling, report.warning)
    evaluated = evaluation_completions(config, set_sizes(task))
    trained = config.steps * config.batch.prompts_per_step * config.batch.group_size
    if config.steps and evaluated > 2 * trained:
        report.warning(f"evaluation samples {evaluated} completions, training {trained}: lower "
                       f"task.num_questions={config.task.num_questions} (0 is all) or "
                       f"train.pass_k={config.pass_k}")


def _check_answers(config: Config, task: Task, tokenizer: Tokenizer, report: Reporter) -> None:
    """Reports right answers in the data that the model cannot give: too long, or truncated by a stop string."""
    s, grave = config.sampling, report.warning if config.reward.functions else report.wrong
    known = [text for example in (task.train[row] for row in range(min(NUM_ANSWERS, len(task.train))))
             if (text := right_answer(example, "<reasoning> and <answer>")) is not None]
    if not known:
        return
    lengths = np.array([len(tokenizer.encode_prompt(text)) + 1 for text in known])  # and the end of the sequence
    if (share := float((lengths > s.max_completion_tokens).mean())) > 0.02:
        (grave if share > 0.5 else report.warning)(
            f"{100 * share:.0f}% of the data's own right answers take more than "
            f"sampling.max_completion_tokens={s.max_completion_tokens} tokens (up to {lengths.max()}): raise it")
    for stop in s.stop:
        cut = sum(stop in text and text.index(stop) + len(stop) < len(text.rstrip()) for text in known)
        if 2 * cut > len(known):
            grave(f"the stop string {stop!r} ends right answers before their end: remove it from sampling.stop",
                  "sampling.stop")
