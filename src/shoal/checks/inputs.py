"""Checks a run's devices, tokenizer, chat template and data, before weights are read."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from json import loads
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shoal.chat.dialogue import ASSISTANT, Stream, streams_of, text_stream, unwritten
from shoal.chat.tokenizer import Tokenizer
from shoal.checks.reward import FORMS, gold_of, worked_solution, write_answer
from shoal.config.derived import evaluation_completions
from shoal.config.sections.devices import MeshSection
from shoal.config.train import Config
from shoal.findings import Finding, Findings
from shoal.mesh import Roles, uses_pathways
from shoal.records import Example, Messages, ShoalError
from shoal.tasks.examples import checked_prompt, without_none
from shoal.tasks.task import Task
from shoal.text import count
from shoal.trainer.prompts import Encode, PassRates, PromptStream, TokenizedExample, prepare

NUM_PROMPTS = 200
"""Most training prompts that are tokenised to learn how long prompts are."""


NUM_ANSWERS = 50
"""Most right answers that are tokenised."""


NUM_RENDERED = 8
"""Prompts that are rendered and compared with each other."""


ACCELERATORS = {"/dev/nvidia0": "cuda", "/dev/accel0": "tpu", "/dev/vfio/0": "tpu"}
"""A device file of an accelerator -> the extra of this package that installs JAX for it."""


def check_devices(config: Config, roles: Roles, findings: Findings) -> None:
    """Adds findings about the devices: an `ok` with a text that says what each role uses
    (`devices_text`), and warnings if devices are idle, if mesh.pathways has no proxy, or if JAX
    runs on the CPU of a machine that has an accelerator and JAX_PLATFORMS is not set."""
    check = findings.of("devices")
    check.ok(devices_text(config, roles))
    check_idle(config.mesh, roles, jax.device_count(), findings)
    if config.mesh.pathways and not uses_pathways(config.mesh):
        check.warning(
            "mesh.pathways=true: JAX_BACKEND_TARGET names no proxy of Pathways, so the devices of "
            "this machine are used",
            "mesh.pathways",
        )
    if jax.devices()[0].platform == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        for file, extra in ACCELERATORS.items():
            if Path(file).exists():
                check.warning(
                    f"JAX runs on the CPU, though this machine has {file}: install '.[{extra}]'"
                )
                break


def check_idle(mesh: MeshSection, roles: Roles, available: int, findings: Findings) -> None:
    """Adds a warning if some of the `available` devices have no role."""
    used = {device for role in roles.all for device in role.mesh.devices.flat}
    text = idle_text(mesh, len(used), available)
    if text:
        findings.of("devices").warning(text, "mesh.fsdp")


def idle_text(mesh: MeshSection, used: int, available: int) -> str:
    """Returns a warning that says how many of the `available` devices are used and which keys to
    raise; '' if all are used. One key is always named: with mesh.fsdp=-1 and no number for a role,
    all devices are used."""
    if used >= available:
        return ""
    keys = []
    if mesh.fsdp != -1:
        keys.append("mesh.fsdp (-1 takes all of the trainer's)")
    for name in ("trainer", "sampler", "reference"):
        if getattr(mesh, name):
            keys.append(f"mesh.{name}")
    return f"{used} of {available} devices are used: raise {' or '.join(keys)}"


def devices_text(config: Config, roles: Roles) -> str:
    """Returns a text that says how many devices each role has, where the reference is, and what
    kind of devices they are: `4 for the trainer, 4 others for the sampler of 8 x TPU v5p (tpu), JAX
    0.7.2; reference on the sampler's devices`."""
    device = jax.devices()[0]
    sampler = roles.sampler.mesh
    where = ""
    if roles.disaggregated:
        where = f" for the trainer, {sampler.size} others for the sampler"
    split = ""
    if sampler.shape["tensor"] > 1:
        split = f", {sampler.shape['data']} samplers of {sampler.shape['tensor']}"
    return (
        f"{roles.trainer.mesh.size}{where} of {jax.device_count()} x {device.device_kind} "
        f"({device.platform}){split}, JAX {jax.__version__}; {reference_text(config, roles)}"
    )


def reference_text(config: Config, roles: Roles) -> str:
    """Returns a text like `reference on the sampler's devices`, also for a teacher, or one that
    says why there is none."""
    scorers = []
    if config.algorithm.scores_reference:
        scorers.append("reference")
    if config.teacher.exists and not config.teacher.address:
        scorers.append("teacher")
    if not scorers:
        return "no reference (algorithm.kl_coef=0)"
    trainer = set(roles.trainer.mesh.devices.flat)
    sampler = set(roles.sampler.mesh.devices.flat)
    reference = set(roles.reference.mesh.devices.flat)
    if trainer == sampler == reference:
        where = "all of these devices"
    elif reference == trainer:
        where = "the trainer's devices"
    elif reference == sampler:
        where = "the sampler's devices"
    else:
        whose = "its" if len(scorers) == 1 else "their"
        where = f"{count(len(reference), 'device')} of {whose} own"
    return f"{' and '.join(scorers)} on {where}"


def check_tokenizer(tokenizer: Tokenizer, notes: Sequence[Finding], findings: Findings) -> None:
    """Adds the notes that were made when the model and its tokenizer were opened to the findings;
    if there are none, a finding with the tokenizer's size and end-of-sequence tokens."""
    findings.extend(notes)
    if not notes:
        ends = " or ".join(tokenizer.token_text(id) for id in tokenizer.eos_ids)
        findings.of("tokenizer").ok(f"{tokenizer.vocab_size:,} tokens, ends with {ends}")


def check_prompts(
    config: Config,
    prompts_per_step: int,
    task: Task,
    tokenizer: Tokenizer,
    encode: Encode,
    findings: Findings,
    sets: Mapping[str, Sequence[TokenizedExample]],
) -> str:
    """Checks the training prompts and the data's right answers against the chat template and the
    limits of tokens, and adds findings. At most NUM_PROMPTS prompts are checked, spread over the
    data.

    prompts_per_step  for the number of completions of the run, with which evaluation's is compared
    encode            example -> the ids of its prompt
    sets              evaluation set -> its questions with their tokens

    Returns a text with the lengths of the prompts, in training and in `sets`: `61 to 204 tokens
    (gsm8k 58 to 190)`. ShoalError if the template refuses all prompts that are checked, or, with
    `sampling.long_prompts=error`, any of them."""
    size = len(task.train)
    limit = config.sampling.max_prompt_tokens
    refused: list[str] = []
    check = findings.of("data", "task.path")

    def readable(rows: Sequence[int]) -> list[TokenizedExample]:
        """Returns the prompts of these rows with their tokens, without those that the template
        refuses; the reasons of these are added to `refused`."""
        examples = []
        for row in rows:
            # No prompt is too long here: lengths are compared below. With "drop" a refusal is a
            # reason in `refused` and no error.
            example = prepare(task.train[row], encode, sys.maxsize, "drop", refused.append)
            if example is not None:
                examples.append(example)
        return examples

    rows = np.linspace(0, size - 1, min(NUM_PROMPTS, size)).astype(int).tolist()
    lengths = np.array([len(example.prompt_ids) for example in readable(rows)], int)
    if refused and (not lengths.size or config.sampling.long_prompts == "error"):
        raise ShoalError(
            f"{refused[0]}. Give another template with model.template", "model.template"
        )
    if refused:
        check.warning(
            f"{len(refused)} of {len(refused) + len(lengths)} prompts checked are dropped; the "
            f"first: {refused[0]}",
            "model.template",
        )
    rendered = readable(range(min(NUM_RENDERED, size)))
    if rendered:
        check_template(tokenizer, encode, [example.example for example in rendered], findings)
    check_template_writes(config, task, tokenizer, check)
    too_long = int((lengths > limit).sum())
    drops = config.sampling.long_prompts != "error"
    # What was asked for is no warning.
    is_noted = config.sampling.long_prompts == "drop" and too_long < len(lengths)
    if too_long and not is_noted:
        advice = f" and are dropped; {lengths.max()} keeps all of these" if drops else ": raise it"
        report = check.warning if too_long < len(lengths) else check.wrong
        report(
            f"{too_long} of {len(lengths)} prompts checked have more than "
            f"sampling.max_prompt_tokens={limit} tokens (the longest {lengths.max():,}){advice}",
            "sampling.max_prompt_tokens",
        )
    evaluated = evaluation_completions(config, set_sizes(task))
    trained = config.steps * prompts_per_step * config.batch.group_size
    num_eval_questions = config.task.num_eval_questions
    advice = ["set task.num_eval_questions to fewer (it is 0, all of them)"]
    if num_eval_questions:
        advice = [f"lower task.num_eval_questions={num_eval_questions}"]
    if not config.evaluation.is_greedy:
        advice.append(f"lower evaluation.samples={config.evaluation.samples}")
    elif config.pass_k:
        advice.append(f"lower train.pass_k={config.pass_k}")
    advice.append("turn evaluation off with train.evaluate_every=-1")
    if config.steps and evaluated > 2 * trained:
        check.warning(
            f"evaluation samples {evaluated:,} completions, training {trained:,}: "
            f"{', or '.join(advice)}",
            "task.num_eval_questions",
        )
    _check_answers(config, task, tokenizer, check)
    of_sets = []
    for name, questions in sets.items():
        of_set = [len(question.prompt_ids) for question in questions]
        of_sets.append(f"{name} {min(of_set)} to {max(of_set)}")
    text = "none"
    if lengths.size:
        text = f"{lengths.min()} to {lengths.max()} tokens"
    if too_long and is_noted:
        text += f", of which those above {limit} are dropped"
    if of_sets:
        text += f" ({', '.join(of_sets)})"
    return text


def check_template(
    tokenizer: Tokenizer, encode: Encode, examples: Sequence[Example], findings: Findings
) -> None:
    """Adds findings about faults of the chat template that the prompts of these examples show: the
    question is missing; different questions become one prompt; plain text bypasses the template, or
    the question has special tokens itself; the prompt ends with an end-of-sequence token, or begins
    with the beginning-of-sequence token twice. ShoalError if the template refuses one. If there are
    none, an `ok` finding says how many tokens the first prompt has. `examples`: one or more; most
    faults are looked for in the first alone."""
    check = findings.of("template", "model.template")
    before = len(findings.found)
    ids = [encode(example).tolist() for example in examples]
    first_ids = ids[0]
    prompt = examples[0].prompt
    text = tokenizer.decode(first_ids, skip_special_tokens=False)
    question = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    if " ".join(question.split()) not in " ".join(text.split()):
        check.wrong(
            f"the prompt as the model reads it does not hold the question {question[:60]!r}: the "
            "template leaves it out; give another with model.template",
            "model.template",
        )
    are_equal = len(ids) > 1 and all(other == first_ids for other in ids)
    if are_equal and any(example.prompt != prompt for example in examples):
        check.wrong(
            "different questions become the same prompt: give another template with model.template"
        )
    inside = tokenizer.encode_prompt(question).tolist()
    if inside[:1] == [tokenizer.bos_id]:
        inside = inside[1:]
    # If leaving out special tokens changes the text, the question has some.
    has_special = tokenizer.decode(inside) != tokenizer.decode(inside, skip_special_tokens=False)
    # A text that contains special tokens has been rendered already, so it is not warned of.
    if isinstance(prompt, str) and tokenizer.has_template and not has_special:
        check.warning(
            "the prompts are plain text and bypass this model's chat template: give messages, or "
            "make them with task.template='{COLUMN}'",
            "task.template",
        )
    if not isinstance(prompt, str) and has_special:
        check.warning(
            "the question holds special tokens itself, so one template is inside another: "
            "give plain text in the data (task.path), or a bare model.template",
            "task.path",
        )
    if first_ids[-1:] and first_ids[-1] in tokenizer.eos_ids:
        check.warning(
            f"the prompt ends with {tokenizer.token_text(first_ids[-1])}, after which the model "
            "has nothing to say: open the answer in the template (add_generation_prompt)"
        )
    if tokenizer.bos_id is not None and first_ids[:2] == [tokenizer.bos_id] * 2:
        check.warning(
            f"the prompt begins with {tokenizer.token_text(first_ids[0])} twice: remove it from "
            "the template"
        )
    if len(findings.found) == before:
        opened = ""
        if text.rstrip().endswith("<think>"):
            opened = " and opens a thought with <think>: thoughts count as completion tokens"
        check.ok(f"the first prompt has {len(first_ids)} tokens{opened}")


def check_template_writes(
    config: Config, task: Task, tokenizer: Tokenizer, check: Findings
) -> None:
    """Warns if messages of training rows have content or fields that the chat template leaves out,
    or if answers that are learned from the data do not end with an end-of-sequence token. Checks at
    most NUM_PROMPTS rows and NUM_ANSWERS answers, and skips texts, which no template writes."""
    learns = config.algorithm.learns_from_data
    num_rows = min(NUM_PROMPTS, len(task.train))
    rows = np.linspace(0, len(task.train) - 1, num_rows).astype(int).tolist()
    left_out: Counter[str] = Counter()
    checked = 0
    learned = 0
    unended = 0
    for row in rows:
        example = task.train[row]
        messages: Any = example.prompt
        tools = None
        if learns:
            # Skips rows of text, and rows that are refused later when they are learned.
            try:
                messages, tools, _ = dialogue_of(example)
            except (ShoalError, ValueError):
                continue
        if isinstance(messages, str):
            continue
        checked += 1
        with suppress(ShoalError):  # prompts that the template refuses are counted elsewhere
            left_out.update(unwritten(tokenizer, messages, tools))
        if learns and learned < NUM_ANSWERS:
            with suppress(ShoalError):
                is_ended = True
                for stream in streams(tokenizer, example):
                    is_ended = is_ended and int(stream.token_ids[-1]) in tokenizer.eos_ids
                learned += 1
                if not is_ended:
                    unended += 1
    for name, num_left_out in left_out.items():
        # `what role tool says` is a phrase; other names are those of fields.
        noun = name if " " in name else f"`{name}`"
        check.warning(
            f"{num_left_out} of {count(checked, 'row')} checked hold {noun}, which the chat "
            "template does not write: the model never reads it; give another template with "
            "model.template, or leave it out of the data",
            "model.template",
        )
    end = tokenizer.turn_end
    # If the end of a turn is a token but no end of sequence, the tokenizer's notes say so already.
    is_noted = end is not None and end.id is not None and not end.is_eos
    if unended and not is_noted:
        check.warning(
            f"{unended} of {count(learned, 'answer')} checked end without an end-of-sequence "
            "token, so the model does not learn to end them: give a template that writes one "
            "after the assistant's turn with model.template",
            "model.template",
        )


def set_sizes(task: Task) -> dict[str, int]:
    """Returns evaluation set -> number of its questions, in the order of the task."""
    return {name: len(questions) for name, questions in task.evaluations.items()}


def _check_answers(config: Config, task: Task, tokenizer: Tokenizer, check: Findings) -> None:
    """Adds findings about right answers in the data that the model cannot give, among the first
    NUM_ANSWERS rows: more than 2% are too long (a fault if more than half are), or a stop string
    cuts off more than half (a fault). With reward functions of the user there are only warnings.
    Adds nothing if the data has no right answers."""
    # Reward functions of the user may look for other answers, so this is then only a warning.
    report_grave = check.warning if config.reward.functions else check.wrong
    known = []
    lengths = []
    for row in range(min(NUM_ANSWERS, len(task.train))):
        example = task.train[row]
        gold = gold_of(example)
        if gold is not None:
            form = next(iter(FORMS))
            if config.reward.functions and not worked_solution(example, gold):
                # Whether the user's functions want tags is unknown, and the data has no reasoning.
                form = "bare"
            text = write_answer(example, gold, gold, form)
            known.append(text)
            lengths.append(len(tokenizer.encode_prompt(text)) + 1)  # one for the end of sequence
    if not known:
        return
    limit = config.sampling.max_completion_tokens
    num_too_long = sum(length > limit for length in lengths)
    share = num_too_long / len(known)
    if share > 0.02:
        report = report_grave if share > 0.5 else check.warning
        report(
            f"{100 * share:.0f}% of the data's own right answers take more than "
            f"sampling.max_completion_tokens={limit} tokens (up to {max(lengths):,}): raise it",
            "sampling.max_completion_tokens",
        )
    for stop in config.sampling.stop:
        num_cut = 0
        for text in known:
            # Something of the answer follows the stop string.
            if stop in text and text.index(stop) + len(stop) < len(text.rstrip()):
                num_cut += 1
        if 2 * num_cut > len(known):
            report_grave(
                f"the stop string {stop!r} ends right answers before their end: remove it from "
                "sampling.stop",
                "sampling.stop",
            )


def open_prompts(config: Config, prompts_per_step: int, task: Task, encode: Encode) -> PromptStream:
    """Returns the stream of training prompts, at its beginning. ShoalError if the data does not
    suffice for the first step, or, with `sampling.long_prompts=error`, if a prompt of any step is
    too long. Encodes the prompts of the first step; with `long_prompts=error` those of all
    steps."""
    long_prompts = config.sampling.long_prompts
    size_key = "batch.prompts_per_step"
    if config.batch.prompts_per_device:
        size_key = "batch.prompts_per_device"
    prompts = PromptStream(
        examples=task.train,
        encode=encode,
        seed=config.seed,
        max_tokens=config.sampling.max_prompt_tokens,
        long_prompts=long_prompts,
        rates=PassRates(config.train.retire_above),
        shuffles=config.train.shuffle,
        size_key=size_key,
    )
    prompts.peek(prompts_per_step)  # only for its errors
    if long_prompts == "error":
        prompts.check(prompts_per_step * config.steps)
    return prompts


EXPECTED_COLUMNS = (
    "expected `messages`, `prompt` and `completion` (both text, or both messages), or a column "
    "with a right answer"
)


def dialogue_messages(example: Example) -> Any:
    """Returns the messages of the column `messages`, from which a row is learned. [] if the row has
    none, or has a column `completion`, which is learned instead. ShoalError if they are no list of
    messages with role and content."""
    messages = example.columns.get("messages")
    if not messages or "completion" in example.columns:
        return []
    return checked_prompt(messages, example.place)


def streams(tokenizer: Tokenizer, example: Example) -> list[Stream]:
    """Returns the streams of tokens, with their loss masks, that a row is learned from: its
    `messages`, its `completion` (text or messages), or its worked solution, written as a
    completion. The schemas of its `tools` are written too. ShoalError, with the row's position in
    the data, if it has none of these or one that cannot be read."""
    try:
        prompt = example.prompt
        answer = answer_to_learn(example)
        if isinstance(prompt, str) and isinstance(answer, str) and not dialogue_messages(example):
            return [text_stream(tokenizer, prompt, answer)]
        messages, tools, first = dialogue_of(example)
        return streams_of(tokenizer, messages, tools, first)
    except (ShoalError, ValueError) as error:
        row = example.place or f"data row {example.row}"
        # A ValueError, that of JSON text, has no key.
        raise ShoalError(f"{row}: {error}", getattr(error, "key", "")) from error


def dialogue_of(example: Example) -> tuple[Messages, Any, int]:
    """Returns (the messages of a row to learn from, the schemas of its tools, the index of the
    first message that may be learned). The schemas are None if the row has none; a column `tools`
    of JSON text is parsed. The index is 0 for a column `messages`, else that of the answer behind
    the prompt. ShoalError if the row has no messages; ValueError if `tools` is a text that is no
    JSON."""
    tools = example.columns.get("tools")
    if isinstance(tools, str) and tools:
        tools = loads(tools)
    tools = without_none(tools)
    messages = dialogue_messages(example)
    if messages:
        return messages, tools, 0
    prompt = example.prompt
    answer = answer_to_learn(example)
    if isinstance(prompt, str) or not answer:
        raise ShoalError(EXPECTED_COLUMNS)
    if isinstance(answer, str):
        answer = [{"role": ASSISTANT, "content": answer}]
    answers: Any = checked_prompt(answer, example.place)
    return [*prompt, *answers], tools, len(prompt)


def answer_to_learn(example: Example) -> Any:
    """Returns the answer that a row is learned from: its column `completion`, else its worked
    solution written as a completion; None if it has neither."""
    answer = example.columns.get("completion")
    gold = gold_of(example)
    if answer is None and gold is not None:
        return write_answer(example, gold, gold)
    return answer
