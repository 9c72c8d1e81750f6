"""Lets a model read rows of a split and keeps what its heads and gates did at every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from varifocal.analysis.attention_mass import MASSES, attention_mass, distance_bin, distance_bins
from varifocal.analysis.rare_words import WordCounts, count_words
from varifocal.analysis.token_kinds import KINDS, token_kinds
from varifocal.analysis.token_texts import PlacedTokens, place_tokens
from varifocal.attention.mechanisms import Mechanism, MechanismOutput
from varifocal.data import PreparedData, TokenSplit
from varifocal.equations.branches import TopK
from varifocal.model.loss import next_token_labels
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.training.context_gain import labelled_losses, windowed_losses

Values = NDArray[numpy.float32]
Flags = NDArray[numpy.bool_]


@dataclass(frozen=True, eq=False)
class Observed:
    """N tokens, the queries of all rows."""

    documents: NDArray[numpy.int64]
    """[N]: the document's number in its split."""
    positions: NDArray[numpy.int64]
    """[N]: how many tokens of the document the model sees before it."""
    kinds: Flags
    """[N, K]: the kinds of the token itself."""
    next_kinds: Flags
    """[N, K]: the kinds of the token that it predicts."""
    gains: Values
    """[N]: the loss with a window of text minus the loss with all of it; NaN if both see the same text, or if nothing
    is predicted."""
    values: dict[str, Values]
    """[N, L, H] by quantity; see docs/analysis.md. NaN if a layer does not have the quantity or it has no effect."""
    mass_shares: Values
    """[L, H, D]: the share of dense attention by distance, over queries beyond the window."""
    selected_shares: Values
    """[L, H, D]: the share of selected keys by distance; NaN for layers that select none."""


@dataclass(eq=False)
class LayerNotes:
    """What one layer did in one row."""

    values: dict[str, Tensor] = field(default_factory=dict)
    """[H, T] by quantity."""
    mass_shares: Tensor | None = None
    """[H, D], summed over queries beyond the window."""
    selected_counts: Tensor | None = None
    """[H, D]."""


@torch.no_grad()
def observe(
    model: VarifocalForCausalLM,
    data: PreparedData,
    split: TokenSplit,
    *,
    rows: NDArray[numpy.int64],
    length: int,
    window: int,
    top_k: TopK,
    on_row: Callable[[int, int], None] | None = None,
) -> Observed:
    """Read some rows of a split, one at a time.

    Args:
        model: a model in evaluation mode.
        data: the data set; its tokenizer is needed to tell the kinds of tokens.
        split: a split of the data set.
        rows: the numbers of the rows, ascending.
        length: tokens per row.
        window: keys of a window, and tokens of the shorter text.
        top_k: how many keys are the best ones.
        on_row: called with the number of rows done and of all rows.
    """
    packed, words, reader = split.rows(length=length), count_words(data), DocumentReader(data, split)
    notes: list[list[LayerNotes]] = []
    flags: list[Flags] = []
    gains: list[Values] = []
    batches = []
    for done, number in enumerate(rows.tolist()):
        row = packed[number]
        ids, documents = torch.from_numpy(row.input_ids)[None], torch.from_numpy(row.documents)[None]
        ids, documents = ids.to(model.device), documents.to(model.device)
        with noting(model, window=window, top_k=top_k) as layers:
            hidden = model.model(input_ids=ids, documents=documents, use_cache=False).last_hidden_state
        full = labelled_losses(model, hidden, next_token_labels(ids, documents))[0]
        gain = windowed_losses(model, ids[0], documents[0], window=window) - full
        gains.append(numpy.where(row.positions >= window, gain.cpu().numpy(), numpy.nan).astype(numpy.float32))
        flags.append(row_kinds(row.documents, number * length, reader, words))
        notes.append(layers)
        batches.append(row)
        if on_row is not None:
            on_row(done + 1, len(rows))
    kinds = numpy.concatenate(flags)
    following = numpy.concatenate([numpy.roll(one, -1, axis=0) for one in flags])
    return Observed(
        documents=numpy.concatenate([row.documents for row in batches]),
        positions=numpy.concatenate([row.positions for row in batches]),
        kinds=kinds,
        next_kinds=following,
        gains=numpy.concatenate(gains),
        values=gathered(notes),
        mass_shares=shares([[layer.mass_shares for layer in layers] for layers in notes]),
        selected_shares=shares([[layer.selected_counts for layer in layers] for layers in notes]),
    )


@contextmanager
def noting(model: VarifocalForCausalLM, *, window: int, top_k: TopK) -> Iterator[list[LayerNotes]]:
    """Inside this context, every call of a layer is noted, in the order of the layers."""
    notes: list[LayerNotes] = []

    def note(mechanism: Mechanism[Any], inputs: Any, output: MechanismOutput) -> None:
        _, q, k, _ = inputs
        notes.append(layer_notes(q, k, output, window=window, top_k=top_k))

    mechanisms = [one for one in model.model.layers.modules() if isinstance(one, Mechanism)]
    handles = [one.register_forward_hook(note) for one in mechanisms]
    try:
        yield notes
    finally:
        for handle in handles:
            handle.remove()


def layer_notes(q: Tensor, k: Tensor, said: MechanismOutput, *, window: int, top_k: TopK) -> LayerNotes:
    """What one layer did in a row (B = 1), from its queries, its keys and its mechanism's output."""
    assert said.layout is not None
    records = said.records
    place, selected = said.layout.query_place[0], records.get("selected")
    mass = attention_mass(q, k, said, window=window, top_k=top_k)
    beyond = place >= window
    values = {f"{name}_mass": getattr(mass, name).masked_fill(~beyond, float("nan")) for name in MASSES}
    if mass.selected is not None:
        values["chosen_mass"] = mass.selected.masked_fill(~beyond, float("nan"))
    if "gate" in records:
        decides = records["decides"]
        decides = (decides if decides.ndim == 3 else decides[:, None])[0]
        values["gate"] = records["gate"][0].float().masked_fill(~decides, float("nan"))
    if "width" in records:
        values["width"] = records["width"][0].float()
    counts = None
    if selected is not None:
        values["distance"], counts = selected_distances(selected[0])
    return LayerNotes(
        values={name: one.cpu() for name, one in values.items()},
        mass_shares=mass.shares[:, beyond].sum(dim=1).cpu(),
        selected_counts=counts,
    )


def selected_distances(selected: Tensor) -> tuple[Tensor, Tensor]:
    """The mean distance [H, T] to the selected keys [H, T, K], and how many lie at 0, 1, 2-3, 4-7, ... [H, D]."""
    heads, length, _ = selected.shape
    taken = selected >= 0
    distance = (torch.arange(length, device=selected.device)[:, None] - selected.long()).clamp(min=0) * taken
    mean = distance.sum(dim=2).float() / taken.sum(dim=2)
    counts = torch.zeros(heads, distance_bins(length), dtype=torch.float64, device=selected.device)
    counts.scatter_add_(1, distance_bin(distance).flatten(1), taken.flatten(1).double())
    return mean, counts.cpu()


def gathered(notes: list[list[LayerNotes]]) -> dict[str, Values]:
    """The values [N, L, H] of all rows."""
    first = notes[0]
    heads, length = first[0].values["window_mass"].shape
    names = list(dict.fromkeys(name for layer in first for name in layer.values))
    found = {name: numpy.full((len(notes) * length, len(first), heads), numpy.nan, numpy.float32) for name in names}
    for row, layers in enumerate(notes):
        for number, layer in enumerate(layers):
            for name, value in layer.values.items():
                found[name][row * length : (row + 1) * length, number] = value.T.numpy()
    return found


def shares(rows: list[list[Tensor | None]]) -> Values:
    """The shares [L, H, D] of what was counted in all rows; NaN for layers that counted nothing."""
    known = next((one for one in rows[0] if one is not None), None)
    if known is None:
        return numpy.zeros((0, 0, 0), dtype=numpy.float32)
    layers = []
    for number in range(len(rows[0])):
        parts = [one for row in rows if (one := row[number]) is not None]
        total = torch.stack(parts).double().sum(dim=0) if parts else torch.full(known.shape, float("nan")).double()
        layers.append(total / total.sum(dim=1, keepdim=True))
    return torch.stack(layers).numpy().astype(numpy.float32)


class DocumentReader:
    """Reads the documents of a split with their texts, one after another."""

    def __init__(self, data: PreparedData, split: TokenSplit) -> None:
        self.split, self.tokenizer = split, data.tokenizer()
        lengths = numpy.concatenate(list(split.document_lengths()))
        self.begins = numpy.concatenate(([0], numpy.cumsum(lengths)))
        """Where each document begins in the split."""
        self._number = -1
        self._placed: PlacedTokens | None = None

    def placed(self, number: int) -> PlacedTokens:
        """Where a document's tokens are in its text, without its end token."""
        if self._placed is None or number != self._number:
            self._placed, self._number = place_tokens(self.tokenizer, self.split.document(number)[:-1]), number
        return self._placed


def row_kinds(documents: NDArray[numpy.int64], begin: int, reader: DocumentReader, words: WordCounts) -> Flags:
    """The kinds [T, K] of a row's tokens; the row begins at the split's token `begin`."""
    flags = numpy.zeros((len(documents), len(KINDS)), dtype=bool)
    for number in numpy.unique(documents).tolist():
        columns = numpy.flatnonzero(documents == number)
        first = begin + int(columns[0]) - int(reader.begins[number])
        whole = reader.placed(number)
        part = whole.part(first, min(first + len(columns), len(whole.begins)))
        found = token_kinds(part.text, part.begins, part.ends, is_rare=words.is_rare, document_place=first)
        flags[columns[: found.shape[1]]] = found.T
    return flags
