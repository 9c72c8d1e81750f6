"""How a model holds its weights, and the same model with them held otherwise."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.model.narrow import Narrow, fitting_group, narrowed, widened
from varifocal.model.reading import only_errors

KINDS = ("float32", "int8")


def check_kind(weights: str | None, dtype: torch.dtype | None = None) -> None:
    """ValueError unless weights can be held so, and the dtype that was asked for goes with it."""
    if weights is not None and weights not in KINDS:
        raise ValueError(f"weights must be {' or '.join(KINDS)}, got {weights!r}")
    if weights is not None and dtype not in (None, torch.float32):
        raise ValueError(f"weights={weights!r} computes in float32, got dtype={dtype}; leave dtype or weights out")


def with_weights(model: VarifocalForCausalLM, weights: str | None) -> VarifocalForCausalLM:
    """The model with its weights held as asked, in evaluation mode: itself where they are already, or for None.

    Held as int8 are the embedding, the head, and every product of the layers; norms, biases and what the mechanisms
    own stay float32.
    """
    check_kind(weights)
    narrow = model.config.weights is not None
    model.eval()
    if weights is None or (weights == "int8" and narrow):
        return model
    if weights == "float32" and not narrow:
        model.float()
        return model
    state = {name: value.detach() for name, value in model.state_dict().items()}
    config = copy.deepcopy(model.config)
    if config.tie_word_embeddings:
        state = {name: value for name, value in state.items() if not name.startswith("lm_head.")}
    config.weights = None if narrow else {"kind": "int8", "group": fitting_group(config.row_lengths())}
    with torch.device("meta"):
        modules = dict((model if narrow else VarifocalForCausalLM(config)).named_modules())
    for name, module in modules.items():
        if isinstance(module, Narrow) and f"{name}.weight" in state:
            convert(state, name, module, widen=narrow)
    with only_errors():
        made = VarifocalForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    made.generation_config = model.generation_config
    changed: VarifocalForCausalLM = made.eval()
    return changed


def convert(state: dict[str, Tensor], name: str, module: Narrow, *, widen: bool) -> None:
    """Replace a module's weights in a model's state, by what they stand for or by bytes and scales."""
    if widen:
        state[f"{name}.weight"] = widened(state[f"{name}.weight"], state.pop(f"{name}.scales"))
        return
    group = module.weight.shape[1] // module.scales.shape[1]
    state[f"{name}.weight"], state[f"{name}.scales"] = narrowed(state[f"{name}.weight"], group)


def weight_bytes(model: torch.nn.Module) -> int:
    """The bytes of all parameters and buffers; what is tied counts once."""
    held = {one.data_ptr(): one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers())}
    return sum(held.values())
