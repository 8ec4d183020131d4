"""An agent: a program, or a function, that plays a rollout by asking an address that is its own.

    agent --HTTP, its key--> Api --> AgentSampler --ask--> the rollout's player, in the trainer's
                                                           process

To the player it is a rollout function. All of it lives in a session's process, and ends with that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from shoal.chat.turns import check_size
from shoal.config.sections.sampling import SamplingSection
from shoal.records import ShoalError
from shoal.serve.api import Call, Sampled, require
from shoal.serve.server import require_packages, served
from shoal.workers.rollout_function import RolloutDropped, RolloutEnded, RolloutSampler

GRACE = 10.0
"""Seconds that a program may still run once its rollout has no tokens left."""


class AgentSampler:
    """A rollout as the `Sampler` of an address. Calls are answered one after the other."""

    max_tokens = vocab_size = 2**31 - 1  # the player judges
    eos_ids = ()

    def __init__(self, sampler: RolloutSampler, section: SamplingSection, model: str) -> None:
        self.params, self.max_prompt_tokens, self.name = (
            section.params,
            section.max_prompt_tokens,
            model,
        )
        self._longest = section.max_prompt_tokens + section.max_completion_tokens
        self._sampler, self._lock = sampler, threading.Lock()
        self.reward: float | None = None  # that was posted
        self.is_over, self.when_over = False, lambda: None
        self.when_dropped = lambda: None  # before it learns of it, and complains

    async def sample(self, call: Call) -> Sampled:
        own, given = self.params, call.params
        for name in ("temperature", "top_k", "top_p", "min_p", "stop"):
            require(
                getattr(given, name) == getattr(own, name),
                name,
                getattr(given, name),
                f"the run's, {getattr(own, name)}; leave it out",
            )
        require(
            call.num_completions == 1,
            "n",
            call.num_completions,
            "1: the others of the group have agents too",
        )
        require(call.seed is None, "seed", call.seed, "none: a rollout's noise is its own")
        check_size(
            call.prompt,
            call.tools,
            self._longest,
            "sampling.max_prompt_tokens and max_completion_tokens",
        )
        return Sampled(
            **await asyncio.to_thread(
                self._ask,
                {
                    "prompt": call.prompt,
                    "tools": list(call.tools),
                    "named": call.logprobs,
                    "max_tokens": given.max_tokens,
                },
            )
        )

    def _ask(self, call: dict[str, Any]) -> dict[str, Any]:
        try:
            found = self._sampler.ask("call", call)
        except RolloutEnded as error:
            with self._lock:
                if isinstance(error, RolloutDropped):
                    self.when_dropped()
                if not self.is_over:
                    self.is_over = True
                    self.when_over()
            raise ShoalError(f"the rollout is over: {error}") from None
        except ValueError as error:
            raise ShoalError(str(error)) from None
        self._sampler.sampled += found["choices"][0]["ids"]
        return found

    def take_reward(self, body: dict[str, Any]) -> None:
        require(type(value := body.get("reward")) in (int, float), "reward", value, "a number")
        self.reward = value

    def check(self) -> None:
        """It can be asked as long as it is there."""


class AgentProgram:
    """A rollout function that starts an agent, a command or a function of (row, url, key), and
    waits for its end."""

    def __init__(
        self, agent: str | Callable[..., float | None], sampling: SamplingSection, model: str
    ) -> None:
        require_packages("serve", "starlette", "uvicorn")
        # before sessions are forked, which would each import it
        import shoal.serve.app  # noqa: F401

        self.agent, self.sampling, self.model = agent, sampling, model

    def __call__(
        self, rows: Sequence[Mapping[str, Any]], sampler: RolloutSampler
    ) -> dict[str, Any]:
        from shoal.serve.app import Api

        played, key = AgentSampler(sampler, self.sampling, self.model), secrets.token_urlsafe(24)
        api = Api(played, key, seconds=1e9, posts={"/v1/reward": played.take_reward})
        with served(api.app()) as address:
            url = f"{address}/v1"
            said = (
                _run(self.agent, rows[0], url, key, played)
                if isinstance(self.agent, str)
                else self.agent(rows[0], url, key)
            )
        if not sampler.sampled:
            raise RuntimeError(
                "the agent ended without a request to OPENAI_BASE_URL that was answered"
            )
        return {"agent_reward": [said if played.reward is None else played.reward]}


def _give(to: IO[str], text: str) -> None:
    with contextlib.suppress(BrokenPipeError), to:
        to.write(text)


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends a program with what it started, without a word of its own."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _run(
    command: str, row: Mapping[str, Any], url: str, key: str, played: AgentSampler
) -> float | None:
    """The number that a program printed last, if it is one."""
    last, variables = "", {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    with subprocess.Popen(
        shlex.split(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        env=variables,
        process_group=0,
    ) as process:
        assert process.stdin and process.stdout
        # All of it: what a shell, or `uv run`, started would go on, and hold its output open.
        timer = threading.Timer(GRACE, os.killpg, (process.pid, signal.SIGKILL))
        timer.daemon, played.when_over = True, timer.start
        played.when_dropped = functools.partial(_kill, process)
        # In a thread: one that reads its row late, or never, may print before, and ends when it
        # likes.
        giver = threading.Thread(
            target=_give, args=(process.stdin, json.dumps(row, default=str)), daemon=True
        )
        giver.start()
        for line in process.stdout:
            last = line.strip() or last
        giver.join()
    timer.cancel()
    if process.returncode and not played.is_over:
        raise RuntimeError(f"the agent ended with exit code {process.returncode}")
    with contextlib.suppress(ValueError):
        return float(last)
    return None
