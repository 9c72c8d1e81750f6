"""Where the mass of dense attention lies: in a window, on the best k keys, on the keys that a mechanism selected."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varifocal.attention.mechanisms import MechanismOutput
from varifocal.equations.branches import TopK, members
from varifocal.equations.equation import Equation
from varifocal.equations.layout import Layout
from varifocal.equations.scores import Pairs, Score

PAIRS = 1 << 22
"""Pairs of a query and a key, over all heads, that exist at once."""


@dataclass(frozen=True, eq=False)
class AttentionMass:
    """Shares of the softmax of the layer's scores over all past keys. All are float32 [H, T], NaN for padding."""

    window: Tensor
    """The mass on the last keys."""
    top_k: Tensor
    """The mass on the k best keys."""
    window_or_top_k: Tensor
    """The mass on keys that are in the window or among the best."""
    first: Tensor
    """The mass on the document's first key, where heads are known to rest."""
    distance: Tensor
    """The mean distance from the query to the keys, weighted by their mass."""
    selected: Tensor | None
    """The mass on the keys that the mechanism's own top-k selected; None if it has no top-k."""
    shares: Tensor
    """[H, T, D]: the mass by distance 0, 1, 2-3, 4-7, ..."""


@torch.no_grad()
def attention_mass(q: Tensor, k: Tensor, said: MechanismOutput, *, window: int, top_k: TopK) -> AttentionMass:
    """The mass of one row (B = 1), a few queries at a time.

    Args:
        q, k: queries [1, H, T, D] and keys [1, G, T, D] of the layer.
        said: the output of the layer's mechanism; its equation tells how pairs are rated and what was selected.
        window: keys of the window, the query's own included.
        top_k: how many keys are the best ones.
    """
    assert said.equation is not None
    assert said.layout is not None
    layout, heads, length = said.layout, q.shape[1], q.shape[2]
    selected, own_top_k = said.records.get("selected"), selecting_branch(said.equation)
    blind = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=q.device)
    score = said.equation.score.prepare(torch.float32, blind, blind)
    keys = k[0].float().repeat_interleave(heads // k.shape[1], dim=0)  # [H, S, D]
    at_once = max(1, PAIRS // (heads * length))
    parts = []
    for begin in range(0, length, at_once):
        part = slice(begin, min(begin + at_once, length))
        mass = dense_attention(q[0, :, part].float(), keys, score.of_queries(part), layout, part)
        own = None
        if selected is not None and own_top_k is not None:
            own = selected_mass(mass, own_top_k, selected[0, :, part], layout, part)
        parts.append(measured(mass, layout, part, window=window, top_k=top_k, selected=own))
    joined = {name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in (*MASSES, "shares")}
    found = [part.selected for part in parts if part.selected is not None]
    return AttentionMass(**joined, selected=None if selected is None else torch.cat(found, dim=1))


def selecting_branch(equation: Equation) -> TopK | None:
    """The last top-k of an equation; None if it selects nothing."""
    found = [one for branch in equation.branches for one in members(branch) if isinstance(one, TopK)]
    return found[-1] if found else None


MASSES = ("window", "top_k", "window_or_top_k", "first", "distance")


def dense_attention(q: Tensor, keys: Tensor, score: Score, layout: Layout, part: slice) -> Tensor:
    """The softmax [H, T', S] over every visible key for queries q [H, T', D]; 0 for a query that sees nothing."""
    start, index = layout.start[0, part, None], torch.arange(keys.shape[1], device=keys.device)
    visible = (index >= start) & (index <= layout.position[0, part, None])  # [T', S]
    pairs = Pairs((layout.query_place[0, part, None])[None, None], (index - start)[None, None], q.shape[-1])
    scores = score.rate((q @ keys.mT)[None], pairs)[0]
    return scores.masked_fill(~visible, float("-inf")).softmax(dim=-1).nan_to_num(0.0)


def measured(
    mass: Tensor, layout: Layout, part: slice, *, window: int, top_k: TopK, selected: Tensor | None
) -> AttentionMass:
    """The masses of some queries, from their softmax [H, T', S]."""
    position, start = layout.position[0, part], layout.start[0, part]
    place = position - start
    distance = position[:, None] - torch.arange(mass.shape[2], device=mass.device)  # [T', S]
    wanted = top_k.keys_per_query(place)
    best = mass.topk(int(wanted.max().clamp(min=1)), dim=-1)
    taken = torch.arange(best.values.shape[2], device=mass.device) < wanted[:, None]  # [T', K]
    values = best.values * taken
    far = values * (distance.expand_as(mass).gather(2, best.indices) >= window)
    near = (mass * ((distance >= 0) & (distance < window))).sum(dim=2)
    bins = distance_bins(mass.shape[2])
    places = distance_bin(distance.clamp(min=0))
    shares = mass.new_zeros(*mass.shape[:2], bins).scatter_add_(2, places.expand_as(mass), mass)
    padding = place < 0
    first = start.clamp(max=mass.shape[2] - 1)[None, :, None]

    def blanked(found: Tensor) -> Tensor:
        return found.masked_fill(padding, float("nan"))

    return AttentionMass(
        window=blanked(near),
        top_k=blanked(values.sum(dim=2)),
        window_or_top_k=blanked(near + far.sum(dim=2)),
        first=blanked(mass.gather(2, first.expand(len(mass), -1, 1))[..., 0]),
        distance=blanked((mass * distance.clamp(min=0)).sum(dim=2)),
        selected=None if selected is None else blanked(selected),
        shares=shares,
    )  # fmt: skip


def selected_mass(mass: Tensor, top_k: TopK, selected: Tensor, layout: Layout, part: slice) -> Tensor:
    """The mass [H, T'] on the keys that a top-k selected, the query's own key or block included."""
    length = mass.shape[2]
    position, place = layout.position[0, part], layout.query_place[0, part]
    size = top_k.block if top_k.select == "blocks" else 1
    read = torch.zeros(*mass.shape[:2], length + 1, dtype=torch.bool, device=mass.device)
    for step in range(size):
        # Entries that select nothing mark an extra column after the last key.
        read.scatter_(2, torch.where(selected >= 0, (selected.long() + step).clamp(max=length - 1), length), True)
    distance = position[:, None] - torch.arange(length, device=mass.device)
    own = (distance >= 0) & (distance <= (place % size)[:, None])
    return (mass * (read[..., :length] | own) * (distance >= 0)).sum(dim=2)


def distance_bin(distance: Tensor) -> Tensor:
    """0, 1, 2-3, 4-7, ... as 0, 1, 2, 3, ...: the number of bits."""
    return torch.frexp(distance.double()).exponent.long().clamp(min=0)


def distance_bins(length: int) -> int:
    """How many such bins a text of that length needs."""
    return (length - 1).bit_length() + 1
