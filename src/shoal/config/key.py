"""Keys of the configuration (a key is one setting under its dotted name): declares them, lists
those of a configuration class, and converts values to their types.

    lr: float = key(1.5e-4, stages=("update",))     declares a field of a configuration class
    keys_of(Config)["optimizer.lr"]                 returns a Key: its name, type, default, help,
                                                    and what `key` declared
    convert_value(key, "3e-4")                      converts a text or a plain value to the key's
                                                    type
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
"""A part of a training step whose numbers a setting can change. `environment` means the texts that
tools and environments return."""


STAGES: tuple[Stage, ...] = get_args(Stage)


OnResume = Literal["free", "bits", "warn", "fixed"]
"""What happens to a resumed run if a key's value was changed: nothing (free), numbers may differ in
their last bits (bits), the run continues differently, with a warning (warn), or an error
(fixed)."""

Condition = Literal["data is read", "a prompt is too long"]
"""When a key that does not always have an effect has one: if the task reads its questions from
files and does not generate them, or if a prompt has more tokens than
`sampling.max_prompt_tokens`."""

NamesCode = Literal["", "rewards", "environment", "advantage"]
"""What the functions or classes that a key names make: rewards of completions, the environment of
rollouts with its tools, or advantages. Empty for a key that names none."""

T = TypeVar("T")


def key(
    default: T,
    *,
    stages: tuple[Stage, ...],
    on_resume: OnResume | None = None,
    decided_from: tuple[str, ...] = (),
    undecided_because: str = "",
    may_be_infinite: bool = False,
    acts_if: Condition | None = None,
    names_code: NamesCode = "",
) -> T:
    """Declares a field of a configuration class: returns a dataclass field with this default and
    with metadata about the key.

        lr: float = key(1.5e-4, stages=("update",))

    `stages`: the stages of a step whose numbers this key changes directly, the likeliest first;
    later stages that change only as a consequence are not listed. Empty if the key changes no
    number, for example a timeout, a folder, or what is reported. If two runs differ, `shoal diff`
    looks for the cause among the keys of the first stage that differs.

    `on_resume`: what happens if a resumed run has another value; the default is `free` for a key
    without stages, else `warn`. `decided_from`: for a key whose value the run can decide itself
    (see `open_keys`), the keys and facts (in plain words) that determine the decision.
    `undecided_because`: for a key whose default leaves it open although no decision of the run is
    stored for it, the reason why none can be.
    `may_be_infinite`: True if `inf` is accepted and means no bound. `acts_if`: the only condition
    under which the key has an effect; otherwise the key changes at most the last bits of numbers,
    because compiled programs get other shapes. `names_code`: not empty if the values of the key
    name functions or classes, as `file.py:name`, or are such objects from Python."""
    declared = {
        "stages": stages,
        "on_resume": on_resume or ("warn" if stages else "free"),
        "decided_from": decided_from,
        "undecided_because": undecided_because,
        "may_be_infinite": may_be_infinite,
        "acts_if": acts_if,
        "names_code": names_code,
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
    # As declared by `key`, whose docstring explains each. None: declared without `key`.
    stages: tuple[Stage, ...] | None = None
    on_resume: OnResume | None = None
    decided_from: tuple[str, ...] = ()
    undecided_because: str = ""
    may_be_infinite: bool = False
    acts_if: Condition | None = None
    names_code: NamesCode = ""

    @property
    def section(self) -> str:
        """Returns the dotted name without its last part; '' for a key at the top level."""
        return self.name.rpartition(".")[0]

    @property
    def choices(self) -> tuple[str, ...]:
        """Returns the values that this key accepts; () if every value of its type is accepted."""
        return choices_of(self.type)

    @property
    def type_text(self) -> str:
        """Returns the key's type in a user's words, like `integer` or `a | b`."""
        text = type_text(self.type)
        if self.choices and self.names_code:
            text += f" | {FUNCTION_FORM}"
        return text

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is tuple


FUNCTION_FORM = "file.py:function"
"""How a function in a file is named."""

_TYPE_TEXT = {str: "text", int: "integer", float: "number", bool: "true | false"}


def choices_of(value_type: Any) -> tuple[str, ...]:
    """Returns the values of a Literal, or the names that are now in the registry of an
    `Annotated[str, registry]`; () for other types, also for lists."""
    if get_origin(value_type) is Annotated:
        registry = value_type.__metadata__[0]
        return tuple(registry)  # not cached: a name may be registered later
    if get_origin(value_type) is Literal:
        return get_args(value_type)
    return ()


def type_text(value_type: Any) -> str:
    """Returns a type in a user's words: `integer`, `a | b` for a choice, `list of text` or `list of
    integers` for a tuple. KeyError for a type that no key may have."""
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
    """Returns the keys of a configuration class by dotted name, including those of its sections, in
    the order of declaration. All calls for a class return the same mapping, so it must not be
    changed."""
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
    """Returns the dotted names of all sections of a configuration class, like `model` and
    `model.lora`."""
    return frozenset(key.section for key in keys_of(config_type).values() if key.section)


@functools.cache
def _module_tree(module: str) -> ast.Module:
    """Returns the syntax tree of an imported module's source."""
    return ast.parse(inspect.getsource(sys.modules[module]))


def _help_texts(config_type: type) -> dict[str, str]:
    """Returns for each field of a dataclass its help text: the string under the field in the
    source, joined to one line. Fields of base classes are included; a field without such a string
    is left out."""
    texts = {}
    for base in reversed(config_type.__mro__[:-1]):  # without `object`; the class itself last
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
    """Returns the statements in the body of a class, from the syntax tree of its module.
    LookupError if the module's source has no class of this name."""
    for node in ast.walk(_module_tree(cls.__module__)):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            return node.body
    raise LookupError(f"{cls.__module__} has no class {cls.__name__}")


def text_of(value: Any) -> str:
    """Returns a plain value as a user types it: `null`, `true`, `[a,b]`, `5`. A text is returned
    unchanged; other values as `str` writes them. Items are not put in quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text_of, value)) + "]"
    return str(value)


def shown(value: Any) -> str:
    """Returns a configuration's value as a user types it: `[a,b]` for a tuple, a float in the
    shortest form that reads back as the same number, so the text may be typed again (but for a list
    with a comma in an item, because items are not put in quotes); other values as `text_of` writes
    them."""
    if isinstance(value, tuple):
        return "[" + ",".join(map(shown, value)) + "]"
    if isinstance(value, float):
        return exact(value)
    return text_of(value)


def get_value(config: Any, key: str) -> Any:
    """Returns the value of a dotted key of a configuration, or the section of that name;
    AttributeError if it has neither."""
    value = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def overridden_keys(config: Any) -> frozenset[str]:
    """Returns the keys that have no effect because another key takes their place:
    `batch.prompts_per_step` if `batch.prompts_per_device` is set. Empty otherwise, also for a
    configuration without a section `batch`."""
    batch = getattr(config, "batch", None)
    if getattr(batch, "prompts_per_device", 0):
        return frozenset({"batch.prompts_per_step"})
    return frozenset()


def open_keys(config: Any) -> list[str]:
    """Returns the names of the keys whose values the run decides itself, in the order of
    declaration: keys that can be decided (`decided_from` is not empty) and are at the default that
    leaves them open, like `auto` or 0. With `batch.prompts_per_device` set,
    `batch.prompts_per_step` is one of them, whatever its value; without, it is none."""
    overridden = overridden_keys(config)
    names = []
    for name, declared in keys_of(type(config)).items():
        if not declared.decided_from:
            continue
        if name == "batch.prompts_per_step":  # its default is a number, not an open value
            is_open = name in overridden
        else:
            is_open = get_value(config, name) == declared.default
        if is_open:
            names.append(name)
    return names


def values_of(config: Any) -> dict[str, Any]:
    """Returns dotted key -> value for all keys of a configuration."""
    return {name: get_value(config, name) for name in keys_of(type(config))}


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Returns a copy of a configuration in which the given keys (by dotted name) have other values,
    which must be of the keys' types. Names that are no key are ignored. If no values are given,
    returns the configuration itself. Raises ShoalError if a value is out of range."""
    if not values:
        return config
    return build(type(config), {**values_of(config), **values})


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turns values by dotted name into nested dicts, `{"a.b": 1}` into `{"a": {"b": 1}}`; tuples
    become lists. Other values stay the same objects."""
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
    """Yields (dotted name, value) for every value in nested dicts: `{"a": {"b": 1}}` -> ("a.b", 1).
    Names that the configuration class does not have are yielded too. A dict under the name of a key
    is a value; so is an empty dict whose name is no section's, and an empty dict under a section's
    name yields nothing. None under the name of a section is skipped.

    `prefix`: put before each name; '' or the name of a section with its final dot, like `model.`.
    What is a key or a section is decided by the name with its prefix."""
    keys, sections = keys_of(config_type), sections_of(config_type)
    for part, value in values.items():
        name = f"{prefix}{part}"
        if isinstance(value, Mapping) and name not in keys and (value or name in sections):
            yield from leaves_of(config_type, value, f"{name}.")
        elif value is not None or name not in sections:
            yield name, value


def build(config_type: type, values: Mapping[str, Any]) -> Any:
    """Creates a configuration of this class from values by dotted key. The values must have the
    types of their keys; keys that are not given have their defaults, and names that are no key are
    ignored. Raises ShoalError if a value is out of range."""
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config_type):
        if field.name in values:
            arguments[field.name] = values[field.name]
        elif dataclasses.is_dataclass(field.default_factory):
            head = f"{field.name}."
            inside = {}  # the values of this section, by their names in it
            for name, value in values.items():
                if name.startswith(head):
                    inside[name.removeprefix(head)] = value
            arguments[field.name] = build(field.default_factory, inside)  # type: ignore[arg-type]
    return config_type(**arguments)


def convert_value(key: Key, value: Any) -> Any:
    """Converts a text or a plain value to the type of its key. For a list's key the result is a
    tuple: of one for a single value, () for an empty list. Raises ShoalError if the value does not
    fit. A text is not split: `a,b` is one item."""
    if not key.is_list:
        return _convert_scalar(key, key.type, value)
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_convert_scalar(key, get_args(key.type)[0], item) for item in items)


def _convert_scalar(key: Key, value_type: Any, value: Any) -> Any:
    """Converts one value to a type that is no list; ShoalError if it does not fit, or is an
    infinite number or nan. `key`: gives the name for the error; with its `may_be_infinite`, `inf`
    is accepted."""
    choices = choices_of(value_type)
    if choices:
        if isinstance(value, str):
            # Whether there is such a function is known where it is loaded.
            names_function = key.names_code and ":" in value
            if value in choices or names_function:
                return value
        # A choice that is '' is not listed.
        wanted = f"one of {', '.join(filter(None, choices))}"
        if key.names_code:
            wanted += f", or `{FUNCTION_FORM}`"
        raise _wrong_type(key, value, wanted)
    try:
        converted = _CONVERTERS[value_type](value)
        if value_type is float and not math.isfinite(converted):
            is_no_bound = key.may_be_infinite and converted > 0
            if not is_no_bound:
                raise ValueError  # caught below, like a text that is no number
    except (ValueError, OverflowError):
        wanted = _WANTED[value_type]
        if "," in str(value):
            wanted += "; for a run with each: shoal train --multirun"
        raise _wrong_type(key, value, wanted) from None
    return converted


def _wrong_type(key: Key, value: Any, wanted: str) -> ShoalError:
    """Returns (does not raise) the error for a value that is not of its key's type, `KEY=VALUE:
    expected WANTED`. `wanted`: the accepted values, in words."""
    if value is None or isinstance(value, bool):
        typed = text_of(value)
    else:
        typed = repr(value)
    return ShoalError(f"{key.name}={typed}: expected {wanted}")


def _to_text(value: Any) -> str:
    """Returns a text unchanged; ValueError for any other value."""
    if not isinstance(value, str):
        raise ValueError
    return value


def _to_bool(value: Any) -> bool:
    """Converts a bool or one of the texts in _BOOLS, in any case; ValueError otherwise."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()]
    raise ValueError


def _to_int(value: Any) -> int:
    """Converts a whole number or its text, also `1e3` or `5.0`. ValueError for a bool, a fraction
    or anything else; OverflowError for an int that is too large for a float."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
    number = _to_float(value)
    if not number.is_integer():
        raise ValueError
    if isinstance(value, int):
        return value  # not int(number): a float rounds integers above 2**53
    return int(number)


def _to_float(value: Any) -> float:
    """Converts a number or its text, also `inf` and `nan`; ValueError for a bool or anything
    else."""
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
    """Raises ShoalError, `KEY=VALUE: expected WANTED`, if the condition is false. `wanted`: the
    accepted values, in words."""
    if not condition:
        raise ShoalError(f"{key}={value!r}: expected {wanted}")


def at_least(section: object, head: str, least: float, *names: str, note: str = "") -> None:
    """Raises ShoalError for the first of the fields `names` of a section whose value is below
    `least`, or nan. `section`: the object that has the fields; `head`: the part of the dotted key
    before the field's name, like `batch.`, or '' at the top level; `note`: what the value `least`
    means, for the message."""
    bound = f"{least} ({note})" if note else f"{least}"
    for name in names:
        value = getattr(section, name)
        require(value >= least, f"{head}{name}", value, f"{bound} or more")
