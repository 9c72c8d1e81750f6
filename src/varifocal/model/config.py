"""The config of the language model: Qwen3's own, and the mechanism of each layer."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

from varifocal.attention.mechanisms import HeadShape
from varifocal.attention.mechanisms.registry import config_from_options, options_from_config
from varifocal.model.auto_classes import AUTO_MAP, write_auto_classes
from varifocal.model.memory_layer import LAYER_TYPE
from varifocal.model.narrow import check_narrow

LARGEST = {
    "num_hidden_layers": 10_000, "hidden_size": 1 << 20, "intermediate_size": 1 << 24, "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16, "head_dim": 1 << 16, "vocab_size": 1 << 31, "max_position_embeddings": 1 << 40,
}  # fmt: skip
"""Sizes that no model will have; beyond them a config is a mistake or an attack, and would fill the memory."""


class LayerMechanism(NamedTuple):
    """What one layer attends with."""

    name: str
    """The stem of the mechanism."""
    options: dict[str, Any]
    """All of its options, ready for make_mechanism and for JSON."""


@strict
class VarifocalConfig(Qwen3Config):
    """Qwen3's config with a mechanism in every layer.

    `mechanism` names one for all layers, or one for each. `mechanism_options` are the options of that one; for a list
    of mechanisms they are a list of the same length, or a dict from mechanism to options. Options that are not given
    are filled in, so that a saved model does not change when a default does.
    """

    model_type = "varifocal"
    # Qwen3's plans cut heads and feed-forward units; a mechanism's own parameters belong to all heads at once, and our
    # layers take other arguments.
    base_model_tp_plan = None
    base_model_pp_plan = None
    keys_to_ignore_at_inference = ["past_key_values", "cross_entropy", "auxiliary_losses", "records"]  # noqa: RUF012

    mechanism: str | list[str] = "dense"
    mechanism_options: dict[str, Any] | list[dict[str, Any]] | None = None
    qk_norm: bool = True
    """RMS norms of queries and keys, as in Qwen3; Qwen2 and Llama have none."""
    qkv_bias: bool = False
    """Biases of the query, key and value projections, as in Qwen2. `attention_bias` adds the output's to them."""

    output_gate: int = 0
    """Dimensions of a layer's input that a gate on each head's output reads; 0 for no such gate."""
    remove_own_value: bool = False
    """Whether each head learns a share of the token's own value that is taken from its output."""

    weights: dict[str, Any] | None = None
    """How the weights of all products are held, as {"kind": "int8", "group": 32}; None for plain numbers."""

    def __post_init__(self, **kwargs: Any) -> None:
        check_sizes(vars(self))
        super().__post_init__(**kwargs)
        check_heads(self)
        check_narrow(self.weights, self.row_lengths())
        self.mechanism_options = complete_options(self.mechanism, self.mechanism_options, self.num_hidden_layers)
        # What a layer remembers is its mechanism's to say; transformers' caches make this kind of layer for it.
        self.layer_types = [LAYER_TYPE] * self.num_hidden_layers
        self.sliding_window = None
        # Never what a file says: it names code.
        self.auto_map = dict(AUTO_MAP)

    def validate_layer_type(self) -> None:
        """transformers checks its own kinds of layers here; ours are all of one kind, which it does not list."""

    def to_dict(self) -> dict[str, Any]:
        """What is saved, without `layer_types`: they follow from the class, and transformers' Trainer, which reads the
        file as a config of no class, knows its own kinds alone."""
        return {name: value for name, value in super().to_dict().items() if name != "layer_types"}

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json, and beside it the file by which transformers' auto classes find ours."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        write_auto_classes(save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """transformers would copy the source of a class that it found by `auto_map` into every model saved later."""

    def layer_mechanism(self, layer: int) -> LayerMechanism:
        """The mechanism of a layer. Where layers share their options, each may draw at random by itself."""
        name = self.mechanism if isinstance(self.mechanism, str) else self.mechanism[layer]
        options = self.mechanism_options
        if isinstance(options, Sequence):
            return LayerMechanism(name, dict(options[layer]))
        assert options is not None
        shared = options if isinstance(self.mechanism, str) else options[name]
        return LayerMechanism(name, options_from_config(config_from_options(name, shared).in_layer(layer)))

    def row_lengths(self) -> dict[str, int]:
        """The lengths of the rows of all products' weights, by their names."""
        attended = self.num_attention_heads * self.head_dim
        return {
            "hidden_size": self.hidden_size,
            "width of all heads": attended,
            "intermediate_size": self.intermediate_size,
        }

    def head_shape(self) -> HeadShape:
        """C, H, G and D of every layer."""
        return HeadShape(
            model_width=self.hidden_size,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_width=self.head_dim,
        )


def check_sizes(values: Mapping[str, Any]) -> None:
    """ValueError if the sizes of a model are beyond all measure; what is not a number is for others to refuse."""
    for name, most in LARGEST.items():
        value = values.get(name)
        if isinstance(value, int) and not 1 <= value <= most:
            raise ValueError(f"{name} must be between 1 and {most}, got {reprlib.repr(value)}")


def check_heads(config: VarifocalConfig) -> None:
    """ValueError unless the layers' sizes are those of an attention."""
    pad = config.pad_token_id
    if pad is not None and not -config.vocab_size <= pad < config.vocab_size:
        raise ValueError(f"pad_token_id must be below the vocab_size {config.vocab_size}, got {reprlib.repr(pad)}")
    gate = config.output_gate
    if not isinstance(gate, int) or isinstance(gate, bool) or not 0 <= gate <= config.hidden_size:
        raise ValueError(f"output_gate must be between 0 and the hidden_size {config.hidden_size}, got {gate!r}")
    for name in ("qk_norm", "qkv_bias", "remove_own_value"):
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name} must be True or False, got {getattr(config, name)!r}")
    if config.attention_dropout:
        raise ValueError(f"attention_dropout must be 0, got {config.attention_dropout}; no kernel here drops pairs")
    config.head_shape()


def complete_options(mechanism: str | list[str], options: Any, layers: int) -> dict[str, Any] | list[dict[str, Any]]:
    """The options of VarifocalConfig with every default written out, or a ValueError that says what is wrong."""
    if isinstance(mechanism, str):
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(
                f"mechanism_options of the one mechanism {mechanism!r} must be a dict of its options, got {options!r}"
            )
        return complete(mechanism, options or {})
    if not isinstance(mechanism, Sequence) or not all(isinstance(name, str) for name in mechanism):
        raise ValueError(f"mechanism must be a name, or a list with a name for each layer, got {mechanism!r}")
    if len(mechanism) != layers:
        raise ValueError(f"mechanism must list a name for each of the {layers} layers, got {len(mechanism)}")
    if isinstance(options, Sequence) and not isinstance(options, str):
        if len(options) != layers:
            raise ValueError(f"mechanism_options must list a dict for each of the {layers} layers, got {len(options)}")
        return [complete(name, one) for name, one in zip(mechanism, options, strict=True)]
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise ValueError(
            "mechanism_options must be a list with a dict for each layer, or a dict from mechanism to its options, "
            f"got {options!r}"
        )
    for name in options:
        if name not in mechanism:
            present = ", ".join(dict.fromkeys(mechanism))
            raise ValueError(f"mechanism_options names {name!r}, which no layer has; the layers have {present}")
    return {name: complete(name, options.get(name, {})) for name in dict.fromkeys(mechanism)}


def complete(name: str, options: Any) -> dict[str, Any]:
    """The options of one mechanism with its defaults written out."""
    if not isinstance(options, Mapping):
        raise ValueError(f"the options of mechanism {name!r} must be a dict, got {options!r}")
    return options_from_config(config_from_options(name, options))
