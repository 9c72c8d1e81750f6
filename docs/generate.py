"""Makes the README's table and picture: `make docs`. The table comes from results/, the picture from the mechanisms."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from torch import Tensor

from varifocal import MECHANISMS, HeadShape, make_mechanism

TOP = Path(__file__).parent.parent
TOKENS = 96
SMALL = {
    "local": {"window": 16, "global_tokens": 4},
    "combiner": {"segment": 12},
    "context_adaptive": {"window_min": 12, "window_max": 28, "edge": 8},
    "head_gated": {"window": 16},
    "sparse_geometric": {"form": "threshold", "threshold": 0.35},
    "bigbird": {"window": 12, "global_tokens": 4, "random_blocks": 2, "block": 6},
    "sparse_transformer": {"stride": 12},
}
"""Options that show a mechanism's pattern on a short text."""


def attention_pattern(name: str) -> Tensor:
    """What each query [T] reads of each key [S], for random inputs: the output when the values are the unit vectors."""
    torch.manual_seed(4)
    shape = HeadShape(model_width=32, heads=1, kv_heads=1, head_width=TOKENS)
    mechanism = make_mechanism(name, shape, **SMALL.get(name, {}))
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
        x, q, k = torch.randn(1, TOKENS, 32), torch.randn(1, 1, TOKENS, TOKENS), torch.randn(1, 1, TOKENS, TOKENS)
        return mechanism(x, q, k, torch.eye(TOKENS)[None, None]).output[0, 0]


def draw_mechanisms(path: Path) -> None:
    """A panel for each mechanism: queries downwards, keys to the right, darker where more is read."""
    figure, panels = pyplot.subplots(3, 3, figsize=(9, 9.4), layout="constrained")
    for panel, name in zip(panels.flat, MECHANISMS, strict=True):
        panel.imshow(
            attention_pattern(name).clamp(min=0).pow(0.4), cmap="magma_r", vmin=0, vmax=0.8, interpolation="nearest"
        )
        panel.set_title(name, fontsize=11, family="monospace")
        panel.set_xticks([])
        panel.set_yticks([])
    panels[2, 0].set_xlabel("key")
    panels[2, 0].set_ylabel("query")
    figure.savefig(path, dpi=110)


def conformance_table(path: Path) -> str:
    """The findings of `varifocal check --json` as a Markdown table."""
    findings = json.loads(path.read_text(encoding="utf-8"))
    marks = {"kept": "✓", "broken": "✗", "not offered": "·"}
    rows = [finding["row"] for finding in findings[0]["findings"]]
    lines = [f"| | {' | '.join(rows)} |", "| --- |" + " :-: |" * len(rows)]
    lines += [
        f"| {result['name']} | {' | '.join(marks[finding['verdict']] for finding in result['findings'])} |"
        for result in findings
    ]
    return "\n".join(lines)


def fill(text: str, block: str, content: str) -> str:
    """The text with the content between the block's two markers."""
    begin, end = f"<!-- {block}:begin -->", f"<!-- {block}:end -->"
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{content}\n{end}{tail}"


def main() -> None:
    """Write the README anew, and its picture."""
    readme = TOP / "README.md"
    filled = fill(
        readme.read_text(encoding="utf-8"), "conformance", conformance_table(TOP / "results/conformance.json")
    )
    if "--check" in sys.argv:
        sys.exit(filled != readme.read_text(encoding="utf-8") and "README.md is not what results/ say; run make docs")
    readme.write_text(filled, encoding="utf-8")
    draw_mechanisms(TOP / "docs/pictures/mechanisms.png")


if __name__ == "__main__":
    main()
