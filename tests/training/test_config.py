"""A config is read whole or refused in one sentence, and is written so that it reads as itself."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.training.runs import small_content
from varifocal.training.config import TrainingConfig, config_from, load_config
from varifocal.training.start import model_config

ROOT = Path(__file__).parents[2]
CONFIGS = [
    path
    for path in sorted((ROOT / "configs").rglob("*.toml"))
    if "mechanisms" not in tomllib.loads(path.read_text())  # those are comparisons
]
MINIMAL: dict[str, Any] = {"data": {"path": "data"}, "optimization": {"steps": 10}}


def laid_over(**sections: dict[str, Any]) -> dict[str, Any]:
    return {name: MINIMAL.get(name, {}) | sections.get(name, {}) for name in MINIMAL.keys() | sections.keys()}


def test_config_reads_as_it_was_written() -> None:
    content = small_content(Path("some data"), "context_adaptive", run={"tensorboard": True}, trainer={"fsdp": "x"})
    config = config_from(content)
    assert config_from(tomllib.loads(config.as_toml())) == config


def test_hybrid_config_reads_as_it_was_written() -> None:
    model = {"mechanism": ["local", "dense"], "mechanism_options": {"local": {"window": 8}}}
    config = config_from(laid_over(model=model))
    assert config_from(tomllib.loads(config.as_toml())) == config


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimization.steps=25", lambda config: config.optimization.steps == 25),
        ("optimization.learning_rate=3e-4", lambda config: config.optimization.learning_rate == 3e-4),
        ("model.mechanism=head_gated", lambda config: config.model.mechanism == "head_gated"),
        ('model.mechanism=["local", "dense"]', lambda config: config.model.mechanism == ["local", "dense"]),
        ("model.mechanism_options.window=64", lambda config: config.model.mechanism_options == {"window": 64}),
        (
            "model.mechanism_options.gate.kind=mlp",
            lambda config: config.model.mechanism_options["gate"]["kind"] == "mlp",
        ),
        ("optimization.betas=[0.9, 0.98]", lambda config: config.optimization.betas == (0.9, 0.98)),
        ("run.tensorboard=true", lambda config: config.run.tensorboard is True),
        ("data.path=other", lambda config: config.data.path == "other"),
    ],
)
def test_setting_overrides_the_file(tmp_path: Path, override: str, value: Any) -> None:
    (tmp_path / "c.toml").write_text('[data]\npath = "data"\n[optimization]\nsteps = 10\n', encoding="utf-8")
    assert value(load_config(tmp_path / "c.toml", [override]))


def test_tokens_become_steps_rounded_up() -> None:
    config = config_from({"data": {"path": "data"}, "optimization": {"tokens": 1001, "batch": 10, "length": 10}})
    assert config.optimization.total_steps == 11


@pytest.mark.parametrize(
    ("content", "overrides", "message"),
    [
        (laid_over(optimisation={"steps": 3}), [], "unknown section 'optimisation' .did you mean 'optimization'"),
        (laid_over(optimization={"learn_rate": 1}), [], "did you mean 'optimization.learning_rate'"),
        (laid_over(model={"steps": 1}), [], "unknown key 'model.steps' .did you mean 'optimization.steps'"),
        (MINIMAL, ["steps=3"], "section.key=value, got 'steps=3' .did you mean 'optimization.steps'"),
        (MINIMAL, ["optimization.bath=3"], "did you mean 'optimization.batch'"),
        (MINIMAL, ["optimization.batch=many"], "optimization.batch must be a whole number, got 'many'"),
        (MINIMAL, ["optimization.batch=2.5"], "a whole number, got 2.5"),
        (MINIMAL, ["optimization.schedule=linear"], "must be 'cosine' or 'constant', got 'linear'"),
        (MINIMAL, ["run.tensorboard=1"], "must be true or false, got 1"),
        (MINIMAL, ["optimization.betas=0.9"], "a list of numbers, got 0.9"),
        (MINIMAL, ["optimization.betas=[0.9]"], "two numbers"),
        (MINIMAL, ["optimization.batch=6", "optimization.micro_batch=4"], "a multiple of micro_batch, got 6 and 4"),
        (MINIMAL, ["optimization.tokens=100"], "one of steps, tokens and seconds, got steps and tokens"),
        (MINIMAL, ["optimization.seconds=1"], "one of steps, tokens and seconds, got steps and seconds"),
        ({"data": {"path": "x"}, "optimization": {"batch": 1}}, [], "seconds, got none of them"),
        ({"data": {"path": "x"}, "optimization": {"seconds": 0}}, [], "seconds must be a finite number above 0, got 0"),
        (MINIMAL, ["optimization.warmup_share=1"], "warmup_share must be at least 0 and below 1, got 1"),
        (MINIMAL, ["optimization.warmup_share=0.1", "optimization.warmup_steps=2"], "leave one of them out"),
        (MINIMAL, ["optimization.warmup_steps=11"], "must not exceed the 10 steps of the run, got 11"),
        (MINIMAL, ["data.source=sotu"], "either a path to prepared data or a source to prepare, got both"),
        (MINIMAL, ["model.start=runs/x/model", "model.preset=tiny"], "model.preset cannot be given with it"),
        (MINIMAL, ["model.mechanism=[]"], r"a name or a list with one for each layer, got \[\]"),
        (MINIMAL, ["model.mechanism="], "model.mechanism must be a name or a list with one for each layer, got ''"),
        (MINIMAL, ["model.mechanism=[1]"], r"model.mechanism must be a name or a list .* got \[1\]"),
        (MINIMAL, ["model.preset="], "model.preset must not be empty"),
        (MINIMAL, ["model.start="], "model.start must not be empty"),
        (MINIMAL, ["model.start=x", "model.mechanism=[]"], "model.mechanism cannot be given with it"),
        (MINIMAL, ["model.mechanism_options=[]"], "a list of as many mechanisms, got 0 and 'dense'"),
        (MINIMAL, ["model.mechanism=['dense']", "model.mechanism_options=[{}, {}]"], "a list of as many mechanisms"),
        (MINIMAL, [f"run.seed={10**400}"], "run.seed must be a whole number between 0 and 4294967295"),
        (MINIMAL, [f"run.seed={2**32}"], "run.seed must be a whole number between 0 and 4294967295"),
        (MINIMAL, [f"optimization.learning_rate={10**400}"], "optimization.learning_rate must be a number, got 1000"),
        (MINIMAL, [f"optimization.batch={10**30}"], "optimization.batch must be between 1 and"),
        (MINIMAL, ["run.seed=" + "[" * 5000], "run.seed must be a whole number"),
        (MINIMAL, ["optimization.learning_rate=0"], "above 0, got 0"),
        (MINIMAL, ["checkpoints.every=0"], "checkpoints.every must be at least 1"),
        ({"data": {"path": "x"}}, [], r"has no section \[optimization\]"),
        ({"data": "x", "optimization": {"steps": 1}}, [], "must be a section of its own"),
    ],
)  # fmt: skip
def test_wrong_config_is_refused_in_one_sentence(content: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from(content, overrides)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.toml cannot be read: No such file"):
        load_config(tmp_path / "nowhere.toml")
    (tmp_path / "broken.toml").write_text("[data", encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken.toml is not TOML"):
        load_config(tmp_path / "broken.toml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_config_of_the_repository_names_a_model_that_exists(path: Path) -> None:
    config = load_config(path)
    assert isinstance(config, TrainingConfig)
    assert model_config(config, None).max_position_embeddings >= config.optimization.length


def paper(name: str) -> TrainingConfig:
    return load_config(ROOT / "configs" / "papers" / f"{name}.toml")


def test_papers_configs_are_as_the_papers_state_them() -> None:
    caa, asga, gating = paper("context_adaptive"), paper("sparse_geometric"), paper("head_gated")
    assert (caa.optimization.batch, caa.optimization.learning_rate, caa.optimization.betas) == (512, 3e-4, (0.9, 0.98))
    assert caa.optimization.tokens == 10_000_000_000
    assert (asga.optimization.batch, asga.optimization.learning_rate, asga.optimization.steps) == (32, 6e-4, 50_000)
    assert asga.optimization.schedule == "cosine"
    windows = model_config(caa, None).layer_mechanism(0).options
    assert (windows["window_min"], windows["window_max"], windows["gate"]["kind"]) == (256, 512, "mlp")
    heads = model_config(gating, None)
    assert (heads.num_attention_heads, heads.head_dim, heads.layer_mechanism(0).options["window"]) == (12, 128, 256)


def test_cpu_config_keeps_the_proportions_of_window_and_context() -> None:
    for name in ("context_adaptive", "head_gated"):
        small = load_config(ROOT / "configs" / "cpu" / "train.toml", [f"model.mechanism={name}"])
        large = load_config(ROOT / "configs" / "papers" / f"{name}.toml")
        ratios = []
        for config in (small, large):
            options = model_config(config, None).layer_mechanism(0).options
            ratios.append(config.optimization.length / int(options.get("window") or options["window_min"]))
        assert ratios[0] == ratios[1] == 8
