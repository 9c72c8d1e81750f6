"""The JSON files that commands write, read carefully."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_result(path: Path, *, key: str, kind: str, command: str, option: str = "--json") -> dict[str, Any]:
    """The content of a result file whose `key` is `kind`; ValueError if it is none, or not one of `command`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {path} as a result of '{command}': {error}") from error
    if not isinstance(content, dict) or content.get(key) != kind:
        raise ValueError(f"{path} is not a result of '{command}'; make one with its {option} option")
    return content
