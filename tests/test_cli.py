"""The command line: what it prints, what it writes, how it ends."""

from __future__ import annotations

import ctypes.util
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from varifocal.cli.main import app
from varifocal.cli.tables import counting_bar
from varifocal.cli.train import training_bar


def varifocal(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = "from varifocal.cli.main import run; run()"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=600)


def test_help_names_every_verb() -> None:
    result = varifocal("--help")
    assert result.returncode == 0
    assert "check" in result.stdout


def test_info_says_what_runs_here() -> None:
    result = varifocal("info")
    assert result.returncode == 0, result.stderr
    assert "native" in result.stdout
    assert "head_gated" in result.stdout


def test_info_says_why_native_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARIFOCAL_LIBRARY", "nowhere/libvarifocal.so")
    result = varifocal("info")
    assert result.returncode == 0, result.stderr
    assert "missing: libvarifocal.so was not built" in " ".join(result.stdout.split())


def test_another_library_is_named_with_what_to_do(tmp_path: Path) -> None:
    foreign = [str(tmp_path), "x" * 5000, str(tmp_path / "text.so"), ctypes.util.find_library("m")]
    (tmp_path / "text.so").write_text("no library")
    program = """
import importlib, os, sys
from varifocal.kernels.native import library
for name in sys.argv[1:]:
    os.environ["VARIFOCAL_LIBRARY"] = name
    print(importlib.reload(library).why_missing())
"""
    done = subprocess.run([sys.executable, "-c", program, *map(str, foreign)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(foreign)
    assert all("was not built" in line or "unset VARIFOCAL_LIBRARY" in line for line in done.stdout.splitlines())


def test_mechanisms_still_work_without_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARIFOCAL_LIBRARY", "nowhere/libvarifocal.so")
    result = varifocal("check", "-m", "head_gated", "--dtype", "float32")
    assert result.returncode == 0, result.stderr
    result = varifocal("check", "-m", "dense", "--backend", "native", "--dtype", "float32")
    assert "0 promises kept, 0 broken" in result.stdout


def test_bench_prints_ratios_and_writes_result_and_exits_cleanly(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = varifocal(
        "bench", "attention", "--lengths", "64,128", "--rounds", "1", "--no-memory", "--heads", "2", "--kv-heads", "1",
        "--head-width", "16", "--threads", "1", "--pass", "training,decode", "-c", "torch sdpa band mask",
        "--json", str(file),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "torch sdpa causal = 1" in result.stdout
    content = json.loads(file.read_text())
    assert content["benchmark"] == "attention"
    assert {row["name"] for row in content["rows"]} == {"torch sdpa causal", "torch sdpa band mask"}
    assert all(row["seconds"] > 0 for row in content["rows"])
    own = [row["speedup"] for row in content["rows"] if row["name"] == "torch sdpa causal"]
    assert own == pytest.approx([1.0] * len(own))


def test_plan_prints_memory_time_cost_and_what_it_assumes(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = varifocal("plan", "-m", "dense", "-m", "local", "--gpu", "a100", "--tokens", "1B", "--json", str(file))
    assert result.returncode == 0, result.stderr
    words = " ".join(result.stdout.split())
    for said in ("memory by part", "time by part", "$1.80 an hour of one a100-80 is an assumption", "assumed (docs/"):
        assert said in words
    content = json.loads(file.read_text())
    assert content["training"]["tokens"] == 1e9
    assert content["predictions"]["local"]["hours"] < content["predictions"]["dense"]["hours"]


def test_plan_says_what_does_not_fit() -> None:
    result = varifocal("plan", "-m", "dense", "--gpu", "l4", "--context", "32768", "--micro-batch", "8")
    assert result.returncode == 0, result.stderr
    assert "dense does not fit: 8 rows at once take" in " ".join(result.stdout.split())


def test_plan_compares_the_papers_tables_with_arithmetic() -> None:
    result = varifocal("plan", "--papers")
    assert result.returncode == 0, result.stderr
    assert "Context-Adaptive Attention: memory, baseline = 1" in result.stdout
    assert "prototype: the same order as the paper's" in " ".join(result.stdout.split())


def test_ablations_are_listed() -> None:
    result = varifocal("ablate", "--list")
    assert result.returncode == 0, result.stderr
    assert "sparse_geometric.both_off" in result.stdout


def test_progress_does_not_fill_a_file() -> None:
    file = io.StringIO()
    console = Console(file=file)
    for bar in (counting_bar(console=console), training_bar(console)):
        with bar:
            task = bar.add_task("reading", total=5000, numbers="")
            for step in range(5000):
                bar.update(task, completed=step)
    assert len(file.getvalue()) < 10


def test_version_is_printed() -> None:
    assert varifocal("--version").stdout.startswith("varifocal 0.")


def test_check_prints_a_table_and_writes_its_findings(tmp_path: Path) -> None:
    file = tmp_path / "findings.json"
    result = varifocal("check", "-m", "dense", "-m", "local window", "--json", str(file))
    assert result.returncode == 0, result.stderr
    assert "promises kept, 0 broken" in result.stdout
    findings = json.loads(file.read_text())
    assert [entry["name"] for entry in findings] == ["dense", "local window"]
    assert all(entry["conforms"] for entry in findings)
    assert [path.name for path in tmp_path.iterdir()] == ["findings.json"]


OWN = """
import torch
from torch.nn.functional import scaled_dot_product_attention


def dense(q, k, v):
    groups, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def future(q, k, v):
    return dense(q, k, v) + v.sum(dim=(1, 2))[:, None, None]


class Dense(torch.nn.Module):
    def forward(self, q, k, v):
        return dense(q, k, v)


class Sized:
    def __init__(self, size):
        self.size = size


number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The present folder holds somebody's own attention."""
    (tmp_path / "my_own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def test_check_takes_a_function_and_a_class_by_import_path(own_module: None) -> None:
    result = varifocal(
        "check", "-m", "my_own:dense", "-m", "my_own:Dense", "-m", "varifocal.names:attend", "-r", "future"
    )
    assert "2 promises kept, 1 broken" in result.stdout, result.stderr
    result = varifocal("check", "-m", "my_own:dense", "-m", "my_own:Dense")
    assert result.returncode == 0, result.stdout
    assert "14 promises kept, 0 broken" in result.stdout


def test_check_takes_a_mechanism_of_ones_own_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent / "stranger")
    result = varifocal("check", "-m", "stranger_attention:Fading", "-r", "future")
    assert result.returncode == 0, result.stderr
    assert "0 broken" in result.stdout


def test_check_finds_what_a_function_of_ones_own_breaks(own_module: None) -> None:
    result = varifocal("check", "-m", "my_own:future", "-r", "future")
    assert result.returncode == 1, result.stderr
    assert "future, future: changing tokens from" in result.stdout


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("my_own:dens", "'my_own' has no 'dens' (did you mean 'dense'?), asked for by 'my_own:dens'"),
        ("my_own:number", "my_own:number is 3; expected a mechanism, or a function or class of q, k and v"),
        ("my_own:Sized", "my_own:Sized is a class that cannot be made without arguments"),
        ("my_other:dense", "the module 'my_other' cannot be imported: ModuleNotFoundError"),
        ("my_own:", "expected module:name, such as my_package.attention:MyAttention, got 'my_own:'"),
    ],
)
def test_wrong_import_path_is_one_sentence(path: str, sentence: str, own_module: None) -> None:
    result = varifocal("check", "-m", path)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_table_is_shown_where_unicode_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    result = varifocal("check", "-m", "dense", "-r", "future")
    assert result.returncode == 0, result.stderr
    assert "+ kept  x broken  . does not apply" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("bench", "attention", "--threads", "100000"), "takes 1 to"),
        (("check", "-m", "hed_gated"), "unknown mechanism 'hed_gated' (did you mean 'head_gated'?)"),
        (("check", "--dtype", "int8"), "unknown dtype 'int8'; known are float64, float32"),
        (("check", "--device", "cuda:9"), "device 'cuda:9' cannot be used here"),
        (("bench", "attention", "--device", "cuda:9"), "device 'cuda:9' cannot be used here"),
        (("bench", "model", "--device", "cuda:9"), "device 'cuda:9' cannot be used here"),
        (("bench", "model", "--precision", "float8"), "unknown precision 'float8'; known are float32, bfloat16"),
        (("plan", "--gpu", "h101"), "unknown GPU 'h101' (did you mean 'h100'?)"),
        (("plan", "-m", "hed_gated"), "unknown mechanism 'hed_gated' (did you mean 'head_gated'?)"),
        (("plan", "--tokens", "many"), "expected a number such as 500M, 10B or 250000, got 'many'"),
        (("plan", "--gpus", "7"), "batch must be a multiple of the 7 devices, got 512"),
        (("bench", "plan", "--presets", "huge"), "unknown preset 'huge'; known are"),
        (("check", "--row", "fixture"), "unknown conformance row 'fixture'"),
        (("bench", "attention", "--lengths", "12,x"), "lengths must be whole numbers separated by commas, got '12,x'"),
        (("bench", "attention", "--pass", "sideways"), "--pass takes forward, training, decode"),
        (("bench", "attention", "-c", "nobody", "--lengths", "64"), "unknown contender 'nobody'; known are"),
        (("check", "-m", "dense", "--json", "no/such/folder/x.json"), "does not exist; create it first"),
        (("check", "-m", "dense", "--heads", "3", "--kv-heads", "2"), "heads must be a multiple of kv_heads"),
        (("compare", "no/such.toml", "out"), "the config no/such.toml cannot be read: No such file or directory"),
        (
            ("compare", "configs/compare.toml", "out", "--seeds", "1,x"),
            "seeds must be whole numbers separated by commas",
        ),
        (("compare", "configs/compare.toml", "out", "--set", "run.seed=1"), "run.seed is what a comparison varies"),
        (("report", "no/such/run"), "no/such/run does not exist; give the folder of a run, of a comparison or of"),
        (("ablate",), "ablate needs a CONFIG and a folder OUT; 'varifocal ablate --list' shows the ablations"),
        (("ablate", "configs/compare.toml", "out", "-a", "hybrd"), "unknown ablation 'hybrd' (did you mean 'hybrid'?)"),
    ],
)
def test_mistake_ends_with_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = varifocal(*arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", ["train", "data prepare", "explore", "generate"])
def test_help_shows_examples_by_line_and_no_value_of_a_flag(verb: str) -> None:
    said = CliRunner().invoke(app, [*verb.split(), "--help"], env={"COLUMNS": "100", "TERM": "dumb"}).output
    assert "<bool>" not in said
    assert "\b" not in said
    lines = said.splitlines()
    first = next(number for number, line in enumerate(lines) if line.strip() == "Examples")
    assert lines[first + 1].strip().startswith(("varifocal ", "torchrun "))
    assert max(len(line) for line in lines) <= 100


def test_plan_fits_a_hundred_columns_and_tells_what_compiling_brings() -> None:
    said = CliRunner().invoke(app, ["plan", "--gpu", "a100", "--tokens", "1B"], env={"COLUMNS": "100"}).output
    tables = [line.rstrip() for line in said.splitlines() if line.startswith(" ")]
    assert max(map(len, tables)) <= 100
    assert "compiled by torch.compile" in said


def test_train_takes_a_text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("\n\n".join(f"Line {number} tells of {number * 7 % 13}." * 5 for number in range(300)))
    changed = ("steps=2", "warmup_steps=1", "length=64")
    few = [part for one in changed for part in ("--set", f"optimization.{one}")] + ["--set", "validation.tokens=256"]
    done = CliRunner().invoke(app, ["train", "my.txt", *few], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "runs/my/model/config.json").is_file()
    Path("short.txt").write_text("too short")
    with pytest.raises(ValueError, match=r"short.txt has 9 bytes"):
        CliRunner().invoke(app, ["train", "short.txt"], catch_exceptions=False)
