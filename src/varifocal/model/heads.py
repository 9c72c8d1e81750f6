"""Heads that classify texts or tokens, or find an answer in a text: transformers' own on our model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.utils import can_return_tuple

from varifocal.model.config import VarifocalConfig
from varifocal.model.modeling import VarifocalPreTrainedModel
from varifocal.model.outputs import VarifocalModelOutput


def with_auxiliary_losses(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A head's forward pass that adds the mechanisms' losses to its own while the model trains."""

    # Trainer reads in the signature which labels a model takes.
    @functools.wraps(forward)
    def with_them(self: VarifocalPreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return forward(self, *args, **kwargs)
        losses: list[Tensor] = []

        def note(_: Any, __: Any, output: VarifocalModelOutput) -> None:
            losses.extend((output.auxiliary_losses or {}).values())

        # The head looks at the hidden states alone.
        watched = self.base_model.register_forward_hook(note)
        try:
            output = forward(self, *args, **kwargs, return_dict=True)
        finally:
            watched.remove()
        if output.loss is not None and losses:
            output.loss = output.loss + sum(losses)
        return output

    wrapped: Callable[..., Any] = can_return_tuple(with_them)
    return wrapped


class VarifocalForSequenceClassification(GenericForSequenceClassification, VarifocalPreTrainedModel):
    """A class, or a number, for each text."""

    forward = with_auxiliary_losses(GenericForSequenceClassification.forward)


class VarifocalForTokenClassification(GenericForTokenClassification, VarifocalPreTrainedModel):
    """A class for each token."""

    forward = with_auxiliary_losses(GenericForTokenClassification.forward)


class VarifocalForQuestionAnswering(GenericForQuestionAnswering, VarifocalPreTrainedModel):
    """Where in a text an answer begins and ends."""

    forward = with_auxiliary_losses(GenericForQuestionAnswering.forward)


AutoModelForSequenceClassification.register(VarifocalConfig, VarifocalForSequenceClassification)
AutoModelForTokenClassification.register(VarifocalConfig, VarifocalForTokenClassification)
AutoModelForQuestionAnswering.register(VarifocalConfig, VarifocalForQuestionAnswering)
