"""Makes the pictures of the README from a run and what it printed: `python docs/pictures.py
FOLDER`.

The folder is made by the default run, in an empty folder; nothing else is drawn than what is there:

    mkdir /tmp/run && cd /tmp/run && shoal train | tee recording.txt

It needs Chromium for the screenshots (`apt install chromium`), and `pip install '.[test]'`.
`docs/pictures/` then has

    banner.svg, licence.svg    the head of the README
    recording.svg              the lines of recording.txt, one after the other
    accuracy.svg               accuracy over steps with its 95% interval, from evaluations.jsonl
    group-light.png, -dark     the page of `shoal view` on a group of the last step

A browser that does not move pictures shows the end of the recording.

The picture of `docs/credit.md`, a rollout whose advantage is by turn, is made from a stored one:

    python docs/pictures.py RUN STEP GROUP COMPLETION
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
NAMES = (
    "banner.svg",
    "licence.svg",
    "recording.svg",
    "accuracy.svg",
    "group-light.png",
    "group-dark.png",
)
MOST_BYTES = 300_000
"""Of all pictures together: a README opens on a slow line."""

SANS = "system-ui,-apple-system,'Segoe UI',Roboto,sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


def svg(width: float, height: float, title: str, body: str, style: str = "") -> str:
    """A picture with a title that is read aloud."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" '
        f'height="{height:g}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f"<style>{style}</style>{body}</svg>\n"
    )


# ---- recording

COLUMNS, VISIBLE_LINES = 112, 27
CHARACTER, LINE = 7.8, 18.0
"""Width of a character and height of a line, in pixels."""
HOLD_SECONDS = 9.0
PACES = (("== ", 0.7), ("step ", 0.22), ("", 0.12))
"""Beginning of a line, and the seconds that it stands before the next: the run's own pace would
take minutes."""
STYLES = (
    (r"^\$ .*", "prompt"),
    (r"^== .*", "head"),
    (r"^warning: .*", "warn"),
    (r"^(step \d+/\d+)", "step"),
    (r"reward [\d.]+", "good"),
    (r"accuracy [\d.]+%", "good"),
    (r"\+(?!0\.0 )[\d.]+( points)?$", "good"),
    (r"`shoal [^`]+`", "prompt"),
)


def recorded_lines(text: str) -> list[str]:
    """The lines of a recording, long ones cut at COLUMNS; where the package lies is that machine's
    own.

    >>> recorded_lines("a\\x1b[2mb\\nfrom /here/shoal/assets/tiny\\n")
    ['$ shoal train', 'ab', 'from .../shoal/assets/tiny']
    """
    plain = re.sub(r"\S+(?=/shoal/assets/)", "...", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text))
    lines = ["$ shoal train", *(line.rstrip() for line in plain.splitlines())]
    return [line if len(line) <= COLUMNS else f"{line[: COLUMNS - 4]} ..." for line in lines]


def spans(line: str) -> Iterator[tuple[int, str, str]]:
    """A line's parts: column, text without spaces around it, and style or nothing.

    >>> list(spans("step 1/2  0:05 left"))
    [(0, 'step 1/2', 'step'), (10, '0:05 left', '')]
    """
    marks = sorted(
        (found.start(), found.end(), style)
        for pattern, style in STYLES
        for found in re.finditer(pattern, line)
    )
    parts, end = [], 0
    for start, stop, style in marks:
        if start >= end:
            parts += [(end, start, ""), (start, stop, style)]
            end = stop
    for start, stop, style in [*parts, (end, len(line), "")]:
        text = line[start:stop]
        if text.strip():
            yield start + len(text) - len(text.lstrip()), text.strip(), style


def line_svg(place: int, line: str) -> str:
    """A line of the recording; the widths are given, so that any font of equal widths will do."""
    parts = [
        f'<tspan x="{column * CHARACTER:.1f}" textLength="{len(text) * CHARACTER:.1f}"'
        f"{f' class={style!r}' if style else ''}>{escape(text)}</tspan>"
        for column, text, style in spans(line)
    ]
    return f'<text y="{place * LINE + 13:g}">{"".join(parts)}</text>' if parts else ""


def recording_svg(lines: Sequence[str]) -> str:
    """Lines that appear one after the other in a terminal, which then scrolls; it begins again
    after HOLD_SECONDS."""
    starts, now = [], 0.6
    for line in lines:
        starts.append(now)
        now += next(seconds for beginning, seconds in PACES if line.startswith(beginning))
    whole = now + HOLD_SECONDS
    shown = min(len(lines), VISIBLE_LINES)
    # A cover goes down over the first screen; from then on the text goes up.
    starts[0] = 0.0
    covers = [
        f"{100 * start / whole:.2f}%{{transform:translateY({LINE * (place + 1):g}px)}}"
        for place, start in enumerate(starts[:shown])
    ]
    scrolls = [
        f"{100 * start / whole:.2f}%{{transform:translateY({-LINE * (place + 1):g}px)}}"
        for place, start in enumerate(starts[shown:])
    ]
    end = -LINE * (len(lines) - shown)
    rows = "".join(line_svg(place, line) for place, line in enumerate(lines))
    width, height = COLUMNS * CHARACTER + 32, VISIBLE_LINES * LINE + 56
    style = (
        f"text{{font:13px "
        f"{MONO};fill:#c9d1d9;white-space:pre}}.prompt{{fill:#7ee0d3;font-weight:600}}"
        ".head{fill:#79c0ff;font-weight:600}.warn{fill:#e3b341}.step{fill:#8b949e}"
        ".good{fill:#7ee787;font-weight:600}"
        f".cover{{transform:translateY({shown * LINE:g}px)}}"
        f".lines{{transform:translateY({end:g}px)}}"
        f"@keyframes cover{{{''.join(covers)}}}"
        f"@keyframes scroll{{0%{{transform:none}}{''.join(scrolls)}}}"
        "@media (prefers-reduced-motion:no-preference){"
        f".cover{{animation:cover {whole:.1f}s step-end infinite}}"
        f".lines{{animation:scroll {whole:.1f}s step-end infinite}}}}"
    )
    body = (
        f'<rect width="100%" height="100%" rx="10" fill="#0d1117"/>'
        '<circle cx="20" cy="19" r="6" fill="#ff5f57"/><circle cx="40" cy="19" r="6" '
        'fill="#febc2e"/>'
        '<circle cx="60" cy="19" r="6" fill="#28c840"/>'
        f'<svg x="16" y="40" width="{COLUMNS * CHARACTER:g}" height="{shown * LINE:g}" '
        f'overflow="hidden">'
        f'<g class="lines">{rows}</g>'
        f'<rect class="cover" width="100%" height="100%" fill="#0d1117"/></svg>'
    )
    return svg(
        width,
        height,
        "What `shoal train` prints, from the first line to the table of before and after",
        body,
        style,
    )


# ---- accuracy

PAPER = (
    ".paper{fill:#fff;stroke:#d9dee5}.ink{fill:#1a2230}.faint{fill:#55606f}.grid{stroke:#e5e9ef}"
    ".band{fill:#0b6363;opacity:.16}.line{stroke:#0b6363;fill:none;stroke-width:2.5}"
    ".dot{fill:#0b6363}"
    ".bar{stroke:#0b6363;opacity:.45}"
    "@media (prefers-color-scheme:dark){.paper{fill:#0d1117;stroke:#333d4a}"
    ".ink{fill:#e5e9ef}.faint{fill:#a2adbb}"
    ".grid{stroke:#252d38}.band{fill:#68cfcb}.line{stroke:#68cfcb}"
    ".dot{fill:#68cfcb}.bar{stroke:#68cfcb}}"
)


def accuracy_points(
    evaluations: Sequence[dict[str, Any]], name: str = "held_out"
) -> list[dict[str, Any]]:
    """The evaluations of a data set that have an accuracy, by step; of a step the one with the most
    questions."""
    best: dict[int, dict[str, Any]] = {}
    for row in evaluations:
        if row.get("name") == name and row.get("accuracy") is not None:
            step = row["step"]
            if step not in best or row["num_questions"] > best[step]["num_questions"]:
                best[step] = row
    return [best[step] for step in sorted(best)]


def accuracy_svg(points: Sequence[dict[str, Any]]) -> str:
    """Accuracy over steps in percent, with the 95% interval of each evaluation; ValueError without
    two of them."""
    if len(points) < 2:
        raise ValueError("accuracy over steps needs at least two evaluations")
    width, height, left, right, top, bottom = 640.0, 320.0, 54.0, 70.0, 62.0, 46.0
    last = points[-1]["step"]
    low = 10 * int(min(point["accuracy_interval"][0] for point in points) * 10)
    high = min(100, 10 * (int(max(point["accuracy_interval"][1] for point in points) * 10) + 1))

    def x(step: float) -> float:
        return left + (width - left - right) * step / last

    def y(share: float) -> float:
        return height - bottom - (height - top - bottom) * (100 * share - low) / (high - low)

    grid = "".join(
        f'<path class="grid" d="M{left:g} {y(p / 100):.1f}H{width - right:g}"/>'
        f'<text class="faint" x="{left - 8:g}" y="{y(p / 100) + 4:.1f}" '
        f'text-anchor="end">{p}%</text>'
        for p in range(low, high + 1, 10)
    )
    ticks = "".join(
        f'<text class="faint" x="{x(point["step"]):.1f}" y="{height - bottom + 20:g}" '
        f'text-anchor="middle">'
        f"{point['step']}</text>"
        for point in points
    )
    line = " ".join(f"{x(point['step']):.1f},{y(point['accuracy']):.1f}" for point in points)
    upper = [f"{x(point['step']):.1f},{y(point['accuracy_interval'][1]):.1f}" for point in points]
    lower = [
        f"{x(point['step']):.1f},{y(point['accuracy_interval'][0]):.1f}"
        for point in reversed(points)
    ]
    dots = "".join(
        f'<circle class="dot" cx="{x(point["step"]):.1f}" cy="{y(point["accuracy"]):.1f}" r="4"/>'
        for point in points
    )
    ends = "".join(
        f'<text class="ink" font-weight="600" x="{x(point["step"]) + 9:.1f}" '
        f'y="{y(point["accuracy"]) + dy:.1f}">{100 * point["accuracy"]:.1f}%</text>'
        for point, dy in ((points[0], 20), (points[-1], 5))
    )
    numbers = sorted({point["num_questions"] for point in points})
    asked = " or ".join(map(str, numbers))
    body = (
        f'<rect class="paper" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>'
        '<text class="ink" x="20" y="28" font-size="15" font-weight="600">Right answers to '
        "questions that training "
        "never sees</text>"
        f'<text class="faint" x="20" y="47">greedy, {asked} questions; the band is the 95% '
        f"interval</text>"
        f'{grid}{ticks}<text class="faint" x="{(left + width - right) / 2:g}" y="{height - 9:g}" '
        f'text-anchor="middle">step</text><polygon class="band" '
        f'points="{" ".join(upper + lower)}"/>'
        f'<polyline class="line" points="{line}"/>{dots}{ends}'
    )
    first, end = (f"{100 * points[place]['accuracy']:.1f}%" for place in (0, -1))
    return svg(
        width,
        height,
        f"Accuracy over {last} steps, from {first} to {end}, with its 95% interval",
        body,
        f"text{{font:12.5px {SANS}}}{PAPER}",
    )


# ---- a rollout by turn

TURN_STYLE = (
    ".up{fill:#0b6363}.down{fill:#b3423a}.paid{fill:#0b6363;opacity:.3}.zero{stroke:#8b95a3}"
    "@media (prefers-color-scheme:dark){.up{fill:#68cfcb}.down{fill:#f08b81}.paid{fill:#68cfcb}}"
)


def turns_svg(turns: Sequence[tuple[str, str, float, float]]) -> str:
    """A rollout, a column for each turn: what the model said, what it was answered, and as bars
    the reward and the advantage of the turn."""
    column, left, label_y = 78.0, 112.0, 84.0
    width, height = left + column * len(turns) + 16, 336.0
    size = max(max(abs(reward), abs(advantage)) for _, _, reward, advantage in turns)

    def bar(place: int, value: float, zero: float, style: str) -> str:
        """A bar of a value on the line at height `zero`, with its number."""
        length = 46 * abs(value) / size
        x, top = left + column * place + 16, zero - length if value > 0 else zero
        number_y = zero - length - 5 if value >= 0 else zero + length + 14
        return (
            f'<rect class="{style}" x="{x:.1f}" y="{top:.1f}" width="34" height="{length:.1f}"/>'
            f'<text class="faint" x="{x + 17:.1f}" y="{number_y:.1f}" text-anchor="middle">'
            f"{value:+.2f}</text>".replace("+0.00", "0")
        )

    parts = []
    for place, (said, answer, reward, advantage) in enumerate(turns):
        middle = left + column * place + 33
        parts.append(
            f'<text class="ink" x="{middle:g}" y="{label_y:g}" text-anchor="middle" '
            f'font-weight="600" font-size="15">{escape(said)}</text>'
            f'<text class="faint" x="{middle:g}" y="{label_y + 18:g}" text-anchor="middle">'
            f"{escape(answer)}</text>"
        )
        parts.append(bar(place, reward, 190.0, "paid"))
        parts.append(bar(place, advantage, 262.0, "up" if advantage > 0 else "down"))
    rows = (
        ("the model", label_y),
        ("its answer", label_y + 18),
        ("reward", 186),
        ("advantage", 266),
    )
    labels = "".join(f'<text class="faint" x="20" y="{y:g}">{text}</text>' for text, y in rows)
    lines = "".join(f'<path class="zero" d="M{left:g} {y}H{width - 16:g}"/>' for y in (190, 262))
    body = (
        f'<rect class="paper" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>'
        '<text class="ink" x="20" y="28" font-size="15" font-weight="600">A rollout of guess '
        "whose advantage is by turn</text>"
        '<text class="faint" x="20" y="47">each turn against the same turn of the other completions'
        f"</text>{labels}{lines}{''.join(parts)}"
    )
    return svg(
        width,
        height,
        f"A rollout of {len(turns)} turns with the reward and the advantage of each",
        body,
        f"text{{font:12.5px {SANS}}}{PAPER}{TURN_STYLE}",
    )


def draw_turns(run: str, step: int, group: int, completion: int) -> None:
    """Writes docs/credit.svg from a stored rollout."""
    from shoal.runs.result import load_run

    stored = load_run(run).groups(step)[group]
    messages = list(stored.group.completions[completion].messages)
    said = [message["content"] for message in messages[0::2]]
    answers = [message["content"] for message in messages[1::2]] + ["right"]
    values = (stored.group.turn_rewards[completion], stored.turn_advantages[completion])
    turns = list(zip(said, answers, *(array.tolist() for array in values), strict=True))
    (ROOT / "docs" / "credit.svg").write_text(turns_svg(turns), encoding="utf-8")


# ---- banner and badge

FISH = "M0 0C7-7 19-8 28-1L36-6 34 0 36 7 28 2C19 9 7 7 0 0Z"
SCHOOL = ((0, 30), (44, 12), (50, 48), (96, 28), (104, 62), (142, 8), (150, 44), (196, 26))
RIGHT = 3
"""A group of eight completions, of which one is right."""


def banner_svg(description: str) -> str:
    """The name and the package's description beside a group of eight fish."""
    fish = "".join(
        f'<path class="{"right" if place == RIGHT else "fish"}" d="{FISH}" '
        f'transform="translate({x + 24} {y + 28})"/>'
        for place, (x, y) in enumerate(SCHOOL)
    )
    body = (
        f'{fish}<text class="ink" x="286" y="70" font-size="46" font-weight="700">Shoal</text>'
        f'<text class="faint" x="288" y="100" font-size="20">{escape(description)}</text>'
    )
    return svg(
        900,
        124,
        f"Shoal. {description}",
        body,
        f"text{{font-family:{SANS}}}.ink{{fill:#0b6363}}.faint{{fill:#55606f}}"
        ".fish{fill:#0b6363;opacity:.55}"
        ".right{fill:#e08a1e}@media "
        "(prefers-color-scheme:dark){.ink{fill:#68cfcb}.faint{fill:#a2adbb}"
        ".fish{fill:#68cfcb}.right{fill:#f0b45b}}",
    )


def badge_svg(label: str, value: str) -> str:
    """A badge as code hosts draw them."""
    one, two = 12 + 6.4 * len(label), 12 + 6.4 * len(value)
    body = (
        f'<rect width="{one + two:g}" height="20" rx="3" fill="#0b7a75"/>'
        f'<path fill="#555" d="M3 0H{one:g}V20H3Q0 20 0 17V3Q0 0 3 0Z"/>'
        f'<text x="{one / 2:g}" y="14">{escape(label)}</text>'
        f'<text x="{one + two / 2:g}" y="14">{escape(value)}</text>'
    )
    return svg(
        one + two,
        20,
        f"{label}: {value}",
        body,
        "text{font:11px Verdana,'DejaVu Sans',sans-serif;fill:#fff;text-anchor:middle}",
    )


# ---- screenshots

WIDTH, HEIGHT, SCALE, COLOURS = 1000, 800, 1.2, 64
"""Of the page in its own pixels, how many of a screenshot's pixels each is wide, and how many
colours it keeps."""


def group_to_show(run: Path, name: str) -> str:
    """The address, on the page, of a group of the last step: of those whose rewards differ the one
    with most texts."""
    from shoal.runs.result import load_run

    result = load_run(run)
    step = result.steps[-1]
    groups = [stored.group for stored in result.groups(step)]
    worth = [(len(set(map(float, group.rewards))) > 1, len(set(group.texts))) for group in groups]
    return (
        f"#/group?run={quote(name, safe='')}&file=step_{step:06d}&group={worth.index(max(worth))}"
    )


@contextlib.contextmanager
def served(run: Path) -> Iterator[str]:
    """The address of a group on the page of `shoal view`."""
    command = [sys.executable, "-m", "shoal", "view", str(run), "open=false"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = next(
                found[0] for line in process.stdout if (found := re.search(r"http://\S+/", line))
            )
            with urlopen(f"{address}api/runs") as answer:
                name = json.load(answer)["runs"][0]["name"]
            yield address + group_to_show(run, name)
        finally:
            process.terminate()


def screenshots(run: Path, to: Path) -> None:
    """The page on a group in both themes, in few colours."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    with served(run) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        for theme in ("light", "dark"):
            page = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT},
                color_scheme=theme,
                device_scale_factor=SCALE,
            )
            page.goto(address)
            page.wait_for_function(
                "() => document.querySelector('.view-group h1') && "
                "!document.querySelector('.state')"
            )
            page.wait_for_timeout(500)  # what is drawn after the first paint
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            picture.quantize(COLOURS, dither=Image.Dither.NONE).save(
                to / f"group-{theme}.png", optimize=True
            )
        browser.close()


# ---- all


def run_of(folder: Path) -> Path:
    """The run that the default command made in a folder: the newest below its `outputs`."""
    found = sorted((folder / "outputs").rglob("evaluations.jsonl"))
    if not found or not (folder / "recording.txt").is_file():
        raise SystemExit(
            f"{folder} holds no recorded run; make one there:\n    shoal train | tee recording.txt"
        )
    return found[-1].parent


def drawn() -> dict[str, str]:
    """The pictures that need no run, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        "banner.svg": banner_svg("Reinforcement learning from verifiable rewards, in JAX"),
        "licence.svg": badge_svg("licence", project["license"]),
    }


def main(folder: Path) -> None:
    run = run_of(folder)
    evaluations = [
        json.loads(line)
        for line in (run / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    lines = recorded_lines((folder / "recording.txt").read_text(encoding="utf-8"))
    PICTURES.mkdir(exist_ok=True)
    for name, text in {
        **drawn(),
        "recording.svg": recording_svg(lines),
        "accuracy.svg": accuracy_svg(accuracy_points(evaluations)),
    }.items():
        (PICTURES / name).write_text(text, encoding="utf-8")
    screenshots(run, PICTURES)
    sizes = {name: (PICTURES / name).stat().st_size for name in NAMES}
    print("\n".join(f"{name:18} {size:8,} bytes" for name, size in sizes.items()))
    if sum(sizes.values()) >= MOST_BYTES:
        raise SystemExit(
            f"{sum(sizes.values()):,} bytes in all, the limit is {MOST_BYTES:,}: lower COLOURS or "
            "HEIGHT"
        )


if __name__ == "__main__":
    if len(sys.argv) == 5:
        draw_turns(sys.argv[1], *map(int, sys.argv[2:]))
        raise SystemExit
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
