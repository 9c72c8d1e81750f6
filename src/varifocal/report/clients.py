"""What other packages did with our models, as a table."""

from __future__ import annotations

from varifocal.report.table import Table
from varifocal.results.clients import ClientRow, ClientRuns

OUTCOMES = {"passed": "works", "failed": "fails", "skipped": "not run"}


def client_table(runs: ClientRuns) -> Table:
    """A row for each thing that a client did, for all mechanisms together where they fared alike."""
    table = [["client", "version", "what was run", "with", "outcome"]]
    grouped: dict[tuple[str, str, str], list[ClientRow]] = {}
    for row in runs.rows:
        grouped.setdefault((row.client, row.ran, row.outcome), []).append(row)
    for (client, ran, outcome), rows in sorted(grouped.items(), key=lambda item: item[0][0]):
        cases = ", ".join(f"`{row.case}`" for row in rows if row.case is not None)
        table.append([client, versions(rows[0]), ran, cases, OUTCOMES[outcome]])
    return table


def versions(row: ClientRow) -> str:
    """The client's version, and those of others that took part."""
    return ", ".join([row.version, *(f"{name} {version}" for name, version in row.with_versions.items())])
