"""Scores of key heads without training: what a head's output loses, as the next layers see it, when it is windowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from varifocal.attention.attend import evaluate
from varifocal.attention.mechanisms import MechanismOutput
from varifocal.equations.equation import Equation
from varifocal.retrofit.focus.gates import FocusGates, GatedModel
from varifocal.retrofit.focus.texts import FitRow


@torch.no_grad()
def calibrate(
    gated: GatedModel, rows: Iterator[FitRow], count: int, *, on_row: Callable[[int], None] = lambda row: None
) -> Tensor:
    """[layers, key heads]: the change of the layer's output when one head alone is windowed, against its size.

    The dense model runs once for each row; in every layer both outputs of each head are compared.
    """
    scores = torch.zeros(gated.layers, gated.kv_heads)
    current: list[Tensor] = []

    def listen(number: int, attention: Any) -> Callable[..., None]:
        def compare(mechanism: FocusGates, given: Any, named: Any, answer: MechanismOutput) -> None:
            q, k, v = given[1:4]
            near = evaluate(Equation((mechanism.near(),)), q, k, v, layout=named["layout"]).output
            weight = current[0].to(q)
            lost = answer.output - near  # [1, H, T, D]
            matrix = attention.o_proj.weight
            whole = answer.output.transpose(1, 2).flatten(2) @ matrix.T
            size = (whole.square().sum(dim=-1)[0] * weight).sum()
            each = lost.shape[1] // mechanism.shape.kv_heads
            width = each * lost.shape[3]
            for head in range(mechanism.shape.kv_heads):
                part = lost[:, head * each : (head + 1) * each].transpose(1, 2).flatten(2)
                moved = part @ matrix[:, head * width : (head + 1) * width].T
                scores[number, head] += (moved.square().sum(dim=-1)[0] * weight).sum() / size / count

        return compare

    hooks = [
        gate.register_forward_hook(listen(number, layer.self_attn), with_kwargs=True)
        for number, (gate, layer) in enumerate(zip(gated.gates, gated.model.model.layers, strict=True))
    ]
    try:
        with gated.reading("everything"):
            for number in range(count):
                row = next(rows)
                current[:] = [row.weight]
                gated.hidden(row.tokens[None])
                on_row(number + 1)
    finally:
        for hook in hooks:
            hook.remove()
    return scores
