"""What transformers' own tests said of our models, as tables."""

from __future__ import annotations

from varifocal.report.table import Table
from varifocal.results.hf_suite import SkippedTest, SuiteRuns


def outcome_table(runs: SuiteRuns) -> Table:
    """A row for each model."""
    rows = [[f"`{row.model}`", str(row.passed), str(row.failed), str(row.skipped)] for row in runs.rows]
    return [["model", "passed", "failed", "skipped"], *rows]


def skipped_table(runs: SuiteRuns, *, beside: str) -> Table:
    """The tests that do not run for our models while they run for `beside`, a model of transformers."""
    ran_by_none = {one.test for one in runs.skipped if beside in one.models}
    grouped: dict[str, list[SkippedTest]] = {}
    for one in runs.skipped:
        if one.test not in ran_by_none:
            grouped.setdefault(one.reason, []).append(one)
    table = [["test", "not run for", "reason"]]
    for reason, tests in sorted(grouped.items(), key=lambda item: item[1][0].test):
        models = [row.model for row in runs.rows if any(row.model in one.models for one in tests)]
        ours = len([row for row in runs.rows if row.model != beside])
        who = "all" if len(models) == ours else ", ".join(f"`{model}`" for model in models)
        table.append([", ".join(f"`{one.test}`" for one in tests), who, reason])
    return table
