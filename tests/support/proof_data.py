"""Updates to prove the algorithms on: random completions, their layout in a batch, and shoal's loss
of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from shoal.algorithm.aggregation import token_weights
from shoal.algorithm.loss import Objective, policy_log_ratio, policy_loss, token_losses
from shoal.config.choices import AGGREGATIONS, POLICY_LOSSES
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.trainer.batch import LearnerBatch
from shoal.trainer.loss import make_objective

Key = tuple[int, int]
"""(prompt, sibling)"""


@dataclass(frozen=True)
class Update:
    """P x G completions. One that is not `valid` is missing; one that does not count leaves the
    denominator too; one that is `cut`, truncated, has no part in the loss but is counted."""

    completions: list[list[oracle.Completion]]
    entropies: list[list[np.ndarray]]
    valid: np.ndarray
    counts: np.ndarray
    cut: np.ndarray

    @property
    def keys(self) -> list[Key]:
        result = []
        for p, g in zip(*self.valid.nonzero(), strict=True):
            result.append((int(p), int(g)))
        return result

    @property
    def lengths(self) -> np.ndarray:
        lengths = np.array([[int(c.loss_mask.sum()) for c in group] for group in self.completions])
        return np.where(self.cut, 0, lengths)

    def weights(self, mode: str, constant: int = 0) -> np.ndarray:
        return token_weights(
            AGGREGATIONS[mode].load(), self.lengths, self.valid, self.counts, constant
        )

    def counted(self) -> tuple[list[oracle.Completion], list[np.ndarray], list[Key]]:
        """What the oracle sees: completions that count, their entropies and places; nothing drawn
        in a cut one."""
        keys = [key for key in self.keys if self.counts[key]]
        chosen = []
        for p, g in keys:
            chosen.append(
                replace(
                    self.completions[p][g],
                    loss_mask=self.completions[p][g].loss_mask & ~self.cut[p, g],
                )
            )
        return chosen, [self.entropies[p][g] for p, g in keys], keys


def draw_update(
    seed: int, prompts: int = 3, siblings: int = 4, longest: int = 6, plain: bool = False
) -> Update:
    """Ragged completions with tokens that were not drawn, advantages of both signs and one of 0;
    unless `plain`, one completion is not valid, three are cut and one does not count."""
    rng = np.random.default_rng(seed)

    def one(p: int, g: int) -> oracle.Completion:
        size = longest if p == g == 0 else int(rng.integers(2, longest + 1))
        old_logprobs = -0.2 - rng.exponential(1.0, size)
        loss_mask = rng.random(size) < 0.85
        loss_mask[int(rng.integers(size))] = True
        lp, ref_logprobs, sampler_logprobs = (
            old_logprobs + spread * rng.standard_normal(size) for spread in (0.35, 0.6, 0.25)
        )
        advantage = 0.0 if (p, g) == (1, 1) else float(rng.standard_normal())
        return oracle.Completion(
            lp, old_logprobs, ref_logprobs, loss_mask, advantage, sampler_logprobs, p
        )

    completions = [[one(p, g) for g in range(siblings)] for p in range(prompts)]
    entropies = []
    for group in completions:
        entropies.append([rng.exponential(1.0, len(c.lp)) for c in group])
    valid, counts, cut = (np.full((prompts, siblings), value) for value in (True, True, False))
    if not plain:
        valid[0, 2], counts[2, 0] = False, False
        cut[[0, 1, 2], [1, 2, 3]] = True
    return Update(completions, entropies, valid, counts, cut)


@dataclass(frozen=True)
class Layout:
    """An update laid out in [R, T], and where each completion's tokens lie."""

    batch: LearnerBatch
    lp: np.ndarray
    entropy: np.ndarray
    places: dict[Key, tuple[int, slice]]

    def spread(self, weights: np.ndarray) -> np.ndarray:
        """weights[P, G] -> [R, T], 0 at tokens that were not drawn."""
        out = np.zeros(self.lp.shape)
        for key, place in self.places.items():
            out[place] = weights[key]
        return np.where(self.batch.loss_mask, out, 0.0)

    def take(self, values: Any) -> dict[Key, np.ndarray]:
        values = np.asarray(values)
        return {key: values[place] for key, place in self.places.items()}


def layout(
    update: Update,
    per_row: int = 1,
    grid: tuple[int, int] = (12, 40),
    garbage: float = 0.0,
    order: Sequence[int] | None = None,
    dtype: Any = np.float64,
) -> Layout:
    """`per_row` completions in each row, one after the other; `garbage` wherever no drawn token
    stands. One shape for all, the grid [R, T], so that nothing compiles anew. Tokens of a cut
    completion weigh nothing."""
    keys = update.keys if order is None else [update.keys[i] for i in order]
    names = ("lp", "old_logprobs", "ref_logprobs", "sampler_logprobs", "advantage", "entropy")
    values = {name: np.full(grid, garbage, dtype) for name in names}
    segment = np.zeros(grid, np.int32)
    loss_mask = np.zeros(grid, bool)
    weight = np.zeros(grid)
    places = {}
    for number, (p, g) in enumerate(keys):
        row, at = divmod(number, per_row)
        start = int((segment[row] > 0).sum())
        c = update.completions[p][g]
        place = (row, slice(start, start + len(c.lp)))
        segment[place], loss_mask[place], places[p, g] = at + 1, c.loss_mask, place
        weight[place] = c.loss_mask & ~update.cut[p, g]
        own = (
            c.lp,
            c.old_logprobs,
            c.ref_logprobs,
            c.sampler_logprobs,
            c.advantages,
            update.entropies[p][g],
        )
        for name, value in zip(names, own, strict=True):
            values[name][place] = np.where(c.loss_mask, value, garbage)
    lp, entropy = values.pop("lp"), values.pop("entropy")
    nothing = segment * 0
    batch = LearnerBatch(
        nothing,
        nothing,
        nothing,
        segment,
        nothing,
        loss_mask,
        weight,
        temperature=np.float32(1),
        **values,
    )
    return Layout(jax.tree.map(jnp.asarray, batch), lp, entropy, places)


def objective(s: oracle.Settings, **changes: Any) -> Objective:
    """The same settings as shoal takes them."""
    a = AlgorithmSection(
        loss=s.loss,
        clip_low=s.low,
        clip_high=s.high,
        clip_dual=s.dual,
        cispo_bound=s.cispo,  # type: ignore[arg-type]
        sapo_positive=s.positive,
        sapo_negative=s.negative,
        kl=s.kl,
        kl_coef=s.kl_coef,
        kl_clamp_input=s.clamp_input,
        kl_clamp_value=s.clamp_value,
        kl_weighted=s.weighted,
        entropy_coef=s.entropy_coef,
        context_coef=s.context_coef,
        correction=s.correction,
        correction_level=s.level,
        correction_cap=s.cap,
        correction_floor=s.floor,  # type: ignore[arg-type]
        rejection=s.rejection,
        rejection_floor=s.rejection_bounds[0],
        rejection_cap=s.rejection_bounds[1],
    )
    return replace(make_objective(a), **{"use_old": True, **changes})


def loss_by_name(
    name: str,
    lp: jax.Array,
    old_logprobs: jax.Array,
    advantage: jax.Array,
    mask: jax.Array,
    segment: jax.Array,
    **settings: Any,
) -> tuple[jax.Array, Any]:
    """Token losses and metrics of a registered loss; settings that it does not read are left out,
    others default."""
    row = POLICY_LOSSES[name]
    log_ratio = policy_log_ratio(row.ratio, lp, old_logprobs, mask, segment)
    read = {}
    for key, default in row.settings(AlgorithmSection()).items():
        read[key] = settings.get(key, default)
    return policy_loss(row.load(), log_ratio, lp, advantage, mask, segment, **read)


@dataclass(frozen=True)
class UpdateResult:
    """Token losses and what pulls weights back to gradients."""

    laid: Layout
    tokens: np.ndarray
    sums: dict[str, tuple[float, float]]
    maxima: dict[str, float]
    pull: Any

    def loss(self, weights: np.ndarray) -> float:
        return float((self.laid.spread(weights) * self.tokens).sum())

    def gradients(self, weights: np.ndarray) -> tuple[dict[Key, np.ndarray], dict[Key, np.ndarray]]:
        """d loss / d lp and d loss / d entropy of each completion; nothing elsewhere, exactly."""
        pulled = self.pull(jnp.asarray(self.laid.spread(weights), self.tokens.dtype))
        for x in pulled:
            assert (np.asarray(x)[~np.asarray(self.laid.batch.loss_mask)] == 0).all()
        return tuple(self.laid.take(x) for x in pulled)  # type: ignore[return-value]


ARRAYS = (
    "advantage",
    "weight",
    "loss_mask",
    "segment",
    "old_logprobs",
    "sampler_logprobs",
    "ref_logprobs",
)


def by_shoal(laid: Layout, o: Objective) -> UpdateResult:
    def run(lp: jax.Array, entropy: jax.Array) -> Any:
        tokens, sums, maxima = token_losses(
            o, lp, entropy, **{name: getattr(laid.batch, name) for name in ARRAYS}
        )
        return tokens, (sums, maxima)

    tokens, pull, (sums, maxima) = jax.vjp(
        run, jnp.asarray(laid.lp), jnp.asarray(laid.entropy), has_aux=True
    )
    return UpdateResult(
        laid,
        np.asarray(tokens),
        {k: (float(a), float(b)) for k, (a, b) in sums.items()},
        {k: float(a) for k, (a, _) in maxima.items()},
        pull,
    )
