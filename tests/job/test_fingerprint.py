"""What a run's numbers depend on besides its configuration: the sources of its rewards."""

from __future__ import annotations

import hashlib
import io
import linecache
from pathlib import Path
from typing import Any

import pytest

from shoal.config.sections.train import TrainSection
from shoal.config.train import Config
from shoal.job.data_source import for_training
from shoal.job.fingerprint import _source_digest, compare_facts, fingerprint
from shoal.records import Example, ShoalError
from shoal.report.console import Console
from shoal.rewards.loading import load_functions, name_functions
from shoal.tasks.task import Task

SOURCE = """import json
import numpy

def exact(completions, **kwargs):
    from grading.rules import points
    return points(completions)
"""


DATA = {"data": "4 rows", "training_rows": "4 rows"}


def digest(file: Path) -> str:
    return _source_digest(name_functions(load_functions([f"{file}:exact"]))[0])


def test_modules_beside_a_reward_belong_to_it(tmp_path: Path) -> None:
    file, helper = tmp_path / "rewards.py", tmp_path / "grading" / "values.py"
    file.write_text(SOURCE)
    alone = digest(file)
    # what is installed has no part in it
    assert alone == hashlib.blake2b(SOURCE.encode(), digest_size=8).hexdigest()
    helper.parent.mkdir()
    (helper.parent / "__init__.py").touch()
    (helper.parent / "rules.py").write_text(
        "from .values import VALUE\n\ndef points(completions): return [VALUE]\n"
    )
    helper.write_text("VALUE = 1.0\n")
    (tmp_path / "other.py").write_text("VALUE = 3.0\n")
    first = digest(file)
    assert first != alone and first == digest(file)
    (tmp_path / "other.py").write_text("VALUE = 4.0\n")
    assert digest(file) == first
    helper.write_text("VALUE = 2.0\n")
    assert digest(file) != first
    helper.write_text("VALUE = (\n")  # that it cannot be read is for its import to say
    assert digest(file) != first


def test_a_run_that_has_no_reference_any_more_is_resumed_whatever_its_first_weights_became() -> (
    None
):
    """`algorithm.kl_coef=0` is what the error about other reference weights advises."""
    console, facts = Console(io.StringIO()), {"machine": {}, **DATA, "rewards": {}}
    compare_facts(facts | {"reference": "0x1"}, facts, console)
    compare_facts(facts, facts | {"reference": "0x1"}, console)
    with pytest.raises(ShoalError, match=r"checksum 0x1, now 0x2\).*or set algorithm.kl_coef=0"):
        compare_facts(facts | {"reference": "0x1"}, facts | {"reference": "0x2"}, console)


def test_data_are_the_same_whether_a_run_evaluates_or_not() -> None:
    def facts(every: int, prompt: str = "1+1", question: str = "2+2") -> dict[str, Any]:
        config = Config(train=TrainSection(evaluate_every=every))
        sets = {"held_out": [Example(1, question)]}
        task = Task("rows", train=[Example(0, prompt)], evaluations=sets)
        return fingerprint(for_training(task, config), 0)

    silent = io.StringIO()
    console = Console(silent)
    compare_facts(facts(3), facts(-1), console)
    compare_facts(facts(-1), facts(3), console)
    # An earlier version saved the digest of the rows alone if the run did not evaluate.
    earlier = facts(-1) | {"data": facts(-1)["training_rows"]}
    del earlier["training_rows"]
    compare_facts(earlier, facts(-1), console)
    compare_facts(earlier, facts(3), console)
    for changed in (facts(3, prompt="1+3"), facts(-1, prompt="1+3")):
        with pytest.raises(ShoalError, match="the training data is not what this run"):
            compare_facts(facts(3), changed, console, evaluates=False, has_evaluated=False)
    with pytest.raises(ShoalError, match="the training data is not what this run"):
        compare_facts(earlier, facts(3, prompt="1+3"), console)
    assert silent.getvalue() == ""
    # Other evaluation sets matter only to a run that compares evaluations.
    with pytest.raises(ShoalError, match=r"the evaluation sets are not .*evaluate_every=-1"):
        compare_facts(facts(3), facts(3, question="2+3"), console)
    for evaluates, has_evaluated in ((False, True), (True, False), (False, False)):
        written = io.StringIO()
        compare_facts(
            facts(3), facts(3, question="2+3"), Console(written), evaluates, has_evaluated
        )
        assert "the evaluation sets are not those" in " ".join(written.getvalue().split())


def test_a_changed_file_is_warned_of_once_for_all_its_functions() -> None:
    written = io.StringIO()
    saved = {"machine": {}, **DATA, "rewards": {"exact": "1", "short": "1", "same": "2"}}
    compare_facts(
        saved,
        saved | {"rewards": {"exact": "3", "short": "3", "same": "2", "new": "3"}},
        Console(written),
    )
    said = " ".join(written.getvalue().split())
    assert said.count("has changed") == 1
    assert "the file of exact and short, or one that it imports, has changed" in said


def test_the_files_of_tools_and_environments_belong_to_a_run(tmp_path: Path) -> None:
    (file := tmp_path / "acts.py").write_text("def act(): pass\n")

    def kept() -> dict[str, str]:
        (act,) = load_functions([f"{file}:act"], "tool", "")
        return fingerprint(Task("rows", tools=(act,), environments={"game": act}), 0)["rewards"]

    before = kept()
    assert list(before) == ["tool act", "environment game"] and all(before.values())
    file.write_text("def act(): return 1\n")
    linecache.checkcache()
    for name, digest in before.items():
        assert kept()[name] != digest
