"""The Lint view: what looks wrong with the rewards of a run, over all of its groups.

    number_findings(table)   by numbers: figures of all training groups, for `runs/diagnosis.py`
    TextLint(table)          by texts: what single completions do, of some files, a piece at a time
    lint(...)                both, what is wrong first

A finding is a record with a title, a text, a level (warning, note, ok) and the groups that show it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.runs.diagnosis import ROWS, Card, Figure, Row
from shoal.runs.group_table import GroupFile, GroupTable, column_sql
from shoal.tasks.graders.answer import extract_answer
from shoal.text import count

EXAMPLES = 6
"""Most examples of a finding in texts; one in numbers has half as many."""


def finding(
    kind: str,
    level: str,
    title: str,
    text: str,
    filter: str = "",
    sort: str = "",
    examples: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """`filter` and `sort`, a column, lead to the groups that show it."""
    return {
        "kind": kind,
        "level": level,
        "title": title,
        "text": text,
        "filter": filter,
        "sort": sort,
        "examples": list(examples),
    }


# ---- by numbers


def number_findings(index: GroupTable) -> list[dict[str, Any]]:
    """What the figures of all training groups show; each finding that is no `ok` with groups that
    show it."""
    totals, functions = _totals(index)
    if not totals["groups"]:
        return []
    figures = _figures(totals, functions, index)
    findings = []
    shown_kinds = set()
    for row in ROWS:
        card = row.card
        if card is None:
            continue
        for figure in figures:
            shown = (card.kind, figure.subject)
            if figure.name != row.figure or shown in shown_kinds or not row.has_evidence(figure):
                continue
            if row.is_passed(figure.value):
                findings.append(_card_of(row, card, figure))
                shown_kinds.add(shown)
            elif card.fine:
                text = _sentence(row.fill(row.text, figure))
                findings.append(finding(card.kind, "ok", card.fine, text))
    for found in findings:
        if found["level"] != "ok":
            found["examples"] = _examples(index, found["filter"], found["sort"])
    return findings


def _card_of(row: Row, card: Card, figure: Figure) -> dict[str, Any]:
    return finding(
        card.kind,
        row.level,
        row.fill(card.title, figure),
        _sentence(row.sentence(figure)),
        row.fill(card.filter, figure),
        row.fill(card.sort, figure),
    )


def _sentence(text: str) -> str:
    """A text of the table as a sentence."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def _examples(index: GroupTable, filter: str, sort: str) -> list[dict[str, Any]]:
    """The first groups that a finding's link leads to."""
    is_descending = "length_effect<" not in filter
    rows, _ = index.rows(filter, sort or "step", is_descending, limit=EXAMPLES // 2)
    examples = []
    for row in rows:
        if not row["file"]:
            continue
        examples.append(
            {
                "file": row["file"],
                "group": row["group"],
                "completion": None,
                "reward": row["reward"],
                "text": row["prompt"],
            }
        )
    return examples


def _totals(index: GroupTable) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures of all training groups together, and of each reward function."""
    rises = ""
    for function in index.functions:
        mean = column_sql(f"mean/{function}")
        rises += (
            f", avg({mean}) FILTER (step >= late) - avg({mean}) FILTER (step <= early) "
            f"AS {column_sql(f'rise/{function}')}"
        )
    with index.lock:
        query = _TOTALS.format(table=index.table, functions=rises)
        totals = index.database.rows(query)[0]
        functions = index.database.rows(_FUNCTIONS.format(sums=index.sums))
    return totals, functions


_TOTALS = """
SELECT count(*) AS groups, avg((spread < 1e-9)::INTEGER) AS constant,
  avg(length_effect) AS effect, count(length_effect) AS with_effect, avg(truncated) AS truncated,
  avg(reward) FILTER (truncated > 0) AS reward_truncated,
  avg(reward) FILTER (truncated = 0) AS reward_whole,
  avg(pass) FILTER (step <= early) AS pass_early, avg(pass) FILTER (step >= late) AS pass_late,
  avg(reward) FILTER (step <= early) AS reward_early,
  avg(reward) FILTER (step >= late) AS reward_late,
  avg(length) FILTER (step <= early) AS length_early,
  avg(length) FILTER (step >= late) AS length_late,
  sqrt(var_samp(reward) FILTER (step <= early) / count(reward) FILTER (step <= early)
    + var_samp(reward) FILTER (step >= late) / count(reward) FILTER (step >= late)) AS reward_error
  {functions}
FROM (SELECT *, (SELECT quantile_cont(step, 0.2) FROM {table} WHERE "set" = 'train') AS early,
  (SELECT quantile_cont(step, 0.8) FROM {table} WHERE "set" = 'train') AS late
  FROM {table} WHERE "set" = 'train')
"""


_FUNCTIONS = """
SELECT function, sum(n) AS n, min(low) AS low, max(high) AS high, count(*) AS steps,
  (sum(n) * sum(xy) - sum(x) * sum(y)) / nullif(sqrt(greatest(sum(n) * sum(xx) - sum(x) * sum(x), 0)
    * greatest(sum(n) * sum(yy) - sum(y) * sum(y), 0)), 0) AS correlation
FROM {sums} GROUP BY function ORDER BY function = 'reward' DESC, function
"""


def _figures(
    totals: Mapping[str, Any], functions: Sequence[Mapping[str, Any]], index: GroupTable
) -> list[Figure]:
    """The figures of the run that the table of findings has rows for."""
    num_groups = totals["groups"]
    figures = _length_figures(totals, functions)
    words = {"number": count(num_groups, "training group")}
    figures.append(Figure("constant_groups", totals["constant"], groups=num_groups, words=words))
    if totals["truncated"] is not None:
        compared = ""
        cut = totals["reward_truncated"]
        whole = totals["reward_whole"]
        if cut is not None and whole is not None:
            compared = (
                f" Groups with such completions have a mean reward of {cut:.3g}, the others of "
                f"{whole:.3g}."
            )
        words = {"compared": compared}
        figures.append(Figure("truncated", totals["truncated"], groups=num_groups, words=words))
    figures += _drift_figures(totals, index)
    for row in functions:
        if row["function"] == "reward" or row["low"] is None:
            continue
        figures.append(
            Figure(
                "function_range",
                row["high"] - row["low"],
                steps=row["steps"],
                completions=row["n"],
                subject=row["function"],
                words={"low": row["low"]},
            )
        )
    return figures


def _length_figures(
    totals: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]
) -> list[Figure]:
    """How far rewards follow lengths within groups."""
    effect = totals["effect"]
    if effect is None:
        return []
    overall = []
    for row in functions:
        if row["correlation"] is not None:
            overall.append(f"{row['function']} {row['correlation']:+.2f}")
    is_longer = effect > 0
    words = {
        "effect": effect,
        "number": count(totals["with_effect"], "group"),
        "overall": ", ".join(overall),
        "longer": "longer" if is_longer else "shorter",
        "length_filter": "length_effect>0.7" if is_longer else "length_effect<-0.7",
    }
    return [Figure("length_effect", abs(effect), groups=totals["with_effect"], words=words)]


def _drift_figures(totals: Mapping[str, Any], index: GroupTable) -> list[Figure]:
    """How far the reward rises beyond noise, from the first to the last fifth of the steps, where
    the share of right answers does not; at most 0 where that rises, too."""
    before = totals["reward_early"]
    after = totals["reward_late"]
    solved_before = totals["pass_early"]
    solved_after = totals["pass_late"]
    if None in (before, after, solved_before, solved_after):
        return []
    noise = max(0.02, 2.6 * (totals["reward_error"] or 0))
    rise = after - (before + noise)
    if solved_after >= solved_before + 0.01:
        rise = min(rise, 0.0)
    driver = _driver(totals, index)
    change = (
        f"from the first to the last fifth of the steps: reward {before:.3g} to {after:.3g}, pass "
        f"share {solved_before:.1%} to {solved_after:.1%}, length {totals['length_early']:.0f} to "
        f"{totals['length_late']:.0f} tokens"
    )
    words = {
        "change": change,
        "driver": driver or "something else than right answers",
        "sort": driver or "reward",
    }
    return [Figure("reward_rise_without_answers", rise, words=words)]


def _driver(totals: Mapping[str, Any], index: GroupTable) -> str:
    """The reward function whose rise adds most to the reward; empty where none rises."""
    driver = ""
    most = 0.0
    for function in index.functions:
        rise = (totals[f"rise/{function}"] or 0) * index.weights.get(function, 1)
        if rise > most:
            driver = function
            most = rise
    return driver


# ---- by texts

TEXT_FILES, TEXT_COMPLETIONS, MAX_CHARS = 40, 16_384, 20_000
"""Most files and completions that are read, and characters of each."""

MANY_FLAGGED, LINT_SECONDS = 0.01, 0.3
"""A share of completions that is warned of; how long a request reads on."""

REPEATED_CHARS, REPEATED_RATIO = 40, 0.18
"""A text of so many characters that deflate makes so much smaller repeats itself."""

TEXT_CHECKS: Mapping[str, tuple[str, str]] = {
    "no_answer": (
        "score best without giving an answer",
        "They have no <answer>, and no sibling has more reward.",
    ),
    "empty": ("are empty", "They hold fewer than 3 characters."),
    "wrong_best": (
        "are wrong and score as well as a right sibling",
        "The task says that they are wrong, the reward does not.",
    ),
    "repeated": ("repeat themselves", "Their text shrinks to a fifth when compressed."),
    "many_answers": (
        "give several answers",
        "They have more than one <answer>: one of them may be right.",
    ),
}
"""Kind -> what such a completion does, and how it was recognised."""


@dataclass
class Flagged:
    """What one check found: how often, with which rewards, and the examples with the most
    reward."""

    number: int = 0
    reward: float = 0.0
    examples: list[dict[str, Any]] = field(default_factory=list)


class TextLint:
    """Reads completions and counts those that look wrong; `findings` at any time."""

    def __init__(self, index: GroupTable, has_tag: bool = True) -> None:
        """`has_tag`: the task is one of those whose answers stand in <answer>; else only prompts
        that ask for it do."""
        self._index = index
        self.has_tag = has_tag
        self.completions = 0
        self.reward = 0.0
        self.with_answer = 0
        self.flags: dict[str, Flagged] = defaultdict(Flagged)
        files = []
        for stem in sorted(index.files):
            if stem.startswith("step_"):
                files.append(index.files[stem])
        chosen = [files[position] for position in _spread(len(files))]
        self._most = max(16, TEXT_COMPLETIONS // max(1, len(chosen)))  # completions of a file
        self.num_files = len(chosen)
        self._left = chosen[::-1]
        self._lock = threading.Lock()

    @property
    def num_read(self) -> int:
        return self.num_files - len(self._left)

    def read_on(self) -> None:
        """Reads further files for LINT_SECONDS."""
        until = time.monotonic() + LINT_SECONDS
        with self._lock:
            while self._left and time.monotonic() < until:
                # Replaced or damaged: the table names it.
                with contextlib.suppress(self._index.database.error):
                    self._add(self._left[-1])
                self._left.pop()

    def _add(self, file: GroupFile) -> None:
        rows = self._index.database.rows(_TEXTS, str(file.path), self._most)
        by_group: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            by_group[row["group"]].append(row)
            self.has_tag = self.has_tag or bool(row["tag"])
        for group, siblings in by_group.items():
            scored = [row for row in siblings if row["reward"] is not None]
            best = max((row["reward"] for row in scored), default=None)
            best_right = max((row["reward"] for row in scored if row["correct"]), default=None)
            for row in siblings:
                self.completions += 1
                self.reward += row["reward"] or 0
                self.with_answer += extract_answer(row["text"]) is not None
                for kind in _kinds(row, best, best_right):
                    self._flag(kind, file, group, row)

    def _flag(self, kind: str, file: GroupFile, group: int, row: Mapping[str, Any]) -> None:
        flag = self.flags[kind]
        flag.number += 1
        flag.reward += row["reward"] or 0
        flag.examples.append(
            {
                "file": file.stem,
                "group": group,
                "completion": row["completion"],
                "reward": row["reward"],
                "text": row["text"][:160],
            }
        )
        # Stable: of those with one reward the first.
        flag.examples.sort(key=lambda example: -(example["reward"] or 0))
        del flag.examples[EXAMPLES:]

    def findings(self) -> list[dict[str, Any]]:
        if not self.completions:
            return []
        over = f"{count(self.completions, 'completion')} of {count(self.num_read, 'step')}"
        findings = []
        for kind, (title, text) in TEXT_CHECKS.items():
            if not self._applies(kind):
                continue
            flag = self.flags.get(kind)
            if flag is None or not flag.number:
                findings.append(finding(kind, "ok", f"No completions {title}.", f"Of {over}."))
                continue
            share = flag.number / self.completions
            if share >= 0.001:
                number = f"{share:.1%} of completions {title} ({flag.number:,})"
            else:
                number = f"{flag.number:,} of {count(self.completions, 'completion')} {title}"
            others = self.completions - flag.number
            rest = ""
            if others:
                rest = f", the others {(self.reward - flag.reward) / others:.3g}"
            mean = f"Their mean reward is {flag.reward / flag.number:.3g}{rest}."
            level = "warning" if share > MANY_FLAGGED else "note"
            shown = f"Of {over}. {text} {mean}"
            findings.append(finding(kind, level, number, shown, examples=flag.examples))
        return findings

    def _applies(self, kind: str) -> bool:
        """False where answers of this task stand in another form, or nothing is known of them."""
        if kind == "no_answer":
            return self.has_tag and self.with_answer >= self.completions / 2
        if kind == "wrong_best":
            return self._index.is_measured
        return True


_TEXTS = (
    f"SELECT coalesce(left(text, {MAX_CHARS}), '') AS text, CAST(prompt AS VARCHAR) LIKE "
    "'%<answer>%' AS tag, "
    'TRY_CAST("group" AS INTEGER) AS "group", TRY_CAST(completion AS INTEGER) AS completion, '
    "TRY_CAST(reward AS DOUBLE) AS reward, TRY_CAST(correct AS BOOLEAN) AS correct "
    'FROM read_parquet(?) WHERE "group" IS NOT NULL AND completion IS NOT NULL '
    'ORDER BY "group", completion LIMIT ?'
)


def _spread(num_files: int) -> list[int]:
    """Positions of at most TEXT_FILES files, at equal distances, the first and the last among
    them."""
    if not num_files:
        return []
    positions = set()
    for number in range(TEXT_FILES):
        positions.add(round(number * (num_files - 1) / max(1, TEXT_FILES - 1)))
    return sorted(positions)


def _kinds(row: Mapping[str, Any], best: float | None, best_right: float | None) -> list[str]:
    """The checks of TEXT_CHECKS that a completion fails. `best`, `best_right`: the highest reward
    among its siblings, and among those that are right."""
    text = row["text"]
    reward = row["reward"]
    kinds = []
    is_best = reward is not None and reward == best and reward > 0
    if is_best and extract_answer(text) is None:
        kinds.append("no_answer")
    if len(text.strip()) < 3:
        kinds.append("empty")
    if row["correct"] is False and best_right is not None and reward is not None:
        if reward >= best_right:
            kinds.append("wrong_best")
    if len(text) >= REPEATED_CHARS and repeats(text):
        kinds.append("repeated")
    has_many_tags = text.count("<answer>") > 1 and text.count("</answer>") > 1
    if has_many_tags or text.count("\\boxed{") > 1:
        kinds.append("many_answers")
    return kinds


def repeats(text: str) -> bool:
    """True for a text that deflate makes much smaller."""
    data = text.encode("utf-8", "replace")
    compressed = zlib.compress(data, 1, -15)  # -15: without zlib's header
    return len(compressed) < REPEATED_RATIO * len(data)


# ---- both

_LEVELS = ("warning", "note", "ok")

_KINDS = (
    "hacking",
    "wrong_best",
    "no_answer",
    "length",
    "unvarying",
    "constant",
    "empty",
    "repeated",
    "many_answers",
    "truncated",
)
"""What rewards other things than right answers comes first."""


def lint(index: GroupTable, numbers: Sequence[dict[str, Any]], texts: TextLint) -> dict[str, Any]:
    """All findings, what is wrong first, and of that what rewards other things than right
    answers."""

    def rank(found: Mapping[str, Any]) -> tuple[int, int]:
        kind = found["kind"]
        position = _KINDS.index(kind) if kind in _KINDS else len(_KINDS)
        return _LEVELS.index(found["level"]), position

    return {
        "findings": sorted([*numbers, *texts.findings()], key=rank),
        "done": texts.num_read == texts.num_files and not index.waiting,
        "read": texts.num_read,
        "files": texts.num_files,
    }
