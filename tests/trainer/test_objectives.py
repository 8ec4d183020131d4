"""What a step does with its groups: truncation replayed, groups chosen, a teacher, penalties (runs:
tests/run)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import learner, random_groups, whole
from small_engine import SMALL, make, model, play, request, weights

from shoal.algorithm.advantage import Rewards, Valid
from shoal.algorithm.logprobs import token_logprobs
from shoal.algorithm.loss import Mask, Segments, Tokens
from shoal.checks.settings import algorithm_warnings
from shoal.config.choices import ADVANTAGES, POLICY_LOSSES, Advantage, PolicyLoss
from shoal.config.key import keys_of
from shoal.config.merge import compose
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.model import TeacherSection
from shoal.config.sections.optimizer import BatchSection
from shoal.config.sections.reward import RewardSection
from shoal.config.train import Config
from shoal.job.task import with_overlong
from shoal.model.head import logits
from shoal.model.passes import Prompts
from shoal.model.transformer import forward
from shoal.records import (
    Example,
    Group,
    Purpose,
    RewardFunction,
    SamplingParams,
    ShoalError,
    StopReason,
)
from shoal.runs.metrics import MetricSet
from shoal.tasks.builtin_rewards import PENALTY, overlong_punishment
from shoal.trainer.batch import BatchLayout, TokenTerms, pack, unpack
from shoal.trainer.loop import Run
from shoal.trainer.loss import batch_logprobs, make_objective
from shoal.trainer.prompts import PromptStream
from shoal.trainer.schedule import schedule_of
from shoal.trainer.step_table import StepTable
from shoal.trainer.teachers import Teachers
from shoal.trainer.update import PrecomputedScores, Updater

# ---- truncation


def as_group(row, drawn):
    siblings = tuple(drawn[row, index] for index in range(4))
    return Group(
        Purpose.TRAIN,
        0,
        0,
        Example(row, "q"),
        request(row).prompt_ids,
        siblings,
        ("",) * 4,
        np.arange(4.0),
        {},
        np.ones(4, bool),
    )


@pytest.mark.slow
def test_truncated_samples_are_replayed_and_without_that_the_ratio_is_the_kept_mass():
    engine = make(truncated=True, max_support=96)
    params = SamplingParams(temperature=0.9, top_p=0.8, max_tokens=24)
    drawn = play(engine, [request(row, params=params) for row in (0, 1)])
    made = [as_group(row, drawn) for row in (0, 1)]
    nothing = np.zeros((2, 4))
    replayed, ignored = (
        pack(
            made,
            (0, 1),
            TokenTerms(nothing, nothing),
            BatchLayout([whole(made)], 0.9, max_support=k),
        )[0]
        for k in (96, 0)
    )
    parameters = weights(SMALL)
    lp, full = (
        unpack([one], [np.asarray(batch_logprobs(model(SMALL), parameters, one.arrays, 2**25)[0])])
        for one in (replayed, ignored)
    )
    ratios, masses = [], []
    for (number, index), values in full.items():
        completion = made[number].completions[index]
        assert np.abs(lp[number, index] - completion.logprobs).max() < 2e-5
        support_ids = mass_kept(parameters, made[number].prompt_ids, completion)
        np.testing.assert_allclose(np.exp(values - completion.logprobs), support_ids, rtol=1e-4)
        ratios.append(np.exp(values - completion.logprobs))
        masses.append(support_ids)
    mean = np.concatenate(ratios).mean()
    assert mean == pytest.approx(np.concatenate(masses).mean(), rel=1e-5)
    assert 0.8 <= mean < 0.95  # a ratio that should be 1: the bias of uncorrected truncation


@jax.jit
def all_scores(parameters, ids, length):
    """Logits of ids[1, T], of which the first `length` count."""
    size = ids.shape[1]
    m = model(SMALL)
    hidden, _ = forward(
        m, parameters, ids, jnp.arange(size)[None], Prompts.of(m, length[None], size)
    )
    return logits(m, parameters, hidden)


def mass_kept(parameters, prompt, completion):
    """Share of the whole distribution that the kept tokens hold, at each token."""
    tokens = np.concatenate([prompt, completion.token_ids])
    ids = np.zeros((1, 256), np.int32)
    ids[0, : len(tokens)] = tokens
    scores = np.asarray(all_scores(parameters, ids, np.int32(len(tokens))))[
        0, len(prompt) - 1 : len(tokens) - 1
    ]
    scores = scores.astype(np.float64) / 0.9
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.array(
        [p[t, row[row >= 0]].sum() for t, row in enumerate(completion.extra["support_ids"])]
    )


# ---- dynamic sampling


def judged(correct=None, valid=(True, True, True), weights=None, **parts):
    """A group whose reward functions gave these values, or could not judge (None)."""
    components = {}
    for name, values in parts.items():
        components[name] = np.array(values, float)
    weights = weights or dict.fromkeys(parts, 1.0)
    rewards = sum(
        (weights[name] * np.nan_to_num(values) for name, values in components.items()), np.zeros(3)
    )
    return Group(
        Purpose.TRAIN,
        0,
        0,
        Example(0, "q"),
        np.ones(1, int),
        (),
        ("",) * 3,
        rewards,
        components,
        np.array(valid),
        None if correct is None else np.array(correct),
        reward_weights=weights,
    )


def useful(group, *words):
    """As the loop asks with this command line."""
    config, _ = compose("train", ["algorithm.dynamic_sampling=true", *words])
    return Run.is_useful(SimpleNamespace(config=config), group)  # type: ignore[arg-type]


OVERLONG = "reward.overlong_buffer_tokens=4"


def test_groups_are_chosen_by_what_is_right_not_by_penalties():
    """DAPO, eq. 11: 0 < number right < G. Length alone teaches nothing that the filter is for."""
    wrong = judged([False] * 3, right=[0, 0, 0], overlong=[0, -0.5, -1])
    assert not useful(wrong, OVERLONG) and useful(
        wrong, OVERLONG, "algorithm.dynamic_sampling_by=reward"
    )
    format = judged([True] * 3, right=[1, 1, 1], format=[0, 1, 1])
    assert not useful(format) and useful(format, "algorithm.dynamic_sampling_by=reward")
    partly = judged([True, False, False], right=[1, 0, 0])
    assert useful(partly) and not useful(replace(partly, valid=np.array([False, True, True])))
    # the penalty evens the reward out
    hidden = judged([True, False, False], right=[1, 0, 0], overlong=[-1, 0, 0])
    assert useful(hidden, OVERLONG) and not useful(
        hidden, OVERLONG, "algorithm.dynamic_sampling_by=reward"
    )


def test_without_a_check_groups_are_chosen_by_the_reward_less_the_penalty():
    same = judged(right=[0.1, 0.1, 0.1], half=[0.7, 0.7, 0.7], overlong=[0, -0.35, -1])
    assert not useful(same, OVERLONG) and useful(same)  # one's own function may have that name
    assert useful(judged(right=[0.1, 0.1, 0.2], overlong=[0, 0, -0.1]), OVERLONG)
    # A completion of which only the penalty says something is not compared.
    assert not useful(judged(right=[1, np.nan, 1], overlong=[0, -1, 0]), OVERLONG)
    added = with_overlong((), RewardSection(overlong_buffer_tokens=4), 8)[-1].name
    assert added == PENALTY


def test_groups_are_chosen_by_numbers_that_a_reward_function_logs():
    """verl's filter_groups: metric=acc is the function's own entry, another metric another one."""
    graded = judged([True, True, True], right=[1, 0.5, 0])
    assert not useful(graded)
    partly = replace(graded, extra={"acc": [True, False, True], "length": [3, 3, None]})
    assert useful(partly) and not useful(partly, "algorithm.dynamic_sampling_by=length")
    same = replace(judged(right=[1, 0.5, 0]), extra={"acc": [1.0, 1.0, 1.0]})
    by_reward = "algorithm.dynamic_sampling_by=reward"
    assert not useful(same) and useful(same, by_reward)
    # Only of what the loss counts, and where no completion has one the verdict decides.
    assert not useful(replace(partly, valid=np.array([True, False, True])))
    assert useful(replace(judged([True, False, True], right=[1, 1, 1]), extra={"acc": [None] * 3}))


def test_the_score_is_the_reward_without_the_penalty():
    late = judged([True, False, True], right=[1, 1, 1], overlong=[0, 0, -1])
    by_score = "algorithm.dynamic_sampling_by=score"
    assert not useful(late, OVERLONG, by_score) and useful(late, by_score)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, r"dynamic_sampling_by=pred: no reward function gives .*\(given: none\)"),
        ({"acc": [1, 0, 1]}, r"\(given: acc\); let one return it in its dict"),
        ({"pred": ["42", "7", "42"]}, "logged '42' as pred, which is no number"),
    ],
)
def test_a_number_that_no_function_logs_is_named(extra, said):
    group = replace(judged(right=[1, 0, 1]), extra=extra)
    with pytest.raises(ShoalError, match=said):
        useful(group, "algorithm.dynamic_sampling_by=pred")


def test_functions_that_are_normalised_apart_count_apart_where_they_have_a_weight():
    even = {"first": [1, 0, 0], "second": [0, 1, 1]}
    gdpo = "algorithm.advantage=gdpo"
    assert useful(judged(**even), gdpo) and not useful(judged(**even))
    logged = judged(weights={"first": 1.0, "logged": 0.0}, first=[0, 0, 0], logged=[0, 1, 2])
    for words in ([gdpo], [gdpo, "algorithm.dynamic_sampling_by=reward"]):
        assert not useful(logged, *words)
    assert (StepTable.of([logged], AlgorithmSection(advantage="gdpo")).advantages == 0).all()
    late = judged(first=[0, 0, 0], overlong=[0, 0, -1])
    assert not useful(late, gdpo, OVERLONG) and useful(
        late, gdpo, OVERLONG, "algorithm.dynamic_sampling_by=reward"
    )
    assert not useful(replace(late, correct=np.array([True] * 3)), gdpo)


def test_further_prompts_leave_the_order_where_it_was_if_there_are_none():
    rows = [Example(row, "x" * (1 + 9 * (row % 2))) for row in range(8)]
    stream = PromptStream(rows, lambda example: np.zeros(len(example.prompt)), 0, 5)
    first = stream.next(3)
    taken = {prepared.example.row for prepared in first}
    [last] = stream.more(4, taken)  # four rows of eight are short enough
    before = stream.state()
    assert stream.more(2, taken | {last.example.row}) == [] and stream.state() == before


# ---- a teacher


def updater(algorithm=None, **changes):
    return Updater(
        learner(SMALL), algorithm or AlgorithmSection(), BatchSection(2, 2), 1.0, 0, **changes
    )


def test_a_teachers_part_of_the_advantage_by_hand():
    made = random_groups(SMALL, 1, 2, 4, 3)
    made = [
        replace(
            made[0],
            completions=(made[0].completions[0],),
            rewards=np.ones(1),
            valid=np.ones(1, bool),
        )
    ]
    given = PrecomputedScores(
        old_logprobs={(0, 0): np.array([-1.0, -2, -3], np.float32)},
        teacher_logprobs={(0, 0): np.array([-0.5, -4, -3], np.float32)},
    )
    recorded = MetricSet()
    teachers = Teachers(TeacherSection("teacher", coef=0.5), {})
    teacher_bonus = updater(teachers=teachers)._teacher_bonus(made, given, recorded)
    assert teacher_bonus is not None
    np.testing.assert_array_equal(teacher_bonus[0, 0], [0.25, -1.0, 0.0])  # half of teacher - old
    assert recorded.result()["teacher/kl"] == pytest.approx((-0.5 + 2 + 0) / 3)
    ones = np.ones((1, 1))
    batch = pack(
        made,
        [0],
        TokenTerms(2 * ones, ones, teacher_bonus=teacher_bonus),
        BatchLayout([whole(made)], 1.0),
    )[0]
    np.testing.assert_array_equal(unpack([batch], [batch.arrays.advantage])[0, 0], [2.25, 1.0, 2.0])


def test_a_teachers_part_of_the_advantage_is_that_of_trls_minillm():
    """By its record of TRL 1.8: the log-probs of both models, by the chunked head."""
    record = json.loads((Path(__file__).parents[1] / "algorithm/trl_divergence.json").read_text())
    labels = np.array([record["minillm"]["labels"]], np.int32)

    def logprobs_of(which: str) -> np.ndarray:
        head = jnp.array(record[which]["head"], jnp.float32)
        logprobs, _, _ = token_logprobs(
            hidden=jnp.array([record[which]["hidden"]], jnp.float32),
            targets=jnp.array(labels),
            temperature=jnp.float32(record["temperature"]),
            project=lambda states: states @ head.T,
            chunk=2,
        )
        return np.asarray(logprobs[0])

    given = PrecomputedScores(
        old_logprobs={(0, 0): logprobs_of("student")},
        teacher_logprobs={(0, 0): logprobs_of("teacher")},
    )
    [group] = random_groups(SMALL, 1, 1, 4, labels.shape[1])
    completion = replace(group.completions[0], loss_mask=np.ones(labels.shape[1], bool))
    teachers = Teachers(TeacherSection("teacher"), {})
    bonus = updater(teachers=teachers)._teacher_bonus(
        [replace(group, completions=(completion,))], given, MetricSet()
    )
    assert bonus is not None
    np.testing.assert_allclose(bonus[0, 0], record["minillm"]["advantages"], rtol=2e-5)


# ---- divergence in the reward, cut completions, penalties


def test_a_divergence_in_the_reward_by_hand():
    a = AlgorithmSection(kl="k1", kl_placement="reward", kl_coef=0.1, advantage="dr_grpo")
    made = []
    for group in random_groups(SMALL, 1, 2, 4, 3):
        made.append(replace(group, rewards=np.array([1.0, 0.0])))
    made[0] = replace(
        made[0],
        completions=tuple(
            replace(c, token_ids=c.token_ids[:2], loss_mask=np.array([True, i == 0]))
            for i, c in enumerate([made[0].completions[0]] * 2)
        ),
    )
    given = PrecomputedScores(
        old_logprobs={
            (0, 0): np.array([-1.0, -1], np.float32),
            (0, 1): np.array([-1.0, -9], np.float32),
        },
        ref_logprobs={
            (0, 0): np.array([-2.0, -3], np.float32),
            (0, 1): np.array([-2.0, -3], np.float32),
        },
    )
    recorded = MetricSet()
    penalty = updater(a)._kl_penalty(made, StepTable.of(made, a), given, recorded)
    assert penalty is not None
    # 0.1 x (1 + 2), and for its one sampled token 0.1 x 1
    np.testing.assert_allclose(penalty, [[0.3, 0.1]], rtol=1e-6)
    assert recorded.result()["kl"] == pytest.approx(4 / 3)
    # (0.7, -0.1) - 0.3
    np.testing.assert_allclose(StepTable.of(made, a, penalty).advantages, [[0.4, -0.4]], rtol=1e-6)
    np.testing.assert_allclose(StepTable.of(made, a).rewards, [[1.0, 0.0]])
    # A completion that was cut and is masked loses its reward's part all the same; the metric is of
    # those trained on.
    first, second = made[0].completions
    made[0] = replace(made[0], completions=(replace(first, stop_reason=StopReason.LENGTH), second))
    recorded, masked = MetricSet(), replace(a, mask_truncated=True)
    again = updater(masked)._kl_penalty(made, StepTable.of(made, masked), given, recorded)
    np.testing.assert_array_equal(again, penalty)
    assert recorded.result()["kl"] == pytest.approx(1.0)


def test_cut_completions_leave_the_loss_and_stay_in_the_mean():
    made = random_groups(SMALL, 1, 3, 4, 4)
    cut = replace(made[0].completions[1], stop_reason=StopReason.LENGTH)
    made = [
        replace(
            made[0],
            completions=(made[0].completions[0], cut, made[0].completions[2]),
            rewards=np.array([1.0, 3.0, 2.0]),
        )
    ]
    for masked in (False, True):
        a = AlgorithmSection(
            advantage="dr_grpo", aggregation="seq-mean-token-sum", mask_truncated=masked
        )
        table = StepTable.of(made, a)
        np.testing.assert_array_equal(table.advantages, [[-1, 1, 0]])
        batch = updater(a)._pack_update(made, table, np.arange(1), None, None, None)[0]
        weight = {}
        for (_, index), values in unpack([batch], [batch.arrays.weight]).items():
            weight[index] = float(values[0])
        assert weight == {
            0: pytest.approx(1 / 3),
            1: 0 if masked else pytest.approx(1 / 3),
            2: pytest.approx(1 / 3),
        }


def with_context(group: Group, masks: list[list[int]], **changes: Any) -> Group:
    """The group with completions of which these tokens were sampled (1) or are context (0)."""
    completions = []
    for completion, mask in zip(group.completions, masks, strict=True):
        size = len(mask)
        completions.append(
            replace(
                completion,
                token_ids=np.resize(completion.token_ids, size),
                logprobs=np.resize(completion.logprobs, size),
                loss_mask=np.array(mask, bool),
                versions=np.zeros(size, np.int32),
            )
        )
    return replace(group, completions=tuple(completions), **changes)


def context_weights(a: AlgorithmSection, made: list[Group], members: list[int]) -> dict:
    """Completion -> the weights of its tokens, of the update of these groups."""
    packed = updater(a)._pack_update(
        made, StepTable.of(made, a), np.array(members), None, None, None
    )
    values = unpack(packed, [batch.arrays.weight for batch in packed])
    return {key: of_completion.tolist() for key, of_completion in values.items()}


def test_context_has_a_weight_of_one_over_its_number_in_an_update():
    first, second, third = random_groups(SMALL, 3, 2, 4, 4)
    made = [
        # The second completion has no reward, and so no part, also not in the number.
        with_context(
            first,
            [[1, 0, 0, 1], [1, 0, 1]],
            rewards=np.array([1.0, np.nan]),
            valid=np.array([True, False]),
        ),
        with_context(second, [[1, 0], [1, 1]], rewards=np.array([0.0, 1.0])),
        with_context(third, [[0, 1], [0, 1]], rewards=np.array([0.0, 1.0])),
    ]
    a = AlgorithmSection(context_coef=0.1, num_minibatches=2)
    got = context_weights(a, made, [0, 1])
    of_sample = pytest.approx(1 / 5)  # of five sampled tokens, whatever context there is
    of_context = pytest.approx(1 / 3)
    assert got == {
        (0, 0): [of_sample, of_context, of_context, of_sample],
        (1, 0): [of_sample, of_context],
        (1, 1): [of_sample, of_sample],
    }
    assert context_weights(a, made, [2])[2, 0] == [0.5, 0.5]
    without = context_weights(replace(a, context_coef=0.0), made, [0, 1])
    # The first group has one reward and so no advantage: it is computed for its context alone.
    assert without == {(1, 0): [of_sample, 0.0], (1, 1): [of_sample, of_sample]}
    cut = replace(made[1].completions[0], stop_reason=StopReason.LENGTH)
    made[1] = replace(made[1], completions=(cut, made[1].completions[1]))
    masked = context_weights(replace(a, mask_truncated=True), made, [0, 1])
    assert masked[1, 0] == [0.0, 0.0] and masked[0, 0][1] == 0.5


def test_without_context_there_are_no_weights_of_it():
    made = random_groups(SMALL, 2, 2, 4, 4)
    plain = context_weights(AlgorithmSection(entropy_coef=0.1), made, [0, 1])
    assert plain == context_weights(
        AlgorithmSection(entropy_coef=0.1, context_coef=0.1), made, [0, 1]
    )


def test_context_is_predicted_over_the_whole_vocabulary():
    [group] = random_groups(SMALL, 1, 2, 4, 4)
    group = with_context(group, [[1, 0, 1], [1, 1]])
    completions = []
    for completion in group.completions:
        # A sampler records zeros at tokens that it did not choose.
        support_ids = np.zeros((len(completion), 2), np.int32)
        support_ids[completion.loss_mask] = [5, -1]
        completions.append(replace(completion, extra={"support_ids": support_ids}))
    made = [replace(group, completions=tuple(completions))]
    ones = np.ones((1, 2))
    (batch,) = pack(
        made, [0], TokenTerms(ones, ones), BatchLayout([whole(made)], 1.0, max_support=3)
    )
    got = unpack([batch], [batch.arrays.support_ids])
    np.testing.assert_array_equal(got[0, 0], [[5, -1, -1], [-1, -1, -1], [5, -1, -1]])


def test_the_overlong_penalty_by_hand():
    told = overlong_punishment(100, 20)(completion_ids=[[0] * n for n in (1, 80, 85, 99, 100, 120)])
    np.testing.assert_allclose(told, [0, 0, -0.25, -0.95, -1, -1])
    own = (RewardFunction("r", lambda **_: [0.0], 1.0),)
    assert with_overlong(own, RewardSection(), 100) is own
    paper = with_overlong(own, RewardSection(overlong_buffer_tokens=-1), 100)[1]
    assert paper.function(completion_ids=[[0] * 90]) == [-0.5]  # a fifth
    with pytest.raises(ShoalError, match="overlong_buffer_tokens=20: expected at most"):
        with_overlong(own, RewardSection(overlong_buffer_tokens=20), 10)


@pytest.mark.parametrize(
    ("words", "lag", "every"),
    [
        ([], 0, 1),
        (["train.weight_sync_interval=3"], 0, 3),
        (["train.max_staleness=1"], 1, 1),
        (["train.weight_sync_interval=2", "train.max_staleness=3"], 2, 2),
    ],
)
def test_staleness_and_publication(words, lag, every):
    config, _ = compose("train", words)
    assert (schedule_of(config.train).lag, schedule_of(config.train).weight_sync_interval) == (
        lag,
        every,
    )


# ---- a loss and an advantage of a user


def bounded(
    log_ratio: Tokens,
    lp: Tokens,
    advantage: Tokens,
    mask: Mask,
    segment: Segments,
    *,
    clip_high: float,
) -> tuple[Tokens, Mask, Mask]:
    """-min(ratio, 1 + high) A."""
    ratio = jnp.exp(log_ratio)
    return (
        -jnp.minimum(ratio, 1 + clip_high) * advantage,
        jnp.zeros_like(mask),
        ratio > 1 + clip_high,
    )


def median(rewards: Rewards, valid: Valid, **unread: object) -> Rewards:
    """r - median of the group."""
    middle = np.nanmedian(np.where(valid, rewards, np.nan), axis=1, keepdims=True)
    return np.where(valid, rewards - middle, 0.0)


@pytest.mark.slow
def test_a_loss_and_an_advantage_are_one_function_and_one_row_each(monkeypatch):
    """docs/algorithms.md, "Adding a loss": names, help, errors, warnings and a step follow from the
    two rows."""
    monkeypatch.setitem(POLICY_LOSSES, "bounded", PolicyLoss(f"{__name__}:bounded", ("clip_high",)))
    monkeypatch.setitem(ADVANTAGES, "median", Advantage(f"{__name__}:median"))
    words = ["algorithm.loss=bounded", "algorithm.advantage=median", "algorithm.clip_high=0.3"]
    config, _ = compose("train", words)
    assert keys_of(Config)["algorithm.loss"].type_text.endswith("reinforce | bounded")
    with pytest.raises(ShoalError, match=r"expected one of grpo, .*, sft, median"):
        compose("train", ["algorithm.advantage=mean"])
    [(_, warning)] = algorithm_warnings(config)
    assert "algorithm.clip_high=0.3 cannot act" in warning
    one = learner(SMALL, make_objective(config.algorithm))
    state, made = one.init(weights(SMALL)), random_groups(SMALL, 2, 2, 9, 8)
    after, result = Updater(one, config.algorithm, BatchSection(2, 2), 1.0, 0).update(
        state, made, 0
    )
    assert int(after.updates) == 1 and result.metrics.result()["grad_norm"] > 0
    np.testing.assert_array_equal(
        result.table.advantages, median(result.table.rewards, result.table.valid)
    )
