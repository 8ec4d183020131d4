"""Rotary positions as entries of config.json describe them, and the way back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shoal.model.architecture import RopeScaling, Rotary
from shoal.model.config_json import Entries


def _linear(rope: Entries, rotary: Rotary) -> Rotary:
    return replace(rotary, scaling=RopeScaling("linear", float(rope.number("factor"))))


def _original_positions(rope: Entries) -> int:
    """Returns the positions that a model had before its rotary frequencies were scaled."""
    name = "original_max_position_embeddings"
    return int(rope.number(name if rope.is_set(name) else "max_position_embeddings", least=1))


def _llama3(rope: Entries, rotary: Rotary) -> Rotary:
    scaling = RopeScaling(
        "llama3",
        float(rope.number("factor")),
        float(rope.number("low_freq_factor")),
        float(rope.number("high_freq_factor")),
        _original_positions(rope),
    )
    return replace(rotary, scaling=scaling)


def _yarn(rope: Entries, rotary: Rotary) -> Rotary:
    original = _original_positions(rope)
    if rope.get("factor") is None:
        factor = rope.size("max_position_embeddings") / original
    else:
        factor = float(rope.number("factor"))

    def attention_factor(strength: float = 1.0) -> float:
        """Returns what YaRN's authors found best (equation 22 of arXiv:2309.00071)."""
        return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0

    length = attention_factor()
    if rope.get("attention_factor") is not None:
        length = float(rope.number("attention_factor"))
    elif rope.is_set("mscale") and rope.is_set("mscale_all_dim"):
        length = attention_factor(rope.number("mscale"))
        length /= attention_factor(rope.number("mscale_all_dim"))
    scaling = RopeScaling(
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=float(rope.number("beta_fast")) if rope.is_set("beta_fast") else 32.0,
        beta_slow=float(rope.number("beta_slow")) if rope.is_set("beta_slow") else 1.0,
        attention_factor=length,
        # null is false in transformers
        truncate=bool(rope.config.get("truncate", True)),
    )
    return replace(rotary, scaling=scaling)


def _default(rope: Entries, rotary: Rotary) -> Rotary:
    return rotary


def _proportional(rope: Entries, rotary: Rotary) -> Rotary:
    scaling = None
    if rope.is_set("factor") and rope.number("factor") != 1:
        scaling = RopeScaling("linear", float(rope.number("factor")))
    return replace(rotary, scaling=scaling, over_whole_head=True)


ROPE_TYPES: Mapping[str, Callable[[Entries, Rotary], Rotary]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
"""`rope_type` -> (`rope_entries`, rotary positions by theta and share alone) -> rotary positions as
the type has them. ShoalError if a number that it needs is missing."""


def rope_entries(entries: Entries, layer_type: str = "full_attention") -> Entries:
    """Returns the entries, with those about the rotary positions of one type of layer as if they
    stood next to the others: `rope_type`, `rope_theta`, `factor` and so on.

    `rope_scaling` is written by transformers 4, `rope_parameters` by 5, which may write one for
    each type of layer. A file with both means the first, as in transformers. Older files say `type`
    for `rope_type`."""
    for key in ("rope_scaling", "rope_parameters"):
        entries.check_type(key, dict, "a mapping")
    rope = entries.get("rope_scaling") or entries.get("rope_parameters") or {}
    of_layers = rope.get(layer_type, rope)
    return entries.with_changes({"rope_type": of_layers.get("type")}).with_changes(of_layers)


def rotary_of(rope: Entries) -> Rotary:
    """Returns the rotary positions that `rope_entries` describe. ShoalError if their type is
    unknown, or lacks a number."""
    rope.check_value("rope_type", tuple(ROPE_TYPES))
    share = 1.0
    if rope.is_set("partial_rotary_factor"):
        share = float(rope.number("partial_rotary_factor"))
    rotary = Rotary(float(rope.number("rope_theta")), share=share)
    rope_type = rope.get("rope_type") or "default"
    return ROPE_TYPES[rope_type](rope, rotary)


def scaling_entries(scaling: RopeScaling) -> dict[str, Any]:
    """Returns the content of the entry `rope_scaling` for a scaling of rotary frequencies."""
    entries = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        entries |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    if scaling.kind == "yarn":
        entries |= {
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "original_max_position_embeddings": scaling.original_max_position,
            "truncate": scaling.truncate,
        }
    return entries
