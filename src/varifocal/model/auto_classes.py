"""How transformers' auto classes find a saved model's classes where nobody has imported this package yet.

transformers has no entry points for models. What it has is `auto_map`: a model's folder names a file of its own that
holds the classes, and `trust_remote_code=True` allows it to be run. Ours imports the installed package and no more.
"""

from __future__ import annotations

from pathlib import Path

FILE = "modeling_varifocal.py"

CLASSES = {
    "AutoConfig": "VarifocalConfig",
    "AutoModel": "VarifocalModel",
    "AutoModelForCausalLM": "VarifocalForCausalLM",
}
"""By auto class: the class of varifocal.model that it makes."""

AUTO_MAP = {auto: f"{FILE.removesuffix('.py')}.{ours}" for auto, ours in CLASSES.items()}
"""What config.json says."""

SOURCE = f'''"""Where transformers finds this model's classes, with trust_remote_code=True: in the package varifocal."""

from varifocal.model import {", ".join(CLASSES.values())}

__all__ = [{", ".join(f'"{name}"' for name in CLASSES.values())}]
'''


def write_auto_classes(folder: str | Path) -> None:
    """Put the file that AUTO_MAP names into a model's folder."""
    (Path(folder) / FILE).write_text(SOURCE, encoding="utf-8")
