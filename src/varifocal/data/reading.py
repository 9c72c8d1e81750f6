"""Documents from files: a datatrove reader that stops at what it cannot read.

datatrove's own readers skip a broken line with a warning in a log, and the rest of a file after an invalid byte. Here
nothing is lost without a word: it is an error that names the place, or is replaced and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any, Literal, NamedTuple

from datatrove.data import Document
from datatrove.pipeline.readers.base import BaseDiskReader

from varifocal.data.sources import Span, open_source_file
from varifocal.data.tokenizers import first_line

Invalid = Literal["error", "replace"]
BLOCK = 1 << 20


class Text(NamedTuple):
    """The text of a document, and whether invalid bytes in it were replaced by U+FFFD."""

    content: str
    replaced: bool = False


class PieceReader(BaseDiskReader):
    """Task number n reads the n-th piece. Documents without text come through, for the next step to count."""

    name = "📖 Piece"

    def __init__(
        self, root: str, pieces: list[list[Span]], *, column: str, separator: str | None, invalid: Invalid
    ) -> None:
        super().__init__(root, text_key=column)
        self.root, self.pieces, self.separator, self.invalid = root, pieces, separator, invalid

    def read_file(self, filepath: str) -> Iterator[Any]:
        raise NotImplementedError("files are read by pieces")

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        for span in self.pieces[rank]:
            texts = read_span(self.root, span, column=self.text_key, separator=self.separator, invalid=self.invalid)
            for number, text in enumerate(texts):
                identity = f"{span.path}/{span.begin}/{number}"
                document = Document(text=text.content, id=identity, metadata={"replaced": text.replaced})
                self.update_doc_stats(document)
                yield document


def read_span(root: str, span: Span, *, column: str, separator: str | None, invalid: Invalid) -> Iterator[Text]:
    """The documents of a span, in order; "" for those without text."""
    with open_source_file(root, span.path, decompress=span.kind != "parquet") as file:
        if span.kind == "parquet":
            yield from read_parquet(file, span, column, invalid)
        elif span.kind == "jsonl":
            yield from read_jsonl(file, span, column, invalid)
        else:
            yield from read_text(file, span, separator, invalid)


def read_parquet(file: IO[bytes], span: Span, column: str, invalid: Invalid) -> Iterator[Text]:
    """The column of the span's row groups; null counts as empty."""
    import pyarrow
    from pyarrow import parquet

    content = parquet.ParquetFile(file)
    number = 0
    groups = list(range(span.begin, span.end or content.metadata.num_row_groups))
    try:
        for batch in content.iter_batches(batch_size=64, row_groups=groups, columns=[column]):
            # As bytes: a file may hold text that is not UTF-8, whatever its schema says.
            for value in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                yield decode(value or b"", invalid, f"{span.path}, row {number} from row group {span.begin} on")
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{span.path} is damaged at row {number} from row group {span.begin} on: {first_line(error)}"
        ) from error


def read_jsonl(file: IO[bytes], span: Span, column: str, invalid: Invalid) -> Iterator[Text]:
    """The lines that begin within the span; null and an empty line count as empty."""
    place = span.begin
    if span.begin:
        # The line in which the span begins belongs to the one before, unless it begins exactly here.
        file.seek(span.begin - 1)
        place = span.begin - 1 + len(file.readline())
    for line in lines_of(file, span):
        if span.end is not None and place >= span.end:
            return
        if line.strip():
            yield parse_line(line, column, invalid, f"{span.path}, line at byte {place}")
        place += len(line)


def lines_of(file: IO[bytes], span: Span) -> Iterator[bytes]:
    """The lines; ValueError where a compressed file is damaged."""
    try:
        yield from file
    except Exception as error:  # every library of compression has an error of its own
        raise damaged(span, error) from error


def damaged(span: Span, error: Exception) -> ValueError:
    return ValueError(f"{span.path} is truncated or damaged: {first_line(error)}")


def parse_line(line: bytes, column: str, invalid: Invalid, place: str) -> Text:
    """The text of a line of JSON."""
    import orjson

    replaced = False
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        content = None if invalid == "error" else repaired(line)
        if content is None:
            raise ValueError(
                f"{place}: not valid JSON in UTF-8 ({first_line(error)}); mend the file, or replace invalid characters "
                "with --invalid replace"
            ) from error
        replaced = True
    if not isinstance(content, dict):
        raise ValueError(f"{place}: expected an object with the key {column!r}, got {type(content).__name__}")
    if column not in content:
        raise ValueError(
            f"{place}: no key {column!r}, only {', '.join(content) or 'an empty object'}; choose one with --column"
        )
    text = content[column]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{place}: {column!r} holds {type(text).__name__}, not text; choose another with --column")
    return Text(without_surrogates(text or "") if replaced else text or "", replaced)


def repaired(line: bytes) -> Any:
    """A line with invalid bytes replaced; None if it is not JSON even so."""
    try:
        return json.loads(line.decode("utf-8", errors="replace"))
    except json.JSONDecodeError:
        return None


def without_surrogates(text: str) -> str:
    """Half a surrogate pair, which JSON can write and UTF-8 cannot, becomes U+FFFD."""
    return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def read_text(file: IO[bytes], span: Span, separator: str | None, invalid: Invalid) -> Iterator[Text]:
    """The file as one document, or the documents between separators, without the newlines around them."""
    if separator is None:
        yield decode(b"".join(blocks_of(file, span)), invalid, span.path)
        return
    mark = separator.encode("utf-8")
    rest, number, place = b"", 0, f"{span.path}, document"
    for block in blocks_of(file, span):
        *whole, rest = (rest + block).split(mark)
        for document in whole:
            yield decode(document.strip(b"\r\n"), invalid, f"{place} {number}")
            number += 1
    if rest.strip():
        yield decode(rest.strip(b"\r\n"), invalid, f"{place} {number}")


def blocks_of(file: IO[bytes], span: Span) -> Iterator[bytes]:
    try:
        while block := file.read(BLOCK):
            yield block
    except Exception as error:  # every library of compression has an error of its own
        raise damaged(span, error) from error


def decode(content: bytes, invalid: Invalid, place: str) -> Text:
    """Bytes as text; ValueError that names the place of the first invalid byte, unless they are to be replaced."""
    try:
        return Text(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        if invalid == "replace":
            return Text(content.decode("utf-8", errors="replace"), replaced=True)
        raise ValueError(
            f"{place}: byte {error.start} is not valid UTF-8; mend the file, or replace invalid bytes with "
            "--invalid replace"
        ) from error
