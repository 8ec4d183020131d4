"""The head of a run, and a dry run: both say what the doctor would say, before weights are read."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_model
from tiny_runs import Workshop

from shoal import cli
from shoal.budget import auto
from shoal.budget.auto import run_roles
from shoal.budget.memory import AvailableMemory, parameter_count
from shoal.commands import doctor as doctor_module
from shoal.config.derived import for_devices, price_per_hour, price_text, staleness_text
from shoal.config.merge import compose
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import LoraSection, ModelSection
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.job import memory as memory_module
from shoal.job.head import data_lines, model_text, print_head
from shoal.job.job import Job
from shoal.mesh import available_devices, make_roles
from shoal.model.transformer import Model
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.tasks.task import DataReport, Task, load_by_name
from shoal.trainer.loss import make_objective
from shoal.weights.source import open_run_model, resolve_model


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"), num_hidden_layers=1)


def head_of(workshop: Workshop, *changes: str) -> list[str]:
    """The lines at the start of a run, as far as they need no weights."""
    config, _ = compose("train", workshop.words("head", "reward.workers=0", *changes)[1:])
    out = io.StringIO()
    with Job(config, Console(out)) as job:
        job.check()
        print_head(job)
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("platform", "given", "expected"),
    [("cpu", 0, 2048), ("tpu", 0, 4096), ("gpu", 0, 4096), ("cpu", 4096, 4096), ("tpu", 512, 512)],
)
def test_micro_tokens_follow_from_the_platform_unless_given(platform, given, expected):
    config, _ = compose("train", ["task=gsm8k", f"batch.micro_tokens={given}"])
    assert for_devices(config, 4, platform).batch == replace(config.batch, micro_tokens=expected)


def test_a_run_says_what_it_will_do_with_what(workshop):
    lines = dict(
        line.split(": ", 1)
        for line in head_of(workshop)
        if not line.startswith(("warning", "this step"))
    )
    assert lines["devices"].startswith("1 of 8 x cpu (cpu), JAX ")
    assert f"{workshop.model} (qwen3), " in lines["model"] and lines["model"].endswith(
        "parameters, float32"
    )
    assert lines["attention"] == "blocked"
    assert lines["evaluation"] == "4 held_out" and lines["prompts"] == (
        "11 to 12 tokens (held_out 11 to 12), each answered by at most 12 tokens"
    )
    assert lines["first prompt"].endswith("=") and lines["rewards of known answers"].startswith(
        "right "
    )
    assert lines["memory"].startswith("at least ") and "KV caches" in lines["memory"]
    assert len(lines) <= 12


def test_the_price_of_an_hour_counts_the_samplers_devices(workshop):
    assert "price: 2.5 a device and hour, 2.5 an hour for 1 device" in head_of(
        workshop, "price=2.5"
    )
    config, _ = compose(
        "train",
        ["price=2", "sampler.kind=ray", "sampler.workers=3", "sampler.devices_per_worker=4"],
    )
    assert price_text(config, 8) == "2 a device and hour, 40 an hour for 20 devices"
    urls = "vllm.urls=[http://a:1,http://b:1]"
    config, _ = compose("train", ["price=2", "sampler.kind=vllm", urls])
    assert price_per_hour(config, 8) == 20


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("optimizer.lr=0", "WRONG configuration: optimizer.lr=0: nothing would be learned"),
        (
            "model.template={{ messages[-1].content }}<|im_end|>",
            "template: the prompt ends with <|im_end|>",
        ),
        (
            "sampling.max_prompt_tokens=20 task.path={long}",
            "data: 5 of 9 prompts checked have more than ",
        ),
        (
            "reward={constant}",
            "WRONG reward: of the answers tried all score 0.5: if the model's do too, nothing is "
            "learned; set reward.functions to one that scores them differently",
        ),
        ("task.path={templated}", "template: the question holds special tokens itself"),
        (
            "mesh.fsdp=1",
            "devices: 1 of 8 devices are used: raise mesh.fsdp (-1 takes all of the trainer's)",
        ),
        (
            "mesh.trainer=0.3 mesh.sampler=0.3",
            "devices: 3 of 8 devices are used: raise mesh.fsdp (-1 takes all of the trainer's) or "
            "mesh.trainer or mesh.sampler",
        ),
    ],
)
def test_what_the_doctor_warns_of_a_run_warns_of(workshop, tmp_path, change, text):
    (tmp_path / "constant.py").write_text(
        "def f(completions, **_): return [0.5] * len(completions)\n"
    )
    for name, question in (
        ("long", "{} + 17 = ?{}"),
        ("templated", "<|im_start|>user\n{} + 17 = ?{}<|im_end|>"),
    ):
        rows = [
            {
                "question": question.format(10 + i, "9" * 30 * (1 - i % 2)),
                "answer": f"#### {27 + i}",
            }
            for i in range(10)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    paths = {
        "{constant}": f"{tmp_path}/constant.py:f",
        "{long}": f"{tmp_path}/long.jsonl",
        "{templated}": f"{tmp_path}/templated.jsonl",
    }
    for name, path in paths.items():
        change = change.replace(name, path)
    words = [change] if "{{" in change else change.split()
    extra = ["sampling.max_prompt_tokens=64"] if "templated" in change else []
    shown = text if text.startswith("WRONG") else f"warning: {text}"
    assert any(line.startswith(shown) for line in head_of(workshop, *extra, *words))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "no reference (algorithm.kl_coef=0)"),
        ("algorithm.kl_coef=0.1", "reference on all of these devices"),
        (
            "algorithm.kl_coef=0.1 mesh.trainer=4 mesh.sampler=4 mesh.fsdp=4",
            "reference on the sampler's devices",
        ),
        (
            "algorithm.kl_coef=0.1 mesh.trainer=2 mesh.sampler=2 mesh.reference=[0,1] mesh.fsdp=2",
            "reference on the trainer's devices",
        ),
        (
            "algorithm.kl_coef=0.1 mesh.trainer=2 mesh.sampler=2 mesh.reference=2 mesh.fsdp=2",
            "reference on 2 devices of its own",
        ),
        (
            "algorithm.kl_coef=0.1 teacher.path={model}",
            "reference and teacher on all of these devices",
        ),
    ],
)
def test_the_head_says_where_the_reference_is(workshop, words, text):
    lines = head_of(workshop, *words.replace("{model}", str(workshop.model)).split())
    [line] = [line for line in lines if line.startswith("devices: ")]
    assert line.endswith(f"; {text}")


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (["all-linear"], "(experts have none: name experts.gate_up_proj, experts.down_proj in "),
        (["q_proj", "experts.down_proj"], ""),
    ],
)
def test_the_head_says_what_of_a_model_with_experts_a_token_has(tmp_path, targets, text):
    folder = write_model(tmp_path, "qwen3_moe")
    section = ModelSection(path=str(folder), lora=LoraSection(rank=2, targets=tuple(targets)))
    source = resolve_model(section)
    role = make_roles(MeshSection()).trainer
    model = Model(source.architecture, role, np.dtype(np.float32))
    line = model_text(section, source, model)
    # two of four experts are idle, in two layers
    idle = 2 * 2 * 3 * 24 * source.architecture.hidden_size
    size = parameter_count(source.architecture.base)
    assert f"(qwen3_moe), {size:,} parameters, {size - idle:,} of them active per token, fl" in line
    assert ("experts have none" in line) == bool(text) and text in line
    other = ModelSection(path=str(write_model(tmp_path / "other", "qwen3")))
    source = resolve_model(other)
    line = model_text(other, source, replace(model, architecture=source.architecture))
    assert "active per token" not in line and "experts" not in line


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("torchrl", "TorchRL counts 8 dialog turns a batch, 16 in all, 2 updates of 8"),
        ("maxtext", "MaxText counts 8 sequences a step of at most 212 tokens: 1,696 tokens"),
        ("tunix", "Tunix counts 2 prompts a batch, 8 completions in mini-batches of 8"),
        ("trl", "in TRL's words: generation_batch_size=8, max_steps=2, each of 8 completions"),
        ("verl", "in verl's words: train_batch_size=2, ppo_mini_batch_size=1, 4 updates in all"),
    ],
)
def test_the_head_has_a_systems_own_sizes(workshop, recipe, text):
    words = ["algorithm.num_minibatches=2"] if recipe == "verl" else ["algorithm.num_minibatches=1"]
    assert text in head_of(workshop, f"recipe={recipe}", *words, "sampling.max_prompt_tokens=200")
    assert not any(" counts " in line or "in verl's words" in line for line in head_of(workshop))


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_the_folder_of_published_weights_must_have_its_parent(workshop, tmp_path, words, capsys):
    """A mount that is missing would be made on this machine's disk."""
    folder = tmp_path / "no" / "mount"
    assert (
        cli.main(
            workshop.words(
                "published",
                f"publish.folder={folder}",
                "publish.channel=files",
                "sampler.kind=ray",
                *words,
            )
        )
        == 2
    )
    assert (
        f"publish.folder={folder}: there is no folder {folder.parent}; make it"
        in capsys.readouterr().err
    )
    assert not folder.parent.exists()


def test_a_warning_of_the_head_ends_the_run_where_that_was_asked(workshop):
    with pytest.raises(
        ShoalError,
        match=r"before the first step by train.on_warning=stop: .*optimizer.lr=0: nothing",
    ):
        head_of(workshop, "train.on_warning=stop", "optimizer.lr=0")


def test_a_further_set_whose_prompts_are_all_too_long_is_left_out(workshop):
    out = io.StringIO()
    with Job(compose("train", workshop.words("head")[1:])[0], Console(out)) as job:
        known = job.loaded_task.evaluations
        [(main, examples)] = known.items()
        long = [replace(examples[0], prompt=[{"role": "user", "content": "9" * 100}])]
        job.opened["loaded_task"] = replace(job.loaded_task, evaluations={**known, "long": long})
        job.check()
        print_head(job)
        assert list(job.evaluation_sets) == [main]
    assert (
        "data: long is not evaluated: no prompt of long has at most 64 tokens: raise "
        in out.getvalue()
    )
    assert f"evaluation: {len(examples)} {main}\n" in out.getvalue()
    with Job(compose("train", workshop.words("head")[1:])[0], Console(io.StringIO())) as job:
        job.opened["loaded_task"] = replace(job.loaded_task, evaluations={"long": long})
        with pytest.raises(ShoalError, match="no prompt of long has at most 64 tokens: raise"):
            _ = job.evaluation_sets


@pytest.mark.slow
def test_a_job_that_cannot_fit_ends_before_weights_are_read(workshop, monkeypatch):
    monkeypatch.setattr(
        memory_module,
        "available_memory",
        lambda _: AvailableMemory(1 << 16, 1 << 16, "a small machine"),
    )
    with pytest.raises(
        ShoalError, match=r"not enough memory: .* of 0.1 MiB free \(a small machine\)"
    ):
        head_of(workshop)

    def available_memory(_):
        return AvailableMemory(1 << 40, 1 << 16, "a busy machine")

    monkeypatch.setattr(
        memory_module,
        "available_memory",
        available_memory,
    )
    assert any(line.startswith("WRONG memory: not enough memory") for line in head_of(workshop))


@pytest.mark.parametrize(
    ("report", "lines"),
    [
        (DataReport(), {"data": "gsm8k, 0 training prompts"}),
        (
            DataReport(
                {"a/train-0.parquet": 4000, "a/train-1.parquet": 3473},
                {"a/test.parquet": 1319},
                {"no number": 12},
            ),
            {
                "data": "trains on a/train-0.parquet and 1 more file (7,473 rows); holds out "
                "a/test.parquet (1,319 rows)",
                "training prompts": "0 of 7,473 rows; dropped: 12 (no number)",
            },
        ),
    ],
)
def test_files_are_named_with_their_rows(report, lines):
    assert data_lines(Task("gsm8k", [], {}, (), data=report)) == lines


def test_what_flags_of_other_systems_became_is_said():
    _, resolved = compose("train", ["--learning_rate=3e-6", "--num_generations=4", "task=gsm8k"])
    assert resolved.start_lines[-1] == (
        "set keys: learning_rate=3e-6 (optimizer.lr); num_generations=4 (batch.group_size)"
    )
    assert not any(
        "became" in line for line in compose("train", ["batch.group_size=4"])[1].start_lines
    )


def test_many_flags_are_a_short_block(capsys):
    differing = ["actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    idle = [
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.model.use_remove_padding=true",
    ]
    idle += ["actor_rollout_ref.actor.fsdp_config.param_offload=False"]
    setting_keys = ["data.train_batch_size=128", "data.max_prompt_length=64"]
    setting_keys += ["data.max_response_length=16", "actor_rollout_ref.actor.optim.lr=1e-6"]
    setting_keys += ["actor_rollout_ref.actor.entropy_coeff=0", "actor_rollout_ref.rollout.n=4"]
    setting_keys += ["actor_rollout_ref.rollout.temperature=0.5"]
    setting_keys += ["actor_rollout_ref.actor.grad_clip=0.5", "data.seed=3"]
    _, resolved = compose("train", [*setting_keys, *differing, *idle])
    places = "--dry-run and docs/flags-verl.md say"
    assert resolved.flag_lines == (
        f"{differing[0]} became algorithm.num_minibatches=2: 128 prompts a step, 64 an update",
        f"change nothing here ({places} why): {', '.join(idle)}",
        f"9 others set keys ({places} which)",
    )
    Console().block("flags of other systems:", resolved.flag_lines)
    printed = capsys.readouterr().out
    title, *lines = printed.splitlines()
    assert title == "flags of other systems:" and max(map(len, lines)) <= 100
    assert [line[:2].isspace() for line in lines] == [True] * len(lines)
    assert " ".join(printed.split()) == " ".join([title, *resolved.flag_lines])
    # one that alone changes nothing keeps its reason
    [line] = compose("train", idle[:1])[1].flag_lines
    assert line.startswith(f"{idle[0]} changes nothing here: the sampler is the model itself")


# ---- dry run


def dry_run(capsys, *words: str) -> tuple[int, str]:
    code = cli.main([*words, "--dry-run"])
    out, err = capsys.readouterr()
    return code, "".join(line for line in out.splitlines(True) if "warning:" in line) + err


def test_a_warning_names_the_flag_that_was_typed(capsys, workshop):
    for name, named in (
        ("ici_fsdp_parallelism", "(mesh.fsdp: --ici_fsdp_parallelism)"),
        ("ici_data_parallelism", "(in MaxText: mesh.fsdp is ici_fsdp_parallelism)"),
        ("mesh.data", "trainer's)"),
    ):
        _, said = dry_run(capsys, *workshop.words("idle", f"{name}=2"))
        assert named in said and "2 of 8 devices are used: raise mesh.fsdp (-1 takes" in said


@pytest.mark.slow
def test_a_dry_run_judges_the_size_of_a_group(capsys, tmp_path):
    code, text = dry_run(
        capsys, "train", "batch.group_size=1000000", f"base_output_directory={tmp_path}"
    )
    assert code == 2 and "not enough memory: " in text and "batch.group_size=" in text


def test_a_dry_run_shows_the_warnings_of_the_run(capsys, workshop, tmp_path):
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"<|im_start|>{i} + 1", "answer": f"#### {i + 1}"} for i in range(9)]
    data.write_text("\n".join(map(json.dumps, rows)))
    code, text = dry_run(
        capsys, *workshop.words("never", f"task.path={data}", "optimizer.warmup_steps=2")
    )
    assert code == 0 and not workshop.runs.exists()
    for part in (
        "# warning: configuration: optimizer.warmup_steps=2",
        "# warning: template: the question holds",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("sampling.temperature=0", "sampling.temperature=0"),
        ("batch.prompts_per_step=21", "20 prompts, fewer than batch.prompts_per_step=21"),
        ("sampling.max_prompt_tokens=5", "no prompt of held_out has at most 5 tokens"),
        ("base_output_directory={taken}", "is a file"),
    ],
)
def test_a_dry_run_refuses_what_the_data_does_not_allow(capsys, workshop, change, text):
    code, error = dry_run(
        capsys, *workshop.words("never", change.replace("{taken}", str(workshop.rewards)))
    )
    assert code == 2 and error.startswith("error: ") and text in error


def test_what_is_printed_is_kept(tmp_path: Path):
    out, log = io.StringIO(), tmp_path / "log.txt"
    for terminal in (False, True):
        console = Console(out, terminal=terminal)
        console.note("before there was a folder")
        console.keep_log(log)
        console.heading("training")
        console.warning("one\ud83d")
        console.table(("a", "b"), [("1", "2")])
    assert (
        log.read_text()
        == "before there was a folder\n== training\nwarning: one\\ud83d\na  b\n1  2\n" * 2
    )
    console.keep_log(tmp_path / "missing" / "log.txt")
    console.note("no run ends for a log that cannot be written")


@pytest.mark.slow
def test_the_run_its_dry_run_and_the_doctor_divide_the_sampler_alike(
    workshop, tmp_path, monkeypatch, capsys
):
    """On devices of so little memory that a replica needs more than one of them."""

    def device_memory(device):
        return 1

    monkeypatch.setattr(auto, "device_memory", device_memory)
    judged, judge = [], memory_module.judge_memory

    def judge_memory(budget, *rest):
        judged.append(budget.roles["sampler"].mesh.get("tensor", 1))
        return judge(budget, *rest)

    monkeypatch.setattr(memory_module, "judge_memory", judge_memory)
    monkeypatch.setattr(doctor_module, "judge_memory", judge_memory)

    def available_memory(devices):
        return AvailableMemory(1, 1, "a device")

    monkeypatch.setattr(doctor_module, "available_memory", available_memory)
    config, _ = compose("train", workshop.words("alike", "mesh.fsdp=4")[1:])
    a = open_run_model(config.model, None, None).architecture
    tensor = run_roles(config, a, available_devices()).sampler.tensor
    assert tensor > 1
    cli.main([*workshop.words("alike", "mesh.fsdp=4"), "--dry-run"])
    assert set(judged) == {tensor}
    judged.clear()
    cli.main(["doctor", *workshop.words("alike", "mesh.fsdp=4")[1:]])
    assert set(judged) == {tensor}
    note = f"mesh.sampler_tensor={tensor}: a replica of the sampler does not fit fewer devices"
    assert note in " ".join(head_of(workshop, "mesh.fsdp=4"))


VLLM = ["sampler.kind=vllm", "vllm.python=python"]


@pytest.mark.parametrize(
    ("words", "own", "said"),
    [
        ([], True, ""),
        (
            ["train.max_staleness=1"],
            False,
            "up to 1 version old, corrected by importance weights (algorithm.correction=",
        ),
        (
            ["train.weight_sync_interval=3", "algorithm.correction=none"],
            True,
            "up to 2 versions old, not corrected (algorithm.correction=none); the sampler "
            "continues while the trainer learns",
        ),
        (
            ["train.max_staleness=2", "train.versions=newest"],
            True,
            "takes new weights in the middle of completions",
        ),
        (
            ["train.max_staleness=2", "train.versions=newest"],
            False,
            "take turns, so with train.versions=newest none is that old",
        ),
        (
            VLLM,
            True,
            "by vLLM, whose numbers are not the trainer's and which samples other tokens when it "
            "is asked again; of the current weights, corrected by importance weights "
            "(algorithm.correction=tis)",
        ),
        (
            ["sampler.quantise=int8"],
            False,
            "by weights in int8, which are not quite the trainer's; of the current weights, "
            "corrected by importance weights (algorithm.correction=tis)",
        ),
        (
            ["sampler.quantise=fp8", "train.max_staleness=1"],
            True,
            "the sampler continues while the trainer learns",
        ),
    ],
)
def test_the_age_of_samples_and_its_correction_are_said(words, own, said):
    text = staleness_text(compose("train", words)[0], own)
    assert said in text and bool(said) == bool(text)


@pytest.mark.parametrize(
    ("words", "correction"),
    [
        ([], "none"),
        (VLLM, "tis"),
        (["train.max_staleness=1"], "tis"),
        (["train.weight_sync_interval=2"], "tis"),
        (["train.max_staleness=1", "algorithm.correction=none"], "none"),
        (["algorithm.correction=icepop"], "icepop"),
    ],
)
def test_samples_of_older_weights_are_corrected_unless_given_otherwise(words, correction):
    config = for_devices(compose("train", words)[0], 1, "cpu")
    assert config.algorithm.correction == correction
    assert (make_objective(config.algorithm).correction is None) == (correction == "none")


def test_prompts_that_are_dropped_because_that_was_asked_for_are_no_warning(workshop, tmp_path):
    rows = []
    for number in range(10):
        question = f"{10 + number} + 17 = ?" + "9" * 120 * (1 - number % 2)
        rows.append({"question": question, "answer": f"#### {27 + number}"})
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["sampling.max_prompt_tokens=64", f"task.path={tmp_path}/long.jsonl"]
    held_out = [f"task.eval_split={tmp_path}/held.jsonl"]
    (tmp_path / "held.jsonl").write_text((tmp_path / "long.jsonl").read_text().replace("+", "-"))
    own = "prompts checked have more than"
    of_held_out = "prompts of held_out have more than"
    asked_for = (["recipe=verl", "data.filter_overlong_prompts=True"],)
    asked_for += (["data.filter_overlong_prompts=True"], ["sampling.long_prompts=drop"])
    for asking in asked_for:
        asked = head_of(workshop, *asking, *words, *held_out)
        assert not any(own in line for line in asked)
        assert any(", of which those above 64 are dropped" in line for line in asked)
        [said] = [line for line in asked if of_held_out in line]
        assert said.startswith("5 of 10 prompts")  # no warning
    lines = head_of(workshop, *words, *held_out)
    [unasked] = [line for line in lines if own in line]
    assert unasked.startswith("warning") and "raise it" not in unasked
    [said] = [line for line in lines if of_held_out in line]
    assert said.startswith("warning")


def test_a_reward_is_tried_on_a_prompt_of_each_data_source(workshop, tmp_path):
    rows = []
    for number in range(40):
        source = {30: "letters", 20: "more"}.get(number, "sums")
        row = {"prompt": f"{number} + 1 =", "answer": f"{number + 1}", "data_source": source}
        rows.append(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "judge.py").write_text(
        "def only_sums(completions, answer, data_source, **kwargs):\n"
        "    scores = []\n"
        "    for text, gold, source in zip(completions, answer, data_source):\n"
        "        scores.append(float(source != 'letters' and text.endswith(gold)))\n"
        "    return scores\n"
    )
    own_data = ("task=custom", f"task.path={tmp_path}/rows.jsonl")
    lines = head_of(workshop, *own_data, f"reward={tmp_path}/judge.py:only_sums")
    [scores] = [line for line in lines if line.startswith("rewards of known answers: ")]
    assert "data_source sums, more: right 1, wrong 0, empty 0" in scores
    assert "data_source letters: right 0, wrong 0, empty 0" in scores
    [warning] = [line for line in lines if "of the answers tried" in line]
    assert "data_source letters: of the answers tried all score 0" in warning


def test_a_trial_trains_on_the_first_rows(workshop, tmp_path):
    def write(name: str, first: int, number: int) -> Path:
        rows = [json.dumps({"prompt": f"{n} + 1 =", "answer": f"{n + 1}"}) for n in range(number)]
        path = tmp_path / name
        path.write_text("\n".join(rows[first:]))
        return path

    training = write("train.jsonl", 5, 45)
    own_data = ("task=custom", f"task.path={training}", f"task.eval_split={write('v.jsonl', 0, 5)}")
    reward = f"reward={workshop.rewards}:letters"
    lines = head_of(workshop, *own_data, reward, "task.num_train_questions=8")
    assert "training prompts: 8 of 40 rows; dropped: 32 (task.num_train_questions=8)" in lines
    lines = head_of(workshop, *own_data, reward, "task.num_train_questions=40")
    assert "training prompts: 40 of 40 rows" in lines
    generated = load_by_name(TaskSection(name="words", num_train_questions=8), RewardSection())
    assert [example.row for example in generated.train] == list(range(8))


def test_a_split_to_evaluate_on_that_is_missing_is_named(workshop, tmp_path):
    rows = [json.dumps({"prompt": f"{n} + 1 =", "answer": f"{n + 1}"}) for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = ["task=custom", f"task.path={tmp_path}/rows.jsonl", "task.eval_split=validation"]
    words.append(f"reward={workshop.rewards}:letters")
    [note] = [
        line for line in head_of(workshop, *words) if "last 2 of 20 rows are held out" in line
    ]
    assert "rows.jsonl has no split 'validation' to evaluate on" in note
    with pytest.raises(ShoalError, match=r"task\.eval_split=validation: there is no such split"):
        head_of(workshop, *words, "task.hold_out=false")
