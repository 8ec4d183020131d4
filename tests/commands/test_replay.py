"""Any stored group is sampled again bit for bit, whatever checkpoints remain; what has changed
since is named."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import checkpoints

from shoal.chat.tokenizer import Tokenizer
from shoal.commands.export import export
from shoal.commands.replay import _token_text, replay, report_replay
from shoal.config.commands import ExportConfig, ReplayConfig
from shoal.config.sections.devices import MeshSection, SamplerSection, VllmSection
from shoal.config.train import Config
from shoal.job.replay import Replayer, describe_completion_difference
from shoal.records import Purpose, ShoalError
from shoal.report.console import Console
from shoal.runs.groups import groups_file, write_file
from shoal.runs.layout import MODEL_FOLDER
from shoal.runs.reader import StoredRun
from shoal.weights import checkpoints as checkpoints_module


@pytest.fixture(scope="module")
def run(workshop) -> Path:
    """Two steps and, resumed, a third, with a reference and two mini-batches; of the versions 1 to
    3 only the second and the last remain."""
    words = (
        "algorithm.kl_coef=0.1",
        "algorithm.num_minibatches=2",
        "checkpoint.every=1",
        "checkpoint.keep_last=2",
        "task.num_eval_questions=2",
        "train.pass_k=0",
    )
    workshop.train("first", "steps=2", *words)
    run = workshop.train("first", "steps=3", *words)
    assert checkpoints(run) == [2, 3]
    return run


def copy_of(run: Path, folder: Path, config: tuple[str, str] = ("", "")) -> Path:
    """With another setting in all its segments."""
    target = shutil.copytree(run, folder / "copy")
    for file in target.glob("config*.yaml"):
        text = file.read_text()
        assert config[0] in text
        file.write_text(text.replace(*config))
    return target


def test_what_vllm_sampled_is_not_sampled_again(tmp_path):
    """Its tokens would differ, and be taken for a fault of the run."""
    config = Config(sampler=SamplerSection(kind="vllm"), vllm=VllmSection(urls=("http://a:1",)))

    def config_at(version):
        return config

    run: Any = SimpleNamespace(path=tmp_path, config_at=config_at)
    group: Any = SimpleNamespace(step=0, purpose=Purpose.TRAIN)
    with pytest.raises(ShoalError, match=r"vLLM sampled this group.* shoal groups "):
        Replayer(run, group, MeshSection(), Console())


def again(run: Path, step: int = 1, group: int = 0, **changes) -> dict:
    return replay(ReplayConfig(run=str(run), step=step, group=group, **changes))


@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("step", "group", "start", "retrained"),
    [
        pytest.param(1, 1, 0, 0, marks=pytest.mark.slow),
        pytest.param(2, 0, 0, 2, marks=pytest.mark.slow),
        (3, 1, 2, 0),
    ],
)
def test_groups_of_every_step_are_sampled_again_bit_for_bit(
    run, step, group, start, retrained, capsys
):
    """Step 2 was sampled by version 1, which no checkpoint holds: it is retrained on the stored
    groups."""
    result = again(run, step, group)
    assert result["identical"] is True and result["difference"] is None
    assert (
        result["weights"]["updates_retrained"] == retrained
        and result["weights"]["diverged_at"] is None
    )
    # by the log-probs of the step's own update
    assert result["weights"]["verified"] is (True if retrained else None)
    assert result["weights"]["source"].startswith(
        f"checkpoint {start}" if start else "first weights"
    )
    assert "identical: sampled again bit for bit" in capsys.readouterr().out
    stored = StoredRun(run).group(step, group).group
    for i, completion in enumerate(result["completions"]):
        assert completion["text"] == completion["sampled_text"] == stored.texts[i]
        assert [token["id"] for token in completion["tokens"]] == stored.completions[
            i
        ].token_ids.tolist()
        assert [
            np.float32(token["logprob"]) for token in completion["tokens"]
        ] == stored.completions[i].logprobs.tolist()
        assert completion["components"] == {"letters": completion["reward"]}
    assert json.loads(json.dumps(result, allow_nan=False)) == result


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_of_the_sampler(run):
    vocabulary = len(Tokenizer.load(run / MODEL_FOLDER).vocabulary())
    result = again(run, 1, 1, likeliest=vocabulary + 1)
    for completion in result["completions"]:
        for token in completion["tokens"]:
            found = {}
            for other in token["likeliest"]:
                found[other["id"]] = other["logprob"]
            assert found[token["id"]] == pytest.approx(token["logprob"], abs=2e-5)
            values = np.array(list(found.values()))
            assert (
                np.exp(values).sum() == pytest.approx(1, abs=1e-5) and (np.diff(values) <= 0).all()
            )
            assert token["entropy"] == pytest.approx(-(np.exp(values) * values).sum(), abs=1e-4)
    pytest.importorskip("duckdb", reason="the page needs the extra `view`")
    from shoal.commands.view.views import Viewer

    viewer = Viewer([str(run)])  # the page colours tokens by these entropies
    viewer.read_all()
    shown = viewer.answer(
        "tokens", {"run": "first", "file": "step_000001", "group": "1", "completion": "2"}
    )
    viewer.close()
    own = result["completions"][2]["tokens"]
    assert shown["entropy"] == [token["entropy"] for token in own]
    assert shown["likeliest"][0][:2] == [
        [one["text"], one["logprob"]] for one in own[0]["likeliest"][:2]
    ]


@pytest.mark.slow
def test_without_any_checkpoint_every_step_is_retrained(run, tmp_path, capsys):
    copy = copy_of(run, tmp_path)
    shutil.rmtree(copy / "checkpoints")
    result = again(copy, 3)
    assert result["identical"] is True
    assert result["weights"]["steps_retrained"] == 2 and result["weights"]["updates_retrained"] == 4
    assert (
        "retraining on the stored groups of steps 1-2, from first weights"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped(run, tmp_path, capsys):
    copy = copy_of(run, tmp_path)
    shutil.rmtree(copy / "checkpoints" / "2" / "extra")
    result = again(copy, 3)
    assert result["identical"] is True and result["weights"]["steps_retrained"] == 2
    assert "the one before it is used" in capsys.readouterr().out


@pytest.mark.slow
def test_orbax_is_silent_while_replay_and_export_read(run, tmp_path, monkeypatch):
    """Of a damaged array it would print the tracebacks of its event loop, beside the error."""
    levels, logger, load_orbax = [], logging.getLogger("asyncio"), checkpoints_module.load_orbax
    before = logger.level
    monkeypatch.setattr(
        checkpoints_module, "load_orbax", lambda: (levels.append(logger.level), load_orbax())[1]
    )
    for command in (
        lambda: again(run, 3),
        lambda: export(ExportConfig(source=str(run), to=str(tmp_path / "model"))),
    ):
        levels.clear()
        command()
        assert set(levels) == {logging.CRITICAL} and logger.level == before


def test_equal_completions_are_printed_once(capsys):
    one = {
        "stop_reason": "eos",
        "components": {},
        "reward": 1.0,
        "advantage": 0.0,
        "identical": True,
    }
    tokens = []
    for text in "abaa":
        tokens.append({"id": 5, "text": text, "logprob": -0.5, "trainer_logprob": None})
    completions = []
    for i, token in enumerate(tokens):
        completions.append(one | {"index": i, "tokens": [token]})
    report_replay(
        {
            "step": 2,
            "group": 1,
            "row": 7,
            "version": 1,
            "identical": True,
            "difference": None,
            "weights": {"source": "checkpoint 1", "updates_retrained": 0},
            "completions": completions,
        },
        Console(),
    )
    shown = capsys.readouterr().out
    assert (
        "completions 0, 2-3 (the same 3 times), each token" in shown
        and "completion 1, each token" in shown
    )
    assert shown.count("'a'(-0.500)") == 1


def test_groups_of_an_evaluation(run):
    (greedy,) = {path.stem.rpartition("_")[0] for path in (run / "groups").glob("evaluate_*")}
    result = replay(ReplayConfig(run=str(run), step=3, group=1), None, greedy)
    assert result["identical"] is True and len(result["completions"]) == 1
    group = StoredRun(run).group(3, 0, greedy).group
    assert Path(groups_file(group.purpose, group.subset, group.step)).stem == f"{greedy}_000003"


@pytest.mark.bitwise
@pytest.mark.slow
def test_sampled_answers_of_an_evaluation(workshop):
    """With settings of their own; training truncates nothing."""
    words = ("evaluation.samples=2", "evaluation.temperature=0.6", "evaluation.top_k=3")
    few = ("steps=1", "task.num_eval_questions=2", "train.pass_k=0")
    run = workshop.train("sampled", *words, *few)
    (name,) = {path.stem.rpartition("_")[0] for path in (run / "groups").glob("evaluate_*")}
    result = replay(ReplayConfig(run=str(run), step=1, group=1), None, name)
    assert result["identical"] is True and len(result["completions"]) == 2


@pytest.mark.slow
def test_other_settings_are_detected(run, tmp_path, capsys):
    """Another seed gives other tokens; another learning rate shows in the first log-probs that are
    computed again."""
    copy = copy_of(run, tmp_path, ("seed: 0", "seed: 5"))
    result = again(copy, 1)
    difference = result["difference"]
    assert result["identical"] is False and difference["kind"] == "token"
    stored = StoredRun(copy).group(1, 0).group.completions[difference["completion"]]
    assert (
        difference["stored"]["id"]
        == stored.token_ids[difference["token"]]
        != difference["sampled"]["id"]
    )
    assert "not identical: completion 0" in capsys.readouterr().out


@pytest.mark.slow
def test_another_learning_rate_is_detected_where_it_acts(run, tmp_path, capsys):
    copy = copy_of(run, tmp_path, ("lr: 0.01", "lr: 0.02"))
    shutil.rmtree(copy / "checkpoints")
    result = again(copy, 3)
    assert result["identical"] is False and result["weights"]["diverged_at"] == 2
    assert "retraining step 2 gives other log-probs" in capsys.readouterr().out


def with_segment(run: Path, folder: Path, setting: tuple[str, str], last: int) -> Path:
    """A copy whose newest segment, from version `last`, has another setting; with 0 it is the only
    one."""
    copy = shutil.copytree(run, folder / f"copy-{last}")
    text = (copy / "config.yaml").read_text()
    for file in copy.glob("config_[0-9]*.yaml"):
        file.unlink()
    assert setting[0] in text
    for name in ("config.yaml", *((f"config_{last}.yaml",) if last else ())):
        (copy / name).write_text(text.replace(*setting))
    if last:
        (copy / "config_0.yaml").write_text(text)
    shutil.rmtree(copy / "checkpoints" / "2")
    return copy


@pytest.mark.slow
def test_each_step_is_retrained_under_the_settings_of_its_segment(run, tmp_path):
    result = again(with_segment(run, tmp_path, ("lr: 0.01", "lr: 0.02"), 2), 3)
    assert result["identical"] is True and result["weights"]["diverged_at"] is None
    result = again(with_segment(run, tmp_path, ("lr: 0.01", "lr: 0.02"), 0), 3)
    assert result["identical"] is False and result["weights"]["diverged_at"] == 2


@pytest.mark.slow
def test_two_segments_leave_what_was_set_for_all_of_jax(run, tmp_path):
    """The newer's damaged checkpoint is read first, then the older's steps are made again."""
    copy = with_segment(run, tmp_path, ("lr: 0.01", "lr: 0.02"), 2)
    shutil.copytree(run / "checkpoints" / "2", copy / "checkpoints" / "2")
    shutil.rmtree(copy / "checkpoints" / "2" / "extra")
    key = "jax_default_matmul_precision"
    kept = jax.config.values[key]
    try:
        jax.config.update(key, None)
        assert again(copy, 3)["weights"]["steps_retrained"] == 2
        assert jax.config.values[key] is None
    finally:
        jax.config.update(key, kept)


@pytest.mark.slow
def test_weights_without_later_logprobs_are_reported_as_unverified(run, tmp_path, capsys):
    copy = with_segment(run, tmp_path, ("lr: 0.01", "lr: 0.02"), 0)
    shutil.rmtree(copy / "checkpoints")
    for step in (2, 3):
        (copy / "groups" / f"step_{step:06d}.parquet").rename(tmp_path / f"{step}")
    (greedy,) = {
        path.stem.rpartition("_")[0] for path in (run / "groups").glob("evaluate_*_000000*")
    }
    evaluation = copy / "groups" / f"{greedy}_000001.parquet"
    stored = dataclasses.replace(StoredRun(run).group(3, 0, greedy).group, version=1)
    write_file(evaluation, [stored])
    result = replay(ReplayConfig(run=str(copy), step=1, group=0), None, greedy)
    assert result["identical"] is False and result["weights"]["verified"] is None
    assert (
        "not identical (weights not verified: no later log-probs are stored)"
        in capsys.readouterr().out
    )


def test_the_machine_is_known_from_any_checkpoint(run, tmp_path, capsys):
    """Step 1 was sampled by the first weights, which are in no checkpoint."""
    copy = copy_of(run, tmp_path, ("seed: 0", "seed: 5"))
    extra = copy / "checkpoints" / "2" / "extra" / "metadata"
    record = json.loads(extra.read_text())
    record["facts"]["machine"]["threads"] = "333"
    extra.write_text(json.dumps(record))
    result = again(copy, 1)
    assert result["weights"]["source"].startswith("first weights") and result["identical"] is False
    assert result["weights"]["machine"]["threads"][0] == "333"
    assert "it was 333 in the run: bits may differ" in capsys.readouterr().out


def test_the_data_is_not_needed(workshop, run, tmp_path):
    """The stored tokens of the prompt are used."""
    copy = copy_of(run, tmp_path, (str(workshop.data), str(tmp_path / "gone.jsonl")))
    assert again(copy, 1)["identical"] is True


def test_missing_things_are_named(run):
    for changes, text in [
        ({"step": 4}, r"step=4: .*steps 1-3"),
        ({"group": 2}, r"group=2: .*2 groups, 0 to 1"),
    ]:
        with pytest.raises(ShoalError, match=text):
            again(run, **changes)
    with pytest.raises(ShoalError, match="is not a run folder"):
        again(run / "groups")


def test_a_group_that_is_needed_to_retrain_is_named(run, tmp_path):
    copy = copy_of(run, tmp_path)
    shutil.rmtree(copy / "checkpoints")
    (copy / "groups" / "step_000001.parquet").unlink()
    with pytest.raises(ShoalError, match=r"step=1: .* has no groups of this step.*steps 2-3"):
        again(copy, 3)


@pytest.mark.slow
def test_another_mesh_may_be_asked_for(run):
    with pytest.raises(
        ShoalError, match=r"mesh\.data=16 does not divide 8 devices; use 1, 2, 4 or 8"
    ):
        again(run, 1, mesh=MeshSection(data=16))


def test_the_first_difference_of_two_samples(run):
    stored = StoredRun(run).group(1, 0).group.completions[1]
    tokenizer = Tokenizer.load(run / MODEL_FOLDER)

    def difference(**changes):
        return (
            describe_completion_difference(
                stored, dataclasses.replace(stored, **changes), tokenizer
            )
            or {}
        )

    assert difference() == {}
    logprobs = stored.logprobs.copy()
    logprobs[2] = np.nextafter(logprobs[2], np.float32(0))
    found = difference(logprobs=logprobs)
    assert (found["completion"], found["token"], found["kind"]) == (1, 2, "log-prob")
    assert 0 < found["logprob_difference"] < 1e-6
    found = difference(token_ids=stored.token_ids[:3], logprobs=stored.logprobs[:3])
    assert (found["token"], found["kind"], found["sampled"]) == (3, "length", None)
    ids = stored.token_ids.copy()
    ids[1] += 1
    assert (difference(token_ids=ids)["token"], difference(token_ids=ids)["kind"]) == (1, "token")


def test_a_sure_token_has_no_negative_zero():
    assert (
        _token_text({"text": "a", "logprob": -1e-6, "trainer_logprob": -0.5}) == "'a'(0.000|-0.500)"
    )
