"""How every verb shows itself in --help: flowing sentences, examples one to a line, values named in one style."""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

EXAMPLES = ("varifocal ", "torchrun ")
"""What the line of an example begins with."""
VALUES = {"int": "N", "float": "X", "str": "TEXT", "list[str]": "NAME"}
"""What stands for a value of a type, unless the option names it itself."""
NAMED = {
    **dict.fromkeys(("backend", "clock", "device", "dtype", "executor", "fit", "gates", "gpu", "invalid"), "NAME"),
    **dict.fromkeys(("mechanism", "precision", "preset", "split", "tokenizer", "weights"), "NAME"),
    **dict.fromkeys(
        ("caches", "contexts", "distances", "fact-lengths", "lengths", "memory-at", "seeds", "speed"), "N,..."
    ),
    "tokens": "N",
    **dict.fromkeys(("rivals-at", "shares"), "X,..."),
    **dict.fromkeys(("pass", "presets"), "NAME,..."),
}
"""The same for texts of which only some mean something: names of a list, numbers, several with commas between."""
PATHS = {"file": "FILE", "dir": "FOLDER", "path": "FILE"}
"""The same for what lies on a disk, by what an option takes."""


class Shown:
    """How a command shows itself, whether it does something or holds other commands."""

    help: str | None
    params: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = flowing(self.help or "")
        for param in self.params:
            name_value(param)

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters; --help and what installs completion are added by typer and come last."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # typer's command follows in every subclass
        for param in params:
            if getattr(param, "is_flag", False):
                hide_value(param)
        return params


class Verb(Shown, TyperCommand):
    """A command that does something."""


class Verbs(Shown, TyperGroup):
    """A command that holds others."""


def name_value(param: Any) -> None:
    """Let an argument be called by its name in capitals, a value by its kind, and a flag by nothing."""
    if isinstance(param, TyperArgument):
        if param.metavar is None:
            param.metavar = (param.name or "").upper()
        hide_value(param)
        if param.required:
            # typer's braces would say that one of several is to be chosen.
            setattr(param, "_usage_display_name", lambda: param.metavar)  # noqa: B010  # a method, for mypy
        return
    if getattr(param, "is_flag", False):
        hide_value(param)
    elif param.metavar is None:
        kind = param.type_descriptor
        value = PATHS[kind.path_type] if "Path" in param.bare_type() else VALUES.get(param.bare_type(), "TEXT")
        param.metavar = NAMED.get(param.opts[0].removeprefix("--"), value) if value == "TEXT" else value


def hide_value(param: Any) -> None:
    """Show no type: a flag has no value, and an argument's name says what it is."""
    param.display_type_rich = lambda ctx: None


def flowing(text: str) -> str:
    """A docstring whose sentences wrap where the terminal ends, with its examples as lines below a heading."""
    sentences: list[str] = []
    examples: list[str] = []
    for paragraph in text.replace("\b", "").split("\n\n"):
        lines = [line.strip() for line in paragraph.strip().splitlines()]
        if not lines or lines == ["[bold]Examples[/bold]"]:
            continue
        if not lines[0].startswith(EXAMPLES):
            sentences.append(" ".join(lines))
            continue
        for line in lines:
            if line.startswith(EXAMPLES):
                examples.append(line)
            else:
                examples[-1] += f" {line}"
    if examples:
        sentences.append("[bold]Examples[/bold]\n" + "\n".join(f"  {one}" for one in examples))
    return "\n\n".join(sentences)
