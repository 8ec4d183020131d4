"""A dry run and the run never disagree whether a job is accepted: lines of the table, and random
mixtures of flags.

`python tests/compat/test_agreement.py FOLDER 200` tries so many mixtures among the stand-ins in
FOLDER.
"""

from __future__ import annotations

import random
import sys
import traceback
from pathlib import Path

import pytest
import stand_ins
from lines import LINES, among, run, words_of
from test_compat_runs import SHORT

from shoal.trainer.loop import Run

DEVICES = 8
POOL: dict[str, tuple[str, ...]] = {
    "--num_generations": ("2", "4", "1"),
    "--grpo_beta": ("0", "0.04", "-1"),
    "--epsilon": ("0.1", "2"),
    "--learning_rate": ("1e-6", "0", "1"),
    "max_prefill_predict_length": ("64", "900", "8"),
    "sampling.max_completion_tokens": ("8", "3", "9000"),
    "batch.prompts_per_step": ("1", "2", "5000"),
    "per_device_batch_size": ("1", "2"),
    "algorithm.num_minibatches": ("1", "2", "3"),
    "num_iterations": ("1", "2"),
    "loss_algo": ("grpo", "gspo-token", "gspo"),
    "algorithm.loss": ("cispo", "sapo", "gmpo"),
    "algorithm": ("dapo", "rloo", "gspo"),
    "recipe": ("trl", "verl", "tunix", "torchrl", "maxtext", "prime-rl"),
    "algorithm.advantage": ("dr_grpo", "none", "gdpo", "maxrl"),
    "train.max_staleness": ("1", "2"),
    "inference_rollouts": ("1", "2"),
    "algorithm.correction": ("direct", "tis", "none"),
    "top_k": ("0", "4", "100"),
    "temperature": ("0.9", "0"),
    "min_p": ("0.1", "2"),
    "sampling.slots_per_device": ("1", "8"),
    "train_model.num_devices": ("1", "2", "9"),
    "ref_model.num_devices": ("1", "2"),
    "mesh.sampler": ("1", "2", "0.5"),
    "ici_fsdp_parallelism": ("2", "-1", "16"),
    "ici_tensor_parallelism": ("2", "3"),
    "ici_context_parallelism": ("2",),
    "rollout_tensor_parallelism": ("2", "3"),
    "dtype": ("bfloat16", "float16"),
    "model.lora.rank": ("4", "1000"),
    "use_peft": ("true",),
    "model.quantise": ("int8",),
    "optimizer.moments": ("bfloat16",),
    "optimizer.offload": ("true",),
    "remat_policy": ("full", "minimal"),
    "model.attention": ("blocked", "splash", "plain"),
    "task.split": ("train", "nix"),
    "task.eval_split": ("test", "train", "nix"),
    "hf_subset": ("main", "nix"),
    "reward.preset": ("tunix", "verl"),
    "reward.functions": ("accuracy_reward", "think_format_reward", "nix"),
    "reward.weights": ("1", "[1,2]", "0"),
    "reward.overlong_buffer_tokens": ("4", "-1"),
    "sampling.long_prompts": ("drop", "error"),
    "train.pass_k": ("2", "300"),
    "train.evaluate_every": ("1", "-1"),
    "checkpoint.keep_best": ("true",),
    "train.quick_questions": ("1",),
    "task.num_eval_questions": ("1", "0"),
    "algorithm.dynamic_sampling": ("true",),
    "train.retire_above": ("0.9",),
    "train.shuffle": ("false",),
    "teacher.path": ("{models}/qwen2", "nix"),
    "model.template": ("plain", "{{{{ messages[-1].content }}}}"),
    "model_name": ("llama3.1-8b", "qwen3-8b", "nix"),
    "tokenizer_path": ("{models}/llama3", "nix/x"),
    "report.tensorboard": ("true",),
    "run_name": ("a/b", ".."),
}
"""Flags and keys, each with values of which some cannot be."""


class Accepted(Exception):
    """The run's loop has begun."""


def refuse_to_train(self: Run) -> None:
    raise Accepted


def mixture(number: int, models: Path) -> list[str]:
    """A command line of up to five flags, always the same one of a number."""
    draw = random.Random(number)
    names = draw.sample(sorted(POOL), draw.randint(1, 5))
    words = []
    for name in names:
        words.append(f"{name}={draw.choice(POOL[name]).format(models=models)}")
    return [
        "train",
        f"model.path={draw.choice([models / 'qwen3', models / 'llama3'])}",
        "task=gsm8k",
        "task.path="
        f"{models.parent / 'hub/datasets--openai--gsm8k/snapshots' / ('1' * 40) / 'main'}",
        *SHORT[:3],
        "batch.prompts_per_step=2",
        "batch.group_size=2",
        "reward.workers=0",
        *words,
    ]


def verdicts(words: list[str], world: Path, devices: int, name: str) -> tuple[str, str]:
    """The errors of a dry run and of the run, empty where they accept the job."""
    words = [
        *words,
        *([] if any(word.startswith("run_name=") for word in words) else [f"run_name={name}"]),
        f"base_output_directory={world / 'tried'}",
    ]
    with among(world, devices), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "train", refuse_to_train)
        code, _, err = run([*words, "--dry-run"])
        dry = err if code else ""
        try:
            code, _, err = run(words)
        except Accepted:
            return dry, ""
        except Exception as error:
            return dry, f"BUG {traceback.format_exception(error)[-1]}"
    return dry, err.strip().splitlines()[-1] if code else ""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return stand_ins.build(tmp_path_factory.mktemp("world"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_a_mixture_of_flags_is_accepted_by_both_or_refused_by_both(number, world):
    words = mixture(number, world / "models")
    dry, real = verdicts(words, world, DEVICES, f"mixture{number}")
    assert bool(dry) == bool(real) and "BUG" not in real, f"{words}\n{dry}\n{real}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["20-grpo-optimizer", "trl-grpo", "verl-npu", "tunix-qwen3"])
def test_a_line_of_the_table_is_accepted_by_both(name, world):
    line = LINES[name]
    dry, real = verdicts([*words_of(line, world), *SHORT], world, min(line.devices, DEVICES), name)
    assert bool(dry) == bool(real) and "BUG" not in real, f"{dry}\n{real}"


if __name__ == "__main__":
    place, differ, refused = stand_ins.build(Path(sys.argv[1])), 0, 0
    for seed in range(int(sys.argv[3]) if len(sys.argv) > 3 else 0, int(sys.argv[2])):
        typed = mixture(seed, place / "models")
        said = verdicts(typed, place, DEVICES, f"tried{seed}")
        refused += bool(said[1])
        if bool(said[0]) != bool(said[1]) or "BUG" in said[1]:
            differ += 1
            print(seed, " ".join(typed[12:]), *said, sep="\n    ", flush=True)
    print(f"{differ} disagree, {refused} refused by the run", flush=True)
