"""Runs inside of the sandbox of `sandbox.py`, by the sandbox's own interpreter: a candidate's code
in one process, its tests in another.

    tester (knows the tests, alone can write the verdict)
        <-- calls, plain values -->  candidate (may start no process)

The candidate sees neither tests nor expected values. Only numbers, texts and containers come back
from it: other objects stay in the candidate's process, and are referred to by a number. Tests run
in their own globals, which contain the names of the candidate that the tests use
(`tested_names.py`), but none of the candidate's builtins or modules. So the candidate cannot pass
by printing, by its own comparisons, by redefining something or by exiting.
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
"""The largest answer of the candidate that is read."""
NUMBERS = {
    "x86_64": (0xC000003E, 56, 435, (57, 58, 101, 272, 308)),
    "aarch64": (0xC00000B7, 220, 435, (97, 117, 268)),
}
"""Machine -> Linux's number of its architecture, of the calls clone and clone3, and of fork, vfork,
ptrace, unshare and setns, if there are such calls."""
# A value is packed by the first of these tables that has its type, PLAIN to VALUES; TYPES is for
# values that are types themselves. In a table a type comes before its base: datetime before date.
PLAIN = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
DICTS = {"Counter": Counter, "OrderedDict": OrderedDict, "dict": dict}  # subclasses before dict
VIEWS = {"keys": type({}.keys()), "items": type({}.items())}
VALUES = (bytes, bytearray, complex, Decimal, Fraction, range, datetime, date, timedelta, deque)
"""Types whose values are sent as the arguments that make them again."""
MAKERS = {
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
}
TYPES = PLAIN | DICTS | {each.__name__: each for each in (*VALUES, int, float, str, bool)}
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
"""Question -> the function by which the candidate answers it about one of its objects."""


class Ref:
    """Stands in the tester for an object that stays in the candidate's process."""

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

    # There is no comparison and no length: the candidate could define them so that it passes.

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
    """Returns a value in a form that JSON can hold: `(1, 2)` -> `{"tuple": [1, 2]}`. Containers are
    copied with all that they hold; an instance of a subclass becomes its base type's.

    `{"ref": number}` stands for an object of another type, always one of the candidate's: its
    position in `refs` of that process. A `Ref` becomes the number that it has; any other object is
    appended to `refs`. The tester's own objects cannot be sent: it refuses a question that fills
    its `refs`.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for name, plain_type in PLAIN.items():
        if isinstance(value, plain_type):
            return {name: [pack(item, refs) for item in value]}
    for name, dict_type in DICTS.items():
        if isinstance(value, dict_type):
            pairs = []
            for key, item in value.items():
                pairs.append([pack(key, refs), pack(item, refs)])
            return {name: pairs}
    for name, view_type in VIEWS.items():
        if isinstance(value, view_type):
            return {name: [pack(item, refs) for item in value]}
    if isinstance(value, deque):
        return {"deque": [[pack(item, refs) for item in value], value.maxlen]}
    for value_type in VALUES:
        if isinstance(value, value_type):
            return {value_type.__name__: constructor_arguments(value, value_type)}
    for name, passed_type in TYPES.items():
        if value is passed_type:
            return {"type": name}
    if isinstance(value, Ref):
        return {"ref": value._number}
    refs.append(value)
    return {"ref": len(refs) - 1}


def constructor_arguments(value: Any, value_type: type) -> list[Any]:
    """Returns the arguments with which `MAKERS` or the type itself makes an equal value, in forms
    that JSON can hold. `value_type` is one of VALUES but deque. They are one text or up to three
    numbers."""
    if value_type in (bytes, bytearray):
        return [value.hex()]
    if value_type is complex:
        return [value.real, value.imag]
    if value_type is Decimal:
        return [str(value)]
    if value_type is Fraction:
        return [value.numerator, value.denominator]
    if value_type is range:
        return [value.start, value.stop, value.step]
    if value_type in (datetime, date):
        return [value_type.isoformat(value)]
    return [value.days, value.seconds, value.microseconds]  # a timedelta


def unpack(value: Any, find: Any) -> Any:
    """Returns the value that `pack` returned `value` for. `find(number)` returns the object of a
    `ref`: in the candidate the object itself, in the tester a `Ref`. A container is a new one."""
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "ref":
        return find(content)
    if name == "type":
        return TYPES[content]
    if name == "deque":
        items, most = content
        return deque([unpack(item, find) for item in items], most)
    if name in MAKERS:
        return MAKERS[name](*content)
    if name in DICTS:
        values = {}
        for key, item in content:
            values[unpack(key, find)] = unpack(item, find)
        return DICTS[name](values)  # given pairs, a Counter would count the pairs
    if name in PLAIN or name in VIEWS:
        items = [unpack(item, find) for item in content]
        if name == "keys":
            return dict.fromkeys(items).keys()
        if name == "items":
            return dict(items).items()
        return PLAIN[name](items)
    return TYPES[name](*content)


# ---- the candidate


def run_candidate(channel: socket.socket) -> None:
    """Runs the candidate's process: answers the tester's questions, one JSON line each, until the
    channel closes. The first has the candidate's code to execute. The process has no standard
    streams and may start no other. Exceptions of the candidate's code are sent as answers."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    forbid_processes()
    refs: list[Any] = []
    names: dict[str, Any] = {"__name__": "candidate"}

    def handle(what: str, target: Any, *rest: Any) -> Any:
        """Answers one question of the tester. `exec`: executes the code `target`, and returns those
        of the names in `rest[0]` that it defined, as name -> value. `call` calls `target` with the
        arguments `rest[0]` and keywords `rest[1]`; any other question is answered by its function
        in ASKED, called with `target` and `rest`."""
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
        except BaseException as error:  # including SystemExit
            text = json.dumps([False, [builtin_exception_name(error), str(error)[:200]]])
        channel.sendall(f"{text}\n".encode())


def builtin_exception_name(error: BaseException) -> str:
    """Returns the name of an error's class, or of its nearest base class that is builtin: a test
    that expects a ValueError also accepts a class that the candidate derived from it."""
    for error_type in type(error).__mro__:
        if getattr(builtins, error_type.__name__, None) is error_type:
            return error_type.__name__
    raise AssertionError("every exception is derived from a builtin one")


def forbid_processes() -> None:
    """Forbids this process to start other processes; threads are still allowed. Installs a seccomp
    filter of system calls, because limits on processes do not hold for root. Exits if that
    fails."""
    system, clone, clone3, denied = NUMBERS[platform.machine()]
    # Instructions and results of Linux's filters of system calls.
    load, equal, least, bit, done = 0x20, 0x15, 0x35, 0x45, 0x06
    allow = 0x7FFF0000
    refuse = 0x00050001  # with EPERM
    missing = 0x00050026  # with ENOSYS, upon which libc takes clone
    # (instruction, rules to skip if true, rules to skip if false, operand)
    rules = [
        (load, 0, 0, 4),  # the architecture of the call
        (equal, 1, 0, system),
        (done, 0, 0, refuse),
        (load, 0, 0, 0),  # the number of the call
        (least, 0, 1, 0x40000000),  # x32 has its own numbers, from here on
        (done, 0, 0, refuse),
        (equal, 0, 1, clone3),
        (done, 0, 0, missing),
    ]
    for number in denied:
        rules += [(equal, 0, 1, number), (done, 0, 0, refuse)]
    rules += [
        (equal, 0, 3, clone),
        (load, 0, 0, 16),  # the flags of clone
        (bit, 1, 0, 0x10000),  # CLONE_THREAD: a thread is allowed
        (done, 0, 0, refuse),
        (done, 0, 0, allow),
    ]
    code = b""
    for instruction, if_true, if_false, operand in rules:
        code += struct.pack("HBBI", instruction, if_true, if_false, operand)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(buffer))
    program = ctypes.create_string_buffer(header)
    libc = ctypes.CDLL(None, use_errno=True)
    # 38: PR_SET_NO_NEW_PRIVS, without which a filter is refused; 22, 2: PR_SET_SECCOMP, by a
    # filter.
    no_new_privileges = libc.prctl(38, 1, 0, 0, 0)
    if no_new_privileges != 0 or libc.prctl(22, 2, program, 0, 0) != 0:
        os._exit(3)
    del buffer  # the call above reads it, so it must live until here


# ---- the tester


class CandidateEnded(BaseException):
    """Raised in the tester if the candidate gives no further answer; its text is the outcome."""


def candidate_exception(name: str, text: str) -> Exception:
    """Returns the exception that the tester raises in place of one of the candidate: the builtin
    class `name` with the message `text`, since tests may expect that class, or RuntimeError.

    Raises CandidateEnded for an exception that would not fail a test, but end a loop or this
    process: `all(map(f, cases))` takes StopIteration for the end of the cases.
    """
    error_type = getattr(builtins, name, RuntimeError)
    if not (isinstance(error_type, type) and issubclass(error_type, BaseException)):
        error_type = RuntimeError
    ends_a_loop = issubclass(error_type, StopIteration | StopAsyncIteration)
    if ends_a_loop or not issubclass(error_type, Exception):
        raise CandidateEnded("failed")
    try:
        return error_type(text)
    except TypeError:  # such as UnicodeDecodeError, which is made of five values
        return RuntimeError(text)


def end_candidate(pid: int) -> str:
    """Terminates the candidate's process and returns why it ended: "timed out" if the kernel killed
    it at its limit of CPU time, else "crashed". Called after its end of the channel closed; the
    process may still run, so it gets SIGTERM first. Waits until the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    # Negative if a signal ended the process.
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return "timed out" if -status in (signal.SIGXCPU, signal.SIGKILL) else "crashed"


class Candidate:
    """The candidate's process, as the tester sees it."""

    def __init__(self, channel: socket.socket, pid: int, seconds: float) -> None:
        """`channel` is the tester's end of the socket to the process `pid`; `seconds` is the time
        that all questions together may take."""
        self.channel, self.pid = channel, pid
        self.deadline = time.monotonic() + seconds
        self.received = bytearray()
        self.outcome = ""
        """The outcome once the candidate gives no further answer, else "". It is kept here, because
        tests may catch whatever is raised in them."""

    def ask(self, what: str, *rest: Any) -> Any:
        """Sends a question (a key of ASKED, `exec` or `call`, with its arguments) to the candidate
        and returns the answer; raises the answer if it is an exception. Raises CandidateEnded if
        there is no valid answer, and from then on for every question."""
        if self.outcome:
            raise CandidateEnded(self.outcome)
        try:
            return self._answer((what, *rest))
        except CandidateEnded as over:
            self.outcome = str(over)
            raise

    def _answer(self, question: tuple[Any, ...]) -> Any:
        """Sends a question and returns the answer, or raises it if it is an exception.
        CandidateEnded if there is no valid answer; does not set `outcome`."""
        unsent: list[Any] = []
        text = json.dumps(pack(question, unsent)).encode() + b"\n"
        if unsent:
            # The question holds an object of the tests, such as a function: its number would mean
            # another object to the candidate.
            raise CandidateEnded("failed")
        try:
            line = self._exchange(text)
        except TimeoutError:
            raise CandidateEnded("timed out") from None
        except OSError:
            raise CandidateEnded(end_candidate(self.pid)) from None
        try:
            good, value = json.loads(line)
            if good:
                return unpack(value, lambda number: Ref(self.ask, number))
            error = candidate_exception(str(value[0]), str(value[1]))
        except Exception:  # run_candidate() does not write such an answer
            raise CandidateEnded("failed") from None
        raise error

    def _exchange(self, text: bytes) -> bytes:
        """Sends a line and returns the line that the candidate sends back. CandidateEnded if the
        channel closes or that line is too long, TimeoutError at the deadline. OSError if the
        channel fails in another way."""
        self._limit_wait()
        self.channel.sendall(text)
        while b"\n" not in self.received:
            self._limit_wait()
            data = self.channel.recv(1 << 16)
            if not data:
                raise CandidateEnded(end_candidate(self.pid))
            if len(self.received) > MOST_BYTES:
                raise CandidateEnded("failed")
            self.received.extend(data)
        # What follows the line stays for the next answer.
        line, _, self.received[:] = bytes(self.received).partition(b"\n")
        return line

    def _limit_wait(self) -> None:
        """Limits the next wait on the channel to the time that is left."""
        # A timeout of 0 would mean not to wait, and a negative one is refused.
        self.channel.settimeout(max(0.01, self.deadline - time.monotonic()))


def run(channel: socket.socket, pid: int, case: dict[str, Any], seconds: float) -> str:
    """Runs the tests of a case and returns the outcome: `passed`, `failed`, `timed out` or
    `crashed`. `pid` is the candidate's process, `seconds` the limit by the clock. An error in a
    test is the outcome `failed`; nothing is raised."""
    candidate_process = Candidate(channel, pid, seconds)
    outcome = "passed"
    try:
        run_tests(case, candidate_process)
    except BaseException:
        outcome = "failed"
    return candidate_process.outcome or outcome


def run_tests(case: dict[str, Any], candidate_process: Candidate) -> None:
    """Has the candidate execute its code, and runs the tests in this process, in globals that get
    the candidate's tested names. Raises whatever a test raises. CandidateEnded if the candidate
    gives no answer. `case` has `code`, `given`, `imports`, `names`, `spare`, `setup`, `tests` and
    `entry_point` ("": none)."""
    defined = candidate_process.ask("exec", case["code"], case["names"] + case["spare"])
    names: dict[str, Any] = {"__name__": "tests"}
    exec(compile(case["given"], "<given>", "exec"), names)
    for text in case["imports"]:
        with contextlib.suppress(ImportError):  # no installed package is here
            exec(compile(text, "<imports>", "exec"), names)
    for name in case["spare"]:
        if name in defined and name not in names:
            names[name] = defined[name]

    tested: dict[str, Any] = {}
    missing: list[str] = []
    for name in case["names"]:
        is_named_as_builtin = name == case["entry_point"] and hasattr(builtins, name)
        if name not in defined:
            missing.append(name)
        elif not is_named_as_builtin:
            tested[name] = defined[name]

    def put_tested() -> None:
        """Puts the candidate's objects under the names that the solution defines. A name that the
        candidate does not define is removed, even if an import has the same name."""
        names.update(tested)
        for name in missing:
            names.pop(name, None)

    put_tested()
    exec(compile(case["setup"], "<setup>", "exec"), names)
    put_tested()  # the setup may import all of a module
    for text in case["tests"]:
        exec(compile(text, "<tests>", "exec"), names)
    if case["entry_point"]:
        names["check"](defined[case["entry_point"]])


def main() -> NoReturn:
    """Runs the sandbox's first process: forks the candidate's process, reads the case from the
    standard input, runs the tests in this process, and prints outcome and seal. Does not return:
    the process exits with 0, whatever the outcome."""
    cpu, seconds, memory = [int(word) for word in sys.argv[1:]]
    # The candidate can neither trace this process nor open its files.
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
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
        # SIGXCPU at the first limit, SIGKILL at the second.
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
        with contextlib.suppress(BaseException):
            run_candidate(there)
        os._exit(0)
    there.close()
    case = json.load(sys.stdin)
    sys.stdout = sys.stderr  # the verdict alone is written to the standard output
    outcome = run(here, pid, case, seconds)
    os.write(1, f"{outcome} {case['seal']}".encode())
    os._exit(0)  # pid 1 ends with it, and with that all


if __name__ == "__main__":
    main()
