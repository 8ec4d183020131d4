"""What a step does with its groups, in whole runs: truncation replayed, further groups, a teacher, penalties."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import learner, random_groups
from test_sampler import SMALL, make, model, play, request, weights
from tiny_models import write_model_with_tokenizer
from tiny_runs import Workshop, groups, metrics, parameters_of, quick_compilation, same_bits

from shoal import cli
from shoal.algorithm.policy_loss import POLICY_LOSSES
from shoal.config.loading import compose
from shoal.config.schema import AlgorithmSection, BatchSection, RewardSection
from shoal.model.attention import prefill_attention
from shoal.model.transformer import forward, logits
from shoal.report.metrics import MetricSet, is_clock
from shoal.run.parts import schedule_of
from shoal.run.preflight.settings import BOUNDS, algorithm_warnings, check_trainable
from shoal.run.task import with_overlong
from shoal.tasks.library import overlong_punishment
from shoal.tasks.task import Task
from shoal.trainer.batch import choose_shape, pack
from shoal.trainer.curriculum import PromptStream
from shoal.trainer.loop import PENALTY, Run
from shoal.trainer.loss import batch_logprobs
from shoal.trainer.step_table import StepTable
from shoal.trainer.update import PrecomputedLogprobs, Updater
from shoal.types import Example, Group, Purpose, RewardFunction, SamplingParams, ShoalError, StopReason


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    with quick_compilation():
        yield Workshop(tmp_path_factory.mktemp("objectives"))


# ---- truncation


def as_group(row, drawn):
    siblings = tuple(drawn[row, index] for index in range(4))
    return Group(Purpose.TRAIN, 0, 0, Example(row, "q"), request(row).prompt_ids, siblings, ("",) * 4, np.arange(4.0),
                 {}, np.ones(4, bool))


def test_truncated_samples_are_replayed_and_without_that_the_ratio_is_the_kept_mass():
    engine = make(truncated=True, max_support=96)
    params = SamplingParams(temperature=0.9, top_p=0.8, max_tokens=24)
    drawn = play(engine, [request(row, params=params) for row in (0, 1)])
    made = [as_group(row, drawn) for row in (0, 1)]
    nothing = np.zeros((2, 4))
    shape = choose_shape(made, 2, 4, 10**6, 1)
    replayed, ignored = (pack(made, (0, 1), nothing, nothing, shape, 0.9, max_support=k)[0] for k in (96, 0))
    parameters = weights(SMALL)
    lp, full = (one.unpack(np.asarray(batch_logprobs(model(SMALL), parameters, one.arrays, 2**25)[0]))
                for one in (replayed, ignored))
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
    hidden, _ = forward(model(SMALL), parameters, ids, jnp.arange(size)[None], prefill_attention(length[None], size))
    return logits(model(SMALL), parameters, hidden)


def mass_kept(parameters, prompt, completion):
    """Share of the whole distribution that the kept tokens hold, at each token."""
    tokens = np.concatenate([prompt, completion.token_ids])
    ids = np.zeros((1, 256), np.int32)
    ids[0, : len(tokens)] = tokens
    scores = np.asarray(all_scores(parameters, ids, np.int32(len(tokens))))[0, len(prompt) - 1 : len(tokens) - 1]
    scores = scores.astype(np.float64) / 0.9
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.array([p[t, row[row >= 0]].sum() for t, row in enumerate(completion.extra["support_ids"])])


def test_a_run_with_truncation_agrees_with_its_sampler(workshop):
    cut = ("sampling.top_p=0.7", "sampling.top_k=30", "sampling.max_support=20", "algorithm.num_minibatches=2")
    run = workshop.train("cut", *cut)
    assert all(row["sampler_gap/logprob_max"] < 1e-4 for row in metrics(run))
    stored = groups(run, 1)[0]["completions"][0]
    assert all(1 <= len(support_ids) <= 20 and token in support_ids
               for support_ids, token in zip(stored["support_ids"], stored["token_ids"], strict=True))
    biased = workshop.train("biased", *cut, "algorithm.match_sampling_support=false")
    assert all(row["sampler_gap/logprob_mean"] > 0.05 for row in metrics(biased))
    assert "support_ids" not in groups(biased, 1)[0]["completions"][0]


def test_a_truncated_step_is_learnt_again_from_its_stored_groups(workshop, capsys):
    run = workshop.train("cut-replay", "sampling.top_p=0.7", "checkpoint.every=0", "steps=3")
    capsys.readouterr()
    assert cli.main(["replay", str(run), "step=3", "group=1", "json=true"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["identical"] is True and told["weights"]["updates_learnt_again"] == 2


# ---- dynamic sampling



@pytest.fixture(scope="module")
def choosy(workshop):
    """Words of a run whose reward tells the completions of every other prompt apart, and none of the others."""
    file = workshop.folder / "choosy.py"
    file.write_text('''\
def choosy(completions, answer, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(map(ord, text)) % 3 if int(gold) % 2 else 1.0 for text, gold in zip(texts, answer)]
''')
    return (f"reward={file}:choosy", "algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_by=reward",
            "batch.prompts_per_step=4", "steps=3")


def judged(correct=None, valid=(True, True, True), weights=None, **parts):
    """A group whose reward functions gave these values, or could not judge (None)."""
    components = {name: np.array(values, float) for name, values in parts.items()}
    weights = weights or dict.fromkeys(parts, 1.0)
    rewards = sum((weights[name] * np.nan_to_num(values) for name, values in components.items()), np.zeros(3))
    return Group(Purpose.TRAIN, 0, 0, Example(0, "q"), np.ones(1, int), (), ("",) * 3, rewards, components,
                 np.array(valid), None if correct is None else np.array(correct), reward_weights=weights)


def useful(group, *words):
    """As the loop asks with this command line."""
    config, _ = compose("train", ["algorithm.dynamic_sampling=true", *words])
    return Run.is_useful(SimpleNamespace(config=config), group)  # type: ignore[arg-type]


OVERLONG = "reward.overlong_buffer_tokens=4"


def test_groups_are_chosen_by_what_is_right_not_by_penalties():
    """DAPO, eq. 11: 0 < number right < G. Length alone teaches nothing that the filter is for."""
    wrong = judged([False] * 3, right=[0, 0, 0], overlong=[0, -0.5, -1])
    assert not useful(wrong, OVERLONG) and useful(wrong, OVERLONG, "algorithm.dynamic_sampling_by=reward")
    format = judged([True] * 3, right=[1, 1, 1], format=[0, 1, 1])
    assert not useful(format) and useful(format, "algorithm.dynamic_sampling_by=reward")
    partly = judged([True, False, False], right=[1, 0, 0])
    assert useful(partly) and not useful(replace(partly, valid=np.array([False, True, True])))
    hidden = judged([True, False, False], right=[1, 0, 0], overlong=[-1, 0, 0])  # the penalty evens the reward out
    assert useful(hidden, OVERLONG) and not useful(hidden, OVERLONG, "algorithm.dynamic_sampling_by=reward")


def test_without_a_check_groups_are_chosen_by_the_reward_less_the_penalty():
    same = judged(right=[0.1, 0.1, 0.1], half=[0.7, 0.7, 0.7], overlong=[0, -0.35, -1])
    assert not useful(same, OVERLONG) and useful(same)  # one's own function may have that name
    assert useful(judged(right=[0.1, 0.1, 0.2], overlong=[0, 0, -0.1]), OVERLONG)
    # A completion of which only the penalty says something is not compared.
    assert not useful(judged(right=[1, np.nan, 1], overlong=[0, -1, 0]), OVERLONG)
    added = with_overlong(Task("t", (), {}, ()), RewardSection(overlong_buffer_tokens=4), 8).rewards[-1].name
    assert added == PENALTY


def test_functions_that_are_normalised_apart_count_apart_where_they_have_a_weight():
    even = {"first": [1, 0, 0], "second": [0, 1, 1]}
    gdpo = "algorithm.advantage=gdpo"
    assert useful(judged(**even), gdpo) and not useful(judged(**even))
    logged = judged(weights={"first": 1.0, "logged": 0.0}, first=[0, 0, 0], logged=[0, 1, 2])
    for words in ([gdpo], [gdpo, "algorithm.dynamic_sampling_by=reward"]):
        assert not useful(logged, *words)
    assert (StepTable.of([logged], AlgorithmSection(advantage="gdpo")).advantages == 0).all()
    late = judged(first=[0, 0, 0], overlong=[0, 0, -1])
    assert not useful(late, gdpo, OVERLONG) and useful(late, gdpo, OVERLONG, "algorithm.dynamic_sampling_by=reward")
    assert not useful(replace(late, correct=np.array([True] * 3)), gdpo)


def numbers(run):
    return [{name: value for name, value in row.items() if not is_clock(name)} for row in metrics(run)]


def test_groups_without_variance_are_replaced(workshop, choosy):
    run = workshop.train("dynamic", *choosy)
    for number, row in enumerate(metrics(run), 1):
        stored = groups(run, number)
        assert len(stored) == len({group["row"] for group in stored}) == 4
        assert all(len({c["reward"] for c in group["completions"]}) > 1 for group in stored)
        assert row["groups/nonzero_std"] == 1.0
    assert sum(row["groups/discarded"] for row in metrics(run)) >= 3
    plain = workshop.train("not-dynamic", *choosy, "algorithm.dynamic_sampling=false")
    assert any(row["groups/nonzero_std"] < 1 for row in metrics(plain))
    assert all(row["groups/discarded"] == 0 for row in metrics(plain))


@pytest.mark.parametrize("lag", [0, 1])
def test_dynamic_sampling_resumes_exactly(workshop, choosy, lag):
    whole = workshop.train(f"whole-{lag}", *choosy, f"train.max_staleness={lag}", "checkpoint.every=1",
                           "checkpoint.keep_last=3")
    parts = shutil.copytree(whole, workshop.runs / f"parts-{lag}")
    for version in (2, 3):
        shutil.rmtree(parts / "checkpoints" / str(version))
    (parts / "summary.json").unlink()
    assert cli.main(["train", f"resume={parts}"]) == 0
    assert numbers(parts) == numbers(whole)
    assert same_bits(parameters_of(parts, 3), parameters_of(whole, 3))
    assert [row["staleness"] for row in metrics(whole)] == [0, lag, lag]


def test_a_step_that_cannot_be_filled_goes_on(workshop, choosy):
    run = workshop.train("starved", *choosy, "reward.weights=[0.0]", "algorithm.max_sampling_rounds=2", "steps=1")
    [row] = metrics(run)
    assert row["groups/nonzero_std"] == 0 and row["groups/discarded"] == 8 and row["grad_norm"] == 0
    assert len(groups(run, 1)) == 4


def test_a_failure_in_a_further_round_loses_nothing(workshop, choosy, capsys):
    """The step is saved as a whole: it is asked for again from its first prompt, once the reward is mended."""
    words = [*choosy[1:], "train.max_staleness=1", "checkpoint.every=1"]
    file = workshop.folder / "tired.py"
    text = (workshop.folder / "choosy.py").read_text()
    file.write_text(text.replace("answer, **kwargs", "answer, trainer_state, **kwargs").replace(
        "    texts", """    import os
    flag = os.environ["SHOAL_TEST_FOLDER"] + f"/{trainer_state.global_step}-"
    called = os.listdir(os.environ["SHOAL_TEST_FOLDER"])
    number = len([name for name in called if name.startswith(f"{trainer_state.global_step}-")])
    open(flag + str(number), "w").close()
    if trainer_state.global_step == 1 and number == 5 and os.environ.get("SHOAL_TEST_TIRED"):
        raise ValueError("tired")
    texts""", 1))
    with pytest.MonkeyPatch.context() as patch:
        for name, tired in (("rested", ""), ("tired", "1")):
            folder = workshop.folder / f"calls-{name}"
            folder.mkdir()
            patch.setenv("SHOAL_TEST_FOLDER", str(folder))
            patch.setenv("SHOAL_TEST_TIRED", tired)
            line = workshop.words(name, *words, f"reward={file}:choosy", "reward.workers=0")
            assert cli.main(line) == (cli.USAGE_EXIT_CODE if tired else 0)
        assert "tired" in capsys.readouterr().err
        patch.setenv("SHOAL_TEST_TIRED", "")
        assert cli.main(line) == 0
    assert numbers(workshop.runs / "tired") == numbers(workshop.runs / "rested")


def test_small_data_ends_the_search_not_the_run(workshop, choosy):
    run = workshop.train("small", *choosy, "batch.prompts_per_step=15", "steps=1", "algorithm.max_sampling_rounds=3")
    [row] = metrics(run)
    assert row["groups/discarded"] == 5  # the data has 20 rows: all were asked for, once
    assert len(groups(run, 1)) == 15


def test_further_prompts_leave_the_order_where_it_was_if_there_are_none():
    rows = [Example(row, "x" * (1 + 9 * (row % 2))) for row in range(8)]
    stream = PromptStream(rows, lambda text: np.zeros(len(text)), 0, 5)
    first = stream.next(3)
    taken = {prepared.example.row for prepared in first}
    [last] = stream.more(4, taken)  # four rows of eight are short enough
    before = stream.state()
    assert stream.more(2, taken | {last.example.row}) == [] and stream.state() == before


# ---- a teacher


def test_a_teacher_alone_is_learnt_from(workshop):
    teacher = write_model_with_tokenizer(workshop.folder / "teacher", "qwen3", "chatml", seed=5)
    words = (f"teacher.path={teacher}", "algorithm.advantage=none", "steps=12", "batch.prompts_per_step=4")
    run = workshop.train("taught", *words)
    told = [row["teacher/kl"] for row in metrics(run)]
    assert np.mean(told[-3:]) < 0.8 * np.mean(told[:3])
    assert all(row["advantage/abs_mean"] == 0 for row in metrics(run))
    beside = workshop.train("beside", f"teacher.path={teacher}", "steps=1")
    assert metrics(beside)[0]["advantage/abs_mean"] > 0 and metrics(beside)[0]["teacher/kl"] > 0


def test_a_teacher_of_other_tokens_is_refused(workshop, capsys):
    other = write_model_with_tokenizer(workshop.folder / "other", "llama3", "llama3")
    assert cli.main(workshop.words("other", f"teacher.path={other}")) == cli.USAGE_EXIT_CODE
    assert "its vocabulary is not that of the model" in capsys.readouterr().err


def updater(algorithm=None, **changes):
    return Updater(learner(SMALL), algorithm or AlgorithmSection(), BatchSection(2, 2), 1.0, 0, **changes)


def test_a_teachers_part_of_the_advantage_by_hand():
    made = random_groups(SMALL, 1, 2, 4, 3)
    made = [replace(made[0], completions=(made[0].completions[0],), rewards=np.ones(1), valid=np.ones(1, bool))]
    given = PrecomputedLogprobs(old_logprobs={(0, 0): np.array([-1.0, -2, -3], np.float32)},
                                teacher={(0, 0): np.array([-0.5, -4, -3], np.float32)})
    recorded = MetricSet()
    teacher_bonus = updater(teacher_coef=0.5)._teacher_bonus(made, given, recorded)
    assert teacher_bonus is not None
    np.testing.assert_array_equal(teacher_bonus[0, 0], [0.25, -1.0, 0.0])  # half of teacher - old
    assert recorded.result()["teacher/kl"] == pytest.approx((-0.5 + 2 + 0) / 3)
    shape = choose_shape(made, 1, 1, 1000, 1)
    ones = np.ones((1, 1))
    batch = pack(made, [0], 2 * ones, ones, shape, 1.0, teacher_bonus=teacher_bonus)[0]
    np.testing.assert_array_equal(batch.unpack(batch.arrays.advantage)[0, 0], [2.25, 1.0, 2.0])


# ---- divergence in the reward, cut completions, penalties


def test_a_divergence_in_the_reward_by_hand():
    a = AlgorithmSection(kl="k1", kl_placement="reward", kl_coef=0.1, advantage="dr_grpo")
    made = [replace(group, rewards=np.array([1.0, 0.0])) for group in random_groups(SMALL, 1, 2, 4, 3)]
    made[0] = replace(made[0], completions=tuple(
        replace(c, token_ids=c.token_ids[:2], loss_mask=np.array([True, i == 0])) for i, c in enumerate(
            [made[0].completions[0]] * 2)))
    given = PrecomputedLogprobs(
        old_logprobs={(0, 0): np.array([-1.0, -1], np.float32), (0, 1): np.array([-1.0, -9], np.float32)},
        ref_logprobs={(0, 0): np.array([-2.0, -3], np.float32), (0, 1): np.array([-2.0, -3], np.float32)})
    shape, recorded = choose_shape(made, 1, 2, 100, 1), MetricSet()
    penalty = updater(a)._kl_penalty(made, StepTable.of(made, a), given, shape, recorded)
    assert penalty is not None
    np.testing.assert_allclose(penalty, [[0.3, 0.1]], rtol=1e-6)  # 0.1 x (1 + 2), and for its one sampled token 0.1 x 1
    assert recorded.result()["kl"] == pytest.approx(4 / 3)
    np.testing.assert_allclose(StepTable.of(made, a, penalty).advantages, [[0.4, -0.4]], rtol=1e-6)  # (0.7, -0.1) - 0.3
    np.testing.assert_allclose(StepTable.of(made, a).rewards, [[1.0, 0.0]])
    # A completion that was cut and is masked loses its reward's part all the same; the metric is of those trained on.
    first, second = made[0].completions
    made[0] = replace(made[0], completions=(replace(first, stop_reason=StopReason.LENGTH), second))
    recorded, masked = MetricSet(), replace(a, mask_truncated=True)
    again = updater(masked)._kl_penalty(made, StepTable.of(made, masked), given, shape, recorded)
    np.testing.assert_array_equal(again, penalty)
    assert recorded.result()["kl"] == pytest.approx(1.0)


def test_cut_completions_leave_the_loss_and_stay_in_the_mean():
    made = random_groups(SMALL, 1, 3, 4, 4)
    cut = replace(made[0].completions[1], stop_reason=StopReason.LENGTH)
    made = [replace(made[0], completions=(made[0].completions[0], cut, made[0].completions[2]),
                    rewards=np.array([1.0, 3.0, 2.0]))]
    shape = choose_shape(made, 1, 3, 1000, 1)
    for masked in (False, True):
        a = AlgorithmSection(advantage="dr_grpo", aggregation="seq-mean-token-sum", mask_truncated=masked)
        table = StepTable.of(made, a)
        np.testing.assert_array_equal(table.advantages, [[-1, 1, 0]])
        batch = updater(a)._pack(made, table, np.arange(1), shape, None, None, None)[0]
        weight = {index: float(values[0]) for (_, index), values in batch.unpack(batch.arrays.weight).items()}
        assert weight == {0: pytest.approx(1 / 3), 1: 0 if masked else pytest.approx(1 / 3), 2: pytest.approx(1 / 3)}


def test_the_overlong_penalty_by_hand():
    told = overlong_punishment(100, 20)(completion_ids=[[0] * n for n in (1, 80, 85, 99, 100, 120)])
    np.testing.assert_allclose(told, [0, 0, -0.25, -0.95, -1, -1])
    task = Task("t", (), {}, (RewardFunction("r", lambda **_: [0.0], 1.0),))
    assert with_overlong(task, RewardSection(), 100) is task
    paper = with_overlong(task, RewardSection(overlong_buffer_tokens=-1), 100).rewards[1]
    assert paper.function(completion_ids=[[0] * 90]) == [-0.5]  # a fifth
    with pytest.raises(ShoalError, match="overlong_buffer_tokens=20: expected at most"):
        with_overlong(task, RewardSection(overlong_buffer_tokens=20), 10)


def test_prompts_by_the_device_go_on_by_name(workshop):
    workshop.train("by-device", "batch.prompts_per_device=4", "steps=1")
    run = workshop.train("by-device", "batch.prompts_per_device=4", "steps=2")
    assert [len(groups(run, step)) for step in (1, 2)] == [4, 4]


def test_everything_at_once_runs_and_is_told(workshop):
    run = workshop.train(
        "all", "reward.overlong_buffer_tokens=10", "reward.overlong_penalty=0.5", "algorithm.entropy_coef=0.01",
        "algorithm.correction=icepop", "algorithm.correction_level=geometric", "algorithm.kl_coef=0.05",
        "algorithm.kl_weighted=true", "algorithm.kl_clamp_value=10", "algorithm.clip_dual=3", "algorithm.num_epochs=2",
        "algorithm.advantage=gdpo", "algorithm.aggregation=prompt-mean", "batch.prompts_per_device=4")
    for row in metrics(run):
        assert row["rewards/overlong"] < 0 and row["correction/weight"] == pytest.approx(1, abs=1e-3)
        assert row["correction/zero"] == 0 and row["kl"] >= 0
    assert len(groups(run, 1)) == 4
    assert groups(run, 1)[0]["reward_weights"] == {"letters": 1.0, "overlong": 0.5}


@pytest.mark.parametrize(("words", "lag", "every"), [
    ([], 0, 1), (["train.weight_sync_interval=3"], 0, 3), (["train.max_staleness=1"], 1, 1),
    (["train.weight_sync_interval=2", "train.max_staleness=3"], 2, 2)])
def test_staleness_and_publication(words, lag, every):
    config, _ = compose("train", words)
    assert (schedule_of(config.train).lag, schedule_of(config.train).weight_sync_interval) == (lag, every)


def test_the_bounds_of_every_loss_are_known():
    assert set(BOUNDS) == set(POLICY_LOSSES)


@pytest.mark.parametrize(("words", "text"), [
    (["algorithm.loss=gspo"], "practically never clips"),
    (["algorithm.kl=k1", "algorithm.kl_coef=0.1"], "regularises nothing"),
    (["sampling.top_p=0.9"], "kept, stored and replayed"),
    (["sampling.top_p=0.9", "algorithm.match_sampling_support=false"], "the ratio is biased"),
    (["algorithm.loss=cispo", "algorithm.clip_dual=3"], "has no effect on algorithm.loss=cispo"),
    (["algorithm.loss=cispo", "algorithm.cispo_bound=absolute"], "5 is usual"),
    (["algorithm.kl_coef=1", "algorithm.kl_placement=reward"], "k1 is the unbiased one"),
    (["algorithm.entropy_coef=1", "algorithm.zero_std_groups=exclude"], "exclude has no effect"),
    (["algorithm.advantage=maxrl", "reward.overlong_buffer_tokens=9"], "a group with one below 0"),
    (["train.weight_sync_interval=3"], "samples may be 2 versions old"),
    (["train.max_staleness=1", "algorithm.num_epochs=2"], "samples may be 1 version old"),
    (["algorithm=gspo", "algorithm.advantage=none", "teacher.path=x"], "set algorithm.loss=gspo-token"),
    (["algorithm=gmpo", "teacher.path=x"], "averaged over the completion"),
    (["algorithm.dynamic_sampling=true", "reward=f.py:f"], "algorithm.dynamic_sampling_by=reward goes by these"),
    (["algorithm.clip_low=0.1", "algorithm.clip_high=0.3"], "clip_low=0.1, algorithm.clip_high=0.3 cannot act"),
    (["algorithm.clip_dual=3"], "algorithm.clip_dual=3 cannot act: with one update a step"),
    (["algorithm=sapo", "algorithm.num_minibatches=1", "algorithm.sapo_negative=2"], "sapo_negative=2 cannot act"),
    (["recipe=scalerl", "algorithm.clip_high=4"], "algorithm.clip_high=4 cannot act"),
    (["algorithm.aggregation_tokens=64"], "algorithm.aggregation_tokens=64 has no effect"),
])
def test_what_is_hardly_meant_is_said(words, text):
    [warning] = algorithm_warnings(compose("train", words)[0])
    assert text in warning


@pytest.mark.parametrize("words", [
    [], ["recipe=scalerl"], ["recipe=verl", "algorithm.num_minibatches=1"],
    ["algorithm=gmpo", "algorithm.num_minibatches=1"], ["algorithm=gspo-token", "teacher.path=x"],
    ["train.max_staleness=1", "algorithm.correction=tis"], ["algorithm.clip_low=0.1", "algorithm.num_epochs=2"],
    ["algorithm.dynamic_sampling=true", "task.name=custom", "task.path=x", "reward=f.py:f"],
    ["algorithm.dynamic_sampling=true", "reward=f.py:f", "algorithm.dynamic_sampling_by=reward"],
    ["algorithm.aggregation_tokens=64", "algorithm.aggregation=seq-mean-token-sum-norm"]])
def test_what_is_meant_is_not_spoken_of(words):
    assert list(algorithm_warnings(compose("train", words)[0])) == []


@pytest.mark.parametrize(("words", "text"), [
    (["sampling.temperature=0"], "sampling.temperature=0"),
    (["algorithm.advantage=none"], "nothing teaches"),
    (["algorithm.advantage=none", "teacher.path=x", "algorithm.kl_coef=1", "algorithm.kl_placement=reward"],
     "has no part"),
    (["algorithm.advantage=none", "teacher.path=x", "algorithm.dynamic_sampling=true"], "groups are chosen by their"),
    (["algorithm.advantage=gdpo", "algorithm.kl_coef=1", "algorithm.kl_placement=reward", "algorithm.kl=k1"],
     "would cancel"),
])
def test_what_nothing_can_be_learnt_from(words, text):
    with pytest.raises(ShoalError, match=text):
        check_trainable(compose("train", words)[0])
