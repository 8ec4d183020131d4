"""The keys of each command, read from its dataclass: dotted name, type, default and the help text
under the field."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from shoal.config.declaration import STAGES, Stage
from shoal.config.schema import (
    CompatConfig,
    Config,
    ConvertConfig,
    DiffConfig,
    DoctorConfig,
    EvalConfig,
    ExportConfig,
    ExportRolloutsConfig,
    GenerateConfig,
    GroupsConfig,
    LaunchConfig,
    PlanConfig,
    ReplayConfig,
    RescoreConfig,
    ServeConfig,
    SftConfig,
    ViewConfig,
)

COMMANDS: Mapping[str, type] = {
    "train": Config,
    "sft": SftConfig,
    "doctor": DoctorConfig,
    "plan": PlanConfig,
    "eval": EvalConfig,
    "generate": GenerateConfig,
    "serve": ServeConfig,
    "export": ExportConfig,
    "convert": ConvertConfig,
    "groups": GroupsConfig,
    "replay": ReplayConfig,
    "rescore": RescoreConfig,
    "diff": DiffConfig,
    "view": ViewConfig,
    "export-rollouts": ExportRolloutsConfig,
    "launch": LaunchConfig,
    "compat": CompatConfig,
}
"""Command -> the dataclass that holds its settings."""


@dataclass(frozen=True)
class Key:
    """One setting of a command.

    >>> keys_of(Config)["optimizer.lr"]
    Key(name='optimizer.lr', type=<class 'float'>, default=0.00015,
        help='Peak learning rate of AdamW.', stages=('update',))
    """

    name: str
    type: Any
    default: Any
    help: str
    stages: tuple[Stage, ...] | None = (
        None  # that it acts on, the likeliest first; None: not declared
    )

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


def choices_of(wanted: Any) -> tuple[str, ...]:
    """The values of a Literal, or the names of a registry as in `Annotated[str, registry]`; empty
    for other types."""
    if get_origin(wanted) is Annotated:
        return tuple(wanted.__metadata__[0])  # read anew each time: a part may be registered late
    return get_args(wanted) if get_origin(wanted) is Literal else ()


def type_text(wanted: Any) -> str:
    """A type in a user's words: `integer`, `a | b` for a choice, `list of text` for a tuple."""
    if choices := choices_of(wanted):
        return " | ".join(choices)
    if get_origin(wanted) is tuple:
        element = get_args(wanted)[0]
        return "list of text" if element is str else f"list of {type_text(element)}s"
    return _TYPE_TEXT[wanted]


def dataclass_of(command: str | type) -> type:
    """The dataclass of a command's settings; a dataclass is returned unchanged."""
    return COMMANDS[command] if isinstance(command, str) else command


def command_of(config_type: type) -> str:
    """The command of a dataclass of settings; empty if it has none."""
    return next((command for command, known in COMMANDS.items() if known is config_type), "")


@functools.cache
def keys_of(config_type: type) -> Mapping[str, Key]:
    """Every key by its dotted name, in the order of the schema."""
    types, helps, found = (
        get_type_hints(config_type, include_extras=True),
        _help_texts(config_type),
        {},
    )
    for field in dataclasses.fields(config_type):
        wanted = types[field.name]
        if dataclasses.is_dataclass(wanted):
            for name, key in keys_of(wanted).items():
                full = f"{field.name}.{name}"
                found[full] = dataclasses.replace(key, name=full)
        else:
            default = (
                field.default
                if field.default_factory is dataclasses.MISSING
                else field.default_factory()
            )
            found[field.name] = Key(
                field.name, wanted, default, helps.get(field.name, ""), field.metadata.get("stages")
            )
    return found


def stages_of(name: str) -> tuple[Stage, ...]:
    """The stages that a key of training acts on, the likeliest first; all for one that this version
    does not know."""
    known = keys_of(Config).get(name)
    return STAGES if known is None else known.stages or ()


def is_under(key: str, names: Iterable[str]) -> bool:
    """True if a key is one of these, or lies in one of these sections (`reward.`)."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


@functools.cache
def sections_of(config_type: type) -> frozenset[str]:
    return frozenset(key.section for key in keys_of(config_type).values() if key.section)


@functools.cache
def _module_tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def _help_texts(config_type: type) -> dict[str, str]:
    """Field -> the string under it in the source, in one line; base classes included."""
    texts = {}
    for kind in reversed(config_type.__mro__[:-1]):
        body = next(
            node.body
            for node in ast.walk(_module_tree(kind.__module__))
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__
        )
        for field, below in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                texts[field.target.id] = " ".join(below.value.value.split())
    return texts
