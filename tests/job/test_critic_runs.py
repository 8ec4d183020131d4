"""Runs with a critic: PPO from a command's words to checkpoints, and what is refused."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_models import write_model_with_tokenizer
from tiny_runs import groups, metrics, parameters_of, same_bits

from shoal import cli
from shoal.commands import doctor
from shoal.commands.view.views import Viewer
from shoal.job.step_trial import StepTrial, estimate_times
from shoal.runs.metrics import is_clock

GAE = (
    "algorithm.advantage=gae",
    "algorithm.lam=0.9",
    "critic.lr=1e-2",
    "algorithm.num_minibatches=2",
)


def write_like(folder: Path, family: str = "qwen3", style: str = "chatml", **changes: int) -> Path:
    """A model like the workshop's, with other weights."""
    changes = {"num_hidden_layers": 1, **changes}
    return write_model_with_tokenizer(folder, family, style, seed=7, **changes)


def numbers(run: Path) -> list[dict[str, float]]:
    result = []
    for row in metrics(run):
        result.append({name: value for name, value in row.items() if not is_clock(name)})
    return result


def resumed_from(whole: Path, version: int) -> Path:
    """A copy of a run that has ended, as it was at the checkpoint of `version`, resumed."""
    parts = shutil.copytree(whole, whole.with_name(f"{whole.name}-parts"))
    for saved in (parts / "checkpoints").iterdir():
        if int(saved.name) > version:
            shutil.rmtree(saved)
    (parts / "summary.json").unlink()
    assert cli.main(["train", f"resume={parts}"]) == 0
    return parts


def checksums(run: Path, version: int) -> dict[str, int]:
    """Of all arrays of a checkpoint, the critic's included."""
    file = run / "checkpoints" / str(version) / "extra" / "metadata"
    return json.loads(file.read_text())["checksums"]


@pytest.mark.slow
def test_ppo_resumes_bit_for_bit_with_its_critic(workshop):
    words = (*GAE, "steps=4", "checkpoint.every=1", "checkpoint.keep_last=9")
    # The warm-up is over after the first step; the second resumes within it.
    whole = workshop.train("ppo", *words, "critic.warmup_steps=2")
    rows = metrics(whole)
    assert [row.get("critic/warmup") for row in rows] == [1, 1, None, None]
    assert [row.get("update/count") for row in rows] == [None, None, 2, 2]
    for row in rows:
        assert row["critic/vf_loss"] > 0 and row["critic/grad_norm"] > 0
        assert row["critic/values/min"] <= row["critic/values/mean"] <= row["critic/values/max"]
    # The head begins at zero.
    assert rows[0]["critic/values/max"] == 0 and rows[1]["critic/values/max"] != 0
    assert same_bits(parameters_of(whole, 2), parameters_of(whole, 1))
    assert not same_bits(parameters_of(whole, 3), parameters_of(whole, 2))
    parts = resumed_from(whole, 1)
    assert numbers(parts) == numbers(whole)
    for version in (2, 3, 4):
        assert checksums(parts, version) == checksums(whole, version)
    # What is stored is the mean over a completion's tokens.
    [first, _] = groups(whole, 1)
    assert len({c["advantage"] for c in first["completions"]}) > 1


@pytest.mark.slow
def test_a_group_of_one_is_judged_by_the_critic(workshop, capsys):
    run = workshop.train("alone", *GAE, "batch.group_size=1", "batch.prompts_per_step=4", "steps=6")
    for row in metrics(run):
        assert row["groups/unscorable"] == 0
        assert row["advantage/abs_mean"] > 0 and row["grad_norm"] > 0
        # A critic learns from groups of one, so nothing is said of groups without variance: not
        # in the metrics, in training, on the page, in a rescoring, or by the doctor.
        assert "groups/nonzero_std" not in row
    printed = capsys.readouterr()
    assert "no group has had" not in printed.out + printed.err
    assert "explained variance" in printed.out and "mixed groups" not in printed.out
    with closing(Viewer([str(run)])) as viewer:
        viewer.read_all()
        while not (found := viewer.answer("lint", {"run": run.name}))["done"]:
            pass
        overview = viewer.answer("overview", {"run": run.name})
    kinds = {one["kind"] for one in found["findings"]}
    assert kinds and "constant" not in kinds
    assert "rewards that differ" not in overview["verdict"]["text"]
    assert cli.main(["rescore", str(run), f"reward={workshop.rewards}:letters"]) == 0
    assert "one reward for all their completions" not in capsys.readouterr().out
    words = workshop.words("never", *GAE, "batch.group_size=1", "batch.prompts_per_step=4")[1:]
    assert cli.main(["doctor", *words]) == 0
    printed = capsys.readouterr()
    assert "teach nothing" not in printed.out + printed.err


@pytest.mark.slow
@pytest.mark.parametrize("own_model", [False, True])
def test_with_an_adapter_the_critic_has_one_too(workshop, own_model):
    words = [*GAE, "model.lora.rank=4", "steps=3", "checkpoint.every=1", "checkpoint.keep_last=9"]
    name = "lora"
    if own_model:
        name = "lora-own"
        other = write_like(workshop.folder / "other")
        words.append(f"critic.path={other}")
    whole = workshop.train(name, *words)
    parts = resumed_from(whole, 1)
    assert numbers(parts) == numbers(whole)
    assert checksums(parts, 3) == checksums(whole, 3)
    assert metrics(whole)[2]["critic/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("model.lora.rank=4",)], ids=["all weights", "adapter"])
def test_a_critic_on_the_policys_layers_is_saved_and_resumed_with_them(workshop, words):
    name = "shared-lora" if words else "shared"
    shared = (*GAE, *words, "critic.shared=true", "critic.warmup_steps=2")
    whole = workshop.train(name, *shared, "steps=4", "checkpoint.every=1", "checkpoint.keep_last=9")
    rows = metrics(whole)
    # In the warm-up the head alone learns.
    assert [row.get("critic/warmup") for row in rows] == [1, 1, None, None]
    assert [row.get("update/count") for row in rows] == [None, None, 2, 2]
    assert rows[0]["critic/values/max"] == 0 and rows[1]["critic/values/max"] != 0
    for row in rows:
        assert row["critic/vf_loss"] > 0 and row["critic/grad_norm"] > 0
    if not words:
        assert same_bits(parameters_of(whole, 2), parameters_of(whole, 1))
        assert not same_bits(parameters_of(whole, 3), parameters_of(whole, 2))
    parts = resumed_from(whole, 1)
    assert numbers(parts) == numbers(whole)
    for version in (2, 3, 4):
        assert checksums(parts, version) == checksums(whole, version)
    # What is exported is the policy, without a head of values.
    exported = workshop.folder / f"{name}-exported"
    assert cli.main(["export", f"from={whole}", f"to={exported}"]) == 0
    with safe_open(next(exported.glob("*.safetensors")), "numpy") as file:
        assert file.keys() and not [one for one in file.keys() if "score" in one]  # noqa: SIM118


@pytest.mark.slow
def test_a_critic_may_begin_with_another_checkpoint(workshop):
    other = write_like(workshop.folder / "other")
    own, others = (
        workshop.train(name, *GAE, "steps=2", *words)
        for name, words in (("own", ()), ("others", (f"critic.path={other}",)))
    )
    first, second = (metrics(run)[0] for run in (own, others))
    # The values are zeros before the first update, whatever stands below the head.
    assert first["critic/values/max"] == second["critic/values/max"] == 0
    assert first["loss"] == second["loss"]
    assert metrics(own)[1]["critic/values/mean"] != metrics(others)[1]["critic/values/mean"]


@pytest.mark.slow
def test_a_step_of_ppo_is_learnt_again_from_its_stored_groups(workshop, capsys):
    run = workshop.train("ppo-replay", *GAE, "checkpoint.every=0", "steps=3")
    capsys.readouterr()
    assert cli.main(["replay", str(run), "step=3", "group=1", "json=true"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["identical"] is True and printed["weights"]["updates_retrained"] == 4
    assert cli.main(["rescore", str(run)]) == 0
    assert "new advantages are 0" in capsys.readouterr().out


@pytest.fixture
def trials(monkeypatch) -> list[StepTrial]:
    """The trials of a step that the doctor makes."""
    made = []

    def estimate(config, trial, *others):
        made.append(trial)
        return estimate_times(config, trial, *others)

    monkeypatch.setattr(doctor, "estimate_times", estimate)
    return made


@pytest.mark.slow
def test_the_doctor_tries_the_critic_too(workshop, capsys, trials):
    words = workshop.words("never", *GAE)[1:]
    assert cli.main(["doctor", *words, "json=true"]) == 0
    assert "critic" in capsys.readouterr().out
    [trial] = trials
    assert trial.critic_accumulate_seconds > 0 and trial.critic_apply_seconds > 0
    for name in ("score critic", "accumulate critic", "apply critic"):
        assert trial.programs[name].extra_bytes > 0
    assert not trial.skipped


@pytest.mark.slow
def test_the_doctor_and_a_replay_know_a_critic_on_the_policys_layers(workshop, capsys, trials):
    shared = (*GAE, "critic.shared=true")
    words = workshop.words("never", *shared)[1:]
    assert cli.main(["doctor", *words, "json=true"]) == 0
    [trial] = trials
    assert trial.programs["score critic"].extra_bytes > 0
    assert trial.programs["accumulate critic"].extra_bytes == 0  # the policy's does it
    assert trial.critic_apply_seconds > 0 and not trial.skipped
    run = workshop.train("shared-replay", *shared, "checkpoint.every=0", "steps=3")
    capsys.readouterr()
    assert cli.main(["replay", str(run), "step=3", "group=1", "json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["critic.path=nowhere"], ["critic.path", "algorithm.advantage=gae"]),
        ([*GAE, "critic.path=nowhere"], ["critic.path=nowhere", "there is no model folder"]),
        ([*GAE, "algorithm.loss=gspo"], ["algorithm.loss", "a loss by token"]),
        ([*GAE, "algorithm.credit=state"], ["algorithm.advantage", "grpo or dr_grpo or rloo"]),
        ([*GAE, "algorithm.lam=1.5"], ["algorithm.lam", "[0, 1]"]),
        ([*GAE, "critic.warmup_until=2"], ["critic.warmup_until", "at most 1"]),
        (
            [*GAE, "batch.group_size=1", "algorithm.dynamic_sampling=true", "train.pass_k=0"],
            ["batch.group_size", "algorithm.dynamic_sampling"],
        ),
        ([*GAE, "critic.shared=true", "critic.coef=0"], ["critic.coef", "learns nothing with 0"]),
        (
            [*GAE, "critic.shared=true", "critic.path=nowhere"],
            ["critic.path='nowhere'", "empty with critic.shared=true"],
        ),
        (
            [*GAE, "critic.shared=true", "model.dtype=float16"],
            ["critic.shared=", "bfloat16 needs none"],
        ),
    ],
)
def test_wrong_settings_of_a_critic_are_one_error(workshop, capsys, words, parts):
    assert cli.main(workshop.words("refused", *words)) == cli.USAGE_EXIT_CODE
    text = capsys.readouterr().err
    assert all(part in text for part in parts), text
    assert not (workshop.runs / "refused").exists()


def test_a_critic_of_another_architecture_or_vocabulary_is_refused(workshop, tmp_path, capsys):
    deeper = write_like(tmp_path / "deeper", num_hidden_layers=2)
    family = write_like(tmp_path / "family", "llama2")
    for other, difference in ((deeper, "num_layers 2 for 1"), (family, "qk_norm False for True")):
        assert cli.main(workshop.words("other", *GAE, f"critic.path={other}")) == 2
        text = capsys.readouterr().err
        assert "its layers are not those of the model" in text and difference in text
    words = write_like(tmp_path / "words", style="llama3")
    assert cli.main(workshop.words("other", *GAE, f"critic.path={words}")) == 2
    assert "its vocabulary is not that of the model" in capsys.readouterr().err
    assert not (workshop.runs / "other").exists()


def test_settings_that_nothing_reads_are_warned_of(workshop, capsys):
    assert cli.main([*workshop.words("dry", "critic.lam=0.5"), "--dry-run"]) == 0
    assert "critic.lam=0.5 has no effect" in capsys.readouterr().out
    words = [*GAE, "critic.warmup_until=0.5", "critic.warmup_steps=0"]
    assert cli.main([*workshop.words("dry", *words), "--dry-run"]) == 0
    assert "has no effect without critic.warmup_steps" in capsys.readouterr().out
    assert cli.main([*workshop.words("dry", *GAE, "critic.coef=0.5"), "--dry-run"]) == 0
    assert "critic.coef=0.5 has no effect without critic.shared" in capsys.readouterr().out
