"""Diagnosis of how a run learns: one table, `ROWS`, of findings that named figures show.

    training       figures of each step, and of each reward function     report/watch.py
    rescoring      of the stored groups under another reward             job/rescore.py
    the page       of all groups and curves: its lint, its verdict       commands/view/run.py
    before a run   scores of known answers                               checks/reward.py
    the doctor     a step on trial                                       commands/doctor.py

Each of these callers computes the figures that it can, and says how much evidence each rests on.
`diagnose` returns the rows of the table that apply. A row is all that a new warning needs; training
gives the warnings on a metric of a step while it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["note", "warning", "wrong"]
"""note: worth knowing. warning: something may be wrong. wrong: training cannot recover, or learns
nothing."""


@dataclass(frozen=True)
class Figure:
    """A named number, and the evidence that it rests on: the number of steps (in training: in a
    row), groups and completions that it was computed from. `words` fill the placeholders in a row's
    texts.

    >>> Figure("function/range", 0.0, steps=12, completions=192, subject="format", words={"low": 1})
    """

    name: str
    value: float
    steps: float = 1
    groups: int = 0
    completions: int = 0
    subject: str = ""  # name of the reward function that the figure describes; "" if none
    words: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Card:
    """How the page shows a row: its title, its title if nothing is wrong ("": no card then), and
    the filter and order of the groups that a link leads to. Among rows with the same `kind`, the
    page shows the first that applies."""

    kind: str
    title: str
    fine: str = ""
    filter: str = ""
    sort: str = ""


@dataclass(frozen=True)
class Row:
    """One finding of the table. It applies if its figure passes the bound and rests on enough
    evidence.

    `figure`, `comparison` and `bound` are the condition; `steps`, `groups` and `completions` the
    least evidence. `key` is the configuration key that helps, "" if none does; `card` says how the
    page shows the row, None: not at all. `symptom` is a heading of SYMPTOMS, written as in a link;
    "" if that page says nothing of it. `text` says what is wrong and `cure` what helps; both are
    templates over the figure's `words`, and over `value`, `subject`, `steps`, `least_steps`,
    `groups`, `completions`."""

    name: str
    figure: str
    comparison: Literal[">", ">=", "<=", "=="]
    bound: float
    text: str
    cure: str = ""
    key: str = ""
    level: Level = "warning"
    steps: int = 1
    groups: int = 0
    completions: int = 0
    card: Card | None = None
    symptom: str = ""

    def is_beyond_bound(self, value: float) -> bool:
        """True if `value comparison bound` holds, such as `value > 0.5`: then the finding applies,
        given enough evidence. False for NaN."""
        if self.comparison == ">":
            return value > self.bound
        if self.comparison == ">=":
            return value >= self.bound
        if self.comparison == "<=":
            return value <= self.bound
        return value == self.bound

    def has_evidence(self, figure: Figure) -> bool:
        """True if a figure rests on at least as many steps, groups and completions as the row asks
        for. Its name is not compared."""
        return (
            figure.steps >= self.steps
            and figure.groups >= self.groups
            and figure.completions >= self.completions
        )

    def holds(self, figure: Figure) -> bool:
        """True if the finding applies: the figure's value passes the bound, and rests on enough
        evidence."""
        return self.is_beyond_bound(figure.value) and self.has_evidence(figure)

    def fill(self, template: str, figure: Figure) -> str:
        """Returns a text of the row with its placeholders filled: `{value}`, `{subject}`,
        `{steps}`, `{groups}` and `{completions}` from the figure, `{least_steps}` from the row, all
        others from the figure's `words`. KeyError if a placeholder has no value."""
        words: dict[str, Any] = {
            "value": figure.value,
            "subject": figure.subject,
            "steps": figure.steps,
            "least_steps": self.steps,
            "groups": figure.groups,
            "completions": figure.completions,
        }
        words |= figure.words
        return template.format(**words)

    def sentence(self, figure: Figure) -> str:
        """Returns what is wrong and what helps, as "{text}: {cure}"; only the text if the row has
        no cure."""
        text = self.fill(self.text, figure)
        if self.cure:
            text += f": {self.fill(self.cure, figure)}"
        return text


@dataclass(frozen=True)
class Diagnosis:
    """A row that applies, with the figure that shows it."""

    row: Row
    figure: Figure

    @property
    def text(self) -> str:
        """A sentence that says what is wrong and what helps."""
        return self.row.sentence(self.figure)


RARE = 0.01
"""Largest share of completions above 0 at which a reward function counts as teaching next to
nothing."""

MOST = 0.5
"""Share of the completions, or of the groups, above which they count as most of them."""

_OF_FUNCTION = "check it (shoal rescore), or leave it out of reward.functions"

SYMPTOMS = "reward-does-not-move.md"
"""The page of the documentation that says what is behind each symptom."""

SKIPPED_UPDATES = "skipped"
"""Name of the row on updates that are skipped one after another."""

ROWS = (
    # ---- of a step: its metrics, in so many steps in a row
    Row(
        "no variance",
        "groups/nonzero_std",
        "==",
        0,
        "for {least_steps} steps no group has had completions with different rewards, so nothing "
        "has been learned",
        "use easier or harder questions, a larger batch.group_size, a higher "
        "sampling.temperature, or a reward with more levels",
        "batch.group_size",
        steps=5,
        symptom="the-reward-is-constant",
    ),
    Row(
        "no gradient",
        "gradient_of_differing_rewards",
        "==",
        0,
        "for {least_steps} steps the gradient has been 0 although rewards differ, so nothing has "
        "been learned",
        "with algorithm.mask_truncated the loss leaves out every completion that is cut off: raise "
        "sampling.max_completion_tokens, or turn it off",
        "algorithm.mask_truncated",
        steps=3,
        symptom="completions-are-cut-off",
    ),
    Row(
        "truncated",
        "truncated_where_updated",
        ">",
        MOST,
        "for {least_steps} steps more than half of the completions have been cut off at "
        "sampling.max_completion_tokens, or at an agent's max_tokens for its last turn",
        "raise it, or ask for shorter answers",
        "sampling.max_completion_tokens",
        steps=3,
        symptom="completions-are-cut-off",
    ),
    Row(  # here each update counts as a step
        SKIPPED_UPDATES,
        "skipped_without_an_update",
        ">",
        0,
        "{least_steps} updates in a row have been skipped, since their gradients were not finite",
        "lower optimizer.lr",
        "optimizer.lr",
        "wrong",
        steps=3,
        symptom="updates-are-skipped",
    ),
    Row(
        "old weights",
        "unchanged_after_an_update",
        ">",
        0,
        "an update was made, but the weights from before it were published (metric "
        "version/unchanged): completions are sampled from old weights, which is a fault of the "
        "program",
        level="wrong",
    ),
    Row(
        "one skipped",
        "skipped_not_finite",
        ">",
        0,
        "an update was skipped: its gradient was not finite (metric update/skipped)",
        key="optimizer.lr",
        symptom="updates-are-skipped",
    ),
    Row(
        "unscorable",
        "groups/unscorable",
        ">",
        0,
        "{value:.0f} of a step's groups have fewer than two completions with a score, so nothing "
        "is learned from them (metric groups/unscorable)",
        key="reward.functions",
    ),
    Row(
        "filled",
        "groups/filled",
        ">",
        0,
        "dynamic sampling found too few groups whose completions differ, so the step was filled "
        "with groups that it rejects: {value:.0f} (metric groups/filled)",
        "raise algorithm.max_sampling_rounds, change the data or algorithm.dynamic_sampling_by, or "
        "end such a run with algorithm.on_too_few_groups=stop",
        "algorithm.max_sampling_rounds",
        symptom="the-reward-is-constant",
    ),
    # ---- of an evaluation
    Row(
        "worse",
        "accuracy_below_first_while_reward_rises",
        ">",
        0,
        "after step {version} accuracy is {after:.1%}, in the first evaluation it was "
        "{before:.1%}: a loss of {points:.1f} points or more (95%)",
        "the reward rose, so it rewards something else: read completions, change reward.functions",
        "reward.functions",
        symptom="the-reward-rises-without-right-answers",
    ),
    Row(
        "worse",
        "accuracy_below_first",
        ">",
        0,
        "after step {version} accuracy is {after:.1%}, in the first evaluation it was "
        "{before:.1%}: a loss of {points:.1f} points or more (95%)",
        "lower optimizer.lr, or set algorithm.kl_coef",
        "optimizer.lr",
        symptom="the-reward-falls-after-some-steps",
    ),
    Row(
        "worse",
        "mean_reward_drop",
        ">",
        0,
        "after step {version} the mean reward of {questions} is {after:.3g}, in the first "
        "evaluation it was {before:.3g}: a loss of {value:.2g} or more (99%, by question)",
        "lower optimizer.lr, or set algorithm.kl_coef",
        "optimizer.lr",
        symptom="the-reward-falls-after-some-steps",
    ),
    Row(
        "below recipe",
        "recipe_shortfall",
        ">",
        0,
        "{differs}; below its band: {text}",
        symptom="a-run-is-below-its-recipe",
    ),
    # ---- of a reward function, over all steps so far
    Row(
        "constant",
        "function_range",
        "==",
        0,
        "reward function {subject} has given {low:g} to each of {completions:,.0f} completions, so "
        "nothing is learned from it",
        _OF_FUNCTION,
        "reward.functions",
        steps=10,
        completions=64,
        card=Card("unvarying", "{subject} never varies", filter="set=train"),
        symptom="the-reward-is-constant",
    ),
    Row(
        "constant",
        "function_share_above_0",
        "<=",
        RARE,
        "reward function {subject} has given 0 to {zeros:,.0f} of {completions:,.0f} completions, "
        "so next to nothing is learned from it",
        _OF_FUNCTION,
        "reward.functions",
        steps=10,
        completions=1000,
        symptom="the-reward-is-constant",
    ),
    Row(  # a curve does not say how many completions it rests on
        "unrewarded",
        "function_mean_by_step",
        "<=",
        RARE,
        "`{subject}` is 0 on nearly all completions",
        steps=5,
        symptom="the-reward-is-constant",
    ),
    # ---- of all groups of a run
    Row(
        "same reward",
        "distinct_rewards",
        "<=",
        1,
        "every completion has the same reward: it gives no training signal",
        key="reward.functions",
        symptom="the-reward-is-constant",
    ),
    Row(
        "constant groups",
        "constant_groups",
        ">",
        MOST,
        "{value:.0%} of {number} have one reward for all their completions and so give no "
        "training signal",
        "use easier or harder questions, or a larger batch.group_size",
        "batch.group_size",
        card=Card(
            "constant",
            "Most groups teach nothing",
            "Most groups have rewards that differ.",
            "set=train spread=0",
        ),
        symptom="the-reward-is-constant",
    ),
    Row(
        "mostly truncated",
        "truncated",
        ">",
        MOST,
        "they reached the token limit.{compared}",
        key="sampling.max_completion_tokens",
        card=Card(
            "truncated",
            "{value:.1%} of completions are cut off",
            filter="set=train truncated>0",
            sort="truncated",
        ),
        symptom="completions-are-cut-off",
    ),
    Row(
        "partly truncated",
        "truncated",
        ">=",
        0.01,
        "they reached the token limit.{compared}",
        key="sampling.max_completion_tokens",
        level="note",
        card=Card(
            "truncated",
            "{value:.1%} of completions are cut off",
            filter="set=train truncated>0",
            sort="truncated",
        ),
        symptom="completions-are-cut-off",
    ),
    Row(  # within groups, because an update acts on differences there
        "length within groups",
        "length_effect",
        ">=",
        0.3,
        "within groups whose rewards and lengths differ, they correlate by {effect:+.2f} on "
        "average, over {number} (over all completions: {overall})",
        "training then makes completions {longer}, whatever else it does",
        groups=10,
        card=Card(
            "length",
            "Within a group {longer} completions score better",
            "Reward hardly follows length.",
            "set=train {length_filter}",
            "length_effect",
        ),
        symptom="the-length-runs-off",
    ),
    Row(  # over all completions; harder questions may have longer answers, too
        "length",
        "length_rank_correlation",
        ">",
        0.5,
        "it correlates with length (rank correlation {correlation:+.2f})",
        "training may make completions {longer}, whether or not they get better",
        "reward.functions",
        symptom="the-length-runs-off",
    ),
    Row(
        "hacking",
        "reward_rise_without_answers",
        ">",
        0,
        "{change}",
        "{driver} is what rises; read groups with a high reward and no right answer",
        key="reward.functions",
        card=Card(
            "hacking",
            "The reward rises, the share of right answers does not",
            "Reward and right answers move together.",
            "set=train pass=0",
            "{sort}",
        ),
        symptom="the-reward-rises-without-right-answers",
    ),
    Row(
        "slow",
        "seconds_per_completion",
        ">",
        1.0,
        "it takes {value:.1f} s a completion",
        "sampling will wait for it",
        "reward.workers",
    ),
    Row(
        "none",
        "function_without_score",
        ">",
        0,
        "{subject} returned None for {number}",
        "only the other functions score them, or they are left out",
        "reward.functions",
    ),
    Row(
        "failed",
        "failed_completions",
        ">",
        0,
        "it failed ({kinds})",
        "{first_failure}",
        "reward.functions",
    ),
    # ---- of the scores of known answers, before a run
    Row(
        "same score",
        "distinct_scores",
        "<=",
        1,
        "of the answers tried {kinds} score {score}",
        "if the model's do too, nothing is learned; set reward.functions to one that scores them "
        "differently",
        "reward.functions",
        "wrong",
    ),
    Row(
        "same score",
        "distinct_scores_without_gold",
        "<=",
        1,
        "of the answers tried {kinds} score {score}",
        "if the model's do too, nothing is learned; set reward.functions to one that scores them "
        "differently",
        "reward.functions",
    ),
    Row(
        "empty answer",
        "empty_answer",
        ">",
        0,
        "an empty answer scores {value:.3g}",
        "the model may learn to say nothing; give it 0 or less",
        "reward.functions",
    ),
    Row(
        "wrong answer",
        "right_over_wrong",
        "<=",
        0,
        "the right answer scores {right}, a wrong one {wrong} (written as {form})",
        "make sure that the reward asks for what the data calls right",
        "reward.functions",
    ),
    Row(
        "repeated answer",
        "repeated_over_right",
        ">",
        0,
        "the right answer written {repeats} times scores {score:.3g}, more than once ({right:.3g})",
        "the model will repeat itself; count one answer only",
        "reward.functions",
    ),
    Row(  # an equal score is enough, because whoever gives many answers is never wrong
        "many answers",
        "many_over_right",
        ">=",
        0,
        "many answers at once, right and wrong, score {score:.3g}, no less than the right answer "
        "alone ({right:.3g})",
        "the model will guess; count one answer only",
        "reward.functions",
    ),
)


def figures_with_critic(figures: Iterable[Figure]) -> list[Figure]:
    """Returns the figures that say something where a critic judges groups: all but
    `constant_groups`, because it learns from groups with one reward too."""
    return [figure for figure in figures if figure.name != "constant_groups"]


def diagnose(figures: Iterable[Figure]) -> list[Diagnosis]:
    """Returns the rows that apply (`Row.holds`), each with the figure that shows it, in the order
    of the table; [] if none does. A row is returned once for each of its figures that it holds for,
    such as one for each reward function. Figures that no row is about are ignored."""
    by_name: dict[str, list[Figure]] = {}
    for figure in figures:
        by_name.setdefault(figure.name, []).append(figure)
    diagnoses = []
    for row in ROWS:
        for figure in by_name.get(row.figure, ()):
            if row.holds(figure):
                diagnoses.append(Diagnosis(row, figure))
    return diagnoses


def row_named(name: str) -> Row:
    """Returns the first row of ROWS with this name (`Row.name`, not `Row.figure`); a few names have
    two rows. KeyError if there is none."""
    for row in ROWS:
        if row.name == name:
            return row
    raise KeyError(name)
