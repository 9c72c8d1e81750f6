"""What vLLM serves is the model that we saved: tokens and log-probabilities, however requests come and go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.models import MODELS, WINDOW, prompts, save

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make serving")

from tests.serving.engines import BLOCK, answers, assert_ours, counter, engine, scheduler

LENGTHS = [1 + 23 * number % 300 for number in range(44)] + [WINDOW, WINDOW + 4, 500, 1024, 2000, 4096]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("focused"), *MODELS["focused"])


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with engine(folder) as made:
        yield made


def test_fifty_prompts_in_one_batch(llm: Any, folder: Path) -> None:
    found = answers(llm, prompts(LENGTHS))
    assert len(found) == 50
    assert_ours(folder, found)


def test_prompts_one_by_one(llm: Any, folder: Path) -> None:
    for prompt in prompts([3, WINDOW + 1, 700], seed=1):
        assert_ours(folder, answers(llm, [prompt]))


def test_kept_prefixes_are_found_with_their_first_tokens(llm: Any, folder: Path) -> None:
    text, more = prompts([1000, 80], seed=2)
    answers(llm, [text])
    again = answers(llm, [text + more, text[:600] + more, [*text, 1]])
    # The window of a text that ends earlier was freed, and may have been overwritten; its first tokens were not.
    cached = [answer.num_cached_tokens // BLOCK for answer in again]
    assert cached[0] == cached[2] == 1000 // BLOCK
    assert 1 <= cached[1] <= 600 // BLOCK
    assert_ours(folder, again)


def test_blocks_between_first_tokens_and_window_are_freed(llm: Any) -> None:
    from vllm import SamplingParams

    core = llm.llm_engine
    asked = SamplingParams(temperature=0, max_tokens=20, detokenize=False)
    core.add_request("long", {"prompt_token_ids": prompts([2000], seed=3)[0]}, asked)
    held: dict[int, int] = {}
    while core.has_unfinished_requests():
        core.step()
        for manager in scheduler(llm).kv_cache_manager.coordinator.single_type_managers:
            window = getattr(manager, "sliding_window", 0)
            for blocks in manager.req_to_blocks.values():
                held[window] = sum(not block.is_null for block in blocks)
    assert held[0] == -(-2019 // BLOCK)
    assert held[WINDOW] <= 1 + WINDOW // BLOCK + 1


def test_cancelled_request_leaves_the_others_as_they_are(llm: Any, folder: Path) -> None:
    from vllm import SamplingParams

    core = llm.llm_engine
    asked = SamplingParams(temperature=0, max_tokens=12, logprobs=0, detokenize=False)
    for number, prompt in enumerate(prompts([400, 500, 300], seed=4)):
        core.add_request(f"cancel-{number}", {"prompt_token_ids": prompt}, asked)
    finished = []
    for step in range(1000):
        if not core.has_unfinished_requests():
            break
        if step == 4:
            core.abort_request(["cancel-1"])
        finished += [output for output in core.step() if output.finished]
    kept = [output for output in finished if output.outputs[0].finish_reason != "abort"]
    assert len(kept) == 2
    assert_ours(folder, kept)
    assert scheduler(llm).kv_cache_manager.usage == 0


def test_sampling_and_stop_tokens_are_vllms(llm: Any) -> None:
    [prompt] = prompts([50], seed=6)
    one, two = (answers(llm, [prompt], temperature=1.0, seed=7)[0].outputs[0] for _ in range(2))
    assert list(one.token_ids) == list(two.token_ids)
    plain = list(answers(llm, [prompt])[0].outputs[0].token_ids)
    stopped = answers(llm, [prompt], stop_token_ids=[plain[4]])[0].outputs[0]
    assert list(stopped.token_ids) == plain[: plain.index(plain[4]) + 1]
    assert stopped.finish_reason == "stop"


# From here on other engines are made: closing one takes the process groups of all away.
def test_requests_are_preempted_where_the_cache_is_too_small(folder: Path) -> None:
    with engine(folder, num_gpu_blocks_override=60, max_model_len=384, max_num_seqs=8) as small:
        found = answers(small, prompts([90, 120, 150, 100, 130, 80], seed=5), tokens=100)
        assert counter(small, "vllm:num_preemptions") > 0
        assert_ours(folder, found)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "focused"])
def test_mechanism(name: str, tmp_path: Path) -> None:
    given = {"qk_norm": False, "qkv_bias": True} if name == "dense" else {"tie_word_embeddings": False}
    folder = save(tmp_path, *MODELS[name], **given)
    with engine(folder) as made:
        assert_ours(folder, answers(made, prompts([2, WINDOW - 1, WINDOW + 3, 200, 600, 1100])))


def test_other_mechanisms_are_refused_in_one_sentence(tmp_path: Path) -> None:
    save(tmp_path, "context_adaptive", {})
    with pytest.raises(ValueError, match="layer 0 attends by context_adaptive; generate with"), engine(tmp_path):
        pass
