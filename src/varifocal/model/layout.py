"""The layout of a text that a model is given: after how many cached tokens, in which documents, where rotary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.attention.checks import check_runs
from varifocal.equations.layout import Layout, make_layout


class TextPlaces(NamedTuple):
    """Where the T tokens of a call stand."""

    layout: Layout
    """Among all tokens so far, those of the cache included."""
    rotary: Tensor
    """int64 [B or 1, T]: the rotary position of each token, by default its place in its document."""


def documents_of(layout: Layout) -> Tensor | None:
    """The documents [B, T] of a call's tokens, negative for padding; None if every row is one document."""
    return None if layout.one_document else torch.where(layout.query_place >= 0, layout.start, -1)


def lay_out_text(
    batch: int,
    length: int,
    *,
    past: int = 0,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    documents: Tensor | None = None,
    device: torch.device,
) -> TextPlaces:
    """The layout of a call.

    Args:
        batch: B.
        length: T, the tokens of this call.
        past: how many tokens the cache holds before them.
        attention_mask: [B, past + T], 1 for text and 0 for padding on one side of it.
        position_ids: integers [B or 1, T], the rotary positions. Without a cache, mask or documents, a token that does
            not follow its left neighbour's position begins a new document (packed documents).
        documents: integers [B, past + T], the document of every token so far; negative for padding.
        device: where the tokens are.
    """
    total = past + length
    if documents is not None and attention_mask is not None:
        raise ValueError("give documents or attention_mask, not both; padding is a negative document")
    if documents is not None:
        check_shape("documents", documents, (batch, total), past)
        if documents.is_floating_point() or documents.dtype == torch.bool:
            raise ValueError(f"documents must be integers, got {documents.dtype}")
        documents = documents.to(device, torch.int64)
        check_runs(documents)
    elif attention_mask is not None:
        documents = documents_of_mask(attention_mask.to(device), (batch, total), past)
    if position_ids is not None:
        if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
            raise ValueError(f"position_ids must be [B, T] = {(batch, length)}, got shape {tuple(position_ids.shape)}")
        position_ids = position_ids.to(device, torch.int64)
        if documents is None and attention_mask is None:
            documents = documents_of_positions(position_ids.expand(batch, length), past=past)
    layout = make_layout(batch=batch, queries=length, keys=total, documents=documents, positions=None, device=device)
    if position_ids is None:
        place = layout.query_place
        position_ids = place[:1] if layout.one_document else place.clamp(min=0)
    return TextPlaces(layout, position_ids)


def documents_of_mask(mask: Tensor, expected: tuple[int, int], past: int) -> Tensor | None:
    """Document 0 where the mask [B, past + T] is 1, padding where it is 0; None if nothing is padding."""
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask must be [B, S] of 1 for text and 0 for padding, got shape {tuple(mask.shape)}; "
            "what a query may read is the mechanism's to say, and packed documents are given as documents"
        )
    check_shape("attention_mask", mask, expected, past)
    mask = mask.to(torch.int64)
    if torch.compiler.is_compiling():
        return mask - 1
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("attention_mask must hold 0 and 1 only; give packed documents as documents=")
    if bool(mask.all()):
        return None
    edges = (mask.diff(dim=1, prepend=mask.new_zeros(len(mask), 1)) == 1).sum(dim=1)
    if bool((edges > 1).any()):
        row = int((edges > 1).nonzero()[0])
        raise ValueError(f"attention_mask has zeros between the ones of row {row}; pad on one side of the text")
    return mask - 1


def documents_of_positions(positions: Tensor, *, past: int) -> Tensor | None:
    """Documents [B, T] that begin where a position [B, T] does not follow its left neighbour's; None if none does."""
    if past:
        return None
    begins = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
    if not torch.compiler.is_compiling() and not bool(begins.any()):
        return None
    return begins.to(torch.int64).cumsum(dim=1)


def check_shape(name: str, given: Tensor, expected: tuple[int, int], past: int) -> None:
    """ValueError unless a tensor covers the cached tokens and those of the call."""
    if tuple(given.shape) != expected:
        raise ValueError(
            f"{name} must be [B, S] = {expected}, for {past} cached tokens and {expected[1] - past} new ones, "
            f"got shape {tuple(given.shape)}"
        )
