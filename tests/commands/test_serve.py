"""`shoal serve`: what OpenAI's client and vLLM's callers get, what is refused, and what is left
behind."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from serving import Served, serving, write_chat_model
from small import batches
from tiny_models import write_model

from shoal import cli
from shoal.model.transformer import Model
from shoal.records import Completion, Example, Group, Purpose, StopReason
from shoal.trainer.scorers import ModelScorer
from shoal.weights import huggingface

SIZES = ("sampling.max_prompt_tokens=768", "sampling.max_completion_tokens=32", "batch=16")
ASKED = [{"role": "user", "content": "2 + 3 = ?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        },
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(f"model={folder}", *SIZES) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def nothing_left(server: Served) -> bool:
    """Whether no call is under way, waiting a moment for those that end."""
    deadline = time.monotonic() + 20
    while (
        server.sampler.waiting or server.api.under_way or not server.sampler.host.host.idle
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not server.sampler.waiting and not server.api.under_way and server.sampler.host.host.idle


@pytest.mark.slow
def test_openais_client_gets_a_chat_completion(client: Any, server: Served):
    got = client.chat.completions.create(
        model="tiny",
        messages=ASKED,
        seed=1,
        logprobs=True,
        n=2,
        max_tokens=8,
        extra_body={"return_token_ids": True},
    )
    prompt = server.sampler.tokenizer.encode_prompt(ASKED).tolist()
    assert (
        got.prompt_token_ids == prompt
        and got.usage.prompt_tokens == len(prompt)
        and len(got.choices) == 2
    )
    for choice in got.choices:
        assert len(choice.logprobs.content) == len(choice.token_ids) <= 8
        assert choice.message.content == server.sampler.tokenizer.decode(choice.token_ids)
        assert choice.finish_reason == (
            "length"
            if len(choice.token_ids) == 8
            and choice.token_ids[-1] not in server.sampler.tokenizer.eos_ids
            else "stop"
        )
    assert got.choices[0].token_ids != got.choices[1].token_ids
    model = client.models.list().data[0]
    assert (model.id, model.max_model_len) == (server.sampler.name, 768 + 32)


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_and_none_gives_others(client: Any):
    def ids(**settings: Any) -> list[int]:
        return (
            client.completions.create(
                model="tiny",
                prompt=[5, 6, 7],
                max_tokens=16,
                **settings,
                extra_body={"return_token_ids": True},
            )
            .choices[0]
            .token_ids
        )

    assert ids(seed=3) == ids(seed=3) != ids(seed=4)
    assert ids() != ids()


def test_a_stream_has_the_tokens_of_the_whole_answer(client: Any):
    asked = {"model": "tiny", "messages": ASKED, "seed": 5, "max_tokens": 12}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert ends == [None, whole.choices[0].finish_reason]
    assert chunks[-1].usage == whole.usage
    texts = client.completions.create(
        model="tiny", prompt="abc", seed=5, max_tokens=12, stream=True
    )
    assert (
        "".join(chunk.choices[0].text for chunk in texts)
        == client.completions.create(model="tiny", prompt="abc", seed=5, max_tokens=12)
        .choices[0]
        .text
    )


@pytest.mark.slow
def test_tools_are_shown_and_calls_come_as_openai_has_them(
    client: Any, server: Served, monkeypatch
):
    read = server.sampler.tokenizer.encode(
        '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'
    )
    asked = {"model": "tiny", "messages": ASKED, "tools": [TOOL], "seed": 1, "max_tokens": 8}
    with_tools = client.chat.completions.create(**asked)
    assert (
        with_tools.usage.prompt_tokens
        > client.chat.completions.create(**asked | {"tools": []}).usage.prompt_tokens
    )
    from shoal.chat.turns import TurnFormat

    monkeypatch.setattr(
        TurnFormat, "read", lambda self, ids, real=TurnFormat.read: real(self, read)
    )
    made = client.chat.completions.create(**asked).choices[0].message.tool_calls[0]
    assert (made.type, made.function.name, json.loads(made.function.arguments)) == (
        "function",
        "add",
        {"a": 7},
    )
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        streamed.append(chunk.choices[0])
    assert (
        streamed[0].delta.tool_calls[0].function.name == "add"
        and streamed[-1].finish_reason == "tool_calls"
    )
    # The answer goes back as OpenAI's messages have it, with arguments as text.
    history = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [made.model_dump()]},
        {"role": "tool", "tool_call_id": made.id, "content": [{"type": "text", "text": "10"}]},
    ]
    got = client.chat.completions.create(
        **asked | {"messages": history}, extra_body={"return_token_ids": True}
    )
    text = server.sampler.tokenizer.decode(got.prompt_token_ids, skip_special_tokens=False)
    assert (
        '{"name": "add", "arguments": {"a": 7}}' in text
        and "<tool_response>\n10\n</tool_response>" in text
    )


def test_a_stop_string_is_left_out(client: Any):
    asked = {"model": "tiny", "prompt": "abc", "seed": 2, "max_tokens": 24}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[3:5]
    got = client.completions.create(**asked, stop=[stop, "never"]).choices[0]
    assert (got.text, got.finish_reason, got.stop_reason) == (
        whole[: whole.index(stop)],
        "stop",
        stop,
    )


def test_generate_has_ids_in_and_out_under_both_names(server: Served):
    got = server.post(
        "/inference/v1/generate",
        {
            "model": "tiny",
            "token_ids": [5, 6, 7],
            "cache_salt": "0",
            "sampling_params": {
                "max_tokens": 6,
                "seed": 4,
                "logprobs": 1,
                "n": 1,
                "skip_special_tokens": False,
            },
        },
    ).json()
    [choice] = got["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    assert [entry["token"] for entry in entries] == [f"token_id:{id}" for id in choice["token_ids"]]
    for entry in entries:
        assert entry["logprob"] <= 0
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": len(entries)}]
    same = server.post(
        "/v1/completions",
        {"prompt": [5, 6, 7], "max_tokens": 6, "seed": 4, "logprobs": 0, "return_token_ids": True},
    ).json()["choices"][0]
    assert same["token_ids"] == choice["token_ids"] and same["prompt_token_ids"] == [5, 6, 7]
    assert same["logprobs"]["token_logprobs"] == [entry["logprob"] for entry in entries]


def test_the_client_of_verifiers_gets_what_it_asks_for(server: Served):
    from renderers.client import generate

    said = SimpleNamespace(
        content="", reasoning_content=None, tool_calls=[], reasoning_complete=True
    )

    def get_stop_token_ids():
        return list(server.sampler.eos_ids[:2])

    def parse_response(ids, **_):
        return said

    renderer: Any = SimpleNamespace(
        get_stop_token_ids=get_stop_token_ids,
        parse_response=parse_response,
    )
    settings = {"temperature": 1.0, "max_tokens": 9, "seed": 4}

    async def ask() -> dict[str, Any]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="any", max_retries=0
        ) as client:
            return await generate(
                client=client,
                renderer=renderer,
                messages=[],
                model=server.sampler.name,
                prompt_ids=[5, 6, 7],
                sampling_params=settings,
                cache_salt="3",
                priority=1,
                extra_headers={"X-Session-ID": "one"},
            )

    got = asyncio.run(ask())
    same = server.post(
        "/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": settings}
    ).json()
    assert got["completion_ids"] == same["choices"][0]["token_ids"] and got["prompt_ids"] == [
        5,
        6,
        7,
    ]
    assert len(got["completion_logprobs"]) == len(got["completion_ids"])


@pytest.mark.slow
def test_the_capture_of_openenv_gets_tokens(server: Served):
    """What `openenv.core.harness.capture` 0.10 sends for a harness, and asks of an answer."""
    tool = {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a shell command",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
    said = {
        "role": "assistant",
        "content": "",
        "reasoning": "So be it.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "bash", "arguments": '{"command": "ls"}'},
            }
        ],
    }
    neutral = {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "a.py"}
    for messages in (ASKED, [*ASKED, said, answer]):
        got = server.post(
            "/v1/chat/completions",
            {
                "model": server.sampler.name,
                "messages": messages,
                "tools": [tool],
                "tool_choice": "auto",
                "logprobs": True,
                "top_logprobs": 0,
                "return_token_ids": True,
                "temperature": 1.0,
                "max_tokens": 16,
                **neutral,
            },
        ).json()
        [choice] = got["choices"]
        assert (
            got["prompt_token_ids"]
            and len(choice["token_ids"]) == len(choice["logprobs"]["content"]) > 0
        )
        for entry in choice["logprobs"]["content"]:
            assert entry["logprob"] <= 0 and isinstance(entry["token"], str)


@pytest.mark.slow
def test_recorded_log_probs_are_the_trainers(server: Served, folder: Path):
    model = server.sampler.store.model
    scorer = ModelScorer(
        Model(model.architecture, model.role),
        huggingface.load(folder, model.architecture, model.role),
    )
    groups = []
    for row in range(4):
        got = server.post(
            "/inference/v1/generate",
            {"token_ids": list(range(5, 9 + row)), "sampling_params": {"max_tokens": 24, "n": 2}},
        ).json()
        completions = []
        for i, one in enumerate(got["choices"]):
            completions.append(
                Completion(
                    row,
                    i,
                    np.array(one["token_ids"], np.int32),
                    np.array([e["logprob"] for e in one["logprobs"]["content"]], np.float32),
                    np.ones(len(one["token_ids"]), bool),
                    np.zeros(len(one["token_ids"]), np.int32),
                    StopReason.LENGTH,
                )
            )
        groups.append(
            Group(
                Purpose.TRAIN,
                0,
                0,
                Example(row, ""),
                np.array(got["prompt_token_ids"], np.int32),
                tuple(completions),
                ("", ""),
                np.zeros(2),
                {},
                np.ones(2, bool),
            )
        )
    [batch] = batches(groups)
    scored, taken = np.asarray(scorer.score(batch)), np.asarray(batch.sampler_logprobs)
    mask = np.asarray(batch.loss_mask)
    assert mask.sum() == sum(len(one) for group in groups for one in group.completions)
    assert np.abs(scored - taken)[mask].max() < 2e-5


@pytest.mark.slow
def test_64_sessions_at_once_streaming_and_not(server: Served):
    async def session(client: Any, number: int) -> str:
        asked = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"{number} + 1"}],
            "seed": number,
            "max_tokens": 8,
        }
        if number % 2:
            return (await client.chat.completions.create(**asked)).choices[0].message.content
        pieces = [
            chunk async for chunk in await client.chat.completions.create(**asked, stream=True)
        ]
        return "".join(chunk.choices[0].delta.content or "" for chunk in pieces)

    async def sessions(at_once: bool) -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="any", max_retries=0
        ) as client:
            if at_once:
                return await asyncio.gather(*(session(client, number) for number in range(64)))
            return [await session(client, number) for number in range(0, 64, 9)]

    assert asyncio.run(sessions(at_once=True))[::9] == asyncio.run(sessions(at_once=False))
    assert nothing_left(server)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"frequency_penalty": 0.5}, "frequency_penalty=0.5: expected a number from 0 to 0"),
    ({"tools": [{"function": {"name": ""}}]}, "a name of each"),
    ({"temperature": -1}, "temperature=-1"),
    ({"temperature": True}, "temperature=true"),
    ({"n": 0}, "n=0: expected an integer from 1 to 128"),
    ({"max_tokens": 33}, "max_tokens=33: expected an integer from 1 to 32"),
    ({"top_logprobs": 5}, "top_logprobs=5"),
    ({"max_tokens": 0}, "max_tokens=0: expected an integer from 1"),
    ({"max_tokens": "4"}, 'max_tokens="4": expected'),
    ({"max_tokens": 4.0}, "max_tokens=4.0: expected"),
    ({"max_tokens": True}, "max_tokens=true: expected"),
    ({"max_completion_tokens": -1}, "max_completion_tokens=-1: expected an integer from 1 to 32"),
    ({"max_completion_tokens": 2, "max_tokens": "4"}, 'max_tokens="4": expected'),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot"}]}, "messages="),
    ({"stop": [""]}, "stop"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages="),
    (
        {"messages": [{"role": "user", "content": "long " * 999}]},
        "1 to sampling.max_prompt_tokens=768",
    ),
    ({"logit_bias": {"5": 1}}, "logit"),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"properties": {"a": 1}}},
                }
            ]
        },
        "tools=",
    ),
    ({"guided_json": {}}, "this address has no such setting"),
    ({"seed": 2**64}, "seed"),
    ({"prompt": "abc"}, "this address has no such setting"),
]


@pytest.mark.parametrize(("change", "text"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(
    change: dict[str, Any], text: str, server: Served
):
    got = server.post(
        "/v1/chat/completions", {"model": "tiny", "messages": ASKED, "max_tokens": 4} | change
    )
    error = got.json()["error"]
    assert (
        got.status_code == 400
        and text in error["message"]
        and error["type"] == "invalid_request_error"
    )
    assert error["param"] in {*change, "prompt"}


@pytest.mark.parametrize(
    "given",
    [
        {"max_completion_tokens": 2},
        {"max_tokens": 2},
        {"max_tokens": 5, "max_completion_tokens": 2},
        {"max_tokens": 2, "max_completion_tokens": None},
        {"max_tokens": None, "max_completion_tokens": 2},
    ],
)
def test_either_name_of_the_limit_counts_and_the_newer_one_of_both(
    given: dict[str, Any], server: Served
):
    got = server.post(
        "/v1/chat/completions", {"messages": ASKED, "seed": 1, "return_token_ids": True, **given}
    )
    (choice,) = got.json()["choices"]
    assert len(choice["token_ids"]) == 2 and choice["finish_reason"] == "length"


def test_bodies_that_are_none(server: Served, monkeypatch):
    for body in (
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"n": NaN}',
        b"[" * 100_000,
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
    ):
        got = server.http.post("/v1/completions", content=body)
        assert got.status_code == 400 and got.json()["error"]["message"], body[:20]
    half = server.http.post("/v1/completions", content=b'{"prompt": "\\ud800", "max_tokens": 1}')
    assert half.status_code == 200
    monkeypatch.setattr("shoal.serve.app.MAX_BODY", 100)
    assert server.post("/v1/completions", {"prompt": "a" * 200}).status_code == 413
    monkeypatch.setattr("shoal.serve.app.MAX_CALLS", 0)
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 429
    assert (
        server.http.get("/v2").status_code == 404
        and server.http.get("/v1/completions").status_code == 405
    )


@pytest.mark.slow
def test_random_requests_end_and_leave_nothing(server: Served, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    fuzz = importlib.import_module("serve").fuzz  # which fails at a status of 500
    found = asyncio.run(fuzz(int(server.url.rpartition(":")[2]), 200, seed=1))
    assert found.total() == 200 and found[200] and found[400] and nothing_left(server)


def test_what_an_engine_cannot_do_does_not_end_it(server: Served, monkeypatch):
    """Found by random requests: an engine without truncation refused a request in its own thread,
    and ended."""
    monkeypatch.setattr(server.sampler.engine, "truncated", False)
    asked = {"prompt": "a", "max_tokens": 1}
    assert (
        server.post("/v1/completions", asked | {"top_p": 0.5}).json()["error"]["param"] == "top_p"
    )
    assert (
        server.post("/v1/completions", asked).status_code == 200
        and server.http.get("/health").status_code == 200
    )


def test_a_call_has_a_limit(server: Served):
    server.post("/pause?mode=keep")
    object.__setattr__(server.api, "seconds", 0.2)
    try:
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 408
    finally:
        object.__setattr__(server.api, "seconds", 60.0)
        server.post("/resume")
    assert nothing_left(server)


def test_a_sampler_that_has_ended_says_so(folder: Path):
    with serving(f"model={folder}", *SIZES) as served:

        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("out of memory")

        served.sampler.engine.step = fail  # type: ignore[method-assign]
        for _ in range(2):
            got = served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
            assert got.status_code == 503 and "out of memory" in got.json()["error"]["message"]
        assert served.http.get("/health").status_code == 503


def test_who_may_ask(server: Served, monkeypatch):
    assert server.post("/v1/completions", {}, host="evil.example").status_code == 403
    assert server.post("/v1/completions", {}, origin="http://evil.example").status_code == 403
    object.__setattr__(server.api, "key", "secret")
    try:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "Bearer secret"}, 200),
        ):
            assert (
                server.post(
                    "/v1/completions", {"prompt": "a", "max_tokens": 1}, **headers
                ).status_code
                == status
            )
    finally:
        object.__setattr__(server.api, "key", "")


def test_a_client_that_goes_away_leaves_nothing(server: Served):
    server.post("/pause?mode=keep")
    with pytest.raises(Exception):  # noqa: B017 - whatever a client calls its timeout
        server.http.post("/v1/completions", json={"prompt": "a"}, timeout=0.3)
    server.post("/resume")
    assert nothing_left(server)


@pytest.mark.slow
def test_weights_are_replaced_as_vllms_are(server: Served, folder: Path, tmp_path: Path):
    def ids() -> dict[str, Any]:
        return server.post(
            "/inference/v1/generate",
            {"token_ids": [5, 6], "sampling_params": {"max_tokens": 32, "temperature": 0}},
        ).json()["choices"][0]

    def sums() -> dict[str, str]:
        return server.post("/weight_checker", {"action": "checksum"}).json()["checksums"]

    before, first = ids(), sums()
    write_model(tmp_path, "qwen3", 1, vocab_size=server.sampler.vocab_size, num_hidden_layers=1)
    assert server.post("/pause?mode=wait").json()["status"] == "paused"
    assert server.http.get("/is_paused").json()["is_paused"] is True
    answer: list[Any] = []

    def target():
        return answer.append(ids())

    waits = threading.Thread(target=target)
    waits.start()
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    assert server.post("/collective_rpc", reload).status_code == 200
    assert server.post("/update_weight_version", {"new_version": "7"}).json()["success"]
    assert server.post("/reset_prefix_cache").json()["success"]
    assert sums() != first and server.post(
        "/weight_checker", {"action": "compare", "baseline": first}
    ).json() == {"match": False, "mismatches": ["parameters"]}
    server.post("/resume")
    waits.join(20)
    assert (
        answer[0]["token_ids"] != before["token_ids"]
        and answer[0]["weight_versions"][0]["version"] == "7"
    )
    # Weights of another model are refused, and those that are there stay.
    write_model(tmp_path / "other", "qwen3", 1, vocab_size=64, num_hidden_layers=1)
    refused = server.post(
        "/collective_rpc", {**reload, "kwargs": {"weights_path": str(tmp_path / "other")}}
    )
    assert refused.status_code == 400 and "not as expected" in refused.json()["error"]["message"]
    assert ids()["token_ids"] == answer[0]["token_ids"]
    reload["kwargs"]["weights_path"] = str(folder)  # type: ignore[index]
    assert server.post("/collective_rpc", reload).status_code == 200 and sums() == first


def test_a_pause_keeps_or_gives_up_what_is_under_way(server: Served, folder: Path):
    """With `keep` a call goes on where it was, with newer weights; with `abort` it ends with the
    tokens that it has."""

    def start() -> tuple[threading.Thread, list[Any]]:
        answer: list[Any] = []
        body = {
            "token_ids": [5, 6],
            "sampling_params": {"max_tokens": 32, "n": 64, "temperature": 50},
        }

        def target():
            return answer.append(server.post("/inference/v1/generate", body).json())

        thread = threading.Thread(target=target)
        thread.start()
        deadline = time.monotonic() + 20
        while not server.sampler.waiting and time.monotonic() < deadline:
            time.sleep(0.001)
        return thread, answer

    thread, answer = start()
    server.post("/pause?mode=keep")
    server.post(
        "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    )
    server.post("/update_weight_version", {"new_version": "later"})
    server.post("/resume")
    thread.join(20)
    for choice in answer[0]["choices"]:
        spans = choice["weight_versions"]
        assert spans[0]["start"] == 0 and spans[-1]["end"] == len(choice["token_ids"])
    assert "later" in {
        span["version"] for choice in answer[0]["choices"] for span in choice["weight_versions"]
    }
    thread, answer = start()
    server.post("/pause?mode=abort")
    server.post("/resume")
    thread.join(20)
    assert any(choice["finish_reason"] == "abort" for choice in answer[0]["choices"])
    assert nothing_left(server)


def test_without_publication_weights_stay(server: Served, monkeypatch):
    object.__setattr__(server.api, "weights", None)
    try:
        got = server.post("/pause")
        assert got.status_code == 404 and "publication=true" in got.json()["error"]["message"]
    finally:
        object.__setattr__(server.api, "weights", server.sampler)


def test_mistakes_of_the_command(folder: Path, capsys: pytest.CaptureFixture[str], server: Served):
    port = server.url.rpartition(":")[2]
    for words, text in (
        ([f"port={port}"], f"port={port}: cannot listen on"),
        (["host=0.0.0.0"], "set token=auto"),
        (["port=70000"], "at most 65535"),
    ):
        assert cli.main(["serve", f"model={folder}", *words]) == 2
        assert text in capsys.readouterr().err


ROOT = Path(__file__).parents[2]


@pytest.mark.system
def test_lm_evals_command_on_the_page_finds_the_accuracy_of_what_is_served(tmp_path: Path) -> None:
    page = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^lm-eval run .*$", page, re.MULTILINE)
    questions = []
    for line in (ROOT / "examples/evals/sums.jsonl").read_text(encoding="utf-8").splitlines():
        questions.append(json.loads(line))
    with serving("model=tiny", "batch=8") as served:
        num_right = 0
        for question in questions:
            messages = [{"role": "user", "content": question["question"]}]
            body = {"model": "any", "messages": messages, "temperature": 0, "max_tokens": 64}
            answer = served.post("/v1/chat/completions", body).json()
            text = answer["choices"][0]["message"]["content"]
            found = re.search("<answer>(.*?)</answer>", text)
            num_right += found is not None and found[1] == question["answer"]
        words = shlex.split(command.replace("http://127.0.0.1:8000", served.url))
        words[:1] = [sys.executable, "-m", "lm_eval"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
        done = subprocess.run(
            [*words, "--output_path", str(tmp_path / "figures")],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "figures").rglob("results_*.json")
    figures = json.loads(file.read_text())["results"]["sums"]
    assert figures["exact_match,tags"] == num_right / len(questions)
    assert 0 < num_right < len(questions)  # so that the figure says something
