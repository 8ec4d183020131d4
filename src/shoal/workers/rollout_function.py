"""Runs a rollout function of TRL's convention in a session's worker process: the function says what
is to be sampled, and gets the samples.

    player <--what to sample, encode, decode-- RolloutCall <-- RolloutSampler.generate
                                                           <-- the user's function
    player ---------tokens, log-probs, text--> RolloutCall --> a dict -->

To the player it is an environment whose words are requests in JSON. The user's function runs in a
thread of this process, which waits for each answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from operator import index
from queue import SimpleQueue
from typing import Any, SupportsIndex

from shoal.records import Prompt
from shoal.workers.process import exit_forked_copies

ROLLOUT = "rollout"
"""The name of a rollout function among environments."""
_TOKENS = ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids", "env_mask")


class RolloutEnded(Exception):
    """Raised in a rollout function that asks for more although its rollout has no tokens left."""


class RolloutDropped(RolloutEnded):
    """Raised in a rollout function whose rollout is no longer waited for: it was only a trial
    before the run, or it begins again elsewhere."""


class RolloutSampler:
    """What a rollout function gets as `trainer`: samples and encodes by asking the run. It also
    takes the place of `trainer.processing_class`.

    >>> sampler.generate([{"role": "user", "content": "2 + 3?"}])
    {'prompt_ids': [...], 'completion_ids': [...], 'logprobs': [...], 'text': '5',
     'stop_reason': 'eos'}
    """

    def __init__(self, ask: Callable[[str, Any], Any]) -> None:
        """`ask(what, value)` sends a request to the run, waits, and returns the answer; `what` is
        `sample`, `encode`, `encode text`, `render` or `decode`. The value of `sample` is a dict of
        `prompt` (ids) and `max_tokens`; of `encode` a prompt; of `encode text` a text; of `render`
        [messages, whether they are continued]; of `decode` [ids, whether special tokens are
        skipped]."""
        self.ask = ask
        self.sampled: list[int] = []

    @property
    def processing_class(self) -> RolloutSampler:
        return self

    def generate(
        self, prompt: Prompt | Sequence[int], max_tokens: int | None = None
    ) -> dict[str, Any]:
        """Samples a completion of a prompt (messages, text or token ids) with the run's sampling
        settings. Returns the dict of the class's example.

        If the prompt begins with all tokens of the rollout so far, sampling continues from them;
        any other prompt begins a branch. `max_tokens` limits this turn, if it is less than the
        tokens that are left for the rollout. Raises RolloutEnded if none is left. ValueError if the
        run refuses the prompt.
        """
        ids = _token_ids(prompt)
        if ids is None:
            ids = self.encode(prompt)
        turn = self.ask("sample", {"prompt": ids, "max_tokens": max_tokens})
        self.sampled += turn["completion_ids"]
        return {"prompt_ids": ids, **turn}

    def encode(self, prompt: Prompt | Any) -> list[int]:
        """Returns the token ids of a text, or of messages as the chat template renders them.
        Messages are followed by the beginning of an assistant's message."""
        return self.ask("encode", prompt)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        return self.ask("decode", [[index(id) for id in ids], skip_special_tokens])

    def batch_decode(
        self, many: Iterable[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """Returns the text of each of many lists of token ids."""
        return [self.decode(ids, skip_special_tokens) for ids in many]

    def apply_chat_template(
        self, messages: Any, tokenize: bool = True, add_generation_prompt: bool = True
    ) -> Any:
        """Returns messages as the chat template renders them, as token ids, or as text with
        `tokenize=False`. With `add_generation_prompt` the beginning of an assistant's message
        follows them."""
        if tokenize and add_generation_prompt:
            # The run renders messages with the beginning of the assistant's message.
            return self.encode(messages)
        text = self.ask("render", [messages, not add_generation_prompt])
        return self.ask("encode text", text) if tokenize else text


def _token_ids(prompt: Any) -> list[int] | None:
    """Returns the ids of a prompt that consists of token ids; None for a text or messages. Anything
    that can be an index counts as an id, such as NumPy's integers. [] for an empty list."""
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
    """Samples one completion of each prompt, like TRL's function of this name; returns for each a
    dict with `prompt_ids`, `completion_ids`, `logprobs`, `text` and `stop_reason`. They are sampled
    one after the other."""
    return [trainer.generate(prompt) for prompt in prompts]


class RolloutCall:
    """Runs a rollout function for one rollout after another, in the form of an environment: its
    words are requests as JSON, and None once the function has returned. Its attributes are then the
    fields that the function returned besides tokens."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """`function(prompts, sampler)` gets a list of one prompt and a `RolloutSampler`, and
        returns a dict of lists of one value, or None."""
        self._function = function
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._requests: SimpleQueue[Any] = SimpleQueue()

    def reset(self, prompt: Prompt, **columns: Any) -> str | None:
        """Begins a rollout: starts the function in a thread, and returns its first request as JSON;
        None if it raised RolloutEnded before one. If the function of the previous rollout still
        waits for an answer, RolloutDropped is raised in it. The function does not get `columns`;
        its fields may not have their names. Raises what the function raised, and ValueError if it
        returned before anything was sampled."""
        # For the function of the rollout before, which may still wait for an answer.
        self._answers.put({"over": "it was dropped", "dropped": True})
        # New queues: the thread of the rollout before keeps its own.
        vars(self).update({"_answers": SimpleQueue(), "_requests": SimpleQueue()})
        # The fields of the rollout before.
        for name in list(vars(self)):
            if not name.startswith("_"):
                delattr(self, name)
        arguments = (prompt, set(columns), self._requests, self._answers)
        threading.Thread(target=self._run_function, args=arguments, daemon=True).start()
        return self._next_request()

    def respond(self, message: str) -> str | None:
        """Passes the answer to its request (`message`, as JSON) to the function, and returns its
        next request; None if the function has returned. Raises what the function raised. ValueError
        or TypeError if it returned no dict of lists of one value, other tokens than the sampled
        ones, or a field with the name of a column."""
        self._answers.put(json.loads(message))
        return self._next_request()

    def _next_request(self) -> str | None:
        """Waits for the function's next request and returns it. If the function has returned, or
        ended because the rollout is over, sets the fields that it returned as attributes and
        returns None. Raises what the function raised."""
        request = self._requests.get()
        if isinstance(request, BaseException):
            raise request
        if isinstance(request, str):
            return request
        vars(self).update(request)
        return None

    def _run_function(
        self,
        prompt: Prompt,
        columns: Set[str],
        requests: SimpleQueue[Any],
        answers: SimpleQueue[Any],
    ) -> None:
        """Runs in the function's thread: calls the function and puts its requests (text), and in
        the end its fields (a dict) or its exception, into `requests`. `columns` are names that its
        fields may not have."""
        # The function may ask from several threads: the lock gives each the answer to its request.
        lock = threading.Lock()

        def ask(what: str, value: Any) -> Any:
            """Puts a request (`what` is one of the five of `RolloutSampler`) into `requests`, waits
            for its answer and returns that. RolloutEnded or RolloutDropped if the rollout is over,
            ValueError if the request failed."""
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
            with exit_forked_copies():
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
    """A `RolloutCall` for a program that samples by asking a server's address: it gets its whole
    data row as the prompt, and may report a reward."""

    def reset(self, prompt: Prompt, **columns: Any) -> str | None:
        return super().reset({"prompt": prompt, **columns})  # type: ignore[arg-type]

    def get_reward(self) -> float | None:
        return vars(self).get("agent_reward")


def _fields(returned: Any, sampled: Sequence[int]) -> dict[str, Any]:
    """Returns what a rollout function returned besides the fields of _TOKENS, as name -> value of
    its one prompt; {} for None. TypeError if it is neither a dict nor None. ValueError if nothing
    was sampled, if a value is not a list of one, or if the returned tokens, without those of the
    environment, are not the `sampled` ones, which training uses."""
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
    # Each value is a list of one. Without these two fields all tokens are the sampled ones.
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
