"""Guards what the project computes: results are those that were recorded, on every processor.

`python -m tests.golden.record FILE` records them anew. The native library must be built.
"""

from __future__ import annotations

import pytest

from tests.golden.fingerprints import fingerprint
from tests.golden.records import COMPUTATIONS, disagreements, kept_values

VALUES = kept_values()


@pytest.mark.parametrize("name", VALUES)
def test_result_is_the_one_that_was_recorded(name: str) -> None:
    found = {label: fingerprint(tensor) for label, tensor in COMPUTATIONS[name]().items()}
    assert disagreements(name, found, VALUES[name]) == {}
