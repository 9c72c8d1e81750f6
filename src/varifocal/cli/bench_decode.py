"""varifocal bench decode: tokens one by one, beside others and beside what memory gives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from varifocal.cli.options import JsonFile, Plot, Rounds, Threads, parse_lengths, require_plots
from varifocal.cli.tables import print_table, shown_steps
from varifocal.report.decode_bench import decode_table, loss_sentence, speculation_sentence
from varifocal.results.files import require_folder
from varifocal.threads import use_threads

if TYPE_CHECKING:
    from varifocal.results.decode_bench import DecodeBench

Source = Annotated[
    str,
    typer.Argument(
        help="A folder of ours, one of transformers' with safetensors, a .gguf file, or smollm2.", show_default=False
    ),
]
Contenders = Annotated[
    list[str] | None,
    typer.Option(
        "--contender",
        "-c",
        help="transformers, 'transformers compiled', 'llama.cpp float32', 'llama.cpp Q8_0', a mechanism, or a mechanism"
        " with int8 weights as 'dense int8'; repeat for several.",
    ),
]
Contexts = Annotated[str, typer.Option(help="Tokens before the decoded ones, separated by commas.")]
Texts = Annotated[
    str, typer.Option("--rows", metavar="N,...", help="Texts decoded at once, separated by commas: 1,4,8.")
]
Prompt = Annotated[
    int, typer.Option(min=0, help="Read contexts up to this one from a prompt; fill longer ones with random keys.")
]
Text = Annotated[
    Path | None,
    typer.Option(
        help="A .parquet file with a column text, or a text: also measure the loss of int8 weights on it, and "
        "speculative generation.",
        dir_okay=False,
    ),
]
LlamaPython = Annotated[
    str | None, typer.Option(metavar="FILE", help="A Python interpreter that has llama-cpp-python. Default: this one.")
]


def decode(
    source: Source,
    contexts: Contexts = "128,2048,8000",
    contender: Contenders = None,
    rows: Texts = "1",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each decodes in a round.")] = 4,
    rounds: Rounds = 10,
    prompt: Prompt = 2048,
    llama_python: LlamaPython = None,
    text: Text = None,
    documents: Annotated[int, typer.Option(min=2, help="Documents of --text.")] = 100,
    length: Annotated[int, typer.Option(min=64, help="Tokens of each document, at most.")] = 512,
    threads: Threads = None,
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Time decoding beside transformers and llama.cpp, all on the same weights and taking turns.

    A token reads every weight once, and the keys and values before it. The table gives tokens a second, the processor
    time of a step over all threads, the bytes that it reads, and what share they are of the bytes that a plain loop
    over memory reads in the same time: 100 % is the limit of the machine. First-token time is that of reading the
    prompt. Our dense model is timed only if its logits are transformers'.

    \b
    varifocal bench decode smollm2 --threads 2
    varifocal bench decode smollm2 --contexts 128,32000 -c dense -c local -c 'dense int8'
    varifocal bench decode smollm2 --rows 1,4,8 --json results/decode.json --plot decode.png
    """
    require_folder(json_file)
    require_folder(plot)
    require_plots(plot)
    from varifocal.bench.decode.run import Plan, bench_decode

    plan = Plan(
        source=source, contexts=parse_lengths(contexts), texts=parse_lengths(rows),
        names=tuple(contender or ()) or None, rounds=rounds, tokens=new_tokens, prompt=prompt,
        llama_python=llama_python, text=text, documents=documents, length=length,
    )  # fmt: skip
    use_threads(threads)
    with shown_steps() as show:
        found = bench_decode(plan, on_step=lambda step: show(step.doing, step.done, step.total))
    print_result(Console(), found)
    if json_file is not None:
        found.write(json_file)
    if plot is not None:
        from varifocal.report.decode_bench_plot import plot_decode_bench

        plot_decode_bench(found, plot)


def print_result(console: Console, found: DecodeBench) -> None:
    """Print a table for each context, the notes, and the machine."""
    for texts, context in dict.fromkeys((row.texts, row.context) for row in found.rows):
        print_table(console, None, decode_table(found, context, texts))
    for one in found.losses:
        console.print(loss_sentence(one), highlight=False)
    for row in found.speculation:
        console.print(speculation_sentence(row), highlight=False)
    for note in found.notes:
        console.print(f"[dim]{note}[/dim]", highlight=False)
    shared = found.environment
    console.print(
        f"{found.source}; {shared.processor}, {shared.threads} threads, torch {shared.torch}, memory "
        f"{found.memory_gigabytes_per_second:.1f} GB/s",
        highlight=False,
    )
