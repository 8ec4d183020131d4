"""What TRL's trainers are given as objects in Python: configurations, adapters, tokenizers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, ClassVar

import pytest

import shoal
from shoal.compat import rules
from shoal.compat.front import add_typed_names
from shoal.compat.trl_objects import notes_on_arguments, without_objects
from shoal.config.commands import EvalConfig
from shoal.config.keywords import HELD_OUT_ROWS
from shoal.config.merge import compose
from shoal.job.resume import from_overrides_on_run


class Kind(StrEnum):
    LORA = "LORA"
    PREFIX = "PREFIX_TUNING"


@dataclass
class LoraConfig:
    """Stands in for PEFT's, which sets its kind and makes a set of the targets by itself."""

    task_type: str | None = None
    peft_type: Kind | None = None
    r: int = 8
    lora_alpha: int = 8
    lora_dropout: float = 0.0
    target_modules: Any = None
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    init_lora_weights: bool | str = True
    rank_pattern: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        self.peft_type = self.peft_type or Kind.LORA
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)


class Schedule(Enum):  # no StrEnum: a member equals no text
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass
class GRPOConfig:
    """Stands in for TRL's, with fields that are set by others. On a machine without a GPU it
    refuses its own default of `bf16`."""

    has_gpu: ClassVar[bool] = True
    output_dir: str = "trainer_output"
    learning_rate: float = 1e-6
    max_steps: int = -1
    num_generations: int = 8
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    bf16: bool | None = None
    run_name: str | None = None
    lr_scheduler_type: Any = "linear"
    gradient_checkpointing: bool | None = None
    eval_strategy: str = "no"
    eval_steps: float | None = None

    def __post_init__(self):
        if self.bf16 is None and not self.has_gpu:
            raise ValueError("Your setup doesn't support bf16/gpu.")
        self.lr_scheduler_type = Schedule(self.lr_scheduler_type)
        if self.gradient_checkpointing is None:
            self.gradient_checkpointing = True
        self.bf16 = True if self.bf16 is None else self.bf16
        self.run_name = self.run_name or self.output_dir
        if self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        self.generation_batch_size = 8 * self.steps_per_generation


def resolved_of(**keywords):
    """Returns (configuration, Resolved) as `shoal.train` composes them."""
    config, resolved, _ = from_overrides_on_run(without_objects(keywords))
    return config, resolved


def ones(completions, **columns):
    return [1.0] * len(completions)


def test_reward_functions_by_trls_name_are_not_said_to_change_nothing():
    _, resolved = resolved_of(reward_funcs=[ones], max_steps=3, epsilon_high=None)
    assert resolved.start_lines[-1] == "set keys: max_steps=3 (steps)"
    assert not any("reward_funcs" in line for line in (*resolved.became, *resolved.start_lines))


def test_a_lora_config_is_read():
    adapter = LoraConfig(r=4, target_modules=["v_proj", "k_proj"], use_rslora=True)
    lora = resolved_of(peft_config=adapter)[0].model.lora
    assert (lora.rank, lora.alpha, lora.rslora) == (4, 8.0, True)
    assert lora.targets == ("k_proj", "v_proj")
    # The defaults are PEFT's, in a dict too, not those of TRL's command line.
    for given in (LoraConfig(task_type="CAUSAL_LM"), {"bias": "none", "lora_dropout": 0}):
        lora = resolved_of(peft_config=given)[0].model.lora
        assert (lora.rank, lora.alpha, lora.targets) == (8, 8.0, ("q_proj", "v_proj"))
    assert compose("train", ["peft_config.r=2"])[0].model.lora.rank == 2
    assert resolved_of(peft_config=None)[0].model.lora.rank == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"lora_dropout": 0.05}, "peft_config.lora_dropout=0.05 is not supported: sampler and"),
        ({"use_dora": True}, "peft_config.use_dora=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"peft_config.modules_to_save=\[lm_head\] is not"),
        ({"rank_pattern": {"q_proj": 4}}, "peft_config.rank_pattern.q_proj=4 is not supported"),
        ({"bias": "all"}, "peft_config.bias=all is not supported"),
        ({"init_lora_weights": "pissa"}, "peft_config.init_lora_weights=pissa is not supported"),
        ({"peft_type": Kind.PREFIX}, "peft_config.peft_type=PREFIX_TUNING is not supported"),
    ],
)
def test_a_field_that_an_adapter_does_not_have_is_named(fields, named):
    with pytest.raises(shoal.ShoalError, match=named):
        resolved_of(peft_config=LoraConfig(**fields))


def test_of_a_grpo_config_the_changed_fields_count():
    fields = without_objects({"args": GRPOConfig(learning_rate=3e-6, max_steps=7)})
    assert fields == {"learning_rate": 3e-6, "max_steps": 7, "recipe": "trl"}
    fields = without_objects({"args": GRPOConfig(bf16=False, gradient_accumulation_steps=4)})
    assert fields == {"bf16": False, "gradient_accumulation_steps": 4, "recipe": "trl"}
    config, _ = resolved_of(args=GRPOConfig(max_steps=7), max_steps=9)
    assert config.steps == 9
    assert without_objects({"args": None, "steps": 3}) == {"steps": 3}
    with pytest.raises(shoal.ShoalError, match=r"args=object: .* its fields as keyword arguments"):
        resolved_of(args=object())


def test_a_grpo_config_that_needs_a_gpu_by_default_is_read_without_one(monkeypatch):
    monkeypatch.setattr(GRPOConfig, "has_gpu", False)
    given = GRPOConfig(max_steps=7, bf16=False, lr_scheduler_type="cosine")
    fields = without_objects({"args": given})
    assert fields.pop("recipe") == "trl"
    assert fields == {"max_steps": 7, "bf16": False, "lr_scheduler_type": "cosine"}
    own = {"args": GRPOConfig(bf16=False), "recipe": None}
    assert without_objects(own) == {"bf16": False, "recipe": None}


@pytest.mark.parametrize(
    ("keywords", "recipe", "kl_coef"),
    [
        ({}, "trl", 0.0),
        ({"recipe": "trl"}, "trl", 0.0),
        ({"recipe": None}, "", 0.04),
        ({"recipe": ""}, "", 0.04),
        ({"recipe": "verl"}, "verl", 0.0),
        ({"beta": 0.1}, "trl", 0.1),
        ({"config_name": "custom"}, "", 0.04),
    ],
)
def test_a_grpo_config_has_trls_defaults(monkeypatch, keywords, recipe, kl_coef):
    made = []

    def train(config, functions, console, task, recipe, callbacks):
        made.append(config)
        raise shoal.ShoalError("enough")

    monkeypatch.setattr("shoal.commands.train.train", train)
    said = io.StringIO()
    with redirect_stdout(said), pytest.raises(shoal.ShoalError, match="enough"):
        shoal.train(
            args=GRPOConfig(max_steps=7, learning_rate=1e-6, lr_scheduler_type="linear"),
            train_dataset=PROMPTS,
            reward_funcs=[ones],
            **keywords,
        )
    [config] = made
    assert config.recipe == recipe and config.algorithm.kl_coef == kl_coef
    assert config.optimizer.lr == 1e-6
    schedule = "linear" if recipe == "trl" else shoal_schedule(recipe)
    assert config.optimizer.schedule == schedule
    is_implied = "recipe" not in keywords and "config_name" not in keywords
    assert ("args=GRPOConfig means recipe=trl" in said.getvalue()) == is_implied


def shoal_schedule(recipe):
    words = ["task=custom", *([f"recipe={recipe}"] if recipe else [])]
    return compose("train", words)[0].optimizer.schedule


def test_a_grpo_config_beside_a_run_to_resume_does_not_replace_the_runs_values():
    for name in ("resume", "resume_from_checkpoint"):
        assert "recipe" not in without_objects({"args": GRPOConfig(), name: "outputs/run"})
    assert "recipe" in without_objects({"args": GRPOConfig(), "resume_from_checkpoint": False})
    assert "recipe" not in without_objects({"args": {"max_steps": 7}})
    assert "recipe" not in without_objects({"args": GRPOConfig()}, EvalConfig)


def test_another_chat_template_of_processing_class_is_the_one_that_prompts_get(tmp_path):
    """TRL renders prompts with the tokenizer that it is given."""

    class Tokenizer:
        chat_template: str | None = "{{ messages }}"

    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    tokenizer = Tokenizer()
    keywords = {"model": str(tmp_path), "processing_class": tokenizer}
    assert "model.template" not in without_objects(keywords)
    tokenizer.chat_template = "### {{ messages }}"
    taken = without_objects(keywords)
    assert taken["model.template"] == "### {{ messages }}"
    assert "processing_class" not in taken  # so it is not said to change nothing
    for name in ("model.template", "model.tokenizer"):
        assert without_objects(keywords | {name: "x"}).get("model.template") in (None, "x")
    assert "model.template" not in without_objects(keywords | {"model": "me/on-the-hub"})
    tokenizer.chat_template = None
    assert "model.template" not in without_objects(keywords)


def test_args_without_a_seed_have_that_of_trl():
    assert compose("train", ["recipe=trl"])[0].seed == 42
    assert compose("train", ["recipe=trl", "seed=0"])[0].seed == 0


def test_objects_that_are_not_used_are_named_by_their_classes():
    _, resolved = resolved_of(processing_class=object(), callbacks=None, optimizers=(None,))
    assert resolved.start_lines == [
        "processing_class=[object] changes nothing here: the tokenizer is the model's, and "
        "model.tokenizer=FOLDER names another; a chat template of its own would be model.template"
    ]
    with pytest.raises(shoal.ShoalError, match=r"callbacks=\[Kind\] is not .*in Python shoal"):
        resolved_of(callbacks=[Kind.LORA.__class__])
    with pytest.raises(shoal.ShoalError, match="peft_config='x': expected a LoraConfig"):
        resolved_of(peft_config="x")


@pytest.mark.parametrize(
    ("keywords", "every"),
    [
        ({"eval_strategy": "no"}, -1),
        ({"eval_strategy": "no", "eval_steps": 5, "save_steps": 10}, -1),
        ({"eval_steps": -1}, -1),
        ({"eval_strategy": "steps", "eval_steps": 5}, 5),
        ({"eval_strategy": "epoch"}, -2),
    ],
)
def test_no_evaluation_is_none(keywords, every):
    config, _ = resolved_of(**keywords)
    assert config.train.evaluate_every == every
    assert config.checkpoint.every == keywords.get("save_steps", resolved_of()[0].checkpoint.every)


@pytest.mark.parametrize(
    ("keywords", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"model_init_kwargs": {"dtype": "float16"}}, "float16"),
        ({"dtype": "float32", "bf16": True}, "bfloat16"),
        ({"dtype": "auto"}, "auto"),
    ],
)
def test_the_type_of_the_model_is_that_of_the_computation(keywords, dtype):
    assert resolved_of(**keywords)[0].model.dtype == dtype


def test_trls_recipe_has_its_epochs_and_no_evaluation(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{number}", "answer": "1"}}\n' for number in range(50)))
    words = ["recipe=trl", "task=custom", f"task.path={rows}"]
    config, _ = compose("train", words)
    assert config.steps == 3 * 50  # no row is held out; one prompt a step
    assert config.train.evaluate_every == -1
    assert compose("train", [*words, "max_steps=7", "eval_steps=2"])[0].steps == 7


@pytest.mark.parametrize(
    ("recipe", "typed", "evaluate_every", "checkpoint_every"),
    [
        # Five rows a step: an epoch of 50 rows has 10 steps, of 45 it has 9.
        ("recipe=trl", "eval_strategy=epoch", 10, 500),
        ("recipe=trl", "eval_strategy=epoch num_iterations=2", 10, 500),
        ("recipe=trl", "eval_strategy=steps", 10, 500),  # TRL's logging_steps
        ("recipe=trl", "eval_strategy=steps eval_steps=0", 10, 500),  # as if it were not given
        ("recipe=trl", "eval_strategy=steps num_iterations=2", 5, 500),
        ("recipe=trl", "eval_strategy=steps eval_steps=3", 3, 500),
        ("recipe=trl", "eval_strategy=no eval_steps=3", -1, 500),
        ("recipe=trl", "eval_steps=3", -1, 500),  # TRL's eval_strategy is `no`
        ("recipe=trl", "eval_steps=3 save_steps=4", -1, 4),
        ("", "eval_steps=3", 3, 10),
        ("recipe=trl", "save_strategy=epoch", -1, 10),
        ("recipe=trl", "save_strategy=epoch eval_strategy=epoch", 10, 10),
        ("recipe=trl", "save_strategy=no save_steps=7", -1, 0),
        ("recipe=trl", "save_strategy=steps save_steps=7", -1, 7),
        ("recipe=trl", "save_strategy=best", -1, 0),
        ("", "eval_strategy=epoch save_strategy=epoch", 9, 9),
        ("", "eval_strategy=epoch train.evaluate_every=4", 4, 10),
        ("", "eval_strategy=steps", 50, 10),
    ],
)
def test_strategies_say_when_a_run_evaluates_and_saves(
    tmp_path, recipe, typed, evaluate_every, checkpoint_every
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(50)))
    words = [*recipe.split(), "task=custom", f"task.path={rows}", "batch.prompts_per_step=5"]
    config, _ = compose("train", [*words, *typed.split()])
    assert config.train.evaluate_every == evaluate_every
    assert config.checkpoint.every == checkpoint_every


@pytest.mark.parametrize(
    ("typed", "hold_out", "steps"),
    [
        ("eval_strategy=no", False, 10),
        ("eval_strategy=False", False, 10),  # YAML's `no`
        ("eval_steps=-1", False, 10),
        ("eval_strategy=no task.hold_out=true", True, 9),
        ("eval_strategy=steps", True, 9),
        ("save_strategy=no", True, 9),
    ],
)
def test_without_evaluations_all_rows_are_trained_on(tmp_path, typed, hold_out, steps):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(50)))
    words = ["task=custom", f"task.path={rows}", "batch.prompts_per_step=5", "num_train_epochs=1"]
    config, resolved = compose("train", [*words, *typed.split()])
    assert config.task.hold_out == hold_out
    assert config.steps == steps  # of five rows each
    if not hold_out:
        [line] = [line for line in resolved.start_lines if "eval_s" in line]
        assert "became train.evaluate_every=-1, task.hold_out=false: there is no eval" in line


def test_a_part_of_an_epochs_last_step_is_a_step(tmp_path):
    """transformers rounds the steps of a run up, `num_train_epochs` x those of an epoch."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(50)))
    words = ["task=custom", f"task.path={rows}", "batch.prompts_per_step=2", "eval_strategy=no"]
    config, _ = compose("train", [*words, "num_train_epochs=1.5"])
    assert config.steps == 38  # 1.5 x 25


@pytest.mark.parametrize("from_python", [False, True])
def test_the_rows_are_read_once_for_all_flags_that_count_them(tmp_path, monkeypatch, from_python):
    """A large file takes a while to read, and its prompts to measure."""
    calls = []

    def counting(function):
        def call(*arguments):
            calls.append(function.__name__)
            return function(*arguments)

        return call

    for name in ("load_by_name", "given_task", "_num_short_rows"):
        monkeypatch.setattr(rules, name, counting(getattr(rules, name)))
    asked = {"num_train_epochs": 1, "eval_strategy": "epoch", "save_strategy": "epoch"}
    asked |= {"max_prompt_length": None, "batch.prompts_per_step": 5}
    for size in (50, 60):  # other rows of a later call are read
        calls.clear()
        rows = numbers(size)
        if from_python:
            values = shoal.train(train_dataset=rows, reward_funcs=ones, dry_run=True, **asked)
            steps = values["steps"], values["train.evaluate_every"]
        else:
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            words = ["task=custom", f"task.path={path}"]
            words += [f"{name}={value}" for name, value in asked.items()]
            config, _ = compose("train", words)
            steps = config.steps, config.train.evaluate_every
        assert steps == (size * 9 // 10 // 5, size * 9 // 10 // 5)
        assert calls == ["given_task" if from_python else "load_by_name", "_num_short_rows"]


def test_a_number_of_steps_alone_evaluates_nothing_where_trl_decides():
    _, resolved = resolved_of(recipe="trl", eval_steps=3)
    assert resolved.start_lines[-1] == (
        "eval_steps=3 changes nothing here: eval_steps has no effect without eval_strategy=steps, "
        "as in TRL, whose default is no evaluation"
    )
    assert resolved_of(args=GRPOConfig(eval_steps=3))[0].train.evaluate_every == -1


@pytest.mark.parametrize(
    ("keywords", "every", "is_first"),
    [
        ({"recipe": "trl", "eval_on_start": True}, 0, True),
        (
            {"recipe": "trl", "eval_on_start": True, "eval_strategy": "steps", "eval_steps": 5},
            5,
            True,
        ),
        ({"recipe": "trl", "eval_on_start": False}, -1, False),
        ({"recipe": "trl", "eval_strategy": "steps"}, 10, False),  # TRL's eval_on_start is False
        ({"eval_on_start": True}, -2, True),
        ({"eval_on_start": False}, -2, False),
    ],
)
def test_an_evaluation_before_the_first_step_is_made_where_it_is_asked_for(
    keywords, every, is_first
):
    config, resolved = resolved_of(**keywords)
    assert (config.train.evaluate_every, config.train.evaluate_first) == (every, is_first)
    said = "\n".join(resolved.start_lines)
    assert ("there is an evaluation after the last step too" in said) == (every == 0)
    assert "both set" not in said


def test_evaluations_are_sampled_where_their_number_of_answers_is_given():
    keywords = {"num_generations_eval": 4, "temperature": 0.7, "top_k": -1, "min_p": 0.1}
    config, resolved = resolved_of(**keywords, eval_strategy="steps")
    answers = config.evaluation
    assert (answers.samples, answers.temperature, answers.top_k) == (4, 0.7, 0)
    assert (answers.top_p, answers.min_p) == (1.0, 0.1)
    [line] = [line for line in resolved.start_lines if "num_generations_eval=4 became" in line]
    assert line.endswith(": sampled as in training, not greedily")
    assert resolved_of(recipe="trl", num_generations_eval=None)[0].evaluation.is_greedy


def test_the_best_checkpoint_is_kept_where_it_is_asked_for():
    config, resolved = resolved_of(save_strategy="best", eval_strategy="steps", eval_steps=5)
    assert (config.checkpoint.every, config.checkpoint.keep_best) == (0, 1)
    assert config.checkpoint.keep_last == 2  # Shoal's own default
    assert "each evaluated step is saved, and the best of them kept" in resolved.start_lines[-1]
    asked = {"save_strategy": "best", "eval_strategy": "steps"}
    # TRL's default of save_total_limit keeps all.
    config, _ = resolved_of(recipe="trl", **asked)
    assert (config.checkpoint.keep_best, config.checkpoint.keep_last) == (1, 1)
    config, _ = resolved_of(recipe="trl", **asked, save_total_limit=3)
    assert config.checkpoint.keep_last == 3
    with pytest.raises(shoal.ShoalError, match=r"out: save_strategy=best keeps the check.*export"):
        resolved_of(load_best_model_at_end=True)


def test_an_update_of_less_than_a_group_is_refused_in_trls_words():
    keywords = {"per_device_train_batch_size": 4, "num_generations": 8}
    with pytest.raises(shoal.ShoalError) as caught:
        resolved_of(**keywords, steps_per_generation=4)
    assert str(caught.value).startswith(
        "per_device_train_batch_size=4 with num_generations=8: a step has 2 prompts and 4 updates, "
        "each of whole groups here; raise per_device_train_batch_size to 8, or "
        "gradient_accumulation_steps to 2"
    )
    config, _ = resolved_of(
        **keywords, steps_per_generation=4, gradient_accumulation_steps=2, num_iterations=2
    )
    assert (config.algorithm.num_minibatches, config.algorithm.num_epochs) == (2, 2)


def test_strings_that_end_a_completion_are_read_from_generation_kwargs():
    stops = ["\n\n", "a, b"]
    for name in ("stop_strings", "stop"):  # of transformers and of vLLM
        config, _ = resolved_of(args={"generation_kwargs": {name: stops, "top_k": 5}})
        assert config.sampling.stop == tuple(stops)
        assert config.sampling.top_k == 5
    config, _ = resolved_of(generation_kwargs={"stop_strings": "x", "min_p": None})
    assert config.sampling.stop == ("x",)
    message = r"generation_kwargs.num_beams=2 is not supported: .*stop_strings"
    with pytest.raises(shoal.ShoalError, match=message):
        resolved_of(generation_kwargs={"num_beams": 2})


def test_how_a_model_is_loaded_there_does_not_matter_here():
    keywords = {
        "attn_implementation": "flash_attention_2",
        "device_map": "auto",
        "dtype": "float32",
    }
    config, resolved = resolved_of(model_init_kwargs=keywords)
    assert config.model.dtype == "float32"
    [line] = [line for line in resolved.start_lines if "change nothing here" in line]
    assert "attn_implementation" in line and "device_map" in line
    with pytest.raises(shoal.ShoalError, match=r"load_in_4bit=True is not .* model.quantise"):
        resolved_of(model_init_kwargs={"load_in_4bit": True})
    with pytest.raises(shoal.ShoalError, match=r"revision=abc: expected main; a model's own files"):
        resolved_of(model_init_kwargs={"revision": "abc"})


def test_what_is_computed_again_has_two_names():
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        assert resolved_of(**{name: True})[0].model.remat == "full"
        assert resolved_of(**{name: False})[0].model.remat == "none"
    assert resolved_of(project="mine")[0].report.trackio.project == "mine"


@dataclass
class FollowingConfig(GRPOConfig):
    """GRPOConfig with fields that it sets from others."""

    do_eval: bool = False
    activation_checkpointing: bool | None = None
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.activation_checkpointing is None:
            self.activation_checkpointing = self.gradient_checkpointing
        self.gradient_checkpointing = self.activation_checkpointing
        self.do_eval = self.eval_strategy != "no"
        if self.metric_for_best_model is not None:
            self.greater_is_better = True


def test_fields_that_follow_from_others_are_not_said_to_change_nothing():
    given = FollowingConfig(
        eval_strategy="steps", activation_checkpointing=False, metric_for_best_model="reward"
    )
    config, resolved = resolved_of(args=given)
    assert config.model.remat == "none"
    said = "\n".join(resolved.start_lines)
    assert "metric_for_best_model=reward changes nothing here: the best evaluation is" in said
    for name in ("do_eval", "greater_is_better", "gradient_checkpointing"):
        assert name not in said


class Weights:
    """Stands in for a model of transformers, which can be called."""

    name_or_path = "org/model"

    def save_pretrained(self, folder):
        raise NotImplementedError

    def __call__(self, **inputs):
        raise NotImplementedError


def test_a_model_that_is_an_object_is_asked_for_by_its_name():
    read_from = r"this one was read from org/model"
    with pytest.raises(shoal.ShoalError, match=f"^model=Weights: expected a folder .*{read_from}"):
        resolved_of(model=Weights())
    for keywords in ({"model_name_or_path": Weights()}, {"model": {"path": Weights()}}):
        with pytest.raises(shoal.ShoalError, match=f"=Weights: expected a folder .*{read_from}"):
            resolved_of(**keywords)
    for rewards in (Weights(), [ones, Weights()]):
        with pytest.raises(shoal.ShoalError, match=f"reward_funcs='model:PATH' .{read_from}"):
            resolved_of(reward_funcs=rewards)
    with pytest.raises(shoal.ShoalError, match=r"model=object: expected a folder or a hub id, .*"):
        shoal.evaluate(model=object())
    with pytest.raises(shoal.ShoalError, match=r"quantization_config=\[object\] is not supported"):
        resolved_of(quantization_config=object())
    assert resolved_of(model={"path": "tiny"}, quantization_config=None)[0].model.path == "tiny"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("SFTConfig", "algorithm='sft'"),
        ("PPOConfig", "'gae'"),
        ("RLOOConfig", "learning_rate=1e-6"),
    ],
)
def test_a_configuration_of_another_trainer_is_refused(name, hint):
    @dataclass
    class Other:
        learning_rate: float = 2e-5

    Other.__name__ = name
    with pytest.raises(shoal.ShoalError, match=f"^args={name}: expected a GRPOConfig.*{hint}"):
        resolved_of(args=Other())


def test_a_tracker_that_is_not_known_is_said():
    _, resolved = resolved_of(report_to=["comet_ml"])
    assert resolved.start_lines[-1] == (
        "report_to=[comet_ml] changes nothing here: wandb, tensorboard, mlflow, trackio, all or "
        "none; others change nothing"
    )
    assert resolved_of(top_k=-1)[0].sampling.top_k == 0


def test_an_object_in_a_configuration_is_named_by_its_class():
    @dataclass
    class NestedConfig(GRPOConfig):
        accelerator_config: Any = None

    _, resolved = resolved_of(args=NestedConfig(accelerator_config=LoraConfig()))
    assert "accelerator_config=LoraConfig changes nothing here" in "\n".join(resolved.start_lines)


def test_an_epoch_whose_rows_are_not_here_is_said():
    config, resolved = compose("train", ["recipe=trl", "dataset_name=me/x", "eval_strategy=epoch"])
    assert config.train.evaluate_every == 0  # before the first step and after the last
    [line] = [line for line in resolved.start_lines if "eval_strategy" in line]
    assert "known only when the data is read; eval_strategy=steps with eval_steps" in line
    with pytest.raises(shoal.ShoalError, match="save_strategy=often: expected one of no, false"):
        compose("train", ["save_strategy=often"])
    with pytest.raises(shoal.ShoalError, match="eval_strategy=best: expected one of no, false"):
        compose("train", ["eval_strategy=best"])


def test_an_epoch_on_a_number_of_devices_that_is_open_is_refused(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(50)))
    words = ["task=custom", f"task.path={rows}", "per_device_train_batch_size=8", "mesh.fsdp=-1"]
    with pytest.raises(shoal.ShoalError, match="eval_strategy=epoch needs the number of devices"):
        compose("train", [*words, "eval_strategy=epoch"])


def limit_of(words):
    return compose("train", words)[0].sampling.max_prompt_tokens


def test_trls_defaults_have_no_limit_for_the_prompts_of_ones_own_rows(tmp_path, monkeypatch):
    """None is dropped, whether the settings come as flags, as a file or from Python."""
    question = "Tom has 3 apples. "
    rows = [{"prompt": question * times, "answer": "1"} for times in (1, 1, 1, 400)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = tmp_path / "grpo.yaml"
    settings.write_text(
        f"dataset_name: {file}\nnum_generations: 4\nper_device_train_batch_size: 4\n"
    )
    flags = [f"dataset_name={file}", "num_generations=4", "per_device_train_batch_size=4"]
    limit = limit_of(["recipe=trl", *flags])
    assert limit > 1024
    config, _ = compose("train", [str(settings), "recipe=trl"])
    assert config.sampling.max_prompt_tokens == limit
    assert config.steps == 3 * 4  # epochs of all rows
    seen = []

    def train(config, functions, console, task, recipe, callbacks):
        seen.append(config.sampling.max_prompt_tokens)
        raise shoal.ShoalError("enough")

    monkeypatch.setattr("shoal.commands.train.train", train)
    with pytest.raises(shoal.ShoalError, match="enough"):
        shoal.train(args=GRPOConfig(), train_dataset=rows, reward_funcs=[ones])
    with pytest.raises(shoal.ShoalError, match="enough"):  # the longest prompt is evaluated alone
        shoal.train(
            args=GRPOConfig(), train_dataset=rows[:3], eval_dataset=rows[3:], reward_funcs=[ones]
        )
    assert seen == [limit, limit]


def test_a_limit_for_prompts_is_what_is_asked_for_or_that_of_the_task(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 3)
    rows = f"dataset_name={file}"
    assert limit_of(["recipe=trl", rows, "max_prompt_length=300"]) == 300
    assert limit_of(["recipe=trl", rows, "sampling.max_prompt_tokens=300"]) == 300
    assert limit_of(["recipe=trl", rows]) == 1024  # as the preset of such data
    assert limit_of(["recipe=trl", "dataset_name=me/not-here"]) == 1024
    assert limit_of(["recipe=trl", "task=math"]) == limit_of(["task=math"]) == 512
    assert limit_of(["recipe=trl"]) == limit_of([])


@dataclass
class EpochsConfig(GRPOConfig):
    """GRPOConfig with TRL's epochs."""

    num_train_epochs: float = 3.0


PROMPTS = [{"prompt": str(number)} for number in range(50)]
SAME_PROMPTS = [{"prompt": "1"}] * 50


def numbers(count):
    for number in range(count):
        yield {"prompt": str(number)}


@pytest.mark.parametrize(
    ("keywords", "steps"),
    [
        # No row is held out; the recipe has one prompt a step.
        ({"recipe": "trl", "train_dataset": PROMPTS}, 3 * 50),
        ({"recipe": "trl", "train_dataset": SAME_PROMPTS}, 3 * 50),
        ({"recipe": "trl", "train_dataset": numbers(50), "num_train_epochs": 2}, 2 * 50),
        ({"recipe": "trl", "train_dataset": PROMPTS, "eval_dataset": PROMPTS[:10]}, 3 * 40),
        ({"recipe": "trl", "train_dataset": PROMPTS, "max_steps": 7}, 7),
        ({"recipe": "trl", "task": "words"}, 40),
        ({"args": EpochsConfig(), "train_dataset": PROMPTS, "batch__prompts_per_step": 5}, 3 * 10),
        ({"args": EpochsConfig(max_steps=7), "train_dataset": PROMPTS}, 7),
        ({"args": EpochsConfig(), "train_dataset": PROMPTS, "steps": 8}, 8),
        ({"args": GRPOConfig(), "train_dataset": PROMPTS}, 3 * 50),
        ({"args": GRPOConfig(), "recipe": None, "train_dataset": PROMPTS}, None),
    ],
)
def test_a_run_on_rows_from_python_has_trls_epochs(monkeypatch, tmp_path, keywords, steps):
    made = []

    def train(config, functions, console, task, recipe, callbacks):
        made.append((config, task))
        raise shoal.ShoalError("enough")

    monkeypatch.setattr("shoal.commands.train.train", train)
    with pytest.raises(shoal.ShoalError, match="enough"):
        shoal.train(**keywords, reward_funcs=[ones], output_dir=str(tmp_path))
    [(config, task)] = made
    if steps is None:
        steps = compose("train", ["task=custom"])[0].steps
    assert config.steps == steps
    if task is not None:
        num_rows = 50 if config.recipe else 45
        assert len(task.train) == (40 if "eval_dataset" in keywords else num_rows)


@pytest.mark.parametrize(
    ("keywords", "kept"),
    [
        ({"save_total_limit": None}, 0),
        ({"recipe": "trl"}, 0),
        ({"recipe": "trl", "save_total_limit": 3}, 3),
        ({"max_steps": 3}, 2),
    ],
)
def test_trl_keeps_all_checkpoints_unless_it_is_told(keywords, kept):
    assert resolved_of(**keywords)[0].checkpoint.keep_last == kept


@pytest.mark.parametrize(
    ("keywords", "task", "held_out"),
    [
        ({"train_dataset": PROMPTS}, PROMPTS, None),
        ({"eval_dataset": PROMPTS}, PROMPTS, None),
        ({"held_out": PROMPTS}, PROMPTS, None),
        ({"train_dataset": PROMPTS, "eval_dataset": PROMPTS[:3]}, PROMPTS, PROMPTS[:3]),
    ],
)
def test_an_evaluation_has_trls_names(monkeypatch, keywords, task, held_out):
    made = []

    def evaluate(config, functions, console, task):
        made.append((config, functions, task))
        return {}

    monkeypatch.setattr("shoal.commands.evaluate.evaluate", evaluate)
    arguments = EpochsConfig(learning_rate=3e-6, num_generations=4)
    shoal.evaluate(**keywords, reward_funcs=[ones], args=arguments, max_completion_length=7)
    [(config, functions, made_task)] = made
    asked = made_task.evaluations["held_out"]
    assert [example.prompt for example in asked] == [row["prompt"] for row in held_out or task]
    assert functions == (ones,) and config.sampling.max_completion_tokens == 7
    with pytest.raises(shoal.ShoalError, match="two names of one thing"):
        shoal.evaluate(task=PROMPTS, train_dataset=PROMPTS, reward=ones)


def play(prompts, trainer):
    return None


class Game:
    def reset(self, **columns):
        return None


def test_a_rollout_function_and_environments_have_trls_names():
    config, _ = resolved_of(rollout_func=play)
    assert config.environment.rollout == "python:play" and config.turns == "environments"
    assert resolved_of(environment_factory=Game)[0].environment.factory == "python:Game"
    with pytest.raises(shoal.ShoalError, match=r"environment\.rollout"):
        resolved_of(rollout_func=play, tools=[ones])


def test_a_dict_of_data_sets_to_train_on_and_an_empty_one_are_refused():
    keywords = {"train_dataset": PROMPTS, "reward_funcs": [ones]}
    sets = {"a": PROMPTS, "b": PROMPTS}
    for name, given in (("train_dataset", sets), ("train_dataset", {}), ("eval_dataset", {})):
        with pytest.raises(shoal.ShoalError, match=f"{name} is a dict of .*expected one data set"):
            shoal.train(**{**keywords, name: given})


def test_each_data_set_of_a_dict_is_evaluated_under_its_name(monkeypatch):
    made = []

    def train(config, functions, console, task, recipe, callbacks):
        made.append((config, task))
        raise shoal.ShoalError("enough")

    def evaluate(config, functions, console, task):
        made.append((config, task))
        return {}

    monkeypatch.setattr("shoal.commands.train.train", train)
    monkeypatch.setattr("shoal.commands.evaluate.evaluate", evaluate)
    columns = {"prompt": ["x", "y"]}  # a data set in its other form
    sets = {"a": PROMPTS[:3], "b": columns}
    with pytest.raises(shoal.ShoalError, match="enough"):
        shoal.train(train_dataset=PROMPTS, eval_dataset=sets, reward_funcs=ones)
    shoal.evaluate(eval_dataset=sets, reward_funcs=ones)
    for _, task in made:
        prompts = {
            name: [example.prompt for example in examples]
            for name, examples in task.evaluations.items()
        }
        assert prompts == {"a": [row["prompt"] for row in PROMPTS[:3]], "b": ["x", "y"]}
        numbers_of_rows = [row.row for rows in task.evaluations.values() for row in rows]
        assert numbers_of_rows == [0, 1, 2, 3, 4]  # no two questions share their noise
    (config, of_training), _ = made
    assert config.task.eval_split == HELD_OUT_ROWS
    assert len(of_training.train) == len(PROMPTS) - 3  # without those of a
    missing = {"a": [{"prompt": "x", "answer": "1"}], "b": [{"prompt": "y"}]}
    with pytest.raises(shoal.ShoalError, match="held_out b row 0 has no column 'answer', held_out"):
        shoal.train(train_dataset=PROMPTS, eval_dataset=missing, reward_funcs=ones)


def test_resume_off_says_that_a_run_name_goes_on():
    _, resolved = resolved_of(resume_from_checkpoint=False, run_name="first", output_dir="out")
    [line] = [line for line in resolved.start_lines if "resume_from" in line]
    assert line == (
        "resume_from_checkpoint=False changes nothing here: if out has a run of the name first, "
        "that run goes on where it was; another run_name begins a new one"
    )
    _, resolved = resolved_of(resume_from_checkpoint=False)
    assert "a run without a run_name always begins anew" in resolved.start_lines[-1]
    assert resolved_of(resume_from_checkpoint=None)[1].start_lines == []


def test_vllm_on_the_trainers_devices_is_the_model_itself():
    for keywords in (
        {"use_vllm": True, "vllm_mode": "colocate"},
        {"use_vllm": False, "vllm_mode": "server"},
        {"use_vllm": False},
    ):
        _, resolved = resolved_of(**keywords)
        given = ", ".join(f"{name}={value}" for name, value in keywords.items())
        verb = "changes" if len(keywords) == 1 else "change"
        assert [line for line in resolved.start_lines if "use_vllm" in line] == [
            f"{given} {verb} nothing here: only with use_vllm=true and vllm_mode=server the "
            "sampler is `vllm serve`, with the calls that load weights; else it is the model "
            "itself, on the trainer's devices"
        ]


def test_a_number_of_updates_that_is_no_whole_number_of_steps_is_said_to_be_rounded():
    counted = {"num_iterations": 2, "max_steps": 20, "save_steps": 3}
    config, resolved = resolved_of(**counted)
    assert (config.checkpoint.every, config.steps) == (2, 10)
    [line] = [line for line in resolved.start_lines if "save_steps" in line]
    assert line == (
        "save_steps=3 became checkpoint.every=2: counted in updates there, 2 to a step here, so "
        "save_steps=3 is rounded up to 2 steps"
    )
    [line] = [line for line in resolved.start_lines if "max_steps" in line]
    assert line == "max_steps=20 became steps=10: counted in updates there, 2 to a step here"
    config, resolved = resolved_of(**counted | {"max_steps": 1})
    assert config.steps == 1 and "so max_steps=1 is rounded up to 1 step" in str(
        resolved.start_lines
    )


def test_a_keyword_beside_the_configuration_counts_and_is_said(capsys):
    arguments = GRPOConfig(learning_rate=1e-4, num_generations=4, output_dir="out")
    given = {"learning_rate": 3e-4, "num_generations": 4, "output_dir": None, "max_steps": 5}
    assert notes_on_arguments({"args": arguments, "recipe": "trl", **given}) == [
        "learning_rate=0.0003 counts, the argument of its own, and not learning_rate=0.0001 of "
        "args=GRPOConfig"
    ]
    replaced = without_objects({"args": arguments, **given})
    assert (replaced["learning_rate"], replaced["max_steps"]) == (3e-4, 5)
    assert replaced["output_dir"] == "out"  # None is an argument that is not given
    of_mapping = notes_on_arguments({"args": {"learning_rate": 1e-4}, "learning_rate": 3e-4})
    assert of_mapping[0].startswith("learning_rate=0.0003 counts")
    # It is among the first lines of a run.
    shoal.train(args=arguments, learning_rate=3e-4, dry_run=True)
    assert "learning_rate=0.0003 counts" in capsys.readouterr().out


def test_an_evaluation_without_rows_is_refused(monkeypatch):
    keywords = {"recipe": "trl", "train_dataset": SAME_PROMPTS, "reward_funcs": [ones]}
    with pytest.raises(shoal.ShoalError, match=r"task.hold_out=false leaves no rows.*eval_dataset"):
        shoal.train(**keywords, eval_strategy="steps", run_name="", max_steps=1)


@pytest.mark.parametrize("name", ["train_dataset", "task"])
def test_data_that_are_none_are_refused(monkeypatch, name):
    """A loader that returned nothing must not train on the packaged questions."""

    def run(config, *_):
        raise shoal.ShoalError(f"runs on {config.task.name}")

    monkeypatch.setattr("shoal.commands.train.train", run)
    monkeypatch.setattr("shoal.commands.evaluate.evaluate", run)
    nothing = {name: None, "reward_funcs": ones}
    for call in (shoal.train, shoal.evaluate):
        with pytest.raises(shoal.ShoalError, match=f"^{name} is None: expected rows, a list of"):
            call(**nothing)
        with pytest.raises(shoal.ShoalError, match="runs on gsm8k"):
            call(**nothing, dataset_name="gsm8k")
    with pytest.raises(shoal.ShoalError, match=r"^train_dataset is None"):
        shoal.train(train_dataset=None, eval_dataset=None, reward_funcs=ones, args=GRPOConfig())
    with pytest.raises(shoal.ShoalError, match="runs on rows"):  # TRL's default of eval_dataset
        shoal.train(task=None, train_dataset=PROMPTS, eval_dataset=None, reward_funcs=ones)
    with pytest.raises(shoal.ShoalError, match="runs on words"):
        shoal.train(reward_funcs=ones, eval_dataset=None)


def test_an_error_has_the_arguments_name_and_two_frames():
    code = "import shoal\nshoal.train(num_generations=1)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    frames = [line for line in ended.stderr.splitlines() if line.startswith("  File ")]
    assert len(frames) == 2
    assert "(batch.group_size: the argument num_generations)" in ended.stderr


def test_of_two_flags_of_a_key_the_one_with_its_name_is_shown():
    _, resolved = compose("train", ["max_completion_length=64", "scale_rewards=group"])
    said = add_typed_names("optimizer.warmup_steps is too long", resolved)
    assert said == (
        "optimizer.warmup_steps is too long (in TRL: optimizer.warmup_steps is warmup_steps)"
    )
    # Not eval_on_start, which sets this key beside another.
    said = add_typed_names("lower train.evaluate_every", resolved)
    assert said == "lower train.evaluate_every (in TRL: train.evaluate_every is eval_steps)"
    said = add_typed_names("no evaluation: train.evaluate_every=-1", resolved)
    assert said.endswith("(in TRL: train.evaluate_every=-1 is eval_strategy=no)")


def test_an_error_of_a_run_has_the_arguments_name(tmp_path):
    with pytest.raises(shoal.ShoalError, match="the argument model_name_or_path") as raised:
        shoal.train(
            model_name_or_path=str(tmp_path / "none"),
            train_dataset=[{"prompt": str(number)} for number in range(20)],
            reward_funcs=[ones],
            output_dir=str(tmp_path),
        )
    assert raised.value.__suppress_context__ and raised.value.__cause__ is None


@pytest.mark.slow
def test_a_lora_config_of_peft_is_read():
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, target_modules=["v_proj"], task_type="CAUSAL_LM")
    assert without_objects({"peft_config": adapter})["peft_config"] == {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["v_proj"],
        "task_type": "CAUSAL_LM",
    }


def test_an_error_keeps_its_key_under_an_arguments_name():
    _, resolved = resolved_of(max_steps=3)
    with pytest.raises(shoal.ShoalError) as caught, shoal._typed_names_in_errors(resolved):
        raise shoal.ShoalError("steps=3 is too few", "steps")
    assert "max_steps" in str(caught.value) and caught.value.key == "steps"
