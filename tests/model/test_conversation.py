"""A conversation reads each message once, and says what the model says to the whole of it."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.model.models import small_model
from varifocal.model.conversation import Conversation

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def word_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = ["user", "assistant", "end", *(f"w{number}" for number in range(30))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="end"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


@pytest.mark.parametrize("variant", ["dense", "focused"])
def test_turns_are_those_of_the_whole_text_and_are_read_once(variant: str) -> None:
    model, tokenizer = small_model(variant), word_tokenizer()
    # Only words that the tokenizer has, so that an answer is the same tokens again.
    allowed = list(range(3, 33))
    forbidden = [[token] for token in range(model.config.vocab_size) if token not in allowed]
    talk = Conversation(model, tokenizer)
    options = {"do_sample": False, "bad_words_ids": forbidden}
    first = talk.say("w1 w2 w3 w4 w5 w6 w7 w8", tokens=5, prints=False, **options)
    second = talk.say("w9 w1", tokens=5, prints=False, **options)
    assert (first.tokens, second.tokens) == (5, 5)
    # The last token of the answer, its end, the message and the word that opens the answer.
    assert second.read == 1 + 1 + 4 + 1
    said = [{"role": "user", "content": "w1 w2 w3 w4 w5 w6 w7 w8"}, {"role": "assistant", "content": first.text}]
    whole = tokenizer.apply_chat_template(
        [*said, {"role": "user", "content": "w9 w1"}], add_generation_prompt=True, return_dict=False
    )
    given = torch.tensor([whole])
    answer = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=5, pad_token_id=0, eos_token_id=None, **options
    )
    assert second.text == tokenizer.decode(answer[0, len(whole) :])


def test_tokenizer_without_a_chat_template_is_refused() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        Conversation(small_model("dense"), word_tokenizer(None))
