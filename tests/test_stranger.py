"""A mechanism that another package offers works everywhere, as ours do."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache
from typer.testing import CliRunner

import varifocal
from tests.experiments.comparisons import TrainHere, small_plan
from tests.explorer.serving import Server
from tests.model.models import SIZES, random_tokens
from tests.training.runs import records, small_config
from varifocal import (
    MECHANISMS,
    Call,
    Causal,
    Dot,
    Equation,
    HeadShape,
    Mechanism,
    MechanismConfig,
    Window,
    make_mechanism,
    register,
)
from varifocal.attention.mechanisms.registry import ENTRY_POINTS, config_from_options
from varifocal.attention.memories import RecentKeys
from varifocal.bench.attention.workload import Workload
from varifocal.bench.rows import rows_of_ours
from varifocal.cli.main import app
from varifocal.data.probe import Probe, make_probe
from varifocal.experiments.ablations import ablation_arms, sizes_of
from varifocal.experiments.comparison import compare
from varifocal.explorer.explorer import Explorer
from varifocal.explorer.opening import open_model
from varifocal.model import VarifocalConfig, VarifocalForCausalLM, load_model
from varifocal.plan.cost import parameters_by_part
from varifocal.retrofit.dense_start import foreign_share
from varifocal.training.run import train
from varifocal.training.trainer import Progress

STEM = "fading"
PACKAGE = Path(__file__).parent / "stranger"
CONTEXT = 24


@contextmanager
def installed(site: Path) -> Iterator[None]:
    """The folder is one where Python looks for packages, in this process and in those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
        # A registry that has not looked for offers yet, and forgets what it found.
        patch.setattr(MECHANISMS, "_known", dict(MECHANISMS._known))
        patch.setattr(MECHANISMS, "_offers_are_loaded", False)
        yield


def install(site: Path, name: str, offers: dict[str, str]) -> Path:
    """What an installation of a package leaves behind, apart from its modules."""
    known = site / f"{name.replace('-', '_')}-0.1.dist-info"
    known.mkdir(parents=True)
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n", encoding="utf-8")
    lines = "".join(f"{stem} = {value}\n" for stem, value in offers.items())
    (known / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{lines}", encoding="utf-8")
    return site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages in which the stranger's is installed."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))
    folder = tmp_path_factory.mktemp("site")
    for module in project["tool"]["setuptools"]["py-modules"]:
        (folder / f"{module}.py").symlink_to(PACKAGE / f"{module}.py")
    return install(folder, project["project"]["name"], project["project"]["entry-points"][ENTRY_POINTS])


@pytest.fixture(autouse=True)
def known(site: Path) -> Iterator[None]:
    with installed(site):
        yield


class Trained(NamedTuple):
    data: Path
    out: Path
    """The folder of a run that is finished."""

    @property
    def model(self) -> Path:
        return self.out / "model"


@pytest.fixture(scope="session")
def trained(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What all tests of trained models share."""
    folder = tmp_path_factory.mktemp("stranger")
    make_probe(folder / "probe", Probe(length=64, questions=4, distances=(4, 16)), texts=100)
    with installed(site):
        train(small_config(folder / "probe", "dense", model=MODEL), folder / "run")
    return Trained(folder / "probe", folder / "run")


MODEL: dict[str, Any] = {
    "mechanism": STEM,
    "mechanism_options": {"near": 8, "distances": 5, "mix": {"z_loss": 0.01}},
    "overrides": {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    },
}  # fmt: skip


def small_model() -> VarifocalForCausalLM:
    """A small model whose parameters are all random."""
    torch.manual_seed(0)
    options = {"near": 5, "distances": 4}
    model = VarifocalForCausalLM(VarifocalConfig(**(SIZES | {"mechanism": STEM, "mechanism_options": options})))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mechanism" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
    model.eval()
    return model


def command(*words: Any) -> str:
    """What a command prints; it must end well."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_entry_point_is_found_in_another_process() -> None:
    code = "import varifocal; print(*varifocal.MECHANISMS)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split()[-1] == STEM


def test_names_of_ours_do_not_load_the_package() -> None:
    make_mechanism("dense")
    assert STEM not in MECHANISMS._known
    assert STEM in {offer.name for offer in entry_points(group=ENTRY_POINTS)}
    assert MECHANISMS[STEM].name == STEM


def test_conforms() -> None:
    said = command("check", "-m", STEM)
    assert f"{STEM} wide" in said
    assert "0 broken" in said


def test_config_inside_its_config_is_read_from_a_dict_and_checked() -> None:
    config: Any = config_from_options(STEM, {"mix": {"kind": "static", "start": -2}})
    assert (config.mix.kind, config.mix.start, config.near) == ("static", -2, 128)
    with pytest.raises(ValueError, match="the mix of 'fading' has no option 'strat'"):
        config_from_options(STEM, {"mix": {"strat": 1}})


def test_model_trains_all_of_its_parameters_and_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    model, tokens = small_model(), random_tokens(2, 20)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for n, p in model.named_parameters() if "mechanism" in n)
    model.save_pretrained(tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.config.mechanism_options == model.config.mechanism_options
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_mechanism_that_sets_its_parameters_itself_keeps_them_in_a_model() -> None:
    @register
    class Halved(Mechanism[MechanismConfig]):
        name = "halved"
        config_type = MechanismConfig

        def __init__(self, config: MechanismConfig | None = None, shape: HeadShape | None = None) -> None:
            super().__init__(config, shape)
            self.norm = torch.nn.Linear(self.shape.model_width, self.shape.heads)
            torch.nn.init.constant_(self.norm.weight, 0.5)

        def equation(self, call: Call) -> Equation:
            return Equation((Causal(),))

    config = VarifocalConfig(**(SIZES | {"mechanism": "halved"}))
    found: list[Any] = [one for one in VarifocalForCausalLM(config).modules() if isinstance(one, Halved)]
    assert len(found) == 2
    assert all(bool((one.norm.weight == 0.5).all()) for one in found)
    assert parameters_by_part(config)["mechanism"] == 2 * (24 + 1) * 4


def test_weights_that_are_not_those_of_one_gate_are_not_recorded_as_a_gate() -> None:
    @register
    class Doubled(Mechanism[MechanismConfig]):
        name = "doubled"
        config_type = MechanismConfig

        def equation(self, call: Call) -> Equation:
            return Equation((Window(2), Causal()), torch.ones(*call.q.shape[:3], 2))

    mechanism = Doubled(shape=HeadShape(model_width=8, heads=2, kv_heads=1, head_width=4))
    tokens = torch.randn(1, 5, 8), torch.randn(1, 2, 5, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    assert mechanism(*tokens).records == {}


def generate(model: VarifocalForCausalLM, prompt: Tensor, **options: Any) -> Tensor:
    found: Tensor = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, pad_token_id=0, **options)
    return found


def test_decoding_with_its_memory_gives_what_full_forwards_give() -> None:
    model, prompt = small_model(), random_tokens(2, 9)
    greedy = generate(model, prompt)
    assert torch.equal(greedy, generate(model, prompt, use_cache=False))
    assert torch.equal(greedy, generate(model, prompt, cache_implementation="static"))
    beams = {"num_beams": 3, "length_penalty": 0.7}
    assert torch.equal(generate(model, prompt, **beams), generate(model, prompt, use_cache=False, **beams))
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    padded = generate(model, prompt, attention_mask=mask)
    assert torch.equal(padded[:1, 4:], generate(model, prompt[:1, 4:]))
    assert torch.equal(padded[1:], greedy[1:])


def test_cache_without_room_for_its_notes_is_refused() -> None:
    cache = StaticCache(config=Qwen3Config(**{name: SIZES[name] for name in QWEN}), max_cache_len=32)
    with pytest.raises(ValueError, match="fading remembers more than keys and values"):
        small_model()(random_tokens(1, 5), past_key_values=cache)


QWEN = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip


def test_retrofit_starts_as_the_model_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{name: SIZES[name] for name in QWEN})).save_pretrained(tmp_path / "qwen")
    said = command(
        "retrofit", tmp_path / "qwen", tmp_path / "new", "-m", STEM, "--option", "near=5", "--context", CONTEXT
    )
    assert (
        f"starts as dense attention but for a share of 6.1e-06 of every head's output, on texts of up to {CONTEXT}"
        in said
    )
    source, model = Qwen3ForCausalLM.from_pretrained(tmp_path / "qwen").eval(), load_model(tmp_path / "new")
    tokens = random_tokens(2, CONTEXT)
    torch.testing.assert_close(model(tokens).logits, source(tokens).logits, rtol=0, atol=1e-4)


def test_start_that_depends_on_the_input_is_not_promised_from_an_input_of_0() -> None:
    mechanism: Any = make_mechanism(STEM, near=5, **MECHANISMS[STEM].dense_options(CONTEXT))
    mechanism.start_as_dense()
    assert foreign_share(mechanism, CONTEXT) == pytest.approx(6.1e-6, rel=0.1)
    torch.nn.init.ones_(mechanism.gate.output.weight)
    share = foreign_share(mechanism, CONTEXT)
    assert share is not None
    assert share > 0.5


def test_stopped_run_continues_as_if_it_had_never_stopped(trained: Trained, tmp_path: Path) -> None:
    config = small_config(trained.data, "dense", model=MODEL)

    def interrupt(now: Progress) -> None:
        if now.step == 6 and now.loss is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", on_progress=interrupt)
    train(config, tmp_path / "run", resume=True)
    assert records(tmp_path / "run") == records(trained.out)


def test_trace_of_a_run_has_its_gates(trained: Trained) -> None:
    import numpy

    with numpy.load(trained.out / "gates.npz") as traces:
        assert numpy.isfinite(traces["gate_mean"]).any()


def test_comparison_and_its_report_have_its_row(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "compare.toml").write_text(
        f"""
        title = "a stranger"
        mechanisms = ["dense", "{STEM}"]
        seeds = [0]
        [base.data]
        path = "{trained.data}"
        [base.model]
        preset = "tiny"
        [base.model.overrides]
        num_hidden_layers = 1
        hidden_size = 16
        [base.optimization]
        steps = 2
        batch = 2
        length = 64
        [base.validation]
        every = 2
        tokens = 128
        trace_rows = 1
        [base.run]
        threads = 1
        """,
        encoding="utf-8",
    )
    said = command("compare", tmp_path / "compare.toml", tmp_path / "out", "--workers", 2)
    assert STEM in said
    command("report", tmp_path / "out", trained.out, "-o", tmp_path / "report.html")
    assert STEM in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_ablations_are_listed_and_run(trained: Trained, tmp_path: Path) -> None:
    assert f"{STEM}.no_gate" in command("ablate", "--list")
    plan = small_plan(trained.data)
    arms = ablation_arms([STEM], sizes_of(plan.base))
    assert [arm.name for arm in arms] == ["dense", STEM, f"{STEM}.no_gate", f"{STEM}.one_bias"]
    outcome = compare(small_plan(trained.data, arms=arms[1:]), tmp_path / "out", train_cells=TrainHere())
    assert outcome.failed == {}
    assert len(outcome.finished) == 4


def test_loss_and_answers_are_evaluated(trained: Trained) -> None:
    said = command("evaluate", trained.model, "--data", trained.data, "--tokens", 256)
    assert "right answers by distance" in said


def test_what_it_reads_is_analyzed(trained: Trained, tmp_path: Path) -> None:
    file = tmp_path / "analysis.json"
    command("analyze", trained.model, "--data", trained.data, "--tokens", 512, "--resamples", 10, "-o", file)
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["window"] == 8
    assert "gate" in json.dumps(content)


def test_text_is_generated(trained: Trained) -> None:
    assert f"({STEM})" in command("generate", trained.model, "k1", "--new-tokens", 4, "--temperature", 0)


def test_page_answers_for_its_model(trained: Trained) -> None:
    with Server(Explorer([open_model(str(trained.out))])) as server:
        with urllib.request.urlopen(server.address, timeout=60) as answer:
            page = answer.read().decode()
        views = {}
        for question in ("text", "token"):
            asked = {"text": "k1 v2 k3 v4 k1", "token": 3, "layer": 1, "head": 2}
            asked = {name: value for name, value in asked.items() if question == "token" or name == "text"}
            request = urllib.request.Request(f"{server.address}api/{question}", json.dumps(asked).encode())
            with urllib.request.urlopen(request, timeout=60) as answer:
                views[question] = json.load(answer)
    assert "a gate mixes the last 8 keys with all of them, fading by distance" in page
    assert views["text"]["gate"] is not None
    assert math.isclose(sum(views["token"]["weights"]), 1.0, abs_tol=0.01)


def test_plan_predicts_its_training() -> None:
    assert STEM in command("plan", "--preset", "tiny", "-m", STEM, "--gpus", 1, "--tokens", "1M", "--batch", 8)


def test_bench_measures_its_attention(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command(
        "bench", "attention", "--lengths", 64, "--rounds", 1, "--no-memory", "--heads", 2, "--kv-heads", 1,
        "--head-width", 16, "-c", f"reference {STEM}", "--json", file,
    )  # fmt: skip
    (row,) = (one for one in json.loads(file.read_text(encoding="utf-8"))["rows"] if STEM in one["name"])
    assert row["seconds"] > 0


def test_bench_trains_its_model() -> None:
    said = command(
        "bench", "model", "--preset", "tiny", "--layers", 1, "--lengths", 32, "--rounds", 1, "--no-memory",
        "--decode", 0, "-c", STEM,
    )  # fmt: skip
    assert STEM in said


def test_info_says_what_it_costs() -> None:
    assert STEM in command("info")
    assert STEM in command("info", "--preset", "tiny")


def test_offer_that_cannot_be_loaded_says_whose_it_is(tmp_path: Path) -> None:
    with installed(install(tmp_path, "broken-attention", {"broken": "no_such_module:Broken"})):
        for _ in range(2):
            with pytest.raises(ValueError, match="the package broken-attention offers the mechanism 'broken'"):
                list(MECHANISMS)
        assert make_mechanism("dense").name == "dense"


def test_offer_under_another_name_is_refused(tmp_path: Path) -> None:
    with (
        installed(install(tmp_path, "other-attention", {"other": "stranger_attention:Fading"})),
        pytest.raises(ValueError, match="the entry point must have the mechanism's name"),
    ):
        list(MECHANISMS)


def test_name_that_is_taken_is_refused() -> None:
    class Impostor(Mechanism[MechanismConfig]):
        name = STEM
        config_type = MechanismConfig

    list(MECHANISMS)
    with pytest.raises(ValueError, match="the name 'fading' is taken by Fading"):
        MECHANISMS.add(Impostor)


def test_cell_of_a_notebook_may_be_run_again() -> None:
    cell = """
@varifocal.register
class Mine(varifocal.Mechanism):
    name, config_type = "mine", varifocal.MechanismConfig
"""
    for _ in range(2):
        exec(cell, {"__name__": "notebook", "varifocal": varifocal})
    assert MECHANISMS["mine"].__module__ == "notebook"


def test_memory_of_the_last_keys_with_notes_needs_room_for_them() -> None:
    class Noted(RecentKeys):
        def notes(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
            return {"x": x[:, None]}

    assert RecentKeys(4).is_plain
    assert not Noted(4).is_plain


def test_option_with_the_name_of_a_size_and_another_kind_is_left_alone_by_the_bench() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Options(MechanismConfig):
        window: str = "wide"
        select: str = "fast"
        gate: str = "none"
        heads: int = 3
        rank: int = 1

    @register
    class Worded(Mechanism[Options]):
        name = "worded"
        config_type = Options

    assert Workload(length=8).options("worded") == {"rank": 32}
    assert rows_of_ours()["worded"] == ("worded", {})
    assert config_from_options("worded", {"gate": "one"}) == Options(gate="one")


def test_mechanism_must_say_what_its_options_are() -> None:
    class Mute(Mechanism[MechanismConfig]):
        name = "mute"

    with pytest.raises(ValueError, match="needs a config_type"):
        register(Mute)


@pytest.mark.parametrize("known_kind", [Dot, Window])
def test_kind_that_kernels_know_cannot_be_extended(known_kind: type) -> None:
    with pytest.raises(TypeError, match=f"cannot extend {known_kind.__name__}"):
        type("Mine", (known_kind,), {})
