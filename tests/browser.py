"""A real browser for the tests of a report's page, and what it sees there."""

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

# Of every figure that is shown: its name, its box, and its texts with box, size and colour.
_FIGURES = """() => [...document.querySelectorAll('figure')].map(figure => {
  const svg = [...figure.querySelectorAll('svg')].find(one => one.getClientRects().length);
  const box = one => (r => [r.left, r.top, r.right, r.bottom])(one.getBoundingClientRect());
  return {
    name: figure.id,
    box: svg ? box(svg) : null,
    scale: svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 0,
    ground: svg ? getComputedStyle(svg.querySelector('path')).fill : null,
    colours: svg ? [...svg.querySelectorAll('path, rect, use')].flatMap(mark => {
      const style = getComputedStyle(mark);
      return [style.fill, style.stroke];
    }) : [],
    marks: svg ? svg.querySelectorAll('path').length : 0,
    texts: svg ? [...svg.querySelectorAll('text')].map(text => ({
      text: text.textContent,
      box: box(text),
      pixels: parseFloat(getComputedStyle(text).fontSize),
      colour: getComputedStyle(text).fill,
    })) : [],
  };
})"""


@dataclass
class Opened:
    """A page as it is shown, with all that it said and asked for."""

    page: Page
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def figures(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.page.evaluate(_FIGURES)
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
def opened(browser: Browser, path: Path, width: int = 1600, **context: Any) -> Iterator[Opened]:
    """The page at `path` in a window of that width."""
    where = browser.new_context(viewport={"width": width, "height": 900}, **context)
    try:
        page = where.new_page()
        found = Opened(page)
        page.on("console", lambda message: found.said.append(message.text))
        page.on("pageerror", lambda error: found.said.append(str(error)))
        page.on("request", lambda request: found.asked.append(request.url))
        page.goto(path.as_uri())
        yield found
    finally:
        where.close()
