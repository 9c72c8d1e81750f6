"""Run files to a page: what it says, what every figure carries, and what broken or hostile files do to it."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy
import pytest
from typer.testing import CliRunner

from tests.analysis.traces import HEADS, LAYERS, traces
from tests.report.test_comparison_tables import LOSSES, write_folder
from varifocal.analysis.analyze import as_plain, summed_up
from varifocal.analysis.observation import Observed
from varifocal.analysis.token_kinds import KINDS
from varifocal.cli.main import app
from varifocal.report.comparison_tables import verdicts
from varifocal.report.page.answer import answer_of_comparison
from varifocal.report.page.figure import Figure
from varifocal.report.page.page import make_page
from varifocal.report.page.sources import read_source
from varifocal.statistics.comparison import gather_comparison

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&$\\frac{1}$"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A page as a list of elements; fails on tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def analysis_content(planted: float = 0.3) -> dict[str, Any]:
    """An analysis of made-up traces in which numbers have a higher gate in one head."""
    table = traces(planted=planted, documents=8, length=128)
    gates = table.values.reshape(-1, LAYERS, HEADS).clip(0, 1)
    tokens = len(table.documents)
    chance = numpy.random.default_rng(0)
    mass = chance.random((tokens, LAYERS, HEADS)).astype(numpy.float32)
    shares = chance.dirichlet(numpy.ones(8), (LAYERS, HEADS)).astype(numpy.float32)
    seen = Observed(
        documents=table.documents,
        positions=table.positions,
        kinds=table.kinds[:, : len(KINDS)],
        next_kinds=table.kinds[:, : len(KINDS)],
        gains=chance.normal(0.1, 0.5, tokens).astype(numpy.float32),
        values={
            "gate": gates,
            "width": 64 + 64 * mass,
            **{f"{name}_mass": mass for name in ("window", "top_k", "window_or_top_k", "first", "distance")},
        },
        mass_shares=shares,
        selected_shares=shares,
    )
    plain: dict[str, Any] = as_plain({
        "experiment": "analysis", "environment": {"command": "varifocal analyze the-model --data the-data"},
        "mechanism": "head_gated", "mechanism_options": {}, "layers": LAYERS, "heads": HEADS, "data": "sotu",
        "split": "validation", "length": 128, "window": 16, "resamples": 50, "model": "m",
        "k_scale": 1.0, "k_min": 1, "seed": 0,
        **summed_up(seen, window=16, resamples=50, seed=0),
    })  # fmt: skip
    return plain


def write_gates(run: Path, *, seed: int = 0) -> None:
    """gates.npz as a run leaves it."""
    chance = numpy.random.default_rng(seed)
    shape = (3, LAYERS, HEADS)
    names = ("gate_mean", "gate_deviation", "gate_saturated", "gate_entropy", "gate_gradient", "width_mean")
    arrays: dict[str, Any] = {name: chance.random(shape).astype(numpy.float32) for name in names}
    numpy.savez(run / "gates.npz", step=numpy.array([1, 5, 10]), **arrays)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of three seeds with gates and one analysis."""
    out = write_folder(tmp_path_factory.mktemp("report") / "out", LOSSES)
    plan = json.loads((out / "plan.json").read_text())
    plan["environment"] = {"command": "varifocal compare config.toml out", "commit": "abc", "threads": 1}
    (out / "plan.json").write_text(json.dumps(plan))
    for run in (out / "cells").iterdir():
        (run / "environment.json").write_text(json.dumps({"command": "cell.py x"}))
    for seed in range(3):
        write_gates(out / "cells" / f"head_gated-seed{seed}", seed=seed)
    analysis = out / "cells" / "head_gated-seed0" / "analysis"
    analysis.mkdir()
    (analysis / "validation.json").write_text(json.dumps(analysis_content()))
    return out


def page_of(*paths: Path) -> str:
    return make_page(
        [read_source(path) for path in paths], None, title="A test", command="varifocal report", made="now"
    )


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    return page_of(folder)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_page_is_whole_html(html: str, page: Page) -> None:
    assert html.startswith("<!doctype html>")
    assert page.all("html") == [{"lang": "en"}]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_page_loads_nothing(html: str, page: Page) -> None:
    assert "http://" not in html
    assert "https://" not in html
    assert not page.all("script")
    assert not page.all("link")
    addresses = [
        value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")
    ]
    assert all(
        address is not None and address.startswith(("#", "data:text/csv", "data:image/png")) for address in addresses
    )
    assert "url(" not in re.sub(r"url\(#", "", html)


def test_answer_stands_before_everything_else(page: Page) -> None:
    words = page.words.partition("Skip to the content")[2]
    question, answer = "is the validation loss lower than with dense?", "Lower with head_gated and head_gated.no_gate."
    assert words.index(question) < words.index(answer) < words.index("No difference shown for local") < 500


def test_every_figure_has_words_numbers_and_a_command(page: Page) -> None:
    figures = len(page.all("figure"))
    assert figures > 12
    pictures = [one for one in page.all("div") if one.get("role") == "img"]
    assert len(pictures) == figures
    assert all(re.search(r"\d", one["aria-label"] or "") for one in pictures)
    assert len([one for one in page.all("a") if one.get("class") == "csv"]) == figures
    commands = [one for one in page.all("code") if one.get("class") == "command"]
    assert len(commands) == figures + 1
    assert "a command that was not recorded" not in page.words


def test_numbers_of_a_figure_are_those_of_the_files(folder: Path, page: Page) -> None:
    rows = csv_of(page, "difference_at_the_end.csv")
    for result in gather_comparison(folder).results:
        if result.difference is not None and result.difference.interval is not None:
            (row,) = (row for row in rows if row["arm"] == result.name)
            assert float(row["difference"]) == result.difference.mean
            assert (float(row["low"]), float(row["high"])) == result.difference.interval


def test_numbers_of_gates_are_the_mean_over_seeds(folder: Path, page: Page) -> None:
    rows = csv_of(page, "head_gated_gate_map.csv")
    gates = [numpy.load(folder / "cells" / f"head_gated-seed{seed}" / "gates.npz")["gate_mean"] for seed in range(3)]
    expected = numpy.mean(gates, axis=0)[-1]
    assert [float(row["gate"]) for row in rows] == pytest.approx(expected.ravel().tolist(), rel=1e-5)


def test_numbers_of_the_tables_are_those_of_the_files(folder: Path, page: Page) -> None:
    for result in gather_comparison(folder).results:
        assert f"{result.validation_loss.mean:.4f}" in page.words


def test_pattern_of_the_analysis_is_on_the_page(page: Page) -> None:
    rows = csv_of(page, "head_gated-seed0_gate_by_kind.csv")
    (row,) = (row for row in rows if row["kind"] == "number")
    assert float(row["p_holm"]) < 0.05
    assert "higher at number" in page.words


def test_keyboard_reaches_what_scrolls_and_can_skip_to_the_content(page: Page) -> None:
    assert page.all("a")[0] == {"class": "skip", "href": "#content"}
    scrolling = [one for one in page.all("div") if "scroll" in (one.get("class") or "")]
    assert scrolling
    assert all(one.get("tabindex") == "0" and one.get("aria-label") for one in scrolling)


def test_picture_takes_its_colours_from_the_page(html: str) -> None:
    assert "currentColor" in html
    assert "var(--series-1)" in html
    assert "prefers-color-scheme: dark" in html


def test_page_says_what_its_numbers_do_not_show(page: Page) -> None:
    assert "neither confirmed nor refuted" in page.words


def csv_of(page: Page, name: str) -> list[dict[str, str]]:
    (link,) = (one for one in page.all("a") if one.get("download") == name)
    content = unquote((link["href"] or "").partition(",")[2])
    return list(csv.DictReader(io.StringIO(content)))


def test_one_seed_gives_no_answer(tmp_path: Path) -> None:
    found = answer_of_comparison(gather_comparison(write_folder(tmp_path / "out", {"dense": [5.0], "local": [4.0]})))
    assert found.short == "One seed: nothing can be concluded."
    assert "local -1.0000" in found.reasons[0]


def test_differences_within_their_intervals_are_not_claimed(tmp_path: Path) -> None:
    losses = {"dense": [5.0, 5.1, 5.2], "local": [5.01, 5.08, 5.22]}
    assert (
        answer_of_comparison(gather_comparison(write_folder(tmp_path / "out", losses))).short
        == "No difference shown for local."
    )


def test_claim_must_survive_the_correction(tmp_path: Path) -> None:
    # Alone it would be a difference (p near 0.03), among ten arms it is none.
    others = {f"arm{number}": [5.0, 5.1 + 0.001 * number, 5.2 - 0.001 * number] for number in range(1, 10)}
    losses = {"dense": [5.0, 5.1, 5.2], "local": [4.90, 5.04, 5.14], **others}
    found = gather_comparison(write_folder(tmp_path / "out", losses))
    assert found.results[1].difference is not None
    assert found.results[1].difference.excludes_zero
    assert answer_of_comparison(found).short.startswith("No difference shown for local, ")
    # The list of all arms says the same.
    assert "local is not shown to differ from dense: its interval leaves out 0" in verdicts(found)[0]


def test_higher_loss_is_called_higher(tmp_path: Path) -> None:
    losses = {"dense": [5.0, 5.1, 5.2], "local": [5.1, 5.2, 5.3001]}
    assert (
        answer_of_comparison(gather_comparison(write_folder(tmp_path / "out", losses))).short
        == "No: higher with local."
    )


def test_hostile_names_are_text(tmp_path: Path) -> None:
    out = write_folder(tmp_path / "out", {"dense": [5.0, 5.1], "local": [4.9, 5.0]})
    plan = json.loads((out / "plan.json").read_text())
    plan["title"] = HOSTILE
    plan["data"] = HOSTILE
    plan["environment"] = {"command": HOSTILE}
    plan["arms"][1]["name"] = "a<b>&$x$"
    (out / "plan.json").write_text(json.dumps(plan))
    for seed in range(2):
        run = (out / "cells" / f"local-seed{seed}").rename(out / "cells" / f"a<b>&$x$-seed{seed}")
        write_gates(run)
        (run / "analysis").mkdir()
        content = analysis_content() | {"split": HOSTILE, "data": HOSTILE, "environment": {"command": HOSTILE}}
        content["quantities"]["gate"]["by_kind"][0]["kind"] = HOSTILE
        (run / "analysis" / "validation.json").write_text(json.dumps(content))
    page = Page(page_of(out))
    assert not page.all("script")
    assert not page.all("img")
    assert not page.all("b")
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert " ".join(HOSTILE.split()) in page.words


def test_cell_that_a_spreadsheet_would_run_is_text() -> None:
    figure = Figure(name="x", title="x", svg="", words="", header=("a",), rows=[["=cmd()"], [-1.5]], command="")
    assert figure.csv() == "a\n'=cmd()\n-1.5\n"


@pytest.mark.parametrize(
    ("file", "content", "note"),
    [
        ("gates.npz", b"no zip", "its gates.npz cannot be shown"),
        ("analysis/validation.json", b"{", "as a result of 'varifocal analyze'"),
        ("analysis/validation.json", b'{"experiment": "analysis"}', "parts are missing or have another type"),
        ("environment.json", b"[]", "its environment.json cannot be read"),
        ("metrics.jsonl", b"\xff\xfe", "its metrics.jsonl cannot be read"),
    ],
)
def test_broken_file_of_a_run_becomes_a_note(tmp_path: Path, file: str, content: bytes, note: str) -> None:
    run = write_folder(tmp_path / "out", {"dense": [5.0]}) / "cells" / "dense-seed0"
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_bytes(content)
    assert note in Page(page_of(run)).words


def test_gates_of_other_shapes_become_a_note(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "out", {"dense": [5.0]}) / "cells" / "dense-seed0"
    numpy.savez(run / "gates.npz", step=numpy.arange(3), gate_mean=numpy.zeros((2, 2)))
    assert "expected validations, layers and heads" in Page(page_of(run)).words


def test_comparison_without_gates_says_so(tmp_path: Path) -> None:
    words = Page(page_of(write_folder(tmp_path / "out", {"dense": [5.0, 5.1], "local": [5.0, 5.2]}))).words
    assert "There are no gates to show" in words
    assert "'varifocal analyze MODEL --data DATA' makes one" in words


def test_unfinished_run_is_shown_and_called_unfinished(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", {"dense": [5.0, 5.1], "local": [5.0, 5.2]})
    (folder / "cells" / "local-seed1" / "summary.json").unlink()
    words = Page(page_of(folder)).words
    assert "local-seed1 has not finished: the last recorded step is 10" in words
    assert "One seed: nothing can be concluded" in words


def test_flat_traces_are_told_in_a_sentence(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "out", {"dense": [5.0]}) / "cells" / "dense-seed0"
    moving = numpy.linspace(0.2, 0.8, 12).reshape(3, 2, 2)
    arrays: dict[str, Any] = {"gate_mean": moving, "gate_saturated": numpy.zeros((3, 2, 2)), "gate_gradient": moving}
    numpy.savez(run / "gates.npz", step=numpy.array([1, 5, 10]), **arrays)
    page = page_of(run)
    assert "share below 0.05 or above 0.95 is 0 in every layer and head, at every step" in Page(page).words
    assert "_gate_saturated" not in page
    assert "_gate_mean" in page
    # Where texts are no longer than the window, gates decide nothing and are NaN.
    numpy.savez(run / "gates.npz", step=numpy.array([1, 5, 10]), gate_mean=numpy.full((3, 2, 2), numpy.nan))
    words = Page(page_of(run)).words
    assert "The gates decide nothing here: near and far branch read the same keys" in words
    assert "There are no gates to show" not in words


def test_single_run_is_shown(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "out", {"dense": [5.0]}) / "cells" / "dense-seed0"
    words = Page(page_of(run)).words
    assert "Validation loss 5.0000 nats a token after 10 steps." in words


def test_comparison_file_alone_is_shown_without_runs(folder: Path, tmp_path: Path) -> None:
    gather_comparison(folder).with_results().write(tmp_path / "comparison.json")
    assert "without the runs there are no gates to show" in Page(page_of(tmp_path / "comparison.json")).words


def test_benchmark_is_drawn(folder: Path, tmp_path: Path) -> None:
    bench = Path(__file__).parents[2] / "results" / "attention_bench.json"
    out = tmp_path / "page.html"
    result = CliRunner().invoke(
        app, ["report", str(folder), "-o", str(out), "--bench", str(bench)], catch_exceptions=False
    )
    assert result.exit_code == 0
    page = Page(out.read_text(encoding="utf-8"))
    rows = json.loads(bench.read_text())["rows"]
    expected = {
        (row["name"], str(row["length"])): row["speedup"]
        for row in rows
        if row["pass"] == "training" and not row["name"].startswith(("peer", "reference"))
    }
    found = {(row["contender"], row["tokens"]): float(row["speed"]) for row in csv_of(page, "speed_against_length.csv")}
    assert found == expected
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_page_goes_into_the_folder_by_default(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", {"dense": [5.0]})
    CliRunner().invoke(app, ["report", str(folder)], catch_exceptions=False)
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda path: path / "nowhere",
            "does not exist; give the folder of a run, of a comparison or of a focused model",
        ),
        (lambda path: path, "is neither a run nor a comparison"),
        (lambda path: written(path / "comparison.json", "{}"), "is not a result of 'varifocal compare'"),
        (
            lambda path: written(path / "comparison.json", '{"experiment": "comparison"}'),
            "are missing or have another type",
        ),
        (lambda path: written(path / "plan.json", '{"arms": 3}').parent, "cannot read .*plan.json as the plan"),
        (lambda path: written(path / "plan.json", "{").parent, "cannot read .*plan.json as the plan"),
    ],
)
def test_path_that_is_not_a_source_is_refused_in_a_sentence(tmp_path: Path, make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_source(make(tmp_path))


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_broken_benchmark_is_refused(folder: Path, tmp_path: Path) -> None:
    bench = written(tmp_path / "bench.json", '{"benchmark": "attention", "rows": [{}]}')
    with pytest.raises(ValueError, match="are missing or have another type"):
        CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "x.html"), "--bench", str(bench)],
                           catch_exceptions=False)  # fmt: skip
    assert not (tmp_path / "x.html").exists()
