"""A few tokens after a cache, in one native call a layer: decoding at the speed at which memory gives the weights.

What is fast here is a matter of speed, never of meaning. Modules, mechanisms and memories are those of the general
path, and so are the results; the tests compare both. (Auxiliary losses, which only training adds, are left out.) A
layer whose mechanism has no `step` runs its mechanism as ever, between two native calls. Wherever anything is not as
plain as the kernels take it (an adapter, a hook, another dtype), there is no decoder, and the general path runs.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import Cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from varifocal.attention.gates import Gate
from varifocal.attention.mechanisms.base import Mechanism
from varifocal.attention.mechanisms.sinks import SinkLogits
from varifocal.attention.memories import KeysAndValues, Memory, RecentKeys, SplitKeys
from varifocal.attention.precision import WideLinear
from varifocal.equations.layout import Layout
from varifocal.kernels.native import abi, library
from varifocal.kernels.native.arguments import row_pointer
from varifocal.kernels.native.backend import as_mixture
from varifocal.kernels.native.mixture import DOT, per_head
from varifocal.kernels.native.once import transformed
from varifocal.kernels.steps.few_rows import matrix_argument
from varifocal.model.attention import VarifocalAttention
from varifocal.model.bare import is_bare
from varifocal.model.memory_layer import LayerOfCache, MemoryLayer
from varifocal.model.narrow import NarrowLinear

if TYPE_CHECKING:
    from varifocal.model.modeling import VarifocalDecoderLayer, VarifocalModel

MOST_TOKENS = 8
"""With more of them torch's products are as fast."""
MOST_QUERIES = 16
"""Of all heads that share a key head: what the kernel for few queries takes."""


class Watched(NamedTuple):
    """A module that the kernels take the weights of, and where it was found."""

    found_in: dict[str, nn.Module | None]
    name: str
    module: nn.Module
    weights: tuple[tuple[Mapping[str, Tensor | None], str, int], ...]
    """Where each of its weights is found, its name, and the address that it had."""

    def is_as_it_was(self) -> bool:
        """Whether calling the module still means what the kernels do with its weights."""
        module = self.module
        return (
            self.found_in.get(self.name) is module
            and not (module._forward_hooks or module._forward_pre_hooks)
            and "forward" not in module.__dict__
            and all(
                (weight := found_in[name]) is not None and weight.data_ptr() == address
                for found_in, name, address in self.weights
            )
        )


class DecodedLayer:
    """One layer as the native library takes it."""

    def __init__(self, number: int, layer: VarifocalDecoderLayer, buffers: dict[str, Tensor]) -> None:
        attention = layer.self_attn
        self.number = number
        self.mechanism: Mechanism[Any] = attention.mechanism
        self.call = abi.Step()
        self.layer: abi.Layer = self.call.layer
        self.attention: abi.Mixture = self.call.attention
        self.kept: list[Tensor] = []
        """What the call points to and nobody else keeps."""
        self.heads_kept = (abi.Kept * attention.mechanism.shape.kv_heads)()
        """What each key head keeps, for memories that keep different tokens."""
        fill_layer(self.layer, layer, buffers)
        self.steps = self.fill_step(buffers)

    def fill_step(self, buffers: dict[str, Tensor]) -> bool:
        """Fill in the attention, if the mechanism has a step that the call knows."""
        step = self.mechanism.step() if speaks_for_its_equation(type(self.mechanism)) else None
        if step is None or len(step.branches) != (1 if step.gate is None else 2):
            return False
        if step.sink is not None and (step.gate is not None or not is_plain(step.sink)):
            return False
        windows = [as_mixture(branch) for branch in step.branches]
        branches = [branch for branch in windows if branch is not None and branch.width is None]
        if len(branches) < len(windows) or (step.gate is not None and not self.fill_gate(step.gate)):
            return False
        shape, call = self.mechanism.shape, self.attention
        call.heads, call.kv_heads, call.head_width = shape.heads, shape.kv_heads, shape.head_width
        call.branch_count, call.score = len(branches), DOT
        window = per_head([branch.window for branch in branches], shape.heads, "window")
        prefix = per_head([branch.prefix for branch in branches], shape.heads, "prefix")
        scale = torch.full((shape.heads,), shape.head_width**-0.5)
        self.kept += [window, prefix, scale]
        for m in range(len(branches)):
            abi.put_branch(
                call, m, window=row_pointer(window, m) or 0, prefix=row_pointer(prefix, m) or 0,
                width=0, limit=0, edge=0.0,
            )  # fmt: skip
        call.scale, call.logsumexp = scale.data_ptr(), buffers["logsumexp"].data_ptr()
        if step.sink is not None:
            self.call.sink = step.sink.data_ptr()
        if step.gate is not None:
            call.weights, call.skip_closed = buffers["mix"].data_ptr(), 1
        return True

    def fill_gate(self, gate: Gate) -> bool:
        """Fill in a gate that is one linear layer of the input, or does not look at it."""
        if gate.config.kind == "mlp":
            return False
        if gate.output is not None:
            self.call.mix = matrix_argument(gate.output.weight, gate.output.bias)
        elif gate.static is not None:
            self.call.mix.bias = gate.static.data_ptr()
        self.call.mix_start, self.call.mix_cap = gate.config.start, gate.config.soft_cap or 0.0
        self.call.mix_warmth = gate.warmth.data_ptr()
        return True


class Decoder:
    """The layers of a model, with buffers that every token reuses."""

    def __init__(self, model: VarifocalModel) -> None:
        config = model.config
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        sizes = {
            "normed": config.hidden_size, "queries": heads * width, "keys": kv_heads * width,
            "values": kv_heads * width, "attended": heads * width, "inner": config.intermediate_size,
            "logsumexp": heads * 2, "mix": heads * 2,
        }  # fmt: skip
        self.buffers = {name: torch.empty(MOST_TOKENS, size) for name, size in sizes.items()}
        self.watched = list(watched_modules(model))
        self.layers = [
            DecodedLayer(number, layer, self.buffers)  # type: ignore[arg-type]
            for number, layer in enumerate(model.layers)
        ]

    def is_as_it_was(self) -> bool:
        """Whether every module is still the one it was made from, with nothing attached."""
        return not has_global_hooks() and all(one.is_as_it_was() for one in self.watched)

    def decode(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], layout: Layout, cache: Cache) -> Tensor:
        """The last layer's output [B, T, C] for the tokens' embeddings; the cache takes their keys and values."""
        batch, tokens, width = hidden.shape
        hidden = hidden.contiguous().clone()
        turned = tuple(one.contiguous() for one in rotary)
        straight = tuple(torch.full_like(one, angle) for one, angle in zip(turned, (1.0, 0.0), strict=True))
        threads = torch.get_num_threads()
        for one in self.layers:
            call = one.layer
            cosines, sines = turned if one.mechanism.rotates else straight
            call.tokens, call.angles, call.threads = batch * tokens, cosines.shape[0] * cosines.shape[1], threads
            call.cosines, call.sines, call.x = cosines.data_ptr(), sines.data_ptr(), hidden.data_ptr()
            few = tokens * (call.heads // call.kv_heads) <= MOST_QUERIES
            memory = fitting_memory(cache, one.number, tokens) if one.steps and few else None
            if memory is None:
                self.run_mechanism(one, (batch, tokens, width), layout, cache)
            else:
                self.run_step(one, batch, tokens, layout, memory)
        return hidden

    def run_step(self, one: DecodedLayer, batch: int, tokens: int, layout: Layout, memory: Memory) -> None:
        """A whole layer in one call."""
        if isinstance(memory, SplitKeys):
            memory.make_room(tokens, layout)
        call, by_heads = one.attention, isinstance(memory, SplitKeys) and memory.is_split
        if by_heads:
            total = memory.length + tokens
            one.call.kept = fill_kept(one.heads_kept, memory, tokens)  # type: ignore[arg-type]
            # Unread, but the check of a mixture asks for them.
            abi.put_tensor(call, abi.Mixture.k, one.heads_kept[0].k.data, (0, 0, 0))
            abi.put_tensor(call, abi.Mixture.v, one.heads_kept[0].v.data, (0, 0, 0))
        else:
            one.call.kept = None
            for name, field in (("k", abi.Mixture.k), ("v", abi.Mixture.v)):
                rows = memory.rows[name]
                held = rows.make_room(tokens)
                begin = held.data_ptr() + rows.begin * held.stride(2) * held.element_size()
                abi.put_tensor(call, field, begin, held.stride()[:3])
            total = memory.rows["k"].length + tokens
        position, start = layout.of_last(total).ranges
        call.batch, call.queries, call.keys, call.threads = batch, tokens, total, one.layer.threads
        call.position, call.start = position.data_ptr(), start.data_ptr()
        across = call.heads * call.head_width
        strides = (tokens * across, call.head_width, across)
        abi.put_tensor(call, abi.Mixture.q, self.buffers["queries"].data_ptr(), strides)
        abi.put_tensor(call, abi.Mixture.out, self.buffers["attended"].data_ptr(), strides)
        library.call("layer_step", one.call)
        for part in memory.rows.values():
            part.length += tokens
        memory.length += tokens
        if isinstance(memory, SplitKeys):
            memory.forget_read(layout)
        else:
            memory.forget_unread()

    def run_mechanism(self, one: DecodedLayer, sizes: tuple[int, int, int], layout: Layout, cache: Cache) -> None:
        """What lies before and after the attention in one call each, and the mechanism as ever between them."""
        library.call("layer_project", one.layer)
        batch, tokens, _ = sizes
        shape = one.mechanism.shape

        def made(name: str, heads: int) -> Tensor:
            rows = self.buffers[name][: batch * tokens].view(batch, tokens, heads, shape.head_width)
            return rows.transpose(1, 2)

        q = made("queries", shape.heads)
        # A cache may take what it is given without a copy.
        k, v = (made(name, shape.kv_heads).clone() for name in ("keys", "values"))
        x = self.buffers["normed"][: batch * tokens].view(sizes)
        memory = LayerOfCache(cache, one.number, one.mechanism)
        attended = one.mechanism(x, q, k, v, memory=memory, layout=layout)
        made("attended", shape.heads).copy_(attended.output)
        library.call("layer_finish", one.layer)


class DecodersOfThread(threading.local):
    """A thread's decoders: their buffers serve one call at a time."""

    def __init__(self) -> None:
        self.made: WeakKeyDictionary[nn.Module, Decoder] = WeakKeyDictionary()


_DECODERS = DecodersOfThread()


def find_decoder(model: VarifocalModel, hidden: Tensor, cache: Cache | None) -> Decoder | None:
    """What decodes the tokens hidden [B, T, C] after those of a cache; None where the general path must."""
    if (
        torch.compiler.is_compiling()
        or cache is None
        or not 0 < hidden.shape[0] * hidden.shape[1] <= MOST_TOKENS
        or not cache.get_seq_length()
        or torch.is_grad_enabled()
        or type(hidden) is not Tensor
        or hidden.device.type != "cpu"
        or hidden.dtype != torch.float32
        or torch.is_autocast_enabled("cpu")
        or model.training
        or library.why_missing() is not None
        or torch._C._len_torch_dispatch_stack()
        or transformed()
    ):
        return None
    decoder = _DECODERS.made.get(model)
    if decoder is not None and decoder.is_as_it_was():
        return decoder
    if not may_be_decoded(model):
        return None
    decoder = _DECODERS.made[model] = Decoder(model)
    return decoder


def may_be_decoded(model: VarifocalModel) -> bool:
    """Whether the kernels do what calling the modules of every layer would do."""
    config = model.config
    if config.hidden_act != "silu" or config.head_dim % 2 or has_global_hooks():
        return False
    layer: Any
    for layer in model.layers:
        attention = layer.self_attn
        if attention.head_outputs is not None:
            return False
        plain: list[tuple[nn.Module, type[nn.Module]]] = [(attention, VarifocalAttention), (layer.mlp, Qwen3MLP)]
        plain += [(one, NarrowLinear if type(one) is NarrowLinear else nn.Linear) for one in linears_of(layer)]
        plain += [(one, Qwen3RMSNorm) for one in norms_of(layer)]
        if not all(is_bare(one, kind) for one, kind in [*plain, (layer, type(model.layers[0]))]):
            return False
        if not {type(attention.q_norm), type(attention.k_norm)} <= {nn.Identity, Qwen3RMSNorm}:
            return False
        if type(attention.q_norm) is not type(attention.k_norm):
            return False
        epsilons = {one.variance_epsilon for one in norms_of(layer)}
        weights = [
            weight
            for one in (*linears_of(layer), *norms_of(layer))
            for weight in one._parameters.values()
            if weight is not None
        ]
        if len(epsilons) != 1 or not all(is_plain(weight) for weight in weights):
            return False
        gates = [part for part in attention.mechanism.modules() if isinstance(part, Gate | WideLinear | SinkLogits)]
        if not all(is_bare(part, type(part)) and part_is_plain(part) for part in (attention.mechanism, *gates)):
            return False
    return True


def part_is_plain(module: nn.Module) -> bool:
    """Whether all that a module owns itself is as the kernels take it."""
    return all(is_plain(weight) for weight in module._parameters.values() if weight is not None)


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is as the kernels take it."""
    return weight.dtype in (torch.float32, torch.int8) and weight.device.type == "cpu" and weight.is_contiguous()


def linears_of(layer: VarifocalDecoderLayer) -> Sequence[nn.Linear | NarrowLinear]:
    """The products of a layer, in the order of the native call."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        mlp.gate_proj, mlp.up_proj, mlp.down_proj,
    )  # fmt: skip


def norms_of(layer: VarifocalDecoderLayer) -> Sequence[Qwen3RMSNorm]:
    """The norms of a layer that it has."""
    norms = (
        layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn.q_norm, layer.self_attn.k_norm,
    )  # fmt: skip
    return [one for one in norms if not isinstance(one, nn.Identity)]


def fill_layer(call: abi.Layer, layer: Any, buffers: dict[str, Tensor]) -> None:
    """Fill in all of a decoder layer that no token changes."""
    attention, shape = layer.self_attn, layer.self_attn.mechanism.shape
    call.width, call.heads = shape.model_width, shape.heads
    call.kv_heads, call.head_width = shape.kv_heads, shape.head_width
    call.epsilon = layer.input_layernorm.variance_epsilon
    for name, linear in zip(("q", "k", "v", "o", "gate", "up", "down"), linears_of(layer), strict=True):
        scales = linear.scales if isinstance(linear, NarrowLinear) else None
        setattr(call, name, matrix_argument(linear.weight, linear.bias, scales))
    call.input_norm = layer.input_layernorm.weight.data_ptr()
    call.output_norm = layer.post_attention_layernorm.weight.data_ptr()
    if isinstance(attention.q_norm, Qwen3RMSNorm):
        call.q_norm, call.k_norm = attention.q_norm.weight.data_ptr(), attention.k_norm.weight.data_ptr()
    for name in ("normed", "queries", "keys", "values", "attended", "inner"):
        setattr(call, name, buffers[name].data_ptr())


def watched_modules(model: VarifocalModel) -> Iterator[Watched]:
    """Every module inside the layers, with its weights."""
    for parent in model.layers.modules():
        for name, module in parent._modules.items():
            if module is not None:
                weights = tuple(
                    (owned, key, weight.data_ptr())
                    for owned in (module._parameters, module._buffers)
                    for key, weight in owned.items()
                    if weight is not None
                )
                yield Watched(parent._modules, name, module, weights)


def has_global_hooks() -> bool:
    """Whether torch calls something with every module."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def speaks_for_its_equation(kind: type[Mechanism[Any]]) -> bool:
    """Whether the class that says `step` knows the equation: one derived from it may have changed the latter alone."""

    def place_of(name: str) -> int:
        return next(place for place, one in enumerate(kind.__mro__) if name in vars(one))

    return place_of("step") <= place_of("equation")


def fill_kept(kept: Any, memory: SplitKeys, tokens: int) -> int:
    """Where each key head keeps its tokens, with room for some more; the address of the table."""
    for group, held in memory.split_rows():
        for rows, field in zip(held, (abi.Kept.k, abi.Kept.v), strict=True):
            room = rows.make_room(tokens)
            batch, head, row = room.stride()[:3]
            size = room.element_size()
            first = room.data_ptr() + rows.begin * row * size
            for number, name in enumerate(group.heads):
                abi.put_tensor(kept[name], field, first + number * head * size, (batch, 0, row))
        for name in group.heads:
            kept[name].keys = held[0].length + tokens
    return ctypes.addressof(kept)


def fitting_memory(cache: Cache, layer: int, tokens: int) -> Memory | None:
    """The memory of a layer, if a native call may write to it; None for any other."""
    found = cache.layers[layer] if layer < len(cache.layers) else None
    memory = found.memory if type(found) is MemoryLayer else None
    if memory is None or not memory.rows:
        return None
    if not (type(memory) in (RecentKeys, SplitKeys) or (type(memory) is KeysAndValues and memory.ranked is None)):
        return None
    if memory.capacity is not None and memory.length + tokens > memory.capacity:
        return None
    held = next(iter(memory.rows.values())).held
    return memory if held is not None and held.dtype == torch.float32 and held.device.type == "cpu" else None
