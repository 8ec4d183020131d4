"""The Lint view: what looks wrong with the rewards of a run, over all of its groups.

    number_findings(table)   from numbers: figures of all training groups, compared with the bounds
                             in `runs/diagnosis.py`
    TextLint(table)          from texts: what single completions do, in a sample of files, read a
                             few files at a time
    lint(...)                both, sorted, the worst first

A finding is a record with a title, a text, a level (warning, note, ok) and examples of groups."""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.runs.diagnosis import ROWS, Card, Figure, Row, figures_with_critic
from shoal.runs.group_table import GroupFile, GroupTable, column_sql
from shoal.tasks.graders.answer import extract_answer, num_behind_hashes
from shoal.text import count

EXAMPLES = 6
"""The most examples of a finding from texts; a finding from numbers has half as many."""


def finding(
    kind: str,
    level: str,
    title: str,
    text: str,
    filter: str = "",
    sort: str = "",
    examples: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns the record of one finding, a dict with the arguments under their names. `kind`: one
    of _KINDS, else the finding is the last of its level. `level`: "warning", "note" or "ok".
    `filter` and `sort` (a column) are the parameters of a link to the groups that show the finding;
    no link if both are "". `examples`: records with `file`, `group`, `completion`, `reward` and
    `text`; the list is copied."""
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


def number_findings(index: GroupTable, has_critic: bool = False) -> list[dict[str, Any]]:
    """Returns the findings on figures of all training groups together, in the order of ROWS; []
    without groups. `has_critic`: True if a critic judged the groups, which learns from those with
    one reward too.

    Only rows of ROWS with a card are shown. A row whose bound is passed gives a finding with
    examples; of several rows of one kind only the first does, for each reward function. A row
    whose bound is not passed gives a finding of level "ok", if its card has a title for that."""
    totals, functions = _totals(index)
    if not totals["groups"]:
        return []
    figures = _figures(totals, functions, index)
    if has_critic:
        figures = figures_with_critic(figures)
    findings = []
    shown_kinds = set()
    for row in ROWS:
        card = row.card
        if card is None:
            continue
        for figure in figures:
            shown = (card.kind, figure.subject)  # `subject`: a reward function, or ""
            if figure.name != row.figure or shown in shown_kinds or not row.has_evidence(figure):
                continue
            if row.is_beyond_bound(figure.value):
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
    """Returns the finding for a row of ROWS whose bound a figure passes; its texts are those of the
    row and its card, filled with the figure's words."""
    return finding(
        kind=card.kind,
        level=row.level,
        title=row.fill(card.title, figure),
        text=_sentence(row.sentence(figure)),
        filter=row.fill(card.filter, figure),
        sort=row.fill(card.sort, figure),
    )


def _sentence(text: str) -> str:
    """Returns a text with a capital at its start and a full stop at its end."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def _examples(index: GroupTable, filter: str, sort: str) -> list[dict[str, Any]]:
    """Returns the records of at most EXAMPLES / 2 example groups of a finding: the first ones that
    its link, with this filter and order, leads to (by step if `sort` is ""), the largest values
    first; the smallest if the filter asks for a negative effect of length. Each has `file`,
    `group`, `completion` (None: all), the mean `reward`, and the prompt as `text`. Groups whose
    file is gone are left out."""
    # The filter has "length_effect<-0.7" if shorter completions score better (`_length_figures`).
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
    """Returns (figures over all training groups, for each reward function a row of figures), both
    computed by the database: the columns of _TOTALS and of _FUNCTIONS. To the first belongs also
    `rise/<function>`: by how much the function's mean has risen from the first fifth of the groups
    to the last."""
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
"""SQL: figures over all training groups. `early` and `late` are the steps at 20% and 80% of the
groups."""


_FUNCTIONS = """
SELECT function, sum(n) AS n, min(low) AS low, max(high) AS high, count(*) AS steps,
  sum(unscored) AS unscored,
  (sum(n) * sum(xy) - sum(x) * sum(y)) / nullif(sqrt(greatest(sum(n) * sum(xx) - sum(x) * sum(x), 0)
    * greatest(sum(n) * sum(yy) - sum(y) * sum(y), 0)), 0) AS correlation
FROM {sums} GROUP BY function ORDER BY function = 'reward' DESC, function
"""
"""SQL: for each reward function its range and the correlation of its rewards with lengths, the
whole reward first."""


def _figures(
    totals: Mapping[str, Any], functions: Sequence[Mapping[str, Any]], index: GroupTable
) -> list[Figure]:
    """Returns the figures of a run that ROWS of `runs/diagnosis.py` judge, with the words that the
    texts of their rows need. `totals`, `functions`: the result of `_totals`."""
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
        low = row["low"]
        high = row["high"]
        if row["unscored"]:  # where it returned None, it adds 0 to the reward of the others
            low = min(low, 0.0)
            high = max(high, 0.0)
        figures.append(
            Figure(
                "function_range",
                high - low,
                steps=row["steps"],
                completions=row["n"],
                subject=row["function"],
                words={"low": low},
            )
        )
    return figures


def _length_figures(
    totals: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]
) -> list[Figure]:
    """Returns a list with the figure `length_effect`: the mean correlation of reward and length
    within groups, as an absolute value. Returns [] if no group has such a correlation."""
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
    """Returns a list with the figure `reward_rise_without_answers`: by how much the mean reward of
    the last fifth of the groups exceeds that of the first fifth and the noise. It is at most 0 if
    the share of right answers rises too, so that nothing is found. Returns [] if a mean is
    unknown."""
    before = totals["reward_early"]
    after = totals["reward_late"]
    solved_before = totals["pass_early"]
    solved_after = totals["pass_late"]
    if None in (before, after, solved_before, solved_after):
        return []
    noise = max(LEAST_NOISE, NOISE_ERRORS * (totals["reward_error"] or 0))
    rise = after - (before + noise)
    if solved_after >= solved_before + SOLVED_RISE:
        rise = min(rise, 0.0)
    driver = _driver(totals, index)
    change = (
        f"from the first to the last fifth of the steps: reward {before:.3g} to {after:.3g}, pass "
        f"share {solved_before:.1%} to {solved_after:.1%}, length {totals['length_early']:.0f} to "
        f"{totals['length_late']:.0f} tokens"
    )
    words = {
        "change": change,
        "driver": driver or "something other than right answers",
        "sort": driver or "reward",
    }
    return [Figure("reward_rise_without_answers", rise, words=words)]


LEAST_NOISE, NOISE_ERRORS, SOLVED_RISE = 0.02, 2.6, 0.01
"""A reward counts as risen if it has risen by more than LEAST_NOISE and by more than NOISE_ERRORS
standard errors; the share of right answers if it has risen by SOLVED_RISE."""


def _driver(totals: Mapping[str, Any], index: GroupTable) -> str:
    """Returns the name of the reward function whose rise, times its weight (1 if it is unknown),
    adds most to the reward; "" if none adds to it. `totals`: the first result of `_totals`, with
    `rise/<function>`."""
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
"""The most files and completions that are read, and the most characters of each completion."""

MANY_FLAGGED, LINT_SECONDS = 0.01, 0.3
"""The share of completions above which a finding is a warning, not a note; and the seconds for
which one request reads files."""

REPEATED_CHARS, REPEATED_RATIO = 40, 0.18
"""A text of at least REPEATED_CHARS characters repeats itself if its compressed size is below this
ratio of its size."""

TEXT_CHECKS: Mapping[str, tuple[str, str]] = {
    "no_answer": (
        "score best without giving an answer",
        "They have no <answer>, and no sibling has more reward.",
    ),
    "empty": ("are empty", "They hold no letter or digit, and fewer than 3 characters."),
    "wrong_best": (
        "are wrong and score as well as a right sibling",
        "The task says that they are wrong, but the reward does not.",
    ),
    "repeated": ("repeat themselves", "Their text shrinks to a fifth when compressed."),
    "many_answers": (
        "give several answers",
        "They have more than one <answer>, box or `####`: one of them may be right.",
    ),
}
"""Name of a check, which is also the kind of its finding -> (what the completions do that fail it,
how they were recognised)."""


@dataclass
class Flagged:
    """What one check found so far: how many completions, the sum of their rewards (a missing one
    counts as 0), and the examples with the highest rewards."""

    number: int = 0
    reward_sum: float = 0.0
    examples: list[dict[str, Any]] = field(default_factory=list)


class TextLint:
    """Reads completions from a sample of a run's files, a few files at each call of `read_on`, and
    counts those that look wrong. `findings` may be called at any time."""

    def __init__(self, index: GroupTable, has_tag: bool = True) -> None:
        """Chooses the files to read, among the training files that `index` has now. `has_tag`: True
        if the task's answers are in <answer> tags; if False, that is assumed only once a prompt
        mentions the tag."""
        self._index = index
        self.has_tag = has_tag
        self.completions = 0  # number of completions that were read
        self.reward_sum = 0.0  # over these; a missing reward counts as 0
        self.with_answer = 0  # number of these from which an answer can be read
        self.flags: dict[str, Flagged] = defaultdict(Flagged)  # by check
        files = []
        for stem in sorted(index.files):
            if stem.startswith("step_"):
                files.append(index.files[stem])
        chosen = [files[position] for position in _spread(len(files))]
        # At least 16 completions of each file.
        self._most_per_file = max(16, TEXT_COMPLETIONS // max(1, len(chosen)))
        self.num_files = len(chosen)
        self._left = chosen[::-1]  # files that were not read yet; the last one is read next
        self._lock = threading.Lock()

    @property
    def num_read(self) -> int:
        """Returns how many of the chosen files were read."""
        return self.num_files - len(self._left)

    def read_on(self) -> None:
        """Reads those of the chosen files that were not read yet, for about LINT_SECONDS, at least
        one. A file that is damaged or gone counts as read."""
        until = time.monotonic() + LINT_SECONDS
        with self._lock:
            while self._left and time.monotonic() < until:
                # If a file was replaced or is damaged, GroupTable reports it.
                with contextlib.suppress(self._index.database.error):
                    self._add(self._left[-1])
                self._left.pop()  # after the reading, because `num_read` counts what is left

    def _add(self, file: GroupFile) -> None:
        """Reads the completions of one file (its first `_most_per_file`), counts them, and counts
        for each check those that fail it. Sets `has_tag` if a prompt mentions the tag."""
        rows = self._index.database.rows(_TEXTS, str(file.path), self._most_per_file)
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
                self.reward_sum += row["reward"] or 0
                self.with_answer += extract_answer(row["text"]) is not None  # True counts as 1
                for check in _failed_checks(row, best, best_right):
                    self._flag(check, file, group, row)

    def _flag(self, check: str, file: GroupFile, group: int, row: Mapping[str, Any]) -> None:
        """Counts a completion (`row`) that fails a check, adds its reward to the sum of such
        rewards (a missing one counts as 0), and keeps it as an example if its reward is among the
        EXAMPLES highest. `group`: the number of its group in the file."""
        flag = self.flags[check]
        flag.number += 1
        flag.reward_sum += row["reward"] or 0
        flag.examples.append(
            {
                "file": file.stem,
                "group": group,
                "completion": row["completion"],
                "reward": row["reward"],
                "text": row["text"][:160],
            }
        )
        # The sort is stable: of examples with equal rewards the first ones are kept.
        flag.examples.sort(key=lambda example: -(example["reward"] or 0))
        del flag.examples[EXAMPLES:]

    def findings(self) -> list[dict[str, Any]]:
        """Returns a finding for each check that says something about this run (`_applies`), from
        what was read so far: "ok" if no completion fails it, "warning" if more than MANY_FLAGGED of
        them do, else "note". Returns [] if nothing was read."""
        if not self.completions:
            return []
        over = f"{count(self.completions, 'completion')} of {count(self.num_read, 'step')}"
        findings = []
        for check, (title, text) in TEXT_CHECKS.items():
            if not self._applies(check):
                continue
            flag = self.flags.get(check)
            if flag is None or not flag.number:
                findings.append(finding(check, "ok", f"No completions {title}.", f"Of {over}."))
                continue
            share = flag.number / self.completions
            if share >= 0.001:
                counted = f"{share:.1%} of completions {title} ({flag.number:,})"
            else:
                counted = f"{flag.number:,} of {count(self.completions, 'completion')} {title}"
            others = self.completions - flag.number
            rest = ""
            if others:
                rest = f", the others {(self.reward_sum - flag.reward_sum) / others:.3g}"
            mean = f"Their mean reward is {flag.reward_sum / flag.number:.3g}{rest}."
            level = "warning" if share > MANY_FLAGGED else "note"
            shown = f"Of {over}. {text} {mean}"
            findings.append(finding(check, level, counted, shown, examples=flag.examples))
        return findings

    def _applies(self, check: str) -> bool:
        """True if a check says something about this run. `no_answer` does only if answers stand in
        tags and most completions have an answer that can be read, `wrong_best` only if the task
        says which completions are right, all others always."""
        if check == "no_answer":
            return self.has_tag and self.with_answer >= self.completions / 2
        if check == "wrong_best":
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
"""SQL: the completions of one file. `tag` is True if the prompt mentions <answer>."""


def _spread(num_files: int) -> list[int]:
    """Returns the positions of the files that are read: at most TEXT_FILES of `num_files`, at equal
    distances, the first and the last included."""
    if not num_files:
        return []
    positions = set()
    for number in range(TEXT_FILES):
        positions.add(round(number * (num_files - 1) / max(1, TEXT_FILES - 1)))
    return sorted(positions)


def _failed_checks(
    row: Mapping[str, Any], best: float | None, best_right: float | None
) -> list[str]:
    """Returns the names of the checks of TEXT_CHECKS that a completion fails. `best`: the highest
    reward in its group; `best_right`: the highest among the right completions of the group. Both
    are None if there is none.

    no_answer: no answer can be read, and the reward is the highest and above 0
    empty: fewer than 3 characters that are no spaces, none of them a letter or a digit: `7` and `B`
      are answers
    wrong_best: it is wrong, and its reward is at least `best_right`
    repeated: see `repeats`; not for a text of fewer than REPEATED_CHARS characters
    many_answers: more than one <answer> with its end, \\boxed, or number behind `####`
    """
    text = row["text"]
    reward = row["reward"]
    failed = []
    is_best = reward is not None and reward == best and reward > 0
    if is_best and extract_answer(text) is None:
        failed.append("no_answer")
    characters = text.strip()
    if len(characters) < 3 and not any(char.isalnum() for char in characters):
        failed.append("empty")
    if row["correct"] is False and best_right is not None and reward is not None:
        if reward >= best_right:
            failed.append("wrong_best")
    if len(text) >= REPEATED_CHARS and repeats(text):
        failed.append("repeated")
    has_many_tags = text.count("<answer>") > 1 and text.count("</answer>") > 1
    if has_many_tags or text.count("\\boxed{") > 1 or num_behind_hashes(text) > 1:
        failed.append("many_answers")
    return failed


def repeats(text: str) -> bool:
    """True if a text repeats itself: compression makes it smaller than REPEATED_RATIO of its size.
    False for "". Short texts hardly shrink, so the result says little of them."""
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
"""Kinds of findings in the order in which they are shown; first those that say that rewards reward
something other than right answers."""


def lint(index: GroupTable, numbers: Sequence[dict[str, Any]], texts: TextLint) -> dict[str, Any]:
    """Returns the record of the Lint view: all `findings`, sorted by level and then by _KINDS, and
    how far the reading of texts has come: `read` of `files`, and `done`, True if all files were
    read and no groups wait to be indexed. `numbers`: the result of `number_findings`."""

    def rank(found: Mapping[str, Any]) -> tuple[int, int]:
        """Returns the sort key of a finding; one of an unknown kind is the last of its level."""
        kind = found["kind"]
        position = _KINDS.index(kind) if kind in _KINDS else len(_KINDS)
        return _LEVELS.index(found["level"]), position

    return {
        "findings": sorted([*numbers, *texts.findings()], key=rank),
        "done": texts.num_read == texts.num_files and not index.waiting,
        "read": texts.num_read,
        "files": texts.num_files,
    }
