"""Has groups judged while sampling goes on: a queue of groups in, their scores out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from shoal.config.schema import RewardSection
from shoal.task.reward import RewardFunction, Scores, score
from shoal.types import Example


class Judge:
    """Scores groups with reward functions.

    >>> judge.submit(4, [example], texts=[["5", "6"]], completion_ids=[[[7], [8]]], step=3)
    >>> judge.collect(wait=True)
    [(4, Scores(...))]
    """

    def __init__(self, functions: Sequence[RewardFunction], section: RewardSection, max_steps: int = 0) -> None:
        self.functions, self.section, self.max_steps = tuple(functions), section, max_steps
        self._done: list[tuple[Hashable, Scores]] = []

    @property
    def by_step(self) -> bool:
        """All groups of a step are to be submitted at once."""
        return self.section.call == "step"

    def submit(self, ticket: Hashable, examples: Sequence[Example], texts: Sequence[Sequence[str]],
               completion_ids: Sequence[Sequence[Sequence[int]]], step: int) -> None:
        """Queues P groups (texts[P][G]) under a ticket; returns at once."""
        prompts = [example.prompt for example in examples]
        self._done.append(
            (ticket, score(self.functions, examples, prompts, texts, completion_ids, step, self.max_steps)))

    def collect(self, wait: bool = False) -> list[tuple[Hashable, Scores]]:
        """What is judged by now, each ticket once; with `wait`, not before one is, unless nothing is queued.

        Raises ShoalError, naming function, step and example, where `reward.on_error` is `error` and one failed."""
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Ends the worker processes."""
