"""Runs whose rollouts have turns: the same bits however they are sampled, and an end whatever
environments do."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import descendants, gone
from tiny_runs import groups, metrics, parameters_of, read_lines, same_bits
from turn_runs import BOARD, TurnWorkshop, calling

import shoal
from shoal import cli
from shoal.chat.tokenizer import Tokenizer
from shoal.commands.replay import replay
from shoal.config.commands import ReplayConfig
from shoal.config.sections.reward import RewardSection
from shoal.job.rescore import score_again
from shoal.records import ShoalError, StopReason
from shoal.runs.groups import read_file
from shoal.runs.reader import StoredRun, read_config
from shoal.tasks.custom import rows_task
from shoal.tasks.task import Task
from shoal.workers.sessions import Reply, Sessions


@pytest.fixture(scope="module", autouse=True)
def calls() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        calling(patch)
        yield


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> TurnWorkshop:
    return TurnWorkshop(tmp_path_factory.mktemp("turns"))


@pytest.fixture(scope="module")
def here(turns: TurnWorkshop) -> Path:
    return turns.train("here")


def assert_same_run(a: Path, b: Path, steps: int = 3) -> None:
    for step in range(1, steps + 1):
        assert groups(a, step) == groups(b, step)
    assert same_bits(parameters_of(a, steps), parameters_of(b, steps))


@pytest.mark.slow
def test_the_run_has_every_kind_of_turn(here: Path) -> None:
    rows = metrics(here)
    for name in (
        "tools/failure_frequency",
        "completions/ended_by_max_turns",
        "completions/ended_by_environment",
        "completions/ended_by_length",
    ):
        assert sum(row[name] for row in rows) > 0, name
    assert any(
        "own_prompt_ids" in one
        for step in (1, 2, 3)
        for group in groups(here, step)
        for one in group["completions"]
    )
    assert max(row["turns/max"] for row in rows) == 6


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_think", "gemma4", "gpt_oss", "mistral"])
def test_turns_in_other_chat_forms_train(tmp_path: Path, family: str) -> None:
    """Whatever a random model says in the form of a family, its rollouts go on, and are learned."""
    workshop = TurnWorkshop(tmp_path, family=family)
    folder = workshop.train("run", "steps=2", "environment.history=template")
    rows = metrics(folder)
    assert len(rows) == 2
    for row in rows:
        assert np.isfinite(row["loss"]) and row["grad_norm"] > 0
        assert row["turns/max"] > 1
        # what answers, as context or in the prompt of a branch
        assert row["tokens/context"] + row["turns/branches"] > 0
    tokenizer = Tokenizer.load(workshop.model)
    for group in groups(folder, 2):
        for one in group["completions"]:
            assert one["text"] == tokenizer.text(one["token_ids"])


@pytest.mark.slow
def test_in_a_thread_with_more_rollouts_than_places_it_is_the_same_run(
    turns: TurnWorkshop, here: Path
) -> None:
    assert_same_run(
        here,
        turns.train(
            "thread",
            "mesh.trainer=1",
            "mesh.sampler=1",
            "sampling.slots_per_device=4",
            "environment.rollouts=16",
        ),
    )


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.slow
def test_killed_while_tools_answer_and_resumed_it_is_the_same_run(
    turns: TurnWorkshop, here: Path, monkeypatch
) -> None:
    collect, calls = Sessions.collect, 0

    def dies(self: Sessions, seconds: float = 0.0) -> list[Reply]:
        nonlocal calls
        replies = collect(self, seconds)
        calls += bool(replies)
        if calls == 30:  # in the second step
            raise Killed
        return replies

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Sessions, "collect", dies)
        cli.main(turns.words("killed", "checkpoint.every=1"))
    assert len(metrics(turns.runs / "killed")) < 3
    assert_same_run(here, turns.train("killed", "checkpoint.every=1"))


PAYS = BOARD.replace("self.asked += 1", "self.asked += 1; self.reward = self.asked / 100")
BY_TURN = ("algorithm.credit=turn", "algorithm.advantage=rloo", "steps=2", "train.max_staleness=0")


@pytest.mark.slow
def test_turns_are_paid_trained_on_stored_and_scored_again(tmp_path: Path) -> None:
    """With credit by turn: a run that is resumed is the same, one with credit by completion samples
    the same first step and learns something else from it."""
    workshop = TurnWorkshop(tmp_path, source=PAYS)
    folder = workshop.train("by turn", *BY_TURN, "checkpoint.every=1")
    several = 0
    for step in (1, 2):
        for stored in read_file(folder / "groups" / f"step_{step:06d}.parquet"):
            for index, completion in enumerate(stored.group.completions):
                rewards = stored.group.turn_rewards[index]
                assert len(rewards) == len(completion.turns) == len(stored.turn_advantages[index])
                assert rewards.sum() == pytest.approx(stored.group.rewards[index])
                several += len({*stored.turn_advantages[index].tolist()}) > 1
    assert several
    first = metrics(folder)[0]
    assert first["turns/share/1"] == 1 and first["turns/share/2"] < 1
    assert first["turns/length/1"] > 0 and "turns/reward/1" in first
    # One step, then the other from its checkpoint.
    workshop.train("resumed", *BY_TURN, "steps=1", "checkpoint.every=1")
    assert_same_run(folder, workshop.train("resumed", *BY_TURN, "checkpoint.every=1"), 2)
    whole = workshop.train("whole", "algorithm.advantage=rloo", *BY_TURN[2:])
    for by_turn, by_completion in zip(groups(folder, 1), groups(whole, 1), strict=True):
        for one, other in zip(by_turn["completions"], by_completion["completions"], strict=True):
            assert "turn_rewards" not in other
            for name in ("token_ids", "logprobs", "reward"):
                assert one[name] == other[name]
    assert not same_bits(parameters_of(folder, 2), parameters_of(whole, 2))
    # A function that returns a list a completion; what the environment was is not stored.
    scores = tmp_path / "scores.py"
    scores.write_text(
        "def paid(completions, **_):\n"
        "    return [[m.get('reward', 0.0) for m in one if m['role'] == 'assistant']\n"
        "            for one in completions]\n"
    )
    again = score_again(StoredRun(folder), RewardSection(functions=(f"{scores}:paid",)), step=1)
    assert len(again["groups"]) == 2
    assert np.abs(again["groups"][0]["advantages"]).max() > 0


OTHERS = """\
from shoal.algorithm.advantage import by_turn, returns_to_go


def others(rewards, valid, **more):
    return by_turn(returns_to_go(rewards, 1.0), valid, divided=False)
"""


@pytest.mark.slow
def test_a_function_of_ones_own_is_the_run_of_what_it_computes(tmp_path: Path, capsys) -> None:
    workshop = TurnWorkshop(tmp_path, source=PAYS)
    file = tmp_path / "advantages.py"
    file.write_text(OTHERS)
    own = (BY_TURN[0], f"algorithm.advantage={file}:others", *BY_TURN[2:], "checkpoint.every=1")
    folder = workshop.train("by function", *own)
    assert_same_run(workshop.train("by name", *BY_TURN), folder, 2)
    scores = tmp_path / "scores.py"
    scores.write_text(
        "def length(completions, **_): return [float(len(one)) for one in completions]"
    )
    section = RewardSection(functions=(f"{scores}:length",))
    again = score_again(StoredRun(folder), section, step=1)
    assert np.abs(again["groups"][0]["advantages"]).max() > 0
    # The weights of the second step are learned again from the groups of the first.
    for saved in (folder / "checkpoints").iterdir():
        shutil.rmtree(saved)
    replayed = replay(ReplayConfig(run=str(folder), step=2, group=0))
    assert replayed["identical"] and replayed["weights"]["updates_retrained"] == 1
    # One step, then the other with a file that is another one.
    workshop.train("changed", *own, "steps=1")
    file.write_text(OTHERS.replace("return by_turn", "return 2 * by_turn"))
    capsys.readouterr()
    changed = workshop.train("changed", *own)
    assert "the file of advantage others, or one that it imports, has changed" in "".join(
        capsys.readouterr()
    )
    first, second = (groups(folder, 2), groups(changed, 2))
    for one, other in zip(first[0]["completions"], second[0]["completions"], strict=True):
        assert other["turn_advantages"] == [2 * value for value in one["turn_advantages"]]


@pytest.mark.slow
def test_what_is_wrong_with_payments_and_advantages_ends_the_run(tmp_path: Path, capsys) -> None:
    paid = PAYS.replace("self.asked / 100", "float('nan') if self.asked == 2 else 0.01")
    workshop = TurnWorkshop(tmp_path, source=paid)
    capsys.readouterr()
    assert cli.main(workshop.words("nan", *BY_TURN)) == 2
    assert "returned nan among the rewards of turns for" in capsys.readouterr().err
    skipping = ("reward.on_error=skip", "reward.max_failed_share=1")
    row = metrics(workshop.train("skips", *BY_TURN, "steps=1", *skipping))[0]
    assert row["rewards/failed/Board"] > 0 and np.isfinite(row["loss"])
    file = tmp_path / "advantages.py"
    file.write_text(
        "from itertools import count\n"
        "calls = count()\n"
        "def counts(rewards, **others): return rewards + next(calls)\n"
    )
    capsys.readouterr()
    assert cli.main(workshop.words("counts", f"algorithm.advantage={file}:counts")) == 2
    assert "advantage function 'counts' is not deterministic" in capsys.readouterr().err


@pytest.mark.slow
def test_words_of_the_environment_are_learned(tmp_path: Path) -> None:
    """By their cross-entropy alone, whose mean falls; without it nothing is learned."""
    workshop = TurnWorkshop(tmp_path)
    file = tmp_path / "advantages.py"
    file.write_text("def zero(rewards, **others): return 0 * rewards\n")
    words = (f"algorithm.advantage={file}:zero", "train.max_staleness=0", "optimizer.lr=0.01")
    rows = metrics(workshop.train("learns", *words, "steps=6", "algorithm.context_coef=0.5"))
    values = [row["context/nll"] for row in rows]
    assert values[-1] < 0.8 * values[0], values
    for row in rows:
        assert row["loss"] == pytest.approx(0.5 * row["context/nll"], rel=1e-5)
        assert row["objective"] == 0 and row["grad_norm"] > 0
    for row in metrics(workshop.train("without", *words, "steps=2")):
        assert row["loss"] == row["grad_norm"] == 0 and "context/nll" not in row


@pytest.mark.slow
def test_newest_weights_and_an_evaluation_between_steps(turns: TurnWorkshop) -> None:
    """Tokens of a rollout may be of several versions; what was asked of a version is sampled from
    no older one."""
    run = turns.train(
        "newest",
        "mesh.trainer=1",
        "mesh.sampler=1",
        "train.versions=newest",
        "steps=4",
        "sampling.slots_per_device=4",
        "environment.rollouts=16",
        "train.evaluate_every=1",
        "train.max_staleness=2",
    )
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
    assert len(read_lines(run / "evaluations.jsonl")) == 5
    for step in range(1, 5):
        for stored in read_file(run / "groups" / f"step_{step:06d}.parquet"):
            sampled = np.concatenate([one.sampled_versions for one in stored.group.completions])
            assert stored.group.version == sampled.min() >= step - 3 and sampled.max() < step
    assert replay(ReplayConfig(run=str(run), step=3, group=0))["identical"]


@pytest.mark.slow
def test_replay_samples_every_group_again(here: Path) -> None:
    for step, number in ((1, 0), (2, 1), (3, 0)):
        result = replay(ReplayConfig(run=str(here), step=step, group=number))
        assert result["identical"], (step, number, result["difference"])


FUNCTION = '''
from shoal import generate_rollout_completions


def once(prompts, trainer):
    """One turn with a limit of its own, and no message."""
    return {"lengths": [[len(trainer.generate(prompts[0], max_tokens=3)["completion_ids"])]]}


def play(prompts, trainer):
    """Asks twice: what was sampled is said again, then something else."""
    tokenizer, messages = trainer.processing_class, list(prompts[0])
    prompt = tokenizer.apply_chat_template(messages, tokenize=False)
    first, = generate_rollout_completions(trainer, [prompt])
    messages += [{"role": "assistant", "content": first["text"]},
                 {"role": "user", "content": "Again"}]
    second = trainer.generate(messages)
    more = tokenizer.encode("More")
    third = trainer.generate(second["prompt_ids"] + second["completion_ids"] + more)
    ids = [one["completion_ids"] for one in (first, second, third)]
    return {"completion_ids": [sum(ids, [])], "lengths": [[len(one) for one in ids]]}


def even(completions, lengths, answer, **columns):
    return [0.0 if one is None else max(one) % 7 for one in lengths]
'''


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["template", "function"])
def test_branches_are_trained_on_stored_and_sampled_again(turns: TurnWorkshop, kind) -> None:
    (file := turns.folder / "function.py").write_text(FUNCTION)
    if kind == "template":
        words = ["environment.history=template"]
    else:
        words = ["environment=", f"rollout={file}:play", f"reward={file}:even"]
    run = turns.train(f"branches_{kind}", *words, "train.max_staleness=0", "steps=2")
    assert sum(row["turns/branches"] for row in metrics(run)) > 0
    compared = 0
    for step in (1, 2):
        for number, stored in enumerate(read_file(run / "groups" / f"step_{step:06d}.parquet")):
            for one, arrays in zip(stored.group.completions, stored.token_arrays, strict=True):
                if arrays:
                    # with weights of the same version the trainer finds what the sampler found
                    gap = np.abs(arrays["trainer_logprobs"] - one.logprobs)[one.loss_mask]
                    assert gap.max() < 2e-5, (step, number, one.branches)
                    compared += len(one.branches)
            result = replay(ReplayConfig(run=str(run), step=step, group=number, likeliest=1))
            assert result["identical"], result["difference"]
    assert compared > 5


@pytest.mark.slow
def test_one_turn_that_its_own_limit_cuts_is_sampled_again(turns: TurnWorkshop) -> None:
    """Nothing but its length says so: it has no context and no message."""
    (file := turns.folder / "function.py").write_text(FUNCTION)
    run = turns.train(
        "once",
        "environment=",
        f"rollout={file}:once",
        f"reward={file}:even",
        "train.max_staleness=0",
        "steps=1",
        "train.evaluate_every=0",
    )
    cut = 0
    for number, stored in enumerate(read_file(run / "groups" / "step_000001.parquet")):
        cut += sum(one.stop_reason is StopReason.LENGTH for one in stored.group.completions)
        assert max(map(len, stored.group.completions)) == 3
        result = replay(ReplayConfig(run=str(run), step=1, group=number))
        assert result["identical"], result["difference"]
    assert cut


class Owner:
    """Owns its data: what is asked follows from the number of the row."""

    def reset(self, row: int) -> str:
        self.row = row
        return f"Row {row % 97}"

    def respond(self, message: str) -> str | None:
        return None

    def get_reward(self) -> float:
        return float(self.row % 2)


@pytest.mark.slow
def test_an_environment_from_python_that_owns_its_data(turns: TurnWorkshop) -> None:
    words = (word.partition("=") for word in turns.words("owner")[1:])
    given: dict[str, Any] = {}
    for name, _, value in words:
        if not name.startswith(("task", "environment", "reward")):
            given[name] = value
    run = turns.runs / "owner"
    given["steps"] = 1
    result = shoal.train(**given, task="environment", environment=Owner, task__num_eval_questions=4)
    assert (
        result.metrics["turns/mean"][0] >= 1 and "python:Owner" in (run / "config.yaml").read_text()
    )
    for stored in read_file(run / "groups" / "step_000001.parquet"):
        row, group = stored.group.example.row, stored.group
        assert group.example.columns["row"] == row and set(group.rewards) == {row % 2}
    with pytest.raises(
        ShoalError, match=r"environment 'python:Other' came from Python: pass it again in Python"
    ):
        shoal.train(resume=str(run), steps=2, environment="python:Other")
    rows = rows_task(
        [{"prompt": [{"role": "user", "content": "Row"}], "row": n} for n in range(9)],
        "train",
        None,
        2,
    )
    task = Task("mine", rows.train, environments={"Owner": Owner})
    given["run_name"] = "mine"
    shoal.train(**given, task=task)
    assert read_config(turns.runs / "mine").turns == "environments"


CHAOS = (
    BOARD
    + '''

import os, signal, subprocess, time


class Chaos(Board):
    def reset(self, answer: str, **columns) -> str | None:
        if int(answer) % 5 == 3:
            raise ConnectionError("the server is full")
        return super().reset(answer)

    def look(self, number: int) -> str:
        """Looks.

        Args:
            number: Where.
        """
        if number % 4 == 1:
            raise RuntimeError("no")
        return self._act(number)

    def respond(self, message: str) -> str | None:
        return self._act(len(message) + self.row)

    def _act(self, number):
        self.asked += 1
        kind = (number + self.asked) % 8
        if kind == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == 1 and self.row % 4 == 1:
            time.sleep(1000)
        if kind == 2 and self.row % 3:
            return "f" * 1_000_000
        if kind == 3:
            return b"\\xff\\xfe"
        if kind == 4:
            return "\\ud800 half a character"
        if kind == 5:
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        return super().respond("x" * (number % 9))

    def get_reward(self) -> float:
        return float("nan") if self.row % 7 == 0 else 1.0


def calm(completions, environments, **columns):
    return [len(one) + (environment.asked or 0)
            for one, environment in zip(completions, environments)]
'''
)


@pytest.mark.slow
def test_a_run_ends_whatever_environments_do_and_everything_is_counted(
    turns: TurnWorkshop, capsys
) -> None:
    (file := turns.folder / "chaos.py").write_text(CHAOS)
    before = descendants()
    # as for two prompts: the programs of `here`
    run = turns.train(
        "chaos",
        f"environment={file}:Chaos",
        f"reward={file}:calm",
        "environment.on_error=skip",
        "environment.timeout_seconds=2",
        "environment.result_bytes=40",
        "batch.prompts_per_step=6",
        "sampling.slots_per_device=8",
    )
    for pid in descendants() - before:
        assert gone(pid)
    rows = metrics(run)
    stored = []
    for step in (1, 2, 3):
        for one in read_file(run / "groups" / f"step_{step:06d}.parquet"):
            stored.append(one)
    rollouts = []
    for entry in stored:
        for both in zip(entry.group.completions, entry.group.valid, strict=True):
            rollouts.append(both)
    failed = sum(one.stop_reason is StopReason.FAILED for one, _ in rollouts)
    assert failed > 0 and sum(
        24 * row["completions/ended_by_failed"] for row in rows
    ) == pytest.approx(failed)
    # of some get_reward has failed, after the rollout had ended
    unscored = sum(not valid for _, valid in rollouts)
    assert sum(row["rewards/failed/environment"] for row in rows) == unscored > failed
    said = capsys.readouterr().out
    for text in (
        "warning: an environment failed: ",
        "environment: raised for",
        "environment: died for",
    ):
        assert text in said
    assert sum(row["tools/truncated_bytes"] for row in rows) >= 10**6 - 40
    assert sum(row["tools/failure_frequency"] for row in rows) > 0
    assert not any(valid for one, valid in rollouts if one.stop_reason is StopReason.FAILED)
    # reset fails for all of a row's rollouts
    assert sum(row["groups/unscorable"] for row in rows) > 0


HANGING = (
    BOARD
    + """

import pathlib, time


class Hanging(Board):
    def respond(self, message: str) -> str | None:
        if pathlib.Path('REACHED').with_name("hang").exists():
            pathlib.Path('REACHED').touch()
            time.sleep(1000)
        return super().respond(message)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [(), ("mesh.trainer=1", "mesh.sampler=1")], ids=["the caller's thread", "a thread"]
)
def test_a_stop_does_not_wait_for_an_environment_that_hangs(
    turns: TurnWorkshop, words, tmp_path, capfd
) -> None:
    reached, before = tmp_path / "reached", descendants()
    (file := tmp_path / "acts.py").write_text(HANGING.replace("REACHED", str(reached)))
    name = f"hanging{len(words)}"
    words = (
        f"environment={file}:Hanging",
        "environment.timeout_seconds=400",
        "checkpoint.every=1",
        *words,
    )
    turns.train(name, *words, "steps=1")
    (tmp_path / "hang").touch()

    def ask() -> None:
        while not reached.exists():
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    code = cli.main(turns.words(name, *words, "steps=2"))
    asking.join()
    error = capfd.readouterr().err
    # else the call is waited for
    assert code == 130 and "stopped after step 1 of 2, which is saved" in error, error
    for pid in descendants() - before:
        assert gone(pid)
