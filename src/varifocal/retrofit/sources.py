"""Opens a checkpoint that transformers can read (folder, hub, GGUF), complete and without pickle, or says why not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.integrations.gguf import read_gguf_metadata
from transformers.utils import cached_file

from varifocal.attention.mechanisms.registry import nearest
from varifocal.model.checkpoints import check_report, refuse_redirection
from varifocal.model.config import check_sizes
from varifocal.model.reading import one_line, only_errors, readable
from varifocal.model.saved_weights import INDEX, index_names, require_as_large, tensor_names, weight_files
from varifocal.results.files import read_json
from varifocal.retrofit.packaged import PACKAGED, packaged_file

GGUF_SIZES = {
    "num_hidden_layers": "block_count", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "vocab_size": "vocab_size", "max_position_embeddings": "context_length",
}  # fmt: skip
"""The sizes of a model by their keys in the header of a GGUF file, after its architecture."""


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
    """The place of a folder, hub name, GGUF file or packaged model; ValueError for anything else."""
    path = Path(source)
    if not path.exists() and (packaged := packaged_file(str(source))) is not None:
        path = packaged
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
        f"{source} does not exist; expected a folder with safetensors, a .gguf file, owner/name on the hub, or "
        f"{' or '.join(PACKAGED)}"
    )


def open_source(source: str | Path, families: Iterable[str], *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """transformers' own model of a checkpoint, in evaluation mode.

    Args:
        source: a folder or a name on the hub with safetensors; a .gguf file, also as owner/name/file.gguf; or the name
            of a model that a package carries (smollm2).
        families: the model types that are accepted.
        dtype: the dtype of the weights; None for the one they were saved in (float32 for GGUF).
    """
    place = find_place(source)
    config = checked_config(place, families)
    saved: Any = "auto" if place.gguf_file is None else torch.float32
    with readable(f"the weights of {place}"), only_errors():
        model, report = AutoModelForCausalLM.from_pretrained(
            place.folder,
            config=config,
            dtype=saved if dtype is None else dtype,
            use_safetensors=True if place.gguf_file is None else None,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
            **place.where(),
        )
    check_report(Path(str(place)), report)
    opened: PreTrainedModel = model.eval()
    return opened


def checked_config(place: Place, families: Iterable[str]) -> PretrainedConfig:
    """The config of a checkpoint of one of the families; ValueError if its weights cannot fill such a model."""
    if place.gguf_file is not None:
        require_gguf()
    config = read_foreign_config(place, families)
    weights = find_weights(place)
    if weights is not None:
        require_as_large(
            place,
            config.num_hidden_layers,
            lambda: AutoModelForCausalLM.from_config(config, trust_remote_code=False),
            names=weights.names,
            size=weights.size,
        )
    return config


def read_foreign_config(place: Place, families: Iterable[str]) -> PretrainedConfig:
    """The config of a checkpoint of one of the families; ValueError otherwise."""
    known = list(families)
    try:
        with readable(f"the config of {place}"), only_errors():
            check_plain_config(place)
            config = AutoConfig.from_pretrained(place.folder, trust_remote_code=False, **place.where())
    except ValueError as error:
        if place.local:
            raise
        reason = one_line(error.__cause__ or error)
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
    with readable(f"the tokenizer of {place}"), only_errors():
        return AutoTokenizer.from_pretrained(place.folder, trust_remote_code=False, **place.where())


@dataclass(frozen=True)
class Weights:
    """What is known about a checkpoint's weights before they are read."""

    names: list[str]
    """The names of the tensors."""
    size: int
    """The size of all tensors in bytes."""


def find_weights(place: Place) -> Weights | None:
    """The weights of a checkpoint on this machine; None for one on the hub, of which the index is checked."""
    if place.local and place.gguf_file is not None:
        path = Path(place.folder) / place.gguf_file
        with readable(f"the weights of {place}"):
            return Weights(list(read_gguf_metadata(str(path))[1]), path.stat().st_size)
    if place.local:
        files = weight_files(Path(place.folder))
        return Weights(tensor_names(files), sum(file.stat().st_size for file in files))
    index = None if place.gguf_file is not None else fetched(place, INDEX)
    if index is not None:
        index_names(index)
    return None


def fetched(place: Place, name: str) -> Path | None:
    """A file of a checkpoint; None if it has none of that name."""
    if place.local:
        path = Path(place.folder) / name
        return path if path.is_file() else None
    found = cached_file(place.folder, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def check_plain_config(place: Place) -> None:
    """ValueError for absurd sizes and for weights outside the folder, before transformers acts on them."""
    path = fetched(place, "config.json" if place.gguf_file is None else place.gguf_file)
    if path is None:
        return
    if place.gguf_file is not None:
        header, _ = read_gguf_metadata(str(path))
        architecture = header["general.architecture"]
        check_sizes({name: header.get(f"{architecture}.{key}") for name, key in GGUF_SIZES.items()})
        return
    values = read_json(path, what="the config of a model")
    if isinstance(values, dict):
        refuse_redirection(values)
        check_sizes(values)


def require_gguf() -> None:
    """ValueError if the packages that read GGUF are not installed."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"reading GGUF needs the package {' and '.join(missing)}; install it with: pip install 'varifocal[gguf]'"
        )


def complete_gguf_config(place: Place, config: PretrainedConfig) -> None:
    """Fill in what transformers does not take from a GGUF file's header, and refuse what it drops."""
    with readable(str(place)):
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
