"""Metrics: a table with the name, unit and reduction of each, and statistics computed from samples,
such as pass@k and intervals."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import SupportsFloat

from shoal.records import ShoalError


class Reduction(enum.StrEnum):
    """How the values added under one name become the step's figure."""

    MEAN = "mean"  # sum of values / sum of counts
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    LAST = "last"


@dataclass(frozen=True)
class Metric:
    """One row of the table of metrics."""

    name: str
    unit: str
    reduction: Reduction
    meaning: str
    position: int  # in the table


_TABLE = """
reward/mean | reward | mean | weighted sum of the reward functions, over valid completions
reward/std | reward | mean | standard deviation of the reward within a group, over groups
reward/min | reward | min | smallest reward of a valid completion
reward/max | reward | max | largest reward of a valid completion
rewards/{function} | reward | mean | value of one reward function, before its weight
rewards/failed | completions | sum | completions for which a reward function or an environment \
failed
rewards/failed/{function} | completions | sum | the same for one function, or `environment`; \
absent if there were none
rewards/logged/{name} | as logged | mean | what a reward function passed to log_metric, for \
the groups of the step
groups/nonzero_std | share | mean | groups whose rewards differ; the others have advantage 0; \
absent with a critic, which learns from every group
groups/discarded | groups | sum | groups sampled and replaced by dynamic sampling \
(algorithm.dynamic_sampling)
groups/filled | groups | sum | groups that dynamic sampling rejects and that were trained on, \
since too few others were found (algorithm.max_sampling_rounds)
groups/unscorable | groups | sum | groups with fewer than two scorable completions; for groups of \
one, those with none
advantage/abs_mean | 1 | mean | absolute advantage of valid completions
completions/length_mean | tokens | mean | tokens of a completion, its end-of-sequence token included
completions/length_min | tokens | min | shortest completion
completions/length_max | tokens | max | longest completion
completions/length_ended_mean | tokens | mean | tokens of a completion that was not truncated
completions/truncated | share | mean | completions that reached the token limit, or a limit of \
their last turn
completions/ended_by_eos | share | mean | completions that ended with an end-of-sequence token
completions/ended_by_stop | share | mean | completions that ended at a stop string
completions/ended_by_length | share | mean | completions that ended at the token limit, or a limit \
of their last turn
completions/ended_by_max_turns | share | mean | rollouts that ended at environment.max_turns
completions/ended_by_environment | share | mean | rollouts that their environment ended
completions/ended_by_failed | share | mean | rollouts whose environment failed
turns/mean | turns | mean | turns of the model in a rollout
turns/max | turns | max | largest number of turns in a rollout
turns/branches | branches | mean | branches of a rollout: what follows a prompt that rewrote \
earlier turns
turns/share/{turn} | share | mean | valid completions that have such a turn, from 1; with rewards \
or advantages by turn (algorithm.credit)
turns/length/{turn} | tokens | mean | tokens of that turn
turns/reward/{turn} | reward | mean | reward of that turn, weighted sum of the functions
tools/call_frequency | calls | mean | tool calls in a rollout
tools/failure_frequency | share | mean | tool calls that were answered with an error
tools/truncated_bytes | bytes | sum | bytes of results beyond environment.result_bytes, which were \
cut
tools/call_frequency/{name} | calls | mean | calls of one tool in a rollout
tools/failure_frequency/{name} | share | mean | calls of one tool that were answered with an error
prompts/length_mean | tokens | mean | tokens of a prompt
prompts/own | prompts | sum | prompts of rollouts whose environment began with different words \
from their siblings'
prompts/dropped | prompts | sum | prompts skipped because they exceed sampling.max_prompt_tokens
prompts/retired | prompts | last | prompts that are no longer sampled because they are solved \
(train.retire_above)
loss | 1 | mean | the loss that was differentiated, over updates
objective | 1 | mean | the policy term of the loss, without KL and entropy (TorchRL's \
loss_objective), over updates
kl | nats | mean | KL divergence from the reference by the configured estimator, over trained tokens
teacher/kl | nats | mean | reverse KL divergence from the teacher, estimated: log-prob of the \
policy minus the teacher's (teacher.divergence=sampled)
teacher/divergence | nats | mean | divergence of the whole distribution from the teacher's by \
teacher.beta (teacher.divergence=full, topk), over trained tokens
critic/vf_loss | 1 | mean | the loss of the critic's values, over updates; absent without a critic \
(algorithm.advantage=gae), like the next ones
critic/vf_explained_var | share | mean | share of the returns' variance that the critic's values \
from before the updates explain; absent if all returns are the same
critic/vf_clipfrac | share | mean | time steps whose value had moved further than critic.value_clip
critic/vpred_mean | reward | mean | value of a time step in the updates
critic/values/mean | reward | mean | value of a time step before the updates
critic/values/min | reward | min | the smallest such value
critic/values/max | reward | max | the largest such value
critic/returns/mean | reward | mean | return of a time step, which the critic learns
critic/returns/min | reward | min | the smallest such return
critic/returns/max | reward | max | the largest such return
critic/grad_norm | 1 | mean | global norm of the critic's gradient before clipping, over updates
critic/lr | 1 | last | learning rate of the critic's last update
critic/skipped | updates | sum | updates of the critic skipped because a gradient was not finite
critic/warmup | 1 | last | 1 in a step in which the critic alone is updated \
(critic.warmup_steps); absent afterwards
entropy | nats | mean | entropy of the next-token distribution, over trained tokens
context/nll | nats | mean | minus log-prob of what tools and environments said \
(algorithm.context_coef), over these tokens
clip/fraction | share | mean | trained tokens for which the clipped term is active (cispo: whose \
weight is bounded)
clip/low | share | mean | of these, at the lower bound (grpo: ratio below 1 - clip_low, negative \
advantage)
clip/high | share | mean | of these, at the upper bound (grpo: ratio above 1 + clip_high, positive \
advantage)
ratio/mean | 1 | mean | probability ratio exp(lp - old_logprobs), over trained tokens
sampler_gap/kl | nats | mean | KL divergence from the sampler (algorithm.kl_sampler_coef), over \
trained tokens
sampler_gap/logprob_mean | nats | mean | absolute difference of trainer and sampler log-probs, \
over all tokens
sampler_gap/logprob_max | nats | max | the largest such difference
sampler_gap/logprob_mean_own_routes | nats | mean | sampler_gap/logprob_mean of one micro-batch, \
every tenth step, if the trainer chose the experts itself; absent without model.router_replay
sampler_gap/ess | share | mean | effective sample size of w = exp(old - sampler): (sum w)^2 / (N \
sum w^2); 1 on-policy
correction/weight | 1 | mean | importance weight that corrects the gap between sampler and \
trainer, over trained tokens
correction/zero | share | mean | trained tokens with weight 0, which the policy loss leaves out
correction/rejected | share | mean | tokens that algorithm.rejection removed from the loss
experts/load_max | 1 | mean | tokens of an update's most chosen expert divided by the mean \
per expert, over layers; absent without experts
experts/unused | share | mean | experts that no token of an update chose, over layers; absent \
without experts
experts/rerouted | share | mean | choices of the sampler that the trainer's router would not have \
made, and that it uses again (model.router_replay); absent without replay
grad_norm | 1 | mean | global norm of the gradient before clipping, over updates
lr | 1 | last | learning rate of the last update
update/count | updates | sum | updates applied
update/skipped | updates | sum | updates skipped because a gradient was not finite
update/overflows | updates | sum | those of them that only halved the loss scale; absent unless \
model.dtype=float16
loss_scale | 1 | last | loss scale of the last update; absent unless model.dtype=float16
version | steps | last | training steps that the weights have made
version/unchanged | versions | sum | publications of weights that equal those of the version before
staleness | steps | mean | version of the trainer's weights minus the version that sampled the token
staleness/max | steps | max | the largest such difference
age/ess/{age} | share | mean | sampler_gap/ess of the completions whose oldest token was sampled \
{age} versions ago
age/weight_max/{age} | 1 | max | largest w of these completions, before algorithm.correction_cap
age/logprob_mean/{age} | nats | mean | absolute difference of trainer and sampler log-probs, over \
these completions
tokens/sampled | tokens | sum | tokens sampled
tokens/context | tokens | sum | tokens that tools and environments added to rollouts
tokens/trained | tokens | sum | tokens of prompts (once a row) and completions in the updates; at \
its end a run says how many of its sampled tokens were trained on, without prompts
tokens/padding | share | mean | padding among the tokens that the updates computed
sampler/preempted_rows | rows | sum | rows of completions that were preempted for lack of \
memory; absent if there were none
sampler/places_drawing | share | mean | share of the sampler's slots that sample a token in a \
decoding step; the other slots are empty or wait
idle/trainer | share | mean | part of the step in which the trainer waited for groups; not \
measured on shared devices
idle/sampler | share | mean | part of the step in which a slot of the sampler sampled nothing, \
over slots
queue/waiting | groups | last | requested groups that no sampler has accepted yet, because all are \
full
queue/running | groups | last | groups that a sampler is working on
queue/sampled | groups | last | finished groups, with or without rewards, that no step has used yet
fleet/hosts | hosts | last | hosts (threads or Ray workers with an engine) that are sampling
fleet/lost | hosts | sum | hosts that died, stalled or answered wrongly since the last step
fleet/tokens_lost | tokens | sum | tokens that lost hosts had sampled for unfinished groups, by \
their last report
fleet/asked_again | groups | sum | groups that were requested a second time because the host that \
sampled them was lost
fleet/duplicates | groups | sum | second answers for a group; they are dropped
fleet/refused | hosts | last | hosts whose tokens differ from the first's: refused, or used with \
train.versions=newest
tokens/prompt_saved | share | mean | prompt tokens not computed because the completions of a group \
share their prompt
publish/seconds | seconds | sum | time in which the trainer waited while weights were published
publish/bytes | bytes | sum | bytes copied or written to publish weights; 0 if the sampler uses \
the trainer's arrays
publish/pause_seconds | seconds | sum | time in which sampling paused while a host loaded weights, \
mean over hosts
time/step_seconds | seconds | sum | the whole step
time/sample_seconds | seconds | sum | time in which the trainer waited for samples
time/reward_seconds | seconds | sum | time in which the trainer waited for rewards after sampling \
ended
time/update_seconds | seconds | sum | the updates
throughput/sample_tokens_per_second | tokens/second | mean | tokens sampled per second of sampling
throughput/train_tokens_per_second | tokens/second | mean | tokens trained on per second of the \
updates
cost/step | price | sum | price of the step's time on all devices of the run (price)
cost/run | price | last | price of the run's time so far, with its start, evaluations and \
checkpoints
mfu | share | mean | model FLOPs of the step divided by what the devices can do in its time
memory/peak_bytes | bytes | max | peak memory in use on one device
compilations | programs | last | programs compiled since the process started
"""


def _read_table(text: str) -> dict[str, Metric]:
    """Parses the table of metrics, one per line as `name | unit | reduction | meaning`, and returns
    name -> Metric."""
    metrics = {}
    for position, line in enumerate(text.strip().splitlines()):
        name, unit, reduction, meaning = (cell.strip() for cell in line.split(" | "))
        metrics[name] = Metric(name, unit, Reduction(reduction), meaning, position)
    return metrics


METRICS: Mapping[str, Metric] = _read_table(_TABLE)
"""Name -> Metric. `rewards/{function}` stands for the names of all reward functions."""

FAMILIES = sorted((name for name in METRICS if "{" in name), key=lambda name: -name.index("{"))
"""Rows of the table that stand for many names, those with the longest prefix first; a name belongs
to the first row whose prefix it has."""

ENVIRONMENT = "environment"
"""Value of `Failure.function` if an environment failed."""

RESERVED_FUNCTIONS = ("failed", "logged")
"""Names that a reward function must not have: their metrics mean something else."""

_CLOCKS = ("time/", "throughput/", "memory/", "idle/", "queue/", "fleet/", "publish/", "cost/")


def is_clock(name: str) -> bool:
    """True if a metric depends on the machine and its speed. An exact resumption repeats all others
    bit for bit, and comparisons of runs leave these out."""
    return name.startswith(_CLOCKS) or name in (
        "compilations",
        "mfu",
        "sampler/places_drawing",
        "sampler/preempted_rows",
    )


def logged_name(name: object) -> str:
    """Returns the name of the metric for a name that a reward function gave to `log_metric`: its
    characters as in `name_part`.

    >>> logged_name("length (tokens)")
    'rewards/logged/length__tokens_'
    """
    return f"rewards/logged/{name_part(name)}"


def name_part(text: object) -> str:
    """Returns a text as a part of a metric's name. Each character that is not an ASCII letter or
    digit, or one of `_ . - / @`, becomes `_`; slashes at both ends are removed; all after 200
    characters is cut off; an empty text becomes `unnamed`."""
    kept = ""
    for character in str(text)[:200]:
        is_kept = character.isascii() and (character.isalnum() or character in "_.-/@")
        kept += character if is_kept else "_"
    return kept.strip("/") or "unnamed"


@lru_cache(4096)
def metric(name: str) -> Metric:
    """Returns the table's row for a metric's name. A row for many names, such as
    `rewards/{function}`, is returned with this name in place of its own; a row of exactly this name
    counts first. ValueError if the table has none."""
    if name in METRICS:
        return METRICS[name]
    for family in FAMILIES:
        prefix = family[: family.index("{")]
        if name.startswith(prefix) and name != prefix:
            return replace(METRICS[family], name=name)
    raise ValueError(f"unknown metric {name!r}: it has no row in the table")


class MetricSet:
    """One step's metrics, each joined as its reduction says: as (sum, denominator), or as an
    extreme.

    >>> metrics = MetricSet()
    >>> metrics.add("kl", 0.6, count=3)        # a sum over 3 tokens
    >>> metrics.add("kl", 0.2)
    >>> metrics.result()
    {'kl': 0.2}
    """

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[float, float]] = {}

    def add(self, name: str, value: SupportsFloat, count: SupportsFloat = 1) -> None:
        """Adds to a metric. If its reduction is mean, `value` is the sum over `count` items; for
        sum, min, max and last it is the value itself, and `count` only says that there is one. Adds
        nothing if `count` is 0.

        ValueError if the name is unknown or the count negative. NaN is kept, so that it shows in
        the result."""
        reduction, amount, weight = metric(name).reduction, float(value), float(count)
        if weight < 0 or math.isnan(weight):
            raise ValueError(f"metric {name!r}: count must be 0 or more, got {weight}")
        if weight == 0:
            return
        if name in self._pairs:
            amount_before, weight_before = self._pairs[name]
            amount = _join(reduction, amount_before, amount)
            weight = weight_before + weight
        self._pairs[name] = (amount, weight)

    def result(self) -> dict[str, float]:
        """Returns name -> figure, in the table's order, and by name among those of one row such as
        `rewards/{function}`; for a mean, the sum divided by the count. A name to which nothing was
        added, or only with a count of 0, is absent. Drops nothing: adding may go on."""
        figures = {}
        for name in sorted(self._pairs, key=lambda name: (metric(name).position, name)):
            value, denominator = self._pairs[name]
            if metric(name).reduction is Reduction.MEAN:
                value /= denominator
            figures[name] = value
        return figures


def _join(reduction: Reduction, held: float, new: float) -> float:
    """Returns what two values of a metric become: their sum for sum and mean (whose counts are
    added elsewhere), the new one for last, else the smaller or larger one. NaN if either is NaN,
    except for last."""
    if reduction in (Reduction.MEAN, Reduction.SUM):
        return held + new
    if reduction is Reduction.LAST:
        return new
    if math.isnan(held) or math.isnan(new):
        return math.nan
    return min(held, new) if reduction is Reduction.MIN else max(held, new)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the unbiased probability that one of k samples is right: 1 - C(n-c, k) / C(n, k) for
    n samples, c of them right.

    Computed as a product, which does not overflow (Chen et al. 2021, arXiv:2107.03374, eq. 1).
    ShoalError if k > n or k < 1, ValueError if c is not 0 to n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= num_samples:
        raise ShoalError(
            f"pass@{k} needs k from 1 to {num_samples}, the completions of a question: sample more "
            "completions or lower k"
        )
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct must be 0 to {num_samples}, got {num_correct}")
    num_wrong = num_samples - num_correct
    if num_wrong < k:
        return 1.0
    return 1.0 - math.prod((num_wrong - i) / (num_samples - i) for i in range(k))


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool]) -> bool:
    """True if the most frequent answer among a question's completions is right.

    Among answers that are equally frequent the one that was sampled first counts. A completion
    without an answer (None) does not vote; a question without any vote is not solved. `answers` and
    `correct` have one entry a completion, in the order sampled; of equal answers the first entry
    says whether they are right.

    >>> majority_at_k(["5", "6", None, "6"], [True, False, False, False])
    False
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    # dicts keep insertion order, so this is the first among those with the most votes
    chosen = max(votes, key=votes.__getitem__)
    return bool(correct[list(answers).index(chosen)])


def standard_error(values: Sequence[float]) -> float | None:
    """Returns the standard error of the mean of independent values, with n - 1; None for fewer than
    two values.

    >>> standard_error([0.0, 1.0, 1.0, 0.0])
    0.288...
    """
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


FEWEST_PAIRS = 10
"""The fewest questions whose rewards before and after are compared (`paired_interval`)."""


def paired_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Returns (low, high), the 99% interval of the mean of independent differences, such as how
    much the reward of each question has changed between two evaluations (Student's t); None for
    fewer than FEWEST_PAIRS. 99% and not 95%, because each evaluation of a run is compared.

    >>> paired_interval([0.0, 1.0] * 10)
    (0.171..., 0.828...)
    """
    n = len(differences)
    error = standard_error(differences)
    if n < FEWEST_PAIRS or error is None:
        return None
    mean = math.fsum(differences) / n
    half = _student_99(n - 1) * error + 1e-6  # 1e-6: equal rewards differ by rounding
    return mean - half, mean + half


def share_change_interval(
    before: tuple[float, float, float], after: tuple[float, float, float]
) -> tuple[float, float]:
    """Returns (low, high), the 95% interval of the difference of two shares, such as accuracies,
    from their own intervals: Newcombe (1998), method 10. `before`, `after`: (share, low, high) of
    its 95% interval.

    >>> share_change_interval((0.5, 0.4, 0.6), (0.3, 0.2, 0.4))
    (-0.341..., -0.058...)
    """
    # In the paper's letters: p is the share before, q the one after.
    p, p_low, p_high = before
    q, q_low, q_high = after
    difference = q - p
    low = difference - math.hypot(q - q_low, p_high - p)
    high = difference + math.hypot(q_high - q, p - p_low)
    return low, high


def _student_99(degrees: int) -> float:
    """Returns Student's t that 99% of a distribution with so many degrees of freedom (9 or more)
    lies within, on both sides of 0: the first terms of its expansion around the normal
    distribution, within 0.002 (Abramowitz and Stegun 1964, 26.7.5)."""
    z = 2.5758293035489004  # of a normal distribution, for 99%
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))


def known_mean(values: Iterable[float]) -> float | None:
    """Returns the mean of the values that are not NaN; None if there are none. An infinite value
    counts."""
    known = [float(value) for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else None


def wilson_interval(correct: float, total: int) -> tuple[float, float]:
    """Returns (low, high), the 95% interval of a proportion `correct / total`, within [0, 1]
    (Wilson 1927). ValueError if `total` is 0, or if `correct` is not 0 to `total`.

    >>> wilson_interval(50, 100)
    (0.4038..., 0.5961...)
    """
    if total < 1 or not 0 <= correct <= total:
        raise ValueError(
            f"an interval needs 0 <= correct <= total and a total of 1 or more: got {correct} of "
            f"{total}"
        )
    z = 1.959963984540054  # of a normal distribution, for 95%
    share = correct / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # at 0 and 1 rounding would otherwise put the proportion outside its interval
    return max(0.0, min(share, (middle - half) / scale)), min(
        1.0, max(share, (middle + half) / scale)
    )
