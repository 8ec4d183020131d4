"""The task `code`: rows of MBPP and HumanEval, and hostile code in the sandbox; skipped where there
is none."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandboxes import sandboxed
from tiny_runs import Workshop, groups, metrics, read_lines

from shoal import cli
from shoal.checks.reward import ModelText, probe, reward_findings
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import ShoalError
from shoal.rewards.pool import RewardPool
from shoal.tasks.code import blocks_of, case_of
from shoal.tasks.graders import sandbox

MBPP = {
    "task_id": 1,
    "text": "Write a function to add one.",
    "code": "def inc(x):\n    return x + 1",
    "test_list": ["assert inc(1) == 2", "assert inc(-1) == 0"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "entry_point": "add",
    "prompt": "from typing import List\n\n\ndef add(a: int, b: List[int]) -> int:\n    '''a and "
    "all b'''\n",
    "canonical_solution": "    return a + sum(b)\n",
    "test": "def check(candidate):\n    assert candidate(1, [2, 3]) == 6\n    assert candidate(0, "
    "[]) == 0\n",
}


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def outcome(code: str, *tests: str, entry_point: str = "", setup: str = "", **given: str) -> str:
    return sandbox.run(
        {"code": code, "setup": setup, "tests": list(tests), "entry_point": entry_point, **given}
    )


# ---- the sandbox


@pytest.mark.system
@sandboxed
@pytest.mark.parametrize(
    ("code", "test", "expected"),
    [
        ("def f(x): return x + 1", "assert f(1) == 2", "passed"),
        ("def f(x): return x", "assert f(1) == 2", "failed"),
        ("def f(x) return", "assert f(1) == 2", "failed"),
        ("def g(x): return 2", "assert f(1) == 2", "failed"),
        (
            "def f(x): raise ValueError('no')",
            "try:\n    f(1)\n    assert False\nexcept ValueError: pass",
            "passed",
        ),
        (
            "class Odd(ValueError): pass\ndef f(x): raise Odd",
            "try:\n    f(1)\n    assert False\nexcept ValueError: pass",
            "passed",
        ),
        (
            "class Odd(KeyError): pass\ndef f(x): raise Odd",
            "try:\n    f(1)\nexcept ValueError: pass",
            "failed",
        ),
        (
            "class End(StopIteration): pass\ndef f(x): raise End",
            "assert all(map(f, [1]))",
            "failed",
        ),
        ("def f(x): raise TimeoutError", "f(1)", "failed"),
        (
            "class P:\n    def __init__(self, a): self.a = a\ndef f(ps): return sum(p.a for p in "
            "ps)",
            "assert f([P(1), P(2)]) == 3\np = P(1)\np.a = 5\nassert f([p]) == p.a == 5",
            "passed",
        ),
        (
            "import math\ndef f(x): return x * math.pi",
            "assert math.isclose(f(1), math.pi)",
            "passed",
        ),
        (
            "def f(x): return x",
            "for v in [(1, (2,)), {1: {2}}, frozenset([1]), b'a', 2j, None, True, 1.5, {'a': "
            "[()]}]:\n"
            "    assert f(v) == v and type(f(v)) is type(v)\nassert f(float('inf')) == "
            "float('inf')",
            "passed",
        ),
        ("def f(x): return (i for i in range(x))", "assert list(f(3)) == [0, 1, 2]", "passed"),
        (
            "import threading\ndef f(x):\n    out = []\n    t = threading.Thread(target=lambda: "
            "out.append(x))\n"
            "    t.start()\n    t.join()\n    return out[0]",
            "assert f(2) == 2",
            "passed",
        ),
    ],
)
def test_what_code_may_do(code: str, test: str, expected: str) -> None:
    assert outcome(code, test) == expected


@pytest.mark.system
@sandboxed
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(x):\n    while True: pass", "timed out"),
        (
            "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\ndef f(x):\n    while "
            "True: pass",
            "timed out",
        ),
        ("import os\ndef f(x):\n    while True: os.fork()", "failed"),
        (
            "import subprocess\ndef f(x): return len(subprocess.run(['/bin/true']).args) + 1",
            "failed",
        ),
        (
            "import threading, time\ndef f(x):\n    while True: "
            "threading.Thread(target=time.sleep, args=(9,)).start()",
            "failed",
        ),
        ("def f(x): return len(bytearray(10**10))", "failed"),
        (
            "def f(x):\n    with open('/tmp/a', 'wb') as file:\n        while True: "
            "file.write(bytes(1 << 20))",
            "failed",
        ),
        ("def f(x): return 'a' * (1 << 22)", "failed"),
        ("import os\nos._exit(0)", "crashed"),
        ("import os\ndef f(x): os._exit(0)", "crashed"),
        ("import sys\ndef f(x): sys.exit(0)", "failed"),
        ("raise SystemExit(0)", "failed"),
        ("import os\nprint('passed', flush=True)\nos.write(1, b'passed')\nos._exit(0)", "crashed"),
        ("class Any:\n    def __eq__(self, other): return True\ndef f(x): return Any()", "failed"),
        (
            "class Any(int):\n    def __eq__(self, other): return True\ndef f(x): return Any(9)",
            "failed",
        ),
        ("import os\ndef f(x): os.kill(os.getppid(), 9)\n", "crashed"),
        ("import os\ndef f(x): os.kill(-1, 9)\n", "crashed"),
        (
            "import os\nfor n in range(3, 64):\n    try: os.close(n)\n    except OSError: "
            "pass\ndef f(x): return 2",
            "crashed",
        ),
        (
            "import os\ndef f(x):\n    p = os.getppid()\n    os.write(os.open(f'/proc/{p}/fd/1', "
            "os.O_WRONLY), b'passed')\n"
            "    os.kill(p, 9)",
            "failed",
        ),
        (
            "import ctypes\ndef f(x): return 2 if ctypes.CDLL(None).ptrace(16, "
            "__import__('os').getppid(), 0, 0) == 0 else 3",
            "failed",
        ),
        (
            "import ctypes\ndef f(x): return 2 if ctypes.CDLL(None).unshare(0x10000000) == 0 else "
            "3",
            "failed",
        ),
        (
            "import os\ndef f(x):\n    for n in range(3, 64):\n        try: os.write(n, b'[true, "
            "0]\\n[true, 3]\\n')\n"
            "        except OSError: pass",
            "failed",
        ),
    ],
)
def test_hostile_code_gets_no_pass_and_an_end(code: str, expected: str) -> None:
    assert outcome(code, "assert f(1) == 2") == expected


CHECK_F = (
    "assert set(f([1, 2])) == {2, 3} and sorted(f([1, 2])) == [2, 3] and abs(f([1, 2])[0]) == 2"
)
"""What a wrong `f` would pass, if it could choose what `set`, `sorted` and `abs` are."""
ALL_CASES = "assert all(map(f, [1, 2, 3]))"
CHECK_ADD = (
    "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert len([candidate(0, 0)]) == 1"
)


@sandboxed
@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("class Same(set):\n    pass\ndef set(x): return 0\ndef f(x): return []", CHECK_F),
        (
            "set = lambda x: {2, 3}\nsorted = lambda x: [2, 3]\nabs = lambda x: 2\ndef f(x): "
            "return [0]",
            CHECK_F,
        ),
        (
            "import builtins\nbuiltins.set = lambda x: {2, 3}\nbuiltins.sorted = lambda x: [2, 3]\n"
            "builtins.abs = lambda x: 2\ndef f(x): return [0]",
            CHECK_F,
        ),
        (
            "__builtins__ = {'set': lambda x: {2, 3}, 'sorted': lambda x: [2, 3], 'abs': lambda x: "
            "2}\ndef f(x): return [0]",
            CHECK_F,
        ),
        ("def len(x): return 2\ndef f(x): return [0]", "assert len(f(1)) == 2"),
        ("def isinstance(x, y): return True\ndef f(x): return 1", "assert isinstance(f(1), str)"),
        (
            "def all(x): return True\ndef any(x): return True\ndef f(x): return 0",
            "assert all(f(i) for i in range(3))",
        ),
        ("def print(*x): raise SystemExit\ndef f(x): return 0", "print(f(1))\nassert f(1) == 2"),
        (
            "class math:\n    pi = 3\n    isclose = staticmethod(lambda *x, **y: True)\ndef f(x): "
            "return 0",
            "assert math.isclose(f(1), 1)",
        ),
        (
            "import math\nmath.isclose = lambda *x, **y: True\ndef f(x): return 0",
            "assert math.isclose(f(1), 1)",
        ),
        (
            "import sys, math\nclass M:\n    isclose = staticmethod(lambda *x: "
            "True)\nsys.modules['math'] = M\n"
            "def f(x): return 0",
            "import math\nassert math.isclose(f(1), 1)",
        ),
        ("import cmath as math\ndef f(x): return 0", "assert math.floor(f(1)) == 1"),
        (
            "def helper(x): return 2\ndef f(x): return 0",
            "def helper(x): return x\nassert helper(f(1)) == 2",
        ),
        ("def f(x): raise StopIteration", ALL_CASES),
        ("def f(x): raise StopAsyncIteration", ALL_CASES),
        ("def f(x): return next(iter(()))", ALL_CASES),
        ("class Mine(StopIteration): pass\ndef f(x): raise Mine", ALL_CASES),
        ("def f(x): raise GeneratorExit", ALL_CASES),
        ("def f(x): raise SystemExit", ALL_CASES),
        ("def f(x): raise KeyboardInterrupt", ALL_CASES),
        ("import sys\ndef f(x): sys.exit(0)", ALL_CASES),
        ("StopIteration = ValueError\ndef f(x): raise StopIteration", ALL_CASES),
        ("def f(x): raise StopIteration", "assert [f(i) for i in range(3)] == []"),
        ("def f(x): raise StopIteration", "assert list(map(f, [1])) == []"),
        ("def f(x): raise StopIteration", "for v in map(f, [1]): assert v == 1"),
        ("def f(x): raise StopIteration", "assert next(map(f, [1]), 2) == 2"),
        ("def f(): raise StopIteration", "assert list(iter(f, 0)) == []"),
        ("def f(x): raise StopIteration", "try:\n    f(1)\nexcept BaseException: pass"),
        ("import os\ndef f(x): os._exit(0)", "try:\n    f(1)\nexcept BaseException: pass"),
        (
            "def f(x): raise UnicodeDecodeError('utf-8', b'', 0, 1, '')",
            "try:\n    f(1)\nexcept TypeError: pass",
        ),
        (
            "import sys\nframe = sys._getframe()\nwhile frame:\n    frame.f_globals['all'] = "
            "frame.f_builtins['all'] = "
            "lambda x: True\n    frame = frame.f_back\ndef f(x): return 0",
            ALL_CASES,
        ),
        (
            "import __main__\n__main__.pack = lambda value, refs: {'module': 'this'}\ndef f(x): "
            "return 0",
            "try:\n    assert f(1) == 2\nexcept Exception: pass",
        ),
        (
            "import __main__\n__main__.pack = lambda value, refs: {'list': [[]] * 3, 'set': "
            "[]}\ndef f(x): return 0",
            "try:\n    assert f(1) == 2\nexcept Exception: pass",
        ),
        ("import atexit\natexit.register(print, 'passed')\ndef f(x): return 0", "assert f(1) == 2"),
        ("def f(x):\n    def inner(y): return True\n    return inner", "assert f(1) is True"),
        ("def f(g): return g", "assert f(abs)(-1) == 1 and f(lambda: 1) is None"),
        (
            "def f(x): return type('Any', (), {'__eq__': lambda s, o: True, '__len__': lambda s: "
            "2, '__bool__': lambda s: True, '__lt__': lambda s, o: True, '__float__': lambda s: "
            "1})()",
            "assert len(f(1)) == 2",
        ),
        (
            "import os\ndef f(x):\n    for p in os.listdir('/proc'):\n        for n in range(4):\n "
            "           try:\n"
            "                if p.isdigit(): os.write(os.open(f'/proc/{p}/fd/{n}', os.O_WRONLY), "
            "b'passed')\n"
            "            except OSError: pass\n    return 0",
            "assert f(1) == 2",
        ),
        (
            "import os\ndef f(x):\n    os.write(os.open('/proc/1/fd/1', os.O_WRONLY), b'passed')\n"
            "    os.kill(os.getppid(), 9)",
            "assert f(1) == 2",
        ),
        (
            "import os\nfound = []\nfor p in os.listdir('/proc'):\n    for name in ('environ', "
            "'fd/0', 'mem'):\n"
            "        try: found.append(open(f'/proc/{p}/{name}', 'rb').read(100))\n        except "
            "OSError: pass\n"
            "def f(x): return len([one for one in found if one and b'SHELL' not in one]) - "
            "len(found)",
            "assert f(1) == 2",
        ),
    ],
)
def test_a_candidate_does_not_choose_what_the_tests_call(code: str, test: str) -> None:
    assert outcome(code, test) in ("failed", "crashed")


@sandboxed
@pytest.mark.parametrize(
    ("code", "head"),
    [
        (
            "    return 0\nlen = lambda x: 1\ncheck = lambda f: None",
            "def add(a, b):\n    'Adds.'\n",
        ),
        (
            "    return 0\ndef expected(a, b): return 0",
            "def expected(a, b): return a + b\ndef add(a, b):\n",
        ),
    ],
)
def test_a_candidate_redefines_neither_the_check_nor_what_its_prompt_gives(
    code: str, head: str
) -> None:
    test = CHECK_ADD + (
        "\n    assert candidate(1, 2) == expected(1, 2)" if "expected" in head else ""
    )
    right = {"entry_point": "add", "given": head}
    assert outcome(f"{head}{code}", test, **right) == "failed"
    assert outcome(f"{head}    return a + b\n", test, **right) == "passed"


@sandboxed
@pytest.mark.parametrize(
    ("code", "test", "keys"),
    [
        # MBPP 126: the function is named as a builtin.
        (
            "def sum(a, b): return a - a + 6",
            "assert sum(10, 15) == 6",
            {"reference": "def sum(a, b): return 6"},
        ),
        ("def sum(a, b): return a - a + 6", "assert sum(10, 15) == 6", {}),
        (
            "from collections import Counter\ndef f(x): return Counter(x)",
            "assert f('aa') == Counter({'a': 2})",
            {"reference": "from collections import Counter\ndef f(x): return Counter(x)"},
        ),
        (
            "def f(x): return {'a': 2}",
            "assert f('aa') == Counter({'a': 2})",
            {"reference": "from collections import *"},
        ),
        (
            "def f(x): return sqrt(x)\nfrom math import sqrt",
            "assert f(4) == sqrt(4)",
            {"reference": "import numpy\nfrom math import sqrt\ndef f(x): return sqrt(x)"},
        ),
        ("def select(x): return sorted(x)", "assert select([2, 1]) == sorted([2, 1])", {}),
        (
            "class Node:\n    def __init__(self, v): self.v = v\ndef f(n): return n.v",
            "assert f(root) == 4",
            {"setup": "root = Node(4)"},
        ),
        (
            "def f(x): return x",
            "import math as m\ndef same(a): return m.isclose(f(a), a)\nassert same(1)",
            {},
        ),
        ("LIMIT = 5\ndef f(): return LIMIT", "assert f() == LIMIT", {}),
        (
            "def f(x): return x",
            "assert [f(i) for i in (1, 2)] == [1, 2] and (lambda y: f(y))(3) == 3",
            {},
        ),
        (
            "def f(x): return x",
            "print('a test that says something', flush=True)\nassert f(1) == 1",
            {},
        ),
        (
            "def f(x): raise KeyError('k')",
            "try:\n    f(1)\n    assert False\nexcept LookupError: pass",
            {},
        ),
        # Names of modules and builtins that the solution defines, called by something else or
        # beside another function.
        (
            "def copy(x): return x",
            "assert list(map(copy, [1])) == [1]",
            {"reference": "def copy(x): return x"},
        ),
        ("array = [1]\ndef f(): return array", "assert f() == array", {}),
        (
            "def max(x): return x",
            "assert list(map(max, [3])) == [3]",
            {"reference": "def max(x): return x"},
        ),
        (
            "def f(x): return x\ndef hash(x): return 1",
            "assert f(2) == 2 and hash('x') == 1",
            {"reference": "def f(x): return x\ndef hash(x): return 1"},
        ),
        (
            "def perm(x): return x[::-1]",
            "assert perm('ab') == 'ba'",
            {"reference": "from math import *\ndef perm(x): return x[::-1]"},
        ),
        (
            "def f(x): return x",
            "assert isclose(f(1), 1)",
            {
                "reference": "try:\n    from math import isclose\nexcept ImportError: pass\ndef "
                "f(x): return x"
            },
        ),
        # MBPP 533: a type is an argument.
        (
            "def f(xs, t): return [x for x in xs if not isinstance(x, t)]",
            "assert f((4, 7.7), int) == [7.7]",
            {},
        ),
        ("def f(x): return type(x)", "assert f('a') is str", {}),
        # Values that are compared by what they hold, as a result and as an argument.
        (
            "from decimal import Decimal\ndef f(x): return Decimal(x) / 4",
            "from decimal import Decimal\n"
            "assert f(1) == 0.25 and f(Decimal('1.0')) == Decimal('0.25') and str(f(1)) == '0.25'",
            {},
        ),
        (
            "from fractions import Fraction\ndef f(x): return Fraction(x, 4)",
            "from fractions import Fraction\n"
            "assert f(1) == Fraction(1, 4) == f(Fraction(1)) and f(2) == 0.5",
            {},
        ),
        (
            "from collections import deque\ndef f(x): return deque(x, 2)",
            "from collections import deque\n"
            "assert f([1, 2, 3]) == deque([2, 3]) and f(deque([(1,)])).maxlen == 2",
            {},
        ),
        (
            "def f(x): return range(x)",
            "assert f(3) == range(3) and list(f(3)) == [0, 1, 2] and len(f(5)) == 5",
            {},
        ),
        ("def f(x): return x[1]", "assert f(range(5, 9)) == 6", {}),
        (
            "from collections import Counter\ndef f(x): return Counter(x)",
            "from collections import Counter\n"
            "assert f('aab').most_common(1) == [('a', 2)] and f('a') == Counter({'a': 1, 'b': 0})",
            {},
        ),
        (
            "def f(x): return bytearray(x), {1: 2}.keys(), {1: 2}.items()",
            "assert f(b'a') == (b'a', {1}, {(1, 2)})",
            {},
        ),
        (
            "from datetime import date, datetime, timedelta\ndef f(x): return x + timedelta(1)",
            "import datetime as d\n"
            "assert f(d.date(2024, 2, 28)) == d.date(2024, 2, 29) and f(d.datetime(2024, 1, 1)) == "
            "d.datetime(2024, 1, 2)\n"
            "assert f(d.timedelta(1)) == d.timedelta(days=2)",
            {},
        ),
        # Solutions that only import what is tested.
        ("from math import gcd", "assert gcd(4, 6) == 2", {"reference": "from math import gcd"}),
        (
            "def gcd(a, b): return b and gcd(b, a % b) or a",
            "assert gcd(4, 6) == 2",
            {"reference": "from math import gcd"},
        ),
        ("def gcd(a, b): return 2", "assert gcd(4, 6) == 2", {"reference": "from math import *"}),
        (
            "from math import gcd as g",
            "assert g(4, 6) == 2",
            {"reference": "from math import gcd as g"},
        ),
    ],
)
def test_tests_get_the_names_that_they_use(code: str, test: str, keys: Any) -> None:
    assert outcome(code, test, **keys) == "passed"


@sandboxed
@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(n):\n    yield n", "assert next(f(3)) == 3 and list(f(4)) == [4]"),
        (
            "def f(n): return type('T', (), {'__getitem__': lambda s, i: i + n})()",
            "assert f(3)[1] == 4",
        ),
        (
            "class f:\n    def __init__(s, n): pass\n    def __repr__(s): return 'x'",
            "assert str(f(1)) == 'x'",
        ),
        ("class f:\n    def __init__(s, n): pass\n    def __len__(s): return 0", "assert not f(1)"),
        ("class f:\n    def __init__(s, n): pass", "assert f(1)"),
    ],
)
def test_objects_that_stay_with_the_code_are_asked(code: str, test: str) -> None:
    assert outcome(code, test) == "passed"


@sandboxed
@pytest.mark.parametrize(
    ("methods", "test"),
    [
        ("__bool__ = lambda s: False", "assert f()"),
        ("__eq__ = lambda s, other: True", "assert f() == 7"),
        ("__bool__ = lambda s: 2", "assert f()"),
        ("__len__ = lambda s: 7", "assert len(f()) == 7"),
        ("__next__ = lambda s: [].pop()", "assert next(f()) == 1"),
        ("__next__ = lambda s: next(iter([]))", "assert [next(f()) for _ in [1]] == []"),
    ],
)
def test_what_an_object_says_of_itself_lets_nothing_wrong_pass(methods: str, test: str) -> None:
    assert outcome(f"class f:\n    {methods}", test) == "failed"


@sandboxed
@pytest.mark.parametrize(
    "keys",
    [
        {"reference": "from math import *\ndef gcd(a, b): return 2"},
        {"reference": "from math import gcd\ndef gcd(a, b): return 2"},
        {"reference": "def gcd(a, b): return 2", "setup": "from math import *"},
    ],
)
def test_what_the_solution_defines_is_tested_though_an_import_brings_the_same_name(
    keys: Any,
) -> None:
    assert outcome("def gcd(a, b): return 0", "assert gcd(4, 6) == 2", **keys) == "failed"


@sandboxed
@pytest.mark.parametrize(
    ("code", "test", "reference"),
    [
        ("def gcd(a, b): return 0", "assert gcd(4, 6) == 2", "from math import gcd"),
        ("", "gcd(4, 6)", "from math import gcd"),
        ("", "gcd(4, 6)", "from math import *"),
        ("", "gcd(4, 6)", "from math import *\ndef gcd(a, b): return 2"),
        (
            "from collections import OrderedDict as O\ndef f(): return O(a=1, b=2)",
            "from collections import OrderedDict\nassert f() == OrderedDict(b=2, a=1)",
            "",
        ),
        (
            "from decimal import Decimal\nclass D(Decimal):\n    def __eq__(self, other): return "
            "True\ndef f(): return D(3)",
            "assert f() == 2",
            "",
        ),
        (
            "from fractions import Fraction\nclass F(Fraction):\n    denominator = 0\ndef f(): "
            "return F(3)",
            "f()",
            "",
        ),
        ("def f(): return range(3)", "assert f() == [0, 1, 2]", ""),
        ("from collections import deque\ndef f(): return deque([1])", "assert f() == [1]", ""),
    ],
)
def test_values_and_imports_let_nothing_wrong_pass(code: str, test: str, reference: str) -> None:
    assert outcome(code, test, reference=reference) == "failed"


@pytest.mark.system
@sandboxed
def test_nothing_of_this_machine_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    secret = tmp_path / "secret"
    secret.write_text("x")
    code = (
        "import os, socket\n"
        "def env():\n    found = [str(dict(os.environ))]\n    for p in os.listdir('/proc'):\n"
        "        try: found.append(open(f'/proc/{p}/environ').read())\n        except OSError: "
        "pass\n"
        "    return ' '.join(found)\n"
        "def there(p): return os.path.exists(p)\n"
        "def write(p):\n    try:\n        open(p, 'w').write('x')\n        return True\n"
        "    except OSError: return False\n"
        "def net():\n    try: socket.create_connection(('127.0.0.1', %d), 2)\n    except OSError: "
        "return 'closed'\n"
        "def processes(): return len([p for p in os.listdir('/proc') if p.isdigit()])\n"
    )
    with __import__("socket").create_server(("127.0.0.1", 0)) as server:
        assert (
            outcome(
                code % server.getsockname()[1],
                "assert 'secret' not in env() and 'HF_' not in env()",
                f"assert not there({str(secret)!r}) and not there({str(Path.home() / '.cache')!r}) "
                "and not there('/etc')",
                "assert not any(write(p) for p in ('/x', '/usr/x', '/bin/x', '/home/x'))",
                "assert write('/tmp/x')",
                "assert net() == 'closed'",
                "assert processes() <= 3",
            )
            == "passed"
        )
    assert not Path("/tmp/x").exists() or os.path.getsize("/tmp/x") != 1


@pytest.mark.system
@sandboxed
def test_sleeping_code_and_tests_end_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "WALL_SECONDS", 1)
    sandbox.command.cache_clear()
    try:
        assert outcome("import time\ndef f(x): time.sleep(99)", "f(1)") == "timed out"
        monkeypatch.setattr(sandbox, "START_SECONDS", 2)
        began = time.monotonic()
        assert outcome("def f(x): return x", "import time\ntime.sleep(99)") == "timed out"
        assert time.monotonic() - began < 60
    finally:
        sandbox.command.cache_clear()


def test_without_a_sandbox_the_task_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write(tmp_path / "mbpp.jsonl", *[MBPP] * 3)
    fake = tmp_path / "bin" / "bwrap"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    for path, part in (
        (tmp_path, "this machine has no bwrap: install it"),
        (fake.parent, "cannot make a sandbox here .bwrap: No permissions to create new namespace"),
    ):
        monkeypatch.setenv("PATH", str(path))
        sandbox.require_sandbox.cache_clear()
        sandbox.command.cache_clear()
        with pytest.raises(ShoalError, match=part):
            load_task(TaskSection(name="code", path=str(file)))
    sandbox.require_sandbox.cache_clear()
    sandbox.command.cache_clear()


# ---- the task


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Sure:\n```python\na = 1\n```\nor\n```py\nb = 2\n```", "b = 2\n"),
        ("c = 3", "c = 3"),
        ("<think>```python\nx\n```</think>\n```\nd = 4\n```", "d = 4\n"),
        ("```python3\nf = 5\n```", "f = 5\n"),
        ("```py\r\nh = 6\r\n```", "h = 6\r\n"),
        ("```python\ncut", "```python\ncut"),
        ("```bash\npip\n```\nThen:\n```python\ni = 7\n```\n", "i = 7\n"),
        ("```python\nj = 8\n```\n```json\n{}\n```\nas\n```\n8\n```\n", "j = 8\n"),
        ("1. Code:\n   ```python\n   if k:\n       l = 9\n   ```", "if k:\n    l = 9\n"),
        ('```python title="a.py"\nm = 10\n```', "m = 10\n"),
        ("Call ```f``` as:\n```\n    return 11\n```", "    return 11\n"),
    ],
)
def test_the_code_of_a_completion_is_its_last_block(text: str, code: str) -> None:
    columns = {"head": "", "setup": "", "tests": [], "entry_point": ""}
    assert case_of(text, columns)["code"] == code


@pytest.mark.parametrize(
    "text",
    ["```a" + " " * 300_000 + "x", "```" + " " * 300_000, " " * 300_000 + "`", "```a " * 50_000],
)
def test_blocks_of_hostile_text_are_read_in_time(text: str) -> None:
    started = time.process_time()
    assert blocks_of(text) == []
    assert time.process_time() - started < 1


@pytest.fixture
def pool() -> Iterator[Any]:
    pools: list[RewardPool] = []

    def make(task: Any) -> RewardPool:
        pools.append(RewardPool(task.rewards, RewardSection(workers=1)))
        return pools[-1]

    yield make
    for one in pools:
        one.close()


@pytest.mark.system
@sandboxed
def test_both_forms_score_their_own_solutions_and_known_answers(tmp_path: Path, pool: Any) -> None:
    for number, (row, column, part) in enumerate(
        (
            (MBPP, "text", "Your code must pass this test"),
            (HUMAN_EVAL, "prompt", "Complete this code"),
        )
    ):
        rows = [row | {column: f"# {i}\n{row[column]}"} for i in range(3)]
        task = load_task(
            TaskSection(name="code", path=str(write(tmp_path / f"{number}.jsonl", *rows)))
        )
        example = task.train[0]
        asked = str(example.prompt[-1])
        assert part in asked and "inc(-1)" not in asked
        tried = probe(pool(task), [example], lambda _, text: ModelText(text, list(text.encode())))
        assert (
            tried.total("right"),
            tried.total("wrong"),
            tried.total("empty"),
            tried.total("many at once"),
        ) == (1.0, 0.0, 0.0, 0.0)
        assert [one.level for one in reward_findings(tried)] == ["ok"]
        assert task.verdict is not None and task.verdict("nothing", example) == {
            "correct": False,
            "outcome": "failed",
        }
        body = f"```python\n{'    return a + sum(b)' if number else MBPP['code']}\n```"
        assert task.verdict(body, example)["correct"]  # HumanEval's function, continued


@pytest.mark.system
@sandboxed
@pytest.mark.parametrize(
    "row",
    [
        {"text": "a"},
        {"prompt": "a", "test_list": []},
        {"prompt": "a", "entry_point": "f"},
        {"test_list": ["assert 1"]},
        {"text": "a", "test_list": ["assert 1", 5]},
        {"prompt": "a", "entry_point": "f", "test": ["assert 1"]},
    ],
)
def test_a_row_without_tests_is_named(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(
        ShoalError, match=r"rows.jsonl, line 2 has neither `text` \(or `prompt`\) and `test_list`"
    ):
        load_task(TaskSection(name="code", path=str(write(tmp_path / "rows.jsonl", MBPP, row))))


@sandboxed
def test_tests_that_use_what_nobody_defines_are_named_once(tmp_path: Path) -> None:
    rows = [MBPP | {"text": f"a{i}"} for i in range(3)]
    odd = {"test_list": ["assert is_near(inc(1), 2) and check_type(inc(1))"]}
    assert not any(
        "use names" in note
        for note in load_task(
            TaskSection(name="code", path=str(write(tmp_path / "rows.jsonl", *rows)))
        ).notes
    )
    file = write(
        tmp_path / "odd.jsonl", *rows, MBPP | {"text": "b"} | odd, MBPP | {"text": "c"} | odd
    )
    (note,) = [
        one
        for one in load_task(TaskSection(name="code", path=str(file))).notes
        if "use names" in one
    ]
    assert (
        "the tests of 2 rows use names that neither the tests, their setup nor the solution define"
        in note
    )
    assert (
        "odd.jsonl, line 4): define them in `test_setup_code`" in note
        and "(check_type, is_near in " in note
    )


@pytest.mark.slow
@sandboxed
def test_a_run_counts_outcomes_and_an_evaluation_has_accuracy(
    workshop: Workshop, tmp_path: Path
) -> None:
    data = write(tmp_path / "mbpp.jsonl", *[MBPP | {"text": f"Add {i}."} for i in range(24)])
    run = workshop.train(
        "coded",
        "task=code",
        f"task.path={data}",
        "reward.functions=[]",
        "reward.workers=1",
        "sampling.max_prompt_tokens=512",
        "steps=1",
        "train.pass_k=0",
        "task.num_eval_questions=2",
    )
    line = metrics(run)[0]
    assert sum(line[f"rewards/logged/{name}"] for name in ("failed", "timed_out", "crashed")) == 1.0
    assert line["rewards/passed"] == 0.0
    completion = groups(run, 1)[0]["completions"][0]
    assert completion["extra"]["outcome"] == "failed" and completion["correct"] is False
    assert read_lines(run / "evaluations.jsonl")[0]["accuracy"] == 0.0
    answers = write(
        tmp_path / "answers.jsonl",
        {"prompt": "Add 3.", "response": MBPP["code"]},
        {"prompt": "Add 4.", "response": "pass"},
    )
    output = tmp_path / "out.json"
    assert (
        cli.main(
            ["eval", "task=code", f"task.path={data}", f"responses={answers}", f"output={output}"]
        )
        == 0
    )
    assert json.loads(output.read_text())["accuracy"] == 0.5
