"""The decoding benchmark compares the same weights, counts what is read, and says how caches were filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from varifocal.bench.decode.caches import cache_bytes, random_cache
from varifocal.bench.decode.contenders import BASELINE, ModelContender, check_agreement, twin, weights_read
from varifocal.bench.decode.run import Plan, bench_decode
from varifocal.cli.main import app
from varifocal.model import VarifocalConfig, VarifocalForCausalLM
from varifocal.model.weights import weight_bytes
from varifocal.report.decode_bench import decode_table, loss_sentence, speculation_sentence, speed_table
from varifocal.results.decode_bench import DecodeBench

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip


def make_model(**changes: Any) -> VarifocalForCausalLM:
    torch.manual_seed(0)
    made: VarifocalForCausalLM = VarifocalForCausalLM(VarifocalConfig(**(SIZES | changes))).eval()
    return made


def test_command_writes_a_row_for_each_and_a_picture(tmp_path: Path) -> None:
    make_model(mechanism="local", mechanism_options={"window": 8}).save_pretrained(tmp_path / "model")
    words = ["bench", "decode", str(tmp_path / "model"), "--contexts", "8,40", "--prompt", "8", "--rows", "1,4"]
    names = ("transformers", "dense", "local", "dense int8")
    words += [word for name in names for word in ("-c", name)]
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    answer = CliRunner().invoke(app, [*words, "--rounds", "2", "--new-tokens", "2", *files], catch_exceptions=False)
    assert answer.exit_code == 0
    bench = DecodeBench.read(tmp_path / "r.json")
    assert {(row.name, row.context, row.texts) for row in bench.rows} == {
        (name, context, texts) for name in names for context in (8, 40) for texts in (1, 4)
    }
    first = bench.rows[0]
    assert (first.name, first.against, first.speedup) == (BASELINE, BASELINE, 1.0)
    assert all((row.first_token_seconds is not None) == (row.context == 8) for row in bench.rows)
    assert bench.notes == ("caches of 40 tokens hold random keys and values, but llama.cpp's, which read a prompt",)
    assert bench.weight_bytes["dense int8"] < 0.4 * bench.weight_bytes["dense"]
    assert [line[0] for line in decode_table(bench, 40, 4)] == ["after 40 tokens x 4", *names]
    assert speed_table(bench)[0] == ["tokens/s after", "8", "40"]
    assert (tmp_path / "r.png").stat().st_size > 0


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False}, {"qk_norm": False, "qkv_bias": True}])
def test_transformers_own_model_of_our_weights_agrees(changes: dict[str, Any]) -> None:
    model = make_model(**changes)
    check_agreement([ModelContender(BASELINE, twin(model)), ModelContender("dense", model)])
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="dense is not timed: its logits are off transformers' by"):
        check_agreement([ModelContender(BASELINE, twin(make_model(**changes))), ModelContender("dense", model)])


def test_bytes_are_those_of_the_tensors_that_a_token_reads() -> None:
    dense, local = make_model(), make_model(mechanism="local", mechanism_options={"window": 8, "global_tokens": 2})
    a_key = 2 * 2 * 2 * 16 * 4  # keys and values, layers, key heads, width, bytes
    for texts in (1, 3):
        assert cache_bytes(dense, random_cache(dense, texts=texts, context=40)) == texts * 40 * a_key
        # Two first tokens and seven before the next one, whose own key is not in the cache.
        assert cache_bytes(local, random_cache(local, texts=texts, context=40)) == texts * 9 * a_key
    assert cache_bytes(twin(dense), random_cache(twin(dense), texts=1, context=40)) == 40 * a_key
    table = dense.model.embed_tokens.weight.numel() * 4
    assert weights_read(dense) == weight_bytes(dense) - table
    tied = make_model(tie_word_embeddings=True)
    assert weights_read(tied) == weight_bytes(tied) == weight_bytes(dense) - table


def test_a_mistake_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown contender 'dence'; known are transformers"):
        Plan(source="x", names=("dence",))
    with pytest.raises(ValueError, match="contexts must be whole numbers of at least 1"):
        Plan(source="x", contexts=(0,))
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"llama\.cpp Q8_0 (needs llama-cpp-python|reads GGUF)"):
        bench_decode(Plan(source=str(tmp_path), names=("llama.cpp Q8_0",)))


def test_loss_of_narrow_weights_and_speculation_are_measured_on_a_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{number}" for number in range(96)]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate([*words, "[UNK]"])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    make_model(initializer_range=0.05).save_pretrained(tmp_path / "model")
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    drawn = torch.randint(0, 96, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(words[place] for place in drawn), encoding="utf-8")
    plan = Plan(
        source=str(tmp_path / "model"), contexts=(8, 72), names=("dense", "dense int8"), rounds=1, tokens=1,
        text=tmp_path / "text.txt", documents=5, length=80, buffer=1 << 20,
    )  # fmt: skip
    bench = bench_decode(plan)
    (loss,) = bench.losses
    assert (loss.loss.count, loss.tokens, loss.text) == (5, 5 * 79, "text.txt")
    assert 0 < abs(loss.difference.mean) < 0.01
    assert "over 5 documents (395 tokens of text.txt)" in loss_sentence(loss)
    assert [(row.kind, row.prompt, row.context, row.same_text, row.tokens) for row in bench.speculation] == [
        (kind, prompt, 72, True, 48)
        for prompt in ("running", "repeating")
        for kind in ("prompt lookup", "int8 assistant")
    ]
    # A narrow model says nearly always what the wide one says.
    assert all(row.calls < 30 for row in bench.speculation if row.kind == "int8 assistant")
    assert "after a running text of 72 tokens: 48 tokens in" in speculation_sentence(bench.speculation[0])
    with pytest.raises(ValueError, match="--text compares a mechanism with its int8 weights; name both"):
        Plan(source="x", names=("dense",), text=tmp_path / "text.txt")
