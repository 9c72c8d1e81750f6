"""What a step runs on, as files hold it: a device's rates, and the part of a peak that is reached."""

from __future__ import annotations

from dataclasses import dataclass, field

from varifocal.results.record import Record


@dataclass(frozen=True, kw_only=True)
class Hardware(Record):
    """One device, as its maker's data sheet says or as it was measured."""

    name: str
    memory: float
    """Bytes."""
    products: dict[str, float]
    """By precision: floating-point operations a second of dense matrix products with sums in float32."""
    bandwidth: float
    """Bytes a second of its memory."""
    exponentials: float
    """Exponentials (and functions like them) a second."""
    link: float
    """Bytes a second to another device of the same node, in one direction."""
    price: float | None
    """Dollars an hour; an assumption, because prices change from week to week."""
    measured: bool = False
    """Whether the rates were measured, so that they are reached, instead of read from a data sheet."""
    attention: dict[str, float] = field(default_factory=dict)
    """If measured: operations a second that each mechanism's attention reaches, by `variant_name`."""
    call: float = 0.0
    """If measured: seconds that it takes to start an operator."""


@dataclass(frozen=True, kw_only=True)
class Assumptions(Record):
    """The part of a peak that a program reaches. All of this is guessed for GPUs; nothing here was run on one."""

    products: float = 0.55
    """The part of the peak of matrix products that products with weights reach."""
    attention: float = 0.35
    """The same for attention, whose products are smaller and wait for a softmax."""
    selection: float = 0.10
    """The same for ranking keys and for reading keys that were selected one by one."""
    bandwidth: float = 0.75
    """The part of the memory's bandwidth that operators reach if they only read and write."""
    exponentials: float = 0.5
    call: float = 6e-6
    """Seconds that Python and torch take to start an operator. They run ahead of a GPU: the slower one counts."""
    overlap: float = 0.8
    """The part of a backward pass during which gradients can be exchanged."""
    network: float = 12.5e9
    """Bytes a second between nodes, in one direction, for all devices of a node together: 100 Gbit/s."""
    devices_in_node: int = 8
    reserve: float = 0.08
    """The part of the memory that an allocator cannot use because of gaps."""
    context: float = 0.7e9
    """Bytes that the driver and libraries take."""
