"""The model serves lm-eval's HFLM, offline, on a task of local files. Runs where lm-eval is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.model.models import small_model
from varifocal.data.tokenizers import find_tokenizer
from varifocal.model.text import load_text_tokenizer

TASK = """
task: which_word
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
target_delimiter: ""
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


@pytest.mark.filterwarnings("ignore")
def test_choices_are_rated_by_the_models_own_likelihood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install lm-eval to run this")
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    choices = [" many", " few", " blue"]
    questions = [{"question": f"{n} bees are", "choices": choices, "answer": n % 3} for n in range(6)]
    (tmp_path / "questions.json").write_text("".join(json.dumps(one) + "\n" for one in questions))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "which_word.yaml").write_text(TASK.format(file=tmp_path / "questions.json"))
    (tmp_path / "tokenizer.json").write_text(find_tokenizer("bytes").raw.to_str())
    tokenizer = load_text_tokenizer(tmp_path)
    model = small_model("context_adaptive", vocab_size=300, max_position_embeddings=64)
    served = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", max_length=64, batch_size=2)
    answer = lm_eval.simple_evaluate(
        model=served, tasks=["which_word"], task_manager=TaskManager(include_path=str(tmp_path / "tasks")),
        log_samples=True, bootstrap_iters=0,
    )  # fmt: skip
    sample = answer["samples"]["which_word"][0]
    rated = [float(one[0][0] if isinstance(one[0], (list, tuple)) else one[0]) for one in sample["resps"]]
    question = tokenizer.encode("0 bees are")
    for choice, found in zip(choices, rated, strict=True):
        ids = torch.tensor([question + tokenizer.encode(choice)])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits.log_softmax(dim=-1)
        following = logits[0, len(question) - 1 : -1].gather(1, ids[0, len(question) :, None])
        assert found == pytest.approx(float(following.sum()), rel=1e-4)
