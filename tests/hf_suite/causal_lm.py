"""transformers' own CausalLMModelTest for our models, run from a checkout of its repository by `make hf-suite`.

None of its text is here: the tests, and the tester that makes their small models, are imported from the checkout.
"""

from __future__ import annotations

import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any
from unittest.mock import patch

CHECKOUT = Path(os.environ.get("TRANSFORMERS", "")).absolute()
if not (CHECKOUT / "tests" / "causal_lm_tester.py").is_file():
    raise ValueError(f"TRANSFORMERS must name a checkout of huggingface/transformers with its tests, got {CHECKOUT}")

# The tests of pipelines fetch models by name from the Hub. Without them the import needs fewer packages, and it does
# not load the checkout's own transformers beside the installed one.
without_pipelines: Any = types.ModuleType("tests.test_pipeline_mixin")
without_pipelines.PipelineTesterMixin = type("PipelineTesterMixin", (), {})
sys.modules["tests.test_pipeline_mixin"] = without_pipelines
sys.path.insert(0, str(CHECKOUT))

from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester  # type: ignore[import-not-found]  # noqa: E402
from transformers import Qwen3Model  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

from varifocal import model  # noqa: E402

# Their tests look here to know which labels a class takes.
for kind, name in {
    "MODEL": "VarifocalModel",
    "MODEL_FOR_CAUSAL_LM": "VarifocalForCausalLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": "VarifocalForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION": "VarifocalForTokenClassification",
    "MODEL_FOR_QUESTION_ANSWERING": "VarifocalForQuestionAnswering",
}.items():
    getattr(modeling_auto, f"{kind}_MAPPING_NAMES")["varifocal"] = name

MECHANISMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "head_gated": {"window": 3},
    "context_adaptive": {"window_min": 2, "window_max": 5, "edge": 2, "gate": {"hidden": 3}},
    "local": {"window": 3, "sinks": 1},
    "focused": {"windows": (None, 3), "sinks": 1},
}
"""By mechanism, options for which the testers' 7 tokens are a long text."""

NOT_OURS: dict[str, str] = {
    "test_custom_4d_attention_mask": "texts that share a beginning in one row are no documents, one after the other",
    "test_retain_grad_hidden_states_attentions": "the weights are computed beside the output and carry no gradient",
    "test_training_gradient_checkpointing_use_reentrant_true": "refused, it would lose the auxiliary losses' gradients",
}
"""By name of a test: why it does not apply to these models."""

ASKED_FOR_MORE = (
    "test_eager_padding_matches_padding_free_with_position_ids",
    "test_sdpa_padding_matches_padding_free_with_position_ids",
)
"""Tests that run only where a model promises to take any attention function of transformers; they need less."""


def check_what_is_kept(test: Any, batch_size: int, past_key_values: Any, seq_length: int, config: Any) -> None:
    """Their check of a cache that keeps every token; of others, that windows keep what they need and no more."""
    if all(layer.memory.keeps_all for layer in past_key_values.layers):
        CausalLMModelTest._check_past_key_values_for_generate(test, batch_size, past_key_values, seq_length, config)
        return
    assert len(past_key_values.layers) == config.num_hidden_layers
    for layer in past_key_values.layers:
        memory = layer.memory
        assert memory.length <= seq_length
        assert layer.keys.shape == layer.values.shape
        assert layer.keys.shape[:2] == (batch_size, config.num_key_value_heads)
        for group, (keys, values) in memory.held_rows():
            assert keys.length == values.length
            if group.window is None:
                assert keys.length == memory.length
            else:
                assert keys.length >= min(memory.length, group.kept)
                assert memory.records_past or keys.length <= group.room


def small_models(mechanism: str) -> type:
    """What makes the small models of one mechanism."""
    sizes = {"mechanism": mechanism, "mechanism_options": MECHANISMS[mechanism]}
    classes = {
        "base_model_class": model.VarifocalModel,
        "config_class": model.VarifocalConfig,
        "causal_lm_class": model.VarifocalForCausalLM,
        "sequence_classification_class": model.VarifocalForSequenceClassification,
        "token_classification_class": model.VarifocalForTokenClassification,
        "question_answering_class": model.VarifocalForQuestionAnswering,
    }
    return type(f"{mechanism}_tester", (CausalLMModelTester,), classes | sizes)


def suite(mechanism: str) -> type:
    """Their tests for the models of one mechanism."""
    skipped = {name: unittest.skip(reason)(getattr(CausalLMModelTest, name)) for name, reason in NOT_OURS.items()}
    promised = patch.object(model.VarifocalForCausalLM, "_supports_attention_backend", True)
    asked = {name: promised(getattr(CausalLMModelTest, name)) for name in ASKED_FOR_MORE}
    own = {
        "model_tester_class": small_models(mechanism),
        "_check_past_key_values_for_generate": check_what_is_kept,
        "__module__": __name__,
    }
    return type(f"Test_{mechanism}", (CausalLMModelTest, unittest.TestCase), own | asked | skipped)


for each in MECHANISMS:
    globals()[f"Test_{each}"] = suite(each)

# Beside ours, transformers' own: what fails or is skipped for it too is not for us to mend.
qwen3_tester = type("qwen3_tester", (CausalLMModelTester,), {"base_model_class": Qwen3Model})
Test_qwen3 = type("Test_qwen3", (CausalLMModelTest, unittest.TestCase), {"model_tester_class": qwen3_tester})
