"""One forward pass lays its text out once, however many layers read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.model.models import VARIANTS, random_tokens, small_model
from varifocal.equations.layout import Layout

every_variant = pytest.mark.parametrize("variant", VARIANTS)
SEVERAL_IN_A_ROW = torch.tensor([[0] * 10 + [1] * 14, [3] * 24])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Layout]:
    """Every layout that is made from now on."""
    found: list[Layout] = []
    plain = Layout.__init__

    def noted(self: Layout, **values: Any) -> None:
        plain(self, **values)
        found.append(self)

    monkeypatch.setattr(Layout, "__init__", noted)
    return found


def layouts(variant: str) -> int:
    """One; and one more where segments are laid out as documents, once for all layers."""
    return 2 if variant.startswith("infini") else 1


@every_variant
@pytest.mark.parametrize("documents", [None, SEVERAL_IN_A_ROW], ids=["one document", "packed"])
def test_training_step_makes_one_layout(variant: str, documents: torch.Tensor | None, made: list[Layout]) -> None:
    model, tokens = small_model(variant, num_hidden_layers=4), random_tokens(2, 24)
    model(input_ids=tokens, labels=tokens, documents=documents, use_cache=False).loss.backward()
    assert len(made) == layouts(variant)


@every_variant
@torch.no_grad()
def test_prompt_makes_one_layout(variant: str, made: list[Layout]) -> None:
    small_model(variant, num_hidden_layers=4)(input_ids=random_tokens(2, 24), use_cache=True)
    assert len(made) == layouts(variant)


@every_variant
@torch.no_grad()
def test_decoded_token_makes_no_more_layouts_for_more_layers(variant: str, made: list[Layout]) -> None:
    counts = []
    for layers in (1, 4):
        model, tokens = small_model(variant, num_hidden_layers=layers), random_tokens(2, 21)
        cache = model(input_ids=tokens, use_cache=True).past_key_values
        made.clear()
        model(input_ids=tokens[:, :1], past_key_values=cache)
        counts.append(len(made))
    # A memory that keeps a window, or means of blocks, counts its keys anew, once for all layers.
    assert counts == ([2, 5] if variant == "combiner" else [counts[0], counts[0]])
    # Each layer of combiner sums up the segments that were finished, which are no text of their own.
    assert counts[0] <= (3 if variant.startswith("infini") else 2)
