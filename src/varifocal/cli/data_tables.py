"""What the verbs of `varifocal data` share: the packages they need, and the table of splits."""

from __future__ import annotations

import importlib.util

from rich.console import Console
from rich.markup import escape

from varifocal.cli.tables import print_table
from varifocal.data import PreparedData


def require_packages() -> None:
    """ValueError unless the packages of the extra `data` are installed."""
    missing = [name for name in ("datatrove", "orjson", "pyarrow", "tokenizers") if not importlib.util.find_spec(name)]
    if missing:
        raise ValueError(f"this needs {', '.join(missing)}; install with: pip install 'varifocal[data]'")


def print_splits(console: Console, prepared: PreparedData) -> None:
    """Print the documents, tokens and bytes of each split, what was left out, and the tokenizer."""
    manifest = prepared.manifest
    table = [["split", "documents", "tokens", "bytes", "bytes per token"]]
    for name, split in manifest.splits.items():
        ratio = f"{split.bytes / split.tokens:.2f}" if split.tokens else ""
        table.append([name, f"{split.documents:,}", f"{split.tokens:,}", f"{split.bytes:,}", ratio])
    print_table(console, None, table)
    empty, replaced = (manifest.skipped.get(name, 0) for name in ("empty", "replaced"))
    if empty:
        console.print(f"{empty:,} documents without text were left out", highlight=False)
    if replaced:
        console.print(f"invalid characters were replaced in {replaced:,} documents", highlight=False)
    entry = manifest.tokenizer
    console.print(
        f"tokenizer {escape(entry.name)}, {entry.vocabulary:,} tokens, {entry.fingerprint[:12]}; "
        f"data {prepared.fingerprint[:12]}",
        highlight=False,
    )
