"""Bad input: exit code 2 and one line that says what to do; no traceback, and nothing left
behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import save_tensors
from tiny_runs import PLAIN, write_data

from shoal import cli
from shoal.files import write_text


def everything_in(folder: Path) -> dict[str, int]:
    result = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            result[str(file.relative_to(folder))] = file.stat().st_size
    return result


def refused(capsys, folder: Path, words: list[str], *parts: str) -> None:
    """The command fails as a mistake should, and `folder` is as it was."""
    before = everything_in(folder)
    folders = {path for path in folder.rglob("*") if path.is_dir()}
    capsys.readouterr()
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
    missing = [part for part in parts if part not in err]
    assert not missing, f"{missing} not in: {err}"
    assert (
        everything_in(folder) == before
        and {path for path in folder.rglob("*") if path.is_dir()} == folders
    )


# ---- keys and values


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            "batch.groupsize=4",
            ["batch.groupsize: there is no such key", "did you mean batch.group_size?"],
        ),
        ("learning_speed=1e-4", ["learning_speed: there is no such key"]),
        ("optimizer=3", ["optimizer", "section", "optimizer.lr"]),
        ("steps=many", ["steps='many'", "a whole number"]),
        ("steps=-1", ["steps=-1", "0 or more"]),
        ("optimizer.lr=fast", ["optimizer.lr='fast'", "a finite number"]),
        ("report.groups=perhaps", ["report.groups='perhaps'", "true or false"]),
        (
            "algorithm.loss=ppo",
            ["algorithm.loss='ppo'", "one of grpo, gspo, gspo-token, cispo, gmpo, sapo"],
        ),
        ("task=gsm8q", ["task.name='gsm8q'", "did you mean 'gsm8k'"]),
        ("batch.group_size=1", ["batch.group_size=1", "2 or more"]),
        (
            "algorithm.num_minibatches=3",
            ["algorithm.num_minibatches=3", "at most batch.prompts_per_step (2)"],
        ),
        ("sampling.slots_per_device=3", ["sampling.slots_per_device=3", "batch.group_size=4"]),
        ("sampling.memory_share=1.5", ["sampling.memory_share", "a number in (0, 1]"]),
        (
            "sampling.slots_per_device=7 train.pass_k=8",
            ["sampling.slots_per_device=7", "train.pass_k=8"],
        ),
        ("algorithm.advantage=none", ["algorithm.advantage=none", "set teacher.path"]),
        ("algorithm.advantage=ppo2", ["'ppo2'", "one of grpo, dr_grpo", "or `file.py:function`"]),
        (
            "algorithm.advantage=nowhere.py:f",
            ["advantage function 'nowhere.py:f': there is no file nowhere.py"],
        ),
        (
            "algorithm.advantage=nowhere.py:f algorithm.credit=state",
            ["algorithm.advantage='nowhere.py:f'", "grpo or dr_grpo or rloo with algorithm.credit"],
        ),
        ("algorithm.context_coef=-1", ["algorithm.context_coef=-1", "0 or more"]),
        ("reward.overlong_buffer_tokens=13", ["reward.overlong_buffer_tokens=13", "(12)"]),
        (
            "batch.prompts_per_device=2 algorithm.num_minibatches=3",
            ["gives 2 prompts a step", "num_minibatches=3"],
        ),
        ("teacher.path=nowhere", ["nowhere"]),
        ("teacher.beta=1.5", ["teacher.beta=1.5", "from 0 to 1"]),
        ("teacher.beta=0.5", ["teacher.beta=0.5", "teacher.divergence=full"]),
        ("teacher.top_k=0", ["teacher.top_k=0", "1 or more"]),
        ("teacher.path=a=./x,a=./y", ["teacher.path='a=./x,a=./y'", "a name for each teacher"]),
        ("teacher.path=a=nowhere,b=tiny", ["teacher.path=nowhere", "no model folder"]),
        ("teacher.quantise=int8", ["teacher.quantise='int8'", "weights of its own"]),
        ("teacher.weights=live", ["teacher.weights='live'", "teacher.hint without another"]),
        ("teacher.address=localhost", ["teacher.address='localhost'", "http://HOST:PORT"]),
        ("teacher.address=a=http://b,a=http://c", ["a name for each teacher"]),
        (
            "teacher.address=http://b teacher.path=tiny",
            ["teacher.address", "empty with teacher.path"],
        ),
        (
            "teacher.address=http://b teacher.divergence=full",
            ["teacher.divergence='full'", "sampled or topk with teacher.address"],
        ),
        (
            "teacher.address=http://b sampling.temperature=0.7",
            ["sampling.temperature=0.7", "1 with teacher.address"],
        ),
        (
            "teacher.address=http://b sampling.top_p=0.9",
            ["teacher.divergence='sampled'", "topk with teacher.address and sampling.top_k"],
        ),
        ("teacher.hint=briefly", ["teacher.hint='briefly' names no column", "in braces"]),
        (
            "train.weight_sync_interval=3 train.max_staleness=1",
            ["train.max_staleness=1", "2 or more"],
        ),
        ("sampling.temperature=0", ["sampling.temperature=0", "set it to 1.0"]),
        ("sampling.top_p=0", ["sampling.top_p=0", "a number in (0, 1]"]),
        ("mesh.fsdp=9", ["mesh.fsdp=9 does not divide 8 devices", "use 1, 2, 4 or 8"]),
        (
            "mesh.fsdp=8 mesh.trainer=0.5",
            ["mesh.fsdp=8 does not divide 4 devices", "has 4 of 8 devices by mesh.tr"],
        ),
        (
            "mesh.data=2 mesh.tensor=8",
            ["mesh.tensor=8 does not divide the 4 of 8 devices", "use 1, 2 or 4"],
        ),
        ("checkpoint.keep_last=-1", ["checkpoint.keep_last=-1", "0 (all) or more"]),
        (
            "tags=good,",
            ["tags=['good', '']: the tag '' is not a single word", "tags=baseline,warm-up"],
        ),
        (
            "sampling.max_prompt_tokens=5",
            ["no prompt of held_out has at most 5 tokens", "max_prompt_tokens to 12, its"],
        ),
        (
            "batch.prompts_per_step=21",
            ["20 prompts, fewer than batch.prompts_per_step=21", "lower it"],
        ),
        (
            "sampling.long_prompts=error sampling.max_prompt_tokens=5",
            ["of row 0 has 11 tokens", "long_prompts=drop"],
        ),
        ("model.template={{", ["chat template is not valid Jinja"]),
        (
            "model.template=missing.jinja",
            ["model.template='missing.jinja'", "neither a file nor a Jinja template"],
        ),
        ("reward=missing.py:f", ["'missing.py:f'", "no file missing.py"]),
        ("reward={rewards}:leters", ["defines no 'leters'", "did you mean letters"]),
        ("reward={rewards}", ["expected `file.py:function`"]),
        ("reward.weights=1,2", ["reward.weights", "1 number,"]),
        ("reward=missing.py:f reward.weights=1,2", ["no file missing.py"]),
        ("run_name=../out", ["run_name='../out'", "without '..'"]),
        (
            "base_output_directory={rewards}/below",
            ["base_output_directory=", "cannot be written", "is a file"],
        ),
        ("base_output_directory=gs:/bucket/out", ["one slash too few", "give gs://bucket/out"]),
        ("model=zz://bucket/model", ["model.path=zz://bucket/model", "or a local folder"]),
        ("nonsense.yml", ["nonsense.yml"]),
    ],
)
def test_keys_and_values(workshop, capsys, change, parts):
    words = workshop.words(
        "never",
        *change.format(rewards=workshop.rewards).split() if "{{" not in change else [change],
    )
    if change.endswith(".yml"):
        words = ["train", change]
    refused(capsys, workshop.folder, words, *parts)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["teacher.hint={"], ["teacher.hint: '{' stands alone", "literal braces"]),
        (["teacher.hint={prompt} {worked}"], ["teacher.hint names 'worked'", "not a column"]),
        (
            ["teacher.hint={answer} it is", "teacher.hint_tokens=1"],
            ["teacher.hint makes its prompt longer by", "teacher.hint_tokens is 1: raise it"],
        ),
        (
            ["teacher.hint={answer}", "environment.agent=x.py"],
            ["teacher.hint='{answer}'", "empty with environment.factory, rollout, agent"],
        ),
    ],
)
def test_hints(workshop, capsys, words, parts):
    refused(capsys, workshop.folder, workshop.words("never", *words), *parts)


def test_a_run_folder_that_exists(workshop, capsys):
    taken = workshop.runs / "taken"
    taken.mkdir(parents=True)
    (taken / "precious.txt").write_text("mine")
    refused(
        capsys,
        workshop.folder,
        workshop.words("taken"),
        "holds something that is not a run (precious.txt",
        "choose another run_name",
    )
    assert (taken / "precious.txt").read_text() == "mine"


# ---- models


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        named = dict(load_file(file))
        change(named)
        save_tensors(file, named)

    return spoil


def config(**changes: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (shutil.rmtree, ["no model folder", "Give a folder, a hub id (org/name), or `tiny`"]),
        (without("config.json"), ["holds no config.json", "Hugging Face format"]),
        (
            lambda folder: (folder / "config.json").write_text("{"),
            ["config.json could not be read as JSON"],
        ),
        (
            config(model_type="mamba"),
            ["model_type is 'mamba'", "supported are llama, qwen2, qwen3"],
        ),
        (
            config(num_key_value_heads=3),
            ["num_attention_heads=4 is not a multiple of num_key_value_heads=3"],
        ),
        (without("model.safetensors"), ["holds no safetensors file"]),
        (truncate, ["model.safetensors is not a complete safetensors file", "Download it again"]),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"x"),
            ["is not a complete safetensors file"],
        ),
        (tensors(lambda named: named.pop(DOWN)), [f"missing: {DOWN}"]),
        (tensors(lambda named: named.update(extra=np.zeros(2, np.float32))), ["left over: extra"]),
        (
            tensors(lambda named: named.update({DOWN: np.zeros((3, 2), np.float32)})),
            [f"{DOWN} [3, 2] instead of [32, 48]"],
        ),
        (
            tensors(lambda named: named.update({DOWN: np.zeros((32, 48), np.int32)})),
            [f"{DOWN} stored as I32"],
        ),
        (
            without("tokenizer.json"),
            ["holds no tokenizer.json", "save the tokenizer with transformers"],
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{}"),
            ["tokenizer.json is not a valid tokenizer"],
        ),
        (config(vocab_size=100), ["the tokenizer and the weights belong to different models"]),
    ],
    ids=[
        "missing",
        "no config",
        "broken config",
        "unknown architecture",
        "odd heads",
        "no weights",
        "truncated",
        "not safetensors",
        "missing tensor",
        "left-over tensor",
        "misshapen tensor",
        "type of tensor",
        "no tokenizer",
        "broken tokenizer",
        "another's tokenizer",
    ],
)
def test_models(workshop, capsys, tmp_path, spoil, parts):
    model = tmp_path / "model"
    shutil.copytree(workshop.model, model)
    spoil(model)
    refused(capsys, workshop.folder, workshop.words("never", f"model={model}"), *parts)


def test_a_run_without_a_checkpoint_and_a_broken_one(workshop, capsys, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(workshop.model, run / "model")
    (run / "checkpoints").mkdir()
    words = ["export", f"from={run}", f"to={tmp_path / 'to'}"]
    refused(capsys, tmp_path, words, "has no checkpoint: wait for its first one")
    (run / "checkpoints" / "7").mkdir()
    refused(capsys, tmp_path, words, "checkpoints/7 cannot be read", "choose another")
    refused(
        capsys,
        tmp_path,
        ["eval", f"model={run / 'checkpoints' / '8'}"],
        "no model folder",
        "checkpoints holds 7.",
    )


def test_no_model_is_never_the_working_folder(capsys, tmp_path, monkeypatch):
    """In a folder with `checkpoints/`, as verl writes them, an empty path is no run."""
    (tmp_path / "checkpoints" / "project" / "experiment").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for words in (
        ["train", "model=", "steps=1"],
        ["train", "model=", "steps=1", "--dry-run"],
        ["eval", "model=", "task=words"],
        ["eval", "model=", "task=words", "--dry-run"],
        ["serve", "model="],
        ["plan", "model="],
    ):
        refused(capsys, tmp_path, words, "model.path: no model is given")
    # Only a path that is written can name the working folder.
    refused(capsys, tmp_path, ["train", "model=."], f"the run {tmp_path} has no checkpoint")
    refused(capsys, tmp_path, ["train", "reward=model:"], "A model's path is empty")


# ---- data


def fourth_question(**row: object) -> Callable[[Path], object]:
    def spoil(data: Path) -> None:
        lines = data.read_text().splitlines()
        lines[3] = json.dumps(row)
        data.write_text("\n".join(lines))

    return spoil


def keep(count: int) -> Callable[[Path], object]:
    return lambda data: data.write_text("\n".join(data.read_text().splitlines()[:count]))


LONG = {"question": "9" * 80, "answer": "#### 1"}


@pytest.mark.parametrize(
    ("spoil", "changes", "parts"),
    [
        (Path.unlink, [], ["task.path=", "there is no such file or folder"]),
        (
            lambda data: data.write_text(""),
            [],
            ["gsm8k_train.jsonl is empty", "`question` and `answer` are needed"],
        ),
        (
            fourth_question(question="?"),
            [],
            ["line 4 has no column 'answer'", "its columns: question"],
        ),
        (
            fourth_question(prompt="?", answer="#### 1"),
            [],
            ["line 4 has no column 'question'", "prompt, answer"],
        ),
        (
            fourth_question(question=4, answer="#### 1"),
            [],
            ["line 4: 'question' is a int; text is needed"],
        ),
        (
            lambda data: data.write_text('{"question": "a"'),
            [],
            ["line 1 is not a JSON object", "one object per line"],
        ),
        (lambda data: data.write_bytes(b"\xff\xfe"), [], ["is not UTF-8 text"]),
        (
            lambda data: data.write_text('{"question": "a", "answer": "five"}\n'),
            [],
            ["ends in `#### <number>`"],
        ),
        (keep(1), [], ["the data has 1 prompt, fewer than batch.prompts_per_step=2"]),
        (
            fourth_question(**LONG),
            ["sampling.long_prompts=error", "steps=10"],
            [
                "the prompt of row 3 has 81 tokens, sampling.max_prompt_tokens is 64",
                "sampling.long_prompts=drop",
            ],
        ),
        (
            lambda data: data.write_text(
                "\n".join(json.dumps({**LONG, "question": f"{'9' * 80}{i}"}) for i in range(9))
            ),
            [],
            [
                "fewer than 2 prompts of the data have at most 64 tokens",
                "raise sampling.max_prompt_tokens",
            ],
        ),
    ],
    ids=[
        "missing",
        "empty",
        "no answer",
        "no question",
        "not text",
        "broken line",
        "not UTF-8",
        "no gold",
        "too few",
        "one too long",
        "all too long",
    ],
)
def test_data(workshop, capsys, tmp_path, spoil, changes, parts):
    data = write_data(tmp_path / "data")
    spoil(data)
    refused(capsys, workshop.folder, workshop.words("never", f"task.path={data}", *changes), *parts)


# ---- generate, export, eval


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, ["there is no such file"]),
        ("", ["holds no prompt"]),
        ("\n\n", ["holds no prompt"]),
        ('{"prompt": "a"}\n{"prompt": "a"', ["line 2 is not a JSON object"]),
        ('{"prompt": "a"}\n\n{"text": "a"}', ["line 3 has no `prompt`", "rename the column"]),
        ('["a"]', ["row 0 is a str", "expected a dict with `prompt`"]),
        ('{"prompt": 5}', ["line 1: `prompt` is a int", "text, or messages"]),
        ('{"prompt": []}', ["line 1: `prompt` is an empty list"]),
        ('{"prompt": ["a"]}', ["line 1: message 0 of `prompt` is 'a'"]),
        ('{"prompt": ""}', ["line 1: `prompt` is an empty str"]),
        ('{"prompt": [{"role": "user"}]}', ["line 1: message 0 of `prompt`", "role and content"]),
        (
            '{"prompt": [{"role": "user", "content": "a"}]}',
            ["the prompt of row 0: The chat template refused"],
        ),
        (
            '{"prompt": "' + "9" * 65 + '"}',
            ["no prompt of in.jsonl has at most 64 tokens", "raise sampling.max_prompt_tokens"],
        ),
    ],
)
def test_prompts_to_generate_from(workshop, capsys, tmp_path, text, parts):
    prompts = tmp_path / "in.jsonl"
    if text is not None:
        prompts.write_text(text)
    words = [
        "generate",
        f"model={workshop.model}",
        f"prompts={prompts}",
        f"output={tmp_path / 'out.jsonl'}",
        "max_prompt_tokens=64",
        "model.template={{ messages[0].role }}{{ raise_exception('empty') }}",
    ]
    refused(capsys, tmp_path, words if "role" in (text or "") else words[:-1], *parts)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("generate output=a", ["prompts is not given: write prompts=..."]),
        ("generate prompts=a", ["output is not given: write output=..."]),
        (
            "generate prompts={in} output={in}/below",
            ["output={in}/below cannot be written", "is a file", "another place"],
        ),
        (
            "generate prompts={in} output={folder}",
            ["output={folder} is a folder", "give the name of a file"],
        ),
        (
            "generate prompts={in} output={out} num_generations=0",
            ["num_generations=0", "1 or more"],
        ),
        ("generate prompts={in} output={out} num_generations=9 batch=8", ["batch=8", "9 or more"]),
        ("generate prompts={in} output={out} model={folder}/none", ["no model folder"]),
        ("export to=a", ["from is not given: write from=..."]),
        ("export from={model}", ["to is not given: write to=..."]),
        (
            "export from={model} to={folder}",
            ["to={folder} exists and is not empty", "choose another folder"],
        ),
        ("export from={model} to={in}", ["to={in} exists"]),
        ("export from={model} to={in}/below", ["to={in}/below cannot be written", "is a file"]),
        ("export from={folder}/none to={folder}/to", ["no model folder"]),
        ("export from={folder} to={folder}/to", ["holds no config.json"]),
        (
            "export from=zz://bucket/run to={folder}/to",
            ["from=zz://bucket/run: zz:// is not known"],
        ),
        ("export from={model} to=zz://bucket/to", ["to=zz://bucket/to: zz:// is not known"]),
        (
            "export from={model} to=~no-such-user/to",
            ["to=~no-such-user/to: no home folder is known for that user"],
        ),
        (
            "convert from=zz://bucket/model to={folder}/to",
            ["from=zz://bucket/model: zz:// is not known"],
        ),
        (
            "convert from={model} base_output_directory={folder} run_name=../out",
            ["run_name='../out'", "without '..'"],
        ),
        (
            "convert from={model} to={folder}/to model_name=llama-3.1-8b",
            ["did you mean llama3.1-8b?"],
        ),
        (
            "generate prompts=zz://bucket/in output={out}",
            ["prompts=zz://bucket/in: zz:// is not known"],
        ),
        (
            "eval model={model} model.tokenizer=zz://bucket/t",
            ["model.tokenizer=zz://bucket/t: zz:// is not known"],
        ),
        (
            "eval model={model} output=zz://bucket/out",
            ["output=zz://bucket/out: zz:// is not known"],
        ),
        ("eval model={model} output={in}/below", ["output={in}/below cannot be written"]),
        ("eval model={model} pass_k=9 batch=8", ["batch=8", "9 or more"]),
        (f"eval model=./{'long' * 64}", ["model.path='./longlong", "more than 255 bytes"]),
        ("eval model={model} pass_k=-2", ["pass_k=-2", "-1 (auto) or more"]),
    ],
)
def test_other_commands(workshop, capsys, tmp_path, words, parts):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n')
    names = {
        "in": str(file),
        "folder": str(tmp_path),
        "out": str(tmp_path / "out.jsonl"),
        "model": str(workshop.model),
    }
    for name, value in names.items():
        words = words.replace(f"{{{name}}}", value)
        parts = [part.replace(f"{{{name}}}", value) for part in parts]
    refused(capsys, tmp_path, words.split(), *parts)


def test_a_template_given_as_text_is_no_mistake(workshop):
    """The words that the tables above change are right when nothing is changed."""
    from shoal.config.merge import compose

    config, _ = compose("train", workshop.words("never")[1:])
    assert config.model.template == PLAIN and config.batch.group_size == 4


def test_a_device_is_written_to_as_it_is(tmp_path):
    """Replaced by the finished file, /dev/null would be gone for the whole machine."""
    place, file = tmp_path / "null", tmp_path / "file"
    place.symlink_to("/dev/null")
    for path in (place, file):
        write_text(path, "text")
    assert place.is_symlink() and place.read_text() == "" and file.read_text() == "text"
