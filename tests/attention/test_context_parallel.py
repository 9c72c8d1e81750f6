"""A text shared among processes: each keeps the queries of its part and reads the keys that all of them gather."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.processes import PATIENCE, free_port

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from varifocal import Causal, Prefix, Window, attend

dist.init_process_group("gloo")
rank, count = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
length, document = 48, torch.tensor([[0] * 29 + [1] * 19])
whole = [torch.randn(1, heads, length, 16) for heads in (4, 2, 2)]
gates = torch.rand(1, 4, length, 2)
upstream = torch.randn(1, 4, length, 16)
mine = torch.arange(rank * length // count, (rank + 1) * length // count)
for name, branches, documents in (
    ("dense", (Causal(),), None),
    ("local", (Window(9) | Prefix(2),), None),
    ("head_gated", (Window(9), Causal()), document),
):
    weights = gates if len(branches) > 1 else None
    leaves = [part.clone().requires_grad_() for part in whole]
    expected = attend(*leaves, branches=branches, weights=weights, documents=documents, backend="native").output
    expected.backward(upstream)

    q, k, v = (part[:, :, mine].clone().requires_grad_() for part in whole)
    keys, values = (all_gather_tensor_autograd(part, gather_dim=2, group=dist.group.WORLD) for part in (k, v))
    part = weights[:, :, mine] if weights is not None else None
    found = attend(
        q, keys, values, branches=branches, weights=part, documents=documents, positions=mine, backend="native"
    ).output
    found.backward(upstream[:, :, mine])
    torch.testing.assert_close(found, expected[:, :, mine])
    for one, leaf in zip((q, k, v), leaves):
        torch.testing.assert_close(one.grad, leaf.grad[:, :, mine])
    if rank == 0:
        print(name, flush=True)
dist.destroy_process_group()
"""


def test_two_processes_that_share_a_text_find_what_one_finds() -> None:
    environment = os.environ | {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [process.communicate(timeout=PATIENCE) for process in processes]
    assert all(process.returncode == 0 for process in processes), "".join(errors[-1500:] for _, errors in told)
    assert told[0][0].split() == ["dense", "local", "head_gated"]
