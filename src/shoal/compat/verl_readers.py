"""Readers of verl's flags: each returns the values of Shoal's keys for one flag, or for several
flags together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from shoal.compat import flags
from shoal.compat.flags import (
    FlagTexts,
    KeyValues,
    Yielding,
    last_part,
    to_bool,
    to_float,
    to_int,
    value_of_option,
)
from shoal.config.choices import REJECTIONS
from shoal.config.sections.task import names_file
from shoal.records import ShoalError

NO_LIMIT_OF_ROUNDS = 1000
"""Value of algorithm.max_sampling_rounds where verl samples without a limit."""

clip = flags.read_bounds("clip_ratio", "clip_ratio_low", "clip_ratio_high")

_OFF = Yielding("0")
_MODES: dict[str, KeyValues] = {
    "vanilla": {"algorithm.loss": "grpo"},
    "gspo": {"algorithm.loss": "gspo-token", "algorithm.clip_dual": _OFF},
    "geo_mean": {"algorithm.loss": "gmpo", "algorithm.clip_dual": _OFF},
    "cispo": {
        "algorithm.loss": "cispo",
        "algorithm.cispo_bound": "both",
        "algorithm.clip_dual": _OFF,
    },
    "sapo": {"algorithm.loss": "sapo", "algorithm.clip_dual": _OFF},
}
_OWN_MEAN = ("geo_mean", "sapo")
_AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def read_lora(given: FlagTexts) -> KeyValues:
    """Converts the flags of an adapter to model.lora. With lora_adapter_path model.lora.path and
    algorithm.reference=base are set, and nothing else, because the adapter in the folder has its
    own rank, alpha and targets. Without a rank (or with 0) and without a folder there is no
    adapter, and nothing is set. By default alpha is 16 and the targets are all matrices."""
    named = last_part(given)
    path = named.get("lora_adapter_path")
    if path:
        # verl's reference is the actor with the adapter switched off, although the adapter may have
        # learned something before the run.
        return {"model.lora.path": path, "algorithm.reference": "base"}
    if named.get("lora_rank", "0") == "0":
        return {}
    alpha = named.get("lora_alpha", "16")
    targets = named.get("target_modules", "all-linear")
    return flags.lora_values(named["lora_rank"], alpha, targets)


def read_loss(given: FlagTexts) -> KeyValues:
    """Converts loss_mode to algorithm.loss, with what that loss fixes in verl (no dual clip, both
    bounds for cispo), and loss_agg_mode to algorithm.aggregation; what is not given is not set.
    geo_mean and sapo average over completions whatever loss_agg_mode says; verl's gspo has a
    gradient for each token, so it is gspo-token here. Only vanilla has a dual clip
    (rules.verl_dual_clip). ShoalError for an unknown value."""
    named = last_part(given)
    mode = named.get("loss_mode", "")
    values = {}
    if mode:
        values.update(value_of_option("loss_mode", mode, _MODES))
    aggregation = named.get("loss_agg_mode", "")
    if aggregation:
        _check_known("loss_agg_mode", aggregation, _AGGREGATIONS)
        values["algorithm.aggregation"] = aggregation
    if mode in _OWN_MEAN:
        values["algorithm.aggregation"] = "seq-mean-token-mean"
    return values


def _check_known(name: str, text: str, known: Iterable[str]) -> None:
    """Raises ShoalError if a text is not one of those known. `name`: the flag's, for the error."""
    value_of_option(name, text, dict.fromkeys(known))


_PLAIN = {"algorithm.kl_clamp_input": "0", "algorithm.kl_clamp_value": "0"}
_LOW_VAR = {
    "algorithm.kl": "k3",
    "algorithm.kl_clamp_input": "20",
    "algorithm.kl_clamp_value": "10",
}
_ESTIMATES: dict[str, KeyValues] = {
    "kl": {"algorithm.kl": "k1", **_PLAIN},
    "k1": {"algorithm.kl": "k1", **_PLAIN},
    "mse": {"algorithm.kl": "k2", **_PLAIN},
    "k2": {"algorithm.kl": "k2", **_PLAIN},
    "low_var_kl": _LOW_VAR,
    "k3": _LOW_VAR,
}


def read_divergence(given: FlagTexts) -> KeyValues:
    """Converts the flags of KL divergence to algorithm.kl_coef, kl_placement, kl and its clamps.
    verl has two places for it, the loss and the reward, each with a switch, a coefficient (0.001)
    and an estimator; ShoalError if both are on. If both are off, the coefficient is 0; if neither
    switch is given, it is 0 unless anything else sets it. Unless the reward's switch is on,
    kl_loss_type sets the estimator."""
    named = last_part(given)
    in_loss = to_bool("use_kl_loss", named.get("use_kl_loss", "false"))
    in_reward = to_bool("use_kl_in_reward", named.get("use_kl_in_reward", "false"))
    if in_loss and in_reward:
        raise ShoalError(
            "use_kl_loss and use_kl_in_reward are both on, and there is one divergence at a time: "
            "switch one of them off"
        )
    if in_reward:
        estimate = value_of_option(
            "algorithm.kl_penalty", named.get("kl_penalty", "kl"), _ESTIMATES
        )
        return {
            "algorithm.kl_coef": given.get("algorithm.kl_ctrl.kl_coef", "0.001"),
            "algorithm.kl_placement": "reward",
            **estimate,
        }
    values: dict[str, Any] = {}
    if in_loss:
        values["algorithm.kl_coef"] = named.get("kl_loss_coef", "0.001")
        values["algorithm.kl_placement"] = "loss"
    elif "use_kl_loss" in named or "use_kl_in_reward" in named:
        values["algorithm.kl_coef"] = "0"
    else:
        values["algorithm.kl_coef"] = Yielding("0", to_all=True)
    if "kl_loss_type" in named:
        values.update(value_of_option("kl_loss_type", named["kl_loss_type"], _ESTIMATES))
    return values


_ESTIMATORS = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
    "gdpo": "gdpo",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "gigpo": "",  # which one is gigpo.mode's
    "gae": "gae",
}
_GIGPO_MODES = {"mean_norm": "dr_grpo", "mean_std_norm": "grpo"}


_OF_CRITIC = {
    "critic.model.path": "critic.path",
    "critic.optim.lr": "critic.lr",
    "critic.cliprange_value": "critic.value_clip",
    "trainer.critic_warmup": "critic.warmup_steps",
}
"""Flag of verl -> the key that gets its value, with the estimator gae."""


def read_estimator(given: FlagTexts) -> KeyValues:
    """Converts the advantage estimator to algorithm.advantage and whiten_over, with gae also the
    flags of the critic, and one completion of each prompt if nothing else says how many; without it
    these count nothing, as in verl, but must not leave the policy as it is at first (ShoalError).
    Whether advantages are divided by the deviation matters only for grpo (without it dr_grpo); the
    others but rloo whiten over tokens. Division by the deviation is the default: given alone, it
    sets grpo only if nothing else sets an estimator. gigpo, of verl-agent, also sets
    algorithm.credit, and divides if algorithm.gigpo.mode, which only it reads, says so (by default
    not)."""
    name, flag = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    mode = "algorithm.gigpo.mode"
    if given.get(name) == "gae":
        values: dict[str, Any] = {
            "algorithm.advantage": "gae",
            "batch.group_size": Yielding("1", to_users=True),
            "critic.lr": Yielding("1e-5", to_all=True),
        }
        for own, key in _OF_CRITIC.items():
            if own in given and given[own].lower() not in flags.NOTHING:
                values[key] = given[own]
        return values
    if to_bool("critic.enable", given.get("critic.enable") or "false"):
        raise ShoalError("critic.enable=true: expected algorithm.adv_estimator=gae with it")
    warmup = given.get("trainer.critic_warmup", "0")
    if warmup.lower() not in flags.NOTHING and float(warmup):
        raise ShoalError(
            f"trainer.critic_warmup={warmup}: expected 0, or algorithm.adv_estimator=gae, which "
            "has a critic"
        )
    if given.get(name) == "gigpo":
        advantage = value_of_option(mode, given.get(mode, "mean_norm"), _GIGPO_MODES)
        return {"algorithm.advantage": advantage, "algorithm.credit": "state"}
    if name not in given and flag not in given:
        return {}
    advantage = value_of_option(name, given.get(name, "grpo"), _ESTIMATORS)
    by_deviation = to_bool(flag, given.get(flag, "true"))
    if advantage == "grpo":
        reads_flag = given.get(name) != "grpo_vectorized"
        if reads_flag and not by_deviation:
            return {"algorithm.advantage": "dr_grpo"}
        if name in given or not by_deviation:
            return {"algorithm.advantage": "grpo"}
        return {"algorithm.advantage": Yielding("grpo", to_all=True)}
    if advantage == "rloo":
        return {"algorithm.advantage": "rloo"}
    return {"algorithm.advantage": advantage, "algorithm.whiten_over": "tokens"}


def read_correction(given: FlagTexts) -> KeyValues:
    """Converts the flags of importance weights between sampler and trainer to algorithm.correction,
    its level, cap and floor. A threshold `2.0` (the default) truncates the weights (tis); `0.5_2.0`
    sets weights outside of these bounds to 0 (mis). With bypass_mode the loss uses the ratio to the
    sampler's log-probs, without weights (direct). If rollout_is is None, the correction is none; a
    threshold without rollout_is makes it none unless anything else sets it. Without both nothing is
    set. ShoalError for what Shoal does not have."""
    named = last_part(given)
    if to_bool("bypass_mode", named.get("bypass_mode", "false")):
        prefix = "algorithm.rollout_correction."
        if named.get("loss_type", "ppo_clip") != "ppo_clip":
            raise ShoalError(
                f"{prefix}loss_type={named['loss_type']}: expected ppo_clip, the clipped ratio to "
                "the sampler's log-probs"
            )
        if named.get("rollout_rs", "null").lower() not in flags.NOTHING:
            raise ShoalError(
                f"{prefix}rollout_rs={named['rollout_rs']} with bypass_mode=true: it compares the "
                "weights of each update with the sampler's there, those of the step here; leave "
                "one of them out"
            )
        return {"algorithm.correction": "direct"}
    if not {"rollout_is", "rollout_is_threshold"} & named.keys():
        return {}
    level = named.get("rollout_is", "null")
    if level.lower() in flags.NOTHING:
        if "rollout_is" in named:
            return {"algorithm.correction": "none"}
        return {"algorithm.correction": Yielding("none", to_all=True)}
    _check_known("algorithm.rollout_correction.rollout_is", level, ("token", "sequence"))
    # `low` is '' if the threshold is one number.
    low, _, high = named.get("rollout_is_threshold", "2.0").strip("'\"").rpartition("_")
    return {
        "algorithm.correction": "mis" if low else "tis",
        "algorithm.correction_level": level,
        "algorithm.correction_cap": high,
        "algorithm.correction_floor": low or "0",
    }


def read_rejection(given: FlagTexts) -> KeyValues:
    """Converts rollout_rs, the rule that removes tokens or completions from the loss, and its
    threshold, to algorithm.rejection and its bounds. If the rule is None, the rejection is none; if
    no rule is given, it is none unless anything else sets it. verl's bounds of k1 are for the
    sampler's probability divided by the trainer's; here they are for the inverse, so they are
    inverted. ShoalError for an unknown rule, or a threshold that does not fit it."""
    flag = "algorithm.rollout_correction.rollout_rs"
    rule = given.get(flag, "null")
    text = given.get(f"{flag}_threshold", "null").strip("'\"")
    if rule.lower() in flags.NOTHING:
        if flag in given:
            return {"algorithm.rejection": "none"}
        return {"algorithm.rejection": Yielding("none", to_all=True)}
    # verl's text for several rules at once is none of these, and so an error.
    _check_known(flag, rule, [known for known in REJECTIONS if known != "none"])
    is_k1 = rule.endswith("k1")
    low, _, high = text.rpartition("_")
    if text.lower() in flags.NOTHING or (low and not is_k1):
        raise ShoalError(
            f"{flag}={rule} needs {flag}_threshold: a number, or low_high with k1 (given: {text})"
        )
    bounds = [to_float(f"{flag}_threshold", bound) for bound in (low, high) if bound]
    if min(bounds) <= 0:
        raise ShoalError(f"{flag}_threshold={text}: expected numbers above 0")
    if not is_k1:
        cap = bounds[-1]
        floor = "-1"  # the default; only k1 reads it
    elif low:
        cap = 1 / bounds[0]
        floor = repr(1 / bounds[-1])
    else:
        # If there is only one bound, verl's lower bound is its inverse; the cap is the inverse of
        # that, equal to the bound up to its last bit.
        cap = 1 / (1 / bounds[0])
        floor = repr(1 / bounds[0])
    return {
        "algorithm.rejection": rule,
        "algorithm.rejection_cap": repr(cap),
        "algorithm.rejection_floor": floor,
    }


def _gpus(section: str, given: FlagTexts) -> str:
    """Returns the number of devices, as text: nnodes (1 if not given) times n_gpus_per_node (8 if
    not given). `section`: the flags' section, for errors. ShoalError if one is no whole number of 1
    or more."""
    named = last_part(given)
    each = to_int(f"{section}.n_gpus_per_node", named.get("n_gpus_per_node", "8"))
    nodes = to_int(f"{section}.nnodes", named.get("nnodes", "1"))
    return str(each * nodes)


def read_gpus(given: FlagTexts) -> KeyValues:
    """Converts the number of GPUs, nnodes (by default 1) times n_gpus_per_node (by default 8), to
    mesh.trainer, and sets mesh.fsdp=-1, so that all of them share the parameters. The sampler uses
    the same unless it has its own."""
    return {"mesh.trainer": _gpus("trainer", given), "mesh.fsdp": "-1"}


def read_sampler_gpus(given: FlagTexts) -> KeyValues:
    """Converts the number of GPUs that fully_async_policy and one_step_off_policy reserve for the
    sampler, rollout.nnodes (by default 1) times rollout.n_gpus_per_node (by default 8), to
    mesh.sampler."""
    return {"mesh.sampler": _gpus("rollout", given)}


def read_batch(name: str, text: str) -> KeyValues:
    """Converts data.train_batch_size to batch.prompts_per_step. 0, which fully_async_policy
    requires, counts only if nothing else in its layer sets the prompts of a step."""
    if text == "0":
        return {"batch.prompts_per_step": Yielding("0")}
    return {"batch.prompts_per_step": text}


def read_reward_file(given: FlagTexts) -> KeyValues:
    """Converts custom_reward_function.path, name and reward_kwargs to reward.functions, a list with
    `PATH:NAME` (by default compute_score) or `PATH:NAME(KEY=VALUE, ...)`; an empty path sets
    nothing. ShoalError if a name or an argument is given without a path, or if an argument's name
    is none of Python's."""
    named: dict[str, str] = {}
    arguments: dict[str, Any] = {}
    for flag, text in given.items():
        _, of_arguments, entry = flag.partition("custom_reward_function.reward_kwargs")
        if not of_arguments:
            named[flag.rpartition(".")[2]] = text
        elif entry:
            _add_argument(arguments, flag, entry.removeprefix("."), text)
        else:
            arguments |= flags.json_object(flag, text)
    if "path" in named and named["path"].lower() in flags.NOTHING:
        return {}
    if "path" not in named:
        if "name" not in named and not arguments:
            return {}
        raise ShoalError(
            f"{next(iter(given))} needs custom_reward_function.path, the file that defines the "
            "function"
        )
    function = f"{named['path']}:{named.get('name', 'compute_score')}"
    if arguments:
        listed = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        function += f"({listed})"
    return {"reward.functions": [function]}


def _add_argument(arguments: dict[str, Any], flag: str, entry: str, text: str) -> None:
    """Adds to a function's arguments the value of `entry`, the name behind `reward_kwargs.`; one
    with a dot is an entry of a dictionary. ShoalError if the argument's name is none of Python's.
    `flag`: the whole name, for the error."""
    *outer, name = entry.split(".")
    inner = arguments
    for key in outer:
        inner = inner.setdefault(key, {})
    inner[name] = _value_of(text)
    if not entry.partition(".")[0].isidentifier():
        raise ShoalError(f"{flag}={text}: expected the name of an argument after reward_kwargs")


def _value_of(text: str) -> Any:
    """Returns what JSON reads in a text, else True, False or None; of `[a,b]` a list of such
    values; else the text."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    if text.startswith("[") and text.endswith("]"):
        return [_value_of(item) for item in flags.items_of(text)]
    return {"True": True, "False": False, "None": None}.get(text, text)


def read_betas(name: str, text: str) -> KeyValues:
    """Converts AdamW's betas, `[0.9,0.999]`, to optimizer.beta1 and beta2; ShoalError unless they
    are two texts, which are not checked. `name`: the flag's, for the error."""
    numbers = flags.items_of(text)
    if len(numbers) != 2:
        raise ShoalError(f"{name}={text}: expected two numbers")
    return {"optimizer.beta1": numbers[0], "optimizer.beta2": numbers[1]}


def read_train_files(name: str, text: str) -> KeyValues:
    """Converts data.train_files, Parquet files: one file becomes task.path; for several, task.path
    is the folder above them all, and task.files has their paths in it. The task is `custom` unless
    something else names one. ShoalError if no file is named, or if some paths are absolute and
    others are not."""
    files = flags.items_of(text)
    if not files or text == "null":
        raise ShoalError(f"{name}={text}: expected a file, or a list of files")
    return {"task.name": Yielding("custom", to_all=True), **flags.values_of_files(name, files)}


def read_val_files(name: str, text: str) -> KeyValues:
    """Converts data.val_files, Parquet files, to task.eval_split: their paths with commas between
    them. ShoalError if no file is named."""
    files = flags.items_of(text)
    if not files:
        raise ShoalError(f"{name}={text}: expected a file, or a list of files")
    paths = []
    for file in files:
        paths.append(file if names_file(file) else f"./{file}")  # else it would name a split
    return {"task.eval_split": ",".join(paths)}


def read_columns(given: FlagTexts) -> KeyValues:
    """Converts the names of the columns with the prompts and with what reward functions get as
    data_source to task.columns. Both names that Shoal expects too rename nothing, and yield to all
    other settings."""
    named = last_part(given)
    renamed = []
    for flag, own in (("prompt_key", "prompt"), ("reward_fn_key", "data_source")):
        theirs = named.get(flag, own)
        if theirs != own:
            renamed.append(f"{own}={theirs}")
    return {"task.columns": renamed or Yielding([], to_all=True)}


def read_loggers(name: str, text: str) -> KeyValues:
    """Converts the list of loggers (console, file, wandb, tensorboard, mlflow, trackio) to
    mode=auto of each under `report`, and report.tensorboard=true; console and file set nothing,
    since each run prints its figures and writes metrics.jsonl. ShoalError for a system that Shoal
    does not report to."""
    known = {
        "console": {},
        "file": {},
        "wandb": {"report.wandb.mode": "auto"},
        "tensorboard": {"report.tensorboard": "true"},
        "mlflow": {"report.mlflow.mode": "auto"},
        "trackio": {"report.trackio.mode": "auto"},
    }
    values: dict[str, Any] = {}
    for item in flags.items_of(text):
        if item not in known:
            raise ShoalError(
                f"{name}={text}: {item} is not supported; expected some of {', '.join(known)}"
            )
        values.update(known[item])
    return values


def read_filter(name: str, text: str) -> KeyValues:
    """Converts filter_groups.enable to algorithm.dynamic_sampling. If it is on, a step that lacks
    groups ends the run, and there is no limit of rounds, unless something else says otherwise."""
    if not to_bool(name, text):
        return {"algorithm.dynamic_sampling": "false"}
    return {
        "algorithm.dynamic_sampling": "true",
        "algorithm.on_too_few_groups": Yielding("stop"),
        "algorithm.max_sampling_rounds": Yielding(str(NO_LIMIT_OF_ROUNDS), to_all=True),
    }


_METRICS = {
    # The reward function's `acc` where it returns one, else the task's own verdict.
    "acc": "correct",
    "seq_reward": "reward",
    "seq_final_reward": "reward",
}


def read_metric(name: str, text: str) -> KeyValues:
    """Converts filter_groups.metric, what must vary in a group, to algorithm.dynamic_sampling_by:
    sums of rewards by their name here, any other entry of what the reward function returns by its
    own."""
    return {"algorithm.dynamic_sampling_by": _METRICS.get(text, text)}
