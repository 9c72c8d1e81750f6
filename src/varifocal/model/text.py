"""The tokenizer that lies beside a model, and text as it is generated."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast, TextStreamer

from varifocal.model.reading import readable


def load_text_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer.json of a model's folder, as transformers uses it; ValueError if there is none or it is broken."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} holds no tokenizer: there is no tokenizer.json in it")
    with readable(f"the tokenizer in {folder}"):
        if (Path(folder) / "tokenizer_config.json").is_file():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        else:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
    if tokenizer.eos_token is None:
        tokenizer.eos_token = end_of_document(Path(folder), tokenizer)
    return tokenizer


def end_of_document(folder: Path, tokenizer: PreTrainedTokenizerFast) -> str | None:
    """The token that ends a document, as the model's config names it; a bare tokenizer.json does not say."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    end = found[0] if isinstance(found, list) and found else found
    return str(tokenizer.convert_ids_to_tokens(end)) if isinstance(end, int) and 0 <= end < len(tokenizer) else None


def printing_streamer(tokenizer: PreTrainedTokenizerFast) -> TextStreamer:
    """Prints what `generate` adds to a prompt, as soon as whole words are there."""
    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
