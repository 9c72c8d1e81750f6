"""What gates do while a model trains, on the same validation texts every time: a compact file that needs no model."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from varifocal.attention.gate_metrics import gate_gradient_norms, gate_statistics, last_layer
from varifocal.attention.gates import Gate
from varifocal.data import PackedRows
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.results.gate_traces import Traces, read_gate_traces, write_gate_traces
from varifocal.training.micro_batches import model_inputs

Arrays = dict[str, NDArray[numpy.float32]]
Records = dict[str, Tensor]


def gate_trace(model: VarifocalForCausalLM, rows: PackedRows, count: int) -> Arrays:
    """What the mechanisms of all layers decide on the first `count` rows; nothing if they decide nothing.

    Each array is [L, H] for L layers and H heads, distance_share is [L, H, D]; NaN where a layer has no such thing.

        gate_mean, gate_deviation, gate_saturated, gate_entropy   over the tokens whose gate has an effect
        gate_gradient                                             norm of the gradient of the loss in the last layer
        width_mean, width_deviation, width_least, width_most      of windows, in keys
        distance_mean                                             from a query back to the keys that top-k selected
        distance_share                                            the share of distances 0, 1, 2-3, 4-7, ...
    """
    layers: list[list[Records]] = [[] for _ in model.model.layers]
    parameters = [one for gate in model.modules() if isinstance(gate, Gate) for one in last_layer(gate)]
    gradients = [torch.zeros_like(one) for one in parameters]
    before = model.training
    model.eval()
    try:
        # One row at a time, which takes less memory than any training step.
        for number in range(min(count, len(rows))):
            inputs = {name: one.to(model.device) for name, one in model_inputs(rows, [number]).items()}
            with torch.set_grad_enabled(bool(parameters)):
                output = model(**inputs, output_records=True)
            if parameters:
                for total, found in zip(gradients, torch.autograd.grad(output.loss, parameters), strict=True):
                    total += found
            for layer, records in zip(layers, output.records, strict=True):
                layer.append({name: one.detach().cpu() for name, one in records.items()})
    finally:
        model.train(before)
    if not any(records for layer in layers for records in layer):
        return {}
    norms = gradient_norms(model, parameters, gradients)
    return stacked([layer_statistics(layer) | norms.get(number, {}) for number, layer in enumerate(layers)])


def gradient_norms(
    model: VarifocalForCausalLM, parameters: list[nn.Parameter], gradients: list[Tensor]
) -> dict[int, Records]:
    """gate_gradient [H] of each layer that has a gate."""
    before = [one.grad for one in parameters]
    for one, gradient in zip(parameters, gradients, strict=True):
        one.grad = gradient
    try:
        norms = {
            number: [norm.cpu() for norm in gate_gradient_norms(layer).values()]
            for number, layer in enumerate(model.model.layers)
        }
    finally:
        for one, gradient_before in zip(parameters, before, strict=True):
            one.grad = gradient_before
    return {number: {"gate_gradient": found[0]} for number, found in norms.items() if found}


def layer_statistics(rows: list[Records]) -> Records:
    """Statistics [H] of what one layer recorded on several rows, each [1, H, T] or [1, H, T, K]."""
    found: Records = {}
    if "gate" in rows[0]:
        gates = torch.cat([row["gate"] for row in rows])
        decides = torch.cat([row["decides"] for row in rows])
        statistics = gate_statistics(gates, decides)
        found |= {
            "gate_mean": statistics.mean,
            "gate_deviation": statistics.deviation,
            "gate_saturated": statistics.saturated,
            "gate_entropy": statistics.entropy,
        }
    if "width" in rows[0]:
        widths = torch.cat([row["width"] for row in rows]).double().transpose(0, 1).flatten(1)  # [H, B T]
        found |= {
            "width_mean": widths.mean(dim=1),
            "width_deviation": widths.std(dim=1, correction=0),
            "width_least": widths.amin(dim=1),
            "width_most": widths.amax(dim=1),
        }
    if "selected" in rows[0]:
        found |= distance_statistics([row["selected"] for row in rows])
    return found


def distance_statistics(selected: list[Tensor]) -> Records:
    """Mean distance [H] and shares by powers of two [H, D], from key indices [1, H, T, K] with -1 for none."""
    length = selected[0].shape[2]
    bins = length.bit_length() + 1
    totals = torch.zeros(selected[0].shape[1], dtype=torch.float64)
    shares = torch.zeros(len(totals), bins, dtype=torch.float64)
    for keys in selected:
        distance = torch.arange(keys.shape[2])[None, None, :, None] - keys.long()
        # 0, 1, 2-3, 4-7, ... are the numbers of bits; what was not selected gets a bin of its own.
        place = torch.where(distance > 0, distance.clamp(min=1).double().log2().floor().long() + 1, 0)
        place = torch.where(keys >= 0, place, bins)
        for head in range(len(totals)):
            shares[head] += torch.bincount(place[:, head].flatten(), minlength=bins + 1)[:bins]
        totals += torch.where(keys >= 0, distance, 0).sum(dim=(0, 2, 3))
    numbers = shares.sum(dim=1)
    return {"distance_mean": totals / numbers, "distance_share": shares / numbers[:, None]}


def stacked(layers: list[Records]) -> Arrays:
    """The statistics of all layers as arrays [L, H, ...], NaN for layers that lack one."""
    shapes = {name: one.shape for layer in layers for name, one in layer.items()}
    return {
        name: torch.stack(
            [layer[name].double() if name in layer else torch.full(shape, float("nan")).double() for layer in layers]
        )
        .numpy()
        .astype(numpy.float32)
        for name, shape in shapes.items()
    }


def append_gate_trace(path: Path, step: int, trace: Arrays) -> None:
    """Add the trace of a step to the file."""
    known = read_gate_traces(path)
    fresh: Traces = {"step": numpy.array(step)} | trace
    if known and {name: one.shape[1:] for name, one in known.items()} != {
        name: one.shape for name, one in fresh.items()
    }:
        raise ValueError(f"{path} holds the traces of another model; remove it to go on without what it recorded")
    write_gate_traces(
        path,
        {name: numpy.concatenate([known[name], one[None]]) if known else one[None] for name, one in fresh.items()},
    )


def keep_gate_traces_until(path: Path, step: int) -> None:
    """Forget what was recorded after a step."""
    known = read_gate_traces(path)
    if known and (known["step"] > step).any():
        write_gate_traces(path, {name: one[known["step"] <= step] for name, one in known.items()})
