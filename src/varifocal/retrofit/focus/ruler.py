"""RULER's tasks that need no data (arXiv:2404.06654), made and scored by lm-eval: what focused models still answer."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

import numpy as np
import torch

LEAST = 1024
"""Tokens of a row: lm-eval looks for ever for rows that its examples do not fit into."""
Samples = list[dict[str, Any]]


class RulerRow(NamedTuple):
    """A prompt, and what its answer should hold."""

    prompt: str
    wanted: tuple[str, ...]
    room: int
    """Tokens that the answer may take."""


class RulerTask(NamedTuple):
    """How lm-eval makes samples of a task."""

    room: int
    make: Callable[[Any, int, int], Samples]
    """From a tokenizer, the tokens of a row and how many rows."""


def needles(haystack: str, keys: str, values: str) -> Callable[[Any, int, int], Samples]:
    """Sentences to be looked up, in a haystack of others or of the same one over and over."""

    def make(tokenizer: Any, length: int, count: int) -> Samples:
        from lm_eval.tasks.ruler.niah_utils import TEMPLATE
        from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack

        samples: Samples = generate_samples(
            get_haystack(type_haystack=haystack), TOKENIZER=tokenizer, max_seq_length=length, template=TEMPLATE,
            type_haystack=haystack, type_needle_k=keys, type_needle_v=values, num_samples=count,
        )  # fmt: skip
        return samples

    return make


def variables(tokenizer: Any, length: int, count: int) -> Samples:
    """Chains of assignments; one worked example stands before the question."""
    from lm_eval.tasks.ruler.vt_utils import sys_vartrack_w_noise_random

    (example,) = sys_vartrack_w_noise_random(tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5)
    samples: Samples = sys_vartrack_w_noise_random(
        tokenizer=tokenizer, num_samples=count, max_seq_length=length, icl_example=example
    )
    return samples


def common_words(tokenizer: Any, length: int, count: int) -> Samples:
    """The words of a list that come most often."""
    from lm_eval.tasks.ruler.cwe_utils import RNG, sys_word_pair_random

    # A source of chance of its own, which goes on from call to call.
    RNG.seed(random.getrandbits(32))
    samples: Samples = sys_word_pair_random(num_samples=count, max_seq_length=length, tokenizer=tokenizer)
    return samples


def frequent_words(tokenizer: Any, length: int, count: int) -> Samples:
    """The words of a made-up text that come most often."""
    from lm_eval.tasks.ruler.fwe_utils import sys_kwext

    samples: Samples = sys_kwext(tokenizer=tokenizer, max_seq_length=length, num_samples=count)
    return samples


TASKS = {
    "niah_single_1": RulerTask(128, needles("repeat", "words", "numbers")),
    "niah_multikey_2": RulerTask(128, needles("needle", "words", "numbers")),
    "niah_multikey_3": RulerTask(128, needles("needle", "uuids", "uuids")),
    "vt": RulerTask(30, variables),
    "cwe": RulerTask(120, common_words),
    "fwe": RulerTask(50, frequent_words),
}


def ruler_rows(task: str, tokenizer: Any, *, length: int, count: int, seed: int) -> list[RulerRow]:
    """`count` rows of a task that have, with their answers, `length` tokens or a few less."""
    if length < LEAST:
        raise ValueError(f"RULER's tasks need rows of {LEAST} tokens or more, got {length}")
    made = TASKS[task]
    with own_chance(seed), without_downloads(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        samples = made.make(tokenizer, length, count)
    return [
        RulerRow(f"{one['input'].rstrip()} {one['gen_prefix']}", tuple(map(str, one["outputs"])), made.room)
        for one in samples
    ]


@torch.no_grad()
def ruler_answer(model: Any, tokenizer: Any, row: RulerRow) -> str:
    """What a model says: its likeliest tokens after the prompt."""
    prompt = torch.tensor([tokenizer(row.prompt, verbose=False)["input_ids"]])
    given = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=row.room, do_sample=False,
        pad_token_id=tokenizer.eos_token_id or 0,
    )  # fmt: skip
    return str(tokenizer.decode(given[0, prompt.shape[1] :], skip_special_tokens=True))


def ruler_score(answer: str, wanted: Sequence[str]) -> float:
    """The share of the wanted words that an answer holds."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return float(string_match_all(postprocess_pred([answer]), [list(wanted)]))


def require_lm_eval() -> None:
    """ValueError unless lm-eval is there with what RULER needs."""
    try:
        with without_downloads(), redirect_stdout(io.StringIO()):
            import lm_eval.tasks.ruler.fwe_utils
            import lm_eval.tasks.ruler.prepare_niah  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f'RULER needs lm-eval; install it with: pip install "lm-eval[ruler]" scipy ({error})'
        ) from error


@contextmanager
def own_chance(seed: int) -> Iterator[None]:
    """Inside the block the chance that the tasks draw from is of this seed; outside nothing has changed."""
    before, numbers = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numbers)


@contextmanager
def without_downloads() -> Iterator[None]:
    """Inside the block nltk fetches nothing: lm-eval asks it for what no task here uses."""
    import nltk

    download = nltk.download
    nltk.download = lambda *args, **named: False
    try:
        yield
    finally:
        nltk.download = download
