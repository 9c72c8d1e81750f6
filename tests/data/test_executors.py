"""Slurm through a stand-in for its commands that runs everything here; options and what is missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import prepared
from tests.data.texts import made_texts, write_jsonl
from varifocal.data.executors import make_executor
from varifocal.data.prepare import Options, Preparation, prepare

SBATCH = """#!/bin/bash
script="${@: -1}"
echo "$@" >> "$STAND_IN/submitted"
[ -e "$STAND_IN/refuse" ] && exit 3
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
if [ ! -e "$STAND_IN/hold" ]; then
    for task in $(seq 0 "$last"); do
        SLURM_ARRAY_TASK_ID=$task SLURM_JOB_ID=7 SLURM_NODELIST=here RUN_OFFSET=0 bash "$script" \\
            >> "$STAND_IN/log" 2>&1 || exit 1
    done
fi
echo "Submitted batch job 7"
"""
SRUN = """#!/bin/bash
while [ "$1" != 1 ]; do shift; done # srun -l -n 1 command...
shift
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo here
"""
SLURM = {"partition": "cpu", "time": "1:00:00"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """sbatch, srun and scontrol that run a job at once, in this machine's processes."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    for name, script in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("STAND_IN", str(folder))
    # Without the environment's own commands: whoever calls .venv/bin/varifocal need not have activated it.
    paths = os.environ["PATH"].split(":")
    elsewhere = [path for path in paths if not (Path(path) / "launch_pickled_pipeline").exists()]
    monkeypatch.setenv("PATH", ":".join([str(folder), *elsewhere]))
    return folder


def submit(source: Path, out: Path, **more: Any) -> Preparation:
    options = Options(tokenizer="bytes")
    return prepare(str(source), out, options=options, executor="slurm", executor_options=SLURM, **more)


def test_slurm_makes_the_same_data(cluster: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", made_texts(40))
    done = submit(source, tmp_path / "out")
    assert done.outcome == "prepared", (cluster / "log").read_text()
    assert done.data is not None
    assert done.data.fingerprint == prepared(source, tmp_path / "local").fingerprint


def test_submitted_pieces_are_waited_for_and_submitted_again_only_if_asked(cluster: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", made_texts(40))
    (cluster / "hold").touch()
    assert submit(source, tmp_path / "out").outcome == "submitted"
    jobs = (cluster / "submitted").read_text()
    again = submit(source, tmp_path / "out")
    assert (again.outcome, again.pieces_done, again.pieces) == ("submitted", 0, 1)
    assert (cluster / "submitted").read_text() == jobs
    (cluster / "hold").unlink()
    assert submit(source, tmp_path / "out", resubmit=True).outcome == "prepared"


def test_refused_job_is_explained(cluster: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", made_texts(4))
    (cluster / "refuse").touch()
    with pytest.raises(ValueError, match="sbatch refused the pieces with exit code 3"):
        submit(source, tmp_path / "out")
    (cluster / "refuse").unlink()
    (cluster / "hold").touch()
    assert submit(source, tmp_path / "out").outcome == "submitted"
    assert (cluster / "submitted").read_text().count("RUN_OFFSET") == 2


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("slurm", {"partition": "cpu"}, "executor 'slurm' needs time; add --executor-option time="),
        ("slurm", {"color": "red"}, "executor 'slurm' has no option 'color'; it has time, partition, cpus_per_task"),
        ("local", {"partition": "cpu"}, "the local executor takes no options but --workers, got partition"),
        ("cloud", {}, "unknown executor 'cloud'; known are local, slurm, ray"),
    ],
)
def test_wrong_options_are_explained(
    cluster: Path, tmp_path: Path, name: Any, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_executor(name, [], tasks=1, workers=1, state=tmp_path, options=options)


@pytest.mark.parametrize(
    ("name", "sentence"), [("slurm", "submits with sbatch, which is not here"), ("ray", "pip install ray")]
)
def test_missing_cluster_is_explained(
    tmp_path: Path, name: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=sentence):
        make_executor(name, [], tasks=1, workers=1, state=tmp_path, options=SLURM)
