"""The serving benchmark: what is printed and drawn is what was counted, and vLLM itself counts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.serving.models import MODELS, save
from varifocal.report.serving_bench import capacity_table, settings_sentence, speed_table
from varifocal.results.environment import Environment
from varifocal.results.serving_bench import ServingBench, ServingCapacity, ServingRow


def row(name: str, setting: str, *, seconds: float, first: float) -> ServingRow:
    """Four requests in so many seconds."""
    return ServingRow(
        name=name, setting=setting, cache_bytes=8_000_000, running=4, preemptions=0, seconds=seconds,
        requests_per_second=4 / seconds, milliseconds_per_token=12.4, first_token_seconds=0.5, peak_bytes=900_000_000,
        ratio=first / seconds,
    )  # fmt: skip


BENCH = ServingBench(
    environment=Environment(command="varifocal bench serving", threads=2), engine="vLLM 0", dtype="float32",
    context=8192, cache_bytes=1 << 30, requests=4, prompt=48, new_tokens=16, block=32, chunk=256,
    capacities=(
        ServingCapacity(name="dense", kept_heads=1.0, bytes_per_request=400_000_000, tokens=20_000, ratio=1.0),
        ServingCapacity(name="third", kept_heads=1 / 3, bytes_per_request=150_000_000, tokens=53_000, ratio=2.65),
    ),
    rows=(
        row("dense", "room", seconds=10, first=10), row("third", "room", seconds=8, first=10),
        row("dense", "limited", seconds=20, first=20), row("third", "limited", seconds=10, first=20),
    ),
)  # fmt: skip


def test_tables_say_what_the_record_holds() -> None:
    assert capacity_table(BENCH) == [
        ["texts of 8,192 tokens", "key heads that read all", "MB a text", "tokens in 1,074 MB", "dense = 1"],
        ["dense", "100%", "400.0", "20,000", "1.00"],
        ["third", "33%", "150.0", "53,000", "2.65"],
    ]
    assert speed_table(BENCH, "limited")[0][:3] == ["limited", "requests/s", "dense = 1"]
    assert speed_table(BENCH, "limited")[2] == ["third", "0.400", "2.00", "12", "0.5", "4", "0", "8", "900"]
    assert "4 requests at once, each 48 tokens to read and 16 to write; vLLM 0" in settings_sentence(BENCH)


def test_record_is_read_as_it_was_written_and_drawn(tmp_path: Path) -> None:
    BENCH.write(tmp_path / "bench.json")
    assert ServingBench.read(tmp_path / "bench.json") == BENCH
    pytest.importorskip("matplotlib")
    from varifocal.report.serving_bench_plot import plot_serving_bench

    plot_serving_bench(BENCH, tmp_path / "bench.svg")
    drawn = (tmp_path / "bench.svg").read_text(encoding="utf-8")
    assert drawn.startswith("<?xml")
    assert len(drawn) > 10_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"folders": (Path("a/one"), Path("b/one"))}, "a folder with a name of its own, got one, one"),
        ({"folders": ()}, "got none"),
        ({"requests": 0}, "requests must be at least 1, got 0"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; known are float32, bfloat16"),
    ],
)
def test_a_mistake_gets_one_sentence(changes: dict[str, Any], words: str) -> None:
    from varifocal.bench.serving.run import Plan

    with pytest.raises(ValueError, match=words):
        Plan(**{"folders": (Path("one"),), "python": "python", **changes})


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm_the_command_says_how_to_name_it(tmp_path: Path) -> None:
    from varifocal.bench.serving.run import Plan

    with pytest.raises(ValueError, match="vLLM is not installed here; name an interpreter that has it with --python"):
        Plan(folders=(tmp_path,))


def test_vllm_counts_what_fits_and_answers_all(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM has an environment of its own: make serving")
    from varifocal.bench.serving.run import Plan, bench_serving

    for name in ("dense", "focused"):
        save(tmp_path / name, *MODELS[name], tie_word_embeddings=True)
    plan = Plan(
        folders=(tmp_path / "dense", tmp_path / "focused"), context=4096, cache_bytes=1 << 24, requests=4, prompt=300,
        new_tokens=20, held=2,
    )  # fmt: skip
    found = bench_serving(plan)
    dense, focused = found.capacities
    # Twelve key heads, 256 bytes each of a token; four heads of the focused model read everything.
    assert dense.kept_heads == 1
    assert focused.kept_heads == pytest.approx(1 / 3)
    assert dense.bytes_per_request == 4096 * 12 * 256
    assert dense.tokens == (1 << 24) // (12 * 256)
    assert 2 < focused.ratio < 3
    room, limited = found.of("room"), found.of("limited")
    assert [one.name for one in room] == [one.name for one in limited] == ["dense", "focused"]
    assert [one.running for one in room] == [4, 4]
    assert limited[0].running == 2 <= limited[1].running
    assert limited[0].cache_bytes == limited[1].cache_bytes
    assert all(one.seconds > 0 and one.milliseconds_per_token > 0 and one.peak_bytes > 1 << 27 for one in found.rows)
    assert (room[0].ratio, limited[0].ratio) == (1.0, 1.0)
