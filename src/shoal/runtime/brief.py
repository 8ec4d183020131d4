"""The short form of the doctor, before each run: what a step is, and what the reward says of known answers."""

from __future__ import annotations

from shoal.config.schema import Config
from shoal.model.tokenizer import Tokenizer
from shoal.report.findings import Finding
from shoal.task.judge import Judge
from shoal.task.probe import findings_of, probe, totals_text
from shoal.task.task import Task
from shoal.trainer.prompts import Prepared
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


def brief(config: Config, task: Task, tokenizer: Tokenizer, first: Prepared, judge: Judge) -> list[Finding]:
    """A line on the step, one on the reward of known answers to the first prompt, and warnings. Nothing is compiled;
    the judge is called once, before anything else is submitted to it. A reward that fails here is a warning: the run
    meets it by `reward.on_error`."""
    found = [Finding("step", "ok", step_line(config))]
    try:
        tried = probe(judge, [first.example], tokenizer.encode_prompt)
    except ShoalError as error:
        return [*found, Finding("reward", "warning", f"tried on known answers: {error}", "reward.functions")]
    found.append(Finding("reward", "ok", f"rewards of known answers: {totals_text(tried)}"))
    amiss = [Finding(f.check, "warning", f.text, f.key) for f in findings_of(tried) if f.level != "ok"]
    return found + amiss
