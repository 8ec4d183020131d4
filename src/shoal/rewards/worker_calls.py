"""What a worker process does with a call: the batch out of its bytes, the function, the result as a reply."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

from shoal.rewards.calls import WRONG, Batch, CallResult, call, call_async
from shoal.rewards.event_loop import Loop
from shoal.rewards.state import changed_name, state_of
from shoal.types import RewardFunction, ShoalError
from shoal.workers.process import Header

CHECKED_CALLS = 3
"""Of so many first calls, each worker looks whether the function keeps something between them."""


class CallHandler:
    """Calls a function for the batch that was sent. After a MemoryError the worker is replaced."""

    def __init__(self, functions: Sequence[RewardFunction], timeout_seconds: float) -> None:
        self.functions, self.timeout_seconds = functions, timeout_seconds
        self.loop = Loop()
        self.num_calls: Counter[str] = Counter()

    def call(self, header: Header, body: bytes) -> Header:
        one, before = self._begin(header)
        batch = _unpickled(body)
        result = batch if isinstance(batch, CallResult) else call(one, batch, self.loop.run)
        return self._reply(one, before, result)

    async def call_async(self, header: Header, body: bytes) -> Header:
        one, before = self._begin(header)
        batch = _unpickled(body)
        result = batch if isinstance(batch, CallResult) else await call_async(one, batch, self.timeout_seconds)
        return self._reply(one, before, result)

    def _begin(self, header: Header) -> tuple[RewardFunction, dict[str, Any] | None]:
        """The function, and what it holds before one of its first calls."""
        one = self.functions[header["function"]]
        self.num_calls[one.name] += 1
        return one, _tried(state_of, one.function) if self.num_calls[one.name] <= CHECKED_CALLS else None

    def _reply(self, one: RewardFunction, before: dict[str, Any] | None, result: CallResult) -> Header:
        changed = _tried(lambda: changed_name(before, state_of(one.function))) if before else ""
        return {**result.as_json(), "changed": changed or "", "spent": isinstance(result.cause, MemoryError)}


def pickled(batch: Batch) -> bytes:
    try:
        return bytes(ForkingPickler.dumps(batch))
    except Exception as error:
        for name, values in batch.columns.items():
            for (row, _), value in zip(batch.rows, values, strict=True):
                try:
                    ForkingPickler.dumps(value)
                except Exception:
                    raise ShoalError(f"column {name!r} of data row {row} holds a {type(value).__name__}, which "
                                     f"cannot be sent to a reward process ({error}); leave it out, or call rewards in "
                                     "this process: reward.workers=0") from error
        raise


def _unpickled(body: bytes) -> Batch | CallResult:
    try:
        return ForkingPickler.loads(body)  # pyright: ignore[reportAttributeAccessIssue]
    except Exception as error:
        return CallResult(kind=WRONG, text=f"cannot be sent its batch: {type(error).__name__}: {error}; "
                                           f"reward.workers=0 calls it in this process")


def _tried(look: Callable[..., Any], *args: Any) -> Any:
    """None where a user's object cannot be looked into."""
    with contextlib.suppress(Exception):
        return look(*args)
    return None
