"""The command line: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def varifocal(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = "from varifocal.cli.main import run; run()"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)


def test_help_names_every_verb() -> None:
    result = varifocal("--help")
    assert result.returncode == 0
    assert "check" in result.stdout


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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("check", "-m", "hed_gated"), "unknown mechanism 'hed_gated' (did you mean 'head_gated'?)"),
        (("check", "--dtype", "int8"), "unknown dtype 'int8'; known are float64, float32"),
        (("check", "--device", "cuda:9"), "device 'cuda:9' cannot be used here"),
        (("check", "--row", "fixture"), "unknown conformance row 'fixture'"),
        (("check", "-m", "dense", "--json", "no/such/folder/x.json"), "does not exist; create it first"),
        (("check", "-m", "dense", "--heads", "3", "--kv-heads", "2"), "heads must be a multiple of kv_heads"),
    ],
)
def test_mistake_ends_with_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = varifocal(*arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
