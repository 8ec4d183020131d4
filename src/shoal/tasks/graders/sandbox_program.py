"""Runs inside of the sandbox of `sandbox.py`, in the candidate's process: a program that reads its
input and prints, or a function of a solution. Its source text is the head of a case's code; the
test's process calls `shoal_run`, `shoal_printed` and `shoal_call`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import threading
from typing import Any

PART_CHARS = 100_000
"""What was printed is handed over in parts of this length: the test's process reads no longer
answers than 1 MiB."""
PRELUDE = """
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from sys import *
from json import *
from builtins import *
from typing import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics
import itertools, functools, operator, io, sys, json
sys.setrecursionlimit(50000)
"""
"""What LiveCodeBench's harness runs before a solution: the imports that contest sites give."""

_printed: list[str] = [""]


def shoal_run(source: str, text: str) -> int:
    """Runs a program as a script, with `text` as its standard input; what it printed is kept for
    `shoal_printed`. Returns the number of parts of that. An exception of the program is raised
    here, except SystemExit."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(text.encode())
        given.seek(0)
        os.dup2(given.fileno(), 0)
        os.dup2(printed.fileno(), 1)
        reader = io.BufferedReader(io.FileIO(0, "r", closefd=False))
        writer = io.BufferedWriter(io.FileIO(1, "w", closefd=False))
        sys.stdin = io.TextIOWrapper(reader, encoding="utf-8")
        sys.stdout = io.TextIOWrapper(writer, encoding="utf-8")
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(PRELUDE, "<prelude>", "exec"), names)
        with contextlib.suppress(SystemExit):
            exec(compile(source, "<program>", "exec"), names)
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        # What the program wrote through a file of its own is written once that is gone.
        names.clear()
        with contextlib.suppress(OSError, ValueError):  # the program closed its output
            sys.stdout.flush()
        printed.seek(0)
        _printed[0] = printed.read().decode("utf-8", "replace")
    return -(-len(_printed[0]) // PART_CHARS)


def shoal_printed(part: int) -> str:
    """Returns one part of what the last program printed; parts count from 0."""
    return _printed[0][part * PART_CHARS : (part + 1) * PART_CHARS]


def shoal_call(source: str, name: str, arguments: list[Any]) -> Any:
    """Calls the function `name` of a solution, a method of its class `Solution` if it has one, and
    returns what that returns. The solution is run again in each call."""
    names: dict[str, Any] = {"__name__": "solution"}
    exec(compile(PRELUDE, "<prelude>", "exec"), names)
    exec(compile(source, "<solution>", "exec"), names)
    holder = names.get("Solution")
    function = names[name] if holder is None else getattr(holder(), name)
    return function(*arguments)
