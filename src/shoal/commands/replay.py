"""`shoal replay`: samples a stored group again from its address and compares it, bit for bit, with
what was stored."""

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
    """Samples group `config.group` of `groups/<name>_<config.step>` again and prints whether it was
    reproduced."""
    with console or Console() as console:
        run = StoredRun(find_run(config.run))
        result = sample_again(
            run, config.step, config.group, config.mesh, console, name, config.likeliest
        )
        report_replay(result, console)
    return result


def report_replay(result: dict[str, Any], console: Console) -> None:
    """Prints the group with each token's log-probs, and whether it was reproduced."""
    weights, completions = result["weights"], result["completions"]
    console.heading(
        f"step {result['step']}, group {result['group']}: data row {result['row']}, version "
        f"{result['version']} from {weights['source']}"
    )
    names = list(completions[0]["components"])
    console.table(
        ("completion", "tokens", "end", *names, "reward", "advantage", "identical"),
        [
            (
                str(c["index"]),
                str(len(c["tokens"])),
                c["stop_reason"],
                *(figure(c["components"][name]) for name in names),
                figure(c["reward"]),
                figure(c["advantage"]),
                "yes" if c["identical"] else "no",
            )
            for c in completions
        ],
    )
    same: dict[str, list[int]] = {}  # a group may hold one completion many times
    for c in completions:
        same.setdefault(" ".join(map(_token_text, c["tokens"])), []).append(c["index"])
    for text, places in same.items():
        noun = f"completion {places[0]}"
        if places[1:]:
            noun = f"completions {ranges(places)} (the same {len(places)} times)"
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
    sampler, trainer = (
        "-" if value is None else f"{round(value, 3) + 0.0:.3f}"
        for value in (token["logprob"], token["trainer_logprob"])
    )
    return (
        f"{token['text']!r}({sampler}"
        + (f"|{trainer}" if trainer not in ("-", sampler) else "")
        + ")"
    )


def describe_replay(result: dict[str, Any]) -> str:
    """The result in a sentence."""
    d, weights = result["difference"], result["weights"]
    if d is None:
        updates = weights["updates_retrained"]
        retrained = f", its weights retrained in {count(updates, 'update')}" if updates else ""
        return f"identical: sampled again bit for bit{retrained}"
    unknown = (
        " (weights not verified: no later log-probs are stored)"
        if weights["steps_retrained"] and weights["verified"] is None
        else ""
    )
    place = f"not identical{unknown}: completion {d['completion']}, token {d['token']}: "
    if d["kind"] == "token":
        return place + (
            f"{d['stored']['text']!r} ({d['stored']['id']}) was stored, {d['sampled']['text']!r} "
            f"({d['sampled']['id']}) is sampled now"
        )
    if d["kind"] == "log-prob":
        return (
            place
            + f"the same token, its log-prob differs by {d['logprob_difference']:+.3g} from the "
            f"stored one"
        )
    return (
        place + f"the stored completion ends by {d['stop_reasons'][0]}, the new one by "
        f"{d['stop_reasons'][1]}"
    )
