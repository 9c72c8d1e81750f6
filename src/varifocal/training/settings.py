"""Typed sections from the plain values of a TOML file, the nearest right key for a wrong one, and TOML from values."""

from __future__ import annotations

import difflib
import json
import math
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def read_config_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML file that somebody wrote; ValueError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"the config {path} is not TOML: {error}") from error
    except RecursionError as error:
        raise ValueError(f"the config {path} is nested too deeply") from error


def apply_override(given: dict[str, dict[str, Any]], override: str, hints: dict[str, Any]) -> None:
    """Lay one `section.key=value` over the sections."""
    name, equals, text = override.partition("=")
    path = [part.strip() for part in name.strip().split(".")]
    if not equals or len(path) < 2 or not all(path):
        raise ValueError(
            f"a setting is written section.key=value, got {override!r}{suggestion(name.strip(), known_keys(hints))}"
        )
    if path[0] not in hints:
        raise ValueError(f"unknown setting {name.strip()!r}{suggestion(name.strip(), known_keys(hints))}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    # A word without quotes, or a number of thousands of digits, or brackets within brackets without end.
    except (ValueError, RecursionError):
        value = text.strip()
    place = given.setdefault(path[0], {})
    for part in path[1:-1]:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ValueError(f"setting {name.strip()!r}: {part} is {inner!r} and holds no settings of its own")
        place[part] = inner = dict(inner)
        place = inner
    place[path[-1]] = value


def section_from(section: str, values: Mapping[str, Any], hints: dict[str, Any], *, where: str) -> Any:
    """The dataclass of a section from plain values; `where` names them in errors."""
    kind = hints[section]
    types = get_type_hints(kind)
    checked: dict[str, Any] = {}
    for key, value in values.items():
        full = f"{section}.{key}"
        if key not in types:
            raise ValueError(f"{where} has the unknown key {full!r}{suggestion(full, known_keys(hints))}")
        checked[key] = fitted(full, value, types[key])
    return kind(**checked)


def fitted(name: str, value: Any, wanted: Any) -> Any:
    """The value as the field takes it; ValueError if it is of another kind."""
    options = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    for option in options:
        kind = get_origin(option) or option
        if kind is Literal:
            if value in get_args(option):
                return value
        elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            # No float holds a whole number of hundreds of digits.
            if isinstance(value, float) or abs(value) < 1 << 1023:
                return float(value)
        elif kind is int and isinstance(value, int | float) and not isinstance(value, bool):
            # 1e6 is a float to TOML and a number of steps to people.
            if isinstance(value, int) or value.is_integer():
                return int(value)
        elif kind is tuple and isinstance(value, list):
            return tuple(fitted(name, one, get_args(option)[0]) for one in value)
        elif kind is not NoneType and kind is not int and isinstance(value, kind):
            return value
    raise ValueError(f"{name} must be {kind_name(wanted)}, got {reprlib.repr(value)}")


def kind_name(wanted: Any) -> str:
    """A field's type in words."""
    if get_origin(wanted) in (Union, UnionType):
        return " or ".join(kind_name(option) for option in get_args(wanted) if option is not NoneType)
    if get_origin(wanted) is Literal:
        return " or ".join(repr(option) for option in get_args(wanted))
    names: dict[Any, str] = {
        int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list", dict: "a table",
        tuple: "a list of numbers",
    }  # fmt: skip
    return names[get_origin(wanted) or wanted]


def known_keys(hints: dict[str, Any]) -> list[str]:
    """All that can be set: sections, and section.key."""
    found = list(hints)
    for section, kind in hints.items():
        if is_dataclass(kind):
            found += [f"{section}.{one.name}" for one in fields(kind)]
    return found


def suggestion(name: str, known: list[str]) -> str:
    """' (did you mean X?)' for the nearest known key, also where only the section is wrong or missing."""
    last = name.rpartition(".")[2]
    same = [one for one in known if one.rpartition(".")[2] == last]
    close = same or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close:
        by_last = {one.rpartition(".")[2]: one for one in known}
        close = [by_last[one] for one in difflib.get_close_matches(last, by_last, n=1)]
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f"; the sections are {', '.join(one for one in known if '.' not in one)}"


def toml_value(value: Any) -> str:
    """A plain value as TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's strings are TOML's, but for this one character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inner = ", ".join(f"{toml_key(key)} = {toml_value(one)}" for key, one in value.items() if one is not None)
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(one) for one in value)}]"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return "inf" if value == math.inf else repr(value)
    raise ValueError(f"a config holds numbers, texts, lists and tables, got {value!r}")


def toml_key(key: str) -> str:
    """A key as TOML, in quotes where it needs them."""
    return key if key and all(one.isascii() and (one.isalnum() or one in "_-") for one in key) else json.dumps(key)
