"""Our config as vLLM reads it: refused at once where the model cannot be served."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict

from varifocal.model.config import VarifocalConfig
from varifocal.serving.head_plan import plan_heads


@strict
class ServedConfig(VarifocalConfig):
    """A config whose layers all can be served."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        plan_heads(self)
