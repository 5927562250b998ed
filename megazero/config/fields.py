"""Declares the settings of the configuration, and reads their descriptions back.

A *setting* is one field of a section's dataclass.  Its declaration holds everything that describes it: name,
type, default, range, help, unit and aliases.  The command line, its `--help`, the YAML file and the error messages are
all made from `FieldInfo`, the description read back by `describe`.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Field
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo as PydanticField

# Sections refuse unknown names, NaN, infinity and values of another type: a value that a user writes is turned into the
# setting's type by one function, `megazero.config.values.coerce`, before a section is built.
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

REQUIRED: Any = ...


def setting(
    default: Any = REQUIRED,
    *,
    help: str,
    unit: str = "",
    aliases: tuple[str, ...] = (),
    beyond: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """Declare a setting.

    aliases: other flag names with the same meaning, without the two dashes.
    beyond: the reason why values outside the range are refused, when a bound is not self-evident.
    ge, gt, le, lt: bounds of a number: at least, greater than, at most, less than.
    """
    extra: dict[str, Any] = {"unit": unit, "aliases": list(aliases), "beyond": beyond}
    return Field(default, description=help, json_schema_extra=extra, ge=ge, gt=gt, le=le, lt=lt)


@dataclass(frozen=True)
class FieldInfo:
    """The description of a setting, from which the command line and the messages are made.

    kind: "int", "float", "bool", "switch" (true, false or "auto"), "str", "path" or "list", or "pair" (two numbers, in
    files only).
    choices: the legal values as text, empty if any value of the kind is legal.
    optional: True if null is legal and leaves the setting unset.
    """

    section: str
    name: str
    kind: str
    choices: tuple[str, ...]
    default: Any
    required: bool
    help: str
    unit: str
    aliases: tuple[str, ...]
    beyond: str
    bounds: tuple[tuple[str, float], ...]
    optional: bool = False

    @property
    def flag(self) -> str:
        """The canonical spelling of the flag, such as `--tensor-model-parallel-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def can_stand_alone(self) -> bool:
        """True if the flag without a value after it means true."""
        return self.kind in ("bool", "switch")

    @property
    def legal(self) -> str:
        """The accepted values as a phrase such as "a whole number, at least 1"."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        nouns = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "str": "a text",
            "path": "a path",
            "list": "one or more texts",
            "pair": "two numbers",
        }
        bounds = dict(self.bounds)
        if "ge" in bounds and bounds["ge"] == bounds.get("le"):
            return f"{bounds['ge']:.12g}"
        words = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
        return ", ".join([nouns[self.kind], *(f"{words[name]} {value:.12g}" for name, value in self.bounds)])

    @property
    def when_unset(self) -> str:
        """The meaning of an optional setting that is unset, as in its help: "the scale is dynamic"."""
        return self.help.partition("without it, ")[2].partition(";")[0] or "not set"


def parameter(
    name: str, kind: str, default: Any, *, choices: tuple[str, ...] = (), optional: bool = False, **bounds: float
) -> FieldInfo:
    """Return the description of a parameter that a table lists and no section holds.

    default: None: it is required, unless it is optional, when None is a value.
    """
    required = default is None and not optional
    return FieldInfo("", name, kind, choices, default, required, "", "", (), "", tuple(bounds.items()), optional)


def by_name(*parameters: FieldInfo) -> Mapping[str, FieldInfo]:
    """Return a read-only table of the parameters by name."""
    return types.MappingProxyType({info.name: info for info in parameters})


def describe(section: str, cls: type) -> tuple[FieldInfo, ...]:
    """Return the settings of the section's dataclass `cls`, in the order of their declaration."""
    assert is_pydantic_dataclass(cls), f"{section} is no section"
    return tuple(_describe_one(section, name, field) for name, field in cls.__pydantic_fields__.items())


def _describe_one(section: str, name: str, field: PydanticField) -> FieldInfo:
    extra = field.json_schema_extra
    assert isinstance(extra, dict), f"{section}.{name} was not declared with setting()"
    aliases = extra["aliases"]
    assert isinstance(aliases, list)
    kind, choices = _kind(field.annotation)
    return FieldInfo(
        section=section,
        name=name,
        kind=kind,
        choices=choices,
        default=None if field.is_required() else field.default,
        required=field.is_required(),
        help=field.description or "",
        unit=str(extra["unit"]),
        aliases=tuple(str(alias) for alias in aliases),
        beyond=str(extra["beyond"]),
        bounds=tuple(_bounds(field)),
        optional=type(None) in get_args(field.annotation),
    )


def _kind(annotation: Any) -> tuple[str, tuple[str, ...]]:
    """Return (kind, choices) of a type annotation; `X | None` counts as X, `bool | Literal["auto"]` is a switch."""
    if get_origin(annotation) in (Union, types.UnionType):
        members = [arg for arg in get_args(annotation) if arg is not type(None)]
        if bool in members and len(members) > 1:
            return "switch", ("true", "false", *(word for arg in members for word in get_args(arg)))
        (annotation,) = members
    if get_origin(annotation) is Literal:
        return "str", tuple(str(arg) for arg in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "list", ()
    return {int: "int", float: "float", bool: "bool", str: "str", Path: "path"}[annotation], ()


def _bounds(field: PydanticField) -> list[tuple[str, float]]:
    names = {Ge: "ge", Gt: "gt", Le: "le", Lt: "lt"}
    return [
        (name, getattr(constraint, name))
        for constraint in field.metadata
        for cls, name in names.items()
        if isinstance(constraint, cls)
    ]
