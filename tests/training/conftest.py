"""Data that several tests train on."""

from __future__ import annotations

import pytest

from varifocal.data import PreparedData
from varifocal.data.probe import Probe, make_probe


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """200 texts of 64 tokens."""
    wanted = Probe(length=64, questions=4, distances=(4, 16))
    return make_probe(tmp_path_factory.mktemp("training") / "probe", wanted, texts=200)
