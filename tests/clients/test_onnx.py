"""ONNX: exported by torch, run by onnxruntime."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.clients.test_torch_export import SHAPES, Logits, masked
from tests.model.models import VARIANTS, random_tokens


@pytest.mark.client("onnxruntime", "onnx", "onnxscript")
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_onnxruntime_computes_the_same_logits(variant: str, tmp_path: Path) -> None:
    """`torch.onnx.export` with a dynamic batch, length and mask: the same logits in onnxruntime"""
    import onnxruntime

    model, file = Logits(variant), tmp_path / "model.onnx"
    free = {0: "batch", 1: "length"}
    with torch.no_grad():
        program = torch.onnx.export(
            model, masked(random_tokens(*SHAPES[0])), dynamo=True, dynamic_shapes=(free, free), verbose=False
        )
    assert program is not None
    program.save(file)
    session = onnxruntime.InferenceSession(file)
    for batch, length in SHAPES:
        tokens, mask = masked(random_tokens(batch, length, seed=length))
        given = {"input_ids": tokens.numpy(), "attention_mask": mask.numpy()}
        found = torch.from_numpy(session.run(None, given)[0])
        with torch.no_grad():
            expected = model(tokens, mask)
        torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-4)
