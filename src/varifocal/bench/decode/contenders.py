"""Who decodes: transformers' model of a checkpoint, ours with each mechanism on the same weights, and llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import (
    Cache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from varifocal.attention.mechanisms.registry import MECHANISMS
from varifocal.bench.decode.caches import cache_bytes, random_cache
from varifocal.bench.decode.llama import LlamaProcess
from varifocal.bench.decode.turn import Turn
from varifocal.bench.model.contenders import share_weights
from varifocal.model import VarifocalConfig, VarifocalForCausalLM, load_model
from varifocal.model.weights import weight_bytes, with_weights
from varifocal.retrofit.families import FAMILIES, SHARED, take_over
from varifocal.retrofit.opening import is_ours, model_source
from varifocal.retrofit.sources import open_source

BASELINE, COMPILED = "transformers", "transformers compiled"
LLAMA = {"llama.cpp float32": "F32", "llama.cpp Q8_0": "Q8_0"}
"""By name: the kind of its weights in GGUF."""
INT8 = " int8"
"""What the name of a model of ours ends with if it holds its weights so."""
USUAL = ("dense", "local", "head_gated", "focused")
"""The mechanisms that are timed unless others are asked for, where they are registered."""
AGREEMENT = 1e-4
"""How far our dense logits may be from transformers', as a share of the largest."""


class Contender(Protocol):
    """What decodes in turns with others."""

    name: str

    def prepare(self, *, texts: int, context: int, room: int, prompt: bool) -> float | None:
        """Begin after a context, read from a prompt or filled at random; the seconds to the prompt's first token."""
        ...

    def take_turn(self, tokens: int) -> Turn:
        """Decode so many tokens of each text."""
        ...

    def bytes_read(self) -> int | None:
        """What a step reads."""
        ...

    def forget(self) -> None:
        """Let the cache go."""
        ...


class ModelContender:
    """A model in this process."""

    def __init__(self, name: str, model: Any, *, compiled: bool = False) -> None:
        self.name, self.model, self.compiled = name, model, compiled
        self.call = torch.compile(model, dynamic=False) if compiled else model
        self.cache: Cache | None = None
        self.last = torch.zeros(1, 1, dtype=torch.int64)

    @torch.no_grad()
    def prepare(self, *, texts: int, context: int, room: int, prompt: bool) -> float | None:
        generator = torch.Generator().manual_seed(context)
        ids = torch.randint(0, self.model.config.vocab_size, (texts, context), generator=generator)
        self.last, seconds = ids[:, -1:], None
        if prompt and not self.compiled:
            begin = time.perf_counter()
            answer = self.model(ids, use_cache=True, logits_to_keep=1)
            self.last = answer.logits[:, -1].argmax(dim=-1, keepdim=True)
            seconds, self.cache = time.perf_counter() - begin, answer.past_key_values
        else:
            self.cache = random_cache(
                self.model, texts=texts, context=context, room=context + room if self.compiled else None
            )
        return seconds

    @torch.no_grad()
    def take_turn(self, tokens: int) -> Turn:
        begin, worked = time.perf_counter(), time.process_time()
        for _ in range(tokens):
            answer = self.call(self.last, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.last = answer.logits[:, -1].argmax(dim=-1, keepdim=True)
        return Turn(time.perf_counter() - begin, time.process_time() - worked)

    def bytes_read(self) -> int | None:
        return None if self.cache is None else weights_read(self.model) + cache_bytes(self.model, self.cache)

    def forget(self) -> None:
        self.cache = None


def weights_read(model: PreTrainedModel) -> int:
    """The bytes of the weights that a token reads: all of them, but of an embedding that is not the head's one row."""
    table: nn.Module = model.get_input_embeddings()
    head: nn.Module = model.get_output_embeddings()
    alone = table.weight.data_ptr() != head.weight.data_ptr()  # type: ignore[operator]
    return weight_bytes(model) - (weight_bytes(table) if alone else 0)


def mechanisms_of(names: Sequence[str]) -> list[str]:
    """The mechanisms that contenders of these names need; ValueError for an unknown name."""
    found = []
    for name in names:
        if name in (BASELINE, COMPILED, *LLAMA):
            continue
        stem = name.removesuffix(INT8)
        if stem not in MECHANISMS:
            raise ValueError(f"unknown contender {name!r}; known are {', '.join(contender_names())}")
        found.append(stem)
    return list(dict.fromkeys(found))


def contender_names() -> tuple[str, ...]:
    """All that can be asked for by name."""
    ours = [*MECHANISMS, *(f"{name}{INT8}" for name in MECHANISMS)]
    return (BASELINE, COMPILED, *LLAMA, *ours)


def usual_names() -> tuple[str, ...]:
    """Who is timed unless others are asked for."""
    usual = [name for name in USUAL if name in MECHANISMS]
    return (BASELINE, *usual, f"dense{INT8}")


def build(source: str | Path, names: Sequence[str], *, llama_python: str | None, folder: Path) -> list[Contender]:
    """The contenders, all on the same weights, after their logits were compared.

    Args:
        source: a folder of ours, one of transformers', or a .gguf file.
        names: who.
        llama_python: an interpreter with llama-cpp-python; None for this one.
        folder: for the files that llama.cpp reads.
    """
    place, own = model_source(source), None
    wanted = mechanisms_of(names)
    if is_ours(place):
        own = load_model(place, weights="float32")
        theirs = twin(own)
    else:
        theirs = open_source(place, FAMILIES, dtype=torch.float32)
    models: dict[str, Any] = {BASELINE: theirs}
    for name in wanted:
        trained = own is not None and own.config.mechanism == name
        models[name] = own if trained else take_over(theirs, mechanism=name)
    held = [ModelContender(name, model) for name, model in models.items()]
    share_weights(held)
    check_agreement(held)
    found: list[Contender] = []
    for name in names:
        if name in LLAMA:
            found.append(LlamaProcess(name, place, LLAMA[name], python=llama_python, folder=folder))
        elif name == COMPILED:
            found.append(ModelContender(name, theirs, compiled=True))
        elif name.endswith(INT8):
            found.append(ModelContender(name, with_weights(models[name.removesuffix(INT8)], "int8")))
        else:
            found.append(ModelContender(name, models[name]))
    return found


def twin(model: VarifocalForCausalLM) -> PreTrainedModel:
    """transformers' own model with the weights of one of ours, and dense attention."""
    config: VarifocalConfig = model.config
    shared = {name: getattr(config, name) for name in SHARED} | {"head_dim": config.head_dim}
    made: PreTrainedModel
    if config.qk_norm:
        made = Qwen3ForCausalLM(Qwen3Config(**shared, attention_bias=config.attention_bias))
    elif config.qkv_bias:
        made = Qwen2ForCausalLM(Qwen2Config(**shared))
    else:
        made = LlamaForCausalLM(LlamaConfig(**shared, attention_bias=config.attention_bias))
    state = {name: value for name, value in model.state_dict().items() if ".mechanism." not in name}
    made.load_state_dict(state)
    return made.float().eval()


@torch.no_grad()
def check_agreement(contenders: Sequence[ModelContender]) -> None:
    """RuntimeError unless our dense model gives transformers' logits, for a prompt and for a token after it."""
    by_name = {one.name: one.model for one in contenders}
    if "dense" not in by_name:
        return
    ids = torch.arange(17)[None] % by_name[BASELINE].config.vocab_size

    def logits(model: Any) -> Tensor:
        answer = model(ids[:, :-1], use_cache=True)
        after = model(ids[:, -1:], past_key_values=answer.past_key_values, use_cache=True)
        return torch.cat([answer.logits, after.logits], dim=1)

    expected, found = (logits(by_name[name]) for name in (BASELINE, "dense"))
    off = float((expected - found).abs().max() / expected.abs().max())
    if off > AGREEMENT:
        raise RuntimeError(f"dense is not timed: its logits are off transformers' by {off:.1e} of the largest")
