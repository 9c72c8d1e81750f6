"""What a training run will take with each of several mechanisms, as a result that can be saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from varifocal.model.presets import preset as preset_config
from varifocal.plan.hardware import find_precision
from varifocal.plan.plan import Prediction, Training, find_variants, predict
from varifocal.results.hardware import Assumptions, Hardware
from varifocal.results.prediction import PlanPrediction, PredictionRecord, TrainingSizes


def predict_all(
    preset: str,
    hardware: Hardware,
    *,
    names: Sequence[str] | None = None,
    tokens: float = 1e10,
    context: int | None = None,
    batch: int = 512,
    devices: int = 1,
    micro_batch: int | None = None,
    precision: str = "bfloat16",
    checkpointing: bool = False,
    price: float | None = None,
) -> PlanPrediction:
    """What training a preset takes with each mechanism.

    Args:
        preset: the sizes of the model.
        hardware: the device; on a measured one, mechanisms that were not measured are left out.
        names: names of mechanisms; None for all.
        tokens: tokens to train on.
        context: tokens per row; None for the preset's.
        batch: rows per optimizer step, over all devices.
        devices: number of devices, data parallel.
        micro_batch: rows that a device computes at once; None for the most that fit.
        precision: the precision of the products.
        checkpointing: keep only the input of each layer, and compute the rest twice.
        price: dollars an hour for one device; None for the table's.
    """
    given = Assumptions()
    length = {} if context is None else {"max_position_embeddings": context}
    found: dict[str, Prediction] = {}
    for name, (stem, options) in find_variants(names).items():
        if names is None and hardware.measured and name not in hardware.attention:
            continue
        config = preset_config(preset, mechanism=stem, mechanism_options=options, **length)
        training = Training(
            config=config,
            tokens=tokens,
            length=config.max_position_embeddings,
            batch=batch,
            devices=devices,
            micro_batch=micro_batch,
            precision=find_precision(precision),
            checkpointing=checkpointing,
        )
        found[name] = predict(training, hardware, given, price=price)
    if not found:
        raise ValueError(f"{hardware.name} was not measured with {', '.join(names or ())}; name another mechanism")
    return PlanPrediction(
        training=sizes_of(training),
        hardware=hardware,
        assumptions=given,
        predictions={name: record_of(one) for name, one in found.items()},
    )


def sizes_of(training: Training) -> TrainingSizes:
    """The training run without its model."""
    wanted = {one.name: getattr(training, one.name) for one in fields(training) if one.name != "config"}
    return TrainingSizes(**wanted)


def record_of(found: Prediction) -> PredictionRecord:
    """A prediction together with the sums of its parts."""
    return PredictionRecord(
        **(asdict(found) | {"peak": found.peak, "fits": found.fits, "step_seconds": found.step_seconds})
    )
