"""Runs clients against our models, and writes down which version of each did what.

A test of a client names it with `@pytest.mark.client("peft")`, and its docstring says what was run. Where the client is
not installed the test is skipped with that reason. `make clients` has all of them, and writes results/clients.json.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from varifocal.environment import environment
from varifocal.results.clients import ClientRow, ClientRuns

OUTCOMES = pytest.StashKey[list[ClientRow]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--clients-json", help="where to write what was run, with versions and outcomes")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "client" in item.keywords:
            # What the clients warn of is theirs.
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def installed_version(client: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(client)
    except importlib.metadata.PackageNotFoundError:
        return None


def clients_of(item: pytest.Item) -> list[str]:
    """The packages that a test is about."""
    mark = item.get_closest_marker("client")
    assert mark is not None, f"{item.nodeid} needs @pytest.mark.client, with the client's package"
    return [str(name) for name in mark.args]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for client in clients_of(item):
        if installed_version(client) is None:
            pytest.skip(f"{client} is not installed; `make clients` runs this in an environment of its own")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" or report.failed:
        described: Any = item.obj.__doc__ if isinstance(item, pytest.Function) else None
        assert described, f"{item.nodeid} needs a docstring that says what was run"
        case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
        client, *others = clients_of(item)
        item.config.stash[OUTCOMES].append(
            ClientRow(
                client=client,
                version=installed_version(client) or "",
                with_versions={other: installed_version(other) or "" for other in others},
                ran=" ".join(described.split()).rstrip("."),
                case=case,
                outcome=report.outcome,
            )
        )
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Where more than this folder is run, pytest asks it for options too late.
    wanted = session.config.getoption("--clients-json", default=None)
    if wanted:
        rows = session.config.stash[OUTCOMES]
        ClientRuns(environment=environment(), rows=tuple(rows)).write(Path(wanted))
