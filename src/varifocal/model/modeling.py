"""The Qwen language model that carries a mechanism in each layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.utils import can_return_tuple

from varifocal.attention.mechanisms import Mechanism, MechanismOutput
from varifocal.equations.layout import Layout
from varifocal.model.attention import VarifocalAttention
from varifocal.model.bare import is_bare
from varifocal.model.config import VarifocalConfig
from varifocal.model.head import head_cross_entropy
from varifocal.model.layout import documents_of, lay_out_text
from varifocal.model.loss import IGNORED, next_token_labels
from varifocal.model.outputs import VarifocalCausalLMOutput, VarifocalModelOutput
from varifocal.model.steps import fed_forward, normed


class VarifocalDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm x), then + SwiGLU(norm of that): Qwen3's layer around our attention."""

    def __init__(self, config: VarifocalConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = VarifocalAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], layout: Layout, past_key_values: Cache | None = None
    ) -> tuple[Tensor, MechanismOutput]:
        """The layer's output [B, T, C], and what its mechanism said."""
        attended = self.self_attn(normed(self.input_layernorm, hidden), rotary, layout, past_key_values)
        hidden = hidden + attended.output
        return hidden + fed_forward(self.mlp, normed(self.post_attention_layernorm, hidden)), attended


class VarifocalPreTrainedModel(PreTrainedModel):
    """What transformers wants to know of our models, and how their weights begin."""

    config_class = VarifocalConfig
    config: VarifocalConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VarifocalDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # The config's mechanism decides what attends; attn_implementation decides nothing here.
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # Of custom code, transformers passes over modules without parameters of their own: mechanisms would keep the
        # weights that it gave to their parts.
        super()._initialize_weights(module, is_custom_code=False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """transformers' own start for what is Qwen's, the mechanisms' own for theirs; loaded values stay."""
        if not isinstance(module, Mechanism):
            super()._init_weights(module)
            return
        values = (*module.parameters(), *module.buffers())
        # A mechanism initializes all of its parameters at once; those from a checkpoint are put back afterwards.
        loaded = [(value, value.clone()) for value in values if getattr(value, "_is_hf_initialized", False)]
        module.reset_parameters()
        for value, kept in loaded:
            value.copy_(kept)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """As in VarifocalConfig: no source of ours is copied into saved models."""

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """As in transformers, except that the re-entrant kind is refused: it would lose the auxiliary losses."""
        given = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        if given["use_reentrant"]:
            raise ValueError(
                "gradient checkpointing with use_reentrant=True would lose the gradients of the mechanisms' auxiliary "
                "losses; use gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        super().gradient_checkpointing_enable(given, **options)


class VarifocalModel(VarifocalPreTrainedModel):
    """Embedding, layers and the last norm."""

    def __init__(self, config: VarifocalConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(VarifocalDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        documents: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_records: bool = False,
    ) -> VarifocalModelOutput:
        """Hidden states [B, T, C] of tokens.

        Args:
            input_ids: [B, T].
            attention_mask: [B, S], 1 for text and 0 for padding on one side of it, for the cached tokens too.
            position_ids: [B, T], rotary positions; by default each token's place in its document. Without a mask,
                documents or a cache, positions that start anew separate packed documents.
            past_key_values: a cache that holds S - T tokens and takes the T new ones.
            inputs_embeds: [B, T, C] in place of input_ids.
            use_cache: whether to return a cache; by default the config's use_cache, and never while training.
            documents: integers [B, S], the document of each token, for the cached tokens too; negative for padding.
            output_hidden_states: whether to return every layer's input and the last output.
            output_attentions: must not be asked for: no matrix of attention weights ever exists.
            output_records: whether to return what the mechanisms decided.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, not both or neither")
        if output_attentions:
            raise ValueError(
                "output_attentions=True is not offered, since no matrix of attention weights exists; "
                "output_records=True gives gates, widths and selected keys"
            )
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self.wanted_cache(past_key_values, use_cache)
        layout, rotary_positions = lay_out_text(
            *hidden.shape[:2],
            # A static cache answers with a counter that it goes on to change.
            past=0 if cache is None else int(cache.get_seq_length()),
            attention_mask=attention_mask,
            position_ids=position_ids,
            documents=documents,
            device=hidden.device,
        )
        if cache is not None and not layout.one_document and documents is None and attention_mask is None:
            raise ValueError(
                "position_ids that start anew separate packed documents, which a cache cannot remember; "
                "pass use_cache=False, or documents [B, S] in every call"
            )
        rotary = self.rotary_emb(hidden, rotary_positions)
        every_hidden: list[Tensor] = []
        losses: list[dict[str, Tensor]] = []
        records: list[dict[str, Tensor]] = []
        for layer in self.layers:
            every_hidden.append(hidden) if output_hidden_states else None
            hidden, attended = layer(hidden, rotary, layout, past_key_values=cache)
            losses.append(attended.losses)
            records.append(attended.records) if output_records else None
        hidden = normed(self.norm, hidden)
        return VarifocalModelOutput(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=(*every_hidden, hidden) if output_hidden_states else None,
            auxiliary_losses=summed(losses),
            records=tuple(records) if output_records else None,
            layout=layout,
        )

    def wanted_cache(self, given: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache to fill: the given one, a new one, or none."""
        if use_cache is None:
            use_cache = given is not None or (self.config.use_cache and not self.training)
        if not use_cache:
            if given is not None and int(given.get_seq_length()):
                raise ValueError("past_key_values holds tokens, but use_cache is False; leave one of them out")
            return None
        if self.gradient_checkpointing and self.training:
            raise ValueError(
                "gradient checkpointing cannot fill a cache, it runs every layer twice; pass use_cache=False"
            )
        return DynamicCache(config=self.config) if given is None else given


class VarifocalForCausalLM(VarifocalPreTrainedModel, GenerationMixin):
    """The model with its head: the next token's logits, or the loss without them."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True

    def __init__(self, config: VarifocalConfig) -> None:
        super().__init__(config)
        self.model = VarifocalModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor | None = None,
        documents: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_records: bool = False,
    ) -> VarifocalCausalLMOutput:
        """Logits of the next token, or its loss.

        Args:
            labels: [B, T], the tokens themselves (they are shifted here), -100 where none is to be predicted. The first
                token of a document is never predicted from the one before it. With labels there are no logits,
                unless logits_to_keep asks for them: all logits of a long text are larger than the model.
            logits_to_keep: the last so many tokens, 0 for all, or a tensor of positions; None for all without labels,
                for none with labels.
            num_items_in_batch: labels of all micro-batches whose gradients are accumulated; the loss is then this
                call's share of the mean over all of them. None for the mean over this call.

        The others are those of VarifocalModel.
        """
        # A loss needs no cache, and memory is scarcest where one is computed.
        if use_cache is None and labels is not None and past_key_values is None:
            use_cache = False
        if labels is not None and input_ids is not None:
            inputs_embeds = self.embedded(input_ids)
            input_ids = None
        outputs: VarifocalModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            documents=documents,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            output_records=output_records,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        logits = loss = cross_entropy = None
        if labels is None or logits_to_keep is not None:
            logits = self.lm_head(slice_logits_to_keep(hidden, logits_to_keep or 0))
        auxiliary = outputs.auxiliary_losses or {}
        if labels is not None:
            assert outputs.layout is not None
            following = next_token_labels(labels.to(hidden.device), documents_of(outputs.layout)).flatten()
            count = (following != IGNORED).sum()
            total = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = head_cross_entropy(self.lm_head, hidden.flatten(0, 1), following) / total
            cross_entropy = loss.detach()
            # In evaluation the loss is the cross entropy alone, so that mechanisms can be compared.
            if self.training:
                # Auxiliary losses are means of a call; over accumulated micro-batches they count by their labels.
                share = 1.0 if num_items_in_batch is None else count / total
                loss = loss + sum(auxiliary.values()) * share
        return VarifocalCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            cross_entropy=cross_entropy,
            auxiliary_losses={name: one.detach() for name, one in auxiliary.items()},
            records=outputs.records,
        )

    def embedded(self, input_ids: Tensor) -> Tensor:
        """The embeddings [B, T, C] of tokens whose loss is asked for.

        A tied weight gets its gradient from the loss already: that of the tokens is added to it row by row, instead of
        as a second tensor of the vocabulary's size.
        """
        table = self.model.embed_tokens
        bare = is_bare(table, nn.Embedding) and is_bare(self.lm_head, nn.Linear)
        tied = bare and table.weight is self.lm_head.weight and not torch.compiler.is_compiling()
        if not (tied and torch.is_grad_enabled() and table.weight.requires_grad):
            embedded: Tensor = table(input_ids)
            return embedded
        return nn.functional.embedding(input_ids, table.weight, table.padding_idx, sparse=True)

    @staticmethod
    def create_masks_for_generate(*, attention_mask: Tensor | None, **_: Any) -> Tensor | None:
        """`generate` asks for the mask that a preallocated cache needs; ours is the same for every cache."""
        return attention_mask


def summed(losses: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The losses of all layers, added up by name."""
    total: dict[str, Tensor] = {}
    for layer in losses:
        for name, loss in layer.items():
            total[name] = total[name] + loss if name in total else loss
    return total


AutoConfig.register("varifocal", VarifocalConfig)
AutoModel.register(VarifocalConfig, VarifocalModel)
AutoModelForCausalLM.register(VarifocalConfig, VarifocalForCausalLM)
