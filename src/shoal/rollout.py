"""Plays the G siblings of a prompt into a `Group`: asks for tokens, reads them as text, has them rewarded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shoal.task.reward import Scores, score
from shoal.task.task import Task
from shoal.types import Address, Completion, Group, GroupRequest, SampleRequest

Decode = Callable[[Sequence[int]], str]


def sample_request(request: GroupRequest, id: int, seed: int) -> SampleRequest:
    """What to ask of the sampler. Purpose, data set and way of choosing name the noise together with step and row: a
    prompt occurs once in each."""
    purpose = f"{request.purpose}/{request.subset}/{'greedy' if request.params.temperature == 0 else 'sampled'}"
    address = Address(seed, purpose, request.step, request.example.row)
    return SampleRequest(id, request.prompt_ids, request.num_completions, address, request.params)


def make_groups(
    task: Task,
    requests: Sequence[GroupRequest],
    completions: Sequence[Sequence[Completion]],
    decode: Decode,
    max_steps: int,
) -> tuple[list[Group], Mapping[str, float]]:
    """Finished completions, in order of their index for each request, to rewarded groups; and what rewards logged.

    All requests are of one step and size: rewards see them together, siblings side by side.
    """
    texts = [[decode(completion.token_ids.tolist()) for completion in siblings] for siblings in completions]
    scores = score(
        task.rewards,
        examples=[request.example for request in requests],
        prompts=[request.example.prompt for request in requests],
        texts=texts,
        completion_ids=[[completion.token_ids.tolist() for completion in siblings] for siblings in completions],
        step=requests[0].step,
        max_steps=max_steps,
    )
    groups = [
        _group(task, request, siblings, own, scores, number)
        for number, (request, siblings, own) in enumerate(zip(requests, completions, texts, strict=True))
    ]
    return groups, scores.metrics


def _group(task: Task, request: GroupRequest, siblings: Sequence[Completion], texts: Sequence[str], scores: Scores,
           number: int) -> Group:
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
    )


def _of_group(components: Mapping[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    return {name: values[number] for name, values in components.items()}
