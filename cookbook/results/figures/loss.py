"""Loss curves: the whole run, its last 30%, and the relative difference to the baseline's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cookbook.results.figures import theme
from cookbook.results.figures.canvas import Canvas, Size, quiet_axes, spread, thin
from cookbook.results.figures.series import Series, short_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INSET, _ZOOM = 0.1, 0.3
# Points of all lines of a figure together: SVGs stay below 100 KB, and a line has two a pixel.
_MOST_POINTS = 3600
# Fewer steps than this are shown as they are; of more, a running mean shows what the noise hides.
_FEW_STEPS = 120
_FEWEST_IN_INSET = 4
# Left, bottom, width and height as shares of the axes.
_INSET_BOX = (0.38, 0.42, 0.6, 0.5)
# Ticks and their labels stand below its frame.
_INSET_FOOT = 0.12


def draw_whole(cells: Sequence[Series], size: Size) -> Canvas | None:
    """All losses, with the last tenth of the steps as inset."""
    cells = [cell for cell in cells if len(cell.losses[0]) > 1]
    if not cells:
        return None
    canvas, axes = _axes(cells, size, "loss", 320)
    _lines(axes, cells, 0.0, _MOST_POINTS * 2 // 3)
    _label(canvas, axes, cells, size)
    if _num_last(cells, _INSET) >= _FEWEST_IN_INSET:
        _make_room(axes, cells)
        inset = axes.inset_axes(_INSET_BOX)
        quiet_axes(inset, size)
        inset.set_facecolor(theme.GROUND.light)
        for side in ("top", "right", "left", "bottom"):
            inset.spines[side].set(visible=True, color=theme.QUIET.light, linewidth=0.8)
        inset.tick_params(pad=3)
        inset.locator_params(nbins=4)
        inset.xaxis.set_major_formatter("{x:,.0f}")
        _lines(inset, cells, 1 - _INSET, _MOST_POINTS // 3)
        title = "last 10% of the steps"
        inset.set_title(title, fontsize=size.small, color=theme.QUIET.light, pad=4)
    return canvas


def draw_last(cells: Sequence[Series], size: Size) -> Canvas | None:
    """The last 30% of the steps, where curves that part can be seen to."""
    last = max((cell.losses[0][-1] for cell in cells if cell.losses[0]), default=0)
    cells = [cell for cell in cells if _num_after(cell, (1 - _ZOOM) * last) > 1]
    if not cells or _num_last(cells, _ZOOM) < _FEWEST_IN_INSET:
        return None
    canvas, axes = _axes(cells, size, "loss", 280)
    _lines(axes, cells, 1 - _ZOOM, _MOST_POINTS)
    _label(canvas, axes, cells, size)
    return canvas


def draw_difference(
    cells: Sequence[Series], size: Size, margin: float | None = None
) -> Canvas | None:
    """How far each loss is from its own baseline's at the same step, in percent.

    Each recipe has a baseline; of several, each label says from which.

    Args:
        margin: differences within plus or minus this share count as none; drawn as a band.
    """
    bases = {cell.name: cell for cell in cells if cell.is_baseline}
    others = [cell for cell in cells if cell.is_comparable and cell.baseline in bases]
    beside = [(cell, bases[cell.baseline or ""]) for cell in others if not cell.is_baseline]
    used = {base.name: base for cell, base in beside if len(_difference(cell, base)) > 1}
    if not used:
        return None
    found = [
        (cell if len(used) == 1 else _named_beside(cell, base), pairs)
        for cell, base in beside
        if len(pairs := _difference(cell, base)) > 1
    ]
    named = [cell for cell, _ in found]
    title, zero = "loss, % from that of the baseline of its recipe", theme.QUIET.light
    if len(used) == 1:
        (base,) = used.values()
        named.insert(0, base)
        title, zero = f"loss, % from that of {base.label}", base.colour
    canvas, axes = _axes(named, size, title, 280)
    for cell, pairs in found:
        steps, percents = [step for step, _ in pairs], [percent for _, percent in pairs]
        _line(axes, cell, steps, percents, _MOST_POINTS // (2 * len(found)))
    if margin is not None:
        axes.axhspan(-100 * margin, 100 * margin, color=theme.BAND.light, linewidth=0, zorder=0)
    axes.axhline(0, color=zero, linewidth=2)
    shown = sorted(abs(percent) for _, pairs in found for _, percent in pairs)
    # One wild step must not flatten all others; what leaves the figure is drawn to its edge.
    reach = max(1.15 * shown[int(0.98 * (len(shown) - 1))], 150 * (margin or 0.0), 1e-3)
    axes.set_ylim(-reach, reach)
    if margin is not None:
        axes.annotate(
            f"±{margin:.2%}",
            (0, 100 * margin),
            xycoords=("axes fraction", "data"),
            xytext=(4, -3),
            textcoords="offset points",
            verticalalignment="top",
            fontsize=size.small,
            color=theme.QUIET.light,
        )
    _label(canvas, axes, named, size)
    return canvas


def _named_beside(cell: Series, base: Series) -> Series:
    """The cell, with what it is held against in its label, as short as that can be."""
    own = short_labels([cell.label, base.label])[1]
    return replace(cell, label=f"{cell.label} from {own}")


def _axes(cells: Sequence[Series], size: Size, title: str, height: float) -> tuple[Canvas, Axes]:
    """A canvas with axes, and room for the names: at the right, on a phone above."""
    if size.is_narrow:
        names = 16.0 * len(cells)
        canvas = Canvas(size, height - 40 + names)
        axes = canvas.axes(44, 26 + names, size.width - 60, height - 40 - 26 - 36)
    else:
        longest = max(len(cell.label) for cell in cells)
        right = 14 + longest * size.text * 0.68
        canvas = Canvas(size, height)
        axes = canvas.axes(56, 26, size.width - 56 - right, height - 26 - 36)
    canvas.text(0, 12, title, fontsize=size.small, color=theme.QUIET.light)
    axes.set_xlabel("step", fontsize=size.small, color=theme.QUIET.light)
    axes.locator_params(axis="x", nbins=4 if size.is_narrow else 8, integer=True)
    axes.locator_params(axis="y", nbins=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0)
    return canvas, axes


def _lines(axes: Axes, cells: Sequence[Series], start: float, most: int) -> None:
    """The curves from that share of the longest one's steps on."""
    last = max(cell.losses[0][-1] for cell in cells)
    axes.margins(x=0)
    shown: list[float] = []
    for number, cell in enumerate(cells):
        width = _width(number, len(cells))
        shown += _line(axes, cell, *cell.losses, most // (2 * len(cells)), width, start * last)
    if start and shown:
        low, high = min(shown), max(shown)
        pad = 0.06 * (high - low) or 0.01
        axes.set_ylim(low - pad, high + pad)
        axes.set_xlim(start * last, last)


def _make_room(axes: Axes, cells: Sequence[Series]) -> None:
    """Raise the upper end of the axes until the inset covers no part of a curve."""
    first, last = axes.get_xlim()
    left = first + (_INSET_BOX[0] - 0.06) * (last - first)
    below = [v for cell in cells for s, v in zip(*cell.losses, strict=True) if s >= left]
    low, high = axes.get_ylim()
    if below:
        needed = low + (max(below) - low) / (_INSET_BOX[1] - _INSET_FOOT)
        axes.set_ylim(low, max(high, needed))


def _width(number: int, num: int) -> float:
    """The first line is the widest, so that those above leave its edges to be seen."""
    return 1.3 + (3.2 * (1 - number / (num - 1)) if num > 1 else 0.3)


def _line(
    axes: Axes,
    cell: Series,
    steps: Sequence[int],
    values: Sequence[float],
    most: int,
    width: float = 1.4,
    first: float = 0.0,
) -> list[float]:
    """Draw a line from step `first` on; of many steps pale, its running mean above it.

    Returns:
        the values shown.
    """
    begin = next((index for index, step in enumerate(steps) if step > first), len(steps))
    style: dict[str, Any] = {"color": cell.colour, "linestyle": cell.dash, "linewidth": width}
    if len(steps) <= _FEW_STEPS:
        axes.plot(*thin(steps[begin:], values[begin:], most), gid=cell.name, **style)
        return list(values[begin:])
    raw: dict[str, Any] = {"color": cell.colour, "linewidth": 0.6, "alpha": 0.22, "gid": cell.name}
    axes.plot(*thin(steps[begin:], values[begin:], most), **raw)
    half = max(len(steps) // 80, 2)
    middles = range(max(half, begin), len(steps) - half)
    every = max(1, len(middles) // 160)
    mean = [statistics.fmean(values[i - half : i + half + 1]) for i in middles[::every]]
    where = [steps[i] for i in middles[::every]]
    axes.plot(where, mean, zorder=3, gid=cell.name, **style)
    return list(values[begin:])


def _num_last(cells: Sequence[Series], share: float) -> int:
    """The most losses that a cell has in that last part of the steps."""
    last = max(cell.losses[0][-1] for cell in cells)
    return max(_num_after(cell, (1 - share) * last) for cell in cells)


def _num_after(cell: Series, first: float) -> int:
    return sum(step > first for step in cell.losses[0])


def _difference(cell: Series, base: Series) -> list[tuple[int, float]]:
    known = dict(zip(*base.losses, strict=True))
    return [
        (step, 100 * (loss - known[step]) / known[step])
        for step, loss in zip(*cell.losses, strict=True)
        if known.get(step)
    ]


def _label(canvas: Canvas, axes: Axes, cells: Sequence[Series], size: Size) -> None:
    """The names in the lines' colours: beside their ends, on a phone in a list above."""
    style: dict[str, Any] = {"weight": "bold", "fontsize": size.text}
    if size.is_narrow:
        for number, cell in enumerate(cells):
            canvas.text(0, 30 + 16 * number, cell.label, color=cell.colour, **style)
        return
    ends = [_end(axes, cell) for cell in cells]
    box = axes.get_position()
    low, high = box.y0 * canvas.height, box.y1 * canvas.height
    for cell, place in zip(cells, spread(ends, size.text + 3, low, high), strict=True):
        canvas.text(
            box.x1 * size.width + 8,
            canvas.height - place,
            cell.label,
            color=cell.colour,
            verticalalignment="center",
            **style,
        )


def _end(axes: Axes, cell: Series) -> float:
    """The height in pixels from the bottom at which the cell's line ends; the baseline is 0."""
    lines = [line for line in axes.get_lines() if line.get_gid() == cell.name]
    ends = [list(ys)[-1] for line in lines if len(ys := line.get_ydata())]
    # Of a line and its running mean, the mean was drawn last.
    return float(axes.transData.transform((0, ends[-1] if ends else 0.0))[1])
