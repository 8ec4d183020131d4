"""Compares two runs, from the settings to the first token that differs, and names the likely cause.

    data -> sampling -> rewards -> update      the stages of a step: a difference in one causes
                                               differences after it

The first difference belongs to one stage; the keys that differ and act on that stage are likely its
cause. Times and speeds are never compared.

Who compares what:

    shoal diff    `compare`: settings, metrics, and groups token by token
    shoal view    `chosen_differences` and `likely_keys`; it looks for the first completion that
                  differs with a database query on texts (`commands/view/groups.py`), because its
                  runs may be hostile or too large to be loaded
    a resume      `setting_differences` of the stored settings and the new request"""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shoal.buckets import address
from shoal.config.commands import stages_of
from shoal.config.key import keys_of, values_of
from shoal.config.sections.task import GENERATED_TASKS
from shoal.config.train import Config
from shoal.records import Completion
from shoal.runs.groups import StoredGroup, read_file
from shoal.runs.lines import json_ready
from shoal.runs.metrics import is_clock
from shoal.runs.reader import StoredRun
from shoal.runs.summary import version_text
from shoal.text import ranges

Values: TypeAlias = "dict[str, tuple[Any, Any]]"
"""Name -> (the first run's value, the second run's value)."""


DATA_KEYS = ("task.path", "task.eval_split")
"""Keys whose values are paths of data, of which several are separated by commas."""


@dataclass(frozen=True)
class SettingDifference:
    """A setting whose value is not the same in all of several runs.

    >>> SettingDifference("optimizer.lr", (1e-5, 1e-6)).stages
    ('update',)
    """

    key: str
    values: tuple[Any, ...]  # one for each run; None if a run has no such setting

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of a step that the setting acts on, the likeliest first; all stages if this
        version does not know the key."""
        return stages_of(self.key)


@dataclass(frozen=True)
class Divergence:
    """Where two runs diverge: the step, the stages that may be the cause, the likeliest first, and
    a sentence that says so."""

    step: int  # from 1; if an evaluation differs first, its version
    stages: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two runs, from their settings to the first token that differs.

    `identical`: True if nothing but times, speeds and settings differs in what both runs have, and
    if they have a step in common. `likely_keys`: those of the differing settings that act on the
    stages where the runs diverge, the likeliest first; [] if they do not diverge. Of each pair the
    first value is that of `run`, the second that of `other`."""

    run: str
    other: str
    identical: bool
    settings: Sequence[SettingDifference]
    num_steps: tuple[int, int]
    steps_compared: str  # as ranges: "1-5, 8"
    group_steps_compared: str
    finished: tuple[bool, bool]
    first_metrics: tuple[int, Values] | None  # the first step with metrics that differ, and these
    num_evaluations: tuple[int, int]
    evaluations_compared: int
    # version, data set, and the figures that differ
    first_evaluation: tuple[int, str, Values] | None
    first_group_difference: GroupDifference | None
    divergence: Divergence | None
    likely_keys: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison in JSON's own types, as `shoal.diff` returns it: the fields under
        their names, but `settings` as `config` (key -> both values), and of the divergence only the
        likeliest stage, as `stage`. The first metrics are {step, metrics}, the first evaluation is
        {version, name, figures}; a difference that there is not is None."""
        first_metrics = None
        if self.first_metrics:
            step, metrics = self.first_metrics
            first_metrics = {"step": step, "metrics": metrics}
        first_evaluation = None
        if self.first_evaluation:
            version, name, figures = self.first_evaluation
            first_evaluation = {"version": version, "name": name, "figures": figures}
        first_group_difference = None
        if self.first_group_difference:
            first_group_difference = asdict(self.first_group_difference)
        divergence = None
        if self.divergence:
            divergence = {
                "step": self.divergence.step,
                "stage": self.divergence.stages[0],
                "sentence": self.divergence.sentence,
            }
        return json_ready(
            {
                "run": self.run,
                "other": self.other,
                "identical": self.identical,
                "config": {differing.key: differing.values for differing in self.settings},
                "num_steps": self.num_steps,
                "steps_compared": self.steps_compared,
                "group_steps_compared": self.group_steps_compared,
                "finished": self.finished,
                "first_metrics": first_metrics,
                "num_evaluations": self.num_evaluations,
                "evaluations_compared": self.evaluations_compared,
                "first_evaluation": first_evaluation,
                "first_group_difference": first_group_difference,
                "divergence": divergence,
                "likely_keys": self.likely_keys,
            }
        )


def compare(a: StoredRun, b: StoredRun) -> Comparison:
    """Compares two runs: their settings, and the steps, groups and evaluations that both have.
    Groups are compared up to the first step whose metrics differ, and no further. Evaluations count
    as the divergence only if all steps are equal. ShoalError if a file that is compared is damaged,
    or if a run's settings cannot be read. Changes neither run."""
    metrics_a = a.metrics()
    metrics_b = b.metrics()
    evaluations_a = a.evaluations().by_version()
    evaluations_b = b.evaluations().by_version()
    settings = [values_of(a.config), values_of(b.config)]
    differing = chosen_differences(
        settings,
        [a.decided_keys, b.decided_keys],
        [folder_of_start(run.path, own) for run, own in zip((a, b), settings, strict=True)],
    )

    in_metrics = metric_difference(metrics_a, metrics_b)
    last_step = in_metrics[0] if in_metrics else None
    in_groups, group_steps = group_difference(a, b, last=last_step)
    version = None
    if in_groups and in_groups.stage == "sampling":
        version = a.groups(in_groups.step)[in_groups.group].group.version
    dropped = []
    for metrics in (metrics_a, metrics_b):
        dropped += [row.get("prompts/dropped") for row in metrics.values()]
    acting = without_idle_limits(differing, dropped)  # the settings that may be the cause
    feeds_back = _rewards_choose_prompts(a.config) or _rewards_choose_prompts(b.config)
    divergence = find_divergence(
        in_groups=in_groups,
        version=version,
        in_metrics=in_metrics,
        same_groups=group_steps,
        differing=acting,
        feeds_back=feeds_back,
    )
    in_evaluations = evaluation_difference(evaluations_a, evaluations_b)
    if divergence is None and in_evaluations:
        evaluated, name, _ = in_evaluations
        # The last update shows only in the weights, so it may be the cause, except of an evaluation
        # before training (version 0).
        stages = ("evaluation", "update") if evaluated else ("evaluation",)
        divergence = Divergence(
            evaluated,
            stages,
            f"the steps are identical, the evaluation {version_text(evaluated)} on {name} differs",
        )
    shared_steps = sorted(metrics_a.keys() & metrics_b.keys() | set(group_steps))
    return Comparison(
        run=address(a.path),
        other=address(b.path),
        identical=divergence is None and bool(shared_steps),
        settings=differing,
        num_steps=(len(metrics_a), len(metrics_b)),
        steps_compared=ranges(shared_steps),
        group_steps_compared=ranges(group_steps),
        finished=(a.is_finished, b.is_finished),
        first_metrics=in_metrics,
        num_evaluations=(len(evaluations_a), len(evaluations_b)),
        evaluations_compared=len(evaluations_a.keys() & evaluations_b.keys()),
        first_evaluation=in_evaluations,
        first_group_difference=in_groups,
        divergence=divergence,
        likely_keys=likely_keys(divergence.stages, acting) if divergence else [],
    )


def _rewards_choose_prompts(config: Config) -> bool:
    """True if rewards decide which prompts come next, because of dynamic sampling or a
    curriculum."""
    return config.algorithm.dynamic_sampling or config.train.retire_above < 1


# ---- what differs


def automatic_keys(settings: Mapping[str, Any], decided: Collection[str] = ()) -> set[str]:
    """Returns the keys of a run whose value nobody chose, or whose value has no effect: those that
    the run `decided` itself, and those on reading data, if the task generates its questions.

    `settings`: dotted key -> value. `decided`: the keys that the run decided itself. A key in the
    result need not be among the settings."""
    keys = set(decided)
    if settings.get("task.name") in GENERATED_TASKS and not settings.get("task.path"):
        keys.update(name for name, key in keys_of(Config).items() if key.acts_if == "data is read")
    return keys


def setting_differences(runs: Sequence[Mapping[str, Any]]) -> list[SettingDifference]:
    """Returns all settings that are not equal in all runs, in the order of the runs' settings.

    `runs`: for each run dotted key -> value; a key that a run lacks has the value None there."""
    keys: dict[str, None] = {}  # in order, each once
    for settings in runs:
        keys.update(dict.fromkeys(settings))
    differing = []
    for key in keys:
        values = tuple(settings.get(key) for settings in runs)
        if any(value != values[0] for value in values):
            differing.append(SettingDifference(key, values))
    return differing


def chosen_differences(
    runs: Sequence[Mapping[str, Any]],
    decided: Sequence[Collection[str]] = (),
    started_in: Sequence[Path] = (),
) -> list[SettingDifference]:
    """Returns `setting_differences` without the settings that somebody chose in none of the runs
    (`automatic_keys`), without those that a run of an older version lacks and the others leave at
    their default, and without those that name the same files by other paths.

    `decided`: for each run the keys that it decided itself; none if it is left out. `started_in`:
    for each run the folder in which its relative paths begin (`folder_of_start`); if it is left
    out, paths are compared as they were typed."""
    decided = decided or [()] * len(runs)
    automatic_by_run = []
    for settings, own in zip(runs, decided, strict=True):
        automatic_by_run.append(automatic_keys(settings, own))
    differing = []
    for difference in setting_differences(runs):
        is_automatic = all(difference.key in automatic for automatic in automatic_by_run)
        if is_automatic or _is_new_default(difference.key, runs):
            continue
        if started_in and _names_same_files(difference, started_in):
            continue
        differing.append(difference)
    return differing


def folder_of_start(path: Path, settings: Mapping[str, Any]) -> Path:
    """Returns the folder that a run was started in, which is the one above its
    base_output_directory; the present folder if that is absolute, or if the run was moved. `path`:
    the run's folder; `settings`: its dotted key -> value. Reads no file."""
    absolute = Path(os.path.abspath(path))
    run_name = str(settings.get("run_name") or "")
    own = run_name or "/".join(absolute.parts[-2:])  # without a name: DATE/TIME
    within = Path(os.path.normpath(Path(str(settings.get("base_output_directory") or ".")) / own))
    num_parts = len(within.parts)
    if within.is_absolute() or absolute.parts[-num_parts:] != within.parts:
        return Path.cwd()
    return Path(*absolute.parts[:-num_parts])


def _names_same_files(difference: SettingDifference, started_in: Sequence[Path]) -> bool:
    """True if the setting names data or code, and its values are the same paths, each from the
    folder that its run was started in. `FILE:FUNCTION` counts as a path."""
    key = keys_of(Config).get(difference.key)
    if difference.key not in DATA_KEYS and not (key and key.names_code):
        return False
    paths = []
    for value, folder in zip(difference.values, started_in, strict=True):
        texts = value.split(",") if isinstance(value, str) else value
        if not texts or not isinstance(texts, list | tuple):
            return False
        paths.append([os.path.normpath(folder / str(text)) for text in texts])
    return all(own == paths[0] for own in paths)


def _is_new_default(key: str, runs: Sequence[Mapping[str, Any]]) -> bool:
    """True if some runs lack the key, because their version did not have it, and all others have
    its default."""
    known = keys_of(Config).get(key)
    values = [settings[key] for settings in runs if key in settings]
    if known is None or len(values) == len(runs):
        return False
    default = json_ready(known.default)
    return all(json_ready(value) == default for value in values)


def metric_difference(
    a: Mapping[int, Mapping[str, Any]], b: Mapping[int, Mapping[str, Any]]
) -> tuple[int, Values] | None:
    """Returns the first shared step with a metric that differs, and all metrics of that step that
    differ, as name -> both values; None if none does. Times and speeds do not count; a metric that
    only one run has does, with None as the other value. `a`, `b`: step -> metrics of a run."""
    for step in sorted(a.keys() & b.keys()):
        row_a = a[step]
        row_b = b[step]
        differing = {}
        for name in {**row_a, **row_b}:
            values = (row_a.get(name), row_b.get(name))
            if not is_clock(name) and values[0] != values[1]:
                differing[name] = values
        if differing:
            return step, differing
    return None


def evaluation_difference(
    a: Mapping[tuple[int, str], Mapping[str, Any]], b: Mapping[tuple[int, str], Mapping[str, Any]]
) -> tuple[int, str, Values] | None:
    """Returns the first shared (version, data set) with a figure that differs, and all figures that
    do, as name -> both values; None if none does. Only figures that both runs have count, and no
    times and speeds. `a`, `b`: (version, data set) -> figures of a run."""
    for version, name in sorted(a.keys() & b.keys()):
        figures_a = a[version, name]
        figures_b = b[version, name]
        differing = {}
        for key in figures_a:
            if key not in figures_b or is_clock(key):
                continue
            if figures_a[key] != figures_b[key]:
                differing[key] = (figures_a[key], figures_b[key])
        if differing:
            return version, name, differing
    return None


# ---- what caused it


def find_divergence(
    in_groups: GroupDifference | None,
    version: int | None,
    in_metrics: tuple[int, Mapping[str, Any]] | None,
    same_groups: Container[int],
    differing: Sequence[SettingDifference] = (),
    feeds_back: bool = False,
) -> Divergence | None:
    """Returns the first step at which two runs diverge, with the stages that may be the cause and a
    sentence; None if nothing differs. A difference in groups decides, if there is one, because it
    names its stage; else the names of the metrics that differ do.

    `in_groups`, `in_metrics`: the first differences in groups and in metrics; None if there is
    none. `version`: the version that sampled the group that differs; None if it is unknown or does
    not matter, because not the sampling differs. `same_groups`: the steps whose groups were
    compared; all before the difference are equal, and without `in_groups` all of them are.
    `differing`: the settings that differ. `feeds_back`: True if rewards choose prompts (dynamic
    sampling, a curriculum)."""
    if in_groups:
        step = in_groups.step
        stage = in_groups.stage
        if in_groups.what in OF_ENVIRONMENTS:
            stage = "environment"
        stages = (stage,)
        text = _SENTENCES[stage]
        if stage == "data" and feeds_back:  # then each stage of an earlier step may be the cause
            stages = ("data", "rewards", "sampling", "update")
        # Version 0 has the weights of before training, which no update has changed. If the same
        # tokens end at another place, a limit or a stop string caused that, not the weights.
        if version and in_groups.what in ("token", "log-prob"):
            stages, text = _weights_or_sampling(version, same_groups, differing)
    elif in_metrics:
        step = in_metrics[0]
        names = list(in_metrics[1])
        samples = ("sampling", "environment", "data")
        # An earlier update shows only in the weights and in what follows from them.
        before = ("rewards", "update") if step > 1 else ()
        if step in same_groups:  # data, samples and rewards are equal, so only the update is left
            stages = ("update",)
            text = _SENTENCES["update"]
        elif any(name.startswith(("completions/", "prompts/", "tokens/sampled")) for name in names):
            stages = samples + before
            text = "sampling or the data differs first"
        elif any(name.startswith(("reward/", "rewards/")) for name in names):
            stages = ("rewards", *samples, *before)
            text = "rewards or samples differ first"
        else:
            stages = ("update", *samples, "rewards")
            text = "the update or samples differ first"
    else:
        return None
    return Divergence(step, stages, f"{text}, at step {step}")


_SENTENCES = {
    "data": "the data or its order differs first",
    "sampling": "sampling differs first",
    "environment": "what tools or environments said differs first",
    "rewards": "rewards differ first, for the same completions",
    "update": "the update differs first, for the same completions and rewards",
}


def _weights_or_sampling(
    version: int, same_groups: Container[int], differing: Sequence[SettingDifference]
) -> tuple[tuple[str, ...], str]:
    """Returns (stages, sentence) if tokens differ first that were sampled from `version` > 0. Then
    the sampling may differ, or the weights, because of an earlier update. Sampling comes first if a
    setting that acts on it differs; else the update does, which is certain if the groups of all
    earlier steps are equal."""
    if likely_keys(("sampling",), differing):
        return ("sampling", "update"), "sampling or the weights differ first"
    if not all(before in same_groups for before in range(1, version + 1)):
        return ("update", "sampling"), (
            f"the weights or sampling differ first (not all groups of steps 1 to {version} were "
            "compared)"
        )
    return ("update", "sampling"), (
        f"the weights differ first, by the update at the end of step {version}, which was "
        f"equal in all else: version {version} sampled"
    )


def without_idle_limits(
    differing: Sequence[SettingDifference], dropped: Iterable[float | None]
) -> list[SettingDifference]:
    """Returns the differing settings that may have changed a step. Those that act only on prompts
    that are too long are left out, if no prompt was dropped, and if another setting remains that
    acts on steps; else all are returned.

    `dropped`: the number of dropped prompts of each step of both runs; None, if the number is
    unknown, counts as 0."""
    has_dropped = any(number and number > 0 for number in dropped)
    known = keys_of(Config)
    others = []
    for difference in differing:
        key = known.get(difference.key)
        if key is None or key.acts_if != "a prompt is too long":
            others.append(difference)
    if act_on_steps(others) and not has_dropped:
        return others
    return list(differing)


def likely_keys(stages: Iterable[str], differing: Sequence[SettingDifference]) -> list[str]:
    """Returns the keys of the differing settings that act on these stages (`stages=` in a key's
    declaration), each once, stage by stage; within a stage, first the keys that act mainly on it,
    then by their order in the schema. A key that this version does not know acts on all stages."""
    order = {name: number for number, name in enumerate(keys_of(Config))}
    likely: dict[str, None] = {}  # in order, each once
    for stage in stages:
        # `stage` is a default, because the loop gives the variable another value.
        def rank(difference: SettingDifference, stage: str = stage) -> tuple[int, int]:
            """Returns the sort key of a setting: the position of the stage among its stages, then
            the position of its key in the schema."""
            return difference.stages.index(stage), order.get(difference.key, len(order))

        acting = [difference for difference in differing if stage in difference.stages]
        for difference in sorted(acting, key=rank):
            likely[difference.key] = None
    return list(likely)


def act_on_steps(differing: Iterable[SettingDifference]) -> bool:
    """True if one of the settings changes a step's numbers: if it acts on a stage other than
    "evaluation". False if there are none."""
    for difference in differing:
        if any(stage != "evaluation" for stage in difference.stages):
            return True
    return False


def of_other_scores(differing: Iterable[SettingDifference]) -> tuple[list[str], list[str]]:
    """Returns (keys that ask other questions, keys that give other rewards for the same answers)
    among settings that differ; see `incomparable`."""
    of_questions = []
    of_rewards = []
    for difference in differing:
        stages = difference.stages
        if difference.key not in keys_of(Config) or not stages:
            continue
        if stages[0] == "data" and "rewards" in stages:
            of_questions.append(difference.key)
        elif stages[0] == "rewards":
            of_rewards.append(difference.key)
    return of_questions, of_rewards


def incomparable(differing: Iterable[SettingDifference]) -> str:
    """Returns a sentence that says what cannot be compared between runs that differ in these
    settings; "" if everything can. If both questions and rewards differ, the sentence is the one on
    questions. Keys that this version does not know do not count.

    If the first stage of a key is "data" and it also acts on rewards, the runs ask other questions.
    If its first stage is "rewards", the runs give other rewards for the same answers."""
    of_questions, of_rewards = of_other_scores(differing)
    if of_questions:
        return (
            f"these runs differ in {', '.join(of_questions)}: their rewards, accuracies, groups "
            "and lengths are of other questions and cannot be compared; the other curves can"
        )
    if of_rewards:
        return (
            f"these runs differ in {', '.join(of_rewards)}: their rewards cannot be compared; "
            "accuracies, lengths and the other curves can"
        )
    return ""


# ---- the groups


@dataclass(frozen=True)
class GroupDifference:
    """The first difference between two runs' groups. `what` names the thing that differs, such as
    "data row", "token", "log-prob", "reward" or "advantage"; `values` are both runs' values, None
    if a run has nothing at that place."""

    step: int  # from 1
    stage: str  # one of GROUP_STAGES
    what: str
    group: int  # number of the group in its file, from 0; this and the next two count from 0
    completion: int | None = None  # None: the difference is of the whole group
    token: int | None = None  # None: the difference is of the whole completion
    values: tuple[Any, Any] = (None, None)


def group_difference(
    a: StoredRun, b: StoredRun, last: int | None = None
) -> tuple[GroupDifference | None, list[int]]:
    """Compares the groups of the steps that both runs stored, in order, up to the first step that
    differs and not beyond step `last` (None: to the end). Returns (first difference or None, the
    steps that were compared, also the one that differs). ShoalError if a file is damaged."""
    files_a = a.group_files()
    files_b = b.group_files()
    compared = []
    for step in sorted(files_a.keys() & files_b.keys()):
        if last is not None and step > last:
            break
        compared.append(step)
        difference = step_difference(step, read_file(files_a[step]), read_file(files_b[step]))
        if difference:
            return difference, compared
    return None, compared


def step_difference(
    step: int, a: Sequence[StoredGroup], b: Sequence[StoredGroup]
) -> GroupDifference | None:
    """Returns the first difference between the groups of one step in two runs (`a`, `b`); None if
    they are equal. The data of all groups is compared first, then what was sampled in all groups,
    then rewards, then what the update computed: an earlier stage may be the cause of a later
    difference in another group. If one run has more groups, that is a difference of the data, after
    those within groups: `what` is "number of groups", and `group` the first number that only one
    run has."""
    # `compare` yields the differences of a stage; only the first one is used.
    for stage, compare in _STAGES.items():
        for number, (x, y) in enumerate(zip(a, b, strict=False)):
            for what, completion, token, values in compare(x, y):
                return GroupDifference(
                    step=step,
                    stage=stage,
                    what=what,
                    group=number,
                    completion=completion,
                    token=token,
                    values=values,
                )
        if stage == "data" and len(a) != len(b):
            return GroupDifference(
                step, stage, "number of groups", min(len(a), len(b)), values=(len(a), len(b))
            )
    return None


OF_ENVIRONMENTS = ("token of an environment's prompt", "context token", "message")
"""Values of `GroupDifference.what` if tools or environments said something else after the same
sampled tokens."""

Differences: TypeAlias = "Iterator[tuple[str, int | None, int | None, tuple[Any, Any]]]"
"""Yields each difference between two groups in one stage: (what differs, index of the completion,
index of the token, both values)."""

NOTHING = np.zeros(0)


def _data(a: StoredGroup, b: StoredGroup) -> Differences:
    """Yields the differences of two groups in data row, prompt tokens and data columns."""
    x = a.group
    y = b.group
    if x.example.row != y.example.row:
        yield "data row", None, None, (x.example.row, y.example.row)
    prompt = first_difference(x.prompt_ids, y.prompt_ids)
    if prompt:
        token, values = prompt
        yield "prompt token", None, token, values
    if x.example.columns != y.example.columns:
        yield "data column", None, None, (dict(x.example.columns), dict(y.example.columns))


def _sampling(a: StoredGroup, b: StoredGroup) -> Differences:
    """Yields the differences of two groups in what was sampled and in what tools and environments
    said, completion by completion: in the prompts that environments began or rewrote, then the
    first difference in tokens, log-probs, length or stop reason, or, if there is none, in messages.
    Then in the number of completions, and in the version that sampled them."""
    for number, (x, y) in enumerate(zip(a.group.completions, b.group.completions, strict=False)):
        of_environments = first_difference(_environment_prompts(x), _environment_prompts(y))
        if of_environments:
            token, values = of_environments
            yield OF_ENVIRONMENTS[0], number, token, values
        difference = completion_difference(x, y)
        if difference is None:
            if x.messages != y.messages:
                yield OF_ENVIRONMENTS[2], number, None, _first_messages(x, y)
            continue
        what, token = difference
        if what == "stop reason":
            yield what, number, None, (x.stop_reason.value, y.stop_reason.value)
        elif what == "log-prob":
            yield what, number, token, _values(x.logprobs, y.logprobs, token)
        else:
            # A token outside the loss mask was not sampled: a tool or an environment said it.
            if what == "token" and not (x.loss_mask[token] and y.loss_mask[token]):
                what = OF_ENVIRONMENTS[1]
            yield what, number, token, _values(x.token_ids, y.token_ids, token)
    sizes = (a.group.size, b.group.size)
    if sizes[0] != sizes[1]:
        yield "number of completions", min(sizes), None, sizes
    if a.group.version != b.group.version:
        yield "version", None, None, (a.group.version, b.group.version)


def _environment_prompts(completion: Completion) -> np.ndarray:
    """Returns the tokens of a completion's own prompt, if an environment began it differently, and
    of its branches' prompts, joined; empty if it has only the group's prompt."""
    parts = [NOTHING]  # np.concatenate needs at least one array
    if completion.prompt_ids is not None:
        parts = [completion.prompt_ids]
    for branch in completion.branches:
        parts.append(branch.prompt_ids)
    return np.concatenate(parts)


def _first_messages(a: Completion, b: Completion) -> tuple[str, str]:
    """Returns the first message that differs between two completions whose messages are not all
    equal, as the text of a list with that message, for both; "[]" for a completion that has no
    message there."""
    number = 0
    for of_a, of_b in zip_longest(a.messages, b.messages):
        if of_a != of_b:
            break
        number += 1
    return str(a.messages[number : number + 1]), str(b.messages[number : number + 1])


def _rewards(a: StoredGroup, b: StoredGroup) -> Differences:
    """Yields the first difference of two groups in each array of rewards: the total ("reward"),
    each function ("rewards/format"), and which completions are valid ("valid"). A function that
    only one group has differs at completion 0."""
    x = a.group
    y = b.group
    compared = [("reward", x.rewards, y.rewards)]
    for name in {**x.reward_components, **y.reward_components}:
        of_a = x.reward_components.get(name, NOTHING)
        of_b = y.reward_components.get(name, NOTHING)
        compared.append((f"rewards/{name}", of_a, of_b))
    compared.append(("valid", x.valid, y.valid))
    for what, of_a, of_b in compared:
        difference = first_difference(of_a, of_b)
        if difference:
            completion, values = difference
            yield what, completion, None, values
    yield from _of_turns("reward", x.turn_rewards, y.turn_rewards)


def _of_turns(what: str, a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> Differences:
    """Yields the first turn of each completion at which values by turn differ ("reward of turn 2").
    Without values by turn, `a` or `b` is empty."""
    for number, (of_a, of_b) in enumerate(zip_longest(a, b, fillvalue=NOTHING)):
        difference = first_difference(of_a, of_b)
        if difference:
            turn, values = difference
            yield f"{what} of turn {turn + 1}", number, None, values


def _update(a: StoredGroup, b: StoredGroup) -> Differences:
    """Yields the first difference of two groups in their advantages, and in each array that the
    trainer computed for a completion, such as its log-probs."""
    advantages_a = NOTHING if a.advantages is None else a.advantages
    advantages_b = NOTHING if b.advantages is None else b.advantages
    difference = first_difference(advantages_a, advantages_b)
    if difference:
        completion, values = difference
        yield "advantage", completion, None, values
    yield from _of_turns("advantage", a.turn_advantages, b.turn_advantages)
    # strict: groups with different numbers of completions differ in an earlier stage, "sampling".
    for number, (of_a, of_b) in enumerate(zip(a.token_arrays, b.token_arrays, strict=True)):
        for name in {**of_a, **of_b}:
            difference = first_difference(of_a.get(name, NOTHING), of_b.get(name, NOTHING))
            if difference:
                token, values = difference
                yield name, number, token, values


_STAGES = {"data": _data, "sampling": _sampling, "rewards": _rewards, "update": _update}

GROUP_STAGES = tuple(_STAGES)
"""The stages of a step that a stored group shows, in order: a difference in one causes differences
in those after it."""


def completion_difference(a: Completion, b: Completion) -> tuple[str, int] | None:
    """Returns (what differs first between two completions, index of its token); None if they are
    equal bit for bit. If a token differs in its id and its log-prob, that is a "token". Length and
    stop reason count only if all shared tokens and log-probs are equal, and stop reason only if the
    lengths are; their index is the end of the shorter completion. Messages are not compared.

    >>> completion_difference(stored, sampled)      # or "log-prob", "length", "stop reason"
    ('token', 17)
    """
    shared = min(len(a), len(b))
    ids = a.token_ids[:shared] != b.token_ids[:shared]
    # Compared as bits: NaN equals itself, and 0.0 differs from -0.0.
    logprobs = a.logprobs[:shared].view(np.uint32) != b.logprobs[:shared].view(np.uint32)
    if (ids | logprobs).any():
        token = int(np.argmax(ids | logprobs))  # the first True
        return "token" if ids[token] else "log-prob", token
    if len(a) != len(b):
        return "length", shared
    if a.stop_reason != b.stop_reason:
        return "stop reason", shared
    return None


def first_difference(a: np.ndarray, b: np.ndarray) -> tuple[int, tuple[Any, Any]] | None:
    """Returns (first index at which two arrays differ, both values there); None if they are equal.
    NaN equals NaN. If one array is the beginning of the other, they differ at its end, where its
    value is None."""
    shared = min(len(a), len(b))
    same = a[:shared] == b[:shared]
    if a.dtype.kind == "f":
        same |= np.isnan(a[:shared]) & np.isnan(b[:shared])
    if not same.all():
        index = int(np.argmin(same))  # the first False
    elif len(a) != len(b):
        index = shared
    else:
        return None
    return index, _values(a, b, index)


def _values(a: np.ndarray, b: np.ndarray, index: int) -> tuple[Any, Any]:
    """Returns both arrays' values at an index as Python's own types, None beyond an array's end."""
    of_a = a[index].item() if index < len(a) else None
    of_b = b[index].item() if index < len(b) else None
    return of_a, of_b
