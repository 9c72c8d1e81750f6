"""The documentation runs as it stands, and says what the code says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import varifocal
from varifocal import MECHANISMS, GateConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MECHANISM_PAGES = sorted((DOCS / "mechanisms").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *MECHANISM_PAGES]
SECTIONS = [
    "The paper's equation",
    "Ours",
    "What the paper leaves open",
    "Options",
    "Cost",
    "Limits and traps",
    "Example",
]


class Block(NamedTuple):
    """A block of Python in a page."""

    page: Path
    line: int
    """The line of the page, counted from 1, on which the code begins."""
    code: str


def python_blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(page, text.count("\n", 0, match.start(1)) + 1, match.group(1)) for match in found]


def block_name(block: Block) -> str:
    return f"{block.page.relative_to(ROOT)}:{block.line}"


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def section(page: Path, title: str) -> str:
    """The text below a heading of the second level, up to the next one."""
    _, _, below = page.read_text(encoding="utf-8").partition(f"\n## {title}\n")
    return below.partition("\n## ")[0]


def documented_options(page: Path) -> dict[str, str]:
    """The options table of a page: each field and its default, as Python."""
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section(page, "Options"), flags=re.MULTILINE)
    return dict(rows)


def assert_options_match(page: Path, config: Any) -> None:
    """The options table of `page` holds the fields of `config`, in order, with their values."""
    options = documented_options(page)
    assert list(options) == [field.name for field in fields(config)]
    for name, default in options.items():
        assert eval(default, {"GateConfig": GateConfig}) == getattr(config, name), f"default of {name}"


@pytest.mark.parametrize("block", [block for page in PAGES for block in python_blocks(page)], ids=block_name)
def test_python_block_runs_as_it_stands(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    # What an example registers is forgotten again.
    monkeypatch.setattr(MECHANISMS, "_known", dict(MECHANISMS._known))
    # Empty lines in front make a traceback name the line of the page.
    code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec", dont_inherit=True)
    exec(code, {"__name__": "example"})


def test_every_python_fence_is_found() -> None:
    for page in PAGES:
        assert len(python_blocks(page)) == page.read_text(encoding="utf-8").count("```python"), page_name(page)


def test_every_mechanism_has_a_page_and_every_page_a_mechanism() -> None:
    assert {page.stem for page in MECHANISM_PAGES} == set(MECHANISMS.ours)


@pytest.mark.parametrize("page", MECHANISM_PAGES, ids=page_name)
def test_mechanism_page_has_its_sections_in_order(page: Path) -> None:
    assert re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE) == SECTIONS


@pytest.mark.parametrize("page", MECHANISM_PAGES, ids=page_name)
def test_mechanism_page_has_one_example_of_at_most_8_lines(page: Path) -> None:
    (block,) = python_blocks(page)
    # The formatter wants a blank line after the imports: lines of code count.
    assert sum(bool(line) for line in block.code.splitlines()) <= 8
    assert block.code in section(page, "Example")


@pytest.mark.parametrize("page", MECHANISM_PAGES, ids=page_name)
def test_mechanism_page_lists_every_option_with_its_default(page: Path) -> None:
    assert_options_match(page, MECHANISMS[page.stem].config_type())


def test_gates_page_lists_every_option_with_its_default() -> None:
    assert_options_match(DOCS / "gates.md", GateConfig())


def test_equation_page_names_every_branch_and_score() -> None:
    text = (DOCS / "equation.md").read_text(encoding="utf-8")
    exported = {name: getattr(varifocal, name) for name in varifocal.__all__}
    bases = (varifocal.Branch, varifocal.FixedBranch, varifocal.Score)
    values = [name for name, value in exported.items() if isinstance(value, type) and issubclass(value, bases)]
    missing = [name for name in values if exported[name] not in bases and f"| `{name}(" not in text]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_site_leads_to_every_page_and_needs_no_other_host() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if page not in settings} == set()
    (script,) = re.findall(r"polyfills: \[(.+)\]", settings)
    # By its name the plugin `offline` knows that it needs to load none.
    assert "iframe-worker" in script
    assert (ROOT / script).is_file()
    assert "http" not in (ROOT / script).read_text()
