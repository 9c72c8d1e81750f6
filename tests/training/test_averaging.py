"""The mean of the weights over the last part of a run: what it is, that it is saved, and that a checkpoint keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.training.runs import small_config
from varifocal.data import PreparedData
from varifocal.results.metrics import read_metrics
from varifocal.training.averaging import WeightAverage
from varifocal.training.config import OptimizationSection, TrainingConfig, ValidationSection
from varifocal.training.interruption import StoppedError
from varifocal.training.run import train
from varifocal.training.trainer import Progress


def averaged_config(data: PreparedData) -> TrainingConfig:
    return small_config(data, "head_gated", optimization={"average_share": 0.5})


def test_mean_is_that_of_the_added_weights(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    average, seen = WeightAverage(model), []
    for number in range(4):
        if number == 2:
            average.save(tmp_path)
            average = WeightAverage(model)
            average.load(tmp_path)
        nn.init.normal_(model.weight)
        seen.append(model.weight.detach().clone())
        average.add()
    average.install()
    torch.testing.assert_close(model.weight.detach(), torch.stack(seen).mean(0))


def test_saved_model_is_the_mean_of_the_last_steps(probe: PreparedData, tmp_path: Path) -> None:
    config = averaged_config(probe)
    kept = replace(config, checkpoints=replace(config.checkpoints, every=1, keep=8))
    summary = train(kept, tmp_path / "mean")
    plain = train(replace(kept, optimization=replace(kept.optimization, average_share=0.0)), tmp_path / "plain")
    steps = [load_file(tmp_path / "plain" / "checkpoints" / f"step-{step}" / "model.safetensors") for step in (5, 6, 7)]
    steps.append(load_file(tmp_path / "plain" / "model" / "model.safetensors"))
    saved = load_file(tmp_path / "mean" / "model" / "model.safetensors")
    for name, weight in saved.items():
        torch.testing.assert_close(weight, torch.stack([step[name] for step in steps]).mean(0))
    assert summary.unaveraged_loss == plain.validation_loss
    assert summary.validation_loss != plain.validation_loss
    assert plain.unaveraged_loss is None


def test_interrupted_run_goes_on_with_its_mean(probe: PreparedData, tmp_path: Path) -> None:
    config = averaged_config(probe)
    whole = train(config, tmp_path / "whole")

    def stop(progress: Progress) -> None:
        if progress.step == 7:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, StoppedError)):
        train(config, tmp_path / "cut", on_progress=stop)
    again = train(config, tmp_path / "cut", resume=True)
    assert again.validation_loss == whole.validation_loss
    assert again.unaveraged_loss == whole.unaveraged_loss


def test_last_validation_may_read_more(probe: PreparedData, tmp_path: Path) -> None:
    config = small_config(probe, "dense")
    more = replace(config, validation=replace(config.validation, tokens=64, last_tokens=256))
    summary = train(more, tmp_path / "run")
    entries = [one for one in read_metrics(tmp_path / "run" / "metrics.jsonl") if one.validation_loss is not None]
    assert len(entries) == 2
    less = train(replace(config, validation=replace(config.validation, tokens=64)), tmp_path / "less")
    assert summary.validation_tokens > 3 * less.validation_tokens


def test_shares_and_sizes_have_bounds(probe: PreparedData, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"average_share must be at least 0 and below 1, got 1\.5"):
        OptimizationSection(steps=1, average_share=1.5)
    with pytest.raises(ValueError, match="last_tokens must be at least 1, or 0 for all, got -1"):
        ValidationSection(last_tokens=-1)
    sharded = replace(averaged_config(probe), trainer={"fsdp": "full_shard"})
    with pytest.raises(ValueError, match=r"average_share averages whole weights, which trainer\.fsdp splits"):
        train(sharded, tmp_path / "run")
