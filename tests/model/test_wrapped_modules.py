"""Every module is called, so that adapters around it and hooks on it take part; kernels serve bare ones alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model.models import random_tokens, small_model
from varifocal import Mechanism
from varifocal.model import VarifocalForCausalLM
from varifocal.model.head import token_losses

MECHANISMS = ["head_gated", "context_adaptive", "dynamic_sparse"]


class Adapted(nn.Module):
    """A module in another's place that keeps it and its weight, as adapters do, and adds to what it gives."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.share = nn.Parameter(torch.tensor(0.5))

    @property
    def weight(self) -> Any:
        return self.base.weight

    @property
    def bias(self) -> Any:
        return getattr(self.base, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = self.base(x)
        # No mere factor, which a norm would take back.
        return given + self.share * given.roll(1, dims=-1)


def adaptable(model: nn.Module) -> list[str]:
    """The modules from a tensor to a tensor that have weights of their own."""
    return [
        name
        for name, module in model.named_modules()
        if list(module.parameters(recurse=False)) and not isinstance(module, Mechanism)
    ]


def loss_of(model: VarifocalForCausalLM) -> Tensor:
    tokens = random_tokens(2, 24)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", MECHANISMS)
def test_an_adapter_around_any_module_changes_the_loss_and_learns(variant: str, tied: bool) -> None:
    model = small_model(variant, tie_word_embeddings=tied)
    plain = loss_of(model)
    names = adaptable(model)
    assert {"lm_head", "model.embed_tokens", "model.norm", "model.layers.1.mlp.down_proj"} <= set(names)
    for name in names:
        base = model.get_submodule(name)
        adapted = Adapted(base)
        model.set_submodule(name, adapted)
        loss = loss_of(model)
        (slope,) = torch.autograd.grad(loss, adapted.share)
        model.set_submodule(name, base)
        assert float(slope) != 0.0, name
        assert loss.item() != plain.item(), name


@pytest.mark.parametrize("variant", MECHANISMS)
def test_hooks_see_every_module_once_a_call(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(1, 9)
    names = {module: name for name, module in model.named_modules()}
    watched = [name for module, name in names.items() if name and not isinstance(module, nn.ModuleList)]
    counts: dict[str, int] = {}

    def count(module: nn.Module, *_: Any) -> None:
        counts[names[module]] = counts.get(names[module], 0) + 1

    for name in watched:
        model.get_submodule(name).register_forward_hook(count)
    seen: list[dict[str, int]] = []
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    seen.append(dict(counts))
    counts.clear()
    with torch.no_grad():
        cache = model(input_ids=tokens, use_cache=True).past_key_values
        seen.append(dict(counts))
        counts.clear()
        model(input_ids=tokens[:, :1], past_key_values=cache)
        seen.append(dict(counts))
    inference, decoding = seen[1:]
    once = dict.fromkeys(watched, 1)
    assert inference == once
    assert decoding == once
    # The head with a hook runs twice in training: its logits are computed again, not kept.
    assert seen[0] == once | {"lm_head": 2}


def test_a_hook_on_one_module_alone_sees_it() -> None:
    model, tokens = small_model("context_adaptive", num_hidden_layers=1), random_tokens(1, 9)
    for name, module in model.named_modules():
        calls: list[str] = []
        if not isinstance(module, nn.ModuleList):
            hook = module.register_forward_hook(lambda *_, calls=calls, name=name: calls.append(name))
            with torch.no_grad():
                model(input_ids=tokens, labels=tokens)
            hook.remove()
            assert calls == [name]


def test_bare_modules_keep_their_kernels_and_the_loss() -> None:
    model = small_model("head_gated")
    plain = loss_of(model)
    model.requires_grad_(True)
    gradients = torch.autograd.grad(plain, list(model.parameters()))
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
    hooked = loss_of(model)
    torch.testing.assert_close(hooked, plain, rtol=1e-6, atol=1e-6)
    for found, expected in zip(torch.autograd.grad(hooked, list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_dropout_in_an_adapter_is_the_same_in_the_backward_pass() -> None:
    class Dropped(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            given: Tensor = self.base(nn.functional.dropout(x, 0.5))
            return given * self.scale

    for name in ("model.layers.1.mlp.down_proj", "lm_head"):
        model = small_model("dense", tie_word_embeddings=False)
        dropped = Dropped(model.get_submodule(name))
        model.set_submodule(name, dropped)
        losses, slopes = [], []
        for scale in (0.99, 1.0, 1.01):
            torch.manual_seed(7)
            dropped.scale.data.fill_(scale)
            loss = loss_of(model)
            losses.append(loss.item())
            slopes.append(torch.autograd.grad(loss, dropped.scale)[0].item())
        assert (losses[2] - losses[0]) / 0.02 == pytest.approx(slopes[1], rel=2e-2, abs=1e-3), name


def test_labels_out_of_range_are_refused_behind_an_adapter_too() -> None:
    model = small_model("dense")
    model.lm_head.register_forward_hook(lambda *_: None)
    tokens = random_tokens(1, 9)
    with pytest.raises(ValueError, match=r"labels must be -100 or between 0 and 60, got -3 to "):
        model(input_ids=tokens, labels=tokens.index_fill(1, torch.tensor([4]), -3))


def test_losses_of_tokens_go_through_the_head() -> None:
    head, hidden = nn.Linear(4, 7, bias=False), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(5)
    plain = token_losses(head, hidden, labels)
    torch.testing.assert_close(plain, nn.functional.cross_entropy(head(hidden), labels, reduction="none"))
    assert not torch.equal(token_losses(Adapted(head), hidden, labels), plain)


def test_gates_with_adapters_stay_wide_under_autocast() -> None:
    model = small_model("context_adaptive")
    given: list[torch.dtype] = []
    for name, module in model.named_modules():
        if ".mechanism." in name and isinstance(module, nn.Linear):
            adapted = Adapted(module)
            adapted.register_forward_hook(lambda module, args, output: given.append(output.dtype))
            model.set_submodule(name, adapted)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(input_ids=random_tokens(1, 9))
    assert given == [torch.float32] * 6
