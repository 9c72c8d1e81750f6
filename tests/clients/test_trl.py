"""TRL: supervised fine-tuning of packed texts, and preferences with a reference model."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.texts import saved, text_model, text_tokenizer

TEXTS = ["the bees are many", "few are the days", "blue", "many words make a long sentence here", "a b c", "one two"]


def settings(folder: Path) -> dict[str, Any]:
    """What all trainings here share."""
    return {
        "output_dir": str(folder / "out"), "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no",
        "gradient_checkpointing": False, "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "seed": 1,
        "per_device_train_batch_size": 2, "disable_tqdm": True,
    }  # fmt: skip


@pytest.mark.client("trl", "datasets")
@pytest.mark.parametrize("variant", ["head_gated", "context_adaptive", "combiner"])
def test_packed_texts_do_not_see_each_other(variant: str, tmp_path: Path) -> None:
    """`SFTTrainer` with packing (padding-free): its loss is that of the texts one by one, and training lowers it"""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**settings(tmp_path), packing=True, max_length=64, dataset_num_proc=None)
    trainer = SFTTrainer(
        model=text_model(variant),
        args=config,
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=text_tokenizer(tmp_path),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"} <= set(batch)
    assert (batch["position_ids"] == 0).sum() > len(batch["position_ids"])
    before = {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    with torch.no_grad():
        packed = trainer.compute_loss(trainer.model, dict(batch))
        starts = [*(before["position_ids"][0] == 0).nonzero().flatten().tolist(), before["input_ids"].shape[1]]
        total, count = 0.0, 0
        for begin, end in itertools.pairwise(starts):
            alone = before["input_ids"][:, begin:end]
            if end - begin > 1:
                total += float(text_loss(trainer.model, alone)) * (end - begin - 1)
                count += end - begin - 1
    assert float(packed) == pytest.approx(total / count, rel=1e-4)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def text_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


PREFERENCES = {
    "prompt": ["the bees are", "the days are", "a b"] * 2,
    "chosen": [" many", " few", " c"] * 2,
    "rejected": [" blue", " red", " x"] * 2,
}

DPO = """
import sys
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer
folder, options, preferences = sys.argv[1], eval(sys.argv[2]), eval(sys.argv[3])
trainer = DPOTrainer(
    model=folder,
    args=DPOConfig(**options, model_init_kwargs={"trust_remote_code": True}, max_length=64),
    train_dataset=Dataset.from_dict(preferences),
    processing_class=AutoTokenizer.from_pretrained(folder),
)
trainer.train()
print(type(trainer.model).__name__, type(trainer.ref_model).__name__)
print(*(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
"""


@pytest.mark.client("trl", "datasets")
def test_preferences_are_learned_against_a_reference_by_path(tmp_path: Path) -> None:
    """`DPOTrainer` of a saved folder in a process that never imports varifocal: model and reference by `auto_map`"""
    folder = saved(tmp_path / "model", "head_gated")
    home = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    given = [str(folder), repr(settings(tmp_path)), repr(PREFERENCES)]
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", DPO, *given], env=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, kinds, losses = done.stdout.splitlines()
    assert set(kinds.split()) <= {"VarifocalForCausalLM", "NoneType"}
    first, *_, last = (float(loss) for loss in losses.split())
    assert first == pytest.approx(0.6931, abs=1e-3)
    assert last < first


@pytest.mark.client("trl", "datasets", "peft")
def test_preferences_are_learned_by_adapters(tmp_path: Path) -> None:
    """`DPOTrainer` with LoRA on `all-linear`: the reference is the model without its adapters"""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        model=text_model("context_adaptive"),
        args=DPOConfig(**settings(tmp_path), max_length=64),
        train_dataset=Dataset.from_dict(PREFERENCES),
        processing_class=text_tokenizer(tmp_path),
        peft_config=LoraConfig(r=2, target_modules="all-linear"),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < losses[0]
