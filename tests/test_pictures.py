"""The README's pictures: made by docs/pictures.py, all there, small; what draws them works on a few
lines."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from scripts import load

pictures = load("docs/pictures.py")
README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
NAMESPACE = "{http://www.w3.org/2000/svg}"


def rows(*points: tuple[int, float, float, float, int], name: str = "held_out") -> list[dict]:
    result = []
    for step, share, low, high, asked in points:
        result.append(
            {
                "step": step,
                "name": name,
                "accuracy": share,
                "accuracy_interval": [low, high],
                "num_questions": asked,
            }
        )
    return result


def test_examples_in_the_docstrings():
    assert doctest.testmod(pictures).failed == 0


def test_every_picture_of_the_readme_is_made_by_the_script_and_all_are_small():
    shown = set(re.findall(r"docs/pictures/([\w.-]+)", README))
    there = {path.name for path in pictures.PICTURES.iterdir()}
    assert (
        shown == there
        and all(name in pictures.NAMES for name in there)
        and len(there) == len(pictures.NAMES)
    )
    assert sum(path.stat().st_size for path in pictures.PICTURES.iterdir()) < pictures.MOST_BYTES
    for path in pictures.PICTURES.glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        assert root.tag == f"{NAMESPACE}svg" and root.find(f"{NAMESPACE}title") is not None, path
        assert not re.search(r"(?:href|src)=|url\(|<script", path.read_text(encoding="utf-8")), path


def test_the_banner_and_the_badge_are_those_of_the_script():
    for name, text in pictures.drawn().items():
        assert (pictures.PICTURES / name).read_text(encoding="utf-8") == text, (
            "python docs/pictures.py FOLDER"
        )


def test_a_recording_keeps_every_line_and_ends_with_the_last():
    steps = [f"step {i}/40  reward 0.{i}" for i in range(40)]
    lines = pictures.recorded_lines(
        "\n".join(["first & <second>", *steps, "x" * 300, "last line\n"])
    )
    assert lines[0] == "$ shoal train" and lines[-1] == "last line" and len(lines) == 44
    assert len(lines[-2]) == pictures.COLUMNS and lines[-2].endswith("x ...")
    root = ElementTree.fromstring(pictures.recording_svg(lines))
    shown = []
    for line in root.iter(f"{NAMESPACE}text"):
        shown.append("".join(part.text or "" for part in line))
    assert [each.replace(" ", "") for each in shown] == [line.replace(" ", "") for line in lines]
    style = root.findtext(f"{NAMESPACE}style")
    # Without motion it stands at its end: as many lines up as do not fit.
    assert (
        f".lines{{transform:translateY({-pictures.LINE * (44 - pictures.VISIBLE_LINES):g}px)}}"
        in style
    )
    times = []
    for share in re.findall(r"([\d.]+)%\{transform:translateY\(-", style):
        times.append(float(share))
    assert times == sorted(times) and len(times) == 44 - pictures.VISIBLE_LINES and times[-1] < 100


def test_accuracy_is_drawn_at_each_step_with_its_interval():
    evaluations = [
        *rows(
            (0, 0.37, 0.33, 0.41, 500),
            (40, 0.66, 0.62, 0.70, 500),
            (20, 0.5, 0.4, 0.6, 100),
            (40, 0.68, 0.58, 0.76, 100),
        ),
        *rows((0, 0.01, 0.0, 0.02, 500), name="other"),
    ]
    points = pictures.accuracy_points(evaluations)
    assert [(point["step"], point["num_questions"]) for point in points] == [
        (0, 500),
        (20, 100),
        (40, 500),
    ]
    root = ElementTree.fromstring(pictures.accuracy_svg(points))
    circles = list(root.iter(f"{NAMESPACE}circle"))
    heights = [float(circle.get("cy")) for circle in circles]
    assert len(circles) == 3 and heights == sorted(heights, reverse=True)
    assert len(root.find(f"{NAMESPACE}polygon").get("points").split()) == 6
    text = "".join(root.itertext())
    assert "37.0%" in text and "66.0%" in text and "100 or 500 questions" in text
    with pytest.raises(ValueError, match="two evaluations"):
        pictures.accuracy_svg(points[:1])


def test_a_folder_without_a_recorded_run_says_how_to_make_one(tmp_path):
    (tmp_path / "outputs").mkdir()
    with pytest.raises(SystemExit, match=r"shoal train \| tee recording.txt"):
        pictures.run_of(tmp_path)
