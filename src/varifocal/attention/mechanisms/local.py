"""A window and a few global tokens in one softmax: Beltagy et al., Longformer, arXiv:2004.05150."""

from __future__ import annotations

from dataclasses import dataclass

from varifocal.attention.mechanisms.base import Call, Mechanism, MechanismConfig, MechanismOutput
from varifocal.equations.branches import Branch, Prefix, Window
from varifocal.equations.branches.base import require_at_least


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

    def focus(self, call: Call) -> MechanismOutput:
        branch: Branch = Window(self.config.window)
        if self.config.global_tokens:
            branch = branch | Prefix(self.config.global_tokens)
        return MechanismOutput(call.attend(branch).output)
