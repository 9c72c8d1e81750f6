"""varifocal train: a config to a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from varifocal.training.run import RunSummary
    from varifocal.training.trainer import Progress as RunProgress


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; see configs/.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of the run.", show_default=False)],
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Lay a setting over the config; repeat for several."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint, as if never interrupted.")
    ] = False,
) -> None:
    """Train a model as a config says, into a run directory.

    OUT gets the resolved config, metrics.jsonl, what the gates did, checkpoints, the model and last summary.json.
    Killed at any moment, the same command with --resume gives what it would have given. SIGTERM and Ctrl-C write a
    checkpoint first.

    [bold]Examples[/bold]

      varifocal data prepare sotu data/sotu

      varifocal train configs/cpu/head_gated.toml runs/head_gated

      varifocal train configs/cpu/head_gated.toml runs/dense --set model.mechanism=dense --set optimization.steps=200

      varifocal train configs/cpu/head_gated.toml runs/head_gated --resume

      torchrun --nproc-per-node 8 --no-python varifocal train configs/papers/context_adaptive.toml runs/caa
    """
    from varifocal.training.config import load_config
    from varifocal.training.interruption import StoppedError
    from varifocal.training.processes import is_first_process
    from varifocal.training.run import train as run

    settings = load_config(config, setting or [])
    console = Console(quiet=not is_first_process())
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=settings.optimization.total_steps, numbers="")
        seen: list[float | None] = [None]

        def show(now: RunProgress) -> None:
            if now.note is not None:
                bar.console.print(escape(now.note), highlight=False, soft_wrap=True)
            numbers = bar.tasks[task].fields["numbers"] if now.loss is None else numbers_of(now)
            bar.update(task, description=f"step {now.step}", completed=now.step, numbers=numbers)
            if now.validation_loss is not None and now.validation_loss != seen[0]:
                seen[0] = now.validation_loss
                bar.console.print(f"step {now.step}: validation loss {now.validation_loss:.4f}", highlight=False)

        try:
            found = run(settings, out, resume=resume, on_progress=show)
        except StoppedError as stopped:
            bar.stop()
            console.print(escape(str(stopped)), highlight=False, soft_wrap=True)
            raise typer.Exit(143) from stopped
    print_summary(console, out, found)


def numbers_of(now: RunProgress) -> str:
    """Loss, speed and time left in a few words."""
    left = f", {duration(now.seconds_left)} left" if now.seconds_left is not None else ""
    return f"loss {now.loss:.4f}, {now.tokens_per_second:,.0f} tokens/s{left}"


def duration(seconds: float) -> str:
    """1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def print_summary(console: Console, out: Path, found: RunSummary) -> None:
    """What the run found, and what to do with it."""
    console.print(
        f"{out} finished: validation loss {found.validation_loss:.4f}, {found.bits_per_byte:.4f} bits per byte, "
        f"{found.parameters:,} parameters, {found.tokens:,} tokens in {duration(found.seconds)} "
        f"({found.tokens_per_second:,.0f} tokens/s), {found.peak_bytes / 2**20:,.0f} MB at most",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f'next: varifocal generate {out / "model"} "The state of"', highlight=False, soft_wrap=True)
