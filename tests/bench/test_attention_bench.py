"""The benchmark refuses what is wrong, measures memory that is really taken, and reads its files carefully."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from varifocal.bench.attention.contenders import Contender, causal, contenders, run_law, window
from varifocal.bench.attention.correctness import fault
from varifocal.bench.attention.workload import Inputs, Workload
from varifocal.bench.timing import Times, turns
from varifocal.device import CPU
from varifocal.report.attention_bench import growth_of_time, speedup_table
from varifocal.report.attention_bench_plot import plot_attention_bench
from varifocal.report.table import markdown
from varifocal.results.attention_bench import AttentionBench, AttentionRow, WorkloadSizes
from varifocal.results.environment import Environment

SMALL = Workload(length=96, heads=4, kv_heads=2, head_width=16, window=24, window_max=48, edge=8, block=16, segment=16)


@pytest.mark.parametrize("name", [name for name in contenders(SMALL) if "flex" not in name])
def test_contender_computes_its_law(name: str) -> None:
    assert fault(contenders(SMALL)[name], SMALL) is None


def test_contender_that_computes_something_else_is_refused() -> None:
    wrong = Contender("wrong", lambda inputs: run_law(inputs, law=causal, backend="reference"), window)
    assert "output is off by" in str(fault(wrong, SMALL))


def test_contender_with_a_wrong_gradient_is_refused() -> None:
    def cut_off(inputs: Inputs) -> torch.Tensor:
        output = run_law(inputs, law=causal, backend="reference")
        return output.detach() + 0 * inputs.q

    assert "gradient to" in str(fault(Contender("cut off", cut_off, causal), SMALL))


def test_contender_that_raises_is_refused_with_its_message() -> None:
    def refuses(inputs: Inputs) -> torch.Tensor:
        raise RuntimeError("not today")

    assert fault(Contender("refuses", refuses, causal), SMALL) == "RuntimeError: not today"


def test_peak_memory_sees_what_a_run_takes_and_gives_back() -> None:
    size = 64 << 20

    def run() -> None:
        torch.ones(size // 4).mul_(2.0)

    taken = CPU.peak_additional_bytes(run)
    assert size <= taken + (1 << 20)
    assert taken < 2 * size


def test_all_take_turns_and_every_other_round_goes_backwards() -> None:
    assert list(turns(("a", "b"), 2)) == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]


def test_speedup_is_the_median_of_ratios_within_a_round() -> None:
    # A slow second round slows both alike, and does not count.
    assert Times((2.0, 20.0, 2.0)).speedup_of(Times((1.0, 10.0, 1.0))) == 2.0


def small_bench() -> AttentionBench:
    """Two contenders, one whose time grows with the square of the length and one whose time grows with the length."""
    rows = [
        AttentionRow(
            name=name, kind="training", length=length, seconds=float(length**power), spread=0.0, rounds=1, speedup=1.0,
            peak_bytes=None, memory_ratio=None,
        )
        for name, power in (("base", 2), ("line", 1))
        for length in (4096, 8192)
    ]  # fmt: skip
    sizes = WorkloadSizes(heads=2, kv_heads=1, head_width=8, dtype="torch.float32")
    return AttentionBench(
        environment=Environment(threads=1), workload=sizes, baseline="base", matmul_gflops=1.0, rows=tuple(rows)
    )


def test_growth_is_the_exponent_of_time(tmp_path: Path) -> None:
    small_bench().write(tmp_path / "r.json")
    bench = AttentionBench.read(tmp_path / "r.json")
    assert growth_of_time(bench, "base", "training") == pytest.approx(2.0)
    assert growth_of_time(bench, "line", "training") == pytest.approx(1.0)
    assert markdown(speedup_table(bench, "training")).count("\n") == 3


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_is_drawn(tmp_path: Path, ending: str) -> None:
    plot_attention_bench(small_bench(), tmp_path / f"plot.{ending}")
    assert (tmp_path / f"plot.{ending}").stat().st_size > 1000


@pytest.mark.parametrize("text", ["", "[]", '{"benchmark": "other"}', "{broken"])
def test_file_that_is_not_a_result_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"r\.json"):
        AttentionBench.read(path)


def test_missing_row_is_none() -> None:
    assert small_bench().row("base", "training", 1) is None
