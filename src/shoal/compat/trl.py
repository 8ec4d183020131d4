"""The table of TRL 1.16: flags of GRPOConfig, SFTConfig and PPOConfig (trl.experimental.ppo), of
the TrainingArguments under them, and of its scripts."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shoal.compat import flags, rules
from shoal.compat.flags import (
    Flag,
    FlagTexts,
    KeyValues,
    Yielding,
    counts_with,
    derived,
    grouped,
    idle,
    only,
    reads,
    refused,
    template_variables,
    to_bool,
    value_of_option,
)
from shoal.config.names import QUANTISED
from shoal.records import ShoalError

read_clip = flags.read_bounds("epsilon", "", "epsilon_high")

_LOSS_TYPES = {
    "grpo": ("grpo", "seq-mean-token-mean"),
    "bnpo": ("grpo", "token-mean"),
    "dapo": ("grpo", "token-mean"),
    "dr_grpo": ("grpo", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "luspo": ("grpo", "seq-mean-token-sum"),
    "nll": ("", ""),
}
_LEVELS = {"token": "", "sequence": "gspo", "sequence_token": "gspo-token"}


def read_loss(given: FlagTexts) -> KeyValues:
    """Converts loss_type (how token losses become one number, and for some also which loss) and
    importance_sampling_level (whether a token's or a completion's ratio is clipped) to
    algorithm.loss, algorithm.aggregation and, for cispo, algorithm.cispo_bound. What neither says
    is not set; the type `nll` says nothing. ShoalError for an unknown value, or if the level is not
    `token` and the loss has a ratio of its own."""
    loss_type, level = given.get("loss_type", ""), given.get("importance_sampling_level", "token")
    loss, aggregation = "", ""
    if loss_type:
        loss, aggregation = value_of_option("loss_type", loss_type, _LOSS_TYPES)
    loss_of_level = value_of_option("importance_sampling_level", level, _LEVELS)
    if loss_of_level and loss not in ("grpo", ""):
        raise ShoalError(
            f"importance_sampling_level={level} with loss_type={loss_type}: expected token, the "
            "loss has a ratio of its own"
        )
    loss = loss_of_level or loss
    values = {
        "algorithm.loss": loss,
        "algorithm.aggregation": aggregation,
        "algorithm.cispo_bound": "absolute" if loss == "cispo" else "",
    }
    return {key: text for key, text in values.items() if text}


_SCALES = {
    "group": "grpo",
    "true": "grpo",
    "batch": "batch_std",
    "none": "dr_grpo",
    "false": "dr_grpo",
}


def read_advantage(given: FlagTexts) -> KeyValues:
    """Converts scale_rewards (by default `group`) to algorithm.advantage. With
    multi_objective_aggregation=normalize_then_sum it is gdpo, whatever scale_rewards says.
    ShoalError for an unknown value of either; only in scale_rewards upper and lower case are the
    same."""
    # text -> whether each reward function is normalised by itself
    orders = {"sum_then_normalize": False, "normalize_then_sum": True}
    name = "multi_objective_aggregation"
    if value_of_option(name, given.get(name, "sum_then_normalize"), orders):
        return {"algorithm.advantage": "gdpo"}
    scale = given.get("scale_rewards", "group").lower()
    return {"algorithm.advantage": value_of_option("scale_rewards", scale, _SCALES)}


_DTYPES = {
    "auto": "",
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}


def read_dtype(given: FlagTexts) -> KeyValues:
    """Converts bf16 and fp16, switches that are off by default, to model.dtype: bfloat16, float16,
    float32 if both are off, ShoalError if both are on. If neither is on, the type that the model is
    loaded in there (`dtype` and its other names) is that of the computation; `auto` says nothing.
    ShoalError for another type."""
    bf16 = to_bool("bf16", given.get("bf16", "false"))
    fp16 = to_bool("fp16", given.get("fp16", "false"))
    if bf16 and fp16:
        raise ShoalError("bf16=true fp16=true: expected one of them, the type of the computation")
    if fp16:
        return {"model.dtype": "float16"}
    if bf16:
        return {"model.dtype": "bfloat16"}
    loaded = [(name, text) for name, text in given.items() if name not in ("bf16", "fp16")]
    for name, text in reversed(loaded):  # of several names the last counts
        dtype = value_of_option(name, text.removeprefix("torch."), _DTYPES)
        if dtype:
            return {"model.dtype": dtype}
    if len(loaded) == len(given):
        return {}
    return {"model.dtype": "float32"}


def read_divergence(given: FlagTexts) -> KeyValues:
    """Converts beta, which is one thing in GRPOConfig and another in DistillationConfig and
    GKDConfig. Without teacher_model_name_or_path it is algorithm.kl_coef. With it, it is
    teacher.beta (by default 1; 0.5 if a flag of GKDConfig is given), and the teacher is the only
    signal: the keys teacher.path, teacher.divergence and algorithm.advantage. ShoalError for a
    flag of GKDConfig without a teacher, or one that asks for other samples than the policy's."""
    of_gkd = [name for name in ("lmbda", "seq_kd") if name in given]
    teacher = given.get("teacher_model_name_or_path", "")
    if not teacher:
        if of_gkd:
            name = of_gkd[0]
            raise ShoalError(
                f"{name}={given[name]}: expected teacher_model_name_or_path too, the teacher"
            )
        return {"algorithm.kl_coef": given["beta"]} if "beta" in given else {}
    if to_bool("seq_kd", given.get("seq_kd", "false")):
        raise ShoalError(
            "seq_kd=true: expected false, samples are the policy's; answers of the teacher are "
            "learned as data, by shoal sft"
        )
    if "lmbda" in given and given["lmbda"] not in ("1", "1.0"):
        raise ShoalError(
            f"lmbda={given['lmbda']}: expected 1, all samples are the policy's; given answers are "
            "learned by shoal sft with teacher.path and teacher.divergence=full"
        )
    return {
        "teacher.path": teacher,
        "teacher.divergence": "full",
        "teacher.beta": given.get("beta", "0.5" if of_gkd else "1.0"),
        "algorithm.advantage": "none",
    }


def read_held_out(given: FlagTexts) -> KeyValues:
    """Converts eval_strategy and eval_steps to task.hold_out as far as they say that there is no
    evaluation; else nothing is set. When there are evaluations is read by a rule (`trl_counts`),
    after the one that counts the training rows of an epoch, which are fewer if some are held
    out."""
    strategy = given.get("eval_strategy", "").lower()
    if rules.TRL_STRATEGIES.get(strategy) == "no" or given.get("eval_steps") == "-1":
        return {key: Yielding(text, to_all=True) for key, text in rules.NO_ROWS_HELD_OUT.items()}
    return {}


_OF_PPO = {
    "num_ppo_epochs": ("4", ("algorithm.num_epochs",)),
    "cliprange": ("0.2", ("algorithm.clip_low", "algorithm.clip_high")),
    "cliprange_value": ("0.2", ("critic.value_clip",)),
    "gamma": ("1.0", ("algorithm.discount",)),
    "lam": ("0.95", ("algorithm.lam",)),
    "kl_coef": ("0.05", ("algorithm.kl_coef",)),
    "kl_estimator": ("k1", ("algorithm.kl",)),
}
"""Flag of PPOConfig -> its default there, and the keys that get its value."""


def read_ppo(given: FlagTexts) -> KeyValues:
    """Converts the flags of PPOConfig, any of which asks for PPO: algorithm.advantage=gae, one
    completion of each prompt, the KL in the reward, values and advantages as there. What is not
    given has PPOConfig's default, which yields to other settings of the same layer; the
    critic's learning rate, which there is the policy's, yields to all, the number of completions to
    what the user sets."""
    values: dict[str, Any] = {
        "algorithm.advantage": "gae",
        "algorithm.kl_placement": "reward",
        "batch.group_size": Yielding("1", to_users=True),
        "critic.lam": Yielding("-1"),
    }
    for name, (default, keys) in _OF_PPO.items():
        for key in keys:
            values[key] = given.get(name, Yielding(default))
    return values


_HEAD = "vllm_importance_sampling_"


def read_correction(given: FlagTexts) -> KeyValues:
    """Converts vllm_importance_sampling_*, the importance weights between sampler and trainer, to
    algorithm.correction (tis for truncated weights, mis for masked ones, none if switched off) and
    its level, cap and floor. What is not given has TRL's default: sequence_mask, cap 3.0, no floor.
    A bound of None means no bound; ShoalError for an unknown mode, or one that truncates without a
    bound."""
    if not to_bool(_HEAD + "correction", given.get(_HEAD + "correction", "true")):
        return {"algorithm.correction": "none"}
    mode = given.get(_HEAD + "mode", "sequence_mask")
    level, _, kind = mode.partition("_")
    if level not in ("token", "sequence") or kind not in ("mask", "truncate"):
        raise ShoalError(
            f"{_HEAD}mode={mode}: expected token_truncate, token_mask, sequence_truncate or "
            "sequence_mask"
        )
    # `clip_max` counts before `cap`, another name of it.
    cap = given.get(_HEAD + "clip_max", given.get(_HEAD + "cap", "3.0")).lower()
    floor = given.get(_HEAD + "clip_min", "none").lower()
    if kind == "truncate" and cap in flags.NOTHING and floor in flags.NOTHING:
        raise ShoalError(
            f"{_HEAD}clip_max=None with {_HEAD}mode={mode}: clip_min or clip_max must be a number, "
            "nothing would be truncated"
        )
    return {
        "algorithm.correction": "mis" if kind == "mask" else "tis",
        "algorithm.correction_level": level,
        "algorithm.correction_cap": "inf" if cap in flags.NOTHING else cap,
        "algorithm.correction_floor": "0" if floor in flags.NOTHING else floor,
    }


def read_vllm(given: FlagTexts) -> KeyValues:
    """Converts the address of a vLLM server, vllm_server_base_url or host and port, to vllm.urls,
    and sets sampler.kind=vllm. Nothing is set without use_vllm, and with vllm_mode=colocate (its
    default there), which changes only speed and place: the sampler is then the model itself, on the
    trainer's devices. ShoalError for an unknown vllm_mode. The host is this machine by default
    (also for 0.0.0.0), and the port 8000."""
    if not to_bool("use_vllm", given.get("use_vllm", "false")):
        return {}
    is_server = {"colocate": False, "server": True}
    if not value_of_option("vllm_mode", given.get("vllm_mode", "colocate"), is_server):
        return {}
    url = given.get("vllm_server_base_url")
    if not url:
        # 0.0.0.0 is where a server listens, not an address to ask.
        host = given.get("vllm_server_host", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
        port = given.get("vllm_server_port", "8000")
        url = f"http://{host}:{port}"
    return {"sampler.kind": "vllm", "vllm.urls": [url]}


def read_reward(item: str) -> str:
    """Converts the dotted path of a function, `my_lib.rewards.f`, to the file of its module and its
    name, `my_lib/rewards.py:f`; returns other names, like `file.py:f`, unchanged. The module is
    looked for in the working folder, then among the installed ones. ShoalError if there is no such
    module; whether it has the function is not checked."""
    if item.endswith(".py") or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", item):
        return item
    modules = item.split(".")
    name = modules.pop()
    # Only the first part of the path is looked up, because that imports nothing.
    spec = importlib.util.find_spec(modules[0])
    folders = [Path()]
    if spec and spec.submodule_search_locations:
        for location in spec.submodule_search_locations:
            folders.append(Path(location).parent)
    for folder in folders:
        module = folder.joinpath(*modules)
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                return f"{file}:{name}"
    if spec and spec.origin and len(modules) == 1:
        return f"{spec.origin}:{name}"
    raise ShoalError(
        f"reward_funcs={item}: there is no module {'.'.join(modules)} in {Path.cwd()} or among the "
        "installed ones; give FILE.py:FUNCTION"
    )


def read_template(name: str, text: str) -> KeyValues:
    """Converts chat_template_path, a Jinja file or the folder of a tokenizer, to model.template.
    ShoalError if it is neither, or the folder has no chat_template.jinja."""
    path = Path(text).expanduser()
    file = path / "chat_template.jinja" if path.is_dir() else path
    if not file.is_file():
        raise ShoalError(
            f"{name}={text}: there is no file {file}; expected a Jinja file, or a folder with "
            "chat_template.jinja"
        )
    return {"model.template": str(file)}


_OF_A_DATA_SET = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")
"""Fields of an entry of TRL's `datasets`."""

_FILE_LOADERS = ("json", "parquet")
"""Values of an entry's `path` with which its rows are those of `data_files`."""


def read_mixture(name: str, text: str) -> KeyValues:
    """Converts datasets, a mixture of data sets, to the keys task.* if it has one entry. Its `path`
    is a data set like dataset_name, or `json` or `parquet` with `data_files`. `columns` and
    `fraction` do not change which rows there are. ShoalError for several entries, and for one that
    names no data set."""
    entries = yaml.safe_load(text)
    is_list = isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries)
    if not is_list or not entries:
        raise ShoalError(f"{name}={text:.60}: expected a list of one entry with a path")
    if len(entries) > 1:
        raise ShoalError(
            f"{name} has {len(entries)} entries: a mixture of data sets is not supported; write "
            "their rows into one file, and give dataset_name=FILE"
        )
    [entry] = entries
    for field in entry:
        if field not in _OF_A_DATA_SET:
            raise ShoalError(
                f"{name}: an entry has the field {field}: expected {', '.join(_OF_A_DATA_SET)}"
            )
    given = {field: value for field, value in entry.items() if value not in (None, "None")}
    path = str(given.get("path", ""))
    files = given.get("data_files", [])
    files = [files] if isinstance(files, str) else files
    if not path:
        raise ShoalError(f"{name}: an entry has no path: expected a data set, or json or parquet")
    if "data_dir" in given or not isinstance(files, list):
        raise ShoalError(
            f"{name}: an entry has data_dir, or data_files for several splits: expected the paths "
            "of training files in data_files; task.eval_split=FILE names those to evaluate on"
        )
    if path in _FILE_LOADERS and not files:
        raise ShoalError(f"{name}: an entry with path={path} has no data_files: expected a file")
    if path in _FILE_LOADERS:
        values = {**flags.read_data_set(name, files[0]), **flags.values_of_files(name, files)}
    else:
        values = dict(flags.read_data_set(name, path))
        if files:
            values["task.files"] = files
    for field, key in (("name", "task.subset"), ("split", "task.split")):
        if field in given:
            values[key] = str(given[field])
    return values


_NOT_PLAIN = {
    "lora_dropout": "sampler and trainer would be two models",
    "use_dora": "an adapter is plain LoRA",
    "lora_modules_to_save": "only an adapter is trained",
}

PEFT = "peft_config"

_OF_PEFT = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
    "use_rslora": "use_rslora",
    "lora_dropout": "lora_dropout",
    "use_dora": "use_dora",
    "modules_to_save": "lora_modules_to_save",
}
"""Field of PEFT's LoraConfig -> the flag of TRL's ModelConfig that means the same."""

_PLAIN_LORA = "an adapter has only r, lora_alpha, target_modules and use_rslora"

_PLAIN_FLAGS = ("lora_r", "lora_alpha", "lora_target_modules", "use_rslora")
"""Flags of ModelConfig that an adapter of Shoal has."""

_PLAIN_IN_PEFT = {
    "peft_type": ("lora",),
    "task_type": ("causal_lm",),
    "bias": (),
    "init_lora_weights": ("true",),
}
"""Further field of LoraConfig -> its texts that ask for plain LoRA, in lower case, besides OFF."""

_IDLE_IN_PEFT = (
    "auto_mapping",
    "base_model_name_or_path",
    "fan_in_fan_out",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
)
"""Fields of LoraConfig that change nothing in an adapter which is plain LoRA."""


def _flags_of_peft(given: FlagTexts) -> dict[str, str]:
    """Returns the fields of a LoraConfig among these flags, `peft_config.r` and the like, by the
    flags of TRL's ModelConfig that mean the same; {} if there is none. Rank and alpha that are not
    given are PEFT's 8. ShoalError for a field that asks for more than plain LoRA."""
    if PEFT in given:
        raise ShoalError(
            f"{PEFT}={given[PEFT]:.60}: expected its fields, such as {PEFT}.r=8 "
            f"{PEFT}.lora_alpha=16"
        )
    fields = {}
    for name, text in given.items():
        head, _, field = name.partition(".")
        if head == PEFT:
            fields[field] = text
    if not fields:
        return {}
    own = {"use_peft": "true", "lora_r": "8", "lora_alpha": "8"}
    for field, text in fields.items():
        flag = _OF_PEFT.get(field, "")
        if flag:
            own[flag] = text
        is_plain = text.lower() in (*_PLAIN_IN_PEFT.get(field, ()), *flags.OFF)
        if flag in _PLAIN_FLAGS or field in _IDLE_IN_PEFT or is_plain:
            continue
        reason = _NOT_PLAIN.get(flag, _PLAIN_LORA)
        raise ShoalError(f"{PEFT}.{field}={text} is not supported: {reason}; leave it out")
    return own


def read_lora(given: FlagTexts) -> KeyValues:
    """Converts the flags of an adapter, and the fields of a LoraConfig (`peft_config`), which win,
    to model.lora. What is not given has the default of TRL's ModelConfig (rank 16, alpha 32,
    targets q_proj and v_proj) or LoraConfig (rank and alpha 8), and the targets yield to other
    settings of the same layer; without use_peft and peft_config nothing is set. ShoalError for
    forms of adapters that Shoal does not have."""
    given = {**given, **_flags_of_peft(given)}
    if not to_bool("use_peft", given.get("use_peft", "false")):
        return {}
    for name, reason in _NOT_PLAIN.items():
        if given.get(name, "0").lower() not in flags.OFF:
            raise ShoalError(
                f"{name}={given[name]} is not supported: {reason}; leave it out, or set it to 0"
            )
    # PEFT's default targets for the model families that Shoal has.
    defaults = flags.lora_values("16", "32", "q_proj,v_proj")
    own = flags.lora_values(
        given.get("lora_r", ""), given.get("lora_alpha", ""), given.get("lora_target_modules", "")
    )
    values: dict[str, Any] = {}
    for key, default in defaults.items():  # a flag that is not given is '' or [] in `own`
        values[key] = own[key] or Yielding(default)
    if "use_rslora" in given:
        values["model.lora.rslora"] = given["use_rslora"]
    return values


def read_trackers(name: str, text: str) -> KeyValues:
    """Converts report_to, a list of trackers, to the keys of those that Shoal reports to: each is
    on if it or `all` is in the list, else off. If the list is empty or has `none` alone, all are
    off. If the list has only other trackers, like comet_ml, nothing is set: the run's folder has
    the metrics in any case. `all` stands for W&B and TensorBoard, and for the others if they are
    installed, as in transformers."""
    named = {item.lower() for item in flags.items_of(text)}
    if not named & {"wandb", "tensorboard", "mlflow", "trackio", "all", "none"} and named:
        return {}  # other trackers alone
    values = {
        "report.wandb.mode": "auto" if named & {"wandb", "all"} else "off",
        "report.tensorboard": "true" if named & {"tensorboard", "all"} else "false",
    }
    for tracker in ("mlflow", "trackio"):
        is_installed = importlib.util.find_spec(tracker) is not None
        is_on = tracker in named or ("all" in named and is_installed)
        values[f"report.{tracker}.mode"] = "auto" if is_on else "off"
    return values


SETTINGS = {"train.evaluate_every=-1": "eval_strategy=no"}
"""Setting that an error or a warning advises -> the same in TRL, where another flag sets the other
values of the key."""

FLAGS: list[Flag] = [
    *flags.renames(
        learning_rate="optimizer.lr",
        num_generations="batch.group_size",
        num_iterations="algorithm.num_epochs",
        model_name_or_path="model.path",
        max_completion_length="sampling.max_completion_tokens",
        response_length="sampling.max_completion_tokens",
        sft_model_path="model.path",
        temperature="sampling.temperature",
        top_p="sampling.top_p",
        entropy_coef="algorithm.entropy_coef",
        weight_decay="optimizer.weight_decay",
        max_grad_norm="optimizer.clip_grad_norm",
        adam_beta1="optimizer.beta1",
        adam_beta2="optimizer.beta2",
        adam_epsilon="optimizer.eps",
        output_dir="base_output_directory",
        project="report.trackio.project",
        rollout_func="environment.rollout",
        environment_factory="environment.factory",
        dataset_config="task.subset",
        dataset_train_split="task.split",
        dataset_test_split="task.eval_split",
        sapo_temperature_pos="algorithm.sapo_positive",
        sapo_temperature_neg="algorithm.sapo_negative",
        generation_kwargs__stop_strings="sampling.stop",
        generation_kwargs__stop="sampling.stop",
        generation_kwargs__top_k="sampling.top_k",
        generation_kwargs__top_p="sampling.top_p",
        generation_kwargs__min_p="sampling.min_p",
    ),
    *derived(
        rules.trl_prompts,
        "sampling.max_prompt_tokens",
        "None, as in TRL 1.16, which has no such flag: rows of files and from Python have no limit "
        "but the longest prompt",
        "max_prompt_length",
        keeps_nothing=True,
    ),
    reads("top_k", "sampling.top_k", flags.least_zero("sampling.top_k"), "-1 is 0: off"),
    reads(
        "save_total_limit",
        "checkpoint.keep_last",
        flags.optional("checkpoint.keep_last"),
        "None, its default there: all",
        keeps_nothing=True,
    ),
    reads(
        "max_length",
        "sampling.max_prompt_tokens sampling.max_completion_tokens",
        lambda name, text: dict.fromkeys(
            ("sampling.max_prompt_tokens", "sampling.max_completion_tokens"), text
        ),
        "of SFTConfig: of a row's prompt, and of what follows it; a longer prompt is dropped, what "
        "follows is cut",
    ),
    *only(
        "only the assistant's turns have a loss",
        "true",
        names="assistant_only_loss completion_only_loss",
    ),
    *idle(
        "rows are always packed, and none sees another's tokens",
        "packing packing_strategy padding_free eval_packing pad_to_multiple_of dataset_num_proc",
    ),
    Flag(
        "reward_funcs",
        ("reward.functions",),
        item=read_reward,
        meaning="also by a module's path: my_lib.rewards.f",
    ),
    Flag("reward_weights", ("reward.weights",)),
    *[
        row
        for name in ("reward_model_name_or_path", "reward_model_path")
        for row in derived(
            rules.trl_reward_model, "reward.functions", "model:PATH, a sequence classifier", name
        )
    ],
    Flag("mask_truncated_completions", ("algorithm.mask_truncated",), is_switch=True),
    *derived(
        rules.trl_evaluation_samples,
        "evaluation.samples evaluation.temperature evaluation.top_k evaluation.top_p "
        "evaluation.min_p",
        "answers to each question of an evaluation, sampled as in training",
        "num_generations_eval",
    ),
    *derived(
        rules.trl_first_evaluation,
        "train.evaluate_first train.evaluate_every",
        "with no other evaluation, by eval_strategy, there is one after the last step too",
        "eval_on_start",
        is_switch=True,
    ),
    Flag("use_bias_correction_kl", ("algorithm.kl_weighted",), is_switch=True),
    *grouped(
        read_divergence,
        "algorithm.kl_coef teacher.path teacher.divergence teacher.beta algorithm.advantage",
        "beta is GRPOConfig's algorithm.kl_coef; with a teacher (DistillationConfig, GKDConfig) it "
        "is teacher.beta, with teacher.divergence=full and algorithm.advantage=none",
        "beta",
        "teacher_model_name_or_path",
        "lmbda",
        "seq_kd",
    ),
    *grouped(
        read_clip,
        "algorithm.clip_low algorithm.clip_high",
        "both bounds, unless epsilon_high is given",
        "epsilon",
    ),
    *grouped(read_clip, "algorithm.clip_high", "None: as epsilon", "epsilon_high"),
    *idle(
        "a critic has an optimizer of its own, whose step does not depend on a factor of its loss; "
        "critic.lr does",
        "vf_coef",
    ),
    *derived(
        rules.trl_episodes,
        "steps",
        "completions of the run; divided by those of a step",
        "total_episodes",
    ),
    *refused("rewards are not whitened, advantages are (algorithm.whiten)", "whiten_rewards"),
    *refused(
        "a reward function sees the whole completion: subtract the penalty there",
        "missing_eos_penalty",
    ),
    *only("completions end with the model's own end tokens", "eos", names="stop_token"),
    *refused("completions end with the model's own end tokens", "stop_token_id"),
    *refused("one adapter is trained", "model_adapter_name", "ref_adapter_name"),
    *refused(
        "rewards are shaped by reward functions",
        "reward_shaping_enable_length",
        "reward_shaping_enable_repetition",
        "reward_shaping_enable_eos",
    ),
    *counts_with("reward_shaping_enable_length", "reward_shaping_length_coef"),
    *counts_with(
        "reward_shaping_enable_repetition",
        "reward_shaping_repetition_coef reward_shaping_repetition_ngram",
    ),
    *counts_with(
        "reward_shaping_enable_eos",
        """
          reward_shaping_eos_bonus reward_shaping_eos_missing_penalty
          reward_shaping_eos_out_of_range_penalty reward_shaping_eos_min_len
          reward_shaping_eos_max_len
          """,
    ),
    *idle("batch.micro_tokens bounds a micro-batch", "local_rollout_forward_batch_size"),
    *idle("evaluations are train.evaluate_every", "num_sample_generations"),
    *idle("a run's folder is named by run_name", "exp_name"),
    *refused(
        "it is computed from per_device_train_batch_size and gradient_accumulation_steps",
        "world_size",
        "num_total_batches",
        "micro_batch_size",
        "local_batch_size",
        "local_mini_batch_size",
        "mini_batch_size",
    ),
    *derived(
        rules.trl_delta,
        "algorithm.clip_dual",
        "None is 0: off; below 1 + epsilon_high it is an error",
        "delta",
    ),
    *derived(
        rules.trl_updates,
        "steps",
        "counted in updates, of which a step may make several; -1: by num_train_epochs",
        "max_steps",
    ),
    *derived(
        rules.epochs,
        "steps",
        "passes over the training rows of local files or from Python; for other data set steps",
        "num_train_epochs",
        low_priority=True,
    ),
    *derived(
        rules.trl_counts,
        "checkpoint.every",
        "counted in updates; below 1 a share of them",
        "save_steps",
    ),
    *derived(
        rules.trl_counts,
        "train.evaluate_every",
        "counted in updates; below 1 a share of them; -1: no evaluation; with recipe=trl nothing "
        "without eval_strategy=steps",
        "eval_steps",
        group=read_held_out,
        default_only=tuple(rules.NO_ROWS_HELD_OUT),
    ),
    *derived(
        rules.trl_counts,
        "train.evaluate_every",
        "no: no evaluation, whatever eval_steps says, and no rows held out (task.hold_out); epoch: "
        "after each epoch; steps: eval_steps says how often, else each 10 updates",
        "eval_strategy",
        group=read_held_out,
        default_only=tuple(rules.NO_ROWS_HELD_OUT),
    ),
    *derived(
        rules.trl_counts,
        "checkpoint.every checkpoint.keep_best checkpoint.keep_last",
        "no: the last step only; epoch: after each epoch; steps: save_steps says how often; best: "
        "the checkpoint with the best evaluation, and the last",
        "save_strategy",
    ),
    *derived(
        rules.trl_schedule,
        "optimizer.warmup_steps",
        "that share of the run's updates, rounded up",
        "warmup_ratio",
    ),
    *derived(
        rules.trl_schedule,
        "optimizer.warmup_steps",
        "counted in updates; below 1 a share of them, rounded up",
        "warmup_steps",
    ),
    reads(
        "min_p",
        "sampling.min_p",
        flags.optional("sampling.min_p"),
        "None is 0: off",
        keeps_nothing=True,
    ),
    *grouped(
        read_loss,
        "algorithm.loss algorithm.aggregation algorithm.cispo_bound",
        "which loss, and how token losses become one number",
        "loss_type",
    ),
    *grouped(
        read_loss,
        "algorithm.loss",
        "sequence: gspo with loss_type's aggregation; token: the loss as it is",
        "importance_sampling_level",
    ),
    *grouped(
        read_advantage,
        "algorithm.advantage",
        "group: grpo; batch: batch_std; none: dr_grpo",
        "scale_rewards",
        keeps_nothing=True,
    ),
    *grouped(
        read_advantage,
        "algorithm.advantage",
        "normalize_then_sum: gdpo",
        "multi_objective_aggregation",
    ),
    *grouped(
        read_ppo,
        "algorithm.advantage algorithm.kl_placement batch.group_size critic.lam "
        "algorithm.num_epochs algorithm.clip_low algorithm.clip_high critic.value_clip "
        "algorithm.discount algorithm.lam algorithm.kl_coef algorithm.kl",
        "of PPOConfig: PPO with a critic, and its defaults for what is not given; the KL is "
        "subtracted from the reward at the last token, there from each token's",
        *_OF_PPO,
    ),
    reads(
        "dataset_name",
        "task.name task.path",
        flags.read_data_set,
        "a task of ours for gsm8k, openai/gsm8k, ifeval, math; else task=custom with its path",
    ),
    reads(
        "chat_template_path",
        "model.template",
        read_template,
        "of SFTConfig: a Jinja file, or a folder with chat_template.jinja",
    ),
    reads(
        "datasets",
        "task.name task.path task.files task.subset task.split",
        read_mixture,
        "a mixture of one entry: its path is as dataset_name, or json or parquet with data_files; "
        "several entries are an error",
    ),
    reads(
        "test_split_size",
        "task.hold_out",
        flags.one_of({"0.1": {"task.hold_out": "true"}}),
        "only 0.1: a tenth of the rows is held out; other rows to evaluate on are "
        "task.eval_split=FILE",
    ),
    *derived(
        rules.trl_schedule,
        "optimizer.schedule optimizer.warmup_steps",
        "linear, cosine, constant_with_warmup; constant has no warm-up",
        "lr_scheduler_type",
    ),
    *grouped(
        read_dtype,
        "model.dtype",
        "of the computation; master weights and optimizer stay float32",
        "bf16",
        "fp16",
        is_switch=True,
        is_quiet=False,
    ),
    *grouped(
        read_dtype,
        "model.dtype",
        "the type of the computation, unless bf16 or fp16 is on; master weights and optimizer stay "
        "float32",
        "dtype",
        "torch_dtype",
        "model_init_kwargs.dtype",
        "model_init_kwargs.torch_dtype",
        is_quiet=False,
    ),
    *[
        reads(
            name,
            "model.remat",
            flags.REMAT,
            "true: whole blocks are computed again",
            is_switch=True,
        )
        for name in ("gradient_checkpointing", "activation_checkpointing")
    ],
    *derived(
        rules.trl_batch,
        "batch.prompts_per_device batch.micro_tokens",
        "completions of a batch on each device; times steps_per_generation, divided by "
        "num_generations, these are the prompts of a step",
        "per_device_train_batch_size",
    ),
    *derived(
        rules.trl_batch,
        "batch.prompts_per_device batch.micro_tokens",
        "batches of an update; multiplies per_device_train_batch_size (8)",
        "gradient_accumulation_steps",
    ),
    *derived(
        rules.trl_batch,
        "batch.prompts_per_device batch.micro_tokens algorithm.num_minibatches",
        "batches of a step; divided by gradient_accumulation_steps, its updates",
        "steps_per_generation",
    ),
    *derived(
        rules.trl_batch,
        "batch.prompts_per_device batch.micro_tokens algorithm.num_minibatches",
        "of PPOConfig: updates of a step",
        "num_mini_batches",
    ),
    *derived(
        rules.trl_batch,
        "batch.prompts_per_step batch.micro_tokens algorithm.num_minibatches",
        "completions of a step on all devices; instead of steps_per_generation",
        "generation_batch_size",
    ),
    *[
        Flag(
            _HEAD + name,
            tuple(f"algorithm.{key}" for key in keys.split()),
            meaning=meaning,
            group=read_correction,
            keeps_nothing="clip" in name,
            is_switch=name == "correction",
        )
        for name, keys, meaning in (
            (
                "correction",
                "correction correction_level correction_cap correction_floor",
                "importance weights for the gap between sampler and trainer",
            ),
            (
                "mode",
                "correction correction_level",
                "token or sequence, mask (mis) or truncate (tis)",
            ),
            ("clip_max", "correction_cap", "None: no bound"),
            ("cap", "correction_cap", "as clip_max"),
            ("clip_min", "correction_floor", "None: no bound"),
        )
    ],
    *derived(
        rules.trl_staleness, "train.weight_sync_interval", "counted in updates", "weight_sync_steps"
    ),
    *derived(
        rules.trl_staleness,
        "train.max_staleness train.weight_sync_interval",
        "with weight_sync_steps=n counted in the sampler's weight updates: k is (k + 1) x n - 1 "
        "steps",
        "max_staleness",
        value_filter=lambda text: True,
        requires_flag="weight_sync_steps",
    ),
    *derived(rules.sampler_tensor, flags.REPLICA_KEYS, flags.REPLICA, "vllm_tensor_parallel_size"),
    *grouped(
        read_lora,
        flags.LORA,
        "an adapter: lora_r 16, lora_alpha 32, q_proj and v_proj, unless they are given; "
        "without dropout",
        "use_peft",
        is_switch=True,
        is_quiet=False,
    ),
    *[
        Flag(
            name,
            (f"model.lora.{key}",),
            meaning="counts only with use_peft=true",
            group=read_lora,
            is_switch=name == "use_rslora",
            takes_several=name == "lora_target_modules",
            is_quiet=False,
        )
        for name, key in (
            ("lora_r", "rank"),
            ("lora_alpha", "alpha"),
            ("lora_target_modules", "targets"),
            ("use_rslora", "rslora"),
        )
    ],
    *grouped(
        read_lora,
        flags.LORA,
        "PEFT's LoraConfig in Python, elsewhere its fields, peft_config.r=8: r and lora_alpha (8), "
        "target_modules (q_proj and v_proj), use_rslora; others are errors if they are switched on",
        PEFT,
        is_mapping=True,
    ),
    *[
        Flag(
            name,
            ("model.lora.rank",),
            meaning=f"an error if it is switched on with use_peft=true: {reason}",
            group=read_lora,
            takes_several=name == "lora_modules_to_save",
        )
        for name, reason in _NOT_PLAIN.items()
    ],
    *grouped(
        read_vllm,
        "sampler.kind vllm.urls",
        "only with use_vllm=true and vllm_mode=server the sampler is `vllm serve`, with the calls "
        "that load weights; else it is the model itself, on the trainer's devices",
        "use_vllm",
        is_switch=True,
        is_quiet=False,
    ),
    *grouped(
        read_vllm,
        "sampler.kind vllm.urls",
        "counts only with use_vllm=true",
        "vllm_mode",
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
    ),
    *grouped(
        template_variables,
        "model.template_variables",
        "variables of the chat template",
        "chat_template_kwargs",
        is_mapping=True,
    ),
    *refused(
        "the schedules are linear, cosine and constant, without settings", "lr_scheduler_kwargs"
    ),
    *refused(
        "AdamW has optimizer.beta1, beta2, eps and weight_decay",
        "optim_args",
        "optim_target_modules",
    ),
    *refused("training has no noise on embeddings", "neftune_noise_alpha"),
    *refused("a target is one token", "label_smoothing_factor"),
    *refused(
        "sampling has temperature, top_k, top_p, min_p and, in generation_kwargs, stop_strings",
        "generation_kwargs",
        "vllm_structured_outputs_regex",
    ),
    *refused("environment.max_turns bounds the turns", "max_tool_calling_iterations"),
    *refused(
        "there is no load-balancing loss",
        "router_aux_loss_coef",
        accepts=("0.0", "0", "0.001"),
    ),
    *refused("one order and one split of the data, from seed", "data_seed"),
    *refused(
        "a batch is the same whatever it takes: batch.micro_tokens bounds memory",
        "auto_find_batch_size",
    ),
    *refused("an adapter is of whole products", "lora_target_parameters"),
    *refused(QUANTISED, "load_in_8bit", "load_in_4bit", "quantization_config"),
    *refused("the model's shape and weights come from model.path", "model_init_kwargs"),
    *refused("a teacher's shape and weights come from teacher.path", "teacher_model_init_kwargs"),
    *idle(
        "it has no effect on what is computed here",
        """
          model_init_kwargs.attn_implementation model_init_kwargs.device_map
          model_init_kwargs.low_cpu_mem_usage model_init_kwargs.trust_remote_code
          model_init_kwargs.use_cache
          """,
    ),
    *refused(
        QUANTISED,
        "model_init_kwargs.load_in_8bit",
        "model_init_kwargs.load_in_4bit",
        "model_init_kwargs.quantization_config",
    ),
    *only(
        "a model's own files are read; download another revision and give its folder",
        "main",
        names="model_revision model_init_kwargs.revision teacher_model_revision",
    ),
    *refused("data are read whole", "dataset_streaming", "streaming"),
    *refused(
        "a run ends with its last weights; leave it out: save_strategy=best keeps the checkpoint "
        "with the best evaluation too, and the run's last line has the `shoal export` of it",
        "load_best_model_at_end",
    ),
    *only("rows are taken in a random order", "random", names="train_sampling_strategy"),
    *refused("an evaluation is `shoal eval`", "do_predict"),
    *refused(
        "in Python it is a GRPOConfig, of which the epochs and the fields that differ from its "
        "defaults are read, and recipe=trl sets the others; give its fields as flags",
        "args",
    ),
    *refused(
        "rows are given in Python, shoal.train(train_dataset=rows, eval_dataset=rows); a data set "
        "by name is dataset_name=NAME, a file dataset_name=FILE",
        "train_dataset",
        "eval_dataset",
    ),
    *refused(
        "in Python shoal.train(callbacks=[...]) calls them; on a command line "
        "train.on_warning=stop ends a run that goes wrong, and report.* sends metrics to trackers",
        "callbacks",
    ),
    *refused(
        "AdamW is the optimizer, and its schedule is lr_scheduler_type; settings are optimizer.*",
        "optimizers",
    ),
    *idle(
        "the tokenizer is the model's, and model.tokenizer=FOLDER names another; a chat template "
        "of its own would be model.template",
        "processing_class",
        is_quiet=False,
    ),
    *idle(
        "the tokenizer of a reward model is in its folder",
        "reward_processing_classes",
        is_quiet=False,
    ),
    *only("task.columns names a row's fields", "text", names="dataset_text_field"),
    *refused("the reference stays what it was at the start", "sync_ref_model"),
    *refused(
        "a teacher's server is teacher.address=URL with teacher.divergence=topk, over the "
        "teacher's likeliest tokens",
        "use_teacher_server",
        "teacher_model_server_url",
        "teacher_server_urls",
    ),
    *refused(
        "algorithm.correction=mis masks by the ratio of trainer and sampler",
        "off_policy_mask_threshold",
    ),
    *refused("sampling has no penalty", "repetition_penalty", accepts=("1.0", "1")),
    *refused("the entropy bonus has one weight, entropy_coef", "use_adaptive_entropy"),
    *only("every sampled token is trained on", "1.0", names="top_entropy_quantile"),
    *derived(
        rules.trl_shuffle,
        "train.shuffle",
        "false: rows in their order; nothing in fine-tuning, which draws rows at random anyway",
        "shuffle_dataset",
        is_switch=True,
    ),
    *only("AdamW is the optimizer", "adamw_torch", "adamw_torch_fused", "adamw", names="optim"),
    reads(
        "report_to",
        "report.wandb.mode report.tensorboard report.mlflow.mode report.trackio.mode",
        read_trackers,
        "wandb, tensorboard, mlflow, trackio, all or none; others change nothing",
        keeps_nothing=True,
        takes_several=True,
    ),
    *derived(
        rules.trl_resume,
        "resume",
        "True: the run started last under output_dir; of a run's newest checkpoint the run; "
        "another one is an error; False: nothing, a run of the same run_name goes on",
        "resume_from_checkpoint",
        low_priority=True,
        is_switch=True,
    ),
    *idle(
        "nothing is pushed while training: `shoal export from=RUN to=hub:USER/NAME`",
        "push_to_hub",
        is_quiet=False,
    ),
    *idle("models here have no dropout", "disable_dropout"),
    reads(
        "log_completions",
        "report.completions_every",
        flags.if_true({"report.completions_every": "1"}, {"report.completions_every": "0"}),
        "each step a prompt's best and worst answer in the terminal, and a table of a few "
        "completions for Weights & Biases and TensorBoard",
        is_switch=True,
    ),
    *idle(
        "every group is written to the run's groups/",
        "num_completions_to_print",
        "log_completions_steps",
    ),
    *idle("an update whose gradient is not finite is skipped, and counted", "debug"),
    *counts_with(
        "use_teacher_server",
        "loss_top_k loss_add_tail reverse_kl_top_1_mode teacher_temperature teacher_top_k "
        "add_tail_bucket",
    ),
    *idle(
        "every step is written",
        "logging_steps",
        "logging_strategy",
        "logging_first_step",
        "logging_dir",
    ),
    *derived(rules.sampler_memory, flags.MEMORY_KEYS, flags.MEMORY, "vllm_gpu_memory_utilization"),
    *idle(
        "the sampler is the model itself, or a server of vLLM with settings of its own",
        "vllm_server_timeout",
        "weight_sync_timeout",
        "vllm_max_model_length",
        "vllm_enable_sleep_mode",
        "vllm_model_impl",
        "request_timeout",
    ),
    *idle("a sampler has sampling.slots_per_device completions at once", "max_inflight_tasks"),
    *idle("batch.micro_tokens bounds a micro-batch", "token_budget", "fork_threshold_tokens"),
    *idle("train.max_staleness bounds how many samples wait", "queue_maxsize"),
    *idle("a sampler that hangs is noticed by itself", "heartbeat_stale_after_s"),
    *idle(
        "evaluations are eval_strategy and eval_steps",
        "do_train",
        "do_eval",
        "per_device_eval_batch_size",
    ),
    *[
        reads(
            name,
            "mesh.trainer mesh.fsdp",
            lambda name, text: {"mesh.trainer": text, "mesh.fsdp": "-1"},
            "devices, of one process here",
        )
        for name in ("nproc_per_node", "num_processes")
    ],
    *idle(flags.SHARDED, "deepspeed", "fsdp", "fsdp_config", is_quiet=False),
    *idle(
        "it has no effect on what is computed here",
        "remove_unused_columns",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "gradient_checkpointing_kwargs",
        "accelerator_config",
        "hub_model_id",
        "hub_strategy",
        "torch_compile",
        "ddp_find_unused_parameters",
        "ddp_timeout",
        "use_liger_kernel",
        "attn_implementation",
        "trust_remote_code",
        "ds3_gather_for_generation",
        "use_cpu",
        "tf32",
        "disable_tqdm",
        "overwrite_output_dir",
        """
          activation_checkpointing_kwargs
          activation_offloading torch_compile_backend torch_compile_mode liger_kernel_config
          use_cache cache_implementation torch_empty_cache_steps parallelism_config
          dataloader_drop_last dataloader_persistent_workers dataloader_multiprocessing_context
          dataloader_in_order ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
          local_rank full_determinism enable_jit_checkpoint bf16_full_eval fp16_full_eval
          cast_lm_head_to_fp32 ignore_bias_buffers lora_task_type
          use_transformers_continuous_batching transformers_continuous_batching_config
          use_transformers_paged
          """,
    ),
    *idle(
        "the loss of an update is over its tokens on all devices", "average_tokens_across_devices"
    ),
    *idle(
        "logs and metrics are in the run folder; report.* sends them elsewhere",
        """
          log_level log_level_replica log_on_each_node logging_nan_inf_filter
          include_num_input_tokens_seen trackio_space_id trackio_bucket_id
          trackio_static_space_id skip_memory_metrics log_multimodal log_unique_prompts
          log_completions_hub_repo
          """,
    ),
    *idle(
        "nothing is pushed while training: `shoal export from=RUN to=hub:USER/NAME`",
        "hub_token hub_private_repo hub_always_push hub_revision",
    ),
    *idle(
        "an evaluation answers the questions of task.eval_split",
        """
          prediction_loss_only eval_do_concat_batches eval_use_gather_object
          eval_accumulation_steps batch_eval_metrics length_column_name
          """,
    ),
    *idle(
        "an evaluation answers the questions of task.eval_split",
        "include_for_metrics label_names",
        takes_several=True,
    ),
    *idle("the first interval between evaluations is as long as the others", "eval_delay"),
    *idle(
        "the best evaluation is that of the highest accuracy, without a judge of answers that of "
        "the highest mean reward; callbacks, in Python, find both in their args",
        "metric_for_best_model greater_is_better",
    ),
    *idle(
        "a checkpoint holds all that a run resumes from",
        """
          save_only_model save_on_each_node ignore_data_skip
          """,
    ),
    *only(
        "callbacks are new objects in a resumed run, whose state has the figures of its steps",
        "false",
        names="restore_callback_states_from_checkpoint",
    ),
    *idle("the port of TRL's own transfer of weights", "vllm_group_port"),
    *counts_with("loss_type=vespo", "vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg"),
    *counts_with("sync_ref_model", "ref_model_mixup_alpha ref_model_sync_steps"),
    *counts_with(
        "use_adaptive_entropy",
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
    ),
    *counts_with("load_in_4bit", "bnb_4bit_quant_type bnb_4bit_quant_storage use_bnb_nested_quant"),
    *idle(
        "the tokenizer and the chat template are the model's: model.tokenizer, model.template",
        "dataset_kwargs eos_token pad_token truncation_mode",
    ),
]
