"""Window, global tokens and random blocks in one softmax: Zaheer et al., Big Bird, arXiv:2007.14062."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from varifocal.attention.mechanisms.base import Call, Mechanism, MechanismConfig, Scale
from varifocal.attention.mechanisms.variant import Variant
from varifocal.equations.branches import Prefix, RandomBlocks, Window
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.equation import Equation


@dataclass(frozen=True, kw_only=True)
class BigBirdConfig(MechanismConfig):
    """Big Bird's base sizes in its own unit, blocks of 64: 3 in the window, 2 global, 3 random."""

    window: int = 192
    global_tokens: int = 128
    random_blocks: int = 3
    block: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("window", "global_tokens", "random_blocks", "block"):
            require_at_least(name, getattr(self, name), 1)

    def in_layer(self, layer: int) -> Self:
        """Each layer draws random blocks of its own."""
        return replace(self, seed=self.seed + layer)


class BigBird(Mechanism[BigBirdConfig]):
    """One softmax over the last `window` keys, the first `global_tokens` and `random_blocks` drawn blocks."""

    name = "bigbird"
    config_type = BigBirdConfig
    variants = (Variant({"window": 4, "global_tokens": 2, "random_blocks": 2, "block": 3}),)

    def equation(self, call: Call) -> Equation:
        config = self.config
        random = RandomBlocks(config.random_blocks, block=config.block, seed=config.seed)
        return Equation((Window(config.window) | Prefix(config.global_tokens) | random,))

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        window = scale.window
        return {"window": 3 * window // 4, "global_tokens": window // 2, "block": window // 4}

    def words(self) -> str:
        config = self.config
        drawn = f"the first {config.global_tokens} of the text and {config.random_blocks} random blocks"
        return f"no gate: the last {config.window} keys, {drawn}"
