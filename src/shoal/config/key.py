"""A key of the configuration: how a field declares it, which keys a dataclass has, and values in
the types of keys.

    lr: float = key(1.5e-4, stages=("update",))     a declaration
    keys_of(Config)["optimizer.lr"]                 the Key: its name, type, default, help, and
                                                    what was declared
    convert_value(key, "3e-4")                      a text, or a plain value, in the key's type
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from shoal.records import ShoalError
from shoal.text import exact

Stage = Literal["data", "sampling", "environment", "rewards", "update", "evaluation"]
"""A part of a run whose numbers settings change. `environment` is what tools and environments
say."""


STAGES: tuple[Stage, ...] = get_args(Stage)


OnResume = Literal["free", "bits", "warn", "fixed"]
"""What a changed key does to a run that is resumed: nothing (free), numbers that may differ in
their last bits (bits), another run from there on (warn), or an error (fixed)."""

Condition = Literal["data is read", "a prompt is too long"]
"""When a key acts that does not always: where the task reads its questions and makes none, or
where a prompt has more tokens than `sampling.max_prompt_tokens`."""

T = TypeVar("T")


def key(
    default: T,
    *,
    stages: tuple[Stage, ...],
    on_resume: OnResume | None = None,
    decided_from: tuple[str, ...] = (),
    may_be_infinite: bool = False,
    acts_if: Condition | None = None,
) -> T:
    """A field of the configuration, to stand in place of its default.

        lr: float = key(1.5e-4, stages=("update",))

    `stages`: those whose numbers another value changes itself, the likeliest first; what follows
    from them is not counted. Empty for a key that changes no number: how long is waited, where
    files are, what is reported. Where two runs differ, `shoal diff` looks for the cause among the
    keys of the stage that differs first.

    `on_resume`: what another value does to a run that is resumed; without it `free` for a key that
    acts on no stage, else `warn`. `decided_from`: of a key that the run decides itself where it is
    left open (`open_keys`), the keys and facts (in plain words) that the decision follows from.
    `may_be_infinite`: a number that `inf` leaves without a bound. `acts_if`: of a key that has no
    effect otherwise, but for the last bits of numbers, by the shapes of programs."""
    declared = {
        "stages": stages,
        "on_resume": on_resume or ("warn" if stages else "free"),
        "decided_from": decided_from,
        "may_be_infinite": may_be_infinite,
        "acts_if": acts_if,
    }
    return dataclasses.field(default=default, metadata=declared)


@dataclass(frozen=True)
class Key:
    """One setting of a command.

    >>> keys_of(Config)["optimizer.lr"]
    Key(name='optimizer.lr', type=<class 'float'>, default=0.00015,
        help='Peak learning rate of AdamW.', stages=('update',), on_resume='warn', ...)
    """

    name: str
    type: Any
    default: Any
    help: str
    # As declared by `key`, which says what each means. None: the field has no declaration.
    stages: tuple[Stage, ...] | None = None
    on_resume: OnResume | None = None
    decided_from: tuple[str, ...] = ()
    may_be_infinite: bool = False
    acts_if: Condition | None = None

    @property
    def section(self) -> str:
        """The dotted name without its last part; empty at the top level."""
        return self.name.rpartition(".")[0]

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it accepts; empty for every value of its type."""
        return choices_of(self.type)

    @property
    def type_text(self) -> str:
        return type_text(self.type)

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is tuple


_TYPE_TEXT = {str: "text", int: "integer", float: "number", bool: "true | false"}


def choices_of(value_type: Any) -> tuple[str, ...]:
    """The values of a Literal, or the names of a registry as in `Annotated[str, registry]`; empty
    for other types."""
    if get_origin(value_type) is Annotated:
        registry = value_type.__metadata__[0]
        return tuple(registry)  # read anew each time: a part may be registered late
    if get_origin(value_type) is Literal:
        return get_args(value_type)
    return ()


def type_text(value_type: Any) -> str:
    """A type in a user's words: `integer`, `a | b` for a choice, `list of text` for a tuple."""
    choices = choices_of(value_type)
    if choices:
        return " | ".join(choices)
    if get_origin(value_type) is tuple:
        item_type = get_args(value_type)[0]
        if item_type is str:
            return "list of text"
        return f"list of {type_text(item_type)}s"
    return _TYPE_TEXT[value_type]


@functools.cache
def keys_of(config_type: type) -> Mapping[str, Key]:
    """Every key by its dotted name, in the order of the schema."""
    types = get_type_hints(config_type, include_extras=True)
    helps = _help_texts(config_type)
    keys: dict[str, Key] = {}
    for field in dataclasses.fields(config_type):
        field_type = types[field.name]
        if dataclasses.is_dataclass(field_type):
            for name, key in keys_of(field_type).items():
                dotted_name = f"{field.name}.{name}"
                keys[dotted_name] = dataclasses.replace(key, name=dotted_name)
            continue
        if field.default_factory is dataclasses.MISSING:
            default = field.default
        else:
            default = field.default_factory()
        help_text = helps.get(field.name, "")
        keys[field.name] = Key(field.name, field_type, default, help_text, **field.metadata)
    return keys


@functools.cache
def sections_of(config_type: type) -> frozenset[str]:
    return frozenset(key.section for key in keys_of(config_type).values() if key.section)


@functools.cache
def _module_tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def _help_texts(config_type: type) -> dict[str, str]:
    """Field -> the string under it in the source, in one line; base classes included."""
    texts = {}
    for base in reversed(config_type.__mro__[:-1]):
        for field, below in itertools.pairwise(_class_body(base)):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if not isinstance(below, ast.Expr) or not isinstance(below.value, ast.Constant):
                continue
            text = below.value.value
            if isinstance(text, str):
                texts[field.target.id] = " ".join(text.split())
    return texts


def _class_body(cls: type) -> list[ast.stmt]:
    """The statements of a class in its source."""
    for node in ast.walk(_module_tree(cls.__module__)):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            return node.body
    raise LookupError(f"{cls.__module__} has no class {cls.__name__}")


def text_of(value: Any) -> str:
    """A plain value as a user types it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text_of, value)) + "]"
    return str(value)


def shown(value: Any) -> str:
    """A configuration's value as a user types it, numbers in short but not rounded: it may be typed
    again."""
    if isinstance(value, tuple):
        return "[" + ",".join(map(shown, value)) + "]"
    if isinstance(value, float):
        return exact(value)
    return text_of(value)


def get_value(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    value = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def overridden_keys(config: Any) -> frozenset[str]:
    """Keys in whose place others decide: with `batch.prompts_per_device`, the prompts of a step."""
    batch = getattr(config, "batch", None)
    if getattr(batch, "prompts_per_device", 0):
        return frozenset({"batch.prompts_per_step"})
    return frozenset()


def open_keys(config: Any) -> list[str]:
    """The keys of a configuration that its run decides itself: those that can be decided
    (`decided_from`) and have the default that leaves them open, as `auto` or 0; with
    `batch.prompts_per_device`, the prompts of a step."""
    overridden = overridden_keys(config)
    names = []
    for name, declared in keys_of(type(config)).items():
        if not declared.decided_from:
            continue
        if name == "batch.prompts_per_step":  # its default is a number of prompts
            is_open = name in overridden
        else:
            is_open = get_value(config, name) == declared.default
        if is_open:
            names.append(name)
    return names


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """The configuration with the values of some keys, by dotted name, replaced."""
    if not values:
        return config
    by_name = {name: get_value(config, name) for name in keys_of(type(config))}
    return build(type(config), {**by_name, **values})


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted name as nested dicts, tuples as lists."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        section_values = nested
        for section in sections:
            section_values = section_values.setdefault(section, {})
        if isinstance(value, tuple):
            value = list(value)
        section_values[last] = value
    return nested


def leaves_of(
    config_type: type, values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Every value with its dotted name."""
    keys, sections = keys_of(config_type), sections_of(config_type)
    for part, value in values.items():
        name = f"{prefix}{part}"
        if isinstance(value, Mapping) and name not in keys and (value or name in sections):
            yield from leaves_of(config_type, value, f"{name}.")
        elif value is not None or name not in sections:
            yield name, value


def build(config_type: type, values: Mapping[str, Any]) -> Any:
    """The dataclass of values by dotted key; other keys have their defaults."""
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config_type):
        if field.name in values:
            arguments[field.name] = values[field.name]
        elif dataclasses.is_dataclass(field.default_factory):
            head = f"{field.name}."
            inside = {}
            for name, value in values.items():
                if name.startswith(head):
                    inside[name.removeprefix(head)] = value
            arguments[field.name] = build(field.default_factory, inside)  # type: ignore[arg-type]
    return config_type(**arguments)


def convert_value(key: Key, value: Any) -> Any:
    """A value converted to the type of its key."""
    if not key.is_list:
        return _convert_scalar(key, key.type, value)
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_convert_scalar(key, get_args(key.type)[0], item) for item in items)


def _convert_scalar(key: Key, value_type: Any, value: Any) -> Any:
    choices = choices_of(value_type)
    if choices:
        if isinstance(value, str) and value in choices:
            return value
        raise _wrong_type(key, value, f"one of {', '.join(filter(None, choices))}")
    try:
        converted = _CONVERTERS[value_type](value)
        if value_type is float and not math.isfinite(converted):
            is_no_bound = key.may_be_infinite and converted > 0
            if not is_no_bound:
                raise ValueError
    except (ValueError, OverflowError):
        wanted = _WANTED[value_type]
        if "," in str(value):
            wanted += "; for a run with each: shoal train --multirun"
        raise _wrong_type(key, value, wanted) from None
    return converted


def _wrong_type(key: Key, value: Any, wanted: str) -> ShoalError:
    if value is None or isinstance(value, bool):
        typed = text_of(value)
    else:
        typed = repr(value)
    return ShoalError(f"{key.name}={typed}: expected {wanted}")


def _to_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()]
    raise ValueError


def _to_int(value: Any) -> int:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
    number = _to_float(value)
    if not number.is_integer():
        raise ValueError
    return value if isinstance(value, int) else int(number)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    return float(value)


_BOOLS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


_CONVERTERS: Mapping[Any, Callable[[Any], Any]] = {
    str: _to_text,
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
}


_WANTED: Mapping[Any, str] = {
    str: "text (in YAML, put it in quotes)",
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
}


def require(condition: bool, key: str, value: object, wanted: str) -> None:
    """Raises the one error form for a value out of its range."""
    if not condition:
        raise ShoalError(f"{key}={value!r}: expected {wanted}")


def at_least(section: object, head: str, least: float, *names: str, note: str = "") -> None:
    """Raises ShoalError for a field below `least`. `head`: the key before the field; `note`: what
    `least` means."""
    bound = f"{least} ({note})" if note else f"{least}"
    for name in names:
        value = getattr(section, name)
        require(value >= least, f"{head}{name}", value, f"{bound} or more")
