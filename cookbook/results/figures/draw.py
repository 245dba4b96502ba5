"""All figures of a run, each in two widths, with what they show in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cookbook.results.figures.canvas import NARROW, WIDE, Canvas, Size, drawing_style
from cookbook.results.figures.load import draw_load
from cookbook.results.figures.loss import draw_difference, draw_last, draw_whole
from cookbook.results.figures.memory import draw_memory
from cookbook.results.figures.series import Series, all_series
from cookbook.results.figures.steps import draw_steps
from cookbook.results.figures.throughput import draw_throughput
from cookbook.results.loss import MARGIN
from cookbook.results.result import RunResults
from cookbook.results.speed import LEVEL, STALL

Draw = Callable[[Sequence[Series], Size], Canvas | None]


@dataclass(frozen=True)
class Drawing:
    """A figure of a run.

    Attributes:
        name: of its files, without a suffix.
        caption: what it shows, and how it was made.
        wide, narrow: SVG without its style sheet, as it stands in a page.
        png: the wide one.
    """

    name: str
    title: str
    caption: str
    wide: str
    narrow: str
    png: bytes


@dataclass(frozen=True)
class _Plan:
    name: str
    title: str
    caption: str
    draw: Draw


_PLANS = (
    _Plan(
        "throughput",
        "Throughput",
        "Median of the logged steps after warm-up. The full part of a bar is what a cell gains "
        "over the baseline (dotted line); a red outline is what it lacks. Outlined bars: "
        f"published numbers. Whiskers: the {LEVEL:.0%} interval of the speed-up.",
        draw_throughput,
    ),
    _Plan(
        "loss",
        "Loss",
        "Every logged step. Of many steps pale, with the centred running mean over a fortieth of "
        "them. The inset shows the last 10%. Of curves that meet, the first one is the widest.",
        draw_whole,
    ),
    _Plan(
        "loss-last",
        "Loss, last 30%",
        "The same curves where they are flat, so that a small gap shows.",
        draw_last,
    ),
    _Plan(
        "loss-difference",
        "Loss against the baseline",
        "Each cell against the baseline of its recipe, at each step that both logged; of many "
        "steps pale, with the running mean. The band is "
        f"the margin within which losses count as equivalent, ±{MARGIN:.2%}.",
        partial(draw_difference, margin=MARGIN),
    ),
    _Plan(
        "step-time",
        "Step time",
        f"Triangles: stalls, steps that took {STALL:g} times the median or more. Dashed lines: "
        "restarts. What is longer than a strip is high ends at its edge.",
        draw_steps,
    ),
    _Plan(
        "memory",
        "Memory",
        "The most that any rank reserved at any step; the outline is the GPU's memory.",
        draw_memory,
    ),
    _Plan(
        "router-load",
        "Router load",
        "Curves: the tokens of a layer's busiest expert over the mean of its experts, of the "
        "median layer and, pale, of the most and the least uneven one; 1x is even. Map: every "
        "expert, a row for each layer; the full colour is three times the mean, none is no token.",
        draw_load,
    ),
)


NAMES = tuple(plan.name for plan in _PLANS)


def draw_figures(results: RunResults) -> list[Drawing]:
    """Every figure for which the logs hold the numbers.

    Raises:
        ModuleNotFoundError: where Matplotlib is not installed.
    """
    cells = all_series(results)
    with drawing_style():
        found = [_draw(plan, cells) for plan in _PLANS]
    return [drawing for drawing in found if drawing is not None]


def _draw(plan: _Plan, cells: Sequence[Series]) -> Drawing | None:
    wide, narrow = plan.draw(cells, WIDE), plan.draw(cells, NARROW)
    if wide is None or narrow is None:
        return None
    return Drawing(
        plan.name,
        plan.title,
        plan.caption,
        wide.svg(f"{plan.name}-wide"),
        narrow.svg(f"{plan.name}-narrow"),
        wide.png(),
    )
