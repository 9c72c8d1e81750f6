"""The layout of a text that a model is given: after how many cached tokens, in which documents, where rotary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from varifocal.attention.checks import check_runs
from varifocal.equations.layout import Layout, make_layout
from varifocal.model.arrangement import Arrangement, padding_first, taken


class TextPlaces(NamedTuple):
    """Where the T tokens of a call stand."""

    layout: Layout
    """Among all tokens so far, those of the cache included."""
    rotary: Tensor
    """int64 [B or 1, T]: the rotary position of each token, by default its place in its document."""
    arrangement: Arrangement | None = None
    """Where the tokens stand, if that is not where they were given."""
    packed: bool = False
    """Whether documents follow each other in a row, as this call alone says."""


class Standing(NamedTuple):
    """What a cache tells of the order of its tokens, and takes of new ones."""

    past: int = 0
    """How many tokens it holds."""
    padding_first: int = 0
    """Of how many of them, from the first, the padding was put before the text."""
    keeps_order: bool = False
    """Whether later calls will read the tokens of this one where it puts them."""
    arranges: bool = True
    """Whether the tokens of this call may stand elsewhere than they are given."""
    filled: Tensor | None = None
    """In compiled code, int64 []: how many tokens a static cache holds, in place of `past`."""
    room: int = 0
    """For how many tokens it has room, all of which are keys to compiled code."""


ALONE = Standing()
"""A call without a cache."""


def lay_out_text(
    batch: int,
    length: int,
    *,
    standing: Standing = ALONE,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    documents: Tensor | None = None,
    lengths: tuple[Tensor | None, Tensor | None] = (None, None),
    device: torch.device,
) -> TextPlaces:
    """The layout of a call.

    Args:
        batch: B.
        length: T, the tokens of this call.
        standing: what the cache holds before them.
        attention_mask: [B, past + T], 1 for text and 0 for padding, or [B, 1, T, past + T] where that says as much.
        position_ids: integers [B or 1, T], the rotary positions. Without a cache, mask or documents, a token that does
            not follow its left neighbour's position begins a new document (packed documents).
        documents: integers [B, past + T], the document of every token so far; negative for padding.
        lengths: cu_seq_lens_q and cu_seq_lens_k, as in `documents_of_lengths`.
        device: where the tokens are.
    """
    past, total = standing.past, standing.past + length
    positions = None
    if standing.filled is not None:
        # Every place of a static cache is a key, and those after a query's own are never read.
        total, positions = standing.room, standing.filled + torch.arange(length, device=device)
    arrangement, packed = None, lengths[0] is not None
    if packed:
        if documents is not None or attention_mask is not None or past:
            raise ValueError(
                "cu_seq_lens_q separates the packed documents of a whole text; give no documents, attention_mask or "
                "filled cache with it"
            )
        documents = documents_of_lengths(lengths, (batch, length))
    if documents is not None and attention_mask is not None:
        raise ValueError("give documents or attention_mask, not both; padding is a negative document")
    if documents is not None:
        check_shape("documents", documents, (batch, total), past)
        if documents.is_floating_point() or documents.dtype == torch.bool:
            raise ValueError(f"documents must be integers, got {documents.dtype}")
        documents = documents.to(device, torch.int64)
        if not torch.compiler.is_compiling():
            check_runs(documents)
    elif attention_mask is not None and attention_mask.ndim == 4:
        documents = documents_of_pairs(attention_mask.to(device), (batch, length, total))
    elif attention_mask is not None:
        # For compiled code, generation makes the mask as long as the cache.
        given = attention_mask[:, :total] if standing.keeps_order else attention_mask
        mask = checked_mask(given.to(device), (batch, total), past)
        arrangement = arrangement_of_mask(mask, standing)
        if arrangement is not None:
            mask = taken(mask, arrangement.given, dim=1)
        documents = documents_of_mask(mask)
    if position_ids is not None:
        if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
            raise ValueError(f"position_ids must be [B, T] = {(batch, length)}, got shape {tuple(position_ids.shape)}")
        position_ids = position_ids.to(device, torch.int64)
        if documents is None and attention_mask is None and positions is None:
            documents = documents_of_positions(position_ids.expand(batch, length), past=past)
            packed = packed or documents is not None
        if arrangement is not None:
            position_ids = arrangement.arrange(position_ids.expand(batch, length))
    if arrangement is not None and arrangement.texts is not None:
        length = arrangement.texts.shape[1]
    layout = make_layout(
        batch=batch, queries=length, keys=total, documents=documents, positions=positions, device=device
    )
    if position_ids is None:
        place = layout.query_place
        position_ids = place[:1] if layout.one_document else place.clamp(min=0)
    return TextPlaces(layout, position_ids, arrangement, packed)


def documents_of_labels(
    labels: Tensor,
    *,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    documents: Tensor | None,
    lengths: tuple[Tensor | None, Tensor | None],
) -> Tensor | None:
    """The documents [B, T] of tokens with labels [B, T], where they were given; None if every row is one document.

    The other arguments are those of `lay_out_text`, for the cached tokens too.
    """
    batch, length = labels.shape
    if attention_mask is not None and attention_mask.ndim == 4:
        total = attention_mask.shape[-1]
        documents = documents_of_pairs(attention_mask.to(labels.device), (batch, length, total))
    elif attention_mask is not None:
        documents = attention_mask.to(labels.device, torch.int64) - 1
    elif lengths[0] is not None:
        documents = documents_of_lengths(lengths, (batch, length))
    elif documents is None and position_ids is not None:
        documents = documents_of_positions(position_ids.to(labels.device).expand(batch, length), past=0)
    return None if documents is None else documents[:, documents.shape[1] - length :].to(labels.device)


def checked_mask(mask: Tensor, expected: tuple[int, int], past: int) -> Tensor:
    """The mask [B, past + T] as int64 of 0 and 1."""
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask must be [B, S] of 1 for text and 0 for padding, got shape {tuple(mask.shape)}; "
            "what a query may read is the mechanism's to say, and packed documents are given as documents"
        )
    check_shape("attention_mask", mask, expected, past)
    whole = mask.to(torch.int64)
    if not torch.compiler.is_compiling() and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("attention_mask must hold 0 and 1 only; give packed documents as documents=")
    return whole


def arrangement_of_mask(mask: Tensor, standing: Standing) -> Arrangement | None:
    """How tokens stand whose padding the mask [B, past + T] tells; None for as they were given."""
    past, before = standing.past, standing.padding_first
    if standing.arranges and not torch.compiler.is_compiling():
        found = of_new_padding(mask, past, before) if past else of_first_tokens(mask, keeps_order=standing.keeps_order)
        if found is not None:
            return found
    if not before:
        return None
    rest = torch.arange(before, mask.shape[1], device=mask.device).expand(len(mask), -1)
    return Arrangement(torch.cat((padding_first(mask[:, :before]), rest), dim=1), past, moves=False)


def of_first_tokens(mask: Tensor, *, keeps_order: bool) -> Arrangement | None:
    """How the first tokens of a text stand, from their mask [B, T]."""
    # Padding after a text is in nobody's way, unless the text goes on in a later call.
    in_the_way = (mask.diff(dim=1) == -1) if keeps_order else (runs_of_text(mask) > 1)
    return Arrangement(padding_first(mask), 0, True, up_to_last(mask == 0)) if bool(in_the_way.any()) else None


def of_new_padding(mask: Tensor, past: int, before: int) -> Arrangement | None:
    """How tokens stand that come with padding after cached ones, from the mask [B, past + T] of all.

    Memories can be told of padding before their first token, if it is the same number of tokens in every row.
    """
    padding = (mask[:, past:] == 0).sum(dim=1)
    count = int(padding[0]) if len(padding) else 0
    cached = torch.cat((mask[:, :before].sort(dim=1).values, mask[:, before:past]), dim=1)
    in_order = not bool((cached.diff(dim=1) == -1).any())
    if not 0 < count < mask.shape[1] - past or not in_order or bool((padding != count).any()):
        return None
    texts = mask[:, past:].sort(dim=1, stable=True).indices[:, count:]
    return Arrangement(padding_first(mask), past, True, up_to_last(mask == 0), texts)


def up_to_last(padding: Tensor) -> Tensor:
    """Padding bool [B, S] up to the last token that is padding in any row."""
    return padding[:, : int(padding.any(dim=0).nonzero()[-1]) + 1]


def runs_of_text(mask: Tensor) -> Tensor:
    """[B]: in how many places of a row of the mask [B, S] a text begins."""
    return (mask.diff(dim=1, prepend=mask.new_zeros(len(mask), 1)) == 1).sum(dim=1)


def documents_of_mask(mask: Tensor) -> Tensor | None:
    """Document 0 where the mask [B, past + T] is 1, padding where it is 0; None if nothing is padding."""
    if torch.compiler.is_compiling():
        return mask - 1
    if bool(mask.all()):
        return None
    runs = runs_of_text(mask)
    if bool((runs > 1).any()):
        row = int((runs > 1).nonzero()[0])
        raise ValueError(
            f"attention_mask has zeros between the ones of row {row}, after text that the cache holds already; "
            "pad a text on one side"
        )
    return mask - 1


def documents_of_pairs(mask: Tensor, expected: tuple[int, int, int]) -> Tensor | None:
    """The documents [B, past + T] of a mask [B, 1, T, past + T] that says of every pair whether it may be read.

    True or 0 reads, False or a large negative number does not. Which keys of its own document a query reads is the
    mechanism's to say, so the mask may only separate documents and padding.
    """
    batch, length, total = expected
    if tuple(mask.shape) != (batch, 1, length, total):
        raise ValueError(
            f"attention_mask of pairs must be [B, 1, T, S] = {(batch, 1, length, total)}, got shape {tuple(mask.shape)}"
        )
    readable = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0
    index = torch.arange(total, device=mask.device)
    position = index[total - length :]
    itself = readable.gather(2, position.view(1, -1, 1).expand(batch, -1, 1))[..., 0]  # [B, T]
    start = torch.where(itself, readable.to(torch.int64).argmax(dim=2), total)
    expressible = (index >= start[..., None]) & (index <= position[:, None])
    if bool((readable != expressible).any()):
        row, query = (int(one) for one in (readable != expressible).any(dim=2).nonzero()[0])
        raise ValueError(
            f"attention_mask [B, 1, T, S] lets query {query} of row {row} read other keys than all of its document up "
            "to its own; which of these a query reads is the mechanism's to say, so give documents= or a mask [B, S]"
        )
    before = torch.where(index[: total - length] >= start[:, :1], start[:, :1], -1)
    documents = torch.cat((before, torch.where(itself, start, -1)), dim=1)
    check_runs(documents)
    return documents if bool((documents != documents[:, :1]).any()) or bool((documents < 0).any()) else None


def documents_of_lengths(lengths: tuple[Tensor | None, Tensor | None], shape: tuple[int, int]) -> Tensor:
    """The documents [1, T] of texts that follow each other in one row.

    Args:
        lengths: integers [N + 1], where each text begins and the last one ends: of queries, and the same of keys.
        shape: B and T.
    """
    ends, keys = lengths
    assert ends is not None
    if keys is not None and not torch.equal(keys.to(ends), ends):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be equal: every token is a query and a key")
    if ends.is_floating_point() or ends.ndim != 1 or len(ends) < 2 or shape[0] != 1:
        raise ValueError(
            f"cu_seq_lens_q must be integers [N + 1] for a batch of one row, got {ends.dtype} {tuple(ends.shape)} for "
            f"{shape[0]} rows"
        )
    first, last = int(ends[0]), int(ends[-1])
    if first != 0 or last != shape[1] or bool((ends.diff() < 0).any()):
        raise ValueError(f"cu_seq_lens_q must rise from 0 to T = {shape[1]}, got {ends.tolist()}")
    index = torch.arange(shape[1], device=ends.device)
    return torch.searchsorted(ends[1:].to(torch.int64).contiguous(), index, right=True)[None]


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
