"""What the text beyond a window is worth to each prediction: the loss without it, minus the loss with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from varifocal.model.head import token_losses
from varifocal.model.loss import IGNORED, next_token_labels
from varifocal.model.modeling import VarifocalForCausalLM

PARTS = 16
"""Parts of a text that run at once."""


@torch.no_grad()
def labelled_losses(model: VarifocalForCausalLM, hidden: Tensor, labels: Tensor) -> Tensor:
    """The loss float32 [B, T] of labels [B, T] from the last hidden states [B, T, C]; NaN where there is no label."""
    counted = labels != IGNORED
    losses = torch.full(labels.shape, float("nan"), device=hidden.device)
    losses[counted] = token_losses(model.lm_head, hidden[counted], labels[counted])
    return losses


@torch.no_grad()
def windowed_losses(
    model: VarifocalForCausalLM, ids: Tensor, documents: Tensor, *, window: int, labels: Tensor | None = None
) -> Tensor:
    """The loss [T] of the token after each token [T] when no more than the last `window` tokens are given.

    `labels` [T] are the tokens to predict, by default those that follow in the same document. The text is cut into
    parts of `window` tokens, each starting half a window after the one before. Each prediction is taken from the part
    that shows it the most text: more than half a window, and at most a whole one.
    """
    length, half = len(ids), max(1, window // 2)
    begins = torch.arange(0, max(1, length - half), half)
    spare = int(begins[-1]) + 2 * half - length
    labels = next_token_labels(ids[None], documents[None])[0] if labels is None else labels
    labels = pad(labels, (0, max(0, spare)), value=IGNORED)
    ids, documents = pad(ids, (0, max(0, spare))), pad(documents, (0, max(0, spare)), value=-1)
    index = (begins[:, None] + torch.arange(2 * half)).to(ids.device)  # [N, window]
    losses = torch.full_like(ids, float("nan"), dtype=torch.float32)
    for part in torch.split(index, PARTS):
        hidden = model.model(input_ids=ids[part], documents=documents[part], use_cache=False).last_hidden_state
        found = labelled_losses(model, hidden, labels[part])
        # Each part gives the predictions of its second half; the first part gives both halves.
        losses[part[:, half:]] = found[:, half:]
        if int(part[0, 0]) == 0:
            losses[part[0, :half]] = found[0, :half]
    return losses[:length]
