"""Killed at any moment, a preparation leaves nothing or what can be resumed, never a plausible wrong data set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.conftest import prepared
from tests.data.texts import made_texts, write_jsonl
from varifocal.data import open_data
from varifocal.data.prepare import Options, prepare


KILLS = [(0, signal.SIGKILL), (2, signal.SIGKILL), (5, signal.SIGTERM), (3, signal.SIGINT)]
"""After how many pieces, and by which signal."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 16 pieces of a megabyte."""
    folder = tmp_path_factory.mktemp("source")
    for number in range(4):
        write_jsonl(folder / f"{number}.jsonl", [text * 60 for text in made_texts(100, seed=number)])
    return folder


@pytest.fixture(scope="module")
def wanted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared(source, tmp_path_factory.mktemp("wanted") / "out", tokenizer="gpt2").fingerprint


def start(source: Path, out: Path) -> subprocess.Popen[bytes]:
    program = "from varifocal.cli.main import run; run()"
    arguments = ["data", "prepare", str(source), str(out), "--tokenizer", "gpt2", "--workers", "2"]
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def pieces_done(out: Path) -> int:
    return len(list((out / "preparation" / "completions").glob("*")))


def wait_for(out: Path, pieces: int, process: subprocess.Popen[bytes]) -> None:
    """Until so many pieces are done; a piece more may be done when this returns."""
    while process.poll() is None and pieces_done(out) < pieces:
        time.sleep(0.005)


@pytest.mark.parametrize(("pieces", "how"), KILLS)
def test_killed_preparation_is_resumed_to_the_same_data(
    source: Path, wanted: str, tmp_path: Path, pieces: int, how: signal.Signals
) -> None:
    out = tmp_path / "out"
    process = start(source, out)
    if pieces:
        wait_for(out, pieces, process)
    else:
        while process.poll() is None and not (out / "preparation").exists():
            time.sleep(0.005)
    process.send_signal(how)
    process.wait()
    assert process.returncode != 0
    with pytest.raises(ValueError, match=r"was not finished; run the same|holds no manifest"):
        open_data(out)
    done = pieces_done(out)
    assert done >= pieces
    stamps = {path: path.stat().st_mtime_ns for path in (out / "preparation" / "completions").glob("*")}
    resumed = start(source, out)
    assert resumed.wait() == 0
    assert open_data(out, verify="full").fingerprint == wanted
    assert not any(path.exists() and path.stat().st_mtime_ns != stamp for path, stamp in stamps.items())


def test_finished_pieces_are_not_done_again(source: Path, wanted: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(source, out)
    wait_for(out, 3, process)
    process.kill()
    process.wait()
    time.sleep(1.0)  # what the worker processes still had in hand is over by then
    completed = [path.name for path in (out / "preparation" / "completions").glob("*")]
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*.ds") if path.stem in completed}
    assert before
    assert prepare(str(source), out, options=Options(tokenizer="gpt2"), workers=1).outcome == "prepared"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert open_data(out).fingerprint == wanted


def test_workers_end_with_the_process_that_started_them(source: Path, tmp_path: Path) -> None:
    process = start(source, tmp_path / "out")
    wait_for(tmp_path / "out", 1, process)
    mine = str(tmp_path).encode()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while (alive := running_below(mine)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive


def running_below(folder: bytes) -> list[int]:
    """Processes that have a file below the folder open."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                opened = [os.readlink(link) for link in (entry / "fd").iterdir()]
            except OSError:
                continue
            if any(name.encode().startswith(folder) for name in opened):
                found.append(int(entry.name))
    return found


def test_damaged_piece_is_done_again(source: Path, wanted: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(source, out)
    wait_for(out, 3, process)
    process.kill()
    process.wait()
    time.sleep(1.0)
    completed = sorted(path.name for path in (out / "preparation" / "completions").glob("*"))
    (out / "train" / f"{completed[0]}.ds").unlink()
    assert prepare(str(source), out, options=Options(tokenizer="gpt2"), workers=1).outcome == "prepared"
    assert open_data(out, verify="full").fingerprint == wanted


def test_unfinished_preparation_of_something_else_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(source, out)
    wait_for(out, 1, process)
    process.kill()
    process.wait()
    with pytest.raises(ValueError, match="holds an unfinished preparation of"):
        prepare(str(source), out, options=Options(tokenizer="bytes"), workers=1)


def test_two_preparations_of_one_folder_do_not_meet(source: Path, wanted: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(source, out)
    wait_for(out, 1, process)
    with pytest.raises(ValueError, match="another process is preparing"):
        prepare(str(source), out, options=Options(tokenizer="gpt2"), workers=1)
    assert process.wait() == 0
    assert open_data(out).fingerprint == wanted


def test_error_in_one_piece_keeps_the_others(tmp_path: Path) -> None:
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", [text * 60 for text in made_texts(60, seed=number)])
    good = (tmp_path / "2.jsonl").read_bytes()
    (tmp_path / "2.jsonl").write_bytes(good[:-1] + b'\n{"text": "\xff"}\n')
    options = Options(tokenizer="bytes")
    with pytest.raises(ValueError, match=r"2\.jsonl, line at byte \d+: not valid JSON in UTF-8"):
        prepare(str(tmp_path), tmp_path / "out", options=options, workers=2)
    assert pieces_done(tmp_path / "out") >= 1
    assert not (tmp_path / "out" / "manifest.json").exists()
