"""The page of a report in a real browser: all is there, legible, and asks nobody."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cookbook.results.figures import theme
from tests.browser import chromium, opened
from tests.made_up_run import make_run
from tests.submit import ROOT, submit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

WIDTHS = (400, 1600)
SCHEMES = ("light", "dark")
FIGURES = [
    *("throughput", "loss", "loss-last", "loss-difference", "step-time", "memory"),
    "router-load",
]
# WCAG's AA for text.
CONTRAST = 4.5
SMALLEST = 10.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def page_of(runs: Path) -> Path:
    answer = submit("report", "--format", "html", runs=runs, timeout=120)
    assert (answer.status, answer.stderr) == (0, ""), answer
    return Path(answer.stdout.strip())


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of four cells of 1,500 steps."""
    runs = tmp_path_factory.mktemp("full")
    make_run(runs)
    return page_of(runs)


@pytest.fixture(scope="module")
def partly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run that is not at its end."""
    runs = tmp_path_factory.mktemp("partly")
    make_run(runs, steps=300, partly=True)
    return page_of(runs)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a real run of six steps on a CPU."""
    runs = tmp_path_factory.mktemp("small")
    shutil.copytree(ROOT / "tests" / "old_run", runs / "matrix-20261121-192057")
    return page_of(runs)


@pytest.fixture(params=["full", "partly"])
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_is_there_and_nobody_is_asked(
    browser: Browser, full: Path, width: int
) -> None:
    with opened(browser, full, width) as seen:
        figures = seen.figures()
        assert [figure["name"] for figure in figures] == [f"figure-{name}" for name in FIGURES]
        for figure in figures:
            left, top, right, bottom = figure["box"]
            assert left >= 0 and right <= width and right - left > 300 and bottom - top > 100
            assert figure["marks"] > 8, figure["name"]
        assert seen.said == []
        assert [url for url in seen.asked if not url.startswith("data:")] == [full.as_uri()]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_texts_are_legible(browser: Browser, page: Path, width: int, scheme: str) -> None:
    light = {rgb(colour.light) for colour in theme.ALL}
    dark = {rgb(colour.dark) for colour in theme.ALL}
    other_theme = dark - light if scheme == "light" else light - dark
    with opened(browser, page, width, color_scheme=scheme) as seen:
        assert seen.page.evaluate("document.documentElement.scrollWidth") == width
        for figure in seen.figures():
            assert luminance(figure["ground"]) == pytest.approx(float(scheme == "light"), abs=0.02)
            assert figure["texts"], figure["name"]
            for text in figure["texts"]:
                assert text["pixels"] * figure["scale"] >= SMALLEST, text
                assert contrast(text["colour"], figure["ground"]) >= CONTRAST, text
                assert is_within(text["box"], figure["box"]), text
            assert not set(figure["colours"]) & other_theme, figure["name"]
            for one, other in combinations(figure["texts"], 2):
                assert not overlap(one["box"], other["box"]), (figure["name"], one, other)
        ground = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        inks = seen.page.evaluate(
            "[...document.querySelectorAll('h1, h2, p, li, th, td, figcaption, dt, dd')]"
            ".map(e => getComputedStyle(e).color)"
        )
        assert luminance(ground) == pytest.approx(float(scheme == "light"), abs=0.02)
        assert len(inks) > 50 and min(contrast(ink, ground) for ink in set(inks)) >= CONTRAST
        small = seen.page.evaluate(
            "[...document.querySelectorAll('main p, main li, td, th, figcaption')]"
            f".filter(e => parseFloat(getComputedStyle(e).fontSize) < {SMALLEST + 2})"
            ".map(e => e.textContent)"
        )
        assert small == []


def test_without_scripts_all_is_there(browser: Browser, full: Path) -> None:
    with opened(browser, full, java_script_enabled=False) as seen:
        assert seen.page.locator("figure svg:visible").count() == len(FIGURES)
        assert seen.page.locator("thead button").count() == 0
        assert seen.column("table-cells", 1)[0] == "671b-bf16-standard"


def test_a_click_on_a_heading_sorts(browser: Browser, full: Path) -> None:
    with opened(browser, full) as seen:
        heading = seen.page.locator("#table-cells thead th", has_text="tokens/s/GPU")
        assert heading.get_attribute("aria-sort") is None
        heading.locator("button").click()
        assert seen.column("table-cells", 4) == ["655", "701", "853", "922"]
        assert heading.get_attribute("aria-sort") == "ascending"
        heading.locator("button").click()
        assert seen.column("table-cells", 4) == ["922", "853", "701", "655"]
        assert seen.column("table-cells", 1)[0] == "671b-mxfp8-deepep"
        # Thousands are more than hundreds.
        last = "#table-cells tbody tr:last-child > :nth-child(4)"
        seen.page.evaluate(f"document.querySelector('{last}').textContent = '1,655'")
        for expected in (["701", "853", "922", "1,655"], ["1,655", "922", "853", "701"]):
            heading.locator("button").click()
            assert seen.column("table-cells", 4) == expected
        # What is not known stays last, in either direction.
        published = seen.page.locator("#table-published thead button").nth(1)
        published.click()
        assert seen.column("table-published", 2) == ["651", "859", "918", "-"]
        published.click()
        assert seen.column("table-published", 2) == ["918", "859", "651", "-"]
        # With signs and without, as numbers.
        seen.page.locator("#table-speed thead button").nth(5).click()
        assert seen.column("table-speed", 6) == ["4", "6", "8", "10"]
        seen.page.locator("#table-loss-verdicts thead button").nth(3).click()
        gaps = [float(text) for text in seen.column("table-loss-verdicts", 4)]
        assert gaps == sorted(gaps) and gaps[0] < 0 < gaps[-1]
        # Names that begin with digits are words.
        for _ in range(2):
            seen.page.locator("#table-cells thead button").first.click()
        names = seen.column("table-cells", 1)
        assert names == sorted(names, reverse=True)
        tables, sortable = (
            seen.page.locator(what).count() for what in ("table", "table:has(thead button)")
        )
        assert tables == sortable == 7


def test_the_keyboard_sorts_and_words_sort_as_words(browser: Browser, partly: Path) -> None:
    with opened(browser, partly) as seen:
        seen.page.locator("#table-cells thead button").nth(1).focus()
        seen.page.keyboard.press("Enter")
        status = seen.column("table-cells", 2)
        assert status == sorted(status) and len(set(status)) > 2


def test_paper_is_light(browser: Browser, full: Path) -> None:
    with opened(browser, full, 700, color_scheme="dark") as seen:
        seen.page.emulate_media(media="print", color_scheme="dark")
        ground = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert luminance(ground) == pytest.approx(1)
        for figure in seen.figures():
            assert luminance(figure["ground"]) == pytest.approx(1)
            assert figure["box"] is not None
        assert seen.page.pdf(format="A4").count(b"/Type /Page\n") in range(2, 7)


def test_a_run_that_is_not_at_its_end_says_so(browser: Browser, partly: Path) -> None:
    with opened(browser, partly) as seen:
        (alert,) = seen.page.locator(".alert").all_inner_texts()
        assert alert.startswith("partly finished: 1 of 4 cells finished")


def test_a_real_run_on_a_cpu(browser: Browser, small: Path) -> None:
    with opened(browser, small, 400) as seen:
        assert seen.said == []
        names = [figure["name"] for figure in seen.figures()]
        assert names == ["figure-throughput", "figure-loss", "figure-step-time", "figure-memory"]


def test_a_figure_by_itself_follows_the_theme(browser: Browser, full: Path) -> None:
    grounds = []
    for scheme in SCHEMES:
        path = full.parent / "figures" / "loss.svg"
        with opened(browser, path, color_scheme=scheme) as seen:
            fill = "getComputedStyle(document.querySelector('path')).fill"
            grounds.append(luminance(seen.page.evaluate(fill)))
    assert grounds[0] == pytest.approx(1) and grounds[1] < 0.02


def rgb(colour: str) -> str:
    """`#0a6ebd` as a browser says it."""
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def luminance(colour: str) -> float:
    """WCAG's relative luminance of `rgb(r, g, b)`: 0 for black, 1 for white."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def is_within(inner: list[float], outer: list[float]) -> bool:
    return all(
        outer[side] - 1 <= inner[side] and inner[side + 2] <= outer[side + 2] + 1 for side in (0, 1)
    )


def overlap(one: Any, other: Any, slack: float = 2.0) -> bool:
    return all(
        one[side] + slack < other[side + 2] and other[side] + slack < one[side + 2]
        for side in (0, 1)
    )
