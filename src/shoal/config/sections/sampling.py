"""Settings of how completions are sampled, in training and in evaluations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shoal.config.key import at_least, key, require
from shoal.records import SamplingParams


@dataclass(frozen=True)
class SamplingSection:
    """The keys `sampling.*`: how completions are sampled."""

    temperature: float = key(1.0, stages=("sampling", "update", "evaluation"))
    """Sampling temperature in training; the trainer's log-probs use the same."""
    top_k: int = key(0, stages=("sampling", "update", "evaluation"))
    """Sample from the k likeliest tokens; 0 for all. The trainer computes its log-probs over the
    same tokens (algorithm.match_sampling_support)."""
    top_p: float = key(1.0, stages=("sampling", "update", "evaluation"))
    """Sample from the smallest set of tokens with this probability mass; 1 for all."""
    min_p: float = key(0.0, stages=("sampling", "update", "evaluation"))
    """Sample from tokens at least this likely, relative to the likeliest; 0 for all."""
    max_support: int = key(128, stages=("sampling", "update"))
    """In training with top_k, top_p or min_p: largest number of tokens to sample from at a position
    (the likeliest). Their ids are stored, so that the trainer computes log-probs over the same
    set."""
    stop: tuple[str, ...] = key((), stages=("sampling", "evaluation"))
    """Strings that end a completion."""
    max_prompt_tokens: int = key(
        256,
        stages=("data", "environment", "sampling", "update", "evaluation"),
        acts_if="a prompt is too long",
    )
    """Longest prompt (see sampling.long_prompts)."""
    max_completion_tokens: int = key(
        64, stages=("sampling", "environment", "rewards", "update", "evaluation")
    )
    """Longest completion; one that reaches the limit is truncated, and counted. (TRL's
    max_completion_length, verl's max_response_length.)"""
    long_prompts: Literal["warn", "drop", "error"] = key(
        "warn", stages=("data", "environment", "evaluation"), acts_if="a prompt is too long"
    )
    """Prompts over the limit: dropped from the data and counted, with a warning (warn) or without
    one (drop), or an error. They are never truncated."""
    slots_per_device: int = key(
        0,
        stages=("sampling", "evaluation"),
        undecided_because="each host plans its slots when it starts, from the memory of its own "
        "devices",
    )
    """Completions sampled at once on each device; 0 for all of a step."""
    prompt_slot_tokens: int = key(
        0,
        stages=("sampling", "evaluation"),
        decided_from=("sampling.max_prompt_tokens", "longest prompt"),
    )
    """Prompt tokens that a slot has room for. 0: with task=custom and data from Python the longest
    prompt of the data that is not dropped, in steps of 64; else max_prompt_tokens."""
    evaluation_slots: int = key(
        0, stages=("evaluation",), decided_from=("completions of an evaluation",)
    )
    """Completions of an evaluation that each sampler samples at once; 0 for as many as in training,
    but no more than the evaluation has."""
    mean_completion_tokens: int = key(0, stages=("sampling", "evaluation"))
    """Only for decoding by the kernel for TPUs: mean length of completions, from which the number
    of slots is planned, instead of from the longest (0). If all completions together do not fit in
    memory, some of them wait (sampler/preempted_rows)."""
    memory_share: float = key(0.85, stages=("sampling", "evaluation"))
    """Share of an accelerator's memory that weights and the sampler's keys and values may take
    while sampling (as vLLM's gpu_memory_utilization): if it leaves no room for all slots, fewer
    completions are sampled at once. The rest is for what programs need in addition."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if a number is out of its
        range. The first fault found is raised. max_support and the most tokens of prompt and
        completion are 1 or more; mean_completion_tokens is at most max_completion_tokens; top_p and
        memory_share are above 0, up to 1, min_p below 1; the other numbers are 0 or more."""
        at_least(self, "sampling.", 0, "temperature", note="greedy")
        at_least(self, "sampling.", 0, "top_k", note="off")
        require(0 < self.top_p <= 1, "sampling.top_p", self.top_p, "a number in (0, 1]")
        require(0 <= self.min_p < 1, "sampling.min_p", self.min_p, "a number in [0, 1)")
        at_least(self, "sampling.", 1, "max_support", "max_prompt_tokens", "max_completion_tokens")
        at_least(
            self,
            "sampling.",
            0,
            "slots_per_device",
            "prompt_slot_tokens",
            "evaluation_slots",
            note="auto",
        )
        require(
            0 <= self.mean_completion_tokens <= self.max_completion_tokens,
            "sampling.mean_completion_tokens",
            self.mean_completion_tokens,
            f"0 (the longest) to max_completion_tokens={self.max_completion_tokens}",
        )
        require(
            0 < self.memory_share <= 1,
            "sampling.memory_share",
            self.memory_share,
            "a number in (0, 1]",
        )

    @property
    def slot_prompt(self) -> int:
        """Returns how many tokens the prompt in a slot may have."""
        return min(self.prompt_slot_tokens or self.max_prompt_tokens, self.max_prompt_tokens)

    @property
    def params(self) -> SamplingParams:
        """Returns the sampling settings in the form that requests carry."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_tokens=self.max_completion_tokens,
            stop=self.stop,
        )


@dataclass(frozen=True)
class EvaluationSection:
    """The keys `evaluation.*`: how the questions of an evaluation are answered."""

    samples: int = key(1, stages=("evaluation",))
    """Answers to each question of an evaluation; the figures are means over all of them. More than
    one needs evaluation.temperature above 0. (verl's val_kwargs.n.)"""
    temperature: float = key(0.0, stages=("evaluation",))
    """Temperature of the answers of an evaluation; 0 for greedy ones. Samples for pass@k besides
    greedy answers (pass_k) have sampling.temperature."""
    top_k: int = key(0, stages=("evaluation",))
    """With evaluation.temperature: sample from the k likeliest tokens; 0 for all."""
    top_p: float = key(1.0, stages=("evaluation",))
    """With evaluation.temperature: sample from the smallest set of tokens with this probability
    mass; 1 for all."""
    min_p: float = key(0.0, stages=("evaluation",))
    """With evaluation.temperature: sample from tokens at least this likely, relative to the
    likeliest; 0 for all."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if a number is out of its
        range, or if there are several greedy answers. The first fault found is raised. top_p is
        above 0, up to 1, min_p below 1."""
        at_least(self, "evaluation.", 1, "samples")
        at_least(self, "evaluation.", 0, "temperature", note="greedy")
        at_least(self, "evaluation.", 0, "top_k", note="off")
        require(0 < self.top_p <= 1, "evaluation.top_p", self.top_p, "a number in (0, 1]")
        require(0 <= self.min_p < 1, "evaluation.min_p", self.min_p, "a number in [0, 1)")
        require(
            self.samples == 1 or self.temperature > 0,
            "evaluation.samples",
            self.samples,
            "1, or evaluation.temperature above 0: greedy answers to a question are all the same",
        )

    @property
    def is_greedy(self) -> bool:
        """True if each question gets its most likely answer."""
        return self.temperature == 0

    def params(self, training: SamplingParams) -> SamplingParams:
        """Returns the sampling settings of an evaluation's answers, in the form that requests
        carry. `training`: those of training, whose limit on tokens and stop strings count here
        too."""
        if self.is_greedy:
            return training.as_greedy()
        return replace(
            training,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )
