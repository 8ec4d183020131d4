"""Whole runs through the command line: evaluate, train, evaluate, export, generate; and from
Python."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_runs import (
    PLAIN,
    Workshop,
    by_path,
    checkpoints,
    forget_programs,
    groups,
    metrics,
    parameters_of,
    read_lines,
    read_records,
    same_bits,
    trainer,
)

import shoal
from shoal import cli
from shoal.config.key import open_keys
from shoal.config.merge import compose
from shoal.job import compilations
from shoal.mesh import return_freed_memory
from shoal.model.families import architecture_of
from shoal.records import Purpose
from shoal.runs.groups import groups_file, read_file
from shoal.runs.metrics import METRICS, metric
from shoal.runs.reader import read_config, read_decisions
from shoal.text import count
from shoal.weights import huggingface

CLOCKS = ("time/", "throughput/", "memory/", "publish/", "compilations")
SUMMARY = {
    "accuracy_before",
    "accuracy_after",
    "num_questions",
    "seconds_total",
    "seconds_by_phase",
    "sample_tokens_per_second",
    "train_tokens_per_second",
    "num_compilations",
}
STYLES = {"llama3": "llama3", "qwen3": "chatml"}


# ---- each family: evaluate, train, evaluate, export, generate


@pytest.fixture(scope="module", params=STYLES)
def family(request, tmp_path_factory) -> tuple[Workshop, Path]:
    """Two steps with the model's own template, and the run folder."""
    workshop = Workshop(
        tmp_path_factory.mktemp(request.param),
        request.param,
        STYLES[request.param],
        num_hidden_layers=1,
    )
    forget_programs()  # compilations are counted
    return workshop, workshop.train(
        "run", "model.template=", "sampling.max_prompt_tokens=256", "seed=3", "price=3600"
    )


@pytest.fixture(scope="module")
def exported(family) -> Path:
    workshop, run = family
    assert cli.main(["export", f"from={run}", f"to={workshop.folder / 'exported'}"]) == 0
    return workshop.folder / "exported"


@pytest.mark.slow
def test_a_run_leaves_its_settings(family):
    _, run = family
    config, _ = compose("train", [str(run / "config.yaml")])
    assert (config.seed, config.steps, config.task.name, config.sampling.max_prompt_tokens) == (
        3,
        2,
        "gsm8k",
        256,
    )
    left_open = (config.batch.micro_tokens, config.algorithm.correction)
    assert left_open == (0, "auto")  # which the run decided itself
    assert (config.sampling.prompt_slot_tokens, config.sampling.evaluation_slots) == (0, 0)
    decided = read_config(run)
    assert decided.sampling.evaluation_slots  # decided by the data, the others by the devices
    assert (decided.batch.micro_tokens, decided.algorithm.correction) == (2048, "none")
    unused = {"environment.call_format", "vllm.tolerance"}  # a run without tools and servers
    assert read_decisions(run).keys() == set(open_keys(config)) - unused
    assert {p.name for p in run.iterdir()} == {
        "config.yaml",
        "decided.yaml",
        "metrics.jsonl",
        "evaluations.jsonl",
        "events.jsonl",
        "groups",
        "checkpoints",
        "summary.json",
        "model",
        "pass_rates.jsonl",
        ".lock",
        "log.txt",
    }


@pytest.mark.slow
def test_every_step_is_filed_once_under_known_names(family):
    rows = metrics(family[1])
    assert [row["step"] for row in rows] == [1, 2] == [row["version"] for row in rows]
    for row in rows:
        assert {metric(name).name for name in row if name != "step"} == set(row) - {"step"}
        rest = {
            "rewards/{function}",
            "rewards/failed/{function}",
            "rewards/logged/{name}",
            "kl",
            "mfu",
            "teacher/kl",
            "teacher/divergence",
            "correction/weight",
            "correction/zero",
            "correction/rejected",
            "sampler_gap/kl",
            "sampler/preempted_rows",
        }
        # own devices
        rest |= {name for name in METRICS if name.startswith(("idle/", "queue/", "fleet/", "age/"))}
        rest |= {"loss_scale", "update/overflows"}  # of float16 alone
        rest |= {name for name in METRICS if name.startswith("critic/")}  # of PPO alone
        rest |= {"context/nll"}  # of algorithm.context_coef alone
        # of models with experts
        rest |= {name for name in METRICS if name.startswith("experts/")}
        rest |= {"sampler_gap/logprob_mean_own_routes"}
        # of rollouts with turns
        rest |= {name for name in METRICS if name.startswith(("turns/", "tools/"))} | {
            "tokens/context",
            "prompts/own",
            *(
                f"completions/ended_by_{reason}"
                for reason in ("max_turns", "environment", "failed")
            ),
        }
        missing = set(METRICS) - set(row) - rest
        assert missing <= {"completions/length_ended_mean"} and (
            row["completions/truncated"] == 1
        ) == bool(missing)
        assert "rewards/letters" in row
        for value in row.values():
            assert math.isfinite(value)
        assert row["update/count"] == 1 and row["update/skipped"] == 0 and row["staleness"] == 0
        assert row["ratio/mean"] == pytest.approx(1, abs=1e-6) and row["clip/fraction"] == 0
        assert row["sampler_gap/ess"] == pytest.approx(1, abs=1e-4)
        assert row["grad_norm"] > 0 and row["groups/nonzero_std"] > 0


@pytest.mark.slow
def test_every_group_is_kept(family):
    _, run = family
    for step, row in enumerate(metrics(run), 1):
        kept = groups(run, step)
        assert len(kept) == 2 and len({group["row"] for group in kept}) == 2
        rewards = np.array([[c["reward"] for c in group["completions"]] for group in kept])
        advantages = np.array([[c["advantage"] for c in group["completions"]] for group in kept])
        assert rewards.shape == (2, 4) and rewards.mean() == pytest.approx(row["reward/mean"])
        deviation = rewards.std(1, ddof=1, keepdims=True)
        expected = np.where(
            deviation > 0, (rewards - rewards.mean(1, keepdims=True)) / (deviation + 1e-4), 0
        )
        np.testing.assert_allclose(advantages, expected, atol=1e-6)
        for group, nonzero_std in zip(kept, deviation[:, 0] > 0, strict=True):
            assert (group["purpose"], group["step"], group["version"]) == ("train", step, step - 1)
            assert group["columns"]["answer"] == str(10 + group["row"] + 17)
            for completion in group["completions"]:
                assert len(completion["logprobs"]) == len(completion["token_ids"])
                assert ("trainer_logprobs" in completion) == nonzero_std
                if nonzero_std:
                    np.testing.assert_allclose(
                        completion["trainer_logprobs"], completion["logprobs"], atol=2e-5
                    )


@pytest.mark.slow
def test_evaluations_and_summary(family):
    _, run = family
    before, after = read_lines(run / "evaluations.jsonl")
    assert (before["step"], after["step"]) == (0, 2)
    for figures in (before, after):
        assert (
            figures["name"] == "held_out"
            and figures["num_questions"] == 4
            and figures["protocol"] == "greedy"
        )
        assert {"accuracy", "accuracy_interval", "pass@4", "mean_reward"} <= set(figures)
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary) >= SUMMARY
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (
        before["accuracy"],
        after["accuracy"],
    )
    assert summary["num_questions"] == 4 and summary["num_compilations"] > 0
    phases = summary["seconds_by_phase"]
    assert {"start", "evaluate", "sample", "reward", "update", "checkpoint"} <= set(phases)
    assert 0 < sum(phases.values()) <= summary["seconds_total"]
    # 3600 an hour: a second costs 1
    for row in metrics(run):
        assert row["cost/step"] == pytest.approx(row["time/step_seconds"])
    assert summary["cost"] == pytest.approx(summary["seconds_total"], rel=0.01)
    assert summary["sample_tokens_per_second"] == pytest.approx(
        sum(row["tokens/sampled"] for row in metrics(run)) / phases["sample"]
    )
    answers = read_records(run / "groups" / "evaluate_held_out_000002.parquet")
    assert len(answers) == 4 and all(len(group["completions"]) == 1 for group in answers)


def greedy(model: Path, folder: Path, prompts: list) -> list[dict]:
    (folder / "out.jsonl").unlink(missing_ok=True)
    (folder / "in.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    (folder / "out.jsonl").unlink(missing_ok=True)
    assert (
        cli.main(
            [
                "generate",
                f"model={model}",
                f"prompts={folder / 'in.jsonl'}",
                f"output={folder / 'out.jsonl'}",
                "temperature=0",
                "max_new_tokens=12",
                "batch=8",
                "max_prompt_tokens=256",
            ]
        )
        == 0
    )
    return read_lines(folder / "out.jsonl")


@pytest.mark.slow
def test_the_exported_model_says_the_same_in_transformers(family, exported, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    messages = [
        [{"role": "user", "content": "12 + 17 = ?"}],
        [{"role": "user", "content": "And now?"}],
    ]
    rows = greedy(exported, tmp_path, [*messages, "The user gives 10"])
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    if tokenizer.chat_template:
        for row, prompt in zip(rows, messages, strict=False):
            assert (
                row["prompt_ids"]
                == tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
            )
    for row in rows:
        ids = torch.tensor([row["prompt_ids"]])
        with torch.no_grad():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=12,
                pad_token_id=0,
            )
        assert made[0, ids.shape[1] :].tolist() == row["token_ids"]
    before = greedy(family[0].model, tmp_path, [*messages, "The user gives 10"])
    # it did learn
    assert [row["token_ids"] for row in before] != [row["token_ids"] for row in rows]


# ---- generate


PROMPTS = ["one", [{"role": "user", "content": "two"}], "three is longer than two", "one", "five"]


def generate(workshop: Workshop, *changes: str, prompts: list | None = None) -> list[dict]:
    """Two completions a prompt, two prompts at a time."""
    prompts_file, output = workshop.folder / "prompts.jsonl", workshop.folder / "completions.jsonl"
    output.unlink(missing_ok=True)
    prompts_file.write_text(
        "\n".join(json.dumps({"prompt": prompt}) for prompt in prompts or PROMPTS)
    )
    assert (
        cli.main(
            [
                "generate",
                f"model={workshop.model}",
                f"prompts={prompts_file}",
                f"output={output}",
                "batch=4",
                "num_generations=2",
                "max_new_tokens=12",
                "max_prompt_tokens=64",
                *changes,
            ]
        )
        == 0
    )
    return read_lines(output)


@pytest.fixture(scope="module")
def sampled(workshop) -> list[dict]:
    return generate(workshop, "seed=5")


def test_a_row_a_completion_in_order(workshop, sampled):
    from shoal.chat.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(workshop.model)
    assert len(sampled) == 2 * len(PROMPTS)  # more than there are slots
    for at, (row, prompt) in enumerate(
        zip(sampled, [prompt for prompt in PROMPTS for _ in range(2)], strict=True)
    ):
        assert set(row) == {
            "index",
            "prompt",
            "prompt_ids",
            "token_ids",
            "logprobs",
            "completion",
            "stop_reason",
        }
        assert (row["index"], row["prompt"]) == (at // 2, prompt)
        assert row["prompt_ids"] == tokenizer.encode_prompt(prompt).tolist()
        assert row["completion"] == tokenizer.decode(row["token_ids"])
        assert 1 <= len(row["token_ids"]) == len(row["logprobs"]) <= 12
        for value in row["logprobs"]:
            assert -20 < value < 0
        ended = row["token_ids"][-1] in tokenizer.eos_ids
        assert row["stop_reason"] == ("eos" if ended else "length")
        assert ended or len(row["token_ids"]) == 12


def test_a_seed_repeats_itself_and_another_differs(workshop, sampled):
    assert generate(workshop, "seed=5") == sampled
    other = generate(workshop, "seed=6")
    assert [row["prompt_ids"] for row in other] == [row["prompt_ids"] for row in sampled]
    differ = []
    for a, b in zip(other, sampled, strict=True):
        differ.append(a["token_ids"] != b["token_ids"])
    assert all(differ)


def test_siblings_and_equal_prompts_differ(sampled):
    drawn = [tuple(row["token_ids"]) for row in sampled]
    assert len(set(drawn)) == len(drawn)
    assert sampled[0]["prompt_ids"] == sampled[6]["prompt_ids"]


def test_fewer_prompts_draw_the_same(workshop, sampled):
    assert generate(workshop, "seed=5", prompts=PROMPTS[:2]) == sampled[:4]


@pytest.mark.slow
@pytest.mark.bitwise
def test_fewer_prompts_draw_the_same_of_the_packaged_model(workshop):
    """Its rows of one and of two siblings differ in the last bits on processors with AVX-512
    too."""
    every, few = (
        generate(workshop, "model=tiny", prompts=prompts) for prompts in (PROMPTS, PROMPTS[:2])
    )
    assert few == every[:4]


def test_temperature_0_is_greedy_for_every_seed(workshop, sampled):
    rows = generate(workshop, "temperature=0", "seed=5")
    assert rows == generate(workshop, "temperature=0", "seed=9")
    for i in range(0, len(rows), 2):
        assert rows[i] == rows[i + 1]
    assert rows[0] | {"index": 3} == rows[6]
    assert [row["token_ids"] for row in rows] != [row["token_ids"] for row in sampled]


@pytest.mark.slow
def test_truncation(workshop):
    greedy = []
    for row in generate(workshop, "temperature=0"):
        greedy.append(row["token_ids"])
    for one in ("top_k=1", "top_p=1e-6", "min_p=0.999"):
        rows = generate(workshop, one)
        assert [row["token_ids"] for row in rows] == greedy
        # the only token left
        for row in rows:
            for value in row["logprobs"]:
                assert abs(value) < 1e-6
    few = generate(workshop, "top_k=2")
    assert [row["token_ids"] for row in few] != greedy
    assert min(value for row in few for value in row["logprobs"]) > -12
    # the mean of two shares
    assert np.mean([value for row in few for value in row["logprobs"]]) > math.log(1 / 2)


def test_stop_strings(workshop, sampled):
    stop = next(
        letter
        for row in sampled
        for letter in row["completion"][3:]
        if letter.isascii() and letter.isalnum()
    )
    rows = generate(workshop, "seed=5", f'stop=["{stop}",never]')
    assert len(rows) == len(sampled)
    for cut, whole in zip(rows, sampled, strict=True):
        count = len(cut["token_ids"])
        assert cut["token_ids"] == whole["token_ids"][:count]
        assert (cut["stop_reason"] == "stop") == (stop in whole["completion"])
        assert (
            cut["stop_reason"] != "stop"
            or cut["completion"].index(stop) == len(cut["completion"]) - 1
        )


def test_unusual_lines_are_read(workshop, capsys):
    file, output = workshop.folder / "odd.jsonl", workshop.folder / "odd-out.jsonl"
    long, talk = "9" * 65, [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]
    file.write_text(
        '\ufeff{"prompt": "a\u2028b", "completion": 1}\n\n{"prompt": "'
        + long
        + '"}\n'
        + json.dumps({"messages": talk}),
        encoding="utf-8",
    )
    words = [
        "generate",
        f"model={workshop.model}",
        f"prompts={file}",
        f"output={output}",
        "batch=4",
        "num_generations=2",
        "max_new_tokens=12",
        "max_prompt_tokens=64",
    ]
    assert cli.main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "1 of 3 prompts of odd.jsonl have more than sampling.max_prompt_tokens=64 tokens and are "
        "dropped" in out
    )
    assert f"model: {workshop.model} (" in out and "names another" not in out
    assert "prompts: 1 of messages, " in out and "; 1 of text, unchanged" in out
    rows = read_lines(output)
    assert [(row["index"], row["prompt"]) for row in rows] == [(0, "a\u2028b")] * 2 + [
        (2, talk[:1])
    ] * 2
    assert [row["given_completion"] for row in rows[:2]] == [1, 1] and rows[2]["messages"] == talk
    assert cli.main(words) == 2
    assert f"output={output} exists: choose another name, or remove it" in capsys.readouterr().err


# ---- learning


@pytest.fixture(scope="module")
def base(workshop) -> Path:
    return workshop.train("base", "steps=3", "checkpoint_period=1", "checkpoint.keep_last=3")


def without_clocks(rows: list[dict]) -> list[dict]:
    result = []
    for row in rows:
        result.append({name: value for name, value in row.items() if not name.startswith(CLOCKS)})
    return result


@pytest.mark.slow
def test_learning_rate_0_changes_nothing(workshop):
    run = workshop.train("still", "optimizer.lr=0")
    initial = by_path(huggingface.load(workshop.model, architecture_of(workshop.model), trainer()))
    assert same_bits(parameters_of(run, 2), initial)
    summary = json.loads((run / "summary.json").read_text())
    # samples have the noise of their version
    greedy = []
    for side in ("before", "after"):
        greedy.append(
            {
                name: value
                for name, value in summary[side]["held_out"].items()
                if not name.startswith("sampled_")
            }
        )
    assert greedy[0] == greedy[1] and summary["accuracy_after"] == summary["accuracy_before"]
    for row in metrics(run):
        assert row["lr"] == 0 and row["grad_norm"] > 0


@pytest.mark.slow
def test_a_run_a_checkpoint_and_their_export_are_one_model(workshop, base, tmp_path, capsys):
    """The run folder (its newest checkpoint), one checkpoint of it, and folders exported from
    them."""
    saved = base / "checkpoints"
    for source, target in ((base, "whole"), (saved / "3", "single"), (saved / "1", "old")):
        assert cli.main(["export", f"from={source}", f"to={tmp_path / target}"]) == 0
        written = by_path(
            huggingface.load(tmp_path / target, architecture_of(workshop.model), trainer())
        )
        assert same_bits(written, parameters_of(base, 1 if target == "old" else 3))
    answers = []
    for model in (tmp_path / "whole", base):
        answers.append(greedy(model, tmp_path, ["10 + 10", "x"]))
    assert answers[0] == answers[1]
    capsys.readouterr()
    words = [
        "task=gsm8k",
        f"task.path={workshop.data}",
        f"reward={workshop.rewards}:letters",
        "batch=8",
        "pass_k=4",
        f"model.template={PLAIN}",
        "sampling.max_prompt_tokens=64",
        "sampling.max_completion_tokens=12",
        f"output={tmp_path / 'figures.json'}",
    ]
    assert cli.main(["eval", f"model={base}", *words]) == 0
    assert "held_out: accuracy" in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())["held_out"]
    last = read_lines(base / "evaluations.jsonl")[-1]
    for name in (
        "accuracy",
        "num_questions",
        "protocol",
        "mean_reward",
        "rewards/letters",
        "mean_length",
    ):
        assert figures[name] == last[name]


@pytest.mark.slow
def test_a_seed_repeats_the_run_bit_for_bit(workshop, base):
    again, other = workshop.train("again", "steps=3"), workshop.train("other", "steps=3", "seed=1")
    assert same_bits(parameters_of(again, 3), parameters_of(base, 3))
    assert without_clocks(metrics(again)) == without_clocks(metrics(base))
    assert read_lines(again / "evaluations.jsonl") == read_lines(base / "evaluations.jsonl")
    for file in sorted((base / "groups").iterdir()):
        assert (again / "groups" / file.name).read_bytes() == file.read_bytes()
    assert not same_bits(parameters_of(other, 3), parameters_of(base, 3))
    assert groups(other, 1) != groups(base, 1)


def test_training_moves_every_parameter(workshop, base):
    initial = by_path(huggingface.load(workshop.model, architecture_of(workshop.model), trainer()))
    final = parameters_of(base, 3)
    for name in initial:
        assert not np.array_equal(initial[name], final[name])
    for value in final.values():
        assert np.isfinite(value).all()


@pytest.mark.slow
def test_several_updates_a_step(workshop):
    run = workshop.train(
        "several",
        "algorithm.num_epochs=2",
        "algorithm.num_minibatches=2",
        "checkpoint_period=1",
        "optimizer.lr=3e-3",
    )
    for row in metrics(run):
        assert row["update/count"] == 4 and row["version"] == row["step"]
        # the first update's is 1, the later ones have moved
        assert 0 < abs(row["ratio/mean"] - 1) < 1
        assert row["clip/fraction"] == pytest.approx(row["clip/low"] + row["clip/high"], abs=1e-6)
        assert 0 <= row["clip/fraction"] <= 1
        # before the updates
        assert row["sampler_gap/logprob_max"] < 2e-5 and abs(row["sampler_gap/ess"] - 1) < 1e-6
    assert metrics(run)[0]["clip/fraction"] > 0  # a learning rate as large as this one clips
    assert abs(metrics(run)[0]["ratio/mean"] - 1) > 1e-3
    for group in groups(run, 1):
        teaches = len({completion["reward"] for completion in group["completions"]}) > 1
        for completion in group["completions"]:
            assert ("trainer_logprobs" in completion) == teaches
            ours = completion.get("trainer_logprobs", completion["logprobs"])
            assert max(abs(a - b) for a, b in zip(ours, completion["logprobs"], strict=True)) < 2e-5
    assert checkpoints(run) == [1, 2]


@pytest.mark.slow
def test_gspo_and_a_reference(workshop, capsys):
    run = workshop.train("leash", "algorithm.loss=gspo-token", "algorithm.kl_coef=0.1", "steps=3")
    assert "practically never clips" in capsys.readouterr().out
    divergence = [row["kl"] for row in metrics(run)]
    assert divergence[0] == pytest.approx(0, abs=1e-9)
    assert min(divergence[1:]) > 1e-4
    # with a reference no group stays out
    for step in (1, 2, 3):
        for group in groups(run, step):
            for c in group["completions"]:
                assert "trainer_logprobs" in c


@pytest.mark.slow
def test_the_epochs_of_a_small_data_set_go_round(workshop):
    from tiny_runs import write_data

    data = write_data(workshop.folder / "small", count=3)
    run = workshop.train(
        "round", f"task.path={data}", "optimizer.lr=0", "steps=3", "train.pass_k=0"
    )
    rows = []
    for step in (1, 2, 3):
        rows.append([group["row"] for group in groups(run, step)])
    assert all(len(set(step)) == 2 for step in rows) and {row for step in rows for row in step} == {
        0,
        1,
        2,
    }


@pytest.mark.slow
def test_eight_devices_train_as_one(workshop, base):
    run = workshop.train("eight", "mesh.fsdp=4", "mesh.tensor=2", "steps=1", "train.pass_k=0")
    one, eight = metrics(base)[0], metrics(run)[0]
    assert [[c["token_ids"] for c in g["completions"]] for g in groups(run, 1)] == [
        [c["token_ids"] for c in g["completions"]] for g in groups(base, 1)
    ]
    assert eight["reward/mean"] == one["reward/mean"]
    assert eight["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert eight["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert eight["sampler_gap/logprob_max"] < 2e-5
    before, after = read_lines(run / "evaluations.jsonl")
    assert (
        before["mean_reward"] == read_lines(base / "evaluations.jsonl")[0]["mean_reward"]
        and after["step"] == 1
    )
    for name, value in parameters_of(base, 1).items():
        np.testing.assert_allclose(parameters_of(run, 1)[name], value, atol=5e-3)


# ---- rewards of one's own, and Python


@pytest.mark.slow
def test_from_python_with_a_function(workshop):
    seen = []

    def length(completions, answer, trainer_state, log_metric, **kwargs):
        log_metric("words", 2.0)
        seen.append(
            (trainer_state.global_step, trainer_state.max_steps, len(completions), answer[0])
        )
        return [len(completion[0]["content"]) for completion in completions]

    common = {
        "model": {"path": str(workshop.model), "template": PLAIN},
        "task": "gsm8k",
        "reward": length,
        "reward__workers": 0,
        "task__path": str(workshop.data),
        "sampling": {"max_prompt_tokens": 64, "max_completion_tokens": 12},
    }
    summary = shoal.train(
        **common,
        steps=1,
        base_output_directory=str(workshop.runs),
        run_name="python",
        train={"pass_k": 4},
        batch={"prompts_per_step": 2, "group_size": 4},
        algorithm__kl_coef=0,
        **{"optimizer.warmup_steps": 0},
    )
    run = Path(summary["run_folder"])
    assert run == workshop.runs / "python" and summary == json.loads(
        (run / "summary.json").read_text()
    )
    known, *seen = (
        # first the known answers, then a call a group: greedy ones of evaluations, sampled ones
        seen
    )
    assert known[:2] == (0, 1)
    assert {(step, total, count) for step, total, count, _ in seen} == {
        (0, 1, 1),
        (0, 1, 4),
        (1, 1, 1),
        (1, 1, 4),
    }
    assert seen[0][3] == "68" and metrics(run)[0]["rewards/length"] > 0
    assert metrics(run)[0]["rewards/logged/words"] == 2.0
    figures = shoal.evaluate(**common, batch=8, pass_k=0)
    assert figures["held_out"]["mean_reward"] == summary["before"]["held_out"]["mean_reward"]
    with pytest.raises(shoal.ShoalError, match="did you mean steps"):
        shoal.train(stepz=1)


@pytest.mark.slow
def test_several_rewards_with_weights(workshop):
    run = workshop.train(
        "weighted",
        f"reward={workshop.rewards}:letters,{workshop.rewards}:vowels",
        "reward.weights=2,-0.5",
        "steps=1",
    )
    row = metrics(run)[0]
    assert row["reward/mean"] == pytest.approx(
        2 * row["rewards/letters"] - 0.5 * row["rewards/vowels"]
    )
    for group in groups(run, 1):
        for completion in group["completions"]:
            parts = completion["components"]
            assert completion["reward"] == pytest.approx(
                2 * parts["letters"] - 0.5 * parts["vowels"]
            )


@pytest.mark.slow
def test_evaluations_of_several_sampled_answers(workshop):
    sampled = ("evaluation.samples=2", "evaluation.temperature=0.7", "evaluation.top_k=5")
    run = workshop.train(
        "sampled", *sampled, "train.pass_k=0", "train.evaluate_every=1", "train.quick_questions=1"
    )
    lines = read_lines(run / "evaluations.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["protocol"] == "mean of 2 completions a question at temperature 0.7, top_k 5"
        assert line["pass@2"] >= line["pass@1"] == line["accuracy"]
        assert "maj@2" in line and "sampled_protocol" not in line
    file = run / "groups" / groups_file(Purpose.EVALUATE, "held_out", 2)
    stored = [entry.group for entry in read_file(file)]
    assert {group.size for group in stored} == {2} and len(stored) == lines[2]["num_questions"]
    rewards = [reward for group in stored for reward in group.rewards]
    assert lines[2]["mean_reward"] == pytest.approx(np.mean(rewards))
    # `shoal eval` answers as the run did.
    figures = shoal.evaluate(model=str(run), batch=8)["held_out"]
    assert figures["protocol"] == lines[0]["protocol"] and "pass@2" in figures


@pytest.mark.slow
def test_a_reward_that_never_judges_teaches_nothing_and_says_so(workshop, capsys):
    run = workshop.train(
        "silent",
        f"reward={workshop.rewards}:silent",
        "optimizer.weight_decay=0",
        "reward.max_failed_share=1",
    )
    assert "groups/unscorable" in capsys.readouterr().out
    for row in metrics(run):
        assert (
            row["groups/unscorable"] == 2
            and row["groups/nonzero_std"] == 0
            and row["grad_norm"] == 0
        )
    initial = by_path(huggingface.load(workshop.model, architecture_of(workshop.model), trainer()))
    assert same_bits(parameters_of(run, 2), initial)
    assert read_lines(run / "evaluations.jsonl")[0]["mean_reward"] is None


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2])
def test_pass_at_small_k_is_apart_from_the_greedy_answers(workshop, k):
    figures = shoal.evaluate(
        model={"path": str(workshop.model), "template": PLAIN},
        task="gsm8k",
        task__path=str(workshop.data),
        batch=8,
        pass_k=k,
        sampling={"max_prompt_tokens": 64, "max_completion_tokens": 12},
    )["held_out"]
    assert figures["num_questions"] == 4 and figures[f"pass@{k}"] == 0
    completions = count(k, "completion")
    assert figures["sampled_protocol"] == f"{completions} a question at temperature 1"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            "raises",
            (
                "'raises' tried on known answers raised KeyError: 'no such thing'",
                ", right answer written as <reason",
                ". The function gave no right answer a score. Fix it before the run.",
            ),
        ),
        ("nan", ("'nan' tried on known answers returned nan", "or None to abstain")),
        (
            "too_few",
            ("'too_few' tried on known answers returned", "data row ", "for each completion"),
        ),
        (
            "text",
            (
                "'text' tried on known answers returned 'good'",
                ": expected a finite number, or None to abstain",
            ),
        ),
        ("number", ("'number' tried on known answers returned 1.0", "data row ", "30 were given")),
    ],
)
def test_a_reward_that_fails_is_named(workshop, capsys, function, words):
    for _ in range(2):  # before the run begins: the name can be used again
        assert (
            cli.main(workshop.words(f"failing-{function}", f"reward={workshop.rewards}:{function}"))
            == 2
        )
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: reward function") and all(word in line for word in words), (
            line
        )
        assert not (workshop.runs / f"failing-{function}" / "config.yaml").exists()


@pytest.mark.slow
def test_what_was_done_before_a_reward_failed_stays(workshop, base, capsys):
    words = workshop.words(
        "tired", f"reward={workshop.rewards}:raises_later", "steps=3", "checkpoint_period=1"
    )
    assert cli.main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "'raises_later' in step 2 raised ValueError: tired for data row " in line
    run = workshop.runs / "tired"
    assert [row["step"] for row in metrics(run)] == [1] and len(groups(run, 1)) == 2
    assert not (run / "summary.json").exists() and checkpoints(run) == [1]
    assert same_bits(parameters_of(run, 1), parameters_of(base, 1))
    assert len(read_lines(run / "evaluations.jsonl")) == 1


@pytest.mark.slow
def test_a_template_that_was_trained_with_stays_with_the_run(tmp_path: Path):
    """Evaluation and export of a run write messages as its training did."""
    from tiny_models import write_model_with_tokenizer

    from shoal.chat.tokenizer import Tokenizer
    from shoal.model.families import architecture_of
    from shoal.weights.source import ModelSource, copy_model_files

    write_model_with_tokenizer(tmp_path / "model", "qwen3", "chatml", 0)
    template = "{{ messages[0]['content'] }} ->"
    spec = ModelSource(tmp_path / "model", architecture_of(tmp_path / "model"), template=template)
    copy_model_files(spec, tmp_path / "run")
    again = Tokenizer.load(tmp_path / "run")
    messages = [{"role": "user", "content": "hello"}]
    assert (
        again.render(messages) == "hello ->" != Tokenizer.load(tmp_path / "model").render(messages)
    )


@pytest.mark.slow
def test_a_publication_in_another_type_compiles_once():
    import jax
    import jax.numpy as jnp
    from small import QWEN3, random_parameters, roles

    from shoal.job.compilations import CompilationCounter
    from shoal.model.transformer import Model
    from shoal.weights.sampler_copy import publish_to

    model, parameters = Model(QWEN3, roles().sampler, jnp.bfloat16), random_parameters(QWEN3)
    first = publish_to(model, parameters)
    counter = CompilationCounter()
    again = publish_to(model, parameters)
    assert counter.read() == 0 and again.final_norm.dtype == jnp.bfloat16
    assert publish_to(Model(QWEN3, roles().sampler), parameters) is parameters
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        assert (a == b).all()


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, "tensorfloat32"])
def test_what_was_set_for_all_of_jax_stays_as_it_was(workshop, before):
    """A second run in the process, of another type, multiplies as it would alone."""
    key = "jax_default_matmul_precision"
    kept = jax.config.values[key]
    try:
        jax.config.update(key, before)
        generate(workshop, prompts=PROMPTS[:1])
        assert jax.config.values[key] == before
        assert cli.main(workshop.words("precise", "steps=1", "train.evaluate_every=-1")) == 0
        assert jax.config.values[key] == before
    finally:
        jax.config.update(key, kept)


def test_a_long_compilation_gives_freed_memory_back(monkeypatch):
    """On a CPU what a compiler has freed would come on top of what updates take. Short ones leave
    little."""
    returned: list[float] = []
    monkeypatch.setattr(compilations, "return_freed_memory", lambda: returned.append(1))
    compilations._listen(compilations._COMPILATION_EVENT, 0.1)
    compilations._listen("/jax/core/compile/jaxpr_trace_duration", 9.0)
    compilations._listen(compilations._COMPILATION_EVENT, 9.0)
    assert returned == [1]
    monkeypatch.undo()
    return_freed_memory()  # whatever the allocator is
