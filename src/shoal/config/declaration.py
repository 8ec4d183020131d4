"""How a setting of a run is declared: its default, and what it acts on."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeVar, get_args

Stage = Literal["data", "sampling", "environment", "rewards", "update", "evaluation"]
"""A part of a run whose numbers settings change. `environment` is what tools and environments
say."""

STAGES: tuple[Stage, ...] = get_args(Stage)

T = TypeVar("T")


def key(default: T, *, stages: tuple[Stage, ...]) -> T:
    """A field of the configuration, to stand in place of its default.

        lr: float = key(1.5e-4, stages=("update",))

    `stages`: those whose numbers another value changes itself, the likeliest first; what follows
    from them is not counted. Empty for a key that changes no number: how long is waited, where
    files are, what is reported. Where two runs differ, `shoal diff` looks for the cause among the
    keys of the stage that differs first."""
    return dataclasses.field(default=default, metadata={"stages": stages})
