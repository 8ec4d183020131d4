"""`docs/metrics.md`, made from the table of metrics: `python -m shoal.report.metrics_document > docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.report.metrics import METRICS, is_clock

EVALUATION: Mapping[str, tuple[str, str]] = {
    "num_questions": ("questions", "number of questions"),
    "protocol": ("text", "how the answers were generated"),
    "accuracy": ("share", "questions with a right answer; absent if the task does not define one"),
    "accuracy_interval": ("shares", "its 95% interval (Wilson)"),
    "well_formed": ("share", "answers in the form that the task requests; absent if it requests none"),
    "mean_reward": ("reward", "mean weighted reward of the answers"),
    "rewards/{function}": ("reward", "mean value of one reward function"),
    "mean_length": ("tokens", "mean tokens of an answer"),
    "truncated": ("share", "answers that reached the token limit"),
    "pass@{k}": ("share", "unbiased chance that one of k sampled answers is right; in the first and last evaluation"),
    "pass@{k}_error": ("share", "its standard error over questions"),
    "pass@1": ("share", "share of right answers among the samples; in the first and last evaluation"),
    "pass@1_error": ("share", "its standard error over questions"),
    "maj@{k}": ("share", "questions whose most frequent sample is right; absent if the task extracts no answers"),
    "maj@{k}_error": ("share", "its standard error over questions"),
    "sampled_accuracy": ("share", "the same as pass@1"),
    "sampled_accuracy_error": ("share", "its standard error over questions"),
    "sampled_mean_reward": ("reward", "mean weighted reward of the samples"),
    "sampled_protocol": ("text", "how the samples were generated"),
}
"""Figure of an evaluation -> unit, meaning."""

ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "reward/mean": ("`reward`", "`critic/rewards/mean`"),
    "reward/std": ("`reward_std`", ""),
    "reward/min": ("", "`critic/rewards/min`"),
    "reward/max": ("", "`critic/rewards/max`"),
    "rewards/{function}": ("`rewards/{function}/mean`", ""),
    "groups/nonzero_std": ("1 - `frac_reward_zero_std`", ""),
    "completions/length_mean": ("`completions/mean_length`", "`response_length/mean`"),
    "completions/length_min": ("`completions/min_length`", "`response_length/min`"),
    "completions/length_max": ("`completions/max_length`", "`response_length/max`"),
    "completions/length_ended_mean": ("`completions/mean_terminated_length`", ""),
    "completions/truncated": ("`completions/clipped_ratio`", "`response_length/clip_ratio`"),
    "prompts/length_mean": ("", "`prompt_length/mean`"),
    "loss": ("`loss`", "`actor/pg_loss`, with the KL term"),
    "kl": ("`kl`", "`actor/kl_loss`"),
    "entropy": ("`entropy`", "`actor/entropy`"),
    "clip/fraction": ("`clip_ratio/region_mean`", "`actor/pg_clipfrac`"),
    "clip/low": ("`clip_ratio/low_mean`", ""),
    "clip/high": ("`clip_ratio/high_mean`", ""),
    "sampler_gap/logprob_mean": ("`sampling/sampling_logp_difference/mean`", ""),
    "sampler_gap/logprob_max": ("`sampling/sampling_logp_difference/max`", ""),
    "grad_norm": ("`grad_norm`", "`actor/grad_norm`"),
    "lr": ("`learning_rate`", "`actor/lr`"),
    "staleness": ("`sample/staleness_mean`", "`training/off_policy/trajectory_staleness/mean`"),
    "staleness/max": ("`sample/staleness_max`", "`training/off_policy/trajectory_staleness/max`"),
    "time/step_seconds": ("`step_time`", "`timing_s/step`"),
    "time/sample_seconds": ("", "`timing_s/gen`"),
    "time/reward_seconds": ("", "`timing_s/reward`"),
    "time/update_seconds": ("", "`timing_s/update_actor`"),
    "mfu": ("`perf/mfu_wall_clock`", "`perf/mfu/actor`, of updates alone"),
}
"""Metric -> what TRL and verl call the same thing."""

_HEAD = """\
# Metrics

<!-- made by `python -m shoal.report.metrics_document`; change `src/shoal/report/metrics.py` instead -->

Each step writes a line to `metrics.jsonl`, with `step` counted from 1. TensorBoard (`report.tensorboard=true`) and
Weights & Biases (`report.wandb.mode=online`, or `offline`) get the same figures under the same names. In Python:

```python
run = shoal.load_run("outputs/first")
run.metrics["reward/mean"]     # one value for each step
run.metrics.to_pandas()        # one row for each step
```

The column *reduction* says how values become one figure for a step:

* **mean**: their sum over all items of the step, divided by the number of items; never a mean of means;
* **sum**, **min**, **max**: over all items of the step;
* **last**: the value at the end of the step.

A metric that was not measured in a step is absent, not zero: `kl` without a reference, `mfu` on a device with an
unknown peak rate, a reward function that scored nothing. Metrics marked ⏱ depend on the machine; a resumed run repeats
all others bit for bit.
"""

_EVALUATION_HEAD = """
## Evaluations

Each evaluation of a data set writes a line to `evaluations.jsonl`: `step` is the version of the weights, `name` the
data set. TensorBoard and Weights & Biases get the numbers as `evaluate/<name>/<figure>`. verl calls `accuracy`
`val-core/<name>/acc/mean@1`.
"""


def document() -> str:
    """The whole page, as Markdown."""
    metrics = [(f"`{name}`" + (" ⏱" if is_clock(name) else ""), row.unit, row.reduction.value, row.meaning,
                *ELSEWHERE.get(name, ("", ""))) for name, row in METRICS.items()]
    figures = [(f"`{name}`", unit, meaning) for name, (unit, meaning) in EVALUATION.items()]
    return "\n".join([
        _HEAD, *_table(("metric", "unit", "reduction", "meaning", "TRL", "verl"), metrics), _EVALUATION_HEAD,
        *_table(("figure", "unit", "meaning"), figures)]) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]


if __name__ == "__main__":
    print(document(), end="")
