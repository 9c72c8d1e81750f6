"""The model's benchmark compares the same weights and says what was left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from varifocal.bench.model.contenders import BASELINE, LEAN_BASELINE, build, share_weights
from varifocal.bench.model.run import Plan, bench_model, check_losses
from varifocal.report.model_bench import model_table
from varifocal.results.model_bench import ModelBench


def test_all_share_the_very_same_weights() -> None:
    contenders = [build(name, "tiny", context=64, layers=1) for name in (BASELINE, "dense", "head_gated")]
    shared = share_weights(contenders)
    own = sum(p.numel() for name, p in contenders[2].model.named_parameters() if "mechanism" in name)
    first = sum(p.numel() for p in contenders[0].model.parameters())
    assert sum(p.numel() for p in shared) == first + own
    weights = {one.model.model.layers[0].mlp.up_proj.weight.data_ptr() for one in contenders}
    assert len(weights) == 1


def test_contender_with_other_weights_is_refused() -> None:
    contenders = [build(name, "tiny", context=64, layers=1) for name in (BASELINE, "dense")]
    with torch.no_grad():
        contenders[1].model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="dense differs from qwen3 sdpa"):
        check_losses(contenders)


def test_result_has_a_row_for_each_and_a_table(tmp_path: Path) -> None:
    plan = Plan(preset="tiny", lengths=(32,), layers=1, rounds=1, names=("local",), decode=2)
    bench = bench_model(plan)
    rows = {(row.name, row.kind): row for row in bench.rows}
    assert set(rows) == {
        *((name, "training") for name in (BASELINE, LEAN_BASELINE, "local")),
        *((name, "decode") for name in (BASELINE, "local")),
    }
    assert rows[BASELINE, "training"].speedup == 1.0
    assert (rows["local", "training"].peak_bytes or 0) > 0
    bench.write(tmp_path / "r.json")
    table = model_table(ModelBench.read(tmp_path / "r.json"), "training")
    assert table[0] == ["n =", "32: tokens/s", "memory"]
    assert [row[0] for row in table[1:]] == [BASELINE, LEAN_BASELINE, "local"]


def test_baseline_whose_logits_are_too_large_is_replaced_and_noted() -> None:
    plan = Plan(preset="qwen-134m", lengths=(8192,))
    assert plan.contenders(151_936, 8192)[0] == LEAN_BASELINE
    assert plan.contenders(151_936, 2048)[0] == BASELINE


def test_narrow_products_are_measured_beside_each_other(tmp_path: Path) -> None:
    """In a process of its own: without AMX, which the machine may announce and not run."""
    command = (
        "bench", "model", "--preset", "tiny", "--lengths", "32", "--layers", "1", "--precision", "bfloat16",
        "-c", "head_gated", "--no-memory", "--decode", "1", "--rounds", "1", "--json", str(tmp_path / "r.json"),
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "from varifocal.cli.main import run; run()", *command],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    bench = ModelBench.read(tmp_path / "r.json")
    assert (bench.precision, bench.environment.device) == ("bfloat16", "cpu")
    assert {row.name for row in bench.rows} == {BASELINE, LEAN_BASELINE, "head_gated"}


def test_unknown_contender_is_named() -> None:
    with pytest.raises(ValueError, match="unknown contender 'nobody'"):
        bench_model(Plan(preset="tiny", names=("nobody",)))


@pytest.mark.parametrize("text", ["", '{"benchmark": "attention"}', "{broken"])
def test_file_that_is_not_a_result_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"r\.json"):
        ModelBench.read(path)
