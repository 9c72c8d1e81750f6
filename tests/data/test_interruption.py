"""Killed at any moment, a preparation leaves nothing or what can be resumed, never a plausible wrong data set."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.conftest import prepared
from tests.data.texts import made_texts, write_jsonl
from tests.processes import PATIENCE, family_of, still_alive
from varifocal.data import open_data
from varifocal.data.prepare import Options, locked, prepare

KILLS = [(0, signal.SIGKILL), (1, signal.SIGTERM), (2, signal.SIGINT)]
"""After how many pieces, and by which signal."""
OPTIONS = Options(tokenizer="gpt2")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 24 pieces of a megabyte: enough that a signal after the second finds work to interrupt."""
    folder = tmp_path_factory.mktemp("source")
    for number in range(2):
        write_jsonl(folder / f"{number}.jsonl", [text * 80 for text in made_texts(160, seed=number)])
    return folder


@pytest.fixture(scope="module")
def wanted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared(source, tmp_path_factory.mktemp("wanted") / "out", tokenizer="gpt2").fingerprint


@pytest.fixture(scope="module")
def killed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a preparation leaves that is killed when it has done two pieces."""
    out = tmp_path_factory.mktemp("killed") / "out"
    _, family = interrupted(source, out, 2, signal.SIGKILL)
    assert not still_alive(family)
    return out


@pytest.fixture
def left(killed: Path, tmp_path: Path) -> Path:
    """A copy of it, to go on with."""
    return Path(shutil.copytree(killed, tmp_path / "out"))


def start(source: Path, out: Path) -> subprocess.Popen[bytes]:
    program = "from varifocal.cli.main import run; run()"
    arguments = ["data", "prepare", str(source), str(out), "--tokenizer", "gpt2", "--workers", "2"]
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A shell starts background jobs with SIGINT ignored, and whoever is started with that never hears of it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def interrupted(
    source: Path, out: Path, pieces: int, how: signal.Signals
) -> tuple[subprocess.Popen[bytes], list[tuple[int, str]]]:
    """A preparation that got a signal after so many pieces, and all the processes that it had started.

    On a busy machine it may be over before the signal comes: then once more.
    """
    for _ in range(5):
        process = start(source, out)
        wait_for(out, pieces, process)
        family = family_of(process.pid)
        process.send_signal(how)
        process.wait()
        if not (out / "manifest.json").exists():
            return process, family
        shutil.rmtree(out)
    raise AssertionError(f"{how.name} interrupted none of five preparations")


def completed(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "preparation" / "completions").glob("*"))


def wait_for(out: Path, pieces: int, process: subprocess.Popen[bytes]) -> None:
    """Until so many pieces are done; some more may be done when this returns."""
    while process.poll() is None and not ((out / "preparation").exists() and len(completed(out)) >= pieces):
        time.sleep(0.005)


def running_below(folder: Path) -> list[int]:
    """Processes that have a file below the folder open."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                opened = [os.readlink(link) for link in (entry / "fd").iterdir()]
            except OSError:
                continue
            if any(name.startswith(str(folder)) for name in opened):
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(("pieces", "how"), KILLS)
def test_killed_preparation_is_not_a_data_set_and_is_resumed_to_the_same(
    source: Path, wanted: str, tmp_path: Path, pieces: int, how: signal.Signals
) -> None:
    out = tmp_path / "out"
    process, family = interrupted(source, out, pieces, how)
    assert process.wait() != 0
    with pytest.raises(ValueError, match=r"was not finished; run the same 'varifocal data prepare' again"):
        open_data(out)
    assert not still_alive(family)
    assert prepare(str(source), out, options=OPTIONS, workers=1).outcome == "prepared"
    assert open_data(out, verify="full").fingerprint == wanted


def test_workers_end_with_the_process_that_started_them(source: Path, tmp_path: Path) -> None:
    _, family = interrupted(source, tmp_path / "out", 1, signal.SIGKILL)
    # The server that the workers are copies of, and the two workers themselves.
    assert len(family) >= 3
    assert not still_alive(family)


def test_finished_pieces_are_not_done_again(source: Path, wanted: str, left: Path) -> None:
    done = completed(left)
    before = {path: path.stat().st_mtime_ns for path in left.glob("*/*.ds") if path.stem in done}
    assert len(done) >= 2
    assert before
    assert prepare(str(source), left, options=OPTIONS, workers=1).outcome == "prepared"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert open_data(left).fingerprint == wanted


def test_piece_whose_files_are_gone_is_done_again(source: Path, wanted: str, left: Path) -> None:
    (left / "train" / f"{completed(left)[0]}.ds").unlink()
    assert prepare(str(source), left, options=OPTIONS, workers=1).outcome == "prepared"
    assert open_data(left, verify="full").fingerprint == wanted


def test_unfinished_preparation_of_something_else_is_refused(source: Path, left: Path) -> None:
    with pytest.raises(ValueError, match="holds an unfinished preparation of"):
        prepare(str(source), left, options=Options(tokenizer="bytes"), workers=1)


def test_two_preparations_of_one_folder_do_not_meet(source: Path, left: Path) -> None:
    with locked(left / "preparation"), pytest.raises(ValueError, match="another process is preparing"):
        prepare(str(source), left, options=OPTIONS, workers=1)


def test_killed_worker_is_explained(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = "from varifocal.cli.main import run; run()"
    arguments = ["data", "prepare", str(source), str(out), "--tokenizer", "gpt2", "--workers", "2"]
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True)
    workers: list[int] = []
    while process.poll() is None and not workers:
        workers = [one for one in running_below(out) if one != process.pid]
        time.sleep(0.02)
    os.kill(workers[0], signal.SIGKILL)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "a worker process was killed, perhaps for want of memory; run the same command again" in error


def test_error_in_one_piece_keeps_the_others(tmp_path: Path) -> None:
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", [text * 60 for text in made_texts(30, seed=number)])
    good = (tmp_path / "2.jsonl").read_bytes()
    (tmp_path / "2.jsonl").write_bytes(good + b'{"text": "\xff"}\n')
    options = Options(tokenizer="bytes")
    with pytest.raises(ValueError, match=r"2\.jsonl, line at byte \d+: not valid JSON in UTF-8"):
        prepare(str(tmp_path), tmp_path / "out", options=options, workers=1)
    assert completed(tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
