"""What the models return: transformers' outputs, and what the mechanisms have to say."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView, ValuesView
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from varifocal.model.late_logits import LateLogits, read


@dataclass
class VarifocalModelOutput(BaseModelOutputWithPast):
    """Hidden states and cache."""

    auxiliary_losses: dict[str, Tensor] | None = None
    """The mechanisms' losses by name, coefficients included, summed over the layers."""
    records: tuple[dict[str, Tensor], ...] | None = None
    """Each layer's MechanismOutput.records (gates, widths, selected keys), with output_records=True."""


@dataclass
class VarifocalCausalLMOutput(CausalLMOutputWithPast):
    """Loss, logits and cache. With labels, the logits are computed when they are read."""

    cross_entropy: Tensor | None = None
    """The loss without the auxiliary ones, detached. While the model trains, `loss` holds these as well."""
    auxiliary_losses: dict[str, Tensor] | None = None
    """The mechanisms' losses by name, coefficients included, summed over the layers, detached."""
    records: tuple[dict[str, Tensor], ...] | None = None
    """Each layer's MechanismOutput.records (gates, widths, selected keys), with output_records=True."""

    def __getitem__(self, key: Any) -> Any:
        """A value by name or number, several by a slice; those that nobody asks for are not computed."""
        if isinstance(key, str):
            return read(OrderedDict.__getitem__(self, key))
        names = list(self.keys())[key]
        return self[names] if isinstance(names, str) else tuple(self[name] for name in names)

    def items(self) -> ItemsView[str, Any]:
        """All names and values."""
        self.prepare_walk()
        return super().items()  # type: ignore[no-any-return]

    def values(self) -> ValuesView[Any]:
        """All values."""
        self.prepare_walk()
        return super().values()  # type: ignore[no-any-return]

    def prepare_walk(self) -> None:
        """Let a walk over all values meet a tensor in place of logits that were not read, unless the model trains."""
        held = vars(self).get("logits")
        if isinstance(held, LateLogits) and not held.training:
            OrderedDict.__setitem__(self, "logits", held.walked_over())


def held_logits(output: VarifocalCausalLMOutput) -> Any:
    """The logits as readers get them."""
    return read(vars(output).get("logits"))


def hold_logits(output: VarifocalCausalLMOutput, value: Any) -> None:
    """Keep the logits, or what computes them."""
    output.__dict__["logits"] = value


# After the dataclass was made: in its body it would be taken for the field's default.
VarifocalCausalLMOutput.logits = property(held_logits, hold_logits)
