"""Loads a saved model completely, or says in one sentence why it cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varifocal.device import find_dtype
from varifocal.model.config import VarifocalConfig
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.model.reading import one_line, only_errors, readable
from varifocal.model.saved_weights import require_as_large, tensor_names, weight_files
from varifocal.model.weights import check_kind, with_weights


def load_model(
    path: str | Path, *, dtype: torch.dtype | None = None, weights: str | None = None
) -> VarifocalForCausalLM:
    """The model saved in a folder by save_pretrained, in evaluation mode.

    transformers' from_pretrained fills in what a checkpoint lacks with random numbers; here that is a ValueError.

    Args:
        path: the folder.
        dtype: of the weights; None for the one they were saved in.
        weights: how they are held, float32 or int8 (a quarter of the memory); None for as they were saved.
    """
    check_kind(weights, dtype)
    folder = Path(path)
    config = read_config(folder)
    files = weight_files(folder)
    names, size = tensor_names(files), sum(file.stat().st_size for file in files)
    require_as_large(folder, config.num_hidden_layers, lambda: VarifocalForCausalLM(config), names=names, size=size)
    with readable(f"the weights in {folder}"), only_errors():
        model, report = VarifocalForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    check_report(folder, report)
    return with_weights(model, weights)


def read_config(folder: Path) -> VarifocalConfig:
    """The config of a model's folder; ValueError unless it is one of ours."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} holds no model: there is no config.json in it")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {one_line(error)}") from error
    except RecursionError as error:
        raise ValueError(f"{file} is nested too deeply") from error
    ours = VarifocalConfig.model_type
    if not isinstance(values, dict) or values.get("model_type") != ours:
        kind = values.get("model_type") if isinstance(values, dict) else None
        raise ValueError(f"{file} is of a model of type {kind!r}, expected {VarifocalConfig.model_type!r}")
    with readable(str(file)):
        refuse_redirection(values)
        for name in ("dtype", "torch_dtype"):
            if values.get(name) is not None:
                find_dtype(str(values[name]))
        config: VarifocalConfig = VarifocalConfig.from_dict(values)
    return config


def refuse_redirection(values: Mapping[str, Any]) -> None:
    """ValueError for a config that names other weights than those that lie in its folder under their usual name."""
    if values.get("transformers_weights") is not None:
        raise ValueError(
            f"it names the weights {values['transformers_weights']!r} in transformers_weights; name them "
            "model.safetensors and leave that out"
        )


def check_report(folder: Path, report: dict[str, Any]) -> None:
    """ValueError if a tensor was missing, unknown or of another shape."""
    check_shapes(folder, report)
    if report["missing_keys"]:
        raise ValueError(f"the weights in {folder} are incomplete, these are missing: {some(report['missing_keys'])}")
    if report["unexpected_keys"]:
        raise ValueError(
            f"the weights in {folder} hold what a model of its config does not have: {some(report['unexpected_keys'])}"
        )


def filled_model(
    config: VarifocalConfig, weights: dict[str, Tensor], *, dtype: torch.dtype, where: str
) -> tuple[VarifocalForCausalLM, dict[str, Any]]:
    """A model with these weights, and transformers' report of what fits; ValueError if a tensor has another shape.

    Args:
        config: of the model.
        weights: by name, as in its state_dict.
        dtype: of the model's weights.
        where: where they come from, for messages.
    """
    with readable(f"the weights in {where}"), only_errors():
        model, report = VarifocalForCausalLM.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    check_shapes(where, report)
    return model, report


def check_shapes(where: object, report: dict[str, Any]) -> None:
    """ValueError if a tensor was of another shape."""
    mismatched = [
        f"{name} has shape {tuple(found)} and should have {tuple(wanted)}"
        for name, found, wanted in sorted(report["mismatched_keys"])
    ]
    if mismatched:
        raise ValueError(f"the weights in {where} do not have the sizes of its config: {some(mismatched)}")


def some(names: Iterable[str], most: int = 3) -> str:
    """The first few of the names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
