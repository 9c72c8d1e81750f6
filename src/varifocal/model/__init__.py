"""The Qwen language model that carries a mechanism in each layer, at home in transformers.

Importing this registers it with transformers' AutoConfig, AutoModel, AutoModelForCausalLM and those of the other heads.
"""

from varifocal.model.checkpoints import load_model
from varifocal.model.config import VarifocalConfig
from varifocal.model.heads import (
    VarifocalForQuestionAnswering,
    VarifocalForSequenceClassification,
    VarifocalForTokenClassification,
)
from varifocal.model.modeling import VarifocalForCausalLM, VarifocalModel, VarifocalPreTrainedModel
from varifocal.model.outputs import VarifocalCausalLMOutput, VarifocalModelOutput
from varifocal.model.presets import PRESETS, preset

__all__ = [
    "PRESETS", "VarifocalCausalLMOutput", "VarifocalConfig", "VarifocalForCausalLM", "VarifocalForQuestionAnswering",
    "VarifocalForSequenceClassification", "VarifocalForTokenClassification", "VarifocalModel", "VarifocalModelOutput",
    "VarifocalPreTrainedModel", "load_model", "preset",
]  # fmt: skip
