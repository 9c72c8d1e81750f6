"""Counts how transformers' tests ended for each model, and writes it down with the reasons for skipping some."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from varifocal.environment import environment
from varifocal.results.hf_suite import SkippedTest, SuiteRow, SuiteRuns


class Outcomes:
    """Listens to the reports of all processes."""

    def __init__(self, config: pytest.Config) -> None:
        self.found: dict[tuple[str, str], tuple[str, str]] = {}
        """By model and test: the outcome, and the reason if it was skipped."""
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Parts of a test are counted by the test.
        if type(report) is not pytest.TestReport or (report.when != "call" and report.passed):
            return
        model, test = report.nodeid.split("::")[1:]
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
        self.found[model.removeprefix("Test_"), test] = (report.outcome, without_classes(reason))

    def pytest_sessionfinish(self) -> None:
        import transformers

        counts = Counter((model, outcome) for (model, _), (outcome, _) in self.found.items())
        rows = tuple(
            SuiteRow(
                model=model,
                passed=counts[model, "passed"],
                failed=counts[model, "failed"],
                skipped=counts[model, "skipped"],
            )
            for model in dict.fromkeys(model for model, _ in sorted(self.found))
        )
        skipped: dict[tuple[str, str], list[str]] = {}
        for (model, test), (outcome, reason) in sorted(self.found.items()):
            if outcome == "skipped":
                skipped.setdefault((test, reason), []).append(model)
        SuiteRuns(
            environment=environment(),
            transformers=transformers.__version__,
            checkout=version_of(Path(os.environ["TRANSFORMERS"])),
            rows=rows,
            skipped=tuple(
                SkippedTest(test=test, reason=reason, models=tuple(models))
                for (test, reason), models in sorted(skipped.items())
            ),
        ).write(Path(self.config.getoption("--suite-json")))


def without_classes(reason: str) -> str:
    """A reason without the class that it speaks of: one for all models."""
    return re.sub(r"<class '[\w.]+'>|\b(Varifocal|Qwen3)\w+", "the model", reason)


def version_of(checkout: Path) -> str:
    """What a checkout calls itself."""
    found = re.search(r'^ *version="([^"]+)"', (checkout / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else "unknown"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite-json", help="where to write how many tests passed, and what was skipped why")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--suite-json") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config))
