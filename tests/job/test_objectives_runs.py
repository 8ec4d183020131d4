"""Whole runs of what a step can do with its groups: truncation replayed, further groups, a teacher,
penalties."""

from __future__ import annotations

import json
import shutil
from contextlib import closing

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from scripted_teacher import ScriptedTeacher
from small import logits_program, roles
from tiny_models import write_model_with_tokenizer
from tiny_runs import PROGRAMS_OF_TWO, groups, metrics, parameters_of, same_bits

import shoal
from shoal import cli
from shoal.commands.replay import replay
from shoal.config.commands import ReplayConfig
from shoal.config.sections.model import ModelSection
from shoal.runs.metrics import is_clock
from shoal.weights.source import open_model

CUT = ("sampling.top_p=0.7", "sampling.top_k=30", "sampling.max_support=20")


@pytest.mark.slow
def test_a_run_with_truncation_agrees_with_its_sampler(workshop):
    cut = (*CUT, "algorithm.num_minibatches=2")
    run = workshop.train("cut", *cut)
    for row in metrics(run):
        assert row["sampler_gap/logprob_max"] < 1e-4
    stored = groups(run, 1)[0]["completions"][0]
    for support_ids, token in zip(stored["support_ids"], stored["token_ids"], strict=True):
        assert 1 <= len(support_ids) <= 20 and token in support_ids
    biased = workshop.train("biased", *cut, "algorithm.match_sampling_support=false")
    for row in metrics(biased):
        assert row["sampler_gap/logprob_mean"] > 0.05
    assert "support_ids" not in groups(biased, 1)[0]["completions"][0]


@pytest.mark.slow
def test_a_truncated_step_is_learnt_again_from_its_stored_groups(workshop, capsys):
    run = workshop.train("cut-replay", *CUT, "checkpoint.every=0", "steps=3")
    capsys.readouterr()
    assert cli.main(["replay", str(run), "step=3", "group=1", "json=true"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["identical"] is True and told["weights"]["updates_retrained"] == 2


@pytest.fixture(scope="module")
def choosy(workshop):
    """Words of a run whose reward tells the completions of every other prompt apart, and none of
    the others."""
    file = workshop.folder / "choosy.py"
    file.write_text("""\
def choosy(completions, answer, log_metric, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    rewards = [
        sum(map(ord, text)) % 3 if int(gold) % 2 else 1.0 for text, gold in zip(texts, answer)
    ]
    for reward in rewards:
        log_metric("own", reward)
    return rewards
""")
    return (
        f"reward={file}:choosy",
        "algorithm.dynamic_sampling=true",
        "algorithm.dynamic_sampling_by=reward",
        "batch.prompts_per_step=4",
        "steps=3",
        *PROGRAMS_OF_TWO,
    )


def numbers(run):
    result = []
    for row in metrics(run):
        result.append({name: value for name, value in row.items() if not is_clock(name)})
    return result


@pytest.mark.slow
def test_groups_without_variance_are_replaced(workshop, choosy):
    run = workshop.train("dynamic", *choosy)
    for number, row in enumerate(metrics(run), 1):
        stored = groups(run, number)
        assert len(stored) == len({group["row"] for group in stored}) == 4
        for group in stored:
            assert len({c["reward"] for c in group["completions"]}) > 1
        assert row["groups/nonzero_std"] == 1.0
        # Both are means over the groups that the step trains on.
        assert row["rewards/logged/own"] == pytest.approx(row["rewards/choosy"])
        # Those that were replaced are stored, too, and told apart.
        discarded = shoal.load_run(run).groups(number, discarded=True)
        assert len(discarded) == row["groups/discarded"]
        for entry in discarded:
            assert entry.discarded and entry.advantages is None
            assert not any(entry.token_arrays)
            assert entry.group.example.row not in {group["row"] for group in stored}
    assert sum(row["groups/discarded"] for row in metrics(run)) >= 3
    # Noise has the same address, whatever became of the group.
    again = ReplayConfig(run=str(run), step=1, group=0)
    assert replay(again, name="discarded")["identical"]
    plain = workshop.train("not-dynamic", *choosy, "algorithm.dynamic_sampling=false")
    assert any(row["groups/nonzero_std"] < 1 for row in metrics(plain))
    for row in metrics(plain):
        assert row["groups/discarded"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_dynamic_sampling_resumes_exactly(workshop, choosy, lag):
    whole = workshop.train(
        f"whole-{lag}",
        *choosy,
        f"train.max_staleness={lag}",
        "checkpoint.every=1",
        "checkpoint.keep_last=3",
    )
    parts = shutil.copytree(whole, workshop.runs / f"parts-{lag}")
    for version in (2, 3):
        shutil.rmtree(parts / "checkpoints" / str(version))
    (parts / "summary.json").unlink()
    assert cli.main(["train", f"resume={parts}"]) == 0
    assert numbers(parts) == numbers(whole)
    names = sorted(path.name for path in (whole / "groups").iterdir())
    assert any(name.startswith("discarded_") for name in names)
    for name in names:
        assert (parts / "groups" / name).read_bytes() == (whole / "groups" / name).read_bytes()
    tokens, again = (
        json.loads((run / "summary.json").read_text())["tokens"] for run in (whole, parts)
    )
    assert tokens == again and tokens["discarded"] > 0 and tokens["lost"] == tokens["unused"] == 0
    assert tokens["trained"] + tokens["discarded"] == sum(
        row["tokens/sampled"] for row in metrics(whole)
    )
    assert same_bits(parameters_of(parts, 3), parameters_of(whole, 3))
    assert [row["staleness"] for row in metrics(whole)] == [0, lag, lag]


@pytest.mark.slow
def test_a_step_that_cannot_be_filled_goes_on_with_a_warning(workshop, choosy, capsys):
    starved = (*choosy, "reward.weights=[0.0]", "algorithm.max_sampling_rounds=2")
    run = workshop.train("starved", *starved, "steps=1")
    [row] = metrics(run)
    assert row["groups/nonzero_std"] == 0 and row["groups/discarded"] == 8 and row["grad_norm"] == 0
    assert row["groups/filled"] == 4 and len(groups(run, 1)) == 4
    said = " ".join(capsys.readouterr().out.split())
    assert "so the step was filled with groups that it rejects: 4" in said


@pytest.mark.slow
def test_a_run_that_stops_for_lack_of_groups_keeps_them_and_resumes(workshop, choosy, capsys):
    """The groups of the step are stored, and the run goes on from the step before."""
    file = workshop.folder / "late.py"
    file.write_text("""\
def late(completions, trainer_state, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [1.0 if trainer_state.global_step else sum(map(ord, text)) for text in texts]
""")
    words = [*choosy[1:], f"reward={file}:late", "steps=2", "algorithm.max_sampling_rounds=1"]
    line = workshop.words("lacking", *words, "algorithm.on_too_few_groups=stop")
    assert cli.main(line) == cli.USAGE_EXIT_CODE
    said = capsys.readouterr().err
    assert "step 2: dynamic sampling keeps 0 of 8 groups" in said and "resume=" in said
    run = workshop.runs / "lacking"
    assert len(metrics(run)) == 1 and len(shoal.load_run(run).groups(2, discarded=True)) == 8
    # Also if the first step ends so.
    lost = workshop.words(
        "lost", *words, "reward.weights=[0.0]", "algorithm.on_too_few_groups=stop"
    )
    assert cli.main(lost) == cli.USAGE_EXIT_CODE
    assert cli.main(["groups", str(workshop.runs / "lost"), "filter=set=discarded"]) == 0
    assert cli.main(["train", f"resume={run}", "algorithm.on_too_few_groups=fill"]) == 0
    assert [row["groups/filled"] for row in metrics(run)] == [0, 4]
    assert len(shoal.load_run(run).groups(2, discarded=True)) == 4


@pytest.mark.slow
def test_a_failure_in_a_further_round_loses_nothing(workshop, choosy, capsys):
    """The step is saved as a whole: it is asked for again from its first prompt, once the reward is
    mended."""
    words = [*choosy[1:], "train.max_staleness=1", "checkpoint.every=1"]
    file = workshop.folder / "tired.py"
    text = (workshop.folder / "choosy.py").read_text()
    file.write_text(
        text.replace("log_metric, **kwargs", "log_metric, trainer_state, **kwargs").replace(
            "    texts",
            """    import os
    flag = os.environ["SHOAL_TEST_FOLDER"] + f"/{trainer_state.global_step}-"
    called = os.listdir(os.environ["SHOAL_TEST_FOLDER"])
    number = len([name for name in called if name.startswith(f"{trainer_state.global_step}-")])
    open(flag + str(number), "w").close()
    if trainer_state.global_step == 1 and number == 5 and os.environ.get("SHOAL_TEST_TIRED"):
        raise ValueError("tired")
    texts""",
            1,
        )
    )
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


@pytest.mark.slow
def test_small_data_ends_the_search_not_the_run(workshop, choosy):
    run = workshop.train(
        "small", *choosy, "batch.prompts_per_step=15", "steps=1", "algorithm.max_sampling_rounds=3"
    )
    [row] = metrics(run)
    assert row["groups/discarded"] == 5  # the data has 20 rows: all were asked for, once
    assert len(groups(run, 1)) == 15


@pytest.mark.slow
def test_a_teacher_alone_is_learnt_from(workshop):
    teacher = write_model_with_tokenizer(workshop.folder / "teacher", "qwen3", "chatml", seed=5)
    words = (
        f"teacher.path={teacher}",
        "algorithm.advantage=none",
        "steps=12",
        "batch.prompts_per_step=4",
        *PROGRAMS_OF_TWO,
    )
    run = workshop.train("taught", *words)
    told = [row["teacher/kl"] for row in metrics(run)]
    assert np.mean(told[-3:]) < 0.8 * np.mean(told[:3])
    for row in metrics(run):
        assert row["advantage/abs_mean"] == 0
    beside = workshop.train("beside", f"teacher.path={teacher}", "steps=1")
    assert metrics(beside)[0]["advantage/abs_mean"] > 0 and metrics(beside)[0]["teacher/kl"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["full", "topk"])
def test_a_teachers_distributions_are_learnt_from_and_a_resumed_run_is_the_same(
    workshop, divergence
):
    teacher = write_model_with_tokenizer(workshop.folder / "teacher", "qwen3", "chatml", seed=5)
    words = (
        f"teacher.path={teacher}",
        f"teacher.divergence={divergence}",
        "teacher.beta=0.5",
        "algorithm.advantage=none",
        "batch.prompts_per_step=4",
        *PROGRAMS_OF_TWO,
    )
    run = workshop.train(f"taught-{divergence}", *words, "steps=12")
    told = [row["teacher/divergence"] for row in metrics(run)]
    assert np.isfinite(told).all() and np.mean(told[-3:]) < 0.8 * np.mean(told[:3])
    for row in metrics(run):
        assert "teacher/kl" not in row and row["grad_norm"] > 0 and not row["update/skipped"]
    cut = f"taught-{divergence}-cut"
    workshop.train(cut, *words, "steps=5")
    resumed = workshop.train(cut, *words, "steps=12")
    assert numbers(resumed) == numbers(run)
    assert same_bits(parameters_of(resumed, 12), parameters_of(run, 12))


@pytest.mark.slow
def test_a_step_with_a_teachers_distributions_is_tried_and_learnt_again(workshop, capsys):
    teacher = write_model_with_tokenizer(workshop.folder / "teacher", "qwen3", "chatml", seed=5)
    words = (f"teacher.path={teacher}", "teacher.divergence=full", "algorithm.num_minibatches=2")
    doctor = ["doctor", *workshop.words("tried", *words)[1:]]
    assert cli.main(doctor) == 0, capsys.readouterr().out
    run = workshop.train("told-again", *words, "checkpoint.every=0", "steps=3")
    capsys.readouterr()
    assert cli.main(["replay", str(run), "step=3", "group=1", "json=true"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["identical"] is True and told["weights"]["updates_retrained"] == 4


@pytest.mark.slow
def test_the_model_as_its_own_teacher_teaches_nothing(workshop):
    run = workshop.train(
        "own-teacher",
        f"teacher.path={workshop.model}",
        "teacher.divergence=full",
        "algorithm.advantage=none",
        "steps=1",
    )
    [row] = metrics(run)
    assert abs(row["teacher/divergence"]) < 1e-6 and row["grad_norm"] < 1e-4


HINT = "teacher.hint={prompt} The answer is {answer}."


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["base-full", "live-full", "live-sampled", "base-topk-lora", "live-full-lora"]
)
def test_the_model_with_a_hint_is_its_own_teacher_and_a_resumed_run_is_the_same(
    workshop, kind, capsys
):
    """Base: the first weights, from which nothing moves a run's teacher. The retrained steps of a
    replay have the same teacher, too."""
    weights, divergence, *lora = kind.split("-")
    words = [
        HINT,
        f"teacher.weights={weights}",
        f"teacher.divergence={divergence}",
        "teacher.hint_tokens=32",
        "algorithm.advantage=none",
        "algorithm.num_minibatches=2",
        "batch.prompts_per_step=4",
        *PROGRAMS_OF_TWO,
    ]
    if lora:
        words += ["model.lora.rank=2", "optimizer.lr=0.02"]
    run = workshop.train(f"hinted-{kind}", *words, "steps=6")
    name = "teacher/kl" if divergence == "sampled" else "teacher/divergence"
    told = [row[name] for row in metrics(run)]
    assert np.isfinite(told).all() and told[0] > 1e-3
    if kind == "base-full":
        assert np.mean(told[-2:]) < told[0]
    cut = f"hinted-{kind}-cut"
    workshop.train(cut, *words, "steps=3")
    resumed = workshop.train(cut, *words, "steps=6")
    assert numbers(resumed) == numbers(run)
    assert same_bits(parameters_of(resumed, 6), parameters_of(run, 6))
    shutil.rmtree(resumed / "checkpoints" / "6")
    capsys.readouterr()
    assert cli.main(["replay", str(resumed), "step=6", "group=1", "json=true"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["identical"] is True and told["weights"]["updates_retrained"] == 4


@pytest.mark.slow
def test_the_live_model_with_its_own_prompt_as_hint_teaches_nothing(workshop):
    run = workshop.train(
        "no-hint",
        "teacher.hint={prompt}",
        "teacher.weights=live",
        "teacher.divergence=full",
        "algorithm.advantage=none",
        "steps=1",
    )
    [row] = metrics(run)
    assert abs(row["teacher/divergence"]) < 1e-6 and row["grad_norm"] < 1e-4


@pytest.mark.slow
def test_rows_choose_among_teachers_of_eight_bits(workshop, capsys):
    """Each teacher is learned from by its rows alone; a doctor tries the step."""
    paths = {}
    for name, seed in (("even", 5), ("odd", 6)):
        folder = workshop.folder / f"teacher-{name}"
        paths[name] = write_model_with_tokenizer(folder, "qwen3", "chatml", seed=seed)
    rows = workshop.folder / "named.jsonl"
    with open(rows, "w") as file:
        for number in range(8):
            row = {
                "prompt": f"{number} + 3 = ?",
                "answer": str(number + 3),
                "teacher": ("even", "odd")[number % 2],
            }
            file.write(json.dumps(row) + "\n")
    words = [
        "task=custom",
        f"task.path={rows}",
        f"teacher.path=even={paths['even']},odd={paths['odd']}",
        "teacher.divergence=full",
        "algorithm.advantage=none",
        "batch.prompts_per_step=4",
        "train.evaluate_every=-1",
    ]
    eight = [*words, "teacher.quantise=int8"]
    assert cli.main(["doctor", *workshop.words("several-tried", *eight)[1:]]) == 0, (
        capsys.readouterr().out
    )
    run = workshop.train("several", *words, "steps=1")
    in_eight = workshop.train("several-eight", *eight, "steps=1")
    wide, narrow = (metrics(one)[0]["teacher/divergence"] for one in (run, in_eight))
    assert narrow != wide and narrow == pytest.approx(wide, rel=0.05)
    swapped = f"teacher.path=even={paths['odd']},odd={paths['even']}"
    other = workshop.train("several-swapped", *words, swapped, "steps=1")
    assert metrics(other)[0]["teacher/divergence"] != wide
    rows.write_text(rows.read_text().replace("odd", "prime"))
    assert cli.main(workshop.words("several-wrong", *words)) == cli.USAGE_EXIT_CODE
    assert "has teacher='prime': with several teachers" in capsys.readouterr().err


def test_a_teacher_of_other_tokens_is_refused(workshop, capsys):
    other = write_model_with_tokenizer(workshop.folder / "other", "llama3", "llama3")
    assert cli.main(workshop.words("other", f"teacher.path={other}")) == cli.USAGE_EXIT_CODE
    assert "its vocabulary is not that of the model" in capsys.readouterr().err


@pytest.mark.slow
def test_prompts_by_the_device_go_on_by_name(workshop):
    workshop.train("by-device", "batch.prompts_per_device=4", *PROGRAMS_OF_TWO, "steps=1")
    run = workshop.train("by-device", "batch.prompts_per_device=4", *PROGRAMS_OF_TWO, "steps=2")
    assert [len(groups(run, step)) for step in (1, 2)] == [4, 4]


@pytest.mark.slow
def test_everything_at_once_runs_and_is_told(workshop):
    run = workshop.train(
        "all",
        "reward.overlong_buffer_tokens=10",
        "reward.overlong_penalty=0.5",
        "algorithm.entropy_coef=0.01",
        "algorithm.correction=icepop",
        "algorithm.correction_level=geometric",
        "algorithm.kl_coef=0.05",
        "algorithm.kl_weighted=true",
        "algorithm.kl_clamp_value=10",
        "algorithm.clip_dual=3",
        "algorithm.num_epochs=2",
        "algorithm.advantage=gdpo",
        "algorithm.aggregation=prompt-mean",
        "batch.prompts_per_device=4",
        *PROGRAMS_OF_TWO,
    )
    for row in metrics(run):
        assert row["rewards/overlong"] < 0 and row["correction/weight"] == pytest.approx(
            1, abs=1e-3
        )
        assert row["correction/zero"] == 0 and row["kl"] >= 0
    assert len(groups(run, 1)) == 4
    assert groups(run, 1)[0]["reward_weights"] == {"letters": 1.0, "overlong": 0.5}


@pytest.mark.slow
def test_the_objective_is_the_loss_without_its_other_terms(workshop):
    words = (
        "algorithm.kl_coef=0.1",
        "algorithm.entropy_coef=0.01",
        "algorithm.num_epochs=2",
        "steps=3",
    )
    rows = metrics(workshop.train("terms", *words))
    for row in rows:
        assert row["loss"] == pytest.approx(
            row["objective"] + 0.1 * row["kl"] - 0.01 * row["entropy"], rel=1e-6
        )
    assert any(abs(row["objective"] - row["loss"]) > 1e-4 for row in rows)


@pytest.mark.slow
def test_kl_without_a_weight_is_reported_and_changes_nothing(workshop):
    """As TorchRL does; `report.hydra` writes what Hydra's users look for."""
    without = workshop.train("no-kl", "steps=3")
    with_it = workshop.train("kl", "steps=3", "algorithm.kl_metric=true", "report.hydra=true")
    rows = numbers(with_it)
    # Before the first update both are the same weights; on some processors two programs round them
    # otherwise.
    assert 0 <= rows[0]["kl"] < 1e-12 and all(row["kl"] > 1e-9 for row in rows[1:])
    assert [
        {name: value for name, value in row.items() if name != "kl"} for row in rows
    ] == numbers(without)
    same_bits(parameters_of(without, 3), parameters_of(with_it, 3))
    place = with_it / ".hydra"
    assert not (without / ".hydra").exists() and {one.name for one in place.iterdir()} == {
        "config.yaml",
        "overrides.yaml",
        "hydra.yaml",
    }
    assert "algorithm.kl_metric=true" in yaml.safe_load((place / "overrides.yaml").read_text())
    assert yaml.safe_load((place / "config.yaml").read_text())["algorithm"]["kl_metric"] is True
    assert yaml.safe_load((place / "hydra.yaml").read_text())["hydra"]["runtime"][
        "output_dir"
    ] == str(with_it)


def served_model(path, most_tokens=512):
    """A server of the model in a folder."""
    source = open_model(ModelSection(path=str(path)), None)
    parameters = source.load(roles().trainer, "float32")
    program = logits_program(source.architecture)

    def logits(ids):
        # One length, of which one program is compiled: a later token changes nothing before it.
        padded = np.zeros((1, most_tokens), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(program(parameters, jnp.asarray(padded)))[: len(ids)]

    return ScriptedTeacher(logits, source.tokenizer, max_model_len=most_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("hint", [[], ["teacher.hint={prompt} It is {answer}."]], ids=["", "hint"])
@pytest.mark.parametrize("divergence", ["sampled", "topk"])
def test_a_teacher_behind_an_address_teaches_as_one_that_is_here(workshop, divergence, hint):
    teacher = write_model_with_tokenizer(workshop.folder / "teacher", "qwen3", "chatml", seed=5)
    words = [
        f"teacher.divergence={divergence}",
        "teacher.top_k=7",
        "algorithm.advantage=none",
        "algorithm.num_minibatches=2",
        *hint,
    ]
    name = f"{divergence}-{len(hint)}"
    here = workshop.train(f"taught-here-{name}", *words, f"teacher.path={teacher}")
    with closing(served_model(teacher)) as server:
        there = workshop.train(f"taught-there-{name}", *words, f"teacher.address={server.url}/v1")
    for own, served in zip(metrics(here), metrics(there), strict=True):
        for metric in ("teacher/kl", "teacher/divergence", "objective", "grad_norm"):
            if metric in own:
                assert served[metric] == pytest.approx(own[metric], rel=2e-3, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "messages"])
def test_a_teachers_samples_are_data_with_its_distributions(workshop, capsys, kind):
    """Sequence-level distillation: what the teacher samples is what the student learns."""
    teacher = write_model_with_tokenizer(workshop.folder / "teacher", "qwen3", "chatml", seed=5)
    prompts = workshop.folder / f"prompts-{kind}.jsonl"
    rows = []
    for number in range(4):
        prompt = f"{number} + 3 = ?"
        if kind == "messages":
            prompt = [{"role": "user", "content": prompt}]
        rows.append({"prompt": prompt, "answer": str(number + 3)})
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = workshop.folder / f"samples-{kind}.jsonl"
    words = [f"model={teacher}", f"prompts={prompts}", f"output={samples}", "num_generations=2"]
    assert cli.main(["generate", *words, "sampling.max_completion_tokens=12"]) == 0
    texts = [json.loads(line)["completion"] for line in samples.read_text().splitlines()]
    assert len(texts) == 8
    words = [
        "sft",
        f"model={workshop.model}",
        f"task.path={samples}",
        f"teacher.path={teacher}",
        "teacher.divergence=full",
        "teacher.beta=0",
        "batch.prompts_per_step=8",
        "steps=1",
        f"base_output_directory={workshop.runs}",
        f"run_name=samples-{kind}",
    ]
    assert cli.main(words) == 0, capsys.readouterr().err
    run = workshop.runs / f"samples-{kind}"
    [row] = metrics(run)
    assert row["teacher/divergence"] > 1e-3 and row["grad_norm"] > 0
    # A chat template writes the messages' contents without white space around them.
    learned = [group["completions"][0]["text"].strip() for group in groups(run, 1)]
    assert sorted(learned) == sorted(text.strip() for text in texts)
