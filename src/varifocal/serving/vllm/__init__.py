"""vLLM's plugin: a model saved by us is served by `vllm serve FOLDER` and `vllm.LLM(FOLDER)`.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`.
"""

from __future__ import annotations

ARCHITECTURE = "VarifocalForCausalLM"
"""The name of the model's class in config.json."""


def register() -> None:
    """Make our models known to vLLM."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from varifocal.serving.vllm.config import ServedConfig
    from varifocal.serving.vllm.window_cache import register_windows

    AutoConfig.register(ServedConfig.model_type, ServedConfig, exist_ok=True)
    register_windows()
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "varifocal.serving.vllm.modeling:VarifocalForCausalLM")
