"""What a step is said to cost is what torch counts while one runs."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from varifocal.kernels.native import library
from varifocal.model import VarifocalConfig, VarifocalForCausalLM, preset
from varifocal.plan.cost import layer_mechanisms
from varifocal.plan.hardware import Precision
from varifocal.plan.step_cost import (
    MicroBatch,
    kept_by_mechanism,
    kept_numbers,
    memory_by_part,
    step_work,
)

LENGTH = 128
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
}
CHOICES = [
    ("dense", {}),
    ("local", {}),
    ("combiner", {}),
    ("dynamic_sparse", {}),
    ("context_adaptive", {}),
    ("context_adaptive", {"select": "blocks"}),
    ("head_gated", {}),
    ("sparse_geometric", {}),
]
native_only = pytest.mark.skipif(library.why_missing() is not None, reason="the native library is not built")


def model_config(mechanism: str = "dense", options: dict[str, Any] | None = None, **changes: Any) -> VarifocalConfig:
    return preset("tiny", mechanism=mechanism, mechanism_options=options or {}, **(SIZES | changes))


def part(length: int = LENGTH, *, precision: Precision = "float32", **changes: Any) -> MicroBatch:
    return MicroBatch(rows=1, length=length, precision=precision, **changes)


class Kept:
    """A tensor that autograd holds."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_bytes(config: VarifocalConfig) -> int:
    """Bytes of all tensors, parameters apart, that autograd keeps between a forward and a backward pass."""
    torch.manual_seed(0)
    model = VarifocalForCausalLM(config).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    ids = torch.randint(0, config.vocab_size, (1, LENGTH))
    # Graphs that were made and used up within the forward pass have let go of theirs.
    kept: weakref.WeakSet[Kept] = weakref.WeakSet()

    def keep(tensor: Tensor) -> Kept:
        one = Kept(tensor)
        kept.add(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one.tensor):
        output = model(ids, labels=ids, use_cache=False)
    storages = {one.tensor.untyped_storage().data_ptr(): one.tensor.untyped_storage().nbytes() for one in kept}
    del output
    return sum(size for place, size in storages.items() if place not in weights)


@native_only
@pytest.mark.parametrize(("mechanism", "options"), CHOICES)
def test_layer_keeps_as_many_bytes_as_predicted(mechanism: str, options: dict[str, Any]) -> None:
    one, two = (model_config(mechanism, options, num_hidden_layers=layers) for layers in (1, 2))
    said = kept_numbers(two, part()) - kept_numbers(one, part())
    said += kept_by_mechanism(layer_mechanisms(one)[0], part())
    assert (kept_bytes(two) - kept_bytes(one)) / LENGTH == pytest.approx(said, rel=0.05)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_products_are_those_that_torch_counts(checkpointing: bool) -> None:
    config = model_config()
    model = VarifocalForCausalLM(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.randint(0, config.vocab_size, (1, LENGTH))
    counter = FlopCounterMode(display=False)
    with counter:
        model(ids, labels=ids, use_cache=False).loss.backward()
    work = step_work(config, part(checkpointing=checkpointing))
    # Rotary angles are a product of a few numbers, and a layer that is computed again is not computed to its very end.
    assert counter.get_total_flops() == pytest.approx(work.products + work.head, rel=0.02)


COUNT = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tests.plan.test_step_cost import LENGTH, model_config
from varifocal.model import VarifocalForCausalLM

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
VIEWS = {"view", "t", "transpose", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "squeeze", "detach",
         "alias", "split", "permute", "as_strided", "split_with_sizes", "unbind"}

class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.moved, self.calls, self.wide = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor)]
        if name in VIEWS:
            return result
        self.calls += 1
        if name in PRODUCTS and any(one.shape[-1:] == (997,) for one in tensors):
            self.wide |= {str(one.dtype) for one in tensors}
        if name not in PRODUCTS and space != "varifocal":
            self.moved += sum(one.numel() * one.element_size() for one in tensors)
        return result

def count(**sizes):
    model = VarifocalForCausalLM(model_config(**sizes)).train()
    ids = torch.randint(0, 64, (1, LENGTH))
    counted = Count()
    with counted:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
    return counted

for sizes in ({}, {"hidden_size": 128}, {"head_dim": 32}, {"intermediate_size": 192}):
    one, two = count(num_hidden_layers=1, **sizes), count(num_hidden_layers=2, **sizes)
    print(two.moved - one.moved, two.calls - one.calls)
print(*count(vocab_size=997).wide)
"""


def test_bytes_and_operators_between_products_are_those_that_torch_counts() -> None:
    """In a process of its own: without AMX, which the machine may announce and not run."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", COUNT], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, types = done.stdout.splitlines()
    changes: list[dict[str, Any]] = [{}, {"hidden_size": 128}, {"head_dim": 32}, {"intermediate_size": 192}]
    for line, change in zip(lines, changes, strict=True):
        moved, calls = map(int, line.split())
        one, two = (
            step_work(model_config(num_hidden_layers=layers, **change), part(precision="bfloat16")) for layers in (1, 2)
        )
        assert moved == pytest.approx(two.traffic - one.traffic, rel=0.1), change
        assert calls == pytest.approx(two.calls - one.calls, rel=0.1), change
    # The products inside of the loss are as narrow as autocast's.
    assert types == "torch.bfloat16"


def test_checkpointing_keeps_less_and_computes_more() -> None:
    config = preset("qwen-134m")
    plain, again = (part(2048, precision="bfloat16", checkpointing=one) for one in (False, True))
    memory = [memory_by_part(config, one, parameters=134_430_208)["activations"] for one in (plain, again)]
    assert memory[1] < 0.4 * memory[0]
    assert step_work(config, again).flops > 1.05 * step_work(config, plain).flops


def test_accumulation_keeps_all_gradients_while_a_pass_runs() -> None:
    config = preset("qwen-134m")
    once, twice = (
        memory_by_part(config, part(2048), parameters=134_430_208, accumulated=count)["gradients"] for count in (1, 2)
    )
    assert once == 4 * 151_936 * 512
    assert twice == 4 * 134_430_208


@pytest.mark.parametrize("mechanism", ["context_adaptive", "head_gated", "sparse_geometric"])
def test_scores_that_are_written_out_take_the_square_of_the_text(mechanism: str) -> None:
    config = model_config(mechanism)
    written = [
        length * kept_by_mechanism(layer_mechanisms(config)[0], part(length, execution="written out"))
        for length in (512, 1024)
    ]
    assert written[1] == pytest.approx(4 * written[0])
