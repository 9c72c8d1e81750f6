"""Documents to a data set: plan, tokenize piece by piece, and write the manifest last."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from varifocal.data.checksums import DamagedDataError, file_checksums
from varifocal.data.dataset import PreparedData, open_data
from varifocal.data.executors import EXECUTORS, ExecutorName, make_executor, quiet
from varifocal.data.files import explained, write_durably
from varifocal.data.manifest import NAME, SplitEntry, assemble, digest, part, read_manifest, write_manifest
from varifocal.data.reading import Invalid, PieceReader, read_span
from varifocal.data.sources import Span, find_source, plan_pieces
from varifocal.data.splits import SPLITS, Splits
from varifocal.data.tokenizers import (
    TextTokenizer,
    find_tokenizer,
    first_line,
    load_tokenizer,
    train_tokenizer,
    training_size,
)
from varifocal.data.tokenizing import PieceResult, SplitTokenizer, read_result

TRAINING_BYTES = 1 << 28
"""A tokenizer is trained on the train split's documents, of a large source on the first of each piece: 256 MiB."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How documents become tokens: what decides the data, besides the source."""

    tokenizer: str = "train:8192"
    end_token: str | None = None
    """The token after every document; None for the tokenizer's own."""
    splits: Splits = field(default_factory=Splits)
    column: str = "text"
    """The column of parquet files, the key of jsonl lines."""
    separator: str | None = None
    """What stands between the documents of a text file; None if each file is one document."""
    invalid: Invalid = "error"
    """What to do about invalid UTF-8: stop, or replace it by U+FFFD."""

    def __post_init__(self) -> None:
        training_size(self.tokenizer)
        if self.invalid not in ("error", "replace"):
            raise ValueError(f"invalid must be 'error' or 'replace', got {self.invalid!r}")
        if self.separator == "":
            raise ValueError(
                "the separator of documents must not be empty; leave it out to read a file as one document"
            )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a preparation is."""

    doing: str
    pieces: int = 0
    pieces_done: int = 0
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    """Bytes of text so far."""
    bytes_total: int = 0
    """Roughly, the bytes of text in the source."""
    fresh_documents: int = 0
    """Of the documents, those of this run: what a speed is reckoned from."""
    fresh_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How a preparation ended."""

    outcome: Literal["prepared", "nothing to do", "submitted"]
    pieces: int
    pieces_done: int
    data: PreparedData | None
    """The data set; None while a cluster works on it."""


def prepare(
    source: str,
    out: str | Path,
    *,
    options: Options | None = None,
    workers: int | None = None,
    executor: ExecutorName = "local",
    executor_options: Mapping[str, Any] | None = None,
    resubmit: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Preparation:
    """Make the data set `out` of the documents of `source`.

    Interrupted at any moment, the same call goes on with the pieces that are missing; when all is done it does nothing.
    With an executor for a cluster the pieces are submitted, and the same call afterwards finishes the data set.
    """
    if executor not in EXECUTORS:
        raise ValueError(f"unknown executor {executor!r}; known are {', '.join(EXECUTORS)}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    wanted = options or Options()
    found = find_source(source)
    request = {"source": found.describe(), **requested(wanted)}
    folder = Path(out).absolute()
    with ExitStack() as stack:
        stack.enter_context(explained(folder))
        if (folder / NAME).exists():
            return already_there(folder, request)
        state = make_state(folder)
        stack.enter_context(locked(state))
        say = on_progress or (lambda progress: None)
        pieces = planned(state, request, lambda: plan_pieces(found, column=wanted.column, separator=wanted.separator))
        if not pieces:
            raise ValueError(f"{source} holds no documents")
        reader = PieceReader(
            found.root, pieces, column=wanted.column, separator=wanted.separator, invalid=wanted.invalid
        )
        say(Progress(doing="reading the tokenizer", pieces=len(pieces)))
        tokenizer = saved_tokenizer(folder, wanted, reader, say)
        crew = min(workers or usable_processors(), len(pieces)) if executor == "local" else workers or -1
        step = SplitTokenizer(
            folder,
            tokenizer_name=tokenizer.name,
            end_token=tokenizer.end_token,
            splits=wanted.splits,
            parallel=crew == 1,
        )
        with quiet():
            runner = make_executor(
                executor,
                [reader, step],
                tasks=len(pieces),
                workers=crew,
                state=state,
                options=executor_options or {},
            )
        forget_damaged(folder, state, len(pieces))
        run_pieces(runner, executor, state, pieces, resubmit=resubmit, say=say)
        done = len(completed(state))
        if done < len(pieces):
            return Preparation(outcome="submitted", pieces=len(pieces), pieces_done=done, data=None)
        say(Progress(doing="writing the manifest", pieces=len(pieces), pieces_done=done))
        finish(folder, state, request, tokenizer, len(pieces))
    shutil.rmtree(state, ignore_errors=True)
    return Preparation(outcome="prepared", pieces=len(pieces), pieces_done=len(pieces), data=open_data(folder))


def requested(options: Options) -> dict[str, Any]:
    """The options as plain values; a tokenizer's file by its content, not by its path."""
    content = asdict(options)
    path = Path(options.tokenizer)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        content["tokenizer"] = f"{path.name} {digest(file_checksums(path))[:16]}"
    return content


def already_there(folder: Path, request: dict[str, Any]) -> Preparation:
    """The finished data set, if it is the one that was asked for."""
    manifest = read_manifest(folder)
    if identity(manifest.source) != identity(request):
        raise ValueError(
            f"{folder} already holds data prepared from {described(manifest.source)}; choose another folder, or remove "
            "it"
        )
    shutil.rmtree(folder / "preparation", ignore_errors=True)
    return Preparation(outcome="nothing to do", pieces=0, pieces_done=0, data=open_data(folder))


def identity(request: dict[str, Any]) -> str:
    """Stands for a request: the files, however the source was written, and the options."""
    source = request.get("source")
    files = source.get("files") if isinstance(source, dict) else source
    return digest(request | {"source": files})


def described(request: dict[str, Any]) -> str:
    """A request in a few words."""
    source = request.get("source")
    name = source.get("name") if isinstance(source, dict) else request.get("kind", "something else")
    return f"{name!r} with tokenizer {request.get('tokenizer')!r} and the options given then"


def make_state(folder: Path) -> Path:
    """The folder of an unfinished preparation; ValueError if something else lies in the way."""
    state = folder / "preparation"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder for the data set")
    if folder.is_dir() and not state.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no data set; choose another folder")
    state.mkdir(parents=True, exist_ok=True)
    return state


@contextmanager
def locked(state: Path) -> Iterator[None]:
    """Hold the preparation for this process; the system lets go of it when the process ends, however it ends."""
    with (state / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is preparing {state.parent}; wait for it, or end it") from error
        yield


def planned(state: Path, request: dict[str, Any], plan: Callable[[], list[list[Span]]]) -> list[list[Span]]:
    """The pieces, as written down when the preparation began."""
    path = state / "plan.json"
    if path.exists():
        before, pieces = read_plan(path)
        if identity(before) != identity(request):
            raise ValueError(
                f"{state.parent} holds an unfinished preparation of {described(before)}, or the source has "
                "changed since; repeat that command, or remove the folder"
            )
        known = {file["path"] for file in request["source"]["files"]}
        for span in (span for piece in pieces for span in piece):
            if span.path not in known:
                raise ValueError(f"{path} names the file {span.path!r}, which is not of the source; remove the folder")
        return pieces
    pieces = plan()
    content = {"request": request, "pieces": [[asdict(span) for span in piece] for piece in pieces]}
    write_durably(path, json.dumps(content))
    return pieces


def read_plan(path: Path) -> tuple[dict[str, Any], list[list[Span]]]:
    """The request and the pieces that a preparation wrote down; ValueError if it is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        pieces = [[Span(**span) for span in piece] for piece in part(content, "pieces", list)]
        for span in (span for piece in pieces for span in piece):
            texts, numbers = (span.path, span.kind), (span.begin, span.weight, span.end or 0)
            if not all(isinstance(one, str) for one in texts) or not all(type(one) is int for one in numbers):
                raise ValueError(f"{span} is not a part of a file")
        return part(content, "request", dict), pieces
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the plan of a preparation ({first_line(error)}); remove the folder") from error


def saved_tokenizer(
    folder: Path, options: Options, reader: PieceReader, say: Callable[[Progress], None]
) -> TextTokenizer:
    """The tokenizer in the data set's folder, put there first if it is missing."""
    path = folder / "tokenizer.json"
    name = options.tokenizer
    if path.exists():
        return load_tokenizer(path, name=shown_name(name), end_token=options.end_token)
    size = training_size(name)
    if size is None:
        tokenizer = find_tokenizer(name, end_token=options.end_token)
    else:
        say(Progress(doing="training the tokenizer", pieces=len(reader.pieces)))
        texts = training_texts(reader, options.splits)
        first = next(texts, None)
        if first is None:
            raise ValueError("the train split has no documents to train a tokenizer on; give more text, or a tokenizer")
        tokenizer = train_tokenizer(chain_first(first, texts), size=size)
    # The end must exist before the work begins, not after.
    _ = tokenizer.end
    write_durably(path, tokenizer.raw.to_str(pretty=False))
    return tokenizer


def shown_name(name: str) -> str:
    """A tokenizer's name as the manifest has it: of a file, its own name without the folders."""
    path = Path(name)
    return "tokenizer.json" if path.is_dir() else path.name if path.is_file() else name


def chain_first(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def training_texts(reader: PieceReader, splits: Splits) -> Iterator[str]:
    """Documents of the train split; of each piece as many as its share of TRAINING_BYTES allows."""
    share = TRAINING_BYTES // len(reader.pieces)
    for piece in reader.pieces:
        left = share
        for span in piece:
            if left <= 0:
                break
            for text in read_span(
                reader.root, span, column=reader.text_key, separator=reader.separator, invalid=reader.invalid
            ):
                if text.content and splits.of(text.content) == "train":
                    left -= len(text.content.encode("utf-8"))
                    yield text.content
                if left <= 0:
                    break


def completed(state: Path) -> list[int]:
    """The pieces that datatrove has marked as done."""
    return sorted(int(path.name) for path in (state / "completions").glob("*") if path.name.isdecimal())


def forget_damaged(folder: Path, state: Path, pieces: int) -> None:
    """Do a piece again if its files are not all there: somebody may have tidied up between two runs."""
    for number in completed(state):
        try:
            files = read_result(state / "results" / f"{number:05d}.json").files
            whole = all((folder / name).stat().st_size == entry.size for name, entry in files.items())
        except (OSError, ValueError):
            whole = False
        if not whole or number >= pieces:
            (state / "completions" / f"{number:05d}").unlink(missing_ok=True)


def run_pieces(
    runner: Any,
    executor: ExecutorName,
    state: Path,
    pieces: list[list[Span]],
    *,
    resubmit: bool,
    say: Callable[[Progress], None],
) -> None:
    """Work on the pieces that are missing, telling how far they are; or submit them."""
    before = completed(state)
    if len(before) == len(pieces):
        return
    submitted = state / "executor.pik"
    if executor == "slurm" and submitted.exists() and not resubmit:
        return
    with watched(state, pieces, before, say), quiet():
        try:
            runner.run()
        except subprocess.CalledProcessError as error:
            # A half-made submission must not be taken for one that is under way.
            submitted.unlink(missing_ok=True)
            raise ValueError(f"{error.cmd[0]} refused the pieces with exit code {error.returncode}") from error


@contextmanager
def watched(
    state: Path, pieces: list[list[Span]], before: list[int], say: Callable[[Progress], None]
) -> Iterator[None]:
    """While the work goes on, gather what the tasks report four times a second."""
    total = sum(span.weight for piece in pieces for span in piece)
    old = gathered(state, before)
    finished = threading.Event()

    def report() -> None:
        documents, tokens, size = gathered(state, None)
        say(
            Progress(
                doing="tokenizing",
                pieces=len(pieces),
                pieces_done=len(completed(state)),
                documents=documents,
                tokens=tokens,
                bytes=size,
                bytes_total=total,
                fresh_documents=documents - old[0],
                fresh_tokens=tokens - old[1],
            )
        )

    def watch() -> None:
        while not finished.wait(0.25):
            report()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
        report()


def gathered(state: Path, pieces: list[int] | None) -> tuple[int, int, int]:
    """Documents, tokens and bytes that the tasks have reported: of these pieces, or of all."""
    folder = state / "progress"
    paths = folder.glob("*.json") if pieces is None else (folder / f"{number:05d}.json" for number in pieces)
    counts = [0, 0, 0]
    for path in paths:
        try:
            reported = json.loads(path.read_text(encoding="utf-8"))
        # A task that has not reported yet has no file.
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(reported, list) and len(reported) == 3 and all(type(one) is int for one in reported):
            counts = [count + more for count, more in zip(counts, reported, strict=True)]
    return counts[0], counts[1], counts[2]


def finish(folder: Path, state: Path, request: dict[str, Any], tokenizer: TextTokenizer, pieces: int) -> None:
    """Gather the results of all pieces into the manifest."""
    results = [read_result(state / "results" / f"{number:05d}.json") for number in range(pieces)]
    files = {name: entry for result in results for name, entry in result.files.items()}
    for name, entry in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry.size:
            raise DamagedDataError(f"{path} is not as it was written; run the same command again")
    splits = {
        split: SplitEntry(shards=tuple(result.shards[split] for result in results if split in result.shards))
        for split in SPLITS
    }
    if not any(split.documents for split in splits.values()):
        empty = sum(result.empty for result in results)
        raise ValueError(f"the source holds no documents with text ({empty} without); there is nothing to prepare")
    write_manifest(folder, assemble(folder, "text", request, tokenizer, splits, files, skipped(results)))


def skipped(results: list[PieceResult]) -> dict[str, int]:
    return {"empty": sum(r.empty for r in results), "replaced": sum(r.replaced for r in results)}


def usable_processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
