"""Agents: programs or functions that play a rollout by calling an OpenAI-compatible address of
their own.

    agent --HTTP, its key--> Api --> AgentSampler --ask--> the rollout's turn driver, in the
                                                           trainer's process

To the turn driver (`TurnDriver`) an agent is a rollout function. Agent and address run in a
session's process, and end with it."""

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
"""Seconds that a program may still run after its rollout has no tokens left."""


class AgentSampler:
    """The `Sampler` behind an agent's address: passes calls to the rollout's turn driver, which
    answers them one after the other."""

    max_tokens = vocab_size = 2**31 - 1  # no limits here, because the turn driver checks them
    eos_ids = ()

    def __init__(self, sampler: RolloutSampler, section: SamplingSection, model: str) -> None:
        """`sampler`: the connection to the turn driver; `section`: the run's sampling settings,
        which every call must have; `model`: the name that the address reports."""
        self.name = model
        self.params = section.params
        self.max_prompt_tokens = section.max_prompt_tokens
        self._longest = section.max_prompt_tokens + section.max_completion_tokens
        self._sampler = sampler
        self._lock = threading.Lock()
        self.reward: float | None = None  # reward that the agent posted, or None
        self.is_over = False
        self.when_over: Callable[[], object] = _do_nothing  # called once, at the rollout's end
        # Called before the program learns that its rollout was dropped, and complains.
        self.when_dropped: Callable[[], object] = _do_nothing

    async def sample(self, call: Call) -> Sampled:
        """Answers a call of the agent: asks the turn driver, waits until the completion has been
        sampled, and returns the prompt's ids with it. ShoalError if the call asks for other
        sampling settings than the run's or for several completions, if its prompt is too long, or
        if the rollout is over. `max_tokens` of a call cuts this answer alone."""
        for name in ("temperature", "top_k", "top_p", "min_p", "stop"):
            requested = getattr(call.params, name)
            own = getattr(self.params, name)
            require(requested == own, name, requested, f"the run's, {own}; leave it out")
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
        request = {
            "prompt": call.prompt,
            "tools": list(call.tools),
            "named": call.logprobs,
            "max_tokens": call.params.max_tokens,
        }
        answer = await asyncio.to_thread(self._ask, request)
        return Sampled(answer["prompt_ids"], answer["choices"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a call (`request`: prompt, tools, named, max_tokens) to the turn driver, waits for
        the answer (blocks), and returns it: a dict with `prompt_ids` and `choices`. ShoalError if
        the rollout is over or the call is wrong. At the rollout's end it first calls `when_over`,
        once; before that `when_dropped`, if the rollout was dropped."""
        try:
            answer = self._sampler.ask("call", request)
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
        # token ids of all answered calls: if there are none at the end, no call was answered
        self._sampler.sampled += answer["choices"][0]["ids"]
        return answer

    def take_reward(self, body: dict[str, Any]) -> None:
        """Keeps a reward that the agent posts as {"reward": number}, in place of an earlier one.
        ShoalError if it is no number (true and false are none); other fields are ignored."""
        reward = body.get("reward")
        require(type(reward) in (int, float), "reward", reward, "a number")
        self.reward = reward

    def check(self) -> None:
        """Does nothing: the address lives only as long as its rollout."""


class AgentProgram:
    """A rollout function that starts an agent and waits for its end."""

    def __init__(
        self, agent: str | Callable[..., float | None], sampling: SamplingSection, model: str
    ) -> None:
        """`agent`: a command, whose words are split like a shell's, or a function of (row, url,
        key) that returns a reward or None. `sampling`: the run's sampling settings. `model`: the
        name that the agent's address reports. ShoalError if a package is missing."""
        require_packages("serve", "starlette", "uvicorn")
        # imported now, before sessions are forked, because each of them would import it
        import shoal.serve.app  # noqa: F401

        self.agent, self.sampling, self.model = agent, sampling, model

    def __call__(
        self, rows: Sequence[Mapping[str, Any]], sampler: RolloutSampler
    ) -> dict[str, Any]:
        """Plays the rollout of `rows[0]`: opens an address with a new key, runs the agent to its
        end, closes the address, and returns {"agent_reward": [reward]}. The reward is the one that
        the agent posted, else the one that its function returned or its command printed last; None
        if there is none. RuntimeError if the agent had no call answered."""
        from shoal.serve.app import Api

        agent_sampler = AgentSampler(sampler, self.sampling, self.model)
        key = secrets.token_urlsafe(24)
        # 1e9: no limit of time; the session has one
        api = Api(agent_sampler, key, seconds=1e9, posts={"/v1/reward": agent_sampler.take_reward})
        with served(api.app()) as address:
            url = f"{address}/v1"
            if isinstance(self.agent, str):
                own_reward = _run_command(self.agent, rows[0], url, key, agent_sampler)
            else:
                own_reward = self.agent(rows[0], url, key)
        if not sampler.sampled:
            raise RuntimeError(
                "the agent ended without a request to OPENAI_BASE_URL that was answered"
            )
        reward = agent_sampler.reward
        if reward is None:
            reward = own_reward
        return {"agent_reward": [reward]}


def _do_nothing() -> None:
    return None


def _write_and_close(to: IO[str], text: str) -> None:
    """Writes a text to a program's input and closes it; ignores a program that no longer reads."""
    with contextlib.suppress(BrokenPipeError), to:
        to.write(text)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a program and everything that it started, without a message."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _run_command(
    command: str, row: Mapping[str, Any], url: str, key: str, agent_sampler: AgentSampler
) -> float | None:
    """Runs an agent's command to its end, with the row as JSON on its input, and `url` and `key` in
    its environment (OPENAI_BASE_URL, OPENAI_API_KEY). Returns the number in the last line that it
    printed and that is not blank, or None if that is no number or there is no such line. The
    command and all that it started are killed GRACE seconds after the rollout is over, or at once
    if the rollout is dropped. RuntimeError if its exit code is not 0, unless the rollout was
    over."""
    last_line = ""
    variables = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
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
        # Kill the whole group: a program that a shell, or `uv run`, started would continue and keep
        # the output open.
        timer = threading.Timer(GRACE, os.killpg, (process.pid, signal.SIGKILL))
        timer.daemon = True
        agent_sampler.when_over = timer.start
        agent_sampler.when_dropped = functools.partial(_kill, process)
        # Write in a thread: a program that reads its row late, or never, may print before, and end
        # when it likes.
        row_text = json.dumps(row, default=str)
        writer = threading.Thread(
            target=_write_and_close, args=(process.stdin, row_text), daemon=True
        )
        writer.start()
        # until the program, and what it started, has closed its output
        for line in process.stdout:
            if line.strip():
                last_line = line.strip()
        writer.join()
    # the program has ended by itself; a timer that was never started may be cancelled too
    timer.cancel()
    if process.returncode and not agent_sampler.is_over:
        raise RuntimeError(f"the agent ended with exit code {process.returncode}")
    with contextlib.suppress(ValueError):
        return float(last_line)
    return None
