"""transformers' auto classes find a saved model where nobody has imported this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.model.models import random_tokens, small_model
from varifocal.model import VarifocalConfig, load_model
from varifocal.model.auto_classes import AUTO_MAP, FILE, SOURCE

LOAD = """
import sys, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folder, again = sys.argv[1:]
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
except ValueError as error:
    print("trust_remote_code" in str(error))
print("varifocal" in sys.modules)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
print(type(model).__module__, type(model).__name__)
print(type(AutoConfig.from_pretrained(folder)).__name__, type(AutoModel.from_pretrained(folder)).__name__)
model.save_pretrained(again)
"""


def test_auto_classes_load_a_saved_model_without_an_import(tmp_path: Path) -> None:
    model = small_model("context_adaptive")
    first, again = tmp_path / "first", tmp_path / "again"
    model.save_pretrained(first)
    home = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, str(first), str(again)], env=home, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True",
        "False",
        "varifocal.model.modeling VarifocalForCausalLM",
        "VarifocalConfig VarifocalModel",
    ]
    # Saved once more, it is the same folder: no source of this package was copied into it.
    assert sorted(file.name for file in again.iterdir()) == sorted(file.name for file in first.iterdir())
    for name in ("config.json", FILE):
        assert (again / name).read_text() == (first / name).read_text()
    tokens = random_tokens(1, 9)
    with torch.no_grad():
        assert torch.equal(load_model(again)(tokens).logits, model(tokens).logits)


def test_the_file_beside_a_model_imports_this_package_and_no_more(tmp_path: Path) -> None:
    VarifocalConfig().save_pretrained(tmp_path)
    assert (tmp_path / FILE).read_text() == SOURCE
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    found: dict[str, Any] = {}
    exec(SOURCE, found)
    assert [found[name.partition(".")[2]].__name__ for name in AUTO_MAP.values()] == found["__all__"]


def test_a_config_that_names_other_code_is_not_believed(tmp_path: Path) -> None:
    model = small_model("dense")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "somebody/repository--evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path).config.auto_map == AUTO_MAP
