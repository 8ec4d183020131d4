"""Every loss x aggregation x divergence x clip against a float64 oracle, value and gradient;
numbers worked by hand; what padding, packing, order and garbage must not change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import Settings
from proof_data import (
    Key,
    Update,
    UpdateResult,
    by_shoal,
    draw_update,
    layout,
    loss_by_name,
    objective,
)

from shoal.algorithm.aggregation import token_weights
from shoal.algorithm.logprobs import token_logprobs
from shoal.algorithm.loss import correction_weights, token_kl, token_losses
from shoal.config.choices import AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES, REJECTIONS
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.trainer.loss import make_objective

LOSSES = {
    "grpo": Settings("grpo"),
    "grpo, dual": Settings("grpo", dual=1.25),
    "gspo": Settings("gspo"),
    "gspo-token": Settings("gspo-token"),
    "cispo": Settings("cispo"),
    "cispo, absolute": Settings("cispo", cispo="absolute"),
    "cispo, both": Settings("cispo", cispo="both"),
    "gmpo": Settings("gmpo"),
    "dppo": Settings("dppo"),
    "reinforce": Settings("reinforce"),
    "sapo": Settings("sapo", positive=0.7, negative=1.9),
}
KLS = {
    "none": {},
    "k1": {"kl": "k1"},
    "k2": {"kl": "k2"},
    "k3": {"kl": "k3"},
    "k3, clamped": {"kl": "k3", "clamp_input": 0.6, "clamp_value": 0.1},
    "k1, clamped": {"kl": "k1", "clamp_value": 0.4},
    "k2, weighted": {"kl": "k2", "weighted": True},
    "k3, weighted": {"kl": "k3", "clamp_input": 0.9, "clamp_value": 0.3, "weighted": True},
}
MEASURED = ("k1", "k3, clamped", "k3, weighted")
"""With these the metrics are compared too."""
CLIPS = [(0.2, 0.28), (0.05, 0.07), (3e-4, 4e-4)]
KINDS = sorted(CORRECTIONS.keys() - {"none", "auto", "direct"})
CORRECTED = [("none", "token"), *itertools.product(KINDS, ["token", "sequence", "geometric"])]
CONSTANT = 7


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def with_kl(s: Settings, name: str) -> Settings:
    return replace(s, kl_coef=0.0 if name == "none" else 0.3, **KLS[name])


@cache
def update() -> Update:
    return draw_update(seed=3)


@pytest.fixture(scope="module", autouse=True)
def compiled_operations() -> None:
    """Each operation of an update is a small program: most of them are compiled here, once for all
    tests."""
    settings = replace(with_kl(LOSSES["grpo"], "k3"), correction="tis", cap=1.2, floor=0.8)
    with jax.enable_x64(True):
        by_shoal(layout(update(), per_row=2), objective(settings)).gradients(
            update().weights("token-mean")
        )


# ---- the oracle itself


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_the_oracle_against_finite_differences(name: str):
    """An imaginary step is exact only where the function is written for it: held against central
    differences."""
    completions, step = update().counted()[0][:6], 1e-6
    for kl, (correction, level) in zip(["none", *list(KLS)[1:]], CORRECTED, strict=False):
        s = replace(
            with_kl(LOSSES[name], kl), correction=correction, level=level, aggregation="prompt-mean"
        )
        for i, (c, gradient) in enumerate(
            zip(completions, oracle.gradients(s, completions), strict=True)
        ):
            fixed = [replace(other, lp=other.lp) for other in completions]
            for t in range(len(c.lp)):
                up, down = (
                    [
                        other.lp + sign * step * (np.arange(len(other.lp)) == t) * (i == j)
                        for j, other in enumerate(fixed)
                    ]
                    for sign in (1, -1)
                )
                want = (oracle.loss(s, fixed, up) - oracle.loss(s, fixed, down)) / (2 * step)
                assert gradient[t] == pytest.approx(want, abs=2e-8)


# ---- the grid


@cache
def slopes(s: Settings) -> list[np.ndarray]:
    """d token loss[s] / d lp[t] of each counted completion, corrections included."""
    completions, entropies, _ = update().counted()

    def tokens(c: oracle.Completion, entropy: np.ndarray) -> Any:
        kept = oracle.remaining(s, c)
        return lambda lp: (
            oracle.corrections(s, c) * oracle.token_losses(s, kept, lp)
            + s.kl_coef * oracle.token_kls(s, kept, lp)
            - s.entropy_coef * entropy
        )

    return [
        oracle.derivative(tokens(c, e), c.lp) for c, e in zip(completions, entropies, strict=True)
    ]


@cache
def token_shares(aggregation: str) -> list[np.ndarray]:
    """What one nat of loss at a token adds to the aggregate: found by aggregating it alone."""
    completions = update().counted()[0]
    shares = [np.zeros(len(c.lp)) for c in completions]
    for i, c in enumerate(completions):
        for t in np.flatnonzero(c.loss_mask):
            alone = [np.zeros(len(other.lp)) for other in completions]
            alone[i][t] = 1.0
            shares[i][t] = oracle.aggregate(aggregation, alone, completions, CONSTANT)
    return shares


def assert_equals_oracle(got: UpdateResult, s: Settings, tolerance: float = 1e-11) -> None:
    completions, entropies, keys = update().counted()
    for aggregation in AGGREGATIONS:
        s = replace(s, aggregation=aggregation, constant=CONSTANT)
        weights = update().weights(aggregation, CONSTANT)
        want = oracle.loss(s, completions, entropies=entropies)
        assert got.loss(weights) == pytest.approx(want, rel=tolerance, abs=tolerance)
        base, shares = replace(s, aggregation="token-mean", constant=0), token_shares(aggregation)
        want_by_lp = []
        for slope, share in zip(slopes(base), shares, strict=True):
            want_by_lp.append(share @ slope)
        want_by_entropy = []
        for share, c in zip(shares, completions, strict=True):
            want_by_entropy.append(-s.entropy_coef * share * oracle.remaining(s, c).loss_mask)
        for by_key, want in zip(got.gradients(weights), (want_by_lp, want_by_entropy), strict=True):
            np.testing.assert_allclose(
                np.concatenate([by_key[key] for key in keys]),
                np.concatenate(want),
                rtol=tolerance,
                atol=tolerance,
            )


def trained() -> list[tuple[oracle.Completion, np.ndarray]]:
    """Completions that are in the loss, and their entropies."""
    result = []
    for p, g in update().keys:
        if not update().cut[p, g]:
            result.append((update().completions[p][g], update().entropies[p][g]))
    return result


def cut() -> list[oracle.Completion]:
    result = []
    for p, g in update().keys:
        if update().cut[p, g]:
            result.append(update().completions[p][g])
    return result


def assert_metrics_equal_oracle(got: UpdateResult, s: Settings) -> None:
    """Metrics of the loss cover the tokens in it, those of sampler and trainer's difference all
    that were sampled; truncated completions are in the batch and not in the loss."""
    everything = [update().completions[p][g] for p, g in update().keys]
    sampled, tokens = (
        sum(int(c.loss_mask.sum()) for c in those)
        for those in (everything, [c for c, _ in trained()])
    )
    # the metric is the estimate, not its product with the ratio
    unweighted = replace(s, weighted=False)
    low, high = np.sum([oracle.clipped_tokens(s, c) for c, _ in trained()], axis=0)
    weights = np.concatenate([oracle.corrections(s, c)[c.loss_mask] for c, _ in trained()])
    log_ratio = np.concatenate(
        [(c.old_logprobs - c.sampler_logprobs)[c.loss_mask] for c in everything]
    )
    want = {
        "clip/low": (low, tokens),
        "clip/high": (high, tokens),
        "clip/fraction": (low + high, tokens),
        "ratio/mean": (sum(oracle.reported_ratios(s, c).sum() for c, _ in trained()), tokens),
        # With weight 1 at each token that is in the loss, as these batches have it.
        "objective": (
            sum(
                (oracle.corrections(s, c) * oracle.token_losses(s, c, c.lp))[c.loss_mask].sum()
                for c, _ in trained()
            ),
            tokens,
        ),
        "entropy": (sum(entropy[c.loss_mask].sum() for c, entropy in trained()), tokens),
        "kl": (sum(oracle.token_kls(unweighted, c, c.lp).sum() for c, _ in trained()), tokens),
        "correction/weight": (weights.sum(), tokens),
        "correction/zero": ((weights == 0).sum(), tokens),
        "sampler_gap/logprob_mean": (np.abs(log_ratio).sum(), sampled),
        "sampler_gap/w": (np.exp(log_ratio).sum(), sampled),
        "sampler_gap/w2": (np.exp(2 * log_ratio).sum(), sampled),
    }
    assert got.sums.keys() == want.keys()
    for metric, pair in want.items():
        assert got.sums[metric] == (pytest.approx(pair[0], rel=1e-11), pair[1]), metric
    assert got.maxima == {
        "sampler_gap/logprob_max": pytest.approx(np.abs(log_ratio).max(), rel=1e-11)
    }
    ess = got.sums["sampler_gap/w"][0] ** 2 / (sampled * got.sums["sampler_gap/w2"][0])
    assert ess == pytest.approx(oracle.effective_sample_size(everything), rel=1e-11)
    assert 0 < (weights == 0).sum() < tokens < sampled
    assert (np.concatenate([oracle.corrections(s, c)[c.loss_mask] for c in cut()]) == 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_aggregation_divergence_and_clip_against_the_oracle(name: str):
    """Values, gradients and, for divergences of each kind, metrics."""
    laid = layout(update(), per_row=2, garbage=np.nan)
    reached, left_out = np.zeros(2, int), 0
    for clip, (number, kl) in itertools.product(CLIPS, enumerate(KLS)):
        correction, level = CORRECTED[number % len(CORRECTED)]
        s = replace(
            with_kl(LOSSES[name], kl),
            low=clip[0],
            high=clip[1],
            correction=correction,
            level=level,
            entropy_coef=0.02 * (number % 2),
        )
        if kl in MEASURED:
            s = replace(s, correction="mis", level="token", cap=1.2)
        got = by_shoal(laid, objective(s))
        assert_equals_oracle(got, s)
        if kl in MEASURED:
            assert_metrics_equal_oracle(got, s)
            reached += np.sum([oracle.clipped_tokens(s, c) for c, _ in trained()], axis=0)
            left_out += np.sum([oracle.clipped_tokens(s, c) for c in cut()])
    assert name in ("sapo", "reinforce") or (reached[1] > 0 and left_out > 0)
    assert name in ("sapo", "reinforce", "cispo", "cispo, absolute") or reached[0] > 0


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_correction_against_the_oracle(name: str):
    laid = layout(update(), per_row=2)
    for correction, level in CORRECTED:
        s = replace(LOSSES[name], correction=correction, level=level, cap=1.2, floor=0.8)
        assert_equals_oracle(by_shoal(laid, objective(s)), s)


@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted(REJECTIONS.keys() - {"none"}))
def test_every_rejection_against_the_oracle(rule: str):
    """With weights and without; of the loss, KL and entropy nothing is left of what is rejected."""
    laid = layout(update(), per_row=2, garbage=np.nan)
    level, _, kl = rule.rpartition("_")
    bounds = (0.7 if level == "seq_sum" else 0.9, 1.5 if level == "seq_sum" else 1.15)
    if kl != "k1":
        bounds = (0.0, {"seq_sum": 0.1, "seq_max": 0.06}.get(level, 0.02))
    for name, (correction, level) in (
        ("grpo", ("none", "token")),
        ("gspo", ("tis", "sequence")),
        ("gmpo", ("mis", "geometric")),
    ):
        s = replace(
            with_kl(LOSSES[name], "k3, weighted"),
            correction=correction,
            level=level,
            entropy_coef=0.02,
            rejection=rule,
            rejection_bounds=bounds,
        )
        got = by_shoal(laid, objective(s))
        assert_equals_oracle(got, s)
        drawn, kept = (
            sum(int(c.loss_mask.sum()) for c in those)
            for those in ([c for c, _ in trained()], [oracle.remaining(s, c) for c, _ in trained()])
        )
        assert got.sums["correction/rejected"] == (drawn - kept, drawn) and 0 < kept < drawn
        assert got.sums["kl"][1] == kept


def test_a_log_prob_that_is_no_number_is_not_rejected():
    """It would leave the loss, and nothing would show that it was there."""
    [c], whole = [update().completions[0][0]], update()
    broken = replace(c, lp=np.full(len(c.lp), np.nan), old_logprobs=np.full(len(c.lp), np.nan))
    whole = replace(
        whole, completions=[[broken, *whole.completions[0][1:]], *whole.completions[1:]]
    )
    for rule in ("token_k1", "seq_max_k3"):
        got = by_shoal(layout(whole), objective(replace(LOSSES["grpo"], rejection=rule)))
        assert np.isnan(got.loss(whole.weights("token-mean")))


@pytest.mark.parametrize("old_from", [0.0, 0.08, -0.08])
def test_old_logprobs_with_a_correction_are_the_decoupled_objective(old_from: float):
    """Hilton et al., "Batch size-invariance for policy optimization" (2021), eq. 5: pi_old /
    pi_sampler x min(r A, clip(r) A) with r = pi / pi_old. Inside the clip range the gradient is
    that of pi / pi_sampler, whatever `old` is: `old` says where the range is, the sampler what the
    samples are worth."""

    def moved(c: oracle.Completion) -> oracle.Completion:
        return replace(
            c,
            old_logprobs=c.lp + old_from * np.cos(np.arange(len(c.lp))),
            sampler_logprobs=c.lp - 0.5,
        )

    whole = replace(
        update(), completions=[[moved(c) for c in group] for group in update().completions]
    )
    s = Settings("grpo", low=0.2, high=0.2, correction="tis", cap=np.inf, floor=0.0)
    weights = whole.weights("token-mean")
    got = by_shoal(layout(whole), objective(s))
    assert got.sums["clip/fraction"][0] == 0
    for (p, g), gradient in got.gradients(weights)[0].items():
        c = whole.completions[p][g]
        np.testing.assert_allclose(
            gradient,
            -np.where(c.loss_mask, c.advantages * weights[p, g] * np.exp(0.5), 0),
            rtol=1e-12,
        )
    tight = by_shoal(layout(whole), objective(replace(s, low=0.01, high=0.01)))
    pairs = [(c, weights[p, g]) for p, g in whole.keys for c in [whole.completions[p][g]]]
    want = sum(
        -weight
        * (
            np.exp(c.old_logprobs - c.sampler_logprobs)
            * np.minimum(
                np.exp(c.lp - c.old_logprobs) * c.advantages,
                np.clip(np.exp(c.lp - c.old_logprobs), 0.99, 1.01) * c.advantages,
            )
        )[c.loss_mask].sum()
        for c, weight in pairs
    )
    assert tight.loss(weights) == pytest.approx(want, rel=1e-12)
    assert bool(tight.sums["clip/fraction"][0]) == bool(old_from)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_float32_against_the_oracle(name: str):
    s = replace(
        with_kl(LOSSES[name], "k3, weighted"), correction="tis", level="sequence", entropy_coef=0.02
    )
    with jax.enable_x64(False):
        assert_equals_oracle(by_shoal(layout(update(), dtype=np.float32), objective(s)), s, 2e-5)


# ---- what must change nothing


PACKINGS: list[dict[str, Any]] = [
    {"per_row": 4, "garbage": np.inf},
    {"per_row": 3, "order": range(10, -1, -1)},
    {"per_row": 2, "order": [3, 1, 4, 10, 5, 9, 2, 6, 8, 7, 0], "garbage": 1e30},
    {"grid": (11, 8)},
]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_padding_packing_and_order_change_nothing(name: str):
    s = replace(
        with_kl(LOSSES[name], "k3, weighted"),
        correction="tis",
        level="geometric",
        entropy_coef=0.02,
    )
    weights = update().weights("prompt-mean")
    first = by_shoal(layout(update()), objective(s))
    for packing in PACKINGS:
        other = by_shoal(layout(update(), **packing), objective(s))
        assert other.loss(weights) == pytest.approx(first.loss(weights), rel=1e-12)
        for mine, theirs in zip(other.gradients(weights), first.gradients(weights), strict=True):
            assert mine.keys() == theirs.keys()
            for key in mine:
                np.testing.assert_allclose(mine[key], theirs[key], rtol=1e-11, atol=1e-15)
        for metric, pair in first.sums.items():
            assert other.sums[metric] == pytest.approx(pair, rel=1e-11)


def with_context(whole: Update) -> tuple[Update, dict[Key, np.ndarray]]:
    """The update with what tools said before, between and after the turns of its completions, and
    where in these their own tokens are."""
    rng, kept = np.random.default_rng(5), {}
    completions, entropies = (
        [list(group) for group in groups] for groups in (whole.completions, whole.entropies)
    )
    for p, g in whole.keys:
        c = whole.completions[p][g]
        # tokens of context before each token, and at the end
        before = rng.integers(0, 4, len(c.lp) + 1)
        kept[p, g] = np.arange(len(c.lp)) + np.cumsum(before)[:-1]

        def spread(
            values: Any, fill: Any, size: int = len(c.lp) + before.sum(), own: Any = kept[p, g]
        ) -> np.ndarray:
            out = np.full(size, fill)
            out[own] = values
            return out

        names = ("lp", "old_logprobs", "ref_logprobs", "sampler_logprobs")
        completions[p][g] = replace(
            c,
            loss_mask=spread(c.loss_mask, False),
            **{name: spread(getattr(c, name), float(rng.normal())) for name in names},
        )
        entropies[p][g] = spread(whole.entropies[p][g], 9.0)
    return replace(whole, completions=completions, entropies=entropies), kept


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_context_between_turns_is_as_if_it_were_not_there(name: str):
    s = replace(
        with_kl(LOSSES[name], "k3, weighted"),
        correction="mis",
        level="geometric",
        cap=1.2,
        entropy_coef=0.02,
    )
    told, kept = with_context(update())
    # most of a rollout is context
    assert np.mean([len(one) / (one[-1] + 1) for one in kept.values()]) < 0.5
    first, other = (by_shoal(layout(one, garbage=np.nan), objective(s)) for one in (update(), told))
    for aggregation in AGGREGATIONS:
        weights = told.weights(aggregation, CONSTANT)
        np.testing.assert_array_equal(weights, update().weights(aggregation, CONSTANT))
        assert other.loss(weights) == pytest.approx(first.loss(weights), rel=1e-12)
        want = oracle.loss(
            replace(s, aggregation=aggregation, constant=CONSTANT),
            *told.counted()[:1],
            entropies=told.counted()[1],
        )
        assert other.loss(weights) == pytest.approx(want, rel=1e-11)
        for mine, theirs in zip(other.gradients(weights), first.gradients(weights), strict=True):
            for key, own in kept.items():
                np.testing.assert_allclose(mine[key][own], theirs[key], rtol=1e-11, atol=1e-15)
                assert not np.delete(mine[key], own).any()
    assert other.sums == {
        metric: pytest.approx(pair, rel=1e-11) for metric, pair in first.sums.items()
    }


def part(whole: Update, keys: Sequence[Key]) -> Update:
    """Only these completions are computed; the update's weights stay those of all."""
    valid = np.zeros_like(whole.valid)
    for key in keys:
        valid[key] = True
    return replace(whole, valid=valid)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up_to_the_whole(name: str):
    s = replace(with_kl(LOSSES[name], "k2, weighted"), correction="mis", level="sequence")
    keys = update().keys
    whole = by_shoal(layout(update()), objective(s))
    pieces = []
    for a, b in ((0, 1), (1, 6), (6, len(keys))):
        pieces.append(by_shoal(layout(part(update(), keys[a:b])), objective(s)))
    for metric, (value, count) in whole.sums.items():
        assert sum(piece.sums[metric][0] for piece in pieces) == pytest.approx(value, rel=1e-12)
        assert sum(piece.sums[metric][1] for piece in pieces) == count
    for aggregation in AGGREGATIONS:
        weights = update().weights(aggregation, CONSTANT)
        assert sum(piece.loss(weights) for piece in pieces) == pytest.approx(
            whole.loss(weights), rel=1e-12
        )
        together = {}
        for piece in pieces:
            for key, x in piece.gradients(weights)[0].items():
                together[key] = x
        for key, gradient in whole.gradients(weights)[0].items():
            np.testing.assert_allclose(
                together[key], gradient, rtol=1e-12, atol=1e-16, err_msg=aggregation
            )


@pytest.mark.parametrize("name", LOSSES)
def test_before_the_first_step_every_loss_is_the_policy_gradient(name: str):
    """old = lp: nothing is clipped and the gradient is -A at each token, of each completion's mean
    for the sequence losses."""
    same = replace(
        update(),
        completions=[
            [replace(c, old_logprobs=c.lp) for c in group] for group in update().completions
        ],
    )
    weights = same.weights("seq-mean-token-mean")
    s = replace(LOSSES[name], low=0.3, high=2.0 if "absolute" in name else 0.3)
    got = by_shoal(layout(same), objective(s, use_old=False))
    assert (
        got.sums["clip/fraction"][0] == 0 and got.sums["ratio/mean"][0] == got.sums["ratio/mean"][1]
    )
    for (p, g), gradient in got.gradients(weights)[0].items():
        c = same.completions[p][g]
        np.testing.assert_allclose(
            gradient, np.where(c.loss_mask, -c.advantage * weights[p, g], 0.0), rtol=1e-12
        )


def test_the_registries_are_proven_in_full():
    assert {s.loss for s in LOSSES.values()} == set(POLICY_LOSSES)
    assert {s["kl"] for s in KLS.values() if s} == set(KL_ESTIMATORS)
    # direct: see below
    assert {correction for correction, _ in CORRECTED} == set(CORRECTIONS) - {"auto", "direct"}


# ---- worked by hand


def in_slot(
    name: str,
    ratio: list[float],
    advantage: list[float],
    segment: list[int] | None = None,
    weight: list[float] | None = None,
    **settings: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Token losses of one slot, and the gradient of their weighted sum, for tokens of these ratios;
    old is -1.5. The slot is filled up with padding, to one shape for all."""

    def fill(values: list, rest: float) -> Any:
        return np.array([*values, *[rest] * (8 - len(values))], np.asarray(values).dtype)[
            None, None
        ]

    size, old_logprobs = len(ratio), jnp.full((1, 1, 8), -1.5)
    lp = old_logprobs + np.log(fill([*map(float, ratio)], 1.0))
    a = jnp.asarray(fill([*map(float, advantage)], 1.0))
    segments = jnp.asarray(fill(segment or [1] * size, 0))

    def run(lp: jax.Array) -> jax.Array:
        return loss_by_name(name, lp, old_logprobs, a, segments > 0, segments, **settings)[0]

    tokens, pull = jax.vjp(run, lp)
    gradient = pull(jnp.asarray(fill([*map(float, weight or [1.0] * size)], 0.0)))[0]
    return np.asarray(tokens)[0, 0, :size], np.asarray(gradient)[0, 0, :size]


def close(got: Any, *want: list[float]) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12)


@pytest.mark.slow
def test_dual_clip_worked_by_hand():
    # A < 0: at most 3 |A|; ratio 2 is free. A > 0 is clipped at 1.2 as ever.
    close(
        in_slot("grpo", [5, 2, 5, 0.5], [-1, -1, 1, -1], clip_dual=3.0),
        [3, 2, -1.2, 0.8],
        [0, 2, 0, 0],
    )


@pytest.mark.slow
def test_luspo_worked_by_hand():
    """GSPO's completion loss times its length, the mean over completions (TRL's
    loss_type=luspo)."""
    # s = 4 and 1/2 as below, A = 1 and -2, lengths 2 and 3: (2 x -4 + 3 x 1) / 2.
    ratio, advantage, segment = [2.0, 8, 0.25, 0.5, 1], [1.0, 1, -2, -2, -2], [1, 1, 2, 2, 2]
    every = np.ones((1, 2), bool)
    weights = token_weights(
        AGGREGATIONS["seq-mean-token-sum"].load(), np.array([[2, 3]]), every, every
    )
    tokens, _ = in_slot("gspo", ratio, advantage, segment, clip_low=0.6, clip_high=5.0)
    assert (np.repeat(weights[0], [2, 3]) * tokens).sum() == pytest.approx((2 * -4 + 3 * 1) / 2)


def test_gspo_worked_by_hand():
    # Ratios 2 and 8: s = sqrt(16) = 4, and ds / dlp = s / 2 for each. 1/4 and 1: s = 1/2.
    ratio, advantage, segment = [2.0, 8, 0.25, 1], [1.0, 1, -2, -2], [1, 1, 2, 2]
    close(
        in_slot("gspo", ratio, advantage, segment, clip_low=0.6, clip_high=5.0),
        [-4, -4, 1, 1],
        [-4, -4, 1, 1],
    )
    close(
        in_slot("gspo", ratio, advantage, segment, [1, 0, 0, 0], clip_low=0.6, clip_high=5.0)[1:],
        [-2, -2, 0, 0],
    )
    # s = 4 is clipped for A > 0; s = 1/2 for A < 0.
    close(in_slot("gspo", ratio, advantage, segment), [-1.2, -1.2, 1.6, 1.6], [0, 0, 0, 0])
    # The same values by token: each token's own weight is its own gradient.
    close(
        in_slot("gspo-token", ratio, advantage, segment, [1, 0, 0, 0], clip_low=0.6, clip_high=5.0)[
            1:
        ],
        [-4, 0, 0, 0],
    )


def test_cispo_worked_by_hand():
    # Ratio 3, A = 2, lp = -1.5 + log 3 = -0.4013877; ratio 1/2, A = -2, lp = -1.5 - log 2 =
    # -2.1931472.
    ratio, advantage = [3.0, 0.5], [2.0, -2.0]
    # paper: weights 1.2 and 1/2: -1.2 x 2 x lp, 0.5 x 2 x lp; the bounded one keeps its gradient.
    close(in_slot("cispo", ratio, advantage), [0.9633305, -2.1931472], [-2.4, 1.0])
    # both: weights 1.2 and 0.8. absolute, 2: weights 2 and 1/2.
    close(
        in_slot("cispo", ratio, advantage, cispo_bound="both"), [0.9633305, -3.5090355], [-2.4, 1.6]
    )
    close(
        in_slot("cispo", ratio, advantage, clip_high=2, cispo_bound="absolute"),
        [1.6055508, -2.1931472],
        [-4, 1],
    )


def test_gmpo_worked_by_hand():
    # Bounds log 2 = 0.6931472: ratios 4 and 1/4. A > 0: 4 is cut to 2, sqrt(2 / 4) = 0.7071068; d /
    # dlp of the second is half of it, twice for two tokens. A < 0: 1/4 is raised to 1/2, sqrt(4 /
    # 2) = 1.4142136.
    bounds = {"clip_low": 0.6931471806, "clip_high": 0.6931471806}
    close(in_slot("gmpo", [4, 0.25], [1, 1], **bounds), [-0.7071068] * 2, [0, -0.7071068])
    close(in_slot("gmpo", [4, 0.25], [-1, -1], **bounds), [1.4142136] * 2, [1.4142136, 0])


def test_dppo_worked_by_hand():
    # Probabilities as in_slot has them, with bounds of 0: each that moved in the advantage's
    # direction is dropped; the others have the ratio.
    bounds = {"clip_low": 0.0, "clip_high": 0.0}
    close(in_slot("dppo", [2, 0.5], [1, 1], **bounds), [0, -0.5], [0, -0.5])
    close(in_slot("dppo", [2, 0.5], [-1, -1], **bounds), [2, 0], [2, 0])
    # No probability moves by more than 1.
    bounds = {"clip_low": 1.0, "clip_high": 1.0}
    close(in_slot("dppo", [2, 0.5], [1, -1], **bounds), [-2, 0.5], [-2, 0.5])


def test_sapo_worked_by_hand():
    # Ratio 1: (4 / tau) / 2 = 2 / tau, slope 1. Ratio 2, tau 1: 4 sigmoid(1) = 2.9242343, slope 4 x
    # 0.1966119 x 2 = 1.5728955. Ratio 2, tau 2: 2 sigmoid(2) = 1.7615942, slope 4 x 0.1049936 x 2 =
    # 0.8399487.
    close(
        in_slot("sapo", [1, 1, 2, 2], [3, -1, 1, -1], sapo_positive=1.0, sapo_negative=2.0),
        [-6, 1, -2.9242343, 1.7615942],
        [-3, 1, -1.5728955, 0.8399487],
    )


@pytest.mark.parametrize(
    ("name", "clamps", "values", "gradient"),
    [
        # reference / policy 1/2: lp - ref = log 2. 2: lp - ref = -log 2.
        ("k1", (0, 0), [0.6931472, -0.6931472], [1, 1]),
        ("k2", (0, 0), [0.2402265, 0.2402265], [0.6931472, -0.6931472]),
        ("k3", (0, 0), [0.1931472, 0.3068528], [0.5, -1]),
        # Input 0.5: exp(-0.5) + 0.5 - 1, exp(0.5) - 0.5 - 1; beyond a clamp the gradient is 0.
        ("k3", (0.5, 0), [0.1065307, 0.1487213], [0, 0]),
        ("k3", (0, 0.25), [0.1931472, 0.25], [0.5, 0]),
        ("k1", (0, 0.25), [0.25, -0.25], [0, 0]),
        ("k2", (0.5, 0), [0.125, 0.125], [0, 0]),
    ],
)
def test_divergence_worked_by_hand(
    name: str, clamps: tuple[float, float], values: list[float], gradient: list[float]
):
    lp, ref_logprobs = jnp.log(jnp.array([0.5, 0.25])), jnp.log(jnp.array([0.25, 0.5]))
    mask = jnp.ones(2, bool)
    estimator = KL_ESTIMATORS[name].load()
    close([token_kl(estimator, lp, ref_logprobs, mask, *clamps)], values)
    close(
        [jax.grad(lambda lp: token_kl(estimator, lp, ref_logprobs, mask, *clamps).sum())(lp)],
        gradient,
    )


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("token-mean", [[1 / 6, 1 / 6], [1 / 6, 0]]),
        # four completions, one of them without a token
        ("seq-mean-token-mean", [[1 / 4, 1 / 12], [1 / 8, 0]]),
        ("seq-mean-token-sum", [[1 / 4, 1 / 4], [1 / 4, 0]]),
        ("seq-mean-token-sum-norm", [[1 / 40, 1 / 40], [1 / 40, 0]]),  # a constant length of 10
        ("prompt-mean", [[1 / 8, 1 / 8], [1 / 4, 0]]),  # two prompts, of 4 and of 2 tokens
    ],
)
def test_aggregation_worked_by_hand(mode: str, want: list[list[float]]):
    lengths, every = np.array([[1, 3], [2, 0], [5, 5]]), np.ones((3, 2), bool)
    # a third prompt that does not count, or is not there
    first_two = np.array([[True] * 2, [True] * 2, [False] * 2])
    for valid, counts in ((every, first_two), (first_two, every)):
        got = token_weights(AGGREGATIONS[mode].load(), lengths, valid, counts, 10)
        np.testing.assert_allclose(got, [*want, [0, 0]], rtol=1e-15)


@pytest.mark.parametrize(
    ("kind", "level", "bounds", "want"),
    [
        # Completion 1: weights 1/4, 1, 4, product and geometric mean 1. Completion 2: 2 and 2,
        # product 4, mean 2.
        ("tis", "token", (2, 0), [0.25, 1, 2, 2, 2]),
        ("mis", "token", (2, 0), [0.25, 1, 0, 2, 2]),
        ("icepop", "token", (2, 0.5), [0, 1, 0, 2, 2]),
        ("icepop", "sequence", (2, 0.5), [1, 1, 1, 0, 0]),
        ("tis", "sequence", (2, 0), [1, 1, 1, 2, 2]),
        ("mis", "sequence", (2, 0), [1, 1, 1, 0, 0]),
        ("tis", "geometric", (2, 0), [1, 1, 1, 2, 2]),
        ("mis", "geometric", (2, 0), [1, 1, 1, 2, 2]),
        ("tis", "token", (2, 0.5), [0.5, 1, 2, 2, 2]),
        ("mis", "token", (2, 0.5), [0, 1, 0, 2, 2]),
        ("tis", "token", (np.inf, 0), [0.25, 1, 4, 2, 2]),
        ("mis", "token", (np.inf, 0), [0.25, 1, 4, 2, 2]),
        ("tis", "sequence", (np.inf, 1.5), [1.5, 1.5, 1.5, 4, 4]),
        ("mis", "sequence", (np.inf, 1.5), [0, 0, 0, 4, 4]),
    ],
)
def test_corrections_worked_by_hand(
    kind: str, level: str, bounds: tuple[float, float], want: list[float]
):
    # A token in between was not drawn, the last place is padding: what stands there has no part.
    log_ratio = jnp.asarray([*np.log([0.25, 1]), np.inf, *np.log([4, 2, 2]), np.nan, 7.0])[
        None, None
    ]
    segment = jnp.array([1, 1, 1, 1, 2, 2, 0, 0])[None, None]
    mask = jnp.array([True, True, False, True, True, True, False, False])[None, None]
    sampler_logprobs = jnp.full(log_ratio.shape, -2.0)

    def of(old_logprobs: jax.Array) -> jax.Array:
        cap, floor = bounds
        return correction_weights(
            CORRECTIONS[kind].load(),
            level,
            old_logprobs,
            sampler_logprobs,
            mask,
            segment,
            cap + 1e-9,
            floor,
        )

    close([np.asarray(of(sampler_logprobs + log_ratio))[0, 0]], [*want[:2], 0, *want[2:], 0, 0])
    gradient = jax.grad(lambda old_logprobs: of(old_logprobs).sum())(
        sampler_logprobs + jnp.where(mask, log_ratio, 0)
    )
    assert not np.asarray(gradient).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_the_direct_ratio_is_the_one_to_old_logprobs_that_are_the_samplers(name: str):
    rng, shape = np.random.default_rng(0), (1, 1, 6)
    lp, sampler, old = (jnp.asarray(-rng.exponential(size=shape)) for _ in range(3))
    segment = jnp.array([1, 1, 1, 2, 2, 0])[None, None]
    o = replace(objective(LOSSES[name]), use_old=True)
    arrays = {
        "advantage": jnp.asarray(rng.normal(size=shape)),
        "weight": jnp.ones(shape),
        "loss_mask": segment > 0,
        "segment": segment,
        "ref_logprobs": old,
        "sampler_logprobs": sampler,
    }
    direct, plain = (
        token_losses(replace(o, to_sampler=to_sampler), lp, -lp, old_logprobs=logprobs, **arrays)[0]
        for to_sampler, logprobs in ((True, old), (False, sampler))
    )
    np.testing.assert_array_equal(direct, plain)
    assert np.abs(np.asarray(direct)).max() > 0


def test_the_bounds_of_a_correction_by_kind():
    """IcePop's floor is its paper's, the others have none; a floor that is set is used as it is, 0
    included."""
    got = {}
    for kind in KINDS:
        got[kind] = make_objective(AlgorithmSection(correction=kind)).correction_bounds
    assert got == {"tis": (2.0, 0.0), "mis": (2.0, 0.0), "icepop": (2.0, 0.5)}
    for kind, floor in itertools.product(KINDS, (0.0, 0.3)):
        a = AlgorithmSection(correction=kind, correction_cap=np.inf, correction_floor=floor)
        assert make_objective(a).correction_bounds == (np.inf, floor)


def test_the_bias_of_truncated_sampling_is_the_kept_mass():
    """A sampler keeps the likeliest tokens and divides by their mass m. Where the trainer's
    log-prob is over all tokens the mean ratio is m; over the same kept set it is 1. Expectations
    are exact: all kept tokens, by probability."""
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 9)) * 1.5)
    p = np.asarray(jax.nn.softmax(logits))[0, 0]
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), 0.8)) + 1]
    mass = p[kept].sum()
    assert 0.8 <= mass < 0.95
    targets = jnp.asarray(kept)[:, None]
    hidden = jnp.broadcast_to(logits, (len(kept), 1, 9))
    ids = np.append(kept, -1).astype(np.int32)  # -1 fills up
    support_ids = np.broadcast_to(ids, (len(kept), 1, len(ids)))
    both = jax.jit(
        lambda given: [
            token_logprobs(hidden, targets, jnp.float64(1.0), lambda x: x, 1, support)[0]
            for support in (None, given)
        ]
    )(support_ids)
    sampled = p[kept] / mass
    over_all, over_kept = (sampled @ (np.exp(np.asarray(lp)[:, 0]) / sampled) for lp in both)
    assert over_all == pytest.approx(mass, rel=1e-12) and over_kept == pytest.approx(1.0, rel=1e-12)
