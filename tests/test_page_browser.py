"""The page of a report in a real browser: positions at three widths, light and dark."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cookbook.results.page import save_report
from tests.made_up_run import DRAWN, Run, make_run, metrics_line, results_of
from tests.submit import submit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Skip where there is no browser, and say how to get it; in CI (CI=true) fail instead."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        reason = "no Chromium found; on Debian: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(f"a browser is required in CI: {reason}", pytrace=False)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Root has no sandbox; the page is our own.
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


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


pytestmark = pytest.mark.browser

WIDTHS = (390, 1280, 1920)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of four cells of 1,000 steps."""
    folder = make_run(tmp_path_factory.mktemp("full"), steps=1000)
    save_report(*results_of(folder))
    return folder / "report.html"


def drawn(seen: Opened) -> Opened:
    seen.page.wait_for_function(
        f"document.querySelectorAll('.chart svg').length == {len(DRAWN) - 1}"
    )
    return seen


@pytest.mark.parametrize("width", WIDTHS)
def test_the_answer_is_first_and_charts_are_wide(browser: Browser, full: Path, width: int) -> None:
    with opened(browser, full, width) as seen:
        drawn(seen)
        assert seen.page.evaluate("document.documentElement.scrollWidth") == width
        order = ["#in-short", "#table-cells", *(f"#figure-{name}" for name in DRAWN), "#conditions"]
        tops = [seen.boxes(selector)[0]["top"] for selector in order]
        assert tops == sorted(tops) and tops[0] < 200
        figures = seen.boxes("figure")
        for figure in figures:
            assert figure["left"] >= 0 and figure["right"] <= width
            assert figure["bottom"] - figure["top"] > 150
        # Beside one another where there is room, over the page's whole width.
        columns = len({round(figure["left"]) for figure in figures})
        assert columns == {390: 1, 1280: 2, 1920: 3}[width]
        assert max(figure["right"] for figure in figures) > 0.94 * width
        assert seen.boxes("#table-cells")[0]["right"] > 0.94 * width
        if width > 1000:
            assert max(table["right"] for table in seen.boxes("table")) <= width
        for heading in seen.boxes("thead button"):
            # Wrapped between words alone.
            is_word = not set(" -/_") & set(heading["text"])
            assert not is_word or heading["bottom"] - heading["top"] < 2 * heading["size"], heading
        assert seen.logged == []
        assert [url for url in seen.requested if not url.startswith("data:")] == [full.as_uri()]


def test_a_phone_shows_speed_and_loss_without_scrolling(browser: Browser, full: Path) -> None:
    with opened(browser, full, 390) as seen:
        for heading in ("tokens/s/GPU", "speed-up", "final loss"):
            headings = [box["text"].strip() for box in seen.boxes("#table-cells thead th")]
            number = headings.index(heading) + 1
            for cell in seen.boxes(f"#table-cells tr > :nth-child({number})"):
                assert 0 < cell["left"] < cell["right"] <= 390, (heading, cell)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_texts_are_legible_and_apart(browser: Browser, full: Path, width: int, scheme: str) -> None:
    with opened(browser, full, width, color_scheme=scheme) as seen:
        drawn(seen)
        ground = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert luminance(ground) == pytest.approx(float(scheme == "light"), abs=0.02)
        words = seen.boxes(
            "h1, h2, h3, p, li, th, td, figcaption, .bar span, .legend span, svg text"
        )
        assert len(words) > 150
        for word in words:
            # WCAG's AA for text.
            assert word["size"] >= 12 and contrast(word["colour"], ground) >= 4.5, word
        for name in DRAWN:
            (figure,) = seen.boxes(f"#figure-{name}")
            texts = seen.boxes(f"#figure-{name} :is(svg text, .legend span, .bar span)")
            assert len(texts) >= 4
            for text in texts:
                assert figure["left"] - 1 <= text["left"] and text["right"] <= figure["right"] + 1
            for one, other in combinations(texts, 2):
                assert not overlap(one, other), (name, one, other)


def test_the_pointers_step_is_read_off(browser: Browser, full: Path) -> None:
    with opened(browser, full) as seen:
        drawn(seen)
        assert all(box["text"] == "" for box in seen.boxes("#figure-loss .legend b"))
        seen.page.locator("#figure-loss svg").hover()
        values = [float(box["text"]) for box in seen.boxes("#figure-loss .legend b")]
        assert len(values) == 4 and all(2 < value < 12 for value in values)


def test_figures_by_key_click_axis_and_scale(browser: Browser, full: Path) -> None:
    with opened(browser, full) as seen:
        page = drawn(seen).page

        def along(figure: str = "loss") -> list[str]:
            """The corner's text, and the numbers along the axis."""
            return [box["text"] for box in seen.boxes(f"#figure-{figure} svg text[text-anchor]")]

        page.locator("#figure-loss .legend button").last.focus()
        page.keyboard.press("Tab")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        # Three steps of a hundredth along steps 13 to 988.
        assert along()[0] == "step 42"
        names = page.locator(".legend button", has_text="bf16-deepep")
        assert names.count() == 5 and page.locator("polyline.s1").count() == 5
        names.first.press("Enter")
        assert page.locator("polyline.s1").count() == 0
        assert names.first.evaluate("node => node === document.activeElement")
        names.last.click()
        assert page.locator("polyline.s1").count() == 5
        # The losses lie on one another: each is drawn in its turn of four dashes.
        dashes = page.locator("#figure-loss polyline").evaluate_all(
            "nodes => nodes.map(node => getComputedStyle(node).strokeDashoffset)"
        )
        assert dashes == ["0px", "-9px", "-18px", "-27px"]
        page.locator("#axis").select_option("tokens")
        assert "5B" in along() and along()[-1] == "tokens"
        page.locator("#axis").select_option("time")
        assert all(re.fullmatch(r"\d+:00:00", text) for text in along("step-time")[-4:-1])
        page.locator("#log").check()
        assert {"3", "5", "7", "10"} <= set(along()) and seen.logged == []


def test_steps_are_whole_and_links_lead_to_files(browser: Browser, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.add("base", "".join(metrics_line(step, loss=f"{9 - step}") for step in (1, 2)))
    run.write(command=["submit.py", "run", "debug"])
    save_report(*results_of(run.folder))
    with opened(browser, run.folder / "report.html") as seen:
        seen.page.wait_for_selector("#figure-loss svg")
        steps = [box["text"] for box in seen.boxes("#figure-loss svg text[text-anchor]")]
        assert steps[-3:] == ["1", "2", "step"]
        links = seen.page.locator("#files a").evaluate_all("nodes => nodes.map(node => node.href)")
        assert [Path(link).name for link in links] == ["train.log", "cell.yaml"]
        assert all(Path(link.removeprefix("file://")).is_file() for link in links)
        assert "submit.py run debug" in seen.page.locator("#files").inner_text()


def test_the_page_over_all_runs_draws_what_is_ticked(browser: Browser, tmp_path: Path) -> None:
    log = "".join(metrics_line(step) for step in range(1, 5))
    for name in ("one", "two", "three"):
        run = Run(tmp_path, name=name)
        for cell in ("a", "b", "c", "d"):
            run.add(cell, log)
        run.write()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/run.json").write_text("{")
    answer = submit("report", "--all", runs=tmp_path)
    assert answer.status == 0 and "left out: " in answer.stderr
    assert answer.stdout.strip().endswith("report.html")
    wrong = submit("report", "one", "--all", runs=tmp_path)
    assert wrong.status == 2 and "leave out RUN and --format" in wrong.stderr
    with opened(browser, tmp_path / "report.html") as seen:
        seen.page.wait_for_selector("#figure-loss svg")
        assert sorted(seen.column("table-cells", 1))[:2] == ["one/a", "one/b"]
        boxes, lines = seen.page.locator("#table-cells input"), "#figure-loss polyline"
        assert boxes.count() == 12 and seen.page.locator(lines).count() == 8
        boxes.last.check()
        assert seen.page.locator(lines).count() == 9
        # The table sorts, and a box still is its cell's.
        seen.page.locator("#table-cells thead button").first.click()
        seen.page.locator("#table-cells tr", has_text="one/a").locator("input").uncheck()
        assert not {"one/a"} & {box["text"] for box in seen.boxes("#figure-loss .legend button")}
        assert (
            seen.logged == [] and seen.page.evaluate("document.documentElement.scrollWidth") == 1280
        )


def test_a_click_on_a_heading_sorts(browser: Browser, full: Path) -> None:
    with opened(browser, full) as seen:
        heading = seen.page.locator("#table-cells thead th", has_text="tokens/s/GPU")
        before = seen.column("table-cells", 2)
        heading.locator("button").click()
        assert seen.column("table-cells", 2) == sorted(before, key=float)
        heading.locator("button").click()
        assert seen.column("table-cells", 2) == sorted(before, key=float, reverse=True)
        # The unknown stays last, in either direction.
        published = seen.page.locator("#table-cells thead button").nth(9)
        numbers = ["651", "859 (1.32x)", "918 (1.41x)"]
        for expected in ([*numbers, "-"], [*numbers[::-1], "-"]):
            published.click()
            assert seen.column("table-cells", 10) == expected


def luminance(colour: str) -> float:
    """WCAG's relative luminance of `rgb(r, g, b)`: 0 for black, 1 for white."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def overlap(one: Any, other: Any, slack: float = 2.0) -> bool:
    across = one["left"] + slack < other["right"] and other["left"] + slack < one["right"]
    down = one["top"] + slack < other["bottom"] and other["top"] + slack < one["bottom"]
    return bool(across and down)
