"""The tables of what transformers' own tests said."""

from __future__ import annotations

from varifocal.environment import environment
from varifocal.report.hf_suite import outcome_table, skipped_table
from varifocal.results.hf_suite import SkippedTest, SuiteRow, SuiteRuns


def skipped(test: str, *models: str, reason: str = "needs a GPU") -> SkippedTest:
    return SkippedTest(test=test, reason=reason, models=models)


RUNS = SuiteRuns(
    environment=environment(),
    transformers="5.0",
    checkout="5.0",
    rows=tuple(
        SuiteRow(model=model, passed=5, failed=failed, skipped=3)
        for model, failed in (("dense", 0), ("local", 1), ("qwen3", 0))
    ),
    skipped=(
        skipped("test_a", "dense", "local", "qwen3"),
        skipped("test_b", "dense", "local", reason="not ours"),
        skipped("test_c", "local", reason="other"),
        skipped("test_d", "dense", "local", reason="not ours"),
    ),
)


def test_every_model_has_its_counts() -> None:
    assert outcome_table(RUNS)[2] == ["`local`", "5", "1", "3"]


def test_only_what_runs_for_the_other_model_is_listed_as_skipped() -> None:
    assert skipped_table(RUNS, beside="qwen3")[1:] == [
        ["`test_b`, `test_d`", "all", "not ours"],
        ["`test_c`", "`local`", "other"],
    ]
