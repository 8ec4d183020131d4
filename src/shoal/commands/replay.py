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
    """Samples a stored group again, prints it and whether it was reproduced bit for bit, and
    returns the comparison. The group is number `config.group`, counted from 0, of the run's file
    `groups/<name>_<config.step>`; `name` is `step` for training, else the beginning of the file
    names of an evaluation. The comparison has the group's `completions` with their tokens, whether
    all is `identical`, where the `weights` come from, and the first `difference` (None if there is
    none). With `config.likeliest` it is also written to `replays/` in the run's folder. ShoalError
    if there is no such run or group, or if another engine sampled the group. A `console` that is
    given can be used afterwards; None: one for this command."""
    with console or Console() as console:
        run = StoredRun(find_run(config.run))
        result = sample_again(
            run=run,
            step=config.step,
            number=config.group,
            mesh=config.mesh,
            console=console,
            name=name,
            likeliest=config.likeliest,
        )
        report_replay(result, console)
    return result


def report_replay(result: dict[str, Any], console: Console) -> None:
    """Prints a comparison that `replay` returns: a table of the completions, the text of each with
    its tokens' log-probs (equal texts once), and whether they were reproduced; if not, what differs
    between this machine and the run's."""
    weights = result["weights"]
    completions = result["completions"]
    console.heading(
        f"step {result['step']}, group {result['group']}: data row {result['row']}, version "
        f"{result['version']} from {weights['source']}"
    )
    names = list(completions[0]["components"])  # of the reward functions
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
    """Returns a token's text with the sampler's log-prob, `'a'(-0.500)`, and the trainer's if it
    differs, `'a'(-0.500|-0.600)`. Both are rounded to three decimals before they are compared. An
    unknown trainer's log-prob is left out; an unknown one of the sampler is `-`. `token`: an entry
    of a completion's `tokens`, with `text`, `logprob` and `trainer_logprob`."""
    sampler = _logprob_text(token["logprob"])
    trainer = _logprob_text(token["trainer_logprob"])
    if trainer in ("-", sampler):  # unknown, or the same
        return f"{token['text']!r}({sampler})"
    return f"{token['text']!r}({sampler}|{trainer})"


def _logprob_text(value: float | None) -> str:
    """Returns a log-prob with three decimals; `-` if it is unknown."""
    if value is None:
        return "-"
    return f"{round(value, 3) + 0.0:.3f}"  # + 0.0: no -0.000


def describe_replay(result: dict[str, Any]) -> str:
    """Returns a comparison that `replay` returns in a sentence: `identical: ...`, or `not
    identical: ...` with the first difference, which is another token, another log-prob, or another
    end. It also says how many updates were trained again for the weights, or, of a difference, that
    such weights could not be verified."""
    difference = result["difference"]
    weights = result["weights"]
    if difference is None:
        text = "identical: sampled again bit for bit"
        if weights["updates_retrained"]:
            text += f", its weights retrained in {count(weights['updates_retrained'], 'update')}"
        return text
    text = "not identical"
    if weights["steps_retrained"] and weights["verified"] is None:
        text += " (weights not verified: no later log-probs are stored)"
    text += f": completion {difference['completion']}, token {difference['token']}: "
    if difference["kind"] == "token":
        stored = difference["stored"]
        sampled = difference["sampled"]
        return text + (
            f"{stored['text']!r} ({stored['id']}) was stored, {sampled['text']!r} "
            f"({sampled['id']}) is sampled now"
        )
    if difference["kind"] == "log-prob":
        return text + (
            f"the same token, its log-prob differs by {difference['logprob_difference']:+.3g} from "
            "the stored one"
        )
    stored_end, new_end = difference["stop_reasons"]
    return text + f"the stored completion ends by {stored_end}, the new one by {new_end}"
