"""varifocal analyze: what a model's heads read and what its gates decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from varifocal.cli.files import require_folder, write_atomically
from varifocal.cli.tables import print_table, progress_bar

if TYPE_CHECKING:
    from varifocal.data import PreparedData
    from varifocal.model import VarifocalForCausalLM


def analyze(
    model: Annotated[
        str,
        typer.Argument(
            help="A run, a model's folder, or a pretrained Qwen3, Qwen2 or Llama (folder, .gguf, hub name)."
        ),
    ],
    data: Annotated[Path, typer.Option(help="A data set made by `varifocal data prepare` with the model's tokenizer.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file to write. Default: analysis/SPLIT.json in the run.", dir_okay=False),
    ] = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "validation",
    length: Annotated[int | None, typer.Option(min=2, help="Tokens of a row; default: the model's context.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to read, in rows spread over the split.")] = 32_768,
    window: Annotated[
        int | None, typer.Option(min=1, help="Keys that count as near. Default: the mechanism's, or length / 8.")
    ] = None,
    k_scale: Annotated[
        float | None, typer.Option(min=0, help="c of k = c sqrt(n). Default: the mechanism's, or 1.")
    ] = None,
    resamples: Annotated[int, typer.Option(min=2, help="Resamplings of the documents, for the intervals.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Of the resampling.")] = 0,
    tables: Annotated[bool, typer.Option(help="Print the tables, and not the conclusions alone.")] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
) -> None:
    """How much of dense attention a window and top-k recover, and what gates do at which tokens.

    For each head the share of its attention mass in the window and on the best k keys: is it local or global? For
    gates, widths and chosen keys the mean by kind of token, by position, and where the text beyond the window helps;
    with 95 % intervals over documents and p-values corrected for all that is asked. `varifocal report` shows it all.

    \b
    varifocal analyze runs/demo/cells/head_gated-seed0/model --data runs/demo/data
    varifocal analyze runs/demo/cells/dense-seed0 --data runs/demo/data --window 64
    varifocal analyze Qwen/Qwen3-0.6B --data data/fineweb-qwen --length 2048 -o qwen.json
    """
    from varifocal.analysis.analyze import AnalysisPlan
    from varifocal.analysis.analyze import analyze as measure
    from varifocal.data import open_data
    from varifocal.report.analysis import Analysis, all_tables, findings, gain_sentence

    plan = AnalysisPlan(
        split=split, length=length, tokens=tokens, window=window, k_scale=k_scale, resamples=resamples, seed=seed
    )
    out = default_file(model, split) if out is None else out
    if out is not None:
        require_folder(out.parent if out.parent.name == "analysis" else out)
    if threads is not None:
        torch.set_num_threads(threads)
    opened = open_data(data)
    loaded = open_model(model, opened)
    with progress_bar() as progress:
        task = progress.add_task(f"{split} of {data.name}", total=None)
        content = measure(
            loaded, opened, plan, on_row=lambda done, total: progress.update(task, completed=done, total=total)
        )
    content["model"] = model
    found = Analysis(content, Path() if out is None else out)
    console = Console(highlight=False)
    console.print(escape(found.setting()), soft_wrap=True)
    for title, table in all_tables(found) if tables else ():
        print_table(console, title, table)
    for sentence in (*findings(found), gain_sentence(found)):
        console.print(escape(sentence), soft_wrap=True)
    if out is None:
        console.print(f"\nnot kept: {escape(model)} lies in no run; -o FILE writes it to a file", soft_wrap=True)
        return
    out.parent.mkdir(exist_ok=True)
    write_atomically(out, json.dumps(content) + "\n")
    console.print(f"\nwritten to {escape(str(out))}; 'varifocal report' shows it", soft_wrap=True)


def default_file(model: str, split: str) -> Path | None:
    """analysis/SPLIT.json of the run that the model is of; None if it is of none."""
    for run in (Path(model), Path(model).parent):
        if (run / "config.toml").is_file() and (run / "model").is_dir():
            return run / "analysis" / f"{split}.json"
    return None


def open_model(name: str, data: PreparedData) -> VarifocalForCausalLM:
    """The model of a run, of a folder of ours, or a pretrained one as it is; ValueError if its tokens are others."""
    from varifocal.data.tokenizers import load_tokenizer
    from varifocal.model import load_model
    from varifocal.retrofit import load_pretrained

    folder = Path(name)
    if (folder / "config.toml").is_file() and (folder / "model").is_dir():
        folder = folder / "model"
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        kind = None
    loaded = load_model(folder) if kind == "varifocal" else load_pretrained(name, dtype=torch.float32)
    if (folder / "tokenizer.json").is_file():
        entry = data.manifest.tokenizer
        own = load_tokenizer(folder / "tokenizer.json", name=str(folder / "tokenizer.json"), end_token=entry.end_token)
        data.require_tokenizer(own.fingerprint)
    if data.manifest.tokenizer.vocabulary > loaded.config.vocab_size:
        raise ValueError(
            f"{data.folder} has {data.manifest.tokenizer.vocabulary} different tokens, {name} knows "
            f"{loaded.config.vocab_size}; prepare the data with the model's tokenizer"
        )
    return loaded
