"""Gates held at a value: the mechanism with those weights, and nothing of it lasts."""

from __future__ import annotations

import pytest
import torch

from tests.attention.mechanisms import OPTIONS, small_mechanism, tokens
from varifocal import MECHANISMS, Causal, SoftWindow, Window, attend, force_gates
from varifocal.attention.mechanisms.context_adaptive import ContextAdaptive

GATED = ["context_adaptive", "head_gated"]
GATED_LATER = ["infini"]
"""Their gate has something to decide only after the first tokens."""


def test_gates_held_at_1_read_the_window_alone() -> None:
    mechanism, given = small_mechanism("head_gated"), tokens()
    with force_gates(mechanism, 1.0):
        found = mechanism(*given).output
    wanted = attend(given.q, given.k, given.v, branches=Window(OPTIONS["head_gated"]["window"])).output
    torch.testing.assert_close(found, wanted)


def test_gates_held_at_0_read_every_key() -> None:
    mechanism, given = small_mechanism("head_gated"), tokens()
    with force_gates(mechanism, 0.0):
        found = mechanism(*given).output
    torch.testing.assert_close(found, attend(given.q, given.k, given.v, branches=Causal()).output)


@pytest.mark.parametrize("value", [0.0, 0.25, 1.0])
def test_gates_held_between_weigh_the_branches(value: float) -> None:
    mechanism, given = small_mechanism("context_adaptive"), tokens()
    assert isinstance(mechanism, ContextAdaptive)
    config = mechanism.config
    window = SoftWindow(mechanism.window_width(given.x), edge=config.edge, limit=config.window_max)
    local = attend(given.q, given.k, given.v, branches=window).output
    best = attend(given.q, given.k, given.v, branches=config.top_k()).output
    with force_gates(mechanism, value):
        found = mechanism(*given).output
    torch.testing.assert_close(found, value * local + (1 - value) * best)


@pytest.mark.parametrize("name", GATED)
def test_forced_gates_are_what_is_recorded(name: str) -> None:
    mechanism, given = small_mechanism(name), tokens()
    with force_gates(mechanism, 0.75):
        assert (mechanism(*given).records["gate"] == 0.75).all()


@pytest.mark.parametrize("name", GATED + GATED_LATER)
def test_nothing_is_left_of_forced_gates(name: str) -> None:
    mechanism, given = small_mechanism(name), tokens()
    before = mechanism(*given).output
    state = {key: value.clone() for key, value in mechanism.state_dict().items()}
    with force_gates(mechanism, 1.0):
        assert not torch.equal(mechanism(*given).output, before)
    assert torch.equal(mechanism(*given).output, before)
    assert all(torch.equal(value, state[key]) for key, value in mechanism.state_dict().items())


def test_an_error_inside_leaves_nothing_behind_either() -> None:
    mechanism, given = small_mechanism("head_gated"), tokens()
    before = mechanism(*given).output
    with pytest.raises(KeyError), force_gates(mechanism, 1.0):
        raise KeyError
    assert torch.equal(mechanism(*given).output, before)


@pytest.mark.parametrize("name", sorted(set(MECHANISMS.ours) - {*GATED, *GATED_LATER}))
def test_mechanisms_without_a_gate_are_not_changed(name: str) -> None:
    mechanism, given = small_mechanism(name), tokens()
    before = mechanism(*given).output
    with force_gates(mechanism, 1.0):
        assert torch.equal(mechanism(*given).output, before)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_only_weights_between_0_and_1_can_be_forced(value: float) -> None:
    with (
        pytest.raises(ValueError, match="a forced gate must lie between 0 and 1"),
        force_gates(small_mechanism("head_gated"), value),
    ):
        pass
