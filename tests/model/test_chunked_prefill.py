"""A long prompt is read in parts: the same text as at once, with memory for a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.model.models import VARIANTS, VOCABULARY, random_tokens, small_model
from varifocal.cli import generate as command
from varifocal.cli.main import app
from varifocal.device import CPU
from varifocal.model import VarifocalConfig, VarifocalForCausalLM


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_parts_of_a_prompt_give_the_logits_of_the_whole(variant: str, chunk: int) -> None:
    model, ids = small_model(variant), random_tokens(2, 40)
    with torch.no_grad():
        whole = model(ids, use_cache=True)
        cache, parts = None, []
        for begin in range(0, ids.shape[1], chunk):
            part = ids[:, begin : begin + chunk]
            answer = model(part, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            parts.append(answer.logits)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_goes_on_alike_after_parts(variant: str) -> None:
    model, ids = small_model(variant), random_tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, **settings)
    for chunk in (4, 13):
        found = model.generate(ids, attention_mask=mask, prefill_chunk_size=chunk, **settings)
        assert torch.equal(found, expected)


def test_memory_is_that_of_a_part() -> None:
    config = VarifocalConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=4096, num_hidden_layers=1, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=9000,
    )  # fmt: skip
    model, ids = VarifocalForCausalLM(config).eval(), random_tokens(1, 8192)

    def taken(chunk: int | None) -> int:
        return CPU.peak_additional_bytes(
            lambda: model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0, prefill_chunk_size=chunk)
        )

    inner = ids.shape[1] * config.intermediate_size * 4
    taken(512)  # What the first call of a process loads is not the text's.
    assert taken(512) < inner / 2
    assert taken(None) > inner


def test_the_command_reads_long_prompts_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{number}" for number in range(VOCABULARY - 1)]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate([*words, "[UNK]"])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    small_model("local").save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompt = " ".join(words[:40])
    words_given = ["generate", str(tmp_path), prompt, "--temperature", "0", "--new-tokens", "6"]
    at_once = CliRunner().invoke(app, words_given, catch_exceptions=False).stdout
    given: list[Any] = []
    original = VarifocalForCausalLM.generate

    def generate(self: Any, *args: Any, **options: Any) -> Any:
        given.append(options["prefill_chunk_size"])
        return original(self, *args, **options)

    monkeypatch.setattr(VarifocalForCausalLM, "generate", generate)
    monkeypatch.setattr(command, "AT_ONCE", 16)
    assert CliRunner().invoke(app, words_given, catch_exceptions=False).stdout == at_once
    assert given == [16]
