"""A pilot of a comparison: two seeds of two arms, and what they say about the power of the whole."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from varifocal.data import PackedRows, open_data
from varifocal.environment import environment
from varifocal.experiments.comparison import OnProgress, TrainCells, compare, is_finished, require_same
from varifocal.experiments.comparison_plan import Cell, ComparisonPlan
from varifocal.model.loss import next_token_labels
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.results.comparison import CellRecord, PlanRecord, cell_folder, cell_name
from varifocal.results.pilot import ContextWorth, Pilot
from varifocal.results.run import MODEL
from varifocal.statistics.comparison import Comparison, gather_comparison
from varifocal.statistics.estimates import estimate
from varifocal.statistics.power import EFFECTS, needed_seeds
from varifocal.statistics.student import deviation_limit
from varifocal.training.context_gain import labelled_losses, windowed_losses
from varifocal.training.micro_batches import token_labels
from varifocal.training.opening import open_model_for

SEEDS = 2
SHORTEST = 8
"""The shortest window that is asked about, in tokens."""
ROWS, TOKENS = 64, 65_536
"""At most so many rows and tokens of the validation split tell what far text is worth."""


def pilot_plan(plan: ComparisonPlan) -> ComparisonPlan:
    """The baseline, the first other arm and two seeds of a comparison."""
    others = [arm for arm in plan.arms if arm.name != plan.baseline]
    if not others:
        raise ValueError(f"a pilot needs an arm beside the baseline {plan.baseline!r}; add one to the mechanisms")
    if len(plan.seeds) < SEEDS:
        raise ValueError(
            f"a pilot needs {SEEDS} seeds to tell their spread, got {list(plan.seeds)}; give seeds = [0, 1] or "
            "--seeds 0,1"
        )
    arms = tuple(arm for arm in plan.arms if arm.name in (plan.baseline, others[0].name))
    return replace(plan, arms=arms, seeds=plan.seeds[:SEEDS])


def run_pilot(
    plan: ComparisonPlan,
    out: Path,
    *,
    workers: int = 1,
    on_progress: OnProgress | None = None,
    train_cells: TrainCells | None = None,
) -> tuple[Pilot | None, dict[str, str]]:
    """Run the pilot's cells in the comparison's folder, where the comparison itself finds them later.

    Returns pilot.json's content, None if a cell failed, and the reason of each failed cell.
    """
    small = pilot_plan(plan)
    if not all(is_finished(out, cell.name) for cell in small.cells()):
        outcome = compare(small, out, workers=workers, on_progress=on_progress, train_cells=train_cells)
        if outcome.failed:
            return None, outcome.failed
    # The comparison itself may have been there before.
    stored = PlanRecord.read(out / PlanRecord.filename)
    require_same(plan.record(workers=workers, environment=environment()), stored, out)
    pilot = weigh(plan, small, only(gather_comparison(out), small), context=context_worth(small, out))
    pilot.write(out / Pilot.filename)
    return pilot, {}


def only(found: Comparison, small: ComparisonPlan) -> Comparison:
    """The cells of the pilot among those of the folder."""
    names = {cell.name for cell in small.cells()}
    kept = tuple(cell for cell in found.record.cells if cell_name(cell.arm, cell.seed) in names)
    return Comparison(replace(found.record, cells=kept, seeds=small.seeds))


def weigh(
    plan: ComparisonPlan, small: ComparisonPlan, found: Comparison, *, context: tuple[ContextWorth, ...]
) -> Pilot:
    """What the finished cells of the pilot say about the plan."""
    arm = next(one.name for one in small.arms if one.name != plan.baseline)
    results = {result.name: result for result in found.results}
    difference = results[arm].difference
    assert difference is not None
    assert difference.deviation is not None
    limit, differences = deviation_limit(difference.deviation, difference.count - 1), len(plan.arms) - 1
    effects = sorted({*EFFECTS, *([] if plan.smallest_effect is None else [plan.smallest_effect])}, reverse=True)
    return Pilot(
        environment=environment(),
        baseline=plan.baseline,
        arm=arm,
        seeds=small.seeds,
        losses={name: result.validation_loss for name, result in results.items()},
        difference=difference,
        spread_limit=limit,
        length=plan.base.optimization.length,
        context=context,
        planned_seeds=len(plan.seeds),
        planned_differences=differences,
        planned_cells=len(plan.cells()),
        seconds=statistics.fmean(map(training_seconds, found.record.cells)),
        smallest_effect=plan.smallest_effect,
        # A spread of 0 says that the arms do not differ, not that every effect shows.
        needed=()
        if not difference.deviation
        else needed_seeds(effects, spread=difference.deviation, limit=limit, comparisons=differences),
    )


def training_seconds(cell: CellRecord) -> float:
    """Of the processor, where they are known."""
    return cell.seconds if cell.processor_seconds is None else cell.processor_seconds


@torch.no_grad()
def context_worth(small: ComparisonPlan, out: Path) -> tuple[ContextWorth, ...]:
    """How much the loss of the baseline's first model rises on the validation split if far text is taken away."""
    cell = Cell(arm=next(arm for arm in small.arms if arm.name == small.baseline), seed=small.seeds[0])
    path = small.base.data.path or str(out / "data")
    data, length = open_data(path), small.base.optimization.length
    model = open_model_for(cell_folder(out, cell.name) / MODEL, data)
    rows = data.split("validation").rows(length=length)
    count = min(len(rows), ROWS, max(2, TOKENS // length))
    windows = [length // share for share in (32, 16, 8, 4, 2) if length // share >= SHORTEST]
    rises: dict[int, list[float]] = {window: [] for window in windows}
    for number in range(count):
        for window, rise in row_rises(model, rows, number * len(rows) // count, windows):
            rises[window].append(rise)
    return tuple(ContextWorth(window=window, worth=estimate(found)) for window, found in rises.items() if found)


def row_rises(
    model: VarifocalForCausalLM, rows: PackedRows, number: int, windows: list[int]
) -> Iterator[tuple[int, float]]:
    """For each window the mean rise of the loss over a row's predictions; nothing for a row without any."""
    batch = rows.batch([number])
    ids, documents, positions = (torch.from_numpy(part).to(model.device) for part in batch[:3])
    labels = next_token_labels(token_labels(rows, [number], ids), documents)
    hidden = model.model(input_ids=ids, documents=documents, position_ids=positions, use_cache=False).last_hidden_state
    full = labelled_losses(model, hidden, labels)[0]
    for window in windows:
        rise = (windowed_losses(model, ids[0], documents[0], window=window, labels=labels[0]) - full).nanmean()
        if not rise.isnan():
            yield window, float(rise)
