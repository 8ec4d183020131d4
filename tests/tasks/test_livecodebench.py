"""LiveCodeBench: tests packed as they are published, and nothing else; outputs compared as its
harness does; programs and solutions in the sandbox. Rows are of our own, in the published form."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from sandboxes import sandboxed
from scoring import score

from shoal.config.merge import compose
from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import ShoalError
from shoal.tasks import livecodebench
from shoal.tasks.graders import sandbox
from shoal.tasks.graders.program_tests import (
    InputOutput,
    ProgramTests,
    case_of,
    outcome_of,
    same_output,
)
from shoal.tasks.livecodebench import (
    SYSTEM_PROMPT,
    code_of,
    files_of,
    unpacked,
    with_release,
)
from shoal.tasks.splits import evaluating


def packed(value: Any, protocol: int | None = None) -> str:
    """A value as the published rows have their private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


def row(**other: Any) -> dict[str, Any]:
    """A row in the published form: print the sum of two numbers."""
    public = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
    private = [{"input": "4 5\n", "output": "9", "testtype": "stdin"}]
    return {
        "question_title": "Sum",
        "question_content": "Print the sum of two numbers.",
        "platform": "atcoder",
        "contest_date": "2024-01-01T00:00:00",
        "starter_code": "",
        "public_test_cases": json.dumps(public),
        "private_test_cases": packed(json.dumps(private)),
        "metadata": "{}",
    } | other


def functional(**other: Any) -> dict[str, Any]:
    """A row whose tests call a function."""
    public = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]
    private = [{"input": "[]\n1", "output": "[]", "testtype": "functional"}]
    return (
        row(
            question_content="Add a number to each.",
            starter_code="class Solution:\n    def add(self, a: List[int], b: int) -> List[int]:\n",
            public_test_cases=json.dumps(public),
            private_test_cases=packed(json.dumps(private)),
            metadata=json.dumps({"func_name": "add"}),
        )
        | other
    )


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- packed tests


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("text", ["", "[]", "naïve ✓", "x" * 300, "y" * 70_000])
def test_a_pickled_text_is_read(protocol: int, text: str) -> None:
    assert unpacked(packed(text, protocol)) == text


class Runs:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch was_run",)


@pytest.mark.parametrize(
    ("value", "instruction"),
    [
        (Runs(), "GLOBAL"),
        (b"bytes", "BYTES"),
        (["a", "b"], "LIST"),
        (1, "INT"),
        (None, "NONE"),
        (os.path.join, "GLOBAL"),
        ({"a": "b"}, "DICT"),
    ],
)
def test_a_pickle_of_anything_else_is_refused_and_not_run(
    value: Any, instruction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ShoalError,
        match=rf"livecodebench: line 3: `private_test_cases` is a pickle of something else than a "
        rf"text \(it has \w*{instruction}\w*\), which is not read: a pickle can run code",
    ):
        livecodebench.tests_of(row(private_test_cases=packed(value)), "line 3")
    assert not list(tmp_path.iterdir())


def test_two_texts_are_no_text() -> None:
    data = pickle.dumps("one", 2)[:-1] + pickle.dumps("two", 2)[2:]
    text = base64.b64encode(zlib.compress(data)).decode()
    with pytest.raises(ValueError, match="a pickle of something else than a text"):
        unpacked(text)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"private_test_cases": "?"}, "`private_test_cases` is neither JSON nor compressed text"),
        (
            {"private_test_cases": base64.b64encode(b"plain").decode()},
            "`private_test_cases` is neither JSON nor compressed text in base64",
        ),
        (
            {"private_test_cases": base64.b64encode(zlib.compress(b"plain")).decode()},
            "`private_test_cases` is no pickle of a text",
        ),
        (
            {"private_test_cases": packed("plain")},
            "`private_test_cases` is not a JSON list of tests",
        ),
        ({"public_test_cases": "{}"}, "`public_test_cases` is not a JSON list of tests"),
        ({"public_test_cases": "[1]"}, "`public_test_cases` has a test without `input`"),
        ({"public_test_cases": '[{"input": "1"}]'}, "has a test without `input` and `output`"),
        ({"public_test_cases": "[]", "private_test_cases": "[]"}, "has no tests"),
        ({"metadata": "x"}, "`metadata` is not a JSON object"),
        ({"metadata": '{"func_name": "f"}'}, "a test of a function has '1 2', which is not JSON"),
    ],
)
def test_tests_that_cannot_be_read_are_named(changed: dict[str, str], fault: str) -> None:
    with pytest.raises(ShoalError, match=rf"^task livecodebench: line 3:? (`.*` )?{fault}"):
        livecodebench.tests_of(row(**changed), "line 3")


def test_more_tests_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livecodebench, "MOST_TEST_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="has more than 1 MiB of tests"):
        unpacked(packed("0" * (2 << 20)))


# ---- completions


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("```\na\n```\nand\n```py\nb\nc\n```\nDone.", "b\nc"),
        ("  ```python\n  a\n  ```", "  a"),
        ("```python\na", ""),
        ("print(1)", ""),
        ("```a```", ""),
        ("```python\na\n```\n```", ""),  # the last two lines with ```, as theirs
    ],
)
def test_code_stands_between_the_last_two_fences(text: str, code: str) -> None:
    assert code_of(text) == code


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        ("\n 3 \n\n", "3", True),
        ("1 2\n3", "1 2 \n3\n", True),
        ("1.0 2", "1 2.00", True),
        ("1e2", "100", True),
        ("0.333", "0.3333", False),
        ("50000000000000000", "50000000000000001", False),
        ("a  b", "a b", False),
        ("Yes", "YES", False),
        ("1\n2", "1", False),
        ("1\n\n2", "1\n2", False),
        ("", "", True),
        ("nan", "nan", True),
        ("nan 1", "nan  1", False),
    ],
)
def test_outputs_are_compared_as_by_the_published_harness(
    printed: str, expected: str, same: bool
) -> None:
    assert same_output(printed, expected) is same


SUM = "a, b = map(int, input().split())\nprint(a + b)"


@sandboxed
@pytest.mark.system
@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        (SUM, "passed"),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "passed"),
        ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", "passed"),
        ("print(sum(map(int, open(0).read().split())))", "passed"),
        ("import os\nos.write(1, str(sum(map(int, input().split()))).encode())", "passed"),
        ("import sys\nsys.stdout.write(str(sum(map(int, input().split()))))", "passed"),
        ("def main():\n    print(sum(map(int, input().split())))\nmain()\nexit()", "passed"),
        ("if __name__ == '__main__':\n    print(sum(map(int, input().split())))", "passed"),
        ("from __future__ import annotations\n" + SUM, "passed"),
        ("out = open(1, 'w')\nout.write(str(sum(map(int, input().split()))))", "passed"),
        (
            "from threading import Thread\nfrom time import sleep\ndef run():\n    sleep(0.1)\n"
            "    print(sum(map(int, input().split())))\nThread(target=run).start()",
            "passed",
        ),
        ("print(reduce(add, map(int, input().split())))", "passed"),  # names of the prelude
        ("print(3)", "failed"),  # right for the first input alone
        ("print(input())", "failed"),
        ("", "failed"),
        ("1 +", "failed"),
        ("raise SystemExit(1)", "failed"),
        ("import os\nos._exit(0)", "crashed"),
        ("def same_output(*_): return True\nshoal_printed = lambda part: '3'", "failed"),
        ("import sys\nsys._getframe(1).f_globals['check_program'] = print", "failed"),
    ],
)
def test_programs_read_and_print(source: str, outcome: str) -> None:
    tests = [InputOutput("1 2\n", "3\n"), InputOutput("4 5", "9")]
    assert outcome_of(ProgramTests(source, tests)) == outcome


@pytest.mark.slow
@sandboxed
def test_each_test_has_the_limits_of_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tests together take more seconds of the processor than one sandbox gives."""
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 1)
    sandbox.command.cache_clear()
    source = (
        "import time\n"
        "end = time.process_time() + float(input())\n"
        "while time.process_time() < end: pass\n"
        "print(1)"
    )
    try:
        tests = [InputOutput("0.6", "1"), InputOutput("0.61", "1"), InputOutput("0.62", "1")]
        assert outcome_of(ProgramTests(source, tests)) == "passed"
        assert outcome_of(ProgramTests(source, [InputOutput("3", "1")])) == "timed out"
        assert outcome_of(ProgramTests("while True: pass", tests)) == "timed out"
    finally:
        sandbox.command.cache_clear()


@sandboxed
def test_inputs_and_outputs_may_be_long() -> None:
    numbers = " ".join(map(str, range(400_000)))  # 2.7 MB
    test = InputOutput(numbers, numbers.replace(" ", "\n"))
    assert outcome_of(ProgramTests("print(*input().split(), sep='\\n')", [test])) == "passed"
    assert outcome_of(ProgramTests("print(*input().split()[1:])", [test])) == "failed"


ADD = "class Solution:\n    def add(self, a: List[int], b: int) -> List[int]:\n        return {}"


@sandboxed
@pytest.mark.system
@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        (ADD.format("[each + b for each in a]"), "passed"),
        (ADD.format("tuple(each + b for each in a)"), "passed"),
        ("def add(a, b):\n    return [each + b for each in a]", "passed"),
        (ADD.format("a"), "failed"),
        ("class Solution:\n    pass", "failed"),
        ("class A:\n    __eq__ = lambda *_: True\n" + ADD.format("A()"), "failed"),
        (ADD.format("exit()"), "failed"),
    ],
)
def test_functions_are_called(source: str, outcome: str) -> None:
    tests, function = livecodebench.tests_of(functional(), "")
    assert function == "add"
    assert outcome_of(ProgramTests(source, tests, function)) == outcome


def test_what_is_expected_is_not_in_the_candidates_part_of_a_case() -> None:
    case = case_of(ProgramTests("x", [InputOutput("in", "secret output")]), [])
    assert "secret" not in str(case)
    case = case_of(ProgramTests("x", []), [InputOutput("in", "secret output")])
    assert "secret" in str(case["tests"]) and "secret" not in case["code"]


# ---- the task


@sandboxed
def test_the_published_protocol(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [row(), functional()])
    config = compose("eval", ["task=livecodebench", f"task.path={path}"])[0]
    sampling = config.sampling
    assert (config.pass_k, sampling.temperature, sampling.top_p) == (10, 0.2, 0.95)
    assert sampling.max_completion_tokens == 2000
    with evaluating():
        task = load_task(config.task)
    program, function = task.evaluations["held_out"]
    assert "all 2 rows are evaluated on" in task.notes[0]
    assert not isinstance(program.prompt, str) and not isinstance(function.prompt, str)
    assert program.prompt[0] == {"role": "system", "content": SYSTEM_PROMPT}
    asked = program.prompt[1]["content"]
    assert asked.startswith("### Question:\nPrint the sum of two numbers.\n\n### Format: Read the ")
    assert asked.endswith(
        "output to STDOUT.\n```python\n# YOUR CODE HERE\n```\n\n"
        "### Answer: (use the provided format with backticks)\n\n"
    )
    asked = function.prompt[1]["content"]
    assert "enclose your code within delimiters.\n```python\nclass Solution:\n" in asked
    text = f"So:\n```python\n{SUM}\n```"
    assert task.verdict and task.well_formed and task.of_row
    assert task.verdict(text, program) == {"correct": True, "outcome": "passed"}
    assert task.verdict(text, function) == {"correct": False, "outcome": "failed"}
    assert task.well_formed(text) and not task.well_formed(SUM)
    scores = score(task.rewards, [program], [program.prompt], [[text, "no"]], [[[1]] * 2])
    assert scores.rewards.tolist() == [[1, 0]]
    assert task.of_row(0, row()).columns == program.columns
    with pytest.raises(ShoalError, match="row 1 has no `starter_code` that is text"):
        task.of_row(1, {"question_content": "?"})


@sandboxed
def test_to_train_on_it_a_tenth_is_held_out_and_a_note_warns(tmp_path: Path) -> None:
    rows = [row(question_content=f"Sum {number}") for number in range(10)]
    path = write(tmp_path / "mine.jsonl", rows)
    config = compose("train", ["task=livecodebench", f"task.path={path}"])[0]
    task = load_task(config.task)
    assert (len(task.train), len(task.evaluations["held_out"])) == (9, 1)
    assert "an evaluation set" in task.notes[1]


@sandboxed
def test_a_release_is_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 7):
        name = f"test{number if number > 1 else ''}.jsonl"
        write(tmp_path / name, [row(question_content=f"Sum {number}")])
    asked: list[Any] = []

    def snapshot_download(name: str, **keys: Any) -> str:
        asked.append(keys["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    def questions(*words: str) -> list[str]:
        config = compose("eval", ["task=livecodebench", *words])[0]
        with evaluating():
            task = load_task(config.task)
        return [one.columns["question_content"][-1] for one in task.evaluations["held_out"]]

    assert questions() == list("123456")
    assert questions("task.subset=v6") == ["6"] and asked[-1] == ["test6.jsonl"]
    assert questions("task.subset=release_v2", f"task.path={tmp_path}") == ["1", "2"]
    assert questions("task.subset=v2_v4", f"task.path={tmp_path}") == list("234")
    with pytest.raises(ShoalError, match=r"task.subset='v7': there is no such release; expected"):
        questions("task.subset=v7")
    config = compose("train", ["task=livecodebench", "task.subset=release_v6"])[0]
    assert len(load_task(config.task).train) == 5


def test_releases() -> None:
    assert files_of("release_latest") == files_of("release_v6") == files_of("v1_v6")
    for name in ("", "v0", "v3_v2", "release_v9", "release_v", "1", "v1_v7"):
        with pytest.raises(ShoalError, match="there is no such release"):
            files_of(name)
    own = TaskSection(name="livecodebench", path="folder")
    assert with_release(own) == own


@sandboxed
def test_a_row_without_a_column_is_named(tmp_path: Path) -> None:
    lacking = row()
    del lacking["private_test_cases"]
    path = write(tmp_path / "mine.jsonl", [lacking])
    with pytest.raises(ShoalError, match="line 1 has no column 'private_test_cases'; its columns"):
        load_task(TaskSection(name="livecodebench", path=str(path)))
