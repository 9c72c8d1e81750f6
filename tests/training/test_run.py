"""A run directory holds what it promises, training does what the config says, and mistakes overwrite nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.training.runs import OPTIONS, losses, records, small_config, small_content
from varifocal.data import Batches, PreparedData
from varifocal.data.probe import Probe, make_probe
from varifocal.model import load_model
from varifocal.results.gate_traces import read_gate_traces
from varifocal.results.run import RunSummary
from varifocal.training.config import TrainingConfig, config_from
from varifocal.training.divergence import DivergedError
from varifocal.training.evaluation import evaluate
from varifocal.training.micro_batches import MicroBatches, model_inputs
from varifocal.training.parameter_groups import parameter_groups
from varifocal.training.run import train
from varifocal.training.start import starting_model


class Run:
    """A finished run."""

    def __init__(self, config: TrainingConfig, out: Path) -> None:
        self.config, self.out = config, out
        self.summary = train(config, out)


@pytest.fixture(scope="module")
def run(probe: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = small_config(probe, "context_adaptive", run={"tensorboard": True})
    return Run(config, tmp_path_factory.mktemp("run") / "a")


def test_run_directory_holds_what_it_promises(run: Run) -> None:
    found = {path.name for path in run.out.iterdir() if not path.name.startswith(".")}
    assert found == {
        "config.toml", "environment.json", "metrics.jsonl", "gates.npz", "checkpoints", "model", "summary.json",
        "tensorboard",
    }  # fmt: skip
    assert {path.name for path in (run.out / "model").iterdir()} >= {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
    }
    assert {path.name for path in (run.out / "checkpoints").iterdir()} == {"step-4", "step-6"}


def test_summary_is_what_train_returns(run: Run, probe: PreparedData) -> None:
    assert json.loads((run.out / "summary.json").read_text()) == run.summary.to_json()
    assert run.summary.steps == 8
    assert run.summary.tokens == 8 * 4 * 64
    assert run.summary.data_fingerprint == probe.fingerprint
    assert run.summary.peak_bytes > 0
    assert run.summary.seconds > 0


def test_every_step_is_recorded_once(run: Run) -> None:
    assert [one["step"] for one in records(run.out) if "loss" in one] == list(range(1, 9))
    assert [one["step"] for one in records(run.out) if "validation_loss" in one] == [4, 8]


def test_saved_model_has_the_validation_loss_of_the_summary(run: Run, probe: PreparedData) -> None:
    model = load_model(run.out / "model")
    found = evaluate(model, probe.split("validation"), length=64, most_tokens=320)
    assert found.loss == pytest.approx(run.summary.validation_loss, rel=1e-6)
    assert model.config.use_cache


def test_tensorboard_gets_its_files(run: Run) -> None:
    assert any(path.name.startswith("events") for path in (run.out / "tensorboard").iterdir())


def test_finished_run_is_not_trained_again(run: Run) -> None:
    before = (run.out / "metrics.jsonl").read_bytes()
    assert train(run.config, run.out, resume=True) == run.summary
    assert (run.out / "metrics.jsonl").read_bytes() == before


def test_gates_are_traced_at_each_validation(run: Run) -> None:
    traces = read_gate_traces(run.out / "gates.npz")
    assert traces["step"].tolist() == [4, 8]
    assert traces["gate_mean"].shape == traces["gate_gradient"].shape == traces["width_mean"].shape == (2, 2, 4)
    assert ((traces["gate_mean"] > 0) & (traces["gate_mean"] < 1)).all()
    assert (traces["gate_gradient"] > 0).all()
    assert ((traces["width_least"] >= 8) & (traces["width_most"] <= 16)).all()
    assert numpy.allclose(traces["distance_share"].sum(axis=-1), 1)
    assert (traces["distance_mean"] >= 0).all()


def test_trace_file_can_be_read_by_numpy_alone(run: Run) -> None:
    code = (
        "import sys, numpy; file = numpy.load(sys.argv[1]); print(file['gate_saturated'].shape, 'torch' in sys.modules)"
    )
    words = subprocess.run(
        [sys.executable, "-c", code, str(run.out / "gates.npz")], capture_output=True, text=True, check=True
    )
    assert words.stdout.strip() == "(2, 2, 4) False"


def test_mechanism_without_decisions_leaves_no_trace(probe: PreparedData, tmp_path: Path) -> None:
    train(small_config(probe, "dense", optimization={"steps": 1}), tmp_path / "run")
    assert not (tmp_path / "run" / "gates.npz").exists()


def test_losses_are_those_of_a_plain_loop(probe: PreparedData, tmp_path: Path) -> None:
    config = small_config(probe, optimization={"schedule": "constant", "weight_decay": 0.0})
    train(config, tmp_path / "run")
    model = starting_model(config, probe).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    batches = Batches(probe.split("train").rows(length=64), batch_size=4, seed=3, epochs=None)
    expected = []
    for step in range(8):
        output = model(**model_inputs(batches.rows, batches.indices(step)))
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(output.cross_entropy))
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=2e-5)


def test_auxiliary_losses_are_recorded_apart(probe: PreparedData, tmp_path: Path) -> None:
    train(small_config(probe, "dynamic_sparse", optimization={"steps": 2}), tmp_path / "run")
    first = records(tmp_path / "run")[0]
    assert first["auxiliary"]["indexer"] > 0
    assert first["loss"] == pytest.approx(numpy.log(258), rel=0.05)


def test_micro_batches_do_not_change_the_losses(probe: PreparedData, tmp_path: Path) -> None:
    for size in (1, 4):
        train(small_config(probe, optimization={"micro_batch": size}), tmp_path / str(size))
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "4"), rel=1e-5)


def test_every_mechanism_reads_the_same_rows_from_the_same_start(probe: PreparedData) -> None:
    starts = [starting_model(small_config(probe, name), probe).state_dict() for name in OPTIONS]
    for start in starts[1:]:
        assert all(torch.equal(start[name], one) for name, one in starts[0].items())


def test_seed_decides_the_start(probe: PreparedData) -> None:
    one, other = (starting_model(small_config(probe, run={"seed": seed}), probe).state_dict() for seed in (1, 2))
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_batches_begin_at_any_step(probe: PreparedData) -> None:
    batches = Batches(probe.split("train").rows(length=64), batch_size=4, seed=3, epochs=None)
    whole = iter(MicroBatches(batches, micro_batch=2, start_step=0))
    later = iter(MicroBatches(batches, micro_batch=2, start_step=2))
    skipped = [next(whole) for _ in range(4)]
    assert len(skipped) == 4
    assert torch.equal(next(whole)["input_ids"], next(later)["input_ids"])


def test_mechanism_parameters_have_their_own_group_without_decay(probe: PreparedData) -> None:
    model = starting_model(small_config(probe, "context_adaptive"), probe)
    groups = {
        one["name"]: one for one in parameter_groups(model, learning_rate=1.0, weight_decay=0.1, mechanism_factor=0.5)
    }
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    gates = [names[id(one)] for one in groups["mechanism"]["params"]]
    assert gates
    assert all(".mechanism." in name for name in gates)
    assert (groups["mechanism"]["lr"], groups["mechanism"]["weight_decay"]) == (0.5, 0.0)
    assert groups["matrices"]["weight_decay"] == 0.1
    assert all(one.ndim == 1 for one in groups["vectors"]["params"])
    assert sum(len(one["params"]) for one in groups.values()) == len(names)


def test_held_gates_learn_nothing(probe: PreparedData, tmp_path: Path) -> None:
    train(small_config(probe, optimization={"gate_warmup_steps": 8}), tmp_path / "held")
    train(small_config(probe, optimization={"gate_warmup_steps": 4}), tmp_path / "let go")
    held, free = (read_gate_traces(tmp_path / name / "gates.npz")["gate_mean"] for name in ("held", "let go"))
    assert (held == 0.5).all()
    assert (free[0] == 0.5).all()
    assert (free[1] != 0.5).all()


def test_gradient_checkpointing_gives_the_same_losses(probe: PreparedData, tmp_path: Path) -> None:
    for value in (False, True):
        train(small_config(probe, optimization={"gradient_checkpointing": value}), tmp_path / str(value))
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-5)


def test_source_is_prepared_inside_the_run(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": f"{n} bees " * 60}) for n in range(200)))
    content = small_content(Path("unused"))
    content["data"] = {"source": str(tmp_path / "text.jsonl"), "tokenizer": "bytes"}
    found = train(config_from(content, ["optimization.steps=1"]), tmp_path / "run")
    assert found.data_fingerprint
    assert (tmp_path / "run" / "data" / "manifest.json").is_file()


def test_run_goes_on_from_a_saved_model(run: Run, probe: PreparedData, tmp_path: Path) -> None:
    content = small_content(probe, optimization={"steps": 1})
    content["model"] = {"start": str(run.out / "model")}
    found = train(config_from(content), tmp_path / "run")
    assert found.mechanism == "context_adaptive"
    assert losses(tmp_path / "run")[0] < losses(run.out)[0] - 0.1


def poisoned(run: Run, folder: Path) -> Path:
    """The run's model with a weight of layer 1 that is not a number."""
    model = load_model(run.out / "model")
    with torch.no_grad():
        dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    model.save_pretrained(folder)
    return folder


def test_divergence_stops_with_step_layer_and_last_good_checkpoint(
    run: Run, probe: PreparedData, tmp_path: Path
) -> None:
    content = small_content(probe)
    content["model"] = {"start": str(poisoned(run, tmp_path / "model"))}
    with pytest.raises(
        DivergedError, match=r"at step 1 in the weights of layer 1: loss nan.*there is no checkpoint yet"
    ):
        train(config_from(content), tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()


def test_divergence_names_the_last_good_checkpoint(probe: PreparedData, tmp_path: Path) -> None:
    hopeless = {"steps": 40, "learning_rate": 1e25, "warmup_steps": 2}
    config = small_config(probe, optimization=hopeless, checkpoints={"every": 1})
    with pytest.raises(DivergedError, match=r"diverged at step \d+ in .*; the last good checkpoint is .*step-\d+; try"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"mechanism": "head_gatd"}}, "unknown mechanism 'head_gatd' .did you mean 'head_gated'"),
        ({"model": {"mechanism_options": {"windw": 3}}}, "has no option 'windw' .did you mean 'window'"),
        ({"model": {"overrides": {"hidden": 3}}}, "model.overrides has the unknown field 'hidden'"),
        ({"model": {"overrides": {"vocab_size": 100}}}, "258 different tokens, the model knows 100"),
        ({"model": {"overrides": {"max_position_embeddings": 32}}}, "up to 32 tokens, optimization.length asks for 64"),
        ({"model": {"preset": "tny"}}, "unknown preset 'tny'"),
        ({"data": {"path": "no such folder"}}, "holds no manifest.json"),
        ({"optimization": {"length": 100_000}}, "too few for a row of 100000"),
        ({"trainer": {"max_steps": 3}}, "trainer.max_steps follows from the other sections"),
        ({"trainer": {"fdsp": "x"}}, "trainer has no argument 'fdsp' .did you mean 'fsdp'"),
    ],
)  # fmt: skip
def test_impossible_run_is_refused_and_leaves_nothing(
    probe: PreparedData, tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(small_config(probe, **sections), tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()


def test_data_of_another_tokenizer_are_refused(run: Run, tmp_path: Path) -> None:
    other = make_probe(tmp_path / "other", Probe(length=64, questions=4, distances=(4,), keys=32), texts=100)
    content = small_content(other)
    content["model"] = {"start": str(run.out / "model")}
    with pytest.raises(ValueError, match="prepare the data with the same tokenizer"):
        train(config_from(content), tmp_path / "run")


def test_existing_run_is_not_overwritten(run: Run) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.out.rglob("*")}
    with pytest.raises(ValueError, match=r"already holds a run; --resume goes on with it"):
        train(run.config, run.out)
    assert {path: path.stat().st_mtime_ns for path in run.out.rglob("*")} == before


def test_folder_of_something_else_is_not_used(probe: PreparedData, tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(ValueError, match="already holds files; choose another folder"):
        train(small_config(probe), tmp_path)


def test_resuming_nothing_is_an_error(probe: PreparedData, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run to resume"):
        train(small_config(probe), tmp_path / "nothing", resume=True)
    assert not (tmp_path / "nothing").exists()


def test_resuming_with_other_settings_is_an_error(run: Run, probe: PreparedData) -> None:
    other = small_config(probe, "context_adaptive", optimization={"learning_rate": 0.5}, run={"tensorboard": True})
    with pytest.raises(ValueError, match=r"started with optimization.learning_rate = 0.01, now it is 0.5"):
        train(other, run.out, resume=True)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = "from varifocal.cli.main import run; run()"
    return subprocess.run(
        [sys.executable, "-c", program, "train", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "300"} | environment,
    )


def test_command_trains_in_bfloat16(probe: PreparedData, tmp_path: Path) -> None:
    """Without AMX, which the machine may announce and not run."""
    config = small_config(probe, optimization={"steps": 2})
    (tmp_path / "c.toml").write_text(config.as_toml())
    done = command(
        str(tmp_path / "c.toml"), str(tmp_path / "run"), "--set", "optimization.precision=bfloat16",
        ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "finished: validation loss" in done.stdout
    summary = RunSummary.read(tmp_path / "run" / "summary.json")
    assert summary.steps == 2
    assert load_model(tmp_path / "run" / "model").dtype == torch.float32


@pytest.mark.parametrize(("every", "what"), [(2, "the checkpoint of step 2"), (1000, "the model")])
def test_full_disk_stops_with_one_sentence(probe: PreparedData, tmp_path: Path, every: int, what: str) -> None:
    """A limit on the size of files stands in for the end of a disk."""
    config = small_config(probe, optimization={"steps": 3}, checkpoints={"every": every})
    (tmp_path / "c.toml").write_text(config.as_toml())
    program = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); "
        "from varifocal.cli.main import run; run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(tmp_path / "c.toml"), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "300"},
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert f"{what} cannot be written" in done.stderr
    assert "File too large" in done.stderr or "the disk is full, or files may not grow so large" in done.stderr
    assert "inline_container" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "model").exists()
