"""varifocal generate: a model continues a text."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from varifocal.cli.options import MOST_SEED, Threads, WeightsKind
from varifocal.threads import use_threads

AT_ONCE = 2048
"""Tokens of a prompt that are read together: a longer one takes no more memory than so many, besides its cache."""


def generate(
    model: Annotated[Path, typer.Argument(help="A model's folder with its tokenizer.json, a .gguf file, or smollm2.")],
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; - reads it from standard input. Left out with --chat.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token; higher values draw more freely.")
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens that together have this probability."),
    ] = 0.95,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from this many likeliest tokens; 0 for all.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Talk with a model that has a chat template; an empty line ends it.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MOST_SEED, help="The same seed draws the same text again.")
    ] = None,
    weights: WeightsKind = None,
    threads: Threads = None,
) -> None:
    """Continue a text, print each token as it comes, and report the speed.

    The text goes to standard output, the speed to standard error. Every token is decoded from the cache, as a server
    would do it.

    [bold]Examples[/bold]

    varifocal generate runs/demo "The capital of France is" --temperature 0 --new-tokens 20

    varifocal generate smollm2 "Once upon a time" --temperature 0 --new-tokens 50

    varifocal generate smollm2 "Once upon a time" --weights int8

    varifocal generate smollm2 --chat
    """
    from varifocal.retrofit.opening import open_with_tokenizer

    use_threads(threads)
    if chat == (prompt is not None):
        raise ValueError("give either a prompt to continue or --chat, not both or neither")
    drawn = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    drawing = drawn if temperature > 0 else {"do_sample": False}
    if seed is not None:
        torch.manual_seed(seed)
    text = None if prompt is None else read_prompt(prompt)
    loaded, tokenizer = open_with_tokenizer(model, weights=weights)
    if text is None:
        converse(loaded, tokenizer, tokens=new_tokens, drawing=drawing)
    else:
        go_on(loaded, tokenizer, text, source=model, tokens=new_tokens, drawing=drawing)


def go_on(loaded: Any, tokenizer: Any, text: str, *, source: Path, tokens: int, drawing: dict[str, Any]) -> None:
    """Print a text and what follows, each token as it comes."""
    from varifocal.model.text import printing_streamer

    ids = torch.tensor([tokenizer.encode(text)], dtype=torch.int64)
    if not ids.numel():
        raise ValueError("the prompt is empty; give at least one word to continue")
    if int(ids.max()) >= loaded.config.vocab_size:
        raise ValueError(
            f"the tokenizer of {source} gives token {int(ids.max())}, but the model's vocabulary has "
            f"{loaded.config.vocab_size}; use the tokenizer that the model was trained with"
        )
    console = Console(stderr=True)
    sys.stdout.write(text)
    began = time.perf_counter()
    answer = loaded.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        prefill_chunk_size=AT_ONCE if ids.shape[1] > AT_ONCE else None,
        streamer=printing_streamer(tokenizer),
        pad_token_id=0 if loaded.config.pad_token_id is None else loaded.config.pad_token_id,
        **drawing,
    )
    seconds = time.perf_counter() - began
    count = answer.shape[1] - ids.shape[1]
    mechanism = loaded.config.mechanism
    name = mechanism if isinstance(mechanism, str) else "+".join(dict.fromkeys(mechanism))
    console.print(f"{count} tokens, {count / seconds:.1f} a second ({name})", style="dim", highlight=False)


def converse(loaded: Any, tokenizer: Any, *, tokens: int, drawing: dict[str, Any]) -> None:
    """Answer line by line until an empty one, or the end of standard input."""
    from varifocal.model.conversation import Conversation

    talk, console = Conversation(loaded, tokenizer), Console(stderr=True)
    while True:
        try:
            console.print("> ", style="bold", end="")
            line = input()
        except (EOFError, KeyboardInterrupt):
            return
        if not line.strip():
            return
        reply = talk.say(line, tokens=tokens, **drawing)
        console.print(
            f"{reply.tokens} tokens, {reply.tokens / reply.seconds:.1f} a second; {reply.read} read before them",
            style="dim",
            highlight=False,
        )


def read_prompt(prompt: str) -> str:
    """The prompt, or what standard input holds, as UTF-8 whatever the locale says; ValueError if it is not."""
    # Python keeps the bytes of an argument that the locale cannot decode: these are they.
    content = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the prompt must be a text in UTF-8, but its byte {error.start} is 0x{content[error.start]:02x}"
        ) from error
