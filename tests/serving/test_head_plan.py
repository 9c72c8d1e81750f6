"""Which heads share an attention of the engine, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.models import MAPS, WINDOW, focused
from varifocal.model import VarifocalConfig
from varifocal.serving.head_plan import Reach, plan_heads


def config(mechanism: Any, options: Any = None, **given: Any) -> VarifocalConfig:
    return VarifocalConfig(
        num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=32, hidden_size=64,
        mechanism=mechanism, mechanism_options=options, **given,
    )  # fmt: skip


def test_heads_that_read_alike_share_one_attention() -> None:
    for mechanism in ("dense", "local", "head_gated"):
        assert [len(layer.units) for layer in plan_heads(config(mechanism))] == [1, 1, 1]


def test_every_unit_of_a_head_map_has_as_many_heads() -> None:
    layers = plan_heads(config(*focused(sinks=4)))
    for layer, windows in zip(layers, MAPS, strict=True):
        assert {unit.heads: unit.reach.window for unit in layer.units} == {(head,): windows[head] for head in range(4)}
    pairs = plan_heads(config("focused", {"windows": [None, WINDOW, None, WINDOW], "sinks": 4}))
    assert [(unit.heads, unit.reach) for unit in pairs[0].units] == [((0, 2), Reach()), ((1, 3), Reach(WINDOW, 4))]


def test_units_do_not_span_ranks() -> None:
    layer = plan_heads(config("focused", {"windows": [None, WINDOW, None, WINDOW]}), ranks=2)[0]
    assert [unit.heads for unit in layer.units] == [(0,), (1,), (2,), (3,)]


def test_gate_mixes_a_window_with_all_keys() -> None:
    assert plan_heads(config("head_gated", {"window": 16}))[0].near == 16


@pytest.mark.parametrize(
    ("mechanism", "options", "given", "words"),
    [
        ("context_adaptive", {}, {}, "layer 0 attends by context_adaptive"),
        ("head_gated", {"sinks": 2}, {}, "train or fit with sinks=0"),
        ("dense", {}, {"weights": {"kind": "int8", "group": 32}}, "load it with weights='float32'"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(mechanism: str, options: Any, given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        plan_heads(config(mechanism, options, **given))
    assert "\n" not in str(caught.value)


def test_ranks_must_divide_the_heads() -> None:
    with pytest.raises(ValueError, match="use tensor_parallel_size=1"):
        plan_heads(config("dense"), ranks=3)
