"""Some heads read everything, the others a window and the first tokens: Xiao et al., DuoAttention, arXiv:2410.10819."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from varifocal.attention.attend import evaluate, lay_out
from varifocal.attention.mechanisms.ablation import Ablation, plain
from varifocal.attention.mechanisms.base import (
    Call,
    HeadShape,
    Mechanism,
    MechanismConfig,
    MechanismOutput,
    Part,
    Scale,
    Step,
)
from varifocal.attention.mechanisms.sinks import SinkLogits, with_sinks, words_of_sinks
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.memories import KeysAndValues, Memory, Remembered, SplitKeys
from varifocal.equations.branches import Branch, Causal, Prefix, Window
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.equation import Equation
from varifocal.equations.layout import Layout, make_layout
from varifocal.equations.normalizers import SinkLogit
from varifocal.equations.problem import Attended


@dataclass(frozen=True, kw_only=True)
class FocusedConfig(MechanismConfig):
    """How far back each key head looks: a row of a head map."""

    windows: tuple[int | None, ...] = ()
    """For each key head: None if its queries read everything, or how many keys they read, their own included, beside
    the sinks. One entry stands for all heads, none at all for heads that all read everything."""
    sinks: int = 4
    """First tokens of each document that stay readable to heads with a window."""
    sink_logit: bool = False
    """Whether each head learns a number in the sum of its softmax, which takes what the head does not want to read."""

    def __post_init__(self) -> None:
        # Options from JSON and Python alike may hold a list.
        if not isinstance(self.windows, tuple | list):
            raise ValueError(f"windows must list a number or None for each key head, got {self.windows!r}")
        object.__setattr__(self, "windows", tuple(self.windows))
        for window in self.windows:
            if window is not None:
                require_at_least("a window of windows", window, 1)
        require_at_least("sinks", self.sinks, 0)

    def for_repeated_heads(self, times: int) -> Self:
        if len(self.windows) < 2:
            return self
        return replace(self, windows=tuple(window for window in self.windows for _ in range(times)))


class Focused(Mechanism[FocusedConfig]):
    """One softmax a head, over every key or over the last ones and the first `sinks` of the document."""

    name = "focused"
    config_type = FocusedConfig
    variants = (
        Variant({"windows": (None, 5), "sinks": 2}),
        Variant({"windows": (3, 6), "sinks": 1}, "windows"),
        Variant({"windows": (5,), "sinks": 2}, "one window"),
        Variant({"windows": (None, 5), "sinks": 2, "sink_logit": True}, "sink logit"),
    )
    ablations = (
        Ablation(
            name="windows",
            question="can every head do with a window?",
            options=lambda sizes: {"windows": (sizes.window,)},
        ),
        Ablation(name="no_sinks", question="are the first tokens needed?", options=plain(sinks=0)),
    )
    bench_options: ClassVar[Mapping[str, Any]] = {"windows": (256,)}
    """All heads with a window, whatever their number."""

    def __init__(self, config: FocusedConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        given, heads = self.config.windows, self.shape.kv_heads
        if len(given) not in (0, 1, heads):
            raise ValueError(
                f"windows must have an entry for each of the {heads} key heads (or one for all of them, or none), "
                f"got {len(given)}: {given}"
            )
        self.windows: tuple[int | None, ...] = given if len(given) == heads else (given or (None,)) * heads
        """Of each key head."""
        self.sink = SinkLogits(self.shape.heads) if self.config.sink_logit else None

    def reset_parameters(self) -> None:
        if self.sink is not None:
            self.sink.reset_parameters()

    def start_as_dense(self) -> None:
        if self.sink is not None:
            self.sink.close()

    @property
    def branch(self) -> Branch:
        """The keys of all query heads."""
        if all(window is None for window in self.windows):
            return Causal()
        if len(set(self.windows)) == 1:
            return self.branch_of(self.windows[0])
        each = tuple(window for window in self.windows for _ in range(self.queries_a_key))
        window = Window(each)
        if not self.config.sinks:
            return window
        return window | Prefix(tuple(0 if size is None else self.config.sinks for size in each))

    def branch_of(self, window: int | None) -> Branch:
        """The keys of heads that share a window."""
        return Causal() if window is None else with_sinks(Window(window), self.config.sinks)

    @property
    def queries_a_key(self) -> int:
        """Query heads that share a key head."""
        return self.shape.heads // self.shape.kv_heads

    def equation(self, call: Call) -> Equation:
        return Equation((self.branch,), normalizer=self.normalizer())

    def normalizer(self, heads: tuple[int, ...] | None = None) -> SinkLogit | None:
        """Of all query heads, or of some."""
        return None if self.sink is None else self.sink.normalizer(heads)

    def step(self) -> Step | None:
        return Step((self.branch,), sink=None if self.sink is None else self.sink.logit)

    def memory(self) -> Memory:
        if all(window is None for window in self.windows):
            return KeysAndValues()
        return SplitKeys(self.windows, self.config.sinks)

    def farthest(self) -> int | None:
        return self.branch.farthest()

    def read(
        self,
        x: Tensor,
        q: Tensor,
        remembered: Remembered,
        *,
        layout: Layout | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        backend: str = "auto",
    ) -> MechanismOutput:
        if not remembered.by_heads:
            return super().read(
                x, q, remembered, layout=layout, documents=documents, positions=positions, backend=backend
            )
        if positions is not None:
            raise ValueError("positions count all keys, of which this memory has forgotten some; leave positions out")
        parts = tuple(self.parts(q, remembered, layout, documents))
        found = [
            evaluate(
                part.equation, q[:, list(part.heads)], part.remembered.k, part.remembered.v,
                layout=part.layout, backend=backend, wants_logsumexp=False,
            )
            for part in parts
        ]  # fmt: skip
        order = torch.tensor([head for part in parts for head in part.heads], device=q.device).argsort()
        output, logsumexp = (
            torch.cat(tensors, dim=1).index_select(1, order)
            for tensors in ([one.output for one in found], [one.logsumexp for one in found])
        )
        return MechanismOutput(
            output,
            {},
            Equation((self.branch,), normalizer=self.normalizer()),
            Attended(output, logsumexp, (None,)),
            parts[0].layout,
            parts=parts,
        )

    def parts(self, q: Tensor, remembered: Remembered, layout: Layout | None, documents: Tensor | None) -> list[Part]:
        """The attention of each group of heads that keep the same tokens."""
        group, made = self.queries_a_key, []
        for heads, k, v in remembered.by_heads:
            if layout is None and documents is None:
                own = lay_out(q[:, : len(heads) * group], k, v)
            else:
                if layout is None:
                    assert documents is not None
                    layout = make_layout(
                        batch=q.shape[0], queries=q.shape[2], keys=documents.shape[1], documents=documents,
                        positions=None, device=q.device,
                    )  # fmt: skip
                own = layout.of_last(k.shape[2])
            asking = tuple(head * group + one for head in heads for one in range(group))
            equation = Equation((self.branch_of(self.windows[heads[0]]),), normalizer=self.normalizer(asking))
            made.append(Part(asking, equation, own, Remembered(k, v, sinks=remembered.sinks)))
        return made

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        """A window for every other key head, or for the only one."""
        if scale.kv_heads == 1:
            return {"windows": (scale.window,)}
        return {"windows": tuple(scale.window if head % 2 else None for head in range(scale.kv_heads))}

    @classmethod
    def dense_options(cls, context: int) -> dict[str, Any]:
        """Heads that all read everything."""
        return {"windows": ()}

    def words(self) -> str:
        sizes = sorted({window for window in self.windows if window is not None})
        if not sizes:
            return "no gate: every key in every head"
        least = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        full = self.windows.count(None)
        near = f"the last {least} keys{words_of_sinks(self.config.sinks)}"
        return f"no gate: every key in {full} of {len(self.windows)} key heads, {near} in the others"
