"""The model serves lm-eval's HFLM, offline, on a task of local files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.clients.texts import saved
from varifocal.model import load_model
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


@pytest.mark.client("lm_eval")
def test_choices_are_rated_by_the_models_own_likelihood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`HFLM` of a saved folder, offline, on choices from a local file: the likelihoods are the model's own"""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    choices = [" many", " few", " blue"]
    questions = [{"question": f"{n} bees are", "choices": choices, "answer": n % 3} for n in range(6)]
    (tmp_path / "questions.json").write_text("".join(json.dumps(one) + "\n" for one in questions))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "which_word.yaml").write_text(TASK.format(file=tmp_path / "questions.json"))
    folder = saved(tmp_path / "model", "context_adaptive")
    served = HFLM(pretrained=str(folder), trust_remote_code=True, device="cpu", max_length=64, batch_size=2)
    model, tokenizer = load_model(folder), load_text_tokenizer(folder)
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
