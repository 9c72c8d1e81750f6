"""Reads a GGUF file into int8 weights without widening it: blocks of Q8_0 and Q4_0 stay the numbers that they are.

Both are whole numbers with a scale for each 32: from -127 to 127, and from -8 to 7. Matrices of other kinds are widened
one at a time and rounded to int8; Q4_1 is among them, whose blocks add an offset that no kernel here has a place for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import cached_file

from varifocal.model.checkpoints import check_report, filled_model
from varifocal.model.config import VarifocalConfig
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.model.narrow import Narrow, fitting_group, narrowed
from varifocal.model.reading import readable
from varifocal.retrofit.sources import Place

BLOCK = 32
"""Weights of a block of Q8_0 and of Q4_0."""
SCALE_BYTES = 2
"""A block begins with its scale in 16 bits."""


def load_blocks(place: Place, config: VarifocalConfig, *, interleaved: bool) -> VarifocalForCausalLM:
    """The model of a GGUF file with int8 weights, in evaluation mode.

    Args:
        place: of the file.
        config: the file's config as ours, with the mechanism that is wanted.
        interleaved: whether the file keeps the two halves of each query's and key's head in turns, as Llama's do.
    """
    import gguf

    config.weights = {"kind": "int8", "group": fitting_group(config.row_lengths())}
    with torch.device("meta"):
        empty = VarifocalForCausalLM(config)
    narrow = {name for name, module in empty.named_modules() if isinstance(module, Narrow)}
    with readable(f"the weights of {place}"):
        read = gguf.GGUFReader(cached_file(place.folder, place.gguf_file, local_files_only=place.local))
        tensors = {tensor.name: tensor for tensor in read.tensors}
        name_in_file = file_names(str(read.fields["general.architecture"].contents()), config.num_hidden_layers)
        state: dict[str, Tensor] = {}
        for name in empty.state_dict():
            module, _, kind = name.rpartition(".")
            tied = config.tie_word_embeddings and module == "lm_head"
            if tied or kind == "scales" or (tensor := tensors.pop(name_in_file(name), None)) is None:
                continue
            if kind == "weight" and module in narrow:
                found = dict(zip(("weight", "scales"), matrix(tensor, config.weights["group"]), strict=True))
            else:
                found = {kind: numbers(tensor)}
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            if interleaved and (count := heads.get(module.rpartition(".")[2])) is not None:
                found = {key: halves_together(value, count) for key, value in found.items()}
            state |= {f"{module}.{key}": value for key, value in found.items()}
    model, report = filled_model(config, state, dtype=torch.float32, where=str(place))
    missing = [name for name in report["missing_keys"] if ".mechanism." not in name]
    check_report(Path(str(place)), report | {"missing_keys": missing, "unexpected_keys": list(tensors)})
    model.generation_config = GenerationConfig.from_model_config(config)
    loaded: VarifocalForCausalLM = model.eval()
    return loaded


def file_names(architecture: str, layers: int) -> Callable[[str], str | None]:
    """What a file of an architecture calls a parameter of transformers."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], layers)

    def name_in_file(name: str) -> str | None:
        found: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
        return found

    return name_in_file


def matrix(tensor: Any, group: int) -> tuple[Tensor, Tensor]:
    """A matrix of the file as int8 weights [N, C] and scales, float32 [N, C / group]."""
    kind = tensor.tensor_type.name
    if kind not in ("Q8_0", "Q4_0"):
        return narrowed(numbers(tensor), group)
    size = SCALE_BYTES + BLOCK if kind == "Q8_0" else SCALE_BYTES + BLOCK // 2
    blocks = np.asarray(tensor.data).reshape(len(tensor.data), -1, size)
    scales = torch.from_numpy(blocks[..., :SCALE_BYTES].copy().view(np.float16)[..., 0].astype(np.float32))
    if not torch.isfinite(scales).all():
        raise ValueError(f"{tensor.name} has scales that are NaN or infinite")
    held = blocks[..., SCALE_BYTES:]
    if kind == "Q4_0":
        # The first half of a block lies in the low bits of its bytes, the second in the high ones.
        held = np.concatenate([held & 15, held >> 4], axis=-1) - np.uint8(8)
    values = torch.from_numpy(held.copy().view(np.int8)).flatten(1)
    return values, scales.repeat_interleave(BLOCK // group, dim=1)


def numbers(tensor: Any) -> Tensor:
    """A tensor of the file as float32."""
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))


def halves_together(rows: Tensor, heads: int) -> Tensor:
    """Rows [N, ...] of which the two halves of each head take turns, one half after the other."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
