"""Makes the tables of docs/ecosystem.md from what `make clients` and `make hf-suite` wrote to results."""

from __future__ import annotations

from pathlib import Path

from varifocal.report.clients import client_table
from varifocal.report.hf_suite import outcome_table, skipped_table
from varifocal.report.table import Table
from varifocal.results.clients import ClientRuns
from varifocal.results.environment import Environment
from varifocal.results.hf_suite import SuiteRuns

TOP = Path(__file__).parent.parent


def lines_of(table: Table) -> list[str]:
    """A table as Markdown; texts stand at the left of their columns."""
    header, *body = table
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body)]


def where(command: str, shared: Environment) -> str:
    """What was run on what."""
    return f"`{command}`, commit {shared.commit}, Python {shared.python}, torch {shared.torch}, {shared.system}."


def clients(runs: ClientRuns) -> str:
    """What was run where, and the table."""
    return "\n".join([where("make clients", runs.environment), "", *lines_of(client_table(runs))])


def suite(runs: SuiteRuns) -> str:
    """How transformers' tests ended, and which of them are not run for our models alone."""
    versions = f"transformers {runs.transformers}, the tests of a checkout that calls itself {runs.checkout}."
    first = f"{where('make hf-suite', runs.environment)[:-1]}, {versions}"
    return "\n".join(
        [
            *(first, "", *lines_of(outcome_table(runs)), ""),
            *("Skipped for our models, and run for Qwen3:", "", *lines_of(skipped_table(runs, beside="qwen3"))),
        ]
    )


def put(page: str, name: str, block: str) -> str:
    """A page with another block between the marks of that name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, rest = page.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{block}\n{end}{tail}"


def main() -> None:
    """Put the tables between their marks."""
    path, results = TOP / "docs" / "ecosystem.md", TOP / "results"
    page = put(path.read_text(encoding="utf-8"), "clients", clients(ClientRuns.read(results / "clients.json")))
    if (results / "hf_suite.json").exists():
        page = put(page, "hf_suite", suite(SuiteRuns.read(results / "hf_suite.json")))
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
