"""Throughput by cell, with what each gains over the baseline, and the published numbers beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cookbook.results.figures import theme
from cookbook.results.figures.canvas import Canvas, Size
from cookbook.results.figures.series import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR, _OUTLINE, _NAME, _GAP = 16.0, 14.0, 18.0, 16.0
_BOTTOM = 44.0
# How much of a cell's colour the part has that the baseline reaches as well.
_COMMON = 0.35
_LETTER = 0.56


def draw_throughput(cells: Sequence[Series], size: Size) -> Canvas | None:
    """Bars from 0; None where no cell has a number, measured or published."""
    numbers = [n for cell in cells for n in (cell.tokens_high, cell.tokens, cell.published) if n]
    if not numbers:
        return None
    heights = [_height(cell) for cell in cells]
    canvas = Canvas(size, 8 + sum(heights) + _BOTTOM)
    width = size.width - 20.0
    axes = canvas.axes(4, 8, width, sum(heights))
    axes.set(xlim=(0, max(numbers) * 1.02), ylim=(sum(heights), 0), yticks=[])
    axes.grid(axis="x", color=theme.GRID.light, linewidth=0.8)
    axes.xaxis.set_major_formatter("{x:,.0f}" if max(numbers) >= 10 else "{x:g}")
    axes.locator_params(axis="x", nbins=4 if size.is_narrow else 7)
    # A number that is centred on the first or last tick would leave the figure.
    axes.get_xticklabels()[0].set_horizontalalignment("left")
    axes.set_xlabel("tokens/s per GPU", fontsize=size.small, color=theme.QUIET.light)
    top = 0.0
    for cell, height in zip(cells, heights, strict=True):
        _draw_cell(axes, cell, top, size, max(numbers) * 1.02 / width)
        # Beside the cells of its own recipe: a run may have a baseline for each.
        if cell.base_tokens and len(cells) > 1:
            ends = [top, top + height]
            axes.plot(
                [cell.base_tokens] * 2, ends, color=theme.INK.light, lw=0.9, linestyle=(0, (2, 2))
            )
        top += height
    return canvas


def _height(cell: Series) -> float:
    return _NAME + _BAR + _GAP + (_OUTLINE + 3 if cell.published else 0)


def _draw_cell(axes: Axes, cell: Series, top: float, size: Size, per_pixel: float) -> None:
    ground = {"facecolor": theme.GROUND.light, "edgecolor": "none", "pad": 1.0}
    text: dict[str, Any] = {"verticalalignment": "bottom", "bbox": ground}
    axes.text(
        0, top + _NAME - 2, cell.label, color=cell.colour, fontsize=size.text, weight="bold", **text
    )
    axes.text(
        axes.get_xlim()[1],
        top + _NAME - 2,
        _said(cell),
        horizontalalignment="right",
        fontsize=size.text,
        color=theme.INK.light if cell.tokens else theme.QUIET.light,
        **text,
    )
    middle = top + _NAME + _BAR / 2
    if cell.tokens:
        _bar(axes, cell, middle)
    else:
        axes.plot([0, 0], [top + _NAME, top + _NAME + _BAR], color=cell.colour, linewidth=2)
    if cell.published:
        middle = top + _NAME + _BAR + 3 + _OUTLINE / 2
        axes.barh(
            middle, cell.published, _OUTLINE - 1.4, facecolor="none", edgecolor=cell.colour, lw=1.2
        )
        gain = cell.published_speedup
        said = f"published {_tokens(cell.published)}" + (_gain(gain) if gain else "")
        room = cell.published - 10 * per_pixel
        fits = len(said) * size.small * _LETTER * per_pixel < room
        axes.text(
            6 * per_pixel + (0 if fits else cell.published),
            middle,
            said,
            verticalalignment="center_baseline",
            fontsize=size.small,
            color=theme.QUIET.light,
        )


def _bar(axes: Axes, cell: Series, middle: float) -> None:
    """Pale as far as the baseline reaches too; what is gained is full, what is lost outlined."""
    assert cell.tokens is not None
    base = cell.base_tokens
    if cell.speedup is None or base is None or cell.is_baseline:
        # Without a speed-up there is nothing to tell apart; an unfinished cell is pale throughout.
        alpha = 1.0 if cell.is_baseline and cell.note is None else _COMMON
        axes.barh(middle, cell.tokens, _BAR, color=cell.colour, alpha=alpha)
        return
    common = min(cell.tokens, base)
    axes.barh(middle, common, _BAR, color=cell.colour, alpha=_COMMON)
    if cell.tokens > base:
        axes.barh(middle, cell.tokens - base, _BAR, left=base, color=cell.colour)
    else:
        axes.barh(
            middle,
            base - cell.tokens,
            _BAR - 1.2,
            left=cell.tokens,
            facecolor="none",
            edgecolor=theme.ALARM.light,
            linestyle=(0, (2, 2)),
        )
    if cell.tokens_low is not None and cell.tokens_high is not None:
        low, high = cell.tokens - cell.tokens_low, cell.tokens_high - cell.tokens
        axes.errorbar(
            cell.tokens,
            middle,
            xerr=[[max(low, 0.0)], [max(high, 0.0)]],
            ecolor=theme.INK.light,
            elinewidth=1.2,
            capsize=3,
        )


def _said(cell: Series) -> str:
    if cell.tokens is None:
        return cell.note or "nothing measured"
    said = _tokens(cell.tokens)
    if cell.is_baseline:
        said += ", baseline"
    elif cell.speedup is not None:
        said += _gain(cell.speedup)
    return said + (f" ({cell.note})" if cell.note else "")


def _gain(speedup: float) -> str:
    percent = (speedup - 1) * 100
    sign = "+" if percent >= 0 else "−"
    return f", {sign}{abs(percent):.1f}%"


def _tokens(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
