"""Gives a pretrained model adaptive attention in such a way that it starts as the model it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from varifocal.attention.mechanisms.registry import make_mechanism, mechanism_type
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.model.reading import only_errors
from varifocal.model.writing import WRITE_ERRORS, why_unwritten
from varifocal.retrofit.dense_start import foreign_share, start_as_dense, starting_options
from varifocal.retrofit.families import FAMILIES, take_over, translate_config
from varifocal.retrofit.sources import open_source, read_tokenizer

LONGEST = 2048
"""The longest context for which options are made if none is given."""


@dataclass(frozen=True, eq=False)
class Retrofitted:
    """A model with another mechanism, and what it came from."""

    model: VarifocalForCausalLM
    source: PreTrainedModel
    """transformers' model of the checkpoint; it shares no weights with the new one."""
    tokenizer: Any | None
    options: dict[str, Any]
    """All options of the mechanism."""
    context: int
    share: float | None
    """The share of the attention that is not dense at the start, as `foreign_share` promises it."""

    def promise(self) -> str:
        """The promise in a sentence."""
        if self.share is None:
            return f"no promise: it does not start as dense attention on texts of {self.context} tokens"
        if self.share == 0:
            return f"starts as dense attention, to rounding, on texts of up to {self.context} tokens"
        return (
            f"starts as dense attention but for a share of {self.share:.1e} of every head's output, "
            f"on texts of up to {self.context} tokens"
        )


def retrofit(
    source: str | Path,
    *,
    mechanism: str,
    options: Mapping[str, Any] | None = None,
    context: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Retrofitted:
    """A pretrained model with a mechanism in every layer, started as dense attention where the mechanism can.

    Args:
        source: as in load_pretrained.
        mechanism: the stem of the mechanism.
        options: its options, laid over those of `starting_options`.
        context: the longest text on which the model must start as it was; by default the model's own, up to 2048.
        dtype: the dtype of the weights; None for the one they were saved in.
        seed: the seed of the new parameters.
    """
    mechanism_type(mechanism)
    if context is not None and context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    model = open_source(source, FAMILIES, dtype=dtype)
    sizes = translate_config(model.config)
    # Refuses a mechanism that cannot take the place of the model's own windows.
    translate_config(model.config, mechanism=mechanism)
    if context is None:
        context = min(LONGEST, sizes.max_position_embeddings)
    settled = starting_options(mechanism, sizes, context=context, options=options or {})
    alone = make_mechanism(mechanism, sizes.head_shape(), **settled)
    alone.start_as_dense()
    share = foreign_share(alone, context)
    torch.manual_seed(seed)
    ours = take_over(model, mechanism=mechanism, mechanism_options=settled or None)
    start_as_dense(ours)
    return Retrofitted(ours, model, read_tokenizer(source), settled, context, share)


def refuse_existing(folder: Path) -> None:
    """ValueError if the folder exists already, or if its parent does not."""
    if folder.exists():
        raise ValueError(f"{folder} exists already; choose another name, or remove it first")
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"cannot write {folder}: the folder {folder.parent} does not exist; create it first")


def save_model(
    model: VarifocalForCausalLM,
    folder: Path,
    *,
    tokenizer: Any | None = None,
    also: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Save a model and its tokenizer as a new folder that appears complete or not at all.

    Args:
        model: the model.
        folder: must not exist.
        tokenizer: of transformers.
        also: writes what else belongs into the folder that it is given.
    """
    refuse_existing(folder)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        with only_errors():
            model.save_pretrained(beside)
            if tokenizer is not None:
                tokenizer.save_pretrained(beside)
        also(beside)
        beside.rename(folder)
    except WRITE_ERRORS as error:
        raise ValueError(f"{folder} cannot be written: {why_unwritten(error)}; make room, and try again") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
