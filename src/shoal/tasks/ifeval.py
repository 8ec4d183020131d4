"""The task `ifeval` (Zhou et al. 2023, arXiv:2311.07911): prompts with instructions that can be
checked, and their four figures.

A row has `prompt`, `instruction_id_list` and `kwargs`, one dict of arguments for each instruction.
The published set is one file of 541 rows, made for evaluation; training on it is possible and
contaminates it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.config.sections.task import TaskSection
from shoal.records import Example, ShoalError
from shoal.tasks.data_folder import Published
from shoal.tasks.graders.answer import reward_of, single_answer
from shoal.tasks.graders.instructions import follows, read_arguments, variants
from shoal.tasks.splits import read_splits, with_rows
from shoal.tasks.task import Task

PUBLISHED = Published(
    "ifeval",
    "google/IFEval",
    ("prompt", "instruction_id_list", "kwargs"),
    ("ifeval_input_data", "{split}"),
    texts=("prompt",),
)
SYSTEM_PROMPT = (
    "Think first, between <think> and </think>. Then write your whole response between <answer> "
    "and </answer>: only what stands there is checked against the user's instructions."
)
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
"""Weights in the reward of prompt-strict, the mean of instruction-strict, prompt-loose and the mean
of instruction-loose."""
ANSWER_BONUS, THINK_BONUS = 0.1, 0.05


def load(task: TaskSection) -> Task:
    """Loads the task; `task.path` is a file, a folder, a hub id, or "" for IFEval on the hub.

    For an evaluation (`evaluating()` with data of one split, or `task.split=task.eval_split`, as in
    the preset of `shoal eval`), all rows are evaluated on, with the published prompts unchanged.
    For training, a system prompt asks for the two tags, and of a single split every tenth row is
    held out.

    Raises `ShoalError` for data that is missing or unreadable, and for a row with an instruction or
    an argument that no check accepts.
    """
    splits = read_splits(task, PUBLISHED, PlacedRow, spread=True)
    tags = not splits.note_benchmark(task.num_eval_questions)
    splits.drop_held_out(_prompt_of, "prompt")
    splits.train = _examples(splits.train, tags)
    splits.held_out = _examples(splits.held_out, tags)
    return with_rows(_task(tags), splits)


@dataclass(frozen=True)
class PlacedRow:
    """A row of the published data, before its arguments are read, with its place."""

    number: int
    place: str
    row: Mapping[str, Any]


def _prompt_of(placed: PlacedRow) -> str:
    return placed.row["prompt"]


def _examples(rows: Sequence[PlacedRow], tags: bool) -> list[Example]:
    """Returns the rows' examples, numbered from 0. `tags`: a system prompt asks for the two tags.
    The numbers that the rows had before are not used."""
    examples = []
    for number, placed in enumerate(rows):
        examples.append(_example(number, placed.place, placed.row, tags))
    return examples


def blank(task: TaskSection) -> Task:
    """Returns the task without data, for judging rows that contain their instructions. `task` is
    not used."""
    return _task(tags=False)


def _task(tags: bool) -> Task:
    """Returns the task without data. `tags`: True if the prompts ask for the two tags; if not, the
    whole text is checked, and its form is not measured."""
    points = partial(instruction_points, tags=tags)
    rewards = [reward_of("instructions", points, columns=("instruction_id_list", "kwargs"))]
    if tags:
        rewards.append(reward_of("format", form_points, columns=()))
    return Task(
        name="ifeval",
        rewards=tuple(rewards),
        correct=partial(is_correct, tags=tags),
        well_formed=well_formed if tags else None,
        verdict=partial(verdict, tags=tags),
        figures=figures,
        question="prompt",
        of_row=_example_of_row,
    )


def _example_of_row(number: int, row: Mapping[str, Any]) -> Example:
    return _example(number, f"row {number}", row, tags=False)


# ---- checking


def checked_text(text: str, tags: bool = True) -> str:
    """Returns the part of a completion that is checked: with `tags` the text of its answer block if
    there is exactly one, else all of it.

    >>> checked_text("<think>hm</think> <answer> Yes. </answer>")
    'Yes.'
    """
    if not tags:
        return text
    answer = single_answer(text)
    return text if answer is None else answer


def _check_instructions(
    text: str, names: Sequence[str], arguments: Sequence[Mapping[str, Any]]
) -> tuple[list[bool], list[bool]]:
    """Checks a response against each instruction of `names`, with its `arguments` as
    `read_arguments` returned them. Returns (strict, loose), each with one bool an instruction.
    Strict checks the response as it is; loose also accepts it without its first or last line or
    without asterisks (`variants`), as IFEval's loose accuracy does."""
    other_variants = variants(text)[1:]
    strict = []
    loose = []
    for name, given in zip(names, arguments, strict=True):
        is_followed = follows(text, name, given)
        strict.append(is_followed)
        loose.append(
            is_followed or any(follows(variant, name, given) for variant in other_variants)
        )
    return strict, loose


def verdict(text: str, example: Example, tags: bool = False) -> dict[str, Any]:
    """Returns the verdict on a response, or with `tags` on its answer block: strict and loose, of
    all instructions together (`prompt_...`) and of each. `correct` is `prompt_strict`. The lists
    are in the order of the instructions.

    >>> columns = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    >>> verdict("no, thanks", Example(0, "...", columns))
    {'correct': False, 'prompt_strict': False, 'instruction_strict': [False], 'prompt_loose': False,
     'instruction_loose': [False], 'instruction_id_list': ['punctuation:no_comma']}
    """
    names, arguments = example.columns["instruction_id_list"], example.columns["kwargs"]
    checked = checked_text(text, tags)
    strict, loose = _check_instructions(checked, names, arguments)
    return {
        "correct": all(strict),
        "prompt_strict": all(strict),
        "instruction_strict": strict,
        "prompt_loose": all(loose),
        "instruction_loose": loose,
        "instruction_id_list": list(names),
    }


def is_correct(text: str, example: Example, tags: bool = False) -> bool:
    """True if a response, or with `tags` its answer block, follows every instruction strictly.
    Without `tags` the whole text is the response."""
    names, arguments = example.columns["instruction_id_list"], example.columns["kwargs"]
    checked = checked_text(text, tags)
    pairs = zip(names, arguments, strict=False)
    return all(follows(checked, name, given) for name, given in pairs)


def figures(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the four published figures, shares from 0 to 1: of prompts, and of the instructions
    of all prompts together, each strict and loose. They are `prompt_strict`, `instruction_strict`,
    `prompt_loose` and `instruction_loose`, 0 without verdicts."""
    shares = {}
    for mode in ("strict", "loose"):
        prompts = []
        instructions = []
        for verdict in verdicts:
            prompts.append(verdict[f"prompt_{mode}"])
            instructions += verdict[f"instruction_{mode}"]
        shares[f"prompt_{mode}"] = _mean(prompts)
        shares[f"instruction_{mode}"] = _mean(instructions)
    return shares


def well_formed(text: str) -> bool:
    """True if there is exactly one think block and exactly one answer block."""
    return _thinks_once(text) and single_answer(text) is not None


def _thinks_once(text: str) -> bool:
    """True if there is exactly one think block."""
    if text.count("<think>") != 1 or text.count("</think>") != 1:
        return False
    return text.index("<think>") < text.index("</think>")


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0


# ---- rewards


def instruction_points(
    text: str, names: Sequence[str], arguments: Sequence[Mapping[str, Any]], tags: bool
) -> float:
    """Returns the reward for following instructions, from 0 to 1: the sum of prompt-strict, the
    share of instructions followed strictly, prompt-loose and the share followed loosely, weighted
    by WEIGHTS.

    The four weights are TorchRL's, which checks the first answer block, and nothing if there is
    none. Here, with `tags`, the answer block is checked only if there is exactly one, else the
    whole text.
    """
    checked = checked_text(text, tags)
    strict, loose = _check_instructions(checked, names, arguments)
    parts = (all(strict), _mean(strict), all(loose), _mean(loose))
    return math.fsum(weight * part for weight, part in zip(WEIGHTS, parts, strict=True))


def form_points(text: str) -> float:
    """Returns the reward for the form: 0.1 for exactly one answer block and 0.05 for exactly one
    think block. It is added to the reward for the instructions."""
    return ANSWER_BONUS * (single_answer(text) is not None) + THINK_BONUS * _thinks_once(text)


# ---- rows


def _example(number: int, place: str, row: Mapping[str, Any], tags: bool) -> Example:
    """Returns the example of a published row, whose `kwargs` are read by `read_arguments`. With
    `tags` a system prompt asks for the two tags. If the row cannot be read, raises a ShoalError
    that names `place`."""
    names, given = row["instruction_id_list"], row["kwargs"]
    is_right = _is_list_of(names, str) and _is_list_of(given, dict) and len(given) == len(names)
    if not is_right:
        raise ShoalError(
            f"task ifeval: {place}: `instruction_id_list` must be a list of names, and `kwargs` a "
            "list of as many objects"
        )
    try:
        arguments = []
        for name, given_arguments in zip(names, given, strict=True):
            arguments.append(read_arguments(name, given_arguments))
    except ValueError as error:
        raise ShoalError(f"task ifeval: {place}: {error}") from error
    prompt = [{"role": "user", "content": row["prompt"]}]
    if tags:
        prompt.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
    return Example(number, prompt, {"instruction_id_list": list(names), "kwargs": arguments})


def _is_list_of(value: Any, item_type: type) -> bool:
    """True for a list that is not empty and whose items are all of one type."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, item_type) for item in value)
