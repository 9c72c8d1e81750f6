"""What is put to the test: any causal attention, or a mechanism of ours, behind one way to call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varifocal.attention.mechanisms.base import HeadShape, Mechanism

Attention = Callable[..., Tensor]
"""attention(q [B,H,T,D], k [B,G,S,D], v [B,G,S,D]) -> [B,H,T,D]: the queries are the last T of the S positions.

It may also take `documents` [B, S] and `positions` [T], as varifocal.attend does. If it keeps a cache of its own, it
may have a method step(q, k, v, cache) -> (output, cache) that takes only the new tokens, with cache None at first."""


class Tokens(NamedTuple):
    """Everything a mechanism may read of S tokens."""

    x: Tensor
    """[B, S, C]."""
    q: Tensor
    """[B, H, S, D]."""
    k: Tensor
    """[B, G, S, D]."""
    v: Tensor
    """[B, G, S, D]."""

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def each(self, change: Callable[[Tensor, int], Tensor]) -> Tokens:
        """Every tensor changed by `change(tensor, its token dimension)`."""
        return Tokens(change(self.x, 1), *(change(tensor, 2) for tensor in (self.q, self.k, self.v)))

    def part(self, begin: int, end: int) -> Tokens:
        """Tokens begin..end-1."""
        return self.each(lambda tensor, dim: tensor.narrow(dim, begin, end - begin))

    def rows(self, index: Tensor) -> Tokens:
        """These rows of the batch."""
        return Tokens(*(tensor[index] for tensor in self))


def join_tokens(parts: Iterable[Tokens]) -> Tokens:
    """Tokens one after the other."""
    x, *heads = zip(*parts, strict=True)
    return Tokens(torch.cat(x, dim=1), *(torch.cat(tensors, dim=2) for tensors in heads))


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """One attention under test."""

    name: str
    window: int | None = None
    """The number of keys that it reads, all others being out of reach; None if it is not a pure window."""
    selects: int | None = None
    """The length of the units that it ranks and selects (1 for keys); None if it does not select."""

    @property
    def takes(self) -> frozenset[str]:
        """Which of "documents" and "positions" it understands."""
        return frozenset({"documents", "positions"})

    def output(
        self,
        tokens: Tokens,
        *,
        last: int | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The output for all queries, for the last `last`, or for those at `positions`, with all tokens as keys."""
        raise NotImplementedError

    def step(self, new: Tokens, cache: Any) -> tuple[Tensor, Any]:
        """The output for new tokens after those of the cache (None at first), and the cache with them.

        Here for an attention that is given all keys each time: the cache holds the tokens themselves.
        """
        tokens = new if cache is None else join_tokens((cache, new))
        return self.output(tokens, last=new.length), tokens

    def selected(self, tokens: Tokens) -> Tensor | None:
        """What was selected [B, H, T, K], if it selects and says so."""
        return None

    def with_repeated_heads(self) -> Subject:
        """The same attention for keys and values that are repeated for every query head."""
        return self

    def parameters(self) -> list[nn.Parameter]:
        """What it learns."""
        return []


@dataclass(frozen=True, eq=False, kw_only=True)
class CallableSubject(Subject):
    """Any function of q, k and v."""

    attention: Attention

    @property
    def takes(self) -> frozenset[str]:
        # A module's own call takes anything and hands it on.
        called = self.attention.forward if isinstance(self.attention, nn.Module) else self.attention
        parameters = inspect.signature(called).parameters.values()
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return frozenset({"documents", "positions"})
        return frozenset(parameter.name for parameter in parameters) & {"documents", "positions"}

    def output(
        self,
        tokens: Tokens,
        *,
        last: int | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        q = queries_of(tokens, last, positions).q
        given = {"documents": documents, "positions": positions}
        return self.attention(
            q, tokens.k, tokens.v, **{key: value for key, value in given.items() if value is not None}
        )

    def step(self, new: Tokens, cache: Any) -> tuple[Tensor, Any]:
        own_step = getattr(self.attention, "step", None)
        if own_step is not None:
            output, cache = own_step(new.q, new.k, new.v, cache)
            return output, cache
        return super().step(new, cache)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.attention.parameters()) if isinstance(self.attention, nn.Module) else []


@dataclass(frozen=True, eq=False, kw_only=True)
class MechanismSubject(Subject):
    """A mechanism of ours on a backend."""

    mechanism: Mechanism[Any]
    backend: str = "auto"

    def call(self, tokens: Tokens, last: int | None, positions: Tensor | None, documents: Tensor | None) -> Any:
        queries = queries_of(tokens, last, positions)
        memory = self.mechanism.memory()
        memory.records_past = True
        remembered = memory.append(*tokens)
        return self.mechanism.read(
            queries.x, queries.q, remembered, documents=documents, positions=positions, backend=self.backend
        )

    def step(self, new: Tokens, cache: Any) -> tuple[Tensor, Any]:
        """New tokens against the mechanism's own memory of all before them."""
        memory = self.mechanism.memory() if cache is None else cache
        return self.mechanism(*new, memory=memory, backend=self.backend).output, memory

    def output(
        self,
        tokens: Tokens,
        *,
        last: int | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        result: Tensor = self.call(tokens, last, positions, documents).output
        return result

    def selected(self, tokens: Tokens) -> Tensor | None:
        records: dict[str, Tensor] = self.call(tokens, None, None, None).records
        return records.get("selected")

    def with_repeated_heads(self) -> MechanismSubject:
        shape = self.mechanism.shape
        config = self.mechanism.config.for_repeated_heads(shape.heads // shape.kv_heads)
        twin = type(self.mechanism)(config, replace(shape, kv_heads=shape.heads))
        twin = twin.to(next(self.mechanism.parameters(), torch.empty(0, dtype=torch.float64)).dtype)
        twin.load_state_dict(
            {
                name: repeat_heads(tensor, shape, like=twin.state_dict()[name])
                for name, tensor in self.mechanism.state_dict().items()
            }
        )
        return replace(self, mechanism=twin)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.mechanism.parameters())


def repeat_heads(tensor: Tensor, shape: HeadShape, *, like: Tensor) -> Tensor:
    """A parameter of the key heads, repeated for every query head; any other parameter as it is."""
    if tensor.shape == like.shape:
        return tensor
    per_head = tensor.unflatten(0, (shape.kv_heads, -1))  # type: ignore[no-untyped-call]
    repeated: Tensor = per_head.repeat_interleave(shape.heads // shape.kv_heads, dim=0).flatten(0, 1)
    return repeated


def queries_of(tokens: Tokens, last: int | None, positions: Tensor | None) -> Tokens:
    """The tokens whose queries ask."""
    if positions is not None:
        return tokens.each(lambda tensor, dim: tensor.index_select(dim, positions))
    return tokens if last is None else tokens.part(tokens.length - last, tokens.length)
