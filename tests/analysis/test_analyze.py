"""A model and data to an analysis file, and `varifocal analyze`."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from tests.data.conftest import prepared
from tests.data.texts import write_jsonl
from tests.model.models import SIZES, small_config, small_model
from varifocal.analysis.analyze import AnalysisPlan, analyze, own_options, spread_rows
from varifocal.cli.main import app
from varifocal.data import PreparedData
from varifocal.model import VarifocalForCausalLM
from varifocal.report.analysis import (
    findings,
    gain_sentence,
    kind_table,
    position_table,
    selection_table,
)
from varifocal.results.analysis import Analysis

SENTENCES = [
    "The Senate and the House met in 1812 to hear of it.",
    'He said "there will be peace" and nobody believed him.',
    "Commerce, manufactures and agriculture prosper again.",
    "for (i = 0; i < n; i++) { sum += i; }",
    "Москва is far from here, and so is the river.",
]
PLAN = AnalysisPlan(length=128, tokens=1536, window=16, resamples=20)


def model_for(data: PreparedData, variant: str) -> Any:
    return small_model(variant, vocab_size=data.manifest.tokenizer.vocabulary, max_position_embeddings=128)


def new_model(data: PreparedData, variant: str, **changes: Any) -> Any:
    """A model whose gates are still at their start."""
    torch.manual_seed(0)
    sizes = {"vocab_size": data.manifest.tokenizer.vocabulary, "max_position_embeddings": 128}
    return VarifocalForCausalLM(small_config(variant, **sizes, **changes)).eval()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """120 documents of a few sentences."""
    folder = tmp_path_factory.mktemp("analysis")
    choose = random.Random(0)
    # Each text has a word of its own, which the others do not know.
    names = ["xyl" + "".join("abcdefghij"[int(digit)] for digit in str(number)) for number in range(120)]
    texts = [f"On {name} now. " + "\n".join(choose.choices(SENTENCES, k=8)) for name in names]
    write_jsonl(folder / "texts.jsonl", texts)
    return prepared(folder / "texts.jsonl", folder / "data", tokenizer="train:400")


@pytest.fixture(scope="module")
def content(data: PreparedData) -> Analysis:
    return analyze(model_for(data, "context_adaptive"), data, PLAN)


def test_file_is_plain_json(content: Analysis) -> None:
    assert Analysis.from_json(json.loads(json.dumps(content.to_json(), allow_nan=False))) == content


def test_every_kind_of_the_text_is_counted(content: Analysis) -> None:
    counts = {row.kind: row.tokens for row in content.kinds}
    assert all(counts[kind] > 0 for kind in counts if kind not in ("far text helps", "far text harms")), counts


def test_gate_at_its_start_shows_no_pattern_and_the_sentence_claims_none(data: PreparedData) -> None:
    found = analyze(new_model(data, "head_gated"), data, PLAN)
    gate = found.quantities["gate"]
    assert all(value == 0.5 for row in gate.mean for value in row)
    assert all(row.difference in (0.0, None) for row in gate.by_kind)
    assert findings(found)[0].startswith("gate (weight of the near branch): no difference shown")


def test_gate_that_recognizes_numbers_is_detected(data: PreparedData) -> None:
    # The embedding of digits alone points along one direction, and the first layer's gates read it.
    model = new_model(data, "head_gated")
    digits = [token for token in range(model.config.vocab_size) if data.tokenizer().decode([token]).strip().isdigit()]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.0
        model.model.embed_tokens.weight[digits, 0] = 3.0
        gate = model.model.layers[0].self_attn.mechanism.gate
        gate.output.weight[1, 0] = 2.0
    found = analyze(model, data, PLAN).quantities["gate"].by_kind_and_head
    sure = {
        (row.kind, layer, head)
        for row in found
        for layer, heads in enumerate(row.p_holm)
        for head, p in enumerate(heads)
        if p is not None and p < 0.05 and (row.effect[layer][head] or 0) > 1
    }
    assert ("number", 0, 1) in sure
    assert {(layer, head) for _, layer, head in sure} == {(0, 1)}


def test_context_adaptive_has_gates_widths_and_selections(content: Analysis) -> None:
    assert list(content.quantities) == ["gate", "width", "distance", "window_mass"]
    assert content.width_shares is not None
    assert content.selected_shares is not None
    for shares in (content.width_shares.shares, content.selected_shares.shares):
        assert sum(one or 0 for one in shares[0][0]) == pytest.approx(1.0, abs=1e-4)


def test_dense_model_is_described_by_its_mass_alone(data: PreparedData) -> None:
    found = analyze(model_for(data, "dense"), data, PLAN)
    assert list(found.quantities) == ["window_mass"]
    assert found.width_shares is None
    assert found.selected_shares is None
    assert {reach for row in found.selection.reach for reach in row} <= {
        "local",
        "global",
        "mixed",
        "first token",
    }


def test_mixed_layers_leave_out_what_a_layer_does_not_have(data: PreparedData) -> None:
    options = {"dense": {}, "head_gated": {"window": 16}}
    model = new_model(data, "dense", mechanism=["dense", "head_gated"], mechanism_options=options)
    gate = analyze(model, data, PLAN).quantities["gate"]
    assert set(gate.mean[0]) == {None}
    assert set(gate.mean[1]) == {0.5}


def test_same_seed_gives_the_same_file(data: PreparedData, content: Analysis) -> None:
    again = analyze(model_for(data, "context_adaptive"), data, PLAN)
    assert replace(again, environment=content.environment) == content


def test_model_is_left_as_it_was(data: PreparedData) -> None:
    model = model_for(data, "head_gated").train()
    analyze(model, data, PLAN)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_window_of_the_mechanism_counts_as_near(data: PreparedData) -> None:
    model = model_for(data, "head_gated")
    assert own_options(model)["window"] == model.config.mechanism_options["window"]


def test_rows_are_spread_over_the_split() -> None:
    assert spread_rows(100, 5).tolist() == [0, 25, 50, 74, 99]
    assert spread_rows(3, 10).tolist() == [0, 1, 2]


def test_window_that_holds_everything_is_refused(data: PreparedData) -> None:
    with pytest.raises(ValueError, match="rows of 16 tokens do not reach beyond the window of 16"):
        analyze(model_for(data, "dense"), data, AnalysisPlan(length=16, window=16))


def test_tables_are_rectangular(content: Analysis) -> None:
    gate = content.quantities["gate"]
    for table in (selection_table(content), kind_table(gate.by_kind), position_table(gate.by_position)):
        assert len({len(row) for row in table}) == 1
    assert "is worth" in gain_sentence(content)


def test_command_writes_into_the_run_and_prints_tables(data: PreparedData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    model_for(data, "head_gated").save_pretrained(run / "model")
    result = CliRunner().invoke(
        app,
        ["analyze", str(run / "model"), "--data", str(data.folder), "--tokens", "512", "--resamples", "5"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    assert "dense attention recovered" in result.stdout
    assert Analysis.read(run / "analysis" / "validation.json").mechanism == "head_gated"
    assert [file.name for file in (run / "analysis").iterdir()] == ["validation.json"]


def test_pretrained_dense_model_is_analyzed_as_it_is(data: PreparedData, tmp_path: Path) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    config = Qwen3Config(vocab_size=data.manifest.tokenizer.vocabulary, **sizes)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "qwen")
    file = tmp_path / "qwen.json"
    result = CliRunner().invoke(
        app,
        ["analyze", str(tmp_path / "qwen"), "--data", str(data.folder), "-o", str(file), "--tokens", "256"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    found = Analysis.read(file)
    assert (found.mechanism, found.window) == ("dense", 8)
    assert all(0 < (share or 0) <= 1 for row in found.selection.window.mean for share in row)


def test_head_that_looks_at_itself_is_local_and_one_that_does_not_care_is_global(data: PreparedData) -> None:
    model = new_model(data, "dense", qk_norm=False, num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        # Queries of head 0 and their keys are the same strong direction that rotates slowly; head 2 asks for nothing.
        attention.q_proj.weight.zero_()
        attention.k_proj.weight.zero_()
        attention.q_proj.bias = torch.nn.Parameter(torch.zeros(32))
        attention.k_proj.bias = torch.nn.Parameter(torch.zeros(16))
        attention.q_proj.bias[0:8] = 12.0
        attention.k_proj.bias[0:8] = 12.0
    reach = analyze(model, data, PLAN).selection.reach[0]
    assert reach[0] == "local"
    assert reach[2:] == ("global", "global")


def test_model_outside_a_run_is_analyzed_but_not_saved(data: PreparedData, tmp_path: Path) -> None:
    model_for(data, "dense").save_pretrained(tmp_path / "model")
    arguments = ["analyze", str(tmp_path / "model"), "--data", str(data.folder), "--tokens", "256", "--resamples", "5"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "does not belong to a run; use -o FILE to write the analysis to a file" in " ".join(result.stdout.split())
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--split", "tset"], "unknown split 'tset'"),
        (["--length", "8", "--window", "8"], "do not reach beyond the window"),
        (["-o", "no/such/folder/x.json"], "does not exist; create it first"),
        (["--data", "no/such/data"], "no/such/data"),
    ],
)
def test_mistake_is_a_sentence(data: PreparedData, tmp_path: Path, options: list[str], sentence: str) -> None:
    model_for(data, "dense").save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=sentence):
        CliRunner().invoke(
            app, ["analyze", str(tmp_path / "model"), "--data", str(data.folder), *options], catch_exceptions=False
        )


def test_other_json_is_not_an_analysis(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a result of 'varifocal analyze'; make one with its -o option"):
        Analysis.read(tmp_path / "x.json")
