"""Shoal post-trains language models by reinforcement learning from verifiable rewards, in JAX.

>>> import shoal
>>> result = shoal.train(model="Qwen/Qwen2.5-0.5B-Instruct", task="gsm8k", reward=my_function, steps=100)
>>> result["accuracy_after"]
"""

from __future__ import annotations

from typing import Any

from shoal.types import ShoalError

__all__ = ["ShoalError", "evaluate", "train"]


def train(**overrides: Any) -> dict[str, Any]:
    """Evaluates, trains, evaluates again; returns the summary that also stands in the run folder.

    Keys are those of `shoal train --help`: nested (`optimizer={"lr": 1e-5}`), dotted (`**{"optimizer.lr": 1e-5}`) or
    with two underscores (`optimizer__lr=1e-5`). `reward` takes a function, or several, in TRL's convention:
    `f(prompts, completions, completion_ids, **columns) -> list of numbers`. ShoalError for what a user can mend.
    """
    from shoal.config.compose import from_overrides
    from shoal.config.schema import Config
    from shoal.runtime.job import train as run

    config, resolved, functions = from_overrides(Config, **overrides)
    return run(config, (resolved.text, resolved.difference), functions, _console(resolved))


def evaluate(**overrides: Any) -> dict[str, dict[str, Any]]:
    """Figures of one model on one task, by data set, with their protocol. Keys: `shoal eval --help`."""
    from shoal.config.compose import from_overrides
    from shoal.config.schema import EvalConfig
    from shoal.runtime.job import evaluate as run

    config, resolved, functions = from_overrides(EvalConfig, **overrides)
    return run(config, functions, _console(resolved))


def _console(resolved: Any) -> Any:
    from shoal.report.console import Console

    console = Console()
    for note in resolved.notes:
        console.note(note)
    return console
