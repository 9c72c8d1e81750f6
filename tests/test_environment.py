"""What a measurement tells of the machine."""

import sys

import pytest

from varifocal.environment import environment


def test_command_is_what_was_typed_without_folders_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = [
        "/usr/lib/bin/varifocal",
        "measure",
        "/models/one",
        "runs/two",
        "--texts",
        "/data/my novels.parquet",
        "-n",
        "3",
    ]
    monkeypatch.setattr(sys, "argv", typed)
    assert environment().command == "varifocal measure one runs/two --texts 'my novels.parquet' -n 3"
