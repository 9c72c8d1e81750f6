"""RULER's questions, where lm-eval is installed: they fit, and hold their answers."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from varifocal.retrofit.focus.ruler import TASKS, require_lm_eval, ruler_rows, ruler_score

try:
    require_lm_eval()
except ValueError as error:
    pytest.skip(str(error), allow_module_level=True)

LENGTH = 1024


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Whatever stands between spaces is a token; which one does not matter here."""
    tokenizer = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("task", TASKS)
def test_rows_fit_and_hold_their_answers(task: str) -> None:
    tokenizer = word_tokenizer()
    before = random.getstate()
    rows = ruler_rows(task, tokenizer, length=LENGTH, count=2, seed=3)
    assert random.getstate() == before
    assert len(rows) == 2
    for row in rows:
        assert 400 < len(tokenizer(row.prompt)["input_ids"]) <= LENGTH
        assert row.wanted
        assert all(word in row.prompt for word in row.wanted)
        assert ruler_score(" and ".join(row.wanted), row.wanted) == 1
        assert ruler_score("nothing", row.wanted) == 0
    assert ruler_rows(task, tokenizer, length=LENGTH, count=2, seed=3)[1] == rows[1]


def test_rows_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match="1024 tokens or more, got 512"):
        ruler_rows("vt", word_tokenizer(), length=512, count=1, seed=0)
