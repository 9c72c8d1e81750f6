"""What the page is told is what the model does."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.explorer.models import TEXT, opened_model, small_explorer, small_tokenizer
from tests.model.models import VARIANTS
from varifocal import force_gates
from varifocal.explorer.attention_row import attention_row
from varifocal.explorer.opening import OpenedModel
from varifocal.explorer.pieces import cut
from varifocal.explorer.reading import Gates, decoder_layer, read_tokens
from varifocal.explorer.readings import Readings
from varifocal.explorer.views import TextQuestion, TokenQuestion

every_variant = pytest.mark.parametrize("variant", VARIANTS)
LAYER, HEAD, TOKEN = 1, 2, 20


def ids_of(opened: OpenedModel) -> list[int]:
    return cut(opened, TEXT, most=256).ids


def head_output(opened: OpenedModel, ids: list[int]) -> tuple[Tensor, Tensor]:
    """What one head gives out for one token [D], and the values [S, D] that it read, taken from the model itself."""
    attention = decoder_layer(opened.model, LAYER).self_attn
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(module: torch.nn.Module, given: tuple[Tensor, ...], result: object) -> None:
        seen.append((result.output[0, HEAD, TOKEN], given[3][0, HEAD // 2]))  # type: ignore[attr-defined]

    handle = attention.mechanism.register_forward_hook(keep)
    with torch.no_grad():
        opened.model(torch.tensor([ids]), use_cache=False)
    handle.remove()
    output, values = seen[0]
    # What a mechanism adds to values by their distance is in the output, and not in the weights.
    added = getattr(attention.mechanism, "value_vectors", None)
    if added is not None:
        distance = (TOKEN - torch.arange(len(values))).clamp(0, len(added) - 1)
        values = values + added.detach()[distance]
    return output, values


@every_variant
def test_row_of_attention_gives_the_heads_output(variant: str) -> None:
    opened = opened_model(variant)
    ids = ids_of(opened)
    output, values = head_output(opened, ids)
    row = attention_row(opened.model, read_tokens(opened.model, ids, "learned"), layer=LAYER, head=HEAD, token=TOKEN)
    torch.testing.assert_close(row.weights @ values[: TOKEN + 1], output, rtol=1e-4, atol=1e-5)


@every_variant
def test_row_of_attention_sums_to_1_less_what_a_sink_takes(variant: str) -> None:
    opened = opened_model(variant)
    has_sink = VARIANTS[variant][1].get("sink_logit", False)
    reading = read_tokens(opened.model, ids_of(opened), "learned")
    for token in (0, 3, TOKEN):
        row = attention_row(opened.model, reading, layer=LAYER, head=HEAD, token=token)
        total = float(row.weights.sum())
        # By the delta rule a key is remembered less what was known of it.
        learns_rest = VARIANTS[variant][1].get("delta", False)
        assert 0 < total < 1 if has_sink else learns_rest or total == pytest.approx(1, abs=1e-5)


def test_parts_of_a_row_weigh_what_the_gate_says() -> None:
    opened = opened_model("head_gated")
    reading = read_tokens(opened.model, ids_of(opened), "learned")
    row = attention_row(opened.model, reading, layer=LAYER, head=HEAD, token=TOKEN)
    gate = float(reading.records[LAYER]["gate"][HEAD, TOKEN])
    assert row.local_part is not None
    assert float(row.local_part.sum()) == pytest.approx(gate, abs=1e-5)
    assert float(row.local_part[: TOKEN - 4].sum()) == 0  # a window of 5 keys


def test_view_shows_the_gates_of_the_layer_and_head() -> None:
    explorer = small_explorer("head_gated")
    opened = explorer.opened[0]
    with torch.no_grad():
        output = opened.model(torch.tensor([ids_of(opened)]), use_cache=False, output_records=True)
    view = explorer.text(TextQuestion(text=TEXT, layer=LAYER, head=HEAD))
    assert view.gate == pytest.approx(output.records[LAYER]["gate"][0, HEAD].tolist(), abs=1e-3)
    assert view.decides == [place >= 5 for place in range(len(view.pieces))]
    assert view.window == 5


def test_view_shows_learned_widths() -> None:
    explorer = small_explorer("context_adaptive")
    opened = explorer.opened[0]
    with torch.no_grad():
        output = opened.model(torch.tensor([ids_of(opened)]), use_cache=False, output_records=True)
    view = explorer.text(TextQuestion(text=TEXT, layer=LAYER, head=HEAD))
    assert view.width == pytest.approx(output.records[LAYER]["width"][0, HEAD].tolist(), abs=0.1)
    assert view.edge == 3


@pytest.mark.parametrize(("gates", "value"), [("local", 1.0), ("global", 0.0)])
def test_next_tokens_with_held_gates_are_those_of_the_forced_model(gates: str, value: float) -> None:
    explorer = small_explorer("head_gated")
    opened = explorer.opened[0]
    with torch.no_grad(), force_gates(opened.model, value):
        logits = opened.model(torch.tensor([ids_of(opened)]), use_cache=False).logits[0, TOKEN]
    best = logits.softmax(dim=-1).topk(10)
    shown = explorer.following(TokenQuestion.model_validate({"text": TEXT, "token": TOKEN, "gates": gates}))
    assert shown.gates == gates
    assert [one.probability for one in shown.candidates] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert [one.text for one in shown.candidates] == [opened.tokenizer.decode([one]) for one in best.indices.tolist()]


def test_learned_mix_and_held_gates_expect_different_tokens() -> None:
    explorer = small_explorer("head_gated")
    states: tuple[Gates, ...] = get_args(Gates)
    assert states == ("learned", "local", "global")
    shown = [explorer.following(TokenQuestion(text=TEXT, token=TOKEN, gates=gates)) for gates in states]
    assert len({state.following for state in shown}) == 3


def test_held_gates_change_the_view_of_the_text() -> None:
    view = small_explorer("head_gated").text(TextQuestion(text=TEXT, gates="local"))
    assert set(view.gate or []) == {1.0}


def test_model_without_gates_shows_what_it_has() -> None:
    explorer = small_explorer("dense")
    text = explorer.text(TextQuestion(text=TEXT))
    token = explorer.token(TokenQuestion(text=TEXT, token=TOKEN))
    assert (text.gate, text.decides, text.width, text.window) == (None, None, None, None)
    with pytest.raises(ValueError, match="has no gates that could be held"):
        explorer.following(TokenQuestion(text=TEXT, token=TOKEN, gates="local"))
    assert len(token.keys) == 12
    assert explorer.models[0].layers[0].words == "no gate: every key"


def test_mean_gates_leave_out_tokens_where_nothing_is_decided() -> None:
    explorer = small_explorer("head_gated")
    view = explorer.text(TextQuestion(text=TEXT, layer=LAYER, head=HEAD))
    assert view.gate is not None
    row = view.gate_map[LAYER]
    assert row is not None
    assert row[HEAD] == pytest.approx(sum(view.gate[5:]) / len(view.gate[5:]), abs=2e-3)


def test_last_token_is_followed_by_nothing() -> None:
    explorer = small_explorer("dense")
    last = len(ids_of(explorer.opened[0])) - 1
    assert explorer.following(TokenQuestion(text=TEXT, token=last)).following is None


@pytest.mark.parametrize("text", [TEXT, "naïve 東京 🏗️ \r\n\ttext", " ", "\x00\u202e<b>", "e\u0301"])
def test_pieces_make_up_the_text(text: str) -> None:
    pieces = cut(opened_model("dense"), text, most=256)
    assert "".join(pieces.pieces) == text
    assert len(pieces.pieces) == len(pieces.starts) == len(pieces.ids)


def test_a_character_of_several_tokens_is_shown_once() -> None:
    pieces = cut(opened_model("dense"), "a🏗b", most=256)
    assert [piece for piece in pieces.pieces if piece] == ["a", "🏗", "b"]
    assert len(pieces.ids) == 6


def test_added_tokens_are_named() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = small_tokenizer().__class__(tokenizer_object=small_tokenizer().backend_tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    begin = ("<begin>", tokenizer.convert_tokens_to_ids("<begin>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=[begin])
    opened = opened_model("dense")
    opened = OpenedModel("added", opened.model, tokenizer)
    opened.model.config.vocab_size += 1
    pieces = cut(opened, "The town", most=256)
    assert pieces.added == {0: "<begin>"}
    assert "".join(pieces.pieces) == "The town"


def test_readings_are_forgotten_oldest_first() -> None:
    opened = opened_model("dense")
    made: list[str] = []

    def reading(name: str) -> None:
        readings.get(name, lambda: made.append(name) or one)  # type: ignore[func-returns-value]

    one = read_tokens(opened.model, ids_of(opened), "learned")
    readings = Readings(most_bytes=2 * one.size())
    for name in ("a", "b", "a", "c", "a", "b"):
        reading(name)
    assert made == ["a", "b", "c", "b"]
    assert readings.bytes() <= 2 * one.size()


def test_another_head_does_not_read_the_text_again() -> None:
    explorer = small_explorer("head_gated")
    explorer.text(TextQuestion(text=TEXT))
    first = dict(explorer.readings.kept)
    explorer.text(TextQuestion(text=TEXT, layer=1, head=3))
    assert dict(explorer.readings.kept) == first


def test_damaged_weights_are_said_to_be_damaged() -> None:
    explorer = small_explorer("dense")
    with torch.no_grad():
        explorer.opened[0].model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        explorer.text(TextQuestion(text=TEXT))
