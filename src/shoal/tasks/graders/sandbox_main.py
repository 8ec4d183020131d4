"""Runs in the sandbox of `sandbox.py`, by its own interpreter: a candidate's code in one process,
its tests in another.

    tester (knows the tests, alone can write the verdict)
        <-- calls, plain values -->  candidate (may start no process)

The candidate sees neither tests nor expected values, and only numbers, texts and containers come
back from it: other objects stay there, and are named by a number. Tests run in globals of their
own, which get the names of the candidate that they use (`tested_names.py`), no builtins and no
modules. So it cannot print, compare, redefine or exit itself into a pass.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import operator
import os
import platform
import resource
import signal
import socket
import struct
import sys
import time
from collections import Counter, OrderedDict, deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

MOST_BYTES = 1 << 20
"""Of one answer of the candidate."""
NUMBERS = {
    "x86_64": (0xC000003E, 56, 435, (57, 58, 101, 272, 308)),
    "aarch64": (0xC00000B7, 220, 435, (97, 117, 268)),
}
"""Machine -> Linux's number of its system calls, of clone, of clone3; of fork, vfork, ptrace,
unshare and setns."""
PLAIN = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
DICTS = {"Counter": Counter, "OrderedDict": OrderedDict, "dict": dict}  # subclasses before dict
VIEWS = {"keys": type({}.keys()), "items": type({}.items())}
MADE = {
    bytes: lambda value: [value.hex()],
    bytearray: lambda value: [value.hex()],
    complex: lambda value: [value.real, value.imag],
    Decimal: lambda value: [str(value)],
    Fraction: lambda value: [value.numerator, value.denominator],
    range: lambda value: [value.start, value.stop, value.step],
    datetime: lambda value: [datetime.isoformat(value)],  # before date, whose subclass it is
    date: lambda value: [date.isoformat(value)],
    timedelta: lambda value: [value.days, value.seconds, value.microseconds],
}
"""Type -> what a value of it is made of anew."""
MAKERS = {
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
}
TYPES = {
    **PLAIN,
    **DICTS,
    **{kind.__name__: kind for kind in (*MADE, deque)},
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
}
"""What MBPP's tests pass as an argument, such as `int` in `remove_datatype((4, 7.7), int)`."""

ASKED = {
    "get": getattr,
    "set": setattr,
    "list": list,
    "next": next,
    "bool": bool,
    "item": operator.getitem,
    "str": str,
    "repr": repr,
}
"""What the candidate is asked about an object that stays there."""


class Ref:
    """An object of the candidate, in the tester."""

    def __init__(self, ask: Any, number: int) -> None:
        vars(self).update(_ask=ask, _number=number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self, name, value)

    def __iter__(self) -> Any:
        return iter(self._ask("list", self))

    # No comparison and no length: by its own the candidate would decide what is right.

    def __next__(self) -> Any:
        return self._ask("next", self)

    def __bool__(self) -> bool:
        return self._ask("bool", self)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", self, key)

    def __str__(self) -> str:
        return self._ask("str", self)

    def __repr__(self) -> str:
        return self._ask("repr", self)


def pack(value: Any, refs: list[Any]) -> Any:
    """A value as JSON holds it; `refs` gets the objects that stay here."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for name, kind in PLAIN.items():
        if isinstance(value, kind):
            return {name: [pack(one, refs) for one in value]}
    for name, kind in DICTS.items():
        if isinstance(value, kind):
            return {name: [[pack(one, refs) for one in item] for item in value.items()]}
    for name, kind in VIEWS.items():
        if isinstance(value, kind):
            return {name: [pack(one, refs) for one in value]}
    for kind, parts in MADE.items():
        if isinstance(value, kind):
            return {kind.__name__: parts(value)}
    if isinstance(value, deque):
        return {"deque": [[pack(one, refs) for one in value], value.maxlen]}
    for name, kind in TYPES.items():
        if value is kind:
            return {"type": name}
    if isinstance(value, Ref):
        return {"ref": value._number}
    refs.append(value)
    return {"ref": len(refs) - 1}


def unpack(value: Any, find: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "ref":
        return find(content)
    if kind == "type":
        return TYPES[content]
    if kind in PLAIN:
        return PLAIN[kind](unpack(one, find) for one in content)
    if kind in DICTS:
        return DICTS[kind]({unpack(key, find): unpack(one, find) for key, one in content})
    if kind == "keys":
        return dict.fromkeys(unpack(one, find) for one in content).keys()
    if kind == "items":
        return dict(unpack(one, find) for one in content).items()
    if kind == "deque":
        items, most = content
        return deque((unpack(one, find) for one in items), most)
    return MAKERS.get(kind, TYPES[kind])(*content)


# ---- the candidate


def candidate(channel: socket.socket) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    forbid_processes()
    refs: list[Any] = []
    names: dict[str, Any] = {"__name__": "candidate"}

    def handle(what: str, target: Any, *rest: Any) -> Any:
        if what == "exec":
            exec(compile(target, "<candidate>", "exec"), names)
            return {name: names[name] for name in rest[0] if name in names}
        if what == "call":
            return target(*rest[0], **rest[1])
        return ASKED[what](target, *rest)

    for line in channel.makefile():
        try:
            reply = [True, pack(handle(*unpack(json.loads(line), refs.__getitem__)), refs)]
            text = json.dumps(reply)
        except BaseException as error:  # sys.exit too
            text = json.dumps([False, [builtin_kind(error), str(error)[:200]]])
        channel.sendall(f"{text}\n".encode())


def builtin_kind(error: BaseException) -> str:
    """The name of the builtin exception that an error is, or is derived from: tests that expect a
    ValueError take a class of the candidate's, too."""
    kinds = type(error).__mro__
    return next(one.__name__ for one in kinds if getattr(builtins, one.__name__, None) is one)


def forbid_processes() -> None:
    """No process can be started from now on; threads can. Limits of processes do not hold for
    root."""
    system, clone, clone3, denied = NUMBERS[platform.machine()]
    load, equal, least, bit, done = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, missing = (
        0x7FFF0000,
        0x00050001,
        0x00050026,
    )  # EPERM; ENOSYS, upon which libc takes clone
    rules = [
        (load, 0, 0, 4),
        (equal, 1, 0, system),
        (done, 0, 0, refuse),
        (load, 0, 0, 0),
        (least, 0, 1, 0x40000000),
        (done, 0, 0, refuse),
        (equal, 0, 1, clone3),
        (done, 0, 0, missing),
    ]
    for number in denied:
        rules += [(equal, 0, 1, number), (done, 0, 0, refuse)]
    rules += [
        (equal, 0, 3, clone),
        (load, 0, 0, 16),
        (bit, 1, 0, 0x10000),
        (done, 0, 0, refuse),
        (done, 0, 0, allow),
    ]
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    program = ctypes.create_string_buffer(
        struct.pack(
            "HxxxxxxP", len(rules), ctypes.addressof(buffer := ctypes.create_string_buffer(code))
        )
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(
        22, 2, program, 0, 0
    ):  # no new privileges; the filter
        os._exit(3)
    del buffer


# ---- the tester


class Over(BaseException):
    """The candidate gives no further answer; its text is the outcome."""


def raised_by_candidate(name: str, text: str) -> Exception:
    """What the tester raises for an exception of the candidate: one of the same builtin kind, as
    tests may expect it.

    Over for one that would end a loop or this process in place of a test: `all(map(f, cases))`
    takes StopIteration for the end of the cases.
    """
    kind = getattr(builtins, name, RuntimeError)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        kind = RuntimeError
    if issubclass(kind, StopIteration | StopAsyncIteration) or not issubclass(kind, Exception):
        raise Over("failed")
    try:
        return kind(text)
    except TypeError:  # such as UnicodeDecodeError, which is made of five values
        return RuntimeError(text)


def how_it_ended(pid: int) -> str:
    """Of a candidate whose end of the channel is closed; it may have closed that alone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return "timed out" if -status in (signal.SIGXCPU, signal.SIGKILL) else "crashed"


def run(channel: socket.socket, pid: int, case: dict[str, Any], seconds: float) -> str:
    deadline, lines = time.monotonic() + seconds, bytearray()
    ends: list[str] = []  # kept, since tests may catch everything that is raised in them

    def ask(what: str, *rest: Any) -> Any:
        if ends:
            raise Over(ends[0])
        try:
            return answer(what, *rest)
        except Over as over:
            ends.append(str(over))
            raise

    def answer(what: str, *rest: Any) -> Any:
        unsent: list[Any] = []
        text = json.dumps(pack((what, *rest), unsent)).encode() + b"\n"
        if unsent:
            raise Over(
                "failed"
            )  # a function of the tests' own: by its number the candidate would find another object
        try:
            channel.settimeout(max(0.01, deadline - time.monotonic()))
            channel.sendall(text)
            while b"\n" not in lines:
                channel.settimeout(max(0.01, deadline - time.monotonic()))
                part = channel.recv(1 << 16)
                if not part or len(lines) > MOST_BYTES:
                    raise Over("failed" if part else how_it_ended(pid))
                lines.extend(part)
        except OSError as error:
            raise Over(
                "timed out" if isinstance(error, TimeoutError) else how_it_ended(pid)
            ) from None
        line, _, lines[:] = bytes(lines).partition(b"\n")
        try:
            good, value = json.loads(line)
            if good:
                return unpack(value, lambda number: Ref(ask, number))
            error = raised_by_candidate(str(value[0]), str(value[1]))
        except Exception:  # no answer that this file's candidate() writes
            raise Over("failed") from None
        raise error

    try:
        found = ask("exec", case["code"], [*case["names"], *case["spare"]])
        names: dict[str, Any] = {"__name__": "tests"}
        exec(compile(case["given"], "<given>", "exec"), names)
        for text in case["imports"]:
            with contextlib.suppress(ImportError):  # no installed package is here
                exec(compile(text, "<imports>", "exec"), names)
        names.update(
            {name: found[name] for name in case["spare"] if name in found and name not in names}
        )
        tested = {
            name: found[name]
            for name in case["names"]
            if name in found and not (name == case["entry_point"] and hasattr(builtins, name))
        }
        missing = [name for name in case["names"] if name not in found]

        def put_tested() -> None:
            """What the solution defines is the candidate's or nobody's, though an import has the
            same name."""
            names.update(tested)
            for name in missing:
                names.pop(name, None)

        put_tested()
        exec(compile(case["setup"], "<setup>", "exec"), names)
        put_tested()  # the setup may import all of a module
        for text in case["tests"]:
            exec(compile(text, "<tests>", "exec"), names)
        if case["entry_point"]:
            names["check"](found[case["entry_point"]])
        outcome = "passed"
    except BaseException:
        outcome = "failed"
    return ends[0] if ends else outcome


def main() -> NoReturn:
    cpu, seconds, memory = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(
        4, 0, 0, 0, 0
    )  # the candidate can neither trace this process nor open its files
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, memory // 16),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 64),
    ):
        resource.setrlimit(limit, (value, value))
    here, there = socket.socketpair()
    pid = os.fork()  # before the tests are read
    if not pid:
        here.close()
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
        with contextlib.suppress(BaseException):
            candidate(there)
        os._exit(0)
    there.close()
    case = json.load(sys.stdin)
    sys.stdout = sys.stderr  # the verdict alone is written to the standard output
    outcome = run(here, pid, case, seconds)
    os.write(1, f"{outcome} {case['seal']}".encode())
    os._exit(0)  # pid 1 ends with it, and with that all


if __name__ == "__main__":
    main()
