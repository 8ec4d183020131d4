"""Dialogues with tools in the chat form of each family, through the driver of rollouts: a call is
made, answered and followed by an answer; tokens only grow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_models import write_chat_tokenizer

from shoal.chat.tokenizer import Tokenizer
from shoal.chat.turns import TurnFormat, schema
from shoal.config.sections.task import EnvironmentSection
from shoal.protocols import Extend, GroupRequest, Submit
from shoal.records import Completion, Example, Purpose, SamplingParams, StopReason
from shoal.rollout.ledger import GroupRewards, PendingGroup
from shoal.rollout.turn_driver import Rollout, TurnDriver
from shoal.serve.api import _tool_call
from shoal.tasks.graders.answer import final_number


def add(a: int) -> int:
    """Adds 3.

    Args:
        a: The number.
    """
    return a + 3


QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
# What a model samples: a turn with a call, one whose call cannot be read, and an answer.
XML = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
HARMONY = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
TURNS = {
    "qwen2_5": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>',
        '<tool_call>\n{"name": "add", "argu\n</tool_call><|im_end|>',
        "It is 5.<|im_end|>",
    ),
    "qwen3_5": (
        f"{XML}<|im_end|>",
        "<tool_call>add(2)</tool_call><|im_end|>",
        "It is 5.<|im_end|>",
    ),
    "qwen3_5_think": (
        f"7? No.\n</think>\n\n{XML}<|im_end|>",
        "7?\n</think>\n\n<tool_call>add(2)</tool_call><|im_end|>",
        "7? No.\n</think>\n\nIt is 5.<|im_end|>",
    ),
    "qwen3_8": (
        f"7? No.\n</think>\n\n{XML}<|im_end|>",
        "7?\n</think>\n\n<tool_call>add(2)</tool_call><|im_end|>",
        "7? No.\n</think>\n\nIt is 5.<|im_end|>",
    ),
    "llama3_1": (
        '{"name": "add", "parameters": {"a": 2}}<|eot_id|>',
        '{"name": "add", "parameters": {"a": <|eot_id|>',
        "It is 5.<|eot_id|>",
    ),
    "gemma4": (
        "<|channel>thought\n7?\n<channel|><|tool_call>call:add{a:2}<tool_call|><|tool_response>",
        "<|tool_call>add(2)<tool_call|><|tool_response>",
        "<|channel>thought\n7? No.\n<channel|>It is 5.<turn|>",
    ),
    "gpt_oss": (
        f'<|channel|>analysis<|message|>7?<|end|><|start|>assistant{HARMONY}{{"a": 2}}<|call|>',
        f"{HARMONY}add(2)<|call|>",
        "<|channel|>analysis<|message|>7? No.<|end|><|start|>assistant<|channel|>final<|message|>"
        "It is 5.<|return|>",
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}, "id": "Ab1Cd2Ef3"}]</s>',
        '[TOOL_CALLS] [{"name": "add", "argu</s>',
        " It is 5.</s>",
    ),
    "mistral_args": (
        '[TOOL_CALLS]add[ARGS]{"a": 2}</s>',
        "[TOOL_CALLS]add[ARGS]{</s>",
        "It is 5.</s>",
    ),
}


class Sessions:
    """The tool `add`, called at once; what it returns is kept for the driver."""

    def __init__(self) -> None:
        self.called: list[dict[str, Any]] = []
        self.ended = 0

    def open(self, key: Any, columns: Any) -> None:
        """Nothing begins: rollouts have no environment."""

    def kind_of(self, columns: Any) -> None:
        return None

    def call(self, key: Any, name: str, arguments: dict[str, Any]) -> None:
        assert name == "add"
        self.called.append(arguments)

    def end(self, key: Any) -> None:
        self.ended += 1


class Played:
    """One rollout of one group, whose host is the test."""

    def __init__(self, tokenizer: Tokenizer, history: str = "keep") -> None:
        self.tokenizer = tokenizer
        self.form = TurnFormat(tokenizer, [schema(add)])
        self.sessions = Sessions()
        section = EnvironmentSection(history=history)  # type: ignore
        self.driver = TurnDriver(
            self.sessions,  # type: ignore
            lambda columns: self.form,
            section,
            max_prompt_tokens=4096,
            most=8,
            tokenizer=tokenizer,
        )
        request = GroupRequest(
            Purpose.TRAIN,
            0,
            0,
            Example(0, QUESTION, {}),
            self.form.encode_prompt(QUESTION),
            1,
            SamplingParams(max_tokens=4096),
        )
        self.entry = PendingGroup(0, request)
        self.driver.open([self.entry])
        self.rollout: Rollout = self.entry.rollouts[0]
        self.driver._set_first_prompt(self.rollout, None)
        self.mask: list[bool] = []

    def sample(self, text: str) -> list[Any]:
        """The messages to the host after a turn that it has sampled."""
        turn = self.tokenizer.encode(text)
        assert turn[-1] in self.tokenizer.eos_ids
        tokens = [*self.rollout.tokens, *turn]
        self.mask += [False] * (len(self.rollout.tokens) - len(self.mask)) + [True] * len(turn)
        completion = Completion(
            request_id=0,
            index=0,
            token_ids=np.array(tokens, np.int32),
            logprobs=np.zeros(len(tokens), np.float32),
            loss_mask=np.array(self.mask),
            versions=np.zeros(len(tokens), np.int32),
            stop_reason=StopReason.EOS,
            waits=True,
        )
        assert not self.driver.wrong_turns(self.entry, [completion])
        return self.driver.read_turn(self.entry, completion)

    def answer(self, text: str) -> list[Any]:
        """The messages to the host after an answer of the tool."""
        reply = SimpleNamespace(
            fatal=False, what="call", value=text, reward=None, cut=0, rollout=self.rollout.key
        )
        return self.driver._take_reply(self.rollout, reply)  # type: ignore

    @property
    def whole(self) -> list[int]:
        assert self.rollout.prompt_ids is not None
        return [*self.rollout.prompt_ids.tolist(), *self.rollout.tokens]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    result = {}
    for family in TURNS:
        folder = write_chat_tokenizer(tmp_path_factory.mktemp(family), family)
        result[family] = Tokenizer.load(folder, date=datetime(2026, 1, 31))
    return result


def only(messages: Sequence[Any]) -> Any:
    (message,) = messages
    return message.message


@pytest.mark.parametrize("family", TURNS)
def test_a_call_its_answer_and_the_models_answer(tokenizers, family):
    tokenizer = tokenizers[family]
    played = Played(tokenizer)
    call, unreadable, said = TURNS[family]
    rows = [played.whole]

    assert played.sample(call) == [] and played.sessions.called == [{"a": 2}]
    extend = only(played.answer("5"))
    assert isinstance(extend, Extend)
    rows.append(played.whole)
    # A call that cannot be read is answered with its error, and no tool is called.
    context = only(played.sample(unreadable)).context
    assert "could not be read" in tokenizer.decode(context, False)
    assert played.sessions.called == [{"a": 2}]
    rows.append(played.whole)
    played.sample(said)
    assert played.sessions.ended == 1 and played.rollout.reason is StopReason.EOS
    rows.append(played.whole)

    for before, after in itertools.pairwise(rows):
        assert after[: len(before)] == before
    # What has a loss is what the model sampled.
    completion = played.rollout.result
    sampled = tokenizer.encode(call) + tokenizer.encode(unreadable) + tokenizer.encode(said)
    assert completion.token_ids[completion.loss_mask].tolist() == sampled
    roles = [message["role"] for message in completion.messages]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant"]
    function = completion.messages[0]["tool_calls"][0]["function"]
    assert function == {"name": "add", "arguments": {"a": 2}}
    # Graders read the answer, not the thoughts.
    assert final_number(str(completion.messages[-1]["content"])) == 5
    if family == "mistral":
        assert completion.messages[1]["tool_call_id"] == "Ab1Cd2Ef3"
        assert "Ab1Cd2Ef3" in tokenizer.decode(extend.context, False)


@pytest.mark.parametrize("family", TURNS)
def test_history_as_the_template_writes_it(tokenizers, family):
    """The rollout goes on in a branch where that differs from what was sampled."""
    tokenizer = tokenizers[family]
    played = Played(tokenizer, "template")
    call = TURNS[family][0]
    played.sample(call)
    host_messages = played.answer("5")
    text = tokenizer.decode(played.whole, False)
    function = {"name": "add", "arguments": {"a": 2}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    if family == "mistral":
        called["tool_calls"][0]["id"] = "Ab1Cd2Ef3"
    if family in ("gemma4", "gpt_oss"):
        called["reasoning_content"] = "7?"
    if family in ("qwen3_5_think", "qwen3_8"):
        called["reasoning_content"] = "7? No."
    answer = {"role": "tool", "name": "add", "tool_call_id": "Ab1Cd2Ef3", "content": "5"}
    expected = tokenizer.encode_prompt([*QUESTION, called, answer], [schema(add)])
    assert text == tokenizer.decode(expected, False)
    # gpt-oss's template writes a call's recipient in another place than the model.
    kinds = [type(one.message) for one in host_messages]
    assert (kinds[-1] is Submit) == (family == "gpt_oss")
    assert kinds[-1] in (Submit, Extend)


def test_a_history_that_the_template_refuses_is_appended_to(tokenizers):
    """Llama 3.1 takes one call in a message; a model may write two."""
    tokenizer = tokenizers["llama3_1"]
    played = Played(tokenizer, "template")
    call = TURNS["llama3_1"][0].removesuffix("<|eot_id|>")
    played.sample(f"{call}; {call}<|eot_id|>")
    before = played.whole
    assert played.answer("5") == [] and len(played.sessions.called) == 2
    extend = only(played.answer("6"))
    assert isinstance(extend, Extend) and played.whole[: len(before)] == before
    context = tokenizer.decode(extend.context, False)
    assert '"5"<|eot_id|>' in context and '"6"<|eot_id|>' in context


def test_an_agents_answer_has_the_id_of_the_models_call(tokenizers):
    """Of a client that repeats the conversation and adds the answer, under any id of its own."""
    tokenizer = tokenizers["mistral"]
    played = Played(tokenizer)
    played.sample(TURNS["mistral"][0])
    tools = [schema(add)]
    (called,) = played.rollout.messages
    assert _tool_call(called["tool_calls"][0])["id"] == "Ab1Cd2Ef3"
    played.rollout.agent_call = {"tools": tools}
    played.rollout.agent_messages = [*QUESTION, called]
    answer = {"role": "tool", "tool_call_id": "call_0", "content": "5"}
    requested = {"prompt": [*QUESTION, called, answer], "tools": tools}
    before = played.whole
    ids = played.driver._prompt_ids_of_call(played.rollout, requested).tolist()
    assert ids[: len(before)] == before
    context = tokenizer.decode(ids[len(before) :], False)
    assert context == '[TOOL_RESULTS] {"content": 5, "call_id": "Ab1Cd2Ef3"}[/TOOL_RESULTS]'


@pytest.mark.parametrize("family", TURNS)
def test_a_call_that_the_limit_cuts_ends_the_rollout_as_text(tokenizers, family):
    tokenizer = tokenizers[family]
    played = Played(tokenizer)
    ids = tokenizer.encode(TURNS[family][0])[:-3]
    completion = Completion(
        request_id=0,
        index=0,
        token_ids=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        loss_mask=np.ones(len(ids), bool),
        versions=np.zeros(len(ids), np.int32),
        stop_reason=StopReason.LENGTH,
    )
    assert played.driver.read_turn(played.entry, completion) == []
    assert played.sessions.called == [] and played.rollout.reason is StopReason.LENGTH
    (message,) = played.rollout.messages
    assert message == {"role": "assistant", "content": tokenizer.text(ids)}


def test_rewards_read_thoughts_in_tags(tokenizers):
    """One convention for all models, also where decoding would leave the channels out."""
    tokenizer = tokenizers["gpt_oss"]
    submitted: list[Any] = []

    def submit(*given: Any, **turns: Any) -> None:
        submitted.append(given)

    pool: Any = SimpleNamespace(submit=submit)
    task: Any = SimpleNamespace()
    played = Played(tokenizer)
    ids = np.array(tokenizer.encode(TURNS["gpt_oss"][2]), np.int32)
    played.entry.rollouts = []
    played.entry.completions = [
        SimpleNamespace(token_ids=ids, loss_mask=np.ones(len(ids), bool))  # type: ignore
    ]
    GroupRewards(task, pool, tokenizer.text).submit(played.entry)
    assert submitted[0][2] == [["<think>\n7? No.\n</think>\n\nIt is 5."]]
