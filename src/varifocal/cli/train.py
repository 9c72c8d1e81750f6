"""varifocal train: trains what a config describes, into a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from varifocal.results.run import RunSummary
    from varifocal.training.trainer import Progress as RunProgress


Config = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="A TOML file, see configs/; or a text file of your own (.txt).", show_default=False
    ),
]
Out = Annotated[
    Path | None,
    typer.Argument(metavar="OUT", help="The folder of the run. Default: runs/ and CONFIG's name.", show_default=False),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting of the config; repeat for several."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the newest complete checkpoint, as if never interrupted.")
]


def train(config: Config, out: Out = None, setting: Settings = None, resume: Resume = False) -> None:
    """Train a model as a config describes, into a run directory.

    OUT receives the resolved config, metrics.jsonl, what the gates did, checkpoints, the model and, last, summary.json.
    If the run is killed, at any moment, the same command with --resume ends with the result that the run would have
    had. SIGTERM and Ctrl-C write a checkpoint first.

    [bold]Examples[/bold]

      varifocal train my.txt

      varifocal data prepare sotu data/sotu --tokenizer train:4096

      varifocal train configs/cpu/train.toml runs/head_gated

      varifocal train configs/cpu/train.toml runs/dense --set model.mechanism=dense --set optimization.steps=200

      varifocal train configs/cpu/train.toml runs/head_gated --resume

      torchrun --nproc-per-node 8 --no-python varifocal train configs/papers/context_adaptive.toml runs/caa
    """
    from varifocal.training.config import load_config
    from varifocal.training.interruption import StoppedError
    from varifocal.training.own_text import text_config
    from varifocal.training.processes import is_first_process
    from varifocal.training.run import train as run

    own_text = config.suffix == ".txt"
    settings = text_config(config, setting or []) if own_text else load_config(config, setting or [])
    out = Path("runs") / config.stem if out is None else out
    console = Console(quiet=not is_first_process())
    with training_bar(console) as bar:
        shown = TrainingBar(bar, steps=settings.optimization.total_steps)
        try:
            found = run(settings, out, resume=resume, on_progress=shown.show)
        except StoppedError as stopped:
            bar.stop()
            console.print(escape(str(stopped)), highlight=False, soft_wrap=True)
            raise typer.Exit(143) from stopped
    print_summary(console, out, found)


def training_bar(console: Console) -> Progress:
    """A bar that shows loss, speed and time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


class TrainingBar:
    """Shows the progress of a run, and prints notes and validations above the bar."""

    def __init__(self, bar: Progress, *, steps: int | None) -> None:
        self.bar, self.numbers = bar, ""
        self.validation_loss: float | None = None
        self.task = bar.add_task("starting", total=steps, numbers="")

    def show(self, now: RunProgress) -> None:
        """Called after every step."""
        if now.note is not None:
            self.bar.console.print(escape(now.note), highlight=False, soft_wrap=True)
        if now.loss is not None:
            self.numbers = numbers_of(now)
        self.bar.update(
            self.task, description=f"step {now.step}", completed=now.step, total=now.steps, numbers=self.numbers
        )
        if now.validation_loss not in (None, self.validation_loss):
            self.validation_loss = now.validation_loss
            self.bar.console.print(f"step {now.step}: validation loss {now.validation_loss:.4f}", highlight=False)


def numbers_of(now: RunProgress) -> str:
    """Loss, speed and time left in a few words."""
    left = f", {duration(now.seconds_left)} left" if now.seconds_left is not None else ""
    return f"loss {now.loss:.4f}, {now.tokens_per_second:,.0f} tokens/s{left}"


def duration(seconds: float) -> str:
    """Seconds as 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def print_summary(console: Console, out: Path, found: RunSummary) -> None:
    """Print what the run reached, and what to do next."""
    console.print(
        f"{out} finished: validation loss {found.validation_loss:.4f}, {found.bits_per_byte:.4f} bits per byte, "
        f"{found.parameters:,} parameters, {found.tokens:,} tokens in {duration(found.seconds)} "
        f"({found.tokens_per_second:,.0f} tokens/s), peak memory {found.peak_bytes / 2**20:,.0f} MB",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f'next: varifocal generate {out / "model"} "The state of"', highlight=False, soft_wrap=True)
