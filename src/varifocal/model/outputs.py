"""What the models return: transformers' outputs, and what the mechanisms have to say."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from varifocal.equations.layout import Layout


@dataclass
class VarifocalModelOutput(BaseModelOutputWithPast):
    """Hidden states and cache."""

    auxiliary_losses: dict[str, Tensor] | None = None
    """The mechanisms' losses by name, coefficients included, summed over the layers."""
    records: tuple[dict[str, Tensor], ...] | None = None
    """Each layer's MechanismOutput.records (gates, widths, selected keys), with output_records=True."""
    layout: Layout | None = None
    """Where the tokens stood."""


@dataclass
class VarifocalCausalLMOutput(CausalLMOutputWithPast):
    """Loss, logits and cache."""

    cross_entropy: Tensor | None = None
    """The loss without the auxiliary ones, detached. While the model trains, `loss` holds these as well."""
    auxiliary_losses: dict[str, Tensor] | None = None
    """The mechanisms' losses by name, coefficients included, summed over the layers, detached."""
    records: tuple[dict[str, Tensor], ...] | None = None
    """Each layer's MechanismOutput.records (gates, widths, selected keys), with output_records=True."""
