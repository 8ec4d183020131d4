"""Makes the G siblings of a prompt a `Group`: what is asked of the sampler, what becomes of tokens and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shoal.rewards.scores import Scores
from shoal.tasks.task import Task
from shoal.types import Address, Completion, Group, GroupRequest, SampleRequest


def sample_request(request: GroupRequest, id: int, seed: int) -> SampleRequest:
    """What to ask of the sampler. Purpose, data set and way of choosing name the noise together with step and row: a
    prompt occurs once in each."""
    purpose = f"{request.purpose}/{request.subset}/{'greedy' if request.params.temperature == 0 else 'sampled'}"
    address = Address(seed, purpose, request.step, request.example.row)
    return SampleRequest(id, request.prompt_ids, request.num_completions, address, request.params)


def make_group(task: Task, request: GroupRequest, siblings: Sequence[Completion], texts: Sequence[str], scores: Scores,
               number: int = 0) -> Group:
    """Finished completions, in order of their index, with their texts, as a rewarded group: the `number`-th of
    `scores`."""
    correct = None
    if task.correct is not None:
        correct = np.array([bool(task.correct(text, request.example)) for text in texts])
    return Group(
        purpose=request.purpose,
        step=request.step,
        version=request.version,
        example=request.example,
        prompt_ids=request.prompt_ids,
        completions=tuple(siblings),
        texts=tuple(texts),
        rewards=scores.rewards[number],
        reward_components=_of_group(scores.components, number),
        valid=scores.valid[number],
        correct=correct,
        subset=request.subset,
        extra={name: column[number] for name, column in scores.extra.items()},
        reward_weights={one.name: one.weight for one in task.rewards},
    )


def _of_group(components: Mapping[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    return {name: values[number] for name, values in components.items()}
