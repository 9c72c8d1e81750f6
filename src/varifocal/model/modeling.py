"""The Qwen language model that carries a mechanism in each layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.utils import can_return_tuple, logging

from varifocal.attention.mechanisms import Mechanism, MechanismOutput
from varifocal.equations.layout import Layout
from varifocal.kernels.steps.cross_entropy import integer_labels
from varifocal.model.arrangement import Arrangement
from varifocal.model.attention import VarifocalAttention
from varifocal.model.bare import is_bare
from varifocal.model.config import VarifocalConfig
from varifocal.model.decoding import find_decoder
from varifocal.model.head import head_cross_entropy, kept_tokens, logits_of
from varifocal.model.head_outputs import HeadOutputs
from varifocal.model.late_logits import LateLogits
from varifocal.model.layout import documents_of_labels, lay_out_text
from varifocal.model.loss import IGNORED, next_token_labels
from varifocal.model.memory_layer import can_be_compiled, insert_padding, keep_all_tokens, note_padding, standing_of
from varifocal.model.narrow import Narrow, NarrowEmbedding, narrow_linear
from varifocal.model.outputs import VarifocalCausalLMOutput, VarifocalModelOutput
from varifocal.model.steps import fed_forward, normed

logger = logging.get_logger(__name__)


class VarifocalDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm x), then + SwiGLU(norm of that): Qwen3's layer around our attention."""

    def __init__(self, config: VarifocalConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = VarifocalAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        layout: Layout,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, MechanismOutput, Tensor | None]:
        """The layer's output [B, T, C], what its mechanism said, and the weights [B, H, T, S] if they are wanted."""
        attended, weights = self.self_attn(
            normed(self.input_layernorm, hidden), rotary, layout, past_key_values, output_attentions=output_attentions
        )
        hidden = hidden + attended.output
        return hidden + fed_forward(self.mlp, normed(self.post_attention_layernorm, hidden)), attended, weights


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
    _can_compile_fullgraph = True

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # Of custom code, transformers passes over modules without parameters of their own: mechanisms would keep the
        # weights that it gave to their parts.
        super()._initialize_weights(module, is_custom_code=False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """transformers' own start for what is Qwen's, the mechanisms' own for theirs; loaded values stay."""
        if isinstance(module, HeadOutputs):
            module.reset_parameters()
            return
        if not isinstance(module, Mechanism):
            super()._init_weights(module)
            return
        values = (*module.parameters(), *module.buffers())
        # A mechanism initializes all of its parameters at once; those from a checkpoint are put back afterwards.
        loaded = [(value, value.clone()) for value in values if getattr(value, "_is_hf_initialized", False)]
        module.reset_parameters()
        for value, kept in loaded:
            value.copy_(kept)

    def tie_weights(self, *given: Any, **options: Any) -> None:
        """As in transformers, which loads everything as what can be trained: int8 weights are not."""
        super().tie_weights(*given, **options)
        for module in self.modules():
            if isinstance(module, Narrow):
                module.requires_grad_(False)

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
        if config.weights is not None:
            self.hold_narrow(config.weights["group"])
        self.gradient_checkpointing = False
        self.post_init()

    def hold_narrow(self, group: int) -> None:
        """Take empty modules of int8 weights in place of the embedding and of every product of the layers."""
        rows, columns = self.embed_tokens.weight.shape
        self.embed_tokens = NarrowEmbedding(rows, columns, group)  # type: ignore[assignment]
        layer: Any
        for layer in self.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, module in list(part.named_children()):
                    if type(module) is nn.Linear:
                        setattr(part, name, narrow_linear(module, group))

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
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        output_hidden_states: bool | Collection[int] | None = None,
        output_attentions: bool | None = None,
        output_records: bool = False,
    ) -> VarifocalModelOutput:
        """Hidden states [B, T, C] of tokens.

        Args:
            input_ids: [B, T].
            attention_mask: [B, S], 1 for text and 0 for padding, for the cached tokens too; or [B, 1, T, S] where that
                separates documents and padding and says no more.
            position_ids: [B, T], rotary positions; by default each token's place in its document. Without a mask,
                documents or a cache, positions that start anew separate packed documents.
            past_key_values: a cache that holds S - T tokens and takes the T new ones.
            inputs_embeds: [B, T, C] in place of input_ids.
            use_cache: whether to return a cache; by default the config's use_cache, and never while training or for
                packed documents that this call alone knows.
            documents: integers [B, S], the document of each token, for the cached tokens too; negative for padding.
            cu_seq_lens_q, cu_seq_lens_k: integers [N + 1], the same for N documents that follow each other in one row:
                where each begins, and where the last one ends.
            max_length_q, max_length_k, seq_idx: follow from these, and are not read.
            output_hidden_states: whether to return every layer's input and the last output, or the numbers of the
                layers whose outputs to return; by default as the config says.
            output_attentions: whether to return each layer's weights [B, H, T, S], detached; by default as the config
                says. No layer needs them: they cost S / D times the attention.
            output_records: whether to return what the mechanisms decided.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, not both or neither")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self.wanted_cache(past_key_values, use_cache)
        layout, rotary_positions, arrangement, packed = lay_out_text(
            *hidden.shape[:2],
            standing=standing_of(cache),
            attention_mask=attention_mask,
            position_ids=position_ids,
            documents=documents,
            lengths=(cu_seq_lens_q, cu_seq_lens_k),
            device=hidden.device,
        )
        if cache is not None and packed:
            if use_cache or past_key_values is not None:
                raise ValueError(
                    "position_ids that start anew, and cu_seq_lens_q, separate packed documents, which a cache cannot "
                    "remember; pass use_cache=False, or documents [B, S] in every call"
                )
            cache = None
        wants_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        wants_weights = bool(self.config.output_attentions if output_attentions is None else output_attentions)
        if wants_weights:
            warn_of_weights(layout.keys, self.config.head_dim)
        if arrangement is not None:
            if cache is not None and arrangement.texts is not None:
                insert_padding(cache, hidden.shape[1] - arrangement.texts.shape[1])
            hidden = arrangement.arrange(hidden)
        rotary = self.rotary_emb(hidden, rotary_positions)
        wants_more = wants_hidden or wants_weights or output_records or arrangement is not None
        decoder = None if wants_more else find_decoder(self, hidden, cache)
        if decoder is not None and cache is not None:
            hidden = normed(self.norm, decoder.decode(hidden, rotary, layout, cache))
            return VarifocalModelOutput(last_hidden_state=hidden, past_key_values=cache, auxiliary_losses={})
        every_hidden: list[Tensor] = []
        losses: list[dict[str, Tensor]] = []
        records: list[dict[str, Tensor]] = []
        every_weights: list[Tensor] = []
        for layer in self.layers:
            every_hidden.append(hidden) if wants_hidden else None
            hidden, attended, weights = layer(
                hidden, rotary, layout, past_key_values=cache, output_attentions=wants_weights
            )
            losses.append(attended.losses)
            records.append(attended.records) if output_records else None
            every_weights.append(weights) if weights is not None else None
        hidden = normed(self.norm, hidden)
        if arrangement is not None:
            hidden, *every_hidden = (arrangement.restore(one, dim=1) for one in (hidden, *every_hidden))
            records = [restored_records(one, arrangement) for one in records]
            every_weights = [arrangement.restore_keys(arrangement.restore(one, dim=2)) for one in every_weights]
            if cache is not None and arrangement.padding is not None:
                note_padding(cache, arrangement.padding)
        room = 0 if cache is None else cache.get_max_length()
        # As in transformers, all places of a static cache count as keys.
        every_weights = [nn.functional.pad(one, (0, max(0, room - one.shape[3]))) for one in every_weights]
        return VarifocalModelOutput(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=wanted_states((*every_hidden, hidden), wants_hidden),
            attentions=tuple(every_weights) if wants_weights else None,
            auxiliary_losses=summed(losses),
            records=tuple(records) if output_records else None,
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
        if config.weights is not None:
            self.lm_head = narrow_linear(self.lm_head, config.weights["group"])  # type: ignore[assignment]
            self._tied_weights_keys = {**self._tied_weights_keys, "lm_head.scales": "model.embed_tokens.scales"}
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
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        output_hidden_states: bool | Collection[int] | None = None,
        output_attentions: bool | None = None,
        output_records: bool = False,
        # Not by name: Trainer takes every argument whose name holds "label" for one that each batch must bring.
        **shifted: Tensor | None,
    ) -> VarifocalCausalLMOutput:
        """Logits of the next token, and its loss.

        Args:
            labels: integers [B, T], the tokens themselves (they are shifted here), -100 where none is to be predicted.
                The first token of a document is never predicted from the one before it. With labels the logits are
                computed when they are read: all logits of a long text are larger than the model.
            logits_to_keep: the last so many tokens, 0 for all, or a tensor of positions; these are computed at once.
                None for all.
            num_items_in_batch: labels of all micro-batches whose gradients are accumulated; the loss is then this
                call's share of the mean over all of them. None for the mean over this call.
            shifted: `shift_labels` alone, integers [B, T]: what each token predicts, in place of labels. Nothing is
                shifted here, and documents are not looked at.

        The others are those of VarifocalModel.
        """
        shift_labels = shifted.pop("shift_labels", None)
        if shifted:
            raise TypeError(f"{type(self).__name__}.forward() got an unexpected keyword argument {min(shifted)!r}")
        with_loss = labels is not None or shift_labels is not None
        # A loss needs no cache, and memory is scarcest where one is computed.
        if use_cache is None and with_loss and past_key_values is None:
            use_cache = False
        if with_loss and input_ids is not None:
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
            cu_seq_lens_q=cu_seq_lens_q,
            cu_seq_lens_k=cu_seq_lens_k,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            output_records=output_records,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        auxiliary = outputs.auxiliary_losses or {}
        logits: Tensor | LateLogits
        if with_loss and logits_to_keep is None:
            logits = LateLogits(self.lm_head, hidden, training=self.training)
        else:
            logits = logits_of(self.lm_head, kept_tokens(hidden, logits_to_keep or 0))
        loss = cross_entropy = None
        if with_loss:
            if shift_labels is not None:
                following = checked_labels(shift_labels, hidden, name="shift_labels").flatten()
            else:
                assert labels is not None
                labels = checked_labels(labels, hidden, name="labels")
                labelled = documents_of_labels(
                    labels,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    documents=documents,
                    lengths=(cu_seq_lens_q, cu_seq_lens_k),
                )
                following = next_token_labels(labels, labelled).flatten()
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
            attentions=outputs.attentions,
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
    def create_masks_for_generate(
        *, attention_mask: Tensor | None, past_key_values: Cache | None = None, **_: Any
    ) -> Tensor | None:
        """`generate` asks for the mask that a preallocated cache needs: ours, for all tokens that it has room for."""
        if attention_mask is None or past_key_values is None:
            return attention_mask
        # Compiled code wants one shape in every step; what comes after a query is not read.
        missing = past_key_values.get_max_length() - attention_mask.shape[1]
        return nn.functional.pad(attention_mask, (0, max(0, missing)), value=1)

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        # What a mechanism remembers besides keys and values grows in ways that would be compiled anew for every token.
        every = all(can_be_compiled(one) for one in self.modules() if isinstance(one, Mechanism))
        if not (every and super()._valid_auto_compile_criteria(model_kwargs, generation_config)):
            return False
        return keep_all_tokens(model_kwargs["past_key_values"])


def summed(losses: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The losses of all layers, added up by name."""
    total: dict[str, Tensor] = {}
    for layer in losses:
        for name, loss in layer.items():
            total[name] = total[name] + loss if name in total else loss
    return total


def checked_labels(labels: Tensor, hidden: Tensor, *, name: str) -> Tensor:
    """Labels as int64 [B, T] where the hidden states [B, T, C] are; ValueError if they are of another shape or kind."""
    if labels.shape != hidden.shape[:2]:
        raise ValueError(f"{name} must be [B, T] = {tuple(hidden.shape[:2])}, got shape {tuple(labels.shape)}")
    return integer_labels(labels.to(hidden.device))


def wanted_states(states: tuple[Tensor, ...], wanted: bool | Collection[int]) -> tuple[Tensor | None, ...] | None:
    """Every layer's input and the last output, or the outputs of the layers whose numbers are given, or nothing."""
    if isinstance(wanted, Collection):
        return tuple(state if layer in wanted else None for layer, state in enumerate(states[1:]))
    return states if wanted else None


def restored_records(records: dict[str, Tensor], arrangement: Arrangement) -> dict[str, Tensor]:
    """A layer's records [B, T] or [B, H, T, *] with the tokens where they were given."""
    found = {name: arrangement.restore(one, dim=1 if one.ndim == 2 else 2) for name, one in records.items()}
    if "selected" in found:
        found["selected"] = arrangement.restore_indices(found["selected"])
    return found


def warn_of_weights(keys: int, width: int) -> None:
    """Say once what a matrix of attention weights costs."""
    logger.warning_once(
        "output_attentions=True: no layer needs its attention weights, so they are computed besides, by attending once "
        f"more for every {width} keys ({-(-keys // width)} times for {keys}); they carry no gradient, and "
        "output_records=True gives gates, widths and selected keys at no cost"
    )


AutoConfig.register("varifocal", VarifocalConfig)
AutoModel.register(VarifocalConfig, VarifocalModel)
AutoModelForCausalLM.register(VarifocalConfig, VarifocalForCausalLM)
