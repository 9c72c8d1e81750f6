"""Settings of torch's compiler while it generates kernels: for fewer of them, and around what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def generating(*, on_cpu: bool) -> Iterator[None]:
    """While this lasts, equal lengths are not taken to be equal always, and names of lengths do not collide.

    Nor are buffers given away that another backward through the same graph needs.
    """
    from torch._dynamo import config as tracing
    from torch.fx.experimental import _config as shapes

    # Numbers with a fraction, such as the edge of a soft window, are part of a kernel: FlexAttention takes no others.
    # By default sizes that are equal in the first call (queries and keys, rows and tiles) are taken to be equal always,
    # and a kernel is generated anew as soon as they differ.
    with shapes.patch(use_duck_shape=False), tracing.patch(specialize_float=True):  # type: ignore[attr-defined]
        if on_cpu:
            with distinct_names():
                yield
        else:
            with kept_buffers():
                yield


@contextmanager
def kept_buffers() -> Iterator[None]:
    """Let a compiled backward keep what the forward saved, so that it can run twice (retain_graph=True).

    By default it gives those buffers away and raises the second time. The setting torch has for it is read again when
    the backward runs, and would have to be changed for the whole process.
    """
    from torch._functorch._aot_autograd import graph_compile

    # A torch that does not know the name may have changed its mind about giving buffers away: then nothing is done.
    if not hasattr(graph_compile, "collect_bw_donated_buffer_idxs"):
        yield
        return
    with mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", return_value=[]):
        yield


@contextmanager
def distinct_names() -> Iterator[None]:
    """Give the sizes of a tile names that begin like no other.

    FlexAttention's generator for CPUs (torch 2.13) replaces those names in the text of a kernel, and "ks2" also where
    it is the beginning of "ks25": then the text does not compile.
    """
    from torch._inductor.codegen.common import KernelArgs

    named = KernelArgs.size

    def name(self: KernelArgs, symbol: Any) -> str:
        if symbol.name.startswith("u") and symbol not in self.sizevars:
            self.sizevars[symbol] = f"tile_{symbol.name}_"
        return named(self, symbol)

    with mock.patch.object(KernelArgs, "size", name):
        yield
