"""Reward functions that are known by name: TRL's ready ones, DAPO's overlong penalty, and one for
short answers.

    reward=accuracy_reward,think_format_reward
    reward='get_cosine_scaled_reward(max_len=512)'

Those of TRL are written from its documentation and give the same numbers; what TRL logs about
parsed answers is not logged.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from shoal.records import RewardFunction, ShoalError, truth_fault
from shoal.tasks.graders import dapo, math_check
from shoal.tasks.graders.answer import completion_text
from shoal.text import did_you_mean

PENALTY = "overlong"
"""The reward function that `reward.overlong_buffer_tokens` adds."""

_CALL = re.compile(r"(?P<name>[A-Za-z_]\w*)\s*(?:\((?P<arguments>.*)\))?")


def find_builtin(spec: str) -> RewardFunction | None:
    """Returns the built-in reward function that a text names: `accuracy_reward`, or a factory with
    or without arguments, `get_cosine_scaled_reward(max_len=512)`. The default arguments of a
    factory are used only if the text has none. The reward function that a factory makes has the
    factory's name without `get_`, with `_reward` at the end. None for a text that is neither a name
    nor a call, such as `file.py:function`.

    Raises ShoalError for an unknown name, and for arguments that the factory does not take. A
    factory is called here.
    """
    match = _CALL.fullmatch(spec.strip())
    if match is None:
        return None
    name = match["name"]
    arguments = match["arguments"]
    names = list(FUNCTIONS) + list(FACTORIES)
    if name not in names:
        hint = did_you_mean(name, names) or f"; for your own, write reward=FILE.py:{name}"
        raise ShoalError(
            f"reward function {spec!r}: expected `file.py:function`, or the name of a ready "
            f"one{hint}"
        )
    if name in FUNCTIONS:
        if arguments:
            raise ShoalError(f"reward function {spec!r}: {name} takes no arguments")
        return RewardFunction(name, FUNCTIONS[name], runs_in_process=True)
    factory, defaults = FACTORIES[name]
    try:
        call = ast.parse(f"f({arguments or ''})", mode="eval").body
        assert isinstance(call, ast.Call)
        positional = [ast.literal_eval(value) for value in call.args]
        keywords = dict(defaults)
        if arguments:  # any argument replaces all defaults
            keywords = {str(given.arg): ast.literal_eval(given.value) for given in call.keywords}
        function = factory(*positional, **keywords)
    except (SyntaxError, TypeError, ValueError, AssertionError) as error:
        raise ShoalError(
            f"reward function {spec!r}: {error}; expected {name}(KEY=NUMBER)"
        ) from error
    function_name = name.removeprefix("get_").removesuffix("_reward") + "_reward"
    return RewardFunction(function_name, function, runs_in_process=True)


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], **kwargs: Any
) -> list[float | None]:
    """Returns 1.0 for each completion whose answer, which must be LaTeX and preferably in a box, is
    the solution's, else 0.0, also if the check was ended at its limit. None if no answer can be
    read in the solution. ShoalError if math-verify is not installed. A completion is text or
    messages, of which the last counts."""
    math_check.require_math_verify()
    pairs = []
    for completion, gold in zip(completions, solution, strict=True):
        pairs.append((str(gold), completion_text(completion)))
    scores: list[float | None] = []
    # "trl": a solution and a whole completion, read with TRL's settings.
    for is_right in math_check.checker().compare(pairs, "trl"):
        scores.append(None if is_right is None else float(is_right))
    return scores


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Returns 1.0 for each completion whose text after the reasoning has the solution's answer, in
    LaTeX, else 0.0. A text without a delimiter gets 0.0; any other text gets None if no answer can
    be read in the solution. The reasoning ends with the last occurrence of a delimiter: the first
    of `reasoning_delimiters` (by default `</think>`) that occurs."""
    delimiters = reasoning_delimiters or ("</think>",)
    answers = []
    has_delimiter = []
    for completion in completions:
        text = completion_text(completion)
        present = [delimiter for delimiter in delimiters if delimiter in text]
        has_delimiter.append(bool(present))
        answers.append(text.rpartition(present[0])[2] if present else "")
    scores = accuracy_reward(answers, solution)
    for number, is_there in enumerate(has_delimiter):
        if not is_there:
            scores[number] = 0.0
    return scores


def think_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Returns 1.0 for each completion that begins with its only `<think>` and closes it, else 0.0.
    Text may follow the first `</think>`, and the tag may be closed again."""
    scores = []
    for completion in completions:
        text = completion_text(completion)
        begins_with_it = text.startswith("<think>") and text.count("<think>") == 1
        scores.append(float(begins_with_it and "</think>" in text))
    return scores


def cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., Any]:
    """Returns a reward function that depends on correctness (`accuracy_reward`) and length. For a
    right answer the reward falls along half a cosine from `max_value_correct` at 0 tokens to
    `min_value_correct` at `max_len` tokens; for a wrong one it rises from `min_value_wrong` to
    `max_value_wrong`. None if no answer can be read in the solution. arXiv:2502.03373, C.1. Beyond
    `max_len` tokens the reward is that at `max_len`."""

    def cosine_scaled(
        completions: Sequence[Any],
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **kwargs: Any,
    ) -> list[float | None]:
        """Returns the reward of each completion by its correctness and its number of tokens: from
        `max_value_correct` down to `min_value_correct` for a right answer, from `min_value_wrong`
        up to `max_value_wrong` for a wrong one; None if no answer can be read in its solution."""
        rewards: list[float | None] = []
        scores = accuracy_reward(completions, solution)
        for is_right, ids in zip(scores, completion_ids, strict=True):
            if is_right is None:
                rewards.append(None)
                continue
            if is_right:
                at_start = max_value_correct
                at_end = min_value_correct
            else:
                at_start = min_value_wrong
                at_end = max_value_wrong
            cosine = math.cos(math.pi * min(1.0, len(ids) / max_len))
            rewards.append(at_end + 0.5 * (at_start - at_end) * (1.0 + cosine))
        return rewards

    return cosine_scaled


def repetition_penalty(
    ngram_size: int = 3, max_penalty: float = -1.0
) -> Callable[..., list[float]]:
    """Returns a reward function: `max_penalty` times the share of a completion's n-grams of tokens
    that occurred in it before (1 - distinct n-grams / all n-grams). It reads `completion_ids`
    alone. arXiv:2502.03373, C.2. 0.0 for a completion shorter than `ngram_size`. ValueError if
    `max_penalty` is above 0.

    >>> repetition_penalty(2)(completion_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5]])
    [0.0, -0.75]
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty}: expected 0 or less")

    def penalty(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        """Returns for each completion `max_penalty` times the share of its n-grams that occurred in
        it before; 0.0 if it has no n-gram."""
        rewards = []
        for ids in completion_ids:
            ngrams = [tuple(ids[i : i + ngram_size]) for i in range(len(ids) - ngram_size + 1)]
            repeated = 0.0
            if ngrams:
                repeated = 1 - len(set(ngrams)) / len(ngrams)
            # 0.0 and not -0.0, which the product would be.
            rewards.append(repeated * max_penalty if repeated else 0.0)
        return rewards

    return penalty


def overlong_punishment(
    max_completion_len: int, soft_punish_cache: int
) -> Callable[..., list[float]]:
    """Returns a reward function that penalizes long completions by their number of tokens: 0 up to
    `max_completion_len - soft_punish_cache` tokens, then falling linearly to -1 at
    `max_completion_len`. With a `soft_punish_cache` of 0 it is -1 above `max_completion_len`. DAPO,
    arXiv 2503.14476, eq. 13.

    >>> overlong_punishment(100, 20)(completion_ids=[[0] * 80, [0] * 90, [0] * 100])
    [0.0, -0.5, -1.0]
    """

    def overlong(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        """Returns the penalty of each completion by its number of tokens, from 0.0 to -1.0."""
        lengths = [len(ids) for ids in completion_ids]
        if not soft_punish_cache:
            return [-float(length > max_completion_len) for length in lengths]
        start = max_completion_len - soft_punish_cache
        penalties = []
        for length in lengths:
            share = (start - length) / soft_punish_cache
            penalties.append(max(-1.0, min(0.0, share)))
        return penalties

    return overlong


def verl_reward(
    completions: Sequence[Any],
    data_source: Sequence[str],
    reward_model: Sequence[Any],
    log_extra: Callable[[str, Sequence[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Returns verl's default reward by each row's `data_source`. GSM8K: 1.0 if the number after the
    last `####` is the ground truth, else 0.0. MATH: 1.0 if the completion's answer, in LaTeX, is
    the ground truth, else 0.0; None if no answer can be read in the ground truth. DAPO's data
    (`math_dapo`, `math`, `aime...`): 1.0 if the answer is the ground truth, else -1.0. ValueError
    for any other source, which needs a function of its own, ShoalError for a row without ground
    truth. Each entry of `reward_model` is a dict with `ground_truth`.

    `log_extra` is given the column `acc`: 1.0 if the answer is the ground truth, else 0.0; None if
    that cannot be said. If there are rows of DAPO's data it is also given verl's column `pred`, the
    answer; None for rows of other sources."""
    from shoal.tasks.gsm8k import load_reward_preset

    for row in reward_model:
        fault = truth_fault({"reward_model": row})
        if fault:
            raise ShoalError(fault, "task.path")
    for source in data_source:
        if not has_verl_reward(source):
            raise ValueError(
                f"data_source={source}: only GSM8K, MATH and DAPO's data have a reward; give one "
                "of your own"
            )
    gsm8k = load_reward_preset("verl")
    scores: list[float | None] = []
    accuracies: list[float | None] = []
    answers: list[str | None] = []
    for completion, source, row in zip(completions, data_source, reward_model, strict=True):
        gold = str(row["ground_truth"])
        answer = None
        if _is_of_dapo(source):
            is_right, answer = dapo.grade(completion_text(completion), gold)
            accuracy = float(is_right)
            score = dapo.RIGHT if is_right else dapo.WRONG
        elif source in _MATH:
            # Between dollar signs, since it reads LaTeX alone.
            [score] = accuracy_reward([completion], [f"${gold}$"])
            accuracy = score
        else:
            number = gsm8k.answer(completion_text(completion))
            score = float(gsm8k.right(number, gold))
            accuracy = score
        scores.append(score)
        accuracies.append(accuracy)
        answers.append(answer)
    if log_extra is not None:
        log_extra("acc", accuracies)
        if any(map(_is_of_dapo, data_source)):
            log_extra("pred", answers)
    return scores


def _is_of_dapo(source: str) -> bool:
    """True if verl judges rows of this `data_source` by DAPO's grader."""
    return source in _DAPO or source.startswith("aime")


def has_verl_reward(source: Any) -> bool:
    """True if `verl_reward` scores rows of this `data_source`: GSM8K, MATH or DAPO's data."""
    if not isinstance(source, str):
        return False
    return source == "openai/gsm8k" or source in _MATH or _is_of_dapo(source)


FULL_REWARD_WORDS, NO_REWARD_WORDS = 6, 40
"""Words of the longest answer with the whole `brief_reward`, and of the shortest with none."""


def brief_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Returns for each completion 1.0 up to FULL_REWARD_WORDS words, falling in a line to 0.0 at
    NO_REWARD_WORDS. An empty answer has 0."""
    rewards = []
    for completion in completions:
        num_words = len(completion_text(completion).split())
        share_left = (NO_REWARD_WORDS - num_words) / (NO_REWARD_WORDS - FULL_REWARD_WORDS)
        rewards.append(min(1.0, max(0.0, share_left)) if num_words else 0.0)
    return rewards


_MATH = ("DigitalLearningGmbH/MATH-lighteval", "lighteval/MATH", "HuggingFaceH4/MATH-500")
_DAPO = ("math_dapo", "math", "math_dapo_reasoning")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    "verl_reward": verl_reward,
    "brief_reward": brief_reward,
}
FACTORIES: dict[str, tuple[Callable[..., Callable[..., Any]], dict[str, Any]]] = {
    # TRL's own script takes these two numbers.
    "get_soft_overlong_punishment": (
        overlong_punishment,
        {"max_completion_len": 1280, "soft_punish_cache": 256},
    ),
    "get_cosine_scaled_reward": (cosine_scaled_reward, {}),
    "get_repetition_penalty_reward": (repetition_penalty, {}),
}
"""Name -> the function that makes the reward function, and its arguments if none are given."""
