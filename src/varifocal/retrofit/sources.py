"""Opens a checkpoint that transformers can read (folder, hub, GGUF), complete and without pickle, or says why not."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.integrations.gguf import read_gguf_metadata
from transformers.utils import cached_file

from varifocal.attention.mechanisms.registry import nearest
from varifocal.model.checkpoints import check_report, one_line, only_errors

UNREADABLE = (
    OSError, SafetensorError, RuntimeError, KeyError, IndexError, ValueError, TypeError, struct.error,
    StrictDataclassError, AttributeError, UnboundLocalError, OverflowError, MemoryError,
)  # fmt: skip
"""What readers are known to raise on damaged or foreign files."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is, in the terms of transformers."""

    folder: str
    """A folder, or a name on the hub."""
    gguf_file: str | None
    """For GGUF, the name of the file in the folder."""
    local: bool

    def __str__(self) -> str:
        return self.folder if self.gguf_file is None else f"{self.folder}/{self.gguf_file}"

    def where(self) -> dict[str, Any]:
        """The arguments of from_pretrained for this place."""
        return {"local_files_only": self.local} | ({} if self.gguf_file is None else {"gguf_file": self.gguf_file})


def find_place(source: str | Path) -> Place:
    """The place of a folder, hub name or GGUF file; ValueError for anything else."""
    path = Path(source)
    if path.is_dir():
        return Place(str(path), None, True)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file; give the folder that holds it, or a .gguf file")
        return Place(str(path.parent), path.name, True)
    owner, *rest = str(source).split("/")
    if owner and owner not in (".", "..", "~") and all(rest):
        if str(source).endswith(".gguf") and len(rest) >= 2:
            return Place(f"{owner}/{rest[0]}", "/".join(rest[1:]), False)
        if len(rest) == 1 and not str(source).endswith(".gguf"):
            return Place(str(source), None, False)
    raise ValueError(
        f"{source} does not exist; expected a folder with safetensors, a .gguf file, or owner/name on the hub"
    )


def open_source(source: str | Path, families: Iterable[str], *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """transformers' own model of a checkpoint, in evaluation mode.

    Args:
        source: a folder or a name on the hub with safetensors; or a .gguf file, also as owner/name/file.gguf.
        families: the model types that are accepted.
        dtype: the dtype of the weights; None for the one they were saved in (float32 for GGUF).
    """
    place = find_place(source)
    if place.gguf_file is None:
        refuse_pickle(place)
    else:
        require_gguf()
    config = read_foreign_config(place, families)
    saved: Any = "auto" if place.gguf_file is None else torch.float32
    try:
        with only_errors():
            model, report = AutoModelForCausalLM.from_pretrained(
                place.folder,
                config=config,
                dtype=saved if dtype is None else dtype,
                use_safetensors=True if place.gguf_file is None else None,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **place.where(),
            )
    except UNREADABLE as error:
        raise ValueError(f"the weights of {place} cannot be read: {one_line(error)}") from error
    check_report(Path(str(place)), report)
    opened: PreTrainedModel = model.eval()
    return opened


def read_foreign_config(place: Place, families: Iterable[str]) -> PretrainedConfig:
    """The config of a checkpoint of one of the families; ValueError otherwise."""
    known = list(families)
    try:
        with only_errors():
            config = AutoConfig.from_pretrained(place.folder, **place.where())
    except UNREADABLE as error:
        reason = one_line(error)
        if place.local:
            raise ValueError(f"the config of {place} cannot be read: {reason}") from error
        raise ValueError(
            f"{place} cannot be fetched from the hub: {reason}; give a folder or a .gguf file on this machine"
        ) from error
    family = config.model_type
    if family not in known:
        raise ValueError(
            f"{place} has the unknown architecture {family!r}{nearest(family, known)}; known are {', '.join(known)}"
        )
    if place.gguf_file is not None:
        complete_gguf_config(place, config)
    return config


def read_tokenizer(source: str | Path) -> Any | None:
    """The tokenizer beside or inside a checkpoint; None if there is none."""
    place = find_place(source)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if place.local and place.gguf_file is None and not any((Path(place.folder) / name).is_file() for name in names):
        return None
    try:
        with only_errors():
            return AutoTokenizer.from_pretrained(place.folder, **place.where())
    except (*UNREADABLE, ImportError) as error:
        raise ValueError(f"the tokenizer of {place} cannot be read: {one_line(error)}") from error


def refuse_pickle(place: Place) -> None:
    """ValueError for a folder whose weights could run code when they are read."""
    if not place.local:
        return
    folder = Path(place.folder)
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} has its weights only as pickle ({pickled[0]}), which can run code when it is read; "
            "convert them to safetensors first"
        )


def require_gguf() -> None:
    """ValueError if the packages that read GGUF are not installed."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"reading GGUF needs the package {' and '.join(missing)}; install it with: pip install 'varifocal[gguf]'"
        )


def complete_gguf_config(place: Place, config: PretrainedConfig) -> None:
    """Fill in what transformers does not take from a GGUF file's header, and refuse what it drops."""
    path = cached_file(place.folder, place.gguf_file, local_files_only=place.local)
    header, tensors = read_gguf_metadata(path)
    architecture = header["general.architecture"]
    scaled = header.get(f"{architecture}.rope.scaling.type", "none") != "none"
    if scaled or any(name.startswith("rope_freqs") for name in tensors):
        raise ValueError(
            f"{place} scales its rotary positions, which transformers drops when it reads GGUF; "
            "use the checkpoint's safetensors"
        )
    width = header.get(f"{architecture}.attention.key_length")
    if width is not None:
        config.head_dim = int(width)
