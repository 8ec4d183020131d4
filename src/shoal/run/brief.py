"""The short form of the doctor, before each run: what a step is, and what the reward says of known answers."""

from __future__ import annotations

from dataclasses import replace

from shoal.config.schema import Config
from shoal.model.tokenizer import Tokenizer
from shoal.report.findings import Finding
from shoal.rewards.pool import RewardPool
from shoal.run.probe import findings_of, probe, totals_text
from shoal.tasks.task import Task
from shoal.trainer.curriculum import Prepared
from shoal.types import ShoalError


def num_updates(config: Config) -> int:
    """Of a whole run."""
    return config.steps * config.algorithm.num_epochs * config.algorithm.num_minibatches


def step_line(config: Config) -> str:
    """What one step is.

    >>> step_line(Config())
    'this step = 32 x 8 completions, 1 update'
    """
    b, a = config.batch, config.algorithm
    updates = a.num_epochs * a.num_minibatches
    return f"this step = {b.prompts_per_step} x {b.group_size} completions, {updates} update{'s' * (updates > 1)}"


def brief(config: Config, task: Task, tokenizer: Tokenizer, first: Prepared, judge: RewardPool) -> list[Finding]:
    """A line on the step, one on the reward of known answers to the first prompt, and warnings. Nothing is compiled;
    the judge is called once, before anything else is submitted to it.

    A reward that fails at some of them is a warning. ShoalError for one that cannot work: it breaks the convention, or
    fails at all of them and `reward.on_error` is `error`."""
    found = [Finding("step", "ok", step_line(config))]
    if config.algorithm.advantage == "none":  # the rewards have no part
        return found
    tried = probe(judge, [first.example], tokenizer.encode_prompt, on_error="skip")
    if tried.useless and config.reward.on_error == "error":
        raise ShoalError(f"{tried.useless[0]}; it failed at every known answer that was tried before the run: mend it")
    for text in tried.failures[:1]:
        rest = "; no more answers were tried" if tried.stopped else ""
        found.append(Finding("reward", "warning", f"tried on known answers: {text}{rest}", "reward.functions"))
    if tried.stopped:
        return found
    found.append(Finding("reward", "ok", f"rewards of known answers: {totals_text(tried)}"))
    known = findings_of(replace(tried, failures=()))
    return found + [Finding(f.check, "warning", f.text, f.key) for f in known if f.level != "ok"]
