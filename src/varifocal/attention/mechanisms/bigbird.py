"""Window, global tokens and random blocks in one softmax: Zaheer et al., Big Bird, arXiv:2007.14062."""

from __future__ import annotations

from dataclasses import dataclass

from varifocal.attention.mechanisms.base import Call, Mechanism, MechanismConfig, MechanismOutput
from varifocal.equations.branches import Prefix, RandomBlocks, Window
from varifocal.equations.branches.base import require_at_least


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


class BigBird(Mechanism[BigBirdConfig]):
    """One softmax over the last `window` keys, the first `global_tokens` and `random_blocks` drawn blocks."""

    name = "bigbird"
    config_type = BigBirdConfig

    def focus(self, call: Call) -> MechanismOutput:
        config = self.config
        random = RandomBlocks(config.random_blocks, block=config.block, seed=config.seed)
        return MechanismOutput(call.attend(Window(config.window) | Prefix(config.global_tokens) | random).output)
