"""Qwen3's attention with a mechanism between its projections."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import Cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from varifocal.attention.mechanisms import MechanismOutput, make_mechanism
from varifocal.model.cache import CachedKeys, update_cache
from varifocal.model.config import VarifocalConfig
from varifocal.model.growing_cache import kept_pools, let_grow
from varifocal.model.steps import normed_and_rotated
from varifocal.model.text_layout import TextLayout


class VarifocalAttention(Qwen3Attention):
    """Projections, norms and rotary embedding are Qwen3's, with its names; the mechanism's are under `mechanism`."""

    def __init__(self, config: VarifocalConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if config.qkv_bias and not config.attention_bias:
            for name in ("q_proj", "k_proj", "v_proj"):
                plain = getattr(self, name)
                setattr(self, name, nn.Linear(plain.in_features, plain.out_features, bias=True))
        if not config.qk_norm:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        name, options = config.layer_mechanism(layer_idx)
        self.mechanism = make_mechanism(name, config.head_shape(), **options)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], layout: TextLayout, cache: Cache | None
    ) -> MechanismOutput:
        """The layer's attention of its normed input x [B, T, C]; the result's output is [B, T, C] too.

        Args:
            x: the normed input.
            rotary: cosines and sines [B or 1, T, D].
            layout: where the tokens stand.
            cache: takes their keys and values, if it is not None.
        """
        q, k = self.queries_and_keys(x, rotary)  # [B, H, T, D] and [B, G, T, D]
        v = self.by_head(self.v_proj(x)).transpose(1, 2)
        # Under autocast the norms' weights widen q and k, and not v.
        q, k = q.to(v.dtype), k.to(v.dtype)
        memory, pooled = None, None
        if cache is not None:
            memory = self.mechanism.remember(x, q, k)
            let_grow(cache, self.layer_idx)
            k, v, memory = update_cache(cache, self.layer_idx, k, v, memory=memory, total=layout.total)
        documents = layout.documents_of_last(k.shape[2])
        if cache is not None:
            cached = CachedKeys(k, v, memory)
            pooled = kept_pools(cache, self.layer_idx, self.mechanism, cached, new=x.shape[1], documents=documents)
        attended = self.mechanism(x, q, k, v, memory=memory, documents=documents, pooled=pooled)
        # [B, T, H D]: a view, since the kernels keep the layout of q.
        output = self.o_proj(attended.output.transpose(1, 2).flatten(2))
        return MechanismOutput(output, attended.losses, attended.records)

    def by_head(self, projected: Tensor) -> Tensor:
        """[B, T, * D] as [B, T, *, D]."""
        return projected.view(*projected.shape[:2], -1, self.head_dim)

    def queries_and_keys(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries [B, H, T, D] and keys [B, G, T, D] of the normed input x [B, T, C]: projected, normed, rotated."""
        q, k = self.by_head(self.q_proj(x)), self.by_head(self.k_proj(x))
        return normed_and_rotated(self.q_norm, self.k_norm, q, k, rotary)
