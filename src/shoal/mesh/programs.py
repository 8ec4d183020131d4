"""Compiled programs: all of them are `Program`s, which a `Role` makes with the compiler options of
its platform.

`shoal plan` compiles the same programs for devices that this machine does not have.
"""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.core import Tracer

MAX_IN_FLIGHT = 2
"""How many compiled programs of the same devices may be unfinished at a time. On simulated CPU
devices more of them, with collectives, can abort the process after a rendezvous of 40 s."""

_V5P = {
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_reduce_scatter_padding": True,
}

COMPILER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "tpu": {
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_enable_async_all_gather": True,
        "xla_tpu_prefer_async_allgather_to_allreduce": True,
    },
    # Products of one input are not joined: for that the weights of q, k and v (of a small model
    # also gate and up) would be copied next to each other, in decoding at every token.
    "gpu": {"xla_gpu_dot_merger_threshold_mb": 0},
    # As JAX names them. Beyond four chips XLA's defaults sum gradients by an all-reduce, since that
    # uses all dimensions of the torus: twice the bytes, and each gradient whole on each chip (70B
    # on 64 chips: 10.7 GB of temporaries, with these 9.5). A SparseCore scatters over all
    # dimensions too, while the products go on; without padding it refuses parts that six links do
    # not divide.
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
}
"""Platform or kind of device -> XLA's options for all programs. On a whole 4x4x4 torus XLA's
defaults turn every gather of weights into an all-reduce; with those for TPUs they are gathers, and
run under the products."""

_VMEM = {"xla_tpu_scoped_vmem_limit_kib": "32768"}

SAMPLER_OPTIONS: Mapping[str, Mapping[str, Any]] = {"TPU v5": _VMEM, "TPU v5p": _VMEM}
"""Kind of device -> further options of the sampler's programs. Products of few rows wait for
weights, which are read in larger parts with 32 MB of on-chip memory for an operation (v6e's
default) in place of 16: 70B on 8 v5p by cycles 15.9 -> 14.9 ms a token."""

CHUNKED_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    kind: {"xla_tpu_scoped_vmem_limit_kib": "16384"}
    for kind in ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e")
}
"""Kind of device -> further options for decoding with matrices in chunks (`ffn_chunks`), which are
copied ahead into the rest of that memory: 70B on 8 v5p with 16 MB for an operation 10.5 ms a token,
with 32 12.5."""

_V6E = {
    "xla_tpu_scoped_vmem_limit_kib": "65536",
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
}

UPDATE_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    **SAMPLER_OPTIONS,
}
"""Kind of device -> further options of the trainer's gradient. 70B on 64 v5p with 4,352 tokens each
by cycles: 5.95 -> 5.47 s with 32 MB of on-chip memory for an operation. 8B on 8 v6e with 4,352
tokens each, a layer: 19.1 -> 17.6 ms if gradients of weights are whole products and then scattered,
not eighths between exchanges; -> 16.1 with 64 MB of on-chip memory for an operation in place of 32,
for twice the time to compile."""

_unknown: set[str] = set()
"""Compiler options that the installed compiler has refused in this process."""

_in_flight: dict[frozenset[Any], deque[Any]] = {}
"""Devices -> outputs of their unfinished programs, oldest first. A set of devices has one queue,
whatever roles and meshes use it."""


_order: dict[Any, threading.RLock] = {}
"""Device -> the lock that a thread holds while it dispatches a program to the device."""


@contextlib.contextmanager
def dispatching(devices: Iterable[Any]) -> Iterator[None]:
    """Returns a context for dispatching a program that is not a `Program` to devices: while one
    thread is in it, no other thread dispatches to any of them. A thread may enter it again inside
    of its own block.

    Two programs with collectives that reach two devices in different orders would wait for each
    other for ever: samplers decode in their own threads, while the trainer's thread compares and
    scores on the same devices.
    """
    with contextlib.ExitStack() as stack:
        for device in sorted(devices, key=lambda device: device.id):
            stack.enter_context(_order.setdefault(device, threading.RLock()))
        yield


def device_options(device: Any) -> Mapping[str, Any]:
    """Returns XLA's options for all programs of a device's platform and kind. Those of the kind
    take precedence."""
    options = dict(COMPILER_OPTIONS.get(device.platform, {}))
    options.update(COMPILER_OPTIONS.get(device.device_kind, {}))
    return options


class Program:
    """A function that is compiled once for each shape, as `jax.jit` does it.

    A call waits while MAX_IN_FLIGHT earlier programs of the same devices are unfinished, and while
    another thread dispatches to any of these devices. It waits for an earlier program's last output
    (if that is a tuple) or its only one, which must not be donated to a later program unless that
    runs on the same devices. A program that is not `queued`, because it is a part of a sequence of
    programs, neither waits nor is waited for, except on CPU devices. Compiler options that the
    installed compiler does not know are dropped with a warning.
    """

    def __init__(
        self,
        function: Callable,
        compiler_options: Mapping[str, Any],
        devices: Iterable[Any],
        options: Mapping[str, Any],
        queued: bool = True,
    ) -> None:
        """Makes the program; nothing is compiled yet. `compiler_options`: XLA's, name -> value;
        `options`: further arguments of `jax.jit`; `devices`: those that it runs on; `queued`: True
        if a call waits while MAX_IN_FLIGHT earlier programs of these devices are unfinished; False,
        for a part of a sequence of programs: calls neither wait nor are waited for, except on CPU
        devices."""
        self.function = function
        self.compiler_options = dict(compiler_options)
        self.options = dict(options)
        self._devices = frozenset(devices)
        self._is_queued = queued or any(device.platform == "cpu" for device in self._devices)
        self._in_flight = _in_flight.setdefault(self._devices, deque())
        self._jitted = self._jit()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatches the program and returns its outputs, which may still be computed. A program
        that is `queued` waits before that while MAX_IN_FLIGHT earlier programs of its devices are
        unfinished; each waits while another thread dispatches to one of them. The first call with
        arguments of a shape compiles."""
        while True:
            with dispatching(self._devices):
                if len(self._in_flight) < MAX_IN_FLIGHT or not self._is_queued:
                    return self._dispatch(args, kwargs)
                oldest = self._in_flight.popleft()
            _wait(oldest)  # without holding the locks, so that other threads can dispatch meanwhile

    def _dispatch(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Calls the compiled function and returns its outputs. If the program is queued, appends
        one of them to the queue of unfinished programs of its devices."""
        result = self._known_options(lambda: self._jitted(*args, **kwargs))
        last = result[-1] if isinstance(result, tuple) else result
        # The smallest array stands for all: a program's outputs are ready at once, and a queue must
        # hold no memory.
        leaves = sorted(jax.tree.leaves(last), key=lambda leaf: leaf.nbytes)
        # Under a trace nothing runs: only the program's shapes are asked for.
        if leaves and self._is_queued and not isinstance(leaves[0], Tracer):
            self._in_flight.append(leaves[0])
        return result

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Returns JAX's traced program for arrays, or for shapes with shardings, without compiling
        or running it; the devices need not exist here."""
        return self._jitted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Returns JAX's lowered program for arrays, or for shapes with shardings, without compiling
        or running it; the devices need not exist here."""
        return self._jitted.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the shapes, types and (if fixed) shardings of the outputs, without compiling."""
        # Not jax.eval_shape(program): a jit inside another's trace may have no compiler options.
        return self._jitted.eval_shape(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Returns JAX's compiled program for arrays, or for shapes with shardings, without running
        it. Options that the compiler does not know are dropped with a warning."""
        return self._known_options(lambda: self.lower(*args, **kwargs).compile())

    def _jit(self) -> Any:
        """Returns the function under `jax.jit`, with the options that the compiler is not known to
        refuse."""
        options = {}
        for name, value in self.compiler_options.items():
            if name not in _unknown:
                options[name] = value
        return jax.jit(self.function, compiler_options=options or None, **self.options)

    def _known_options(self, call: Callable[[], Any]) -> Any:
        """Returns the result of `call`, which compiles the program. If the compiler does not know
        an option, drops that option for all programs of this process, with a warning, and calls
        again. Each retry uses the program, compiled again without that option."""
        for _ in self.compiler_options:  # each failure names another option
            try:
                return call()
            except jax.errors.JaxRuntimeError as error:
                # Raised while compiling, before any buffer is donated: the call can be made again.
                unknown = re.search(r"No such compile option: '(\w+)'", str(error))
                if unknown is None:
                    raise
                # Another program may have found out before, after this one was made.
                if unknown[1] not in _unknown:
                    _unknown.add(unknown[1])
                    warnings.warn(
                        f"this compiler has no option {unknown[1]}: the programs are compiled "
                        "without it",
                        stacklevel=3,
                    )
                self._jitted = self._jit()
        return call()


def _wait(output: Any) -> None:
    """Waits until a program's output has been computed; returns at once if the output was donated
    to a later program."""
    try:
        if not output.is_deleted() and not output.is_ready():
            jax.block_until_ready(output)
    except RuntimeError:
        # The output was donated meanwhile, perhaps by another thread: the program that took it is
        # later in the same queue.
        if not output.is_deleted():
            raise
