"""The rows of the conformance table: each compares two ways that must give the same, outputs and gradients.

Most rows are an equality: the output for a batch of tokens, computed whole and computed in another way (in chunks,
packed, padded, ...). Both are differentiated towards the same tokens and parameters with the same random cotangent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from varifocal.attention.conformance.subject import Subject, Tokens, join_tokens
from varifocal.equations.problem import accumulation_dtype


@dataclass(frozen=True)
class Row:
    """One promise of the conformance table."""

    name: str
    promise: str
    check: Callable[[Subject, Bench], float]
    """The largest error found; raises BrokenError if the promise is broken, NotOfferedError if it does not apply."""


class BrokenError(Exception):
    """A promise is broken; the message says how."""


class NotOfferedError(Exception):
    """The attention does not offer what the row needs; the message says what."""


@dataclass(frozen=True)
class Bench:
    """Where inputs come from: sizes, type, device and seed."""

    heads: int
    kv_heads: int
    head_width: int
    model_width: int
    dtype: torch.dtype
    device: torch.device
    seed: int

    def normal(self, *shape: int, draw: int = 0) -> Tensor:
        """Standard normal numbers; another draw gives others."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + draw)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.device, self.dtype)

    def tokens(self, length: int, *, batch: int = 2, draw: int = 0) -> Tokens:
        """Random tokens that ask for gradients."""
        return Tokens(
            self.normal(batch, length, self.model_width, draw=4 * draw),
            self.normal(batch, self.heads, length, self.head_width, draw=4 * draw + 1),
            self.normal(batch, self.kv_heads, length, self.head_width, draw=4 * draw + 2),
            self.normal(batch, self.kv_heads, length, self.head_width, draw=4 * draw + 3),
        ).each(lambda tensor, dim: tensor.requires_grad_())

    @property
    def tolerance(self) -> float:
        """The largest error, relative to the largest entry, that another order of summation explains."""
        epsilon = torch.finfo(self.dtype).eps
        # Inputs of 16 bits are rounded at the end (a few units); wider ones accumulate over some hundred terms.
        return 4 * epsilon if accumulation_dtype(self.dtype) != self.dtype else 512 * epsilon


LENGTH = 29
"""Tokens in most rows: a prime, so that no window, block or chunk divides it."""
CUTS = (0, 1, 6, 7, 16, LENGTH)
"""Where prefixes end and chunks are cut: a single token, short and long chunks."""
DOCUMENT_LENGTHS = (9, 1, 13, 6)


def check_future(subject: Subject, bench: Bench) -> float:
    """Nothing of a later token reaches an earlier output, nor its gradient: exactly 0."""
    tokens, other = bench.tokens(LENGTH), bench.tokens(LENGTH, draw=1)
    output = subject.output(tokens)
    for cut in CUTS[1:-1]:
        changed = subject.output(join_tokens((tokens.part(0, cut), other.part(cut, LENGTH))))
        leak = largest(output[:, :, :cut] - changed[:, :, :cut])
        if leak != 0:
            raise BrokenError(
                f"changing tokens from {cut} on changes the output before {cut} by {leak:.1e}, expected exactly 0"
            )
        gradients = torch.autograd.grad(output[:, :, :cut].sum(), tokens, retain_graph=True, allow_unused=True)
        for name, gradient, dim in zip("xqkv", gradients, (1, 2, 2, 2), strict=True):
            if gradient is not None and (leak := largest(gradient.narrow(dim, cut, LENGTH - cut))) != 0:
                raise BrokenError(
                    f"the output before {cut} has a gradient of {leak:.1e} to {name} from {cut} on, expected exactly 0"
                )
    return 0.0


def check_prefix(subject: Subject, bench: Bench) -> float:
    """The first tokens alone give the same outputs as with others after them."""
    tokens = bench.tokens(LENGTH)
    whole = subject.output(tokens)
    return max(
        compare(
            bench,
            subject,
            tokens,
            whole[:, :, :cut],
            subject.output(tokens.part(0, cut)),
            f"the first {cut} tokens alone",
        )
        for cut in CUTS[1:-1]
    )


def check_chunks(subject: Subject, bench: Bench) -> float:
    """Chunk after chunk against a growing cache gives the same as the whole."""
    return check_steps(subject, bench, CUTS, "chunk by chunk")


def check_steps(subject: Subject, bench: Bench, cuts: tuple[int, ...], how: str) -> float:
    """Stepping from cut to cut gives the same as the whole."""
    tokens = bench.tokens(LENGTH)
    outputs, cache = [], None
    for begin, end in itertools.pairwise(cuts):
        output, cache = subject.step(tokens.part(begin, end), cache)
        outputs.append(output)
    return compare(bench, subject, tokens, subject.output(tokens), torch.cat(outputs, dim=2), how)


def check_tokens(subject: Subject, bench: Bench) -> float:
    """Token by token against a growing cache gives the same as the whole."""
    return check_steps(subject, bench, tuple(range(LENGTH + 1)), "token by token")


def check_positions(subject: Subject, bench: Bench) -> float:
    """Queries at given positions, in any order, with later keys present, give the same as the whole."""
    require(subject, "positions")
    tokens = bench.tokens(LENGTH)
    positions = torch.tensor((17, 3, 28, 0, 4), device=bench.device)
    return compare(
        bench,
        subject,
        tokens,
        subject.output(tokens)[:, :, positions],
        subject.output(tokens, positions=positions),
        f"queries at {positions.tolist()}",
    )


def check_packed(subject: Subject, bench: Bench) -> float:
    """Documents packed into one row give the same as each alone."""
    require(subject, "documents")
    tokens = bench.tokens(sum(DOCUMENT_LENGTHS))
    lengths = torch.tensor(DOCUMENT_LENGTHS, device=bench.device)
    documents = torch.arange(len(lengths), device=bench.device).repeat_interleave(lengths).expand(2, -1)
    ends = lengths.cumsum(0).tolist()
    alone = [subject.output(tokens.part(end - size, end)) for size, end in zip(DOCUMENT_LENGTHS, ends, strict=True)]
    packed = subject.output(tokens, documents=documents)
    return compare(bench, subject, tokens, torch.cat(alone, dim=2), packed, "packed documents")


def check_padded(subject: Subject, bench: Bench) -> float:
    """Padding before or after the tokens, whatever it holds, changes nothing."""
    require(subject, "documents")
    tokens = bench.tokens(LENGTH)
    whole = subject.output(tokens)
    worst = 0.0
    for before, after in ((5, 0), (0, 3), (4, 2)):
        padding = tuple(bench.tokens(size, draw=7) for size in (before, after))
        documents = torch.full((2, before + LENGTH + after), -1, device=bench.device)
        documents[:, before : before + LENGTH] = 0
        padded = subject.output(join_tokens((padding[0], tokens, padding[1])), documents=documents)
        how = f"{before} padding tokens before and {after} after"
        worst = max(worst, compare(bench, subject, tokens, whole, padded[:, :, before : before + LENGTH], how))
    return worst


def check_batch(subject: Subject, bench: Bench) -> float:
    """A row gives the same whatever the other rows are and in whatever order."""
    tokens = bench.tokens(LENGTH, batch=3)
    whole = subject.output(tokens)
    order = torch.tensor((2, 0, 1), device=bench.device)
    worst = compare(bench, subject, tokens, whole[order], subject.output(tokens.rows(order)), "rows in another order")
    alone = torch.cat([subject.output(tokens.rows(row)) for row in torch.arange(3, device=bench.device)[:, None]])
    return max(worst, compare(bench, subject, tokens, whole, alone, "each row alone"))


def check_groups(subject: Subject, bench: Bench) -> float:
    """Shared key heads give the same as key heads repeated for every query head."""
    tokens = bench.tokens(LENGTH)
    groups = bench.heads // bench.kv_heads
    repeated = tokens._replace(k=tokens.k.repeat_interleave(groups, dim=1), v=tokens.v.repeat_interleave(groups, dim=1))
    twin = subject.with_repeated_heads()
    return compare(bench, None, tokens, subject.output(tokens), twin.output(repeated), "repeated key heads")


def check_empty(subject: Subject, bench: Bench) -> float:
    """A query that sees nothing gets exactly 0 with gradient exactly 0, and NaN in padding spreads nowhere."""
    require(subject, "documents")
    before = 5
    tokens = bench.tokens(LENGTH)
    poison = Tokens(*(torch.full_like(tensor, float("nan")) for tensor in bench.tokens(before))).each(
        lambda tensor, dim: tensor.requires_grad_()
    )
    poison = poison._replace(x=bench.tokens(before).x)
    documents = torch.zeros(2, before + LENGTH, dtype=torch.int64, device=bench.device)
    documents[:, :before] = -1
    output = subject.output(join_tokens((poison, tokens)), documents=documents)
    if (size := largest(output[:, :, :before])) != 0:
        raise BrokenError(f"a query that sees nothing gets {size:.1e}, expected exactly 0")
    gradients = torch.autograd.grad(output.sum(), poison, retain_graph=True, allow_unused=True)
    for name, gradient in zip("xqkv", gradients, strict=True):
        if gradient is not None and (size := largest(gradient)) != 0:
            raise BrokenError(f"the gradient to {name} of a query that sees nothing is {size:.1e}, expected exactly 0")
    return compare(bench, subject, tokens, subject.output(tokens), output[:, :, before:], "NaN in padding")


def check_ties(subject: Subject, bench: Bench) -> float:
    """With many equal scores, chunks give the same as the whole; of equal scores the lower index is selected."""
    if subject.selects is None:
        raise NotOfferedError("it does not select keys")
    unit = subject.selects
    with torch.no_grad():
        length = 8 * unit
        # Whole numbers make every dot product exact; each unit of keys appears twice in a row.
        tokens = bench.tokens(length).each(lambda tensor, dim: tensor.detach().round())
        double = torch.arange(length, device=bench.device) // (2 * unit) * (2 * unit)
        double = double + torch.arange(length, device=bench.device) % unit
        tokens = tokens._replace(x=tokens.x.index_select(1, double), k=tokens.k.index_select(2, double))
        parameters = [(parameter, parameter.clone()) for parameter in subject.parameters()]
        for parameter, _ in parameters:
            # Whole numbers multiply and add without rounding, so that equal scores are equal exactly.
            parameter.round_()
        try:
            whole = subject.output(tokens)
            outputs, cache = [], None
            for begin in range(0, length, 3):
                output, cache = subject.step(tokens.part(begin, min(begin + 3, length)), cache)
                outputs.append(output)
            selected = subject.selected(tokens)
        finally:
            for parameter, kept in parameters:
                parameter.copy_(kept)
    if selected is not None:
        number = torch.where(selected >= 0, selected // unit, -1)
        taken = (number[..., None] == torch.arange(length // unit, device=bench.device)).any(dim=3)  # [B, H, T, units]
        if bool((taken[..., 1::2] & ~taken[..., 0::2]).any()):
            raise BrokenError("of two equal scores the higher index was selected, expected the lower")
    return compare(bench, None, None, whole, torch.cat(outputs, dim=2), "chunk by chunk with equal scores")


def check_window(subject: Subject, bench: Bench) -> float:
    """A window of W reads the query's own key and the W - 1 before it, and no other."""
    if subject.window is None:
        raise NotOfferedError("it is not a pure window")
    tokens = bench.tokens(LENGTH)
    output = subject.output(tokens)
    for query in range(LENGTH):
        (gradient,) = torch.autograd.grad(output[:, :, query].sum(), tokens.v, retain_graph=True)
        read = (gradient.abs().amax(dim=(0, 1, 3)) > 0).nonzero().flatten().tolist()
        expected = list(range(max(0, query - subject.window + 1), query + 1))
        if read != expected:
            raise BrokenError(
                f"the query at {query} reads {len(read)} keys from {read[:1]} on; "
                f"a window of {subject.window} reads {len(expected)} from [{expected[0]}] on"
            )
    return 0.0


def check_gradients(subject: Subject, bench: Bench) -> float:
    """Gradients agree with finite differences, in float64."""
    if bench.dtype != torch.float64:
        raise NotOfferedError("finite differences need float64")
    tokens = bench.tokens(7, batch=1)
    leaves = (*tokens, *subject.parameters())

    def output(*values: Tensor) -> Tensor:
        return subject.output(Tokens(*values[:4]))

    try:
        torch.autograd.gradcheck(output, leaves, atol=1e-6, rtol=1e-5, nondet_tol=0.0, fast_mode=True)
    except GradcheckError as error:
        raise BrokenError(f"gradient disagrees with finite differences: {str(error).splitlines()[0]}") from error
    return 0.0


ROWS: tuple[Row, ...] = tuple(
    Row(check.__name__.removeprefix("check_"), (check.__doc__ or "").splitlines()[0], check)
    for check in (
        check_future,
        check_prefix,
        check_chunks,
        check_tokens,
        check_positions,
        check_packed,
        check_padded,
        check_batch,
        check_groups,
        check_empty,
        check_ties,
        check_window,
        check_gradients,
    )
)


def require(subject: Subject, argument: str) -> None:
    """NotOfferedError unless the attention takes the argument."""
    if argument not in subject.takes:
        raise NotOfferedError(f"it takes no {argument}")


def compare(
    bench: Bench, subject: Subject | None, tokens: Tokens | None, whole: Tensor, other: Tensor, how: str
) -> float:
    """The largest relative difference of two outputs, and of their gradients to the tokens and parameters."""
    if whole.shape != other.shape:
        raise BrokenError(f"{how}: got shape {tuple(other.shape)}, expected {tuple(whole.shape)}")
    pairs = [("output", whole, other)]
    if tokens is not None:
        cotangent = bench.normal(*whole.shape, draw=99)
        leaves = [*tokens, *(subject.parameters() if subject is not None else ())]
        names = [*"xqkv", *("a parameter" for _ in leaves[4:])]
        first, second = (
            torch.autograd.grad((output * cotangent).sum(), leaves, retain_graph=True, allow_unused=True)
            for output in (whole, other)
        )
        for name, one, two, leaf in zip(names, first, second, leaves, strict=True):
            zero = torch.zeros_like(leaf)
            pairs.append((f"gradient to {name}", zero if one is None else one, zero if two is None else two))
    worst = 0.0
    for what, one, two in pairs:
        difference = largest(one.double() - two.double()) / max(1.0, largest(one.double()))
        if not difference <= bench.tolerance:
            raise BrokenError(f"{how}: the {what} differs by {difference:.1e}, expected at most {bench.tolerance:.0e}")
        worst = max(worst, difference)
    return worst


def largest(tensor: Tensor) -> float:
    """The largest absolute entry; NaN if there is one; 0 for an empty tensor."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
