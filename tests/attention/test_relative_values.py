"""Vectors that are added to values by their distance, and the mechanisms with positions of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from varifocal import Branch, Causal, DistanceBias, HeadShape, Prefix, Segments, Window, attend, make_mechanism
from varifocal.attention.backends import UnavailableError
from varifocal.attention.mechanisms.positional_prior import PositionalPrior, PositionalPriorConfig
from varifocal.model import VarifocalForCausalLM, preset
from varifocal.retrofit.dense_start import foreign_share

ROUNDING = 5e-7
"""Probabilities are made from a logsumexp of up to 4, which float32 rounds by 2.4e-7, and are summed."""
DOCUMENTS = torch.tensor([[-1] * 5 + [0] * 20 + [1] * 12, [0] * 37])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def results(branch: Branch, dtype: torch.dtype, backend: str) -> list[Tensor]:
    q, k, v = normal(2, 4, 37, 8, seed=0), normal(2, 2, 37, 8, seed=1), normal(2, 2, 37, 8, seed=2)
    rows, table = normal(5, 8, seed=3), normal(2, 4, 37, 3, seed=4)
    leaves = [one.to(dtype).requires_grad_() for one in (q, k, v, rows, table)]
    q, k, v, rows, table = leaves
    output = attend(
        q, k, v, branches=branch, score=DistanceBias(table), relative_values=rows, documents=DOCUMENTS, backend=backend
    ).output
    gradients = torch.autograd.grad(output, leaves, normal(*output.shape, seed=5).to(dtype))
    return [one.detach().double() for one in (output, *gradients)]


@pytest.mark.parametrize("branch", [Causal(), Window(7), Window(3)], ids=repr)
def test_kernel_is_as_accurate_as_the_reference(branch: Branch) -> None:
    truth = results(branch, torch.float64, "reference")
    plain, fast = (results(branch, torch.float32, backend) for backend in ("reference", "native"))
    for true, known, found in zip(truth, plain, fast, strict=True):
        allowed = 2 * max(float((known - true).abs().max()), ROUNDING * float(true.abs().max()))
        assert float((found - true).abs().max()) <= allowed


def test_every_key_adds_the_vector_of_its_distance() -> None:
    q, k, v = normal(1, 1, 6, 4, seed=0), normal(1, 1, 6, 4, seed=1), torch.zeros(1, 1, 6, 4, dtype=torch.float64)
    rows = torch.eye(4, dtype=torch.float64)
    weights = (q @ k.mT / 2).masked_fill(torch.ones(6, 6).triu(1) > 0, float("-inf")).softmax(dim=-1)[0, 0]
    output = attend(q, k, v, branches=Causal(), relative_values=rows).output[0, 0]
    for i in range(6):
        expected = [sum(float(weights[i, j]) for j in range(i + 1) if min(i - j, 3) == x) for x in range(4)]
        torch.testing.assert_close(output[i], torch.tensor(expected, dtype=torch.float64))


def test_backends_without_relative_values_say_so() -> None:
    q = k = v = torch.zeros(1, 1, 4, 8)
    rows = torch.zeros(2, 8)
    with pytest.raises(UnavailableError, match="backend 'flex' does not know the relative_values of a problem"):
        attend(q, k, v, branches=Causal(), relative_values=rows, backend="flex")
    with pytest.raises(UnavailableError, match="without a prefix"):
        attend(q, k, v, branches=Window(2) | Prefix(1), relative_values=rows, backend="native")
    with pytest.raises(ValueError, match="Segments reads summaries"):
        attend(q, k, v, branches=Segments(2), relative_values=rows)


@pytest.mark.parametrize("name", ["positional_prior", "relative_position"])
def test_model_without_rotary_positions_is_blind_to_them(name: str) -> None:
    torch.manual_seed(0)
    tokens, places = torch.randint(1, 64, (1, 12)), torch.arange(12)[None]
    for rotary in (True, False):
        options = {"rotary": rotary}
        model = VarifocalForCausalLM(
            preset("tiny", mechanism=name, mechanism_options=options, vocab_size=64, num_hidden_layers=1)
        ).eval()
        with torch.no_grad():
            near, far = (
                model(tokens, position_ids=ids, attention_mask=torch.ones_like(tokens)).logits
                for ids in (places, 2 * places)
            )
            assert torch.equal(near, far) is not rotary
            # Token by token, which may take a shorter way through a layer.
            cache = None
            for t in range(12):
                made = model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
                cache = made.past_key_values
                torch.testing.assert_close(made.logits[:, 0], near[:, t], rtol=1e-4, atol=1e-4)


def test_prior_starts_as_dense_attention_and_can_learn_from_there() -> None:
    shape = HeadShape(model_width=8, heads=2, kv_heads=1, head_width=4)
    prior = PositionalPrior(PositionalPriorConfig(log_strength=False), shape)
    assert foreign_share(prior, 16) is None
    prior.start_as_dense()
    assert foreign_share(prior, 16) == 0
    x, q, k = torch.randn(1, 16, 8), torch.randn(1, 2, 16, 4), torch.randn(1, 1, 16, 4)
    prior(x, q, k, torch.randn(1, 1, 16, 4)).output.square().sum().backward()
    assert prior.strength.grad is not None
    assert int((prior.strength.grad == 0).sum()) == 0
    assert foreign_share(make_mechanism("positional_prior", shape, log_strength=False, rotary=False), 16) is None


def test_power_of_the_prior_stays_above_0() -> None:
    prior = PositionalPrior(shape=HeadShape(model_width=8, heads=2, kv_heads=1, head_width=4))
    assert prior.power is not None
    torch.nn.init.constant_(prior.power, -20.0)
    table = prior.table(64)
    assert bool(table.isfinite().all())
    assert bool((table[:, 1:] <= table[:, :-1]).all())
