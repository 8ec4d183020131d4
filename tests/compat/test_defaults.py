"""Every field of the five systems at its own default (`defaults/`) is accepted: none is unknown,
none is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.commands.compat import shim_argv
from shoal.compat.front import find_row
from shoal.config.commands import SftConfig
from shoal.config.key import text_of
from shoal.config.merge import compose
from shoal.config.names import names_of
from shoal.config.train import Config
from shoal.records import ShoalError

FOLDER = Path(__file__).parent / "defaults"
SYSTEMS = {
    "trl": "TRL",
    "trl_sft": "TRL",
    "trl_async": "TRL",
    "trl_ppo": "TRL",
    "verl": "verl",
    "maxtext": "MaxText",
    "torchrl": "TorchRL",
    "tunix": "Tunix",
}

WITHOUT_COUNTERPART: dict[str, set[str]] = {
    # false there: the prompt is learned too
    "trl_sft": {"assistant_only_loss"},
}
"""Defaults that matter and that nothing here computes: refused with a sentence, and left out by the
user."""


def defaults_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def text(value: Any) -> str:
    return "null" if value is None else text_of(value)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_field_at_its_default_is_known_and_not_refused(name):
    config_type = SftConfig if name == "trl_sft" else Config
    unknown, refused = [], []
    for field, value in defaults_of(name).items():
        row = find_row(config_type, field, value, SYSTEMS[name], patterns=True)
        if row is None and field not in names_of(config_type):
            unknown.append(field)
        is_reference = "${" in text(value)  # to another field, which stands here itself
        if (
            row is not None
            and row.refused
            and not is_reference
            and text(value).lower() not in row.accepts
        ):
            refused.append(field)
    assert not unknown
    assert {*refused} == WITHOUT_COUNTERPART.get(name, set())


@pytest.mark.parametrize(
    "line",
    [
        "max_steps: -1",
        "num_train_epochs: 2\nmax_steps: -1",
        "gradient_checkpointing_kwargs: {use_reentrant: false}",
        "accelerator_config: {split_batches: true, dispatch_batches: null}",
        "fsdp_config: {a: {b: {c: 1}}}",
        "log_level: passive\nsave_only_model: false\nfull_determinism: false\nlabel_names: null",
    ],
)
def test_a_recipes_line_that_changes_nothing_is_accepted(line, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"{line}\nseed: 3\n")
    config, _ = compose("train", [str(file)])
    assert config == compose("train", ["seed=3"])[0]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("chat_template_kwargs: {stops: [a, b]}", "stops is [a,b]: expected a text"),
        ("chat_template_kwargs: 5", "chat_template_kwargs=5: expected a JSON object"),
        ("lr_scheduler_kwargs: {min_lr: 0}", "lr_scheduler_kwargs.min_lr=0 is not supported"),
        ("gradient_checkpointing_kwarg: {use_reentrant: false}", "gradient_checkpointing_kwarg"),
        ("max_steps: -2", "max_steps=-2: expected a whole number of -1 or more"),
        ("neftune_noise_alpha: 5", "neftune_noise_alpha=5 is not supported"),
        ("model_revision: abc", "model_revision=abc: expected main"),
        ("datasets: [{path: a/b}, {path: c/d}]", "datasets has 2 entries: a mixture of data sets"),
        ("datasets: [{path: json}]", "datasets: an entry with path=json has no data_files"),
        ("datasets: [{path: a/b, data_dir: c}]", "datasets: an entry has data_dir"),
        ("datasets: [{path: a/b, share: 1}]", "datasets: an entry has the field share: expected"),
        ("datasets: a/b", "datasets=a/b: expected a list of one entry with a path"),
        ("test_split_size: 0.2", "test_split_size=0.2: expected 0.1"),
        ("streaming: true", "streaming=true is not supported: data are read whole"),
        ("chat_template_path: mine", "chat_template_path=mine: there is no file mine"),
    ],
)
def test_a_recipes_line_that_matters_is_refused_by_its_own_name(line, part, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(line)
    with pytest.raises(ShoalError) as caught:
        compose("train", [str(file)])
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "values"),
    [
        ("path: openai/gsm8k, split: test", ("gsm8k", "", "test", (), "")),
        ("path: me/rows, name: hard", ("custom", "me/rows", "train", (), "hard")),
        ("path: json, data_files: a.jsonl", ("custom", "a.jsonl", "train", (), "")),
        ("path: json, data_files: data/*.jsonl", ("custom", "data", "train", ("*.jsonl",), "")),
        (
            "path: parquet, data_files: [data/a/b.parquet, data/c.parquet], columns: [prompt]",
            ("custom", "data", "train", ("a/b.parquet", "c.parquet"), ""),
        ),
    ],
)
def test_a_mixture_of_one_data_set_is_that_data_set(entry, values, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"datasets:\n  - {{{entry}}}\ntest_split_size: 0.1\n")
    task = compose("train", [str(file)])[0].task
    assert (task.name, task.path, task.split, task.files, task.subset) == values
    assert task.hold_out
    assert compose("train", [str(file), "recipe=trl"])[0].task.hold_out


def test_a_chat_template_is_a_file_or_in_a_tokenizers_folder(tmp_path):
    file = tmp_path / "chat_template.jinja"
    file.write_text("{{ messages }}")
    for path in (file, tmp_path):
        config, _ = compose("train", [f"chat_template_path={path}"])
        assert config.model.template == str(file)


@pytest.mark.parametrize(
    ("line", "entries"),
    [
        ("chat_template_kwargs: {enable_thinking: false, effort: low}",
         ("enable_thinking=false", "effort=low")),
        ("data.apply_chat_template_kwargs: {depth: 3}", ("depth=3",)),
        ("data: {apply_chat_template_kwargs: {enable_thinking: true}}", ("enable_thinking=true",)),
        ("chat_template_kwargs: {}", ()),
        ("chat_template_kwargs: null", ()),
    ],
)  # fmt: skip
def test_variables_of_the_template_are_taken_from_a_recipes_mapping(line, entries, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(line)
    config, _ = compose("train", [str(file)])
    assert config.model.template_variables == entries
    as_json = ["--chat_template_kwargs", '{"enable_thinking": false, "depth": 1.5}']
    config, _ = compose("train", as_json)
    assert config.model.template_variables == ("enable_thinking=false", "depth=1.5")


def test_a_pattern_of_a_system_counts_beside_its_recipe():
    word = "actor_rollout_ref.actor.profiler.enable=false"
    assert compose("train", ["recipe=verl", word])[0] == compose("train", ["recipe=verl"])[0]
    with pytest.raises(ShoalError, match="there is no such key"):
        compose("train", [word])


@pytest.mark.parametrize(
    ("words", "warmup"),
    [
        # transformers rounds a share up, verl and MaxText round it down; verl counts training
        # steps, of 4 updates here.
        ("max_steps=45 warmup_ratio=0.1", 5),
        ("max_steps=45 warmup_steps=0.1", 5),
        ("max_steps=45 warmup_steps=7", 7),
        ("max_steps=45 warmup_ratio=0.1 lr_scheduler_type=constant", 0),
        ("warmup_steps=7 lr_scheduler_type=constant", 0),
        ("warmup_steps=7 lr_scheduler_type=constant_with_warmup", 7),
        ("recipe=verl steps=45 V.lr_warmup_steps_ratio=0.1", 16),
        ("recipe=verl steps=45 V.lr_warmup_steps=7", 28),
        ("recipe=verl steps=45 V.lr_warmup_steps=-1 V.lr_warmup_steps_ratio=0.2", 36),
        ("recipe=verl steps=45 V.lr_warmup_steps=7 V.lr_scheduler_type=constant", 28),
        ("steps=45 warmup_steps_fraction=0.1", 4),
        ("rl.yml", 0),
        ("rl.yml steps=45", 4),
        ("--config-name train_rl steps=30", 3),
        ("grpo.yml", 10),
    ],
)
def test_a_warm_up_is_as_long_as_in_its_own_system(words, warmup):
    config, _ = compose("train", words.replace("V.", "actor_rollout_ref.actor.optim.").split())
    assert config.optimizer.warmup_steps == warmup


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            "recipe=maxtext steps=40 learning_rate_schedule_steps=10",
            "learning_rate_schedule_steps=10: expected 40, the updates of this run",
        ),
        (
            "recipe=tunix steps=40 T.decay_steps=10",
            "decay_steps=10: expected 40, the updates of this run",
        ),
        ("recipe=tunix T.end_value=1e-6", "end_value=1e-6: expected 0.0 or 0"),
        ("recipe=tunix T.init_value=1e-6", "init_value=1e-6: expected 0.0 or 0"),
    ],
)
def test_a_schedule_that_ends_before_the_run_is_refused(words, part):
    with pytest.raises(ShoalError) as caught:
        compose("train", words.replace("T.", "rl_training_config.actor_optimizer_config.").split())
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "recipe=maxtext steps=40 learning_rate_schedule_steps=40",
        "recipe=maxtext learning_rate_schedule_steps=-1",
        "recipe=tunix steps=40 T.decay_steps=40 T.end_value=0.0",
        "steps=40 optimizer.schedule=constant T.decay_steps=10",
    ],
)
def test_a_schedule_of_the_whole_run_is_accepted(words):
    compose("train", words.replace("T.", "rl_training_config.actor_optimizer_config.").split())


@pytest.mark.parametrize(
    ("words", "every"),
    [
        ("max_steps=100 save_steps=0.25", 25),
        ("max_steps=10 save_steps=0.25", 3),
        ("max_steps=100 save_steps=20", 20),
        ("max_steps=100 save_steps=0.25 num_iterations=2", 13),
    ],
)
def test_trls_shares_of_a_run_are_steps(words, every):
    assert compose("train", words.split())[0].checkpoint.every == every


def test_verls_bypass_mode_is_the_direct_correction():
    head = "algorithm.rollout_correction."
    for more in ([], [f"{head}rollout_is=token"], [f"{head}loss_type=ppo_clip"]):
        assert (
            compose("train", [f"{head}bypass_mode=true", *more])[0].algorithm.correction == "direct"
        )
    assert (
        compose("train", ["recipe=verl", f"{head}bypass_mode=false"])[0].algorithm.correction
        == "none"
    )
    for more in ("loss_type=reinforce", "rollout_rs=seq_mean_k1"):
        with pytest.raises(ShoalError, match=more.replace(".", r"\.")):
            compose("train", [f"{head}bypass_mode=true", f"{head}{more}"])


@pytest.mark.parametrize(
    "word",
    [
        "adam_eps_root=1e-8",
        "adamw_mask=[norm]",
        "enable_rampup_batch_size=true",
        "reuse_example_batch=1",
        "trainer.critic_warmup=5",
        "dataset_text_field=story",
    ],
)
def test_what_acts_in_its_own_system_is_not_called_idle(word):
    with pytest.raises(ShoalError, match=word.partition("=")[0]):
        compose("train", [word])


def test_the_pathways_script_trains_the_instruct_model():
    config, _ = compose("train", shim_argv("grpo_llama3_1_70b_demo_pw", [])[1:])
    assert (config.model.name, config.model.tokenizer) == (
        "llama3.1-70b-Instruct",
        "meta-llama/Llama-3.1-70B-Instruct",
    )
    assert config.optimizer.warmup_steps == 0  # a tenth of 4 steps
