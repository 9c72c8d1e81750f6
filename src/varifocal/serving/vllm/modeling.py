"""The language model as vLLM runs it: its layers, with an attention of vLLM's for every unit of heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.qwen2 import Qwen2MLP, Qwen2Model
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from vllm.model_executor.models.utils import PPMissingLayer, extract_layer_index, maybe_prefix
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec

from varifocal.attention.mechanisms import make_mechanism
from varifocal.attention.mechanisms.base import Step
from varifocal.serving.head_plan import Reach, Unit, UnservableError, plan_heads
from varifocal.serving.vllm.window_cache import WindowSpec


class WindowAttention(Attention):
    """vLLM's attention with a window, whose cache keeps the first tokens too."""

    def __init__(self, *args: Any, first_tokens: int, **kwargs: Any) -> None:
        if first_tokens:
            if not current_platform.is_cpu():
                raise UnservableError(
                    f"a window with the first {first_tokens} tokens is served on a CPU so far; for other devices fit "
                    "with sinks=0 and sink_logit=True, which vLLM's own kernels take"
                )
            from varifocal.serving.vllm.sink_attention import SinkBackend

            kwargs |= {"attn_backend": SinkBackend, "first_tokens": first_tokens}
        super().__init__(*args, **kwargs)
        self.first_tokens = first_tokens

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec:
        spec = super().get_kv_cache_spec(vllm_config)
        assert type(spec) is SlidingWindowSpec
        return WindowSpec(**vars(spec), sinks=self.first_tokens)


class UnitAttention(nn.Module):
    """The attention of some key heads of a layer, and of the query heads that share them."""

    def __init__(self, unit: Unit, config: Any, *, first_head: int, near: int | None, sink_logit: bool, **given: Any):
        super().__init__()
        group = config.num_attention_heads // config.num_key_value_heads
        self.key_heads = [head - first_head for head in unit.heads]
        """Of this process."""
        self.query_heads = [head * group + one for head in self.key_heads for one in range(group)]
        self.of_model = [head * group + one for head in unit.heads for one in range(group)]
        prefix = given.pop("prefix")
        self.far = attention(unit.reach, config, unit, sink_logit, prefix=prefix, **given)
        self.near = None
        if near is not None:
            self.near = attention(
                Reach(near), config, unit, False, prefix=f"{prefix}.near",
                shared=prefix, **given,
            )  # fmt: skip

    def forward(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None) -> Tensor:
        """[T, h, D] of queries [T, H, D], keys and values [T, G, D] and the gates [T, H] of this process."""
        if len(self.key_heads) < k.shape[1]:
            q, k, v = taken(q, self.query_heads), taken(k, self.key_heads), taken(v, self.key_heads)
        far: Tensor = self.far(q, k, v).view(q.shape)
        if self.near is None:
            return far
        assert gate is not None
        g = taken(gate, self.query_heads)[..., None]
        near = self.near(q, None, None).view(q.shape)
        mixed: Tensor = (g * near + (1 - g) * far).to(far.dtype)
        return mixed


def attention(
    reach: Reach, config: Any, unit: Unit, sink_logit: bool, *, shared: str | None = None, **given: Any
) -> Any:
    """vLLM's attention for what some heads read."""
    heads = len(unit.heads)
    group = config.num_attention_heads // config.num_key_value_heads
    if sink_logit:
        given["sinks"] = torch.zeros(heads * group, dtype=torch.float32)
    if shared is not None:
        given["kv_sharing_target_layer_name"] = shared
    sizes = (heads * group, config.head_dim, config.head_dim**-0.5)
    if reach.window is None:
        return Attention(*sizes, num_kv_heads=heads, **given)
    return WindowAttention(
        *sizes, num_kv_heads=heads, per_layer_sliding_window=reach.window, first_tokens=reach.sinks, **given
    )


def taken(x: Tensor, heads: list[int]) -> Tensor:
    """Some heads of x [T, H, ...]."""
    first = heads[0]
    if heads == list(range(first, first + len(heads))):
        return x[:, first : first + len(heads)].contiguous()
    return x[:, heads]


class VarifocalAttention(nn.Module):
    """Projections, norms and rotary embedding are vLLM's; what the heads read, the mechanism says."""

    def __init__(self, config: Any, cache_config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        layer = extract_layer_index(prefix)
        plan = plan_heads(config, ranks=ranks)[layer]
        self.head_dim = config.head_dim
        self.heads, self.key_heads = config.num_attention_heads // ranks, config.num_key_value_heads // ranks
        self.first_head = rank * self.heads
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.head_dim, config.num_attention_heads, config.num_key_value_heads,
            bias=config.qkv_bias or config.attention_bias, quant_config=quant_config, prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim, config.hidden_size, bias=config.attention_bias,
            quant_config=quant_config, prefix=f"{prefix}.o_proj",
        )  # fmt: skip
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None for _ in range(2)
        )
        self.rotary_emb = get_rope(
            self.head_dim, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters
        )
        name, options = config.layer_mechanism(layer)
        self.mechanism = make_mechanism(name, config.head_shape(), **options).float()
        first = rank * self.key_heads
        own = [unit for unit in plan.units if first <= unit.heads[0] < first + self.key_heads]
        self.units = nn.ModuleList(
            UnitAttention(
                unit, config, first_head=first, near=plan.near, sink_logit=plan.sink_logit, cache_config=cache_config,
                quant_config=quant_config,
                # By a head of the whole model: vLLM tells caches apart by name, whatever process has them.
                prefix=f"{prefix}.head{unit.heads[0]}",
            )
            for unit in own
        )  # fmt: skip
        order = [head for unit in self.units for head in unit.query_heads]  # type: ignore[union-attr]
        self.order = None if order == sorted(order) else sorted(range(len(order)), key=order.__getitem__)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """[T, C] of the normed input [T, C] of tokens at positions [T]."""
        projected, _ = self.qkv_proj(hidden_states)
        keys = self.key_heads * self.head_dim
        q, k, v = projected.split([self.heads * self.head_dim, keys, keys], dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.reshape(-1, self.heads, self.head_dim)).flatten(1)
            k = self.k_norm(k.reshape(-1, self.key_heads, self.head_dim)).flatten(1)
        q, k = self.rotary_emb(positions, q, k)
        q, k, v = (x.view(-1, x.shape[1] // self.head_dim, self.head_dim) for x in (q, k, v))
        gate = self.gates(hidden_states)
        found = [unit(q, k, v, gate) for unit in self.units]
        whole = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        if self.order is not None:
            whole = whole[:, self.order]
        output: Tensor = self.o_proj(whole.flatten(1))[0]
        return output

    def gates(self, x: Tensor) -> Tensor | None:
        """How much of its window each head of this process reads, [T, H], if a gate decides that."""
        step: Step | None = self.mechanism.step()
        if step is None or step.gate is None:
            return None
        value: Tensor = step.gate(x[None]).value[0].mT  # [T, H of the model]
        return value[:, self.first_head : self.first_head + self.heads]

    def note_sinks(self) -> None:
        """Hand the sink logits to the kernels, when they have been loaded."""
        step: Step | None = self.mechanism.step()
        if step is None or step.sink is None:
            return
        unit: Any
        for unit in self.units:
            unit.far.impl.sinks.copy_(step.sink.detach()[unit.of_model])


class VarifocalDecoderLayer(Qwen3DecoderLayer):
    """vLLM's layer of a Qwen model around our attention."""

    def __init__(self, config: Any, cache_config: Any = None, quant_config: Any = None, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = VarifocalAttention(config, cache_config, quant_config, f"{prefix}.self_attn")
        self.mlp = Qwen2MLP(
            hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, hidden_act=config.hidden_act,
            quant_config=quant_config, prefix=f"{prefix}.mlp",
        )  # fmt: skip
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class VarifocalModel(Qwen2Model):
    """Embedding, layers and the last norm."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, decoder_layer_type=VarifocalDecoderLayer)


class VarifocalForCausalLM(Qwen3ForCausalLM):
    """The model with its head."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        nn.Module.__init__(self)
        config = vllm_config.model_config.hf_config
        self.config, self.vllm_config, self.quant_config = config, vllm_config, vllm_config.quant_config
        self.model = VarifocalModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                config.vocab_size, config.hidden_size, quant_config=self.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )  # fmt: skip
            if config.tie_word_embeddings:
                self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """vLLM loads what is Qwen's; mechanisms have buffers too, and are whole in every process."""
        own = {
            name: value for name, value in (*self.named_parameters(), *self.named_buffers()) if ".mechanism." in name
        }
        loaded: set[str] = set()

        def others() -> Iterable[tuple[str, Tensor]]:
            for name, value in weights:
                if name in own:
                    own[name].data.copy_(value)
                    loaded.add(name)
                else:
                    yield name, value

        found: set[str] = super().load_weights(others())
        missing = own.keys() - loaded
        if missing:
            raise ValueError(f"the weights are incomplete, these are missing: {', '.join(sorted(missing)[:3])}")
        for module in self.modules():
            if isinstance(module, VarifocalAttention):
                module.note_sinks()
        return found | loaded
