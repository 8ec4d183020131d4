"""The page of `shoal view` in a real browser: headless Chromium of the system, driven by
Playwright."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_runs import (
    HOSTILE,
    completion,
    follow_recipe,
    in_turns,
    stored_group,
    write_run,
)

from shoal.commands.view import view
from shoal.commands.view.views import Viewer
from shoal.config.commands import ViewConfig
from shoal.config.merge import compose
from shoal.config.stored import texts_of
from shoal.config.train import Config
from shoal.runs.groups import write_file
from shoal.runs.result import load_run
from shoal.runs.writer import RunWriter
from shoal.serve.server import served

pytest.importorskip("duckdb", reason="shoal view needs the extra `view`")
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the page is tested with playwright, which is missing"
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="the page is tested in Chromium, which is missing (apt install chromium)",
    ),
]

GROUP = "file=step_000002&group=0"
VIEWS = {
    "home": ("#/home", "choose 2 or 3 runs"),
    "run": ("#/run?run=first", "What moves the reward"),
    "groups": ("#/groups?run=first", "84 groups"),
    "completions": ("#/completions?run=first", "324 completions"),
    "prompt": ("#/prompt?run=first&set=train&row=1&other=hostile", "answered 13 times"),
    "group": (f"#/group?run=first&{GROUP}&compare=0", "sampled after step 1, "),
    "tokens": (f"#/tokens?run=first&{GROUP}&completion=0&token=4&colour=gap", "token by token"),
    "comparison": ("#/run?runs=first%2Chostile", "Where they first differ"),
    "lint": ("#/lint?run=first", "Checked, and fine"),
}


def hostile_groups(step: int) -> list[Any]:
    return [stored_group(step, 0, [0, 0.1, 1, 1.1], HOSTILE, note=HOSTILE[0])]


def odd_groups(step: int) -> list[Any]:
    """Equal completions, one that is rewarded though it is wrong; long ones; one of many tokens."""
    best = "six and one more is seven"
    folded = stored_group(
        step,
        7,
        [0, 1, 0.1, 0, 0.9, 0],
        ["no", best, "six and two more is seven", "no", "thus six and one more is six", "no"],
        correct=[False, True, True, False, False, False],
    )
    long = stored_group(
        step, 8, [0, 0.5, 1], [f"{word} " * 900 for word in ("one", "two", "three")]
    )
    many = stored_group(step, 9, [0, 1])
    alike = stored_group(step, 10, [0, 0.1], correct=[False, False])  # told apart by no function
    # whose mean is below 0.1
    equal = stored_group(step, 11, [0.1] * 8, list("abcdefgh"), correct=[False] * 8)
    return [
        folded,
        long,
        alike,
        replace(many, completions=(completion(0, 1500, step), completion(1, 4, step))),
        equal,
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "first", 40, spike=37)
    write_run(
        folder / "hostile", 2, hostile_groups, settings=["task=gsm8k", "reward.weights=0.1,3"]
    )
    return folder


@contextlib.contextmanager
def viewed(*paths: Path, page: Any = None) -> Iterator[str]:
    """The address of a server of these runs. A `page` that reads it leaves before the server ends:
    asking a server that is gone is an error on its console."""
    from shoal.commands.view.server import make_app

    viewer = Viewer(list(map(str, paths)))
    viewer.start()
    try:
        with served(make_app(viewer)) as address:
            yield f"{address}/"
            if page is not None:
                page.goto("about:blank")
    finally:
        viewer.close()


@pytest.fixture(scope="module")
def address(runs) -> Iterator[str]:
    with viewed(runs) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Iterator[str]:
    with viewed(write_run(tmp_path_factory.mktemp("runs") / "odd", 1, odd_groups)) as address:
        yield address


@contextlib.contextmanager
def new_page(
    browser: Any, width: int = 1280, theme: str = "light", **options: Any
) -> Iterator[Any]:
    """A page whose console stays empty: an exception, or what the policy forbids, fails the
    test."""
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=theme, **options
    )
    page, said = context.new_page(), []
    page.on(
        "console",
        lambda message: said.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: said.append(str(error)))
    page.set_default_timeout(10_000)
    page.said = said
    yield page
    context.close()
    assert not page.said


@pytest.fixture
def page(browser) -> Iterator[Any]:
    with new_page(browser) as page:
        yield page


def settle(page: Any, text: str = "") -> None:
    """Until the view stands, with this text in it."""
    page.wait_for_function(
        "text => !document.querySelector('.state.loading') && document.querySelector('.view')"
        "?.innerText.includes(text)",
        arg=text,
    )


# ---- views and links


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (375, "dark")])
def test_each_view_has_an_address_and_fits(browser, address, width, theme):
    source = axe_source()
    with new_page(browser, width, theme) as page:
        page.add_init_script(
            "window.shift = 0; new PerformanceObserver(list => list.getEntries().forEach(entry => "
            "{if (!entry.hadRecentInput) window.shift += entry.value; })).observe({type: "
            "'layout-shift', buffered: true})"
        )
        for name, (link, text) in VIEWS.items():
            page.goto("about:blank")
            page.goto(address + link)
            settle(page, text)
            assert page.url == address + link, name
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(wide) <= 0, name
            cut = (
                "[...document.querySelectorAll('.scroll')].some(box => box.scrollWidth > "
                "box.clientWidth)"
            )
            assert name not in ("comparison", "groups", "completions") or not page.evaluate(cut), (
                name
            )
            broken = (
                "[...document.querySelectorAll('.gain')].filter(one => one.getClientRects().length "
                "> 1)"
            )
            assert page.evaluate(f"{broken}.map(one => one.textContent)") == [], name
            assert page.evaluate("window.shift") < 0.1, name
            if source:
                assert serious_faults(page, source) == [], name


def axe_source() -> str:
    """axe-core, where the package that brings it is installed; else accessibility is not
    checked."""
    try:
        return (resources.files("axe_playwright_python") / "axe.min.js").read_text()
    except (ModuleNotFoundError, FileNotFoundError):
        return ""


def serious_faults(page: Any, source: str) -> list[str]:
    page.evaluate(source)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    result = []
    for one in found:
        if one["impact"] in ("serious", "critical"):
            result.append(f"{one['id']}: {one['nodes'][0]['html'][:200]}")
    return result


def test_the_run_has_its_curves_and_events(page, address):
    page.goto(address + "#/run?run=first")
    settle(page, "grad_norm 90")
    assert page.locator("canvas").count() >= 5 and page.locator("h1").inner_text() == "first"
    label = page.locator("[aria-label^='reward/mean by step']").get_attribute("aria-label")
    assert "lowest 0.313" in label and "highest 0.8" in label
    assert "step 37" in page.locator(".events li.spike").inner_text()
    page.locator(".chart").first.scroll_into_view_if_needed()
    box = page.locator(".chart canvas.over").first.bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 40, steps=4)
    page.mouse.up()
    page.wait_for_function("() => location.hash.includes('from=')")
    page.get_by_role("button", name="All steps").click()
    page.wait_for_function("() => !location.hash.includes('from=')")
    page.locator(".events li.spike a").click()
    settle(page, "2 groups")
    page.go_back()
    settle(page, "What moves the reward")


def test_a_click_on_a_curve_leads_to_the_groups_of_its_step(page, address):
    page.goto(address + "#/run?run=first")
    settle(page, "grad_norm 90")
    page.locator(".chart").first.scroll_into_view_if_needed()
    page.locator(".chart canvas.over").first.hover()
    reading = page.locator(".chart .reading").first.inner_text()
    assert reading.startswith("step ")
    page.locator(".chart canvas.over").first.click()
    page.wait_for_function("() => location.hash.startsWith('#/groups')")
    assert f"step={reading.split()[1].rstrip(':')}" in page.url.replace("%3D", "=")


def test_the_band_of_a_recipe_lies_behind_its_curve(page, tmp_path):
    run = write_run(tmp_path / "runs" / "run", 40)
    write_run(tmp_path / "runs" / "bare", 40)
    follow_recipe(run, "this run has lr=1")
    pictures = {}
    with viewed(tmp_path / "runs", page=page) as address:
        for name in ("run", "bare"):
            page.goto(f"{address}#/run?run={name}")
            settle(page, "grad_norm")
            chart = page.locator(".chart.large").last
            assert chart.locator(".name").inner_text() == "evaluate/held_out/accuracy"
            # Both plots are drawn over the same steps, 0 to 40.
            pictures[name] = chart.locator("canvas").first.evaluate("it => it.toDataURL()")
            notes = page.locator(".chart .recipe").all_inner_texts()
            if name == "bare":
                assert notes == []
                continue
            assert notes == ["grey: 5 seeds of recipe word-problems; this run has lr=1"]
            canvas = chart.locator("canvas.over")
            canvas.hover(position={"x": 0.98 * canvas.bounding_box()["width"], "y": 60})
            assert chart.locator(".reading").inner_text().endswith(" · recipe 58.8% to 64.4%")
            # By time the band ends where the run is.
            page.locator("#x").select_option("time")
            canvas.hover(position={"x": 0.98 * canvas.bounding_box()["width"], "y": 60})
            assert " · recipe 58.8% to 64.4%" in chart.locator(".reading").inner_text()
    assert pictures["run"] != pictures["bare"]


PLOT = """async () => {
    const { LinePlot, linearTicks, logTicks, nearest, visible } = await import('/static/plot.js');
    const size = 100_000, pixels = 500;
    const x = Array.from({ length: size }, (_, index) => index);
    const y = x.map((index) => (index % 3 === 0 ? null : Math.sin(index * index)));
    const kept = visible(x, y, [0, size - 1], pixels);
    const extreme = (indices, pick) => {
        const found = Array.from({ length: pixels }, () => null);
        for (const index of indices) {
            const pixel = Math.min(pixels - 1, Math.floor(index / ((size - 1) / pixels)));
            if (y[index] !== null)
                found[pixel] = found[pixel] === null ? y[index] : pick(found[pixel], y[index]);
        }
        return found;
    };
    const box = document.body.appendChild(document.createElement('div'));
    const plot = new LinePlot(box, { width: 600, height: 240, data: [x, y],
        lines: [{ stroke: 'red', width: 1 }], bands: [], log: false, range: [10, 20],
        share: 'own', label: '', formatX: String, formatY: String });
    const ranges = [plot.x, plot.y.map(Math.abs).every((bound) => bound <= 1.2)];
    plot.destroy();
    return {
        kept: kept.length,
        sameLowest: String(extreme(kept, Math.min)) === String(extreme(x, Math.min)),
        sameHighest: String(extreme(kept, Math.max)) === String(extreme(x, Math.max)), ranges,
        ticks: [linearTicks(0, 1, 5), linearTicks(-3, 12, 4), linearTicks(1e-4, 3e-4, 3),
                logTicks(1e-5, 1, 3), logTicks(2, 60, 9), logTicks(3, 4, 4)],
        nearest: [nearest([], 1), nearest([5], 9), nearest([0, 10, 20], 14),
                  nearest([0, 10, 20], 16), nearest([0, 1], -4)],
        few: visible([0, 1, 2, 3, 4], [1, null, 3, 4, 5], [1.5, 2.5], 100),
        gap: visible([0, 1, 2, 100, 101], [1, null, null, null, 2], [10, 60], 100),
    };
}"""


def test_a_hundred_thousand_points_keep_their_extremes_and_axes_have_round_ticks(page, address):
    page.goto(address)
    settle(page)
    found = page.evaluate(PLOT)
    assert 500 < found["kept"] <= 4 * 501 and found["sameLowest"] and found["sameHighest"]
    assert found["ranges"] == [[10, 20], True]
    assert found["ticks"] == [
        [0, 0.2, 0.4, 0.6, 0.8, 1],
        [0, 5, 10],
        [0.0001, 0.0002, 0.0003],
        [1e-05, 0.001, 0.1],
        [2, 5, 10, 20, 50],
        [3, 3.5, 4],
    ]
    assert found["nearest"] == [None, 0, 1, 2, 0]
    assert found["few"] == [0, 2, 3]  # a known value beyond each end
    assert found["gap"] == [0, 4]


def test_the_list_of_runs_leads_to_a_run_and_compares(page, tmp_path):
    for number, name in enumerate(("old", "sweep/0", "sweep/1")):
        run = write_run(
            tmp_path / name, 6, settings=[f"optimizer.lr={number + 1}e-4"], finished=number < 2
        )
        os.utime(run / "config.yaml", (1e9 + number, 1e9 + number))
    path = tmp_path / "sweep" / "1"
    (path / ".lock").write_text(f"process {ended_process()} on {socket.gethostname()}\n")
    with viewed(tmp_path, page=page) as address:
        page.goto(address)
        settle(page, "killed at step 6 of 6")
        names = page.locator("table.home .name a")
        assert names.all_inner_texts() == ["sweep/1", "sweep/0", "old"]
        row = page.locator("table.home tbody tr").first.inner_text()
        assert f"shoal train resume={path}" in row and "optimizer.lr 0.0003" in row
        assert "50.0% → 100.0% ▲ +50.0 points" in row
        assert "held_out accuracy (greedy, 2 questions): 34.2% to 100.0%" in row
        (path / "checkpoints/6").mkdir(parents=True)  # it was stopped after its last step
        page.reload()
        settle(page, "evaluate and finish: ")
        write_run(tmp_path / "new", 2)
        page.wait_for_function(
            "() => document.querySelector('table.home .name a').innerText === 'new'", timeout=20_000
        )
        assert page.get_by_role("button", name="Compare").is_disabled()
        page.get_by_label("compare new").check()
        page.get_by_label("compare old").check()
        page.get_by_role("button", name="Compare 2 runs").click()
        settle(page, "Settings that differ between the runs")
        assert "runs=new%2Cold" in page.url and page.locator(".verdict").count() == 2
        page.get_by_role("link", name="choose other runs").click()
        settle(page, "Compare 2 runs")
        page.get_by_label("compare sweep/0").check()
        assert page.get_by_label("compare sweep/1").is_disabled()
        page.get_by_role("link", name="sweep/0").click()
        settle(page, "too early to say: 6 steps, accuracy 50.0% → 100.0%")
        assert page.locator("h1").inner_text() == "sweep/0"


def test_a_run_says_who_stopped_it_and_what_it_is_not_evaluated_on(page, tmp_path):
    paths = {name: write_run(tmp_path / name, 12) for name in ("stopped", "live", "resumed")}
    for name in ("stopped", "live"):
        (paths[name] / "evaluations.jsonl").write_text("")
        (paths[name] / "events.jsonl").write_text("")
        summary = paths[name] / "summary.json"
        record = json.loads(summary.read_text()) | {"before": {}, "after": {}}
        record |= {"stopped_by": "the callback <b>Patience"}
        summary.write_text(json.dumps(record))
    (paths["live"] / "summary.json").unlink()
    with RunWriter(paths["resumed"]) as folder:
        weighted = compose(Config, ["steps=12", "reward.weights=1,3"])[0]
        folder.write_config(*texts_of(weighted), 4)
    with viewed(tmp_path, page=page) as address:
        page.goto(f"{address}#/run?run=stopped")
        settle(page, "stopped at step 12 of 12 by the callback <b>Patience")
        assert "No evaluation in this run." in page.locator(".view").inner_text()
        events = page.locator(".card", has_text="Warnings, failures and spikes").last
        assert "None so far." not in events.inner_text() and "None." in events.inner_text()
        assert "was resumed" not in page.locator(".view").inner_text()
        page.goto(f"{address}#/run?run=live")
        settle(page, "No evaluation so far.")
        settle(page, "None so far.")
        page.goto(f"{address}#/run?runs=live%2Cstopped")
        settle(page, "No evaluation so far.")
        page.goto(f"{address}#/run?run=resumed")
        settle(page, "steps after step 4, where the run was resumed with other rewards, rows or")


def test_a_note_and_tags_are_written_and_runs_are_found_by_them(page, tmp_path):
    for name in ("one", "two", "three"):
        write_run(tmp_path / name, 1)
    with viewed(tmp_path, page=page) as address:
        page.goto(f"{address}#/run?run=one")
        settle(page, "Add a note or tags")
        page.get_by_role("button", name="Add a note or tags").click()
        page.get_by_label("Note").fill("<b>the first</b>\nof three")
        page.get_by_label("Tags").fill("baseline, warm-up")
        page.get_by_role("button", name="Save").click()
        settle(page, "Edit note and tags")
        assert page.locator(".note").inner_text() == "<b>the first</b>\nof three"
        stored = {"notes": "<b>the first</b>\nof three", "tags": ["baseline", "warm-up"]}
        assert json.loads((tmp_path / "one/notes.json").read_text()) == stored
        # Somebody else writes meanwhile: the text stays in the form, with the reason.
        page.get_by_role("button", name="Edit note and tags").click()
        (tmp_path / "one/notes.json").write_text('{"notes": "theirs", "tags": ["baseline"]}')
        page.get_by_label("Note").fill("mine")
        page.said.clear()
        page.get_by_role("button", name="Save").click()
        page.locator(".noteForm [role=alert]", has_text="somebody has changed").wait_for()
        assert "400" in page.said.pop()  # Chromium's own line on the answer
        assert page.get_by_label("Note").input_value() == "mine"
        page.wait_for_timeout(3_000)  # the page asks every two seconds, and reads it meanwhile
        page.get_by_role("button", name="Cancel").click()
        page.locator(".note", has_text="theirs").wait_for()
        page.get_by_role("link", name="baseline").click()
        settle(page, "theirs")
        names = page.locator("table.home .name > a")
        assert names.all_inner_texts() == ["one"] and "find=tag%3Dbaseline" in page.url
        page.get_by_label("Search runs").fill("THEIRS base")
        assert names.all_inner_texts() == ["one"]
        page.get_by_label("Search runs").fill("tag=base")
        settle(page, "No run has all these words")
        page.get_by_role("link", name="All runs").click()
        assert sorted(names.all_inner_texts()) == ["one", "three", "two"]
        assert page.get_by_label("Search runs").input_value() == ""


def ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_runs_named_one_by_one_are_laid_over_each_other(page, runs):
    with viewed(runs / "first", runs / "hostile", page=page) as address:
        page.goto(address)
        settle(page, "these runs differ in task.name")
        assert page.locator("h1").inner_text() == "first and hostile"
        page.locator(".comparison").get_by_role("link", name="hostile").wait_for()
        settings = page.get_by_role(
            "region", name="Settings that differ between the runs"
        ).inner_text()
        assert "may be the cause" in settings.split("\n")[1]
        assert (
            "reward.weights\nWeight of each function; empty for 1.0 each, or the task's own."
            in settings
        )
        page.locator(".comparison").get_by_role("link", name="hostile").click()
        settle(page, "This prompt through the run")
        assert "run=hostile&file=step_000001&group=0&completion=0" in page.url
    with viewed(runs / "first", page=page) as address:
        page.goto(address)
        settle(page, "What moves the reward")
        assert (
            page.locator("h1").inner_text() == "first"
            and not page.get_by_role("link", name="All runs").count()
        )


def test_settings_that_not_all_runs_have_come_first(page, tmp_path):
    shared = ["algorithm.kl_coef=0.5", "batch.group_size=2", "sampling.temperature=0.5"]
    shared += ["algorithm.clip_low=0.1", "algorithm.clip_high=0.1", "model.lora.rank=4"]
    for number in (1, 2):
        settings = [*shared, f"optimizer.lr={number}e-5"]
        write_run(tmp_path / f"k{number}", 2, settings=settings)
    with viewed(tmp_path, page=page) as address:
        page.goto(address)
        settle(page, "k1")
        chips = page.locator("table.home tbody tr").locator(".chip:first-child").all_inner_texts()
        assert sorted(chips) == ["optimizer.lr 0.00001", "optimizer.lr 0.00002"]


def test_curves_are_found_pinned_explained_and_drawn_by_time(page, address):
    page.goto(address + "#/run?run=first")
    settle(page, "driven by correct; accuracy 50.0% → 100.0%, from too few questions to tell")
    # two questions say nothing of accuracy
    assert page.locator(".verdict.good, .verdict.bad").count() == 0
    large = page.locator(".charts.main .chart .name").all_inner_texts()
    assert large == ["reward/mean", "evaluate/held_out/accuracy"]
    page.get_by_role("button", name="what is entropy?").click()
    assert page.get_by_text("entropy of the next-token distribution").is_visible()
    page.get_by_role("button", name="pin grad_norm").click()
    settle(page, "Pinned")
    page.reload()
    settle(page, "Pinned")
    page.get_by_label("Search curves").fill("rewards/corr")
    assert page.locator(".topic .chart:visible .name").all_inner_texts() == ["rewards/correct"]
    page.get_by_label("Search curves").fill("")
    page.locator("#x").select_option("time")
    page.wait_for_function("() => location.hash.includes('x=time')")
    assert page.locator("[aria-label^='reward/mean by time']").count() == 1
    # of two questions: no gain
    assert page.locator("td .gain.faint").first.inner_text() == "▲ +50.0 points"
    assert page.locator("td .gain.up").all_inner_texts() == ["▲ +0.438"]


def test_findings_stand_beside_the_verdict(page, tmp_path):
    def hacked(step: int) -> list[Any]:
        result = []
        for row in range(4):
            result.append(
                stored_group(
                    step,
                    row,
                    [step / 40 + 0.1 * (row + i) / 8 for i in range(4)],
                    correct=[False] * 4,
                )
            )
        return result

    with viewed(write_run(tmp_path / "hacked", 40, hacked), page=page) as address:
        page.goto(address)
        settle(page, "Findings, the worst first")
        # While groups are still read, there may be one finding alone.
        page.wait_for_function("() => document.querySelectorAll('.findings li').length > 1")
        assert (
            page.locator(".findings li")
            .first.inner_text()
            .startswith("The reward rises, the share of right answers does not")
        )
        number = page.locator("nav [data-tab=lint] .number").inner_text()
        assert page.locator(".verdict a").inner_text() == f"{number} findings"
        assert page.locator(".findings li").count() == int(number)
        page.locator(".findings li a").first.click()
        settle(page, "4 completions")
        page.goto(address + "#/groups?run=hacked")
        page.reload()  # all groups are read by now
        settle(page, "worst lately")
        lists = page.get_by_role("link").all_inner_texts()
        assert lists.index("rewarded, none right") < lists.index("worst lately")


def test_a_rollout_with_turns_is_a_conversation(page, tmp_path):
    run = write_run(
        tmp_path / "turns", 1, lambda step: [in_turns(stored_group(step, 1, [0.1, 1.1]))]
    )
    with viewed(run, page=page) as address:
        page.goto(address + "#/group?run=turns&file=step_000001&group=0")
        settle(page, "2 completions")
        card = page.locator("[data-completion='0']")
        assert card.locator(".role").all_inner_texts() == ["ASSISTANT", "TOOL", "USER", "ASSISTANT"]
        assert (
            card.locator("details.call").count() == 2
            and card.locator("details.call[open]").count() == 0
        )
        for summary in card.locator("details.call summary").all():
            summary.click()
        shown = card.inner_text()
        assert "<b>3</b>" in shown and "7 bytes were cut" in shown and not card.locator("b").count()
        page.goto(address + "#/tokens?run=turns&file=step_000001&group=0&completion=0")
        settle(page, "token by token")
        context = page.locator(".t.context").evaluate_all(
            "all => all.map(one => [one.dataset.t, one.dataset.c])"
        )
        assert context == [["1", "none"], ["2", "none"]]
        page.goto(address + "#/groups?run=turns")
        settle(page, "calls")


def test_turns_stand_in_a_row_with_reward_and_advantage(page, tmp_path):
    group = in_turns(stored_group(0, 1, [1.0, 0.5]))
    group = replace(group, turn_rewards=(np.array([0.75, 0.25]), np.array([0.5])))
    run = write_run(tmp_path / "turns", 1, lambda step: [group])
    advantages = [[np.array([0.5, -0.25]), np.array([-0.5])]]
    path = run / "groups" / "step_000001.parquet"
    write_file(path, [group], [[0.1, -0.5]], None, advantages)
    with viewed(run, page=page) as address:
        page.goto(address + "#/group?run=turns&file=step_000001&group=0")
        settle(page, "2 completions")
        rows = page.locator("[data-completion='0'] [aria-label='turns'] tr")
        cells = [row.locator("th, td").all_inner_texts() for row in rows.all()]
        assert cells[0] == ["turn", "1", "2"]
        assert [cells[1][0], *map(float, cells[1][1:])] == ["reward", 0.75, 0.25]
        assert cells[2][0] == "advantage" and cells[2][1] == "0.5"


def test_groups_are_filtered_sorted_and_opened_by_keys(page, address):
    page.goto(address + "#/groups?run=first")
    settle(page, "84 groups")
    page.get_by_label("Filter").fill("set=train spread>0")
    page.keyboard.press("Enter")
    settle(page, "40 groups")
    page.keyboard.press("Escape")
    page.locator("body").click(position={"x": 700, "y": 5})
    page.keyboard.press("/")
    page.keyboard.type("step 17")
    page.keyboard.press("Enter")
    settle(page, "1 group ")
    page.get_by_role("link", name="question 2").click()
    settle(page, "This prompt through the run")
    page.get_by_role("link", name="This prompt through the run").click()
    settle(page, "Row 2 of train, answered 13 times")
    page.get_by_role("link", name="groups of train").click()
    settle(page, "13 groups")
    page.get_by_role("link", name="questions learned").click()
    settle(page, "\n1 group\n")
    assert page.locator("tbody tr").first.locator(".c-change").inner_text() == "1"
    page.locator("tbody a").first.click()
    settle(page, "Row 0 of held_out, answered 2 times")
    page.go_back()
    page.get_by_role("link", name="Clear").click()
    settle(page, "84 groups")
    assert page.get_by_label("Text").input_value() == ""
    page.get_by_role("link", name="worst lately").click()
    settle(page, "10 groups")
    assert page.get_by_label("Filter").input_value() == "set=train step=36..40"
    page.get_by_role("link", name="all, newest first").click()
    settle(page, "84 groups")
    page.get_by_role("button", name="length").click()
    page.wait_for_function("() => location.hash.includes('sort=length')")
    page.locator("body").click(position={"x": 700, "y": 5})
    for key in ("j", "j", "k", "Enter"):
        page.keyboard.press(key)
    settle(page, "This prompt through the run")
    page.keyboard.press("t")
    settle(page, "token by token")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".t.selected").get_attribute("data-t") == "2" and "token=2" in page.url
    link = page.url
    page.keyboard.press("Escape")
    settle(page, "This prompt through the run")
    page.goto(link)
    page.reload()
    settle(page, "token by token")
    assert page.locator(".t.selected").get_attribute("data-t") == "2"
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    page.get_by_role("button", name="Close").click()
    page.keyboard.press("3")
    settle(page, "324 completions")
    page.keyboard.press("4")
    settle(page, "Checked, and fine")


def test_a_question_stands_before_and_after_beside_itself(page, address):
    page.goto(address + "#/run?run=first")
    settle(page, "Evaluation questions, before and after")
    questions = page.locator(".view").get_by_text("question 0", exact=True)
    assert page.get_by_role("link", name="1 learned").count() == 1
    questions.first.click()
    settle(page, "Row 0 of held_out, answered 2 times")
    sides = page.locator(".sides section")
    assert "answer 0.1 of step 0" in sides.nth(0).inner_text()
    assert "answer 1.1 of step 40" in sides.nth(1).inner_text()
    assert sides.nth(0).locator(".badge").all_inner_texts() == ["wrong"]
    assert sides.nth(1).locator(".badge").all_inner_texts() == ["right"]
    # What differs is marked on both sides; of an evaluation no advantage is spoken of.
    assert sides.nth(0).locator("mark").all_inner_texts() == ["0", "0"]
    assert "advantage" not in sides.nth(0).inner_text()
    cells = page.locator(".strip a")
    assert cells.evaluate_all("all => all.map(one => one.title)") == [
        "before training: reward 0.1, 0.0% right",
        "after step 40: reward 1.1, 100.0% right",
    ]
    page.keyboard.press("n")
    settle(page, "Row 1 of held_out, answered 2 times")
    page.locator(".strip a").last.click()
    settle(page, "Group 1 of held_out, after step 40")


def test_a_prompt_has_a_strip_of_its_steps(page, address):
    page.goto(address + "#/prompt?run=first&set=train&row=1")
    settle(page, "Row 1 of train, answered 13 times")
    assert page.locator(".strip li").count() == 13
    heights = "all => all.map(one => one.getAttribute('height'))"
    assert set(page.locator(".strip .bar").evaluate_all(heights)) == {"0.600"}  # of 1
    page.get_by_label("Before").select_option("0.step_000011.0")
    page.wait_for_function("() => location.hash.includes('left=0.step_000011.0')")
    settle(page, "answer 1.1 of step 10")
    assert page.locator(".strip a.chosen").count() == 2
    page.get_by_label("beside").select_option("hostile")
    settle(page, "hostile was never asked this row.")
    assert "The other run has no group of this row." in page.locator(".sides").inner_text()
    page.goto(address + "#/prompt?run=first&set=train&row=77")
    settle(page, "No group of row 77 of train has been read")


def test_two_runs_answer_one_question_side_by_side(page, tmp_path):
    runs = [write_run(tmp_path / name, 3) for name in ("first", "second")]
    asked = [stored_group(3, row, [0.1], ["<i>no</i> idea"], subset="held_out") for row in range(2)]
    write_file(runs[1] / "groups" / "evaluate_held_out_000003.parquet", asked)
    with viewed(*runs, page=page) as address:
        page.goto(address)
        settle(page, "second answers 0 better than first and 2 worse")
        page.locator(".comparison").get_by_role("link", name="question 1").click()
        settle(page, "Reward by step, second")
        sides = page.locator(".sides section")
        assert "answer 1.1 of step 3" in sides.nth(0).inner_text()
        assert "<i>no</i> idea" in sides.nth(1).inner_text() and not page.locator("main i").count()
        assert page.get_by_label("Right").locator("option:checked").inner_text() == (
            "second, after step 3, reward 0.1"
        )


def test_each_view_shows_how_much_lint_has_found(page, tmp_path):
    def cheating(step: int) -> list[Any]:
        texts = ["the same words"] * 4
        return [stored_group(step, row, [1.0] * 4, texts, correct=[False] * 4) for row in range(3)]

    with viewed(write_run(tmp_path / "cheating", 12, cheating), page=page) as address:
        for link in ("groups?", "completions?", "group?file=step_000001&group=0&"):
            page.goto("about:blank")
            page.goto(f"{address}#/{link}run=cheating")
            page.wait_for_function("() => document.querySelector('[data-tab=lint] .number')")


def test_completions_are_filtered_opened_and_saved(page, address):
    page.goto(address + "#/completions?run=first")
    settle(page, "324 completions")
    heads = page.locator("thead th").all_inner_texts()
    # Nothing was cut off, has no score, or has turns: texts have the room of these columns.
    assert heads[:4] == ["step ↓", "set", "prompt", "text"] and "tokens" in heads
    assert not {"turns", "calls", "cut off", "no score"} & set(heads)
    assert page.locator("tbody tr").count() == 50
    page.get_by_role("link", name="wrong", exact=True).click()
    settle(page, "241 completions")
    page.get_by_label("Filter").fill("right=1 step=17 set=train")
    page.keyboard.press("Enter")
    settle(page, "2 completions")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save JSONL").click()
    assert download.value.suggested_filename == "first_completions.jsonl"
    lines = Path(download.value.path()).read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["answer 1.1 of step 16"] * 2
    page.get_by_role("link", name="answer 1.1 of step 16").last.click()
    settle(page, "This prompt through the run")
    assert page.locator(".completion.selected h3 a").inner_text() == "Completion 3"


def test_long_and_hostile_texts_in_the_table(page, address):
    page.goto(address + "#/completions?run=hostile&filter=set%3Dtrain")
    settle(page, "8 completions")
    texts = page.locator("tbody .textCell")
    assert "<script>document.title='hacked'</script><img src=x" in texts.nth(0).inner_text()
    assert page.locator("main img, main script").count() == 0 and "hacked" not in page.title()
    assert "U+202E" in texts.nth(1).inner_text()
    rest = texts.nth(3).locator(".rest")
    assert not rest.is_visible() and texts.nth(3).bounding_box()["height"] < 30
    page.get_by_label("Lines of a text").select_option("all")
    assert rest.inner_text() == "… 99,400 more characters"
    page.reload()
    settle(page, "8 completions")
    assert page.get_by_label("Lines of a text").input_value() == "all"
    rest.click()
    settle(page, "Show the other 80,000 characters")
    assert page.locator(".completion.selected h3 a").inner_text() == "Completion 3"


def test_tokens_show_their_numbers(page, address):
    page.goto(address + VIEWS["tokens"][0])
    settle(page, "token by token")
    info = page.locator(".info")
    assert "0.01" in info.inner_text() and "1.0101" in info.inner_text()
    assert page.locator(".t[data-t='0']").get_attribute("data-c") == "4"
    page.locator(".t[data-t='9']").hover()
    assert "id\n79" in info.inner_text()
    page.get_by_label("Colour").select_option("mask")
    page.wait_for_function("() => document.querySelector('[data-t=\"0\"]').dataset.c === '2'")


def test_colours_are_fitted_to_the_completion(page, address):
    """The surest token of a confident model is pale, its least sure one strong, by the sign of the
    advantage."""

    def colours(completion: int, **more: str) -> tuple[list[str], list[str]]:
        page.goto(
            address
            + f"#/tokens?run=first&{GROUP}&completion={completion}"
            + "".join(f"&{name}={value}" for name, value in more.items())
        )
        settle(page, "token by token")
        page.wait_for_function(
            "colour => !colour || document.getElementById('colour').value === colour",
            arg=more.get("colour", ""),
        )
        tokens = page.locator(".tokens .t")
        return (
            [tokens.nth(place).get_attribute("data-c") for place in (0, -1)],
            page.locator(".legend .t").all_inner_texts(),
        )

    # advantage -0.5, log-prob -3
    assert colours(0) == (["-1", "-4"], ["−1.5", "−0.844", "−0.375", "−0.0938", "0"])
    assert colours(1)[0] == ["1", "4"] and page.get_by_label("Colour").input_value() == "push"
    assert colours(1, colour="logprob") == (["-1", "-4"], ["−3", "−1.69", "−0.75", "−0.188", "0"])
    page.goto(address + "#/tokens?run=first&file=step_000002&group=1")  # a group without variance
    settle(page, "the completion taught nothing")
    assert page.get_by_label("Colour").input_value() == "logprob"
    assert page.locator(".tokens .t").last.get_attribute("data-c") == "-4"


def test_a_short_curve_is_not_smoothed(page, address):
    page.goto(address)
    smooth = "async (values) => (await import('/static/charts.js')).smoothed(values, 0.9)"
    few = [0.0, None, *range(8)]
    assert page.evaluate(smooth, few) == few
    many = [0.0, None, *[1.0] * 9]
    assert page.evaluate(smooth, many)[:2] == [0.0, None] and page.evaluate(smooth, many)[-1] < 0.99


def test_of_wrong_completions_none_is_the_best(page, tmp_path):
    def groups(step: int) -> list[Group]:
        all_wrong = stored_group(step, 1, [0.1, 0.2], ["first", "second"])
        return [all_wrong, stored_group(step, 2, [0.1, 1.1], ["no", "yes"])]

    with viewed(write_run(tmp_path / "wrong", 1, groups), page=page) as address:
        for group, best in ((0, 0), (1, 1)):
            page.goto(f"{address}#/group?run=wrong&file=step_000001&group={group}")
            settle(page, "2 completions")
            assert page.locator(".completion .badge.ok").count() == best


def test_a_group_has_its_answer_order_and_differences(page, odd):
    def order() -> list[str]:
        result = []
        for name in page.locator(".completion h3 a").all_inner_texts():
            result.append(name.removeprefix("Completion "))
        return result

    link = f"{odd}#/group?run=odd&file=step_000001&group=0"
    page.goto(link)
    settle(page, "6 completions")
    assert "Right answer\n7" in page.locator(".card.prompt").inner_text()
    summary = page.locator(".summary").inner_text()
    assert "2 of 6 right" in summary and summary.endswith("4 distinct texts")
    assert (
        order() == ["1", "4", "2", "0"]
        and "3 times the same" in page.locator(".completion").last.inner_text()
    )
    assert page.locator(".completion.selected h3 a").inner_text() == "Completion 1"
    marks = page.locator(".completion mark")
    # completion 0 has too little in common
    assert marks.all_inner_texts() == ["thus ", "six", "two"]
    page.get_by_label("Differences to").select_option("none")
    page.wait_for_function("() => !document.querySelector('.completion mark')")
    page.get_by_label("Sorted by").select_option("interest")
    page.wait_for_function("() => document.querySelector('.completion h3').innerText.includes('4')")
    assert order() == ["4", "2", "1", "0"]
    assert "wrong, yet above the mean" in page.locator(".completion").first.inner_text()
    page.get_by_label("Equal ones").select_option("no")
    page.wait_for_function("() => document.querySelectorAll('.completion').length === 6")
    page.goto(link.replace("group=0", "group=2"))
    settle(page, "2 completions")
    assert page.locator(".summary").inner_text() == "0 of 2 right · reward 0 to 0.1, mean 0.05"
    page.goto(link.replace("group=0", "group=4"))
    settle(page, "8 completions")
    assert "wrong" in page.locator(".completions").inner_text()
    assert "above the mean" not in page.locator(".completions").inner_text()
    page.goto(link + "&completion=5")  # one of the three that are equal stands for them
    settle(page, "6 completions")
    assert page.locator(".completion.selected h3 a").inner_text() == "Completion 5"
    page.keyboard.press("t")
    settle(page, "Completion 5, token by token")


def test_links_show_what_they_name(browser, odd):
    """The completion and the token that a link names are in sight, however long the texts are."""
    with new_page(browser, 390) as page:
        page.goto(f"{odd}#/group?run=odd&file=step_000001&group=1&completion=2&sort=sampled")
        settle(page, "3 completions")
        seen = (
            "node => { const box = node.getBoundingClientRect(); return box.top >= 0 && box.top < "
            "innerHeight; }"
        )
        page.wait_for_function(f"() => ({seen})(document.querySelector('[data-completion=\"2\"]'))")
        page.goto(f"{odd}#/tokens?run=odd&file=step_000001&group=3&token=1400")
        settle(page, "token by token")
        page.wait_for_function(f"() => ({seen})(document.querySelector('.t.selected'))")
        assert page.locator(".t.selected").get_attribute("data-t") == "1400"


MARKED = """<think>I **add** them.</think># The sum
Take `a + b`, *slowly*:
- one <img src=x onerror=alert(1)>
2. two
```
if a < b: <script>document.title = 'hacked'</script>
```
**done**"""


def test_text_is_raw_or_rendered(page, tmp_path):
    run = write_run(
        tmp_path / "first", 1, lambda step: [stored_group(step, 1, [0.1, 1.0], [MARKED, "plain"])]
    )
    with viewed(run, page=page) as address:
        page.goto(address + "#/group?run=first&file=step_000001&group=0&compare=none")
        settle(page, "2 completions")
        text = page.locator("[data-completion='0'] .text").first
        assert text.inner_text() == MARKED and not text.locator("strong, pre, details").count()
        page.get_by_label("Text").select_option("rendered")
        text = page.locator("[data-completion='0'] .text.rendered").first
        assert text.locator("summary").inner_text() == "think: 15 characters"
        assert text.locator(".heading").inner_text() == "The sum"
        assert text.locator("em").inner_text() == "slowly"
        assert text.locator(".item").all_inner_texts() == [
            "• one <img src=x onerror=alert(1)>",
            "2. two",
        ]
        assert "<script>document.title = 'hacked'</script>" in text.locator("pre").inner_text()
        assert page.locator("main img, main script").count() == 0 and "hacked" not in page.title()
        page.reload()
        settle(page, "2 completions")
        assert page.get_by_label("Text").input_value() == "rendered"
        page.get_by_label("Text").select_option("raw")
        assert page.locator("[data-completion='0'] .text").first.inner_text() == MARKED


def test_what_models_wrote_is_text(page, address):
    page.goto(address + "#/group?run=hostile&file=step_000001&group=0&sort=sampled")
    settle(page, "4 completions")
    texts = page.locator(".completion")
    assert "<script>document.title='hacked'</script><img src=x" in texts.nth(0).inner_text()
    assert (
        page.locator("main img, main script, main iframe").count() == 0
        and "hacked" not in page.title()
    )
    assert "␛[31mred␛[0m U+202EUright" in texts.nth(1).inner_text().replace("U+202Er", "U+202EUr")
    assert "שלום עולם 你好 👩‍🔬🏽" in texts.nth(2).inner_text()
    assert texts.nth(3).get_by_role("button").inner_text() == "Show the other 80,000 characters"
    texts.nth(3).get_by_role("button").click()
    assert len(texts.nth(3).locator(".text").first.inner_text()) == 100_000
    page.goto(address + "#/groups?run=hostile")
    settle(page, "6 groups")
    assert page.locator("main img, main script").count() == 0


def test_what_is_not_there_is_said(page, address):
    for link, text in (
        ("#/group?run=first&file=step_000999&group=0", "the run has no such groups file"),
        ("#/groups?run=nowhere", "there is no run 'nowhere' here"),
        ("#/nonsense", "There is no view nonsense"),
        ("#/groups?run=first&filter=reward%3E5", "No group passes"),
    ):
        page.goto(address + link)
        settle(page, text)
    page.said.clear()  # the browser notes refused requests


# ---- live, and in one file


def test_a_run_that_trains_is_followed(page, workshop):
    words = workshop.words(
        "live", "steps=5", "task.num_eval_questions=2", "train.pass_k=0", "checkpoint.every=50"
    )
    training = subprocess.Popen(
        [sys.executable, "-m", "shoal", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        config = workshop.runs / "live" / "config.yaml"
        while not config.is_file() and training.poll() is None:
            threading.Event().wait(0.05)
        with viewed(workshop.runs / "live", page=page) as address:
            page.goto(address)
            page.wait_for_function("() => document.querySelector('.view .badge')", timeout=60_000)
            seen = page.locator(".badge.running").count()
            page.wait_for_function(
                "() => document.querySelector('.status .badge.finished')", timeout=90_000
            )
            # The summary may be read before the last lines of metrics.
            page.wait_for_function(
                "() => document.querySelector('.status').innerText.includes('step 5 of 5')"
            )
            assert seen
            assert page.locator("canvas").count() > 3
            page.goto(address + "#/groups?run=live&filter=step%3D5+set%3Dtrain")
            settle(page, "2 groups")
            page.goto("about:blank")
        assert training.wait(60) == 0
    finally:
        training.kill()
        training.wait()


def test_the_page_in_one_file_asks_for_nothing(browser, runs, tmp_path):
    to = tmp_path / "page.html"
    view(ViewConfig((str(runs),), to=str(to), groups=("1:0", "2")))
    asked: list[str] = []
    with new_page(browser, offline=True) as page:
        page.on("request", lambda request: asked.append(request.url))
        for name, (link, text) in VIEWS.items():
            if name == "prompt":  # a file has some groups of a prompt
                continue
            page.goto("about:blank")
            page.goto(to.as_uri() + link)
            shown = {"groups": "3 groups", "completions": "12 completions"}
            settle(page, shown.get(name, text))
        page.goto(to.as_uri() + "#/group?run=first&file=step_000009&group=0")
        settle(page, "This is not in the file.")
    places = {url.partition("#")[0] for url in asked if not url.startswith(("about:", "data:"))}
    assert places == {to.as_uri()}


def test_a_notebook_shows_the_page_in_a_frame(browser, runs, tmp_path):
    shown = load_run(runs / "first").view(groups=["1"])
    assert shown.save(tmp_path / "kept.html").read_text() == shown.html and "MB" in repr(shown)
    with new_page(browser, offline=True) as page:
        page.set_content(f"<p>a notebook</p>{shown._repr_html_()}")
        frame = page.frame_locator("iframe")
        frame.get_by_text("What moves the reward").wait_for()
        frame.get_by_role("link", name="Groups").click()
        frame.get_by_role("link", name="question 0").click()
        frame.get_by_text("sampled before training").wait_for()
        assert page.url == "about:blank" and "a notebook" in page.locator("body").inner_text()
