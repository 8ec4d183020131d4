"""Every metric's name, unit and reduction in one table, and what is counted from samples: pass@k, intervals."""

from __future__ import annotations

import difflib
import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import SupportsFloat

from shoal.types import ShoalError


class Reduction(enum.StrEnum):
    """How the values added under one name become the step's figure."""

    MEAN = "mean"  # sum of values / sum of counts
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    LAST = "last"


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    >>> METRICS["reward/mean"]
    Metric(name='reward/mean', unit='reward', reduction=<Reduction.MEAN: 'mean'>, meaning='...')
    """

    name: str
    unit: str
    reduction: Reduction
    meaning: str


_TABLE = """
reward/mean | reward | mean | weighted reward of valid completions
reward/std | reward | mean | standard deviation of the reward within a group, over groups
reward/min | reward | min | smallest reward of a valid completion
reward/max | reward | max | largest reward of a valid completion
rewards/{function} | reward | mean | one reward function's own value, before its weight
rewards/failed | completions | sum | completions of which a reward function raised, hung, died or gave NaN
rewards/failed/{function} | completions | sum | the same of one function; absent where none failed
rewards/logged/{name} | as logged | mean | what a reward function gave to log_metric
groups/nonzero_std | share | mean | groups whose rewards differ: the ones that teach
groups/discarded | groups | sum | groups that were drawn and not learnt from (algorithm.dynamic_sampling)
groups/unscorable | groups | sum | groups with fewer than two scorable completions
advantage/abs_mean | 1 | mean | absolute advantage of valid completions
completions/length_mean | tokens | mean | tokens of a completion, its end-of-sequence token included
completions/length_min | tokens | min | shortest completion
completions/length_max | tokens | max | longest completion
completions/length_ended_mean | tokens | mean | tokens of a completion that was not cut
completions/truncated | share | mean | completions that reached the limit of tokens
completions/stop_eos | share | mean | completions that ended with an end-of-sequence token
completions/stop_stop | share | mean | completions that ended at a stop string
completions/stop_length | share | mean | completions that ended at the limit of tokens
prompts/length_mean | tokens | mean | tokens of a prompt
prompts/dropped | prompts | sum | prompts left out for being over the limit
prompts/retired | prompts | last | prompts that are no longer drawn, being solved
loss | 1 | mean | the loss that was differentiated, over updates
kl | nats | mean | divergence from the reference by the configured estimator, over trained tokens
teacher/kl | nats | mean | reverse divergence from the teacher: log-prob of the policy minus the teacher's
entropy | nats | mean | entropy of the next token, over trained tokens: those of groups and completions in the loss
clip/fraction | share | mean | trained tokens whose clipped term is the active one (cispo: whose weight is bounded)
clip/low | share | mean | those at the lower bound of the loss (grpo: 1 - clip_low, the advantage below 0)
clip/high | share | mean | those at its upper bound (grpo: 1 + clip_high, the advantage above 0; clip_dual, below 0)
ratio/mean | 1 | mean | exp(lp - old), over trained tokens
sampler_gap/logprob_mean | nats | mean | absolute difference of trainer and sampler log-probs, over all tokens computed
sampler_gap/logprob_max | nats | max | its largest value
sampler_gap/ess | share | mean | effective sample size of exp(old - sampler): (sum w)^2 / (N sum w^2), 1 on-policy
correction/weight | 1 | mean | importance weight of trained tokens for what sampler and trainer disagree on
correction/zero | share | mean | trained tokens whose weight is 0: left out of the policy term
grad_norm | 1 | mean | global norm of the gradient before clipping, over updates
lr | 1 | last | learning rate of the last update
update/count | updates | sum | updates applied
update/skipped | updates | sum | updates left out because a gradient was not finite
version | steps | last | steps that the trainer's weights have seen
staleness | updates | mean | trainer's version minus the version that drew the token
staleness/max | updates | max | its largest value
tokens/sampled | tokens | sum | tokens that the sampler drew
tokens/trained | tokens | sum | tokens that entered an update, prompts (each once a row) and completions
tokens/prompt_saved | share | mean | prompt tokens not computed, since siblings share their prompt
time/step_seconds | seconds | sum | a whole step
time/sample_seconds | seconds | sum | waiting for samples
time/reward_seconds | seconds | sum | scoring completions
time/update_seconds | seconds | sum | the updates
throughput/sample_tokens_per_second | tokens/second | mean | tokens drawn a second of sampling
throughput/train_tokens_per_second | tokens/second | mean | tokens trained on a second of updating
mfu | share | mean | useful floating point operations of the step over what the devices could do in its time
memory/peak_bytes | bytes | max | most memory in use on one device
compilations | programs | last | programs compiled since the start
"""


def _read_table(text: str) -> dict[str, Metric]:
    rows = (tuple(cell.strip() for cell in line.split(" | ")) for line in text.strip().splitlines())
    return {name: Metric(name, unit, Reduction(reduction), meaning) for name, unit, reduction, meaning in rows}


METRICS: Mapping[str, Metric] = _read_table(_TABLE)
"""Name -> Metric. `rewards/{function}` stands for one name a reward function."""

FAMILIES = ("rewards/failed/{function}", "rewards/logged/{name}", "rewards/{function}")
"""Rows that stand for many names: whatever follows their prefix. The first that fits counts."""

RESERVED_FUNCTIONS = ("failed", "logged")
"""Names that a reward function must not have: their metrics mean something else."""

_CLOCKS = ("time/", "throughput/", "memory/")


def is_clock(name: str) -> bool:
    """Whether a metric tells of the machine and not of the run: an exact resumption need not repeat it."""
    return name.startswith(_CLOCKS) or name in ("compilations", "mfu")


def logged_name(name: object) -> str:
    """The metric of a name given to `log_metric`; what is no letter, digit or one of `_ . - / @` becomes `_`.

    >>> logged_name("length (tokens)")
    'rewards/logged/length__tokens_'
    """
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "_.-/@") else "_" for c in str(name)[:200])
    return f"rewards/logged/{kept.strip('/') or 'unnamed'}"


def _row_of(name: str) -> str:
    """The name under which the table has it; the name itself where it has none."""
    if name not in METRICS:
        for family in FAMILIES:
            prefix = family[: family.index("{")]
            if name.startswith(prefix) and len(name) > len(prefix):
                return family
    return name


def metric(name: str) -> Metric:
    """The table's row for a name; ValueError for a name that the table lacks, with the nearest one."""
    if (family := _row_of(name)) in METRICS:
        return replace(METRICS[family], name=name)
    near = difflib.get_close_matches(name, METRICS, n=1)
    raise ValueError(f"unknown metric {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))


class MetricSet:
    """Gathers one step's metrics as (sum, denominator) pairs, or extremes, by each name's reduction.

    >>> metrics = MetricSet()
    >>> metrics.add("kl", 0.6, count=3)        # a sum over 3 tokens
    >>> metrics.add("kl", 0.2)
    >>> metrics.result()
    {'kl': 0.2}
    """

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[float, float]] = {}

    def add(self, name: str, value: SupportsFloat, count: SupportsFloat = 1) -> None:
        """Adds the sum `value` over `count` items (for min, max, last: the value itself). Nothing for a count of 0.

        Raises ValueError for an unknown name or a negative count. NaN is kept: it shows in the result."""
        reduction, amount, weight = metric(name).reduction, float(value), float(count)
        if weight < 0 or math.isnan(weight):
            raise ValueError(f"metric {name!r}: count must be 0 or more, came {weight}")
        if weight == 0:
            return
        if name not in self._pairs:
            self._pairs[name] = (amount, weight)
            return
        held, denominator = self._pairs[name]
        self._pairs[name] = (_join(reduction, held, amount), denominator + weight)

    def result(self) -> dict[str, float]:
        """Name -> figure, in the table's order. A name to which nothing was added is absent."""
        order = {name: place for place, name in enumerate(METRICS)}
        names = sorted(self._pairs, key=lambda name: (order[_row_of(name)], name))
        return {name: self._figure(name) for name in names}

    def _figure(self, name: str) -> float:
        value, denominator = self._pairs[name]
        return value / denominator if metric(name).reduction is Reduction.MEAN else value


def _join(reduction: Reduction, held: float, new: float) -> float:
    if reduction in (Reduction.MEAN, Reduction.SUM):
        return held + new
    if reduction is Reduction.LAST:
        return new
    if math.isnan(held) or math.isnan(new):
        return math.nan
    return min(held, new) if reduction is Reduction.MIN else max(held, new)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased chance that one of k samples is right: 1 - C(n-c, k) / C(n, k), n samples of which c were right.

    As a product, which does not overflow (Chen et al. 2021, arXiv:2107.03374, eq. 1). Raises ShoalError for k > n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= num_samples:
        raise ShoalError(f"pass@{k} needs k from 1 to the completions of a question, which are {num_samples}: "
                         "draw more completions or lower k")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct must be 0 to {num_samples}, came {num_correct}")
    num_wrong = num_samples - num_correct
    if num_wrong < k:
        return 1.0
    return 1.0 - math.prod((num_wrong - i) / (num_samples - i) for i in range(k))


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool]) -> bool:
    """Whether the answer that most of a question's completions agree on is right: that of the first which gave it.

    Of answers that occur equally often the one drawn first counts. A completion without an answer (None) does not
    vote; where none has one, the question is not solved.

    >>> majority_at_k(["5", "6", None, "6"], [True, False, False, False])
    False
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    chosen = max(votes, key=votes.__getitem__)  # insertion order: the first of those with the most votes
    return bool(correct[list(answers).index(chosen)])


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of independent values: their deviation (n - 1) by the root of n. None for fewer than two.

    >>> standard_error([0.0, 1.0, 1.0, 0.0])
    0.288...
    """
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def known_mean(values: Iterable[float]) -> float | None:
    """Mean of what is not NaN; None where all is."""
    known = [float(value) for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else None


def wilson_interval(correct: float, total: int) -> tuple[float, float]:
    """The 95% interval of a share, `correct` of `total`, which stays in [0, 1] (Wilson 1927).

    >>> wilson_interval(50, 100)
    (0.4038..., 0.5961...)
    """
    if total < 1 or not 0 <= correct <= total:
        raise ValueError(f"an interval needs 0 <= correct <= total and a total of 1 or more: came {correct} of {total}")
    z = 1.959963984540054
    share = correct / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # at the ends rounding would leave the share itself outside
    return max(0.0, min(share, (middle - half) / scale)), min(1.0, max(share, (middle + half) / scale))
