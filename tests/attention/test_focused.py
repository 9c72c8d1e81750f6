"""Heads with windows of their own: what they read, and a memory that frees what they no longer read."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from varifocal import Causal, HeadShape, Prefix, Window, attend, make_mechanism
from varifocal.attention.conformance.subject import Tokens, join_tokens
from varifocal.attention.mechanisms.registry import config_from_options, options_from_config
from varifocal.attention.memories import KeysAndValues, Memory, SplitKeys
from varifocal.equations.layout import Layout, make_layout

SHAPE = HeadShape(model_width=10, heads=6, kv_heads=3, head_width=8)
LENGTH = 53
BATCH = 3

MAPS: dict[str, tuple[tuple[int | None, ...], int]] = {
    "mixed": ((None, 5, 9), 2),
    "mixed, no sinks": ((7, None, 7), 0),
    "all windowed": ((4, 9, 4), 3),
    "one window": ((6,), 2),
    "a narrow and a wide window": ((3, 30, None), 2),
    "sinks wider than the window": ((2, None, 1), 6),
    "all full": ((), 4),
}
CHUNKS = {
    "one by one": [1] * LENGTH,
    "prefill": [20, *[1] * (LENGTH - 20)],
    "chunks": [3, 11, 1, 1, 2, 17, 18],
    "two": [40, 13],
}
DOCUMENTS = {
    "text": None,
    "padded": [[-1] * 19 + [0] * 34, [0] * 53, [-1] * 1 + [0] * 52],
    "packed": [[0] * 3 + [1] * 20 + [2] * 30, [0] * 53, [-1] * 2 + [3] * 44 + [4] * 7],
}

every_map = pytest.mark.parametrize("name", MAPS)
every_chunking = pytest.mark.parametrize("chunks", CHUNKS)


def focused(name: str) -> Any:
    windows, sinks = MAPS[name]
    return make_mechanism("focused", SHAPE, windows=windows, sinks=sinks)


def tokens(length: int = LENGTH, *, batch: int = BATCH, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    heads, kv_heads, width = SHAPE.heads, SHAPE.kv_heads, SHAPE.head_width
    return Tokens(
        normal(batch, length, SHAPE.model_width),
        normal(batch, heads, length, width),
        normal(batch, kv_heads, length, width),
        normal(batch, kv_heads, length, width),
    )


def layout_of(documents: list[list[int]] | None, begin: int, end: int, batch: int = BATCH) -> Layout:
    return make_layout(
        batch=batch,
        queries=end - begin,
        keys=end,
        documents=None if documents is None else torch.tensor(documents)[:, :end],
        positions=None,
        device=torch.device("cpu"),
    )


def fed(mechanism: Any, text: Tokens, chunks: list[int], *, memory: Any, documents: Any = None) -> Tensor:
    """The outputs of a text that comes in chunks, after what the memory holds."""
    outputs, begin = [], memory.length
    for end_of in chunks:
        end = begin + end_of
        layout = layout_of(documents, begin, end, text.x.shape[0])
        outputs.append(mechanism(*text.part(begin, end), memory=memory, layout=layout).output)
        begin = end
    return torch.cat(outputs, dim=2)


def expected(name: str, text: Tokens) -> Tensor:
    """Each key head by itself, as a plain window or plain causal attention."""
    windows, sinks = MAPS[name]
    if len(windows) < SHAPE.kv_heads:
        windows = (windows or (None,)) * SHAPE.kv_heads
    found = []
    for head, window in enumerate(windows):
        branch: Any = Causal() if window is None else Window(window)
        if window is not None and sinks:
            branch = branch | Prefix(sinks)
        q = text.q[:, 2 * head : 2 * head + 2]
        k, v = text.k[:, head : head + 1], text.v[:, head : head + 1]
        found.append(attend(q, k, v, branches=branch, backend="reference").output)
    return torch.cat(found, dim=1)


@every_map
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_every_head_reads_what_its_window_says(name: str, backend: str) -> None:
    dtype = torch.float64 if backend == "reference" else torch.float32
    text = tokens(dtype=dtype)
    output = focused(name)(*text, backend=backend).output
    torch.testing.assert_close(output, expected(name, text))


@every_map
@every_chunking
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_tokens_in_any_chunks_read_as_the_whole_text(name: str, chunks: str, documents: str) -> None:
    mechanism, text, ids = focused(name), tokens(), DOCUMENTS[documents]
    whole = mechanism(*text, layout=layout_of(ids, 0, LENGTH)).output
    memory = mechanism.memory()
    found = fed(mechanism, text, CHUNKS[chunks], memory=memory, documents=ids)
    torch.testing.assert_close(found, whole)
    if chunks == "one by one" and isinstance(memory, SplitKeys):
        assert all(rows.length <= group.room for group, (rows, _) in memory.held_rows() if group.window is not None)


def test_documents_alone_say_where_tokens_stand() -> None:
    mechanism, text, ids = focused("mixed"), tokens(), torch.tensor(DOCUMENTS["packed"])
    memory, outputs = mechanism.memory(), []
    for begin, end in pairwise((0, 30, 31, 40, LENGTH)):
        # A memory that is told of documents only by its layout shortens by them, so both are given alike.
        layout = layout_of(DOCUMENTS["packed"], begin, end)
        remembered = memory.append(*text.part(begin, end), layout=layout)
        part = text.part(begin, end)
        outputs.append(mechanism.read(part.x, part.q, remembered, documents=ids[:, :end]).output)
    whole = mechanism(*text, documents=ids).output
    torch.testing.assert_close(torch.cat(outputs, dim=2), whole)


@every_map
@every_chunking
def test_gradients_flow_through_what_is_kept(name: str, chunks: str) -> None:
    mechanism = focused(name)

    def gradients(parts: list[int]) -> tuple[Tensor, ...]:
        text = tokens().each(lambda tensor, _: tensor.requires_grad_())
        output = fed(mechanism, text, parts, memory=mechanism.memory(), documents=DOCUMENTS["packed"])
        return torch.autograd.grad(output.square().sum(), text[1:])

    for found, wanted in zip(gradients(CHUNKS[chunks]), gradients([LENGTH]), strict=True):
        torch.testing.assert_close(found, wanted)


@every_map
@pytest.mark.parametrize("records", [True, False])
def test_text_goes_on_after_a_crop_as_if_the_tokens_had_not_been(name: str, records: bool) -> None:
    mechanism, text, other = focused(name), tokens(), tokens(seed=7)
    memory = mechanism.memory()
    fed(mechanism, text, CHUNKS["prefill"], memory=memory)
    memory.records_past = records
    if records:
        # Only what comes after the recording began can be taken back for sure.
        memory.append(*tokens(12, seed=3))
        memory.crop(12)
    groups = [] if isinstance(memory, KeysAndValues) else [one for one in memory.held_rows() if one[0].window]
    spare = min((rows.length - group.kept for group, (rows, _) in groups), default=5)
    taken = min(4, max(spare, 0))
    memory.crop(taken)
    kept = LENGTH - taken
    changed = Tokens(*(torch.cat((one.narrow(dim, 0, kept), two.narrow(dim, kept, taken)), dim)
                       for one, two, dim in zip(text, other, (1, 2, 2, 2), strict=True)))  # fmt: skip
    if taken:
        found = fed(mechanism, changed, [1] * taken, memory=memory)
        torch.testing.assert_close(found, mechanism(*changed).output[:, :, kept:])


def test_crop_to_forgotten_keys_is_refused_in_one_sentence() -> None:
    mechanism = focused("mixed")
    memory = mechanism.memory()
    fed(mechanism, tokens(), [LENGTH], memory=memory)
    sentence = (
        r"^cannot take back 2 tokens: a window of 5 keys forgot 47 before them; "
        r"call activate_past_recording\(\) on the cache before them$"
    )
    with pytest.raises(ValueError, match=sentence):
        memory.crop(2)
    assert memory.length == LENGTH
    memory.crop(0)


def test_recorded_tokens_are_given_back_after_a_crop() -> None:
    mechanism, text = focused("mixed"), tokens()
    memory = mechanism.memory()
    memory.records_past = True
    fed(mechanism, text, [30], memory=memory)
    assert not memory.is_split
    memory.crop(2)
    changed = fed(mechanism, text, [1, 3, 5], memory=memory)
    assert memory.is_split
    torch.testing.assert_close(changed, mechanism(*text).output[:, :, 28:37])
    before = memory.bytes
    memory.crop(4)
    fed(mechanism, text, [1], memory=memory)
    assert memory.bytes <= before


@every_map
def test_rows_change_places_are_repeated_and_copied(name: str) -> None:
    mechanism, text = focused(name), tokens()
    whole = mechanism(*text).output
    order = torch.tensor([2, 0, 0, 1])
    changes: list[tuple[Callable[[Memory], None], Tensor]] = [
        (lambda memory: memory.reorder(order), order),
        (lambda memory: memory.repeat(2), torch.tensor([0, 0, 1, 1, 2, 2])),
        (lambda memory: memory.move("cpu"), torch.arange(BATCH)),
        (lambda memory: memory.crop(0), torch.arange(BATCH)),
    ]
    for change, rows in changes:
        memory = mechanism.memory()
        fed(mechanism, text, [33, 1, 1], memory=memory)
        twin = copy.deepcopy(memory)
        change(memory)
        found = fed(mechanism, text.rows(rows), [1, 1, 7, 9], memory=memory)
        torch.testing.assert_close(found, whole[rows][:, :, 35:])
        torch.testing.assert_close(fed(mechanism, text, [1, 17], memory=twin), whole[:, :, 35:])


def test_padding_comes_and_goes_before_the_text() -> None:
    mechanism, text = focused("mixed"), tokens()
    whole = mechanism(*text).output
    for first, more in ((20, 3), (3, 2), (30, 40)):
        memory = mechanism.memory()
        fed(mechanism, text, [first], memory=memory)
        memory.insert_first(more)
        padding = tokens(more, seed=9)
        padded = join_tokens((padding, text))
        documents = [[-1] * more + [0] * LENGTH] * BATCH
        found = fed(mechanism, padded, [1, 2], memory=memory, documents=documents)
        torch.testing.assert_close(found, whole[:, :, first : first + 3])
        memory.drop_first(more)
        found = fed(mechanism, text, [1, 9], memory=memory)
        torch.testing.assert_close(found, whole[:, :, first + 3 : first + 13])


def test_reset_forgets_everything() -> None:
    mechanism, text = focused("mixed"), tokens()
    memory = mechanism.memory()
    assert memory.read() is None
    fed(mechanism, text, [LENGTH], memory=memory)
    memory.reset()
    assert (memory.length, memory.bytes, memory.read()) == (0, 0, None)
    torch.testing.assert_close(fed(mechanism, text, CHUNKS["chunks"], memory=memory), mechanism(*text).output)


def test_what_every_head_keeps_can_be_read() -> None:
    mechanism, text = focused("mixed"), tokens()
    memory = mechanism.memory()
    fed(mechanism, text, CHUNKS["prefill"], memory=memory)
    kept = memory.read()
    assert kept.k.shape[2] >= 4
    assert torch.equal(kept.k, text.k[:, :, LENGTH - kept.k.shape[2] :])
    assert torch.equal(kept.v, text.v[:, :, LENGTH - kept.v.shape[2] :])


@pytest.mark.parametrize("chunks", ["one by one", "prefill", "two"])
def test_bytes_are_those_of_storages_and_windows_free_theirs(chunks: str) -> None:
    shape = HeadShape(model_width=10, heads=4, kv_heads=4, head_width=8)
    mechanism = make_mechanism("focused", shape, windows=(None, 8, 8, 8), sinks=2)
    memory, length, width = mechanism.memory(), 700, 4 * shape.head_width
    begin = 0
    for chunk in {"one by one": [1] * length, "prefill": [600, *[1] * 100], "two": [350, 350]}[chunks]:
        x, q, k = torch.randn(1, chunk, 10), torch.randn(1, 4, chunk, 8), torch.randn(1, 4, chunk, 8)
        mechanism(x, q, k, k.clone(), memory=memory)
        begin += chunk
    storages = {rows.held.untyped_storage() for rows in memory.rows.values() if rows.held is not None}
    assert memory.bytes == sum(storage.nbytes() for storage in storages)
    full = 2 * length * width
    rings = 2 * 3 * (2 + 8 - 1 + 4) * width
    assert full + 2 * 3 * (2 + 8 - 1) * width <= memory.bytes <= 1.25 * full + 2 * 64 * width + rings


def test_window_that_is_never_filled_takes_no_room() -> None:
    shape = HeadShape(model_width=10, heads=2, kv_heads=2, head_width=8)
    mechanism = make_mechanism("focused", shape, windows=(3, 1 << 40))
    memory = mechanism.memory()
    x, q, k = torch.randn(1, 100, 10), torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8)
    mechanism(x, q, k, k.clone(), memory=memory)
    assert isinstance(memory, SplitKeys)
    assert memory.is_split
    assert memory.bytes == 2 * (100 + 4 + 3 - 1 + 4) * 8 * 4
    assert memory.bytes == 2 * 2 * memory.kept(100) * 8 * 4


def test_fixed_size_holds_as_many_tokens_and_no_more() -> None:
    mechanism, text = focused("mixed"), tokens()
    memory = mechanism.memory()
    memory.capacity = LENGTH
    found = fed(mechanism, text, CHUNKS["chunks"], memory=memory)
    torch.testing.assert_close(found, mechanism(*text).output)
    with pytest.raises(ValueError, match=f"^the cache has room for {LENGTH} tokens and holds {LENGTH}, got 1 more$"):
        memory.append(*tokens(1))


def test_options_survive_json_lists_with_null() -> None:
    config = config_from_options("focused", {"windows": [None, 256, None], "sinks": 4})
    assert config.windows == (None, 256, None)  # type: ignore[attr-defined]
    assert config_from_options("focused", options_from_config(config)) == config


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"windows": (None, 4)},
            "must have an entry for each of the 3 key heads (or one for all of them, or none), got 2",
        ),
        ({"windows": (0, 4, 4)}, "a window of windows must be at least 1, got 0"),
        ({"windows": (2.5, 4, 4)}, "a window of windows must be a whole number, got 2.5"),
        ({"windows": 4}, "windows must list a number or None for each key head, got 4"),
        ({"windows": "444"}, "windows must list a number or None for each key head, got '444'"),
        ({"sinks": -1}, "sinks must be at least 0, got -1"),
    ],
)
def test_wrong_maps_are_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^[^\n]*{re.escape(sentence)}[^\n]*$"):
        make_mechanism("focused", SHAPE, **options)
