"""`varifocal focus`: gates are fitted on a frozen model, heads are selected by them, and the saved model reads so."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typer.testing import CliRunner

from tests.model.models import SIZES, VOCABULARY
from varifocal import HeadShape, make_mechanism
from varifocal.cli.main import app
from varifocal.model import load_model
from varifocal.results.focus import FocusMap, FocusMeasure
from varifocal.retrofit.families import load_pretrained
from varifocal.retrofit.focus import focusing
from varifocal.retrofit.focus.calibrate import calibrate
from varifocal.retrofit.focus.decide import (
    CacheSizes,
    fewest_heads,
    keep_at_random,
    keep_highest,
    keep_layers_in_turn,
)
from varifocal.retrofit.focus.duo import duo_distance, fit_duo
from varifocal.retrofit.focus.fit import FitPlan, FitStep, expected_share, fit_gates, hard_concrete
from varifocal.retrofit.focus.focusing import Focusing, focused_model, open_dense
from varifocal.retrofit.focus.gates import GatedModel, InputGates
from varifocal.retrofit.focus.ruler import RulerRow, ruler_answer
from varifocal.retrofit.focus.texts import MEASURED, Library, fit_rows, question_rows

PLAN = FitPlan(window=6, sinks=2, lengths=(48, 64), steps=8, rate=0.4, facts=1)


def words(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(1, VOCABULARY)}" for _ in range(count))


FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2 windows": (Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True, "max_window_layers": 1}),
}


def write_source(folder: Path, family: str) -> Path:
    """A random model of a family with a tokenizer of words; norms of queries and keys and biases are random too."""
    kind, config, more = FAMILIES[family]
    torch.manual_seed(11)
    model = kind(config(**{**SIZES, "max_position_embeddings": 128, **more}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj.bias" in name or "q_norm" in name or "k_norm" in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    vocabulary = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer of words."""
    return write_source(tmp_path_factory.mktemp("source"), "llama")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of long documents."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(14):
        (folder / f"{number}.txt").write_text(words(200, number))
    return folder


@pytest.fixture
def library(source: Path) -> Library:
    from varifocal.retrofit.sources import read_tokenizer

    return Library((words(200, number) for number in range(5)), read_tokenizer(source), least=64)


def gated_model(source: Path, *, window: int = 6) -> GatedModel:
    return GatedModel(load_pretrained(source), window=window, sinks=2)


def test_shares_of_one_are_dense_and_shares_of_zero_are_windows(source: Path) -> None:
    dense, gated = load_pretrained(source), gated_model(source)
    tokens = torch.randint(1, VOCABULARY, (2, 40))
    with torch.no_grad():
        wanted = dense.model(input_ids=tokens, use_cache=False).last_hidden_state
        size = (gated.layers, gated.kv_heads)
        torch.testing.assert_close(gated.hidden(tokens, torch.ones(size)), wanted)
        near = gated.hidden(tokens, torch.zeros(size))
        assert (near - wanted).abs().max() > 1e-2
        with gated.by_map([[False] * gated.kv_heads] * gated.layers):
            torch.testing.assert_close(gated.hidden(tokens), near)
        with gated.reading("everything"):
            torch.testing.assert_close(gated.hidden(tokens), wanted)


def test_map_is_what_the_focused_model_reads(source: Path) -> None:
    opened = open_dense(source, PLAN)
    full = keep_at_random(opened.gated.layers, opened.gated.kv_heads, 2, seed=3)
    tokens = torch.randint(1, VOCABULARY, (1, 40))
    with torch.no_grad(), opened.gated.by_map(full):
        wanted = opened.gated.hidden(tokens)
        found = focused_model(opened.source, full, PLAN).model(input_ids=tokens, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, wanted)


def test_mapped_model_says_what_the_focused_model_says(source: Path) -> None:
    opened = open_dense(source, PLAN)
    full = keep_at_random(opened.gated.layers, opened.gated.kv_heads, 2, seed=3)
    row = RulerRow(words(40, 5), ("w1",), 8)
    with opened.gated.by_map(full):
        said = ruler_answer(opened.gated.model, opened.tokenizer, row)
    assert said == ruler_answer(focused_model(opened.source, full, PLAN), opened.tokenizer, row)
    with opened.gated.by_map([[False] * opened.gated.kv_heads] * opened.gated.layers):
        assert said != ruler_answer(opened.gated.model, opened.tokenizer, row)


def test_weights_stay_and_a_penalty_closes_gates(source: Path, library: Library) -> None:
    gated = gated_model(source)
    before = {name: value.clone() for name, value in gated.model.state_dict().items()}
    means = []
    for penalty in (1e-6, 100.0):
        plan = FitPlan(keep=0.1, window=6, sinks=2, lengths=(48, 64), steps=8, rate=0.4, penalty=penalty)
        fitted = fit_gates(gated, fit_rows(library, plan.lengths, seed=0, facts=1), plan)
        assert fitted.scores.shape == (gated.layers, gated.kv_heads)
        assert len(fitted.traces) == len(fitted.losses) == 8
        means.append(float(fitted.scores.mean()))
    assert means[0] > 0.5 > means[1]
    assert all(torch.equal(value, before[name]) for name, value in gated.model.state_dict().items())


def test_constrained_gates_follow_their_target(source: Path, library: Library) -> None:
    shares = []
    for keep in (0.1, 0.9):
        plan = FitPlan(way="constrain", keep=keep, window=6, sinks=2, lengths=(48,), steps=80, rate=0.5, start=1.0)
        fitted = fit_gates(gated_model(source), fit_rows(library, plan.lengths, seed=0, facts=1), plan)
        shares.append(float(fitted.scores.mean()))
    assert shares[0] < 0.45 < shares[1]


def test_gates_by_the_input_follow_the_token_and_leave_the_weights(source: Path, library: Library) -> None:
    gated = gated_model(source)
    tokens = torch.randint(1, VOCABULARY, (1, 40))
    size = (gated.layers, gated.kv_heads)
    # W = 0 is a static gate.
    bias = torch.randn(size)
    by_input = InputGates(torch.zeros(*size, gated.width), bias)
    with torch.no_grad():
        torch.testing.assert_close(gated.hidden(tokens, by_input), gated.hidden(tokens, bias.sigmoid()))
        torch.testing.assert_close(gated.used(), bias.sigmoid())
        moved = gated.hidden(tokens, InputGates(torch.randn(*size, gated.width), bias))
        assert (moved - gated.hidden(tokens, bias.sigmoid())).abs().max() > 1e-3
    with pytest.raises(ValueError, match="gates by the input are fitted by distill, got constrain"):
        FitPlan(way="constrain", gates="input")


def test_duo_recipe_is_dense_at_one_and_closes_heads(source: Path, library: Library) -> None:
    gated = gated_model(source)
    row = next(question_rows(library, (64,), seed=0, facts=1))
    assert float(row.weight.sum()) == pytest.approx(1, abs=1e-5)
    assert row.weight[0] == 0
    ones, zeros = torch.ones(gated.layers, gated.kv_heads), torch.zeros(gated.layers, gated.kv_heads)
    with torch.no_grad():
        assert duo_distance(gated, row, ones) < 1e-10
        apart = duo_distance(gated, row, zeros)
        with gated.reading("everything"):
            wanted = gated.hidden(row.tokens[None])[0]
        found = gated.hidden(row.tokens[None], zeros)[0]
    torch.testing.assert_close(apart, ((found - wanted).square().mean(dim=-1) * row.weight).sum())
    plan = FitPlan(way="duo", window=6, sinks=2, lengths=(64,), steps=12, rate=0.2, facts=1)
    fitted = fit_duo(gated, question_rows(library, (64,), seed=0, facts=1), plan)
    assert fitted.scores.min() >= 0
    assert float(fitted.scores.mean()) < 1


def test_hard_gates_are_often_exactly_open_or_closed() -> None:
    noise = torch.linspace(0.001, 0.999, 999)
    drawn = hard_concrete(torch.tensor(0.0), noise)
    assert drawn.min() == 0
    assert drawn.max() == 1
    assert ((drawn > 0) & (drawn < 1)).any()
    # The probability that the constraint counts is the one that is drawn.
    for logit in (-2.0, 0.0, 1.5):
        share = (hard_concrete(torch.tensor(logit), noise) > 0).float().mean()
        assert share == pytest.approx(float(expected_share(torch.tensor(logit))), abs=2e-3)


class StoppedError(Exception):
    """An interruption."""


@pytest.mark.parametrize(("way", "gates"), [("distill", "static"), ("constrain", "static"), ("distill", "input")])
def test_interrupted_fit_goes_on_as_if_nothing_had_been(
    source: Path, library: Library, tmp_path: Path, way: Any, gates: Any
) -> None:
    plan = FitPlan(way=way, gates=gates, window=6, sinks=2, lengths=(48, 64), steps=6, rate=0.5)
    whole = fit_gates(gated_model(source), fit_rows(library, plan.lengths, seed=0, facts=1), plan)

    def stop(step: FitStep) -> None:
        if step.step == 3:
            raise StoppedError

    state = tmp_path / "state.json"
    with pytest.raises(StoppedError):
        fit_gates(
            gated_model(source), fit_rows(library, plan.lengths, seed=0, facts=1), plan, state=state, on_step=stop
        )
    steps: list[int] = []
    resumed = fit_gates(
        gated_model(source), fit_rows(library, plan.lengths, seed=0, facts=1), plan, state=state,
        on_step=lambda step: steps.append(step.step),
    )  # fmt: skip
    assert steps == [4, 5, 6]
    assert torch.equal(resumed.scores, whole.scores)
    assert resumed.traces == whole.traces
    # What a fit of another model or plan left is not taken up.
    fit_gates(
        gated_model(source), fit_rows(library, plan.lengths, seed=0, facts=1), plan, state=state, of="another",
        on_step=lambda step: steps.append(step.step),
    )  # fmt: skip
    assert steps[3:] == [1, 2, 3, 4, 5, 6]
    other = FitPlan(way=way, gates=gates, window=6, sinks=2, lengths=(48, 64), steps=6, rate=0.6)
    fit_gates(
        gated_model(source), fit_rows(library, other.lengths, seed=0, facts=1), other, state=state,
        on_step=lambda step: steps.append(step.step),
    )  # fmt: skip
    assert steps[9:] == [1, 2, 3, 4, 5, 6]


def test_calibration_tells_the_error_of_each_head(source: Path, library: Library) -> None:
    rows = fit_rows(library, (48,), seed=0, facts=1)
    scores = calibrate(gated_model(source), rows, 2)
    assert (scores > 0).all()
    # A window that holds the whole text loses nothing.
    assert calibrate(gated_model(source, window=48), fit_rows(library, (48,), seed=0, facts=1), 2).max() < 1e-10


def test_facts_stand_where_they_are_said_to(library: Library) -> None:
    row = library.with_facts(
        64, random.Random(0), names=["w3", "w4"], depths=[0.0, 1.0], wording=MEASURED._replace(
            told="w1 {name} {code}", asked="w2 {name}"
        ), digits=1,
    )  # fmt: skip
    tokens = row.tokens.tolist()
    assert len(tokens) == 64
    assert tokens[:2] == [1, 3]
    assert len(row.answers) == 2
    for answer, depth in zip(row.answers, row.depths, strict=True):
        assert tokens[answer.start - 2] == 2
        assert tokens[answer.start - 1] == {0.0: 3, 1.0: 4}[depth]
    with pytest.raises(ValueError, match="a text of 9 tokens has no room for 2 facts"):
        library.with_facts(9, random.Random(0), names=["w3", "w4"])


def test_rows_take_turns_and_their_weights_sum_to_one(library: Library) -> None:
    rows = list(itertools.islice(fit_rows(library, (48, 64), seed=0, facts=1), 6))
    assert {len(row.tokens) for row in rows} == {48, 64}
    for number, row in enumerate(rows):
        assert float(row.weight.sum()) == pytest.approx(1, abs=1e-5)
        assert (len(set(row.weight.tolist())) > 1) == bool(number % 2)


def test_maps() -> None:
    scores = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    assert keep_highest(scores, 2) == ((True, False), (True, False))
    assert keep_highest(scores, 0) == ((False, False), (False, False))
    for count in range(13):
        for full in (keep_at_random(4, 3, count, seed=0), keep_layers_in_turn(4, 3, count)):
            assert sum(map(sum, full)) == count
    assert keep_layers_in_turn(4, 3, 6) == ((False,) * 3, (True,) * 3, (False,) * 3, (True,) * 3)
    asked: list[int] = []

    def rise(count: int) -> float:
        asked.append(count)
        return 1 - count / 90

    assert fewest_heads(rise, 0.5, 90) == 45
    assert len(asked) <= 7


def test_budget_of_bytes() -> None:
    sizes = CacheSizes(layers=2, kv_heads=2, head_width=8, bytes_per_number=4, window=6, sinks=2)
    one = 2 * 8 * 4
    # 7 tokens are kept for the next query, in a room for 11.
    full = ((True, False), (False, False))
    assert sizes.of_map(full, 100) == one * (100 + 3 * 11)
    assert sizes.heads_within(one * (100 + 3 * 11), 100) == 1
    assert sizes.heads_within(one * 1000, 100) == 4
    with pytest.raises(ValueError, match=r"a cache of 64 bytes at 100 tokens is less than the 2,816 bytes"):
        sizes.heads_within(one, 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 1.5}, "keep is a share of the key heads, from 0 to 1, got 1.5"),
        ({"way": "guess"}, "must be one of distill, constrain, calibrate, duo, got 'guess'"),
        ({"rate": 0.001}, "32 steps at a rate of 0.001 move them by 0.032, and 2 is the least"),
        ({"start": -12.0}, "gates that start at the logit -12 cannot cross 1/2"),
        ({"lengths": (100,)}, "texts of 100 tokens do not reach beyond a window of 256 and 4 sinks"),
    ],
)
def test_plans_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FitPlan(**options)


def test_one_thing_decides() -> None:
    with pytest.raises(ValueError, match="cannot both decide"):
        Focusing(fit=PLAN, budget=1, accept=0.1)
    with pytest.raises(ValueError, match="give its steps with --adapt too"):
        Focusing(fit=PLAN, lora=4)


def test_predicted_bytes_are_those_of_a_full_memory() -> None:
    shape = HeadShape(model_width=16, heads=4, kv_heads=2, head_width=8)
    memory = make_mechanism("focused", shape, windows=(6, 6), sinks=2).memory()
    for _ in range(40):
        token = torch.randn(1, 2, 1, 8)
        memory.append(torch.randn(1, 1, 16), torch.randn(1, 4, 1, 8), token, token)
    sizes = CacheSizes(layers=1, kv_heads=2, head_width=8, bytes_per_number=4, window=6, sinks=2)
    assert memory.bytes == sizes.of_map(((False, False),), 40)


OPTIONS = [
    *("--window", "6", "--sinks", "2", "--length", "48,64", "--steps", "6", "--rate", "0.5", "--facts", "1"),
    *("--threads", "1"),
]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_command_fits_saves_and_measures(source: Path, texts: Path, tmp_path: Path) -> None:
    out, told, picture = tmp_path / "out", tmp_path / "told.json", tmp_path / "told.png"
    said = run("focus", str(source), str(out), "--keep", "0.5", "--texts", str(texts), *OPTIONS)
    record = FocusMap.read(out / "focus.json")
    model = load_model(out)
    heads = len(record.heads)
    assert record.share == 0.5
    assert f"{heads // 2} of {heads} key heads read everything (50%)" in said
    windows = [
        [head.window for head in record.heads if head.layer == layer] for layer in range(len(model.model.layers))
    ]
    options: Any = model.config.mechanism_options
    assert [list(one["windows"]) for one in options] == windows
    assert model.config.mechanism == ["focused"] * len(windows)
    tokens = torch.randint(1, VOCABULARY, (1, 30))
    assert model.generate(tokens, max_new_tokens=4, do_sample=False).shape == (1, 34)
    said = run(
        "measure", str(out), str(source), "--texts", str(texts), "--length", "64", "--documents", "4",
        "--questions", "10", "--fact-lengths", "112", "--rivals-at", "0.5", "--curve", "64", "--curve-documents", "4",
        "--caches", "32,64", "--speed", "40", "--rounds", "1", "--json", str(told), "--plot", str(picture),
    )  # fmt: skip
    assert "layers in turn" in said
    result = FocusMeasure.read(told)
    assert {row.keep for row in result.losses if row.name == "random"} == {0.5}
    assert {row.keep for row in result.losses} == {1.0, 0.5, 0.25, 0.0} | {round(round(heads / 3) / heads, 4)}
    assert all(len(row.documents) == 4 for row in result.losses)
    assert all(len(row.found) == 10 for row in result.facts)
    assert picture.stat().st_size > 1000
    # Nothing of the fit is left beside the model.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "told.json", "told.png"]


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_families_with_norms_and_biases_are_focused(
    family: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved model gives, token by token, what the frozen model with the same map gives at once."""
    source, out = write_source(tmp_path / "source", family), tmp_path / "out"
    # transformers takes every tokenizer beside a Qwen2 for Qwen's own, which knows no words of ours.
    monkeypatch.setattr(focusing, "read_tokenizer", PreTrainedTokenizerFast.from_pretrained)
    told = tuple({"qwen3": ("q_norm", "k_norm"), "qwen2": ("q_proj.bias", "k_proj.bias")}[family])
    run("focus", str(source), str(out), "--keep", "0.5", "--texts", str(texts), *OPTIONS)
    opened, model = open_dense(source, PLAN), load_model(out)
    assert all(any(name in key for key in model.state_dict()) for name in told)
    tokens = torch.randint(1, VOCABULARY, (1, 40))
    dense = opened.source(tokens).logits
    options: Any = model.config.mechanism_options
    full = [[window is None for window in one["windows"]] for one in options]
    with torch.no_grad():
        with opened.gated.reading("everything"):
            torch.testing.assert_close(opened.gated.model(tokens).logits, dense, atol=1e-4, rtol=1e-4)
        with opened.gated.by_map(full):
            wanted = opened.gated.model(tokens).logits
        assert (wanted - dense).abs().max() > 1e-2
        torch.testing.assert_close(model(tokens).logits, wanted, atol=1e-4, rtol=1e-4)
        cache, steps = None, []
        for part in (tokens[:, :20], *(tokens[:, place : place + 1] for place in range(20, 40))):
            answer = model(part, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            steps.append(answer.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), wanted, atol=1e-4, rtol=1e-4)


def test_model_with_windows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has sliding windows in some layers already"):
        open_dense(write_source(tmp_path / "source", "qwen2 windows"), PLAN)


@pytest.mark.parametrize("lora", [(), ("--lora", "2")])
def test_command_decides_by_an_accepted_loss_and_adapts(
    source: Path, texts: Path, tmp_path: Path, lora: tuple[str, ...]
) -> None:
    if lora:
        pytest.importorskip("peft")
    out = tmp_path / "out"
    options = ["--accept", "100", "--adapt", "3", "--adapt-rate", "0.01", *lora]
    said = run("focus", str(source), str(out), "--fit", "calibrate", "--texts", str(texts), *OPTIONS, *options)
    assert "0 of " in said
    assert "adapted for 3 steps" in said
    content = json.loads((out / "focus.json").read_text())
    assert content["adaptation"]["steps"] == 3
    assert content["adaptation"]["lora"] == (2 if lora else None)
    assert content["adaptation"]["rise_before"]["count"] == content["adaptation"]["rise_after"]["count"] == 8
    assert all(head["window"] == 6 for head in content["heads"])
    # Merged: the weights are there under their own names, and they have moved.
    before, after = load_pretrained(source).state_dict(), load_model(out).state_dict()
    assert after.keys() == before.keys()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(before[name], after[name])
    # The scores serve another share without another fit.
    again = tmp_path / "again"
    said = run("focus", str(source), str(again), "--keep", "1", "--scores", str(out), "--texts", str(texts), *OPTIONS)
    assert f"scores of {out}" in said
    assert FocusMap.read(again / "focus.json").share == 1
    assert FocusMap.read(again / "focus.json").fit["way"] == "calibrate"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--length", "500"), "the model reads 128 tokens|no document has the 500 tokens"),
        (("--cache-bytes", "10"), "is less than the"),
        (("--lora", "0"), "--lora"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    source: Path, texts: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    options = [*OPTIONS, "--fit", "calibrate", "--texts", str(texts), *arguments]
    result = CliRunner().invoke(app, ["focus", str(source), str(tmp_path / "out"), *options])
    assert result.exit_code != 0
    assert re.search(message, f"{result.output} {result.exception}")
    assert not (tmp_path / "out").exists()
