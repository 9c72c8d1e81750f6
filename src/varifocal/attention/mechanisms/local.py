"""A window and a few global tokens in one softmax: Beltagy et al., Longformer, arXiv:2004.05150."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from varifocal.attention.mechanisms.base import Call, Mechanism, MechanismConfig, Scale, Step
from varifocal.attention.mechanisms.variant import Variant
from varifocal.equations.branches import Branch, Prefix, Window
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.equation import Equation


@dataclass(frozen=True, kw_only=True)
class LocalConfig(MechanismConfig):
    """How far back a query looks, and how many tokens at the start of a document everybody sees."""

    window: int = 256
    """Keys each query reads, its own included."""
    global_tokens: int = 4
    """Tokens at the start of each document that every later token reads; 0 for a window alone."""

    def __post_init__(self) -> None:
        require_at_least("window", self.window, 1)
        require_at_least("global_tokens", self.global_tokens, 0)


class Local(Mechanism[LocalConfig]):
    """One softmax over the last `window` keys and the first `global_tokens` of the document."""

    name = "local"
    config_type = LocalConfig
    variants = (
        Variant({"window": 5, "global_tokens": 2}),
        Variant({"window": 5, "global_tokens": 0}, "window"),
    )

    bench_options: ClassVar[Mapping[str, Any]] = {"global_tokens": 0}
    """A window alone, as those of other packages are."""

    @property
    def branch(self) -> Branch:
        """The window, and the global tokens if there are any."""
        window = Window(self.config.window)
        return window | Prefix(self.config.global_tokens) if self.config.global_tokens else window

    def equation(self, call: Call) -> Equation:
        return Equation((self.branch,))

    def step(self) -> Step | None:
        return Step((self.branch,))

    def farthest(self) -> int | None:
        return self.branch.farthest()

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        return {"window": scale.window}

    def words(self) -> str:
        first = f" and the first {self.config.global_tokens} of the text" if self.config.global_tokens else ""
        return f"no gate: the last {self.config.window} keys{first}"
