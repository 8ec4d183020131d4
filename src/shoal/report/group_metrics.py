"""What is counted of a step's groups: rewards, lengths, how completions ended, staleness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.report.metrics import MetricSet
from shoal.types import Group, StopReason


def add_group_metrics(metrics: MetricSet, groups: Sequence[Group], advantages: np.ndarray,
                      nonzero_std: np.ndarray) -> None:
    """Adds the metrics of P groups of G completions; `advantages[P, G]`, `nonzero_std[P]`."""
    rewards, valid = np.stack([group.rewards for group in groups]), np.stack([group.valid for group in groups])
    metrics.add("reward/mean", rewards[valid].sum(), valid.sum())
    for values, mask in zip(rewards, valid, strict=True):
        if mask.any():
            metrics.add("reward/std", values[mask].std())
            metrics.add("reward/min", values[mask].min())
            metrics.add("reward/max", values[mask].max())
    for group in groups:
        for name, values in group.reward_components.items():
            known = ~np.isnan(values)
            metrics.add(f"rewards/{name}", values[known].sum(), known.sum())
    metrics.add("groups/nonzero_std", nonzero_std.sum(), len(groups))
    metrics.add("groups/unscorable", (valid.sum(axis=1) < 2).sum())
    metrics.add("advantage/abs_mean", np.abs(advantages[valid]).sum(), valid.sum())
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([len(completion) for completion in completions])
    reasons = np.array([completion.stop_reason.value for completion in completions])
    truncated = reasons == StopReason.LENGTH.value
    metrics.add("completions/length_mean", lengths.sum(), len(lengths))
    metrics.add("completions/length_min", lengths.min())
    metrics.add("completions/length_max", lengths.max())
    metrics.add("completions/length_ended_mean", lengths[~truncated].sum(), (~truncated).sum())
    metrics.add("completions/truncated", truncated.sum(), len(lengths))
    for reason in (StopReason.EOS, StopReason.STOP, StopReason.LENGTH):
        metrics.add(f"completions/ended_by_{reason.value}", (reasons == reason.value).sum(), len(lengths))
    metrics.add("prompts/length_mean", sum(len(group.prompt_ids) for group in groups), len(groups))
    staleness = np.concatenate([group.step - c.versions for group in groups for c in group.completions])
    if len(staleness):
        metrics.add("staleness", staleness.sum(), len(staleness))
        metrics.add("staleness/max", staleness.max())
