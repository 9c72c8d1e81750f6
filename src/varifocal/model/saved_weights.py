"""The files that hold a saved model's weights, found and measured before anything is read into memory.

Only safetensors are read, which hold numbers and nothing that could run, and only those inside the model's own folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from varifocal.model.reading import readable
from varifocal.results.files import inside, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
NUMBERS_A_BYTE = 8
"""More numbers than this for each byte of weights no format holds: one bit is the least that a number takes."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a model's folder; ValueError if there are none, or if what lies there would not be used."""
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter (adapter_config.json); merge it into its model first")
    if any(folder.glob("shard-*-model-*.safetensors")):
        raise ValueError(f"{folder} holds the parts of a distributed checkpoint; save it as one model first")
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return indexed_files(folder / INDEX, folder)
    pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} has its weights only as pickle ({pickled[0]}), which can run code when it is read; "
            "convert them to safetensors first"
        )
    raise ValueError(f"the weights in {folder} cannot be read: there is no file named {WEIGHTS} or {INDEX}")


def indexed_files(index: Path, folder: Path) -> list[Path]:
    """The files that an index names; ValueError unless all of them are there."""
    files = [folder / name for name in index_names(index)]
    for file in files:
        if not file.is_file():
            raise ValueError(f"the weights in {folder} are incomplete: {INDEX} names {file.name}, which is missing")
    return files


def index_names(index: Path) -> list[str]:
    """The names of the files in an index; ValueError unless all of them are safetensors in the folder of the index."""
    content = read_json(index, what="an index of weights")
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names or not isinstance(content.get("metadata"), dict):
        raise ValueError(f"{index} is not an index of weights: it needs metadata and a weight_map of tensors to files")
    for name in names.values():
        if inside(index.parent, name, said=index).suffix != ".safetensors":
            raise ValueError(f"{index} names the file {name!r}; only .safetensors are read")
    return sorted(set(names.values()))


def tensor_names(files: Iterable[Path]) -> list[str]:
    """The names of all tensors in safetensors files."""
    names: list[str] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as content:
                names += content.keys()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"the weights in {file} cannot be read: {error}") from error
    return names


def require_as_large(
    where: object, layers: int, make: Callable[[], nn.Module], *, names: Iterable[str], size: int
) -> None:
    """ValueError if a config asks for a model that its weights cannot fill, before any memory is taken for it.

    Args:
        where: the place of the model, for the message.
        layers: how many the config has.
        make: makes the model; it is called on the meta device, where tensors have shapes alone.
        names: of the tensors in the weights.
        size: of the weights in bytes.
    """
    found = max((layer_of(name) for name in names), default=-1) + 1
    if layers > found:
        raise ValueError(f"the weights in {where} are incomplete: they hold {found} layers, the config has {layers}")
    with readable(f"the config in {where}"), torch.device("meta"):
        wanted = sum(parameter.numel() for parameter in make().parameters())
    if wanted > NUMBERS_A_BYTE * size:
        raise ValueError(
            f"the config in {where} asks for a model of {wanted:,} numbers, which weights of {size:,} bytes cannot hold"
        )


def layer_of(name: str) -> int:
    """The number of the layer that a tensor is of, as transformers and GGUF write it; -1 for none."""
    found: Any = re.search(r"(?:^|\.)(?:layers|blk)\.(\d{1,9})\.", name)
    return int(found[1]) if found else -1
