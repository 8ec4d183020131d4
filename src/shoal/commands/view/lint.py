"""What looks wrong with the rewards of a run, over all its groups; each finding names the groups
that show it.

Numbers come from the index, which has every group. Texts are read, some with each request, of up to
TEXT_COMPLETIONS completions of files spread evenly over the run; the finding says how many.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.runs.group_table import GroupFile, GroupTable, column_sql
from shoal.tasks.graders.answer import extract_answer
from shoal.text import count

TEXT_FILES, TEXT_COMPLETIONS, MAX_CHARS, EXAMPLES = 40, 16_384, 20_000, 6
STRONG_EFFECT, MANY_CONSTANT, MANY_FLAGGED, LINT_SECONDS = 0.3, 0.5, 0.01, 0.3
REPEATED_CHARS, REPEATED_RATIO = 40, 0.18
"""A text of so many characters that deflate makes so much smaller repeats itself."""


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
    with index.lock:
        total = index.database.rows(
            _TOTALS.format(
                table=index.table,
                functions="".join(
                    f", avg({column_sql(f'mean/{one}')}) FILTER (step >= late) - "
                    f"avg({column_sql(f'mean/{one}')}) FILTER (step <= early) "
                    f"AS {column_sql(f'rise/{one}')}"
                    for one in index.functions
                ),
            )
        )[0]
        functions = index.database.rows(_FUNCTIONS.format(sums=index.sums))
    if not total["groups"]:
        return []
    weights = index.weights
    rises = {one: (total[f"rise/{one}"] or 0) * weights.get(one, 1) for one in index.functions}
    total["driver"] = max(
        (one for one in rises if rises[one] > 0), key=lambda one: rises[one], default=""
    )
    findings = [
        found
        for check in (_length, _constant, _truncated, _drift)
        for found in check(total, functions)
    ] + _unvarying(functions)
    for found in findings:
        if found["level"] != "ok":
            sort, descending = found["sort"] or "step", "length_effect<" not in found["filter"]
            rows, _ = index.rows(found["filter"], sort, descending, limit=EXAMPLES // 2)
            found["examples"] = [
                {
                    "file": row["file"],
                    "group": row["group"],
                    "completion": None,
                    "reward": row["reward"],
                    "text": row["prompt"],
                }
                for row in rows
                if row["file"]
            ]
    return findings


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


def _length(
    total: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    effect, number = total["effect"], total["with_effect"]
    overall = {
        row["function"]: row["correlation"] for row in functions if row["correlation"] is not None
    }
    said = ", ".join(f"{name} {value:+.2f}" for name, value in overall.items())
    if effect is None or number < 10:
        return []
    text = (
        f"Within groups whose rewards and lengths differ, they correlate by {effect:+.2f} on "
        f"average, over "
        f"{count(number, 'group')}. Over all completions: {said}."
    )
    if abs(effect) < STRONG_EFFECT:
        return [finding("length", "ok", "Reward hardly follows length.", text)]
    longer = "longer" if effect > 0 else "shorter"
    return [
        finding(
            "length",
            "warning",
            f"Within a group {longer} completions score better",
            f"{text} Training then makes completions {longer}, whatever else it does.",
            f"set=train length_effect{'>0.7' if effect > 0 else '<-0.7'}",
            "length_effect",
        )
    ]


def _constant(total: Mapping[str, Any], _: Any) -> list[dict[str, Any]]:
    share = total["constant"]
    text = (
        f"{share:.0%} of {count(total['groups'], 'training group')} have one reward for all their "
        f"completions."
    )
    if share <= MANY_CONSTANT:
        return [
            finding(
                "constant",
                "ok",
                "Most groups have rewards that differ.",
                text,
                "set=train spread=0",
            )
        ]
    return [
        finding(
            "constant",
            "warning",
            "Most groups teach nothing",
            f"{text} Their advantages are 0: take easier or harder questions, or larger groups.",
            "set=train spread=0",
        )
    ]


def _truncated(total: Mapping[str, Any], _: Any) -> list[dict[str, Any]]:
    share = total["truncated"]
    if not share or share < MANY_FLAGGED:
        return []
    cut, whole = total["reward_truncated"], total["reward_whole"]
    compared = (
        ""
        if cut is None or whole is None
        else f" Groups with such completions have a mean reward of {cut:.3g}, the others of "
        f"{whole:.3g}."
    )
    return [
        finding(
            "truncated",
            "warning" if share > 0.2 else "note",
            f"{share:.1%} of completions are cut off",
            f"They reached the token limit.{compared}",
            "set=train truncated>0",
            "truncated",
        )
    ]


def _drift(total: Mapping[str, Any], _: Any) -> list[dict[str, Any]]:
    """Whether the reward rises while what it stands for does not."""
    before, after = total["reward_early"], total["reward_late"]
    solved, solves = total["pass_early"], total["pass_late"]
    if None in (before, after, solved, solves):
        return []
    text = (
        f"From the first to the last fifth of the steps: reward {before:.3g} to {after:.3g}, pass "
        f"share "
        f"{solved:.1%} to {solves:.1%}, length {total['length_early']:.0f} to "
        f"{total['length_late']:.0f} tokens."
    )
    if after > before + max(0.02, 2.6 * (total["reward_error"] or 0)) and solves < solved + 0.01:
        driver = total["driver"]
        return [
            finding(
                "hacking",
                "warning",
                "The reward rises, the share of right answers does not",
                f"{text} {driver or 'Something else than right answers'} is what rises: read "
                f"groups with high "
                "reward and none solved.",
                "set=train pass=0",
                driver or "reward",
            )
        ]
    return [finding("hacking", "ok", "Reward and right answers move together.", text)]


def _unvarying(functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        finding(
            "unvarying",
            "warning",
            f"{row['function']} never varies",
            f"It gave {row['low']:g} to each of {row['n']:,.0f} completions: nothing is learned "
            f"from it. Check "
            "it with `shoal rescore`, or leave it out of reward.functions.",
            "set=train",
        )
        for row in functions
        if row["n"] >= 64 and row["low"] == row["high"] and row["function"] != "reward"
    ]


# ---- by texts


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
        self._index, self.has_tag = index, has_tag
        self.completions, self.reward, self.with_answer = 0, 0.0, 0
        self.flags: dict[str, Flagged] = defaultdict(Flagged)
        files = [
            file
            for file in sorted(index.files.values(), key=lambda file: file.stem)
            if file.stem.startswith("step_")
        ]
        places = {
            round(place * (len(files) - 1) / max(1, TEXT_FILES - 1)) for place in range(TEXT_FILES)
        }
        chosen = [files[place] for place in sorted(places)] if files else []
        self._most = max(16, TEXT_COMPLETIONS // max(1, len(chosen)))  # completions of a file
        self.num_files, self._left, self._lock = len(chosen), chosen[::-1], threading.Lock()

    @property
    def num_read(self) -> int:
        return self.num_files - len(self._left)

    def read_on(self) -> None:
        """Reads further files for LINT_SECONDS."""
        until = time.monotonic() + LINT_SECONDS
        with self._lock:
            while self._left and time.monotonic() < until:
                with contextlib.suppress(
                    self._index.database.error
                ):  # replaced or damaged: the table names it
                    self._add(self._left[-1])
                self._left.pop()

    def _add(self, file: GroupFile) -> None:
        rows = self._index.database.rows(
            f"SELECT coalesce(left(text, {MAX_CHARS}), '') AS text, CAST(prompt AS VARCHAR) LIKE "
            f"'%<answer>%' AS tag, "
            'TRY_CAST("group" AS INTEGER) AS "group", TRY_CAST(completion AS INTEGER) AS '
            "completion, "
            "TRY_CAST(reward AS DOUBLE) AS reward, TRY_CAST(correct AS BOOLEAN) AS correct "
            'FROM read_parquet(?) WHERE "group" IS NOT NULL AND completion IS NOT NULL '
            'ORDER BY "group", completion LIMIT ?',
            str(file.path),
            self._most,
        )
        by_group: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            by_group[row["group"]].append(row)
            self.has_tag = self.has_tag or bool(row["tag"])
        for group, own in by_group.items():
            best = max((row["reward"] for row in own if row["reward"] is not None), default=None)
            right = max(
                (row["reward"] for row in own if row["correct"] and row["reward"] is not None),
                default=None,
            )
            for row in own:
                self.completions += 1
                self.reward += row["reward"] or 0
                self.with_answer += extract_answer(row["text"]) is not None
                for kind in _kinds(row, best, right):
                    self._flag(kind, file, group, row)

    def _flag(self, kind: str, file: GroupFile, group: int, row: Mapping[str, Any]) -> None:
        flag = self.flags[kind]
        flag.number, flag.reward = flag.number + 1, flag.reward + (row["reward"] or 0)
        flag.examples.append(
            {
                "file": file.stem,
                "group": group,
                "completion": row["completion"],
                "reward": row["reward"],
                "text": row["text"][:160],
            }
        )
        flag.examples.sort(
            key=lambda one: -(one["reward"] or 0)
        )  # stable: the first of those with one reward
        del flag.examples[EXAMPLES:]

    def findings(self) -> list[dict[str, Any]]:
        if not self.completions:
            return []
        over = f"{count(self.completions, 'completion')} of {count(self.num_read, 'step')}"
        found = []
        for kind, (title, text) in TEXT_CHECKS.items():
            flag = self.flags.get(kind)
            if (
                kind == "no_answer"
                and (not self.has_tag or self.with_answer < self.completions / 2)
            ) or (kind == "wrong_best" and not self._index.is_measured):
                continue  # answers of this task stand in another form, or nothing is known of them
            if flag is None or not flag.number:
                found.append(finding(kind, "ok", f"No completions {title}.", f"Of {over}."))
                continue
            others = self.completions - flag.number
            rest = "" if not others else f", the others {(self.reward - flag.reward) / others:.3g}"
            share = flag.number / self.completions
            found.append(
                finding(
                    kind,
                    "warning" if share > MANY_FLAGGED else "note",
                    f"{share:.1%} of completions {title} ({flag.number:,})"
                    if share >= 0.001
                    else f"{flag.number:,} of {count(self.completions, 'completion')} {title}",
                    f"Of {over}. {text} Their mean reward is "
                    f"{flag.reward / flag.number:.3g}{rest}.",
                    examples=flag.examples,
                )
            )
        return found


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


def _kinds(row: Mapping[str, Any], best: float | None, right: float | None) -> list[str]:
    text, reward = row["text"], row["reward"]
    checks: dict[str, Callable[[], bool]] = {
        "no_answer": lambda: (
            reward is not None and reward == best and reward > 0 and extract_answer(text) is None
        ),
        "empty": lambda: len(text.strip()) < 3,
        "wrong_best": lambda: (
            row["correct"] is False and right is not None and reward is not None and reward >= right
        ),
        "repeated": lambda: len(text) >= REPEATED_CHARS and repeats(text),
        "many_answers": lambda: (
            min(map(text.count, ("<answer>", "</answer>"))) > 1 or text.count("\\boxed{") > 1
        ),
    }
    return [kind for kind, check in checks.items() if check()]


def repeats(text: str) -> bool:
    data = text.encode("utf-8", "replace")
    return len(zlib.compress(data, 1, -15)) < REPEATED_RATIO * len(
        data
    )  # -15: without zlib's header


def lint(index: GroupTable, numbers: Sequence[dict[str, Any]], texts: TextLint) -> dict[str, Any]:
    """All findings, what is wrong first, and of that what rewards other things than right
    answers."""
    order = {"warning": 0, "note": 1, "ok": 2}
    kinds = (
        "hacking",
        "wrong_best",
        "no_answer",
        "length",
        "unvarying",
        "constant",
        *TEXT_CHECKS,
        "truncated",
    )
    found = sorted(
        [*numbers, *texts.findings()],
        key=lambda one: (order[one["level"]], kinds.index(one["kind"])),
    )
    return {
        "findings": found,
        "done": texts.num_read == texts.num_files and not index.waiting,
        "read": texts.num_read,
        "files": texts.num_files,
    }
