"""The real server, spoken to by its usual client: `vllm serve` of a focused model, and the openai package."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.models import MODELS, VOCABULARY, log_probabilities, prompts, save
from tests.serving.server import Server, serving
from tests.serving.words import save_words
from varifocal.model import VarifocalForCausalLM, load_model

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make serving")
openai = pytest.importorskip("openai", reason="the client comes with vLLM: make serving")

CONTEXT = 4224
TOKENS = 12
PATIENCE = 300
"""Seconds for an answer; a slow machine is no failure."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save(tmp_path_factory.mktemp("served"), *MODELS["focused"])
    save_words(made, VOCABULARY)
    return made


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    options = (
        "--served-model-name", "focused", "--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager",
        "--block-size", "32", "--max-num-batched-tokens", "256", "--max-num-seqs", "64",
        "--kv-cache-memory-bytes", str(1 << 27), "--generation-config", "vllm",
    )  # fmt: skip
    with serving(folder, log, *options) as made:
        yield made


@pytest.fixture
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client; the server must live on whatever a test did, and its log is shown where it failed."""
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as made:
        yield made
    assert server.process.poll() is None, server.last_words()
    assert server.is_healthy(), server.last_words()


@pytest.fixture(scope="module")
def model(folder: Path) -> VarifocalForCausalLM:
    return load_model(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def text_of(tokenizer: Any, length: int, *, seed: int) -> str:
    """Random words."""
    text: str = tokenizer.decode(prompts([length], seed=seed)[0])
    return text


def words(tokenizer: Any, ids: list[int]) -> list[str]:
    """The words of an answer; special tokens are not shown."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text.split()


@torch.no_grad()
def said_by_us(model: VarifocalForCausalLM, ids: list[int], tokens: int = TOKENS) -> list[int]:
    """The greedy tokens of our own model."""
    made = model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
    found: list[int] = made[0, len(ids) :].tolist()
    return found


def completed(client: Any, prompt: str, **options: Any) -> Any:
    """A greedy completion."""
    return client.completions.create(
        model="focused", prompt=prompt, **{"temperature": 0, "max_tokens": TOKENS, **options}
    )


def test_completion_is_our_models(client: Any, model: VarifocalForCausalLM, tokenizer: Any) -> None:
    assert [one.id for one in client.models.list()] == ["focused"]
    prompt = text_of(tokenizer, 700, seed=1)
    answer = completed(client, prompt, logprobs=1)
    ids = tokenizer(prompt)["input_ids"]
    ours = said_by_us(model, ids)
    assert answer.choices[0].text.split() == words(tokenizer, ours)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (700, TOKENS)
    wanted = log_probabilities(model, ids, ours)[range(TOKENS), ours]
    assert torch.allclose(torch.tensor(answer.choices[0].logprobs.token_logprobs), wanted, atol=1e-3, rtol=0)


def test_chat_uses_the_models_template(client: Any, model: VarifocalForCausalLM, tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": text_of(tokenizer, 30, seed=2)},
        {"role": "user", "content": text_of(tokenizer, 200, seed=3)},
    ]
    answer = client.chat.completions.create(model="focused", messages=messages, temperature=0, max_tokens=TOKENS)
    written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(written)["input_ids"]
    assert answer.usage.prompt_tokens == len(ids) == 30 + 200 + 3
    assert answer.choices[0].message.content.split() == words(tokenizer, said_by_us(model, ids))
    assert answer.choices[0].finish_reason == "length"


def test_stream_says_the_same_piece_by_piece(client: Any, tokenizer: Any) -> None:
    prompt = text_of(tokenizer, 100, seed=4)
    whole = completed(client, prompt).choices[0].text
    pieces = [chunk.choices[0] for chunk in completed(client, prompt, stream=True)]
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == whole
    assert pieces[-1].finish_reason == "length"
    messages = [{"role": "user", "content": prompt}]
    asked = {"model": "focused", "messages": messages, "temperature": 0, "max_tokens": TOKENS}
    spoken = client.chat.completions.create(**asked).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert len(parts) > 3
    assert "".join(parts) == spoken


def test_sixty_four_requests_at_once(client: Any, model: VarifocalForCausalLM, tokenizer: Any) -> None:
    texts = [text_of(tokenizer, 5 + 37 * number % 120, seed=100 + number) for number in range(64)]
    with ThreadPoolExecutor(64) as clients:
        answers = list(clients.map(lambda text: completed(client, text, max_tokens=6), texts))
    for text, answer in zip(texts, answers, strict=True):
        ours = said_by_us(model, tokenizer(text)["input_ids"], 6)
        assert answer.choices[0].text.split() == words(tokenizer, ours)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "another"}, "NotFoundError", "another"),
        ({"max_tokens": CONTEXT + 1}, "BadRequestError", str(CONTEXT)),
        ({"temperature": -1}, "BadRequestError", "temperature"),
        ({"prompt": "w1 " * (CONTEXT + 1)}, "BadRequestError", str(CONTEXT)),
    ],
)
def test_bad_request_is_answered_with_what_is_wrong(
    client: Any, tokenizer: Any, changes: dict[str, Any], error: str, words: str
) -> None:
    given = {"model": "focused", "prompt": "w1 w2", "max_tokens": 4, "temperature": 0, **changes}
    with pytest.raises(getattr(openai, error), match=words):
        client.completions.create(**given)
    assert completed(client, "w1 w2").usage.completion_tokens == TOKENS


def test_client_that_goes_away_frees_its_place(
    client: Any, server: Server, model: VarifocalForCausalLM, tokenizer: Any
) -> None:
    length, before = 4000, server.counter("vllm:generation_tokens_total")
    stream = completed(client, text_of(tokenizer, 100, seed=5), max_tokens=length, stream=True)
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    stream.close()
    until = time.monotonic() + PATIENCE
    while server.counter("vllm:num_requests_running") > 0:
        assert time.monotonic() < until, server.last_words()
        time.sleep(0.2)
    # It stopped because nobody listened any more, not because it was done.
    assert server.counter("vllm:generation_tokens_total") - before < length
    assert server.counter("vllm:kv_cache_usage_perc") == 0
    prompt = text_of(tokenizer, 300, seed=6)
    ours = said_by_us(model, tokenizer(prompt)["input_ids"])
    assert completed(client, prompt).choices[0].text.split() == words(tokenizer, ours)
