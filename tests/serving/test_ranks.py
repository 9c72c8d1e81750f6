"""Two processes share the heads of every layer, and serve the same model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.models import MODELS, WINDOW, prompts, save

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make serving")

from tests.serving.engines import answers, assert_ours, engine

LENGTHS = [2, WINDOW - 1, WINDOW + 3, 200, 600, 1100]


def test_two_ranks_serve_the_same_focused_model(tmp_path: Path) -> None:
    folder = save(tmp_path, *MODELS["focused"])
    with engine(folder, tensor_parallel_size=2) as made:
        assert_ours(folder, answers(made, prompts(LENGTHS)))
