"""Reward models: the numbers of transformers, in a run, its evaluations and `rescore`, and what is
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_models import CHATML, FAMILIES, save_tensors, tensors, write_tokenizer
from tiny_runs import Workshop, groups, metrics

from shoal import cli
from shoal.budget.memory import weight_bytes
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import ModelSection
from shoal.config.sections.sampling import SamplingSection
from shoal.job import reward_model
from shoal.job.reward_model import RewardModel
from shoal.mesh import make_roles
from shoal.records import ShoalError

QUESTION = [{"role": "user", "content": "2 + 3 = ?"}]
ANSWERS = ["5", "It is five, and so 5.", "", "It is four"]


def write_classifier(folder: Path, family: str = "llama2", labels: int = 1, **changes: Any) -> Path:
    """A reward model's folder as transformers writes it, without torch."""
    size = write_tokenizer(folder).get_vocab_size()
    name = FAMILIES[family]["architectures"][0].replace("CausalLM", "SequenceClassification")
    config = {
        **FAMILIES[family],
        "vocab_size": size,
        "architectures": [name],
        "pad_token_id": 0,
        "id2label": {str(i): f"LABEL_{i}" for i in range(labels)},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    named = {name: value for name, value in tensors(config).items() if name != "lm_head.weight"}
    head = (
        np.random.RandomState(1).standard_normal((labels, config["hidden_size"])).astype(np.float32)
    )
    save_tensors(folder / "model.safetensors", named | {"score.weight": head})
    return folder


def messages(texts: list[str]) -> list[Any]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("judge") / "judge")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
@pytest.mark.parametrize("pad", [True, False])
def test_scores_equal_transformers(tmp_path: Path, family: str, pad: bool) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    size = write_tokenizer(tmp_path / "m").get_vocab_size()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    name = FAMILIES[family]["architectures"][0].replace("ForCausalLM", "")
    config = getattr(transformers, f"{name}Config")(
        **{
            **{
                key: value
                for key, value in FAMILIES[family].items()
                if key not in ("architectures", "model_type")
            },
            "vocab_size": size,
            "num_labels": 1,
            "pad_token_id": tokenizer.pad_token_id if pad else None,
        }
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(3.0).add_(0.1 * torch.randn_like(value))
    model.eval().save_pretrained(tmp_path / "m")
    with torch.no_grad():
        wanted = []
        for text in ANSWERS:
            wanted.append(
                float(
                    model(
                        **tokenizer.apply_chat_template(
                            [*QUESTION, {"role": "assistant", "content": text}],
                            return_tensors="pt",
                            return_dict=True,
                        )
                    ).logits[0, 0]
                )
            )
        # ends with the pad token: the one before it counts
        plain = []
        for text in ("5", "5<|endoftext|>"):
            plain.append(
                float(model(**tokenizer(f"2 + 3 = {text}", return_tensors="pt")).logits[0, 0])
            )
    scorer = RewardModel(str(tmp_path / "m"))
    assert scorer([QUESTION] * 4, messages(ANSWERS)) == pytest.approx(wanted, abs=1e-4)
    assert scorer(["2 + 3 = "] * 2, ["5", "5<|endoftext|>"]) == pytest.approx(plain, abs=1e-4)
    assert np.std(wanted) > 0.01 and (plain[0] == pytest.approx(plain[1], abs=1e-5)) == pad


@pytest.mark.slow
def test_a_group_computes_its_prompt_once_and_a_score_depends_on_no_other(
    judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, pack = [], reward_model.split_into_micro_batches

    def split_into_micro_batches(given, shapes):
        return sizes.append(given) or pack(given, shapes)

    monkeypatch.setattr(reward_model, "split_into_micro_batches", split_into_micro_batches)
    scorer, other = RewardModel(str(judge)), [{"role": "user", "content": "Why?"}]
    together = scorer([QUESTION] * 4 + [other], messages([*ANSWERS, "5"]))
    (shared, ends), (_, alone) = sizes[0][0], sizes[1][0]
    whole = len(scorer.classifier.tokenizer.encode_answered(QUESTION, ANSWERS[0]))
    assert shared + ends[0] == whole and ends[0] < 6 < shared and list(alone) == [0]
    for answer, score in zip(ANSWERS, together, strict=False):
        assert scorer([QUESTION], messages([answer])) == pytest.approx([score], abs=1e-5)
    assert scorer([QUESTION] * 2, messages(["5", "5"])) == pytest.approx(
        [together[0]] * 2, abs=1e-5
    )


@pytest.mark.slow
def test_a_prompt_that_begins_the_answer_is_continued(judge: Path) -> None:
    scorer = RewardModel(str(judge))
    begun = [*QUESTION, {"role": "assistant", "content": "It is"}]
    assert scorer([begun], messages([" four"])) == pytest.approx(
        scorer([QUESTION], messages(["It is four"])), abs=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [MeshSection(fsdp=4), MeshSection(fsdp=2, tensor=2), MeshSection(context=2)]
)
def test_scores_are_the_same_on_several_devices(judge: Path, mesh: MeshSection) -> None:
    scorer = RewardModel(str(judge))
    scorer.prepare(
        ModelSection(), SamplingSection(max_prompt_tokens=100), lambda: make_roles(mesh).reference
    )
    scores = scorer([QUESTION] * 4, messages(ANSWERS))
    assert scores == pytest.approx(
        RewardModel(str(judge))([QUESTION] * 4, messages(ANSWERS)), abs=1e-4
    )
    assert len(scorer.loaded[1].final_norm.sharding.device_set) == 4 or mesh.context == 2


# ---- in a run


@pytest.mark.slow
def test_a_run_learns_from_it_resumes_exactly_and_is_scored_again(
    workshop: Workshop, judge: Path, capsys
) -> None:
    both = [
        f"reward=model:{judge},{workshop.rewards}:letters",
        "reward.weights=0.5,2",
        "mesh.trainer=1",
        "mesh.sampler=1",
        "mesh.reference=[2]",
        "sampling.max_prompt_tokens=100",
        "train.evaluate_every=-1",
    ]
    whole = workshop.train("judged", *both)
    group = groups(whole, 2)[0]["completions"]
    score, letters = (
        np.array([one["components"][name] for one in group]) for name in ("judge", "letters")
    )
    assert [one["reward"] for one in group] == pytest.approx(0.5 * score + 2 * letters) and np.std(
        score
    ) > 1e-3
    parts = workshop.train("in_parts", *both, "steps=1", "checkpoint.every=1")
    assert cli.main(["train", f"resume={parts}", "steps=2"]) == 0
    same = {}
    for name, value in metrics(whole)[-1].items():
        if name.startswith("rewards/"):
            same[name] = value
    assert same.items() <= metrics(parts)[-1].items() and "rewards/judge" in same
    assert [one["reward"] for one in groups(parts, 2)[0]["completions"]] == [
        one["reward"] for one in group
    ]
    assert cli.main(["eval", f"model={parts}", "task.num_eval_questions=4"]) == 0
    capsys.readouterr()
    assert cli.main(["rescore", str(whole), f"reward=model:{judge}", "json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["functions"] == {"judge": 1.0}


@pytest.mark.slow
def test_a_run_whose_reward_model_has_changed_says_so(
    workshop: Workshop, tmp_path: Path, capsys
) -> None:
    own = write_classifier(tmp_path / "own")
    words = [
        f"reward=model:{own}",
        "sampling.max_prompt_tokens=100",
        "checkpoint.every=1",
        "train.evaluate_every=-1",
    ]
    run = workshop.train("changed", *words, "steps=1")
    write_classifier(own, rms_norm_eps=1e-5)
    named = tensors(json.loads((own / "config.json").read_text()), seed=3)
    named.pop("lm_head.weight")
    save_tensors(own / "model.safetensors", named | {"score.weight": np.ones((1, 32), np.float32)})
    capsys.readouterr()
    assert cli.main(["train", f"resume={run}", "steps=2"]) == 0
    assert "the file of own, or one that it imports, has changed" in capsys.readouterr().out


@pytest.mark.slow
def test_its_weights_count_among_the_references(workshop: Workshop, judge: Path, capsys) -> None:
    role = make_roles(MeshSection(), jax.devices()[:1]).reference
    size = weight_bytes(RewardModel(str(judge)).classifier.architecture, role, np.float32)
    assert (
        cli.main(
            workshop.words(
                "sized",
                f"reward=model:{judge}",
                "sampling.max_prompt_tokens=100",
                "steps=1",
                "train.evaluate_every=-1",
            )
        )
        == 0
    )
    assert size > 0 and f"reward model {judge}" in capsys.readouterr().out


def test_a_dry_run_reads_none_of_its_weights(
    workshop: Workshop, judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RewardModel, "loaded", property(lambda _: pytest.fail("weights were read")))
    words = workshop.words("never", f"reward=model:{judge}", "sampling.max_prompt_tokens=100")
    assert cli.main([*words, "--dry-run"]) == 0


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "its config.json names LlamaForCausalLM; expected a sequence classifier",
        ),
        (
            {"architectures": ["BertForSequenceClassification"], "model_type": "bert"},
            "model_type is 'bert'; supported are",
        ),
        ({"id2label": None}, "it has 2 labels, and none of them is the reward"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "it has 3 labels"),
        (
            {"max_position_embeddings": 70},
            "it has positions for 70 tokens (max_position_embeddings), but",
        ),
        ({"vocab_size": 100}, "The tokenizer has token ids up to"),
    ],
)
def test_a_model_that_cannot_score_is_one_error_in_the_run_and_its_dry_run(
    workshop: Workshop, tmp_path: Path, capsys, changes: dict[str, Any], part: str
) -> None:
    folder = write_classifier(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    for ending in ([], ["--dry-run"]):
        assert cli.main([*workshop.words("never", f"reward=model:{folder}"), *ending]) == 2
        error = capsys.readouterr().err
        assert part in error and error.count("\n") == 1
    assert not (workshop.runs / "never").exists()


def test_other_tensors_and_a_missing_folder_are_refused_before_the_policys_weights(
    workshop: Workshop, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_classifier(tmp_path / "m")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])

    def load_weights(*_):
        return pytest.fail("the policy's weights were read")

    monkeypatch.setattr("shoal.job.job.Job.load_weights", load_weights)
    for path, part in (
        (folder, "model.safetensors"),
        (tmp_path / "no", f"There is no model folder {tmp_path / 'no'}"),
    ):
        assert cli.main(workshop.words("never", f"reward=model:{path}")) == 2
        assert part in capsys.readouterr().err


def test_messages_need_a_template_and_a_text_has_a_longest_length(tmp_path: Path) -> None:
    bare = write_classifier(tmp_path / "m")
    write_tokenizer(bare, template="")
    scorer = RewardModel(str(bare))
    with pytest.raises(ShoalError, match="has no chat template, and prompts are messages: put"):
        scorer([QUESTION], messages(["5"]))
    assert len(scorer(["2 + 3 = "], ["5"])) == 1
    with pytest.raises(
        ValueError, match=r"2,100 tokens: expected 1 to 2,048 \(max_position_embeddings\)"
    ):
        scorer([""], ["z" * 2100])
    (bare / "chat_template.jinja").write_text(CHATML)
    assert len(RewardModel(str(bare))([QUESTION], messages(["5"]))) == 1
