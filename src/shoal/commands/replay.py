"""`shoal replay`: samples a stored group again and compares it, bit for bit, with what was
stored."""

from __future__ import annotations

from typing import Any

from shoal.config.commands import ReplayConfig
from shoal.job.replay import sample_again
from shoal.report.console import Console
from shoal.runs.layout import find_run
from shoal.runs.reader import StoredRun
from shoal.text import count, figure, ranges


def replay(
    config: ReplayConfig, console: Console | None = None, name: str = "step"
) -> dict[str, Any]:
    """Samples group `config.group` of `groups/<name>_<config.step>` again, prints whether it was
    reproduced, and returns the comparison. `name`: `step` for groups of training."""
    with console or Console() as console:
        run = StoredRun(find_run(config.run))
        result = sample_again(
            run, config.step, config.group, config.mesh, console, name, config.likeliest
        )
        report_replay(result, console)
    return result


def report_replay(result: dict[str, Any], console: Console) -> None:
    """Prints the group with each token's log-probs, and whether it was reproduced."""
    weights = result["weights"]
    completions = result["completions"]
    console.heading(
        f"step {result['step']}, group {result['group']}: data row {result['row']}, version "
        f"{result['version']} from {weights['source']}"
    )
    names = list(completions[0]["components"])
    rows = []
    indices_of_text: dict[str, list[int]] = {}  # a group may hold one completion many times
    for completion in completions:
        row = [str(completion["index"]), str(len(completion["tokens"])), completion["stop_reason"]]
        row += [figure(completion["components"][name]) for name in names]
        row += [figure(completion["reward"]), figure(completion["advantage"])]
        row.append("yes" if completion["identical"] else "no")
        rows.append(tuple(row))
        text = " ".join([_token_text(token) for token in completion["tokens"]])
        indices_of_text.setdefault(text, []).append(completion["index"])
    head = ("completion", "tokens", "end", *names, "reward", "advantage", "identical")
    console.table(head, rows)
    for text, indices in indices_of_text.items():
        noun = f"completion {indices[0]}"
        if len(indices) > 1:
            noun = f"completions {ranges(indices)} (the same {len(indices)} times)"
        console.text(
            f"{noun}, each token with its log-prob (the sampler's, and the trainer's where it "
            "differs):"
        )
        console.text(f"    {text}")
    console.text(describe_replay(result), "bold")
    if not result["identical"]:
        for what, (then, now) in weights["machine"].items():
            console.warning(
                f"{what} is {now or 'not set'}, it was {then or 'not set'} in the run: bits may "
                "differ"
            )


def _token_text(token: dict[str, Any]) -> str:
    """Returns a token's text with the sampler's log-prob, and the trainer's if it differs."""
    sampler = _logprob_text(token["logprob"])
    trainer = _logprob_text(token["trainer_logprob"])
    if trainer in ("-", sampler):
        return f"{token['text']!r}({sampler})"
    return f"{token['text']!r}({sampler}|{trainer})"


def _logprob_text(value: float | None) -> str:
    """Returns a log-prob with three decimals; `-` if it is unknown."""
    if value is None:
        return "-"
    return f"{round(value, 3) + 0.0:.3f}"  # + 0.0: no -0.000


def describe_replay(result: dict[str, Any]) -> str:
    """Returns the result of a replay in a sentence."""
    d = result["difference"]
    weights = result["weights"]
    if d is None:
        text = "identical: sampled again bit for bit"
        if weights["updates_retrained"]:
            text += f", its weights retrained in {count(weights['updates_retrained'], 'update')}"
        return text
    text = "not identical"
    if weights["steps_retrained"] and weights["verified"] is None:
        text += " (weights not verified: no later log-probs are stored)"
    text += f": completion {d['completion']}, token {d['token']}: "
    if d["kind"] == "token":
        return text + (
            f"{d['stored']['text']!r} ({d['stored']['id']}) was stored, {d['sampled']['text']!r} "
            f"({d['sampled']['id']}) is sampled now"
        )
    if d["kind"] == "log-prob":
        return (
            text
            + f"the same token, its log-prob differs by {d['logprob_difference']:+.3g} from the "
            f"stored one"
        )
    return (
        text + f"the stored completion ends by {d['stop_reasons'][0]}, the new one by "
        f"{d['stop_reasons'][1]}"
    )
