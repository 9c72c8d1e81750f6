"""varifocal explore: a web page that shows what a model's gates and heads do with a text."""

from __future__ import annotations

import importlib.util
import webbrowser
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from varifocal.cli.options import Threads
from varifocal.threads import use_threads


def explore(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Folder of a model or run, .gguf file, or owner/name on the hub.", show_default=False
        ),
    ],
    other: Annotated[
        str | None, typer.Argument(metavar="MODEL2", help="A second model, beside the first.", show_default=False)
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the longest text. Default: the context that each model was made for."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")] = 8765,
    host: Annotated[str, typer.Option(help="Address to listen on; by default only for this machine.")] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(help="The secret part of the page's address, to keep it between starts. Default: a random one."),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
    threads: Threads = None,
) -> None:
    """Open a page on which you type a text and see what each token reads.

    Tokens are coloured by their gates; choose layer and head, hold all gates at local or global, see the keys that a
    token reads and what the model expects next. The page is served to this machine only, under an address with a
    random part; nothing is loaded from elsewhere. Ctrl-C stops it.

    \b
    varifocal explore runs/demo
    varifocal explore runs/demo smollm2
    varifocal explore runs/demo --length 2048 --no-browser
    """
    require_explore_extra()
    from varifocal.explorer.explorer import Explorer
    from varifocal.explorer.guard import is_loopback
    from varifocal.explorer.opening import open_model
    from varifocal.explorer.server import make_token, serve

    use_threads(threads)
    secret = make_token(token)
    console = Console(soft_wrap=True, highlight=False)
    if not is_loopback(host):
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"[bold yellow]warning:[/bold yellow] listening on {escape(host)}: whoever can reach this machine and "
            "learns the address can use the page, and what is typed crosses the network unencrypted"
        )
    with console.status("loading"):
        explorer = Explorer([open_model(source) for source in (model, other) if source], most_tokens=length)

    def ready(address: str) -> None:
        console.print(f"[bold]{escape(address)}[/bold]")
        console.print("Ctrl-C stops it", style="dim")
        if browser:
            webbrowser.open(address)

    serve(explorer, host=host, port=port, token=secret, on_ready=ready)


def require_explore_extra() -> None:
    """ValueError if the packages of the page are not installed."""
    needed = ("transformers", "fastapi", "uvicorn", "jinja2")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the explorer needs the package {' and '.join(missing)}; install it with: pip install 'varifocal[explore]'"
        )
