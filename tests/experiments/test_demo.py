"""The first look: what it keeps for measuring, what it writes, what it concludes, and that it goes on where it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from tests.model.models import SIZES, VOCABULARY
from tests.retrofit.test_focus import PLAN, words
from varifocal.analysis.row_kinds import distances
from varifocal.cli.main import app
from varifocal.experiments.demo import DemoPlan, DemoResult, conclusion, divided, run_demo
from varifocal.report.focus import compared_losses, rise
from varifocal.retrofit.focus.comparison import Measuring
from varifocal.retrofit.focus.far_question import MOST
from varifocal.retrofit.packaged import PACKAGED, Packaged, packaged_file
from varifocal.statistics.estimates import seeds_needed

SMALL = DemoPlan(
    fit=replace(PLAN, keep=0.5),
    measuring=Measuring(
        length=64, documents=3, questions=4, fact_lengths=(96,), shares=(0.5,), rival_shares=(0.5,)
    ),
    question_length=120,
    cache_length=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with room for a text with facts, and a tokenizer of words."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(11)
    LlamaForCausalLM(LlamaConfig(**SIZES | {"max_position_embeddings": 128})).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "out"


@pytest.fixture(scope="module")
def result(source: Path, folder: Path) -> DemoResult:
    texts = [words(200, number) for number in range(18)]

    def kinds(rows: torch.Tensor, tokenizer: object) -> dict[str, torch.Tensor]:
        return {"second": torch.arange(rows.shape[1]).expand_as(rows) == 1}

    return run_demo(str(source), folder, texts, SMALL, kinds=kinds)


def test_what_is_measured_on_is_not_fitted_on() -> None:
    fitted, held_out = divided(str(number) for number in range(20))
    assert held_out == ["5", "11", "17"]
    assert sorted(fitted + held_out, key=int) == [str(number) for number in range(20)]


def test_conclusion_names_share_interval_and_chance(result: DemoResult) -> None:
    sentence = conclusion(result)
    ((row, dense), *_) = compared_losses(result.measured)
    low, high = rise(row, dense).interval or (0, 0)
    assert f"95 % interval {low:.3f} to {high:.3f}, 3 texts that were not fitted on" in sentence
    assert "heads by chance lose" in sentence


def test_kinds_are_counted_and_lose_what_their_tokens_lose(result: DemoResult) -> None:
    for row, dense in compared_losses(result.measured):
        # The window of 6 holds the whole text at the second token, so nothing can be lost there.
        assert row.kinds is not None
        assert dense.kinds is not None
        assert row.kinds["second"] == pytest.approx(dense.kinds["second"], abs=1e-5)
        assert row.kind_tokens == {"second": 3}


def test_question_is_asked_of_both_models_and_the_focused_one_holds_less(result: DemoResult) -> None:
    dense, focused = result.question.answers
    assert (dense.name, focused.name) == ("dense", "focused")
    assert focused.cache_bytes < dense.cache_bytes
    assert result.question.back > 60
    # A random model answers nothing: all questions were asked, and that is told.
    assert (dense.right, result.question.tried) == (False, MOST)


def test_second_call_goes_on_where_it_was(result: DemoResult, source: Path, folder: Path) -> None:
    said: list[str] = []
    again = run_demo(str(source), folder, [words(200, number) for number in range(18)], SMALL, say=said.append)
    assert said == [f"{folder} is focused already"]
    assert again.measured.losses == result.measured.losses


def test_report_of_a_focused_model_shows_map_costs_and_places(result: DemoResult, folder: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    page = (folder / "report.html").read_text(encoding="utf-8")
    for said in ("focus_map.csv", "focus_cost.csv", "focus_by_position.csv", "focus_by_kind.csv", "of the cache saved"):
        assert said in page


def test_distance_counts_back_to_the_same_token() -> None:
    assert distances(torch.tensor([5, 7, 5, 5, 7])).tolist() == [0, 0, 2, 1, 3]


def test_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "nobody", Packaged("no_such_module", "x.gguf", "pip install nobody"))
    with pytest.raises(ValueError, match="not installed; install it with: pip install nobody"):
        packaged_file("nobody")
    assert packaged_file("owner/name") is None


def test_seeds_needed_grow_as_the_difference_shrinks() -> None:
    assert seeds_needed(0.025, 0.0158) == 6
    assert seeds_needed(0.005, 0.0158) == 81
    assert seeds_needed(0.0001, 0.0158) is None
