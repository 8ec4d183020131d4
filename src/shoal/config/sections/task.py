"""Settings of what is trained on: the task and its environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.config.key import at_least, key, require


@dataclass(frozen=True)
class EnvironmentSection:
    """The keys `environment.*`: tools and environments, for rollouts of several turns."""

    tools: tuple[str, ...] = key(
        (),
        stages=("environment", "data", "sampling", "rewards", "evaluation"),
        names_code="environment",
    )
    """Functions that the model may call, as `file.py:function`, with type hints and a Google
    docstring."""
    factory: str = key(
        "",
        stages=("environment", "data", "sampling", "rewards", "evaluation"),
        names_code="environment",
    )
    """Class, or function without arguments, that makes the environment of a rollout, as
    `file.py:Factory`: its `reset(**columns)` begins a rollout, its public methods are tools,
    `respond(message)` answers in words, and `get_reward()` is a further reward. Or a mapping of
    names to factories, from which the column `environment` chooses one; or `openenv:URL`, an
    OpenEnv server."""
    rollout: str = key(
        "",
        stages=("environment", "data", "sampling", "rewards", "evaluation"),
        names_code="environment",
    )
    """Function that plays a rollout, as `file.py:function`, in TRL's convention:
    `function([prompt], sampler)` calls `sampler.generate(...)` as often as it likes, and returns
    fields for the reward functions."""
    agent: str = key(
        "",
        stages=("environment", "data", "sampling", "rewards", "evaluation"),
        names_code="environment",
    )
    """Program that plays a rollout, as `python my_agent.py`, or function, as `file.py:function`: it
    calls the address in OPENAI_BASE_URL, with a key of its own, as often as it likes, and gets its
    row as JSON on standard input."""
    max_turns: int = key(8, stages=("environment", "sampling", "evaluation"))
    """Largest number of turns of the model in a rollout. All of a rollout's tokens, those of tools
    included, are limited by sampling.max_completion_tokens."""
    history: Literal["keep", "template"] = key(
        "keep", stages=("environment", "sampling", "evaluation")
    )
    """What a turn reads of those before it: keep, the tokens that were sampled; template, what the
    chat template makes of the messages each time, which may leave out thoughts. If that differs
    from the tokens so far, the rollout continues in a branch with a prompt of its own, of at most
    sampling.max_prompt_tokens."""
    call_format: Literal[
        "auto", "hermes", "xml", "llama", "gemma", "harmony", "mistral", "template"
    ] = key(
        "auto",
        stages=("environment", "data", "sampling", "evaluation"),
        decided_from=(
            "model.path",
            "model.tokenizer",
            "model.template",
            "task.name",
            "environment.tools",
            "environment.factory",
        ),
    )
    """How the model writes tool calls; auto takes it from the tokenizer and its chat template."""
    on_error: Literal["error", "zero", "skip"] = key(
        "error", stages=("environment", "sampling", "rewards", "evaluation")
    )
    """If an environment fails, hangs or dies: error stops the run, zero ends that rollout with
    reward 0, skip excludes it from its group. If a tool raises, the model gets the error as its
    answer, and the rollout continues."""
    timeout_seconds: float = key(60.0, stages=("environment", "sampling", "evaluation"))
    """Time limit of one call of a tool or an environment; when it is reached, the process is
    killed."""
    episode_seconds: float = key(600.0, stages=("environment", "sampling", "evaluation"))
    """Time limit of all calls of a rollout together."""
    memory_gib: float = key(4.0, stages=("environment", "sampling", "evaluation"))
    """Memory that a session may allocate on top of its start-up; 0 for no limit."""
    result_bytes: int = key(65536, stages=("environment", "sampling", "evaluation"))
    """Longest result of a call; the rest is cut off."""
    special_tokens: bool = key(True, stages=("environment", "sampling", "evaluation"))
    """Special and other added tokens of the tokenizer that the words of tools and environments
    spell out, such as `<|im_end|>`, become those tokens, as in TRL. false: they stay plain text, so
    that words of strangers, such as web pages, cannot end a turn or speak as the system."""
    sandbox: Literal["none", "bwrap"] = key(
        "none", stages=("environment", "sampling", "evaluation")
    )
    """bwrap: sessions run in the system's bubblewrap, without network, with a read-only file system
    and without the sockets of other programs."""
    workers: int = key(32, stages=("environment", "sampling", "evaluation"))
    """Largest number of concurrent calls of tools that are functions, each in its own process;
    `async` tools share one process, without this limit."""
    rollouts: int = key(
        0,
        stages=("environment", "sampling", "evaluation"),
        undecided_because="it is the number of slots, which each host plans when it starts",
    )
    """Largest number of concurrent rollouts; more than the sampler has slots keeps its slots busy
    while other rollouts wait for tools. 0: as many as there are slots."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if a number is out of its
        range, or `rollout` or `agent` is given together with another kind of tools or environment.
        The first fault found is raised. max_turns, result_bytes and workers are 1 or more,
        memory_gib and rollouts 0 or more, timeout_seconds and episode_seconds above 0."""
        at_least(self, "environment.", 1, "max_turns", "result_bytes", "workers")
        at_least(self, "environment.", 0, "memory_gib", "rollouts")
        for name in ("rollout", "agent"):
            others = (
                self.tools or self.factory or (self.agent if name == "rollout" else self.rollout)
            )
            require(
                not (getattr(self, name) and others),
                f"environment.{name}",
                getattr(self, name),
                "no tools and no environment together with it: it calls what it needs",
            )
        for name in ("timeout_seconds", "episode_seconds"):
            require(
                getattr(self, name) > 0,
                f"environment.{name}",
                getattr(self, name),
                "a number above 0",
            )


DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow")
"""Endings of the names of data files."""


def names_file(text: str) -> bool:
    """True if a text is the path of a file of data, not the name of a task or a split."""
    return "/" in text or text.endswith(DATA_SUFFIXES)


DOORS = {
    "agent": "agent='python my_agent.py' (environment.agent), together with the task whose prompts "
    "it gets",
    "openenv": "environment=openenv:URL, with task=environment where the server asks the questions",
    "verifiers": "task=custom with agent= and the rows that it writes, by "
    "examples/verifiers_agent.py",
}
"""Names that are given as a task, before a colon, but mean something that plays rollouts -> what to
write in their place."""


GENERATED_TASKS = ("words", "calculator", "guess", "countdown", "environment")
"""Tasks that generate their questions instead of reading them."""


@dataclass(frozen=True)
class TaskSection:
    """The keys `task.*`: questions to train and evaluate on."""

    name: str = key("words", stages=("data", "rewards", "evaluation"), on_resume="fixed")
    """words | calculator | guess | gsm8k | math | ifeval | countdown | code, or custom for your own
    data at task.path; to evaluate on: aime24 | aime25 | gpqa | mmlu_pro | livecodebench."""
    path: str = key("", stages=("data", "rewards", "evaluation"))
    """Your own data in place of the task's: a jsonl or parquet file, a folder of them, or a hub
    id."""
    subset: str = key("", stages=("data", "rewards", "evaluation"), acts_if="data is read")
    """Subset (configuration) of a data set on the hub; empty for its only or default one."""
    files: tuple[str, ...] = key(
        (), stages=("data", "rewards", "evaluation"), acts_if="data is read"
    )
    """Files of a folder or hub data set to train on (patterns allowed), in place of task.split's
    files."""
    columns: tuple[str, ...] = key((), stages=("data", "rewards", "evaluation"))
    """Columns to rename, as `wanted=yours`: [prompt=question,answer=final]."""
    template: str = key("", stages=("data", "rewards", "evaluation"))
    """Text (or a file with it) that makes the prompt from a row's columns: `Solve: {question}`."""
    system: str = key("", stages=("data", "rewards", "evaluation"))
    """System prompt of every row, in place of a row's own: 'Answer in one word.'"""
    split: str = key("train", stages=("data", "rewards", "evaluation"), acts_if="data is read")
    """Split to train on."""
    eval_split: str = key("test", stages=("evaluation", "data"), acts_if="data is read")
    """Split to evaluate on, or files by their paths, with commas between them: data/val.parquet."""
    num_train_questions: int = key(0, stages=("data",))
    """Rows to train on, the first so many; 0 for all. For a trial of a run on few of them."""
    num_eval_questions: int = key(500, stages=("evaluation", "data"))
    """Held-out questions in an evaluation; 0 for all."""
    hold_out: bool = key(True, stages=("data", "evaluation"), acts_if="data is read")
    """Hold out a tenth of the rows if there are no others to evaluate on; false trains on all of
    them, as TRL does, and needs train.evaluate_every=-1 then."""
    num_steps: int = key(3, stages=("data", "rewards", "evaluation"))
    """words: operations in a problem."""
    max_value: int = key(99, stages=("data", "rewards", "evaluation"))
    """words, countdown: the largest number in a problem."""
    num_numbers: int = key(4, stages=("data", "rewards", "evaluation"))
    """countdown: how many numbers may be combined to reach the target."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if `name` is a path, a file of
        data, or what DOORS says is given in another way, a number is out of its range, or an entry
        of `columns` is not wanted=theirs. The first fault found is raised. Whether there is a task
        of this name is not checked here. num_steps is 1 to 8, num_numbers 2 to 6, max_value 20 or
        more."""
        door = DOORS.get(self.name.partition(":")[0])
        require(door is None, "task.name", self.name, door or "")
        require(
            not names_file(self.name),
            "task.name",
            self.name,
            f"the name of a task; for your own data write task=custom task.path={self.name}",
        )
        at_least(self, "task.", 0, "num_train_questions", "num_eval_questions", note="all")
        require(1 <= self.num_steps <= 8, "task.num_steps", self.num_steps, "1 to 8")
        at_least(self, "task.", 20, "max_value")
        require(2 <= self.num_numbers <= 6, "task.num_numbers", self.num_numbers, "2 to 6")
        for entry in self.columns:
            wanted, equals, theirs = entry.partition("=")
            require(
                bool(equals and wanted.strip() and theirs.strip()),
                "task.columns",
                entry,
                "wanted=theirs",
            )
