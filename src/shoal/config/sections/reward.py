"""Settings of what scores completions: reward functions, judges and reward models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from shoal.config.key import at_least, key, require


@dataclass(frozen=True)
class JudgeSection:
    """The keys `reward.judge.*`: a language model that scores completions."""

    model: str = key("", stages=("rewards", "evaluation"))
    """Name of the model at the address of reward=judge:URL. A key is read from OPENAI_API_KEY."""
    template: str = key("", stages=("rewards", "evaluation"))
    """Text (or a file with it) that the judge is asked, with {prompt}, {completion}, and {answer}
    or any other column of the data; empty for our own, which asks how right and complete the
    completion is. The score is the number after the reply's last `Score:` (or the field `score` of
    a JSON object), else a reply that is nothing but a number; `8/10` is 8."""
    score_range: tuple[float, ...] = key((0.0, 10.0), stages=("rewards", "evaluation"))
    """Lowest and highest score: the reward is 0 for the lowest, 1 for the highest. A reply without
    a score between them, or with another scale (`4/5` of 10), is a failure."""
    response_format: Literal["text", "json_object", "json_schema"] = key(
        "text", stages=("rewards", "evaluation")
    )
    """Form of the reply that is requested: json_schema (vLLM, SGLang, OpenAI) and json_object are
    sent as `response_format`, and their replies have the score in a field `score`; text sends
    none."""
    max_tokens: int = key(512, stages=("rewards", "evaluation"))
    """Longest reply; sent as `max_completion_tokens` if the server asks for that."""
    concurrency: int = key(16, stages=())
    """Largest number of concurrent requests."""
    retries: int = key(3, stages=("rewards", "evaluation"))
    """How often a request is repeated, after growing pauses, if the server is busy, fails, hangs or
    answers with something else; all within reward.timeout_seconds, each at most half of it."""
    cache: str = key("~/.cache/shoal/judge", stages=("rewards", "evaluation"))
    """Folder in which replies are kept, so that no text is graded twice, and a resumed run gives
    the same rewards; empty for none."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if the range of scores is not
        two ascending numbers, a number is out of its range, or `cache` is a URL. The first fault
        found is raised. max_tokens and concurrency are 1 or more, retries 0 or more."""
        low_high = self.score_range
        require(
            len(low_high) == 2 and low_high[0] < low_high[1],
            "reward.judge.score_range",
            low_high,
            "the lowest and the highest score, [0,10]",
        )
        at_least(self, "reward.judge.", 1, "max_tokens", "concurrency")
        at_least(self, "reward.judge.", 0, "retries")
        require(
            "://" not in self.cache, "reward.judge.cache", self.cache, "a local folder, or empty"
        )


@dataclass(frozen=True)
class RewardSection:
    """The keys `reward.*`: functions that score completions."""

    functions: tuple[str, ...] = key((), stages=("rewards", "evaluation"), names_code="rewards")
    """Reward functions as `file.py:function` (with fixed arguments `file.py:function(x=3)`), names
    of ready-made ones (accuracy_reward, ...), `model:PATH` for a reward model (a sequence
    classifier's folder or hub id), or `judge:URL` for a judge behind an OpenAI-style address; empty
    for the task's own."""
    weights: tuple[float, ...] = key((), stages=("rewards", "evaluation"))
    """Weight of each function; empty for 1.0 each, or the task's own."""
    preset: Annotated[str, REWARD_PRESETS] = key(
        "shoal", stages=("rewards", "data", "evaluation"), acts_if="data is read"
    )
    """gsm8k: the system whose prompt and rewards are used. custom: with verl, rows that verl
    prepared of GSM8K, MATH or DAPO's data have its reward (verl_reward)."""
    overlong_buffer_tokens: int = key(0, stages=("rewards", "evaluation"))
    """DAPO's penalty for long completions (TRL's soft_punish_cache): the reward falls linearly over
    this many tokens before sampling.max_completion_tokens; -1 for a fifth of that limit, as in the
    paper, 0 for no penalty."""
    overlong_penalty: float = key(1.0, stages=("rewards", "evaluation"))
    """Largest overlong penalty: subtracted from the reward of a completion at the limit."""
    timeout_seconds: float = key(60.0, stages=())
    """Time limit of one call of a reward function; when it is reached, the process is killed."""
    memory_gib: float = key(4.0, stages=())
    """Memory that a reward process may allocate on top of its own start-up; 0 for no limit."""
    on_error: Literal["error", "zero", "skip"] = key("error", stages=("rewards", "evaluation"))
    """If a reward function raises, hangs, crashes or returns NaN for a completion: error stops the
    run, zero scores it 0, skip excludes the completion from its group (mean, deviation and loss).
    Each failure is counted and reported with its example."""
    max_failed_share: float = key(0.5, stages=())
    """With on_error=zero or skip: the run stops with an error if a function failed for more than
    this share of its last 64 completions, or of fewer completions at the end of the run, or after 3
    minutes of waiting in which nothing else came; 1 for no limit."""
    workers: int = key(2, stages=())
    """Processes that call reward functions; 0 calls them in the main process, without limits on
    time and memory."""
    judge: JudgeSection = field(default_factory=JudgeSection)

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if a number is out of its
        range. The first fault found is raised. timeout_seconds is above 0, max_failed_share 0 to 1,
        overlong_buffer_tokens -1 or more; memory_gib, workers and overlong_penalty are 0 or more.
        The number of `weights` is checked when the functions are loaded: a missing file is said
        first."""
        require(
            self.timeout_seconds > 0,
            "reward.timeout_seconds",
            self.timeout_seconds,
            "a number above 0",
        )
        require(
            0 <= self.max_failed_share <= 1,
            "reward.max_failed_share",
            self.max_failed_share,
            "a share, 0 to 1",
        )
        at_least(self, "reward.", 0, "memory_gib", note="no limit")
        require(
            self.overlong_buffer_tokens >= -1,
            "reward.overlong_buffer_tokens",
            self.overlong_buffer_tokens,
            "-1 (a fifth), 0 (off) or more",
        )
        at_least(self, "reward.", 0, "overlong_penalty")
        at_least(self, "reward.", 0, "workers", note="in this process")


REWARD_PRESETS: dict[str, str] = {"shoal": "shoal.tasks.gsm8k:SHOAL"}
"""The values of `reward.preset` -> `module:object` of a `RewardPreset`. `shoal/__init__.py` adds
those of other systems."""
