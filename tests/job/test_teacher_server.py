"""A teacher behind an address: what it is asked, what its answers become, and that each of its
faults is one error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from scripted_teacher import ScriptedTeacher

from shoal import cli
from shoal.chat.tokenizer import Tokenizer
from shoal.config.sections.model import ModelSection, TeacherSection
from shoal.config.train import Config
from shoal.job.teacher_server import TRIES, TeacherServer
from shoal.mesh import World
from shoal.records import ShoalError
from shoal.weights.source import open_model

VOCABULARY = 600
SEQUENCES = [(np.array([5, 9, 2, 7], np.int32), 1), (np.array([3, 4, 4], np.int32), 2)]


def scores_of(ids: list[int], vocab_size: int = VOCABULARY) -> np.ndarray:
    """Logits that depend on all tokens so far."""
    sums = np.cumsum(ids)[:, None]
    return 3 * np.sin(sums * 0.7 + np.arange(vocab_size) * 1.3)


def logprobs_of(ids: np.ndarray) -> np.ndarray:
    scores = scores_of(ids.tolist())
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_model(ModelSection(), None).tokenizer


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[ScriptedTeacher]:
    with closing(ScriptedTeacher(scores_of, tokenizer)) as server:
        yield server


def config(url: str, divergence: Any = "topk") -> Config:
    return Config(teacher=TeacherSection(address=url, divergence=divergence, top_k=4))


def opened(server: ScriptedTeacher, tokenizer: Tokenizer, **changes: Any) -> TeacherServer:
    teacher = TeacherServer.open(
        server.url, config(server.url), tokenizer, vocab_size=VOCABULARY, world=World()
    )
    return replace(teacher, pause_seconds=0.0, **changes)


def test_tokens_are_scored_after_those_before_them(server, tokenizer):
    told = opened(server, tokenizer).score(SEQUENCES)
    for (ids, start), scores in zip(SEQUENCES, told, strict=True):
        expected = logprobs_of(ids)[start - 1 : -1]
        own = np.take_along_axis(expected, ids[start:, None].astype(int), axis=1)[:, 0]
        np.testing.assert_allclose(scores.logprobs, own, rtol=1e-6)
        likeliest = np.argsort(-expected, axis=1)[:, :4]
        np.testing.assert_array_equal(scores.top_ids, likeliest)
        top = np.take_along_axis(expected, likeliest, axis=1)
        np.testing.assert_allclose(scores.top_logprobs, top, rtol=1e-6)
        assert scores.logprobs.dtype == scores.top_logprobs.dtype == np.float32
        assert scores.top_ids.dtype == np.int32
    assert server.bodies[-1]["prompt_logprobs"] == 4 and server.bodies[-1]["max_tokens"] == 1


def test_only_the_tokens_themselves_are_asked_for_where_samples_are_scored(server, tokenizer):
    teacher = TeacherServer.open(
        server.url, config(server.url, "sampled"), tokenizer, VOCABULARY, World()
    )
    scores, _ = teacher.score(SEQUENCES)
    assert scores.top_ids.shape == (3, 0) and scores.logprobs.shape == (3,)
    assert all(body["prompt_logprobs"] == 0 for body in server.bodies)


def test_the_key_is_read_from_the_environment(server, tokenizer, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "abc")
    opened(server, tokenizer)
    assert server.keys == {"Bearer abc"}


@dataclass
class Pair(World):
    """One of two processes; what the first sends is passed on by `first`."""

    count: int = 2
    first: Any = None

    def exchange(self, what: str, data: bytes) -> list[bytes]:
        if self.is_main:
            self.first.append(data)
        return [self.first[0], b""]


def test_all_processes_have_the_first_ones_answers(server, tokenizer):
    sent: list[bytes] = []
    [first, second] = [
        opened(server, tokenizer, world=Pair(index=index, first=sent)) for index in (0, 1)
    ]
    told = first.score(SEQUENCES)
    asked = len(server.bodies)
    again = second.score(SEQUENCES)
    assert len(server.bodies) == asked
    for one, other in zip(told, again, strict=True):
        for name in ("logprobs", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype


def test_a_busy_server_is_asked_again(server, tokenizer):
    teacher = opened(server, tokenizer)
    server.fault, server.times = "503", 3
    assert len(teacher.score(SEQUENCES)) == 2
    server.fault, server.times = "429", 10**9
    with pytest.raises(ShoalError, match=rf"429.*the last of {TRIES} tries.*resume the run"):
        teacher.score(SEQUENCES[:1])
    server.fault, server.times = "400", 1
    with pytest.raises(ShoalError, match="answered /v1/completions with 400"):
        teacher.score(SEQUENCES[:1])


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("no logprobs", ["no prompt_logprobs", "the 4 likeliest", "--max-logprobs=4"]),
        ("few", ["tokens in a place, not 4", "--max-logprobs=4, or a lower teacher.top_k"]),
        ("short", ["prompt_logprobs of", "tokens, not"]),
        ("positive", ["a log-prob 0.5"]),
        ("large id", ["a token 1000000, and the model's vocabulary has"]),
        ("other tokens", ["and the model's is", "give one of the same family"]),
        ("two models", ["the server has 2 models (big, other); expected one"]),
        ("401", ["answered /v1/completions with 401"]),
    ],
)
def test_a_server_that_will_not_do_is_refused_before_weights_are_read(
    workshop, capsys, monkeypatch, fault, parts
):
    monkeypatch.setattr("shoal.job.training.load_models", None)
    model = open_model(ModelSection(path=str(workshop.model)), None)
    logits = partial(scores_of, vocab_size=model.architecture.vocab_size)
    with closing(ScriptedTeacher(logits, model.tokenizer)) as server:
        server.fault = fault
        words = [f"teacher.address={server.url}", "teacher.divergence=topk", "teacher.top_k=4"]
        assert cli.main(workshop.words("never", *words)) == cli.USAGE_EXIT_CODE
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and errors[0].startswith(f"error: teacher.address={server.url}: ")
    for part in parts:
        assert part in errors[0]


def test_a_server_is_refused_that_is_not_there_or_too_small(tokenizer):
    silent = ScriptedTeacher(scores_of)
    silent.close()
    with pytest.raises(ShoalError, match="expected the address of a running server"):
        opened(silent, tokenizer)
    expected = r"takes 100 tokens.*start it with --max-model-len="
    small = ScriptedTeacher(scores_of, max_model_len=100)
    with closing(small), pytest.raises(ShoalError, match=expected):
        opened(small, tokenizer)
    stingy = ScriptedTeacher(scores_of, most_logprobs=3)
    with closing(stingy), pytest.raises(ShoalError, match=r"at most 3.*--max-logprobs=4"):
        opened(stingy, tokenizer)


def test_several_servers_teach_by_row():
    section = TeacherSection(address="math=http://a:1/v1,code=https://b")
    assert section.addresses == {"math": "http://a:1/v1", "code": "https://b"}
    assert section.names == ["math", "code"] and section.exists and not section.is_policy
    assert TeacherSection(address="http://a/x?b=c").addresses == {"": "http://a/x?b=c"}
