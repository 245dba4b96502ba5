"""A real browser for the tests of a report's page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Opened:
    """A page as it is shown, with all that it logged and requested."""

    page: Page
    logged: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)

    def boxes(self, selector: str) -> list[dict[str, Any]]:
        """Left, top, right, bottom, colour and font size of each element, in CSS pixels."""
        found: list[dict[str, Any]] = self.page.evaluate(
            """selector => [...document.querySelectorAll(selector)].map(node => {
              const box = node.getBoundingClientRect(), style = getComputedStyle(node);
              return {
                text: node.textContent, left: box.left, top: box.top + scrollY, right: box.right,
                bottom: box.bottom + scrollY, size: parseFloat(style.fontSize),
                colour: node.namespaceURI.endsWith('svg') ? style.fill : style.color,
              };
            })""",
            selector,
        )
        return found

    def column(self, table: str, number: int) -> list[str]:
        """The texts of a column, from the top."""
        cells = self.page.locator(f"#{table} tbody tr > :nth-child({number})")
        return [text.strip() for text in cells.all_inner_texts()]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skip where there is no browser, and say how to get it; in CI (CI=true) fail instead."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        reason = "no Chromium found; on Debian: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(f"a browser is required in CI: {reason}", pytrace=False)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Root has no sandbox; the page is our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, path: Path, width: int = 1280, **context: Any) -> Iterator[Opened]:
    """The page at `path` in a window of that width."""
    where = browser.new_context(viewport={"width": width, "height": 900}, **context)
    try:
        page = where.new_page()
        found = Opened(page)
        page.on("console", lambda message: found.logged.append(message.text))
        page.on("pageerror", lambda error: found.logged.append(str(error)))
        page.on("request", lambda request: found.requested.append(request.url))
        page.goto(path.as_uri())
        yield found
    finally:
        where.close()
