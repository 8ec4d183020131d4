"""Scores stored groups, and answers made elsewhere, with rewards, without a model.

    groups/step_* -> RewardPool -> rewards, advantages by the step's own settings
                  -> compared with the stored ones
    responses.jsonl -> matched with the task's examples -> rewards

Counts the advantages that change their sign, and reports what is suspicious about the new reward.
"""

from __future__ import annotations

import json
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shoal.algorithm.advantage import nonzero_std
from shoal.buckets import address
from shoal.chat.tokenizer_files import read_date
from shoal.config.keywords import ROWS, names_object
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.config.train import Config
from shoal.job.task import find_functions, load_task, with_overlong
from shoal.records import (
    GOLD_COLUMNS,
    Example,
    Failure,
    Purpose,
    RewardFunction,
    ShoalError,
    ground_truth,
)
from shoal.report.console import Console
from shoal.rewards.loading import name_functions
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Scores
from shoal.runs.diagnosis import Figure, diagnose, figures_with_critic
from shoal.runs.groups import read_file
from shoal.runs.layout import MODEL_FOLDER
from shoal.runs.lines import json_ready
from shoal.runs.metrics import known_mean, wilson_interval
from shoal.runs.reader import StoredRun
from shoal.tasks.generated import LazyRows
from shoal.tasks.splits import evaluating
from shoal.tasks.task import Task
from shoal.text import count
from shoal.trainer.own_advantage import OwnAdvantage, load_advantage
from shoal.trainer.step_table import StepTable

NUM_SHOWN = 5
"""Most completions that are shown in full."""


def score_again(run: StoredRun, reward: RewardSection, step: int = 0) -> dict[str, Any]:
    """Scores the stored training groups of a run with `reward.functions` (by default the run's own)
    and the penalty on long completions that each step had, a step at a time. Returns a record
    for JSON that compares the new rewards with the stored ones: `comparison`, with pairs [stored,
    new]; `lint`, what is suspicious about the new reward; `hacks`, completions that may exploit it;
    `functions` with their weights, of the penalty the last; and numbers of steps, groups and
    completions.

    Nothing is written. `step`, from 1: only this step is scored, and the record has its `groups` in
    full; 0: all steps, and `groups` is None. ShoalError if the run has no stored groups, or not
    this step. Only numbers of a scored step stay in memory, not its texts, so that a run may have
    any length.
    """
    files = run.require_groups()
    if step and step not in files:
        run.groups(step)  # raises: it lists the steps that exist
    chosen = [step] if step else list(files)
    reward = with_functions_of_run(reward, run.config.reward)
    functions = reward_functions(reward, run.config)
    if any(spec.startswith("model:") for spec in reward.functions):
        from shoal.job.reward_model import reward_models  # imports JAX

        for model in reward_models(functions):
            model.date = read_date(run.path / MODEL_FOLDER)
    steps = []
    weights: dict[str, float] = {}
    own_advantages: dict[str, OwnAdvantage | None] = {}  # by `algorithm.advantage`

    def penalty_of_step(number: int) -> tuple[RewardSection, int]:
        """Returns the settings of the penalty on long completions in a step, and the length of the
        longest: the penalty that `reward` sets, or, if it sets none, that of the run."""
        # Steps of files count from 1, those of `config_at` from 0.
        config = run.config_at(number - 1)
        section = reward if reward.overlong_buffer_tokens else config.reward
        return section, config.sampling.max_completion_tokens

    # A resume may have changed the penalty: the steps before and after it have their own.
    for (section, max_tokens), numbers in groupby(chosen, penalty_of_step):
        penalized = with_overlong(functions, section, max_tokens)
        weights |= {function.name: function.weight for function in penalized}
        with closing(RewardPool(penalized, reward, run.config.steps)) as pool:
            for number in numbers:
                algorithm = run.config_at(number - 1).algorithm
                if algorithm.advantage not in own_advantages:
                    own_advantages[algorithm.advantage] = load_advantage(algorithm)
                own_advantage = own_advantages[algorithm.advantage]
                steps.append(rescore_step(number, files[number], pool, algorithm, own_advantage))
    old_rewards = []
    new_rewards = []
    old_signal = new_signal = 0
    num_groups = num_completions = 0
    num_flipped = num_not_stored = 0
    for rescored in steps:
        old_rewards.append(rescored.old.rewards[rescored.both])
        new_rewards.append(rescored.new.rewards[rescored.both])
        old_signal += int(nonzero_std(rescored.old.rewards, rescored.old.valid).sum())
        new_signal += int(nonzero_std(rescored.new.rewards, rescored.new.valid).sum())
        num_groups += len(rescored.rows)
        num_completions += rescored.new.valid.size
        num_flipped += int(rescored.flipped.sum())
        num_not_stored += rescored.not_stored
    old = np.concatenate(old_rewards)
    new = np.concatenate(new_rewards)
    groups = None
    if step:
        groups = [steps[0].record(number) for number in range(len(steps[0].rows))]
    return json_ready(
        {
            "run": address(run.path),
            "finished": run.is_finished,
            "steps": chosen,
            "num_groups": num_groups,
            "num_completions": num_completions,
            "functions": weights,
            "comparison": {
                "completions_compared": len(old),
                "reward_mean": [known_mean(old), known_mean(new)],
                "nonzero_std_groups": [old_signal, new_signal],
                "advantages_flipped": num_flipped,
            },
            "lint": lint_reward(steps, reward.on_error == "skip", run.config.algorithm.has_critic),
            "hacks": find_hacks(steps, files, old, new),
            "advantages_not_stored": num_not_stored,
            "groups": groups,
        }
    )


def with_functions_of_run(reward: RewardSection, of_run: RewardSection) -> RewardSection:
    """Returns the settings with which a run's completions are scored again: `reward`, or, if it
    names no function, `reward` with the functions, weights, judge and preset of the run, as far as
    they are not given. Functions that came from Python are left out."""
    if reward.functions:
        return reward
    default = RewardSection()
    changes: dict[str, Any] = {}
    for name in ("functions", "weights", "judge", "preset"):
        if getattr(reward, name) == getattr(default, name):
            changes[name] = getattr(of_run, name)
    if names_object(of_run.functions):
        changes["functions"] = ()
        changes["weights"] = reward.weights
    return replace(reward, **changes)


def reward_functions(reward: RewardSection, run: Config) -> tuple[RewardFunction, ...]:
    """Loads and returns the functions with which a run's completions are scored again: those of
    `reward.functions`, or, if there are none, the task's own, for which its data is loaded. The
    penalty on long completions is not among them. ShoalError if the task has none."""
    if reward.functions:
        return name_functions(find_functions(reward, reward.functions), reward.weights)
    if run.task.name == ROWS:
        raise ShoalError(
            "the data of this run came from Python, which has no reward of its own: name one, "
            "reward=file.py:function",
            "reward.functions",
        )
    return load_task(run.task, reward).rewards


@dataclass(frozen=True)
class RescoredStep:
    """The groups of one step with their stored and their new scores; arrays are [P, G]."""

    step: int
    rows: list[int]  # for each group the number of its data row
    old: StepTable  # stored rewards; advantages computed from them by the stored settings
    new: StepTable
    components: list[Mapping[str, np.ndarray]]  # for each group: new function -> its scores
    old_advantages: np.ndarray  # those trained on; computed from the settings if none were stored
    not_stored: int  # groups without stored advantages
    seconds: float  # wall time: worker processes score at the same time
    failed: Counter[str]  # `function: kind` -> failures
    failed_completions: Counter[str]  # function -> completions for which it failed
    first_failure: str | None

    @property
    def both(self) -> np.ndarray:
        """Mask of completions that both rewards scored."""
        return self.new.valid & self.old.valid

    @property
    def flipped(self) -> np.ndarray:
        """Mask of completions whose advantage is positive by one reward and negative by the
        other."""
        return self.both & (
            np.sign(self.new.completion_advantages) * np.sign(self.old_advantages) < 0
        )

    def record(self, n: int) -> dict[str, Any]:
        """Returns the group at index `n` of the step as a dict: its step, index and data row, and
        its rewards, scores and advantages, stored (`old_`) and new, as arrays [G]."""
        return {
            "step": self.step,
            "group": n,
            "row": self.rows[n],
            "old_rewards": self.old.rewards[n],
            "rewards": self.new.rewards[n],
            "components": self.components[n],
            "old_advantages": self.old_advantages[n],
            "advantages": self.new.completion_advantages[n],
        }


def rescore_step(
    step: int,
    file: Path,
    pool: RewardPool,
    algorithm: AlgorithmSection,
    own_advantage: OwnAdvantage | None = None,
) -> RescoredStep:
    """Scores the groups in a step's file and returns them with their stored and new scores. `step`:
    its number in the file's name, from 1. The functions are called for a group at a time, in order,
    as in a run. `algorithm`: the settings by which advantages are computed; `own_advantage`: the
    user's function that they name, None if they name none. Waits until all are scored; the pool
    stays open."""
    stored = read_file(file)
    groups = [entry.group for entry in stored]
    started = time.perf_counter()
    ids: list[list[list[int]]] = []
    messages = []
    num_turns = []
    for group in groups:
        ids_of_group = []
        messages_of_group = []
        num_turns.append([len(completion.turns) for completion in group.completions])
        for completion in group.completions:
            ids_of_group.append(completion.token_ids[completion.loss_mask].tolist())
            messages_of_group.append(completion.messages)
        ids.append(ids_of_group)
        messages.append(messages_of_group)
    scores_of_groups = score_texts(
        pool,
        [group.example for group in groups],
        [group.texts for group in groups],
        ids,
        groups[0].step,
        messages=messages,
        num_turns=num_turns,
        purpose=groups[0].purpose,
    )
    seconds = time.perf_counter() - started
    weights = {function.name: function.weight for function in pool.functions}
    failed: Counter[str] = Counter()
    failed_completions: Counter[str] = Counter()
    first_failure = None
    rescored = []
    for group, scores in zip(groups, scores_of_groups, strict=True):
        for failure in scores.failures:
            first_failure = first_failure or failure.text
            failed[f"{failure.function}: {failure.kind}"] += 1
            if failure.completion is not None:
                failed_completions[failure.function] += 1
        # [1, G] -> [G]
        components = {name: values[0] for name, values in scores.components.items()}
        rescored.append(
            replace(
                group,
                rewards=scores.rewards[0],
                valid=scores.valid[0],
                reward_weights=weights,
                reward_components=components,
                turn_rewards=tuple(scores.turn_rewards[0]) if scores.turn_rewards else (),
            )
        )
    old = StepTable.of(groups, algorithm, own_advantage=own_advantage)
    new = StepTable.of(rescored, algorithm, own_advantage=own_advantage)
    old_advantages = []
    not_stored = 0
    for number, entry in enumerate(stored):
        if entry.advantages is None:
            not_stored += 1
            old_advantages.append(old.completion_advantages[number])
        else:
            old_advantages.append(entry.advantages)
    return RescoredStep(
        step=step,
        rows=[group.example.row for group in groups],
        old=old,
        new=new,
        components=[group.reward_components for group in rescored],
        old_advantages=np.stack(old_advantages),
        not_stored=not_stored,
        seconds=seconds,
        failed=failed,
        failed_completions=failed_completions,
        first_failure=first_failure,
    )


# ---- what is suspicious


def find_hacks(
    steps: Sequence[RescoredStep], files: Mapping[int, Path], old: np.ndarray, new: np.ndarray
) -> list[dict[str, Any]]:
    """Finds completions that may exploit the new reward: it scores them above its median, although
    the stored reward gave them its lowest value. Returns the records (keys `step`, `group`,
    `completion`, `text`, `old_reward`, `reward`; steps count from 1, groups and completions from 0)
    of at most NUM_SHOWN of them, the highest new rewards first, with their texts from `files` (step
    -> file); empty if the stored rewards are all equal. `old`, `new`: the rewards of all
    completions that have both."""
    if not len(old) or old.min() == old.max():
        return []
    lowest = old.min()
    median = np.median(new)
    candidates = []  # new reward, step, group, completion
    for rescored in steps:
        was_lowest = rescored.old.rewards == lowest
        is_high = rescored.new.rewards > median
        for group, completion in np.argwhere(rescored.both & was_lowest & is_high).tolist():
            reward = rescored.new.rewards[group, completion]
            candidates.append((reward, rescored.step, group, completion))
    # The sort is stable: equal rewards stay in the order of steps and groups.
    candidates.sort(key=itemgetter(0), reverse=True)
    hacks = []
    for reward, step, group, completion in candidates[:NUM_SHOWN]:
        text = read_file(files[step])[group].group.texts[completion]
        hacks.append(
            {
                "step": step,
                "group": group,
                "completion": completion,
                "text": text,
                "old_reward": lowest,
                "reward": reward,
            }
        )
    return hacks


def lint_reward(
    steps: Sequence[RescoredStep], skips_failures: bool, has_critic: bool
) -> dict[str, Any]:
    """Returns figures about the new reward (its distribution, cost and failures) as a record for
    JSON, with the `warnings` that follow from them, a list of texts. `none` counts for each
    function the completions to which it gave no score, without those for which it failed; `failed`
    has failures by `function: kind`. Figures of rewards are over valid completions, None if there
    are none. `skips_failures`: True if completions for which a function fails get no score
    (`reward.on_error=skip`). `has_critic`: True if a critic judges the groups, which learns from
    those with one reward too."""
    valid_rewards = []
    valid_lengths = []
    constant_groups = []
    failed: Counter[str] = Counter()
    failed_completions: Counter[str] = Counter()
    without_score: Counter[str] = Counter()
    first_failure = None
    seconds = 0.0
    num_completions = 0
    unscorable = 0
    for rescored in steps:
        valid_rewards.append(rescored.new.rewards[rescored.new.valid])
        valid_lengths.append(rescored.new.lengths[rescored.new.valid])
        constant_groups.append(~nonzero_std(rescored.new.rewards, rescored.new.valid))
        failed += rescored.failed
        failed_completions += rescored.failed_completions
        for components in rescored.components:
            for name, values in components.items():
                without_score[name] += int(np.isnan(values).sum())
        first_failure = first_failure or rescored.first_failure
        seconds += rescored.seconds
        num_completions += rescored.new.valid.size
        unscorable += int((~rescored.new.valid).sum())
    if skips_failures:  # a failure's score is NaN, like the score of a function that returns None
        without_score.subtract(failed_completions)
    rewards = np.concatenate(valid_rewards)
    lengths = np.concatenate(valid_lengths)
    is_constant = np.concatenate(constant_groups)
    std = smallest = largest = None
    if len(rewards):
        std = float(rewards.std())
        smallest = float(rewards.min())
        largest = float(rewards.max())
    figures = {
        "mean": known_mean(rewards),
        "std": std,
        "min": smallest,
        "max": largest,
        "num_distinct": len(np.unique(rewards)),
        "share_of_constant_groups": float(np.mean(is_constant)),
        "seconds_per_completion": seconds / num_completions,
        "correlation_with_length": rank_correlation(lengths, rewards),
        "none": dict(without_score),
        "failed": dict(failed),
        "first_failure": first_failure,
        "unscorable": unscorable,
    }
    diagnosed = _diagnosed_figures(figures, len(is_constant))
    if has_critic:
        diagnosed = figures_with_critic(diagnosed)
    diagnoses = diagnose(diagnosed)
    return figures | {"warnings": [diagnosis.text for diagnosis in diagnoses]}


def _diagnosed_figures(lint: Mapping[str, Any], num_groups: int) -> list[Figure]:
    """Returns the figures that `diagnose` judges, made from the record `lint` of `lint_reward`. A
    figure that was not measured is left out, like constant groups if all rewards are equal."""
    diagnosed = [Figure("distinct_rewards", lint["num_distinct"])]
    if lint["num_distinct"] > 1:
        words = {"number": "the groups"}
        share = lint["share_of_constant_groups"]
        diagnosed.append(Figure("constant_groups", share, groups=num_groups, words=words))
    correlation = lint["correlation_with_length"]
    if correlation is not None:
        words = {"correlation": correlation, "longer": "longer" if correlation > 0 else "shorter"}
        diagnosed.append(Figure("length_rank_correlation", abs(correlation), words=words))
    diagnosed.append(Figure("seconds_per_completion", lint["seconds_per_completion"]))
    for name, number in lint["none"].items():
        words = {"number": count(number, "completion")}
        diagnosed.append(Figure("function_without_score", number, subject=name, words=words))
    if lint["failed"]:
        kinds = ", ".join(f"{what}: {number}" for what, number in lint["failed"].items())
        words = {"kinds": kinds, "first_failure": lint["first_failure"]}
        diagnosed.append(Figure("failed_completions", sum(lint["failed"].values()), words=words))
    return diagnosed


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Returns Spearman's rank correlation, in which ties share their mean rank; None if a or b is
    constant or has fewer than two values."""
    if len(a) < 2 or a.min() == a.max() or b.min() == b.max():
        return None
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Returns the rank of each value, from 1 for the smallest; equal values share their mean
    rank."""
    _, value_index, counts = np.unique(values, return_inverse=True, return_counts=True)
    # The last rank of each distinct value, moved to the middle of the ranks that it takes.
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    return mean_rank[value_index]


# ---- scores


def _no_progress(done: int, total: int) -> None:
    """Does nothing; stands in for a function that reports progress."""


def score_texts(
    pool: RewardPool,
    examples: Sequence[Example],
    texts: Sequence[Sequence[str]],
    token_ids: Sequence[Sequence[Sequence[int]]],
    step: int = 0,
    progress: Callable[[int, int], None] = _no_progress,
    messages: Sequence[Sequence[Sequence[Mapping[str, Any]]]] = (),
    num_turns: Sequence[Sequence[int]] = (),
    purpose: Purpose | None = None,
) -> list[Scores]:
    """Scores groups of completions in the pool, waits for all of them, and returns the scores of
    each group, arrays [1, G], in the order of `examples`. `texts` [P][G], `token_ids` [P][G][T]:
    each group's completions. `step`: the run's step, which functions may ask for. `progress` is
    called with the number of groups that are done and of all. The pool stays open. `messages`,
    [P][G]: the dialogue of each rollout with turns, empty for others. `num_turns`, [P][G]: their
    numbers of turns; () if each has one. `purpose`: what a run sampled them for, for messages; None
    if no run did."""
    scores: dict[Any, Scores] = {}

    def take(wait: bool) -> None:
        """Adds the groups that the pool has scored to `scores`, and reports them. `wait`: waits
        until there is at least one."""
        for number, scores_of_group in pool.collect(wait=wait):
            scores[number] = scores_of_group
            progress(len(scores), len(examples))

    # All groups are submitted before the first wait, so that remote rewards get many at once.
    for number, example in enumerate(examples):
        turns: Sequence[Any] = ()
        if messages and any(messages[number]):
            turns = [messages[number]]
        pool.submit(
            number,
            [example],
            [texts[number]],
            [token_ids[number]],
            step,
            messages=turns,
            num_turns=[num_turns[number]] if num_turns else (),
            purpose=purpose,
        )
        take(wait=False)
    while len(scores) < len(examples):
        take(wait=True)
    return [scores[number] for number in range(len(examples))]


NOT_FOUND = "its question is not in the task's data"


TEXT = "response"
"""Column that has the text of an answer."""


QUESTIONS = ("question", "prompt", "problem")
"""Columns that may hold the question if a row lacks the task's own column; the first that the row
has is used."""


Key: TypeAlias = "tuple[Any, ...]"
"""What a question is looked up by: a whole conversation, or a text together with whether it is the
only message or the last of several."""


@dataclass(frozen=True)
class Response:
    """A row of the file of answers. `line`: its position as text, `FILE, line N`. `keys`: the keys
    by which its question is looked up, the most specific first."""

    line: str
    row: Mapping[str, Any]
    question: str  # in a conversation, the last message
    keys: tuple[Key, ...]
    text: str


def load_with_data(section: TaskSection, console: Console) -> Task:
    """Loads the task of `section` with all questions of its data, whatever
    `task.num_eval_questions` says, and prints its notes. Data of one split counts as questions of
    an evaluation."""
    with evaluating():
        task = load_task(replace(section, num_eval_questions=0))
    for note in task.notes:
        console.note(note)
    return task


# ---- the file


def read_responses(path: Path, question: str, console: Console) -> list[Response]:
    """Reads the rows of a jsonl file, except empty lines, and returns them in order. `question`:
    the column with the question; a row that lacks it may have one of QUESTIONS in its place. Warns
    of responses that are not text. ShoalError if the file cannot be read or has no row, or a line
    has no question or no response; the error names the first such line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ShoalError(
            f"responses={path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it"
        ) from error
    except OSError as error:
        raise ShoalError(f"responses={path} cannot be read: {error.strerror or error}") from error
    responses = []
    num_no_text = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        response = _response(line, f"{path}, line {number}", question)
        responses.append(response)
        if not isinstance(response.row[TEXT], str):
            num_no_text += 1
    if not responses:
        raise ShoalError(
            f"responses={path} holds no row: expected a JSON object on each line, with "
            f"`{question}` and `{TEXT}`"
        )
    if num_no_text:
        console.warning(
            f"{num_no_text} of {len(responses)} responses are not text: numbers are scored as "
            "text, null as empty"
        )
    return responses


def _response(text: str, line: str, question: str) -> Response:
    """Parses one line of a jsonl file. `line`: the line's name in errors; `question`: the column
    with the question, or, if the row lacks it, the first one of QUESTIONS. A number as response
    becomes text, null becomes ''; true, false, a list or an object is an error. ShoalError if the
    line has no question or no response."""
    try:
        row = json.loads(text)
        if "\\u" in text:  # half of a surrogate pair, which UTF-8 files cannot hold, becomes ?
            row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise ShoalError(
            f"{line} is not a JSON object ({error}): expected one on each line"
        ) from error
    if not isinstance(row, dict):
        raise ShoalError(
            f"{line} is a {type(row).__name__}: expected an object with `{question}` and `{TEXT}`"
        )
    column = question
    for name in (question, *QUESTIONS):
        if row.get(name) is not None:
            column = name
            break
    value: Any = row.get(column)
    is_conversation = (
        isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
    )
    last_message: Any = value[-1].get("content") if is_conversation else value
    answer = row.get(TEXT)
    if not isinstance(last_message, str):
        raise _no_text(line, row, column)
    if TEXT not in row or isinstance(answer, bool | list | dict):
        raise _no_text(line, row, TEXT)
    if is_conversation:
        keys = (_conversation(value), _alone(last_message))
    else:
        keys = (_alone(last_message), _last(last_message))
    return Response(line, row, last_message, keys, "" if answer is None else str(answer))


def _no_text(line: str, row: Mapping[str, Any], column: str) -> ShoalError:
    """Returns the error, which begins with `line`, of a row whose column is missing or is not
    text."""
    given = f"is {json.dumps(row[column]):.60}" if column in row else "is missing"
    return ShoalError(f"{line}: `{column}` {given}; expected text")


# ---- the example that each response answers


def match_examples(
    responses: Sequence[Response],
    task: Task,
    with_data: Task | None,
    module: Any,
    section: TaskSection,
    console: Console,
) -> list[Example | str]:
    """Returns for each response the example that it answers: made from the row's own columns, else
    looked up in the evaluation sets and training rows of the task's data, but not in generated
    rows. If there is none, the reason, as text, takes its place. If the data cannot be loaded,
    warns; raises that ShoalError if no row makes an example, and for at least one because it lacks
    the columns. `with_data`: the task with its data, if it has been loaded already; None: it is
    loaded here from `section`, and only if a row needs it. `module`: the task's module, whose
    `PUBLISHED.columns`, if it has them, say which columns a row must have of its own."""
    published = set(getattr(getattr(module, "PUBLISHED", None), "columns", ())) - {task.question}
    examples = []
    lost: dict[int, Response] = {}  # responses whose own columns make no example
    for number, response in enumerate(responses):
        example = _own_example(number, response, task, published)
        examples.append(example)
        if isinstance(example, str):
            lost[number] = response
    if lost:
        try:
            with_data = with_data or load_with_data(section, console)
        except ShoalError as error:  # goes on: rows that have their own answers need no data
            # No row makes an example, and at least one of them needs the data.
            if NOT_FOUND in examples and len(lost) == len(examples):
                raise
            console.warning(f"the other questions cannot be looked up: {error}")
        else:
            splits = dict(with_data.evaluations)
            if not isinstance(with_data.train, LazyRows):
                # Only stored rows are searched: there is no end of generated ones.
                splits["training"] = with_data.train
            matches = find_examples(lost, splits, task.question, console)
            for number, example in matches.items():
                examples[number] = example
    if len(lost) < len(responses):
        console.note(
            f"{len(responses) - len(lost)} of {len(responses)} responses are scored by the ground "
            "truth in their own rows"
        )
    return examples


def _own_example(number: int, response: Response, task: Task, published: Set[str]) -> Example | str:
    """Returns the example that a row's own columns make: the row must have all published columns of
    the task, or, for a task without these, one of GOLD_COLUMNS. Else, or if the task cannot make an
    example of it, returns the reason as text. `number`: becomes the example's row. `published`: the
    columns besides the question; empty if the task has none."""
    filled = {column for column, value in response.row.items() if value is not None and value != ""}
    if published:
        has_own = published <= filled
    else:
        has_own = bool(filled.intersection(GOLD_COLUMNS))
    if task.of_row is None or not has_own:
        return NOT_FOUND
    try:
        return task.of_row(number, {**response.row, task.question: response.question})
    except ShoalError as error:
        return str(error)


def find_examples(
    responses: Mapping[int, Response],
    splits: Mapping[str, Sequence[Example]],
    column: str,
    console: Console,
) -> dict[int, Example]:
    """Looks the responses up in the task's data by their keys (`example_keys`), and returns a dict
    (number of a response, its key in `responses` -> the example that it answers); those without one
    are left out. Prints how many questions of each split are answered. Splits are searched in
    order, and in a split a response's keys in order.

    Warns of questions that match several examples with different ground truth; the first is used.
    """
    matched: dict[int, Example] = {}
    ambiguous: list[str] = []
    for split, examples in splits.items():
        left: dict[int, Response] = {}
        wanted: set[Key] = set()
        for number, response in responses.items():
            if number not in matched:
                left[number] = response
                wanted.update(response.keys)
        if not left:
            break
        index: dict[Key, list[Example]] = {}
        for example in examples:
            for key in example_keys(example, column):
                if key in wanted:
                    index.setdefault(key, []).append(example)
        answered_rows = set()
        for number, response in left.items():
            matching: list[Example] = []
            for key in response.keys:
                if key in index:
                    matching = index[key]
                    break
            if not matching:
                continue
            matched[number] = matching[0]
            answered_rows.add(matching[0].row)
            gold_texts = {_gold_text(example) for example in matching}
            if len(gold_texts) > 1:
                ambiguous.append(response.line)
        if answered_rows:
            console.note(f"{len(answered_rows)} of {len(examples)} {split} questions are answered")
    if ambiguous:
        console.warning(
            f"{len(ambiguous)} of {len(responses)} responses match several rows of the data with "
            "different ground truth, and the first row is used; the first such response, "
            f"{ambiguous[0]}"
        )
    return matched


def example_keys(example: Example, column: str) -> list[Key]:
    """Returns the keys by which responses are matched with this example.

    If `column`, the task's column with the question, holds text: the key of that text alone. Else
    that of the prompt if it is text; for a prompt of messages two keys: of the whole conversation,
    and of the last message. The latter also says whether it is the only message, system messages
    not counted."""
    own = example.columns.get(column)
    prompt = example.prompt
    if isinstance(own, str):
        return [_alone(own)]
    if isinstance(prompt, str):
        return [_alone(prompt)]
    is_alone = sum(message.get("role") != "system" for message in prompt) == 1
    text = str(prompt[-1].get("content") or "")
    return [_conversation(prompt), _alone(text) if is_alone else _last(text)]


def _conversation(messages: Sequence[Mapping[str, Any]]) -> Key:
    """Returns the key of a whole conversation: the role and the `normalized` text of each
    message."""
    parts: list[Any] = ["conversation"]
    for message in messages:
        role = str(message.get("role", ""))
        text = str(message.get("content") or "")
        parts.append((role, normalized(text)))
    return tuple(parts)


def _alone(text: str) -> Key:
    """Returns the key of a question that is the only message."""
    return "question", normalized(text)


def _last(text: str) -> Key:
    """Returns the key of a question that is the last of several messages."""
    return "last message", normalized(text)


_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "−": "-"})


def normalized(question: str) -> str:
    """Returns a question with one form for equivalent characters, quotes and white space.

    >>> normalized("Janet\\u2019s\\u00a0 eggs?\\n")
    "Janet's eggs?"
    """
    return " ".join(unicodedata.normalize("NFKC", question).translate(_QUOTES).split())


def _gold_text(example: Example) -> str:
    """Returns the ground truth of an example as text, all columns if it has none; to compare
    examples."""
    gold = ground_truth(example.columns)
    return repr(example.columns if gold is None else gold)


def question_text(example: Example, column: str) -> str:
    """Returns the question of an example as it was published: the text in `column`; if that is no
    text, the prompt if it is a text, else the text of its last message."""
    own = example.columns.get(column)
    if isinstance(own, str):
        return own
    if isinstance(example.prompt, str):
        return example.prompt
    return str(example.prompt[-1].get("content", ""))


def report_unscored(
    responses: Sequence[Response], examples: Sequence[Example | str], task: Task, console: Console
) -> int:
    """Returns how many responses have no example, and warns of them. ShoalError if there are
    responses and none has one. `examples`: what `match_examples` returned."""
    lost = []
    for response, reason in zip(responses, examples, strict=True):
        if isinstance(reason, str):
            lost.append(f"{response.line}: {reason}")
    if lost and len(lost) == len(responses):
        raise ShoalError(
            f"none of the {len(lost)} responses can be scored by task {task.name}; the first, "
            f"{lost[0]}. Its data must contain each `{task.question}` literally"
        )
    if lost:
        console.warning(
            f"{len(lost)} of {len(responses)} responses cannot be scored and are not counted; the "
            f"first, {lost[0]}"
        )
    return len(lost)


# ---- verdicts and rewards


def give_verdicts(
    responses: Sequence[Response],
    examples: Sequence[Example | str],
    task: Task,
    rewarded: bool,
    console: Console,
) -> list[dict[str, Any] | None]:
    """Returns the task's verdict on each response as a dict; None for a response without an
    example. `rewarded`: True if a reward scores the responses too. ShoalError if that is False and
    the task does not define what is correct, because nothing would be scored. Reports progress on
    `console`. With `rewarded`, a task that defines nothing gives empty verdicts."""
    if task.verdict is None and task.correct is None and not rewarded:
        raise ShoalError(
            f"task {task.name} does not define what is correct, so answers made elsewhere cannot "
            "be scored: give a function that scores them, reward=file.py:function"
        )
    verdicts: list[dict[str, Any] | None] = []
    for response, example in zip(responses, examples, strict=True):
        if isinstance(example, str):
            verdicts.append(None)
        elif task.verdict is not None:
            verdicts.append(dict(task.verdict(response.text, example)))
        elif task.correct is not None:
            verdicts.append({"correct": bool(task.correct(response.text, example))})
        else:
            verdicts.append({})
        console.answered("responses", len(verdicts), len(responses))
    return verdicts


def add_rewards(
    responses: Sequence[Response],
    examples: Sequence[Example | str],
    verdicts: Sequence[dict[str, Any] | None],
    task: Task,
    section: RewardSection,
    console: Console,
) -> list[Failure]:
    """Scores each response that has an example as a group of one with the functions of the task, in
    worker processes that end afterwards. Adds `reward` and `rewards` to its verdict in `verdicts`;
    these are NaN if a function gave no score. Returns the failures of reward functions."""
    texts = []
    questions = []
    scored = []
    for response, example, verdict in zip(responses, examples, verdicts, strict=True):
        if isinstance(example, Example) and verdict is not None:
            texts.append([response.text])
            questions.append(example)
            scored.append(verdict)
    # One group of one completion for each response, without tokens: those of answers that were
    # sampled elsewhere are not known.
    no_ids: list[list[list[int]]] = [[[]]] * len(texts)

    def report(done: int, total: int) -> None:
        console.answered("rewards", done, total)

    with RewardPool(task.rewards, section) as pool:
        all_scores = score_texts(pool, questions, texts, no_ids, progress=report)
    failures: list[Failure] = []
    for verdict, scores in zip(scored, all_scores, strict=True):
        verdict["reward"] = float(scores.rewards[0, 0])
        verdict["rewards"] = {
            name: float(values[0, 0]) for name, values in scores.components.items()
        }
        failures.extend(scores.failures)
    return failures


def response_figures(
    responses: Sequence[Response], verdicts: Sequence[Mapping[str, Any] | None], task: Task
) -> dict[str, Any]:
    """Returns the figures of all scored responses: `accuracy` with `accuracy_interval` (95%, [low,
    high]), the task's own figures, `mean_reward` and `rewards/NAME`, and how many responses
    (`num_responses` that were scored, `num_unjudged` that were not) and different questions
    (`num_questions`) there were. A reward that is NaN does not count. At least one response must be
    scored. Figures of what was not judged or rewarded are left out."""
    scored = []
    questions = set()
    for response, verdict in zip(responses, verdicts, strict=True):
        if verdict is not None:
            scored.append(verdict)
            questions.add(response.keys[0])
    figures: dict[str, Any] = {
        "num_responses": len(scored),
        "num_questions": len(questions),
        "num_unjudged": len(responses) - len(scored),
    }
    if "correct" in scored[0]:
        right = sum(bool(verdict["correct"]) for verdict in scored)
        figures |= {
            "accuracy": right / len(scored),
            "accuracy_interval": list(wilson_interval(right, len(scored))),
        }
    if task.figures is not None:
        figures |= task.figures(scored)
    if "reward" in scored[0]:
        figures["mean_reward"] = known_mean([verdict["reward"] for verdict in scored])
        for name in scored[0]["rewards"]:
            values = [verdict["rewards"][name] for verdict in scored]
            figures[f"rewards/{name}"] = known_mean(values)
    return figures
