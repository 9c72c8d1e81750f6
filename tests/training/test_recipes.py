"""Every command of docs/recipes.md trains, with two processes in place of the papers' GPUs and a tiny model."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import free_port
from tests.training.runs import SIZES
from varifocal.data import PreparedData
from varifocal.training.config import load_config

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]
COMMANDS = [line for line in LINES if not line.startswith("export ")]
EXPORTED = dict(line.removeprefix("export ").split("=") for line in LINES if line.startswith("export "))
ON_ONE_NODE = [line for line in COMMANDS if "--standalone" in line]
BY_HAND = [line for line in COMMANDS if "--rdzv-endpoint" in line]
SLURM = [line for line in COMMANDS if line.startswith("sbatch")]

SRUN = """#!/bin/bash
# Starts the command once for each node, as srun does with one task a node, and ends with the worst of their codes.
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 "$@" & pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
# scontrol show hostnames: a name for each node of the job. Both are this machine.
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do echo localhost; done
"""


LATE = """
import os, sys, time
import torch
import torch.distributed as distributed
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if attempt == 1 and rank == 1:
    time.sleep(8)
distributed.init_process_group("gloo")
total = torch.ones(1)
distributed.all_reduce(total)
if attempt == 0:
    if rank == 1:
        os._exit(3)
    time.sleep(600)
print(f"rank {rank} counts {int(total)}", flush=True)
distributed.destroy_process_group()
"""
"""Dies in its first attempt; in the second one, the first process is there long before the other."""


def tiny(config: str, data: PreparedData) -> list[str]:
    """Settings that make a paper's config small; its mechanism, schedule and all others stay."""
    found = load_config(ROOT / config).optimization
    long = "optimization.steps=2" if found.steps is not None else "optimization.tokens=512"
    sizes = ", ".join(f"{name} = {value}" for name, value in SIZES.items())
    settings = [
        f"data.path={data.folder}", "model.preset=tiny", f"model.overrides={{{sizes}}}", long, "optimization.batch=4",
        "optimization.micro_batch=1", "optimization.length=64", "optimization.warmup_steps=1",
        "optimization.precision=float32", "validation.tokens=320", "run.threads=1",
    ]  # fmt: skip
    return [word for setting in settings for word in ("--set", setting)]


def programs(folder: Path) -> dict[str, str]:
    """An environment in which `varifocal`, `torchrun` and Slurm's commands are found, and nothing of a real Slurm."""
    folder.mkdir()
    run = "import sys; from varifocal.cli.main import run; sys.argv[0] = 'varifocal'; run()"
    texts = {
        "varifocal": f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -c {shlex.quote(run)} "$@"\n',
        "torchrun": f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n',
        "srun": SRUN,
        "scontrol": SCONTROL,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(stat.S_IRWXU)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return kept | {"PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"} | EXPORTED


def config_of(command: str) -> str:
    (found,) = re.findall(r"configs/papers/\w+\.toml", command)
    return str(found)


def started(words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def assert_finished(processes: list[subprocess.Popen[str]], out: Path) -> None:
    said = [process.communicate(timeout=900)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)[-4000:]
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["processes"] == 2
    assert summary["steps"] == 2


def test_page_has_every_paper_on_one_node_and_one_of_each_other_way() -> None:
    assert {config_of(line) for line in ON_ONE_NODE} == {f"configs/papers/{p.name}" for p in papers()}
    assert (len(BY_HAND), len(SLURM)) == (1, 1)
    assert len(COMMANDS) == len(ON_ONE_NODE) + 2


def papers() -> list[Path]:
    return sorted((ROOT / "configs" / "papers").glob("*.toml"))


@pytest.mark.parametrize("command", ON_ONE_NODE, ids=config_of)
def test_command_for_one_node_trains(command: str, probe: PreparedData, tmp_path: Path) -> None:
    words = shlex.split(command.replace("--nproc-per-node 8", "--nproc-per-node 2"))
    words[-1] = str(tmp_path / "run")
    process = started([*words, *tiny(config_of(command), probe)], programs(tmp_path / "bin"))
    assert_finished([process], tmp_path / "run")


def test_command_for_several_nodes_trains_when_each_runs_it(probe: PreparedData, tmp_path: Path) -> None:
    command = BY_HAND[0].replace("--nproc-per-node 8", "--nproc-per-node 1")
    command = command.replace("node-0:29400", f"localhost:{free_port()}")
    words = shlex.split(command)
    words[-1] = str(tmp_path / "run")
    environment = programs(tmp_path / "bin")
    nodes = [started([*words, *tiny(config_of(command), probe)], environment) for _ in range(2)]
    assert_finished(nodes, tmp_path / "run")


def test_slurm_script_trains_on_two_nodes_and_goes_on_with_what_it_finds(probe: PreparedData, tmp_path: Path) -> None:
    _, _, nodes, script, *arguments = shlex.split(SLURM[0])
    arguments[-1] = str(tmp_path / "run")
    environment = programs(tmp_path / "bin") | {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": nodes, "SLURM_JOB_NODELIST": "node-[0-1]",
        "SLURM_GPUS_ON_NODE": "1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    words = ["bash", script, *arguments, *tiny(config_of(SLURM[0]), probe)]
    assert_finished([started(words, environment)], tmp_path / "run")
    # Submitted once more: it resumes instead of refusing a folder that holds a run, and finds it finished.
    again = started(words, environment | {"MASTER_PORT": str(free_port())})
    assert_finished([again], tmp_path / "run")


def test_processes_meet_again_after_a_restart_though_one_is_late(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE, encoding="utf-8")
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(tmp_path / "late.py")]
    process = started(words, programs(tmp_path / "bin"))
    said = process.communicate(timeout=900)[0]
    assert process.returncode == 0, said[-3000:]
    assert "rank 0 counts 2" in said


def test_slurm_script_says_what_is_missing(tmp_path: Path) -> None:
    script = str(ROOT / "configs" / "slurm" / "train.sbatch")
    done = subprocess.run(["bash", script], env=programs(tmp_path / "bin"), capture_output=True, text=True)
    assert done.returncode != 0
    assert "name a config" in done.stderr
