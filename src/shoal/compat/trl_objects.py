"""Reads the objects that TRL's trainers are given in Python: replaces them, among keyword
arguments, by flags of TRL's table, whose values are texts. Neither TRL nor PEFT is imported."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from shoal.compat.front import find_flag
from shoal.config.names import names_of
from shoal.config.train import Config
from shoal.records import ShoalError
from shoal.text import shorten
from shoal.trainer.callbacks import GivenCallbacks, make_callbacks

BY_CLASS = (
    "processing_class",
    "reward_processing_classes",
    "callbacks",
    "optimizers",
    "quantization_config",
)
"""Keywords whose objects Shoal does not use: what is said of them names the objects' classes."""


def without_objects(keywords: Mapping[str, Any], config_type: type = Config) -> dict[str, Any]:
    """Returns keyword arguments without the objects of TRL's trainers. `args`, a GRPOConfig, is
    replaced by its epochs, those of its fields that differ from its defaults, and `recipe=trl` for
    the others (`implies_recipe`); a keyword that is given by itself wins over them. A mapping as
    `args` is replaced by its entries. `peft_config` becomes a dict of such fields. An object that
    Shoal does not use becomes the name of its class; it is left out if it is None. `config_type`:
    the configuration of the command; for another than training, fields of `args` that training
    alone has are left out. Raises ShoalError for an `args` or `peft_config` whose fields cannot be
    read, and for a model that is an object of transformers, as `model` or among the rewards."""
    remaining = dict(keywords)
    _check_models(remaining)
    arguments = remaining.pop("args", None)
    if arguments is not None:
        fields = {}
        of_arguments = _fields_of_arguments(arguments)
        if implies_recipe(keywords):
            of_arguments["recipe"] = "trl"
        for name, value in of_arguments.items():
            if not _is_of_training_alone(name, value, config_type):
                fields[name] = value
        for name, value in remaining.items():
            is_given = value is not None or name not in fields
            if is_given:
                fields[name] = value
        remaining = fields
    adapter = remaining.pop("peft_config", None)
    if adapter is not None:
        remaining["peft_config"] = _fields_of_adapter(adapter)
    template = _own_template(remaining)
    if template:
        remaining["model.template"] = template
        del remaining["processing_class"]  # it would be said to change nothing
    for name in BY_CLASS:
        if name not in remaining:
            continue
        given = remaining.pop(name)
        items = given if isinstance(given, list | tuple) else [given]
        classes = [_class_name(item) for item in items if item is not None]
        if classes:
            remaining[name] = classes
    return remaining


def take_callbacks(
    keywords: Mapping[str, Any],
) -> tuple[dict[str, Any], GivenCallbacks | None]:
    """Returns (the keyword arguments without `callbacks`, the callbacks with what belongs to them);
    None if there are none. ShoalError for one that is no callback."""
    remaining = dict(keywords)
    given = remaining.pop("callbacks", None)
    if given is None or given == []:
        return remaining, None
    arguments = keywords.get("args")
    settings: dict[str, Any] = {}
    if isinstance(arguments, Mapping):
        settings |= arguments
        arguments = None
    for name, value in remaining.items():
        if name.isidentifier() and isinstance(value, str | int | float):
            settings[name] = value
    callbacks = GivenCallbacks(
        make_callbacks(given), arguments, settings, keywords.get("processing_class")
    )
    return remaining, callbacks


MODEL_NAMES = ("model", "model.path", "model__path", "model_name_or_path")
"""Keywords that name the model."""


def _check_models(keywords: Mapping[str, Any]) -> None:
    """Raises ShoalError if a model is given as an object with weights, where its folder or its name
    is needed: as the model, by one of MODEL_NAMES, or, because it can be called, among the reward
    functions."""
    for name in MODEL_NAMES:
        model = keywords.get(name)
        if isinstance(model, Mapping):  # the section `model`
            model = model.get("path")
        if not (model is None or isinstance(model, str | os.PathLike)):
            raise ShoalError(
                f"{name}={_class_name(model)}: expected a folder or a hub id, from which weights "
                f"are read{_known_as(model)}; model.save_pretrained(FOLDER) writes a folder"
            )
    for name in ("reward", "reward_funcs"):
        given = keywords.get(name)
        rewards = given if isinstance(given, list | tuple) else [given]
        for reward in rewards:
            if hasattr(reward, "save_pretrained"):
                raise ShoalError(
                    f"{name}={_class_name(reward)}: expected functions; a reward model is given by "
                    f"its folder or hub id, {name}='model:PATH'{_known_as(reward)}"
                )


def _own_template(keywords: Mapping[str, Any]) -> str:
    """Returns the chat template of `processing_class`, with which TRL renders prompts, if it is
    another than that of the model's folder; "" if it is the same or none, if the model is not in a
    folder here, or if a keyword names the template or the tokenizer."""
    template = getattr(keywords.get("processing_class"), "chat_template", None)
    path = next((keywords[name] for name in MODEL_NAMES if name in keywords), None)
    if not isinstance(template, str) or not isinstance(path, str | os.PathLike):
        return ""
    given = {"model.template", "model.tokenizer", "model__template", "model__tokenizer"}
    if given & keywords.keys() or not Path(path).is_dir():
        return ""
    # Here, because few calls get here, and the library of tokenizers takes a while to import.
    from shoal.chat.tokenizer_files import read_object, read_templates

    folder = Path(path)
    of_model, _ = read_templates(folder, read_object(folder / "tokenizer_config.json"))
    return "" if template.strip() == of_model.strip() else template


def _known_as(model: Any) -> str:
    """Returns, for an error, the folder or hub id that an object of transformers was read from; ""
    if it does not say."""
    name = getattr(model, "name_or_path", "")
    return f" (this one was read from {name})" if name else ""


SAY_THE_REST = ("config_name", "resume", "resume_from_checkpoint")
"""Keywords that name a file or a run, whose values are those that no other keyword gives."""


def implies_recipe(keywords: Mapping[str, Any]) -> bool:
    """True if these keyword arguments have TRL's defaults, `recipe=trl`, because `args` is an
    object: whether a field of it was written, or has TRL's default by itself, cannot be seen. False
    if the keywords say by themselves what the other values are; `recipe=None` is Shoal's own
    defaults."""
    arguments = keywords.get("args")
    if not _is_record(arguments):
        return False
    if "recipe" in keywords or getattr(arguments, "resume_from_checkpoint", None):
        return False
    return not any(keywords.get(name) for name in SAY_THE_REST)


def notes_on_arguments(keywords: Mapping[str, Any]) -> list[str]:
    """Returns lines about `args`: that it implies a recipe, if it does, and for each field that was
    changed in it that a keyword of the same name has another value, which counts."""
    arguments = keywords.get("args")
    name = _class_name(arguments)
    notes = []
    if implies_recipe(keywords):
        notes.append(
            f"args={name} means recipe=trl: what {name} and the other arguments do not set has "
            "TRL's defaults; recipe=None keeps Shoal's"
        )
    fields: dict[str, Any] = {}
    if isinstance(arguments, Mapping):
        fields = dict(arguments)
    elif _is_record(arguments):
        fields = dict(_changed_fields(arguments))
    for field, value in fields.items():
        given = keywords.get(field)
        if given is not None and given != value:
            notes.append(
                f"{field}={shorten(str(given), 100)} counts, the argument of its own, and not "
                f"{field}={shorten(str(value), 100)} of args={name}"
            )
    return notes


def _is_of_training_alone(name: str, value: Any, config_type: type) -> bool:
    """True if training has a use for this field, and the command of `config_type` has none."""
    if name in names_of(config_type) or find_flag(config_type, name, value):
        return False
    return name in names_of(Config) or find_flag(Config, name, value) is not None


def _class_name(item: Any) -> str:
    """Returns the name of an object's class, or of `item` if it is a class; a text is returned
    unchanged."""
    if isinstance(item, str):
        return item
    if isinstance(item, type):
        return item.__name__
    return type(item).__name__


def _fields_of_arguments(arguments: Any) -> dict[str, Any]:
    """Returns the fields of a GRPOConfig that differ from its defaults; of a mapping all entries.
    ShoalError for anything else, also for a configuration of another trainer of TRL's: its defaults
    are not those of `recipe=trl`, and a field that equals one would be lost.

    `num_train_epochs` is always among them: whoever gives no number of steps expects the epochs of
    TRL. `max_steps`, or `steps` together with `args`, goes before it.

    The class itself sets some fields from others; those are left out, because Shoal's rules compute
    the same from the others: `generation_batch_size`, which TRL always sets together with
    `steps_per_generation`, that one if it equals `gradient_accumulation_steps`, as it does by
    default, a `run_name` that is the output folder, the older of two names of one field (RENAMED),
    and what follows from another field (FOLLOWS)."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not (_is_record(arguments) and _is_of_grpo(arguments)):
        name = _class_name(arguments)
        hint = ""
        if name.startswith("SFT"):
            hint = ", and algorithm='sft', which learns the rows' own answers"
        elif name.startswith("PPO"):
            hint = ", and algorithm__advantage='gae', which trains with a critic"
        raise ShoalError(
            f"args={name}: expected a GRPOConfig, whose defaults recipe=trl has; give its fields "
            f"as keyword arguments, such as learning_rate=1e-6{hint}"
        )
    fields = dict(_changed_fields(arguments))
    epochs = getattr(arguments, "num_train_epochs", None)
    if epochs is not None:
        fields["num_train_epochs"] = epochs
    batches = getattr(arguments, "steps_per_generation", None)
    if batches is not None:
        fields.pop("generation_batch_size", None)
    if batches == getattr(arguments, "gradient_accumulation_steps", None):
        fields.pop("steps_per_generation", None)
    if fields.get("run_name") == getattr(arguments, "output_dir", None):
        fields.pop("run_name", None)
    for new, old in RENAMED.items():
        if new in fields:
            fields.pop(old, None)
    for name, cause in FOLLOWS.items():
        if cause in fields:
            fields.pop(name, None)
    return fields


def _is_of_grpo(arguments: Any) -> bool:
    """True if a configuration is TRL's GRPOConfig, AsyncGRPOConfig, or of a class made from it."""
    return any("GRPOConfig" in base.__name__ for base in type(arguments).__mro__)


RENAMED = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Newer name of a field of TrainingArguments -> its older one, which the class sets to the same."""

FOLLOWS = {
    "do_eval": "eval_strategy",
    "greater_is_better": "metric_for_best_model",
    "torch_compile_backend": "torch_compile",
    "fsdp_config": "fsdp",
}
"""Field of TrainingArguments that changes nothing here -> the field from which the class sets
it."""


def _fields_of_adapter(adapter: Any) -> dict[str, Any]:
    """Returns the fields of a PEFT LoraConfig that differ from its defaults, with its rank and
    alpha in any case, and with its `peft_type` if that is another adapter than LoRA; of a mapping
    all entries that are not None, with PEFT's rank and alpha if they are missing. ShoalError if
    the fields cannot be read."""
    if isinstance(adapter, Mapping):
        fields = {"r": 8, "lora_alpha": 8}
        fields |= {name: _plain(value) for name, value in adapter.items() if value is not None}
    elif _is_record(adapter):
        fields = {}
        for name in ("peft_type", "r", "lora_alpha"):
            if hasattr(adapter, name):
                fields[name] = _plain(getattr(adapter, name))
        fields |= _changed_fields(adapter)
        if fields.get("peft_type") == "LORA":
            del fields["peft_type"]
    else:
        raise ShoalError(
            f"peft_config={shorten(repr(adapter), 100)}: expected a LoraConfig of PEFT, or a dict "
            "of its fields"
        )
    return fields


def _plain(value: Any) -> Any:
    """Returns an enum's value, and a set as a sorted list; other values unchanged. PEFT makes a set
    of `target_modules`."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value


def _is_record(value: Any) -> bool:
    """True if a value is an object of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _changed_fields(record: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for the fields of a dataclass object that differ from their defaults. A
    default is what the class declares, and also what a new object has, because `__post_init__` may
    set fields that were not given. A value that is such an object itself, like
    `accelerator_config`, is yielded as the name of its class."""
    untouched = _untouched(record)
    for field in dataclasses.fields(record):
        if not field.init or field.name.startswith("_"):
            continue
        value = _plain(getattr(record, field.name))
        defaults = [field.default]
        if field.default_factory is not dataclasses.MISSING:
            defaults.append(field.default_factory())
        if field.name in untouched:
            defaults.append(untouched[field.name])
        plain_defaults = [_plain(default) for default in defaults]
        # The types count too: 1 is not True.
        if not any(type(value) is type(one) and value == one for one in plain_defaults):
            yield field.name, _class_name(value) if _is_record(value) else value


DEVICE_FIELDS = ("bf16", "fp16", "use_cpu")
"""Fields of TRL's configurations without which a new one is refused on a machine without a GPU."""


def _untouched(record: Any) -> dict[str, Any]:
    """Returns the fields of a new object of a record's class, by name. If the class refuses to make
    one without arguments, it gets the record's DEVICE_FIELDS, which are then left out here; {} if
    it refuses that too."""
    device_fields = {name: getattr(record, name) for name in DEVICE_FIELDS if hasattr(record, name)}
    for arguments in ({}, device_fields):
        try:
            new = type(record)(**arguments)
        except (TypeError, ValueError):
            continue
        names = [field.name for field in dataclasses.fields(new) if field.name not in arguments]
        return {name: getattr(new, name) for name in names if hasattr(new, name)}
    return {}
