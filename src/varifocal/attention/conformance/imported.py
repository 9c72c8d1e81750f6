"""An attention that somebody names by where it is written: `module:name`."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from varifocal.attention.conformance.subject import Attention
from varifocal.attention.conformance.variants import variants_of
from varifocal.attention.mechanisms.base import Mechanism
from varifocal.attention.mechanisms.registry import nearest, register


def subjects_of(wanted: str) -> tuple[str | Attention, ...]:
    """What `check` is to be given for a mechanism's name, a variant's, or `module:name`.

    A function is checked as it is, a class of attention as what it makes without arguments, and a mechanism in its
    variants, as if it were registered. ValueError if there is no such thing.
    """
    if ":" not in wanted:
        return variants_of(wanted)
    found = import_path(wanted)
    if isinstance(found, type) and issubclass(found, Mechanism):
        return variants_of(register(found).name)
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:
            raise ValueError(
                f"{wanted} is a class that cannot be made without arguments ({type(error).__name__}: {error}); name a "
                "function or an instance"
            ) from error
    if not callable(found):
        raise ValueError(f"{wanted} is {found!r}; expected a mechanism, or a function or class of q, k and v")
    return (found,)


def import_path(path: str) -> Any:
    """What `module:name` stands for; the name may lead on, as in module:Class.method."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"expected module:name, such as my_package.attention:MyAttention, got {path!r}")
    try:
        found: Any = importlib.import_module(module)
    # Whatever the module does when it is loaded may fail.
    except Exception as error:
        raise ValueError(f"the module {module!r} cannot be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module!r} has no {part!r}{nearest(part, dir(found))}, asked for by {path!r}")
        found = getattr(found, part)
    return found
