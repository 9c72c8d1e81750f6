"""A conversation with a model: what was said, and the cache that remembers it."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedTokenizerFast

from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.model.text import printing_streamer

AT_ONCE = 2048
"""Tokens that are read together: a longer text takes no more memory than so many, besides its cache."""


class Reply(NamedTuple):
    """What the model said."""

    text: str
    tokens: int
    seconds: float
    read: int
    """Tokens that were read before it, those that the cache remembered left out."""


class Conversation:
    """Messages of a user and a model. Each turn reads only what the cache does not hold yet."""

    def __init__(self, model: VarifocalForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        if not tokenizer.chat_template:
            raise ValueError("this model's tokenizer has no chat template; give a prompt to continue instead of --chat")
        self.model, self.tokenizer = model, tokenizer
        self.messages: list[dict[str, str]] = []
        self.cache: Any = DynamicCache(config=model.config)
        self.remembered: list[int] = []
        """The tokens that the cache holds."""

    def say(self, message: str, *, tokens: int, prints: bool = True, **drawing: Any) -> Reply:
        """Answer a message with at most so many tokens, printed as they come.

        Args:
            message: what the user says.
            tokens: at most so many.
            prints: whether each word is printed as soon as it is there.
            drawing: options of transformers' generate.
        """
        asked = [*self.messages, {"role": "user", "content": message}]
        ids: list[int] = self.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        if ids[: len(self.remembered)] != self.remembered or len(ids) == len(self.remembered):
            # The template writes the last answer in other tokens than those that were generated.
            self.cache, self.remembered = DynamicCache(config=self.model.config), []
        given = torch.tensor([ids])
        read = len(ids) - len(self.remembered)
        began = time.perf_counter()
        answer = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            past_key_values=self.cache,
            max_new_tokens=tokens,
            prefill_chunk_size=AT_ONCE if read > AT_ONCE and not self.remembered else None,
            streamer=printing_streamer(self.tokenizer) if prints else None,
            eos_token_id=self.ends(),
            pad_token_id=self.model.config.pad_token_id or 0,
            **drawing,
        )[0].tolist()
        seconds = time.perf_counter() - began
        new = answer[len(ids) :]
        # Of the last token nothing was computed.
        self.remembered = answer[:-1]
        text = str(self.tokenizer.decode(new, skip_special_tokens=True))
        self.messages = [*asked, {"role": "assistant", "content": text}]
        return Reply(text, len(new), seconds, read)

    def ends(self) -> list[int] | None:
        """The tokens that end an answer: the tokenizer's and the config's."""
        named = self.model.generation_config.eos_token_id
        found = [*(named if isinstance(named, list) else [named]), self.tokenizer.eos_token_id]
        return sorted({token for token in found if token is not None}) or None
