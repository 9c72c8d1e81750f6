"""Finds and loads libvarifocal, and lists the processor targets it was compiled for."""

import ctypes
import functools
import importlib.metadata
import os
import pathlib
import sys
from typing import Any

from . import abi

_FOLDER = "varifocal/kernels/native"
_NAME = "libvarifocal.dylib" if sys.platform == "darwin" else "libvarifocal.so"


def _path() -> pathlib.Path:
    """Where the library was installed (an editable install keeps it apart from the Python files)."""
    forced = os.environ.get("VARIFOCAL_LIBRARY")
    if forced is not None:
        return pathlib.Path(forced)
    try:
        return pathlib.Path(str(importlib.metadata.distribution("varifocal").locate_file(f"{_FOLDER}/{_NAME}")))
    except importlib.metadata.PackageNotFoundError:
        return pathlib.Path(__file__).parent / _NAME


def _open() -> ctypes.CDLL | str:
    """The loaded library, or the reason why there is none."""
    import torch  # noqa: F401  # loads torch's OpenMP runtime first, so that both share one pool of threads

    path = _path()
    remedy = "reinstall varifocal" if os.environ.get("VARIFOCAL_LIBRARY") is None else "unset VARIFOCAL_LIBRARY"
    try:
        if not path.exists():
            return f"{path.name} was not built when varifocal was installed; reinstall it where a C++ compiler is found"
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path} cannot be loaded: {error}; {remedy}"
    wrong = abi.mismatch(library)
    return library if wrong is None else f"{path} {wrong}; {remedy}"


_LIBRARY = _open()
"""Opened once, when this module is imported: torch.compile cannot trace the opening, only its result."""


def why_missing() -> str | None:
    """None if the native library is there, else one sentence that says why not."""
    return _LIBRARY if isinstance(_LIBRARY, str) else None


def library() -> ctypes.CDLL:
    """The loaded library; RuntimeError with the reason if there is none."""
    if isinstance(_LIBRARY, str):
        raise RuntimeError(f"the native kernels are missing: {_LIBRARY}")
    return _LIBRARY


@functools.cache
def targets() -> dict[str, int]:
    """Targets this processor can run, best first: name -> index for the C interface."""
    found = library()
    runnable = [index for index in range(found.vf_target_count()) if found.vf_target_runs(index)]
    return {found.vf_target_name(index).decode(): index for index in runnable}


def target() -> int:
    """Index of the target in use: the best one, or the one VARIFOCAL_TARGET names."""
    forced = os.environ.get("VARIFOCAL_TARGET")
    if forced is None:
        return next(iter(targets().values()))
    if forced not in targets():
        raise ValueError(f"VARIFOCAL_TARGET is {forced!r}; this library and processor run {', '.join(targets())}")
    return targets()[forced]


@functools.cache
def _function(name: str) -> Any:
    """A function of the C interface, by its name without `vf_`."""
    return getattr(library(), f"vf_{name}")


def call(function: str, argument: ctypes.Structure) -> None:
    """Call a function of the C interface, by its name without `vf_`; a bad status becomes an exception."""
    status = _function(function)(target(), ctypes.byref(argument))
    if status:
        text = library().vf_status_text(status).decode()
        raise MemoryError(f"{function}: {text}") if status == abi.NO_MEMORY else ValueError(f"{function}: {text}")
