"""DESIGN.md's equation, one number at a time: Python loops over queries, heads and keys, no tensor arithmetic.

Written from DESIGN.md and the docstrings of the branches, to judge the reference: it shares no code with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from tests.cases import Inputs
from varifocal import (
    Branch,
    Causal,
    Dot,
    HeadScale,
    PairGate,
    Prefix,
    RandomBlocks,
    Score,
    Segments,
    SoftWindow,
    Strided,
    TopK,
    Window,
)
from varifocal.equations.branches import Union
from varifocal.equations.branches.head_sizes import HeadSizes

Vector = list[float]


class Answer(NamedTuple):
    """What attend must return, as nested lists."""

    output: list[list[list[Vector]]]
    """[B, H, T, D]."""
    logsumexp: list[list[list[Vector]]]
    """[B, H, T, M]."""
    selected: list[list[list[list[list[int] | None]]]]
    """[B, H, T, M] of the selected indices, ascending; None for a branch without a top-k."""


@dataclass(frozen=True)
class Query:
    """One query of one head: where it stands, and the keys it could see at most."""

    row: int
    head: int
    index: int
    """Which of the T queries it is."""
    position: int
    start: int
    """The first key of its document."""
    visible: list[int]
    """Its document's keys up to its own; empty for padding."""

    @property
    def place(self) -> int:
        """Counted from the start of its document."""
        return self.position - self.start


@dataclass(frozen=True)
class Entry:
    """Something that a softmax reads, a key or a summary: how it is rated, weighed, and what it gives."""

    score: float
    weight: float
    value: Vector


def brute_force(inputs: Inputs) -> Answer:
    """Evaluate the call, one query at a time."""
    sizes, world = inputs.case.sizes, World(inputs)
    found = [
        [[world.answer(inputs.branches, world.query(b, h, t)) for t in range(sizes.T)] for h in range(sizes.H)]
        for b in range(sizes.B)
    ]
    return Answer(
        output=[[[output for output, _, _ in head] for head in row] for row in found],
        logsumexp=[[[logsumexp for _, logsumexp, _ in head] for head in row] for row in found],
        selected=[[[selected for _, _, selected in head] for head in row] for row in found],
    )


def softmax_mean(entries: list[Entry], width: int) -> tuple[Vector, float]:
    """The mean value under softmax, and the logsumexp; 0 and minus infinity if nothing is read."""
    if not entries:
        return [0.0] * width, -math.inf
    highest = max(entry.score for entry in entries)
    masses = [entry.weight * math.exp(entry.score - highest) for entry in entries]
    total = math.fsum(masses)
    mean = [
        math.fsum(mass * entry.value[d] for mass, entry in zip(masses, entries, strict=True)) / total
        for d in range(width)
    ]
    return mean, highest + math.log(total)


class World:
    """The call's tensors as nested lists, and who reads what."""

    def __init__(self, inputs: Inputs) -> None:
        self.sizes = inputs.case.sizes
        self.q, self.k, self.v = (numbers(tensor) for tensor in (inputs.q, inputs.k, inputs.v))
        self.weights = None if inputs.weights is None else numbers(inputs.weights)
        self.score = inputs.score
        self.score_numbers = {name: numbers(value) for name, value in vars(inputs.score).items() if is_tensor(value)}
        self.documents = inputs.case.documents
        self.positions = inputs.case.positions

    def query(self, row: int, head: int, index: int) -> Query:
        """Where a query stands: the last T of the keys, or its given position."""
        if self.positions is None:
            position = self.sizes.S - self.sizes.T + index
        else:
            given: Any = self.positions
            position = given[index] if isinstance(given[0], int) else given[row][index]
        ids = (0,) * self.sizes.S if self.documents is None else self.documents[row]
        start = position
        while start > 0 and ids[start - 1] == ids[position]:
            start -= 1
        visible = list(range(start, position + 1)) if ids[position] >= 0 else []
        return Query(row, head, index, position, start, visible)

    def answer(self, branches: tuple[Branch, ...], query: Query) -> tuple[Vector, Vector, list[list[int] | None]]:
        """The query's output, and each branch's logsumexp and selection."""
        output = [0.0] * self.sizes.D
        logsumexps: Vector = []
        selections: list[list[int] | None] = []
        for number, branch in enumerate(branches):
            entries, selection = self.read(branch, query)
            mean, logsumexp = softmax_mean(entries, self.sizes.D)
            weight = 1.0 if self.weights is None else self.weights[query.row][query.head][query.index][number]
            output = [old + weight * new for old, new in zip(output, mean, strict=True)]
            logsumexps.append(logsumexp)
            selections.append(selection)
        return output, logsumexps, selections

    def key_head(self, head: int) -> int:
        """The key head that a query head reads."""
        return head // (self.sizes.H // self.sizes.G)

    def key(self, query: Query, j: int) -> Vector:
        key: Vector = self.k[query.row][self.key_head(query.head)][j]
        return key

    def value(self, query: Query, j: int) -> Vector:
        value: Vector = self.v[query.row][self.key_head(query.head)][j]
        return value

    def own(self, query: Query) -> Vector:
        own: Vector = self.q[query.row][query.head][query.index]
        return own

    def rate(self, query: Query, j: int) -> float:
        """s_ij of a key; minus infinity for a pair that the score does not read."""
        product = dot(self.own(query), self.key(query, j))
        if not isinstance(self.score, PairGate):
            return self.plain_rate(query, product)
        alpha = product / math.sqrt(self.sizes.D)
        if "scale" in self.score_numbers:
            alpha *= self.score_numbers["scale"][query.head]
        a = self.score_numbers["queries"][query.row][query.head][query.index]
        b = self.score_numbers["keys"][query.row][query.head][j]
        logit = dot(self.score_numbers["output"][query.head], [gelu(x + y) for x, y in zip(a, b, strict=True)])
        if "bias" in self.score_numbers:
            logit += self.score_numbers["bias"][query.head]
        gate = 1 / (1 + math.exp(-logit))
        if self.score.form == "product":
            return float(alpha * gate)
        if self.score.form == "threshold" and gate < self.score.threshold:
            return -math.inf
        return float(alpha + math.log(gate))

    def plain_rate(self, query: Query, product: float) -> float:
        """The score of a dot product with a key or a summary."""
        score: Score = self.score
        if isinstance(score, HeadScale):
            return float(self.score_numbers["scale"][query.head] * product / math.sqrt(self.sizes.D))
        assert isinstance(score, Dot)
        return product * (1 / math.sqrt(self.sizes.D) if score.scale is None else score.scale)

    def read(self, branch: Branch, query: Query) -> tuple[list[Entry], list[int] | None]:
        """What a branch reads, and what its top-k chose: of several members a key takes the largest weight."""
        members = branch.branches if isinstance(branch, Union) else (branch,)
        weights: dict[int, float] = {}
        summaries: list[Entry] = []
        selection: list[int] | None = None
        for member in members:
            if isinstance(member, TopK):
                keys, selection = self.top_k(member, query)
                found = dict.fromkeys(keys, 1.0)
            else:
                found = {j: self.weight(member, query, j) for j in query.visible}
            for j, weight in found.items():
                weights[j] = max(weight, weights.get(j, 0.0))
            if isinstance(member, Segments):
                summaries += self.summaries(member, query)
        scores = {j: self.rate(query, j) for j, weight in weights.items() if weight > 0}
        entries = [Entry(score, weights[j], self.value(query, j)) for j, score in scores.items() if score > -math.inf]
        return entries + summaries, selection

    def weight(self, branch: Branch, query: Query, j: int) -> float:
        """The weight of a visible key in a branch that goes by position; 0 where it is not read."""
        distance, place = query.position - j, j - query.start
        if isinstance(branch, SoftWindow):
            width = branch.width[query.row, query.head, query.index].double().item()
            return min(max((width - distance) / branch.edge, 0.0), 1.0) if distance < branch.limit else 0.0
        if isinstance(branch, Causal):
            reads = True
        elif isinstance(branch, Window):
            reads = distance < size_for(branch.size, query.head)
        elif isinstance(branch, Prefix):
            reads = place < size_for(branch.size, query.head)
        elif isinstance(branch, Strided):
            reads = distance % branch.stride == 0
        elif isinstance(branch, Segments):
            reads = place // branch.length == query.place // branch.length
        else:
            assert isinstance(branch, RandomBlocks)
            own = query.place // branch.block
            draws = range(branch.blocks)
            drawn = {scramble(own * branch.blocks + n, branch.seed) % own for n in draws} if own else set()
            reads = place // branch.block in drawn
        return float(reads)

    def top_k(self, branch: TopK, query: Query) -> tuple[list[int], list[int]]:
        """The keys of the selection, and the selection itself: keys, or the first keys of blocks."""
        if not query.visible:
            return [], []
        seen = query.place + 1
        k = min(seen, max(branch.minimum, math.ceil(branch.scale * math.sqrt(seen))))
        if branch.select == "exact":
            ratings = {j: self.rank(branch, query, [j]) for j in query.visible}
            # Of equal scores the lower index wins; what the score does not read is never selected.
            order = sorted((j for j in ratings if ratings[j] > -math.inf), key=lambda j: (-ratings[j], j))
            return sorted(order[:k]), sorted(order[:k])
        blocks = [
            list(range(first, first + branch.block))
            for first in range(query.start, query.position + 1, branch.block)
            if first + branch.block <= query.start + query.place // branch.block * branch.block
        ]
        blocks.sort(key=lambda block: (-self.rank(branch, query, block), block[0]))
        best = blocks[: math.ceil(k / branch.block)]
        own = [j for j in query.visible if (j - query.start) // branch.block == query.place // branch.block]
        return own + [j for block in best for j in block], sorted(block[0] for block in best)

    def rank(self, branch: TopK, query: Query, keys: list[int]) -> float:
        """How a top-k rates a key, or a block by the mean of its keys: by the indexer if there is one."""
        if branch.indexer is None:
            if branch.select == "exact":
                return self.rate(query, keys[0])
            return dot(self.own(query), mean([self.key(query, j) for j in keys]))
        queries, candidates = branch.indexer.queries, branch.indexer.keys
        head = query.head // (self.sizes.H // queries.shape[1])
        key_head = query.head // (self.sizes.H // candidates.shape[1])
        own = numbers(queries[query.row, head, query.index])
        return dot(own, mean([numbers(candidates[query.row, key_head, j]) for j in keys]))

    def summaries(self, branch: Segments, query: Query) -> list[Entry]:
        """One entry for each segment of the document that was complete before the query's own."""
        if not query.visible:
            return []
        queries = self.q if branch.queries is None else numbers(branch.queries)
        entries = []
        for number in range(query.place // branch.length):
            first = query.start + number * branch.length
            segment = range(first, first + branch.length)
            pooled_query = maximum([queries[query.row][query.head][j] for j in segment])
            pooled_key = maximum([self.key(query, j) for j in segment])
            inside = [
                Entry(self.plain_rate(query, dot(pooled_query, self.key(query, j))), 1.0, self.value(query, j))
                for j in segment
            ]
            value, _ = softmax_mean(inside, self.sizes.D)
            entries.append(Entry(self.plain_rate(query, dot(self.own(query), pooled_key)), 1.0, value))
        return entries


def scramble(number: int, seed: int) -> int:
    """The hash behind RandomBlocks in 32-bit arithmetic: which blocks are drawn is fixed for good by this function."""
    word = 2**32
    state = (number ^ (seed * 0x9E3779B9 % word)) % word
    state ^= state >> 16
    state = state * 0x7FEB352D % word
    state ^= state >> 15
    state = state * 0x046CA68B % word
    return state ^ (state >> 16)


def dot(left: Vector, right: Vector) -> float:
    return math.fsum(x * y for x, y in zip(left, right, strict=True))


def mean(vectors: list[Vector]) -> Vector:
    return [math.fsum(column) / len(vectors) for column in zip(*vectors, strict=True)]


def maximum(vectors: list[Vector]) -> Vector:
    return [max(column) for column in zip(*vectors, strict=True)]


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def numbers(tensor: Tensor) -> Any:
    """A tensor as nested lists of float64."""
    return tensor.detach().double().tolist()


def size_for(sizes: HeadSizes, head: int) -> float:
    """The size of a window or prefix in one head."""
    size = sizes[head] if isinstance(sizes, tuple) else sizes
    return math.inf if size is None else size
