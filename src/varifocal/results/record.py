"""Frozen records that are read from plain values and written as such: each field by its name, checked by its type."""

from __future__ import annotations

import reprlib
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints


def named(key: str) -> Any:
    """A field that has a different name in the file."""
    return field(metadata={"key": key})


def maybe(key: str | None = None) -> Any:
    """A field that the file leaves out if it is None."""
    return field(default=None, metadata={"left out": True} | ({} if key is None else {"key": key}))


@dataclass(frozen=True, kw_only=True)
class Record:
    """A dataclass that is read from plain values and written as such.

    A field without a default must be there; one with a default is always written but may be missing in an older file;
    one made by `maybe()` is written only if it is not None.
    """

    tag: ClassVar[tuple[str, str] | None] = None
    """A key and its value that say what the record is; written first."""

    unknown: dict[str, Any] = field(default_factory=dict, repr=False)
    """What a newer version wrote; kept when the record is written again."""

    @classmethod
    def from_json(cls, content: object, where: str = "") -> Self:
        """The record with these plain values; the ValueError names the first value that does not fit."""
        if not isinstance(content, dict):
            raise ValueError(f"{where or 'the content'} must be an object, got {reprlib.repr(content)}")
        values: dict[str, Any] = {}
        known = {cls.tag[0]} if cls.tag else set()
        for one in entries(cls):  # type: ignore[arg-type]  # a class can be hashed
            place = f"{where}.{one.key}" if where else one.key
            known.add(one.key)
            if one.key in content:
                values[one.name] = fitted(content[one.key], one.kind, place)
            elif one.required:
                raise ValueError(f"{place} is missing")
        return cls(**values, unknown={key: value for key, value in content.items() if key not in known})

    def to_json(self) -> dict[str, Any]:
        """The plain values, in the order of the fields."""
        content: dict[str, Any] = dict([self.tag]) if self.tag else {}
        for one in entries(type(self)):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if value is not None or not one.left_out:
                content[one.key] = plain(value)
        return content | self.unknown


class Entry(NamedTuple):
    """A field as the file has it."""

    name: str
    key: str
    kind: Any
    required: bool
    left_out: bool


@cache
def entries(record: type[Record]) -> tuple[Entry, ...]:
    """The fields of a record, without `unknown`."""
    hints = get_type_hints(record)
    return tuple(
        Entry(
            one.name,
            one.metadata.get("key", one.name),
            hints[one.name],
            one.default is MISSING and one.default_factory is MISSING,
            one.metadata.get("left out", False),
        )
        for one in fields(record)
        if one.name != "unknown"
    )


def plain(value: Any) -> Any:
    """The value with records inside it as dicts, and tuples as lists."""
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def fitted(value: Any, wanted: Any, where: str) -> Any:
    """The value as a field of that type holds it; ValueError if it has another type."""
    if wanted is Any:
        return value
    origin = get_origin(wanted)
    if origin in (Union, UnionType):
        return fitted_to_one_of(value, get_args(wanted), where)
    if origin is Literal and value in get_args(wanted):
        return value
    if origin is tuple and isinstance(value, list | tuple):
        kinds = get_args(wanted)
        if kinds[1:] == (...,):
            return tuple(fitted(one, kinds[0], f"{where}[{place}]") for place, one in enumerate(value))
        if len(kinds) == len(value):
            pairs = zip(value, kinds, strict=True)
            return tuple(fitted(one, kind, f"{where}[{place}]") for place, (one, kind) in enumerate(pairs))
    if origin is dict and isinstance(value, dict):
        kind = get_args(wanted)[1]
        return {name: fitted(one, kind, f"{where}.{name}") for name, one in value.items()}
    if isinstance(wanted, type) and issubclass(wanted, Record):
        return wanted.from_json(value, where)
    if wanted is float and type(value) in (int, float):
        return value
    if isinstance(wanted, type) and type(value) is wanted:
        return value
    raise ValueError(f"{where} must be {words(wanted)}, got {reprlib.repr(value)}")


def fitted_to_one_of(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    """The value as the first type that accepts it; if only one type is not None, that type's error is raised."""
    others = [kind for kind in kinds if kind is not NoneType]
    if value is None and len(others) < len(kinds):
        return None
    if len(others) == 1:
        return fitted(value, others[0], where)
    for kind in others:
        try:
            return fitted(value, kind, where)
        except ValueError:
            continue
    raise ValueError(f"{where} must be {' or '.join(map(words, others))}, got {reprlib.repr(value)}")


def words(wanted: Any) -> str:
    """A type as a message names it."""
    origin = get_origin(wanted) or wanted
    if origin is Literal:
        return " or ".join(repr(option) for option in get_args(wanted))
    if origin is tuple and get_args(wanted)[1:] != (...,):
        return f"a list of {len(get_args(wanted))}"
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", tuple: "a list"}
    return names.get(origin, "an object")
