"""Tests run in two processes; one thread each keeps them from fighting over the cores."""

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-kernel",
        action="store_true",
        help="compile FlexAttention for every mechanism, some minutes, instead of once for each kind of kernel",
    )
