"""Runs the benchmark: checks each contender, lets all take turns, and measures memory in separate processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from varifocal.bench.attention.contenders import BASELINE, Contender, contenders
from varifocal.bench.attention.correctness import fault
from varifocal.bench.attention.workload import Inputs, Workload, make_inputs
from varifocal.bench.step import Step
from varifocal.bench.timing import Times, take_turns
from varifocal.device import find_device
from varifocal.environment import environment
from varifocal.memory import in_own_process
from varifocal.results.attention_bench import AttentionBench, AttentionRow, WorkloadSizes

Pass = Literal["forward", "training", "decode"]
PASSES: tuple[Pass, ...] = ("forward", "training", "decode")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    passes: tuple[Pass, ...] = ("training",)
    names: tuple[str, ...] | None = None
    """Contenders beside the baseline; None for all."""
    rounds: int = 5
    """Rounds in which all take turns; there are fewer if together they would take more than a minute."""
    memory_lengths: tuple[int, ...] | None = None
    """Lengths at which peak memory is measured too, in one process for each contender; None for every length. It is
    never measured for decoding: one token takes less than the memory of a process fluctuates."""
    seconds: float = 20.0
    """A contender (other than the baseline) skips lengths at which a single run would take longer than this."""

    @classmethod
    def quick(cls, passes: tuple[Pass, ...], names: tuple[str, ...] | None) -> Plan:
        """Short texts and few rounds."""
        return cls(lengths=(512, 1024, 2048), passes=passes, names=names, rounds=2, memory_lengths=(), seconds=3.0)

    def probes(self, kind: Pass, length: int) -> bool:
        """Whether memory is measured."""
        return kind != "decode" and (self.memory_lengths is None or length in self.memory_lengths)

    def steps(self, contenders: int) -> int:
        """The most steps that a progress bar has to count."""
        kinds = [(kind, length) for kind in self.passes for length in self.lengths]
        return contenders * (1 + sum(1 + self.probes(kind, length) for kind, length in kinds))


def bench_attention(plan: Plan, workload: Workload, *, on_step: Callable[[Step], None] | None = None) -> AttentionBench:
    """The result: environment, sizes, and a row for each contender, pass and length."""
    entrants = choose(contenders(workload), plan.names)
    report = Reporter(on_step, total=plan.steps(len(entrants)))
    faults: dict[str, str] = {}
    for name, entrant in entrants.items():
        report.step(f"checking {name}")
        if (found := fault(entrant, workload)) is not None:
            faults[name] = found
    able = {name: entrant for name, entrant in entrants.items() if name not in faults}
    if BASELINE in faults:
        raise ValueError(f"the baseline, {BASELINE}, fails its correctness case: {faults[BASELINE]}")
    rows: list[AttentionRow] = []
    for kind in plan.passes:
        lasted: dict[str, AttentionRow] = {}
        for length in sorted(plan.lengths):
            work = replace(workload, length=length, queries=1 if kind == "decode" else None)
            asked = {
                name: entrant
                for name, entrant in able.items()
                if takes_part(entrant, kind, length)
                and (name == BASELINE or predicted_seconds(lasted.get(name), length) <= plan.seconds)
            }
            measured = measure_length(asked, kind, work, plan, report)
            lasted |= {row.name: row for row in measured}
            rows += measured
            report.skip_to_end_of(length)
    return AttentionBench(
        environment=replace(environment(), device=find_device(workload.device).description),
        workload=sizes_of(workload),
        baseline=BASELINE,
        faults=faults,
        unchecked=tuple(name for name, entrant in entrants.items() if entrant.law is None),
        matmul_gflops=matmul_gflops(workload),
        rows=tuple(rows),
    )


def sizes_of(workload: Workload) -> WorkloadSizes:
    """The sizes of the calls as the result file holds them: without the length, which each row has."""
    sizes = {name: value for name, value in asdict(workload).items() if name not in ("length", "queries")}
    return WorkloadSizes.from_json(sizes | {"dtype": str(workload.dtype), "device": str(workload.device)})


def find_passes(text: str) -> tuple[Pass, ...]:
    """The passes in a text such as forward,decode; ValueError for an unknown one."""
    found = tuple(known for known in PASSES if known in text.split(","))
    if len(found) != len(text.split(",")):
        raise ValueError(f"--pass takes {', '.join(PASSES)}, separated by commas; got {text!r}")
    return found


class Reporter:
    """Counts steps for a progress bar."""

    def __init__(self, on_step: Callable[[Step], None] | None, *, total: int) -> None:
        self.on_step, self.total, self.done = on_step, total, 0

    def step(self, doing: str, steps: int = 1) -> None:
        self.done += steps
        if self.on_step is not None:
            self.on_step(Step(self.done, self.total, doing))

    def skip_to_end_of(self, length: int) -> None:
        if self.on_step is not None:
            self.on_step(Step(self.done, self.total, f"n = {length} done"))


def choose(found: dict[str, Contender], names: Sequence[str] | None) -> dict[str, Contender]:
    """The baseline and the contenders of those names."""
    if names is None:
        return found
    for name in names:
        if name not in found:
            raise ValueError(f"unknown contender {name!r}; known are {', '.join(found)}")
    return {name: entrant for name, entrant in found.items() if name in names or name == BASELINE}


def takes_part(entrant: Contender, kind: Pass, length: int) -> bool:
    """Whether a contender can run this pass at this length."""
    if length > entrant.longest:
        return False
    return {"forward": True, "training": entrant.backward, "decode": entrant.decodes}[kind]


def predicted_seconds(row: AttentionRow | None, length: int) -> float:
    """How long a run may take, if time grows with the square of the length from the last one that was measured."""
    return 0.0 if row is None else row.seconds * (length / row.length) ** 2


def measure_length(
    asked: dict[str, Contender], kind: Pass, work: Workload, plan: Plan, report: Reporter
) -> list[AttentionRow]:
    """Time and memory of all contenders at one length."""
    inputs, device = make_inputs(work), find_device(work.device)
    # The first run of each warms it up and tells how long a run takes.
    single = {name: device.seconds(one_run(entrant, kind, inputs)) for name, entrant in asked.items()}
    # Short runs are repeated within a turn, so that a turn is long compared with the clock's resolution and with a
    # short disturbance.
    repeats = {name: max(1, min(1000, round(0.02 / seconds))) for name, seconds in single.items()}
    runs = {name: many_runs(one_run(entrant, kind, inputs), repeats[name]) for name, entrant in asked.items()}
    rounds = max(1, min(plan.rounds, int(60 / max(sum(single.values()), 1e-9))))
    times = take_turns(runs, rounds=rounds, device=device, warm_up=rounds > 1)
    report.step(f"{kind}, n = {work.length}: timed", steps=len(asked))
    del inputs, runs
    probes = plan.probes(kind, work.length)
    taken: dict[str, int] = {}
    for name in asked:
        report.step(f"{kind}, n = {work.length}: memory of {name}", steps=int(probes))
        if probes:
            taken[name] = peak_bytes(name, kind, work)
    return [
        AttentionRow(
            name=name,
            kind=kind,
            length=work.length,
            seconds=times[name].median / repeats[name],
            spread=times[name].spread,
            rounds=rounds,
            speedup=speedup(times[BASELINE], repeats[BASELINE], times[name], repeats[name]),
            peak_bytes=taken.get(name),
            memory_ratio=taken[name] / taken[BASELINE] if taken.get(BASELINE) else None,
        )
        for name in asked
    ]


def speedup(baseline: Times, baseline_repeats: int, times: Times, repeats: int) -> float:
    """The median over rounds of the baseline's time divided by the contender's."""
    return baseline.speedup_of(times) / baseline_repeats * repeats


def many_runs(run: Callable[[], object], repeats: int) -> Callable[[], None]:
    """The run, repeated that many times."""

    def repeated() -> None:
        for _ in range(repeats):
            run()

    return repeated


def one_run(entrant: Contender, kind: Pass, inputs: Inputs) -> Callable[[], object]:
    """A forward pass, or a forward and backward pass to every leaf that the output depends on."""

    def forward() -> object:
        with torch.no_grad():
            return entrant.run(inputs)

    def training() -> object:
        output = entrant.run(inputs)
        return torch.autograd.grad(output, list(inputs.leaves().values()), inputs.cotangent, allow_unused=True)

    return training if kind == "training" else forward


def peak_bytes(name: str, kind: Pass, work: Workload) -> int:
    """Peak additional memory of one run, measured in its own process."""
    task: dict[str, object] = {
        "name": name,
        "pass": kind,
        "threads": torch.get_num_threads(),
        "workload": asdict(work) | {"dtype": str(work.dtype).removeprefix("torch."), "device": str(work.device)},
    }
    answer = in_own_process("varifocal.bench.attention.memory_probe", task, timeout=1800)
    return int(str(answer["peak_bytes"]))


def matmul_gflops(workload: Workload) -> float:
    """The speed of torch's own matrix product in the same type: the limit for anything built from products."""
    size = 2048
    matrix = torch.randn(size, size, device=workload.device, dtype=workload.dtype)
    times = take_turns({"matmul": lambda: matrix @ matrix}, rounds=5, device=find_device(workload.device))
    return 2 * size**3 / times["matmul"].median / 1e9
