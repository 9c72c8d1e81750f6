"""A window and the first tokens in one softmax: Beltagy et al., Longformer, arXiv:2004.05150."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from varifocal.attention.mechanisms.base import Call, HeadShape, Mechanism, MechanismConfig, Scale, Step
from varifocal.attention.mechanisms.sinks import SinkLogits, with_sinks, words_of_sinks
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.memories import Memory, SplitKeys
from varifocal.equations.branches import Branch, Window
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.equation import Equation


@dataclass(frozen=True, kw_only=True)
class LocalConfig(MechanismConfig):
    """How far back a query looks, and how many tokens at the start of a document everybody sees."""

    renamed = {"global_tokens": "sinks"}  # noqa: RUF012

    window: int = 256
    """Keys each query reads, its own included."""
    sinks: int = 4
    """First tokens of each document that stay readable; 0 for a window alone."""
    sink_logit: bool = False
    """Whether each head learns a number in the sum of its softmax, which takes what the head does not want to read."""

    def __post_init__(self) -> None:
        require_at_least("window", self.window, 1)
        require_at_least("sinks", self.sinks, 0)


class Local(Mechanism[LocalConfig]):
    """One softmax over the last `window` keys and the first `sinks` of the document."""

    name = "local"
    config_type = LocalConfig
    variants = (
        Variant({"window": 5, "sinks": 2}),
        Variant({"window": 5, "sinks": 0}, "window"),
        Variant({"window": 5, "sinks": 2, "sink_logit": True}, "sink logit"),
    )

    bench_options: ClassVar[Mapping[str, Any]] = {"sinks": 0}
    """A window alone, as those of other packages are."""

    def __init__(self, config: LocalConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        self.sink = SinkLogits(self.shape.heads) if self.config.sink_logit else None

    def reset_parameters(self) -> None:
        if self.sink is not None:
            self.sink.reset_parameters()

    def start_as_dense(self) -> None:
        if self.sink is not None:
            self.sink.close()

    @property
    def branch(self) -> Branch:
        """The window, and the first tokens if they stay readable."""
        return with_sinks(Window(self.config.window), self.config.sinks)

    def equation(self, call: Call) -> Equation:
        return Equation((self.branch,), normalizer=None if self.sink is None else self.sink.normalizer())

    def step(self) -> Step | None:
        return Step((self.branch,), sink=None if self.sink is None else self.sink.logit)

    def memory(self) -> Memory:
        if not self.config.sinks:
            return super().memory()
        return SplitKeys((self.config.window,) * self.shape.kv_heads, self.config.sinks)

    def farthest(self) -> int | None:
        return self.branch.farthest()

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        return {"window": scale.window}

    def words(self) -> str:
        return f"no gate: the last {self.config.window} keys{words_of_sinks(self.config.sinks)}"
