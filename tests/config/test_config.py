"""Configuration: what is typed arrives as meant, what is wrong is named, what is written composes
to the same."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.commands.help import command_help
from shoal.config.arguments import read_arguments
from shoal.config.choices import ADVANTAGES, POLICY_LOSSES
from shoal.config.commands import COMMANDS, EvalConfig, ExportConfig, GenerateConfig
from shoal.config.derived import evaluates_as_in_training, evaluation_completions
from shoal.config.key import (
    Key,
    OnResume,
    build,
    convert_value,
    get_value,
    keys_of,
    leaves_of,
    shown,
    with_values,
)
from shoal.config.keywords import PYTHON_OBJECTS
from shoal.config.merge import PACKAGED, compose, from_overrides, load
from shoal.config.names import ALIASES, aliases_of, names_of
from shoal.config.preset_files import PRESETS, PRESETS_OF_SYSTEMS, presets_of
from shoal.config.sections.optimizer import OptimizerSection
from shoal.config.stored import (
    Decision,
    difference_from_defaults,
    require_given,
    resolved,
    texts_of,
    to_dict,
    to_yaml,
)
from shoal.config.train import Config
from shoal.job.resume import overrides_for_resume
from shoal.records import ShoalError
from shoal.rewards.loading import load_objects
from shoal.text import _at_most, exact, likeness, nearest
from shoal.trainer.own_advantage import load_advantage

PACKAGE = Path(__file__).parents[2] / "src" / "shoal"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
HARD_TEXTS = [
    "</answer>",
    "a=b",
    "a b",
    " lead",
    "[x]",
    "{a: b}",
    "a,b",
    "a:b",
    "it's",
    '"q"',
    "a\\",
    "\\'",
    "\\\\'",
    "${steps}",
    "\\${x}",
    "\\\\${",
    "$",
    "???",
    "",
    "null",
    "true",
    "123",
    "1e-4",
    "007",
    "ünï→☃",
    "a\nb",
    "~",
    "@x",
    "#c",
    "%",
    "!tag",
    "- a",
    "(x)",
    "'",
    "''",
    "\t",
]


def difference(command: str, *argv: str) -> dict:
    return difference_from_defaults(compose(command, argv)[0])


# ---- arguments


OWN = [command for command in COMMANDS if command != "sft"]
"""The commands that have defaults of their own: `shoal sft` is `shoal train` with some keys
given."""


def test_fine_tuning_is_training_with_keys_given():
    config = compose("sft")[0]
    assert config.algorithm.learns_from_data and config.task.name == "custom"
    assert keys_of(COMMANDS["sft"]) == keys_of(Config)


@pytest.mark.parametrize("command", OWN)
def test_nothing_given_is_the_defaults(command):
    config, resolved = compose(command)
    assert config == COMMANDS[command]()
    assert (resolved.notes, resolved.config_name) == ((), "")


SAMPLES = {str: ("some", "some"), int: ("3", 3), float: ("0.5", 0.5)}


@pytest.mark.parametrize(
    ("command", "name"), [(c, n) for c in OWN for n in aliases_of(COMMANDS[c]) if n != "algorithm"]
)
def test_each_alias_sets_its_key(command, name):
    key = keys_of(COMMANDS[command])[ALIASES[name].key]
    text, value = (
        ("a.py:f", ("a.py:f",)) if key.is_list else SAMPLES.get(key.type, key.choices[-1:] * 2)
    )
    assert (
        difference(command, f"{name}={text}")
        == {key.name: value}
        == difference(command, f"{key.name}={text}")
    )


def test_the_alias_table_holds_no_dead_or_shadowing_name():
    used = {name for config_type in COMMANDS.values() for name in aliases_of(config_type)}
    assert used == set(ALIASES)
    for config_type in COMMANDS.values():
        assert not set(aliases_of(config_type)) & set(keys_of(config_type))


def test_the_names_of_the_field_are_taken():
    assert aliases_of(Config).keys() == {
        "model",
        "task",
        "reward",
        "algorithm",
        "tools",
        "environment",
        "rollout",
        "agent",
        "checkpoint_period",
        "max_staleness",
    }
    assert names_of(GenerateConfig)["max_new_tokens"] == "sampling.max_completion_tokens"
    assert difference("export", "from=run", "to=out") == {"source": "run", "to": "out"}
    assert difference("train", "reward=a.py:f,b.py:g") == {"reward.functions": ("a.py:f", "b.py:g")}
    assert difference("eval", "temperature=0", "top_p=0.9", "stop=</answer>") == {
        "sampling.temperature": 0.0,
        "sampling.top_p": 0.9,
        "sampling.stop": ("</answer>",),
    }


@pytest.mark.parametrize(
    "word", ["steps=7", "--steps=7", "+steps=7", "++steps=7", "steps=7.0", "steps= 7"]
)
def test_ways_to_write_a_key(word):
    assert difference("train", word) == {"steps": 7}


def test_dashes_flags_and_repetition():
    assert difference("train", "--run-name=a-b", "--report.groups=no", "steps=1", "steps=2") == {
        "run_name": "a-b",
        "report.groups": False,
        "steps": 2,
    }
    assert difference("train", "report.groups=false", "--report.groups") == {}
    assert difference("train", "report.groups=false", "report.groups") == {}


def test_the_schema_decides_the_type():
    config, _ = compose(
        "train",
        [
            "run_name=123",
            "base_output_directory=true",
            "model.path=null",
            "optimizer.lr=1e-4",
            "optimizer.beta1=0",
            "steps=1e2",
            "reward.functions=a.py:f",
            "reward.weights=[2]",
        ],
    )
    assert (config.run_name, config.base_output_directory, config.model.path) == (
        "123",
        "true",
        "null",
    )
    assert (config.optimizer.lr, config.steps, config.reward.weights) == (1e-4, 100, (2.0,))
    assert type(config.steps) is int and type(config.optimizer.beta1) is float


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("", ()),
        ("[]", ()),
        ("[a,b]", ("a", "b")),
        ("[ a , b c ]", ("a", "b c")),
        ("a,b", ("a,b",)),
        ("['a,b',\"]\"]", ("a,b", "]")),
        ('["\\"", \'\']', ('"', "")),
        ("[a", ("[a",)),
        ("[1,true]", ("1", "true")),
        ("['\\n']", ("n",)),
        ("[</answer>,${steps}]", ("</answer>", "${steps}")),
        ("[", ("[",)),
        ("a]", ("a]",)),
    ],
)
def test_lists(text, items):
    assert compose("train", [f"sampling.stop={text}"])[0].sampling.stop == items


def test_rewards_and_weights_split_at_commas():
    config, _ = compose("train", ["reward=a.py:f, b.py:g", "reward.weights=1,0.5"])
    assert (config.reward.functions, config.reward.weights) == (("a.py:f", "b.py:g"), (1.0, 0.5))


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_text_arrives_unchanged(text):
    config, resolved = compose("train", [f"run_name={text}", f"sampling.stop={text}"])
    assert config.run_name == text
    if text and not text.startswith("["):
        assert config.sampling.stop == (text,)
    assert resolved.arguments.settings[0].value == text


@settings(max_examples=25, deadline=None)
@given(TEXT)
def test_any_text_arrives_unchanged(text):
    assert compose("generate", [f"prompts={text}"])[0].prompts == text


def test_a_command_line_is_entries():
    arguments = read_arguments("train", ["gsm8k.yml", "--steps=5", "sampling.stop=1"])
    assert arguments.config_name == "gsm8k.yml"
    assert [(one.name, one.value, one.origin) for one in arguments.settings] == [
        ("steps", "5", "command line"),
        ("sampling.stop", ["1"], "command line"),
    ]


def test_words_without_a_key_get_theirs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lr=1").mkdir()
    assert difference("diff", "--json", "lr=1", "b") == {"run": "lr=1", "other": "b", "json": True}
    assert difference("replay", "step=3", "json", "a", "group=2") == {
        "run": "a",
        "step": 3,
        "group": 2,
        "json": True,
    }
    with pytest.raises(ShoalError, match=r"lr=2: there is no such key|lr: there is no such key"):
        compose("diff", ["lr=2"])
    with pytest.raises(ShoalError, match="word: there is no such key"):
        compose("train", ["word"])


def test_where_a_configuration_came_from_is_kept():
    _, resolved = compose("train", ["gsm8k.yml", "--steps=5"])
    assert resolved.arguments == read_arguments("train", ["gsm8k.yml", "--steps=5"])
    _, resolved, _ = from_overrides(Config, steps=5)
    assert [(one.name, one.value, one.origin) for one in resolved.arguments.settings] == [
        ("steps", "5", "Python")
    ]


# ---- bad input


@pytest.mark.parametrize(
    ("command", "word", "parts"),
    [
        ("train", "optimiser.lr=1", ["optimiser.lr", "did you mean optimizer.lr?"]),
        ("train", "stpes=1", ["stpes", "did you mean steps?"]),
        ("train", "temprature=1", ["did you mean sampling.temperature?"]),
        ("train", "num_generation=1", ["did you mean num_generations (batch.group_size)?"]),
        (
            "eval",
            "learning_rate=1",
            ["learning_rate: shoal eval has no use for it, shoal train does"],
        ),
        ("train", "algorithm.kl_coeff=1", ["did you mean algorithm.kl_coef?"]),
        ("train", "modle=x", ["did you mean model (model.path)?", "shoal train --help"]),
        (
            "generate",
            "max_new_token=3",
            ["did you mean max_new_tokens (sampling.max_completion_tokens)?"],
        ),
        ("export", "form=x", ["did you mean from (source)?"]),
        ("eval", "algorithm.name=dapo", ["algorithm.name: shoal eval has no use for it"]),
        ("eval", "steps=1", ["steps: shoal eval has no use for it, shoal train does"]),
        ("train", "optimizer=3", ["optimizer", "section", "optimizer.lr"]),
        ("train", "--steps", ["--steps", "steps=VALUE"]),
        ("train", "=3", ["expected key=value"]),
        ("train", "--", ["expected key=value"]),
        ("train", "steps=many", ["steps='many'", "a whole number"]),
        ("train", "steps=1.5", ["steps='1.5'", "a whole number"]),
        ("train", "steps=", ["steps=''", "a whole number"]),
        ("train", "seed=true", ["seed='true'", "a whole number"]),
        ("train", "optimizer.lr=fast", ["optimizer.lr='fast'", "a finite number"]),
        ("train", "optimizer.lr=nan", ["optimizer.lr='nan'", "a finite number"]),
        ("train", "report.groups=perhaps", ["report.groups='perhaps'", "true or false"]),
        (
            "train",
            "model.dtype=float8",
            ["model.dtype='float8'", "auto, float32, bfloat16, float16"],
        ),
        ("train", "reward.weights=[1,x]", ["reward.weights='x'", "a finite number"]),
        ("train", "sampling.stop=['a]", ["sampling.stop", "quotes"]),
        ("train", "sampling.top_p=2", ["sampling.top_p=2.0", "(0, 1]"]),
        ("train", "batch.prompts_per_step=0", ["batch.prompts_per_step=0", "1 or more"]),
        ("train", "nix.yml", ["nix.yml", "Presets: aime24, ", ", base, ", ", grpo, ", "gsm8k, "]),
        ("train", "--config-name=gsm", ["gsm", "did you mean gsm8k?"]),
        ("train", "--config-name", ["--config-name", "and there is nothing"]),
        ("export", "gsm8k.yml", ["gsm8k.yml", "export has no presets"]),
    ],
)
def test_bad_input_is_named(command, word, parts):
    with pytest.raises(ShoalError) as caught:
        compose(command, [word])
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


def test_trls_file_option_and_trackers_and_a_flag_given_twice(tmp_path):
    (tmp_path / "trl.yaml").write_text(
        "learning_rate: 3e-6\nreport_to: [wandb, tensorboard]\nlog_completions: true\n"
    )
    config, _ = compose("train", ["--config", str(tmp_path / "trl.yaml")])
    assert (config.optimizer.lr, config.report.wandb.mode, config.report.tensorboard) == (
        3e-6,
        "auto",
        True,
    )
    assert config.report.completions_every == 1
    report = compose("train", [f"--config={tmp_path / 'trl.yaml'}", "--report_to", "none"])[
        0
    ].report
    assert (report.wandb.mode, report.tensorboard) == ("off", False)
    assert compose("train", ["--report_to", "wandb"])[0].report.wandb.mode == "auto"
    report = compose("train", ["report_to=[mlflow,trackio]"])[0].report
    assert (report.mlflow.mode, report.trackio.mode, report.wandb.mode) == ("auto", "auto", "off")
    assert "changes nothing here" in compose("train", ["--report_to", "comet_ml"])[1].start_lines[0]
    config, _ = compose("train", ["--loss_type", "grpo", "--loss_type", "dapo"])
    assert config.algorithm.aggregation == "token-mean"
    assert compose("train", ["steps=3", "--steps=4"])[0].steps == 4
    assert (
        "the later one counts"
        in compose("train", ["max_staleness=1", "train.max_staleness=2"])[1].notes[0]
    )


def test_two_presets_are_refused():
    with pytest.raises(ShoalError, match=r"two presets were named, a\.yml and b"):
        compose("train", ["a.yml", "--config-name", "b"])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("- a\n", ["cannot be read", "expected keys with values"]),
        ("steps: [\n", ["cannot be read", "line 2"]),
        ("", ["is empty", "expected keys with values"]),
        ("# only a comment\n", ["is empty"]),
        ("steps: !!int ''\n", ["cannot be read", "tag"]),
        ("steps: !!bool foo\n", ["cannot be read", "tag"]),
        ("steps: !!timestamp foo\n", ["cannot be read", "tag"]),
        (
            "task: {columns: " + "[" * 5_000 + "]" * 5_000 + "}\n",
            ["cannot be read", "recursion depth"],
        ),
        ("optimizer:\n\tlr: 1\n", ["cannot be read", "line 2", "'\\t'"]),
        ("steps: 3\nsteps: 4\n", ["lines 1 and 2 both set steps"]),
        ("defaults: [mine]\n", ["lead back to itself"]),
        ("steps: ${nope}\n", ["nope"]),
        ("defaults: [nix]\n", ["its `defaults` name nix"]),
        ("run_name: 007\n", ["run_name=7", "quotes"]),
        ("run_name: null\n", ["run_name=null", "text"]),
        ("steps: {a: 1}\n", ["steps={'a': 1}", "whole number"]),
        ("steps: true\n", ["steps=true", "whole number"]),
        ("optimiser: {lr: 1}\n", ["optimiser.lr", "did you mean optimizer.lr?"]),
        ("optimiser: {}\n", ["optimiser", "no such key"]),
        ("sampling: {stop: [1]}\n", ["sampling.stop=1", "text"]),
        ("optimizer: 3\n", ["optimizer", "section"]),
        ("report: {groups: 1}\n", ["report.groups=1", "true or false"]),
        ("reward_funcs: [1, 2]\n", ["reward.functions=1", "text"]),
        ("epsilon: [1, 2]\nepsilon_high: 0.3\n", ["epsilon=[1,2]", "finite number"]),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, parts):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ShoalError) as caught:
        compose("train", [str(file)])
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ShoalError, match=r"mine.yaml cannot be read"):
        compose("train", [str(tmp_path / "mine.yaml")])


def test_require_given():
    with pytest.raises(
        ShoalError, match=r"^output is not given: write output=\.\.\. \(the jsonl file to write"
    ):
        require_given(GenerateConfig(prompts="a"), "prompts", "output")
    with pytest.raises(ShoalError, match=r"^from is not given: write from="):
        require_given(ExportConfig(), "source", "to")
    require_given(GenerateConfig(prompts="a", output="b"), "prompts", "output")


# ---- presets and files


@pytest.mark.parametrize("command", COMMANDS)
def test_each_preset_composes_and_matters(command):
    for name in {*presets_of(command)} - ({"base"} if command == "convert" else set()):
        assert difference(command, "--config-name", name)


def test_presets_belong_to_commands():
    for place in (PRESETS, PRESETS_OF_SYSTEMS):
        assert {folder.name for folder in place.iterdir()} <= {*COMMANDS, *PACKAGED.values()}


@pytest.mark.parametrize(
    "argv",
    [
        ["gsm8k.yml"],
        ["configs/gsm8k.yaml"],
        ["--config-name", "gsm8k"],
        ["--config-name=gsm8k"],
        ["-cn", "gsm8k.yaml"],
        ["task=gsm8k"],
    ],
)
def test_the_gsm8k_preset(argv):
    config, resolved = compose("train", argv)
    assert resolved.config_name == "gsm8k"
    assert (config.task.name, config.optimizer.lr, config.algorithm.kl_coef) == (
        "gsm8k",
        1e-6,
        0.04,
    )
    assert (config.sampling.max_prompt_tokens, config.sampling.max_completion_tokens) == (256, 512)
    assert (config.batch.prompts_per_step, config.batch.group_size) == (16, 8)
    assert config.train.evaluate_every == 50


def test_a_tasks_preset_lies_under_ones_own_keys_and_is_said():
    config, resolved = compose(
        "train", ["task=gsm8k", "optimizer.lr=1e-5", "sampling.max_completion_tokens=64"]
    )
    assert (config.optimizer.lr, config.sampling.max_completion_tokens) == (1e-5, 64)
    assert len(resolved.notes) == 1
    assert "task=gsm8k" in resolved.notes[0] and "algorithm.kl_coef=0.04" in resolved.notes[0]
    assert (
        "optimizer.lr" not in resolved.notes[0] and "max_completion_tokens" not in resolved.notes[0]
    )
    assert compose("train", ["--config-name", "gsm8k"])[1].notes == ()
    assert compose("train", ["task=words"])[0] == Config()


@pytest.mark.parametrize(
    ("words", "every", "questions"),
    [
        ([], 10, 100),
        (["train.evaluate_every=0", "train.quick_questions=0"], 0, 0),
        (["train.evaluate_every=-1"], -1, 100),
        (["task=gsm8k"], 50, 0),
        (["task=gsm8k", "train.quick_questions=7"], 50, 7),
        (["checkpoint.keep_best=1"], 10, 0),
    ],
)
def test_a_curve_by_default_where_that_takes_seconds(words, every, questions):
    config = compose("train", words)[0]
    assert (config.evaluate_every, config.quick_questions) == (every, questions)


def test_the_best_are_found_by_evaluations_of_the_same_questions():
    with pytest.raises(
        ShoalError, match=r"train.quick_questions=7: expected 0 \(all\) with checkpoint.keep_best"
    ):
        compose("train", ["train.quick_questions=7", "checkpoint.keep_best=1"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluation.samples=4"], "expected 1, or evaluation.temperature above 0"),
        (["evaluation.samples=0"], "evaluation.samples=0"),
        (["evaluation.temperature=-1"], "evaluation.temperature=-1.0"),
        (["evaluation.temperature=1", "evaluation.top_p=0"], "evaluation.top_p=0.0"),
        (["evaluation.temperature=1", "train.pass_k=4"], "train.pass_k=4: expected 0 with"),
        (
            ["evaluation.temperature=1", "evaluation.samples=16", "sampling.slots_per_device=8"],
            "(evaluation.samples=16)",
        ),
        (
            [
                "evaluation.temperature=1",
                *["sampler.kind=vllm", "vllm.python=p", "sampling.top_p=0.9"],
            ],
            "evaluation.temperature=1.0: expected 0 (greedy) with sampler.kind=vllm",
        ),
    ],
)
def test_answers_of_an_evaluation_that_cannot_be(words, said):
    with pytest.raises(ShoalError) as caught:
        compose("train", words)
    assert said in str(caught.value)


def test_sampled_answers_take_the_place_of_samples_for_pass_k():
    greedy = compose("train", ["steps=20"])[0]
    words = ["steps=20", "evaluation.temperature=0.6", "evaluation.samples=4"]
    sampled = compose("train", words)[0]
    assert (greedy.pass_k, sampled.pass_k) == (8, 0)
    # 500 and 100 questions: two whole evaluations and one of 100 questions of each set between
    sets = {"held_out": 500, "other": 100}
    assert evaluation_completions(greedy, sets) == 2 * (600 + 8 * 100) + 200
    assert evaluation_completions(sampled, sets) == 4 * (2 * 600 + 200)
    assert (
        evaluation_completions(dataclasses.replace(greedy, steps=0), sets) == 600 + 8 * 100
    )  # one alone
    assert evaluates_as_in_training(sampled)
    cut = compose("train", [*words, "evaluation.top_p=0.9"])[0]
    assert not evaluates_as_in_training(cut)
    both = compose("train", [*words, "evaluation.top_p=0.9", "sampling.top_p=0.5"])[0]
    assert not evaluates_as_in_training(both)  # training stores what it sampled from
    word = "algorithm.match_sampling_support=false"
    assert evaluates_as_in_training(compose("train", [*words, "sampling.top_p=0.5", word])[0])
    # greedy: top_p has no effect
    assert evaluates_as_in_training(compose("train", ["evaluation.top_p=0.9"])[0])


def test_eval_has_its_own_gsm8k_sizes():
    assert difference("eval", "task=gsm8k") == {
        "task.name": "gsm8k",
        "task.num_eval_questions": 0,
        "sampling.max_completion_tokens": 512,
    }


@pytest.mark.parametrize("name", ["mine.yml", "mine.yaml", "my run=1.yml"])
def test_ones_own_file_builds_on_a_preset(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(
        "defaults: [gsm8k, base, _self_]\nsteps: 7\ntrain:\n  evaluate_every: ${steps}\nreport:\n"
    )
    Path("base.yaml").write_text("seed: 5\noptimizer: {lr: 1e-3}\n")
    found = difference("train", name, "steps=9")
    assert (found["steps"], found["train.evaluate_every"], found["seed"]) == (9, 9, 5)
    assert (found["optimizer.lr"], found["task.name"]) == (1e-3, "gsm8k")


def test_short_forms_in_a_file_yield_to_the_command_line(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("sampling: {top_k: 3, stop: x}\ntemperature: 0.7\nmodel: foo\n")
    expected = {
        "model.path": "foo",
        "sampling.temperature": 0.7,
        "sampling.top_k": 3,
        "sampling.stop": ("x",),
    }
    assert difference("generate", str(file)) == expected
    assert difference("generate", str(file), "sampling.temperature=0.5", "model.dtype=float32") == {
        **expected,
        "sampling.temperature": 0.5,
        "model.dtype": "float32",
    }


def test_a_stored_configuration_takes_ones_own_keys_over_it(tmp_path):
    stored = tmp_path / "config.yaml"
    stored.write_text(compose("train", ["task=gsm8k", "steps=50", "optimizer.lr=1e-5"])[1].text)
    _, given = compose("train", ["resume=last", "steps=200"])
    config, resolved = load(Config, given.arguments, stored)
    assert (config.resume, config.steps, config.optimizer.lr, config.task.name) == (
        "last",
        200,
        1e-5,
        "gsm8k",
    )
    assert resolved.arguments is given.arguments
    # their preset lies under the stored keys, and is in them
    _, given = compose("train", ["gsm8k.yml", "task=gsm8k"])
    assert load(Config, given.arguments, stored)[0] == compose("train", [str(stored)])[0]


@pytest.mark.parametrize(
    "command", [command for command, kind in COMMANDS.items() if not issubclass(kind, Config)]
)
def test_a_training_configuration_can_be_given_to_other_commands(tmp_path, command):
    file = tmp_path / "config.yaml"
    file.write_text(
        compose("train", ["task=gsm8k", "sampling.max_prompt_tokens=99", "seed=3"])[1].text
    )
    config, resolved = compose(command, [str(file)])
    keys = keys_of(type(config))
    shared = {"seed": 3, "task.name": "gsm8k", "sampling.max_prompt_tokens": 99}
    assert {name: get_value(config, name) for name in shared if name in keys} == {
        name: value for name, value in shared.items() if name in keys
    }
    [note] = resolved.notes
    assert (
        f"holds {len(set(keys_of(Config)) - set(keys))} keys that only training reads, passed "
        "over: " in note
    )


def test_only_trainings_keys_are_passed_over(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("steps: 3\noptimizer:\nbatch: {group_size: 4}\nmodel: x\n")
    config, resolved = compose("eval", [str(file), "batch=64"])
    assert (config.model.path, config.batch) == ("x", 64)
    assert resolved.notes == (
        f"{file} holds 2 keys that only training reads, passed over: steps, batch.group_size",
    )
    config, resolved = compose("eval", [str(file)])
    assert config.batch == 128 and "2 keys" in resolved.notes[0]
    for text, wanted in (
        ("stpes: 3", "stpes: there is no such key"),
        ("optimizer: {lrr: 3}", "optimizer.lrr"),
        ("batch: {nix: 3}", "batch="),
        ("prompts: x", "prompts: there is no such key"),
    ):
        file.write_text(text)
        with pytest.raises(ShoalError, match=wanted):
            compose("eval", [str(file)])
    file.write_text("pass_k: 3")
    with pytest.raises(ShoalError, match="pass_k: there is no such key"):
        compose("train", [str(file)])


def test_doctor_takes_trains_presets(tmp_path):
    assert presets_of("doctor") == presets_of("train")
    config, resolved = compose("doctor", ["task=gsm8k", "json=true"])
    assert (
        config.algorithm.kl_coef == 0.04 and config.json and "loads its preset" in resolved.notes[0]
    )
    (tmp_path / "mine.yaml").write_text("defaults: [gsm8k, _self_]\n")
    assert compose("doctor", [str(tmp_path / "mine.yaml")])[0].optimizer.lr == 1e-6


# ---- Python


def reward_one(completions, **kwargs):
    return [1.0] * len(completions)


def test_from_python():
    config, _, functions = from_overrides(
        Config,
        model="x",
        optimizer={"lr": 1e-5, "beta1": 0},
        batch__group_size=4,
        reward=reward_one,
        seed=3,
        run_name="[a, ${b}]",
        sampling={"stop": ["a,b", "[c]"]},
        report={"groups": False},
        **{"train.pass_k": 2},
    )
    assert functions == (reward_one,)
    assert difference_from_defaults(config) == {
        "seed": 3,
        "run_name": "[a, ${b}]",
        "model.path": "x",
        "sampling.stop": ("a,b", "[c]"),
        "optimizer.lr": 1e-5,
        "optimizer.beta1": 0.0,
        "batch.group_size": 4,
        "train.pass_k": 2,
        "report.groups": False,
    }
    changed = difference_from_defaults(config)
    optimizer = {}
    for name, value in changed.items():
        if name.startswith("optimizer."):
            optimizer[name] = value
    assert optimizer == {"optimizer.lr": 1e-5, "optimizer.beta1": 0.0}


@pytest.mark.parametrize(
    ("given", "names", "functions"),
    [
        ({"reward": [reward_one, len]}, (), (reward_one, len)),
        ({"reward": "a.py:f"}, ("a.py:f",), ()),
        ({"reward": ["a.py:f", "b.py:g"]}, ("a.py:f", "b.py:g"), ()),
        ({"reward": {"functions": reward_one, "weights": 2}}, (), (reward_one,)),
        ({"reward__functions": (reward_one,)}, (), (reward_one,)),
    ],
)
def test_rewards_from_python(given, names, functions):
    config, _, found = from_overrides(EvalConfig, **given)
    assert (config.reward.functions, found) == (names, functions)


def test_python_shares_presets_and_errors(tmp_path):
    assert (
        from_overrides(Config, task="gsm8k", optimizer__lr=1e-5)[0]
        == compose("train", ["task=gsm8k", "optimizer.lr=1e-5"])[0]
    )
    assert from_overrides(Config, config_name="gsm8k")[0].algorithm.kl_coef == 0.04
    assert from_overrides(GenerateConfig, output=tmp_path)[0].output == str(tmp_path)
    for bad, message in [
        ({"stpes": 1}, "did you mean steps"),
        ({"steps": True}, "steps='True'"),
        ({"optimizer": 3}, "section"),
        ({"stpes": None}, "did you mean steps"),
        ({"run_name": b"x"}, "run_name=b'x'"),
        ({"tools": [None]}, r"tools=\[None\]"),
        ({"reward": [None]}, r"reward=\[None\]"),
        ({"stop": {"a": None}}, "stop"),
    ]:
        with pytest.raises(ShoalError, match=message):
            from_overrides(Config, **bad)


def test_none_from_python_is_a_key_that_is_not_given():
    """As an argument that somebody's own function has by default: not the text "None"."""
    for name in (*keys_of(Config), *aliases_of(Config)):
        config, resolved, functions = from_overrides(Config, **{name: None})
        assert (config, dict(resolved.origins), functions) == (Config(), {}, ()), name
    config, *_ = from_overrides(
        Config, optimizer={"lr": None, "beta1": 0}, sampling=None, config_name=None
    )
    assert difference_from_defaults(config) == {"optimizer.beta1": 0.0}
    given = {"resume": None, "config_name": None, "steps": 3}
    assert overrides_for_resume(given) == (given, None)


class Kind(str):
    """As a class of str and Enum is in Python 3.11."""

    def __str__(self) -> str:
        return "Kind.ONE"


@pytest.mark.parametrize("value", [np.str_("one"), Kind("one")])
def test_a_kind_of_text_from_python_is_a_plain_text(value):
    config, *_ = from_overrides(Config, run_name=value, sampling={"stop": [value]})
    assert type(config.run_name) is str and config.sampling.stop == ("one",)
    assert "run_name: one\n" in to_yaml(config)


@pytest.mark.parametrize(
    "value", [{"a", "b"}, np.array(["a", "b"]), (one for one in "ab"), {"a": 1}.keys(), range(2)]
)
@pytest.mark.parametrize("name", ["sampling.stop", "run_name"])
def test_what_is_no_list_from_python_is_refused_and_not_a_text_of_itself(name, value):
    with pytest.raises(
        ShoalError,
        match=rf"{name}=.*: expected a value, or a list of such; give list\(...\) of the",
    ):
        from_overrides(Config, **{name: value})


@pytest.mark.parametrize(
    "name", ["max_steps", "beta", "reward_weights", "learning_rate", "max_completion_length"]
)
def test_none_from_python_is_null_of_another_systems_file(tmp_path, name):
    (tmp_path / "their.yml").write_text(f"{name}: null\n")
    assert (
        from_overrides(Config, **{name: None})[0]
        == compose("train", [str(tmp_path / "their.yml")])[0]
    )


def test_a_file_that_is_null_is_no_file_of_that_name():
    with pytest.raises(ShoalError, match=r"data.train_files=null: expected a file"):
        from_overrides(Config, **{"data.train_files": None})


def make_tool(text):
    def search(query: str) -> str:
        """Searches."""
        return text

    return search


def test_objects_of_one_name_do_not_take_each_others_place():
    one, other = make_tool("one"), make_tool("other")
    config, *_ = from_overrides(Config, tools=[one, other, one], environment=make_tool("third"))
    names = config.environment.tools
    assert names == ("python:search", "python:search-2", "python:search")
    assert load_objects(names, "tool") == [one, other, one]
    assert load_objects([config.environment.factory], "environment")[0]("") == "third"
    # The same object again is the same name; a later call that gives another makes a stored name
    # ambiguous.
    assert from_overrides(Config, tools=[one])[0].environment.tools == ("python:search",)
    assert "python:search" in PYTHON_OBJECTS
    from_overrides(Config, tools=[make_tool("fourth")])
    from_overrides(Config)
    assert "python:search" not in PYTHON_OBJECTS
    with pytest.raises(ShoalError, match="came from Python: pass it again in Python"):
        load_objects(["python:search"], "tool")
    assert load_objects(from_overrides(Config, tools=[one])[0].environment.tools, "tool") == [one]


class Counter:
    def count(self) -> int:
        return 1


def test_a_method_is_one_object():
    counter = Counter()
    assert (
        from_overrides(Config, tools=[counter.count, counter.count])[0].environment.tools
        == ("python:count",) * 2
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--task.template", "Solve x=1: {q}"], {"task.template": "Solve x=1: {q}"}),
        (["--task.template", "x={q}", "steps=3"], {"task.template": "x={q}", "steps": 3}),
        (["--run-name", "a=b"], {"run_name": "a=b"}),
        (["--task.template", "a.b={q}"], {"task.template": "a.b={q}"}),
        (["--sampling.stop", "x=1", "steps=3"], {"sampling.stop": ("x=1",), "steps": 3}),
        (["--sampling.stop", "a.b=1", "--steps", "3"], {"sampling.stop": ("a.b=1",), "steps": 3}),
        (
            ["--sampling.stop", "a b=c", "d", "steps=3"],
            {"sampling.stop": ("a b=c", "d"), "steps": 3},
        ),
    ],
)
def test_a_value_behind_its_option_may_hold_an_equals_sign(words, expected):
    assert difference_from_defaults(compose("train", words)[0]) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["--run-name", "steps=3"],
        ["--run-name", "optimizer.lr=3"],
        ["--run-name", "learning_rate=3"],
        ["--run-name", "--steps=3"],
        ["--run-name", "optimizr.lr=3"],
        ["--run-name", "optimizer.rate=3"],
        ["--sampling.stop", "steps=3"],
        ["--sampling.stop", "optimizer.lr=3"],
    ],
)
def test_a_key_behind_an_option_is_a_key(words):
    with pytest.raises(ShoalError, match=f"{words[0]}: expected a value"):
        compose("train", words)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("temperatur", "sampling.temperature"),
        ("mini_batches", "algorithm.num_minibatches"),
        ("lr", "optimizer.lr"),
        ("learning_rat", r"learning_rate \(optimizer.lr\)"),
        ("num_generation", r"num_generations \(batch.group_size\)"),
    ],
)
def test_a_key_of_ours_is_meant_before_another_systems_flag(typed, meant):
    with pytest.raises(ShoalError, match=f"did you mean {meant}[?]"):
        compose("train", [f"{typed}=1"])


@pytest.mark.parametrize(
    ("topic", "keys"),
    [
        ("lora", {"model.lora.rank", "model.lora.alpha"}),
        ("wandb", {"report.wandb.mode"}),
        ("lr", {"optimizer.lr"}),
    ],
)
def test_a_part_of_a_name_is_a_topic_of_the_help(topic, keys):
    listed = set(re.findall(r"(?m)^  ([\w.]+)=", command_help("train", [topic])))
    assert keys <= listed and all(topic in name.split(".") for name in listed)


# ---- back to text


@given(st.floats(allow_nan=False))
def test_a_number_that_is_shown_is_the_number(value):
    """Six digits of it would be another one: `.hydra/overrides.yaml` and an error's cure are typed
    again."""
    assert float(shown(value)) == float(exact(value)) == value
    assert shown((value, 8.0, 1e-06)) == f"[{exact(value)},8,1e-06]"


def test_no_message_rounds_the_value_of_a_key():
    rounded = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for found in re.finditer(
            r"[a-z_]=\{[^{}\n]*:[.\d]*[gef]\}", file.read_text(encoding="utf-8")
        ):
            rounded.append(f"{file.name}: {found[0]}")
    assert not rounded, "text.exact says the value itself"


def any_value(key):
    """Values of a key's type; those out of range are filtered by the caller."""
    if key.name in PACKAGED:
        return st.just("")
    if key.is_list:
        items = {str: TEXT, int: st.integers(1, 9), float: st.floats(0, 1)}[key.type.__args__[0]]
        return st.lists(items, max_size=3).map(tuple)
    if key.type is str:
        return TEXT | st.sampled_from(HARD_TEXTS)
    if key.choices:
        return st.sampled_from(key.choices)
    return {int: st.integers(-2, 1000), float: st.floats(0, 1), bool: st.booleans()}[key.type]


def converted(config, changes):
    """The configuration of its values as JSON has them, and of changes by key."""
    keys = keys_of(type(config))
    plain = dict(leaves_of(type(config), json.loads(json.dumps(to_dict(config))))) | changes
    return build(
        type(config), {name: convert_value(keys[name], value) for name, value in plain.items()}
    )


@pytest.mark.parametrize("text", ["\x85", "a\x85b", "a\u2028b", "a\nb", "${seed}"])
def test_any_text_is_in_the_yaml_as_it_is(text, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(Config(base_output_directory=text)), encoding="utf-8")
    assert compose("train", [str(file)])[0].base_output_directory == text


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_yaml_composes_to_the_same(tmp_path_factory, data):
    command = data.draw(st.sampled_from(sorted(OWN)))
    keys = keys_of(COMMANDS[command])
    chosen = data.draw(st.lists(st.sampled_from(sorted(keys)), unique=True, max_size=6))
    config = COMMANDS[command]()
    for name in chosen:
        value = data.draw(any_value(keys[name]), label=name)
        try:
            config = converted(config, {name: value})
        except ShoalError:
            continue  # out of the key's range
        assert get_value(config, name) == value
    file = tmp_path_factory.mktemp("yaml") / "config.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert compose(command, [str(file)])[0] == config
    assert converted(config, {}) == config


def test_resolved_text_is_the_run_folders(tmp_path):
    config, resolved = compose(
        "train", ["task=gsm8k", "run_name=1e5", "sampling.stop=[a,${b}]", "optimizer.lr=1e-7"]
    )
    text, decided = texts_of(config)
    (tmp_path / "again.yaml").write_text(text)
    assert compose("train", [str(tmp_path / "again.yaml")])[0] == config
    assert decided == ""
    stored = yaml.safe_load(resolved.text)
    assert stored["optimizer"]["lr"] == 1e-7  # a number for any reader
    assert stored["steps"] == 200


# ---- the schema


@pytest.mark.parametrize("command", OWN)
def test_every_key_is_described(command):
    for name, key in keys_of(COMMANDS[command]).items():
        assert key.name == name and key.help and key.type_text, name
        assert get_value(COMMANDS[command](), name) == key.default


def test_descriptions_are_the_lines_under_the_fields():
    rows = keys_of(Config)
    assert rows["optimizer.lr"] == Key(
        "optimizer.lr", float, 1.5e-4, "Peak learning rate of AdamW.", ("update",), "warn"
    )
    assert rows["optimizer.lr"].type_text == "number"
    assert rows["model.dtype"].type_text == "auto | float32 | bfloat16 | float16"
    assert (rows["sampling.stop"].type_text, rows["reward.weights"].type_text) == (
        "list of text",
        "list of numbers",
    )
    assert (
        rows["report.groups"].type_text == "true | false" and rows["steps"].type_text == "integer"
    )


def test_every_key_of_training_says_what_another_value_does_to_a_run():
    """Which stages it acts on, and what a resume does with it: a key that acts on none is free,
    but for names of presets."""
    for name, key in keys_of(Config).items():
        assert key.stages is not None and key.on_resume in get_args(OnResume), name
        if not key.stages:
            assert key.on_resume == "free" or name in ("recipe", "algorithm.name"), name
        if key.decided_from:
            # Else it would be kept, or refused, undecided.
            assert key.on_resume in ("warn", "free", "bits"), name
        for source in key.decided_from:  # a key, or a fact in plain words
            assert source in keys_of(Config) or "." not in source, (name, source)


FIXED_MEANING = {
    "seed",
    "model.lora.rank",
    "reward.overlong_buffer_tokens",
    "evaluation.temperature",
    "evaluation.top_k",
    "evaluation.min_p",
    "sampling.top_k",
    "sampling.min_p",
    "sampling.mean_completion_tokens",
    "algorithm.clip_dual",
    "algorithm.kl_coef",
    "algorithm.kl_clamp_input",
    "algorithm.kl_clamp_value",
    "algorithm.kl_sampler_coef",
    "algorithm.entropy_coef",
    "algorithm.context_coef",
    "algorithm.lam_alpha",
    "critic.warmup_steps",
    "optimizer.weight_decay",
    "batch.prompts_per_device",
    "checkpoint.keep_best",
    "report.completions_every",
    "task.num_train_questions",
    "price",
}
"""Keys whose default 0 is a value as any other: off, none, all, or the longest."""


def test_each_key_that_is_left_open_is_decided_or_says_why_not():
    """All keys whose default may mean that the run chooses: auto, 0, -1 or -2."""
    decided_by_another_key = {"batch.prompts_per_step"}  # its default is a number
    for name, key in keys_of(Config).items():
        may_be_open = key.default == "auto" or (
            type(key.default) in (int, float) and key.default in (0, -1, -2)
        )
        is_open = may_be_open and name not in FIXED_MEANING
        is_decided = bool(key.decided_from) and name not in decided_by_another_key
        assert is_open == (is_decided or bool(key.undecided_because)), name
        assert not (key.decided_from and key.undecided_because), name
    assert set(keys_of(Config)) >= FIXED_MEANING


def test_nearest():
    names = ["optimizer.lr", "sampling.top_k", "steps"]
    assert [nearest(word, names) for word in ("lr", "optim.lr", "top_p", "setps")] == [
        "optimizer.lr",
        "optimizer.lr",
        "sampling.top_k",
        "steps",
    ]
    assert nearest("modle", ["report.wandb.mode", "model"]) == "model"
    for word in ("", "lr", "setps", "OPTIMIZER.LR", "max_tokens.prompt", "İx"):
        # no name is passed over unseen
        for name in (*names, "", "SETPS", "x"):
            assert _at_most(word, name) >= likeness(word, name)


def test_an_advantage_is_an_estimator_or_a_function():
    key = keys_of(Config)["algorithm.advantage"]
    assert key.type_text.startswith("grpo | dr_grpo | ")
    assert key.type_text.endswith(" | file.py:function")
    assert keys_of(Config)["algorithm.loss"].type_text.endswith(" | reinforce")
    for text in ("rloo", "advantages.py:mine", "~/my folder/mine.py:f"):
        assert compose("train", [f"algorithm.advantage={text}"])[0].algorithm.advantage == text
    for text in ("mine", "advantages.py", "reward.py.f"):
        with pytest.raises(ShoalError, match=r"expected one of grpo, .*, or `file\.py:function`$"):
            compose("train", [f"algorithm.advantage={text}"])
    with pytest.raises(
        ShoalError, match=r"algorithm\.loss='f\.py:f': expected one of .* reinforce$"
    ):
        compose("train", ["algorithm.loss=f.py:f"])


def test_an_advantage_is_a_function_from_python():
    def mine(rewards):
        return rewards

    config, _, _ = from_overrides(Config, algorithm={"advantage": mine})
    assert config.algorithm.advantage == "python:mine"
    own = load_advantage(config.algorithm)
    assert own is not None and own.function is mine and own.arguments == ("rewards",)
    config, _, _ = from_overrides(Config, algorithm__advantage="rloo")
    assert config.algorithm.advantage == "rloo"


def test_sections_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OptimizerSection().lr = 1.0  # type: ignore[misc]


def read_names() -> set[str]:
    """Every attribute that the package outside config/, or config/derived.py for it, reads
    (`x.split`, not the call `x.split()`) or gets by name, and the settings of policy losses and
    advantages, which each function takes by name."""
    names = {
        key
        for parts in (POLICY_LOSSES, ADVANTAGES)
        for part in parts.values()
        for key in part.reads
    }
    for path in PACKAGE.rglob("*.py"):
        of_config = "config" in path.relative_to(PACKAGE).parts
        if of_config and path.name != "derived.py":
            continue
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        names |= {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and id(node) not in called
        }
        names |= set(re.findall(r"""getattr\([^,()]+, "(\w+)"\)""", text))
    return names


@pytest.mark.slow
def test_every_key_is_read_somewhere():
    names, unread = read_names(), set()
    for command, config_type in COMMANDS.items():
        for key in keys_of(config_type):
            if key not in PACKAGED:  # read by what composes
                unread |= {f"{command}: {key}" for part in key.split(".") if part not in names}
    assert not unread, f"keys that nothing reads: {sorted(unread)}"


def test_compiler_options_are_a_list(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text("mesh:\n  compiler_options: [xla_one=true, xla_two=3]\n")
    for words in ([str(file)], ["mesh.compiler_options=[xla_one=true,xla_two=3]"]):
        assert compose("train", words)[0].mesh.compiler_options == ("xla_one=true", "xla_two=3")
    with pytest.raises(ShoalError, match=r"did you mean mesh\.compiler_options\?"):
        compose("train", ["mesh.compiler_options.xla_one=true"])


def test_a_decision_does_not_replace_what_was_given():
    """A key that somebody writes into a run's config.yaml stays in force, although decided.yaml
    still has the value from before."""
    decisions = {
        "algorithm.aggregation_tokens": Decision(64, {}),
        "train.max_staleness": Decision(0, {}),
    }
    given = with_values(Config(), {"train.max_staleness": 2})
    config = resolved(given, decisions)
    assert config.algorithm.aggregation_tokens == 64
    assert config.train.max_staleness == 2
