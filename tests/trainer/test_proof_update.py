"""A whole step through the trainer, every update of it, against the oracle: rewards to advantages,
what is given beforehand, mini-batches, micro-batches, the compiled loss. The oracle says what an
update's loss is to each token's log-prob and entropy; the model's own derivative carries that to
the parameters. The model is a table of next tokens by the token before, so that much compiles in
little time; where it says so, a transformer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_advantage
import pytest
from small import QWEN3, num_compiled, random_groups, random_parameters, relative, roles, whole
from tiny_runs import forget_programs

from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.model import TeacherSection
from shoal.config.sections.optimizer import BatchSection, OptimizerSection
from shoal.model.transformer import Model
from shoal.records import Group, StopReason
from shoal.runs.metrics import is_clock
from shoal.trainer.batch import BatchLayout, TokenTerms, pack, unpack
from shoal.trainer.loss import TokenOutputs, make_objective
from shoal.trainer.scorers import ParameterScorer
from shoal.trainer.step import Learner
from shoal.trainer.teachers import FixedTeacher, Teachers
from shoal.trainer.update import Updater, UpdateResult, needs_all_groups, num_scorings

ARCHITECTURE = replace(QWEN3, num_layers=1, vocab_size=48)
MAX_TOKENS, TEMPERATURE, TEACHER_COEF = 8, 0.9, 0.3
P, G = 5, 3

RICH = AlgorithmSection(
    loss="grpo",
    clip_low=0.02,
    clip_high=0.03,
    clip_dual=1.1,
    kl="k3",
    kl_coef=0.2,
    kl_weighted=True,
    entropy_coef=0.02,
    aggregation="seq-mean-token-mean",
    correction="tis",
    correction_cap=1.1,
    mask_truncated=True,
    num_epochs=2,
    num_minibatches=2,
)
CASES = {
    "in the loss": RICH,
    "in the reward": AlgorithmSection(
        advantage="reinforce++",
        loss="gspo",
        clip_low=0.01,
        clip_high=0.01,
        kl="k1",
        kl_coef=0.1,
        kl_placement="reward",
        aggregation="token-mean",
        correction="mis",
        correction_level="geometric",
        correction_cap=1.05,
        num_epochs=2,
    ),
    "renormalised": AlgorithmSection(
        advantage="rloo",
        loss="cispo",
        clip_low=0.0,
        clip_high=0.02,
        cispo_bound="both",
        aggregation="prompt-mean",
        zero_std_groups="exclude",
        num_minibatches=2,
    ),
    "whitened over tokens": AlgorithmSection(
        advantage="reinforce++-baseline",
        whiten_over="tokens",
        loss="gspo",
        clip_low=0.01,
        clip_high=0.01,
        aggregation="seq-mean-token-sum",
        correction="tis",
        correction_cap=float("inf"),
        correction_floor=0.9,
        num_epochs=2,
    ),
    "context": AlgorithmSection(
        context_coef=0.5,
        clip_low=0.02,
        clip_high=0.02,
        aggregation="seq-mean-token-sum",
        mask_truncated=True,
        num_epochs=2,
        num_minibatches=2,
    ),
    "several rewards": AlgorithmSection(
        advantage="gdpo",
        loss="gmpo",
        clip_low=0.02,
        clip_high=0.02,
        kl="k2",
        kl_coef=0.3,
        kl_clamp_value=0.01,
        aggregation="seq-mean-token-sum-norm",
        correction="icepop",
        correction_level="sequence",
        correction_floor=0.7,
        correction_cap=1.6,
        rejection="seq_mean_k1",
        rejection_cap=1.02,
        rejection_floor=0.98,
        num_epochs=2,
        mask_truncated=True,
    ),
}


@cache
def parameters(seed: int) -> Any:
    return random_parameters(ARCHITECTURE, seed, scale=2.0)


@cache
def groups() -> tuple[Group, ...]:
    """Sampled tokens with gaps, a completion that is not valid, a truncated one, a group without
    variance; the sampler's log-probs are near the trainer's."""
    sampled = random_groups(ARCHITECTURE, P, G, 7, MAX_TOKENS, seed=3)
    lps = scores(sampled, 0)
    rng = np.random.default_rng(11)
    made = []
    for p, group in enumerate(sampled):
        completions = []
        for g, c in enumerate(group.completions):
            gaps = rng.random(len(c)) < 0.8
            gaps[0] = True
            sampler_logprobs = (lps[p, g] + 0.2 * rng.standard_normal(len(c))).astype(np.float32)
            stop = StopReason.LENGTH if (p, g) == (1, 0) else StopReason.EOS
            completions.append(
                replace(c, logprobs=sampler_logprobs, loss_mask=gaps, stop_reason=stop)
            )
        parts = {"first": rng.integers(0, 2, G).astype(float), "second": rng.standard_normal(G)}
        if p == 2:
            parts = {"first": np.ones(G), "second": np.full(G, 0.1)}
        valid = np.array([(p, g) != (3, 1) for g in range(G)])
        made.append(
            replace(
                group,
                completions=tuple(completions),
                rewards=parts["first"] + 0.5 * parts["second"],
                reward_components=parts,
                reward_weights={"first": 1.0, "second": 0.5},
                valid=valid,
            )
        )
    return tuple(made)


def everything(chosen: Sequence[Group]) -> Any:
    """All completions in one batch."""
    nothing = np.zeros((len(chosen), G))
    (batch,) = pack(
        chosen,
        range(len(chosen)),
        TokenTerms(nothing, nothing),
        BatchLayout([whole(list(chosen))], TEMPERATURE),
    )
    return batch


MODEL = Model(ARCHITECTURE, roles().trainer)


def table_logprobs(
    model: Model, parameters: Any, batch: Any, chunk: int, entropy_gradient: bool = False
) -> Any:
    """In place of `batch_logprobs`: the embedding's products with itself are the logits."""
    table = parameters.embed_tokens
    before = jnp.take_along_axis(batch.tokens, batch.before, axis=1)
    logs = jax.nn.log_softmax(table[before] @ table.T * 300 / batch.temperature)
    lp = jnp.take_along_axis(logs, batch.tokens[..., None], axis=-1)[..., 0]
    entropy = -(jnp.exp(logs) * logs).sum(-1)
    entropy = entropy if entropy_gradient else jax.lax.stop_gradient(entropy)
    return tuple(jnp.where(batch.segment != batch.prompt, x, 0.0) for x in (lp, entropy))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("shoal.trainer.step.batch_logprobs", table_logprobs)

    def outputs(
        model, parameters, batch, chunk, entropy_gradient, teacher, beta, value_head
    ) -> TokenOutputs:
        assert teacher is beta is value_head is None
        logprobs, entropies = table_logprobs(model, parameters, batch, chunk, entropy_gradient)
        return TokenOutputs(logprobs, entropies, divergences=None, values=None, aux=())

    monkeypatch.setattr("shoal.trainer.loss._token_outputs", outputs)
    forget_programs()
    yield
    forget_programs()


LOGPROBS = jax.jit(lambda parameters, batch: table_logprobs(MODEL, parameters, batch, 0, True))


@jax.jit
def pulled(parameters: Any, batch: Any, by_lp: Any, by_entropy: Any) -> Any:
    return jax.vjp(lambda p: table_logprobs(MODEL, p, batch, 0, True), parameters)[1](
        (by_lp, by_entropy)
    )[0]


def scores(chosen: Sequence[Group], seed: int) -> dict[tuple[int, int], np.ndarray]:
    batch = everything(chosen)
    return unpack([batch], [np.asarray(LOGPROBS(parameters(seed), batch.arrays)[0])])


@dataclass
class Done:
    parameters: Any
    gradient: Any
    loss: float
    sums: dict[str, tuple[float, float]]


class Watched(Learner):
    """A learner that keeps what each update saw."""

    done: list[Done]

    def apply(self, state: Any, total: Any) -> Any:
        sums = {}
        for name, (a, b) in total.sums.items():
            sums[name] = (float(a), float(b))
        parameters, gradient = jax.device_get((state.trainable, total.gradient))
        self.done.append(Done(parameters, gradient, float(total.loss), sums))
        return super().apply(state, total)


def run(
    a: AlgorithmSection, micro_tokens: int = 10**9, teacher: bool = False, **mesh: int
) -> tuple[list[Done], UpdateResult, Updater]:
    model = MODEL if not mesh else Model(ARCHITECTURE, roles(**mesh).trainer)
    learner = Watched(model, make_objective(a), OptimizerSection(lr=2e-3, warmup_steps=0), 10)
    learner.done = []

    def put(seed: int) -> Any:
        return jax.device_put(parameters(seed), learner.layout.trainable)

    reference = ParameterScorer(learner, put(1)) if a.kl_coef else None
    teachers = None
    if teacher:
        section = TeacherSection("teacher", coef=TEACHER_COEF)
        teachers = Teachers(section, {"": FixedTeacher(ParameterScorer(learner, put(2)))})
    updater = Updater(
        learner,
        a,
        BatchSection(P, group_size=G, micro_tokens=micro_tokens),
        TEMPERATURE,
        0,
        reference,
        teachers,
        max_tokens=MAX_TOKENS,
    )
    _, outcome = updater.update(learner.init(put(0)), groups(), 0)
    return learner.done, outcome, updater


def settings(a: AlgorithmSection) -> oracle.Settings:
    return oracle.Settings(
        a.loss,
        a.clip_low,
        a.clip_high,
        a.clip_dual,
        a.cispo_bound,
        a.sapo_positive,
        a.sapo_negative,
        a.kl,
        a.kl_coef if a.kl_placement == "loss" else 0.0,
        a.kl_clamp_input,
        a.kl_clamp_value,
        a.kl_weighted,
        a.entropy_coef,
        a.aggregation,
        a.aggregation_tokens or MAX_TOKENS,
        "none" if a.correction == "auto" else a.correction,
        a.correction_level,
        a.correction_cap,
        a.correction_floor,
        a.rejection,
        (a.rejection_floor, a.rejection_cap),
        a.context_coef,
    )


def advantages(a: AlgorithmSection, old_logprobs: dict, ref_logprobs: dict) -> list[list[float]]:
    """Of the whole step, the divergence taken off the reward where it goes there."""

    def listed(values: Any) -> list[list[float | None]]:
        result = []
        for row, group in zip(values, groups(), strict=True):
            result.append(
                [float(v) if ok else None for v, ok in zip(row, group.valid, strict=True)]
            )
        return result

    taken = np.zeros((P, G))
    if a.kl_placement == "reward":
        for (p, g), lp in old_logprobs.items():
            loss_mask = groups()[p].completions[g].loss_mask
            taken[p, g] = a.kl_coef * (lp - ref_logprobs[p, g])[loss_mask].sum()  # k1
    parts = []
    for name in ("first", "second"):
        parts.append(listed([group.reward_components[name] for group in groups()]))
    rewards = listed(np.stack([group.rewards for group in groups()]) - taken)
    lengths = []
    for group in groups():
        lengths.append([int(c.loss_mask.sum()) for c in group.completions])
    found = oracle_advantage.advantages(
        a.advantage,
        rewards,
        a.std_ddof,
        a.std_eps,
        a.std_eps_mode,
        parts,
        [1.0, 0.5],
        lengths if a.whiten_over == "tokens" else None,
    )
    # a bound goes by the sign: noise has none
    result = []
    for row in found:
        result.append([0.0 if abs(x) < 1e-15 else x for x in row])
    return result


def expected(
    a: AlgorithmSection, at: Any, members: Sequence[int], teacher: bool
) -> tuple[float, Any, list, list]:
    """Loss, gradient by the parameters, and the oracle's completions and entropies of one update at
    these parameters."""
    batch = everything(groups())
    lp, entropy = (unpack([batch], [np.asarray(x, np.float64)]) for x in LOGPROBS(at, batch.arrays))
    several = a.num_epochs * a.num_minibatches > 1
    old_logprobs, ref_logprobs, by_teacher = (scores(groups(), seed) for seed in (0, 1, 2))
    advantage = advantages(a, old_logprobs, ref_logprobs)
    keys, completions = [], []
    for p, g in [(p, g) for p in members for g in range(G) if groups()[p].valid[g]]:
        c, rewards = groups()[p].completions[g], groups()[p].rewards[groups()[p].valid]
        if a.zero_std_groups == "exclude" and len(set(rewards)) == 1:
            continue
        if teacher:
            teacher_bonus = TEACHER_COEF * (by_teacher[p, g] - old_logprobs[p, g]).astype(
                np.float64
            )
        else:
            teacher_bonus = 0.0
        has_loss = not (a.mask_truncated and c.stop_reason == StopReason.LENGTH)
        loss_mask = c.loss_mask & has_loss
        before = old_logprobs[p, g].astype(np.float64) if several else lp[p, g]
        keys.append((p, g))
        completions.append(
            oracle.Completion(
                lp[p, g],
                before,
                ref_logprobs[p, g].astype(np.float64),
                loss_mask,
                advantage[p][g] + teacher_bonus,
                c.logprobs.astype(np.float64),
                p,
                ~c.loss_mask & has_loss,
            )
        )
    s, entropies = settings(a), [entropy[key] for key in keys]
    by_lp, by_entropy = (np.zeros(batch.arrays.tokens.shape, np.float32) for _ in range(2))
    for i, (key, slope) in enumerate(zip(keys, oracle.gradients(s, completions), strict=True)):
        by_lp[batch.positions[*key, 0]] = slope
        if a.entropy_coef:
            share = oracle.derivative(
                lambda e, i=i: oracle.loss(
                    s, completions, entropies=[*entropies[:i], e, *entropies[i + 1 :]]
                ),
                entropies[i],
            )
            by_entropy[batch.positions[*key, 0]] = share
    value = oracle.loss(s, completions, entropies=entropies)
    return float(value), pulled(at, batch.arrays, by_lp, by_entropy), completions, entropies


def assert_equals_oracle(
    a: AlgorithmSection,
    done: list[Done],
    outcome: UpdateResult,
    updater: Updater,
    teacher: bool = False,
) -> None:
    """Each update's loss and gradient; the step's means over the tokens that are learnt from."""
    members = []
    for epoch in range(a.num_epochs):
        for m in updater._minibatches(P, 0, epoch):
            members.append(m)
    assert len(done) == len(members) == a.num_epochs * a.num_minibatches
    names = ("tokens", "entropy", "kl", "clip/fraction", "context", "context tokens")
    completions, totals = [], {name: [] for name in names}
    for update, chosen in zip(done, members, strict=True):
        loss, gradient, completions, entropies = expected(
            a, update.parameters, [int(m) for m in chosen], teacher
        )
        completions = [oracle.remaining(settings(a), c) for c in completions]
        for c, entropy in zip(completions, entropies, strict=True):
            totals["tokens"].append(c.loss_mask.sum())
            totals["entropy"].append(entropy[c.loss_mask].sum())
            totals["kl"].append(
                oracle.token_kls(replace(settings(a), weighted=False), c, c.lp).sum()
            )
            totals["clip/fraction"].append(sum(oracle.clipped_tokens(settings(a), c)))
            assert c.context is not None
            totals["context"].append(-c.lp[c.context].sum())
            totals["context tokens"].append(c.context.sum())
        assert update.loss == pytest.approx(loss, rel=1e-4, abs=2e-6)
        assert max(float(np.abs(x).max()) for x in jax.tree.leaves(gradient)) > 1e-4
        for ours, theirs in zip(
            jax.tree.leaves(update.gradient), jax.tree.leaves(gradient), strict=True
        ):
            assert relative(ours, theirs) < 2e-3 or np.abs(ours - theirs).max() < 1e-6
    clipped = sum(np.sum(oracle.clipped_tokens(settings(a), c)) for c in completions)
    assert clipped > 0 or len(done) == 1  # the last update is off-policy enough to reach the bounds
    if needs_all_groups(a, teacher):
        tokens, metrics = sum(totals.pop("tokens")), outcome.metrics.result()
        context, num_context = sum(totals.pop("context")), sum(totals.pop("context tokens"))
        assert num_context > 10
        if a.context_coef:
            assert metrics["context/nll"] == pytest.approx(context / num_context, rel=1e-4)
        else:
            assert "context/nll" not in metrics
        assert a.rejection == "none" or 0 < metrics["correction/rejected"] < 1
        for name in (
            totals if a.kl_coef and a.kl_placement == "loss" else ("entropy", "clip/fraction")
        ):
            assert metrics[name] == pytest.approx(sum(totals[name]) / tokens, rel=1e-3), name


@pytest.mark.slow
@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "name",
    [
        "in the loss",
        *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "in the loss"),
    ],
)
def test_every_update_of_a_step_against_the_oracle(name: str):
    a = CASES[name]
    assert_equals_oracle(a, *run(a, micro_tokens=60))


@pytest.mark.slow
@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("name", CASES)
def test_what_stands_at_tokens_of_context_changes_no_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """Log-probs of the samplers in groups, and in a batch log-probs and advantages, are anything
    but 0 at tokens that were not sampled: the same loss, the same gradient, the same weights."""
    first, outcome, _ = run(CASES[name], micro_tokens=60)
    accumulate, chosen = Learner.accumulate, groups()
    for value in (1e30, -np.inf, np.nan):
        spoilt = tuple(
            replace(
                group,
                completions=tuple(
                    replace(c, logprobs=np.where(c.loss_mask, c.logprobs, value).astype(np.float32))
                    for c in group.completions
                ),
            )
            for group in chosen
        )

        def spoil(self: Any, total: Any, state: Any, batch: Any, value: float = value) -> Any:
            names = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "advantage")
            assert not batch.loss_mask.all()
            return accumulate(
                self,
                total,
                state,
                replace(
                    batch,
                    **{
                        name: np.where(batch.loss_mask, getattr(batch, name), np.float32(value))
                        for name in names
                    },
                ),
            )

        with monkeypatch.context() as patch:
            patch.setitem(globals(), "groups", lambda spoilt=spoilt: spoilt)
            patch.setattr(Learner, "accumulate", spoil)
            done, other, _ = run(CASES[name], micro_tokens=60)
        for one, expected in zip(done, first, strict=True):
            assert one.loss == expected.loss
            for x, y in zip(
                jax.tree.leaves((one.parameters, one.gradient)),
                jax.tree.leaves((expected.parameters, expected.gradient)),
                strict=True,
            ):
                assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        metrics, expected = (
            {name: value for name, value in one.metrics.result().items() if not is_clock(name)}
            for one in (other, outcome)
        )
        assert metrics == expected


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_a_teacher_alone_and_beside_a_reward_against_the_oracle():
    for a in (AlgorithmSection(advantage="none"), AlgorithmSection(advantage="grpo")):
        a = replace(a, aggregation="token-mean", clip_low=0.02, clip_high=0.02, num_epochs=2)
        done, outcome, updater = run(a, teacher=True)
        assert_equals_oracle(a, done, outcome, updater, teacher=True)
        old_logprobs, by_teacher = scores(groups(), 0), scores(groups(), 2)
        log_ratio = np.concatenate(
            [
                (old_logprobs[p, g] - by_teacher[p, g])[groups()[p].completions[g].loss_mask]
                for p, g in old_logprobs
            ]
        )
        assert outcome.metrics.result()["teacher/kl"] == pytest.approx(log_ratio.mean(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_devices_and_micro_batches_change_no_update():
    first, outcome, _ = run(RICH)
    for other in (run(RICH, micro_tokens=30), run(RICH, micro_tokens=60, data=2, fsdp=2)):
        for mine, theirs in zip(other[0], first, strict=True):
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-6)
            for x, y in zip(
                jax.tree.leaves(mine.gradient), jax.tree.leaves(theirs.gradient), strict=True
            ):
                assert relative(x, y) < 2e-3 or np.abs(x - y).max() < 1e-6
        metrics, expected = other[1].metrics.result(), outcome.metrics.result()
        for name in (
            "entropy",
            "clip/fraction",
            "clip/low",
            "sampler_gap/ess",
            "ratio/mean",
            "correction/weight",
        ):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-3), name
        # k3 is e to the power of 10 here: its relative error is the absolute one of a log-ratio of
        # 10.
        assert np.log(metrics["kl"]) == pytest.approx(np.log(expected["kl"]), rel=2e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_lengths_that_drift_over_200_steps_compile_few_updates():
    """Completions grow from 3 tokens to 60 while prompts shrink from 30 to 5."""
    forget_programs()  # those of other lengths would be counted
    learner = Learner(MODEL, make_objective(AlgorithmSection()), OptimizerSection(), 200)
    updater = Updater(
        learner,
        AlgorithmSection(),
        BatchSection(4, group_size=2, micro_tokens=400),
        1.0,
        0,
        longest=90,
    )
    state, rng = learner.init(parameters(0)), np.random.default_rng(0)
    for step in range(200):
        longest, prompt = int(3 * 20 ** (step / 199)), int(30 * 6 ** -(step / 199))
        drawn = random_groups(
            ARCHITECTURE, 4, 2, prompt, max(1, longest - int(rng.integers(0, 3))), seed=step
        )
        state, _ = updater.update(state, drawn, step)
    programs: dict[str, Any] = learner.programs
    assert 2 <= num_compiled(programs["accumulate"]) <= 4  # NUM_SHAPES
    assert num_compiled(programs["apply"]) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_without_a_divergence_nothing_is_scored(monkeypatch: pytest.MonkeyPatch):
    """One update a step reads its own log-probs as old: no forward pass beside it, and no
    reference."""
    calls: list[Any] = []
    score = Learner.score
    monkeypatch.setattr(
        Learner, "score", lambda self, *given: calls.append(given) or score(self, *given)
    )
    for a, passes in (
        (AlgorithmSection(kl_coef=0.0), 0),
        (AlgorithmSection(kl_coef=0.1), 1),
        (AlgorithmSection(kl_coef=0.1, num_epochs=2), 2),
    ):
        calls.clear()
        run(a)
        assert len(calls) == passes == num_scorings(a, TeacherSection())


@pytest.mark.slow
@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "advantage",
    [
        "grpo",
        "dr_grpo",
        "rloo",
        "batch_std",
        "reinforce++",
        "reinforce++-baseline",
        "maxrl",
        "gdpo",
        "none",
    ],
)
def test_constant_rewards_move_nothing(advantage: Any, monkeypatch: pytest.MonkeyPatch):
    same = tuple(
        replace(
            group,
            rewards=np.full(G, 0.1),
            reward_components={"first": np.full(G, 0.1)},
            reward_weights={"first": 1.0},
        )
        for group in groups()
    )
    monkeypatch.setitem(globals(), "groups", lambda: same)
    done, _, _ = run(AlgorithmSection(advantage=advantage))
    for leaf in jax.tree.leaves(done[0].gradient):
        assert (np.asarray(leaf) == 0).all()
