"""However tokens come, go and change rows, a memory gives what one that saw the whole text at once would give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from varifocal.attention.mechanisms.dynamic_sparse import IndexKeys
from varifocal.attention.mechanisms.sparse_geometric import PairHalves
from varifocal.attention.memories import KeysAndValues, Memory, RankedBlocks, RecentKeys, Remembered, SegmentSummaries
from varifocal.attention.memories.rows import LEAST_ROOM
from varifocal.equations.layout import Layout, make_layout

BATCH, HEADS, KV_HEADS, WIDTH, MODEL_WIDTH = 2, 4, 2, 8, 12
LENGTH = 23
BLOCK = 4
REACH = 5

CHUNKS: dict[str, list[int]] = {
    "one by one": [1] * LENGTH,
    "prefill": [9, *[1] * (LENGTH - 9)],
    "chunks": [3, 7, 1, 1, 6, 5],
    "two": [11, 12],
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


INDEX_WEIGHT = normal(KV_HEADS, 3, WIDTH, seed=11)
PAIR_WEIGHT = normal(HEADS, 3, WIDTH, seed=12)

KINDS: dict[str, Callable[[], Memory]] = {
    "keys and values": KeysAndValues,
    "ranked blocks": lambda: KeysAndValues(RankedBlocks(BLOCK)),
    "index keys": lambda: IndexKeys(INDEX_WEIGHT, None),
    "index keys, ranked blocks": lambda: IndexKeys(INDEX_WEIGHT, RankedBlocks(BLOCK, of="index_keys")),
    "pair halves": lambda: PairHalves(PAIR_WEIGHT),
    "segment summaries": lambda: SegmentSummaries(BLOCK),
    "recent keys": lambda: RecentKeys(REACH),
}
DERIVED = ["ranked blocks", "index keys, ranked blocks", "segment summaries"]
"""Those that derive something from their tokens, which could be stale."""

every_kind = pytest.mark.parametrize("kind", KINDS)
every_derived = pytest.mark.parametrize("kind", DERIVED)


class Text(NamedTuple):
    """What a layer makes of the tokens of a text."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    def part(self, begin: int, end: int) -> Text:
        return Text(self.x[:, begin:end], *(one[:, :, begin:end] for one in self[1:]))

    def rows(self, index: Tensor) -> Text:
        return Text(*(one[index] for one in self))

    def then(self, other: Text) -> Text:
        return Text(
            torch.cat((self.x, other.x), 1), *(torch.cat(pair, 2) for pair in zip(self[1:], other[1:], strict=True))
        )

    @property
    def length(self) -> int:
        return self.x.shape[1]


def text(length: int = LENGTH, *, seed: int = 0, batch: int = BATCH) -> Text:
    return Text(
        normal(batch, length, MODEL_WIDTH, seed=seed),
        normal(batch, HEADS, length, WIDTH, seed=seed + 1),
        normal(batch, KV_HEADS, length, WIDTH, seed=seed + 2),
        normal(batch, KV_HEADS, length, WIDTH, seed=seed + 3),
    )


def feed(memory: Memory, tokens: Text, chunks: list[int], *, documents: Tensor | None = None) -> Remembered:
    """What the last of several chunks may read."""
    begin, before = 0, memory.length
    for chunk in chunks:
        end = begin + chunk
        layout = None if documents is None else layout_of(chunk, before + end, documents)
        found = memory.append(*tokens.part(begin, end), layout=layout)
        begin = end
    return found


def layout_of(queries: int, keys: int, documents: Tensor) -> Layout:
    return make_layout(
        batch=BATCH,
        queries=queries,
        keys=keys,
        documents=documents[:, :keys],
        positions=None,
        device=torch.device("cpu"),
    )


def assert_remembers(found: Remembered, tokens: Text, memory: Memory) -> None:
    """What is remembered is that of the whole text, as far as it is kept, and nothing derived from it is stale."""
    kept = found.k.shape[2]
    last = tokens.part(tokens.length - kept, tokens.length)
    assert torch.equal(found.k, last.k)
    assert torch.equal(found.v, last.v)
    notes = memory.notes(*last)
    assert set(found.notes) == set(notes)
    for name, note in notes.items():
        torch.testing.assert_close(found.notes[name], note)
    if not isinstance(memory, RecentKeys):
        assert kept == tokens.length
    if found.shortcuts is not None:
        assert_fresh(found, tokens)


def assert_fresh(found: Remembered, tokens: Text) -> None:
    """Means and summaries are those of the text's blocks, each made from its own tokens."""
    assert found.shortcuts is not None
    whole = tokens.length // BLOCK
    if (means := found.shortcuts.block_means) is not None:
        keys = found.notes.get("index_keys", found.k)
        wanted = keys[:, :, : whole * BLOCK].reshape(*keys.shape[:2], whole, BLOCK, keys.shape[3]).mean(dim=3)
        torch.testing.assert_close(means[:, :, :whole], wanted)
    if (summaries := found.shortcuts.segment_summaries) is not None:
        assert summaries.shape == (tokens.x.shape[0], HEADS, whole, 2 * WIDTH)
        key = found.k[:, :, : whole * BLOCK].reshape(*found.k.shape[:2], whole, BLOCK, WIDTH).amax(dim=3)
        torch.testing.assert_close(summaries[..., :WIDTH], key.repeat_interleave(HEADS // KV_HEADS, dim=1))
        torch.testing.assert_close(summaries[..., WIDTH:], summary_values(tokens, whole))


def summary_values(tokens: Text, segments: int) -> Tensor:
    """[B, H, N, D]: softmax(max q . K) V of each segment, one after the other."""
    found = []
    for segment in range(segments):
        part = tokens.part(segment * BLOCK, (segment + 1) * BLOCK)
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (part.k, part.v))
        scores = part.q.amax(dim=2, keepdim=True) @ k.mT / WIDTH**0.5
        found.append(scores.softmax(dim=-1) @ v)
    return torch.cat(found, dim=2)


def reachable(found: Remembered) -> Remembered:
    """The part that the last query of a short memory can read."""
    return Remembered(found.k[:, :, -REACH:], found.v[:, :, -REACH:])


@every_kind
@pytest.mark.parametrize("chunks", CHUNKS)
def test_tokens_in_any_chunks_are_remembered_as_the_whole(kind: str, chunks: str) -> None:
    memory, tokens = KINDS[kind](), text()
    assert memory.read() is None
    found = feed(memory, tokens, CHUNKS[chunks])
    assert_remembers(found, tokens, memory)
    assert memory.length == LENGTH
    if kind == "recent keys":
        whole = KINDS[kind]().append(*tokens)
        assert torch.equal(reachable(found).k, reachable(whole).k)


@every_derived
@pytest.mark.parametrize("chunks", ["one by one", "prefill", "chunks", "two"])
def test_means_and_summaries_are_given_to_all_but_the_first_call(kind: str, chunks: str) -> None:
    memory, tokens = KINDS[kind](), text()
    first, *others = CHUNKS[chunks]
    assert memory.append(*tokens.part(0, first)).shortcuts is None
    begin = first
    for chunk in others:
        found = memory.append(*tokens.part(begin, begin + chunk))
        begin += chunk
        assert (found.shortcuts is not None) == (begin >= BLOCK or kind != "segment summaries")
        assert_remembers(found, tokens.part(0, begin), memory)


@pytest.mark.parametrize("kind", ["ranked blocks", "index keys, ranked blocks"])
def test_means_restart_with_every_document_and_skip_padding(kind: str) -> None:
    documents = torch.tensor([[-1] * 3 + [0] * 9 + [1] * 11, [0] * 14 + [1] * 9])
    memory, tokens = KINDS[kind](), text()
    found = feed(memory, tokens, [6, 1, 1, 5, *[1] * 10], documents=documents)
    assert found.shortcuts is not None
    means = found.shortcuts.block_means
    assert means is not None
    keys = found.notes.get("index_keys", found.k)
    for row, first in ((0, 3), (0, 7), (0, 12), (0, 16), (1, 0), (1, 4), (1, 8), (1, 14), (1, 18)):
        torch.testing.assert_close(means[row, :, first // BLOCK], keys[row, :, first : first + BLOCK].mean(dim=1))


def test_summaries_are_not_kept_of_several_documents() -> None:
    documents = torch.tensor([[0] * 9 + [1] * 14, [0] * 14 + [1] * 9])
    memory, tokens = SegmentSummaries(BLOCK), text()
    assert feed(memory, tokens, [9, 1, 1, 12], documents=documents).shortcuts is None
    assert memory.summaries is None


@every_kind
def test_single_tokens_are_written_in_place(kind: str) -> None:
    memory, tokens = KINDS[kind](), text(LEAST_ROOM)
    found = memory.append(*tokens.part(0, 10))
    found = memory.append(*tokens.part(10, 11))
    rooms = {name: rows.room.data_ptr() for name, rows in memory.rows.items() if rows.room is not None}
    assert set(rooms) == set(memory.rows)
    for token in range(11, 40):
        found = memory.append(*tokens.part(token, token + 1))
        kept = memory.rows["k"]
        assert kept.room is not None
        assert found.k.untyped_storage().data_ptr() == kept.room.untyped_storage().data_ptr()
    assert rooms == {name: rows.room.data_ptr() for name, rows in memory.rows.items() if rows.room is not None}


@every_kind
def test_first_tokens_are_taken_without_a_copy_and_never_written_to(kind: str) -> None:
    memory, tokens = KINDS[kind](), text()
    given = tokens.part(0, 12)
    before = given.k.clone(), given.v.clone()
    assert memory.append(*given).k.data_ptr() == given.k.data_ptr()
    if kind != "recent keys":
        memory.crop(5)
        memory.append(*text(5, seed=40))
    feed(memory, text(8, seed=50), [1] * 8)
    assert torch.equal(given.k, before[0])
    assert torch.equal(given.v, before[1])


@every_kind
def test_growth_copies_seldom(kind: str) -> None:
    memory, tokens = KINDS[kind](), text(700, batch=1)
    rooms: list[int] = []
    memory.append(*tokens.part(0, 1))
    for token in range(1, 700):
        memory.append(*tokens.part(token, token + 1))
        room = memory.rows["k"].room
        assert room is not None
        if not rooms or rooms[-1] != room.data_ptr():
            rooms.append(room.data_ptr())
    assert len(rooms) <= 1 + 700 // LEAST_ROOM


@every_kind
@pytest.mark.parametrize("chunks", CHUNKS)
def test_text_goes_on_after_a_crop_as_if_the_tokens_had_not_been(kind: str, chunks: str) -> None:
    memory, tokens, other = KINDS[kind](), text(), text(6, seed=20)
    memory.records_past = True
    feed(memory, tokens, CHUNKS[chunks])
    memory.crop(7)
    assert memory.length == LENGTH - 7
    read = memory.read()
    assert read is not None
    assert_remembers(read, tokens.part(0, LENGTH - 7), memory)
    whole = tokens.part(0, LENGTH - 7).then(other)
    found = feed(memory, other, [1, 1, 4])
    assert_remembers(found, whole, memory)


@every_kind
def test_crop_of_nothing_changes_nothing(kind: str) -> None:
    memory, tokens = KINDS[kind](), text()
    feed(memory, tokens.part(0, 12), [11, 1])
    memory.crop(0)
    assert memory.length == 12
    assert_remembers(feed(memory, tokens.part(12, LENGTH), [1] * 11), tokens, memory)


@every_kind
@pytest.mark.parametrize("tokens", [-1, 13])
def test_more_tokens_than_there_are_cannot_be_taken_back(kind: str, tokens: int) -> None:
    memory = KINDS[kind]()
    memory.records_past = True
    feed(memory, text(12), [11, 1])
    with pytest.raises(ValueError, match=f"^cannot take back {tokens} tokens of 12$"):
        memory.crop(tokens)
    assert memory.length == 12


@every_kind
@pytest.mark.parametrize("chunks", CHUNKS)
def test_rows_change_places_in_all_that_is_kept(kind: str, chunks: str) -> None:
    memory, tokens, order = KINDS[kind](), text(), torch.tensor([1, 1, 0])
    feed(memory, tokens, CHUNKS[chunks])
    memory.reorder(order)
    other = text(5, seed=20, batch=3)
    found = feed(memory, other, [1, 1, 3])
    assert_remembers(found, tokens.rows(order).then(other), memory)


@every_kind
@pytest.mark.parametrize("chunks", CHUNKS)
def test_rows_are_repeated_in_all_that_is_kept(kind: str, chunks: str) -> None:
    memory, tokens = KINDS[kind](), text()
    feed(memory, tokens, CHUNKS[chunks])
    memory.repeat(3)
    other = text(5, seed=20, batch=6)
    found = feed(memory, other, [1, 1, 3])
    assert_remembers(found, tokens.rows(torch.tensor([0, 0, 0, 1, 1, 1])).then(other), memory)


@every_kind
def test_reset_forgets_everything(kind: str) -> None:
    memory = KINDS[kind]()
    feed(memory, text(), CHUNKS["prefill"])
    memory.reset()
    assert (memory.length, memory.bytes, memory.read()) == (0, 0, None)
    other = text(seed=20, batch=3)
    assert_remembers(feed(memory, other, CHUNKS["chunks"]), other, memory)


@every_kind
def test_copies_go_on_by_themselves(kind: str) -> None:
    memory, tokens = KINDS[kind](), text()
    feed(memory, tokens, CHUNKS["prefill"])
    twin = copy.deepcopy(memory)
    mine, yours = text(6, seed=20), text(6, seed=30)
    for token in range(6):
        found, other = memory.append(*mine.part(token, token + 1)), twin.append(*yours.part(token, token + 1))
    assert_remembers(found, tokens.then(mine), memory)
    assert_remembers(other, tokens.then(yours), twin)


@every_kind
def test_move_to_the_device_where_it_is_changes_nothing(kind: str) -> None:
    memory, tokens = KINDS[kind](), text()
    feed(memory, tokens.part(0, 12), [11, 1])
    memory.move("cpu")
    assert_remembers(feed(memory, tokens.part(12, LENGTH), [1] * 11), tokens, memory)


@every_kind
def test_bytes_are_those_of_the_tensors_that_it_holds(kind: str) -> None:
    memory = KINDS[kind]()
    assert memory.bytes == 0
    feed(memory, text(), CHUNKS["prefill"])
    tensors = [rows.room for rows in memory.rows.values()]
    tensors += [getattr(memory, name, None) for name in ("means", "summaries")]
    assert memory.bytes == sum(one.untyped_storage().nbytes() for one in tensors if one is not None)


def test_kept_means_and_summaries_are_counted_in_bytes() -> None:
    plain = KeysAndValues()
    feed(plain, text(), CHUNKS["prefill"])
    ranked = KINDS["ranked blocks"]()
    feed(ranked, text(), CHUNKS["prefill"])
    assert ranked.bytes > plain.bytes
    summaries = SegmentSummaries(BLOCK)
    feed(summaries, text(), CHUNKS["prefill"])
    assert summaries.bytes - Memory.bytes.fget(summaries) == BATCH * HEADS * (LENGTH // BLOCK) * 2 * WIDTH * 4  # type: ignore[attr-defined]


@every_kind
@pytest.mark.parametrize("chunks", ["two", "chunks", "prefill"])
def test_gradients_flow_through_all_that_is_kept(kind: str, chunks: str) -> None:
    def gradients(parts: list[int]) -> list[Tensor | None]:
        tokens = Text(*(one.requires_grad_() for one in text()))
        memory = KINDS[kind]()
        if isinstance(memory, RecentKeys):
            memory = RecentKeys(LENGTH + 1)
        found = feed(memory, tokens, parts)
        total = sum((one.square().sum() for one in (found.k, found.v, *found.notes.values())), torch.zeros(()))
        return list(torch.autograd.grad(total, tokens, allow_unused=True))

    for found, wanted in zip(gradients(CHUNKS[chunks]), gradients([LENGTH]), strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            torch.testing.assert_close(found, wanted)


def test_keys_that_learn_are_followed_after_tokens_that_do_not() -> None:
    memory, tokens = KINDS["ranked blocks"](), text()
    with torch.no_grad():
        feed(memory, tokens.part(0, 10), [8, 1, 1])
    learning = Text(*(one.detach().requires_grad_() for one in tokens.part(10, 14)))
    found = memory.append(*learning)
    (gradient,) = torch.autograd.grad(found.k.sum(), learning.k)
    assert torch.equal(gradient, torch.ones_like(gradient))
    with torch.no_grad():
        found = memory.append(*tokens.part(14, 15))
    assert_remembers(found, tokens.part(0, 15), memory)


@every_kind
@pytest.mark.parametrize("chunks", ["one by one", "chunks"])
def test_memory_of_a_fixed_size_holds_as_many_tokens_and_no_more(kind: str, chunks: str) -> None:
    memory, tokens = KINDS[kind](), text()
    memory.capacity = LENGTH
    found = feed(memory, tokens, CHUNKS[chunks])
    assert_remembers(found, tokens, memory)
    sentence = f"^the cache has room for {LENGTH} tokens and holds {LENGTH}, got 1 more$"
    with pytest.raises(ValueError, match=sentence):
        memory.append(*text(1))
    assert memory.length == LENGTH
    memory.reset()
    other = text(seed=9)
    assert_remembers(feed(memory, other, CHUNKS[chunks]), other, memory)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "recent keys"])
def test_memory_of_a_fixed_size_never_grows(kind: str) -> None:
    memory, tokens = KINDS[kind](), text()
    memory.capacity = 40
    memory.append(*tokens.part(0, 5))
    room = memory.rows["k"].room
    assert room is not None
    feed(memory, tokens.part(5, LENGTH), [1] * (LENGTH - 5))
    assert memory.rows["k"].room is room
    assert room.shape[2] == 40


def window_bytes(tokens: int) -> int:
    """Bytes of the keys and values of some tokens."""
    return 2 * BATCH * KV_HEADS * tokens * WIDTH * 4


def test_window_keeps_no_more_than_the_next_query_can_read() -> None:
    memory, tokens = RecentKeys(REACH), text()
    begin = 0
    for chunk in CHUNKS["chunks"]:
        found = memory.append(*tokens.part(begin, begin + chunk))
        begin += chunk
        assert found.k.shape[2] == min(begin, REACH - 1 + chunk)
        read = memory.read()
        assert read is not None
        assert read.k.shape[2] == min(begin, REACH - 1)


@pytest.mark.parametrize("capacity", [None, 4096], ids=["growing", "fixed size"])
def test_window_gives_memory_back_after_a_long_prefill(capacity: int | None) -> None:
    memory, tokens = RecentKeys(REACH), text(3000)
    memory.capacity = capacity
    memory.append(*tokens)
    assert memory.bytes == window_bytes(REACH - 1)
    assert {rows.filled.untyped_storage().nbytes() for rows in memory.rows.values() if rows.filled is not None} == {
        window_bytes(REACH - 1) // 2
    }
    feed(memory, text(100, seed=5), [1] * 100)
    assert memory.bytes <= window_bytes(2 * (REACH + LEAST_ROOM))


def test_window_of_a_fixed_size_is_written_in_place() -> None:
    memory, tokens = RecentKeys(REACH), text(100)
    memory.capacity = 4096
    memory.append(*tokens.part(0, 40))
    rooms = []
    for token in range(40, 90):
        memory.append(*tokens.part(token, token + 1))
        room = memory.rows["k"].room
        rooms.append(None if room is None else room.data_ptr())
    assert None not in rooms
    assert len(set(rooms)) <= 2


def test_window_of_one_key_keeps_nothing() -> None:
    memory, tokens = RecentKeys(1), text()
    for chunk, begin in ((5, 0), (1, 5), (1, 6), (4, 7)):
        found = memory.append(*tokens.part(begin, begin + chunk))
        assert torch.equal(found.k, tokens.part(begin, begin + chunk).k)
        read = memory.read()
        assert read is not None
        assert read.k.shape[2] == 0
    assert memory.length == 11


def test_tokens_that_a_window_forgot_cannot_be_taken_back() -> None:
    memory = RecentKeys(REACH)
    memory.append(*text())
    sentence = (
        r"^cannot take back 3 tokens: a window of 5 keys forgot 19 before them; "
        r"call activate_past_recording\(\) on the cache before them$"
    )
    with pytest.raises(ValueError, match=sentence):
        memory.crop(3)
    assert_remembers(feed(memory, text(2, seed=7), [1, 1]), text().then(text(2, seed=7)), memory)


def test_window_that_forgot_nothing_can_be_cropped() -> None:
    memory, tokens = RecentKeys(30), text()
    memory.append(*tokens)
    memory.crop(8)
    assert_remembers(memory.append(*text(3, seed=7)), tokens.part(0, LENGTH - 8).then(text(3, seed=7)), memory)


def test_window_that_records_its_past_forgets_at_the_next_crop() -> None:
    memory, tokens = RecentKeys(REACH), text()
    memory.append(*tokens.part(0, 12))
    memory.records_past = True
    feed(memory, tokens.part(12, 20), [1, 4, 3])
    assert memory.rows["k"].length == REACH - 1 + 8
    memory.crop(6)
    assert memory.rows["k"].length == REACH - 1
    found = memory.append(*tokens.part(14, 20))
    assert_remembers(found, tokens.part(0, 20), memory)
    with pytest.raises(ValueError, match=r"^cannot take back 9 tokens: a window of 5 keys forgot"):
        memory.crop(9)
    memory.crop(0)
    assert memory.rows["k"].length == REACH - 1


@pytest.mark.parametrize(("kind", "plain"), [
    ("keys and values", True), ("ranked blocks", True), ("recent keys", True),
    ("index keys", False), ("pair halves", False), ("segment summaries", False),
])  # fmt: skip
def test_memory_is_plain_if_it_needs_nothing_but_keys_and_values(kind: str, plain: bool) -> None:
    assert KINDS[kind]().is_plain is plain


def test_copy_of_a_memory_shares_the_weights_of_its_mechanism() -> None:
    weight = torch.nn.Parameter(INDEX_WEIGHT)
    memory = IndexKeys(weight, None)
    assert copy.deepcopy(memory).weight is weight
    halves = PairHalves(weight)
    assert copy.deepcopy(halves).weight is weight
