"""Varifocal: attention that adapts its focus between near and far.

`attend` evaluates the one equation that all mechanisms share; `make_mechanism` gives a trainable module by name.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varifocal.names import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """A public name, from `varifocal.names`, where torch is loaded: not before one is asked for."""
    # Python asks here for submodules too before it looks for their files, `names` among them.
    if name == "names" or (name.startswith("__") and name != "__all__"):
        raise AttributeError(f"module 'varifocal' has no attribute {name!r}")
    names = import_module("varifocal.names")
    if name == "__all__":
        return names.__all__
    if name not in names.__all__:
        raise AttributeError(f"module 'varifocal' has no attribute {name!r}")
    found = globals()[name] = getattr(names, name)
    return found


def __dir__() -> list[str]:
    return ["__version__", *import_module("varifocal.names").__all__]
