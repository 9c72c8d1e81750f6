"""Mechanisms by name, and their configs to and from plain options."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from importlib.metadata import entry_points
from typing import Any, TypeVar

from varifocal.attention.mechanisms.adaptively_sparse import AdaptivelySparse
from varifocal.attention.mechanisms.base import HeadShape, Mechanism, MechanismConfig
from varifocal.attention.mechanisms.bigbird import BigBird
from varifocal.attention.mechanisms.combiner import Combiner
from varifocal.attention.mechanisms.context_adaptive import ContextAdaptive
from varifocal.attention.mechanisms.dense import Dense
from varifocal.attention.mechanisms.dynamic_sparse import DynamicSparse
from varifocal.attention.mechanisms.fastmax import Fastmax
from varifocal.attention.mechanisms.focused import Focused
from varifocal.attention.mechanisms.head_gated import HeadGated
from varifocal.attention.mechanisms.infini import Infini
from varifocal.attention.mechanisms.local import Local
from varifocal.attention.mechanisms.positional_prior import PositionalPrior
from varifocal.attention.mechanisms.relative_position import RelativePosition
from varifocal.attention.mechanisms.routing import Routing
from varifocal.attention.mechanisms.sparse_geometric import SparseGeometric
from varifocal.attention.mechanisms.sparse_transformer import SparseTransformer

ENTRY_POINTS = "varifocal.mechanisms"
"""The group of entry points by which other packages offer mechanisms: `stem = module:Class`."""
MOST_NUMBER = 1 << 62
"""The largest number that an option may have: counts of keys are 64-bit integers in every kernel."""

MechanismT = TypeVar("MechanismT", bound=type[Mechanism[Any]])


class Registry(Mapping[str, type[Mechanism[Any]]]):
    """The mechanisms by stem: ours first, in the order of the tables, then those that were registered.

    What other packages offer by entry points is loaded when a name is first looked up that is not known yet, or when
    all mechanisms are listed.
    """

    def __init__(self, known: Iterable[type[Mechanism[Any]]]) -> None:
        self._known = {mechanism.name: mechanism for mechanism in known}
        self.ours = tuple(self._known)
        """The stems of those that this package brings."""
        self._offers_are_loaded = False

    def add(self, mechanism: type[Mechanism[Any]]) -> None:
        """Make a mechanism known by its name."""
        name = getattr(mechanism, "name", None)
        if not (isinstance(mechanism, type) and issubclass(mechanism, Mechanism)) or not isinstance(name, str):
            raise ValueError(f"expected a subclass of Mechanism with a name, got {mechanism!r}")
        check_config_type(mechanism)
        before = self._known.get(name, mechanism)
        # The same class may come again: a cell of a notebook that is run once more.
        again = (before.__module__, before.__qualname__) == (mechanism.__module__, mechanism.__qualname__)
        if before is not mechanism and (name in self.ours or not again):
            raise ValueError(f"the name {name!r} is taken by {before.__qualname__}; give it another one")
        self._known[name] = mechanism

    def load_offers(self) -> None:
        """Load what installed packages offer by entry points, once."""
        if self._offers_are_loaded:
            return
        for offer in entry_points(group=ENTRY_POINTS):
            package = "an installed package" if offer.dist is None else f"the package {offer.dist.name}"
            try:
                mechanism = offer.load()
                self.add(mechanism)
            except Exception as error:
                raise ValueError(
                    f"{package} offers the mechanism {offer.name!r} ({offer.value}), which cannot be loaded: {error}; "
                    "repair or uninstall it"
                ) from error
            if mechanism.name != offer.name:
                raise ValueError(
                    f"{package} offers {offer.value} as {offer.name!r}, but its name is {mechanism.name!r}; "
                    "the entry point must have the mechanism's name"
                )
        self._offers_are_loaded = True

    def __getitem__(self, name: str) -> type[Mechanism[Any]]:
        if name not in self._known:
            self.load_offers()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        self.load_offers()
        return iter(self._known)

    def __len__(self) -> int:
        self.load_offers()
        return len(self._known)


def check_config_type(mechanism: type[Mechanism[Any]]) -> None:
    """ValueError unless a mechanism says what its options are, with a default for each."""
    config_type = getattr(mechanism, "config_type", None)
    if not (isinstance(config_type, type) and issubclass(config_type, MechanismConfig) and is_dataclass(config_type)):
        raise ValueError(
            f"{mechanism.__qualname__} needs a config_type, a frozen dataclass that extends MechanismConfig, "
            f"got {config_type!r}; without options, config_type = MechanismConfig"
        )
    missing = [one.name for one in fields(config_type) if one.default is MISSING and one.default_factory is MISSING]
    if missing:
        raise ValueError(f"every option of {config_type.__qualname__} needs a default, {missing[0]!r} has none")


MECHANISMS = Registry((
    *(Dense, Local, Combiner, DynamicSparse, ContextAdaptive, HeadGated, SparseGeometric, BigBird),
    *(SparseTransformer, Focused, PositionalPrior, RelativePosition, AdaptivelySparse),
    *(Routing, Fastmax, Infini),
))  # fmt: skip
"""All mechanisms by stem."""


def register(mechanism: MechanismT) -> MechanismT:
    """Make a mechanism of your own known by its name, everywhere; also a decorator of its class."""
    MECHANISMS.add(mechanism)
    return mechanism


def make_mechanism(name: str, shape: HeadShape | None = None, **options: Any) -> Mechanism[Any]:
    """A mechanism by its stem, for example make_mechanism("head_gated", shape, window=128, gate={"kind": "mlp"})."""
    return mechanism_type(name)(config_from_options(name, options), shape)


def mechanism_type(name: str) -> type[Mechanism[Any]]:
    """The module of that stem; ValueError with the nearest name if there is none."""
    if name not in MECHANISMS:
        raise ValueError(
            f"unknown mechanism {name!r}{nearest(name, MECHANISMS)}; known are {', '.join(MECHANISMS)}; "
            "those of other packages are known once these are installed, or imported and registered"
        )
    return MECHANISMS[name]


def config_from_options(name: str, options: Mapping[str, Any]) -> MechanismConfig:
    """The frozen config of mechanism `name` from plain options."""
    config_type = mechanism_type(name).config_type
    config: MechanismConfig = config_type(**checked_options(f"mechanism {name!r}", options, config_type()))
    return config


def options_from_config(config: MechanismConfig) -> dict[str, Any]:
    """The plain options (numbers, strings, nested dicts) that give this config again, ready for JSON."""
    return asdict(config)


def checked_options(owner: str, options: Mapping[str, Any], defaults: Any) -> dict[str, Any]:
    """The options as the config takes them; ValueError for one it does not have or whose type is not the default's.

    Where the default is a config itself (a gate's), a dict of options is laid over it.
    """
    known = [field.name for field in fields(defaults)]
    values: dict[str, Any] = {}
    for option, value in with_present_names(owner, options, getattr(defaults, "renamed", {})).items():
        if option not in known:
            offered = ", ".join(known) if known else "none"
            raise ValueError(f"{owner} has no option {option!r}{nearest(option, known)}; its options are: {offered}")
        default = getattr(defaults, option)
        if is_dataclass(default) and not isinstance(value, type(default)):
            values[option] = inner_config(option, owner, value, default)
            continue
        # bool is a subclass of int, and True is not a number of keys.
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(default, bool | str):
            fits = isinstance(value, type(default))
        elif isinstance(default, int):
            # 1e3 is a float to TOML, and a whole number to people.
            fits = number and (isinstance(value, int) or value.is_integer())
        elif isinstance(default, float) or default is None:
            fits = number or (default is None and value is None)
        else:
            fits = True
        if not fits:
            raise ValueError(
                f"{owner}: option {option!r} must be of the kind of its default {default!r}, got {value!r}"
            )
        # Of infinity and NaN the config itself says what it expects instead.
        finite = number and (isinstance(value, int) or math.isfinite(value))
        if finite and not -MOST_NUMBER <= value <= MOST_NUMBER:
            raise ValueError(f"{owner}: option {option!r} must lie within +-{MOST_NUMBER}, got {reprlib.repr(value)}")
        if type(default) is int:
            value = int(value)
        # JSON and TOML know no tuples.
        values[option] = tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value
    return values


def with_present_names(owner: str, options: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """The options, those with a name of earlier versions under the one that they have now."""
    for old, new in renamed.items():
        if old in options and new in options:
            raise ValueError(f"{owner}: option {old!r} is now called {new!r}, got both; leave {old!r} out")
    return {renamed.get(option, option): value for option, value in options.items()}


def inner_config(option: str, owner: str, value: Any, default: Any) -> Any:
    """A config that is an option of another one, from a dict of its own options."""
    owner = f"the {option} of {owner.removeprefix('mechanism ')}"
    if not isinstance(value, Mapping):
        raise ValueError(f"{owner} must be a {type(default).__name__} or a dict of its options, got {value!r}")
    return replace(default, **checked_options(owner, value, default))


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' if a known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
