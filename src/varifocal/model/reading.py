"""What goes wrong while a foreign file is read, in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from transformers import modeling_gguf_pytorch_utils as gguf_reading
from transformers.utils import logging

Item = TypeVar("Item")


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


@contextmanager
def only_errors() -> Iterator[None]:
    """Keeps transformers from printing tables about what it loads: the report is checked instead."""
    before = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The reader of GGUF does not ask whether bars are wanted.
    gguf_bar, gguf_reading.tqdm = gguf_reading.tqdm, without_bar
    try:
        yield
    finally:
        gguf_reading.tqdm = gguf_bar
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def without_bar(items: Iterable[Item], **settings: Any) -> Iterable[Item]:
    """In the place of tqdm: the items themselves."""
    return items
