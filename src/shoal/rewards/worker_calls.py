"""What a worker process does with a call: the batch out of its bytes, the function, the result as a reply."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler

from shoal.rewards.calls import WRONG, Batch, CallResult, call, call_async
from shoal.rewards.event_loop import Loop
from shoal.types import RewardFunction, ShoalError
from shoal.workers.process import Header


class CallHandler:
    """Calls a function for the batch that was sent. After a MemoryError the worker is replaced."""

    def __init__(self, functions: Sequence[RewardFunction], timeout_seconds: float) -> None:
        self.functions, self.timeout_seconds = functions, timeout_seconds
        self.loop = Loop()

    def call(self, header: Header, body: bytes) -> Header:
        batch = _unpickled(body)
        return _reply(batch if isinstance(batch, CallResult) else
                      call(self.functions[header["function"]], batch, self.loop.run))

    async def call_async(self, header: Header, body: bytes) -> Header:
        batch = _unpickled(body)
        return _reply(batch if isinstance(batch, CallResult) else
                      await call_async(self.functions[header["function"]], batch, self.timeout_seconds))


def _reply(result: CallResult) -> Header:
    return {**result.as_json(), "spent": isinstance(result.cause, MemoryError)}


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
