"""How every verb shows itself in --help: flowing sentences, examples one to a line, values named in one style."""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand

EXAMPLES = ("varifocal ", "torchrun ")
"""What the line of an example begins with."""
VALUES = {"int": "N", "float": "X", "str": "TEXT", "Path": "PATH", "list[str]": "NAME"}
"""What stands for a value of a type, unless the option names it itself."""


class Verb(TyperCommand):
    """A command of this program."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = flowing(self.help or "")
        for param in self.params:
            name_value(param)

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            hide_value(option)
        return option


def name_value(param: Any) -> None:
    """Let an argument be called by its name in capitals, a value by its kind, and a flag by nothing."""
    if isinstance(param, TyperArgument):
        if param.metavar is None:
            param.metavar = (param.name or "").upper()
        hide_value(param)
        return
    if getattr(param, "is_flag", False):
        hide_value(param)
    elif param.metavar is None:
        param.metavar = VALUES.get(param.bare_type(), "FILE" if "Path" in param.bare_type() else "TEXT")


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
