"""The grid of a comparison: every cell once, resumable, on the same data; the test split at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experiments.comparisons import PROBE, SIZES, TrainHere, small_base, small_plan, small_probe
from tests.processes import family_of, still_alive
from varifocal.experiments.comparison import check_models, compare, gpu_of
from varifocal.experiments.comparison_plan import Arm, load_plan
from varifocal.report.comparison_tables import learning_table
from varifocal.report.papers import claims
from varifocal.results.metrics import MetricsEntry, last_entry
from varifocal.statistics.comparison import gather_comparison, read_comparison

CONFIG = """
title = "small"
mechanisms = ["dense", "head_gated", {{ name = "fixed", mechanism = "head_gated", options = {{ window = 8 }} }}]
seeds = [0, 1]
[base.data]
path = "{data}"
[base.model]
preset = "tiny"
overrides = {{ {sizes} }}
[base.optimization]
steps = 3
batch = 4
length = 64
[base.validation]
every = 2
tokens = 256
[base.checkpoints]
every = 2
[base.run]
threads = 1
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_probe(tmp_path_factory.mktemp("data"))


def write_config(folder: Path, data: Path, *changes: tuple[str, str]) -> Path:
    text = CONFIG.format(data=data, sizes=", ".join(f"{name} = {value}" for name, value in SIZES.items()))
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "small.toml").write_text(text)
    return folder / "small.toml"


def losses(run: Path) -> list[float]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if "loss" in entry]


def first_rows(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def test_every_arm_runs_with_every_seed(data: Path, tmp_path: Path) -> None:
    outcome = compare(small_plan(data, "dense", "local", seeds=(0, 5)), tmp_path / "out", train_cells=TrainHere())
    assert outcome.finished == ("dense-seed0", "local-seed0", "dense-seed5", "local-seed5")
    assert outcome.skipped == ()
    assert outcome.failed == {}
    assert outcome.comparison is not None
    assert read_comparison(tmp_path / "out").record == outcome.comparison.with_results()


def test_finished_cell_is_not_run_again(data: Path, tmp_path: Path) -> None:
    plan, first, second = small_plan(data, "dense", "local"), TrainHere(), TrainHere()
    compare(plan, tmp_path / "out", train_cells=first)
    (tmp_path / "out" / "cells" / "local-seed0" / "summary.json").unlink()
    outcome = compare(plan, tmp_path / "out", train_cells=second)
    assert first.trained == ["dense-seed0", "local-seed0"]
    assert second.trained == ["local-seed0"]
    assert outcome.skipped == ("dense-seed0",)


def test_seeds_and_arms_may_be_added(data: Path, tmp_path: Path) -> None:
    again = TrainHere()
    compare(small_plan(data, "dense"), tmp_path / "out", train_cells=TrainHere())
    compare(small_plan(data, "dense", "local", seeds=(0, 1)), tmp_path / "out", train_cells=again)
    assert again.trained == ["local-seed0", "dense-seed1", "local-seed1"]


def test_other_budget_in_the_same_folder_is_refused(data: Path, tmp_path: Path) -> None:
    compare(small_plan(data), tmp_path / "out", train_cells=TrainHere())
    other = small_plan(data, base=small_base(data, steps=4))
    with pytest.raises(ValueError, match=r"holds a comparison with optimization.steps = 3, this one has 4; choose"):
        compare(other, tmp_path / "out", train_cells=TrainHere())


def test_arm_with_other_options_in_the_same_folder_is_refused(data: Path, tmp_path: Path) -> None:
    arm = Arm(name="gated", mechanism="head_gated", options={"window": 4})
    compare(small_plan(data, arms=(arm,)), tmp_path / "out", train_cells=TrainHere())
    with pytest.raises(ValueError, match="whose arm 'gated' differs or is missing here"):
        compare(small_plan(data, arms=(replace(arm, options={"window": 5}),)), tmp_path / "out")


def test_folder_of_something_else_is_left_alone(data: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists but is not a comparison's folder; choose another folder"):
        compare(small_plan(data), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_options_that_do_not_fit_are_named_before_anything_is_written(data: Path, tmp_path: Path) -> None:
    arm = Arm(name="odd", mechanism="head_gated", options={"windw": 4})
    with pytest.raises(ValueError, match=r"arm 'odd': .*no option 'windw' \(did you mean 'window'\?\)"):
        compare(small_plan(data, arms=(arm,)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_asga_without_both_parts_trains_exactly_as_dense(data: Path, tmp_path: Path) -> None:
    off = Arm(
        name="sparse_geometric.both_off",
        mechanism="sparse_geometric",
        options={"sparsity": "none", "scaling": False},
        reference="sparse_geometric",
    )
    compare(small_plan(data, "dense", "sparse_geometric", arms=(off,)), tmp_path / "out", train_cells=TrainHere())
    runs = [tmp_path / "out" / "cells" / f"{name}-seed0" for name in ("dense", off.name, "sparse_geometric")]
    dense, both_off, whole = (losses(run) for run in runs)
    assert dense == both_off
    assert dense != whole


def test_budget_and_data_are_the_same_for_all(data: Path, tmp_path: Path) -> None:
    compare(small_plan(data, "dense", "combiner"), tmp_path / "out", train_cells=TrainHere())
    one, other = (first_rows(tmp_path / "out" / "cells" / f"{name}-seed0") for name in ("dense", "combiner"))
    for key in ("steps", "tokens", "data_fingerprint", "validation_tokens"):
        assert one[key] == other[key]


def test_comparison_on_a_probe_tells_right_answers_by_steps(data: Path, tmp_path: Path) -> None:
    outcome = compare(small_plan(data, "dense", seeds=(0, 1)), tmp_path / "out", train_cells=TrainHere())
    assert outcome.comparison is not None
    curves = [dict(cell.accuracy_curve or ()) for cell in outcome.comparison.cells("dense").values()]
    assert [sorted(curve) for curve in curves] == [[2, 3], [2, 3]]
    table = learning_table(outcome.comparison)
    assert table is not None
    assert table[0] == ["right answers after steps", "2", "3"]
    assert table[1][1].startswith(f"{(curves[0][2] + curves[1][2]) / 2:.1%}")


def test_test_split_is_measured_once_after_all_cells(data: Path, tmp_path: Path) -> None:
    plan = small_plan(data, "dense", "local")
    seen: list[bool] = []

    def watching(configs: dict[str, Any], out: Path, say: Any) -> dict[str, str]:
        failed = TrainHere()(configs, out, say)
        seen.append(any(out.glob("cells/*/test.json")))
        return failed

    compare(plan, tmp_path / "out", train_cells=watching)
    files = sorted((tmp_path / "out").glob("cells/*/test.json"))
    before = [file.stat().st_mtime_ns for file in files]
    compare(plan, tmp_path / "out", train_cells=TrainHere())
    assert seen == [False]
    assert [file.parent.name for file in files] == ["dense-seed0", "local-seed0"]
    assert [file.stat().st_mtime_ns for file in files] == before


def test_probe_brings_recall_by_distance(data: Path, tmp_path: Path) -> None:
    compare(small_plan(data), tmp_path / "out", train_cells=TrainHere())
    recall = gather_comparison(tmp_path / "out").results[0].recall
    assert list(recall) == [str(distance) for distance in PROBE.distances]


def test_failed_cell_is_reported_and_the_others_are_measured(data: Path, tmp_path: Path) -> None:
    def one_fails(configs: dict[str, Any], out: Path, say: Any) -> dict[str, str]:
        TrainHere()({name: config for name, config in configs.items() if "dense" in name}, out, say)
        return {"local-seed0": "no good"}

    outcome = compare(small_plan(data, "dense", "local"), tmp_path / "out", train_cells=one_fails)
    assert outcome.failed == {"local-seed0": "no good"}
    assert [result.name for result in gather_comparison(tmp_path / "out").results] == ["dense"]


def test_source_is_prepared_once_for_all_cells(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"Document {number} tells of the moon. " * 20}) for number in range(60)]
    text.write_text("\n".join(lines))
    plan = load_plan(
        write_config(tmp_path, tmp_path, (f'path = "{tmp_path}"', f'source = "{text}"\ntokenizer = "bytes"'))
    )
    compare(replace(plan, seeds=(0,)), tmp_path / "out", train_cells=TrainHere())
    assert (tmp_path / "out" / "data" / "manifest.json").is_file()
    assert not list((tmp_path / "out" / "cells").glob("*/data"))
    assert gather_comparison(tmp_path / "out").setting.data == "text.jsonl"


def test_plan_reads_arms_with_options(data: Path, tmp_path: Path) -> None:
    plan = load_plan(write_config(tmp_path, data), ["optimization.steps=7"], seeds=(4,))
    assert [cell.name for cell in plan.cells()] == ["dense-seed4", "head_gated-seed4", "fixed-seed4"]
    config = plan.config(plan.cells()[2])
    assert (config.model.mechanism, config.model.mechanism_options) == ("head_gated", {"window": 8})
    assert (config.optimization.steps, config.run.seed) == (7, 4)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("seeds =", "sees =", r"unknown key 'sees' \(did you mean 'seeds'\?\)"),
        ("steps = 3", "stps = 3", r"unknown key 'optimization.stps' \(did you mean 'optimization.steps'\?\)"),
        ('"dense",', '"dens",', r"unknown mechanism 'dens' \(did you mean 'dense'\?\)"),
        ('"dense",', '"dense", "dense",', "two arms are named 'dense'"),
        ('"dense",', '"local",', "the baseline 'dense' is not among the arms local, head_gated, fixed"),
        ('name = "fixed"', 'nam = "fixed"', r"a mechanism has no key 'nam' \(did you mean 'name'\?\)"),
        ('name = "fixed"', 'name = "a/b"', "an arm's name names a folder"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "seeds must be different whole numbers"),
        ("seeds = [0, 1]", 'seeds = "all"', "seeds must be a list of whole numbers, got 'all'"),
        ("threads = 1", "seed = 1", "run.seed is what a comparison varies; leave it out of the base and use 'seeds'"),
        ('preset = "tiny"', 'mechanism = "dense"', "model.mechanism is what a comparison varies"),
        ("[base.", "[bse.", r"unknown key 'bse' \(did you mean 'base'\?\)"),
        ("title =", "title", "is not TOML"),
    ],
)
def test_mistake_in_the_file_is_one_sentence(data: Path, tmp_path: Path, old: str, new: str, sentence: str) -> None:
    file = write_config(tmp_path, data, (old, new))
    with pytest.raises(ValueError, match=sentence):
        load_plan(file)


def test_half_a_line_of_metrics_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.5}\n{"step": 4, "lo')
    assert last_entry(tmp_path / "metrics.jsonl") == MetricsEntry(step=3, loss=1.5)
    assert last_entry(tmp_path / "nothing.jsonl") is None


def varifocal(*arguments: str | Path) -> subprocess.Popen[str]:
    program = "from varifocal.cli.main import run; run()"
    environment = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize(
    ("gpus", "visible", "workers", "names"),
    [
        (0, None, 3, [None, None, None]),
        (8, None, 1, [None]),
        (2, None, 3, ["0", "1", "0"]),
        (2, "5,GPU-7", 2, ["5", "GPU-7"]),
    ],
)
def test_each_worker_has_a_gpu_of_its_own(
    gpus: int, visible: str | None, workers: int, names: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu_of(place, workers=workers) for place in range(workers)] == names


def test_comparison_for_gpus_asks_every_claim_of_the_papers() -> None:
    plan = load_plan(Path(__file__).parents[2] / "configs" / "gpu" / "papers.toml")
    check_models(plan)
    arms = {arm.name: arm for arm in plan.arms}
    for claim in claims():
        assert claim.name in arms
        assert arms[claim.name].reference in (None, claim.against.mechanism)


def test_killed_comparison_ends_its_cells_and_continues_where_it_stopped(data: Path, tmp_path: Path) -> None:
    # Long enough to be caught in the middle, without the pauses of checkpoints and validations.
    file = write_config(tmp_path, data, ("steps = 3", "steps = 300"), ("every = 2", "every = 1000"))
    out = tmp_path / "out"
    command = ("compare", file, out, "--seeds", "0", "--workers", "2")
    with varifocal(*command) as process:
        metrics = out / "cells" / "dense-seed0" / "metrics.jsonl"
        while (entry := last_entry(metrics)) is None or entry.step < 3:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        family = family_of(process.pid)
        process.send_signal(signal.SIGKILL)
    # All of them: a cell that still writes its checkpoint keeps its folder from the next comparison.
    assert not still_alive(family)
    assert "stopped at step" in (out / "cells" / "dense-seed0.log").read_text()
    assert list(out.glob("cells/dense-seed0/checkpoints/step-*"))

    with varifocal(*command) as process:
        printed, complained = process.communicate()
    assert process.returncode == 0, complained
    assert "Scaled down" in printed
    assert "fixed" in printed
    assert len(losses(out / "cells" / "dense-seed0")) == 300
    assert {path.name for path in out.iterdir()} >= {"comparison.json", "comparison.md", "curves.png"}
