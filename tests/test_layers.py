"""The layers of DESIGN.md section 4: who may import whom, and what `import varifocal` costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import varifocal

PACKAGE = Path(varifocal.__file__).parent
LAYERS = (
    *("results", "statistics", "equations", "kernels", "attention", "model", "retrofit", "data", "training"),
    *("experiments", "plan", "bench", "analysis", "report", "explorer", "serving", "cli"),
)
"""From the ground up."""

ALLOWED: dict[str, set[str]] = {layer: set(LAYERS[: number + 1]) for number, layer in enumerate(LAYERS)}
ALLOWED["data"] = {"data"}
ALLOWED["report"] = {"report", "results", "statistics"}
ALLOWED["explorer"] = {"explorer", "root", "equations", "kernels", "attention", "model", "retrofit"}
ALLOWED["serving"] = {"serving", "root", "equations", "kernels", "attention", "model"}
ALLOWED["root"] = {"root", "results", "equations", "kernels", "attention"}
for layer in ("equations", "kernels", "attention"):
    ALLOWED[layer] -= {"results", "statistics"}
for above in ("model", "retrofit", "training", "experiments", "plan", "bench", "analysis"):
    # `varifocal` itself offers the names of attention and equations, to those above them.
    ALLOWED[above].add("root")

FILES = sorted(PACKAGE.rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))

HEAVY = (
    "transformers",
    "gguf",
    "accelerate",
    "tensorboard",
    "typer",
    "rich",
    "click",
    "datatrove",
    "pyarrow",
    "tokenizers",
    "huggingface_hub",
    "matplotlib",
    "fastapi",
    "uvicorn",
    "jinja2",
    "pandas",
    "scipy",
    "hypothesis",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """The folder of a module of ours; "root" for varifocal itself and the files beside the folders."""
    name = module.split(".")[1] if "." in module else ""
    return name if (PACKAGE / name).is_dir() and name else "root"


def imported(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it; `from a import b` counts as a.b where that is a module."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    return imports_of(path.read_text(), package)


def imports_of(text: str, package: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                ancestors = package.split(".")
                base = ".".join([*ancestors[: len(ancestors) - node.level + 1], *([base] if base else [])])
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names if is_module(f"{base}.{alias.name}")}
    return found


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def ours(modules: set[str]) -> set[str]:
    return {module for module in modules if module.split(".")[0] == "varifocal"}


def test_every_folder_is_a_layer() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(LAYERS)


@every_file
def test_file_imports_only_from_its_own_layer_and_those_below(path: Path) -> None:
    layer = layer_of(module_name(path))
    if layer == "cli" or layer not in ALLOWED:
        return  # the command line stands on everything; a folder that is no layer is reported above
    assert not {module for module in ours(imported(path)) if layer_of(module) not in ALLOWED[layer]}


@every_file
def test_kernels_do_not_import_the_reference(path: Path) -> None:
    if layer_of(module_name(path)) == "kernels":
        assert "varifocal.equations.reference" not in imported(path)


@every_file
def test_reference_and_all_it_stands_on_import_no_kernel(path: Path) -> None:
    if layer_of(module_name(path)) == "equations":
        assert not {module for module in imported(path) if "kernels" in module.split(".")}


@every_file
def test_heavy_packages_are_imported_only_by_the_layer_that_uses_them(path: Path) -> None:
    users = {
        "transformers": {"model", "retrofit", "bench", "serving", "training"},
        "gguf": {"retrofit", "bench"},
        "datatrove": {"data"},
        "pyarrow": {"data"},
        "tokenizers": {"data"},
        "huggingface_hub": {"data", "model", "retrofit", "serving", "training"},
        "vllm": {"serving", "bench"},
        "accelerate": {"training"},
        "tensorboard": {"training"},
        "zstandard": {"data"},
        "orjson": {"data"},
        "matplotlib": {"report"},
        "jinja2": {"report", "explorer"},
        "fastapi": {"explorer"},
        "starlette": {"explorer"},
        "uvicorn": {"explorer"},
        "typer": {"cli"},
        "rich": {"cli"},
    }
    layer = layer_of(module_name(path))
    packages = {module.split(".")[0] for module in imported(path)}
    assert not {package for package in packages if package in users and layer not in users[package]}


@every_file
def test_records_need_the_standard_library_and_numpy_alone(path: Path) -> None:
    if layer_of(module_name(path)) == "results":
        packages = {module.split(".")[0] for module in imported(path)}
        assert packages <= {*sys.stdlib_module_names, "numpy", "varifocal"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "cli").glob("*.py")), ids=lambda path: path.stem)
def test_verb_is_options_one_call_and_words(path: Path) -> None:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    long = {one.name for one in functions if (one.end_lineno or one.lineno) - one.lineno + 1 >= 60}
    assert not long


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("import varifocal.model", {"varifocal.model"}),
        ("from varifocal.equations import reference", {"varifocal.equations", "varifocal.equations.reference"}),
        ("from varifocal import equations", {"varifocal", "varifocal.equations"}),
        ("def f():\n    from varifocal.attention.attend import attend", {"varifocal.attention.attend"}),
        ("from . import reference", {"varifocal.equations", "varifocal.equations.reference"}),
        ("from ..attention import attend", {"varifocal.attention", "varifocal.attention.attend"}),
        ("from .reference import attend_reference", {"varifocal.equations.reference"}),
    ],
)
def test_no_way_of_importing_is_overlooked(text: str, wanted: set[str]) -> None:
    assert imports_of(text, "varifocal.equations") == wanted


@pytest.mark.parametrize(
    ("layer", "imports"),
    [
        ("equations", "kernels"),
        ("equations", "attention"),
        ("kernels", "attention"),
        ("attention", "model"),
        ("attention", "cli"),
        ("attention", "root"),
        ("data", "equations"),
        ("data", "model"),
        ("model", "data"),
        ("model", "retrofit"),
        ("training", "experiments"),
        ("training", "report"),
        ("results", "statistics"),
        ("results", "model"),
        ("statistics", "equations"),
        ("report", "equations"),
        ("report", "model"),
        ("report", "data"),
        ("report", "root"),
        ("report", "analysis"),
        ("experiments", "report"),
        ("plan", "bench"),
        ("training", "analysis"),
        ("explorer", "training"),
        ("explorer", "cli"),
        ("model", "explorer"),
    ],
)
def test_forbidden_direction_is_not_allowed(layer: str, imports: str) -> None:
    assert imports not in ALLOWED[layer]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_import_prints_nothing() -> None:
    result = run("import varifocal")
    assert (result.stdout, result.stderr) == ("", "")


def test_import_loads_no_package_but_torch_and_what_torch_loads() -> None:
    code = """
import sys, torch
before = {name.split(".")[0] for name in sys.modules}
import varifocal
after = {name.split(".")[0] for name in sys.modules}
print(*sorted(after - before - set(sys.stdlib_module_names)))
"""
    assert run(code).stdout.split() == ["varifocal"]


def test_import_loads_nothing_heavy() -> None:
    loaded = run("import sys, varifocal\nprint(*{name.split('.')[0] for name in sys.modules})").stdout.split()
    assert not set(HEAVY) & set(loaded)


def test_import_loads_neither_the_compiler_of_torch_nor_a_layer_above_attention() -> None:
    loaded = run("import sys, varifocal\nprint(*sys.modules)").stdout.split()
    assert "torch._dynamo" not in loaded
    assert "torch._inductor" not in loaded
    above = LAYERS[LAYERS.index("model") :]
    assert not {f"varifocal.{layer}" for layer in above} & set(loaded)


def test_reading_data_loads_neither_datatrove_nor_pyarrow_nor_a_tokenizer() -> None:
    loaded = run("import sys, varifocal.data\nprint(*{name.split('.')[0] for name in sys.modules})").stdout.split()
    assert not {"datatrove", "pyarrow", "tokenizers", "zstandard", "orjson", "huggingface_hub"} & set(loaded)


def test_reading_a_config_of_a_run_loads_no_transformers() -> None:
    loaded = run("import sys, varifocal.training.config\nprint(*{name.split('.')[0] for name in sys.modules})").stdout
    assert not {"transformers", "accelerate", "safetensors", "huggingface_hub"} & set(loaded.split())


def test_import_touches_no_device_and_no_global_setting() -> None:
    code = """
import torch
before = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed()
import varifocal
after = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed()
print(before == after, torch.cuda.is_initialized())
"""
    assert run(code).stdout.split() == ["True", "False"]


STEMS = {path.stem for path in (PACKAGE / "attention" / "mechanisms").glob("*.py")} - {"dense", "local"}
"""Files of mechanisms and of what they share. The words of two are left out: dense is what a model has by default, and
"local" names a place to run on, too."""


@every_file
def test_no_condition_or_table_outside_a_mechanisms_file_asks_for_its_name(path: Path) -> None:
    asked = set()
    for node in ast.walk(ast.parse(path.read_text())):
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            parts = node.keys
        elif isinstance(node, ast.match_case):
            parts = [one.value for one in ast.walk(node.pattern) if isinstance(one, ast.MatchValue)]
        asked |= {one.value for one in parts if isinstance(one, ast.Constant) and one.value in STEMS}
    asked -= {path.stem}
    # Names of options, and the label of a model in the demo.
    assert asked <= {"sinks", "focused"}


@every_file
def test_no_condition_outside_a_mechanisms_file_asks_for_its_config(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    checks = [one for one in calls if isinstance(one.func, ast.Name) and one.func.id in ("isinstance", "issubclass")]
    kinds = {name.id for one in checks for name in ast.walk(one.args[1]) if isinstance(name, ast.Name)}
    assert path.parent.name == "mechanisms" or not {kind for kind in kinds if kind.endswith("Config")}
