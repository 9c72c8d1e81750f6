"""A real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from tests.explorer.models import small_explorer
from tests.explorer.serving import Server

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

# A loaded machine answers late; a page that is right stays right.
expect.set_options(timeout=60_000)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("there is no Chromium here; the browser tests run after: apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def gated() -> Iterator[Server]:
    """One gated model."""
    with Server(small_explorer("head_gated")) as server:
        yield server


@pytest.fixture(scope="session")
def two() -> Iterator[Server]:
    """A gated model with learned widths beside a dense one."""
    with Server(small_explorer("context_adaptive", "dense")) as server:
        yield server


class Visit:
    """A fresh page, and everything it asked for or complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", self.note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        page.set_default_timeout(60_000)

    def note(self, request: Request) -> None:
        self.requests.append(request.url)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield Visit(context.new_page())
    context.close()
