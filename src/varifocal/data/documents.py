"""The documents of a source as they are, for those who need a few texts and no data set."""

from __future__ import annotations

from collections.abc import Iterator

from varifocal.data.sources import find_source, plan_pieces


def read_documents(name: str, *, column: str = "text", separator: str | None = None) -> Iterator[str]:
    """The texts of a source in order; `name` as for `varifocal data prepare`."""
    from varifocal.data.reading import read_span

    source = find_source(name)
    for piece in plan_pieces(source, column=column, separator=separator):
        for span in piece:
            for text in read_span(source.root, span, column=column, separator=separator, invalid="error"):
                yield text.content
