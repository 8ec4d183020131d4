"""Rollouts of several turns through the fleet: tools and environments answer, tokens only grow,
nothing is lost."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from small import QWEN3, random_parameters, roles

import shoal
from shoal.chat.tokenizer import Tokenizer
from shoal.chat.tool_calls import ToolCall
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import EnvironmentSection
from shoal.job.replay import sample_turns
from shoal.model.transformer import Model
from shoal.protocols import End, Extend, GroupRequest, Message
from shoal.records import (
    Completion,
    Example,
    Group,
    HostLost,
    Purpose,
    RewardFunction,
    SamplingParams,
    ShoalError,
    StopReason,
)
from shoal.rewards.loading import load_functions
from shoal.rewards.pool import RewardPool
from shoal.rollout import host_health
from shoal.rollout.fleet import Fleet
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.rollout.ledger import IDLE, GroupRewards, PendingGroup, RolloutState, sample_request
from shoal.rollout.turn_driver import Rollout, TurnDriver, join_branches, with_reset_text
from shoal.runs.compare import completion_difference
from shoal.sampler.engine import Engine
from shoal.tasks.builtin_rewards import overlong_punishment
from shoal.tasks.task import Task
from shoal.weights.store import MemoryStore
from shoal.workers.rollout_function import ROLLOUT, RolloutCall, generate_rollout_completions
from shoal.workers.sessions import Reply, Sessions

MODEL = dataclasses.replace(QWEN3, num_layers=2)
EOS = tuple(range(0, 100, 7))  # turns end often
LIMIT = 30


class Format:
    """Turns of a model whose tokens are numbers: it calls a tool with the numbers of its turn when
    their sum is odd."""

    def split_special_tokens(self, message: dict[str, Any]) -> dict[str, Any]:
        return message

    def encode_prompt(self, prompt: Any) -> np.ndarray:
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        return np.array([1, 2, *(ord(one) % 90 for one in text)], np.int32)

    def read(self, ids: Sequence[int]) -> tuple[dict[str, Any], list[ToolCall]]:
        text = " ".join(map(str, ids))
        calls = [ToolCall("add", {"numbers": list(ids)})] if sum(ids) % 2 else []
        calls += [ToolCall("add", {}, "unreadable")] if sum(ids) % 3 == 0 and calls else []
        return {"role": "assistant", "content": text}, calls

    def encode_context(
        self,
        messages: Sequence[Mapping[str, Any]],
        calls: Sequence[ToolCall] = (),
        last: int | None = None,
    ) -> list[int]:
        assert last in EOS
        return [
            3,
            *(
                int(digits) % 90
                for one in messages
                for digits in re.findall(r"\d+", one["content"])
            ),
            4,
        ]


def add(numbers: list[int]) -> str:
    """Adds.

    Args:
        numbers: What to add.
    """
    if len(numbers) == 1:
        raise ValueError("one number is no sum")
    return str(sum(numbers))


class Guess:
    """Says how often it was asked; its first words differ by rollout where the data says so."""

    def reset(self, question: str, apart: bool = False) -> str | None:
        self.asked = 0
        return str(os.getpid()) if apart else " go"

    def respond(self, message: str) -> str | None:
        self.asked += 1
        return None if self.asked == 3 else f"more {self.asked}"

    def get_reward(self) -> float:
        return float(self.asked)


def sampled(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def rewards(task: Task) -> GroupRewards:
    return GroupRewards(
        task,
        RewardPool(task.rewards, RewardSection(workers=0)),
        lambda ids: " ".join(map(str, ids)),
    )


TASK = Task(
    "t",
    rewards=(
        RewardFunction(
            "length",
            lambda completions, **_: [float(len(one)) for one in completions],
            runs_in_process=True,
        ),
        RewardFunction("sampled", sampled, runs_in_process=True),
        RewardFunction("overlong", overlong_punishment(LIMIT, LIMIT), runs_in_process=True),
    ),
)


def fleet(
    sessions: Sessions,
    thread: bool = False,
    slots: int = 8,
    form: type[Format] = Format,
    tokenizer: Any = None,
    **changes: Any,
) -> Fleet:
    model = Model(MODEL, roles().sampler)
    engine = Engine(
        model,
        slots=slots,
        siblings_per_row=1,
        group_size=4,
        max_prompt_tokens=64,
        max_completion_tokens=LIMIT,
        eos_ids=EOS,
    )
    section, woken = dataclasses.replace(sessions.section, **changes), threading.Event()
    player = TurnDriver(sessions, lambda columns: form(), section, 64, 64, tokenizer)  # pyright: ignore
    host = EngineHost(lambda purpose, size: engine, capacity=64 if thread else None)
    hosts: dict[str, Any] = {"a": ThreadHost(host, woken.set, "a") if thread else host}
    scored = dataclasses.replace(rewards(TASK), on_error=section.on_error)
    return Fleet(
        MemoryStore(model),
        hosts,
        scored,
        seed=0,
        in_background=thread,
        turn_driver=player,
        woken=woken,
    )


@contextmanager
def opened(source: Fleet) -> Iterator[Fleet]:
    """Closes a fleet at the end, and then the sessions that it used."""
    assert source.turn_driver is not None
    with closing(source.turn_driver.sessions), closing(source):
        yield source


def requests(rows: Sequence[int], as_messages: bool = False, **columns: Any) -> list[GroupRequest]:
    form = Format()
    result = []
    for row in rows:
        result.append(
            GroupRequest(
                Purpose.TRAIN,
                0,
                0,
                Example(
                    row,
                    [{"role": "user", "content": f"question {row}"}]
                    if as_messages
                    else f"question {row}",
                    {"question": str(row), **columns},
                ),
                form.encode_prompt(f"question {row}"),
                4,
                SamplingParams(max_tokens=LIMIT),
            )
        )
    return result


def play(sessions: Sessions, asked: Sequence[GroupRequest], **changes: Any) -> list[Group]:
    with opened(fleet(sessions, **changes)) as source:
        source.publish(0, random_parameters(MODEL))
        source.request(asked)
        return source.take(Purpose.TRAIN, 0)


def same(ours: Sequence[Group], theirs: Sequence[Group]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            assert (
                a.token_ids.tolist() == b.token_ids.tolist()
                and a.logprobs.tobytes() == b.logprobs.tobytes()
            )
            assert a.messages == b.messages and a.stop_reason == b.stop_reason


def check_turns(group: Group) -> None:
    """The tokens are those of the messages, in order."""
    for one in group.completions:
        expected, mask = [], []
        for is_own, messages in itertools.groupby(
            one.messages, lambda message: message["role"] == "assistant"
        ):
            told = list(messages)
            if is_own:
                ids = []
                for message in told:
                    for word in message["content"].split():
                        ids.append(int(word))
            else:
                ids = Format().encode_context(told, last=EOS[0])
            expected += ids
            mask += [is_own] * len(ids)
        assert one.token_ids.tolist() == expected and one.loss_mask.tolist() == mask


def tools(**changes: Any) -> Sessions:
    return Sessions([add], {}, EnvironmentSection(**changes))


@pytest.fixture(scope="module")
def first() -> list[Group]:
    return play(tools(), requests(range(6)))


@pytest.mark.slow
def test_a_tool_answers(first):
    messages = [message for group in first for one in group.completions for message in one.messages]
    answers = []
    for message in messages:
        if message["role"] == "tool":
            answers.append(message["content"])
    assert any(answer.isdigit() for answer in answers)
    assert {
        json.loads(answer)["error"].split(":")[0] for answer in answers if not answer.isdigit()
    } == {"ValueError", "unreadable"}
    reasons = {one.stop_reason for group in first for one in group.completions}
    assert reasons >= {StopReason.EOS, StopReason.LENGTH}
    for group in first:
        check_turns(group)
        for one in group.completions:
            assert (
                len(one) <= LIMIT and not one.waits and (one.loss_mask | (one.logprobs == 0)).all()
            )
            assert one.prompt_ids is None


@pytest.mark.slow
def test_threads_and_few_places_change_no_bit(first):
    for thread, slots in ((True, 8), (False, 2), (True, 2)):
        same(play(tools(), requests(range(6)), thread=thread, slots=slots), first)


def test_lengths_and_penalties_of_lengths_count_sampled_tokens_alone(first):
    assert any(not one.loss_mask.all() for group in first for one in group.completions)
    for group in first:
        lengths = [one.num_sampled for one in group.completions]
        assert group.reward_components["sampled"].tolist() == lengths
        assert group.reward_components["overlong"] == pytest.approx(
            [-length / LIMIT for length in lengths]
        )


@pytest.mark.slow
def test_a_limit_of_turns():
    groups = play(tools(max_turns=2), requests(range(4)))
    ends = []
    for group in groups:
        for one in group.completions:
            if one.stop_reason is StopReason.MAX_TURNS:
                ends.append(one)
    assert ends and all(
        sum(message["role"] == "assistant" for message in one.messages) == 2 for one in ends
    )
    for one in ends:
        assert one.messages[-1]["role"] == "assistant" and one.loss_mask[-1]


def environment(**changes: Any) -> Sessions:
    return Sessions([], {"Guess": Guess}, EnvironmentSection(**changes))


@pytest.mark.slow
def test_an_environment_answers_in_words():
    groups = play(environment(), requests(range(3)))
    ended = []
    for group in groups:
        for one in group.completions:
            if one.stop_reason is StopReason.ENVIRONMENT:
                ended.append(one)
    assert ended
    for one in ended:
        assert [message["content"] for message in one.messages if message["role"] == "user"] == [
            "more 1",
            "more 2",
        ]
    for group in groups:
        check_turns(group)
        for one in group.completions:  # reset's words are appended to the prompt
            assert one.prompt_ids is not None
            assert (
                one.prompt_ids.tolist()
                == Format().encode_prompt(f"question {group.example.row} go").tolist()
            )
    same(play(environment(), requests(range(3)), thread=True), groups)


@pytest.mark.slow
def test_environments_that_begin_differently_have_their_own_prompts():
    groups = play(environment(), requests(range(2), apart=True))
    for group in groups:
        assert len(group.by_prompt()) > 1
        for prompt, _ in group.by_prompt():
            assert prompt[:12].tolist() == group.prompt_ids[:12].tolist() and len(prompt) > len(
                group.prompt_ids
            )


class Retold(Format):
    """Conversations as a chat template renders them: all that was said, or, of earlier turns, only
    their last words."""

    keeps = False

    def encode_prompt(self, prompt: Any) -> np.ndarray:
        if isinstance(prompt, str):
            return super().encode_prompt(prompt)
        ids = super().encode_prompt(prompt[:1]).tolist()
        for is_own, messages in itertools.groupby(
            prompt[1:], lambda message: message["role"] == "assistant"
        ):
            said = [*messages]
            if is_own:
                told = [*map(int, said[0]["content"].split())]
            else:
                told = self.encode_context(said, last=EOS[0])
            ids += told[-1:] if is_own and not self.keeps else told
        return np.array(ids, np.int32)


class Kept(Retold):
    keeps = True


@pytest.mark.slow
def test_a_template_that_keeps_what_was_said_changes_no_bit():
    asked = requests(range(3), as_messages=True)
    same(play(environment(), asked, form=Kept, history="template"), play(environment(), asked))


@pytest.fixture(scope="module")
def retold() -> list[Group]:
    return play(
        environment(), requests(range(3), as_messages=True), form=Retold, history="template"
    )


def test_history_that_is_told_anew_is_the_prompt_of_a_branch(retold):
    assert max(len(one.branches) for group in retold for one in group.completions) > 1
    for group in retold:
        for number, one in enumerate(group.completions):
            first = {"role": "user", "content": f"question {group.example.row} go"}
            said = [
                *map(
                    int,
                    " ".join(
                        m["content"] for m in one.messages if m["role"] == "assistant"
                    ).split(),
                )
            ]
            assert len(one) <= LIMIT and one.token_ids[one.loss_mask].tolist() == said
            told = []
            for n in range(len(one.messages)):
                told.append(Retold().encode_prompt([first, *one.messages[:n]]).tolist())
            for prompt, tokens in group.branches_of(number):
                assert prompt.tolist() in told and one.loss_mask[tokens.start]
            # A turn of one word is told as it was said, and goes on where it is.
            assert one.loss_mask.all() or any(len(m["content"].split()) == 1 for m in one.messages)


@pytest.mark.slow
def test_branches_are_the_same_in_threads_in_few_places_and_sampled_again(retold):
    asked = requests(range(3), as_messages=True)
    for thread, slots in ((True, 8), (True, 2)):
        again = play(
            environment(), asked, form=Retold, history="template", thread=thread, slots=slots
        )
        same(again, retold)
        for one, other in zip(retold, again, strict=True):
            assert [str(c.branches) for c in one.completions] == [
                str(c.branches) for c in other.completions
            ]
    with opened(fleet(environment())) as source:
        engine = source.members["a"].host.make_engine(Purpose.TRAIN, 4)  # pyright: ignore
        engine.load(0, random_parameters(MODEL))
        for request, group in zip(asked, retold, strict=True):
            sampled = sample_turns(engine, sample_request(request, 0, 0), group)
            for one, other in zip(group.completions, sampled, strict=True):
                assert completion_difference(one, other) is None and str(one.branches) == str(
                    other.branches
                )


@pytest.mark.slow
def test_two_branches_at_one_position_have_other_noise():
    def twice(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        for _ in range(3):
            trainer.generate([1, 2, 3, 4])
        return {}

    groups = play(rollout(twice), requests(range(4)), tokenizer=Numbers())
    parts = [
        one.token_ids[tokens].tolist()
        for group in groups
        for n, one in enumerate(group.completions)
        for _, tokens in group.branches_of(n)
    ]
    assert len(parts) >= 40 and len({str(part) for part in parts}) > len(parts) // 2


def rollout(function: Any, **changes: Any) -> Sessions:
    return Sessions([], {ROLLOUT: partial(RolloutCall, function)}, EnvironmentSection(**changes))


class Numbers:
    """A tokenizer whose tokens are numbers."""

    vocab_size = MODEL.vocab_size

    def __init__(self, form: Format | None = None) -> None:
        self.encode_prompt = (form or Format()).encode_prompt

    def render(self, messages: Any, whole: bool = False) -> str:
        return messages[-1]["content"] + "!" * whole

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def ask_twice(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """Goes on once from what was sampled, with tokens of its own between."""
    (first,) = generate_rollout_completions(trainer, prompts)
    assert first["prompt_ids"] == trainer.processing_class.encode(prompts[0])
    assert first["text"] == trainer.processing_class.decode(first["completion_ids"])
    context = [5, 6]
    second = trainer.generate(first["prompt_ids"] + first["completion_ids"] + context)
    ids = first["completion_ids"] + context + second["completion_ids"]
    mask = [1] * len(first["completion_ids"]) + [0, 0] + [1] * len(second["completion_ids"])
    return {
        "prompt_ids": [first["prompt_ids"]],
        "completion_ids": [ids],
        "env_mask": [mask],
        "logprobs": [first["logprobs"] + [0.0, 0.0] + second["logprobs"]],
        "turns": [len(prompts) + 1],
    }


def turns_of(
    completions: Sequence[Any], turns: Sequence[int | None], **columns: Any
) -> list[float]:
    return [float(one or 0) for one in turns]


@pytest.mark.slow
def test_a_rollout_function_samples_as_often_as_it_likes():
    task = Task("t", rewards=(RewardFunction("turns", turns_of, runs_in_process=True),))
    with opened(fleet(rollout(ask_twice), tokenizer=Numbers())) as source:
        source.rewards = rewards(task)
        source.publish(0, random_parameters(MODEL))
        source.request(requests(range(4)))
        groups = source.take(Purpose.TRAIN, 0)
    went_on = 0
    for group in groups:
        for one, reward in zip(group.completions, group.rewards, strict=True):
            context = one.token_ids[~one.loss_mask].tolist()
            assert context in ([], [5, 6]) and not one.branches and not one.messages
            # Where nothing was left after the first, the function had no say, and there is no
            # field.
            assert reward == (2.0 if context else 0.0)
            assert context or one.stop_reason is StopReason.LENGTH
            went_on += bool(context)
    assert went_on > 8
    same(
        play(rollout(ask_twice), requests(range(4)), tokenizer=Numbers(), thread=True, slots=2),
        groups,
    )


TURN_LIMITS = (2, 5, None, 3)


def asks_with_limits(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """A limit for each of four turns: the first begins a rollout, two go on, the last is a branch.
    What is cut goes on as what has ended."""
    ids, sizes = trainer.encode(prompts[0]), []
    for number, max_tokens in enumerate(TURN_LIMITS):
        turn = trainer.generate(ids if number < 3 else [1, 2], max_tokens=max_tokens)
        sizes.append(len(turn["completion_ids"]))
        assert max_tokens is None or sizes[-1] <= max_tokens
        is_cut = turn["completion_ids"][-1] not in EOS
        assert (turn["stop_reason"] == "length") == is_cut
        ids = ids + turn["completion_ids"] + [5, 6]
    return {"sizes": [sizes]}


@pytest.fixture(scope="module")
def cut() -> list[Group]:
    return play(rollout(asks_with_limits), requests(range(6)), tokenizer=Numbers())


def turns_in(group: Group, number: int) -> list[np.ndarray]:
    """The tokens of each turn of a completion."""
    one, turns = group.completions[number], []
    for _, tokens in group.branches_of(number):
        own = one.loss_mask[tokens]
        starts = np.flatnonzero(np.diff(own, prepend=False) & own)
        turns += [
            one.token_ids[tokens][start : start + int(own[start:].cumprod().sum())]
            for start in starts
        ]
    return turns


def test_a_limit_of_a_turn_ends_that_turn_and_the_rollout_goes_on(cut):
    kept = truncated = 0
    for group in cut:
        for number, one in enumerate(group.completions):
            turns = turns_in(group, number)
            limits = [limit or LIMIT for limit in TURN_LIMITS]
            for turn, limit in zip(turns, limits, strict=False):
                assert len(turn) <= limit
            assert (
                one.loss_mask.sum() == sum(map(len, turns))
                and (one.logprobs[one.loss_mask] < 0).all()
            )
            kept += sum(
                turn[-1] not in EOS and len(turn) == limit
                for turn, limit in zip(turns[:-1], limits, strict=False)
            )
            if len(turns) == len(TURN_LIMITS):
                # the last turn says whether the rollout was truncated
                is_cut = turns[-1][-1] not in EOS
                assert one.stop_reason is (StopReason.LENGTH if is_cut else StopReason.EOS)
                truncated += is_cut
    assert kept > 20 and truncated > 5


@pytest.mark.slow
def test_rollouts_with_limits_of_turns_are_the_same_in_threads_in_few_places_and_sampled_again(cut):
    played = play(
        rollout(asks_with_limits), requests(range(6)), tokenizer=Numbers(), thread=True, slots=2
    )
    same(played, cut)
    engine = Engine(
        Model(MODEL, roles().sampler),
        slots=8,
        siblings_per_row=1,
        group_size=4,
        max_prompt_tokens=64,
        max_completion_tokens=LIMIT,
        eos_ids=EOS,
    )
    engine.load(0, random_parameters(MODEL))
    for asked, group in zip(requests(range(6)), cut, strict=True):
        again = sample_turns(engine, sample_request(asked, 0, 0), group)
        assert not any(
            completion_difference(*pair) for pair in zip(group.completions, again, strict=True)
        )


def asks_once(prompts: list[str], trainer: Any) -> None:
    trainer.generate(prompts[0])


def asks_in_pieces(prompts: list[str], trainer: Any) -> None:
    """Continues a turn that was cut with nothing between."""
    ids, reason = trainer.encode(prompts[0]), "length"
    while reason == "length":
        turn = trainer.generate(ids, max_tokens=4)
        ids, reason = ids + turn["completion_ids"], turn["stop_reason"]


@pytest.mark.slow
def test_a_turn_in_pieces_is_the_turn_without_limits():
    whole = play(rollout(asks_once), requests(range(6)), tokenizer=Numbers())
    pieces = play(rollout(asks_in_pieces), requests(range(6)), tokenizer=Numbers())
    same(pieces, whole)
    assert not any(one.branches for group in pieces for one in group.completions)
    assert max(len(one) for group in whole for one in group.completions) > 8


def asks_by_turns(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """Each rollout of a group has another limit of its first turn."""
    path = Path(prompts[0].partition(" in ")[2])
    mine = next(number for number in range(1, 5) if not _is_taken(path / str(number)))
    trainer.generate(trainer.encode("alike"), max_tokens=mine)
    return {"mine": [mine]}


def _is_taken(file: Path) -> bool:
    try:
        file.open("x").close()
    except FileExistsError:
        return True
    return False


def limits_kept(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    mine: Sequence[int],
    **columns: Any,
) -> list[float]:
    assert sorted(mine) == [1, 2, 3, 4]
    result = []
    for ids, limit in zip(completion_ids, mine, strict=True):
        result.append(float(len(ids) <= limit and (len(ids) == limit or ids[-1] in EOS)))
    return result


def test_rollouts_of_one_prompt_have_limits_of_their_own(tmp_path):
    task = Task("t", rewards=(RewardFunction("kept", limits_kept, runs_in_process=True),))
    asked = dataclasses.replace(
        requests([0])[0], example=Example(0, f"question in {tmp_path}", {"question": "0"})
    )
    with opened(fleet(rollout(asks_by_turns), tokenizer=Numbers())) as source:
        source.rewards = rewards(task)
        source.publish(0, random_parameters(MODEL))
        source.request([asked])
        (group,) = source.take(Purpose.TRAIN, 0)
    assert group.rewards.all()


def asks_in_threads(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """Each thread asks for what no other does: its answer says whose it is."""
    trainer.generate(np.array([1, 2, 3]))
    wrong: list[int] = []

    def decode(number: int) -> None:
        wrong.extend(number for _ in range(50) if trainer.decode(np.array([number])) != str(number))

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong, f"threads {sorted(set(wrong))} got the answers of others"
    whole = [{"role": "user", "content": "a"}]
    assert trainer.apply_chat_template(whole, tokenize=False, add_generation_prompt=False) == "a!"
    assert trainer.apply_chat_template(whole, add_generation_prompt=False) == [ord("a"), ord("!")]
    return {}


def test_tools_that_a_template_does_not_show_are_an_error_of_the_agents():
    """Of token ids no template is asked before the turn is read, where an error would end the
    run."""
    tokenizer = Tokenizer.load(Path(shoal.__file__).parent / "assets" / "tiny")
    player = TurnDriver(None, None, EnvironmentSection(), 64, 4, tokenizer)  # type: ignore
    tools = [{"function": {"name": "add", "parameters": {"properties": {}}}}]
    with pytest.raises(ShoalError, match="no place for"):
        player._prompt_ids_of_call(
            Rollout(PendingGroup(0, requests([0])[0]), 0, 0, ""), {"prompt": [1, 2], "tools": tools}
        )


@pytest.mark.slow
def test_threads_of_a_rollout_function_get_their_own_answers():
    play(rollout(asks_in_threads), requests([0]), tokenizer=Numbers())


@pytest.mark.parametrize("on_error", ["error", "skip"])
def test_a_field_that_no_rollout_of_a_group_has_is_none(on_error):
    """Whether the function had no tokens left, or failed each time."""

    def asks_on(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        trainer.generate(prompts[0])
        if on_error == "skip":
            raise ValueError("no")
        while True:
            trainer.generate(prompts[0])

    task = Task("t", rewards=(RewardFunction("turns", turns_of, runs_in_process=True),))
    with opened(fleet(rollout(asks_on), tokenizer=Numbers(), on_error=on_error)) as source:
        source.rewards = dataclasses.replace(rewards(task), on_error=on_error)
        source.publish(0, random_parameters(MODEL))
        source.request(requests([0]))
        (group,) = source.take(Purpose.TRAIN, 0)
    assert group.valid.all() == (on_error == "error") and not np.nan_to_num(group.rewards).any()


def test_the_example_of_a_rollout_function():
    example = Path(__file__).parents[2] / "examples" / "rollout.py"
    assert len(example.read_text().splitlines()) < 60
    function, right, better = load_functions(
        [f"{example}:{name}" for name in ("think_twice", "right", "better")]
    )
    task = Task("t", rewards=(RewardFunction("right", right), RewardFunction("better", better)))
    with opened(fleet(rollout(function), form=Retold, tokenizer=Numbers(Retold()))) as source:
        source.rewards = rewards(task)
        source.publish(0, random_parameters(MODEL))
        source.request(requests(range(3), as_messages=True, answer="#### 5"))
        groups = source.take(Purpose.TRAIN, 0)
    assert any(one.branches for group in groups for one in group.completions)
    # no number is said
    for group in groups:
        assert group.valid.all() and not group.rewards.any()


def returns_others(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    trainer.generate(prompts[0])
    return {"completion_ids": [[1, 2, 3]]}


def returns_two(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    trainer.generate(prompts[0])
    return {"score": [1, 2]}


def returns_a_column(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    trainer.generate(prompts[0])
    return {"question": [1]}


def too_long(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    return trainer.generate([1] * 65)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda prompts, trainer: {}, "returned before anything was sampled"),
        (returns_others, "are not the tokens that generate"),
        (
            lambda prompts, trainer: trainer.generate(prompts[0]) and {"env_mask": [[]]},
            "are not the tokens that generate",
        ),
        (returns_two, "'score': expected a list of one value"),
        (returns_a_column, "the field 'question' has the name of a column"),
        (
            lambda prompts, trainer: trainer.generate([1, MODEL.vocab_size]),
            "expected token ids from 0 and below",
        ),
        (lambda prompts, trainer: trainer.generate([1, -1]), "expected token ids from 0 and below"),
        *[
            (
                partial(
                    lambda prompts, trainer, limit: trainer.generate(prompts[0], limit), limit=limit
                ),
                "max_tokens=.*: expected an integer from 1, or None",
            )
            for limit in (0, -1, 2.0, "2", True)
        ],
        (lambda prompts, trainer: 1 // 0, "ZeroDivisionError"),
        (too_long, "a prompt of 65 tokens: expected 1 to"),
        (
            lambda prompts, trainer: [trainer.generate(prompts[0])],
            "returned list: expected a dict or None",
        ),
    ],
)
def test_a_rollout_function_that_fails(function, reason):
    with pytest.raises(ShoalError, match=reason):
        play(rollout(function), requests([0]), tokenizer=Numbers())
    (group,) = play(rollout(function), requests([0]), tokenizer=Numbers(), on_error="skip")
    assert not group.valid.any() and {one.stop_reason for one in group.completions} == {
        StopReason.FAILED
    }


class Paying(Guess):
    def respond(self, message: str) -> str | None:
        answer = super().respond(message)
        self.reward = self.asked / 10
        return answer


def test_the_reward_of_a_turn_stands_in_its_message():
    (group,) = play(Sessions([], {"Paying": Paying}, EnvironmentSection()), requests([0]))
    for one in group.completions:
        rewards = []
        for message in one.messages:
            if "reward" in message:
                rewards.append(message["reward"])
        assert rewards == [0.1, 0.2, 0.3][: len(rewards)]
        asked = []
        for before, after in itertools.pairwise(one.messages):
            if after["role"] == "user":
                asked.append(before)
        assert len(rewards) >= len(asked) and all("reward" in message for message in asked)


def test_calls_of_one_turn_are_paid_for_each():
    called: list[str] = []
    sessions: Any = SimpleNamespace(
        kind_of=lambda columns: None, call=lambda key, name, arguments: called.append(name)
    )
    request = SimpleNamespace(example=Example(7, "question", {}), prompt_ids=np.array([1, 2]))
    player = TurnDriver(sessions, lambda columns: cast(Any, Format()), EnvironmentSection(), 20, 1)
    entry = cast(Any, SimpleNamespace(id=3, request=request, rollout_states=Counter()))
    one = Rollout(
        entry, 0, 0, "question", messages=[{"role": "assistant", "content": "three calls"}]
    )
    one.calls = [ToolCall(name, {}) for name in ("first", "second", "third")]
    for value, reward in (("a", 0.5), ("b", None)):
        assert player._take_reply(one, Reply(one.key, "call", value=value, reward=reward)) == []
    assert one.messages[0]["reward"] == 0.5
    one.calls.append(ToolCall("fourth", {}))
    assert player._take_reply(one, Reply(one.key, "call", value="c", reward=0.25)) == []
    assert one.messages[0]["reward"] == 0.75 and called == ["second", "third", "fourth"]


class Broken(Guess):
    def respond(self, message: str) -> str | None:
        raise RuntimeError("the board is gone")


@pytest.mark.slow
def test_an_environment_that_fails():
    with pytest.raises(
        ShoalError,
        match=r"the environment failed \(data row 0, rollout \d, turn \d: .*board is gone",
    ):
        play(Sessions([], {"b": Broken}, EnvironmentSection()), requests([0]))
    (group,) = play(Sessions([], {"b": Broken}, EnvironmentSection(on_error="zero")), requests([0]))
    assert StopReason.FAILED in {one.stop_reason for one in group.completions}


class Lost(EngineHost):
    """A host that is lost by the first message of a type."""

    calls: ClassVar[list[type]] = []

    def handle(self, message: Message) -> None:
        if type(message) in Lost.calls:
            Lost.calls.remove(type(message))
            raise HostLost("its process was killed")
        super().handle(message)


def test_a_host_that_is_lost_while_tools_answer_changes_no_bit(first, monkeypatch):
    monkeypatch.setattr(host_health, "MOST_PAUSE_SECONDS", 0.0)
    lost, engines = fleet(tools()), []

    def restart(name: str) -> Lost:
        engines.append(
            Engine(
                Model(MODEL, roles().sampler),
                slots=8,
                siblings_per_row=1,
                group_size=4,
                max_prompt_tokens=32,
                max_completion_tokens=LIMIT,
                eos_ids=EOS,
            )
        )
        return Lost(lambda purpose, size, engine=engines[-1]: engine, capacity=64)

    recounts: list[int] = []

    def recount(source: Fleet, guard: Any) -> Any:
        """What hosts wait for is counted at each change of a rollout, and never by looking through
        all of them."""
        found = play_moves(source, guard)
        for entry in source.ledger.entries.values():
            assert entry.num_idle == sum(one.state in IDLE for one in entry.rollouts)
            recounts.append(entry.num_idle)
        return found

    play_moves = Fleet._advance_turns
    monkeypatch.setattr(Fleet, "_advance_turns", recount)
    with opened(
        dataclasses.replace(lost, hosts={"a": restart("a")}, restart=restart, restarts=9)
    ) as source:
        Lost.calls[:] = [End, Extend, End]
        source.publish(0, random_parameters(MODEL))
        source.request(requests(range(6)))
        same(source.take(Purpose.TRAIN, 0), first)
        assert (
            not Lost.calls
            and len(engines) == 4
            and source.turn_driver
            and not source.turn_driver.rollouts
        )
        assert set(recounts) >= {0, 1, 4} and source.turn_driver._num_under_way.total() == 0


class Closed(Guess):
    """Cannot begin for one of two rollouts."""

    begun = 0

    def reset(self, question: str, apart: bool = False) -> str | None:
        Closed.begun += 1
        if Closed.begun % 2:
            raise ConnectionError("the server is full")
        return super().reset(question)


@pytest.mark.parametrize("policy", ["zero", "skip"])
def test_an_environment_that_cannot_begin_fails_its_rollout_alone(policy):
    sessions = Sessions([], {"c": Closed}, EnvironmentSection(on_error=policy))
    (group,) = play(sessions, requests([0]))
    failed = [one.stop_reason is StopReason.FAILED for one in group.completions]
    assert any(failed)
    for one, has_failed, reward in zip(group.completions, failed, group.rewards, strict=True):
        if has_failed:
            assert [message["role"] for message in one.messages] == ["assistant"] and len(one)
            np.testing.assert_equal(reward, 0.0 if policy == "zero" else np.nan)
    assert group.valid.tolist() == ([True] * 4 if policy == "zero" else [not one for one in failed])


def flood(numbers: list[int]) -> str:
    """Floods.

    Args:
        numbers: Any.
    """
    return "7" * 1000


def test_what_is_cut_of_an_answer_stands_in_its_message():
    flood.__name__ = "add"
    (group,) = play(Sessions([flood], {}, EnvironmentSection(result_bytes=1)), requests([0]))
    answers = []
    for one in group.completions:
        for message in one.messages:
            if message["role"] == "tool":
                answers.append(message)
    assert {"role": "tool", "name": "add", "content": "7", "truncated_bytes": 999} in answers


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda one: dataclasses.replace(one, token_ids=one.token_ids[::-1]),
            "does not go on from the tokens before it",
        ),
        (lambda one: one, "waits for its tools or is over"),
        (lambda one: one, "a turn of .* tokens, expected at most 1"),
    ],
)
def test_turns_of_a_host_that_is_out_of_order_are_refused(first, change, reason):
    """Each is answered a second time, with other tokens before the second turn or while its tools
    act."""
    whole = next(one for group in first for one in group.completions if not one.loss_mask.all())
    size = int(whole.loss_mask.cumprod().sum())
    turn = dataclasses.replace(
        whole,
        waits=True,
        **{
            name: getattr(whole, name)[:size]
            for name in ("token_ids", "logprobs", "loss_mask", "versions")
        },
    )
    with closing(tools()) as sessions:
        player = TurnDriver(sessions, lambda columns: Format(), sessions.section, 32, most=64)
        entry = PendingGroup(0, requests([0])[0])
        player.open([entry])
        assert not player.wrong_turns(entry, [turn])
        entry.rollouts[turn.index].tokens = turn.token_ids.tolist()
        state = RolloutState.ACTING if "waits" in reason else RolloutState.SAMPLING
        entry.rollouts[turn.index].state = state
        entry.rollouts[turn.index].turn_limit = int("at most 1" in reason)
        assert re.search(reason, player.wrong_turns(entry, [change(whole)]))
        entry.rollouts[turn.index].state = RolloutState.SAMPLING
        entry.rollouts[turn.index].turn_limit = len(whole) - size
        assert not player.wrong_turns(entry, [whole])


def test_an_evaluation_does_not_hold_up_training_nor_training_an_evaluation():
    with opened(fleet(tools())) as source:
        assert source.turn_driver is not None
        player, asked = dataclasses.replace(source.turn_driver, most=8), requests(range(8))
        source.ledger.add([dataclasses.replace(one, purpose=Purpose.EVALUATE) for one in asked[:4]])
        source.ledger.add(asked[4:])
        entries = list(source.ledger.entries.values())
        for before, begun in ((8, [0, 4, 5]), (4, [0, 1, 4])):
            # asked at once; the evaluation was there before
            player.open(entries[:before])
            player.open(entries)
            assert [number for number, one in enumerate(entries) if one.rollouts] == begun
            player.forget(entries)


def test_words_are_appended_to_the_last_users_message():
    prompt = []
    for role, content in (("system", "s"), ("user", "a"), ("assistant", "b")):
        prompt.append({"role": role, "content": content})
    assert (
        with_reset_text(prompt, "!")[1] == {"role": "user", "content": "a!"}
        and prompt[1]["content"] == "a"
    )
    assert with_reset_text("text", "!") == "text!"
    assert with_reset_text([], "hello") == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("words", "size"), [("x" * 10**7, "10000000 characters"), ("x" * 60, "70 tokens")]
)
def test_what_reset_returned_ends_its_rollout_where_it_is_too_long(words: str, size: str) -> None:
    dropped: list[Any] = []

    def kind_of(columns):
        return None

    sessions: Any = SimpleNamespace(drop=dropped.append, kind_of=kind_of)
    request = SimpleNamespace(example=Example(7, "question", {}), prompt_ids=np.array([1, 2]))
    for on_error in ("zero", "error"):
        player = TurnDriver(
            sessions,
            lambda columns: cast(Any, Format()),
            EnvironmentSection(on_error=on_error),
            20,
            1,
        )
        one = Rollout(
            cast(Any, SimpleNamespace(id=3, request=request, rollout_states=Counter())),
            0,
            0,
            "question",
        )
        reply = Reply(one.key, "open", value=words)
        if on_error == "error":
            with pytest.raises(
                ShoalError, match=f"row 7: with what its environment's reset returned.* {size}"
            ):
                player._take_reply(one, reply)
        else:
            assert player._take_reply(one, reply) == []
            assert one.failure is not None and size in one.failure.text
            assert one.prompt_ids is request.prompt_ids
    assert dropped == [(3, 0, 0)] * 2


def test_branches_keep_the_experts_of_their_prompts_and_tokens():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 9, size).astype(np.int32) for size in (3, 5)]
    parts = []
    for prompt, size in zip(prompts, (2, 4), strict=True):
        parts.append(
            Completion(
                0,
                0,
                np.arange(size, dtype=np.int32),
                np.zeros(size, np.float32),
                np.ones(size, bool),
                np.zeros(size, np.int32),
                StopReason.EOS,
                extra={"experts": rng.integers(0, 9, (size, 2, 3)).astype(np.uint8)},
                prompt_experts=rng.integers(0, 9, (len(prompt), 2, 3)).astype(np.uint8),
            )
        )
    joined = join_branches(prompts, parts)
    (branch,) = joined.branches
    assert joined.prompt_experts is parts[0].prompt_experts
    assert branch.experts is parts[1].prompt_experts and branch.start == 2
    expected = np.concatenate([part.extra["experts"] for part in parts])
    np.testing.assert_array_equal(joined.extra["experts"], expected)
