"""Attentions with the mistakes that public code makes, for the conformance kit to catch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from varifocal import Causal, TopK, Window, attend


def window_off_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Meant to read 5 keys, reads the 5 before the query and its own."""
    return attend(q, k, v, branches=Window(6)).output


def k_from_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Takes the number of keys from the length of the batch, not from the query's position."""
    return attend(q, k, v, branches=TopK(scale=0, minimum=max(1, math.isqrt(k.shape[2])))).output


def mask_sliced_from_a_global_triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Takes the first T rows of the causal mask, so that cached queries see as if they stood at the start."""
    mask = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[: q.shape[2]]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def members_of_the_whole_text(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Routing as public code has it: each centroid takes its 4 nearest tokens of the whole text."""
    length = k.shape[2]
    centroids = torch.eye(k.shape[3], dtype=k.dtype)[:3]
    nearest = (centroids @ k.mT).topk(min(4, length), dim=-1).indices  # [B, G, 3, 4]
    member = torch.zeros(*k.shape[:2], 3, length, dtype=torch.bool).scatter(-1, nearest, True)
    together = (member[..., None] & member[..., None, :]).any(dim=2) | torch.eye(length, dtype=torch.bool)
    mask = together.tril()[:, :, -q.shape[2] :].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def not_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Forgets the mask."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def finite_mask_sentinel(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    """Masks with a large negative number: a query that sees nothing reads everything."""
    length = k.shape[2]
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    future = torch.arange(length) > torch.arange(length - q.shape[2], length)[:, None]
    hidden = future[None].expand(q.shape[0], -1, -1)
    if documents is not None:
        hidden = hidden | (documents[:, None, :] != documents[:, -q.shape[2] :, None]) | (documents < 0)[:, None, :]
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden[:, None], -1e9)
    return scores.softmax(dim=-1) @ v


def ignores_documents(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    """Takes documents and lets them see each other."""
    return attend(q, k, v, branches=Causal()).output


def key_heads_in_the_wrong_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Serves query head h with key head h % G instead of h // (H / G)."""
    groups = q.shape[1] // k.shape[1]
    return attend(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), branches=Causal()).output


def first_row_for_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Decides for the whole batch by its first row."""
    gate = q[:1].mean(dim=(1, 3), keepdim=True).sigmoid()
    return attend(q, k, v, branches=Causal()).output * gate


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 1.01


def gradient_a_little_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A backward pass that is wrong by one percent."""
    result: Tensor = _WrongGradient.apply(attend(q, k, v, branches=Causal()).output)  # type: ignore[no-untyped-call]
    return result


class RotaryCache(NamedTuple):
    """Keys and values of the tokens so far."""

    keys: Tensor
    values: Tensor


class KeysRotatedTwice:
    """Attention with rotary positions that rotates its cached keys again at every step."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        offset = k.shape[2] - q.shape[2]
        return attend(rotate(q, offset), rotate(k, 0), v, branches=Causal()).output

    def step(self, q: Tensor, k: Tensor, v: Tensor, cache: RotaryCache | None) -> tuple[Tensor, RotaryCache]:
        keys = k if cache is None else torch.cat((cache.keys, k), dim=2)
        values = v if cache is None else torch.cat((cache.values, v), dim=2)
        keys = rotate(keys, 0)
        output = attend(rotate(q, keys.shape[2] - q.shape[2]), keys, values, branches=Causal()).output
        return output, RotaryCache(keys, values)


class KeysRotatedOnce(KeysRotatedTwice):
    """The same, done right: keys are rotated when they enter the cache."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, cache: RotaryCache | None) -> tuple[Tensor, RotaryCache]:
        offset = 0 if cache is None else cache.keys.shape[2]
        keys, values = rotate(k, offset), v
        if cache is not None:
            keys, values = torch.cat((cache.keys, keys), dim=2), torch.cat((cache.values, v), dim=2)
        return attend(rotate(q, offset), keys, values, branches=Causal()).output, RotaryCache(keys, values)


def rotate(heads: Tensor, offset: int) -> Tensor:
    """Rotary embedding of heads [B, H, T, D] that stand at offset, offset + 1, ..."""
    half = heads.shape[-1] // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=heads.dtype) / half)
    angle = (offset + torch.arange(heads.shape[2], dtype=heads.dtype))[:, None] * frequency
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1)
