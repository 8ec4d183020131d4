"""`shoal doctor`: nothing is wrong with what is right, and each planted mistake is found under its
key."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib._jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import CHATML, save_tensors, write_model, write_tokenizer
from tiny_runs import Workshop
from tokenizers import AddedToken

from shoal import cli
from shoal.budget.budget import Budget, Item
from shoal.budget.memory import AvailableMemory, machine_memory
from shoal.chat.tokenizer import Tokenizer
from shoal.checks.inputs import check_template
from shoal.checks.reward import (
    KINDS,
    ModelText,
    Probe,
    as_model_text,
    check_first_prompts,
    gold_of,
    known_answers,
    model_text_maker,
    probe,
    reward_findings,
    wrong_answers,
)
from shoal.commands import doctor as doctor_module
from shoal.commands.doctor import doctor
from shoal.config.merge import compose
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import ModelSection
from shoal.config.train import Config
from shoal.findings import Finding, Findings
from shoal.job import memory as memory_module
from shoal.job.out_of_memory import explain_out_of_memory
from shoal.job.step_trial import ResidentPeak, array_bytes, children_bytes
from shoal.job.task import load_task
from shoal.mesh import make_roles
from shoal.model.transformer import Model
from shoal.records import Example, ShoalError
from shoal.report.console import Console
from shoal.rewards.loading import name_functions
from shoal.rewards.pool import RewardPool
from shoal.tasks.builtin_rewards import think_format_reward
from shoal.weights.source import resolve_model

REWARDS = """
import re, time
def text_of(c): return c if isinstance(c, str) else c[0]["content"]
def found(c): return re.findall(r"<answer>(.*?)</answer>", text_of(c))
def last(completions, answer, **kw):
    return [float(found(c)[-1:] == [a]) for c, a in zip(completions, answer)]
def raises(completions, **kw): raise KeyError("no such thing")
def constant(completions, **kw): return [0.5] * len(completions)
def silent(completions, **kw): return [None] * len(completions)
def lazy(completions, **kw): return [1.0 if not text_of(c) else 0.0 for c in completions]
def any_tag(completions, answer, **kw):
    return [float(a in found(c)) for c, a in zip(completions, answer)]
def count_tags(completions, answer, **kw):
    return [float(found(c).count(a)) for c, a in zip(completions, answer)]
def contrary(completions, answer, **kw):
    return [float(found(c)[-1:] != [a]) for c, a in zip(completions, answer)]
def picky(completions, answer, **kw):
    if not all(map(text_of, completions)): raise ValueError("nothing to read")
    return last(completions, answer)
def pickier(completions, **kw):
    if not all(len(text_of(c)) > 200 for c in completions): raise ValueError("too short")
    return [0.0] * len(completions)
def sleeps(completions, **kw): time.sleep(60)
def too_few(completions, **kw): return [1.0] * 4
def wishes(completions, answr): return [1.0] * len(completions)
def letters(completions, **kw): return [sum(map(ord, text_of(c))) % 3 for c in completions]
"""


@pytest.fixture(scope="module")
def workshop(workshop: Workshop) -> Workshop:
    (workshop.folder / "probed.py").write_text(REWARDS)
    return workshop


def words(workshop: Workshop, *changes: str) -> list[str]:
    """A right configuration on the tiny model, then changes."""
    right = workshop.words(
        "job",
        f"reward={workshop.folder}/probed.py:last",
        "sampling.max_completion_tokens=96",
        "reward.workers=0",
        "optimizer.lr=1e-3",
        "steps=40",
        "train.pass_k=0",
    )
    return [*right[1:], *changes]


def look(workshop: Workshop, *changes: str) -> tuple[dict[str, Any], str]:
    """The doctor's result, and what it printed."""
    config, _ = compose("doctor", words(workshop, *changes))
    out = io.StringIO()
    return doctor(config, Console(out)), out.getvalue()


def found(result: dict[str, Any], key: str, *parts: str) -> dict[str, Any]:
    """The one finding under a key that is no `ok` and has all the parts in its text."""
    amiss = []
    for finding in result["findings"]:
        if finding["level"] != "ok":
            amiss.append(finding)
    hits = []
    for f in amiss:
        if f["key"] == key and all(part in f["text"] for part in parts):
            hits.append(f)
    assert len(hits) == 1, [(f["key"], f["text"]) for f in amiss]
    return hits[0]


# ---- a right configuration


def test_the_doctor_says_how_many_parameters_a_token_has(tmp_path):
    """Two of four experts, in two layers; without experts all."""
    role = make_roles(MeshSection()).trainer

    def text_of(folder: Path) -> str:
        source = resolve_model(ModelSection(path=str(folder)))
        model = Model(source.architecture, role)
        job: Any = SimpleNamespace(findings=Findings(), model=model)
        assert doctor_module.check_weights(job, source.load(role, np.float32))
        [found] = job.findings.found
        return found.text

    with_experts = write_model(tmp_path / "experts", "qwen3_moe", moe_intermediate_size=1000)
    found = re.fullmatch(
        r"(.*)M parameters, (.*)M of them active per token, all finite", text_of(with_experts)
    )
    assert found
    idle = 2 * 2 * 3 * 32 * 1000
    assert float(found[1]) - float(found[2]) == pytest.approx(idle / 1e6, abs=0.1)
    plain = text_of(write_model(tmp_path / "plain", "qwen3"))
    assert plain == "0.0M parameters, all finite"


@pytest.fixture(scope="module")
def right(workshop) -> tuple[dict[str, Any], str]:
    functions = ",".join(f"{workshop.folder}/probed.py:{name}" for name in ("last", "letters"))
    return look(workshop, f"reward={functions}", "reward.weights=1,0.1")


def test_nothing_is_wrong_with_what_is_right(right):
    result, out = right
    assert result["ok"] and not [f for f in result["findings"] if f["level"] == "wrong"]
    checks = list(dict.fromkeys(f["check"] for f in result["findings"]))
    assert checks == [
        "configuration",
        "devices",
        "tokenizer",
        "data",
        "template",
        "reward",
        "model",
        "agreement",
        "samples",
        "memory",
        "time",
        "advice",
    ]
    assert "== nothing is wrong" in out and json.dumps(result)


def test_shows_the_first_prompt_and_what_the_reward_says(right):
    result, out = right
    assert result["first_prompt"].endswith("=") and "first prompt:" in out
    rows = {row["answer"]: row for row in result["rewards"]}
    assert tuple(rows) == KINDS
    assert rows["right"]["last"] == 1 and rows["wrong"]["last"] == 0 and rows["empty"]["text"] == ""
    assert rows["right"]["total"] == pytest.approx(
        rows["right"]["last"] + 0.1 * rows["right"]["letters"]
    )
    assert "many at once" in out


def test_sampler_and_trainer_agree(right):
    figures = right[0]["agreement"]
    assert figures["completions"] == 8 and figures["tokens"] > 100
    assert 0 < figures["mean_difference"] <= figures["largest_difference"] < 1e-4
    assert (
        0 < figures["entropy"] < 6
        and 0 <= figures["truncated"] <= 1
        and 0 < figures["nonzero_std"] <= 1
    )


def test_memory_is_named_by_part(right):
    memory = right[0]["memory"]
    assert (
        memory["phases"][memory["phase"]]
        == max(memory["phases"].values())
        == sum(memory["parts"].values())
    )
    assert memory["parts"]["Adam's moments"] == 2 * memory["parts"]["parameters"] > 0
    assert memory["needed_bytes"] < memory["free_bytes"] <= memory["total_bytes"]
    assert len(memory["devices"]) == 1
    # RAM is the device's memory, so that what runs there counts too.
    process = memory["parts"]["this process with its libraries"]
    assert (
        process > 100 << 20 and memory["parts"]["freed memory that is not returned"] > 0.1 * process
    )


def test_what_processes_hold_in_ram_is_read():
    with ResidentPeak() as peak:
        held = np.ones(64 << 20, np.uint8)
    assert peak.bytes >= peak.stays >= held.nbytes - (1 << 20)
    before = array_bytes()
    array = jnp.ones(1 << 20)
    again = jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, [array.addressable_data(0)]
    )
    assert array_bytes() == before + array.nbytes == before + again.nbytes  # one memory counts once
    takes = (
        "import sys; own = bytearray(b'1' * (32 << 20)); print('ready', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", takes], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert children_bytes() >= 32 << 20


def test_time_is_estimated(right):
    time = right[0]["time"]
    assert time["step_seconds"] == pytest.approx(
        time["sample_seconds"] + time["reward_seconds"] + time["update_seconds"]
    )
    assert time["run_seconds"] > 40 * time["step_seconds"] > 0
    assert time["sampled_tokens"] == pytest.approx(8 * right[0]["agreement"]["mean_length"])
    assert right[0]["advice"]["text"]


def test_the_command_prints_json_and_fails_where_something_is_wrong(workshop, capsys):
    assert cli.main(["doctor", *words(workshop, "json=true", "model.path=nowhere/at/all")]) == 2
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert not result["ok"] and "There is no model folder nowhere/at/all" in err
    found(result, "model.path", "There is no model folder")


# ---- planted mistakes

MISTAKES = [  # a change of the command line, the key of the finding, parts of its text, its level
    ("optimizer.lr=0", "optimizer.lr", "nothing would be learned", "wrong"),
    ("optimizer.lr=0.05", "optimizer.lr", "destroy the model", "wrong"),
    ("optimizer.warmup_steps=40", "optimizer.warmup_steps", "only begins to rise", "warning"),
    (
        "sampling.temperature=0",
        "sampling.temperature",
        "every completion of a group would be the same",
        "wrong",
    ),
    (
        "sampling.top_p=0.9&algorithm.match_sampling_support=false",
        "algorithm.match_sampling_support",
        "is biased",
        "warning",
    ),
    ("algorithm.loss=gspo-token", "algorithm.loss", "practically never clips", "warning"),
    ("reward.weights=0", "reward.weights", "all 0", "wrong"),
    ("base_output_directory={folder}/rewards.py", "base_output_directory", "is a file", "wrong"),
    ("mesh.fsdp=9", "mesh.fsdp", "does not divide 8 devices; use 1, 2, 4 or 8", "wrong"),
    ("model.path={folder}/missing", "model.path", "There is no model folder", "wrong"),
    ("model.path={no_tokenizer}", "model.path", "holds no tokenizer.json", "wrong"),
    ("model.path={small_vocabulary}", "model.path", "belong to different models", "wrong"),
    ("model.path={no_eos}", "model.path", "no end-of-sequence token", "wrong"),
    (
        "model.template={{ raise_exception('no') if messages }}",
        "model.template",
        "refused a prompt",
        "wrong",
    ),
    ("model.template={{", "model.template", "not valid Jinja", "wrong"),
    (
        "model.template={% if messages %}Solve it.{% endif %}",
        "model.template",
        "the template leaves it out",
        "wrong",
    ),
    ("task.path={folder}/nowhere.jsonl", "task.path", "there is no such file", "wrong"),
    ("task.path={empty}", "task.path", "is empty", "wrong"),
    ("task.path={wrong_column}", "task.columns", "has no column 'answer'", "wrong"),
    ("task.path={no_gold}", "task.path", "none of the 12 training rows", "wrong"),
    ("task.path={half_gold}", "task.path", "no `#### <number>`", "warning"),
    ("task.path={templated}", "task.path", "one template is inside another", "warning"),
    (
        "task.name=custom&task.path={plain_text}&reward={folder}/probed.py:last",
        "task.template",
        "bypass this model's chat template",
        "warning",
    ),
    ("sampling.max_prompt_tokens=5", "sampling.max_prompt_tokens", "20 of 20 prompts", "wrong"),
    ("batch.prompts_per_step=21", "batch.prompts_per_step", "20 prompts, fewer than", "wrong"),
    ("reward={folder}/missing.py:f", "reward.functions", "no file", "wrong"),
    ("reward={folder}/probed.py:lasst", "reward.functions", "did you mean last", "wrong"),
    ("reward={folder}/probed.py:raises", "reward.functions", "no such thing", "wrong"),
    ("reward={folder}/probed.py:constant", "reward.functions", "all score 0.5", "wrong"),
    (
        "reward={folder}/probed.py:silent",
        "reward.functions",
        "gave no number for any answer",
        "wrong",
    ),
    ("reward={folder}/probed.py:lazy", "reward.functions", "an empty answer scores 1", "warning"),
    ("reward={folder}/probed.py:any_tag", "reward.functions", "many answers at once", "warning"),
    ("reward={folder}/probed.py:count_tags", "reward.functions", "written 8 times", "warning"),
    (
        "reward={folder}/probed.py:contrary",
        "reward.functions",
        "an empty answer scores 1",
        "warning",
    ),
    (
        "sampling.stop=</reasoning>",
        "sampling.stop",
        "ends right answers before their end",
        "warning",
    ),
    (
        "sampling.max_completion_tokens=12",
        "sampling.max_completion_tokens",
        "own right answers",
        "warning",
    ),
    ("model.path={nan}", "model.path", "NaN or infinity in the weights final_norm", "wrong"),
    ("train.pass_k=8&steps=1", "task.num_eval_questions", "or lower train.pass_k=8, ", "warning"),
    (
        "train.pass_k=0&steps=1&batch.prompts_per_step=1&batch.group_size=2"
        "&task.num_eval_questions=0",
        "task.num_eval_questions",
        "set task.num_eval_questions to fewer (it is 0, all of them), or turn",
        "warning",
    ),
]


@pytest.fixture(scope="module")
def planted(workshop) -> dict[str, str]:
    """Names in the changes above -> paths."""
    folder = workshop.folder

    def model(name: str) -> Path:
        return Path(shutil.copytree(workshop.model, folder / name))

    def data(name: str, row: str) -> str:
        lines = [
            row.replace("N", str(10 + i)).replace("HALF", "none" if i % 2 else "#### 7")
            for i in range(13)
        ]
        file = folder / f"{name}.jsonl"
        file.write_text("".join(line + "\n" for line in lines))
        return str(file)

    no_tokenizer, small, no_eos, nan = (
        model(n) for n in ("no_tokenizer", "small_vocabulary", "no_eos", "nan")
    )
    (no_tokenizer / "tokenizer.json").unlink()
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    (no_eos / "generation_config.json").unlink()
    settings = json.loads((no_eos / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (no_eos / "tokenizer_config.json").write_text(json.dumps(settings))
    tensors = load_file(nan / "model.safetensors")
    save_tensors(
        nan / "model.safetensors",
        {**tensors, "model.norm.weight": np.full_like(tensors["model.norm.weight"], np.nan)},
    )
    (folder / "empty.jsonl").write_text("")
    return {
        "folder": str(folder),
        "no_tokenizer": str(no_tokenizer),
        "small_vocabulary": str(small),
        "no_eos": str(no_eos),
        "nan": str(nan),
        "empty": str(folder / "empty.jsonl"),
        "wrong_column": data("wrong_column", '{"question": "N?", "solution": "N"}'),
        "no_gold": data("no_gold", '{"question": "N?", "answer": "none"}'),
        "half_gold": data("half_gold", '{"question": "N?", "answer": "HALF"}'),
        "plain_text": data("plain_text", '{"prompt": "N?", "answer": "N"}'),
        "templated": data(
            "templated", '{"question": "<|im_start|>user\\nN?<|im_end|>", "answer": "#### N"}'
        ),
    }


@pytest.fixture
def without_trial(monkeypatch):
    """These mistakes are found before anything is sampled."""

    def none(*_: Any) -> None: ...

    monkeypatch.setattr(doctor_module, "try_first_step", none)


@pytest.mark.parametrize(("change", "key", "text", "level"), MISTAKES)
def test_a_planted_mistake_is_found(workshop, planted, without_trial, change, key, text, level):
    for name, path in planted.items():
        change = change.replace("{" + name + "}", path)
    result, out = look(workshop, *change.split("&"))
    assert found(result, key, text)["level"] == level
    assert result["ok"] == (level == "warning")
    assert text in " ".join(out.split())


def test_a_reward_that_is_not_there_hides_nothing_of_the_data(workshop, without_trial):
    result, _ = look(workshop, f"reward={workshop.folder}/probed.py:lst")
    assert found(result, "reward.functions", "defines no 'lst', did you mean last?")
    assert result["first_prompt"] and len(result["findings"]) > 1


@pytest.mark.slow
def test_a_reward_that_hangs_is_found_within_its_limit(workshop, without_trial):
    result, _ = look(
        workshop,
        f"reward={workshop.folder}/probed.py:sleeps",
        "reward.workers=1",
        "reward.timeout_seconds=0.5",
    )
    assert found(result, "reward.functions", "sleeps", "0.5")["level"] == "wrong"
    assert result["first_prompt"]


def test_a_failure_that_the_run_would_pass_over_is_a_warning(workshop, without_trial):
    result, _ = look(workshop, f"reward={workshop.folder}/probed.py:picky", "reward.on_error=skip")
    assert found(
        result, "reward.functions", "nothing to read", "reward.on_error lets the run continue"
    )
    assert result["ok"] and [np.isnan(row["total"]) for row in result["rewards"]] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_a_mistyped_key_is_met_by_the_command_line(workshop, capsys):
    assert cli.main(["doctor", *words(workshop, "batch.groupsize=4")]) == 2
    assert "did you mean batch.group_size" in capsys.readouterr().err


def test_one_mistake_does_not_hide_another(workshop, planted, without_trial):
    result, _ = look(
        workshop,
        f"task.path={planted['empty']}",
        f"reward={planted['folder']}/missing.py:f",
        f"model.path={planted['no_eos']}",
        "optimizer.lr=0",
        "mesh.fsdp=9",
    )
    assert [f["key"] for f in result["findings"] if f["level"] == "wrong"] == [
        "optimizer.lr",
        "task.path",
        "reward.functions",
        "mesh.fsdp",
        "model.path",
    ]


@pytest.mark.slow
def test_too_little_memory_is_told_before_the_weights_are_read(workshop, monkeypatch):
    def available_memory(_):
        return AvailableMemory(1 << 20, 1 << 18, "a small machine")

    monkeypatch.setattr(
        doctor_module,
        "available_memory",
        available_memory,
    )
    result, _ = look(workshop, "sampling.max_prompt_tokens=1900", "sampling.evaluation_slots=8")
    told = found(
        result,
        "sampling.slots_per_device",
        "not enough memory",
        "KV caches",
        "slots_per_device=4 (now auto)",
    )
    assert told["check"] == "memory" and "a small machine" in told["text"]
    assert not [f for f in result["findings"] if f["check"] == "model"]
    assert result["advice"]["key"] == "sampling.slots_per_device"


@pytest.mark.slow
def test_what_the_compiled_programs_need_is_held_against_what_is_there(workshop, monkeypatch):
    def available_memory(_):
        return AvailableMemory(1 << 30, 1 << 20, "a small machine")

    monkeypatch.setattr(
        doctor_module,
        "available_memory",
        available_memory,
    )
    weight_budget = memory_module.weight_budget

    def hold_little(*job: Any) -> Budget:
        parameters = Item("parameters", "trainer", "always", 1)
        return replace(weight_budget(*job), items=[parameters])

    monkeypatch.setattr(memory_module, "weight_budget", hold_little)

    def cache_items(states):
        return []

    monkeypatch.setattr(memory_module, "cache_items", cache_items)
    result, _ = look(workshop, "batch.micro_tokens=100000", f"reward={workshop.rewards}:letters")
    told = found(result, "batch.micro_tokens", "not enough memory", "1.0 MiB of 1.0 GiB free")
    assert told["level"] == "wrong" and result["memory"]["parts"]["activations"] > 1 << 20
    assert result["time"]["step_seconds"] > 0 and result["advice"]["key"] == "batch.micro_tokens"


@pytest.mark.slow
def test_samples_that_teach_nothing_are_told(workshop, monkeypatch):
    monkeypatch.setitem(doctor_module.LARGEST_DIFFERENCE, "float32", 0.0)
    result, _ = look(workshop)
    assert result["agreement"]["nonzero_std"] == 0 and result["agreement"]["truncated"] > 0.5
    found(
        result,
        "batch.group_size",
        "every completion scored 0, so this step would teach nothing",
        "raise sampling.max_completion_tokens first",
    )
    assert (
        found(result, "sampling.max_completion_tokens", "are truncated at", "=96")["check"]
        == "samples"
    )
    found(result, "model.dtype", "more than the expected 0")


@pytest.mark.slow
def test_a_job_on_a_mesh_with_a_reference_and_several_updates(workshop):
    result, _ = look(
        workshop,
        f"reward={workshop.rewards}:letters",
        "mesh.fsdp=2",
        "mesh.tensor=2",
        "algorithm.kl_coef=0.1",
        "algorithm.num_minibatches=2",
        "sampling.slots_per_device=4",
        "sampling.max_completion_tokens=16",
    )
    assert result["ok"] and result["agreement"]["largest_difference"] < 1e-4
    memory = result["memory"]
    assert len(memory["devices"]) == memory["sharing_devices"] == 4
    assert (
        memory["parts"]["reference"]
        == memory["parts"]["parameters"]
        < memory["parts"]["the sampler's copy"]
    )


# ---- parts


def test_running_out_of_memory_is_one_line_with_the_keys_to_turn():
    text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.50GiB."
    explained = explain_out_of_memory(jaxlib._jax.JaxRuntimeError(text), Config())
    assert explained is not None and "\n" not in str(explained)
    for part in (
        "12.50GiB more",
        "order: batch.micro_tokens=1024 (now 2048)",
        "; model.remat=full (now auto)",
        "; batch.group_size=4 (now 8)",
    ):
        assert part in str(explained)
    assert "mesh.fsdp" not in str(explained)  # devices of a CPU share its memory
    assert explained.key == "batch.micro_tokens"


def test_running_out_of_memory_is_found_below_other_errors():
    try:
        try:
            raise MemoryError
        except MemoryError as error:
            raise RuntimeError("the update failed") from error
    except RuntimeError as error:
        assert "memory ran out" in str(explain_out_of_memory(error, Config()))
    config, _ = compose("eval", [])
    assert "order: batch=64 (now 128)" in str(explain_out_of_memory(MemoryError(), config))


def test_other_errors_are_not_explained():
    assert explain_out_of_memory(ValueError("out of memory"), Config()) is None
    assert (
        explain_out_of_memory(jaxlib._jax.JaxRuntimeError("INVALID_ARGUMENT: no"), Config()) is None
    )


def test_a_control_group_limits_memory(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    proc.mkdir()
    groups.mkdir()
    (proc / "meminfo").write_text("MemTotal:  8000 kB\nMemFree:  100 kB\nMemAvailable:  6000 kB\n")
    assert machine_memory(proc, groups) == (8000 * 1024, 6000 * 1024)
    (groups / "memory.max").write_text("4096000\n")
    (groups / "memory.current").write_text("3000000\n")
    (groups / "memory.stat").write_text("anon 1\ninactive_file 1000000\n")
    assert machine_memory(proc, groups) == (4096000, 2096000)
    (groups / "memory.max").write_text("max\n")
    assert machine_memory(proc, groups) == (8000 * 1024, 6000 * 1024)


@pytest.mark.parametrize(
    ("columns", "gold"),
    [
        ({"answer": "5"}, "5"),
        ({"solution": "2 + 3 = 5\n#### 5"}, "5"),
        ({"solution": "<reasoning>so</reasoning><answer> 5 </answer>"}, "5"),
        ({"reward_model": {"style": "rule", "ground_truth": "5"}}, "5"),
        ({"ground_truth": 5}, "5"),
        ({"question": "5"}, None),
        ({"answer": ""}, None),
    ],
)
def test_gold_answers_are_found_where_people_keep_them(columns, gold):
    assert gold_of(Example(0, "q", columns)) == gold


def test_wrong_answers_are_wrong():
    for gold in ("0", "1", "-3", "19", "1.5", "1,000", "Paris"):
        wrong = wrong_answers(gold)
        assert len(set(wrong)) == 5 and not any(gold in text for text in wrong)
    made = known_answers(Example(0, "q", {"answer": "5", "solution": "2 + 3 = 5"}))
    assert made["####", "wrong"] == "2 + 3 = 6\n#### 6" and made["bare", "right"] == "5"
    assert (
        made["\\boxed", "many at once"].count("\\boxed{") == 6
        and "\\boxed{5}" in made["\\boxed", "many at once"]
    )


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (lambda text, gold: text.endswith(f"#### {gold}"), "####"),
        (lambda text, gold: text == gold, "bare"),
    ],
)
def test_the_form_that_a_reward_wants_is_found(function, form):
    def wanted(completions, answer, **_):
        result = []
        for text, gold in zip(completions, answer, strict=True):
            result.append(float(function(text, gold)))
        return result

    judge = RewardPool(name_functions([wanted]), compose("train", ["reward.workers=0"])[0].reward)
    tried = probe(
        judge,
        [Example(i, "q", {"answer": str(5 + i)}) for i in range(3)],
        lambda _, text: ModelText(text, list(text.encode())),
    )
    judge.close()
    assert (
        tried.form == form
        and tried.total("right") == 1
        and tried.total("wrong") == tried.total("empty") == 0
    )
    assert [finding.level for finding in reward_findings(tried) if finding.level != "ok"] in (
        [],
        ["warning"],
    )


def tokenizer_with(
    folder: Path, tags: Sequence[str] = (), opens: str = "", special: bool = True
) -> Tokenizer:
    """A tokenizer with further tokens, whose template opens an answer with a text."""
    backend = write_tokenizer(folder)
    backend.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder, CHATML.replace("assistant\\n' }}", f"assistant\\n{opens}' }}}}"))


def test_a_thought_that_the_template_opens_is_said(tmp_path: Path) -> None:
    example = Example(0, [{"role": "user", "content": "2 + 3 = ?"}], {})
    for number, opens in enumerate(("", "<think>\\n")):
        tokenizer = tokenizer_with(tmp_path / str(number), opens=opens)
        findings = Findings()

        def encode(one: Example, tokenizer: Tokenizer = tokenizer) -> np.ndarray:
            return tokenizer.encode_prompt(one.prompt)

        check_template(tokenizer, encode, [example], findings)
        (finding,) = findings.found
        assert finding.level == "ok"
        assert ("opens a thought with <think>" in finding.text) == bool(opens)


def tried_through(tokenizer: Tokenizer, wanted: Callable[..., Any], columns: dict[str, Any]) -> Any:
    judge = RewardPool(name_functions([wanted]), compose("train", ["reward.workers=0"])[0].reward)
    example = Example(0, [{"role": "user", "content": "2 + 3 = ?"}], columns)
    with judge:
        return probe(
            judge,
            [example],
            model_text_maker(tokenizer, lambda one: tokenizer.encode_prompt(one.prompt)),
        )


def tagged(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 for thoughts and an answer in tags, 0.1 for a text of any other form."""
    form = re.compile(r"<(reasoning|think)>.*</\1>\s*<answer>\s*\d+\s*</answer>", re.DOTALL)
    result = []
    for one in completions:
        result.append(1.0 if form.fullmatch(one[0]["content"].strip()) else 0.1)
    return result


TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>", "<think>", "</think>")


@pytest.mark.parametrize("columns", [{"answer": "5"}, {"kind": "no known answer"}])
@pytest.mark.parametrize(
    ("tags", "opens", "special", "lost"),
    [
        ((), "", True, ""),
        (TAGS, "", False, ""),  # tokens of their own that decoding keeps
        (
            TAGS,
            "",
            True,
            "<reasoning>, </reasoning>, <answer>, </answer> are special tokens, which decoding "
            "leaves out",
        ),
        (TAGS[4:], "", True, ""),  # the reward takes the other tags too
        (
            TAGS[:2],
            "<think>\n",
            True,
            "<reasoning>, </reasoning> are special tokens, which decoding leaves out",
        ),
    ],
)
def test_known_answers_are_tried_as_completions_come(
    tmp_path: Path,
    columns: dict[str, Any],
    tags: Sequence[str],
    opens: str,
    special: bool,
    lost: str,
) -> None:
    tried = tried_through(tokenizer_with(tmp_path, tags, opens, special), tagged, columns)
    assert (lost in tried.lost) if lost else not tried.lost
    named = []
    for one in reward_findings(tried):
        if one.level == "warning" and one.text == tried.lost:
            named.append(one.text)
    assert len(named) == bool(lost)
    if "answer" in columns:
        assert tried.total("right") == (0.1 if lost else 1.0)
    if lost:
        assert "scores 0.1 in place of 1" in tried.lost


@pytest.mark.parametrize(
    ("opens", "lost"),
    [
        ("<think>\n", True),
        ("<think>", True),
        ("Let me think.\n<think>\n", True),
        ("", False),
        ("<think>\n\n</think>\n\n", False),
    ],
)
def test_a_tag_that_the_prompt_opens_is_no_part_of_a_completion(
    tmp_path: Path, opens: str, lost: bool
) -> None:
    tried = tried_through(tokenizer_with(tmp_path, (), opens), think_format_reward, {"answer": "5"})
    assert ("the prompt ends with <think>, so a completion begins after it" in tried.lost) == lost
    assert tried.total("right") == (0.0 if lost else 1.0)


def test_a_known_answer_is_encoded_ended_and_decoded(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path)
    one = as_model_text(
        tokenizer, "<|im_start|>assistant\n<think>\n", "<think>\nso\n</think>\n5<|im_end|>more"
    )
    assert (
        one.text == "so\n</think>\n5" and one.opened == "<think>" and one.skipped == ("<|im_end|>",)
    )
    assert list(one.ids) == [*tokenizer.encode("so\n</think>\n5"), tokenizer.eos_ids[0]]
    assert list(as_model_text(tokenizer, "p", "").ids) == [tokenizer.eos_ids[0]]


@pytest.mark.parametrize(
    ("repeated", "many", "told"),
    [
        (1.0, 0.0, ""),
        (0.0, 0.0, ""),
        (1.1, 0.0, "written 8 times"),
        (1.0, 1.0, "many answers at once"),
        (0.0, 1.1, "many answers at once"),
    ],
)
def test_only_more_for_a_repeated_answer_is_an_incentive_and_as_much_for_a_guess(
    repeated, many, told
):
    totals = dict(zip(KINDS, (1.0, 0.1, 0.0, repeated, many), strict=True))
    [finding] = reward_findings(
        Probe("####", {kind: {"total": total} for kind, total in totals.items()}, {})
    )
    assert (finding.level, told in finding.text) == ("warning" if told else "ok", True)


def found_before_a_run(
    config: Config, tokenizer: Tokenizer, rows: Sequence[Example], judge: RewardPool
) -> list[Finding]:
    """What a run finds about its rewards: on the first of the rows, and on others if needed."""

    def encode(example: Example) -> Any:
        return tokenizer.encode_prompt(example.prompt)

    make = model_text_maker(tokenizer, encode)
    return check_first_prompts(config, {"": rows[0]}, rows, make, judge)


def test_the_brief_says_what_the_reward_says(workshop):
    config, _ = compose("train", ["reward.workers=0"])
    task, tokenizer = load_task(config.task, config.reward), Tokenizer.load(workshop.model)
    judge = RewardPool(task.rewards, config.reward)
    found = found_before_a_run(config, tokenizer, task.train[:1], judge)
    judge.close()
    assert [(finding.level, finding.text) for finding in found] == [
        ("ok", "right 1.1, wrong 0.1, empty 0, repeated 0, many at once 0")
    ]


def test_a_number_that_chooses_groups_is_one_that_a_function_logs(workshop):
    words = ["reward.workers=0", "algorithm.dynamic_sampling=true"]
    config, _ = compose("train", [*words, "algorithm.dynamic_sampling_by=pass_rate"])
    task, tokenizer = load_task(config.task, config.reward), Tokenizer.load(workshop.model)
    with (
        RewardPool(task.rewards, config.reward) as judge,
        pytest.raises(ShoalError, match="dynamic_sampling_by=pass_rate: no reward function gives"),
    ):
        found_before_a_run(config, tokenizer, task.train[:1], judge)


def in_brief(workshop, name: str, *changes: str) -> list[str]:
    """The brief's warnings of a reward."""
    config, _ = compose(
        "train", ["reward.workers=0", f"reward={workshop.folder}/probed.py:{name}", *changes]
    )
    task, tokenizer = load_task(config.task, config.reward), Tokenizer.load(workshop.model)
    with RewardPool(task.rewards, config.reward) as judge:
        result = []
        for f in found_before_a_run(config, tokenizer, task.train[:1], judge):
            if f.level == "warning":
                result.append(f.text)
        return result


@pytest.mark.parametrize("on_error", ["error", "zero", "skip"])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("too_few", "returned 4 values for 30 completions"),
        ("wishes", "needs 'answr', which is not a column"),
    ],
)
def test_a_reward_that_no_policy_lets_pass_ends_the_run_before_it_begins(
    workshop, name, told, on_error
):
    with pytest.raises(ShoalError, match=told):
        in_brief(workshop, name, f"reward.on_error={on_error}")


def test_a_reward_that_fails_at_all_known_answers_ends_the_run_before_it_begins(workshop):
    told = (
        r"'raises' tried on known answers raised KeyError: 'no such thing' for .*The function "
        r"gave no right answer a score"
    )
    with pytest.raises(ShoalError, match=told):
        in_brief(workshop, "raises")
    for policy in ("zero", "skip"):
        assert "no such thing" in in_brief(workshop, "raises", f"reward.on_error={policy}")[0]


def test_a_reward_that_fails_at_all_right_answers_ends_the_run_before_it_begins(workshop):
    with pytest.raises(
        ShoalError,
        match=r"raised ValueError: too short for .*\. The function gave no right answer a score\. ",
    ):
        in_brief(workshop, "pickier")


def test_a_reward_that_reads_what_tools_answer_is_not_called_wrong():
    rows = {}
    for kind in ("right", "wrong", "empty", "repeated", "many at once"):
        rows[kind] = {"total": 0.0, "used": 0.0}
    tried = Probe("####", rows, {})
    assert [finding.level for finding in reward_findings(tried)] == ["wrong"]
    [finding] = reward_findings(tried, has_calls=True)
    assert finding.level == "warning"
    assert finding.text.endswith(
        "tried without calls of tools and their answers, which a reward may need"
    )


def test_answers_without_a_score_are_not_said_to_score_the_same():
    rows = {}
    for kind in ("right", "wrong", "empty", "repeated", "many at once"):
        rows[kind] = {"total": 0.0 if kind == "repeated" else math.nan}
    [finding] = reward_findings(Probe("####", rows, {}))
    assert finding.level == "wrong" and finding.text.startswith(
        "of the answers tried only repeated score 0: if the model"
    )


@pytest.mark.parametrize("on_error", ["error", "skip"])
def test_a_reward_that_fails_at_an_odd_answer_is_a_warning(workshop, on_error):
    told = in_brief(workshop, "picky", f"reward.on_error={on_error}")[0]
    assert "nothing to read" in told and "completion '')" in told
    assert not any(words in told for words in ("step 0", "reward.on_error", "more answers"))


@pytest.mark.slow
def test_a_reward_that_hangs_is_tried_once_before_the_run(workshop):
    limits = ["reward.workers=1", "reward.timeout_seconds=0.5"]
    started = time.monotonic()
    [told] = in_brief(workshop, "sleeps", "reward.on_error=skip", *limits)
    assert time.monotonic() - started < 8  # two limits; each of 25 answers alone takes 12.5
    assert (
        "took longer than reward.timeout_seconds=0.5" in told
        and ". No more answers were tried" in told
    )
    with pytest.raises(
        ShoalError, match=r"took longer than reward.timeout_seconds=0.5.*no right answer a score"
    ):
        in_brief(workshop, "sleeps", *limits)


@pytest.mark.parametrize(
    ("totals", "text"),
    [
        ([1.0, math.nan], "right 1, wrong no score"),
        ([math.nan, math.nan], "right no score, wrong no score"),
    ],
)
def test_an_answer_without_a_score_is_said_in_words(totals, text):
    rows = {}
    for kind, total in zip(("right", "wrong"), totals, strict=True):
        rows[kind] = {"total": total}
    assert Probe("", rows, {}).describe() == text


def test_a_reward_of_form_alone_is_not_said_to_score_all_texts_the_same(workshop):
    """Without right answers a reward for small letters that names the topic scored an empty answer
    as it scored the only other text that was tried."""

    def judge(completions, prompts, **kwargs):
        scores = []
        for completion, prompt in zip(completions, prompts, strict=True):
            topic = prompt[-1]["content"].split()[2].lower()
            scores.append(
                float(completion[0]["content"].islower() and topic in completion[0]["content"])
            )
        return scores

    config, _ = compose("train", ["reward.workers=0"])
    tokenizer = Tokenizer.load(workshop.model)
    prompt = [{"role": "user", "content": "Describe a lamp in one sentence."}]

    def levels(function) -> list[str]:
        with RewardPool(name_functions([function], ()), config.reward) as pool:
            rows = [Example(0, prompt, {})]
            return [one.level for one in found_before_a_run(config, tokenizer, rows, pool)]

    assert levels(judge) == ["ok"]
    assert levels(lambda completions, **kwargs: [0.5] * len(completions)) == ["ok", "warning"]


@pytest.mark.parametrize("has_gold", [True, False])
def test_a_function_that_scores_some_rows_only_is_not_called_silent(workshop, has_gold):
    """The first row's kind decided: a function that returned None for it, as the rewards of several
    tasks do in TRL, was said to give no number for any answer."""

    def for_kind(kind):
        def judge(completions, column, **kwargs):
            scores = []
            for completion, of_row in zip(completions, column, strict=True):
                score = min(1.0, len(completion[0]["content"]) / 99)
                scores.append(score if of_row == kind else None)
            return scores

        judge.__name__ = f"of_{kind or 'none'}"
        return judge

    config, _ = compose("train", ["reward.workers=0"])
    tokenizer = Tokenizer.load(workshop.model)
    rows = []
    for number in range(6):
        columns = {"column": "code" if number == 5 else "math"}
        if has_gold:
            columns["answer"] = str(number)
        rows.append(Example(number, [{"role": "user", "content": "What?"}], columns))

    def warnings(*kinds: str) -> list[str]:
        chosen = name_functions([for_kind(kind) for kind in kinds])
        with RewardPool(chosen, config.reward) as pool:
            found = found_before_a_run(config, tokenizer, rows, pool)
        return [one.text for one in found if "no number" in one.text]

    assert warnings("math", "code") == []
    assert warnings("code") == []
    [text] = warnings("math", "code", "")
    assert text.startswith("of_none gave no number for any answer tried")
