"""The Qwen language model that carries a mechanism in each layer, at home in transformers.

Importing this registers it with transformers' AutoConfig, AutoModel and AutoModelForCausalLM.
"""

from varifocal.model.config import VarifocalConfig
from varifocal.model.modeling import VarifocalForCausalLM, VarifocalModel, VarifocalPreTrainedModel
from varifocal.model.outputs import VarifocalCausalLMOutput, VarifocalModelOutput

__all__ = [
    "VarifocalCausalLMOutput", "VarifocalConfig", "VarifocalForCausalLM", "VarifocalModel", "VarifocalModelOutput",
    "VarifocalPreTrainedModel",
]  # fmt: skip
