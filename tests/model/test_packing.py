"""Documents that share a row, however a client of transformers says where each begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache

from tests.model.models import VARIANTS, random_tokens, small_model

every_variant = pytest.mark.parametrize("variant", VARIANTS)
LENGTHS = (9, 1, 6)


def packed_row() -> tuple[list[Tensor], Tensor]:
    texts = [random_tokens(1, length, seed=length) for length in LENGTHS]
    return texts, torch.cat(texts, dim=1)


def block_mask(dtype: torch.dtype) -> Tensor:
    """[1, 1, T, T]: each document causal for itself."""
    documents = torch.repeat_interleave(torch.tensor(LENGTHS))
    blocks = (documents[:, None] == documents).tril()[None, None]
    return blocks if dtype == torch.bool else torch.zeros(blocks.shape).masked_fill(~blocks, torch.finfo(dtype).min)


ENDS = torch.tensor([0, 9, 10, 16], dtype=torch.int32)
WAYS: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": torch.cat([torch.arange(one) for one in LENGTHS])[None]},
    "lengths": {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 9, "max_length_k": 9},
    "mask of pairs": {"attention_mask": block_mask(torch.bool)},
    "additive mask": {"attention_mask": block_mask(torch.float32)},
}


@every_variant
@pytest.mark.parametrize("way", WAYS)
def test_packed_documents_are_read_and_learned_as_if_alone(variant: str, way: str) -> None:
    model = small_model(variant)
    texts, row = packed_row()
    with torch.no_grad():
        found = model(row, labels=row, **WAYS[way])
        without_labels = model(row, **WAYS[way])
        alone = [model(text, labels=text) for text in texts]
    wanted = torch.cat([one.logits for one in alone], dim=1)
    torch.testing.assert_close(found.logits, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(without_labels.logits, wanted, rtol=1e-4, atol=1e-4)
    total = sum(one.loss * (length - 1) for one, length in zip(alone, LENGTHS, strict=True))
    torch.testing.assert_close(found.loss, total / sum(length - 1 for length in LENGTHS))


def test_flattening_collator_of_transformers_gives_the_loss_of_its_texts() -> None:
    model, (texts, _) = small_model("head_gated"), packed_row()
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": text[0].tolist()} for text in texts])
    with torch.no_grad():
        found = model(**batch).loss
        alone = [model(text, labels=text).loss * (length - 1) for text, length in zip(texts, LENGTHS, strict=True)]
    torch.testing.assert_close(found, sum(alone) / sum(length - 1 for length in LENGTHS))


@every_variant
def test_mask_of_pairs_tells_padding_and_goes_on_from_a_cache(variant: str) -> None:
    model, tokens = small_model(variant), random_tokens(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    pairs = (torch.ones(12, 12).tril().bool() & mask.bool()[:, None, :] & mask.bool()[:, :, None])[:, None]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        wanted = model(tokens, attention_mask=mask, use_cache=False).logits
        found = [
            model(tokens[:, begin:end], attention_mask=pairs[:, :, begin:end, :end], past_key_values=cache).logits
            for begin, end in ((0, 8), (8, 9), (9, 12))
        ]
    text = mask.bool()
    torch.testing.assert_close(torch.cat(found, dim=1)[text], wanted[text], rtol=1e-4, atol=1e-4)


def without_one_pair() -> Tensor:
    mask = block_mask(torch.bool)
    mask[0, 0, 5, 2] = False
    return mask


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"attention_mask": without_one_pair()},
            r"^attention_mask \[B, 1, T, S\] lets query 5 of row 0 read other",
        ),
        ({"attention_mask": torch.ones(1, 4, 16, 16)}, r"^attention_mask of pairs must be \[B, 1, T, S\] = \(1, 1, 16"),
        ({"cu_seq_lens_q": ENDS[:-1]}, r"^cu_seq_lens_q must rise from 0 to T = 16, got \[0, 9, 10\]"),
        ({"cu_seq_lens_q": ENDS.float()}, "^cu_seq_lens_q must be integers"),
        ({"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS + 1}, "^cu_seq_lens_q and cu_seq_lens_k must be equal"),
        ({"cu_seq_lens_q": ENDS, "attention_mask": torch.ones(1, 16)}, "^cu_seq_lens_q separates the packed documents"),
        ({"cu_seq_lens_q": ENDS, "use_cache": True}, "use_cache=False, or documents"),
    ],
)
def test_bad_packing_is_explained(given: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_model()(packed_row()[1], **given)
