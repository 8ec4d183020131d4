"""`shoal replay`: a stored group drawn again from its address, and whether it is the one that was stored.

    version of the group -> nearest checkpoint before it, or the first weights -> learnt again from the stored groups
                         -> the run's own compiled sampler -> tokens and log-probs, compared bit for bit

Each step is learnt again under the settings of the part of the run that made it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config.text import require_given, to_dict
from shoal.config.schema import Config, MeshSection, ReplayConfig
from shoal.mesh import Roles, make_roles
from shoal.model import hf
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformer import Model
from shoal.report.console import Console
from shoal.report.difference import changes_of_settings
from shoal.report.folder import find_run
from shoal.report.groups import StoredGroup
from shoal.report.lines import json_ready
from shoal.report.reading import at_version, figure, group_files, ranges, read_file, read_parts, read_stored
from shoal.rollout.group import sample_request
from shoal.rollout.publication import publish_to
from shoal.run.assembly import LoadedModel, make_model, open_model, open_teacher, training_engines
from shoal.run.learning import make_learner, make_updater
from shoal.run.resume import machine
from shoal.run.task import load_task
from shoal.sampler.engine import drain
from shoal.trainer.checkpoint import FOLDER, MODEL_FOLDER, Restored, restore, versions
from shoal.trainer.loop import sampling_params
from shoal.trainer.step import Learner, ModelScorer, TrainState
from shoal.trainer.update import Updater, UpdateResult
from shoal.types import Completion, Example, Group, GroupRequest, Params, Purpose, ShoalError


def replay(config: ReplayConfig, console: Console | None = None, name: str = "step") -> dict[str, Any]:
    """Draws group `config.group` of `groups/<name>_<config.step>` again; `identical` says whether tokens, log-probs and
    ends are those that were stored, `difference` where they first part."""
    require_given(config, "run")
    with console or Console() as console:
        run = find_run(config.run)
        stored = _pick(read_stored(run, config.step, name), config, run)
        job = Replayed.open(run, stored.group, config.mesh, console)
        prompt = check_prompt(run, job.config, stored.group)
        if not prompt["same"]:
            console.warning(f"the prompt: {prompt['reason']}")
        params, weights = job.weights(stored.group.version)
        drawn = job.draw(stored.group, params)
        difference = first_difference(stored.group.completions, drawn, job.tokenizer.token_text)
        result = {
            "run": run, "step": config.step, "group": config.group, "version": stored.group.version,
            "identical": difference is None, "difference": difference, "weights": weights, "prompt_check": prompt,
            "row": stored.group.example.row, "prompt": stored.group.example.prompt,
            "columns": stored.group.example.columns,
            "completions": [_completion(stored, i, drawn[i], job.tokenizer) for i in range(stored.group.size)],
        }
        result = json_ready(result | {"run": str(run)})
        _show(result, console)
    return result


def _pick(groups: Sequence[StoredGroup], config: ReplayConfig, run: Path) -> StoredGroup:
    if config.group >= len(groups):
        raise ShoalError(f"group={config.group}: step {config.step} of {run} has {len(groups)} groups, "
                         f"0 to {len(groups) - 1}")
    return groups[config.group]


@dataclass
class Replayed:
    """A run's own model, tokenizer and devices, taken from its folder. `config` holds the settings that the group was
    drawn under; `parts` those of each part of the run, by the version that it began with."""

    run: Path
    config: Config
    parts: Mapping[int, Config]
    roles: Roles
    opened: LoadedModel
    console: Console
    extras: Mapping[int, Mapping[str, Any]]  # of checkpoints, by version
    _updaters: list[tuple[Config, Updater]] = field(default_factory=list)  # of the part in hand

    @classmethod
    def open(cls, run: Path, group: Group, mesh: MeshSection, console: Console) -> Replayed:
        """On the run's own mesh, unless another was named."""
        parts = read_parts(run)
        config = at_version(parts, group.step if group.purpose is Purpose.TRAIN else group.step - 1)
        roles = make_roles(config.mesh if mesh == MeshSection() else mesh)
        folder = run / MODEL_FOLDER
        opened = LoadedModel(folder, hf.architecture_of(folder), Tokenizer.load(folder), dict)
        return cls(run, config, parts, roles, opened, console, read_extras(run))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.opened.tokenizer

    def model(self, config: Config) -> Model:
        return make_model(config.model, self.opened, self.roles.trainer, config.batch.micro_tokens)

    # -- weights

    def weights(self, version: int) -> tuple[Params, dict[str, Any]]:
        """The sampler's parameters of any version, and how they were come by.

        `verified`: whether the trainer's log-probs stored of the step after them are those that they give; None where
        there are none, or nothing was learnt again."""
        found = self._nearest(version)
        start, state = (found.version, found.state) if found else (0, None)
        source = f"checkpoint {start}" if start else f"first weights ({self.config.model.path})"
        provenance: dict[str, Any] = {"from": source, "steps_learnt_again": version - start, "updates_learnt_again": 0,
                                 "parted": None, "verified": None, "machine": self._machine_changes(start, version),
                                 "settings": self._settings_changes()}
        learns = version > start
        kl = any(at_version(self.parts, step).algorithm.kl_coef > 0 for step in range(start, version + 1))
        first = self._first() if state is None or (kl and learns) else None
        updater = self._updater(start, first, learns)
        state = updater.learner.init(first) if state is None else state
        if learns:
            self.console.note(f"version {version} has no checkpoint: learning again from the stored groups of step "
                              f"{ranges(range(start + 1, version + 1))}, from {provenance['from']}")
            before = int(state.updates)
            for step in range(start, version):
                state = self._learn(self._updater(step, first), state, read_stored(self.run, step + 1), step, provenance)
            provenance["updates_learnt_again"], provenance["verified"] = int(state.updates) - before, None
        params = publish_to(self.model(self.config).on(self.roles.sampler), state.trainable)
        if learns and (file := group_files(self.run).get(version + 1)):  # its log-probs are those before its update
            self._learn(self._updater(version, first), state, read_file(file), version, provenance)
        return params, provenance

    def _nearest(self, version: int) -> Restored | None:
        """The newest whole checkpoint up to `version`; None where there is none: then the run's first weights serve."""
        for saved in sorted((v for v in versions(self.run) if v <= version), reverse=True):
            try:
                return restore(self.run, saved, self._learner(at_version(self.parts, saved)))
            except ShoalError as error:
                self.console.warning(f"{error}; the one before it is used")
        return None

    def _first(self) -> Params:
        return open_model(self.config.model, self.roles.trainer, self.console).load()

    def _learner(self, config: Config) -> Learner:
        return make_learner(config, self.model(config))

    def _updater(self, version: int, first: Params | None, has_teacher: bool = True) -> Updater:
        """Of the step from `version` to the next; compiled anew where a part of the run begins. `has_teacher`: a teacher is
        opened where there is one."""
        config = at_version(self.parts, version)
        if not self._updaters or self._updaters[-1][0] is not config:
            teacher = self._teacher(config) if has_teacher else None
            self._updaters[:] = [(config, make_updater(config, self._learner(config), first, teacher))]
        return self._updaters[-1][1]

    def _teacher(self, config: Config) -> ModelScorer | None:
        return open_teacher(config, self.opened, self.roles.reference, self.console)

    def _learn(self, updater: Updater, state: TrainState, stored: Sequence[StoredGroup], step: int,
               provenance: dict[str, Any]) -> TrainState:
        """One step's updates. The trainer's log-probs are compared with the stored: they show where weights part."""
        state, outcome = updater.update(state, [entry.group for entry in stored], step)
        provenance["verified"] = _same_logprobs(stored, outcome)
        if provenance["parted"] is None and provenance["verified"] is False:
            provenance["parted"] = step + 1
            self.console.warning(f"learning step {step + 1} again gives other log-probs than the run's trainer had: "
                                 "this machine, its threads or versions differ, or the settings or first weights have "
                                 "changed since")
        return state

    # -- what has changed

    def _machine_changes(self, start: int, version: int) -> dict[str, list[str]]:
        """Against the checkpoint that is begun with, else the first one after `version`, else any."""
        order = sorted(self.extras, key=lambda saved: (saved != start, saved < version, saved))
        return machine_changes(self.extras[order[0]]["facts"]["machine"]) if order else {}

    def _settings_changes(self) -> dict[str, list[Any]]:
        """Key -> the values that it had in the run, in order, as its parts and its checkpoints tell."""
        newest = max(self.extras, default=0)  # config.yaml, where it stands for all parts
        told = [(start if len(self.parts) > 1 else newest, 1, json_ready(to_dict(config)))
                for start, config in self.parts.items()]
        told += [(saved, 0, extra["config"]) for saved, extra in self.extras.items() if "config" in extra]
        return changes_of_settings(nested for _, _, nested in sorted(told, key=lambda one: one[:2]))

    # -- sampling

    def draw(self, group: Group, params: Params) -> list[Completion]:
        """The group's completions from its address, by a sampler compiled as the run's own was."""
        c = self.config
        engine = training_engines(c, self.model(c).on(self.roles.sampler), self.tokenizer)(group.size)
        chosen = sampling_params(c.sampling)
        if group.purpose is Purpose.EVALUATE and group.size == 1:
            chosen = chosen.as_greedy()
        request = GroupRequest(group.purpose, group.step, group.version, group.example, group.prompt_ids, group.size,
                               chosen, group.subset)
        engine.load(group.version, params)
        engine.submit([sample_request(request, 0, c.seed)])
        drawn = drain(engine)
        return [drawn[0, index] for index in range(group.size)]


def read_extras(run: Path) -> dict[int, dict[str, Any]]:
    """What each checkpoint of a run tells beside its arrays; damaged ones tell nothing."""
    found = {}
    for version in versions(run):
        try:
            found[version] = json.loads((run / FOLDER / str(version) / "extra" / "metadata").read_bytes())
        except (OSError, ValueError):
            continue
    return {version: extra for version, extra in found.items() if "facts" in extra}


def _same_logprobs(stored: Sequence[StoredGroup], outcome: UpdateResult) -> bool | None:
    """None where there are none to compare with."""
    compared = 0
    for number, entry in enumerate(stored):
        for index, arrays in enumerate(entry.token_arrays):
            there, now = arrays.get("trainer_logprobs"), outcome.logprobs.get((number, index))
            if (there is None) != (now is None):
                return False
            if there is not None and np.asarray(now, np.float32).tobytes() != there.tobytes():
                return False
            compared += there is not None
    return True if compared else None


def check_prompt(run: Path, config: Config, group: Group) -> dict[str, Any]:
    """Whether the data row and the template give now what was stored: `same` and the `reason` where not."""
    try:
        task = load_task(config.task)
        rows = task.train if group.purpose is Purpose.TRAIN else task.evaluations[group.subset]
        example = _example(rows, group.example.row)
        ids = Tokenizer.load(run / MODEL_FOLDER, config.model.template).encode_prompt(
            example.prompt if example else group.example.prompt)
    except (ShoalError, KeyError) as error:
        return {"same": False, "reason": f"it cannot be made again ({error}); the stored tokens are taken"}
    row, reason = group.example.row, ""
    if example is None:
        reason = f"the data has no row {row} any more"
    elif json_ready(example.prompt) != group.example.prompt:
        reason = f"row {row} of the data is another prompt now: the data has changed"
    elif not np.array_equal(ids, group.prompt_ids):
        reason = "the same messages are other tokens now: the chat template or the tokenizer has changed"
    elif changed := _changed(json_ready(example.columns), group.example.columns):
        reason = f"row {row} has the same prompt, but {', '.join(changed)} changed: rewards would be others"
    return {"same": not reason, "reason": reason and f"{reason}; the stored tokens are taken"}


def _example(rows: Sequence[Example], row: int) -> Example | None:
    if row < len(rows) and rows[row].row == row:
        return rows[row]
    return next((example for example in rows if example.row == row), None)


def _changed(now: dict[str, Any], stored: Any) -> list[str]:
    return sorted(name for name in {*now, *stored} if now.get(name) != stored.get(name))


def machine_changes(saved: Mapping[str, str]) -> dict[str, list[str]]:
    """What of the machine is not as it was when the run saved its checkpoint: name -> [then, now]."""
    return {name: [saved.get(name, "unknown"), value] for name, value in machine().items() if saved.get(name) != value}


# ---- comparing and telling


def first_difference(stored: Sequence[Completion], drawn: Sequence[Completion],
                     token_text: Callable[[int], str]) -> dict[str, Any] | None:
    """Where two draws of a group first part; None where tokens, log-probs and ends are the same bits."""
    for a, b in zip(stored, drawn, strict=True):
        shared = min(len(a), len(b))
        same = (a.token_ids[:shared] == b.token_ids[:shared]) & (
            a.logprobs[:shared].view(np.uint32) == b.logprobs[:shared].view(np.uint32))
        if same.all() and len(a) == len(b) and a.stop_reason == b.stop_reason:
            continue
        at = int(np.argmin(same)) if not same.all() else shared
        found = {"completion": a.index, "token": at, "kind": _kind(a, b, at)}
        for name, one in (("stored", a), ("drawn", b)):
            found[name] = {"id": int(one.token_ids[at]), "text": token_text(int(one.token_ids[at])),
                           "logprob": one.logprobs[at]} if at < len(one) else None
        if found["stored"] and found["drawn"]:
            found["logprob_difference"] = float(b.logprobs[at]) - float(a.logprobs[at])
        return json_ready(found | {"stop_reasons": [a.stop_reason, b.stop_reason]})
    return None


def _kind(a: Completion, b: Completion, at: int) -> str:
    if at >= min(len(a), len(b)):
        return "stop reason" if len(a) == len(b) else "length"
    return "token" if a.token_ids[at] != b.token_ids[at] else "log-prob"


def _completion(stored: StoredGroup, i: int, drawn: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    group, completion = stored.group, stored.group.completions[i]
    trainer = stored.token_arrays[i].get("trainer_logprobs")
    return {
        "index": i, "identical": first_difference([completion], [drawn], tokenizer.token_text) is None,
        "text": group.texts[i], "drawn_text": tokenizer.decode(drawn.token_ids.tolist()),
        "stop_reason": completion.stop_reason, "reward": group.rewards[i],
        "components": {name: values[i] for name, values in group.reward_components.items()},
        "valid": group.valid[i], "correct": None if group.correct is None else group.correct[i],
        "advantage": None if stored.advantages is None else stored.advantages[i],
        "tokens": [{"id": int(id), "text": tokenizer.token_text(int(id)), "logprob": completion.logprobs[t],
                    "trainer_logprob": None if trainer is None else trainer[t]}
                   for t, id in enumerate(completion.token_ids)],
    }


def _show(result: dict[str, Any], console: Console) -> None:
    console.heading(f"step {result['step']}, group {result['group']}: data row {result['row']}, version "
                    f"{result['version']} from {result['weights']['from']}")
    names = list(result["completions"][0]["components"])
    console.table(("completion", "tokens", "end", *names, "reward", "advantage", "identical"), [
        (str(c["index"]), str(len(c["tokens"])), c["stop_reason"], *(figure(c["components"][name]) for name in names),
         figure(c["reward"]), figure(c["advantage"]), "yes" if c["identical"] else "no")
        for c in result["completions"]])
    for c in result["completions"]:
        console.text(f"completion {c['index']}, each token with its log-prob (the sampler's, and the trainer's where "
                     "it differs):")
        console.text("    " + " ".join(map(_token, c["tokens"])))
    console.text(_verdict(result), "bold")
    if not result["identical"]:
        for what, (then, now) in result["weights"]["machine"].items():
            console.warning(f"{what} is {now or 'not set'}, it was {then or 'not set'} in the run: bits may differ")
        for key, values in result["weights"]["settings"].items():
            console.warning(f"{key} changed in the run ({', then '.join(map(str, values))}): where config.yaml alone "
                            "tells the settings, earlier steps are learnt again with the last")


def _token(token: dict[str, Any]) -> str:
    there = f"{token['logprob']:.3f}" if token["logprob"] is not None else "-"
    trainer = token["trainer_logprob"]
    return f"{token['text']!r}({there}" + (f"|{trainer:.3f}" if trainer is not None and f"{trainer:.3f}" != there
                                           else "") + ")"


def _verdict(result: dict[str, Any]) -> str:
    d = result["difference"]
    if d is None:
        again = result["weights"]["updates_learnt_again"]
        learnt = f", its weights learnt again in {again} update{'s' * (again > 1)}" if again else ""
        return f"identical: drawn again bit for bit{learnt}"
    weights = result["weights"]
    unknown = weights["steps_learnt_again"] and weights["verified"] is None
    place = (f"not identical{' (weights not verified: no later log-probs are stored)' * bool(unknown)}: "
             f"completion {d['completion']}, token {d['token']}: ")
    if d["kind"] == "token":
        return place + (f"{d['stored']['text']!r} ({d['stored']['id']}) was stored, {d['drawn']['text']!r} "
                        f"({d['drawn']['id']}) is drawn")
    if d["kind"] == "log-prob":
        return place + f"the same token, its log-prob is {d['logprob_difference']:+.3g} away from the stored"
    return place + f"the stored completion ends by {d['stop_reasons'][0]}, the drawn one by {d['stop_reasons'][1]}"
