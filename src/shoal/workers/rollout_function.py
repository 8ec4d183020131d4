"""A rollout function in TRL's convention, in a session's process: it says what is sampled from, and
sees what came out.

    player <--what to sample, encode, decode-- RolloutCall <-- RolloutSampler.generate
                                                           <-- the user's function
    player ---------tokens, log-probs, text--> RolloutCall --> a dict -->

To the player it is an environment whose words are requests. The function runs in a thread, which
waits meanwhile.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from operator import index
from queue import SimpleQueue
from typing import Any, SupportsIndex

from shoal.records import Prompt
from shoal.workers.process import ends_copies

ROLLOUT = "rollout"
"""The name of a rollout function among environments."""
_TOKENS = ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids", "env_mask")


class RolloutEnded(Exception):
    """Raised in a rollout function that asks for more where its rollout has no tokens left."""


class RolloutDropped(RolloutEnded):
    """Raised in a rollout function whose rollout nobody waits for any more: one that was tried
    before the run, or begins anew elsewhere."""


class RolloutSampler:
    """What a rollout function gets as `trainer`: samples, and is its own `processing_class`.

    >>> sampler.generate([{"role": "user", "content": "2 + 3?"}])
    {'prompt_ids': [...], 'completion_ids': [...], 'logprobs': [...], 'text': '5',
     'stop_reason': 'eos'}
    """

    def __init__(self, ask: Callable[[str, Any], Any]) -> None:
        self.ask = ask
        self.sampled: list[int] = []

    @property
    def processing_class(self) -> RolloutSampler:
        return self

    def generate(
        self, prompt: Prompt | Sequence[int], max_tokens: int | None = None
    ) -> dict[str, Any]:
        """Samples after messages, a text or token ids, with the run's settings. What extends all
        tokens so far goes on from them, anything else is a branch with a prompt of its own.
        `max_tokens` ends this turn alone, where that is less than what is left. Raises RolloutEnded
        where no token is left."""
        ids = _token_ids(prompt)
        if ids is None:
            ids = self.encode(prompt)
        turn = self.ask("sample", {"prompt": ids, "max_tokens": max_tokens})
        self.sampled += turn["completion_ids"]
        return {"prompt_ids": ids, **turn}

    def encode(self, prompt: Prompt | Any) -> list[int]:
        """Token ids of a text, or of messages by the chat template."""
        return self.ask("encode", prompt)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.ask("decode", [[index(id) for id in ids], skip_special_tokens])

    def batch_decode(
        self, many: Iterable[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in many]

    def apply_chat_template(
        self, messages: Any, tokenize: bool = True, add_generation_prompt: bool = True
    ) -> Any:
        """Messages as text, or as token ids."""
        if tokenize and add_generation_prompt:
            return self.encode(messages)
        text = self.ask("render", [messages, not add_generation_prompt])
        return self.ask("encode text", text) if tokenize else text


def _token_ids(prompt: Any) -> list[int] | None:
    """The ids of a prompt of token ids; None for a text or messages."""
    if isinstance(prompt, str):
        return None
    ids = []
    for id in prompt:
        if not isinstance(id, SupportsIndex):
            return None
        ids.append(index(id))
    return ids


def generate_rollout_completions(
    trainer: RolloutSampler, prompts: Sequence[Any]
) -> list[dict[str, Any]]:
    """TRL's function of this name: one completion of each prompt, with `prompt_ids`,
    `completion_ids`, `logprobs` and `text`."""
    return [trainer.generate(prompt) for prompt in prompts]


class RolloutCall:
    """The calls of a rollout function, one for each rollout, as an environment: its words are
    requests as JSON, None once the function has returned. Its attributes are the fields that the
    function returned beside tokens."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._requests: SimpleQueue[Any] = SimpleQueue()

    def reset(self, prompt: Prompt, **columns: Any) -> str | None:
        # To the function of the rollout before.
        self._answers.put({"over": "it was dropped", "dropped": True})
        vars(self).update({"_answers": SimpleQueue(), "_requests": SimpleQueue()})
        for name in list(vars(self)):
            if not name.startswith("_"):
                delattr(self, name)
        arguments = (prompt, set(columns), self._requests, self._answers)
        threading.Thread(target=self._run, args=arguments, daemon=True).start()
        return self._next()

    def respond(self, message: str) -> str | None:
        self._answers.put(json.loads(message))
        return self._next()

    def _next(self) -> str | None:
        request = self._requests.get()
        if isinstance(request, BaseException):
            raise request
        if isinstance(request, str):
            return request
        vars(self).update(request)
        return None

    def _run(
        self,
        prompt: Prompt,
        columns: Set[str],
        requests: SimpleQueue[Any],
        answers: SimpleQueue[Any],
    ) -> None:
        # Of threads of the function's own each gets the answer to what it asked.
        lock = threading.Lock()

        def ask(what: str, value: Any) -> Any:
            with lock:
                requests.put(json.dumps({"what": what, "value": value}))
                answer = answers.get()
            if "dropped" in answer:
                raise RolloutDropped(answer["over"])
            if "over" in answer:
                raise RolloutEnded(answer["over"])
            if "error" in answer:
                raise ValueError(answer["error"])
            return answer["value"]

        sampler = RolloutSampler(ask)
        try:
            with ends_copies():
                returned = self._function([prompt], sampler)
            fields = _fields(returned, sampler.sampled)
            for name in fields:
                if name in columns or name.startswith("_") or hasattr(self, name):
                    raise ValueError(
                        f"the field {name!r} has the name of a column, or of what is used here: "
                        "rename it"
                    )
            requests.put(fields)
        except RolloutEnded:
            requests.put({})
        except BaseException as error:
            requests.put(error)


class Agent(RolloutCall):
    """The same of a program that asks an address: it gets its whole row, and may say a reward."""

    def reset(self, prompt: Prompt, **columns: Any) -> str | None:
        return super().reset({"prompt": prompt, **columns})  # type: ignore[arg-type]

    def get_reward(self) -> float | None:
        return vars(self).get("agent_reward")


def _fields(returned: Any, sampled: Sequence[int]) -> dict[str, Any]:
    """The further fields of what a function returned. ValueError where its tokens are not those
    that were sampled: what is learned from is what was sampled."""
    if not sampled:
        raise ValueError(
            "the rollout function returned before anything was sampled: call generate(prompt)"
        )
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"the rollout function returned {type(returned).__name__}: expected a dict or None"
        )
    for name, values in returned.items():
        if not isinstance(values, list | tuple) or len(values) != 1:
            raise ValueError(
                f"{name!r}: expected a list of one value, for the one prompt that was given"
            )
    ids = [int(id) for id in returned.get("completion_ids", [sampled])[0]]
    mask = returned.get("env_mask", [[1] * len(ids)])[0]
    own_ids = None
    if len(ids) == len(mask):
        own_ids = [id for id, is_own in zip(ids, mask, strict=True) if is_own]
    if own_ids != list(sampled):
        raise ValueError(
            "completion_ids, where env_mask is 1, are not the tokens that generate() returned, in "
            "order: what is learned from is what was sampled; give tokens of the environment "
            "env_mask 0"
        )
    return {name: values[0] for name, values in returned.items() if name not in _TOKENS}
