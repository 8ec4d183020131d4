"""What is counted of a step's groups: rewards, lengths, how completions ended, staleness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.report.groups import TokenLogprobs
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


def add_age_metrics(metrics: MetricSet, groups: Sequence[Group], logprobs: TokenLogprobs) -> None:
    """How far samplers and trainer differ, by the age of a completion's oldest token; nothing where all are new.

    With w = exp(trainer's - sampler's log-prob) over the tokens that the update learnt from, `logprobs[group, index]`.
    """
    differences: dict[int, list[np.ndarray]] = {}
    for number, group in enumerate(groups):
        for one in group.completions:
            if len(one) and (trainer := logprobs.get((number, one.index))) is not None:
                age = int(group.step - one.versions.min())
                differences.setdefault(age, []).append((trainer - one.logprobs)[one.loss_mask])
    if max(differences, default=0) == 0:
        return
    for age, parts in differences.items():
        difference = np.concatenate(parts).astype(np.float64)
        w = np.exp(difference)
        metrics.add(f"age/ess/{age}", w.sum() ** 2 / max(len(w) * (w**2).sum(), 1e-300), len(w) > 0)
        metrics.add(f"age/weight_max/{age}", w.max(initial=0.0))
        metrics.add(f"age/logprob_mean/{age}", np.abs(difference).sum(), len(w))
