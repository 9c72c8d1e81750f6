"""What the models return, as clients of transformers read it: with labels, logits cost nothing until they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import EvalPrediction, Trainer, TrainingArguments

from tests.model.models import random_tokens, small_model
from varifocal.model import VarifocalForCausalLM
from varifocal.model.late_logits import LateLogits

LENGTH, ROWS, VOCABULARY = 64, 8, 997


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that any operator makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(one.numel() for one in tree_leaves(made) if isinstance(one, Tensor))])
        return made


def trainer(folder: Path, metrics: Callable[[EvalPrediction], dict[str, float]] | None, **options: Any) -> Trainer:
    model = small_model("head_gated", vocab_size=VOCABULARY)
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(2 * ROWS, LENGTH)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        max_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=metrics)


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_trains_without_the_logits_and_measures_with_them(tmp_path: Path, bf16: bool) -> None:
    seen: list[Any] = []

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {"accuracy": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}

    run = trainer(tmp_path, metrics, bf16=bf16)
    all_logits = ROWS * LENGTH * VOCABULARY
    with Largest() as training:
        run.train()
    # A loss takes the logits of 256 tokens at a time.
    assert 0 < training.numbers < all_logits
    found = run.evaluate()
    assert set(found) >= {"eval_loss", "eval_accuracy"}
    with torch.no_grad():
        wanted = run.model(torch.stack([row["input_ids"] for row in run.eval_dataset])).logits
    assert seen[0].dtype == np.float32
    np.testing.assert_allclose(seen[0], wanted, rtol=0, atol=0.1 if bf16 else 1e-4)


@pytest.mark.parametrize("bf16", [False, True])
def test_evaluation_of_the_loss_alone_computes_no_logits(tmp_path: Path, bf16: bool) -> None:
    run = trainer(tmp_path, None, bf16=bf16)
    with Largest() as evaluation:
        assert "eval_loss" in run.evaluate()
    assert evaluation.numbers < ROWS * LENGTH * VOCABULARY


def outputs_with_labels(model: VarifocalForCausalLM) -> tuple[Any, Tensor]:
    tokens = random_tokens(2, 12)
    return model(tokens, labels=tokens), model(tokens, use_cache=False).logits


READERS: dict[str, Callable[[Any], Tensor]] = {
    "attribute": lambda output: output.logits,
    "name": lambda output: output["logits"],
    "number": lambda output: output[1],
    "slice": lambda output: output[:2][1],
    "tuple": lambda output: output.to_tuple()[1],
    "get": lambda output: dict(output)["logits"],
    "fields": lambda output: getattr(output, list(output.keys())[1]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("training", [False, True])
def test_every_reader_gets_the_logits(reader: str, training: bool) -> None:
    found, wanted = outputs_with_labels(small_model().train(training))
    torch.testing.assert_close(READERS[reader](found), wanted)


def test_tuples_begin_with_loss_and_logits() -> None:
    model, tokens = small_model(), random_tokens(2, 12)
    loss, logits, *_ = model(tokens, labels=tokens, return_dict=False)
    assert loss.shape == ()
    assert logits.shape == (2, 12, 61)


def test_all_values_of_an_evaluation_hold_the_logits() -> None:
    found, wanted = outputs_with_labels(small_model())
    torch.testing.assert_close(dict(found.items())["logits"], wanted)
    found, _ = outputs_with_labels(small_model())
    assert any(isinstance(one, Tensor) and one.shape == wanted.shape for one in found.values())


USES: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda logits: logits.detach(),
    "cpu": lambda logits: logits.cpu(),
    "numpy": lambda logits: torch.from_numpy(logits.numpy()),
    "function": lambda logits: torch.cat((logits, logits))[:2],
    "index": lambda logits: torch.stack((logits[0], logits[1])),
    "arithmetic": lambda logits: 1 * logits,
    "list": lambda logits: torch.tensor(logits.tolist()),
}


@pytest.mark.parametrize("use", USES)
def test_logits_met_by_a_walk_are_computed_by_their_first_use(use: str) -> None:
    with torch.no_grad():
        found, wanted = outputs_with_labels(small_model())
        with Largest() as walk:
            (logits,) = (value for name, value in found.items() if name == "logits")
            assert isinstance(logits, Tensor)
            assert (logits.shape, logits.dtype, logits.ndim) == (wanted.shape, wanted.dtype, 3)
        assert walk.numbers == 0
        torch.testing.assert_close(USES[use](logits), wanted)
        assert type(found.logits) is type(found["logits"]) is Tensor


def test_walks_over_all_values_compute_nothing_while_training() -> None:
    found, wanted = outputs_with_labels(small_model().train())
    leaves = [*found.values(), *tree_leaves(found), *(value for _, value in found.items())]
    assert sum(isinstance(one, LateLogits) for one in leaves) == 3
    rebuilt = type(found)(dict(found.items()))
    torch.testing.assert_close(rebuilt.logits, wanted)


def test_nothing_but_the_logits_is_computed_by_reading_something_else() -> None:
    found, _ = outputs_with_labels(small_model())
    with Largest() as reading:
        assert found["loss"] is found.loss is found[0]
        assert "logits" in found
        assert found.cross_entropy is not None
    assert reading.numbers == 0


def test_logits_that_are_read_carry_gradients() -> None:
    model, tokens = small_model().train(), random_tokens(2, 12)
    model(tokens, labels=tokens).logits.square().sum().backward()
    found = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    model(tokens, use_cache=False).logits.square().sum().backward()
    for name, one in model.named_parameters():
        torch.testing.assert_close(found[name], one.grad, msg=name)


def test_logits_read_without_gradients_do_not_stand_in_the_way_of_those_with() -> None:
    found, _ = outputs_with_labels(small_model().train())
    with torch.no_grad():
        assert not found.logits.requires_grad
    assert found.logits.requires_grad
    assert found.logits is found.logits


def test_logits_that_come_too_late_are_explained() -> None:
    model, tokens = small_model().train(), random_tokens(2, 12)
    found = model(tokens, labels=tokens)
    found.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match=r"^these logits were not read before the head's weights changed; read them"):
        _ = found.logits


def test_logits_under_autocast_are_those_of_the_forward_pass() -> None:
    model, tokens = small_model().train(), random_tokens(2, 12)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens, labels=tokens)
        wanted = model(tokens, use_cache=False).logits
    assert found.logits.dtype == torch.float32
    torch.testing.assert_close(found.logits, wanted.float())


def test_logits_that_are_asked_for_with_labels_are_computed_at_once() -> None:
    model, tokens = small_model(), random_tokens(2, 12)
    with torch.no_grad():
        for keep, count in ((3, 3), (0, 12)):
            assert vars(model(tokens, labels=tokens, logits_to_keep=keep))["logits"].shape == (2, count, 61)


def test_shifted_labels_are_taken_as_they_are() -> None:
    model, tokens = small_model(), random_tokens(2, 12)
    shifted = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
    with torch.no_grad():
        wanted = model(tokens, labels=tokens).loss
        assert model(tokens, shift_labels=shifted).loss == wanted
        assert model(tokens, labels=torch.zeros_like(tokens), shift_labels=shifted.int()).loss == wanted
    with pytest.raises(ValueError, match=r"^shift_labels must be \[B, T\] = \(2, 12\), got shape \(2, 11\)$"):
        model(tokens, shift_labels=shifted[:, 1:])


def test_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'label'"):
        small_model()(random_tokens(1, 4), label=random_tokens(1, 4))


def test_config_asks_for_hidden_states_and_weights() -> None:
    model, tokens = small_model(), random_tokens(2, 12)
    model.config.output_hidden_states = True
    with torch.no_grad():
        found = model(tokens, labels=tokens)
        assert len(found.hidden_states) == 3
        assert model(tokens, output_hidden_states=False).hidden_states is None
        chosen = model(tokens, output_hidden_states=[1]).hidden_states
    assert chosen[0] is None
    torch.testing.assert_close(chosen[1], found.hidden_states[2])
