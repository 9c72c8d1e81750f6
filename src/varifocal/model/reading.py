"""What goes wrong while a foreign file is read, in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Whatever a reader raises about a foreign file becomes a ValueError of one line: nobody can list it all."""
    try:
        yield
    # A Rust library that panics raises what is no Exception.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise ValueError(f"{what} cannot be read: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks; what is no sentence goes with the kind of the error."""
    words = " ".join(str(error).split())
    return words if len(words.split()) > 1 else f"{type(error).__name__} {words}".strip()
