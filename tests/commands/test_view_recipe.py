"""The band of a run's recipe, as `shoal view` answers it."""

from __future__ import annotations

from contextlib import closing

import pytest
from stored_runs import follow_recipe, write_run

pytest.importorskip("duckdb", reason="shoal view needs the extra `view`")

from shoal.commands.view.views import Viewer
from shoal.runs.layout import RECIPE


def test_a_run_shows_the_band_of_its_recipe_or_why_it_cannot(tmp_path):
    run = write_run(tmp_path / "run", 2)
    with closing(Viewer([str(run)])) as viewer:
        viewer.read_all()
        assert viewer.answer("overview", {"run": "run"})["recipe"] is None
        follow_recipe(run, apart="this run has lr=1")
        band = viewer.answer("overview", {"run": "run"})["recipe"]
        assert band["name"] == "word-problems" and band["apart"] == "this run has lr=1"
        assert band["metric"] == "evaluate/held_out/accuracy" and band["seeds"] == 5
        assert band["x"] == [0, 10, 20, 30, 40] and band["low"][4] < band["high"][4]
        follow_recipe(run, holds=False)
        assert viewer.answer("overview", {"run": "run"})["recipe"] is None
        for damaged in ("about: {what: a}", "about: 3", "- 1", "model: {path: 3", HOSTILE_RECIPE):
            (run / RECIPE).write_text(damaged)
            found = viewer.answer("overview", {"run": "run"})
            assert found["recipe"] is None, damaged
            assert any(line.startswith("recipe.yaml: is damaged") for line in found["problems"])


HOSTILE_RECIPE = """\
about:
  what: a
  hardware: b
  seconds: .inf
  expected: {metric: a, seeds: 1e300, steps: {0: [-.inf, .nan]}}
"""
