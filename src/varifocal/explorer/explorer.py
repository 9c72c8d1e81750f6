"""Answers the questions of the page from the models and their latest readings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from varifocal.attention.forced_gates import gates_of
from varifocal.attention.gate_metrics import gate_statistics
from varifocal.explorer.attention_row import attention_row, far_shares
from varifocal.explorer.opening import OpenedModel
from varifocal.explorer.pieces import Pieces, cut
from varifocal.explorer.reach import reach_of
from varifocal.explorer.reading import Gates, Reading, decoder_layer, read_tokens
from varifocal.explorer.readings import Readings
from varifocal.explorer.samples import LONG, SHORT
from varifocal.explorer.views import (
    Candidate,
    FarView,
    KeyView,
    LayerView,
    ModelView,
    NextView,
    TextQuestion,
    TextView,
    TokenQuestion,
    TokenView,
)
from varifocal.explorer.waiting import Waiting

TOP_KEYS = 12
TOP_CANDIDATES = 10
MOST_BYTES = 256 * 2**20


class Explorer:
    """One or several models; only one thread at a time may ask."""

    def __init__(
        self, models: Sequence[OpenedModel], *, most_tokens: int | None = None, most_bytes: int = MOST_BYTES
    ) -> None:
        """Args:
        models: the page shows them side by side.
        most_tokens: the longest text; None for each model's own context.
        most_bytes: the most bytes of readings to keep.
        """
        self.opened = tuple(models)
        self.readings = Readings(most_bytes)
        self.models = tuple(view_model(opened, most_tokens) for opened in models)
        windows = [size for view in self.models for layer in view.layers for size in layer.windows if size is not None]
        self.near = min(windows, default=min(256, max(8, min(view.context for view in self.models) // 8)))
        """Keys that count as near: the smallest window of all models, or what a window would be."""

    def sample(self) -> str:
        """The text that the page opens with: the long one if every model can read it."""
        fits = all(
            len(opened.tokenizer(LONG, verbose=False)["input_ids"]) <= view.most
            for opened, view in zip(self.opened, self.models, strict=True)
        )
        return LONG if fits else SHORT

    def text(self, asked: TextQuestion, waiting: Waiting | None = None) -> TextView:
        """A text as one head of one layer sees it; ValueError if there is no such head or the text is too long."""
        waiting = Waiting() if waiting is None else waiting
        opened, pieces = self.checked(asked, waiting)
        reading = self.reading(asked, pieces, asked.gates, waiting)
        record = reading.records[asked.layer]
        reach = reach_of(decoder_layer(opened.model, asked.layer).self_attn.mechanism, asked.head)
        decides = record.get("decides")
        if decides is not None and decides.ndim == 2:
            decides = decides[asked.head]
        return TextView(
            pieces=pieces.pieces,
            starts=pieces.starts,
            added=pieces.added,
            gate=numbers(record["gate"][asked.head], 3) if "gate" in record else None,
            decides=None if decides is None else decides.tolist(),
            width=numbers(record["width"][asked.head], 1) if "width" in record else None,
            window=reach.window,
            edge=reach.edge,
            gate_map=[mean_gates(one) for one in reading.records],
            beyond=len(pieces.ids) > self.models[asked.model].context,
        )

    def token(self, asked: TokenQuestion, waiting: Waiting | None = None) -> TokenView:
        """What a token reads in one head."""
        opened, _, reading = self.checked_token(asked, waiting)
        row = attention_row(opened.model, reading, layer=asked.layer, head=asked.head, token=asked.token)
        best = row.weights.topk(min(TOP_KEYS, len(row.weights)))
        keys = tuple(
            KeyView(
                token=index,
                weight=round(weight, 4),
                local_part=None if row.local_part is None else round(float(row.local_part[index]), 4),
                global_part=None if row.global_part is None else round(float(row.global_part[index]), 4),
            )
            for weight, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            if weight > 0
        )
        return TokenView(asked.token, numbers(row.weights, 4), keys)

    def following(self, asked: TokenQuestion, waiting: Waiting | None = None) -> NextView:
        """The likeliest tokens after a token, with the gates in the state of the question."""
        opened, pieces, reading = self.checked_token(asked, waiting)
        following = pieces.ids[asked.token + 1] if asked.token + 1 < len(pieces.ids) else None
        return next_tokens(opened, reading, asked.gates, token=asked.token, following=following)

    def far(self, asked: TokenQuestion, waiting: Waiting | None = None) -> FarView:
        """What a token reads from far back, in every head of every layer."""
        waiting = Waiting() if waiting is None else waiting
        opened, _, reading = self.checked_token(asked, waiting)
        shares = []
        for layer in range(len(reading.inputs)):
            waiting.require()
            shares.append(numbers(far_shares(opened.model, reading, layer=layer, token=asked.token, near=self.near), 4))
        return FarView(asked.token, shares)

    def checked_token(self, asked: TokenQuestion, waiting: Waiting | None) -> tuple[OpenedModel, Pieces, Reading]:
        """The model, the tokens and the reading of a question about a token; ValueError if there is no such token."""
        waiting = Waiting() if waiting is None else waiting
        opened, pieces = self.checked(asked, waiting)
        if asked.token >= len(pieces.ids):
            raise ValueError(f"there is no token {asked.token}; the text has {len(pieces.ids)}, counted from 0")
        return opened, pieces, self.reading(asked, pieces, asked.gates, waiting)

    def checked(self, asked: TextQuestion, waiting: Waiting) -> tuple[OpenedModel, Pieces]:
        """The model and the tokens of a question; ValueError if it asks for something that does not exist."""
        waiting.require()
        if asked.model >= len(self.opened):
            raise ValueError(f"there is no model {asked.model}; this page has {len(self.opened)}, counted from 0")
        view = self.models[asked.model]
        for name, given, there in (("layer", asked.layer, len(view.layers)), ("head", asked.head, view.heads)):
            if given >= there:
                raise ValueError(f"there is no {name} {given}; {view.name} has {there}, counted from 0")
        if asked.gates != "learned" and not view.gated:
            raise ValueError(f"{view.name} has no gates that could be held; ask for gates='learned'")
        opened = self.opened[asked.model]
        return opened, cut(opened, asked.text, most=view.most)

    def reading(self, asked: TextQuestion, pieces: Pieces, gates: Gates, waiting: Waiting) -> Reading:
        """The reading of a question's text with gates in that state, from those that are kept or a new one."""
        model, key = self.opened[asked.model].model, (asked.model, asked.text, gates)
        return self.readings.get(key, lambda: read_tokens(model, pieces.ids, gates, waiting))


def view_model(opened: OpenedModel, most_tokens: int | None) -> ModelView:
    """What the page says about a model."""
    config = opened.model.config
    mechanisms = [decoder_layer(opened.model, layer).self_attn.mechanism for layer in range(config.num_hidden_layers)]
    return ModelView(
        name=opened.name,
        parameters=sum(parameter.numel() for parameter in opened.model.parameters()),
        heads=config.num_attention_heads,
        context=config.max_position_embeddings,
        most=config.max_position_embeddings if most_tokens is None else most_tokens,
        layers=tuple(
            LayerView(
                mechanism.name,
                bool(gates_of(mechanism)),
                mechanism.words(),
                tuple(reach_of(mechanism, head).window for head in range(config.num_attention_heads)),
            )
            for mechanism in mechanisms
        ),
    )


def mean_gates(record: dict[str, Tensor]) -> list[float | None] | None:
    """The mean gate of each head over the tokens where it decides; None if it decides nowhere."""
    if "gate" not in record:
        return None
    means = gate_statistics(record["gate"][None], record["decides"][None]).mean
    return [None if mean != mean else round(mean, 3) for mean in means.tolist()]


@torch.no_grad()
def next_tokens(opened: OpenedModel, reading: Reading, gates: Gates, *, token: int, following: int | None) -> NextView:
    """The likeliest tokens after a token, and the probability of the one that follows in the text."""
    probabilities = opened.model.lm_head(reading.last[token]).float().softmax(dim=-1)
    best = probabilities.topk(min(TOP_CANDIDATES, len(probabilities)))
    candidates = tuple(
        Candidate(opened.tokenizer.decode([index]), round(chance, 5), index == following)
        for chance, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )
    return NextView(gates, candidates, None if following is None else round(float(probabilities[following]), 5))


def numbers(values: Tensor, digits: int) -> list[float]:
    """A tensor [N] as rounded numbers: the page needs no more digits, and the JSON is shorter."""
    return [round(value, digits) for value in values.tolist()]
