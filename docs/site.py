"""Lays out the pages of the site: the documents as they stand, and pages of the public names for mkdocstrings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

TOP = Path(__file__).parent.parent
PAGES = TOP / "build/site-pages"
API = {
    "attention": ("Attention", ("varifocal.attention.attend", "varifocal.attention.gates", "varifocal.conformance")),
    "mechanisms": ("Mechanisms", ("varifocal.attention.mechanisms.base", "varifocal.attention.memories.base")),
    "branches": ("Branches and scores", ("varifocal.equations.branches.base", "varifocal.equations.scores.base")),
    "model": ("The model", ("varifocal.model.modeling", "varifocal.model.presets", "varifocal.retrofit.retrofit")),
}


def main() -> None:
    """Copy what stands in the checkout, so that links between pages hold, and add the pages of the API."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(TOP / "docs", PAGES / "docs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copytree(TOP / "results", PAGES / "results", ignore=shutil.ignore_patterns("*.json"))
    for name in ("EXPERIMENTS.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(TOP / name, PAGES / name)
    shutil.copy(TOP / "README.md", PAGES / "index.md")
    copy_linked_files()
    (PAGES / "api").mkdir()
    for name, (title, modules) in API.items():
        parts = [f"# {title}", *(f"::: {module}" for module in modules)]
        (PAGES / "api" / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def copy_linked_files() -> None:
    """Copy the files outside of docs/ that pages link to: code, configs, pyproject.toml."""
    for page in [*PAGES.glob("*.md"), *PAGES.glob("docs/**/*.md")]:
        place = Path() if page.name == "index.md" else page.relative_to(PAGES).parent
        for link in re.findall(r"\]\(([^)#:]+)[)#]", page.read_text(encoding="utf-8")):
            file = (TOP / place / link).resolve()
            if file.is_file() and not (to := PAGES / file.relative_to(TOP)).exists() and to.suffix != ".md":
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, to)


if __name__ == "__main__":
    main()
