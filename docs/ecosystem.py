"""Makes the table of docs/ecosystem.md from results/clients.json, which `make clients` writes."""

from __future__ import annotations

from pathlib import Path

from varifocal.report.clients import client_table
from varifocal.results.clients import ClientRuns

TOP = Path(__file__).parent.parent
BEGIN, END = "<!-- clients:begin -->", "<!-- clients:end -->"


def block(runs: ClientRuns) -> str:
    """What was run where, and the table; texts stand at the left of their columns."""
    shared = runs.environment
    header, *body = client_table(runs)
    lines = [header, ["---"] * len(header), *body]
    where = f"`make clients`, commit {shared.commit}, Python {shared.python}, torch {shared.torch}, {shared.system}."
    return "\n".join([where, "", *(f"| {' | '.join(line)} |" for line in lines)])


def main() -> None:
    """Put the table between its marks."""
    page = TOP / "docs" / "ecosystem.md"
    head, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, tail = rest.split(END)
    runs = ClientRuns.read(TOP / "results" / "clients.json")
    page.write_text(f"{head}{BEGIN}\n{block(runs)}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
