"""Samples a stored group again from its address and compares it, bit for bit, with what was stored.

    the group's version -> nearest checkpoint before it, or the first weights -> retrained on the stored groups
                        -> the run's own compiled sampler -> tokens and log-probs, compared

A run that was resumed with other settings has segments; each step is retrained under the settings of its own.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from shoal.config.schema import Config, MeshSection
from shoal.model.tokenizer import Tokenizer
from shoal.report.console import Console
from shoal.report.groups import StoredGroup
from shoal.report.lines import json_ready
from shoal.run.task import load_task
from shoal.runs.compare import completion_difference
from shoal.runs.replayer import Replayer
from shoal.runs.stored_run import StoredRun
from shoal.trainer.checkpoint import MODEL_FOLDER
from shoal.types import Completion, Group, Purpose, ShoalError


def sample_again(run: StoredRun, step: int, number: int, mesh: MeshSection, console: Console, name: str = "step",
                 likeliest: int = 0) -> dict[str, Any]:
    """Samples group `number` of `groups/<name>_<step>` again; `difference` is the first one, None where all is equal.

    `mesh`: devices other than the run's own. `likeliest`: as many of the likeliest tokens at each place are added."""
    stored = run.group(step, number, name)
    group = stored.group
    with Replayer(run, group, mesh, console) as player:
        prompt = check_prompt(run, player.config, group)
        if not prompt["same"]:
            console.warning(f"the prompt: {prompt['reason']}")
        params, origin = player.weights(group.version)
        sampled = player.sample(params)
        kept = tokens_of_first_version(group)
        if kept != list(map(len, group.completions)):
            console.warning(f"the weights changed while this group was sampled (train.versions=newest): {sum(kept)} of "
                            f"{sum(map(len, group.completions))} tokens are of version {group.version} and compared, "
                            "the others are of newer ones")
        differences = [describe_completion_difference(one, other, player.tokenizer, size)
                       for one, other, size in zip(group.completions, sampled, kept, strict=True)]
        difference = next(filter(None, differences), None)
        result = json_ready({
            "run": str(run.path), "step": step, "group": number, "version": group.version,
            "identical": difference is None, "difference": difference, "weights": asdict(origin),
            "prompt_check": prompt, "row": group.example.row, "prompt": group.example.prompt,
            "columns": group.example.columns,
            "completions": [_completion_record(stored, i, sampled[i], differences[i] is None, player.tokenizer)
                            for i in range(group.size)],
        })
        if likeliest:
            for record, tokens in zip(result["completions"], player.likeliest(params, likeliest), strict=True):
                for token, found in zip(record["tokens"], tokens, strict=True):
                    token |= found
    return result


def check_prompt(run: StoredRun, config: Config, group: Group) -> dict[str, Any]:
    """Compares the stored prompt with what the data and the template give now; `reason` says what has changed."""
    number, reason = group.example.row, ""
    try:
        task = load_task(config.task)
        rows = task.train if group.purpose is Purpose.TRAIN else task.evaluations[group.subset]
        example = rows[number] if number < len(rows) and rows[number].row == number else \
            next((one for one in rows if one.row == number), None)
        ids = Tokenizer.load(run.path / MODEL_FOLDER, config.model.template).encode_prompt(
            example.prompt if example else group.example.prompt)
    except (ShoalError, KeyError) as error:
        return {"same": False, "reason": f"it cannot be made again ({error}); the stored tokens are used"}
    now, before = json_ready(example.columns) if example else {}, group.example.columns
    if example is None:
        reason = f"the data no longer has row {number}"
    elif json_ready(example.prompt) != group.example.prompt:
        reason = f"row {number} has another prompt now: the data has changed"
    elif not np.array_equal(ids, group.prompt_ids):
        reason = "the same messages give other tokens now: the chat template or the tokenizer has changed"
    elif changed := sorted(name for name in {*now, *before} if now.get(name) != before.get(name)):
        reason = f"row {number} has the same prompt, but {', '.join(changed)} changed: rewards would differ"
    return {"same": not reason, "reason": reason and f"{reason}; the stored tokens are used"}


def tokens_of_first_version(group: Group) -> list[int]:
    """By completion, the tokens that were sampled from the group's version before any from a newer one."""
    if len(set(np.concatenate([one.versions for one in group.completions]).tolist())) == 1:
        return list(map(len, group.completions))
    return [int((one.versions == group.version).cumprod().sum()) for one in group.completions]


def describe_completion_difference(stored: Completion, sampled: Completion, tokenizer: Tokenizer,
                                   size: int | None = None) -> dict[str, Any] | None:
    """The first difference of two completions, of the first `size` tokens of `stored` (None: all, and how it ends), as
    a record; None where they are equal bit for bit."""
    found = completion_difference(stored, sampled)
    if found is None or (size is not None and size < len(stored) and found[1] >= size):
        return None
    kind, at = found
    tokens = {name: {"id": int(one.token_ids[at]), "text": tokenizer.token_text(int(one.token_ids[at])),
                     "logprob": one.logprobs[at]} if at < len(one) else None
              for name, one in (("stored", stored), ("sampled", sampled))}
    record: dict[str, Any] = {"completion": stored.index, "token": at, "kind": kind, **tokens}
    if at < min(len(stored), len(sampled)):
        record["logprob_difference"] = float(sampled.logprobs[at]) - float(stored.logprobs[at])
    return json_ready(record | {"stop_reasons": [stored.stop_reason, sampled.stop_reason]})


def _completion_record(stored: StoredGroup, i: int, sampled: Completion, identical: bool,
                       tokenizer: Tokenizer) -> dict[str, Any]:
    group, completion = stored.group, stored.group.completions[i]
    trainer = stored.token_arrays[i].get("trainer_logprobs")
    return {
        "index": i, "identical": identical,
        "text": group.texts[i], "sampled_text": tokenizer.decode(sampled.token_ids.tolist()),
        "stop_reason": completion.stop_reason, "reward": group.rewards[i],
        "components": {name: values[i] for name, values in group.reward_components.items()},
        "valid": group.valid[i], "correct": None if group.correct is None else group.correct[i],
        "advantage": None if stored.advantages is None else stored.advantages[i],
        "tokens": [{"id": int(id), "text": tokenizer.token_text(int(id)), "logprob": completion.logprobs[t],
                    "trainer_logprob": None if trainer is None else trainer[t]}
                   for t, id in enumerate(completion.token_ids)],
    }
