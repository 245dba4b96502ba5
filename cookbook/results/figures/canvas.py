"""Paper to draw on: figures of a fixed width, saved as a small SVG that follows the theme, and PNG.

The only module that knows Matplotlib's set-up. One unit is a pixel of the figure as it is shown,
so that text has the size that is written here.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cookbook.results.figures import theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_PIXELS_PER_INCH = 72
# Twice the size, for screens of high density. Fewer colours make a smaller file; what is too large
# with the first number takes the next.
_PNG_SCALE, _PNG_COLOURS, _PNG_BYTES = 2, (128, 48, 16), 90_000
_DECIMAL = re.compile(r"-?\d+\.\d+")


@dataclass(frozen=True)
class Size:
    """How wide a figure is, in pixels, and how large its text."""

    name: str
    width: int
    text: float

    @property
    def small(self) -> float:
        return self.text - 1

    @property
    def is_narrow(self) -> bool:
        return self.width < 500


# The second is for a phone: a figure that is scaled down to its width could not be read.
WIDE = Size("wide", 760, 12.0)
NARROW = Size("narrow", 352, 11.0)


def drawing_style() -> AbstractContextManager[None]:
    """What holds while a figure is drawn: a `$` in a cell's name begins no formula."""
    import matplotlib

    return matplotlib.rc_context({"text.parse_math": False, "svg.fonttype": "none"})


class Canvas:
    """A figure of one size on which axes are laid out in pixels from the top left."""

    def __init__(self, size: Size, height: float) -> None:
        from matplotlib.figure import Figure

        self.size = size
        self.height = height
        inches = (size.width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH)
        self.figure: Figure = Figure(
            figsize=inches, dpi=_PIXELS_PER_INCH, facecolor=theme.GROUND.light
        )

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes with quiet lines: ticks without marks, a light grid, no frame but the ground."""
        bottom = self.height - top - height
        box = (
            left / self.size.width,
            bottom / self.height,
            width / self.size.width,
            height / self.height,
        )
        axes = self.figure.add_axes(box, facecolor="none")
        quiet_axes(axes, self.size)
        return axes

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        """Text at pixels from the top left; its baseline is at `y`."""
        style = {
            "fontsize": self.size.text,
            "color": theme.INK.light,
            "verticalalignment": "baseline",
            **style,
        }
        self.figure.text(x / self.size.width, 1 - y / self.height, text, **style)

    def svg(self, salt: str) -> str:
        """The figure as SVG; `salt` keeps its ids apart from those of other figures in a page."""
        import matplotlib

        file = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": salt}):
            self.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        return _slim(file.getvalue(), self.size.width, self.height)

    def png(self) -> bytes:
        """The figure as PNG of twice its size, in the light theme."""
        from PIL import Image

        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=_PIXELS_PER_INCH * _PNG_SCALE)
        small = io.BytesIO()
        with Image.open(file) as image:
            whole = image.convert("RGB")
        for colours in _PNG_COLOURS:
            small = io.BytesIO()
            few = whole.quantize(colours, dither=Image.Dither.NONE)
            few.save(small, "PNG", optimize=True)
            if small.tell() <= _PNG_BYTES:
                break
        return small.getvalue()


def quiet_axes(axes: Axes, size: Size) -> None:
    """Give axes the look of every figure here."""
    axes.tick_params(
        length=0, pad=5, labelsize=size.small, labelcolor=theme.QUIET.light, which="both"
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(color=theme.QUIET.light, linewidth=0.8)
    axes.grid(axis="y", color=theme.GRID.light, linewidth=0.8)
    axes.set_axisbelow(True)


def thin(
    xs: Sequence[float], ys: Sequence[float], most: int
) -> tuple[Sequence[float], Sequence[float]]:
    """At most about `most` of the points, such that no peak is lost.

    Each run of neighbours keeps its lowest and its highest point, in their order.
    """
    if len(xs) <= most:
        return xs, ys
    bucket = -(-2 * len(xs) // most)
    kept: list[int] = [0]
    for start in range(0, len(xs), bucket):
        indices = range(start, min(start + bucket, len(xs)))
        kept += sorted({min(indices, key=ys.__getitem__), max(indices, key=ys.__getitem__)})
    kept.append(len(xs) - 1)
    chosen = list(dict.fromkeys(kept))
    return [xs[index] for index in chosen], [ys[index] for index in chosen]


def spread(wanted: Iterable[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the `wanted` ones that are at least `gap` apart, within `low` and `high`.

    Labels at the ends of lines would cover each other where the lines meet.
    """
    places = list(wanted)
    order = sorted(range(len(places)), key=places.__getitem__)
    gap = min(gap, (high - low) / max(len(places) - 1, 1))
    limit = high
    for index in reversed(order):
        places[index] = min(places[index], limit)
        limit = places[index] - gap
    limit = low
    for index in order:
        places[index] = max(places[index], limit)
        limit = places[index] + gap
    return places


def standalone(svg: str) -> str:
    """A figure's SVG with the style sheet that it needs where no page has it."""
    head, end, body = svg.partition(">")
    return f"{head}{end}<style>{style_sheet()}</style>{body}"


def style_sheet() -> str:
    """What figures need of a style sheet: fonts, line ends, and the dark theme."""
    return (
        f"svg text{{font-family:{_FONTS};font-variant-numeric:tabular-nums}}"
        f"svg path{{stroke-linejoin:round;stroke-linecap:butt}}{theme.dark_rules()}"
    )


def _slim(svg: str, width: float, height: float) -> str:
    """Matplotlib's SVG without what no reader needs, in tenths of a pixel."""
    _, _, body = svg.partition("</metadata>")
    for what in (
        r"<style.*?</style>",
        # Its group names (`axes_1`) are the same in every figure; ids must differ within a page.
        r'(?<=<g) id="[^"]*"',
        r' transform="rotate\(-0 [^"]*"',
        r"font-family: [^;\"]*; ?",
        r'<path d="[^"]*" style="fill: none"/>',
        r"<defs>\s*</defs>",
    ):
        body = re.sub(what, "", body, flags=re.DOTALL)
    # Taking out an empty group may leave another one empty.
    while (less := re.sub(r"<g/>|<g>\s*</g>", "", body)) != body:
        body = less
    body = re.sub(r' d="([^"]*)"', lambda found: f' d="{_short(found[1])}"', body)
    body = re.sub(r' (x|y|transform)="([^"]*)"', _short_attribute, body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">{body.strip()}\n'
    )


def _short(path: str) -> str:
    text = _DECIMAL.sub(lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), path)
    return " ".join(text.split())


def _short_attribute(found: re.Match[str]) -> str:
    value = _DECIMAL.sub(lambda number: f"{float(number[0]):.2f}", found[2])
    return f' {found[1]}="{value}"'
