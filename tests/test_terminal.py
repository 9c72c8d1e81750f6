"""What a terminal can do to a command: other encodings, bytes that are no text, and Ctrl-C at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.explorer.models import save_model

PROGRAM = "from varifocal.cli.start import run; run()"
C_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
"""A terminal of ASCII, and no help from Python, which would take it for UTF-8."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model") / "model"))


def generate(
    model: str, prompt: bytes, *, given: bytes = b"", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    words: list[str | bytes] = [sys.executable, "-c", PROGRAM, "generate", model, prompt]
    words += ["--new-tokens", "2", "--temperature", "0"]
    return subprocess.run(words, input=given, capture_output=True, env=os.environ | (environment or {}))


def test_prompt_that_is_no_utf8_is_one_sentence(model: str) -> None:
    for done in (generate(model, b"caf\xe9"), generate(model, b"-", given=b"caf\xe9")):
        assert done.returncode == 2
        assert b"the prompt must be a text in UTF-8, but its byte 3 is 0xe9" in done.stderr
        assert done.stderr.count(b"\n") == 1


def test_prompt_is_utf8_whatever_the_locale_says(model: str) -> None:
    prompt = "caf\u00e9 \u2713".encode()
    for done in (
        generate(model, prompt, environment=C_LOCALE),
        generate(model, b"-", given=prompt, environment=C_LOCALE),
    ):
        assert done.returncode == 0, done.stderr
        # What the terminal cannot show becomes a question mark.
        assert done.stdout.startswith(b"caf? ?")
        assert b"2 tokens" in done.stderr


@pytest.mark.parametrize("loaded", ["torch", "varifocal.cli.check"])
def test_ctrl_c_while_starting_leaves_no_trace(loaded: str, tmp_path: Path) -> None:
    """A stand-in for the user presses Ctrl-C as soon as a module begins to load."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)


class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == {loaded!r} and "varifocal.cli.start" in sys.modules:
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Pressed())
"""
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM, "info"], capture_output=True, text=True, env=environment)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == ""
