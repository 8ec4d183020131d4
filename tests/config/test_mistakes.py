"""Mistakes on the command line: each is one line on stderr that has the words that matter, within a
second."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest

from shoal import cli
from shoal.commands.help import options_of
from shoal.config.commands import COMMANDS
from shoal.config.merge import compose, from_overrides
from shoal.config.stored import difference_from_defaults
from shoal.config.train import Config

FILES = {
    "tab.yml": "optimizer:\n\tlr: 1\n",
    "dup.yml": "steps: 1\nsteps: 2\n",
    "open.yml": "steps: [1\n",
    "colon.yml": "steps:3\n",
    "typo.yml": "optimizer:\n  lrr: 1\n",
    "unit.yml": "steps: 1k\n",
    "list.yml": "steps: [1, 2]\n",
    "old.yml": "train: {publish_every: 2}\n",
    "indent.yml": "model:\n  path: a\n b: 0\n",
    "python.yml": "steps: !!python/object:os.system x\n",
    "data.jsonl": '{"prompt": "a"}\n',
    "mine.yml": "steps: 3\n",
    "clouds.yml": "base_output_directory: zz://a\nload_parameters_path: zz://b\n",
    "batches.yml": "steps: 2\nnum_batches: 3\n",
    "lora.yml": "lora_bias: all\nmax_target_length: 512\nper_device_batch_size: 1\n",
}

MISTAKES = """
train steps=1k                        | steps='1k' | whole number
train clouds.yml                      | base_output_directory=zz://a: | model.path=zz://b: | \
clouds.yml:2
train model_name=deepseek3-671b       | this family or size is not known; families are llama | \
qwen3-14b
train model_name=kimi-k2-1t           | this family or size is not known
plan compile_topology=v5p-8           | there it is topology=v5p-8 | v5p-8@2
plan topology=v5p-8x2                 | 2 slices are written v5p-8@2
train steps=2 num_batches=3           | steps and num_batches both set steps; write one of them
train batches.yml                     | steps and num_batches both set steps; write one of them
train max_target_length=256           | expected more than max_prefill_predict_length=256
train steps=1.5                       | steps='1.5' | whole number
train steps=-1                        | steps=-1 | 0 or more
train price=-2.5                      | price=-2.5 | 0 (not known) or more
train steps==5                        | steps='=5'
train steps= 5                        | '5': expected key=value, without spaces
train steps 5                         | write steps=VALUE
train steps=[1,2]                     | whole number
train steps:5                         | did you mean steps?
train --steps=                        | steps=''
train --steps 5x                      | steps='5x'
train ~trainer.logger                 | Hydra's ~ is not read | trainer.logger=null
train -- steps=5                      | '--': expected key=value
export outputs/mine                   | did you mean from=outputs/mine?
convert outputs/mine                  | did you mean from=outputs/mine?
train STEPS=5                         | did you mean steps?
train seed=0x10                       | seed='0x10'
train optimizer.lr=3e-6x              | optimizer.lr='3e-6x' | finite number
train optimizer.lr=nan                | optimizer.lr='nan'
train optimizer.lr=-1                 | optimizer.lr=-1.0 | 0 or more
train optimizer.reduce_dtype=bfloat16 model.dtype=float32 | optimizer.reduce_dtype='bfloat16' | \
model.dtype=bfloat16
train optimizer.reduce_dtype=bfloat16 model.dtype=float16 | optimizer.reduce_dtype='bfloat16' | \
model.dtype=bfloat16
train learning_rate=3e-6x             | optimizer.lr='3e-6x' | --learning_rate
train lr=1                            | did you mean optimizer.lr?
train foo=1                           | foo: there is no such key (`shoal train --help` lists all \
keys)
train report.groups=maybe             | true or false
train model.dtype=BF16                | one of auto, float32
train 'sampling.stop=["a","b]'        | cannot be read after | quotes
train reward.weights=[1,x]            | reward.weights='x'
train sampling.top_p=0                | (0, 1]
train optimizer=adamw                 | section | optimizer.lr
train algorithm=grpoo                 | did you mean grpo?
train recipe=hf                       | no such recipe. | trl
train use_peft=true lora_dropout=0.1  | lora_dropout=0.1 is not supported: sampler and trainer \
would be two models
train use_lora=true                   | use_lora: LoRA is model.lora.rank, alpha, targets
train use_tools=true                  | use_tools: tools are tools=file.py:f,g
train load_in_4bit=true               | 8-bit weights are model.quantise=int8 or fp8
train model.quantise=int8 --dry-run   | expected none, or model.lora.rank=16 with it
train sampler.quantise=int8 sampler.kind=vllm vllm.urls=[http://h:1] | vllm.arguments
train sampler.quantise=int8 model.quantise=fp8 | \
none with model.quantise=fp8, which the sampler has too
train sampler.quantise=fp8 model.dtype=float16 | none with model.dtype=float16
train model.router_replay=on sampler.kind=vllm vllm.urls=[http://h:1] | vLLM returns no routes
sft model.router_replay=on | learns from data, which has no routes
train model.router_replay=on --dry-run | the model has no experts, so there are no routes
train model.lora.path=nothere --dry-run | model.lora.path=nothere: There is no model folder
train model.lora.rank=65 --dry-run    | model.lora.rank=65: expected 1 to 64
train model.lora.rank=2 model.lora.targets=[qproj] --dry-run | model.lora.targets=qproj | \
did you mean q_proj?
train num_gpus=2                      | JAX_PLATFORMS | mesh.trainer
train old.yml                         | old.yml:1: train.publish_every: there is no such key
train task=data.jsonl                 | write task=custom task.path=data.jsonl
train data.jsonl                      | did you mean task=custom task.path=data.jsonl?
train gsm8k                           | did you mean task=gsm8k?
train steps=3 mine.yml old.yml        | two presets were named, mine.yml and old.yml
train --preset gsm8k typo.yml         | typo.yml:2: optimizer.lrr | did you mean optimizer.lr?
train recipe=trl algorithm=gspo       | gives 1 prompt a step, fewer than \
algorithm.num_minibatches=4
train optimizer.lr=1e-5,1e-4          | expected a finite number; for a run with each: shoal train \
--multirun
train wandb=true                      | section | report.wandb.mode
train --dataset train.jsonl           | task=custom task.path=FILE, or dataset_name=FILE
train train_dataset=rows              | train_dataset=rows is not supported: rows are given
train train_file=rows.jsonl           | train_file: data is task=, a name | task.path=FILE
train num_gen=4                       | did you mean num_generations (batch.group_size)?
train lora.yml                        | lora.yml:1: lora_bias: LoRA is model.lora.rank
train tab.yml                         | line 2: found character '\\t'
train dup.yml                         | lines 1 and 2 both set steps
train open.yml                        | cannot be read | line 2
train colon.yml                       | expected keys with values
train indent.yml                      | cannot be read | line 3
train python.yml                      | cannot be read | python/object
train typo.yml                        | typo.yml:2: optimizer.lrr | did you mean optimizer.lr?
train unit.yml                        | steps='1k' | unit.yml:1
train list.yml                        | whole number | list.yml:1
train missing.yml                     | no preset or YAML file
train --config_name gsm8k --config-name math | two presets were named
train model=./nope                    | model.path=./nope: there is no model folder ./nope.
train model=~/nope task.path=missing  | model.path=~/nope: there is no model folder /
train model=nope                      | hub id
train model.tokenizer=./nope           | model.tokenizer=./nope: there is no such folder
eval model=./nope                     | model.path=./nope: there is no model folder
eval model=outputs/zzz                | there is no model folder outputs/zzz
eval model=mine/zzz                   | there is no model folder mine/zzz. mine holds first.
train mesh.fsdp=-2                    | 1 or more, or -1 for all devices
task=gsm8k train                      | the command comes first: `shoal train task=gsm8k`
gsm8k                                 | the command comes first: `shoal train task=gsm8k`
./data.jsonl                          | `shoal train task=custom task.path=./data.jsonl`
mine.yml                              | `shoal train mine.yml`
Train                                 | did you mean train?
eval steps=5                          | shoal train does
diff a b c                            | one word too many
train generation_batch_size=30        | expected a multiple of 8
train generation_batch_size=64 steps_per_generation=4 | say the same
train generation_batch_size=64 mesh.fsdp=-1 | set mesh.fsdp
train reward_funcs=no_such.module.f   | there is no module no_such.module
""".strip().splitlines()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "mine/first").mkdir(parents=True)
    (tmp_path / "mine/first/config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row.partition("|")[0].strip())
def test_a_mistake_is_one_clear_line(row, folder, capsys):
    line, *parts = (part.strip() for part in row.split(" | "))
    words = shlex.split(line)
    started = time.process_time()
    assert cli.main([*words, "--dry-run"] if words[0] in COMMANDS else words) == 2
    assert time.process_time() - started < 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert all(part in err for part in parts), err


@pytest.mark.parametrize(
    "words", [["--dryrun"], ["--dry_run"], ["--dry-run=true"], ["--multi-run", "--dry-run"]]
)
def test_switches_in_any_spelling_are_the_same(words, capsys):
    assert cli.main(["train", *words]) == 0


@pytest.mark.parametrize(
    "words", [["config_name=gsm8k"], ["--config_name", "gsm8k"], ["--config-file=gsm8k"]]
)
def test_presets_are_named_with_either_dash(words):
    assert compose("train", words)[0].task.name == "gsm8k"


def test_max_staleness_is_a_short_form_everywhere(folder):
    (folder / "own.yml").write_text("max_staleness: 2\n")
    for config in (
        compose("train", ["max_staleness=2"])[0],
        compose("doctor", ["--max_staleness", "2"])[0],
        compose("train", ["own.yml"])[0],
        from_overrides(Config, max_staleness=2)[0],
    ):
        assert config.train.max_staleness == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["generation_batch_size=64"],
            {"batch.prompts_per_step": 8, "algorithm.num_minibatches": 8},
        ),
        (
            [
                "generation_batch_size=64",
                "per_device_train_batch_size=16",
                "gradient_accumulation_steps=2",
            ],
            {"batch.prompts_per_step": 8, "algorithm.num_minibatches": 2},
        ),
        (
            ["per_device_train_batch_size=16", "mesh.fsdp=2", "generation_batch_size=64"],
            {"batch.prompts_per_step": 8, "algorithm.num_minibatches": 2},
        ),
        (
            ["recipe=trl", "generation_batch_size=32"],
            {"batch.prompts_per_step": 4, "algorithm.num_minibatches": 4},
        ),
    ],
)
def test_generation_batch_size_counts_all_devices(words, expected):
    found = difference_from_defaults(compose("train", words)[0])
    assert {
        key: found.get(key) for key in expected
    } == expected and "batch.prompts_per_device" not in found


def test_a_reward_by_its_modules_path_is_its_file(folder):
    (folder / "my_lib").mkdir()
    (folder / "my_lib" / "rewards.py").write_text(
        "def f(completions, **_): return [1.0] * len(completions)\n"
    )
    config, _ = compose("train", ["--reward_funcs", "my_lib.rewards.f", "accuracy_reward"])
    assert config.reward.functions == ("my_lib/rewards.py:f", "accuracy_reward")


def test_a_stored_name_of_the_hub_is_read_again(folder):
    config, resolved = compose("train", ["model_name=org/model"])
    (folder / "config.yaml").write_text(resolved.text)
    assert (
        config.model.name == "org/model"
        and compose("train", ["config_file=config.yaml"])[0] == config
    )
    assert compose("train", ["model.name=org/model"])[0].model.path == "org/model"


@pytest.mark.parametrize(
    "words", [["mine.yml", "seed=1"], ["seed=1", "mine.yml"], ["--preset", "gsm8k", "mine.yml"]]
)
def test_a_file_may_stand_anywhere(folder, words):
    assert compose("train", words)[0].steps == 3


OTHER_MISTAKES = """
groups outputs/none                    | outputs/none: there is no such folder | `last`
groups .                               | holds no config.yaml
convert from=NOWHERE to=x format=huggingface | from=NOWHERE is not a MaxText checkpoint
convert from=NOWHERE to=x              | from=NOWHERE: there is no model folder NOWHERE
export from=./no to=x                  | from=./no: there is no model folder ./no.
generate prompts=data.jsonl            | output is not given: write output=... (the jsonl file
diff .                                 | other is not given: write other=... (another run folder
eval output=mine.yml                   | output=mine.yml exists
""".strip().splitlines()


@pytest.mark.parametrize("row", OTHER_MISTAKES, ids=lambda row: row.partition("|")[0].strip())
def test_a_mistake_in_a_place_is_one_clear_line(row, folder, capsys):
    line, *parts = (part.strip() for part in row.split(" | "))
    assert cli.main(shlex.split(line)) == 2
    err = capsys.readouterr().err
    assert (
        err.startswith("error: ") and err.count("\n") == 1 and all(part in err for part in parts)
    ), err


@pytest.mark.parametrize("command", ["groups", "replay", "diff"])
def test_commands_without_presets_list_none(command):
    assert not {"--config-name", "--preset"} & options_of(
        command
    ).keys() and "--preset" in options_of("eval")


@pytest.mark.parametrize("words", [["recipe=trl", "task=gsm8k"]])
def test_a_dry_run_lists_no_key_in_whose_place_another_decides(words, capsys):
    assert cli.main(["train", *words, "--dry-run"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    assert "prompts_per_device=1" in " ".join(notes) and not any(
        "prompts_per_step=" in line for line in notes
    )
